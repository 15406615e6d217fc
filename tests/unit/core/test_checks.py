"""Goal: what a peer says wrong is refused when it comes, with a reason, and changes nothing.

Method: machines in the state in which a message counts, and the message with one field that is wrong. All that the
machine knows and holds is compared with what it was before. Each of these once ended a process, or was believed.
"""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest
from helpers import COORDINATOR, arrays, job, server, shard_server, table, view, worker

from regrow.core.checks import check_marks, find_view_flaw
from regrow.core.coordinator import Coordinator
from regrow.core.cuts import CutNow, CutPlan
from regrow.core.door import ServerDoor
from regrow.core.effects import Delivered, Joined, Refuse, Send, Tick
from regrow.core.identity import Identity
from regrow.core.messages import (
    CutAsk,
    CutAt,
    CutEnd,
    CutMarks,
    CutSaved,
    Declare,
    Flush,
    FlushAck,
    FlushCommit,
    Have,
    KnownView,
    Member,
    Message,
    Push,
    Ready,
    Recovered,
    Register,
    Restored,
    StreamEnd,
    Tail,
    TailEnd,
    Undo,
    View,
)
from regrow.core.protection import FlushSpec
from regrow.core.session import Session
from regrow.errors import ProtocolError
from regrow.sim.fuzz import look
from regrow.store.memory import MemoryStore

CODED = job(table(rows=60, k=2, r=1), servers=3)  # of S0, odd slots are group 0, held by S1, even ones group 1, by S2
PAIRED = job(table(rows=60, k=2, r=2), servers=4)
NOTHING = arrays(counts=[0], slots=[], deltas=[])
PIECE = "0000000005-64aab3.full"


def check_refused(machine: Any, source: Identity, message: Message, reason: str) -> None:
    before = look(machine)
    effects = machine.receive(Delivered(source=source, message=message))
    assert [effect.target for effect in effects if isinstance(effect, Refuse)] == [source]
    assert len(effects) == 1
    assert reason in effects[0].reason
    assert look(machine) == before


def view_with(of: Any, *members: Member, epoch: int = 2) -> View:
    servers = {member.id: member for member in view(of).servers} | {member.id: member for member in members}
    return View(epoch=epoch, servers=tuple(servers.values()), job=of)


def replaced(index: int) -> Member:
    return Member(id=index, incarnation=1, address="", recovering=True)


def replacement(of: Any = CODED, *, index: int = 0) -> ServerDoor:
    machine = ServerDoor(identity=server(index, 1), build_store=MemoryStore, reply_bytes_max=1 << 20)
    machine.receive(Delivered(source=COORDINATOR, message=view_with(of, replaced(index))))
    return machine


# --- Views ---


def test_a_view_is_followed_only_if_it_names_everybody_in_place() -> None:
    good = view(CODED, epoch=2)
    first, second, third = good.servers
    old = msgspec.structs.replace(second, incarnation=-1)
    for servers in [(second, first, third), (first, second), (first, second, second), (first, old, third), ()]:
        bad = msgspec.structs.replace(good, servers=servers)
        assert find_view_flaw(servers, CODED) is not None
        check_refused(shard_server(CODED), COORDINATOR, bad, "view 2 names")
        session = Session()
        session.receive(Delivered(source=COORDINATOR, message=view(CODED)))
        before = look(session)
        with pytest.raises(ProtocolError, match="view 2 names"):
            session.receive(Delivered(source=COORDINATOR, message=bad))
        assert look(session) == before
    assert find_view_flaw(good.servers, CODED) is None


def test_a_session_stays_with_its_job() -> None:
    session = Session()
    session.receive(Delivered(source=COORDINATOR, message=view(CODED)))
    with pytest.raises(ProtocolError, match="view 2 is of another job"):
        session.receive(Delivered(source=COORDINATOR, message=view(PAIRED, epoch=2)))
    with pytest.raises(ProtocolError, match="cannot be"):
        session.receive(Delivered(source=COORDINATOR, message=view(job(servers=3, workers=0), epoch=2)))


