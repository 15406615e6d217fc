"""Synchronous steps: the pushes of all workers for step t are summed and applied once, when t is committed.

Theory of operation. A push of step t is staged. A worker pulls step t + 1 only when every server has its push of t
(`session.py`), so that pull is the commit message of a two-phase commit that costs nothing: a server applies t when it
has staged it from *every* worker and heard of the pull of t + 1 from *every* worker, in worker order, and flushes at
once. Results do not depend on when anything arrived, so they are the same bits in every run.

A worker that died computes its last committed step t again, for servers that lost it. Others may have applied t
already, and must answer its pull of t with the rows *before* t: they take out what t changed (`_undo`). With the rule
that t is pulled only when t - 2 is durable everywhere, nobody is further ahead than one step, so one step is all that
ever has to be undone.

What breaks without the rules:
- A worker without rows for a server that says nothing to it: that server never commits. Pulls and pushes go to all.
- A pull answered by a server that then died, and not repeated: its successor never hears of the last commit. Whoever
  pushes step t + 1 has pulled it (`push`), and after the last step the pull is sent again.
- A step computed again from its own result: a silently wrong model. That is what undoing is for.
"""

from __future__ import annotations

import numpy as np

from regrow.core.flush_group import Part
from regrow.core.flusher import make_empty_part
from regrow.core.groups import by_table
from regrow.core.identity import Identity
from regrow.core.messages import Assign, Float32Array, Pull, Push
from regrow.core.paging import NOBODY, Waiter
from regrow.core.serving import Effect, Parts, Serving

STEPS_AHEAD_MAX = 2  # A worker is at most one step ahead of the slowest server, and pulls the next.


