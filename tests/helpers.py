"""Small jobs, plans by hand, and plain forms of messages and effects that compare and print as a whole."""

from __future__ import annotations

import dataclasses
import random
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

from regrow import _kernels
from regrow.core import framing
from regrow.core.door import ServerDoor
from regrow.core.effects import Delivered, Log, Refuse, Send
from regrow.core.identity import COORDINATOR, Identity
from regrow.core.job import JobSpec, OptimizerKind, OptimizerSpec, TableSpec
from regrow.core.messages import (
    Ack,
    Assign,
    Beat,
    Challenge,
    Commit,
    CutAsk,
    CutAt,
    CutBegun,
    CutEnd,
    CutMarks,
    CutSaved,
    Declare,
    Durable,
    Expect,
    Fault,
    Flush,
    FlushAck,
    FlushCommit,
    Have,
    Hello,
    KnownView,
    Member,
    Mended,
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
    Recovered,
    Refused,
    Register,
    Restored,
    RestoredAck,
    Rows,
    Snap,
    SnapAsk,
    StateAsk,
    Stream,
    StreamAck,
    StreamAsk,
    StreamBegin,
    StreamEnd,
    Syndrome,
    SyndromeAsk,
    Tail,
    TailEnd,
    Unanswered,
    Undo,
    View,
    Welcome,
    Words,
    WriteRecords,
)
from regrow.core.protection import Coded, FlushSpec, Protection, Unprotected
from regrow.store.memory import MemoryStore

SECTION_TYPES = {"counts": np.int32, "slots": np.uint32, "blocks": np.uint32, "touched": np.uint64}  # others: float32


def worker(index: int, incarnation: int = 0) -> Identity:
    return Identity(role="worker", id=index, incarnation=incarnation)


def server(index: int, incarnation: int = 0) -> Identity:
    return Identity(role="server", id=index, incarnation=incarnation)


def wait_until(true: Callable[[], Any], *, seconds: float = 30.0, what: str = "it") -> None:
    """Polls until something is so; a machine under load gets its time, a test that fails does not hang."""
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline, f"{what} did not happen within {seconds} s"
        time.sleep(0.002)


# --- Jobs and plans ---


def table(
    name: str = "t0",
    *,
    rows: int = 10,
    dim: int = 2,
    kind: OptimizerKind = "sgd",
    lr: float = 1.0,
    bound: float = 0.0,
    k: int = 1,
    r: int = 0,
) -> TableSpec:
    """By default all zeros and `w -= g`, so that expected values are counted on fingers."""
    optimizer = OptimizerSpec(kind=kind, learning_rate=lr)
    return TableSpec(name=name, rows=rows, dim=dim, init_bound=bound, optimizer=optimizer, k=k, r=r)


def job(
    *tables: TableSpec,
    servers: int = 1,
    workers: int = 1,
    rings: int = 1,
    flush: FlushSpec | None = None,
    **options: Any,
) -> JobSpec:
    """Coded as soon as a table has parities."""
    tables = tables or (table(),)
    r = max(each.r for each in tables)
    k = max(each.k for each in tables)
    protection: Protection = Unprotected()
    if r > 0:
        protection = Coded(k=k, r=r, rings=rings, flush=flush or FlushSpec())
    return JobSpec(tables=tables, servers=servers, workers=workers, **{"protection": protection} | options)


def view(of: JobSpec, *, epoch: int = 1) -> View:
    members = tuple(Member(id=s, incarnation=0, address=f"unix:/s{s}") for s in range(of.servers))
    return View(epoch=epoch, servers=members, job=of)


@dataclasses.dataclass(frozen=True, kw_only=True)
class HandPlan:
    """A plan made of plain lists; `where` says which floats belong to (table, row)."""

    counts: Any
    slots: Any
    row_start: Any
    float_start: Any
    floats: int
    where: dict[tuple[int, int], slice]


def plan_of(of: JobSpec, rows: Sequence[Iterable[int]]) -> HandPlan:
    """The plan of these rows of each table, as a worker's router would lay it out."""
    places: list[list[tuple[int, int, int]]] = []
    for index, wanted in enumerate(rows):
        wanted = list(wanted)
        servers, slots = of.layout(index).place(np.array(wanted, np.int64), table=index)
        places.append(list(zip(wanted, servers.tolist(), slots.tolist(), strict=True)))
    counts = np.zeros((of.servers, len(of.tables)), np.int32)
    slots_all: list[int] = []
    row_start, float_start = [0], [0]
    where: dict[tuple[int, int], slice] = {}
    offset = 0
    for s in range(of.servers):
        for index, spec in enumerate(of.tables):
            for row, holder, slot in places[index]:
                if holder == s:
                    counts[s, index] += 1
                    slots_all.append(slot)
                    where[index, row] = slice(offset, offset + spec.dim)
                    offset += spec.dim
        row_start.append(len(slots_all))
        float_start.append(offset)
    return HandPlan(
        counts=counts,
        slots=np.array(slots_all, np.uint32),
        row_start=np.array(row_start, np.int64),
        float_start=np.array(float_start, np.int64),
        floats=offset,
        where=where,
    )


