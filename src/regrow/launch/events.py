"""What a supervisor hears, and what it orders: values, each of which says what happened or what is to be done.

Who is in office and who follows is in `launch/supervisor.py`; whoever carries orders out is in `launch/crew.py`.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

from regrow.core.identity import Identity
from regrow.launch.backend import Exit
from regrow.launch.orders import Command
from regrow.launch.reports import Error


class Stance(enum.Enum):
    """What a death means; see above."""

    STRICT = "strict"
    LOADING = "loading"
    REPLACING = "replacing"
    STOPPING = "stopping"


# -- events ------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Appoint:
    """This place is to be filled, for the first time."""

    role: str
    id: int
    now: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Inherit:
    """These were in office, dead or alive, and these spares there, when the launcher before this one died."""

    office: tuple[Identity, ...]
    spares: tuple[Identity, ...]
    now: float


@dataclass(frozen=True, slots=True, kw_only=True)
class TakeStance:
    """From now on a death means this."""

    stance: Stance


@dataclass(frozen=True, slots=True, kw_only=True)
class KeepSpares:
    """So many spares are wanted from now on: as many as servers may die together, and so many for workers."""

    count: int
    now: float
    workers: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessEnded:
    """A process is gone."""

    who: Identity
    exit: Exit
    now: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessMissed:
    """The coordinator has not heard of `who` for too long, and counts it as dead."""

    who: Identity
    reason: str
    now: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessCondemned:
    """The coordinator will wait no longer for `who`, although rows are lost without it."""

    who: Identity
    reason: str
    now: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessAnswered:
    """To `Ask`."""

    who: Identity
    now: float
    busy_seconds: float | None = None
    longest_seconds: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessDelayed:
    """There is no room to start it yet, so nobody expects an answer."""

    who: Identity


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessBegun:
    """... and now it is started."""

    who: Identity
    now: float


@dataclass(frozen=True, slots=True, kw_only=True)
class CoordinatorListens:
    """Others can connect to it, there."""

    who: Identity
    address: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessReady:
    """A server has its rows in memory."""

    who: Identity


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessFailed:
    """A process says why it gives up; its end comes after this."""

    who: Identity
    words: Error


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessFenced:
    """A process found that another has its place; its end comes after this."""

    who: Identity


@dataclass(frozen=True, slots=True, kw_only=True)
class Harm:
    """On purpose: the process in this place is killed, or paused for so long. For ever (`math.inf`): it hangs, and is
    ended like any other that does."""

    role: str
    id: int
    now: float
    pause_seconds: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Tick:
    """Time has passed. `busy`: some server is on its way back."""

    now: float
    busy: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Release:
    """The run ends: zombies go, and who was only paused can hear again."""


# -- orders ------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """A new process, as `who`."""

    who: Identity


@dataclass(frozen=True, slots=True, kw_only=True)
class Promote:
    """This spare becomes `who`."""

    spare: Identity
    who: Identity


@dataclass(frozen=True, slots=True, kw_only=True)
class Tell:
    """A word to a process."""

    who: Identity
    command: Command


@dataclass(frozen=True, slots=True, kw_only=True)
class Kill:
    """End this process now."""

    who: Identity
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Pause:
    """Stop this process, for a while."""

    who: Identity


@dataclass(frozen=True, slots=True, kw_only=True)
class Resume:
    """... and let it go on."""

    who: Identity


@dataclass(frozen=True, slots=True, kw_only=True)
class NoteEnd:
    """For the books: nobody is in this place now."""

    who: Identity


@dataclass(frozen=True, slots=True, kw_only=True)
class NoteSuccessor:
    """For the books: `heir` follows `who`, which died at `died_at`, or counts as dead while it may be alive."""

    who: Identity
    heir: Identity
    reason: str
    died_at: float
    counts_as_dead: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Accuse:
    """This process is a cause of the run's end, or a victim: by its own words, by its end, or because it was given up
    (`refusal`)."""

    who: Identity
    exit: Exit | None = None
    words: Error | None = None
    refusal: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class GiveUp:
    """The run ends: `who` is taken for dead too often."""

    who: Identity
    reason: str
