"""All chance of a run: one tape of small numbers.

A run is a function of its tape. 0 is always the dullest choice (the oldest message, no fault), and a tape that has
come to its end goes on with zeros, so that shorter tapes with smaller numbers are simpler runs. Where it ends counts
too: from there on nothing fails any more, and whoever hangs goes on (`World.run`). So zeros at the end of a tape are
part of it. A seed is only a way to write a tape: what was drawn is recorded, and replaying the record gives the same
run.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Sequence

DIGITS = "0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"
FAULT = 64
_TOKEN = re.compile(r"_(\d+)_|\((\d+)\)|([0-9a-zA-Z])")


class Choices:
    """Reads the tape to its end; after that it draws from the seed's generator, if there is one."""

    def __init__(self, tape: Sequence[int] = (), *, seed: int | None = None) -> None:
        self.tape: list[int] = []  # what was chosen, all of it
        self._given = tape
        self._random = random.Random(f"tape {seed}") if seed is not None else None

    def pick(self, count: int, *, dull: float = 0.0) -> int:
        """A number below `count`; a generator takes 0 with probability `dull`, and all alike otherwise."""
        at = len(self.tape)
        if at < len(self._given):
            value = self._given[at] % count
        elif self._random is None or (dull and self._random.random() < dull):
            value = 0
        else:
            value = self._draw(count)
        self.tape.append(value)
        return value

    def _draw(self, count: int) -> int:
        """A number below `count`: what `randrange` gives, without its checks, in every version of Python."""
        assert self._random is not None
        bits = count.bit_length()
        value = self._random.getrandbits(bits)
        while value >= count:
            value = self._random.getrandbits(bits)
        return value

    def flag(self, probability: float) -> bool:
        """Usually no."""
        at = len(self.tape)
        if at < len(self._given):
            value = self._given[at] % 2
        else:
            value = int(self._random is not None and self._random.random() < probability)
        self.tape.append(value)
        return bool(value)

    def pick_event(self, count: int, *, eager: float, fault: Callable[[], float], fault_max: float) -> int:
        """The next event: its place in the queue, or `FAULT` and above for something that goes wrong.

        How likely that is now costs a look at everybody, so it is asked only where a number was drawn that would do.
        """
        given, chance = self._given, self._random
        if given and (at := len(self.tape)) < len(given):
            value = given[at]
            value = value if value >= FAULT else value % count
        elif chance is None:
            value = 0
        elif (drawn := chance.random()) < fault_max and drawn < _check_rate(fault(), fault_max):
            value = FAULT + self._draw(FAULT)
        else:
            value = 0 if chance.random() < eager else self._draw(min(count, FAULT))
        self.tape.append(value)
        return value

    @property
    def exhausted(self) -> bool:
        """Whether from here on everything is dull."""
        return self._random is None and len(self.tape) >= len(self._given)


def _check_rate(rate: float, rate_max: float) -> float:
    assert rate <= rate_max, f"faults at a rate of {rate}, at most {rate_max} were announced"
    return rate


def tape_text(tape: Sequence[int]) -> str:
    """A tape as one short word: a digit each, `(70)` for large numbers, `_9_` for nine zeros."""
    parts: list[str] = []
    zeros = 0
    for value in [*tape, -1]:
        if value == 0:
            zeros += 1
            continue
        if zeros:
            parts.append("0" * zeros if zeros < 4 else f"_{zeros}_")
            zeros = 0
        if value > 0:
            parts.append(DIGITS[value] if value < len(DIGITS) else f"({value})")
    return "".join(parts)


def tape_from_text(text: str) -> list[int]:
    """The inverse; raises ValueError for anything else."""
    tape: list[int] = []
    at = 0
    text = "".join(text.split())
    while at < len(text):
        found = _TOKEN.match(text, at)
        if found is None:
            raise ValueError(f"{text[at : at + 10]!r} is not part of a tape")
        zeros, large, digit = found.groups()
        if zeros is not None:
            tape += [0] * int(zeros)
        else:
            tape.append(int(large) if large is not None else DIGITS.index(digit))
        at = found.end()
    return tape
