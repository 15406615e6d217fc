"""A whole cluster inside one process and one thread: for notebooks, examples and tests.

The same coordinator, servers and sessions as over sockets; a message is handed over by reference, in order,
before the call that caused it returns. `kill` takes a server's memory away and lets its successor come back: from
parities, or, where servers save their own rows (`saving`), with what they saved last (`inprocess_saves.py`).
"""

from __future__ import annotations

import select
from collections import deque
from collections.abc import Callable, Sequence

from regrow.core.coordinator import Coordinator
from regrow.core.cut import Save, Unsave
from regrow.core.cuts import WriteManifest
from regrow.core.door import ServerDoor
from regrow.core.effects import (
    Condemn,
    Delivered,
    Dial,
    Died,
    Forget,
    Joined,
    Log,
    Lost,
    Notice,
    Refuse,
    Replace,
    Send,
    Stop,
    Tick,
)
from regrow.core.identity import COORDINATOR, Identity
from regrow.core.job import JobSpec
from regrow.core.messages import Declare, Message, View
from regrow.core.own_saves import SaveOwn, UnsaveOwn
from regrow.core.paging import DISK_SECONDS_MAX, Fetched, Upkeep, UpkeepDue
from regrow.core.serving import Store
from regrow.core.session import Event
from regrow.core.wayback import FetchSaved, FindSaves, Load
from regrow.errors import ConnectionLost, ProtocolError, RegrowError, UserError
from regrow.launch import reports
from regrow.launch.saving import OwnSaving
from regrow.protection import ErasureCode, Partial
from regrow.runtime import inprocess_saves
from regrow.runtime.client import ANOTHER_JOB_HINT, Client
from regrow.store.memory import MemoryStore

REPLY_BYTES_MAX = 4 << 30
TICK_SECONDS = 1.0  # of a clock that runs only while somebody waits
TICKS_WAITED = 8  # enough for a flush and its acknowledgement, whatever else is under way
TICKS_MAX = 100_000  # Waiting longer than this is waiting for ever.


Queued = Delivered | Fetched | UpkeepDue | inprocess_saves.Told


