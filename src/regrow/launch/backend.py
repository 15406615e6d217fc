"""What a launcher needs of whatever runs its processes: start one, tell it something, hear all of them, end them.

    launcher -> Backend.start(assignment) -> Handle        Handle.tell / terminate / kill / pause / resume
    launcher <- Backend.wait(seconds)     <- Said, Ended   what was said (typed), who ended and how

Processes of this machine behind pipes (`launch/processes.py`) are the first form. A new one touches:

    its own file            a `Backend` and its `Handle`, and whatever carries the lines of `launch/lines.py`
    a main of its own       if processes are not started as `python -m regrow.launch.child`: it hands `run_role` (in
                            `launch/child.py`) another `Parent`
    its option              where `launch/local.py` or `launch/cluster.py` make their backend: one line

and nothing else: who is in office and who succeeds whom (`launch/supervisor.py`), what is said (`launch/lines.py`) and
the roles stay as they are. `tests/unit/launch/test_backend.py` says what a backend must do, and a second one in it
shows that this list is complete.

The rules to keep: everything that a process said is heard before its end; every process that was started ends with its
backend, whatever happened in between; and when the launcher dies, all of its processes do.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from regrow.core.identity import Identity
from regrow.launch.orders import Assignment, Command, Stop
from regrow.launch.reports import AnyReport, Malformed

WAIT_SECONDS = 0.1
# From SIGKILL to the end of a process. One that the system does not let go (uninterruptible sleep) ends some day, when
# its disk answers; nobody waits for that.
KILL_SECONDS_MAX = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Exit:
    """How a process ended, and what it used. `code` is negative for a signal, as subprocess has it. `cause`: what
    happened to it, where it did not end by itself: "was lost with its node"."""

    code: int
    cause: str = ""
    cpu_seconds: float = 0.0
    peak_rss_bytes: int = 0

    def __str__(self) -> str:
        if self.cause:
            return self.cause
        if self.code >= 0:
            return f"exited with code {self.code}"
        try:
            name = signal.Signals(-self.code).name
        except ValueError:
            name = f"signal {-self.code}"
        return f"was killed by {name}"


class Handle(Protocol):
    """One process, seen from its launcher. None of the methods blocks; for one that is gone they do nothing."""

    who: Identity  # whose place it has. The launcher changes it when a spare takes another's place.
    exit: Exit | None  # once it is gone; set before `wait` returns its `Ended`

    @property
    def pid(self) -> int:
        """A number for the user's eyes, where there is one; else 0."""

    @property
    def log(self) -> str:
        """Where its log is, in words that help a user to find it."""

    def tell(self, command: Command) -> None:
        """In order. One that is gone does not hear it; `wait` tells of its end."""

    def terminate(self) -> None:
        """Asks the system to end it; it may take its time."""

    def kill(self) -> None:
        """Ends it now, and whatever it has started. It cannot refuse, not even while it is paused."""

    def pause(self) -> None:
        """It does nothing, and says nothing, until `resume`."""

    def resume(self) -> None:
        """What was told to it meanwhile is not lost."""

    def read_last_words(self) -> str | None:
        """The last line of its log that says something."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Said:
    """A process reported something; or tried to."""

    handle: Handle
    report: AnyReport | Malformed


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """A process is gone; everything it said came before this."""

    handle: Handle
    exit: Exit


@dataclass(frozen=True, slots=True, kw_only=True)
class Delayed:
    """A process cannot be started yet, for want of what `reason` says; told again and again until it is. It was told
    what to do, and will hear it."""

    handle: Handle
    reason: str
    is_new: bool  # or this was told before


@dataclass(frozen=True, slots=True, kw_only=True)
class Begun:
    """... and now it is started."""

    handle: Handle


@dataclass(frozen=True, slots=True, kw_only=True)
class Noted:
    """Something that the user should know, about no process in particular."""

    text: str


News = Said | Ended | Delayed | Begun | Noted


class Backend(Protocol):
    """Starts processes and hears all of them. Of one thread, but for `wake`."""

    @property
    def handles(self) -> Sequence[Handle]:
        """All that were ever started, in that order."""

    def choose_address(self, who: Identity, *, before: str | None) -> str:
        """Where this process shall listen, or at which of its host's addresses (`runtime/hosts.py`). `before` is where
        the coordinator does, or did, once that is known. Its successor may be elsewhere: all others are told."""

    def start(self, assignment: Assignment) -> Handle:
        """Starts a process and tells it its assignment, without waiting for it. Raises OSError where that fails."""

    def wait(self, seconds: float) -> list[News]:
        """What happened next, in order, at most `seconds` from now: possibly nothing. An end is told within a few
        milliseconds."""

    def wake(self) -> None:
        """Ends a `wait` early. Safe in a signal handler, in any thread, at any time."""

    def close(self) -> None:
        """Kills whatever still runs; all handles have their `exit` when this returns, but for those that the system
        does not let go within `KILL_SECONDS_MAX`. May be called again."""


def name_of(who: Identity) -> str:
    """In messages to the user: "server 2"; of coordinators there is one."""
    return who.role if who.role == "coordinator" else f"{who.role} {who.id}"


def list_running(backend: Backend, role: str | None = None) -> list[Handle]:
    return [handle for handle in backend.handles if handle.exit is None and role in (None, handle.who.role)]


def end(
    backend: Backend,
    handles: Sequence[Handle],
    *,
    asked_seconds: float,
    term_seconds: float,
    hurry: Callable[[], bool],
) -> list[News]:
    """Asks these processes to stop, then insists: terminate, then kill. Returns when they are gone, or cannot be ended.

    `hurry` is asked all the time; once it says True nobody is waited for any more.
    """
    news: list[News] = []
    waiting = [handle for handle in handles if handle.exit is None]
    for handle in waiting:
        handle.tell(Stop())
    for seconds, is_last in ((asked_seconds, False), (term_seconds, True)):
        deadline = time.monotonic() + seconds
        while waiting and time.monotonic() < deadline and not hurry():
            news += backend.wait(deadline - time.monotonic())
            waiting = [handle for handle in waiting if handle.exit is None]
        for handle in waiting:
            handle.kill() if is_last or hurry() else handle.terminate()
    deadline = time.monotonic() + KILL_SECONDS_MAX
    while any(handle.exit is None for handle in waiting) and time.monotonic() < deadline:
        news += backend.wait(WAIT_SECONDS)
    return news
