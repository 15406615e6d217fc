"""A server's own saves: captured rows to storage, with a manifest that the server writes itself, and back to whoever
replaces it. What a save is and which of them count is in checkpoint/saves.py; here are the threads.

A storage that fails or hangs costs the save, never the training: everything that waits for it does so in threads, and
a save that comes to nothing is one line in the log. A load that fails is for its caller to decide upon.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import time
from collections.abc import Callable, Collection, Generator
from typing import Any

import numpy as np
import numpy.typing as npt

from regrow.checkpoint.chunks import Ids
from regrow.checkpoint.lineage import Graph
from regrow.checkpoint.manifest import are_apart
from regrow.checkpoint.manifests import table_infos
from regrow.checkpoint.saves import Chain, Owner, SaveManifest
from regrow.checkpoint.saves_ids import IdsKeeper
from regrow.checkpoint.saves_load import Base, SavedRows
from regrow.checkpoint.saves_pieces import sum_bundles
from regrow.checkpoint.saves_write import SaveWriter
from regrow.checkpoint.storage import Storage
from regrow.core.job import JobSpec
from regrow.core.messages import UInt32Array
from regrow.core.recall_events import SavedRowsLoaded, SavesFound, SavesLoaded
from regrow.errors import CheckpointError, StorageError
from regrow.runtime.checkpoint import LOAD_PART_BYTES, CaptureSaver, check_fits, hand_over, loaded_rows, shard_of, take
from regrow.store.interface import CapturedRows

# How long a storage that does not answer is asked for saves, and how often. Too short: an outage of a minute takes
# everybody back to a checkpoint. Too long: everybody waits for one that is gone.
RECALL_SECONDS_MAX = 300.0
RECALL_AGAIN_SECONDS = 2.0

Brought = SavesFound | SavedRowsLoaded | SavesLoaded


class OwnSaver(CaptureSaver):
    """Stores saves of one incarnation of a server. `tell` hears on the loop: number, error or "", and whether the next
    save has to be a full. `base` is the cut from which the run, or this start of it, went on, and `base_url` where that
    is, if not here."""

    def __init__(
        self,
        *,
        run: str,
        start: int,
        incarnation: int,
        base: str | None,
        base_url: str | None = None,
        tell: Callable[[int, str, bool], None],
        made_by: str = "regrow",
        **options: Any,
    ) -> None:
        super().__init__(**options)
        self.saved: SaveManifest | None = None  # the last one that is durable
        self.base_url = base_url or self._url
        self._run, self._run_start, self._incarnation, self._base = run, start, incarnation, base
        self._tell = tell
        self._made_by = made_by
        self._writer: SaveWriter | None = None

    def open_writer(self, job: JobSpec) -> SaveWriter:
        """In threads: to open a storage can take its time."""
        if self._writer is None:
            self._writer = SaveWriter(
                storage=Storage.open(self._url),
                owner=Owner(run=self._run, start=self._run_start, shard=shard_of(job, self._server)),
                server=self._server,
                incarnation=self._incarnation,
                tables=table_infos(job),
                seed=job.seed,
                base=self._base,
                encoding=self._encoding,
                bits=self._bits,
                made_by=self._made_by,
            )
        return self._writer

    def choose_kind(self) -> tuple[bool, str]:
        """(whether the next save has to be a full, why (not))."""
        return (True, "it is the first") if self._writer is None else self._writer.choose_kind()

    def begin(
        self,
        number: int,
        job: JobSpec,
        store: CapturedRows,
        *,
        full: bool,
        marks: tuple[int, ...],
        updates: int,
        updates_skipped: int = 0,
    ) -> None:
        """The capture was begun, as a full or not, at these marks. `number` is the caller's, and comes back."""

        def tell(save: SaveManifest | None, error: str) -> None:
            """Heard only while the server still wants it: a save that a cut came before is built on by nobody."""
            if save is not None:
                assert self._writer is not None
                self.saved = save
                self._writer.accept(save)
                asyncio.get_running_loop().run_in_executor(None, self._writer.clear_away, save)
            self._tell(number, error, self.choose_kind()[0])

        def work() -> Any:
            fields = {"full": full, "marks": marks, "updates": updates, "updates_skipped": updates_skipped}
            return self._save_own(number, job, store, fields)

        self._start(number, "", work, tell)

    async def _save_own(self, number: int, job: JobSpec, store: CapturedRows, fields: dict[str, Any]) -> SaveManifest:
        writer = await asyncio.to_thread(self.open_writer, job)
        directory = self._piece = writer.begin()
        is_plain = (self._encoding, self._bits) == ("raw", 32)  # so that rows can be read without their chunk
        keeper = IdsKeeper(sum_bundles if is_plain else None)
        try:
            tables = find_saved(job)
            infos = await self._store(number, directory, job, store, look_at=keeper.add, tables=tables)
        except BaseException:
            # Only while there can be no manifest: one that comes late would be of a save without its chunks.
            await asyncio.to_thread(writer.discard, directory)
            raise
        return await asyncio.to_thread(lambda: writer.write(infos, keeper.encode(), **fields))


