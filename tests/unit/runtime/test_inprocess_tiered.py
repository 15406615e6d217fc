"""Goal: a cluster in one process works with rows on disk as with rows in memory.

Method: the same pulls and pushes to both, with a cache that holds a part of the rows; whoever pulls waits for the disk.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers import job, plan_of, table

from regrow.core.job import JobSpec
from regrow.runtime.inprocess import InProcessCluster
from regrow.store.tiered import TieredStore

ROWS, BATCH, STEPS = 40_000, 600, 40
CACHE_BYTES = 128 << 10  # for about two batches


@pytest.mark.parametrize("mode", ["async", "sync"])
def test_rows_on_disk_train_as_rows_in_memory(tmp_path: Path, mode: str) -> None:
    of = job(table(rows=ROWS, dim=8), servers=2, mode=mode)
    stores: list[Any] = []

    def build(job: JobSpec, server: int, recovering: bool) -> Any:
        stores.append(TieredStore(job, server, directory=tmp_path, cache_bytes=CACHE_BYTES))
        return stores[-1]

    clients = [
        InProcessCluster(servers=2, build_store=build).client(of),
        InProcessCluster(servers=2).client(of),
    ]
    random = np.random.default_rng(3)
    for step in range(1, STEPS + 1):
        rows = np.unique(random.integers(0, ROWS, BATCH))
        pulled = []
        for client in clients:
            ticket = client.pull(plan_of(of, [rows.tolist()]), step=step)
            pulled.append(ticket.wait().copy())
            client.push(ticket, np.full(ticket.rows.size, 0.5, np.float32))
        assert np.array_equal(*pulled), step
    assert sum(store.tier_report()["misses"] for store in stores) > STEPS
    assert sum(store.tier_report()["rows_evicted_dirty"] for store in stores) > 0
    assert sum(store.tier_report()["frames_pinned"] for store in stores) == 0
