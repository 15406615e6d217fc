"""Parquet: a file, or a directory of files in the order of their names. A row group at a time is in memory.

Needs pyarrow, which is no dependency of ours: `pip install "regrow[parquet]"`.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from regrow.data.columns import ColumnDataset, Numbers, Texts, Wholes
from regrow.data.schema import Categorical, Schema
from regrow.errors import DataError, UserError


def load_pyarrow() -> tuple[Any, Any, Any]:
    """pyarrow, with its compute and Parquet parts; UserError if it is not installed."""
    try:
        import pyarrow
        import pyarrow.compute
        import pyarrow.parquet
    except ImportError:
        raise UserError(
            "Parquet files need pyarrow, which is not installed", hint='pip install "regrow[parquet]"'
        ) from None
    return pyarrow, pyarrow.compute, pyarrow.parquet


class ParquetDataset(ColumnDataset):
    """The rows of one or more files."""

    hint_format = "Do the columns hold what the schema says?"

    def __init__(
        self,
        path: str | Path,
        *,
        schema: Schema,
        rows: Sequence[int],
        train_rows: int | None = None,
        test_rows: int | None = None,
        epochs: int = 1,
        skip_bad_lines: bool = False,
    ) -> None:
        self._arrow, self._compute, self._parquet = load_pyarrow()
        self.path = Path(path)
        self.files = list_files(self.path)
        # Of every row group: its file, and its number there; and where it ends among all rows.
        self._groups: list[tuple[int, int]] = []
        sizes: list[int] = []
        self._forms: dict[str, str] = {}
        for index, file in enumerate(self.files):
            opened = self._open(file)
            schema.check_columns(opened.schema_arrow.names, where=str(file))
            for column, form in find_forms(self._arrow, schema, opened.schema_arrow, file).items():
                self._forms[column] = merge_forms(self._forms.get(column, form), form, column=column, file=file)
            counts = [opened.metadata.row_group(number).num_rows for number in range(opened.metadata.num_row_groups)]
            self._groups += [(index, number) for number in range(len(counts))]
            sizes += counts
        self._ends = list(itertools.accumulate(sizes))
        self._loaded: tuple[int, Any] | None = None  # the number of a group, and its table
        self._window: tuple[int, int, Any] | None = None  # the rows of one batch
        super().__init__(
            schema=schema,
            rows=rows,
            total=sum(sizes),
            name=str(path),
            train_rows=train_rows,
            test_rows=test_rows,
            epochs=epochs,
            skip_bad_lines=skip_bad_lines,
        )

    def _open(self, file: Path) -> Any:
        try:
            return self._parquet.ParquetFile(file)
        except FileNotFoundError:
            raise DataError(f"{file} does not exist") from None
        except (OSError, self._arrow.ArrowException) as error:
            raise DataError(f"{file} cannot be read: {error}", hint="is it a Parquet file?") from None

    # --- rows by number ---

    def _load_group(self, group: int) -> Any:
        if self._loaded is None or self._loaded[0] != group:
            index, number = self._groups[group]
            self._loaded = None  # two groups are never in memory
            file = self.files[index]
            try:
                # One thread: a worker has its own share of the processors.
                table = self._open(file).read_row_group(number, columns=self._schema.columns, use_threads=False)
                arrays = {column: self._convert(table.column(column), form) for column, form in self._forms.items()}
            except (OSError, self._arrow.ArrowException) as error:
                raise DataError(f"{file}, row group {number} cannot be read: {error}") from None
            self._loaded = group, self._arrow.table(arrays)
        return self._loaded[1]

    def _load_rows(self, first: int, count: int) -> Any:
        """A table of these rows; the columns of a batch come from one."""
        if self._window is None or self._window[:2] != (first, count):
            pieces = []
            at = first
            while at < first + count:
                group = bisect.bisect_right(self._ends, at)
                begin = self._ends[group - 1] if group else 0
                size = min(first + count, self._ends[group]) - at
                pieces.append(self._load_group(group).slice(at - begin, size))
                at += size
            self._window = first, count, self._arrow.concat_tables(pieces)
        return self._window[2]

    def _name_row(self, row: int) -> str:
        group = bisect.bisect_right(self._ends, row)
        index, number = self._groups[group]
        first = group - number  # the first group of this file
        return f"{self.files[index]}, row {row - (self._ends[first - 1] if first else 0)}"

    # --- columns ---

    def _convert(self, column: Any, form: str) -> Any:
        """A column in its form, whatever its type is in this file: numbers, wholes, texts, or lists of the last two."""
        arrow = self._arrow
        target = {NUMBERS: arrow.float64(), WHOLES: arrow.int64(), TEXTS: arrow.large_binary()}[
            form.removesuffix(LISTS)
        ]
        chunks = []
        for chunk in column.chunks:
            values = chunk
            if form.endswith(LISTS):
                sizes = self._compute.list_value_length(chunk).fill_null(0).to_numpy(zero_copy_only=False)
                values = chunk.flatten()
            values = convert_values(arrow, values, target)
            if form.endswith(LISTS):
                values = arrow.LargeListArray.from_arrays(
                    np.concatenate([[0], np.cumsum(sizes, dtype=np.int64)]), values
                )
            chunks.append(values)
        return arrow.chunked_array(chunks, arrow.large_list(target) if form.endswith(LISTS) else target)

    def _take(self, column: str, first: int, count: int) -> Any:
        array = self._load_rows(first, count).column(column).combine_chunks()
        return self._arrow.concat_arrays(array.chunks) if isinstance(array, self._arrow.ChunkedArray) else array

    def _read_numbers(self, column: str, first: int, count: int) -> Numbers:
        array = self._take(column, first, count)
        values = array.fill_null(0.0).to_numpy(zero_copy_only=False)
        return Numbers(values=np.ascontiguousarray(values), valid=self._find_valid(array))

    def _read_ids(self, column: Categorical, first: int, count: int) -> Wholes | Texts:
        array, bags = self._take(column.column, first, count), None
        form = self._forms[column.column]
        if form.endswith(LISTS):
            bags = np.array(array.offsets)
            bags -= bags[0]
            array = array.flatten()
        valid = self._find_valid(array)
        if form.removesuffix(LISTS) == WHOLES:
            values = array.fill_null(0).to_numpy(zero_copy_only=False)
            return Wholes(values=np.ascontiguousarray(values), valid=valid, bags=bags)
        if len(array) == 0:
            return Texts(offsets=np.zeros(1, np.int64), text=np.zeros(0, np.uint8), bags=bags)
        _, offsets, text = array.buffers()
        places = np.frombuffer(offsets, np.int64)[array.offset : array.offset + len(array) + 1]
        letters = np.zeros(0, np.uint8) if text is None else np.frombuffer(text, np.uint8)
        return Texts(offsets=places, text=letters, valid=valid, bags=bags)

    def _find_valid(self, array: Any) -> NDArray[np.uint8] | None:
        if not array.null_count:
            return None
        return np.ascontiguousarray(array.is_valid().to_numpy(zero_copy_only=False)).view(np.uint8)


def list_files(path: Path) -> list[Path]:
    """The file, or all of a directory, in the order of their names: so their rows are in the same order everywhere."""
    if not path.is_dir():
        return [path]
    found = sorted(file for file in path.rglob("*.parquet") if file.is_file() and not file.name.startswith(("_", ".")))
    if not found:
        raise DataError(f"{path} holds no files that are named *.parquet")
    return found


# What a column is read as. Files may differ in the type of a column, but not in whether it has lists.
NUMBERS, WHOLES, TEXTS, LISTS = "numbers", "wholes", "texts", " in lists"


def find_forms(arrow: Any, schema: Schema, found: Any, file: Path) -> dict[str, str]:
    """What each column is read as; DataError for the first that cannot be what the schema says."""
    types, forms = arrow.types, {}
    for column in (schema.label, *(dense.column for dense in schema.dense)):
        kind = found.field(column).type
        plain = types.is_integer(kind) or types.is_floating(kind) or types.is_boolean(kind)
        if not (plain or types.is_decimal(kind) or types.is_timestamp(kind) or types.is_date64(kind)):
            raise DataError(f"{file}, column {column!r}: {kind} is no type of numbers")
        forms[column] = NUMBERS
    for categorical in schema.categorical:
        kind, lists = found.field(categorical.column).type, ""
        if types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind):
            if categorical.separator is None:
                raise DataError(f"{file}, column {categorical.column!r} has lists", hint="many = true in the schema")
            kind, lists = kind.value_type, LISTS
        forms[categorical.column] = find_id_form(arrow, kind, f"{file}, column {categorical.column!r}") + lists
    return forms


def find_id_form(arrow: Any, kind: Any, where: str) -> str:
    types = arrow.types
    if types.is_dictionary(kind):
        kind = kind.value_type
    if types.is_string(kind) or types.is_large_string(kind) or types.is_binary(kind) or types.is_large_binary(kind):
        return TEXTS
    if types.is_integer(kind) or types.is_boolean(kind):
        return TEXTS if kind == arrow.uint64() else WHOLES  # the largest are no whole numbers of ours
    raise DataError(
        f"{where}: {kind} is no type of ids",
        hint="ids are whole numbers or texts; pandas makes Int64 of whole numbers with gaps",
    )


def merge_forms(left: str, right: str, *, column: str, file: Path) -> str:
    """Whole numbers and texts are texts together."""
    if left.endswith(LISTS) != right.endswith(LISTS):
        raise DataError(f"{file}, column {column!r}: lists in some files, and none in others")
    return left if left == right else TEXTS + (LISTS if left.endswith(LISTS) else "")


def convert_values(arrow: Any, values: Any, target: Any) -> Any:
    if arrow.types.is_dictionary(values.type):
        values = values.dictionary_decode()
    if arrow.types.is_boolean(values.type):
        values = values.cast(arrow.uint8())
    elif arrow.types.is_temporal(values.type):
        values = values.cast(arrow.int64())
    if target == arrow.large_binary() and arrow.types.is_integer(values.type):
        values = values.cast(arrow.large_string())
    return values.cast(target, safe=False)
