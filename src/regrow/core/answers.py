"""Who of the other servers owes this one an answer, and for how long it has given none.

Flushes, streams, restored rows, questions for rows: each is answered by whoever got it, as soon as it is read. A server
that answers others, and beats, but not this one, cannot be reached from here, or cannot reach this one; neither notices
that by itself. So it is told to the coordinator, which hears both.

The rules to keep: any answer starts the time anew, so one that is merely slow is never named; only time in which this
server ran is counted, so its own stops, and clocks that jump, are nobody's silence. That the other one may have been
stopped meanwhile is known to the coordinator alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from regrow.core.identity import Identity
from regrow.core.messages import Unanswered

LOOK_SECONDS = 1.0  # between two looks
LOOK_SECONDS_MAX = 2.0  # More than this between two looks was a stop of this server itself, and does not count.
WORTH_SECONDS = 2.0  # Less than this is not told.


class Answers:
    """Counts answers, and now and then looks who owes one."""

    def __init__(self) -> None:
        self.longest: Unanswered | None = None  # whom this server has waited for longest, if that is worth a word
        self._counts: dict[int, int] = {}  # of each server, so far
        self._owing: dict[int, tuple[Identity, int, float]] = {}  # at the last look: who, its count, and for how long
        self._looked_at: float | None = None

    def count(self, server: int) -> None:
        """It has answered something."""
        self._counts[server] = self._counts.get(server, 0) + 1

    def is_due(self, now: float) -> bool:
        """Whether it is time for the next look."""
        return self._looked_at is None or now >= self._looked_at + LOOK_SECONDS

    def look(self, now: float, owing: Iterable[int], peers: Mapping[int, Identity]) -> None:
        """`owing` are the servers that owe an answer now."""
        since, self._looked_at = self._looked_at, now
        passed = min(now - since, LOOK_SECONDS_MAX) if since is not None else 0.0
        before, self._owing, self.longest = self._owing, {}, None
        seconds_max = WORTH_SECONDS
        for server in owing:
            peer, count = peers[server], self._counts.get(server, 0)
            known = before.get(server)
            waits_on = known is not None and known[:2] == (peer, count)
            seconds = known[2] + passed if known is not None and waits_on else 0.0
            self._owing[server] = peer, count, seconds
            if seconds >= seconds_max:
                seconds_max = seconds
                self.longest = Unanswered(server=server, incarnation=peer.incarnation, seconds=int(seconds))
