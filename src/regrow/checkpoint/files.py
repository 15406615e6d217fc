"""File systems as storage needs them: a local directory, and whatever fsspec knows. Errors are theirs; what becomes of
them, and who waits how long, is in storage.py.

On a local file system a file is written under a temporary name, fsynced, renamed, and its directory fsynced; large ones
go past the page cache, both ways, where the file system lets them (`direct`). Object stores put whole objects. Where a
put can be cut short (sftp and the like) the order still protects: a torn chunk has no manifest yet, and a torn manifest
is refused by its checksum.
"""

from __future__ import annotations

import contextlib
import datetime
import errno
import os
import secrets
import stat
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

import fsspec
import numpy as np
import numpy.typing as npt

from regrow import _kernels
from regrow.checkpoint import direct, failpoints
from regrow.checkpoint.manifest import MANIFEST
from regrow.errors import UserError

BUCKETS = frozenset({"s3", "s3a", "gs", "gcs", "az", "abfs", "abfss", "oss"})  # fsspec's names of object stores
TEMPORARY = ".tmp-"  # in a file name: not finished, and not to be counted

# What file systems call the time of a file's last change; the time it was made comes last.
_CHANGED_KEYS = ("LastModified", "last_modified", "mtime", "updated", "created")

Offsets = npt.NDArray[np.int64]  # in a file
Whole = bytes | memoryview
Data = Whole | Sequence[memoryview]  # in one piece, or in several that follow each other


class Files(Protocol):
    """What a file system must do. Errors are whatever it raises; a directory that is not there is empty. A stamp is
    another one when the file is; None: there is no such file. "": nothing is known that would tell."""

    def directories(self, under: str = "") -> list[str]: ...
    def names(self, directory: str) -> dict[str, int]: ...
    def changes(self, directory: str) -> list[tuple[int, float | None]]: ...
    def stamp(self, path: str) -> str | None: ...
    def read(self, path: str) -> Whole: ...
    def read_into(self, path: str, memory: direct.Bytes) -> Whole: ...
    def write(self, path: str, data: Data, given_up: threading.Event) -> None: ...
    def delete(self, path: str) -> None: ...
    def delete_directory(self, directory: str) -> None: ...
    def tidy(self, directory: str) -> None: ...


def open_files(url: str) -> Files:
    if not url.strip():
        raise UserError("where checkpoints are is empty", hint="give a path or a URL, for instance s3://bucket/run")
    protocol, _, rest = url.partition("://")
    if not rest and "://" not in url:
        return LocalFiles(Path(url).expanduser().absolute())
    if protocol in ("file", "local"):
        if not rest.startswith("/"):
            raise UserError(f"{url} is not a URL of a directory", hint=f"with a whole path it is file:///{rest}")
        return LocalFiles(Path(rest))
    if "::" in protocol:
        raise UserError(f"{url}: layers in front of storage cannot hold checkpoints", hint="give the last URL alone")
    try:
        # Cached listings would show pieces that another process has deleted, and hide new ones.
        system, root = fsspec.core.url_to_fs(url, use_listings_cache=False, skip_instance_cache=True)
    except ImportError as error:
        extra = "pip install 'regrow[s3]'" if protocol in ("s3", "s3a") else str(error)
        raise UserError(f"{url} needs a library that is not installed", hint=extra) from None
    except ValueError as error:
        hint = "a directory, or a URL such as s3://bucket/run"
        raise UserError(f"{url} is not a URL that can hold checkpoints: {error}", hint=hint) from None
    if not root.strip("/") and protocol != "memory":
        raise UserError(f"{url} does not say where", hint=f"for instance {protocol}://bucket/run")
    return RemoteFiles(system, root.rstrip("/"))


def find_missing(files: Files) -> str | None:
    """What keeps all writing from succeeding, as far as that can be known without writing."""
    return files.find_missing() if isinstance(files, LocalFiles | RemoteFiles) else None


