"""Goal: somebody between two processes, without the token, cannot change what they hear: whatever it does, each message
arrives once, in order, as it was sent, over this connection or the next; and nobody is brought to another door.

Method: two real endpoints and a relay between them that understands frames as well as we do. Once, at a moment of the
test's choice, it flips a byte, repeats, swaps, leaves out, returns or invents a frame, or changes a word of the
handshake. From then on it is honest. The same relay between endpoints that do not authenticate gets a wrong row
through: the tests can fail.
"""

# ruff: noqa: F811  (the fixtures of test_transport.py are taken as arguments)

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import pytest
from helpers import server
from test_transport import S0, TOKEN, W0, Side, run, until  # noqa: F401

from regrow.core import framing
from regrow.core.framing import FrameReader, Limits, Stamp, encode
from regrow.core.messages import Challenge, Hello, Message, RecordsWritten, Refused, Rows, Welcome
from regrow.errors import Refusal
from regrow.runtime import transport
from regrow.runtime.transport import parse_address

HANDSHAKE_FRAMES = {"to": 1, "back": 2}  # from the initiator: Hello; from the acceptor: Challenge, Welcome
COUNT = 30
FLOATS = 3_000

# Given the direction, the number of a frame in it on this connection and its bytes: what to pass on instead.
Meddle = Callable[[str, int, bytes], "list[bytes] | None"]


