"""Saves of one server: its own rows, at an instant of its own, without asking anybody.

Partial recovery takes back one server alone, so what it goes back to need not fit together with anything: a server
captures its rows when its time comes and goes on. No cut is made, nobody is held up, nobody is told. The driver stores
what was captured, writes a manifest of its own, and says so (`OwnSaved`).

A save has all rows that changed since the last one, or, where a share is set and more have changed, those that the
store's priority picks; the others stay dirty, and are in a later one. It names the marks of its instant, and how many
updates all saves together then contain. The instant itself is short: which rows are picked is a function of it, and is
found out afterwards, some rows each tick, while training goes on.

A save must never be ahead of the copies. A replacement joins at the marks of its copies (`recall.py`); if its rows came
from a save with later pushes in them, workers would send those pushes again, and they would count twice. So what was
captured is flushed at that instant, and stored only when every holder that counts has that flush.

The rules to keep: rows count as saved when the save is durable, and not before; a save is behind the copies; there is
one capture at a time, and a cut, for which all servers wait, goes first; a replacement saves nothing before all its
rows are back.
"""

from __future__ import annotations

import dataclasses
import math

from regrow.core.cut import ASIDE_BYTES_MAX
from regrow.core.effects import Send
from regrow.core.flusher import Flusher
from regrow.core.recall import SAVES_TENANT, Recall
from regrow.core.states import OWN_SAVE, Life, OwnSaveState
from regrow.core.wayback import Ways
from regrow.store.interface import Store

RETRY_SECONDS = 10.0  # after a save that failed, or was given up for a cut; sooner if they are made more often
# A save that takes longer is given up, as a cut is (`cuts.ATTEMPT_SECONDS_MAX`): a storage that trickles.
SAVE_SECONDS_MAX = 43200.0
# Records that are written whole are no pushes, and nobody has them twice: they are saved when no more have come for so
# long. Too short: a model that is being loaded is saved again and again. Too long: a death loses it.
WRITTEN_SECONDS = 1.0
# Rows among which a tick chooses those of a save, a millisecond or two. Too small: rows that change are set aside for
# longer than they need. Too large: pulls and pushes wait.
CHOOSE_ROWS = 1 << 19


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SavePlan:
    """How often a server saves its own rows: one of the two, as seconds or as steps (pushes of the slowest worker). As
    an event at a server: so often from now on."""

    every_seconds: float | None = None
    every_steps: int | None = None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SaveOwn:
    """Effect of a server: its rows are captured; store them as a save of its own, then say `OwnSaved`."""

    number: int
    full: bool
    marks: tuple[int, ...]
    updates: int  # that are in this save and those before it, together
    skipped: int = 0  # updates that it leaves out, by priority


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class UnsaveOwn:
    """Effect of a server: whatever is being stored of this save is void, and why."""

    number: int
    reason: str


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class OwnSaved:
    """Event at a server: the save is durable, or why not. `full_wanted`: the next one must stand alone."""

    number: int
    error: str = ""
    full_wanted: bool = False


