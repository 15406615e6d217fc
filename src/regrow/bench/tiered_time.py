"""Training with rows on disk, and in files in memory, against all rows in memory, where 13 of 100 rows of a batch
would not be in the cache if rows left it in the order of their last use. Beside it the other policies: `self`, whose
pulls tidy up and wait for their reads themselves (a cache alone), and `none`, which keeps nothing from batch to batch
but tidies up between them (the pipeline alone); with that a push misses too, and there may be more misses than rows in
a batch.

The sketch: each miss is a read, so a sample takes at least reads per sample / reads per second of the device. A disk
that cannot read twice as fast as training in memory would need is held against that bound, and not against memory.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from regrow.bench import common, overhead, tiered_figures, tiered_live
from regrow.bench.tiered_live import Variant

MEMORY, DISK, SHM, SELF = "memory", "disk", "shm", "disk_self"
VARIANTS = (
    Variant(name=MEMORY, label="rows in memory"),
    Variant(name=SHM, label="files in memory", place="shm"),
    Variant(name=DISK, label="disk", place="disk"),
    Variant(name=SELF, label="disk, policy self", place="disk", changes={"cache_policy": "self"}, pace=0.5),
    Variant(
        name="shm_self", label="files in memory, policy self", place="shm", changes={"cache_policy": "self"}, pace=0.5,
        judged=False,
    ),
    Variant(
        name="disk_none", label="disk, policy none", place="disk", changes={"cache_policy": "none"}, pace=0.25,
        judged=False,
    ),
)  # fmt: skip
OVERHEAD_MAX = {SHM: tiered_figures.MEMORY_OVERHEAD_TARGET, DISK: tiered_figures.DISK_OVERHEAD_TARGET}


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """How much is measured."""

    rows_max: int
    rounds: int
    times: tiered_live.Times


FULL = Size(rows_max=200_000, rounds=2, times=tiered_live.Times(seconds=7.0, warmup_seconds=5.0))
QUICK = Size(rows_max=60_000, rounds=1, times=tiered_live.Times(seconds=2.5, warmup_seconds=1.5))


def measure(report: common.Report, setting: tiered_live.Setting) -> None:
    size = QUICK if setting.quick else FULL
    workload = tiered_live.Workload(rows_max=size.rows_max)
    cache_bytes = choose_cache(workload)
    rate = tiered_live.find_rate(workload)
    variants = [each for each in VARIANTS if each.place is None or each.place in setting.places]
    for turn in range(size.rounds):
        for variant in tiered_live.choose_order(variants, turn):
            row = tiered_live.run(workload, variant, setting, times=size.times, rate=rate, cache_bytes=cache_bytes)
            report.rows.append({"kind": "time", "variant": variant.name, "round": turn, **row})
            tiered_live.say(variant, turn, row)
    compare(report, {name: place.device.random_reads_best for name, place in setting.places.items()})


def choose_cache(workload: tiered_live.Workload) -> int:
    """The cache that should miss as much as is published."""
    rows = workload.sketch().cache_rows(tiered_live.MISS_RATE)
    if rows is None:  # so many are used once only: any cache misses more
        rows = workload.rows // 20
    cache_bytes = tiered_live.find_cache_bytes(workload, rows)
    common.console.print(
        f"{workload.rows:,} rows; {rows:,} of them should miss {tiered_live.MISS_RATE:.0%}: "
        f"a cache of {cache_bytes / 1e6:.1f} MB in each of {workload.servers} servers"
    )
    return cache_bytes


# -- what follows from it ------------------------------------------------------------------------------------


def compare(report: common.Report, reads_per_s: dict[str, float]) -> None:
    """`reads_per_s`: what each device can do."""
    runs = [row for row in report.rows if row["kind"] == "time"]
    for name in (SHM, DISK):
        for equal_speed in (False, True):
            verdicts = judge_rounds(runs, name, reads_per_s.get(name, 0.0), equal_speed=equal_speed)
            if not verdicts:
                continue
            figures = [verdict.figure for verdict in verdicts]
            label = f"time_{'equal_speed_' if equal_speed else ''}{name}{'_of_bound' if verdicts[0].is_bound else ''}"
            report.ratios[label] = common.Ratio.of(figures, target=verdicts[0].target, better="lower")
            if not equal_speed:
                common.console.print(f"{name}: {verdicts[0].why}")
    for base, own in ((SELF, DISK), ("shm_self", SHM)):
        if shorter := tiered_live.per_round(runs, base, own):
            report.ratios[f"time_{own}_of_self"] = common.Ratio.of(
                shorter, target=tiered_figures.SELF_TARGET, better="lower"
            )
    add_memory(report, runs)
    print_rows(runs)


def judge_rounds(
    runs: Sequence[dict[str, Any]], name: str, device_reads_per_s: float, *, equal_speed: bool
) -> list[tiered_figures.Verdict]:
    """One verdict a round, all of the kind that the first round finds right: ratios of two kinds have no median."""
    rows = {(row["variant"], row["round"]): row for row in runs}
    found: list[tiered_figures.Verdict] = []
    for turn in sorted({row["round"] for row in runs}):
        memory, tiered = rows.get((MEMORY, turn)), rows.get((name, turn))
        if memory is None or tiered is None or "reads_per_sample" not in tiered:
            continue
        slower = 1.0
        if equal_speed:
            if not (memory.get("worker_seconds_per_sample") and tiered.get("worker_seconds_per_sample")):
                continue
            slower = tiered["worker_seconds_per_sample"] / memory["worker_seconds_per_sample"]
        verdict = tiered_figures.judge_time(
            memory_rate=memory["samples_per_second"],
            tiered_rate=tiered["samples_per_second"] * slower,
            reads_per_sample=tiered["reads_per_sample"],
            device_reads_per_s=device_reads_per_s,
            overhead_max=OVERHEAD_MAX[name],
        )
        if not found or found[0].is_bound == verdict.is_bound:
            found.append(verdict)
    return found


def add_memory(report: common.Report, runs: Sequence[dict[str, Any]]) -> None:
    """What has to be paid for with either store, and memory beside the cache."""
    for name in (MEMORY, SHM, DISK):
        mine = [row for row in runs if row["variant"] == name]
        if not mine:
            continue
        rate = statistics.median(row["samples_per_second"] for row in mine)
        rss = max(row["server_rss_bytes"] for row in mine)
        cost = tiered_figures.price(
            servers=mine[0]["servers"], rss_bytes=rss, file_bytes=mine[0].get("file_bytes", 0.0), samples_per_s=rate
        )
        report.rows.append({"kind": "price", "variant": name, **{key: round(value, 4) for key, value in cost.items()}})
    memory = [row for row in runs if row["variant"] == MEMORY]
    tiered = [row for row in runs if row["variant"] == DISK]
    if memory and tiered:
        beside = tiered_figures.count_beside(
            tiered_rss_bytes=max(row["server_rss_bytes"] for row in tiered),
            cache_bytes=tiered[0]["cache_bytes"],
            memory_rss_bytes=min(row["server_rss_bytes"] for row in memory),
            memory_row_bytes=memory[0]["server_bytes"],
            rows=tiered[0]["rows_per_server"],
        )
        report.rows.append({"kind": "beside", **beside})
        report.ratios["memory_beside_cache_of_allowed"] = common.Ratio.of([beside["ratio"]], target=1.0, better="lower")


def print_rows(runs: Sequence[dict[str, Any]]) -> None:
    shown = []
    for variant in VARIANTS:
        mine = [row for row in runs if row["variant"] == variant.name]
        if not mine:
            continue
        more = tiered_live.overheads(runs, variant.name, MEMORY, equal_speed=False)
        even = tiered_live.overheads(runs, variant.name, MEMORY, equal_speed=True)
        shown.append(
            (
                variant.label,
                f"{statistics.median(row['samples_per_second'] for row in mine):,.0f}",
                *(overhead.percent(spread(values)) for values in (more, even)),
                show_share(mine, "miss_rate"),
                show_share(mine, "disk_rate"),
            )
        )
    common.print_table(
        "time per sample, more than with rows in memory (lowest to highest round)",
        ("rows", "samples/s", "more", "at equal speed", "misses", "read from disk"),
        shown,
    )


def spread(values: Sequence[float]) -> dict[str, float] | None:
    if not values:
        return None
    return {"value": statistics.median(values), "low": min(values), "high": max(values)}


def show_share(rows: Sequence[dict[str, Any]], name: str) -> str:
    known = [row[name] for row in rows if row.get(name) is not None]
    return f"{statistics.median(known):.1%}" if known else "-"
