"""What one tenant of a `DictStore` knows of updates, and which rows it captures if it may not take all: the twin of
`RowPriority` in cpp/include/regrow/priority.hpp. Rows are sorted, counts are numbers, and everything is a dictionary of
cells, which are (table, slot).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field

import numpy as np

from regrow.core import twins
from regrow.store.interface import Float32Array

Cell = tuple[int, int]  # table, slot
FLOAT_MAX = float(np.finfo(np.float32).max)


@dataclass
class Capture:
    """Rows as they were at one instant: where a row changed since, and only there, its record is aside."""

    tenant: int
    captured: frozenset[Cell]
    left: set[Cell]
    aside: dict[Cell, Float32Array] = field(default_factory=dict)
    prepared: list[Cell] | None = None  # of the chunk that is given next


@dataclass
class Priority:
    """Tables that `rows_max` does not name are captured whole."""

    kind: str = "none"
    rows_max: dict[int, int] = field(default_factory=dict)
    slots: dict[int, int] = field(default_factory=dict)
    seed: int = 0
    period: int = 1
    copies: dict[Cell, Float32Array] = field(default_factory=dict)  # scar: weights as last captured
    stale: set[Cell] = field(default_factory=set)  # scar: captured, but not durably
    counts: Counter[Cell] = field(default_factory=Counter)
    whole: int = 0  # updates of tables that are captured whole
    calls: int = 0
    lists: dict[int, list[int]] = field(default_factory=dict)  # ssu: slots of each table
    evicted: Counter[int] = field(default_factory=Counter)
    turns: Counter[int] = field(default_factory=Counter)
    held: tuple[Counter[Cell], int, dict[int, list[int]]] = field(default_factory=lambda: (Counter(), 0, {}))

    @property
    def uncaptured(self) -> int:
        return self.whole + self.counts.total()

    def note(self, cells: list[Cell]) -> None:
        mine = [cell for cell in cells if cell[0] in self.rows_max]
        self.whole += len(cells) - len(mine)
        self.counts.update(mine)
        self.calls += 1
        if self.kind == "ssu" and self.calls % self.period == 0:
            for table, slot in mine:
                self._insert(table, slot)

    def _insert(self, table: int, slot: int) -> None:
        listed = self.lists.setdefault(table, [])
        if slot in listed:
            return
        if len(listed) < self.rows_max[table]:
            listed.append(slot)
            return
        self.evicted[table] += 1
        listed[twins.evicted_place(self.seed, table, self.evicted[table], len(listed))] = slot

    def choose(self, dirty: Collection[Cell], weights: Mapping[Cell, Float32Array]) -> set[Cell]:
        """Those a capture takes; the turn goes on behind the last of them."""
        chosen = {cell for cell in dirty if cell[0] not in self.rows_max}
        for table, rows_max in self.rows_max.items():
            mine = [cell for cell in dirty if cell[0] == table]
            if len(mine) > rows_max:
                ranks = {cell: self._rank(cell, weights[cell]) for cell in mine}
                turn, slots = self.turns[table], self.slots[table]
                mine.sort(key=lambda cell: (-ranks[cell], (cell[1] - turn) % slots))
                mine = mine[:rows_max]
                self.turns[table] = (mine[-1][1] + 1) % slots
            chosen.update(mine)
        return chosen

    def _rank(self, cell: Cell, weights: Float32Array) -> float:
        if self.kind == "mfu":
            return self.counts[cell]
        if self.kind == "ssu":
            return cell[1] in self.lists.get(cell[0], [])
        if cell in self.stale:
            return float("inf")
        total = 0.0
        for now, before in zip(weights.tolist(), self.copies[cell].tolist(), strict=True):
            total += (now - before) * (now - before)
        return float(np.float32(total if total < FLOAT_MAX else FLOAT_MAX))

    def keep_copies(self, weights: Mapping[Cell, Float32Array]) -> None:
        self.copies.update({cell: values for cell, values in weights.items() if cell in self.copies})

    def begin(self, captured: Iterable[Cell]) -> None:
        counts = Counter({cell: self.counts.pop(cell) for cell in captured if cell in self.counts})
        self.held = counts, self.whole, self.lists
        self.whole, self.lists = 0, {}

    def end(self, captured: Collection[Cell], durable: bool) -> None:
        mine = {cell for cell in captured if cell in self.copies}
        self.stale = self.stale - mine if durable else self.stale | mine
        counts, whole, lists = self.held
        if not durable:
            self.counts.update(counts)
            self.whole += whole
            for table, slots in lists.items():
                for slot in slots:
                    if len(self.lists.setdefault(table, [])) < self.rows_max[table]:
                        self._insert(table, slot)
