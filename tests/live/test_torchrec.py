"""Goal: models that nobody here wrote, TorchRec's own, survive deaths under the launcher and end with equal weights.

Method: a script with `torchrec.models` and two synchronous workers on five servers, once undisturbed and once with a
server and a worker killed; the digests of the two runs are one. That outputs and training are TorchRec's is in
tests/unit/nn/test_torchrec_models.py. Skipped where TorchRec is not installed.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    pytest.importorskip("torchrec", exc_type=ImportError)  # also where something that it needs is missing

pytestmark = pytest.mark.live

SCRIPT = Path(__file__).with_name("torchrec_script.py")
STEPS = 20
KILLS = ("server:2@step:6", "worker:1@step:12")


def train(out: Path, model: str, *words: str) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, "-m", "regrow.cli", "run", "-q", "--out", str(out)]
        + ["--mode", "sync", "--workers", "2", "--servers", "5", *words, str(SCRIPT), model],
        capture_output=True,
        text=True,
        timeout=240,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    summary: dict[str, Any] = json.loads((out / "summary.json").read_text())
    return summary


@pytest.mark.parametrize(
    "model",
    ["DLRM", pytest.param("DLRM_DCN", marks=pytest.mark.slow), pytest.param("SimpleDeepFMNN", marks=pytest.mark.slow)],
)
def test_a_model_of_torchrec_survives_and_is_the_same(tmp_path: Path, model: str) -> None:
    undisturbed = train(tmp_path / "undisturbed", model)
    kills = [word for kill in KILLS for word in ("--kill", kill)]
    summary = train(tmp_path / "killed", model, "--protect", "ec", "--k", "4", "--check-parity", *kills)
    assert undisturbed["steps"] == summary["steps"] == STEPS
    assert sorted(failure["role"] for failure in summary["failures"]) == ["server", "worker"]
    assert summary["parity_wrong"] == 0
    assert summary["model_sha256"] == undisturbed["model_sha256"]
