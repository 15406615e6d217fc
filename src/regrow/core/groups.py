"""Who protects whom: the groups of rows that share their parity holders.

A row of member j of a table with k data and r parity members has its parities d = k - j, d + 1, ... servers
further round the ring. Rows of one server with equal (d, r) form a **group**: they leave in the same flushes and come
back from the same holders. The list of groups is the same for every server, so a group is a number. Rows without
parities form one more group, the **bare** one, behind all others: it has no holders, and nothing of it is ever flushed.
All here is arithmetic on server numbers; nothing knows who is alive but by argument.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import numpy as np

from regrow.core.job import JobSpec
from regrow.core.messages import Float32Array, Int32Array, UInt32Array


class Groups:
    """The groups of a job. `len(groups)` counts those with holders, `groups.total` the bare one too."""

    def __init__(self, job: JobSpec) -> None:
        self.job = job
        self.ring = job.servers // job.rings
        kinds = {(table.k - j, table.r) for table in job.tables if table.r for j in range(table.k)}
        self.list: list[tuple[int, int]] = sorted(kinds)
        index = {kind: g for g, kind in enumerate(self.list)}
        self.bare = len(self.list) if any(not table.r for table in job.tables) else None
        self.total = len(self.list) + (self.bare is not None)
        # The group of each member of each table.
        self.of_member = [
            np.array([index[(t.k - j, t.r)] if t.r else self.bare for j in range(t.k)], np.int64) for t in job.tables
        ]

        # Tables whose rows may come back from saves, and their groups. All others are copied then, and are one group,
        # which says how far the server was.
        self.is_recallable = np.array([job.protection.recalls(table) for table in job.tables])
        found = {g for t, of in enumerate(self.of_member) if self.is_recallable[t] for g in of.tolist()}
        self.recallable: tuple[int, ...] = tuple(sorted(found))
        self.copied = next((g for g in range(self.total) if g not in found), None) if found else None

        # The same, table after table in one array, for lookups of many rows at once.
        self._k = np.array([t.k for t in job.tables], np.int64)
        self._first_member = np.concatenate([[0], np.cumsum(self._k)[:-1]]).astype(np.int64)
        self._all_members = np.concatenate(self.of_member)

        # Asked for with every flush.
        self._holders = [
            [tuple(self.step(source, d + q) for q in range(r)) for source in range(job.servers)] for d, r in self.list
        ]

    def __len__(self) -> int:
        return len(self.list)

    def holders(self, source: int, group: int) -> tuple[int, ...]:
        """The servers that hold the parities of this group of `source`, in the order of their coefficients."""
        return () if group == self.bare else self._holders[group][source]

    def sources(self, holder: int, group: int) -> tuple[int, ...]:
        """The servers whose rows of this group have a parity at `holder`."""
        d, r = self.list[group]
        return tuple(self.step(holder, -(d + q)) for q in range(r))

    def member(self, table: int, group: int) -> int | None:
        """The member of a table that is in this group, if there is one: its slots are j, j + k, j + 2k ..."""
        d, r = self.list[group]
        spec = self.job.tables[table]
        return spec.k - d if spec.r == r and d <= spec.k else None

    def of_slots(self, counts: Int32Array, slots: UInt32Array) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
        """The group of each row."""
        tables = np.repeat(np.arange(counts.size), counts)
        members: np.ndarray[tuple[int], np.dtype[np.int64]] = self._all_members[
            self._first_member[tables] + slots % self._k[tables]
        ]
        return members

    def step(self, server: int, by: int) -> int:
        """The server `by` places further round its ring."""
        first = server // self.ring * self.ring
        return first + (server - first + by) % self.ring


@functools.lru_cache(maxsize=16)
def make_groups(job: JobSpec) -> Groups:
    """Remembered: nothing in them changes, and whoever takes a view asks for those of the same job."""
    return Groups(job)


def by_table(
    part: tuple[Int32Array, UInt32Array, Float32Array], floats: Sequence[int]
) -> dict[int, tuple[UInt32Array, Float32Array]]:
    """The rows of each table that has some in (counts, slots, values), where a row of table t has floats[t] values."""
    counts, slots, values = part
    found: dict[int, tuple[UInt32Array, Float32Array]] = {}
    row = start = 0
    for table, count in enumerate(counts.tolist()):
        if count:
            stop = start + count * floats[table]
            found[table] = (slots[row : row + count], values[start:stop])
            row, start = row + count, stop
    return found
