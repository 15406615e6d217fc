"""Goal: workers that keep dense parameters agree on every step's outcome, whoever dies when: each step is made once, by
all, or taken from one who has made it; and what nobody has any more is known to be lost.

Method: workers as state machines around the rules, and nothing else: no torch, no socket. A state is the text of all
that it was made of, so a step that is made twice, or left out, or of another state, is seen. Schedules are drawn at
random; a worker may die between any two moves, its successor begins from where the servers' rule says, at most two
outcomes behind.
"""

from __future__ import annotations

import random

import pytest

from regrow.nn.circle import STATES_KEPT, Adopt, Await, Join, Keep, Lost, Shown, choose_beginning, choose_for_step

STEPS = 8


class Worker:
    """`begins_at`: behind which step; it needs that state."""

    def __init__(self, id: int, *, begins_at: int, is_first: bool) -> None:
        self.id, self.step, self.is_first = id, begins_at, is_first
        self.states: dict[int, str] = {0: ""} if is_first and id == 0 else {}
        self.has_begun = bool(self.states)
        self.circle = 0  # entered
        self.joined = 0  # the circle in which it has brought its gradient of the step under way
        self.pulled = begins_at + 1

    def show(self) -> Shown:
        return Shown(steps=tuple(self.states), circle=self.circle)

    def keep(self, states: dict[int, str], step: int) -> None:
        known = self.states | {n: s for n, s in states.items() if n <= step}
        self.states = {n: known[n] for n in sorted(known)[-STATES_KEPT:]}


class World:
    """`committed`: what servers would tell a successor: the step before the last that it pulled, or what all pulled."""

    def __init__(self, seed: int, *, workers: int, deaths: int) -> None:
        self.random = random.Random(seed)
        self.workers = [Worker(id, begins_at=0, is_first=True) for id in range(workers)]
        self.circle, self.deaths = 1, deaths
        self.lost: str | None = None
        self.moves = 0

    def run(self) -> None:
        while self.lost is None and any(worker.step < STEPS for worker in self.workers):
            self.moves += 1
            assert self.moves < 20_000, "nobody gets on"
            worker = self.random.choice(self.workers)
            survived = any(each.has_begun for each in self.workers if each is not worker)
            if self.deaths and survived and self.random.random() < 0.05:
                self.kill(worker)
            elif worker.step < STEPS:
                self.move(worker)

    def kill(self, worker: Worker) -> None:
        self.deaths -= 1
        applied = min(each.pulled for each in self.workers) - 1
        committed = max(applied, worker.pulled - 1)
        heir = Worker(worker.id, begins_at=max(1, committed) - 1, is_first=False)
        heir.pulled = max(worker.pulled, heir.step + 1)
        self.workers[worker.id] = heir
        self.circle += 1

    def others(self, worker: Worker) -> dict[int, Shown | None]:
        """Some do not answer in time."""
        return {
            each.id: None if self.random.random() < 0.1 else each.show() for each in self.workers if each is not worker
        }

    def move(self, worker: Worker) -> None:
        if not worker.has_begun:
            self.begin(worker)
            return
        step = worker.step + 1
        if min(each.pulled for each in self.workers) < step:
            return  # its rows come when all have pulled them: they make the step before
        if worker.joined == self.circle:
            return  # it waits for the others in gloo
        worker.circle = self.circle
        choice, _ = choose_for_step(step, circle=self.circle, others=self.others(worker))
        match choice:
            case Adopt(worker=other):
                worker.keep(self.workers[other].states, step)
                self.finish(worker)
            case Join():
                worker.joined = self.circle
                self.gather(step)

    def gather(self, step: int) -> None:
        """When all have brought theirs, those who hear of it make the step. Others see it fail, and complain."""
        if any(each.joined != self.circle or each.step + 1 != step for each in self.workers):
            return
        breaks = self.random.random() < 0.1
        for worker in self.workers:
            worker.joined = 0
            if not breaks or self.random.random() < 0.5:
                worker.states[step] = worker.states[step - 1] + f"{step} "
                self.finish(worker)
        self.circle += breaks

    def finish(self, worker: Worker) -> None:
        worker.keep({}, worker.step + 1)
        worker.step += 1
        worker.pulled = max(worker.pulled, worker.step + 1)

    def begin(self, worker: Worker) -> None:
        choice, why = choose_beginning(
            worker.step,
            worker=worker.id,
            is_first=worker.is_first,
            has_own=worker.step == 0,
            others=self.others(worker),
        )
        match choice:
            case Adopt(worker=other):
                worker.keep(self.workers[other].states, worker.step)
            case Keep():
                worker.states = {0: ""}
            case Lost():
                self.lost = why
            case Await():
                return
        worker.has_begun = True


@pytest.mark.parametrize("workers", [2, 3])
def test_every_step_is_made_once_whoever_dies(workers: int) -> None:
    """As long as not all are dead at a time, which a world with this few deaths may also have: then it is lost, and
    not otherwise."""
    losses = 0
    for seed in range(400):
        world = World(seed, workers=workers, deaths=6)
        world.run()
        assert world.lost is None, f"{seed}: {world.lost}"
        whole = "".join(f"{step} " for step in range(1, STEPS + 1))
        assert [worker.states[STEPS] for worker in world.workers] == [whole] * workers, seed
        losses += world.deaths < 6
    assert losses > 50, "nobody has died"


def test_all_dead_is_lost_and_said() -> None:
    nobody = {0: Shown(circle=3), 2: Shown(steps=(4,))}
    assert choose_beginning(6, worker=1, is_first=False, has_own=False, others=nobody) == (
        Lost(),
        "no worker has the state behind step 6",
    )
    assert choose_beginning(0, worker=1, is_first=False, has_own=True, others=nobody)[0] == Keep()


def test_who_does_not_answer_may_have_it() -> None:
    others = {0: None, 2: Shown(steps=(4,))}
    assert choose_beginning(6, worker=1, is_first=False, has_own=False, others=others)[0] == Await()
    assert choose_beginning(4, worker=1, is_first=False, has_own=False, others=others)[0] == Adopt(2)


def test_all_begin_with_what_the_first_has_made() -> None:
    others = {0: Shown(steps=(0,)), 2: Shown(steps=(0,))}
    assert choose_beginning(0, worker=1, is_first=True, has_own=True, others=others)[0] == Adopt(0)
    others = {1: Shown(steps=(0,)), 2: None}
    assert choose_beginning(0, worker=0, is_first=True, has_own=True, others=others)[0] == Keep()


def test_a_step_is_made_by_all_or_taken() -> None:
    there, behind = Shown(steps=(3, 4), circle=2), Shown(steps=(3, 4), circle=1)
    assert choose_for_step(5, circle=2, others={0: there, 2: there})[0] == Join()
    assert choose_for_step(5, circle=2, others={0: there, 2: behind}) == (
        Await(),
        "workers [2] have not come to circle 2",
    )
    assert choose_for_step(5, circle=2, others={0: there, 2: None})[0] == Await()
    assert choose_for_step(4, circle=2, others={0: None, 2: behind})[0] == Adopt(2)
