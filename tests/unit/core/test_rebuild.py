"""Goal: a replacement serves exactly what its predecessor had: nothing before its groups know where they stand, each
row as soon as it is there, and each push once, also where only some of its rows have it.

Method: a real server with real rows, in the place of S0 of three, told by hand what its holders and workers say. With
k = 2 and r = 1 its odd slots are group 0, held by S1, and its even ones group 1, held by S2. Updates are `w -= g`.
"""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from helpers import COORDINATOR, arrays, job, plain, server, table, told, worker

from regrow.core.door import ServerDoor
from regrow.core.effects import Delivered, Refuse, Send, Tick
from regrow.core.identity import Identity
from regrow.core.job import JobSpec
from regrow.core.messages import (
    Assign,
    Fault,
    Flush,
    FlushAck,
    Have,
    Member,
    Message,
    Open,
    Opened,
    Pull,
    Push,
    Pushed,
    ReadRecords,
    Records,
    RecordsWritten,
    Recovered,
    Restored,
    RestoredAck,
    Rows,
    StreamEnd,
    View,
    WriteRecords,
)
from regrow.core.protection import FlushSpec
from regrow.store.memory import MemoryStore

W0 = worker(0)
S1, S2 = server(1), server(2)
HOLDERS = [S1, S2]  # of group 0 and 1
ODD, EVEN = 0, 1  # groups
BLOCKS = 10


def the_job(**options: Any) -> JobSpec:
    return job(table(rows=60, k=2, r=1), servers=3, flush=FlushSpec(pushes=1 << 20), **options)


def initial() -> np.ndarray[Any, Any]:
    out = np.empty((2 * BLOCKS, 4), np.float32)
    MemoryStore(the_job(), 0).read_records(0, 0, 2 * BLOCKS, out)
    return out


INITIAL = initial()


def replacement(of: JobSpec | None = None) -> ServerDoor:
    """S0, incarnation 1, with its view."""
    of = of or the_job()
    machine = ServerDoor(identity=server(0, 1), build_store=MemoryStore, reply_bytes_max=1 << 20)
    members = [Member(id=s, incarnation=int(s == 0), address="", recovering=s == 0) for s in range(3)]
    machine.receive(Delivered(source=COORDINATOR, message=View(epoch=2, servers=tuple(members), job=of)))
    return machine


def active(*touched: int, odd: int = 0, even: int = 0, of: JobSpec | None = None) -> ServerDoor:
    """One whose groups know where they stand, and which of its slots were ever touched."""
    machine = replacement(of)
    tell(machine, S1, have(ODD, touched, mark=odd))
    tell(machine, S2, have(EVEN, touched, mark=even))
    return machine


def tell(machine: ServerDoor, source: Identity, message: Message) -> list[Any]:
    """What it does, without what it logs and notices."""
    effects = machine.receive(Delivered(source=source, message=message))
    return told(effect for effect in effects if isinstance(effect, Send | Refuse))


def sent(target: Identity, message: Message) -> tuple[str, str, Any]:
    return "send", str(target), plain(message)


