"""Text files of one sample per line, plain or gzip, streamed, never held whole: what all their formats share.

The file's order is the order of training. Everything is counted in lines: the first `train_rows` lines are
for training, the rest for testing, and global batch b of an epoch is the lines from b * batch on. A
malformed line keeps its place in this count, also when it is skipped: then its batch is one sample shorter,
and no other batch, nor the test set, changes because of it. What a line means is the format's business.
"""

from __future__ import annotations

import abc
import gzip
import zlib
from collections.abc import Iterator, Sequence
from io import BufferedReader
from pathlib import Path
from types import TracebackType

import numpy as np
from numpy.typing import NDArray

from regrow._kernels import skip_lines
from regrow.data.bad_lines import BadLines
from regrow.data.batch import Batch, EpochPlan, Position, make_plan, start_index
from regrow.errors import DataError, UserError

# When `train_rows` is not given, the last of this many equal parts is for testing: the last of Criteo's 7
# days.
PARTS = 7
_CHUNK_BYTES = 1 << 20
_GZIP_MAGIC = b"\x1f\x8b"


class LineDataset(BadLines, abc.ABC):
    """The lines of one file."""

    # Longer lines are refused before memory is taken for them.
    line_bytes_max: int
    header_lines = 0  # at the front of the file, not counted

    def __init__(
        self,
        path: str | Path,
        *,
        rows: Sequence[int],
        dense_features: int,
        train_rows: int | None,
        test_rows: int | None,
        epochs: int,
        skip_bad_lines: bool,
    ) -> None:
        super().__init__(skip_bad_lines=skip_bad_lines)
        check_counts(train_rows=train_rows, test_rows=test_rows, epochs=epochs)
        self.path = Path(path)
        self.rows = list(rows)
        self.dense_features = dense_features
        self.epochs = epochs
        self._train_rows = train_rows
        self._test_rows = test_rows
        self._lines_total: int | None = None
        with self._open() as lines:  # so that a wrong file is named now and not at the first batch
            if lines.skip(1) == 0:
                after = " after its header" if self.header_lines else ""
                raise DataError(f"{self.path} holds no lines{after}")

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.path}, train_rows {self._train_rows}, bad_lines {self.bad_lines})"

    @abc.abstractmethod
    def _parse(self, text: NDArray[np.uint8], first: int, count: int, position: Position) -> Batch:
        """The samples of `count` whole lines, the first of which is line `first` (from 0)."""

    @property
    def train_rows(self) -> int:
        """Training lines in one epoch; counts the file's lines the first time if it was not told."""
        if self._train_rows is None:
            self._train_rows = split_rows(self.lines_total())
        return self._train_rows

    def lines_total(self) -> int:
        """All lines of the file, counted once."""
        if self._lines_total is None:
            with self._open() as lines:
                self._lines_total = lines.skip(1 << 62)
        return self._lines_total

    def _open(self, *, line: int = 0, offset: int = 0) -> Lines:
        return Lines(
            self.path,
            line=line,
            offset=offset,
            header_lines=self.header_lines,
            line_bytes_max=self.line_bytes_max,
            hint_format=self.hint_format,
        )

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
        with self._open() as lines:
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
        lines: Lines | None = None
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

    def _seek(self, lines: Lines | None, plan: EpochPlan, index: int, offset: int | None) -> Lines | None:
        """Lines from the start of global batch `index`, in a newly opened file when an epoch begins."""
        if index >= plan.batch_count:
            if lines is not None:
                lines.close()
            return None
        _, first, _ = plan.span(index)
        if offset is not None:
            return self._open(line=first, offset=offset)
        if lines is None or first < lines.line:
            if lines is not None:
                lines.close()
            lines = self._open()
        self._skip_to(lines, first)
        return lines

    def _skip_to(self, lines: Lines, line: int) -> None:
        missing = line - lines.line
        self._check_length(lines, lines.skip(missing) == missing)

    def _check_length(self, lines: Lines, enough: bool) -> None:
        if not enough:
            raise DataError(
                f"{self.path} has only {lines.line:,} lines, but train_rows is {self.train_rows:,}",
                hint="Lower train_rows, or leave it out to train on the first six sevenths.",
            )

    def _name_line(self, line: int) -> str:
        """As an editor counts."""
        return f"{self.path}, line {line + self.header_lines + 1}"


class Lines:
    """A file's lines from one place on. `line` and `offset` (in the uncompressed text) are of the next."""

    def __init__(
        self,
        path: Path,
        *,
        line_bytes_max: int,
        hint_format: str,
        line: int = 0,
        offset: int = 0,
        header_lines: int = 0,
    ) -> None:
        self.path = path
        self.line = line
        self._header_lines = header_lines
        self._line_bytes_max = line_bytes_max
        self._hint_format = hint_format
        self.offset = 0
        self._ended = False
        self._buffer = np.empty(_CHUNK_BYTES + line_bytes_max, dtype=np.uint8)
        self._text = self._buffer[:0]  # read, but not yet taken
        self._file = _open(path)
        try:
            self._start_at(offset)
        except BaseException:
            self._file.close()
            raise

    def __enter__(self) -> Lines:
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
        if rest > self._line_bytes_max:
            raise DataError(
                f"{self.path}, line {self.line + self._header_lines + 1}: the line is longer than "
                f"{self._line_bytes_max:,} bytes",
                hint=self._hint_format,
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
            self._advance(self._header_lines, None)
            self.line = 0
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


def check_counts(*, train_rows: int | None, test_rows: int | None, epochs: int) -> None:
    """What was asked for is possible at all."""
    if train_rows is not None and train_rows < 1:
        raise UserError(f"train_rows must be at least 1, not {train_rows}")
    if test_rows is not None and test_rows < 0:
        raise UserError(f"test_rows must not be negative, not {test_rows}")
    if epochs < 1:
        raise UserError(f"epochs must be at least 1, not {epochs}")


def split_rows(total: int) -> int:
    """How many of all samples are for training, where nobody has said so."""
    return total - total // PARTS
