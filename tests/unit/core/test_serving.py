"""Goal: each push of a worker changes the rows exactly once, in order, or not at all and with a reason.

Method: a real server over real rows in memory, fed message by message. Rows start at zero and the update is
`w -= g`, so expected values are small whole numbers. After every refusal the rows are compared with those
before.
"""

from __future__ import annotations

import itertools
from typing import Any

import msgspec
import numpy as np
import pytest
from helpers import COORDINATOR, arrays, job, plain, server, shard_server, table, told, view, worker

from regrow.core.door import EARLY_OPENS_MAX, ServerDoor
from regrow.core.effects import Delivered, Lost
from regrow.core.identity import Identity
from regrow.core.job import JobSpec
from regrow.core.messages import (
    Assign,
    Message,
    Open,
    Opened,
    Pull,
    Push,
    Pushed,
    ReadRecords,
    Ready,
    Records,
    RecordsWritten,
    Rows,
    WriteRecords,
)
from regrow.store.memory import MemoryStore

W0, W1, W2 = worker(0), worker(1), worker(2)


def tell(machine: ServerDoor, source: Identity, message: Message) -> list[Any]:
    return told(machine.receive(Delivered(source=source, message=message)))


def sent(target: Identity, message: Message) -> tuple[str, str, Any]:
    return "send", str(target), plain(message)


def refused(target: Identity, reason: str) -> list[tuple[str, str, str]]:
    return [("refuse", str(target), reason)]


def push(seq: int, slots: list[int], grads: list[float], counts: list[int] | None = None) -> Push:
    sizes = [len(slots)] if counts is None else counts
    return Push(seq=seq, **arrays(counts=sizes, slots=slots, grads=grads))


def with_rates(message: Push, *rates: float) -> Push:
    return msgspec.structs.replace(message, rates=rates)


def pull(slots: list[int], *, step: int = 0, request: int = 1, counts: list[int] | None = None) -> Pull:
    sizes = [len(slots)] if counts is None else counts
    return Pull(request=request, step=step, **arrays(counts=sizes, slots=slots))


def rows(values: list[float], *, durable: int = 0, clock: int = 0, request: int = 1) -> Rows:
    return Rows(request=request, durable=durable, clock=clock, **arrays(rows=values))


def pushed(seq: int, *, durable: int, clock: int) -> Pushed:
    return Pushed(seq=seq, durable=durable, clock=clock)


def weights(machine: ServerDoor) -> list[list[float]]:
    """All rows of table 0, state included."""
    store = machine.server.store
    assert store is not None
    out = np.zeros(store.slots(0) * store.record_floats(0), np.float32)
    store.read_records(0, 0, store.slots(0), out)
    kept: list[list[float]] = out.reshape(store.slots(0), -1)[:, :2].tolist()
    return kept


def changed(machine: ServerDoor) -> dict[int, list[float]]:
    """slot -> weights, of those rows of table 0 that are not zero."""
    return {slot: row for slot, row in enumerate(weights(machine)) if any(row)}


# --- Asynchronous mode ---


def test_a_push_is_applied_when_it_comes_and_a_pull_sees_it() -> None:
    machine = shard_server(job(workers=2))
    assert tell(machine, W0, Open()) == [sent(W0, Opened(durable=0, committed=0))]
    assert tell(machine, W0, pull([4, 4, 0])) == [sent(W0, rows([0] * 6))]
    assert tell(machine, W0, push(1, [4, 7], [1, 2, 3, 4])) == [sent(W0, pushed(1, durable=1, clock=1))]
    assert tell(machine, W1, push(1, [4], [10, 20])) == [sent(W1, pushed(1, durable=1, clock=2))]
    assert tell(machine, W1, pull([7, 4], step=2)) == [sent(W1, rows([-3, -4, -11, -22], durable=1, clock=2))]
    assert tell(machine, W0, Open()) == [sent(W0, Opened(durable=1, committed=0))]
    assert (machine.server.flusher.applied, machine.server.serving.clock, machine.server.serving.pulls) == (
        [[1, 1]],
        2,
        2,
    )


