"""Where a run stands, as its processes tell it: counts, rates, losses, and who is in which state.

Pure bookkeeping: reports come in with the time they arrived, numbers come out for the display, for
metrics.jsonl and for the summary. No clock, no files, no processes; so a test can replay any run.

A process that dies may have a successor under the same number: counts go on from where the dead one's stood, and
steps and samples never go back (a step that is done again is not another step).
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np

from regrow.config import TrainConfig
from regrow.launch.failures import Failures, Standstill, round_known
from regrow.launch.losses import Losses
from regrow.launch.publications import PublicationStatus
from regrow.launch.reports import (
    CheckpointBegun,
    CheckpointFailed,
    CheckpointSaved,
    Damaged,
    Evaluated,
    Evaluating,
    Joined,
    Listening,
    Loaded,
    Loading,
    MergerNews,
    OwnSaved,
    Planned,
    Progress,
    Publication,
    Ready,
    Recovered,
    Recovery,
    Report,
    ServerCounters,
    StoreOpened,
    Trained,
    Waited,
    Waiting,
)
from regrow.launch.role_status import ServerStatus, WorkerStatus
from regrow.launch.tier_counts import Tiers, sum_tiers
from regrow.metrics import ScoreHistogram
from regrow.units import parse_interval

AUC_WINDOW_SAMPLES = 200_000  # shorter: noise (see test_rows); longer: the start of training drags it down
AUC_WINDOW_REPORTS_MAX = 1024
STALL_SECONDS = 15.0

PHASES = ("starting", "loading", "training", "evaluating", "stopping", "done")


class RunStatus:
    """One door: `receive(role, id, report, now)`. Times are seconds of one monotonic clock."""

    def __init__(self, config: TrainConfig, *, started_at: float) -> None:
        self.config = config
        self.started_at = started_at
        self.phase = "starting"
        self.phase_at = started_at
        self.servers = [ServerStatus() for _ in range(config.servers)]
        self.workers = [WorkerStatus() for _ in range(config.workers)]
        self.plan_reason: str | None = None  # of partial recovery: how often, and why
        self.pls_planned: float | None = None  # and what PLS it expects of a whole run
        self.losses = self._make_losses() if config.saves_own else None
        self.evaluated: Evaluated | None = None
        self.logged: dict[str, float | None] = {}  # by a script, for whoever looks
        self.test_samples_done = 0
        self.progress_at = started_at
        self.moved_at = started_at  # when anything at all was last done
        self.failures = Failures()
        self.failures_before: list[dict[str, Any]] = []  # as a launcher before this one wrote them down
        self.launchers_before = 0
        self.checkpoints: dict[str, Any] = {"saved": 0, "failed": 0, "last": None, "last_error": None}
        self.publications = PublicationStatus(every_seconds=parse_interval(config.publish_every)[0])
        self.merges = dict.fromkeys(("folded", "deleted", "broken", "wanted", "error"), 0)
        self.saving: tuple[str, float] | None = None  # the checkpoint being stored, and since when
        self.cuts_dead: list[str] = []  # being stored when all processes began again: nobody stores them any more
        self.waiting: dict[int, tuple[str, float]] = {}  # servers that rows depend on and that hang: why, until when
        self.ending: tuple[str, float] | None = None  # what the run still waits for at its end, and until when
        self.still: bool | None = None  # how the checkpoint at the end of training went
        self.restores: list[dict[str, Any]] = []  # falls back to a checkpoint
        self._standstill = Standstill()
        self.notes: list[str] = []  # what the user should know of how this run begins
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
            self.phase, self.phase_at, self.progress_at, self.moved_at = phase, now, now, now

    def receive(self, role: str, id: int, report: Report, now: float) -> None:
        """Raises ValueError for a report that cannot be: histograms of another length, say."""
        if not isinstance(report, ServerCounters) or self.servers[id].has_moved(report):
            self.moved_at = now
        if role == "server":
            self._receive_server(self.servers[id], id, report)
        elif role == "worker":
            self._receive_worker(self.workers[id], report, now)
        elif isinstance(report, CheckpointBegun | CheckpointSaved | CheckpointFailed):
            self._receive_checkpoint(report, now)
        elif isinstance(report, Publication):
            self.publications.receive(report, now)
        elif isinstance(report, Waiting):
            self.waiting[report.server] = (report.reason, now + report.seconds)
        elif isinstance(report, Waited):
            self.waiting.pop(report.server, None)
        elif isinstance(report, MergerNews) and report.kind in self.merges:
            self.merges[report.kind] += 1
        self.failures.receive(role, id, report, now)
        if role == "worker" and isinstance(report, Progress | Trained | Evaluating):
            self.failures.note_step(id, self.samples if isinstance(report, Progress) else None, now)

    def _receive_checkpoint(self, report: CheckpointBegun | CheckpointSaved | CheckpointFailed, now: float) -> None:
        if isinstance(report, CheckpointBegun):
            self.saving = (report.cut, now)
            return
        self.saving = None
        if isinstance(report, CheckpointFailed):
            self.checkpoints["failed"] += 1
            self.checkpoints["last_error"] = report.reason
        else:
            last: dict[str, Any] = {"cut": report.cut}
            if report.kind is not None:  # else there was nothing new to save
                self.checkpoints["saved"] += 1
                last |= {"kind": report.kind, "seconds": report.seconds, "cut_seconds": report.cut_seconds}
            self.checkpoints["last"] = (self.checkpoints["last"] or {}) | last
        if report.still:
            self.still = isinstance(report, CheckpointSaved)

    def start_over(
        self, *, reason: str, cut: str | None, cut_step: int, now: float, damage: Sequence[str] = ()
    ) -> None:
        """All processes begin again, from a checkpoint. What was trained since is trained again. `damage`: what is
        wrong with newer ones."""
        lost = max(0, self.step - cut_step)
        restore = {"reason": reason, "step": self.step, "cut": cut, "cut_step": cut_step, "steps_lost": lost}
        self.restores.append({**restore, "damage": list(damage), "stall_s": None})
        self._standstill.begin(self.progress_at)
        self.checking = None
        self.phase, self.phase_at, self.progress_at, self.still = "starting", now, now, None
        self.moved_at = now
        self.cuts_dead += [self.saving[0]] if self.saving is not None else []
        self.saving = self.evaluated = None
        self.failures.finish(now)
        if self.losses is not None:
            self.losses.start_over()
        for role, places in (("server", self.servers), ("worker", self.workers)):
            for id, _ in enumerate(places):
                self.note_successor(role, id, 0)

    def note_end(self, role: str, id: int) -> None:
        """This process is no more; which is as it should be once the run is being stopped."""
        state = "stopped" if self.phase in ("stopping", "done") else "gone"
        if role == "server":
            self.servers[id].state = state
        elif role == "worker":
            self.workers[id].state = state

    def note_successor(self, role: str, id: int, incarnation: int) -> None:
        """Another process has taken this place."""
        if role == "coordinator":
            self.waiting.clear()  # the next one counts anew
            return
        if role == "server":
            self.waiting.pop(id, None)
        place: ServerStatus | WorkerStatus = self.servers[id] if role == "server" else self.workers[id]
        place.state, place.incarnation = "starting", incarnation
        place.carried = {name: getattr(place, name) for name in place.COUNTERS}

    def _receive_server(self, server: ServerStatus, id: int, report: Report) -> None:
        match report:
            case Listening():
                server.state = "allocating" if server.incarnation == 0 else "recovering"
            case Ready(rows=rows, bytes=held):
                server.state = "ready" if server.incarnation == 0 else "recovering"
                server.rows, server.bytes = rows, held
            case Loading(done=done, total=total):
                server.state = "loading"
                server.load_done, server.load_total = done, total
            case Loaded():
                server.state = "ready"
            case StoreOpened(io=io):
                server.io, server.tiers_carried = io, server.tiers
            case Damaged(what=what):
                self.gone_around.append(what)
            case Recovery(rows_total=total, rows_back=back):
                server.state, server.missing_rows = "recovering", total - back
            case Recovered():
                server.state, server.missing_rows = "ready", 0
            case Joined():
                assert self.losses is not None
                per_push = self.losses.samples_per_push = self._measure_samples_per_push()
                samples = None if self.steps_total is None else self.steps_total * per_push
                self.failures.note_loss(id, self.losses.note_joined(id, report, samples))
            case OwnSaved():
                assert self.losses is not None
                self.losses.note_saved(id, report)
            case ServerCounters():
                server.count(report)
                if self.losses is not None:
                    self.losses.note_counters(id, report)

    def _receive_worker(self, worker: WorkerStatus, report: Report, now: float) -> None:
        match report:
            case Planned(steps=steps):
                worker.steps_total = steps
            case Progress():
                histogram = ScoreHistogram(np.array(report.hist_pos), np.array(report.hist_neg))
                worker.count(report, now, resumed=self.config.resume is not None)
                self._standstill.end(now, self.restores)
                self._add_histogram(histogram)
                if report.loss is not None or worker.loss is None:
                    worker.loss = keep_finite(report.loss)
                self.logged |= report.logged
                self.progress_at = now
            case Trained():
                worker.state, worker.trained_at = "trained", now
                worker.step = max(worker.step, report.steps)
                worker.samples = max(worker.samples, report.samples)
                worker.trained = msgspec.structs.asdict(report)
                self.progress_at = now
            case Evaluating(samples=samples):
                self.test_samples_done = samples
                self.progress_at = now
            case Evaluated():
                self.evaluated = report

    def _add_histogram(self, histogram: ScoreHistogram) -> None:
        count = _count(histogram)
        if count == 0:
            return
        self._histograms.append(histogram)
        self._histogram_samples += count
        while len(self._histograms) > 1 and (
            len(self._histograms) > AUC_WINDOW_REPORTS_MAX
            or self._histogram_samples - _count(self._histograms[0]) >= AUC_WINDOW_SAMPLES
        ):
            self._histogram_samples -= _count(self._histograms.popleft())

    def _make_losses(self) -> Losses:
        config = self.config
        return Losses(
            servers=config.servers,
            samples_per_push=config.batch,
            is_sync=config.mode == "sync",
            workers=config.workers,
        )

    def _measure_samples_per_push(self) -> float:
        """A script may have batches of any size: of what it did so far, the mean."""
        if not self.config.script:
            return self.config.batch
        return self.samples / self.steps_done if self.samples else 1.0

    # -- what comes out --------------------------------------------------------------------------------------

    @property
    def samples_total(self) -> int | None:
        """Of the whole run, as far as that is known."""
        total = self.steps_total
        return None if total is None or self.config.script else total * self.config.batch

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

    @property
    def steps_trained(self) -> int:
        """By this run, not before the checkpoint that it went on from."""
        return sum(worker.step - worker.steps_before for worker in self.workers)

    @property
    def samples_trained(self) -> int:
        return sum(worker.samples - worker.samples_before for worker in self.workers)

    @property
    def is_complete(self) -> bool:
        """It went on from a checkpoint after which there is nothing to train."""
        return self.steps_trained == 0 and all(worker.trained for worker in self.workers)

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
        return keep_finite(sum(self._histograms, start=ScoreHistogram()).auc()) if self._histograms else None

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
    def tiers(self) -> Tiers | None:
        """Of rows on disk, all servers together. Servers do not know what a pull is for, and workers count look-ups of
        training only: a sample that is evaluated has as many."""
        samples = sum(worker.samples for worker in self.workers)
        evaluated = (self.evaluated and self.evaluated.test_samples) or self.test_samples_done or 0
        lookups = sum(worker.lookups for worker in self.workers)
        if samples:
            lookups += lookups * evaluated // samples
        return sum_tiers([server.tiers for server in self.servers], lookups=lookups)

    @property
    def is_loading(self) -> bool:
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

    def estimate_seconds(self, now: float) -> float | None:
        """How long all of the training will take, by the steps done so far."""
        left = self.estimate_seconds_left(now)
        return None if left is None else now - self.phase_at + left

    def estimate_seconds_left(self, now: float) -> float | None:
        """How long training may still take, by the steps that this run has made so far."""
        total, done, elapsed = self.steps_total, self.steps_trained, now - self.phase_at
        if total is None or not done or elapsed < 1.0:
            return None
        return elapsed * (total - self.steps_done) / done

    def describe_losses(self) -> dict[str, Any] | None:
        """Of partial recovery: what is saved and lost so far, the PLS to expect at the end, and what was asked for."""
        if self.losses is None:
            return None
        return {**self.losses.to_dict(), "pls_expected": self.expect_pls(), "pls_target": self.config.target_pls}

    def expect_pls(self) -> float | None:
        """At the end: what is lost by now, and what the plan expects of what is left. None: nobody can tell."""
        so_far = None if self.losses is None else self.losses.pls
        if so_far is None or self.pls_planned is None:
            return None
        left = 1.0 - min(1.0, self.steps_done / self.steps_total) if self.steps_total else 1.0
        return so_far + self.pls_planned * left

    def stalled_seconds(self, now: float) -> float | None:
        """How long training has not moved, when that is worth a word."""
        quiet = now - self.progress_at
        should_move = self.phase in ("training", "evaluating") and self.ending is None
        return quiet if should_move and quiet > STALL_SECONDS else None

    def metrics(self, now: float) -> dict[str, Any]:
        """A line of metrics.jsonl."""
        return {
            "t": round(now - self.started_at, 3),
            "phase": self.phase,
            "step": self.step,
            "steps_done": self.steps_done,
            "samples": self.samples,
            "samples_per_s": round_known(self.samples_per_s(now), 1),
            "samples_per_s_now": round_known(self.samples_per_s_now(now), 1),
            "loss": round_known(self.loss, 6),
            "auc": round_known(self.auc, 6),
            "servers_alive": self.servers_alive,
            "recovering": [id for id, server in enumerate(self.servers) if server.state == "recovering"],
            "missing_rows": sum(server.missing_rows for server in self.servers),
            "failures": len(self.failures.all),
            "staleness_mean": round_known(self.staleness_mean, 3),
            "wait_seconds": round_known(sum(worker.wait_seconds for worker in self.workers), 3),
            "bytes_in": self.bytes_in,
            "bytes_out": self.bytes_out,
            **({} if self.losses is None else {"partial": self.describe_losses()}),
            **({"logged": self.logged} if self.logged else {}),
            **({} if self.tiers is None else {"tiers": self.tiers}),
        }

    def list_failures(self) -> list[dict[str, Any]]:
        return [*self.failures_before, *(failure.to_dict() for failure in self.failures.all)]

    def totals(self) -> dict[str, Any]:
        """The part of the summary that comes from what the processes said."""
        seconds, judged = self.training_seconds, self.evaluated or Evaluated(auc=None, logloss=None)
        distinct, trained = sum(worker.distinct for worker in self.workers), self.samples_trained
        return {
            "steps": self.step,
            "steps_done": self.steps_done,
            "samples": self.samples,
            "seconds": round_known(seconds, 3),
            "samples_trained": trained,
            "nothing_left": self.is_complete,
            "samples_per_s": round_known(trained / seconds, 1) if seconds and trained else None,
            "loss": round_known(self.loss, 6),
            "auc": keep_finite(judged.auc),
            "logloss": keep_finite(judged.logloss),
            "metrics": judged.metrics,
            "test_samples": judged.test_samples,
            "model_sha256": judged.model_sha256,
            "parity_stripes": judged.parity_stripes,
            "parity_wrong": judged.parity_wrong,
            "staleness_mean": round_known(self.staleness_mean, 3),
            "wait_seconds": round_known(sum(worker.wait_seconds for worker in self.workers), 3),
            "staleness_max": max(worker.staleness_max for worker in self.workers),
            "lookups": sum(worker.lookups for worker in self.workers),
            "distinct_rows": distinct,
            "distinct_rows_per_step": round_known(distinct / max(1, self.steps_done), 1),
            "rows": sum(server.rows for server in self.servers),
            "table_bytes": sum(server.bytes for server in self.servers),
            "bytes_in": self.bytes_in,
            "bytes_out": self.bytes_out,
            "per_worker": [worker.to_dict() for worker in self.workers],
            "redundancy_bytes": sum(server.redundancy_bytes for server in self.servers),
            "flushes": sum(server.flushes for server in self.servers),
            "flush_bytes": sum(server.flush_bytes for server in self.servers),
            "redo_bytes_peak": max(worker.redo_bytes_peak for worker in self.workers),
            "failures": self.list_failures(),
            "launchers": 1 + self.launchers_before,
            "checkpoints": self.checkpoints,
            "publications": self.publications.to_dict() if self.config.publish is not None else None,
            "merges": self.merges,
            "restores": self.restores,
            "damage_gone_around": self.gone_around,
            "partial": self.describe_losses(),
            "tiers": self.tiers,
            "per_server": [server.to_dict() for server in self.servers],
        }


def keep_finite(value: Any) -> float | None:
    """NaN and infinity are no JSON: a loss that has diverged is shown as missing."""
    if value is None:
        return None
    number = float(value)
    return number if math.isfinite(number) else None


def _count(histogram: ScoreHistogram) -> int:
    return int(histogram.positives.sum() + histogram.negatives.sum())
