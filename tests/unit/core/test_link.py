"""Goal: only holders of the run's token open a link, each knows who the other is, and frames arrive in order,
once each, however often the connection below them breaks.

Method: both sides of a handshake talk to each other directly; then every message is withheld, repeated,
replayed from another connection, or made with the wrong token, role, number or incarnation. The numbering of
a link is tried frame by frame, and then by chance: two links over connections that lose what is on the way.
"""

from __future__ import annotations

import random
from collections import deque
from typing import Any

import msgspec
import numpy as np
import pytest
from helpers import plain, server, worker

from regrow.core.framing import Stamp
from regrow.core.identity import Identity
from regrow.core.link import ACK_BYTES_MAX, ACK_FRAMES_MAX, FRAME_BYTES, Acceptor, Initiator, Link, _prove
from regrow.core.messages import PROTOCOL_VERSION, Challenge, Hello, Message, Open, Records, RecordsWritten, Welcome
from regrow.errors import ProtocolError, Refusal

TOKEN = b"t" * 32
NO_TOKEN = "the peer does not hold this run's token"


def acceptor(token: bytes = TOKEN, local: Identity | None = None, nonce: bytes = b"a" * 32) -> Acceptor:
    return Acceptor(token=token, local=local or server(1, incarnation=5), nonce=nonce)


def initiator(token: bytes = TOKEN, local: Identity | None = None, expected: Identity | None = None) -> Initiator:
    return Initiator(
        token=token,
        local=local or worker(2, incarnation=3),
        nonce=b"i" * 32,
        expected=expected or server(1, incarnation=5),
    )


def shake(left: Initiator, right: Acceptor) -> list[Message]:
    """The whole handshake; returns all that was said."""
    assert left.start() == []
    (challenge,) = right.start()
    (hello,) = left.receive(challenge)
    (welcome,) = right.receive(hello)
    assert left.receive(welcome) == []
    return [challenge, hello, welcome]


def refusal(machine: Acceptor | Initiator, message: Message) -> str:
    with pytest.raises(ProtocolError) as caught:
        machine.receive(message)
    assert machine.peer is None, "a refused peer is nobody"
    return caught.value.message


def forged_welcome(right: Acceptor, hello: Any, who: Identity) -> Any:
    """By somebody who holds the token and does not look at whom was meant."""
    bare = Welcome(role=who.role, id=who.id, incarnation=who.incarnation, proof=b"")
    return _prove(bare, TOKEN, b"welcome", right.start()[0], hello)


def changed(message: Any, **fields: Any) -> Any:
    """Of a message, or of a stamp."""
    return msgspec.structs.replace(message, **fields)


# --- The handshake ---


def test_both_know_each_other_afterwards_and_no_secret_was_said() -> None:
    left, right = initiator(), acceptor()
    said = shake(left, right)
    assert (left.peer, right.peer) == (server(1, incarnation=5), worker(2, incarnation=3))
    assert [plain(message)[0] for message in said] == ["Challenge", "Hello", "Welcome"]
    assert TOKEN not in b"".join(repr(plain(message)).encode() for message in said)


def test_an_initiator_with_a_bad_token() -> None:
    left, right = initiator(token=b"x" * 32), acceptor()
    (hello,) = left.receive(right.start()[0])
    assert refusal(right, hello) == NO_TOKEN


def test_an_acceptor_with_a_bad_token() -> None:
    left, right = initiator(), acceptor(token=b"x" * 32)
    left.receive(right.start()[0])
    _, _, welcome = shake(initiator(token=b"x" * 32), acceptor(token=b"x" * 32))
    assert refusal(left, welcome) == NO_TOKEN


@pytest.mark.parametrize(
    "fields",
    [
        {"role": "server"},
        {"role": "coordinator"},
        {"id": 3},
        {"incarnation": 4},
        {"incarnation": 2},
        {"proof": bytes(32)},
    ],
)
def test_a_hello_proves_exactly_one_identity(fields: dict[str, Any]) -> None:
    right = acceptor()
    (hello,) = initiator().receive(right.start()[0])
    assert refusal(right, changed(hello, **fields)) == NO_TOKEN
    assert right.receive(hello), "the same acceptor still takes the true one"


def test_a_role_that_does_not_exist() -> None:
    left, right = initiator(local=Identity(role="intruder", id=0)), acceptor()
    (hello,) = left.receive(right.start()[0])
    assert refusal(right, hello) == NO_TOKEN


