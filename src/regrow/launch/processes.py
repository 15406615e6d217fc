"""The first backend: processes of this machine, behind pipes.

A child reads JSON lines from its stdin and writes JSON lines to its stdout; its stderr is a log file. The end
of its stdin means that the parent died, so a killed launcher leaves nothing running. Nothing here knows what
a report means. The rule to keep: every child that was started is reaped, whatever happened in between.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import BinaryIO

from regrow.core.identity import Identity
from regrow.launch.backend import KILL_SECONDS_MAX, Ended, Exit, News, Said
from regrow.launch.lines import encode
from regrow.launch.orders import Assignment, Command
from regrow.launch.reading import ReportReader
from regrow.launch.reports import AnyReport, Malformed
from regrow.launch.rundir import Logs
from regrow.runtime.sockets import prepare_sockets

# -P: a file named like a module in the user's directory must not replace it.
CHILD_COMMAND = (sys.executable, "-P", "-m", "regrow.launch.child")
READ_BYTES = 1 << 16
READS_PER_HEARING_MAX = 64  # so that a chatterbox cannot keep the launcher from everybody else
POLL_SECONDS = 0.1  # how late a death is noticed if the child's stdout outlives it
# A dying process closes its stdout a moment before it can be reaped: until then it is looked at this often, but
# not for longer than that, should it live on without a stdout.
DYING_POLL_SECONDS = 0.002
DYING_SECONDS_MAX = 1.0
REAP_SECONDS = 0.005  # between two looks at those that were killed
GARBAGE_SHOWN_BYTES = 500
ANY_PORT = "tcp:127.0.0.1:0"


class Child:
    """One process; a `Handle`."""

    def __init__(
        self, *, who: Identity, command: Sequence[str], env: Mapping[str, str], log: Path, log_file: BinaryIO
    ) -> None:
        self.who = who
        self.exit: Exit | None = None
        self.closed_at: float | None = None  # when its stdout came to its end
        self._log = log
        self._reader = ReportReader(self._note_garbage)
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
    def log(self) -> str:
        return str(self._log)

    def __repr__(self) -> str:
        return f"<{self.who} pid {self.pid} {self.exit or 'running'}>"

    def tell(self, command: Command | Assignment) -> None:
        assert self._process.stdin is not None
        if self._process.stdin.closed:
            return  # it has ended
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(encode(command) + b"\n")

    def terminate(self) -> None:
        self._signal(signal.SIGTERM)

    def kill(self) -> None:
        self._signal(signal.SIGKILL)

    def pause(self) -> None:
        self._signal(signal.SIGSTOP)

    def resume(self) -> None:
        self._signal(signal.SIGCONT)

    def read_last_words(self) -> str | None:
        try:
            with self._log.open("rb") as log_file:
                log_file.seek(max(0, log_file.seek(0, os.SEEK_END) - READ_BYTES))
                lines = log_file.read().decode(errors="replace").split("\n")
        except OSError:
            return None
        return next((line.strip() for line in reversed(lines) if line.strip()), None)

    # -- for the backend ---------------------------------------------------------------------------------------

    def hear(self) -> tuple[list[AnyReport | Malformed], bool]:
        """The reports that have arrived, and whether the child closed its stdout. Never blocks."""
        reports: list[AnyReport | Malformed] = []
        for _ in range(READS_PER_HEARING_MAX):
            try:
                chunk = os.read(self.stdout_fd, READ_BYTES)
            except BlockingIOError:
                return reports, False
            if not chunk:
                return reports, True
            reports += self._reader.feed(chunk)
        return reports, False

    def reap(self) -> Exit | None:
        """The child's end, once there is one. Whatever it had started itself ends with it."""
        look = os.WEXITED | os.WNOHANG | os.WNOWAIT
        if self.exit is None and os.waitid(os.P_PID, self.pid, look) is not None:
            # Not reaped yet, so its group number cannot belong to anybody else.
            self.kill()
            _, status, usage = os.wait4(self.pid, 0)
            code = os.waitstatus_to_exitcode(status)
            self._process.returncode = code  # or Popen would wait for it again
            unit = 1 if sys.platform == "darwin" else 1024
            self.exit = Exit(
                code=code,
                cpu_seconds=usage.ru_utime + usage.ru_stime,
                # By its own account. Of one that was killed, no less than it had: the system counts from the memory
                # of this process on.
                peak_rss_bytes=self._reader.peak_rss_bytes or usage.ru_maxrss * unit,
            )
        return self.exit

    def is_dying(self, now: float) -> bool:
        return self.closed_at is not None and now - self.closed_at < DYING_SECONDS_MAX

    def close(self) -> None:
        """Closes our ends of the pipes; a child still running takes the end of its stdin as our death."""
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            pipe.close()

    def _signal(self, number: int) -> None:
        """To the child and whatever it started."""
        if self.exit is None:
            # EPERM is how macOS says that only a zombie is left of the group.
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.pid, number)

    def _note_garbage(self, line: bytes) -> None:
        """A library printed something that is no report: it belongs in the log."""
        with contextlib.suppress(OSError), self._log.open("ab") as log_file:
            log_file.write(b"stdout: " + line[:GARBAGE_SHOWN_BYTES] + b"\n")


