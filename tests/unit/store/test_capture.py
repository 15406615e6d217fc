"""Goal: a capture gives each tenant exactly the rows that changed since its last durable one, with the values of the
instant it began at, whatever is updated, flushed or captured by others meanwhile: what is particular to the kernels
(every mode, threads, pieces of a table, the words of errors); the rest is in test_conformance_captures.py.

Method: a shard with parities and its twin receive the same random calls, in every mode; the twin copies all records
when a capture begins. Every row taken, every count and every flush is compared; bounds and wrong calls are listed.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from kernel_modes import MODES, Mode, running

from regrow import _kernels
from regrow.core.job import OptimizerSpec
from regrow.core.layout import Layout
from regrow.core.twins import OPTIMIZERS, CodedShardTwin, Rule

Cell = tuple[int, int]  # table, slot
CODING = [(1, 1), (1, 2), (2, 2)]
CODES = [(2, 2), (1, 0), (1, 1)]
# All six optimizers, dims 1, 3, 16 and 64, slots within a word of bits and over several, with parities and without.
TABLES: list[dict[str, Any]] = [
    dict(rows=rows, dim=dim, k=k, r=r, rule=Rule(optimizer=optimizer, learning_rate=0.1))
    for optimizer, rows, dim, (k, r) in zip(
        OPTIMIZERS, [700, 90, 1000, 301, 40, 9], [16, 1, 3, 64, 16, 3], CODES * 2, strict=True
    )
]


SERVERS, SERVER = 4, 1
STATES = [OptimizerSpec(kind=t["rule"].optimizer, learning_rate=0.1).state_parts(t["dim"]) for t in TABLES]
CHUNK_ROW_BYTES = [4 + 4 * t["dim"] + sum(4 * n for _, n in states) for t, states in zip(TABLES, STATES, strict=True)]


def chunk_of(counts: list[int], slots: list[int], records: bytes) -> tuple[list[int], bytes]:
    """The twin of the form in which capture_chunk has rows: ids, weights and each state, by table."""
    kept: list[int] = []
    words = b""
    values, row, at = np.frombuffer(records, np.float32), 0, 0
    for index, (table, count) in enumerate(zip(TABLES, counts, strict=True)):
        width = -(-(CHUNK_ROW_BYTES[index] // 4 - 1) // 4) * 4
        mine = values[at : at + count * width].reshape(count, width)
        layout = Layout(servers=SERVERS, k=table["k"], r=table["r"], rings=1)
        ids = layout.row_of(SERVER, slots[row : row + count], table=index)
        row, at = row + count, at + count * width
        order = [i for i in np.argsort(ids) if ids[i] < table["rows"]]
        kept.append(len(order))
        words += ids[order].astype(np.uint32).tobytes()
        first = 0
        for floats in (table["dim"], *(floats for _, floats in STATES[index])):
            words += mine[order, first : first + floats].tobytes()
            first += floats
    return kept, words


class CaptureTwin:
    """Sets of (table, slot), and a copy of everything when a capture begins."""

    def __init__(self, shard: CodedShardTwin) -> None:
        self.shard = shard
        self.dirty: list[set[Cell]] = []
        self.tenant = 0
        self.captured: set[Cell] = set()
        self.left: set[Cell] = set()
        self.aside: set[Cell] = set()
        self.values: list[np.ndarray] = []

    def touched(self) -> set[Cell]:
        found = [(t, int(slot)) for t, bits in enumerate(self.shard.touched) for slot in np.flatnonzero(bits)]
        return {(t, slot) for t, slot in found if self.shard.coded[t].present[slot]}

    def add_tenant(self) -> int:
        self.dirty.append(self.touched())
        return len(self.dirty) - 1

    def changed(self, cells: set[Cell]) -> None:
        self.aside |= cells & self.left
        for dirty in self.dirty:
            dirty |= cells

    def begin(self, tenant: int, full: bool) -> None:
        self.tenant = tenant
        self.captured = self.touched() if full else self.dirty[tenant]
        self.left = set(self.captured)
        self.dirty[tenant] = set()
        self.values = [records.copy() for records in self.shard.records]

    @property
    def row_bytes(self) -> list[int]:
        return [4 * values.shape[1] for values in self.values]

    def next(self, bytes_max: int, aside_first: bool, row_bytes: list[int]) -> tuple[list[int], list[int], bytes]:
        waiting = sorted(self.left, key=lambda cell: (aside_first and cell not in self.aside, cell))
        # Which of the rows aside go first is not promised; the test asks for all of them or for none.
        taken: list[Cell] = []
        for t, slot in waiting:
            bytes_max -= row_bytes[t]
            if bytes_max < 0 and taken:
                break
            taken.append((t, slot))
        taken.sort()
        self.left -= set(taken)
        self.aside -= set(taken)
        counts = [sum(t == table for t, _ in taken) for table in range(len(self.values))]
        return counts, [slot for _, slot in taken], b"".join(self.values[t][slot].tobytes() for t, slot in taken)

    def end(self, durable: bool) -> None:
        if not durable:
            self.dirty[self.tenant] |= self.captured
        self.left, self.aside = set(), set()

    def aside_bytes(self, row_bytes: list[int]) -> int:
        return sum(row_bytes[t] for t, _ in self.aside)


class Both:
    """A shard and its twins: what is done to one is done to the others, and whatever comes back is compared."""

    def __init__(self, seed: int, recovering: bool = False) -> None:
        self.rng = np.random.default_rng(seed)
        self.shard = _kernels.Shard(SERVERS, SERVER, 1, CODING, recovering)
        self.twin = CodedShardTwin(SERVERS, SERVER, 1, coding=CODING, recovering=recovering)
        self.capture = CaptureTwin(self.twin)
        self.capturing = False
        for index, table in enumerate(TABLES):
            settings = {key: value for key, value in table.items() if key != "rule"}
            settings |= dict(seed=5, init_bound=0.25, table=index)
            rule = table["rule"]
            self.shard.add_table(**settings, **{name: getattr(rule, name) for name in Rule.__slots__})
            self.twin.add_table(**settings, rule=rule)

    def some_rows(self, share: float) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        sizes = [self.shard.slots(t) for t in range(len(TABLES))]
        slots = [self.rng.permutation(n)[: self.rng.binomial(n, share)] for n in sizes]
        counts = np.array([len(part) for part in slots], np.int32)
        floats = int(counts @ [table["dim"] for table in TABLES])
        values = self.rng.standard_normal(floats).astype(np.float32)
        return counts, np.concatenate(slots).astype(np.uint32), values

    def update(self, step: int, share: float = 0.1) -> None:
        counts, slots, grads = self.some_rows(share)
        self.capture.changed(cells_of(counts, slots))
        for each in (self.shard, self.twin):
            each.update(counts, slots, grads, step)

    def assign(self) -> None:
        counts, slots, weights = self.some_rows(0.05)
        before = self.capture.touched()
        self.capture.changed(cells_of(counts, slots) - before)
        for each in (self.shard, self.twin):
            each.assign_untouched(counts, slots, weights)

    def write(self) -> None:
        t = int(self.rng.integers(len(TABLES)))
        first = int(self.rng.integers(self.shard.slots(t)))
        count = int(self.rng.integers(min(100, self.shard.slots(t) - first) + 1))
        records = self.rng.random((count, self.shard.record_floats(t)), np.float32)
        self.capture.changed({(t, slot) for slot in range(first, first + count)})
        for each in (self.shard, self.twin):
            each.write_records(t, first, count, records)

    def flush(self) -> None:
        group = int(self.rng.integers(len(CODING)))
        counts, slots, deltas = self.shard.take_flush(group)
        expected = self.twin.take_flush(group)
        assert counts.tolist() == expected[0].tolist()
        assert rows_of(self.shard, counts, slots, deltas) == rows_of(self.shard, *expected)

    def add_tenant(self) -> None:
        assert self.shard.add_tenant() == self.capture.add_tenant()

    def begin(self, tenant: int, full: bool) -> None:
        self.shard.begin_capture(tenant, full)
        self.capture.begin(tenant, full)
        self.capturing = True

    def take(self, bytes_max: int, aside_first: bool = False) -> int:
        if aside_first:
            bytes_max = max(1, self.capture.aside_bytes(CHUNK_ROW_BYTES))  # all that are aside, and no more
        expected = self.capture.next(bytes_max, aside_first, CHUNK_ROW_BYTES)
        counts, words = self.shard.capture_chunk(bytes_max, aside_first)
        assert (counts.dtype, words.dtype) == (np.int32, np.uint32)
        kept, wanted = chunk_of(*expected)
        assert (counts.tolist(), words.tobytes()[: len(wanted)]) == (kept, wanted)
        return len(expected[1])

    def end(self, durable: bool) -> None:
        while durable and self.take(int(self.rng.integers(1, 20_000))):
            pass
        self.shard.end_capture(durable)
        self.capture.end(durable)
        self.capturing = False

    def check(self) -> None:
        assert [self.shard.dirty_rows(tenant) for tenant in range(len(self.capture.dirty))] == [
            len(dirty) for dirty in self.capture.dirty
        ]
        assert self.shard.capture_left() == len(self.capture.left)
        assert self.shard.capture_side_bytes() >= self.capture.aside_bytes(self.capture.row_bytes)
        if not self.capture.aside:
            assert self.shard.capture_side_bytes() == 0
        for t in range(len(TABLES)):
            assert self.shard.touched(t).tobytes() == self.twin.touched_words(t).tobytes()


def cells_of(counts: np.ndarray, slots: np.ndarray) -> set[Cell]:
    return set(zip(np.repeat(np.arange(len(counts)), counts).tolist(), slots.tolist(), strict=True))


def rows_of(shard: _kernels.Shard, counts: Any, slots: Any, records: Any) -> dict[Cell, bytes]:
    rows, at = {}, 0
    for t, slot in zip(np.repeat(np.arange(len(counts)), counts).tolist(), slots.tolist(), strict=True):
        rows[t, slot] = records[at : at + shard.record_floats(t)].tobytes()
        at += shard.record_floats(t)
    return rows


# ---- at random


@pytest.mark.parametrize("mode", MODES, ids=str)
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_captures_agree_with_the_twin(mode: Mode, seed: int) -> None:
    with running(mode):
        both = Both(seed)
        for step in range(1, 4):
            both.update(step, share=0.2)
        both.add_tenant()
        for step in range(4, 90):
            if step == 20:
                both.add_tenant()
            match both.rng.integers(10):
                case 0:
                    both.flush()
                case 1:
                    both.assign()
                case 2:
                    both.write()
                case 3 | 4 | 5 if both.capturing:
                    both.take(int(both.rng.integers(1, 30_000)), aside_first=bool(both.rng.integers(2)))
                case 6 if both.capturing:
                    both.end(durable=bool(both.rng.integers(2)))
                case 3 | 4 | 5 | 6:
                    both.begin(int(both.rng.integers(len(both.capture.dirty))), full=bool(both.rng.integers(4) == 0))
                case _:
                    both.update(step)
            both.check()
        if both.capturing:
            both.end(durable=True)
        for tenant in (0, 1, 0, 1):  # what was left over, then nothing
            both.begin(tenant, full=False)
            both.end(durable=True)
            both.check()
        assert both.shard.dirty_rows(0) == both.shard.dirty_rows(1) == 0
        while sum(map(both.shard.pending_rows, range(len(CODING)))):
            both.flush()


# ---- a table large enough that several threads work on it


def large(rows: int = 100_000) -> _kernels.Shard:
    shard = _kernels.Shard(1, 0)
    shard.add_table(rows=rows, dim=16, optimizer="rowwise_adagrad", learning_rate=0.1, seed=1, init_bound=0.1, table=0)
    return shard


def updated(shard: _kernels.Shard, slots: np.ndarray) -> None:
    counts = np.array([len(slots)], np.int32)
    shard.update(counts, slots.astype(np.uint32), np.full(16 * len(slots), 0.5, np.float32), 1)


ROW_BYTES = 4 * (1 + 16 + 1)  # its number, weights and state


def records_of(shard: _kernels.Shard) -> np.ndarray:
    records = np.empty((shard.slots(0), shard.record_floats(0)), np.float32)
    shard.read_records(0, 0, len(records), records)
    return records[:, :17]


def taken(shard: _kernels.Shard, bytes_max: int, aside_first: bool = False) -> tuple[np.ndarray, np.ndarray]:
    """(rows, records) of the next chunk. With one server and k = 1, the number of a row is that of its slot."""
    counts, words = shard.capture_chunk(bytes_max, aside_first)
    count = int(counts[0])
    weights, state = words[count : 17 * count].view(np.float32), words[17 * count :].view(np.float32)
    return words[:count], np.hstack([weights.reshape(count, 16), state.reshape(count, 1)])


@pytest.mark.parametrize("mode", MODES, ids=str)
def test_large_pieces(mode: Mode) -> None:
    """Pieces past the caches and rows aside in every range; what is aside is given back as the capture goes on."""
    with running(mode):
        shard, rng = large(200_000), np.random.default_rng(3)
        updated(shard, rng.permutation(200_000)[:180_000])
        tenant = shard.add_tenant()
        captured, values = np.flatnonzero(bits(shard.touched(0))), records_of(shard)
        shard.begin_capture(tenant, False)
        assert shard.dirty_rows(tenant) == 0
        updated(shard, rng.permutation(200_000)[:100_000])
        slots, side = [], [shard.capture_side_bytes()]
        for bytes_max in (100, 9 << 20, 1 << 20, 1 << 20):
            got, records = taken(shard, bytes_max)
            assert len(got) * ROW_BYTES <= bytes_max
            assert (records == values[got]).all()
            slots.append(got)
            side.append(shard.capture_side_bytes())
        assert len(slots[0]) == 1
        count = sum(map(len, slots))
        assert shard.capture_left() == 180_000 - count > 0
        got, records = taken(shard, 1 << 30)
        assert (records == values[got]).all()
        assert (np.concatenate([*slots, got]) == captured).all()
        assert shard.capture_side_bytes() == 0 == shard.capture_left()
        assert 85_000 * 80 < side[0] < 100_000 * 80
        assert side == sorted(side, reverse=True)
        assert side[-1] < side[0] * (180_000 - count + (1 << 14)) / 180_000, "and a range of 2 ** 14 slots"
        shard.end_capture(True)
        assert shard.dirty_rows(tenant) == 100_000


def bits(words: np.ndarray) -> np.ndarray:
    return np.unpackbits(words.view(np.uint8), bitorder="little")


def test_memory_kept_aside_can_be_bounded() -> None:
    """A driver that takes what is aside first never holds more than one call's rows."""
    shard, rng = large(), np.random.default_rng(6)
    updated(shard, np.arange(100_000))
    tenant, values = shard.add_tenant(), records_of(shard)
    shard.begin_capture(tenant, True)
    seen = []
    while shard.capture_left():
        updated(shard, rng.permutation(100_000)[:5_000])
        assert shard.capture_side_bytes() <= 5_000 * 80
        slots, records = taken(shard, max(1 << 20, shard.capture_side_bytes()), aside_first=True)
        assert shard.capture_side_bytes() == 0
        assert (np.diff(slots.astype(np.int64)) > 0).all()
        assert (records == values[slots]).all()
        seen.append(slots)
    assert (np.sort(np.concatenate(seen)) == np.arange(100_000)).all()
    shard.end_capture(True)


