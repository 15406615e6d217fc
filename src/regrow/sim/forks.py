"""A process that goes on from here on its own, and says what came of it.

A fork is the cheapest copy of a whole simulated world, its C++ stores included. Whatever happens to the copy (an error,
a crash, a loop without end, memory without end) happens to nobody else, and is seen.
"""

from __future__ import annotations

import mmap
import os
import pickle
import resource
import select
import signal
import struct
import time
import traceback
from collections.abc import Callable
from typing import Any

NOTE_BYTES = 1 << 14
EXIT_ERROR = 70
PIPE_BYTES = 1 << 16
_NUMBER = struct.Struct("<qI")


class ForkEnded(Exception):
    """It ended without an answer, or did not end."""

    def __init__(self, reason: str, *, number: int, note: str) -> None:
        super().__init__(f"{reason} at {number}: {note}" if note else f"{reason} at {number}")
        self.reason = reason
        self.number = number


class Fork:
    """Two processes leave the constructor: in one of them `is_child`. That one must call `answer`."""

    def __init__(self, *, memory_bytes_max: int | None = None) -> None:
        """`memory_bytes_max`: how much more address space the child may take than it has; more is a MemoryError."""
        self._shared = mmap.mmap(-1, _NUMBER.size + NOTE_BYTES)
        self._read, self._write = os.pipe()
        self._pid = os.fork()
        self.is_child = self._pid == 0
        os.close(self._read if self.is_child else self._write)
        if self.is_child and memory_bytes_max is not None:
            with open("/proc/self/statm") as file:
                taken = int(file.read().split()[0]) * mmap.PAGESIZE
            resource.setrlimit(resource.RLIMIT_AS, (taken + memory_bytes_max, resource.RLIM_INFINITY))

    def note(self, number: int, text: str = "") -> None:
        """In the child: where it is, for the case that this is the last that is heard of it."""
        data = text.encode()[:NOTE_BYTES]
        self._shared[: _NUMBER.size + len(data)] = _NUMBER.pack(number, len(data)) + data

    def act(self, what: Callable[[], Any]) -> None:
        """In the child: does this, and answers with what it gives."""
        try:
            self.answer(what())
        except BaseException:  # of whatever kind: nothing may leave the child but by its answer
            self.note(_NUMBER.unpack(self._shared[: _NUMBER.size])[0], traceback.format_exc())
            os._exit(EXIT_ERROR)

    def answer(self, value: Any) -> None:
        """In the child: its last word."""
        data = memoryview(pickle.dumps(value))
        while data:
            data = data[os.write(self._write, data) :]
        os._exit(0)

    def wait(self, seconds_max: float) -> Any:
        """In the parent: the child's last word, or ForkEnded."""
        deadline = time.monotonic() + seconds_max
        pieces: list[bytes] = []
        hangs = False
        while True:
            ready, _, _ = select.select([self._read], [], [], max(0.0, deadline - time.monotonic()))
            if not ready:
                hangs = True
                os.kill(self._pid, signal.SIGKILL)
                break
            pieces.append(os.read(self._read, PIPE_BYTES))
            if not pieces[-1]:
                break
        os.close(self._read)
        _, status = os.waitpid(self._pid, 0)
        number, length = _NUMBER.unpack(self._shared[: _NUMBER.size])
        note = self._shared[_NUMBER.size : _NUMBER.size + length].decode(errors="replace")
        self._shared.close()
        if hangs:
            raise ForkEnded(f"nothing for {seconds_max:.0f} s", number=number, note=note)
        if status:
            code = os.waitstatus_to_exitcode(status)
            reason = f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
            raise ForkEnded(reason, number=number, note=note)
        return pickle.loads(b"".join(pieces))
