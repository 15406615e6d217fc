"""Goal: with dense parameters in the workers a run ends with the model of an undisturbed one, to the bit, whoever dies
or hangs; all workers have the same bits in every step; a checkpoint has all of it; it trains what plain torch trains.

Method: one script (`ddp_script.py`) under the launcher with real processes, kills and pauses; in synchronous mode, with
Adam, a schedule and clipping. Every worker writes digests of what it had in each step.
"""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import ddp_script
import pytest
import torch
from torch import nn

import regrow
from regrow.checkpoint.export import export
from regrow.checkpoint.lineage import Graph
from regrow.checkpoint.storage import Storage

pytestmark = pytest.mark.live

SCRIPT = str(Path(ddp_script.__file__))
EC = ("--servers", "3", "--protect", "ec", "--k", "2", "--check-parity")
EXIT_DATA_LOSS = 4


def run(out: Path, *words: str, workers: int = 2, script: tuple[str, ...] = (), code: int = 0) -> str:
    command = [sys.executable, "-m", "regrow.cli", "run", "-q", "--out", str(out), "--mode", "sync", "--step-digests"]
    done = subprocess.run(
        [*command, "--workers", str(workers), *words, SCRIPT, str(out.parent / f"{out.name}.pt"), *script],
        capture_output=True,
        text=True,
        timeout=240,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        check=False,
    )
    assert done.returncode == code, done.stdout + done.stderr
    return done.stderr


def read(out: Path, *, workers: int = 2) -> dict[str, Any]:
    """The summary, when all workers had the same dense parameters in every step."""
    had: list[dict[int, str]] = []
    for worker in range(workers):
        lines = (out / "steps" / f"worker-{worker}.jsonl").read_text().splitlines()
        steps = [json.loads(line) for line in lines if line]
        had.append({each["step"]: each["dense"] for each in steps})
        for each in steps:  # a step that was made again began with the same, too
            assert had[-1][each["step"]] == each["dense"]
    assert all(each == had[0] for each in had)
    assert len(set(had[0].values())) == len(had[0])
    summary: dict[str, Any] = json.loads((out / "summary.json").read_text())
    return summary


@functools.cache
def undisturbed() -> tuple[str, dict[str, Any]]:
    """The digest, and the weights, of a run that nothing happens to."""
    with tempfile.TemporaryDirectory() as directory:
        out = Path(directory) / "run"
        run(out, "--servers", "2")
        return read(out)["model_sha256"], torch.load(Path(directory) / "run.pt")