def test_a_server_cannot_begin_with_rows_that_nobody_has() -> None:
    machine = ServerDoor(identity=server(0, 1), build_store=MemoryStore, reply_bytes_max=100)
    bare = job(table(rows=60, k=2, r=1), table("bare"), servers=3)
    bad = view_with(bare, replaced(0))
    check_refused(machine, COORDINATOR, bad, "rows without parities were lost")
    for said in (msgspec.structs.replace(bad, lost="all of it"), view(bare)):  # the last view, and one before its time
        assert machine.receive(Delivered(source=COORDINATOR, message=said)) == []


def test_a_view_in_which_too_many_come_back_breaks_nobody() -> None:
    """One parity cannot bring two members back. Whoever makes views says that they are lost; a liar does not."""
    machine = shard_server(CODED, index=2)
    flush = Flush(group=1, number=1, stable=0, marks=(1,), **arrays(counts=[2], slots=[0, 2], deltas=[1.0] * 8))
    machine.receive(Delivered(source=server(0), message=flush))
    lie = view_with(CODED, replaced(0), replaced(1))
    effects = machine.receive(Delivered(source=COORDINATOR, message=lie)) + machine.receive(Tick(now=1.0))
    assert not any(isinstance(effect, Send) and isinstance(effect.message, Restored) for effect in effects)


# --- Cuts ---


def cutting() -> ServerDoor:
    machine = shard_server(CODED)
    assert machine.server is not None
    machine.server.store.add_tenant()  # type: ignore[attr-defined]
    machine.receive(Delivered(source=COORDINATOR, message=CutAsk(number=1)))
    return machine


def test_a_cut_names_all_marks_and_a_piece() -> None:
    at = CutAt(number=1, marks=(0,), piece=PIECE, full=True)
    check_refused(cutting(), COORDINATOR, msgspec.structs.replace(at, marks=(0, 0)), "CutAt: 2 marks, this job has 1")
    check_refused(cutting(), COORDINATOR, msgspec.structs.replace(at, marks=(-1,)), "CutAt: marks must be between")
    check_refused(
        cutting(), COORDINATOR, msgspec.structs.replace(at, piece="../x"), "'../x' is not the name of a piece"
    )


def test_a_cut_is_not_durable_before_its_rows_were_taken() -> None:
    machine = cutting()
    push = Push(seq=1, **arrays(counts=[1], slots=[0], grads=[1, 1]))
    machine.receive(Delivered(source=worker(0), message=push))  # it is held back, and then captured
    machine.receive(Delivered(source=COORDINATOR, message=CutAt(number=1, marks=(1,), piece=PIECE, full=True)))
    assert machine.server is not None and machine.server.store.capture_left() == 1
    check_refused(machine, COORDINATOR, CutEnd(number=1, durable=True), "1 captured rows were not taken yet")


def chief(*, known: bool = False) -> Coordinator:
    machine = Coordinator(servers=3, cut_plan=CutPlan(), term=1)
    for index in range(3):
        machine.receive(Joined(peer=server(index)))
        machine.receive(Delivered(source=server(index), message=Register(address="")))
    if not known:
        machine.receive(Delivered(source=worker(0), message=Declare(job=CODED)))
        for index in range(3):
            machine.receive(Delivered(source=server(index), message=Ready(rows=1, memory_bytes=1)))
    return machine


def test_a_coordinator_believes_marks_and_chunks_that_can_be() -> None:
    machine = chief()
    machine.receive(CutNow())
    machine.receive(Tick(now=0.1))
    number = (1 << 32) + 1
    for marks, reason in [((), "0 marks"), ((1, 1), "2 marks"), ((-1,), "marks must"), ((2**62,), "marks must")]:
        check_refused(machine, server(0), CutMarks(number=number, marks=marks), f"CutMarks: {reason}")
    for index in range(3):
        machine.receive(Delivered(source=server(index), message=CutMarks(number=number, marks=(5,))))
    maker = machine.turns.underway if machine.turns is not None else None
    assert maker is not None
    assert maker._attempt is not None
    maker._attempt.begun.add(0)
    chunks = np.array([0xFF], np.uint8)
    check_refused(machine, server(0), CutSaved(number=number, error="", chunks=chunks), "CutSaved: ")


# --- Servers, at the coordinator ---


