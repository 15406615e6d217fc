"""The same kills, survived in four ways: full and delta checkpoints, partial recovery, erasure coding.

Synchronous, so whatever trains again or loses nothing ends with the model of the run without failures, to the bit, and
what AUC partial recovery ends below it is what it lost. Checkpoints are made as often in all three ways that make any.
"""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from regrow.bench import accuracy, common, cpr_live, cpr_overhead, recovery
from regrow.errors import RegrowError

# Name, protection, priority.
WAYS = (
    ("no failure", "none", "none"),
    ("full", "full", "none"),
    ("delta", "delta", "none"),
    ("partial, all rows", "partial", "none"),
    ("partial, SSU", "partial", "ssu"),
    ("ec, k = 2", "ec", "none"),
)
EXACT = ("full", "delta", "ec, k = 2")
SERVERS = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    options: dict[str, Any]
    seconds: float  # of the run without failures
    saves: int  # in it, of all rows
    rounds: int


FULL = Size(options={"rows_max": 200_000, "test_rows": 100_000}, seconds=25.0, saves=5, rounds=1)
QUICK = Size(options={"rows_max": 5_000, "test_rows": 4_000}, seconds=5.0, saves=4, rounds=1)


def measure(report: common.Report, *, quick: bool, data: str | None = None) -> None:
    size = QUICK if quick else FULL
    options = {**size.options, "digest": True, "mode": "sync", "servers": SERVERS}
    if data is not None:
        options |= {"data": f"criteo:{data}", "train_rows": accuracy.TRAIN_ROWS, "batch": 128, "test_rows": None}
    with tempfile.TemporaryDirectory(prefix="regrow-bench-") as name:
        directory = Path(name)
        base = cpr_live.make_config(**options)
        rate = cpr_live.find_rate(base, directory)
        steps = recovery.steps_of(base, size.seconds, rate)
        if data is not None:
            steps = min(steps, accuracy.TRAIN_ROWS // (base.batch * base.workers))
        for turn in range(size.rounds):
            for way, protection, priority in WAYS:
                row = measure_way(base, directory, protection, priority, steps=steps, every=steps // size.saves)
                report.rows.append({"kind": "side", "way": way, "round": turn, **row})
                common.console.print(f"{way}: {row['seconds']:.1f} s, AUC {row['auc']:.4f}")
    compare(report)


def measure_way(
    base: Any, directory: Path, protection: str, priority: str, *, steps: int, every: int
) -> dict[str, Any]:
    # Between two saves, each time in the middle.
    kill = tuple(f"server:{server}@step:{every * at + every // 2}" for server, at in ((1, 1), (2, 3)))
    summary, trace, stored = cpr_live.run(
        base,
        directory,
        steps=steps,
        kill=() if protection == "none" else kill,
        more=lambda folder: cpr_live.make_changes(protection, f"{every}steps", priority=priority, folder=folder),
    )
    partial = summary["partial"] or {}
    return {
        "steps": steps,
        # With what everybody trained again, and waited.
        "seconds": summary["wall_seconds"] if "wall_seconds" in summary else summary["seconds"],
        "auc": summary["auc"],
        "digest": summary["model_sha256"],
        "failures": len(summary["failures"]),
        # Full recovery begins everything again, and knows no failures, only falls back.
        "stall_s": max([*cpr_live.find_stalls(trace), *stall_of_restores(summary, trace)], default=0.0),
        "steps_again": sum(restore["steps_lost"] for restore in summary["restores"]),
        "share_lost": partial.get("share_lost"),
        "pls": partial.get("pls"),
        "redundancy_bytes": summary["redundancy_bytes"] + partial.get("priority_bytes", 0),
        "rows_bytes": summary["table_bytes"] - summary["redundancy_bytes"],
        "peak_rss_bytes": summary["peak_rss_bytes"]["total"],
        "stored_bytes": stored,
        **trace.others(),
    }


def stall_of_restores(summary: dict[str, Any], trace: cpr_live.Trace) -> list[float]:
    return [cpr_overhead.find_longest_gap(trace.reports.values())] if summary["restores"] else []


def compare(report: common.Report) -> None:
    rows = [row for row in report.rows if row["kind"] == "side"]
    base = next(row for row in rows if row["way"] == WAYS[0][0])
    for row in rows:
        row["auc_lost"] = base["auc"] - row["auc"]
        if row["way"] in EXACT and row["digest"] != base["digest"]:
            raise RegrowError(f"{row['way']}: the model is not that of the run without failures")
    common.print_table(
        f"{base['steps']} steps, two servers die, one after the other",
        ("", "time", "longest stall", "steps again", "AUC lost", "updates lost", "memory beyond rows", "stored"),
        [side_row(row) for row in rows],
    )


def side_row(row: dict[str, Any]) -> tuple[str, ...]:
    return (
        row["way"],
        f"{row['seconds']:.1f} s",
        f"{row['stall_s']:.2f} s",
        str(row["steps_again"]),
        f"{row['auc_lost']:+.5f}",
        "-" if row["share_lost"] is None else f"{row['share_lost']:.2%}",
        f"{row['redundancy_bytes'] / 1e6:,.1f} of {row['rows_bytes'] / 1e6:,.0f} MB",
        f"{row['stored_bytes'] / 1e6:,.0f} MB",
    )
