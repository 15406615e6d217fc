"""Ways back: how a server that begins without its rows gets them, and what it may do meanwhile.

There are three: from parities that other servers hold (`rebuild.py`), from a checkpoint (`reload.py`), and from what
this server's predecessors saved by themselves (`recall.py`). All answer the same four questions, for the groups of rows
that they are responsible for:

    what is missing?            `find_missing` says which of some rows are not here, and asks for them
    who brings it?              `begin` asks; `receive` takes what holders, or the driver, bring
    what may be served already? `serves`: nothing before it is known where the rows stand; then each row when it is back
    when is it done?            `is_back`: every row that was ever touched is here; `is_whole`: nothing is left to do

`Ways` puts several together, so that a server may get some tables by one way and some by the other; a server that has
all its rows from the start has `Ways([])`. Which way brings which group is decided in one place (`plan_ways`).

The rule to keep: rows never run ahead of their marks. A row counts only after its group knows where it stands, and only
once: whoever is here already keeps its value.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any, Protocol

from regrow.core.effects import Log, Notice, Send
from regrow.core.groups import Groups
from regrow.core.identity import Identity
from regrow.core.job import JobSpec
from regrow.core.messages import Have, Int32Array, Restored, UInt32Array, Undo
from regrow.core.recall_events import SavedRowsLoaded, SavesFound, SavesLoaded
from regrow.core.states import Life, WayState
from regrow.store.interface import TableRows


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """Effect of a server: fetch its rows of these tables as they are in this cut; tell them as `LoadedRows`, then
    `LoadedAll`."""

    job: JobSpec
    cut: str
    tables: tuple[int, ...]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LoadedRows:
    """Event: rows from a checkpoint, whoever has them."""

    rows: list[TableRows]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LoadedAll:
    """Event: these were all, and they are the state after these pushes (steps) of each worker."""

    marks: tuple[int, ...]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class FindSaves:
    """Effect of a server: find what was saved of its rows of these tables; tell it as `SavesFound`, then the rows as
    `SavedRowsLoaded`, newest first, then `SavesLoaded`."""

    job: JobSpec
    tables: tuple[int, ...]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class FetchSaved:
    """Effect of a server: somebody waits for these rows of its saves, bring them first."""

    table: int
    ids: UInt32Array


Brought = Undo | Have | Restored | LoadedRows | LoadedAll | SavesFound | SavedRowsLoaded | SavesLoaded
Effect = Send | Log | Notice | Load | FindSaves | FetchSaved
Asking = Send | FetchSaved  # how rows are asked for that somebody waits for


class WayBack(Protocol):
    """One way, for some groups of rows. `source` is who brought something: a holder, or None for the driver."""

    life: Life[WayState]
    rows_total: int  # to come back, once that is known
    rows_back: int
    bytes_back: int
    faults: int  # rows that somebody waited for

    def begin(self) -> list[Effect]:
        """Asks whoever brings the rows, if anybody has to be asked."""

    def takes(self, brought: Brought) -> bool:
        """Whether this is for this way."""

    def receive(self, source: Identity | None, brought: Brought) -> list[Effect]:
        """Takes what was brought. ValueError: nobody asked for it, and nothing changed."""

    def check(self) -> list[Effect]:
        """Something came, perhaps for another way: is this one further for it?"""

    def find_missing(
        self, counts: Int32Array, slots: UInt32Array, peers: dict[int, Identity]
    ) -> Sequence[Asking] | None:
        """None: all its own of these rows are here. Else somebody has to wait, and this is what asks for them."""

    def find_owing(self) -> Iterable[int]:
        """Servers that it waits for before it can begin."""

    def on_acknowledged(self) -> list[Effect]:
        """Parity holders have more than before."""

    def tick(self) -> bool:
        """Goes on with whatever nobody waits for. False: there was nothing."""


class Ways:
    """All ways of one server, as one. With none of them everything is there from the start."""

    def __init__(self, ways: Sequence[WayBack]) -> None:
        self.all = tuple(ways)
        self.serves = self.is_back = self.is_whole = False
        self._look()

    def __repr__(self) -> str:
        return f"<ways back: {', '.join(str(way.life.state) for way in self.all) or 'none'}>"

    def _look(self) -> None:
        """What all of them together allow. Asked for every request, so it is computed when something happens."""
        states = [way.life.state for way in self.all]
        self.serves = not any(state in (WayState.LEARNING, WayState.SETTLING) for state in states)
        self.is_back = all(state in (WayState.FILLING, WayState.WHOLE) for state in states)
        self.is_whole = all(state is WayState.WHOLE for state in states)

    def begin(self) -> list[Effect]:
        return [effect for way in self.all for effect in way.begin()]

    def receive(self, source: Identity | None, brought: Brought) -> list[Effect]:
        """What is for nobody is dropped: a row that comes once more after all is here."""
        effects = [effect for way in self.all if way.takes(brought) for effect in way.receive(source, brought)]
        effects += [effect for way in self.all for effect in way.check()]
        self._look()
        return effects

    def find_missing(self, counts: Int32Array, slots: UInt32Array, peers: dict[int, Identity]) -> list[Asking] | None:
        """None: all these rows are here. Else somebody has to wait, and this is what asks for them."""
        if self.is_whole:
            return None
        asked: list[Asking] | None = None
        for way in self.all:
            found = way.find_missing(counts, slots, peers)
            if found is not None:
                asked = [*(asked or []), *found]
        return asked

    def find_owing(self) -> list[int]:
        """Servers that any of them waits for before it can begin."""
        return [server for way in self.all for server in way.find_owing()]

    def on_acknowledged(self) -> list[Effect]:
        effects = [effect for way in self.all for effect in way.on_acknowledged()]
        self._look()
        return effects

    def tick(self) -> bool:
        """Whether any of them had something to go on with."""
        if self.is_whole:
            return False
        has_more = any([way.tick() for way in self.all])
        self._look()
        return has_more

    def count(self, name: str) -> int:
        """The sum of one of the counters of all ways."""
        return sum(getattr(way, name) for way in self.all)

    def progress(self) -> dict[str, Any]:
        """Counters for whoever watches."""
        names = {"rows_total": "rows_total", "rows_back": "rows_back", "bytes": "bytes_back", "faults": "faults"}
        return {shown: self.count(name) for shown, name in names.items()}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Which groups of a server come back by which way, and why."""

    rebuilt: tuple[int, ...] = ()  # from parities
    reloaded: tuple[int, ...] = ()  # from a checkpoint
    recalled: tuple[int, ...] = ()  # from what its predecessors saved
    reason: str