def test_a_push_brings_its_own_learning_rate() -> None:
    """For itself alone: the next one without has that of the job again, which is 1."""
    machine = shard_server(job())
    tell(machine, W0, with_rates(push(1, [0], [1, 1]), 0.25))
    assert changed(machine) == {0: [-0.25, -0.25]}
    tell(machine, W0, push(2, [0], [1, 1]))
    assert changed(machine) == {0: [-1.25, -1.25]}


def test_a_duplicate_is_answered_but_not_applied() -> None:
    machine = shard_server(job())
    for seq in (1, 2):
        tell(machine, W0, push(seq, [0], [1, 1]))
    for seq in (1, 2, 2, 0):
        assert tell(machine, W0, push(seq, [0], [100, 100])) == [sent(W0, pushed(seq, durable=2, clock=2))]
    assert changed(machine) == {0: [-2, -2]}


def test_a_gap_is_refused() -> None:
    machine = shard_server(job())
    tell(machine, W0, push(1, [0], [1, 1]))
    assert tell(machine, W0, push(3, [0], [1, 1])) == refused(W0, "Push: push 3 came after push 1")
    assert changed(machine) == {0: [-1, -1]}
    assert tell(machine, W0, push(2, [0], [1, 1])) == [sent(W0, pushed(2, durable=2, clock=2))]


def test_an_empty_push_counts() -> None:
    machine = shard_server(job())
    assert tell(machine, W0, push(1, [], [])) == [sent(W0, pushed(1, durable=1, clock=1))]
    assert tell(machine, W0, pull([])) == [sent(W0, rows([], durable=1, clock=1))]


BAD_PUSHES = {
    "counts do not describe 1 slots in 2 tables": [
        push(1, [0], [1, 1], counts=[1]),
        push(1, [0], [1, 1], counts=[1, 0, 0]),
        push(1, [0], [1, 1], counts=[]),
        push(1, [0], [1, 1], counts=[0, 0]),
        push(1, [0], [1, 1], counts=[2, -1]),
        push(1, [0], [1, 1], counts=[2**31 - 1, 2]),
    ],
    "1 gradient values do not fit 1 slots": [push(1, [0], [1], counts=[1, 0])],
    "3 gradient values do not fit 1 slots": [push(1, [0], [1, 1, 1], counts=[1, 0])],
    "out of range": [
        push(1, [10], [1, 1], counts=[1, 0]),
        push(1, [0, 2**32 - 1], [1, 1, 1, 1], counts=[2, 0]),
        push(1, [0, 3], [1, 1, 1, 1, 1], counts=[1, 1]),
    ],
    "1 learning rates for 2 tables": [with_rates(push(1, [0], [1, 1], counts=[1, 0]), 0.5)],
    "must be a finite number and not negative": [
        with_rates(push(1, [0], [1, 1], counts=[1, 0]), 0.5, -0.5),
        with_rates(push(1, [0], [1, 1], counts=[1, 0]), float("inf"), 1.0),
        with_rates(push(1, [0], [1, 1], counts=[1, 0]), 1.0, float("nan")),
    ],
    "a slot is named twice": [
        push(1, [4, 4], [1, 1, 1, 1], counts=[2, 0]),
        push(1, [0, 1, 2, 1, 2], [1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1], counts=[2, 3]),
    ],
}


@pytest.mark.parametrize("mode", ["async", "sync"])
@pytest.mark.parametrize(
    ("reason", "message"), [(reason, bad) for reason, all_bad in BAD_PUSHES.items() for bad in all_bad]
)
def test_a_bad_push_is_refused_whole(mode: Any, reason: str, message: Push) -> None:
    machine = shard_server(job(table(), table("other", rows=3, dim=3), mode=mode))
    ((verb, target, why),) = tell(machine, W0, message)
    assert (verb, target) == ("refuse", "W0")
    assert why.startswith("Push: ")
    assert reason in why
    assert (changed(machine), machine.server.serving.clock, set(machine.server.flusher.applied[0])) == ({}, 0, {0})
    # It has not used up its number either, and in sync mode nothing of it is staged.
    assert len(tell(machine, W0, push(1, [0], [1, 1], counts=[1, 0]))) == 1
    if mode == "sync":
        tell(machine, W0, pull([], step=1, counts=[0, 0]))
        tell(machine, W0, pull([], step=2, counts=[0, 0]))
    assert changed(machine) == {0: [-1, -1]}


