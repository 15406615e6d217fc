"""Bytes of a process's stdout become reports; what is none goes to its log. However the bytes came here."""

from __future__ import annotations

from collections.abc import Callable

from regrow.launch.lines import parse_report
from regrow.launch.reports import AnyReport, Malformed, Stopped

REPORT_BYTES_MAX = 1 << 20  # a longer line is not a report, and goes to the log cut short


class ReportReader:
    """Of one process. `on_garbage` is told lines that are no reports: a library printed them."""

    def __init__(self, on_garbage: Callable[[bytes], None]) -> None:
        self.peak_rss_bytes: int | None = None  # by its own account
        self._on_garbage = on_garbage
        self._pending = b""

    def feed(self, chunk: bytes) -> list[AnyReport | Malformed]:
        """The reports that are whole now."""
        reports: list[AnyReport | Malformed] = []
        *lines, self._pending = (self._pending + chunk).split(b"\n")
        for line in lines:
            if (report := parse_report(line)) is not None:
                reports.append(report)
                if isinstance(report, Stopped):
                    self.peak_rss_bytes = report.peak_rss_bytes
            elif line.strip():
                self._on_garbage(line)
        if len(self._pending) > REPORT_BYTES_MAX:
            self._on_garbage(self._pending)
            self._pending = b""
        return reports
