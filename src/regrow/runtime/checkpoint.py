"""A server's rows on their way to storage and back. The manifest of them is written in checkpoint/manifests.py.

`regrow.core.cut` says when; here are the threads. Captured rows are taken a chunk at a time: the capture is read on
the server's own loop, in slices of less than a millisecond, straight into the form of a file; what else the loop has to
do is done between them, and everything else happens in threads. At
most four chunks are in memory, and no byte of them is copied again before it is written. A storage that fails or hangs
costs the checkpoint, never the training.
"""

from __future__ import annotations

import asyncio
import logging
import mmap
import time
from collections.abc import Callable, Collection, Coroutine
from concurrent.futures import Future
from typing import Any, TypeVar

import msgspec
import numpy as np

from regrow.checkpoint.chunks import CHUNK_BYTES, WEIGHTLESS, Chunk, Rows, split
from regrow.checkpoint.direct import Bytes
from regrow.checkpoint.lineage import Graph
from regrow.checkpoint.load import LoadReport, restore
from regrow.checkpoint.manifest import ChunkInfo, Manifest, are_apart, chunk_name, shard_name
from regrow.checkpoint.manifests import table_infos
from regrow.checkpoint.staging import CHUNKS_IN_MEMORY_MAX, Stager
from regrow.checkpoint.storage import Storage
from regrow.core.cut import Save, Saved
from regrow.core.job import JobSpec
from regrow.core.wayback import LoadedAll, LoadedRows
from regrow.errors import CheckpointError, RegrowError
from regrow.store.interface import CapturedRows, TableRows

log = logging.getLogger("regrow.checkpoint")

# Of records kept aside because they changed before they were stored. Above it they are stored first. (How far they may
# grow at all is core.cut.ASIDE_BYTES_MAX.)
ASIDE_FIRST_BYTES = 64 << 20
# Of a chunk that the loop copies before it does something else. Too small: turns cost more than rows. Too large: pulls
# and pushes wait, on a busy machine for many times what the copy takes.
SLICE_BYTES = 1 << 20
# RecordsWritten rows that parity holders do not have yet. Too small: loading waits for each message. Too large: memory.
LOAD_BYTES_MAX = 64 << 20
# Of rows that the server takes at once. Too small: taking turns costs more than the rows. Too large: the loop is kept
# from its work, and the flush of them is larger than a frame may be.
LOAD_PART_BYTES = 4 << 20
# Rows that were loaded are taken by the loop of the same process, and sent to parity holders. If the loop takes none,
# or holders none of what waits for them, for so long, the load fails and the process ends: its successor loads again.
# Too small: a busy machine is taken for a stuck one. Too large: the run waits.
HAND_OVER_SECONDS_MAX = 300.0
BACKLOG_SECONDS_MAX = 300.0
BACKLOG_LOOK_SECONDS = 0.005

T = TypeVar("T")


def shard_of(job: JobSpec, server: int) -> str:
    """The name under which a server writes chunks."""
    return shard_name(server, job.servers, (job.rings, [(table.k, table.r) for table in job.tables]))


def chunk_of(job: JobSpec, captured: list[TableRows], *, weights_only: bool = False) -> Chunk:
    """Captured rows by the names of tables and states."""
    chunk: Chunk = {}
    for table, ids, (weight, *states) in captured:
        spec = job.tables[table]
        if weights_only and spec.name in WEIGHTLESS:
            continue
        names = [] if weights_only else [name for name, _ in spec.optimizer.state_parts(spec.dim)]
        chunk[spec.name] = Rows(ids, weight, dict(zip(names, states, strict=not weights_only)))
    return chunk


def make_ready(size: int) -> list[Bytes]:
    """Takes memory for chunks from the system. Whoever lets go of it gives it back to this process, which keeps it: the
    first touch of a page can take longer than all that is copied to it later, and later it is the server's loop that
    waits."""
    blocks = [np.empty(min(CHUNK_BYTES, size - start), np.uint8) for start in range(0, size, CHUNK_BYTES)]
    for block in blocks:
        block[:: mmap.PAGESIZE] = 0
    return blocks


def chunk_memory(job: JobSpec, rows: int) -> int:
    """Bytes of memory that chunks of so many rows take at a time."""
    row_bytes = 4 * max(1 + table.record_floats for table in job.tables)
    return min(rows * row_bytes, CHUNKS_IN_MEMORY_MAX * CHUNK_BYTES)


