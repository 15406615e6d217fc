"""Jobs in several layouts, stores with rows that no other has, and checkpoints of them in a directory."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
from helpers import job, table

from regrow.checkpoint.manifests import ManifestWriter
from regrow.core.cut import Save, Saved
from regrow.core.cuts import WriteManifest
from regrow.core.job import JobSpec
from regrow.runtime.checkpoint import Saver
from regrow.store.memory import MemoryStore

NAME = "0000000007-abcdef.full"
LAYOUTS = [
    {"servers": 1},
    {"servers": 3},
    {"servers": 5, "k": 4, "r": 1},
    {"servers": 5, "k": 2, "r": 2},
    {"servers": 6, "k": 2, "r": 1, "rings": 2},
    {"servers": 2, "k": 1, "r": 1},
]


def made(*, servers: int, k: int = 1, r: int = 0, rings: int = 1, **options: Any) -> JobSpec:
    """Tables whose rows are no multiple of anything, with one, two and no optimizer states."""
    tables = (
        table("a", rows=101, dim=3, kind="adam", bound=0.5, k=k, r=r),
        table("b", rows=7, dim=4, kind="rowwise_adagrad", bound=0.5, k=k, r=r),
        table("c", rows=53, dim=1, kind="sgd", bound=0.5, k=1, r=r),
    )
    return job(*tables, servers=servers, rings=rings, **options)


def strides_of(of: JobSpec) -> list[int]:
    return [-(-spec.record_floats // 4) * 4 for spec in of.tables]


def records_of(of: JobSpec) -> list[np.ndarray[Any, Any]]:
    """A record for every row that no other has."""
    rng = np.random.default_rng(1)
    return [rng.random((spec.rows, spec.record_floats), np.float32) for spec in of.tables]


def whole(of: JobSpec, store: MemoryStore, table: int) -> np.ndarray[Any, Any]:
    """All records that a server has of a table."""
    found = np.empty((store.slots(table), strides_of(of)[table]), np.float32)
    store.read_records(table, 0, len(found), found.reshape(-1))
    return found


def store_of(of: JobSpec, server: int, records: list[np.ndarray[Any, Any]] | None) -> MemoryStore:
    store = MemoryStore(of, server, False)
    store.add_tenant()
    if records is not None:
        for index, spec in enumerate(of.tables):
            owners, _ = of.layout(index).place(np.arange(spec.rows), table=index)
            mine = np.flatnonzero(owners == server)
            widths = [spec.dim, *(width for _, width in spec.optimizer.state_parts(spec.dim))]
            parts = np.split(records[index][mine], np.cumsum(widths)[:-1], axis=1)
            store.load_rows(index, mine.astype(np.uint32), [np.ascontiguousarray(part) for part in parts])
    return store


def save(url: str, of: JobSpec, stores: list[MemoryStore], *, piece: str) -> list[Saved]:
    async def one(server: int, store: MemoryStore) -> Saved:
        done: asyncio.Future[Saved] = asyncio.get_running_loop().create_future()
        saver = Saver(url=url, server=server, tell=done.set_result)
        store.begin_capture(0, True)
        saver.begin(Save(number=1, piece=piece), of, store)
        saved = await asyncio.wait_for(done, 30)
        await asyncio.to_thread(saver.close)
        return saved

    async def main() -> list[Saved]:
        return [await one(server, store) for server, store in enumerate(stores)]

    return asyncio.run(main())


def publish_piece(url: str, of: JobSpec, saved: list[Saved]) -> Any:
    chunks = tuple(each.chunks for each in saved)
    cut = WriteManifest(number=1, source=None, target="0000000007-abcdef", marks=(7,), chunks=chunks, discard=())
    return writer(url).write(of, cut)


def writer(url: str, *, run: str = "a run", starts: int = 0, created: float = 1000.0) -> ManifestWriter:
    options: dict[str, Any] = {"extra": {"x": 1}, "encoding": "raw", "bits": 32, "made_by": "a test"}
    return ManifestWriter(url=url, run=run, starts=starts, clock=lambda: created, **options)
