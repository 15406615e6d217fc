"""Criteo's click logs in their original form: tab-separated text, plain or gzip, streamed, never held whole.

The file's order is the order of training. Everything is counted in lines: the first `train_rows` lines are
for training, the rest for testing, and global batch b of an epoch is the lines from b * batch on. A
malformed line keeps its place in this count, also when it is skipped: then its batch is one sample shorter,
and no other batch, nor the test set, changes because of it.
"""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Iterator, Sequence
from io import BufferedReader
from pathlib import Path
from types import TracebackType

import numpy as np
from numpy.typing import NDArray

from regrow._kernels import parse_criteo, skip_lines
from regrow.data.batch import Batch, EpochPlan, Position, make_plan, start_index
from regrow.errors import DataError, UserError

INTEGERS = 13
CATEGORIES = 26
# When `train_rows` is not given, the last of this many equal parts is for testing: the last of Criteo's 7
# days.
PARTS = 7
# Longer lines are refused before memory is taken for them; a real one has about 250 bytes.
LINE_BYTES_MAX = 1 << 16
# Even with `skip_bad_lines`, so many bad lines in a row mean that the file is something else.
BAD_LINES_RUN_MAX = 10_000
_CHUNK_BYTES = 1 << 20
_GZIP_MAGIC = b"\x1f\x8b"


