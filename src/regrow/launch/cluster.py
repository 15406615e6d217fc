"""Server processes for a script or a notebook: `with LocalCluster(servers=5) as cluster: ...`.

Only a coordinator and servers are started; the calling process is the worker. They end with the context, with
the interpreter, or when this process dies. Tables are declared by the first client. If these are protected, a server
or a coordinator that dies is replaced, and the clients go on.

Processes that are forked from this one may connect, too, each as a worker of its own. Whatever is started later is
started by the process that made the cluster, which must live as long as it; what it has to know of the others' tables
is in memory that they share.
"""

from __future__ import annotations

import atexit
import contextlib
import mmap
import os
import secrets
import shutil
import struct
import sys
import tempfile
import threading
import time
from pathlib import Path

from regrow.core.identity import Identity
from regrow.core.job import JobSpec
from regrow.errors import ChildFailed, ConfigError, ConnectionLost, UserError
from regrow.launch.backend import Ended, News, Said, end, list_running, name_of
from regrow.launch.connect import FORMAT, Ticket, describe_protection, write_ticket
from regrow.launch.crew import Crew
from regrow.launch.orders import Stop
from regrow.launch.processes import LocalProcesses
from regrow.launch.reports import Answer, Condemn, Error, Listening, Malformed, Ready, Replace
from regrow.launch.rundir import Logs, print_warning
from regrow.launch.saving import CheckpointTimes, Saving, TieredRows
from regrow.launch.supervisor import (
    Accuse,
    Appoint,
    CoordinatorListens,
    Event,
    GiveUp,
    KeepSpares,
    NoteEnd,
    NoteSuccessor,
    ProcessAnswered,
    ProcessCondemned,
    ProcessEnded,
    ProcessFailed,
    ProcessMissed,
    ProcessReady,
    Stance,
    Supervisor,
    TakeStance,
    Tick,
)
from regrow.launch.tiers import SERVER, check_empty, remove_all
from regrow.launch.version import version
from regrow.protection import GIB, MIB, ErasureCode, Partial
from regrow.runtime.client import Client, SocketClient
from regrow.runtime.inprocess_saves import make_own_saving
from regrow.runtime.sockets import SocketDir
from regrow.runtime.transport import AUTHENTICATE

START_SECONDS_MAX = 120.0
OPEN_SECONDS_MAX = 600.0  # filling very large tables takes minutes
STOP_SECONDS = 10.0
NEWS_SECONDS_MAX = 2.0
WATCH_SECONDS = 0.1
FRAME_BYTES_MAX = 1 * GIB
COUNT = struct.Struct("q")
TOKEN_FILE = "token"


def make_saving(wish: Partial) -> Saving:
    """Servers save by themselves, and nobody makes checkpoints of all of them."""
    assert wish.ckpt is not None
    return Saving(
        url=wish.ckpt,
        run=secrets.token_hex(8),
        salt=secrets.token_hex(8),
        made_by=f"regrow {version()}",
        encoding="raw",
        bits=32,
        bytes_per_second=None,
        times=CheckpointTimes(),
        keep_last=1,
        merge_seconds=3600.0,
        own=make_own_saving(wish),
    )


