"""Goal: what is on the wire stays what it is, and a job that cannot work is named before anything is built.

Method: the numbers and fields of all messages are compared with a table written down here, so that a change
of the wire format is a visible change of this file. Jobs are checked one wrong value at a time.
"""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest
from helpers import arrays, example_messages, job, plain, table

from regrow import _kernels
from regrow.core import twins
from regrow.core.job import JobSpec, OptimizerSpec, TableSpec
from regrow.core.messages import KINDS, Message, Pull, encode_meta
from regrow.core.protection import Coded

WIRE = {
    1: "Challenge(protocol, nonce)",
    2: "Hello(protocol, role, id, incarnation, nonce, proof, received, target_role, target_id, "
    "target_incarnation, sealed)",
    3: "Welcome(role, id, incarnation, proof, received, sealed)",
    4: "Refused(reason, kind, proof)",
    5: "Ack()",
    10: "Register(address, known)",
    11: "Declare(job)",
    12: "View(epoch, servers, job, lost)",
    13: "Ready(rows, memory_bytes)",
    14: "Recovered()",
    15: "Beat(step, brought, answers, unanswered)",
    16: "StateAsk(number)",
    20: "Open()",
    21: "Opened(durable, committed, reads_ahead)",
    22: "Pull(request, step, counts: <i4, slots: <u4)",
    23: "Rows(request, durable, clock, rows: <f4)",
    24: "Push(seq, rates, counts: <i4, slots: <u4, grads: <f4)",
    25: "Pushed(seq, durable, clock)",
    26: "Assign(counts: <i4, slots: <u4, weights: <f4)",
    27: "Durable(durable)",
    28: "Commit(seq)",
    29: "Expect(counts: <i4, slots: <u4)",
    30: "ReadRecords(request, table, parity, slot_first, slot_count)",
    31: "Records(request, records: <f4)",
    32: "WriteRecords(request, table, slots: <u4, records: <f4)",
    33: "RecordsWritten(request)",
    40: "Flush(group, number, stable, marks, staged, updates, updates_lost, counts: <i4, slots: <u4, deltas: <f4)",
    41: "FlushAck(group, number, staged)",
    42: "FlushCommit(group, number)",
    43: "Stream(group, counts: <i4, slots: <u4, deltas: <f4)",
    44: "StreamAck(group)",
    45: "StreamEnd(group, number, marks, updates, updates_lost, counts: <i4, slots: <u4, deltas: <f4)",
    46: "Undo(group, counts: <i4, slots: <u4, deltas: <f4)",
    47: "Have(group, number, marks, updates, updates_lost, touched: <u8)",
    48: "Restored(request, counts: <i4, slots: <u4, relatives: <f4)",
    49: "Fault(counts: <i4, slots: <u4)",
    50: "SnapAsk(request, counts: <i4, slots: <u4)",
    51: "Snap(request, relatives: <f4)",
    52: "Tail(source, incarnation, group, number, stable, marks, updates, updates_lost, "
    "counts: <i4, slots: <u4, deltas: <f4)",
    53: "TailEnd(source, incarnation, group, number)",
    54: "SyndromeAsk(request, k, q, unknown, incarnations, counts: <i4, blocks: <u4)",
    55: "Syndrome(request, numbers, relatives: <f4)",
    56: "RestoredAck(request)",
    57: "CutAsk(number, yields)",
    58: "CutMarks(number, marks, error)",
    59: "CutAt(number, marks, piece, full, pause, tenant)",
    60: "CutBegun(number, late)",
    61: "CutSaved(number, error, chunks: |u1)",
    62: "CutEnd(number, durable)",
    70: "Words(text: |u1)",
    63: "StreamAsk(group, number)",
    64: "StreamBegin(group, number)",
    65: "Mended(left)",
}


def described(cls: type[Message]) -> str:
    sections = zip(cls.SECTION_FIELDS, cls.SECTION_DTYPES, strict=True)
    fields = [*cls.META_FIELDS, *(f"{name}: {dtype.str}" for name, dtype in sections)]
    return f"{cls.__name__}({', '.join(fields)})"


def test_the_wire_format_is_this() -> None:
    assert {kind: described(cls) for kind, cls in KINDS.items()} == WIRE


def test_there_is_an_example_of_every_message() -> None:
    assert {type(message) for message in example_messages()} == set(KINDS.values())


@pytest.mark.parametrize("message", example_messages(), ids=lambda message: type(message).__name__)
def test_meta_round_trips(message: Message) -> None:
    values = type(message).META_DECODER.decode(encode_meta(message))
    assert values == tuple(getattr(message, name) for name in message.META_FIELDS)
    assert len(encode_meta(message)) == len(msgspec.msgpack.encode(list(values)))


def test_messages_are_frozen_and_name_their_fields() -> None:
    pull = Pull(request=1, step=2, **arrays(counts=[1], slots=[3]))
    assert plain(pull) == (
        "Pull",
        {"request": 1, "step": 2, "counts": ("<i4", [1]), "slots": ("<u4", [3])},
    )
    with pytest.raises(AttributeError):
        pull.step = 3  # type: ignore[misc]
    with pytest.raises(TypeError):
        Pull(1, 2, np.zeros(0, np.int32), np.zeros(0, np.uint32))  # type: ignore[misc]


