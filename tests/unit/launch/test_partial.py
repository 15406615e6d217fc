"""Goal: what is planned before a run with partial recovery, and again while it goes on, follows from what is known."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from regrow.config import TrainConfig
from regrow.core.job import JobSpec, OptimizerSpec, TableSpec
from regrow.core.protection import CodedPartial, Partial
from regrow.errors import ConfigError
from regrow.launch.failures import Failure
from regrow.launch.orders import SaveEvery
from regrow.launch.partial import Planner
from regrow.launch.replan import Replanner
from regrow.launch.reports import Joined, Listening, OwnSaved, Planned, Progress, Ready
from regrow.launch.status import RunStatus
from regrow.metrics import BINS
from regrow.runtime.priorities import choose_tables, find_largest

SCRIPT = {"script": ("train.py",), "model": "kaggle"}


def config(**options: Any) -> TrainConfig:
    given = {"protection": "partial", "ckpt": "x", "model": "tiny", "servers": 4, "expect_mtbf": "28h", **options}
    return TrainConfig(**given)


def test_the_interval_follows_the_target() -> None:
    plan = Planner(config(priority="none")).plan()
    assert plan.own is not None and plan.own.every_seconds == pytest.approx(2 * 0.1 * 4 * 28 * 3600)
    assert plan.reason.startswith("partial: every 22.4 h (PLS 0.1, 4 servers, a failure every 28 h")
    eighth = Planner(config()).plan()
    assert eighth.own is not None and eighth.own.every_seconds == pytest.approx(plan.own.every_seconds / 8)
    assert (eighth.own.priority, eighth.own.share) == ("ssu", 0.125)


def test_full_recovery_is_used_where_it_is_cheaper() -> None:
    plan = Planner(config(target_pls=1e-7)).plan()
    assert plan.own is None
    assert plan.config.protection == "delta"
    assert plan.reason.startswith("full")


def test_a_user_may_choose() -> None:
    plan = Planner(config(every="80steps")).plan()
    assert plan.own is not None and (plan.own.every_steps, plan.own.every_seconds) == (10, None)
    plan = Planner(config(every="1h", priority="none")).plan()
    assert plan.own is not None and plan.own.every_seconds == 3600.0
    assert "as asked for" in plan.reason
    with pytest.raises(ConfigError, match="so none would end within it"):
        Planner(config(every="0.001s", model="kaggle", priority="none")).plan()


def test_the_loss_to_expect_at_the_end() -> None:
    """What is lost by now, and what the plan expects of the steps that are left."""
    planner = Planner(config(steps=100, priority="none"))
    status = RunStatus(planner.config, started_at=0.0)
    planned = planner.plan()
    assert planned.pls is not None and 0.05 < planned.pls <= 0.1
    Replanner(planner, planned, status)
    status.enter("training", 0.0)
    described = status.describe_losses()
    assert described is not None
    assert (described["pls"], described["pls_expected"], described["pls_target"]) == (0.0, planned.pls, 0.1)
    assert status.metrics(1.0)["partial"] == status.totals()["partial"] == described
    assert status.losses is not None and status.samples_total
    lost = status.losses.note_joined(0, Joined(saved=(0,) * 2, joined=(4,) * 2, updates_lost=10), status.samples_total)
    assert status.expect_pls() == pytest.approx(planned.pls + (lost.pls or 0.0))
    assert lost.pls
    assert Planner(config(every="80steps")).plan().pls is None, "nobody knows how long a step takes"
    status.pls_planned = None
    assert status.expect_pls() is None


def test_the_largest_tables() -> None:
    assert find_largest([1, 500, 3, 497, 2]) == [1, 3]
    assert find_largest([7]) == [0]


@pytest.mark.parametrize(("wish", "chosen"), [("t_a, t_c", [0, 2]), ("all", [0, 1, 2]), ("largest", [1])])
def test_servers_choose_among_the_tables_that_come_back_from_saves(wish: str, chosen: list[int]) -> None:
    """Dense parameters have copies, however many rows they are."""
    own = Planner(config(priority_tables=wish, **SCRIPT)).plan().own
    assert own is not None
    sgd = OptimizerSpec(kind="sgd", learning_rate=0.1)
    sizes = {"t_a": 3, "t_b": 5000, "t_c": 4, "dense": 10**6}
    for protection, coded in ((Partial(r=1), (1, 0, 1)), (CodedPartial(k=2, r=1), (2, 1, 2))):
        k, r, copies = coded
        tables = tuple(
            TableSpec(name=name, rows=rows, dim=4, init_bound=0.1, optimizer=sgd, k=k, r=r)
            for name, rows in sizes.items()
        )
        dense = msgspec.structs.replace(tables[-1], k=1, r=copies)
        job = JobSpec(tables=(*tables[:-1], dense), servers=4, workers=1, protection=protection)
        assert job.invalid_reason() is None
        assert choose_tables(job, own) == chosen


def declare_tables(status: RunStatus, size: int) -> None:
    for server in range(4):
        status.receive("server", server, Listening(address=""), 0.0)
        status.receive("server", server, Ready(rows=1, bytes=size // 4), 0.0)


def test_with_a_script_it_is_planned_anew_when_the_tables_are_known() -> None:
    planner = Planner(config(priority="none", **SCRIPT))
    planned = planner.plan()
    assert planned.own is not None, "sizes are not known, and partial recovery is what was asked for"
    assert "how large the tables are is not known yet" in planned.reason
    status = RunStatus(planner.config, started_at=0.0)
    replanner = Replanner(planner, planned, status)
    status.enter("training", 0.0)
    assert replanner.look(1.0) is None, "no server has them"
    declare_tables(status, 4 * 10**12)
    assert isinstance(replanner.look(100.0), SaveEvery)
    assert "not known yet" not in replanner.planned.reason
    assert replanner.changes and replanner.changes[0].startswith("a save costs")
    assert replanner.planned.numbers["full"]["overhead"] != planned.numbers["full"]["overhead"]


def test_an_interval_too_short_for_a_scripts_tables_is_told_when_they_are_known() -> None:
    planner = Planner(config(every="2s", priority="none", **SCRIPT))
    status = RunStatus(planner.config, started_at=0.0)
    replanner = Replanner(planner, planner.plan(), status)
    status.enter("training", 0.0)
    declare_tables(status, 4 * 10**9)
    with pytest.raises(ConfigError, match="a save takes about 5 s, so none would end within it"):
        replanner.look(1.0)


def test_samples_of_a_script_are_the_mean_of_what_it_did() -> None:
    status = RunStatus(config(workers=2, **SCRIPT), started_at=0.0)
    for worker in range(2):
        status.receive("worker", worker, Planned(steps=50), 0.0)
        progress = Progress(step=10, samples=80, loss=None, hist_pos=[0] * BINS, hist_neg=[0] * BINS)
        status.receive("worker", worker, progress, 1.0)
    status.receive("server", 1, Joined(saved=(4, 6), joined=(9, 6), updates_lost=11), 2.0)
    described = status.describe_losses()
    assert described is not None
    assert (described["samples_lost"], described["updates_lost"]) == (5 * 8, 11)
    assert described["pls"] == pytest.approx(5 / (100 * 4))


def make_running(**options: Any) -> tuple[Replanner, RunStatus]:
    planner = Planner(config(expect_mtbf=None, **options))
    status = RunStatus(planner.config, started_at=0.0)
    status.enter("training", 0.0)
    return Replanner(planner, planner.plan(), status), status


def test_failures_make_saves_more_frequent() -> None:
    replanner, status = make_running()
    before = replanner.planned.own
    assert replanner.look(1.0) is None
    for step in range(3):
        failure = Failure(role="server", id=0, incarnation=step, step=1, reason="", at=10.0, detected_at=10.0)
        failure.replaced_at, failure.recovered_at, failure.settled = 10.5, 12.0, True
        status.failures.all.append(failure)
    told = replanner.look(100.0)
    assert isinstance(told, SaveEvery)
    assert before is not None and before.every_seconds is not None and told.seconds < before.every_seconds / 3
    assert replanner.changes and status.plan_reason is not None and replanner.changes[0] in status.plan_reason
    assert replanner.look(101.0) is None  # not so soon
    assert replanner.look(200.0) is None  # and nothing has changed


def test_saves_that_take_long_are_noted_and_a_chosen_interval_stays() -> None:
    replanner, status = make_running(every="1000steps")
    assert status.losses is not None
    status.losses.note_saved(0, OwnSaved(number=1, rows=5, seconds=1000.0))
    assert replanner.look(100.0) is None


def test_full_recovery_that_becomes_cheaper_is_prepared_for() -> None:
    """Until the next loss the run keeps its protection; the plan has what everybody goes back with then."""
    planner = Planner(config(target_pls=1e-7))
    assert planner.plan().own is None, "it would have been used from the start"
    running = planner.plan(running=True)
    assert running.own is not None
    assert running.full is not None
    assert (running.full.protection, running.full.every) == (
        planner.plan().config.protection,
        planner.plan().config.every,
    )
    assert "the next loss of a server takes everybody back" in running.reason
    assert Planner(config()).plan(running=True).full is None
