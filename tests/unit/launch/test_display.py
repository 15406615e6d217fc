"""Goal: what the user reads is true, short, and said once. Method: a status that is made up, and its words."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
from run_reports import progress, started

from regrow.config import TrainConfig
from regrow.launch import display
from regrow.launch.reports import CheckpointFailed, CheckpointSaved, Damaged
from regrow.launch.status import RunStatus


def test_progress_lines() -> None:
    run = RunStatus(TrainConfig(servers=2, workers=2, steps=100), started_at=0.0)
    assert display.progress_line(run, 0.0) == "starting"
    run = started()
    run.receive("worker", 0, progress(25, 1000, loss=0.4), 11.0)
    run.receive("worker", 0, progress(100, 3000, loss=0.4), 13.0)
    assert display.progress_line(run, 15.0) == (
        "training: step 50/100 (50 %), 1,000 samples/s, loss 0.4000, AUC 1.0000, 2/2 servers, 5.0 s left"
    )
    assert display.progress_line(run, 40.0) == (
        "training: step 50/100 (50 %), 0 samples/s, loss 0.4000, AUC 1.0000, 2/2 servers, 30.0 s left, "
        "nothing has moved for 27 s"
    )
    run.note_end("server", 1)
    assert "1/2 servers" in str(display.progress_line(run, 15.0))
    run.enter("evaluating", 20.0)
    assert display.progress_line(run, 22.0) == "evaluating: 2 s"


@pytest.mark.parametrize(
    "seconds, text", [(0.0, "0.0 s"), (59.94, "59.9 s"), (60, "1:00"), (3599, "59:59"), (7207, "2:00:07")]
)
def test_clock(seconds: float, text: str) -> None:
    assert display.clock_text(seconds) == text


def test_damage_is_told() -> None:
    """What kept a run from its newest checkpoint, and what a load went around."""
    run = started(protection="delta", ckpt="c")
    run.start_over(reason="server 1: no way", cut="a", cut_step=7, now=13.0, damage=["p/f: damaged (checksum)"])
    run.receive("server", 0, Damaged(what="m/f: missing"), 14.0)
    assert display.news_lines(run) == [
        "damaged: p/f: damaged (checksum)",
        "server 1: no way; all begin again from checkpoint a (step 7), 0 steps back",
        "damaged, and gone around: m/f: missing",
    ]
    assert run.totals()["restores"][0]["damage"] == ["p/f: damaged (checksum)"]
    assert run.totals()["damage_gone_around"] == ["m/f: missing"]
    run.checking = (1 << 20, 3 << 20)
    assert display.progress_line(run, 15.0) == "looking for a checkpoint without damage: 1.0 MiB of 3.0 MiB read"


def test_plain_lines_are_said_once() -> None:
    shown = io.StringIO()
    plain, run = display.PlainDisplay(progress=shown), started(protection="delta", ckpt="c")
    run.gone_around.append("m/f: missing")
    for now in (11.0, 11.1, 11.2):
        plain.update(run, now)
    assert shown.getvalue().splitlines() == [
        "damaged, and gone around: m/f: missing",
        "training: step 0/100 (0 %), 2/2 servers",
    ]


def test_a_full_storage_is_told_once_until_a_checkpoint_is_stored() -> None:
    """Every checkpoint fails, for another file; one line, and another when it happens again later."""
    shown = io.StringIO()
    plain, run = display.PlainDisplay(progress=shown), started(protection="delta", ckpt="c")
    fail = [
        CheckpointFailed(reason=f"cannot write {cut}: no space left there", failed=1, still=False) for cut in "abcd"
    ]
    stored = CheckpointSaved(cut="x", count=1, kind="delta", seconds=0.1, cut_seconds=0.1, still=False)
    for now, report in enumerate([fail[0], fail[1], fail[2], stored, fail[3]]):
        run.receive("coordinator", 0, report, 11.0 + now / 10)
        plain.update(run, 11.0 + now / 10)
    assert [line for line in shown.getvalue().splitlines() if "failed" in line] == [
        "1 checkpoint failed: cannot write a: no space left there",
        "4 checkpoints failed: cannot write d: no space left there",
    ]


def test_result_in_two_columns() -> None:
    summary: dict[str, Any] = {
        "seconds": 61.0,
        "steps": 100,
        "workers": 2,
        "samples": 12_800,
        "samples_per_s": 210.0,
        "auc": 0.75,
        "logloss": 0.5,
        "test_samples": 1000,
        "sabotage_unreached": [{"step": 500}],
        "peak_rss_bytes": {"total": 3 << 30, "server": 1 << 20, "worker": 2 << 20},
    }
    assert display.summary_text(summary, Path("runs/x")).splitlines() == [
        "trained      100 steps x 2 workers, 12,800 samples in 1:01",
        "speed        210 samples/s",
        "test         AUC 0.7500, log loss 0.5000 on 1,000 samples",
        "not reached  sabotage at step 500: the data ended before",
        "memory       3.0 GiB in all, at most 1.0 MiB a server, 2.0 MiB a worker",
        "results      runs/x/summary.json",
    ]


PEAK = {"peak_rss_bytes": {"total": 1, "server": 1, "worker": 1}}


def test_nothing_left_to_train_is_said_instead_of_a_speed() -> None:
    summary = {**PEAK, "steps": 1000, "seconds": 1e-5, "samples_per_s": None, "nothing_left": True}
    first, second = display.summary_text(summary, Path("runs/a")).splitlines()[:2]
    assert first == "trained  nothing left to train: the checkpoint is of the last step, 1,000"
    assert "samples/s" not in second


def test_a_standstill_that_a_fall_back_ended_counts() -> None:
    restore = {"cut": "a", "step": 9, "reason": "two died", "stall_s": 3.25}
    failure = {"stall_s": 0.0}
    assert display.survival_rows([failure], [restore]) == [
        ("survived", "1 failure, training stood still for 3.25 s at most"),
        ("restored", "from checkpoint a at step 9: two died; training stood still for 3.25 s"),
    ]
    assert display.survival_rows([], [{**restore, "cut": None, "stall_s": None}]) == [
        ("restored", "from the start at step 9: two died")
    ]


def test_what_a_run_begins_with_is_told() -> None:
    run = started()
    run.notes.append("no protection")
    assert display.news_lines(run) == ["no protection"]
