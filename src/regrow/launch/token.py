"""The token of a run in a file: for those who are started by somebody else, each on a host of its own.

It is a secret that everybody of a run holds and nobody else may read, so a file that others can read is refused, as one
that is too short is. It goes from here into memory, and neither into command lines nor environments nor logs.
"""

from __future__ import annotations

import os
import secrets
import stat
from pathlib import Path

from regrow.errors import UserError

TOKEN_BYTES = 32
HINT = "`regrow lead --new-token FILE` makes one; copy it to all hosts, readable by its owner alone (chmod 600)"


def read_token(path: str) -> str:
    """In hexadecimal. UserError says what is wrong with the file, and never what is in it."""
    try:
        with open(path, "rb") as file:
            found = os.fstat(file.fileno())
            text = file.read(4096)
    except OSError as error:
        raise UserError(f"cannot read the token file {path}: {error.strerror}", hint=HINT) from None
    if not stat.S_ISREG(found.st_mode):
        raise UserError(f"{path} is not a file", hint=HINT)
    if found.st_uid not in (os.getuid(), 0):
        raise UserError(f"the token file {path} belongs to another user", hint=HINT)
    if found.st_mode & 0o077:
        raise UserError(f"others can read the token file {path} (mode {found.st_mode & 0o777:04o})", hint=HINT)
    try:
        token = bytes.fromhex(text.decode().strip())
    except ValueError:
        token = b""
    if len(token) != TOKEN_BYTES:
        raise UserError(f"{path} holds no token: {2 * TOKEN_BYTES} hexadecimal digits", hint=HINT)
    return token.hex()


def make_token(path: str) -> None:
    """A new one in a new file."""
    try:
        number = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except OSError as error:
        raise UserError(f"cannot make {path}: {error.strerror}", hint="name a file that is not there yet") from None
    with os.fdopen(number, "w") as file:
        file.write(secrets.token_hex(TOKEN_BYTES) + "\n")
    assert Path(path).stat().st_mode & 0o077 == 0
