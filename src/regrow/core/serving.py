"""What a server does for workers: pulls, pushes, steps, whole records.

Asynchronous mode applies a push when it arrives. Synchronous mode stages the pushes of step t and applies them, summed
in worker order, once every worker has staged t *and* pulled t + 1: that pull is the commit message of a two-phase
commit (see docs/protocol.md). At a replacement, rows may still be missing: whoever needs one waits for it here.

The rules to keep: a request is checked completely before it changes anything; each push is applied exactly once to each
group of rows, all its rows of a group at once, in the order of its worker.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np

from regrow.core.cut import CaptureStore, CutSide, Save, Unsave
from regrow.core.effects import Refuse, Send
from regrow.core.flusher import Flusher, Part, SourceStore
from regrow.core.groups import by_table
from regrow.core.holder import HolderStore
from regrow.core.job import JobSpec
from regrow.core.link import Identity
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
    WriteRecords,
)
from regrow.core.rebuild import Rebuild, RebuildStore

Effect = Send | Refuse | Save | Unsave

WAITING_MAX = 1 << 16  # Requests of all workers that wait for a replacement; a worker's own window is far smaller.


class Store(SourceStore, HolderStore, RebuildStore, CaptureStore, Protocol):
    """What holds the rows of a shard. Methods check all bounds first and raise ValueError or IndexError."""

    memory_bytes: int
    redundancy_bytes: int

    def gather(self, counts: Int32Array, slots: UInt32Array, out: Float32Array) -> None: ...
    def update(self, counts: Int32Array, slots: UInt32Array, grads: Float32Array, step: int) -> None: ...
    def assign_untouched(self, counts: Int32Array, slots: UInt32Array, weights: Float32Array) -> None: ...
    def read_records(self, table: int, slot_first: int, slot_count: int, out: Float32Array) -> None: ...
    def write_records(self, table: int, slot_first: int, slot_count: int, source: Float32Array) -> None: ...
    def load_rows(self, table: int, ids: UInt32Array, parts: Sequence[Float32Array]) -> int: ...
    def slots(self, table: int) -> int: ...
    def sum_pushes(self, parts: list[tuple[Any, Any, Any]]) -> Part: ...


class Serving:
    """The worker side of one server. Every method returns what to send."""

    def __init__(self, *, job: JobSpec, store: Store, flusher: Flusher, reply_bytes_max: int) -> None:
        self.job = job
        self.store = store
        self.flusher = flusher
        self.rebuild: Rebuild | None = None
        self.peers: dict[int, Identity] = {}  # the servers of the view
        self.is_sync = job.mode == "sync"
        self.cut = CutSide(store=store, is_sync=self.is_sync)
        self.loading = False  # rows are on their way from a checkpoint
        self.clock = 0  # pushes applied, of all workers
        self.pulls = 0
        self.rows_updated = 0
        self._reply_bytes_max = reply_bytes_max
        self._workers: dict[int, Identity] = {}  # newest incarnation heard of
        self._queued: list[tuple[Identity, Message]] = []  # until every group knows where it stands
        self._pushes: dict[int, deque[tuple[Identity, Push]]] = {}  # worker -> pushes whose rows are not back
        self._parked: list[tuple[Identity, Message]] = []  # requests whose rows are not back
        self._held: list[tuple[Identity, Push]] = []  # until all servers have cut (async)
        self._staged: dict[int, dict[int, Push]] = {}  # step -> worker -> push (sync)
        self._pulled: dict[int, int] = {}  # worker -> newest step pulled (sync)
        self._step_pulls: dict[tuple[int, int], tuple[Identity, Pull]] = {}  # by worker and step: waiting (sync)
        self._unprepared: list[tuple[Identity, int]] = []  # pushes not yet staged at holders (two-phase commit)
        self._loads: list[tuple[list[int], Send]] = []  # answers that wait for their flushes
        self._reported: dict[int, int] = {}  # worker -> durable as it was last told
        self._dims = np.array([table.dim for table in job.tables], np.int64)
        self._slots = np.array([store.slots(index) for index in range(len(job.tables))], np.int64)

    def durable(self, worker: int) -> int:
        """The last push of this worker that is safe here (sync: the last step)."""
        return self.flusher.durable(0 if self.is_sync else worker)

    @property
    def committed(self) -> int:
        """The last step, or push of the worker that is least far, that all rows of this server have."""
        return min(min(marks) for marks in self.flusher.applied)

    def receive(self, source: Identity, message: Message) -> list[Effect]:
        """A message of a worker."""
        if source.role != "worker":
            return [Refuse(target=source, reason=f"{type(message).__name__} from a {source.role}")]
        if source.id >= self.job.workers:
            return [Refuse(target=source, reason=f"worker {source.id} of a job with {self.job.workers}")]
        known = self._workers.get(source.id)
        if known is not None and source.incarnation < known.incarnation:
            return [Refuse(target=source, reason=f"a newer incarnation of {source} is at work")]
        if known is None or source.incarnation > known.incarnation:
            self._new_worker(source)
        if self.loading or (self.rebuild is not None and not self.rebuild.active):
            if len(self._queued) >= WAITING_MAX:
                return [Refuse(target=source, reason="too much for a server that is not back yet")]
            self._queued.append((source, message))
            return []
        return self._dispatch_safely(source, message)

    def _new_worker(self, source: Identity) -> None:
        """Another incarnation: what the one before still waited for is void. It starts from what is durable."""
        self._workers[source.id] = source
        self._reported.pop(source.id, None)
        self._pushes.pop(source.id, None)
        self._step_pulls = {key: item for key, item in self._step_pulls.items() if key[0] != source.id}
        self._parked = [(who, message) for who, message in self._parked if who.id != source.id]
        self._queued = [(who, message) for who, message in self._queued if who.id != source.id]
        self._held = [(who, push) for who, push in self._held if who.id != source.id]
        self._unprepared = [(who, seq) for who, seq in self._unprepared if who.id != source.id]

    def _dispatch_safely(self, source: Identity, message: Message) -> list[Effect]:
        try:
            return self._dispatch(source, message)
        except (ValueError, IndexError) as error:
            return [Refuse(target=source, reason=f"{type(message).__name__}: {error}")]

    def _dispatch(self, source: Identity, message: Message) -> list[Effect]:
        if isinstance(message, Pull):
            return self._on_pull(source, message)
        if isinstance(message, Push):
            return self._on_push(source, message)
        if isinstance(message, Commit):
            return [*self.flusher.commit(source.id, message.seq)]
        if isinstance(message, Assign):
            return self._on_assign(message)
        if isinstance(message, Expect):
            self._check_counts(message.counts, message.slots)
            self._check_range(message.counts, message.slots)
            return self._waits_for(message.counts, message.slots) or []
        if isinstance(message, ReadRecords):
            return self._on_read(source, message)
        if isinstance(message, WriteRecords):
            return self._on_write(source, message)
        if isinstance(message, Open):
            # A worker that pulled step t + 1 knows that step t is staged everywhere: it will be committed.
            ahead = max(applied[0] for applied in self.flusher.applied) if self.is_sync else 0
            committed = max(ahead, self._pulled.get(source.id, 0) - 1)
            opened = Opened(durable=self._durable(source.id), committed=committed)
            return [Send(target=source, message=opened)]
        raise ValueError("a server does not take this message")

    def _durable(self, worker: int) -> int:
        """`durable`, noted as told."""
        durable = self.durable(worker)
        self._reported[worker] = durable
        return durable

    def _span(self, mark: int) -> tuple[int, int]:
        """The least and the most any group has applied. They differ only at a replacement, after a failure."""
        applied = [marks[mark] for marks in self.flusher.applied]
        return min(applied), max(applied)

    def _on_assign(self, assign: Assign) -> list[Effect]:
        part = (assign.counts, assign.slots, assign.weights)
        if self.rebuild is not None:
            if self._row_floats(assign.counts, assign.slots) != assign.weights.size:
                raise ValueError(f"{assign.weights.size} weights do not fit {assign.slots.size} slots")
            self.check_slots(assign.counts, assign.slots)
            part = self._without_missing(*part)
        self.store.assign_untouched(*part)
        # Not together with a step: undoing that would undo this.
        return [*self.flusher.flush_all()] if self.is_sync and self.flusher.protected else []

    def _without_missing(self, counts: Int32Array, slots: UInt32Array, values: Float32Array) -> Part:
        """Without rows that are still to come back: they were touched, so they keep what they have."""
        missing_counts, missing = self.store.prepare(counts, slots)
        tables = np.repeat(np.arange(counts.size), counts)
        gone = np.repeat(np.arange(counts.size), missing_counts) << 32 | missing.astype(np.int64)
        here = ~np.isin(tables << 32 | slots.astype(np.int64), gone)
        return self._selected(here, tables, slots, values)

    def _selected(self, wanted: Any, tables: Any, slots: UInt32Array, values: Float32Array) -> Part:
        counts = np.bincount(tables[wanted], minlength=self._dims.size).astype(np.int32)
        return counts, slots[wanted], values[np.repeat(wanted, self._dims[tables])]

    # --- Pulls ---

    def _on_pull(self, source: Identity, pull: Pull) -> list[Effect]:
        if not (self.is_sync and pull.step):
            if self.rebuild is not None:
                self.check_slots(pull.counts, pull.slots)
                if (faults := self._waits_for(pull.counts, pull.slots)) is not None:
                    self._parked.append((source, pull))
                    return faults
            return [self._answer(source, pull)]
        self.check_slots(pull.counts, pull.slots)
        least, most = self._span(0)
        undoable = self.flusher.protected and most > 0
        if not most + (0 if undoable else 1) <= pull.step <= least + 2:
            raise ValueError(f"pull of step {pull.step} while step {least} is committed")
        self._pulled[source.id] = max(pull.step, self._pulled.get(source.id, 0))
        self._step_pulls[source.id, pull.step] = (source, pull)  # sent again, it is still one pull
        return self._commit()

    def _answer(self, source: Identity, pull: Pull) -> Send:
        rows = np.empty(self._row_floats(pull.counts, pull.slots), np.float32)
        self.store.gather(pull.counts, pull.slots, rows)
        if self.is_sync and pull.step:
            self._undo(pull, rows)
        self.pulls += 1
        reply = Rows(request=pull.request, durable=self._durable(source.id), clock=self.clock, rows=rows)
        return Send(target=source, message=reply)

    def _undo(self, pull: Pull, rows: Float32Array) -> None:
        """Takes the pulled step itself back out of rows that have it: whoever asks computes that step again."""
        lasts = [
            by_table(self.flusher.last_step(g), self.flusher.floats)
            for g, marks in enumerate(self.flusher.applied)
            if marks[0] == pull.step
        ]
        pulled = by_table((pull.counts, pull.slots, rows), self._dims.tolist())
        for table, (slots, values) in pulled.items():
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

    def _row_floats(self, counts: Int32Array, slots: UInt32Array) -> int:
        """How many floats the rows of these slots have; refuses before anything is allocated for them."""
        self._check_counts(counts, slots)
        return self.reply_floats(int(counts.astype(np.int64) @ self._dims))

    def reply_floats(self, floats: int) -> int:
        if floats * 4 > self._reply_bytes_max:
            raise ValueError(f"is about {floats * 4} bytes, at most {self._reply_bytes_max} are allowed")
        return floats

    def check_slots(self, counts: Int32Array, slots: UInt32Array) -> None:
        """What is used later is checked now: afterwards a refusal would hit whoever completes the step."""
        self._row_floats(counts, slots)
        self._check_range(counts, slots)

    def _check_counts(self, counts: Int32Array, slots: UInt32Array) -> None:
        described = counts.size == self._dims.size and not (counts < 0).any()
        if not described or int(counts.sum(dtype=np.int64)) != slots.size:
            raise ValueError(f"counts do not describe {slots.size} slots in {self._dims.size} tables")

    def _check_range(self, counts: Int32Array, slots: UInt32Array) -> None:
        beyond = slots >= np.repeat(self._slots, counts)
        if beyond.any():
            raise IndexError(f"slot {int(slots[beyond][0])} is out of range")

    # --- Pushes ---

    def _on_push(self, source: Identity, push: Push) -> list[Effect]:
        if self._row_floats(push.counts, push.slots) != push.grads.size:
            raise ValueError(f"{push.grads.size} gradient values do not fit {push.slots.size} slots")
        if self.is_sync:
            return self._on_push_sync(source, push)
        if self.cut.holds(source.id, push.seq):
            self.check_slots(push.counts, push.slots)
            self._held.append((source, push))
            return []
        queue = self._pushes.get(source.id)
        done = queue[-1][1].seq if queue else self._span(source.id)[0]
        if push.seq > done + 1 and self.job.flush.commit != "none":
            raise ValueError(f"push {push.seq} came after push {done}")
        if self.rebuild is None:
            return self._apply(source, push)
        self.check_slots(push.counts, push.slots)
        self._pushes.setdefault(source.id, deque()).append((source, push))
        return self._apply_queue(source.id)

    def _apply_queue(self, worker: int) -> list[Effect]:
        """Applies the pushes of a worker in order, as far as their rows are here."""
        effects: list[Effect] = []
        queue = self._pushes.get(worker, deque())
        while queue:
            source, push = queue[0]
            part = self._unapplied(push, worker, push.seq)
            faults = self._waits_for(part[0], part[1])
            if faults is not None:
                return effects + faults
            queue.popleft()
            effects += self._apply(source, push)
        self._pushes.pop(worker, None)
        return effects

    def _apply(self, source: Identity, push: Push) -> list[Effect]:
        effects: list[Effect] = []
        if push.seq > self._span(source.id)[0]:
            self.store.update(*self._unapplied(push, source.id, push.seq), push.seq)
            for marks in self.flusher.applied:
                marks[source.id] = max(push.seq, marks[source.id])
            self.clock += 1
            self.rows_updated += push.slots.size
            effects += self._check_cut()
            effects += self.flusher.applied_push()
        return [*self._pushed(source, push.seq), *effects]

    def _unapplied(self, push: Push, mark: int, seq: int) -> Part:
        """The rows of a push whose group does not have it yet: nearly always all of them."""
        part = (push.counts, push.slots, push.grads)
        return part if self._span(mark)[1] < seq else self._without_applied(part, mark, seq)

    def _without_applied(self, part: Part, mark: int, seq: int) -> Part:
        counts, slots, grads = part
        lacking = np.array([marks[mark] < seq for marks in self.flusher.applied])
        wanted = lacking[self.flusher.geometry.of_slots(counts, slots)]
        return self._selected(wanted, np.repeat(np.arange(counts.size), counts), slots, grads)

    def _on_push_sync(self, source: Identity, push: Push) -> list[Effect]:
        least, _ = self._span(0)
        if push.seq > least + 2:
            raise ValueError(f"push of step {push.seq} while step {least} is committed")
        if push.seq > least:
            self.check_slots(push.counts, push.slots)
            self._staged.setdefault(push.seq, {})[source.id] = push
        # Whoever computed a step has pulled it, perhaps from the server that this one replaces.
        self._pulled[source.id] = max(push.seq, self._pulled.get(source.id, 0))
        return [*self._pushed(source, push.seq), *self._commit()]

    def _pushed(self, source: Identity, seq: int) -> list[Effect]:
        two_phases = self.job.flush.commit == "2pc" and self.flusher.protected
        if two_phases and self.flusher.prepared(source.id) < seq:
            self._unprepared.append((source, seq))
            return []
        reply = Pushed(seq=seq, durable=self._durable(source.id), clock=self.clock)
        return [Send(target=source, message=reply)]

    def _commit(self) -> list[Effect]:
        """Applies the next step once all workers staged it and pulled the one after; answers what can be."""
        workers = range(self.job.workers)
        effects: list[Effect] = []
        step = self._span(0)[0] + 1
        staged = self._staged.get(step, {})
        if not self.cut.pausing and len(staged) == len(workers) and all(self._pulled.get(w, 0) > step for w in workers):
            parts = [(staged[w].counts, staged[w].slots, staged[w].grads) for w in workers]
            merged = parts[0] if len(parts) == 1 else self.store.sum_pushes(parts)
            if self._span(0)[1] >= step:
                merged = self._without_applied(merged, 0, step)
            faults = self._waits_for(merged[0], merged[1])
            if faults is not None:
                return faults
            self.store.update(*merged, step)
            del self._staged[step]
            for marks in self.flusher.applied:
                marks[0] = step
            self.clock += len(parts)
            self.rows_updated += merged[1].size
            effects += self._check_cut()
            if self.flusher.protected:
                effects += self.flusher.flush_all()
        return effects + self._answer_steps()

    def _answer_steps(self) -> list[Effect]:
        """Answers the pulls whose step has come: every group is at the one before, or (again) at the step itself."""
        effects: list[Effect] = []
        least, _ = self._span(0)
        for key, (source, pull) in list(self._step_pulls.items()):
            if pull.step > least + 1:
                continue
            faults = self._waits_for(pull.counts, pull.slots)
            if faults is not None:
                effects += faults
                continue
            del self._step_pulls[key]
            effects.append(self._answer(source, pull))
        return effects

    # --- Whole records ---

    def record_floats(self, table: int) -> int:
        if table >= len(self.job.tables):
            raise IndexError(f"table {table} of {len(self.job.tables)}")
        return self.store.record_floats(table)

    def _on_read(self, source: Identity, dump: ReadRecords) -> list[Effect]:
        floats = self.reply_floats(dump.slot_count * self.record_floats(dump.table))
        records = np.empty(floats, np.float32)
        if dump.parity:
            self._read_parities(dump, records)
        else:
            if self.rebuild is not None and dump.slot_first + dump.slot_count <= self._slots[dump.table]:
                slots = np.arange(dump.slot_first, dump.slot_first + dump.slot_count, dtype=np.uint32)
                counts = np.zeros(self._dims.size, np.int32)
                counts[dump.table] = slots.size
                if (faults := self._waits_for(counts, slots)) is not None:
                    self._parked.append((source, dump))
                    return faults
            self.store.read_records(dump.table, dump.slot_first, dump.slot_count, records)
        return [Send(target=source, message=Records(request=dump.request, records=records))]

    def _read_parities(self, dump: ReadRecords, records: Float32Array) -> None:
        r = self.job.tables[dump.table].r
        blocks, q = np.divmod(np.arange(dump.slot_first, dump.slot_first + dump.slot_count), max(1, r))
        if not r or (blocks >= self.store.blocks(dump.table)).any():
            raise IndexError(f"parity slots {dump.slot_first} to {dump.slot_first + dump.slot_count}")
        by_slot = records.reshape(dump.slot_count, -1)
        for index in range(r):
            mine = np.flatnonzero(q == index)
            part = np.empty(mine.size * by_slot.shape[1], np.float32)
            counts = np.zeros(self._dims.size, np.int32)
            counts[dump.table] = mine.size
            self.store.parity_read(index, counts, blocks[mine].astype(np.uint32), part)
            by_slot[mine] = part.reshape(mine.size, -1)

    def _on_write(self, source: Identity, load: WriteRecords) -> list[Effect]:
        floats = self.record_floats(load.table)
        slots = load.slots.astype(np.int64)
        if load.records.size != slots.size * floats:
            raise ValueError(f"{load.records.size} values are not {slots.size} records of {floats}")
        if slots.size and int(slots.max()) >= self._slots[load.table]:
            raise IndexError(f"slot {int(slots.max())} of {self._slots[load.table]}")
        if self.rebuild is not None:
            counts = np.zeros(self._dims.size, np.int32)
            counts[load.table] = slots.size
            if (faults := self._waits_for(counts, load.slots)) is not None:
                self._parked.append((source, load))
                return faults
        # One call for each run of neighbouring slots: in practice nearly all are neighbours.
        starts = np.flatnonzero(np.diff(slots, prepend=-2) != 1).tolist()
        for start, stop in itertools.pairwise([*starts, slots.size]):
            source_records = load.records[start * floats : stop * floats]
            self.store.write_records(load.table, int(slots[start]), stop - start, source_records)
        answer = Send(target=source, message=RecordsWritten(request=load.request))
        if not self.flusher.protected:
            return [answer]
        flushed = self.flusher.flush_all()
        if self.flusher.has_acked(self.flusher.numbers()):
            return [*flushed, answer]
        self._loads.append((self.flusher.numbers(), answer))
        return [*flushed]

    # --- What others do to whoever waits here ---

    def activated(self) -> list[Effect]:
        """Every group of a replacement knows where it stands: what has come meanwhile is served."""
        queued, self._queued = self._queued, []
        effects: list[Effect] = []
        for source, message in queued:
            effects += self._dispatch_safely(source, message)
        return effects

    def _check_cut(self) -> list[Effect]:
        """Something was applied. If that is the instant to cut at, whoever was held back for it goes on."""
        begun = self.cut.reached(self.flusher.applied)
        return [*begun, *self.release()] if begun and not self.is_sync else [*begun]

    def release(self) -> list[Effect]:
        """A cut has come further: pushes that it held back are applied, as far as it lets them."""
        held, self._held = self._held, []
        effects: list[Effect] = []
        for source, push in held:
            effects += self._dispatch_safely(source, push)  # or held again
        return effects + self._commit() if self.is_sync else effects

    def retry(self) -> list[Effect]:
        """Rows are back: whoever waited for them goes on."""
        effects: list[Effect] = []
        for worker in list(self._pushes):
            effects += self._apply_queue(worker)
        if self.is_sync:
            effects += self._commit()
        parked, self._parked = self._parked, []
        for source, message in parked:
            effects += self._dispatch_safely(source, message)
        return effects

    def grown(self) -> list[Effect]:
        """More may be durable, or staged at the holders, than before."""
        effects: list[Effect] = []
        waiting, self._unprepared = self._unprepared, []
        for source, seq in waiting:
            effects += self._pushed(source, seq)
        loads, self._loads = self._loads, []
        for numbers, answer in loads:
            if self.flusher.has_acked(numbers):
                effects.append(answer)
            else:
                self._loads.append((numbers, answer))
        if self.is_sync:
            # A worker may wait for this before its next pull; in async mode replies or the clock carry it.
            effects += self.tell_durable()
        return effects

    def tell_durable(self) -> list[Effect]:
        effects: list[Effect] = []
        for worker, identity in self._workers.items():
            durable = self.durable(worker)
            if durable > self._reported.get(worker, 0):
                self._reported[worker] = durable
                effects.append(Send(target=identity, message=Durable(durable=durable)))
        return effects

    def _waits_for(self, counts: Int32Array, slots: UInt32Array) -> list[Effect] | None:
        """None: all these rows are here. Else the faults to send while somebody waits."""
        if self.rebuild is None:
            return None
        faults = self.rebuild.missing(counts, slots, self.peers)
        return None if faults is None else [*faults]
