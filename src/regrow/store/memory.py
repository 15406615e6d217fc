"""Rows in memory: the kernels' `Shard` (cpp/include/regrow/shard.hpp) as a `regrow.store.interface.Store`.

What the methods promise is written there and nowhere else. Nothing happens here but that a job becomes the settings of
a shard, and what a capture gives becomes rows of tables. The rule to keep: no loop over rows.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from regrow import _kernels
from regrow.core.job import JobSpec
from regrow.store.interface import Part, StoreBuilder, TableRows


class MemoryStore:
    """All tables of one server, one arena each, and the parities it holds; see `regrow.store.interface.Store`.

    Most names are the shard's own methods, bound once: calls of every step have no frame of Python between.
    """

    def __init__(self, job: JobSpec, server: int, recovering: bool = False) -> None:
        self._shard = build_shard(job, server, recovering)
        self._dims = np.array([table.dim for table in job.tables], np.int32)
        states = [table.optimizer.state_parts(table.dim) for table in job.tables]
        self._widths = [[table.dim, *(n for _, n in parts)] for table, parts in zip(job.tables, states, strict=True)]
        # Sizes
        self.is_paged = False
        self.memory_bytes: int = self._shard.memory_bytes
        self.redundancy_bytes: int = self._shard.redundancy_bytes
        self.slots = self._shard.slots
        self.blocks = self._shard.blocks
        self.record_floats = self._shard.record_floats
        # WorkerRows
        self.gather = self._shard.gather
        self.update = self._shard.update
        self.assign_untouched = self._shard.assign_untouched
        # WholeRecords
        self.read_records = self._shard.read_records
        self.write_records = self._shard.write_records
        self.load_rows = self._shard.load_rows
        self.find_slots = self._shard.find_slots
        self.touched = self._shard.touched
        # FlushedRows
        self.pending_rows = self._shard.pending_rows
        self.pending_bytes = self._shard.pending_bytes
        self.take_flush = self._shard.take_flush
        self.published = self._shard.published
        self.next_touched = self._shard.next_touched
        # HeldParities
        self.parity_apply = self._shard.parity_apply
        self.parity_read = self._shard.parity_read
        self.parity_add = self._shard.parity_add
        self.parity_members = self._shard.parity_members
        self.parity_touched = self._shard.parity_touched
        self.parity_void = self._shard.parity_void
        # ReturningRows
        self.know_touched = self._shard.know_touched
        self.prepare = self._shard.prepare
        self.put = self._shard.put
        self.fill = self._shard.fill
        self.missing_rows = self._shard.missing_rows
        self.blank_rows = self._shard.blank_rows
        # CapturedRows
        self.add_tenant = self._shard.add_tenant
        self.dirty_rows = self._shard.dirty_rows
        self.begin_capture = self._shard.begin_capture
        self.choose_captured = self._shard.choose_captured
        self.prepare_chunk = self._shard.prepare_chunk
        self.capture_left = self._shard.capture_left
        self.capture_side_bytes = self._shard.capture_side_bytes
        self.end_capture = self._shard.end_capture
        # PrioritizedRows
        self.set_priority = self._shard.set_priority
        self.note_updates = self._shard.note_updates
        self.updates_noted = self._shard.updates_noted
        self.set_updates_noted = self._shard.set_updates_noted
        self.updates_uncaptured = self._shard.updates_uncaptured
        self.capture_skipped = self._shard.capture_skipped
        self.updates_skipped = self._shard.updates_skipped
        self.priority_bytes = self._shard.priority_bytes
        self.count_bytes = self._shard.count_bytes

    def sum_pushes(self, parts: list[Part]) -> Part:
        """See `WorkerRows.sum_pushes`."""
        return _kernels.sum_pushes(self._dims, parts)

    def capture_chunk(self, bytes_max: int, aside_first: bool = False) -> list[TableRows]:
        """See `CapturedRows.capture_chunk`. The arrays are views of the one block of words that the kernel wrote."""
        counts, words = self._shard.capture_chunk(bytes_max, aside_first)
        floats, at = words.view(np.float32), 0
        found: list[TableRows] = []
        for table, count in enumerate(counts.tolist()):
            if not count:
                continue
            ids, at = words[at : at + count], at + count
            parts = []
            for width in self._widths[table]:
                parts.append(floats[at : at + count * width].reshape(count, width))
                at += count * width
            found.append((table, ids, parts))
        return found


def build_shard(job: JobSpec, server: int, recovering: bool) -> _kernels.Shard:
    """Takes memory for all tables of a server, and fills in initial values unless it is recovering."""
    # As in regrow.core.groups: the order is part of the protocol, a group's number means the same to every server.
    coding = sorted({(table.k - j, table.r) for table in job.tables if table.r for j in range(table.k)})
    shard = _kernels.Shard(job.servers, server, job.rings, coding, recovering)
    for index, table in enumerate(job.tables):
        optimizer = table.optimizer
        shard.add_table(
            rows=table.rows,
            dim=table.dim,
            k=table.k,
            r=table.r,
            optimizer=optimizer.kind,
            learning_rate=optimizer.learning_rate,
            eps=optimizer.eps,
            beta1=optimizer.beta1,
            beta2=optimizer.beta2,
            momentum=optimizer.momentum,
            weight_decay=optimizer.weight_decay,
            seed=job.seed,
            init_bound=table.init_bound,
            table=index,
        )
    return shard


if TYPE_CHECKING:
    _: StoreBuilder = MemoryStore  # what the interface promises, this store has
