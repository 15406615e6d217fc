"""A shard server: answers pulls and applies pushes for the rows it holds, and keeps them recoverable.

Asynchronous mode applies a push when it arrives. Synchronous mode stages the pushes of step t and applies
them, summed in worker order, once every worker has staged t *and* pulled t + 1: that pull is the commit
message of a two-phase commit (see docs/protocol.md). Flushes to parity holders are `publish.py`, parities of others
`parity.py`, the way back of a replacement `rebuild.py`; this file is the door to all three.

The rules to keep: a request is checked completely before it changes anything; each push of a worker is applied exactly
once to each group of rows, in order; nothing from another incarnation than the view's is listened to.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable
from typing import Any, Protocol

import numpy as np

from regrow.core.effects import Delivered, Dial, Forget, Joined, Log, Lost, Notice, Refuse, Send, Stop, Tick
from regrow.core.groups import Groups
from regrow.core.job import JobSpec
from regrow.core.layout import Layout
from regrow.core.link import Identity
from regrow.core.messages import (
    Assign,
    Beat,
    Commit,
    Dump,
    Durable,
    Fault,
    Float32Array,
    Flush,
    FlushAck,
    FlushCommit,
    Have,
    Int32Array,
    KnownView,
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
    Recovered,
    Register,
    Restored,
    Rows,
    Snap,
    SnapAsk,
    Stream,
    StreamAck,
    StreamEnd,
    Syndrome,
    SyndromeAsk,
    Tail,
    TailEnd,
    UInt32Array,
    Undo,
    View,
)
from regrow.core.parity import HolderStore, ParityHolder
from regrow.core.publish import Budget, Publisher, SourceStore
from regrow.core.rebuild import FILL_ROWS, Rebuild, RebuildStore

Event = Joined | Delivered | Lost | Tick
Effect = Send | Refuse | Log | Dial | Forget | Stop | Notice

EARLY_OPENS_MAX = 4096  # A worker sends one Open and waits; more than this is somebody misbehaving.
AHEAD_MAX = 1 << 16  # Messages of servers whose view is on its way.
BEAT_SECONDS = 0.25  # Too long: a silent server is noticed late. Too short: the coordinator is kept busy.
NOTICE_SECONDS = 0.25


class Store(SourceStore, HolderStore, RebuildStore, Protocol):
    """What holds the rows of a shard. Methods check all bounds first and raise ValueError or IndexError."""

    memory_bytes: int
    redundancy_bytes: int

    def gather(self, counts: Int32Array, slots: UInt32Array, out: Float32Array) -> None: ...
    def update(self, counts: Int32Array, slots: UInt32Array, grads: Float32Array, step: int) -> None: ...
    def assign_untouched(self, counts: Int32Array, slots: UInt32Array, weights: Float32Array) -> None: ...
    def read_records(self, table: int, slot_first: int, slot_count: int, out: Float32Array) -> None: ...
    def write_records(self, table: int, slot_first: int, slot_count: int, source: Float32Array) -> None: ...
    def slots(self, table: int) -> int: ...
    def merge(self, parts: list[tuple[Any, Any, Any]]) -> tuple[Int32Array, UInt32Array, Float32Array]: ...


class ShardServer:
    """One door: `effects = server.receive(event)`."""

    def __init__(
        self,
        *,
        identity: Identity,
        build_store: Callable[[JobSpec, int, bool], Store],
        reply_bytes_max: int,
        address: str = "",
    ) -> None:
        self.identity = identity
        self.address = address
        self.view: View | None = None
        self.store: Store | None = None
        self.publisher: Publisher
        self.holder: ParityHolder
        self.rebuild: Rebuild | None = None
        self.clock = 0  # pushes applied, of all workers
        self.pulls = 0
        self._build_store = build_store
        self._reply_bytes_max = reply_bytes_max
        self._coordinator: Identity | None = None
        self._peers: dict[int, Identity] = {}  # the servers of the view
        self._workers: dict[int, Identity] = {}  # newest incarnation heard of
        self._early: list[Delivered] = []  # Opens that came before the first view
        self._ahead: list[Delivered] = []  # of servers that the next view will name
        self._queued: list[Delivered] = []  # of workers, until every group knows where it stands
        self._pushes: dict[int, deque[tuple[Identity, Push]]] = {}  # worker -> pushes whose rows are not back
        self._parked: list[tuple[Identity, Message]] = []  # requests whose rows are not back
        self._staged: dict[int, dict[int, Push]] = {}  # step -> worker -> push (sync)
        self._pulled: dict[int, int] = {}  # worker -> newest step pulled (sync)
        self._step_pulls: dict[tuple[int, int], tuple[Identity, Pull]] = {}  # by worker and step: waiting (sync)
        self._unprepared: list[tuple[Identity, int]] = []  # pushes not yet staged at holders (two-phase commit)
        self._loads: list[tuple[list[int], Send]] = []  # answers that wait for their flushes
        self._reported: dict[int, int] = {}  # worker -> durable as it was last told
        self._budget = Budget(0)
        self._beat_at = self._notice_at = 0.0
        self._rebuild_began: float | None = None
        self._now = 0.0
        self._dims = np.zeros(0, np.int64)
        self._slots = np.zeros(0, np.int64)

    def receive(self, event: Event) -> list[Effect]:
        if isinstance(event, Tick):
            return self._on_tick(event.now)
        if isinstance(event, Lost):
            return [Log(text=f"{event.peer} is gone: {event.reason}")]
        if isinstance(event, Joined):
            return self._on_joined(event.peer)
        effects = self._on_message(event)
        if self.view is not None and self.publisher.protected:
            effects += self._background()
        return effects

    def _on_message(self, event: Delivered) -> list[Effect]:
        if isinstance(event.message, View):
            return self._on_view(event.message, event.source)
        if event.source.role == "server":
            return self._on_server_message(event)
        if self.view is None:
            # Only this one: it is small, and whoever sends more has not waited to be opened. A replacement is
            # sent everything at once, by workers that know its view before it does.
            if isinstance(event.message, Open) or self.identity.incarnation:
                if len(self._early) < EARLY_OPENS_MAX:
                    self._early.append(event)
                    return []
            name = type(event.message).__name__
            return [Refuse(target=event.source, reason=f"{name} before the first view")]
        return self._on_worker_message(event)

    @property
    def recovered(self) -> bool:
        """All rows and parities of this server are here."""
        return self.view is not None and (self.rebuild is None or self.rebuild.reported)

    @property
    def committed(self) -> int:
        """The last step that all rows of this server have (sync)."""
        return self._span(0)[0]

    def durable(self, worker: int) -> int:
        """The last push of this worker that is safe here (sync: the last step)."""
        return self.publisher.durable(0 if self._is_sync() else worker)

    def report(self) -> dict[str, Any]:
        """Counters for whoever watches."""
        if self.view is None or self.store is None:
            return {}
        return {
            "redundancy_bytes": self.store.redundancy_bytes,
            "flush_bytes": self.publisher.flush_bytes,
            "flushes": self.publisher.flush_count,
            "flush_rows": self.publisher.flush_rows,
            "parity_rows_applied": self.holder.rows_applied,
            "rows_decoded": self.holder.rows_decoded,
            "faults_served": self.holder.faults,
            "faults": self.rebuild.faults if self.rebuild is not None else 0,
            "recovering": not self.recovered,
        }

    # --- Views ---

    def _on_joined(self, peer: Identity) -> list[Effect]:
        if peer.role != "coordinator":
            return []
        self._coordinator = peer
        known = None
        if self.view is not None:
            known = KnownView(epoch=self.view.epoch, servers=self.view.servers, job=self.view.job)
        return [Send(target=peer, message=Register(address=self.address, known=known))]

    def _on_view(self, view: View, source: Identity) -> list[Effect]:
        if source.role != "coordinator":
            return [Refuse(target=source, reason="only the coordinator makes views")]
        if reason := view.job.invalid_reason():
            return [Refuse(target=source, reason=f"view {view.epoch}: {reason}")]
        if self.identity.id >= view.job.servers or len(view.servers) != view.job.servers:
            return [Refuse(target=source, reason=f"view {view.epoch} has no place for {self.identity}")]
        if self.view is not None and view.job != self.view.job:
            return [Refuse(target=source, reason=f"view {view.epoch} is of another job")]
        me = view.servers[self.identity.id]
        if me.incarnation > self.identity.incarnation:
            return [Stop(reason=f"{self.identity} was replaced by incarnation {me.incarnation}")]
        if me.incarnation < self.identity.incarnation or view.lost:
            return []  # made before we were known, or the last one
        if self.view is not None and view.epoch <= self.view.epoch:
            return []
        effects: list[Effect] = [Log(text=f"view {view.epoch}: {_described(view)}")]
        self._coordinator = source
        if self.store is None:
            effects += self._first_view(view, recovering=me.recovering)
        effects += self._know(view)
        if me.recovering and self.recovered:
            effects.append(Send(target=source, message=Recovered()))  # the coordinator before this one heard it
        return effects

    def _first_view(self, view: View, *, recovering: bool) -> list[Effect]:
        job = view.job
        self.store = store = self._build_store(job, self.identity.id, recovering)
        self._dims = np.array([table.dim for table in job.tables], np.int64)
        self._slots = np.array([store.slots(index) for index in range(len(job.tables))], np.int64)
        self._budget = Budget(job.flush.sweep_bytes_per_s)
        groups = Groups(job)
        sync = job.mode == "sync"
        marks = 1 if sync else job.workers
        server = self.identity.id
        self.publisher = Publisher(
            server=server, groups=groups, store=store, marks=marks, spec=job.flush, keeps_undo=sync
        )
        self.holder = ParityHolder(
            server=server, groups=groups, store=store, marks=marks, ended=not recovering, keeps_last=sync
        )
        if recovering:
            down = {member.id for member in view.servers if member.recovering}
            self.rebuild = Rebuild(
                server=server, groups=groups, store=store, publisher=self.publisher, recovering=down
            )
        rows = sum(
            Layout(servers=job.servers, k=table.k, r=table.r, groups=job.groups).rows_on(
                server, rows=table.rows, table=index
            )
            for index, table in enumerate(job.tables)
        )
        assert self._coordinator is not None
        return [Send(target=self._coordinator, message=Ready(rows=rows, memory_bytes=store.memory_bytes))]

    def _know(self, view: View) -> list[Effect]:
        """Takes over a view: who is new is dialled, who is over forgotten, who lost something is helped."""
        known, first = self._peers, self.view is None
        self.view = view
        self._peers = {
            member.id: Identity(role="server", id=member.id, incarnation=member.incarnation)
            for member in view.servers
        }
        effects: list[Effect] = []
        replaced = []
        for member in view.servers:
            peer = self._peers[member.id]
            if peer == known.get(member.id) or peer == self.identity:
                continue
            if member.id in known:
                effects.append(Forget(peer=known[member.id]))
            if not first or member.recovering:
                replaced.append(member.id)
            if view.job.protected and member.id < self.identity.id:
                effects.append(Dial(peer=peer, address=member.address))
        if view.job.protected:
            recovering = [member.id for member in view.servers if member.recovering]
            self.publisher.know(self._peers, replaced=replaced)
            effects += self.holder.know(peers=self._peers, recovering=recovering, replaced=replaced)
        ahead, self._ahead = self._ahead, []
        for event in ahead:
            effects += self._on_server_message(event)
        early, self._early = self._early, []
        for event in early:
            effects += self._on_worker_message(event)
        return effects

    # --- Other servers ---

    def _on_server_message(self, event: Delivered) -> list[Effect]:
        source = event.source
        known = self._peers.get(source.id)
        if self.view is None or (known is not None and source.incarnation > known.incarnation):
            if len(self._ahead) >= AHEAD_MAX:
                return [Refuse(target=source, reason="too much before the view that names you")]
            self._ahead.append(event)
            return []
        if known is None or not self.view.job.protected:
            return [Refuse(target=source, reason=f"{source} has no place in view {self.view.epoch}")]
        if source.incarnation < known.incarnation:
            return []  # fenced
        try:
            return self._dispatch_server(source, event.message)
        except (ValueError, IndexError) as error:
            return [Refuse(target=source, reason=f"{type(event.message).__name__}: {error}")]

    def _dispatch_server(self, source: Identity, message: Message) -> list[Effect]:
        holder = self.holder
        if isinstance(message, Flush):
            return [*holder.on_flush(source, message)]
        if isinstance(message, FlushAck):
            return self._on_flush_ack(source, message)
        if isinstance(message, FlushCommit):
            return [*holder.on_commit(source, message)]
        if isinstance(message, Stream):
            return [*holder.on_stream(source, message)]
        if isinstance(message, StreamAck):
            self.publisher.on_stream_ack(source.id, message.group)
            return []
        if isinstance(message, StreamEnd):
            return [*holder.on_stream_end(source, message), *self._check_recovered()]
        if isinstance(message, SnapAsk):
            return self._on_snap_ask(source, message)
        if isinstance(message, Snap):
            return [*holder.on_snap(source, message)]
        if isinstance(message, Syndrome):
            return [*holder.on_syndrome(source, message)]
        if isinstance(message, Tail | TailEnd | SyndromeAsk):
            return [*holder.on_holder_message(source, message), *holder.release_faults()]
        if isinstance(message, Fault):
            self._check_slots(message.counts, message.slots)
            return [*holder.on_fault(source, message)]
        if isinstance(message, Undo | Have | Restored):
            return self._on_rebuild_message(source, message)
        raise ValueError("a server does not take this message from a server")

    def _on_flush_ack(self, source: Identity, ack: FlushAck) -> list[Effect]:
        grown, sends = self.publisher.on_ack(source.id, ack)
        effects: list[Effect] = [*sends]
        if grown:
            effects += self._on_grown()
        return effects

    def _on_grown(self) -> list[Effect]:
        """More is durable (or staged at the holders) than before."""
        effects: list[Effect] = []
        waiting, self._unprepared = self._unprepared, []
        for source, seq in waiting:
            effects += self._pushed(source, seq)
        loads, self._loads = self._loads, []
        for numbers, answer in loads:
            if self.publisher.has_acked(numbers):
                effects.append(answer)
            else:
                self._loads.append((numbers, answer))
        if self._is_sync():
            # A worker may wait for this before its next pull; in async mode replies or the clock carry it.
            effects += self._tell_durable()
        return effects

    def _tell_durable(self) -> list[Effect]:
        effects: list[Effect] = []
        for worker, identity in self._workers.items():
            durable = self.durable(worker)
            if durable > self._reported.get(worker, 0):
                self._reported[worker] = durable
                effects.append(Send(target=identity, message=Durable(durable=durable)))
        return effects

    def _on_snap_ask(self, source: Identity, ask: SnapAsk) -> list[Effect]:
        floats = self._record_floats(ask.table)
        self._reply_floats(ask.slots.size * floats)
        if ask.slots.size and int(ask.slots.max()) >= self._slots[ask.table]:
            raise IndexError(f"slot {int(ask.slots.max())} is out of range")
        if self.rebuild is not None and not self.rebuild.reported:
            raise ValueError("a recovering server has no published rows to give")
        self._prepare_table(ask.table, ask.slots)
        relatives = self.publisher.snapshot(source.id, ask.table, ask.slots)
        return [Send(target=source, message=Snap(request=ask.request, relatives=relatives))]

    def _prepare_table(self, table: int, slots: UInt32Array) -> None:
        """Fills in rows that a replacement knows to be untouched."""
        if self.rebuild is not None:
            counts = np.zeros(self._dims.size, np.int32)
            counts[table] = slots.size
            self._rows().prepare(counts, slots)

    # --- The way back of a replacement ---

    def _on_rebuild_message(self, source: Identity, message: Undo | Have | Restored) -> list[Effect]:
        rebuild = self.rebuild
        if rebuild is None:
            # A row that was blank here, then changed and was flushed, is touched at its holder and may come again.
            return []
        if isinstance(message, Undo):
            rebuild.on_undo(source, message)
            return []
        effects: list[Effect] = []
        if isinstance(message, Have):
            rebuild.on_have(source, message)
            if not rebuild.active:
                return []
            effects.append(Log(text=f"active: {rebuild.rows_total} rows are to come back"))
            queued, self._queued = self._queued, []
            for event in queued:
                effects += self._on_worker_message(event)
        else:
            rebuild.on_restored(message)
            effects += self._retry() if rebuild.active else []
        return effects + self._check_recovered()

    def _retry(self) -> list[Effect]:
        """Rows are back: whoever waited for them goes on."""
        effects: list[Effect] = []
        for worker in list(self._pushes):
            effects += self._apply_queue(worker)
        if self._is_sync():
            effects += self._commit()
        parked, self._parked = self._parked, []
        for source, message in parked:
            effects += self._dispatch_safely(source, message)
        return effects

    def _check_recovered(self) -> list[Effect]:
        rebuild = self.rebuild
        if rebuild is None or rebuild.reported or not rebuild.active:
            return []
        if self._rows().missing_rows() or not self.holder.whole:
            return []
        rebuild.reported = True
        effects: list[Effect] = [Log(text=f"recovered: {rebuild.rows_back} rows, {rebuild.faults} on demand")]
        if self._coordinator is not None:
            effects.append(Send(target=self._coordinator, message=Recovered()))
        return [*effects, self._notice("recovered")]

    def _notice(self, name: str) -> Notice:
        rebuild = self.rebuild
        assert rebuild is not None
        began = self._rebuild_began if self._rebuild_began is not None else self._now
        values = {
            "rows_total": rebuild.rows_total,
            "rows_back": rebuild.rows_back,
            "bytes": rebuild.bytes_back,
            "faults": rebuild.faults,
            "seconds": round(self._now - began, 3),
        }
        return Notice(name=name, values=values)

    def _waits_for(self, counts: Int32Array, slots: UInt32Array) -> list[Effect] | None:
        """None: all these rows are here. Else the faults to send while somebody waits."""
        if self.rebuild is None:
            return None
        faults = self.rebuild.missing(counts, slots, self._peers)
        return None if faults is None else [*faults]

    # --- Time ---

    def _on_tick(self, now: float) -> list[Effect]:
        self._now = now
        effects: list[Effect] = []
        if self._coordinator is not None and now >= self._beat_at:
            self._beat_at = now + BEAT_SECONDS
            effects.append(Send(target=self._coordinator, message=Beat()))
        if self.view is None or not self.publisher.protected:
            return effects
        self._budget.refill(now)
        effects += self.publisher.tick(now)
        effects += self._tell_durable()
        effects += self._background()
        if self.rebuild is not None:
            effects += self._tick_rebuild(now)
        return effects

    def _tick_rebuild(self, now: float) -> list[Effect]:
        rebuild = self.rebuild
        assert rebuild is not None
        if self._rebuild_began is None:
            self._rebuild_began = now
        if not rebuild.active:
            return []
        filled = self._rows().fill(FILL_ROWS)
        if rebuild.reported and not filled:
            self.rebuild = None  # a server like any other
            return []
        if rebuild.reported or now < self._notice_at:
            return []
        self._notice_at = now + NOTICE_SECONDS
        return [self._notice("recovery")]

    def _background(self) -> list[Effect]:
        """Streams and decodes a bit further."""
        effects: list[Effect] = []
        whole = self.rebuild is None or (self.rebuild.active and not self._rows().missing_rows())
        if whole and any(group.streams for group in self.publisher.groups):
            effects += self.publisher.stream(self._budget)
        if self.holder.sweeping:
            effects += self.holder.release_faults()
            effects += self.holder.sweep(self._budget)
        return effects

    # --- Workers ---

    def _on_worker_message(self, event: Delivered) -> list[Effect]:
        assert self.view is not None
        source, message = event.source, event.message
        if source.role != "worker":
            return [Refuse(target=source, reason=f"{type(message).__name__} from a {source.role}")]
        if source.id >= self.view.job.workers:
            return [Refuse(target=source, reason=f"worker {source.id} of a job with {self.view.job.workers}")]
        known = self._workers.get(source.id)
        if known is not None and source.incarnation < known.incarnation:
            return [Refuse(target=source, reason=f"a newer incarnation of {source} is at work")]
        if known is None or source.incarnation > known.incarnation:
            self._new_worker(source)
        if self.rebuild is not None and not self.rebuild.active:
            self._queued.append(event)
            return []
        return self._dispatch_safely(source, message)

    def _new_worker(self, source: Identity) -> None:
        """Another incarnation: what the one before still waited for is void. It starts from what is durable."""
        self._workers[source.id] = source
        self._reported.pop(source.id, None)
        self._pushes.pop(source.id, None)
        self._step_pulls = {key: item for key, item in self._step_pulls.items() if key[0] != source.id}
        self._parked = [(who, message) for who, message in self._parked if who.id != source.id]
        self._queued = [event for event in self._queued if event.source.id != source.id]
        self._unprepared = [(who, seq) for who, seq in self._unprepared if who.id != source.id]

    def _dispatch_safely(self, source: Identity, message: Message) -> list[Effect]:
        try:
            return self._dispatch(source, message)
        except (ValueError, IndexError) as error:
            return [Refuse(target=source, reason=f"{type(message).__name__}: {error}")]

    def _dispatch(self, source: Identity, message: Message) -> list[Effect]:
        if isinstance(message, Pull):
            return self._on_pull(source, message)
        if isinstance(message, Push):
            return self._on_push(source, message)
        if isinstance(message, Commit):
            return [*self.publisher.commit(source.id, message.seq)]
        if isinstance(message, Assign):
            return self._on_assign(message)
        if isinstance(message, Dump):
            return self._on_dump(source, message)
        if isinstance(message, Load):
            return self._on_load(source, message)
        if isinstance(message, Open):
            # A worker that pulled step t + 1 knows that step t is staged everywhere: it will be committed.
            ahead = max(applied[0] for applied in self.publisher.applied) if self._is_sync() else 0
            committed = max(ahead, self._pulled.get(source.id, 0) - 1)
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
        """`durable`, noted as told."""
        durable = self.durable(worker)
        self._reported[worker] = durable
        return durable

    def _span(self, mark: int) -> tuple[int, int]:
        """The least and the most any group has applied. They differ only at a replacement, after a failure."""
        applied = [marks[mark] for marks in self.publisher.applied]
        return min(applied), max(applied)

    def _on_assign(self, assign: Assign) -> list[Effect]:
        part = (assign.counts, assign.slots, assign.weights)
        if self.rebuild is not None:
            if self._row_floats(assign.counts, assign.slots) != assign.weights.size:
                raise ValueError(f"{assign.weights.size} weights do not fit {assign.slots.size} slots")
            self._check_slots(assign.counts, assign.slots)
            part = self._without_missing(*part)
        self._rows().assign_untouched(*part)
        # Not together with a step: undoing that would undo this.
        return [*self.publisher.flush_all()] if self._is_sync() and self.publisher.protected else []

    def _without_missing(
        self, counts: Int32Array, slots: UInt32Array, values: Float32Array
    ) -> tuple[Int32Array, UInt32Array, Float32Array]:
        """Without rows that are still to come back: they were touched, so they keep what they have."""
        missing_counts, missing = self._rows().prepare(counts, slots)
        tables = np.repeat(np.arange(counts.size), counts)
        gone = np.repeat(np.arange(counts.size), missing_counts) << 32 | missing.astype(np.int64)
        here = ~np.isin(tables << 32 | slots.astype(np.int64), gone)
        return self._selected(here, tables, slots, values)

    def _selected(
        self, wanted: Any, tables: Any, slots: UInt32Array, values: Float32Array
    ) -> tuple[Int32Array, UInt32Array, Float32Array]:
        counts = np.bincount(tables[wanted], minlength=self._dims.size).astype(np.int32)
        return counts, slots[wanted], values[np.repeat(wanted, self._dims[tables])]

    # --- Pulls ---

    def _on_pull(self, source: Identity, pull: Pull) -> list[Effect]:
        if not (self._is_sync() and pull.step):
            if self.rebuild is not None:
                self._check_slots(pull.counts, pull.slots)
                if (faults := self._waits_for(pull.counts, pull.slots)) is not None:
                    self._parked.append((source, pull))
                    return faults
            return [self._answer(source, pull)]
        self._check_slots(pull.counts, pull.slots)
        least, most = self._span(0)
        undoable = self.publisher.protected and most > 0
        if not most + (0 if undoable else 1) <= pull.step <= least + 2:
            raise ValueError(f"pull of step {pull.step} while step {least} is committed")
        self._pulled[source.id] = max(pull.step, self._pulled.get(source.id, 0))
        self._step_pulls[source.id, pull.step] = (source, pull)  # sent again, it is still one pull
        return self._commit()

    def _answer(self, source: Identity, pull: Pull) -> Send:
        rows = np.empty(self._row_floats(pull.counts, pull.slots), np.float32)
        self._rows().gather(pull.counts, pull.slots, rows)
        if self._is_sync() and pull.step:
            self._undo(pull, rows)
        self.pulls += 1
        reply = Rows(request=pull.request, durable=self._durable(source.id), clock=self.clock, rows=rows)
        return Send(target=source, message=reply)

    def _undo(self, pull: Pull, rows: Float32Array) -> None:
        """Takes the pulled step itself back out of rows that have it: whoever asks computes that step again."""
        ahead = [g for g, marks in enumerate(self.publisher.applied) if marks[0] == pull.step]
        row_start = float_start = 0
        for table, count in enumerate(pull.counts.tolist()):
            slots = pull.slots[row_start : row_start + count]
            dim = int(self._dims[table])
            weights = rows[float_start : float_start + count * dim].view(np.uint32).reshape(count, dim)
            row_start, float_start = row_start + count, float_start + count * dim
            for g in ahead if count else []:
                last = self.publisher.groups[g].last
                if last is None or not last[0][table]:
                    continue
                changed, deltas = self.publisher.table_part(last, table)
                bits = deltas.view(np.uint32).reshape(changed.size, -1)[:, :dim]
                order = np.argsort(changed)
                found = np.searchsorted(changed, slots, sorter=order).clip(max=changed.size - 1)
                hits = changed[order[found]] == slots
                weights[hits] ^= bits[order[found[hits]]]

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

    # --- Pushes ---

    def _on_push(self, source: Identity, push: Push) -> list[Effect]:
        if self._row_floats(push.counts, push.slots) != push.grads.size:
            raise ValueError(f"{push.grads.size} gradient values do not fit {push.slots.size} slots")
        if self._is_sync():
            return self._on_push_sync(source, push)
        queue = self._pushes.get(source.id)
        done = queue[-1][1].seq if queue else self._span(source.id)[0]
        assert self.view is not None
        if push.seq > done + 1 and self.view.job.flush.commit != "none":
            raise ValueError(f"push {push.seq} came after push {done}")
        if self.rebuild is None:
            return self._apply(source, push)
        self._check_slots(push.counts, push.slots)
        self._pushes.setdefault(source.id, deque()).append((source, push))
        return self._apply_queue(source.id)

    def _apply_queue(self, worker: int) -> list[Effect]:
        """Applies the pushes of a worker in order, as far as their rows are here."""
        effects: list[Effect] = []
        queue = self._pushes.get(worker, deque())
        while queue:
            source, push = queue[0]
            part = self._unapplied(push, worker, push.seq)
            faults = self._waits_for(part[0], part[1])
            if faults is not None:
                return effects + faults
            queue.popleft()
            effects += self._apply(source, push)
        self._pushes.pop(worker, None)
        return effects

    def _apply(self, source: Identity, push: Push) -> list[Effect]:
        effects: list[Effect] = []
        if push.seq > self._span(source.id)[0]:
            self._rows().update(*self._unapplied(push, source.id, push.seq), push.seq)
            for marks in self.publisher.applied:
                marks[source.id] = max(push.seq, marks[source.id])
            self.clock += 1
            effects += self.publisher.applied_push()
        return [*self._pushed(source, push.seq), *effects]

    def _unapplied(
        self, push: Push, mark: int, seq: int
    ) -> tuple[Int32Array, UInt32Array, Float32Array]:
        """The rows of a push whose group does not have it yet: nearly always all of them."""
        part = (push.counts, push.slots, push.grads)
        return part if self._span(mark)[1] < seq else self._without_applied(part, mark, seq)

    def _without_applied(
        self, part: tuple[Int32Array, UInt32Array, Float32Array], mark: int, seq: int
    ) -> tuple[Int32Array, UInt32Array, Float32Array]:
        counts, slots, grads = part
        lacking = np.array([marks[mark] < seq for marks in self.publisher.applied])
        wanted = lacking[self.publisher.geometry.of_slots(counts, slots)]
        return self._selected(wanted, np.repeat(np.arange(counts.size), counts), slots, grads)

    def _on_push_sync(self, source: Identity, push: Push) -> list[Effect]:
        least, _ = self._span(0)
        if push.seq > least + 2:
            raise ValueError(f"push of step {push.seq} while step {least} is committed")
        if push.seq > least:
            self._check_slots(push.counts, push.slots)
            self._staged.setdefault(push.seq, {})[source.id] = push
        # Whoever computed a step has pulled it, perhaps from the server that this one replaces.
        self._pulled[source.id] = max(push.seq, self._pulled.get(source.id, 0))
        return [*self._pushed(source, push.seq), *self._commit()]

    def _pushed(self, source: Identity, seq: int) -> list[Effect]:
        assert self.view is not None
        if self.view.job.flush.commit == "2pc" and self.publisher.protected:
            if self.publisher.prepared(source.id) < seq:
                self._unprepared.append((source, seq))
                return []
        reply = Pushed(seq=seq, durable=self._durable(source.id), clock=self.clock)
        return [Send(target=source, message=reply)]

    def _commit(self) -> list[Effect]:
        """Applies the next step once all workers staged it and pulled the one after; answers what can be."""
        assert self.view is not None
        workers = range(self.view.job.workers)
        effects: list[Effect] = []
        step = self._span(0)[0] + 1
        staged = self._staged.get(step, {})
        if len(staged) == len(workers) and all(self._pulled.get(w, 0) > step for w in workers):
            parts = [(staged[w].counts, staged[w].slots, staged[w].grads) for w in workers]
            merged = parts[0] if len(parts) == 1 else self._rows().merge(parts)
            if self._span(0)[1] >= step:
                merged = self._without_applied(merged, 0, step)
            faults = self._waits_for(merged[0], merged[1])
            if faults is not None:
                return faults
            self._rows().update(*merged, step)
            del self._staged[step]
            for marks in self.publisher.applied:
                marks[0] = step
            self.clock += len(parts)
            if self.publisher.protected:
                effects += self.publisher.flush_all()
        return effects + self._answer_steps()

    def _answer_steps(self) -> list[Effect]:
        """Answers the pulls whose step has come: every group is at the one before, or (again) at the step itself."""
        effects: list[Effect] = []
        least, _ = self._span(0)
        for key, (source, pull) in list(self._step_pulls.items()):
            if pull.step > least + 1:
                continue
            faults = self._waits_for(pull.counts, pull.slots)
            if faults is not None:
                effects += faults
                continue
            del self._step_pulls[key]
            effects.append(self._answer(source, pull))
        return effects

    # --- Whole records ---

    def _record_floats(self, table: int) -> int:
        assert self.view is not None
        if table >= len(self.view.job.tables):
            raise IndexError(f"table {table} of {len(self.view.job.tables)}")
        return self._rows().record_floats(table)

    def _on_dump(self, source: Identity, dump: Dump) -> list[Effect]:
        floats = self._reply_floats(dump.slot_count * self._record_floats(dump.table))
        records = np.empty(floats, np.float32)
        if dump.parity:
            self._read_parities(dump, records)
        else:
            if self.rebuild is not None and dump.slot_first + dump.slot_count <= self._slots[dump.table]:
                slots = np.arange(dump.slot_first, dump.slot_first + dump.slot_count, dtype=np.uint32)
                counts = np.zeros(self._dims.size, np.int32)
                counts[dump.table] = slots.size
                if (faults := self._waits_for(counts, slots)) is not None:
                    self._parked.append((source, dump))
                    return faults
            self._rows().read_records(dump.table, dump.slot_first, dump.slot_count, records)
        return [Send(target=source, message=Records(request=dump.request, records=records))]

    def _read_parities(self, dump: Dump, records: Float32Array) -> None:
        assert self.view is not None
        r = self.view.job.tables[dump.table].r
        blocks, q = np.divmod(np.arange(dump.slot_first, dump.slot_first + dump.slot_count), max(1, r))
        if not r or (blocks >= self._rows().blocks(dump.table)).any():
            raise IndexError(f"parity slots {dump.slot_first} to {dump.slot_first + dump.slot_count}")
        by_slot = records.reshape(dump.slot_count, -1)
        for index in range(r):
            mine = np.flatnonzero(q == index)
            part = np.empty(mine.size * by_slot.shape[1], np.float32)
            self._rows().parity_read(dump.table, index, blocks[mine].astype(np.uint32), part)
            by_slot[mine] = part.reshape(mine.size, -1)

    def _on_load(self, source: Identity, load: Load) -> list[Effect]:
        floats = self._record_floats(load.table)
        slots = load.slots.astype(np.int64)
        if load.records.size != slots.size * floats:
            raise ValueError(f"{load.records.size} values are not {slots.size} records of {floats}")
        if slots.size and int(slots.max()) >= self._slots[load.table]:
            raise IndexError(f"slot {int(slots.max())} of {self._slots[load.table]}")
        if self.rebuild is not None:
            counts = np.zeros(self._dims.size, np.int32)
            counts[load.table] = slots.size
            if (faults := self._waits_for(counts, load.slots)) is not None:
                self._parked.append((source, load))
                return faults
        # One call for each run of neighbouring slots: in practice nearly all are neighbours.
        starts = np.flatnonzero(np.diff(slots, prepend=-2) != 1).tolist()
        for start, stop in itertools.pairwise([*starts, slots.size]):
            source_records = load.records[start * floats : stop * floats]
            self._rows().write_records(load.table, int(slots[start]), stop - start, source_records)
        answer = Send(target=source, message=Loaded(request=load.request))
        if not self.publisher.protected:
            return [answer]
        flushed = self.publisher.flush_all()
        if self.publisher.has_acked(self.publisher.numbers()):
            return [*flushed, answer]
        self._loads.append((self.publisher.numbers(), answer))
        return [*flushed]


def _described(view: View) -> str:
    back = [f"S{member.id}" for member in view.servers if member.recovering]
    return f"{len(view.servers)} servers" + (f", {', '.join(back)} coming back" if back else "")
