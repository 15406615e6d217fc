"""Places where a write may be cut short, so that tests can kill the process at every one of them.

Every write, rename, delete and fsync of the checkpoint package calls `hit` first. Nothing happens there unless a test
armed it. `NAMES` is the whole list: a name that is not in it is a bug, and a test goes through all of them.

Environment variables are read at the top only (cli, launch, tests), so the one named `VARIABLE` gets here by
`arm(os.environ.get(VARIABLE))`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import os
import threading
from collections.abc import Iterator

VARIABLE = "REGROW_FAILPOINT"
EXIT_CODE = 77  # of a process that ended here, to tell it from one that failed
ACTIONS = ("exit", "raise", "full", "tear")

_WRITE = ("mkdir", "mkdir_fsync", "open", "data", "fsync", "rename", "rename_fsync", "put")
_DELETE = ("delete", "delete_fsync")
NAMES: tuple[str, ...] = (
    *(f"{kind}.{operation}" for kind in ("chunk", "manifest") for operation in _WRITE + _DELETE),
    "piece.delete",
    "piece.delete_fsync",
    "temporary.delete",
    "stage.mkdir",
    "stage.data",
    "stage.delete",
)


@dataclasses.dataclass(slots=True)
class _Armed:
    name: str
    count: int  # passes until it acts
    action: str
    times: int  # how often it acts from then on


_lock = threading.Lock()
_armed: _Armed | None = None
_recorded: list[str] | None = None


def hit(name: str) -> bool:
    """Passes `name`. True asks the caller to leave half of its work behind and then call `die` (action "tear").

    "exit" ends the process here as a kill would; "raise" is an I/O error, of the kind that is tried again, "full" is
    a disk without space, which is not.
    """
    if _armed is None and _recorded is None:
        return False
    assert name in NAMES, name
    with _lock:
        if _recorded is not None:
            _recorded.append(name)
        if _armed is None or _armed.name != name:
            return False
        _armed.count -= 1
        if _armed.count > 0 or -_armed.count >= _armed.times:
            return False
        action = _armed.action
    if action == "exit":
        die()
    if action in ("raise", "full"):
        raise OSError(errno.EIO if action == "raise" else errno.ENOSPC, f"failpoint {name}")
    return True


def die() -> None:
    """Ends the process at once: no cleanup, no buffers flushed."""
    os._exit(EXIT_CODE)


def arm(point: str | None, *, times: int = 1) -> None:
    """Arms "name:count:action", for instance "chunk.rename:2:exit": at the second pass. None disarms."""
    global _armed
    if point is None:
        _armed = None
        return
    name, count, action = point.split(":")
    if name not in NAMES or action not in ACTIONS or int(count) < 1:
        raise ValueError(f"no such failpoint: {point!r}; it is name:count:action with actions {', '.join(ACTIONS)}")
    _armed = _Armed(name, int(count), action, times)


@contextlib.contextmanager
def arm_inside(point: str, *, times: int = 1) -> Iterator[None]:
    """Armed inside the block only."""
    arm(point, times=times)
    try:
        yield
    finally:
        arm(None)


@contextlib.contextmanager
def recording() -> Iterator[list[str]]:
    """The names that are passed inside the block, in order."""
    global _recorded
    _recorded = []
    try:
        yield _recorded
    finally:
        _recorded = None
