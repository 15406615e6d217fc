"""Throughput of a run as its workers report it: what a failure did to it is read off here."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np

from regrow.bench import common, train
from regrow.errors import RegrowError
from regrow.launch.failures import Failure
from regrow.launch.status import RunStatus


class Trace(train.Recorder):
    """A display that shows nothing and keeps every report of every worker, on the launcher's clock.

    Samples count when their step ends. So a stall shows as a step that took long: a low place, not a hole.
    """

    def __init__(self, *, warmup_seconds: float = 0.0) -> None:
        super().__init__(warmup_seconds=warmup_seconds)
        self.status: RunStatus | None = None
        # Per worker: (when, seconds in all that it waited for rows) of every report.
        self.waits: dict[int, list[tuple[float, float]]] = {}
        # (when, processor time of all workers): the same work per sample, whatever happens to servers. So it tells how
        # fast the processors were just then.
        self.work: list[tuple[float, float]] = []

    def update(self, status: RunStatus, now: float) -> None:
        self.status = status
        # Before the base class, which looks at the last report only.
        for index, worker in enumerate(status.workers):
            seen = self.reports.setdefault(index, [])
            last = seen[-1][0] if seen else -1.0
            seen += [report for report in worker.reports if report[0] > last]
            waits = self.waits.setdefault(index, [])
            waits += [wait for wait in worker.waits if wait[0] > last]
        super().update(status, now)
        if status.phase == "training" and (cpu := train.children_cpu_seconds("rg worker")) is not None:
            self.work.append((now, cpu))

    def work_per_sample(self, begin: float, end: float) -> float | None:
        """Processor seconds of the workers for each sample between two times."""
        looks = [look for look in self.work if begin <= look[0] <= end]
        if len(looks) < 2:
            return None
        (first_at, first), (last_at, last) = looks[0], looks[-1]
        return (last - first) / (last_at - first_at) / self.rate(first_at, last_at)

    def speed_spread(self, seconds: float) -> float | None:
        """Most / least work per sample in spans of this length: how even the machine itself is."""
        starts = np.arange(self.begin, self.end - seconds, seconds)
        found = [work for at in starts if (work := self.work_per_sample(at, at + seconds)) is not None]
        return round(max(found) / min(found), 3) if found else None

    def longest_silence(self, begin: float, end: float) -> float:
        """The longest time between two reports of a worker, of those that began before `end`; what lies before `begin`
        is not counted."""
        gaps = [pair for seen in self._points() for pair in itertools.pairwise(at for at, _ in seen)]
        return max((after - max(at, begin) for at, after in gaps if after > begin and at < end), default=0.0)

    def longest_wait(self, begin: float, end: float) -> float:
        """The longest that a worker stood still for rows in one step, of steps that ended between two times."""
        pairs = [pair for waits in self.waits.values() for pair in itertools.pairwise(waits)]
        return max((after - before for (_, before), (at, after) in pairs if begin < at <= end), default=0.0)

    @property
    def begin(self) -> float:
        """From here on every worker is known to train."""
        return max(self._points(), key=lambda seen: seen[0][0])[0][0]

    @property
    def end(self) -> float:
        return min(self._points(), key=lambda seen: seen[-1][0])[-1][0]

    def _points(self) -> list[list[tuple[float, int]]]:
        """The reports of each worker but for its last: that one waited for pushes to be durable, not for training."""
        if not self.reports or any(len(seen) < 3 for seen in self.reports.values()):
            raise RegrowError("the run was too short to have a throughput: workers need time for reports")
        return [seen[:-1] for seen in self.reports.values()]

    def rate(self, begin: float, end: float) -> float:
        """Samples per second of all workers between two times, as far as training was under way then."""
        begin, end = max(begin, self.begin), min(end, self.end)
        if end <= begin:
            raise RegrowError(f"no training between {begin:.2f} and {end:.2f}")
        return float(sum(samples_between(seen, begin, end) for seen in self._points())) / (end - begin)

    def rate_whole(self) -> float:
        return self.rate(self.begin, self.end)

    def steady(self) -> dict[str, Any]:
        """Samples per second and processor time from the end of the warm-up until the first worker is through."""
        begin, end = self.begin + self.warmup_seconds, self.end
        if end - begin < self.warmup_seconds / 2:
            begin = (self.begin + end) / 2  # faster than thought: better half of it than nothing
        total = self.rate(begin, end)
        found: dict[str, Any] = {"samples_per_second": total, "seconds": end - begin}
        work = self.work_per_sample(begin, end)
        if work is not None:
            found["worker_seconds_per_sample"] = work
        looks = [look for at, look in self.usage if begin <= at <= end]
        if len(looks) > 1:
            before, after = looks[0], looks[-1]
            cores = (after.own_seconds - before.own_seconds) / (after.at - before.at)
            found["cpu_seconds_per_1000_samples"] = cores * 1000 / total
            found["others_cores"] = common.round_known(before.others_cores(after), 2)
        return found

    def first(self, samples: int) -> dict[str, Any]:
        """The same of the first so many samples of all workers together: memory is touched for the first time then."""
        seen = self._points()
        times = np.array(sorted({at for points in seen for at, _ in points if at >= self.begin}))
        done = np.sum(
            [np.interp(times, [at for at, _ in points], [count for _, count in points]) for points in seen], axis=0
        )
        if done[-1] - done[0] < samples:
            return {}
        end = float(np.interp(done[0] + samples, done, times))
        found = {"first_samples_per_second": self.rate(self.begin, end)}
        work = self.work_per_sample(self.begin, end)
        return found if work is None else {**found, "first_worker_seconds_per_sample": work}

    def failure(self) -> Failure:
        if self.status is None or not self.status.failures.all:
            raise RegrowError("a server should have been killed and was not: the run was too short")
        return self.status.failures.all[0]

    def others(self) -> dict[str, Any]:
        """Who else used the machine meanwhile."""
        looks = [look for _, look in self.usage]
        return {"others_cores": common.round_known(looks[0].others_cores(looks[-1]), 2)} if len(looks) > 1 else {}

    def to_row(
        self, name: str, *, zero_at: float, marks: dict[str, float], bin_seconds: float = 0.25
    ) -> dict[str, Any]:
        """For plots: samples per second in bins, with time counted from `zero_at`."""
        edges = np.arange(self.begin, self.end, bin_seconds)
        rates = [self.rate(at, at + bin_seconds) for at in edges[:-1]]
        return {
            "kind": "trace",
            "name": name,
            "t": [round(float(at) + bin_seconds / 2 - zero_at, 3) for at in edges[:-1]],
            "samples_per_second": [round(rate, 1) for rate in rates],
            "marks": marks,
        }


def samples_between(seen: Sequence[tuple[float, int]], begin: float, end: float) -> float:
    """Samples of one worker between two times, evenly spread between its reports."""
    times, samples = zip(*seen, strict=True)
    at_begin, at_end = np.interp([begin, end], times, samples)
    return float(at_end - at_begin)
