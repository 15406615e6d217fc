"""Checkpoints in the files of rows on disk, every 100 steps, against none; and against deltas on storage as often.

What is aimed at is less than what two equal runs differ by, so there are three figures:

    work       processor time, of that which a sample takes without checkpoints: on processors that are all busy it is
               the time that checkpoints cost. Of the stores it is taken in one process, where little else changes
               (`tiered_epochs`); of the coordinator, which does little, in training. Judged by the mean of pairs, which
               has a known error
    time       per sample, in training: what a user sees, and what differs most from run to run. What is measured of a
               run lies between two of its checkpoints, so it has whole periods
    written    bytes and rows per sample, and what the device needs for them: counted, so nearly the same in every round
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from regrow.bench import common, overhead, tiered_epochs, tiered_figures, tiered_live, tiered_time
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
    turns: int  # of stores
    turns_seconds_max: float


FULL = Size(rows_max=200_000, rounds=1, every_steps=EVERY_STEPS, periods=3, batch=512, turns=16, turns_seconds_max=90.0)
ALONE = dataclasses.replace(FULL, rounds=3, turns=40, turns_seconds_max=240.0)  # about eight minutes
QUICK = Size(rows_max=40_000, rounds=1, every_steps=20, periods=2, batch=256, turns=2, turns_seconds_max=10.0)
WARMUP_TURNS, WARMUP_TURNS_QUICK = 8, 1  # caches fill, and logs until they are cleaned


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


def choose_size(setting: tiered_live.Setting) -> Size:
    if setting.quick:
        return QUICK
    return ALONE if setting.alone else FULL


def measure(report: common.Report, setting: tiered_live.Setting) -> None:
    size = choose_size(setting)
    workload = tiered_live.Workload(rows_max=size.rows_max, batch=size.batch)
    cache_bytes = tiered_time.choose_cache(workload)
    pairs = tiered_epochs.measure(
        workload,
        str(setting.place("disk").directory),
        tiered_epochs.Size(
            steps=size.every_steps,
            turns=size.turns,
            warmup_turns=WARMUP_TURNS_QUICK if setting.quick else WARMUP_TURNS,
            seconds_max=size.turns_seconds_max,
        ),
        cache_bytes=cache_bytes,
    )
    report.rows.append({"kind": "stores", **dataclasses.asdict(pairs)})
    rate = tiered_live.find_rate(workload)
    period = size.every_steps * workload.batch * workload.workers / rate
    times = tiered_live.Times(seconds=(size.periods + 0.5) * period, warmup_seconds=2 * period)
    for turn in range(size.rounds):
        for variant in tiered_live.choose_order(make_variants(size.every_steps), turn):
            row = tiered_live.run(workload, variant, setting, times=times, rate=rate, cache_bytes=cache_bytes)
            report.rows.append({"kind": "batch", "variant": variant.name, "round": turn, **row})
            tiered_live.say(variant, turn, row)
    compare(report)
    compare_work(report, pairs.more)
    device = setting.place("disk").device
    compare_written(report, device.write_bytes_per_s)


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
        f"more time per sample than the other, {EVERY_STEPS} steps between checkpoints (fewer with --quick), lowest to "
        "highest round",
        ("", "time", "time, at equal speed", "checkpoints in a run"),
        shown,
    )


def compare_work(report: common.Report, stores: Sequence[float]) -> None:
    """Processor time for checkpoints, of what a sample takes without: of the stores by pairs of turns, and what the
    coordinator of a training takes more for them."""
    by_name = {
        name: [row["seconds_per_sample"] for row in report.rows if row["kind"] == "batch" and row["variant"] == name]
        for name in (NONE, BATCH)
    }
    known = {name: tiered_figures.average([row for row in rows if row]) for name, rows in by_name.items() if any(rows)}
    if len(known) < len(by_name) or len(stores) < 2:  # one pair has no known error
        return
    whole = sum(known[NONE].values())
    coordinator = known[BATCH]["coordinator"] - known[NONE]["coordinator"]
    work = tiered_figures.mean_of_pairs([(more + coordinator) / whole for more in stores])
    told = "twice the error of the mean of pairs"
    report.ratios["checkpoints_work"] = common.Ratio(
        **work, target=TARGET, better="lower", pairs=len(stores), told=told
    )
    more = statistics.fmean(stores)
    report.rows.append(
        {"kind": "work", "stores_seconds": more, "coordinator_seconds": coordinator, "sample_seconds": whole, **work}
    )
    common.console.print(
        f"processor time for checkpoints: {overhead.percent(work)} of the {1e6 * whole:.1f} us of a sample; stores "
        f"{1e6 * more:.2f} us, coordinator {1e6 * coordinator:.2f} us"
    )


def compare_written(report: common.Report, write_bytes_per_s: float) -> None:
    """What checkpoints write that would not be written without them, and the time that the device takes for it."""
    runs = [row for row in report.rows if row["kind"] == "batch" and "written_per_sample" in row]
    by_name = {name: [row for row in runs if row["variant"] == name] for name in (NONE, BATCH)}
    if not all(by_name.values()):
        return
    found = {
        name: tiered_figures.average([row["written_per_sample"] for row in rows]) for name, rows in by_name.items()
    }
    more = {name: found[BATCH][name] - found[NONE][name] for name in tiered_figures.WRITTEN}
    seconds = statistics.fmean(1.0 / row["samples_per_second"] for row in by_name[NONE])
    device = max(0.0, more["log_bytes_written"] + more["home_bytes_written"]) / write_bytes_per_s
    report.rows.append({"kind": "written_for_checkpoints", **found, "more": more, "device_share": device / seconds})
    common.print_table(
        "written per sample",
        ("", "bytes, log", "bytes, home", "rows for checkpoints", "changed rows that left"),
        [(name, *(f"{values[each]:.2f}" for each in tiered_figures.WRITTEN)) for name, values in found.items()],
    )
    common.console.print(f"the device writes what checkpoints add in {device / seconds:.2%} of the time of a sample")
