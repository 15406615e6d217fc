"""Chunks on their way out: memory -> local disk -> remote storage, without training waiting for the network.

`submit` hands a chunk over and returns at once while few are in memory. A thread encodes chunks and puts them on the
local disk, which frees their memory; another brings them to storage. Both places are bounded, and a full one makes the
one before it wait: the disk the memory, the memory `submit`. So memory holds at most `chunks_in_memory_max` chunks of
rows, and in each thread one encoded chunk where that is not the rows as they are.

If storage is a local file system there is no second place: the disk hop would write every byte twice to gain nothing,
so chunks go straight to storage, from a few threads.

The first error of a piece stays with it: `submit` and `finish` raise it, and what is left of the piece is dropped.
Other pieces go on. Staged files are worth nothing after a crash (their piece has no manifest), so they are not fsynced,
and whoever starts next in the same directory removes them.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import fcntl
import os
import queue
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from regrow.checkpoint import failpoints
from regrow.checkpoint.chunks import Chunk, describe, encode_chunk
from regrow.checkpoint.manifest import ChunkInfo, Encoding
from regrow.checkpoint.private import make_private
from regrow.checkpoint.storage import Storage
from regrow.errors import CheckpointError, RegrowError, StorageError

# Each chunk on a local file system is fsynced, and meanwhile the next ones are written. Too few: the disk waits for
# files. Too many: no chunk may be made while all that memory may hold are on their way.
LOCAL_WRITERS = 3
CHUNKS_IN_MEMORY_MAX = 4  # Too small: the disk has to wait for rows. Too large: memory.
DISK_BYTES_MAX = 8 << 30  # Too small: a slow network is felt in training. Too large: the disk fills up.
# Nothing moved for so long: the disk hangs where chunks are staged; calls of storage come to an end by themselves. The
# piece is given up. Too small: a slow disk counts as hung. Too large: a checkpoint that will not be is waited for.
STALL_SECONDS_MAX = 300.0
LOCK_SECONDS_MAX = 30.0  # For another process that begins in the same staging directory; it has to do with few files.
CLOSE_SECONDS_MAX = 90.0  # Longer than a call of storage may take; a thread that hangs is left behind, it is a daemon.
LOOK_SECONDS = 0.05
PREFIX = "staged-"  # of the directory that one process has inside the staging directory


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """Where chunks are now, and what was stored since the start."""

    chunks_in_memory: int
    chunks_on_disk: int
    disk_bytes: int
    stored_chunks: int
    stored_bytes: int


@dataclasses.dataclass(slots=True, kw_only=True)
class Pace:
    """A limit of bytes per second, over time: an upload may begin once the ones before it have used up their share."""

    bytes_per_second: float | None
    free_at: float = 0.0

    def wait_seconds(self, now: float, size: int) -> float:
        """How long an upload of `size` bytes, asked for at `now`, has to wait; it is counted as done."""
        if self.bytes_per_second is None:
            return 0.0
        start = max(now, self.free_at)
        self.free_at = start + size / self.bytes_per_second
        return start - now


@dataclasses.dataclass(slots=True, eq=False)
class _Piece:
    infos: list[ChunkInfo | None] = dataclasses.field(default_factory=list)  # in the order of submission
    open_chunks: int = 0  # submitted and neither stored nor dropped
    error: BaseException | None = None
    aborted: bool = False

    @property
    def lost(self) -> bool:
        return self.aborted or self.error is not None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Job:
    piece: _Piece
    index: int  # in piece.infos
    path: str
    name: str
    chunk: Chunk
    encoding: Encoding
    bits: int
    shard: str


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Staged:
    piece: _Piece
    index: int
    path: str
    info: ChunkInfo
    file: Path


class Stager:
    """One per process that writes chunks. Submitted arrays must not change until their piece is finished.

    `directory` is where chunks wait for remote storage; several processes may share it, but nobody else may enter (mode
    0700). None: one in the system's directory for temporary files.
    """

    def __init__(
        self,
        storage: Storage,
        *,
        directory: str | Path | None = None,
        chunks_in_memory_max: int = CHUNKS_IN_MEMORY_MAX,
        disk_bytes_max: int = DISK_BYTES_MAX,
        bytes_per_second: float | None = None,
    ) -> None:
        assert chunks_in_memory_max >= 1
        assert disk_bytes_max >= 1
        assert bytes_per_second is None or bytes_per_second > 0
        self._storage = storage
        self._chunks_in_memory_max = chunks_in_memory_max
        self._disk_bytes_max = disk_bytes_max
        self._pace = Pace(bytes_per_second=bytes_per_second)
        self._pieces: dict[str, _Piece] = {}
        self._changed = threading.Condition()  # guards all below, and the pieces
        self._closed = False
        self._moved_at = time.monotonic()  # when anything last went on, or will, at the pace that was asked for
        self._chunks_in_memory = 0
        self._chunks_on_disk = 0
        self._disk_bytes = 0
        self._stored_chunks = 0
        self._stored_bytes = 0
        # Queues need no bound of their own: the counters above bound them.
        self._encoding: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._uploading: queue.SimpleQueue[_Staged | None] = queue.SimpleQueue()
        self._own = None if storage.local else _OwnDirectory(_choose_directory(directory))
        encoders = LOCAL_WRITERS if storage.local else 1
        self._threads = [
            threading.Thread(target=self._encode_all, name=f"regrow-encode-{index}", daemon=True)
            for index in range(encoders)
        ]
        if self._own is not None:
            self._threads.append(threading.Thread(target=self._upload_all, name="regrow-upload", daemon=True))
        for thread in self._threads:
            thread.start()

    def submit(
        self, piece: str, name: str, chunk: Chunk, *, encoding: Encoding = "raw", bits: int = 32, shard: str
    ) -> None:
        """Takes over a chunk. Blocks while too many are in memory; raises what already went wrong with its piece."""
        with self._changed:
            state = self._pieces.setdefault(piece, _Piece())
            self._wait_for_room(piece, state)
            self._moved_at = max(self._moved_at, time.monotonic())
            self._chunks_in_memory += 1
            state.open_chunks += 1
            state.infos.append(None)
            index = len(state.infos) - 1
        path = f"{piece}/{name}"
        self._encoding.put(
            _Job(piece=state, index=index, path=path, name=name, chunk=chunk, encoding=encoding, bits=bits, shard=shard)
        )

    def wait_for_room(self, piece: str) -> None:
        """Blocks while too many chunks are in memory: whoever makes the next one only then holds none beyond them."""
        with self._changed:
            self._wait_for_room(piece, self._pieces.setdefault(piece, _Piece()))

    def finish(self, piece: str) -> list[ChunkInfo]:
        """Waits until all chunks of a piece are stored, durably; returns them in the order of submission.

        Raises the first error. Either way the stager then forgets the piece: what it stored has no manifest.
        """
        with self._changed:
            state = self._pieces.setdefault(piece, _Piece())
            self._wait(piece, state, lambda: state.open_chunks == 0 or self._closed)
            self._pieces.pop(piece, None)
            self._raise_if_lost(piece, state)
            infos = [info for info in state.infos if info is not None]
            assert len(infos) == len(state.infos)
            return infos

    def abort(self, piece: str) -> None:
        """Drops what waits and returns once nothing more of the piece is written from here. What is on storage already
        stays there, unfinished, for whoever deletes the piece: other processes may be writing to it."""
        with self._changed:
            state = self._pieces.pop(piece, None)
            if state is None:
                return
            state.aborted = True
            self._changed.notify_all()
            self._wait(piece, state, lambda: state.open_chunks == 0 or self._closed)

    @property
    def progress(self) -> Progress:
        with self._changed:
            return Progress(
                chunks_in_memory=self._chunks_in_memory,
                chunks_on_disk=self._chunks_on_disk,
                disk_bytes=self._disk_bytes,
                stored_chunks=self._stored_chunks,
                stored_bytes=self._stored_bytes,
            )

    def close(self) -> None:
        """Ends both threads, dropping what waits, and removes the staged files. One that writes to storage now comes
        to its end: at most as long as storage may take for a call."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        for _ in self._threads:
            self._encoding.put(None)
        end = time.monotonic() + CLOSE_SECONDS_MAX
        for thread in self._threads:
            thread.join(max(0.0, end - time.monotonic()))
        if self._own is not None:
            self._own.close()

    def __enter__(self) -> Stager:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _wait_for_room(self, piece: str, state: _Piece) -> None:
        self._wait(
            piece, state, lambda: self._chunks_in_memory < self._chunks_in_memory_max or state.lost or self._closed
        )
        self._raise_if_lost(piece, state)

    def _wait(self, piece: str, state: _Piece, done: Callable[[], bool]) -> None:
        """As long as anything moves. If nothing does, the piece is lost, and nobody waits for it any more."""
        while not self._changed.wait_for(done, timeout=STALL_SECONDS_MAX / 10):
            if time.monotonic() - self._moved_at > STALL_SECONDS_MAX:
                error = StorageError(
                    f"{piece} cannot be written: nothing moved for {STALL_SECONDS_MAX:g} s",
                    hint="does the disk answer where chunks are staged?",
                )
                state.error = state.error or error
                self._changed.notify_all()
                return

    def _note_move(self) -> None:
        """The lock is held."""
        self._moved_at = max(self._moved_at, time.monotonic())
        self._changed.notify_all()

    def _raise_if_lost(self, piece: str, state: _Piece) -> None:
        if isinstance(state.error, RegrowError):
            raise state.error
        if state.error is not None:
            raise CheckpointError(f"{piece} cannot be written: {state.error!r}") from state.error
        if state.aborted or self._closed:
            raise StorageError(f"{piece} cannot be written: it was given up")

    def _encode_all(self) -> None:
        """The first thread. Whatever happens to a chunk is its piece's matter; the thread goes on."""
        while (job := self._encoding.get()) is not None:
            self._encode(job)
            del job  # or the last chunk would stay in memory until the next one comes
        self._uploading.put(None)

    def _encode(self, job: _Job) -> None:
        staged: _Staged | None = None
        stored: ChunkInfo | None = None
        error: BaseException | None = None
        try:
            if not self._is_dropped(job.piece):
                data = encode_chunk(job.chunk, encoding=job.encoding, bits=job.bits)
                info = describe(data, job.name, job.chunk, shard=job.shard)
                if self._own is not None:
                    staged = self._stage(job, info, b"".join(data))
                elif self._wait_for_pace(job.piece, info.bytes):
                    self._storage.write(job.path, data)
                    stored = info
        except BaseException as caught:
            error = caught
        with self._changed:
            self._chunks_in_memory -= 1
            self._note_move()
        if staged is not None:
            self._uploading.put(staged)
        else:
            self._over(job.piece, job.index, stored, error)

    def _stage(self, job: _Job, info: ChunkInfo, data: bytes) -> _Staged | None:
        """Puts an encoded chunk on the disk once there is room for it. One that is larger than all the room there may
        be goes alone: better slowly than never."""
        assert self._own is not None
        with self._changed:
            self._changed.wait_for(
                lambda: (
                    self._disk_bytes + info.bytes <= self._disk_bytes_max
                    or self._chunks_on_disk == 0
                    or job.piece.lost
                    or self._closed
                )
            )
            if job.piece.lost or self._closed:
                return None
            self._chunks_on_disk += 1
            self._disk_bytes += info.bytes
        try:
            file = self._own.write(data)
        except BaseException:
            self._leave_disk(info)
            raise
        return _Staged(piece=job.piece, index=job.index, path=job.path, info=info, file=file)

    def _upload_all(self) -> None:
        """The second thread."""
        assert self._own is not None
        while (staged := self._uploading.get()) is not None:
            stored: ChunkInfo | None = None
            error: BaseException | None = None
            try:
                if not self._is_dropped(staged.piece) and self._wait_for_pace(staged.piece, staged.info.bytes):
                    self._storage.write(staged.path, self._own.read(staged.file))
                    stored = staged.info
            except BaseException as caught:
                error = caught
            with contextlib.suppress(OSError):  # its directory is removed in the end
                self._own.delete(staged.file)
            self._leave_disk(staged.info)
            self._over(staged.piece, staged.index, stored, error)

    def _is_dropped(self, piece: _Piece) -> bool:
        with self._changed:
            return piece.lost or self._closed

    def _wait_for_pace(self, piece: _Piece, size: int) -> bool:
        """False if the piece was lost meanwhile."""
        with self._changed:
            seconds = self._pace.wait_seconds(time.monotonic(), size)
            self._moved_at = max(self._moved_at, time.monotonic() + seconds)
            return not self._changed.wait_for(lambda: piece.lost or self._closed, timeout=seconds)

    def _leave_disk(self, info: ChunkInfo) -> None:
        with self._changed:
            self._chunks_on_disk -= 1
            self._disk_bytes -= info.bytes
            self._note_move()

    def _over(self, piece: _Piece, index: int, stored: ChunkInfo | None, error: BaseException | None) -> None:
        with self._changed:
            if stored is not None:
                piece.infos[index] = stored
                self._stored_chunks += 1
                self._stored_bytes += stored.bytes
            piece.error = piece.error or error
            piece.open_chunks -= 1
            self._note_move()


