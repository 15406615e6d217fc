"""Failures of a run and how they were survived: when a process died, when somebody knew, when training moved again,
when every row was back, and what that cost.

Times are readings of the launcher's clock; what is kept of them are seconds from the death. Pure bookkeeping.
"""

from __future__ import annotations

import dataclasses
from collections import deque
from dataclasses import dataclass
from typing import Any

from regrow.launch.losses import Loss
from regrow.launch.reports import Listening, Planned, Ready, Recovered, Recovery, Report, ServerCounters

BEFORE_SECONDS = 5.0  # throughput before a failure: shorter is noise, longer reaches back to the last one
DURING_SECONDS_MIN = 1.0  # a recovery shorter than this is too short to measure a throughput in
RESUME_SECONDS = 1.0  # a worker that has pulled ahead misses the dead a little later, not after so long
SILENCE_SECONDS = 0.25  # a worker that says nothing for longer stands still; well above the time between reports
SILENT_SECONDS_MAX = 60.0  # a worker that is silent for longer after a recovery is somebody else's failure
RATE_SECONDS_MIN = 0.25  # a shorter span says nothing about speed
HISTORY_SECONDS = 0.02  # reports closer than this are one
HISTORY_LENGTH_MAX = 1 << 15


class History:
    """How many samples had been trained at which time."""

    def __init__(self) -> None:
        self._points: deque[tuple[float, int]] = deque(maxlen=HISTORY_LENGTH_MAX)

    def add(self, now: float, samples: int) -> None:
        if len(self._points) > 1 and now - self._points[-2][0] < HISTORY_SECONDS:
            self._points.pop()
        self._points.append((now, samples))

    def samples_per_s(self, begin: float, end: float) -> float | None:
        """Mean over a span of time, as far as it is known; None where there is nothing to compare."""
        if not self._points:
            return None
        begin, end = max(begin, self._points[0][0]), min(end, self._points[-1][0])
        return (self._at(end) - self._at(begin)) / (end - begin) if end - begin >= RATE_SECONDS_MIN else None

    def _at(self, time: float) -> float:
        """Between two reports, as if samples came evenly."""
        after_at, after = self._points[-1]
        for at, samples in reversed(self._points):
            if at <= time:
                share = (time - at) / (after_at - at) if after_at > at else 0.0
                return samples + (after - samples) * min(1.0, share)
            after_at, after = at, samples
        return after


@dataclass(slots=True, kw_only=True)
class Failure:
    """One death: down -> replaced (the successor is there) -> resumed (a step was made) -> recovered."""

    role: str
    id: int
    incarnation: int  # of the one that died
    step: int
    reason: str
    at: float  # the death; of a process nobody here killed: when it was noticed
    detected_at: float
    replaced_at: float | None = None
    resumed_at: float | None = None
    recovered_at: float | None = None
    stall_seconds: float = 0.0  # the longest any worker was silent meanwhile
    rows_total: int = 0  # that have to come back
    rows_counted: int = 0  # of these, there again by the last report
    bytes: int = 0
    faults: int = 0  # rows that somebody waited for
    loss: Loss | None = None  # with partial recovery
    throughput_before: float | None = None
    throughput_during: float | None = None
    settled: bool = False  # nothing changes any more

    @property
    def name(self) -> str:
        return "the coordinator" if self.role == "coordinator" else f"{self.role[0].upper()}{self.id}"

    @property
    def is_over(self) -> bool:
        return self.resumed_at is not None and self.recovered_at is not None

    @property
    def ratio(self) -> float | None:
        if self.throughput_before and self.throughput_during is not None:
            return self.throughput_during / self.throughput_before
        return None

    @property
    def rows_back(self) -> int:
        """Rows that are there again; once recovered, all."""
        return self.rows_total if self.recovered_at is not None else self.rows_counted

    def count(self, report: Recovery | Recovered) -> None:
        self.rows_total, self.rows_counted = report.rows_total, report.rows_back
        self.bytes, self.faults = report.bytes, report.faults

    def begin_anew(self) -> None:
        """Its successor came back in vain, because others died meanwhile."""
        self.replaced_at = self.resumed_at = None
        self.rows_total = self.rows_counted = self.bytes = self.faults = 0

    def since(self, time: float | None) -> float | None:
        return None if time is None else round(time - self.at, 4)

    def to_dict(self) -> dict[str, Any]:
        return {
            "role": self.role,
            "id": self.id,
            "incarnation": self.incarnation,
            "step": self.step,
            "reason": self.reason,
            "detected_s": self.since(self.detected_at),
            "replaced_s": self.since(self.replaced_at),
            "resumed_s": self.since(self.resumed_at),
            "recovered_s": self.since(self.recovered_at),
            "stall_s": round(self.stall_seconds, 4),
            "rows": self.rows_total,
            "bytes": self.bytes,
            "faults": self.faults,
            **self._describe_loss(),
            "throughput_before": round_known(self.throughput_before, 1),
            "throughput_during": round_known(self.throughput_during, 1),
            "ratio": round_known(self.ratio, 4),
        }

    def _describe_loss(self) -> dict[str, Any]:
        if self.loss is None:
            return {}
        lost = {"pls": self.loss.pls, "updates_lost": self.loss.updates, "samples_lost": self.loss.samples}
        known = self.recovered_at is not None and self.replaced_at is not None
        seconds = round((self.recovered_at or 0.0) - (self.replaced_at or 0.0), 4) if known else None
        return {**lost, "load_s": seconds}


