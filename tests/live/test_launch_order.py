"""Goal: what the launcher hears counts in the order in which it was said, however much of it comes at once.

Method: the real launcher with processes that only pretend to train (fake_child.py), and a display that keeps it busy
until somebody has died: then it hears of everything that went before in one breath.
"""

from __future__ import annotations

import pytest
from test_launch import EC, QUICK, World, alive, only_failure, poll, world  # noqa: F401  (a fixture)

from regrow.launch import local
from regrow.launch.display import QuietDisplay
from regrow.launch.status import RunStatus

pytestmark = pytest.mark.live


def test_worker_that_dies_right_after_its_first_step(world: World) -> None:  # noqa: F811
    """Its first step begins the training, so its death is one in training, and is survived."""

    class Busy(QuietDisplay):
        def update(self, status: RunStatus, now: float) -> None:
            if status.phase == "loading":
                pid = world.room / "worker-0.pid"
                poll(lambda: pid.exists() and not alive(int(pid.read_text())), "the worker did not die")

    world.plan(manners={"worker 0": "is killed"}, hold={"step": 1, "for": "started-worker-0.1"}, done=1)
    config = world.config(**EC, workers=1)
    summary = local.train(config, command=world.command, patience=QUICK, memory_check=False, display=Busy())
    world.assert_nothing_left()
    assert only_failure(summary)["role"] == "worker"
    assert (summary["status"], summary["steps_done"]) == ("ok", 3)
