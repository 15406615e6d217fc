"""Goal: `regrow kill RUN server:2` kills that process of that run and nothing else, or says what is not there.

Method: two launchers with processes that only pretend to train (fake_child.py) run side by side; the pid files of both
say who died. Waiting is polling with a deadline.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from test_launch import World, alive, poll

from regrow.cli import main as cli
from regrow.launch import running

pytestmark = [pytest.mark.live, pytest.mark.skipif(sys.platform != "linux", reason="there is no /proc")]


@pytest.fixture
def worlds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[World]]:
    """Two runs that have begun, named as a user would: `--out runs/a` in the current directory."""
    monkeypatch.chdir(tmp_path)
    with tempfile.TemporaryDirectory(prefix="rg-", dir="/tmp") as temp:
        found = []
        for name in ("a", "b"):
            (tmp_path / name).mkdir()
            world = World(tmp_path / name, Path(temp))
            world.out = Path("runs") / name
            world.plan(endless=True)
            world.start_regrow("--protect=ec", "--k=1", "--r=1")
            found.append(world)
        for world in found:
            poll(lambda world=world: pid(world, "worker-0") and pid(world, "server-1"), "a run did not begin")
        yield found
        for world in found:
            world.close()


def pid(world: World, stem: str) -> int | None:
    path = world.room / f"{stem}.pid"
    return int(path.read_text()) if path.exists() else None


@pytest.mark.parametrize("name", ["runs/a", "a"])
def test_the_process_of_that_run_is_killed(name: str, worlds: list[World], capsys: pytest.CaptureFixture[str]) -> None:
    ours, theirs = worlds
    victim = pid(ours, "server-1")
    assert victim is not None
    others = [each for each in (*ours.pids(), *theirs.pids()) if each != victim]
    # In training: only then a successor takes its place.
    poll(lambda: (ours.room / "started-standby-0").exists(), "no spare was started")
    assert cli.run(["kill", name, "server:1"]) == 0
    assert capsys.readouterr().out == f"killed server:1 of runs/a (process {victim})\n"
    poll(lambda: not alive(victim), "it lives on")
    poll(lambda: pid(ours, "server-1.1"), "it has no successor")
    assert all(map(alive, others))
    # Its successor may be killed as well, and is found by the same name.
    poll(lambda: [each.pid for each in running.list_processes(Path("runs/a")) if each.role == "server:1"], "not named")
    assert cli.run(["kill", name, "server:1"]) == 0
    assert capsys.readouterr().out == f"killed server:1 of runs/a (process {pid(ours, 'server-1.1')})\n"


def test_what_is_not_there_is_said(worlds: list[World], capsys: pytest.CaptureFixture[str]) -> None:
    ours, theirs = worlds

    def explain(*arguments: str) -> list[str]:
        assert cli.run(["kill", *arguments]) == 2
        return capsys.readouterr().err.splitlines()

    assert explain("a", "boss") == ["error: 'boss' is no process of a run", f"hint: it is like {running.FORMS}"]
    line, hint = explain("a", "server:7")
    assert line == "error: runs/a has no server:7 just now"
    assert hint.startswith("hint: it has coordinator, server:0, server:1, ")
    assert explain("c", "server:0")[0] == "error: there is no run c, and none in runs/"
    assert explain(str(ours.room), "server:0") == [
        f"error: {ours.room} is not the directory of a run: it has no config.toml"
    ]
    (process,) = ours.started
    process.terminate()
    process.communicate()
    assert explain("a", "server:0")[0] == "error: runs/a is not running, or belongs to another user"
    assert all(map(alive, theirs.pids()))
