"""Goal: a full disk under checkpoints, or under chunks that wait for the network, costs checkpoints and nothing else;
the user is told once, and where there is room again the next one is stored.

Method: real servers and coordinators (armed_child.py) that store to a small file system of their own, or to S3 (moto's
server) by way of one. It is filled after the first checkpoint and cleared at the third that failed; workers are slow
until then. The model must be that of an undisturbed run, to the bit, and every cut on storage a state that it passed.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import checkpoint_runs as runs
import pytest

pytest.importorskip("moto.server")
from test_full_disk import fill, mount_small
from test_s3 import environment, s3, url  # noqa: F401  (fixtures)

from regrow.checkpoint.load import verify
from regrow.checkpoint.storage import Storage
from regrow.launch.display import PlainDisplay
from regrow.launch.status import RunStatus

pytestmark = pytest.mark.live

FAILED_MIN = 3


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    path = tmp_path / "disk"
    path.mkdir()
    with mount_small(path, "size=4m,nr_inodes=2000") as disk:
        yield disk


class Mischief(PlainDisplay):
    """Fills the disk, and makes room once enough checkpoints have failed."""

    def __init__(self, disk: Path, room: Path) -> None:
        super().__init__()
        self._disk, self._room = disk, room
        self._relieved = False

    def update(self, status: RunStatus, now: float) -> None:
        super().update(status, now)
        if status.checkpoints["saved"] and not (self._disk / "ballast").exists() and not self._relieved:
            fill(self._disk)
        if status.checkpoints["failed"] >= FAILED_MIN and not self._relieved:
            self._relieved = True
            for path in [*self._disk.glob("name-*"), self._disk / "ballast"]:
                path.unlink()
            (self._room / "relieved").touch()


def run(path: Path, disk: Path, url: str, capsys: pytest.CaptureFixture[str]) -> None:  # noqa: F811
    plan = {"until": ["relieved"], "hold": 380}
    done = runs.run(path, ckpt=url, steps=400, plan=plan, every="10steps", display=Mischief(disk, path / "room"))
    cuts = runs.check(done)
    checkpoints = done.summary["checkpoints"]
    assert checkpoints["failed"] >= FAILED_MIN
    assert checkpoints["saved"] == len(cuts) >= 2
    assert "no space left there" in checkpoints["last_error"]
    assert (done.summary["restores"], done.summary["failures"]) == ([], [])
    lines = [line for line in capsys.readouterr().err.splitlines() if "failed" in line]
    assert len(lines) == 1
    assert lines[0].startswith("1 checkpoint failed: ")
    assert [problem for problem in verify(Storage.open(url)) if problem.harmful] == []


def test_storage_that_is_full(tmp_path: Path, disk: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run(tmp_path, disk, str(disk / "ckpt"), capsys)


def test_staging_that_is_full(
    tmp_path: Path,
    disk: Path,
    url: str,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The directory for temporary files of all processes, but for that of this one, in which sockets are."""
    monkeypatch.setenv("TMPDIR", str(disk))
    run(tmp_path, disk, url, capsys)
