"""Goal: two stores that were told the same cannot be told apart, whatever it was.

Method: the store in memory and the one made of dictionaries receive the same random calls: updates, writes, loads,
flushes, parities, rows that come back, captures. Whatever they give is compared bit for bit, and from time to time all
that can be seen of them. Where the interface leaves an order open, it is not compared. Seeds are fixed: a failure is a
number.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from dict_store import DictStore
from subjects import (
    CODED,
    JOB,
    by_cell,
    cells_of,
    every_slot,
    groups_and_tables,
    groups_of,
    holders,
    observe,
    records_for,
    some_slots,
    weights_for,
    words_of,
)

from regrow.core.job import JobSpec
from regrow.store.memory import MemoryStore

SERVER = 1
CALLS = 140


class Both:
    """Two stores, and a random call for each kind there is."""

    def __init__(self, job: JobSpec, seed: int, *, recovering: bool) -> None:
        self.job, self.rng = job, np.random.default_rng(seed)
        self.fast = MemoryStore(job, SERVER, recovering)
        self.slow = DictStore(job, SERVER, recovering)
        self.tenants = 0
        # Tables without parities, and (group, table) of the others, of which something is known.
        self.known: set[Any] = set() if recovering else set(range(len(job.tables)))
        self.step = 0
        self.capturing = False
        self.captures = 0
        self.prepared = False
        self.prioritized = 0
        self.skipped = 0

    def ask(self, name: str, *arguments: Any) -> Any:
        """Calls both, and gives what they gave, which is the same."""
        fast, slow = (getattr(store, name)(*arguments) for store in (self.fast, self.slow))
        assert plain(fast) == plain(slow), name
        return fast

    def ask_out(self, name: str, floats: int, *arguments: Any) -> None:
        outs = [np.full(floats, np.nan, np.float32) for _ in range(2)]
        for store, out in zip((self.fast, self.slow), outs, strict=True):
            getattr(store, name)(*arguments, out)
        assert outs[0].tobytes() == outs[1].tobytes(), name

    def choose_rows(self, share: float = 0.1) -> tuple[np.ndarray, np.ndarray]:
        """Rows that are there, once they were asked for."""
        counts, slots = some_slots(self.fast, self.job, self.rng, share)
        missing = cells_of(*self.ask("prepare", counts, slots))
        cells = [cell for cell in cells_of(counts, slots) if cell not in missing]
        counts = np.bincount([table for table, _ in cells], minlength=len(counts)).astype(np.int32)
        return counts, np.array([slot for _, slot in cells], np.uint32)

    def choose_group(self) -> tuple[int, int]:
        found = groups_and_tables(self.job)
        group, table, _ = found[self.rng.integers(len(found))]
        return group, table

    # ---- calls

    def update(self) -> None:
        counts, slots = self.choose_rows()
        self.step += 1
        self.ask("update", counts, slots, weights_for(self.job, counts, self.rng), self.step)

        self.ask("note_updates", counts, slots)

    def note(self) -> None:
        """The same few rows again and again: those of a byte that is full."""
        counts, slots = self.choose_rows(0.03)
        for _ in range(int(self.rng.integers(1, 300))):
            self.ask("note_updates", counts, slots)

    def prioritize(self) -> None:
        if self.tenants and not self.capturing:
            tenant = int(self.rng.integers(self.tenants))
            if self.ask("updates_uncaptured", tenant) == 0:
                kind = ("none", "mfu", "ssu", "scar")[self.rng.integers(4)]
                tables = np.flatnonzero(self.rng.random(len(self.job.tables)) < 0.7).tolist()
                share, period = float(self.rng.choice([0.01, 0.05, 0.2, 1.0])), int(self.rng.integers(1, 4))
                self.ask("set_priority", tenant, kind, tables, share, int(self.rng.integers(100)), period)
                self.prioritized += kind != "none"

    def assign(self) -> None:
        counts, slots = self.choose_rows()
        self.ask("assign_untouched", counts, slots, weights_for(self.job, counts, self.rng))

    def find(self) -> None:
        table = int(self.rng.integers(len(self.job.tables)))
        rows = self.job.tables[table].rows
        self.ask("find_slots", table, self.rng.permutation(rows)[: self.rng.integers(rows)].astype(np.uint32))

    def gather(self) -> None:
        counts, slots = self.choose_rows()
        self.ask_out("gather", int(counts @ [table.dim for table in self.job.tables]), counts, slots)

    def write(self) -> None:
        table = int(self.rng.integers(len(self.job.tables)))
        first = int(self.rng.integers(self.fast.slots(table)))
        count = int(self.rng.integers(min(20, self.fast.slots(table) - first) + 1))
        counts = np.zeros(len(self.job.tables), np.int32)
        counts[table] = count
        if self.ask("prepare", counts, np.arange(first, first + count, dtype=np.uint32))[1].size == 0:
            self.ask("write_records", table, first, count, records_for(self.fast, counts, self.rng))

    def load(self) -> None:
        table = int(self.rng.integers(len(self.job.tables)))
        spec = self.job.tables[table]
        if self.fast.missing_rows() + self.fast.blank_rows() and not self.is_known(table):
            return
        ids = self.rng.permutation(spec.rows)[: self.rng.integers(60)].astype(np.uint32)
        widths = [spec.dim, *(floats for _, floats in spec.optimizer.state_parts(spec.dim))]
        parts = [self.rng.random((ids.size, width), np.float32) for width in widths]
        clean_to = int(self.rng.integers(self.tenants)) if self.tenants and self.rng.integers(2) else None
        self.ask("load_rows", table, ids, parts, clean_to)

    def flush(self) -> None:
        group = int(self.rng.integers(len(groups_of(self.job))))
        for keep in (True, False):
            flushes = [store.take_flush(group, keep) for store in (self.fast, self.slow)]
            assert flushes[0][0].tolist() == flushes[1][0].tolist()
            assert by_cell(self.fast, flushes[0]) == by_cell(self.fast, flushes[1])

    def walk(self) -> None:
        group, table = self.choose_group()
        self.ask("next_touched", table, group, int(self.rng.integers(self.fast.blocks(table))), 5)

    def apply(self) -> None:
        """Of some server, rows of a group of which a parity is here."""
        group, _ = self.choose_group()
        sources = [source for source in range(self.job.servers) if SERVER in holders(self.job, source, group)]
        source = sources[self.rng.integers(len(sources))]
        slots, counts = [], np.zeros(len(self.job.tables), np.int32)
        for other, table, member in groups_and_tables(self.job):
            if other == group:
                k = self.job.tables[table].k
                blocks = self.rng.integers(0, self.fast.blocks(table), self.rng.integers(5))
                counts[table] = len(blocks)
                slots += (blocks * k + member).tolist()
        deltas = records_for(self.fast, counts, self.rng)
        self.ask("parity_apply", source, counts, np.array(slots, np.uint32), deltas)

    def is_known(self, table: int) -> bool:
        groups = {group for group, other, _ in groups_and_tables(self.job) if other == table}
        return table in self.known or (bool(groups) and all((group, table) in self.known for group in groups))

    def void(self) -> None:
        _, table = self.choose_group()
        self.ask("parity_void", table, int(self.rng.integers(self.job.tables[table].r)))

    def know(self) -> None:
        group, table = self.choose_group()
        self.ask("know_touched", group, table, words_of(self.rng.random(self.fast.blocks(table)) < 0.5))
        self.known.add((group, table))
        self.know_bare()

    def know_bare(self) -> None:
        for table, spec in enumerate(self.job.tables):
            if not spec.r and self.rng.integers(2):
                bits = self.rng.random(self.fast.slots(table)) < self.rng.choice([0, 0.5])
                self.ask("know_touched", len(groups_of(self.job)), table, words_of(bits))
                self.known.add(table)

    def put(self) -> None:
        counts, slots = some_slots(self.fast, self.job, self.rng, 0.3)
        self.ask("put", counts, slots, records_for(self.fast, counts, self.rng))

    def fill(self) -> None:
        self.ask("fill", int(self.rng.integers(1, 30)))

    def come_back(self) -> None:
        """All rows: those without parities are put as well as any, which the store does not mind."""
        for group, table, _ in groups_and_tables(self.job):
            self.ask("know_touched", group, table, words_of(self.rng.random(self.fast.blocks(table)) < 0.5))
        for table in range(len(self.job.tables)):
            if not self.job.tables[table].r and table not in self.known:
                self.ask("know_touched", len(groups_of(self.job)), table, np.zeros(1, np.uint64))
        counts, slots = every_slot(self.fast, self.job)
        self.ask("put", counts, slots, records_for(self.fast, counts, self.rng))
        self.ask("fill", 1 << 20)

    def add_tenant(self) -> None:
        if self.tenants < 3:
            assert self.ask("add_tenant") == self.tenants
            self.tenants += 1
            self.prioritize()

    def begin(self) -> None:
        if self.tenants and not self.capturing and not self.fast.missing_rows():
            self.ask("begin_capture", int(self.rng.integers(self.tenants)), bool(self.rng.integers(3) == 0))
            self.capturing = True
            self.captures += 1

    def choose(self) -> None:
        """In slices, or not before somebody asks: which rows a capture has is decided by its instant alone."""
        if not self.capturing:
            return self.begin()
        rows = int(self.rng.integers(1, 200))
        for store in (self.fast, self.slow):
            store.choose_captured(rows)

    def prepare(self) -> None:
        if self.capturing:
            bytes_max, slice_bytes = int(self.rng.integers(1, 3000)), int(self.rng.integers(1, 800))
            for store in (self.fast, self.slow):
                store.prepare_chunk(bytes_max, False, slice_bytes)
            self.prepared = True

    def take(self) -> None:
        if not self.capturing:
            return self.begin()
        if self.rng.integers(2) or self.prepared:
            self.prepared = False
            self.ask("capture_chunk", int(self.rng.integers(1, 3000)))
        else:  # all that are aside: which of them go first is not promised
            self.ask("capture_chunk", max(1, self.slow.aside_chunk_bytes()), True)
        side, least = self.fast.capture_side_bytes(), self.slow.capture_side_bytes()
        assert side >= least
        assert bool(side) == bool(least)

    def end(self) -> None:
        if self.capturing:
            self.ask("updates_skipped")
            self.skipped += self.ask("capture_skipped")
            self.ask("end_capture", bool(self.rng.integers(2)) and not self.fast.capture_left())
            self.capturing = self.prepared = False


def plain(value: Any) -> Any:
    """In a form that compares: bits, and the types of arrays."""
    if isinstance(value, np.ndarray):
        return value.dtype, value.shape, value.tobytes()
    if isinstance(value, list | tuple):
        return [plain(each) for each in value]
    return value


CHANGES: list[Callable[[Both], None]] = [
    Both.update,
    Both.update,
    Both.note,
    Both.prioritize,
    Both.assign,
    Both.gather,
    Both.find,
    Both.write,
    Both.load,
    Both.flush,
    Both.walk,
    Both.apply,
    Both.void,
    Both.add_tenant,
    Both.begin,
    Both.choose,
    Both.choose,
    Both.prepare,
    Both.take,
    Both.take,
    Both.end,
]
RETURNS: list[Callable[[Both], None]] = [Both.know, Both.put, Both.put, Both.fill]


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize(
    ("job", "recovering"),
    [(JOB, False), (JOB, True), (CODED, True)],
    ids=["there", "comes back, also without parities", "comes back"],
)
def test_stores_cannot_be_told_apart(job: JobSpec, recovering: bool, seed: int) -> None:
    both = Both(job, seed, recovering=recovering)
    calls = CHANGES + (RETURNS if recovering else [])
    for number in range(CALLS):
        if number == CALLS // 2:
            both.come_back()
            both.add_tenant()
            both.begin()
        calls[both.rng.integers(len(calls))](both)
        if number % 10 == 9:
            states = [observe(store, job, tenants=both.tenants) for store in (both.fast, both.slow)]
            assert states[0] == states[1], number
    assert both.fast.missing_rows() == 0
    assert both.captures > 0
