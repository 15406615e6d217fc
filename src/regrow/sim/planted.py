"""Known bugs, put back into the real core on purpose: the simulator must find each of them.

They are the seventeen holes of the protocol's first draft (docs/protocol.md has the table), what a checkpoint could get
wrong, and one forbidden move for each table of core/states.py. Each is a small patch of one method, in force inside
`with plant(name)`; it says in which profiles it shows, and which invariants must see it.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from regrow.core.coordinator import Coordinator, Place
from regrow.core.cut import CutSide, Unsave
from regrow.core.cuts import Cuts
from regrow.core.decode import Decoder, Sweep
from regrow.core.door import ServerDoor
from regrow.core.effects import Delivered, Send
from regrow.core.flusher import Flusher
from regrow.core.holder import Holder
from regrow.core.link import Link
from regrow.core.messages import Flush, Opened, Push
from regrow.core.rebuild import Rebuild
from regrow.core.server import Server
from regrow.core.serving import Serving
from regrow.core.serving_async import AsyncServing
from regrow.core.serving_sync import SyncServing
from regrow.core.session import Session
from regrow.core.states import CutState, SessionState, WayState


@dataclasses.dataclass(frozen=True, slots=True)
class Bug:
    """What is patched: `patch(original)` makes the wrong method out of the right one."""

    what: str
    owner: Any
    method: str
    patch: Callable[[Any], Any]
    profiles: tuple[str, ...]
    caught_by: tuple[str, ...]  # the invariants that see it; found by any other, the plant or the checks are wrong


@contextlib.contextmanager
def plant(name: str | None) -> Iterator[None]:
    """The core with this bug, for as long as it lasts. None: as it is."""
    if name is None:
        yield
        return
    bug = BUGS[name]
    original = getattr(bug.owner, bug.method)
    setattr(bug.owner, bug.method, bug.patch(original))
    try:
        yield
    finally:
        setattr(bug.owner, bug.method, original)


# --- The seventeen ---


def _epoch_fencing(original: Any) -> Any:
    def receive(self: Any, event: Any) -> Any:
        if isinstance(event, Delivered) and event.source.role == "server" and self.server is not None:
            epoch = self.server.view.epoch
            if getattr(event.message, "sent_epoch", epoch) < epoch:
                return []
        effects = original(self, event)
        for effect in effects:
            if isinstance(effect, Send) and effect.target.role == "server" and self.server is not None:
                object.__setattr__(effect.message, "sent_epoch", self.server.view.epoch)
        return effects

    return receive


def _stream_end_without_marks(original: Any) -> Any:
    def on_stream_end(self: Any, source: Any, end: Any) -> Any:
        return original(self, source, dataclasses.replace(end, marks=(0,) * len(end.marks)))

    return on_stream_end


def _one_applied(original: Any) -> Any:
    def activate(self: Any, g: int, **values: Any) -> None:
        original(self, g, **values)
        if all(group.active for group in self.groups):
            most = [max(marks) for marks in zip(*self.applied, strict=True)]
            self.applied[:] = [list(most) for _ in self.applied]

    return activate


def _piecewise_push(original: Any) -> Any:
    def apply_queue(self: Any, worker: int) -> Any:
        queue = self._pushes.get(worker, deque())
        if queue and not self.ways.is_whole:
            source, push = queue[0]
            part = self.take_unapplied((push.counts, push.slots, push.grads), worker, push.seq)
            missing_counts, missing = self.store.prepare(part[0], part[1])
            if missing.size:
                tables = np.repeat(np.arange(part[0].size), part[0])
                absent = {
                    (int(t), int(slot))
                    for t, slot in zip(np.repeat(np.arange(part[0].size), missing_counts), missing, strict=True)
                }
                here = np.array([(int(t), int(s)) not in absent for t, s in zip(tables, part[1], strict=True)], bool)
                self.store.update(*self.requests.select(here, tables, part[1], part[2]), push.seq)
                counts, slots, grads = self.requests.select(~here, tables, part[1], part[2])
                queue[0] = source, Push(seq=push.seq, counts=counts, slots=slots, grads=grads)
        return original(self, worker)

    return apply_queue


def _flush_before_snapshot(original: Any) -> Any:
    def on_snap_ask(self: Any, source: Any, ask: Any) -> Any:
        sends = []
        for g, group in enumerate(self.flusher.groups):
            if self.store.pending_rows(g):
                applied = self.flusher.applied[g]
                self.flusher.applied[g] = list(group.flushed)  # the watermark is left behind
                sends += self.flusher.flush(g)
                self.flusher.applied[g] = applied
        return [*sends, *original(self, source, ask)]

    return on_snap_ask


def _deltas_before_answers(original: Any) -> Any:
    def adjust(self: Any, *arguments: Any) -> None:
        waiting = [(batch, batch.waiting) for batch in self._batches.values()]
        for batch, _ in waiting:
            batch.waiting = set()
        original(self, *arguments)
        for batch, members in waiting:
            batch.waiting = members

    return adjust


def _late_faults(original: Any) -> Any:
    def on_fault(self: Any, source: Any, fault: Any) -> Any:
        """Decodes whatever is asked for, lost or not, from whoever else is in the stripe."""
        sends: list[Any] = []
        start = 0
        for table, count in enumerate(fault.counts.tolist()):
            slots = fault.slots[start : start + count]
            start += count
            spec = self._groups.job.tables[table]
            member = (source.id - self.server + spec.k) % self._groups.ring
            blocks = np.unique(slots[slots % spec.k == member] // spec.k).astype(np.int64)
            if blocks.size:
                sweep = Sweep(k=spec.k, r=spec.r, q=0, tables=(table,), unknown=(member,), partners=())
                sends += self._begin(sweep, self._first[table] + blocks, background=False)
        return sends

    return on_fault


def _piecewise_flush(original: Any) -> Any:
    def on_flush(self: Any, source: Any, flush: Flush) -> Any:
        rest = self.__dict__.pop("_rest_of_flush", None)
        if rest is not None:
            self._store.parity_apply(*rest)
        if flush.slots.size < 2:
            return original(self, source, flush)
        table = int(np.flatnonzero(flush.counts)[-1])
        floats = self._store.record_floats(table)
        counts = flush.counts.copy()
        counts[table] -= 1
        last = np.zeros_like(flush.counts)
        last[table] = 1
        self._rest_of_flush = source.id, last, flush.slots[-1:], flush.deltas[-floats:]
        first = dataclasses.replace(flush, counts=counts, slots=flush.slots[:-1], deltas=flush.deltas[:-floats])
        return original(self, source, first)

    return on_flush


def _marks_only_with_rows(original: Any) -> Any:
    def flush(self: Any, g: int, *arguments: Any) -> Any:
        return original(self, g, *arguments) if self._store.pending_rows(g) else []

    return flush


def _durable_waits_for_streams(original: Any) -> Any:
    def reached(self: Any, g: int, mark: int, acked: Any) -> Any:
        streams, self.groups[g].streams = self.groups[g].streams, {}
        try:
            return original(self, g, mark, acked)
        finally:
            self.groups[g].streams = streams

    return reached


def _restart_from_applied(original: Any) -> Any:
    def dispatch(self: Any, source: Any, message: Any) -> Any:
        effects = original(self, source, message)
        for index, effect in enumerate(effects):
            if isinstance(effect, Send) and isinstance(effect.message, Opened):
                opened = dataclasses.replace(effect.message, durable=self.span(source.id)[0])
                effects[index] = dataclasses.replace(effect, message=opened)
        return effects

    return dispatch


def _pulls_not_resent(original: Any) -> Any:
    def on_joined(self: Any, peer: Any) -> Any:
        pulls = self._pulls
        if self.life.state is SessionState.WORKING:
            self._pulls = {}
        try:
            return original(self, peer)
        finally:
            self._pulls = pulls

    return on_joined


def _silent_without_rows(original: Any) -> Any:
    def on_push_wanted(self: Any, wanted: Any) -> Any:
        effects = original(self, wanted)
        if self.view.job.mode != "sync":
            return effects
        push = self._redo[wanted.seq]
        sent = []
        for effect in effects:
            if isinstance(effect, Send) and isinstance(effect.message, Push) and not effect.message.slots.size:
                push.received[effect.target.id] = True
                push.waiting -= 1
            else:
                sent.append(effect)
        return sent

    return on_push_wanted


def _no_undo(original: Any) -> Any:
    return lambda self, pull, rows: None


def _touched_bits_lost(original: Any) -> Any:
    def know_touched(self: Any, have: Any) -> Any:
        touched = have.touched.copy()
        touched &= ~np.uint64(1)
        return original(self, dataclasses.replace(have, touched=touched))

    return know_touched


def _frames_not_resent(original: Any) -> Any:
    def resume(self: Any, peer_received: int) -> Any:
        original(self, peer_received)
        if self.acknowledged or self.received:
            self._kept.clear()
            self.kept_bytes = 0
            self.sent = self.acknowledged
            return []
        return original(self, peer_received)

    return resume


def _one_epoch(original: Any) -> Any:
    def init(self: Any, *, term: int = 0, **values: Any) -> None:
        original(self, **values)

    return init


# --- Checkpoints ---


def _drain(store: Any) -> None:
    """Takes what is captured, and calls it stored."""
    while store.capture_left():
        store.capture_chunk(1 << 20)
    store.end_capture(True)


def _dirty_lost(original: Any) -> Any:
    def give_up(self: Any) -> Any:
        if self.life.state is not CutState.CAPTURED:
            return original(self)
        _drain(self._store)
        self.life.move("over")
        return [*original(self), Unsave(number=self.number)]

    return give_up


def _forgets_when_saved(original: Any) -> Any:
    def on_saved(self: Any, target: Any, saved: Any) -> Any:
        effects = original(self, target, saved)
        if effects and not saved.error:
            self._store.end_capture(True)
            self.life.move("over")
        return effects

    return on_saved


def _captures_late(original: Any) -> Any:
    def check_marks(self: Any, applied: Any) -> Any:
        if self.life.state is not CutState.AWAITING or any(marks[0] <= self._at.marks[0] for marks in applied):
            return []
        return original(self, [self._at.marks])

    return check_marks


def _held_push_first(original: Any) -> Any:
    def check_cut(self: Any) -> Any:
        cut, at = self.cut, self.cut._at
        reached = cut.life.state is CutState.AWAITING and all(tuple(m) == at.marks for m in self.flusher.applied)
        if not reached:
            return original(self)
        cut.life.state = CutState.IDLE
        released = self.release()
        cut.life.state = CutState.AWAITING
        return [*released, *cut.check_marks([at.marks])]

    return check_cut


def _late_reply(original: Any) -> Any:
    def of(self: Any, server: int, number: int) -> Any:
        return self._attempt if self._attempt is not None and server in self._peers else None

    return of


def _head_given_up(original: Any) -> Any:
    def abandon(self: Any, *arguments: Any, **values: Any) -> Any:
        if self._attempt.target:
            self.head = self._attempt.target
        return original(self, *arguments, **values)

    return abandon


def _replacement_clean(original: Any) -> Any:
    def check_recovered(self: Any) -> Any:
        effects = original(self)
        if effects:
            self.store._shard.begin_capture(0, True)
            _drain(self.store)
        return effects

    return check_recovered


def _held_for_ever(original: Any) -> Any:
    return lambda self: []


def _first_is_delta(original: Any) -> Any:
    def init(self: Any, *arguments: Any, **values: Any) -> None:
        original(self, *arguments, **values)
        self._full_wanted = False

    return init


def _wish_forgotten(original: Any) -> Any:
    def abandon(self: Any, *arguments: Any, again: bool = False) -> Any:
        if again:
            self._wanted = None
        return original(self, *arguments, again=again)

    return abandon


def _loads_uncommitted(original: Any) -> Any:
    def set_marks(self: Any, marks: Any, groups: Any) -> None:
        committed = self._committed
        original(self, marks, groups)
        self._committed = committed

    return set_marks


# --- Forbidden moves: one for each table of core/states.py ---


def _broken_link_is_over(original: Any) -> Any:
    return lambda self: self.life.move("fenced")


def _cut_twice(original: Any) -> Any:
    def check_marks(self: Any, applied: Any) -> Any:
        effects = original(self, applied)
        if effects:
            self.life.move("marks reached")
        return effects

    return check_marks


def _stored_before_captured(original: Any) -> Any:
    def on_begun(self: Any, server: int, message: Any) -> Any:
        if self._attempt is not None and not message.late:
            self._attempt.life.move("all have stored")
        return original(self, server, message)

    return on_begun


def _back_before_it_knows(original: Any) -> Any:
    def on_restored(self: Any, restored: Any) -> Any:
        original(self, restored)
        if self.life.state is WayState.LEARNING:
            self.life.move("last row is back")

    return on_restored


def _dead_twice(original: Any) -> Any:
    def die(self: Any, reason: str) -> None:
        original(self, reason)
        self.life.move("died")

    return die


def _opened_again(original: Any) -> Any:
    def on_view(self: Any, view: Any) -> Any:
        effects = original(self, view)
        if self.life.state is SessionState.WORKING:
            self.life.move("all have answered")
        return effects

    return on_view


CUTTING = ("cuts", "cuts-sync", "cuts-2pc")
MOVES = ("moves",)
ASYNC = ("async", "mixed-k", "r2")
SYNC = ("sync", "sync-r2")

BUGS: dict[str, Bug] = {
    "epoch-fencing": Bug(
        "messages sent in an older view are thrown away",
        ServerDoor,
        "receive",
        _epoch_fencing,
        ASYNC,
        ("refusal", "I8"),
    ),
    "stream-without-marks": Bug(
        "a rebuilt parity holder has no watermarks",
        Holder,
        "on_stream_end",
        _stream_end_without_marks,
        ASYNC,
        ("I2", "I1"),
    ),
    "one-applied": Bug(
        "one watermark for all groups of a replacement", Flusher, "activate", _one_applied, ASYNC, ("I5", "I1")
    ),
    "piecewise-push": Bug(
        "a push is applied to the rows that are there, before the others",
        AsyncServing,
        "_apply_queue",
        _piecewise_push,
        ASYNC,
        ("I1",),
    ),
    "flush-before-snapshot": Bug(
        "pending rows are flushed before a snapshot is answered",
        Server,
        "_on_snap_ask",
        _flush_before_snapshot,
        ASYNC,
        ("I1",),
    ),
    "deltas-before-answers": Bug(
        "deltas of members that have not answered are accumulated",
        Decoder,
        "adjust",
        _deltas_before_answers,
        ASYNC,
        ("I5",),
    ),
    "late-faults": Bug(
        "a fault is decoded whether the row is lost or not",
        Decoder,
        "on_fault",
        _late_faults,
        ("r2", "sync-r2"),
        ("refusal", "I8"),
    ),
    "piecewise-flush": Bug(
        "a flush is applied in two pieces", Holder, "on_flush", _piecewise_flush, ASYNC, ("I5", "I1")
    ),
    "marks-only-with-rows": Bug(
        "watermarks travel only with deltas", Flusher, "flush", _marks_only_with_rows, ASYNC, ("I8",)
    ),
    "durable-waits-for-streams": Bug(
        "durability waits for a holder that is being rebuilt",
        Flusher,
        "_find_mark",
        _durable_waits_for_streams,
        ("async", "r2", "mixed-k"),
        ("I8",),
    ),
    "restart-from-applied": Bug(
        "a worker restarts from what was applied, not from what is durable",
        Serving,
        "_dispatch",
        _restart_from_applied,
        ASYNC,
        ("I2",),
    ),
    "pulls-not-resent": Bug(
        "a pull that was waiting is not sent to the replacement",
        Session,
        "_on_joined",
        _pulls_not_resent,
        ASYNC,
        ("I8",),
    ),
    "silent-without-rows": Bug(
        "a worker without rows for a server says nothing to it (sync)",
        Session,
        "_on_push_wanted",
        _silent_without_rows,
        SYNC,
        ("I8",),
    ),
    "no-undo": Bug(
        "a step that is computed again is computed from its own result (sync)",
        SyncServing,
        "_undo",
        _no_undo,
        SYNC,
        ("I7",),
    ),
    "touched-bits-lost": Bug(
        "a replacement takes touched rows for initial ones",
        Rebuild,
        "_know_touched",
        _touched_bits_lost,
        ASYNC,
        ("I5", "I1", "I3"),
    ),
    "frames-not-resent": Bug(
        "what was on its way when a connection broke is lost",
        Link,
        "resume",
        _frames_not_resent,
        ASYNC,
        ("refusal", "I8"),
    ),
    "one-epoch": Bug(
        "a new coordinator counts its epochs from the beginning",
        Coordinator,
        "__init__",
        _one_epoch,
        ("coordinator",),
        ("I8",),
    ),
    "dirty-lost": Bug(
        "what a failed cut had captured does not count as changed any more",
        CutSide,
        "give_up",
        _dirty_lost,
        CUTTING,
        ("I11",),
    ),
    "forgets-when-saved": Bug(
        "a server forgets what changed when it has stored it, before the checkpoint exists",
        CutSide,
        "on_saved",
        _forgets_when_saved,
        CUTTING,
        ("I11",),
    ),
    "captures-late": Bug(
        "rows are captured one step too late (sync)",
        CutSide,
        "check_marks",
        _captures_late,
        ("cuts-sync",),
        ("I11", "I8"),
    ),
    "held-push-first": Bug(
        "pushes that were held back are applied before the rows are captured",
        AsyncServing,
        "_check_cut",
        _held_push_first,
        ("cuts", "cuts-2pc"),
        ("I11",),
    ),
    "late-reply": Bug(
        "an answer about an older cut counts for the newest", Cuts, "_of", _late_reply, CUTTING, ("I8", "I11", "moves")
    ),
    "head-given-up": Bug(
        "the next delta starts from a cut that was given up", Cuts, "_abandon", _head_given_up, CUTTING, ("I11",)
    ),
    "replacement-clean": Bug(
        "rows that came back to a replacement do not count as changed",
        Server,
        "_check_recovered",
        _replacement_clean,
        CUTTING,
        ("I11",),
    ),
    "held-for-ever": Bug(
        "pushes that a cut held back are not applied when it is over",
        AsyncServing,
        "release",
        _held_for_ever,
        ("cuts", "cuts-2pc"),
        ("refusal", "I8"),
    ),
    "wish-forgotten": Bug(
        "a wish for a last cut is forgotten when the one under way comes too late (sync)",
        Cuts,
        "_abandon",
        _wish_forgotten,
        ("cuts-sync",),
        ("I8",),
    ),
    "loads-uncommitted": Bug(
        "what is loaded waits for a commit of pushes that were made long ago (two-phase commit)",
        Flusher,
        "set_marks",
        _loads_uncommitted,
        ("cuts-2pc",),
        ("I8",),
    ),
    "first-is-delta": Bug(
        "a new coordinator begins with what changed since a cut that it does not know",
        Cuts,
        "__init__",
        _first_is_delta,
        CUTTING,
        ("I11",),
    ),
    "broken-link-is-over": Bug(
        "a link whose connection broke is taken for over", Link, "lose_connection", _broken_link_is_over, ASYNC, MOVES
    ),
    "cut-twice": Bug(
        "a server captures a cut that it has captured", CutSide, "check_marks", _cut_twice, CUTTING, MOVES
    ),
    "stored-before-captured": Bug(
        "the coordinator takes a cut for stored when it is captured",
        Cuts,
        "on_begun",
        _stored_before_captured,
        CUTTING,
        MOVES,
    ),
    "back-before-it-knows": Bug(
        "a replacement takes its rows for back before it knows where they stand",
        Rebuild,
        "_on_restored",
        _back_before_it_knows,
        ("r2", "mixed-k", "async"),
        MOVES,
    ),
    "dead-twice": Bug("a server dies twice in its place", Place, "die", _dead_twice, ASYNC, MOVES),
    "opened-again": Bug(
        "a session that works is opened again by a view", Session, "_on_view", _opened_again, ASYNC, MOVES
    ),
}