class LocalFiles:
    """A directory of this machine, or one that is mounted."""

    def __init__(self, root: Path, *, direct_bytes_min: int = direct.BYTES_MIN) -> None:
        self._root = root
        self._direct_bytes_min = direct_bytes_min
        self._blocks = direct.Memory()

    def find_missing(self) -> str | None:
        nearest = next(path for path in (self._root, *self._root.parents) if path.exists())
        if not nearest.is_dir():
            return f"{nearest} is a file, not a directory"
        return None if os.access(nearest, os.W_OK | os.X_OK) else f"{nearest} cannot be written to"

    def directories(self, under: str = "") -> list[str]:
        try:
            with os.scandir(self._root / under) as entries:
                return [entry.name for entry in entries if entry.is_dir()]
        except FileNotFoundError:
            return []

    def names(self, directory: str) -> dict[str, int]:
        try:
            names = os.listdir(self._root / directory)
        except FileNotFoundError:
            return {}
        sizes: dict[str, int] = {}
        for name in names:
            with contextlib.suppress(FileNotFoundError):  # renamed or deleted since
                sizes[name] = (self._root / directory / name).stat().st_size
        return sizes

    def changes(self, directory: str) -> list[tuple[int, float | None]]:
        """Bytes and time of every file, and the time of the directory: one that is empty has an age too."""
        found: list[tuple[int, float | None]] = []
        with contextlib.suppress(FileNotFoundError):  # deleted since
            found.append((0, (self._root / directory).stat().st_mtime))
            for name in os.listdir(self._root / directory):
                with contextlib.suppress(FileNotFoundError):
                    status = (self._root / directory / name).stat()
                    found.append((status.st_size, status.st_mtime))
        return found

    def stamp(self, path: str) -> str | None:
        try:
            status = (self._root / path).stat()
        except (FileNotFoundError, NotADirectoryError):
            return None
        times = f"{status.st_mtime_ns} {status.st_ctime_ns}"
        return f"{status.st_ino} {times} {status.st_size}" if stat.S_ISREG(status.st_mode) else None

    def read(self, path: str) -> Whole:
        return self.read_into(path, direct.allocate_aligned(0))

    def read_into(self, path: str, memory: direct.Bytes) -> Whole:
        with (self._root / path).open("rb", buffering=0) as file:
            size = os.fstat(file.fileno()).st_size
            if size < self._direct_bytes_min:
                return file.readall()
            return direct.read(file.fileno(), size, memory if len(memory) >= size else direct.allocate_aligned(size))

    def read_ranges(self, path: str, starts: Offsets, ends: Offsets, gap: int) -> direct.Bytes:
        with (self._root / path).open("rb", buffering=0) as file:
            descriptor = file.fileno()
            if hasattr(os, "posix_fadvise"):  # or what is behind each of them would be read too
                os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_RANDOM)
            return _kernels.read_ranges(descriptor, starts, ends, gap)

    def write(self, path: str, data: Data, given_up: threading.Event) -> None:
        target = self._root / path
        kind = _kind(path)
        self._make_directory(target.parent, kind)
        # Two processes may write the same name; each has its own temporary file, and the later rename wins.
        temporary = target.with_name(f"{target.name}{TEMPORARY}{os.getpid()}-{secrets.token_hex(4)}")
        try:
            failpoints.hit(f"{kind}.open")
            with temporary.open("xb", buffering=0) as file:
                torn = failpoints.hit(f"{kind}.data")
                if not self._write_direct(file.fileno(), data, torn=torn):
                    _write_all(file.fileno(), data, torn=torn)
                failpoints.hit(f"{kind}.fsync")
                os.fsync(file.fileno())
            if given_up.is_set():
                raise TimeoutError(errno.ETIMEDOUT, "too late")
            failpoints.hit(f"{kind}.rename")
            temporary.rename(target)
        except BaseException:
            with contextlib.suppress(OSError):  # what stays is removed with the piece, or when it is complete
                temporary.unlink(missing_ok=True)
            raise
        failpoints.hit(f"{kind}.rename_fsync")
        _fsync_directory(target.parent)

    def _write_direct(self, file: int, data: Data, *, torn: bool) -> bool:
        buffers = _buffers(data)
        if torn or sum(buffer.nbytes for buffer in buffers) < self._direct_bytes_min:
            return False
        return direct.write(file, buffers, self._blocks)

    def delete(self, path: str) -> None:
        target = self._root / path
        kind = _kind(path)
        failpoints.hit(f"{kind}.delete")
        try:
            target.unlink()
        except FileNotFoundError:
            return
        failpoints.hit(f"{kind}.delete_fsync")
        _fsync_directory(target.parent)

    def delete_directory(self, directory: str) -> None:
        failpoints.hit("piece.delete")
        try:
            (self._root / directory).rmdir()
        except FileNotFoundError:
            return
        failpoints.hit("piece.delete_fsync")
        _fsync_directory((self._root / directory).parent)

    def tidy(self, directory: str) -> None:
        for name in self.names(directory):
            if TEMPORARY in name:
                failpoints.hit("temporary.delete")
                (self._root / directory / name).unlink(missing_ok=True)

    def _make_directory(self, directory: Path, kind: str) -> None:
        """With all that is missing above it, each entry durable before what is put into it. For a manifest that is
        made sure of again: whoever made the directories may have died before their fsync."""
        inside = self._root in directory.parents
        if directory.is_dir():
            if kind != "manifest" or not inside:
                return
            self._make_directory(directory.parent, kind)
        else:
            self._make_directory(directory.parent, kind)
            failpoints.hit(f"{kind}.mkdir")
            directory.mkdir(exist_ok=True)
        failpoints.hit(f"{kind}.mkdir_fsync")
        _fsync_directory(directory.parent)


