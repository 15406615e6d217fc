"""The launcher behind a pair of pipes: the `Parent` of a process that was started with `launch/processes.py`.

The first line on stdin is the assignment; later lines are commands; its end means that the launcher is gone, and then
the process must go too, at once. Everything that it has to say goes to stdout, one JSON object a line.
"""

from __future__ import annotations

import logging
import os
import queue
import sys
import threading
from collections.abc import Callable, Iterator

from regrow.core.identity import Identity
from regrow.launch.orders import AnyCommand, Assignment, Report, encode, parse_assignment, parse_command
from regrow.runtime.parent import name_process

EXIT_PARENT_GONE = 3


class PipeParent:
    """Takes stdin and stdout; made once, first of all."""

    assignment: Assignment

    def __init__(self) -> None:
        # Keep the real stdout for reports only: a stray print must not corrupt them.
        self._out = os.dup(1)
        os.dup2(2, 1)
        self._lock = threading.Lock()
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
        """A launcher that is gone is noticed on stdin."""
        data = memoryview(encode(report) + b"\n")
        with self._lock:
            try:
                while data:
                    data = data[os.write(self._out, data) :]
            except OSError:
                os._exit(EXIT_PARENT_GONE)

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