def test_a_replayed_hello_is_worth_nothing_on_another_connection() -> None:
    _, hello, _ = shake(initiator(), acceptor())
    assert refusal(acceptor(nonce=b"b" * 32), hello) == NO_TOKEN


def test_a_replayed_welcome_is_worth_nothing_on_another_connection() -> None:
    _, _, welcome = shake(initiator(), acceptor())
    left = Initiator(token=TOKEN, local=worker(2), nonce=b"j" * 32, expected=server(1, incarnation=5))
    left.receive(acceptor().start()[0])
    assert refusal(left, welcome) == NO_TOKEN


def test_a_hello_reflected_as_a_welcome() -> None:
    """Somebody without the token connects back to us and returns our own proof."""
    us = Identity(role="server", id=1)
    left = initiator(local=us, expected=us)
    (hello,) = left.receive(Challenge(protocol=PROTOCOL_VERSION, nonce=b"i" * 32))  # our own nonce as the challenge
    assert isinstance(hello, Hello)
    reflected = Welcome(role="server", id=1, incarnation=0, proof=hello.proof, received=0)
    assert refusal(left, reflected) == NO_TOKEN


@pytest.mark.parametrize(
    "found", [server(1, incarnation=4), server(1, incarnation=6), server(2, incarnation=5), worker(1)]
)
def test_somebody_else_answers(found: Identity) -> None:
    left, right = initiator(), acceptor(local=found)
    (hello,) = left.receive(right.start()[0])
    assert "was meant" in refusal(right, hello), "the other end knows that it is not who was meant"
    welcome = forged_welcome(right, hello, found)
    assert refusal(left, welcome) == f"connected to {found!r}, meant {server(1, incarnation=5)!r}"


def test_another_protocol_version() -> None:
    (hello,) = initiator().receive(acceptor().start()[0])
    speaks = f"this side speaks {PROTOCOL_VERSION}"
    assert refusal(acceptor(), changed(hello, protocol=1)) == f"protocol version 1, {speaks}"
    challenge = Challenge(protocol=9, nonce=b"a" * 32)
    assert refusal(initiator(), challenge) == f"protocol version 9, {speaks}"


def test_messages_out_of_turn() -> None:
    challenge, hello, welcome = shake(initiator(), acceptor())
    assert refusal(acceptor(), Open()) == "expected Hello, got Open"
    assert refusal(acceptor(), welcome) == "expected Hello, got Welcome"
    assert refusal(initiator(), hello) == "unexpected Hello while a link is opened"
    assert refusal(initiator(), welcome) == "unexpected Welcome while a link is opened"
    asked = initiator()
    asked.receive(challenge)
    assert refusal(asked, challenge) == "unexpected Challenge while a link is opened"


def test_a_handshake_happens_once() -> None:
    left, right = initiator(), acceptor()
    challenge, hello, welcome = shake(left, right)
    for machine, message in ((right, hello), (left, welcome), (left, challenge)):
        with pytest.raises(ProtocolError):
            machine.receive(message)


@pytest.mark.parametrize(("found", "taken"), [(4, False), (5, True), (6, True), (9, True)])
def test_a_restarted_coordinator_will_do_where_a_later_one_may_answer(found: int, taken: bool) -> None:
    coordinator = Identity(role="coordinator", id=0, incarnation=5)
    answering = msgspec.structs.replace(coordinator, incarnation=found)
    left = Initiator(token=TOKEN, local=worker(2), nonce=b"i" * 32, expected=coordinator, or_newer=True)
    right = acceptor(local=answering)
    (hello,) = left.receive(right.start()[0])
    if taken:
        left.receive(right.receive(hello)[0])
        assert left.peer == answering
    else:
        assert "was meant" in refusal(right, hello)
        assert "meant" in refusal(left, forged_welcome(right, hello, answering))


def test_somebody_else_will_not_do_even_if_newer() -> None:
    expected = Identity(role="coordinator", id=0)
    for found in (Identity(role="coordinator", id=1, incarnation=1), server(0, incarnation=1)):
        left = Initiator(token=TOKEN, local=worker(2), nonce=b"i" * 32, expected=expected, or_newer=True)
        right = acceptor(local=found)
        (hello,) = left.receive(right.start()[0])
        assert "was meant" in refusal(right, hello)
        assert "meant" in refusal(left, forged_welcome(right, hello, found))


