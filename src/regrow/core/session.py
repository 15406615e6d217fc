"""A worker's conversation with all servers: pulls, pushes, and what must be kept until it is safe.

Theory of operation. A pull or push names a **plan**: which slots of which server, and where their rows lie in one flat
buffer (server after server). Rows are received straight into that buffer, and gradients are sent straight out of
another one of the same shape. Every pull and push goes to every server, also where it is empty: each server hears of
each step.

**The worker is the redo log.** A push is kept until every server has said that it is durable, and `redo_bytes` says how
much that is. When a view names another incarnation of a server, that one is sent, in this order: the first weights of
rows that may be untouched, the pushes above what its predecessor made durable (acknowledged or not), and the pulls,
reads and writes that are not answered. It skips what it has. So updates count exactly once without another round of
messages, and no server keeps a log.

Synchronously the pull of step t + 1 leaves when every server has staged the push of step t *and* has made step t - 1
durable. It is the commit of t; and nobody can be lost more than one step behind the others, which they can undo.

While a server's rows come back, nearly every batch lacks a few of them, and each lack costs a round of messages through
all servers. So a worker tells a replacement of several batches at once (`Expect`), before it needs them. Servers whose
rows are on disk say so (`Opened`), and are told of every batch: they read it while the one before is computed.

What breaks without the rules:
- What one incarnation acknowledged without making it durable says nothing about the next (`_void`): else the push is
  lost with the server that had it.
- A push sent to a replacement before the older ones were sent again is a gap, and is refused: so a newcomer is sent
  everything when it joins, and nothing before (`_reachable`).
- A restarted worker begins with the least durable push of all servers: with what was only applied, an update would be
  missing wherever its server died.
- The newest synchronous pull, though answered, is repeated to a replacement that may not know it
  (`_is_unheard_commit`): after the last step nothing else would say that it is committed.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Protocol

import numpy as np

from regrow.core.checks import find_view_flaw
from regrow.core.effects import Delivered, Forget, Joined, Lost, Send
from regrow.core.identity import Identity
from regrow.core.messages import (
    Assign,
    Commit,
    Durable,
    Expect,
    Float32Array,
    Int32Array,
    Message,
    Open,
    Opened,
    Pull,
    Push,
    Pushed,
    ReadRecords,
    Records,
    RecordsWritten,
    Rows,
    UInt32Array,
    View,
    WriteRecords,
)
from regrow.core.states import SESSION, Life, SessionState
from regrow.errors import ProtocolError

EXPECTED_ROWS_MAX = 1 << 20  # at one server, in one message; more is not worth a message near the limit of a frame
CLOCKS_KEPT_MAX = 1024  # Pulls whose push may still come; a caller that never pushes must not grow us.


class Plan(Protocol):
    """Which rows of which server a batch needs; `regrow._kernels.Plan` is one."""

    @property
    def counts(self) -> Any: ...  # int32 [servers, tables]
    @property
    def slots(self) -> Any: ...  # uint32, server after server, table after table
    @property
    def row_start(self) -> Any: ...  # int64 [servers + 1], into slots
    @property
    def float_start(self) -> Any: ...  # int64 [servers + 1], into the flat buffer of rows
    @property
    def floats(self) -> int: ...


# --- Events ---


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PullWanted:
    """Fill `rows` with the weights of `plan`. Step 0 only reads; in sync mode the others are commits too."""

    request: int
    step: int
    plan: Plan
    rows: Float32Array


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PushWanted:
    """Apply `grads` at the rows of `plan`. `request` is the pull the gradients were computed from; `rates` the learning
    rates to apply them with, also when they are sent again."""

    seq: int
    request: int
    plan: Plan
    grads: Float32Array
    rates: tuple[float, ...] = ()


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class AssignWanted:
    """Give rows nobody has touched these weights."""

    plan: Plan
    weights: Float32Array


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ExpectWanted:
    """The rows of these plans will be pulled soon: those of them that are being brought back come first, and those on
    disk are read."""

    plans: tuple[Plan, ...]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ReadWanted:
    """Read whole records of one server, or its parities."""

    request: int
    server: int
    table: int
    slot_first: int
    slot_count: int
    parity: bool = False


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class WriteWanted:
    """Replace whole records at one server."""

    request: int
    server: int
    table: int
    slots: UInt32Array
    records: Float32Array


Event = Joined | Delivered | Lost | PullWanted | PushWanted | AssignWanted | ExpectWanted | ReadWanted | WriteWanted


# --- Effects ---


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Connect:
    """Open links to the servers of this view that have none, and say `Joined` for each."""

    view: View


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SessionOpened:
    """Every server knows this worker; pulls and pushes may begin. `durable` is the least of all servers."""

    durable: int
    committed: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PullAnswered:
    request: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PushReceived:
    """Every server has push `seq`. `staleness`: pushes applied between its pull and it, mean of servers."""

    seq: int
    staleness: float


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PushDurable:
    """Push `seq` and all before it are durable everywhere; its buffers are free."""

    seq: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ReadAnswered:
    request: int
    records: Float32Array


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class WriteAnswered:
    request: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Failed:
    """The session cannot go on. `data_loss`: rows are gone for good."""

    reason: str
    data_loss: bool = False


Effect = (
    Send
    | Forget
    | Connect
    | SessionOpened
    | PullAnswered
    | PushReceived
    | PushDurable
    | ReadAnswered
    | WriteAnswered
    | Failed
)


class Session:
    """One door: `effects = session.receive(event)`."""

    def __init__(self) -> None:
        self.life = Life(SESSION)
        self.view: View | None = None
        self.redo_bytes = 0
        self.redo_bytes_peak = 0  # the most there ever was
        self.reads_ahead = False  # servers have rows on disk, and want to hear of them before they are pulled
        self._servers: list[Identity] = []
        self._joined: set[Identity] = set()
        self._opened: dict[int, Opened] = {}
        self._durable: list[int] = []
        self._pulls: dict[int, _OpenPull] = {}
        self._newest: PullWanted | None = None  # of the pulls that commit (sync)
        self._held: list[PullWanted] = []  # sync: waiting until every server has staged the step before
        self._redo: dict[int, _OpenPush] = {}  # by seq, in order
        self._clocks: dict[int, list[int]] = {}  # request -> clock of each server when it read the rows
        self._reads: dict[int, ReadWanted] = {}
        self._writes: dict[int, WriteWanted] = {}
        self._assigns: list[AssignWanted] = []  # kept: a row that comes back untouched needs them again

    def receive(self, event: Event) -> list[Effect]:
        if isinstance(event, Delivered):
            return self._on_message(event.source, event.message)
        if isinstance(event, PullWanted):
            self._held.append(event)
            return self._release_pulls()
        if isinstance(event, PushWanted):
            return self._on_push_wanted(event)
        if isinstance(event, AssignWanted):
            if self._replaces_servers():
                self._assigns.append(event)
            return [self._assign(event, s) for s in self._reachable()]
        if isinstance(event, ExpectWanted):
            return [self._expect(event.plans, s) for s in self._reachable() if self._wants_expected(s)]
        if isinstance(event, Joined):
            return self._on_joined(event.peer)
        if isinstance(event, ReadWanted):
            self._reads[event.request] = event
            return [self._send_read(event)] if event.server in self._reachable() else []
        if isinstance(event, WriteWanted):
            self._writes[event.request] = event
            return [self._send_write(event)] if event.server in self._reachable() else []
        return self._fail(f"lost {event.peer}: {event.reason}") if self._matters(event.peer) else []

    def _fail(self, reason: str, *, data_loss: bool = False) -> list[Effect]:
        """The end. Whatever comes now changes nothing any more."""
        if self.life.state is not SessionState.FAILED:
            self.life.move("failed")
        return [Failed(reason=reason, data_loss=data_loss)]

    @property
    def recovering(self) -> tuple[int, ...]:
        """The servers whose rows or parities are still coming back, as far as is known here."""
        return () if self.view is None else tuple(member.id for member in self.view.servers if member.recovering)

    def destination(self, source: Identity, request: int, floats: int) -> Float32Array | None:
        """Where the rows of this reply belong, or None when nobody waits for them."""
        pull = self._pulls.get(request)
        if pull is None or source not in self._servers:
            return None
        start = pull.wanted.plan.float_start
        place = pull.wanted.rows[int(start[source.id]) : int(start[source.id + 1])]
        return place if place.size == floats and not pull.answered[source.id] else None

    # --- Messages ---

    def _on_message(self, source: Identity, message: Message) -> list[Effect]:
        if isinstance(message, View) and source.role == "coordinator":
            return self._on_view(message)
        if source.role != "server" or source.id >= len(self._servers):
            raise ProtocolError(f"{type(message).__name__} from {source}")
        if source != self._servers[source.id]:
            return []  # of an incarnation that is over
        if isinstance(message, Rows):
            return self._on_rows(source.id, message)
        if isinstance(message, Pushed):
            return self._on_pushed(source.id, message)
        if isinstance(message, Opened):
            return self._on_opened(source.id, message)
        if isinstance(message, Records):
            return self._on_records(source.id, message)
        if isinstance(message, Durable):
            return self._on_durable(source.id, message.durable) + self._release_pulls()
        if isinstance(message, RecordsWritten):
            return self._on_written(source.id, message)
        raise ProtocolError(f"{type(message).__name__} from {source}")

    def _on_view(self, view: View) -> list[Effect]:
        if self.view is not None and view.epoch <= self.view.epoch:
            return []  # also if it says that rows are lost: a newer one knows better
        if view.lost:
            return self._fail(view.lost, data_loss=True)
        if self.life.state is SessionState.FAILED:
            return []
        if flaw := find_view_flaw(view.servers, view.job):
            raise ProtocolError(f"view {view.epoch} {flaw}")
        if self.view is not None and view.job != self.view.job:
            raise ProtocolError(f"view {view.epoch} is of another job")
        before = self._servers
        servers = [member.identity for member in view.servers]
        if self.view is not None and servers != before and not self._replaces_servers():
            return self._fail(f"the servers changed (view {view.epoch}), and nothing protects their rows")
        if self.view is None:
            self._durable = [0] * len(servers)
        self.life.move("view")
        self.view = view
        self._servers = servers
        if servers == before:
            return []
        effects: list[Effect] = []
        for s, (old, new) in enumerate(zip(before, servers, strict=False)):
            if old != new:
                effects.append(Forget(peer=old))
                self._void(s)
        return [*effects, Connect(view=view)]

    def _void(self, server: int) -> None:
        """What the predecessor acknowledged without making it durable does not count."""
        if self.life.state is SessionState.GREETING:
            self._opened.pop(server, None)
        for push in self._redo.values():
            if push.received[server] and push.wanted.seq > self._durable[server]:
                push.received[server] = False
                push.waiting += 1
                push.committed = False

    def _on_joined(self, peer: Identity) -> list[Effect]:
        """A server is there: greet it, or, in the middle of everything, tell it what it may lack."""
        if peer not in self._servers or peer in self._joined:
            return []
        self._joined.add(peer)
        if self.life.state is SessionState.GREETING:
            return [Send(target=peer, message=Open())]
        s = peer.id
        effects: list[Effect] = [self._assign(event, s) for event in self._assigns]
        for push in self._redo.values():
            if push.wanted.seq > self._durable[s]:
                effects.append(self._push(push.wanted, s))
        for pull in self._pulls.values():
            if not pull.answered[s]:
                effects.append(self._pull(pull.wanted, s))
        if self._is_unheard_commit(s):
            assert self._newest is not None
            effects.append(self._pull(self._newest, s))
        effects += [self._send_read(dump) for dump in self._reads.values() if dump.server == s]
        effects += [self._send_write(load) for load in self._writes.values() if load.server == s]
        return effects

    def _is_unheard_commit(self, s: int) -> bool:
        """Whether the newest pull, answered by the server before this one, is still news for it: in sync mode that
        pull is the commit of the step before, and no later message may follow to say so."""
        newest = self._newest
        if newest is None or newest.step - 1 <= self._durable[s]:
            return False
        pull = self._pulls.get(newest.request)
        return pull is None or pull.answered[s]

    def _on_opened(self, server: int, message: Opened) -> list[Effect]:
        if self.life.state is not SessionState.GREETING:
            return []
        self._opened[server] = message
        self._durable[server] = message.durable
        if len(self._opened) < len(self._servers):
            return []
        self.life.move("all have answered")
        committed = max(opened.committed for opened in self._opened.values())
        self.reads_ahead = any(opened.reads_ahead for opened in self._opened.values())
        return [SessionOpened(durable=min(self._durable), committed=committed)]

    def _on_rows(self, server: int, message: Rows) -> list[Effect]:
        pull = self._pulls.get(message.request)
        if pull is None or pull.answered[server]:
            return []
        start = pull.wanted.plan.float_start
        place = pull.wanted.rows[int(start[server]) : int(start[server + 1])]
        if message.rows.size != place.size:
            raise ProtocolError(f"S{server} answered {message.rows.size} values, {place.size} were asked for")
        if message.rows.size and message.rows.ctypes.data != place.ctypes.data:
            place[:] = message.rows  # a driver without receive-in-place
        pull.answered[server] = True
        pull.waiting -= 1
        if message.request in self._clocks:
            self._clocks[message.request][server] = message.clock
        effects = self._on_durable(server, message.durable)
        if pull.waiting == 0:
            del self._pulls[message.request]
            if not pull.wanted.step:
                self._clocks.pop(message.request, None)  # only read: no push will follow
            effects.append(PullAnswered(request=message.request))
        return effects

    def _on_pushed(self, server: int, message: Pushed) -> list[Effect]:
        effects: list[Effect] = []
        push = self._redo.get(message.seq)
        if push is not None and not push.received[server]:
            push.received[server] = True
            push.waiting -= 1
            push.staleness += message.clock - 1 - push.clocks[server]
            if push.waiting == 0:
                if not push.reported:
                    mean = push.staleness / len(self._servers)
                    effects.append(PushReceived(seq=message.seq, staleness=max(0.0, mean)))
                push.reported = True
        effects += self._on_durable(server, message.durable)
        return effects + self._release_pulls()

    def _on_durable(self, server: int, durable: int) -> list[Effect]:
        """Forgets the pushes that every server now holds durably, and commits others that every server has."""
        self._durable[server] = max(durable, self._durable[server])
        least = min(self._durable)
        effects: list[Effect] = []
        for seq in list(self._redo):
            if seq > least or not self._is_everywhere(self._redo[seq]):
                break
            self.redo_bytes -= self._redo.pop(seq).wanted.grads.nbytes
            effects.append(PushDurable(seq=seq))
        return effects + self._commit_pushes()

    def _commit_pushes(self) -> list[Effect]:
        """In two phases. A server that has a push durable need not answer it: to wait for that could be for ever, as a
        replacement is not sent it again."""
        effects: list[Effect] = []
        if self.view is None or self.view.job.protection.flush.commit != "2pc":
            return effects
        for seq, push in self._redo.items():
            if not self._is_everywhere(push):
                break
            if not push.committed:
                push.committed = True
                effects += [Send(target=self._servers[s], message=Commit(seq=seq)) for s in self._reachable()]
        return effects

    def _is_everywhere(self, push: _OpenPush) -> bool:
        """Every server has this push: it said so, or it is durable there."""
        seq = push.wanted.seq
        return all(have or durable >= seq for have, durable in zip(push.received, self._durable, strict=True))

    def _on_records(self, server: int, message: Records) -> list[Effect]:
        wanted = self._reads.get(message.request)
        if wanted is None or wanted.server != server:
            return []
        assert self.view is not None
        floats = -(-self.view.job.tables[wanted.table].record_floats // 4) * 4  # a record is padded to 16 bytes
        if message.records.size != wanted.slot_count * floats:
            raise ProtocolError(f"S{server} answered {message.records.size} values for {wanted.slot_count} records")
        del self._reads[message.request]
        return [ReadAnswered(request=message.request, records=message.records)]

    def _on_written(self, server: int, message: RecordsWritten) -> list[Effect]:
        wanted = self._writes.get(message.request)
        if wanted is None or wanted.server != server:
            return []
        del self._writes[message.request]
        return [WriteAnswered(request=message.request)]

    # --- Wishes ---

    def _release_pulls(self) -> list[Effect]:
        effects: list[Effect] = []
        while self._held and self._may_pull(self._held[0]):
            wanted = self._held.pop(0)
            if wanted.step and self.view is not None and self.view.job.mode == "sync":
                self._newest = wanted
            self._pulls[wanted.request] = _OpenPull(wanted, servers=len(self._servers))
            self._clocks[wanted.request] = [0] * len(self._servers)
            if len(self._clocks) > CLOCKS_KEPT_MAX:
                del self._clocks[next(iter(self._clocks))]
            effects += [self._pull(wanted, s) for s in self._reachable()]
        return effects

    def _may_pull(self, wanted: PullWanted) -> bool:
        if self.view is None or self.view.job.mode == "async" or wanted.step == 0:
            return True
        # The step before the last must be durable: a lost server can then be brought to where the others are.
        return min(self._durable) >= wanted.step - 2 and all(map(self._is_everywhere, self._redo.values()))

    def _on_push_wanted(self, wanted: PushWanted) -> list[Effect]:
        clocks = self._clocks.pop(wanted.request, None) or [0] * len(self._servers)
        self._redo[wanted.seq] = _OpenPush(wanted, clocks=clocks)
        self.redo_bytes += wanted.grads.nbytes
        self.redo_bytes_peak = max(self.redo_bytes_peak, self.redo_bytes)
        return [self._push(wanted, s) for s in self._reachable()]

    # --- The part of one server, also where it is empty: every server hears of every step ---

    def _pull(self, wanted: PullWanted, s: int) -> Send:
        _, parts = self._part(wanted.plan, wanted.rows, s)
        return Send(target=self._servers[s], message=Pull(request=wanted.request, step=wanted.step, **parts))

    def _push(self, wanted: PushWanted, s: int) -> Send:
        grads, parts = self._part(wanted.plan, wanted.grads, s)
        return Send(target=self._servers[s], message=Push(seq=wanted.seq, rates=wanted.rates, grads=grads, **parts))

    def _assign(self, wanted: AssignWanted, s: int) -> Send:
        weights, parts = self._part(wanted.plan, wanted.weights, s)
        return Send(target=self._servers[s], message=Assign(weights=weights, **parts))

    def _expect(self, plans: tuple[Plan, ...], s: int) -> Send:
        """Each row once, however many of the plans have it. A plan names none twice."""
        if len(plans) == 1:
            counts, slots = self._slots(plans[0], s)
            if slots.size <= EXPECTED_ROWS_MAX:
                return Send(target=self._servers[s], message=Expect(counts=counts, slots=slots))
        keys = [np.zeros(0, np.int64)]
        for plan in plans:
            counts, slots = self._slots(plan, s)
            keys.append(np.repeat(np.arange(counts.size), counts) << 32 | slots.astype(np.int64))
        rows = np.unique(np.concatenate(keys))[:EXPECTED_ROWS_MAX]
        assert self.view is not None
        counts = np.bincount(rows >> 32, minlength=len(self.view.job.tables)).astype(np.int32)
        return Send(target=self._servers[s], message=Expect(counts=counts, slots=rows.astype(np.uint32)))

    def _wants_expected(self, s: int) -> bool:
        return self.reads_ahead or s in self.recovering

    def _send_read(self, wanted: ReadWanted) -> Send:
        dump = ReadRecords(
            request=wanted.request,
            table=wanted.table,
            parity=wanted.parity,
            slot_first=wanted.slot_first,
            slot_count=wanted.slot_count,
        )
        return Send(target=self._servers[wanted.server], message=dump)

    def _send_write(self, wanted: WriteWanted) -> Send:
        load = WriteRecords(request=wanted.request, table=wanted.table, slots=wanted.slots, records=wanted.records)
        return Send(target=self._servers[wanted.server], message=load)

    def _part(self, plan: Plan, values: Float32Array, s: int) -> tuple[Float32Array, dict[str, Any]]:
        assert values.size == plan.floats
        counts, slots = self._slots(plan, s)
        part = values[int(plan.float_start[s]) : int(plan.float_start[s + 1])]
        return part, {"counts": counts, "slots": slots}

    def _slots(self, plan: Plan, s: int) -> tuple[Int32Array, UInt32Array]:
        assert len(plan.row_start) == len(self._servers) + 1, "the plan is for another number of servers"
        return np.asarray(plan.counts)[s], np.asarray(plan.slots)[int(plan.row_start[s]) : int(plan.row_start[s + 1])]

    def _reachable(self) -> list[int]:
        """Servers that have joined. One that has not is sent everything, in order, when it does."""
        return [s for s, peer in enumerate(self._servers) if peer in self._joined]

    def _replaces_servers(self) -> bool:
        return self.view is not None and self.view.job.protection.replaces_servers

    def _matters(self, peer: Identity) -> bool:
        """Whose loss ends the session. A coordinator is dialled again; a server may be replaced."""
        return peer in self._servers and not self._replaces_servers()


class _OpenPull:
    __slots__ = ("answered", "waiting", "wanted")

    def __init__(self, wanted: PullWanted, *, servers: int) -> None:
        self.wanted = wanted
        self.answered = [False] * servers
        self.waiting = servers


class _OpenPush:
    __slots__ = ("clocks", "committed", "received", "reported", "staleness", "waiting", "wanted")

    def __init__(self, wanted: PushWanted, *, clocks: list[int]) -> None:
        self.wanted = wanted
        self.clocks = clocks
        self.received = [False] * len(clocks)
        self.waiting = len(clocks)
        self.staleness = 0
        self.reported = False
        self.committed = False  # the servers were told that all of them have it (two-phase commit)
