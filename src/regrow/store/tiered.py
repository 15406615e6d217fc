"""Rows on disk with a cache in memory: the kernels' `TieredShard` as a store that is paged.

What the methods promise is in `regrow.store.interface`, how the files are made in docs/tiered.md. Here are the
directory of a server, who may use it, and whose rows are in it. The rule to keep: no loop over rows.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np

from regrow import _kernels
from regrow.core.bitmaps import to_words
from regrow.core.job import JobSpec
from regrow.errors import StoreDamaged, StoreFull, UserError
from regrow.store.interface import (
    Float32Array,
    Int32Array,
    PagedRows,
    Part,
    Store,
    TableRows,
    UInt32Array,
    UInt64Array,
)

FORMAT = 2  # of the files; another one is refused
TEMPORARY = "temporary"  # in job.json: only the run that made them could use these files
IO_THREADS = (
    4  # where the kernel has no queue. Too few: reads wait for each other; too many: they cost more than they read
)


# Of a worker, in the cache: the batch that it computes, the next, and the one that is read ahead. Too few: what was
# read ahead has left before it is pulled, and is read again. Too many: small caches are not read ahead for.
BATCHES_AT_ONCE = 3
# Calls of `fetch` for each worker, within which a row that came for a batch of it has been pulled and pushed. A batch
# has three; others are pulled before it is pushed, and a worker may be ahead of another. Too few: what was read ahead
# leaves before it is pulled. Too many: caches in which rows stay for less than four times as long keep to the order of
# the last use.
CALLS_AT_ONCE = 24


class TieredStore:
    """All tables of one server in files of a directory; see `regrow.store.interface.PagedRows`.

    Without `at_epoch` all rows have their initial values; a directory that has the rows of the same job already is then
    refused, unless `wipe`. With it, rows are as they were at that checkpoint. `temporary`: nobody will go back to these
    files; of those who find them, others who make such files may delete them.
    """

    def __init__(
        self,
        job: JobSpec,
        server: int,
        *,
        directory: str | Path,
        cache_bytes: int,
        io: str = "auto",
        io_threads: int = IO_THREADS,
        bytes_max: int = 0,
        policy: str = "lru",
        at_epoch: int | None = None,
        wipe: bool = False,
        temporary: bool = False,
    ) -> None:
        self._directory = Path(directory) / f"server-{server}"
        if with_parities := [index for index, table in enumerate(job.tables) if table.r]:
            raise UserError(
                f"rows on disk have no parities, and table {with_parities[0]} has r = {job.tables[with_parities[0]].r}",
                hint="use --store memory, or a protection without parities",
            )
        identity = describe_job(job, server)
        self._lock = lock_directory(self._directory)
        try:
            if temporary and at_epoch is None:
                clear_temporary(self._directory)
            check_identity(self._directory, identity, is_new=at_epoch is None, wipe=wipe)
            self._shard = _kernels.TieredShard(
                [describe_table(job, index) for index in range(len(job.tables))],
                servers=job.servers,
                server=server,
                rings=job.rings,
                directory=str(self._directory),
                io=io,
                threads=io_threads,
                wipe=at_epoch is None,
                fingerprint=fingerprint(identity),
                cache_bytes=cache_bytes,
                bytes_max=bytes_max,
                policy=policy,
                patience=CALLS_AT_ONCE * job.workers,
                at_epoch=at_epoch,
            )
            if at_epoch is None:
                write_identity(self._directory, {**identity, TEMPORARY: temporary})
        except BaseException:
            os.close(self._lock)
            raise
        self._tables = len(job.tables)
        self.rows_ahead_max = self._count_ahead(policy)
        self._job, self._server, self._captures = job, server, False
        self._dims = np.array([table.dim for table in job.tables], np.int32)
        states = [table.optimizer.state_parts(table.dim) for table in job.tables]
        self._widths = [[table.dim, *(n for _, n in parts)] for table, parts in zip(job.tables, states, strict=True)]
        self._bind()

    def _count_ahead(self, policy: str) -> int:
        frames = int(self._shard.tier_report()["frames"])
        fits = frames >= sum(self._shard.slots(table) for table in range(self._tables))
        return 0 if self._shard.is_mapped or fits or policy != "lru" else frames // BATCHES_AT_ONCE

    def _bind(self) -> None:
        """Most names are the shard's own methods, bound once: calls of every step have no frame of Python between."""
        self.memory_bytes: int = self._shard.memory_bytes
        self.redundancy_bytes = 0
        self.is_paged = True
        self.slots = self._shard.slots
        self.blocks = self._shard.blocks
        self.record_floats = self._shard.record_floats
        self.gather = self._shard.gather
        self.update = self._shard.update
        self.assign_untouched = self._shard.assign_untouched
        self.read_records = self._shard.read_records
        self.write_records = self._shard.write_records
        self.load_rows = self._shard.load_rows
        self.touched = self._shard.touched
        self.add_tenant = self._shard.add_tenant
        self.dirty_rows = self._shard.dirty_rows
        self.capture_left = self._shard.capture_left
        self.capture_side_bytes = self._shard.capture_side_bytes
        self.note_updates = self._shard.note_updates
        self.updates_noted = self._shard.updates_noted
        self.set_updates_noted = self._shard.set_updates_noted
        self.updates_uncaptured = self._shard.updates_uncaptured
        self.fetch_fd: int = self._shard.fetch_fd
        self.fetch = self._shard.fetch
        self.poll_fetched = self._shard.poll_fetched
        self.release = self._shard.release
        self.upkeep = self._shard.upkeep
        self.begin_epoch = self._shard.begin_epoch
        self.poll_complete = self._shard.poll_complete
        self.hasten = self._shard.hasten
        self.commit_epoch = self._shard.commit_epoch
        self.tier_report = self._shard.tier_report

    @property
    def io_description(self) -> str:
        """How the files are read and written, and why so."""
        return self._shard.io_description

    def close(self) -> None:
        """Lets go of the directory. No method may be called after it."""
        for name in [name for name in vars(self) if name != "_lock"]:
            delattr(self, name)  # the shard goes with the last name that is bound to it
        os.close(self._lock)

    def sum_pushes(self, parts: list[Part]) -> Part:
        """See `WorkerRows.sum_pushes`."""
        return _kernels.sum_pushes(self._dims, parts)

    def begin_capture(self, tenant: int, full: bool) -> None:
        """See `CapturedRows.begin_capture`."""
        self._shard.begin_capture(tenant, full)
        self._captures = True

    def end_capture(self, durable: bool) -> None:
        """See `CapturedRows.end_capture`."""
        self._shard.end_capture(durable)
        self._captures = False

    def capture_chunk(self, bytes_max: int, aside_first: bool = False) -> list[TableRows]:
        """See `CapturedRows.capture_chunk`. The arrays are views of the one block of words that the kernel wrote."""
        counts, words = self._shard.capture_chunk(bytes_max, aside_first)
        floats, at = words.view(np.float32), 0
        found: list[TableRows] = []
        for table, count in enumerate(counts.tolist()):
            if not count:
                continue
            ids, at = words[at : at + count], at + count
            parts = []
            for width in self._widths[table]:
                parts.append(floats[at : at + count * width].reshape(count, width))
                at += count * width
            found.append((table, ids, parts))
        return found

    # ---- priorities: all rows are taken

    def set_priority(self, tenant: int, kind: str, tables: Sequence[int], share: float, seed: int, period: int) -> None:
        """See `PrioritizedRows.set_priority`; only `none` is possible."""
        self._shard.check_tenant(tenant)
        if kind != "none":
            raise ValueError(f"rows on disk have no priorities: {kind!r} is not possible")

    def capture_skipped(self) -> int:
        """See `PrioritizedRows.capture_skipped`."""
        return 0

    def priority_bytes(self) -> int:
        """See `PrioritizedRows.priority_bytes`."""
        return 0

    # ---- parities, and rows that come back: there are none

    def find_slots(self, table: int, ids: UInt32Array) -> UInt64Array:
        """See `WholeRecords.find_slots`."""
        rows = self._job.tables[table].rows
        if ids.size and int(ids.max()) >= rows:
            raise IndexError(f"there is no row {int(ids.max())} in table {table}")
        servers, slots = self._job.layout(table).place(ids, table=table)
        return to_words(slots[servers == self._server], self.slots(table))

    def choose_captured(self, rows: int) -> bool:
        """See `CapturedRows.choose_captured`: without priorities a capture has all rows."""
        if rows < 1 or not self._captures:
            raise ValueError("there is no capture to choose rows for" if rows > 0 else f"{rows} rows at a time")
        return False

    def prepare_chunk(self, bytes_max: int, aside_first: bool, slice_bytes: int) -> bool:
        """See `CapturedRows.prepare_chunk`. Rows are read when the chunk is asked for, in one go."""
        if bytes_max < 1 or slice_bytes < 1 or not self._captures:
            raise ValueError(f"no chunk of {bytes_max} bytes can be made in slices of {slice_bytes}")
        return False

    def updates_skipped(self) -> int:
        """See `PrioritizedRows.updates_skipped`."""
        return 0

    def count_bytes(self) -> int:
        """See `PrioritizedRows.count_bytes`."""
        return 0

    def parity_void(self, table: int, q: int) -> None:
        """See `HeldParities.parity_void`."""
        raise ValueError("rows on disk have no parities")

    def pending_rows(self, group: int) -> int:
        """See `FlushedRows.pending_rows`."""
        refuse_group(group)

    def pending_bytes(self) -> int:
        """See `FlushedRows.pending_bytes`."""
        return 0

    def take_flush(self, group: int, keep: bool = False) -> Part:
        """See `FlushedRows.take_flush`."""
        refuse_group(group)

    def published(self, counts: Int32Array, slots: UInt32Array, out: Float32Array) -> None:
        """See `FlushedRows.published`: nobody asks, where nobody holds parities."""
        raise ValueError("rows on disk have no parities")

    def next_touched(self, table: int, group: int, block_first: int, rows_max: int) -> tuple[UInt32Array, int]:
        """See `FlushedRows.next_touched`."""
        refuse_group(group)

    def parity_apply(self, source: int, counts: Int32Array, slots: UInt32Array, deltas: Float32Array) -> None:
        """See `HeldParities.parity_apply`."""
        raise ValueError("rows on disk have no parities")

    def parity_read(self, q: int, counts: Int32Array, blocks: UInt32Array, out: Float32Array) -> None:
        """See `HeldParities.parity_read`."""
        raise ValueError("rows on disk have no parities")

    def parity_add(self, q: int, counts: Int32Array, blocks: UInt32Array, records: Float32Array) -> None:
        """See `HeldParities.parity_add`."""
        raise ValueError("rows on disk have no parities")

    def parity_members(self, table: int, q: int, member: int) -> UInt64Array:
        """See `HeldParities.parity_members`."""
        raise ValueError("rows on disk have no parities")

    def parity_touched(self, source: int, group: int, table: int) -> UInt64Array:
        """See `HeldParities.parity_touched`."""
        refuse_group(group)

    def know_touched(self, group: int, table: int, words: UInt64Array) -> None:
        """See `ReturningRows.know_touched`: no row is absent."""

    def prepare(self, counts: Int32Array, slots: UInt32Array) -> tuple[Int32Array, UInt32Array]:
        """See `ReturningRows.prepare`: none is missing."""
        return np.zeros(self._tables, np.int32), np.empty(0, np.uint32)

    def put(self, counts: Int32Array, slots: UInt32Array, relatives: Float32Array) -> int:
        """See `ReturningRows.put`."""
        return 0

    def fill(self, rows_max: int) -> int:
        """See `ReturningRows.fill`."""
        return 0

    def missing_rows(self, group: int | None = None) -> int:
        """See `ReturningRows.missing_rows`."""
        return 0

    def blank_rows(self) -> int:
        """See `ReturningRows.blank_rows`."""
        return 0


