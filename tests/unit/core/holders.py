"""A holder fed by hand, and what its parities must be: for the tests of holders and of decoding."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
from helpers import arrays, counts_of, job, server, table

from regrow.core.effects import Send
from regrow.core.flusher import Budget
from regrow.core.groups import Groups
from regrow.core.holder import Holder
from regrow.core.job import JobSpec
from regrow.core.messages import (
    Flush,
    FlushAck,
    Message,
    Snap,
    SnapAsk,
)
from regrow.store.memory import MemoryStore

UNLIMITED = Budget(0)


def ring_job(k: int, r: int, *, servers: int | None = None, rows: int | None = None, **options: Any) -> JobSpec:
    count = servers or k + r
    spec = table(rows=rows or 4 * k * count, kind="adagrad", bound=1.0, k=k, r=r)
    return job(spec, servers=count, **options)


def parities(store: MemoryStore, of: JobSpec) -> list[bytes]:
    found = []
    for index, spec in enumerate(of.tables):
        blocks = np.arange(store.blocks(index), dtype=np.uint32)
        for q in range(spec.r):
            out = np.empty(blocks.size * store.record_floats(index), np.float32)
            store.parity_read(q, counts_of(len(of.tables), index, blocks.size), blocks, out)
            found.append(out.tobytes())
            found += [store.parity_members(index, q, j).tobytes() for j in range(spec.k)]
    return found


def records(store: MemoryStore) -> np.ndarray[Any, Any]:
    out = np.empty((store.slots(0), store.record_floats(0)), np.float32)
    store.read_records(0, 0, len(out), out)
    return out


def update(store: MemoryStore, slots: Iterable[int], value: float = 1.0) -> None:
    part = arrays(counts=[len(list(slots))], slots=list(slots))
    grads = np.linspace(value, value + 1, 2 * len(part["slots"]), dtype=np.float32)
    store.update(part["counts"], part["slots"], grads, 1)


# --- One holder, fed by hand ---


class Bench:
    """Holder S of a ring: the last server. With r = 1 it has the parity of stripes whose members are S0 .. S(k-1)."""

    def __init__(self, of: JobSpec, *, ended: bool = True, keeps_last: bool = False) -> None:
        self.job = of
        self.groups = Groups(of)
        self.index = of.servers - 1
        self.stores = [MemoryStore(of, s) for s in range(of.servers)]
        self.holder = Holder(
            server=self.index, groups=self.groups, store=self.stores[-1], marks=1, ended=ended, keeps_last=keeps_last
        )
        self.peers = {s: server(s) for s in range(of.servers)}
        self.holder.know(peers=self.peers, recovering=[], replaced=[])
        self.numbers: dict[tuple[int, int], int] = {}

    def flush(self, source: int, *, group: int | None = None) -> Flush:
        """The next flush of what this source changed in the group that the holder has in stripe-order."""
        g = self.group(source) if group is None else group
        number = self.numbers[source, g] = self.numbers.get((source, g), 0) + 1
        counts, slots, deltas = self.stores[source].take_flush(g)
        return Flush(group=g, number=number, stable=0, marks=(number,), counts=counts, slots=slots, deltas=deltas)

    def group(self, source: int) -> int:
        """Of member j = source of the stripes with parity 0 here."""
        return self.groups.list.index((self.job.tables[0].k - source, self.job.tables[0].r))

    def hear(self, flush: Flush, source: int) -> list[Send]:
        return self.holder.on_flush(self.peers[source], flush)

    def lose(self, source: int) -> list[Send]:
        """A view with a successor of this source."""
        old = self.peers[source]
        self.peers = self.peers | {source: server(source, old.incarnation + 1)}
        return self.holder.know(peers=self.peers, recovering=[source], replaced=[source])

    def snap(self, source: int, ask: SnapAsk) -> Snap:
        out = np.empty(ask.slots.size * self.stores[source].record_floats(0), np.float32)
        self.stores[source].published(ask.counts, ask.slots, out)
        return Snap(request=ask.request, relatives=out)

    def published(self, source: int, slots: Iterable[int]) -> np.ndarray[Any, Any]:
        wanted = np.array(list(slots), np.uint32)
        out = np.empty((wanted.size, self.stores[source].record_floats(0)), np.float32)
        self.stores[source].published(counts_of(1, 0, wanted.size), wanted, out)
        return out

    @property
    def bytes(self) -> list[bytes]:
        return parities(self.stores[-1], self.job)


def sent(sends: Iterable[Any], kind: type[Message]) -> list[Any]:
    return [send.message for send in sends if isinstance(send, Send) and isinstance(send.message, kind)]


def acks(sends: Iterable[Any]) -> list[tuple[int, int, bool]]:
    return [(ack.group, ack.number, ack.staged) for ack in sent(sends, FlushAck)]
