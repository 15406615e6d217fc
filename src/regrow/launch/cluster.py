"""Server processes for a script or a notebook: `with LocalCluster(servers=5) as cluster: ...`.

Only a coordinator and servers are started; the calling process is the worker. They end with the context, with
the interpreter, or when this process dies. Tables are declared by the first client. If these are protected, a server
or a coordinator that dies is replaced, and the clients go on.
"""

from __future__ import annotations

import atexit
import secrets
import shutil
import signal
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

from regrow.core.identity import Identity
from regrow.core.job import JobSpec
from regrow.errors import ChildFailed, ConnectionLost, UserError
from regrow.launch.crew import CHILD_COMMAND, Crew
from regrow.launch.processes import Child, Children, Ended, Said
from regrow.launch.rundir import Logs, SocketDir, print_warning
from regrow.protection import GIB, MIB, ErasureCode
from regrow.runtime.client import Client, SocketClient

START_SECONDS_MAX = 120.0
OPEN_SECONDS_MAX = 600.0  # filling very large tables takes minutes
STOP_SECONDS = 10.0
NEWS_SECONDS_MAX = 2.0
FRAME_BYTES_MAX = 1 * GIB


class LocalCluster:
    """A coordinator and `servers` server processes on this machine.

    `protection` is for the tables of every collection on this cluster that does not bring its own.
    """

    def __init__(
        self,
        *,
        servers: int = 5,
        threads_per_server: int = 1,
        transport: str | None = None,
        protection: ErasureCode | None = None,
    ) -> None:
        if servers < 1:
            raise UserError(f"servers = {servers}: a cluster needs at least one")
        if transport not in (None, "unix", "tcp"):
            raise UserError(f"transport = {transport!r}: must be 'unix' or 'tcp'")
        if protection is not None:
            protection.check(servers=servers, mode="async")
        self.server_count = servers
        self.protection = protection
        self._token = secrets.token_hex(32)
        self._sockets = SocketDir()
        self._logs = Path(tempfile.mkdtemp(prefix="regrow-logs-"))
        self._children = Children()
        self._clients: list[SocketClient] = []
        self._attempts: dict[int, int] = {}  # worker -> clients there have been
        self._failure: ChildFailed | None = None
        self._failed = threading.Event()
        self._closing = threading.Event()
        self._spares_wanted = 0  # once a protected job is known
        self._crew = Crew(
            children=self._children,
            command=CHILD_COMMAND,
            sockets=self._sockets.path,
            transport=transport or ("unix" if sys.platform.startswith("linux") else "tcp"),
            logs=Logs(self._logs, print_warning),
            threads={"coordinator": 1, "server": threads_per_server, "standby": threads_per_server},
            assignment={
                "token": self._token,
                "config": {"servers": servers, "frame_bytes_max": FRAME_BYTES_MAX},
                "servers": servers,
                "frame_bytes_max": FRAME_BYTES_MAX,
            },
        )
        atexit.register(self.close)
        try:
            self._crew.start("coordinator", 0)
            self._crew.coordinator_address = self._await_address()
            for index in range(servers):
                self._crew.start("server", index)
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
            )
        except ConnectionLost:
            # A link breaks before the death behind it is known, and the death explains more.
            if self._failed.wait(NEWS_SECONDS_MAX):
                assert self._failure is not None
                raise self._failure from None
            raise
        self._clients.append(client)
        if job.protection.replaces_servers:
            self._spares_wanted = job.protection.lost_together_max
        return client

    def close(self) -> None:
        """Ends clients and servers; calling it again does nothing."""
        if self._closing.is_set():
            return
        self._closing.set()
        atexit.unregister(self.close)
        for client in self._clients:
            client.close()
        if hasattr(self, "_watcher"):
            self._watcher.join()
        with self._children as children, self._sockets:
            children.end(children.running(), asked_seconds=STOP_SECONDS, term_seconds=2.0, hurry=lambda: False)
        if self._failure is None:
            shutil.rmtree(self._logs, ignore_errors=True)

    def __enter__(self) -> LocalCluster:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def pids(self) -> dict[str, int]:
        """Process ids by name, such as "server 2"."""
        return {child.name: child.pid for child in self._children.all if not child.retired}

    def _await_address(self) -> str:
        deadline = time.monotonic() + START_SECONDS_MAX
        while time.monotonic() < deadline:
            for news in self._children.wait(1.0):
                self._note(news)
                if self._failure is not None:
                    raise self._failure
                if isinstance(news, Said) and news.event["event"] == "listening":
                    return str(news.event["address"])
        raise ChildFailed(f"the coordinator did not listen within {START_SECONDS_MAX:.0f} s")

    def _watch(self) -> None:
        while not self._closing.is_set():
            for news in self._children.wait(0.1):
                self._note(news)
            # The selector is this thread's: whatever is started later is started here.
            if self._failure is None:
                self._crew.keep_spares(self._spares_wanted)

    def _note(self, news: Any) -> None:
        """Keeps the first failure, for whoever asks next. Then the coordinator stops, so that nobody waits for
        a view that never comes; clients with links notice by themselves."""
        if self._failure is not None or news.child.retired:
            return
        if isinstance(news, Said) and news.event["event"] == "replace":
            self._replace(news.event)
        elif isinstance(news, Ended) and not self._closing.is_set() and self._spares_wanted:
            self._ended(news.child, str(news.exit))
        elif isinstance(news, Ended) and not self._closing.is_set():
            self._failure = ChildFailed(f"{news.child.name} {news.exit}", hint=f"its log: {news.child.log}")
        elif isinstance(news, Said) and news.event["event"] == "error" and news.event.get("kind") != "lost":
            self._failure = ChildFailed(f"{news.child.name}: {news.event.get('message')}")
        if self._failure is not None:
            self._failed.set()
            for child in self._children.running("coordinator"):
                child.tell({"do": "stop"})

    def _ended(self, child: Child, how: str) -> None:
        if child in self._crew.spares:
            self._crew.lost_spare(child)
            return
        refusal = self._crew.refusal(child, time.monotonic())
        if refusal is None:
            self._crew.succeed(child)
        else:
            self._failure = ChildFailed(f"{refusal}; the last time it {how}", hint=f"its log: {child.log}")

    def _replace(self, event: dict[str, Any]) -> None:
        """The coordinator has not heard of a server for too long."""
        child = self._crew.current(str(event["role"]), int(event["id"]))
        if child.incarnation != int(event["incarnation"]):
            return
        refusal = self._crew.refusal(child, time.monotonic(), alive=True)
        if refusal is not None:
            self._failure = ChildFailed(refusal, hint=f"its log: {child.log}")
        else:
            child.signal(signal.SIGKILL)
            self._crew.succeed(child)
