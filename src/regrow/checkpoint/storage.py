"""Files of pieces on any fsspec URL: whole or absent, durable once written, and never waited for without end.

    URL/<piece>/<chunk>          written first
    URL/<piece>/manifest.json    written last: with it the piece exists, without it the directory is litter
    URL/saves/...                the same for saves of one server (saves.py); no piece is there

Deleting goes the other way, the manifest first. What a file system does for that is in files.py.

Every call runs in a thread of its own, so that one that hangs (NFS, a dead endpoint) can be given up after
`timeout_seconds`, retries included; the thread is a daemon and does not keep the process. An error that may pass is
tried again after growing waits. All errors are `StorageError` and name the file.

Options of a file system come from the environment, where fsspec and the libraries below it look for them. For s3://,
AWS_ENDPOINT_URL (read by botocore) and FSSPEC_S3_ENDPOINT_URL (read by fsspec when it is first imported, and stronger)
both name another endpoint; keys are where the AWS tools expect them.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import errno
import threading
from collections.abc import Callable
from typing import Any, TypeVar

from regrow.checkpoint import direct
from regrow.checkpoint.bounded import ask
from regrow.checkpoint.files import TEMPORARY, Data, Files, LocalFiles, Offsets, Whole, find_missing, open_files
from regrow.checkpoint.manifest import MANIFEST, Manifest, Stored, decode, encode
from regrow.core.names import is_piece_name, is_save_path, parse_piece_name
from regrow.errors import CheckpointError, StorageError

TIMEOUT_SECONDS = 60.0  # Too small: a slow upload counts as hung. Too large: a dead endpoint is noticed late.
ATTEMPTS = 3
WAIT_SECONDS = 0.5  # before the second attempt, and twice as long before each further one
ABANDONED_MAX = 16  # Calls that hang keep a thread and a chunk each; with so many, nothing more is tried.
STAMPS_PER_CALL = 256  # of local files
LISTING_THREADS = 8  # Manifests are small and far away: they are read side by side.

# Errors that trying again does not cure.
_FINAL = (FileNotFoundError, PermissionError, IsADirectoryError, NotADirectoryError, FileExistsError)
_FINAL_NUMBERS = {errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.ENAMETOOLONG, errno.ENOTEMPTY}
_FULL_NUMBERS = {errno.ENOSPC, errno.EDQUOT}
_FINAL_NAMES = {"NoCredentialsError", "PartialCredentialsError", "ParamValidationError", "ProfileNotFound"}

T = TypeVar("T")
Known = dict[str, tuple[str, Manifest]]  # manifests as they were read before, by piece, each with a stamp of its file


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Unfinished:
    """A directory without a manifest: what is in it, and when the last file came there (Unix seconds, by the storage's
    clock). None: the storage does not tell, so somebody may be writing just now."""

    name: str
    bytes: int
    changed: float | None

    def seconds(self, now: float) -> float:
        """For how long nothing was written to it. Not known is not at all."""
        return 0.0 if self.changed is None else max(0.0, now - self.changed)


class Storage:
    """Made by `Storage.open`. Paths are relative to the URL. May be used from many threads."""

    def __init__(self, url: str, files: Files, *, timeout_seconds: float, attempts: int) -> None:
        self.url = url
        self.local = isinstance(files, LocalFiles)
        self._files = files
        self._attempts = attempts
        self._timeout_seconds = timeout_seconds
        self._abandoned = 0
        self._lock = threading.Lock()

    def __repr__(self) -> str:
        return f"Storage({self.url!r})"

    @classmethod
    def open(cls, url: str, *, timeout_seconds: float = TIMEOUT_SECONDS, attempts: int = ATTEMPTS) -> Storage:
        """For a path, file://, memory://, s3:// or whatever fsspec knows. Reads and creates nothing yet."""
        assert timeout_seconds > 0
        assert attempts >= 1
        files = ask(f"open {url}", lambda: open_files(url))  # libraries may look for keys in places that do not answer
        return cls(url, files, timeout_seconds=timeout_seconds, attempts=attempts)

    def find_missing(self) -> str | None:
        """What has to be there before anything can be written here, and is not."""
        return self._call("look for", "", lambda given_up: find_missing(self._files))

    def open_threads(self, count: int, name: str) -> concurrent.futures.Executor:
        """For many calls side by side. All threads of this package that call storage come from here, or from whoever
        makes chunks (staging.py): in a simulated storage there are none."""
        return concurrent.futures.ThreadPoolExecutor(count, thread_name_prefix=name)

    def pieces(self) -> list[str]:
        """Names of the pieces that have a manifest, in order."""
        return [name for name, stamp in self._stamps() if stamp is not None]

    def list_unfinished(self) -> list[str]:
        """Directories of pieces without one: being written now, or left over from a crash."""
        return [name for name, stamp in self._stamps() if stamp is None]

    def look_at_unfinished(self) -> list[Unfinished]:
        """The same, with what is in them; temporary files count."""

        def look(name: str) -> Unfinished:
            files = self._call("list", name, lambda given_up: self._files.changes(name))
            times = [changed for _, changed in files]
            known = [changed for changed in times if changed is not None]
            newest = max(known) if known and len(known) == len(times) else None
            return Unfinished(name=name, bytes=sum(size for size, _ in files), changed=newest)

        return [found for _, found in self.each(self.list_unfinished(), look)]

    def names(self, piece: str) -> dict[str, int]:
        """Files of a piece and their bytes; temporary ones are not counted. Empty if it is not there."""
        found = self._call("list", piece, lambda given_up: self._files.names(piece))
        return {name: size for name, size in sorted(found.items()) if TEMPORARY not in name}

    def read(self, path: str, *, into: direct.Bytes | None = None) -> Whole:
        """A file. `into` is memory of `direct` that is used if it can be. After an error it must not be used again."""
        if into is None:
            return self._call("read", path, lambda given_up: self._files.read(path))
        return self._call("read", path, lambda given_up: self._files.read_into(path, into))

    def read_ranges(self, path: str, starts: Offsets, ends: Offsets, gap: int) -> direct.Bytes:
        """Parts of a file, one after the other, of a storage that is near by (`local`); those that are at most `gap`
        bytes apart are read at once. Fewer bytes if the file ends before."""
        files = self._files
        assert isinstance(files, LocalFiles)
        return self._call("read", path, lambda given_up: files.read_ranges(path, starts, ends, gap))

    def write(self, path: str, data: Data) -> None:
        """Writes a file, whole or not at all; once this returns it survives a crash."""
        self._call("write", path, lambda given_up: self._files.write(path, data, given_up))

    def delete(self, path: str) -> None:
        """Deletes a file. One that is not there is fine."""
        self._call("delete", path, lambda given_up: self._files.delete(path))

    def delete_piece(self, name: str) -> None:
        """Manifest first: from then on the piece does not exist, however far the rest comes."""
        parse_piece_name(name)
        self._delete_whole(name)

    def delete_save(self, path: str) -> None:
        """The same for a save of one server."""
        if not is_save_path(path):
            raise CheckpointError(f"{path!r} is not the name of a save")
        self._delete_whole(path)

    def _delete_whole(self, name: str) -> None:
        self.delete(f"{name}/{MANIFEST}")
        for file in self._call("list", name, lambda given_up: self._files.names(name)):
            if file != MANIFEST:
                self.delete(f"{name}/{file}")
        self.delete_empty(name)

    def delete_empty(self, directory: str) -> None:
        """Deletes a directory in which nothing is. StorageError if something is, where there are directories."""
        self._call("delete", directory, lambda given_up: self._files.delete_directory(directory))

    def directories(self, under: str) -> list[str]:
        """Names of the directories in a directory, in order. None if it is not there."""
        return sorted(self._call("list", under, lambda given_up: self._files.directories(under)))

    def read_manifest(self, name: str) -> Manifest:
        """The manifest of a piece; CheckpointError if it is damaged or another piece's."""
        manifest = decode(bytes(self.read(f"{name}/{MANIFEST}")), f"{name}/{MANIFEST}")
        if manifest.name != name:
            raise CheckpointError(
                f"{name}/{MANIFEST}: is the manifest of {manifest.name}",
                hint="directories of pieces must keep their names; this one cannot be used",
            )
        return manifest

    def has_manifest(self, name: str) -> bool:
        """Whether a piece exists, of the file itself: a listing may be a little behind."""
        return self.has(f"{name}/{MANIFEST}")

    def has(self, path: str) -> bool:
        """Whether a file is there, of the file itself."""
        return self._call("look for", path, lambda given_up: self._files.stamp(path)) is not None

    def find_lost(self, manifest: Stored) -> str | None:
        """A chunk of a piece that is not there, or not whole. What a listing does not show is looked for itself."""
        there = self.names(manifest.name)
        for info in manifest.chunks:
            path = f"{manifest.name}/{info.name}"
            if there.get(info.name) != info.bytes and (info.name in there or not self.has(path)):
                return path
        return None

    def write_manifest(self, manifest: Manifest) -> None:
        """Makes the piece exist. All of its chunks must have been written.

        After a StorageError it may exist all the same: an object store can be slow to do what it was asked. So a name
        is never used again for other rows; the next attempt is another cut, with another salt.
        """
        self.write_last(manifest.name, encode(manifest))

    def write_last(self, directory: str, manifest: bytes) -> None:
        """Writes the manifest of a directory, which then exists."""
        self.write(f"{directory}/{MANIFEST}", manifest)
        # Nobody writes to what is whole: what has a temporary name there was left by a crash.
        with contextlib.suppress(StorageError):
            self._call("tidy", directory, lambda given_up: self._files.tidy(directory))

    def manifests(self, known: Known | None = None) -> tuple[list[Manifest], list[tuple[str, str]]]:
        """Those that can be read, and name and reason of those that cannot. Raises if storage does not answer: no
        answer must not look like no checkpoint.

        Whoever looks again and again keeps `known` from one time to the next: what has not changed is not read again.
        """
        if known is None:
            stamps = dict.fromkeys(self._piece_names(), "")
        else:
            # A stamp is older than what is read: at worst it is read once more.
            stamps = {name: stamp for name, stamp in self._stamps() if stamp is not None}
        before = {name: known[name] for name in stamps if name in known} if known else {}
        found = {name: manifest for name, (stamp, manifest) in before.items() if stamp and stamp == stamps[name]}
        broken: list[tuple[str, str]] = []
        for name, result in self.each([name for name in stamps if name not in found], self._manifest_or_reason):
            if isinstance(result, Manifest):
                found[name] = result
            elif result is not None:
                broken.append((name, result))
        if known is not None:
            known.clear()
            known.update({name: (stamps[name], manifest) for name, manifest in found.items()})
        return [found[name] for name in stamps if name in found], broken

    def _manifest_or_reason(self, name: str) -> Manifest | str | None:
        try:
            return self.read_manifest(name)
        except StorageError as error:
            if error.missing:
                return None
            raise
        except CheckpointError as error:
            return error.message

    def _stamps(self) -> list[tuple[str, str | None]]:
        """Directories of pieces, in order, with something that changes when their manifest does; None: it has none."""

        def stamp(name: str) -> str | None:
            path = f"{name}/{MANIFEST}"
            return self._call("look for", path, lambda given_up: self._files.stamp(path))

        names = self._piece_names()
        if not self.local:
            return self.each(names, stamp)
        # Many in a call: far quicker than the threads that would do it side by side.
        batches = [names[start : start + STAMPS_PER_CALL] for start in range(0, len(names), STAMPS_PER_CALL)]
        return [found for batch in batches for found in self._batch_of_stamps(batch)]

    def _batch_of_stamps(self, names: list[str]) -> list[tuple[str, str | None]]:
        def look(given_up: threading.Event) -> list[tuple[str, str | None]]:
            found = []
            for name in names:
                try:
                    found.append((name, self._files.stamp(f"{name}/{MANIFEST}")))
                except OSError as error:  # or nobody would know which of them it was
                    raise OSError(error.errno, f"{name}: {_words(error)}") from error
            return found

        return self._call("look for manifests in", "", look)

    def _piece_names(self) -> list[str]:
        found = self._call("list", "", lambda given_up: self._files.directories())
        return sorted(name for name in found if is_piece_name(name))

    def each(self, names: list[str], job: Callable[[str], T]) -> list[tuple[str, T]]:
        """Does something with each of these, some side by side; in order, with what came of it."""
        if not names:
            return []
        with self.open_threads(LISTING_THREADS, "list") as pool:
            return list(zip(names, pool.map(job, names), strict=True))

    def _call(self, verb: str, path: str, job: Callable[[threading.Event], T]) -> T:
        """Runs `job`, again if need be, until the deadline. The event tells it that nobody waits any more."""
        where = f"{self.url.rstrip('/')}/{path}".rstrip("/")
        with self._lock:
            if self._abandoned >= ABANDONED_MAX:
                raise StorageError(f"cannot {verb} {where}: {self._abandoned} earlier calls still hang")
        call = _Call(job, attempts=self._attempts)
        if not call.done.wait(self._timeout_seconds):
            with self._lock, call.lock:
                if not call.done.is_set():
                    call.given_up.set()
                    call.at_end = self._count_return
                    self._abandoned += 1
                    raise StorageError(
                        f"cannot {verb} {where}: no answer within {self._timeout_seconds:g} s"
                        + (f" (before that: {_words(call.error)})" if call.error is not None else ""),
                        hint="is the storage reachable from here?",
                    )
        if call.failed:
            assert call.error is not None
            raise make_error(verb, where, call.error) from call.error
        return call.result  # type: ignore[no-any-return]

    def _count_return(self) -> None:
        with self._lock:
            self._abandoned -= 1


