"""Goal: what `regrow bench cpr` makes of its runs is right: correlations, projections, jobs that are played, and what a
run in one process lost.

Method: figures with known answers; the published percentages; the smallest trainings, in one process. No test here
looks at speed, and whole runs with processes are those of tests/live.
"""

from __future__ import annotations

import importlib.util
import inspect
import itertools
import json
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from regrow.bench import (
    common,
    cpr,
    cpr_access,
    cpr_auc,
    cpr_cost,
    cpr_figures,
    cpr_live,
    cpr_overhead,
    cpr_pls,
    cpr_project,
    cpr_runs,
    cpr_side,
    cpr_stall,
    plots,
)
from regrow.bench.cpr_runs import Saves, Strike
from regrow.cli.bench import BENCHES
from regrow.errors import RegrowError, UserError
from regrow.launch.failures import Failure
from regrow.launch.reports import OwnSaved
from regrow.planner.overhead import Costs

HOUR = 3600.0
PUBLISHED = cpr_project.Measured(full=cpr_project.PUBLISHED, partial={"none": cpr_project.PUBLISHED})


def _report() -> common.Report:
    return common.Report(bench="cpr", facts={}, rows=[], ratios={})


# -- the door ------------------------------------------------------------------------------------------------


def test_bench_has_the_door_of_the_others() -> None:
    assert "cpr" in BENCHES
    parameters = inspect.signature(cpr.run).parameters
    assert set(parameters) == {"quick", "json_path", "part", "data", "docs"}
    assert all(parameter.kind is inspect.Parameter.KEYWORD_ONLY for parameter in parameters.values())


def test_every_part_can_be_measured() -> None:
    assert list(cpr.PARTS) == ["overhead", "auc", "pls", "figure6", "cost", "stall", "side"]
    for name in cpr.PARTS:
        parameters = inspect.signature(cpr.import_part(name).measure).parameters
        assert list(parameters) == ["report", "quick", "data"]
        assert name in (cpr.__doc__ or "")


def test_a_part_that_is_not_there() -> None:
    with pytest.raises(UserError, match="no part 'stal'") as error:
        cpr.run(quick=True, json_path=None, part="stal")
    assert "stall" in (error.value.hint or "")


def test_data_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="there is no file"):
        cpr_auc.measure(_report(), quick=True, data=str(tmp_path / "clicks.tsv"))


# -- arithmetic ----------------------------------------------------------------------------------------------


def test_correlation_and_slope() -> None:
    assert cpr_figures.correlate([1, 2, 3, 4], [2, 4, 6, 8]) == pytest.approx(1.0)
    assert cpr_figures.correlate([1, 2, 3], [3, 2, 1]) == pytest.approx(-1.0)
    assert cpr_figures.correlate([1, 2], [2, 4]) is None
    assert cpr_figures.correlate([1, 1, 1], [1, 2, 3]) is None
    assert cpr_figures.fit_slope([1, 2], [2, 4]) == pytest.approx(2.0)
    assert cpr_figures.fit_slope([0, 0], [1, 2]) is None


def test_spread_of_a_correlation() -> None:
    low, high = cpr_figures.spread_of_correlation(0.9, 43) or (0.0, 0.0)
    assert 0.81 < low < 0.83 and 0.94 < high < 0.95
    assert cpr_figures.spread_of_correlation(0.9, 4) is None
    assert cpr_figures.spread_of_correlation(1.0, 40) is None


def test_means_know_what_they_resolve() -> None:
    mean = cpr_figures.Mean.of([1.0, 2.0, 3.0])
    assert (mean.value, mean.count) == (2.0, 3)
    assert mean.error == pytest.approx(1 / 3**0.5)
    assert mean.resolves(1.2) and not mean.resolves(1.1)
    assert not cpr_figures.Mean.of([1.0]).resolves(100.0)


# -- projections ---------------------------------------------------------------------------------------------


def test_published_constants_give_the_published_percentages() -> None:
    rows = {row["name"]: row["overhead"]["share"] for row in cpr_project.project(PUBLISHED, constants="published")}
    assert rows["full"] == pytest.approx(0.0845, abs=1e-4)
    assert rows["naive"] == pytest.approx(rows["full"] / 2)
    assert rows["0.1"] == pytest.approx(0.0052, abs=1e-4)
    assert rows["0.02"] == pytest.approx(0.026, abs=1e-4)
    assert rows["0.2"] == pytest.approx(0.0028, abs=1e-4)
    assert rows["ssu"] == rows["mfu"] == rows["scar"] == rows["0.1"]


