"""Who is at the other end, and the numbers of what passes between the two.

A link joins two **incarnations**: a restarted process is somebody else. Opening one is a challenge both ways
(`Acceptor`, `Initiator`), so nothing is read from, or told to, a stranger. After that every frame carries the
incarnations of both ends and a number; a frame for or from another incarnation is fenced off and a gap is an
error. A broken connection loses nothing: frames are kept until acknowledged, and the next connection resumes
where each end got to. Nothing here knows sockets; a simulator uses the same classes.
"""

from __future__ import annotations

import hashlib
import hmac
from collections import deque
from collections.abc import Callable

from regrow.core.framing import HEADER_BYTES, Stamp
from regrow.core.identity import ROLES, Identity
from regrow.core.messages import PROTOCOL_VERSION, Challenge, Hello, Message, Welcome
from regrow.core.states import LINK, Life, LinkState
from regrow.errors import ProtocolError

FRAME_BYTES = HEADER_BYTES + 64  # what a kept message counts besides its sections: about its header and meta
# An acknowledgement of its own leaves after so much one-way traffic. Too small: frames that say little.
# Too large: the sender keeps that much more than what is on the way.
ACK_FRAMES_MAX = 64
ACK_BYTES_MAX = 1 << 20


class Link:
    """The frames between two incarnations, in both directions. It outlives the connections that carry it:
    what the peer has not acknowledged is kept, by reference, and sent again on the next connection."""

    def __init__(self, *, local: Identity, peer: Identity) -> None:
        self.local = local
        self.peer = peer
        self.life = Life(LINK)
        self.sent = 0  # frames numbered so far
        self.acknowledged = 0  # of these the peer has so many
        self.received = 0
        self.kept_bytes = 0
        self._kept: deque[tuple[Message, int]] = deque()  # frames acknowledged + 1 to sent, with their bytes
        self._unsaid_frames = 0  # received since we last said how far we are
        self._unsaid_bytes = 0

    def __repr__(self) -> str:
        counts = f"sent {self.sent} acked {self.acknowledged} got {self.received}"
        return f"<Link {self.local}-{self.peer} {self.life.state}, {counts}>"

    @property
    def is_new(self) -> bool:
        """No connection has carried it yet."""
        return self.life.state is LinkState.NEW

    def send(self, message: Message) -> Stamp:
        """Numbers a message and keeps it until the peer has it. Its arrays must not change from now on."""
        message_bytes = FRAME_BYTES
        for name in message.SECTION_FIELDS:
            message_bytes += getattr(message, name).nbytes
        self._kept.append((message, message_bytes))
        self.kept_bytes += message_bytes
        self.sent += 1
        return self._stamp(self.sent)

    @property
    def acknowledgement_due(self) -> bool:
        """So much arrived while nothing went back that the peer should hear of it: it keeps all that."""
        return self._unsaid_frames >= ACK_FRAMES_MAX or self._unsaid_bytes >= ACK_BYTES_MAX

    def acknowledgement(self) -> Stamp:
        """The stamp of a frame outside the numbering: it is not kept, and losing it does no harm."""
        return self._stamp(0)

    def expects(self, stamp: Stamp) -> bool:
        """Would `accept` deliver this frame? Asked when its header is there and its sections are not."""
        ends = (stamp.source_incarnation, stamp.target_incarnation)
        return ends == (self.peer.incarnation, self.local.incarnation) and stamp.number == self.received + 1

    def accept(self, stamp: Stamp, wire_bytes: int = 0) -> bool:
        """True: deliver this frame. False: fenced, a duplicate or unnumbered, drop it. A gap is an error."""
        if stamp.source_incarnation < self.peer.incarnation:
            return False
        if stamp.target_incarnation != self.local.incarnation:
            return False
        if stamp.source_incarnation > self.peer.incarnation:
            raise ProtocolError(f"{self.peer} changed its incarnation within a connection")
        if stamp.acknowledged > self.sent:
            raise ProtocolError(f"{self.peer} acknowledges frame {stamp.acknowledged} of {self.sent} sent")
        self._release(stamp.acknowledged)
        if stamp.number <= self.received:
            return False
        if stamp.number != self.received + 1:
            raise ProtocolError(f"frame {self.received + 1} from {self.peer} is missing, {stamp.number} came")
        self.received = stamp.number
        self._unsaid_frames += 1
        self._unsaid_bytes += wire_bytes
        return True

    def resume_invalid_reason(self, peer_received: int) -> str | None:
        """Why a peer that says it has so many of our frames is not the one this link was opened with."""
        if self.acknowledged <= peer_received <= self.sent:
            return None
        return (
            f"{self.peer} says it has {peer_received} frames of {self.sent} sent and {self.acknowledged} "
            "acknowledged: a process that starts again needs a new incarnation"
        )

    def resume(self, peer_received: int) -> list[tuple[Stamp, Message]]:
        """A new connection is open, and each end has told the other how much it has: what to send first."""
        if reason := self.resume_invalid_reason(peer_received):
            raise ProtocolError(reason)
        self.life.move("opened")
        self._release(peer_received)
        first = self.acknowledged + 1
        return [(self._stamp(first + index), message) for index, (message, _) in enumerate(self._kept)]

    def lose_connection(self) -> None:
        """What carried it is gone. What was sent is kept for the next connection."""
        self.life.move("lost")

    def end(self) -> None:
        """The other end is over, or was refused for good."""
        self.life.move("fenced")
        self._kept.clear()
        self.kept_bytes = 0

    def _stamp(self, number: int) -> Stamp:
        self._unsaid_frames = 0
        self._unsaid_bytes = 0
        return Stamp(
            source_incarnation=self.local.incarnation,
            target_incarnation=self.peer.incarnation,
            number=number,
            acknowledged=self.received,
        )

    def _release(self, acknowledged: int) -> None:
        while self.acknowledged < acknowledged:
            _, message_bytes = self._kept.popleft()
            self.kept_bytes -= message_bytes
            self.acknowledged += 1


