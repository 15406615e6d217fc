"""A worker dies, and a spare that has everything imported takes its place: how long until it has made a step?

Synchronously all others wait for it; asynchronously they train on. The **stall** is the silence of that worker, from
its death to the first report of its successor, so that step is part of it. Tables are small: nobody loses rows, and how
many there are does not matter to who comes.
"""

from __future__ import annotations

from typing import Any

from regrow.bench import common
from regrow.bench.trace import Trace
from regrow.config import TrainConfig
from regrow.core.job import Mode
from regrow.errors import RegrowError
from regrow.launch import local

MODES: tuple[Mode, ...] = ("async", "sync")
VICTIM = 1
STALL_TARGET = 0.5
# Of training, until the death: a spare begins to import ten seconds after the others have begun to train, and then
# stands back for them. Where its place is taken before it is ready, that is measured, and no spare.
BEFORE_SECONDS = 30.0
AFTER_SECONDS = 10.0


def measure(report: common.Report, config: TrainConfig, *, kill_step: int, steps: int) -> None:
    """One run in each mode."""
    for mode in MODES:
        trace = Trace()
        kill = (f"worker:{VICTIM}@step:{kill_step}",)
        ahead = {"prefetch": 0} if mode == "sync" else {}
        summary = local.train(
            config.replace(protection="ec", mode=mode, steps=steps, kill=kill, **ahead), overwrite=True, display=trace
        )
        row = make_row(mode, summary, before_s=trace.failure().at - trace.begin)
        report.rows.append({**row, **trace.others()})
        common.console.print(
            f"{mode}: a worker died, its spare was told after {row['detected_s']:.3f} s, was there after "
            f"{row['replaced_s']:.3f} s, and had made a step after {row['stall_s']:.2f} s"
        )


def make_row(mode: Mode, summary: dict[str, Any], *, before_s: float) -> dict[str, Any]:
    failure = summary["failures"][0]
    if failure["role"] != "worker" or failure["resumed_s"] is None:
        raise RegrowError(f"the run ({mode}) did not go on behind the death of a worker: it was too short")
    names = ("detected_s", "replaced_s", "resumed_s", "stall_s")
    return {"kind": "worker", "mode": mode, "before_s": round(before_s, 2), **{name: failure[name] for name in names}}


def compare(report: common.Report) -> None:
    for row in [row for row in report.rows if row["kind"] == "worker"]:
        report.ratios[f"worker_stall_seconds_{row['mode']}"] = common.Ratio.of(
            [row["stall_s"]], target=STALL_TARGET, better="lower"
        )


def print_rows(report: common.Report) -> None:
    rows = [row for row in report.rows if row["kind"] == "worker"]
    if not rows:
        return
    common.print_table(
        "a worker is killed; seconds from its death",
        ("", "known", "spare there", "first step", "stall", "after so much training"),
        [
            (
                row["mode"],
                *(f"{row[name]:.3f}" for name in ("detected_s", "replaced_s", "resumed_s", "stall_s")),
                f"{row['before_s']:.0f} s",
            )
            for row in rows
        ],
    )
