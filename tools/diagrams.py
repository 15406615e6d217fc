"""Draws the lives of core/states.py into docs/protocol.md: `python tools/diagrams.py`, or with --check only compares.

Each table of moves becomes a list of its states and a diagram (Mermaid, which code hosts show as a picture), between
two marks in the page that nobody edits by hand.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from regrow.core import states

PAGE = Path(__file__).parents[1] / "docs" / "protocol.md"
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


def main() -> int:
    page = PAGE.read_text()
    filled = fill(page)
    if "--check" in sys.argv:
        return int(filled != page)
    PAGE.write_text(filled)
    return 0


if __name__ == "__main__":
    sys.exit(main())
