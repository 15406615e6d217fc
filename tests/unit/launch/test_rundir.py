"""Goal: a run's files are whole, and never replace somebody else's. Method: real directories, odd values."""

from __future__ import annotations

import json
import os
from datetime import datetime
from pathlib import Path

import pytest

from regrow.config import TrainConfig
from regrow.errors import UserError
from regrow.launch.rundir import RunDir, write_whole

NOON = datetime(2024, 5, 6, 12, 0, 0)


def test_name_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    config = TrainConfig(model="tiny")
    names = []
    for _ in range(3):
        run_dir = RunDir.create(config, now=NOON)
        names.append(str(run_dir.path))
        run_dir.close()
    assert names == [
        "runs/20240506-120000-tiny",
        "runs/20240506-120000-tiny-2",
        "runs/20240506-120000-tiny-3",
    ]


def test_two_runs_do_not_share_a_directory(tmp_path: Path) -> None:
    config = TrainConfig(out=str(tmp_path / "run"))
    first = RunDir.create(config)
    with pytest.raises(UserError, match="another run is writing to"):
        RunDir.create(config, overwrite=True)
    first.close()
    RunDir.create(config, overwrite=True).close()


def test_out_that_is_a_file(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.touch()
    with pytest.raises(UserError, match="is a file, not a directory"):
        RunDir.create(TrainConfig(out=str(path)))
    with pytest.raises(UserError, match=r"cannot write to .*file/run: Not a directory"):
        RunDir.create(TrainConfig(out=str(path / "run")))


def test_summary_is_json_whatever_is_in_it(tmp_path: Path) -> None:
    run_dir = RunDir.create(TrainConfig(out=str(tmp_path / "run")))
    run_dir.write_summary({"auc": float("nan"), "all": [float("inf"), {"x": (1.5, None)}]})
    text = (run_dir.path / "summary.json").read_text()
    run_dir.close()
    assert json.loads(text) == {"auc": None, "all": [None, {"x": [1.5, None]}]}


def test_metrics_can_be_read_meanwhile(tmp_path: Path) -> None:
    run_dir = RunDir.create(TrainConfig(out=str(tmp_path / "run")))
    run_dir.write_metrics({"t": 1})
    assert (run_dir.path / "metrics.jsonl").read_text() == '{"t": 1}\n'
    run_dir.close()


def test_failed_write_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "summary.json"
    write_whole(path, b"old")

    def full(fd: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        write_whole(path, b"new")
    assert path.read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["summary.json"]
