"""A replacement on its way back: which groups know where they stand, and which rows somebody waits for.

The replacement starts with nothing. Each holder tells where a group stands and which of its rows were ever touched
(`Have`); when all living holders of all groups have, pulls and pushes are served, row by row as rows come: an
untouched row is computed, a missing one is asked for (a fault) and whoever needs it waits. The rule to keep:
rows never run ahead of their marks, so a row counts only after its group is active, and only once.
"""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np

from regrow.core.effects import Send
from regrow.core.flusher import Flusher, Part
from regrow.core.groups import Groups
from regrow.core.link import Identity
from regrow.core.messages import Fault, Float32Array, Have, Int32Array, Restored, UInt32Array, UInt64Array, Undo

FILL_ROWS = 16384  # blank rows filled in per tick; too many: whoever pulls waits behind them


class RebuildStore(Protocol):
    """What a replacement needs of the store."""

    def know_touched(self, group: int, table: int, words: UInt64Array) -> None: ...
    def prepare(self, counts: Int32Array, slots: UInt32Array) -> tuple[Int32Array, UInt32Array]: ...
    def put(self, counts: Int32Array, slots: UInt32Array, relatives: Float32Array) -> int: ...
    def missing_rows(self) -> int: ...
    def fill(self, rows_max: int) -> int: ...
    def blocks(self, table: int) -> int: ...
    def slots(self, table: int) -> int: ...


class Rebuild:
    """The state of one replacement until all of it is back."""

    def __init__(
        self, *, server: int, groups: Groups, store: RebuildStore, flusher: Flusher, recovering: set[int]
    ) -> None:
        self.active = False  # every group knows where it stands
        self.reported = False  # the coordinator was told that all is back
        self.rows_total = 0
        self.rows_back = 0
        self.bytes_back = 0
        self.faults = 0
        self._server = server
        self._groups = groups
        self._store = store
        self._publisher = flusher
        self._undo: dict[int, Part] = {}
        self._early: list[Restored] = []  # rows of a holder that was ready before all others
        self._haves: dict[int, dict[int, Have]] = {g: {} for g in range(len(groups))}
        self._living = {g: [h for h in groups.holders(server, g) if h not in recovering] for g in range(len(groups))}
        sizes = [store.slots(table) for table in range(len(groups.job.tables))]
        self._first_slot = np.concatenate([[0], np.cumsum(sizes)[:-1]]).astype(np.int64)
        self._asked = np.zeros(sum(sizes), bool)  # faults sent: the slots of all tables, one after the other
        for group in flusher.groups:
            group.active = False

    def on_undo(self, source: Identity, undo: Undo) -> None:
        self._check_holder(source.id, undo.group)
        self._undo.setdefault(undo.group, (undo.counts, undo.slots, undo.deltas))

    def on_have(self, source: Identity, have: Have) -> None:
        """Takes one holder's word; with the last one of a group the group is active."""
        self._check_holder(source.id, have.group)
        haves = self._haves[have.group]
        haves[source.id] = have
        if len(haves) < len(self._living[have.group]):
            return
        first = haves[self._living[have.group][0]]
        for other in haves.values():
            assert (other.number, other.marks) == (first.number, first.marks), "holders do not agree"
        self._know_touched(first)
        undo = self._undo.pop(have.group, None)
        self._publisher.activate(have.group, number=first.number, marks=first.marks, undo=undo)
        self.active = all(group.active for group in self._publisher.groups)
        if self.active:
            self.rows_total = self._store.missing_rows()
            early, self._early = self._early, []
            for restored in early:
                self.on_restored(restored)

    def _check_holder(self, source: int, group: int) -> None:
        if source not in self._living.get(group, []) or self._publisher.groups[group].active:
            raise ValueError(f"S{source} has no say about group {group}")

    def _know_touched(self, have: Have) -> None:
        start = 0
        for table in range(len(self._groups.job.tables)):
            if self._groups.member(table, have.group) is not None:
                count = -(-self._store.blocks(table) // 64)
                self._store.know_touched(have.group, table, have.touched[start : start + count])
                start += count

    def missing(self, counts: Int32Array, slots: UInt32Array, peers: dict[int, Identity]) -> list[Send] | None:
        """None: all these rows are here. Else somebody has to wait, and these are the faults to send, if any."""
        counts, slots = self._store.prepare(counts, slots)
        if not slots.size:
            return None
        tables = np.repeat(np.arange(counts.size), counts)
        places = self._first_slot[tables] + slots
        fresh = ~self._asked[places]
        if not fresh.any():  # whoever waits is looked at again with every answer
            return []
        self._asked[places] = True
        return self._faults(tables[fresh], slots[fresh], peers)

    def _faults(self, tables: Any, slots: UInt32Array, peers: dict[int, Identity]) -> list[Send]:
        self.faults += slots.size
        sends: list[Send] = []
        count = len(self._groups.job.tables)
        groups = self._groups.of_slots(np.bincount(tables, minlength=count).astype(np.int32), slots)
        for g in np.unique(groups).tolist():
            mine = groups == g
            part_counts = np.bincount(tables[mine], minlength=count).astype(np.int32)
            fault = Fault(counts=part_counts, slots=slots[mine])
            sends.append(Send(target=peers[self._living[g][0]], message=fault))
        return sends

    def on_restored(self, restored: Restored) -> None:
        """Rows are back. One that is here already keeps its value: it may have changed since."""
        if not self.active:
            self._early.append(restored)
            return
        self.rows_back += self._store.put(restored.counts, restored.slots, restored.relatives)
        self.bytes_back += restored.relatives.nbytes
