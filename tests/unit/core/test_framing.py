"""Goal: a frame arrives as it left, whatever the pieces, and nothing else is ever taken for one.

Method: every example message goes through `FrameReader` whole, byte by byte, in random pieces and with the
beginning of the next frame behind it. Damage is enumerated: every bit of a header, every bound of `Limits`,
every kind of meta that does not fit. Random bytes may only be refused or waited for.
"""

from __future__ import annotations

import ast
import random
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from helpers import arrays, example_messages, job, mutated, plain, table, view

from regrow.core import framing, link
from regrow.core.framing import HEADER_BYTES, LIMITS_STRANGER, Frame, FrameReader, Limits, Stamp, encode
from regrow.core.messages import KINDS, Challenge, Message, Open, Pull, Pushed, Refused, Rows
from regrow.core.twins import crc32c
from regrow.errors import LocalProtocolError, ProtocolError
from regrow.runtime import connection, transport

WIDE = Limits(meta_bytes_max=1 << 20, section_bytes_max=1 << 20)
STAMP = Stamp(source_incarnation=2**32 - 1, target_incarnation=1, number=2**64 - 1, acknowledged=2**63)
EXAMPLES = example_messages()
NAMES = [f"{index}-{type(message).__name__}" for index, message in enumerate(EXAMPLES)]


def bytes_of(message: Message, stamp: Stamp = STAMP) -> bytes:
    return b"".join(encode(message, stamp))


def feed(reader: FrameReader, data: bytes, pieces: Iterator[int]) -> list[Frame]:
    """Puts `data` where the reader wants it, at most so many bytes at a time as `pieces` says."""
    frames: list[Frame] = []
    at = 0
    while at < len(data):
        buffer = reader.buffer()
        assert len(buffer) > 0, "a reader always has room for the next byte"
        count = min(len(buffer), len(data) - at, next(pieces))
        buffer[:count] = data[at : at + count]
        frames += reader.advance(count)
        at += count
    return frames


def steady(size: int) -> Iterator[int]:
    while True:
        yield size


def uneven(seed: int) -> Iterator[int]:
    rng = random.Random(seed)
    while True:
        yield rng.choice((1, 2, 3, 7, 64, 500, 5000))


def check(frames: list[Frame], *expected: Message) -> None:
    assert [plain(frame.message) for frame in frames] == [plain(message) for message in expected]
    assert [frame.stamp for frame in frames] == [STAMP] * len(expected)
    assert [bytes_of(frame.message) for frame in frames] == [bytes_of(message) for message in expected]
    assert [frame.wire_bytes for frame in frames] == [len(bytes_of(message)) for message in expected]


# --- Round trips ---


@pytest.mark.parametrize("message", EXAMPLES, ids=NAMES)
@pytest.mark.parametrize("pieces", ["whole", "bytes", "random"])
def test_round_trip(message: Message, pieces: str) -> None:
    some = [uneven(seed) for seed in range(10)]
    for style in {"whole": [steady(1 << 30)], "bytes": [steady(1)], "random": some}[pieces]:
        check(feed(FrameReader(limits=WIDE), bytes_of(message), style), message)


@pytest.mark.parametrize("message", EXAMPLES, ids=NAMES)
def test_round_trip_with_the_beginning_of_the_next_frame(message: Message) -> None:
    following = Rows(request=8, durable=7, clock=6, **arrays(rows=[1, 2, 3]))
    data, rest = bytes_of(message), bytes_of(following)
    for cut in {0, 1, HEADER_BYTES - 1, HEADER_BYTES, HEADER_BYTES + 1, len(rest) - 12, len(rest) - 1}:
        reader = FrameReader(limits=WIDE)
        check(feed(reader, data + rest[:cut], steady(1 << 30)), message)
        check(feed(reader, rest[cut:], steady(1 << 30)), following)


