"""NumPy's .npz: an array for each column, named like it. Held in memory, by every worker.

Numbers are arrays of numbers, NaN where one is missing. Ids are whole numbers or texts; a column of many values is an
array of texts with separators, or of two dimensions, with negative numbers where a bag is shorter than the others.
"""

from __future__ import annotations

import functools
import zipfile
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from regrow.data.columns import ColumnDataset, Numbers, Texts, Wholes
from regrow.data.schema import Categorical, Schema
from regrow.errors import DataError

KINDS_OF_NUMBERS = "biuf"
KINDS_OF_IDS = "biuSU"


class NpzDataset(ColumnDataset):
    """The arrays of one file. What they are is looked at first; each is loaded when it is first used."""

    hint_format = "Do the arrays hold what the schema says?"

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
        self.path = Path(path)
        headers = self._ask(lambda file: {name: read_header(file, name) for name in file.files})
        schema.check_columns(list(headers), where=str(path))
        total = headers[schema.label][0][0] if headers[schema.label][0] else 0
        for column in (schema.label, *(dense.column for dense in schema.dense)):
            self._check(column, *headers[column], total=total, kinds=KINDS_OF_NUMBERS)
        for categorical in schema.categorical:
            many = categorical.separator is not None
            self._check(categorical.column, *headers[categorical.column], total=total, kinds=KINDS_OF_IDS, many=many)
        self._load = functools.cache(lambda name: self._ask(lambda file: file[name]))
        super().__init__(
            schema=schema,
            rows=rows,
            total=total,
            name=str(path),
            train_rows=train_rows,
            test_rows=test_rows,
            epochs=epochs,
            skip_bad_lines=skip_bad_lines,
        )

    def _ask(self, question: Callable[[Any], Any]) -> Any:
        try:
            with np.load(self.path, allow_pickle=False) as file:
                return question(file)
        except FileNotFoundError:
            raise DataError(f"{self.path} does not exist") from None
        except OSError as error:
            raise DataError(f"{self.path} cannot be read: {error.strerror or error}") from None
        except (ValueError, EOFError, zipfile.BadZipFile, AttributeError, TypeError, zlib.error) as error:
            # What is no .npz at all, is cut off, or holds Python objects, which would have to be executed.
            raise DataError(f"{self.path} cannot be read: {error}", hint="numpy.savez makes such files") from None

    def _check(
        self, column: str, shape: tuple[int, ...], dtype: np.dtype[Any], *, total: int, kinds: str, many: bool = False
    ) -> None:
        where = f"{self.path}, array {column!r}"
        if dtype.kind not in kinds:
            meaning = "numbers" if kinds == KINDS_OF_NUMBERS else "ids"
            raise DataError(f"{where}: {dtype} is no type of {meaning}")
        if len(shape) != 1 and not (many and len(shape) == 2 and dtype.kind in "iu"):
            hint = "many = true in the schema, for bags of whole numbers" if len(shape) == 2 else None
            raise DataError(f"{where} has {len(shape)} dimensions", hint=hint)
        if shape[0] != total:
            raise DataError(f"{where} has {shape[0]:,} rows, but the labels have {total:,}")

    def _read_numbers(self, column: str, first: int, count: int) -> Numbers:
        return Numbers(values=np.ascontiguousarray(self._load(column)[first : first + count], dtype=np.float64))

    def _read_ids(self, column: Categorical, first: int, count: int) -> Wholes | Texts:
        part = self._load(column.column)[first : first + count]
        if part.dtype.kind in "SU":
            return pack_texts(part)
        if part.dtype == np.uint64:  # those that need all 64 bits do not come out as negative ones
            part = np.minimum(part, np.uint64((1 << 63) - 1))
        values = np.ascontiguousarray(part, dtype=np.int64)
        if values.ndim == 1:
            return Wholes(values=values)
        bags = np.arange(count + 1, dtype=np.int64) * values.shape[1]
        return Wholes(values=values.reshape(-1), valid=(values.reshape(-1) >= 0).view(np.uint8), bags=bags)

    def _name_row(self, row: int) -> str:
        return f"{self.path}, row {row}"


def read_header(file: Any, name: str) -> tuple[tuple[int, ...], np.dtype[Any]]:
    """(shape, dtype) of an array, without its values."""
    with file.zip.open(f"{name}.npy") as array:
        version = np.lib.format.read_magic(array)
        read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
        shape, _, dtype = read(array)
    return shape, dtype


def pack_texts(array: NDArray[Any]) -> Texts:
    """Texts of one width, without what fills them up."""
    if array.dtype.kind == "U":
        array = np.char.encode(array, "utf-8", "surrogateescape")
    sizes = np.char.str_len(array)
    width = array.dtype.itemsize
    grid = np.ascontiguousarray(array).view(np.uint8).reshape(len(array), width)
    offsets = np.zeros(len(array) + 1, dtype=np.int64)
    np.cumsum(sizes, out=offsets[1:])
    return Texts(offsets=offsets, text=grid[np.arange(width) < sizes[:, None]])
