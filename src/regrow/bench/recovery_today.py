"""The same loss with checkpoints, as people do today: how long until training is where it was?

A server dies, all begin again from the last checkpoint, and what was trained since is trained again. Two parts are
measured: from the death until training goes on (**restore**), with `full` checkpoints and with `delta`, of the same
tables; and how long a checkpoint takes, in which a death falls back to the one before. The rest is arithmetic over an
interval T: nothing is trained again if the death comes right after a checkpoint (best), half an interval on average, a
whole one and the writing of the next in the worst case. T is the one of the run, and the paper's half hour: nobody
trains for half an hour here, so those figures are **projected** and say so.

Ours is what the loss of a server cost in the runs with parities of the same command: the training that was lost until
all was back, in seconds.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

from regrow.bench import common
from regrow.bench.trace import Trace
from regrow.config import TrainConfig
from regrow.errors import RegrowError
from regrow.launch import local

KINDS = ("full", "delta")
PAPER_SECONDS = 1800.0
RATIO_TARGET = 20.0  # their average / ours, with the paper's interval
PAPER = (
    "the paper (ECRec): 1.2 to 6.7 times faster than the average with 30 min between checkpoints (k = 4), 9.8 (k = 2)"
)


def measure(report: common.Report, config: TrainConfig, *, interval_seconds: int, kill_step: int, steps: int) -> None:
    """One run of each kind, with a checkpoint every `interval_seconds`, and a server killed at a step."""
    for kind in KINDS:
        with tempfile.TemporaryDirectory(prefix="regrow-bench-", dir=Path(str(config.out)).parent) as home:
            trace = Trace()
            summary = local.train(
                config.replace(
                    protection=kind,
                    ckpt=home,
                    every=f"{interval_seconds}s",
                    steps=steps,
                    kill=(f"server:2@step:{kill_step}",),
                ),
                overwrite=True,
                display=trace,
            )
        row = make_row(kind, summary, interval_seconds=interval_seconds)
        report.rows.append(row)
        common.console.print(
            f"{kind}: training went on {row['restore_s']:.1f} s after the death, {row['steps_lost']} steps back; "
            f"a checkpoint took {row['checkpoint_s']:.1f} s"
        )


def make_row(kind: str, summary: dict[str, Any], *, interval_seconds: float) -> dict[str, Any]:
    restores = summary["restores"]
    if not restores or restores[0]["stall_s"] is None:
        raise RegrowError(f"the run with {kind} checkpoints did not go back to one: it was too short")
    last = (summary["checkpoints"] or {}).get("last") or {}
    return {
        "kind": "today",
        "name": kind,
        "interval_s": interval_seconds,
        "restore_s": round(restores[0]["stall_s"], 4),
        "steps_lost": restores[0]["steps_lost"],
        "checkpoint_s": round(last.get("seconds") or 0.0, 4),
    }


def find_delays(row: dict[str, Any], interval_seconds: float) -> dict[str, float]:
    """Seconds until training is where it was: the best, the average and the worst moment for a death."""
    restore, writing = row["restore_s"], row["checkpoint_s"]
    return {
        "best": restore,
        "average": restore + interval_seconds / 2 + writing,
        "worst": restore + interval_seconds + writing,
    }


def compare(report: common.Report) -> None:
    """Their delays over ours, code by code. What is measured and what is projected is told apart by its name."""
    ours = {k: costs for k in (4, 2) if (costs := find_ours(report, k))}
    for row in [row for row in report.rows if row["kind"] == "today"]:
        for name, seconds in (("measured", row["interval_s"]), ("projected", PAPER_SECONDS)):
            row[f"delays_{name}"] = {case: round(value, 3) for case, value in find_delays(row, seconds).items()}
        for k, costs in ours.items():
            average = row["delays_projected"]["average"]
            report.ratios[f"today_{row['name']}_average_30min_projected_to_k{k}"] = common.Ratio.of(
                [average / cost for cost in costs], target=RATIO_TARGET, better="higher"
            )


def find_ours(report: common.Report, k: int) -> list[float]:
    """Training seconds lost with parities, in the runs of this report; a machine that was busy may show none."""
    runs = [row for row in report.rows if row["kind"] == "run" and row["k"] == k and not row["limit"]]
    return [max(row["lost_s"], row["stall_after_detection_s"]) for row in runs]


def print_rows(report: common.Report) -> None:
    rows = [row for row in report.rows if row["kind"] == "today"]
    if not rows:
        return
    table = []
    for row in rows:
        for name, seconds in (("measured", row["interval_s"]), ("projected", PAPER_SECONDS)):
            delays = row[f"delays_{name}"]
            cells = [f"{delays[case]:,.1f}" for case in ("best", "average", "worst")]
            table.append((f"{row['name']} every {seconds:,.0f} s", f"{row['restore_s']:.1f}", *cells, name))
    for k in (4, 2):
        table += [(f"parities, k = {k}", "-", *[f"{cost:.1f}"] * 3, "measured") for cost in find_ours(report, k)]
    common.print_table(
        "seconds until training is where it was, by when the death comes",
        ("", "restore", "best", "average", "worst", "interval"),
        table,
    )
    common.console.print(PAPER)
