"""The launcher behind a pair of pipes: the `Parent` of a process that was started with `launch/processes.py`.

The first line on stdin is the assignment; later lines are commands; its end means that the launcher is gone, and then
the process must go too, at once. Everything that it has to say goes to stdout, one JSON object a line.

The thread that reads stdin answers `Ask` by itself, so that a process which is busy is not taken for one that hangs. A
launcher that does not read (stopped, or hung itself) holds nobody up: what does not fit into the pipe is kept, and
training goes on; but one that never reads again is as good as gone.
"""

from __future__ import annotations

import logging
import os
import queue
import select
import sys
import threading
from collections.abc import Callable, Iterator

from regrow.core.identity import Identity
from regrow.launch.lines import encode, parse_assignment, parse_command
from regrow.launch.orders import AnyCommand, Ask, Assignment
from regrow.launch.reports import Answer, Report
from regrow.runtime.parent import Pulse, name_process

EXIT_PARENT_GONE = 3
# A launcher that reads nothing for so long is gone, for all that its processes know. Too small: a run dies of Ctrl-Z.
# Too large: a hung launcher keeps the memory of a whole run, and nobody replaces who dies.
LAUNCHER_SECONDS_MAX = 3600.0
FLUSH_SECONDS_MAX = 5.0  # for the last words


class PipeParent:
    """Takes stdin and stdout; made once, first of all."""

    assignment: Assignment

    def __init__(self) -> None:
        # Keep the real stdout for reports only: a stray print must not corrupt them.
        self._out = os.dup(1)
        os.dup2(2, 1)
        os.set_blocking(self._out, False)
        self.pulse = Pulse()
        self._lock = threading.Lock()
        self._unsent = bytearray()  # what the pipe had no room for
        self._writer: threading.Thread | None = None  # while there is such
        self._commands_lock = threading.Lock()
        self._commands: queue.SimpleQueue[AnyCommand] = queue.SimpleQueue()
        self._callback: Callable[[AnyCommand], object] | None = None
        self._lines = _read_lines(0)
        line = next(self._lines, None)
        if line is None:
            sys.exit(EXIT_PARENT_GONE)
        self.become(parse_assignment(line))
        threading.Thread(target=self._read, name="parent", daemon=True).start()

    def become(self, assignment: Assignment) -> None:
        self.assignment = assignment
        name_process(assignment.identity)
        for handler in logging.getLogger().handlers:  # none yet when the process is new
            handler.setFormatter(logging.Formatter(log_format(assignment.identity)))

    def report(self, report: Report) -> None:
        """Never waits: whoever reports has better things to do than to wait for the launcher."""
        with self._lock:
            self._unsent += encode(report) + b"\n"
            self._write()
            if self._unsent and self._writer is None:
                self._writer = threading.Thread(target=self._write_late, name="reports", daemon=True)
                self._writer.start()

    def close(self) -> None:
        """Returns when the launcher has everything, or does not take it."""
        with self._lock:
            writer = self._writer
        if writer is not None:
            writer.join(FLUSH_SECONDS_MAX)

    def _write(self) -> None:
        """What the pipe takes now. A launcher that is gone is noticed on stdin, if not here."""
        try:
            while self._unsent:
                del self._unsent[: os.write(self._out, self._unsent)]
        except BlockingIOError:
            pass
        except OSError:
            os._exit(EXIT_PARENT_GONE)

    def _write_late(self) -> None:
        while True:
            _, writable, _ = select.select([], [self._out], [], LAUNCHER_SECONDS_MAX)
            if not writable:
                logging.error("the launcher has not read for %.0f s: this process ends", LAUNCHER_SECONDS_MAX)
                os._exit(EXIT_PARENT_GONE)
            with self._lock:
                self._write()
                if not self._unsent:
                    self._writer = None
                    return

    def next_command(self) -> AnyCommand:
        return self._commands.get()

    def on_command(self, callback: Callable[[AnyCommand], object]) -> None:
        with self._commands_lock:  # or a command read just now would be queued after the queue was emptied
            self._callback = callback
            while not self._commands.empty():
                callback(self._commands.get())

    def _read(self) -> None:
        for line in self._lines:
            try:
                command = parse_command(line)
            except ValueError as error:
                logging.warning("a command that cannot be understood: %s", error)
                continue
            if isinstance(command, Ask):
                pulse = self.pulse
                self.report(Answer(busy_seconds=pulse.busy_seconds, longest_seconds=pulse.longest_seconds))
                continue
            with self._commands_lock:
                if self._callback is not None:
                    self._callback(command)
                else:
                    self._commands.put(command)
        os._exit(EXIT_PARENT_GONE)


def log_format(who: Identity) -> str:
    return f"%(asctime)s {who.role[0].upper()}{who.id} %(message)s"


def _read_lines(fd: int) -> Iterator[bytes]:
    """Lines of a pipe, read without Python's buffered stdin: its lock, held by a daemon thread, would abort
    the interpreter at its end."""
    pending = b""
    while chunk := os.read(fd, 1 << 16):
        *lines, pending = (pending + chunk).split(b"\n")
        yield from lines
