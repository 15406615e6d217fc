"""A child process and the launcher that started it, over the child's stdin and stdout.

The first line on stdin is the assignment; later lines are commands; its end means that the launcher is gone,
and then the child must go too, at once. Everything the child has to say goes to stdout as one JSON object a
line.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import queue
import re
import resource
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

EXIT_PARENT_GONE = 3
PR_SET_NAME = 15


class Parent:
    """The launcher, seen from a child."""

    def __init__(self) -> None:
        # Keep the real stdout for events only: a stray print must not corrupt them.
        self._out = os.fdopen(os.dup(1), "w", buffering=1)
        os.dup2(2, 1)
        self._lock = threading.Lock()
        self._commands_lock = threading.Lock()
        self._commands: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        self._on_command: Callable[[dict[str, Any]], object] | None = None
        self._lines = _lines(0)
        line = next(self._lines, None)
        if line is None:
            sys.exit(EXIT_PARENT_GONE)
        self.assignment: dict[str, Any] = json.loads(line)
        threading.Thread(target=self._read, name="parent", daemon=True).start()

    def report(self, event: str, **values: Any) -> None:
        """Tells the launcher; a launcher that is gone is noticed on stdin."""
        text = json.dumps({"event": event, **values}, allow_nan=True)
        with self._lock:
            try:
                self._out.write(text + "\n")
                self._out.flush()
            except (BrokenPipeError, ValueError):
                os._exit(EXIT_PARENT_GONE)

    def report_stopped(self) -> None:
        usage = resource.getrusage(resource.RUSAGE_SELF)
        self.report("stopped", cpu_seconds=usage.ru_utime + usage.ru_stime, peak_rss_bytes=peak_rss_bytes())

    def next_command(self) -> dict[str, Any]:
        """Waits for the next command (for a process whose main thread has nothing else to do)."""
        return self._commands.get()

    def on_command(self, callback: Callable[[dict[str, Any]], object]) -> None:
        """Calls back from the reading thread instead (for a process that runs an event loop)."""
        with self._commands_lock:  # or a command read just now would be queued after the queue was emptied
            self._on_command = callback
            while not self._commands.empty():
                callback(self._commands.get())

    def _read(self) -> None:
        for line in self._lines:
            try:
                command = json.loads(line)
            except ValueError:
                continue
            with self._commands_lock:
                if self._on_command is not None:
                    self._on_command(command)
                else:
                    self._commands.put(command)
        os._exit(EXIT_PARENT_GONE)


def name_process(role: str, id: int) -> None:
    """What `ps` and `pgrep` show: "rg server 2". Linux only; elsewhere all processes have the interpreter's name."""
    if sys.platform.startswith("linux"):
        name = f"rg {role}" if role == "coordinator" else f"rg {role} {id}"
        ctypes.CDLL(None).prctl(PR_SET_NAME, name.encode()[:15], 0, 0, 0)


def _lines(fd: int) -> Iterator[bytes]:
    """Lines of a pipe, read without Python's buffered stdin: its lock, held by a daemon thread, would abort
    the interpreter at its end."""
    pending = b""
    while chunk := os.read(fd, 1 << 16):
        *lines, pending = (pending + chunk).split(b"\n")
        yield from lines


def peak_rss_bytes() -> int:
    """The most memory this process had. Where /proc does not tell, no less than that: what getrusage says begins with
    the memory of the process that started this one."""
    with contextlib.suppress(OSError):
        found = re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
        if found is not None:
            return int(found[1]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
