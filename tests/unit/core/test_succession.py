"""Goal: a coordinator that has a successor is over, for everybody who knows the successor, and no server works in a
view that its coordinator does not know of.

Method: a server, a session and a coordinator alone, hearing late views of the coordinator before.
"""

from __future__ import annotations

from typing import Any

from helpers import job, server, shard_server, table, view

from regrow.core.coordinator import Coordinator
from regrow.core.door import ServerDoor
from regrow.core.effects import Delivered, Died, Joined, Refuse, Replace, Send, Tick
from regrow.core.identity import Identity
from regrow.core.messages import Beat, CutAsk, KnownView, Member, Message, Ready, Register, View
from regrow.core.session import Session
from regrow.core.states import SessionState

CODED = job(table(rows=12, k=2, r=1), servers=3)
OLD, NEW = (Identity(role="coordinator", id=0, incarnation=incarnation) for incarnation in (0, 1))


def name_replaced(index: int, incarnation: int, *, epoch: int) -> View:
    """A view in which one server is coming back."""
    members = [*view(CODED).servers]
    members[index] = Member(id=index, incarnation=incarnation, address="", recovering=True)
    return View(epoch=epoch, servers=tuple(members), job=CODED)


def hear(machine: ServerDoor | Coordinator | Session, source: Identity, message: Message) -> list[Any]:
    return [*machine.receive(Delivered(source=source, message=message))]


def list_sent(effects: list[Any], kind: type[Message]) -> list[Identity]:
    return [effect.target for effect in effects if isinstance(effect, Send) and isinstance(effect.message, kind)]


# --- A server ---


def meet_both() -> ServerDoor:
    """A server with the first view of the old coordinator, which has told the new one so."""
    door = shard_server(CODED)
    door.receive(Joined(peer=OLD))
    assert list_sent(door.receive(Joined(peer=NEW)), Register) == [NEW]
    return door


def test_a_late_view_of_an_old_coordinator_is_not_entered() -> None:
    door = meet_both()
    assert hear(door, OLD, name_replaced(1, 1, epoch=2)) == []
    assert door.is_peer(server(1)) and not door.is_peer(server(1, 1))
    assert hear(door, NEW, name_replaced(1, 1, epoch=1 << 32))
    assert door.is_peer(server(1, 1))


def test_beats_go_to_the_newest_coordinator() -> None:
    door = meet_both()
    hear(door, OLD, view(CODED, epoch=2))
    assert list_sent(door.receive(Tick(now=1.0)), Beat) == [NEW]
    assert door.receive(Joined(peer=OLD)) == []  # a connection that was being made
    assert list_sent(door.receive(Tick(now=2.0)), Beat) == [NEW]


def test_an_old_coordinator_makes_no_cuts() -> None:
    assert hear(meet_both(), OLD, CutAsk(number=1)) == []


# --- A session ---


def test_a_session_does_not_believe_an_old_view_that_rows_are_lost() -> None:
    session = Session()
    hear(session, NEW, view(CODED, epoch=1 << 32))
    old = view(CODED, epoch=2)
    assert hear(session, OLD, View(epoch=2, servers=old.servers, job=CODED, lost="all of it")) == []
    assert session.life.state is SessionState.GREETING
    hear(session, NEW, View(epoch=(1 << 32) + 1, servers=old.servers, job=CODED, lost="all of it"))
    assert session.life.state is SessionState.FAILED


# --- The coordinator ---


def remember(of: View) -> Register:
    return Register(address="", known=KnownView(epoch=of.epoch, servers=of.servers, job=of.job))


def gather_servers() -> Coordinator:
    """A new coordinator whom three servers, one of them a zombie, have told the first view."""
    machine = Coordinator(servers=3, term=1)
    for index in range(3):
        machine.receive(Joined(peer=server(index)))
        effects = hear(machine, server(index), remember(view(CODED)))
    assert list_sent(effects, View) == [server(0), server(1), server(2)]
    return machine


def test_a_replacement_that_began_in_a_view_of_its_own_begins_anew() -> None:
    """It had entered a view of the coordinator before, which reached nobody else: who brings it what is not as it
    thinks, and it has said already that it is ready."""
    machine = gather_servers()
    machine.receive(Joined(peer=server(1, 1)))
    effects = hear(machine, server(1, 1), remember(name_replaced(1, 1, epoch=2)))
    assert [effect.peer for effect in effects if isinstance(effect, Replace)] == [server(1, 1)]
    assert list_sent(effects, View) == []
    machine.receive(Joined(peer=server(1, 2)))
    effects = hear(machine, server(1, 2), Register(address=""))
    assert server(1, 2) in list_sent(effects, View)
    assert machine.view is not None and machine.view.servers[1].incarnation == 2


def test_a_replacement_without_a_view_takes_the_place() -> None:
    machine = gather_servers()
    machine.receive(Died(peer=server(1)))
    machine.receive(Joined(peer=server(1, 1)))
    effects = hear(machine, server(1, 1), Register(address=""))
    assert server(1, 1) in list_sent(effects, View)
    assert not any(isinstance(effect, Replace) for effect in effects)
    ready = hear(machine, server(1, 1), Ready(rows=1, memory_bytes=1))
    assert not any(isinstance(effect, Refuse) for effect in ready)
