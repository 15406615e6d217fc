"""A process of a run on another node, and whoever passes on there what it and its launcher say to each other.

    launcher -> tell, act            bytes for the child's stdin; a signal
    launcher <- hear                 bytes of its stdout, of its log, and its end: whatever there is by now

The child is the ordinary one of `launch/child.py`, with pipes and a log as on one machine; nothing here reads what
passes. The token comes with the first bytes and is kept nowhere. Whatever calls these methods over the network is
not known here (`launch/ray.py` makes an actor of it).

The rule to keep: a child never outlives its outpost, nor a launcher that is gone. The end of this process closes the
child's stdin, and the child ends by itself; a launcher that asks nothing for `LAUNCHER_SECONDS` is gone.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

from regrow.launch.processes import child_env

# Python puts the interpreter of this node there.
PYTHON = "{python}"
REMOTE_COMMAND = (PYTHON, "-P", "-m", "regrow.launch.child")
HEAR_SECONDS_MAX = 1.0  # of one question. Too small: many calls for nothing. Too large: a lost one is noticed late.
# How long a child is kept for a launcher that asks nothing. Too small: a network that stood still ends a run. Too
# large: what is left of a run keeps its memory.
LAUNCHER_SECONDS = 60.0
LOOK_SECONDS = 1.0
LAST_WORDS_SECONDS = 1.0  # for the rest of a dead child's stdout
READ_BYTES = 1 << 15  # of each stream at a time; small enough to travel inside an answer
BACKLOG_BYTES_MAX = 1 << 20  # of stdout, not asked for yet; then the child's pipe fills, which it can bear


class Heard(NamedTuple):
    """What an outpost has to say. `exit` is the last word: code, processor seconds, the most memory."""

    reports: bytes
    log: bytes
    pid: int
    exit: tuple[int, float, int] | None


class Outpost:
    """Starts its child at once."""

    def __init__(
        self,
        *,
        role: str,
        threads: int,
        command: Sequence[str] = REMOTE_COMMAND,
        directory: str | None = None,
        python_path: str | None = None,
        launcher_seconds: float = LAUNCHER_SECONDS,
        on_abandoned: Callable[[], None] = lambda: None,
    ) -> None:
        env = child_env(role, threads)
        if python_path is not None:
            env["PYTHONPATH"] = python_path
        # Ray runs its own processes with low priority, which a child would have too. Not everybody may change that.
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, 0, 0)
        self._log = tempfile.TemporaryFile(prefix="regrow-log-")  # noqa: SIM115 - as long as this process lives
        self._log_bytes = 0
        self._process = subprocess.Popen(
            [sys.executable if word == PYTHON else word for word in command],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            bufsize=0,
            env=env,
            cwd=directory if directory is not None and os.path.isdir(directory) else None,
            start_new_session=True,
        )
        self._news = threading.Condition()
        self._reports = bytearray()
        self._exit: tuple[int, float, int] | None = None
        self._asked_at = time.monotonic()
        self._launcher_seconds = launcher_seconds
        self._on_abandoned = on_abandoned
        self._reader = threading.Thread(target=self._read, name="child", daemon=True)
        self._reader.start()
        for work in (self._reap, self._watch_launcher):
            threading.Thread(target=work, name=work.__name__, daemon=True).start()

    def tell(self, data: bytes) -> None:
        """Whole lines, in order. A child that is gone does not hear them."""
        self._asked_at = time.monotonic()
        assert self._process.stdin is not None
        rest = memoryview(data)
        with contextlib.suppress(BrokenPipeError, ValueError):
            while rest:
                rest = rest[self._process.stdin.write(rest) :]

    def hear(self, seconds: float = HEAR_SECONDS_MAX) -> Heard:
        """What has come since the last time; waits so long for something."""
        self._asked_at = time.monotonic()
        with self._news:
            self._news.wait_for(lambda: bool(self._reports) or self._exit is not None, seconds)
            exit = self._exit
            reports = bytes(self._reports[:READ_BYTES])
            del self._reports[:READ_BYTES]
            self._news.notify_all()
            log = os.pread(self._log.fileno(), READ_BYTES, self._log_bytes)
            self._log_bytes += len(log)
            is_all = not self._reports and len(log) < READ_BYTES
        return Heard(reports, log, self._process.pid, exit if is_all else None)

    def act(self, number: int) -> None:
        """A signal to the child and whatever it started."""
        self._asked_at = time.monotonic()
        self._signal(number)

    def close(self) -> None:
        """Nobody asks any more: the child ends with its stdin, if it has not."""
        self._signal(signal.SIGKILL)
        for pipe in (self._process.stdin, self._process.stdout, self._log):
            assert pipe is not None
            pipe.close()

    # -- threads of its own ------------------------------------------------------------------------------------

    def _signal(self, number: int) -> None:
        with self._news:
            if self._exit is None:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(self._process.pid, number)

    def _read(self) -> None:
        assert self._process.stdout is not None
        while chunk := os.read(self._process.stdout.fileno(), READ_BYTES):
            with self._news:
                # A launcher that does not ask is waited for: then the child's own pipe fills.
                self._news.wait_for(lambda: len(self._reports) < BACKLOG_BYTES_MAX, self._launcher_seconds)
                self._reports += chunk
                self._news.notify_all()

    def _reap(self) -> None:
        """The child's end. What it said last comes before it."""
        pid = self._process.pid
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
        self._signal(signal.SIGKILL)  # whatever it had started; its number is nobody else's before it is reaped
        self._reader.join(LAST_WORDS_SECONDS)
        with self._news:
            _, status, usage = os.wait4(pid, 0)
            self._process.returncode = os.waitstatus_to_exitcode(status)  # or Popen would wait for it again
            cpu_seconds = usage.ru_utime + usage.ru_stime
            self._exit = (self._process.returncode, cpu_seconds, usage.ru_maxrss * 1024)
            self._news.notify_all()

    def _watch_launcher(self) -> None:
        while time.monotonic() - self._asked_at < self._launcher_seconds:
            time.sleep(min(LOOK_SECONDS, self._launcher_seconds))
        self._signal(signal.SIGKILL)
        self._on_abandoned()
