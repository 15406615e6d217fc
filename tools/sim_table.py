"""Writes the record of long simulator runs into docs/simulator.md: `python tools/sim_table.py`; --check only compares.

The record is docs/simulator-record.json, which `make sim-night` adds to; its table stands between two marks in the page
that nobody edits by hand.
"""

from __future__ import annotations

import sys
from pathlib import Path

from regrow.sim.record import make_table, read_record

DOCS = Path(__file__).parents[1] / "docs"
PAGE, RECORD = DOCS / "simulator.md", DOCS / "simulator-record.json"
BEGIN, END = "<!-- record: written by `make sim-table` -->", "<!-- end of record -->"


def fill(page: str, table: str) -> str:
    """The page with the table in its place."""
    before, begin, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    assert begin, f"{PAGE.name} has no line {BEGIN}"
    assert end, f"{PAGE.name} has no line {END}"
    return f"{before}{BEGIN}\n\n{table}\n{END}{after}"


def main() -> int:
    page = PAGE.read_text()
    filled = fill(page, make_table(read_record(RECORD.read_bytes())))
    if "--check" in sys.argv:
        return int(filled != page)
    PAGE.write_text(filled)
    return 0


if __name__ == "__main__":
    sys.exit(main())