# --- Machines ---


def shard_server(of: JobSpec | None = None, *, index: int = 0, reply_bytes_max: int = 1 << 20) -> ServerDoor:
    """A server; with a job, one that has its first view."""
    made = ServerDoor(identity=server(index), build_store=MemoryStore, reply_bytes_max=reply_bytes_max)
    if of is not None:
        made.receive(Delivered(source=COORDINATOR, message=view(of)))
    return made


def arrays(**values: Any) -> dict[str, Any]:
    """Lists as the arrays that messages carry: `arrays(counts=[1], slots=[7])`."""
    return {name: np.array(value, SECTION_TYPES.get(name, np.float32)) for name, value in values.items()}


# --- Plain forms ---


def plain(message: Message) -> tuple[str, dict[str, Any]]:
    """A message as its name and its fields, arrays as their type and elements. (-0.0 equals 0.0 here.)"""
    fields = {}
    for name in message.__struct_fields__:
        value = getattr(message, name)
        if isinstance(value, np.ndarray):
            value = (value.dtype.str, value.ravel().tolist())
        fields[name] = value
    return type(message).__name__, fields


def told(effects: Iterable[Any]) -> list[tuple[str, ...] | tuple[str, str, Any]]:
    """Effects as tuples: what, to whom, and all of it."""
    out: list[Any] = []
    for effect in effects:
        if isinstance(effect, Send):
            out.append(("send", str(effect.target), plain(effect.message)))
        elif isinstance(effect, Refuse):
            out.append(("refuse", str(effect.target), effect.reason))
        elif isinstance(effect, Log):
            out.append(("log", effect.text))
        else:
            out.append(effect)
    return out


# --- Damage ---


def mutated(rng: random.Random, data: bytes) -> bytes:
    """Damage as it happens, with the header's checksum made good again half of the time."""
    damaged = bytearray(data)
    for _ in range(rng.randint(1, 4)):
        at = rng.randrange(len(damaged))
        match rng.randrange(4):
            case 0:
                damaged[at] ^= 1 << rng.randrange(8)
            case 1:
                damaged[at] = rng.choice((0, 1, 0x7F, 0x80, 0xFF))
            case 2:
                del damaged[at : at + rng.randint(1, 8)]
            case 3:
                damaged[at:at] = rng.randbytes(rng.randint(1, 8))
        if not damaged:
            return b""
    if rng.random() < 0.5 and len(damaged) >= framing.HEADER_BYTES:
        damaged[:4] = framing.MAGIC
        head = bytes(damaged[: framing._HEADER.size])
        damaged[framing._HEADER.size : framing.HEADER_BYTES] = framing._CHECKSUM.pack(_kernels.crc32c(head))
    return bytes(damaged)


# --- One of every message ---


