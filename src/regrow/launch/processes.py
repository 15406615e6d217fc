"""The processes of a run, seen from their parent: starting, hearing, telling, ending, reaping.

A child reads JSON lines from its stdin and writes JSON lines to its stdout; its stderr is a log file. The end
of its stdin means that the parent died, so a killed launcher leaves nothing running. Nothing here knows what
an event means. The rule to keep: every child that was started is reaped, whatever happened in between.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO

EVENT_BYTES_MAX = 1 << 20  # a longer line is not an event, and goes to the log cut short
READ_BYTES = 1 << 16
READS_PER_HEARING_MAX = 64  # so that a chatterbox cannot keep the launcher from everybody else
POLL_SECONDS = 0.1  # how late a death is noticed if the child's stdout outlives it
# A dying process closes its stdout a moment before it can be reaped: until then it is looked at this often, but
# not for longer than that, should it live on without a stdout.
DYING_POLL_SECONDS = 0.002
DYING_SECONDS_MAX = 1.0
GARBAGE_SHOWN_BYTES = 500


@dataclass(frozen=True, slots=True, kw_only=True)
class Exit:
    """How a process ended, and what it used. `code` is negative for a signal, as subprocess has it."""

    code: int
    cpu_seconds: float
    peak_rss_bytes: int

    def __str__(self) -> str:
        if self.code >= 0:
            return f"exited with code {self.code}"
        try:
            name = signal.Signals(-self.code).name
        except ValueError:
            name = f"signal {-self.code}"
        return f"was killed by {name}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Said:
    """A child wrote an event."""

    child: Child
    event: dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """A child is gone and reaped; everything it said came before this."""

    child: Child
    exit: Exit


class Child:
    """One process of the run. A spare has the role "standby" until it takes another's place."""

    def __init__(
        self,
        *,
        role: str,
        id: int,
        command: Sequence[str],
        env: Mapping[str, str],
        log: Path,
        log_file: BinaryIO,
        incarnation: int = 0,
    ) -> None:
        self.role = role
        self.id = id
        self.incarnation = incarnation
        self.log = log
        self.exit: Exit | None = None
        self.retired = False  # another is in its place: whatever it still says or does is of no interest
        self.paused = False  # by us
        self.doomed_at: float | None = None  # when we killed or paused it
        self.complaint: str | None = None  # why it gave up, in its own words
        self._closed_at: float | None = None
        self._pending = b""
        self._peak_rss_bytes: int | None = None
        with log_file:
            # A session of its own: Ctrl-C in the terminal reaches the launcher alone, which then stops the
            # children in order; and the whole group can be signalled, should the child have children.
            self._process = subprocess.Popen(
                list(command),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log_file,
                bufsize=0,
                env=dict(env),
                start_new_session=True,
            )
        assert self._process.stdout is not None
        self.stdout_fd = self._process.stdout.fileno()
        os.set_blocking(self.stdout_fd, False)

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def name(self) -> str:
        return self.role if self.role == "coordinator" else f"{self.role} {self.id}"

    def __repr__(self) -> str:
        return f"<{self.name} pid {self.pid} {self.exit or 'running'}>"

    def tell(self, message: Mapping[str, Any]) -> None:
        """Writes one line to the child. One that is gone does not hear it; `wait` reports its end."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(json.dumps(message).encode() + b"\n")

    def hear(self) -> tuple[list[dict[str, Any]], bool]:
        """The events that have arrived, and whether the child closed its stdout. Never blocks."""
        events: list[dict[str, Any]] = []
        for _ in range(READS_PER_HEARING_MAX):
            try:
                chunk = os.read(self.stdout_fd, READ_BYTES)
            except BlockingIOError:
                return events, False
            if not chunk:
                return events, True
            *lines, self._pending = (self._pending + chunk).split(b"\n")
            for line in lines:
                if (event := parse_event(line)) is not None:
                    events.append(event)
                    if event["event"] == "stopped":
                        self._peak_rss_bytes = event.get("peak_rss_bytes")
                elif line.strip():
                    self._note(line)
            if len(self._pending) > EVENT_BYTES_MAX:
                self._note(self._pending)
                self._pending = b""
        return events, False

    def reap(self) -> Exit | None:
        """The child's end, once there is one. Whatever it had started itself ends with it."""
        look = os.WEXITED | os.WNOHANG | os.WNOWAIT
        if self.exit is None and os.waitid(os.P_PID, self.pid, look) is not None:
            # Not reaped yet, so its group number cannot belong to anybody else.
            self.signal(signal.SIGKILL)
            _, status, usage = os.wait4(self.pid, 0)
            code = os.waitstatus_to_exitcode(status)
            self._process.returncode = code  # or Popen would wait for it again
            unit = 1 if sys.platform == "darwin" else 1024
            self.exit = Exit(
                code=code,
                cpu_seconds=usage.ru_utime + usage.ru_stime,
                # By its own account. Of one that was killed, no less than it had: the system counts from the memory
                # of this process on.
                peak_rss_bytes=self._peak_rss_bytes or usage.ru_maxrss * unit,
            )
        return self.exit

    def signal(self, number: int) -> None:
        """Signals the child and whatever it started."""
        if self.exit is None:
            # EPERM is how macOS says that only a zombie is left of the group.
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.pid, number)

    def closed(self, now: float) -> None:
        """Its stdout is at its end."""
        self._closed_at = now

    def is_dying(self, now: float) -> bool:
        return self._closed_at is not None and now - self._closed_at < DYING_SECONDS_MAX

    def close(self) -> None:
        """Closes our ends of the pipes; a child still running takes the end of its stdin as our death."""
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            pipe.close()

    def last_words(self) -> str | None:
        """The last line of its log that says something."""
        try:
            with self.log.open("rb") as log_file:
                log_file.seek(max(0, log_file.seek(0, os.SEEK_END) - READ_BYTES))
                lines = log_file.read().decode(errors="replace").split("\n")
        except OSError:
            return None
        return next((line.strip() for line in reversed(lines) if line.strip()), None)

    def _note(self, line: bytes) -> None:
        """A library printed something that is no event: it belongs in the log."""
        with contextlib.suppress(OSError), self.log.open("ab") as log_file:
            log_file.write(b"stdout: " + line[:GARBAGE_SHOWN_BYTES] + b"\n")