def test_part_of_what_is_aside() -> None:
    """Where the budget is for fewer rows than are aside, only such rows come."""
    shard, rng = large(), np.random.default_rng(7)
    updated(shard, np.arange(100_000))
    shard.begin_capture(shard.add_tenant(), True)
    changed = np.sort(rng.permutation(100_000)[:5_000])
    updated(shard, changed)
    pieces = [taken(shard, 1000 * ROW_BYTES, aside_first=True)[0] for _ in range(5)]
    assert [len(piece) for piece in pieces] == [1000] * 5
    assert (np.sort(np.concatenate(pieces)) == changed).all()
    assert shard.capture_side_bytes() == 0
    assert taken(shard, ROW_BYTES, aside_first=True)[0].tolist() == [int(np.setdiff1d(np.arange(100_000), changed)[0])]


# ---- tables that come late


def test_a_table_added_later() -> None:
    shard = large(100)
    updated(shard, np.arange(7))
    tenant = shard.add_tenant()
    before = shard.memory_bytes
    shard.begin_capture(tenant, False)
    shard.add_table(rows=70, dim=3, optimizer="sgd", learning_rate=0.1, seed=1, init_bound=0.1, table=1)
    assert shard.memory_bytes > before
    shard.update(np.array([0, 1], np.int32), np.array([69], np.uint32), np.ones(3, np.float32), 1)
    counts, words = shard.capture_chunk(1 << 20)
    assert (counts.tolist(), words[:7].tolist()) == ([7, 0], list(range(7)))
    shard.end_capture(True)
    shard.begin_capture(tenant, False)
    counts, words = shard.capture_chunk(1 << 20)
    assert (counts.tolist(), words[:1].tolist()) == ([0, 1], [69])


