"""What the rows of a group must be, as bytes, and what their parities are then.

It follows from the marks of the group alone: the pushes up to them, and no others. Parities are checked after every
flush, so much of a run is spent here: rows are looked up by which of their pushes are in them (most marks make no
difference to a row), and all parities of a table are one whole number, of which XOR is a single step.
"""

from __future__ import annotations

from regrow.core.coding import product
from regrow.core.groups import Groups
from regrow.core.job import JobSpec
from regrow.sim import machines
from regrow.sim.reference import Key, Reference

_PRODUCTS: dict[int, bytes] = {}  # by coefficient: every byte times it


def multiply(factor: int, data: bytes) -> bytes:
    """Bytes times a coefficient, slowly made and quickly looked up."""
    if factor == 1:
        return data
    table = _PRODUCTS.get(factor)
    if table is None:
        table = _PRODUCTS[factor] = bytes(product(factor, byte) for byte in range(256))
    return data.translate(table)


class Piece:
    """A group's rows of one table at some marks: records relative to the initial ones, block after block."""

    __slots__ = ("_parts", "open", "records", "size", "touched")

    def __init__(self, records: list[bytes], *, touched: int, open: int) -> None:
        self.records = b"".join(records)
        self.size = len(records[0]) if records else 0  # bytes of a record
        self.touched = touched  # and not as it was made: bit by block
        self.open = open  # those that may have their assigned weights already, or not yet
        self._parts: dict[int, int] = {}

    def record(self, block: int) -> bytes:
        return self.records[block * self.size : (block + 1) * self.size]

    def part(self, factor: int) -> int:
        """What they add to a parity, as one number."""
        known = self._parts.get(factor)
        if known is None:
            known = self._parts[factor] = int.from_bytes(multiply(factor, self.records), "little")
        return known


class Pieces:
    """All pieces of a job that anybody asked for."""

    def __init__(self, job: JobSpec, groups: Groups, reference: Reference) -> None:
        self.blocks = [machines.blocks(job, table) for table in range(len(job.tables))]
        self._job = job
        self._groups = groups
        self._reference = reference
        self._sync = job.mode == "sync"
        self._known: dict[tuple[int, int, int, int, tuple[int, ...]], Piece] = {}
        self._rows: dict[tuple[int, int, int], list[Key | None]] = {}
        self._relatives: dict[tuple[Key, int], bytes] = {}

    def find(
        self, source: int, group: int, table: int, marks: tuple[int, ...], era: tuple[int, dict[Key, int]]
    ) -> Piece:
        """The rows of a group of `source` at these marks, but for what was lost of them (`OwnStorage.find_era`)."""
        number, lost = era
        piece = self._known.get((source, group, table, number, marks))
        if piece is None:
            piece = self._make(source, group, table, marks, lost)
            self._known[source, group, table, number, marks] = piece
        return piece

    def _make(self, source: int, group: int, table: int, marks: tuple[int, ...], lost: dict[Key, int]) -> Piece:
        reference = self._reference
        nothing = bytes(4 * reference.initial[table, 0].size)
        records: list[bytes] = []
        touched = is_open = 0
        for block, key in enumerate(self._list_rows(source, group, table)):
            if key is None:
                records.append(nothing)
                continue
            gone = lost.get(key, 0)
            pushes = reference.find_pushes(key, marks) & ~gone
            records.append(self._find_relative(key, pushes, marks, gone))
            if pushes:
                # One that its pushes left as it was made (a rate of 0) may be taken for untouched: it is the same row.
                touched |= (records[-1] != nothing) << block
            elif reference.is_open(key, marks):
                is_open |= 1 << block
        return Piece(records, touched=touched, open=is_open)

    def _list_rows(self, source: int, group: int, table: int) -> list[Key | None]:
        """By block."""
        rows = self._rows.get((source, group, table))
        if rows is None:
            member, k = self._groups.member(table, group), self._job.tables[table].k
            assert member is not None
            row_at = self._reference.places.row_at
            found = [row_at.get((source, table, block * k + member)) for block in range(self.blocks[table])]
            rows = self._rows[source, group, table] = [None if row is None else (table, row) for row in found]
        return rows

    def _find_relative(self, key: Key, pushes: int, marks: tuple[int, ...], lost: int) -> bytes:
        known = self._relatives.get((key, pushes))
        if known is None:
            reference = self._reference
            record = reference.record_without(key, marks, lost) if lost else reference.record(key, marks)
            initial = reference.initial[key]
            known = self._relatives[key, pushes] = (record.view("u4") ^ initial.view("u4")).tobytes()
        return known
