"""A process of a run on another node, and whoever passes on there what it and its launcher say to each other.

    launcher -> tell, act            bytes for the child's stdin; a signal
    launcher <- hear                 bytes of its stdout, of its log, and its end: whatever there is by now

Every answer costs both sides a thousandth of a second of a processor and more. So what nobody waits for is gathered
(`CALM`, `LEISURELY`), and everything else is passed on at once, with what was gathered before it.

The child is the ordinary one of `launch/child.py`, with pipes and a log as on one machine; what passes is not acted
upon here. The token comes with the first bytes, and is kept in memory for a successor. Whatever calls these methods
over the network is not known here (`launch/ray.py` makes an actor of it).

A launcher that died may have a successor, which begins with `take_over` and hears who is here. From then on words of
launchers before it are refused, however late they come (`Superseded`). So that the successor knows what the dead one
knew, an outpost keeps the last of each report (`launch/legacy.py`), and what its launcher asked it to keep.

The rule to keep: a child never outlives its outpost, nor a launcher that is gone. The end of this process closes the
child's stdin, and the child ends by itself; a launcher that asks nothing for `LAUNCHER_SECONDS` is gone.
"""

from __future__ import annotations

import contextlib
import math
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

from regrow.core.identity import Identity
from regrow.errors import RegrowError
from regrow.launch.legacy import Ledger
from regrow.launch.processes import child_env

# Python puts the interpreter of this node there.
PYTHON = "{python}"
REMOTE_COMMAND = (PYTHON, "-P", "-m", "regrow.launch.child")
# Of one question. Too small: it ends for nothing, just before the answer that comes every second (`launch/watch.py`).
# Too large: a lost one is noticed late.
HEAR_SECONDS_MAX = 1.5
# How long a child is kept for a launcher that asks nothing. Too small: a network that stood still ends a run, and so
# does a launcher that falls silent with its node, which Ray misses after 62 s at its defaults: five checks that wait
# 10 s each, with 3 s between them. Too large: what is left of a run keeps its memory.
LAUNCHER_SECONDS = 120.0
LOOK_SECONDS = 1.0
LAST_WORDS_SECONDS = 1.0  # for the rest of a dead child's stdout
# How a worker is getting on: so often at most; the first after a while is passed on at once. Too small: a call for
# each. Too large: a stall looks shorter than it was.
CALM = frozenset(("progress",))
GATHER_SECONDS = 0.25
LEISURELY = frozenset(("server",))  # counters: with whatever comes next, or at the end of a question
READ_BYTES = 1 << 15  # of each stream at a time; small enough to travel inside an answer
BACKLOG_BYTES_MAX = 1 << 20  # of stdout, not asked for yet; then the child's pipe fills, which it can bear


class Heard(NamedTuple):
    """What an outpost has to say. `exit` is the last word: code, processor seconds, the most memory."""

    reports: bytes
    log: bytes
    pid: int
    exit: tuple[int, float, int] | None


class Superseded(RegrowError):
    """A launcher that has a successor by now."""


