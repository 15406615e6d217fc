"""What a decision is made from, where it was measured: what saves and loads took, and how often servers fail.

Costs are smoothed as `checkpoint/policy.py` does it: a new figure moves the old one by SMOOTHING of the difference. A
choice is made again only when something it was made from has changed by more than CHANGE: saves are never equally
fast, and an interval that is another one each time is none.

How often servers fail is what the user says, else what `--mtbf` does, else an estimate. Take failures for Poisson with
a rate that nobody knows, and give the rate a Gamma distribution, as if one failure had been seen in
FIRST_GUESS_SECONDS. After n failures in a time t it is Gamma again, of 1 + n failures in FIRST_GUESS_SECONDS + t, and
the mean of the rate is

    1 / F = (1 + n) / (FIRST_GUESS_SECONDS + t)

The guess weighs as much as one failure: it decides the first hours, and nothing after a dozen failures.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from regrow.planner.overhead import Costs
from regrow.units import brief_text

FIRST_GUESS_SECONDS = (
    14 * 3600.0
)  # the short end of what is published, 14 to 30 h: saves too often rather than too rarely
SMOOTHING = 0.3  # weight of a new measurement; too large: one odd save changes the interval
CHANGE = 0.2  # Too small: another interval after every save. Too large: an interval for costs that are long gone.


@dataclass(frozen=True, slots=True, kw_only=True)
class FailTime:
    """The mean time between two failures, and where it comes from."""

    seconds: float
    reason: str


def choose_fail_time(
    *,
    expected_seconds: float | None = None,
    mtbf_seconds: float | None = None,
    failures: int = 0,
    elapsed_seconds: float = 0.0,
) -> FailTime:
    """What is expected, else what is done on purpose, else an estimate from what happened."""
    if expected_seconds is not None:
        return FailTime(seconds=expected_seconds, reason="as --expect-mtbf says")
    if mtbf_seconds is not None:
        return FailTime(seconds=mtbf_seconds, reason="as --mtbf does")
    seconds = (FIRST_GUESS_SECONDS + elapsed_seconds) / (1 + failures)
    if not failures and not elapsed_seconds:
        return FailTime(seconds=seconds, reason="a first guess")
    guess = f"a first guess of {brief_text(FIRST_GUESS_SECONDS)}"
    return FailTime(seconds=seconds, reason=f"from {failures} in {brief_text(elapsed_seconds)} and {guess}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """What a run has shown so far; None: not known yet."""

    save_seconds: float | None = None
    load_seconds: float | None = None
    reschedule_seconds: float | None = None
    save_takes_seconds: float | None = None

    def mix_in(self, **new: float | None) -> Measured:
        """These figures with new ones mixed in; None changes nothing."""
        mixed = {}
        for name, value in new.items():
            old = getattr(self, name)
            if value is not None:
                mixed[name] = value if old is None else old + SMOOTHING * (value - old)
        return dataclasses.replace(self, **mixed)

    def fill(self, guess: Costs) -> Costs:
        """What was measured; a guess for the rest."""
        figures = dataclasses.asdict(self)
        return dataclasses.replace(guess, **{name: value for name, value in figures.items() if value is not None})


WORDS = {
    "save_seconds": "a save costs",
    "load_seconds": "a load costs",
    "reschedule_seconds": "rescheduling costs",
    "save_takes_seconds": "a save takes",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Basis:
    """What a choice was made from. Ask it whether the choice still stands:

    if why := basis.find_change(now):
        basis, plan = now, decide(...)
    """

    costs: Costs
    fail_seconds: float

    def find_change(self, now: Basis) -> str | None:
        """Why to choose again; None: nothing has changed by more than CHANGE."""
        pairs = [(words, getattr(self.costs, name), getattr(now.costs, name)) for name, words in WORDS.items()]
        pairs.append(("a failure comes every", self.fail_seconds, now.fail_seconds))
        for words, old, new in pairs:
            old, new = old or 0.0, new or 0.0
            if abs(new - old) > CHANGE * old:
                return f"{words} {brief_text(new)} now, not {brief_text(old)}"
        return None