def test_each_side_hears_how_far_the_other_got() -> None:
    left = Initiator(
        token=TOKEN,
        local=worker(2, incarnation=3),
        nonce=b"i" * 32,
        expected=server(1, incarnation=5),
        received=lambda: 11,
    )
    asked: list[tuple[Identity, int]] = []

    def admit(peer: Identity, peer_received: int) -> int:
        asked.append((peer, peer_received))
        return 22

    right = Acceptor(token=TOKEN, local=server(1, incarnation=5), nonce=b"a" * 32, admit=admit)
    shake(left, right)
    assert asked == [(worker(2, incarnation=3), 11)]
    assert left.opening and right.opening
    assert (left.opening.peer_received, right.opening.peer_received) == (22, 11)


def test_a_peer_that_is_fenced_is_told_so_after_its_proof() -> None:
    def admit(peer: Identity, peer_received: int) -> int:
        raise ProtocolError(f"{peer} was replaced")

    right = Acceptor(token=TOKEN, local=server(1, incarnation=5), nonce=b"a" * 32, admit=admit)
    (hello,) = initiator().receive(right.start()[0])
    assert refusal(right, changed(hello, proof=bytes(32))) == NO_TOKEN
    assert refusal(right, hello) == "W2 was replaced"


@pytest.mark.parametrize(
    "fields",
    [
        {"nonce": b"j" * 32},
        {"received": 1},
        {"target_role": "coordinator"},
        {"target_id": 2},
        {"target_incarnation": 4},
        {"sealed": True},
    ],
)
def test_a_hello_proves_everything_it_says(fields: dict[str, Any]) -> None:
    right = acceptor()
    (hello,) = initiator().receive(right.start()[0])
    assert refusal(right, changed(hello, **fields)) == NO_TOKEN


@pytest.mark.parametrize(
    "fields", [{"received": 1}, {"sealed": True}, {"incarnation": 6}, {"id": 2}, {"role": "worker"}]
)
def test_a_welcome_proves_everything_it_says(fields: dict[str, Any]) -> None:
    left, right = initiator(), acceptor()
    (hello,) = left.receive(right.start()[0])
    (welcome,) = right.receive(hello)
    assert refusal(left, changed(welcome, **fields)) == NO_TOKEN
    assert left.receive(welcome) == []


def test_a_welcome_answers_exactly_one_hello() -> None:
    """Two initiators with the same nonce, which do not exist, and another word in their Hello."""
    first, second = initiator(), initiator(local=worker(2, incarnation=4))
    right, other = acceptor(), acceptor()
    for left, accepting in ((first, right), (second, other)):
        (hello,) = left.receive(accepting.start()[0])
        (welcome,) = accepting.receive(hello)
    assert refusal(first, welcome) == NO_TOKEN


def test_each_direction_of_each_connection_has_a_key_of_its_own() -> None:
    keys: list[bytes] = []
    for nonce in (b"a" * 32, b"b" * 32):
        left, right = initiator(), acceptor(nonce=nonce)
        said = shake(left, right)
        assert left.opening and right.opening
        assert (left.opening.key_out, left.opening.key_in) == (right.opening.key_in, right.opening.key_out)
        keys += [left.opening.key_out, left.opening.key_in]
        proofs = {message.proof for message in said[1:]}  # type: ignore[attr-defined]
        assert not proofs & set(keys), "a key was said"
    assert len(set(keys)) == 4
    assert {len(key) for key in keys} == {32}


@pytest.mark.parametrize(("left_seals", "right_seals"), [(False, False), (False, True), (True, False), (True, True)])
def test_frames_are_sealed_if_either_side_wants_it(left_seals: bool, right_seals: bool) -> None:
    local, expected = worker(2, incarnation=3), server(1, incarnation=5)
    left = Initiator(token=TOKEN, local=local, nonce=b"i" * 32, expected=expected, seals=left_seals)
    right = Acceptor(token=TOKEN, local=expected, nonce=b"a" * 32, seals=right_seals)
    shake(left, right)
    assert left.opening and right.opening
    assert left.opening.sealed is right.opening.sealed is (left_seals or right_seals)


def test_an_acceptor_that_holds_the_token_cannot_leave_seals_out_either() -> None:
    local, expected = worker(2, incarnation=3), server(1, incarnation=5)
    left = Initiator(token=TOKEN, local=local, nonce=b"i" * 32, expected=expected, seals=True)
    right = acceptor()
    (hello,) = left.receive(right.start()[0])
    assert refusal(left, forged_welcome(right, hello, expected)) == "S1 does not authenticate its frames"


