"""Goal: the checks can fail. Each hole of the protocol's first draft, put back into the real core, is found.

Method: `SEEDS` names a seed that shows the bug, tried first; should the schedules have changed since, others are tried,
up to the number stated for it. The same seed without the bug is clean, so it is the bug that was found.
"""

from __future__ import annotations

import pytest

from regrow.sim import planted
from regrow.sim.runner import run

# name: (profile, seed that shows it, seeds within which it must be found otherwise)
SEEDS: dict[str, tuple[str, int, int]] = {
    "epoch-fencing": ("r2", 2, 40),
    "stream-without-marks": ("async", 2, 40),
    "one-applied": ("mixed-k", 14, 80),
    "piecewise-push": ("r2", 48, 200),
    "flush-before-snapshot": ("mixed-k", 22, 200),
    "deltas-before-answers": ("r2", 20, 300),
    "late-faults": ("r2", 21, 200),
    "piecewise-flush": ("async", 0, 10),
    "marks-only-with-rows": ("async", 2, 10),
    "durable-waits-for-streams": ("r2", 88, 300),
    "restart-from-applied": ("r2", 0, 60),
    "pulls-not-resent": ("r2", 0, 60),
    "silent-without-rows": ("sync", 0, 10),
    "no-undo": ("sync", 0, 40),
    "touched-bits-lost": ("r2", 0, 60),
    "frames-not-resent": ("r2", 22, 100),
    "one-epoch": ("coordinator", 7, 60),
    "no-gate": ("sync", 71, 300),
}


def test_every_bug_is_listed() -> None:
    assert set(SEEDS) == set(planted.BUGS)
    assert len(planted.BUGS) >= 17


@pytest.mark.parametrize("name", SEEDS)
def test_a_planted_bug_is_found(name: str) -> None:
    profile, good, seeds_max = SEEDS[name]
    profiles = planted.BUGS[name].profiles
    tries = [(profile, good), *((profiles[seed % len(profiles)], seed) for seed in range(seeds_max - 1))]
    for tried, seed in tries:
        with planted.plant(name):
            found = run(tried, seed=seed)
        if found.invariant:
            clean = run(tried, seed=seed)
            assert not clean.invariant, clean.text
            return
    pytest.fail(f"{planted.BUGS[name].what}: not found within {seeds_max} seeds")