def test_a_priority_has_costs_of_its_own() -> None:
    half = Costs(save_seconds=0.05 * HOUR)
    measured = cpr_project.Measured(full=cpr_project.PUBLISHED, partial={"none": cpr_project.PUBLISHED, "ssu": half})
    rows = {row["name"]: row["overhead"]["save"] for row in cpr_project.project(measured, constants="ours")}
    assert rows["ssu"] == pytest.approx(rows["0.1"] / 2, rel=0.01)


def test_a_job_without_failures_is_played_by_hand() -> None:
    costs = Costs(save_seconds=360.0)
    never = np.random.default_rng(0)
    # 56 hours with a save every 10 h, begun at 10, 20, 30, 40 and 50 h of the clock: each takes 0.1 h.
    found = cpr_project.play_job(never, interval=10 * HOUR, fail=1e15, costs=costs, full=True)
    assert found == pytest.approx(56.5 * HOUR)


def test_full_recovery_as_by_the_exact_formula() -> None:
    """Between two saves there is no memory: a stretch of T takes (exp(T / F) - 1) F, and brings T - S of work."""
    t, s, f = 0.75, 0.1, 2.8
    played, error = cpr_project.play(
        t * HOUR, fail=f * HOUR, costs=Costs(save_seconds=s * HOUR), full=True, jobs=300, seed=1
    )
    assert played == pytest.approx(1 - (t - s) / (math.expm1(t / f) * f), abs=4 * error)


def test_full_recovery_trains_again_and_partial_does_not() -> None:
    costs = Costs(save_seconds=1.0, load_seconds=10.0, reschedule_seconds=5.0)
    setting = {"fail": 5 * HOUR, "costs": costs, "jobs": 40, "seed": 3}
    full, _ = cpr_project.play(2 * HOUR, full=True, **setting)  # type: ignore[arg-type]
    partial, _ = cpr_project.play(2 * HOUR, full=False, **setting)  # type: ignore[arg-type]
    assert partial == pytest.approx(15 / (5 * HOUR) + 1 / (2 * HOUR), rel=0.3)
    assert 0.1 < full < 0.25


def test_the_decision_is_what_is_cheaper_in_every_cell() -> None:
    rows = cpr_project.play_grid(PUBLISHED, constants="published", jobs=30)
    assert len(rows) == 9
    assert cpr_project.find_agreement(rows) == 1.0
    assert {row["decision"] for row in rows} == {"full", "partial"}
    assert cpr_project.find_agreement([{"decision": "full", "cheaper": "partial"}, rows[0]]) == 0.5


def test_more_nodes() -> None:
    rows = cpr_project.scale_up(PUBLISHED, constants="published")
    assert max(row["nodes"] for row in rows) == 1000
    for law in ("linear", "independent"):
        mine = [row for row in rows if row["law"] == law]
        assert all(before["full"] < after["full"] for before, after in itertools.pairwise(mine))
        assert all(row["partial"] < row["full"] for row in mine)


def _way(way: str, **more: Any) -> dict[str, Any]:
    known = {
        "kind": "way",
        "way": way,
        "save_s_max": 0.2,
        "load_s": 1.0,
        "detected_s": 0.1,
        "replaced_s": 0.3,
        "stall_s": 0.4,
    }
    return {**known, **more}


def test_costs_come_from_what_was_measured() -> None:
    rows = [_way("none"), _way("none", save_s_max=0.4), _way("none", save_s_max=0.6, replaced_s=None)]
    costs = cpr_overhead.make_costs(rows, times=2.0)
    found = (costs.save_seconds, costs.load_seconds, costs.reschedule_seconds)
    assert found == pytest.approx((0.8, 0.8, 0.2))
    assert cpr_overhead.make_costs([_way("none", save_s_max=None)]).save_seconds == cpr_overhead.SECONDS_MIN


def test_the_whole_table() -> None:
    report = _report()
    report.rows = [_way(way) for way, _, _ in cpr_overhead.WAYS]
    cpr_overhead.compare(report, cpr_overhead.Size(rows_max=1, seconds=1.0, every_seconds=1.0, jobs=5))
    assert report.ratios["overhead_0.1"].met
    assert report.ratios["grid_agreement_ours"].value == 1.0
    assert plots.has_picture(report.to_dict())


def test_the_longest_time_without_a_word() -> None:
    assert cpr_overhead.find_longest_gap([[(1.0, 0), (9.0, 5)], [(2.0, 0), (4.0, 7)]]) == 5.0
    assert cpr_overhead.find_longest_gap([]) == 0.0


