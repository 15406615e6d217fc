"""Merging: `fold` makes one piece of a path of pieces. When to do so is in policy.py.

A merged piece says nothing new: it is a shortcut, and its rows are the newest on the path. Chunks first, the
manifest last, so it exists whole or not at all. File names carry a hash of what was folded and how, and the cut between
chunks depends on the rows alone: to fold again after a kill writes the same bytes under the same names, and two mergers
at work on one URL can at worst do the same work twice. Memory is bounded: one chunk per run of rising ids, a window
that is merged, and the chunks being filled.
Nothing is deleted here. Chunks that a killed merger left behind are written again by the next fold of the same pieces,
or found by `leftovers`.
"""

from __future__ import annotations

import collections
import hashlib
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from regrow.checkpoint.chunks import CHUNK_BYTES, Chunk, Rows, concatenate, read_chunk, write_chunk
from regrow.checkpoint.direct import Bytes, aligned
from regrow.checkpoint.lineage import Graph, size_text
from regrow.checkpoint.load import ALL_SHARDS, rows_bytes
from regrow.checkpoint.manifest import ChunkInfo, Encoding, Manifest, TableInfo, chunk_name, piece_name
from regrow.checkpoint.storage import Storage
from regrow.errors import CheckpointError, StorageError

# Too small: long paths are folded in several rounds, and what they write is written twice. Too large: a merger beside
# a training job takes memory that the rows need.
MEMORY_BYTES_MAX = 1 << 30
WINDOW_BYTES = 8 << 20  # rows that are merged at a time
WRITES_AHEAD_MAX = 2  # chunks being encoded and written while the next are merged
OUT_BYTES_MIN = 1 << 10  # a chunk is filled up to this even if memory is short
SHARD_LETTERS_MAX = 40  # of a shard in a file name
MADE_BY = "regrow merge"
TOKEN_LETTERS = 10
MARK = "m"  # before the token in the name of a merged chunk: leftovers of mergers can be told from training's

_MERGED = re.compile(rf".*-{MARK}[0-9a-f]{{{TOKEN_LETTERS}}}-\d+\.safetensors(\.zst)?")

Progress = Callable[[int, int], None]  # bytes read, bytes to read


class PieceBroken(CheckpointError):
    """A piece that was to be folded cannot be read. `gone`: it was deleted as a whole meanwhile, by another merger."""

    def __init__(self, piece: str, message: str, *, gone: bool = False) -> None:
        super().__init__(message, hint="`regrow ckpt verify` lists all damage; a new full makes this piece unneeded")
        self.piece = piece
        self.gone = gone


class Disorder(Exception):
    """Chunks of a shard whose ids do not rise from one to the next."""

    def __init__(self, piece: Manifest) -> None:
        super().__init__(piece.name)
        self.piece = piece


# -- fold --------------------------------------------------------------------------------------------------


def fold(
    storage: Storage,
    graph: Graph,
    source: str | None,
    target: str,
    *,
    memory_bytes_max: int = MEMORY_BYTES_MAX,
    chunk_bytes: int = CHUNK_BYTES,
    encoding: Encoding | None = None,
    approximate: bool = False,
    replace: bool = False,
    progress: Progress | None = None,
) -> Manifest:
    """Writes the piece source -> target, made of the cheapest path between them, and returns its manifest.

    A piece that is there already is returned as it is, unless `replace` says that it is broken. Exact and quantised
    pieces are folded together only if `approximate` says so, and the result is then quantised and marked as such.
    """
    name = piece_name(source, target)
    if not replace and (found := graph.pieces.get(name) or _found(storage, name)) is not None:
        return found
    path = graph.without([name]).path(target, starts=(source,))
    if path is None:
        raise CheckpointError(
            f"{name} cannot be made: no path leads from {source or 'nothing'} to {target}",
            hint="`regrow ckpt ls` shows which pieces there are",
        )
    bits = _bits(path, name, approximate=approximate)
    how = encoding or path[-1].encoding
    scanned: dict[str, list[list[ChunkInfo]]] = {}  # runs of pieces whose chunks turned out not to be in order
    while True:
        work = Fold(storage, path, scanned, bits=bits, encoding=how, memory=memory_bytes_max, chunk=chunk_bytes)
        try:
            if (fitting := work.fitting()) == len(path):
                return work.run(progress)
            # The tail becomes a shortcut of its own first, which is a piece like any other. Its chunks are no larger
            # than those it is made of, so what follows needs no more memory than this.
            tail, bits_tail = path[-fitting:], min(piece.bits for piece in path[-fitting:])
            chunk = min(chunk_bytes, max(run.rows_bytes_max for run in work.runs))
            work = Fold(storage, tail, scanned, bits=bits_tail, encoding=how, memory=memory_bytes_max, chunk=chunk)
            path = [*path[:-fitting], work.run(None)]
        except Disorder as disorder:
            scanned[disorder.piece.name] = rising_runs(storage, disorder.piece)


