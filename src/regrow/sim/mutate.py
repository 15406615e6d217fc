"""Messages with one wrong field: what a peer that is broken, old or hostile might say.

A message that was really sent is changed in one place only, so that everything before that place is passed and the
check that belongs to it is reached. Values come from boundaries, and from the same field of other messages of the run
(another group, another flush number, another cut): those are the likely mistakes. The rule to keep: all chance comes
from the generator that is given, so that a seed says what is sent.
"""

from __future__ import annotations

import random
from collections import deque
from typing import Any, get_origin, get_type_hints

import msgspec
import numpy as np

from regrow.core.identity import ROLES, Identity
from regrow.core.messages import KINDS, Message
from regrow.errors import Refusal

INTS = (0, 1, 2, 3, 64, 65536, 2**31 - 1, 2**31, 2**32 - 1, 2**32, 2**62, 2**62 + 1, 2**63 - 1, 2**64 - 1, -1, -(2**63))
FLOATS = (0.0, -1.0, 1e-300, 3.5e38, 1e308, float("inf"), float("-inf"), float("nan"))
TEXTS = ("", "x", "../../x", "a/b", "\x00", "ä\U0001f600", "x" * 4096, "x" * 4097)
OTHER_TYPES: tuple[Any, ...] = (None, "7", 1.5, True, b"7", [], [1], {}, {"id": 1})
# Where nothing was said yet.
PLAIN: dict[Any, Any] = {int: 1, str: "x", bool: False, bytes: bytes(32), tuple: (0,), Refusal: Refusal.RETRY}
LONG = 3000  # entries of a list that is far too long; on the wire it is a few kilobytes
POOL_MAX = 24  # values kept of each field

# A row in three sections: `counts` says how many of the next belong to each table.
ROWS = ("slots", "blocks")


Said = tuple[Identity, Identity, Message]  # source, target, message


class Pool:
    """What was said in this run: whole messages by kind and by whom they were for, and values by their field."""

    def __init__(self) -> None:
        self.count = 0
        self.next: dict[Identity, list[Said]] = {}  # what every target would hear next, of each source
        self._to: dict[Identity, deque[Said]] = {}
        self._kinds: dict[str, dict[type[Message], deque[Said]]] = {}  # by the role that hears them
        self._values: dict[str, deque[Any]] = {}

    def add(self, source: Identity, target: Identity, message: Message) -> None:
        said = (source, target, message)
        self.count += 1
        self._to.setdefault(target, deque(maxlen=2 * POOL_MAX)).append(said)
        kinds = self._kinds.setdefault(target.role, {})
        kinds.setdefault(type(message), deque(maxlen=POOL_MAX)).append(said)
        for name in (*message.META_FIELDS, *message.SECTION_FIELDS):
            value = getattr(message, name)
            self._values.setdefault(_key(name, value), deque(maxlen=POOL_MAX)).append(value)

    def pick(self, target: Identity, rng: random.Random) -> Said:
        """Mostly what this target would hear next, or heard last; also rare kinds, and those that are not for it."""
        chance = rng.random()
        if chance < 0.3 and target in self.next:
            return rng.choice(self.next[target])
        if chance < 0.6 and target in self._to:
            said = self._to[target]
            return said[rng.randrange(len(said))]
        role = target.role if chance < 0.9 and target.role in self._kinds else rng.choice(list(self._kinds))
        if chance < 0.96:
            kinds = self._kinds[role]
            said = kinds[rng.choice(list(kinds))]
            return said[rng.randrange(len(said))]
        said = rng.choice(list(self._to.values()))
        return said[0][0], target, self.make(rng.choice(list(KINDS.values())), rng)

    def value(self, name: str, rng: random.Random, *, dtype: Any = None) -> Any:
        """What some message said in a field of this name (and dtype); None if none had it."""
        values = self._values.get(f"{name} {dtype}" if dtype is not None else name)
        return values[rng.randrange(len(values))] if values else None

    def make(self, kind: type[Message], rng: random.Random) -> Message:
        """A message of this kind out of what others said in fields of these names."""
        values: dict[str, Any] = {}
        hints = get_type_hints(kind)
        for name in kind.META_FIELDS:
            value = self.value(name, rng)
            values[name] = PLAIN.get(get_origin(hints[name]) or hints[name]) if value is None else value
        for name, dtype in zip(kind.SECTION_FIELDS, kind.SECTION_DTYPES, strict=True):
            value = self.value(name, rng, dtype=dtype)
            values[name] = np.zeros(rng.randrange(4), dtype) if value is None else value
        return kind(**values)


def _key(name: str, value: Any) -> str:
    return f"{name} {value.dtype}" if isinstance(value, np.ndarray) else name


def mutate(message: Message, pool: Pool, rng: random.Random) -> Message:
    """The same message with one field that is wrong, or whose arrays are changed together so that they still fit."""
    sections = message.SECTION_FIELDS
    fields = (*message.META_FIELDS, *sections)
    if not fields:
        return message
    if sections and "counts" in sections and rng.random() < 0.25:
        return msgspec.structs.replace(message, **_change_rows(message, rng))
    name = fields[rng.randrange(len(fields))]
    value = getattr(message, name)
    dtype = message.SECTION_DTYPES[sections.index(name)] if name in sections else None
    other = pool.value(name, rng, dtype=dtype)
    if other is not None and rng.random() < 0.25:
        return msgspec.structs.replace(message, **{name: other})
    if dtype is not None:
        changed = _change_array(np.asarray(value), rng).astype(dtype, copy=False)
        return msgspec.structs.replace(message, **{name: changed})
    return msgspec.structs.replace(message, **{name: change(value, rng)})


