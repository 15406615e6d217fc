"""Where one server and one worker of a run stand, as they tell it."""

from __future__ import annotations

import dataclasses
from collections import deque
from dataclasses import dataclass, field
from typing import Any, ClassVar

from regrow.launch.reports import Progress, ServerCounters
from regrow.launch.tier_counts import Tiers, add_counts

RATE_WINDOW_SECONDS = 5.0  # shorter: the figure jitters with every report; longer: a stall shows late
RATE_NOW_SECONDS = 0.5  # for plots of what a failure does; jitters
RATE_SECONDS_MIN = 0.25  # two reports closer than this say nothing about speed


@dataclass(slots=True, kw_only=True)
class ServerStatus:
    """starting -> allocating (it listens) -> ready (its rows are there) -> stopped, or gone too early.
    A successor: starting -> recovering (it listens) -> ready (its rows are back)."""

    state: str = "starting"
    incarnation: int = 0
    rows: int = 0
    bytes: int = 0
    redundancy_bytes: int = 0  # of which: parities
    missing_rows: int = 0
    load_done: int = 0  # bytes read of the checkpoint it starts from
    load_total: int = 0
    pulls: int = 0
    pushes: int = 0
    bytes_in: int = 0
    bytes_out: int = 0
    flushes: int = 0
    flush_bytes: int = 0
    flush_rows: int = 0
    parity_rows_applied: int = 0  # changes of others' rows, added to parities here
    rows_decoded: int = 0  # of others, for their recovery
    faults: int = 0  # rows that somebody waited for while they were missing here
    faults_served: int = 0  # ... and missing at others
    rows_updated: int = 0
    kept_bytes_max: int = 0  # sent to others and not acknowledged, at most
    tiers: Tiers = field(default_factory=dict)  # of rows on disk
    tiers_carried: Tiers = field(default_factory=dict)
    io: str = ""  # how its files are read and written
    pace: str = ""  # at which it brought rows back to others last, and why
    costs: dict[str, list[float]] = field(default_factory=dict)  # of recoveries that it took part in, by part
    carried: dict[str, int] = field(default_factory=dict)  # what earlier incarnations counted

    COUNTERS: ClassVar = (
        *("pulls", "pushes", "bytes_in", "bytes_out"),
        *("rows_updated", "flushes", "flush_bytes", "flush_rows"),
        *("parity_rows_applied", "rows_decoded", "faults", "faults_served"),
    )

    def to_dict(self) -> dict[str, Any]:
        values = dataclasses.asdict(self)
        del values["carried"], values["tiers_carried"]
        return values

    def has_moved(self, report: ServerCounters) -> bool:
        """Whether it has served somebody since its last report."""
        return report.pulls + report.pushes != self.pulls + self.pushes

    def count(self, report: ServerCounters) -> None:
        """What is not reported yet stays as it was."""
        for name in self.COUNTERS:
            if (value := getattr(report, name)) is not None:
                setattr(self, name, self.carried.get(name, 0) + value)
        if report.redundancy_bytes is not None:
            self.redundancy_bytes = report.redundancy_bytes
        self.kept_bytes_max = max(self.kept_bytes_max, report.kept_bytes)
        if report.tiers is not None:
            self.tiers = add_counts(report.tiers, self.tiers_carried)
        self.pace = report.pace or self.pace
        if report.costs is not None:
            self.costs = report.costs
        if report.recovering is False and self.state == "recovering":
            self.state, self.missing_rows = "ready", 0


@dataclass(slots=True, kw_only=True)
class WorkerStatus:
    """starting -> training (first report) -> trained -> stopped, or gone too early.
    A successor starts again."""

    state: str = "starting"
    incarnation: int = 0
    step: int = 0
    samples: int = 0
    steps_before: int = 0  # of these: trained before this run, which went on from a checkpoint
    samples_before: int = 0
    steps_total: int | None = None
    loss: float | None = None
    staleness_mean: float = 0.0
    staleness_max: float = 0.0
    wait_seconds: float = 0.0
    lookups: int = 0
    distinct: int = 0  # rows per batch, summed over the batches
    redo_bytes_peak: int = 0  # the most it ever kept because it was not durable yet
    position: dict[str, Any] | None = None  # where its next batch starts in the data
    # (when, samples) of its reports of late.
    reports: deque[tuple[float, int]] = field(default_factory=deque)
    # (when, seconds in all that it waited for rows), with each of these.
    waits: deque[tuple[float, float]] = field(default_factory=deque)
    # What the worker measured itself, when it was through.
    trained: dict[str, Any] = field(default_factory=dict)
    trained_at: float = 0.0
    begun_at: float | None = None  # first report
    carried: dict[str, float] = field(default_factory=dict)  # what earlier incarnations counted

    COUNTERS: ClassVar = ("wait_seconds", "lookups", "distinct")

    def to_dict(self) -> dict[str, Any]:
        values = dataclasses.asdict(self)
        # Readings of a clock that nobody else has, and bookkeeping.
        del values["trained_at"], values["begun_at"], values["reports"], values["waits"], values["carried"]
        return values

    def count(self, report: Progress, now: float, *, resumed: bool) -> None:
        self.state = "training"
        if resumed and self.begun_at is None:  # a successor's predecessor trained in this run
            self.steps_before, self.samples_before = report.steps_before, report.samples_before
        self.begun_at = now if self.begun_at is None else self.begun_at
        self.step = max(self.step, report.step)
        self.samples = max(self.samples, report.samples)
        self.staleness_mean = report.staleness_mean
        self.staleness_max = max(self.staleness_max, report.staleness_max)
        self.wait_seconds = self.carried.get("wait_seconds", 0.0) + report.wait_seconds
        self.lookups = int(self.carried.get("lookups", 0)) + report.lookups
        self.distinct = int(self.carried.get("distinct", 0)) + report.distinct
        self.redo_bytes_peak = max(self.redo_bytes_peak, report.redo_bytes_peak)
        self.position = report.position
        self.reports.append((now, self.samples))
        self.waits.append((now, self.wait_seconds))
        while len(self.reports) > 2 and self.reports[1][0] <= now - RATE_WINDOW_SECONDS:
            self.reports.popleft()
            self.waits.popleft()

    def samples_per_s(self, now: float) -> float | None:
        """Over the last few seconds. What was done before the first report took an unknown time."""
        (first_at, first), (last_at, last) = self.reports[0], self.reports[-1]
        if now - last_at > RATE_WINDOW_SECONDS:
            return 0.0
        return (last - first) / (last_at - first_at) if last_at - first_at >= RATE_SECONDS_MIN else None

    def samples_per_s_now(self, now: float) -> float:
        """Over half a second that ends with the last report, or now if that is long ago."""
        last_at, last = self.reports[-1]
        end = last_at if now - last_at < RATE_NOW_SECONDS / 2 else now
        after_at, after = end, last
        for at, samples in reversed(self.reports):
            if at <= end - RATE_NOW_SECONDS:
                share = (end - RATE_NOW_SECONDS - at) / (after_at - at)
                return (last - samples - share * (after - samples)) / RATE_NOW_SECONDS
            after_at, after = at, samples
        return (last - after) / (end - after_at) if end - after_at >= RATE_SECONDS_MIN else 0.0

    @property
    def began_at(self) -> float:
        """When it made its first step. A successor's own seconds are not those of the whole."""
        began = self.trained_at - float(self.trained["seconds"])
        return began if self.begun_at is None else min(began, self.begun_at)
