"""The same loss with checkpoints: best, average and worst case by arithmetic over what was measured."""

from __future__ import annotations

from typing import Any

import pytest

from regrow.bench import common, recovery_today
from regrow.errors import RegrowError

SUMMARY: dict[str, Any] = {
    "restores": [{"stall_s": 4.0, "steps_lost": 30}],
    "checkpoints": {"last": {"seconds": 2.0}},
}


def test_when_the_death_comes_decides() -> None:
    row = recovery_today.make_row("full", SUMMARY, interval_seconds=20)
    assert recovery_today.find_delays(row, 20) == {"best": 4.0, "average": 16.0, "worst": 26.0}


def test_ratios_say_what_is_projected(capsys: pytest.CaptureFixture[str]) -> None:
    report = common.Report.start("recovery")
    ours = {"kind": "run", "limit": 0, "lost_s": 3.0, "stall_after_detection_s": 0.2}
    report.rows += [{**ours, "k": 4}, {**ours, "k": 2, "lost_s": -0.5}]
    report.rows.append(recovery_today.make_row("delta", SUMMARY, interval_seconds=20))
    recovery_today.compare(report)
    recovery_today.print_rows(report)
    assert report.ratios["today_delta_average_30min_projected_to_k4"].value == pytest.approx(906 / 3)
    assert report.ratios["today_delta_average_30min_projected_to_k2"].value == pytest.approx(906 / 0.2)
    assert "projected" in capsys.readouterr().out


def test_a_run_without_a_restore_is_no_figure() -> None:
    with pytest.raises(RegrowError, match="too short"):
        recovery_today.make_row("full", {**SUMMARY, "restores": []}, interval_seconds=20)
