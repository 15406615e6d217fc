"""Who is at the other end, and the numbers of what passes between the two.

A link joins two **incarnations**: a restarted process is somebody else. Opening one is a challenge both ways
(`Acceptor`, `Initiator`), so nothing is read from, or told to, a stranger. Each proof covers everything that was said
before it (version, both nonces, who is who and who was meant, how far each got, whether frames are sealed), and the
keys of the connection are made of the same: what somebody in between changes, repeats or brings elsewhere proves
nothing. After that every frame carries the incarnations of both ends and a number; a frame for or from another
incarnation is fenced off and a gap is an error. A broken connection loses nothing: frames are kept until acknowledged,
and the next connection resumes where each end got to. Nothing here knows sockets; a simulator uses the same classes.
"""

from __future__ import annotations

import dataclasses
import hmac
from collections import deque
from collections.abc import Callable
from typing import TypeVar

import msgspec

from regrow.core.framing import HEADER_BYTES, Stamp
from regrow.core.identity import FOUND_AGAIN, ROLES, Identity
from regrow.core.messages import PROTOCOL_VERSION, Challenge, Hello, Message, Refused, Welcome, encode_meta
from regrow.core.states import LINK, Life, LinkState
from regrow.errors import ProtocolError, Refusal

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


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Opening:
    """What a handshake came to, at either end."""

    peer: Identity
    peer_received: int  # of our frames
    sealed: bool
    key_out: bytes  # for what we send
    key_in: bytes


class Handshake:
    """What both sides of a handshake have in common."""

    opening: Opening | None  # once it is complete

    @property
    def peer(self) -> Identity | None:
        return None if self.opening is None else self.opening.peer


class Acceptor(Handshake):
    """The side that was connected to: asks for proof first, tells nothing before it."""

    def __init__(
        self,
        *,
        token: bytes,
        local: Identity,
        nonce: bytes,
        admit: Callable[[Identity, int], int] = lambda peer, peer_received: 0,
        seals: bool = False,
    ) -> None:
        """`admit(peer, peer_received)`, asked about a peer that has proved itself, says how many of its frames
        have arrived, or raises ProtocolError: it is fenced. `seals`: frames shall be authenticated, whatever the
        other side wants."""
        self._token = token
        self._local = local
        self._admit = admit
        self._seals = seals
        self._challenge = Challenge(protocol=PROTOCOL_VERSION, nonce=nonce)
        self._hello: Hello | None = None  # once it is proved
        self.opening = None

    def start(self) -> list[Message]:
        return [self._challenge]

    def receive(self, message: Message) -> list[Message]:
        if self.opening is not None or not isinstance(message, Hello):
            raise ProtocolError(f"expected Hello, got {type(message).__name__}")
        _check_version(message.protocol)
        if message.role not in ROLES or not _proves(message, self._token, b"hello", self._challenge):
            raise ProtocolError("the peer does not hold this run's token")
        self._hello = message
        peer = Identity(role=message.role, id=message.id, incarnation=message.incarnation)
        peer_received = message.received if self._is_meant(message) else 0
        local = self._local
        welcome = Welcome(
            role=local.role,
            id=local.id,
            incarnation=local.incarnation,
            proof=b"",
            received=self._admit(peer, peer_received),
            sealed=self._seals or message.sealed,
        )
        welcome = _prove(welcome, self._token, b"welcome", self._challenge, message)
        keys = _derive_keys(self._token, self._challenge, message, welcome)
        self.opening = Opening(
            peer=peer, peer_received=peer_received, sealed=welcome.sealed, key_out=keys[1], key_in=keys[0]
        )
        return [welcome]

    def _is_meant(self, hello: Hello) -> bool:
        """Is this about us, or about an earlier coordinator? Whoever means somebody else is refused: it was brought
        to the wrong door."""
        local, meant = self._local, hello.target_incarnation
        if (hello.target_role, hello.target_id) != (local.role, local.id):
            raise ProtocolError(f"this is {local.role} {local.id}, {hello.target_role} {hello.target_id} was meant")
        if meant > local.incarnation or (meant < local.incarnation and local.role not in FOUND_AGAIN):
            raise ProtocolError(f"this is {local} with incarnation {local.incarnation}, {meant} was meant")
        return meant == local.incarnation

    def refuse(self, reason: str, refusal: Refusal) -> Refused:
        """Instead of a Welcome. Proved only to one who has proved itself: a stranger learns nothing from it."""
        if self._hello is None:
            return Refused(reason=reason, kind=Refusal.RETRY)
        refused = Refused(reason=reason, kind=refusal)
        return _prove(refused, self._token, b"refused", self._challenge, self._hello)


