"""Goal: what is planned before a run with partial recovery, and again while it goes on, follows from what is known."""

from __future__ import annotations

from typing import Any

import pytest

from regrow.config import TrainConfig
from regrow.errors import ConfigError
from regrow.launch.failures import Failure
from regrow.launch.orders import Joined, OwnSaved, SaveEvery
from regrow.launch.partial import Planner, choose_tables, find_largest
from regrow.launch.replan import Replanner
from regrow.launch.status import RunStatus


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
    assert choose_tables(config(priority_tables="t_cat_1, t_cat_0")) == ("t_cat_1", "t_cat_0")
    assert len(choose_tables(config(priority_tables="all"))) == config().load_model().tables


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
