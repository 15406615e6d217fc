"""Links over TCP and Unix sockets: opens them, proves both ends, carries frames, reports losses, resumes.

A `Link` belongs to two incarnations and outlives the connections that carry it. Whoever dials keeps dialing;
a connection that comes back goes on where the last one stopped, and its users notice nothing. An incarnation
that was forgotten, or followed by a newer one, is fenced: it is told so, and never heard again.

Payloads are not copied in Python: a frame leaves as one scatter/gather write of the arrays it refers to, and
sections are received into the memory where they are wanted. An `Endpoint` runs on one event loop and is used
from that loop's thread only. What its methods cause is reported later, never from within the call.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import os
import secrets
import socket
from collections.abc import Callable
from typing import Any

import numpy as np

from regrow.core.framing import LIMITS_STRANGER, Frame, FrameReader, Limits, encode
from regrow.core.framing import Stamp as FrameStamp
from regrow.core.identity import Identity
from regrow.core.link import Acceptor, Initiator, Link
from regrow.core.messages import Ack, Beat, Message, Refused
from regrow.errors import ConnectionLost, LocalProtocolError, ProtocolError, Refusal, UserError

log = logging.getLogger("regrow.transport")

HANDSHAKE_SECONDS_MAX = 20.0  # Too small: a busy machine is taken for a silent one.
CLOSE_SECONDS_MAX = 2.0  # A peer that does not read, or does not close too, keeps us from leaving this long.
DIAL_SECONDS_MIN = 0.01  # Pause before a connection is tried again; doubled each time it fails.
DIAL_SECONDS_MAX = 0.25  # Too large: a restarted peer is found late. Too small: a dead one costs time.
STRANGERS_MAX = 256  # Connections that have not proved themselves yet; more are turned away.
PEERS_MAX = 65536  # Incarnations remembered, alive or fenced; more are turned away.
META_BYTES_MAX = 4 << 20  # A view of a very large job; everything else is far below.
SOCKET_BUFFER_BYTES = 4 << 20  # Too small: a batch needs many wake-ups. The kernel may grant less.
UNHEARD_BYTES = 1 << 16
UNREAD_REPLY_BYTES_MAX = 32 << 20  # A worker that does not read its replies is not read from.

Place = Callable[[Identity, type[Message], tuple[Any, ...], tuple[int, ...]], "list[np.ndarray[Any, Any]] | None"]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Fence:
    """An incarnation that is over, and why: whoever comes in its name is told so."""

    incarnation: int
    refusal: Refusal
    reason: str

    def error(self) -> ProtocolError:
        return ProtocolError(self.reason, refusal=self.refusal)


def fence_replaced(peer: Identity) -> Fence:
    """A newer incarnation is in the place of this one."""
    reason = f"{peer} with incarnation {peer.incarnation} was replaced"
    return Fence(incarnation=peer.incarnation, refusal=Refusal.REPLACED, reason=reason)


@dataclasses.dataclass(slots=True, kw_only=True)
class Line:
    """What an endpoint knows of one incarnation."""

    link: Link  # knows whether it is new, open, broken or over
    connection: Connection | None = None
    lost: str | None = None  # why its connection went, as its users were told: once for each time
    refused: bool = False  # they were told a refusal, which is the last word


@dataclasses.dataclass(slots=True, kw_only=True)
class Dialing:
    """A peer that we keep connecting to."""

    expected: Identity
    address: str
    task: asyncio.Task[None] | None = None


class Endpoint:
    """All links of one process. The callbacks are called on the event loop.

    `on_open(peer)`: a new link. `on_lost(peer, reason)`: its connection went, or cannot be made; said once until
    it is back. `on_resumed(peer)`: it is back, and nothing was lost. `on_fenced(peer, refusal, reason)`: the peer will
    never talk to this process again, because it was replaced or has been refused.
    """

    def __init__(
        self,
        *,
        local: Identity,
        token: bytes,
        section_bytes_max: int,
        on_open: Callable[[Identity], None],
        on_message: Callable[[Identity, Message], None],
        on_lost: Callable[[Identity, str], None],
        on_resumed: Callable[[Identity], None] | None = None,
        on_fenced: Callable[[Identity, Refusal, str], None] | None = None,
        place: Place | None = None,
        throttles_workers: bool = False,
    ) -> None:
        self.local = local
        self.token = token
        self.limits = Limits(meta_bytes_max=META_BYTES_MAX, section_bytes_max=section_bytes_max)
        self.on_open = on_open
        self.on_message = on_message
        self.on_lost = on_lost
        self.on_resumed = on_resumed
        self.on_fenced = on_fenced
        self.place = place
        # Servers do this, and only to workers, who never do it: if both ends stopped reading while they wait to
        # write, neither would go on.
        self.throttles_workers = throttles_workers
        self.bytes_in = 0
        self.bytes_out = 0
        self.lines: dict[Identity, Line] = {}
        self.strangers = 0
        self.connections: set[Connection] = set()  # of the lines, and those still on the way to be one
        self._dials: dict[tuple[str, int], Dialing] = {}
        self._fences: dict[tuple[str, int], Fence] = {}  # of the newest incarnation that is over
        self._closed = False
        self._servers: list[asyncio.AbstractServer] = []
        self._unix_paths: dict[str, int] = {}  # and the inode that is ours

    @property
    def kept_bytes(self) -> int:
        """Sent or queued, and not acknowledged yet."""
        return sum(line.link.kept_bytes for line in self.lines.values())

    async def listen(self, address: str) -> str:
        """Accepts links at `unix:PATH` or `tcp:HOST:PORT` (0: any free port); returns the actual address."""
        loop = asyncio.get_running_loop()
        scheme, host, port = parse_address(address)
        try:
            if scheme == "unix":
                server = await loop.create_unix_server(lambda: Connection(self, expected=None), path=host)
                self._unix_paths[host] = os.stat(host).st_ino
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

    def dial(self, peer: Identity, address: str) -> None:
        """Connects to `peer`, again and again until it is forgotten. If it is a coordinator, a later incarnation
        of it will do: `on_open` says which one answered."""
        if self._closed or self._find_fence(peer) is not None:
            return
        self._forget_older(peer)
        self._line(peer)
        known = self._dials.get((peer.role, peer.id))
        if known is not None:
            known.address = address
            return
        dialing = Dialing(expected=peer, address=address)
        self._dials[peer.role, peer.id] = dialing
        dialing.task = asyncio.get_running_loop().create_task(self._keep_open(dialing))
        dialing.task.add_done_callback(_log_failure)

    async def connect(self, address: str, expected: Identity) -> Connection:
        """One attempt: returns when both ends have proved themselves, or raises ConnectionLost."""
        loop = asyncio.get_running_loop()
        connection = Connection(self, expected=expected)
        try:
            scheme, host, port = parse_address(address)
            if scheme == "unix":
                await loop.create_unix_connection(lambda: connection, path=host)
            else:
                await loop.create_connection(lambda: connection, host, port)
            await asyncio.wait([connection.opened])
        except (OSError, ValueError, UserError) as error:
            connection.forsake()
            detail = getattr(error, "strerror", None) or error
            raise ConnectionLost(f"cannot reach {expected} at {address}: {detail}") from None
        except asyncio.CancelledError:
            connection.forsake()
            raise
        connection.opened.result()
        return connection

    def send(self, peer: Identity, message: Message) -> None:
        """Sends a message, or keeps it until there is a connection. For an incarnation that is over it is dropped.
        One that nobody would accept raises here: sent, it would be sent again for ever."""
        largest = max((getattr(message, name).nbytes for name in message.SECTION_FIELDS), default=0)
        if largest > self.limits.section_bytes_max:
            raise LocalProtocolError(
                f"{type(message).__name__} for {peer} has a part of {largest} bytes, at most "
                f"{self.limits.section_bytes_max} are allowed",
                hint="Raise --frame-bytes-max, or lower --flush-bytes or --batch.",
            )
        line = self.lines.get(peer)
        if line is None:
            if self._closed or self._find_fence(peer) is not None:
                return
            line = self._line(peer)
        if line.connection is not None:
            line.connection.write(message, line.link.send(message))
        elif not isinstance(message, Beat):  # a sign of life is worth nothing later, and there would be many
            line.link.send(message)

    def refuse(self, peer: Identity, reason: str, refusal: Refusal = Refusal.FOR_GOOD) -> None:
        """Says why and ends that link for good."""
        if peer in self.lines:
            self._report_later(peer, reason)
            fence = Fence(incarnation=peer.incarnation, refusal=refusal, reason=reason)
            self._put_fence(peer, fence)
            self._drop(peer, fence)

    def forget(self, peer: Identity) -> None:
        """This incarnation, and all before it, are over: whatever is queued for it goes, and it is told so."""
        self._forget_older(peer)
        fence = fence_replaced(peer)
        self._put_fence(peer, fence)
        self._drop(peer, fence)

    async def close(self) -> None:
        """Stops listening, then closes every connection after what was written has left."""
        self._closed = True
        for server in self._servers:
            server.close()
        tasks = [dialing.task for dialing in self._dials.values() if dialing.task is not None]
        self._dials.clear()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
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
        for path, inode in self._unix_paths.items():
            # Not if a successor listens there by now: whoever was stopped for a while may end long after that.
            if os.path.exists(path) and os.stat(path).st_ino == inode:
                os.unlink(path)

    # --- Dialing ---

    async def _keep_open(self, dialing: Dialing) -> None:
        pause_seconds = DIAL_SECONDS_MIN
        while True:
            try:
                connection = await self.connect(dialing.address, dialing.expected)
            except ConnectionLost as error:
                refusal = error.refusal
                self._report_lost(dialing.expected, error.message, refusal)
                pause_seconds = min(2 * pause_seconds, DIAL_SECONDS_MAX)
            else:
                pause_seconds = DIAL_SECONDS_MIN
                await asyncio.wait([connection.closed])
                refusal = connection.refusal
            if refusal is not None and refusal.is_final:
                key = (dialing.expected.role, dialing.expected.id)
                if self._dials.get(key) is dialing:
                    del self._dials[key]
                return
            await asyncio.sleep(pause_seconds)

    def _report_lost(self, peer: Identity, reason: str, refusal: Refusal | None) -> None:
        line = self.lines.get(peer)
        is_final = refusal is not None and refusal.is_final
        # A refusal is worth telling even after a reset that came instead of it: it is the last word.
        if line is not None and (line.lost is None or (is_final and not line.refused)):
            line.lost, line.refused = reason, refusal is not None
            self.on_lost(peer, reason)
        if self.on_fenced is not None and refusal is not None and is_final:
            self.on_fenced(peer, refusal, reason)

    def _report_later(self, peer: Identity, reason: str) -> None:
        """For a line that is about to be dropped."""
        line = self.lines[peer]
        if not line.link.is_new and line.lost is None:
            asyncio.get_running_loop().call_soon(self.on_lost, peer, reason)

    # --- Lines and fences ---

    def _line(self, peer: Identity) -> Line:
        return self.lines.setdefault(peer, Line(link=Link(local=self.local, peer=peer)))

    def count_received(self, peer: Identity) -> int:
        """How many frames of this incarnation have arrived."""
        line = self.lines.get(peer)
        return line.link.received if line is not None else 0

    def admit(self, peer: Identity, peer_received: int) -> int:
        """May this peer, which has proved itself, go on from there? Then: how many of its frames have arrived."""
        if fence := self._find_fence(peer):
            raise fence.error()
        line = self.lines.get(peer)
        if line is None:
            if len(self.lines) + len(self._fences) >= PEERS_MAX:
                raise ProtocolError(f"more than {PEERS_MAX} peers")
            line = Line(link=Link(local=self.local, peer=peer))  # not remembered before it is open
        if reason := line.link.resume_invalid_reason(peer_received):
            raise ProtocolError(reason)
        return line.link.received

    def attach(self, connection: Connection, peer: Identity, peer_received: int) -> None:
        """A handshake is complete: the line of this peer goes on over this connection."""
        if fence := self._find_fence(peer):
            raise fence.error()
        dialing = self._dials.get((peer.role, peer.id))
        if dialing is not None and not connection.accepted:
            dialing.expected = peer
        self._forget_older(peer)
        line = self._line(peer)
        is_new = line.link.is_new
        unread = line.link.resume(peer_received)
        previous, line.connection = line.connection, connection
        if previous is not None:
            previous.abort()
        line.lost, line.refused = None, False
        connection.start(line.link)
        for stamp, message in unread:
            connection.write(message, stamp)
        if is_new:
            self.on_open(peer)
        elif self.on_resumed is not None:
            self.on_resumed(peer)

    def detach(self, connection: Connection, peer: Identity) -> None:
        """That connection is gone; the line stays, to be resumed."""
        line = self.lines.get(peer)
        if line is not None and line.connection is connection:
            line.connection = None
            line.link.lose_connection()
            self._report_lost(peer, connection.reason, connection.refusal)

    def _find_fence(self, peer: Identity) -> Fence | None:
        """Why this incarnation is over, if it is."""
        fence = self._fences.get((peer.role, peer.id))
        if fence is None or peer.incarnation > fence.incarnation:
            return None
        return fence if peer.incarnation == fence.incarnation else fence_replaced(peer)

    def _put_fence(self, peer: Identity, fence: Fence) -> None:
        if self._find_fence(peer) is None:
            self._fences[peer.role, peer.id] = fence

    def _forget_older(self, peer: Identity) -> None:
        """A newer incarnation is here or expected: those before it are over."""
        for other in list(self.lines):
            if (other.role, other.id) == (peer.role, peer.id) and other.incarnation < peer.incarnation:
                fence = fence_replaced(other)
                self._report_later(other, fence.reason)
                self._drop(other, fence)
        if peer.incarnation:
            older = Identity(role=peer.role, id=peer.id, incarnation=peer.incarnation - 1)
            self._put_fence(older, fence_replaced(older))

    def _drop(self, peer: Identity, fence: Fence) -> None:
        """This line is over, and its peer is told so."""
        line = self.lines.pop(peer, None)
        if line is not None:
            line.link.end()
            if line.connection is not None:
                line.connection.fail(fence.reason, tell=fence.refusal)
        dialing = self._dials.get((peer.role, peer.id))
        if dialing is not None and dialing.expected == peer:
            del self._dials[peer.role, peer.id]
            if dialing.task is not None:
                dialing.task.cancel()


class Connection(asyncio.BufferedProtocol):
    """One socket: first a handshake, then the frames of a link."""

    def __init__(self, endpoint: Endpoint, *, expected: Identity | None) -> None:
        loop = asyncio.get_running_loop()
        self._endpoint = endpoint
        self.accepted = expected is None
        self._link: Link | None = None
        self._reader = FrameReader(limits=LIMITS_STRANGER)
        self._transport: Any = None
        self.reason = "the connection was closed by the other side"
        self.refusal: Refusal | None = None  # the other side said that it does not want us
        nonce = secrets.token_bytes(32)
        self._handshake: Acceptor | Initiator
        # Says whom the numbers in a Hello are about: a coordinator may have been restarted since.
        self._hello_stamp = FrameStamp()
        if expected is None:
            self._handshake = Acceptor(token=endpoint.token, local=endpoint.local, nonce=nonce, admit=self._admit)
        else:
            self._handshake = Initiator(
                token=endpoint.token,
                local=endpoint.local,
                nonce=nonce,
                expected=expected,
                received=lambda: endpoint.count_received(expected),
                or_newer=expected.role == "coordinator",
            )
            self._hello_stamp = FrameStamp(target_incarnation=expected.incarnation)
        self._deadline: asyncio.TimerHandle | None = loop.call_later(
            HANDSHAKE_SECONDS_MAX, self.fail, "no valid handshake in time"
        )
        self._lingering: asyncio.TimerHandle | None = None
        self._unheard: memoryview | None = None  # where bytes go that nobody listens to any more
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
        if self.accepted:
            self._endpoint.strangers += 1
            if self._endpoint.strangers > STRANGERS_MAX:
                self.fail("too many connections are waiting for their handshake")
                return
        for message in self._handshake.start():
            self.write(message, FrameStamp())

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._reader.buffer() if self._unheard is None else self._unheard

    def buffer_updated(self, nbytes: int) -> None:
        if self._unheard is not None:
            return
        try:
            for frame in self._reader.advance(nbytes):
                if self._is_closing():
                    return
                # A stranger has nothing to refuse, and its words do not belong in our log.
                if isinstance(frame.message, Refused) and not (self.accepted and self._link is None):
                    self.refusal = frame.message.kind
                    self.fail(f"refused: {frame.message.reason}")
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
        self._handshake_over()
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
            log.info("a connection ended before its handshake: %s", self.reason)

    # --- our side ---

    def start(self, link: Link) -> None:
        """The handshake is complete, and this link goes on from here."""
        self._handshake_over()
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
        buffers = encode(message, stamp)
        self._endpoint.bytes_out += sum(len(buffer) for buffer in buffers)
        self._transport.writelines(buffers)

    def close(self) -> None:
        self.reason = "closed here"
        self._finish()

    def abort(self) -> None:
        self._transport.abort()

    def forsake(self) -> None:
        """Nobody waits for this handshake any more."""
        self._handshake_over()
        if self._transport is not None:
            self.abort()

    def fail(self, reason: str, tell: Refusal | None = None) -> None:
        """Ends this connection for `reason`, and tells the other side what that means for it, if `tell` says so. A
        stranger is not told anything but the reason."""
        self.reason = reason
        if self._transport is None or self._is_closing():
            return
        if tell is not None:
            stamp = self._link.acknowledgement() if self._link is not None else FrameStamp()
            self.write(Refused(reason=reason[:4000], kind=tell), stamp)
            self._finish()
        else:
            self._transport.close()

    def _finish(self) -> None:
        """Closes after what was written has arrived. Until the other side has closed as well we go on reading,
        but not listening: closing with unread bytes resets a connection, and the last words are lost."""
        if self._link is None or self._is_closing():
            self._transport.close()
            return
        self._unheard = memoryview(bytearray(UNHEARD_BYTES))
        self._lingering = asyncio.get_running_loop().call_later(CLOSE_SECONDS_MAX, self.abort)
        try:
            self._transport.resume_reading()
            self._transport.write_eof()
        except (OSError, RuntimeError):
            self._transport.close()

    def _is_closing(self) -> bool:
        return self._unheard is not None or bool(self._transport.is_closing())

    def _admit(self, peer: Identity, peer_received: int) -> int:
        local, meant = self._endpoint.local, self._hello_stamp.target_incarnation
        if meant > local.incarnation or (meant < local.incarnation and local.role != "coordinator"):
            raise ProtocolError(f"this is {local} with incarnation {local.incarnation}, {meant} was meant")
        return self._endpoint.admit(peer, self._about_us(peer_received))

    def _about_us(self, peer_received: int) -> int:
        is_mine = self._hello_stamp.target_incarnation == self._endpoint.local.incarnation
        return peer_received if is_mine or not self.accepted else 0

    def _on_handshake(self, frame: Frame) -> None:
        if self.accepted:
            self._hello_stamp = frame.stamp
        for reply in self._handshake.receive(frame.message):
            self.write(reply, FrameStamp() if self.accepted else self._hello_stamp)
        peer = self._handshake.peer
        if peer is not None:
            self._endpoint.attach(self, peer, self._about_us(self._handshake.peer_received))

    def _handshake_over(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None
            if self.accepted:
                self._endpoint.strangers -= 1


def _log_failure(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and (error := task.exception()) is not None:
        log.error("dialing ended by mistake", exc_info=error)


def parse_address(address: str) -> tuple[str, str, int]:
    """("unix", path, 0) or ("tcp", host, port); anything else is a user's error."""
    scheme, _, rest = address.partition(":")
    if scheme == "unix" and rest:
        return "unix", rest, 0
    host, _, port = rest.rpartition(":")
    if scheme == "tcp" and host and port.isdecimal() and int(port) < 65536:
        return "tcp", host, int(port)
    raise UserError(f"{address!r} is not an address", hint="Addresses are unix:PATH or tcp:HOST:PORT.")
