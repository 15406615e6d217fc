"""Circles of workers that exchange dense gradients (`nn/circle.py`): when there is a new one, and of whom.

    every worker says where its board is -> a circle -> one dies -> its successor says so too -> the next circle

A circle has a board of every worker, so there is none while one of them has not said where its own is. What its members
do in it, and what is made again, they find out among themselves. Circles are numbered through the whole run: files in
which members meet have these numbers. Reports in, commands by worker out; no clock, no file.

`Gatherings` are both of the things that workers do together and the launcher arranges: circles, and evaluations.
"""

from __future__ import annotations

from regrow.launch.judges import Judges, Told
from regrow.launch.orders import CircleIs
from regrow.launch.reports import BoardAt, CircleBroken

TALLIES, CIRCLES = "tallies", "circles"  # in the run directory


class Circles:
    """Of one run."""

    def __init__(self, *, workers: int, directory: str) -> None:
        self._workers = workers
        self._directory = directory
        self._number = 0
        self._boards: dict[int, str] = {}

    def start_over(self) -> None:
        """All are new."""
        self._boards = {}

    def note_successor(self, worker: int) -> None:
        """It will say where its board is."""
        self._boards.pop(worker, None)

    def receive(self, worker: int, report: object) -> Told:
        """What to tell whom."""
        match report:
            case BoardAt(address=address):
                self._boards[worker] = address
                return self._begin()
            case CircleBroken(number=number) if number == self._number:
                return self._begin()
        return []

    def _begin(self) -> Told:
        if len(self._boards) < self._workers:
            return []
        self._number += 1
        addresses = tuple(self._boards[worker] for worker in range(self._workers))
        circle = CircleIs(number=self._number, addresses=addresses, directory=self._directory)
        return [(worker, circle) for worker in range(self._workers)]


class Gatherings:
    """Of one run, whose directory is `directory`. `shares`: see `Judges`."""

    def __init__(self, *, workers: int, directory: str, shares: bool) -> None:
        self.judges = Judges(workers=workers, directory=f"{directory}/{TALLIES}", shares=shares)
        self.circles = Circles(workers=workers, directory=f"{directory}/{CIRCLES}")

    def start_over(self) -> None:
        self.judges.start_over()
        self.circles.start_over()

    def note_successor(self, worker: int) -> None:
        self.judges.note_successor(worker)
        self.circles.note_successor(worker)

    def receive(self, worker: int, report: object) -> Told:
        return [*self.judges.receive(worker, report), *self.circles.receive(worker, report)]
