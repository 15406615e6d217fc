"""Goal: evaluations that all workers make together end, once, with what all have counted, whoever dies when.

Method: reports in, commands out. A worker here does at once what it is told, and may die before any of its reports.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Sequence

import pytest
from msgspec.structs import replace

from regrow.errors import UserError
from regrow.launch.judges import Judges, Told
from regrow.launch.orders import Conclude, Judge, MergeTallies
from regrow.launch.reports import Awaits, Concluded, Passed, ReadyToJudge, Report, Tallied, Trained

AFTER = ReadyToJudge(loop=1, step=None, call=1, merges=True, steps=9)
FOUND: dict[str, float | None] = {"auc": 0.5}


class World:
    """Workers that run a script: places one after the other, then its end. The n-th report of all is the last of its
    sender's life, where `dies_at` says so; its successor begins at the top."""

    def __init__(self, scripts: Sequence[Sequence[Report]], dies_at: int | None = None) -> None:
        self.judges = Judges(workers=len(scripts), directory="d")
        self.scripts = [[*script, Trained(steps=1, samples=1, seconds=1.0)] for script in scripts]
        self.found: list[list[dict[str, float | None]]] = [[] for _ in scripts]
        self.shares: list[tuple[int, int, int]] = []
        self.merged: list[tuple[int, ...]] = []
        self.reports = 0
        self._dies_at = dies_at
        self._queue: deque[tuple[int, int, Report]] = deque()
        self._lives = [0] * len(scripts)
        for worker in range(len(scripts)):
            self._say_next(worker)

    def _say_next(self, worker: int) -> None:
        script = self.scripts[worker]
        self._queue.append((worker, self._lives[worker], script[len(self.found[worker])]))

    def run(self) -> World:
        while self._queue:
            worker, life, report = self._queue.popleft()
            if life != self._lives[worker]:
                continue
            self.reports += 1
            if self.reports == self._dies_at:
                self._die(worker)
                continue
            self._tell(self.judges.receive(worker, report))
        return self

    def _die(self, worker: int) -> None:
        self._lives[worker] += 1
        self.found[worker] = []
        self.judges.note_successor(worker)
        self._say_next(worker)

    def _tell(self, told: Told) -> None:
        for worker, command in told:
            match command:
                case Judge(number=number, index=index, count=count):
                    self.shares.append((worker, index, count))
                    alone = Concluded(number=number, metrics=FOUND)
                    self._queue.append((worker, self._lives[worker], alone if count == 1 else Tallied(number=number)))
                case MergeTallies(number=number, workers=workers):
                    self.merged.append(workers)
                    self._queue.append((worker, self._lives[worker], Concluded(number=number, metrics=FOUND)))
                case Conclude(metrics=metrics):
                    self.found[worker].append(metrics)
                    self._say_next(worker)


def test_each_judges_a_share_and_the_first_merges() -> None:
    world = World([[AFTER]] * 3).run()
    assert world.shares == [(0, 0, 3), (1, 1, 3), (2, 2, 3)]
    assert world.merged == [(0, 1, 2)]
    assert world.found == [[FOUND]] * 3


@pytest.mark.parametrize("dies_at", range(1, 13))
def test_whoever_dies_everybody_gets_to_the_end(dies_at: int) -> None:
    """Two evaluations of two workers are twelve reports at least: at each of them its sender dies once."""
    places = [AFTER, ReadyToJudge(loop=2, step=None, call=1, merges=True, steps=9)]
    world = World([places] * 2, dies_at=dies_at).run()
    assert world.found == [[FOUND, FOUND]] * 2
    assert all(len(workers) == 2 for workers in world.merged)
    assert world.reports > 12


def test_what_cannot_be_merged_is_judged_by_one() -> None:
    alone = ReadyToJudge(loop=1, step=None, call=1, merges=False, steps=9)
    world = World([[AFTER], [alone]]).run()
    assert world.shares == [(0, 0, 1)]
    assert world.found == [[FOUND]] * 2


def test_who_has_ended_is_not_waited_for() -> None:
    world = World([[AFTER], []]).run()
    assert world.shares == [(0, 0, 1)]
    assert world.found == [[FOUND], []]


