"""Goal: whoever dies while a checkpoint is written, and whatever storage does, training ends with the same model, and
storage holds nothing but states that training passed.

Method: processes that are killed at a failpoint (armed_child.py): at every write, fsync and rename that servers pass
for a chunk and the coordinator for a manifest. One run has several deaths, one after the other: each costs two or three
seconds. In CI every point is hit once, in the first full or the first delta of a life; all of them in both, with and
without parities, some minutes, are tried by

    python tests/live/test_checkpoint_faults.py

Storage that errs or hangs is a failpoint too, or a file where a directory should be. Bad input is told the command
line.
"""

from __future__ import annotations

import itertools
import json
import shutil
import sys
import tempfile
import threading
from pathlib import Path
from typing import Any

import armed_child
import checkpoint_runs as runs
import pytest

from regrow.checkpoint import failpoints
from regrow.checkpoint.load import verify
from regrow.checkpoint.storage import Storage
from regrow.cli import main as cli
from regrow.config import TrainConfig
from regrow.errors import NotSaved, RegrowError
from regrow.launch import local
from regrow.launch.display import PlainDisplay

pytestmark = pytest.mark.live

POINTS = ("mkdir_fsync", "open", "data", "fsync", "rename", "rename_fsync")
CHUNK = tuple(f"chunk.{point}" for point in ("mkdir", *POINTS))
MANIFEST = tuple(f"manifest.{point}" for point in POINTS)


def armed(points: dict[str, list[str]]) -> dict[str, Any]:
    """Each life of these processes ends at the next point. Workers are slow until the last one began."""
    return {"arm": points, "until": [f"{name} life {len(of)}" for name, of in points.items()]}


def check_files(run: runs.Run) -> None:
    """What is left of pieces that were not finished does no harm."""
    assert [problem for problem in verify(Storage.open(run.url)) if problem.harmful] == []


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> runs.Run:
    """A run whose storage fails now and then, not for long."""
    plan = {"arm": {"server 0": ["chunk.fsync:1:raise"], "coordinator 0": ["manifest.data:1:raise:2"]}}
    return runs.run(tmp_path_factory.mktemp("small"), steps=80, plan=plan)


def test_the_points_that_are_passed(small: runs.Run) -> None:
    """If this changes, so must the points that are tried below. Who makes a directory is a matter of luck."""
    passed = {name: set(armed_child.passed(small.room, name)) for name in ("server 0", "server 1", "coordinator 0")}
    assert passed["server 0"] | passed["server 1"] == set(CHUNK)
    # A cut that comes too late is named again, and what it may have left behind is deleted.
    deletes = {name for name in failpoints.NAMES if "delete" in name}
    assert passed["coordinator 0"] - deletes == set(MANIFEST)
    written = {name for name in failpoints.NAMES if name.startswith(("chunk.", "manifest."))} - deletes
    assert written == {*CHUNK, *MANIFEST, "manifest.mkdir", "chunk.put", "manifest.put"}


def die_and_fall_back(path: Path, points: dict[str, list[str]]) -> runs.Run:
    """All processes begin anew after each death."""
    run = runs.run(path, steps=200, every="10steps", plan=armed(points))
    cuts = runs.check(run)
    check_files(run)
    assert len(run.summary["restores"]) == max(map(len, points.values())), points
    known = {None, *(cut.id for cut in cuts)}
    assert {restore["cut"] for restore in run.summary["restores"]} <= known
    return run


def die_with_parities(path: Path, points: dict[str, list[str]]) -> None:
    """Only whoever dies begins anew."""
    options = {"protection": "ec+delta", "servers": 3, "k": 2, "check_parity": True}
    run = runs.run(path, steps=500, every="10steps", plan=armed(points), **options)
    runs.check(run)
    check_files(run)
    wanted = [name.partition(" ")[0] for name, of in points.items() for _ in of]
    assert sorted(run.roles_lost) == sorted(wanted), points
    assert run.summary["restores"] == []
    assert run.summary["parity_wrong"] == 0


def test_deaths_while_storing(tmp_path: Path) -> None:
    """Of all servers where a directory is made: only one of them may come by. At first there is nothing to fall back
    to."""
    both = ["chunk.mkdir:1:exit", "", "chunk.mkdir_fsync:2:exit", ""]
    torn = ["chunk.mkdir:1:exit", "", "chunk.mkdir_fsync:2:exit", "chunk.data:2:tear"]
    chief = ["", "manifest.rename_fsync:1:exit", "", ""]
    run = die_and_fall_back(tmp_path, {"server 0": both, "server 1": torn, "coordinator 0": chief})
    assert run.summary["restores"][0]["cut"] is None


