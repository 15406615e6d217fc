"""What every benchmark shares: the machine, repetition in pairs, ratios with their spread, tables and files.

A figure is a ratio of two things measured in one run, turn by turn, so that whatever else the machine does
meets both. Nothing here knows what is measured.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import platform
import shlex
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from regrow import _kernels
from regrow.errors import RegrowError

QUARTILE_PAIRS_MIN = 8  # with fewer pairs than this, quartiles say less than the extremes
MALLOC_KEEP_BYTES = 1 << 30
MALLOC_MMAP_BYTES = 32 << 20  # the most glibc accepts
HUGE_PAGE_BYTES = 2 << 20
OTHERS_CORES_QUIET = 0.1  # what other processes may use before figures are called doubtful

# How the names of what kernels could use begin, on x86-64 and on ARM.
CPU_FEATURES = ("sse4", "avx", "fma", "bmi", "f16c", "gfni", "vaes", "vpclmulqdq", "amx", "asimd", "sve")

console = Console(highlight=False, width=None if sys.stdout.isatty() else 120)


@dataclass(frozen=True, slots=True, kw_only=True)
class Ratio:
    """The median of the ratios of pairs, and how far they spread."""

    value: float
    low: float
    high: float
    target: float
    better: str = "higher"
    pairs: int = 1
    told: str | None = None  # what `low` and `high` are, where they are something else

    @classmethod
    def of(cls, values: Sequence[float], *, target: float, better: str = "higher") -> Ratio:
        """From the ratio of each pair: the median, with quartiles, or the extremes when pairs are few."""
        if not values:
            raise ValueError("a ratio needs at least one pair")
        if better not in ("higher", "lower"):
            raise ValueError(f'better must be "higher" or "lower", not {better!r}')
        if len(values) >= QUARTILE_PAIRS_MIN:
            low, _, high = statistics.quantiles(values, n=4, method="inclusive")
        else:
            low, high = min(values), max(values)
        value = statistics.median(values)
        return cls(value=value, low=low, high=high, target=target, better=better, pairs=len(values))

    @property
    def met(self) -> bool:
        return self.value >= self.target if self.better == "higher" else self.value <= self.target

    @property
    def spread(self) -> str:
        if self.told is not None:
            return self.told
        return "quartiles of pairs" if self.pairs >= QUARTILE_PAIRS_MIN else "extremes of pairs"

    def to_dict(self) -> dict[str, Any]:
        return {
            "value": round(self.value, 4),
            "low": round(self.low, 4),
            "high": round(self.high, 4),
            "target": self.target,
            "better": self.better,
            "pairs": self.pairs,
            "spread": self.spread,
        }

    def __str__(self) -> str:
        return f"{self.value:.2f} ({self.low:.2f} to {self.high:.2f})"


def interleave(runs: Mapping[str, Callable[[int], float]], *, repetitions: int) -> dict[str, list[float]]:
    """Calls A(0), B(0), A(1), B(1), ...; each returns its own figure. The same index is the same work."""
    figures: dict[str, list[float]] = {name: [] for name in runs}
    for repetition in range(repetitions):
        for name, run in runs.items():
            figures[name].append(run(repetition))
    return figures


def pair_ratios(above: Sequence[float], below: Sequence[float]) -> list[float]:
    return [top / bottom for top, bottom in zip(above, below, strict=True)]


def round_known(value: float | None, digits: int) -> float | None:
    return None if value is None else round(value, digits)


def seconds_of(action: Callable[[], object]) -> float:
    started = time.perf_counter()
    action()
    return time.perf_counter() - started


# -- the machine ---------------------------------------------------------------------------------------------


def machine() -> dict[str, Any]:
    """What the figures depend on. Never a host name, a user or a path."""
    try:
        cores = len(os.sched_getaffinity(0))
    except AttributeError:
        cores = os.cpu_count() or 1
    return {
        "cpu": _cpu_model(),
        "cpu_features": _cpu_features(),
        "simd": _kernels.simd_level(),
        "cores": cores,
        "cache_l3_bytes": cache_l3_bytes(),
        "memory_bytes": memory_bytes(),
        "kernel": f"{platform.system()} {platform.release()}",
        "huge_pages": _first_line("/sys/kernel/mm/transparent_hugepage/enabled"),
        "python": platform.python_version(),
        "numpy": np.__version__,
        "torch": _module_version("torch"),
        "fbgemm": _module_version("fbgemm-gpu-cpu"),
        "load_average_1m": round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else None,
    }


def machine_line(facts: Mapping[str, Any]) -> str:
    memory = facts["memory_bytes"]
    cache = facts["cache_l3_bytes"]
    return ", ".join(
        part
        for part in (
            f"{facts['cpu']}, {facts['cores']} cores, {facts['simd']} kernels",
            f"{cache / 2**20:.0f} MiB L3" if cache else "",
            f"{memory / 2**30:.0f} GiB" if memory else "",
            str(facts["kernel"]),
            f"Python {facts['python']}",
            f"torch {facts['torch']}" if facts["torch"] else "",
            f"fbgemm {facts['fbgemm']}" if facts["fbgemm"] else "",
            f"load {facts['load_average_1m']}" if facts["load_average_1m"] is not None else "",
        )
        if part
    )


def memory_bytes() -> int | None:
    with contextlib.suppress(ValueError, OSError, AttributeError):
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return None


def cache_l3_bytes() -> int | None:
    text = _first_line("/sys/devices/system/cpu/cpu0/cache/index3/size")
    if text and text[-1:] == "K" and text[:-1].isdigit():
        return int(text[:-1]) * 1024
    return None


def _cpu_model() -> str:
    for line in _lines("/proc/cpuinfo"):
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _cpu_features() -> list[str]:
    """Of the names that the system gives them, those of instructions for many numbers at once."""
    for line in _lines("/proc/cpuinfo"):
        if line.startswith(("flags", "Features")):
            return [name for name in line.partition(":")[2].split() if name.startswith(CPU_FEATURES)]
    return []


def _module_version(distribution: str) -> str | None:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version(distribution)
    except PackageNotFoundError:
        return None


def _lines(path: str) -> list[str]:
    try:
        return Path(path).read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return []


def _first_line(path: str) -> str | None:
    lines = _lines(path)
    return lines[0].strip() if lines else None


def run_module(
    module: str,
    settings: Mapping[str, Any],
    *,
    timeout_seconds: float,
    what: str,
    environment: Mapping[str, str] | None = None,
) -> Any:
    """What a module says in its last line of JSON, in a process of its own that is told these settings."""
    done = subprocess.run(
        [sys.executable, "-P", "-m", module],
        input=json.dumps(settings),
        env=environment,
        capture_output=True,
        text=True,
        timeout=timeout_seconds,
        check=False,
    )
    if done.returncode != 0:
        words = (done.stderr or done.stdout).strip().splitlines() or ["without a word"]
        raise RegrowError(f"{what} failed (exit {done.returncode}): {words[-1]}")
    return json.loads(done.stdout.splitlines()[-1])


# -- who else uses it ----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Occupancy:
    """A reading of who has used the processors so far. Two of them tell what others took in between."""

    at: float
    busy_seconds: float | None  # of all processors, by anybody
    own_seconds: float

    @classmethod
    def read(cls, own_seconds: float) -> Occupancy:
        return cls(at=time.perf_counter(), busy_seconds=_busy_seconds(), own_seconds=own_seconds)

    def others_cores(self, later: Occupancy) -> float | None:
        """Cores that other processes kept busy between two readings, on average."""
        if self.busy_seconds is None or later.busy_seconds is None or later.at <= self.at:
            return None
        busy = later.busy_seconds - self.busy_seconds - (later.own_seconds - self.own_seconds)
        return max(0.0, busy / (later.at - self.at))


def _busy_seconds() -> float | None:
    fields = (_first_line("/proc/stat") or "").split()
    if len(fields) < 9 or fields[0] != "cpu":
        return None
    user, nice, system, _idle, _wait, irq, softirq, stolen = (int(field) for field in fields[1:9])
    return (user + nice + system + irq + softirq + stolen) / os.sysconf("SC_CLK_TCK")


# -- memory --------------------------------------------------------------------------------------------------


def keep_memory() -> bool:
    """Tells malloc to keep what is freed; else each large output goes back and is faulted in anew."""
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return False
    m_trim_threshold, m_mmap_threshold = -1, -3
    mapped = mallopt(m_mmap_threshold, MALLOC_MMAP_BYTES)
    trimmed = mallopt(m_trim_threshold, MALLOC_KEEP_BYTES)
    return bool(mapped) and bool(trimmed)


def collapse_pages(address: int, size_bytes: int) -> bool:
    """Puts resident memory into huge pages (Linux 6.1 and later); False where that cannot be done."""
    first = -(-address // HUGE_PAGE_BYTES) * HUGE_PAGE_BYTES
    end = (address + size_bytes) // HUGE_PAGE_BYTES * HUGE_PAGE_BYTES
    if end <= first:
        return False
    try:
        madvise = ctypes.CDLL(None).madvise
    except (OSError, AttributeError):
        return False
    madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    madv_hugepage, madv_collapse = 14, 25
    madvise(first, end - first, madv_hugepage)
    return bool(madvise(first, end - first, madv_collapse) == 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Bandwidth:
    """Bytes per second of plain memory traffic: the roof under which every kernel stays."""

    threads: int
    # Reads and writes of a sequential copy, both counted.
    copy: float
    # Payload of rows of 256 bytes read at random places, by numpy.
    random_rows: float

    def to_dict(self) -> dict[str, Any]:
        return {
            "kind": "bandwidth",
            "threads": self.threads,
            "copy_bytes_per_second": round(self.copy),
            "random_rows_bytes_per_second": round(self.random_rows),
        }


def bandwidth(*, threads: int, size_bytes: int, repetitions: int = 5) -> Bandwidth:
    """The best of a few repetitions, over memory far larger than the cache."""
    floats = size_bytes // 4
    row_floats = 64
    rng = np.random.default_rng(0)
    parts = []
    for _ in range(threads):
        source = np.ones(floats // threads, np.float32)
        target = np.zeros_like(source)
        rows = source[: len(source) // row_floats * row_floats].reshape(-1, row_floats)
        picks = rng.integers(0, len(rows), min(len(rows), 1 << 17))
        parts.append((source, target, rows, picks, np.empty((len(picks), row_floats), np.float32)))

    def copy(part: Any) -> None:
        np.copyto(part[1], part[0])

    def gather(part: Any) -> None:
        np.take(part[2], part[3], axis=0, out=part[4], mode="clip")

    copied = sum(source.nbytes * 2 for source, *_ in parts)
    gathered = sum(out.nbytes for *_, out in parts)
    with ThreadPoolExecutor(threads) as pool:

        def best(action: Callable[[Any], None]) -> float:
            return min(_all_at_once(pool, action, parts) for _ in range(repetitions))

        return Bandwidth(threads=threads, copy=copied / best(copy), random_rows=gathered / best(gather))


def _all_at_once(pool: ThreadPoolExecutor, action: Callable[[Any], None], parts: Sequence[Any]) -> float:
    """Seconds from the first thread's begin, when all are ready, to the last one's end."""
    barrier = threading.Barrier(len(parts))

    def work(part: Any) -> tuple[float, float]:
        barrier.wait()
        started = time.perf_counter()
        action(part)
        return started, time.perf_counter()

    spans = [future.result() for future in [pool.submit(work, part) for part in parts]]
    return max(end for _, end in spans) - min(begin for begin, _ in spans)


# -- what is shown and kept ----------------------------------------------------------------------------------


@dataclass(slots=True, kw_only=True)
class Report:
    """Rows and ratios of one benchmark, shown as they come and written at the end."""

    bench: str
    facts: dict[str, Any]
    rows: list[dict[str, Any]]
    ratios: dict[str, Ratio]

    @classmethod
    def start(cls, bench: str) -> Report:
        report = cls(bench=bench, facts=machine(), rows=[], ratios={})
        console.print(f"[bold]regrow bench {bench}[/]  {machine_line(report.facts)}")
        return report

    def finish(self, json_path: str | None) -> int:
        """Prints ratios and missed targets, writes the file; 0: it could be measured."""
        if self.ratios:
            self._print_ratios()
        missed = [name for name, ratio in self.ratios.items() if not ratio.met]
        for name in missed:
            ratio = self.ratios[name]
            sign = "at least" if ratio.better == "higher" else "at most"
            console.print(f"[yellow]missed:[/] {name} is {ratio.value:.4g}, target {sign} {ratio.target:g}")
        if self.ratios and not missed:
            console.print(f"[green]every target is met[/] ({len(self.ratios)})")
        self._warn_of_others()
        if json_path is not None:
            write_json(json_path, self.to_dict())
        return 0

    def _warn_of_others(self) -> None:
        taken = [row["others_cores"] for row in self.rows if row.get("others_cores") is not None]
        if taken and max(taken) > OTHERS_CORES_QUIET:
            console.print(
                f"[yellow]not alone:[/] other processes used up to {max(taken):.2f} cores meanwhile; "
                "wall-clock ratios then favour the side with more processes"
            )

    def to_dict(self) -> dict[str, Any]:
        return {
            "bench": self.bench,
            "command": command_line(),
            "machine": self.facts,
            "rows": self.rows,
            "ratios": {name: ratio.to_dict() for name, ratio in self.ratios.items()},
        }

    def _print_ratios(self) -> None:
        table = Table(title="ratios", title_justify="left")
        for heading in ("ratio", "median", "low", "high", "target", "met", "pairs", "spread"):
            table.add_column(heading, justify="left" if heading in ("ratio", "spread") else "right")
        for name, ratio in self.ratios.items():
            sign = "≥" if ratio.better == "higher" else "≤"
            table.add_row(
                name,
                f"{ratio.value:.4g}",
                f"{ratio.low:.4g}",
                f"{ratio.high:.4g}",
                f"{sign} {ratio.target:g}",
                "[green]yes[/]" if ratio.met else "[yellow]no[/]",
                str(ratio.pairs),
                ratio.spread,
            )
        console.print(table)


def print_table(title: str, headings: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Left-aligned first column, the rest numbers."""
    table = Table(title=title, title_justify="left")
    for position, heading in enumerate(headings):
        table.add_column(heading, justify="left" if position == 0 else "right")
    for row in rows:
        table.add_row(*row)
    console.print(table)


def command_line() -> str:
    """As it can be typed again: without the directory of the program."""
    return shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]])


def write_json(path: str, content: Mapping[str, Any]) -> None:
    """Written beside and renamed into place: a reader sees the old file or the whole new one."""
    target = Path(path)
    temporary = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    try:
        temporary.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
        os.replace(temporary, target)
    finally:
        temporary.unlink(missing_ok=True)
