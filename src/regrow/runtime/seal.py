"""Tags for the frames of a connection: AES-256-GMAC, one key for each direction of each connection.

GMAC is GCM without anything to encrypt: what is authenticated is read where it lies, once, and nothing is copied. Its
one condition is that a key never sees the same nonce twice. A key belongs to one direction of one connection (both ends
put chance into it), and the nonce is the number of the frame and of the part within it, so that holds by counting.

Nothing here is secret but the key: frames are not encrypted.
"""

from __future__ import annotations

import struct
from typing import Any

from cryptography.hazmat.primitives.ciphers.aead import AESGCM

PIECE_BYTES_MAX = 1 << 30  # what is tagged in one go; the library takes less than 2 GiB
PARTS_MAX = 1 << 8  # of a frame, so that numbers of pieces and parts never meet

_NONCE = struct.Struct(">QI")


class Seal:
    """One direction of one connection, at one end of it."""

    def __init__(self, key: bytes) -> None:
        self._cipher = AESGCM(key)
        self._frame = 0

    def begin_frame(self) -> None:
        self._frame += 1

    def tag(self, part: int, data: Any) -> bytes:
        if len(data) <= PIECE_BYTES_MAX:
            return self._tag(part, data)
        view = memoryview(data)
        pieces = range(0, len(view), PIECE_BYTES_MAX)
        tags = [
            self._tag(part + PARTS_MAX * number, view[start : start + PIECE_BYTES_MAX])
            for number, start in enumerate(pieces, 1)
        ]
        return self._tag(part, b"".join(tags))

    def _tag(self, number: int, data: Any) -> bytes:
        return self._cipher.encrypt(_NONCE.pack(self._frame, number), b"", data)