def _found(storage: Storage, name: str) -> Manifest | None:
    """The piece if somebody else has made it since the graph was read. A torn manifest is one that is not there."""
    try:
        return storage.read_manifest(name)
    except StorageError as error:
        if error.missing:
            return None
        raise
    except CheckpointError:
        return None


def _bits(path: Sequence[Manifest], name: str, *, approximate: bool) -> int:
    """Of the result; refuses to mix what must not be mixed."""
    for piece in path[:-1]:
        if reason := different(piece, path[-1]):
            raise CheckpointError(
                f"{name} cannot be made: {piece.name} and {path[-1].name} {reason}",
                hint="they are of different jobs; a new full begins a new lineage",
            )
    bits = {piece.bits for piece in path}
    if len(bits) > 1 and not approximate:
        narrow = next(piece for piece in path if piece.bits == min(bits))
        raise CheckpointError(
            f"{name} cannot be made: {narrow.name} has {narrow.bits} bits, others on the path have {max(bits)}",
            hint="approximate=True makes a quantised piece of them all, exact rows included",
        )
    return min(bits)


def different(older: Manifest, newer: Manifest) -> str | None:
    """Why rows of one cannot stand among those of the other, or None. Tables may be added, and may grow."""
    if older.seed != newer.seed:
        return f"have different seeds, {older.seed} and {newer.seed}"
    after = {table.name: table for table in newer.tables}
    for table in older.tables:
        other = after.get(table.name)
        if other is None or other.rows < table.rows or msgspec.structs.replace(table, rows=other.rows) != other:
            return f"have different tables {table.name!r}"
    return None


