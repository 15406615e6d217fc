"""Merging: `fold` makes one piece of a path of pieces. When to do so is in policy.py.

A merged piece says nothing new: it is a shortcut, and its rows are the newest on the path. Chunks first, the
manifest last, so it exists whole or not at all. File names carry a hash of what was folded and how, and the cut between
chunks depends on the rows alone: to fold again after a kill writes the same bytes under the same names, and two mergers
at work on one URL can at worst do the same work twice.

One shard after the other: a row belongs to one, and a server reads its own chunks only. Where pieces are of different
layouts there is one shard for all. Memory is bounded: one chunk per run of rising ids, a window that is merged, and the
chunks being filled and written. It is used again from shard to shard: fresh memory can cost more than the merging.

No piece is deleted here. Chunks that a killed merger left behind are written again by the next fold of the same pieces,
or found by `leftovers`.
"""

from __future__ import annotations

import collections
import hashlib
import itertools
import math
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Executor, Future
from operator import itemgetter
from typing import Any, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from regrow import _kernels
from regrow.checkpoint.chunks import CHUNK_BYTES, Chunk, Parts, Rows, read_chunk, write_chunk
from regrow.checkpoint.direct import Bytes, Memory
from regrow.checkpoint.lineage import Graph
from regrow.checkpoint.load import ALL_SHARDS, rows_bytes
from regrow.checkpoint.manifest import ChunkInfo, Encoding, Manifest, TableInfo, are_apart, chunk_name
from regrow.checkpoint.storage import Storage
from regrow.core.names import piece_name
from regrow.errors import CheckpointError, StorageError
from regrow.units import size_text

# Too small: long paths are folded in several rounds, and what they write is written twice. Too large: a merger beside
# a training job takes memory that the rows need.
MEMORY_BYTES_MAX = 1 << 30
# Rows that are merged at a time. Too small: the calls cost more than the rows. Too large: they leave the cache.
WINDOW_BYTES = 2 << 20
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
    if not replace and (found := graph.pieces.get(name) or _find_made(storage, name)) is not None:
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
            work.discard()
            scanned[disorder.piece.name] = rising_runs(storage, disorder.piece)


def _find_made(storage: Storage, name: str) -> Manifest | None:
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
        if reason := find_difference(piece, path[-1]):
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


