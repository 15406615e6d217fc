"""The patches behind the planted bugs (planted.py): each makes a wrong method of the core out of the right one.

A patch is `patch(original) -> method`. It changes as little as it can, so that what is found is the bug and not the
patch; should the core change under it, it must be changed too, or its plant is found for another reason.
"""

from __future__ import annotations

import dataclasses
from collections import deque
from typing import Any

import msgspec
import numpy as np

from regrow.core.cut import Unsave
from regrow.core.decode_batch import Sweep
from regrow.core.effects import Delivered, Send
from regrow.core.messages import Flush, Opened, Push
from regrow.core.states import CutState, SessionState, WayState

# --- The seventeen ---


def epoch_fencing(original: Any) -> Any:
    sent: dict[Any, int] = {}  # message -> the epoch it was sent in

    def receive(self: Any, event: Any) -> Any:
        if isinstance(event, Delivered) and event.source.role == "server" and self.server is not None:
            epoch = self.server.view.epoch
            if sent.get(event.message, epoch) < epoch:
                return []
        effects = original(self, event)
        for effect in effects:
            if isinstance(effect, Send) and effect.target.role == "server" and self.server is not None:
                sent[effect.message] = self.server.view.epoch
        return effects

    return receive


def stream_end_without_marks(original: Any) -> Any:
    def on_stream_end(self: Any, source: Any, end: Any) -> Any:
        return original(self, source, msgspec.structs.replace(end, marks=(0,) * len(end.marks)))

    return on_stream_end


def one_applied(original: Any) -> Any:
    def activate(self: Any, g: int, **values: Any) -> None:
        original(self, g, **values)
        if all(group.active for group in self.groups):
            most = [max(marks) for marks in zip(*self.applied, strict=True)]
            self.applied[:] = [list(most) for _ in self.applied]

    return activate


def piecewise_push(original: Any) -> Any:
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
                self.store.update(*self.requests.select(here, tables, part[1], part[2]), push.seq, push.rates)
                counts, slots, grads = self.requests.select(~here, tables, part[1], part[2])
                queue[0] = source, Push(seq=push.seq, rates=push.rates, counts=counts, slots=slots, grads=grads)
        return original(self, worker)

    return apply_queue


def present_rates(original: Any) -> Any:
    def push(self: Any, wanted: Any, s: int) -> Any:
        newest = self._redo[max(self._redo)].wanted
        return original(self, dataclasses.replace(wanted, rates=newest.rates), s)

    return push


def rates_of_the_job(original: Any) -> Any:
    def apply_queue(self: Any, worker: int) -> Any:
        if not self.ways.is_whole and (queue := self._pushes.get(worker)):
            queue[0] = (queue[0][0], msgspec.structs.replace(queue[0][1], rates=()))
        return original(self, worker)

    return apply_queue


def flush_before_snapshot(original: Any) -> Any:
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


def deltas_before_answers(original: Any) -> Any:
    def adjust(self: Any, *arguments: Any) -> None:
        waiting = [(batch, batch.waiting) for batch in self._batches.values()]
        for batch, _ in waiting:
            batch.waiting = set()
        original(self, *arguments)
        for batch, members in waiting:
            batch.waiting = members

    return adjust


def late_faults(original: Any) -> Any:
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
                sends += self._begin(sweep, self._stripes(self._first[table] + blocks), background=False)
        return sends

    return on_fault


def piecewise_flush(original: Any) -> Any:
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
        first = msgspec.structs.replace(flush, counts=counts, slots=flush.slots[:-1], deltas=flush.deltas[:-floats])
        return original(self, source, first)

    return on_flush


def marks_only_with_rows(original: Any) -> Any:
    def flush(self: Any, g: int, *arguments: Any) -> Any:
        return original(self, g, *arguments) if self._store.pending_rows(g) else []

    return flush


def durable_waits_for_streams(original: Any) -> Any:
    def find_covered(self: Any, g: int, acked: Any) -> Any:
        streams, self.groups[g].streams = self.groups[g].streams, {}
        try:
            return original(self, g, acked)
        finally:
            self.groups[g].streams = streams

    return find_covered


def restart_from_applied(original: Any) -> Any:
    def dispatch(self: Any, source: Any, message: Any) -> Any:
        effects = original(self, source, message)
        for index, effect in enumerate(effects):
            if isinstance(effect, Send) and isinstance(effect.message, Opened):
                opened = msgspec.structs.replace(effect.message, durable=self.span(source.id)[0])
                effects[index] = msgspec.structs.replace(effect, message=opened)
        return effects

    return dispatch


def pulls_not_resent(original: Any) -> Any:
    def on_joined(self: Any, peer: Any) -> Any:
        pulls = self._pulls
        if self.life.state is SessionState.WORKING:
            self._pulls = {}
        try:
            return original(self, peer)
        finally:
            self._pulls = pulls

    return on_joined


def silent_without_rows(original: Any) -> Any:
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


def no_undo(original: Any) -> Any:
    return lambda self, pull, rows: None


def touched_bits_lost(original: Any) -> Any:
    def know_touched(self: Any, have: Any) -> Any:
        touched = have.touched.copy()
        touched &= ~np.uint64(1)
        return original(self, msgspec.structs.replace(have, touched=touched))

    return know_touched


