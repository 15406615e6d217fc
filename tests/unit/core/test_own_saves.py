"""Goal: a server saves its own rows when its time comes, never ahead of the copies, and gives way to a cut.

Method: the machine alone, with a store that notes what it is asked, and a flusher whose holder answers when told.
"""

from __future__ import annotations

import math
from typing import Any

import pytest

from regrow.core.cut import ASIDE_BYTES_MAX
from regrow.core.own_saves import (
    CHOOSE_ROWS,
    RETRY_SECONDS,
    SAVE_SECONDS_MAX,
    WRITTEN_SECONDS,
    OwnSaved,
    OwnSaves,
    SaveOwn,
    SavePlan,
    UnsaveOwn,
)
from regrow.core.states import OwnSaveState
from regrow.core.wayback import Ways


class NotingStore:
    """Captures nothing, and knows of so many updates that were left out."""

    def __init__(self) -> None:
        self.asked: list[Any] = []
        self.skipped = 0
        self.choosing = 0  # calls until it is known
        self.aside_bytes = 0

    def begin_capture(self, tenant: int, full: bool) -> None:
        self.asked.append(("begin", tenant, full))

    def end_capture(self, durable: bool) -> None:
        self.asked.append(("end", durable))

    def choose_captured(self, rows: int) -> bool:
        assert rows == CHOOSE_ROWS
        self.choosing -= 1
        return self.choosing >= 0

    def updates_skipped(self) -> int:
        assert self.choosing < 0, "to ask before it is known would keep everybody waiting"
        return self.skipped

    def capture_side_bytes(self) -> int:
        return self.aside_bytes


class OneHolder:
    """A flusher with a group that is copied and one that is not; `acked` is what the holder has."""

    def __init__(self) -> None:
        self.applied = [[0, 0], [0, 0]]
        self.updates = self.updates_lost = 0
        self.number = 0
        self.acked = 0

    def flush_all(self) -> list[Any]:
        self.number += 1
        return []

    def numbers(self) -> list[int]:
        return [self.number]

    def has_acked(self, numbers: list[int]) -> bool:
        return self.acked >= numbers[0]


def saves(plan: SavePlan | None) -> tuple[OwnSaves, NotingStore, OneHolder]:
    store, flusher = NotingStore(), OneHolder()
    made = OwnSaves(store=store, flusher=flusher, ways=Ways([]), plan=plan)  # type: ignore[arg-type]
    return made, store, flusher


def test_nothing_is_stored_before_the_copies_have_it() -> None:
    machine, store, flusher = saves(SavePlan(every_steps=5))
    flusher.applied, flusher.updates, store.skipped = [[5, 6], [5, 6]], 33, 4
    flusher.updates_lost = 3  # by servers before this one
    assert machine.tick(1.0, step=4) == []
    assert machine.tick(1.0, step=5) == []
    assert store.asked == [("begin", 1, True)]
    flusher.applied = [[9, 9], [9, 9]]  # training goes on
    assert machine.tick(1.1, step=9) == []
    flusher.acked = 1
    assert machine.check_copies() == [SaveOwn(number=1, full=True, marks=(5, 6), updates=26, skipped=4)]
    assert machine.check_copies() == []
    machine.on_saved(OwnSaved(number=1))
    assert store.asked[-1] == ("end", True)
    assert not machine.is_due(2.0, 9)
    assert machine.is_due(2.0, 10)


def test_nothing_is_saved_while_groups_are_at_different_pushes() -> None:
    """At a successor whose rows came from parities: copies that lack a push would say too little of what it saves."""
    machine, store, flusher = saves(SavePlan(every_steps=5))
    flusher.applied, flusher.acked = [[5, 4], [5, 5]], 99
    assert machine.tick(1.0, step=5) == []
    assert store.asked == []
    flusher.applied[0] = [5, 5]
    assert machine.tick(1.0, step=5) == [SaveOwn(number=1, full=True, marks=(5, 5), updates=0)]


