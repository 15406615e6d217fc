"""What does it cost to count which rows are used, while nothing is saved and nobody dies?

Whole trainings take turns: no protection, partial recovery without priority, with MFU and with SSU; saves are so rare
that there is none. Workers do the same work per sample whatever servers count, so throughput is also given at equal
speed of the processors, as in `bench overhead`. Whole runs differ by more than half a percent between each other, so
the same updates are also made in one process, with each way of counting in turns: what an update takes longer, over the
processor time of a sample in all processes, is told exactly.

Memory is what servers say their bookkeeping takes, over the bytes of all rows, against table 1 of the paper for vectors
of as many bytes.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from regrow.bench import checkpoint, checkpoint_figures, checkpoint_store, common, cpr_live, recovery, train
from regrow.core.job import JobSpec
from regrow.core.recall import SAVES_TENANT
from regrow.runtime.priorities import find_largest
from regrow.store.memory import MemoryStore

COST_TARGET = 0.005
MEMORY_SLACK = 1.1
VARIANTS = ("unprotected", "none", "mfu", "ssu")
KINDS = ("none", "mfu", "ssu", "scar")
PERIOD = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    rounds: int
    rows_max: int
    seconds: float
    update_bytes: int
    repetitions: int


FULL = Size(rounds=3, rows_max=1_000_000, seconds=10.0, update_bytes=48_000_000, repetitions=100)
QUICK = Size(rounds=1, rows_max=20_000, seconds=3.0, update_bytes=4_000_000, repetitions=10)


def measure(report: common.Report, *, quick: bool, data: str | None = None) -> None:
    size = QUICK if quick else FULL
    report.rows += measure_updates(size)
    with tempfile.TemporaryDirectory(prefix="regrow-bench-") as name:
        directory = Path(name)
        base = cpr_live.make_config(rows_max=size.rows_max, servers=train.SERVERS)
        rate = cpr_live.find_rate(base, directory)
        for turn in range(size.rounds):
            for variant in VARIANTS[turn % len(VARIANTS) :] + VARIANTS[: turn % len(VARIANTS)]:
                row = train_variant(base, directory, variant, seconds=size.seconds, rate=rate)
                report.rows.append({"kind": "counting", "variant": variant, "round": turn, **row})
                speed = row["samples_per_second"]
                common.console.print(f"{variant}, round {turn + 1} of {size.rounds}: {speed:,.0f} samples/s")
    compare(report)


def train_variant(base: Any, directory: Path, variant: str, *, seconds: float, rate: float) -> dict[str, Any]:
    def change(folder: str) -> dict[str, Any]:
        if variant == "unprotected":
            return {}
        return cpr_live.make_changes("partial", checkpoint.NEVER, priority=variant, folder=folder)

    steps = recovery.steps_of(base, 1.3 * seconds, rate)
    summary, trace, _ = cpr_live.run(base, directory, steps=steps, more=change)
    trace.warmup_seconds = seconds / 4
    known = summary["partial"] or {}
    rows_bytes = summary["table_bytes"] - summary["redundancy_bytes"]
    return {**trace.steady(), "priority_bytes": known.get("priority_bytes"), "rows_bytes": rows_bytes}


# -- in one process ------------------------------------------------------------------------------------------


def make_counting_store(job: JobSpec, kind: str) -> MemoryStore:
    store = MemoryStore(job, checkpoint_store.SERVER)
    while store.add_tenant() < SAVES_TENANT:
        pass
    tables = find_largest([table.rows for table in job.tables])
    store.set_priority(SAVES_TENANT, kind, tables, cpr_live.SHARE, checkpoint_store.SEED, PERIOD)
    return store


def measure_updates(size: Size) -> list[dict[str, Any]]:
    """The same updates with each way to count, in turns: processor seconds more than without priority."""
    job = checkpoint_store.make_job(size.update_bytes)
    stores = {kind: make_counting_store(job, kind) for kind in KINDS}
    found = checkpoint_store.batches(job, batch=train.BATCH, count=checkpoint_store.UPDATES_BATCHES)
    pushes = [checkpoint_store.push_of(job, ids, seed) for seed, ids in enumerate(found)]
    seconds: dict[str, list[float]] = {kind: [] for kind in KINDS}
    for turn in range(size.repetitions + 1):
        for kind in KINDS[turn % len(KINDS) :] + KINDS[: turn % len(KINDS)]:
            began = time.process_time()
            for counts, slots, grads in pushes:
                stores[kind].note_updates(counts, slots)
                stores[kind].update(counts, slots, grads, turn + 1)
            if turn:  # the first time fetches everything into memory
                seconds[kind].append(time.process_time() - began)
    samples = len(pushes) * train.BATCH
    rows_bytes = sum(store_rows * table.dim * 4 for store_rows, table in zip(rows_of(job), job.tables, strict=True))
    return [
        {
            "kind": "counted update",
            "priority": kind,
            "seconds_per_1000_samples": statistics.median(seconds[kind]) / samples * 1000,
            "extras": (np.subtract(seconds[kind], seconds["none"]) / samples * 1000).tolist(),
            "priority_bytes": stores[kind].priority_bytes() - stores["none"].priority_bytes(),
            "count_bytes": stores[kind].count_bytes() - stores["none"].count_bytes(),
            "rows_bytes": rows_bytes,
            "row_bytes": job.tables[0].dim * 4,
        }
        for kind in KINDS
    ]


def rows_of(job: JobSpec) -> list[int]:
    return [table.rows for table in job.tables]


# -- what follows --------------------------------------------------------------------------------------------


def find_published_memory(kind: str, row_bytes: int) -> float:
    """Table 1 of the paper: a copy of every weight, four bytes a row, or four bytes for an eighth of the rows."""
    return {"none": 0.0, "scar": 1.0, "mfu": 4 / row_bytes, "ssu": 4 * cpr_live.SHARE / row_bytes}[kind]


def find_own_bytes(kind: str, row: dict[str, Any]) -> int:
    """What the policy itself needs, as table 1 counts it. Exact counts, which the published ones do without, are told
    apart; of mfu they are all there is."""
    return int(row["priority_bytes"] - (0 if kind == "mfu" else row["count_bytes"]))


def compare(report: common.Report) -> None:
    runs = [row for row in report.rows if row["kind"] == "counting"]
    updates = {row["priority"]: row for row in report.rows if row["kind"] == "counted update"}
    whole = [row["cpu_seconds_per_1000_samples"] for row in runs if row.get("cpu_seconds_per_1000_samples")]
    for kind in ("mfu", "ssu"):
        raw = checkpoint_figures.rounds(runs, kind, "none", checkpoint_figures.measure_lost_share)
        even = checkpoint_figures.rounds(runs, kind, "none", checkpoint_figures.measure_lost_share_equal_speed)
        checkpoint_figures.judge(report, f"counting_{kind}", raw, COST_TARGET)
        checkpoint_figures.judge(report, f"counting_equal_speed_{kind}", even, COST_TARGET)
        if whole:
            shares = [extra / statistics.median(whole) for extra in updates[kind]["extras"]]
            checkpoint_figures.judge(report, f"counting_share_{kind}", shares, COST_TARGET)
    for kind in ("mfu", "ssu", "scar"):
        row = updates[kind]
        published = find_published_memory(kind, row["row_bytes"])
        memory = [find_own_bytes(kind, row) / row["rows_bytes"]]
        checkpoint_figures.judge(report, f"memory_{kind}", memory, round(MEMORY_SLACK * published, 5))
    even = checkpoint_figures.rounds(runs, "none", "unprotected", checkpoint_figures.measure_lost_share_equal_speed)
    report.rows.append({"kind": "partial cost", "lost_equal_speed": checkpoint_figures.spread(even)})
    print_rows(updates, runs, checkpoint_figures.percent(checkpoint_figures.spread(even)))


def print_rows(updates: dict[str, dict[str, Any]], runs: Sequence[dict[str, Any]], partial: str) -> None:
    shown = []
    for kind, row in updates.items():
        extra = 1e6 * float(np.median(row["extras"]))
        live = [each for each in runs if each["variant"] == kind and each["priority_bytes"]]
        share = find_own_bytes(kind, row) / row["rows_bytes"]
        counts = row["count_bytes"] / row["rows_bytes"]
        published = find_published_memory(kind, row["row_bytes"])
        told = f"{live[0]['priority_bytes'] / live[0]['rows_bytes']:.3%}" if live else "-"
        shown.append((kind, f"{extra:+.1f} us", f"{share:.3%}", f"{published:.3%}", f"{counts:.3%}", told))
    common.print_table(
        "counting: more per 1000 samples than without priority, and memory over that of the rows",
        ("priority", "update", "its own memory", "table 1", "exact counts", "in whole runs, all"),
        shown,
    )
    common.console.print(f"partial recovery without priority, against no protection, at equal speed: {partial}")
