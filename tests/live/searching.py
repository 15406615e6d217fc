"""Where a secret could be seen by whoever has no business with it: command lines, environments, files, what Ray keeps
in shared memory (its object store), and the memory of Ray's own processes, from which its dashboard and its lists of
actors, tasks and objects are served."""

from __future__ import annotations

import contextlib
import mmap
import os
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

PIECE_BYTES = 8 << 20
# Ray's own: the store of the cluster (gcs_server), a node's (raylet), its agents, monitors and dashboards. Not its
# workers ("ray::..."), which are the launcher and the outposts: they hold the secret, and pass it on.
OWN = re.compile(rb"core/src/ray|ray/dashboard|ray/_private/(?!workers)|ray/autoscaler")
PRIVATE_WRITABLE = re.compile(r"^([0-9a-f]+)-([0-9a-f]+) rw")


def search_all(secret: str, pids: Iterable[int], directories: Iterable[Path]) -> list[str]:
    """Every place where it is, in words. `pids`: all processes of all nodes."""
    pids = list(pids)
    word = secret.encode()
    forms = (word, bytes.fromhex(secret))  # as it is handed on, and as it is used
    own = [pid for pid in pids if OWN.search(read_bytes(f"/proc/{pid}/cmdline"))]
    found = [
        f"{what} of {pid}: {describe(pid)}"
        for pid in pids
        for what in ("cmdline", "environ")
        if any(form in read_bytes(f"/proc/{pid}/{what}") for form in forms)
    ]
    found += [f"memory of {pid}: {describe(pid)}" for pid in own if is_in(forms, read_memory(pid))]
    found += [f"shared memory of {pid}: {path}" for pid, path in list_shared(own) if is_in(forms, read_pieces(path))]
    for directory in directories:
        found += [f"file {path}" for path in list_files(directory) if is_in(forms, read_pieces(path))]
    return found


def describe(pid: int) -> str:
    return read_bytes(f"/proc/{pid}/cmdline").replace(b"\0", b" ").decode(errors="replace")[:80]


def is_in(forms: tuple[bytes, ...], pieces: Iterable[bytes]) -> bool:
    """Also where it lies across the border of two pieces."""
    before = b""
    for piece in pieces:
        whole = before + piece
        if any(form in whole for form in forms):
            return True
        before = whole[-max(map(len, forms)) :]
    return False


def read_bytes(path: str) -> bytes:
    """Empty for what is gone."""
    with contextlib.suppress(OSError):
        return Path(path).read_bytes()
    return b""


def read_pieces(path: Path) -> Iterator[bytes]:
    with contextlib.suppress(OSError), path.open("rb") as file:
        while piece := file.read(PIECE_BYTES):
            yield piece


def read_memory(pid: int) -> Iterator[bytes]:
    """All that it may write to. Between two regions nothing can lie."""
    with contextlib.suppress(OSError), open(f"/proc/{pid}/mem", "rb", buffering=0) as memory:
        for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
            if (region := PRIVATE_WRITABLE.match(line)) is None or "/dev/shm" in line:
                continue
            at, end = (int(word, 16) for word in region.groups())
            while at < end:
                with contextlib.suppress(OSError, OverflowError):  # a part that is not there
                    yield os.pread(memory.fileno(), min(PIECE_BYTES, end - at) + mmap.PAGESIZE, at)
                at += PIECE_BYTES


def list_shared(pids: Iterable[int]) -> Iterator[tuple[int, Path]]:
    """Files of shared memory that these hold open. Ray deletes their names at once."""
    for pid in pids:
        with contextlib.suppress(OSError):
            for entry in Path(f"/proc/{pid}/fd").iterdir():
                with contextlib.suppress(OSError):
                    if os.readlink(entry).startswith("/dev/shm"):
                        yield pid, entry


def list_files(directory: Path) -> Iterator[Path]:
    for folder, _, names in os.walk(directory):
        for name in names:
            path = Path(folder) / name
            if path.is_file():  # no sockets
                yield path
