"""Lines over links: an endpoint on an event loop in a thread of its own, for those who wait in another way.

What the endpoint tells becomes an event, handed to `hear` on that thread; whoever is told puts it into a queue. The
links are those of all other processes: the token is proved both ways, frames are sealed, and a connection that breaks
is resumed where it was.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any

import numpy as np

from regrow.core.identity import Identity
from regrow.core.messages import Message, Words
from regrow.errors import Refusal
from regrow.runtime.client import new_event_loop
from regrow.runtime.transport import Endpoint

CALL_SECONDS_MAX = 60.0  # for the thread to do what it was asked
LINE_BYTES_MAX = 64 << 20  # A longer one is a mistake.


@dataclass(frozen=True, slots=True, kw_only=True)
class Opened:
    """Somebody new is there."""

    peer: Identity


@dataclass(frozen=True, slots=True, kw_only=True)
class Heard:
    peer: Identity
    line: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Broken:
    """Its connection went; it may come back."""

    peer: Identity
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Resumed:
    """It came back, and nothing was lost."""

    peer: Identity


@dataclass(frozen=True, slots=True, kw_only=True)
class Shunned:
    """It will never talk to this process again."""

    peer: Identity
    reason: str


WireEvent = Opened | Heard | Broken | Resumed | Shunned


class Wires:
    """All links of this process that carry lines."""

    def __init__(self, *, local: Identity, token: bytes, hear: Callable[[WireEvent], None], tls: str = "off") -> None:
        self._local = local
        self._token = token
        self._hear = hear
        self._tls = tls
        self._loop = new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="wires", daemon=True)
        self._thread.start()
        self._call(self._start())

    def listen(self, address: str) -> str:
        return str(self._call(self._endpoint.listen(address)))

    def dial(self, peer: Identity, address: str) -> None:
        self._loop.call_soon_threadsafe(self._endpoint.dial, peer, address)

    def send(self, peer: Identity, line: bytes) -> None:
        """In order; kept while the connection is broken."""
        words = Words(text=np.frombuffer(line, np.uint8))
        self._loop.call_soon_threadsafe(self._endpoint.send, peer, words)

    def forget(self, peer: Identity) -> None:
        self._loop.call_soon_threadsafe(self._endpoint.forget, peer)

    def close(self) -> None:
        """After what was said has left. Calling it again does nothing."""
        if self._loop.is_closed():
            return
        with contextlib.suppress(TimeoutError):
            self._call(self._endpoint.close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(CALL_SECONDS_MAX)
        if not self._thread.is_alive():
            self._loop.close()

    async def _start(self) -> None:
        self._endpoint = Endpoint(
            local=self._local,
            token=self._token,
            section_bytes_max=LINE_BYTES_MAX,
            on_open=lambda peer: self._hear(Opened(peer=peer)),
            on_message=self._on_message,
            on_lost=lambda peer, reason: self._hear(Broken(peer=peer, reason=reason)),
            on_resumed=lambda peer: self._hear(Resumed(peer=peer)),
            on_fenced=self._on_fenced,
            tls=self._tls,
        )

    def _on_message(self, peer: Identity, message: Message) -> None:
        if isinstance(message, Words):
            self._hear(Heard(peer=peer, line=message.text.tobytes()))
        else:
            self._endpoint.refuse(peer, f"{type(message).__name__} is not for {self._local.role}s")

    def _on_fenced(self, peer: Identity, refusal: Refusal, reason: str) -> None:
        self._hear(Shunned(peer=peer, reason=reason))

    def _call(self, work: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(CALL_SECONDS_MAX)