def test_all_messages_in_one_stream_in_any_pieces() -> None:
    data = b"".join(bytes_of(message) for message in EXAMPLES)
    for style in (steady(1 << 30), steady(1), steady(HEADER_BYTES), uneven(1), uneven(2), uneven(3)):
        check(feed(FrameReader(limits=WIDE), data, style), *EXAMPLES)


def test_small_frames_that_arrive_together_come_out_together() -> None:
    pushed = [Pushed(seq=seq, durable=0, clock=seq) for seq in range(20)]
    data = b"".join(bytes_of(message) for message in pushed)
    reader = FrameReader(limits=WIDE)
    reader.buffer()[: len(data)] = data
    check(list(reader.advance(len(data))), *pushed)


def test_a_frame_may_change_what_is_allowed_of_the_next() -> None:
    """A view often follows the last word of the handshake in the same piece."""
    welcome, large = EXAMPLES[2], Rows(request=1, durable=0, clock=0, **arrays(rows=[1] * 500))
    data = bytes_of(welcome) + bytes_of(large)
    reader = FrameReader(limits=LIMITS_STRANGER)
    reader.buffer()[: len(data)] = data
    frames = []
    for frame in reader.advance(len(data)):
        frames.append(frame)
        reader.limits = WIDE
    check(frames, welcome, large)


def test_what_came_before_the_damage_is_delivered() -> None:
    reader = FrameReader(limits=WIDE)
    data = bytes_of(Open()) + bytes(HEADER_BYTES)
    reader.buffer()[: len(data)] = data
    arrived = reader.advance(len(data))
    check([next(arrived)], Open())
    with pytest.raises(ProtocolError, match="wrong first bytes"):
        next(arrived)


# --- No copies ---


def test_sections_are_sent_from_where_they_lie() -> None:
    message = Pull(request=1, step=1, **arrays(counts=[3], slots=[1, 2, 3]))
    _, counts, slots = encode(message, STAMP)
    assert np.shares_memory(np.frombuffer(counts, np.int32), message.counts)
    assert np.shares_memory(np.frombuffer(slots, np.uint32), message.slots)


@pytest.mark.parametrize("piece", [1, 7, 1 << 30])
def test_sections_are_received_where_they_are_wanted(piece: int) -> None:
    target = np.zeros(6000, np.float32)
    asked: list[Any] = []

    def place(cls: type[Message], meta: tuple[Any, ...], sizes: tuple[int, ...]) -> list[Any]:
        asked.append((cls, meta, sizes))
        return [target[500:5500]]

    reader = FrameReader(limits=WIDE, place=place)
    data = bytes_of(Rows(request=4, durable=5, clock=6, rows=np.arange(5000, dtype=np.float32)))
    head = len(data) - 20_000
    feed(reader, data[: head + 1], steady(piece))
    rest = np.frombuffer(reader.buffer(), np.uint8)
    assert rest.size == 19_999
    assert np.shares_memory(rest, target), "the socket writes into the caller's array"
    (frame,) = feed(reader, data[head + 1 :], steady(piece))
    assert isinstance(frame.message, Rows)
    assert np.shares_memory(frame.message.rows, target)
    assert asked == [(Rows, (4, 5, 6), (20_000,))]
    assert target.tolist() == [0.0] * 500 + [float(x) for x in range(5000)] + [0.0] * 500


def test_nobody_wants_it_so_it_gets_memory_of_its_own() -> None:
    message = Rows(request=4, durable=5, clock=6, **arrays(rows=[1, 2]))
    check(feed(FrameReader(limits=WIDE, place=lambda *_: None), bytes_of(message), steady(5)), message)


def test_what_a_peer_sends_is_not_checked_by_assertions() -> None:
    """They may be switched off (`python -O`)."""
    for module in (framing, link, connection, transport):
        tree = ast.parse(Path(module.__file__).read_text())
        assert not [node.lineno for node in ast.walk(tree) if isinstance(node, ast.Assert)], module.__name__


# --- Our own mistakes ---


