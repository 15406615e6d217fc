"""Goal: what is installed works without the sources. Method: the tool that builds a wheel and uses it elsewhere."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

TOOL = Path(__file__).parents[2] / "tools" / "wheel.py"


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_wheel_works_outside_the_tree(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, TOOL, "--out", tmp_path], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    (wheel,) = tmp_path.glob("regrow-*.whl")
    assert done.stdout.splitlines()[-1] == f"{wheel} works"
