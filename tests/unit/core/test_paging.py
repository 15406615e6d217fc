"""Goal: whoever needs rows on disk goes on when exactly those are there, nobody keeps rows that he does not use, and a
disk that does not answer is waited for no longer than it may be. A checkpoint in the files of a store is said to be
stored when it is on disk, and the older one let go of when all have it.

Method: the machines by hand. The store is a list of what it was told, and the test says what has come.
"""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest
from helpers import COORDINATOR, plain

from regrow.core.cut import FULL_SECONDS_MAX, CutSide, EpochPart
from regrow.core.effects import Send
from regrow.core.identity import Identity
from regrow.core.messages import CutAsk, CutAt, CutEnd, Pull
from regrow.core.paging import DISK_SECONDS_MAX, WISHES_MAX, Paging, Upkeep, Waiter
from regrow.errors import StoreFull, StoreSilent

COUNTS, SLOTS = np.array([1], np.int32), np.array([7], np.uint32)
WORKER = Identity(role="worker", id=0, incarnation=0)
PIECE = "0000000003-abcdef.full"


class Store:
    """Gives what the test has put there; notes what it is told."""

    def __init__(self) -> None:
        self.on_disk = True
        self.too_large = False
        self.done: list[int] = []
        self.released: list[int] = []
        self.upkeeps: list[bool] = []  # what the next ones answer
        self.epoch = self.complete = self.committed = 0
        self.hastened: list[tuple[int, float]] = []
        self.full = self.spoiled = 0
        self.rows_ahead_max = 100
        self.fails_full = 0  # how many of the next calls find no room on the disk
        self._ticket = 0

    def _check_full(self) -> None:
        if self.fails_full:
            self.fails_full -= 1
            raise StoreFull("no space left")

    def fetch(self, counts: Any, slots: Any) -> int:
        self._check_full()
        if self.too_large:
            raise ValueError("too many rows for the cache")
        self._ticket += self.on_disk
        return self._ticket if self.on_disk else 0

    def poll_fetched(self) -> list[int]:
        self._check_full()
        done, self.done = self.done, []
        return done

    def release(self, ticket: int) -> None:
        self.released.append(ticket)

    def upkeep(self) -> bool:
        return self.upkeeps.pop(0)

    def begin_epoch(self) -> int:
        self.epoch += 1
        return self.epoch

    def poll_complete(self) -> int:
        return self.complete

    def commit_epoch(self, epoch: int) -> None:
        self.committed = epoch

    def hasten(self, epoch: int, seconds_left: float) -> None:
        self.hastened.append((epoch, seconds_left))

    def tier_report(self) -> dict[str, int]:
        return {"full": self.full, "epoch_spoiled": self.spoiled}


@pytest.fixture
def store() -> Store:
    return Store()


@pytest.fixture
def paging(store: Store) -> Paging:
    return Paging(store, workers=2)  # type: ignore[arg-type]


def waiter(number: int, *, worker: int = 0, kind: str = "pull") -> Waiter:
    return Waiter(kind, worker, number)


# --- Tickets ---


def test_rows_in_memory_are_used_at_once(store: Store, paging: Paging) -> None:
    store.on_disk = False
    assert paging.ask(waiter(1), COUNTS, SLOTS)
    assert (paging.waits, paging.faults) == (0, 0)


def test_exactly_those_go_on_whose_rows_have_come(store: Store, paging: Paging) -> None:
    assert not paging.ask(waiter(1), COUNTS, SLOTS)
    assert not paging.ask(waiter(2), COUNTS, SLOTS)
    assert not paging.ask(waiter(2), COUNTS, SLOTS)  # asks again, and has one ticket all the same
    assert (paging.waits, paging.faults) == (2, 2)
    store.done = [2]
    assert paging.poll() == [waiter(2)]
    assert paging.ask(waiter(2), COUNTS, SLOTS)
    assert not paging.ask(waiter(1), COUNTS, SLOTS)
    paging.drop(waiter(2))
    assert store.released == [2]
    assert paging.waits == 1


def test_a_message_comes_again_with_its_rows(store: Store, paging: Paging) -> None:
    pull = Pull(request=1, step=0, counts=COUNTS, slots=SLOTS)
    assert not paging.park(WORKER, pull, waiter(1), (COUNTS, SLOTS))
    store.done = [1]
    assert [paging.take_parked(each) for each in paging.poll()] == [(WORKER, pull)]


