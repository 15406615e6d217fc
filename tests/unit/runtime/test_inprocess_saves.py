"""Goal: in one process too, a server that is killed goes back to its last save, alone, and says exactly what is lost.

Method: rows count their pushes (`w -= 1`), so what each row should have is counted by hand: what is missing at the end
is what was pushed between the save and the kill to rows of the lost server. Both modes, every priority, saves whole and
in shares, a kill before the first save and right behind one.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from helpers import job, plan_of, table

from regrow.core.job import JobSpec
from regrow.core.protection import FlushSpec, Partial
from regrow.launch.saving import OwnSaving
from regrow.runtime.client import Client
from regrow.runtime.inprocess import InProcessCluster
from regrow.runtime.inprocess_saves import KeptRows

SERVERS, ROWS, WIDE_ROWS = 4, 40, 8
VICTIM = 2


def partial_job(mode: str = "sync") -> JobSpec:
    tables = (table("t", rows=ROWS, dim=3), table("dense", rows=WIDE_ROWS, dim=2, r=1))
    return job(*tables, servers=SERVERS, mode=mode, protection=Partial(flush=FlushSpec(pushes=2)))


class Counting:
    """Trains a job in which rows count their pushes, and counts them too."""

    def __init__(self, mode: str = "sync", **saving: Any) -> None:
        self.job = partial_job(mode)
        self.cluster = InProcessCluster(servers=SERVERS, saving=OwnSaving(tables=("t",), **saving))
        self.client: Client = self.cluster.client(self.job)
        self.steps = 0
        self.counts = np.zeros(ROWS, np.int64)
        self.owners = self.job.layout(0).place(np.arange(ROWS, dtype=np.uint32), table=0)[0]

    def step(self, times: int = 1) -> None:
        for _ in range(times):
            self.steps += 1
            ids = sorted({0, 1, 2, 3, *((self.steps * 7 + 5 * n) % ROWS for n in range(4))})
            ticket = self.client.pull(plan_of(self.job, [ids, list(range(WIDE_ROWS))]), step=self.steps)
            self.client.push(ticket, np.ones_like(ticket.wait(0)))
            self.counts[ids] += 1

    def finish(self) -> np.ndarray[Any, Any]:
        """Pushes that each row has in the end."""
        if self.job.mode == "sync":
            self.client.pull(plan_of(self.job, [[], []]), step=self.steps + 1).wait(0)
        self.client.drain(timeout_seconds=0)
        self.cluster.settle()
        dense = self.client.records(1, 0, WIDE_ROWS)[:, :2]
        assert (dense == -self.steps).all(), "copies lose nothing"
        rows = -self.client.records(0, 0, ROWS)[:, :3]
        assert (rows == rows[:, :1]).all()
        return rows[:, 0].astype(np.int64)

    @property
    def updates_lost(self) -> int:
        """By all servers; each says how many it lost by then."""
        last = {server: join.updates_lost for server, join in self.cluster.joins}
        return sum(last.values())


@pytest.mark.parametrize("mode", ["sync", "async"])
@pytest.mark.parametrize("priority", ["none", "ssu", "mfu", "scar"])
@pytest.mark.parametrize("share", [1.0, 0.3])
def test_what_is_lost_is_what_is_said(mode: str, priority: str, share: float) -> None:
    run = Counting(mode, every_steps=4, priority=priority, share=share)
    run.step(11)
    run.cluster.kill(VICTIM)
    run.step(6)
    found = run.finish()
    lost = run.counts - found
    assert (lost >= 0).all(), "no push is there twice"
    assert (lost[run.owners != VICTIM] == 0).all(), "nobody else went back"
    assert lost.sum() == run.updates_lost > 0


def test_rows_are_those_of_the_last_save() -> None:
    run = Counting(every_steps=5)
    run.step(10)
    saved = run.counts.copy()
    run.step(3)
    committed = run.counts.copy()
    run.step()  # its pull commits the thirteenth; nobody has committed this one, so it is sent again
    assert [saves.count for saves in run.cluster.saves] == [2] * SERVERS
    run.cluster.kill(VICTIM)
    found = run.finish()
    assert np.array_equal(found, np.where(run.owners == VICTIM, run.counts - committed + saved, run.counts))
    ((server, join),) = run.cluster.joins
    assert (server, join.saved, join.joined) == (VICTIM, (10,), (13,))
    assert join.updates_lost == (run.counts - found).sum()


def test_right_behind_a_save_nothing_is_lost() -> None:
    run = Counting(every_steps=5)
    run.step(11)
    run.cluster.kill(VICTIM)
    run.step(4)
    assert np.array_equal(run.finish(), run.counts)
    assert run.updates_lost == 0


def test_before_the_first_save_rows_begin_again() -> None:
    run = Counting(every_steps=100)
    run.step(6)
    before = run.counts.copy()
    run.cluster.kill(VICTIM)
    lost = run.counts - run.finish()
    ((_, join),) = run.cluster.joins
    assert join.saved == (0,)
    # All but the last push, which nobody had acknowledged.
    assert lost.sum() == join.updates_lost
    assert (lost[(run.owners == VICTIM) & (before > 1)] > 0).all()


def test_one_after_the_other_and_the_same_twice() -> None:
    run = Counting(every_steps=6, priority="mfu", share=0.5)
    for server in (0, 1, VICTIM, VICTIM, 3):
        run.step(4)
        run.cluster.kill(server)
        run.cluster.settle()
    run.step(3)
    assert (run.counts - run.finish()).sum() == run.updates_lost > 0
    assert [server for server, _ in run.cluster.joins] == [0, 1, VICTIM, VICTIM, 3]


def test_saves_by_the_clock() -> None:
    run = Counting("async", every_seconds=2.0)
    run.step(3)
    for _ in range(6):
        run.cluster.tick()
    assert all(saves.count > 0 for saves in run.cluster.saves)
    run.cluster.kill(VICTIM)
    assert np.array_equal(run.finish(), run.counts)


def test_without_a_failure_saves_change_nothing() -> None:
    digests = set()
    for priority in ("none", "ssu", "mfu", "scar"):
        run = Counting(every_steps=3, priority=priority, share=0.3)
        run.step(9)
        run.finish()
        digests.add(run.client.digest())
    assert len(digests) == 1


def test_of_a_row_the_newest_value_is_kept() -> None:
    ids, values = np.array([1, 4, 7], np.uint32), np.array([[1.0], [4.0], [7.0]], np.float32)
    kept = KeptRows(ids, [values])
    kept.take(np.array([4, 9], np.uint32), [np.array([[40.0], [90.0]], np.float32)])
    assert kept.ids.tolist() == [1, 4, 7, 9]
    assert kept.parts[0].ravel().tolist() == [1.0, 40.0, 7.0, 90.0]
