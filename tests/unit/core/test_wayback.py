"""Goal: ways back share one form, and a replacement may get some tables by one way and some by the other.

Method: a replacement whose job has a table with parities and one without is told of the first by holders and of the
second by its driver, in every order; it serves when it knows about both, and has then the rows that were lost.
"""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from helpers import COORDINATOR, arrays, job, server, table, worker

from regrow.core.door import ServerDoor
from regrow.core.effects import Delivered, Send, Tick
from regrow.core.flusher import Flusher
from regrow.core.groups import Groups
from regrow.core.messages import Have, Member, Open, Opened, Pull, Recovered, Restored, Rows, StreamEnd, View
from regrow.core.rebuild import Rebuild
from regrow.core.states import WayState
from regrow.core.wayback import Load, LoadedAll, LoadedRows, Ways, plan_ways
from regrow.store.memory import MemoryStore

JOB = job(table("coded", rows=6, k=1, r=1), table("bare", rows=6, k=1), servers=3)
MARKS = (4,)
CUT = "0000000004-abcdef"


def replacement() -> tuple[ServerDoor, list[Any]]:
    """S0'1 with the view that names it."""
    members = [Member(id=s, incarnation=int(s == 0), address="x", recovering=s == 0) for s in range(3)]
    door = ServerDoor(identity=server(0, 1), build_store=MemoryStore, reply_bytes_max=1 << 20, cut=CUT)
    view = View(epoch=2, servers=tuple(members), job=JOB)
    return door, door.receive(Delivered(source=COORDINATOR, message=view))


def events() -> list[Any]:
    """What brings it back: rows 0 and 3 of the coded table, of which 0 was touched, and two rows of the other."""
    bare_rows = np.array([2, 5], np.uint32)  # rows 2 and 5 of table 1 are on server 0
    have = Have(group=0, number=3, marks=MARKS, **arrays(touched=[1]))
    row = np.zeros(4, np.float32)
    row[:2] = -7  # relative to an initial value of -0.0
    restored = Restored(request=0, **arrays(counts=[1, 0], slots=[0], relatives=row))
    return [
        Delivered(source=server(1), message=have),
        Delivered(source=server(1), message=restored),
        LoadedRows(rows=[(1, bare_rows, [np.array([[1, 2], [3, 4]], np.float32)])]),
        LoadedAll(marks=MARKS),
    ]


# Holders and the driver each keep their own order, and nothing else is sure.
ORDERS = [o for o in itertools.permutations(range(4)) if o.index(0) < o.index(1) and o.index(2) < o.index(3)]


def test_the_plan_says_who_brings_what() -> None:
    groups = Groups(JOB)
    plan = plan_ways(groups, recovering=True, cut=CUT)
    assert (plan.rebuilt, plan.reloaded) == ((0,), (1,))
    assert plan.reason == f"rows come back from parities, those without from {CUT}"
    assert plan_ways(groups, recovering=False, cut=CUT).reloaded == (0, 1)
    assert plan_ways(groups, recovering=False, cut=None).reason == "its rows are computed"
    with pytest.raises(ValueError, match="rows without parities were lost, and no cut is named"):
        plan_ways(groups, recovering=True, cut=None)


def test_a_server_with_all_its_rows_has_no_way_to_go() -> None:
    ways = Ways([])
    assert ways.serves and ways.is_back and ways.is_whole
    assert ways.find_missing(np.ones(1, np.int32), np.zeros(1, np.uint32), {}) is None
    assert ways.progress() == {"rows_total": 0, "rows_back": 0, "bytes": 0, "faults": 0}


def test_a_replacement_asks_for_what_has_no_parities() -> None:
    _, effects = replacement()
    assert [effect for effect in effects if isinstance(effect, Load)] == [Load(job=JOB, cut=CUT, tables=(1,))]


@pytest.mark.parametrize("order", ORDERS)
def test_both_ways_side_by_side(order: tuple[int, ...]) -> None:
    door, _ = replacement()
    assert door.server is not None
    door.receive(Delivered(source=worker(0), message=Open()))
    pull = Pull(request=1, step=1, **arrays(counts=[2, 2], slots=[0, 1, 0, 1]))
    door.receive(Delivered(source=worker(0), message=pull))
    brought = events()
    answers: list[Any] = []
    for number in order:
        answers += door.receive(brought[number])
        known = all(way.life.state is not WayState.LEARNING for way in door.server.ways.all)
        assert door.server.ways.serves == known
    sent = [effect.message for effect in answers if isinstance(effect, Send)]
    assert [message.durable for message in sent if isinstance(message, Opened)] == [MARKS[0]]
    (rows,) = [message.rows.tolist() for message in sent if isinstance(message, Rows)]
    assert rows == [7, 7, 0, 0, 1, 2, 3, 4]
    assert not door.recovered, "its parities are not back"
    end = StreamEnd(group=0, number=0, marks=MARKS, **arrays(counts=[0, 0], slots=[], deltas=[]))
    done = door.receive(Delivered(source=server(2), message=end))
    assert any(isinstance(effect, Send) and isinstance(effect.message, Recovered) for effect in done)
    for now in (1.0, 2.0):
        door.receive(Tick(now=now))
    assert door.recovered and door.server.ways.is_whole


def test_parities_bring_only_what_has_them() -> None:
    """Rows of other tables may be missing still: the way is done without them, and asks nobody for them."""
    groups, store = Groups(JOB), MemoryStore(JOB, 0, True)
    spec = JOB.protection.flush
    flusher = Flusher(server=0, groups=groups, store=store, marks=JOB.marks, spec=spec, keeps_undo=False)
    way = Rebuild(server=0, groups=groups, mine=(0,), store=store, flusher=flusher, recovering=[0])
    have, restored = (event.message for event in events()[:2])
    way.receive(server(1), have)
    assert (way.life.state, way.rows_total, store.missing_rows()) == (WayState.RETURNING, 1, 3)
    everything = arrays(counts=[2, 2], slots=[0, 1, 0, 1])
    (fault,) = way.find_missing(**everything, peers={1: server(1), 2: server(2)}) or []
    assert (fault.message.counts.tolist(), fault.message.slots.tolist()) == ([1, 0], [0])
    way.receive(server(1), restored)
    assert (way.life.state, way.rows_back, store.missing_rows()) == (WayState.FILLING, 1, 2)
    assert way.find_missing(**everything, peers={}) is None
    way.tick()
    assert way.life.state is WayState.WHOLE
