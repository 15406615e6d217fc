"""From a schema to the kernel that makes samples, and data sets that have each column as an array.

Such data has its rows by number: the first `train_rows` are for training, the rest for testing, and global batch b of
an epoch is the rows from b * batch on. A position needs nothing else. A row that is malformed keeps its place, as a
line does in `lines.py`.
"""

from __future__ import annotations

import abc
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from regrow._kernels import SampleParser
from regrow.data.bad_lines import BadLines
from regrow.data.batch import Batch, Position, make_plan, start_index
from regrow.data.lines import check_counts, split_rows
from regrow.data.schema import Categorical, Schema
from regrow.errors import DataError, UserError

Bad = tuple[int, int, str] | None  # (line, column, reason), as the kernel says it


@dataclass(frozen=True, slots=True, kw_only=True)
class Numbers:
    """Values of a column, one per row. Those that are not `valid` are missing; None: all are valid."""

    values: NDArray[np.float64]
    valid: NDArray[np.uint8] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Wholes:
    """Ids or keys, one per row, or the rows' bags one after the other: bag b is bags[b]..bags[b + 1]."""

    values: NDArray[np.int64]
    valid: NDArray[np.uint8] | None = None
    bags: NDArray[np.int64] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Texts:
    """The same for texts: value i is text[offsets[i]..offsets[i + 1]]."""

    offsets: NDArray[np.int64]
    text: NDArray[np.uint8]
    valid: NDArray[np.uint8] | None = None
    bags: NDArray[np.int64] | None = None


class ColumnDataset(BadLines, abc.ABC):
    """Rows of columns. A format says how many there are, and gives some of a column."""

    def __init__(
        self,
        *,
        schema: Schema,
        rows: Sequence[int],
        total: int,
        name: str,
        train_rows: int | None,
        test_rows: int | None,
        epochs: int,
        skip_bad_lines: bool,
    ) -> None:
        super().__init__(skip_bad_lines=skip_bad_lines)
        check_counts(train_rows=train_rows, test_rows=test_rows, epochs=epochs)
        if total == 0:
            raise DataError(f"{name} holds no rows")
        self.train_rows = split_rows(total) if train_rows is None else train_rows
        if total < self.train_rows:
            raise DataError(
                f"{name} has only {total:,} rows, but train_rows is {train_rows:,}",
                hint="Lower train_rows, or leave it out to train on the first six sevenths.",
            )
        self.rows = list(rows)
        self.dense_features = schema.dense_features
        self.epochs = epochs
        self._name = name
        self._schema = schema
        left = total - self.train_rows
        self._test_rows = left if test_rows is None else min(left, test_rows)
        self._parser = make_parser(schema, fields=schema.columns, rows=rows)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._name}, train_rows {self.train_rows}, bad_lines {self.bad_lines})"

    @abc.abstractmethod
    def _read_numbers(self, column: str, first: int, count: int) -> Numbers: ...

    @abc.abstractmethod
    def _read_ids(self, column: Categorical, first: int, count: int) -> Wholes | Texts: ...

    @abc.abstractmethod
    def _name_row(self, row: int) -> str:
        """Where a row (from 0) is, for somebody who looks for it."""

    def train_rows_total(self) -> int:
        return self.train_rows * self.epochs

    def train_batches(self, *, batch: int, worker: int, workers: int, start: Position | None = None) -> Iterator[Batch]:
        plan = make_plan(rows=self.train_rows, epochs=self.epochs, batch=batch, worker=worker, workers=workers)
        begin = start_index(start, plan=plan, worker=worker, workers=workers)

        def generate() -> Iterator[Batch]:
            for index in range(begin, plan.batch_count, workers):
                _, first, count = plan.span(index)
                epoch, line, _ = plan.span(index + workers)
                made = self._make(first, count, {"epoch": epoch, "batch": index + workers, "line": line})
                # Nothing but bad rows: no batch, as a mean over no samples is no number.
                if len(made):
                    yield made

        return generate()

    def test_batches(self, *, batch: int) -> Iterator[Batch]:
        if batch < 1:
            raise ValueError(f"batch must be at least 1, not {batch}")
        end = self.train_rows + self._test_rows
        for index, first in enumerate(range(self.train_rows, end, batch)):
            count = min(batch, end - first)
            made = self._make(first, count, {"epoch": 0, "batch": index + 1, "line": first + count})
            if len(made):
                yield made

    # --- from columns to batches ---

    def _make(self, first: int, count: int, position: Position) -> Batch:
        dense = np.zeros((count, self.dense_features), dtype=np.float32)
        labels = np.empty(count, dtype=np.float32)
        bad = np.zeros(count, dtype=np.uint8)
        label = self._read_numbers(self._schema.label, first, count)
        found: list[Bad] = [self._parser.take_labels(0, label.values, label.valid, labels, bad)]
        for field, column in enumerate(self._schema.dense, start=1):
            given = self._read_numbers(column.column, first, count)
            found.append(self._parser.take_dense(field, given.values, given.valid, dense, bad))
        bags: list[tuple[NDArray[np.int64], NDArray[np.int32]]] = []
        for field, categorical in enumerate(self._schema.categorical, start=1 + len(self._schema.dense)):
            values, lengths, wrong = self._take_ids(field, self._read_ids(categorical, first, count), bad)
            bags.append((values, lengths))
            found.append(wrong)
        wrongs = [wrong for wrong in found if wrong is not None]
        if wrongs:
            line, field, reason = min(wrongs, key=lambda wrong: wrong[:2])
            message = f"{self._name_row(first + line)}, column {self._schema.columns[field]!r}: {reason}"
            self.note_bad(message, bad=int(bad.sum()))
            good = bad == 0
            dense, labels = dense[good], labels[good]
            bags = [(values[np.repeat(good, lengths)], lengths[good]) for values, lengths in bags]
        self.note_run(count, len(labels))
        lengths = np.concatenate([lengths for _, lengths in bags])
        return Batch(
            dense=dense,
            values=np.concatenate([values for values, _ in bags]),
            lengths=None if (lengths == 1).all() else lengths,
            labels=labels,
            position=position,
        )

    def _take_ids(self, field: int, given: Wholes | Texts, bad: NDArray[np.uint8]) -> tuple[Any, Any, Bad]:
        if isinstance(given, Wholes):
            return self._parser.take_wholes(field, given.values, given.valid, given.bags, bad)
        return self._parser.take_texts(field, given.offsets, given.text, given.valid, given.bags, bad)


