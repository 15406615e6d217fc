"""The store's own costs: a cache that holds every row against rows in memory, and what is written for rows that leave.

The first twice: as a ratio of whole trainings, on tables so small that nearly all rows are in the cache after the
warm-up; and of the store alone, where nothing else dilutes it. The second in one process, with the batches of training,
counted from when the log has been cleaned as often as it is long: then what goes home is what left the cache, and not
what filled the tables. Where the bytes go: a header and the record to the log; later pages of the home, which several
rows share if they go home together; some padding of either; the state.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from regrow.bench import checkpoint_store, common, tiered_figures, tiered_live, tiered_recovery
from regrow.bench.tiered_live import Variant
from regrow.core.job import JobSpec
from regrow.launch.tiers import FRAME_BYTES_BESIDE
from regrow.store.memory import MemoryStore
from regrow.store.tiered import TieredStore

WHOLE_TARGET = 0.03
VARIANTS = (
    Variant(name="memory", label="rows in memory"),
    Variant(name="whole", label="disk, all rows in the cache", place="disk"),
)
CACHE_SHARE = 0.05
BATCH = 512
BATCHES_MAX = 20_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """How much is measured."""

    whole_rows_max: int
    rounds: int
    times: tiered_live.Times
    hit_batches: int
    written_bytes: int  # of rows
    written_seconds_max: float


FULL = Size(
    whole_rows_max=20_000,
    rounds=2,
    times=tiered_live.Times(seconds=7.0, warmup_seconds=4.0),
    hit_batches=600,
    written_bytes=48_000_000,
    written_seconds_max=60.0,
)
QUICK = Size(
    whole_rows_max=5_000,
    rounds=1,
    times=tiered_live.Times(seconds=2.0, warmup_seconds=1.0),
    hit_batches=60,
    written_bytes=8_000_000,
    written_seconds_max=10.0,
)


def measure(report: common.Report, setting: tiered_live.Setting) -> None:
    size = QUICK if setting.quick else FULL
    measure_whole(report, setting, size)
    with tempfile.TemporaryDirectory(prefix="regrow-bench-", dir=setting.place("disk").directory) as folder:
        report.rows.append({"kind": "hits", **measure_hits(f"{folder}/hits", size)})
        report.rows.append({"kind": "written", **measure_written(f"{folder}/written", size)})
    compare(report)


def measure_whole(report: common.Report, setting: tiered_live.Setting, size: Size) -> None:
    """Trainings in turns, one with rows in memory and one with a cache for all of them."""
    workload = tiered_live.Workload(rows_max=size.whole_rows_max)
    cache_bytes = tiered_live.find_cache_bytes(workload, 1.1 * workload.rows)
    rate = tiered_live.find_rate(workload)
    for turn in range(size.rounds):
        for variant in tiered_live.choose_order(VARIANTS, turn):
            row = tiered_live.run(
                workload, variant, setting, times=size.times, rate=rate, cache_bytes=cache_bytes, prefill=False
            )
            report.rows.append({"kind": "whole", "variant": variant.name, "round": turn, **row})
            tiered_live.say(variant, turn, row)


# -- one store in this process -------------------------------------------------------------------------------


def make_pushes(job: JobSpec, count: int) -> list[tuple[Any, Any, Any]]:
    batches = checkpoint_store.batches(job, batch=BATCH, count=count)
    return [checkpoint_store.push_of(job, ids, number) for number, ids in enumerate(batches)]


def find_cache_bytes(job: JobSpec, share: float) -> int:
    floats = [
        MemoryStore(JobSpec(tables=(table,), servers=1, workers=1), 0).record_floats(0) for table in job.tables[:1]
    ]
    return int(share * sum(table.rows for table in job.tables) * (4 * floats[0] + FRAME_BYTES_BESIDE)) + (1 << 16)


def step(store: Any, push: tuple[Any, Any, Any], out: Any, number: int) -> None:
    """A pull and a push, as a server does them."""
    counts, slots, grads = push
    if store.is_paged:
        tiered_recovery.fetch(store, counts, slots)
    store.gather(counts, slots, out[: len(grads)])
    if store.is_paged:
        tiered_recovery.fetch(store, counts, slots)
    store.update(counts, slots, grads, number + 1)
    if store.is_paged:
        store.upkeep()


def measure_hits(directory: str, size: Size) -> dict[str, Any]:
    """Nanoseconds for a row that is pulled and pushed, in memory and in a cache that holds all; medians, by turns."""
    job = checkpoint_store.make_job(size.written_bytes)
    pushes = make_pushes(job, size.hit_batches)
    stores: dict[str, Any] = {
        "memory": MemoryStore(job, 0),
        "tiered": TieredStore(job, 0, directory=directory, cache_bytes=find_cache_bytes(job, 1.1)),
    }
    out = np.empty(max(len(grads) for _, _, grads in pushes), np.float32)
    seconds: dict[str, list[float]] = {name: [] for name in stores}
    for passes in range(2):  # the first brings all rows into the cache
        for number, push in enumerate(pushes):
            for name, store in stores.items():
                began = time.perf_counter()
                step(store, push, out, number)
                if passes:
                    seconds[name].append((time.perf_counter() - began) / len(push[1]))
    stores["tiered"].close()
    return {
        "nanoseconds": {name: round(1e9 * float(np.median(each)), 1) for name, each in seconds.items()},
        "ratios": common.pair_ratios(seconds["tiered"], seconds["memory"]),
    }


def measure_written(directory: str, size: Size) -> dict[str, Any]:
    """Every row has been written once. Then batches, until the log was cleaned of what filled it, and as long again."""
    job = checkpoint_store.make_job(size.written_bytes)
    store: Any = TieredStore(job, 0, directory=directory, cache_bytes=find_cache_bytes(job, CACHE_SHARE))
    source = checkpoint_store.make_filled_store(job)
    for table in range(len(job.tables)):
        tiered_recovery.copy_table(source, store, table)
    floats = source.record_floats(0)
    del source
    pushes = checkpoint_store.batches(job, batch=BATCH, count=BATCHES_MAX)
    out = np.empty(BATCH * sum(table.dim for table in job.tables), np.float32)
    began, turnover = time.monotonic(), store.tier_report()["log_bytes_used"]
    before: dict[str, float] = {}
    start = store.tier_report()["log_bytes_written"]
    for number, ids in enumerate(pushes):
        step(store, checkpoint_store.push_of(job, ids, number % 8), out, number)
        now = store.tier_report()
        written = now["log_bytes_written"] - start
        if not before and (written > turnover or time.monotonic() - began > size.written_seconds_max / 2):
            before, is_settled = now, written > turnover
        if written > 2 * turnover or time.monotonic() - began > size.written_seconds_max:
            break
    found = tiered_figures.count_written(now, before, record_bytes=4 * floats)
    hits, misses = (now[name] - before[name] for name in ("hits", "misses"))
    store.close()
    return {
        **{name: round(value, 3) for name, value in found.items()},
        "record_bytes": 4 * floats,
        "rows": sum(table.rows for table in job.tables),
        "is_settled": is_settled,  # or else rows that only filled the tables went home too
        "miss_rate": 2 * misses / (hits + misses),  # each batch is asked for twice
        "clean_rounds": now["clean_rounds"] - before["clean_rounds"],
    }


# -- what follows --------------------------------------------------------------------------------------------


def compare(report: common.Report) -> None:
    whole = [row for row in report.rows if row["kind"] == "whole"]
    for equal_speed in (False, True):
        if values := tiered_live.overheads(whole, "whole", "memory", equal_speed=equal_speed):
            label = f"whole_cache{'_equal_speed' if equal_speed else ''}"
            report.ratios[label] = common.Ratio.of(values, target=WHOLE_TARGET, better="lower")
    for row in report.rows:
        if row["kind"] == "hits":
            told = row["nanoseconds"]
            ratio = common.Ratio.of(row.pop("ratios"), target=1.0, better="lower")
            row["ratio"] = ratio.to_dict()
            common.console.print(
                f"a row pulled and pushed, all in the cache: {told['tiered']:.1f} ns, {told['memory']:.1f} in memory: "
                f"{ratio} times"
            )
        if row["kind"] == "written":
            report.ratios["written_of_record"] = common.Ratio.of(
                [row["ratio"]], target=tiered_figures.WRITTEN_TARGET, better="lower"
            )
            print_written([row])


def print_written(rows: Sequence[dict[str, Any]]) -> None:
    common.print_table(
        "bytes written for a row that leaves the cache changed",
        ("rows", "record", "log", "home", "state", "times the record", "go home, of those", "bytes per row at home"),
        [
            (
                f"{row['rows']:,}",
                f"{row['record_bytes']}",
                f"{row['log_bytes']:.0f}",
                f"{row['home_bytes']:.0f}",
                f"{row['state_bytes']:.1f}",
                f"{row['ratio']:.2f}" + ("" if row["is_settled"] else " (not settled)"),
                f"{row['home_rows']:.0%}",
                f"{row['home_bytes_per_home_row']:.0f}",
            )
            for row in rows
        ],
    )
