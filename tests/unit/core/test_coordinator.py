"""Goal: everybody learns the same view, once it can be whole, and nobody else gets into it.

Method: a coordinator alone; all orders of what two servers and a worker do first are enumerated, and the
views they see compared as a whole.
"""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from helpers import job, plain, server, table, told, worker

from regrow.core.coordinator import SILENT_SECONDS, Coordinator
from regrow.core.effects import Delivered, Joined, Lost, Replace, Send, Tick
from regrow.core.identity import Identity
from regrow.core.messages import Beat, Declare, Member, Message, Open, Ready, Register, View

JOB = job(servers=2)
W0 = worker(0)


def hear(machine: Coordinator, source: Identity, message: Message) -> list[Any]:
    return told(machine.receive(Delivered(source=source, message=message)))


def register(index: int) -> Register:
    return Register(address=f"unix:/s{index}")


def member(index: int, incarnation: int = 0, *, recovering: bool = False) -> Member:
    return Member(id=index, incarnation=incarnation, address=f"unix:/s{index}", recovering=recovering)


def settled() -> Coordinator:
    """Two servers and a worker, first view made."""
    machine = Coordinator(servers=2)
    for peer in (server(0), server(1), W0):
        machine.receive(Joined(peer=peer))
    for index in (0, 1):
        hear(machine, server(index), register(index))
    hear(machine, W0, Declare(job=JOB))
    return machine


def refused(target: Identity, reason: str) -> list[tuple[str, str, str]]:
    return [("refuse", str(target), reason)]


FIRST = View(epoch=1, servers=(member(0), member(1)), job=JOB)


def test_everybody_gets_the_first_view_once_in_whatever_order_they_come() -> None:
    acts = {
        "S0 joins": Joined(peer=server(0)),
        "S1 joins": Joined(peer=server(1)),
        "W0 joins": Joined(peer=W0),
        "S0 registers": Delivered(source=server(0), message=register(0)),
        "S1 registers": Delivered(source=server(1), message=register(1)),
        "W0 declares": Delivered(source=W0, message=Declare(job=JOB)),
    }
    orders = [
        order
        for order in itertools.permutations(acts)
        if order.index("S0 joins") < order.index("S0 registers")
        and order.index("S1 joins") < order.index("S1 registers")
        and order.index("W0 joins") < order.index("W0 declares")
    ]
    assert len(orders) == 90
    for order in orders:
        machine = Coordinator(servers=2)
        views = [
            (str(effect.target), plain(effect.message))
            for act in order
            for effect in machine.receive(acts[act])
            if isinstance(effect, Send)
        ]
        assert sorted(views, key=str) == [(name, plain(FIRST)) for name in ("S0", "S1", "W0")], order


def test_a_job_known_beforehand_needs_no_worker() -> None:
    machine = Coordinator(servers=1, job=job())
    machine.receive(Joined(peer=server(0)))
    assert hear(machine, server(0), register(0)) == [
        ("log", "S0 listens at unix:/s0"),
        ("send", "S0", plain(View(epoch=1, servers=(member(0),), job=job()))),
    ]


def test_latecomers_get_the_view_at_once() -> None:
    assert told(settled().receive(Joined(peer=worker(1)))) == [("send", "W1", plain(FIRST))]


def test_the_same_job_again_is_fine_and_another_one_is_not() -> None:
    machine = settled()
    machine.receive(Joined(peer=worker(1)))
    assert hear(machine, worker(1), Declare(job=JOB)) == []
    other = job(table(rows=11), servers=2)
    assert hear(machine, worker(1), Declare(job=other)) == refused(
        worker(1), "another job with other tables runs on this cluster"
    )
    assert machine.view is not None
    assert plain(machine.view) == plain(FIRST)


@pytest.mark.parametrize(
    ("wrong", "reason"),
    [
        (job(servers=3), "the job is for 3 servers, this cluster has 2"),
        (job(servers=2, workers=0), "workers must be between 1 and 65536, not 0"),
        (job(table(rows=0), servers=2), "table 't0': rows must be between 1 and 4294967295, not 0"),
    ],
)
def test_jobs_that_cannot_be(wrong: Any, reason: str) -> None:
    machine = Coordinator(servers=2)
    assert hear(machine, W0, Declare(job=wrong)) == refused(W0, reason)
    assert hear(machine, W0, Declare(job=JOB)) == [("log", "W0 declares 1 tables")]