class RemoteFiles:
    """Any other file system that fsspec knows."""

    def __init__(self, system: Any, root: str) -> None:
        self._system = system
        self._root = root

    def find_missing(self) -> str | None:
        """A bucket is made by its owner, and nobody else; whatever is in it comes with the first write."""
        protocols = self._system.protocol
        bucket = self._root.partition("/")[0]
        if BUCKETS.isdisjoint([protocols] if isinstance(protocols, str) else protocols):
            return None
        with contextlib.suppress(PermissionError):  # to list a bucket takes more than to write to it
            return None if self._system.exists(bucket) else f"there is no bucket {bucket}"
        return None

    def directories(self, under: str = "") -> list[str]:
        found = self._list(f"{self._root}/{under}".rstrip("/"))
        return [name for name, entry in found if entry["type"] == "directory"]

    def names(self, directory: str) -> dict[str, int]:
        found = self._list(f"{self._root}/{directory}")
        return {name: entry["size"] for name, entry in found if entry["type"] == "file" and name}

    def changes(self, directory: str) -> list[tuple[int, float | None]]:
        found = self._list(f"{self._root}/{directory}")
        return [(entry["size"] or 0, read_change_time(entry)) for _, entry in found if entry["type"] == "file"]

    def stamp(self, path: str) -> str | None:
        try:
            entry = self._system.info(f"{self._root}/{path}")
        except FileNotFoundError:
            return None
        if entry["type"] != "file":
            return None
        tag = entry.get("ETag") or entry.get("etag")  # time alone may be of whole seconds
        return f"{tag} {read_change_time(entry)} {entry['size']}" if tag else ""

    def read_into(self, path: str, memory: direct.Bytes) -> bytes:
        return self.read(path)

    def read(self, path: str) -> bytes:
        return bytes(self._system.cat_file(f"{self._root}/{path}"))

    def write(self, path: str, data: Data, given_up: threading.Event) -> None:
        torn = failpoints.hit(f"{_kind(path)}.put")
        whole = bytes(data) if isinstance(data, Whole) else b"".join(data)
        if given_up.is_set():  # this process was stopped meanwhile: what it wanted to write may have been deleted since
            raise TimeoutError(errno.ETIMEDOUT, "too late")
        self._system.pipe_file(f"{self._root}/{path}", whole[: len(whole) // 2] if torn else whole)
        if torn:
            failpoints.die()

    def delete(self, path: str) -> None:
        failpoints.hit(f"{_kind(path)}.delete")
        with contextlib.suppress(FileNotFoundError):
            self._system.rm_file(f"{self._root}/{path}")

    def delete_directory(self, directory: str) -> None:
        failpoints.hit("piece.delete")
        # Object stores have no directories; where there are any, an empty one would look like an unfinished piece.
        with contextlib.suppress(FileNotFoundError, NotImplementedError):
            self._system.rmdir(f"{self._root}/{directory}")

    def tidy(self, directory: str) -> None:
        """Nothing here has a temporary name."""

    def _list(self, path: str) -> Iterator[tuple[str, dict[str, Any]]]:
        try:
            entries = self._system.ls(path, detail=True)
        except FileNotFoundError:
            return iter(())
        return ((entry["name"].rstrip("/").rpartition("/")[2], entry) for entry in entries)


def read_change_time(entry: dict[str, Any]) -> float | None:
    """When a file last changed, if its file system tells in a way that cannot be misread."""
    value = next((entry[key] for key in _CHANGED_KEYS if entry.get(key) is not None), None)
    if isinstance(value, str):
        try:
            value = datetime.datetime.fromisoformat(value)
        except ValueError:
            return None
    if isinstance(value, datetime.datetime):
        return value.timestamp() if value.tzinfo is not None else None  # of which zone?
    return float(value) if isinstance(value, int | float) else None


def _kind(path: str) -> str:
    return "manifest" if path.rpartition("/")[2] == MANIFEST else "chunk"


def _buffers(data: Data) -> Sequence[memoryview]:
    return [memoryview(data)] if isinstance(data, Whole) else data


def _write_all(file: int, data: Data, *, torn: bool) -> None:
    buffers = _buffers(data)
    left = sum(buffer.nbytes for buffer in buffers) // (2 if torn else 1)
    for buffer in buffers:
        rest = buffer[:left]
        left -= len(rest)
        while rest:
            rest = rest[os.write(file, rest) :]
    if torn:
        failpoints.die()


def _fsync_directory(path: Path) -> None:
    directory = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)
