"""The slow, obvious twin of every kernel in `regrow._kernels`, in NumPy and plain Python.

They say what the kernels mean, and tests compare the two bit for bit. Nothing here is fast, and nothing that
runs per step may call it. Float arithmetic is float32, one operation at a time, in the order written.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from regrow.core.coding import coefficient, product_bytes
from regrow.core.layout import Layout

F32 = npt.NDArray[np.float32]
U32 = npt.NDArray[np.uint32]
I32 = npt.NDArray[np.int32]
Numbers = Sequence[int] | npt.NDArray[Any]

OPTIMIZERS = ("sgd", "momentum", "adagrad", "rowwise_adagrad", "adam", "partial_rowwise_adam")
_f = np.float32

# ---- records


def state_floats(optimizer: str, dim: int) -> int:
    """Floats of optimizer state behind a row's weights."""
    return {
        "sgd": 0,
        "momentum": dim,
        "adagrad": dim,
        "rowwise_adagrad": 1,
        "adam": 2 * dim,
        "partial_rowwise_adam": dim + 1,
    }[optimizer]


def record_floats(optimizer: str, dim: int) -> int:
    """Floats in a record: [weights | state], padded to a multiple of four."""
    return -(-(dim + state_floats(optimizer, dim)) // 4) * 4


# ---- initial values

_GOLDEN = 0x9E3779B97F4A7C15
_MASK = 2**64 - 1


def _mixed64(x: int) -> int:
    x ^= x >> 30
    x = x * 0xBF58476D1CE4E5B9 & _MASK
    x ^= x >> 27
    x = x * 0x94D049BB133111EB & _MASK
    return x ^ x >> 31


def _table_key(seed: int, table: int) -> int:
    return _mixed64(_mixed64((seed + _GOLDEN) & _MASK) + table * _GOLDEN & _MASK)


def evicted_place(seed: int, table: int, number: int, size: int) -> int:
    """Which place of a full list of sampled rows the next one takes, when it is the `number`-th to do so."""
    return _mixed64(_table_key(seed, table) + number * _GOLDEN & _MASK) * size >> 64


def initial_rows(rows: Iterable[int], *, dim: int, seed: int, table: int, bound: float) -> F32:
    """Initial weights, [len(rows), dim]: a pure function of seed, table, row and column."""
    key = _table_key(seed, table)
    keys = [_mixed64(key + (row + 1) * _GOLDEN & _MASK) for row in rows]
    low = np.array([key & 0xFFFFFFFF for key in keys], np.uint32)[:, None]
    high = np.array([key >> 32 for key in keys], np.uint32)[:, None]
    x = low + np.arange(dim, dtype=np.uint32) * np.uint32(0x9E3779B9)
    x ^= x >> np.uint32(16)
    x *= np.uint32(0x7FEB352D)
    x ^= high
    x ^= x >> np.uint32(15)
    x *= np.uint32(0x846CA68B)
    x ^= x >> np.uint32(16)
    unit = (x >> np.uint32(8)).astype(np.float32) * _f(2.0**-23) - _f(1)
    weights: F32 = unit * _f(bound)
    return weights


# ---- optimizers


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """An optimizer with its numbers."""

    optimizer: str
    learning_rate: float
    eps: float = 1e-8
    beta1: float = 0.9
    beta2: float = 0.999
    momentum: float = 0.9
    weight_decay: float = 0.0


def sum_of_squares(values: F32) -> np.float32:
    """Lane l adds up elements l, l + 8, ...; the lanes are then added in one fixed order."""
    lanes = np.zeros(8, np.float32)
    for i, value in enumerate(values):
        lanes[i % 8] += value * value
    a = (lanes[0] + lanes[4]) + (lanes[2] + lanes[6])
    b = (lanes[1] + lanes[5]) + (lanes[3] + lanes[7])
    total: np.float32 = a + b
    return total


def update_record(record: F32, grad: F32, *, rule: Rule, step: int) -> None:
    """Applies one gradient to one record, in place."""
    dim = len(grad)
    w = record[:dim]
    state = record[dim:]
    lr, eps, decay = _f(rule.learning_rate), _f(rule.eps), _f(rule.weight_decay)
    adam = rule.optimizer in ("adam", "partial_rowwise_adam")
    g = grad + decay * w if decay and not adam else grad
    if rule.optimizer == "sgd":
        w -= lr * g
    elif rule.optimizer == "momentum":
        state[:dim] = _f(rule.momentum) * state[:dim] + g
        w -= lr * state[:dim]
    elif rule.optimizer == "adagrad":
        state[:dim] += g * g
        w -= lr * g / (np.sqrt(state[:dim]) + eps)
    elif rule.optimizer == "rowwise_adagrad":
        state[0] += sum_of_squares(g) / _f(dim)
        w -= (lr / (np.sqrt(state[0]) + eps)) * g
    else:
        b1, b2 = _f(rule.beta1), _f(rule.beta2)
        bias1 = _f(1.0 - float(b1) ** step)
        bias2 = _f(1.0 - float(b2) ** step)
        m = state[:dim]
        m[:] = b1 * m + (_f(1) - b1) * g
        v: Any = state[dim : 2 * dim] if rule.optimizer == "adam" else state[dim : dim + 1]
        square = g * g if rule.optimizer == "adam" else sum_of_squares(g) / _f(dim)
        v[:] = b2 * v + (_f(1) - b2) * square
        change = m / bias1 / (np.sqrt(v / bias2) + eps)
        w -= lr * (change + decay * w if decay else change)


# ---- a server's side


@dataclass(slots=True)
class ShardTwin:
    """The twin of `_kernels.Shard`."""

    servers: int
    server: int
    rings: int = 1
    records: list[F32] = field(default_factory=list)
    touched: list[npt.NDArray[np.bool_]] = field(default_factory=list)
    dims: list[int] = field(default_factory=list)
    rules: list[Rule] = field(default_factory=list)

    def add_table(
        self, *, rows: int, dim: int, k: int, r: int, rule: Rule, seed: int, init_bound: float, table: int
    ) -> int:
        layout = Layout(servers=self.servers, k=k, r=r, rings=self.rings)
        slots = np.arange(layout.slots_per_server(rows))
        row = layout.row_of(np.full(len(slots), self.server), slots, table=table)
        records = np.zeros((len(slots), record_floats(rule.optimizer, dim)), np.float32)
        here = row < rows  # the others are holes and stay zero
        records[here, :dim] = initial_rows(row[here].tolist(), dim=dim, seed=seed, table=table, bound=init_bound)
        self.records.append(records)
        self.touched.append(np.zeros(len(slots), np.bool_))
        self.dims.append(dim)
        self.rules.append(rule)
        return len(self.dims) - 1

    def gather(self, counts: I32, slots: U32) -> F32:
        parts = [self.records[t][slot, : self.dims[t]] for t, slot in _by_table(counts, slots)]
        return np.concatenate([np.zeros(0, np.float32), *parts])

    def update(self, counts: I32, slots: U32, grads: F32, step: int, rates: Sequence[float] = ()) -> None:
        at = 0
        for t, slot in _by_table(counts, slots):
            rule = replace(self.rules[t], learning_rate=rates[t]) if rates else self.rules[t]
            update_record(self.records[t][slot], grads[at : at + self.dims[t]], rule=rule, step=step)
            self.touched[t][slot] = True
            at += self.dims[t]

    def assign_untouched(self, counts: I32, slots: U32, weights: F32) -> None:
        at = 0
        for t, slot in _by_table(counts, slots):
            if not self.touched[t][slot]:
                self.records[t][slot, : self.dims[t]] = weights[at : at + self.dims[t]]
                self.touched[t][slot] = True
            at += self.dims[t]

    def touched_words(self, table: int) -> npt.NDArray[np.uint64]:
        words = [0] * -(-len(self.touched[table]) // 64)
        for slot in np.flatnonzero(self.touched[table]):
            words[slot // 64] |= 1 << int(slot % 64)
        return np.array(words, np.uint64)


def _by_table(counts: I32, slots: U32) -> list[tuple[int, int]]:
    tables = np.repeat(np.arange(len(counts)), counts)
    return [(int(t), int(slot)) for t, slot in zip(tables, slots, strict=True)]


def has_repeated_slots(counts: I32, slots: U32) -> bool:
    """Whether some slot is named twice within its table."""
    tables = np.repeat(np.arange(counts.size), counts).tolist()
    return len(set(zip(tables, slots.tolist(), strict=True))) < slots.size


def sum_pushes(dims: Sequence[int], parts: Sequence[tuple[I32, U32, F32]]) -> tuple[I32, U32, F32]:
    """Sums rows with equal (table, slot) in the order of the list; rows in order of first occurrence."""
    sums: list[dict[int, F32]] = [{} for _ in dims]
    for counts, slots, grads in parts:
        at = 0
        for t, slot in _by_table(counts, slots):
            grad = grads[at : at + dims[t]]
            sums[t][slot] = sums[t][slot] + grad if slot in sums[t] else grad
            at += dims[t]
    return (
        np.array([len(table) for table in sums], np.int32),
        np.array([slot for table in sums for slot in table], np.uint32),
        np.concatenate([np.zeros(0, np.float32), *(grad for table in sums for grad in table.values())]),
    )


# ---- parities and recovery


def gf_xor(target: F32, source: F32, factor: int) -> None:
    """target ^= factor * source, on raw bytes, in place."""
    target.view(np.uint8)[...] ^= product_bytes(factor, np.ascontiguousarray(source).view(np.uint8))


def xor_matching(slots_sorted: U32, records: F32, floats: int, slots: U32, deltas: F32, factor: int) -> int:
    """XORs multiples of deltas into the records of the same slots; returns how many."""
    at = {int(slot): i for i, slot in enumerate(slots_sorted)}
    matches = 0
    for i, slot in enumerate(slots):
        if int(slot) in at:
            gf_xor(records.reshape(-1, floats)[at[int(slot)]], deltas.reshape(-1, floats)[i], factor)
            matches += 1
    return matches


@dataclass(slots=True)
class CodedTable:
    """What a `CodedShardTwin` knows of a table beyond its records. Arrays over blocks are [q, member, block]."""

    k: int
    r: int
    initial: F32
    saved: dict[int, F32]  # before-images of pending rows, by slot
    parity: F32  # [block, q, float]
    members: npt.NDArray[np.bool_]
    present: npt.NDArray[np.bool_]
    known: npt.NDArray[np.bool_]

    @property
    def blocks(self) -> int:
        return len(self.initial) // self.k


@dataclass(slots=True)
class CodedShardTwin(ShardTwin):
    """The twin of a `_kernels.Shard` with coding groups."""

    coding: Sequence[tuple[int, int]] = ()
    recovering: bool = False
    coded: list[CodedTable] = field(default_factory=list)

    def add_table(
        self, *, rows: int, dim: int, k: int, r: int, rule: Rule, seed: int, init_bound: float, table: int
    ) -> int:
        # A dataclass with slots is another class than the one that super() without arguments would look for.
        index = ShardTwin.add_table(
            self, rows=rows, dim=dim, k=k, r=r, rule=rule, seed=seed, init_bound=init_bound, table=table
        )
        slots, floats = self.records[index].shape
        self.coded.append(
            CodedTable(
                k=k,
                r=r,
                initial=self.records[index].copy(),
                saved={},
                parity=np.zeros((slots // k, r, floats), np.float32),
                members=np.zeros((r, k, slots // k), np.bool_),
                present=np.full(slots, not self.recovering),
                known=np.full(slots, not self.recovering),
            )
        )
        if self.recovering:
            self.records[index][:] = 0
        return index

    def _save(self, t: int, slot: int) -> None:
        assert self.coded[t].present[slot]
        if self.coded[t].r:
            self.coded[t].saved.setdefault(slot, self.records[t][slot].copy())

    def update(self, counts: I32, slots: U32, grads: F32, step: int, rates: Sequence[float] = ()) -> None:
        for t, slot in _by_table(counts, slots):
            self._save(t, slot)
        ShardTwin.update(self, counts, slots, grads, step, rates)

    def assign_untouched(self, counts: I32, slots: U32, weights: F32) -> None:
        for t, slot in _by_table(counts, slots):
            if not self.touched[t][slot]:
                self._save(t, slot)
        ShardTwin.assign_untouched(self, counts, slots, weights)

    def write_records(self, table: int, first_slot: int, count: int, source: F32) -> None:
        for slot in range(first_slot, first_slot + count):
            self._save(table, slot)
        self.records[table][first_slot : first_slot + count] = source
        self.touched[table][first_slot : first_slot + count] = True

    def _member(self, table: int, group: int) -> int | None:
        distance, r = self.coding[group]
        coded = self.coded[table]
        return coded.k - distance if r == coded.r and distance <= coded.k else None

    def _in_group(self, table: int, group: int) -> list[int]:
        if group == len(self.coding):  # the bare one
            return [] if self.coded[table].r else list(range(len(self.coded[table].initial)))
        member = self._member(table, group)
        coded = self.coded[table]
        return [] if member is None else [block * coded.k + member for block in range(coded.blocks)]

    def take_flush(self, group: int, keep: bool = False) -> tuple[I32, U32, F32]:
        """Rows of a table in the order of their slots; the kernel gives them in any order."""
        counts, slots, deltas = [], [], [np.zeros(0, np.float32)]
        for t, coded in enumerate(self.coded):
            pending = [slot for slot in self._in_group(t, group) if slot in coded.saved]
            counts.append(len(pending))
            slots += pending
            deltas += [_xor(coded.saved[slot], self.records[t][slot]) for slot in pending]
            coded.saved = coded.saved if keep else {s: r for s, r in coded.saved.items() if s not in pending}
        return np.array(counts, np.int32), np.array(slots, np.uint32), np.concatenate(deltas)

    def published(self, table: int, slots: U32) -> F32:
        coded = self.coded[table]
        rows = [
            _xor(coded.saved.get(int(slot), self.records[table][slot]), coded.initial[slot])
            if coded.present[slot]
            else np.zeros_like(coded.initial[slot])
            for slot in slots
        ]
        return np.concatenate([np.zeros(0, np.float32), *rows])

    def next_touched(self, table: int, group: int, block_first: int, rows_max: int) -> tuple[list[int], int]:
        coded = self.coded[table]
        slots = self._in_group(table, group)
        found: list[int] = []
        for block in range(block_first, coded.blocks):
            if len(found) == rows_max:
                return found, block
            if self.touched[table][slots[block]]:
                found.append(slots[block])
        return found, coded.blocks

    def parity_apply(self, source: int, counts: I32, slots: U32, deltas: F32) -> None:
        ring = self.servers // self.rings
        at = 0
        for t, slot in _by_table(counts, slots):
            coded = self.coded[t]
            block, member = divmod(slot, coded.k)
            q = (self.server - source + member - coded.k) % ring
            assert q < coded.r
            delta = deltas[at : at + coded.initial.shape[1]]
            gf_xor(coded.parity[block, q], delta, coefficient(q, member, coded.r))
            coded.members[q, member, block] = True
            at += len(delta)

    def know_touched(self, group: int, table: int, bits: npt.NDArray[np.bool_]) -> None:
        coded = self.coded[table]
        for slot, bit in zip(self._in_group(table, group), bits, strict=True):
            if not coded.present[slot]:
                coded.known[slot] = True
                self.touched[table][slot] = bit

    def _blank(self, t: int, slot: int) -> bool:
        coded = self.coded[t]
        return bool(coded.known[slot] and not coded.present[slot] and not self.touched[t][slot])

    def prepare(self, counts: I32, slots: U32) -> list[tuple[int, int]]:
        """Fills in blank rows, returns (table, slot) of the others that are absent."""
        for t, slot in _by_table(counts, slots):
            if self._blank(t, slot):
                self.records[t][slot] = self.coded[t].initial[slot]
                self.coded[t].present[slot] = True
        return [(t, slot) for t, slot in _by_table(counts, slots) if not self.coded[t].present[slot]]

    def put(self, counts: I32, slots: U32, relatives: F32) -> int:
        rows = at = 0
        for t, slot in _by_table(counts, slots):
            coded = self.coded[t]
            relative = relatives[at : at + coded.initial.shape[1]]
            at += len(relative)
            if coded.known[slot] and not coded.present[slot] and self.touched[t][slot]:
                self.records[t][slot] = _xor(relative, coded.initial[slot])
                coded.present[slot] = True
                rows += 1
        return rows

    def absent_rows(self) -> tuple[int, int]:
        """(missing, blank)"""
        absent = sum(int((~coded.present).sum()) for coded in self.coded)
        blank = sum(self._blank(t, slot) for t, touched in enumerate(self.touched) for slot in range(len(touched)))
        return absent - blank, blank


def _xor(a: F32, b: F32) -> F32:
    bits = a.view(np.uint32) ^ b.view(np.uint32)
    return bits.view(np.float32)


# ---- a worker's side


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterTwin:
    """The twin of `_kernels.Router`; `plan` returns the twin of `_kernels.Plan`."""

    rows: Sequence[int]
    dims: Sequence[int]
    k: Sequence[int]
    r: Sequence[int]
    table_index: Sequence[int]
    mean_pooling: Sequence[bool]
    feature_tables: Sequence[int]
    static_tables: Sequence[int]
    servers: int
    rings: int = 1

    def plan(self, values: Numbers, lengths: Numbers | None, batch: int) -> PlanTwin:
        sizes = lengths if lengths is not None else [1] * (len(self.feature_tables) * batch)
        wanted: list[dict[int, None]] = [{} for _ in self.rows]  # a dict keeps the order of first occurrence
        bags: list[list[list[int]]] = []
        at = 0
        for f, t in enumerate(self.feature_tables):
            bags.append([])
            for size in sizes[f * batch : (f + 1) * batch]:
                bag = [int(row) for row in values[at : at + size]]
                wanted[t].update(dict.fromkeys(bag))
                bags[f].append(bag)
                at += size
        distinct = sum(map(len, wanted))
        for t in self.static_tables:
            wanted[t] = dict.fromkeys(range(self.rows[t]))
        return self._laid_out(wanted, bags, lookups=at, distinct=distinct)

    def _laid_out(
        self,
        wanted: Sequence[Mapping[int, None]],
        bags: list[list[list[int]]],
        *,
        lookups: int,
        distinct: int,
    ) -> PlanTwin:
        counts = np.zeros((self.servers, len(self.rows)), np.int32)
        slots: list[int] = []
        row_start, float_start = [0], [0]
        offsets: dict[tuple[int, int], int] = {}
        offset = 0
        places = [
            Layout(servers=self.servers, k=self.k[t], r=self.r[t], rings=self.rings).place(
                np.array(list(rows), np.int64), table=self.table_index[t]
            )
            for t, rows in enumerate(wanted)
        ]
        for s in range(self.servers):
            for t, rows in enumerate(wanted):
                for row, server, slot in zip(rows, *places[t], strict=True):
                    if server != s:
                        continue
                    counts[s, t] += 1
                    slots.append(int(slot))
                    offsets[t, row] = offset
                    offset += self.dims[t]
            row_start.append(len(slots))
            float_start.append(offset)
        return PlanTwin(
            router=self,
            counts=counts,
            slots=np.array(slots, np.uint32),
            row_start=np.array(row_start, np.int64),
            float_start=np.array(float_start, np.int64),
            lookups=lookups,
            distinct=distinct,
            bags=bags,
            offsets=offsets,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanTwin:
    """The twin of `_kernels.Plan`."""

    router: RouterTwin
    counts: I32
    slots: U32
    row_start: npt.NDArray[np.int64]
    float_start: npt.NDArray[np.int64]
    lookups: int
    distinct: int
    bags: list[list[list[int]]]  # [feature][sample] -> rows
    offsets: dict[tuple[int, int], int]  # (table, row) -> where it starts, in floats

    @property
    def floats(self) -> int:
        return int(self.float_start[-1])

    def _row(self, array: F32, table: int, row: int) -> F32:
        start = self.offsets[table, row]
        return array[start : start + self.router.dims[table]]

    def pool(self, rows: F32) -> F32:
        columns = []
        for f, table in enumerate(self.router.feature_tables):
            column = np.zeros((len(self.bags[f]), self.router.dims[table]), np.float32)
            for sample, bag in enumerate(self.bags[f]):
                if not bag:
                    continue
                total = self._row(rows, table, bag[0]).copy()
                for row in bag[1:]:
                    total += self._row(rows, table, row)
                column[sample] = total / _f(len(bag)) if self.router.mean_pooling[table] else total
            columns.append(column)
        return np.concatenate(columns, axis=1)

    def unpool(self, grad: F32, grads: F32) -> None:
        for table in {*self.router.feature_tables}:
            for owner, row in self.offsets:
                if owner == table:
                    self._row(grads, table, row)[:] = 0
        at = 0
        for f, table in enumerate(self.router.feature_tables):
            dim = self.router.dims[table]
            for sample, bag in enumerate(self.bags[f]):
                part = grad[sample, at : at + dim]
                for row in bag:
                    size = _f(len(bag)) if self.router.mean_pooling[table] else _f(1)
                    self._row(grads, table, row)[:] += part / size
            at += dim

    def static_get(self, table: int, rows: F32) -> F32:
        return np.concatenate([self._row(rows, table, row) for row in range(self.router.rows[table])])

    def static_put(self, table: int, source: F32, grads: F32) -> None:
        dim = self.router.dims[table]
        for row in range(self.router.rows[table]):
            self._row(grads, table, row)[:] = source[row * dim : (row + 1) * dim]


# ---- merging checkpoints


def newest_rows(lists: Sequence[Numbers]) -> npt.NDArray[np.uint64]:
    """Where the last row of each number is: list << 32 | position."""
    places: dict[int, int] = {}
    for index, numbers in enumerate(lists):
        for position, number in enumerate(numbers):
            places[int(number)] = index << 32 | position
    return np.array([places[number] for number in sorted(places)], np.uint64)


def gather_rows(lists: Sequence[npt.NDArray[Any]], places: Numbers, out: npt.NDArray[Any]) -> None:
    for index, place in enumerate(places):
        out[index] = lists[int(place) >> 32][int(place) & 0xFFFFFFFF]


# ---- checksum


def crc32c(data: bytes, seed: int = 0) -> int:
    """CRC-32C, bit by bit."""
    crc = seed ^ 0xFFFFFFFF
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = crc >> 1 ^ (0x82F63B78 if crc & 1 else 0)
    return crc ^ 0xFFFFFFFF