def have(group: int, touched: tuple[int, ...] | list[int], *, mark: int = 0, number: int | None = None) -> Have:
    """Of the slots, those of this group. The number of flushes is the mark unless said."""
    member = 1 - group
    word = sum(1 << (slot // 2) for slot in touched if slot % 2 == member)
    number = mark if number is None else number
    return Have(group=group, number=number, marks=(mark,), **arrays(touched=[word]))


def restored(values: dict[int, float], *, request: int = 0) -> Restored:
    """Rows [value, value] as holders send them: relative to the initial ones, which are zeros of either sign."""
    rows_now = np.array([[value, value, 0, 0] for value in values.values()], np.float32)
    relatives = (rows_now.view(np.uint32) ^ INITIAL[list(values)].view(np.uint32)).view(np.float32)
    return Restored(request=request, relatives=relatives.ravel(), **arrays(counts=[len(values)], slots=list(values)))


def pull(*slots: int, request: int = 1) -> Pull:
    return Pull(request=request, step=0, **arrays(counts=[len(slots)], slots=list(slots)))


def push(seq: int, *slots: int) -> Push:
    return Push(seq=seq, **arrays(counts=[len(slots)], slots=list(slots), grads=[1.0] * 2 * len(slots)))


def rows(*values: float, request: int = 1, durable: int = 0, clock: int = 0) -> Rows:
    return Rows(request=request, durable=durable, clock=clock, **arrays(rows=[x for v in values for x in (v, v)]))


def fault(*slots: int) -> Fault:
    return Fault(**arrays(counts=[len(slots)], slots=list(slots)))


def weights(machine: ServerDoor) -> dict[int, float]:
    """slot -> its weight, of rows that are there and not zero."""
    store = machine.server.store
    assert isinstance(store, MemoryStore)
    _, missing = store.prepare(**arrays(counts=[2 * BLOCKS], slots=range(2 * BLOCKS)))
    out = np.zeros((2 * BLOCKS, 4), np.float32)
    for slot in set(range(2 * BLOCKS)) - set(missing.tolist()):
        store.read_records(0, slot, 1, out[slot])
    assert (out[:, 0] == out[:, 1]).all()
    return {slot: float(value) for slot, value in enumerate(out[:, 0]) if value}


def test_the_slots_and_groups_are_as_this_file_assumes() -> None:
    machine = replacement()
    assert machine.server.store is not None
    assert (machine.server.store.slots(0), machine.server.store.record_floats(0)) == (2 * BLOCKS, 4)
    groups = machine.server.flusher.geometry
    assert [groups.holders(0, g) for g in (ODD, EVEN)] == [(1,), (2,)]
    assert [groups.member(0, g) for g in (ODD, EVEN)] == [1, 0]
    assert machine.server.store.missing_rows() == 2 * BLOCKS


# --- Before the groups know where they stand ---


def test_what_workers_ask_waits_until_every_group_is_active_and_is_then_served_in_order() -> None:
    for order in itertools.permutations([(S1, ODD), (S2, EVEN)]):
        machine = replacement()
        for message in (Open(), push(1, 0, 3), pull(0, 3, 5), push(2, 0), pull(0, request=2)):
            assert tell(machine, W0, message) == []
        (first, g), (second, h) = order
        assert tell(machine, first, have(g, [])) == []
        assert tell(machine, W0, pull(5, request=3)) == []
        assert tell(machine, second, have(h, [])) == [
            sent(W0, Opened(durable=0, committed=0)),
            sent(W0, Pushed(seq=1, durable=0, clock=1)),
            sent(W0, rows(-1, -1, 0, clock=1)),
            sent(W0, Pushed(seq=2, durable=0, clock=2)),
            sent(W0, rows(-2, request=2, clock=2)),
            sent(W0, rows(0, request=3, clock=2)),
        ]


def test_the_first_view_may_come_after_everything_else() -> None:
    """Workers and holders know of it earlier than it does."""
    machine = ServerDoor(identity=server(0, 1), build_store=MemoryStore, reply_bytes_max=1 << 20)
    for source, message in [(W0, push(1, 1)), (S1, have(ODD, [])), (W0, pull(1)), (S2, have(EVEN, []))]:
        assert tell(machine, source, message) == []
    members = [Member(id=s, incarnation=int(s == 0), address="", recovering=s == 0) for s in range(3)]
    view = View(epoch=2, servers=tuple(members), job=the_job())
    answers = [effect for effect in tell(machine, COORDINATOR, view) if effect[1] == "W0"]
    assert answers == [sent(W0, Pushed(seq=1, durable=0, clock=1)), sent(W0, rows(-1, clock=1))]


def test_a_new_incarnation_of_a_worker_takes_back_what_the_old_one_waits_for() -> None:
    machine = replacement()
    tell(machine, W0, push(1, 0))
    tell(machine, worker(0, 1), Open())
    tell(machine, S1, have(ODD, []))
    assert tell(machine, S2, have(EVEN, [])) == [sent(worker(0, 1), Opened(durable=0, committed=0))]
    assert weights(machine) == {}


def test_only_its_holders_have_a_say_and_only_once() -> None:
    machine = replacement()
    assert tell(machine, S2, have(ODD, [1])) == [("refuse", "S2", "Have: S2 has no say about group 0")]
    assert tell(machine, S1, have(EVEN, [1])) == [("refuse", "S1", "Have: S1 has no say about group 1")]
    tell(machine, S1, have(ODD, []))
    assert tell(machine, S1, have(ODD, [1])) == [("refuse", "S1", "Have: S1 has no say about group 0")]
    tell(machine, S2, have(EVEN, []))
    assert machine.server.ways.serves
    assert machine.server.store.missing_rows() == 0


def test_rows_that_come_before_the_last_group_is_active_count() -> None:
    machine = replacement()
    tell(machine, S1, have(ODD, [1, 3]))
    assert tell(machine, S1, restored({1: 5, 3: 7}, request=4)) == [sent(S1, RestoredAck(request=4))]
    assert machine.server.ways.count("rows_back") == 0
    tell(machine, W0, pull(1, 3))
    assert tell(machine, S2, have(EVEN, [])) == [sent(W0, rows(5, 7))]
    assert machine.server.ways.count("rows_back") == 2


# --- Rows that are missing ---


def test_a_pull_waits_for_its_rows_and_asks_for_each_once() -> None:
    machine = active(1, 3, 4)
    assert tell(machine, W0, pull(1, 4, 5)) == [sent(S1, fault(1)), sent(S2, fault(4))]
    assert tell(machine, W0, pull(1, 3, request=2)) == [sent(S1, fault(3))]
    assert tell(machine, W0, pull(1, request=3)) == []
    assert tell(machine, W0, pull(5, 0, request=4)) == [sent(W0, rows(0, 0, request=4))], "untouched rows are computed"
    assert tell(machine, S1, restored({1: 10})) == [sent(W0, rows(10, request=3))]
    assert tell(machine, S2, restored({4: 20})) == [sent(W0, rows(10, 20, 0))]
    assert tell(machine, S1, restored({3: 30})) == [sent(W0, rows(10, 30, request=2))]


def test_a_push_waits_for_all_its_rows_and_those_behind_it_for_the_push() -> None:
    """Rows of a push are applied all at once: a pull in between sees none of it."""
    machine = active(1, 4)
    assert tell(machine, W0, push(1, 0, 1, 4)) == [sent(S1, fault(1)), sent(S2, fault(4))]
    assert tell(machine, W0, push(2, 0)) == []
    assert tell(machine, W0, pull(0)) == [sent(W0, rows(0))]
    assert tell(machine, S2, restored({4: 4})) == []
    assert tell(machine, W0, pull(0, 4)) == [sent(W0, rows(0, 4))]
    assert tell(machine, S1, restored({1: 1})) == [
        sent(W0, Pushed(seq=1, durable=0, clock=1)),
        sent(W0, Pushed(seq=2, durable=0, clock=2)),
    ]
    assert weights(machine) == {0: -2, 4: 3}


def test_a_gap_and_bad_slots_are_refused_at_once() -> None:
    machine = active(1)
    tell(machine, W0, push(1, 1))
    assert tell(machine, W0, push(3, 0)) == [("refuse", "W0", "Push: push 3 came after push 1")]
    for message in (push(2, 99), pull(99), push(2, 1, 20)):
        ((what, who, reason),) = tell(machine, W0, message)
        assert (what, who) == ("refuse", "W0")
        assert reason.endswith("is out of range")
    assert tell(machine, S1, restored({1: 1})) == [sent(W0, Pushed(seq=1, durable=0, clock=1))]


def test_a_row_that_is_there_keeps_its_value() -> None:
    """A fault and the sweep may both bring it; the second one comes too late."""
    machine = active(1)
    tell(machine, S1, restored({1: 10}))
    tell(machine, W0, push(1, 1, 5))
    assert tell(machine, S1, restored({1: 10, 5: 77, 3: 66}, request=2)) == [sent(S1, RestoredAck(request=2))]
    assert weights(machine) == {1: 9, 5: -1}


@pytest.mark.parametrize(
    "wrong",
    [
        Restored(request=0, **arrays(counts=[1], slots=[99], relatives=[0] * 4)),
        Restored(request=0, **arrays(counts=[1], slots=[1], relatives=[0] * 3)),
        Restored(request=0, **arrays(counts=[2], slots=[1], relatives=[0] * 4)),
        Restored(request=0, **arrays(counts=[1, 0], slots=[1], relatives=[0] * 4)),
    ],
)
def test_malformed_rows_are_refused(wrong: Restored) -> None:
    machine = active(1)
    ((what, who, reason),) = tell(machine, S1, wrong)
    assert (what, who, reason.split(":")[0]) == ("refuse", "S1", "Restored")
    assert machine.server.store is not None and machine.server.store.missing_rows() == 1


# --- Pushes that some groups have ---


def test_a_push_is_applied_to_the_groups_that_lack_it_and_to_no_other() -> None:
    """Its predecessor's flushes of a push to two holders are at different stages when it dies."""
    for odd, even in itertools.product(range(4), repeat=2):
        machine = active(1, 4, odd=odd, even=even)
        tell(machine, S1, restored({1: -odd}))
        tell(machine, S2, restored({4: -even}))
        assert machine.server.serving.find_durable(0) == min(odd, even)
        for seq in range(min(odd, even) + 1, 4):
            ((_, who, (name, fields)),) = tell(machine, W0, push(seq, 1, 4))
            assert (who, name, fields["seq"]) == ("W0", "Pushed", seq)
        assert weights(machine) == {1: -3, 4: -3}, (odd, even)
        assert machine.server.flusher.applied == [[3], [3]]
        # What everybody has is answered, and skipped.
        tell(machine, W0, push(1, 1, 4))
        assert weights(machine) == {1: -3, 4: -3}


def test_a_push_does_not_wait_for_rows_whose_group_has_it() -> None:
    machine = active(1, 4, odd=1, even=0)
    assert tell(machine, W0, push(1, 1, 4)) == [sent(S2, fault(4))]
    assert tell(machine, S2, restored({4: 10})) == [sent(W0, Pushed(seq=1, durable=0, clock=1))]
    tell(machine, S1, restored({1: 20}))
    assert weights(machine) == {1: 20, 4: 9}


def test_what_comes_back_goes_on_with_the_flush_after_the_last() -> None:
    machine = replacement()
    tell(machine, S1, have(ODD, [1], mark=5, number=12))
    tell(machine, S2, have(EVEN, [], mark=4, number=7))
    tell(machine, S1, restored({1: 1}))
    tell(machine, W0, push(5, 1, 0))
    flushes = [send.message for send in machine.server.flusher.flush_all() if isinstance(send.message, Flush)]
    assert [(flush.group, flush.number, flush.marks, flush.slots.tolist()) for flush in flushes] == [
        (EVEN, 8, (5,), [0])
    ], "the odd rows have not changed since"


# --- Assign, ReadRecords, WriteRecords ---


def assign(values: dict[int, float]) -> Assign:
    flat = [x for value in values.values() for x in (value, value)]
    return Assign(**arrays(counts=[len(values)], slots=list(values), weights=flat))


def test_assigning_leaves_rows_alone_that_are_still_to_come() -> None:
    machine = active(1, 4)
    assert tell(machine, W0, assign({0: 100, 1: 101, 4: 104, 7: 107})) == []
    assert weights(machine) == {0: 100, 7: 107}
    tell(machine, S1, restored({1: 5}))
    tell(machine, S2, restored({4: 6}))
    tell(machine, W0, assign({1: 201, 4: 204, 7: 207, 9: 209}))
    assert weights(machine) == {0: 100, 1: 5, 4: 6, 7: 107, 9: 209}
    for wrong in (
        Assign(**arrays(counts=[1], slots=[1], weights=[1.0])),
        Assign(**arrays(counts=[1], slots=[99], weights=[1.0] * 2)),
    ):
        assert [effect[0] for effect in tell(machine, W0, wrong)] == ["refuse"]


def test_an_assign_before_activation_waits() -> None:
    machine = replacement()
    tell(machine, W0, assign({0: 100, 1: 101}))
    tell(machine, S1, have(ODD, [1]))
    tell(machine, S2, have(EVEN, []))
    tell(machine, S1, restored({1: 5}))
    assert weights(machine) == {0: 100, 1: 5}


def test_a_dump_waits_for_its_rows() -> None:
    machine = active(1, 4)
    dump = ReadRecords(request=8, table=0, slot_first=0, slot_count=3)
    assert tell(machine, W0, dump) == [sent(S1, fault(1))]
    other = ReadRecords(request=9, table=0, slot_first=5, slot_count=2)
    assert tell(machine, W0, other) == [sent(W0, Records(request=9, **arrays(records=[0] * 8)))]
    answer = Records(request=8, **arrays(records=[0] * 4 + [3, 3, 0, 0] + [0] * 4))
    assert tell(machine, S1, restored({1: 3})) == [sent(W0, answer)]
    ((what, who, _),) = tell(machine, W0, ReadRecords(request=10, table=0, slot_first=0, slot_count=21))
    assert (what, who) == ("refuse", "W0")


def test_a_load_waits_for_its_rows_and_for_its_flush() -> None:
    """Else the row that comes back later, or the parity, would be that of before."""
    machine = active(1, 4)
    load = WriteRecords(request=8, table=0, **arrays(slots=[1, 2], records=[50, 50, 0, 0, 60, 60, 0, 0]))
    assert tell(machine, W0, load) == [sent(S1, fault(1))]
    assert weights(machine) == {}
    effects = tell(machine, S1, restored({1: 3}))
    assert [(effect[1], effect[2][0]) for effect in effects] == [("S1", "Flush"), ("S2", "Flush")]
    assert weights(machine) == {1: 50, 2: 60}
    assert tell(machine, S1, FlushAck(group=ODD, number=1)) == []
    assert tell(machine, S2, FlushAck(group=EVEN, number=1)) == [sent(W0, RecordsWritten(request=8))]


# --- Being back ---


def end(group: int) -> StreamEnd:
    return StreamEnd(group=group, number=0, marks=(0,), **arrays(counts=[0], slots=[], deltas=[]))


def test_it_has_recovered_when_all_rows_and_all_parities_are_here_in_any_order() -> None:
    """S0 holds the parities of S2's group 0 (one further round) and of S1's group 1 (two further)."""
    steps: list[tuple[Identity, Message]] = [
        (S1, restored({1: 1})),
        (S2, restored({4: 1})),
        (S2, end(ODD)),
        (S1, end(EVEN)),
    ]
    done = sent(COORDINATOR, Recovered())
    for order in itertools.permutations(steps):
        machine = active(1, 4)
        for source, message in order[:-1]:
            assert done not in tell(machine, source, message)
            assert not machine.recovered
        assert done in tell(machine, *order[-1])
        assert machine.recovered


def test_untouched_rows_are_filled_in_and_then_it_is_a_server_like_any_other() -> None:
    machine = active(1)
    for source, message in [(S1, restored({1: 1})), (S2, end(ODD)), (S1, end(EVEN))]:
        tell(machine, source, message)
    assert machine.server.ways.count("rows_total") == 1
    for now in (1.0, 2.0):
        machine.receive(Tick(now=now))
    assert machine.server.ways.is_whole
    # What still comes is answered, and changes nothing.
    assert tell(machine, S1, restored({1: 9, 3: 9}, request=7)) == [sent(S1, RestoredAck(request=7))]
    assert tell(machine, S1, have(ODD, [1])) == []
    assert weights(machine) == {1: 1}
    assert tell(machine, W0, WriteRecords(request=8, table=0, **arrays(slots=[], records=[]))) == [
        sent(W0, RecordsWritten(request=8))
    ]
