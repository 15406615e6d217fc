"""Checkpoints in the files of rows on disk, every 100 steps, against none; and against deltas on storage as often.

What is measured of a run lies between two of its checkpoints, so it has whole periods. The cost aimed at is less than
what two equal runs differ by on most machines: look at the figure at equal speed, and at its spread.
"""

from __future__ import annotations

from dataclasses import dataclass

from regrow.bench import common, overhead, tiered_live, tiered_time
from regrow.bench.tiered_live import Variant

TARGET = 0.005
EVERY_STEPS = 100
NONE, BATCH, DELTA = "none", "batch", "delta"


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """How much is measured."""

    rows_max: int
    rounds: int
    every_steps: int
    periods: int  # that are measured; two more pass before, in which the cache fills
    batch: int


FULL = Size(rows_max=100_000, rounds=2, every_steps=EVERY_STEPS, periods=3, batch=512)
QUICK = Size(rows_max=40_000, rounds=1, every_steps=20, periods=2, batch=256)


def make_variants(every_steps: int) -> tuple[Variant, ...]:
    every = f"{every_steps}steps"
    # Deltas come once: they are only compared with.
    return (
        Variant(name=NONE, label="no checkpoints", place="disk"),
        Variant(name=BATCH, label="in the files", place="disk", changes={"protection": "batch", "every": every}),
        Variant(
            name=DELTA,
            label="deltas on storage",
            place="disk",
            changes={"protection": "delta", "every": every, "ckpt": "{}/checkpoints"},
            judged=False,
        ),
    )


def measure(report: common.Report, setting: tiered_live.Setting) -> None:
    size = QUICK if setting.quick else FULL
    workload = tiered_live.Workload(rows_max=size.rows_max, batch=size.batch)
    cache_bytes = tiered_time.choose_cache(workload)
    rate = tiered_live.find_rate(workload)
    period = size.every_steps * workload.batch * workload.workers / rate
    times = tiered_live.Times(seconds=(size.periods + 0.5) * period, warmup_seconds=2 * period)
    for turn in range(size.rounds):
        for variant in tiered_live.choose_order(make_variants(size.every_steps), turn):
            row = tiered_live.run(workload, variant, setting, times=times, rate=rate, cache_bytes=cache_bytes)
            report.rows.append({"kind": "batch", "variant": variant.name, "round": turn, **row})
            tiered_live.say(variant, turn, row)
    compare(report)


def compare(report: common.Report) -> None:
    runs = [row for row in report.rows if row["kind"] == "batch"]
    shown = []
    for name, base in ((BATCH, NONE), (DELTA, NONE), (BATCH, DELTA)):
        spreads = []
        for equal_speed in (False, True):
            values = tiered_live.overheads(runs, name, base, equal_speed=equal_speed)
            spreads.append(tiered_time.spread(values))
            if values and (name, base) == (BATCH, NONE):
                label = f"checkpoints{'_equal_speed' if equal_speed else ''}"
                report.ratios[label] = common.Ratio.of(values, target=TARGET, better="lower")
        made = [row["checkpoints"] for row in runs if row["variant"] == name]
        shown.append(
            (f"{name} against {base}", *(overhead.percent(each) for each in spreads), str(max(made, default=0)))
        )
    common.print_table(
        f"time per sample, more than the other ({EVERY_STEPS} steps between checkpoints; fewer with --quick)",
        ("", "more", "at equal speed", "checkpoints in a run"),
        shown,
    )
