"""Draws the lives of core/states.py into docs/protocol.md, and the table of waits.py into docs/failure-model.md:
`python tools/diagrams.py`, or with --check only compares.

Each table of moves becomes a list of its states and a diagram (Mermaid, which code hosts show as a picture), between
two marks in the page that nobody edits by hand.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from regrow import waits_table
from regrow.core import states

PAGE = Path(__file__).parents[1] / "docs" / "protocol.md"
WAITS_PAGE = PAGE.parent / "failure-model.md"
BEGIN_WAITS, END_WAITS = "<!-- waits: made by `make diagrams` -->", "<!-- end of waits -->"
BEGIN, END = "<!-- lives: drawn by `make diagrams` -->", "<!-- end of lives -->"


def draw(moves: states.Moves[Any]) -> str:
    """One table: its states with their sentences, then its moves."""
    lines = [f"### {moves.title[0].upper()}{moves.title[1:]}", ""]
    lines += ["| state | |", "| --- | --- |"]
    lines += [f"| {state} | {state.value} |" for state in moves.states]
    lines += ["", "```mermaid", "stateDiagram-v2", f"    [*] --> {moves.rows[0][0].name}"]
    together: dict[tuple[str, str], list[str]] = {}
    for source, cause, target in moves.rows:
        together.setdefault((source.name, target.name), []).append(cause)
    lines += [f"    {source} --> {target}: {', '.join(causes)}" for (source, target), causes in together.items()]
    return "\n".join([*lines, "```", ""])


def fill(page: str) -> str:
    """The page with every life drawn anew."""
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    drawn = "\n".join(draw(moves) for moves in states.ALL)
    return f"{before}{BEGIN}\n\n{drawn}\n{END}{after}"


def fill_waits(page: str) -> str:
    """The page with the table of waits made anew."""
    before, _, rest = page.partition(BEGIN_WAITS)
    _, _, after = rest.partition(END_WAITS)
    table = "\n".join(waits_table.render())
    return f"{before}{BEGIN_WAITS}\n{table}\n{END_WAITS}{after}"


def main() -> int:
    stale = 0
    for path, make in ((PAGE, fill), (WAITS_PAGE, fill_waits)):
        page = path.read_text()
        filled = make(page)
        stale |= int(filled != page)
        if "--check" not in sys.argv:
            path.write_text(filled)
    return stale if "--check" in sys.argv else 0


if __name__ == "__main__":
    sys.exit(main())
