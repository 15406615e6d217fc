"""A server with about a gigabyte of rows dies under partial recovery: how long does a worker wait? And do saves hold
anybody up?

Every row has a value from the start (`prefill`), so all of them are in the first save and have to come back. The
sketch: bytes / the rate at which `bench checkpoint` loads a full of as many bytes, measured in the same run, is what it
takes to read them once. A worker should wait for no longer than that and half a second; rows that somebody waits for
are read first, so it should be much less.

Whether saves hold workers up is told by servers: how long capturing rows kept the loop from its work, at most, in
steps; and how much of that it had a processor, for where there are more processes than processors it also stands still
because others run. Beside it, from the workers' reports: how late the latest one that overlaps a save was, less the
same of all others.
"""

from __future__ import annotations

import itertools
import statistics
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from regrow.bench import checkpoint_store, common, cpr_live, recovery
from regrow.errors import RegrowError

HOLD_STEPS_TARGET = 0.1
STALL_AIM = 0.5
VICTIM = 1
SERVERS = 4
TRIES_MAX = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    server_bytes: int
    every_seconds: float
    seconds: float


FULL = Size(server_bytes=1_000_000_000, every_seconds=25.0, seconds=90.0)
QUICK = Size(server_bytes=20_000_000, every_seconds=3.0, seconds=12.0)


def measure(report: common.Report, *, quick: bool, data: str | None = None) -> None:
    size = QUICK if quick else FULL
    with tempfile.TemporaryDirectory(prefix="regrow-bench-") as name:
        directory = Path(name)
        plain = measure_load(directory, size.server_bytes)
        report.rows.append({"kind": "plain load", **plain})
        common.console.print(f"a full of a server is loaded at {plain['load_bytes_per_second'] / 1e6:,.0f} MB/s")
        row = measure_death(directory, size)
    expected = row["bytes"] / plain["load_bytes_per_second"]
    report.rows.append({"kind": "stall", "expected_s": expected, **row})
    judge(report, row, expected)


def measure_load(directory: Path, size_bytes: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(dir=directory) as folder:
        (row,) = checkpoint_store.bandwidth(Path(folder), size_bytes=size_bytes, repetitions=1)
    return {name: value for name, value in row.items() if name != "kind"}


def measure_death(directory: Path, size: Size) -> dict[str, Any]:
    tables = recovery.Size(
        server_bytes=size.server_bytes * SERVERS // recovery.train.SERVERS,
        before_seconds=0.0,
        after_seconds=0.0,
        rounds=1,
        socket_bytes=0,
    )
    base = recovery.make_config(directory, tables).replace(servers=SERVERS)
    small = cpr_live.make_config(rows_max=100_000, servers=SERVERS)
    rate = cpr_live.find_rate(small, directory)
    seconds = size.seconds
    for _ in range(TRIES_MAX):
        steps = recovery.steps_of(base, seconds, rate)
        summary, trace, stored = cpr_live.run(
            base,
            directory,
            steps=steps,
            kill=(f"server:{VICTIM}@step:{steps * 3 // 4}",),
            more=lambda folder: cpr_live.make_changes("partial", f"{size.every_seconds:g}s", folder=folder),
        )
        saved = [at for at, _, _ in trace.own_saves if summary["failures"] and at < trace.failure().at]
        if len(saved) >= SERVERS and summary["failures"][0]["recovered_s"] is not None:
            return describe_death(summary, trace) | {"stored_bytes": stored}
        seconds *= 1.5
        common.console.print("nobody had saved before the failure, or not all was back in the end; again, longer")
    raise RegrowError(f"{TRIES_MAX} runs were too short for a save and a recovery")


def describe_death(summary: dict[str, Any], trace: cpr_live.Trace) -> dict[str, Any]:
    failure, died = summary["failures"][0], trace.failure()
    begin, end = trace.begin, died.at
    step_seconds = 1 / (trace.rate(begin, end) / (recovery.train.BATCH * recovery.train.WORKERS))
    late = [find_late(seen, saves_of(trace)) for seen in trace.reports.values()]
    around, elsewhere = (max(each[index] for each in late) for index in (0, 1))
    return {
        **{name: failure[name] for name in ("detected_s", "replaced_s", "load_s", "rows", "bytes", "faults")},
        "stall_s": cpr_live.find_stall(trace, died),
        "stall_said_s": failure["stall_s"],
        "samples_lost": failure["samples_lost"],
        "step_seconds": step_seconds,
        "capture_steps": trace.capture_seconds_max / step_seconds,
        "capture_seconds_max": trace.capture_seconds_max,
        "capture_work_steps": trace.capture_work_seconds_max / step_seconds,
        "late_steps": (around - elsewhere) / step_seconds,
        "late_around_s": around,
        "late_elsewhere_s": elsewhere,
        "saves": len(trace.own_saves),
        "save_s": statistics.median(seconds for _, _, seconds in trace.own_saves),
        **trace.others(),
    }


def saves_of(trace: cpr_live.Trace) -> list[tuple[float, float]]:
    """When saves were under way, before anybody died."""
    return [(at - seconds, at) for at, _, seconds in trace.own_saves if at < trace.failure().at]


def find_late(seen: Sequence[tuple[float, int]], spans: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """By how much was the latest report of a worker late against its median pace: of those that overlap one of the
    spans, and of the others up to the last of them."""
    end = max((until for _, until in spans), default=0.0)
    gaps = [pair for pair in itertools.pairwise(seen) if pair[1][0] <= end]
    paces = [(after[0] - before[0]) / (after[1] - before[1]) for before, after in gaps if after[1] > before[1]]
    if not paces:
        return 0.0, 0.0
    pace = statistics.median(paces)
    around, elsewhere = [0.0], [0.0]
    for (begin, before), (until, after) in gaps:
        overlaps = any(begin < stop and until > start for start, stop in spans)
        (around if overlaps else elsewhere).append(until - begin - (after - before) * pace)
    return max(around), max(elsewhere)


def judge(report: common.Report, row: dict[str, Any], expected: float) -> None:
    def add(name: str, value: float, target: float) -> None:
        report.ratios[name] = common.Ratio.of([value], target=round(target, 4), better="lower")

    add("stall_seconds", row["stall_s"], expected + STALL_AIM)
    add("stall_seconds_aim", row["stall_s"], STALL_AIM)
    add("hold_steps_capture", row["capture_steps"], HOLD_STEPS_TARGET)
    add("hold_steps_capture_processor", row["capture_work_steps"], HOLD_STEPS_TARGET)
    add("late_steps_saves", row["late_steps"], HOLD_STEPS_TARGET)
    common.console.print(
        f"{row['bytes'] / 1e6:,.0f} MB were back {row['load_s']:.2f} s after the death; to read them once would take "
        f"{expected:.2f} s. The longest any worker stood still: {row['stall_s']:.2f} s. A save took "
        f"{row['save_s']:.2f} s, capturing held a server up for {row['capture_seconds_max'] * 1e3:.1f} ms at most; "
        f"a step takes {row['step_seconds'] * 1e3:.0f} ms"
    )
