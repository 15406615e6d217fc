"""Criteo's click logs in their original form: tab-separated text, plain or gzip.

How a file is split, counted and read is in `lines.py`; what is here is what a line of this format means.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from regrow._kernels import parse_criteo
from regrow.data.batch import Batch, Position
from regrow.data.lines import LineDataset
from regrow.errors import UserError

INTEGERS = 13
CATEGORIES = 26
LINE_BYTES_MAX = 1 << 16  # a real one has about 250 bytes


class CriteoDataset(LineDataset):
    """The lines of one file. Each category is hashed into its table, where row 0 is for missing ones.

    `rows` are the sizes of the 26 tables. `seed` changes nothing, as nothing here is left to chance; it is
    taken so that all data sets are made alike.
    """

    hint_format = "This is not Criteo's format: label, 13 integers, 26 hexadecimal categories."
    line_bytes_max = LINE_BYTES_MAX

    def __init__(
        self,
        path: str | Path,
        *,
        rows: Sequence[int],
        train_rows: int | None = None,
        test_rows: int | None = None,
        seed: int = 0,
        epochs: int = 1,
        skip_bad_lines: bool = False,
    ) -> None:
        if len(rows) != CATEGORIES or min(rows) < 1:
            raise UserError(f"Criteo data needs {CATEGORIES} table sizes of at least 1, not {list(rows)}")
        self.seed = seed
        self._rows = np.array(rows, dtype=np.int64)
        super().__init__(
            path,
            rows=rows,
            dense_features=INTEGERS,
            train_rows=train_rows,
            test_rows=test_rows,
            epochs=epochs,
            skip_bad_lines=skip_bad_lines,
        )

    def _parse(self, text: NDArray[np.uint8], first: int, count: int, position: Position) -> Batch:
        """The samples of `count` whole lines, the first of which is line `first` of the file (from 0)."""
        dense = np.empty((count, INTEGERS), dtype=np.float32)
        ids = np.empty((CATEGORIES, count), dtype=np.int64)
        labels = np.empty(count, dtype=np.float32)
        lines, samples, _, error = parse_criteo(
            text,
            lines_max=count,
            final=True,
            skip_bad=self.skip_bad_lines,
            rows=self._rows,
            dense=dense,
            ids=ids,
            labels=labels,
        )
        if error is not None:
            line, field, reason = error
            self.note_bad(f"{self._name_line(first + line)}{_field_name(field)}: {reason}", bad=lines - samples)
        self.note_run(lines, samples)
        # One id per feature and sample, feature-major; a copy only where bad lines left a gap.
        values = (ids if samples == count else np.ascontiguousarray(ids[:, :samples])).reshape(-1)
        return Batch(dense=dense[:samples], values=values, lengths=None, labels=labels[:samples], position=position)


def _field_name(field: int) -> str:
    """ ", field 5 (integer 4)"; nothing for an error of the line as a whole."""
    if field == 0:
        return ""
    if field == 1:
        return ", field 1 (label)"
    if field <= 1 + INTEGERS:
        return f", field {field} (integer {field - 1})"
    if field <= 1 + INTEGERS + CATEGORIES:
        return f", field {field} (category {field - 1 - INTEGERS})"
    return f", field {field}"
