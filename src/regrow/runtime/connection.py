"""One socket: first a handshake, then the frames of a link, sealed or not, until it ends.

What is told here by sockets and timers becomes calls of the `Endpoint` that the connection belongs to; links, fences
and dialing are its business (`runtime/transport.py`). The rule to keep: nothing of the other side reaches the endpoint
before the handshake is complete, and of a sealed connection nothing whose tag is wrong. Every wait has a bound that is
named below; when it is over the connection ends, with a reason, and whoever dialed dials again.
"""

from __future__ import annotations

import asyncio
import secrets
import socket
from typing import TYPE_CHECKING, Any

from regrow.core.framing import LIMITS_STRANGER, Frame, FrameReader, encode
from regrow.core.framing import Stamp as FrameStamp
from regrow.core.identity import FOUND_AGAIN, Identity
from regrow.core.link import Acceptor, Initiator, Link
from regrow.core.messages import Ack, Message, Refused
from regrow.errors import ConnectionLost, ProtocolError, Refusal
from regrow.runtime.seal import Seal
from regrow.runtime.strangers import read_address

if TYPE_CHECKING:
    from regrow.runtime.transport import Endpoint

# Until the first byte of somebody who connected, who is asked for it at once. Too small: a busy machine is taken for a
# silent one, which dials again. Too large: idle connections take the places of others.
FIRST_BYTE_SECONDS_MAX = 2.0
HANDSHAKE_SECONDS_MAX = 20.0  # For all of it. Too small: a busy machine is taken for a silent one.
# A peer that does not read, or does not close too, keeps a connection from ending this long; then it is cut.
CLOSE_SECONDS_MAX = 2.0
# A host that vanished answers nothing, and says nothing either: after KEEPALIVE_IDLE_SECONDS of silence it is asked,
# every KEEPALIVE_EVERY_SECONDS, and after KEEPALIVE_ASKED_MAX times without an answer the connection ends. Too small:
# a network that is down for a moment breaks connections, which are then resumed. Too large: nobody dials again.
KEEPALIVE_IDLE_SECONDS = 10
KEEPALIVE_EVERY_SECONDS = 5
KEEPALIVE_ASKED_MAX = 3
UNACKNOWLEDGED_SECONDS_MAX = 30  # The same for what was sent and is not acknowledged by the other host.
SOCKET_BUFFER_BYTES = 4 << 20  # Too small: a batch needs many wake-ups. The kernel may grant less.
UNHEARD_BYTES = 1 << 16
UNREAD_REPLY_BYTES_MAX = 32 << 20  # A worker that does not read its replies is not read from.