def test_a_successor_behind_the_step_is_not_waited_for() -> None:
    """Its predecessor had pushed that step, and died while it judged."""
    judges = Judges(workers=2, directory="d")
    within = ReadyToJudge(loop=1, step=7, call=1, merges=True, steps=7)
    assert judges.receive(0, within) == []
    (first, _) = judges.receive(1, within)
    assert first == (0, Judge(number=1, index=0, count=2, directory="d"))
    judges.note_successor(1)
    assert judges.receive(1, Passed(loop=1, step=6)) == [], "it comes to step 7"
    assert judges.receive(1, Passed(loop=1, step=7)) == [(0, Judge(number=2, index=0, count=1, directory="d"))]
    assert judges.receive(0, Tallied(number=1)) == [], "of the round before"
    assert judges.receive(0, Concluded(number=2, metrics=FOUND)) == [(0, Conclude(metrics=FOUND))]


def test_a_disk_that_is_full_leaves_it_to_one() -> None:
    judges = Judges(workers=2, directory="d")
    told = [*itertools.chain(*(judges.receive(worker, AFTER) for worker in range(2)))]
    assert len(told) == 2
    assert judges.receive(0, Tallied(number=1)) == []
    again = judges.receive(1, Tallied(number=1, problem="No space left on device"))
    assert again == [(0, Judge(number=2, index=0, count=1, directory="d"))]
    assert judges.notes == ["worker 1 cannot write what it counted (No space left on device): worker 0 judges alone"]


def test_workers_at_different_places_are_told_apart() -> None:
    judges = Judges(workers=2, directory="d")
    judges.receive(0, ReadyToJudge(loop=1, step=5, call=1, merges=True, steps=5))
    assert judges.describe_waiting() == "workers [0] wait in job.evaluate(together=True) for workers [1]"
    with pytest.raises(UserError, match="worker 0 in step 5 of loop 1, worker 1 after loop 1"):
        judges.receive(1, AFTER)


def test_a_synchronous_worker_that_ends_before_the_others_is_named() -> None:
    """Whichever of the two is heard first; those who made as many steps wait for nobody."""
    for late in (0, 1):
        judges = Judges(workers=2, directory="d")
        reports = [(1, Trained(steps=11, samples=0, seconds=0.0)), (0, Awaits(step=12))]
        judges.receive(*reports[late])
        with pytest.raises(UserError, match=r"worker 1 ended after step 11, and worker 0 waits for it in step 12"):
            judges.receive(*reports[1 - late])
    judges = Judges(workers=2, directory="d")
    judges.receive(0, Awaits(step=11))
    judges.receive(1, Trained(steps=11, samples=0, seconds=0.0))
    judges.note_successor(1)
    judges.receive(0, Awaits(step=12))


def test_a_synchronous_worker_that_goes_on_past_the_others_is_named() -> None:
    """Whichever of the two is heard first. One that pushed the step that another stands behind may still come."""
    for late in (0, 1):
        judges = Judges(workers=2, directory="d")
        reports = [(1, replace(AFTER, steps=11)), (0, Awaits(step=12))]
        judges.receive(*reports[late])
        with pytest.raises(UserError, match=r"worker 1 waits in .* after step 11, and worker 0 .* step 12"):
            judges.receive(*reports[1 - late])
    judges = Judges(workers=2, directory="d")
    judges.receive(0, Awaits(step=11))
    judges.receive(1, replace(AFTER, steps=11))
    assert [type(command) for _, command in judges.receive(0, replace(AFTER, steps=11))] == [Judge, Judge]


def test_a_successor_may_be_ahead_of_those_who_judge_without_it() -> None:
    judges = Judges(workers=2, directory="d")
    judges.receive(1, Passed(loop=1, step=7))
    judges.receive(1, Awaits(step=7))
    (told,) = judges.receive(0, ReadyToJudge(loop=1, step=7, call=1, merges=True, steps=6))
    assert told == (0, Judge(number=1, index=0, count=1, directory="d"))
    judges.receive(1, Awaits(step=7))
    judges = Judges(workers=2, directory="d")
    for worker in (0, 1):
        judges.receive(worker, AFTER)
    judges.receive(1, Tallied(number=1))
    judges.receive(0, Tallied(number=1))
    judges.receive(0, Concluded(number=1, metrics=FOUND))
    judges.receive(1, Awaits(step=50))
    judges.note_successor(0)
    assert judges.receive(0, AFTER) == [(0, Conclude(metrics=FOUND))], "it comes to what is over"


def test_after_a_fall_back_all_judge_again() -> None:
    judges = Judges(workers=2, directory="d")
    judges.receive(0, AFTER)
    judges.receive(1, AFTER)
    judges.receive(0, Tallied(number=1))
    judges.start_over()
    assert judges.receive(0, AFTER) == []
    assert [type(command) for _, command in judges.receive(1, AFTER)] == [Judge, Judge]
