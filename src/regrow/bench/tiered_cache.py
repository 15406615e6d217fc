"""Caches from a thousandth to a fifth of the rows, and other skews: how much is missed, and what time that takes.

A thousandth of the rows must be two batches and more, so batches are small here, and the dense network is too, which
has its place in the cache before any row. Less work in a step makes a miss weigh more than in other parts. Beside each
share of misses stands that of the sketch (`tiered_figures.Reuse`), from the stream of batches alone.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from regrow.bench import common, tiered_figures, tiered_live
from regrow.bench.tiered_live import Variant, Workload
from regrow.data.synthetic import SKEW_DEFAULT

SHARES = (0.001, 0.005, 0.01, 0.05, 0.2)
SHARE_USUAL = 0.05
SKEWS = (1.05, SKEW_DEFAULT, 1.45)  # one less and one more than published
BOTTOM, TOP = (64, 16), (64, 1)
MEMORY = Variant(name="memory", label="rows in memory")
DISK = Variant(name="disk", label="disk", place="disk", pace=0.7)


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """How much is measured."""

    rows_max: int
    shares: tuple[float, ...]
    skews: tuple[float, ...]
    times: tiered_live.Times


FULL = Size(rows_max=450_000, shares=SHARES, skews=SKEWS, times=tiered_live.Times(seconds=5.0, warmup_seconds=3.0))
QUICK = Size(
    rows_max=40_000, shares=(0.05, 0.2), skews=(SKEW_DEFAULT,), times=tiered_live.Times(seconds=2.0, warmup_seconds=1.0)
)


def measure(report: common.Report, setting: tiered_live.Setting) -> None:
    size = QUICK if setting.quick else FULL
    with make_model() as model:
        usual = Workload(rows_max=size.rows_max, batch=64, servers=1, model=model)
        rate = tiered_live.find_rate(usual)
        for skew in size.skews:
            workload = replace(usual, skew=skew)
            shares = size.shares if skew == SKEW_DEFAULT else (SHARE_USUAL,)
            measure_skew(report, setting, workload, shares, size=size, rate=rate)
    print_rows(report)


@contextmanager
def make_model() -> Iterator[str]:
    """The usual tables under a small dense network, as a file."""
    with tempfile.TemporaryDirectory(prefix="regrow-bench-") as folder:
        path = Path(folder) / "small.toml"
        fields = {"dim": BOTTOM[-1], "bottom": list(BOTTOM), "top": list(TOP), "rows": list(_table_sizes())}
        path.write_text("".join(f"{name} = {value}\n" for name, value in fields.items()))
        yield str(path)


def _table_sizes() -> list[int]:
    return Workload(rows_max=1 << 31).tables


def measure_skew(
    report: common.Report,
    setting: tiered_live.Setting,
    workload: Workload,
    shares: tuple[float, ...],
    *,
    size: Size,
    rate: float,
) -> None:
    sketch = workload.sketch(batches=4 * tiered_live.SKETCH_BATCHES)  # batches are small
    memory = tiered_live.run(workload, MEMORY, setting, times=size.times, rate=rate, cache_bytes=0)
    for share in shares:
        cache_bytes = tiered_live.find_cache_bytes(workload, share * workload.rows)
        row = tiered_live.run(workload, DISK, setting, times=size.times, rate=rate, cache_bytes=cache_bytes)
        figures = describe(workload, share, sketch, memory, row)
        report.rows.append({"kind": "cache", **figures, **row})
        tiered_live.say(replace(DISK, label=f"skew {workload.skew:g}, a cache of {share:.1%}"), 0, row)


def describe(
    workload: Workload, share: float, sketch: tiered_figures.Reuse, memory: dict[str, Any], row: dict[str, Any]
) -> dict[str, Any]:
    """What was wanted, what was there, and what it cost. Frames of dense parameters are few, and counted along."""
    return {
        "skew": workload.skew,
        "share": share,
        "share_of_frames": row["frames"] / workload.rows,
        "sketch": sketch.miss_rate(row["frames"]),
        "overhead": memory["samples_per_second"] / row["samples_per_second"] - 1.0,
    }


def print_rows(report: common.Report) -> None:
    rows = [row for row in report.rows if row["kind"] == "cache"]
    common.print_table(
        "a cache of a part of the rows, on disk",
        (
            "skew",
            "cache",
            "misses",
            "by the sketch",
            "read from disk",
            "more time per sample",
            "misses as time goes on",
        ),
        [cache_row(row) for row in rows],
    )


def cache_row(row: dict[str, Any]) -> tuple[str, ...]:
    return (
        f"{row['skew']:g}",
        f"{row['share']:.1%} ({row['share_of_frames']:.2%})",
        f"{row['miss_rate']:.1%}" if "miss_rate" in row else "-",
        "-" if row["sketch"] is None else f"{row['sketch']:.1%}",
        f"{row['disk_rate']:.1%}" if "disk_rate" in row else "-",
        f"{row['overhead']:+.1%}",
        ", ".join(f"{rate:.0%}" for _, rate in row["miss_rates_by_time"]),
    )