def find_ways_flaw(groups: Groups, *, recovering: bool, cut: str | None) -> str | None:
    """Why a server cannot begin like this, or None."""
    is_lost = recovering and groups.bare is not None and groups.bare not in groups.recallable
    if is_lost and cut is None:
        return "rows without parities were lost, and no cut is named to load them from"
    return None


def plan_ways(groups: Groups, *, recovering: bool, recalled: bool = False, cut: str | None) -> Plan:
    """A replacement gets from parities what has parities, and the rest from its saves, if the protection makes any, or
    from the cut; one that is recalled gets all from its saves that may come from there. A server of a run that begins
    with a cut gets everything from that; of any other run it computes its rows, which takes no way at all."""
    everything = tuple(range(groups.total))
    if not recovering:
        reason = "its rows are computed" if cut is None else f"all rows are loaded from {cut}"
        return Plan(reloaded=() if cut is None else everything, reason=reason)
    coded = everything[: len(groups)]
    bare = everything[len(groups) :]
    if flaw := find_ways_flaw(groups, recovering=recovering, cut=cut):
        raise ValueError(flaw)
    if groups.recallable and (recalled or bare):
        rebuilt = tuple(g for g in coded if g not in groups.recallable)
        reason = "copies come back as they were, other rows as they were saved"
        return Plan(rebuilt=rebuilt, recalled=groups.recallable, reason=reason)
    reason = "rows come back from parities" + (f", those without from {cut}" if bare else "")
    return Plan(rebuilt=coded, reloaded=bare, reason=reason)
