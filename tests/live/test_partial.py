"""Goal: with partial recovery whoever dies, training goes on, and what is lost is exactly what is said.

Method: whole runs with real processes, killed at steps and at failpoints (armed_child.py), in which rows count pushes
(partial_runs.py): what is missing in them at the end must be the number reported.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
from checkpoint_runs import undisturbed
from partial_runs import check, count_lost, list_saved, partial

from regrow.launch import checkpoints
from regrow.launch.partial import PartialPlan, Planner, make_full

pytestmark = pytest.mark.live

MODES = ["sync", "async"]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("priority", ["none", "ssu", "mfu", "scar"])
def test_what_is_lost_is_what_is_said(tmp_path: Path, mode: str, priority: str) -> None:
    found = partial(tmp_path, mode=mode, priority=priority, kill=("server:1@step:75",))
    check(found, roles=["server"], loses=None if priority != "none" else True)
    partial_summary = found.summary["partial"]
    assert partial_summary["saves"] > 0
    assert partial_summary["pls"] is not None
    (failure,) = found.summary["failures"]
    assert failure["samples_lost"] >= 0 and failure["load_s"] > 0.0


@pytest.mark.parametrize(
    ("kills", "options"),
    [
        (("server:0@step:70", "server:2@step:70"), {}),
        (("server:1@step:70", "server:2@step:70"), {"r": 2}),
        (("server:1@step:50", "server:1@step:55", "server:1@step:120"), {}),
    ],
)
def test_several_deaths(tmp_path: Path, kills: tuple[str, ...], options: dict[str, Any]) -> None:
    found = partial(tmp_path, mode="sync", kill=kills, priority="mfu", **options)
    check(found, roles=["server"] * len(kills))


@pytest.mark.parametrize("mode", MODES)
def test_a_server_that_hangs_for_good_goes_back_as_one_that_died(tmp_path: Path, mode: str) -> None:
    """It is stopped, and not dead: whatever it still has to say, and to save, comes to nothing."""
    soon = {"silent_seconds": "server=1.5,worker=20,coordinator=20,spare=20", "patience": "3s"}
    found = partial(tmp_path, mode=mode, pause=("server:1@step:75:100000s",), **soon)
    check(found, roles=["server"], loses=None)
    (failure,) = found.summary["failures"]
    assert failure["server"] == 1 if "server" in failure else failure["id"] == 1


def test_a_server_that_wakes_up_after_it_was_replaced_saves_for_nobody(tmp_path: Path) -> None:
    soon = {"silent_seconds": "server=1.5,worker=20,coordinator=20,spare=20", "patience": "3s"}
    found = partial(tmp_path, mode="async", every="10steps", pause=("server:2@step:60:4s",), **soon)
    check(found, roles=["server"] * len(found.roles_lost), loses=None)


def test_before_the_first_save_rows_begin_again(tmp_path: Path) -> None:
    found = partial(tmp_path, mode="async", every="1000steps", kill=("server:3@step:60",))
    check(found, roles=["server"])
    assert found.summary["partial"]["saves"] == 0


@pytest.mark.parametrize(
    ("point", "life"), [("manifest.data:2:exit", 0), ("manifest.rename:2:exit", 0), ("manifest.rename:1:exit", 1)]
)
def test_killed_while_it_saves_or_comes_back(tmp_path: Path, point: str, life: int) -> None:
    arm = {"server 2": ["", ""][:life] + [point]}
    kills = ("server:2@step:70",) if life else ()
    found = partial(tmp_path, mode="async", kill=kills, plan={"arm": arm})
    check(found, roles=["server"] * (1 + life), loses=None)


def test_the_coordinator_dies_meanwhile(tmp_path: Path) -> None:
    found = partial(tmp_path, mode="sync", kill=("server:1@step:75", "coordinator@step:75", "worker:0@step:76"))
    check(found, roles=["server", "coordinator", "worker"])


def test_storage_that_fails_costs_saves_and_not_training(tmp_path: Path) -> None:
    arm = {"server 1": ["chunk.data:2:full:2"]}
    found = partial(tmp_path, mode="async", every="10steps", kill=("server:1@step:100",), plan={"arm": arm})
    check(found, roles=["server"], loses=None)
    assert found.summary["partial"]["saves_failed"] > 0


def test_saves_that_cannot_be_read_are_gone_around(tmp_path: Path) -> None:
    """Everybody goes back to a checkpoint of all servers, and no wrong row is served."""
    found = partial(
        tmp_path,
        mode="sync",
        every="20steps",
        kill=("server:1@step:100",),
        plan={"spoil": "server 1"},
        learning_rate=0.03,
        optimizer="rowwise_adagrad",
    )
    assert found.summary["status"] == "ok"
    assert len(found.summary["restores"]) == 1
    assert found.summary["model_sha256"] == undisturbed(found.config)[-1]


@pytest.mark.parametrize("priority", ["none", "ssu", "mfu", "scar"])
def test_without_a_failure_nothing_changes(tmp_path: Path, priority: str) -> None:
    """The same model as without any protection, to the bit."""
    options = {"learning_rate": 0.03, "optimizer": "rowwise_adagrad", "mode": "sync", "priority": priority}
    found = partial(tmp_path, **options)
    assert found.summary["model_sha256"] == undisturbed(found.config)[-1]
    assert found.summary["partial"]["updates_lost"] == 0
    assert found.summary["partial"]["pls"] == 0.0


@pytest.mark.parametrize("priority", ["ssu", "mfu"])
def test_two_synchronous_runs_save_the_same_rows(
    tmp_path: Path, priority: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpoints, "clear_saves", lambda config, *, run: None)  # to be looked at
    first, second = (
        list_saved(partial(tmp_path / name, mode="sync", priority=priority, every="400steps")) for name in "ab"
    )
    assert first == second
    assert any(first.values())


def test_everybody_goes_back_once_that_is_cheaper(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The planner changes its mind while the run goes on: the next loss is one of nothing, by full recovery."""
    plan = Planner.plan

    def plan_full(self: Planner, **known: Any) -> PartialPlan:
        made = plan(self, **known)
        return dataclasses.replace(made, full=make_full(self.config, 1.0))

    monkeypatch.setattr(Planner, "plan", plan_full)
    found = partial(tmp_path, mode="sync", kill=("server:1@step:75",))
    assert found.summary["status"] == "ok"
    assert len(found.summary["restores"]) == 1
    assert found.summary["protection"] == "delta"
    assert count_lost(found) == [0] * len(count_lost(found)), "what was lost was trained again"
    assert list_saved(found) == {}
