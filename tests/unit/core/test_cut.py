"""Goal: a server captures its rows at exactly the marks it is told, holds pushes back no longer than it must, and
forgets that rows changed only when they are stored.

Method: the state machine by hand, one transition at a time. The store is a list of what it was told.
"""

from __future__ import annotations

from typing import Any

import pytest
from helpers import COORDINATOR, plain

from regrow.core.cut import ASIDE_BYTES_MAX, HOLD_SECONDS_MAX, CutSide, Save, Saved, Unsave
from regrow.core.effects import Send
from regrow.core.messages import CutAsk, CutAt, CutEnd


class Store:
    """Notes what it is told."""

    def __init__(self) -> None:
        self.told: list[tuple[str, bool]] = []
        self.aside_bytes = 0

    def capture_side_bytes(self) -> int:
        return self.aside_bytes

    def begin_capture(self, tenant: int, full: bool) -> None:
        assert tenant == 0
        self.told.append(("begin", full))

    def end_capture(self, durable: bool) -> None:
        self.told.append(("end", durable))


class Side:
    """A server with one worker's marks (sync), or two (async), in two groups."""

    def __init__(self, *, is_sync: bool, applied: list[list[int]]) -> None:
        self.store = Store()
        self.cut = CutSide(store=self.store, holds_pushes=not is_sync)
        self.applied = applied

    def ask(self, number: int = 1, *, whole: bool = True) -> list[Any]:
        return short(self.cut.on_ask(COORDINATOR, CutAsk(number=number), self.applied, whole=whole))

    def at(self, *marks: int, number: int = 1, full: bool = False, pause: bool = False) -> list[Any]:
        at = CutAt(number=number, marks=marks, piece=PIECE, full=full, pause=pause)
        return short(self.cut.on_at(COORDINATOR, at, self.applied))

    def reached(self) -> list[Any]:
        return short(self.cut.check_marks(self.applied))

    def saved(self, **values: Any) -> list[Any]:
        return short(self.cut.on_saved(COORDINATOR, Saved(number=1, **values)))

    def end(self, durable: bool, number: int = 1) -> list[Any]:
        return short(self.cut.on_end(CutEnd(number=number, durable=durable)))


def short(effects: Any) -> list[Any]:
    """Messages by name and fields, to whoever asked; everything else as it is."""
    found = []
    for effect in effects:
        if isinstance(effect, Send):
            assert effect.target == COORDINATOR
            found.append(plain(effect.message))
        else:
            found.append(effect)
    return found


def marks(number: int, *values: int, error: str = "") -> tuple[str, dict[str, Any]]:
    return "CutMarks", {"number": number, "marks": values, "error": error}


def begun(*, number: int = 1, late: bool = False) -> tuple[str, dict[str, Any]]:
    return "CutBegun", {"number": number, "late": late}


PIECE = "0000000005-64aab3.full"
SAVE = Save(number=1, piece=PIECE)


@pytest.fixture
def sync() -> Side:
    return Side(is_sync=True, applied=[[5], [5]])


@pytest.fixture
def two() -> Side:
    return Side(is_sync=False, applied=[[5, 8], [5, 8]])


def test_sync_a_cut_is_made_at_its_step(sync: Side) -> None:
    assert sync.ask() == [marks(1, 5)]
    assert sync.at(7, full=True) == []
    assert not sync.cut.holds(0, 6), "nobody waits"
    sync.applied[:] = [[6], [6]]
    assert sync.reached() == []
    sync.applied[:] = [[7], [7]]
    assert sync.reached() == [begun(), SAVE]
    assert sync.store.told == [("begin", True)]
    sync.applied[:] = [[8], [8]]
    assert sync.reached() == [], "once"
    assert sync.saved(chunks="[]") == [("CutSaved", {"number": 1, "error": "", "chunks": ("|u1", list(b"[]"))})]
    assert sync.end(True) == []
    assert sync.store.told == [("begin", True), ("end", True)]
    assert sync.cut.captures == 1
    assert sync.end(True) == sync.saved(chunks="[]") == [], "it is over"


def test_sync_at_once_where_it_is(sync: Side) -> None:
    sync.ask()
    assert sync.at(5) == [begun(), SAVE]


def test_sync_a_pause_holds_everything_until_the_end(sync: Side) -> None:
    sync.ask()
    sync.at(5, pause=True)
    assert sync.cut.is_pausing
    assert sync.cut.holds(0, 1)
    sync.end(True)
    assert not sync.cut.is_pausing


def test_async_pushes_are_held_until_the_marks_are_reached(two: Side) -> None:
    two.applied[:] = [[5, 8], [4, 8]]  # a group behind, after a failure
    assert two.ask() == [marks(1, 5, 8)]
    assert two.cut.holds(0, 1), "all of them, until marks are known"
    assert two.at(6, 8) == []
    assert (two.cut.holds(0, 6), two.cut.holds(0, 7)) == (False, True)
    assert (two.cut.holds(1, 8), two.cut.holds(1, 9)) == (False, True)
    two.applied[:] = [[6, 8], [5, 8]]
    assert two.reached() == [], "not in every group"
    two.applied[:] = [[6, 8], [6, 8]]
    assert two.reached() == [begun(), SAVE]
    assert not two.cut.holds(0, 7)
    assert not two.cut.is_pausing


