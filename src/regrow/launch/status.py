"""Where a run stands, as its processes tell it: counts, rates, losses, and who is in which state.

Pure bookkeeping: events come in with the time they arrived, numbers come out for the display, for
metrics.jsonl and for the summary. No clock, no files, no processes; so a test can replay any run.
"""

from __future__ import annotations

import dataclasses
import math
from collections import deque
from dataclasses import dataclass, field
from typing import Any

from regrow.config import TrainConfig
from regrow.metrics import ScoreHistogram

RATE_SECONDS_MIN = 0.25  # two reports closer than this say nothing about speed
RATE_WINDOW_SECONDS = 5.0  # shorter: the figure jitters with every report; longer: a stall shows late
AUC_WINDOW_SAMPLES = 200_000  # shorter: noise (see test_rows); longer: the start of training drags it down
AUC_WINDOW_REPORTS_MAX = 1024
STALL_SECONDS = 15.0

PHASES = ("starting", "loading", "training", "evaluating", "stopping", "done")


@dataclass(slots=True, kw_only=True)
class ServerStatus:
    """starting -> allocating (it listens) -> ready (its rows are there) -> stopped, or gone too early."""

    state: str = "starting"
    rows: int = 0
    bytes: int = 0
    pulls: int = 0
    pushes: int = 0
    bytes_in: int = 0
    bytes_out: int = 0


@dataclass(slots=True, kw_only=True)
class WorkerStatus:
    """starting -> training (first report) -> trained -> stopped, or gone too early."""

    state: str = "starting"
    step: int = 0
    samples: int = 0
    steps_total: int | None = None
    loss: float | None = None
    staleness_mean: float = 0.0
    staleness_max: float = 0.0
    wait_seconds: float = 0.0
    lookups: int = 0
    distinct: int = 0  # rows per batch, summed over the batches
    redo_bytes_max: int = 0  # the most it ever kept because it was not durable yet
    position: dict[str, Any] | None = None  # where its next batch starts in the data
    # (when, samples) of its reports of late.
    reports: deque[tuple[float, int]] = field(default_factory=deque)
    # What the worker measured itself, when it was through.
    trained: dict[str, Any] = field(default_factory=dict)
    trained_at: float = 0.0

    def to_dict(self) -> dict[str, Any]:
        told = dataclasses.asdict(self)
        del told["trained_at"], told["reports"]  # readings of a clock that nobody else has
        return told

    def reported(self, now: float) -> None:
        self.reports.append((now, self.samples))
        while len(self.reports) > 2 and self.reports[1][0] <= now - RATE_WINDOW_SECONDS:
            self.reports.popleft()

    def samples_per_s(self, now: float) -> float | None:
        """Over the last few seconds. What was done before the first report took an unknown time."""
        (first_at, first), (last_at, last) = self.reports[0], self.reports[-1]
        if now - last_at > RATE_WINDOW_SECONDS:
            return 0.0
        return (last - first) / (last_at - first_at) if last_at - first_at >= RATE_SECONDS_MIN else None


