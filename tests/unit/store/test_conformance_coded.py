"""Goal: parities always stand for the published rows, and a server that is lost comes back bit for bit from them: the
part of `regrow.store.interface` that is about parities held for others, and about coming back.

Method: every test runs on every store of `subjects.SUBJECTS`. Clusters of stores train and flush at random; parities
are compared with `regrow.core.coding.encode`, and lost rows are decoded from what the living have.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from helpers import counts_of
from subjects import (
    CODED,
    JOB,
    bits_of,
    call_of,
    cells_of,
    every_slot,
    every_store,
    groups_and_tables,
    groups_of,
    holders,
    job_of,
    member_of,
    observe,
    parities_of,
    published_of,
    records_for,
    records_of,
    rows_of_slots,
    some_slots,
    train,
    words_of,
)

from regrow.core import coding
from regrow.core.job import JobSpec
from regrow.store.interface import Store, StoreBuilder

pytestmark = every_store


def trained_cluster(build: StoreBuilder, job: JobSpec, seed: int) -> list[Store]:
    """Some rows changed and were flushed, some changed and were not, some never changed."""
    rng = np.random.default_rng(seed)
    stores = [build(job, server, False) for server in range(job.servers)]
    for step in (1, 2, 3):
        for server, store in enumerate(stores):
            train(store, job, rng, step=step, share=0.2)
            for group in range(len(groups_of(job))):
                if rng.random() < 0.4:
                    flush(stores, job, server, group)
    return stores


def flush(stores: list[Store], job: JobSpec, source: int, group: int) -> None:
    part = stores[source].take_flush(group)
    for holder in holders(job, source, group):
        stores[holder].parity_apply(source, *part)


def homes(job: JobSpec, table: int, server: int, member: int) -> list[int]:
    """The servers of the k + r members of the stripe of which this server has that member."""
    spec, ring = job.tables[table], job.servers // job.rings
    first = server // ring * ring
    return [first + (server - first - member + m) % ring for m in range(spec.k + spec.r)]


# ---- parities


def test_parities_stand_for_what_is_published(build: StoreBuilder) -> None:
    stores = trained_cluster(build, JOB, 1)
    for table, spec in enumerate(JOB.tables):
        if not spec.r:
            continue
        values = [published_of(store, JOB, table).view(np.uint8) for store in stores]
        for first in range(JOB.servers):  # of every stripe whose first member is here
            home = homes(JOB, table, first, 0)
            for block in range(stores[0].blocks(table)):
                data = [values[home[j]][block * spec.k + j] for j in range(spec.k)]
                for q, expected in enumerate(coding.encode(data, r=spec.r)):
                    found = np.empty(stores[0].record_floats(table), np.float32)
                    at = call_of(len(JOB.tables), (table, block))
                    stores[home[spec.k + q]].parity_read(q, *at, found)
                    assert found.tobytes() == expected.tobytes()


def test_holders_know_who_was_touched(build: StoreBuilder) -> None:
    """Of flushed rows they do; both ways to ask say the same, and one of them gives a copy."""
    stores = trained_cluster(build, JOB, 2)
    for source, store in enumerate(stores):
        for group in range(len(groups_of(JOB))):
            flush(stores, JOB, source, group)
        for group, table, member in groups_and_tables(JOB):
            k, blocks = JOB.tables[table].k, store.blocks(table)
            touched = bits_of(store.touched(table), store.slots(table))[member::k]
            for q, holder in enumerate(holders(JOB, source, group)):
                words = stores[holder].parity_touched(source, group, table)
                assert (words.dtype, bits_of(words, blocks).tolist()) == (np.uint64, touched.tolist())
                members = stores[holder].parity_members(table, q, member)
                assert (members.dtype, members.tobytes()) == (np.uint64, words.tobytes())
                words[:] = 0
                assert bits_of(stores[holder].parity_touched(source, group, table), blocks).any() == touched.any()


def test_a_row_applied_twice_is_added_twice(build: StoreBuilder) -> None:
    """The sum is XOR: nothing remains but the bit that says it was touched."""
    source, holder, rng = build(JOB, 0, False), build(JOB, 1, False), np.random.default_rng(3)
    counts, slots = call_of(len(JOB.tables), (0, 2), (0, 2), (3, 0))
    delta = records_for(source, counts, rng)
    delta[20:40] = delta[:20]
    holder.parity_apply(0, counts, slots, delta)
    assert not parities_of(holder, JOB, 0, 0).any()
    assert parities_of(holder, JOB, 3, 0)[0].tobytes() == delta[40:].tobytes()
    assert bits_of(holder.parity_members(0, 0, 2), holder.blocks(0)).tolist()[:2] == [True, False]
    delta[:] = 0  # the memory is ours again
    assert parities_of(holder, JOB, 3, 0)[0].any()


def test_a_new_holder_is_streamed_to(build: StoreBuilder) -> None:
    """Relative published values, applied to empty parities, are the parities; also while rows are pending."""
    stores = trained_cluster(build, JOB, 4)
    new = build(JOB, 3, True)  # parities need no rows
    for source, store in enumerate(stores):
        for group, table, _ in groups_and_tables(JOB):
            if 3 not in holders(JOB, source, group):
                continue
            block = 0
            while block < store.blocks(table):
                slots, block = store.next_touched(table, group, block, 7)
                counts = counts_of(len(JOB.tables), table, len(slots))
                out = np.empty(len(slots) * store.record_floats(table), np.float32)
                store.published(counts, slots, out)
                new.parity_apply(source, counts, slots, out)
    for table, spec in enumerate(JOB.tables):
        for q in range(spec.r):
            assert parities_of(new, JOB, table, q).tobytes() == parities_of(stores[3], JOB, table, q).tobytes()
            for member in range(spec.k):
                before, after = (store.parity_members(table, q, member) for store in (stores[3], new))
                assert not (before & ~after).any()  # a pending row counts, though it adds nothing yet


# ---- coming back


def decode_row(stores: list[Store], job: JobSpec, dead: list[int], lost: int, table: int, slot: int) -> np.ndarray:
    """The relative value of a lost row, from the servers that live."""
    spec = job.tables[table]
    block, member = divmod(slot, spec.k)
    present = {}
    for m, home in enumerate(homes(job, table, lost, member)):
        if home in dead:
            continue
        out = np.empty(stores[0].record_floats(table), np.float32)
        if m < spec.k:
            stores[home].published(*call_of(len(job.tables), (table, block * spec.k + m)), out)
        else:
            stores[home].parity_read(m - spec.k, *call_of(len(job.tables), (table, block)), out)
        present[m] = out.view(np.uint8)
    return coding.decode(present, k=spec.k, r=spec.r)[member].view(np.float32)


def tell_touched(store: Store, stores: list[Store], job: JobSpec, dead: list[int], lost: int) -> None:
    for group, table, _ in groups_and_tables(job):
        living = [holder for holder in holders(job, lost, group) if holder not in dead]
        if living:
            store.know_touched(group, table, stores[living[0]].parity_touched(lost, group, table))


@pytest.mark.parametrize("dead", [[2], [0, 4]])
def test_lost_servers_come_back(build: StoreBuilder, dead: list[int]) -> None:
    """Bit for bit as they were published, of every table that has as many parities as servers are lost."""
    stores = trained_cluster(build, JOB, 5)
    whole = [table for table, spec in enumerate(JOB.tables) if spec.r >= len(dead)]
    for lost in dead:
        expected = [published_of(stores[lost], JOB, table) for table in range(len(JOB.tables))]
        new, rng = build(JOB, lost, True), np.random.default_rng(lost)
        counts, slots = every_slot(new, JOB)
        assert (new.missing_rows(), new.blank_rows()) == (len(slots), 0)
        for group in range(len(groups_of(JOB))):
            assert new.missing_rows(group) == sum(new.blocks(t) for g, t, _ in groups_and_tables(JOB) if g == group)
        tell_touched(new, stores, JOB, dead, lost)
        for share in (0.3, 1.0):
            counts, slots = some_slots(new, JOB, rng, share)
            counts, slots = new.prepare(counts, slots)
            relatives = [
                decode_row(stores, JOB, dead, lost, table, slot)
                if table in whole
                else np.zeros(new.record_floats(table), np.float32)
                for table, slot in cells_of(counts, slots)
            ]
            missing = [cell for cell in cells_of(counts, slots) if cell[0] in whole]
            parts = (counts, slots, np.concatenate(relatives))
            put = new.put(*parts)
            assert put >= len(missing) > 0
            assert new.put(*parts) == 0, "they are not missing any more"
        for table in whole:
            assert published_of(new, JOB, table).tobytes() == expected[table].tobytes()
        assert new.pending_bytes() == 0


# ---- coming back without parities

BARE = len(groups_of(JOB))  # the group of tables 1 (adam, k = 1) and 4 (sgd, k = 2)
TABLES = len(JOB.tables)


def values_of(ids: np.ndarray, fill: float) -> list[np.ndarray]:
    """Rows of table 1: weights, both moments."""
    return [np.full((ids.size, 5), fill + part, np.float32) for part in range(3)]


def test_rows_without_parities_are_loaded_one_by_one(build: StoreBuilder) -> None:
    """Those said to have been touched are missing until the first value of each comes; the others are blank."""
    store, fresh = build(JOB, 1, True), build(JOB, 1, False)
    slots = store.slots(1)
    ids = rows_of_slots(JOB, 1, 1, range(slots)).astype(np.uint32)
    assert store.missing_rows(BARE) == slots + store.slots(4)
    store.know_touched(BARE, 1, words_of(np.arange(slots) < 4))
    store.know_touched(BARE, 4, words_of(np.arange(store.slots(4)) == 3))
    assert (store.missing_rows(BARE), store.blank_rows()) == (5, slots - 4 + store.slots(4) - 1)
    wanted = call_of(TABLES, *((1, slot) for slot in range(6)))
    assert [part.tolist() for part in store.prepare(*wanted)] == [[0, 4, 0, 0, 0, 0], [0, 1, 2, 3]]
    all_rows = np.arange(JOB.tables[1].rows, dtype=np.uint32)  # most of them are on other servers
    assert store.load_rows(1, ids[1:3], values_of(ids[1:3], 7)) == 2
    assert store.load_rows(1, all_rows, values_of(all_rows, 9)) == 2, "not those that are here, nor blank ones"
    records = np.empty((6, store.record_floats(1)), np.float32)
    store.read_records(1, 0, 6, records)
    assert records[:4, 0].tolist() == [9, 7, 7, 9]
    assert records[0, :15].tolist() == [9] * 5 + [10] * 5 + [11] * 5
    assert records[4:].tobytes() == records_of(fresh, 1)[4:6].tobytes()
    assert (store.missing_rows(BARE), store.blank_rows()) == (1, slots - 6 + store.slots(4) - 1)
    assert store.missing_rows() - store.missing_rows(BARE) == sum(store.slots(t) for t in (0, 2, 3, 5))
    assert store.pending_bytes() == 0


def test_rows_with_parities_are_loaded_where_nobody_can_decode_them(build: StoreBuilder) -> None:
    """Once something is known of all groups of the table; what was loaded is published, and waits for no flush."""
    job = job_of(("sgd", 61, 2, 2, 1), ("sgd", 20, 3, 1, 2))
    store = build(job, 1, True)
    blocks, slots = store.blocks(0), store.slots(0)
    near, far = groups_of(job).index((1, 1)), groups_of(job).index((2, 1))  # of members 1 and 0
    ids = np.arange(61, dtype=np.uint32)
    store.know_touched(near, 0, words_of(np.arange(blocks) < 2))
    with pytest.raises(ValueError):
        store.load_rows(0, ids, [np.full((61, 2), 7, np.float32)])
    store.know_touched(far, 0, words_of(np.arange(blocks) == 1))
    assert (store.missing_rows(near), store.missing_rows(far)) == (2, 1)
    assert store.load_rows(0, ids, [np.full((61, 2), 7, np.float32)]) == 3
    assert (store.missing_rows(near), store.missing_rows(far), store.pending_bytes()) == (0, 0, 0)
    loaded = [slot for slot in range(slots) if (slot % 2 and slot // 2 < 2) or slot == 2]
    values = np.empty((len(loaded), store.record_floats(0)), np.float32)
    store.read_records(0, 1, 3, values)
    assert values[:, :2].tolist() == [[7, 7]] * 3
    assert store.load_rows(0, ids, [np.full((61, 2), 9, np.float32)]) == 0, "what is late is old"
    store.know_touched(groups_of(job).index((1, 2)), 1, np.zeros(1, np.uint64))
    store.fill(1 << 20)
    assert store.load_rows(0, ids, [np.full((61, 2), 9, np.float32)]) == 0, "also when all is back"
    touched, end = store.next_touched(0, near, 0, 100)
    assert (touched.tolist(), end) == ([1, 3], blocks)
    published = np.empty(2 * store.record_floats(0), np.float32)
    store.published(*call_of(2, (0, 1), (0, 3)), published)
    assert published.any(), "a holder is told of them when they are streamed"


def test_a_void_parity_stands_for_nothing(build: StoreBuilder) -> None:
    """It is zeros of untouched members, like that of a new server; other parities stay as they are."""
    job = job_of(("sgd", 61, 2, 2, 2), ("sgd", 20, 3, 1, 1))
    store = build(job, 2, False)
    rng = np.random.default_rng(3)
    for source, slots in ((1, [1, 3]), (0, [0, 2, 3])):  # member 1 of S1 has q 0 here, of S0 q 1, as member 0 has q 0
        counts, names = call_of(2, *((0, slot) for slot in slots))
        store.parity_apply(source, counts, names, records_for(store, counts, rng))
    before = [store.parity_members(0, q, member).tolist() for q in range(2) for member in range(2)]
    all_blocks = np.arange(store.blocks(0), dtype=np.uint32)
    counts = np.array([all_blocks.size, 0], np.int32)
    parities = [np.empty(all_blocks.size * store.record_floats(0), np.float32) for _ in range(4)]
    for q in range(2):
        store.parity_read(q, counts, all_blocks, parities[q])
    assert parities[0].any() and parities[1].any()
    store.parity_void(0, 0)
    for q in range(2):
        store.parity_read(q, counts, all_blocks, parities[2 + q])
    assert not parities[2].any()
    assert parities[3].tobytes() == parities[1].tobytes()
    after = [store.parity_members(0, q, member).tolist() for q in range(2) for member in range(2)]
    assert after == [[0], [0], *before[2:]]
    with pytest.raises(IndexError):
        store.parity_void(0, 2)


def test_what_is_late_is_old(build: StoreBuilder) -> None:
    """Also when the whole table, or the whole store, has come back: a value that comes then was read too late."""
    bare = job_of(("adam", 33, 5, 1, 0), ("sgd", 40, 2, 1, 0))
    store = build(bare, 1, True)
    ids = np.arange(33, dtype=np.uint32)
    store.know_touched(0, 0, words_of(np.arange(store.slots(0)) == 2))
    assert store.load_rows(0, ids, values_of(ids, 7)) == 1
    store.know_touched(0, 1, np.zeros(1, np.uint64))
    for rows_max in (1, 1 << 20):
        store.update(*call_of(2, (0, 2)), np.ones(5, np.float32), 1)
        record = np.empty((1, store.record_floats(0)), np.float32)
        store.read_records(0, 2, 1, record)
        assert store.load_rows(0, ids, values_of(ids, 9)) == 0
        after = np.empty_like(record)
        store.read_records(0, 2, 1, after)
        assert record.tobytes() == after.tobytes()
        store.fill(rows_max)
    assert (store.missing_rows(), store.blank_rows()) == (0, 0)
    others = np.arange(40, dtype=np.uint32)
    assert store.load_rows(1, others, [np.ones((40, 2), np.float32)]) == 8, "none was to come: a change as any other"


def test_a_table_is_not_loaded_before_it_is_known_what_is_to_come(build: StoreBuilder) -> None:
    store = build(JOB, 1, True)
    ids = rows_of_slots(JOB, 1, 1, range(2)).astype(np.uint32)
    before = observe(store, JOB)
    for wrong in (
        lambda: store.load_rows(1, ids, values_of(ids, 1)),
        lambda: store.load_rows(0, np.zeros(1, np.uint32), [np.ones((1, n), np.float32) for n in (16, 1)]),
        lambda: store.parity_void(1, 0),
        lambda: store.know_touched(BARE, 0, np.zeros(2, np.uint64)),  # it has parities
        lambda: store.know_touched(0, 1, np.zeros(1, np.uint64)),
        lambda: store.know_touched(BARE, 1, np.zeros(2, np.uint64)),
        lambda: store.know_touched(BARE, 4, np.array([1 << store.slots(4)], np.uint64)),
    ):
        with pytest.raises(ValueError):
            wrong()
    with pytest.raises(IndexError):
        store.missing_rows(BARE + 1)
    with pytest.raises(IndexError):
        build(JOB, 1, False).load_rows(1, ids, values_of(ids, 1), clean_to=0)
    assert observe(store, JOB) == before
    with pytest.raises(IndexError):
        build(CODED, 1, True).missing_rows(len(groups_of(CODED)))


@pytest.mark.parametrize("early", [False, True])
def test_loaded_rows_are_dirty_but_to_whom_they_came_from(build: StoreBuilder, early: bool) -> None:
    """Tenants may be there before it is known what is to come, or only after."""
    job = job_of(("adam", 33, 5, 1, 0))
    store = build(job, 1, True)
    tenants = [store.add_tenant() for _ in range(3)] if early else []
    slots = store.slots(0)
    ids = rows_of_slots(job, 1, 0, range(slots)).astype(np.uint32)
    store.know_touched(0, 0, words_of(np.arange(slots) < 5))
    tenants = tenants or [store.add_tenant() for _ in range(3)]
    assert [store.dirty_rows(tenant) for tenant in tenants] == [0, 0, 0]
    with pytest.raises(ValueError):
        store.begin_capture(1, False)
    assert store.load_rows(0, ids[:3], values_of(ids[:3], 1), clean_to=1) == 3
    assert store.load_rows(0, ids[:5], values_of(ids[:5], 2)) == 2
    assert [store.dirty_rows(tenant) for tenant in tenants] == [5, 2, 5]
    store.update(*call_of(1, (0, 0)), np.ones(5, np.float32), 1)
    assert [store.dirty_rows(tenant) for tenant in tenants] == [5, 3, 5]
    for tenant, full, rows in [(1, False, {0, 3, 4}), (1, True, {0, 1, 2, 3, 4}), (0, False, {0, 1, 2, 3, 4})]:
        store.begin_capture(tenant, full)
        ((_, captured, _),) = store.capture_chunk(1 << 20)
        assert set(captured.tolist()) == {int(ids[slot]) for slot in rows}
        store.end_capture(True)


def test_a_store_that_has_come_back_is_like_any_other(build: StoreBuilder) -> None:
    """Said again, the last word of who was touched counts; blank rows come back by themselves, others are put."""
    normal, new, rng = build(CODED, 1, False), build(CODED, 1, True), np.random.default_rng(6)
    for group, table, _ in groups_and_tables(CODED):
        touched = rng.random(new.blocks(table)) < 0.5
        for said in (touched, ~touched, touched):
            new.know_touched(group, table, words_of(said))
    counts, slots = every_slot(new, CODED)
    blank, missing = new.blank_rows(), new.missing_rows()
    assert blank + missing == len(slots)
    assert missing == sum(int(bits_of(new.touched(t), new.slots(t)).sum()) for t in range(len(CODED.tables)))
    filled = []
    while rows := new.fill(7):
        filled.append(rows)
    assert (sum(filled), set(filled[:-1]), new.blank_rows()) == (blank, {7}, 0)
    wanted = new.prepare(counts, slots)
    relatives = records_for(new, wanted[0], rng)
    assert new.put(*wanted, relatives) == missing
    assert [part.tolist() for part in new.prepare(counts, slots)] == [[0] * len(CODED.tables), []]
    write_relatives(normal, *wanted, relatives)
    for group in range(len(groups_of(CODED))):
        normal.take_flush(group)  # at the other one it never was pending
    assert observe(new, CODED) == observe(normal, CODED)
    for store in (normal, new):
        train(store, CODED, np.random.default_rng(7))
        store.load_rows(3, np.arange(11, dtype=np.uint32), [np.ones((11, 3), np.float32)])
        store.know_touched(0, 3, np.zeros(1, np.uint64))  # too late to matter
    assert observe(new, CODED) == observe(normal, CODED)


def write_relatives(store: Store, counts: Any, slots: Any, relatives: np.ndarray) -> None:
    at = 0
    for table, slot in cells_of(counts, slots):
        record = records_of(store, table)[slot]
        record.view(np.uint32)[:] ^= relatives[at : at + len(record)].view(np.uint32)
        store.write_records(table, slot, 1, record)
        at += len(record)


def test_rows_come_back_in_any_order(build: StoreBuilder) -> None:
    """Values of rows of which nothing is known yet, that are blank, or that are there, are passed over."""
    store = build(CODED, 0, True)
    group = next(group for group in range(len(groups_of(CODED))) if member_of(CODED, 0, group) == 0)
    counts, slots = call_of(len(CODED.tables), (0, 0), (0, 3), (0, 6))
    relatives = np.ones(60, np.float32)
    assert store.put(counts, slots, relatives) == 0
    store.know_touched(group, 0, np.array([0b011], np.uint64))
    assert [part.tolist() for part in store.prepare(counts, slots)] == [[2, 0, 0, 0], [0, 3]]
    assert store.put(*call_of(len(CODED.tables), (0, 3), (0, 6)), relatives[:40]) == 1
    assert [part.tolist() for part in store.prepare(counts, slots)] == [[1, 0, 0, 0], [0]]
    store.update(*call_of(len(CODED.tables), (0, 3), (0, 6)), np.ones(32, np.float32), 1)
    one = np.empty(20, np.float32)
    store.read_records(0, 3, 1, one)
    assert store.put(counts, slots, relatives * 2) == 1, "what is newer stays"
    after = np.empty(20, np.float32)
    store.read_records(0, 3, 1, after)
    assert one.tobytes() == after.tobytes()
    assert store.pending_rows(group) == 2


@pytest.mark.parametrize(
    "method", ["gather", "update", "assign_untouched", "read_records", "write_records", "published"]
)
def test_rows_that_are_not_there_are_refused(build: StoreBuilder, method: str) -> None:
    """Row 0 is there, row 3 is not; nothing may happen to row 0 either."""
    store = build(CODED, 0, True)
    group = next(group for group in range(len(groups_of(CODED))) if member_of(CODED, 0, group) == 0)
    store.know_touched(group, 0, np.array([2], np.uint64))
    counts, slots = call_of(len(CODED.tables), (0, 0), (0, 3))
    assert [part.tolist() for part in store.prepare(counts, slots)] == [[1, 0, 0, 0], [3]]
    before = observe(store, CODED)
    arguments: Any = {
        "read_records": (0, 0, 4, np.ones(80, np.float32)),
        "write_records": (0, 0, 4, np.ones(80, np.float32)),
        "published": (counts, slots, np.ones(40, np.float32)),
        "update": (counts, slots, np.ones(32, np.float32), 1),
    }.get(method, (counts, slots, np.ones(32, np.float32)))
    with pytest.raises(ValueError):
        getattr(store, method)(*arguments)
    assert (arguments[3 if "records" in method else 2] == 1).all()
    assert observe(store, CODED) == before


def test_blank_rows_have_published_nothing(build: StoreBuilder) -> None:
    store = build(CODED, 0, True)
    group = next(group for group in range(len(groups_of(CODED))) if member_of(CODED, 0, group) == 0)
    store.know_touched(group, 0, np.zeros(1, np.uint64))
    out = np.ones(20, np.float32)
    store.published(*call_of(len(CODED.tables), (0, 0)), out)
    assert not out.any()
    assert store.blank_rows() == store.blocks(0), "and they are blank still"
