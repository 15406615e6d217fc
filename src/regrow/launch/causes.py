"""Who is to blame: when several processes fail within a moment, one is the cause and the others its victims.

Kept apart because it is a decision: it looks at what is known and says a name and a message.
"""

from __future__ import annotations

import signal
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from regrow.errors import ChildFailed
from regrow.launch.processes import Child, Exit

# From the cause to its echoes. Nobody is killed by a signal, or goes without a word, because of another; a
# process that complains may only be missing another one, and can say so.
KILLED, SPEECHLESS, COMPLAINS, MISSES_ANOTHER = range(4)


@dataclass(frozen=True, slots=True, kw_only=True)
class Suspect:
    """A child that failed, in its own words or by its end."""

    child: Child
    rank: int
    message: str
    hint: str | None
    damage: bool = False  # it could not load a checkpoint

    @classmethod
    def from_exit(cls, child: Child, exit: Exit, *, step: int, stopping: bool) -> Suspect:
        how = f"{exit} at step {step}"
        if stopping:
            ours = exit.code in (-signal.SIGTERM, -signal.SIGKILL)
            how = "did not stop when asked and was killed" if ours else f"{exit} while stopping"
        words = child.last_words()
        hint = f"its last words: {words}" if words else None
        if exit.code == -signal.SIGKILL and not stopping:
            hint = "if nobody killed it, the kernel did because memory ran out: `dmesg` says so"
        rank = KILLED if exit.code < 0 else SPEECHLESS
        return cls(child=child, rank=rank, message=f"{child.name} {how}; its log: {child.log}", hint=hint)

    @classmethod
    def from_error(cls, child: Child, event: dict[str, Any]) -> Suspect:
        """kind "user", "checkpoint": all is said. "bug": the log says more. "lost": it misses another process."""
        kind = event.get("kind")
        rank = MISSES_ANOTHER if kind == "lost" else COMPLAINS
        hint = event.get("hint")
        if kind not in ("user", "checkpoint") and hint is None:
            hint = f"its log: {child.log}"
        return cls(
            child=child,
            rank=rank,
            message=f"{child.name}: {event.get('message', 'unknown error')}",
            hint=hint,
            damage=kind == "checkpoint",
        )

    def error(self) -> ChildFailed:
        child = self.child
        return ChildFailed(self.message, hint=self.hint, role=child.role, child_id=child.id, log=str(child.log))


def verdict(suspects: Sequence[Suspect]) -> Suspect:
    """The lowest rank is the cause; among equals, the one heard first."""
    return min(suspects, key=lambda suspect: suspect.rank)
