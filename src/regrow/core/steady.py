"""A machine's own time, which never goes back, whatever the clock does that its ticks are read from.

Every deadline in the core is `now` plus something, or `now` minus when it began. Were `now` to fall by an hour, all of
them would wait for an hour: no beats, no flush, a silent server that nobody minds. Drivers give monotonic time; that
the core stays right without it costs these few lines. A clock that leaps ahead only ends waits early: whoever must not
take that for somebody's silence says so (`coordinator.OWN_PAUSE_SECONDS`).
"""

from __future__ import annotations


class SteadyTime:
    """`steady.read(now)`: the same as the clock as long as that goes forward."""

    def __init__(self) -> None:
        self._last: float | None = None
        self._behind = 0.0  # how far the clock has ever gone back, in all

    def read(self, now: float) -> float:
        if self._last is not None and now < self._last:
            self._behind += self._last - now
        self._last = now
        return now + self._behind
