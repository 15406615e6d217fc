"""When changes leave for the holders of parities: not what leaves, nor where it goes (`flusher.py`).

The longer they wait, the more often a row that changes again and again travels only once. What must not happen
meanwhile is that a worker stands still: it keeps its pushes until they are durable, at most `FlushSpec.redo_bytes` of
them, and then waits. So a flush leaves before half of that has come from one worker; the other half is for what it
pushes until the acknowledgements are there. And when pushes stop, the last ones leave at once, as somebody may wait for
exactly those. "Stopped" is a matter of pace: what was said to be idle after a fixed time flushed every push by itself
on machines that are slow, or busy.
"""

from __future__ import annotations

from collections.abc import Callable

from regrow.core.protection import FlushSpec

# A flush leaves when no push has come for so long. Too short: slow pushes are flushed one by one. Too long: whoever
# waits for the last push to be durable waits that long.
IDLE_SECONDS = 0.3
# ... and for so many times the longest gap between two pushes as of late, as the next one may be late. Both as above.
IDLE_GAPS = 2
# A gap that is longer is a pause, and teaches nothing. Too short: as above. Too long: the last push before a pause, and
# each of somebody who pushes by hand, waits for two of these.
GAP_SECONDS_MAX = 2.0
# Of the longest gap so much is remembered at the next one: workers often push together, and then none for long. Too
# small: the short gaps hide the long ones. Too large: a single slow step is remembered for too long.
GAP_KEPT = 0.75


class FlushPace:
    """Counts what was pushed since the last flush, and says when the next one is due."""

    def __init__(self, spec: FlushSpec, *, marks: int, servers: int) -> None:
        self._spec = spec
        self._servers = servers
        self._pushes = 0  # since the last flush,
        self._push_bytes = [0] * marks  # and their bytes by worker, at this server
        self._pushes_ever = 0
        self._since: float | None = None  # when a tick first found something unflushed
        self._pushes_seen = 0  # by the last tick, of all,
        self._pushed_at: float | None = None  # and when that number changed
        self._gap_seconds = 0.0

    def count(self, mark: int, push_bytes: int, pending_bytes: Callable[[], int]) -> bool:
        """A push was applied: is a flush due?"""
        self._pushes += 1
        self._pushes_ever += 1
        self._push_bytes[mark] += push_bytes
        # A worker's pushes go to all servers, about as much to each.
        kept_bytes = self._push_bytes[mark] * self._servers
        spec = self._spec
        return self._pushes >= spec.pushes or 2 * kept_bytes >= spec.redo_bytes or pending_bytes() >= spec.bytes

    def begin_anew(self) -> None:
        """A flush has left."""
        self._pushes = 0
        self._push_bytes = [0] * len(self._push_bytes)
        self._since = None

    def tick(self, now: float, *, unflushed: bool) -> bool:
        """Whether what there is has waited long enough, or nothing more seems to come."""
        if self._pushes_seen != self._pushes_ever:
            if self._pushed_at is not None:
                gap = (now - self._pushed_at) / (self._pushes_ever - self._pushes_seen)
                self._gap_seconds = max(gap if gap <= GAP_SECONDS_MAX else 0.0, GAP_KEPT * self._gap_seconds)
            self._pushes_seen, self._pushed_at = self._pushes_ever, now
        if not unflushed:
            self._since = None
            return False
        if self._since is None:
            self._since = now
        quiet_seconds = now - max(self._since, self._pushed_at or self._since)
        idle = quiet_seconds >= max(IDLE_SECONDS, IDLE_GAPS * self._gap_seconds)
        return idle or now - self._since >= self._spec.seconds
