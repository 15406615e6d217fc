"""Arithmetic of `regrow bench tiered`: what a cache of some size will miss, what a disk allows, what was written. Pure.

The sketch of a cache is Denning's working set: a row is in a cache of C rows if it was used within the last T batches,
where T is such that C distinct rows are used in T batches. So all sizes follow from one pass over a stream of batches.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

MEMORY_OVERHEAD_TARGET = 0.03  # rows on a device as fast as memory
DISK_OVERHEAD_TARGET = 0.08  # ... on a disk that can read twice as fast as is needed
DISK_SPARE = 2.0
BOUND_TARGET = 1.1  # ... on one that cannot: of the time that its reads take
SELF_TARGET = 0.8
WRITTEN_TARGET = 2.2
BESIDE_BYTES_PER_ROW, BESIDE_BYTES = 1.0, 64 << 20
EPOCH_SAMPLES = 45_840_617  # of the public data set that the model is made for


class Reuse:
    """How long ago the rows of batches were last used, in batches."""

    def __init__(self, batches: Iterable[NDArray[np.int64]], *, rows: int) -> None:
        """`batches`: the distinct rows of each. The first half only warms up."""
        last = np.full(rows, -1, np.int64)
        gaps: list[NDArray[np.int64]] = []
        for number, batch in enumerate(batches):
            before = last[batch]
            gaps.append(np.where(before < 0, np.iinfo(np.int64).max, number - before))
            last[batch] = number
        warm = len(gaps) // 2
        counted = np.concatenate(gaps[warm:])
        self.rows_per_batch = len(counted) / (len(gaps) - warm)
        windows = np.arange(max(1, warm))
        ages = np.sort(counted)
        later = len(ages) - np.searchsorted(ages, windows, side="right")
        self._misses = later / len(ages)  # by window
        self._sizes = np.concatenate([[0.0], np.cumsum(later / (len(gaps) - warm))])[: len(windows)]

    def miss_rate(self, cache_rows: float) -> float | None:
        """Of the rows of a batch, those not in a cache of so many; None: more than was looked at."""
        if cache_rows > self._sizes[-1]:
            return None
        return float(np.interp(cache_rows, self._sizes, self._misses))

    def cache_rows(self, miss_rate: float) -> int | None:
        """The cache that misses so many; None: less than was looked at."""
        if miss_rate < self._misses[-1]:
            return None
        return int(np.ceil(np.interp(-miss_rate, -self._misses, self._sizes)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What a run with rows on a device is held against: a figure, its target, and why that one."""

    figure: float
    target: float
    why: str
    reads_per_s_needed: float
    is_bound: bool


def judge_time(
    *, memory_rate: float, tiered_rate: float, reads_per_sample: float, device_reads_per_s: float, overhead_max: float
) -> Verdict:
    """More time per sample than with all rows in memory; where the device cannot read twice as fast as that needs,
    the time per sample over that of the reads alone."""
    needed = reads_per_sample * memory_rate
    if device_reads_per_s >= DISK_SPARE * needed:
        why = f"the device reads {device_reads_per_s / needed:.1f} times as fast as is needed" if needed else "no reads"
        return Verdict(
            figure=memory_rate / tiered_rate - 1.0,
            target=overhead_max,
            why=why,
            reads_per_s_needed=needed,
            is_bound=False,
        )
    bound = max(1.0 / memory_rate, reads_per_sample / device_reads_per_s)
    return Verdict(
        figure=1.0 / tiered_rate / bound,
        target=BOUND_TARGET,
        why=f"the device reads {device_reads_per_s / needed:.2f} times as fast as is needed: at best "
        f"{bound * 1e6:.1f} us a sample",
        reads_per_s_needed=needed,
        is_bound=True,
    )


def count_written(now: Mapping[str, float], before: Mapping[str, float], *, record_bytes: int) -> dict[str, float]:
    """Bytes written for each row that left the cache changed, by where they went, and over its record."""
    grown = {name: now[name] - before.get(name, 0.0) for name in now}
    rows = grown["rows_evicted_dirty"]
    if rows <= 0:
        raise ValueError("no row left the cache changed: nothing was written for any")
    log, home = grown["log_bytes_written"] / rows, grown["home_bytes_written"] / rows
    state = grown["state_bytes_written"] / rows
    return {
        "rows_evicted_dirty": rows,
        "log_bytes": log,
        "home_bytes": home,
        "state_bytes": state,
        "home_rows": grown["home_rows_written"] / rows,
        "home_bytes_per_home_row": grown["home_bytes_written"] / max(1.0, grown["home_rows_written"]),
        "ratio": (log + home + state) / record_bytes,
    }


