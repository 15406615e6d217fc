"""Whole runs of `regrow train` with real processes.

Goal: what the README promises. Method: small runs through the launcher's own entry point; digests are compared bit
for bit, processes are counted by looking for this run's socket directory in their open files.
"""

import json
import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from regrow.config import TrainConfig
from regrow.launch import local

pytestmark = pytest.mark.live


def _train(tmp_path, name, **options):
    options = {"model": "kaggle", "rows_max": 2000, "batch": 256, "steps": 8, "test_rows": 2048, **options}
    return local.train(TrainConfig(out=str(tmp_path / name), **options))


def test_sync_gives_the_same_bits_from_run_to_run_and_for_any_number_of_servers(tmp_path):
    runs = [
        _train(tmp_path, "five", servers=5, mode="sync"),
        _train(tmp_path, "again", servers=5, mode="sync"),
        _train(tmp_path, "one", servers=1, mode="sync"),
        _train(tmp_path, "tcp", servers=3, mode="sync", transport="tcp"),
    ]
    assert len({run["model_sha256"] for run in runs}) == 1
    assert len({run["auc"] for run in runs}) == 1
    other = _train(tmp_path, "other", servers=5, mode="sync", seed=2)
    assert other["model_sha256"] != runs[0]["model_sha256"]


OTHERS = ["adagrad", "sgd", "momentum", "partial_rowwise_adam"]  # kernels and twins are compared for all in unit tests


@pytest.mark.parametrize(
    "optimizer", ["rowwise_adagrad", "adam", *(pytest.param(name, marks=pytest.mark.slow) for name in OTHERS)]
)
def test_every_optimizer_trains_and_repeats(tmp_path, optimizer):
    options = {"servers": 2, "mode": "sync", "optimizer": optimizer, "steps": 4}
    first = _train(tmp_path, "first", **options)
    second = _train(tmp_path, "second", **{**options, "servers": 3})
    assert first["model_sha256"] == second["model_sha256"]
    assert math.isfinite(first["logloss"])


def test_a_summary_says_what_was_done(tmp_path):
    summary = _train(tmp_path, "run", servers=3, workers=2)
    assert summary == json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["steps"] == 8
    assert summary["samples"] == 2 * 8 * 256
    assert (summary["mode"], summary["protection"]) == ("async", "none")
    assert (summary["servers"], summary["workers"]) == (3, 2)
    assert summary["samples_per_s"] > 0
    assert len(summary["model_sha256"]) == 64
    for role in ("coordinator", "server", "worker"):
        assert summary["peak_rss_bytes"][role] > 1 << 20
        assert summary["cpu_seconds"][role] > 0
    metrics = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert metrics[-1]["samples"] == summary["samples"]
    logs = sorted(path.name for path in (tmp_path / "run" / "logs").iterdir())
    assert logs == ["coordinator-0.log", *(f"server-{i}.log" for i in range(3)), "worker-0.log", "worker-1.log"]


def test_planted_truth_is_learned(tmp_path):
    summary = _train(tmp_path, "run", servers=2, workers=2, batch=1024, steps=60, test_rows=16384)
    assert summary["auc"] > 0.7  # a constant predictor has 0.5; the default run goes past 0.75


def test_epochs_of_a_file_with_a_short_last_batch_and_an_idle_worker(tmp_path):
    # 1050 rows are 5 batches of 256 with a short last one: in the third step worker 1 has none.
    rows = []
    for i in range(1200):
        dense = "\t".join(str((i * 7 + j) % 50) for j in range(13))
        rows.append(f"{i % 3 == 0:d}\t{dense}\t" + "\t".join(f"{(i * 31 + j) % 97:08x}" for j in range(26)))
    path = tmp_path / "clicks.tsv"
    path.write_text("\n".join(rows) + "\n")
    options = {"data": f"criteo:{path}", "steps": None, "epochs": 2, "train_rows": 1050, "test_rows": None}
    sync = _train(tmp_path, "sync", mode="sync", servers=3, **options)
    assert sync["samples"] == 2 * 1050
    assert sync["test_samples"] == 150
    assert sync["model_sha256"] == _train(tmp_path, "one", mode="sync", servers=1, **options)["model_sha256"]
    assert _train(tmp_path, "async", servers=3, **options)["samples"] == 2 * 1050


@pytest.mark.parametrize("victim", ["server", "worker"])
def test_a_killed_process_ends_the_run_and_leaves_nothing(tmp_path, victim):
    run = subprocess.Popen(
        [sys.executable, "-m", "regrow.cli", "train", "--out", str(tmp_path / "run"), "--rows-max", "2000"]
        + ["--steps", "100000", "--batch", "64", "--servers", "2", "--workers", "2"],
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        children = _wait_for(lambda: _trained_children(run.pid, tmp_path / "run"))
        os.kill(children[victim], signal.SIGKILL)
        _, said = run.communicate(timeout=60)
    finally:
        run.kill()
    assert run.returncode == 1
    assert "was killed by SIGKILL" in said
    assert "Traceback" not in said
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["status"] == "failed"
    for pid in children.values():
        assert not Path(f"/proc/{pid}").exists()


def _trained_children(parent: int, run: Path) -> dict[str, int] | None:
    """Process ids by role, once the run has made its first steps."""
    metrics = run / "metrics.jsonl"
    if not metrics.exists() or not any(
        json.loads(line)["samples"] for line in metrics.read_text().splitlines() if line.endswith("}")
    ):
        return None
    found = {}
    for path in Path("/proc").glob("[0-9]*"):
        try:
            stat = (path / "stat").read_text().rsplit(")", 1)[1].split()
            files = [os.readlink(fd) for fd in (path / "fd").iterdir()]
        except OSError:
            continue
        if int(stat[1]) == parent:
            for role in ("coordinator", "server", "worker"):
                if any(f"/logs/{role}-" in name for name in files):
                    found[role] = int(path.name)
    return found if len(found) == 3 else None


def _wait_for(condition, seconds=60.0):
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if (value := condition()) is not None:
            return value
        time.sleep(0.05)
    raise AssertionError("the run did not get going in time")


def test_peak_memory_is_that_of_the_process_alone() -> None:
    """Not of the one that started it, from which the system counts on."""
    ours = bytearray(b"x") * (200 << 20)
    script = "from regrow.runtime.parent import peak_rss_bytes; print(peak_rss_bytes())"
    found = int(subprocess.run([sys.executable, "-c", script], capture_output=True, check=True, timeout=60).stdout)
    assert 5 << 20 < found < len(ours)