class Estate(NamedTuple):
    """What a successor finds in one place. `who` is None if nobody has told it what to be."""

    who: Identity | None
    born: Identity | None  # who it was first, as its log is named
    bundle: int | None  # of the room that was reserved
    pid: int
    said: tuple[bytes, ...]  # the last of each report
    told: frozenset[str]  # commands, since it is who it is
    memo: bytes
    memo_number: tuple[int, int]


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
        bundle: int | None = None,
        gather_seconds: float = GATHER_SECONDS,
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
        self._writing = threading.Lock()
        self._news = threading.Condition()
        self._launcher = 0
        self._who: Identity | None = None
        self._born: Identity | None = None
        self._bundle = bundle
        self._ledger = Ledger()
        self._memo, self._memo_number, self._token = b"", (-1, -1), ""
        self._reports = bytearray()
        self._gather_seconds = gather_seconds
        self._passed_at, self._due_at = -math.inf, math.inf  # reports: the last ones; those that are here
        self._exit: tuple[int, float, int] | None = None
        self._asked_at = time.monotonic()
        self._launcher_seconds = launcher_seconds
        self._on_abandoned = on_abandoned
        self._reader = threading.Thread(target=self._read, name="child", daemon=True)
        self._reader.start()
        for work in (self._reap, self._watch_launcher):
            threading.Thread(target=work, name=work.__name__, daemon=True).start()

    def tell(self, data: bytes, who: Identity | None = None, *, launcher: int = 0) -> None:
        """Whole lines, in order. A child that is gone does not hear them. `who` it is, once it has read them."""
        with self._news:
            self._obey(launcher)
            if who != self._who:
                self._who, self._born = who, self._born or who
                self._ledger.begin()
            self._ledger.note_told(data)
        assert self._process.stdin is not None
        rest = memoryview(data)
        with self._writing, contextlib.suppress(BrokenPipeError, ValueError):
            while rest:
                rest = rest[self._process.stdin.write(rest) :]

    def hear(self, seconds: float = HEAR_SECONDS_MAX, *, launcher: int = 0, whole_log: bool = False) -> Heard:
        """What has come since the last time; waits so long for something. `whole_log`: the log from its beginning."""
        with self._news:
            self._obey(launcher)
            self._await_news(seconds, launcher)
            self._obey(launcher)  # one that was superseded meanwhile must not take anything away
            exit = self._exit
            reports = bytes(self._reports[:READ_BYTES])
            del self._reports[:READ_BYTES]
            self._passed_at = time.monotonic() if reports else self._passed_at
            self._due_at = -math.inf if self._reports else math.inf
            self._news.notify_all()
            self._log_bytes = 0 if whole_log else self._log_bytes
            log = os.pread(self._log.fileno(), READ_BYTES, self._log_bytes)
            self._log_bytes += len(log)
            is_all = not self._reports and len(log) < READ_BYTES
        return Heard(reports, log, self._process.pid, exit if is_all else None)

    def _await_news(self, seconds: float, launcher: int) -> None:
        end = time.monotonic() + seconds
        while self._exit is None and launcher >= self._launcher:
            left = (min(end, self._due_at) if self._reports else end) - time.monotonic()
            if left <= 0:
                break
            self._news.wait(left)

    def _find_due(self, event: str | None) -> float:
        """When a line is to be passed on that came now. None: it is no report."""
        if event in LEISURELY:
            return math.inf
        return self._passed_at + self._gather_seconds if event in CALM else -math.inf

    def act(self, number: int, *, launcher: int = 0) -> None:
        """A signal to the child and whatever it started."""
        with self._news:
            self._obey(launcher)
        self._signal(number)

    # -- from one launcher to the next -------------------------------------------------------------------------

    def keep(self, memo: bytes, number: int, token: str, *, launcher: int = 0) -> None:
        """For a successor, instead of what was to be kept before."""
        with self._news:
            self._obey(launcher)
            if (launcher, number) > self._memo_number:
                self._memo, self._memo_number, self._token = memo, (launcher, number), token

    def take_over(self, launcher: int) -> Estate:
        """From now on this one is obeyed, and none before it. What it says next begins with a whole line."""
        with self._news:
            self._obey(launcher)
            self._launcher = launcher
            self._reports = bytearray(self._ledger.pending)  # all that is whole is in the ledger
            self._due_at = math.inf
            self._news.notify_all()
            ledger = self._ledger
            return Estate(
                who=self._who,
                born=self._born,
                bundle=self._bundle,
                pid=self._process.pid,
                said=tuple(ledger.said.values()),
                told=frozenset(ledger.told),
                memo=self._memo,
                memo_number=self._memo_number,
            )

    def read_token(self, launcher: int) -> str:
        """By itself: so small an answer goes from process to process, and is stored nowhere."""
        with self._news:
            self._obey(launcher)
            return self._token

    def _obey(self, launcher: int) -> None:
        if launcher < self._launcher:
            raise Superseded("another launcher has taken this run over")
        self._asked_at = time.monotonic()

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
                self._due_at = min([self._due_at, *map(self._find_due, self._ledger.note_said(chunk))])
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