class CaptureSaver:
    """Takes one capture after another to storage. What a save is then, and who hears of it, is for the classes below:
    a server's part of a cut here, a save of its own in saves.py."""

    def __init__(
        self,
        *,
        url: str,
        server: int,
        encoding: str = "raw",
        bits: int = 32,
        bytes_per_second: float | None = None,
        weights_only: bool = False,
    ) -> None:
        """`weights_only`: without the optimizer's state."""
        self.pause_seconds_max = 0.0  # the longest that the loop was kept from its work
        self.work_seconds_max = 0.0  # the same, of the processor: without what others were given meanwhile
        self._url = url
        self._server = server
        self._encoding: Any = encoding
        self._bits: Any = bits
        self._bytes_per_second = bytes_per_second
        self._weights_only = weights_only
        self._stager: Stager | None = None
        self._ready_bytes = 0  # of memory that was made ready for chunks
        self._ready: list[Bytes] = []  # the same, as long as no chunk takes its place
        self._number = 0
        self._piece = ""
        self._task: asyncio.Task[None] | None = None

    @property
    def stored_bytes(self) -> int:
        return 0 if self._stager is None else self._stager.progress.stored_bytes

    async def get_ready(self, size: int) -> None:
        """Has so much memory for chunks, taken in a thread. Best before training: all pages of a first full in the
        middle of it cost everybody else their processors."""
        if size > self._ready_bytes:
            self._ready_bytes = size
            blocks = await asyncio.to_thread(make_ready, size)
            self._ready = [] if self._number else blocks  # chunks are being made already

    def give_up(self, number: int) -> None:
        """Nothing more is taken of this capture: it is over."""
        if self._number == number:
            self._number = 0
            if self._stager is not None and self._piece:  # what waits for a slow storage is not wanted any more
                asyncio.get_running_loop().run_in_executor(None, self._stager.abort, self._piece)

    def close(self) -> None:
        self._number = 0
        if self._stager is not None:
            self._stager.close()

    def _start(
        self, number: int, piece: str, work: Callable[[], Coroutine[Any, Any, T]], tell: Callable[[T | None, str], None]
    ) -> None:
        """Begins to store a capture: `work` does it, and `tell` hears what came of it, or why nothing did."""
        self._number, self._piece = number, piece
        self._task = asyncio.get_running_loop().create_task(self._save(number, work, tell, self._task))

    async def _save(
        self,
        number: int,
        work: Callable[[], Coroutine[Any, Any, T]],
        tell: Callable[[T | None, str], None],
        before: asyncio.Task[None] | None,
    ) -> None:
        if before is not None:
            await before  # of a capture that was given up
        result, problem = None, ""
        try:
            result = await work()
        except RegrowError as error:
            log.warning("save %d: %s", number, error.message)
            problem = error.message
        except Exception as error:
            log.exception("save %d", number)
            problem = repr(error)
        if self._number == number:
            tell(result, problem)

    async def _store(
        self,
        number: int,
        piece: str,
        job: JobSpec,
        store: CapturedRows,
        *,
        look_at: Callable[[Chunk], None] | None = None,
        tables: Collection[str] | None = None,
    ) -> list[ChunkInfo]:
        """Stores all captured rows in that directory, or those of some tables. `look_at` sees every chunk that is
        stored, in order, in a thread."""
        if self._stager is None:
            self._stager = await asyncio.to_thread(
                lambda: Stager(Storage.open(self._url), bytes_per_second=self._bytes_per_second)
            )
        stager = self._stager
        shard = shard_of(job, self._server)
        await self.get_ready(chunk_memory(job, store.capture_left()))
        self._ready = []
        try:
            count = 0
            while self._number == number:
                if not store.capture_left():
                    return await asyncio.to_thread(stager.finish, piece)
                await asyncio.to_thread(stager.wait_for_room, piece)
                if self._number != number:
                    break
                captured = await self._take_chunk(number, store)
                if captured is None:
                    break
                chunk = chunk_of(job, captured, weights_only=self._weights_only)
                chunk = {name: rows for name, rows in chunk.items() if tables is None or name in tables}
                del captured
                if chunk and look_at is not None:
                    await asyncio.to_thread(look_at, chunk)
                if chunk:
                    name = chunk_name(shard, count, self._encoding)
                    count += 1
                    stager.submit(piece, name, chunk, encoding=self._encoding, bits=self._bits, shard=shard)
                del chunk  # or it would stay in memory beside those that may
            raise CheckpointError("it was given up")
        except BaseException:
            await asyncio.to_thread(stager.abort, piece)
            raise

    async def _take_chunk(self, number: int, store: CapturedRows) -> list[TableRows] | None:
        """The next chunk, copied in slices. None: it was given up meanwhile."""
        aside_first = store.capture_side_bytes() > ASIDE_FIRST_BYTES
        while True:
            began, worked = time.perf_counter(), time.thread_time()
            more = store.prepare_chunk(CHUNK_BYTES, aside_first, SLICE_BYTES)
            self.pause_seconds_max = max(self.pause_seconds_max, time.perf_counter() - began)
            self.work_seconds_max = max(self.work_seconds_max, time.thread_time() - worked)
            if not more:
                return store.capture_chunk(CHUNK_BYTES, aside_first)
            await asyncio.sleep(0)
            if self._number != number:
                return None


class Saver(CaptureSaver):
    """Stores what a server has captured for a cut. `tell` hears how it ended, on the loop."""

    def __init__(self, *, tell: Callable[[Saved], None], **options: Any) -> None:
        super().__init__(**options)
        self._tell = tell

    def begin(self, save: Save, job: JobSpec, store: CapturedRows) -> None:
        def tell(infos: list[ChunkInfo] | None, error: str) -> None:
            chunks = "" if infos is None else msgspec.json.encode(infos).decode()
            self._tell(Saved(number=save.number, chunks=chunks, error=error))

        self._start(save.number, save.piece, lambda: self._store(save.number, save.piece, job, store), tell)