class Acceptor:
    """The side that was connected to: asks for proof first, tells nothing before it."""

    def __init__(
        self,
        *,
        token: bytes,
        local: Identity,
        nonce: bytes,
        admit: Callable[[Identity, int], int] = lambda peer, peer_received: 0,
    ) -> None:
        """`admit(peer, peer_received)`, asked about a peer that has proved itself, says how many of its frames
        have arrived, or raises ProtocolError: it is fenced."""
        self._token = token
        self._local = local
        self._nonce = nonce
        self._admit = admit
        self.peer: Identity | None = None
        self.peer_received = 0

    def start(self) -> list[Message]:
        return [Challenge(protocol=PROTOCOL_VERSION, nonce=self._nonce)]

    def receive(self, message: Message) -> list[Message]:
        if self.peer is not None or not isinstance(message, Hello):
            raise ProtocolError(f"expected Hello, got {type(message).__name__}")
        _check_version(message.protocol)
        claimed = Identity(role=message.role, id=message.id, incarnation=message.incarnation)
        proved = _proves(message.proof, self._token, b"hello", self._nonce, claimed)
        if message.role not in ROLES or not proved:
            raise ProtocolError("the peer does not hold this run's token")
        received = self._admit(claimed, message.received)
        self.peer, self.peer_received = claimed, message.received
        proof = _proof(self._token, b"welcome", message.nonce, self._local)
        local = self._local
        return [Welcome(role=local.role, id=local.id, incarnation=local.incarnation, proof=proof, received=received)]


class Initiator:
    """The side that connected: proves itself, and checks that the other end is who was meant."""

    def __init__(
        self,
        *,
        token: bytes,
        local: Identity,
        nonce: bytes,
        expected: Identity,
        received: Callable[[], int] = lambda: 0,
        or_newer: bool = False,
    ) -> None:
        """`received()` says how many frames of `expected` have arrived. With `or_newer` a later incarnation of
        it will do as well: nobody tells us when the coordinator was restarted."""
        self._token = token
        self._local = local
        self._nonce = nonce
        self._expected = expected
        self._received = received
        self._or_newer = or_newer
        self._challenged = False
        self.peer: Identity | None = None
        self.peer_received = 0

    def start(self) -> list[Message]:
        return []

    def receive(self, message: Message) -> list[Message]:
        local = self._local
        if isinstance(message, Challenge) and not self._challenged:
            self._challenged = True  # once: nobody collects our proofs for nonces of their choice
            _check_version(message.protocol)
            proof = _proof(self._token, b"hello", message.nonce, local)
            return [
                Hello(
                    protocol=PROTOCOL_VERSION,
                    role=local.role,
                    id=local.id,
                    incarnation=local.incarnation,
                    nonce=self._nonce,
                    proof=proof,
                    received=self._received(),
                )
            ]
        if not isinstance(message, Welcome) or not self._challenged or self.peer is not None:
            raise ProtocolError(f"unexpected {type(message).__name__} while a link is opened")
        peer = Identity(role=message.role, id=message.id, incarnation=message.incarnation)
        if not _proves(message.proof, self._token, b"welcome", self._nonce, peer):
            raise ProtocolError("the peer does not hold this run's token")
        expected = self._expected
        is_newer = (peer.role, peer.id) == (expected.role, expected.id) and peer.incarnation > expected.incarnation
        if peer != expected and not (self._or_newer and is_newer):
            raise ProtocolError(f"connected to {peer!r}, meant {expected!r}")
        self.peer, self.peer_received = peer, message.received
        return []


def _check_version(protocol: int) -> None:
    if protocol != PROTOCOL_VERSION:
        raise ProtocolError(f"protocol version {protocol}, this side speaks {PROTOCOL_VERSION}")


def _proof(token: bytes, label: bytes, nonce: bytes, who: Identity) -> bytes:
    said = b"|".join([label, nonce, who.role.encode(), str(who.id).encode(), str(who.incarnation).encode()])
    return hmac.new(token, said, hashlib.sha256).digest()


def _proves(proof: bytes, token: bytes, label: bytes, nonce: bytes, who: Identity) -> bool:
    return hmac.compare_digest(proof, _proof(token, label, nonce, who))
