"""Who has what, and which step is made again: the decisions of workers that keep dense parameters themselves
(`nn/ddp.py`).

A *circle* is one life of their exchange: an incarnation of every worker, and where it can be asked. A worker that died
has a successor, and the launcher (`launch/circles.py`) tells all of a new circle. Each enters it in the step that it is
in; what everybody shows then (`Shown`) decides, without a vote:

- somebody has the state behind this step: it is taken. No step is made twice, and none is made by only some.
- nobody has it, and all have entered: this step is made together, by all, and so are those that follow.
- else somebody is not there yet, and is asked again.

Why this is safe. Who has entered a circle finishes a step only with everybody in it, or by taking its outcome. So when
all have entered and nobody has the outcome of a step, nobody ever had it but those who died: it can be made again, from
the same state, with the same gradients, to the same bits.

How far apart can they be? A worker pulls the rows of a step only with the outcome of the step before, and servers
commit a step when all have pulled the next one. So others are at most two outcomes ahead of what a successor begins
from; `STATES_KEPT` of them are enough for it. Values in, values out; no socket, no clock.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import msgspec

# What a successor begins from, and the two outcomes that others may have since. Too few: a successor finds nothing. Too
# many: memory, as each is a copy of all dense parameters and of the optimizer's state.
STATES_KEPT = 3


class Shown(msgspec.Struct, frozen=True, kw_only=True):
    """What a worker lets others see: the states it has, by the step behind which they are, and the circle that it has
    entered last."""

    steps: tuple[int, ...] = ()
    circle: int = 0


@dataclass(frozen=True, slots=True)
class Adopt:
    """Take what this worker has."""

    worker: int


@dataclass(frozen=True, slots=True)
class Join:
    """Make this step with all others."""


@dataclass(frozen=True, slots=True)
class Keep:
    """What is here is what everybody has."""


@dataclass(frozen=True, slots=True)
class Await:
    """Ask again."""


@dataclass(frozen=True, slots=True)
class Lost:
    """Nobody has it any more."""


def choose_for_step(step: int, *, circle: int, others: Mapping[int, Shown | None]) -> tuple[Adopt | Join | Await, str]:
    """What to do for the outcome of a step, for who has entered this circle. None: it did not answer."""
    for worker, shown in sorted(others.items()):
        if shown is not None and step in shown.steps:
            return Adopt(worker), f"worker {worker} has made step {step}"
    absent = [worker for worker, shown in sorted(others.items()) if shown is None or shown.circle != circle]
    if absent:
        return Await(), f"workers {absent} have not come to circle {circle}"
    return Join(), f"nobody has made step {step}, and all are there"


def choose_beginning(
    step: int, *, worker: int, is_first: bool, has_own: bool, others: Mapping[int, Shown | None]
) -> tuple[Adopt | Keep | Await | Lost, str]:
    """Where a new worker has the state from that its first step begins with, the one behind `step`. `is_first`: nobody
    was in this place before. `has_own`: it could make it itself, because nothing was trained yet."""
    if is_first and has_own:  # all begin with what the first of them made
        if worker == 0:
            return Keep(), "worker 0 says what all begin with"
        others = {0: others[0]}
    for other, shown in sorted(others.items()):
        if shown is not None and step in shown.steps:
            return Adopt(other), f"worker {other} has the state behind step {step}"
    silent = [other for other, shown in sorted(others.items()) if shown is None]
    if silent:
        return Await(), f"workers {silent} have not answered"
    if has_own:
        return Keep(), "nothing is trained yet"
    return Lost(), f"no worker has the state behind step {step}"