@pytest.mark.parametrize("mode", ["async", "sync"])
@pytest.mark.parametrize("step", [0, 1])
def test_a_bad_pull_is_refused(mode: Any, step: int) -> None:
    machine = shard_server(job(mode=mode), reply_bytes_max=800)
    for slots, counts, reason in [
        ([1, 2], [1], "counts do not describe 2 slots in 1 tables"),
        ([1], [-1], "counts do not describe 1 slots in 1 tables"),
        ([10], [1], "out of range"),
        ([1] * 101, [101], "is about 808 bytes, at most 800 are allowed"),
    ]:
        ((verb, _, why),) = tell(machine, W0, pull(slots, step=step, counts=counts))
        assert (verb, reason in why) == ("refuse", True), why
    assert machine.server.serving.pulls == 0
    assert len(tell(machine, W0, pull([1] * 100, step=step))) == 1


def test_an_old_incarnation_of_a_worker_is_fenced_off() -> None:
    machine = shard_server(job())
    tell(machine, W0, push(1, [0], [1, 1]))
    newer = worker(0, incarnation=1)
    assert tell(machine, newer, Open()) == [sent(newer, Opened(durable=1, committed=0))]
    for message in (push(2, [0], [50, 50]), pull([0]), Open()):
        assert tell(machine, W0, message) == refused(W0, "a newer incarnation of W0 is at work")
    assert changed(machine) == {0: [-1, -1]}
    assert tell(machine, newer, push(2, [0], [1, 1])) == [sent(newer, pushed(2, durable=2, clock=2))]


def test_who_may_say_what() -> None:
    machine = shard_server(job(workers=2))
    assert tell(machine, worker(2), Open()) == refused(W2, "worker 2 of a job with 2")
    assert tell(machine, server(3), push(1, [0], [1, 1])) == refused(server(3), "S3 has no place in view 1")
    assert tell(machine, COORDINATOR, Open()) == refused(COORDINATOR, "Open from a coordinator")
    strange = pushed(1, durable=0, clock=0)
    assert tell(machine, W0, strange) == refused(W0, "Pushed: a server does not take this message")
    assert tell(machine, W0, view(job())) == refused(W0, "only the coordinator makes views")
    assert changed(machine) == {}


def test_a_lost_worker_is_a_line_in_the_log() -> None:
    machine = shard_server(job())
    assert told(machine.receive(Lost(peer=W0, reason="gone"))) == [("log", "W0 is gone: gone")]


# --- Views ---


def test_opens_that_come_before_the_first_view_wait_for_it() -> None:
    machine = shard_server()
    assert tell(machine, W0, Open()) == []
    assert tell(machine, W1, Open()) == []
    effects = tell(machine, COORDINATOR, view(job(workers=1)))
    ready = Ready(rows=10, memory_bytes=machine.server.store.memory_bytes)  # type: ignore[union-attr]
    assert effects == [
        ("log", "view 1: 1 servers"),
        sent(COORDINATOR, ready),
        sent(W0, Opened(durable=0, committed=0)),
        *refused(W1, "worker 1 of a job with 1"),
    ]


def test_what_waits_is_small_and_bounded() -> None:
    machine = shard_server()
    assert tell(machine, W0, push(1, [0], [1, 1])) == refused(W0, "Push before the first view")
    for _ in range(EARLY_OPENS_MAX):
        assert tell(machine, W0, Open()) == []
    assert tell(machine, W0, Open()) == refused(W0, "Open before the first view")
    effects = tell(machine, COORDINATOR, view(job()))
    assert len(effects) == 2 + EARLY_OPENS_MAX


