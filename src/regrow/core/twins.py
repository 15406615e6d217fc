"""The slow, obvious twin of every kernel in `regrow._core`, in NumPy and plain Python.

They say what the kernels mean, and tests compare the two bit for bit. Nothing here is fast, and nothing that
runs per step may call it. Float arithmetic is float32, one operation at a time, in the order written.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

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


def initial_rows(rows: Iterable[int], *, dim: int, seed: int, table: int, bound: float) -> F32:
    """Initial weights, [len(rows), dim]: a pure function of seed, table, row and column."""
    table_key = _mixed64(_mixed64((seed + _GOLDEN) & _MASK) + table * _GOLDEN & _MASK)
    keys = [_mixed64(table_key + (row + 1) * _GOLDEN & _MASK) for row in rows]
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
    """The twin of `_core.Shard`."""

    servers: int
    server: int
    groups: int = 1
    records: list[F32] = field(default_factory=list)
    touched: list[npt.NDArray[np.bool_]] = field(default_factory=list)
    dims: list[int] = field(default_factory=list)
    rules: list[Rule] = field(default_factory=list)

    def add_table(
        self, *, rows: int, dim: int, k: int, r: int, rule: Rule, seed: int, init_bound: float, table: int
    ) -> int:
        layout = Layout(servers=self.servers, k=k, r=r, groups=self.groups)
        slots = np.arange(layout.slots_per_server(rows))
        row = layout.row_of(np.full(len(slots), self.server), slots, table=table)
        records = np.zeros((len(slots), record_floats(rule.optimizer, dim)), np.float32)
        here = row < rows  # the others are holes and stay zero
        records[here, :dim] = initial_rows(
            row[here].tolist(), dim=dim, seed=seed, table=table, bound=init_bound
        )
        self.records.append(records)
        self.touched.append(np.zeros(len(slots), np.bool_))
        self.dims.append(dim)
        self.rules.append(rule)
        return len(self.dims) - 1

    def gather(self, counts: I32, slots: U32) -> F32:
        parts = [self.records[t][slot, : self.dims[t]] for t, slot in _by_table(counts, slots)]
        return np.concatenate([np.zeros(0, np.float32), *parts])

    def update(self, counts: I32, slots: U32, grads: F32, step: int) -> None:
        at = 0
        for t, slot in _by_table(counts, slots):
            update_record(self.records[t][slot], grads[at : at + self.dims[t]], rule=self.rules[t], step=step)
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


def merge_pushes(dims: Sequence[int], parts: Sequence[tuple[I32, U32, F32]]) -> tuple[I32, U32, F32]:
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


# ---- a worker's side


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterTwin:
    """The twin of `_core.Router`; `plan` returns the twin of `_core.Plan`."""

    rows: Sequence[int]
    dims: Sequence[int]
    k: Sequence[int]
    r: Sequence[int]
    table_index: Sequence[int]
    mean_pooling: Sequence[bool]
    feature_tables: Sequence[int]
    static_tables: Sequence[int]
    servers: int
    groups: int = 1

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
            Layout(servers=self.servers, k=self.k[t], r=self.r[t], groups=self.groups).place(
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
    """The twin of `_core.Plan`."""

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


# ---- checksum


def crc32c(data: bytes, seed: int = 0) -> int:
    """CRC-32C, bit by bit."""
    crc = seed ^ 0xFFFFFFFF
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = crc >> 1 ^ (0x82F63B78 if crc & 1 else 0)
    return crc ^ 0xFFFFFFFF