class SyncServing(Serving):
    """A step at a time."""

    def __init__(self, parts: Parts) -> None:
        super().__init__(parts)
        self._staged: dict[int, dict[int, Push]] = {}  # step -> worker -> push
        self._pulled: dict[int, int] = {}  # worker -> newest step pulled
        self._step_pulls: dict[tuple[int, int], tuple[Identity, Pull]] = {}  # by worker and step: waiting
        # What the last step changed in rows without parities: weights before XOR after. (Of others, flushes know it.)
        self._bare_last: Part = make_empty_part(len(self.job.tables))
        self._undoes_bare = self.flusher.geometry.bare is not None and self.job.protection.replaces_servers

    def mark_of(self, worker: int) -> int:
        return 0

    def find_committed(self, worker: int) -> int:
        # A worker that pulled step t + 1 knows that step t is staged everywhere: it will be committed.
        ahead = max(applied[0] for applied in self.flusher.applied)
        return max(ahead, self._pulled.get(worker, 0) - 1)

    def forget_worker(self, worker: int) -> None:
        self._step_pulls = {key: item for key, item in self._step_pulls.items() if key[0] != worker}

    def assign(self, assign: Assign) -> list[Effect]:
        self.assign_here(assign)
        return [*self.flusher.flush_all()]  # not together with a step: undoing that would undo this

    # --- Pulls ---

    def pull(self, source: Identity, pull: Pull) -> list[Effect]:
        if not pull.step:
            return self.read_rows(source, pull)  # somebody only looks
        self.requests.check_slots(pull.counts, pull.slots)
        least, most = self.span(0)
        undoable = self.job.protection.replaces_servers and most > 0
        if not most + (0 if undoable else 1) <= pull.step <= least + STEPS_AHEAD_MAX:
            raise ValueError(f"pull of step {pull.step} while step {least} is committed")
        self._pulled[source.id] = max(pull.step, self._pulled.get(source.id, 0))
        self._step_pulls[source.id, pull.step] = (source, pull)  # sent again, it is still one pull
        if self.paging is not None and pull.step > least + 1:
            self.paging.expect(source.id, pull.counts, pull.slots)  # read while others still compute
        return self.commit()

    def _answer_steps(self) -> list[Effect]:
        """Answers the pulls whose step has come: every group is at the one before, or (again) at the step itself."""
        effects: list[Effect] = []
        least, _ = self.span(0)
        for key, (source, pull) in list(self._step_pulls.items()):
            if pull.step > least + 1:
                continue
            faults = self.find_missing(pull.counts, pull.slots)
            if faults is not None:
                effects += faults
                continue
            if self.paging is not None and not self.paging.ask(Waiter("step pull", *key), pull.counts, pull.slots):
                continue
            del self._step_pulls[key]
            rows = self.gather(pull.counts, pull.slots)
            self._undo(pull, rows)
            effects.append(self.answer(source, pull, rows))
        return effects

    def _undo(self, pull: Pull, rows: Float32Array) -> None:
        """Takes the pulled step itself back out of rows that have it: whoever asks computes that step again."""
        lasts = [
            by_table(self.flusher.last_step(g), self.flusher.floats)
            for g, marks in enumerate(self.flusher.applied[: len(self.flusher.coded)])
            if marks[0] == pull.step
        ]
        dims = self.requests.dims.tolist()
        bare = self.flusher.geometry.bare
        if bare is not None and self.flusher.applied[bare][0] == pull.step:
            lasts.append(by_table(self._bare_last, dims))
        for table, (slots, values) in by_table((pull.counts, pull.slots, rows), dims).items():
            weights = values.view(np.uint32).reshape(slots.size, -1)
            for last in lasts:
                if table not in last:
                    continue
                changed, deltas = last[table]
                bits = deltas.view(np.uint32).reshape(changed.size, -1)[:, : weights.shape[1]]
                order = np.argsort(changed)
                found = np.searchsorted(changed, slots, sorter=order).clip(max=changed.size - 1)
                hits = changed[order[found]] == slots
                weights[hits] ^= bits[order[found[hits]]]

    # --- Pushes and commits ---

    def push(self, source: Identity, push: Push) -> list[Effect]:
        least, _ = self.span(0)
        if push.seq > least + STEPS_AHEAD_MAX:
            raise ValueError(f"push of step {push.seq} while step {least} is committed")
        if push.seq > least:
            self._check_rates(source.id, push)
            self._staged.setdefault(push.seq, {})[source.id] = push
        # Whoever computed a step has pulled it, perhaps from the server that this one replaces.
        self._pulled[source.id] = max(push.seq, self._pulled.get(source.id, 0))
        return [self.acknowledge(source, push.seq), *self.commit()]

    def _check_rates(self, worker: int, push: Push) -> None:
        """What all workers pushed is applied at once, with one learning rate."""
        for other, staged in self._staged.get(push.seq, {}).items():
            if other != worker and staged.rates != push.rates:
                mine, theirs = (
                    each.rates or [t.optimizer.learning_rate for t in self.job.tables] for each in (push, staged)
                )
                pairs = zip(self.job.tables, mine, theirs, strict=True)
                name, rate, there = next((t.name, a, b) for t, a, b in pairs if a != b)
                raise ValueError(
                    f"step {push.seq} has learning rate {rate:g} for table {name!r}, and {there:g} in worker {other}"
                )

    def commit(self) -> list[Effect]:
        """Applies the next step once all workers staged it and pulled the one after; answers what can be."""
        step = self.span(0)[0] + 1
        staged = self._staged.get(step, {})
        if self.cut.is_pausing or not self._is_committed(step, staged):
            return self._answer_steps()
        waiter = Waiter("step", NOBODY, step)
        if self.paging is not None and self.paging.is_waiting(waiter):
            return []
        parts = [(staged[w].counts, staged[w].slots, staged[w].grads) for w in range(self.job.workers)]
        summed = parts[0] if len(parts) == 1 else self.store.sum_pushes(parts)
        summed = self.take_unapplied(summed, 0, step)
        faults = self.find_missing(summed[0], summed[1])
        if faults is not None:
            return faults
        if self.paging is not None and not self.paging.ask(waiter, summed[0], summed[1]):
            return []
        for counts, slots, _ in parts:
            self.count_updates(counts, slots, 0, step)
        self._apply(summed, step, staged[0].rates)
        del self._staged[step]
        self.clock += len(parts)
        cut = self.cut.check_marks(self.flusher.applied) or self.cut.check_aside()
        return [*cut, *self.flusher.flush_all(), *self._answer_steps()]

    def _is_committed(self, step: int, staged: dict[int, Push]) -> bool:
        workers = range(self.job.workers)
        return len(staged) == len(workers) and all(self._pulled.get(w, 0) > step for w in workers)

    def _apply(self, part: Part, step: int, rates: tuple[float, ...]) -> None:
        if self._undoes_bare:
            counts, slots, _ = self._take_bare(part)
            before = self.gather(counts, slots)
            self.store.update(*part, step, rates)
            changes = before.view(np.uint32) ^ self.gather(counts, slots).view(np.uint32)
            self._bare_last = counts, slots, changes.view(np.float32)
        else:
            self.store.update(*part, step, rates)
        for marks in self.flusher.applied:
            marks[0] = step
        self.rows_updated += part[1].size

    def _take_bare(self, part: Part) -> Part:
        """The rows without parities."""
        geometry = self.flusher.geometry
        wanted = geometry.of_slots(part[0], part[1]) == geometry.bare
        return self.requests.select(wanted, np.repeat(np.arange(part[0].size), part[0]), part[1], part[2])

    def retry_steps(self) -> list[Effect]:
        return self.commit()

    def release(self) -> list[Effect]:
        return self.commit()

    def resume(self, waiter: Waiter) -> list[Effect]:
        return self.commit()

    def answer_durable(self) -> list[Effect]:
        # A worker may wait for this before its next pull; asynchronously replies or the clock carry it.
        return [*super().answer_durable(), *self.tell_durable()]