class Failures:
    """All failures of a run, oldest first."""

    def __init__(self) -> None:
        self.all: list[Failure] = []
        self.history = History()
        self._reported_at: dict[int, float] = {}  # by worker
        self._through: set[int] = set()  # workers that train no more

    @property
    def open(self) -> list[Failure]:
        return [failure for failure in self.all if not failure.settled]

    def note_death(
        self, role: str, id: int, *, incarnation: int, step: int, reason: str, at: float, now: float
    ) -> Failure:
        for earlier in self.open:
            # Its successor died before it was through: what is missing now is the new one's to bring back.
            if (earlier.role, earlier.id) == (role, id):
                self._settle(earlier, now)
        failure = Failure(role=role, id=id, incarnation=incarnation, step=step, reason=reason, at=at, detected_at=now)
        failure.throughput_before = self.history.samples_per_s(at - BEFORE_SECONDS, at)
        self.all.append(failure)
        return failure

    def begin_anew(self, role: str, id: int) -> bool:
        """The successor that was coming back has to begin anew; False if none was."""
        for failure in self.open:
            if (failure.role, failure.id) == (role, id) and failure.recovered_at is None:
                failure.begin_anew()
                return True
        return False

    def receive(self, role: str, id: int, report: Report, now: float) -> None:
        """News of a process that may be a successor."""
        for failure in self.open:
            if (failure.role, failure.id) != (role, id):
                continue
            if isinstance(report, Listening | Planned | Ready) and failure.replaced_at is None:
                failure.replaced_at = now
            if isinstance(report, ServerCounters) and report.recovering is False:
                # It has nothing to bring back, or the news of its recovery has been lost with a coordinator.
                failure.recovered_at = failure.recovered_at or now
            if isinstance(report, Recovery | Recovered):
                failure.count(report)
            if isinstance(report, Recovered):
                failure.recovered_at = failure.recovered_at or now

    def note_loss(self, server: int, loss: Loss) -> None:
        """What was lost with a server, for the failure that its successor comes back from."""
        for failure in reversed(self.open):
            if (failure.role, failure.id) == ("server", server):
                if failure.loss is not None:  # it began anew, and went back to the same saves
                    loss = dataclasses.replace(
                        loss,
                        samples=loss.samples + failure.loss.samples,
                        updates=loss.updates + failure.loss.updates,
                        pls=None if loss.pls is None else loss.pls + (failure.loss.pls or 0.0),
                    )
                failure.loss = loss
                return

    def note_step(self, worker: int, samples: int | None, now: float) -> None:
        """A worker has made a step; `samples` is what all have trained, or None for one that trains no more."""
        if samples is not None:
            self.history.add(now, samples)
        (self._through.add if samples is None else self._through.discard)(worker)
        silent_since = self._reported_at.get(worker)
        self._reported_at[worker] = now
        for failure in self.open:
            own = failure.role == "worker"
            if failure.replaced_at is not None and failure.resumed_at is None and (not own or failure.id == worker):
                failure.resumed_at = now
                failure.recovered_at = failure.recovered_at if failure.role == "server" else now
            over_at = failure.recovered_at or now
            if silent_since is None or silent_since > over_at or (own and failure.id != worker):
                continue
            silence = now - max(silent_since, failure.at)
            in_time = failure.replaced_at is not None and silent_since < failure.replaced_at + RESUME_SECONDS
            if failure.resumed_at is not None and in_time and silence > max(failure.stall_seconds, SILENCE_SECONDS):
                # That step was made from rows pulled ahead; only then it missed the dead.
                failure.resumed_at = now
            failure.stall_seconds = max(failure.stall_seconds, silence)

    def tick(self, now: float) -> None:
        """Measures what can be measured by now."""
        for failure in self.open:
            if failure.is_over and now >= self._during_end(failure) and not self._has_silent(failure, now):
                self._settle(failure, now)

    def _has_silent(self, failure: Failure, now: float) -> bool:
        """Whether a worker that was there before has not been heard since all was back: its silence is the longest, and
        not over yet. One that is gone for good is not waited for."""
        since = failure.recovered_at or now
        if now - since > SILENT_SECONDS_MAX:
            return False
        return any(at < since for worker, at in self._reported_at.items() if worker not in self._through)

    def finish(self, now: float) -> None:
        for failure in self.open:
            self._settle(failure, now)

    def _settle(self, failure: Failure, now: float) -> None:
        failure.settled = True
        if failure.resumed_at is not None:
            end = self._during_end(failure) if failure.is_over else now
            failure.throughput_during = self.history.samples_per_s(failure.resumed_at, min(now, end))

    def _during_end(self, failure: Failure) -> float:
        assert failure.resumed_at is not None
        return max(failure.recovered_at or 0.0, failure.resumed_at + DURING_SECONDS_MIN)


class Standstill:
    """How long nothing was trained because all fell back to a checkpoint: to the first step after it, however many
    falls that took."""

    def __init__(self) -> None:
        self._since: float | None = None

    def begin(self, moved_at: float) -> None:
        self._since = moved_at if self._since is None else self._since

    def end(self, now: float, restores: list[dict[str, Any]]) -> None:
        if self._since is not None:
            for restore in restores:
                restore["stall_s"] = round(now - self._since, 4) if restore["stall_s"] is None else restore["stall_s"]
        self._since = None


def round_known(value: float | None, digits: int) -> float | None:
    return None if value is None else round(value, digits)