def refuse_group(group: int) -> NoReturn:
    """Rows without parities are in no coding group."""
    raise IndexError(f"there is no group {group}: rows on disk have no parities")


def describe_table(job: JobSpec, index: int) -> dict[str, Any]:
    """The settings of a table, as the kernels take them."""
    table = job.tables[index]
    numbers = ("learning_rate", "eps", "beta1", "beta2", "momentum", "weight_decay")
    return {
        "rows": table.rows,
        "dim": table.dim,
        "k": table.k,
        "r": table.r,
        "optimizer": table.optimizer.kind,
        **{name: float(getattr(table.optimizer, name)) for name in numbers},
        "seed": job.seed,
        "init_bound": float(table.init_bound),
        "table": index,
    }


def describe_job(job: JobSpec, server: int) -> dict[str, Any]:
    """All that the bytes in the files depend on."""
    return {
        "format": FORMAT,
        "seed": job.seed,
        "servers": job.servers,
        "rings": job.rings,
        "server": server,
        "tables": [describe_table(job, index) for index in range(len(job.tables))],
    }


def fingerprint(identity: dict[str, Any]) -> int:
    """A number for a job: files that say another are not its own."""
    return int.from_bytes(hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).digest()[:8], "little")


def lock_directory(directory: Path) -> int:
    """Makes the directory, and takes it for this process; the descriptor that is given out holds it."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
        lock = os.open(directory / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    except OSError as error:
        raise UserError(f"{directory} cannot be used: {error.strerror}") from error
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(lock)
        raise UserError(f"{directory} is in use by another process", hint="use another --store-dir") from error
    return lock


def check_identity(directory: Path, identity: dict[str, Any], *, is_new: bool, wipe: bool) -> None:
    """Refuses files of another job, and to begin anew where there are some; says what is different."""
    path = directory / "job.json"
    if not path.exists():
        if not is_new:
            raise UserError(f"there is no store in {directory}")
        return
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise StoreDamaged(f"{path} cannot be read: {error}") from error
    different = [name for name in identity if found.get(name) != identity[name]]
    if different:
        name = different[0]
        shown = "" if name == "tables" else f" ({found.get(name)} there, {identity[name]} here)"
        raise UserError(
            f"{directory} has the rows of another job: another {name}{shown}", hint="use another --store-dir"
        )
    if is_new and not wipe:
        raise UserError(
            f"{directory} has rows of this job already", hint="go on from them with --resume, or remove the directory"
        )


def clear_temporary(directory: Path) -> None:
    """Deletes files that only a run which is over could use. The lock stays, which whoever calls this holds."""
    path = directory / "job.json"
    try:
        if not json.loads(path.read_text()).get(TEMPORARY):
            return
    except (OSError, ValueError, AttributeError):
        return  # there are none, or `check_identity` says what is wrong with them
    for name in ("job.json", "home", "log", "state"):
        (directory / name).unlink(missing_ok=True)


def write_identity(directory: Path, identity: dict[str, Any]) -> None:
    """Says whose files these are, whole or not at all."""
    partial = directory / "job.json.partial"
    with partial.open("w") as file:
        json.dump(identity, file)
        file.flush()
        os.fsync(file.fileno())
    partial.rename(directory / "job.json")
    handle = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


if TYPE_CHECKING:
    # What the interface promises, this store has. What it raises is named in one place: `StoreDamaged`, `StoreFull`.
    RAISED = (StoreDamaged, StoreFull)

    def _check(store: TieredStore) -> tuple[Store, PagedRows]:
        return store, store