def test_a_refusal_counts_as_much_as_it_proves() -> None:
    left, right = initiator(), acceptor()
    early = right.refuse("later", Refusal.REPLACED)
    assert (early.kind, early.proof) == (Refusal.RETRY, b""), "nothing is proved to a stranger"
    assert left.judge(changed(early, kind=Refusal.FOR_GOOD)) is Refusal.RETRY
    (hello,) = left.receive(right.start()[0])
    assert left.judge(changed(early, kind=Refusal.FOR_GOOD)) is Refusal.RETRY
    right.receive(hello)
    refused = right.refuse("somebody else is here", Refusal.REPLACED)
    assert left.judge(refused) is Refusal.REPLACED
    for fields in ({"kind": Refusal.FOR_GOOD}, {"reason": "another"}, {"proof": b""}, {"proof": b"p" * 32}):
        assert left.judge(changed(refused, **fields)) is Refusal.RETRY
    elsewhere = initiator()
    elsewhere.receive(acceptor(nonce=b"b" * 32).start()[0])
    assert elsewhere.judge(refused) is Refusal.RETRY, "of another connection"
    assert left.refuse("not you", Refusal.FOR_GOOD).kind is Refusal.RETRY


# --- The numbers of a link ---


def pair() -> tuple[Link, Link]:
    left, right = worker(2, incarnation=3), server(1, incarnation=5)
    return Link(local=left, peer=right), Link(local=right, peer=left)


def test_frames_in_order_are_delivered_once() -> None:
    left, right = pair()
    first, second = left.send(Open()), left.send(Open())
    assert first == Stamp(source_incarnation=3, target_incarnation=5, number=1, acknowledged=0)
    assert [right.expects(stamp) for stamp in (first, second)] == [True, False]
    assert [right.accept(stamp) for stamp in (first, second, second, first)] == [True, True, False, False]
    assert [right.expects(stamp) for stamp in (first, second)] == [False, False]
    assert right.send(Open()) == Stamp(source_incarnation=5, target_incarnation=3, number=1, acknowledged=2)


def test_a_gap_is_an_error() -> None:
    left, right = pair()
    left.send(Open())
    with pytest.raises(ProtocolError, match="frame 1 from W2 is missing, 2 came"):
        right.accept(left.send(Open()))


def test_frames_of_or_for_another_incarnation_change_nothing() -> None:
    left, right = pair()
    stamp = left.send(Open())
    for other in ({"source_incarnation": 2}, {"target_incarnation": 4}, {"target_incarnation": 6}):
        assert right.expects(changed(stamp, **other)) is False
        assert right.accept(changed(stamp, **other)) is False
    with pytest.raises(ProtocolError, match="W2 changed its incarnation within a connection"):
        right.accept(changed(stamp, source_incarnation=4))
    assert right.received == 0
    assert right.accept(stamp) is True


def test_nobody_acknowledges_what_was_never_sent() -> None:
    left, right = pair()
    right.send(Open())
    assert right.accept(changed(left.send(Open()), acknowledged=1)) is True
    with pytest.raises(ProtocolError, match="W2 acknowledges frame 2 of 1 sent"):
        right.accept(changed(left.send(Open()), acknowledged=2))


def test_names_are_short() -> None:
    names = [str(Identity(role=role, id=4)) for role in ("coordinator", "server", "worker")]
    assert names == ["C", "S4", "W4"]


# --- Kept until acknowledged ---


def records(floats: int) -> Records:
    return Records(request=0, records=np.zeros(floats, np.float32))


def test_what_is_not_acknowledged_is_sent_again_and_nothing_else() -> None:
    left, right = pair()
    said = [RecordsWritten(request=number) for number in range(5)]
    stamps = [left.send(message) for message in said]
    for stamp in stamps[:3]:
        assert right.accept(stamp)
    assert left.accept(changed(right.acknowledgement(), acknowledged=1)) is False, "it carries nothing"
    assert left.acknowledged == 1
    assert [message for _, message in left.resume(1)] == said[1:]
    again = left.resume(right.received)
    assert [message for _, message in again] == said[3:], "the very same objects"
    assert [stamp.number for stamp, _ in again] == [4, 5]
    assert [right.accept(stamp) for stamp, _ in again] == [True, True]
    assert left.resume(5) == []
    assert left.kept_bytes == 0


def test_a_peer_that_forgot_or_invents_frames_is_not_resumed() -> None:
    left, right = pair()
    for _ in range(3):
        right.accept(left.send(Open()))
    left.accept(right.acknowledgement())
    for wrong in (0, 2, 4):
        with pytest.raises(ProtocolError, match=f"S1 says it has {wrong} frames of 3 sent and 3 acknowledged"):
            left.resume(wrong)
    assert left.resume(3) == []


