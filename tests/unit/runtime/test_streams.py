"""Goal: words for which there is no room are lost, and nothing else is.

Method: real processes whose output is the device that is always full; and a stream that a test breaks.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from regrow.config import TrainConfig
from regrow.launch.rundir import RunDir
from regrow.runtime.streams import open_lenient, write_text

FULL = Path("/dev/full")
pytestmark = pytest.mark.skipif(not FULL.exists(), reason="there is no device that is full")


def test_printing_to_a_full_disk_is_no_error() -> None:
    words = "from regrow.runtime import streams; streams.NAME(); print('x' * 9999); import warnings; warnings.warn('y')"
    for name in ("replace_standard_streams", "replace_redirected_streams"):
        with FULL.open("wb") as full:
            done = subprocess.run(
                [sys.executable, "-c", words.replace("NAME", name)], stdout=full, stderr=full, check=False
            )
        assert done.returncode == 0


def test_a_reader_that_went_away_is_an_error() -> None:
    """`| head`: nobody is there to be told anything more."""
    reader, writer = os.pipe()
    os.close(reader)
    with pytest.raises(BrokenPipeError):
        open_lenient(writer).write("x\n")
    os.close(writer)


def test_last_words_are_heard_though_the_log_is_full() -> None:
    """A process with a bug says which, also where its traceback cannot be written."""
    who = {"role": "server", "id": 0, "incarnation": 0}
    assignment = {"identity": who, "token": "not hexadecimal", "listen": "", "coordinator": None, "threads": 1}
    line = json.dumps({**assignment, "servers": 1, "frame_bytes_max": 1 << 20, "config": {}}) + "\n"
    with FULL.open("wb") as full:
        child = subprocess.Popen(
            [sys.executable, "-P", "-m", "regrow.launch.child"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=full,
            text=True,
        )
        assert child.stdin is not None and child.stdout is not None
        child.stdin.write(line)
        child.stdin.flush()
        report = json.loads(child.stdout.readline())
        child.communicate(timeout=60)
    assert (report["event"], report["kind"]) == ("error", "bug")
    assert "ValueError" in report["message"]


def test_whether_all_was_written(tmp_path: Path) -> None:
    with FULL.open("wb") as full, (tmp_path / "file").open("wb") as file:
        assert not write_text(open_lenient(full.fileno()), "lost")
        assert write_text(open_lenient(file.fileno()), "kept")
    assert (tmp_path / "file").read_text() == "kept"


def test_a_summary_that_fits_nowhere_else_goes_to_standard_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Neither the file nor standard output has room, as where both are on one disk."""
    run_dir = RunDir.create(TrainConfig(out=str(tmp_path / "run")))
    (run_dir.path / "summary.json").mkdir()
    with FULL.open("wb") as full:
        monkeypatch.setattr(sys, "stdout", open_lenient(full.fileno()))
        assert not run_dir.write_summary({"status": "ok"})
        monkeypatch.undo()
    run_dir.close()
    warning, _, text = capsys.readouterr().err.partition("\n")
    assert "training goes on" in warning
    assert json.loads(text) == {"status": "ok"}