class Fold:
    """One piece in the making."""

    def __init__(
        self,
        storage: Storage,
        path: Sequence[Manifest],
        scanned: dict[str, list[list[ChunkInfo]]],
        *,
        bits: int,
        encoding: Encoding,
        memory: int,
        chunk: int,
    ) -> None:
        self.storage, self.path = storage, path
        self.name = piece_name(path[0].source, path[-1].target.id)
        self.bits, self.encoding, self.memory = bits, encoding, memory
        self.runs: list[_Run] = []
        for age, piece in enumerate(path):
            for infos in scanned.get(piece.name) or _by_shard(piece):
                self.runs.append(_Run(storage, piece, age, infos))
        shards = sorted({info.shard for piece in path for info in piece.chunks})
        # One layout: rows stay with the shard that wrote them last, and a server still reads its own chunks only.
        self.shards = shards if len({shard.rpartition("of")[2] for shard in shards}) == 1 else [ALL_SHARDS]
        # A quarter of memory is for chunks being filled or written, an eighth for windows, the rest for reading.
        self.chunks_held = len(self.shards) + 2 * (WRITES_AHEAD_MAX + 1)
        self.chunk = min(chunk, max(OUT_BYTES_MIN, memory // 4 // self.chunks_held))
        self.window = min(WINDOW_BYTES, memory // 24)

    def need(self, path: Sequence[Manifest]) -> int:
        """Bytes of memory to fold these pieces."""
        names = {piece.name for piece in path}
        sizes = [run.rows_bytes_max for run in self.runs if run.piece.name in names]
        return sum(sizes) + max(sizes, default=0) + 3 * self.window + self.chunks_held * self.chunk

    def fitting(self) -> int:
        """How many pieces from the end of the path fit memory together. At least two, or CheckpointError."""
        for count in range(len(self.path), 0, -1):
            if self.need(self.path[-count:]) <= self.memory and (count > 1 or len(self.path) == 1):
                return count
        least = self.need(self.path[-2:])
        raise CheckpointError(
            f"{self.name} cannot be made in {size_text(self.memory)} of memory: two pieces need {size_text(least)}",
            hint="memory_bytes_max is too small for the chunks and shards of this checkpoint",
        )

    def run(self, progress: Progress | None) -> Manifest:
        writer = _Writer(self.storage, self.name, self.token(), self.shards, self.chunk, self.encoding, self.bits)
        total = sum(piece.bytes for piece in self.path)
        tables = sorted(self.path[-1].tables, key=lambda table: table.index)
        with ThreadPoolExecutor(max_workers=WRITES_AHEAD_MAX, thread_name_prefix="merge") as pool:
            for table in tables:
                for shard, rows in self.merged(table):
                    writer.add(pool, shard, table.name, rows)
                    if progress is not None:
                        progress(sum(run.bytes_read for run in self.runs), total)
            chunks = writer.finish(pool)
        last = self.path[-1]
        manifest = Manifest(
            source=self.path[0].source,
            target=last.target,
            tables=last.tables,
            seed=last.seed,
            chunks=tuple(chunks),
            encoding=self.encoding,
            bits=self.bits,  # type: ignore[arg-type]
            folded=tuple(_folded(self.path)),
            made_by=MADE_BY,
        )
        there = self.storage.names(self.name)
        if lost := [info.name for info in chunks if there.get(info.name) != info.bytes]:
            raise CheckpointError(f"{self.name}/{lost[0]} was deleted while the piece was made", hint="fold it again")
        self.storage.write_manifest(manifest)
        return manifest

    def token(self) -> str:
        """Names what is folded and how; equal tokens mean equal bytes."""
        parts = [f"{self.encoding} {self.bits} {self.chunk} {','.join(self.shards)}"]
        parts += [f"{piece.name}/{info.name} {info.crc32c}" for piece in self.path for info in piece.chunks]
        return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:TOKEN_LETTERS]

    def merged(self, table: TableInfo) -> Iterator[tuple[int, Rows]]:
        """Rows of a table with the shard they belong to, ids rising within each shard, the newest of each."""
        cursors = [_Cursor(run, table.name) for run in self.runs]
        row_bytes = 4 + 4 * table.dim + sum(4 * width for _, width in table.states)
        rows_max = self.window // row_bytes
        while live := [cursor for cursor in cursors if cursor.fill()]:
            # Below the bound every cursor has all its rows at hand, and at most its share of a window. Half of that
            # goes by what is at hand of each: long and short ones that span the same ids come to their ends together.
            # The other half is the same for all: of those that do not, shares must not shrink with what is left.
            at_hand, even = sum(cursor.rows_left for cursor in live), rows_max // 2 // len(live)
            bound = min(cursor.reach(max(1, even + rows_max // 2 * cursor.rows_left // at_hand)) for cursor in live)
            parts = [cursor.take(bound) for cursor in live]
            yield from self._newest([part for part in parts if len(part[1])])

    def _newest(self, parts: list[tuple[_Source, Rows]]) -> Iterator[tuple[int, Rows]]:
        parts.sort(key=lambda part: part[0])
        ids = np.concatenate([rows.ids for _, rows in parts])
        order = np.argsort(ids, kind="stable")
        ids = ids[order]
        newest = order[np.append(ids[1:] != ids[:-1], True)]
        if len(self.shards) == 1:
            yield 0, _gather([rows for _, rows in parts], newest)
            return
        owner = np.array([self.shards.index(source.shard) for source, _ in parts])
        sizes = np.array([len(rows) for _, rows in parts])
        shards, starts = np.repeat(owner, sizes)[newest], np.cumsum(sizes) - sizes
        for shard in np.unique(shards).tolist():
            # Of this shard's parts alone: to lay out all of them for each shard would copy everything so many times.
            mine = np.flatnonzero(owner == shard)
            moved = np.zeros_like(starts)
            moved[mine] = np.cumsum(sizes[mine]) - sizes[mine] - starts[mine]
            chosen = newest[shards == shard]
            yield shard, _gather([parts[index][1] for index in mine], chosen + np.repeat(moved, sizes)[chosen])


def _folded(path: Iterable[Manifest]) -> Iterator[str]:
    """The pieces as training wrote them; of a full only its name, or the list would grow for ever."""
    for piece in path:
        yield from piece.folded if piece.source is not None and piece.folded else (piece.name,)


def _gather(parts: list[Rows], index: npt.NDArray[np.intp]) -> Rows:
    """The rows at `index` of the parts laid end to end. One tensor at a time: the long copy is short-lived."""
    ids = np.concatenate([rows.ids for rows in parts])[index]
    weight = np.concatenate([rows.weight for rows in parts])[index]
    names = parts[0].states
    return Rows(ids, weight, {n: np.concatenate([rows.states[n] for rows in parts])[index] for n in names})


def leftovers(storage: Storage, manifests: Iterable[Manifest], unfinished: Iterable[str]) -> list[tuple[str, str]]:
    """(piece, file) of merged chunks that no manifest names: of a merger that died, or is at work just now. Of an
    unfinished piece that has no files at all, (piece, "")."""
    found = []
    whole = {piece.name: {info.name for info in piece.chunks} for piece in manifests if piece.made_by == MADE_BY}
    for piece in [*whole, *unfinished]:
        names = storage.names(piece)
        found += [(piece, name) for name in names or [""] if name not in whole.get(piece, ()) and _ours(name)]
    return found


def _ours(name: str) -> bool:
    return not name or _MERGED.fullmatch(name) is not None


# -- reading -----------------------------------------------------------------------------------------------


class _Source(NamedTuple):
    """Where rows came from: later pieces win, and within a piece later chunks, as in a restore."""

    age: int
    position: int
    shard: str


class _Run:
    """Chunks of a piece in which the ids of every table rise. Holds one of them decoded; the next may be read into the
    same memory, so rows of the last one must not be looked at any more."""

    def __init__(self, storage: Storage, piece: Manifest, age: int, infos: list[ChunkInfo]) -> None:
        self.piece, self.age, self.infos = piece, age, infos
        self.rows_bytes_max = max(rows_bytes(piece, info) for info in infos)
        self.bytes_read = 0
        self.position = {info.name: position for position, info in enumerate(piece.chunks)}
        self._storage = storage
        # Only where rows are as they are stored: otherwise they would take memory of their own beside it.
        self._again = storage.local and piece.exact and piece.encoding == "raw"
        self._memory: Bytes | None = None
        self._held: tuple[str, Chunk] | None = None

    def read(self, info: ChunkInfo, table: str) -> Rows:
        """Small tables share a chunk: the next table finds it held."""
        if self._held is None or self._held[0] != info.name:
            self._held = None
            memory, self._memory = self._memory, None  # after an error nobody may use it
            if memory is None and self._again:
                memory = aligned(max(other.bytes for other in self.infos))
            self._held = info.name, _read(self._storage, self.piece, info, memory)
            self._memory = memory
            self.bytes_read += info.bytes
        return self._held[1][table]


class _Cursor:
    """How far a run of one table was merged."""

    def __init__(self, run: _Run, table: str) -> None:
        self.run, self.table = run, table
        self.left = collections.deque(info for info in run.infos if info.rows.get(table))
        self.rows: Rows | None = None
        self.start = 0
        self.source = _Source(run.age, 0, "")

    def fill(self) -> bool:
        """Has the next chunk at hand if the last one is used up; False at the end."""
        if self.rows is not None and self.start < len(self.rows):
            return True
        last = None if self.rows is None else self.rows.ids[-1]
        self.rows = None
        if not self.left:
            return False
        info = self.left.popleft()
        self.rows, self.start = self.run.read(info, self.table), 0
        self.source = _Source(self.run.age, self.run.position[info.name], info.shard)
        if last is not None and self.rows.ids[0] <= last:
            raise Disorder(self.run.piece)
        return True

    @property
    def rows_left(self) -> int:
        """Of the chunk at hand."""
        assert self.rows is not None
        return len(self.rows) - self.start

    def reach(self, share: int) -> int:
        """The largest id up to which nothing is missing here."""
        assert self.rows is not None
        if self.rows_left <= share and not self.left:
            return 1 << 32
        return int(self.rows.ids[min(self.start + share, len(self.rows)) - 1])

    def take(self, bound: int) -> tuple[_Source, Rows]:
        assert self.rows is not None
        start = self.start
        last = np.uint32(min(bound, (1 << 32) - 1))  # of a wider type, all ids would be converted first
        self.start += int(self.rows.ids[start:].searchsorted(last, side="right"))
        return self.source, self.rows.part(start, self.start)


def _read(storage: Storage, piece: Manifest, info: ChunkInfo, into: Bytes | None = None) -> Chunk:
    try:
        return read_chunk(storage, piece, info, into=into)
    except StorageError as error:
        if not error.missing:
            raise
        gone = _found(storage, piece.name) is None
        raise PieceBroken(piece.name, f"{piece.name}/{info.name} is missing", gone=gone) from error
    except CheckpointError as error:
        raise PieceBroken(piece.name, error.message) from error


def _by_shard(piece: Manifest) -> list[list[ChunkInfo]]:
    found: dict[str, list[ChunkInfo]] = {}
    for info in piece.chunks:
        found.setdefault(info.shard, []).append(info)
    return list(found.values())


def rising_runs(storage: Storage, piece: Manifest) -> list[list[ChunkInfo]]:
    """For a piece whose chunks are not in order: reads them once, and lays each behind the first run it fits."""
    runs: list[tuple[dict[str, int], list[ChunkInfo]]] = []
    for info in piece.chunks:
        ranges = {name: (int(r.ids[0]), int(r.ids[-1])) for name, r in _read(storage, piece, info).items() if len(r)}
        fits = (run for run in runs if all(run[0].get(name, -1) < low for name, (low, _) in ranges.items()))
        run = next(fits, None)
        if run is None:
            run = {}, []
            runs.append(run)
        run[0].update({name: high for name, (_, high) in ranges.items()})
        run[1].append(info)
    return [infos for _, infos in runs]


# -- writing -----------------------------------------------------------------------------------------------


class _Writer:
    """Fills chunks, one per shard at a time, and writes full ones behind the merger's back, a few at most."""

    def __init__(
        self, storage: Storage, piece: str, token: str, shards: list[str], chunk: int, encoding: Encoding, bits: int
    ) -> None:
        self._storage, self._piece, self._token = storage, piece, token
        self._shards, self._chunk = shards, chunk
        self._encoding, self._bits = encoding, bits
        self._filling: list[dict[str, list[Rows]]] = [{} for _ in shards]
        self._filled = [0] * len(shards)
        self._count = [0] * len(shards)
        self._writing: collections.deque[Future[ChunkInfo]] = collections.deque()
        self._done: list[ChunkInfo] = []

    def add(self, pool: ThreadPoolExecutor, shard: int, table: str, rows: Rows) -> None:
        row_bytes = rows.nbytes // len(rows)
        start = 0
        while start < len(rows):
            room = (self._chunk - self._filled[shard]) // row_bytes
            if room < 1 and self._filled[shard]:
                self._flush(pool, shard)
                continue
            part = rows.part(start, start + max(room, 1))
            self._filling[shard].setdefault(table, []).append(part)
            self._filled[shard] += part.nbytes
            start += len(part)

    def finish(self, pool: ThreadPoolExecutor) -> list[ChunkInfo]:
        for shard in range(len(self._shards)):
            if self._filled[shard]:
                self._flush(pool, shard)
        self._wait(0)
        return sorted(self._done, key=lambda info: info.name)

    def _flush(self, pool: ThreadPoolExecutor, shard: int) -> None:
        self._wait(WRITES_AHEAD_MAX - 1)
        parts, self._filling[shard], self._filled[shard] = self._filling[shard], {}, 0
        label = self._shards[shard]
        # A shard may have a long name, a file may not.
        prefix = label if len(label) <= SHARD_LETTERS_MAX else f"{label[: SHARD_LETTERS_MAX - 5]}{shard:05d}"
        name = chunk_name(f"{prefix}-{MARK}{self._token}", self._count[shard], self._encoding)
        self._count[shard] += 1
        self._writing.append(pool.submit(self._write, name, parts, label))

    def _write(self, name: str, parts: dict[str, list[Rows]], shard: str) -> ChunkInfo:
        chunk = {table: concatenate(rows) for table, rows in parts.items()}
        return write_chunk(
            self._storage, self._piece, name, chunk, encoding=self._encoding, bits=self._bits, shard=shard
        )

    def _wait(self, most: int) -> None:
        while len(self._writing) > most:
            self._done.append(self._writing.popleft().result())
