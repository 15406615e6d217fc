"""The rows of one server back from its saves: the newest value of each, hot rows first, waited-for rows before all.

First all ids, then rows. Which rows a chunk has is known before it is read (saves_ids.py), so of every row it is known
which chunk has its newest value: that one alone counts, and chunks may be read in any order. Usually that is newest
save first, for what changes often is in the newest. Rows that somebody waits for come before all: of a chunk that has
some of them, only the bundles that they are in are read (saves_pieces.py). Where that cannot be, or nearly all bundles
would have to be, the chunk goes to the front and is read whole: its checksum is that of the whole file. A chunk whose
rows are all newer elsewhere is not read at all.

If the chain does not end at a full, its run went on from a cut, and the rest is there: the pieces of that cut are more
links, older than all saves. Their ids are not in files of their own, so each of their chunks is read twice.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import Executor, Future

import numpy as np
import numpy.typing as npt

from regrow.checkpoint import direct
from regrow.checkpoint.chunks import Chunk, Ids, Rows, read_chunk, split
from regrow.checkpoint.direct import Bytes
from regrow.checkpoint.lineage import Plan
from regrow.checkpoint.load import AHEAD_BYTES_MAX, ALL_SHARDS, BROKEN_PIECES_MAX, THREADS_DEFAULT, chunk_bytes
from regrow.checkpoint.manifest import ChunkInfo, Manifest, Stored
from regrow.checkpoint.saves import IDS, Chain, SaveManifest
from regrow.checkpoint.saves_ids import IdsFile, RowSet, SeenRows
from regrow.checkpoint.saves_pieces import (
    BUNDLES_SHARE_MAX,
    Bundles,
    Sums,
    Wish,
    count_bundle_rows,
    find_bundles,
    read_bundles,
)
from regrow.checkpoint.storage import Storage
from regrow.errors import CheckpointError

# Reads of bundles at a time: they are small, and a disk does many as fast as one. Too many: the chunks get no turn.
BUNDLE_THREADS = 16
MIN_ROWS = 256  # of a table in a chunk: if it has fewer, all of them may come in bundles

Mine = Callable[[str, Ids], npt.NDArray[np.bool_]]  # which of these rows of a table live here
_Read = tuple[Chunk, Bytes]  # and the memory it was read into
_Sums = Callable[[str], Sums]  # by table: of bundles of its rows in a chunk
_Link = tuple[Storage, Stored, ChunkInfo, dict[str, RowSet], _Sums | None]
_Piece = tuple["_Job", str, Bundles]


@dataclasses.dataclass(frozen=True, slots=True)
class Base:
    """A cut below a chain: where it is, the way to it, by the names of shards which chunks may have rows of this
    server, and which of the rows in them are."""

    storage: Storage
    plan: Plan
    shard_filter: Callable[[str], bool]
    mine: Mine


@dataclasses.dataclass(slots=True, eq=False)
class _Job:
    """A chunk to be read, and which of its rows are the newest."""

    storage: Storage
    stored: Stored
    info: ChunkInfo
    newest: dict[str, RowSet]
    rows: dict[str, RowSet]  # all that it has
    sums: _Sums | None = None  # None: it is read as a whole or not at all
    is_wanted: bool = False
    fetched: dict[str, set[int]] = dataclasses.field(default_factory=dict)  # bundles, by table

    @property
    def bytes(self) -> int:
        return chunk_bytes(self.stored, self.info)

    def find_newest(self, table: str, ids: Ids) -> Ids:
        """Those of the rows of which it has the newest value."""
        return ids[self.newest[table].find(ids)] if table in self.newest else ids[:0]

    def find_bundles(self, table: str, ids: Ids) -> Bundles | None:
        """The bundles to be read for these rows, which it has, less those that were read before. None: all of it."""
        info = next(info for info in self.stored.tables if info.name == table)
        bundles = find_bundles(self.rows[table], ids, dim=info.dim)
        fetched = self.fetched.setdefault(table, set())
        fresh = np.array([bundle for bundle in bundles.tolist() if bundle not in fetched], np.int64)
        fetched.update(fresh.tolist())
        wanted = len(fetched) * count_bundle_rows(info.dim)
        return None if wanted > BUNDLES_SHARE_MAX * max(len(self.rows[table]), MIN_ROWS) else fresh

    def read_bundles(self, wanted: Sequence[tuple[str, Bundles]]) -> list[tuple[str, Rows]]:
        """Those rows of them that count, by table."""
        assert self.sums is not None
        infos = {info.name: info for info in self.stored.tables}
        wishes = [Wish(infos[table], self.rows[table], self.sums(table), bundles) for table, bundles in wanted]
        found = zip(wanted, read_bundles(self.storage, self.stored, self.info, wishes), strict=True)
        return [(table, rows.choose(self.newest[table].find(rows.ids))) for (table, _), rows in found]


class SavedRows:
    """The rows of a chain. Opening it reads all ids, and raises for whatever is damaged so far."""

    def __init__(
        self,
        storage: Storage,
        chain: Chain | None,
        *,
        base: Base | None = None,
        tables: Collection[str] | None = None,
    ) -> None:
        """`base` is needed where the chain says so, or where there is none and the run went on from a cut. `tables`:
        those that are wanted; None: all."""
        self._storage = storage
        self._tables = tables
        self._memory = direct.Memory()
        self._lock = threading.Lock()
        self._seen: dict[str, SeenRows] = {}
        self._jobs: list[_Job] = []  # those to be read, newest first
        self._pieces: list[_Piece] = []  # bundles that somebody waits for
        self.bytes_done = 0
        with storage.open_threads(THREADS_DEFAULT, "ids") as pool:
            for link in self._links(pool, chain, base):
                self._add(link)
        self.bytes = sum(job.info.bytes for job in self._jobs)
        self.rows = sum(len(rows) for job in self._jobs for rows in job.newest.values())

    def ids(self) -> dict[str, Ids]:
        """All rows that there are, by table; rising."""
        return {table: seen.list_all() for table, seen in self._seen.items()}

    def want(self, table: str, ids: Ids) -> int:
        """Somebody waits for these rows: what has them goes first, bundles of chunks or chunks. Any thread. Returns how
        many of either go."""
        gone = 0
        with self._lock:
            for job in [job for job in self._jobs if not job.is_wanted]:
                if not len(mine := job.find_newest(table, ids)):
                    continue
                bundles = None if job.sums is None else job.find_bundles(table, mine)
                if bundles is None:
                    job.is_wanted = True
                elif len(bundles):
                    self._pieces.append((job, table, bundles))
                gone += bundles is None or bool(len(bundles))
            self._jobs.sort(key=lambda job: not job.is_wanted)  # and within each, as before
            return gone

    def rows_newest_first(
        self, part_bytes: int, *, threads: int = THREADS_DEFAULT, ahead_bytes_max: int = AHEAD_BYTES_MAX
    ) -> Iterator[Chunk]:
        """All rows, each once, with its newest value, in parts. A part is the caller's until it asks for the next
        chunk's: its memory is used again. CheckpointError names what is damaged; nothing of that was given out."""
        ahead: list[tuple[_Job, Future[_Read]]] = []
        # Bundles have threads of their own: they are not to wait for chunks.
        make = self._storage.open_threads
        with make(threads, "saves") as pool, make(BUNDLE_THREADS, "rows") as few:
            try:
                while self._read_ahead(pool, ahead, ahead_bytes_max):
                    yield from self._read_pieces(few, part_bytes)
                    job, future = ahead[self._choose(ahead)]
                    chunk, memory = future.result()
                    for part in split([chunk], part_bytes):
                        yield from self._read_pieces(few, part_bytes)
                        yield part
                    del chunk, part
                    self._memory.give(memory)
                    ahead.remove((job, future))
                    del future
                    self.bytes_done += job.info.bytes
            finally:
                for _, left in ahead:
                    left.cancel()

    def _read_ahead(self, pool: Executor, ahead: list[tuple[_Job, Future[_Read]]], bytes_max: int) -> bool:
        """Whether there is anything left."""
        held = sum(job.bytes for job, _ in ahead)
        with self._lock:
            while self._jobs and (not held or held + self._jobs[0].bytes <= bytes_max):
                job = self._jobs.pop(0)
                held += job.bytes
                ahead.append((job, pool.submit(self._read, job)))
        return bool(ahead)

    def _read_pieces(self, pool: Executor, part_bytes: int) -> Iterator[Chunk]:
        """What somebody waits for, also while it is read."""
        while True:
            with self._lock:
                pieces, self._pieces = self._pieces, []
            if not pieces:
                return
            chunks: dict[_Job, list[tuple[str, Bundles]]] = {}
            for job, table, bundles in pieces:
                chunks.setdefault(job, []).append((table, bundles))
            found = list(itertools.chain(*pool.map(lambda item: item[0].read_bundles(item[1]), chunks.items())))
            # In few parts, each of which is a turn of the reader's loop: ids have to rise in them.
            found.sort(key=lambda item: (item[0], int(item[1].ids[0])))
            yield from split(({table: rows} for table, rows in found), part_bytes)

    def _choose(self, ahead: list[tuple[_Job, Future[_Read]]]) -> int:
        """The first that somebody waits for, or else the first."""
        return next((index for index, (job, _) in enumerate(ahead) if job.is_wanted), 0)

    def _read(self, job: _Job) -> _Read:
        memory = self._memory.take(job.info.bytes)
        chunk = read_chunk(job.storage, job.stored, job.info, into=memory)
        return {table: _choose_rows(chunk[table], newest, job) for table, newest in job.newest.items()}, memory

    def _add(self, link: _Link) -> None:
        storage, stored, info, found, sums = link
        newest: dict[str, RowSet] = {}
        for table in stored.tables:
            if table.name not in found or (self._tables is not None and table.name not in self._tables):
                continue
            if table.name not in self._seen:
                self._seen[table.name] = SeenRows(table.rows)
            if len(new := self._seen[table.name].take_new(found[table.name])):
                newest[table.name] = new
        if newest:
            self._jobs.append(_Job(storage, stored, info, newest, found, sums))

    def _links(self, pool: Executor, chain: Chain | None, base: Base | None) -> Iterator[_Link]:
        """Chunks and their ids, newest first."""
        for save, file in _read_ids_files(self._storage, pool, () if chain is None else chain.saves):
            for number, info in reversed(list(enumerate(save.chunks))):
                rows = file.rows_of(number, info)
                has_sums = self._storage.local and all(file.sums_of(number, table) for table in rows)
                sums = functools.partial(file.sums_of, number) if has_sums else None
                yield self._storage, save, info, rows, sums
        if base is not None:
            for piece, chunks in _read_base(pool, base):
                yield from ((base.storage, piece, info, rows, None) for info, rows in reversed(chunks))