def test_a_wrong_dtype_does_not_leave() -> None:
    message = Rows(request=1, durable=0, clock=0, rows=np.zeros(3))  # type: ignore[arg-type]
    with pytest.raises(LocalProtocolError, match=r"Rows\.rows is float64, it must be float32"):
        encode(message, STAMP)


def test_an_array_with_gaps_is_sent_as_its_elements() -> None:
    message = Rows(request=1, durable=0, clock=0, rows=np.arange(9, dtype=np.float32)[::2])
    check(feed(FrameReader(limits=WIDE), bytes_of(message), steady(64)), message)


# --- Damage ---


def forged(
    *, kind: int, meta: bytes = b"", sections: int = 0, reserved: int = 0, sizes: tuple[int, ...] = (0, 0, 0),
    meta_bytes: int | None = None,
) -> bytes:  # fmt: skip
    """A header of our choice with a good checksum, and the meta."""
    size = len(meta) if meta_bytes is None else meta_bytes
    header = framing._HEADER.pack(framing.MAGIC, kind, sections, reserved, size, 0, 0, 1, 0, *sizes)
    return header + framing._CHECKSUM.pack(crc32c(header)) + meta


def refusal(data: bytes, limits: Limits = WIDE) -> str:
    with pytest.raises(ProtocolError) as caught:
        feed(FrameReader(limits=limits), data, steady(1 << 30))
    return caught.value.message


