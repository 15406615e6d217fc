"""Where a run stands, as its processes tell it: counts, rates, losses, and who is in which state.

Pure bookkeeping: events come in with the time they arrived, numbers come out for the display, for
metrics.jsonl and for the summary. No clock, no files, no processes; so a test can replay any run.

A process that dies may have a successor under the same number: counts go on from where the dead one's stood, and
steps and samples never go back (a step that is done again is not another step).
"""

from __future__ import annotations

import dataclasses
import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from regrow.config import TrainConfig
from regrow.launch.failures import Failures
from regrow.metrics import ScoreHistogram

RATE_SECONDS_MIN = 0.25  # two reports closer than this say nothing about speed
RATE_NOW_SECONDS = 0.5  # for plots of what a failure does; jitters
RATE_WINDOW_SECONDS = 5.0  # shorter: the figure jitters with every report; longer: a stall shows late
AUC_WINDOW_SAMPLES = 200_000  # shorter: noise (see test_rows); longer: the start of training drags it down
AUC_WINDOW_REPORTS_MAX = 1024
STALL_SECONDS = 15.0

PHASES = ("starting", "loading", "training", "evaluating", "stopping", "done")


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
    carried: dict[str, int] = field(default_factory=dict)  # what earlier incarnations counted

    COUNTERS: ClassVar = (
        *("pulls", "pushes", "bytes_in", "bytes_out"),
        *("rows_updated", "flushes", "flush_bytes", "flush_rows"),
        *("parity_rows_applied", "rows_decoded", "faults", "faults_served"),
    )

    def to_dict(self) -> dict[str, Any]:
        told = dataclasses.asdict(self)
        del told["carried"]
        return told


