"""What a server does for workers: sessions, reads of rows and records, checks, and whoever has to wait.

What differs between asynchronous pushes and synchronous steps is in `serving_async.py` and `serving_sync.py`, two
classes behind this one; what is missing at a server that is coming back is asked of its ways back (`wayback.py`).

The rules to keep: a request is checked completely before it changes anything; each push is applied exactly once to each
group of rows, all its rows of a group at once, in the order of its worker.
"""

from __future__ import annotations

import dataclasses
import itertools
from abc import ABC, abstractmethod

import numpy as np

from regrow.core.checks import RequestChecks
from regrow.core.cut import CutSide, Save, Unsave
from regrow.core.effects import Refuse, Send
from regrow.core.flush_group import Part
from regrow.core.flusher import Flusher
from regrow.core.identity import Identity
from regrow.core.job import JobSpec
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
from regrow.core.paging import EXPECT, Paging, Waiter
from regrow.core.wayback import FetchSaved, Ways
from regrow.errors import Refusal
from regrow.store.interface import Store

Effect = Send | Refuse | Save | Unsave | FetchSaved
Waiting = tuple[Identity, Message]

WAITING_MAX = 1 << 16  # Requests of all workers that wait for a replacement; a worker's own window is far smaller.


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """The parts of a server that serve workers."""

    job: JobSpec
    store: Store
    flusher: Flusher
    ways: Ways
    cut: CutSide
    reply_bytes_max: int
    paging: Paging | None = None  # None: all rows are always in memory


