"""Goal: only holders of the run's token open a link, each knows who the other is, and frames keep their
order.

Method: both sides of a handshake talk to each other directly; then every message is withheld, repeated,
replayed from another connection, or made with the wrong token, role, number or incarnation. The numbering of
a link is tried frame by frame.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from helpers import plain, server, worker

from regrow.core.framing import Stamp
from regrow.core.link import Acceptor, Identity, Initiator, Link
from regrow.core.messages import Challenge, Hello, Message, Open, Welcome
from regrow.errors import ProtocolError

TOKEN = b"t" * 32
NO_TOKEN = "the peer does not hold this run's token"


def acceptor(token: bytes = TOKEN, local: Identity | None = None, nonce: bytes = b"a" * 32) -> Acceptor:
    return Acceptor(token=token, local=local or server(1, incarnation=5), nonce=nonce)


def initiator(
    token: bytes = TOKEN, local: Identity | None = None, expected: Identity | None = None
) -> Initiator:
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


def changed(message: Any, **fields: Any) -> Any:
    return dataclasses.replace(message, **fields)


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
    (hello,) = left.receive(Challenge(protocol=1, nonce=b"i" * 32))  # our own nonce as the challenge
    assert isinstance(hello, Hello)
    assert refusal(left, Welcome(role="server", id=1, incarnation=0, proof=hello.proof)) == NO_TOKEN


@pytest.mark.parametrize(
    "found", [server(1, incarnation=4), server(1, incarnation=6), server(2, incarnation=5), worker(1)]
)
def test_somebody_else_answers(found: Identity) -> None:
    left, right = initiator(), acceptor(local=found)
    (hello,) = left.receive(right.start()[0])
    (welcome,) = right.receive(hello)
    assert refusal(left, welcome) == f"connected to {found!r}, meant {server(1, incarnation=5)!r}"


def test_another_protocol_version() -> None:
    (hello,) = initiator().receive(acceptor().start()[0])
    assert refusal(acceptor(), changed(hello, protocol=2)) == "protocol version 2, this side speaks 1"
    challenge = Challenge(protocol=9, nonce=b"a" * 32)
    assert refusal(initiator(), challenge) == "protocol version 9, this side speaks 1"


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


# --- The numbers of a link ---


def pair() -> tuple[Link, Link]:
    left, right = worker(2, incarnation=3), server(1, incarnation=5)
    return Link(local=left, peer=right), Link(local=right, peer=left)


def test_frames_in_order_are_delivered_once() -> None:
    left, right = pair()
    first, second = left.stamp(), left.stamp()
    assert first == Stamp(source_incarnation=3, target_incarnation=5, number=1, acknowledged=0)
    assert [right.accept(stamp) for stamp in (first, second, second, first)] == [True, True, False, False]
    assert right.stamp() == Stamp(source_incarnation=5, target_incarnation=3, number=1, acknowledged=2)


def test_a_gap_is_an_error() -> None:
    left, right = pair()
    left.stamp()
    with pytest.raises(ProtocolError, match="frame 1 from W2 is missing, 2 came"):
        right.accept(left.stamp())


def test_frames_of_or_for_another_incarnation_change_nothing() -> None:
    left, right = pair()
    stamp = left.stamp()
    assert right.accept(changed(stamp, source_incarnation=2)) is False
    assert right.accept(changed(stamp, target_incarnation=4)) is False
    assert right.accept(changed(stamp, target_incarnation=6)) is False
    with pytest.raises(ProtocolError, match="W2 changed its incarnation within a connection"):
        right.accept(changed(stamp, source_incarnation=4))
    assert right.received == 0
    assert right.accept(stamp) is True


def test_nobody_acknowledges_what_was_never_sent() -> None:
    left, right = pair()
    right.stamp()
    assert right.accept(changed(left.stamp(), acknowledged=1)) is True
    with pytest.raises(ProtocolError, match="W2 acknowledges frame 2 of 1 sent"):
        right.accept(changed(left.stamp(), acknowledged=2))


def test_names_are_short() -> None:
    names = [str(Identity(role=role, id=4)) for role in ("coordinator", "server", "worker")]
    assert names == ["C", "S4", "W4"]