@dataclass(slots=True, kw_only=True)
class WorkerStatus:
    """starting -> training (first report) -> trained -> stopped, or gone too early.
    A successor starts again."""

    state: str = "starting"
    incarnation: int = 0
    step: int = 0
    samples: int = 0
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
    # What the worker measured itself, when it was through.
    trained: dict[str, Any] = field(default_factory=dict)
    trained_at: float = 0.0
    begun_at: float | None = None  # first report
    carried: dict[str, float] = field(default_factory=dict)  # what earlier incarnations counted

    COUNTERS: ClassVar = ("wait_seconds", "lookups", "distinct")

    def to_dict(self) -> dict[str, Any]:
        told = dataclasses.asdict(self)
        # Readings of a clock that nobody else has, and bookkeeping.
        del told["trained_at"], told["begun_at"], told["reports"], told["carried"]
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
        self.failures = Failures()
        self.checkpoints: dict[str, Any] = {"saved": 0, "failed": 0, "last": None, "last_error": None}
        self.merges = dict.fromkeys(("folded", "deleted", "broken", "wanted", "error"), 0)
        self.saving: tuple[str, float] | None = None  # the checkpoint being stored, and since when
        self.cuts_dead: list[str] = []  # being stored when all processes began again: nobody stores them any more
        self.still: bool | None = None  # how the checkpoint at the end of training went
        self.restores: list[dict[str, Any]] = []  # falls back to a checkpoint
        self.gone_around: list[str] = []  # damage that was met while loading, and did not matter
        self.checking: tuple[int, int] | None = None  # bytes read of one, and in all, to see whether it is sound
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
        elif kind == "checkpoint":
            self._receive_checkpoint(event, now)
        elif kind == "merge" and event["kind"] in self.merges:
            self.merges[event["kind"]] += 1
        self.failures.heard(role, id, kind, event, now)
        if role == "worker" and kind in ("progress", "trained", "evaluating"):
            self.failures.stepped(id, self.samples if kind == "progress" else None, now)

    def _receive_checkpoint(self, event: dict[str, Any], now: float) -> None:
        if event["status"] == "begun":
            self.saving = (str(event["cut"]), now)
            return
        self.saving = None
        saved = event["status"] == "saved"
        if saved:
            self.checkpoints["saved"] += "kind" in event  # else there was nothing new to save
            known = self.checkpoints["last"] or {}
            self.checkpoints["last"] = known | {
                name: event[name] for name in ("cut", "kind", "seconds", "cut_seconds") if name in event
            }
        else:
            self.checkpoints["failed"] += 1
            self.checkpoints["last_error"] = str(event.get("reason", ""))
        if event.get("still"):
            self.still = saved

    def start_over(
        self, *, reason: str, cut: str | None, cut_step: int, now: float, damage: Sequence[str] = ()
    ) -> None:
        """All processes begin again, from a checkpoint. What was trained since is trained again. `damage`: what is
        wrong with newer ones."""
        lost = max(0, self.step - cut_step)
        restore = {"reason": reason, "step": self.step, "cut": cut, "cut_step": cut_step, "steps_lost": lost}
        self.restores.append({**restore, "damage": list(damage)})
        self.checking = None
        self.phase, self.phase_at, self.progress_at, self.still = "starting", now, now, None
        self.cuts_dead += [self.saving[0]] if self.saving is not None else []
        self.saving, self.evaluated = None, {}
        self.failures.finish(now)
        for role, places in (("server", self.servers), ("worker", self.workers)):
            for id, _ in enumerate(places):
                self.succeeded(role, id, 0)

    def lost(self, role: str, id: int) -> None:
        """This process is no more; which is as it should be once the run is being stopped."""
        state = "stopped" if self.phase in ("stopping", "done") else "gone"
        if role == "server":
            self.servers[id].state = state
        elif role == "worker":
            self.workers[id].state = state

    def succeeded(self, role: str, id: int, incarnation: int) -> None:
        """Another process has taken this place."""
        if role == "coordinator":
            return
        place: ServerStatus | WorkerStatus = self.servers[id] if role == "server" else self.workers[id]
        place.state, place.incarnation = "starting", incarnation
        place.carried = {name: getattr(place, name) for name in place.COUNTERS}

    def _receive_server(self, server: ServerStatus, kind: str, event: dict[str, Any]) -> None:
        if kind == "listening":
            server.state = "allocating" if server.incarnation == 0 else "recovering"
        elif kind == "ready":
            server.state = "ready" if server.incarnation == 0 else "recovering"
            server.rows, server.bytes = int(event["rows"]), int(event["bytes"])
        elif kind == "loading":
            server.state = "loading"
            server.load_done, server.load_total = int(event["done"]), int(event["total"])
        elif kind == "loaded":
            server.state = "ready"
        elif kind == "damaged":
            self.gone_around.append(str(event["what"]))
        elif kind == "recovered":
            server.state, server.missing_rows = "ready", 0
        elif kind == "recovery":
            server.state = "recovering"
            missing = int(event["rows_total"]) - int(event["rows_back"])
            server.missing_rows = int(event.get("rows_missing", missing))
        elif kind in ("server", "stopped"):
            for name in server.COUNTERS:
                if name in event or (kind == "server" and name in ("pulls", "pushes", "bytes_in", "bytes_out")):
                    setattr(server, name, server.carried.get(name, 0) + int(event[name]))
            server.redundancy_bytes = int(event.get("redundancy_bytes", server.redundancy_bytes))
            server.kept_bytes_max = max(server.kept_bytes_max, int(event.get("kept_bytes", 0)))
            if event.get("recovering") is False and server.state == "recovering":
                server.state, server.missing_rows = "ready", 0

    def _receive_worker(self, worker: WorkerStatus, kind: str, event: dict[str, Any], now: float) -> None:
        if kind == "planned":
            worker.steps_total = int(event["steps"])
        elif kind == "progress":
            worker.state = "training"
            worker.begun_at = now if worker.begun_at is None else worker.begun_at
            worker.step = max(worker.step, int(event["step"]))
            worker.samples = max(worker.samples, int(event["samples"]))
            worker.staleness_mean = float(event.get("staleness_mean", 0.0))
            worker.staleness_max = max(worker.staleness_max, float(event.get("staleness_max", 0.0)))
            carried = worker.carried
            worker.wait_seconds = carried.get("wait_seconds", 0.0) + float(event.get("wait_seconds", 0.0))
            worker.lookups = int(carried.get("lookups", 0)) + int(event.get("lookups", 0))
            worker.distinct = int(carried.get("distinct", 0)) + int(event.get("distinct", 0))
            worker.redo_bytes_peak = max(worker.redo_bytes_peak, int(event.get("redo_bytes_peak", 0)))
            worker.position = event.get("position")
            if self._add_histograms(event):
                worker.loss = finite(event["loss"])
            worker.reported(now)
            self.progress_at = now
        elif kind == "trained":
            worker.state, worker.trained_at = "trained", now
            worker.step = max(worker.step, int(event["steps"]))
            worker.samples = max(worker.samples, int(event["samples"]))
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

    def samples_per_s_now(self, now: float) -> float | None:
        """Of all workers together, over the last moment of training."""
        if self.phase != "training":
            return None
        return sum(worker.samples_per_s_now(now) for worker in self.workers if worker.reports)

    @property
    def servers_down(self) -> list[int]:
        """Servers that are dead, or whose rows are not all back."""
        return [id for id, server in enumerate(self.servers) if server.state != "ready"]

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
    def loading(self) -> bool:
        """Some server does not have all rows of the checkpoint that the run starts from."""
        return any(server.state == "loading" for server in self.servers)

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
        begin = min(worker.began_at for worker in done)
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
            "samples_per_s_now": rounded(self.samples_per_s_now(now), 1),
            "loss": rounded(self.loss, 6),
            "auc": rounded(self.auc, 6),
            "servers_alive": self.servers_alive,
            "recovering": [id for id, server in enumerate(self.servers) if server.state == "recovering"],
            "missing_rows": sum(server.missing_rows for server in self.servers),
            "failures": len(self.failures.all),
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
            "parity_stripes": self.evaluated.get("parity_stripes"),
            "parity_wrong": self.evaluated.get("parity_wrong"),
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
            "redundancy_bytes": sum(server.redundancy_bytes for server in self.servers),
            "flushes": sum(server.flushes for server in self.servers),
            "flush_bytes": sum(server.flush_bytes for server in self.servers),
            "redo_bytes_peak": max(worker.redo_bytes_peak for worker in self.workers),
            "failures": [failure.to_dict() for failure in self.failures.all],
            "checkpoints": self.checkpoints,
            "merges": self.merges,
            "restores": self.restores,
            "damage_gone_around": self.gone_around,
            "per_server": [server.to_dict() for server in self.servers],
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
