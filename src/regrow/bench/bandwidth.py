"""What the machine can do, for sketches: bytes through memory and sockets, and what the first touch of a page costs."""

from __future__ import annotations

import mmap
import socket
import subprocess
import sys
import time

import numpy as np

from regrow.bench import common
from regrow.errors import RegrowError

PAGES_BYTES = 64 << 20  # touched to see what a page costs

RECEIVER = """
import socket, sys
with socket.socket(fileno=int(sys.argv[1])) as link:
    buffer = bytearray(1 << 20)
    left = int(sys.argv[2])
    while left > 0:
        count = link.recv_into(buffer)
        if not count:
            sys.exit(1)
        left -= count
    link.sendall(b"x")
"""


def copy_bandwidth(size_bytes: int, *, repetitions: int = 5) -> float:
    """Bytes per second copied from one place in memory to another, by one thread at its best."""
    source = np.ones(size_bytes, np.uint8)
    target = np.zeros_like(source)
    return size_bytes / min(common.seconds_of(lambda: np.copyto(target, source)) for _ in range(repetitions))


def socket_bandwidth(size_bytes: int) -> float:
    """Bytes per second from one process to another through a Unix socket."""
    near, far = socket.socketpair()
    chunk = bytes(1 << 20)
    chunks = max(1, size_bytes // len(chunk))
    with near, far:
        receiver = subprocess.Popen(
            [sys.executable, "-I", "-c", RECEIVER, str(far.fileno()), str(chunks * len(chunk))],
            pass_fds=[far.fileno()],
        )
        try:
            far.close()
            near.sendall(chunk)  # once it takes this it runs: starting it is not measured
            started = time.perf_counter()
            for _ in range(chunks - 1):
                near.sendall(chunk)
            if near.recv(1) != b"x":
                raise RegrowError("the socket could not be measured: its other end failed")
            seconds = time.perf_counter() - started
        except OSError as error:
            raise RegrowError(f"the socket could not be measured: {error}") from None
        finally:
            receiver.kill()
            receiver.wait()
    return max(1, chunks - 1) * len(chunk) / seconds


def page_seconds() -> float:
    """Processor time that the first touch of a page costs, and no later one."""
    with mmap.mmap(-1, PAGES_BYTES) as memory:
        bytes_seen = np.frombuffer(memory, np.uint8)
        times = []
        for value in (1, 2):
            began = time.process_time()
            bytes_seen[:: mmap.PAGESIZE] = value
            times.append(time.process_time() - began)
        del bytes_seen
    return max(0.0, times[0] - times[1]) / (PAGES_BYTES / mmap.PAGESIZE)