class LocalCluster:
    """A coordinator and `servers` server processes on this machine.

    `protection` is for the tables of every collection on this cluster that does not bring its own. `store_dir`: rows
    are on disk there, in files that go with the cluster, and `cache_bytes` of them in the memory of each server.
    """

    def __init__(
        self,
        *,
        servers: int = 5,
        threads_per_server: int = 1,
        transport: str | None = None,
        authenticate: str = "auto",
        protection: ErasureCode | Partial | None = None,
        store_dir: str | Path | None = None,
        cache_bytes: int = GIB,
    ) -> None:
        if servers < 1:
            raise UserError(f"servers = {servers}: a cluster needs at least one")
        if transport not in (None, "unix", "tcp"):
            raise UserError(f"transport = {transport!r}: must be 'unix' or 'tcp'")
        if authenticate not in AUTHENTICATE:
            raise UserError(f"authenticate = {authenticate!r}: must be one of {', '.join(AUTHENTICATE)}")
        if protection is not None:
            protection.check(servers=servers, mode="async")
        if isinstance(protection, Partial) and protection.ckpt is None:
            raise ConfigError("ckpt", None, "servers that save their rows need a place for them", hint='ckpt="saves"')
        if store_dir is not None:
            if protection is not None:
                raise UserError("rows on disk (store_dir) have no parities", hint="leave protection or store_dir out")
            check_empty(Path(store_dir))
        self.server_count = servers
        self.protection = protection
        self._store_dir = None if store_dir is None else Path(store_dir).resolve()
        self._token = secrets.token_hex(32)
        self._authenticate = authenticate
        self._sockets = SocketDir()
        self._logs = Path(tempfile.mkdtemp(prefix="regrow-logs-"))
        self._backend = LocalProcesses(logs=Logs(self._logs, print_warning))
        if transport == "unix" or (transport is None and sys.platform.startswith("linux")):
            self._backend.use_sockets(self._sockets.path)
        self._supervisor = Supervisor(replaces=True)
        self._clients: list[SocketClient] = []
        self._attempts: dict[int, int] = {}  # worker -> clients there have been
        self._failure: ChildFailed | None = None
        self._failed = threading.Event()
        self._closing = threading.Event()
        self._owner = self._process = os.getpid()
        self._made_at = time.time()
        # Set by whoever connects, in this process or one forked from it; read by the watcher, which has the supervisor.
        self._spares_wanted = mmap.mmap(-1, COUNT.size)
        if protection is not None:  # whoever connects first, and from wherever
            COUNT.pack_into(self._spares_wanted, 0, protection.copies)
        self._crew = Crew(
            backend=self._backend,
            threads={"coordinator": 1, "server": threads_per_server, "standby": threads_per_server},
            token=self._token,
            servers=servers,
            frame_bytes_max=FRAME_BYTES_MAX,
            authenticate=authenticate,
            saving=make_saving(protection) if isinstance(protection, Partial) else None,
            tiers=None if store_dir is None else TieredRows(directory=str(self._store_dir), cache_bytes=cache_bytes),
        )
        atexit.register(self.close)
        try:
            self._supervise(Appoint(role="coordinator", id=0, now=time.monotonic()))
            self._await_address()
            for index in range(servers):
                self._supervise(Appoint(role="server", id=index, now=time.monotonic()))
        except BaseException:
            self.close()
            raise
        # Somebody must read what the children say, or their pipes fill up.
        self._watcher = threading.Thread(target=self._watch, name="cluster", daemon=True)
        self._watcher.start()

    def client(self, job: JobSpec, *, worker: int = 0, redo_bytes_max: int = 64 * MIB) -> Client:
        """Connects a worker. The first one's job decides the tables; they are in memory when this returns.
        A second client of the same worker takes its place."""
        if self._failure is not None:
            raise self._failure
        assert self._crew.coordinator_address is not None
        if self._process != os.getpid():  # forked: the threads of these are not here, and their links not ours
            self._process, self._clients = os.getpid(), []
        incarnation = self._attempts.get(worker, 0)  # also after one that failed: servers may have heard of it
        self._attempts[worker] = incarnation + 1
        try:
            client = SocketClient(
                identity=Identity(role="worker", id=worker, incarnation=incarnation),
                token=bytes.fromhex(self._token),
                coordinator=self._crew.coordinator_address,
                job=job,
                redo_bytes_max=redo_bytes_max,
                section_bytes_max=FRAME_BYTES_MAX,
                open_seconds_max=OPEN_SECONDS_MAX,
                authenticate=self._authenticate,
            )
        except ConnectionLost:
            # A link breaks before the death behind it is known, and the death explains more.
            if self._failed.wait(NEWS_SECONDS_MAX):
                assert self._failure is not None
                raise self._failure from None
            raise
        self._clients.append(client)
        if job.protection.replaces_servers:
            COUNT.pack_into(self._spares_wanted, 0, job.protection.lost_together_max)
        return client

    def close(self) -> None:
        """Ends clients and servers; calling it again does nothing. In a forked process only its own clients."""
        if self._closing.is_set():
            return
        self._closing.set()
        atexit.unregister(self.close)
        for client in self._clients if self._process == os.getpid() else ():
            client.close()
        if self._owner != os.getpid():  # forked: servers and their directories belong to the process that made them
            return
        if hasattr(self, "_watcher"):
            self._watcher.join()
        with self._sockets, contextlib.closing(self._backend):
            everybody = list_running(self._backend)
            end(self._backend, everybody, asked_seconds=STOP_SECONDS, term_seconds=2.0, hurry=lambda: False)
        if self._store_dir is not None:
            remove_all(self._store_dir.glob(f"{SERVER}*"))
        if self._failure is None:
            shutil.rmtree(self._logs, ignore_errors=True)

    def __enter__(self) -> LocalCluster:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def address(self) -> str:
        """Where the coordinator listens: the first half of `regrow.connect(address, token_file)`."""
        assert self._crew.coordinator_address is not None
        return self._crew.coordinator_address

    @property
    def token_file(self) -> Path:
        """The second half: a file that only this user can read. It goes with the cluster."""
        path = self._sockets.path / TOKEN_FILE
        if not path.exists():
            ticket = Ticket(
                format=FORMAT,
                token=self._token,
                servers=self.server_count,
                authenticate=self._authenticate,
                frame_bytes_max=FRAME_BYTES_MAX,
                made_at=self._made_at,
                protection=describe_protection(self.protection),
            )
            write_ticket(path, ticket)
        return path

    @property
    def pids(self) -> dict[str, int]:
        """Process ids by name, such as "server 2"."""
        handles = self._backend.handles
        return {name_of(handle.who): handle.pid for handle in handles if self._supervisor.counts(handle.who)}

    def _await_address(self) -> None:
        deadline = time.monotonic() + START_SECONDS_MAX
        while self._crew.coordinator_address is None:
            if time.monotonic() > deadline:
                raise ChildFailed(f"the coordinator did not listen within {START_SECONDS_MAX:.0f} s")
            for news in self._backend.wait(1.0):
                self._receive(news)
            if self._failure is not None:
                raise self._failure

    def _watch(self) -> None:
        """The backend and the supervisor are this thread's: whatever is started later is started here."""
        while not self._closing.is_set():
            for news in self._backend.wait(WATCH_SECONDS):
                self._receive(news)
            if self._failure is None and not self._closing.is_set():
                now = time.monotonic()
                self._replace_from_now_on(now)
                self._supervise(Tick(now=now))

    def _replace_from_now_on(self, now: float) -> None:
        """Once a job is known that is protected."""
        (count,) = COUNT.unpack_from(self._spares_wanted, 0)
        if count:
            self._supervise(TakeStance(stance=Stance.REPLACING))
            self._supervise(KeepSpares(count=count, now=now))

    def _receive(self, news: News) -> None:
        """A failure is kept, for whoever asks next."""
        assert isinstance(news, Said | Ended)  # nobody waits for room on one machine
        handle, now = news.handle, time.monotonic()
        if self._failure is not None or self._closing.is_set() or not self._supervisor.counts(handle.who):
            return
        self._replace_from_now_on(now)
        if isinstance(news, Ended):
            self._supervise(ProcessEnded(who=handle.who, exit=news.exit, now=now))
            return
        match news.report:
            case Malformed(event=event, problem=problem):
                self._fail(ChildFailed(f"{name_of(handle.who)} sent a malformed {event!r} event: {problem}"))
            case Listening(address=address) if handle.who.role == "coordinator":
                self._crew.coordinator_address = address
                self._supervise(CoordinatorListens(who=handle.who, address=address))
            case Answer(busy_seconds=busy, longest_seconds=longest):
                answer = ProcessAnswered(who=handle.who, now=now, busy_seconds=busy, longest_seconds=longest)
                self._supervise(answer)
            case Ready():
                self._supervise(ProcessReady(who=handle.who))
            case Condemn(peer=peer, reason=reason):
                self._supervise(ProcessCondemned(who=peer, reason=reason, now=now))
            case Replace(peer=peer, reason=reason):
                # Coordinators ask for that only where servers can be replaced.
                self._supervise(TakeStance(stance=Stance.REPLACING))
                self._supervise(ProcessMissed(who=peer, reason=reason, now=now))
            case Error(kind=kind) as words if kind != "lost":
                self._supervise(ProcessFailed(who=handle.who, words=words))

    def _supervise(self, event: Event) -> None:
        for order in self._supervisor.receive(event):
            match order:
                case Accuse():
                    self._fail(self._explain(order))
                case GiveUp(who=who, reason=reason):
                    self._fail(ChildFailed(reason, hint=f"its log: {self._crew.handle(who).log}"))
                case NoteEnd() | NoteSuccessor():
                    pass  # nobody keeps books here
                case _:
                    self._crew.carry_out(order)

    def _explain(self, order: Accuse) -> ChildFailed:
        name, hint = name_of(order.who), f"its log: {self._crew.handle(order.who).log}"
        if order.words is not None:
            return ChildFailed(f"{name}: {order.words.message}")
        if order.refusal is not None:
            return ChildFailed(f"{order.refusal}; the last time it {order.exit}", hint=hint)
        return ChildFailed(f"{name} {order.exit}", hint=hint)

    def _fail(self, failure: ChildFailed) -> None:
        """The coordinator stops, so that nobody waits for a view that never comes; clients with links notice by
        themselves."""
        self._failure = failure
        self._failed.set()
        for handle in list_running(self._backend, "coordinator"):
            handle.tell(Stop())