class _Call:
    """One call in its own thread: attempts with waits between them, until it is done or given up."""

    def __init__(self, job: Callable[[threading.Event], Any], *, attempts: int) -> None:
        self.result: Any = None
        self.error: BaseException | None = None  # the last one
        self.failed = False
        self.done = threading.Event()
        self.given_up = threading.Event()
        self.lock = threading.Lock()
        self.at_end: Callable[[], None] | None = None
        self._job = job
        self._attempts = attempts
        threading.Thread(target=self._run, name="regrow-storage", daemon=True).start()

    def _run(self) -> None:
        for attempt in range(self._attempts):
            try:
                self.result = self._job(self.given_up)
            except BaseException as error:
                self.error = error
                last = attempt == self._attempts - 1 or not may_pass(error)
                if not last and not self.given_up.wait(WAIT_SECONDS * 2**attempt):
                    continue
                self.failed = True
            break
        with self.lock:
            self.done.set()
        if self.at_end is not None:
            self.at_end()


def may_pass(error: BaseException) -> bool:
    """Whether to try again: not what is our bug, the user's mistake, or a full disk."""
    if isinstance(error, OSError):
        return not isinstance(error, _FINAL) and error.errno not in _FINAL_NUMBERS
    # What file systems raise on their own (botocore, aiohttp, ...) is about the network unless we know better.
    return type(error).__module__ != "builtins" and type(error).__name__ not in _FINAL_NAMES


def make_error(verb: str, where: str, error: BaseException) -> StorageError:
    if isinstance(error, FileNotFoundError):
        hint = "is the bucket or directory there?" if verb == "write" else None
        return StorageError(f"cannot {verb} {where}: it is not there", hint=hint, missing=True)
    if isinstance(error, OSError) and error.errno in _FULL_NUMBERS:
        hint = "make room there, or prune: old pieces may no longer be needed"
        return StorageError(f"cannot {verb} {where}: no space left there", hint=hint)
    if isinstance(error, PermissionError) or type(error).__name__ in _FINAL_NAMES:
        return StorageError(f"cannot {verb} {where}: {_words(error)}", hint="are credentials and permissions right?")
    return StorageError(f"cannot {verb} {where}: {_words(error)}")


def _words(error: BaseException | None) -> str:
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return str(error) or type(error).__name__
