"""Goal: a run directory that cannot be written any more costs what would have been written, never the training.

Method: real runs with processes that only pretend to train (fake_child.py). As soon as all of them have started, the
file system of the run directory, which is its own and small, is filled to the last byte and the last name; or the
directory is removed. Then a server is killed, so that its successor needs a log.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import ckpt_run
import pytest
from test_launch import World, world  # noqa: F401  (a fixture)

from regrow.checkpoint import export
from regrow.errors import UserError
from regrow.launch import local
from regrow.launch.display import QuietDisplay
from regrow.launch.status import RunStatus

pytestmark = pytest.mark.live

OPTIONS: dict[str, Any] = {"protection": "ec", "k": 2, "r": 1, "kill": ("server:1@step:2",)}
HOLD = {"step": 2, "for": "started-server-1.1"}


class Mischief(QuietDisplay):
    """Does something once, when all processes have started, or in another phase."""

    def __init__(self, harm: Callable[[], None], *, phase: str = "loading") -> None:
        self._harm: Callable[[], None] | None = harm
        self._phase = phase

    def update(self, status: RunStatus, now: float) -> None:
        if status.phase == self._phase and self._harm is not None:
            self._harm()
            self._harm = None


@contextlib.contextmanager
def mount_small(path: Path, options: str = "size=128k,nr_inodes=40") -> Iterator[Path]:
    mount = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(path)]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("only root can mount a file system")
    try:
        yield path
    finally:
        subprocess.run(["umount", "--lazy", str(path)], check=True)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    path = tmp_path / "disk"
    path.mkdir()
    with mount_small(path):
        yield path


def fill(disk: Path) -> None:
    """Not a byte and not a name is left."""
    with pytest.raises(OSError, match="No space"), (disk / "ballast").open("wb", buffering=0) as ballast:
        while ballast.write(b"x" * 1024):
            pass
    with pytest.raises(OSError, match="No space"):
        for number in itertools.count():
            (disk / f"name-{number}").touch()


def train(world: World, harm: Callable[[], None], **options: Any) -> dict[str, Any]:  # noqa: F811
    world.plan(hold=HOLD)
    return local.train(
        world.config(**{**OPTIONS, **options}),
        command=world.command,
        display=Mischief(harm),
        memory_check=False,
    )


def check(summary: dict[str, Any], output: str, errors: str, words: str) -> None:
    """Trained to the end, in spite of a death; the summary is on standard output; told once, in one line."""
    assert (summary["status"], summary["auc"], summary["steps_done"]) == ("ok", 0.75, 6)
    assert [failure["id"] for failure in summary["failures"]] == [1]
    assert json.loads(output) == summary
    (line,) = errors.splitlines()
    assert words in line
    assert "training goes on" in line


def test_disk_that_is_full(world: World, small_disk: Path, capsys: pytest.CaptureFixture[str]) -> None:  # noqa: F811
    world.out = small_disk / "run"
    summary = train(world, lambda: fill(small_disk))
    check(summary, *capsys.readouterr(), "No space left on device")
    world.assert_nothing_left()


def test_disk_with_room_again(world: World, small_disk: Path, capsys: pytest.CaptureFixture[str]) -> None:  # noqa: F811
    """Metrics go on, in whole lines, and the summary is written."""
    world.out = small_disk / "run"

    class Passing(Mischief):
        def update(self, status: RunStatus, now: float) -> None:
            super().update(status, now)
            if status.phase == "stopping":
                for path in small_disk.glob("*-*"):
                    path.unlink()
                (small_disk / "ballast").unlink(missing_ok=True)

    world.plan(hold=HOLD)
    display = Passing(lambda: fill(small_disk))
    summary = local.train(world.config(**OPTIONS), command=world.command, display=display, memory_check=False)
    output, errors = capsys.readouterr()
    assert (output, len(errors.splitlines())) == ("", 1)
    assert world.summary() == summary
    phases = [json.loads(line)["phase"] for line in (world.out / "metrics.jsonl").read_text().splitlines()]
    assert (phases[0], phases[-1]) == ("starting", "done")


def test_directory_that_vanishes(world: World, capsys: pytest.CaptureFixture[str]) -> None:  # noqa: F811
    summary = train(world, lambda: shutil.rmtree(world.out))
    check(summary, *capsys.readouterr(), "No such file or directory")
    world.assert_nothing_left()


def test_disk_that_is_full_before_the_start(world: World, small_disk: Path) -> None:  # noqa: F811
    fill(small_disk)
    world.out = small_disk / "run"
    with pytest.raises(UserError, match=r"cannot write to .*: No space left on device"):
        train(world, lambda: None)
    assert world.pids() == []


@pytest.mark.parametrize("format", ["safetensors", "dcp"])
@pytest.mark.parametrize("told", [True, False], ids=["told", "found out"])
def test_an_export_to_a_full_disk_leaves_nothing(
    format: str,
    told: bool,
    small_disk: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Space is reserved before a row is written, also where the file system does not say how much there is. The file is
    mapped: without a place on the disk, writing to it would end the process."""
    run = ckpt_run.fill(ckpt_run.Run(tmp_path / "url", capsys))
    (small_disk / "ballast").write_bytes(bytes(124 << 10))  # of 128
    if not told:
        monkeypatch.setattr(export, "_check_space", lambda path, size: None)
    prefix = "x" * 4096  # in front of three names: the file is larger than what is left
    target = small_disk / "model"
    line, hint = run.fails(f"ckpt export URL@400 --to {target} --format {format} --prefix {prefix}", code=2)
    assert "o space left" in line
    assert hint.endswith("are needed; export to another disk")
    assert [path.name for path in small_disk.iterdir()] == ["ballast"]
