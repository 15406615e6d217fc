"""Connections that have not proved themselves yet: how many there may be, who goes when there are more, and how often
that is worth a line in the log.

Whoever can reach an address can open connections and say nothing. That must cost others nothing: there is always room
for one more, because somebody else goes, from the address that has the most of them and of those who have said nothing
the oldest.
"""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import socket
import struct
from collections import Counter
from typing import Any, Protocol

log = logging.getLogger("regrow.transport")

# Too small: processes that start together turn each other away, and dial again. Too large: file descriptors.
STRANGERS_MAX = 256
STRANGERS_PER_ADDRESS_MAX = 128  # Of these from one address; all of a user on Unix sockets.
FAILURES_LOG_SECONDS = 1.0  # Between two lines about failed handshakes. Too small: a scan of ports fills the disk.


class Stranger(Protocol):
    """One of them, as far as it matters here."""

    has_spoken: bool


class Strangers:
    """Who they are, by age, and from where."""

    def __init__(self) -> None:
        self._addresses: dict[Any, str] = {}  # the oldest first
        self._counts: Counter[str] = Counter()

    def __len__(self) -> int:
        return len(self._addresses)

    def add(self, stranger: Stranger, address: str) -> Any:
        """Takes one in. Returns who has to go for it, and does not count any more; None: there was room."""
        crowd = None
        if self._counts[address] >= STRANGERS_PER_ADDRESS_MAX:
            crowd = address
        elif len(self._addresses) >= STRANGERS_MAX:
            crowd = self._counts.most_common(1)[0][0]
        gone = None if crowd is None else self._choose(crowd)
        if gone is not None:
            self.discard(gone)
        self._addresses[stranger] = address
        self._counts[address] += 1
        return gone

    def discard(self, stranger: Stranger) -> None:
        """It has proved itself, or is gone."""
        address = self._addresses.pop(stranger, None)
        if address is not None:
            self._counts[address] -= 1
            if not self._counts[address]:
                del self._counts[address]

    def _choose(self, crowd: str) -> Any:
        there = [stranger for stranger, address in self._addresses.items() if address == crowd]
        return next((stranger for stranger in there if not stranger.has_spoken), there[0])


def read_address(sock: Any) -> str:
    """Where somebody comes from, as far as it can be told apart: a host, for IPv6 its network, or a local user."""
    if sock is None:
        return "unknown"
    if sock.family == socket.AF_UNIX:
        if not hasattr(socket, "SO_PEERCRED"):
            return "unix"
        _, user, _ = struct.unpack("3i", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i")))
        return f"user {user}"
    try:
        host = ipaddress.ip_address(sock.getpeername()[0].partition("%")[0])
    except (OSError, ValueError):
        return "unknown"
    # Whoever has one address of IPv6 usually has the 2**64 beside it.
    return str(ipaddress.ip_network((host, 64), strict=False)) if host.version == 6 else str(host)


class FailureLog:
    """One line in a while about failed handshakes, and how many were left out since the last."""

    def __init__(self) -> None:
        self._left_out = 0
        self._last = ""
        self._pause: asyncio.TimerHandle | None = None

    def report(self, reason: str) -> None:
        if self._pause is not None:
            self._left_out += 1
            self._last = reason
            return
        log.info("a connection ended before its handshake: %s", reason)
        self._pause = asyncio.get_running_loop().call_later(FAILURES_LOG_SECONDS, self._resume)

    def _resume(self) -> None:
        self._pause = None
        if reason := self._take_left_out():
            self.report(reason)

    def _take_left_out(self) -> str:
        left_out, self._left_out = self._left_out, 0
        if left_out < 2:
            return self._last if left_out else ""
        return f"{self._last} (and {left_out - 1} more since the last line)"

    def close(self) -> None:
        if self._pause is not None:
            self._pause.cancel()
        if reason := self._take_left_out():
            log.info("a connection ended before its handshake: %s", reason)