def test_a_worker_that_was_replaced_waits_for_nothing(store: Store, paging: Paging) -> None:
    for number, worker in ((1, 0), (2, 1), (3, 0)):
        paging.ask(waiter(number, worker=worker), COUNTS, SLOTS)
    paging.forget(0)
    assert store.released == [1, 3]
    store.done = [1, 2]  # the store may have known it already
    assert paging.poll() == [waiter(2, worker=1)]


def test_rows_are_read_ahead_once_for_a_worker_and_never_refused(store: Store, paging: Paging) -> None:
    paging.expect(0, COUNTS, SLOTS)
    paging.expect(0, COUNTS, SLOTS)
    assert paging.waits == 1
    store.too_large = True
    paging.expect(1, COUNTS, SLOTS)
    assert paging.waits == 1
    with pytest.raises(ValueError, match="too many rows"):
        paging.ask(waiter(9), COUNTS, SLOTS)


def test_workers_name_rows_ahead_a_few_times_and_nobody_waits_for_them(store: Store, paging: Paging) -> None:
    assert paging.reads_ahead
    for _ in range(WISHES_MAX + 1):
        paging.read_ahead(0, COUNTS, SLOTS)
    paging.read_ahead(1, COUNTS, SLOTS)
    assert (paging.waits, paging.requests_waiting, paging.faults) == (WISHES_MAX + 1, 0, 0)
    assert not paging.ask(waiter(1), COUNTS, SLOTS)
    assert (paging.requests_waiting, paging.faults) == (1, 1)
    store.done = [1]
    (done,) = paging.poll()
    paging.drop(done)
    paging.read_ahead(0, COUNTS, SLOTS)  # there is room for another
    assert paging.waits == WISHES_MAX + 2


def test_rows_are_not_read_ahead_that_would_push_out_others(store: Store) -> None:
    store.rows_ahead_max = 2 * SLOTS.size - 1
    paging = Paging(store, workers=2)  # type: ignore[arg-type]
    paging.read_ahead(0, COUNTS, SLOTS)
    assert paging.waits == 0
    store.rows_ahead_max = 0
    assert not Paging(store, workers=2).reads_ahead  # type: ignore[arg-type]


def test_what_is_read_ahead_counts_once(store: Store, paging: Paging) -> None:
    """A row that was read for a wish is a hit when it is pulled, and was a miss."""
    paging.read_ahead(0, COUNTS, SLOTS)
    report = paging.correct_report({"hits": 10 + SLOTS.size, "misses": SLOTS.size, "waits": 1})
    assert (report["hits"], report["misses"], report["waits"]) == (10, SLOTS.size, 0)


def test_on_a_full_disk_nothing_is_read_ahead_and_nothing_fails_for_it(store: Store, paging: Paging) -> None:
    paging.read_ahead(0, COUNTS, SLOTS)
    store.fails_full = 1  # once: rows that were read ahead were in the way
    assert not paging.ask(waiter(1), COUNTS, SLOTS)
    assert store.released == [1]
    assert not paging.reads_ahead
    store.fails_full = 1
    paging.expect(0, COUNTS, SLOTS)
    store.fails_full = 1
    with pytest.raises(StoreFull):
        paging.ask(waiter(2), COUNTS, SLOTS)


def test_a_disk_that_is_full_when_rows_come_drops_wishes_first(store: Store, paging: Paging) -> None:
    paging.read_ahead(0, COUNTS, SLOTS)
    paging.ask(waiter(1), COUNTS, SLOTS)
    store.fails_full, store.done = 1, [2]
    assert paging.poll() == [waiter(1)]
    store.fails_full = 1
    with pytest.raises(StoreFull):
        paging.poll()


def test_a_disk_that_does_not_answer_ends_the_server(store: Store, paging: Paging) -> None:
    paging.check_time(10.0)
    paging.ask(waiter(1), COUNTS, SLOTS)
    paging.check_time(10.0 + DISK_SECONDS_MAX)
    with pytest.raises(StoreSilent, match="the disk has not answered for 121 s: a pull waits for rows"):
        paging.check_time(11.0 + DISK_SECONDS_MAX)