class LocalProcesses:
    """All processes of a run, and one place to wait for any of them; a `Backend`."""

    def __init__(self, *, logs: Logs, command: Sequence[str] = CHILD_COMMAND) -> None:
        self.handles: list[Child] = []
        self._logs = logs
        self._command = tuple(command)
        self._sockets: Path | None = None
        self._selector = selectors.DefaultSelector()
        self._wake_reader, self._wake_writer = os.pipe()
        for fd in (self._wake_reader, self._wake_writer):
            os.set_blocking(fd, False)
        self._selector.register(self._wake_reader, selectors.EVENT_READ, None)

    def use_sockets(self, directory: Path | None) -> None:
        """Where processes started from now on listen; None: at ports."""
        self._sockets = directory

    def choose_address(self, who: Identity, *, before: str | None) -> str:
        is_heir = who.role == "coordinator" and before is not None
        if self._sockets is None:
            return before if is_heir and before is not None else ANY_PORT
        # A socket file outlives its process: a coordinator's would keep its successor from listening there, and all of
        # them together would become many. Where it cannot be removed, no other can be made either.
        if who.incarnation:
            before_it = Identity(role=who.role, id=who.id, incarnation=who.incarnation - 1)
            with contextlib.suppress(OSError):
                (self._sockets / socket_name(before_it)).unlink(missing_ok=True)
        problem = prepare_sockets(self._sockets)
        if problem is not None:
            text = f"cannot make sockets in {self._sockets}: {problem}; training goes on, new servers listen at ports"
            self._logs.complain_once("sockets", text)
            if not is_heir:  # everybody knows its address, and looks nowhere else
                return ANY_PORT
        return f"unix:{self._sockets / socket_name(who)}"

    def prefer(self, heir: Identity, spares: Sequence[Identity]) -> Identity | None:
        """On one machine all are the same."""
        return spares[0]

    def start(self, assignment: Assignment) -> Child:
        who = assignment.identity
        child = Child(
            who=who,
            command=self._command,
            env=child_env(who.role, assignment.threads),
            log=self._logs.log(who.role, who.id, who.incarnation),
            log_file=self._logs.open_log(who.role, who.id, who.incarnation),
        )
        self.handles.append(child)
        self._selector.register(child.stdout_fd, selectors.EVENT_READ, child)
        # The token goes through the pipe alone: arguments and environments can be read by others.
        child.tell(assignment)
        return child

    def wake(self) -> None:
        with contextlib.suppress(OSError):
            os.write(self._wake_writer, b"\0")

    def wait(self, seconds: float) -> list[News]:
        news: list[News] = []
        now = time.monotonic()
        poll = DYING_POLL_SECONDS if any(child.is_dying(now) for child in self._list_running()) else POLL_SECONDS
        for key, _ in self._selector.select(max(0.0, min(seconds, poll))):
            if key.data is None:
                with contextlib.suppress(BlockingIOError):
                    os.read(self._wake_reader, READ_BYTES)
            else:
                self._listen(key.data, news)
        ended = [child for child in self._list_running() if child.reap() is not None]
        if ended:
            # What anybody said before somebody went comes first: the story must be told in order.
            for child in [*self._list_running(), *ended]:
                self._listen(child, news)
        for child in ended:
            self._forget(child)
            child.close()  # or a long run with many deaths would run out of file numbers
            assert child.exit is not None
            news.append(Ended(handle=child, exit=child.exit))
        return news

    def close(self) -> None:
        if self._wake_writer < 0:
            return
        for child in self._list_running():
            child.kill()
        deadline = time.monotonic() + KILL_SECONDS_MAX
        for child in self.handles:
            while child.reap() is None and time.monotonic() < deadline:
                time.sleep(REAP_SECONDS)
            child.close()
        self._selector.close()
        # A signal may still call `wake`: its byte must not land in a file that got the same number.
        reader, self._wake_reader = self._wake_reader, -1
        writer, self._wake_writer = self._wake_writer, -1
        os.close(reader)
        os.close(writer)

    def _list_running(self) -> list[Child]:
        return [child for child in self.handles if child.exit is None]

    def _listen(self, child: Child, news: list[News]) -> None:
        reports, closed = child.hear()
        news.extend(Said(handle=child, report=report) for report in reports)
        if closed:
            child.closed_at = child.closed_at or time.monotonic()
            self._forget(child)  # or the selector would report the end of the stream for ever

    def _forget(self, child: Child) -> None:
        with contextlib.suppress(KeyError):
            self._selector.unregister(child.stdout_fd)


def socket_name(who: Identity) -> str:
    """Short, as paths of sockets are limited. A coordinator's successor has its predecessor's."""
    name = "spare" if who.role == "standby" else who.role[0]
    is_first = who.role == "coordinator" or who.incarnation == 0
    return f"{name}{who.id}" if is_first else f"{name}{who.id}.{who.incarnation}"


def child_env(role: str, threads: int) -> dict[str, str]:
    """Ours, with a bound on the threads that numeric libraries would start: one per core and process."""
    env = dict(os.environ)
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMEXPR_NUM_THREADS"):
        env[name] = str(threads)
    # Idle OpenMP threads would spin on cores that servers need.
    env.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    env["PYTHONUNBUFFERED"] = "1"
    if role not in ("worker", "understudy"):
        # glibc keeps up to 8 arenas per core, each with unused memory of its own; rows are not in them.
        env.setdefault("MALLOC_ARENA_MAX", "2")
    return env
