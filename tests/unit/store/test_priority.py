"""Goal: a capture that may not take all rows takes those that the tenant's priority says, leaves the others dirty, and
the number of updates that no capture has is exact, whatever fails or is updated meanwhile: the part of
`regrow.store.interface` that is about priorities.

Method: the tests up to "at random" run on every store of `subjects.SUBJECTS`, with a table small enough to say who goes
first. Then the store in memory and the one made of dictionaries get the same random calls, for each kind, in every mode
of the kernels; and a large table is compared with a sort of all its rows.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from dict_store import DictStore
from kernel_modes import MODES, Mode, running
from subjects import JOB, call_of, every_store, job_of, observe, some_slots, weights_for, words_of

from regrow.store.interface import Store, StoreBuilder
from regrow.store.memory import MemoryStore

KINDS = ("mfu", "ssu", "scar")
ROWS = 40
ONE = job_of(("sgd", ROWS, 2, 1, 0), ("sgd", 10, 1, 1, 0), servers=1)  # slots are rows


def make(build: StoreBuilder, kind: str, share: float = 0.1, **options: Any) -> Store:
    """With one tenant, of which table 0 has a priority: four rows, unless said."""
    store = build(ONE, 0, False)
    assert store.add_tenant() == 0
    store.set_priority(0, kind, [0], share, options.get("seed", 1), options.get("period", 1))
    return store


def push(store: Store, *slots: int, times: int = 1, size: float = 1.0) -> None:
    """Updates rows of table 0: each loses 0.1 * size per weight, and time."""
    counts, named = call_of(2, *((0, slot) for slot in slots))
    for _ in range(times):
        store.update(counts, named, np.full(2 * len(slots), size, np.float32), 1)
        store.note_updates(counts, named)


def capture(store: Store, *, full: bool = False, durable: bool = True, tenant: int = 0) -> list[int]:
    """The rows of table 0 in a capture, all of it."""
    store.begin_capture(tenant, full)
    return finish(store, durable=durable)


def finish(store: Store, *, durable: bool = True) -> list[int]:
    rows = [ids.tolist() for table, ids, _ in store.capture_chunk(1 << 20) if table == 0]
    store.end_capture(durable)
    return rows[0] if rows else []


# ---- whatever the kind


@every_store
@pytest.mark.parametrize("kind", [*KINDS, "none"])
def test_what_fits_is_captured_whole(build: StoreBuilder, kind: str) -> None:
    store = make(build, kind)
    push(store, 3, 5, 7, 30, times=3)
    assert (store.updates_noted(), store.updates_uncaptured(0)) == (12, 12)
    store.begin_capture(0, False)
    assert (store.capture_skipped(), store.updates_uncaptured(0)) == (0, 0)
    push(store, 5)
    assert store.updates_uncaptured(0) == 1
    assert finish(store) == [3, 5, 7, 30]
    assert (store.dirty_rows(0), store.updates_uncaptured(0), store.updates_noted()) == (1, 1, 13)


@every_store
@pytest.mark.parametrize("kind", KINDS)
def test_only_some_tables_have_a_priority(build: StoreBuilder, kind: str) -> None:
    store = make(build, kind)
    push(store, *range(10))
    store.update(*call_of(2, *((1, slot) for slot in range(10))), np.ones(10, np.float32), 1)
    store.note_updates(*call_of(2, *((1, slot) for slot in range(10))))
    other = store.add_tenant()
    store.begin_capture(0, False)
    assert (store.capture_left(), store.capture_skipped(), store.updates_uncaptured(0)) == (14, 6, 6)
    assert store.dirty_rows(0) == 6
    assert (store.dirty_rows(other), store.updates_uncaptured(other)) == (20, 0), "noted before there was the tenant"
    store.capture_chunk(1 << 20)
    store.end_capture(True)
    store.begin_capture(other, False)
    assert (store.capture_left(), store.capture_skipped()) == (20, 0)


@every_store
@pytest.mark.parametrize("kind", KINDS)
def test_full_is_full(build: StoreBuilder, kind: str) -> None:
    store = make(build, kind)
    push(store, *range(20))
    assert capture(store, full=True) == list(range(20))
    assert (store.dirty_rows(0), store.capture_skipped(), store.updates_uncaptured(0)) == (0, 0, 0)


@every_store
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("share", [0.001, 0.1, 0.33])
def test_in_the_end_every_row_is_captured(build: StoreBuilder, kind: str, share: float) -> None:
    """Once updates stop, also of rows that were changed and never noted. The share is at least one row."""
    store, rows_max = make(build, kind, share), max(1, int(share * ROWS))
    push(store, *range(0, 30), times=2)
    push(store, *range(5, 10), times=3)
    store.write_records(0, 30, 10, np.ones((10, store.record_floats(0)), np.float32))
    seen: list[int] = []
    while dirty := store.dirty_rows(0):
        rows = capture(store)
        assert len(rows) == min(rows_max, dirty)
        assert store.capture_skipped() == dirty - len(rows)
        seen += rows
    assert sorted(seen) == list(range(ROWS))
    assert store.updates_uncaptured(0) == 0


@every_store
@pytest.mark.parametrize("kind", KINDS)
def test_rows_take_turns(build: StoreBuilder, kind: str) -> None:
    """All are alike and updated again and again: each is captured as often as any other."""
    store, times = make(build, kind, period=1 << 20), np.zeros(ROWS, int)
    for _ in range(30):
        store.write_records(0, 0, ROWS, np.full((ROWS, store.record_floats(0)), 1, np.float32))
        times[capture(store)] += 1
    assert times.min() >= 2, "of scar, the first rounds see how far rows are from where they began"
    assert kind == "scar" or times.tolist() == [3] * ROWS


@every_store
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("taken", [False, True])
def test_a_capture_that_failed_never_was(build: StoreBuilder, kind: str, taken: bool) -> None:
    store = make(build, kind)
    push(store, *range(10), times=100)
    push(store, 1, 2, times=300)
    store.begin_capture(0, False)
    held = 1600 - store.updates_uncaptured(0)
    assert (store.capture_left(), held) == (4, 1000)
    push(store, 1, 3, times=201)
    assert store.updates_uncaptured(0) == 1600 - held + 402
    if taken:
        store.capture_chunk(1 << 20)
    store.end_capture(False)
    assert (store.updates_uncaptured(0), store.updates_noted(), store.dirty_rows(0)) == (2002, 2002, 10)
    left = 2002
    for _ in range(3):
        capture(store)
        assert store.updates_uncaptured(0) < left
        left = store.updates_uncaptured(0)
    assert left == 0


@every_store
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("full", [False, True])
def test_what_happens_while_rows_are_chosen_comes_after(build: StoreBuilder, kind: str, full: bool) -> None:
    """A capture is of its instant: neither the rows it has, nor their values, nor counts depend on how long it takes to
    choose, or on what is pushed meanwhile."""

    def run(slices: bool) -> list[Any]:
        store = make(build, kind)
        for slot in range(12):
            push(store, slot, times=slot + 1, size=slot + 1)
        store.begin_capture(0, full)
        more = slices
        while more:
            more = store.choose_captured(1)
            push(store, 0, 30, times=50, size=100)
        assert store.updates_uncaptured(0) - store.updates_skipped() == store.updates_noted() - 78
        return [store.capture_skipped(), store.updates_skipped(), read_rows(store)]

    assert run(True) == run(False)


@every_store
def test_a_chunk_is_of_the_instant_however_long_it_takes(build: StoreBuilder) -> None:
    def run(slices: bool) -> list[Any]:
        store = make(build, "none")
        push(store, *range(30))
        store.begin_capture(0, False)
        found = []
        while store.capture_left():
            left = store.capture_left()
            while slices and store.prepare_chunk(120, False, 1):
                push(store, *range(40))
                assert store.capture_left() == left, "nothing was given yet"
            found.append([(t, ids.tolist(), [p.tolist() for p in parts]) for t, ids, parts in store.capture_chunk(120)])
        store.end_capture(True)
        return found

    assert run(True) == run(False)
    assert len(run(True)) > 2


def read_rows(store: Store) -> list[Any]:
    """All that a capture has, and then what is left to capture."""
    rows = [(t, ids.tolist(), [p.tolist() for p in parts]) for t, ids, parts in store.capture_chunk(1 << 20)]
    store.end_capture(True)
    return rows


# ---- who goes first


@every_store
def test_mfu_takes_what_was_updated_most(build: StoreBuilder) -> None:
    """Also beyond what a byte counts; of equals the next in turn."""
    store = make(build, "mfu")
    for slot, times in [(3, 2), (4, 255), (5, 256), (6, 257), (7, 511), (8, 512), (9, 255), (2, 1)]:
        push(store, slot, times=times)
    counts, slots = call_of(2, (0, 20), (0, 21))
    push(store, 20, 21)
    for _ in range(700):
        store.note_updates(counts, slots)
    push(store, 21)
    updates = 2 + 255 + 256 + 257 + 511 + 512 + 255 + 1 + 2 * 701 + 1
    assert store.updates_uncaptured(0) == store.updates_noted() == updates
    store.begin_capture(0, False)
    assert store.updates_uncaptured(0) == 2 + 255 + 256 + 257 + 255 + 1
    assert finish(store, durable=False) == [7, 8, 20, 21]
    assert store.updates_uncaptured(0) == updates
    assert capture(store) == [7, 8, 20, 21]
    assert capture(store) == [4, 5, 6, 9]
    assert store.updates_uncaptured(0) == 3
    push(store, 21)
    assert capture(store) == [2, 3, 21], "what was captured begins at zero"


def test_some_of_many_that_were_updated_very_often() -> None:
    """Beyond what the histogram has places for."""
    store = make(MemoryStore, "mfu", 0.05)
    for slot in range(4):
        push(store, slot)
        for _ in range(66_000 + slot % 3):
            store.note_updates(*call_of(2, (0, slot)))
    assert capture(store) == [1, 2]
    assert capture(store) == [0, 3]


@every_store
def test_ssu_takes_what_some_pushes_named(build: StoreBuilder) -> None:
    """Every second push counts. The list has four places; what is on it goes first, then others in turn."""
    store = make(build, "ssu", period=2)
    push(store, *range(10, 20), times=1)
    push(store, 17, 12, times=1)
    push(store, *range(30, 36), times=1)
    push(store, 12, 31)
    assert capture(store) == [10, 12, 17, 31]
    assert capture(store) == [11, 13, 14, 15], "the list is empty, and the turn is at 11"
    assert capture(store, durable=False) == [16, 18, 19, 30]
    assert capture(store) == [32, 33, 34, 35], "the turn goes on; those come again"
    assert capture(store) == [16, 18, 19, 30]


@every_store
def test_a_list_comes_back_if_its_capture_failed(build: StoreBuilder) -> None:
    store = make(build, "ssu")
    store.write_records(0, 0, 20, np.ones((20, store.record_floats(0)), np.float32))
    push(store, 19, 11, 13)
    store.begin_capture(0, False)
    push(store, 17, 13)
    finish(store, durable=False)
    assert capture(store) == [11, 13, 17, 19]


@every_store
def test_chance_is_a_function_of_the_pushes(build: StoreBuilder) -> None:
    """A full list gives a place to each new row; two stores told the same agree, and another seed chooses others."""

    def rows(seed: int) -> list[int]:
        store = make(build, "ssu", seed=seed)
        push(store, *range(4))
        push(store, 0, 23, 2, 22, 21)
        return capture(store)

    found = {seed: rows(seed) for seed in range(8)}
    assert found == {seed: rows(seed) for seed in range(8)}
    assert all(21 in rows for rows in found.values()), "the newest is there"
    assert len({tuple(rows) for rows in found.values()}) > 3
    assert {row for rows in found.values() for row in rows} == {0, 1, 2, 3, 21, 22, 23}


@every_store
def test_scar_takes_what_is_farthest_from_its_copy(build: StoreBuilder) -> None:
    """The copy is of the instant a capture began at; rows of a capture that failed go first."""
    store = make(build, "scar")
    for slot in range(10, 20):
        push(store, slot, size=slot)
    push(store, 13, size=100)
    assert capture(store) == [13, 17, 18, 19]
    push(store, 13, size=0.25)
    push(store, 19, size=50)
    store.begin_capture(0, False)
    push(store, 19, size=64)
    assert finish(store) == [14, 15, 16, 19]
    assert capture(store, durable=False) == [10, 11, 12, 19]
    push(store, 13, size=1000)
    assert capture(store) == [10, 11, 12, 19]
    assert capture(store) == [13]


@every_store
def test_scar_takes_what_is_no_number(build: StoreBuilder) -> None:
    store = make(build, "scar", 0.05)
    push(store, *range(10))
    push(store, 4, size=np.nan)
    push(store, 6, size=np.inf)
    assert capture(store) == [4, 6]


@every_store
def test_scar_knows_what_was_loaded_from_its_saves(build: StoreBuilder) -> None:
    store = build(ONE, 0, True)
    store.add_tenant()
    store.set_priority(0, "scar", [0], 0.05, 1, 1)
    for table in (0, 1):
        store.know_touched(0, table, words_of(np.arange(store.slots(table)) < (4 if table == 0 else 0)))
    ids = np.arange(4, dtype=np.uint32)
    assert store.load_rows(0, ids[:3], [np.full((3, 2), 7, np.float32)], clean_to=0) == 3
    assert store.load_rows(0, ids, [np.full((4, 2), 9, np.float32)]) == 1
    assert store.prepare(*call_of(2, (0, 4)))[1].size == 0
    push(store, 0, 2, size=1)
    push(store, 4, size=10)
    push(store, 1, size=5)
    assert store.dirty_rows(0) == 5
    assert capture(store) == [3, 4], "row 3 is far from where it began, the others from what was loaded"
    assert capture(store, full=True) == [0, 1, 2, 3, 4]


# ---- sizes, and what is refused


@every_store
def test_a_replacement_goes_on_counting(build: StoreBuilder) -> None:
    store = make(build, "mfu")
    store.set_updates_noted(1 << 40)
    push(store, 1, 2)
    assert (store.updates_noted(), store.updates_uncaptured(0)) == ((1 << 40) + 2, 2)


def test_memory_is_what_was_said() -> None:
    """Per row: a byte for counts; for ssu half a byte for the list and a bit; for scar the weights."""
    rows, dim = 1 << 20, 16
    job = job_of(("rowwise_adagrad", rows, dim, 1, 0), servers=1)
    bytes_per_row = {"none": 0.0, "mfu": 1.0, "ssu": 1.0 + 0.5 + 0.125, "scar": 1.0 + 4 * dim}
    for kind, expected in bytes_per_row.items():
        store = MemoryStore(job, 0)
        store.add_tenant()
        assert store.priority_bytes() == 0
        store.set_priority(0, kind, [0], 0.125, 1, 2)
        assert store.priority_bytes() / rows == pytest.approx(expected, abs=0.005)
        slots = np.arange(1000, dtype=np.uint32)
        for _ in range(256):
            store.note_updates(np.array([1000], np.int32), slots)
        assert (store.priority_bytes() - expected * rows) / 1000 < 25, "rows that were noted very often"


@every_store
@pytest.mark.parametrize(
    ("method", "arguments", "error"),
    [
        ("set_priority", (1, "mfu", [0], 0.1, 1, 1), IndexError),
        ("set_priority", (0, "mfu", [0, 2], 0.1, 1, 1), IndexError),
        ("set_priority", (0, "most", [0], 0.1, 1, 1), ValueError),
        ("set_priority", (0, "mfu", [0], 0.0, 1, 1), ValueError),
        ("set_priority", (0, "mfu", [0], 1.001, 1, 1), ValueError),
        ("set_priority", (0, "mfu", [0], float("nan"), 1, 1), ValueError),
        ("set_priority", (0, "ssu", [0], 0.1, 1, 0), ValueError),
        ("set_priority", (0, "ssu", [0], 0.1, 1, 1), ValueError),  # updates are uncaptured
        ("note_updates", (np.ones(1, np.int32), np.zeros(1, np.uint32)), ValueError),
        ("note_updates", (np.array([1, 1], np.int32), np.array([39, 10], np.uint32)), IndexError),
        ("note_updates", (np.array([1, 0], np.int64), np.zeros(1, np.uint32)), ValueError),
        ("updates_uncaptured", (1,), IndexError),
    ],
)
def test_a_wrong_call_changes_nothing(
    build: StoreBuilder, method: str, arguments: tuple[Any, ...], error: type[Exception]
) -> None:
    store = make(build, "mfu")
    push(store, *range(10), times=2)
    before = observe(store, ONE, tenants=1)
    with pytest.raises(error):
        getattr(store, method)(*arguments)
    assert observe(store, ONE, tenants=1) == before


@every_store
def test_priorities_change_between_captures(build: StoreBuilder) -> None:
    store = make(build, "mfu")
    push(store, 1)
    store.begin_capture(0, False)
    with pytest.raises(ValueError):
        store.set_priority(0, "ssu", [0], 0.1, 1, 1)
    finish(store)
    store.set_priority(0, "none", [], 0.1, 1, 1)
    push(store, *range(20))
    assert capture(store) == list(range(20))


# ---- at random

RANDOM = job_of(*((t.optimizer.kind, t.rows, t.dim, t.k, t.r) for t in JOB.tables[:3]), ("sgd", 300, 3, 1, 0))


@pytest.mark.parametrize("mode", MODES, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_both_stores_choose_the_same(kind: str, mode: Mode) -> None:
    """Pushes with many repeated rows, captures that end either way, full ones, another tenant in between."""
    rng = np.random.default_rng(KINDS.index(kind))
    stores = [MemoryStore(RANDOM, 1), DictStore(RANDOM, 1)]
    skipped = 0
    with running(mode):
        for store in stores:
            assert [store.add_tenant(), store.add_tenant()] == [0, 1]
            store.set_priority(1, kind, [0, 2, 3], 0.15, 5, 3)
        hot = some_slots(stores[0], RANDOM, rng, 0.3)
        for step in range(1, 70):
            tenant, full = int(rng.integers(4) > 0), rng.random() < 0.1
            _push_both(stores, rng, hot if rng.random() < 0.7 else some_slots(stores[0], RANDOM, rng, 0.2), step)
            if step % 2:
                continue
            for store in stores:
                store.begin_capture(tenant, full)
            for _ in range(int(rng.integers(40))):  # while pushes go on
                stores[0].choose_captured(int(rng.integers(1, 100)))
                if rng.random() < 0.2:
                    _push_both(stores, rng, some_slots(stores[0], RANDOM, rng, 0.1), step)
            skipped += stores[0].capture_skipped()
            for _ in range(int(rng.integers(3))):
                _push_both(stores, rng, some_slots(stores[0], RANDOM, rng, 0.1), step)
                for _ in range(int(rng.integers(3))):
                    stores[0].prepare_chunk(bytes_max := int(rng.integers(1, 2000)), False, 100)
                    stores[1].prepare_chunk(bytes_max, False, 100)
                    _push_both(stores, rng, some_slots(stores[0], RANDOM, rng, 0.1), step)
                _same_chunk(stores, int(rng.integers(1, 2000)))
            durable = rng.random() < 0.6
            while durable and stores[0].capture_left():
                _same_chunk(stores, 5000)
            for store in stores:
                store.end_capture(durable)
            states = [observe(store, RANDOM, tenants=2) for store in stores]
            assert states[0] == states[1], step
        assert skipped > 500
        while stores[0].dirty_rows(1):
            for store in stores:
                store.begin_capture(1, False)
            _same_chunk(stores, 1 << 20)
            for store in stores:
                store.end_capture(True)
        assert [store.updates_uncaptured(1) for store in stores] == [0, 0]


def _push_both(stores: list[Any], rng: np.random.Generator, call: tuple[np.ndarray, np.ndarray], step: int) -> None:
    counts, slots = call
    grads = weights_for(RANDOM, counts, rng)
    times = int(rng.integers(1, 60))
    for store in stores:
        store.update(counts, slots, grads, step)
        for _ in range(times):
            store.note_updates(counts, slots)


def _same_chunk(stores: list[Any], bytes_max: int) -> None:
    chunks = [store.capture_chunk(bytes_max) for store in stores]
    found = [[(t, ids.tolist(), [part.tobytes() for part in parts]) for t, ids, parts in chunk] for chunk in chunks]
    assert found[0] == found[1]


# ---- a table large enough that several threads work on it


@pytest.mark.parametrize("mode", MODES, ids=str)
@pytest.mark.parametrize("kind", ["mfu", "scar"])
def test_large_tables_as_if_sorted(kind: str, mode: Mode) -> None:
    rows, rng = 400_000, np.random.default_rng(4)
    job = job_of(("sgd", rows, 2, 1, 0), servers=1)
    with running(mode):
        store = MemoryStore(job, 0)
        store.add_tenant()
        store.set_priority(0, kind, [0], 0.1, 1, 1)
        ranks = np.zeros(rows, np.int64)
        initial = np.empty((rows, store.record_floats(0)), np.float32)
        store.read_records(0, 0, rows, initial)
        for _ in range(40):
            slots = np.unique((rows * rng.random(60_000) ** 3).astype(np.uint32))
            counts = np.array([slots.size], np.int32)
            store.update(counts, slots, rng.standard_normal(2 * slots.size).astype(np.float32), 1)
            for _ in range(11):
                store.note_updates(counts, slots)
            ranks[slots] += 11
        dirty = np.flatnonzero(ranks)
        assert store.updates_uncaptured(0) == ranks.sum() > 255 * 1000
        assert ranks.max() > 255
        if kind == "scar":
            now = np.empty_like(initial)
            store.read_records(0, 0, rows, now)
            changes = now[:, :2].astype(np.float64) - initial[:, :2].astype(np.float64)
            distance = (changes[:, 0] * changes[:, 0] + changes[:, 1] * changes[:, 1]).astype(np.float32)
            ranks_by = distance[dirty]
        else:
            ranks_by = ranks[dirty]
        expected = np.sort(dirty[np.argsort(-ranks_by, kind="stable")[: rows // 10]])
        store.begin_capture(0, False)
        ((_, ids, _),) = store.capture_chunk(1 << 30)
        assert ids.tolist() == expected.tolist()
        assert store.capture_skipped() == dirty.size - rows // 10
        assert store.updates_uncaptured(0) == ranks.sum() - ranks[expected].sum()
        store.end_capture(False)
        assert store.updates_uncaptured(0) == ranks.sum()
