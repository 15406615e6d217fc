"""Samples that cannot be read: the first ends the run and is named, or all are left out and counted."""

from __future__ import annotations

from regrow.errors import DataError

# Even with `skip_bad_lines`, so many bad lines in a row mean that the file is something else.
BAD_LINES_RUN_MAX = 10_000


class BadLines:
    """What every data set from a file does with lines, or rows of a table, that are malformed. `bad_lines` counts those
    this object has left out so far."""

    # Of the format: what to say of a file that is something else.
    hint_format: str

    def __init__(self, *, skip_bad_lines: bool) -> None:
        self.skip_bad_lines = skip_bad_lines
        self.bad_lines = 0
        self.bad_line_first: str | None = None
        self._bad_run = 0

    def note_bad(self, message: str, *, bad: int) -> None:
        """Raises for the first bad line, or counts it with the others when they are to be skipped."""
        if not self.skip_bad_lines:
            raise DataError(message, hint="Mend the line, or leave such lines out and count them: skip_bad_lines.")
        self.bad_lines += bad
        self.bad_line_first = self.bad_line_first or message

    def note_run(self, lines: int, samples: int) -> None:
        self._bad_run = 0 if samples else self._bad_run + lines
        if self._bad_run >= BAD_LINES_RUN_MAX:
            raise DataError(
                f"{self._bad_run:,} lines in a row are malformed; the first: {self.bad_line_first}",
                hint=self.hint_format,
            )