def make_parser(schema: Schema, *, fields: Sequence[str], rows: Sequence[int]) -> SampleParser:
    """The kernel for columns in this order. `rows` are those of the tables, which may have fewer than the schema says:
    ids beyond are folded into them."""
    parser = SampleParser(fields=len(fields), delimiter=schema.delimiter, threshold=schema.threshold)
    place = {name: field for field, name in enumerate(fields)}
    parser.set_label(place[schema.label])
    for index, dense in enumerate(schema.dense):
        log1p = dense.transform == "log1p"
        parser.set_dense(place[dense.column], index=index, missing=dense.missing, log1p=log1p)
    for index, (column, size) in enumerate(zip(schema.categorical, rows, strict=True)):
        check_missing(schema, column, size)
        parser.set_ids(
            place[column.column],
            index=index,
            kind=column.id,
            values=column.rows,
            rows=size,
            missing=-1 if column.missing is None else column.missing,
            separator=column.separator,
            words=[word.encode(errors="surrogateescape") for word in column.words],
        )
    return parser


def check_missing(schema: Schema, column: Categorical, rows: int) -> None:
    """A table that was made smaller must still have the row of missing values, and another one beside it."""
    if column.missing is None:
        return
    least = max(column.missing + 1, 2 if column.id == "hash" else 1)
    if rows < least:
        raise UserError(
            f"{schema.path}: column {column.column!r} has its missing values in row {column.missing}, but its table is "
            f"cut to {rows} rows",
            hint=f"rows_max = {least} or more, or another row for missing values",
        )
