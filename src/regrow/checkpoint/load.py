"""From storage back into memory: restore a cut, and look for damage.

Chunks are read, checked and decoded ahead by threads and applied in order, oldest piece first; what is held ahead is
bounded. A piece that turns out broken is an edge that is not there, and another path to the *same* cut is taken from
where we are, without starting over. This is right for the following reason. Say everything up to cut c was applied, and
some of what follows. Each row written since c was changed on the way from c to the target. Every path from c to the
target holds all rows changed on that way, so it writes each of them again, with the target's value in the end. (A
target that is not the same would need rows to be reset; that is never done here: who wants another cut asks for it.)
So `apply` must be a plain overwrite, and may see a row more than once.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import Executor, Future

from regrow.checkpoint import direct
from regrow.checkpoint.chunks import CHUNK_BYTES, Chunk, read_chunk
from regrow.checkpoint.direct import Bytes
from regrow.checkpoint.lineage import Graph, Plan
from regrow.checkpoint.manifest import MANIFEST, ChunkInfo, Manifest, Stored
from regrow.checkpoint.storage import Storage
from regrow.errors import CheckpointError, StorageError

THREADS_DEFAULT = 4
# Of chunks that are on their way or wait to be applied; one always may. Four, as when they are stored. Too small:
# threads wait for each other. Too large: a restore needs memory that the rows need, and fresh memory is slow.
AHEAD_BYTES_MAX = 4 * CHUNK_BYTES + (8 << 20)
# So many pieces may turn out broken before a restore gives up: then the storage is broken and not a piece.
BROKEN_PIECES_MAX = 16

ALL_SHARDS = "all"  # the shard of a chunk that holds rows of any

Apply = Callable[[Manifest, Chunk], None]
Progress = Callable[[int, int], None]  # bytes done, bytes in all


@dataclasses.dataclass(frozen=True, slots=True)
class Problem:
    """Something wrong with a file. `harmful`: the piece cannot be used; otherwise it only takes space. `unanswered`:
    the file may be sound, storage did not say."""

    piece: str
    file: str
    what: str
    harmful: bool = True
    unanswered: bool = dataclasses.field(default=False, compare=False)

    def __str__(self) -> str:
        return f"{self.piece}/{self.file}: {self.what}"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LoadReport:
    """What a restore did. `broken`: pieces that were gone around; `pieces`: those that were applied whole."""

    seconds: float
    bytes: int
    rows: int
    pieces: tuple[str, ...]
    broken: tuple[Problem, ...]
    exact: bool


_Ahead = Generator[tuple[Manifest, ChunkInfo | None, Chunk], None, None]
_Read = tuple[Chunk, Bytes]  # and the memory it was read into


class _Broken(Exception):
    def __init__(self, piece: Manifest, file: str, cause: CheckpointError) -> None:
        super().__init__(str(cause))
        self.piece = piece
        self.problem = Problem(piece.name, file, cause.message.removeprefix(f"{piece.name}/{file}: "))
        self.cause = cause


# -- restore -----------------------------------------------------------------------------------------------


def restore(
    storage: Storage,
    plan: Plan,
    apply: Apply,
    *,
    threads: int = THREADS_DEFAULT,
    shard_filter: Callable[[str], bool] | None = None,
    progress: Progress | None = None,
    ahead_bytes_max: int = AHEAD_BYTES_MAX,
) -> LoadReport:
    """Applies the pieces of a plan to an untouched model, in order. The target is the plan's or CheckpointError.

    Rows are `apply`'s until it returns: their memory is used again.
    `shard_filter` says, by the name of the shard that wrote a chunk, whether its rows are wanted here. Chunks merged
    from jobs of different layouts have the shard "all" and are always read.
    """
    load = _Load(storage, plan, apply, shard_filter, progress, ahead_bytes_max)
    with storage.open_threads(threads, "restore") as pool:
        return load.run(pool)


class _Load:
    """One restore: what was applied, what turned out broken, and the way that is left."""

    def __init__(
        self,
        storage: Storage,
        plan: Plan,
        apply: Apply,
        shard_filter: Callable[[str], bool] | None,
        progress: Progress | None,
        ahead_bytes_max: int,
    ) -> None:
        self.storage, self.target, self.apply = storage, plan.target, apply
        self.memory = direct.Memory()
        self.graph: Graph = plan.graph
        self.way: list[Manifest] = list(plan.pieces)
        self.shard_filter, self.progress, self.ahead_bytes_max = shard_filter, progress, ahead_bytes_max
        self.reached: list[str | None] = [None]  # cuts that were applied whole
        self.applied: list[Manifest] = []
        self.broken: list[_Broken] = []
        self.bytes = self.rows = 0

    def run(self, pool: Executor) -> LoadReport:
        began = time.monotonic()
        while self.way:
            try:
                self._look(pool)
                self._follow(pool)
            except _Broken as broken:
                self._go_around(broken)
        return LoadReport(
            seconds=time.monotonic() - began,
            bytes=self.bytes,
            rows=self.rows,
            pieces=tuple(piece.name for piece in self.applied),
            broken=tuple(each.problem for each in self.broken),
            exact=all(piece.exact for piece in self.applied),
        )

    def _choose_chunks(self, piece: Manifest) -> list[ChunkInfo]:
        if self.shard_filter is None:
            return list(piece.chunks)
        return [info for info in piece.chunks if info.shard == ALL_SHARDS or self.shard_filter(info.shard)]

    def _look(self, pool: Executor) -> None:
        """Files that are missing or too short are found before anything is applied: one listing per piece."""
        for piece, found in zip(self.way, pool.map(self._list_files, self.way), strict=True):
            if isinstance(found, _Broken):
                raise found
            for info in self._choose_chunks(piece):
                try:
                    what = _check_size(self.storage, piece, info, found)
                except CheckpointError as error:
                    raise _Broken(piece, info.name, error) from error
                if what:
                    raise _Broken(piece, info.name, CheckpointError(what))

    def _list_files(self, piece: Manifest) -> dict[str, int] | _Broken:
        try:
            return self.storage.names(piece.name)
        except CheckpointError as error:
            return _Broken(piece, "", error)

    def _follow(self, pool: Executor) -> None:
        total = self.bytes + sum(info.bytes for piece in self.way for info in self._choose_chunks(piece))
        with contextlib.closing(self._chunks_ahead(pool)) as chunks:
            for piece, info, chunk in chunks:
                if info is None:  # the piece is complete
                    self.reached.append(piece.target.id)
                    self.applied.append(piece)
                    continue
                self.apply(piece, chunk)
                self.bytes += info.bytes
                self.rows += sum(info.rows.values())
                if self.progress is not None:
                    self.progress(self.bytes, total)
        self.way = []

    def _read(self, piece: Manifest, info: ChunkInfo) -> _Read:
        memory = self.memory.take(info.bytes)
        return read_chunk(self.storage, piece, info, into=memory), memory

    def _chunks_ahead(self, pool: Executor) -> _Ahead:
        """Decoded chunks in order; after the last one of a piece, (piece, None, {})."""
        jobs: Iterator[tuple[Manifest, ChunkInfo | None]] = (
            (piece, info) for piece in self.way for info in (*self._choose_chunks(piece), None)
        )
        ahead: collections.deque[tuple[Manifest, ChunkInfo | None, Future[_Read] | None]] = collections.deque()
        held, waiting = 0, next(jobs, None)
        try:
            while ahead or waiting is not None:
                while waiting is not None:
                    piece, info = waiting
                    cost = 0 if info is None else chunk_bytes(piece, info)
                    if held and held + cost > self.ahead_bytes_max:
                        break
                    held += cost
                    future = None if info is None else pool.submit(self._read, piece, info)
                    ahead.append((piece, info, future))
                    waiting = next(jobs, None)
                piece, info, future = ahead.popleft()
                if info is None or future is None:
                    yield piece, None, {}
                    continue
                try:
                    chunk, memory = future.result()
                except CheckpointError as error:
                    raise _Broken(piece, info.name, error) from error
                del future
                yield piece, info, chunk
                del chunk
                self.memory.give(memory)
                held -= chunk_bytes(piece, info)
        finally:
            for _, _, left in ahead:
                if left is not None:
                    left.cancel()

    def _go_around(self, broken: _Broken) -> None:
        self.broken.append(broken)
        self.graph = self.graph.without([broken.piece.name])
        # From any cut that is complete: the lemma above holds for each of them.
        way = self.graph.path(self.target.id, starts=self.reached[::-1])
        if way is None or len(self.broken) > BROKEN_PIECES_MAX:
            raise self._hopeless() from broken.cause
        self.way = way

    def _hopeless(self) -> CheckpointError:
        first = self.broken[0]
        what = "; ".join(str(each.problem) for each in self.broken)
        left = self.graph.newest()
        other = f"or restore an older cut: the newest without it is @{left.id}" if left else "no cut can be restored"
        if isinstance(first.cause, StorageError) and not first.cause.missing:
            hint = f"the storage did not answer; try again when it does, {other}"
        else:
            hint = f"`regrow ckpt verify {self.storage.url}` lists all damage; {other}"
        return CheckpointError(f"cut {self.target.id} cannot be restored, there is no way around: {what}", hint=hint)


def chunk_bytes(piece: Stored, info: ChunkInfo) -> int:
    """Bytes a chunk takes in memory while it is read: as stored, and its rows unless they are the same."""
    plain = piece.bits == 32 and piece.encoding == "raw"
    return info.bytes + (0 if plain else rows_bytes(piece, info))


def rows_bytes(piece: Stored, info: ChunkInfo) -> int:
    """Bytes of the rows of a chunk, decoded."""
    row = {table.name: table.row_bytes for table in piece.tables}
    return sum(count * row[table] for table, count in info.rows.items())


# -- verify ------------------------------------------------------------------------------------------------


def verify(
    storage: Storage, *, deep: bool = True, threads: int = THREADS_DEFAULT, progress: Progress | None = None
) -> list[Problem]:
    """Everything wrong on a storage URL, by piece. `deep` reads and decodes every chunk; else sizes only."""
    manifests, broken = storage.manifests()
    problems = [Problem(name, MANIFEST, _strip_name(reason, name)) for name, reason in broken]
    what = "not there: being written just now, or left behind by a process that died"
    problems += [Problem(name, MANIFEST, what, harmful=False) for name in storage.list_unfinished()]
    problems += verify_pieces(storage, manifests, deep=deep, threads=threads, progress=progress)
    return sorted(problems, key=lambda problem: (problem.piece, problem.file))


def verify_pieces(
    storage: Storage,
    manifests: Sequence[Stored],
    *,
    deep: bool,
    threads: int = THREADS_DEFAULT,
    progress: Progress | None = None,
) -> list[Problem]:
    """Everything wrong with the files of these pieces. StorageError if storage does not answer: that is no damage.

    A storage that answers, but not for some of the files, is asked for these once more; then they count as damaged.
    """
    problems = _problems(storage, manifests, deep=deep, threads=threads, progress=progress)
    doubtful = {problem.piece for problem in problems if problem.unanswered}
    if not doubtful:
        return problems
    storage.pieces()
    again = [piece for piece in manifests if piece.name in doubtful]
    certain = [problem for problem in problems if problem.piece not in doubtful]
    return certain + _problems(storage, again, deep=deep, threads=threads, progress=None)


def _problems(
    storage: Storage, manifests: Sequence[Stored], *, deep: bool, threads: int, progress: Progress | None
) -> list[Problem]:
    problems: list[Problem] = []
    total, done = sum(piece.bytes for piece in manifests), 0
    with storage.open_threads(threads, "verify") as pool:
        suspects: list[tuple[Stored, ChunkInfo]] = []
        for piece, found in zip(manifests, pool.map(lambda piece: _names(storage, piece), manifests), strict=True):
            wrong, readable = _listing_problems(storage, piece, found)
            problems += wrong
            suspects += [(piece, info) for info in readable]
        # Decoded rows end in the thread that read them: what waits here is an answer each, and memory is bounded.
        answers = pool.map(lambda job: _chunk_problem(storage, *job) if deep else None, suspects)
        for (_, info), answer in zip(suspects, answers, strict=True):
            problems += [answer] if answer else []
            done += info.bytes
            if progress is not None:
                progress(done, total)
    return problems


def _names(storage: Storage, piece: Stored) -> dict[str, int] | Problem:
    try:
        return storage.names(piece.name)
    except CheckpointError as error:
        return Problem(piece.name, "", error.message, unanswered=_is_unanswered(error))


def _listing_problems(
    storage: Storage, piece: Stored, found: dict[str, int] | Problem
) -> tuple[list[Problem], list[ChunkInfo]]:
    """(what a listing shows to be wrong, the chunks that are worth reading)"""
    if isinstance(found, Problem):
        return [found], []
    problems, readable = [], []
    for info in piece.chunks:
        if what := _check_size(storage, piece, info, found):
            problems.append(Problem(piece.name, info.name, what))
        else:
            readable.append(info)
    surplus = set(found) - {info.name for info in piece.chunks} - {MANIFEST, *piece.others}
    what = "not in the manifest: left behind by a process that died, or by a second merger"
    return problems + [Problem(piece.name, name, what, harmful=False) for name in sorted(surplus)], readable


def _chunk_problem(storage: Storage, piece: Stored, info: ChunkInfo) -> Problem | None:
    try:
        read_chunk(storage, piece, info)
    except CheckpointError as error:
        what = _strip_name(error.message, f"{piece.name}/{info.name}")
        return Problem(piece.name, info.name, what, unanswered=_is_unanswered(error))
    return None


def _is_unanswered(error: CheckpointError) -> bool:
    return isinstance(error, StorageError) and not error.missing


def _check_size(storage: Storage, piece: Stored, info: ChunkInfo, found: dict[str, int]) -> str | None:
    """By a listing. What that does not show is looked for itself: some are a little behind."""
    if info.name not in found:
        return None if storage.has(f"{piece.name}/{info.name}") else "missing"
    if found[info.name] != info.bytes:
        return f"{found[info.name]} bytes, the manifest says {info.bytes}"
    return None


def _strip_name(message: str, name: str) -> str:
    return message.removeprefix(f"{name}/{MANIFEST}").removeprefix(name).removeprefix(": ")
