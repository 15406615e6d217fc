"""Messages as bytes on an ordered stream, and back.

A frame is a fixed header, the meta, and up to three sections. The header is checksummed and every size in it
is checked against a bound before memory is taken for it. `FrameReader` owns no socket: it says where the next
bytes should go (`buffer`) and what they turned out to be (`advance`), so large sections are received in
place.

On a **sealed** connection the head of a frame (header and meta) ends with tags: one for each section that is not empty,
and one for the head with those tags in it. So a head is known to be true before anything is done because of it, be it
taking memory or choosing where sections go, and a section before its message is handed on. The number of the frame in
its direction goes into every tag and is not sent: what was left out, repeated, swapped or turned around does not fit.

The rule to keep: nothing of a sealed frame is used before its tag, and a message is handed on whole or not at all.
What a frame with a wrong tag left in the place of its sections counts for nothing: no message says that it is there,
the connection ends, and the same frame comes again over the next one.
"""

from __future__ import annotations

import dataclasses
import hmac
import struct
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import msgspec
import numpy as np

from regrow import _kernels
from regrow.core.messages import KINDS, Message, encode_meta
from regrow.errors import LocalProtocolError, ProtocolError

MAGIC = b"RGRW"
SECTIONS_MAX = 3
SCRATCH_BYTES = 4096  # Larger saves reads of small frames, but copies more of a large one out of the scratch.

