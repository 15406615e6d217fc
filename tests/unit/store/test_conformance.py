"""Goal: any store holds the rows the layout gives it, does to them what it was told, and refuses what it cannot do
before anything changed: the part of `regrow.store.interface` that is about rows, records and flushes.

Method: every test runs on every store of `subjects.SUBJECTS`. Expected values are computed row by row with the twins of
the kernels. Wrong calls are listed, and all that can be seen of a store is compared before and after each.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from subjects import (
    JOB,
    bits_of,
    by_cell,
    call_of,
    cells_of,
    every_slot,
    every_store,
    groups_and_tables,
    groups_of,
    job_of,
    member_of,
    observe,
    published_of,
    records_of,
    rows_of_slots,
    some_slots,
    train,
    weights_for,
)

from regrow.core import twins
from regrow.core.job import JobSpec
from regrow.core.twins import OPTIMIZERS, Rule
from regrow.store.interface import Store, StoreBuilder

pytestmark = every_store
TABLES = len(JOB.tables)


def xored(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    return (a.view(np.uint32) ^ b.view(np.uint32)).view(np.float32)


def initial_records(job: JobSpec, store: Store, server: int, table: int) -> np.ndarray:
    spec = job.tables[table]
    rows = rows_of_slots(job, server, table, np.arange(store.slots(table)))
    records = np.zeros((len(rows), store.record_floats(table)), np.float32)
    there = rows < spec.rows
    records[there, : spec.dim] = twins.initial_rows(
        rows[there].tolist(), dim=spec.dim, seed=job.seed, table=table, bound=spec.init_bound
    )
    return records


# ---- sizes and first values


def test_sizes(build: StoreBuilder) -> None:
    store = build(JOB, 0, False)
    for table, spec in enumerate(JOB.tables):
        floats = spec.dim + sum(floats for _, floats in spec.optimizer.state_parts(spec.dim))
        assert floats <= store.record_floats(table) < floats + 4
        assert store.record_floats(table) % 4 == 0
        assert store.slots(table) == store.blocks(table) * spec.k
        assert store.slots(table) * JOB.servers >= spec.rows
    rows = sum(4 * store.slots(table) * store.record_floats(table) for table in range(TABLES))
    assert store.memory_bytes - store.redundancy_bytes >= rows
    assert store.redundancy_bytes > 0
    assert build(job_of(("sgd", 10, 2, 2, 0)), 0, False).redundancy_bytes == 0


@pytest.mark.parametrize("rings", [1, 2])
def test_rows_begin_with_values_that_follow_from_the_seed(build: StoreBuilder, rings: int) -> None:
    """Those of all servers together are the table's; holes and states are zero, nothing is touched or pending."""
    job = job_of(*((t.optimizer.kind, t.rows, t.dim, t.k, t.r) for t in JOB.tables), servers=5 * rings, rings=rings)
    rows: list[list[int]] = [[] for _ in job.tables]
    for server in range(job.servers):
        store = build(job, server, False)
        for table, spec in enumerate(job.tables):
            mine = rows_of_slots(job, server, table, np.arange(store.slots(table)))
            rows[table] += mine[mine < spec.rows].tolist()
            assert records_of(store, table).tobytes() == initial_records(job, store, server, table).tobytes()
            assert not bits_of(store.touched(table), store.slots(table)).any()
        assert (store.pending_bytes(), store.missing_rows(), store.blank_rows()) == (0, 0, 0)
    assert [sorted(found) for found in rows] == [list(range(spec.rows)) for spec in job.tables]


