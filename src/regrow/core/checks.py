"""What peers say, checked against the job before anything is kept, allocated or changed for it.

Every check raises ValueError or IndexError, whose words go back to whoever said it (`Refuse`). What is used later is
checked when it comes: afterwards the refusal would hit somebody else, or nobody. The rule to keep: no assertion guards
against a peer, because `python -O` has none.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from regrow import _kernels
from regrow.core.job import NUMBER_MAX as FLOAT_MAX
from regrow.core.job import JobSpec
from regrow.core.messages import Float32Array, Int32Array, Member, Push, UInt32Array
from regrow.store.interface import Sizes

NUMBER_MAX = 2**62  # as on the wire (`messages.U62`); inside lists and structs the wire does not check it
INCARNATION_END = 2**32


class RowChecks:
    """Rows of a job on one server, as (counts, slots) or with their records."""

    def __init__(self, job: JobSpec, store: Sizes) -> None:
        tables = range(len(job.tables))
        self.slots = np.array([store.slots(index) for index in tables], np.int64)
        self.record_floats = np.array([store.record_floats(index) for index in tables], np.int64)

    def check_counts(self, counts: Int32Array, slots: UInt32Array) -> None:
        given = counts.tolist()  # there are few tables: quicker than arrays
        if len(given) != self.slots.size or min(given, default=0) < 0 or sum(given) != slots.size:
            raise ValueError(f"counts do not describe {slots.size} slots in {self.slots.size} tables")

    def check_range(self, counts: Int32Array, slots: UInt32Array) -> None:
        beyond = slots >= np.repeat(self.slots, counts)
        if beyond.any():
            raise IndexError(f"slot {int(slots[beyond][0])} is out of range")

    def check_records(self, counts: Int32Array, slots: UInt32Array, records: Float32Array) -> None:
        """Rows with whole records, as flushes and streams have them."""
        self.check_counts(counts, slots)
        if int(counts.astype(np.int64) @ self.record_floats) != records.size:
            raise ValueError(f"{records.size} values are not the records of {slots.size} slots")
        self.check_range(counts, slots)


class RequestChecks(RowChecks):
    """What workers ask for, and how large the answers would be."""

    def __init__(self, job: JobSpec, store: Sizes, *, reply_bytes_max: int) -> None:
        super().__init__(job, store)
        self._dims = [table.dim for table in job.tables]
        self.dims = np.array(self._dims, np.int64)
        self._reply_bytes_max = reply_bytes_max

    def count_floats(self, counts: Int32Array, slots: UInt32Array) -> int:
        """How many floats the rows of these slots have; refuses before anything is allocated for them."""
        self.check_counts(counts, slots)
        floats = 0
        for count, dim in zip(counts.tolist(), self._dims, strict=True):
            floats += count * dim
        return self.check_reply(floats)

    def check_push(self, push: Push) -> None:
        """All of it, wherever it is applied later: a row named twice would be changed by two threads at a time."""
        if self.count_floats(push.counts, push.slots) != push.grads.size:
            raise ValueError(f"{push.grads.size} gradient values do not fit {push.slots.size} slots")
        self.check_range(push.counts, push.slots)
        if _kernels.has_repeated_slots(push.counts, push.slots):
            raise ValueError("a slot is named twice; gradients of a row are summed before they are pushed")
        self.check_rates(push.rates)

    def check_rates(self, rates: Sequence[float]) -> None:
        """One learning rate for each table, or none at all."""
        if not rates:
            return
        if len(rates) != self.dims.size:
            raise ValueError(f"{len(rates)} learning rates for {self.dims.size} tables")
        for rate in rates:
            if not 0.0 <= rate <= FLOAT_MAX:
                raise ValueError(f"a learning rate must be a finite number and not negative, not {rate}")

    def check_reply(self, floats: int) -> int:
        if floats * 4 > self._reply_bytes_max:
            raise ValueError(f"is about {floats * 4} bytes, at most {self._reply_bytes_max} are allowed")
        return floats

    def check_slots(self, counts: Int32Array, slots: UInt32Array) -> None:
        """What is used later is checked now: afterwards a refusal would hit whoever completes the step."""
        self.count_floats(counts, slots)
        self.check_range(counts, slots)

    def find_record_floats(self, table: int) -> int:
        if table >= self.dims.size:
            raise IndexError(f"table {table} of {self.dims.size}")
        return int(self.record_floats[table])

    def count_table(self, table: int, rows: int) -> Int32Array:
        """The counts of a request that is about one table only."""
        counts = np.zeros(self.dims.size, np.int32)
        counts[table] = rows
        return counts

    def select(
        self, wanted: Any, tables: Any, slots: UInt32Array, values: Float32Array
    ) -> tuple[Int32Array, UInt32Array, Float32Array]:
        """The wanted rows of (tables, slots, values), as a part."""
        counts = np.bincount(tables[wanted], minlength=self.dims.size).astype(np.int32)
        return counts, slots[wanted], values[np.repeat(wanted, self.dims[tables])]


def check_marks(marks: Sequence[int], count: int, *, most: int = NUMBER_MAX) -> None:
    """Marks say how far something is: one number for each worker, or one step."""
    if len(marks) != count:
        raise ValueError(f"{len(marks)} marks, this job has {count}")
    if any(not 0 <= mark <= most for mark in marks):
        raise ValueError(f"marks must be between 0 and {most}")


def find_view_flaw(servers: Sequence[Member], job: JobSpec) -> str | None:
    """Why nobody can follow a view with these servers, or None."""
    if reason := job.invalid_reason():
        return f"is of a job that cannot be: {reason}"
    if len(servers) != job.servers:
        return f"names {len(servers)} servers of a job for {job.servers}"
    for index, member in enumerate(servers):
        if member.id != index or not 0 <= member.incarnation < INCARNATION_END:
            return f"names server {member.id}, incarnation {member.incarnation}, in place {index}"
        if member.recalled and not (member.recovering and job.protection.saves_own):
            return f"recalls server {member.id}, which is not lost, or has no saves"
    return None
