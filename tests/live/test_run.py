"""Goal: a script of somebody's own runs alone and under the launcher, survives what `regrow train` survives, goes on
from checkpoints, and every mistake in it is one message that says where.

Method: the example as it stands, and scripts written here, with real processes and kills. Synchronous runs end with one
digest, whatever was killed.
"""

from __future__ import annotations

import ast
import functools
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest

from regrow.checkpoint.lineage import Graph
from regrow.checkpoint.storage import Storage

pytestmark = pytest.mark.live

EXAMPLE = Path(__file__).parents[2] / "examples" / "train_deepfm.py"
SMALL = ["--samples", "5120", "--epochs", "2"]  # 20 steps of two workers
SYNC = ["--mode", "sync", "--workers", "2"]
COMMAND = [sys.executable, "-m", "regrow.cli"]


def run(*words: str, cwd: Path | None = None, code: int = 0) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        [*COMMAND, "run", *words],
        capture_output=True,
        text=True,
        timeout=240,
        cwd=cwd,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        check=False,
    )
    assert done.returncode == code, done.stdout + done.stderr
    return done


def train(out: Path, *words: str, script: tuple[str, ...] = (str(EXAMPLE), *SMALL)) -> dict[str, Any]:
    run("-q", "--out", str(out), *words, *script)
    summary: dict[str, Any] = json.loads((out / "summary.json").read_text())
    return summary


@functools.cache
def undisturbed() -> str:
    """The digest of a run that nothing happens to and nothing protects."""
    with tempfile.TemporaryDirectory() as directory:
        summary = train(Path(directory) / "run", *SYNC, "--servers", "2")
    assert summary["steps"] == 20
    assert summary["samples"] == 2 * 5120
    return str(summary["model_sha256"])