def test_an_old_acknowledgement_takes_nothing_back() -> None:
    left, right = pair()
    old = right.acknowledgement()
    for _ in range(3):
        right.accept(left.send(Open()))
    left.accept(right.acknowledgement())
    left.accept(old)
    assert (left.acknowledged, left.kept_bytes) == (3, 0)


@pytest.mark.parametrize("floats", [0, 1, 1000, 1 << 20])
def test_one_way_traffic_is_acknowledged_before_much_is_kept(floats: int) -> None:
    """With nothing on the way, a sender keeps no more than what may go unacknowledged."""
    left, right = pair()
    frame_bytes = FRAME_BYTES + 4 * floats
    kept_bytes_max = acknowledgements = 0
    for _ in range(500):
        assert right.accept(left.send(records(floats)), frame_bytes)
        kept_bytes_max = max(kept_bytes_max, left.kept_bytes)
        if right.acknowledgement_due:
            left.accept(right.acknowledgement())
            assert (right.acknowledgement_due, left.kept_bytes) == (False, 0)
            acknowledgements += 1
    assert kept_bytes_max <= max(frame_bytes, min(ACK_FRAMES_MAX * frame_bytes, ACK_BYTES_MAX + frame_bytes))
    assert acknowledgements == 500 // min(ACK_FRAMES_MAX, -(-ACK_BYTES_MAX // frame_bytes))


def test_whoever_answers_needs_no_acknowledgement_of_its_own() -> None:
    left, right = pair()
    for _ in range(1000):
        right.accept(left.send(records(1 << 17)), 1 << 19)
        left.accept(right.send(RecordsWritten(request=0)), 100)
        assert not right.acknowledgement_due
        assert not left.acknowledgement_due
        assert left.kept_bytes == 0


class Wire:
    """Two links over connections that break. What is on the way then is lost, both ways."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.links = pair()
        self.sent: tuple[list[Message], list[Message]] = ([], [])
        self.heard: tuple[list[Message], list[Message]] = ([], [])
        self.way: tuple[deque[Any], deque[Any]] = (deque(), deque())  # from 0 to 1, from 1 to 0
        self.is_open = False
        self.breaks = 0

    def send(self, end: int) -> None:
        message = records(self.rng.choice((0, 1, 300_000)))
        self.sent[end].append(message)
        stamp = self.links[end].send(message)
        if self.is_open:
            self.way[end].append((stamp, message))

    def deliver(self, end: int) -> None:
        if not self.way[end]:
            return
        stamp, message = self.way[end].popleft()
        target = 1 - end
        expected = self.links[target].expects(stamp)
        assert self.links[target].accept(stamp, FRAME_BYTES + (message.records.nbytes if message else 0)) is expected
        if expected:
            self.heard[target].append(message)
        if self.links[target].acknowledgement_due:
            self.way[target].append((self.links[target].acknowledgement(), None))

    def cut(self) -> None:
        self.breaks += self.is_open
        self.is_open = False
        for way in self.way:
            way.clear()

    def join(self) -> None:
        """A handshake: each end says how far it got."""
        self.cut()
        self.is_open = True
        for end in (0, 1):
            self.way[end].extend(self.links[end].resume(self.links[1 - end].received))

    def check_bounds(self) -> None:
        for end, link in enumerate(self.links):
            assert link.sent - link.acknowledged >= len(self.sent[end]) - len(self.heard[1 - end])
            if not self.way[0] and not self.way[1] and self.is_open:
                assert link.kept_bytes < ACK_BYTES_MAX + 2 * 1_200_000


@pytest.mark.parametrize("seed", range(40))
def test_exactly_the_sent_sequence_arrives_whatever_breaks(seed: int) -> None:
    wire = Wire(random.Random(seed))
    moves = [wire.send] * 4 + [wire.deliver] * wire.rng.choice((4, 6, 20))
    for _ in range(2000):
        chance = wire.rng.random()
        if chance < 0.01:
            wire.cut()
        elif chance < 0.03:
            wire.join()
        else:
            wire.rng.choice(moves)(wire.rng.randrange(2))
        wire.check_bounds()
    wire.join()
    while wire.way[0] or wire.way[1]:
        wire.deliver(wire.rng.randrange(2))
    wire.check_bounds()
    for end in (0, 1):
        assert len(wire.sent[end]) > 100
        assert [id(message) for message in wire.heard[1 - end]] == [id(message) for message in wire.sent[end]]
    assert wire.breaks > 10
    wire.join()
    assert [link.kept_bytes for link in wire.links] == [0, 0], "a handshake acknowledges too"