class RunStatus:
    """One door: `receive(role, id, event, now)`. Times are seconds of one monotonic clock."""

    def __init__(self, config: TrainConfig, *, started_at: float) -> None:
        self.config = config
        self.started_at = started_at
        self.phase = "starting"
        self.phase_at = started_at
        self.servers = [ServerStatus() for _ in range(config.servers)]
        self.workers = [WorkerStatus() for _ in range(config.workers)]
        self.evaluated: dict[str, Any] = {}
        self.test_samples_done = 0
        self.progress_at = started_at
        self._histograms: deque[ScoreHistogram] = deque()
        self._histogram_samples = 0

    def __repr__(self) -> str:
        return f"<run {self.phase}, step {self.step}, {self.samples} samples>"

    # -- what comes in ---------------------------------------------------------------------------------------

    def enter(self, phase: str, now: float) -> None:
        assert phase in PHASES
        assert PHASES.index(phase) >= PHASES.index(self.phase)
        if phase != self.phase:
            self.phase, self.phase_at, self.progress_at = phase, now, now

    def receive(self, role: str, id: int, event: dict[str, Any], now: float) -> None:
        """Raises KeyError, TypeError or ValueError for an event that lacks what it must have."""
        kind = event["event"]
        if role == "server":
            self._receive_server(self.servers[id], kind, event)
        elif role == "worker":
            self._receive_worker(self.workers[id], kind, event, now)

    def lost(self, role: str, id: int) -> None:
        """This process is no more; which is as it should be once the run is being stopped."""
        state = "stopped" if self.phase in ("stopping", "done") else "gone"
        if role == "server":
            self.servers[id].state = state
        elif role == "worker":
            self.workers[id].state = state

    def _receive_server(self, server: ServerStatus, kind: str, event: dict[str, Any]) -> None:
        if kind == "listening":
            server.state = "allocating"
        elif kind == "ready":
            server.state = "ready"
            server.rows, server.bytes = int(event["rows"]), int(event["bytes"])
        elif kind in ("server", "stopped"):
            for name in ("pulls", "pushes", "bytes_in", "bytes_out"):
                if name in event or kind == "server":
                    setattr(server, name, int(event[name]))

    def _receive_worker(self, worker: WorkerStatus, kind: str, event: dict[str, Any], now: float) -> None:
        if kind == "planned":
            worker.steps_total = int(event["steps"])
        elif kind == "progress":
            worker.state = "training"
            worker.step, worker.samples = int(event["step"]), int(event["samples"])
            worker.staleness_mean = float(event.get("staleness_mean", 0.0))
            worker.staleness_max = float(event.get("staleness_max", 0.0))
            worker.wait_seconds = float(event.get("wait_seconds", 0.0))
            worker.lookups = int(event.get("lookups", 0))
            worker.distinct = int(event.get("distinct", 0))
            worker.redo_bytes_max = int(event.get("redo_bytes_max", 0))
            worker.position = event.get("position")
            if self._add_histograms(event):
                worker.loss = finite(event["loss"])
            worker.reported(now)
            self.progress_at = now
        elif kind == "trained":
            worker.state, worker.trained_at = "trained", now
            worker.step, worker.samples = int(event["steps"]), int(event["samples"])
            worker.trained = {name: value for name, value in event.items() if name != "event"}
            float(worker.trained["seconds"])
            self.progress_at = now
        elif kind == "evaluating":
            self.test_samples_done = int(event["samples"])
            self.progress_at = now
        elif kind == "evaluated":
            self.evaluated = {name: value for name, value in event.items() if name != "event"}
            float(event["auc"]), float(event["logloss"])

    def _add_histograms(self, event: dict[str, Any]) -> bool:
        """False for a report without samples, whose loss means nothing."""
        report = ScoreHistogram(event["hist_pos"], event["hist_neg"])
        if _count(report) == 0:
            return False
        self._histograms.append(report)
        self._histogram_samples += _count(report)
        while len(self._histograms) > 1 and (
            len(self._histograms) > AUC_WINDOW_REPORTS_MAX
            or self._histogram_samples - _count(self._histograms[0]) >= AUC_WINDOW_SAMPLES
        ):
            self._histogram_samples -= _count(self._histograms.popleft())
        return True

    # -- what comes out --------------------------------------------------------------------------------------

    @property
    def step(self) -> int:
        """The step the run has reached: that of the worker furthest ahead."""
        return max(worker.step for worker in self.workers)

    @property
    def steps_done(self) -> int:
        return sum(worker.step for worker in self.workers)

    @property
    def steps_total(self) -> int | None:
        """Of all workers together; None while the end is unknown (epochs of a file nobody has counted)."""
        config = self.config
        if config.steps is not None:
            return config.steps * config.workers
        known = [worker.steps_total for worker in self.workers if worker.steps_total is not None]
        if len(known) == config.workers:
            return sum(known)
        if config.train_rows is not None and config.data_kind == "synthetic":
            # A file may be shorter than train_rows; the synthetic stream never is.
            return (config.epochs or 1) * math.ceil(config.train_rows / config.batch)
        return None

    @property
    def samples(self) -> int:
        return sum(worker.samples for worker in self.workers)

    def samples_per_s(self, now: float) -> float | None:
        """Of all workers together, over the last few seconds of training."""
        if self.phase != "training":
            return None
        rates = [worker.samples_per_s(now) for worker in self.workers if worker.reports]
        known = [rate for rate in rates if rate is not None]
        return sum(known) if known and len(known) == len(rates) else None

    @property
    def loss(self) -> float | None:
        """Mean over the workers' latest reports."""
        losses = [worker.loss for worker in self.workers if worker.loss is not None]
        return sum(losses) / len(losses) if losses else None

    @property
    def auc(self) -> float | None:
        """Of the training samples of late, each judged before the model was trained on it."""
        return finite(sum(self._histograms, start=ScoreHistogram()).auc()) if self._histograms else None

    @property
    def staleness_mean(self) -> float:
        """Steps between the pull of a row and the push of its gradient, over all samples."""
        weighted = sum(worker.staleness_mean * worker.samples for worker in self.workers)
        return weighted / self.samples if self.samples else 0.0

    @property
    def bytes_in(self) -> int:
        return sum(server.bytes_in for server in self.servers)

    @property
    def bytes_out(self) -> int:
        return sum(server.bytes_out for server in self.servers)

    @property
    def servers_alive(self) -> int:
        return sum(server.state not in ("gone", "stopped") for server in self.servers)

    @property
    def training_seconds(self) -> float | None:
        """From the first worker's first step to the last worker's last: what samples per second mean.

        Each worker says how long it took when it is through, so that start-up does not count.
        """
        done = [worker for worker in self.workers if worker.trained]
        if not done:
            return None
        begin = min(worker.trained_at - float(worker.trained["seconds"]) for worker in done)
        return max(worker.trained_at for worker in done) - begin

    def stalled_seconds(self, now: float) -> float | None:
        """How long training has not moved, when that is worth a word."""
        quiet = now - self.progress_at
        return quiet if self.phase in ("training", "evaluating") and quiet > STALL_SECONDS else None

    def metrics(self, now: float) -> dict[str, Any]:
        """A line of metrics.jsonl."""
        return {
            "t": round(now - self.started_at, 3),
            "phase": self.phase,
            "step": self.step,
            "steps_done": self.steps_done,
            "samples": self.samples,
            "samples_per_s": rounded(self.samples_per_s(now), 1),
            "loss": rounded(self.loss, 6),
            "auc": rounded(self.auc, 6),
            "servers_alive": self.servers_alive,
            "staleness_mean": rounded(self.staleness_mean, 3),
            "wait_seconds": rounded(sum(worker.wait_seconds for worker in self.workers), 3),
            "bytes_in": self.bytes_in,
            "bytes_out": self.bytes_out,
        }

    def totals(self) -> dict[str, Any]:
        """The part of the summary that comes from what the processes said."""
        seconds = self.training_seconds
        distinct = sum(worker.distinct for worker in self.workers)
        return {
            "steps": self.step,
            "steps_done": self.steps_done,
            "samples": self.samples,
            "seconds": rounded(seconds, 3),
            "samples_per_s": rounded(self.samples / seconds, 1) if seconds else None,
            "loss": rounded(self.loss, 6),
            "auc": finite(self.evaluated.get("auc")),
            "logloss": finite(self.evaluated.get("logloss")),
            "test_samples": self.evaluated.get("test_samples"),
            "model_sha256": self.evaluated.get("model_sha256"),
            "staleness_mean": rounded(self.staleness_mean, 3),
            "wait_seconds": rounded(sum(worker.wait_seconds for worker in self.workers), 3),
            "staleness_max": max(worker.staleness_max for worker in self.workers),
            "lookups": sum(worker.lookups for worker in self.workers),
            "distinct_rows": distinct,
            "distinct_rows_per_step": rounded(distinct / max(1, self.steps_done), 1),
            "rows": sum(server.rows for server in self.servers),
            "table_bytes": sum(server.bytes for server in self.servers),
            "bytes_in": self.bytes_in,
            "bytes_out": self.bytes_out,
            "per_worker": [worker.to_dict() for worker in self.workers],
            "per_server": [dataclasses.asdict(server) for server in self.servers],
        }


def finite(value: Any) -> float | None:
    """NaN and infinity are no JSON: a loss that has diverged is shown as missing."""
    if value is None:
        return None
    number = float(value)
    return number if math.isfinite(number) else None


def rounded(value: float | None, digits: int) -> float | None:
    return None if value is None else round(value, digits)


def _count(histogram: ScoreHistogram) -> int:
    return int(histogram.positives.sum() + histogram.negatives.sum())