class Loader:
    """Brings one server's rows back from a checkpoint, in a thread; the server is told on its loop, in order."""

    def __init__(
        self,
        *,
        url: str,
        cut: str,
        server: int,
        tell: Callable[[LoadedRows | LoadedAll], None],
        progress: Callable[[int, int], None],
        backlog_bytes: Callable[[], int] = lambda: 0,
    ) -> None:
        self._backlog_bytes = backlog_bytes
        self._url = url
        self._cut = cut
        self._server = server
        self._tell = tell
        self._progress = progress

    async def load(self, job: JobSpec) -> LoadReport:
        loop = asyncio.get_running_loop()
        mine = shard_of(job, self._server)

        def give(event: LoadedRows | LoadedAll) -> Future[None]:
            self._wait_for_holders()
            return hand_over(loop, self._tell, event)

        def run() -> LoadReport:
            storage = Storage.open(self._url)
            manifests, _ = storage.manifests()
            plan, _ = Graph(manifests).restore_plan(self._cut)
            marks = plan.target.marks
            check_fits(plan.pieces[-1], job)

            def apply(_: Manifest, chunk: Chunk) -> None:
                taken = [give(loaded_rows(job, part)) for part in split([chunk], LOAD_PART_BYTES)]
                for each in taken:
                    take(each)  # meanwhile the next chunks are read

            report = restore(
                storage,
                plan,
                apply,
                shard_filter=lambda shard: shard == mine or not are_apart([shard, mine]),
                progress=self._progress,
            )
            take(give(LoadedAll(marks=marks)))
            return report

        return await asyncio.to_thread(run)

    def _wait_for_holders(self) -> None:
        """Parity holders may be slower than storage. As long as they take anything, they are waited for."""
        least, since = self._backlog_bytes(), time.monotonic()
        while (backlog := self._backlog_bytes()) > LOAD_BYTES_MAX:
            if backlog < least:
                least, since = backlog, time.monotonic()
            elif time.monotonic() - since > BACKLOG_SECONDS_MAX:
                raise CheckpointError(f"parity holders took no loaded rows for {BACKLOG_SECONDS_MAX:g} s")
            time.sleep(BACKLOG_LOOK_SECONDS)


def hand_over(loop: asyncio.AbstractEventLoop, tell: Callable[[T], None], event: T) -> Future[None]:
    """Tells the loop, from a thread. What comes of it tells when the loop has taken it, or what it raised."""
    done: Future[None] = Future()

    def run() -> None:
        try:
            tell(event)
            done.set_result(None)
        except BaseException as error:
            done.set_exception(error)

    loop.call_soon_threadsafe(run)
    return done


def take(done: Future[None]) -> None:
    """Waits until the loop has what it was handed."""
    try:
        done.result(HAND_OVER_SECONDS_MAX)
    except TimeoutError:
        raise CheckpointError(f"the server took no loaded rows for {HAND_OVER_SECONDS_MAX:g} s") from None


def check_fits(piece: Manifest, job: JobSpec) -> None:
    """CheckpointError unless this job can go on from that state."""
    stored = {table.name: table for table in piece.tables}
    if differ := sorted(stored.keys() ^ {table.name for table in job.tables}):
        raise CheckpointError(f"{piece.name}: tables differ from those of this run: {', '.join(differ[:5])}")
    for info in table_infos(job):
        have = stored[info.name]
        if have != info:
            text = ", ".join(
                f"{name} {getattr(have, name)} there, {getattr(info, name)} here"
                for name in ("rows", "dim", "states", "init_bound", "index")
                if getattr(have, name) != getattr(info, name)
            )
            raise CheckpointError(f"{piece.name}: table {info.name} is another one: {text}")
    if piece.seed != job.seed:  # rows that were never touched are computed from it
        raise CheckpointError(
            f"{piece.name}: made with seed {piece.seed}, this run has {job.seed}", hint=f"--seed {piece.seed}"
        )
    workers, mode = piece.target.job.get("workers"), piece.target.job.get("mode")
    if (workers, mode) != (job.workers, job.mode):
        raise CheckpointError(
            f"{piece.name}: made by {workers} workers in mode {mode}, this run has {job.workers} in mode {job.mode}",
            hint="who has seen which data cannot be told otherwise; export the model to start anew from its weights",
        )


def loaded_rows(job: JobSpec, chunk: Chunk) -> LoadedRows:
    """The rows of a chunk, as a server takes them. Views."""
    found: list[TableRows] = []
    for table, spec in enumerate(job.tables):
        if (rows := chunk.get(spec.name)) is not None:
            states = spec.optimizer.state_parts(spec.dim)
            found.append((table, rows.ids, [rows.weight, *(rows.states[name] for name, _ in states)]))
    return LoadedRows(rows=found)