def count_beside(
    *, tiered_rss_bytes: int, cache_bytes: int, memory_rss_bytes: int, memory_row_bytes: int, rows: int
) -> dict[str, float]:
    """Memory of a server beside its cache, less what a server has beside its rows when they are all in memory."""
    plain = memory_rss_bytes - memory_row_bytes
    beside = max(0, tiered_rss_bytes - cache_bytes - plain)
    allowed = BESIDE_BYTES_PER_ROW * rows + BESIDE_BYTES
    return {"bytes": beside, "allowed_bytes": allowed, "ratio": beside / allowed}


def price(*, servers: int, rss_bytes: int, file_bytes: float, samples_per_s: float) -> dict[str, float]:
    """What has to be paid for: memory and disk of all servers, and how long an epoch takes."""
    return {
        "memory_gb": servers * rss_bytes / 1e9,
        "disk_gb": file_bytes / 1e9,
        "epoch_hours": EPOCH_SAMPLES / samples_per_s / 3600.0,
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class Look:
    """Counters of all servers at a time."""

    at: float
    tiers: dict[str, float]

    @property
    def rows_asked(self) -> float:
        """For pulls and for pushes, dense parameters among them."""
        return self.tiers["hits"] + self.tiers["misses"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Course:
    """Misses of a run as time goes on. Servers report now and then, and workers at other times; so only counters of
    servers are divided by each other, and how many rows of batches and samples they stand for is known of the whole."""

    looks: Sequence[Look]
    rows_per_asked: float  # rows of tables in batches, for each row asked for
    samples_per_asked: float

    @classmethod
    def of(cls, looks: Sequence[Look], *, rows: int, samples: int) -> Course:
        """`rows`, `samples`: of all batches until the last look."""
        asked = looks[-1].rows_asked if looks else 0.0
        if not asked:
            return cls(looks=(), rows_per_asked=0.0, samples_per_asked=0.0)
        return cls(looks=looks, rows_per_asked=rows / asked, samples_per_asked=samples / asked)

    def between(self, begin: float, end: float) -> dict[str, float]:
        """From the last look before one time to the last before the other; nothing, if that is no time at all."""
        first = max((look for look in self.looks if look.at <= begin), key=lambda look: look.at, default=None)
        last = max((look for look in self.looks if look.at <= end), key=lambda look: look.at, default=None)
        return {} if first is None or last is None else self._rates(first, last)

    def by_time(self, bins: int) -> list[tuple[float, float]]:
        """(seconds since the first look, misses per row of a batch) in so many spans."""
        if len(self.looks) < 2:
            return []
        edges = np.linspace(0, len(self.looks) - 1, min(bins, len(self.looks) - 1) + 1).astype(int)
        spans = [(self.looks[one], self.looks[other]) for one, other in itertools.pairwise(edges)]
        return [
            ((first.at + last.at) / 2 - self.looks[0].at, rates["miss_rate"])
            for first, last in spans
            if (rates := self._rates(first, last))
        ]

    def _rates(self, first: Look, last: Look) -> dict[str, float]:
        asked = last.rows_asked - first.rows_asked
        if asked <= 0:
            return {}
        grown = {name: last.tiers[name] - first.tiers[name] for name in last.tiers}
        rows, samples = asked * self.rows_per_asked, asked * self.samples_per_asked
        return {
            "miss_rate": grown["misses"] / rows,
            "disk_rate": (grown["log_rows_read"] + grown["home_rows_read"]) / rows,
            "reads_per_sample": grown["reads"] / samples,
            "rows_per_sample": rows / samples,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Spent:
    """What a run had made and taken by one moment, all together."""

    at: float
    samples: int
    seconds: Mapping[str, float]  # of the processors, by role
    tiers: Mapping[str, float]  # what servers have counted


# Of servers, for each sample.
WRITTEN = ("log_bytes_written", "home_bytes_written", "rows_flushed", "rows_evicted_dirty")


def share_out(spent: Sequence[Spent], begin: float, end: float) -> dict[str, dict[str, float]]:
    """Processor time of each role, and what was written, for each sample between two times; nothing, if that is less
    than two looks."""
    within = [each for each in spent if begin <= each.at <= end]
    if len(within) < 2 or within[-1].samples <= within[0].samples:
        return {}
    first, last = within[0], within[-1]
    samples = last.samples - first.samples
    seconds = {
        role: (last.seconds[role] - first.seconds[role]) / samples for role in last.seconds if role in first.seconds
    }
    written = {name: (last.tiers[name] - first.tiers[name]) / samples for name in WRITTEN if name in first.tiers}
    return {"seconds_per_sample": seconds, "written_per_sample": written}


def average(found: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """By name."""
    return {name: statistics.fmean(each[name] for each in found) for name in found[0]}


def mean_of_pairs(values: Sequence[float]) -> dict[str, float]:
    """The mean, and how far it may be off: twice its standard error, on either side."""
    mean = statistics.fmean(values)
    error = statistics.stdev(values) / len(values) ** 0.5 if len(values) > 1 else float("inf")
    return {"value": mean, "low": mean - 2.0 * error, "high": mean + 2.0 * error}
