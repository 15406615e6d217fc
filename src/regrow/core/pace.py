"""How fast lost rows come back: as fast as costs the least training in all, and not so slowly that a second loss comes
first.

Theory of operation. Bringing rows back takes processors and links from training. Let a recovery at rate x lose the
share l(x) of training as long as it lasts; of B bytes that is B * l(x) / x in all. Where every core is busy, l grows
with x and has a part that does not (pulls that wait for rows): then the fastest recovery loses least. Where cores are
idle, l is next to nothing until they are used up: then that is the rate to take. So what decides is the **loss per
byte**, l / x, and it is measured: every server sees how many pushes come before and during a recovery, and how many
bytes it sends.

It begins without a limit. If that costs nothing worth mentioning, it stays. Else a quarter of that rate is tried, then
no limit again, and if the quarter lost far less per byte than either, it is taken: so nobody is without protection for
more than four times as long as need be. A trial takes time, in which little comes back: where all is back in some
windows more, none is made. With a share given (`--recovery-cost 0.1`) the rate is the one at which
training loses that much. Either way the **floor** holds: all rows that this server brings back are back within
`recovery_seconds_max`; if another loss would not be one too many, within several times that.

Every server decides for itself, from what it sees: nobody has to be asked, and no message is about it. The decision is
a pure function (`choose_pace`) that returns its reason, which is what the display shows.
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

from regrow.core.protection import FlushSpec

# What is seen in so long, and in as long as so many pushes took before, decides. Too little: chance does. Too much: a
# recovery is over before anything is known.
WINDOW_SECONDS = 0.5
WINDOW_PUSHES = 20
BEFORE_WINDOWS = 8  # training's own pace is the mean of so many windows before
# Less than this share of training lost is nothing: pushes do not come more evenly than that.
NOISE_SHARE = 0.03
BETTER_SHARE = 0.5  # a lower rate is taken if it loses less than this part per byte
STALL_SECONDS = 1.0  # after a loss, in which everybody waits for the first rows, whatever the rate
TRIALS_MAX = 32  # Too few: what was tried is forgotten, and tried again and again. Too many: times that have changed.
SAFE_FACTOR = 4.0  # if one more may be lost, the floor is so much lower
STEP_DOWN = 0.25  # of the rate, to be tried. Too little: nothing shows. Too much: time is lost in trying.
# So many windows must be left, at the rate of now, for a trial. Too few: it costs more than it brings (a gigabyte took
# 10 s instead of 7.6 s, and a third more of training was lost). Too many: idle cores stay unknown.
TRIAL_WINDOWS_MIN = 20


class Pace(NamedTuple):
    """Bytes per second of this server in the background (0: no limit), and why."""

    bytes_per_s: float
    reason: str


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """What one window showed: the rate that was allowed (0: any), what was sent, and the share of training lost."""

    allowed: float
    bytes_per_s: float
    lost: float

    @property
    def lost_per_byte(self) -> float:
        return self.lost / self.bytes_per_s


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """What a server knows when it decides."""

    pushes_per_s: float | None  # before the loss; None: nobody trained
    trials: tuple[Trial, ...]  # since
    bytes_total: int  # that this server brings back,
    bytes_left: int  # and of these, those that are still to come
    window_seconds: float  # what a trial takes
    margin: int  # servers that may be lost besides
    sharers: int = 1  # servers that bring rows back to one


def choose_pace(spec: FlushSpec, seen: Seen) -> Pace:
    """The rate of the next window."""
    if spec.sweep_bytes_per_s:
        return Pace(spec.sweep_bytes_per_s / seen.sharers, "as --sweep-bytes-per-s says")
    if seen.pushes_per_s is None:
        return Pace(0.0, "as fast as it can: nobody trains")
    trials = [trial for trial in seen.trials if trial.bytes_per_s > 0]
    if not trials:
        return Pace(0.0, "as fast as it can, to see what that costs")
    seconds = spec.recovery_seconds_max * (SAFE_FACTOR if seen.margin else 1.0)
    floor = seen.bytes_total / seconds
    wanted = _choose_share(spec.recovery_cost, trials[-1]) if spec.recovery_cost else _choose_least(trials, seen)
    if 0 < wanted.bytes_per_s < floor:
        risk = "another loss would be one too many" if not seen.margin else f"{seen.margin} more may be lost"
        return Pace(floor, f"all within {seconds:.0f} s: {risk}")
    return wanted


def _choose_share(share: float, last: Trial) -> Pace:
    if last.lost <= share and not last.allowed:
        return Pace(0.0, f"as fast as it can: training loses {last.lost:.0%} of at most {share:.0%}")
    # What is lost goes with the rate, nearly; far leaps are taken in several.
    factor = min(2.0, max(STEP_DOWN, share / max(last.lost, NOISE_SHARE)))
    return Pace(last.bytes_per_s * factor, f"training loses {last.lost:.0%}, and may lose {share:.0%}")


def _choose_least(trials: list[Trial], seen: Seen) -> Pace:
    """No limit, then a quarter of that, then no limit again: training gets better by itself as rows come back, and so
    whatever is tried last looks best."""
    free = [trial for trial in trials if not trial.allowed]
    limited = [trial for trial in trials if trial.allowed]
    if not free:
        return Pace(0.0, "as fast as it can, to see what that costs by now")
    if not limited:
        if free[-1].lost <= NOISE_SHARE:
            return Pace(0.0, "as fast as it can: training loses next to nothing")
        if seen.bytes_left < TRIAL_WINDOWS_MIN * seen.window_seconds * free[-1].bytes_per_s:
            return Pace(0.0, f"as fast as it can: training loses {free[-1].lost:.0%}, and all is back soon")
        return Pace(free[-1].bytes_per_s * STEP_DOWN, f"training loses {free[-1].lost:.0%}: a quarter is tried")
    if all(trial.allowed for trial in trials[trials.index(limited[0]) :]):
        return Pace(0.0, f"as fast as it can, to compare: a quarter of the rate lost {limited[0].lost:.0%} of training")
    least = min(trial.lost_per_byte for trial in free)
    if max(trial.lost_per_byte for trial in limited) < BETTER_SHARE * least:
        return Pace(limited[-1].allowed, f"{limited[-1].lost:.0%} of training is lost: far less in all")
    return Pace(0.0, f"as fast as it can: {free[-1].lost:.0%} of training is lost, more slowly it is more in all")


class PaceKeeper:
    """Watches the pushes of one server, window by window, and says at which rate it brings rows back."""

    def __init__(self, spec: FlushSpec, *, sharers: int) -> None:
        self.pace = Pace(spec.sweep_bytes_per_s / sharers, "")
        self._spec, self._sharers = spec, sharers
        self._lost_at = 0.0  # when somebody was lost
        self.text = ""  # the last pace of a recovery, and why, as people read it
        self._windows: list[float] = []  # pushes per second, while nothing was lost
        self._trials: list[Trial] = []
        self._began: tuple[float, int, int] | None = None  # of this window: time, pushes, bytes
        self._bytes_before = 0  # sent when this recovery began
        self._was_recovering = False

    def look(self, now: float, *, pushes: int, bytes_sent: int, bytes_total: int, margin: int | None) -> bool:
        """`margin`: servers that may be lost besides; None: nobody comes back. Returns whether the pace is another."""
        if (margin is not None) != self._was_recovering:
            self._was_recovering = margin is not None
            self._trials, self._began, self._lost_at, self._bytes_before = [], None, now, bytes_sent
            return self._decide(bytes_total, bytes_total, margin)
        if self._began is None:
            self._began = (now, pushes, bytes_sent)
            return False
        began, pushes_before, bytes_before = self._began
        seconds = now - began
        before = self._find_before()
        if seconds < (WINDOW_SECONDS if margin is None else self._find_window()):
            return False
        self._began = (now, pushes, bytes_sent)
        pushes_per_s = (pushes - pushes_before) / seconds
        if margin is None:
            self._windows = [*self._windows, pushes_per_s][-BEFORE_WINDOWS:]
            return False
        if before is not None and began >= self._lost_at + STALL_SECONDS:
            lost = min(1.0, max(0.0, 1.0 - pushes_per_s / before))
            trial = Trial(allowed=self.pace.bytes_per_s, bytes_per_s=(bytes_sent - bytes_before) / seconds, lost=lost)
            self._trials = [*self._trials, trial][-TRIALS_MAX:]
        return self._decide(bytes_total, max(0, bytes_total - (bytes_sent - self._bytes_before)), margin)

    def _find_window(self) -> float:
        """Seconds in which enough is seen to decide, while rows come back."""
        before = self._find_before()
        return max(WINDOW_SECONDS, WINDOW_PUSHES / before if before else 0.0)

    def _find_before(self) -> float | None:
        trained = [pushes_per_s for pushes_per_s in self._windows if pushes_per_s > 0]
        return sum(trained) / len(trained) if trained else None

    def _decide(self, bytes_total: int, bytes_left: int, margin: int | None) -> bool:
        before = self.pace
        if margin is None:
            self.pace = Pace(self._spec.sweep_bytes_per_s / self._sharers, "")
        else:
            seen = Seen(
                pushes_per_s=self._find_before(),
                trials=tuple(self._trials),
                bytes_total=bytes_total,
                bytes_left=bytes_left,
                window_seconds=self._find_window(),
                margin=margin,
                sharers=self._sharers,
            )
            self.pace = choose_pace(self._spec, seen)
            rate = f"{self.pace.bytes_per_s / 1e6:.1f} MB/s" if self.pace.bytes_per_s else "no limit"
            self.text = f"{rate}: {self.pace.reason}"
        return self.pace != before