def test_a_coordinator_learns_only_what_can_be() -> None:
    first, second, third = view(CODED).servers
    servers = (first, second, third)
    newer = msgspec.structs.replace(first, incarnation=1)
    bad_job = msgspec.structs.replace(CODED, workers=0)
    for known, reason in [
        (KnownView(epoch=-1, servers=servers, job=CODED), "has epoch -1"),
        (KnownView(epoch=1, servers=servers, job=bad_job), "is of a job that cannot be"),
        (KnownView(epoch=1, servers=servers[:2], job=CODED), "names 2 servers"),
        (KnownView(epoch=1, servers=(second, first, third), job=CODED), "names server 1"),
        (KnownView(epoch=1, servers=(newer, second, third), job=CODED), "names another in its place"),
        (KnownView(epoch=1, servers=servers, job=PAIRED), "is of another cluster"),
    ]:
        machine = Coordinator(servers=3)
        machine.receive(Joined(peer=server(0)))
        check_refused(machine, server(0), Register(address="", known=known), reason)


def test_nobody_has_recovered_before_it_was_ready() -> None:
    machine = chief()
    machine.receive(Delivered(source=server(0, 1), message=Register(address="")))
    check_refused(machine, server(0, 1), Recovered(), "not ready")
    machine.receive(Delivered(source=server(0, 1), message=Ready(rows=1, memory_bytes=1)))
    assert machine.receive(Delivered(source=server(0, 1), message=Recovered())) != []


# --- Parities ---

# Of S0, group 1 (even slots) is held by S2.
PART = arrays(counts=[2], slots=[0, 2], deltas=[1.0] * 8)


@pytest.mark.parametrize("staged", [False, True])
def test_a_flush_has_marks_and_a_past(staged: bool) -> None:
    good = Flush(group=1, number=1, stable=0, marks=(1,), staged=staged, **PART)
    for wrong, reason in [
        ({"marks": ()}, "0 marks, this job has 1"),
        ({"marks": (1, 1)}, "2 marks"),
        ({"marks": (-1,)}, "marks must be between"),
        ({"stable": 1}, "flush 1 of group 1 says that 1 is stable"),
        (arrays(slots=[0, 1]), "slot" if not staged else "rows that are not in group 1"),
        (arrays(deltas=[1.0] * 7), "floats" if not staged else "7 values are not the records of 2 slots"),
    ]:
        check_refused(shard_server(CODED, index=2), server(0), msgspec.structs.replace(good, **wrong), reason)


def test_a_commit_applies_all_that_it_names_or_nothing() -> None:
    machine = shard_server(CODED, index=2)
    flush = Flush(group=1, number=1, stable=0, marks=(1,), staged=True, **PART)
    machine.receive(Delivered(source=server(0), message=flush))
    check_refused(machine, server(0), FlushCommit(group=1, number=2), "commit of flush 2 of group 1, which is not here")
    assert len(machine.receive(Delivered(source=server(0), message=FlushCommit(group=1, number=1)))) == 1


def test_a_stream_ends_with_marks_and_rows_of_its_group() -> None:
    end = StreamEnd(group=1, number=1, marks=(1,), **PART)
    for wrong, reason in [
        ({"marks": (1, 2)}, "2 marks"),
        (arrays(deltas=[1.0]), "1 values are not the records"),
        (arrays(slots=[0, 1]), "rows that are not in group 1"),
    ]:
        check_refused(replacement(index=2), server(0), msgspec.structs.replace(end, **wrong), reason)


def test_an_acknowledgement_is_of_a_flush_that_is_remembered() -> None:
    of = msgspec.structs.replace(CODED, protection=msgspec.structs.replace(CODED.protection, flush=FlushSpec(pushes=1)))
    machine = shard_server(of)
    machine.receive(Delivered(source=COORDINATOR, message=view_with(of, replaced(2))))  # its stream begins, and ends
    for seq in (1, 2, 3):
        push = Push(seq=seq, **arrays(counts=[1], slots=[0], grads=[1, 1]))
        machine.receive(Delivered(source=worker(0), message=push))
    assert machine.server is not None
    group = machine.server.flusher.groups[1]
    group.acked[2], group.history = 0, {0: (0,), group.number: group.flushed}
    group.streams.clear()
    check_refused(machine, server(2, 1), FlushAck(group=1, number=2), "is not one that S2 can be at")
    machine.receive(Delivered(source=server(2, 1), message=FlushAck(group=1, number=group.number)))
    assert group.acked[2] == group.number


# --- Holders among themselves ---


