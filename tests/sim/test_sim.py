"""Goal: whatever fails, within what the protocol claims to survive, nothing is lost, doubled or wrong; beyond it, the
run says so.

Method: the real coordinator, servers, sessions and links under the simulator (`regrow.sim`), with its invariants
checked at every event. Fixed seeds of every profile, seeds that nobody has seen before (their replay command is
printed), and every tape that once failed.
"""

from __future__ import annotations

import functools
import os
import subprocess
import sys
import time
import tomllib
from collections import Counter
from pathlib import Path

import pytest

from regrow.sim.choices import Choices, tape_from_text, tape_text
from regrow.sim.probes import PROBES
from regrow.sim.profiles import PROFILES, make_scenario
from regrow.sim.runner import Result, parse_replay, run

FIXED_SEEDS = 20  # of each profile; enough to reach every probe
NEW_SECONDS = 1.5
PAST = tomllib.loads((Path(__file__).parent / "seeds.toml").read_text())["failure"]


@functools.cache
def fixed(profile: str) -> list[Result]:
    return [run(profile, seed=seed) for seed in range(FIXED_SEEDS)]


def describe(result: Result, seed: int) -> str:
    """All that is needed to see it again: a seed is worth nothing once the code that makes choices has changed."""
    again = f"regrow sim --profile {result.profile} --seed-first {seed} --seeds 1"
    text = f"{result.text}\nSee it again, with a shorter tape: {again}\nIts tape: {result.name}"
    if (replayed := run(result.profile, tape=result.tape).text) != result.text:
        text += f"\nThe same tape once more, in this process: {replayed or 'no violation'}. That violates I10."
    return text


@pytest.mark.parametrize("profile", PROFILES)
def test_fixed_seeds(profile: str) -> None:
    for seed, result in enumerate(fixed(profile)):
        assert not result.invariant, describe(result, seed)


@pytest.mark.parametrize("profile", PROFILES)
def test_new_seeds(profile: str) -> None:
    """Different ones at every run: over time they cover far more than the fixed ones."""
    first = time.time_ns() // 1_000_000
    print(f"new seeds of {profile} from {first}")
    started = time.monotonic()
    seed = first
    while time.monotonic() - started < NEW_SECONDS:
        result = run(profile, seed=seed)
        assert not result.invariant, describe(result, seed)
        seed += 1


@pytest.mark.parametrize("past", PAST, ids=[past["name"] for past in PAST])
def test_past_failures(past: dict[str, str]) -> None:
    profile, tape = parse_replay(past["replay"])
    result = run(profile, tape=tape)
    assert not result.invariant, f"{past['what']}: {result.text}"


def test_every_probe_is_reached() -> None:
    """A rare path that the fixed seeds no longer reach is not tested any more."""
    reached: Counter[str] = Counter()
    for profile in PROFILES:
        for result in fixed(profile):
            reached.update(result.probes)
    assert [name for name in PROBES if not reached[name]] == []


def test_faults_happen_in_every_profile() -> None:
    for profile in PROFILES:
        crashes: Counter[str] = Counter()
        for result in fixed(profile):
            crashes.update(result.crashes)
        # Where a table has no parities, the death of a server is the end, and it is workers who die.
        victim = "worker" if PROFILES[profile].bare else "server"
        assert crashes[victim] >= FIXED_SEEDS // 3, (profile, crashes)


# --- I10: a run is a function of its tape ---


def test_a_seed_and_its_tape_are_the_same_run() -> None:
    for profile in PROFILES:
        first = run(profile, seed=1)
        again = run(profile, tape=tape_from_text(tape_text(first.tape)))
        assert (again.digest, again.events) == (first.digest, first.events)


def test_a_run_does_not_depend_on_the_process() -> None:
    """Another process, with another order of sets and dicts of strings."""
    code = (
        "from regrow.sim.profiles import PROFILES\n"
        "from regrow.sim.runner import run\n"
        "print(*[run(profile, seed=seed).digest for profile in PROFILES for seed in range(2)])"
    )
    expected = [run(profile, seed=seed).digest for profile in PROFILES for seed in range(2)]
    environment = {**os.environ, "PYTHONHASHSEED": "4711"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.split() == expected


def test_tapes_are_written_and_read() -> None:
    for tape in ([], [0], [1], [0, 0, 0, 1], [0] * 9 + [61, 62, 63, 64, 200], [5, 0, 0, 0, 0, 7, 0]):
        assert tape_from_text(tape_text(tape)) == tape
    with pytest.raises(ValueError, match="not part of a tape"):
        tape_from_text("12-4")
    with pytest.raises(ValueError, match="begins with a profile"):
        parse_replay("nothing:123")


def test_a_tape_of_zeros_is_a_quiet_run() -> None:
    for profile in PROFILES:
        result = run(profile, tape=[])
        assert not result.invariant
        assert sum(result.crashes.values()) == 0


def test_every_world_is_a_valid_job() -> None:
    for profile in PROFILES.values():
        for seed in range(200):
            scenario = make_scenario(profile, Choices(seed=seed))
            assert scenario.job.invalid_reason() is None
            assert 3 <= scenario.job.servers <= 7