def test_deaths_while_storing_with_parities(tmp_path: Path) -> None:
    """Of a server and of coordinators, as it happens at the same time or one after the other."""
    server = ["open:2:exit", "fsync:1:exit", "rename:2:exit", "rename_fsync:1:exit"]
    chief = ["mkdir_fsync:1:exit", "open:2:exit", "data:1:tear", "fsync:2:exit", "rename:1:exit"]
    points = {"server 1": [f"chunk.{point}" for point in server]}
    points["coordinator 0"] = [f"manifest.{point}" for point in chief]
    die_with_parities(tmp_path, points)


def test_what_was_begun_before_a_fall_back_is_cleared_away(tmp_path: Path) -> None:
    """All servers have stored their part, and the coordinator dies with half a manifest."""
    plan = {"arm": {"coordinator 0": ["manifest.data:1:tear"]}, "until": ["coordinator 0 life 1"], "merge": True}
    run = runs.run(tmp_path, plan=plan)
    runs.check(run)
    assert len(run.summary["restores"]) == 1
    said = "".join(log.read_text() for log in (tmp_path / "run" / "logs").glob("merger*"))
    assert said.count("unfinished, and whoever wrote it has ended") == run.summary["merges"]["deleted"] == 1


def test_training_that_waits_for_a_checkpoint_outlives_its_coordinator(tmp_path: Path) -> None:
    """It dies with the manifest half written, while no server applies anything. Twice: also the next one's first."""
    points = {"coordinator 0": ["manifest.data:1:tear", "manifest.rename:1:exit"]}
    options = {"protection": "ec+delta", "servers": 3, "k": 2, "ckpt_pause": True, "steps": 200}
    run = runs.run(tmp_path, plan={**armed(points), "hold": 150}, **options)
    assert run.roles_lost == ["coordinator"] * 2
    assert run.summary["restores"] == []
    runs.check(run)


# --- Checkpoints that are damaged ---


def damaged_run(path: Path, *, which: slice) -> tuple[runs.Run | RegrowError, list[str]]:
    """A run with some of its pieces damaged before a server is killed. Also their names."""
    url, room, names = path / "ckpt", path / "room", list[str]()
    options: dict[str, Any]

    def damage() -> None:
        while len(Storage.open(str(url)).pieces()) < 3 and not over.wait(0.05):
            pass
        for piece in list(runs.graph(str(url)).pieces.values())[which]:
            file = url / piece.name / piece.chunks[0].name
            file.write_bytes(file.read_bytes()[:-1] + b"?")
            names.append(piece.name)
        (room / "damaged").touch()

    over = threading.Event()
    helper = threading.Thread(target=damage)
    helper.start()
    plan = {"until": ["damaged"], "hold": 200}
    options = {"steps": 250, "every": "10steps", "full_every": 100, "kill": ("server:1@step:220",)}
    try:
        return runs.run(path, plan=plan, **options), names
    except RegrowError as error:
        return error, names
    finally:
        over.set()
        helper.join()


def test_a_damaged_checkpoint_is_passed_over(tmp_path: Path) -> None:
    """The second piece: what was stored since starts from it. The first stands alone, and is taken."""
    run, (piece,) = damaged_run(tmp_path, which=slice(1, 2))
    assert isinstance(run, runs.Run), run
    assert run.summary["model_sha256"] == runs.undisturbed(run.config)[-1]
    newest, older = run.summary["restores"]
    assert newest["cut"] != older["cut"] == next(iter(runs.graph(run.url).cuts))
    assert f"cut {newest['cut']} cannot be restored, there is no way around: {piece}/" in older["reason"]
    assert [what.partition("/")[0] for what in older["damage"]] == [piece]


def test_no_checkpoint_without_damage_is_the_end(tmp_path: Path) -> None:
    """The first piece: nothing can be restored. To begin from nothing would throw away what was trained."""
    error, (piece,) = damaged_run(tmp_path, which=slice(0, 1))
    assert isinstance(error, RegrowError), error
    assert f"{piece}/" in error.message
    assert "no older checkpoint can be restored either" in error.message
    assert "regrow ckpt verify" in str(error.hint)


def test_a_damaged_checkpoint_that_was_asked_for_is_refused(tmp_path: Path, small: runs.Run) -> None:
    """By name or as the newest: whoever asks for it decides what to take instead."""
    url = tmp_path / "ckpt"
    shutil.copytree(small.url, url)
    newest = runs.graph(str(url)).restore_plan()[0]
    last = newest.pieces[-1]
    file = url / last.name / last.chunks[0].name
    file.write_bytes(file.read_bytes()[:-1] + b"?")
    for wish in (str(url), f"{url}@{newest.target.id}"):
        with pytest.raises(RegrowError, match=f"cut {newest.target.id} cannot be restored") as caught:
            runs.run(tmp_path / f"run {len(wish)}", resume=wish, ckpt=str(tmp_path / "other"))
        assert f"{last.name}/{file.name}" in caught.value.message
        assert "the newest without it is @" in str(caught.value.hint)