def find_difference(older: Manifest, newer: Manifest) -> str | None:
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
        self.scanned = {piece.name: scanned[piece.name] for piece in path if piece.name in scanned}
        self.name = piece_name(path[0].source, path[-1].target.id)
        self.bits, self.encoding, self.memory_bytes_max = bits, encoding, memory
        self.memory = Memory()
        shards = sorted({info.shard for piece in path for info in piece.chunks})
        divided = are_apart(shards)
        self.shards: dict[str, list[_Run]] = {shard: [] for shard in (shards if divided else [ALL_SHARDS])}
        for age, piece in enumerate(path):
            # As much memory for all runs of a piece: then the next shard's fit into what this one leaves.
            sizes = [(info.bytes, rows_bytes(piece, info)) for info in piece.chunks]
            file_bytes, decoded_bytes = (max(size) for size in zip(*sizes, strict=True)) if sizes else (0, 0)
            for infos in scanned.get(piece.name) or _by_shard(piece):
                run = _Run(storage, self.memory, piece, age, infos, file_bytes, decoded_bytes)
                self.shards[infos[0].shard if divided else ALL_SHARDS].append(run)
        self.chunks_held = 1 + 2 * (WRITES_AHEAD_MAX + 1)  # being filled; waiting or being written, and encoded
        # A quarter of memory is for chunks being filled or written, an eighth for windows, the rest for reading.
        self.chunk = min(chunk, max(OUT_BYTES_MIN, memory // 4 // self.chunks_held))
        self.window = min(WINDOW_BYTES, memory // 24)

    @property
    def runs(self) -> Iterator[_Run]:
        return itertools.chain.from_iterable(self.shards.values())

    def estimate_memory(self, path: Sequence[Manifest]) -> int:
        """Bytes of memory to fold these pieces."""
        names = {piece.name for piece in path}
        most = 0
        for runs in self.shards.values():
            sizes = [run.rows_bytes_max for run in runs if run.piece.name in names]
            most = max(most, sum(sizes) + max(sizes, default=0))
        return most + 3 * self.window + self.chunks_held * self.chunk

    def fitting(self) -> int:
        """How many pieces from the end of the path fit memory together. At least two, or CheckpointError."""
        for count in range(len(self.path), 0, -1):
            if self.estimate_memory(self.path[-count:]) <= self.memory_bytes_max and (count > 1 or len(self.path) == 1):
                return count
        least = self.estimate_memory(self.path[-2:])
        have = size_text(self.memory_bytes_max)
        raise CheckpointError(
            f"{self.name} cannot be made in {have} of memory: two pieces need {size_text(least)}",
            hint="memory_bytes_max is too small for the chunks and shards of this checkpoint",
        )

    def run(self, progress: Progress | None) -> Manifest:
        total = sum(piece.bytes for piece in self.path)
        tables = sorted(self.path[-1].tables, key=lambda table: table.index)
        with self.storage.open_threads(WRITES_AHEAD_MAX, "merge") as pool:
            writer = _Writer(self, pool)
            read = 0  # of the shards before
            for number, (shard, runs) in enumerate(self.shards.items()):
                writer.begin(shard, number)
                for table in tables:
                    for parts in self.windows(table, runs):
                        writer.add(table.name, parts)
                        if progress is not None:
                            progress(read + sum(run.bytes_read for run in runs), total)
                for run in runs:
                    run.close()
                read += sum(run.bytes_read for run in runs)
            chunks = writer.finish()
        last = self.path[-1]
        manifest = Manifest(
            source=self.path[0].source,
            target=last.target,
            tables=last.tables,
            seed=last.seed,
            chunks=tuple(chunks),
            encoding=self.encoding,
            bits=self.bits,  # type: ignore[arg-type]
            folded=tuple(_list_folded(self.path)),
            made_by=MADE_BY,
        )
        if lost := self.storage.find_lost(manifest):
            raise CheckpointError(f"{lost} was deleted while the piece was made", hint="fold it again")
        self.storage.write_manifest(manifest)
        return manifest

    def token(self) -> str:
        """Names what is folded and how; equal tokens mean equal bytes."""
        parts = [f"{self.encoding} {self.bits} {self.chunk} {','.join(self.shards)}"]
        parts += [f"{piece}: {[[info.name for info in run] for run in runs]}" for piece, runs in self.scanned.items()]
        parts += [f"{piece.name}/{info.name} {info.crc32c}" for piece in self.path for info in piece.chunks]
        return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:TOKEN_LETTERS]

    def discard(self) -> None:
        """Removes the chunks of an attempt that met disorder: under this token no piece will ever be finished."""
        mark = f"-{MARK}{self.token()}-"
        for name in self.storage.names(self.name):
            if mark in name:
                self.storage.delete(f"{self.name}/{name}")

    def windows(self, table: TableInfo, runs: Sequence[_Run]) -> Iterator[list[Rows]]:
        """All rows of a table, some at a time: ids rise from one time to the next, and each has all there are of its
        ids, the oldest first. Rows may be looked at until the next are asked for."""
        cursors = [_Cursor(run, table.name) for run in runs]
        row_bytes = table.row_bytes
        rows_max = self.window // row_bytes
        while live := [cursor for cursor in cursors if cursor.fill()]:
            at_hand = sum(cursor.rows_left for cursor in live)
            if at_hand <= rows_max and not any(cursor.left for cursor in live):
                # The rest, most often all there is: of many small tables, shares and bounds would cost more than rows.
                parts = [cursor.take(cursor.rows_left) for cursor in live]
            else:
                # Below the bound every cursor has all its rows at hand, and at most its share of a window. Half of that
                # goes by what is at hand of each: long and short ones that span the same ids come to their ends
                # together. The other half is the same for all: of those that do not, shares must not shrink with what
                # is left.
                even = rows_max // 2 // len(live)
                bound = min(cursor.reach(max(1, even + rows_max // 2 * cursor.rows_left // at_hand)) for cursor in live)
                counts = [(cursor, cursor.count(bound)) for cursor in live]
                parts = [cursor.take(count) for cursor, count in counts if count]
            window = [rows for _, rows in sorted(parts, key=itemgetter(0))]
            yield window
            del parts
            window.clear()  # whoever still has it: the chunks it was of make room for the next


def _list_folded(path: Iterable[Manifest]) -> Iterator[str]:
    """The pieces as training wrote them; of a full only its name, or the list would grow for ever."""
    for piece in path:
        yield from piece.folded if piece.source is not None and piece.folded else (piece.name,)


def newest(parts: Sequence[Rows]) -> npt.NDArray[np.uint64]:
    """Where the newest of each row is, for `gather`. Parts come the oldest first."""
    return _kernels.newest_rows([rows.ids for rows in parts])


def gather(parts: Sequence[Rows], places: npt.NDArray[np.uint64], memory: Bytes) -> Rows:
    """A copy of some rows in this memory, which they fill."""
    left = memory.view(np.uint32)

    def gather_part(lists: list[npt.NDArray[Any]]) -> npt.NDArray[Any]:
        nonlocal left
        shape = len(places), *lists[0].shape[1:]
        out, left = left[: math.prod(shape)].view(lists[0].dtype).reshape(shape), left[math.prod(shape) :]
        _kernels.gather_rows(lists, places, out)
        return out

    ids, weight = gather_part([rows.ids for rows in parts]), gather_part([rows.weight for rows in parts])
    return Rows(ids, weight, {name: gather_part([rows.states[name] for rows in parts]) for name in parts[0].states})


def find_leftovers(storage: Storage, manifests: Iterable[Manifest], unfinished: Iterable[str]) -> list[tuple[str, str]]:
    """(piece, file) of merged chunks that no manifest names: of a merger that died, or is at work just now. Of an
    unfinished piece that has no files at all, (piece, "")."""
    found = []
    whole = {piece.name: {info.name for info in piece.chunks} for piece in manifests if piece.made_by == MADE_BY}
    for piece in [*whole, *unfinished]:
        names = storage.names(piece)
        found += [(piece, name) for name in names or [""] if name not in whole.get(piece, ()) and _is_ours(name)]
    return found


def _is_ours(name: str) -> bool:
    return not name or _MERGED.fullmatch(name) is not None


# -- reading -----------------------------------------------------------------------------------------------


class _Source(NamedTuple):
    """Where rows came from: later pieces win, and within a piece later chunks, as in a restore."""

    age: int
    position: int


class _Run:
    """Chunks of a piece in which the ids of every table rise. Holds one of them decoded; the next may be read into the
    same memory, so rows of the last one must not be looked at any more."""

    def __init__(
        self,
        storage: Storage,
        memory: Memory,
        piece: Manifest,
        age: int,
        infos: list[ChunkInfo],
        file_bytes_max: int,
        rows_bytes_max: int,
    ) -> None:
        self.piece, self.age, self.infos = piece, age, infos
        self.file_bytes_max, self.rows_bytes_max = file_bytes_max, rows_bytes_max
        self.bytes_read = 0
        self.position = {info.name: position for position, info in enumerate(piece.chunks)}
        self._storage, self._memory = storage, memory
        # Only where rows are as they are stored: otherwise they would take memory of their own beside it.
        self._again = storage.local and piece.exact and piece.encoding == "raw"
        self._buffer: Bytes | None = None
        self._held: tuple[str, Chunk] | None = None

    def read(self, info: ChunkInfo, table: str) -> Rows:
        """Small tables share a chunk: the next table finds it held."""
        if self._held is None or self._held[0] != info.name:
            self._held = None
            buffer, self._buffer = self._buffer, None  # after an error nobody may use it
            if buffer is None and self._again:
                buffer = self._memory.take(self.file_bytes_max)
            self._held = info.name, _read(self._storage, self.piece, info, buffer)
            self._buffer = buffer
            self.bytes_read += info.bytes
        return self._held[1][table]

    def close(self) -> None:
        """Nobody looks at its rows any more."""
        self._held = None
        if self._buffer is not None:
            self._memory.give(self._buffer)
            self._buffer = None


class _Cursor:
    """How far a run of one table was merged."""

    def __init__(self, run: _Run, table: str) -> None:
        self.run, self.table = run, table
        self.left = collections.deque(info for info in run.infos if info.rows.get(table))
        self.rows: Rows | None = None
        self.start = self.rows_left = 0  # of the chunk at hand
        self.source = _Source(run.age, 0)

    def fill(self) -> bool:
        """Has the next chunk at hand if the last one is used up; False at the end."""
        if self.rows_left:
            return True
        last = None if self.rows is None else self.rows.ids[-1]
        self.rows = None
        if not self.left:
            return False
        info = self.left.popleft()
        self.rows = self.run.read(info, self.table)
        self.start, self.rows_left = 0, len(self.rows)
        self.source = _Source(self.run.age, self.run.position[info.name])
        if last is not None and self.rows.ids[0] <= last:
            raise Disorder(self.run.piece)
        return True

    def reach(self, share: int) -> int:
        """The largest id up to which nothing is missing here."""
        assert self.rows is not None
        if self.rows_left <= share and not self.left:
            return 1 << 32
        return int(self.rows.ids[self.start + min(share, self.rows_left) - 1])

    def count(self, bound: int) -> int:
        """Rows at hand whose ids are not above it."""
        assert self.rows is not None
        last = np.uint32(min(bound, (1 << 32) - 1))  # of a wider type, all ids would be converted first
        return int(self.rows.ids[self.start :].searchsorted(last, side="right"))

    def take(self, count: int) -> tuple[_Source, Rows]:
        assert self.rows is not None
        start = self.start
        self.start, self.rows_left = start + count, self.rows_left - count
        return self.source, self.rows.part(start, start + count)


def _read(storage: Storage, piece: Manifest, info: ChunkInfo, into: Bytes | None = None) -> Chunk:
    try:
        return read_chunk(storage, piece, info, into=into)
    except StorageError as error:
        if not error.missing:
            raise
        gone = _find_made(storage, piece.name) is None
        raise PieceBroken(piece.name, f"{piece.name}/{info.name} is missing", gone=gone) from error
    except CheckpointError as error:
        raise PieceBroken(piece.name, error.message) from error


def _by_shard(piece: Manifest) -> list[list[ChunkInfo]]:
    found: dict[str, list[ChunkInfo]] = {}
    for info in piece.chunks:
        found.setdefault(info.shard, []).append(info)
    return list(found.values())


def rising_runs(storage: Storage, piece: Manifest) -> list[list[ChunkInfo]]:
    """For a piece whose chunks are not in order: reads them once, and lays each behind the first run of its shard that
    it fits."""
    runs: list[tuple[dict[str, int], list[ChunkInfo]]] = []
    for info in piece.chunks:
        ranges = {name: (int(r.ids[0]), int(r.ids[-1])) for name, r in _read(storage, piece, info).items() if len(r)}
        mine = (run for run in runs if run[1][0].shard == info.shard)
        fits = (run for run in mine if all(run[0].get(name, -1) < low for name, (low, _) in ranges.items()))
        run = next(fits, None)
        if run is None:
            run = {}, []
            runs.append(run)
        run[0].update({name: high for name, (_, high) in ranges.items()})
        run[1].append(info)
    return [infos for _, infos in runs]


# -- writing -----------------------------------------------------------------------------------------------


class _Writer:
    """Fills chunks with the newest rows and writes full ones behind the merger's back, a few at most."""

    def __init__(self, fold: Fold, pool: Executor) -> None:
        self._fold, self._pool, self._token = fold, pool, fold.token()
        self._shard, self._prefix, self._count = "", "", 0
        self._filling: Parts = {}
        self._filled = 0
        self._slab: Bytes | None = None  # where rows of the chunk being filled are
        self._writing: collections.deque[Future[ChunkInfo]] = collections.deque()
        self._done: list[ChunkInfo] = []

    def begin(self, shard: str, number: int) -> None:
        self._flush()
        self._shard, self._count = shard, 0
        # A shard may have a long name, a file may not.
        short = shard if len(shard) <= SHARD_LETTERS_MAX else f"{shard[: SHARD_LETTERS_MAX - 5]}{number:05d}"
        self._prefix = f"{short}-{MARK}{self._token}"

    def add(self, table: str, parts: Sequence[Rows]) -> None:
        """Of some rows, the oldest first, the newest of each."""
        places = newest(parts)
        row_bytes = parts[0].row_bytes
        start = 0
        while start < len(places):
            room = (self._fold.chunk - self._filled) // row_bytes
            if room < 1 and self._filled:
                self._flush()
                continue
            chosen = places[start : start + max(room, 1)]
            self._filling.setdefault(table, []).append(self._gather(parts, chosen))
            start += len(chosen)

    def finish(self) -> list[ChunkInfo]:
        self._flush()
        self._wait(0)
        return sorted(self._done, key=lambda info: info.name)

    def _gather(self, parts: Sequence[Rows], places: npt.NDArray[np.uint64]) -> Rows:
        """A copy of some rows in the slab."""
        size = parts[0].row_bytes * len(places)
        if self._slab is None:
            self._slab = self._fold.memory.take(max(self._fold.chunk, size))
        start, self._filled = self._filled, self._filled + size
        return gather(parts, places, self._slab[start : start + size])

    def _flush(self) -> None:
        if self._slab is None:
            return
        self._wait(WRITES_AHEAD_MAX - 1)
        chunk, slab = self._filling, self._slab
        self._filling, self._filled, self._slab = {}, 0, None
        name = chunk_name(self._prefix, self._count, self._fold.encoding)
        self._count += 1
        self._writing.append(self._pool.submit(self._write, name, chunk, slab, self._shard))

    def _write(self, name: str, chunk: Parts, slab: Bytes, shard: str) -> ChunkInfo:
        fold = self._fold
        info = write_chunk(fold.storage, fold.name, name, chunk, encoding=fold.encoding, bits=fold.bits, shard=shard)
        fold.memory.give(slab)  # not after an error: a call that hangs may still be reading it
        return info

    def _wait(self, most: int) -> None:
        while len(self._writing) > most:
            self._done.append(self._writing.popleft().result())