class Children:
    """All processes of a run, and one place to wait for any of them. Leaving the context kills the rest."""

    def __init__(self) -> None:
        self.all: list[Child] = []
        self._selector = selectors.DefaultSelector()
        self._wake_reader, self._wake_writer = os.pipe()
        for fd in (self._wake_reader, self._wake_writer):
            os.set_blocking(fd, False)
        self._selector.register(self._wake_reader, selectors.EVENT_READ, None)

    def __enter__(self) -> Children:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for child in self.running():
            child.signal(signal.SIGKILL)
        for child in self.all:
            while child.reap() is None:  # bounded: SIGKILL cannot be refused
                time.sleep(0.005)
            child.close()
        self._selector.close()
        # A signal may still call `wake`: its byte must not land in a file that got the same number.
        reader, self._wake_reader = self._wake_reader, -1
        writer, self._wake_writer = self._wake_writer, -1
        os.close(reader)
        os.close(writer)

    def start(self, **arguments: Any) -> Child:
        """Starts a child (arguments as for `Child`) and listens to it."""
        child = Child(**arguments)
        self.all.append(child)
        self._selector.register(child.stdout_fd, selectors.EVENT_READ, child)
        return child

    def running(self, role: str | None = None) -> list[Child]:
        return [child for child in self.all if child.exit is None and role in (None, child.role)]

    def wake(self) -> None:
        """Ends a `wait` early. Safe in a signal handler, at any time."""
        with contextlib.suppress(OSError):
            os.write(self._wake_writer, b"\0")

    def wait(self, seconds: float) -> list[Said | Ended]:
        """What happened next, at most `seconds` from now: possibly nothing."""
        news: list[Said | Ended] = []
        now = time.monotonic()
        poll = DYING_POLL_SECONDS if any(child.is_dying(now) for child in self.running()) else POLL_SECONDS
        for key, _ in self._selector.select(max(0.0, min(seconds, poll))):
            if key.data is None:
                with contextlib.suppress(BlockingIOError):
                    os.read(self._wake_reader, READ_BYTES)
            else:
                self._listen(key.data, news)
        ended = [child for child in self.running() if child.reap() is not None]
        if ended:
            # What anybody said before somebody went comes first: the story must be told in order.
            for child in [*self.running(), *ended]:
                self._listen(child, news)
        for child in ended:
            self._forget(child)
            assert child.exit is not None
            news.append(Ended(child=child, exit=child.exit))
        return news

    def end(
        self,
        children: Sequence[Child],
        *,
        asked_seconds: float,
        term_seconds: float,
        hurry: Callable[[], bool],
    ) -> list[Said | Ended]:
        """Asks these children to stop, then insists: SIGTERM, then SIGKILL. Returns when they are gone.

        `hurry` is asked all the time; once it says True nobody is waited for any more.
        """
        news: list[Said | Ended] = []
        waiting = [child for child in children if child.exit is None]
        for child in waiting:
            child.tell({"do": "stop"})
        for seconds, insist in ((asked_seconds, signal.SIGTERM), (term_seconds, signal.SIGKILL)):
            deadline = time.monotonic() + seconds
            while waiting and time.monotonic() < deadline and not hurry():
                news += self.wait(deadline - time.monotonic())
                waiting = [child for child in waiting if child.exit is None]
            for child in waiting:
                child.signal(signal.SIGKILL if hurry() else insist)
        while any(child.exit is None for child in waiting):  # bounded: SIGKILL cannot be refused
            news += self.wait(POLL_SECONDS)
        return news

    def _listen(self, child: Child, news: list[Said | Ended]) -> None:
        events, closed = child.hear()
        news.extend(Said(child=child, event=event) for event in events)
        if closed:
            child.closed(time.monotonic())
            self._forget(child)  # or the selector would report the end of the stream for ever

    def _forget(self, child: Child) -> None:
        with contextlib.suppress(KeyError):
            self._selector.unregister(child.stdout_fd)


def parse_event(line: bytes) -> dict[str, Any] | None:
    """One line of a child's stdout; None for anything that is not an event."""
    try:
        event = json.loads(line)
    except ValueError:
        return None
    if not isinstance(event, dict) or not isinstance(event.get("event"), str):
        return None
    return event
