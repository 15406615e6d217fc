"""Real runs for `regrow bench cpr`: processes, kills and storage, with every save and every report of a worker kept."""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from regrow.bench import checkpoint, recovery, train
from regrow.config import TrainConfig
from regrow.launch import local
from regrow.launch.failures import Failure
from regrow.launch.reports import OwnSaved, Report

SHARE = 0.125


class Trace(checkpoint.Trace):
    """Keeps what servers say of their own saves too: (when, rows, seconds)."""

    def __init__(self, *, warmup_seconds: float = 0.0) -> None:
        super().__init__(warmup_seconds=warmup_seconds)
        self.own_saves: list[tuple[float, int, float]] = []

    def hear(self, report: Report, now: float) -> None:
        super().hear(report, now)
        if isinstance(report, OwnSaved) and not report.error:
            self.own_saves.append((now, report.rows, report.seconds))


def make_config(*, rows_max: int, servers: int = 4, **options: Any) -> TrainConfig:
    """Kaggle's shape, asynchronous, as most runs are."""
    fixed: dict[str, Any] = {"model": "kaggle", "batch": train.BATCH, "workers": train.WORKERS, "seed": train.SEED}
    fixed |= {"steps": 1, "test_rows": train.BATCH, "digest": False}
    return TrainConfig(**{**fixed, "rows_max": rows_max, "servers": servers, **options})


def make_changes(protection: str, every: str, *, priority: str = "none", folder: str) -> dict[str, Any]:
    """What a protection needs besides its name."""
    changes: dict[str, Any] = {"protection": protection}
    if protection in ("full", "delta", "partial"):
        changes |= {"every": every, "ckpt": f"{folder}/checkpoints"}
    if protection == "partial":
        changes |= {"priority": priority}
        changes |= {"priority_share": SHARE} if priority != "none" else {}
    if protection == "ec":
        changes |= {"k": 2, "r": 1}
    return changes


def run(base: TrainConfig, directory: Path, **changes: Any) -> tuple[dict[str, Any], Trace, int]:
    """(summary, trace, bytes stored) of a run in a folder of its own. `changes` may have functions of the folder."""
    trace = Trace()
    with tempfile.TemporaryDirectory(dir=directory) as folder:
        options = {name: value(folder) if callable(value) else value for name, value in changes.items()}
        options |= options.pop("more", {})
        summary = local.train(base.replace(out=f"{folder}/run", **options), display=trace)
        stored = count_bytes(Path(folder) / "checkpoints")
    return summary, trace, stored


def count_bytes(directory: Path) -> int:
    return sum(path.stat().st_size for path in directory.rglob("*") if path.is_file()) if directory.exists() else 0


def find_rate(base: TrainConfig, directory: Path, *, seconds: float = 2.0) -> float:
    """Samples per second, from a short run without protection."""
    rate = recovery.RATE_GUESS
    for _ in range(recovery.TRIES_MAX):
        _, trace, _ = run(base, directory, steps=recovery.steps_of(base, seconds, rate))
        if all(len(seen) >= train.REPORTS_MIN for seen in trace.reports.values()):
            return trace.rate_whole()
        rate *= 4  # much faster than thought
    return rate


def find_stall(trace: Trace, failure: Failure) -> float:
    """The longest that any worker stood still, from its reports, as `bench recovery` counts it. What a run says of
    itself (`stall_s`) leaves out a worker whose first word comes when all rows are back, and so the longest waits."""
    silence = trace.longest_silence(failure.detected_at, failure.detected_at + recovery.STALL_SECONDS)
    return max(silence, failure.stall_seconds)


def find_stalls(trace: Trace) -> list[float]:
    """Of every failure that a run went on through."""
    return [] if trace.status is None else [find_stall(trace, failure) for failure in trace.status.failures.all]


def middle(values: Sequence[float]) -> float | None:
    return statistics.median(values) if values else None