def test_async_a_pause_holds_on(two: Side) -> None:
    two.ask()
    assert two.at(5, 8, pause=True) == [begun(), SAVE]
    assert two.cut.holds(0, 6)
    assert two.end(False) == [Unsave(number=1)]
    assert not two.cut.holds(0, 6)


def test_too_late(sync: Side, two: Side) -> None:
    sync.ask()
    sync.applied[1] = [6]
    assert sync.at(5) == [begun(late=True)]
    two.ask()
    assert two.at(5, 7) == [begun(late=True)]
    for side in (sync, two):
        assert side.store.told == []
        assert not side.cut.holds(0, 100)
        assert side.end(False) == []


def test_not_while_coming_back(two: Side) -> None:
    assert two.ask(whole=False) == [marks(1, error="a server is still coming back")]
    assert not two.cut.holds(0, 6)
    assert two.ask(2) == [marks(2, 5, 8)]


def test_what_is_not_stored_counts_as_changed(sync: Side) -> None:
    sync.ask()
    sync.at(5)
    assert sync.saved(error="x" * 5000) == [("CutSaved", {"number": 1, "error": "x" * 4000, "chunks": ("|u1", [])})]
    assert sync.end(False) == [Unsave(number=1)]
    assert sync.store.told == [("begin", False), ("end", False)]


def test_a_cut_that_takes_too_much_memory_is_given_up_when_rows_change(two: Side) -> None:
    """Not when somebody comes for the next rows: a storage that hangs does not."""
    two.ask()
    two.at(5, 8)
    two.store.aside_bytes = ASIDE_BYTES_MAX
    assert two.cut.check_aside() == []
    two.store.aside_bytes += 1
    unsave, (name, told) = short(two.cut.check_aside())
    assert unsave == Unsave(number=1)
    assert (name, told["number"], told["error"]) == (
        "CutSaved",
        1,
        "storage is too slow: 1024 MiB of rows changed meanwhile",
    )
    assert two.store.told == [("begin", False), ("end", False)], "what was captured counts as changed"
    assert two.cut.check_aside() == two.saved(chunks="[]") == []
    assert two.end(durable=False) == []
    assert two.ask(2) != []


def test_another_cut_ends_the_one_before(two: Side) -> None:
    two.ask()
    two.at(5, 8)
    assert two.ask(2) == [Unsave(number=1), marks(2, 5, 8)]
    assert two.store.told == [("begin", False), ("end", False)]
    assert two.saved(chunks="[]") == two.end(True) == [], "of the first one"
    assert two.cut.holds(0, 6), "the second one is under way"


def test_what_comes_late_or_twice_is_nothing(two: Side) -> None:
    two.ask(3)
    assert two.ask(3) == two.ask(2) == []
    assert two.at(9, 9, number=2) == []
    two.at(5, 8, number=3)
    assert two.at(5, 8, number=3) == two.at(6, 8, number=3) == []
    assert two.end(True, number=2) == two.end(False, number=4) == []
    assert two.store.told == [("begin", False)]


def test_an_end_that_is_durable_before_anything_was_captured(two: Side) -> None:
    """A coordinator does not say so; nothing may be forgotten for it."""
    two.ask()
    two.at(6, 8)
    assert two.end(True) == []
    assert two.store.told == []
    assert not two.cut.holds(0, 7)


def test_giving_up(two: Side) -> None:
    assert two.cut.give_up() == []
    two.ask()
    assert two.cut.give_up() == []
    assert not two.cut.holds(0, 6)
    two.ask(2)
    two.at(5, 8, number=2)
    assert two.cut.give_up() == [Unsave(number=2)]
    assert two.store.told == [("begin", False), ("end", False)]
    assert two.ask(1) == [], "an older one is over for ever"


def test_async_nothing_is_held_for_ever(two: Side) -> None:
    """Not even if the coordinator says nothing more: before it names the marks, or behind that."""
    assert not two.cut.tick(0.0)
    two.ask()
    for now in (100.0, 100.0 + HOLD_SECONDS_MAX):
        assert not two.cut.tick(now)
        assert two.cut.holds(0, 6)
    assert two.cut.tick(100.1 + HOLD_SECONDS_MAX)
    assert not two.cut.holds(0, 6)
    assert not two.cut.tick(200.0)
    two.applied[0][0] = 6
    assert two.at(5, 8) == [begun(late=True)], "it went on meanwhile"
    two.ask(2)
    assert two.at(7, 8, number=2) == []
    two.cut.tick(300.0)
    assert two.cut.tick(301.0 + HOLD_SECONDS_MAX)
    assert not two.cut.holds(0, 8)
    two.applied[:] = [[7, 8], [7, 8]]
    assert two.reached() == []


def test_sync_and_captured_rows_wait_as_long_as_it_takes(sync: Side, two: Side) -> None:
    for side, at in ((sync, (9,)), (two, (5, 8))):
        side.ask()
        side.at(*at)
        assert not side.cut.tick(0.0)
        assert not side.cut.tick(10 * HOLD_SECONDS_MAX)
    sync.applied[:] = [[9], [9]]
    assert sync.reached() == [begun(), SAVE]
    assert two.end(True) == []
    assert two.store.told == [("begin", False), ("end", True)]


def test_marks_of_another_job(two: Side) -> None:
    two.ask()
    with pytest.raises(ValueError, match="1 marks, this job has 2"):
        two.at(5)