def change(value: Any, rng: random.Random, depth: int = 0) -> Any:
    """Another value of about the same kind; now and then of another type, which the wire has to refuse."""
    if rng.random() < 0.04:
        return rng.choice(OTHER_TYPES)
    if isinstance(value, bool):
        return not value
    if isinstance(value, int):
        near = min(max(value + rng.choice((-1, 1)), INTS[-1]), 2**64 - 1)  # what a frame can carry
        return near if rng.random() < 0.4 else rng.choice(INTS)
    if isinstance(value, float):
        return rng.choice(FLOATS)
    if isinstance(value, str):
        return rng.choice(TEXTS)
    if isinstance(value, bytes):
        return rng.choice((b"", value[:-1], value + b"x", bytes(len(value))))
    if isinstance(value, tuple):
        return _change_tuple(value, rng, depth)
    if isinstance(value, msgspec.Struct) and value.__struct_fields__:
        names = value.__struct_fields__
        name = names[rng.randrange(len(names))]
        return msgspec.structs.replace(value, **{name: change(getattr(value, name), rng, depth + 1)})
    return rng.choice(OTHER_TYPES)


def _change_tuple(value: tuple[Any, ...], rng: random.Random, depth: int) -> tuple[Any, ...]:
    if not value:
        return rng.choice(((0,), (1, 2), (-1,)))
    at = rng.randrange(len(value))
    how = rng.randrange(8)
    if how == 0:
        return ()
    if how == 1:
        return value[:at] + value[at + 1 :]
    if how == 2:
        return (*value, value[at])
    if how == 3:
        return value[::-1]
    if how == 4 and isinstance(value[at], int):
        return value * (LONG // len(value))
    return (*value[:at], change(value[at], rng, depth + 1), *value[at + 1 :])


def _change_array(array: np.ndarray[Any, Any], rng: random.Random) -> np.ndarray[Any, Any]:
    size = array.size
    how = rng.randrange(9)
    if how == 0 or (size == 0 and how < 5):
        return np.zeros(rng.choice((0, 1, 2, size + 1, LONG)), array.dtype)
    if how == 1:
        return array[:-1]
    if how == 2:
        return np.append(array, array[:1])
    if how == 3:
        return array[::-1].copy()
    copy = array.copy()
    if size == 0:
        return copy
    if how == 4:
        copy[rng.randrange(size)] = copy[rng.randrange(size)]
    elif array.dtype.kind == "f":
        copy[rng.randrange(size)] = rng.choice((0.0, -0.0, np.nan, np.inf, 3e38, 1e-45))
    else:
        limits = np.iinfo(array.dtype)
        low, high = int(limits.min), int(limits.max)
        at = rng.randrange(size)
        near = min(max(int(copy[at]) + rng.choice((-1, 1)), low), high)
        copy[at] = rng.choice((near, near, low, high, 0, 1, high // 2 + 1))
        if array.dtype.kind == "i" and size > 1 and how == 5:  # the sum stays what it was
            other = (at + 1) % size
            copy[at], copy[other] = min(int(array[at]) + 1, high), max(int(array[other]) - 1, low)
    return copy


def _change_rows(message: Message, rng: random.Random) -> dict[str, Any]:
    """All arrays together: a row is named twice, left out, or counted for another table. Sizes may still fit."""
    counts = np.asarray(message.counts).copy()  # type: ignore[attr-defined]
    rows_name = next(name for name in message.SECTION_FIELDS if name in ROWS)
    rows = np.asarray(getattr(message, rows_name))
    values_name = next((name for name in message.SECTION_FIELDS if name not in ("counts", rows_name)), None)
    values = np.asarray(getattr(message, values_name)) if values_name is not None else None
    tables = np.flatnonzero(counts > 0)
    if not rows.size or not tables.size or (counts < 0).any() or int(counts.sum()) != rows.size:
        return {"counts": _change_array(counts, rng)}
    table = int(tables[rng.randrange(tables.size)])
    first = int(counts[:table].sum())
    width = values.size // rows.size if values is not None else 0
    how = rng.randrange(3)
    changed: dict[str, Any] = {}
    if how == 0:  # twice
        counts[table] += 1
        changed[rows_name] = np.insert(rows, first, rows[first])
        if values is not None and values_name is not None:
            changed[values_name] = np.insert(values, first * width, values[first * width : (first + 1) * width])
    elif how == 1:  # left out
        counts[table] -= 1
        changed[rows_name] = np.delete(rows, first)
        if values is not None and values_name is not None:
            changed[values_name] = np.delete(values, slice(first * width, (first + 1) * width))
    else:
        counts[table] -= 1
        counts[(table + 1) % counts.size] += 1
    return {**changed, "counts": counts}


def impersonate(source: Identity, everybody: list[Identity], rng: random.Random) -> Identity:
    """Somebody else: another process of the run, an older or newer incarnation, or one that has no place in it."""
    role, number, incarnation = source.role, source.id, source.incarnation
    how = rng.randrange(5)
    if how < 2:
        return everybody[rng.randrange(len(everybody))]
    if how == 2:
        incarnation = max(0, incarnation - 1)
    elif how == 3:
        number = rng.choice((number + 1, 63, 2**32 - 1))
    else:
        role = rng.choice(ROLES)
    return Identity(role=role, id=number, incarnation=incarnation)
