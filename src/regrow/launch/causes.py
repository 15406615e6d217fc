"""Who is to blame: when several processes fail within a moment, one is the cause and the others its victims.

Kept apart because it is a decision: it looks at what is known and says a name and a message.
"""

from __future__ import annotations

import signal
from collections.abc import Sequence
from dataclasses import dataclass

from regrow.core.identity import Identity
from regrow.errors import ChildFailed
from regrow.launch.backend import Exit, Handle, name_of
from regrow.launch.events import Accuse
from regrow.launch.reports import Error

# From the cause to its echoes. Nobody is killed by a signal, or goes without a word, because of another; a
# process that complains may only be missing another one, and can say so.
KILLED, SPEECHLESS, COMPLAINS, MISSES_ANOTHER = range(4)

DAMAGED_HINT = (
    "nobody can go on with these files; --resume URL of an ordinary checkpoint (full, delta), if there is one, with "
    "--overwrite or another --store-dir"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Suspect:
    """A process that failed, in its own words or by its end."""

    who: Identity
    log: str
    rank: int
    message: str
    hint: str | None
    damage: bool = False  # it could not load a checkpoint
    rows_damaged: bool = False  # rows in its own files are not what was written

    @classmethod
    def from_order(cls, handle: Handle, order: Accuse, *, step: int, stopping: bool) -> Suspect:
        if order.words is not None:
            return cls.from_error(handle, order.words)
        assert order.exit is not None
        return cls.from_exit(handle, order.exit, step=step, stopping=stopping, refusal=order.refusal)

    @classmethod
    def from_exit(cls, handle: Handle, exit: Exit, *, step: int, stopping: bool, refusal: str | None = None) -> Suspect:
        """`refusal`: why it has no successor, where others have."""
        how = f"{exit} at step {step}"
        if stopping:
            ours = exit.code in (-signal.SIGTERM, -signal.SIGKILL)
            how = "did not stop when asked and was killed" if ours else f"{exit} while stopping"
        words = handle.read_last_words()
        hint = f"its last words: {words}" if words else None
        if exit.code == -signal.SIGKILL and not stopping and not exit.cause:
            hint = "if nobody killed it, the kernel did because memory ran out: `dmesg` says so"
        what = f"{name_of(handle.who)} {how}" if refusal is None else f"{refusal}; the last time it {exit}"
        return cls(
            who=handle.who,
            log=handle.log,
            rank=KILLED if exit.code < 0 else SPEECHLESS,
            message=f"{what}; its log: {handle.log}",
            hint=hint,
        )

    @classmethod
    def from_error(cls, handle: Handle, words: Error) -> Suspect:
        hint = words.hint
        if words.kind == "damaged" and hint is None:
            hint = f"{DAMAGED_HINT}; its log: {handle.log}"
        if words.kind not in ("user", "checkpoint") and hint is None:
            hint = f"its log: {handle.log}"
        ranks = {"lost": MISSES_ANOTHER, "silent": KILLED}  # whose disk does not answer is as good as dead
        return cls(
            who=handle.who,
            log=handle.log,
            rank=ranks.get(words.kind, COMPLAINS),
            message=f"{name_of(handle.who)}: {words.message}",
            hint=hint,
            damage=words.kind == "checkpoint",
            rows_damaged=words.kind == "damaged",
        )

    def error(self) -> ChildFailed:
        return ChildFailed(self.message, hint=self.hint, role=self.who.role, child_id=self.who.id, log=self.log)


def find_cause(suspects: Sequence[Suspect]) -> Suspect:
    """The lowest rank is the cause; among equals, the one heard first."""
    return min(suspects, key=lambda suspect: suspect.rank)
