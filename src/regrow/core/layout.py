"""Where a row lives: arithmetic alone, no directory.

A table's rows are cut into stripes of k; a stripe's members go to consecutive servers of a ring, and each
next stripe starts one server further, so every server holds the same number of slots. `rings` cuts the
servers into independent rings. The C++ twin is cpp/include/regrow/layout.hpp; they agree for every row.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

SERVERS_MAX = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """k data and r parity members per stripe, over `servers` servers in `rings` rings."""

    servers: int
    k: int = 1
    r: int = 0
    rings: int = 1

    def __post_init__(self) -> None:
        if not 1 <= self.servers <= SERVERS_MAX:
            raise ValueError(f"servers must be between 1 and {SERVERS_MAX}, not {self.servers}")
        if self.rings < 1 or self.servers % self.rings:
            raise ValueError(f"rings must divide servers: {self.servers} servers, {self.rings} rings")
        if self.k < 1 or self.r < 0:
            raise ValueError(f"k must be at least 1 and r at least 0, not k={self.k}, r={self.r}")
        if self.ring < self.k + self.r:
            raise ValueError(f"k + r = {self.k + self.r} members need as many servers in a ring; there are {self.ring}")

    @property
    def ring(self) -> int:
        """Servers in a ring."""
        return self.servers // self.rings

    def step(self, server: int, by: int) -> int:
        """The server `by` places further round its ring."""
        first = server // self.ring * self.ring
        return first + (server - first + by) % self.ring

    def place(self, rows: npt.ArrayLike, *, table: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """The (server, slot) of each row of the job's table number `table`."""
        row = _not_negative("rows", rows)
        _not_negative("table", table)
        stripe, member = np.divmod(row, self.k)
        turn, ring_index = np.divmod(stripe, self.rings)
        server = ring_index * self.ring + (turn + member + table) % self.ring
        return server, turn // self.ring * self.k + member

    def row_of(self, servers: npt.ArrayLike, slots: npt.ArrayLike, *, table: int) -> npt.NDArray[np.int64]:
        """The row in each slot. In the last block it may be past the end of the table: a hole."""
        server = _not_negative("servers", servers)
        slot = _not_negative("slots", slots)
        _not_negative("table", table)
        if (server >= self.servers).any():
            raise ValueError(f"servers must be below {self.servers}, not {int(server.max())}")
        ring_index, position = np.divmod(server, self.ring)
        block, member = np.divmod(slot, self.k)
        turn = block * self.ring + (position - member - table) % self.ring
        rows: npt.NDArray[np.int64] = (turn * self.rings + ring_index) * self.k + member
        return rows

    def slots_per_server(self, rows: int) -> int:
        """Slots a table of `rows` rows takes, the same on every server."""
        if rows < 0:
            raise ValueError(f"rows must not be negative, not {rows}")
        stripes = -(-rows // self.k)
        turns = -(-stripes // self.rings)
        return -(-turns // self.ring) * self.k

    def rows_on(self, server: int, *, rows: int, table: int) -> int:
        """Rows of a table of `rows` rows that this server holds: its slots without the holes of the last block."""
        return _count_rows(self, server, rows, table)


@functools.lru_cache(maxsize=4096)
def _count_rows(layout: Layout, server: int, rows: int, table: int) -> int:
    """Remembered: whoever judges losses asks for the same few servers again and again."""
    slots = layout.slots_per_server(rows)
    last = np.arange(max(0, slots - layout.k), slots)
    held = layout.row_of(np.full(last.size, server), last, table=table) < rows
    return slots - int(np.count_nonzero(~held))


def _not_negative(name: str, numbers: npt.ArrayLike) -> npt.NDArray[np.int64]:
    array: npt.NDArray[Any] = np.asarray(numbers)
    if array.size and array.dtype.kind not in "iu":
        raise ValueError(f"{name} must be whole numbers, not {array.dtype}")
    if array.size and array.min() < 0:
        raise ValueError(f"{name} must not be negative, not {array.min()}")
    return array.astype(np.int64)
