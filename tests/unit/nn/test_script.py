"""Goal: a mistake in somebody's script is told with its line, however the script was named.

Method: scripts of a few lines are run in this process, as a worker runs them.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from regrow.errors import UserError
from regrow.nn.script import _run_script

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
