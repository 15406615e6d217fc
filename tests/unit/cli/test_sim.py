"""Goal: `regrow sim` says what it did, and what failed in a form that can be run again.

Method: the command as a user calls it, with few seeds; failures come from a planted bug.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from regrow.cli import sim as command
from regrow.errors import UserError
from regrow.sim import planted
from regrow.sim.probes import PROBES
from regrow.sim.story import parse_story


def call(*arguments: str) -> Result:
    return CliRunner().invoke(command.sim, arguments)


def test_clean_seeds_end_with_their_sums() -> None:
    done = call("--seeds", "9")
    assert done.exit_code == 0, done.output
    assert done.output.startswith("9 schedules, ")
    assert "crashes: " in done.output
    assert "recoveries: " in done.output
    assert done.output.endswith("no violation\n")


def test_processes_give_the_same_sums() -> None:
    def sums(jobs: str) -> list[str]:
        output = call("--seeds", "12", "--profile", "async", "--jobs", jobs).output
        return re.sub(r" in [^\n]*", "", output).splitlines()

    assert sums("2") == sums("1")


def test_a_failure_is_shrunk_and_can_be_replayed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(command, "SHRINK_SECONDS", 3.0)
    done = call("--seeds", "5", "--profile", "async", "--plant", "piecewise-flush")
    assert done.exit_code == 1, done.output
    found = re.search(r"regrow sim --replay '([^']+)' --plant piecewise-flush", done.output)
    assert found is not None, done.output
    tape = found.group(1)
    again = call("--replay", tape, "--plant", "piecewise-flush", "--story", "row=0")
    assert again.exit_code == 1
    assert "violated I" in again.output
    assert "row 0 of table 0" in again.output
    file = tmp_path / "tape.txt"
    file.write_text(tape + "\n")
    assert call("--replay", str(file)).exit_code == 0  # without the bug nothing is wrong


def test_the_story_of_a_row() -> None:
    done = call("--profile", "async", "--seed-first", "2", "--story", "row=1:0")
    assert done.exit_code == 0, done.output
    lines = done.output.splitlines()
    assert lines[0].startswith("row 0 of table 1 ")
    assert any("the row is " in line for line in lines)
    assert any(" View " in line for line in lines)


def test_planted_bugs_are_listed() -> None:
    done = call("--plant", "list")
    assert [line.split()[0] for line in done.output.splitlines()] == list(planted.list_bugs())


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["--plant", "nothing"], "there is no planted bug"),
        (["--replay", "nothing:1"], "begins with a profile"),
        (["--replay", "async:1-2"], "not part of a tape"),
        (["--story", "row=7"], "a story needs one run"),
        (["--profile", "async", "--story", "line=7"], "row=7"),
        (["--profile", "async", "--story", "row=7000"], "there is no row 7000"),
    ],
)
def test_mistakes_are_answered(arguments: list[str], problem: str) -> None:
    done = call(*arguments)
    assert isinstance(done.exception, UserError)
    assert problem in str(done.exception)


def test_names_of_rows() -> None:
    assert parse_story("row=7") == (0, 7)
    assert parse_story("row=1:7") == (1, 7)


def test_probes_say_why_they_matter() -> None:
    assert all(why and not why.endswith(".") for why in PROBES.values())
