"""Who protects whom: the groups of rows that share their parity holders, and what may be lost.

A row of member j of a table with k data and r parity members has its parities d = k - j, d + 1, ... servers
further round the ring. Rows of one server with equal (d, r) form a **group**: they leave in the same flushes and come
back from the same holders. The list of groups is the same for every server, so a group is a number.
All here is arithmetic on server numbers; nothing knows who is alive but by argument.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np

from regrow.core.job import JobSpec
from regrow.core.layout import Layout
from regrow.core.messages import Float32Array, Int32Array, UInt32Array


class Groups:
    """The groups of a job."""

    def __init__(self, job: JobSpec) -> None:
        self.job = job
        self.ring = job.servers // job.rings
        kinds = {(table.k - j, table.r) for table in job.tables if table.r for j in range(table.k)}
        self.list: list[tuple[int, int]] = sorted(kinds)
        index = {kind: g for g, kind in enumerate(self.list)}
        # The group of each member of each table, or -1 for a table without parities.
        self.of_member = [
            np.array([index[(t.k - j, t.r)] if t.r else -1 for j in range(t.k)], np.int64) for t in job.tables
        ]

        # The same, table after table in one array, for lookups of many rows at once.
        self._k = np.array([t.k for t in job.tables], np.int64)
        self._first_member = np.concatenate([[0], np.cumsum(self._k)[:-1]]).astype(np.int64)
        self._all_members = np.concatenate(self.of_member)

    def __len__(self) -> int:
        return len(self.list)

    def holders(self, source: int, group: int) -> tuple[int, ...]:
        """The servers that hold the parities of this group of `source`, in the order of their coefficients."""
        d, r = self.list[group]
        return tuple(self.step(source, d + q) for q in range(r))

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

    # --- What may be lost ---

    def tolerates(self, down: Collection[int]) -> bool:
        """Whether no stripe has more members on the servers `down` than it has parities."""
        return not self.lost_tables(down)

    def lost_tables(self, down: Collection[int]) -> list[tuple[str, int]]:
        """(table, rows) that cannot come back when all of `down` are lost together.

        A stripe lies on k + r consecutive servers of its ring. Rows that nobody ever updated are counted too:
        only the lost servers could have said which they were.
        """
        lost = []
        for index, table in enumerate(self.job.tables):
            layout = Layout(servers=self.job.servers, k=table.k, r=table.r, rings=self.job.rings)
            rows = hopeless_total = 0
            for server in down:
                held = layout.rows_on(server, rows=table.rows, table=index)
                hopeless = sum(self._is_hopeless(server, j, table.k, table.r, down) for j in range(table.k))
                hopeless_total += hopeless
                rows += -(-held * hopeless // table.k)
            # A table so small that these stripes are empty counts too: nobody is left to say where its groups stood.
            if hopeless_total:
                lost.append((table.name, rows))
        return lost

    def _is_hopeless(self, server: int, member: int, k: int, r: int, down: Collection[int]) -> bool:
        stripe = [self.step(server, m - member) for m in range(k + r)]
        return sum(s in down for s in stripe) > r


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
