"""Who grows, and does training go on? A display for long runs that shows little and samples what must not grow.

Memory and open files of every process, by role; processes and socket files in all; and the longest time in which
training made no step. That one has a bound: a run that stands still for longer is ended, as nobody would wait for it.
"""

from __future__ import annotations

import contextlib
import os
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from regrow.bench import common, recovery
from regrow.errors import RegrowError
from regrow.launch.status import RunStatus
from regrow.launch.watch import START_SECONDS_MAX

SAMPLE_SECONDS = 1.0
SAMPLES_MIN = 60
TELL_SECONDS = 30.0
# Without a step of any worker. The longest single wait that is promised is for a process that hangs before it has ever
# answered: a coordinator's successor, say, without which no worker can be replaced. Then a worker still has to import
# torch, and in synchronous mode all wait for it.
STILL_SECONDS_MAX = START_SECONDS_MAX + 60.0
ROLES = {
    "coordinator": "coordinator",
    "server": "server",
    "worker": "worker",
    "standby": "spare_server",
    "understudy": "spare_worker",
    "merger": "merger",
}

Samples = list[tuple[float, int]]  # (when, how many)


@dataclass(frozen=True, slots=True, kw_only=True)
class Process:
    """A process of the run, now."""

    role: str
    resident_bytes: int
    files: int


class Watch(recovery.Trace):
    """One run. `sockets` is where the launcher makes its directory for them."""

    def __init__(self, *, sockets: Path | None = None, still_seconds_max: float = STILL_SECONDS_MAX) -> None:
        super().__init__()
        # By role, of the largest process; and "processes" and "sockets" in all.
        self.resident: dict[str, Samples] = {}
        self.files: dict[str, Samples] = {}
        self.kept_bytes_max = 0
        self.rows: Path | None = None  # where servers keep rows in files
        self.rows_bytes_max = 0
        # Since when servers with rows on disk have all the memory beside their caches that they will ever take: a map
        # of the rows in the log, and room to clean it, which is taken when the log is full for the first time.
        self.logs_full_at: float | None = None
        self.still_seconds_longest = 0.0
        self._still_seconds_max = still_seconds_max
        self._sockets = sockets
        self._samples = -1
        self._moved_at = self._sampled_at = self._told_at = self._started_at = time.monotonic()

    def update(self, status: RunStatus, now: float) -> None:
        super().update(status, now)
        self.kept_bytes_max = max([self.kept_bytes_max, *(server.kept_bytes_max for server in status.servers)])
        if status.phase != "training":
            self._moved_at = now
            return
        self._look_for_standstill(status, now)
        if self.logs_full_at is None and all(each.tiers.get("home_rows_written") for each in status.servers):
            self.logs_full_at = now
        if now - self._sampled_at >= SAMPLE_SECONDS:
            self._sampled_at = now
            self._sample(now)
        if now - self._told_at >= TELL_SECONDS:
            self._told_at = now
            rate = status.samples_per_s(now)
            common.console.print(
                f"{(now - self._started_at) / 60:.1f} min: step {status.step:,}, "
                f"{len(status.failures.all)} failures so far, {rate or 0:,.0f} samples/s"
            )

    def _look_for_standstill(self, status: RunStatus, now: float) -> None:
        if status.samples != self._samples:
            self._samples, self._moved_at = status.samples, now
        still = now - self._moved_at
        self.still_seconds_longest = max(self.still_seconds_longest, still)
        if still > self._still_seconds_max:
            raise RegrowError(
                f"stuck: no worker has made a step for {still:.0f} s, at step {status.step}",
                hint="the last lines of the logs say who waits for whom",
            )

    def _sample(self, now: float) -> None:
        found = list_processes()
        for role in {process.role for process in found}:
            mine = [process for process in found if process.role == role]
            self.resident.setdefault(role, []).append((now, max(process.resident_bytes for process in mine)))
            self.files.setdefault(role, []).append((now, max(process.files for process in mine)))
        self.files.setdefault("processes", []).append((now, len(found)))
        if self._sockets is not None:
            count = sum(len(files) for _, _, files in os.walk(self._sockets))
            self.files.setdefault("sockets", []).append((now, count))
        if self.rows is not None:
            self.rows_bytes_max = max(self.rows_bytes_max, measure_files(self.rows))


def measure_files(directory: Path) -> int:
    """Bytes that files below it take."""
    found = 0
    for folder, _, names in os.walk(directory):
        for name in names:
            with contextlib.suppress(OSError):  # gone meanwhile
                found += (Path(folder) / name).stat().st_size
    return found


def list_processes(proc: Path = Path("/proc"), own: int | None = None) -> list[Process]:
    """This process, and its children by the names they give themselves; empty where /proc does not tell. One that has
    no name yet has only just begun."""
    own = os.getpid() if own is None else own
    found: list[Process] = []
    page = os.sysconf("SC_PAGE_SIZE")
    with contextlib.suppress(OSError):
        for entry in sorted(proc.iterdir()):
            with contextlib.suppress(OSError, ValueError, IndexError):
                pid = int(entry.name)
                head, _, tail = (entry / "stat").read_text().rpartition(")")
                name = head.partition("(")[2].split()
                is_child = int(tail.split()[1]) == own and name[0] == "rg"
                if pid != own and not is_child:
                    continue
                resident = int((entry / "statm").read_text().split()[1]) * page
                files = len(os.listdir(entry / "fd"))
                role = "launcher" if pid == own else ROLES.get(name[1], name[1])
                found.append(Process(role=role, resident_bytes=resident, files=files))
    return found


def compare_thirds(samples: Sequence[tuple[float, int]]) -> tuple[float, float] | None:
    """Medians of the first third of the time and of the last; None where there is too little: processes that have only
    just begun would be compared."""
    if len(samples) < SAMPLES_MIN:
        return None
    begin, end = samples[0][0], samples[-1][0]
    third = (end - begin) / 3
    first = [count for at, count in samples if at <= begin + third]
    last = [count for at, count in samples if at >= end - third]
    return statistics.median(first), statistics.median(last)
