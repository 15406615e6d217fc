"""Goal: a run's files are whole, never replace somebody else's, and are never worth the training.

Method: real directories, odd values; writes that the system refuses, by a limit on the size of files, by a directory
that is gone, or by a fake.
"""

from __future__ import annotations

import json
import os
import resource
import shutil
import signal
from collections.abc import Iterator
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


@pytest.fixture
def run_dir(tmp_path: Path) -> Iterator[RunDir]:
    run_dir = RunDir.create(TrainConfig(out=str(tmp_path / "run")))
    yield run_dir
    run_dir.close()


@pytest.fixture
def small_files() -> Iterator[int]:
    """No file may be larger than this: writes beyond fail as on a full disk, the last one half way."""
    size = 100
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    yield size
    resource.setrlimit(resource.RLIMIT_FSIZE, before)
    signal.signal(signal.SIGXFSZ, ignored)


def test_metrics_are_whole_lines_whatever_fits(
    run_dir: RunDir, small_files: int, capsys: pytest.CaptureFixture[str]
) -> None:
    for number in range(20):
        run_dir.write_metrics({"t": number, "text": "x" * 8})
    run_dir.write_metrics({})  # shorter: there is room for it
    kept = [json.loads(line) for line in (run_dir.path / "metrics.jsonl").read_text().splitlines()]
    assert kept == [{"t": 0, "text": "x" * 8}, {"t": 1, "text": "x" * 8}, {"t": 2, "text": "x" * 8}, {}]
    output, errors = capsys.readouterr()
    assert output == ""
    assert errors.splitlines() == [
        f"warning: cannot write to {run_dir.path}/metrics.jsonl: No space left on device; training goes on, and what "
        "cannot be written is lost"
    ]


def test_summary_is_printed_if_it_cannot_be_written(
    run_dir: RunDir, small_files: int, capsys: pytest.CaptureFixture[str]
) -> None:
    summary = {"status": "ok", "text": "x" * small_files}
    assert not run_dir.write_summary(summary)
    output, errors = capsys.readouterr()
    assert json.loads(output) == summary
    assert "summary.json: File too large" in errors
    assert run_dir.write_summary({"status": "ok"})
    assert capsys.readouterr() == ("", "")


def test_directory_that_is_gone(run_dir: RunDir, capsys: pytest.CaptureFixture[str]) -> None:
    """A log is nowhere, and can be written to all the same."""
    shutil.rmtree(run_dir.path)
    for id in range(3):
        with run_dir.logs.open_log("server", id) as log:
            log.write(b"a line")
    run_dir.write_metrics({})
    assert not run_dir.write_summary({})
    output, errors = capsys.readouterr()
    assert output == "{}\n"
    assert errors.splitlines() == [
        f"warning: cannot write to {run_dir.path}/logs/server-0.log: No such file or directory; training goes on, and "
        "what cannot be written is lost"
    ]


def test_logs_are_appended_to(run_dir: RunDir) -> None:
    for _ in range(2):
        with run_dir.logs.open_log("worker", 1, 2) as log:
            log.write(b"x")
    assert (run_dir.path / "logs/worker-1.2.log").read_bytes() == b"xx"


def test_nothing_is_locked_after_a_failed_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = TrainConfig(out=str(tmp_path / "run"))

    def refuse(path: Path, data: bytes) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("regrow.launch.rundir.write_whole", refuse)
        with pytest.raises(UserError, match="No space left on device"):
            RunDir.create(config)
    RunDir.create(config, overwrite=True).close()


def test_another_launcher_goes_on_in_the_directory_of_its_run(tmp_path: Path) -> None:
    path = tmp_path / "run"
    config = TrainConfig(out=str(path))
    first = RunDir.create(config)
    first.mark("ab12")
    first.write_metrics({"step": 1})
    first.close()
    second, is_old = RunDir.go_on(path, run="ab12", config=config)
    second.write_metrics({"step": 2})
    second.close()
    assert (second.path, is_old) == (path, True)
    assert (path / "metrics.jsonl").read_text() == '{"step": 1}\n{"step": 2}\n'


def test_a_launcher_on_another_node_begins_a_directory(tmp_path: Path) -> None:
    """Of the same name, or beside what is there: another run's, or this one's with a launcher that still holds it."""
    path = tmp_path / "run"
    config = TrainConfig(out=str(path))
    new, is_old = RunDir.go_on(path, run="ab12", config=config)
    assert (new.path, is_old) == (path, False)
    beside, is_old = RunDir.go_on(path, run="ab12", config=config)
    assert (beside.path, is_old) == (tmp_path / "run-2", False)
    others, is_old = RunDir.go_on(path, run="cd34", config=config)
    assert (others.path, is_old) == (tmp_path / "run-3", False)
    assert (others.path / "config.toml").exists()
    for each in (new, beside, others):
        each.close()


def test_a_run_that_replaces_another_is_not_taken_for_it(tmp_path: Path) -> None:
    path = tmp_path / "run"
    config = TrainConfig(out=str(path))
    first = RunDir.create(config)
    first.mark("ab12")
    first.write_metrics({"step": 1})
    first.close()
    second = RunDir.create(config, overwrite=True)
    second.write_metrics({"step": 7})
    second.close()
    assert (path / "metrics.jsonl").read_text() == '{"step": 7}\n'
    third, is_old = RunDir.go_on(path, run="ab12", config=config)
    third.close()
    assert not is_old