class Connection(asyncio.BufferedProtocol):
    """One socket of an endpoint. `expected`: who was dialed; None: somebody dialed us."""

    def __init__(self, endpoint: Endpoint, *, expected: Identity | None) -> None:
        loop = asyncio.get_running_loop()
        self._loop = loop
        self._heard_at = loop.time()
        self._endpoint = endpoint
        self._expected = expected
        self.accepted = expected is None
        self.has_spoken = False
        self._link: Link | None = None
        self._reader = FrameReader(limits=LIMITS_STRANGER)
        self._seal_out: Seal | None = None
        self._transport: Any = None
        self.reason = "the connection was closed by the other side"
        # The other side said that it does not want us; or, then always RETRY, it is not what we can talk to.
        self.refusal: Refusal | None = None
        self._handshake: Acceptor | Initiator | None = None  # from when there is a socket
        self._deadline: asyncio.TimerHandle | None = None  # while the handshake is not complete
        self._lingering: asyncio.TimerHandle | None = None
        self._unheard: memoryview | None = None  # where bytes go that nobody listens to any more
        self.opened: asyncio.Future[None] = loop.create_future()
        self.closed: asyncio.Future[None] = loop.create_future()

    # --- asyncio's side ---

    def connection_made(self, transport: Any) -> None:
        self._transport = transport
        self._endpoint.connections.add(self)
        sock = transport.get_extra_info("socket")
        is_remote = sock is None or sock.family != socket.AF_UNIX
        if sock is not None:
            _set_options(sock)
        transport.set_write_buffer_limits(high=UNREAD_REPLY_BYTES_MAX)
        self._handshake = self._build_handshake(seals=self._endpoint.wants_seal(is_remote=is_remote))
        self._limit_time(FIRST_BYTE_SECONDS_MAX if self.accepted else HANDSHAKE_SECONDS_MAX)
        if self.accepted:
            gone = self._endpoint.strangers.add(self, read_address(sock))
            if gone is not None:
                gone.fail("too many connections are waiting for their handshake")
        for message in self._handshake.start():
            self.write(message, FrameStamp())

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._reader.buffer() if self._unheard is None else self._unheard

    def buffer_updated(self, nbytes: int) -> None:
        if self._unheard is not None:
            return
        self._heard_at = self._loop.time()
        if not self.has_spoken:
            self.has_spoken = True
            self._limit_time(HANDSHAKE_SECONDS_MAX)
        try:
            for frame in self._reader.advance(nbytes):
                if self._is_closing():
                    return
                if isinstance(frame.message, Refused) and self._is_about_us(frame.message):
                    return
                if self._link is None:
                    self._on_handshake(frame)
                    continue
                self._endpoint.bytes_in += frame.wire_bytes
                if self._link.accept(frame.stamp, frame.wire_bytes):
                    self._endpoint.on_message(self._link.peer, frame.message)
            # After the deliveries: a reply says as much.
            if self._link is not None and self._link.acknowledgement_due:
                self.write(Ack(), self._link.acknowledgement())
        except ProtocolError as error:
            self.refusal = Refusal.RETRY
            self.fail(error.message, tell=error.refusal)

    def pause_writing(self) -> None:
        if self._is_throttled():
            self._transport.pause_reading()

    def resume_writing(self) -> None:
        if self._is_throttled() and not self._is_closing():
            self._transport.resume_reading()

    def _is_throttled(self) -> bool:
        link = self._link
        return self._endpoint.throttles_workers and link is not None and link.peer.role == "worker"

    def eof_received(self) -> bool:
        return False

    def connection_lost(self, error: Exception | None) -> None:
        self._end_handshake()
        if self._lingering is not None:
            self._lingering.cancel()
        self._endpoint.connections.discard(self)
        self.closed.set_result(None)
        if error is not None:
            self.reason = f"{self.reason} ({error})" if str(error) else self.reason
        if not self.opened.done():
            lost = ConnectionLost(f"cannot open a link: {self.reason}", refusal=self.refusal)
            self.opened.set_exception(lost)
            self.opened.exception()  # if nobody waits for it, that is no mistake
        if self._link is not None:
            self._endpoint.detach(self, self._link.peer)
        else:
            self._endpoint.failures.report(self.reason)

    # --- our side ---

    @property
    def quiet_seconds(self) -> float:
        """Since anything came."""
        return self._loop.time() - self._heard_at

    def start(self, link: Link) -> None:
        """The handshake is complete, and this link goes on from here."""
        self._end_handshake()
        self._link = link
        self._reader.limits = self._endpoint.limits
        place, peer = self._endpoint.place, link.peer
        if place is not None:
            self._reader.place = lambda cls, meta, sizes: place(peer, cls, meta, sizes)
            self._reader.placed = link.expects
        self.opened.set_result(None)

    def write(self, message: Message, stamp: FrameStamp) -> None:
        if self._is_closing():
            return
        buffers = encode(message, stamp, self._seal_out)
        self._endpoint.bytes_out += sum(len(buffer) for buffer in buffers)
        self._transport.writelines(buffers)

    def close(self) -> None:
        self.reason = "closed here"
        self._finish()

    def abort(self) -> None:
        self._transport.abort()

    def forsake(self) -> None:
        """Nobody waits for this handshake any more."""
        self._end_handshake()
        if self._transport is not None:
            self.abort()

    def fail(self, reason: str, tell: Refusal | None = None) -> None:
        """Ends this connection for `reason`, and tells the other side what that means for it, if `tell` says so. A
        stranger is not told anything but the reason."""
        self.reason = reason
        if self._transport is None or self._is_closing():
            return
        if tell is None:
            self._close_softly()
        elif self._link is not None:
            self.write(Refused(reason=reason[:4000], kind=tell), self._link.acknowledgement())
            self._finish()
        elif self._handshake is not None:
            self.write(self._handshake.refuse(reason[:4000], tell), FrameStamp())
            self._close_softly()

    def _finish(self) -> None:
        """Closes after what was written has arrived. Until the other side has closed as well we go on reading,
        but not listening: closing with unread bytes resets a connection, and the last words are lost."""
        if self._link is None or self._is_closing():
            self._close_softly()
            return
        self._unheard = memoryview(bytearray(UNHEARD_BYTES))
        self._linger()
        try:
            self._transport.resume_reading()
            self._transport.write_eof()
        except (OSError, RuntimeError):
            self._transport.close()

    def _close_softly(self) -> None:
        """After what was written has left, but in any case soon."""
        self._linger()
        self._transport.close()

    def _linger(self) -> None:
        if self._lingering is None and not self.closed.done():
            self._lingering = asyncio.get_running_loop().call_later(CLOSE_SECONDS_MAX, self.abort)

    def _is_closing(self) -> bool:
        return self._unheard is not None or bool(self._transport.is_closing())

    # --- The handshake ---

    def _build_handshake(self, *, seals: bool) -> Acceptor | Initiator:
        endpoint, nonce = self._endpoint, secrets.token_bytes(32)
        expected = self._expected
        if expected is None:
            return Acceptor(token=endpoint.token, local=endpoint.local, nonce=nonce, admit=endpoint.admit, seals=seals)
        return Initiator(
            token=endpoint.token,
            local=endpoint.local,
            nonce=nonce,
            expected=expected,
            received=lambda: endpoint.count_received(expected),
            or_newer=expected.role in FOUND_AGAIN,
            seals=seals,
        )

    def _on_handshake(self, frame: Frame) -> None:
        handshake = self._handshake
        if handshake is None:
            raise ProtocolError("a frame before the handshake has begun")
        for reply in handshake.receive(frame.message):
            self.write(reply, FrameStamp())
        opening = handshake.opening
        if opening is None:
            return
        if opening.sealed:
            self._seal_out, self._reader.seal = Seal(opening.key_out), Seal(opening.key_in)
        self._endpoint.attach(self, opening.peer, opening.peer_received)

    def _is_about_us(self, refused: Refused) -> bool:
        """Takes a refusal, unless it is a stranger's: those have nothing to refuse, and their words do not belong in
        our log."""
        if self._link is not None:
            self.refusal = refused.kind
        elif isinstance(self._handshake, Initiator):
            self.refusal = self._handshake.judge(refused)
        else:
            return False
        self.fail(f"refused: {refused.reason}")
        return True

    def _limit_time(self, seconds: float) -> None:
        """So long, from now, may the handshake take; afterwards there is no limit any more."""
        if self._link is None:
            if self._deadline is not None:
                self._deadline.cancel()
            loop = asyncio.get_running_loop()
            self._deadline = loop.call_later(seconds, self.fail, "no valid handshake in time")

    def _end_handshake(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None
        if self.accepted:
            self._endpoint.strangers.discard(self)


def _set_options(sock: Any) -> None:
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SOCKET_BUFFER_BYTES)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, SOCKET_BUFFER_BYTES)
    if sock.family not in (socket.AF_INET, socket.AF_INET6):
        return
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    wanted = {
        "TCP_KEEPIDLE": KEEPALIVE_IDLE_SECONDS,
        "TCP_KEEPINTVL": KEEPALIVE_EVERY_SECONDS,
        "TCP_KEEPCNT": KEEPALIVE_ASKED_MAX,
        "TCP_USER_TIMEOUT": 1000 * UNACKNOWLEDGED_SECONDS_MAX,
    }
    for name, value in wanted.items():
        if hasattr(socket, name):  # not every system has every one
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