def test_rows_are_chosen_some_each_tick_and_then_stored() -> None:
    """Whichever comes last, the answer of the copies or the last row; meanwhile there is no rest between ticks."""
    machine, store, flusher = saves(SavePlan(every_steps=5))
    store.skipped, store.choosing, flusher.updates, flusher.acked = 3, 2, 10, 1
    assert machine.tick(1.0, step=5) == []
    flusher.updates = 50
    assert machine.check_copies() == []
    assert machine.rests_until == -math.inf
    assert machine.tick(1.1, step=5) == []
    assert machine.tick(1.2, step=6) == [SaveOwn(number=1, full=True, marks=(0, 0), updates=7, skipped=3)]
    assert machine.rests_until == 1.0 + SAVE_SECONDS_MAX
    machine.on_saved(OwnSaved(number=1))
    store.choosing = 1
    assert machine.tick(2.0, step=10) == []
    assert machine.tick(2.1, step=10) == []
    flusher.acked = 2
    assert machine.tick(2.2, step=10) == [SaveOwn(number=2, full=False, marks=(0, 0), updates=47, skipped=3)]


def test_what_failed_counts_as_changed_and_is_tried_again() -> None:
    machine, store, flusher = saves(SavePlan(every_seconds=60.0))
    flusher.acked = 99
    assert machine.tick(0.0, 0) == []  # counted from the first look
    assert machine.tick(59.0, 0) == []
    assert machine.tick(60.0, 0) == [SaveOwn(number=1, full=True, marks=(0, 0), updates=0)]
    machine.on_saved(OwnSaved(number=1, error="full"))
    assert store.asked[-1] == ("end", False)
    assert not machine.is_due(60.0 + RETRY_SECONDS - 1.0, 0)
    assert machine.tick(60.0 + RETRY_SECONDS, 0) == [SaveOwn(number=2, full=True, marks=(0, 0), updates=0)]
    machine.on_saved(OwnSaved(number=1))  # of the one before
    assert machine.life.state is OwnSaveState.STORING
    machine.on_saved(OwnSaved(number=2))
    assert machine.tick(200.0, 0)[0] == SaveOwn(number=3, full=False, marks=(0, 0), updates=0)


@pytest.mark.parametrize("told", [False, True])
def test_a_cut_comes_first(told: bool) -> None:
    machine, store, flusher = saves(SavePlan(every_steps=1))
    flusher.acked = 99 if told else 0
    machine.tick(0.0, 1)
    assert machine.give_up("a reason") == [UnsaveOwn(number=1, reason="a reason")]
    assert store.asked == [("begin", 1, True), ("end", False)]
    assert machine.give_up() == []


def test_without_a_plan_nothing_is_saved_and_an_interval_may_change() -> None:
    machine, store, _ = saves(None)
    machine.change_plan(SavePlan(every_seconds=1.0))
    assert machine.tick(100.0, 100) == [] and store.asked == []
    machine, store, flusher = saves(SavePlan(every_seconds=100.0))
    flusher.acked = 99
    machine.tick(0.0, 0)
    machine.change_plan(SavePlan(every_seconds=60.0))
    assert machine.tick(50.0, 0) == []
    assert machine.tick(60.0, 0) != []  # counted from where the interval began
    assert machine.rests_until == 60.0 + SAVE_SECONDS_MAX


@pytest.mark.parametrize("told", [False, True])
def test_a_save_that_costs_too_much_is_given_up(told: bool) -> None:
    machine, store, flusher = saves(SavePlan(every_steps=1))
    flusher.acked = 99 if told else 0
    machine.tick(5.0, 1)
    assert machine.tick(5.1, 1) == []
    store.aside_bytes = ASIDE_BYTES_MAX + 1
    (effect,) = machine.tick(5.2, 1)
    assert isinstance(effect, UnsaveOwn) and "too slow" in effect.reason
    store.aside_bytes = 0
    machine.tick(5.2 + RETRY_SECONDS, 1)
    (effect,) = machine.tick(6.0 + RETRY_SECONDS + SAVE_SECONDS_MAX, 1)
    assert isinstance(effect, UnsaveOwn) and "was not stored within" in effect.reason


@pytest.mark.parametrize("plan", [SavePlan(every_seconds=1000.0), SavePlan(every_steps=1000)])
def test_written_records_are_saved_when_no_more_come(plan: SavePlan) -> None:
    machine, _, flusher = saves(plan)
    flusher.acked = 99
    for now in (0.0, 0.5, 1.0):
        assert machine.tick(now, 0) == []
        machine.hasten()
    assert machine.tick(1.0 + WRITTEN_SECONDS - 0.1, 0) == []
    assert machine.tick(1.0 + WRITTEN_SECONDS, 0) != []
    machine.on_saved(OwnSaved(number=1))
    assert machine.tick(500.0, 500) == []
