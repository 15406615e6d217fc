"""Standard output and error that never fail because of a disk: what there is no room for is lost.

A log, or a terminal's output sent to a file, may lie on a disk that is full. A line that cannot be written there must
not end a process, be it a warning of a library or the last words of an error; so every process of a run writes its
words through these. A reader that went away (`| head`) is another matter, and is still told.
"""

from __future__ import annotations

import contextlib
import io
import os
import stat
import sys
from typing import Any, TextIO


class LenientFile(io.RawIOBase):
    """Bytes to a file number, which stays open. Those that cannot be written count as written."""

    def __init__(self, number: int) -> None:
        self.lost_bytes = 0
        self._number = number

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        return self._number

    def write(self, data: Any, /) -> int:
        try:
            return os.write(self._number, data)
        except BrokenPipeError:
            raise
        except OSError:
            self.lost_bytes += memoryview(data).nbytes
            return memoryview(data).nbytes


def open_lenient(number: int) -> TextIO:
    """A text stream whose lines are written at once."""
    buffered = io.BufferedWriter(LenientFile(number))
    return io.TextIOWrapper(buffered, encoding="utf-8", errors="backslashreplace", line_buffering=True)


def write_text(stream: TextIO, text: str) -> bool:
    """Whether all of it was written."""
    raw = getattr(getattr(stream, "buffer", None), "raw", None)
    lost_bytes = raw.lost_bytes if isinstance(raw, LenientFile) else 0
    try:
        stream.write(text)
        stream.flush()
    except OSError:
        return False
    return not isinstance(raw, LenientFile) or raw.lost_bytes == lost_bytes


def replace_standard_streams() -> None:
    """For a process whose output is a log."""
    sys.stdout, sys.stderr = open_lenient(1), open_lenient(2)


def replace_redirected_streams() -> None:
    """For a program that a user may have told to write to files (`> train.log`). Terminals and pipes stay as they
    are."""
    for number, name in ((1, "stdout"), (2, "stderr")):
        with contextlib.suppress(OSError, ValueError, AttributeError):  # closed, or not a file at all
            mode = os.fstat(number).st_mode
            reader = os.isatty(number) or stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode)
            if not reader and getattr(sys, name).fileno() == number:
                setattr(sys, name, open_lenient(number))
