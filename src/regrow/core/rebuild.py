"""The way back from parities: which groups know where they stand, and which rows somebody waits for.

The replacement starts with nothing. Each holder tells where a group stands and which of its rows were ever touched
(`Have`); when all living holders of all groups have, pulls and pushes are served, row by row as rows come: an
untouched row is computed, a missing one is asked for (a fault) and whoever needs it waits. The rule to keep:
rows never run ahead of their marks, so a row counts only after its group is active, and only once.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterator
from typing import Any

import numpy as np

from regrow.core.checks import RowChecks, check_marks
from regrow.core.effects import Log, Send
from regrow.core.flush_group import Part
from regrow.core.flusher import Flusher
from regrow.core.groups import Groups
from regrow.core.identity import Identity
from regrow.core.messages import Fault, Have, Int32Array, Restored, UInt32Array, Undo
from regrow.core.states import WAY, Life, WayState
from regrow.core.wayback import Brought, Effect
from regrow.store.interface import ReturningRows

EARLY_MAX = 1 << 16  # Messages with rows that come before all holders have told; decoders send few ahead.
EARLY_PER_TICK = 4  # of them that are put when nothing else comes; too many: whoever pulls waits behind them
FILL_ROWS = 16384  # blank rows filled in per tick; too many: whoever pulls waits behind them


class Rebuild:
    """Some coded groups of one replacement until all of them are back. Its life is `states.WAY`."""

    def __init__(
        self,
        *,
        server: int,
        groups: Groups,
        mine: tuple[int, ...],
        store: ReturningRows,
        flusher: Flusher,
        recovering: Collection[int],
    ) -> None:
        """`recovering` are the servers that nobody can ask now: this one, and others that are not back."""
        self.life = Life(WAY)
        self.rows_total = 0
        self.rows_back = 0
        self.bytes_back = 0
        self.faults = 0
        self._groups = groups
        self._mine = mine
        self._is_mine = np.array([set(of.tolist()) <= set(mine) for of in groups.of_member])  # by table
        self._store = store
        self._checks = RowChecks(groups.job, store)
        self._flusher = flusher
        self._undo: dict[int, Part] = {}
        self._early: deque[Restored] = deque()  # rows of holders that were ready before all others
        self._haves: dict[int, dict[int, Have]] = {g: {} for g in mine}
        self._living = {g: [h for h in groups.holders(server, g) if h not in recovering] for g in mine}
        self._decoder_of_group = np.full(groups.total, -1)
        for g, living in self._living.items():
            self._decoder_of_group[g] = living[0] if living else -1
        sizes = [store.slots(table) for table in range(len(groups.job.tables))]
        self._first_slot = np.concatenate([[0], np.cumsum(sizes)[:-1]]).astype(np.int64)
        self._asked = np.zeros(sum(sizes), bool)  # faults sent: the slots of all tables, one after the other
        for g in mine:
            flusher.groups[g].active = False

    def begin(self) -> list[Effect]:
        """Holders tell by themselves: they see the same view."""
        return []

    def takes(self, brought: Brought) -> bool:
        # A row that was blank here, then changed and was flushed, is touched at its holder and may come again.
        return isinstance(brought, Undo | Have | Restored) and self.life.state is not WayState.WHOLE

    def receive(self, source: Identity | None, brought: Brought) -> list[Effect]:
        if isinstance(brought, Restored):
            self._on_restored(brought)
            return []
        assert source is not None
        if isinstance(brought, Undo):
            self._check_holder(source.id, brought.group)
            self._checks.check_records(brought.counts, brought.slots, brought.deltas)
            self._undo.setdefault(brought.group, (brought.counts, brought.slots, brought.deltas))
            return []
        assert isinstance(brought, Have)
        return self._on_have(source, brought)

    def _on_have(self, source: Identity, have: Have) -> list[Effect]:
        """Takes one holder's word; with the last one of a group the group is active."""
        self._check_holder(source.id, have.group)
        self._check_have(have)
        haves = self._haves[have.group]
        for other in haves.values():
            if (other.number, other.marks) != (have.number, have.marks):
                raise ValueError(f"holders of group {have.group} do not agree about its flush and marks")
        haves[source.id] = have
        if len(haves) < len(self._living[have.group]):
            return []
        first = haves[self._living[have.group][0]]
        self._know_touched(first)
        undo = self._undo.pop(have.group, None)
        self._flusher.activate(first, undo=undo)
        if not all(self._flusher.groups[g].active for g in self._mine):
            return []
        self.life.move("holders have told")
        self.rows_total = self._count_missing()
        self._check_back()
        return [Log(text=f"active: {self.rows_total} rows are to come back")]

    def _check_have(self, have: Have) -> None:
        """All of it, before a part of it is believed."""
        check_marks(have.marks, len(self._flusher.applied[have.group]))
        words = 0
        for table in range(len(self._groups.job.tables)):
            if self._groups.member(table, have.group) is None:
                continue
            blocks = self._store.blocks(table)
            words += -(-blocks // 64)
            if blocks % 64 and words <= have.touched.size and int(have.touched[words - 1]) >> (blocks % 64):
                raise ValueError(f"there are bits beyond the last of {blocks} blocks")
        if have.touched.size != words:
            raise ValueError(f"{have.touched.size} words of bits, group {have.group} has {words}")

    def _check_holder(self, source: int, group: int) -> None:
        if source not in self._living.get(group, []) or self._flusher.groups[group].active:
            raise ValueError(f"S{source} has no say about group {group}")

    def _know_touched(self, have: Have) -> None:
        start = 0
        for table in range(len(self._groups.job.tables)):
            if self._groups.member(table, have.group) is not None:
                count = -(-self._store.blocks(table) // 64)
                self._store.know_touched(have.group, table, have.touched[start : start + count])
                start += count

    def find_owing(self) -> Iterator[int]:
        """Holders that have not told where their group stands."""
        if self.life.state is WayState.LEARNING:
            for g, living in self._living.items():
                yield from (holder for holder in living if holder not in self._haves[g])

    def check(self) -> list[Effect]:
        """Puts one of the messages that came early, with each that comes: all at once would hold everybody up."""
        if self._early and self.life.state is not WayState.LEARNING:
            self._put(self._early.popleft())
        return []

    def find_missing(self, counts: Int32Array, slots: UInt32Array, peers: dict[int, Identity]) -> list[Send] | None:
        """None: all coded ones of these rows are here. Else somebody has to wait, and these are the faults to send."""
        if self.life.state is WayState.WHOLE:
            return None
        counts, slots = self._store.prepare(counts, slots)
        tables = np.repeat(np.arange(counts.size), counts)
        mine = self._is_mine[tables]
        tables, slots = tables[mine], slots[mine]  # the others come another way
        if not slots.size:
            return None
        places = self._first_slot[tables] + slots
        fresh = ~self._asked[places]
        if not fresh.any():  # whoever waits is looked at again with every answer
            return []
        self._asked[places] = True
        return self._send_faults(tables[fresh], slots[fresh], peers)

    def _send_faults(self, tables: Any, slots: UInt32Array, peers: dict[int, Identity]) -> list[Send]:
        self.faults += slots.size
        sends: list[Send] = []
        count = len(self._groups.job.tables)
        groups = self._groups.of_slots(np.bincount(tables, minlength=count).astype(np.int32), slots)
        decoders = self._decoder_of_group[groups]
        for decoder in np.unique(decoders).tolist():
            mine = decoders == decoder
            part_counts = np.bincount(tables[mine], minlength=count).astype(np.int32)
            fault = Fault(counts=part_counts, slots=slots[mine])
            sends.append(Send(target=peers[decoder], message=fault))
        return sends

    def _on_restored(self, restored: Restored) -> None:
        """Rows are back. One that is here already keeps its value: it may have changed since."""
        if self.life.state is WayState.LEARNING:
            self._checks.check_records(restored.counts, restored.slots, restored.relatives)
            if len(self._early) >= EARLY_MAX:
                raise ValueError("too many rows before it is known where they stand")
            self._early.append(restored)
            return
        self._put(restored)

    def _put(self, restored: Restored) -> None:
        self.rows_back += self._store.put(restored.counts, restored.slots, restored.relatives)
        self.bytes_back += restored.relatives.nbytes
        self._check_back()

    def _check_back(self) -> None:
        if self.life.state is WayState.RETURNING and not self._count_missing():
            self.life.move("last row is back")

    def _count_missing(self) -> int:
        return sum(self._store.missing_rows(group) for group in self._mine)

    def on_acknowledged(self) -> list[Effect]:
        return []

    def tick(self) -> bool:
        """Puts rows that came early, then computes some rows that nobody ever touched."""
        if self.life.state in (WayState.LEARNING, WayState.WHOLE):
            return False
        if self._early:
            for _ in range(min(EARLY_PER_TICK, len(self._early))):
                self._put(self._early.popleft())
            return True
        filled = self._store.fill(FILL_ROWS)
        if self.life.state is WayState.FILLING and not filled:
            self.life.move("all filled")
            return True
        return bool(filled)
