"""A worker's conversation with all servers: pulls, pushes, and what must be kept until it is safe.

A pull or push names a **plan**: which slots of which server, and where their rows lie in one flat buffer
(server after server). Rows are received straight into that buffer and gradients are sent straight out of
another one of the same shape. The worker is the redo log: a push is kept until every server has said it is
durable, and `redo_bytes` says how much that is. In synchronous mode the pull for step t + 1 leaves
only after every server has staged the push of step t.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Protocol

import numpy as np

from regrow.core.effects import Delivered, Joined, Lost, Send
from regrow.core.link import Identity
from regrow.core.messages import (
    Assign,
    Dump,
    Float32Array,
    Load,
    Loaded,
    Message,
    Open,
    Opened,
    Pull,
    Push,
    Pushed,
    Records,
    Rows,
    UInt32Array,
    View,
)
from regrow.errors import ProtocolError

CLOCKS_KEPT_MAX = 1024  # Pulls whose push may still come; a caller that never pushes must not grow us.


class Plan(Protocol):
    """Which rows of which server a batch needs; `regrow._core.Plan` is one."""

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
    """Apply `grads` at the rows of `plan`. `request` is the pull the gradients were computed from."""

    seq: int
    request: int
    plan: Plan
    grads: Float32Array


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class AssignWanted:
    """Give rows nobody has touched these weights."""

    plan: Plan
    weights: Float32Array


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class DumpWanted:
    """Read whole records of one server."""

    request: int
    server: int
    table: int
    slot_first: int
    slot_count: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LoadWanted:
    """Replace whole records at one server."""

    request: int
    server: int
    table: int
    slots: UInt32Array
    records: Float32Array


Event = Joined | Delivered | Lost | PullWanted | PushWanted | AssignWanted | DumpWanted | LoadWanted


# --- Effects ---


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Connect:
    """Open links to the servers of this view, and say `Joined` for each."""

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
class DumpAnswered:
    request: int
    records: Float32Array


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LoadAnswered:
    request: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Failed:
    """The session cannot go on."""

    reason: str


Effect = (
    Send
    | Connect
    | SessionOpened
    | PullAnswered
    | PushReceived
    | PushDurable
    | DumpAnswered
    | LoadAnswered
    | Failed
)


class Session:
    """One door: `effects = session.receive(event)`."""

    def __init__(self) -> None:
        self.view: View | None = None
        self.redo_bytes = 0
        self.redo_bytes_max = 0  # the most there ever was
        self._servers: list[Identity] = []
        self._opened: dict[int, Opened] = {}
        self._durable: list[int] = []
        self._pulls: dict[int, _OpenPull] = {}
        self._held: list[PullWanted] = []  # sync: waiting until every server has staged the step before
        self._redo: dict[int, _OpenPush] = {}  # by seq, in order
        self._clocks: dict[int, list[int]] = {}  # request -> clock of each server when it read the rows
        self._dumps: dict[int, DumpWanted] = {}

    def receive(self, event: Event) -> list[Effect]:
        if isinstance(event, Delivered):
            return self._on_message(event.source, event.message)
        if isinstance(event, PullWanted):
            self._held.append(event)
            return self._release_pulls()
        if isinstance(event, PushWanted):
            return self._on_push_wanted(event)
        if isinstance(event, AssignWanted):
            return [
                Send(target=self._servers[s], message=Assign(weights=weights, **parts))
                for s, weights, parts in self._split(event.plan, event.weights)
            ]
        if isinstance(event, Joined):
            return [Send(target=event.peer, message=Open())] if event.peer in self._servers else []
        if isinstance(event, DumpWanted):
            self._dumps[event.request] = event
            dump = Dump(
                request=event.request,
                table=event.table,
                slot_first=event.slot_first,
                slot_count=event.slot_count,
            )
            return [Send(target=self._servers[event.server], message=dump)]
        if isinstance(event, LoadWanted):
            load = Load(request=event.request, table=event.table, slots=event.slots, records=event.records)
            return [Send(target=self._servers[event.server], message=load)]
        return [Failed(reason=f"lost {event.peer}: {event.reason}")] if self._matters(event.peer) else []

    def destination(self, source: Identity, request: int, floats: int) -> Float32Array | None:
        """Where the rows of this reply belong, or None when nobody waits for them."""
        pull = self._pulls.get(request)
        if pull is None or source.role != "server" or source.id >= len(self._servers):
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
        if isinstance(message, Rows):
            return self._on_rows(source.id, message)
        if isinstance(message, Pushed):
            return self._on_pushed(source.id, message)
        if isinstance(message, Opened):
            return self._on_opened(source.id, message)
        if isinstance(message, Records):
            return self._on_records(message)
        if isinstance(message, Loaded):
            return [LoadAnswered(request=message.request)]
        raise ProtocolError(f"{type(message).__name__} from {source}")

    def _on_view(self, view: View) -> list[Effect]:
        if self.view is not None:
            reason = f"the servers changed (view {view.epoch}), and nothing protects their rows"
            return [Failed(reason=reason)]
        self.view = view
        self._servers = [Identity(role="server", id=m.id, incarnation=m.incarnation) for m in view.servers]
        self._durable = [0] * len(self._servers)
        return [Connect(view=view)]

    def _on_opened(self, server: int, message: Opened) -> list[Effect]:
        self._opened[server] = message
        self._durable[server] = message.durable
        if len(self._opened) < len(self._servers):
            return []
        committed = max(opened.committed for opened in self._opened.values())
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
                mean = push.staleness / len(self._servers)
                effects.append(PushReceived(seq=message.seq, staleness=max(0.0, mean)))
        effects += self._on_durable(server, message.durable)
        return effects + self._release_pulls()

    def _on_durable(self, server: int, durable: int) -> list[Effect]:
        """Forgets the pushes that every server now holds durably."""
        self._durable[server] = max(durable, self._durable[server])
        least = min(self._durable)
        effects: list[Effect] = []
        for seq in list(self._redo):
            if seq > least or self._redo[seq].waiting:
                break
            self.redo_bytes -= self._redo.pop(seq).wanted.grads.nbytes
            effects.append(PushDurable(seq=seq))
        return effects

    def _on_records(self, message: Records) -> list[Effect]:
        if self._dumps.pop(message.request, None) is None:
            return []
        return [DumpAnswered(request=message.request, records=message.records)]

    # --- Wishes ---

    def _release_pulls(self) -> list[Effect]:
        effects: list[Effect] = []
        while self._held and self._may_pull(self._held[0]):
            wanted = self._held.pop(0)
            self._pulls[wanted.request] = _OpenPull(wanted, servers=len(self._servers))
            self._clocks[wanted.request] = [0] * len(self._servers)
            if len(self._clocks) > CLOCKS_KEPT_MAX:
                del self._clocks[next(iter(self._clocks))]
            for s, _, parts in self._split(wanted.plan, wanted.rows):
                pull = Pull(request=wanted.request, step=wanted.step, **parts)
                effects.append(Send(target=self._servers[s], message=pull))
        return effects

    def _may_pull(self, wanted: PullWanted) -> bool:
        if self.view is None or self.view.job.mode == "async" or wanted.step == 0:
            return True
        return all(push.waiting == 0 for push in self._redo.values())

    def _on_push_wanted(self, wanted: PushWanted) -> list[Effect]:
        clocks = self._clocks.pop(wanted.request, None) or [0] * len(self._servers)
        self._redo[wanted.seq] = _OpenPush(wanted, clocks=clocks)
        self.redo_bytes += wanted.grads.nbytes
        self.redo_bytes_max = max(self.redo_bytes_max, self.redo_bytes)
        return [
            Send(target=self._servers[s], message=Push(seq=wanted.seq, grads=grads, **parts))
            for s, grads, parts in self._split(wanted.plan, wanted.grads)
        ]

    def _split(self, plan: Plan, values: Float32Array) -> list[tuple[int, Float32Array, dict[str, Any]]]:
        """The plan's part for each server, also where it is empty: every server hears of every step."""
        assert len(plan.row_start) == len(self._servers) + 1, "the plan is for another number of servers"
        assert values.size == plan.floats
        rows, floats = plan.row_start.tolist(), plan.float_start.tolist()
        counts, slots = np.asarray(plan.counts), np.asarray(plan.slots)
        return [
            (
                s,
                values[floats[s] : floats[s + 1]],
                {"counts": counts[s], "slots": slots[rows[s] : rows[s + 1]]},
            )
            for s in range(len(self._servers))
        ]

    def _matters(self, peer: Identity) -> bool:
        return peer in self._servers or (peer.role == "coordinator" and self.view is None)


class _OpenPull:
    __slots__ = ("answered", "waiting", "wanted")

    def __init__(self, wanted: PullWanted, *, servers: int) -> None:
        self.wanted = wanted
        self.answered = [False] * servers
        self.waiting = servers


class _OpenPush:
    __slots__ = ("clocks", "received", "staleness", "waiting", "wanted")

    def __init__(self, wanted: PushWanted, *, clocks: list[int]) -> None:
        self.wanted = wanted
        self.clocks = clocks
        self.received = [False] * len(clocks)
        self.waiting = len(clocks)
        self.staleness = 0
