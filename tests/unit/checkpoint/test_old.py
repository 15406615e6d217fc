"""Goal: checkpoints that were written before some words changed (`groups` for `rings`) are read as they were meant.

Method: the store in old/ was written by the command in its README. It is checked, listed, exported and copied, and a
run goes on from its last step with other servers and makes none: the model must have the digest that the run of then
ended with. Nothing is trained, so that it does not depend on how a machine multiplies.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from safetensors.numpy import load_file

from regrow.checkpoint import load
from regrow.checkpoint.listing import read_listing
from regrow.cli import main as cli
from regrow.config import TrainConfig
from regrow.errors import UserError
from regrow.launch import checkpoints
from regrow.runtime.checkpoint import shard_of

OLD = Path(__file__).parent / "old"
FULL, LAST = "0000002000-ddd0dc", "0000003000-a34e2d"
MODEL_SHA256 = "1e360f9325311537f2a5c782734b89249282d6f01a64e6c3603c03afa6c1e28a"
EXPORT_SHA256 = "8dfa9de8f34790e6397284bcc9f3eaee5e714513148087b64019449f4a9ac275"


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A copy, so that whatever a test does, it stays as it is; the model file is where the command found it."""
    shutil.copytree(OLD, tmp_path / "old")
    monkeypatch.chdir(tmp_path / "old")
    return "checkpoints"


def run(line: str, capsys: pytest.CaptureFixture[str]) -> str:
    assert cli.run(line.split()) == 0, capsys.readouterr().err
    return capsys.readouterr().out


def test_it_is_whole(store: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert load.verify(read_listing(store).storage, deep=True) == []
    found = json.loads(run(f"ckpt ls {store} --json", capsys))
    assert [(cut["id"], cut["restorable"]) for cut in found["cuts"]] == [(FULL, True), (LAST, True)]
    shown = json.loads(run(f"ckpt show {store}@2000 --json", capsys))
    assert shown["job"]["groups"] == shown["extra"]["config"]["groups"] == 2, "as it was stored"
    assert "2 cuts, 2 restorable" in run(f"ckpt ls {store}", capsys)


def test_its_weights_are_those_of_then(store: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run(f"ckpt restore {store} --to {tmp_path}/copy", capsys)
    for number, url in enumerate((store, f"{tmp_path}/copy")):
        target = tmp_path / f"{number}.safetensors"
        run(f"ckpt export {url}@latest --to {target}", capsys)
        assert hashlib.sha256(target.read_bytes()).hexdigest() == EXPORT_SHA256
        assert {values.shape for values in load_file(target).values()} == {(30, 2), (20, 2), (9, 2), (1, 512)}


def stored_config(store: str, **changes: Any) -> TrainConfig:
    options = read_listing(store).find_cut("latest").extra["config"]
    assert options["groups"] == 2 and options["sweep_bytes_per_s"] is None
    return TrainConfig.from_stored(options).replace(resume=store, **changes)


def test_its_configuration_is_understood(store: str) -> None:
    config = stored_config(store)
    assert (config.rings, config.sweep_bytes_per_s) == (2, 0)
    assert checkpoints.find(config) == checkpoints.Start(url=store, cut=LAST, step=3000, protection="ec+delta")
    with pytest.raises(UserError, match="was made with batch = 16, this run has 32"):
        checkpoints.find(config.replace(batch=32))


def test_shards_of_the_same_layout_have_the_same_name(store: str) -> None:
    """A merger takes rows of equally named shards for rows of one server; another name for rings must not change it."""
    piece = read_listing(store).graph.into(FULL)[0]
    job: Any = SimpleNamespace(servers=4, rings=2, tables=[SimpleNamespace(k=1, r=1)] * len(piece.tables))
    assert {chunk.shard for chunk in piece.chunks} == {shard_of(job, server) for server in range(4)}


@pytest.mark.live
@pytest.mark.parametrize("options", ["--servers 3", "--servers 4 --protect ec --k 1 --r 1 --rings 2"])
def test_a_run_goes_on_from_it(options: str, store: str) -> None:
    line = f"train --resume {store} --steps 3000 --model small.toml --batch 16 --mode sync --workers 1 --test-rows 64"
    assert cli.run(f"{line} {options} --out run --quiet".split()) == 0
    assert json.loads(Path("run/summary.json").read_text())["model_sha256"] == MODEL_SHA256