def train_plainly(first: dict[str, Any]) -> tuple[torch.Tensor, nn.Module]:
    """One process, one batch of all workers for each step; rows and dense parameters are bound each by its worker, as
    `clip_norm` says."""
    table, top = nn.Parameter(first["rows"].clone()), ddp_script.make_top()
    top.load_state_dict(first["top"])
    optimizer = ddp_script.make_optimizer(top.parameters())
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, step_size=5, gamma=0.5)
    for step in range(ddp_script.STEPS):
        grads = []
        everything = [table, *top.parameters()]
        for worker in range(ddp_script.WORKERS):
            features, labels = ddp_script.make_batch(step * ddp_script.WORKERS + worker)
            loss = ddp_script.loss_of(table[features.values()], top, labels)
            loss.backward()
            nn.utils.clip_grad_norm_(everything, ddp_script.NORM)
            grads.append([p.grad for p in everything])
            for p in everything:
                p.grad = None
        for p, *parts in zip(everything, *grads, strict=True):
            p.grad = sum(parts) / ddp_script.WORKERS
        factor = 0.5 ** (step // 5)
        with torch.no_grad():
            table -= 0.1 * factor * table.grad
        table.grad = None
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
    return table.detach(), top


def test_it_trains_what_plain_torch_trains() -> None:
    first, last = undisturbed()[1]["first"], undisturbed()[1]["last"]
    rows, top = train_plainly(first)
    assert torch.allclose(last["rows"], rows, atol=1e-5)
    assert not torch.allclose(last["rows"], first["rows"], atol=1e-3)
    for name, weight in top.state_dict().items():
        assert torch.allclose(last["top"][name], weight, atol=1e-5), name
        assert not torch.allclose(last["top"][name], first["top"][name], atol=1e-3), name


@pytest.mark.parametrize(
    ("words", "roles"),
    [
        pytest.param(("--kill", "worker:1@step:7"), ["worker"], id="worker"),
        pytest.param(("--kill", "server:1@step:5", "--kill", "worker:0@step:9"), ["server", "worker"], id="two"),
        pytest.param(
            ("--pause", "worker:0@step:6:100000s", "--silent-seconds", "worker=4"), ["worker"], id="hung worker"
        ),
    ],
)
def test_whoever_dies_the_model_is_the_same(tmp_path: Path, words: tuple[str, ...], roles: list[str]) -> None:
    run(tmp_path / "run", *EC, *words)
    summary = read(tmp_path / "run")
    assert summary["model_sha256"] == undisturbed()[0]
    assert summary["parity_wrong"] == 0
    assert sorted(failure["role"] for failure in summary["failures"]) == roles


def test_a_worker_dies_at_the_beginning_of_a_step(tmp_path: Path) -> None:
    run(tmp_path / "run", *EC, script=("start", str(tmp_path / "marker")))
    summary = read(tmp_path / "run")
    assert summary["model_sha256"] == undisturbed()[0]
    assert [failure["role"] for failure in summary["failures"]] == ["worker"]


def test_three_workers_and_two_die(tmp_path: Path) -> None:
    run(tmp_path / "whole", "--servers", "2", workers=3)
    whole = read(tmp_path / "whole", workers=3)["model_sha256"]
    run(tmp_path / "run", *EC, "--kill", "worker:2@step:6", "--kill", "worker:0@step:6", workers=3)
    summary = read(tmp_path / "run", workers=3)
    assert summary["model_sha256"] == whole
    assert len(summary["failures"]) == 2


def test_all_workers_die(tmp_path: Path) -> None:
    """Nobody has the dense parameters: with a checkpoint all go back to it, without one it is said what is lost."""
    script = ("all", str(tmp_path / "a"))
    said = run(tmp_path / "lost", *EC, script=script, code=EXIT_DATA_LOSS)
    assert "the dense parameters behind step" in said and "all workers died at once" in said
    saving = ("--protect", "ec+delta", "--ckpt", str(tmp_path / "ckpt"), "--every", "4steps")
    run(tmp_path / "run", "--servers", "3", "--k", "2", *saving, script=("all", str(tmp_path / "b")))
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["model_sha256"] == undisturbed()[0]
    assert len(summary["restores"]) == 1


@pytest.mark.parametrize("every", ["4steps", "0.5s"])
def test_a_checkpoint_has_all_of_it(tmp_path: Path, every: str) -> None:
    """A run goes on from one in the middle, on other servers; the last one in a plain model is what was trained."""
    url = str(tmp_path / "ckpt")
    run(tmp_path / "a", "--servers", "2", "--protect", "delta", "--ckpt", url, "--every", every)
    assert read(tmp_path / "a")["model_sha256"] == undisturbed()[0]
    cuts = Graph(Storage.open(url).manifests()[0]).restorable()
    run(tmp_path / "b", "--servers", "3", "--resume", f"{url}@{cuts[0].id}")
    assert read(tmp_path / "b")["model_sha256"] == undisturbed()[0]
    plain = nn.ModuleDict({"rows": nn.EmbeddingBag(ddp_script.ROWS, ddp_script.DIM), "top": ddp_script.make_top()})
    assert list(regrow.load(url, plain, tables={"t": "rows.weight"})) == ["t"]
    trained = undisturbed()[1]["last"]
    assert torch.equal(plain["rows"].weight, trained["rows"])
    assert all(torch.equal(weight, trained["top"][name]) for name, weight in plain["top"].state_dict().items())
    shapes = {f"top.{name}": tuple(weight.shape) for name, weight in plain["top"].named_parameters()}
    found = export(Storage.open(url), None, tmp_path / "model.safetensors", dense_shapes=shapes)
    assert set(found.tensors) == {"rows.embedding_bags.t.weight", *shapes}