def test_views_that_are_not_followed() -> None:
    machine = shard_server()
    assert tell(machine, COORDINATOR, view(job(servers=0))) == refused(
        COORDINATOR, "view 1 is of a job that cannot be: servers must be between 1 and 4096, not 0"
    )
    assert machine.server is None
    far = shard_server(index=3)
    assert tell(far, COORDINATOR, view(job(servers=2))) == refused(COORDINATOR, "view 1 has no place for S3")
    tell(machine, COORDINATOR, view(job(), epoch=3))
    tell(machine, W0, push(1, [0], [1, 1]))
    assert tell(machine, COORDINATOR, view(job(), epoch=3)) == []
    assert tell(machine, COORDINATOR, view(job(), epoch=2)) == []
    other = view(job(table(rows=11)), epoch=4)
    assert tell(machine, COORDINATOR, other) == refused(COORDINATOR, "view 4 is of another job")
    assert tell(machine, COORDINATOR, view(job(), epoch=4)) == [("log", "view 4: 1 servers")]
    assert changed(machine) == {0: [-1, -1]}, "a new view keeps the rows"


def test_a_server_that_gets_no_memory_has_no_view() -> None:
    def no_room(_: JobSpec, __: int, ___: bool) -> MemoryStore:
        raise MemoryError("no room")

    machine = ServerDoor(identity=server(0), build_store=no_room, reply_bytes_max=100)
    with pytest.raises(MemoryError):
        tell(machine, COORDINATOR, view(job()))
    assert machine.server is None, "or it would answer workers without rows"


# --- Initial weights, whole records ---


def test_assign_reaches_rows_that_nobody_touched() -> None:
    machine = shard_server(job(workers=2))
    tell(machine, W0, push(1, [1], [1, 1]))
    assign = Assign(**arrays(counts=[2], slots=[0, 1], weights=[5, 6, 7, 8]))
    assert tell(machine, W0, assign) == []
    assert tell(machine, W1, Assign(**arrays(counts=[1], slots=[0], weights=[9, 9]))) == []
    assert changed(machine) == {0: [5, 6], 1: [-1, -1]}
    ((verb, _, why),) = tell(machine, W0, Assign(**arrays(counts=[1], slots=[99], weights=[1, 1])))
    assert (verb, "out of range" in why) == ("refuse", True)


def test_dump_and_load_move_whole_records() -> None:
    machine = shard_server(job(table(kind="adagrad", lr=0.5)))
    tell(machine, W0, push(1, [2], [1, 2]))
    dump = ReadRecords(request=7, table=0, slot_first=1, slot_count=2)
    first = [-0.5, -0.5, 1, 4]
    records = Records(request=7, **arrays(records=[0, 0, 0, 0, *first]))
    assert tell(machine, W0, dump) == [sent(W0, records)]
    load = WriteRecords(request=8, table=0, **arrays(slots=[9, 2, 3, 0], records=range(16)))
    assert tell(machine, W0, load) == [sent(W0, RecordsWritten(request=8))]
    after = Records(request=9, **arrays(records=[12, 13, 14, 15, 0, 0, 0, 0, 4, 5, 6, 7, 8, 9, 10, 11]))
    assert tell(machine, W0, ReadRecords(request=9, table=0, slot_first=0, slot_count=4)) == [sent(W0, after)]
    nothing = WriteRecords(request=10, table=0, **arrays(slots=[], records=[]))
    assert tell(machine, W0, nothing) == [sent(W0, RecordsWritten(request=10))]


@pytest.mark.parametrize(
    ("message", "reason"),
    [
        (ReadRecords(request=1, table=1, slot_first=0, slot_count=1), "ReadRecords: table 1 of 1"),
        (ReadRecords(request=1, table=0, slot_first=9, slot_count=2), "out of range"),
        (ReadRecords(request=1, table=0, slot_first=2**62, slot_count=1), "out of range"),
        (
            ReadRecords(request=1, table=0, slot_first=0, slot_count=2**32 - 1),
            "ReadRecords: is about 68719476720 bytes",
        ),
        (WriteRecords(request=1, table=5, **arrays(slots=[0], records=[1] * 4)), "WriteRecords: table 5 of 1"),
        (WriteRecords(request=1, table=0, **arrays(slots=[0, 10], records=[1] * 8)), "WriteRecords: slot 10 of 10"),
        (WriteRecords(request=1, table=0, **arrays(slots=[0], records=[1] * 5)), "5 values are not 1 records of 4"),
        (WriteRecords(request=1, table=0, **arrays(slots=[], records=[1])), "1 values are not 0 records of 4"),
    ],
)
def test_bad_dumps_and_loads_are_refused_whole(message: Message, reason: str) -> None:
    machine = shard_server(job())
    ((verb, _, why),) = tell(machine, W0, message)
    assert (verb, reason in why) == ("refuse", True), why
    assert changed(machine) == {}