def example_messages() -> list[Message]:
    """At least one of each kind, with the ends of their ranges among them."""
    wide = job(
        table("long name " * 20, rows=2**32 - 1, dim=1 << 16, kind="adam"),
        table("", k=4),
        servers=5,
        workers=3,
        mode="sync",
        seed=2**63 - 1,
    )
    many = job(*(table(f"table {index}") for index in range(200)))
    ends = 2**62
    floats = np.array([0.0, -0.0, 1.5, np.inf, -np.inf, 1e-45, 3.4e38], np.float32)
    return [
        Challenge(protocol=1, nonce=bytes(range(32))),
        Hello(protocol=2**32 - 1, role="worker", id=3, incarnation=7, nonce=b"n" * 32, proof=b"p" * 32),
        Welcome(role="server", id=0, incarnation=2**32 - 1, proof=b"\xff" * 32),
        Refused(reason="because of \u00e4 \u2014 \U0001f331\n"),
        Refused(reason="x" * 4096),
        Ack(),
        Register(address="unix:/somewhere/s0"),
        Declare(job=wide),
        View(epoch=ends, servers=(), job=wide),
        view(many),
        Ready(rows=0, memory_bytes=ends),
        Open(),
        Opened(durable=ends, committed=0),
        Pull(request=1, step=0, **arrays(counts=[2, 0, 1], slots=[0, 2**32 - 1, 5])),
        Pull(request=ends, step=ends, **arrays(counts=[], slots=[])),
        Rows(request=1, durable=2, clock=3, rows=floats),
        Rows(request=1, durable=2, clock=3, rows=np.arange(5000, dtype=np.float32)),
        Rows(request=0, durable=0, clock=0, **arrays(rows=[])),
        Push(seq=9, **arrays(counts=[1, -1], slots=[4], grads=[0.25, -3.0])),
        Push(seq=0, **arrays(counts=[0], slots=[], grads=[])),
        Push(seq=2, rates=(0.5, 0.0), **arrays(counts=[0, 0], slots=[], grads=[])),
        Push(seq=1, **arrays(counts=[700], slots=range(700), grads=range(1400))),
        Pushed(seq=ends, durable=ends, clock=ends),
        Assign(**arrays(counts=[1], slots=[0], weights=[1.0, 2.0])),
        ReadRecords(request=5, table=2**32 - 1, slot_first=ends, slot_count=2**32 - 1),
        ReadRecords(request=5, table=0, parity=True, slot_first=0, slot_count=1),
        Records(request=5, records=floats[:4]),
        WriteRecords(request=6, table=0, **arrays(slots=[3, 4], records=range(8))),
        RecordsWritten(request=6),
        Register(address="", known=KnownView(epoch=ends, servers=view(many).servers, job=many)),
        View(epoch=1, servers=(Member(id=0, incarnation=1, address="a", recovering=True),), job=many, lost="all"),
        Recovered(),
        Beat(),
        Beat(step=ends),
        Beat(step=1, brought=2, answers=ends, unanswered=Unanswered(server=3, incarnation=0, seconds=31)),
        StateAsk(number=ends),
        Durable(durable=ends),
        Commit(seq=ends),
        Expect(**arrays(counts=[2], slots=[0, 3])),
        *parity_messages(),
        *cut_messages(),
    ]


def cut_messages() -> list[Message]:
    """At least one of each kind that checkpoints are made with."""
    ends = 2**62
    chunks = np.frombuffer(b'[{"name": "s0of1-00000.safetensors"}]', np.uint8)
    return [
        CutAsk(number=1 << 32 | 1),
        CutMarks(number=ends, marks=(0, ends)),
        CutMarks(number=1, marks=(), error="a server is still coming back"),
        CutAt(number=1, marks=(7,), piece="0000000007-abcdef.full", full=True),
        CutAt(number=ends, marks=(0,) * 300, piece="0000000007-abcdef.0000000003-012345", full=False, pause=True),
        CutBegun(number=1),
        CutBegun(number=ends, late=True),
        CutSaved(number=1, error="", chunks=chunks),
        CutSaved(number=1, error="no space left there", chunks=chunks[:0]),
        CutEnd(number=ends, durable=True),
        CutEnd(number=0, durable=False),
        Words(text=np.array([1, 255], np.uint8)),
    ]


def parity_messages() -> list[Message]:
    """At least one of each kind that servers exchange about parities."""
    ends = 2**62
    part = arrays(counts=[1, 1], slots=[4, 2**32 - 1], deltas=range(8))
    nothing = arrays(counts=[], slots=[], deltas=[])
    source = {"source": 3, "incarnation": 2, "group": 1}
    return [
        Flush(group=0, number=1, stable=0, marks=(1, ends), **part),
        Flush(group=2**32 - 1, number=ends, stable=ends, marks=(), staged=True, **nothing),
        FlushAck(group=1, number=ends),
        FlushAck(group=1, number=0, staged=True),
        FlushCommit(group=1, number=7),
        Stream(group=0, **part),
        StreamAck(group=0),
        StreamAsk(group=0, number=ends),
        StreamBegin(group=0, number=ends),
        Mended(left=0),
        StreamEnd(group=0, number=ends, marks=(0,) * 300, **part),
        Undo(group=0, **part),
        Have(group=0, number=3, marks=(9,), **arrays(touched=[0, 2**64 - 1])),
        Restored(request=3, **arrays(counts=[1], slots=[2], relatives=[0.5] * 4)),
        RestoredAck(request=3),
        Fault(**arrays(counts=[1, 0], slots=[2])),
        SnapAsk(request=ends, **arrays(counts=[0, 2], slots=[1, 2])),
        Snap(request=ends, **arrays(relatives=range(8))),
        Tail(number=5, stable=3, marks=(1,), **source, **part),
        TailEnd(number=5, **source),
        SyndromeAsk(request=1, k=4, q=1, unknown=(0, 2), incarnations=(1, 1), **arrays(counts=[2], blocks=[0, 9])),
        Syndrome(request=1, numbers=(4, 5), **arrays(relatives=range(8))),
    ]


def counts_of(tables: int, table: int, rows: int) -> np.ndarray[Any, np.dtype[np.int32]]:
    """The counts of a call that is about one table only."""
    counts = np.zeros(tables, np.int32)
    counts[table] = rows
    return counts
