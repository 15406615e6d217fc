"""Measures the engine of the tiered store alone: what a hit costs beside the store in memory, and what a miss takes.

python tools/measure_tiered.py DIRECTORY [--rows N] [--io IO]

Pulls and pushes of 4096 distinct rows (of 1024, where they miss) of 16 weights (rowwise Adagrad, 80 bytes a record), by
chance with a skew. The first ratio is of two stores in one run, by turns; the rest is of one store whose cache holds a
twentieth of the rows.
"""

from __future__ import annotations

import argparse
import select
import shutil
import statistics
import time
from pathlib import Path
from typing import Any

import numpy as np

from regrow.core.job import JobSpec, OptimizerSpec, TableSpec
from regrow.store.memory import MemoryStore
from regrow.store.tiered import TieredStore

DIM = 16
BATCH = 4096
FILL_ROWS = 1 << 16
FRAME_BYTES = 80 + 45
SKEW = 4.0  # of a uniform number to this power: most accesses go to few rows
MISS_BATCH, MISS_SKEW = 1024, 16.0  # of misses: a part of each call, as in training


def make_job(rows: int) -> JobSpec:
    """One table on one server."""
    optimizer = OptimizerSpec(kind="rowwise_adagrad", learning_rate=0.1)
    table = TableSpec(name="t", rows=rows, dim=DIM, k=1, r=0, init_bound=0.1, optimizer=optimizer)
    return JobSpec(tables=(table,), servers=1, workers=1)


def draw(rng: np.random.Generator, rows: int, batch: int = BATCH, skew: float = SKEW) -> tuple[np.ndarray, np.ndarray]:
    """Distinct rows of a batch; which of them are used most is spread over the table."""
    ranks = np.unique((rng.random(3 * batch) ** skew * rows).astype(np.uint64))
    slots = np.unique((ranks * np.uint64(2654435761)) % np.uint64(rows)).astype(np.uint32)
    slots = rng.permutation(slots)[:batch]
    return np.array([len(slots)], np.int32), slots


def step(store: Any, call: tuple[np.ndarray, np.ndarray], grads: np.ndarray) -> None:
    """A pull and a push, as a server does them."""
    counts, slots = call
    floats = len(slots) * DIM
    ticket = store.fetch(counts, slots) if store.is_paged else 0
    while ticket and ticket not in store.poll_fetched():
        if not store.upkeep():  # the log may have to be cleaned before rows can leave
            select.select([store.fetch_fd], [], [], 0.001)
    store.gather(counts, slots, grads[:floats].copy())
    if store.is_paged and not ticket:
        assert store.fetch(counts, slots) == 0
    store.update(counts, slots, grads[:floats], 1)
    if ticket:
        store.release(ticket)
    if store.is_paged:
        store.upkeep()


def measure_hits(directory: Path, rows: int) -> None:
    """Ratio of a step with everything in the cache to one in memory."""
    job, rng = make_job(rows), np.random.default_rng(1)
    memory = MemoryStore(job, 0)
    tiered = TieredStore(job, 0, directory=directory, cache_bytes=rows * FRAME_BYTES + (1 << 20), wipe=True)
    print(f"files: {tiered.io_description}")
    grads = np.ones(BATCH * DIM, np.float32)
    seconds: dict[str, list[float]] = {"memory": [], "tiered": []}
    for number in range(600):
        call = draw(rng, rows)
        for name, store in (("memory", memory), ("tiered", tiered)):
            began = time.perf_counter()
            step(store, call, grads)
            if number >= 200:
                seconds[name].append((time.perf_counter() - began) / len(call[1]))
    found = {name: statistics.median(each) * 1e9 for name, each in seconds.items()}
    print(f"a row pulled and pushed: {found['memory']:.1f} ns in memory, {found['tiered']:.1f} ns tiered, all hits")
    tiered.close()


def fill(store: Any, rows: int) -> None:
    """Every row has changed: one that never did needs no disk."""
    floats = store.record_floats(0)
    for first in range(0, rows, FILL_ROWS):
        count = min(FILL_ROWS, rows - first)
        store.write_records(0, first, count, np.ones(count * floats, np.float32))


def measure_steps(store: Any, calls: list[tuple[np.ndarray, np.ndarray]], grads: np.ndarray) -> tuple[float, float]:
    """Seconds of the clock, and of the processors, all threads together."""
    began, used = time.perf_counter(), time.process_time()
    for call in calls:
        step(store, call, grads)
    return time.perf_counter() - began, time.process_time() - used


def measure_misses(directory: Path, rows: int, io: str) -> None:
    """Rates with a cache of a twentieth, after a while, and what a miss takes beside a store in memory."""
    job, rng = make_job(rows), np.random.default_rng(2)
    store = TieredStore(job, 0, directory=directory, cache_bytes=rows // 20 * FRAME_BYTES, wipe=True, io=io)
    grads = np.ones(BATCH * DIM, np.float32)
    calls = [draw(rng, rows, MISS_BATCH, MISS_SKEW) for _ in range(300)]
    fill(store, rows)
    measure_steps(store, calls[:100], grads)
    before = store.tier_report()
    seconds, used = measure_steps(store, calls[100:], grads)
    now = {name: value - before[name] for name, value in store.tier_report().items()}
    misses, evicted = now["misses"], now["rows_evicted_dirty"]
    read = now["log_rows_read"] + now["home_rows_read"]
    written = now["log_bytes_written"] + now["home_bytes_written"] + now["state_bytes_written"]
    print(
        f"misses: {misses / (misses + now['hits']):.1%}; {misses / seconds:,.0f} a second, {read / seconds:,.0f} read"
    )
    memory = MemoryStore(job, 0)
    fill(memory, rows)
    _, used_memory = measure_steps(memory, calls[100:], grads)
    print(f"files: {store.io_description}")
    print(f"processor time of a miss, more than in memory: {(used - used_memory) / misses * 1e6:.2f} us")
    print(f"rows that left changed: {evicted / seconds:,.0f} a second")
    print(
        f"bytes written for each: {now['log_bytes_written'] / evicted:.0f} to the log, "
        f"{now['home_bytes_written'] / evicted:.0f} at home: {written / evicted / 80:.2f} times the record"
    )
    print(f"memory: {store.memory_bytes / 1e6:.0f} MB when built; in the log {now['rows_in_log']:+,.0f} rows")
    store.close()


def main() -> None:
    """Both, in a directory of their own."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--io", default="auto", help="as --store-io")
    given = parser.parse_args()
    directory = given.directory / "measure-tiered"
    measure_hits(directory, given.rows)
    measure_misses(directory, given.rows, given.io)
    shutil.rmtree(directory)


if __name__ == "__main__":
    main()
