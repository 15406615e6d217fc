"""The directory a run leaves behind: config.toml, metrics.jsonl, summary.json and logs/; steps/, where asked for.

A run never writes over another one unless it is told to, and then removes only files of these names.
summary.json appears whole or not at all, also when the machine goes down meanwhile.

Once training goes on, nothing that is written here is worth ending it: a disk that is full, or a directory that is
read-only or gone, is told once, and the next write is tried all the same. All writes of the launcher go through `Logs`
and `RunDir`, which see to that; only `RunDir.create` raises.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import fcntl
import json
import math
import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from datetime import datetime
from pathlib import Path
from typing import Any, BinaryIO

from regrow.config import TrainConfig
from regrow.errors import UserError
from regrow.runtime.streams import write_text

CONFIG, METRICS, SUMMARY, LOGS, STEPS = "config.toml", "metrics.jsonl", "summary.json", "logs", "steps"
RUN = ".run"  # whose directory it is, where another launcher may go on with it
SAME_SECOND_MAX = 1000


def print_warning(text: str) -> None:
    print(f"warning: {text}", file=sys.stderr, flush=True)


class Logs:
    """A directory with a log for every process. `complain` is told once, of the first write that fails."""

    def __init__(self, path: Path, complain: Callable[[str], None]) -> None:
        self.path = path
        self._complain = complain
        self._told: set[str] = set()

    def complain_once(self, about: str, text: str) -> None:
        """Tells the user, unless something was told about this before."""
        if about not in self._told:
            self._told.add(about)
            self._complain(text)

    def log(self, role: str, id: int, incarnation: int = 0) -> Path:
        return self.path / log_name(role, id, incarnation)

    def open_log(self, role: str, id: int, incarnation: int = 0) -> BinaryIO:
        """The log of a new process; one that cannot be opened is none, and keeps nobody from starting."""
        path = self.log(role, id, incarnation)
        try:
            return path.open("ab")
        except OSError as error:
            self._note_failure(path, error)
            return open(os.devnull, "ab")

    @contextlib.contextmanager
    def guard(self, path: Path) -> Iterator[None]:
        """Around a write whose failure does not matter to training."""
        try:
            yield
        except OSError as error:
            self._note_failure(path, error)

    def _note_failure(self, path: Path, error: OSError) -> None:
        what = error.strerror or str(error)
        text = f"cannot write to {path}: {what}; training goes on, and what cannot be written is lost"
        self.complain_once("files", text)


class RunDir:
    """Made by `RunDir.create`; holds a lock on the directory until it is closed."""

    def __init__(self, path: Path, complain: Callable[[str], None] = print_warning) -> None:
        self.path = path
        self.logs = Logs(path / LOGS, complain)
        self._lock = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(self._lock)
            raise UserError(f"another run is writing to {path}", hint="choose another --out") from None
        self._metrics = -1  # a file number, once there is something to write
        self._metrics_bytes = 0

    @classmethod
    def create(cls, config: TrainConfig, *, overwrite: bool = False, now: datetime | None = None) -> RunDir:
        """The directory asked for, or a new one named after the time and the model."""
        run_dir: RunDir | None = None
        try:
            if config.out is None:
                run_dir = cls(_make_new_directory(config, now or datetime.now()))
            else:
                run_dir = cls(_make_asked_directory(Path(config.out), overwrite=overwrite))
            if overwrite:
                run_dir._remove_old_run()
            (run_dir.path / LOGS).mkdir(exist_ok=True)
            write_whole(run_dir.path / CONFIG, config.to_toml().encode(errors="surrogateescape"))
        except OSError as error:
            if run_dir is not None:
                run_dir.close()
            raise UserError(
                f"cannot write to {error.filename or config.out}: {error.strerror}",
                hint="choose another --out",
            ) from None
        return run_dir

    @classmethod
    def go_on(cls, path: Path, *, run: str, config: TrainConfig) -> tuple[RunDir, bool]:
        """For the launcher that goes on with this run: its directory where it is here; else a new one of that name, or
        nearly so. Whether it is the old one."""
        with contextlib.suppress(OSError, UserError):
            if (path / RUN).read_text() == run:
                run_dir = cls(path)
                with contextlib.suppress(OSError):
                    run_dir._metrics_bytes = (path / METRICS).stat().st_size
                return run_dir, True
        for attempt in range(1, SAME_SECOND_MAX):
            target = path if attempt == 1 else path.with_name(f"{path.name}-{attempt}")
            with contextlib.suppress(UserError):  # that one is another run's
                run_dir = cls.create(dataclasses.replace(config, out=str(target)))
                run_dir.mark(run)
                return run_dir, False
        raise UserError(f"cannot write to {path}, nor beside it", hint="--resume from the last checkpoint")

    def mark(self, run: str) -> None:
        """As the directory of this run, which another launcher may go on with."""
        with self.logs.guard(self.path / RUN):
            write_whole(self.path / RUN, run.encode())

    def write_metrics(self, line: dict[str, Any]) -> None:
        """Appends to metrics.jsonl; readable by others at once. A line for which there is no room is left out whole:
        those that come when there is room again can be read."""
        data = json.dumps(line, allow_nan=False).encode() + b"\n"
        path = self.path / METRICS
        with self.logs.guard(path):
            if self._metrics < 0:
                self._metrics = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o666)
                os.ftruncate(self._metrics, self._metrics_bytes)  # of what another run has left
            try:
                if os.write(self._metrics, data) < len(data):
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
                self._metrics_bytes += len(data)
            except OSError:
                os.ftruncate(self._metrics, self._metrics_bytes)
                raise

    def write_summary(self, summary: dict[str, Any]) -> bool:
        """Where the file cannot be written, standard output has the summary instead, or, where that is a file on the
        same disk, standard error; False says so."""
        text = json.dumps(_make_plain(summary), indent=2, allow_nan=False) + "\n"
        path, written = self.path / SUMMARY, False
        with self.logs.guard(path):
            write_whole(path, text.encode())
            written = True
        if not written and not write_text(sys.stdout, text):
            write_text(sys.stderr, text)
        return written

    def close(self) -> None:
        if self._metrics >= 0:
            with self.logs.guard(self.path / METRICS):
                os.close(self._metrics)
            self._metrics = -1
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    def _remove_old_run(self) -> None:
        for name in (SUMMARY, METRICS, CONFIG, RUN):  # the summary first: half an old run must not look whole
            (self.path / name).unlink(missing_ok=True)
        for old in (*(self.path / LOGS).glob("*-*.log"), *(self.path / STEPS).glob("worker-*.jsonl")):
            old.unlink()


def log_name(role: str, id: int, incarnation: int) -> str:
    """Every incarnation has a log of its own; the first one's name is the plain one."""
    return f"{role}-{id}.log" if incarnation == 0 else f"{role}-{id}.{incarnation}.log"