# ---- rows for workers


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_every_optimizer_updates_as_its_twin(build: StoreBuilder, kind: str) -> None:
    """Without weight decay and with; with learning rates of its own for one push; tables whose rows are not in the call
    stay as they are."""
    job = job_of((kind, 61, 5, 2, 1), (kind, 40, 16, 1, 0), (kind, 33, 1, 3, 2))
    store, rng = build(job, 2, False), np.random.default_rng(1)
    expected = [records_of(store, table) for table in range(3)]
    for step in (1, 2, 7):
        counts, slots = some_slots(store, job, rng, 0.5)
        counts[step % 3], slots = 0, np.concatenate([s for t, s in parts(counts, slots) if t != step % 3])
        grads = weights_for(job, counts, rng)
        rates = (0.5, 0.0, 0.03) if step == 2 else ()
        store.update(counts, slots, grads, step, rates)
        at = 0
        for table, slot in cells_of(counts, slots):
            spec = job.tables[table]
            rate = rates[table] if rates else 0.1
            rule = Rule(optimizer=kind, learning_rate=rate, weight_decay=spec.optimizer.weight_decay)
            twins.update_record(expected[table][slot], grads[at : at + spec.dim], rule=rule, step=step)
            at += spec.dim
        for table in range(3):
            assert records_of(store, table).tobytes() == expected[table].tobytes()


def parts(counts: np.ndarray, slots: np.ndarray) -> list[tuple[int, np.ndarray]]:
    return list(enumerate(np.split(slots, np.cumsum(counts)[:-1])))


def test_gather_gives_weights_also_twice(build: StoreBuilder) -> None:
    store, rng = build(JOB, 0, False), np.random.default_rng(2)
    train(store, JOB, rng)
    counts, slots = some_slots(store, JOB, rng, 0.5)
    slots = np.concatenate([np.concatenate([part, part]) for _, part in parts(counts, slots)])
    counts = 2 * counts
    out = np.empty(int(counts @ [spec.dim for spec in JOB.tables]), np.float32)
    before = observe(store, JOB)
    store.gather(counts, slots, out)
    expected = [records_of(store, table)[part][:, : JOB.tables[table].dim] for table, part in parts(counts, slots)]
    assert out.tobytes() == b"".join(each.tobytes() for each in expected)
    assert observe(store, JOB) == before


def test_only_rows_never_touched_are_assigned(build: StoreBuilder) -> None:
    store, rng = build(JOB, 0, False), np.random.default_rng(3)
    touched = set(train(store, JOB, rng))
    before = [records_of(store, table) for table in range(TABLES)]
    counts, slots = every_slot(store, JOB)
    weights = weights_for(JOB, counts, rng)
    store.assign_untouched(counts, slots, weights)
    at = 0
    for table, slot in cells_of(counts, slots):
        dim = JOB.tables[table].dim
        if (table, slot) not in touched:
            before[table][slot, :dim] = weights[at : at + dim]
        at += dim
    assert [records_of(store, table).tobytes() for table in range(TABLES)] == [each.tobytes() for each in before]
    assert all(bits_of(store.touched(table), store.slots(table)).all() for table in range(TABLES))
    state = observe(store, JOB)
    store.assign_untouched(counts, slots, weights + 1)
    assert observe(store, JOB) == state


def test_of_a_row_assigned_twice_the_first_counts(build: StoreBuilder) -> None:
    store = build(job_of(("sgd", 20, 2, 1, 1)), 0, False)
    store.assign_untouched(*call_of(1, (0, 3), (0, 3)), np.array([1, 2, 3, 4], np.float32))
    assert records_of(store, 0)[3, :2].tolist() == [1, 2]


def test_touched_rows_are_those_that_changed(build: StoreBuilder) -> None:
    store, rng = build(JOB, 0, False), np.random.default_rng(4)
    cells = set(train(store, JOB, rng, share=0.1)) | set(train(store, JOB, rng, step=2, share=0.1))
    found = {
        (table, int(slot))
        for table in range(TABLES)
        for slot in np.flatnonzero(bits_of(store.touched(table), store.slots(table)))
    }
    assert found == cells


