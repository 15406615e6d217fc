"""Goal: what cannot work is said before anything starts: one error with what to do, exit code 2, no run directory.

Method: the command as a user types it, in an empty directory; a launcher that would start a process fails the test.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from regrow.cli import main as cli
from regrow.launch import local, precheck


@pytest.fixture(autouse=True)
def room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    def start(*_: Any, **__: Any) -> None:
        raise AssertionError("a run was begun")

    monkeypatch.setattr(local.RunDir, "create", start)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").write_text("x")
    (tmp_path / "data.tsv").write_text("1\t2\n")
    (tmp_path / "small.toml").write_text("dim = 4\nbottom = [4]\ntop = [1]\ntables = 3\ndense_features = 2\n")
    return tmp_path


def refuse(line: str, capsys: pytest.CaptureFixture[str]) -> list[str]:
    assert cli.run(["train", "--model", "tiny", *line.split()]) == 2
    output, errors = capsys.readouterr()
    assert output == ""
    assert "Traceback" not in errors
    return errors.splitlines()


CASES = {
    "--protect delta --ckpt s3x://bucket/run": [
        "error: s3x://bucket/run is not a URL that can hold checkpoints: Protocol not known: s3x",
        "hint: a directory, or a URL such as s3://bucket/run",
    ],
    "--protect full --ckpt file": [
        "error: --ckpt file: {room}/file is a file, not a directory",
        "hint: make it, or name another place",
    ],
    "--protect full --ckpt file/deep/er": [
        "error: --ckpt file/deep/er: {room}/file is a file, not a directory",
        "hint: make it, or name another place",
    ],
    "--data criteo:data.tsv --model small.toml": [
        "error: model small has 3 tables and 2 dense features; Criteo's data has 26 and 13",
        "hint: tables = 26 and dense_features = 13 in its file",
    ],
    "--data criteo:gone.tsv": ["error: data = 'criteo:gone.tsv': there is no file gone.tsv"],
}


@pytest.mark.parametrize("line", CASES)
def test_what_cannot_work(line: str, room: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert refuse(line, capsys) == [text.format(room=room) for text in CASES[line]]
    assert not (room / "runs").exists()


def test_zstd_without_its_library(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setitem(sys.modules, "zstandard", None)
    line, hint = refuse("--protect delta --ckpt c --ckpt-encoding zstd", capsys)
    assert line == "error: chunks compressed with zstd need the zstandard library, which is not installed"
    assert hint == "hint: pip install 'regrow[zstd]'"


@pytest.mark.parametrize(
    "device, count, line, hint",
    [
        ("cuda", 0, "this torch finds no CUDA device", "--device cpu, or install a CUDA build of torch"),
        ("cuda:2", 2, "there are only 2 CUDA devices, counted from 0", "--device cuda:1"),
    ],
)
def test_a_device_that_is_not_there(
    device: str, count: int, line: str, hint: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(precheck, "count_devices", lambda: count)
    assert refuse(f"--device {device}", capsys) == [f"error: --device {device}: {line}", f"hint: {hint}"]


def test_devices_are_counted_by_torch(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """By a torch that is not ours: this machine may have any number."""
    pretend = "print('a driver talks')\nprint('\\ndevices', 3)"
    monkeypatch.setattr(precheck, "ASK_FOR_DEVICES", pretend)
    assert precheck.count_devices() == 3
    monkeypatch.setattr(precheck, "ASK_FOR_DEVICES", "import no_such_torch")
    assert refuse("--device cuda", capsys) == [
        "error: torch cannot be loaded: ModuleNotFoundError: No module named 'no_such_torch'"
    ]
    monkeypatch.setattr(precheck, "DEVICE_SECONDS_MAX", 0.0)
    assert "did not say within 0 s" in refuse("--device cuda", capsys)[0]


def test_the_question_is_one_that_torch_answers() -> None:
    asked = subprocess.run([sys.executable, "-c", precheck.ASK_FOR_DEVICES], capture_output=True, text=True, check=True)
    word, count = asked.stdout.split()
    assert (word, count.isdecimal()) == ("devices", True)
