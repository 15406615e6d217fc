"""A shard server: answers pulls and applies pushes for the rows it holds.

Asynchronous mode applies a push when it arrives. Synchronous mode stages the pushes of step t and applies
them, summed in worker order, once every worker has staged t *and* pulled t + 1: that pull is the commit
message of a two-phase commit (see docs/protocol.md). The rule to keep: a request is checked completely before
it changes anything, and each push of a worker is applied exactly once, in order.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any, Protocol

import numpy as np

from regrow.core.effects import Delivered, Log, Lost, Refuse, Send
from regrow.core.job import JobSpec
from regrow.core.layout import Layout
from regrow.core.link import Identity
from regrow.core.messages import (
    Assign,
    Dump,
    Float32Array,
    Int32Array,
    Load,
    Loaded,
    Message,
    Open,
    Opened,
    Pull,
    Push,
    Pushed,
    Ready,
    Records,
    Rows,
    UInt32Array,
    View,
)

Event = Delivered | Lost
Effect = Send | Refuse | Log

EARLY_OPENS_MAX = 4096  # A worker sends one Open and waits; more than this is somebody misbehaving.


class Store(Protocol):
    """What holds the rows of a shard. Methods check all bounds first and raise ValueError or IndexError."""

    memory_bytes: int

    def gather(self, counts: Int32Array, slots: UInt32Array, out: Float32Array) -> None: ...
    def update(self, counts: Int32Array, slots: UInt32Array, grads: Float32Array, step: int) -> None: ...
    def assign_untouched(self, counts: Int32Array, slots: UInt32Array, weights: Float32Array) -> None: ...
    def read_records(self, table: int, slot_first: int, slot_count: int, out: Float32Array) -> None: ...
    def write_records(self, table: int, slot_first: int, slot_count: int, source: Float32Array) -> None: ...
    def record_floats(self, table: int) -> int: ...
    def slots(self, table: int) -> int: ...
    def merge(self, parts: list[tuple[Any, Any, Any]]) -> tuple[Int32Array, UInt32Array, Float32Array]: ...


class ShardServer:
    """One door: `effects = server.receive(event)`."""

    def __init__(
        self, *, identity: Identity, build_store: Callable[[JobSpec, int], Store], reply_bytes_max: int
    ) -> None:
        self.identity = identity
        self.view: View | None = None
        self.store: Store | None = None
        self.applied: dict[int, int] = {}  # worker -> last push applied (async)
        self.committed = 0  # last step applied (sync)
        self.clock = 0  # pushes applied, of all workers
        self.pulls = 0
        self._build_store = build_store
        self._reply_bytes_max = reply_bytes_max
        self._incarnations: dict[int, int] = {}  # worker -> newest incarnation heard of
        self._early: list[Delivered] = []  # Opens that came before the first view
        self._staged: dict[int, dict[int, Push]] = {}  # step -> worker -> push (sync)
        self._pulled: dict[int, int] = {}  # worker -> newest step pulled (sync)
        self._parked: dict[int, tuple[Identity, Pull]] = {}  # worker -> pull waiting for its step (sync)
        self._dims = np.zeros(0, np.int64)
        self._slots = np.zeros(0, np.int64)

    def receive(self, event: Event) -> list[Effect]:
        if isinstance(event, Lost):
            return [Log(text=f"{event.peer} is gone: {event.reason}")]
        if isinstance(event.message, View):
            return self._on_view(event.message, event.source)
        if self.view is None:
            # Only this one: it is small, and whoever sends more has not waited to be opened.
            if not isinstance(event.message, Open) or len(self._early) == EARLY_OPENS_MAX:
                name = type(event.message).__name__
                return [Refuse(target=event.source, reason=f"{name} before the first view")]
            self._early.append(event)
            return []
        return self._on_worker_message(event.source, event.message)

    # --- Views ---

    def _on_view(self, view: View, source: Identity) -> list[Effect]:
        if source.role != "coordinator":
            return [Refuse(target=source, reason="only the coordinator makes views")]
        if reason := view.job.invalid_reason():
            return [Refuse(target=source, reason=f"view {view.epoch}: {reason}")]
        if self.identity.id >= view.job.servers:
            return [Refuse(target=source, reason=f"view {view.epoch} has no place for {self.identity}")]
        if self.view is not None and view.job != self.view.job:
            return [Refuse(target=source, reason=f"view {view.epoch} is of another job")]
        if self.view is not None and view.epoch <= self.view.epoch:
            return []
        effects: list[Effect] = [Log(text=f"view {view.epoch}: {len(view.servers)} servers")]
        if self.store is None:
            self.store = self._build_store(view.job, self.identity.id)
            tables = range(len(view.job.tables))
            self._dims = np.array([table.dim for table in view.job.tables], np.int64)
            self._slots = np.array([self.store.slots(index) for index in tables], np.int64)
            rows = sum(
                Layout(servers=view.job.servers, k=table.k, r=table.r, groups=view.job.groups).rows_on(
                    self.identity.id, rows=table.rows, table=index
                )
                for index, table in enumerate(view.job.tables)
            )
            ready = Ready(rows=rows, memory_bytes=self.store.memory_bytes)
            effects.append(Send(target=source, message=ready))
        self.view = view
        early, self._early = self._early, []
        for event in early:
            effects += self._on_worker_message(event.source, event.message)
        return effects

    # --- Workers ---

    def _on_worker_message(self, source: Identity, message: Message) -> list[Effect]:
        assert self.view is not None
        if source.role != "worker":
            return [Refuse(target=source, reason=f"{type(message).__name__} from a {source.role}")]
        if source.id >= self.view.job.workers:
            return [Refuse(target=source, reason=f"worker {source.id} of a job with {self.view.job.workers}")]
        if source.incarnation < self._incarnations.get(source.id, 0):
            return [Refuse(target=source, reason=f"a newer incarnation of {source} is at work")]
        self._incarnations[source.id] = source.incarnation
        try:
            return self._dispatch(source, message)
        except (ValueError, IndexError) as error:
            return [Refuse(target=source, reason=f"{type(message).__name__}: {error}")]

    def _dispatch(self, source: Identity, message: Message) -> list[Effect]:
        if isinstance(message, Pull):
            return self._on_pull(source, message)
        if isinstance(message, Push):
            return self._on_push(source, message)
        if isinstance(message, Assign):
            self._rows().assign_untouched(message.counts, message.slots, message.weights)
            return []
        if isinstance(message, Dump):
            return self._on_dump(source, message)
        if isinstance(message, Load):
            return self._on_load(source, message)
        if isinstance(message, Open):
            # A worker that pulled step t + 1 knows that step t is staged everywhere: it will be committed.
            committed = max(self.committed, self._pulled.get(source.id, 0) - 1)
            opened = Opened(durable=self._durable(source.id), committed=committed)
            return [Send(target=source, message=opened)]
        raise ValueError("a server does not take this message")

    def _rows(self) -> Store:
        assert self.store is not None
        return self.store

    def _is_sync(self) -> bool:
        assert self.view is not None
        return self.view.job.mode == "sync"

    def _durable(self, worker: int) -> int:
        # Without parity a push is as durable as it gets the moment it is applied.
        return self.committed if self._is_sync() else self.applied.get(worker, 0)

    def _on_pull(self, source: Identity, pull: Pull) -> list[Effect]:
        if not (self._is_sync() and pull.step):
            return [self._answer(source, pull)]
        if pull.step not in (self.committed + 1, self.committed + 2):
            raise ValueError(f"pull of step {pull.step} while step {self.committed} is committed")
        self._check_slots(pull.counts, pull.slots)
        if pull.step == self.committed + 1:
            self._pulled[source.id] = max(pull.step, self._pulled.get(source.id, 0))
            return [self._answer(source, pull)]
        self._pulled[source.id] = pull.step
        self._parked[source.id] = (source, pull)  # sent again, it is still one pull
        return self._commit()

    def _answer(self, source: Identity, pull: Pull) -> Send:
        rows = np.empty(self._row_floats(pull.counts, pull.slots), np.float32)
        self._rows().gather(pull.counts, pull.slots, rows)
        self.pulls += 1
        reply = Rows(request=pull.request, durable=self._durable(source.id), clock=self.clock, rows=rows)
        return Send(target=source, message=reply)

    def _row_floats(self, counts: Int32Array, slots: UInt32Array) -> int:
        """How many floats the rows of these slots have; refuses before anything is allocated for them."""
        described = counts.size == self._dims.size and not (counts < 0).any()
        if not described or int(counts.sum(dtype=np.int64)) != slots.size:
            raise ValueError(f"counts do not describe {slots.size} slots in {self._dims.size} tables")
        return self._reply_floats(int(counts.astype(np.int64) @ self._dims))

    def _reply_floats(self, floats: int) -> int:
        if floats * 4 > self._reply_bytes_max:
            raise ValueError(f"is about {floats * 4} bytes, at most {self._reply_bytes_max} are allowed")
        return floats

    def _check_slots(self, counts: Int32Array, slots: UInt32Array) -> None:
        """What is used later is checked now: afterwards a refusal would hit whoever completes the step."""
        self._row_floats(counts, slots)
        beyond = slots >= np.repeat(self._slots, counts)
        if beyond.any():
            raise IndexError(f"slot {int(slots[beyond][0])} is out of range")

    def _on_push(self, source: Identity, push: Push) -> list[Effect]:
        if self._row_floats(push.counts, push.slots) != push.grads.size:
            raise ValueError(f"{push.grads.size} gradient values do not fit {push.slots.size} slots")
        if self._is_sync():
            return self._on_push_sync(source, push)
        done = self.applied.get(source.id, 0)
        if push.seq > done + 1:
            raise ValueError(f"push {push.seq} came after push {done}")
        if push.seq == done + 1:
            self._rows().update(push.counts, push.slots, push.grads, push.seq)
            self.applied[source.id] = push.seq
            self.clock += 1
        return [self._pushed(source, push.seq)]

    def _on_push_sync(self, source: Identity, push: Push) -> list[Effect]:
        if push.seq > self.committed + 1:
            raise ValueError(f"push of step {push.seq} while step {self.committed} is committed")
        if push.seq == self.committed + 1:
            self._check_slots(push.counts, push.slots)
            self._staged.setdefault(push.seq, {})[source.id] = push
        return [self._pushed(source, push.seq), *self._commit()]

    def _pushed(self, source: Identity, seq: int) -> Send:
        reply = Pushed(seq=seq, durable=self._durable(source.id), clock=self.clock)
        return Send(target=source, message=reply)

    def _commit(self) -> list[Effect]:
        """Applies the next step once all workers staged it and pulled the one after; answers those pulls."""
        assert self.view is not None
        workers = range(self.view.job.workers)
        step = self.committed + 1
        staged = self._staged.get(step, {})
        if len(staged) < len(workers) or any(self._pulled.get(w, 0) <= step for w in workers):
            return []
        parts = [(staged[w].counts, staged[w].slots, staged[w].grads) for w in workers]
        merged = parts[0] if len(parts) == 1 else self._rows().merge(parts)
        self._rows().update(*merged, step)
        del self._staged[step]
        self.committed = step
        self.clock += len(parts)
        # Pulls are parked for the step after the next only, and that one has just become the next.
        ready, self._parked = self._parked, {}
        return [self._answer(source, pull) for source, pull in ready.values()]

    def _record_floats(self, table: int) -> int:
        assert self.view is not None
        if table >= len(self.view.job.tables):
            raise IndexError(f"table {table} of {len(self.view.job.tables)}")
        return self._rows().record_floats(table)

    def _on_dump(self, source: Identity, dump: Dump) -> list[Effect]:
        floats = self._reply_floats(dump.slot_count * self._record_floats(dump.table))
        records = np.empty(floats, np.float32)
        self._rows().read_records(dump.table, dump.slot_first, dump.slot_count, records)
        return [Send(target=source, message=Records(request=dump.request, records=records))]

    def _on_load(self, source: Identity, load: Load) -> list[Effect]:
        floats = self._record_floats(load.table)
        slots = load.slots.astype(np.int64)
        if load.records.size != slots.size * floats:
            raise ValueError(f"{load.records.size} values are not {slots.size} records of {floats}")
        if slots.size and int(slots.max()) >= self._rows().slots(load.table):
            raise IndexError(f"slot {int(slots.max())} of {self._rows().slots(load.table)}")
        # One call for each run of neighbouring slots: in practice nearly all are neighbours.
        starts = np.flatnonzero(np.diff(slots, prepend=-2) != 1).tolist()
        for start, stop in itertools.pairwise([*starts, slots.size]):
            source_records = load.records[start * floats : stop * floats]
            self._rows().write_records(load.table, int(slots[start]), stop - start, source_records)
        return [Send(target=source, message=Loaded(request=load.request))]