def test_every_damaged_bit_of_a_header_is_noticed() -> None:
    data = bytes_of(Pull(request=1, step=1, **arrays(counts=[3], slots=[1, 2, 3])))
    for bit in range(8 * HEADER_BYTES):
        damaged = bytearray(data)
        damaged[bit // 8] ^= 1 << bit % 8
        expected = "wrong first bytes" if bit < 32 else "checksum"
        assert expected in refusal(bytes(damaged))


def test_headers_that_lie() -> None:
    assert refusal(forged(kind=999)) == "unknown message kind 999"
    assert refusal(forged(kind=Open.KIND, reserved=1)) == "Open: reserved header byte is not zero"
    assert refusal(forged(kind=Rows.KIND, sections=2)) == "Rows has 1 sections, the frame has 2"
    assert refusal(forged(kind=Rows.KIND, sections=0)) == "Rows has 1 sections, the frame has 0"
    assert refusal(forged(kind=Pull.KIND, sections=255)) == "Pull has 2 sections, the frame has 255"
    beyond = forged(kind=Rows.KIND, sections=1, sizes=(4, 0, 8))
    assert refusal(beyond) == "Rows: a section that does not exist has 8 bytes"
    broken = forged(kind=Rows.KIND, sections=1, sizes=(7, 0, 0))
    assert refusal(broken) == "Rows: section of 7 bytes is not a whole number of elements"


def test_bounds_hold_to_the_byte_and_before_memory_is_taken() -> None:
    meta = msgspec.msgpack.encode([1, 2, 3])
    limits = Limits(meta_bytes_max=len(meta), section_bytes_max=8)
    fits = forged(kind=Rows.KIND, meta=meta, sections=1, sizes=(8, 0, 0)) + bytes(8)
    assert len(feed(FrameReader(limits=limits), fits, steady(1 << 30))) == 1
    small = Limits(meta_bytes_max=len(meta) - 1, section_bytes_max=8)
    assert refusal(fits, small) == "Rows: meta of 4 bytes, at most 3 are allowed"
    large = forged(kind=Rows.KIND, meta=meta, sections=1, sizes=(12, 0, 0))
    assert refusal(large, limits) == "Rows: section of 12 bytes, at most 8 are allowed"

    tracemalloc.start()
    try:
        for size in (1 << 31, 1 << 40, 2**64 - 4):
            refusal(forged(kind=Rows.KIND, meta=meta, sections=1, sizes=(size, 0, 0)))
        refusal(forged(kind=Open.KIND, meta_bytes=2**32 - 1))
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


def test_a_stranger_may_say_little() -> None:
    check(feed(FrameReader(limits=LIMITS_STRANGER), bytes_of(Open()), steady(1)), Open())
    assert "section of 4 bytes, at most 0" in refusal(
        bytes_of(Rows(request=1, durable=0, clock=0, **arrays(rows=[1]))), LIMITS_STRANGER
    )
    large = view(job(*(table(f"table {index}") for index in range(200))))
    assert "meta of" in refusal(bytes_of(large), LIMITS_STRANGER)


@pytest.mark.parametrize(
    ("cls", "meta"),
    [
        (Rows, []),
        (Rows, [1, 2]),
        (Rows, [1, 2, 3, 4]),
        (Rows, [1, 2, -1]),
        (Rows, [1, 2, 2**62 + 1]),
        (Rows, [1, 2, 2**64 - 1]),
        (Rows, [1, 2, 1.5]),
        (Rows, [1, 2, None]),
        (Rows, {"request": 1, "durable": 2, "clock": 3}),
        (Open, [0]),
        (Open, None),
        (Refused, [b"bytes"]),
        (Refused, ["x" * 4097]),
        (Challenge, [1, b"31 bytes".ljust(31)]),
        (Challenge, [1, b"33 bytes".ljust(33)]),
        (Challenge, [2**32, b"32".ljust(32)]),
        (Challenge, [1, "32 characters".ljust(32)]),
    ],
)
def test_meta_that_does_not_fit(cls: type[Message], meta: Any) -> None:
    sections = len(cls.SECTION_FIELDS)
    data = forged(kind=cls.KIND, meta=msgspec.msgpack.encode(meta), sections=sections)
    assert refusal(data).startswith(f"{cls.__name__}: meta cannot be read: ")


@pytest.mark.parametrize(
    "meta",
    [
        b"",
        b"\x91",
        b"\x91\xa5abc",  # a text that ends early
        b"\x91\xa1\xff",  # not UTF-8
        b"\x91\xa3\xed\xa0\x80",  # a lone surrogate
        b"\xc1",  # a byte that msgpack never uses
        b"\x91" * 5000 + b"\x90",  # deep nesting
        b"\xdd\xff\xff\xff\xff",  # four billion elements, none there
        b"\x91\xdb\xff\xff\xff\xff",  # four billion characters, none there
        b"\x91\xa1a\x00",  # something behind the end
    ],
)
def test_meta_that_is_not_msgpack(meta: bytes) -> None:
    assert refusal(forged(kind=Refused.KIND, meta=meta)).startswith("Refused: meta cannot be read: ")


# --- Anything at all ---


@pytest.mark.parametrize("limits", [WIDE, LIMITS_STRANGER], ids=["wide", "stranger"])
def test_random_and_mutated_bytes_are_refused_or_waited_for(limits: Limits) -> None:
    rng = random.Random(20)
    data = [bytes_of(message) for message in EXAMPLES if len(bytes_of(message)) < 4000]
    outcomes = {"frames": 0, "refused": 0, "waiting": 0}
    bound = 3 * limits.section_bytes_max + 2 * limits.meta_bytes_max + (1 << 20)
    tracemalloc.start()
    try:
        for _ in range(6000):
            reader = FrameReader(limits=limits)
            sent = b"".join(mutated(rng, rng.choice(data)) for _ in range(rng.randint(1, 3)))
            if rng.random() < 0.2:
                sent = rng.randbytes(rng.randint(1, 300))
            try:
                frames = feed(reader, sent, uneven(rng.randrange(1 << 30)))
                outcomes["frames" if frames else "waiting"] += 1
                assert all(type(frame.message) in KINDS.values() for frame in frames)
            except ProtocolError as error:
                assert error.message
                outcomes["refused"] += 1
        assert tracemalloc.get_traced_memory()[1] < bound
    finally:
        tracemalloc.stop()
    assert min(outcomes.values()) > 50, f"this test has lost its variety: {outcomes}"