def write_whole(path: Path, data: bytes) -> None:
    """Readers see the old file or the new one, never a part of it, even after a power cut."""
    fd, temporary = tempfile.mkstemp(prefix=f".{path.name}-", dir=path.parent)
    try:
        with os.fdopen(fd, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(temporary, 0o666 & ~_read_umask())
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


def _read_umask() -> int:
    """There is no way to read it without setting it."""
    mask = os.umask(0o077)
    os.umask(mask)
    return mask


def _make_new_directory(config: TrainConfig, now: datetime) -> Path:
    stem = f"{now:%Y%m%d-%H%M%S}-{config.model_name}"
    Path("runs").mkdir(exist_ok=True)
    for attempt in range(1, SAME_SECOND_MAX):
        path = Path("runs") / (stem if attempt == 1 else f"{stem}-{attempt}")
        with contextlib.suppress(FileExistsError):
            path.mkdir()
            return path
    raise UserError(f"there are {SAME_SECOND_MAX} runs named {stem}", hint="choose a name with --out")


def _make_asked_directory(path: Path, *, overwrite: bool) -> Path:
    if path.exists() and not path.is_dir():
        raise UserError(f"{path} is a file, not a directory", hint="choose another --out")
    path.mkdir(parents=True, exist_ok=True)
    if any(path.iterdir()) and not overwrite:
        raise UserError(f"{path} is not empty", hint="choose another --out, or say --overwrite to replace its run")
    return path


def _make_plain(value: Any) -> Any:
    """The same with NaN and infinity as null, which is all JSON can say about them."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, dict):
        return {name: _make_plain(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_make_plain(item) for item in value]
    return value