# --- Storage that fails ---


def test_storage_that_errs_costs_a_checkpoint(tmp_path: Path) -> None:
    """A server's first chunk, and then a manifest: both are tried three times. The next checkpoints are there."""
    plan = {"arm": {"server 1": ["chunk.data:1:raise:3"], "coordinator 0": ["manifest.rename:1:raise:3"]}}
    run = runs.run(tmp_path, steps=300, plan={**plan, "until": ["raised manifest.rename 2"]})
    cuts = runs.check(run)
    check_files(run)
    checkpoints = run.summary["checkpoints"]
    assert (checkpoints["failed"], checkpoints["saved"]) == (2, len(cuts))
    assert "manifest.json: failpoint manifest.rename" in checkpoints["last_error"]
    assert (run.summary["restores"], run.summary["failures"]) == ([], [])


def test_a_disk_that_fills_up_costs_a_checkpoint(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A server's second chunk does not fit. The user is told, training goes on, and where there is room again the next
    checkpoint is stored: of all that changed since the last."""
    plan = {"arm": {"server 1": ["chunk.data:2:full"]}, "until": ["raised chunk.data 0"], "hold": 100}
    run = runs.run(tmp_path, plan=plan, display=PlainDisplay())
    cuts = runs.check(run)
    checkpoints = run.summary["checkpoints"]
    assert (checkpoints["failed"], checkpoints["saved"]) == (1, len(cuts))
    assert "no space left there" in checkpoints["last_error"]
    assert f"1 checkpoint failed: {checkpoints['last_error']}" in capsys.readouterr().err
    assert (run.summary["restores"], run.summary["failures"]) == ([], [])


def test_storage_that_errs_for_a_moment_is_not_noticed(small: runs.Run) -> None:
    runs.check(small)
    assert small.summary["checkpoints"]["failed"] == 0


@pytest.mark.parametrize("point", ["chunk.data", "manifest.data"])
def test_storage_that_hangs_does_not_stop_training(tmp_path: Path, point: str) -> None:
    """Workers come to step 100 while it hangs, and only then it goes on."""
    name = "server 1" if point.startswith("chunk") else "coordinator 0"
    plan = {"arm": {name: [f"{point}:1:hang"]}, "go on at": 100}
    run = runs.run(tmp_path, plan=plan)
    cuts = runs.check(run)
    assert (run.room / "hangs").exists()
    assert [cut.step < 100 for cut in cuts].count(True) == 1, "the one that hung"
    assert run.summary["checkpoints"]["failed"] == 0


@pytest.fixture
def unchecked(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if storage had been sound when it was looked at, before the run."""
    monkeypatch.setattr(local, "check_start", lambda config: None)


@pytest.mark.usefixtures("unchecked")
def test_no_place_for_checkpoints_until_somebody_makes_one(tmp_path: Path) -> None:
    """A file where the directory should be."""
    url = tmp_path / "ckpt"
    url.write_text("in the way")
    log = tmp_path / "run" / "run" / "logs" / "coordinator-0.log"

    def clear() -> None:
        while "no checkpoint" not in (log.read_text() if log.exists() else "") and not over.wait(0.02):
            pass
        url.unlink()

    over = threading.Event()
    helper = threading.Thread(target=clear)
    helper.start()
    try:
        run = runs.run(tmp_path / "run", ckpt=str(url))
    finally:
        over.set()
        helper.join()
    cuts = runs.check(run)
    checkpoints = run.summary["checkpoints"]
    assert checkpoints["failed"] >= 1
    assert checkpoints["saved"] == len(cuts) >= 2
    assert str(url) in checkpoints["last_error"]


@pytest.mark.usefixtures("unchecked")
def test_no_place_for_checkpoints_at_all(tmp_path: Path) -> None:
    """The model is trained and judged all the same; that it is not stored is an error with a code of its own."""
    (tmp_path / "ckpt").write_text("in the way")
    with pytest.raises(NotSaved, match="the model is trained, but its checkpoint failed 3 times: ") as caught:
        runs.run(tmp_path / "run", ckpt=str(tmp_path / "ckpt"), steps=60)
    assert caught.value.exit_code == 5
    assert "no checkpoint of this run is stored" in str(caught.value.hint)
    summary = json.loads((tmp_path / "run" / "run" / "summary.json").read_text())
    assert (summary["status"], summary["error"]) == ("not saved", caught.value.message)
    assert summary["model_sha256"] == runs.undisturbed(TrainConfig(**{**runs.SMALL, "steps": 60, "ckpt": "c"}))[-1]
    assert summary["checkpoints"]["saved"] == 0
    assert summary["checkpoints"]["failed"] >= 3
    assert str(tmp_path / "ckpt") in summary["checkpoints"]["last_error"]


def test_storage_that_fails_at_the_end(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Every manifest after the first is refused. Results are shown before the error; the newest that is stored is
    named."""
    plan = {"arm": {"coordinator 0": ["manifest.open:2:raise:1000"]}}
    with pytest.raises(NotSaved, match=r"failpoint manifest\.open") as caught:
        runs.run(tmp_path, plan=plan, display=PlainDisplay())
    assert "test" in capsys.readouterr().out
    (cut,) = runs.graph(str(tmp_path / "ckpt")).cuts
    assert f"the newest that is stored is {cut}" in str(caught.value.hint)


# --- Bad input ---


def told(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str]:
    """Exit code and first line of what the command line says, without starting anything."""
    code = cli.run(["train", "--model", "tiny", "--steps", "10", "--quiet", *arguments])
    said = capsys.readouterr().err
    assert "Traceback" not in said
    return code, said.splitlines()[0]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--protect", "delta"], "needs a place for checkpoints"),
        (["--ckpt", "somewhere"], "makes no checkpoints"),
        (["--protect", "delta", "--ckpt", "c", "--every", "sometimes"], "is not an interval"),
        (["--protect", "delta", "--ckpt", "c", "--every", "0s"], "--every"),
        (["--protect", "delta", "--ckpt", "c", "--every", "0steps"], "--every"),
        (["--protect", "delta", "--ckpt", "c", "--every", "-5s"], "--every"),
        (["--protect", "delta", "--ckpt", "c", "--full-every", "0"], "--full-every"),
        (["--protect", "delta", "--ckpt", "c", "--ckpt-bits", "7"], "--ckpt-bits"),
    ],
)
def test_options_that_cannot_be(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], said: str
) -> None:
    code, line = told(capsys, "--out", str(tmp_path / "run"), *arguments)
    assert code == 2
    assert said in line
    assert not (tmp_path / "run").exists()


def test_a_checkpoint_that_is_not_there(tmp_path: Path, small: runs.Run, capsys: pytest.CaptureFixture[str]) -> None:
    same = ["--batch", "16", "--workers", "1", "--mode", "sync", "--servers", "2", "--out", str(tmp_path / "run")]
    code, line = told(capsys, *same, "--resume", str(tmp_path / "nowhere"))
    assert code in (1, 2)
    assert "there is no checkpoint" in line
    code, line = told(capsys, *same, "--resume", f"{small.url}@77")
    assert code in (1, 2)
    assert "no cut is '77'; there " in line
    code, line = told(capsys, *same, "--resume", "nonsense://x")
    assert code in (1, 2)
    assert "not a URL" in line


def test_a_checkpoint_of_another_job(tmp_path: Path, small: runs.Run) -> None:
    with pytest.raises(RegrowError, match="workers"):
        runs.run(tmp_path / "workers", resume=small.url, protection="none", workers=2)
    with pytest.raises(RegrowError, match="mode"):
        runs.run(tmp_path / "mode", resume=small.url, protection="none", mode="async")
    with pytest.raises(RegrowError, match="table t0 is another one: states") as caught:
        runs.run(tmp_path / "tables", resume=small.url, protection="none", optimizer="adam")
    assert "\n" not in caught.value.message


# --- All of them ---


def try_all(path: Path) -> None:
    """Every point in the first full and the first delta of a life, and torn files; with and without parities."""
    actions = [(point, "exit") for point in (*CHUNK, *MANIFEST)] + [("chunk.data", "tear"), ("manifest.data", "tear")]
    for count, kind in itertools.product((1, 2), ("chunk", "manifest")):
        points = [f"{point}:{count}:{action}" for point, action in actions if point.startswith(kind)]
        for first in range(0, len(points), 4):
            some = points[first : first + 4]
            print(*some, flush=True)
            names = ("server 0", "server 1") if kind == "chunk" else ("coordinator 0",)
            die_and_fall_back(path / f"{kind} {count} {first}", dict.fromkeys(names, some))
            # Who makes a directory is a matter of luck, and here there is only one that is armed.
            some = [point for point in some if not point.startswith("chunk.mkdir")]
            die_with_parities(path / f"{kind} {count} {first} ec", {names[-1]: some})


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as directory:
        try_all(Path(directory))
    sys.exit(0)