# -- runs in one process -------------------------------------------------------------------------------------


def test_runs_are_repeated_while_there_is_time() -> None:
    now = [100.0]
    allowance = cpr_runs.Allowance(60.0, clock=lambda: now[0])
    assert allowance.allows(done=0)
    now[0] = 130.0
    assert allowance.allows(done=1), "two take 60 seconds"
    now[0] = 141.0
    assert not allowance.allows(done=2), "three would take 61.5"
    now[0] = 1000.0
    assert allowance.allows(done=0), "one is always made"


def test_without_a_part_all_are_measured_and_real_clicks_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    asked: list[tuple[str, str | None]] = []

    def fake(name: str) -> Any:
        def measure(report: common.Report, *, quick: bool, data: str | None = None) -> None:
            asked.append((name, data))

        return SimpleNamespace(measure=measure)

    monkeypatch.setattr(cpr, "import_part", fake)
    assert cpr.run(quick=True, json_path=str(tmp_path / "cpr.json"), data="clicks.tsv") == 0
    parts = [(name, None) for name in cpr.PARTS]
    assert asked == [*parts[:2], ("auc", "clicks.tsv"), *parts[2:]]
    written = json.loads((tmp_path / "cpr.json").read_text())
    assert [row["part"] for row in written["rows"] if row["kind"] == "part"] == [name for name, _ in asked]


def test_draws_have_every_number_of_failures_and_every_share_alike() -> None:
    size = cpr_pls.FULL
    draws = cpr_pls.draw_runs(size, seed=1)
    assert len(draws) >= 40
    for draw in draws:
        assert len(draw.strikes) == draw.failures == len({strike.step for strike in draw.strikes})
        assert all(2 <= strike.step <= size.steps for strike in draw.strikes)
        assert all(len(set(strike.servers)) == draw.portion * cpr_pls.SERVERS for strike in draw.strikes)
        assert 8 <= draw.every_steps <= size.steps
    assert draws == cpr_pls.draw_runs(size, seed=1)


def test_pls_by_hand() -> None:
    saves = Saves(every_steps=10)
    # Step 17 was pushed, 16 are done, 10 are saved: 6 of 60 steps, by half of the servers.
    assert cpr_runs.count_pls(Strike(step=17, servers=(0, 1)), saves, steps=60, servers=4) == pytest.approx(0.05)
    assert cpr_runs.count_pls(Strike(step=11, servers=(0,)), saves, steps=60, servers=4) == 0.0


def test_saves_of_a_share_are_as_much_more_often() -> None:
    assert Saves(every_steps=40, priority="ssu", share=0.125).order(3).every_steps == 5
    assert Saves(every_steps=40, priority="none", share=0.125).order(3).share == 1.0


@pytest.fixture(scope="module")
def small() -> Any:
    config = cpr_runs.make_config(model="tiny", rows_max=50, batch=16, steps=12, servers=4, test_rows=512)
    return config, cpr_runs.keep_dataset(config)


def test_right_behind_a_save_a_failure_changes_nothing(small: Any) -> None:
    base = cpr_runs.train(*small, saves=Saves(every_steps=4), digest=True)
    found = cpr_runs.train(*small, saves=Saves(every_steps=4), strikes=[Strike(step=9, servers=(1, 2))], digest=True)
    assert (found.auc, found.digest, found.pls, found.share_lost) == (base.auc, base.digest, 0.0, 0.0)


def test_what_was_lost_is_counted_both_ways(small: Any) -> None:
    strikes = [Strike(step=7, servers=(1,)), Strike(step=12, servers=(0, 1))]
    found = cpr_runs.train(*small, saves=Saves(every_steps=4), strikes=strikes)
    # 2 of 12 steps by one of four, then 3 by two of four.
    assert found.pls == pytest.approx(2 / 48 + 6 / 48)
    assert found.pls_counted == pytest.approx(found.pls)
    assert 0 < found.updates_lost < found.updates
    assert found.saves >= 3 * 4  # and each replacement one of its own, as soon as it is back


def test_correlations_of_runs() -> None:
    report = _report()
    for pls in (0.0, 0.1, 0.2, 0.3, 0.4):
        point = {"pls": pls, "pls_counted": pls, "share_lost": pls**2, "auc_lost": 0.1 * pls}
        report.rows.append({"kind": "pls", "none": point, "ssu": {**point, "auc_lost": 0.02 * pls}})
    cpr_pls.compare(report)
    fits = {row["priority"]: row["pls"] for row in report.rows if row["kind"] == "pls fit"}
    assert fits["none"]["slope"] == pytest.approx(0.1)
    assert fits["ssu"]["slope"] == pytest.approx(0.02)
    assert report.ratios["pls_correlation_none"].value == pytest.approx(1.0)
    assert report.ratios["share_correlation_less_pls_none"].value < 0.0


