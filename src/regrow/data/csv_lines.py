"""CSV with a header, plain or gzip: what its lines mean is in a schema.

Fields may stand in quotes, but a line is a line: one that ends within quotes is malformed. So any place in a file can
be found by counting lines, and one bad line never takes its neighbours along.
"""

from __future__ import annotations

import csv
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from regrow.data.batch import Batch, Position
from regrow.data.columns import make_parser
from regrow.data.lines import LineDataset, Lines
from regrow.data.schema import Schema
from regrow.errors import DataError

LINE_BYTES_MAX = 1 << 20


class CsvDataset(LineDataset):
    """The lines of one file after its header. Positions and splits are those of `LineDataset`."""

    hint_format = "Is the file CSV, with the delimiter of the schema, and one line per sample?"
    line_bytes_max = LINE_BYTES_MAX
    header_lines = 1

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
        self._names = read_header(Path(path), delimiter=schema.delimiter)
        schema.check_columns(self._names, where=f"the header of {path}")
        self._parser = make_parser(schema, fields=self._names, rows=rows)
        self._dense_columns = len(schema.dense)
        super().__init__(
            path,
            rows=rows,
            dense_features=schema.dense_features,
            train_rows=train_rows,
            test_rows=test_rows,
            epochs=epochs,
            skip_bad_lines=skip_bad_lines,
        )

    def _parse(self, text: NDArray[np.uint8], first: int, count: int, position: Position) -> Batch:
        dense = np.empty((count, self._dense_columns), dtype=np.float32)
        labels = np.empty(count, dtype=np.float32)
        lines, samples, values, lengths, error = self._parser.parse(
            text, skip_bad=self.skip_bad_lines, dense=dense, labels=labels
        )
        if error is not None:
            line, field, reason = error
            column = "" if field < 0 else f", column {self._names[field]!r}"
            self.note_bad(f"{self._name_line(first + line)}{column}: {reason}", bad=lines - samples)
        self.note_run(lines, samples)
        if not self._dense_columns:
            dense = np.zeros((count, 1), dtype=np.float32)
        return Batch(dense=dense[:samples], values=values, lengths=lengths, labels=labels[:samples], position=position)


def read_header(path: Path, *, delimiter: str) -> list[str]:
    """The names in the first line."""
    with Lines(path, line_bytes_max=LINE_BYTES_MAX, hint_format=CsvDataset.hint_format) as lines:
        _, _, text = lines.take(1)
    # Names that are no text can be compared too; a mark of the byte order is none of the name.
    line = text.tobytes().decode("utf-8-sig", errors="surrogateescape").removesuffix("\n").removesuffix("\r")
    try:
        (names,) = csv.reader([line], delimiter=delimiter, strict=True)
    except (csv.Error, ValueError) as error:
        raise DataError(f"{path}, line 1: this is no header of a CSV file: {error}") from None
    return names
