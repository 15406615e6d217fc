"""The stores that have to pass the conformance tests, the jobs they are asked to hold, and what can be seen of them.

A new store is one more line in SUBJECTS.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from dict_store import DictStore
from helpers import counts_of, job

from regrow.core.job import JobSpec, OptimizerSpec, TableSpec
from regrow.store.interface import Store, StoreBuilder
from regrow.store.memory import MemoryStore

SUBJECTS: dict[str, StoreBuilder] = {"InMemory": MemoryStore, "dictionaries": DictStore}
every_store = pytest.mark.parametrize("build", list(SUBJECTS.values()), ids=list(SUBJECTS))


def job_of(*tables: tuple[Any, int, int, int, int], servers: int = 5, rings: int = 1) -> JobSpec:
    """Tables are (optimizer, rows, dim, k, r)."""
    specs = [
        TableSpec(
            name=f"t{index}",
            rows=rows,
            dim=dim,
            k=k,
            r=r,
            init_bound=0.25,
            optimizer=OptimizerSpec(kind=kind, learning_rate=0.1, weight_decay=0.125 * (index % 2)),
        )
        for index, (kind, rows, dim, k, r) in enumerate(tables)
    ]
    return job(*specs, servers=servers, rings=rings, seed=11)


# Every optimizer, several k, tables with one parity, with two and with none; slots within a word of bits and over
# several; and all of them have holes.
JOB = job_of(
    ("rowwise_adagrad", 401, 16, 3, 2),
    ("adam", 33, 5, 1, 0),
    ("adagrad", 171, 7, 2, 2),
    ("momentum", 11, 3, 1, 1),
    ("sgd", 61, 1, 2, 0),
    ("partial_rowwise_adam", 203, 4, 2, 1),
)
# The same with parities for all, so that a store can come back whole.
CODED = job_of(
    ("rowwise_adagrad", 401, 16, 3, 2),
    ("adam", 33, 5, 1, 1),
    ("adagrad", 171, 7, 2, 2),
    ("sgd", 11, 3, 1, 1),
)
Cell = tuple[int, int]  # table, slot


def groups_of(job: JobSpec) -> list[tuple[int, int]]:
    """(distance, r) of each coding group: the order is part of the interface."""
    return sorted({(t.k - j, t.r) for t in job.tables if t.r for j in range(t.k)})


def member_of(job: JobSpec, table: int, group: int) -> int | None:
    distance, r = groups_of(job)[group]
    spec = job.tables[table]
    return spec.k - distance if spec.r == r and distance <= spec.k else None


def groups_and_tables(job: JobSpec) -> list[tuple[int, int, int]]:
    """Every (group, table, member) that there is."""
    pairs = [(group, table) for group in range(len(groups_of(job))) for table in range(len(job.tables))]
    found = [(group, table, member_of(job, table, group)) for group, table in pairs]
    return [(group, table, member) for group, table, member in found if member is not None]


def holders(job: JobSpec, source: int, group: int) -> list[int]:
    distance, r = groups_of(job)[group]
    ring = job.servers // job.rings
    return [source // ring * ring + (source + distance + q) % ring for q in range(r)]


def rows_of_slots(job: JobSpec, server: int, table: int, slots: Any) -> np.ndarray:
    return job.layout(table).row_of(np.full(len(slots), server), slots, table=table)


# ---- calls


def call_of(tables: int, *cells: Cell) -> tuple[np.ndarray, np.ndarray]:
    """(counts, slots) of these cells, which are in the order of tables."""
    counts = np.zeros(tables, np.int32)
    for table, _ in cells:
        counts[table] += 1
    return counts, np.array([slot for _, slot in cells], np.uint32)


def every_slot(store: Store, job: JobSpec) -> tuple[np.ndarray, np.ndarray]:
    sizes = [store.slots(table) for table in range(len(job.tables))]
    return np.array(sizes, np.int32), np.concatenate([np.arange(n, dtype=np.uint32) for n in sizes])


def some_slots(store: Store, job: JobSpec, rng: np.random.Generator, share: float) -> tuple[np.ndarray, np.ndarray]:
    """Distinct slots of every table, in any order; none of some."""
    sizes = [store.slots(table) for table in range(len(job.tables))]
    slots = [rng.permutation(n)[: rng.binomial(n, share)] for n in sizes]
    return np.array([len(part) for part in slots], np.int32), np.concatenate(slots).astype(np.uint32)


def weights_for(job: JobSpec, counts: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    return rng.standard_normal(int(counts @ [table.dim for table in job.tables])).astype(np.float32)


def records_for(store: Store, counts: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Not negative: optimizers take the roots of what they have in their state."""
    floats = [store.record_floats(table) for table in range(len(counts))]
    return rng.random(int(counts @ floats), np.float32)