# --- Synchronous mode ---


def sync_server(workers: int) -> ServerDoor:
    machine = shard_server(job(workers=workers, mode="sync"))
    for index in range(workers):
        tell(machine, worker(index), Open())
        assert tell(machine, worker(index), pull([0], step=1)) == [sent(worker(index), rows([0, 0]))]
    return machine


def test_a_step_is_applied_when_all_staged_it_and_all_pulled_the_next() -> None:
    """All orders of two pushes and two pulls, in which each worker pushes before it pulls."""
    acts = [(W0, push(1, [0], [1, 1])), (W1, push(1, [0], [2, 2]))]
    acts += [(W0, pull([0], step=2, request=10)), (W1, pull([0], step=2, request=11))]
    tried = 0
    for order in itertools.permutations(range(4)):
        if order.index(0) > order.index(2) or order.index(1) > order.index(3):
            continue
        machine = sync_server(2)
        answers = []
        for number, index in enumerate(order):
            assert changed(machine) == {}, f"applied after {number} of {order}"
            answers.append(tell(machine, *acts[index]))
        assert changed(machine) == {0: [-3, -3]}
        for index, answer in zip(order[:3], answers[:3], strict=True):
            source = acts[index][0]
            expected = [sent(source, pushed(1, durable=0, clock=0))] if index < 2 else []
            assert answer == expected
        pulls = [index for index in order if index >= 2]
        replies = [sent(acts[index][0], rows([-3, -3], durable=1, clock=2, request=8 + index)) for index in pulls]
        assert answers[3] == replies
        assert (machine.server.serving.committed, machine.server.serving.clock) == (1, 2)
        tried += 1
    assert tried == 6


def test_a_step_has_one_learning_rate() -> None:
    """That of all its pushes. Who pushes another is told so; what others have staged stays."""
    machine = sync_server(2)
    tell(machine, W0, with_rates(push(1, [0], [1, 1]), 0.5))
    assert tell(machine, W1, push(1, [0], [2, 2])) == refused(
        W1, "Push: step 1 has learning rate 1 for table 't0', and 0.5 in worker 0"
    )
    assert tell(machine, W1, with_rates(push(1, [0], [2, 2]), 0.5)) == [sent(W1, pushed(1, durable=0, clock=0))]
    for who in (W0, W1):
        tell(machine, who, pull([0], step=2))
    assert changed(machine) == {0: [-1.5, -1.5]}


def test_a_commit_may_come_with_the_last_push() -> None:
    """A worker that pulls ahead of its own push takes part in the commit when the push is there."""
    machine = sync_server(1)
    assert tell(machine, W0, pull([0], step=2, request=5)) == []
    assert tell(machine, W0, push(1, [0], [1, 1])) == [
        sent(W0, pushed(1, durable=0, clock=0)),
        sent(W0, rows([-1, -1], durable=1, clock=1, request=5)),
    ]


def test_gradients_are_summed_in_worker_order() -> None:
    """(1e8 + -1e8) + 1 is 1 in float32; in any other order the 1 is lost."""
    grads = {0: [1e8, 1e8], 1: [-1e8, -1e8], 2: [1.0, 1.0]}
    for order in itertools.permutations(range(3)):
        machine = sync_server(3)
        for index in order:
            tell(machine, worker(index), push(1, [0], grads[index]))
        for index in order:
            tell(machine, worker(index), pull([0], step=2))
        assert changed(machine) == {0: [-1, -1]}, order