def test_pushes_are_summed_in_the_order_of_the_list(build: StoreBuilder) -> None:
    store, rng = build(JOB, 0, False), np.random.default_rng(5)
    before = observe(store, JOB)
    for number in (0, 1, 3):
        pushes = []
        for _ in range(number):
            counts, slots = some_slots(store, JOB, rng, 0.4)
            pushes.append((counts, slots, weights_for(JOB, counts, rng)))
        expected = twins.sum_pushes([spec.dim for spec in JOB.tables], pushes)
        for got, wanted in zip(store.sum_pushes(pushes), expected, strict=True):
            assert (got.dtype, got.tobytes()) == (wanted.dtype, wanted.tobytes())
    assert observe(store, JOB) == before
    with pytest.raises(ValueError):
        store.sum_pushes([(np.ones(TABLES, np.int32), np.zeros(1, np.uint32), np.zeros(36, np.float32))])


def test_memory_is_the_callers_again(build: StoreBuilder) -> None:
    """What was passed in may be overwritten, and what was given out does not change any more."""
    store, rng = build(JOB, 0, False), np.random.default_rng(6)
    counts, slots = some_slots(store, JOB, rng, 0.5)
    grads = weights_for(JOB, counts, rng)
    records = np.ones((4, store.record_floats(0)), np.float32)
    store.update(counts, slots, grads, 1)
    store.write_records(0, 1, 4, records)
    ids, values = np.arange(20, dtype=np.uint32), np.full((20, 1), 7, np.float32)
    store.load_rows(4, ids, [values])
    given = [store.touched(0), *store.take_flush(0, keep=True), *store.sum_pushes([(counts, slots, grads)])]
    before, bits = observe(store, JOB), [each.tobytes() for each in given]
    for array in (counts, slots, grads, records, ids, values):
        array[:] = 0
    assert observe(store, JOB) == before
    train(store, JOB, rng, step=2, share=1.0)
    assert [each.tobytes() for each in given] == bits
    for each in given:
        each[:] = 0  # it is ours


# ---- whole records


def test_records_are_read_and_written_in_pieces(build: StoreBuilder) -> None:
    store, rng = build(JOB, 2, False), np.random.default_rng(7)
    for table in range(TABLES):
        floats, end = store.record_floats(table), store.slots(table)
        expected = records_of(store, table)
        for first, count in [(0, 0), (0, 1), (end - 1, 1), (end, 0), (1, end - 1)]:
            piece = rng.standard_normal((count, floats)).astype(np.float32)
            store.write_records(table, first, count, piece)
            expected[first : first + count] = piece
            out = np.empty((count, floats), np.float32)
            store.read_records(table, first, count, out)
            assert out.tobytes() == piece.tobytes()
            assert records_of(store, table).tobytes() == expected.tobytes()
        assert bits_of(store.touched(table), end).all()