def find_saved(job: JobSpec) -> frozenset[str]:
    """The tables whose rows are in saves. Those with copies elsewhere (dense parameters) come back from these and not
    from saves, where others have none."""
    bare = frozenset(table.name for table in job.tables if not table.r)
    return bare or frozenset(table.name for table in job.tables)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RecallReport:
    """What a load did. `found_seconds`: until it was known which rows there are."""

    chain: Chain
    seconds: float
    found_seconds: float
    bytes: int
    rows: int


class OwnLoader:
    """Brings one server's rows back from its predecessors' saves; the server is told on its loop, in order: what was
    found, rows in parts, the end. The saver that it is given goes on from what was found."""

    def __init__(
        self,
        *,
        saver: OwnSaver,
        server: int,
        tell: Callable[[Brought], None],
        progress: Callable[[int, int], None] = lambda done, total: None,
    ) -> None:
        self._saver, self._server = saver, server
        self._tell, self._progress = tell, progress
        self._rows: SavedRows | None = None
        self._job: JobSpec | None = None

    def want(self, table: int, ids: UInt32Array) -> None:
        """Somebody waits for these rows: they come as soon as they can be read. Only once it was told what is found."""
        if self._rows is not None and self._job is not None:
            self._rows.want(self._job.tables[table].name, ids)

    async def load(self, job: JobSpec, tables: Collection[int] | None = None) -> RecallReport:
        """`tables`: those that come back from saves; None: all."""
        loop = asyncio.get_running_loop()
        self._job = job
        wanted = range(len(job.tables)) if tables is None else tables

        def run() -> RecallReport:
            began = time.monotonic()
            chain, rows = self._open_patiently(job, wanted)
            self._rows = rows
            numbers = {spec.name: index for index, spec in enumerate(job.tables)}
            found = {numbers[name]: ids for name, ids in rows.ids().items()}
            whole = next((save for save in chain.saves if not save.updates_skipped), None)
            marks = (0,) * job.marks if whole is None else whole.marks
            event = SavesFound(marks=marks, updates=chain.head.updates, ids=found)
            take(hand_over(loop, self._tell, event))
            found_seconds = time.monotonic() - began
            with contextlib.closing(self._read(rows, job)) as parts:
                for part in parts:
                    take(hand_over(loop, self._tell, part))  # meanwhile the next chunks are read
                    self._progress(rows.bytes_done, rows.bytes)
            self._progress(rows.bytes, rows.bytes)
            take(hand_over(loop, self._tell, SavesLoaded()))
            return RecallReport(
                chain=chain,
                seconds=time.monotonic() - began,
                found_seconds=found_seconds,
                bytes=rows.bytes,
                rows=rows.rows,
            )

        return await asyncio.to_thread(run)

    def _read(self, rows: SavedRows, job: JobSpec) -> Generator[SavedRowsLoaded, None, None]:
        for chunk in rows.rows_newest_first(LOAD_PART_BYTES):
            yield SavedRowsLoaded(rows=loaded_rows(job, chunk).rows)

    def _open_patiently(self, job: JobSpec, tables: Collection[int]) -> tuple[Chain, SavedRows]:
        """A storage that does not answer is asked again: training waits, but to give up would cost everybody's."""
        until = time.monotonic() + RECALL_SECONDS_MAX
        while True:
            try:
                return self._open(job, tables)
            except StorageError:
                if time.monotonic() + RECALL_AGAIN_SECONDS > until:
                    raise
                time.sleep(RECALL_AGAIN_SECONDS)

    def _open(self, job: JobSpec, tables: Collection[int]) -> tuple[Chain, SavedRows]:
        """Claims what there is, and reads which rows are in it."""
        writer = self._saver.open_writer(job)

        def find_base(cut: str | None) -> Base | None:
            if cut is None:
                return None
            return make_base(Storage.open(self._saver.base_url), cut, job, self._server)

        def find_marks() -> tuple[int, ...]:
            base = find_base(writer.base)
            return (0,) * job.marks if base is None else base.plan.target.marks

        chain = writer.claim(find_marks=find_marks)
        names = {job.tables[index].name for index in tables}
        return chain, SavedRows(writer.storage, chain, base=find_base(chain.base), tables=names)


def make_base(storage: Storage, cut: str, job: JobSpec, server: int) -> Base:
    """The cut from which a run went on, for one of its servers. CheckpointError if it is not there any more."""
    graph = Graph(storage.manifests()[0])
    if cut not in graph.cuts:
        hint = "what this server had loaded from it and not saved yet is nowhere else"
        raise CheckpointError(f"{storage.url}: cut {cut}, from which the run went on, is not there any more", hint=hint)
    plan, _ = graph.restore_plan(cut)
    check_fits(plan.pieces[-1], job)
    own = shard_of(job, server)
    indexes = {spec.name: index for index, spec in enumerate(job.tables)}

    def find_mine(table: str, ids: Ids) -> npt.NDArray[np.bool_]:
        mine: npt.NDArray[np.bool_] = job.layout(indexes[table]).place(ids, table=indexes[table])[0] == server
        return mine

    return Base(storage, plan, lambda shard: shard == own or not are_apart([shard, own]), find_mine)
