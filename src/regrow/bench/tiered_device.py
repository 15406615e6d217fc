"""What a directory's device can do by itself: the roof under which the tiered store stays.

Random reads of 4 KiB at several depths, and writing and reading in sequence, past the page cache where the file system
allows it. Nothing of the store is used here.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import random
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

PAGE_BYTES = 4096
PIECE_BYTES = 4 << 20
DEPTHS = (1, 16, 64)


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """What was measured, and how."""

    name: str
    direct: bool
    write_bytes_per_s: float
    read_bytes_per_s: float
    random_reads_per_s: dict[int, float]

    @property
    def random_reads_best(self) -> float:
        return max(self.random_reads_per_s.values())

    def to_dict(self) -> dict[str, Any]:
        return {
            "kind": "device",
            "device": self.name,
            "direct": self.direct,
            "write_bytes_per_second": round(self.write_bytes_per_s),
            "read_bytes_per_second": round(self.read_bytes_per_s),
            "random_reads_per_second": {str(depth): round(rate) for depth, rate in self.random_reads_per_s.items()},
        }


def measure(name: str, directory: str, *, size_bytes: int, seconds: float) -> Device:
    """Writes a file of this size there, reads it, and removes it."""
    with tempfile.TemporaryDirectory(prefix="regrow-device-", dir=directory) as place:
        path = os.path.join(place, "probe")
        descriptor, direct = _open(path)
        try:
            written = _pass_over(descriptor, size_bytes, os.pwrite, sync=True)
            with contextlib.suppress(OSError):
                os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            read = _pass_over(descriptor, size_bytes, _pread, sync=False)
            rates = {depth: _read_at_random(descriptor, size_bytes, depth, seconds) for depth in DEPTHS}
        finally:
            os.close(descriptor)
    return Device(name=name, direct=direct, write_bytes_per_s=written, read_bytes_per_s=read, random_reads_per_s=rates)


def _open(path: str) -> tuple[int, bool]:
    flags = os.O_RDWR | os.O_CREAT
    try:
        return os.open(path, flags | os.O_DIRECT, 0o600), True
    except OSError:  # a file system in memory has no way past itself
        return os.open(path, flags, 0o600), False


def _pread(descriptor: int, piece: Any, at: int) -> int:
    return os.preadv(descriptor, [piece], at)


def _pass_over(descriptor: int, size_bytes: int, move: Any, *, sync: bool) -> float:
    """Bytes per second from the first piece to the last, durable if asked."""
    with mmap.mmap(-1, PIECE_BYTES) as piece:
        piece.write(os.urandom(PIECE_BYTES))
        started = time.perf_counter()
        for at in range(0, size_bytes - PIECE_BYTES + 1, PIECE_BYTES):
            move(descriptor, piece, at)
        if sync:
            os.fdatasync(descriptor)
        return size_bytes // PIECE_BYTES * PIECE_BYTES / (time.perf_counter() - started)


def _read_at_random(descriptor: int, size_bytes: int, depth: int, seconds: float) -> float:
    """Reads per second with so many under way at a time."""
    pages = size_bytes // PAGE_BYTES
    barrier = threading.Barrier(depth)

    def read(seed: int) -> tuple[int, float]:
        places = random.Random(seed)
        with mmap.mmap(-1, PAGE_BYTES) as page:
            barrier.wait()
            started, count = time.perf_counter(), 0
            while (spent := time.perf_counter() - started) < seconds:
                os.preadv(descriptor, [page], places.randrange(pages) * PAGE_BYTES)
                count += 1
        return count, spent

    with ThreadPoolExecutor(depth) as pool:
        return sum(count / spent for count, spent in pool.map(read, range(depth)))
