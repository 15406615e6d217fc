"""Who is who: one process of a run, by role, number and incarnation.

A process that was restarted is somebody else: the next **incarnation** of its place. Everything that is fenced off is
fenced off by this.
"""

from __future__ import annotations

import msgspec

ROLES = ("coordinator", "server", "worker", "lead", "place")
# Nobody is told when these are restarted: whoever dials one takes a later incarnation as well.
FOUND_AGAIN = ("coordinator", "lead")


class Identity(msgspec.Struct, frozen=True, kw_only=True, order=True, cache_hash=True):
    """One process of a run."""

    role: str
    id: int
    incarnation: int = 0

    def __str__(self) -> str:
        return "C" if self.role == "coordinator" else f"{self.role[0].upper()}{self.id}"


COORDINATOR = Identity(role="coordinator", id=0)  # the first one; whoever dials it takes a later one as well
