"""Goal: training goes on from checkpoints to the very same model, whoever dies and whoever resumes; and whatever is on
storage is a state that training passed.

Method: whole runs with real servers, coordinators and kills, most of them with workers that need no torch
(armed_child.py). Synchronous ones are compared with an undisturbed run in one process, step by step: every cut that is
left on storage is restored and its digest looked up there. Asynchronous ones count pushes in whole numbers, so the
rows of every cut say which pushes are in it. The last test does the same with a real model.
"""

from __future__ import annotations

import io
import itertools
from pathlib import Path
from typing import Any

import armed_child
import checkpoint_runs as runs
import numpy as np
import pytest

from regrow.checkpoint.load import verify
from regrow.checkpoint.storage import Storage
from regrow.config import TrainConfig
from regrow.core.names import cut_id
from regrow.launch import local
from regrow.launch.display import PlainDisplay

pytestmark = pytest.mark.live

EC_DELTA = {"protection": "ec+delta", "servers": 3, "k": 2, "r": 1, "check_parity": True}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> runs.Run:
    """A run that nothing happens to, with fulls and chains of deltas."""
    return runs.run(tmp_path_factory.mktemp("whole"), workers=2, steps=250, full_every=4, optimizer="adam")


def test_every_cut_is_a_state_that_was(whole: runs.Run) -> None:
    cuts = runs.check(whole)
    assert whole.summary["checkpoints"]["saved"] == len(cuts) >= 4
    assert whole.summary["checkpoints"]["failed"] == 0
    assert whole.summary["checkpoints"]["last"]["cut"] == cuts[-1].id
    assert whole.summary["restores"] == []
    assert all(cut.step % 20 == 0 for cut in cuts[:-1]), "where it was asked for"
    pieces = list(runs.graph(whole.url).pieces.values())
    fulls = [piece.source is None for piece in pieces]
    assert (fulls[0], fulls[1]) == (True, False)
    chain = [index for index, full in enumerate(fulls) if full]
    assert all(later - earlier == 4 for earlier, later in itertools.pairwise(chain))
    assert cut_id(cuts[0].step, "x")[:11] == cuts[0].id[:11]


def test_resume_from_an_older_cut(whole: runs.Run, tmp_path: Path) -> None:
    """A full and a delta behind it; another number of servers, another layout of rows, and parities from the start."""
    older = runs.graph(whole.url).restorable()[1]
    options = {"protection": "ec", "servers": 3, "k": 2, "check_parity": True, "optimizer": "adam", "steps": 250}
    resumed = runs.run(tmp_path, workers=2, resume=f"{whole.url}@{older.id}", **options)
    assert resumed.summary["model_sha256"] == whole.summary["model_sha256"]
    assert resumed.summary["parity_wrong"] == 0


def test_resume_from_the_newest_and_branch(whole: runs.Run, tmp_path: Path) -> None:
    """Longer than before, from where it ended, to the same storage: cuts of both runs stay what they are."""
    options = {"workers": 2, "optimizer": "adam", "steps": 300, "ckpt": whole.url, "resume": whole.url}
    resumed = runs.run(tmp_path, servers=1, **options)
    cuts = runs.check(resumed)
    assert [cut.step for cut in cuts].count(whole.config.steps) == 1


def test_a_death_is_a_step_back(tmp_path: Path) -> None:
    died = runs.run(tmp_path, protection="full", steps=200, kill=("worker:0@step:150",))
    cuts = runs.check(died)
    (restore,) = died.summary["restores"]
    assert "worker 0 was killed by SIGKILL" in restore["reason"]
    assert restore["cut"] in [cut.id for cut in cuts]
    assert 0 < restore["cut_step"] <= restore["step"]
    assert restore["stall_s"] > 0.1, "processes are started"
    assert all(piece.source is None for piece in runs.graph(died.url).pieces.values())


def test_one_server_comes_back_from_parities_and_two_from_storage(tmp_path: Path) -> None:
    kill = ("server:1@step:60", "server:0@step:200", "server:2@step:200")
    died = runs.run(tmp_path, steps=300, kill=kill, **EC_DELTA)
    runs.check(died)
    assert died.summary["parity_wrong"] == 0
    assert died.roles_lost[0] == "server"
    (restore,) = died.summary["restores"]
    assert restore["step"] >= 200
    assert 0 < restore["cut_step"] <= restore["step"]


@pytest.mark.slow
def test_new_coordinators_make_checkpoints_too(tmp_path: Path) -> None:
    """They know of none before them, so their first one stands alone. The last of them comes when the model is trained,
    and stores that."""
    plan = {"until": ["coordinator 0 life 1"]}
    kill = ("coordinator@step:50", "coordinator@step:395")
    died = runs.run(tmp_path, steps=400, kill=kill, plan=plan, **EC_DELTA)
    cuts = runs.check(died)
    assert died.roles_lost == ["coordinator"] * 2
    assert died.summary["restores"] == []
    assert died.summary["parity_wrong"] == 0
    assert sum(piece.source is None for piece in runs.graph(died.url).pieces.values()) >= 3
    assert len(cuts) >= 3


