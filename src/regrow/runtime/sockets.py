"""Where the sockets of a run are: a directory of its own, made before anything starts, and gone afterwards.

A directory in which no socket can be made is an error before the first process. One that vanishes later, or fills up,
ends nothing: links that stand need no file. Whoever listens makes its file again (`runtime/serve.py`), and a new server
for which there is no room listens at a port (`launch/processes.py`). Only a coordinator's successor must be where its
predecessor was.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import socket
import tempfile
import time
from pathlib import Path

from regrow.checkpoint.private import make_private
from regrow.errors import UserError

SOCKET_PARENT_BYTES_MAX = 60  # a Unix socket's whole path has about 100 bytes
SOCKET_PREFIX = "regrow-s-"
SOCKET_AGE_SECONDS = 600.0


class SocketDir:
    """A private directory for the sockets of one run, gone afterwards.

    A launcher that was killed leaves its directory behind, but no longer holds the lock on it: the next one
    sweeps it up.
    """

    def __init__(self) -> None:
        parent = Path(tempfile.gettempdir())
        if len(os.fsencode(parent)) > SOCKET_PARENT_BYTES_MAX:
            parent = Path("/tmp")
        self.sweep(parent, age_seconds=SOCKET_AGE_SECONDS)
        hint = "TMPDIR=DIRECTORY chooses another place, --transport tcp needs none"
        # mkdtemp makes it 0700: the token keeps strangers out of the talk, this keeps them from the door.
        try:
            self.path = Path(tempfile.mkdtemp(prefix=SOCKET_PREFIX, dir=parent))
        except OSError as error:
            raise UserError(f"cannot make a directory for sockets in {parent}: {error.strerror}", hint=hint) from None
        if problem := prepare_sockets(self.path):
            shutil.rmtree(self.path, ignore_errors=True)
            raise UserError(f"cannot make sockets in {parent}: {problem}", hint=hint)
        self._lock = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # whoever sweeps locks none that is young

    def __enter__(self) -> SocketDir:
        return self

    def __exit__(self, *_: object) -> None:
        shutil.rmtree(self.path, ignore_errors=True)
        os.close(self._lock)

    @staticmethod
    def sweep(parent: Path, *, age_seconds: float) -> None:
        """Removes what killed launchers left. Young ones stay: their owner may not have locked them yet."""
        for path in parent.glob(f"{SOCKET_PREFIX}*"):
            with contextlib.suppress(OSError):  # somebody else's, in use, or swept by another launcher
                lock = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
                try:
                    found = os.fstat(lock)
                    if found.st_uid == os.getuid() and found.st_mtime <= time.time() - age_seconds:
                        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                        shutil.rmtree(path)
                finally:
                    os.close(lock)


def prepare_sockets(directory: Path) -> str | None:
    """Makes the directory again should it be gone. Why no socket of ours can be made in it, or None; also where a file
    system, an access list or somebody else has made it something that others may enter."""
    try:
        make_private(directory)
        trial = directory / f"trial-{os.getpid()}"  # others may look at the same time
        trial.unlink(missing_ok=True)
        with socket.socket(socket.AF_UNIX) as door:
            door.bind(str(trial))
        trial.unlink()
    except UserError as error:
        return error.message
    except OSError as error:
        return error.strerror or str(error)
    return None
