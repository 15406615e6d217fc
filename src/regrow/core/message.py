"""What a message is, and how one becomes bytes. All messages there are are in `messages.py`.

A message is a frozen struct. Its plain fields form the **meta** (a short msgpack array, decoded against
the declared types); its array fields are **sections**, sent as they lie in memory and received where they are
needed. Nothing is pickled. Semantic checks (is this slot in range?) belong to the receiver, not here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any, ClassVar, TypeVar, get_args, get_type_hints

import msgspec
import numpy as np
import numpy.typing as npt

U62 = Annotated[int, msgspec.Meta(ge=0, le=2**62)]
U32 = Annotated[int, msgspec.Meta(ge=0, lt=2**32)]
Text = Annotated[str, msgspec.Meta(max_length=4096)]
Secret = Annotated[bytes, msgspec.Meta(min_length=32, max_length=32)]
SecretOrNone = Annotated[bytes, msgspec.Meta(max_length=32)]  # empty: nothing is proved

Int32Array = Annotated[npt.NDArray[np.int32], "<i4"]
UInt32Array = Annotated[npt.NDArray[np.uint32], "<u4"]
UInt64Array = Annotated[npt.NDArray[np.uint64], "<u8"]
UInt8Array = Annotated[npt.NDArray[np.uint8], "|u1"]
Float32Array = Annotated[npt.NDArray[np.float32], "<f4"]


class Message(msgspec.Struct, frozen=True, eq=False):
    """Base of all messages; the class attributes are filled in by `@message`."""

    KIND: ClassVar[int]
    META_FIELDS: ClassVar[tuple[str, ...]]
    SECTION_FIELDS: ClassVar[tuple[str, ...]]
    SECTION_DTYPES: ClassVar[tuple[np.dtype[Any], ...]]
    META_DECODER: ClassVar[msgspec.msgpack.Decoder[tuple[Any, ...]]]


KINDS: dict[int, type[Message]] = {}
_M = TypeVar("_M", bound=type[Message])
_encoder = msgspec.msgpack.Encoder()


def message(kind: int) -> Callable[[_M], _M]:
    """Gives a message class its number on the wire."""

    def decorate(cls: _M) -> _M:
        made: Any = cls
        hints = get_type_hints(made, include_extras=True)
        names = made.__struct_fields__
        arrays = {name: _array_dtype(hints[name]) for name in names}
        made.KIND = kind
        made.META_FIELDS = tuple(name for name in names if arrays[name] is None)
        made.SECTION_FIELDS = tuple(name for name in names if arrays[name] is not None)
        made.SECTION_DTYPES = tuple(dtype for dtype in arrays.values() if dtype is not None)
        types = tuple(hints[name] for name in made.META_FIELDS)
        made.META_DECODER = msgspec.msgpack.Decoder(tuple[types] if types else tuple[()])  # type: ignore[valid-type]
        assert kind not in KINDS, f"two messages have the number {kind}"
        KINDS[kind] = made
        return made  # type: ignore[no-any-return]

    return decorate


def _array_dtype(hint: Any) -> np.dtype[Any] | None:
    extras = get_args(hint)[1:]
    return np.dtype(extras[0]) if extras and isinstance(extras[0], str) else None


def encode_meta(item: Message) -> bytes:
    """The plain fields as a msgpack array."""
    return _encoder.encode([getattr(item, name) for name in item.META_FIELDS])