class Serving(ABC):
    """The worker side of one server. Every method returns what to send."""

    def __init__(self, parts: Parts) -> None:
        self.job = parts.job
        self.store = parts.store
        self.flusher = parts.flusher
        self.ways = parts.ways
        self.cut = parts.cut
        self.paging = parts.paging
        self.requests = RequestChecks(parts.job, parts.store, reply_bytes_max=parts.reply_bytes_max)
        self.peers: dict[int, Identity] = {}  # the servers of the view
        self.clock = 0  # pushes applied, of all workers
        self.pulls = 0
        self.rows_updated = 0
        self._workers: dict[int, Identity] = {}  # newest incarnation heard of
        self._queued: list[Waiting] = []  # until it is known where the rows stand
        self._parked: list[Waiting] = []  # requests whose rows are not back
        self._writes: list[tuple[list[int], Send]] = []  # answers that wait for their flushes
        self._reported: dict[int, int] = {}  # worker -> durable as it was last told
        # Which tables have rows that may be lost, and whose updates are counted for it.
        self._recallable = parts.flusher.geometry.is_recallable
        self.wrote_recallable = False  # whole records of such rows, since somebody last asked

    # --- What the two modes differ in ---

    @abstractmethod
    def mark_of(self, worker: int) -> int:
        """Which mark counts this worker's pushes."""

    @abstractmethod
    def find_committed(self, worker: int) -> int:
        """The step up to which this worker's part is committed, or will be (synchronous)."""

    @abstractmethod
    def pull(self, source: Identity, pull: Pull) -> list[Effect]:
        """Answers with rows, now or when they can be."""

    @abstractmethod
    def push(self, source: Identity, push: Push) -> list[Effect]:
        """Applies a push, or keeps it until it may be."""

    @abstractmethod
    def assign(self, assign: Assign) -> list[Effect]:
        """Gives rows that nobody has touched their first weights."""

    @abstractmethod
    def retry_steps(self) -> list[Effect]:
        """Rows are back: pushes and steps that waited for them."""

    @abstractmethod
    def release(self) -> list[Effect]:
        """A cut has come further: what it held back is applied, as far as it lets it."""

    @abstractmethod
    def resume(self, waiter: Waiter) -> list[Effect]:
        """The rows that a push or a step waited for are in memory (paged stores)."""

    @abstractmethod
    def forget_worker(self, worker: int) -> None:
        """Another incarnation of it is here: what the one before still waited for is void."""

    def answer_prepared(self) -> list[Effect]:
        """Pushes that are staged at every holder by now are acknowledged (two-phase commit)."""
        return []

    # --- Messages of workers ---

    def receive(self, source: Identity, message: Message) -> list[Effect]:
        if source.role != "worker":
            return [Refuse(target=source, reason=f"{type(message).__name__} from a {source.role}")]
        if source.id >= self.job.workers:
            return [Refuse(target=source, reason=f"worker {source.id} of a job with {self.job.workers}")]
        known = self._workers.get(source.id)
        if known is not None and source.incarnation < known.incarnation:
            reason = f"a newer incarnation of {source} is at work"
            return [Refuse(target=source, reason=reason, kind=Refusal.REPLACED)]
        if known is None or source.incarnation > known.incarnation:
            self._greet(source)
        if not self.ways.serves:
            if len(self._queued) >= WAITING_MAX:
                return [Refuse(target=source, reason="too much for a server that is not back yet")]
            self._queued.append((source, message))
            return []
        return self.dispatch_safely(source, message)

    def _greet(self, source: Identity) -> None:
        """Another incarnation: what the one before still waited for is void. It starts from what is durable."""
        self._workers[source.id] = source
        self._reported.pop(source.id, None)
        self._parked = [(who, message) for who, message in self._parked if who.id != source.id]
        self._queued = [(who, message) for who, message in self._queued if who.id != source.id]
        if self.paging is not None:
            self.paging.forget(source.id)
        self.forget_worker(source.id)

    def dispatch_safely(self, source: Identity, message: Message) -> list[Effect]:
        try:
            return self._dispatch(source, message)
        except (ValueError, IndexError) as error:
            return [Refuse(target=source, reason=f"{type(message).__name__}: {error}")]

    def _dispatch(self, source: Identity, message: Message) -> list[Effect]:
        if isinstance(message, Pull):
            return self.pull(source, message)
        if isinstance(message, Push):
            self.requests.check_push(message)
            return self.push(source, message)
        if isinstance(message, Commit):
            return [*self.flusher.commit(source.id, message.seq)]
        if isinstance(message, Assign):
            return self.assign(message)
        if isinstance(message, Expect):
            self.requests.check_counts(message.counts, message.slots)
            self.requests.check_range(message.counts, message.slots)
            if self.paging is not None:
                self.paging.read_ahead(source.id, message.counts, message.slots)
            return self.find_missing(message.counts, message.slots) or []
        if isinstance(message, ReadRecords):
            return self._read_records(source, message)
        if isinstance(message, WriteRecords):
            return self._write_records(source, message)
        if isinstance(message, Open):
            return [Send(target=source, message=self._make_opened(source.id))]
        raise ValueError("a server does not take this message")

    def _make_opened(self, worker: int) -> Opened:
        return Opened(
            durable=self.report_durable(worker),
            committed=self.find_committed(worker),
            reads_ahead=self.paging is not None and self.paging.reads_ahead,
        )

    # --- What is durable ---

    def find_durable(self, worker: int) -> int:
        """The last push of this worker that is safe here (sync: the last step)."""
        return self.flusher.durable(self.mark_of(worker))

    def report_durable(self, worker: int) -> int:
        """`find_durable`, noted as told."""
        durable = self.find_durable(worker)
        self._reported[worker] = durable
        return durable

    def tell_durable(self) -> list[Effect]:
        """Workers that nobody has told yet how far they are safe hear it."""
        effects: list[Effect] = []
        for worker, identity in self._workers.items():
            durable = self.find_durable(worker)
            if durable > self._reported.get(worker, 0):
                self._reported[worker] = durable
                effects.append(Send(target=identity, message=Durable(durable=durable)))
        return effects

    @property
    def committed(self) -> int:
        """The last step, or push of the worker that is least far, that all rows of this server have."""
        return min(map(min, self.flusher.applied))

    def span(self, mark: int) -> tuple[int, int]:
        """The least and the most any group has applied. They differ only at a replacement, after a failure."""
        applied = [marks[mark] for marks in self.flusher.applied]
        return min(applied), max(applied)

    # --- For both modes ---

    def answer(self, source: Identity, pull: Pull, rows: Float32Array) -> Send:
        self.pulls += 1
        durable = self.report_durable(source.id)
        return Send(target=source, message=Rows(request=pull.request, durable=durable, clock=self.clock, rows=rows))

    def read_rows(self, source: Identity, pull: Pull) -> list[Effect]:
        """Answers with the rows as they are, when they are here."""
        part = pull.counts, pull.slots
        if not self.ways.is_whole:
            self.requests.check_slots(*part)
            if (faults := self.park(source, pull, *part)) is not None:
                return faults
        if self.paging is not None:
            self.requests.check_slots(*part)
            if not self.paging.park(source, pull, Waiter("pull", source.id, pull.request), part):
                return []
        return [self.answer(source, pull, self.gather(*part))]

    def gather(self, counts: Int32Array, slots: UInt32Array) -> Float32Array:
        rows = np.empty(self.requests.count_floats(counts, slots), np.float32)
        self.store.gather(counts, slots, rows)
        return rows

    def park(self, source: Identity, message: Message, counts: Int32Array, slots: UInt32Array) -> list[Effect] | None:
        """None: these rows are here. Else the message waits for them, and these are the faults to send."""
        faults = self.find_missing(counts, slots)
        if faults is not None:
            self._parked.append((source, message))
        return faults

    def find_missing(self, counts: Int32Array, slots: UInt32Array) -> list[Effect] | None:
        """None: all these rows are here. Else the faults to send while somebody waits."""
        if self.ways.is_whole:
            return None
        faults = self.ways.find_missing(counts, slots, self.peers)
        return None if faults is None else [*faults]

    def take_unapplied(self, part: Part, mark: int, seq: int) -> Part:
        """The rows of a push whose group does not have it yet: nearly always all of them."""
        if self.span(mark)[1] < seq:
            return part
        counts, slots, grads = part
        lacking = np.array([marks[mark] < seq for marks in self.flusher.applied])
        wanted = lacking[self.flusher.geometry.of_slots(counts, slots)]
        return self.requests.select(wanted, np.repeat(np.arange(counts.size), counts), slots, grads)

    def count_updates(self, counts: Int32Array, slots: UInt32Array, mark: int, seq: int) -> None:
        """A worker's push is about to be applied: a row of it that could be lost with this server counts once. What the
        copied rows have already was counted when they got it, by a server before this one."""
        copied = self.flusher.geometry.copied
        if copied is None or self.flusher.applied[copied][mark] >= seq:
            return
        mine = np.where(self._recallable, counts, 0).astype(np.int32)
        self.flusher.updates += int(mine.sum())
        self.store.note_updates(mine, slots[np.repeat(self._recallable, counts)])

    def acknowledge(self, source: Identity, seq: int) -> Send:
        durable = self.report_durable(source.id)
        return Send(target=source, message=Pushed(seq=seq, durable=durable, clock=self.clock))

    def assign_here(self, assign: Assign) -> None:
        part = (assign.counts, assign.slots, assign.weights)
        if not self.ways.is_whole:
            if self.requests.count_floats(assign.counts, assign.slots) != assign.weights.size:
                raise ValueError(f"{assign.weights.size} weights do not fit {assign.slots.size} slots")
            self.requests.check_slots(assign.counts, assign.slots)
            part = self._drop_missing(*part)
        self.store.assign_untouched(*part)

    def _drop_missing(self, counts: Int32Array, slots: UInt32Array, values: Float32Array) -> Part:
        """Without rows that are still to come back: they were touched, so they keep what they have."""
        missing_counts, missing = self.store.prepare(counts, slots)
        tables = np.repeat(np.arange(counts.size), counts)
        gone = np.repeat(np.arange(counts.size), missing_counts) << 32 | missing.astype(np.int64)
        here = ~np.isin(tables << 32 | slots.astype(np.int64), gone)
        return self.requests.select(here, tables, slots, values)

    # --- Whole records ---

    def _read_records(self, source: Identity, read: ReadRecords) -> list[Effect]:
        floats = self.requests.check_reply(read.slot_count * self.requests.find_record_floats(read.table))
        records = np.empty(floats, np.float32)
        if read.parity:
            self._read_parities(read, records)
        else:
            if not self.ways.is_whole and read.slot_first + read.slot_count <= self.requests.slots[read.table]:
                slots = np.arange(read.slot_first, read.slot_first + read.slot_count, dtype=np.uint32)
                faults = self.park(source, read, self.requests.count_table(read.table, slots.size), slots)
                if faults is not None:
                    return faults
            self.store.read_records(read.table, read.slot_first, read.slot_count, records)
        return [Send(target=source, message=Records(request=read.request, records=records))]

    def _read_parities(self, read: ReadRecords, records: Float32Array) -> None:
        r = self.job.tables[read.table].r
        blocks, q = np.divmod(np.arange(read.slot_first, read.slot_first + read.slot_count), max(1, r))
        if not r or (blocks >= self.store.blocks(read.table)).any():
            raise IndexError(f"parity slots {read.slot_first} to {read.slot_first + read.slot_count}")
        by_slot = records.reshape(read.slot_count, -1)
        for index in range(r):
            mine = np.flatnonzero(q == index)
            part = np.empty(mine.size * by_slot.shape[1], np.float32)
            counts = self.requests.count_table(read.table, mine.size)
            self.store.parity_read(index, counts, blocks[mine].astype(np.uint32), part)
            by_slot[mine] = part.reshape(mine.size, -1)

    def _write_records(self, source: Identity, write: WriteRecords) -> list[Effect]:
        floats = self.requests.find_record_floats(write.table)
        slots = write.slots.astype(np.int64)
        if write.records.size != slots.size * floats:
            raise ValueError(f"{write.records.size} values are not {slots.size} records of {floats}")
        if slots.size and int(slots.max()) >= self.requests.slots[write.table]:
            raise IndexError(f"slot {int(slots.max())} of {self.requests.slots[write.table]}")
        if not self.ways.is_whole:
            faults = self.park(source, write, self.requests.count_table(write.table, slots.size), write.slots)
            if faults is not None:
                return faults
        # One call for each run of neighbouring slots: in practice nearly all are neighbours.
        starts = np.flatnonzero(np.diff(slots, prepend=-2) != 1).tolist()
        for start, stop in itertools.pairwise([*starts, slots.size]):
            source_records = write.records[start * floats : stop * floats]
            self.store.write_records(write.table, int(slots[start]), stop - start, source_records)
        self.wrote_recallable |= bool(self._recallable[write.table])
        answer = Send(target=source, message=RecordsWritten(request=write.request))
        flushed = self.flusher.flush_all()
        if self.flusher.has_acked(self.flusher.numbers()):
            return [*flushed, answer]
        self._writes.append((self.flusher.numbers(), answer))
        return [*flushed]

    # --- What others do to whoever waits here ---

    def serve_queued(self) -> list[Effect]:
        """It is known where the rows stand: what has come meanwhile is served."""
        queued, self._queued = self._queued, []
        effects: list[Effect] = []
        for source, message in queued:
            effects += self.dispatch_safely(source, message)
        return effects

    def retry(self) -> list[Effect]:
        """Rows are back: whoever waited for them goes on."""
        effects = self.retry_steps()
        parked, self._parked = self._parked, []
        for source, message in parked:
            effects += self.dispatch_safely(source, message)
        return effects

    def on_fetched(self) -> list[Effect]:
        """Rows have come from the disk: whoever waited for exactly those goes on."""
        assert self.paging is not None
        effects: list[Effect] = []
        for waiter in self.paging.poll():
            parked = self.paging.take_parked(waiter)
            if parked is not None:
                effects += self.dispatch_safely(*parked)
            elif waiter.kind != EXPECT:
                effects += self._resume_safely(waiter)
            self.paging.drop(waiter)
        return effects

    def _resume_safely(self, waiter: Waiter) -> list[Effect]:
        try:
            return self.resume(waiter)
        except ValueError as error:  # rows that do not fit the cache together: nobody can go on
            return [Refuse(target=worker, reason=f"{waiter.kind}: {error}") for worker in self._workers.values()]

    def answer_durable(self) -> list[Effect]:
        """More may be durable, or staged at the holders, than before."""
        effects = self.answer_prepared()
        if not self._writes:
            return effects
        writes, self._writes = self._writes, []
        for numbers, answer in writes:
            if self.flusher.has_acked(numbers):
                effects.append(answer)
            else:
                self._writes.append((numbers, answer))
        return effects
