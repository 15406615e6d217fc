"""The directory a run leaves behind: config.toml, metrics.jsonl, summary.json and logs/.

A run never writes over another one unless it is told to, and then removes only files of these names.
summary.json appears whole or not at all, also when the machine goes down meanwhile.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import math
import os
import shutil
import tempfile
import time
from datetime import datetime
from pathlib import Path
from typing import Any

from regrow.config import TrainConfig
from regrow.errors import UserError

CONFIG, METRICS, SUMMARY, LOGS = "config.toml", "metrics.jsonl", "summary.json", "logs"
SAME_SECOND_MAX = 1000
SOCKET_PARENT_BYTES_MAX = 60  # a Unix socket's whole path has about 100 bytes
SOCKET_PREFIX = "regrow-s-"
SOCKET_AGE_SECONDS = 600.0


class RunDir:
    """Made by `RunDir.create`; holds a lock on the directory until it is closed."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(self._lock)
            raise UserError(f"another run is writing to {path}", hint="choose another --out") from None
        self._metrics: Any = None

    @classmethod
    def create(cls, config: TrainConfig, *, overwrite: bool = False, now: datetime | None = None) -> RunDir:
        """The directory asked for, or a new one named after the time and the model."""
        try:
            if config.out is None:
                run_dir = cls(_new_directory(config, now or datetime.now()))
            else:
                run_dir = cls(_asked_directory(Path(config.out), overwrite=overwrite))
            if overwrite:
                run_dir._remove_old_run()
            (run_dir.path / LOGS).mkdir(exist_ok=True)
            write_whole(run_dir.path / CONFIG, config.to_toml().encode(errors="surrogateescape"))
        except OSError as error:
            raise UserError(
                f"cannot write to {error.filename or config.out}: {error.strerror}",
                hint="choose another --out",
            ) from None
        return run_dir

    def log(self, role: str, id: int, incarnation: int = 0) -> Path:
        return self.path / LOGS / log_name(role, id, incarnation)

    def write_metrics(self, line: dict[str, Any]) -> None:
        """Appends to metrics.jsonl; readable by others at once."""
        if self._metrics is None:
            self._metrics = (self.path / METRICS).open("w", encoding="utf-8")
        self._metrics.write(json.dumps(line, allow_nan=False) + "\n")
        self._metrics.flush()

    def write_summary(self, summary: dict[str, Any]) -> None:
        text = json.dumps(_plain(summary), indent=2, allow_nan=False) + "\n"
        write_whole(self.path / SUMMARY, text.encode())

    def close(self) -> None:
        if self._metrics is not None:
            self._metrics.close()
            self._metrics = None
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    def _remove_old_run(self) -> None:
        for name in (SUMMARY, METRICS, CONFIG):  # the summary first: half an old run must not look whole
            (self.path / name).unlink(missing_ok=True)
        for log in (self.path / LOGS).glob("*-*.log"):
            log.unlink()


def log_name(role: str, id: int, incarnation: int) -> str:
    """Every incarnation has a log of its own; the first one's name is the plain one."""
    return f"{role}-{id}.log" if incarnation == 0 else f"{role}-{id}.{incarnation}.log"


class SocketDir:
    """A private directory for the sockets of one run, gone afterwards.

    A launcher that was killed leaves its directory behind, but no longer holds the lock on it: the next one
    sweeps it up.
    """

    def __init__(self) -> None:
        parent = Path(tempfile.gettempdir())
        if len(os.fsencode(parent)) > SOCKET_PARENT_BYTES_MAX:
            parent = Path("/tmp")
        self.sweep(parent, age_seconds=SOCKET_AGE_SECONDS)
        # mkdtemp makes it 0700: the token keeps strangers out of the talk, this keeps them from the door.
        self.path = Path(tempfile.mkdtemp(prefix=SOCKET_PREFIX, dir=parent))
        self._lock = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY)
        fcntl.flock(self._lock, fcntl.LOCK_EX)

    def __enter__(self) -> SocketDir:
        return self

    def __exit__(self, *_: object) -> None:
        shutil.rmtree(self.path, ignore_errors=True)
        os.close(self._lock)

    @staticmethod
    def sweep(parent: Path, *, age_seconds: float) -> None:
        """Removes what killed launchers left. Young ones stay: their owner may not have locked them yet."""
        for path in parent.glob(f"{SOCKET_PREFIX}*"):
            with contextlib.suppress(OSError):  # somebody else's, in use, or swept by another launcher
                lock = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
                try:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    found = os.fstat(lock)
                    if found.st_uid == os.getuid() and found.st_mtime <= time.time() - age_seconds:
                        shutil.rmtree(path)
                finally:
                    os.close(lock)


def write_whole(path: Path, data: bytes) -> None:
    """Readers see the old file or the new one, never a part of it, even after a power cut."""
    fd, temporary = tempfile.mkstemp(prefix=f".{path.name}-", dir=path.parent)
    try:
        with os.fdopen(fd, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(temporary, 0o666 & ~_umask())
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise
    directory = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)


def _umask() -> int:
    """There is no way to read it without setting it."""
    mask = os.umask(0o077)
    os.umask(mask)
    return mask


def _new_directory(config: TrainConfig, now: datetime) -> Path:
    stem = f"{now:%Y%m%d-%H%M%S}-{config.model_name}"
    Path("runs").mkdir(exist_ok=True)
    for attempt in range(1, SAME_SECOND_MAX):
        path = Path("runs") / (stem if attempt == 1 else f"{stem}-{attempt}")
        with contextlib.suppress(FileExistsError):
            path.mkdir()
            return path
    raise UserError(f"there are {SAME_SECOND_MAX} runs named {stem}", hint="choose a name with --out")


def _asked_directory(path: Path, *, overwrite: bool) -> Path:
    if path.exists() and not path.is_dir():
        raise UserError(f"{path} is a file, not a directory", hint="choose another --out")
    path.mkdir(parents=True, exist_ok=True)
    if any(path.iterdir()) and not overwrite:
        raise UserError(f"{path} is not empty", hint="choose another --out, or say --overwrite to replace its run")
    return path


def _plain(value: Any) -> Any:
    """The same with NaN and infinity as null, which is all JSON can say about them."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, dict):
        return {name: _plain(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value
