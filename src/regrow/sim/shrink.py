"""Makes a failing tape simpler: shorter, and with smaller numbers, as long as the same invariant fails.

Chunks of the tape are deleted or set to zero, large chunks first; then single numbers are lowered. Any tape is a
valid run, so nothing has to be repaired. The result is no smallest tape, only one that no further step makes simpler,
or the best that was found when the time was up.
"""

from __future__ import annotations

import time
from collections.abc import Callable

SECONDS_MAX = 60.0


def shrink(tape: list[int], fails: Callable[[list[int]], bool], *, seconds_max: float = SECONDS_MAX) -> list[int]:
    """`fails` says whether a tape still shows the same failure; the given one does."""
    deadline = time.monotonic() + seconds_max
    best = tape

    def better(candidate: list[int]) -> bool:
        nonlocal best
        # With its zeros at the end faults have longer to show, without them it is shorter.
        for each in (strip(candidate), candidate):
            if cost(each) < cost(best) and fails(each):
                best = each
                return True
            if each == candidate:
                break
        return False

    better(best)
    before = None
    while before != cost(best) and time.monotonic() < deadline:
        before = cost(best)
        size = max(1, len(best) // 2)
        while size and time.monotonic() < deadline:
            at = 0
            while at < len(best) and time.monotonic() < deadline:
                if better(best[:at] + best[at + size :]):
                    continue  # the next chunk is now at the same place
                zeroed = best[:at] + [0] * size + best[at + size :]
                if any(best[at : at + size]):
                    better(zeroed)
                at += size
            size //= 2
        for at in range(len(best)):
            while at < len(best) and time.monotonic() < deadline:
                value = best[at]
                smaller = (best[:at] + [less] + best[at + 1 :] for less in (value // 2, value - 1) if 0 < less < value)
                if not any(map(better, smaller)):
                    break
    return best


def cost(tape: list[int]) -> tuple[int, int]:
    """What counts as simpler: fewer choices that are not dull, then a shorter tape with smaller numbers."""
    return sum(value != 0 for value in tape), len(tape) + sum(tape)


def strip(tape: list[int]) -> list[int]:
    """Without the zeros at the end. They are dull, but things may happen in them: another run, if a simpler one."""
    last = len(tape)
    while last and tape[last - 1] == 0:
        last -= 1
    return tape[:last]