class Relay:
    """Connections to it go on to `target`, frame by frame."""

    def __init__(self, target: str, *, sealed: bool = True) -> None:
        self.target = target
        self.sealed = sealed
        self.meddle: Meddle | None = None
        self.connections = 0
        self.writers: dict[str, asyncio.StreamWriter] = {}  # of the newest connection, by direction
        self._tasks: set[asyncio.Task[None]] = set()

    async def listen(self) -> str:
        self._server = await asyncio.start_server(self._on_connection, "127.0.0.1", 0)
        return f"tcp:127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    async def _on_connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        _, host, port = parse_address(self.target)
        far_reader, far_writer = await asyncio.open_connection(host, port)
        self.writers = {"to": far_writer, "back": writer}
        ways = [self._pass("to", reader, far_writer), self._pass("back", far_reader, writer)]
        for way in ways:
            task = asyncio.ensure_future(way)
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _pass(self, way: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        number = 0
        with contextlib.suppress(OSError, asyncio.IncompleteReadError):
            while True:
                frame = await self._read_frame(reader, sealed=self.sealed and number >= HANDSHAKE_FRAMES[way])
                passed = self.meddle(way, number, frame) if self.meddle is not None else None
                for data in [frame] if passed is None else passed:
                    writer.write(data)
                await writer.drain()
                number += 1
        writer.close()

    async def _read_frame(self, reader: asyncio.StreamReader, *, sealed: bool) -> bytes:
        header = await reader.readexactly(framing.HEADER_BYTES)
        fields = framing._HEADER.unpack(header[: framing._HEADER.size])
        sizes = fields[9:]
        tags = framing.TAG_BYTES * (1 + sum(map(bool, sizes))) if sealed else 0
        return header + await reader.readexactly(fields[4] + tags + sum(sizes))

    async def close(self) -> None:
        self._server.close()
        for task in list(self._tasks):
            task.cancel()
        for writer in self.writers.values():
            writer.close()


def rows(request: int) -> Rows:
    return Rows(request=request, durable=0, clock=0, rows=np.full(FLOATS, request, np.float32))


class Once:
    """Does `trick` to one frame of one direction, on the first connection that has it; honest before and after."""

    def __init__(self, way: str, number: int, trick: Callable[[bytes], list[bytes]]) -> None:
        self.way, self.number, self.trick = way, number, trick
        self.done = 0

    def __call__(self, way: str, number: int, frame: bytes) -> list[bytes] | None:
        if self.done or (way, number) != (self.way, self.number):
            return None
        self.done += 1
        return self.trick(frame)


def flip(at: int) -> Callable[[bytes], list[bytes]]:
    def trick(frame: bytes) -> list[bytes]:
        changed = bytearray(frame)
        changed[at] ^= 1
        return [bytes(changed)]

    return trick


class Swap(Once):
    """Holds one frame back until the next has passed."""

    def __init__(self, way: str, number: int) -> None:
        super().__init__(way, number, lambda frame: [])
        self.held: bytes | None = None

    def __call__(self, way: str, number: int, frame: bytes) -> list[bytes] | None:
        if way == self.way and not self.done and number == self.number:
            self.held = frame
            return []
        if way == self.way and self.held is not None:
            held, self.held = self.held, None
            self.done = 1
            return [frame, held]
        return None


def invented() -> bytes:
    """A good frame but for its tags, with the next number of the link."""
    stamp = Stamp(number=1 << 20)
    return b"".join(encode(RecordsWritten(request=666), stamp)) + bytes(framing.TAG_BYTES)


TRICKS: dict[str, Callable[[], Once]] = {
    "flips a byte of rows": lambda: Once("back", 5, flip(-9)),
    "flips a byte of a tag": lambda: Once("back", 5, flip(framing.HEADER_BYTES + 5)),
    "flips a byte of the meta": lambda: Once("to", 4, flip(framing.HEADER_BYTES + 1)),
    "flips a byte of a header": lambda: Once("to", 4, flip(20)),
    "sends a frame twice": lambda: Once("to", 6, lambda frame: [frame, frame]),
    "sends an answer twice": lambda: Once("back", 6, lambda frame: [frame, frame]),
    "leaves a frame out": lambda: Once("back", 7, lambda frame: []),
    "swaps two frames": lambda: Swap("to", 5),
    "swaps two answers": lambda: Swap("back", 5),
    "invents a frame": lambda: Once("to", 3, lambda frame: [frame, invented()]),
    "cuts a frame short": lambda: Once("to", 5, lambda frame: [frame[:-3]]),
}


async def talk(left: Side, right: Side, relay: Relay) -> None:
    """Both sides say all they have, and hear each word once and in order."""
    left.endpoint.dial(S0, await relay.listen())
    for request in range(COUNT):
        left.endpoint.send(S0, rows(request))
        right.endpoint.send(W0, rows(100 + request))
        await asyncio.sleep(0.001)
    await until(lambda: len(left.heard) >= COUNT and len(right.heard) >= COUNT)
    assert (left.requests(), right.requests()) == ([*range(100, 100 + COUNT)], [*range(COUNT)])


def check_rows(side: Side) -> list[int]:
    """The requests whose rows are wrong."""
    return [
        message.request
        for _, message in side.heard
        if isinstance(message, Rows) and not np.array_equal(message.rows, np.full(FLOATS, message.request, np.float32))
    ]


async def close_all(*sides: Any) -> None:
    for side in sides:
        await (side.endpoint if isinstance(side, Side) else side).close()


@pytest.mark.parametrize("name", TRICKS)
def test_whatever_a_relay_does_to_a_frame_the_connection_ends_and_is_resumed(run: Any, name: str) -> None:
    async def main() -> None:
        targets = {100 + request: np.zeros(FLOATS, np.float32) for request in range(COUNT)}
        left = Side(W0, place=lambda peer, cls, meta, sizes: [targets[meta[0]]] if cls is Rows else None)
        right = Side(S0)
        relay = Relay(await right.endpoint.listen("tcp:127.0.0.1:0"))
        relay.meddle = trick = TRICKS[name]()
        await talk(left, right, relay)
        assert trick.done == 1, "this test has lost its trick"
        assert relay.connections >= 2, "the connection went on"
        assert (check_rows(left), check_rows(right)) == ([], [])
        assert (left.resumed, left.fenced, right.fenced) == ([S0] * (relay.connections - 1), [], [])
        await close_all(left, right, relay)

    run(main())


def test_a_frame_that_is_returned_to_its_sender(run: Any) -> None:
    async def main() -> None:
        left, right = Side(W0), Side(S0)
        relay = Relay(await right.endpoint.listen("tcp:127.0.0.1:0"))

        def reflect(frame: bytes) -> list[bytes]:
            relay.writers["back"].write(frame)
            return [frame]

        relay.meddle = trick = Once("to", 4, reflect)
        await talk(left, right, relay)
        assert (trick.done, relay.connections >= 2) == (1, True)
        assert (check_rows(left), check_rows(right)) == ([], [])
        await close_all(left, right, relay)

    run(main())


def test_without_authentication_the_same_relay_changes_a_row(run: Any) -> None:
    """What the others are measured against."""

    async def main() -> None:
        left, right = Side(W0, authenticate="never"), Side(S0, authenticate="never")
        relay = Relay(await right.endpoint.listen("tcp:127.0.0.1:0"), sealed=False)
        relay.meddle = Once("back", 5, flip(-9))
        await talk(left, right, relay)
        assert (len(check_rows(left)), relay.connections) == (1, 1)
        await close_all(left, right, relay)

    run(main())


def test_either_side_can_ask_for_authentication(run: Any) -> None:
    for careful in (0, 1):
        wishes = ["never", "never"]
        wishes[careful] = "always"

        async def main(wishes: list[str] = wishes) -> None:
            left, right = Side(W0, authenticate=wishes[0]), Side(S0, authenticate=wishes[1])
            relay = Relay(await right.endpoint.listen("tcp:127.0.0.1:0"))
            relay.meddle = Once("back", 5, flip(-9))
            await talk(left, right, relay)
            assert (check_rows(left), relay.connections >= 2) == ([], True)
            await close_all(left, right, relay)

        run(main())


# --- The handshake ---


def read(frame: bytes) -> Message:
    reader = FrameReader(limits=Limits(meta_bytes_max=1 << 16, section_bytes_max=0))
    reader.buffer()[: len(frame)] = frame
    (got,) = reader.advance(len(frame))
    return got.message


def rewrite(**fields: Any) -> Callable[[bytes], list[bytes]]:
    def trick(frame: bytes) -> list[bytes]:
        message: Any = read(frame)
        return [b"".join(encode(msgspec.structs.replace(message, **fields), Stamp()))]

    return trick


WORDS: dict[str, tuple[type[Message], str, int, dict[str, Any]]] = {
    "another nonce of the acceptor": (Challenge, "back", 0, {"nonce": b"n" * 32}),
    "the worker has more than it has": (Hello, "to", 0, {"received": 1}),
    "the worker is another": (Hello, "to", 0, {"id": 1}),
    "somebody else was meant": (Hello, "to", 0, {"target_id": 1}),
    "the worker does not want tags": (Hello, "to", 0, {"sealed": False}),
    "another nonce of the worker": (Hello, "to", 0, {"nonce": b"n" * 32}),
    "the server has more than it has": (Welcome, "back", 1, {"received": 1}),
    "the server does not want tags": (Welcome, "back", 1, {"sealed": False}),
    "the server is another incarnation": (Welcome, "back", 1, {"incarnation": 1}),
}


@pytest.mark.parametrize("name", WORDS)
def test_a_word_of_the_handshake_that_was_changed_opens_nothing(run: Any, name: str) -> None:
    kind, way, number, fields = WORDS[name]

    async def main() -> None:
        left, right = Side(W0), Side(S0)
        relay = Relay(await right.endpoint.listen("tcp:127.0.0.1:0"))
        seen: list[Message] = []

        def trick(frame: bytes) -> list[bytes]:
            seen.append(read(frame))
            return rewrite(**fields)(frame)

        relay.meddle = Once(way, number, trick)
        await talk(left, right, relay)
        assert [type(message) for message in seen] == [kind]
        assert relay.connections >= 2
        assert (left.opened, right.opened, left.fenced) == ([S0], [W0], [])
        await close_all(left, right, relay)

    run(main())


def test_nobody_is_brought_to_another_door(run: Any) -> None:
    """The other server holds the token too; it is still not who was meant, and neither is an incarnation before."""

    async def main() -> None:
        left, other, newer = Side(W0), Side(server(1)), Side(server(0, incarnation=1))
        for somebody, reason in ((other, "server 0 was meant"), (newer, "incarnation 1, 0 was meant")):
            relay = Relay(await somebody.endpoint.listen("tcp:127.0.0.1:0"))
            left.endpoint.dial(S0, await relay.listen())
            left.endpoint.send(S0, rows(1))
            await until(lambda: relay.connections >= 2)  # noqa: B023
            assert (somebody.opened, somebody.heard, left.opened) == ([], [], [])
            assert any(reason in text for _, text in left.lost)
            left.endpoint.forget(S0)
            await relay.close()
            left = Side(W0)
        await close_all(left, other, newer)

    run(main())


def test_a_refusal_without_a_proof_stops_nobody(run: Any) -> None:
    """Else whoever can answer at an address could put an end to a process."""

    async def main() -> None:
        left, right = Side(W0), Side(S0)
        relay = Relay(await right.endpoint.listen("tcp:127.0.0.1:0"))
        forged = Refused(reason="go away", kind=Refusal.REPLACED, proof=b"p" * 32)
        relay.meddle = Once("back", 1, lambda frame: [b"".join(encode(forged, Stamp()))])
        await talk(left, right, relay)
        assert (relay.connections, left.fenced, left.lost[0][1]) == (2, [], "cannot open a link: refused: go away")
        await close_all(left, right, relay)

    run(main())


def test_nothing_but_refusals_is_not_waited_for_for_ever(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transport, "REFUSED_SECONDS_MAX", 0.3)

    async def main() -> None:
        left, right = Side(W0, token=b"x" * 32), Side(S0)
        left.endpoint.dial(S0, await right.endpoint.listen("tcp:127.0.0.1:0"))
        await until(lambda: left.fenced)
        reason = "cannot open a link: refused: the peer does not hold this run's token"
        assert left.fenced == [(S0, f"{reason} (for 0.3 s)")]
        await until(lambda: not left.endpoint._dials)
        await close_all(left, right)

    run(main())


def test_a_frame_that_is_refused_again_and_again_is_a_refusal_too(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The handshake succeeds each time, and each time the same frame is not taken."""
    monkeypatch.setattr(transport, "REFUSED_SECONDS_MAX", 0.3)

    async def main() -> None:
        left, right = Side(W0), Side(S0)
        right.endpoint.limits = Limits(meta_bytes_max=1 << 16, section_bytes_max=4)
        left.endpoint.dial(S0, await right.endpoint.listen("tcp:127.0.0.1:0"))
        left.endpoint.send(S0, rows(1))
        await until(lambda: left.fenced)
        assert "at most 4 are allowed (for 0.3 s)" in left.fenced[0][1]
        assert right.heard == []
        await close_all(left, right)

    run(main())