class InProcessCluster:
    """Servers without processes. Make one client per worker.

    `protection` is for the tables of every collection on this cluster that does not bring its own. `saving`: how
    servers save their own rows, for a job with partial recovery. `saves` has what they saved, and `joins` says of each
    replacement, (server, report), to what it went back and how many updates are lost by then.
    """

    def __init__(
        self,
        *,
        servers: int,
        build_store: Callable[[JobSpec, int, bool], Store] = MemoryStore,
        saving: OwnSaving | None = None,
        protection: ErasureCode | Partial | None = None,
    ) -> None:
        if protection is not None:
            protection.check(servers=servers, mode="async")
        if isinstance(protection, Partial):
            saving = inprocess_saves.make_own_saving(protection)
        self.protection = protection
        self.coordinator = Coordinator(servers=servers)
        self.server_count = servers
        self.servers: list[ServerDoor] = []
        self.saves = [inprocess_saves.KeptSaves() for _ in range(servers)]
        self.joins: list[tuple[int, reports.Joined]] = []
        self._saving = saving
        self._make_store = build_store
        self._clients: dict[Identity, InProcessClient] = {}
        self._queue: deque[tuple[Identity, Identity, Queued]] = deque()
        self._pumping = False
        self._now = 0.0
        for index in range(servers):
            self.servers.append(self._server(index, incarnation=0))
        for server in self.servers:
            self._join(server)

    def client(self, job: JobSpec, *, worker: int = 0, redo_bytes_max: int = 64 << 20) -> Client:
        """The client of one worker; the first one's job is the cluster's. A second one of the same worker takes
        its place."""
        incarnation = sum(known.id == worker for known in self._clients)
        identity = Identity(role="worker", id=worker, incarnation=incarnation)
        client = InProcessClient(self, identity, job, redo_bytes_max=redo_bytes_max)
        self._clients[identity] = client
        self._effects(COORDINATOR, self.coordinator.receive(Joined(peer=identity)))
        self.post(identity, COORDINATOR, Declare(job=job))
        client.opened.result(0)
        return client

    def close(self) -> None:
        """Nothing runs, so nothing stops."""

    def kill(self, server: int) -> None:
        """Loses all that a server holds. Its successor comes back from the parities, as rows are needed or when
        somebody waits (`settle`), or from its last save; without either every client fails."""
        if not 0 <= server < len(self.servers):
            raise UserError(f"there is no server {server}", hint=f"they are 0 to {len(self.servers) - 1}")
        old = self.servers[server].identity
        self._effects(COORDINATOR, self.coordinator.receive(Died(peer=old)))
        self._pump()
        if self.servers[server].identity == old:  # nothing can replace it
            for client in list(self._clients.values()):
                client.deliver(Lost(peer=old, reason="it was killed"))

    def settle(self) -> None:
        """Lets time pass until everything is durable and every server has recovered."""
        for _ in range(TICKS_MAX):
            self.tick()
            if all(server.recovered for server in self.servers) or self.coordinator.lost:
                self.tick()
                return
        raise RegrowError("the servers did not recover")

    def tick(self) -> None:
        """A second passes for every server."""
        self._now += TICK_SECONDS
        for server in list(self.servers):
            self._effects(server.identity, server.receive(Tick(now=self._now)))
        self._pump()

    def _server(self, index: int, *, incarnation: int) -> ServerDoor:
        return ServerDoor(
            identity=Identity(role="server", id=index, incarnation=incarnation),
            build_store=self._build_store,
            reply_bytes_max=REPLY_BYTES_MAX,
            address=f"process:{index}",
            save_plan=inprocess_saves.make_plan(self._saving),
        )

    def _build_store(self, job: JobSpec, server: int, recovering: bool) -> Store:
        store = self._make_store(job, server, recovering)
        if self._saving is not None:
            inprocess_saves.add_saving(store, job, self._saving)
        return store

    def _join(self, server: ServerDoor) -> None:
        self._effects(COORDINATOR, self.coordinator.receive(Joined(peer=server.identity)))
        self._effects(server.identity, server.receive(Joined(peer=COORDINATOR)))
        self._pump()

    def post(self, source: Identity, target: Identity, message: Message) -> None:
        """Queues a message and delivers all there are, unless that is going on already."""
        self._queue.append((source, target, Delivered(source=source, message=message)))
        self._pump()

    def _pump(self) -> None:
        if self._pumping:
            return
        self._pumping = True
        try:
            while self._queue:
                self._deliver(*self._queue.popleft())
                if not self._queue:
                    self._wait_for_disks()
        finally:
            self._pumping = False

    def _wait_for_disks(self) -> None:
        """Rows on disk that somebody waits for: nothing else goes on here meanwhile."""
        doors = [server for server in self.servers if server.server is not None and server.server.paging is not None]
        waiting = {door.server.store.fetch_fd: door for door in doors if door.server.paging.waits}  # type: ignore
        if not waiting:
            return
        ready, _, _ = select.select(list(waiting), [], [], DISK_SECONDS_MAX)
        if not ready:
            raise RegrowError(f"the disk has not answered for {DISK_SECONDS_MAX:.0f} s")
        for descriptor in ready:
            identity = waiting[descriptor].identity
            self._queue.append((identity, identity, Fetched()))

    def _deliver(self, source: Identity, target: Identity, event: Queued) -> None:
        if target.role == "server":
            if self.servers[target.id].identity == target:
                self._effects(target, self.servers[target.id].receive(event))
            return
        assert isinstance(event, Delivered)
        if target.role == "coordinator":
            self._effects(target, self.coordinator.receive(event))
        elif target in self._clients:
            self._clients[target].deliver(event)

    def _effects(self, local: Identity, effects: Sequence[object]) -> None:
        for effect in effects:
            if isinstance(effect, Send):
                self._queue.append((local, effect.target, Delivered(source=local, message=effect.message)))
            elif isinstance(effect, Replace):
                old = effect.peer
                self.servers[old.id] = self._server(old.id, incarnation=old.incarnation + 1)
                self._queue = deque(item for item in self._queue if old not in item[:2])
                self._join(self.servers[old.id])
            elif isinstance(effect, Refuse):
                if effect.target in self._clients:  # else: a server of before, and nobody waits for it
                    self._clients[effect.target].fail_refused(local, effect.reason)
            elif isinstance(effect, Stop):
                # Nobody replaces a server here but `kill`, and a server that was killed hears nothing more.
                raise RegrowError(f"{local} stops: {effect.reason}")
            elif isinstance(effect, Save | Unsave | WriteManifest | Load):
                raise AssertionError(f"{local} asks for a checkpoint, and none was promised it: {effect!r}")
            elif isinstance(effect, Upkeep):
                self._queue.append((local, local, UpkeepDue()))
            elif isinstance(effect, SaveOwn | FindSaves):
                self._save_own(local, effect)
            elif isinstance(effect, UnsaveOwn | FetchSaved):
                pass  # a save is durable as soon as it is asked for, and all its rows come at once
            elif isinstance(effect, Condemn):
                raise AssertionError(f"nobody hangs in one process: {effect!r}")
            elif isinstance(effect, Notice) and effect.name == "joined":
                self.joins.append((local.id, reports.Joined(**effect.values)))
            elif isinstance(effect, Dial | Forget | Log | Notice):
                pass  # messages are handed over by reference, and nobody reads the story of a cluster in a notebook
            else:
                raise AssertionError(f"an effect that a cluster in one process does not know: {effect!r}")

    def _save_own(self, local: Identity, effect: SaveOwn | FindSaves) -> None:
        """What the server is told then comes behind all that it has sent before."""
        saves = self.saves[local.id]
        if isinstance(effect, FindSaves):
            told = saves.bring_back(effect)
        else:
            server = self.servers[local.id].server
            assert server is not None
            told = saves.take(effect, server.store)
        self._queue.extend((local, local, event) for event in told)