def test_time_counts_from_the_first_tick(store: Store, paging: Paging) -> None:
    """Clocks begin anywhere: what was asked for before the first tick is not as old as the clock."""
    paging.ask(waiter(1), COUNTS, SLOTS)
    paging.check_time(5000.0)
    paging.check_time(5000.0 + DISK_SECONDS_MAX)
    with pytest.raises(StoreSilent):
        paging.check_time(5001.0 + DISK_SECONDS_MAX)


def test_upkeep_is_asked_for_once_until_it_was_done(store: Store, paging: Paging) -> None:
    assert paging.ask_upkeep() == [Upkeep()]
    assert paging.ask_upkeep() == []
    store.upkeeps = [True, False]
    assert paging.do_upkeep() == [Upkeep()]
    assert paging.do_upkeep() == []
    assert paging.ask_upkeep() == [Upkeep()]


# --- Checkpoints in the files of a store ---


@pytest.fixture
def cut(store: Store) -> CutSide:
    side: Any = CutSide(store=store, holds_pushes=False, epochs=store, flush_seconds=4.0)  # type: ignore[arg-type]
    side.on_ask(COORDINATOR, CutAsk(number=1), [[2]], whole=True)
    side.on_at(COORDINATOR, CutAt(number=1, marks=(3,), piece=PIECE, full=True, pause=False), [[2]])
    return side  # type: ignore[no-any-return]


def say(effects: list[Any]) -> list[str]:
    return [plain(effect.message)[0] for effect in effects if isinstance(effect, Send)]


def test_the_instant_is_an_epoch_and_nothing_is_handed_over(store: Store, cut: CutSide) -> None:
    assert cut.check_marks([[2]]) == [] and store.epoch == 0
    assert say(cut.check_marks([[3]])) == ["CutBegun"]
    assert store.epoch == 1
    assert cut.check_aside() == []


def test_it_is_stored_when_it_is_on_disk_and_said_once(store: Store, cut: CutSide) -> None:
    cut.check_marks([[3]])
    assert cut.check_complete() == []
    store.complete = 1
    (told,) = cut.check_complete()
    assert msgspec.json.decode(told.message.chunks.tobytes(), type=EpochPart) == EpochPart(epoch=1)
    assert told.message.error == ""
    assert cut.check_complete() == []
    assert store.committed == 0
    cut.on_end(CutEnd(number=1, durable=True))
    assert store.committed == 1


def test_one_that_is_given_up_is_not_committed(store: Store, cut: CutSide) -> None:
    cut.check_marks([[3]])
    store.complete = 1
    cut.check_complete()
    assert cut.on_end(CutEnd(number=1, durable=False)) == []
    assert store.committed == 0
    assert cut.check_complete() == []


def test_without_space_it_fails_after_a_while(store: Store, cut: CutSide) -> None:
    """Not at once: the checkpoint may be what frees some. A store that tries again is full only now and then."""
    cut.check_marks([[3]])
    for now, full in ((10.0, 1), (12.0, 0), (14.0 + FULL_SECONDS_MAX, 0)):
        store.full = full
        cut.hasten(now)
        assert cut.check_complete() == []
    cut.hasten(14.1 + FULL_SECONDS_MAX)
    (told,) = cut.check_complete()
    assert told.message.error == "there is no space left for the files of rows"


def test_space_that_comes_back_in_time_is_enough(store: Store, cut: CutSide) -> None:
    cut.check_marks([[3]])
    store.full = 1
    cut.hasten(10.0)
    store.complete = 1
    (told,) = cut.check_complete()
    assert told.message.error == ""


def test_an_epoch_of_which_a_row_is_lost_fails_at_once(store: Store, cut: CutSide) -> None:
    cut.check_marks([[3]])
    store.spoiled = 1
    cut.hasten(10.0)
    (told,) = cut.check_complete()
    assert told.message.error == "there is no space left for the files of rows"


def test_the_store_knows_how_much_time_is_left(store: Store, cut: CutSide) -> None:
    cut.hasten(9.0)
    cut.check_marks([[3]])
    for now in (10.0, 11.5, 20.0):
        cut.hasten(now)
    assert store.hastened == [(1, 4.0), (1, 2.5), (1, 0.0)]