class OwnSaves:
    """When a server saves its own rows, and how that ended. Its life is `states.OWN_SAVE`."""

    def __init__(self, *, store: Store, flusher: Flusher, ways: Ways, plan: SavePlan | None) -> None:
        self.life = Life(OWN_SAVE)
        self.plan = plan
        self._store = store
        self._flusher = flusher
        self._ways = ways
        self._number = 0
        self._next: SaveOwn | None = None  # captured, and not told to the driver yet; as if nothing were left out
        self._chosen = False  # it is known what is
        self._flushes: list[int] = []  # that the holders must have before
        # Who came back from its predecessor's saves goes on where these end. All others begin with all they have: the
        # first server of a place, and one whose rows came from parities, as nobody knows which updates these contain.
        self._full_wanted = not any(isinstance(way, Recall) for way in ways.all)
        self._due_at: float | None = None
        self._due_step = 0 if plan is None or plan.every_steps is None else plan.every_steps
        self._now = 0.0
        self._step = 0
        self._counted_from: float | None = None  # when the interval that runs began
        self._began_at = 0.0  # when the save under way did

    def change_plan(self, plan: SavePlan) -> None:
        """Another interval, also for the time that has passed since the last save: with failures the interval falls,
        and to count it anew each time would put saves off just then."""
        if self.plan is None:
            return
        self.plan = plan
        if plan.every_seconds is not None and self._counted_from is not None:
            self._due_at = self._counted_from + plan.every_seconds
        if plan.every_steps is not None:
            self._due_step = self._step + plan.every_steps

    def hasten(self) -> None:
        """Records were written whole: they are saved soon, whatever the interval."""
        if self.plan is not None and self.life.state is OwnSaveState.IDLE:
            self._due_at, self._due_step = self._now + WRITTEN_SECONDS, 0

    @property
    def counts_steps(self) -> bool:
        return self.plan is not None and self.plan.every_steps is not None

    def is_due(self, now: float, step: int) -> bool:
        """Whether it is time for a save."""
        plan = self.plan
        if plan is None or self.life.state is not OwnSaveState.IDLE:
            return False
        if plan.every_steps is not None:
            return step >= self._due_step and (self._due_at is None or now >= self._due_at)
        return self._due_at is None or now >= self._due_at

    @property
    def rests_until(self) -> float:
        """When time alone brings something, behind a tick that found nothing to do. Steps are made by pushes."""
        if self.plan is None:
            return math.inf
        if self.life.state is OwnSaveState.CAPTURED and not self._chosen:
            return -math.inf
        if self.life.state is not OwnSaveState.IDLE:
            return self._began_at + SAVE_SECONDS_MAX
        if self._due_at is None:
            return math.inf if self.plan.every_steps is not None else -math.inf
        return self._due_at

    def tick(self, now: float, step: int) -> list[Send | SaveOwn | UnsaveOwn]:
        self._now, self._step = now, step
        if self.life.state is not OwnSaveState.IDLE:
            return [*self._check_cost(now)] or [*self._choose()]
        if not self.is_due(now, step) or not self._ways.is_back or not self._are_level():
            return []
        if self._due_at is None and self.plan is not None and self.plan.every_seconds is not None:
            self._counted_from = now  # from the first look
            self._due_at = now + self.plan.every_seconds
            return []
        return self._begin()

    def _check_cost(self, now: float) -> list[UnsaveOwn]:
        """A save that costs too much is given up: what had to be set aside for it is memory that training has not."""
        aside_bytes = self._store.capture_side_bytes()
        if aside_bytes > ASIDE_BYTES_MAX:
            return self.give_up(f"storage is too slow: {aside_bytes >> 20} MiB of rows changed meanwhile")
        if now - self._began_at > SAVE_SECONDS_MAX:
            return self.give_up(f"it was not stored within {SAVE_SECONDS_MAX:.0f} s")
        return []

    def _are_level(self) -> bool:
        """Whether all groups are at the same pushes. At a successor that got its rows from parities they are not at
        once; what is saved then would be ahead of the copies, or not what its count says."""
        first = self._flusher.applied[0]
        return all(marks == first for marks in self._flusher.applied)

    def _begin(self) -> list[Send | SaveOwn | UnsaveOwn]:
        self._number += 1
        self._store.begin_capture(SAVES_TENANT, self._full_wanted)
        self.life.move("captured")
        lost = self._flusher.updates_lost
        marks = tuple(self._flusher.applied[0])
        self._next = SaveOwn(
            number=self._number, full=self._full_wanted, marks=marks, updates=self._flusher.updates - lost
        )
        self._chosen = False
        self._began_at = self._now
        flushed = self._flusher.flush_all()
        self._flushes = self._flusher.numbers()
        return [*flushed, *self._choose()]

    def _choose(self) -> list[SaveOwn]:
        """Some more rows are looked at: has the save them?"""
        if self.life.state is OwnSaveState.CAPTURED and not self._chosen:
            self._chosen = not self._store.choose_captured(CHOOSE_ROWS)
        return self.check_copies()

    def check_copies(self) -> list[SaveOwn]:
        """Holders may have more than before: is what was captured behind them now, and is it known what that is?"""
        if self.life.state is not OwnSaveState.CAPTURED or not self._flusher.has_acked(self._flushes):
            return []
        if not self._chosen:
            return []
        assert self._next is not None
        self.life.move("copies have it")
        skipped = self._store.updates_skipped()
        return [dataclasses.replace(self._next, updates=self._next.updates - skipped, skipped=skipped)]

    def on_saved(self, saved: OwnSaved) -> None:
        """What was captured is stored, or cannot be: then it counts as changed again."""
        if saved.number != self._number or self.life.state is not OwnSaveState.STORING:
            return
        self._store.end_capture(not saved.error)
        self.life.move("over")
        self._full_wanted = saved.full_wanted or (self._full_wanted and bool(saved.error))
        self._plan_next(failed=bool(saved.error))

    def give_up(self, reason: str = "a checkpoint of all servers came first") -> list[UnsaveOwn]:
        """What was captured counts as changed again."""
        if self.life.state is OwnSaveState.IDLE:
            return []
        self._store.end_capture(False)
        self.life.move("over")
        self._plan_next(failed=True)
        return [UnsaveOwn(number=self._number, reason=reason)]

    def _plan_next(self, *, failed: bool) -> None:
        plan = self.plan
        assert plan is not None
        if not failed:
            self._counted_from = self._now
        if plan.every_steps is not None:
            self._due_at = self._now + RETRY_SECONDS if failed else None
            self._due_step = self._due_step if failed else (self._step // plan.every_steps + 1) * plan.every_steps
        elif plan.every_seconds is not None:
            self._due_at = self._now + (min(RETRY_SECONDS, plan.every_seconds) if failed else plan.every_seconds)