def test_places_of_failures() -> None:
    assert [place.loses for place in (cpr_auc.BEHIND_A_SAVE, *cpr_auc.PLACES)] == [False, True, True, True]
    strikes = cpr_auc.make_strikes(cpr_auc.PLACES[2], 100)
    assert [strike.step for strike in strikes] == [51, 151]
    pls = [cpr_runs.count_pls(strike, Saves(every_steps=100), steps=250, servers=4) for strike in strikes]
    assert sum(pls) == pytest.approx(0.1)


def test_auc_lost_with_its_error() -> None:
    report = _report()
    for priority, seed in itertools.product(cpr_auc.PRIORITIES, (1, 2)):
        known = {"kind": "auc", "data": "made up", "seed": seed, "priority": priority, "auc_without": 0.8}
        report.rows.append({**known, "pls": 0.1, "auc_lost": 0.001 * seed, "share_lost": 0.05})
    report.rows.append({**known, "pls": 0.0, "auc_lost": 0.0, "share_lost": 0.0})
    cpr_auc.compare(report, "made up", train_rows=100)
    told = [row for row in report.rows if row["kind"] == "auc lost"]
    assert [row["mean"] for row in told] == pytest.approx([0.0015] * 4)
    assert "AUC 0.8000" in cpr_auc.describe(report.rows[:8])


# -- access, cost, stall, side -------------------------------------------------------------------------------


def test_look_ups_and_pushes_are_counted_apart() -> None:
    counts = cpr_access.Counts([4, 3])
    counts.add(np.array([[0, 0, 1], [4, 4, 4]]))
    counts.add(np.array([[1, 1, 1], [5, 4, 4]]))
    assert counts.lookups.tolist() == [2, 4, 0, 0, 5, 1, 0]
    assert counts.pushes.tolist() == [1, 2, 0, 0, 2, 1, 0]
    assert cpr_access.select_rows([4, 3], [1]).tolist() == [4, 5, 6]
    changes = counts.pushes.astype(float)
    found = cpr_access.correlate_counts(counts, changes, np.arange(7))
    assert found["pushes_used"] == pytest.approx(1.0)
    assert found["lookups_used"] < 1.0
    assert found["rows_used"] == 4


def test_access_in_a_small_run() -> None:
    report = _report()
    for optimizer in ("sgd", "rowwise_adagrad"):
        known = {"kind": "access", "optimizer": optimizer, "steps": 3}
        for group in ("used", "large", "all_used"):
            known |= {f"pushes_{group}": 0.9, f"lookups_{group}": 0.91}
        report.rows.append(known)
    cpr_access.compare(report)
    assert report.ratios["access_sgd_pushes_less_lookups"].met
    assert not report.ratios["access_sgd_pushes"].met


def test_memory_of_table_one() -> None:
    assert cpr_cost.find_published_memory("mfu", 64) == pytest.approx(0.0625)
    assert cpr_cost.find_published_memory("ssu", 512) == pytest.approx(0.00097, rel=0.01)
    assert cpr_cost.find_published_memory("scar", 64) == 1.0


def test_costs_of_counting() -> None:
    size = cpr_cost.Size(rounds=1, rows_max=1, seconds=1.0, update_bytes=2_000_000, repetitions=2)
    report = _report()
    report.rows += cpr_cost.measure_updates(size)
    assert [row["priority"] for row in report.rows] == list(cpr_cost.KINDS)
    for variant in cpr_cost.VARIANTS:
        speed = {"samples_per_second": 100.0, "worker_seconds_per_sample": 0.01, "cpu_seconds_per_1000_samples": 20.0}
        bytes_ = {"priority_bytes": 10, "count_bytes": 4, "rows_bytes": 1000}
        report.rows.append({"kind": "counting", "variant": variant, "round": 0, **speed, **bytes_})
    cpr_cost.compare(report)
    assert report.ratios["counting_equal_speed_mfu"].value == 0.0
    assert report.ratios["memory_scar"].met


