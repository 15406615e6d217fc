"""The way back from a server's own saves: older rows, at once, and exactly what they lack.

Theory of operation. With partial recovery (CPR) a lost server goes back alone. Rows that nobody can bring back as they
were (they have no parities, or too many of their stripes are lost) are those of its last save; all updates since are
lost, and nobody trains them again. What is left to do is to begin soon, to hand out no row that is older than it must
be, and to say what was lost.

**Where it stands.** Rows with copies (dense parameters) come back as they were, with their marks: so many pushes of
each worker had this server applied, as far as anybody else knows. The others *join at these marks*: pushes behind
them are sent again by the workers and count for all rows alike, pushes up to them are over. So no worker has to know
of the loss, no push is applied to some rows only, and the loss is an interval: behind the marks of the save, up to the
marks of the copies.

**What was lost.** The source counts the updates of these rows, a row once for each push that has it. The count
travels with every flush, beside the marks; a save knows how many of them it contains. The difference is the number of
updates that are lost, all of them ever, to the last one.

**Their parities.** Where these rows have parities, what is left of them fits no longer: holders that live make them
void (`holder.py`), and this server streams its rows to all of them once they are back.

**When rows are served.** The driver reads first which rows are in saves. All others were never touched, and are
computed from the seed. Saves are read newest first and the first value of a row counts, so a row is right when it is
there, however much is still to be read; whoever needs one that is not waits for that row, and it is fetched first.

What breaks without the rules:
- A row from an older save, given out before the newer save was read: rows go back further than they must, and the
  count is wrong. Hence newest first, and one value for each row.
- The marks of the save instead of those of the copies: workers no longer have pushes that old, and everybody waits.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from regrow.core.bitmaps import to_words
from regrow.core.effects import Log, Notice
from regrow.core.flusher import Flusher
from regrow.core.groups import Groups
from regrow.core.identity import Identity
from regrow.core.job import JobSpec
from regrow.core.messages import Int32Array, UInt32Array
from regrow.core.rebuild import FILL_ROWS
from regrow.core.recall_events import SavedRowsLoaded, SavesFound, SavesLoaded
from regrow.core.states import WAY, Life, WayState
from regrow.core.wayback import Brought, Effect, FetchSaved, FindSaves
from regrow.store.interface import Store

SAVES_TENANT = 1  # of the rows' dirty bits: the server's own saves


class Recall:
    """The rows of one replacement that come from saves, until they are back. Its life is `states.WAY`."""

    def __init__(self, *, server: int, groups: Groups, mine: tuple[int, ...], store: Store, flusher: Flusher) -> None:
        self.life = Life(WAY)
        self.rows_total = self.rows_back = self.bytes_back = self.faults = 0
        self._job: JobSpec = groups.job
        self._server = server
        self._groups = groups
        self._mine = mine
        self._store = store
        self._flusher = flusher
        self._tables = tuple(np.flatnonzero(groups.is_recallable).tolist())
        self._found: SavesFound | None = None
        self._asked = {t: np.zeros(store.slots(t), bool) for t in self._tables}  # rows that somebody waits for
        flusher.await_recall(mine)

    def begin(self) -> list[Effect]:
        return [FindSaves(job=self._job, tables=self._tables)]

    def takes(self, brought: Brought) -> bool:
        return isinstance(brought, SavesFound | SavedRowsLoaded | SavesLoaded)

    def receive(self, source: Identity | None, brought: Brought) -> list[Effect]:
        if isinstance(brought, SavesFound):
            assert self._found is None
            self._found = brought
            for table in self._tables:
                self._know_touched(table, brought.ids.get(table, np.zeros(0, np.uint32)))
        elif isinstance(brought, SavedRowsLoaded):
            for table, ids, parts in brought.rows:
                if table in self._asked:
                    self.rows_back += self._store.load_rows(table, ids, parts, SAVES_TENANT)
                    self.bytes_back += sum(part.nbytes for part in parts)
        else:
            assert not self._count_missing(), "the saves ended before all their rows were here"
        return []

    def _know_touched(self, table: int, ids: UInt32Array) -> None:
        """Of these rows, those that live here were touched, and no others: as bitmaps of slots, or of blocks."""
        of_member = self._groups.of_member[table].tolist()
        if of_member[0] == self._groups.bare:
            self._store.know_touched(of_member[0], table, self._store.find_slots(table, ids))
            return
        servers, slots = self._job.layout(table).place(ids, table=table)
        mine = slots[servers == self._server]
        for member, group in enumerate(of_member):
            blocks = mine[mine % len(of_member) == member] // len(of_member)
            self._store.know_touched(group, table, to_words(blocks, self._store.blocks(table)))

    def _count_missing(self) -> int:
        return sum(self._store.missing_rows(group) for group in self._mine)

    def check(self) -> list[Effect]:
        """Once it is known what was saved, and where the copies stand, these rows join them there."""
        effects: list[Effect] = []
        if self.life.state is WayState.LEARNING and self._is_known():
            effects += self._join()
        if self.life.state is WayState.RETURNING and not self._count_missing():
            self.life.move("last row is back")
        return effects

    def _is_known(self) -> bool:
        copied = self._groups.copied
        return self._found is not None and copied is not None and self._flusher.groups[copied].active

    def _join(self) -> list[Effect]:
        assert self._found is not None
        marks = self._flusher.join_recalled(self._mine, updates_saved=self._found.updates)
        lost = self._flusher.updates_lost  # by this server and all before it
        self.rows_total = self._count_missing()
        self.life.move("saves were found")
        text = f"back to marks {self._found.marks} of {marks}: {lost} updates are lost by now"
        values = {"saved": self._found.marks, "joined": marks, "updates_lost": lost}
        return [Log(text=text), Notice(name="joined", values=values)]

    def find_missing(
        self, counts: Int32Array, slots: UInt32Array, peers: dict[int, Identity]
    ) -> list[FetchSaved] | None:
        """None: all its own of these rows are here. Else somebody has to wait, and these are to be fetched first."""
        if self.life.state not in (WayState.RETURNING, WayState.FILLING):
            return None
        counts, slots = self._store.prepare(counts, slots)
        tables = np.repeat(np.arange(counts.size), counts)
        wanted: list[FetchSaved] = []
        waits = False
        for table in self._tables:
            mine = slots[tables == table]
            waits |= bool(mine.size)
            fresh = mine[~self._asked[table][mine]]
            if fresh.size:
                self._asked[table][fresh] = True
                self.faults += fresh.size
                rows = self._job.layout(table).row_of(np.full(fresh.size, self._server), fresh, table=table)
                wanted.append(FetchSaved(table=table, ids=rows.astype(np.uint32)))
        return wanted if waits else None

    def find_owing(self) -> Iterable[int]:
        return ()

    def on_acknowledged(self) -> list[Effect]:
        return []

    def tick(self) -> bool:
        """Computes some rows that nobody ever touched."""
        if self.life.state is not WayState.FILLING:
            return False
        if not self._store.fill(FILL_ROWS):
            self.life.move("all filled")
        return True
