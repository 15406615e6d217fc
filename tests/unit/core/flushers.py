"""A flusher fed by hand, and holders with real parities that hear it: for the tests of flushing."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
from helpers import arrays, counts_of, job, server, table

from regrow.core.effects import Send
from regrow.core.flusher import Budget, Flusher
from regrow.core.groups import Groups
from regrow.core.holder import Holder
from regrow.core.job import JobSpec
from regrow.core.messages import Flush, FlushAck, FlushCommit, Message, Stream, StreamEnd
from regrow.core.protection import FlushSpec
from regrow.store.memory import MemoryStore

NEVER = FlushSpec(pushes=1 << 20, bytes=1 << 40, seconds=3600.0)
UNLIMITED = Budget(0)


class Source:
    """Server 0 of a ring: its rows, its flusher, and what it sent."""

    def __init__(
        self, *, k: int = 2, r: int = 1, servers: int = 3, workers: int = 1, spec: FlushSpec = NEVER, rows: int = 60
    ) -> None:
        spec_table = table("t0", rows=rows, kind="adagrad", bound=1.0, k=k, r=r)
        small = table("t1", rows=rows // 2, dim=3, bound=1.0, k=1, r=r)
        self.job: JobSpec = job(spec_table, small, servers=servers, workers=workers, flush=spec)
        self.groups = Groups(self.job)
        self.store = MemoryStore(self.job, 0)
        self.flusher = Flusher(
            server=0, groups=self.groups, store=self.store, marks=workers, spec=spec, keeps_undo=False
        )
        self.flusher.know({s: server(s) for s in range(servers)}, replaced=[])

    def push(
        self,
        seq: int,
        slots: Iterable[int],
        *,
        worker: int = 0,
        slots_small: Iterable[int] = (),
        push_bytes: int = 0,
    ) -> list[Send]:
        self.touch(slots, seq=seq, slots_small=slots_small)
        for marks in self.flusher.applied:
            marks[worker] = seq
        return self.flusher.count_push(worker, push_bytes)

    def touch(self, slots: Iterable[int], *, seq: int = 1, slots_small: Iterable[int] = ()) -> None:
        first, second = list(slots), list(slots_small)
        part = arrays(counts=[len(first), len(second)], slots=first + second)
        grads = np.linspace(1, 2, 2 * len(first) + 3 * len(second), dtype=np.float32) * np.float32(seq)
        self.store.update(part["counts"], part["slots"], grads, seq)

    def replace(self, *holders: int) -> None:
        """A view with successors of these holders."""
        peers = {s: server(s, 1 if s in holders else 0) for s in range(self.job.servers)}
        self.flusher.know(peers, replaced=list(holders))

    def ack(self, holder: int, group: int, number: int, *, staged: bool = False) -> list[Send]:
        return self.flusher.on_ack(holder, FlushAck(group=group, number=number, staged=staged))

    def group_of(self, table_index: int, slot: int) -> int:
        return int(self.groups.of_member[table_index][slot % self.job.tables[table_index].k])

    @property
    def durable(self) -> int:
        return self.flusher.durable(0)


def of_type(sends: Iterable[Send], kind: type[Message]) -> list[Any]:
    return [send.message for send in sends if isinstance(send.message, kind)]


def brief(sends: Iterable[Send]) -> list[tuple[str, int, int, int]]:
    """(what, to whom, group, rows) of each message."""
    return [
        (type(m).__name__, send.target.id, m.group, getattr(m, "slots", np.zeros(0)).size)
        for send in sends
        for m in [send.message]
    ]


class Replica:
    """A holder with real parities."""

    def __init__(self, source: Source, index: int, *, ended: bool) -> None:
        self.store = MemoryStore(source.job, index)
        self.machine = Holder(
            server=index, groups=source.groups, store=self.store, marks=1, ended=ended, keeps_last=False
        )

    def hear(self, message: Message) -> list[Any]:
        """Returns its answers."""
        handlers: Any = {
            Flush: self.machine.on_flush,
            Stream: self.machine.on_stream,
            StreamEnd: self.machine.on_stream_end,
            FlushCommit: self.machine.on_commit,
        }
        return [send.message for send in handlers[type(message)](server(0), message)]

    def parities(self) -> list[bytes]:
        found = []
        tables = self.machine._groups.job.tables
        for index, spec in enumerate(tables):
            blocks = np.arange(self.store.blocks(index), dtype=np.uint32)
            for q in range(spec.r):
                out = np.empty(blocks.size * self.store.record_floats(index), np.float32)
                self.store.parity_read(q, counts_of(len(tables), index, blocks.size), blocks, out)
                found.append(out.tobytes())
                found += [self.store.parity_members(index, q, j).tobytes() for j in range(spec.k)]
        return found
