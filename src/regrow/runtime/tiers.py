"""The store of a server that keeps its rows on disk, from what it was assigned, and how long it was waited for."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from regrow.core.job import JobSpec
from regrow.core.paging import Paging
from regrow.launch.saving import TieredRows

if TYPE_CHECKING:
    from regrow.store.tiered import TieredStore


def open_tiered(job: JobSpec, server: int, tiers: TieredRows, *, at_epoch: int | None) -> TieredStore:
    """Opens a server's files: as they were at an epoch, or new ones (None), for which its directory must be empty."""
    from regrow.store.tiered import TieredStore  # late: most servers have their rows in memory

    return TieredStore(
        job,
        server,
        directory=tiers.directory,
        cache_bytes=tiers.cache_bytes,
        io=tiers.io,
        io_threads=tiers.threads,
        bytes_max=tiers.bytes_max or 0,
        policy=tiers.policy,
        at_epoch=at_epoch,
        temporary=tiers.temporary,
    )


class DiskWaits:
    """How long requests have waited for rows on disk, all together. Told after every event."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._waiting = 0
        self._at = 0.0

    def look(self, paging: Paging) -> None:
        waiting = paging.requests_waiting
        if not waiting and not self._waiting:
            return
        now = time.perf_counter()
        self.seconds += self._waiting * (now - self._at)
        self._waiting, self._at = waiting, now