def test_a_place_is_taken_by_one_incarnation_and_only_a_newer_one_replaces_it() -> None:
    machine = settled()
    assert hear(machine, server(2), register(2)) == refused(server(2), "server 2 of a cluster of 2")
    # Again, after its connection broke: it is the same one, and nobody needs to hear of it.
    assert hear(machine, server(0), register(0)) == [("log", "S0 listens at unix:/s0")]
    newer = server(0, incarnation=1)
    machine.receive(Lost(peer=server(0), reason="it died"))
    machine.receive(Joined(peer=newer))
    second = plain(View(epoch=2, servers=(member(0, incarnation=1, recovering=True), member(1)), job=JOB))
    effects = [effect for effect in hear(machine, newer, register(0)) if isinstance(effect, tuple)]
    assert [effect for effect in effects if effect[0] == "send"] == [
        ("send", "S1", second),
        ("send", "W0", second),
        ("send", "S0", second),
    ]
    assert hear(machine, server(0), register(0))[1:] == refused(server(0), "S0 was replaced by a newer incarnation")


def ready_of(machine: Coordinator) -> dict[int, Ready]:
    return {server: place.ready for server, place in enumerate(machine.places) if place.ready is not None}


def test_who_is_ready() -> None:
    machine = settled()
    ready = Ready(rows=5, memory_bytes=640)
    assert hear(machine, server(1), ready) == [("log", "S1 is ready: 5 rows, 640 bytes")]
    assert {index: plain(message) for index, message in ready_of(machine).items()} == {1: plain(ready)}
    for stranger in (server(7), server(1, incarnation=3), W0):
        assert hear(machine, stranger, ready) == refused(stranger, f"Ready from a {stranger.role}")
    assert list(ready_of(machine)) == [1]


def test_the_lost_hear_nothing_more() -> None:
    machine = Coordinator(servers=1)
    machine.receive(Joined(peer=server(0)))
    machine.receive(Joined(peer=W0))
    assert told(machine.receive(Lost(peer=W0, reason="bye"))) == [("log", "W0 is gone: bye")]
    hear(machine, server(0), register(0))
    machine.receive(Joined(peer=worker(1)))
    effects = hear(machine, worker(1), Declare(job=job()))
    assert [effect[1] for effect in effects if effect[0] == "send"] == ["S0", "W1"]


@pytest.mark.parametrize(
    ("source", "message"),
    [(W0, register(0)), (server(0), Declare(job=JOB)), (W0, Open()), (server(0), FIRST)],
)
def test_messages_that_do_not_belong(source: Identity, message: Message) -> None:
    expected = refused(source, f"{type(message).__name__} from a {source.role}")
    assert hear(settled(), source, message) == expected


def test_what_has_just_happened_is_not_as_old_as_the_last_tick() -> None:
    """A coordinator that was busy for a while hears of a closed connection before its next tick."""
    machine = settled_with_parities()
    machine.receive(Tick(now=1.0))
    machine.receive(Lost(peer=server(1), reason="reset"))
    assert not has_replaced(machine.receive(Tick(now=1.45)))
    assert not has_replaced(machine.receive(Tick(now=1.6)))
    assert has_replaced(machine.receive(Tick(now=1.8)))


def test_a_silence_begins_where_it_was_last_heard() -> None:
    machine = settled_with_parities()
    for tenths in range(10, 40, 4):
        machine.receive(Tick(now=tenths / 10))
        for index in range(3):
            hear(machine, server(index), Beat())
    silences = [now / 100 for now in range(420, 600, 5) if has_replaced(machine.receive(Tick(now=now / 100)))]
    assert silences[0] == pytest.approx(4.2 + SILENT_SECONDS)


def has_replaced(effects: list[Any]) -> bool:
    return any(isinstance(effect, Replace) for effect in effects)


def settled_with_parities() -> Coordinator:
    machine = Coordinator(servers=3, job=job(table(k=2, r=1), servers=3))
    for index in range(3):
        machine.receive(Joined(peer=server(index)))
        hear(machine, server(index), register(index))
        hear(machine, server(index), Ready(rows=1, memory_bytes=1))
    machine.receive(Tick(now=0.5))
    return machine