def cells_of(counts: np.ndarray, slots: np.ndarray) -> list[Cell]:
    return list(zip(np.repeat(np.arange(len(counts)), counts).tolist(), slots.tolist(), strict=True))


def by_cell(store: Store, part: tuple[np.ndarray, np.ndarray, np.ndarray]) -> dict[Cell, bytes]:
    """The records of a flush, whatever their order."""
    counts, slots, records = part
    found, at = {}, 0
    for table, slot in cells_of(counts, slots):
        found[table, slot] = records[at : at + store.record_floats(table)].tobytes()
        at += store.record_floats(table)
    assert (at, len(found)) == (len(records), len(slots)), "each row once"
    return found


def bits_of(words: np.ndarray, count: int) -> np.ndarray:
    bits = np.unpackbits(words.view(np.uint8), bitorder="little")
    assert not bits[count:].any(), "no bits beyond the last"
    return bits[:count] == 1


def words_of(bits: np.ndarray) -> np.ndarray:
    words = np.zeros(-(-len(bits) // 64), np.uint64)
    words.view(np.uint8)[: -(-len(bits) // 8)] = np.packbits(bits, bitorder="little")
    return words


def train(store: Store, job: JobSpec, rng: np.random.Generator, *, step: int = 1, share: float = 0.3) -> list[Cell]:
    counts, slots = some_slots(store, job, rng, share)
    store.update(counts, slots, weights_for(job, counts, rng), step)
    return cells_of(counts, slots)


# ---- what can be seen


def records_of(store: Store, table: int) -> np.ndarray:
    records = np.empty((store.slots(table), store.record_floats(table)), np.float32)
    store.read_records(table, 0, len(records), records)
    return records


def published_of(store: Store, job: JobSpec, table: int) -> np.ndarray:
    out = np.empty((store.slots(table), store.record_floats(table)), np.float32)
    store.published(counts_of(len(job.tables), table, len(out)), np.arange(len(out), dtype=np.uint32), out)
    return out


def parities_of(store: Store, job: JobSpec, table: int, q: int) -> np.ndarray:
    out = np.empty((store.blocks(table), store.record_floats(table)), np.float32)
    store.parity_read(q, counts_of(len(job.tables), table, len(out)), np.arange(len(out), dtype=np.uint32), out)
    return out


def observe(store: Store, job: JobSpec, *, tenants: int = 0) -> list[Any]:
    """All that can be seen of a store without changing it, in a form that compares. Rows that are not there too."""
    seen: list[Any] = [store.missing_rows(), store.blank_rows(), store.pending_bytes(), store.capture_left()]
    seen += [store.dirty_rows(tenant) for tenant in range(tenants)]
    seen += [store.updates_uncaptured(tenant) for tenant in range(tenants)]
    seen += [store.updates_noted(), store.capture_skipped()]
    if store.is_paged:  # no parities, and nothing that follows from them
        bits = [store.touched(table).tobytes() for table in range(len(job.tables))]
        return [*seen, *bits, *(records_of(store, table).tobytes() for table in range(len(job.tables)))]
    seen += [store.missing_rows(group) for group in range(len(groups_of(job)) + any(not t.r for t in job.tables))]
    for group in range(len(groups_of(job))):
        seen += [store.pending_rows(group), by_cell(store, store.take_flush(group, keep=True))]
    for table, spec in enumerate(job.tables):
        seen += [store.touched(table).tobytes(), *_observe_rows(store, job, table)]
        for q in range(spec.r):
            seen.append(parities_of(store, job, table, q).tobytes())
            seen += [store.parity_members(table, q, member).tobytes() for member in range(spec.k)]
    for group, table, _ in groups_and_tables(job):
        for source in range(job.servers):
            own = store.parity_touched(source, group, table) if _holds(store, source, group, table) else None
            seen.append(None if own is None else own.tobytes())
    return seen


def _holds(store: Store, source: int, group: int, table: int) -> bool:
    try:
        store.parity_touched(source, group, table)
    except ValueError:
        return False
    return True


def _observe_rows(store: Store, job: JobSpec, table: int) -> list[Any]:
    if not store.missing_rows() + store.blank_rows():
        return [records_of(store, table).tobytes(), published_of(store, job, table).tobytes()]
    seen: list[Any] = []
    one = np.empty(store.record_floats(table), np.float32)
    for slot in range(store.slots(table)):
        for read, arguments in (
            (store.read_records, (table, slot, 1, one)),
            (store.published, (*call_of(len(job.tables), (table, slot)), one)),
        ):
            try:
                read(*arguments)
                seen.append(one.tobytes())
            except ValueError:
                seen.append("absent")
    return seen
