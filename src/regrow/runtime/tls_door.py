"""Listening for TLS: whoever is at its handshake is a stranger like any other, counted from the first moment.

The loops' own servers hand a connection over when TLS is through with it. Until then nobody would count it: a few
thousand connections that say nothing would take all files that a process may open, and tens of kilobytes each. So
connections are accepted here, join the strangers (`strangers.py`), and go when there are too many.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from typing import Any

from regrow.runtime.strangers import FailureLog, Strangers, read_address
from regrow.runtime.tls import TLS_SECONDS_MAX, Tls

# After the system had no file or memory for a connection. Too small: a busy loop. Too large: others dial again.
ACCEPT_PAUSE_SECONDS = 0.1
CROWDED = "too many connections are waiting for their handshake"


class Guest:
    """Somebody at the handshake of TLS."""

    def __init__(self, task: asyncio.Task[Any]) -> None:
        self._task = task
        self.has_spoken = False  # as far as is known

    def fail(self, reason: str) -> None:
        self._task.cancel(reason)


class TlsDoor:
    """One address, until it is closed. `accept` makes what a connection becomes when TLS is through with it."""

    def __init__(
        self,
        host: str,
        port: int,
        *,
        accept: Callable[[], asyncio.BaseProtocol],
        tls: Tls,
        close_seconds_max: float,
        backlog: int,
        strangers: Strangers,
        failures: FailureLog,
    ) -> None:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._socket = socket.create_server((host, port), family=family, backlog=backlog)
        self._socket.setblocking(False)
        self.port = int(self._socket.getsockname()[1])
        self._accept, self._tls, self._close_seconds_max = accept, tls, close_seconds_max
        self._strangers, self._failures = strangers, failures
        self._guests: set[asyncio.Task[None]] = set()
        self._listening = asyncio.get_running_loop().create_task(self._listen())

    def close(self) -> None:
        for task in (self._listening, *self._guests):
            task.cancel()

    async def wait_closed(self) -> None:
        try:
            await asyncio.wait([self._listening, *self._guests])
        finally:
            self._socket.close()

    async def _listen(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                accepted, _ = await loop.sock_accept(self._socket)
            except OSError:
                await asyncio.sleep(ACCEPT_PAUSE_SECONDS)
                continue
            guest = loop.create_task(self._let_in(accepted))
            self._guests.add(guest)
            guest.add_done_callback(self._guests.discard)

    async def _let_in(self, accepted: socket.socket) -> None:
        task = asyncio.current_task()
        assert task is not None
        guest = Guest(task)
        try:
            gone = self._strangers.add(guest, read_address(accepted))
            if gone is not None:
                gone.fail(CROWDED)
                self._failures.report(CROWDED)
            await asyncio.get_running_loop().connect_accepted_socket(
                self._accept,
                accepted,
                ssl=self._tls.accepting,
                ssl_handshake_timeout=TLS_SECONDS_MAX,
                ssl_shutdown_timeout=self._close_seconds_max,
            )
        except (OSError, TimeoutError) as error:  # whoever it was does not speak TLS, or has another certificate
            self._failures.report(f"no TLS: {getattr(error, 'reason', None) or error or type(error).__name__}")
        finally:
            self._strangers.discard(guest)
