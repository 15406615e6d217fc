"""Goal: whatever writers, mergers, retention and storage do to each other, a checkpoint that is there can be loaded,
the newest stays the newest, and nothing is left over.

Method: the real code on a simulated object storage, under many schedules (`regrow sim --profile storage`), its
invariants checked at every change; fixed seeds, seeds that nobody has seen before, tapes that once failed, and planted
bugs, each of which must be seen by the invariant that is there for it.
"""

from __future__ import annotations

import functools
import time
from collections import Counter

import pytest

from regrow.checkpoint.retention import UNFINISHED_SECONDS
from regrow.core.cuts import ATTEMPT_SECONDS_MAX
from regrow.sim import objects, planted, shelf, shelf_planted
from regrow.sim.choices import Choices
from regrow.sim.profiles import STORAGE
from regrow.sim.runner import Result, parse_replay, run
from regrow.sim.stage import Killed, Stage

FIXED_SEEDS = 100  # enough to reach every probe
NEW_SECONDS = 3.0

# name: (seed that shows it, seeds within which it must be found otherwise)
SEEDS: dict[str, tuple[int, int]] = {
    "manifest-before-chunks": (7, 60),
    "inputs-deleted-first": (1, 60),
    "part-of-a-cut": (0, 20),
    "newest-by-clock": (11, 60),
    "term-forgotten": (0, 60),
    "start-forgotten": (68, 200),
    "no-grace": (19, 150),
    "chunks-deleted-first": (0, 20),
    "only-the-youngest": (4, 100),
    "discards-what-may-exist": (1, 60),
    "listing-believed": (16, 100),
    "unfinished-for-ever": (0, 60),
}


@functools.cache
def fixed() -> list[Result]:
    return [run(STORAGE, seed=seed) for seed in range(FIXED_SEEDS)]


def describe(result: Result, seed: int) -> str:
    return f"{result.text}\nSee it again: regrow sim --profile storage --seed-first {seed} --seeds 1"


def test_fixed_seeds() -> None:
    for seed, result in enumerate(fixed()):
        assert not result.invariant, describe(result, seed)


def test_new_seeds() -> None:
    seed = time.time_ns() // 1_000_000
    print(f"new seeds from {seed}")
    started = time.monotonic()
    while time.monotonic() - started < NEW_SECONDS:
        result = run(STORAGE, seed=seed)
        assert not result.invariant, describe(result, seed)
        seed += 1


def test_every_probe_is_reached() -> None:
    reached: Counter[str] = Counter()
    for result in fixed():
        reached.update(result.probes)
    assert [name for name in shelf.PROBES if not reached[name]] == []


def test_a_seed_and_its_tape_are_the_same_run() -> None:
    for first in fixed()[:5]:
        profile, tape = parse_replay(first.name)
        again = run(profile, tape=tape)
        assert (again.digest, again.events) == (first.digest, first.events)


def test_a_tape_of_zeros_is_a_quiet_run() -> None:
    result = run(STORAGE, tape=[])
    assert not result.invariant
    assert not result.crashes
    assert result.probes["checkpoint"] > 2


def test_every_bug_is_listed() -> None:
    assert set(SEEDS) == set(shelf_planted.BUGS)


@pytest.mark.parametrize("name", SEEDS)
def test_a_planted_bug_is_found(name: str) -> None:
    good, seeds_max = SEEDS[name]
    for seed in (good, *range(seeds_max - 1)):
        with planted.plant(name):
            found = run(STORAGE, seed=seed)
        if found.invariant:
            assert found.invariant in shelf_planted.BUGS[name].caught_by, f"found for another reason: {found.text}"
            clean = run(STORAGE, seed=seed)
            assert not clean.invariant, clean.text
            return
    pytest.fail(f"{shelf_planted.BUGS[name].what}: not found within {seeds_max} seeds")


def test_what_is_assumed_of_times_holds_for_the_real_ones() -> None:
    """A cut is given up before what it stored can count as left over; the same here, with hangs and late answers."""
    assert 2 * ATTEMPT_SECONDS_MAX <= UNFINISHED_SECONDS
    longest = shelf.ATTEMPT_SECONDS + shelf.HANG_SECONDS_MAX + objects.LATE_SECONDS_MAX
    assert longest < shelf.UNFINISHED_SECONDS
    assert objects.LATE_SECONDS_MAX + objects.BEHIND_SECONDS_MAX < shelf.GRACE_SECONDS < shelf.HANG_SECONDS_MAX


# -- the stage ---------------------------------------------------------------------------------------------


def test_one_actor_at_a_time_moves_and_who_is_killed_does_nothing_more() -> None:
    stage = Stage(Choices(), eager=1.0)
    said: list[str] = []

    def count(name: str) -> None:
        try:
            for number in range(4):
                said.append(f"{name}{number}")
                stage.rest(1.0)
        except Killed:
            said.append(f"{name} dies")
            raise

    first = stage.spawn("a", lambda: count("a"))
    stage.spawn("b", lambda: count("b"), after=0.5)
    stage.play(until=lambda: len(said) == 4)
    stage.kill(first)
    assert not first.alive
    stage.play(until=lambda: not stage.actors)
    assert said == ["a0", "b0", "a1", "b1", "a dies", "b2", "b3"]
    stage.close()


def test_an_actor_that_raises_is_a_violation() -> None:
    stage = Stage(Choices(), eager=1.0)
    stage.spawn("a", lambda: [][0])
    with pytest.raises(shelf.Violation, match="a raised"):
        stage.play(until=lambda: False)
    stage.close()