# magic, kind, section count, reserved, meta bytes, source and target incarnation, link number and
# acknowledgement, section bytes; then the checksum of all that.
_HEADER = struct.Struct("<4sHBBIIIQQ3Q")
_CHECKSUM = struct.Struct("<I")
HEADER_BYTES = _HEADER.size + _CHECKSUM.size
TAG_BYTES = 16
_HEAD = 0  # the part of a frame that is not a section; those are 1, 2, 3


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What a peer may make us allocate. Tight before the handshake, wide after it."""

    meta_bytes_max: int
    section_bytes_max: int


LIMITS_STRANGER = Limits(meta_bytes_max=8192, section_bytes_max=0)


class Stamp(msgspec.Struct, frozen=True, kw_only=True):
    """The numbers of one frame on its link."""

    source_incarnation: int = 0
    target_incarnation: int = 0
    number: int = 0
    acknowledged: int = 0


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Frame:
    """A received message with its stamp and its size on the wire."""

    message: Message
    stamp: Stamp
    wire_bytes: int


class Seal(Protocol):
    """Makes the tags of one direction of one connection. Both ends have one with the same key."""

    def begin_frame(self) -> None:
        """What is tagged from now on belongs to the next frame."""

    def tag(self, part: int, data: Any) -> bytes:
        """For one part of this frame, TAG_BYTES long. Each part is tagged once at most."""


# Given a message class, its meta values and section sizes in bytes: where the sections shall go, or None for
# fresh memory.
Placement = Callable[[type[Message], tuple[Any, ...], tuple[int, ...]], "list[np.ndarray[Any, Any]] | None"]


def encode(message: Message, stamp: Stamp, seal: Seal | None = None) -> list[Any]:
    """The buffers of a frame, for one scatter/gather write. Sections are referenced, not copied."""
    meta = encode_meta(message)
    arrays = [np.ascontiguousarray(getattr(message, name)) for name in message.SECTION_FIELDS]
    for array, name, dtype in zip(arrays, message.SECTION_FIELDS, message.SECTION_DTYPES, strict=True):
        if array.dtype != dtype:
            raise LocalProtocolError(f"{type(message).__name__}.{name} is {array.dtype}, it must be {dtype}")
    sizes = [array.nbytes for array in arrays]
    header = _HEADER.pack(
        MAGIC,
        message.KIND,
        len(sizes),
        0,
        len(meta),
        stamp.source_incarnation,
        stamp.target_incarnation,
        stamp.number,
        stamp.acknowledged,
        *sizes,
        *([0] * (SECTIONS_MAX - len(sizes))),
    )
    head = header + _CHECKSUM.pack(_kernels.crc32c(header)) + meta
    # An empty array has no bytes to cast, and needs no tag: its size is in the header.
    sections = [(part, array.data.cast("B")) for part, array in enumerate(arrays, 1) if array.size]
    if seal is not None:
        seal.begin_frame()
        head += b"".join([seal.tag(part, data) for part, data in sections])
        head += seal.tag(_HEAD, head)
    return [head, *(data for _, data in sections)]


class FrameReader:
    """Turns a stream into frames, whatever the pieces it arrives in."""

    def __init__(self, *, limits: Limits, place: Placement | None = None) -> None:
        self.limits = limits
        self.place = place
        # Which frames may be placed; None: all. One that will be dropped must not write where its twin went.
        self.placed: Callable[[Stamp], bool] | None = None
        self.seal: Seal | None = None  # set between two frames: from the next one on, all are sealed
        self._scratch = memoryview(bytearray(SCRATCH_BYTES))
        self._filled = 0  # bytes in the scratch not yet understood
        self._needed = HEADER_BYTES  # bytes in the scratch that make the next decision possible
        self._open: _OpenFrame | None = None

    def buffer(self) -> memoryview:
        """Where the next bytes of the stream belong. Never empty."""
        if self._open is not None:
            return self._open.rest()
        return self._scratch[self._filled :]

    def advance(self, count: int) -> Iterator[Frame]:
        """`count` bytes were put into `buffer()`: gives the frames that are now complete, to be taken to the end.

        They are read one by one, because a frame may change what is allowed of the next: what follows the last
        word of a handshake in the same piece is no longer from a stranger.
        """
        if self._open is not None:
            self._open.advance(count)
            if self._open.complete:
                frame, self._open = self._open.finish(), None
                yield frame
            return
        self._filled += count
        start = 0
        while self._open is None and self._filled - start >= self._needed:
            start, complete = self._understand(start)
            if complete is not None:
                yield complete
        self._filled -= start
        if self._filled and start:
            self._scratch[: self._filled] = bytes(self._scratch[start : start + self._filled])
        if self._needed > len(self._scratch):
            grown = memoryview(bytearray(self._needed))
            grown[: self._filled] = self._scratch[: self._filled]
            self._scratch = grown

    def _understand(self, start: int) -> tuple[int, Frame | None]:
        """Reads one header, or a header with what follows; returns where unread bytes begin."""
        fields = self._header(start)
        kind, section_count, meta_bytes = fields[1], fields[2], fields[4]
        sizes = fields[9 : 9 + section_count]
        meta_end = HEADER_BYTES + meta_bytes
        self._needed = meta_end if self.seal is None else meta_end + TAG_BYTES * (1 + sum(map(bool, sizes)))
        if self._filled - start < self._needed:
            return start, None
        tags = self._check_head(self._scratch[start : start + self._needed], meta_end)
        cls = KINDS[kind]
        meta = _decode_meta(cls, self._scratch[start + HEADER_BYTES : start + meta_end])
        stamp = Stamp(
            source_incarnation=fields[5],
            target_incarnation=fields[6],
            number=fields[7],
            acknowledged=fields[8],
        )
        place = self.place if self.placed is None or self.placed(stamp) else None
        opened = _OpenFrame(cls, meta, stamp, sizes, place, self._needed)
        opened.seal, opened.tags = self.seal, tags
        start += self._needed
        self._needed = HEADER_BYTES
        while not opened.complete and start < self._filled:
            rest = opened.rest()
            count = min(len(rest), self._filled - start)
            rest[:count] = self._scratch[start : start + count]
            opened.advance(count)
            start += count
        if opened.complete:
            return start, opened.finish()
        self._open = opened
        return start, None

    def _check_head(self, head: memoryview, meta_end: int) -> bytes:
        """The tags of the sections, once the tag of the head is right; nothing on a connection without a seal."""
        if self.seal is None:
            return b""
        self.seal.begin_frame()
        tagged = len(head) - TAG_BYTES
        _check_tag(self.seal, _HEAD, head[:tagged], bytes(head[tagged:]))
        return bytes(head[meta_end:tagged])

    def _header(self, start: int) -> tuple[Any, ...]:
        """The header at `start`, or ProtocolError: nothing of a frame is used before this has passed."""
        end = start + _HEADER.size
        fields = _HEADER.unpack(self._scratch[start:end])
        (checksum,) = _CHECKSUM.unpack(self._scratch[end : end + _CHECKSUM.size])
        if fields[0] != MAGIC:
            raise ProtocolError("this is not a Regrow stream (wrong first bytes)")
        if checksum != _kernels.crc32c(self._scratch[start:end]):
            raise ProtocolError("a frame header is damaged (checksum)")
        if reason := self._header_invalid_reason(fields):
            raise ProtocolError(reason)
        return fields

    def _header_invalid_reason(self, fields: tuple[Any, ...]) -> str | None:
        cls = KINDS.get(fields[1])
        if cls is None:
            return f"unknown message kind {fields[1]}"
        if fields[3] != 0:
            return f"{cls.__name__}: reserved header byte is not zero"
        if fields[2] != len(cls.SECTION_FIELDS):
            return f"{cls.__name__} has {len(cls.SECTION_FIELDS)} sections, the frame has {fields[2]}"
        meta_max, section_max = self.limits.meta_bytes_max, self.limits.section_bytes_max
        if fields[4] > meta_max:
            return f"{cls.__name__}: meta of {fields[4]} bytes, at most {meta_max} are allowed"
        for index, size in enumerate(fields[9:]):
            if index >= fields[2]:
                if size:
                    return f"{cls.__name__}: a section that does not exist has {size} bytes"
            elif size > section_max:
                return f"{cls.__name__}: section of {size} bytes, at most {section_max} are allowed"
            elif size % cls.SECTION_DTYPES[index].itemsize:
                return f"{cls.__name__}: section of {size} bytes is not a whole number of elements"
        return None


def _decode_meta(cls: type[Message], data: memoryview) -> tuple[Any, ...]:
    try:
        return cls.META_DECODER.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ProtocolError(f"{cls.__name__}: meta cannot be read: {error}") from None


def _check_tag(seal: Seal, part: int, data: Any, tag: bytes) -> None:
    if not hmac.compare_digest(seal.tag(part, data), tag):
        raise ProtocolError("a frame is not what the other side sent: its tag is wrong")


class _OpenFrame:
    """A frame whose header and meta are known and whose sections are arriving."""

    __slots__ = ("_arrays", "_cls", "_meta", "_section", "_stamp", "_view", "_wire_bytes", "complete", "seal", "tags")

    def __init__(
        self,
        cls: type[Message],
        meta: tuple[Any, ...],
        stamp: Stamp,
        sizes: tuple[int, ...],
        place: Placement | None,
        prefix_bytes: int,
    ) -> None:
        arrays = place(cls, meta, sizes) if place is not None else None
        if arrays is None:
            arrays = [
                np.empty(size // dtype.itemsize, dtype) for size, dtype in zip(sizes, cls.SECTION_DTYPES, strict=True)
            ]
        if [array.nbytes for array in arrays] != list(sizes):  # the sizes are the peer's
            raise ProtocolError(f"{cls.__name__}: sections of {sizes} bytes do not fit where they belong")
        self.seal: Seal | None = None
        self.tags = b""
        self._cls = cls
        self._meta = meta
        self._stamp = stamp
        self._arrays = arrays
        self._wire_bytes = prefix_bytes + sum(sizes)
        self._section = -1
        self._view = memoryview(b"")
        self.complete = False
        self._next_section()

    def rest(self) -> memoryview:
        return self._view

    def advance(self, count: int) -> None:
        self._view = self._view[count:]
        if not self._view:
            self._next_section()

    def _next_section(self) -> None:
        while not self._view:
            self._section += 1
            if self._section == len(self._arrays):
                self.complete = True
                return
            array = self._arrays[self._section]
            if array.size:
                self._view = array.data.cast("B")

    def _check_sections(self, seal: Seal) -> None:
        tags = memoryview(self.tags)
        for part, array in enumerate(self._arrays, 1):
            if array.size:
                _check_tag(seal, part, array.data.cast("B"), bytes(tags[:TAG_BYTES]))
                tags = tags[TAG_BYTES:]

    def finish(self) -> Frame:
        if self.seal is not None:
            self._check_sections(self.seal)
        values = dict(zip(self._cls.META_FIELDS, self._meta, strict=True))
        values |= dict(zip(self._cls.SECTION_FIELDS, self._arrays, strict=True))
        return Frame(message=self._cls(**values), stamp=self._stamp, wire_bytes=self._wire_bytes)
