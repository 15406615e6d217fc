"""Links over TCP and Unix sockets: opens them, proves both ends, carries frames, reports losses.

Payloads are not copied in Python: a frame leaves as one scatter/gather write of the arrays it refers to, and
sections are received into the memory where they are wanted. An `Endpoint` runs on one event loop and is used
from that loop's thread only.
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import socket
from collections.abc import Callable
from typing import Any

import numpy as np

from regrow.core.framing import LIMITS_STRANGER, FrameReader, Limits, encode
from regrow.core.framing import Stamp as FrameStamp
from regrow.core.link import Acceptor, Identity, Initiator, Link
from regrow.core.messages import Message, Refused
from regrow.errors import ConnectionLost, ProtocolError, UserError

log = logging.getLogger("regrow.transport")

HANDSHAKE_SECONDS_MAX = 20.0  # Too small: a busy machine is taken for a silent one.
CLOSE_SECONDS_MAX = 5.0  # A peer that does not read keeps us from leaving this long.
STRANGERS_MAX = 256  # Connections that have not proved themselves yet; more are turned away.
META_BYTES_MAX = 4 << 20  # A view of a very large job; everything else is far below.
SOCKET_BUFFER_BYTES = 4 << 20  # Too small: a batch needs many wake-ups. The kernel may grant less.
UNREAD_REPLY_BYTES_MAX = 32 << 20  # A peer that does not read its replies is not read from.

Place = Callable[
    [Identity, type[Message], tuple[Any, ...], tuple[int, ...]], "list[np.ndarray[Any, Any]] | None"
]


class Endpoint:
    """All links of one process. The three callbacks are called on the event loop."""

    def __init__(
        self,
        *,
        local: Identity,
        token: bytes,
        section_bytes_max: int,
        on_open: Callable[[Identity], None],
        on_message: Callable[[Identity, Message], None],
        on_lost: Callable[[Identity, str], None],
        place: Place | None = None,
        throttles_readers: bool = False,
    ) -> None:
        self.local = local
        self.token = token
        self.limits = Limits(meta_bytes_max=META_BYTES_MAX, section_bytes_max=section_bytes_max)
        self.on_open = on_open
        self.on_message = on_message
        self.on_lost = on_lost
        self.place = place
        # Only servers do this. If both ends stopped reading while they wait to write, neither would go on.
        self.throttles_readers = throttles_readers
        self.bytes_in = 0
        self.bytes_out = 0
        self.links: dict[Identity, Connection] = {}
        self.strangers = 0
        self.connections: set[Connection] = set()  # the links, and those still on the way to be one
        self._servers: list[asyncio.AbstractServer] = []
        self._unix_paths: list[str] = []

    async def listen(self, address: str) -> str:
        """Accepts links at `unix:PATH` or `tcp:HOST:PORT` (0: any free port); returns the actual address."""
        loop = asyncio.get_running_loop()
        scheme, host, port = parse_address(address)
        try:
            if scheme == "unix":
                server = await loop.create_unix_server(lambda: Connection(self, expected=None), path=host)
                self._unix_paths.append(host)
            else:
                server = await loop.create_server(lambda: Connection(self, expected=None), host, port)
                port = server.sockets[0].getsockname()[1]
                address = f"tcp:{host}:{port}"
        except OSError as error:
            raise UserError(
                f"cannot listen at {address}: {error.strerror or error}",
                hint="Another process may use that address; port 0 takes a free one.",
            ) from None
        self._servers.append(server)
        return address

    async def connect(self, address: str, expected: Identity) -> None:
        """Opens a link to `expected` and returns when both ends have proved themselves."""
        loop = asyncio.get_running_loop()
        connection = Connection(self, expected=expected)
        scheme, host, port = parse_address(address)
        try:
            if scheme == "unix":
                await loop.create_unix_connection(lambda: connection, path=host)
            else:
                await loop.create_connection(lambda: connection, host, port)
        except OSError as error:
            raise ConnectionLost(f"cannot reach {expected} at {address}: {error.strerror or error}") from None
        await connection.opened

    def send(self, peer: Identity, message: Message) -> None:
        """Queues a message; to a peer that is gone it is dropped (its loss has been or will be reported)."""
        link = self.links.get(peer)
        if link is not None:
            link.send(message)

    def refuse(self, peer: Identity, reason: str) -> None:
        """Says why and closes that link."""
        link = self.links.get(peer)
        if link is not None:
            link.fail(reason, tell=True)

    async def close(self) -> None:
        """Stops listening, then closes every connection after what was queued has left."""
        for server in self._servers:
            server.close()
        closing = [connection.closed for connection in self.connections]
        for connection in list(self.connections):
            connection.close()
        if closing:
            _, stuck = await asyncio.wait(closing, timeout=CLOSE_SECONDS_MAX)
            for connection in list(self.connections):
                connection.abort()
            if stuck:
                await asyncio.wait(stuck)
        for server in self._servers:
            await server.wait_closed()
        for path in self._unix_paths:
            if os.path.exists(path):
                os.unlink(path)


class Connection(asyncio.BufferedProtocol):
    """One socket: first a handshake, then numbered frames."""

    def __init__(self, endpoint: Endpoint, *, expected: Identity | None) -> None:
        loop = asyncio.get_running_loop()
        self._endpoint = endpoint
        self._accepted = expected is None
        self._link: Link | None = None
        self._reader = FrameReader(limits=LIMITS_STRANGER)
        self._transport: Any = None
        self._reason = "the connection was closed by the other side"
        nonce = secrets.token_bytes(32)
        self._handshake: Acceptor | Initiator
        if expected is None:
            self._handshake = Acceptor(token=endpoint.token, local=endpoint.local, nonce=nonce)
        else:
            self._handshake = Initiator(
                token=endpoint.token, local=endpoint.local, nonce=nonce, expected=expected
            )
        self._expected = expected
        self._deadline: asyncio.TimerHandle | None = loop.call_later(
            HANDSHAKE_SECONDS_MAX, self.fail, "no valid handshake in time"
        )
        self.opened: asyncio.Future[None] = loop.create_future()
        self.closed: asyncio.Future[None] = loop.create_future()

    # --- asyncio's side ---

    def connection_made(self, transport: Any) -> None:
        self._transport = transport
        self._endpoint.connections.add(self)
        sock = transport.get_extra_info("socket")
        if sock is not None:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SOCKET_BUFFER_BYTES)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, SOCKET_BUFFER_BYTES)
            if sock.family in (socket.AF_INET, socket.AF_INET6):
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        transport.set_write_buffer_limits(high=UNREAD_REPLY_BYTES_MAX)
        if self._accepted:
            self._endpoint.strangers += 1
            if self._endpoint.strangers > STRANGERS_MAX:
                self.fail("too many connections are waiting for their handshake")
                return
        for message in self._handshake.start():
            self._write(message, FrameStamp())

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._reader.buffer()

    def buffer_updated(self, nbytes: int) -> None:
        try:
            for frame in self._reader.advance(nbytes):
                if self._transport.is_closing():
                    return
                # A stranger has nothing to refuse, and its words do not belong in our log.
                if isinstance(frame.message, Refused) and not (self._accepted and self._link is None):
                    self.fail(f"refused: {frame.message.reason}")
                    return
                if self._link is None:
                    self._on_handshake(frame.message)
                    continue
                self._endpoint.bytes_in += frame.wire_bytes
                if self._link.accept(frame.stamp):
                    self._endpoint.on_message(self._link.peer, frame.message)
        except ProtocolError as error:
            self.fail(error.message, tell=True)

    def pause_writing(self) -> None:
        if self._endpoint.throttles_readers:
            self._transport.pause_reading()

    def resume_writing(self) -> None:
        if self._endpoint.throttles_readers and not self._transport.is_closing():
            self._transport.resume_reading()

    def eof_received(self) -> bool:
        return False

    def connection_lost(self, error: Exception | None) -> None:
        self._handshake_over()
        self._endpoint.connections.discard(self)
        self.closed.set_result(None)
        if error is not None:
            self._reason = f"{self._reason} ({error})" if str(error) else self._reason
        if not self.opened.done():
            self.opened.set_exception(ConnectionLost(f"cannot open a link: {self._reason}"))
            self.opened.exception()  # if nobody waits for it, that is no mistake
        link = self._link
        if link is not None and self._endpoint.links.get(link.peer) is self:
            del self._endpoint.links[link.peer]
            self._endpoint.on_lost(link.peer, self._reason)
        elif link is None:
            log.info("a connection ended before its handshake: %s", self._reason)

    # --- our side ---

    def send(self, message: Message) -> None:
        assert self._link is not None
        self._write(message, self._link.stamp())

    def close(self) -> None:
        self._reason = "closed here"
        self._transport.close()

    def abort(self) -> None:
        self._transport.abort()

    def fail(self, reason: str, tell: bool = False) -> None:
        """Ends this connection for `reason`. A stranger is not told anything but the reason."""
        self._reason = reason
        if self._transport is None or self._transport.is_closing():
            return
        if tell:
            stamp = self._link.stamp() if self._link is not None else FrameStamp()
            self._write(Refused(reason=reason[:4000]), stamp)
        self._transport.close()

    def _write(self, message: Message, stamp: FrameStamp) -> None:
        if self._transport.is_closing():
            return
        buffers = encode(message, stamp)
        self._endpoint.bytes_out += sum(len(buffer) for buffer in buffers)
        self._transport.writelines(buffers)

    def _on_handshake(self, message: Message) -> None:
        for reply in self._handshake.receive(message):
            self._write(reply, FrameStamp())
        peer = self._handshake.peer
        if peer is None:
            return
        self._handshake_over()
        self._link = Link(local=self._endpoint.local, peer=peer)
        place = self._endpoint.place
        self._reader.limits = self._endpoint.limits
        if place is not None:
            self._reader.place = lambda cls, meta, sizes: place(peer, cls, meta, sizes)
        previous = self._endpoint.links.get(peer)
        if previous is not None:
            previous.fail(f"{peer} opened another connection")
        self._endpoint.links[peer] = self
        self.opened.set_result(None)
        self._endpoint.on_open(peer)

    def _handshake_over(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None
            if self._accepted:
                self._endpoint.strangers -= 1


def parse_address(address: str) -> tuple[str, str, int]:
    """("unix", path, 0) or ("tcp", host, port); anything else is a user's error."""
    scheme, _, rest = address.partition(":")
    if scheme == "unix" and rest:
        return "unix", rest, 0
    host, _, port = rest.rpartition(":")
    if scheme == "tcp" and host and port.isdecimal() and int(port) < 65536:
        return "tcp", host, int(port)
    raise UserError(f"{address!r} is not an address", hint="Addresses are unix:PATH or tcp:HOST:PORT.")