# --- Jobs ---


def test_a_good_job_has_nothing_wrong_with_it() -> None:
    assert job(table("a"), table("b", k=4, r=1, kind="adam"), servers=10, rings=2).invalid_reason() is None
    largest = job(table("a", rows=2**32 - 1, dim=1 << 16), servers=4096, workers=65536, seed=2**63 - 1)
    assert largest.invalid_reason() is None


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"servers": 0}, "servers must be between 1 and 4096, not 0"),
        ({"servers": 4097}, "servers must be between 1 and 4096, not 4097"),
        ({"workers": 0}, "workers must be between 1 and 65536, not 0"),
        ({"protection": Coded(k=1, r=1, rings=0)}, "rings must divide servers: 4 servers, 0 rings"),
        ({"protection": Coded(k=1, r=1, rings=3)}, "rings must divide servers: 4 servers, 3 rings"),
        ({"tables": ()}, "a job has between 1 and 4096 tables, not 0"),
        ({"tables": (table("a"), table("b"), table("a"))}, "two tables are named 'a'"),
        ({"seed": -1}, "seed must be between 0 and 9223372036854775807, not -1"),
        ({"seed": 2**63}, "seed must be between 0 and 9223372036854775807, not 9223372036854775808"),
    ],
)
def test_what_can_be_wrong_with_a_job(changes: dict[str, Any], reason: str) -> None:
    good = job(table("a"), servers=4)
    assert msgspec.structs.replace(good, **changes).invalid_reason() == reason


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"rows": 0}, "rows must be between 1 and 4294967295, not 0"),
        ({"rows": 2**32}, "rows must be between 1 and 4294967295, not 4294967296"),
        ({"dim": 0}, "dim must be between 1 and 65536, not 0"),
        ({"dim": 65537}, "dim must be between 1 and 65536, not 65537"),
        ({"k": 0}, "k must be at least 1 and r at least 0, not k=0, r=0"),
        ({"r": -1}, "k must be at least 1 and r at least 0, not k=1, r=-1"),
        ({"k": 3, "r": 2}, "k + r = 5 members need as many servers in a ring; there are 4"),
        ({"init_bound": -0.5}, "init_bound must be a finite number and not negative, not -0.5"),
        ({"init_bound": float("nan")}, "init_bound must be a finite number and not negative, not nan"),
        ({"init_bound": float("inf")}, "init_bound must be a finite number and not negative, not inf"),
    ],
)
def test_what_can_be_wrong_with_a_table(changes: dict[str, Any], reason: str) -> None:
    wrong = msgspec.structs.replace(table("a"), **changes)
    assert job(wrong, servers=4).invalid_reason() == f"table 'a': {reason}"


@pytest.mark.parametrize("name", ["learning_rate", "eps", "weight_decay", "beta1", "beta2", "momentum"])
@pytest.mark.parametrize("value", [-0.1, float("nan"), float("inf")])
def test_what_can_be_wrong_with_an_optimizer(name: str, value: float) -> None:
    optimizer = OptimizerSpec(**{"kind": "adam", "learning_rate": 0.1, name: value})
    wrong = job(msgspec.structs.replace(table("a"), optimizer=optimizer))
    assert wrong.invalid_reason() is not None
    # Whatever passes this check must pass the one of the kernels: there it would end the server.
    with pytest.raises(ValueError, match=name):
        add_table(wrong.tables[0])


def add_table(spec: TableSpec) -> _kernels.Shard:
    shard = _kernels.Shard(1, 0)
    numbers = {key: getattr(spec.optimizer, key) for key in spec.optimizer.__struct_fields__ if key != "kind"}
    shard.add_table(
        rows=spec.rows,
        dim=spec.dim,
        optimizer=spec.optimizer.kind,
        seed=0,
        init_bound=spec.init_bound,
        table=0,
        **numbers,
    )
    return shard


@pytest.mark.parametrize("kind", twins.OPTIMIZERS)
@pytest.mark.parametrize("dim", [1, 3, 8])
def test_the_spec_knows_the_size_of_a_record(kind: Any, dim: int) -> None:
    spec = table(kind=kind, dim=dim)
    assert sum(floats for _, floats in spec.optimizer.state_parts(dim)) == twins.state_floats(kind, dim)
    assert -(-spec.record_floats // 4) * 4 == add_table(spec).record_floats(0)


def test_a_job_survives_the_wire() -> None:
    tables = table("a", kind="adam", lr=0.1, bound=0.3, k=2, r=1)
    sent = job(tables, servers=3, workers=7, mode="sync", seed=9)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(sent), type=JobSpec) == sent
    with pytest.raises(msgspec.ValidationError, match="mode"):
        msgspec.msgpack.decode(msgspec.msgpack.encode({**msgspec.to_builtins(sent), "mode": "sometimes"}), type=JobSpec)
