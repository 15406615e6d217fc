"""Large files past the page cache, both ways: O_DIRECT.

A checkpoint is written once and hardly ever read. In the page cache it would push out what is needed, and to put it
there is half of what writing it costs, more where the system has to take fresh memory for it: 0.3 s of processor time
per GB without, 0.5 to 4 s with (6.18, ext4, a virtual machine). Where a file system refuses, `write` says so and leaves
the file empty; `read` then reads as usual.

Addresses, lengths and places in the file must be multiples of a block. So what is written passes through a buffer that
is, which may be cut anywhere, and what is read comes into memory with some room at its ends.
"""

from __future__ import annotations

import errno
import fcntl
import os
import threading
from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

BYTES_MIN = 1 << 20  # Smaller files gain nothing: they are waited for, and not for what their bytes cost.
ALIGNMENT = 4096  # bytes; as large as blocks of disks are
BLOCK_BYTES = 4 << 20  # written at once. Too small: the disk waits for us. Too large: memory, for each writer.
FLAG = getattr(os, "O_DIRECT", 0)  # not everywhere

Bytes = npt.NDArray[np.uint8]


class Memory:
    """Buffers that are used again, as many as there ever were in use at once: fresh memory can cost more than all that
    is done with it. What may still be written to, by a call that hangs, must not be given back."""

    def __init__(self) -> None:
        self._free: list[Bytes] = []
        self._lock = threading.Lock()

    def take(self, size: int) -> Bytes:
        """At least `size` bytes: the smallest free buffer that is enough. If none is, the smallest makes way."""
        with self._lock:
            self._free.sort(key=len)
            for index, buffer in enumerate(self._free):
                if len(buffer) >= size:
                    return self._free.pop(index)
            del self._free[:1]
        return allocate_aligned(size)

    def give(self, buffer: Bytes) -> None:
        with self._lock:
            self._free.append(buffer)


def allocate_aligned(size: int) -> Bytes:
    """Memory that begins and ends where direct transfers may. NumPy's is on huge pages where the system has them."""
    size = -(-size // ALIGNMENT) * ALIGNMENT
    memory = np.empty(size + ALIGNMENT, np.uint8)
    first = -memory.ctypes.data % ALIGNMENT
    return memory[first : first + size]


def write(file: int, buffers: Iterable[memoryview], memory: Memory) -> bool:
    """Writes these buffers, one after the other, to an empty file. False: the file system does not do that."""
    if not _switch(file, on=True):
        return False
    block = memory.take(BLOCK_BYTES)
    try:
        end = filled = 0
        for buffer in buffers:
            rest = np.frombuffer(buffer, np.uint8)
            while rest.size:
                part = rest[: BLOCK_BYTES - filled]
                block[filled : filled + part.size] = part
                filled += part.size
                rest = rest[part.size :]
                if filled == BLOCK_BYTES:
                    _write_whole(file, block)
                    end, filled = end + filled, 0
        if filled:
            padded = -(-filled // ALIGNMENT) * ALIGNMENT
            block[filled:padded] = 0
            _write_whole(file, block[:padded])
            os.ftruncate(file, end + filled)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        os.ftruncate(file, 0)
        os.lseek(file, 0, os.SEEK_SET)
        return False
    finally:
        _switch(file, on=False)
        memory.give(block)
    return True


def read(file: int, size: int, into: Bytes) -> memoryview:
    """The first `size` bytes of a file, fewer if it has fewer, into memory that was made here and is enough."""
    directly = _switch(file, on=True)
    end = 0
    while end < size:
        try:
            count = os.preadv(file, [into[end:].data], end)
        except OSError as error:
            if not directly or error.errno != errno.EINVAL:
                raise
            _switch(file, on=False)
            directly = False
            continue
        if not count:
            break
        end += count
    return into[: min(end, size)].data


def _switch(file: int, *, on: bool) -> bool:
    """Whether it could be switched."""
    flags = fcntl.fcntl(file, fcntl.F_GETFL)
    try:
        fcntl.fcntl(file, fcntl.F_SETFL, flags | FLAG if on else flags & ~FLAG)
    except OSError:
        return False
    return FLAG != 0


def _write_whole(file: int, block: Bytes) -> None:
    rest = block.data
    while rest:
        rest = rest[os.write(file, rest) :]
