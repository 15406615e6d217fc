"""Texts that teach the protocol, and hold it to what they say.

Goal: each scenario prints exactly what its file says, and each of the seventeen holes is a text that walks into it.
Method: the commands of a file are played on real machines, and the whole text is compared. With the bug of that name
planted (`regrow.sim.planted`) the same text must come out different: else it passes the hole by.
`pytest tests/scenarios --rewrite` writes the texts anew.
"""

from __future__ import annotations

import difflib
import re
from pathlib import Path

import pytest
from scenarios.script import play

from regrow.sim.planted import plant

FOLDER = Path(__file__).parent
FILES = sorted(FOLDER.glob("*.txt"))
HOLES = (
    "epoch-fencing",
    "stream-without-marks",
    "one-applied",
    "piecewise-push",
    "flush-before-snapshot",
    "deltas-before-answers",
    "late-faults",
    "piecewise-flush",
    "marks-only-with-rows",
    "durable-waits-for-streams",
    "restart-from-applied",
    "pulls-not-resent",
    "silent-without-rows",
    "no-undo",
    "touched-bits-lost",
    "frames-not-resent",
    "one-epoch",
)
PLANTED = {hole: hole for hole in HOLES} | {
    "a-cut-for-a-checkpoint": "held-for-ever",
    "the-last-checkpoint": "wish-forgotten",
    "durable-without-a-commit": "durable-uncommitted",
    "durable-without-an-answer": "durable-unanswered",
}
BROKEN_PATCH = re.compile(r"error at .*: (AttributeError|TypeError|NameError): .*")  # not what a bug does


def _subject(path: Path) -> str:
    """The name of a scenario without its place in the reading order."""
    return re.sub(r"^\d\d-", "", path.stem)


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_scenario(path: Path, request: pytest.FixtureRequest) -> None:
    text = path.read_text()
    played = play(text)
    if request.config.getoption("--rewrite", default=False):
        path.write_text(played)
        return
    diff = "\n".join(difflib.unified_diff(text.splitlines(), played.splitlines(), "the file", "now", lineterm=""))
    assert text == played, f"{path.name} prints something else (--rewrite takes it over):\n{diff}"


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_scenario_ends_well(path: Path) -> None:
    text = path.read_text()
    assert text.startswith("# "), f"{path.name} does not say what it is about"
    assert "error at" not in text, f"{path.name} has a command that failed"
    end = text.rstrip().splitlines()[-1]
    assert end == "every push is in its rows exactly once, and the parities fit", f"{path.name} ends with: {end}"


@pytest.mark.parametrize("subject", PLANTED)
def test_planted_bug_shows(subject: str) -> None:
    bug = PLANTED[subject]
    paths = [path for path in FILES if _subject(path) == subject]
    assert len(paths) == 1, f"there must be one scenario for {subject}, not {len(paths)}"
    text = paths[0].read_text()
    try:
        with plant(bug):
            played = play(text)
    except AttributeError as error:
        pytest.fail(f"the bug {bug} of {paths[0].name} cannot be planted: {error}")
    broken = BROKEN_PATCH.search(played)
    assert broken is None, f"the patch of the bug {bug} does not fit the code any more: {broken}"
    assert played != text, f"{paths[0].name} prints the same with the bug {bug} planted: it passes the hole by"
    assert play(text) == text, f"{paths[0].name} is out of date, or the bug {bug} is still in force"


def test_ten_come_first() -> None:
    numbers = [path.stem[:2] for path in FILES if path.stem[:2].isdigit()]
    assert numbers == [f"{number:02}" for number in range(1, 11)]
