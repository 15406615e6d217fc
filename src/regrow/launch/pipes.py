"""The launcher behind a pair of pipes: the `Parent` of a process that was started with `launch/processes.py`.

The first line on stdin is the assignment; later lines are commands; its end means that the launcher is gone, and then
the process must go too, at once. Everything that it has to say goes to stdout, one JSON object a line.

A launcher that does not read (stopped, or hung itself) holds nobody up: what does not fit into the pipe is kept, and
training goes on; but one that never reads again is as good as gone.
"""

from __future__ import annotations

import logging
import os
import select
import sys
import threading
from collections.abc import Iterator

from regrow.launch.lines import encode, parse_assignment
from regrow.launch.parents import LineParent
from regrow.launch.reports import Report

EXIT_PARENT_GONE = 3
# A launcher that reads nothing for so long is gone, for all that its processes know. Too small: a run dies of Ctrl-Z.
# Too large: a hung launcher keeps the memory of a whole run, and nobody replaces who dies.
LAUNCHER_SECONDS_MAX = 3600.0
FLUSH_SECONDS_MAX = 5.0  # for the last words


class PipeParent(LineParent):
    """Takes stdin and stdout; made once, first of all."""

    def __init__(self) -> None:
        # Keep the real stdout for reports only: a stray print must not corrupt them.
        self._out = os.dup(1)
        os.dup2(2, 1)
        os.set_blocking(self._out, False)
        super().__init__()
        self._lock = threading.Lock()
        self._unsent = bytearray()  # what the pipe had no room for
        self._writer: threading.Thread | None = None  # while there is such
        self._lines = _read_lines(0)
        line = next(self._lines, None)
        if line is None:
            sys.exit(EXIT_PARENT_GONE)
        self.become(parse_assignment(line))
        threading.Thread(target=self._read, name="parent", daemon=True).start()

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

    def _read(self) -> None:
        for line in self._lines:
            self.receive(line)
        os._exit(EXIT_PARENT_GONE)


def _read_lines(fd: int) -> Iterator[bytes]:
    """Lines of a pipe, read without Python's buffered stdin: its lock, held by a daemon thread, would abort
    the interpreter at its end."""
    pending = b""
    while chunk := os.read(fd, 1 << 16):
        *lines, pending = (pending + chunk).split(b"\n")
        yield from lines
