"""Directories that are ours alone.

In a directory for everybody, such as /tmp, somebody else may have made the one we want, or put a link in its place:
what we write there would be theirs to read, or to change. So a directory is made for us alone, or is known to be: ours,
not a link, and nobody else may enter. What is in it is then as safe as our own account.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path

from regrow.errors import UserError

PRIVATE_MODE = 0o700


def make_private(path: Path) -> None:
    """Makes a directory for us alone, or takes one that is; any other is a UserError. OSError if it cannot be made."""
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        path.mkdir(mode=PRIVATE_MODE)
    except FileExistsError:
        check_private(path)


def check_private(path: Path) -> None:
    """Raises UserError unless this is a directory that only we can enter."""
    if reason := _invalid_reason(path):
        hint = f"remove it, or choose another directory; one of your own: chmod 700 {path}"
        raise UserError(f"{path} is not private: {reason}", hint=hint)


def _invalid_reason(path: Path) -> str | None:
    found = path.lstat()  # not what it points to
    if stat.S_ISLNK(found.st_mode):
        return "it is a link"
    if not stat.S_ISDIR(found.st_mode):
        return "it is not a directory"
    if found.st_uid != os.getuid():
        return f"it belongs to user {found.st_uid}"
    if others := stat.S_IMODE(found.st_mode) & 0o077:
        return f"others may use it (mode {stat.S_IMODE(found.st_mode):o}, {others:03o} too much)"
    return None
