"""Goal: a directory for sockets that fills up, is read-only or vanishes ends no training that could go on, and keeps
nobody waiting for ever; one that cannot be used from the start is an error before anything is started.

Method: real servers and coordinators (armed_child.py) whose directory for temporary files is a small file system of its
own. Workers wait at a step until the harm is done; then processes are killed whose successors need sockets. The model
must be that of an undisturbed run, to the bit.
"""

from __future__ import annotations

import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import checkpoint_runs as runs
import pytest
from test_full_disk import Mischief, fill, mount_small

from regrow.errors import ChildFailed, UserError

pytestmark = pytest.mark.live

HOLD = 30
OPTIONS: dict[str, Any] = {"protection": "ec", "servers": 3, "k": 2, "steps": 150, "check_parity": True}


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A short path: paths of sockets are limited, and a long one would not be used."""
    with tempfile.TemporaryDirectory(prefix="disk-", dir="/tmp") as path, mount_small(Path(path)) as disk:
        monkeypatch.setattr(tempfile, "tempdir", str(disk))
        yield disk


def run(path: Path, harm: Callable[[], None], *, kill: tuple[str, ...]) -> runs.Run:
    """The harm is done while workers wait; those who die do so later, one after the other."""
    room = path / "room"

    def do_harm() -> None:
        harm()
        (room / "harmed").touch()

    display = Mischief(do_harm, phase="training")
    return runs.run(path, plan={"until": ["harmed"], "hold": HOLD}, display=display, kill=kill, **OPTIONS)


def check(run: runs.Run, lost: list[str]) -> None:
    assert run.summary["status"] == "ok"
    assert run.summary["model_sha256"] == runs.undisturbed(run.config)[-1]
    assert run.summary["parity_wrong"] == 0
    assert run.roles_lost == lost


ALL_ROLES = ("server:1@step:50", "coordinator@step:75", "worker:0@step:100", "server:2@step:125")
ALL_LOST = ["server", "coordinator", "worker", "server"]


def test_a_directory_that_vanishes(tmp_path: Path, disk: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Everybody makes its door again, so that all roles can be succeeded."""

    def clear() -> None:
        (sockets,) = disk.iterdir()
        shutil.rmtree(sockets)

    check(run(tmp_path, clear, kill=ALL_ROLES), ALL_LOST)
    assert capsys.readouterr().err == ""
    assert list(disk.iterdir()) == []


def test_a_full_directory(tmp_path: Path, disk: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Two successors of servers need room, which the sockets of those before them leave; the name that each of those
    had is taken at once by somebody else here."""
    check(run(tmp_path, lambda: fill(disk), kill=ALL_ROLES), ALL_LOST)
    errors = capsys.readouterr().err.splitlines()
    assert len(errors) <= 1, "told once"


def test_a_directory_that_is_read_only(tmp_path: Path, disk: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """New servers listen at ports. The user is told, once."""

    def lock() -> None:
        subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)

    check(run(tmp_path, lock, kill=("server:1@step:50", "server:2@step:75")), ["server"] * 2)
    (line,) = capsys.readouterr().err.splitlines()
    assert "cannot make sockets in" in line
    assert "Read-only file system; training goes on, new servers listen at ports" in line


def test_a_coordinator_has_nowhere_to_go(tmp_path: Path, disk: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Everybody would look for its successor where it was. The run ends at once, and says why."""

    def lock() -> None:
        subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)

    with pytest.raises(ChildFailed, match=r"coordinator: cannot listen at unix:"):
        run(tmp_path, lock, kill=("coordinator@step:50",))
    assert "Read-only file system" in capsys.readouterr().err


def test_a_full_disk_before_the_start(tmp_path: Path, disk: Path) -> None:
    """There is room for a directory, but for nothing in it."""
    (disk / "later").mkdir()
    fill(disk)
    (disk / "later").rmdir()
    before = sorted(disk.iterdir())
    with pytest.raises(UserError, match=r"cannot make sockets in .*: No space left on device") as caught:
        runs.run(tmp_path / "unix", **OPTIONS)
    assert "TMPDIR=DIRECTORY" in str(caught.value.hint)
    assert sorted(disk.iterdir()) == before
    assert list((tmp_path / "unix" / "run" / "logs").iterdir()) == [], "nobody was started"
    fill(disk)
    check(runs.run(tmp_path / "tcp", transport="tcp", **OPTIONS), [])
