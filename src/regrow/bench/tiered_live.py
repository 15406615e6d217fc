"""Real runs for `regrow bench tiered`: the devices, the model, and training with rows in memory or on one of them.

Every row has a value before training begins (`prefill`), as after long training: a row that never changed needs no
disk. What is measured of a run lies behind its warm-up, in which the cache fills.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from regrow.bench import checkpoint, checkpoint_store, common, recovery, tiered_device, tiered_figures, train
from regrow.config import TrainConfig
from regrow.data.synthetic import SKEW_DEFAULT, SyntheticDataset, table_rows
from regrow.errors import RegrowError, UserError
from regrow.launch import local
from regrow.launch.status import RunStatus
from regrow.launch.tiers import FRAME_BYTES_BESIDE, Needs

MEMORY_DIRECTORY = Path("/dev/shm")
SHAPE = "kaggle"
STEPS_MIN = 16
LOOK_SECONDS = 1.0  # servers report as often
SPENT_SECONDS = 0.25  # between two looks at processor time. Too large: a span has not whole periods of checkpoints.
MISS_RATE = 0.13  # the published one
SKETCH_BATCHES = 800


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """A directory for rows, and what its device does by itself."""

    name: str
    label: str
    directory: Path
    device: tiered_device.Device


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """What all parts of the benchmark share."""

    quick: bool
    places: dict[str, Place]
    alone: bool = False  # only one part is measured, which may take nine minutes

    def place(self, name: str) -> Place:
        return self.places[name]


def find_places(*, size_bytes: int, seconds: float) -> dict[str, Place]:
    """The directory for temporary files, and one in memory where there is one; each is measured."""
    disk = Path(tempfile.gettempdir())
    if checkpoint_store.filesystem(disk) in checkpoint_store.FILESYSTEMS_IN_MEMORY:
        raise UserError(f"{disk} is in memory: there is no disk to measure", hint="TMPDIR=DIR regrow bench tiered")
    wanted = [("disk", "a disk", disk)]
    if MEMORY_DIRECTORY.is_dir() and os.access(MEMORY_DIRECTORY, os.W_OK):
        wanted.append(("shm", "a directory in memory", MEMORY_DIRECTORY))
    return {
        name: Place(
            name=name,
            label=label,
            directory=directory,
            device=tiered_device.measure(name, str(directory), size_bytes=size_bytes, seconds=seconds),
        )
        for name, label, directory in wanted
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """A model of the usual shape, and batches of it."""

    rows_max: int
    batch: int = 512
    servers: int = 2
    workers: int = 2
    skew: float = SKEW_DEFAULT
    model: str = SHAPE

    @property
    def tables(self) -> list[int]:
        return table_rows(SHAPE, self.rows_max)

    @property
    def rows(self) -> int:
        return sum(self.tables)

    def make_config(self, **options: Any) -> TrainConfig:
        fixed: dict[str, Any] = {"seed": train.SEED, "steps": 1, "test_rows": train.BATCH, "digest": False}
        for name in ("model", "rows_max", "batch", "servers", "workers", "skew"):
            fixed[name] = getattr(self, name)
        return TrainConfig(**{**fixed, **options})

    def list_batches(self, count: int) -> Iterator[NDArray[np.int64]]:
        """The distinct rows of batches, numbered over all tables."""
        first = np.concatenate([[0], np.cumsum(self.tables)[:-1]]).astype(np.int64)
        data = SyntheticDataset(rows=self.tables, seed=train.SEED, skew=self.skew, train_rows=self.batch * count)
        for each in data.train_batches(batch=self.batch, worker=0, workers=1):
            yield np.unique(each.values.reshape(len(first), -1).astype(np.int64) + first[:, None])

    def sketch(self, *, batches: int = SKETCH_BATCHES) -> tiered_figures.Reuse:
        return tiered_figures.Reuse(self.list_batches(batches), rows=self.rows)


def find_cache_bytes(workload: Workload, rows: float) -> int:
    """Of each server, for so many rows of all servers in memory and the dense parameters; at least what is allowed."""
    needs = Needs(workload.make_config())
    *_, (dense_rows, _, dense_bytes) = needs.list_tables()
    row_bytes = needs.list_tables()[0][2] + FRAME_BYTES_BESIDE
    wanted = dense_rows * (dense_bytes + FRAME_BYTES_BESIDE) + int(rows / workload.servers * row_bytes)
    return max(wanted, needs.cache_bytes_min)


class Trace(checkpoint.Trace):
    """Keeps what servers count of their caches too, and what each role has taken of the processors."""

    def __init__(self, *, warmup_seconds: float) -> None:
        super().__init__(warmup_seconds=warmup_seconds)
        self.looks: list[tiered_figures.Look] = []
        self.spent: list[tiered_figures.Spent] = []
        self.rows, self.samples = 0, 0  # of batches, until the last look

    def update(self, status: RunStatus, now: float) -> None:
        super().update(status, now)
        if status.phase != "training":
            return
        if not self.spent or now >= self.spent[-1].at + SPENT_SECONDS:
            self._note_spent(status, now)
        if (tiers := status.tiers) is None:
            return
        look = tiered_figures.Look(at=now, tiers=tiers)
        if look.rows_asked and (not self.looks or now >= self.looks[-1].at + LOOK_SECONDS):
            self.looks.append(look)
            self.rows = sum(worker.distinct for worker in status.workers)
            self.samples = sum(worker.samples for worker in status.workers)

    def _note_spent(self, status: RunStatus, now: float) -> None:
        """Samples and processor time of one moment: divided by each other, they need no clock."""
        seconds = {role: train.children_cpu_seconds(f"rg {role}") for role in checkpoint.ROLES}
        known = {role: each for role, each in seconds.items() if each is not None}
        samples = sum(worker.samples for worker in status.workers)
        self.spent.append(tiered_figures.Spent(at=now, samples=samples, seconds=known, tiers=status.tiers or {}))

    def span(self) -> tuple[float, float]:
        """Behind the warm-up; between two checkpoints, where there are some, so that whole periods count."""
        return self.window(self.warmup_seconds)

    def course(self) -> tiered_figures.Course:
        return tiered_figures.Course.of(self.looks, rows=self.rows, samples=self.samples)


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """One way to train. Those that are not `judged` explain the others, and run in the first round only."""

    name: str
    label: str
    place: str | None = None  # None: rows are in memory
    changes: dict[str, Any] = field(default_factory=dict)
    pace: float = 1.0  # about how fast it is, of rows in memory: how many steps fill the time
    judged: bool = True


def choose_order(variants: Sequence[Variant], turn: int) -> list[Variant]:
    """Each round begins one further on, so that nobody is always first."""
    chosen = [variant for variant in variants if variant.judged or turn == 0]
    start = turn % len(chosen)
    return chosen[start:] + chosen[:start]


@dataclass(frozen=True, slots=True, kw_only=True)
class Times:
    """How long a run is."""

    seconds: float
    warmup_seconds: float


def run(
    workload: Workload,
    variant: Variant,
    setting: Setting,
    *,
    times: Times,
    rate: float,
    cache_bytes: int,
    prefill: bool = True,
) -> dict[str, Any]:
    """Trains once, in a directory of its own on the place of the variant."""
    place = None if variant.place is None else setting.place(variant.place)
    wanted = (times.seconds + times.warmup_seconds) * rate * variant.pace
    steps = max(STEPS_MIN, int(wanted / (workload.batch * workload.workers)))
    trace = Trace(warmup_seconds=times.warmup_seconds)
    with tempfile.TemporaryDirectory(prefix="regrow-bench-", dir=None if place is None else place.directory) as folder:
        changes = {
            name: value.format(folder) if isinstance(value, str) else value for name, value in variant.changes.items()
        }
        if place is not None:
            changes |= {"store": "tiered", "store_dir": f"{folder}/rows", "cache_bytes": cache_bytes}
            changes |= {"prefill": prefill}
        config = workload.make_config(steps=steps, out=f"{folder}/run", **changes)
        summary = local.train(config, display=trace)
    begin, end = trace.span()
    return {
        **trace.costs(begin, end),
        **tiered_figures.share_out(trace.spent, begin, end),
        **describe_tiers(trace, summary, begin, end),
        **describe_memory(summary),
        "steps": steps,
        "cache_bytes": cache_bytes if place is not None else None,
        "checkpoints": len(trace.cuts),
    }


def describe_tiers(trace: Trace, summary: dict[str, Any], begin: float, end: float) -> dict[str, Any]:
    if summary["tiers"] is None:
        return {}
    course = trace.course()
    return {
        **course.between(begin, end),
        "miss_rates_by_time": [[round(at, 1), round(rate, 4)] for at, rate in course.by_time(bins=8)],
        "waits": summary["tiers"]["waits"],
        "wait_seconds": summary["tiers"]["wait_seconds"],
        "rows_named": summary["tiers"]["rows_named"],
        "frames": summary["tiers"]["frames"],
        "file_bytes": summary["tiers"]["file_bytes"],
        "io": summary["per_server"][0]["io"],
    }


def describe_memory(summary: dict[str, Any]) -> dict[str, Any]:
    servers = summary["per_server"]
    return {
        "rows": summary["rows"],
        "rows_per_server": max(server["rows"] for server in servers),
        "server_bytes": max(server["bytes"] for server in servers),
        "server_rss_bytes": summary["peak_rss_bytes"]["server"],
        "servers": len(servers),
    }


def find_rate(workload: Workload) -> float:
    """Samples per second with all rows in memory, from a short run."""
    rate = recovery.RATE_GUESS
    for _ in range(recovery.TRIES_MAX):
        steps = max(STEPS_MIN, int(2.0 * rate / (workload.batch * workload.workers)))
        trace = recovery.Trace()
        with tempfile.TemporaryDirectory(prefix="regrow-bench-") as folder:
            local.train(workload.make_config(steps=steps, out=f"{folder}/run"), display=trace)
        if all(len(seen) >= train.REPORTS_MIN for seen in trace.reports.values()):
            return trace.rate_whole()
        rate *= 4  # much faster than thought
    raise RegrowError(f"{recovery.TRIES_MAX} runs were too short to measure anything")


def per_round(runs: Sequence[dict[str, Any]], name: str, base: str, figure: str = "samples_per_second") -> list[float]:
    """figure(name) / figure(base) of every round that has both."""
    known = {(row["variant"], row["round"]): row[figure] for row in runs if row.get(figure)}
    rounds = sorted({row["round"] for row in runs})
    return [known[name, turn] / known[base, turn] for turn in rounds if {(name, turn), (base, turn)} <= known.keys()]


def overheads(runs: Sequence[dict[str, Any]], name: str, base: str, *, equal_speed: bool) -> list[float]:
    """More time per sample than the base of the same round. Workers do the same work for each sample in every variant:
    their processor time shows how fast the processors were, and at equal speed that is taken out."""
    speeds = per_round(runs, name, base)
    work = per_round(runs, name, base, "worker_seconds_per_sample") if equal_speed else [1.0] * len(speeds)
    if len(work) != len(speeds):
        return []
    return [1.0 / (speed * slower) - 1.0 for speed, slower in zip(speeds, work, strict=True)]


def say(variant: Variant, turn: int, row: dict[str, Any]) -> None:
    told = f"{variant.label}, round {turn + 1}: {row['samples_per_second']:,.0f} samples/s"
    if "miss_rate" in row:
        told += f", {row['miss_rate']:.1%} misses, {row['reads_per_sample'] * row['samples_per_second']:,.0f} reads/s"
    common.console.print(told)