def _choose_rows(rows: Rows, newest: RowSet, job: _Job) -> Rows:
    """Those of a chunk that count. Its own ids must be those that were said to be in it."""
    mask = newest.find(rows.ids)
    if int(np.count_nonzero(mask)) != len(newest):
        raise CheckpointError(f"{job.stored.name}/{job.info.name}: its rows are not those that {IDS} says")
    return rows.choose(mask)


def _read_ids_files(
    storage: Storage, pool: Executor, saves: tuple[SaveManifest, ...]
) -> Iterator[tuple[SaveManifest, IdsFile]]:
    """Of all saves with rows, in order. Chunks that are missing or too short are found here too."""

    def read(save: SaveManifest) -> IdsFile:
        if lost := storage.find_lost(save):
            raise CheckpointError(f"{lost} is missing, or not whole", hint="this save cannot be used")
        return IdsFile(storage.read(f"{save.name}/{IDS}"), save)

    full = [save for save in saves if save.chunks]
    yield from zip(full, pool.map(read, full), strict=True)


_BasePiece = tuple[Manifest, list[tuple[ChunkInfo, dict[str, RowSet]]]]  # with the rows of its chunks


def _read_base(pool: Executor, base: Base) -> list[_BasePiece]:
    """The pieces of the way to the cut, newest first. A damaged one is gone around."""
    graph, way = base.plan.graph, list(base.plan.pieces)
    for left in reversed(range(BROKEN_PIECES_MAX)):
        found: list[_BasePiece] = []
        try:
            for piece in reversed(way):
                found.append((piece, _read_piece(pool, base, piece)))
            break
        except CheckpointError:
            graph = graph.without([way[-1 - len(found)].name])
            around = graph.path(base.plan.target.id) if base.plan.target.id in graph.cuts else None
            if around is None or not left:
                raise
            way = around
    return found


def _read_piece(pool: Executor, base: Base, piece: Manifest) -> list[tuple[ChunkInfo, dict[str, RowSet]]]:
    def read(info: ChunkInfo) -> dict[str, RowSet]:
        chunk = read_chunk(base.storage, piece, info)
        return {table: RowSet.of(rows.ids[base.mine(table, rows.ids)]) for table, rows in chunk.items()}

    chunks = [info for info in piece.chunks if info.shard == ALL_SHARDS or base.shard_filter(info.shard)]
    return list(zip(chunks, pool.map(read, chunks), strict=True))
