"""Caches from a thousandth to a fifth of the rows, and other skews: how much is missed, and what time that takes.

A thousandth of the rows must be two batches and more, so batches are small here, and the dense network is too, which
has its place in the cache before any row. Less work in a step makes a miss weigh more than in other parts. Beside each
share of misses stands that of the sketch (`tiered_figures.Reuse`), from the stream of batches alone.

Other skews come with the model and batches of the part `time`, and with one cache for all, which misses as much as is
published at the usual skew. They are those at which it should miss as much as is published of a stream that is less and
of one that is more skewed. The published figures are of persistent memory, so files in memory are measured too. What is
aimed at is the difference of time between the least and the most skewed: the published shares of misses are 7 points
apart themselves.
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
SKEWS = (1.2, SKEW_DEFAULT, 1.32)
MISS_RATES = (0.1708, 0.1363, 0.1004)  # as published; so much a cache of 5.2 % should miss at these skews
POINTS_TARGET = 0.05
BOTTOM, TOP = (64, 16), (64, 1)
MEMORY = Variant(name="memory", label="rows in memory")
DISK = Variant(name="disk", label="disk", place="disk", pace=0.7)
SHM = Variant(name="shm", label="files in memory", place="shm")


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """How much is measured."""

    rows_max: int
    shares: tuple[float, ...]
    times: tiered_live.Times
    skew_rows_max: int
    skew_times: tiered_live.Times


FULL = Size(
    rows_max=450_000,
    shares=SHARES,
    times=tiered_live.Times(seconds=5.0, warmup_seconds=3.0),
    skew_rows_max=200_000,
    skew_times=tiered_live.Times(seconds=6.0, warmup_seconds=5.0),
)
QUICK = Size(
    rows_max=40_000,
    shares=(0.05, 0.2),
    times=tiered_live.Times(seconds=2.0, warmup_seconds=1.0),
    skew_rows_max=40_000,
    skew_times=tiered_live.Times(seconds=2.0, warmup_seconds=1.0),
)


def measure(report: common.Report, setting: tiered_live.Setting) -> None:
    size = QUICK if setting.quick else FULL
    with make_model() as model:
        usual = Workload(rows_max=size.rows_max, batch=64, servers=1, model=model)
        measure_shares(report, setting, usual, size)
    print_rows(report)
    measure_skews(report, setting, size)
    compare_skews(report)


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


def measure_shares(report: common.Report, setting: tiered_live.Setting, workload: Workload, size: Size) -> None:
    rate = tiered_live.find_rate(workload)
    sketch = workload.sketch(batches=4 * tiered_live.SKETCH_BATCHES)  # batches are small
    memory = tiered_live.run(workload, MEMORY, setting, times=size.times, rate=rate, cache_bytes=0)
    for share in size.shares:
        cache_bytes = tiered_live.find_cache_bytes(workload, share * workload.rows)
        row = tiered_live.run(workload, DISK, setting, times=size.times, rate=rate, cache_bytes=cache_bytes)
        figures = describe(workload, share, sketch, memory, row)
        report.rows.append({"kind": "cache", **figures, **row})
        tiered_live.say(replace(DISK, label=f"a cache of {share:.1%}"), 0, row)


def measure_skews(report: common.Report, setting: tiered_live.Setting, size: Size) -> None:
    """One cache for all, and each skew in memory, in files in memory and on disk."""
    usual = Workload(rows_max=size.skew_rows_max)
    rate = tiered_live.find_rate(usual)
    rows = usual.sketch().cache_rows(MISS_RATES[SKEWS.index(SKEW_DEFAULT)]) or usual.rows // 20
    cache_bytes = tiered_live.find_cache_bytes(usual, rows)
    variants = [each for each in (MEMORY, SHM, DISK) if each.place is None or each.place in setting.places]
    for skew, published in zip(SKEWS, MISS_RATES, strict=True):
        for variant in variants:
            row = tiered_live.run(
                replace(usual, skew=skew), variant, setting, times=size.skew_times, rate=rate, cache_bytes=cache_bytes
            )
            # The skews are rounds: each is held against rows in memory of its own.
            told = {"skew": skew, "published": published, "variant": variant.name, "round": skew}
            report.rows.append({"kind": "skew", **told, **row})
            tiered_live.say(replace(variant, label=f"skew {skew:g}, {variant.label}"), 0, row)


def compare_skews(report: common.Report) -> None:
    runs = [row for row in report.rows if row["kind"] == "skew"]
    shown = []
    for variant in (SHM, DISK):
        mine = sorted((row for row in runs if row["variant"] == variant.name), key=lambda row: row["skew"])
        spreads = [
            tiered_live.overheads(runs, variant.name, MEMORY.name, equal_speed=equal_speed)
            for equal_speed in (False, True)
        ]
        for label, found in zip(("", "_equal_speed"), spreads, strict=True):
            if len(found) == len(SKEWS):  # in the order of the skews
                report.ratios[f"skew_points_{variant.name}{label}"] = common.Ratio.of(
                    [found[0] - found[-1]], target=POINTS_TARGET, better="lower"
                )
        for number, row in enumerate(mine):
            more = [f"{found[number]:+.1%}" if len(found) == len(mine) else "-" for found in spreads]
            misses = f"{row['miss_rate']:.1%}" if "miss_rate" in row else "-"
            shown.append((variant.label, f"{row['skew']:g}", misses, f"{row['published']:.1%}", *more))
    common.print_table(
        "one cache, streams that are more and less skewed: time per sample, more than with rows in memory",
        ("rows", "skew", "misses", "published", "more time", "at equal speed"),
        shown,
    )


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