def test_rows_are_loaded_where_they_live(build: StoreBuilder) -> None:
    """Each server is given all rows, in any order, and takes its own; the others' stay as they began."""
    rng = np.random.default_rng(8)
    for table, spec in enumerate(JOB.tables):
        ids = rng.permutation(spec.rows)[: spec.rows // 2].astype(np.uint32)
        widths = [spec.dim, *(floats for _, floats in spec.optimizer.state_parts(spec.dim))]
        values = [rng.random((len(ids), width), np.float32) for width in widths]
        loaded = 0
        for server in range(JOB.servers):
            store = build(JOB, server, False)
            expected = records_of(store, table)
            rows = rows_of_slots(JOB, server, table, np.arange(store.slots(table)))
            mine = [(slot, int(np.flatnonzero(ids == row)[0])) for slot, row in enumerate(rows) if row in ids]
            for slot, at in mine:
                expected[slot, : sum(widths)] = np.concatenate([part[at] for part in values])
            assert store.load_rows(table, ids, values) == len(mine)
            assert records_of(store, table).tobytes() == expected.tobytes()
            assert np.flatnonzero(bits_of(store.touched(table), len(rows))).tolist() == [slot for slot, _ in mine]
            assert sum(map(store.pending_rows, range(len(groups_of(JOB))))) == (len(mine) if spec.r else 0)
            loaded += len(mine)
        assert loaded == len(ids)


# ---- flushes


@pytest.mark.parametrize("change", ["update", "assign_untouched", "write_records", "load_rows"])
def test_changes_are_flushed_group_by_group(build: StoreBuilder, change: str) -> None:
    """Every way to change a row leaves it pending, once, in the group of its member; tables without parities never."""
    store, rng = build(JOB, 1, False), np.random.default_rng(9)
    before = [records_of(store, table) for table in range(TABLES)]
    for _ in range(2):
        change_some(store, change, rng)
    for table, spec in enumerate(JOB.tables):
        zeros = np.zeros_like(before[table])
        present = xored(before[table], records_of(store, table))
        assert published_of(store, JOB, table).tobytes() == (zeros if spec.r else present).tobytes()
    pending_bytes = 0
    for group in range(len(groups_of(JOB))):
        kept = by_cell(store, store.take_flush(group, keep=True))
        flush = store.take_flush(group)
        assert [part.dtype for part in flush] == [np.int32, np.uint32, np.float32]
        found = by_cell(store, flush)
        assert found == kept
        expected = {}
        for table, spec in enumerate(JOB.tables):
            touched = np.flatnonzero(bits_of(store.touched(table), store.slots(table)))
            now = records_of(store, table)
            for slot in touched[touched % spec.k == member_of(JOB, table, group)].tolist():
                expected[table, slot] = xored(before[table][slot], now[slot]).tobytes()
        assert found == expected
        pending_bytes += 4 * len(flush[2])
        assert (store.pending_rows(group), store.take_flush(group)[1].size) == (0, 0)
    assert pending_bytes > 0 == store.pending_bytes()
    for table in range(TABLES):
        relative = xored(before[table], records_of(store, table))
        assert published_of(store, JOB, table).tobytes() == relative.tobytes()


def change_some(store: Store, change: str, rng: np.random.Generator) -> None:
    counts, slots = some_slots(store, JOB, rng, 0.4)
    if change == "update":
        store.update(counts, slots, weights_for(JOB, counts, rng), 1)
    elif change == "assign_untouched":
        store.assign_untouched(counts, slots, weights_for(JOB, counts, rng))
    for table, spec in enumerate(JOB.tables):
        if change == "write_records":
            records = rng.random((2, store.record_floats(table)), np.float32)
            store.write_records(table, int(rng.integers(store.slots(table) - 1)), 2, records)
        elif change == "load_rows":
            ids = np.unique(rng.integers(0, spec.rows, 20)).astype(np.uint32)
            widths = [spec.dim, *(floats for _, floats in spec.optimizer.state_parts(spec.dim))]
            store.load_rows(table, ids, [rng.random((len(ids), width), np.float32) for width in widths])


def test_pending_rows_are_counted(build: StoreBuilder) -> None:
    store, rng = build(JOB, 0, False), np.random.default_rng(10)
    cells = set(train(store, JOB, rng)) | set(train(store, JOB, rng, step=2))
    for group in range(len(groups_of(JOB))):
        mine = [(t, slot) for t, slot in cells if member_of(JOB, t, group) == slot % JOB.tables[t].k]
        assert store.pending_rows(group) == len(mine)
    coded = [4 * store.record_floats(t) for t, _ in cells if JOB.tables[t].r]
    assert store.pending_bytes() == sum(coded)


def test_touched_rows_of_a_group_are_found_in_pieces(build: StoreBuilder) -> None:
    store, rng = build(JOB, 0, False), np.random.default_rng(11)
    for group, table, _ in groups_and_tables(JOB):
        assert store.next_touched(table, group, 0, 1)[1] == store.blocks(table)
        assert store.next_touched(table, group, store.blocks(table), 1)[0].size == 0
    cells = train(store, JOB, rng)
    for group, table, member in groups_and_tables(JOB):
        expected = sorted(slot for t, slot in cells if t == table and slot % JOB.tables[t].k == member)
        for rows_max in (1, 3, 1000):
            found: list[int] = []
            block = 0
            while block < store.blocks(table):
                slots, after = store.next_touched(table, group, block, rows_max)
                assert slots.dtype == np.uint32
                assert len(slots) <= rows_max
                assert after > block
                found, block = found + slots.tolist(), after
            assert found == expected


# ---- what is refused


def call(counts: list[int], slots: list[int], floats: int) -> tuple[Any, Any, Any]:
    return np.array(counts, np.int32), np.array(slots, np.uint32), np.ones(floats, np.float32)


def rows(floats: int = 17, counts: tuple[int, ...] = (1, 0, 0, 0, 1, 0), slots: tuple[int, ...] = (0, 1)) -> Any:
    """Weights of a row of table 0 and one of table 4."""
    return call(list(counts), list(slots), floats)


def wide(floats: int = 20, counts: tuple[int, ...] = (1, 0, 0, 0, 0, 0), slots: tuple[int, ...] = (0,)) -> Any:
    """A record of table 0."""
    return call(list(counts), list(slots), floats)


WRONG_ROWS = [
    (rows(counts=(1, 0, 0, 0, 1)), ValueError),
    (rows(counts=(1, 0, 0, 0, 2, 0)), ValueError),
    (rows(counts=(1, -1, 1, 0, 1, 0)), ValueError),
    (rows(16), ValueError),
    (rows(slots=(0, 14)), IndexError),
    (rows(slots=(2**32 - 1, 0)), IndexError),
    ((rows()[0].astype(np.int64), *rows()[1:]), ValueError),
    ((rows()[0], rows()[1].astype(np.int32), rows()[2]), ValueError),
    ((*rows()[:2], rows()[2].astype(np.float64)), ValueError),
    ((*rows()[:2], np.ones(34, np.float32)[::2]), ValueError),
]
WRONG: list[tuple[str, tuple[Any, ...], type[Exception]]] = [
    *(("gather", arguments, error) for arguments, error in WRONG_ROWS),
    *(("update", (*arguments, 1), error) for arguments, error in WRONG_ROWS),
    *(("assign_untouched", arguments, error) for arguments, error in WRONG_ROWS),
    ("update", (*rows(), 0), ValueError),
    *(
        (method, (table, first, count, np.ones(floats, np.float32)), error)
        for method in ("read_records", "write_records")
        for table, first, count, floats, error in [
            (6, 0, 1, 20, IndexError),
            (0, -1, 1, 20, IndexError),
            (0, 0, -1, 0, IndexError),
            (0, 81, 1, 20, IndexError),
            (0, 80, 2, 40, IndexError),
            (0, 2**62, 2**62, 20, IndexError),
            (0, 0, 2, 20, ValueError),
        ]
    ),
    ("load_rows", (6, np.zeros(1, np.uint32), [np.ones((1, 1), np.float32)]), IndexError),
    ("load_rows", (4, np.array([60, 61], np.uint32), [np.ones((2, 1), np.float32)]), IndexError),
    ("load_rows", (4, np.array([60], np.uint32), [np.ones((2, 1), np.float32)]), ValueError),
    ("load_rows", (4, np.array([60], np.uint32), [np.ones((1, 1), np.float32)] * 2), ValueError),
    ("load_rows", (3, np.array([10], np.uint32), [np.ones((1, 3), np.float32)]), ValueError),
    ("slots", (6,), IndexError),
    ("blocks", (6,), IndexError),
    ("record_floats", (6,), IndexError),
    ("touched", (6,), IndexError),
    ("pending_rows", (5,), IndexError),
    ("take_flush", (5,), IndexError),
    ("published", wide(19), ValueError),
    ("published", wide(counts=(1, 0, 0)), ValueError),
    ("published", wide(slots=(81,)), IndexError),
    ("next_touched", (0, 0, 0, 1), ValueError),  # the table has no rows in this group
    ("next_touched", (1, 0, 0, 1), ValueError),
    ("next_touched", (0, 1, 28, 1), IndexError),
    ("next_touched", (0, 1, -1, 1), IndexError),
    ("next_touched", (0, 1, 0, 0), ValueError),
    ("parity_apply", (5, *wide()), IndexError),
    ("parity_apply", (-1, *wide()), IndexError),
    ("parity_apply", (0, *wide()), ValueError),  # no parity of a server's own rows is there
    ("parity_apply", (3, *wide()), ValueError),
    ("parity_apply", (2, *wide(40, (2, 0, 0, 0, 0, 0), (0, 2))), ValueError),
    ("parity_apply", (2, *wide(36, (1, 1, 0, 0, 0, 0), (0, 0))), ValueError),
    ("parity_apply", (2, *wide(40, (2, 0, 0, 0, 0, 0), (0, 81))), IndexError),
    ("parity_apply", (2, *wide(16)), ValueError),
    ("parity_read", (0, *wide(16, (0, 1, 0, 0, 0, 0))), ValueError),  # the table has no parities
    ("parity_read", (2, *wide()), IndexError),
    ("parity_read", (-1, *wide()), IndexError),
    ("parity_read", (0, *wide(slots=(27,))), IndexError),
    ("parity_read", (0, *wide(24)), ValueError),
    ("parity_read", (0, *wide(40, (2, 0, 0, 0, 0, 0))), ValueError),
    ("parity_members", (1, 0, 0), ValueError),
    ("parity_members", (0, 2, 0), IndexError),
    ("parity_members", (0, -1, 0), IndexError),
    ("parity_members", (0, 0, 3), IndexError),
    ("parity_touched", (0, 3, 0), ValueError),  # no parity of a server's own rows is there
    ("parity_touched", (4, 0, 0), ValueError),
    ("parity_touched", (9, 3, 0), IndexError),
    ("know_touched", (3, 0, np.zeros(2, np.uint64)), ValueError),
    ("know_touched", (3, 0, np.array([1 << 27], np.uint64)), ValueError),
    ("know_touched", (0, 0, np.zeros(1, np.uint64)), ValueError),
    ("know_touched", (3, 0, np.zeros(1, np.int64)), ValueError),
    ("prepare", (wide()[0], np.array([81], np.uint32)), IndexError),
    ("put", wide(slots=(81,)), IndexError),
    ("put", wide(16), ValueError),
    ("fill", (0,), ValueError),
]


def test_a_wrong_call_changes_nothing(build: StoreBuilder) -> None:
    """The bad row is often the last one: rows before it must not have been written either. Nor what is named out."""
    store = build(JOB, 0, False)
    train(store, JOB, np.random.default_rng(12))
    assert [store.slots(table) for table in (0, 4)] == [81, 14]
    assert (member_of(JOB, 0, 3), member_of(JOB, 0, 0)) == (1, None)
    before = observe(store, JOB)
    for method, arguments, error in WRONG:
        arrays = [argument.copy() for argument in arguments if isinstance(argument, np.ndarray)]
        with pytest.raises(error):
            getattr(store, method)(*arguments)
        assert observe(store, JOB) == before, (method, arguments)
        left = [argument for argument in arguments if isinstance(argument, np.ndarray)]
        assert all((a == b).all() for a, b in zip(arrays, left, strict=True)), (method, arguments)


def test_a_wrong_call_changes_nothing_at_a_store_that_comes_back(build: StoreBuilder) -> None:
    store = build(JOB, 0, True)
    store.know_touched(3, 0, np.array([5], np.uint64))
    before = observe(store, JOB)
    for method, arguments, error in WRONG:
        # Of a row that is not there, the call is refused for one reason or the other.
        with pytest.raises((error, ValueError)):
            getattr(store, method)(*arguments)
    assert observe(store, JOB) == before


def test_another_ring_is_refused(build: StoreBuilder) -> None:
    job = job_of(("sgd", 100, 4, 2, 1), servers=6, rings=2)
    store = build(job, 0, False)
    with pytest.raises(ValueError):
        store.parity_apply(4, *call([1], [0], 4))
    with pytest.raises(ValueError):
        store.parity_touched(4, 0, 0)
    assert not np.any(store.parity_members(0, 0, 0))


def test_steps_matter_only_to_those_who_count_them(build: StoreBuilder) -> None:
    store = build(job_of(("sgd", 100, 4, 1, 1), ("adagrad", 9, 1, 1, 0)), 0, False)
    store.update(*call([1, 0], [0], 4), 0)
    assert store.pending_rows(0) == 1
