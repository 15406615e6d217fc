"""Going back to a checkpoint in the files of one server, against loading a full checkpoint of the same rows.

Both in one process, by the code that a server runs: the store opens its files at an epoch, which reads the log and a
bit per row; the loader reads every row, and puts it into files that are made anew, as these rows do not fit the memory.
How long it takes where they do is shown beside it. What comes back is compared, bit by bit. Files are dropped from the
page cache before each. Starting processes takes the same time in all, and is left out.
"""

from __future__ import annotations

import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from regrow.bench import checkpoint_store, common, tiered_live
from regrow.core.job import JobSpec
from regrow.errors import RegrowError
from regrow.store.memory import MemoryStore
from regrow.store.tiered import TieredStore

TARGET, AIM = 5.0, 20.0
CACHE_SHARE, CACHE_BYTES_LEAST = 0.05, 4 << 20
DISK_SECONDS_MAX = 120.0
BATCHES = 60  # trained after the fill, so that some rows are in the log
BATCH = 512


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """How much is measured."""

    bytes: int  # of rows
    repetitions: int


# A log has a bound, and a server of this size is some times as large.
FULL = Size(bytes=1_200_000_000, repetitions=2)
QUICK = Size(bytes=8_000_000, repetitions=1)


def measure(report: common.Report, setting: tiered_live.Setting) -> None:
    size = QUICK if setting.quick else FULL
    job = checkpoint_store.make_job(size.bytes)
    memory = checkpoint_store.make_filled_store(job)
    with tempfile.TemporaryDirectory(prefix="regrow-bench-", dir=setting.place("disk").directory) as name:
        rows, full = Path(name) / "rows", Path(name) / "full"
        epoch = fill(job, memory, rows)
        cut = checkpoint_store.save(str(full), job, memory, step=1).cut
        for turn in range(size.repetitions):
            row = measure_turn(job, memory, rows, full, epoch=epoch, cut=cut, compares=turn == 0)
            report.rows.append({"kind": "back", "round": turn, **row})
    compare(report)


def fill(job: JobSpec, memory: MemoryStore, directory: Path) -> int:
    """The same rows in files, and a checkpoint of them; then both train a little more, and it is made again."""
    store = open_store(job, directory, at_epoch=None)
    for table in range(len(job.tables)):
        copy_table(memory, store, table)
    commit(store)
    for number, ids in enumerate(checkpoint_store.batches(job, batch=BATCH, count=BATCHES)):
        counts, slots, grads = checkpoint_store.push_of(job, ids, number)
        fetch(store, counts, slots)
        for each in (memory, store):
            each.update(counts, slots, grads, number + 1)
        store.upkeep()
    epoch = commit(store)
    store.close()
    return epoch


def open_store(job: JobSpec, directory: Path, *, at_epoch: int | None) -> Any:
    """With the same cache each time: how large the log may be follows from it."""
    row_bytes = sum(4 * table.record_floats * table.rows for table in job.tables)
    cache_bytes = int(CACHE_SHARE * row_bytes) + CACHE_BYTES_LEAST
    return TieredStore(job, checkpoint_store.SERVER, directory=directory, cache_bytes=cache_bytes, at_epoch=at_epoch)


def copy_table(source: MemoryStore, target: Any, table: int) -> None:
    floats = source.record_floats(table)
    for first in range(0, source.slots(table), checkpoint_store.FILL_ROWS):
        count = min(checkpoint_store.FILL_ROWS, source.slots(table) - first)
        records = np.empty(count * floats, np.float32)
        source.read_records(table, first, count, records)
        target.write_records(table, first, count, records)


def fetch(store: Any, counts: Any, slots: Any) -> None:
    """Until all these rows are in memory; nobody else asks, so they stay there."""
    ticket = store.fetch(counts, slots)
    deadline = time.monotonic() + DISK_SECONDS_MAX
    while ticket and ticket not in store.poll_fetched():
        if time.monotonic() > deadline:
            raise RegrowError("the disk does not answer")
        store.upkeep()
    if ticket:
        store.release(ticket)


def commit(store: Any) -> int:
    """A checkpoint, until it is the one to go back to."""
    epoch = store.begin_epoch()
    deadline = time.monotonic() + DISK_SECONDS_MAX
    while store.poll_complete() < epoch:
        if time.monotonic() > deadline:
            raise RegrowError("the checkpoint is not complete: the disk is too slow")
        store.upkeep()
    store.commit_epoch(epoch)
    return int(epoch)


def measure_turn(
    job: JobSpec, memory: MemoryStore, rows: Path, full: Path, *, epoch: int, cut: str, compares: bool
) -> dict[str, Any]:
    checkpoint_store.forget(rows)
    began = time.perf_counter()
    store = open_store(job, rows, at_epoch=epoch)
    back_seconds = time.perf_counter() - began
    counted = store.tier_report()
    if compares:
        checkpoint_store.check_same(job, memory, store)
    store.close()
    checkpoint_store.forget(full)
    with tempfile.TemporaryDirectory(dir=rows.parent) as folder:
        anew = open_store(job, Path(folder), at_epoch=None)
        load_seconds, loaded, _ = checkpoint_store.load(str(full), cut, job, into=anew)
        anew.close()
    checkpoint_store.forget(full)
    memory_seconds, in_memory, _ = checkpoint_store.load(str(full), cut, job)
    return {
        "back_seconds": round(back_seconds, 5),
        "back_bytes": counted["log_bytes_read"] + counted["home_bytes_read"],
        "load_seconds": round(load_seconds, 5),
        "load_bytes": loaded.bytes,
        "memory_seconds": round(memory_seconds, 5),
        "memory_bytes": in_memory.bytes,
        "rows": sum(table.rows for table in job.tables),
    }


def compare(report: common.Report) -> None:
    rows = [row for row in report.rows if row["kind"] == "back"]
    faster = [row["load_seconds"] / row["back_seconds"] for row in rows]
    report.ratios["recovery_load_over_back"] = common.Ratio.of(faster, target=TARGET)
    report.ratios["recovery_load_over_back_aim"] = common.Ratio.of(faster, target=AIM)
    common.print_table(
        f"{rows[0]['rows']:,} rows come back",
        ("", "seconds", "read"),
        [
            (
                label,
                ", ".join(f"{row[f'{name}_seconds']:.3f}" for row in rows),
                f"{rows[0][f'{name}_bytes'] / 1e6:,.1f} MB",
            )
            for name, label in (
                ("back", "from the files"),
                ("load", "from a full checkpoint, to files"),
                ("memory", "from a full checkpoint, to memory"),
            )
        ],
    )