def test_training_that_waits_for_each_checkpoint(tmp_path: Path) -> None:
    paused = runs.run(tmp_path, ckpt_pause=True, every="0.3s", ckpt_encoding="zstd")
    assert len(runs.check(paused)) >= 2


@pytest.mark.slow
def test_a_merger_at_work(tmp_path: Path) -> None:
    """It folds and deletes while a server dies and all fall back: what can be restored is right all the same."""
    kill = ("server:1@step:500",)
    died = runs.run(tmp_path, steps=600, every="10steps", kill=kill, plan={"merge": True}, ckpt_keep_last=4)
    runs.check(died)
    assert died.summary["merges"]["folded"] >= 1
    assert len(died.summary["restores"]) == 1
    assert [problem for problem in verify(Storage.open(died.url)) if problem.harmful] == []


@pytest.mark.parametrize(
    ("options", "restores"), [pytest.param({}, 1, id="delta"), pytest.param(EC_DELTA, 0, id="ec+delta")]
)
def test_asynchronous_pushes_count_once(tmp_path: Path, options: dict[str, Any], restores: int) -> None:
    """With w -= g, gradients of whole numbers and rows that start at zero, a row says how often it was pushed."""
    kill = ("server:1@step:110",)
    for attempt in range(3):  # a busy machine may have stored nothing when the server dies
        run = {"mode": "async", "workers": 2, "steps": 200, "kill": kill, "full_every": 3, **options}
        died = runs.run(tmp_path / f"{attempt}", **run)
        if None not in (found := [restore["cut"] for restore in died.summary["restores"]]):
            break
    cuts = runs.check_cuts(died)
    assert [each in [cut.id for cut in cuts] for each in found] == [True] * restores
    assert cuts[-1].marks == (200, 200)
    wanted = armed_child.counted(died.config, (200, 200))
    assert died.summary["model_sha256"] == armed_child.digest(armed_child.job_of(died.config), wanted)
    assert len({cut.marks for cut in cuts}) >= 3
    assert np.abs(wanted[0]).max() < 1 << 24, "whole numbers, exactly"


def test_nothing_left_to_train(tmp_path: Path) -> None:
    """A finished run, resumed: the model is judged, and nothing is said of a speed. Then a longer one."""
    options: dict[str, Any] = {"model": "tiny", "mode": "sync", "workers": 1, "servers": 2, "batch": 64, "steps": 8}
    options |= {"test_rows": 1024}
    url, shown, result = str(tmp_path / "ckpt"), io.StringIO(), io.StringIO()

    def train(name: str, **more: Any) -> dict[str, Any]:
        config = TrainConfig(out=str(tmp_path / name), **{**options, **more})
        with runs.watched():
            return local.train(config, display=PlainDisplay(shown, result))

    wanted = train("first", protection="delta", ckpt=url)
    assert (wanted["nothing_left"], wanted["samples_trained"]) == (False, 8 * 64)
    shown.seek(0)
    again = train("again", resume=url)
    assert again["model_sha256"] == wanted["model_sha256"]
    assert (again["nothing_left"], again["samples_trained"], again["samples_per_s"]) == (True, 0, None)
    assert "nothing left to train" in shown.getvalue()
    assert "was made with --protect delta, this run has --protect none" in shown.getvalue()
    assert "nothing left to train" in result.getvalue()
    longer = train("longer", resume=url, steps=10)
    assert (longer["nothing_left"], longer["samples"], longer["samples_trained"]) == (False, 10 * 64, 2 * 64)


@pytest.mark.slow
def test_a_real_model(tmp_path: Path) -> None:
    """Undisturbed and without checkpoints; with a server that dies; and from an older cut of that run."""
    options: dict[str, Any] = {"model": "kaggle", "rows_max": 500, "mode": "sync", "workers": 1, "batch": 64}
    options |= {"steps": 30, "test_rows": 1024}

    def train(name: str, **more: Any) -> dict[str, Any]:
        with runs.watched():
            return local.train(TrainConfig(out=str(tmp_path / name), **{**options, **more}))

    url = str(tmp_path / "ckpt")
    wanted = train("undisturbed", servers=2)["model_sha256"]
    died = train("died", servers=2, protection="delta", ckpt=url, every="5steps", kill=("server:1@step:17",))
    assert died["model_sha256"] == wanted
    (restore,) = died["restores"]
    assert "server 1 was killed by SIGKILL" in restore["reason"]
    assert restore["cut_step"] <= restore["step"]  # the first may not have been stored yet
    older = f"{url}@{restore['cut']}"
    resumed = train("resumed", servers=3, protection="ec", k=2, resume=older, check_parity=True)
    assert resumed["model_sha256"] == wanted