def test_alone_it_is_a_script_like_any_other() -> None:
    done = subprocess.run(
        [sys.executable, EXAMPLE, "--samples", "25600"],
        capture_output=True,
        text=True,
        timeout=240,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert ast.literal_eval(done.stdout.splitlines()[-1])["auc"] > 0.7
    assert "leaked" not in done.stderr


@pytest.mark.parametrize(
    "kills",
    [("server:1@step:5",), ("worker:0@step:7",), ("server:2@step:4", "worker:1@step:9", "coordinator@step:6")],
    ids=["server", "worker", "one of each"],
)
def test_it_survives_and_the_model_is_the_same(tmp_path: Path, kills: tuple[str, ...]) -> None:
    chosen = [word for kill in kills for word in ("--kill", kill)]
    summary = train(tmp_path / "run", *SYNC, "--servers", "3", "--protect", "ec", "--k", "2", "--check-parity", *chosen)
    assert summary["model_sha256"] == undisturbed()
    assert summary["parity_wrong"] == 0
    assert len(summary["failures"]) == len(kills)


def test_it_falls_back_to_a_checkpoint_and_goes_on_from_one(tmp_path: Path) -> None:
    script = (str(EXAMPLE), "--samples", "20480", "--epochs", "1")  # 40 steps of two workers
    whole = train(tmp_path / "whole", *SYNC, "--servers", "2", script=script)["model_sha256"]
    saving = ("--protect", "delta", "--ckpt", str(tmp_path / "ckpt"), "--every", "4steps")
    fallen = train(tmp_path / "a", *SYNC, "--servers", "3", *saving, "--kill", "server:1@step:36", script=script)
    assert fallen["model_sha256"] == whole
    assert len(fallen["restores"]) == 1
    cut = Graph(Storage.open(str(tmp_path / "ckpt")).manifests()[0]).restorable()[0]
    where = f"{tmp_path / 'ckpt'}@{cut.id}"
    resumed = train(tmp_path / "b", *SYNC, "--servers", "4", "--resume", where, script=script)
    assert resumed["model_sha256"] == whole
    assert resumed["steps"] == 40


def test_asynchronously_every_batch_counts_once(tmp_path: Path) -> None:
    summary = train(
        tmp_path / "run",
        *("--servers", "3", "--workers", "2", "--protect", "ec", "--k", "2"),
        *("--kill", "server:0@step:5", "--kill", "worker:1@step:8"),
    )
    assert summary["steps_done"] == 40
    assert summary["samples"] == 2 * 5120
    assert summary["metrics"]["auc"] > 0.5


# -- what a script may do, and what it may not ------------------------------------------------------------

HEAD = """
import sys, torch, regrow
from torch import nn
job = regrow.join()
tables = [regrow.EmbeddingBagConfig(num_embeddings=50, embedding_dim=4, name="t", feature_names=["f"])]
model = job.dense(nn.ModuleList([job.embedding_bag_collection(tables), nn.Linear(4, 1)]))
def make(n):
    lengths = torch.ones(8, dtype=torch.int32)
    return regrow.KeyedJaggedTensor(["f"], torch.arange(8) + n, lengths)
batches = [make(n) for n in range(12)]
def loss_of(batch):
    return model[1](model[0](batch).values()).square().mean()
"""
LOOP = "for batch in job.loop(batches):\n    job.step(loss_of(batch))\n"


def write(path: Path, *parts: str) -> str:
    script = path / "script.py"
    script.write_text("".join(parts))
    return str(script)


def fail(path: Path, *parts: str, words: tuple[str, ...] = ()) -> str:
    """What the user is told of a script that goes wrong; once, and without a traceback."""
    done = run("-q", "--out", str(path / "run"), "--servers", "2", *words, write(path, *parts), code=1)
    assert "Traceback" not in done.stderr
    assert done.stderr.count("error:") == 1
    return done.stderr


def test_what_it_prints_is_seen_once(tmp_path: Path) -> None:
    script = write(tmp_path, HEAD, LOOP, "print('done by', sys.argv[1:])\n")
    done = run("-q", "--out", str(tmp_path / "run"), "--workers", "2", "--servers", "2", script, "--x", "1")
    assert done.stdout.splitlines() == ["done by ['--x', '1']"]


def test_what_it_logs_is_in_the_metrics(tmp_path: Path) -> None:
    script = write(tmp_path, HEAD, LOOP, "    job.log(mine=4.5)\n")
    train(tmp_path / "run", "--servers", "2", script=(script,))
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert lines[-1]["logged"] == {"mine": 4.5}


def test_a_module_is_as_good(tmp_path: Path) -> None:
    package = tmp_path / "mine"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "go.py").write_text(HEAD + LOOP + "print(__name__, sys.argv[1:])\n")
    done = run("-q", "--out", str(tmp_path / "run"), "--servers", "2", "-m", "mine.go", "a", cwd=tmp_path)
    assert done.stdout.splitlines() == ["__main__ ['a']"]


def test_an_exception_is_told_with_its_line(tmp_path: Path) -> None:
    said = fail(tmp_path, HEAD, "for batch in job.loop(batches):\n    {}['nothing here']\n", words=("--workers", "2"))
    assert "KeyError: 'nothing here'" in said
    assert "worker " in said
    assert "line 14: {}['nothing here']" in said


def test_mistakes_with_the_job_are_told(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    (tmp_path / "c").mkdir()
    assert "did not join the run" in fail(tmp_path / "a", "print('hello')\n")
    assert "joins twice" in fail(tmp_path / "b", HEAD, "regrow.join()\n")
    assert "was left without job.step" in fail(tmp_path / "c", HEAD, "for batch in job.loop(batches): pass\n")


def test_an_exit_code_is_passed_on(tmp_path: Path) -> None:
    assert "ended with exit code 3" in fail(tmp_path, HEAD, LOOP, "sys.exit(3)\n")


def test_tables_that_differ_between_workers(tmp_path: Path) -> None:
    script = HEAD.replace("num_embeddings=50", "num_embeddings=50 + job.worker")
    said = fail(tmp_path, script, LOOP, words=("--workers", "2"))
    assert "table 't' has rows = 5" in said


def test_before_anything_starts(tmp_path: Path) -> None:
    def refuse(*words: str) -> str:
        done = run(*words, code=2)
        return done.stderr

    assert "there is no script nowhere.py" in refuse("nowhere.py")
    assert "no script is named" in refuse()
    assert "No such option" in refuse("--batch", "3", str(EXAMPLE))
