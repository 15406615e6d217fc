"""The example script as a user runs it: in process, and against server processes."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.live

SCRIPT = Path(__file__).parents[2] / "examples" / "train_click_model.py"


@pytest.mark.parametrize("options", [[], ["--servers", "3"]], ids=["in process", "server processes"])
def test_click_model_learns(options):
    run = subprocess.run([sys.executable, SCRIPT, *options], capture_output=True, text=True, timeout=120)
    assert run.returncode == 0, run.stderr
    losses = [float(loss) for loss in re.findall(r"loss ([\d.]+)", run.stdout)]
    assert losses[0] > 0.65  # a coin toss is 0.693
    assert losses[-1] < 0.3