# ---- what is refused


def test_a_capture_waits_for_missing_rows() -> None:
    shard = _kernels.Shard(3, 0, 1, [(1, 1)], True)
    shard.add_table(rows=300, dim=4, k=1, r=1, optimizer="sgd", learning_rate=0.1, seed=1, init_bound=0.1, table=0)
    with pytest.raises(
        ValueError, match="100 rows were not recovered yet; a capture has to wait until none is missing"
    ):
        shard.begin_capture(shard.add_tenant(), False)


def test_tenants_are_bounded() -> None:
    shard = large(100)
    assert [shard.add_tenant() for _ in range(4)] == [0, 1, 2, 3]
    with pytest.raises(ValueError, match="a shard has at most 4 tenants"):
        shard.add_tenant()


@pytest.mark.parametrize(
    ("capturing", "method", "arguments", "error", "message"),
    [
        (False, "dirty_rows", (2,), IndexError, "there is no tenant 2; this shard has 2"),
        (False, "begin_capture", (2, True), IndexError, "there is no tenant 2"),
        (False, "capture_chunk", (1,), ValueError, "no capture is under way; begin one first"),
        (False, "end_capture", (True,), ValueError, "no capture is under way"),
        (False, "end_capture", (False,), ValueError, "no capture is under way"),
        (True, "begin_capture", (0, False), ValueError, "a capture of tenant 1 is under way; end it before the next"),
        (True, "capture_chunk", (0,), ValueError, "bytes_max must be at least 1, not 0"),
        (True, "end_capture", (True,), ValueError, "5 captured rows were not taken yet: the capture cannot be durable"),
    ],
)
def test_a_wrong_call_changes_nothing(
    capturing: bool, method: str, arguments: tuple[Any, ...], error: type[Exception], message: str
) -> None:
    shard = large(100)
    updated(shard, np.arange(7))
    shard.add_tenant()
    shard.add_tenant()
    if capturing:
        shard.begin_capture(1, False)
        taken(shard, 2 * ROW_BYTES)

    def state() -> list[int]:
        return [shard.dirty_rows(0), shard.dirty_rows(1), shard.capture_left(), shard.capture_side_bytes()]

    before = state()
    assert before == ([7, 0, 5, 0] if capturing else [7, 7, 0, 0])
    with pytest.raises(error, match=message):
        getattr(shard, method)(*arguments)
    assert state() == before
    if capturing:
        assert taken(shard, 1 << 20)[0].tolist() == [2, 3, 4, 5, 6]
        shard.end_capture(True)
        assert (shard.dirty_rows(0), shard.dirty_rows(1)) == (7, 0)