class InProcessClient(Client):
    """A client whose servers are called directly."""

    def __init__(self, cluster: InProcessCluster, identity: Identity, job: JobSpec, *, redo_bytes_max: int) -> None:
        super().__init__(job, redo_bytes_max=redo_bytes_max)
        self.identity = identity
        self._cluster = cluster

    def before_waiting(self, done: Callable[[], bool]) -> None:
        # Everything was delivered before the call returned: what is not answered now waits for a clock, or for
        # another worker, whose turn cannot come while this thread waits.
        for _ in range(TICKS_WAITED):
            if done() or self._failure is not None:
                break
            self._cluster.tick()
        self._check()
        if not done():
            raise RegrowError(
                "this would wait for ever: other workers of this synchronous job have not taken their step",
                hint="In one process, let every worker push before any of them pulls the next step.",
            )

    def deliver(self, event: Event) -> None:
        try:
            self._run(self.session.receive(event))
        except ProtocolError as error:
            self._fail(error)

    def fail_refused(self, source: Identity, reason: str) -> None:
        self._fail(ConnectionLost(f"lost {source}: refused: {reason}"))

    def _submit(self, event: Event) -> None:
        self._run(self.session.receive(event))

    def _send(self, target: Identity, message: Message) -> None:
        self._cluster.post(self.identity, target, message)

    def _connect(self, view: View) -> None:
        if view.job != self.job:
            difference = self.job.find_difference(view.job)
            self._fail(RegrowError(f"the cluster runs another job: {difference}", hint=ANOTHER_JOB_HINT))
            return
        for server in self._cluster.servers:
            self._submit(Joined(peer=server.identity))