class Initiator(Handshake):
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
        seals: bool = False,
    ) -> None:
        """`received()` says how many frames of `expected` have arrived. With `or_newer` a later incarnation of
        it will do as well: nobody tells us when the coordinator was restarted. `seals`: as for an acceptor."""
        self._token = token
        self._local = local
        self._nonce = nonce
        self._expected = expected
        self._received = received
        self._or_newer = or_newer
        self._seals = seals
        self._challenge: Challenge | None = None
        self._hello: Hello | None = None
        self.opening = None

    def start(self) -> list[Message]:
        return []

    def receive(self, message: Message) -> list[Message]:
        if isinstance(message, Challenge) and self._challenge is None:
            _check_version(message.protocol)
            self._challenge = message  # once: nobody collects our proofs for nonces of their choice
            self._hello = self._say_hello(message)
            return [self._hello]
        challenge, hello = self._challenge, self._hello
        if not isinstance(message, Welcome) or challenge is None or hello is None or self.opening is not None:
            raise ProtocolError(f"unexpected {type(message).__name__} while a link is opened")
        if not _proves(message, self._token, b"welcome", challenge, hello):
            raise ProtocolError("the peer does not hold this run's token")
        peer = Identity(role=message.role, id=message.id, incarnation=message.incarnation)
        expected = self._expected
        is_newer = (peer.role, peer.id) == (expected.role, expected.id) and peer.incarnation > expected.incarnation
        if peer != expected and not (self._or_newer and is_newer):
            raise ProtocolError(f"connected to {peer!r}, meant {expected!r}")
        if self._seals and not message.sealed:
            raise ProtocolError(f"{peer} does not authenticate its frames")
        keys = _derive_keys(self._token, challenge, hello, message)
        self.opening = Opening(
            peer=peer, peer_received=message.received, sealed=message.sealed, key_out=keys[0], key_in=keys[1]
        )
        return []

    def _say_hello(self, challenge: Challenge) -> Hello:
        local, expected = self._local, self._expected
        hello = Hello(
            protocol=PROTOCOL_VERSION,
            role=local.role,
            id=local.id,
            incarnation=local.incarnation,
            nonce=self._nonce,
            proof=b"",
            received=self._received(),
            target_role=expected.role,
            target_id=expected.id,
            target_incarnation=expected.incarnation,
            sealed=self._seals,
        )
        return _prove(hello, self._token, b"hello", challenge)

    def refuse(self, reason: str, refusal: Refusal) -> Refused:
        """Whoever answered is not who was meant; to them it means nothing."""
        return Refused(reason=reason, kind=Refusal.RETRY)

    def judge(self, refused: Refused) -> Refusal:
        """What a refusal means that came instead of a Welcome: without a proof, no more than that this connection
        cannot go on."""
        if self._challenge is None or self._hello is None:
            return Refusal.RETRY
        proved = _proves(refused, self._token, b"refused", self._challenge, self._hello)
        return refused.kind if proved else Refusal.RETRY


def _check_version(protocol: int) -> None:
    if protocol != PROTOCOL_VERSION:
        raise ProtocolError(f"protocol version {protocol}, this side speaks {PROTOCOL_VERSION}")


_Proved = TypeVar("_Proved", Hello, Welcome, Refused)


def _prove(message: _Proved, token: bytes, label: bytes, *said: Message) -> _Proved:
    """The same message with a proof of itself and of all that was said before it."""
    return msgspec.structs.replace(message, proof=_authenticate(token, label, *said, message))


def _proves(message: _Proved, token: bytes, label: bytes, *said: Message) -> bool:
    bare = msgspec.structs.replace(message, proof=b"")
    return hmac.compare_digest(message.proof, _authenticate(token, label, *said, bare))


def _derive_keys(token: bytes, *said: Message) -> tuple[bytes, bytes]:
    """For what the initiator sends, and for what the acceptor sends. Both nonces are in what was said, so no
    two connections have a key in common."""
    return _authenticate(token, b"key of initiator", *said), _authenticate(token, b"key of acceptor", *said)


def _authenticate(token: bytes, label: bytes, *said: Message) -> bytes:
    """HMAC-SHA256 of all this in order, with lengths, so that no two conversations are the same bytes."""
    code = hmac.new(token, digestmod="sha256")
    for part in (b"regrow", PROTOCOL_VERSION.to_bytes(4, "big"), label, *map(encode_meta, said)):
        code.update(len(part).to_bytes(4, "big"))
        code.update(part)
    return code.digest()