def frames_not_resent(original: Any) -> Any:
    def resume(self: Any, peer_received: int) -> Any:
        original(self, peer_received)
        if self.acknowledged or self.received:
            self._kept.clear()
            self.kept_bytes = 0
            self.sent = self.acknowledged
            return []
        return original(self, peer_received)

    return resume


def one_epoch(original: Any) -> Any:
    def init(self: Any, *, term: int = 0, **values: Any) -> None:
        original(self, **values)

    return init


# --- Checkpoints ---


def drain(store: Any) -> None:
    """Takes what is captured, and calls it stored."""
    while store.capture_left():
        store.capture_chunk(1 << 20)
    store.end_capture(True)


def dirty_lost(original: Any) -> Any:
    def give_up(self: Any) -> Any:
        if self.life.state is not CutState.CAPTURED:
            return original(self)
        drain(self._store)
        self.life.move("over")
        return [*original(self), Unsave(number=self.number)]

    return give_up


def forgets_when_saved(original: Any) -> Any:
    def on_saved(self: Any, target: Any, saved: Any) -> Any:
        effects = original(self, target, saved)
        if effects and not saved.error:
            self._store.end_capture(True)
            self.life.move("over")
        return effects

    return on_saved


def captures_late(original: Any) -> Any:
    def check_marks(self: Any, applied: Any) -> Any:
        if self.life.state is not CutState.AWAITING or any(marks[0] <= self._at.marks[0] for marks in applied):
            return []
        return original(self, [self._at.marks])

    return check_marks


def held_push_first(original: Any) -> Any:
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


def one_server_is_enough(original: Any) -> Any:
    def on_saved(self: Any, server: int, message: Any) -> Any:
        peers = self._peers
        if server in peers:
            self._peers = {server: peers[server]}
        try:
            return original(self, server, message)
        finally:
            self._peers = peers

    return on_saved


def head_given_up(original: Any) -> Any:
    def abandon(self: Any, *arguments: Any, **values: Any) -> Any:
        if self._attempt.target:
            self.head = self._attempt.target
        return original(self, *arguments, **values)

    return abandon


def replacement_clean(original: Any) -> Any:
    def check_recovered(self: Any) -> Any:
        effects = original(self)
        if effects:
            self.store._shard.begin_capture(0, True)
            drain(self.store)
        return effects

    return check_recovered


def held_for_ever(original: Any) -> Any:
    return lambda self: []


def first_is_delta(original: Any) -> Any:
    def init(self: Any, *arguments: Any, **values: Any) -> None:
        original(self, *arguments, **values)
        self._full_wanted = False

    return init


def wish_forgotten(original: Any) -> Any:
    def abandon(self: Any, *arguments: Any, again: bool = False) -> Any:
        if again:
            self._wanted = None
        return original(self, *arguments, again=again)

    return abandon


def loads_uncommitted(original: Any) -> Any:
    def set_marks(self: Any, marks: Any, groups: Any) -> None:
        committed = self._committed
        original(self, marks, groups)
        self._committed = committed

    return set_marks


# --- Forbidden moves: one for each table of core/states.py ---


def broken_link_is_over(original: Any) -> Any:
    return lambda self: self.life.move("fenced")


def cut_twice(original: Any) -> Any:
    def check_marks(self: Any, applied: Any) -> Any:
        effects = original(self, applied)
        if effects:
            self.life.move("marks reached")
        return effects

    return check_marks


def stored_before_captured(original: Any) -> Any:
    def on_begun(self: Any, server: int, message: Any) -> Any:
        if self._attempt is not None and not message.late:
            self._attempt.life.move("all have stored")
        return original(self, server, message)

    return on_begun


def back_before_it_knows(original: Any) -> Any:
    def on_restored(self: Any, restored: Any) -> Any:
        original(self, restored)
        if self.life.state is WayState.LEARNING:
            self.life.move("last row is back")

    return on_restored


def dead_twice(original: Any) -> Any:
    def die(self: Any, reason: str) -> None:
        original(self, reason)
        self.life.move("died")

    return die


def opened_again(original: Any) -> Any:
    def on_view(self: Any, view: Any) -> Any:
        effects = original(self, view)
        if self.life.state is SessionState.WORKING:
            self.life.move("all have answered")
        return effects

    return on_view


# --- Who waits for whom ---


def stream_ends_early(original: Any) -> Any:
    def end_stream(self: Any, g: int, holder: int) -> Any:
        acked = self.groups[g].acked
        others = {other: number for other, number in acked.items() if other not in self.groups[g].streams}
        acked.update(dict.fromkeys(others, self.groups[g].number))
        try:
            return original(self, g, holder)
        finally:
            acked.update(others)

    return end_stream


def pushed_before_staged(original: Any) -> Any:
    return lambda self, source, seq: [self.acknowledge(source, seq)]


def hold_without_end(original: Any) -> Any:
    return lambda self, now: False


def staged_is_unanswered(original: Any) -> Any:
    def count_unanswered(self: Any, group: Any) -> int:
        prepared, group.prepared = group.prepared, group.acked
        try:
            return int(original(self, group))
        finally:
            group.prepared = prepared

    return count_unanswered


def durable_uncommitted(original: Any) -> Any:
    def settle(self: Any) -> None:
        committed = self._committed
        original(self)
        self._committed = committed

    return settle


def durable_unanswered(original: Any) -> Any:
    def commit_pushes(self: Any) -> Any:
        durable, self._durable = self._durable, [0] * len(self._durable)
        try:
            return original(self)
        finally:
            self._durable = durable

    return commit_pushes
