"""Goal: the numbers shown and kept are those the processes told. Method: reports at made-up times."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from run_reports import progress, started

from regrow.config import TrainConfig
from regrow.launch import role_status, status
from regrow.launch.reports import (
    CheckpointBegun,
    CheckpointFailed,
    CheckpointSaved,
    Evaluated,
    Evaluating,
    MergerNews,
    Planned,
    Ready,
    Trained,
)
from regrow.launch.status import RunStatus
from regrow.launch.tier_counts import add_counts


def test_progress_adds_up() -> None:
    run = started()
    run.receive("worker", 0, progress(10, 1000, loss=0.4), 11.0)
    run.receive("worker", 1, progress(20, 2000, loss=0.6), 12.0)
    run.receive("worker", 0, progress(30, 3000, loss=0.2), 13.0)
    assert (run.step, run.steps_done, run.steps_total, run.samples) == (30, 50, 200, 5000)
    assert run.loss == pytest.approx(0.4)
    assert run.samples_per_s(13.0) is None  # worker 1 has reported but once
    run.receive("worker", 1, progress(24, 2400, loss=0.6), 14.0)
    assert run.samples_per_s(14.0) == pytest.approx(2000 / 2.0 + 400 / 2.0)
    assert run.auc == 1.0  # every positive above every negative
    line = run.metrics(13.0)
    assert (line["t"], line["step"], line["samples"], line["servers_alive"]) == (13.0, 30, 5400, 2)


def test_rate_follows_the_last_seconds() -> None:
    run = started()
    for second in range(20):
        run.receive("worker", 0, progress(second, second * (100 if second < 10 else 1000)), 10.0 + second)
    assert run.samples_per_s(29.0) == pytest.approx(1000.0)
    assert run.samples_per_s(29.0 + 2 * role_status.RATE_WINDOW_SECONDS) == 0.0


def test_auc_forgets_old_samples() -> None:
    run = started()
    plain = progress(1, 10)
    swapped = msgspec.structs.replace(plain, hist_pos=plain.hist_neg, hist_neg=plain.hist_pos)
    run.receive("worker", 0, swapped, 11.0)
    assert run.auc == 0.0
    half = status.AUC_WINDOW_SAMPLES // 2
    for step in range(2, 4):
        run.receive("worker", 0, progress(step, step, positives=half, negatives=half), 10.0 + step)
    assert run.auc == 1.0


def test_windows_are_bounded() -> None:
    run = started()
    for step in range(2 * status.AUC_WINDOW_REPORTS_MAX):
        run.receive("worker", 0, progress(step, step), 10.0 + step / 1000)
    assert len(run._histograms) == status.AUC_WINDOW_REPORTS_MAX


def test_report_without_samples_keeps_the_loss() -> None:
    run = started()
    run.receive("worker", 0, progress(1, 10, loss=0.7), 11.0)
    run.receive("worker", 0, progress(1, 10, loss=None, positives=0, negatives=0), 12.0)
    assert run.loss == 0.7


def test_diverged_loss_is_missing_not_invalid() -> None:
    run = started()
    run.receive("worker", 0, progress(1, 10, loss=float("nan")), 11.0)
    assert run.metrics(11.0)["loss"] is None


def test_training_time_spans_all_workers() -> None:
    run = started()
    run.receive("worker", 0, Trained(steps=100, samples=1000, seconds=4.0), 16.0)
    assert run.training_seconds == pytest.approx(4.0)
    run.receive("worker", 1, Trained(steps=90, samples=900, seconds=5.0), 19.0)
    # From 12 s, when worker 0 began, to 19 s.
    assert run.training_seconds == pytest.approx(7.0)
    totals = run.totals()
    assert (totals["steps"], totals["samples"], totals["seconds"]) == (100, 1900, 7.0)
    assert totals["samples_per_s"] == pytest.approx(271.4)


def test_totals_before_anything_happened() -> None:
    totals = RunStatus(TrainConfig(), started_at=0.0).totals()
    assert (totals["samples"], totals["samples_per_s"], totals["auc"], totals["model_sha256"]) == (
        0,
        None,
        None,
        None,
    )


@pytest.mark.parametrize(
    "options, total",
    [
        ({"steps": 7}, 14),
        ({"steps": None, "epochs": 3, "train_rows": 1000, "batch": 64}, 48),
        ({"steps": None, "epochs": 1, "data": "criteo:x"}, None),
    ],
)
def test_total_steps(options: dict[str, Any], total: int | None) -> None:
    run = started(**options)
    assert run.steps_total == total
    run.receive("worker", 0, Planned(steps=4), 11.0)
    run.receive("worker", 1, Planned(steps=3), 11.0)
    assert run.steps_total == (total if options["steps"] else 7)


def test_histograms_of_another_length() -> None:
    with pytest.raises(ValueError, match="64 bins"):
        started().receive("worker", 0, msgspec.structs.replace(progress(1, 1), hist_pos=[1, 2]), 11.0)


def test_look_ups_of_an_evaluation_count_as_those_of_training() -> None:
    run = started()
    run.receive("worker", 0, progress(10, 1000, lookups=2000), 11.0)
    run.servers[0].tiers = add_counts({"hits": 70, "misses": 30}, {})
    assert run.tiers is not None and run.tiers["hit_rate_lookups"] == 0.985
    run.receive("worker", 0, Evaluating(samples=500), 12.0)
    assert run.tiers["hit_rate_lookups"] == 0.99
    run.receive("worker", 0, Evaluated(auc=0.5, logloss=0.7, test_samples=2000), 13.0)
    assert run.tiers["hit_rate_lookups"] == 0.995


def test_restarted_worker_repeats_steps_but_not_counts() -> None:
    run = started()
    run.receive("worker", 0, progress(10, 1000, lookups=50, redo_bytes_peak=9), 11.0)
    run.failures.note_death("worker", 0, incarnation=0, step=10, reason="was killed", at=12.0, now=12.0)
    run.note_successor("worker", 0, 1)
    run.receive("worker", 0, Planned(steps=100), 13.0)
    run.receive("worker", 0, progress(8, 800, lookups=5, redo_bytes_peak=4), 13.5)
    worker = run.workers[0]
    assert (worker.step, worker.samples, worker.lookups, worker.redo_bytes_peak) == (10, 1000, 55, 9)
    (failure,) = run.failures.all
    assert (failure.since(failure.resumed_at), failure.since(failure.recovered_at)) == (1.5, 1.5)
    run.receive("worker", 0, Trained(steps=100, samples=10000, seconds=2.0), 20.0)
    # Since its first report at 11 s: what its successor measured is not the whole.
    assert run.training_seconds == pytest.approx(9.0)


def test_rate_of_the_moment() -> None:
    run = started()
    for tenth in range(11):
        run.receive("worker", 0, progress(tenth, 100 * tenth), 11.0 + tenth / 10)
    assert run.samples_per_s_now(12.0) == pytest.approx(1000.0)
    assert run.samples_per_s_now(12.3) == pytest.approx(400.0)  # nothing for 0.3 of 0.5 s
    assert run.samples_per_s_now(13.0) == 0.0


def test_reports_of_others_are_left_alone() -> None:
    """A worker that says what only servers say, and news that nobody counts."""
    run = started()
    before = run.totals()
    run.receive("worker", 0, Ready(rows=1, bytes=1), 11.0)
    run.receive("server", 0, Planned(steps=7), 11.0)
    run.receive("merger", 0, MergerNews(kind="choice", text="a fold"), 11.0)
    assert run.totals() == before


def saved(cut: str, *, still: bool = False) -> CheckpointSaved:
    return CheckpointSaved(cut=cut, count=1, still=still, kind="full", seconds=1.5, cut_seconds=0.5)


def failed(reason: str, *, still: bool = False) -> CheckpointFailed:
    return CheckpointFailed(reason=reason, failed=1, still=still)


def test_checkpoints_are_counted() -> None:
    run = started(protection="delta", ckpt="c")
    for report in (CheckpointBegun(cut="a", kind="full"), saved("a"), failed("no room", still=True)):
        run.receive("coordinator", 0, report, 11.0)
    last = {"cut": "a", "kind": "full", "seconds": 1.5, "cut_seconds": 0.5}
    assert run.checkpoints == {"saved": 1, "failed": 1, "last": last, "last_error": "no room"}
    assert (run.still, run.saving) == (False, None)
    # Nothing is new since the last one: that is as good as another.
    run.receive("coordinator", 0, CheckpointSaved(cut="a", count=1, still=True), 12.0)
    assert (run.still, run.checkpoints["saved"], run.checkpoints["last"]) == (True, 1, last)


def test_cuts_that_nobody_stores_any_more() -> None:
    """One that was being stored when all began again; not those that ended, well or not."""
    run = started(protection="delta", ckpt="c")
    for cut, end in (("a", saved("a")), ("b", failed("no room")), ("c", None)):
        run.receive("coordinator", 0, CheckpointBegun(cut=cut, kind="delta"), 11.0)
        if end is not None:
            run.receive("coordinator", 0, end, 12.0)
    run.start_over(reason="a test", cut=None, cut_step=0, now=13.0)
    assert run.cuts_dead == ["c"]
    run.start_over(reason="a test", cut=None, cut_step=0, now=14.0)
    assert run.cuts_dead == ["c"]


def test_speed_after_a_resume_counts_what_was_trained() -> None:
    """What a checkpoint brought along was trained by somebody else, at another time."""
    run = started(resume="c")
    for worker in range(2):
        run.receive("worker", worker, progress(91, 9100, steps_before=90, samples_before=9000), 11.0)
    run.receive("worker", 0, progress(96, 9600, steps_before=90, samples_before=9000), 13.0)
    # A successor, too, has steps behind it; but they are of this run.
    run.note_successor("worker", 1, 1)
    run.receive("worker", 1, progress(94, 9400, steps_before=93, samples_before=9300), 13.0)
    assert (run.steps_done, run.steps_trained, run.samples_trained) == (190, 10, 1000)
    assert run.estimate_seconds_left(20.0) == pytest.approx(10.0)
    for worker in range(2):
        run.receive("worker", worker, Trained(steps=100, samples=10000, seconds=4.0), 21.0)
    totals = run.totals()
    assert (totals["steps"], totals["samples"], totals["samples_trained"]) == (100, 20000, 2000)
    assert (totals["samples_per_s"], totals["nothing_left"]) == (200.0, False)


def test_a_finished_run_that_is_resumed_has_no_speed() -> None:
    run = started(resume="c")
    for worker in range(2):
        run.receive("worker", worker, progress(100, 10000, steps_before=100, samples_before=10000), 11.0)
        run.receive("worker", worker, Trained(steps=100, samples=10000, seconds=1e-5), 11.0)
    totals = run.totals()
    assert (totals["steps"], totals["nothing_left"], totals["samples_per_s"]) == (100, True, None)


def test_steps_of_a_run_that_was_not_resumed_are_all_its_own() -> None:
    """A worker that died before its first report leaves steps to its successor."""
    run = started()
    run.receive("worker", 0, progress(5, 500, steps_before=4, samples_before=400), 11.0)
    assert (run.steps_trained, run.samples_trained) == (5, 500)


def test_after_a_fall_back_training_stood_still_until_the_next_step() -> None:
    """Two falls, the second before a step was made: one standstill."""
    run = started(protection="delta", ckpt="c")
    run.receive("worker", 0, progress(10, 1000), 12.0)
    run.start_over(reason="server 1 died", cut="a", cut_step=7, now=13.0)
    assert run.totals()["restores"][0]["stall_s"] is None
    run.start_over(reason="server 1 died", cut="a", cut_step=7, now=15.0)
    run.receive("worker", 1, progress(8, 800), 18.5)
    run.receive("worker", 0, progress(9, 900), 20.0)
    assert [restore["stall_s"] for restore in run.totals()["restores"]] == [6.5, 6.5]
    run.start_over(reason="server 0 died", cut="a", cut_step=7, now=21.0)
    run.receive("worker", 0, progress(8, 800), 21.5)
    assert [restore["stall_s"] for restore in run.totals()["restores"]] == [6.5, 6.5, 1.5]
