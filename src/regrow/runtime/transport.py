"""Links over TCP and Unix sockets: opens them, carries frames, reports losses, resumes. One socket, its handshake and
its frames are `runtime/connection.py`; here is what outlives it.

A `Link` belongs to two incarnations and outlives the connections that carry it. Whoever dials keeps dialing;
a connection that comes back goes on where the last one stopped, and its users notice nothing. An incarnation
that was forgotten, or followed by a newer one, is fenced: it is told so, and never heard again.

Payloads are not copied in Python: a frame leaves as one scatter/gather write of the arrays it refers to, and
sections are received into the memory where they are wanted. An `Endpoint` runs on one event loop and is used
from that loop's thread only. What its methods cause is reported later, never from within the call.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import errno
import logging
import os
from collections.abc import Callable
from typing import Any

import numpy as np

from regrow.core.framing import Limits
from regrow.core.identity import FOUND_AGAIN, Identity
from regrow.core.link import Link
from regrow.core.messages import Ack, Beat, Message
from regrow.errors import ConnectionLost, LocalProtocolError, ProtocolError, Refusal, UserError
from regrow.runtime.connection import Connection
from regrow.runtime.strangers import FailureLog, Strangers
from regrow.runtime.tls import TLS_SECONDS_MAX, make_tls
from regrow.runtime.tls_door import TlsDoor

log = logging.getLogger("regrow.transport")

# For a connection, before its handshake. Too small: a busy host is taken for one that is not there. Too large: one that
# does not answer keeps us from trying the address it may have moved to.
CONNECT_SECONDS_MAX = 5.0
DIAL_SECONDS_MIN = 0.01  # Pause before a connection is tried again; doubled each time it fails.
DIAL_SECONDS_MAX = 0.25  # Too large: a restarted peer is found late. Too small: a dead one costs time.
# A peer that answers, and has nothing for us but refusals for so long, will not change its mind: its owner is told, as
# if it had refused us for good. Too small: a view that is late ends a process. Too large: much waiting for nothing.
REFUSED_SECONDS_MAX = 60.0
# A coordinator over whose connection nothing comes for so long hangs, or the line is dead: dialed again, as another may
# be in its place. Too small: a busy machine costs connections. Too large: its successor is found late.
QUIET_SECONDS_MAX = 10.0
BREATH_SECONDS = 2.0  # between two signs of life of a coordinator that has nothing to say
STOP_SECONDS_MAX = 4.0  # For connections that are closed, which cut themselves off before; then they are left behind.
BACKLOG_MAX = 512  # Connections that the kernel keeps for us; more are turned away, and dial again.
PEERS_MAX = 65536  # Incarnations remembered, alive or fenced; more are turned away.
META_BYTES_MAX = 4 << 20  # A view of a very large job; everything else is far below.
AUTHENTICATE = ("auto", "always", "never")

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
        authenticate: str = "auto",
        tls: str = "off",
    ) -> None:
        if authenticate not in AUTHENTICATE:
            raise UserError(f"authenticate = {authenticate!r}: must be one of {', '.join(AUTHENTICATE)}")
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
        self._authenticate = authenticate
        self._tls = make_tls(tls, token)
        self.bytes_in = 0
        self.bytes_out = 0
        self.lines: dict[Identity, Line] = {}
        self._links: tuple[Link, ...] = ()  # of the lines; replaced whole, because another thread reads it
        self.strangers = Strangers()
        self.failures = FailureLog()
        self.connections: set[Connection] = set()  # of the lines, and those still on the way to be one
        self._dials: dict[tuple[str, int], Dialing] = {}
        self._fences: dict[tuple[str, int], Fence] = {}  # of the newest incarnation that is over
        self._closed = False
        self._servers: list[asyncio.AbstractServer | TlsDoor] = []
        self._unix_paths: dict[str, int] = {}  # and the inode that is ours
        self._breathing: asyncio.Task[None] | None = None

    @property
    def kept_bytes(self) -> int:
        """Sent or queued, and not acknowledged yet. The one thing here that any thread may ask for."""
        return sum(link.kept_bytes for link in self._links)

    def wants_seal(self, *, is_remote: bool) -> bool:
        """Whether this side asks for authenticated frames. If it does not, the other side may."""
        return self._authenticate == "always" or (self._authenticate == "auto" and is_remote)

    async def listen(self, address: str) -> str:
        """Accepts links at `unix:PATH` or `tcp:HOST:PORT` (0: any free port); returns the actual address."""
        loop = asyncio.get_running_loop()
        scheme, host, port = parse_address(address)

        def accept() -> Connection:
            return Connection(self, expected=None)

        try:
            if scheme == "unix":
                server = await loop.create_unix_server(accept, path=host, backlog=BACKLOG_MAX)
                os.chmod(host, 0o600)
                self._unix_paths[host] = os.stat(host).st_ino
            else:
                server, port = await self._listen_tcp(accept, host, port)
                address = f"tcp:{host}:{port}"
        except OSError as error:
            hint = "Another process may use it; port 0 takes a free one." if error.errno == errno.EADDRINUSE else None
            raise UserError(f"cannot listen at {address}: {error.strerror or error}", hint=hint) from None
        self._servers.append(server)
        if self.local.role in FOUND_AGAIN and self._breathing is None:
            self._breathing = loop.create_task(self._breathe())
        return address

    async def _listen_tcp(self, accept: Callable[[], Connection], host: str, port: int) -> tuple[Any, int]:
        """What listens, and at which port."""
        if self._tls is None:
            server = await asyncio.get_running_loop().create_server(accept, host, port, backlog=BACKLOG_MAX)
            return server, int(server.sockets[0].getsockname()[1])
        door = TlsDoor(
            host,
            port,
            accept=accept,
            tls=self._tls,
            close_seconds_max=STOP_SECONDS_MAX,
            backlog=BACKLOG_MAX,
            strangers=self.strangers,
            failures=self.failures,
        )
        return door, door.port

    def _choose_tls(self) -> dict[str, Any]:
        """What a loop is told about it when it dials, for TCP; Unix sockets leave no host."""
        if self._tls is None:
            return {}
        times = {"ssl_handshake_timeout": TLS_SECONDS_MAX, "ssl_shutdown_timeout": STOP_SECONDS_MAX}
        return {"ssl": self._tls.dialing, "server_hostname": "", **times}

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
            async with asyncio.timeout(CONNECT_SECONDS_MAX):
                if scheme == "unix":
                    await loop.create_unix_connection(lambda: connection, path=host)
                else:
                    await loop.create_connection(lambda: connection, host, port, **self._choose_tls())
            await asyncio.wait([connection.opened])  # it limits its own time
        except (OSError, ValueError, UserError) as error:
            connection.forsake()
            detail = getattr(error, "strerror", None) or str(error) or f"no answer in {CONNECT_SECONDS_MAX} s"
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
        if self._breathing is not None:
            self._breathing.cancel()
        tasks = [dialing.task for dialing in self._dials.values() if dialing.task is not None]
        self._dials.clear()
        for task in tasks:
            task.cancel()
        for connection in list(self.connections):
            connection.close()
        ending = [*tasks, *(connection.closed for connection in self.connections)]
        if ending:
            _, stuck = await asyncio.wait(ending, timeout=STOP_SECONDS_MAX)
            if stuck:
                log.warning("%d connections did not end in %g s", len(stuck), STOP_SECONDS_MAX)
        for server in self._servers:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(server.wait_closed(), STOP_SECONDS_MAX)
        self.failures.close()
        for path, inode in self._unix_paths.items():
            # Not if a successor listens there by now: whoever was stopped for a while may end long after that.
            with contextlib.suppress(OSError):  # it is gone, or its disk is read-only
                if os.stat(path).st_ino == inode:
                    os.unlink(path)

    # --- Dialing ---

    async def _keep_open(self, dialing: Dialing) -> None:
        loop = asyncio.get_running_loop()
        pause_seconds = DIAL_SECONDS_MIN
        refused_since: float | None = None  # nothing but refusals since then
        while True:
            before = self._count_frames(dialing.expected)
            reason, refusal = await self._keep_connection(dialing)
            moved = self._count_frames(dialing.expected) != before
            if moved or refusal is None:
                refused_since = None
            elif refused_since is None:
                refused_since = loop.time()
            elif not refusal.is_final and loop.time() - refused_since >= REFUSED_SECONDS_MAX:
                refusal = Refusal.FOR_GOOD
                self._report_lost(dialing.expected, f"{reason} (for {REFUSED_SECONDS_MAX:g} s)", refusal)
            if refusal is not None and refusal.is_final:
                key = (dialing.expected.role, dialing.expected.id)
                if self._dials.get(key) is dialing:
                    del self._dials[key]
                return
            pause_seconds = DIAL_SECONDS_MIN if moved else min(2 * pause_seconds, DIAL_SECONDS_MAX)
            await asyncio.sleep(pause_seconds)

    async def _keep_connection(self, dialing: Dialing) -> tuple[str, Refusal | None]:
        """One attempt, and if it succeeds, as long as it lasts. Then: why it is over."""
        try:
            connection = await self.connect(dialing.address, dialing.expected)
        except ConnectionLost as error:
            self._report_lost(dialing.expected, error.message, error.refusal)
            return error.message, error.refusal
        while not connection.closed.done():
            await asyncio.wait([connection.closed], timeout=QUIET_SECONDS_MAX)
            if dialing.expected.role in FOUND_AGAIN and connection.quiet_seconds >= QUIET_SECONDS_MAX:
                connection.fail(f"nothing was heard for {connection.quiet_seconds:.0f} s")
                connection.abort()  # it would not read our last words either
        return connection.reason, connection.refusal

    async def _breathe(self) -> None:
        """A coordinator may have nothing to say for hours: so that it can be told from one that hangs."""
        while not self._closed:
            await asyncio.sleep(BREATH_SECONDS)
            for line in self.lines.values():
                if line.connection is not None:
                    line.connection.write(Ack(), line.link.acknowledgement())

    def _count_frames(self, peer: Identity) -> tuple[int, int] | None:
        """How many got through, both ways: a connection that moves none is not better than a refusal."""
        line = self.lines.get(peer)
        return None if line is None else (line.link.received, line.link.acknowledged)

    def _report_lost(self, peer: Identity, reason: str, refusal: Refusal | None) -> None:
        line = self.lines.get(peer)
        is_final = refusal is not None and refusal.is_final
        # A refusal is worth telling even after a reset that came instead of it: it is the last word.
        if line is not None and (line.lost is None or (is_final and not line.refused)):
            line.lost, line.refused = reason, is_final
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
        line = self.lines.get(peer)
        if line is None:
            line = self.lines[peer] = Line(link=Link(local=self.local, peer=peer))
            self._links = tuple(line.link for line in self.lines.values())
        return line

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
            self._links = tuple(line.link for line in self.lines.values())
            line.link.end()
            if line.connection is not None:
                line.connection.fail(fence.reason, tell=fence.refusal)
        dialing = self._dials.get((peer.role, peer.id))
        if dialing is not None and dialing.expected == peer:
            del self._dials[peer.role, peer.id]
            if dialing.task is not None:
                dialing.task.cancel()


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
