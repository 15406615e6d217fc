"""The way back from a checkpoint: the driver fetches rows of a cut, and parities are made of them as they come.

A run that begins with a checkpoint loads every server like this, on any number of servers; rows are flushed as they
come, so that holders have them too. The rule to keep: nobody is served before all rows are here *and* every holder has
them, because from then on a loss of this server must find them there.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

import numpy as np

from regrow.core.effects import Log, Notice, Send
from regrow.core.flusher import Flusher
from regrow.core.groups import Groups
from regrow.core.identity import Identity
from regrow.core.messages import Int32Array, UInt32Array
from regrow.core.states import WAY, Life, WayState
from regrow.core.wayback import Brought, Effect, Load, LoadedAll, LoadedRows
from regrow.store.interface import ReturningRows, WholeRecords

FILL_ROWS = 1 << 20  # rows computed at a time; nobody is served yet, so it bounds only the memory for their names


class Store(WholeRecords, ReturningRows, Protocol):
    """What a store has to do here: take rows, also if it began without any."""


class Reload:
    """Some groups of one server on their way back from a cut. Its life is `states.WAY`."""

    def __init__(self, *, groups: Groups, mine: tuple[int, ...], store: Store, flusher: Flusher, cut: str) -> None:
        self.life = Life(WAY)
        self.rows_total = self.rows_back = self.bytes_back = self.faults = 0
        self._job = groups.job
        self._bare = len(groups)
        self._mine = mine
        self._store = store
        self._flusher = flusher
        self._cut = cut
        self._tables = tuple(t for t, of in enumerate(groups.of_member) if not set(of.tolist()).isdisjoint(mine))
        self._numbers: list[int] = []  # flushes that have all that was loaded

    def begin(self) -> list[Effect]:
        """Rows of a replacement that have no parities are computed first: pieces of a cut come oldest first, and each
        is written over what is there. What comes back from parities knows nothing yet, and is not filled in here."""
        for table in self._tables:
            if not self._job.tables[table].r:
                words = -(-self._store.slots(table) // 64)
                self._store.know_touched(self._bare, table, np.zeros(words, np.uint64))
        while self._store.fill(FILL_ROWS):
            pass
        return [Load(job=self._job, cut=self._cut, tables=self._tables)]

    def takes(self, brought: Brought) -> bool:
        return isinstance(brought, LoadedRows | LoadedAll)

    def receive(self, source: Identity | None, brought: Brought) -> list[Effect]:
        assert self.life.state is WayState.LEARNING
        if isinstance(brought, LoadedRows):
            for table, ids, parts in brought.rows:
                if table in self._tables:
                    self.rows_back += self._store.load_rows(table, ids, parts)
            return [*self._flusher.flush_all()]
        assert isinstance(brought, LoadedAll)
        self._flusher.set_marks(brought.marks, self._mine)
        flushed: list[Effect] = [*self._flusher.flush_all()]
        self._numbers = self._flusher.numbers()
        self.life.move("all loaded")
        return [*flushed, *self.on_acknowledged()]

    def check(self) -> list[Effect]:
        return []

    def find_missing(self, counts: Int32Array, slots: UInt32Array, peers: dict[int, Identity]) -> list[Send] | None:
        """Nobody is served before all rows are here, and then none is missing."""
        return None

    def find_owing(self) -> Iterable[int]:
        return ()

    def on_acknowledged(self) -> list[Effect]:
        if self.life.state is not WayState.SETTLING or not self._flusher.has_acked(self._numbers):
            return []
        self.life.move("holders have it")
        return [Log(text=f"loaded {self._cut}"), Notice(name="loaded", values={})]

    def tick(self) -> bool:
        """What is loaded needs no time of ours."""
        return False
