"""The launcher, as a role sees it; what it is told when it asks; and two things that a process can say of itself.

Roles own no file descriptors and know no pipes: whoever starts them (`launch/child.py`) hands them a `Parent`. Another
way to start processes has another one.
"""

from __future__ import annotations

import contextlib
import ctypes
import re
import resource
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Protocol

from regrow.core.identity import Identity
from regrow.launch.orders import AnyCommand, Assignment, CircleIs
from regrow.launch.reports import Report

PR_SET_NAME = 15


class Pulse:
    """How long the thread that does the work of this process has been at one piece of it. That thread writes it, the
    one that answers the launcher reads it. One that waits for other processes rests: that is their fault, if any."""

    def __init__(self) -> None:
        self.longest_seconds = 0.0
        self._since: float | None = None

    def beat(self) -> None:
        """The next piece of work begins here."""
        self._end_piece()
        self._since = time.monotonic()

    def _end_piece(self) -> None:
        if self._since is not None:
            self.longest_seconds = max(self.longest_seconds, time.monotonic() - self._since)
            self._since = None

    def begin(self) -> None:
        """What came before says nothing about how long the pieces from here on take."""
        self._since, self.longest_seconds = time.monotonic(), 0.0

    @contextlib.contextmanager
    def rest(self) -> Iterator[None]:
        """While others are waited for."""
        self._end_piece()
        try:
            yield
        finally:
            self.beat()

    @property
    def busy_seconds(self) -> float | None:
        since = self._since
        return None if since is None else time.monotonic() - since


class Parent(Protocol):
    """What a role may say to the launcher, and hear from it. A launcher that is gone ends the process: nobody who
    calls these has to think of that. `Ask` is answered in here, from the pulse, and never reaches a role; nor does
    `CoordinatorAt`, which is for those who follow."""

    @property
    def pulse(self) -> Pulse:
        """Of this process."""

    @property
    def assignment(self) -> Assignment:
        """Who this process is and what it needs; another one after `become`."""

    @property
    def circle(self) -> CircleIs | None:
        """The newest that this worker has heard of."""

    def become(self, assignment: Assignment) -> None:
        """A spare takes a place: its process has another name from here on, and so has its log."""

    def report(self, report: Report) -> None:
        """Tells the launcher. From any thread; in the order of the calls of a thread."""

    def next_command(self) -> AnyCommand:
        """Waits for the next command: for a process whose main thread has nothing else to do."""

    def follow_coordinator(self, callback: Callable[[Identity, str], object]) -> None:
        """Calls back with a coordinator and its address: at once, and from another thread whenever a successor is
        somewhere else. Any before the one that is named is over."""

    def on_command(self, callback: Callable[[AnyCommand], object]) -> None:
        """Calls back from another thread instead, also for commands that came before: for a process that runs an
        event loop."""


def name_process(who: Identity) -> None:
    """What `ps` and `pgrep` show: "rg server 2". Linux only; elsewhere all processes have the interpreter's name."""
    if sys.platform.startswith("linux"):
        name = f"rg {who.role}" if who.role == "coordinator" else f"rg {who.role} {who.id}"
        ctypes.CDLL(None).prctl(PR_SET_NAME, name.encode()[:15], 0, 0, 0)


def peak_rss_bytes() -> int:
    """The most memory this process had. Where /proc does not tell, no less than that: what getrusage says begins with
    the memory of the process that started this one."""
    with contextlib.suppress(OSError):
        found = re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
        if found is not None:
            return int(found[1]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
