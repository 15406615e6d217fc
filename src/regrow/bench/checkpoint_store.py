"""Checkpoints of one server, without training around it: the same code that a server runs, in one process.

How fast a full is stored and loaded, against a plain file of as many bytes on the same disk; what it costs to keep
track of changed rows; and what merging saves a restore. Everything that is stored is loaded again and compared: a
benchmark of a wrong checkpoint would be worth nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from regrow import _kernels
from regrow.bench import common, recovery
from regrow.checkpoint import merger, policy
from regrow.checkpoint.lineage import Graph
from regrow.checkpoint.load import LoadReport
from regrow.checkpoint.manifests import ManifestWriter
from regrow.checkpoint.storage import Storage
from regrow.core.cut import TENANT, Save, Saved
from regrow.core.cuts import WriteManifest
from regrow.core.job import JobSpec, OptimizerSpec, TableSpec
from regrow.core.names import cut_id, piece_name
from regrow.core.wayback import LoadedAll, LoadedRows
from regrow.data.synthetic import CARDINALITIES, SyntheticDataset
from regrow.errors import RegrowError
from regrow.nn.presets import MODELS
from regrow.runtime.checkpoint import Loader, Saver
from regrow.store.memory import MemoryStore

SHAPE, SEED = "kaggle", 1
SERVER = 0  # the only one
BLOCK_BYTES = 16 << 20  # of plain files
FILL_ROWS = 1 << 18
DELTAS = 47
UPDATES_BATCHES = 8  # of tracking: batches that are prepared, and used again and again
FILESYSTEMS_IN_MEMORY = ("tmpfs", "ramfs")


@dataclass(frozen=True, slots=True, kw_only=True)
class Stored:
    """One checkpoint: until it was durable, how long capturing kept the server from its work, and its size."""

    cut: str
    seconds: float
    held_seconds: float
    bytes: int


# -- a server ------------------------------------------------------------------------------------------------


def make_job(size_bytes: int) -> JobSpec:
    """Tables of the usual shape, with about so many bytes of rows in one server."""
    dim, optimizer = MODELS[SHAPE].dim, "rowwise_adagrad"
    row_bytes = 4 * job_of([(1, dim)], optimizer=optimizer).tables[0].record_floats
    rows = recovery.table_rows(CARDINALITIES[SHAPE], total=size_bytes // row_bytes)
    return job_of([(count, dim) for count in rows], optimizer=optimizer)


def job_of(shapes: Sequence[tuple[int, int]], *, optimizer: Any) -> JobSpec:
    """Tables of (rows, dim)."""
    rule = OptimizerSpec(kind=optimizer, learning_rate=0.03)
    tables = tuple(
        TableSpec(name=f"t{index}", rows=rows, dim=dim, init_bound=0.01, optimizer=rule)
        for index, (rows, dim) in enumerate(shapes)
    )
    return JobSpec(tables=tables, servers=1, workers=1, seed=SEED)


def make_filled_store(job: JobSpec) -> MemoryStore:
    """Every row has a value, as after long training, and all are yet to be stored."""
    store = MemoryStore(job, SERVER)
    rng = np.random.default_rng(SEED)
    for table, spec in enumerate(job.tables):
        slots, floats = store.slots(table), store.record_floats(table)
        values = rng.random((min(slots, FILL_ROWS), floats), np.float32)
        values[:, spec.record_floats :] = 0.0  # the rest of a record stays empty, and is not stored
        block = values.reshape(-1)
        for first in range(0, slots, FILL_ROWS):
            count = min(FILL_ROWS, slots - first)
            store.write_records(table, first, count, block[: count * floats])
    store.add_tenant()
    return store


def save(url: str, job: JobSpec, store: MemoryStore, *, step: int, source: str | None = None) -> Stored:
    """As a server and the coordinator do it: capture, store, write the manifest."""
    return asyncio.run(_save(url, job, store, step=step, source=source))


async def _save(url: str, job: JobSpec, store: MemoryStore, *, step: int, source: str | None) -> Stored:
    target = cut_id(step, "bench")
    done: asyncio.Future[Saved] = asyncio.get_running_loop().create_future()
    saver = Saver(url=url, server=SERVER, tell=done.set_result)
    try:
        began = time.perf_counter()
        store.begin_capture(TENANT, source is None)
        begun = time.perf_counter()
        saver.begin(Save(number=1, piece=piece_name(source, target)), job, store)
        saved = await done
        if saved.error:
            raise RegrowError(f"the checkpoint was not stored: {saved.error}")
        cut = WriteManifest(
            number=step, source=source, target=target, marks=(step,), chunks=(saved.chunks,), discard=()
        )
        options: dict[str, Any] = {"extra": {}, "encoding": "raw", "bits": 32, "made_by": "regrow bench"}
        manifests = ManifestWriter(url=url, run="bench", starts=0, **options)
        written = await asyncio.to_thread(manifests.write, job, cut)
        if written.error:
            raise RegrowError(f"the checkpoint was not stored: {written.error}")
        seconds = time.perf_counter() - began
        store.end_capture(True)
        stored, pause = saver.stored_bytes, saver.pause_seconds_max
    finally:
        saver.close()
    return Stored(cut=target, seconds=seconds, held_seconds=max(begun - began, pause), bytes=stored)


def load(url: str, cut: str, job: JobSpec, into: Any = None) -> tuple[float, LoadReport, Any]:
    """(seconds, what was read, the server): as a server does it that starts from a checkpoint. Its tables are there:
    `into`, or in memory."""
    store = MemoryStore(job, SERVER) if into is None else into

    def tell(event: LoadedRows | LoadedAll) -> None:
        if isinstance(event, LoadedRows):
            for table, ids, parts in event.rows:
                store.load_rows(table, ids, parts)

    loader = Loader(url=url, cut=cut, server=SERVER, tell=tell, progress=lambda done, total: None)
    began = time.perf_counter()
    report = asyncio.run(loader.load(job))
    return time.perf_counter() - began, report, store


def check_same(job: JobSpec, one: MemoryStore, other: MemoryStore) -> None:
    """RegrowError unless both hold the same rows, bit by bit."""
    for table in range(len(job.tables)):
        floats = one.record_floats(table)
        for first in range(0, one.slots(table), FILL_ROWS):
            count = min(FILL_ROWS, one.slots(table) - first)
            found = []
            for store in (one, other):
                found.append(np.empty(count * floats, np.float32))
                store.read_records(table, first, count, found[-1])
            if found[0].tobytes() != found[1].tobytes():
                raise RegrowError(f"table {table} did not come back as it was stored")


# -- plain files ---------------------------------------------------------------------------------------------


def plain_write(path: Path, size_bytes: int) -> float:
    """Seconds to write and fsync a file of so many bytes, from a buffer that is ready."""
    block = np.random.default_rng(SEED).bytes(min(BLOCK_BYTES, size_bytes))
    began = time.perf_counter()
    with path.open("wb", buffering=0) as file:
        for first in range(0, size_bytes, BLOCK_BYTES):
            file.write(block[: min(BLOCK_BYTES, size_bytes - first)])
        os.fsync(file.fileno())
    return time.perf_counter() - began


def plain_read(path: Path) -> float:
    """Seconds to read a file from the disk into a buffer that is used again."""
    forget(path)
    block = bytearray(BLOCK_BYTES)
    began = time.perf_counter()
    with path.open("rb", buffering=0) as file:
        while file.readinto(block):
            pass
    return time.perf_counter() - began


def forget(path: Path) -> None:
    """Asks the kernel to drop a file, or all files below a directory, from its memory. They must be on disk."""
    files = [path] if path.is_file() else [each for each in path.rglob("*") if each.is_file()]
    for each in files:
        with each.open("rb") as file:
            if hasattr(os, "posix_fadvise"):
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def filesystem(path: Path, mounts: str | None = None) -> str | None:
    """What kind of file system a directory is on; None where that is not known."""
    if mounts is None:
        with contextlib.suppress(OSError):
            mounts = Path("/proc/self/mounts").read_text(encoding="utf-8", errors="replace")
    best: tuple[int, str | None] = (-1, None)
    for line in (mounts or "").splitlines():
        _, where, kind, *_ = line.split()
        if path.resolve().is_relative_to(where) and len(where) >= best[0]:
            best = (len(where), kind)
    return best[1]


# -- measurements --------------------------------------------------------------------------------------------


def bandwidth(directory: Path, *, size_bytes: int, repetitions: int) -> Iterator[dict[str, Any]]:
    """Rows of figures: a plain file and a full take turns, both written, then both read from the disk."""
    _kernels.tune_malloc(one_heap=True)  # as every server does when it starts
    job = make_job(size_bytes)
    store = make_filled_store(job)
    expected = sum(4 * (table.record_floats + 1) * table.rows for table in job.tables)  # with ids
    plain, folder = directory / "plain", directory / "full"
    for turn in range(repetitions):
        seconds: dict[str, float] = {}
        stored: Stored | None = None
        for side in ("plain", "full") if turn % 2 == 0 else ("full", "plain"):
            if side == "plain":
                seconds["plain_write"] = plain_write(plain, expected)
            else:
                stored = save(str(folder), job, store, step=turn)
        assert stored is not None
        for side in ("plain", "full") if turn % 2 == 0 else ("full", "plain"):
            if side == "plain":
                seconds["plain_read"] = plain_read(plain)
            else:
                forget(folder)
                seconds["load"], report, loaded = load(str(folder), stored.cut, job)
                if turn == 0:
                    check_same(job, store, loaded)
                del loaded
        yield {
            "kind": "bandwidth",
            "round": turn,
            "plain_write_bytes_per_second": round(expected / seconds["plain_write"]),
            "save_bytes_per_second": round(stored.bytes / stored.seconds),
            "plain_read_bytes_per_second": round(expected / seconds["plain_read"]),
            "load_bytes_per_second": round(report.bytes / seconds["load"]),
            "bytes": stored.bytes,
            "held_seconds": round(stored.held_seconds, 5),
        }
        plain.unlink()
        shutil.rmtree(folder)


def tracking(*, size_bytes: int, batch: int, repetitions: int) -> dict[str, Any]:
    """What an update costs with its rows being noted as changed, and without: the same updates in turns."""
    job = make_job(size_bytes)
    stores = [MemoryStore(job, SERVER), MemoryStore(job, SERVER)]
    stores[1].add_tenant()
    pushes = [push_of(job, ids, seed) for seed, ids in enumerate(batches(job, batch=batch, count=UPDATES_BATCHES))]
    rows = sum(len(slots) for _, slots, _ in pushes) / len(pushes)
    seconds: list[list[float]] = [[], []]
    for turn in range(repetitions + 1):
        for side in (0, 1) if turn % 2 == 0 else (1, 0):
            began = time.perf_counter()
            for counts, slots, grads in pushes:
                stores[side].update(counts, slots, grads, turn + 1)
            if turn:  # the first time fetches everything into memory
                seconds[side].append(time.perf_counter() - began)
    ratios = common.Ratio.of(common.pair_ratios(seconds[1], seconds[0]), target=0.0)
    extra = float(np.median(np.subtract(seconds[1], seconds[0])))
    return {
        "kind": "update",
        "rows_per_batch": round(rows, 1),
        "update_ratio": {name: ratios.to_dict()[name] for name in ("value", "low", "high", "pairs", "spread")},
        "extra_seconds_per_1000_samples": extra / len(pushes) / batch * 1000,
        # Of each pair, for the spread.
        "extras": [float(x) / len(pushes) / batch * 1000 for x in np.subtract(seconds[1], seconds[0])],
    }


def batches(job: JobSpec, *, batch: int, count: int) -> Iterator[list[Any]]:
    """By batch: the distinct ids of each table, as skewed as click data is."""
    dataset = SyntheticDataset(rows=[table.rows for table in job.tables], seed=SEED, train_rows=batch * count)
    for each in dataset.train_batches(batch=batch, worker=0, workers=1):
        yield [np.unique(ids) for ids in each.values.reshape(len(job.tables), -1)]


def push_of(job: JobSpec, ids: Sequence[Any], seed: int) -> tuple[Any, Any, Any]:
    """(counts, slots, gradients) that change these rows."""
    counts = np.array([len(each) for each in ids], np.int32)
    slots = [job.layout(table).place(each, table=table)[1] for table, each in enumerate(ids)]
    floats = sum(len(each) * table.dim for each, table in zip(ids, job.tables, strict=True))
    grads = np.random.default_rng(seed).standard_normal(floats, np.float32) * np.float32(0.01)
    return counts, np.concatenate(slots).astype(np.uint32), grads


def restores(
    directory: Path, *, size_bytes: int, batch: int, batches_per_delta: int, repetitions: int
) -> Iterator[dict[str, Any]]:
    """Rows of figures: the same cut, from a full and 47 deltas as they were stored, and from what merging made."""
    job = make_job(size_bytes)
    store = make_filled_store(job)
    folders = {"unmerged": directory / "unmerged", "merged": directory / "merged"}
    url = str(folders["unmerged"])
    cut = save(url, job, store, step=0).cut
    found = batches(job, batch=batch, count=DELTAS * batches_per_delta)
    for step in range(1, DELTAS + 1):
        for number in range(batches_per_delta):
            store.update(*push_of(job, next(found), number), step)
        cut = save(url, job, store, step=step, source=cut).cut
    shutil.copytree(folders["unmerged"], folders["merged"], copy_function=os.link)  # pieces are never changed
    yield merge(folders["merged"])
    for turn in range(repetitions):
        for name, folder in folders.items() if turn % 2 == 0 else reversed(folders.items()):
            forget(folder)
            seconds, report, loaded = load(str(folder), cut, job)
            if turn == 0:
                check_same(job, store, loaded)
            del loaded
            yield {
                "kind": "restore",
                "chain": name,
                "round": turn,
                "seconds": round(seconds, 4),
                "bytes": report.bytes,
                "rows": report.rows,
                "pieces": len(report.pieces),
            }


def merge(folder: Path) -> dict[str, Any]:
    """Folds all that the policy finds due before it has measured anything."""
    problems: list[str] = []
    storage = Storage.open(str(folder))
    choice = policy.choose(policy.Measured())
    before = {piece.name for piece in storage.manifests()[0]}

    def note_problem(event: merger.Event) -> None:
        problems.extend([event.text] if event.kind in ("error", "broken") else [])

    seconds = common.seconds_of(merger.Merger(storage, choice=choice, on_event=note_problem).round)
    manifests, _ = storage.manifests()
    if problems or policy.next_fold(Graph(manifests), choice) is not None:
        raise RegrowError(f"merging failed: {'; '.join(problems) or 'something is still due'}")
    made = [piece for piece in manifests if piece.name not in before]
    return {
        "kind": "merge",
        "s": choice.s,
        "n": choice.n,
        "seconds": round(seconds, 4),
        "folds": len(made),
        "bytes": sum(piece.bytes for piece in made),
    }