def test_how_late_reports_are() -> None:
    seen = [(0.0, 0), (1.0, 10), (2.0, 20), (3.5, 30), (4.5, 40), (5.7, 50), (6.7, 60)]
    around, elsewhere = cpr_stall.find_late(seen, [(3.0, 3.2), (6.5, 6.7)])
    assert around == pytest.approx(0.5)
    assert elsewhere == pytest.approx(0.2)
    assert cpr_stall.find_late([], []) == (0.0, 0.0)


def test_stalls_are_held_against_reading() -> None:
    row = {"bytes": 10**9, "load_s": 2.0, "stall_s": 1.2, "save_s": 3.0, "capture_steps": 0.02, "late_steps": 0.3}
    report = _report()
    cpr_stall.judge(report, {**row, "capture_seconds_max": 0.002, "capture_work_steps": 0.2, "step_seconds": 0.1}, 1.0)
    met = {name: ratio.met for name, ratio in report.ratios.items()}
    assert met == {
        "stall_seconds": True,
        "stall_seconds_aim": False,
        "hold_steps_capture": True,
        "hold_steps_capture_processor": False,
        "late_steps_saves": False,
    }


def test_a_worker_that_is_silent_until_all_is_back_has_stalled() -> None:
    """What the run says of itself counts the other worker only."""
    trace = cpr_live.Trace()
    steady = [(at / 10, at) for at in range(95, 140)]
    trace.reports = {0: steady, 1: [point for point in steady if not 10.0 < point[0] < 12.1]}
    failure = Failure(role="server", id=1, incarnation=0, step=5, reason="killed", at=10.0, detected_at=10.05)
    failure.stall_seconds = 0.3
    assert cpr_live.find_stall(trace, failure) == pytest.approx(12.1 - 10.05)
    failure.stall_seconds = 3.0
    assert cpr_live.find_stall(trace, failure) == 3.0
    assert cpr_live.find_stalls(cpr_live.Trace()) == []


def test_own_saves_are_kept() -> None:
    trace = cpr_live.Trace()
    trace.hear(OwnSaved(number=1, rows=5, seconds=0.2), 3.0)
    trace.hear(OwnSaved(number=2, error="full"), 4.0)
    assert trace.own_saves == [(3.0, 5, 0.2)]


@pytest.mark.parametrize(("protection", "keys"), [("none", 1), ("ec", 3), ("delta", 3), ("partial", 5)])
def test_what_a_protection_needs(protection: str, keys: int) -> None:
    changes = cpr_live.make_changes(protection, "5s", priority="ssu", folder="/f")
    assert len(changes) == keys
    assert cpr_live.make_config(rows_max=100).replace(**changes).protection == protection


def _side(way: str, auc: float, digest: str) -> dict[str, Any]:
    known = {"kind": "side", "way": way, "auc": auc, "digest": digest, "steps": 9, "seconds": 1.0, "stall_s": 0.1}
    known |= {"steps_again": 0, "share_lost": None, "redundancy_bytes": 0, "rows_bytes": 10, "stored_bytes": 5}
    return known


def test_side_by_side_the_exact_ones_are_exact() -> None:
    report = _report()
    report.rows = [_side("no failure", 0.8, "a"), _side("full", 0.8, "a"), _side("partial, SSU", 0.79, "b")]
    cpr_side.compare(report)
    assert report.rows[2]["auc_lost"] == pytest.approx(0.01)
    report.rows[1]["digest"] = "c"
    with pytest.raises(RegrowError, match="full: the model is not"):
        cpr_side.compare(report)


# -- the picture ---------------------------------------------------------------------------------------------


def test_nothing_to_draw(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="nothing to draw"):
        plots.draw({"bench": "cpr", "rows": [{"kind": "side"}]}, tmp_path / "cpr.png")


@pytest.mark.skipif(importlib.util.find_spec("matplotlib") is None, reason="matplotlib is not installed")
def test_the_picture_is_drawn(tmp_path: Path) -> None:
    point = {"pls": 0.1, "auc_lost": 0.001}
    bars = [*cpr_project.project(PUBLISHED, constants="ours"), *cpr_project.project(PUBLISHED, constants="published")]
    cells = cpr_project.play_grid(PUBLISHED, constants="published", jobs=2)
    points = [{"kind": "pls", "none": point, "ssu": point}]
    sizes = []
    for rows in (points, [*points, *bars], [*points, *bars, *cells]):
        plots.draw({"bench": "cpr", "rows": rows}, tmp_path / "cpr.png")
        sizes.append((tmp_path / "cpr.png").stat().st_size)
    assert 1000 < sizes[0] < sizes[1] < sizes[2], "each part has its panel"
