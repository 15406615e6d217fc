"""Goal: a capture gives each tenant exactly the rows that changed since its last durable one, with the values of the
instant it began at, whatever is updated, flushed or captured by others meanwhile: the part of `regrow.store.interface`
that is about captures and tenants.

Method: every test runs on every store of `subjects.SUBJECTS`. All records are copied when a capture begins, and every
row taken is compared with the copy. That the rest goes on meanwhile is in test_random_operations.py.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from subjects import (
    CODED,
    JOB,
    Cell,
    call_of,
    cells_of,
    every_slot,
    every_store,
    groups_and_tables,
    groups_of,
    job_of,
    observe,
    records_for,
    records_of,
    rows_of_slots,
    train,
    words_of,
)

from regrow.core.job import JobSpec
from regrow.store.interface import TENANTS_MAX, Store, StoreBuilder, TableRows

pytestmark = every_store
SERVER = 1
Rows = dict[tuple[int, int], bytes]  # of (table, row): weights and state


def widths_of(job: JobSpec, table: int) -> list[int]:
    spec = job.tables[table]
    return [spec.dim, *(floats for _, floats in spec.optimizer.state_parts(spec.dim))]


def rows_of_chunk(job: JobSpec, chunk: list[TableRows]) -> Rows:
    """What a chunk has, its form checked."""
    found: Rows = {}
    assert [table for table, _, _ in chunk] == sorted({table for table, _, _ in chunk})
    for table, ids, parts in chunk:
        assert ids.dtype == np.uint32
        assert len(ids) > 0
        assert (np.diff(ids.astype(np.int64)) > 0).all()
        assert [(part.dtype, part.shape) for part in parts] == [
            (np.float32, (len(ids), width)) for width in widths_of(job, table)
        ]
        for at, row in enumerate(ids.tolist()):
            found[table, row] = b"".join(part[at].tobytes() for part in parts)
    return found


def chunk_bytes(job: JobSpec, rows: Rows) -> int:
    return sum(4 * (1 + sum(widths_of(job, table))) for table, _ in rows)


def rows_now(store: Store, job: JobSpec, cells: set[Cell]) -> Rows:
    """The same of cells, as they are; holes are no rows."""
    found: Rows = {}
    for table, spec in enumerate(job.tables):
        records = records_of(store, table)
        rows = rows_of_slots(job, SERVER, table, np.arange(len(records)))
        for t, slot in cells:
            if t == table and rows[slot] < spec.rows:
                found[table, int(rows[slot])] = records[slot, : sum(widths_of(job, table))].tobytes()
    return found


def take_all(store: Store, job: JobSpec, bytes_max: int = 1000) -> Rows:
    found: Rows = {}
    while left := store.capture_left():
        rows = rows_of_chunk(job, store.capture_chunk(bytes_max))
        assert store.capture_left() < left
        assert not rows.keys() & found.keys(), "each row once"
        found |= rows
    assert store.capture_chunk(bytes_max) == []
    return found


def train_cells(store: Store, rng: np.random.Generator, *, step: int = 1, share: float = 0.2) -> set[Cell]:
    return set(train(store, JOB, rng, step=step, share=share))


# ---- which rows


@pytest.mark.parametrize("full", [False, True])
def test_a_capture_has_what_changed_or_all_that_ever_did(build: StoreBuilder, full: bool) -> None:
    store, rng = build(JOB, SERVER, False), np.random.default_rng(1)
    before = train_cells(store, rng)
    tenant = store.add_tenant()
    assert store.dirty_rows(tenant) == len(before), "what was touched before there was the tenant"
    store.begin_capture(tenant, False)
    assert (store.dirty_rows(tenant), store.capture_left()) == (0, len(before))
    assert take_all(store, JOB) == rows_now(store, JOB, before)
    store.end_capture(True)
    after = train_cells(store, rng, step=2)
    store.begin_capture(tenant, full)
    wanted = before | after if full else after
    assert store.capture_left() == len(wanted)
    assert take_all(store, JOB) == rows_now(store, JOB, wanted)
    store.end_capture(True)
    store.begin_capture(tenant, False)
    assert store.capture_left() == 0
    store.end_capture(True)


@pytest.mark.parametrize("change", ["update", "assign_untouched", "write_records", "load_rows"])
def test_every_change_is_one(build: StoreBuilder, change: str) -> None:
    store = build(JOB, SERVER, False)
    tenant = store.add_tenant()
    row = rows_of_slots(JOB, SERVER, 3, [1]).astype(np.uint32)
    for times in (1, 2):
        if change == "update":
            store.update(*call_of(len(JOB.tables), (3, 1)), np.full(3, 5, np.float32), 1)
        elif change == "assign_untouched":
            store.assign_untouched(*call_of(len(JOB.tables), (3, 1)), np.full(3, 5, np.float32))
        elif change == "write_records":
            store.write_records(3, 1, 1, np.full(8, 5, np.float32))
        else:
            store.load_rows(3, row, [np.full((1, 3), 5, np.float32)] * 2)
        # Whoever was touched is not assigned again.
        assert store.dirty_rows(tenant) == (0 if (change, times) == ("assign_untouched", 2) else 1)
        store.begin_capture(tenant, False)
        take_all(store, JOB)
        store.end_capture(True)


def test_two_tenants_get_their_own_rows(build: StoreBuilder) -> None:
    """One captures after every update, the other after every third: the second's rows are the first's, together."""
    store, rng = build(JOB, SERVER, False), np.random.default_rng(2)
    tenants = [store.add_tenant(), store.add_tenant()]
    assert tenants == [0, 1]
    seen: Rows = {}
    for step in range(1, 7):
        train_cells(store, rng, step=step, share=0.05)
        store.begin_capture(0, False)
        seen |= take_all(store, JOB)
        store.end_capture(True)
        assert store.dirty_rows(0) == 0
        if step % 3 == 0:
            store.begin_capture(1, False)
            assert take_all(store, JOB) == seen
            store.end_capture(True)
            seen = {}


def test_holes_are_taken_and_left_out(build: StoreBuilder) -> None:
    store = build(JOB, SERVER, False)
    rows = rows_of_slots(JOB, SERVER, 0, np.arange(store.slots(0)))
    holes = [(0, int(slot)) for slot in np.flatnonzero(rows >= JOB.tables[0].rows)]
    assert holes
    tenant = store.add_tenant()
    store.update(*call_of(len(JOB.tables), *holes), np.ones(16 * len(holes), np.float32), 1)
    store.begin_capture(tenant, False)
    assert store.capture_left() == len(holes)
    assert store.capture_chunk(1) == []
    assert store.capture_left() == len(holes) - 1, "an empty list is not the end"
    assert take_all(store, JOB) == {}
    store.end_capture(True)


# ---- their values


def test_values_are_those_of_the_instant(build: StoreBuilder) -> None:
    """Whatever changes before it is taken is kept aside; flushes and other tenants do not notice."""
    store, rng = build(JOB, SERVER, False), np.random.default_rng(3)
    cells = train_cells(store, rng)
    tenant = store.add_tenant()
    expected = rows_now(store, JOB, cells)
    store.begin_capture(tenant, False)
    assert store.capture_side_bytes() == 0
    found = rows_of_chunk(JOB, store.capture_chunk(500))
    changed = train_cells(store, rng, step=2, share=0.5)
    aside = rows_now(store, JOB, cells & changed).keys() - found.keys()
    assert store.capture_side_bytes() >= sum(4 * sum(widths_of(JOB, table)) for table, _ in aside) > 0
    other = store.add_tenant()
    assert store.dirty_rows(tenant) == len(changed)
    assert store.dirty_rows(other) == len(cells | changed)
    for group in range(0 if store.is_paged else len(groups_of(JOB))):
        store.take_flush(group)
    store.write_records(0, 0, store.slots(0), np.ones((store.slots(0), store.record_floats(0)), np.float32))
    store.load_rows(4, np.arange(61, dtype=np.uint32), [np.ones((61, 1), np.float32)])
    found |= take_all(store, JOB)
    assert found == expected
    assert store.capture_side_bytes() == 0
    store.end_capture(True)


def test_what_was_taken_does_not_change(build: StoreBuilder) -> None:
    store, rng = build(JOB, SERVER, False), np.random.default_rng(4)
    train_cells(store, rng)
    store.begin_capture(store.add_tenant(), False)
    chunk = store.capture_chunk(1 << 20)
    before = rows_of_chunk(JOB, chunk)
    store.end_capture(True)
    train_cells(store, rng, step=2, share=1.0)
    assert rows_of_chunk(JOB, chunk) == before
    seen = observe(store, JOB)
    for _, ids, parts in chunk:
        ids[:] = 0  # it is ours
        for part in parts:
            part[:] = 0
    assert observe(store, JOB) == seen


@pytest.mark.parametrize("bytes_max", [1, 100, 777, 1 << 20])
def test_chunks_keep_to_their_size(build: StoreBuilder, bytes_max: int) -> None:
    """But at least one row; by table and slot, from call to call."""
    store, rng = build(JOB, SERVER, False), np.random.default_rng(5)
    train_cells(store, rng)
    store.begin_capture(store.add_tenant(), False)
    slot_of = {
        (table, int(row)): (table, slot)
        for table in range(len(JOB.tables))
        for slot, row in enumerate(rows_of_slots(JOB, SERVER, table, np.arange(store.slots(table))))
    }
    last: Cell = (-1, -1)
    while left := store.capture_left():
        rows = rows_of_chunk(JOB, store.capture_chunk(bytes_max))
        taken = left - store.capture_left()
        assert taken >= 1
        assert chunk_bytes(JOB, rows) <= bytes_max or taken == 1
        cells = sorted(slot_of[row] for row in rows)
        assert not cells or cells[0] > last
        last = cells[-1] if cells else last


def test_rows_that_are_aside_can_go_first(build: StoreBuilder) -> None:
    """So memory kept aside stays within what changes between two calls."""
    store, rng = build(JOB, SERVER, False), np.random.default_rng(6)
    counts, slots = every_slot(store, JOB)
    store.update(counts, slots, np.ones(int(counts @ [spec.dim for spec in JOB.tables]), np.float32), 1)
    expected = rows_now(store, JOB, set(cells_of(counts, slots)))
    store.begin_capture(store.add_tenant(), True)
    found: Rows = {}
    changed = train_cells(store, rng, step=2, share=0.1)
    aside = rows_now(store, JOB, changed)
    some = rows_of_chunk(JOB, store.capture_chunk(chunk_bytes(JOB, aside) // 2, aside_first=True))
    assert some.keys() < aside.keys(), "where there is room for fewer than are aside, only such come"
    found |= some
    step = 2
    while store.capture_left():
        step += 1
        train_cells(store, rng, step=step, share=0.05)
        found |= rows_of_chunk(JOB, store.capture_chunk(max(2000, 2 * store.capture_side_bytes()), True))
        assert store.capture_side_bytes() == 0
    assert found == expected
    store.end_capture(True)


# ---- how it ends


@pytest.mark.parametrize("taken", ["nothing", "some", "all"])
def test_what_was_not_durable_is_dirty_again(build: StoreBuilder, taken: str) -> None:
    store, rng = build(JOB, SERVER, False), np.random.default_rng(7)
    cells = train_cells(store, rng)
    tenant = store.add_tenant()
    store.begin_capture(tenant, False)
    if taken != "nothing":
        store.capture_chunk(1000 if taken == "some" else 1 << 20)
    more = train_cells(store, rng, step=2, share=0.1)
    store.end_capture(False)
    assert (store.capture_left(), store.capture_side_bytes()) == (0, 0)
    assert store.dirty_rows(tenant) == len(cells | more)
    store.begin_capture(tenant, False)
    assert take_all(store, JOB) == rows_now(store, JOB, cells | more)
    store.end_capture(True)
    assert store.dirty_rows(tenant) == 0


def test_captured_rows_load_anywhere(build: StoreBuilder) -> None:
    """What the servers of one cluster captured, those of another, of another size and code, load."""
    rng = np.random.default_rng(8)
    other = job_of(*((t.optimizer.kind, t.rows, t.dim, 1, 1) for t in JOB.tables), servers=3)
    new = [build(other, server, False) for server in range(other.servers)]
    rows: list[dict[int, np.ndarray]] = [{} for _ in JOB.tables]
    for server in range(JOB.servers):
        store = build(JOB, server, False)
        train(store, JOB, rng, share=0.5)
        store.begin_capture(store.add_tenant(), True)
        while store.capture_left():
            for table, ids, parts in store.capture_chunk(3000):
                assert sum(each.load_rows(table, ids, parts) for each in new) == len(ids)
        for table in range(len(JOB.tables)):
            records = records_of(store, table)
            rows[table] |= dict(zip(rows_of_slots(JOB, server, table, range(len(records))), records, strict=True))
    for server, store in enumerate(new):
        for table, spec in enumerate(JOB.tables):
            records = records_of(store, table)
            for slot, row in enumerate(rows_of_slots(other, server, table, range(len(records)))):
                assert row >= spec.rows or records[slot].tobytes() == rows[table][int(row)].tobytes()


# ---- a store that comes back


def test_rows_that_come_back_are_dirty(build: StoreBuilder) -> None:
    """Once they are put, to tenants from before and after; a capture waits for the missing, not for the blank."""
    store, rng = build(CODED, SERVER, True), np.random.default_rng(9)
    tenant = store.add_tenant()
    for group, table, _ in groups_and_tables(CODED):
        store.know_touched(group, table, words_of(rng.random(store.blocks(table)) < 0.4))
    missing = store.missing_rows()
    assert store.dirty_rows(tenant) == 0 < missing
    counts, slots = every_slot(store, CODED)
    relatives = records_for(store, counts, rng)
    some = call_of(len(CODED.tables), *cells_of(counts, slots)[:40])
    put = store.put(*some, relatives[: 40 * store.record_floats(0)])
    assert store.dirty_rows(tenant) == put == store.dirty_rows(store.add_tenant())
    before = observe(store, CODED, tenants=2)
    with pytest.raises(ValueError):
        store.begin_capture(tenant, False)
    assert observe(store, CODED, tenants=2) == before
    assert store.put(counts, slots, relatives) == missing - put
    assert store.blank_rows() > 0
    store.begin_capture(tenant, False)
    assert store.capture_left() == missing
    assert store.fill(1 << 20) > 0
    take_all(store, CODED)
    store.end_capture(True)
    assert (store.dirty_rows(0), store.dirty_rows(1)) == (0, missing)


# ---- what is refused


def test_there_is_room_for_some_tenants(build: StoreBuilder) -> None:
    store = build(JOB, SERVER, False)
    assert [store.add_tenant() for _ in range(TENANTS_MAX)] == list(range(TENANTS_MAX))


@pytest.mark.parametrize(
    ("capturing", "method", "arguments", "error"),
    [
        (False, "dirty_rows", (2,), IndexError),
        (False, "begin_capture", (2, True), IndexError),
        (False, "capture_chunk", (1,), ValueError),
        (False, "end_capture", (True,), ValueError),
        (False, "end_capture", (False,), ValueError),
        (True, "begin_capture", (0, False), ValueError),
        (True, "begin_capture", (1, False), ValueError),
        (True, "capture_chunk", (0,), ValueError),
        (True, "end_capture", (True,), ValueError),
    ],
)
def test_a_wrong_call_changes_nothing(
    build: StoreBuilder, capturing: bool, method: str, arguments: tuple[Any, ...], error: type[Exception]
) -> None:
    store, rng = build(JOB, SERVER, False), np.random.default_rng(10)
    cells = train_cells(store, rng)
    store.add_tenant()
    store.add_tenant()
    expected, found = rows_now(store, JOB, cells), {}
    if capturing:
        store.begin_capture(1, False)
        found = rows_of_chunk(JOB, store.capture_chunk(500))
    before = observe(store, JOB, tenants=2)
    with pytest.raises(error):
        getattr(store, method)(*arguments)
    assert observe(store, JOB, tenants=2) == before
    if capturing:
        assert found | take_all(store, JOB) == expected
        store.end_capture(True)
        assert (store.dirty_rows(0), store.dirty_rows(1)) == (len(cells), 0)
