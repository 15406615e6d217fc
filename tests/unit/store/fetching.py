"""A paged store as one that is not: every call fetches its rows first, so that tests of rows need not know.

Of `FetchingStore` nothing stays in memory from call to call (policy `none`), so every value that is compared was on
disk meanwhile. Of `HoldingStore` everything does: its cache has a frame for every row.
"""

from __future__ import annotations

import select
import shutil
import tempfile
import time
import weakref
from typing import Any

import msgspec
import numpy as np

from regrow.core.job import JobSpec
from regrow.store.tiered import TieredStore

WAIT_SECONDS_MAX = 60.0


def wait_for(store: Any, ticket: int) -> None:
    """Until the rows of a ticket are in memory."""
    deadline = time.monotonic() + WAIT_SECONDS_MAX
    while ticket and ticket not in store.poll_fetched():
        readable, _, _ = select.select([store.fetch_fd], [], [], 1.0)
        if not readable:  # the log may have to be cleaned before rows can leave, and only upkeep does that
            store.upkeep()
        assert time.monotonic() < deadline, f"nothing came from the disk: {store.tier_report()}"


def do_upkeep(store: Any, until: Any) -> None:
    """All there is to be done, until something is so."""
    for _ in range(100_000):
        if not store.upkeep() and until():
            return
        select.select([store.fetch_fd], [], [], 0.001)
    raise AssertionError(f"it never came: {store.tier_report()}")


class FetchingStore:
    """What is not a call about rows in memory is the store's own."""

    policy = "none"

    def __init__(self, job: JobSpec, server: int, recovering: bool = False) -> None:
        assert not recovering, "a paged store does not come back"
        bare = msgspec.structs.replace(job, tables=tuple(msgspec.structs.replace(table, r=0) for table in job.tables))
        folder = tempfile.mkdtemp(prefix="regrow-tiered-")
        self._store = TieredStore(bare, server, directory=folder, cache_bytes=1 << 20, policy=self.policy, io="threads")
        weakref.finalize(self, shutil.rmtree, folder, True)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def gather(self, counts: np.ndarray, slots: np.ndarray, out: np.ndarray) -> None:
        with_rows(self._store, counts, slots, lambda: self._store.gather(counts, slots, out))

    def update(self, counts: np.ndarray, slots: np.ndarray, grads: np.ndarray, step: int, rates: Any = ()) -> None:
        with_rows(self._store, counts, slots, lambda: self._store.update(counts, slots, grads, step, rates))


class HoldingStore(FetchingStore):
    """All rows fit the cache of these small jobs, and none leaves it."""

    policy = "lru"


def with_rows(store: TieredStore, counts: np.ndarray, slots: np.ndarray, call: Any) -> None:
    ticket = store.fetch(counts, slots)
    wait_for(store, ticket)
    try:
        call()
    finally:
        if ticket:
            store.release(ticket)
        while store.upkeep():
            pass
