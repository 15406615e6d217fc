"""What saving and coming back cost, and what partial recovery loses: the formulas, and why they hold.

Two ways back after servers died. *Full*: everybody goes back to the last save, and what was trained since is trained
again. *Partial*: only the servers that died go back; all others train on, nothing is trained again, and what the dead
had learned since their last save is lost. CPR (MLSys '21) weighs the two. Let

    S, L, R   what one save, one load and one rescheduling take from training      (`Costs`)
    T         the time between two saves                                           (`interval_seconds`)
    F         the mean time between two failures                                   (`fail_seconds`)
    H         the time that the job would take if nothing were saved or lost       (`work_seconds`)
    N         servers / servers lost together: one failure hits 1/N of the model   (`parts`)

In a long time W there are W / T saves and W / F failures. One of them finds, on average, the last save T / 2 ago:

    (1) full:     O = W (S / T  +  (L + T/2 + R) / F)           least where T = sqrt(2 S F)
    (2) partial:  O = W (S / T  +  (L + R) / F)                 the less, the larger T is

Saves and failures happen during overheads as well, so W is not H but H + O. With c for the sum in brackets, O = c W and
W = H + O are two lines that meet once:

    W = H / (1 - c),  O = H c / (1 - c),  O / W = c

So c is the share of *all* time that is overhead, whatever its size. Where overheads are small, O / H is nearly the
same, and the published percentages may be read either way. O / H grows with c and only with it: the best T is the same
with and without this correction. Where c >= 1 the two lines do not meet: the job never ends.

(2) is exact for random failures. (1) says a little too much: it takes all time since the last save for work, though
saves and loads were part of it, and a second failure before the next save finds less to lose. Played through, the time
of a job is 0.0 % too long where overheads are 2 %, and 2.6 % where they are 30 %. For the same reason a job of which
(1) says that it never ends might end one day, after some lucky stretches.

What is lost is measured as PLS, the portion of lost samples. A failure at sample s, after a save at sample s', adds

    (3) PLS += (s - s') / (s_total N)

Failures come at any time alike (Poisson), so the expected PLS is their number W / F, times the mean age of the last
save over the job, A, in parts of W, times 1 / N:  A / (F N). The age is a sawtooth: it grows from 0 to T, m = floor(W /
T) times, and in the end to what is left, q = W - m T. The area under it over W gives

    (4) E[PLS] = A / (F N),   A = (m T**2 + q**2) / (2 W)

which is T / (2 F N), as published, where the last tooth is whole, and never more. A job that is shorter than T is one
unfinished tooth, A = W / 2: T = 2 PLS N F may be set, but that PLS will not come of it.

(3) counts what was lost before once more if the same server dies twice between two saves. The share of updates that are
really gone is smaller. A server dies at the rate 1 / (F N), and of a tooth it loses what came before its last death
there:

    (5) E[lost] = (m g(T) + g(q)) / W,   g(x) = x - F N (1 - exp(-x / (F N)))

For x much less than F N, g(x) is x**2 / (2 F N), and (5) is (4). It never exceeds 1, while (4) may.

Times are in seconds here; any other unit gives the same shares.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Costs:
    """What one of each takes from training. `save_takes_seconds`: how long a save is under way, which is longer where
    training goes on meanwhile; no interval is shorter than that. None: as long as it costs."""

    save_seconds: float
    load_seconds: float = 0.0
    reschedule_seconds: float = 0.0
    save_takes_seconds: float | None = None

    def __post_init__(self) -> None:
        assert min(self.save_seconds, self.load_seconds, self.reschedule_seconds) >= 0.0
        assert self.interval_seconds_min > 0.0, "a save that takes no time could be made all the time"

    @property
    def interval_seconds_min(self) -> float:
        """A save ends before the next one begins."""
        return max(self.save_seconds, self.save_takes_seconds or 0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Overhead:
    """Where the time goes, each as a share of all time: the summands of c."""

    save: float
    load: float
    lost_work: float
    reschedule: float

    @property
    def share(self) -> float:
        """c, of all time; from 1 on the job never ends."""
        return self.save + self.load + self.lost_work + self.reschedule

    @property
    def ends(self) -> bool:
        return self.share < 1.0

    def all_seconds(self, work_seconds: float) -> float:
        """W: how long a job takes that would take `work_seconds` without overheads."""
        return work_seconds / (1.0 - self.share) if self.ends else math.inf

    def overhead_seconds(self, work_seconds: float) -> float:
        """O: so much of it is overhead."""
        return self.share * self.all_seconds(work_seconds)

    def to_dict(self) -> dict[str, float]:
        return {**dataclasses.asdict(self), "share": self.share}


def overhead_full(interval_seconds: float, *, costs: Costs, fail_seconds: float) -> Overhead:
    """(1)"""
    partial = overhead_partial(interval_seconds, costs=costs, fail_seconds=fail_seconds)
    return dataclasses.replace(partial, lost_work=interval_seconds / 2.0 / fail_seconds)


def overhead_partial(interval_seconds: float, *, costs: Costs, fail_seconds: float) -> Overhead:
    """(2)"""
    assert interval_seconds > 0.0
    assert fail_seconds > 0.0
    return Overhead(
        save=costs.save_seconds / interval_seconds,
        load=costs.load_seconds / fail_seconds,
        lost_work=0.0,
        reschedule=costs.reschedule_seconds / fail_seconds,
    )


def interval_full(*, costs: Costs, fail_seconds: float) -> float:
    """The T of least (1) in which a save can end."""
    return max(math.sqrt(2.0 * costs.save_seconds * fail_seconds), costs.interval_seconds_min)


def interval_partial(target_pls: float, *, parts: float, fail_seconds: float) -> float:
    """The T that a PLS allows, (4) with whole teeth."""
    return 2.0 * target_pls * parts * fail_seconds


def count_pls(*, samples: float, samples_saved: float, samples_total: float, parts: float) -> float:
    """(3): what one failure adds."""
    assert samples_saved <= samples
    return (samples - samples_saved) / (samples_total * parts)


def expect_pls(interval_seconds: float, *, all_seconds: float, fail_seconds: float, parts: float) -> float:
    """(4): the PLS to expect of a job that takes `all_seconds`; infinity: it never ends."""
    if math.isinf(all_seconds):
        return interval_seconds / (2.0 * fail_seconds * parts)
    teeth, rest = _teeth(interval_seconds, all_seconds)
    return (teeth * interval_seconds**2 + rest**2) / (2.0 * all_seconds * fail_seconds * parts)


def expect_lost(interval_seconds: float, *, all_seconds: float, fail_seconds: float, parts: float) -> float:
    """(5): the share of all updates that will be gone."""
    server_seconds = fail_seconds * parts  # between two deaths of the same one

    def lose(x: float) -> float:
        return x + server_seconds * math.expm1(-x / server_seconds)

    if math.isinf(all_seconds):
        return lose(interval_seconds) / interval_seconds
    teeth, rest = _teeth(interval_seconds, all_seconds)
    return (teeth * lose(interval_seconds) + lose(rest)) / all_seconds


def _teeth(interval_seconds: float, all_seconds: float) -> tuple[int, float]:
    """How many whole ones, and how long the last, unfinished one is."""
    teeth, rest = divmod(all_seconds, interval_seconds)
    return int(teeth), rest