def agreeing() -> ServerDoor:
    """S3 of four with two parities each, when S1 was replaced: group 1 of S1 (even slots) is at S3 and S0."""
    machine = shard_server(PAIRED, index=3)
    machine.receive(Delivered(source=COORDINATOR, message=view_with(PAIRED, replaced(1))))
    return machine


def test_tails_come_from_holders_and_end_where_they_end() -> None:
    of_s1: dict[str, Any] = {"source": 1, "incarnation": 1, "group": 1}
    tail = Tail(**of_s1, number=1, stable=0, marks=(1,), **PART)
    check_refused(agreeing(), server(2), tail, "S2 holds no parity of group 1 of S1")
    check_refused(agreeing(), server(0), msgspec.structs.replace(tail, marks=()), "0 marks")
    check_refused(agreeing(), server(0), msgspec.structs.replace(tail, stable=1), "says that 1 is stable")
    check_refused(agreeing(), server(0), TailEnd(**of_s1, number=1), "a tail ended at flush 1 before all")
    machine = agreeing()
    machine.receive(Delivered(source=server(0), message=tail))
    assert machine.receive(Delivered(source=server(0), message=TailEnd(**of_s1, number=1))) != []


def test_a_tail_says_what_all_have() -> None:
    """Or a holder would keep the flushes of every life of a source that dies again and again."""
    machine = agreeing()
    tail = Tail(source=1, incarnation=1, group=1, number=1, stable=0, marks=(1,), **PART)
    for message in (tail, msgspec.structs.replace(tail, number=2), msgspec.structs.replace(tail, number=3, stable=2)):
        machine.receive(Delivered(source=server(0), message=message))
    assert machine.server is not None
    assert [flush.number for flush in machine.server.holder.held[1, 1].tail] == [3]


def test_what_came_early_and_is_wrong_hits_its_sender_alone() -> None:
    machine = shard_server(PAIRED, index=3)
    early = TailEnd(source=1, incarnation=1, group=1, number=7)
    assert machine.receive(Delivered(source=server(0), message=early)) == []
    effects = machine.receive(Delivered(source=COORDINATOR, message=view_with(PAIRED, replaced(1))))
    assert [effect.target for effect in effects if isinstance(effect, Refuse)] == [server(0)]
    assert machine.server is not None and machine.server.view.epoch == 2


# --- The way back ---


def test_what_is_brought_fits_before_a_part_of_it_is_believed() -> None:
    have = Have(group=1, number=1, marks=(1,), touched=np.array([1], np.uint64))
    for wrong, reason in [
        ({"marks": (1, 1)}, "2 marks"),
        ({"touched": np.zeros(0, np.uint64)}, "0 words of bits, group 1 has 1"),
        ({"touched": np.zeros(2, np.uint64)}, "2 words of bits"),
        ({"touched": np.array([1 << 10], np.uint64)}, "bits beyond the last of 10 blocks"),
    ]:
        check_refused(replacement(), server(2), msgspec.structs.replace(have, **wrong), reason)
    undo = Undo(group=1, **PART)
    check_refused(replacement(), server(2), msgspec.structs.replace(undo, **arrays(deltas=[1.0])), "1 values are not")
    rows = Restored(request=0, **arrays(counts=[1], slots=[2**31], relatives=[1.0] * 4))
    check_refused(replacement(), server(2), rows, "out of range")
    machine = replacement()
    machine.receive(Delivered(source=server(2), message=have))
    assert machine.server is not None and machine.server.flusher.groups[1].active


def test_holders_that_do_not_agree_are_not_believed() -> None:
    machine = replacement(PAIRED)  # group 1 of S0 is held by S2 and S3
    have = Have(group=1, number=1, marks=(1,), touched=np.array([1], np.uint64))
    machine.receive(Delivered(source=server(2), message=have))
    check_refused(machine, server(3), msgspec.structs.replace(have, number=2), "do not agree")
    check_refused(machine, server(3), msgspec.structs.replace(have, marks=(2,)), "do not agree")


def test_marks() -> None:
    check_marks((0, 2**62), 2)
    for marks, count in [((), 1), ((1,), 2), ((-1,), 1), ((2**62 + 1,), 1)]:
        with pytest.raises(ValueError, match="marks"):
            check_marks(marks, count)
