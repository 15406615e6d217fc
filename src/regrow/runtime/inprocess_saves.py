"""Saves of servers that live in one process: kept in memory, so that `InProcessCluster.kill` loses what came since.

The same exchange as with storage (`runtime/saves.py`), without threads or files: a save is durable as soon as it is
taken, and all its rows come back at once, so nobody ever waits for one. Of each row only the newest value is kept. The
rule to keep: what is here belongs to a place, not to a server in it, and outlives whoever made it.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from regrow.core.job import JobSpec
from regrow.core.messages import UInt32Array
from regrow.core.own_saves import OwnSaved, SaveOwn, SavePlan
from regrow.core.recall import SAVES_TENANT
from regrow.core.recall_events import SavedRowsLoaded, SavesFound, SavesLoaded
from regrow.core.wayback import FindSaves
from regrow.launch.saving import OwnSaving
from regrow.protection import Partial
from regrow.runtime.priorities import choose_tables
from regrow.store.interface import CapturedRows, Float32Array, Store
from regrow.units import parse_interval

CHUNK_BYTES = 16 << 20  # Too small: many calls. Too large: as much is taken at once.

Told = OwnSaved | SavesFound | SavedRowsLoaded | SavesLoaded


def make_own_saving(wish: Partial) -> OwnSaving:
    """What servers of a script's cluster are told, who has no planner."""
    given = parse_interval(wish.every)
    share = 1.0 if wish.priority == "none" else wish.priority_share
    return OwnSaving(
        every_seconds=None if given.seconds is None else given.seconds * share,
        every_steps=None if given.steps is None else max(1, round(given.steps * share)),
        priority=wish.priority,
        share=share,
        tables=wish.priority_tables,
        period=wish.ssu_period,
    )


def make_plan(saving: OwnSaving | None) -> SavePlan | None:
    """When a server saves, as the server is told."""
    return None if saving is None else SavePlan(every_seconds=saving.every_seconds, every_steps=saving.every_steps)


def add_saving(store: Store, job: JobSpec, saving: OwnSaving) -> None:
    """Lets a store keep track of what changes between saves, and of which rows go first."""
    while store.add_tenant() < SAVES_TENANT:
        pass  # those before belong to cuts, which nobody makes here
    tables = choose_tables(job, saving)
    store.set_priority(SAVES_TENANT, saving.priority, tables, saving.share, saving.seed, saving.period)


@dataclasses.dataclass(slots=True)
class KeptRows:
    """The newest saved value of each row of a table: numbers that rise, and weights and state of each."""

    ids: UInt32Array
    parts: list[Float32Array]

    def take(self, ids: UInt32Array, parts: list[Float32Array]) -> None:
        """These are newer."""
        every = np.concatenate([ids, self.ids])
        self.ids, first = np.unique(every, return_index=True)  # the first of equals is the newer one
        self.parts = [np.concatenate([new, old])[first] for new, old in zip(parts, self.parts, strict=True)]


class KeptSaves:
    """All saves of one place, as one."""

    def __init__(self) -> None:
        self.count = self.rows = 0  # saves so far, and rows in all of them
        self._marks: tuple[int, ...] | None = None
        self._updates = 0
        self._tables: dict[int, KeptRows] = {}

    def take(self, save: SaveOwn, store: CapturedRows) -> list[Told]:
        """Takes what was captured; what the server is told then."""
        while store.capture_left():
            for table, ids, parts in store.capture_chunk(CHUNK_BYTES):
                kept = self._tables.get(table)
                # Copies: the arrays of a chunk are views of one block.
                if kept is None:
                    self._tables[table] = KeptRows(ids.copy(), [part.copy() for part in parts])
                else:
                    kept.take(ids, parts)
                self.rows += ids.size
        self.count += 1
        self._marks, self._updates = save.marks, save.updates
        return [OwnSaved(number=save.number)]

    def bring_back(self, find: FindSaves) -> list[Told]:
        """All there is of these tables, for a replacement."""
        rows = {table: kept for table, kept in self._tables.items() if table in find.tables}
        marks = (0,) * find.job.marks if self._marks is None else self._marks
        found = SavesFound(marks=marks, updates=self._updates, ids={table: kept.ids for table, kept in rows.items()})
        loaded = SavedRowsLoaded(rows=[(table, kept.ids, kept.parts) for table, kept in rows.items()])
        return [found, loaded, SavesLoaded()]
