"""Asynchronous pushes: each is applied when it arrives, in the order of its worker.

At a replacement a push may come before its rows are back. Then it waits in a queue of its worker, with all that come
after it, and is applied when all its rows are there, to all its groups at once: applied in pieces, rows would be ahead
of their marks, or behind them. A cut may hold pushes back for a moment (`cut.py`). A push whose rows are on disk
(`paging.py`) waits in the same queue.
"""

from __future__ import annotations

from collections import deque

from regrow.core.flusher import Part
from regrow.core.identity import Identity
from regrow.core.messages import Assign, Pull, Push
from regrow.core.paging import Waiter
from regrow.core.serving import Effect, Parts, Serving


class AsyncServing(Serving):
    """A push at a time."""

    def __init__(self, parts: Parts) -> None:
        super().__init__(parts)
        self._pushes: dict[int, deque[tuple[Identity, Push]]] = {}  # worker -> pushes whose rows are not back
        self._held: list[tuple[Identity, Push]] = []  # until all servers have cut
        self._unprepared: list[tuple[Identity, int]] = []  # pushes not yet staged at holders (two-phase commit)
        self._commit = self.job.protection.flush.commit
        self._two_phases = self._commit == "2pc" and self.job.protection.has_parities

    def mark_of(self, worker: int) -> int:
        return worker

    def find_committed(self, worker: int) -> int:
        return 0

    def forget_worker(self, worker: int) -> None:
        self._pushes.pop(worker, None)
        self._held = [(who, push) for who, push in self._held if who.id != worker]
        self._unprepared = [(who, seq) for who, seq in self._unprepared if who.id != worker]

    def pull(self, source: Identity, pull: Pull) -> list[Effect]:
        return self.read_rows(source, pull)

    def assign(self, assign: Assign) -> list[Effect]:
        self.assign_here(assign)
        return []

    def push(self, source: Identity, push: Push) -> list[Effect]:
        if self.cut.holds(source.id, push.seq):
            self._held.append((source, push))
            return []
        queue = self._pushes.get(source.id)
        done = queue[-1][1].seq if queue else self.span(source.id)[0]
        if push.seq > done + 1 and self._commit != "none":
            raise ValueError(f"push {push.seq} came after push {done}")
        if self.ways.is_whole and self.paging is None:
            return self._apply(source, push)
        self._pushes.setdefault(source.id, deque()).append((source, push))
        return self._apply_queue(source.id)

    def _apply_queue(self, worker: int) -> list[Effect]:
        """Applies the pushes of a worker in order, as far as their rows are here."""
        effects: list[Effect] = []
        queue = self._pushes.get(worker, deque())
        while queue:
            source, push = queue[0]
            part = self.take_unapplied((push.counts, push.slots, push.grads), worker, push.seq)
            faults = self.find_missing(part[0], part[1])
            if faults is not None:
                return effects + faults
            if self.paging is not None and self._waits_for_disk(worker, push.seq, part):
                return effects
            queue.popleft()
            effects += self._apply(source, push)
        if self._pushes.get(worker) is queue:  # a cut that was begun meanwhile may have let others in
            del self._pushes[worker]
        return effects

    def _waits_for_disk(self, worker: int, seq: int, part: Part) -> bool:
        """Whether the first push of a queue cannot be applied now: its rows are on disk, or a cut came meanwhile."""
        assert self.paging is not None
        return self.cut.holds(worker, seq) or not self.paging.ask(Waiter("push", worker, seq), part[0], part[1])

    def _apply(self, source: Identity, push: Push) -> list[Effect]:
        effects: list[Effect] = []
        if push.seq > self.span(source.id)[0]:
            part = self.take_unapplied((push.counts, push.slots, push.grads), source.id, push.seq)
            self.store.update(*part, push.seq, push.rates)
            self.count_updates(push.counts, push.slots, source.id, push.seq)
            for marks in self.flusher.applied:
                marks[source.id] = max(push.seq, marks[source.id])
            self.clock += 1
            self.rows_updated += push.slots.size
            effects += self._check_cut()
            effects += self.flusher.count_push(source.id, push.grads.nbytes)
        return [*self._acknowledge_prepared(source, push.seq), *effects]

    def _acknowledge_prepared(self, source: Identity, seq: int) -> list[Effect]:
        """In two phases, a push is acknowledged when every holder has it staged."""
        if self._two_phases and self.flusher.find_prepared(source.id) < seq:
            self._unprepared.append((source, seq))
            return []
        return [self.acknowledge(source, seq)]

    def answer_prepared(self) -> list[Effect]:
        if not self._unprepared:
            return []
        waiting, self._unprepared = self._unprepared, []
        return [effect for source, seq in waiting for effect in self._acknowledge_prepared(source, seq)]

    def retry_steps(self) -> list[Effect]:
        return [effect for worker in list(self._pushes) for effect in self._apply_queue(worker)]

    def resume(self, waiter: Waiter) -> list[Effect]:
        return self._apply_queue(waiter.worker)

    def _check_cut(self) -> list[Effect]:
        """Something was applied. If that is the instant to cut at, whoever was held back for it goes on."""
        begun = self.cut.check_marks(self.flusher.applied)
        return [*begun, *self.release()] if begun else [*self.cut.check_aside()]

    def release(self) -> list[Effect]:
        waiting = self.retry_steps() if self.paging is not None else []  # came before those that were held back
        held, self._held = self._held, []
        return waiting + [
            effect for source, push in held for effect in self.dispatch_safely(source, push)
        ]  # or held again
