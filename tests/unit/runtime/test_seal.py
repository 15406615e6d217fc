"""Goal: a frame on a sealed connection is what the other side sent, in its place and its direction, or it is refused,
and nothing of it is used before that is known.

Method: frames of every kind are sealed and read in pieces; every byte of some is changed, frames are repeated, left
out, swapped, turned around and mixed from parts of others. What the reader was asked to place, and what it handed on,
is looked at afterwards.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from helpers import arrays, example_messages, plain

from regrow import checks
from regrow.core.framing import HEADER_BYTES, TAG_BYTES, FrameReader, Limits, Stamp, encode
from regrow.core.messages import Message, Open, Pull, Push, Pushed, Rows
from regrow.errors import ProtocolError
from regrow.runtime import seal as seal_file
from regrow.runtime import transport
from regrow.runtime.seal import Seal

WIDE = Limits(meta_bytes_max=1 << 20, section_bytes_max=1 << 20)
STAMP = Stamp(source_incarnation=1, target_incarnation=2, number=3, acknowledged=4)
KEY, OTHER_KEY = b"k" * 32, b"o" * 32
EXAMPLES = example_messages()
ROWS = Rows(request=4, durable=5, clock=6, rows=np.arange(50, dtype=np.float32))
PUSH = Push(seq=1, **arrays(counts=[2], slots=[1, 2], grads=[1, 2, 3, 4]))


def sealed(*messages: Message, key: bytes = KEY) -> list[bytes]:
    """The frames of one direction from its beginning."""
    seal = Seal(key)
    return [b"".join(encode(message, STAMP, seal)) for message in messages]


def reader(key: bytes = KEY, place: Any = None) -> FrameReader:
    made = FrameReader(limits=WIDE, place=place)
    made.seal = Seal(key)
    return made


def feed(into: FrameReader, data: bytes, piece: int = 1 << 30) -> Iterator[Message]:
    while data:
        buffer = into.buffer()
        count = min(len(buffer), len(data), piece)
        buffer[:count] = data[:count]
        data = data[count:]
        for frame in into.advance(count):
            yield frame.message


def refusal(data: bytes, **options: Any) -> tuple[list[Message], str]:
    """What was handed on before, and why the rest was not."""
    got: list[Message] = []
    with pytest.raises(ProtocolError) as caught:
        for message in feed(reader(**options), data):
            got.append(message)
    return got, caught.value.message


WRONG = "a frame is not what the other side sent: its tag is wrong"


@pytest.mark.parametrize("piece", [1, 7, 64, 1 << 30])
def test_every_message_passes_in_any_pieces(piece: int) -> None:
    heard = list(feed(reader(), b"".join(sealed(*EXAMPLES)), piece))
    assert [plain(message) for message in heard] == [plain(message) for message in EXAMPLES]


def test_sections_are_still_sent_from_where_they_lie() -> None:
    head, counts, slots, grads = encode(PUSH, STAMP, Seal(KEY))
    assert len(head) == len(encode(PUSH, STAMP)[0]) + 4 * TAG_BYTES, "a tag for each section, and for the head"
    for buffer, array in ((counts, PUSH.counts), (slots, PUSH.slots), (grads, PUSH.grads)):
        assert np.shares_memory(np.frombuffer(buffer, np.uint8), array)


@pytest.mark.parametrize("message", [Open(), ROWS, PUSH], ids=["Open", "Rows", "Push"])
def test_every_changed_byte_is_noticed(message: Message) -> None:
    (data,) = sealed(message)
    for at in range(len(data)):
        damaged = bytearray(data)
        damaged[at] ^= 0x40
        got, reason = refusal(bytes(damaged) + bytes(256))
        assert got == []
        assert at < HEADER_BYTES or reason == WRONG


def test_frames_that_are_left_out_repeated_or_swapped() -> None:
    one, two, three = sealed(Pushed(seq=1, durable=0, clock=0), ROWS, Open())
    assert len(list(feed(reader(), one + two + three))) == 3
    for data, before in ((two, 0), (one + one, 1), (one + three, 1), (two + one, 0), (one + two + two, 2)):
        got, reason = refusal(data + bytes(256))
        assert (len(got), reason) == (before, WRONG)


def test_a_frame_of_the_other_direction_or_of_another_connection() -> None:
    (data,) = sealed(ROWS, key=OTHER_KEY)
    assert refusal(data) == ([], WRONG)


def test_a_frame_that_is_not_sealed_at_all() -> None:
    data = b"".join(encode(ROWS, STAMP))
    assert refusal(data + bytes(TAG_BYTES * 2)) == ([], WRONG)


def test_sections_of_one_frame_do_not_fit_another() -> None:
    """The same bytes, in another frame or in another place of the same: each has a tag of its own."""
    twin = Rows(request=9, durable=5, clock=6, rows=ROWS.rows)
    seal = Seal(KEY)
    first, second = encode(ROWS, STAMP, seal), encode(twin, STAMP, seal)
    head_bytes = len(first[0])
    mixed = first[0][: head_bytes - 2 * TAG_BYTES] + second[0][head_bytes - 2 * TAG_BYTES :] + bytes(first[1])
    assert refusal(mixed) == ([], WRONG)


def test_nothing_is_placed_because_of_a_false_head() -> None:
    """Else somebody in between could choose which rows are overwritten."""
    asked: list[Any] = []

    def place(cls: type[Message], meta: tuple[Any, ...], sizes: tuple[int, ...]) -> None:
        asked.append(meta)

    (data,) = sealed(ROWS)
    damaged = bytearray(data)
    damaged[HEADER_BYTES + 1] ^= 1  # the number of the request
    assert refusal(bytes(damaged), place=place) == ([], WRONG)
    assert asked == []


def test_a_false_section_is_placed_and_counts_for_nothing() -> None:
    """It lies where the true one will, but no message says so; when the frame comes again it is overwritten."""
    target = np.zeros(50, np.float32)
    (data,) = sealed(ROWS)
    assert refusal(data[:-1] + b"\xff", place=lambda *_: [target]) == ([], WRONG)
    assert not np.array_equal(target, ROWS.rows)
    (again,) = feed(reader(place=lambda *_: [target]), data)
    assert isinstance(again, Rows) and again.rows is target
    assert np.array_equal(target, ROWS.rows)


def test_a_section_that_does_not_fit_its_place_is_refused() -> None:
    """The sizes are the peer's: to trust them would need an assertion that may be switched off."""
    (data,) = sealed(ROWS)
    got, reason = refusal(data, place=lambda *_: [np.zeros(49, np.float32)])
    assert (got, reason) == ([], "Rows: sections of (200,) bytes do not fit where they belong")


def test_very_large_sections_are_tagged_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(seal_file, "PIECE_BYTES_MAX", 64)
    (data,) = sealed(ROWS)
    assert [plain(message) for message in feed(reader(), data)] == [plain(ROWS)]
    for at in (-1, -64, -65, -200):
        damaged = bytearray(data)
        damaged[at] ^= 1
        assert refusal(bytes(damaged)) == ([], WRONG)


def test_no_two_parts_have_a_nonce_in_common() -> None:
    """With the same nonce twice, a key of GMAC gives itself away."""
    seen: list[bytes] = []

    class Watched(Seal):
        def _tag(self, number: int, data: Any) -> bytes:
            seen.append(seal_file._NONCE.pack(self._frame, number))
            return super()._tag(number, data)

    seal = Watched(KEY)
    for message in [*EXAMPLES, Pull(request=1, step=1, **arrays(counts=[1], slots=[1]))]:
        encode(message, STAMP, seal)
    assert len(set(seen)) == len(seen) > len(EXAMPLES)


def test_the_wishes_of_a_user_and_of_an_endpoint_are_the_same() -> None:
    assert checks.AUTHENTICATE == transport.AUTHENTICATE
