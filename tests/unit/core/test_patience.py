"""Goal: a server that hangs is waited for if rows depend on it, as long as the user says and not longer; one whose loss
is survived is not waited for at all; and one that lives but gets nowhere is replaced.

Method: a coordinator with three servers and one parity, a clock by hand, and servers that beat or do not.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import pytest
from helpers import job, server, table, worker

from regrow.core import coordinator
from regrow.core.coordinator import Coordinator
from regrow.core.effects import Condemn, Delivered, Died, Joined, Notice, Replace, Tick
from regrow.core.identity import Identity
from regrow.core.job import JobSpec
from regrow.core.messages import Beat, Declare, Ready, Recovered, Register

SERVERS = 3
PATIENCE = 20.0
CODED = job(table(k=2, r=1), servers=SERVERS)
BARE = job(servers=SERVERS)


class Cluster:
    """A settled coordinator, and a clock."""

    def __init__(self, spec: JobSpec) -> None:
        self.machine = Coordinator(servers=SERVERS, patience_seconds=PATIENCE)
        self.now = 0.0
        self.who = [server(index) for index in range(SERVERS)]
        self.brought = 0
        for index in range(SERVERS):
            self.arrive(index)
        self.machine.receive(Joined(peer=worker(0)))
        self.machine.receive(Delivered(source=worker(0), message=Declare(job=spec)))
        for index in range(SERVERS):
            self.hear(index, Ready(rows=1, memory_bytes=1))

    def arrive(self, index: int) -> None:
        self.machine.receive(Joined(peer=self.who[index]))
        self.hear(index, Register(address="unix:/s"))

    def hear(self, index: int, message: Any) -> list[Any]:
        return self.machine.receive(Delivered(source=self.who[index], message=message))

    def replace(self, index: int) -> None:
        """Its process ended, and its successor is there, without rows yet."""
        self.machine.receive(Died(peer=self.who[index]))
        old = self.who[index]
        self.who[index] = Identity(role="server", id=index, incarnation=old.incarnation + 1)
        self.arrive(index)
        self.hear(index, Ready(rows=1, memory_bytes=1))

    def live(self, seconds: float, *, silent: Collection[int] = (), brings: bool = True) -> list[Any]:
        """What the coordinator asks for while time passes, without its logs."""
        effects: list[Any] = []
        until = self.now + seconds
        while self.now < until:
            self.now += 0.25
            self.brought += brings
            for index in range(SERVERS):
                if index not in silent:
                    effects += self.hear(index, Beat(brought=self.brought))
            effects += self.machine.receive(Tick(now=self.now))
        return [effect for effect in effects if isinstance(effect, Replace | Condemn | Notice)]


def test_a_loss_that_is_survived_is_not_waited_for() -> None:
    cluster = Cluster(CODED)
    cluster.live(1.0)
    (replaced,) = cluster.live(3.0, silent=[1])
    assert isinstance(replaced, Replace) and replaced.peer == server(1)


@pytest.mark.parametrize("spec", [CODED, BARE], ids=["coded", "unprotected"])
def test_a_loss_of_rows_is_waited_for_and_then_no_longer(spec: JobSpec) -> None:
    cluster = Cluster(spec)
    cluster.live(1.0)
    if spec is CODED:
        cluster.replace(0)
    effects = cluster.live(PATIENCE, silent=[1])
    assert [effect.name for effect in effects if isinstance(effect, Notice)] == ["waiting"]
    assert effects[0].values["seconds"] == PATIENCE
    assert len(effects) == 1
    (condemned,) = cluster.live(3 * PATIENCE, silent=[1])
    assert isinstance(condemned, Condemn) and condemned.peer == server(1)
    assert not cluster.machine.lost, "only its end is a fact"
    cluster.machine.receive(Died(peer=server(1)))
    assert bool(cluster.machine.lost) == (spec is CODED)


def test_one_that_speaks_in_time_is_as_good_as_before() -> None:
    cluster = Cluster(CODED)
    cluster.live(1.0)
    cluster.replace(0)
    assert [effect.name for effect in cluster.live(PATIENCE - 1.0, silent=[1])] == ["waiting"]
    assert [effect.name for effect in cluster.live(1.0)] == ["waited"]
    assert cluster.live(PATIENCE - 1.0, silent=[1])[0].name == "waiting"  # counted anew


def test_when_the_other_is_back_its_silence_can_be_survived() -> None:
    cluster = Cluster(CODED)
    cluster.live(1.0)
    cluster.replace(0)
    assert [effect.name for effect in cluster.live(5.0, silent=[1])] == ["waiting"]
    cluster.hear(0, Recovered())
    (replaced,) = cluster.live(1.0, silent=[1])
    assert isinstance(replaced, Replace) and replaced.peer == server(1)


def test_a_replacement_that_gets_nowhere_is_replaced() -> None:
    cluster = Cluster(CODED)
    cluster.live(1.0)
    cluster.replace(0)
    assert cluster.live(2 * coordinator.BROUGHT_SECONDS_MAX) == []
    replaced = cluster.live(coordinator.BROUGHT_SECONDS_MAX + 1.0, brings=False)
    assert [effect.peer for effect in replaced] == [cluster.who[0]]


def test_a_replacement_that_registers_and_is_not_heard_again_is_replaced() -> None:
    """Between the two it may take memory for its rows, and silence means nothing; but not for ever."""
    cluster = Cluster(CODED)
    cluster.live(1.0)
    cluster.machine.receive(Died(peer=cluster.who[0]))
    cluster.who[0] = Identity(role="server", id=0, incarnation=1)
    cluster.arrive(0)
    assert cluster.live(coordinator.BROUGHT_SECONDS_MAX / 2, silent=[0]) == []
    replaced = cluster.live(coordinator.BROUGHT_SECONDS_MAX, silent=[0])
    assert [effect.peer for effect in replaced] == [cluster.who[0]]


def test_a_server_that_is_whole_has_nothing_to_bring() -> None:
    cluster = Cluster(CODED)
    assert cluster.live(2 * coordinator.BROUGHT_SECONDS_MAX, brings=False) == []
