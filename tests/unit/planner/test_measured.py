"""Goal: an interval is computed from what happened, and only when that has changed. Method: figures that are made up;
for the estimate, failures of a known rate.
"""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from regrow.planner.measured import FIRST_GUESS_SECONDS, Basis, FailTime, Measured, choose_fail_time
from regrow.planner.overhead import Costs

HOUR = 3600.0
GUESS = Costs(save_seconds=10.0, load_seconds=2.0, reschedule_seconds=1.0)


def test_new_figures_are_mixed_in() -> None:
    measured = Measured().mix_in(save_seconds=10.0, load_seconds=None)
    assert measured == Measured(save_seconds=10.0)
    measured = measured.mix_in(save_seconds=20.0, load_seconds=4.0)
    assert measured == Measured(save_seconds=pytest.approx(13.0), load_seconds=4.0)
    for _ in range(30):
        measured = measured.mix_in(save_seconds=20.0)
    assert measured.save_seconds == pytest.approx(20.0, rel=0.001)


def test_what_was_not_measured_is_guessed() -> None:
    assert Measured().fill(GUESS) == GUESS
    assert Measured(load_seconds=0.0).fill(GUESS) == dataclasses.replace(GUESS, load_seconds=0.0)


def basis(fail_seconds: float = 28 * HOUR, **changes: float) -> Basis:
    return Basis(costs=dataclasses.replace(GUESS, **changes), fail_seconds=fail_seconds)


@pytest.mark.parametrize(
    ("now", "why"),
    [
        (basis(), None),
        (basis(save_seconds=12.0), None),  # a fifth is not more than a fifth
        (basis(save_seconds=8.0), None),
        (basis(save_seconds=12.1), "a save costs 12.1 s now, not 10 s"),
        (basis(save_seconds=7.9), "a save costs 7.9 s now, not 10 s"),
        (basis(load_seconds=2.5), "a load costs 2.5 s now, not 2 s"),
        (basis(reschedule_seconds=0.0), "rescheduling costs 0 s now, not 1 s"),
        (basis(save_takes_seconds=60.0), "a save takes 60 s now, not 0 s"),
        (basis(20 * HOUR), "a failure comes every 20 h now, not 28 h"),
    ],
)
def test_when_to_choose_again(now: Basis, why: str | None) -> None:
    assert basis().find_change(now) == why


def test_slow_change_is_noticed() -> None:
    """Each save is two hundredths slower than the one before. What counts is the choice, not the save before."""
    chosen, times = basis(), 0
    for n in range(100):
        now = basis(save_seconds=10.0 * 1.02**n)
        if chosen.find_change(now):
            chosen, times = now, times + 1
    assert times == 9  # ten of them are 22 %


def test_where_the_time_between_failures_comes_from() -> None:
    assert choose_fail_time(expected_seconds=5.0, mtbf_seconds=3.0) == FailTime(
        seconds=5.0, reason="as --expect-mtbf says"
    )
    assert choose_fail_time(mtbf_seconds=3.0, failures=7) == FailTime(seconds=3.0, reason="as --mtbf does")
    assert choose_fail_time() == FailTime(seconds=FIRST_GUESS_SECONDS, reason="a first guess")
    assert choose_fail_time(failures=2, elapsed_seconds=10 * HOUR) == FailTime(
        seconds=8 * HOUR, reason="from 2 in 10 h and a first guess of 14 h"
    )
    assert choose_fail_time(elapsed_seconds=14 * HOUR).seconds == 28 * HOUR  # no news is good news


@pytest.mark.parametrize("true_seconds", [0.5 * HOUR, 14 * HOUR, 300 * HOUR])
def test_the_estimate_comes_to_the_truth(true_seconds: float) -> None:
    rng = np.random.default_rng(7)
    elapsed = 400 * true_seconds
    found = [
        choose_fail_time(failures=int(failures), elapsed_seconds=elapsed).seconds
        for failures in rng.poisson(400, size=500)
    ]
    assert np.mean(found) == pytest.approx(true_seconds, rel=0.08)
