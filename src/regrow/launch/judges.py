"""Evaluations that all workers of a script make together: who has come to which, who judges which batches, who merges.

    each worker comes to a place and waits -> all are there -> each judges its share -> the first merges -> all go on

Nobody trains meanwhile, so all judge the same model. What is found stays here: a worker that dies has a successor,
which runs the script from the top, comes to places where the others have long been, and is told at once. One that dies
while it judges is waited for; its successor judges the same batches of the same model. Who will never come is not
waited for: a worker whose script has ended, and a successor that goes on behind this step.

Only names travel through the pipes, which must never be full: what is counted is in files of the run directory. Reports
in, commands by worker out; no clock, no file.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from regrow.errors import UserError
from regrow.launch.orders import Command, Conclude, Judge, MergeTallies
from regrow.launch.reports import Awaits, Concluded, Passed, ReadyToJudge, Tallied, Trained

Told = list[tuple[int, Command]]


class Place(NamedTuple):
    """A call of `job.evaluate(together=True)` in the script."""

    loop: int  # 1 is the first
    step: int | None  # of this loop; None: it is over
    call: int

    def __str__(self) -> str:
        where = "after" if self.step is None else f"in step {self.step} of"
        return f"{where} loop {self.loop}" + (f" (call {self.call})" if self.call > 1 else "")


@dataclass(slots=True, kw_only=True)
class _Evaluation:
    place: Place
    number: int
    among: tuple[int, ...]  # who judges; the first merges
    tallied: set[int] = field(default_factory=set)  # of these, who has counted
    metrics: dict[str, float | None] | None = None

    @property
    def awaited(self) -> set[int]:
        """Without whom there is no end: the first is needed for the last word too."""
        return (set(self.among) - self.tallied) | {self.among[0]}


class Judges:
    """Of one run. `directory`: where files of what was counted may be. `shares`: whether all workers can reach it; or
    the first of them judges alone."""

    def __init__(self, *, workers: int, directory: str, shares: bool = True) -> None:
        self.notes: list[str] = []  # for the user, to be taken
        self._workers = workers
        self._directory = directory
        self._shares = shares
        self._at: dict[int, Place] = {}  # who waits where,
        self._merges: dict[int, bool] = {}  # and whether its metrics can be merged,
        self._made: dict[int, int] = {}  # and the steps that it has made
        self._ended: set[int] = set()
        self._last: dict[int, int] = {}  # the last step of who has ended
        self._awaits: dict[int, int] = {}  # the step in which others are waited for, if that is long
        self._passed: dict[int, tuple[int, int]] = {}  # (loop, step) that a successor has passed over
        self._evaluations: dict[Place, _Evaluation] = {}
        self._rounds = 0

    def describe_waiting(self) -> str | None:
        """For somebody who wonders why nothing moves."""
        if not self._at:
            return None
        absent = sorted(set(range(self._workers)) - self._at.keys() - self._ended)
        return f"workers {sorted(self._at)} wait in job.evaluate(together=True) for workers {absent}"

    def number_from(self, number: int) -> None:
        """Evaluations of an earlier launcher had smaller numbers: what is said of them comes too late."""
        self._rounds = number

    def start_over(self) -> None:
        """All begin again, from a checkpoint: what was found is of another model."""
        self._at, self._ended, self._passed, self._evaluations = {}, set(), {}, {}
        self._last, self._awaits = {}, {}

    def note_successor(self, worker: int) -> None:
        """It begins at the top of the script."""
        self._at.pop(worker, None)
        self._passed.pop(worker, None)
        self._last.pop(worker, None)
        self._awaits.pop(worker, None)
        self._ended.discard(worker)

    def receive(self, worker: int, report: object) -> Told:
        """What to tell whom. UserError for workers that wait for each other at different places."""
        match report:
            case ReadyToJudge(loop=loop, step=step, call=call, merges=merges, steps=steps):
                place = Place(loop, step, call)
                self._at[worker], self._merges[worker], self._made[worker] = place, merges, steps
                told = self._welcome(worker, place) or self._begin()
                self._check_steps()
                return told
            case Passed(loop=loop, step=step):
                self._passed[worker] = (loop, step)
                return self._begin()
            case Trained(steps=steps):
                self._ended.add(worker)
                self._last[worker] = steps
                self._check_steps()
                return self._begin()
            case Awaits(step=step):
                self._awaits[worker] = step
                self._check_steps()
            case Tallied() | Concluded():
                made = self._evaluations.get(self._at[worker]) if worker in self._at else None
                if made is None or made.number != report.number or worker not in made.among:
                    return []  # it was begun again meanwhile
                if isinstance(report, Concluded):
                    return self._conclude(made, report.metrics)
                return self._note_tallied(made, worker, report.problem)
        return []

    def _check_steps(self) -> None:
        """Synchronously a step is made by all: who has ended makes none any more, and who waits here for the others
        makes none before they come."""
        for worker, last in self._last.items():
            for other, step in self._awaits.items():
                if step > last and other != worker:
                    raise UserError(
                        f"worker {worker} ended after step {last}, and worker {other} waits for it in step {step}: "
                        "synchronous workers make the same steps",
                        hint="the same batches in every worker, no break in one of them; job.loop deals them itself",
                    )

        for worker, place in self._at.items():
            for other, step in self._awaits.items():
                never_comes = other in self._at or self._never_comes(other, place)
                if step > self._made[worker] and place not in self._evaluations and not never_comes:
                    raise UserError(
                        f"worker {worker} waits in job.evaluate(together=True) {place}, after step "
                        f"{self._made[worker]}, and worker {other} waits for it in step {step}",
                        hint="every worker must make the same steps, and call it in the same, which job.steps counts",
                    )

    def _welcome(self, worker: int, place: Place) -> Told:
        """Who comes to a place that others have been to is a successor."""
        known = self._evaluations.get(place)
        if known is None:
            return []
        if known.metrics is not None:
            return self._release(worker, known.metrics)
        if worker == known.among[0]:  # what its predecessor had counted itself was in its memory
            known.tallied.discard(worker)
        return [(worker, self._make_order(known, worker))] if worker in known.awaited else []

    def _begin(self) -> Told:
        """Wherever everybody is who ever will be."""
        told: Told = []
        places = set(self._at.values())
        for place in sorted(places, key=str):
            here = sorted(worker for worker, at in self._at.items() if at == place)
            away = {worker for worker in range(self._workers) if self._never_comes(worker, place)}
            known = self._evaluations.get(place)
            if len(here) + len(away) < self._workers or (known is not None and not known.awaited & away):
                continue
            merges = self._shares and all(self._merges[worker] for worker in here)
            told += self._begin_round(place, tuple(here) if merges else (here[0],))
        if not told and len(places) > 1 and len(self._at.keys() | self._ended) == self._workers and self._is_stuck():
            at = ", ".join(f"worker {worker} {place}" for worker, place in sorted(self._at.items()))
            raise UserError(
                f"workers wait for each other in different calls of job.evaluate(together=True): {at}",
                hint="every worker must call it in the same steps, which job.steps counts",
            )
        return told

    def _is_stuck(self) -> bool:
        """Everybody waits, and nobody has anything to do."""
        open_ones = (self._evaluations.get(place) for place in self._at.values())
        return not any(
            known is not None and all(self._at.get(worker) == known.place for worker in known.awaited)
            for known in open_ones
        )

    def _never_comes(self, worker: int, place: Place) -> bool:
        """Its script has ended; or it went on in a dead one's place, behind this step."""
        if worker in self._ended:
            return True
        return place.step is not None and self._passed.get(worker, (0, 0)) >= (place.loop, place.step)

    def _begin_round(self, place: Place, among: tuple[int, ...]) -> Told:
        self._rounds += 1
        made = self._evaluations[place] = _Evaluation(place=place, number=self._rounds, among=among)
        return [(worker, self._make_order(made, worker)) for worker in among if worker in self._at]

    def _make_order(self, made: _Evaluation, worker: int) -> Judge:
        index = made.among.index(worker)
        return Judge(number=made.number, index=index, count=len(made.among), directory=self._directory)

    def _note_tallied(self, made: _Evaluation, worker: int, problem: str) -> Told:
        first = made.among[0]
        if problem:
            self.notes.append(f"worker {worker} cannot write what it counted ({problem}): worker {first} judges alone")
            return self._begin_round(made.place, (first,))
        made.tallied.add(worker)
        if made.tallied < set(made.among):
            return []
        return [(first, MergeTallies(number=made.number, workers=made.among, directory=self._directory))]

    def _conclude(self, made: _Evaluation, metrics: dict[str, float | None]) -> Told:
        made.metrics = metrics
        here = [worker for worker, place in self._at.items() if place == made.place]
        return [told for worker in here for told in self._release(worker, metrics)]

    def _release(self, worker: int, metrics: dict[str, float | None]) -> Told:
        del self._at[worker]
        return [(worker, Conclude(metrics=metrics))]
