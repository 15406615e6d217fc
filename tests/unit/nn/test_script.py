"""Goal: a mistake in somebody's script is told with its line, however the script was named.

Method: scripts of a few lines are run in this process, as a worker runs them.
"""

from __future__ import annotations

import io
import os
import sys
from pathlib import Path

import pytest

from regrow.errors import UserError
from regrow.nn.script import Echo, _run_script

SCRIPT = "import os\nimport helper\nos.chdir('/')\nhelper.divide(0)\n"
HELPER = "def divide(by):\n    return 1 / by\n"


@pytest.mark.parametrize("name", ["mine.py", "./mine.py", "{here}/mine.py", "../mine/mine.py", "-m mine"])
def test_a_mistake_is_told_with_its_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], name: str
) -> None:
    here = tmp_path / "mine"
    here.mkdir()
    (here / "mine.py").write_text(SCRIPT)
    (here / "helper.py").write_text(HELPER)
    monkeypatch.chdir(here)
    monkeypatch.setattr(sys, "argv", list(sys.argv))
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "helper", raising=False)
    with pytest.raises(UserError, match="ZeroDivisionError: division by zero") as found:
        _run_script(name.format(here=here).split())
    assert os.getcwd() == "/", "the script went elsewhere, and its relative name still means the same"
    assert found.value.hint == "helper.py, line 2: return 1 / by (the whole traceback is in the worker's log)"
    assert capfd.readouterr().err.count("Traceback") == 1


@pytest.mark.parametrize(
    ("line", "message", "hint"),
    [
        ("sys.exit('run prepare.py first')", "the script ended: run prepare.py first", None),
        (
            "argparse.ArgumentParser('mine').parse_args(['--typo'])",
            "the script ended with exit code 2",
            "its last words: mine: error: unrecognized arguments: --typo",
        ),
        ("sys.exit(3)", "the script ended with exit code 3", None),
    ],
)
def test_an_end_is_told_with_its_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, line: str, message: str, hint: str | None
) -> None:
    (tmp_path / "mine.py").write_text(f"import argparse, sys\n{line}\n")
    monkeypatch.setattr(sys, "argv", list(sys.argv))
    monkeypatch.setattr(sys, "path", list(sys.path))
    errors = sys.stderr
    with pytest.raises(UserError) as found:
        _run_script([str(tmp_path / "mine.py")])
    assert (found.value.message, found.value.hint) == (message, hint)
    assert sys.stderr is errors


def test_standard_output_is_still_a_file(tmp_path: Path) -> None:
    """Scripts make it line-buffered, and give it to other processes."""
    heard: list[str] = []
    with (tmp_path / "log").open("w") as log:
        echo = Echo(log, heard.append)
        echo.reconfigure(line_buffering=True)
        assert echo.fileno() == log.fileno() and echo.encoding == log.encoding and not echo.isatty()
        print("one\ntw", end="", file=echo)
        print("o", file=echo)
        assert isinstance(echo, io.TextIOBase)
    assert heard == ["one", "two"]
    assert (tmp_path / "log").read_text() == "one\ntwo\n"