class _OwnDirectory:
    """One process's part of the staging directory, locked while the process lives: several may share the directory,
    and what has no lock any more belongs to nobody."""

    def __init__(self, parent: Path) -> None:
        self._number = 0
        self._parent = parent
        self._make()

    def _make(self) -> None:
        parent = self._parent
        with self._explain_errors(parent):
            make_private(parent)
            with _Locked(parent):  # nobody takes a new directory, not locked yet, for an old one
                for old in sorted(parent.glob(f"{PREFIX}*")):
                    _remove_if_free(old)
                failpoints.hit("stage.mkdir")
                self.path = Path(tempfile.mkdtemp(prefix=f"{PREFIX}{os.getpid()}-", dir=parent))
                self._lock = _Locked(self.path)

    def write(self, data: bytes) -> Path:
        if not self.path.exists():  # cleared away by somebody: what waited there is lost, what comes now is not
            self._lock.close()
            self._make()
        self._number += 1
        file = self.path / f"{self._number:09d}"
        with self._explain_errors(file):
            torn = failpoints.hit("stage.data")
            try:
                file.write_bytes(data[: len(data) // 2] if torn else data)
            except BaseException:
                file.unlink(missing_ok=True)
                raise
        if torn:
            failpoints.die()
        return file

    def read(self, file: Path) -> bytes:
        with self._explain_errors(file):
            return file.read_bytes()

    def delete(self, file: Path) -> None:
        failpoints.hit("stage.delete")
        file.unlink()

    def close(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)
        self._lock.close()

    @contextlib.contextmanager
    def _explain_errors(self, path: Path) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            full = error.errno in (errno.ENOSPC, errno.EDQUOT)
            problem = "no space left there" if full else error.strerror or str(error)
            raise StorageError(
                f"cannot stage chunks in {path}: {problem}",
                hint="choose another staging directory, or let less wait in it" if full else None,
            ) from error


class _Locked:
    """A lock on a directory, gone with the process that holds it."""

    def __init__(self, path: Path, *, wait: bool = True) -> None:
        self._file = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        end = time.monotonic() + (LOCK_SECONDS_MAX if wait else 0.0)
        try:
            while not self._take(last=time.monotonic() >= end):
                time.sleep(LOOK_SECONDS)
        except BaseException:
            os.close(self._file)
            raise

    def _take(self, *, last: bool) -> bool:
        """Whether it is ours now; the last time an error says that it is not."""
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if last:
                raise TimeoutError(errno.ETIMEDOUT, "another process has locked it") from None
            return False
        return True

    def close(self) -> None:
        os.close(self._file)

    def __enter__(self) -> _Locked:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _choose_directory(given: str | Path | None) -> Path:
    """One that a user names may be a link to where there is room; the default must be what it is called."""
    if given is not None:
        return Path(given).resolve()
    return Path(tempfile.gettempdir()) / f"regrow-staging-{os.getuid()}"


def _remove_if_free(path: Path) -> None:
    with contextlib.suppress(OSError), _Locked(path, wait=False):
        shutil.rmtree(path)
