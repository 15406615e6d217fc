"""Goal: the formulas say what happens. Method: values computed by hand; the same jobs played through with random
failures, many times; and what must hold for any numbers, tried on many. The published figures are in test_partial.py.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator

import numpy as np
import pytest

from regrow.planner.overhead import (
    Costs,
    Overhead,
    count_pls,
    expect_lost,
    expect_pls,
    interval_full,
    interval_partial,
    overhead_full,
    overhead_partial,
)

# Hours are as good as seconds.
COSTS = Costs(save_seconds=0.1, load_seconds=0.2, reschedule_seconds=0.3)


def test_by_hand() -> None:
    full = overhead_full(2.0, costs=COSTS, fail_seconds=20.0)
    assert full == Overhead(save=0.05, load=0.01, lost_work=0.05, reschedule=0.015)
    partial = overhead_partial(2.0, costs=COSTS, fail_seconds=20.0)
    assert partial == Overhead(save=0.05, load=0.01, lost_work=0.0, reschedule=0.015)
    assert full.share == pytest.approx(0.125)
    assert full.all_seconds(70.0) == pytest.approx(80.0)  # 70 of work, an eighth of 80 is 10
    assert full.overhead_seconds(70.0) == pytest.approx(10.0)
    assert interval_full(costs=COSTS, fail_seconds=20.0) == pytest.approx(2.0)  # sqrt(2 x 0.1 x 20)
    assert interval_partial(0.1, parts=8, fail_seconds=28.0) == pytest.approx(44.8)
    assert count_pls(samples=700, samples_saved=500, samples_total=1000, parts=4) == pytest.approx(0.05)


def test_pls_by_hand() -> None:
    """Two whole teeth of 4 h and one of 2 h: the area is 8 + 8 + 2 = 18 hours squared."""
    assert expect_pls(4.0, all_seconds=10.0, fail_seconds=3.0, parts=2) == pytest.approx(18 / (10 * 3 * 2))
    # Whole teeth: as published.
    assert expect_pls(5.0, all_seconds=10.0, fail_seconds=3.0, parts=2) == pytest.approx(0.5 * 5 / (3 * 2))
    assert expect_pls(5.0, all_seconds=math.inf, fail_seconds=3.0, parts=2) == pytest.approx(0.5 * 5 / (3 * 2))
    # No save within the job: the interval does not matter, only how long the job is.
    for interval in (10.0, 44.8, 1e6):
        assert expect_pls(interval, all_seconds=10.0, fail_seconds=3.0, parts=2) == pytest.approx(0.5 * 10 / (3 * 2))


def test_the_example_of_a_job_without_a_second_save() -> None:
    """PLS 0.1 of 8 servers with a failure every 28 h allows 44.8 h; of 56 h one tooth of 44.8 and one of 11.2 come."""
    pls = expect_pls(44.8, all_seconds=56.0, fail_seconds=28.0, parts=8)
    assert pls == pytest.approx((44.8**2 + 11.2**2) / (2 * 56 * 28 * 8))
    assert pls == pytest.approx(0.085)


@pytest.mark.parametrize("share", [0.01, 0.125, 0.5, 0.9])
def test_the_closed_form_is_the_fixed_point(share: float) -> None:
    """Overheads of the work, of those overheads, of those ..."""
    overhead, total = Overhead(save=share / 2, load=0.0, lost_work=share / 2, reschedule=0.0), 0.0
    for _ in range(1000):
        total = overhead.share * (56.0 + total)
    assert overhead.overhead_seconds(56.0) == pytest.approx(total)
    assert overhead.all_seconds(56.0) == pytest.approx(56.0 + total)


@pytest.mark.parametrize("share", [1.0, 1.5])
def test_where_there_is_no_fixed_point_the_job_never_ends(share: float) -> None:
    overhead = Overhead(save=share, load=0.0, lost_work=0.0, reschedule=0.0)
    assert not overhead.ends
    assert math.isinf(overhead.all_seconds(56.0))
    assert math.isinf(overhead.overhead_seconds(56.0))


def test_no_interval_is_shorter_than_a_save() -> None:
    assert interval_full(costs=Costs(save_seconds=5.0), fail_seconds=1.0) == 5.0
    silent = Costs(save_seconds=0.0, save_takes_seconds=7.0)  # training goes on meanwhile
    assert interval_full(costs=silent, fail_seconds=100.0) == 7.0
    with pytest.raises(AssertionError, match="all the time"):
        Costs(save_seconds=0.0)


# -- played through ----------------------------------------------------------------------------------------

RUNS = 20_000


def play_ages(interval: float, *, hours: float, fail: float, rng: np.random.Generator) -> Iterator[np.ndarray]:
    """The times of the failures of each run, in order."""
    for count in rng.poisson(hours / fail, RUNS):
        yield np.sort(rng.uniform(0.0, hours, count))


TEETH = [(5.6, 56.0), (22.4, 56.0), (44.8, 56.0), (56.0, 56.0), (89.6, 56.0)]


@pytest.mark.parametrize(("interval", "hours"), TEETH)
def test_pls_of_random_failures(interval: float, hours: float) -> None:
    fail, parts = 14.0, 4
    rng = np.random.default_rng(13)
    runs = [
        sum(count_pls(samples=at, samples_saved=at - at % interval, samples_total=hours, parts=parts) for at in times)
        for times in play_ages(interval, hours=hours, fail=fail, rng=rng)
    ]
    expected = expect_pls(interval, all_seconds=hours, fail_seconds=fail, parts=parts)
    assert np.mean(runs) == pytest.approx(expected, abs=4 * np.std(runs) / math.sqrt(RUNS))
    published = 0.5 * interval / (fail * parts)
    if interval > hours / 2:
        assert expected < published or interval == hours


@pytest.mark.parametrize(("interval", "hours"), TEETH)
def test_updates_lost_of_random_failures(interval: float, hours: float) -> None:
    """What is lost twice is lost once: of each tooth, a server loses what came before its last death in it."""
    fail, parts = 14.0, 4
    rng = np.random.default_rng(14)
    runs = []
    for times in play_ages(interval, hours=hours, fail=fail, rng=rng):
        last = dict[tuple[int, int], float]()
        for at, server in zip(times, rng.integers(parts, size=len(times)), strict=True):
            last[int(server), int(at // interval)] = at % interval
        runs.append(sum(last.values()) / (hours * parts))
    expected = expect_lost(interval, all_seconds=hours, fail_seconds=fail, parts=parts)
    assert np.mean(runs) == pytest.approx(expected, abs=4 * np.std(runs) / math.sqrt(RUNS))


def play_job(rng: np.random.Generator, *, work: float, interval: float, fail: float, costs: Costs, full: bool) -> float:
    """How long a job takes: saves by the clock, failures at any time, also during saves and loads."""
    now = done = saved = 0.0
    save_at, fail_at = interval, rng.exponential(fail)
    while True:
        next_at = max(now, min(save_at, fail_at))
        if done + next_at - now >= work:
            return now + work - done
        now, done = next_at, done + next_at - now
        if fail_at <= now:
            now += costs.load_seconds + costs.reschedule_seconds
            done = saved if full else done
            fail_at += rng.exponential(fail)
        else:
            saved, now, save_at = done, now + costs.save_seconds, save_at + interval


def play_hours(*, work: float, interval: float, fail: float, costs: Costs, full: bool, runs: int = 1500) -> float:
    rng = np.random.default_rng(15)
    played = [play_job(rng, work=work, interval=interval, fail=fail, costs=costs, full=full) for _ in range(runs)]
    return float(np.mean(played))


LARGE = Costs(save_seconds=0.2, load_seconds=2.0, reschedule_seconds=1.0)


def test_overheads_of_partial_recovery_played_through() -> None:
    """A quarter of all time, so that it matters of what it is a share: without the correction it would be 6 % off."""
    hours = play_hours(work=400.0, interval=2.0, fail=20.0, costs=LARGE, full=False)
    overhead = overhead_partial(2.0, costs=LARGE, fail_seconds=20.0)
    assert hours == pytest.approx(overhead.all_seconds(400.0), rel=0.005)
    assert hours > 1.05 * 400.0 * (1.0 + overhead.share)


@pytest.mark.parametrize(
    ("interval", "fail", "costs", "excess_max"),
    [
        (2.0, 200.0, Costs(save_seconds=0.02, load_seconds=0.1), 0.001),
        (2.0, 60.0, Costs(save_seconds=0.2, load_seconds=1.0), 0.01),
        (2.0, 20.0, LARGE, 0.03),  # overheads are 30 % of all time
    ],
)
def test_overheads_of_full_recovery_are_no_less_than_played_through(
    interval: float, fail: float, costs: Costs, excess_max: float
) -> None:
    """(1) takes all time since the last save for lost work, though saves and loads were part of it, and though a second
    failure finds less to lose. It says too much, by little: never too little, but for chance."""
    hours = play_hours(work=1000.0, interval=interval, fail=fail, costs=costs, full=True)
    expected = overhead_full(interval, costs=costs, fail_seconds=fail).all_seconds(1000.0)
    assert -0.001 < expected / hours - 1.0 < excess_max


# -- whatever the numbers ----------------------------------------------------------------------------------

RATIOS = [0.001, 0.01, 0.1, 0.5, 0.9, 1.0, 1.1, 2.0, 10.0]


@pytest.mark.parametrize(("save", "fail"), list(itertools.product([0.001, 0.1, 1.0, 30.0], [10.0, 100.0, 10_000.0])))
def test_the_best_interval_is_the_best(save: float, fail: float) -> None:
    costs = Costs(save_seconds=save)
    best = math.sqrt(2 * save * fail)
    least = overhead_full(best, costs=costs, fail_seconds=fail).share
    assert least == pytest.approx(math.sqrt(2 * save / fail))
    assert interval_full(costs=costs, fail_seconds=fail) == max(best, save)
    for factor in RATIOS:
        assert overhead_full(best * factor, costs=costs, fail_seconds=fail).share >= least * (1 - 1e-12)


@pytest.mark.parametrize(("ratio", "fail", "parts"), list(itertools.product(RATIOS, [1.0, 14.0, 1000.0], [1, 2.5, 64])))
def test_losses_are_bounded(ratio: float, fail: float, parts: float) -> None:
    interval, hours = 56.0 * ratio, 56.0
    pls = expect_pls(interval, all_seconds=hours, fail_seconds=fail, parts=parts)
    lost = expect_lost(interval, all_seconds=hours, fail_seconds=fail, parts=parts)
    assert 0.0 < lost <= min(1.0, pls * (1 + 1e-9))
    assert pls <= 0.5 * min(interval, hours) / (fail * parts) * (1 + 1e-12), "never more than published"
    # The rarer failures are, the less it matters that one server could die twice.
    if min(interval, hours) < 0.01 * fail * parts:
        assert lost == pytest.approx(pls, rel=0.01)
    endless = expect_lost(interval, all_seconds=math.inf, fail_seconds=fail, parts=parts)
    assert endless == pytest.approx(expect_lost(interval, all_seconds=1e9 * interval, fail_seconds=fail, parts=parts))
