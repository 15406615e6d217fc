"""A store made of dictionaries and sets: what `regrow.store.interface` means, said as plainly as it can be said.

One dictionary has the records of rows that were changed; a row that is in no dictionary has its initial value. Every
other notion of the interface (touched, pending, absent, dirty, captured ...) is a set or a dictionary of cells, which
are (table, slot). Arithmetic is that of `regrow.core.twins`. Nothing here is fast.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence

import numpy as np
from dict_checks import check, check_array, words_of, xored
from dict_priority import Capture, Priority

from regrow.core import twins
from regrow.core.bitmaps import to_words
from regrow.core.coding import coefficient
from regrow.core.job import JobSpec, TableSpec
from regrow.store.interface import TENANTS_MAX, Float32Array, Int32Array, Part, TableRows, UInt32Array, UInt64Array

Cell = tuple[int, int]  # table, slot
ADAMS = ("adam", "partial_rowwise_adam")


class DictStore:
    """The slow twin of any store."""

    def __init__(self, job: JobSpec, server: int, recovering: bool = False) -> None:
        self._job, self._server, self._ring = job, server, job.servers // job.rings
        self._layouts = [job.layout(table) for table in range(len(job.tables))]
        self._groups = sorted({(t.k - j, t.r) for t in job.tables if t.r for j in range(t.k)})
        self._records: dict[Cell, Float32Array] = {}
        self._initial: dict[Cell, Float32Array] = {}  # of rows that somebody asked for
        self._touched: set[Cell] = set()
        self._published: dict[Cell, Float32Array] = {}  # of pending rows
        self._parities: dict[tuple[int, int, int], Float32Array] = {}  # by table, q, block
        self._members: set[tuple[int, int, int, int]] = set()  # touched ones: table, q, member, block
        every = ((t, slot) for t in range(len(job.tables)) for slot in range(self.slots(t)))
        self._absent: set[Cell] = set(every) if recovering else set()
        self._known: set[Cell] = set()  # of those absent: whether they were touched
        self._returning: set[int] = set()  # tables of which rows were said to come; with parities: were loaded
        self._dirty: list[set[Cell]] = []
        self._capture: Capture | None = None
        self._priorities: list[Priority] = []
        self._noted = self._skipped = self._updates_skipped = 0

    # ---- sizes

    is_paged = False

    @property
    def memory_bytes(self) -> int:
        rows = sum(4 * self.slots(t) * self.record_floats(t) for t in range(len(self._job.tables)))
        return rows + self.redundancy_bytes

    @property
    def redundancy_bytes(self) -> int:
        tables = enumerate(self._job.tables)
        return sum(4 * self.blocks(t) * table.r * self.record_floats(t) for t, table in tables)

    def slots(self, table: int) -> int:
        return self._layouts[table].slots_per_server(self._table(table).rows)

    def blocks(self, table: int) -> int:
        return self.slots(table) // self._table(table).k

    def record_floats(self, table: int) -> int:
        spec = self._table(table)
        return twins.record_floats(spec.optimizer.kind, spec.dim)

    # ---- rows for workers

    def gather(self, counts: Int32Array, slots: UInt32Array, out: Float32Array) -> None:
        rows = self._rows(counts, slots, out, self._dims())
        self._check_present(cell for cell, _ in rows)
        for cell, place in rows:
            out.reshape(-1)[place] = self._record(cell)[: self._dims()[cell[0]]]

    def update(
        self, counts: Int32Array, slots: UInt32Array, grads: Float32Array, step: int, rates: Sequence[float] = ()
    ) -> None:
        rows = self._rows(counts, slots, grads, self._dims())
        self._check_present(cell for cell, _ in rows)
        check(step >= 1 or all(t.optimizer.kind not in ADAMS for t in self._job.tables), "step must be at least 1")
        for cell, place in rows:
            record = self._record(cell).copy()
            rule = self._rule(cell[0])
            if rates:
                rule = dataclasses.replace(rule, learning_rate=rates[cell[0]])
            twins.update_record(record, grads.reshape(-1)[place], rule=rule, step=step)
            self._change(cell, record)

    def assign_untouched(self, counts: Int32Array, slots: UInt32Array, weights: Float32Array) -> None:
        rows = self._rows(counts, slots, weights, self._dims())
        self._check_present(cell for cell, _ in rows)
        for cell, place in rows:
            if cell not in self._touched:
                record = self._record(cell).copy()
                record[: self._dims()[cell[0]]] = weights.reshape(-1)[place]
                self._change(cell, record)

    def sum_pushes(self, parts: list[Part]) -> Part:
        for counts, slots, grads in parts:
            self._floats(counts, slots, grads, self._dims())
        return twins.sum_pushes(self._dims(), parts)

    # ---- whole records

    def read_records(self, table: int, slot_first: int, slot_count: int, out: Float32Array) -> None:
        cells = self._range(table, slot_first, slot_count, out)
        for record, cell in zip(out.reshape(slot_count, self.record_floats(table)), cells, strict=True):
            record[:] = self._record(cell)

    def write_records(self, table: int, slot_first: int, slot_count: int, source: Float32Array) -> None:
        cells = self._range(table, slot_first, slot_count, source)
        for record, cell in zip(source.reshape(slot_count, self.record_floats(table)), cells, strict=True):
            self._change(cell, record.copy())

    def load_rows(
        self, table: int, ids: UInt32Array, parts: Sequence[Float32Array], clean_to: int | None = None
    ) -> int:
        spec, widths = self._table(table), self._widths(table)
        absent = {cell for cell in self._absent if cell[0] == table}
        check(absent <= self._known, "it is not known which rows are to come")
        first_wins = bool(absent) or table in self._returning
        if clean_to is not None:
            self.dirty_rows(clean_to)
        check_array(ids, np.uint32)
        check(len(parts) == len(widths), "these are not the parts of the table")
        for part, width in zip(parts, widths, strict=True):
            check_array(part, np.float32)
            check(part.size == ids.size * width, "a part has another number of floats")
        if (ids >= spec.rows).any():
            raise IndexError(f"table {table} has no row {ids.max()}")
        servers, slots = self._layouts[table].place(ids, table=table)
        if absent and spec.r:
            self._returning.add(table)
        loaded = 0
        for row in np.flatnonzero(servers == self._server):
            cell = table, int(slots[row])
            if first_wins and (cell not in absent or self._is_blank(cell)):
                continue
            values = [part.reshape(ids.size, -1)[row] for part in parts]
            record = self._record(cell).copy()
            record[: sum(widths)] = np.concatenate(values)
            self._change(cell, record)
            self._absent.discard(cell)
            if first_wins:
                self._published.pop(cell, None)
            if first_wins and clean_to is not None:
                self._dirty[clean_to].remove(cell)
                self._priorities[clean_to].keep_copies({cell: record[: spec.dim]})
            loaded += 1
        return loaded

    def touched(self, table: int) -> UInt64Array:
        return words_of((slot for t, slot in self._touched if t == table), self.slots(table))

    # ---- flushes to holders

    def pending_rows(self, group: int) -> int:
        return len(self._pending(group))

    def pending_bytes(self) -> int:
        return sum(record.nbytes for record in self._published.values())

    def take_flush(self, group: int, keep: bool = False) -> Part:
        cells = self._pending(group)
        deltas = [xored(self._published[cell], self._record(cell)) for cell in cells]
        if not keep:
            for cell in cells:
                del self._published[cell]
        return (*self._named(cells), np.concatenate([np.zeros(0, np.float32), *deltas]))

    def published(self, counts: Int32Array, slots: UInt32Array, out: Float32Array) -> None:
        rows = self._rows(counts, slots, out, self._strides())
        self._check_present(cell for cell, _ in rows if not self._is_blank(cell))
        for cell, place in rows:
            relative = np.zeros(self.record_floats(cell[0]), np.float32)
            if cell in self._touched:
                relative = xored(self._published.get(cell, self._record(cell)), self._initial_record(cell))
            out.reshape(-1)[place] = relative

    def next_touched(self, table: int, group: int, block_first: int, rows_max: int) -> tuple[UInt32Array, int]:
        member, k = self._member(table, group), self._table(table).k
        if not 0 <= block_first <= self.blocks(table):
            raise IndexError(f"there is no block {block_first}")
        check(rows_max >= 1, "rows_max must be at least 1")
        found: list[int] = []
        block = block_first
        while block < self.blocks(table) and len(found) < rows_max:
            if (table, block * k + member) in self._touched:
                found.append(block * k + member)
            block += 1
        return np.array(found, np.uint32), block

    # ---- parities held for others

    def parity_apply(self, source: int, counts: Int32Array, slots: UInt32Array, deltas: Float32Array) -> None:
        self._check_source(source)
        rows = self._rows(counts, slots, deltas, self._strides())
        places = [(self._held(source, cell), place) for cell, place in rows]
        for (table, q, member, block), place in places:
            parity = self._parity(table, q, block).copy()
            twins.gf_xor(parity, deltas.reshape(-1)[place], coefficient(q, member, self._table(table).r))
            self._parities[table, q, block] = parity
            self._members.add((table, q, member, block))

    def parity_read(self, q: int, counts: Int32Array, blocks: UInt32Array, out: Float32Array) -> None:
        places = self._floats(counts, blocks, out, self._strides())
        for (table, block), _ in places:
            self._check_parity(table, q)
            if block >= self.blocks(table):
                raise IndexError(f"there is no block {block}")
        for (table, block), place in places:
            out.reshape(-1)[place] = self._parity(table, q, block)

    def parity_add(self, q: int, counts: Int32Array, blocks: UInt32Array, records: Float32Array) -> None:
        parities = np.empty_like(records)
        self.parity_read(q, counts, blocks, parities)
        twins.gf_xor(records.reshape(-1), parities.reshape(-1), 1)

    def parity_members(self, table: int, q: int, member: int) -> UInt64Array:
        self._check_parity(table, q)
        if not 0 <= member < self._table(table).k:
            raise IndexError(f"there is no member {member}")
        found = (block for t, q_of, m, block in self._members if (t, q_of, m) == (table, q, member))
        words = words_of(found, self.blocks(table))
        words.flags.writeable = False
        return words

    def parity_touched(self, source: int, group: int, table: int) -> UInt64Array:
        self._check_source(source)
        member = self._member(table, group)
        _, q, _, _ = self._held(source, (table, member))
        return self.parity_members(table, q, member).copy()

    def parity_void(self, table: int, q: int) -> None:
        self._check_parity(table, q)
        self._parities = {place: parity for place, parity in self._parities.items() if place[:2] != (table, q)}
        self._members = {place for place in self._members if place[:2] != (table, q)}

    # ---- coming back

    def know_touched(self, group: int, table: int, words: UInt64Array) -> None:
        bare = self._is_bare(group)
        check(not (bare and self._table(table).r), f"table {table} has parities")
        k = 1 if bare else self._table(table).k  # in the bare group a bit is a slot
        member, blocks = 0 if bare else self._member(table, group), self.slots(table) // k
        check_array(words, np.uint64)
        check(words.size == -(-blocks // 64), "the words are not those of the blocks")
        bits = np.unpackbits(words.view(np.uint8), bitorder="little")
        check(not bits[blocks:].any(), "there are bits beyond the last block")
        absent = self._absent & {(table, block * k + member) for block in range(blocks)}
        touched = {(t, slot) for t, slot in absent if bits[slot // k]}
        self._known |= absent
        self._touched = self._touched - absent | touched
        if bare and touched:
            self._returning.add(table)

    def prepare(self, counts: Int32Array, slots: UInt32Array) -> tuple[Int32Array, UInt32Array]:
        cells = self._cells(counts, slots)
        self._absent -= {cell for cell in cells if self._is_blank(cell)}
        return self._named([cell for cell in cells if cell in self._absent])

    def put(self, counts: Int32Array, slots: UInt32Array, relatives: Float32Array) -> int:
        rows = self._rows(counts, slots, relatives, self._strides())
        before = len(self._absent)
        for cell, place in rows:
            if cell in self._absent and cell in self._known and cell in self._touched:
                self._records[cell] = xored(relatives.reshape(-1)[place], self._initial_record(cell))
                self._absent.remove(cell)
                for dirty in self._dirty:
                    dirty.add(cell)
        return before - len(self._absent)

    def fill(self, rows_max: int) -> int:
        check(rows_max >= 1, "rows_max must be at least 1")
        blank = sorted(cell for cell in self._absent if self._is_blank(cell))[:rows_max]
        self._absent -= set(blank)
        return len(blank)

    def missing_rows(self, group: int | None = None) -> int:
        missing = [cell for cell in self._absent if not self._is_blank(cell)]
        if group is not None and self._is_bare(group):
            return sum(not self._table(t).r for t, _ in missing)
        if group is not None:
            kind = self._groups[group]
            missing = [cell for cell in missing if self._distance(*cell) == kind]
        return len(missing)

    def blank_rows(self) -> int:
        return sum(map(self._is_blank, self._absent))

    def find_slots(self, table: int, ids: UInt32Array) -> UInt64Array:
        if ids.size and int(ids.max()) >= self._table(table).rows:
            raise IndexError("there is no such row")
        servers, slots = self._layouts[table].place(ids, table=table)
        return to_words(slots[servers == self._server], self.slots(table))

    # ---- captures

    def add_tenant(self) -> int:
        check(len(self._dirty) < TENANTS_MAX, "there are too many tenants")
        self._dirty.append(self._touched - self._absent)
        self._priorities.append(Priority())
        return len(self._dirty) - 1

    def dirty_rows(self, tenant: int) -> int:
        return len(self._dirty[tenant])

    def begin_capture(self, tenant: int, full: bool) -> None:
        dirty = self._dirty[tenant]
        check(self._capture is None, "a capture is under way")
        check(not self.missing_rows(), "rows are missing")
        priority, captured = self._priorities[tenant], frozenset(self._touched)
        if not full:
            weights = {cell: self._record(cell)[: self._dims()[cell[0]]] for cell in dirty}
            captured = frozenset(priority.choose(dirty, weights))
        self._skipped = len(dirty - captured)
        self._dirty[tenant] = dirty - captured
        priority.begin(captured)
        self._updates_skipped = priority.uncaptured
        self._capture = Capture(tenant, captured, set(captured))

    def choose_captured(self, rows: int) -> bool:
        self._under_way()
        check(rows >= 1, "rows must be at least 1")
        return False

    def prepare_chunk(self, bytes_max: int, aside_first: bool, slice_bytes: int) -> bool:
        check(slice_bytes >= 1, "slice_bytes must be at least 1")
        capture = self._under_way()
        if capture.prepared is None:
            capture.prepared = self._find_chunk(bytes_max, aside_first)
        return False

    def capture_chunk(self, bytes_max: int, aside_first: bool = False) -> list[TableRows]:
        capture = self._under_way()
        taken = self._find_chunk(bytes_max, aside_first) if capture.prepared is None else capture.prepared
        capture.prepared = None
        capture.left -= set(taken)
        values = {cell: capture.aside.pop(cell, self._record(cell)) for cell in taken}
        weights = {cell: record[: self._dims()[cell[0]]].copy() for cell, record in values.items()}
        self._priorities[capture.tenant].keep_copies(weights)
        found = []
        for table in range(len(self._job.tables)):
            if rows := self._numbered(table, values):
                found.append(self._table_rows(table, rows))
        return found

    def _find_chunk(self, bytes_max: int, aside_first: bool) -> list[Cell]:
        check(bytes_max >= 1, "bytes_max must be at least 1")
        capture = self._under_way()
        taken: list[Cell] = []
        for cell in sorted(capture.left, key=lambda cell: (aside_first and cell not in capture.aside, cell)):
            bytes_max -= self.chunk_row_bytes(cell[0])
            if taken and bytes_max < 0:
                break
            taken.append(cell)
        return taken

    def capture_left(self) -> int:
        return 0 if self._capture is None else len(self._capture.left)

    def capture_side_bytes(self) -> int:
        return 0 if self._capture is None else sum(record.nbytes for record in self._capture.aside.values())

    def end_capture(self, durable: bool) -> None:
        capture = self._under_way()
        check(not (durable and capture.left), "rows were not taken yet")
        if not durable:
            self._dirty[capture.tenant] |= capture.captured
        self._priorities[capture.tenant].end(capture.captured, durable)
        self._capture = None

    # ---- what goes first

    def set_priority(self, tenant: int, kind: str, tables: Sequence[int], share: float, seed: int, period: int) -> None:
        self.dirty_rows(tenant)
        check(kind in ("none", "mfu", "ssu", "scar"), "there is no such kind")
        check(0 < share <= 1, "share must be above 0 and at most 1")
        check(period >= 1, "period must be at least 1")
        rows_max = {t: max(1, int(share * self._rows_here(t))) for t in tables if kind != "none"}
        check(self._capture is None, "a capture is under way")
        check(not self.updates_uncaptured(tenant), "updates are uncaptured")
        slots = {t: self.slots(t) for t in tables}
        initial = {
            (t, slot): self._initial_record((t, slot))[: self._dims()[t]]
            for t in tables
            for slot in range(slots[t])
            if kind == "scar"
        }
        self._priorities[tenant] = Priority(kind, rows_max, slots, seed, period, initial)

    def note_updates(self, counts: Int32Array, slots: UInt32Array) -> None:
        cells = self._cells(counts, slots)
        for priority in self._priorities:
            priority.note(cells)
        self._noted += len(cells)

    def updates_noted(self) -> int:
        return self._noted

    def set_updates_noted(self, total: int) -> None:
        self._noted = total

    def updates_uncaptured(self, tenant: int) -> int:
        return self._priorities[tenant].uncaptured

    def capture_skipped(self) -> int:
        return self._skipped

    def updates_skipped(self) -> int:
        return self._updates_skipped

    def count_bytes(self) -> int:
        return 8 * sum(len(priority.counts) for priority in self._priorities)

    def priority_bytes(self) -> int:
        return 8 * sum(len(priority.counts) + len(priority.copies) for priority in self._priorities)

    def _rows_here(self, table: int) -> int:
        return self._layouts[table].rows_on(self._server, rows=self._table(table).rows, table=table)

    # ---- for tests: what takes a chunk to which only rows that are aside are to go

    def chunk_row_bytes(self, table: int) -> int:
        return 4 * (1 + sum(self._widths(table)))

    def aside_chunk_bytes(self) -> int:
        return 0 if self._capture is None else sum(self.chunk_row_bytes(table) for table, _ in self._capture.aside)

    # ---- records

    def _record(self, cell: Cell) -> Float32Array:
        return self._records[cell] if cell in self._records else self._initial_record(cell)

    def _initial_record(self, cell: Cell) -> Float32Array:
        if cell not in self._initial:
            table = cell[0]
            spec, row = self._table(table), self._row(cell)
            record = np.zeros(self.record_floats(table), np.float32)
            if row < spec.rows:  # or it is a hole
                record[: spec.dim] = twins.initial_rows(
                    [row], dim=spec.dim, seed=self._job.seed, table=table, bound=spec.init_bound
                )[0]
            self._initial[cell] = record
        return self._initial[cell]

    def _change(self, cell: Cell, record: Float32Array) -> None:
        """The one way in which the value of a row that is there changes."""
        before = self._record(cell)
        if self._table(cell[0]).r:
            self._published.setdefault(cell, before)
        if self._capture is not None and cell in self._capture.left:
            self._capture.aside.setdefault(cell, before)
        for dirty in self._dirty:
            dirty.add(cell)
        self._touched.add(cell)
        self._records[cell] = record

    def _row(self, cell: Cell) -> int:
        table, slot = cell
        return int(self._layouts[table].row_of(self._server, slot, table=table))

    def _is_blank(self, cell: Cell) -> bool:
        return cell in self._absent and cell in self._known and cell not in self._touched

    def _numbered(self, table: int, values: dict[Cell, Float32Array]) -> list[tuple[int, Float32Array]]:
        """(row, record) of the cells of a table, rising; holes are no rows."""
        rows = [(self._row(cell), record) for cell, record in values.items() if cell[0] == table]
        return sorted((pair for pair in rows if pair[0] < self._table(table).rows), key=lambda pair: pair[0])

    def _table_rows(self, table: int, rows: list[tuple[int, Float32Array]]) -> TableRows:
        records = np.stack([record for _, record in rows])
        ends = np.cumsum(self._widths(table))
        parts = np.split(records[:, : ends[-1]], ends[:-1], axis=1)
        return table, np.array([row for row, _ in rows], np.uint32), [np.ascontiguousarray(part) for part in parts]

    # ---- tables

    def _table(self, table: int) -> TableSpec:
        return self._job.tables[table]

    def _rule(self, table: int) -> twins.Rule:
        given = self._table(table).optimizer
        numbers = ("learning_rate", "eps", "beta1", "beta2", "momentum", "weight_decay")
        return twins.Rule(optimizer=given.kind, **{name: getattr(given, name) for name in numbers})

    def _widths(self, table: int) -> list[int]:
        spec = self._table(table)
        return [spec.dim, *(floats for _, floats in spec.optimizer.state_parts(spec.dim))]

    def _dims(self) -> list[int]:
        return [table.dim for table in self._job.tables]

    def _strides(self) -> list[int]:
        return [self.record_floats(table) for table in range(len(self._job.tables))]

    # ---- groups and parities

    def _member(self, table: int, group: int) -> int:
        distance, r = self._groups[group]
        spec = self._table(table)
        check(spec.r == r and distance <= spec.k, f"table {table} has no rows in group {group}")
        return spec.k - distance

    def _pending(self, group: int) -> list[Cell]:
        kind = self._groups[group]
        return sorted(cell for cell in self._published if self._distance(*cell) == kind)

    def _distance(self, table: int, slot: int) -> tuple[int, int]:
        spec = self._table(table)
        return spec.k - slot % spec.k, spec.r

    def _is_bare(self, group: int) -> bool:
        return group == len(self._groups) and any(not spec.r for spec in self._job.tables)

    def _check_source(self, source: int) -> None:
        if not 0 <= source < self._job.servers:
            raise IndexError(f"there is no server {source}")
        check(source // self._ring == self._server // self._ring, f"server {source} is in another ring")

    def _held(self, source: int, cell: Cell) -> tuple[int, int, int, int]:
        """(table, q, member, block) of the parity of a row of another server that is here."""
        table, slot = cell
        spec = self._table(table)
        block, member = divmod(slot, spec.k)
        q = (self._server - source + member - spec.k) % self._ring
        check(q < spec.r, f"no parity of {cell} of server {source} is here")
        return table, q, member, block

    def _parity(self, table: int, q: int, block: int) -> Float32Array:
        return self._parities.get((table, q, block), np.zeros(self.record_floats(table), np.float32))

    def _check_parity(self, table: int, q: int) -> None:
        check(self._table(table).r > 0, f"table {table} has no parities")
        if not 0 <= q < self._table(table).r:
            raise IndexError(f"there is no parity {q}")

    # ---- calls

    def _under_way(self) -> Capture:
        check(self._capture is not None, "no capture is under way")
        assert self._capture is not None
        return self._capture

    def _named(self, cells: Sequence[Cell]) -> tuple[Int32Array, UInt32Array]:
        counts = [sum(t == table for t, _ in cells) for table in range(len(self._job.tables))]
        return np.array(counts, np.int32), np.array([slot for _, slot in cells], np.uint32)

    def _pairs(self, counts: Int32Array, numbers: UInt32Array) -> list[Cell]:
        check_array(counts, np.int32)
        check_array(numbers, np.uint32)
        check(counts.size == len(self._job.tables), "counts has not an entry per table")
        check((counts >= 0).all() and int(counts.sum()) == numbers.size, "counts do not add up")
        tables = np.repeat(np.arange(counts.size), counts)
        return list(zip(tables.tolist(), numbers.tolist(), strict=True))

    def _cells(self, counts: Int32Array, slots: UInt32Array) -> list[Cell]:
        cells = self._pairs(counts, slots)
        for table, slot in cells:
            if slot >= self.slots(table):
                raise IndexError(f"table {table} has no slot {slot} here")
        return cells

    def _floats(
        self, counts: Int32Array, numbers: UInt32Array, floats: Float32Array, widths: list[int]
    ) -> list[tuple[Cell, slice]]:
        """Each pair of the call, and where its floats are."""
        pairs = self._pairs(counts, numbers)
        check_array(floats, np.float32)
        ends = np.cumsum([0, *(widths[table] for table, _ in pairs)]).tolist()
        check(ends[-1] == floats.size, "the rows have another number of floats")
        return [(pair, slice(ends[i], ends[i + 1])) for i, pair in enumerate(pairs)]

    def _rows(
        self, counts: Int32Array, slots: UInt32Array, floats: Float32Array, widths: list[int]
    ) -> list[tuple[Cell, slice]]:
        rows = self._floats(counts, slots, floats, widths)
        self._cells(counts, slots)
        return rows

    def _range(self, table: int, slot_first: int, slot_count: int, floats: Float32Array) -> list[Cell]:
        if slot_first < 0 or slot_count < 0 or slot_first + slot_count > self.slots(table):
            raise IndexError(f"table {table} has no slots {slot_first} to {slot_first + slot_count} here")
        check_array(floats, np.float32)
        check(floats.size == slot_count * self.record_floats(table), "the records have another number of floats")
        cells = [(table, slot) for slot in range(slot_first, slot_first + slot_count)]
        self._check_present(cells)
        return cells

    def _check_present(self, cells: Iterable[Cell]) -> None:
        for cell in cells:
            check(cell not in self._absent, f"{cell} is not there yet")
