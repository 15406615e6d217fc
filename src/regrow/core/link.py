"""Who is at the other end, and the numbers of what passes between the two.

A link joins two **incarnations**: a restarted process is somebody else. Opening one is a challenge both ways
(`Acceptor`, `Initiator`), so nothing is read from, or told to, a stranger. After that every frame carries the
incarnations of both ends and a number; a frame for or from another incarnation is fenced off and a gap is an
error. Frames are not kept for resending yet: today a broken connection ends the link.
"""

from __future__ import annotations

import dataclasses
import hashlib
import hmac

from regrow.core.framing import Stamp
from regrow.core.messages import PROTOCOL_VERSION, Challenge, Hello, Message, Welcome
from regrow.errors import ProtocolError

ROLES = ("coordinator", "server", "worker")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, order=True)
class Identity:
    """One process of a run."""

    role: str
    id: int
    incarnation: int = 0

    def __str__(self) -> str:
        return "C" if self.role == "coordinator" else f"{self.role[0].upper()}{self.id}"


class Link:
    """The numbering of one connection between two incarnations."""

    def __init__(self, *, local: Identity, peer: Identity) -> None:
        self.local = local
        self.peer = peer
        self.sent = 0
        self.received = 0

    def stamp(self) -> Stamp:
        """The stamp of the next frame to send."""
        self.sent += 1
        return Stamp(
            source_incarnation=self.local.incarnation,
            target_incarnation=self.peer.incarnation,
            number=self.sent,
            acknowledged=self.received,
        )

    def accept(self, stamp: Stamp) -> bool:
        """True: deliver this frame. False: it is fenced or a duplicate, drop it. A gap is an error."""
        if stamp.source_incarnation < self.peer.incarnation:
            return False
        if stamp.target_incarnation != self.local.incarnation:
            return False
        if stamp.source_incarnation > self.peer.incarnation:
            raise ProtocolError(f"{self.peer} changed its incarnation within a connection")
        if stamp.acknowledged > self.sent:
            raise ProtocolError(f"{self.peer} acknowledges frame {stamp.acknowledged} of {self.sent} sent")
        if stamp.number <= self.received:
            return False
        if stamp.number != self.received + 1:
            raise ProtocolError(f"frame {self.received + 1} from {self.peer} is missing, {stamp.number} came")
        self.received = stamp.number
        return True


class Acceptor:
    """The side that was connected to: asks for proof first, tells nothing before it."""

    def __init__(self, *, token: bytes, local: Identity, nonce: bytes) -> None:
        self._token = token
        self._local = local
        self._nonce = nonce
        self.peer: Identity | None = None

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
        self.peer = claimed
        proof = _proof(self._token, b"welcome", message.nonce, self._local)
        local = self._local
        return [Welcome(role=local.role, id=local.id, incarnation=local.incarnation, proof=proof)]


class Initiator:
    """The side that connected: proves itself, and checks that the other end is who was meant."""

    def __init__(self, *, token: bytes, local: Identity, nonce: bytes, expected: Identity) -> None:
        self._token = token
        self._local = local
        self._nonce = nonce
        self._expected = expected
        self._challenged = False
        self.peer: Identity | None = None

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
                )
            ]
        if not isinstance(message, Welcome) or not self._challenged or self.peer is not None:
            raise ProtocolError(f"unexpected {type(message).__name__} while a link is opened")
        peer = Identity(role=message.role, id=message.id, incarnation=message.incarnation)
        if not _proves(message.proof, self._token, b"welcome", self._nonce, peer):
            raise ProtocolError("the peer does not hold this run's token")
        if peer != self._expected:
            raise ProtocolError(f"connected to {peer!r}, meant {self._expected!r}")
        self.peer = peer
        return []


def _check_version(protocol: int) -> None:
    if protocol != PROTOCOL_VERSION:
        raise ProtocolError(f"protocol version {protocol}, this side speaks {PROTOCOL_VERSION}")


def _proof(token: bytes, label: bytes, nonce: bytes, who: Identity) -> bytes:
    said = b"|".join([label, nonce, who.role.encode(), str(who.id).encode(), str(who.incarnation).encode()])
    return hmac.new(token, said, hashlib.sha256).digest()


def _proves(proof: bytes, token: bytes, label: bytes, nonce: bytes, who: Identity) -> bool:
    return hmac.compare_digest(proof, _proof(token, label, nonce, who))