class CriteoDataset:
    """The lines of one file. Each category is hashed into its table, where row 0 is for missing ones.

    `rows` are the sizes of the 26 tables. `seed` changes nothing, as nothing here is left to chance; it is
    taken so that all data sets are made alike. `bad_lines` counts the lines this object has left out so
    far.
    """

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
        if train_rows is not None and train_rows < 1:
            raise UserError(f"train_rows must be at least 1, not {train_rows}")
        if test_rows is not None and test_rows < 0:
            raise UserError(f"test_rows must not be negative, not {test_rows}")
        if epochs < 1:
            raise UserError(f"epochs must be at least 1, not {epochs}")
        self.path = Path(path)
        self.rows = list(rows)
        self.dense_features = INTEGERS
        self.seed = seed
        self.epochs = epochs
        self.skip_bad_lines = skip_bad_lines
        self.bad_lines = 0
        self.bad_line_first: str | None = None
        self._rows = np.array(rows, dtype=np.int64)
        self._train_rows = train_rows
        self._test_rows = test_rows
        self._lines_total: int | None = None
        self._bad_run = 0
        with _Lines(self.path) as lines:  # so that a wrong file is named now and not at the first batch
            if lines.skip(1) == 0:
                raise DataError(f"{self.path} holds no lines")

    def __repr__(self) -> str:
        return f"CriteoDataset({self.path}, train_rows {self._train_rows}, bad_lines {self.bad_lines})"

    @property
    def train_rows(self) -> int:
        """Training lines in one epoch; counts the file's lines the first time if it was not told."""
        if self._train_rows is None:
            total = self.lines_total()
            self._train_rows = total - total // PARTS
        return self._train_rows

    def lines_total(self) -> int:
        """All lines of the file, counted once."""
        if self._lines_total is None:
            with _Lines(self.path) as lines:
                self._lines_total = lines.skip(1 << 62)
        return self._lines_total

    def train_rows_total(self) -> int:
        return self.train_rows * self.epochs

    def train_batches(self, *, batch: int, worker: int, workers: int, start: Position | None = None) -> Iterator[Batch]:
        plan = make_plan(rows=self.train_rows, epochs=self.epochs, batch=batch, worker=worker, workers=workers)
        index = start_index(start, plan=plan, worker=worker, workers=workers)
        offset = None
        # A position without an offset is found by counting lines.
        if start is not None and index < plan.batch_count and "offset" in start:
            offset = start["offset"]
            if not isinstance(offset, int) or offset < 0:
                raise UserError(f"position {start!r} lacks the byte offset of its line")
        return self._train(plan, index, workers, offset)

    def test_batches(self, *, batch: int) -> Iterator[Batch]:
        if batch < 1:
            raise ValueError(f"batch must be at least 1, not {batch}")
        with _Lines(self.path) as lines:
            self._skip_to(lines, self.train_rows)
            index = 0
            while self._test_rows is None or lines.line < self.train_rows + self._test_rows:
                wanted = batch
                if self._test_rows is not None:
                    wanted = min(batch, self.train_rows + self._test_rows - lines.line)
                first, count, text = lines.take(wanted)
                if count == 0:
                    break
                index += 1
                position = {"epoch": 0, "batch": index, "line": lines.line, "offset": lines.offset}
                made = self._parse(text, first, count, position)
                if len(made):
                    yield made

    # --- from lines to batches ---

    def _train(self, plan: EpochPlan, index: int, workers: int, offset: int | None) -> Iterator[Batch]:
        """Batches index, index + workers, ...; other workers' lines are passed over without a look."""
        lines: _Lines | None = None
        try:
            lines = self._seek(None, plan, index, offset)
            while index < plan.batch_count:
                assert lines is not None
                _, first, count = plan.span(index)
                _, taken, text = lines.take(count)
                self._check_length(lines, taken == count)
                # On to the next batch first: its place in the file is part of this one's position.
                index += workers
                lines = self._seek(lines, plan, index, None)
                epoch, line, _ = plan.span(index)
                here = 0 if lines is None else lines.offset
                position = {"epoch": epoch, "batch": index, "line": line, "offset": here}
                made = self._parse(text, first, count, position)
                # Nothing but bad lines: no batch, as a mean over no samples is no number.
                if len(made):
                    yield made
        finally:
            if lines is not None:
                lines.close()

    def _seek(self, lines: _Lines | None, plan: EpochPlan, index: int, offset: int | None) -> _Lines | None:
        """Lines from the start of global batch `index`, in a newly opened file when an epoch begins."""
        if index >= plan.batch_count:
            if lines is not None:
                lines.close()
            return None
        _, first, _ = plan.span(index)
        if offset is not None:
            return _Lines(self.path, line=first, offset=offset)
        if lines is None or first < lines.line:
            if lines is not None:
                lines.close()
            lines = _Lines(self.path)
        self._skip_to(lines, first)
        return lines

    def _skip_to(self, lines: _Lines, line: int) -> None:
        missing = line - lines.line
        self._check_length(lines, lines.skip(missing) == missing)

    def _check_length(self, lines: _Lines, enough: bool) -> None:
        if not enough:
            raise DataError(
                f"{self.path} has only {lines.line:,} lines, but train_rows is {self.train_rows:,}",
                hint="Lower train_rows, or leave it out to train on the first six sevenths.",
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
            self._note_bad(error, first, bad=lines - samples)
        self._note_run(lines, samples)
        # One id per feature and sample, feature-major; a copy only where bad lines left a gap.
        values = (ids if samples == count else np.ascontiguousarray(ids[:, :samples])).reshape(-1)
        return Batch(dense=dense[:samples], values=values, lengths=None, labels=labels[:samples], position=position)

    def _note_bad(self, error: tuple[int, int, str], first: int, *, bad: int) -> None:
        """Raises for the first bad line, or counts it with the others when they are to be skipped."""
        line, field, reason = error
        message = f"{self.path}, line {first + line + 1}{_field_name(field)}: {reason}"
        if not self.skip_bad_lines:
            raise DataError(message, hint="Mend the line, or leave such lines out and count them: skip_bad_lines.")
        self.bad_lines += bad
        self.bad_line_first = self.bad_line_first or message

    def _note_run(self, lines: int, samples: int) -> None:
        self._bad_run = 0 if samples else self._bad_run + lines
        if self._bad_run >= BAD_LINES_RUN_MAX:
            raise DataError(
                f"{self._bad_run:,} lines in a row are malformed; the first: {self.bad_line_first}",
                hint="This is not Criteo's format: label, 13 integers, 26 hexadecimal categories.",
            )


class _Lines:
    """A file's lines from one place on. `line` and `offset` (in the uncompressed text) are of the next."""

    def __init__(self, path: Path, *, line: int = 0, offset: int = 0) -> None:
        self.path = path
        self.line = line
        self.offset = 0
        self._ended = False
        self._buffer = np.empty(_CHUNK_BYTES + LINE_BYTES_MAX, dtype=np.uint8)
        self._text = self._buffer[:0]  # read, but not yet taken
        self._file = _open(path)
        try:
            self._start_at(offset)
        except BaseException:
            self._file.close()
            raise

    def __enter__(self) -> _Lines:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        self._file.close()

    def skip(self, count: int) -> int:
        """Passes over up to `count` lines; fewer only at the end of the file."""
        return self._advance(count, None)

    def take(self, count: int) -> tuple[int, int, NDArray[np.uint8]]:
        """(number of the first line, how many lines, their text): `count` lines, fewer only at the end."""
        first = self.line
        parts: list[NDArray[np.uint8]] = []
        taken = self._advance(count, parts)
        text = np.concatenate(parts) if parts else np.empty(0, dtype=np.uint8)
        return first, taken, text

    def _advance(self, count: int, parts: list[NDArray[np.uint8]] | None) -> int:
        done = 0
        while done < count:
            lines, size = skip_lines(self._text, lines_max=count - done, final=self._ended)
            if parts is not None and size:
                # A copy: the buffer is about to be used again.
                parts.append(self._text[:size].copy())
            self._text = self._text[size:]
            self.offset += size
            self.line += lines
            done += lines
            if done < count:
                if self._ended:
                    break
                self._fill()
        return done

    def _fill(self) -> None:
        """Reads on. What is left in the buffer is part of one line."""
        rest = len(self._text)
        if rest > LINE_BYTES_MAX:
            raise DataError(
                f"{self.path}, line {self.line + 1}: the line is longer than {LINE_BYTES_MAX:,} bytes",
                hint="This does not look like Criteo's format.",
            )
        self._buffer[:rest] = self._text.copy()
        size = self._read(self._buffer.data[rest : rest + _CHUNK_BYTES])
        self._ended = size == 0
        self._text = self._buffer[: rest + size]

    def _read(self, target: memoryview) -> int:
        try:
            return self._file.readinto(target)
        except EOFError as error:
            raise DataError(
                f"{self.path} is cut off: its gzip stream ends too early, after line {self.line}"
            ) from error
        except (gzip.BadGzipFile, zlib.error) as error:
            raise DataError(f"{self.path} is damaged after line {self.line}: {error}") from error
        except OSError as error:
            raise DataError(f"{self.path} cannot be read: {error.strerror or error}") from error

    def _start_at(self, offset: int) -> None:
        """Goes to a line's first byte: directly in a plain file, by decompressing up to it in a gzip one."""
        if offset == 0:
            return
        before = b""
        if isinstance(self._file, gzip.GzipFile):
            while self.offset < offset - 1:
                wanted = min(offset - 1 - self.offset, _CHUNK_BYTES)
                size = self._read(self._buffer.data[:wanted])
                if size == 0:
                    break
                self.offset += size
        else:
            self._file.seek(offset - 1)
        if self._read(self._buffer.data[:1]) == 1:
            before = self._buffer[:1].tobytes()
        if before != b"\n":
            raise DataError(
                f"{self.path}: no line starts at byte {offset:,}, where training is to go on",
                hint="The file is not the one that was trained on before.",
            )
        self.offset = offset


def _open(path: Path) -> BufferedReader | gzip.GzipFile:
    """A file's uncompressed bytes. The content decides whether it is gzip; the name may not contradict."""
    try:
        file = path.open("rb")
    except FileNotFoundError:
        raise DataError(f"{path} does not exist") from None
    except OSError as error:
        raise DataError(f"{path} cannot be opened: {error.strerror}") from error
    try:
        if not file.seekable():
            raise DataError(f"{path} is not a file that can be read twice", hint="Copy it to a disk first.")
        magic = file.read(len(_GZIP_MAGIC))
        file.seek(0)
        if not magic:
            raise DataError(f"{path} is empty")
        if magic == _GZIP_MAGIC:
            return _OwningGzip(file)
        if path.suffix == ".gz":
            raise DataError(f"{path} is named .gz, but is not gzip-compressed")
    except BaseException:
        file.close()
        raise
    return file


class _OwningGzip(gzip.GzipFile):
    """A gzip stream that closes the file it was given, which GzipFile leaves open."""

    def __init__(self, file: BufferedReader) -> None:
        super().__init__(fileobj=file, mode="rb")
        self._file_owned = file

    def close(self) -> None:
        super().close()
        self._file_owned.close()


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