def test_a_step_without_rows_still_needs_everybody() -> None:
    machine = sync_server(2)
    assert tell(machine, W0, push(1, [], [])) == [sent(W0, pushed(1, durable=0, clock=0))]
    assert tell(machine, W0, pull([], step=2)) == []
    assert tell(machine, W1, push(1, [], [])) == [sent(W1, pushed(1, durable=0, clock=0))]
    assert tell(machine, W1, pull([0], step=2)) == [
        sent(W0, rows([], durable=1, clock=2)),
        sent(W1, rows([0, 0], durable=1, clock=2)),
    ]


def test_reading_takes_part_in_nothing() -> None:
    machine = sync_server(2)
    for index in range(2):
        tell(machine, worker(index), push(1, [0], [1, 1]))
        assert tell(machine, worker(index), pull([0], step=0)) == [sent(worker(index), rows([0, 0]))]
    assert machine.server.serving.committed == 0


def test_steps_out_of_reach_are_refused() -> None:
    machine = sync_server(1)
    reason = "while step 0 is committed"
    assert tell(machine, W0, pull([0], step=3)) == refused(W0, f"Pull: pull of step 3 {reason}")
    assert tell(machine, W0, push(3, [0], [1, 1])) == refused(W0, f"Push: push of step 3 {reason}")
    tell(machine, W0, push(1, [0], [1, 1]))
    tell(machine, W0, pull([0], step=2))
    assert tell(machine, W0, pull([0], step=1)) == refused(W0, "Pull: pull of step 1 while step 1 is committed")
    # A push that was committed already is a duplicate.
    assert tell(machine, W0, push(1, [0], [9, 9])) == [sent(W0, pushed(1, durable=1, clock=1))]
    assert changed(machine) == {0: [-1, -1]}
    assert tell(machine, W0, Open()) == [sent(W0, Opened(durable=1, committed=1))]


def test_what_is_sent_again_counts_once() -> None:
    machine = sync_server(2)
    for _ in range(3):
        tell(machine, W0, push(1, [0], [1, 1]))
    for _ in range(3):
        assert tell(machine, W0, pull([0], step=2, request=4)) == []
    # Pulling step 1 once more does not take the commit back.
    assert tell(machine, W0, pull([0], step=1)) == [sent(W0, rows([0, 0]))]
    tell(machine, W1, push(1, [0], [1, 1]))
    assert tell(machine, W1, pull([0], step=2, request=5)) == [
        sent(W0, rows([-2, -2], durable=1, clock=2, request=4)),
        sent(W1, rows([-2, -2], durable=1, clock=2, request=5)),
    ]


def test_a_bad_request_hits_its_sender_and_nobody_else() -> None:
    """It used to be parked unchecked, and then refused whoever completed the step."""
    machine = sync_server(2)
    ((verb, target, why),) = tell(machine, W0, pull([10], step=2))
    assert (verb, target, "out of range" in why) == ("refuse", "W0", True)
    assert machine.server.serving.committed == 0
    for index in range(2):
        tell(machine, worker(index), push(1, [0], [1, 1]))
    assert tell(machine, W1, pull([0], step=2)) == [], "the bad pull was no commit"
    assert len(tell(machine, W0, pull([0], step=2))) == 2


def test_a_restarted_worker_replaces_what_its_old_self_staged() -> None:
    machine = sync_server(2)
    tell(machine, W0, push(1, [0], [100, 100]))
    newer = worker(0, incarnation=1)
    assert tell(machine, newer, Open()) == [sent(newer, Opened(durable=0, committed=0))]
    tell(machine, newer, push(1, [0], [1, 1]))
    assert tell(machine, W0, push(1, [0], [100, 100])) == refused(W0, "a newer incarnation of W0 is at work")
    tell(machine, W1, push(1, [0], [1, 1]))
    tell(machine, W1, pull([], step=2))
    assert tell(machine, newer, pull([0], step=2)) == [
        sent(W1, rows([], durable=1, clock=2)),
        sent(newer, rows([-2, -2], durable=1, clock=2)),
    ]
