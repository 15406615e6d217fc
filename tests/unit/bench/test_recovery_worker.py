"""The death of a worker: what is told of it, and that a run without a successor's step is no figure."""

from __future__ import annotations

from typing import Any

import pytest

from regrow.bench import common, recovery_worker
from regrow.errors import RegrowError

FAILURE: dict[str, Any] = {
    "role": "worker",
    "detected_s": 0.02,
    "replaced_s": 0.05,
    "resumed_s": 0.4,
    "stall_s": 0.45,
}


def test_the_stall_is_held_against_its_target(capsys: pytest.CaptureFixture[str]) -> None:
    report = common.Report.start("recovery")
    slow = {**FAILURE, "stall_s": 0.75}
    report.rows.append(recovery_worker.make_row("async", {"failures": [FAILURE]}, before_s=30.0))
    report.rows.append(recovery_worker.make_row("sync", {"failures": [slow]}, before_s=31.0))
    recovery_worker.compare(report)
    recovery_worker.print_rows(report)
    kept, missed = (report.ratios[f"worker_stall_seconds_{mode}"] for mode in recovery_worker.MODES)
    assert (kept.value, kept.met) == (pytest.approx(0.45), True)
    assert (missed.value, missed.met) == (pytest.approx(0.75), False)
    assert "0.750" in capsys.readouterr().out


@pytest.mark.parametrize("failure", [{**FAILURE, "resumed_s": None}, {**FAILURE, "role": "server"}])
def test_a_run_that_did_not_go_on_is_no_figure(failure: dict[str, Any]) -> None:
    with pytest.raises(RegrowError, match="too short"):
        recovery_worker.make_row("async", {"failures": [failure]}, before_s=30.0)
