"""Goal: a server that hangs is waited for if rows depend on it, as long as the user says and not longer; one whose loss
is survived is not waited for at all; and one that lives but gets nowhere is replaced. What a replacement has said
counts also if a death overtook it; and of two servers that do not reach each other one is replaced, then the other.

Method: a coordinator with three servers and one parity, a clock by hand, and servers that beat or do not.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import pytest
from helpers import job, server, table, worker

from regrow.core import coordinator, partings
from regrow.core.coordinator import Coordinator
from regrow.core.effects import Condemn, Delivered, Died, Joined, Notice, Replace, Send, Tick
from regrow.core.identity import Identity
from regrow.core.job import JobSpec
from regrow.core.messages import (
    Beat,
    Declare,
    KnownView,
    Member,
    Ready,
    Recovered,
    Register,
    StateAsk,
    Unanswered,
    View,
)
from regrow.core.partings import UNANSWERED_SECONDS_MAX

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

    def say_unanswered(self, server: int | None, since: float) -> Unanswered | None:
        if server is None:
            return None
        return Unanswered(server=server, incarnation=self.who[server].incarnation, seconds=int(self.now - since))

    def replace(self, index: int) -> None:
        """Its process ended, and its successor is there, without rows yet."""
        self.machine.receive(Died(peer=self.who[index]))
        self.succeed(index)

    def succeed(self, index: int) -> None:
        old = self.who[index]
        self.who[index] = Identity(role="server", id=index, incarnation=old.incarnation + 1)
        self.arrive(index)
        self.hear(index, Ready(rows=1, memory_bytes=1))

    def live(
        self,
        seconds: float,
        *,
        silent: Collection[int] = (),
        brings: bool = True,
        unanswered: Mapping[int, int] | None = None,
        of_seconds: int = 0,
    ) -> list[Any]:
        """What the coordinator asks for while time passes, without its logs. `unanswered`: who had no answer of whom,
        for `of_seconds` and as long as this lasts."""
        effects: list[Any] = []
        since, until = self.now - of_seconds, self.now + seconds
        while self.now < until:
            self.now += 0.25
            self.brought += brings
            for index in range(SERVERS):
                if index not in silent:
                    said = self.say_unanswered((unanswered or {}).get(index), since)
                    effects += self.hear(index, Beat(brought=self.brought, unanswered=said))
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
    cluster.hear(0, Beat(answers=1))  # it has not recovered
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


# --- A death is heard before the word of a replacement that it has recovered ---


def find_asked(effects: list[Any]) -> list[tuple[Identity, int]]:
    sends = [effect for effect in effects if isinstance(effect, Send)]
    return [(send.target, send.message.number) for send in sends if isinstance(send.message, StateAsk)]


def find_views(effects: list[Any]) -> list[View]:
    return [effect.message for effect in effects if isinstance(effect, Send) and isinstance(effect.message, View)]


def overtake() -> Cluster:
    """Server 0 is coming back, as far as the coordinator knows, when server 1 dies."""
    cluster = Cluster(CODED)
    cluster.live(1.0)
    cluster.replace(0)
    cluster.live(1.0)
    effects = cluster.machine.receive(Died(peer=server(1)))
    assert find_asked(effects) == [(cluster.who[0], 1)]
    assert not cluster.machine.lost
    return cluster


def test_a_recovery_counts_although_a_death_overtook_its_word() -> None:
    cluster = overtake()
    cluster.hear(0, Beat(brought=99))  # sent before it was asked: it says nothing
    assert not cluster.machine.lost
    cluster.hear(0, Recovered())
    cluster.hear(0, Beat(answers=1))
    cluster.succeed(1)
    assert not cluster.machine.lost
    assert cluster.machine.view is not None
    assert [member.recovering for member in cluster.machine.view.servers] == [False, True, False]


def test_no_view_is_made_before_the_answer() -> None:
    cluster = overtake()
    before = cluster.machine.view
    cluster.succeed(1)
    assert cluster.machine.view is before
    (view, *_) = find_views(cluster.hear(0, Recovered()))
    assert [member.recovering for member in view.servers] == [False, True, False]


def test_one_that_has_not_recovered_says_so_and_rows_are_lost() -> None:
    cluster = overtake()
    cluster.hear(0, Beat(answers=1))
    assert "S0, S1 are down together" in cluster.machine.lost


def test_one_that_is_heard_and_does_not_answer_is_not_waited_for_without_end() -> None:
    cluster = overtake()
    cluster.live(coordinator.ASKED_SECONDS_MAX - 0.5, silent=[1])
    assert not cluster.machine.lost
    cluster.live(1.5, silent=[1])
    assert cluster.machine.lost


def test_one_that_is_silent_is_waited_for_as_anybody_is() -> None:
    cluster = overtake()
    effects = cluster.live(PATIENCE, silent=[0, 1])
    assert [effect.name for effect in effects] == ["waiting"]
    assert not cluster.machine.lost
    (condemned,) = cluster.live(5.0, silent=[0, 1])
    assert isinstance(condemned, Condemn) and condemned.peer == cluster.who[0]
    cluster.machine.receive(Died(peer=cluster.who[0]))
    assert cluster.machine.lost


def test_a_new_coordinator_asks_before_it_judges() -> None:
    """It was told by server 0 that it was coming back; since then it has recovered, and server 1 was replaced."""
    known = KnownView(
        epoch=2,
        servers=tuple(
            Member(id=index, incarnation=index == 0, address="a", recovering=index == 0) for index in range(3)
        ),
        job=CODED,
    )
    machine = Coordinator(servers=SERVERS, term=1)
    back, whole, fresh = known.servers[0].identity, server(2), Identity(role="server", id=1, incarnation=1)
    effects: list[Any] = []
    for peer, word in ((back, known), (whole, known), (fresh, None)):
        effects += machine.receive(Joined(peer=peer))
        effects += machine.receive(Delivered(source=peer, message=Register(address="a", known=word)))
    assert find_asked(effects) == [(back, 1)]
    assert machine.view is None and not machine.lost
    machine.receive(Delivered(source=back, message=Recovered()))
    assert machine.view is not None and not machine.lost
    assert [member.recovering for member in machine.view.servers] == [False, True, False]


# --- Two servers that do not reach each other ---


def test_the_one_that_does_not_answer_is_replaced() -> None:
    cluster = Cluster(CODED)
    assert cluster.live(UNANSWERED_SECONDS_MAX - 1.0, unanswered={0: 1}) == []
    (replaced,) = cluster.live(2.0, unanswered={0: 1}, of_seconds=int(UNANSWERED_SECONDS_MAX) - 1)
    assert replaced == Replace(peer=server(1), reason="S0 has had no answer of S1 for 30 s")


def test_one_that_was_silent_itself_has_time_to_answer() -> None:
    """It is waited for, because its loss would be one of rows; others have waited as long when it speaks again."""
    cluster = Cluster(CODED)
    cluster.replace(0)
    assert [effect.name for effect in cluster.live(15.0, silent=[1])] == ["waiting"]
    effects = cluster.live(UNANSWERED_SECONDS_MAX - 1.0, unanswered={2: 1}, of_seconds=15)
    assert [effect.name for effect in effects] == ["waited"]


def test_one_that_waits_for_another_itself_is_not_to_blame() -> None:
    cluster = Cluster(CODED)
    (replaced,) = cluster.live(UNANSWERED_SECONDS_MAX + 2.0, unanswered={0: 1, 1: 2})
    assert replaced.peer == server(2)


def test_a_complaint_about_an_incarnation_that_is_over_is_none() -> None:
    cluster = Cluster(CODED)
    old = Beat(unanswered=Unanswered(server=1, incarnation=0, seconds=99))
    cluster.replace(1)
    cluster.hear(1, Recovered())
    cluster.live(UNANSWERED_SECONDS_MAX + 1.0)
    cluster.hear(0, old)
    assert [effect for effect in cluster.machine.receive(Tick(now=cluster.now)) if isinstance(effect, Replace)] == []


def test_a_complaint_about_nobody_is_none() -> None:
    cluster = Cluster(CODED)
    cluster.live(UNANSWERED_SECONDS_MAX + 1.0)
    cluster.hear(0, Beat(unanswered=Unanswered(server=SERVERS, incarnation=0, seconds=99)))
    assert cluster.machine.receive(Tick(now=cluster.now)) == []


def test_then_the_other_one_is_replaced_and_then_nobody() -> None:
    cluster = Cluster(CODED)
    for blamed in (1, 0):
        (replaced,) = cluster.live(UNANSWERED_SECONDS_MAX + 1.0, unanswered={0: 1})
        assert isinstance(replaced, Replace) and replaced.peer == cluster.who[blamed]
        cluster.succeed(blamed)
        cluster.hear(blamed, Recovered())
    assert not cluster.machine.lost
    assert cluster.live(UNANSWERED_SECONDS_MAX + 1.0, unanswered={0: 1}) == []
    assert cluster.machine.lost == "S0 and S1 cannot reach each other, nor can their successors"


def test_what_was_long_ago_is_forgotten() -> None:
    cluster = Cluster(CODED)
    for _ in range(3):
        (replaced,) = cluster.live(UNANSWERED_SECONDS_MAX + 1.0, unanswered={0: 1})
        assert replaced.peer == cluster.who[1]
        cluster.succeed(1)
        cluster.hear(1, Recovered())
        cluster.live(partings.FORGET_SECONDS + 1.0)


def test_where_that_loses_rows_it_is_waited_for() -> None:
    cluster = Cluster(CODED)
    cluster.replace(2)
    effects = cluster.live(UNANSWERED_SECONDS_MAX + PATIENCE - 2.0, unanswered={0: 1})
    assert [effect.name for effect in effects] == ["waiting"]
    (condemned,) = cluster.live(4.0, unanswered={0: 1}, of_seconds=48)
    assert isinstance(condemned, Condemn) and condemned.peer == server(1)
