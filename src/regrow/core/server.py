"""A shard server: the door to its rows, to the parities it keeps for others, and to its own way back.

What workers ask is `serving.py`, flushes to parity holders `flusher.py`, parities of others `holder.py` and
`decode.py`, the way back of a replacement `rebuild.py`; this file knows the view and routes what comes in.

The rule to keep: nothing from another incarnation than the view's is listened to. Older ones are over; newer ones wait
until their view is here.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import msgspec

from regrow.core.cut import Save, Saved, Unsave
from regrow.core.effects import Delivered, Dial, Forget, Joined, Log, Lost, Notice, Refuse, Send, Stop, Tick
from regrow.core.flusher import Budget, Flusher
from regrow.core.groups import Groups
from regrow.core.holder import Holder
from regrow.core.job import JobSpec
from regrow.core.layout import Layout
from regrow.core.link import Identity
from regrow.core.messages import (
    Beat,
    CutAsk,
    CutAt,
    CutEnd,
    Fault,
    Float32Array,
    Flush,
    FlushAck,
    FlushCommit,
    Have,
    KnownView,
    Message,
    Open,
    Ready,
    Recovered,
    Register,
    Restored,
    RestoredAck,
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
from regrow.core.rebuild import FILL_ROWS, Rebuild
from regrow.core.serving import WAITING_MAX, Serving, Store


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """Effect: fetch this server's rows from the checkpoint it starts from; tell them as `LoadedRows`, then
    `LoadedAll`."""

    job: JobSpec


# Rows of a table as a checkpoint has them: its index, their numbers, weights and each part of the optimizer's state.
TableRows = tuple[int, UInt32Array, list[Float32Array]]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LoadedRows:
    """Event: rows from a checkpoint, whoever has them."""

    rows: list[TableRows]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LoadedAll:
    """Event: these were all, and they are the state after these pushes (steps) of each worker."""

    marks: tuple[int, ...]


Event = Joined | Delivered | Lost | Tick | Saved | LoadedRows | LoadedAll
Effect = Send | Refuse | Log | Dial | Forget | Stop | Notice | Save | Unsave | Load

EARLY_OPENS_MAX = 4096  # A worker sends one Open and waits; more than this is somebody misbehaving.
AHEAD_MAX = 1 << 16  # Messages of servers whose view is on its way.
BEAT_SECONDS = 0.25  # Too long: a silent server is noticed late. Too short: the coordinator is kept busy.
NOTICE_SECONDS = 0.25


class ShardServer:
    """One door: `effects = server.receive(event)`."""

    def __init__(
        self,
        *,
        identity: Identity,
        build_store: Callable[[JobSpec, int, bool], Store],
        reply_bytes_max: int,
        address: str = "",
        loads: bool = False,
    ) -> None:
        self.identity = identity
        self.address = address
        self.view: View | None = None
        self.store: Store | None = None
        self.flusher: Flusher
        self.holder: Holder
        self.rebuild: Rebuild | None = None
        self.serving: Serving
        self._build_store = build_store
        self._loads = loads  # this run starts from a checkpoint
        self._load_flushes: list[int] | None = None  # all is loaded; flushes that holders do not have yet
        self._reply_bytes_max = reply_bytes_max
        self._coordinator: Identity | None = None
        self._peers: dict[int, Identity] = {}  # the servers of the view
        self._early: list[Delivered] = []  # Opens that came before the first view
        self._ahead: list[Delivered] = []  # of servers that the next view will name
        self._row_budget = self._parity_budget = Budget(0)
        self._retry_due = False  # rows of the background have come; somebody may have waited for one of them
        self._beat_at = self._notice_at = 0.0
        self._rebuild_began: float | None = None
        self._now = 0.0

    def receive(self, event: Event) -> list[Effect]:
        if isinstance(event, Tick):
            return self._on_tick(event.now)
        if isinstance(event, Lost):
            return [Log(text=f"{event.peer} is gone: {event.reason}")]
        if isinstance(event, Joined):
            return self._on_joined(event.peer)
        if isinstance(event, Saved):
            return [*self.serving.cut.on_saved(self._coordinator, event)] if self._coordinator is not None else []
        if isinstance(event, LoadedRows | LoadedAll):
            return self._on_loaded(event)
        effects = self._on_message(event)
        if self.view is not None and self.flusher.protected:
            effects += self._background()
        return effects

    def _on_message(self, event: Delivered) -> list[Effect]:
        if isinstance(event.message, View):
            return self._on_view(event.message, event.source)
        if event.source.role == "server":
            return self._on_server_message(event)
        if isinstance(event.message, CutAsk | CutAt | CutEnd):
            return self._on_cut_message(event.source, event.message)
        if self.view is None:
            # Only this one: it is small, and whoever sends more has not waited to be opened. A replacement is
            # sent everything at once, by workers that know its view before it does.
            replaces = self.identity.incarnation > 0
            bound = WAITING_MAX if replaces else EARLY_OPENS_MAX
            if (replaces or isinstance(event.message, Open)) and len(self._early) < bound:
                self._early.append(event)
                return []
            name = type(event.message).__name__
            return [Refuse(target=event.source, reason=f"{name} before the first view")]
        return [*self.serving.receive(event.source, event.message)]

    @property
    def recovered(self) -> bool:
        """All rows and parities of this server are here."""
        return self.view is not None and (self.rebuild is None or self.rebuild.reported)

    @property
    def clock(self) -> int:
        """Pushes applied, of all workers."""
        return self.serving.clock if self.view is not None else 0

    @property
    def pulls(self) -> int:
        return self.serving.pulls if self.view is not None else 0

    def is_peer(self, peer: Identity) -> bool:
        """Whether this is a server of the view."""
        return self._peers.get(peer.id) == peer

    def report(self) -> dict[str, Any]:
        """Counters for whoever watches."""
        if self.view is None or self.store is None:
            return {}
        return {
            "redundancy_bytes": self.store.redundancy_bytes,
            "flush_bytes": self.flusher.flush_bytes,
            "flushes": self.flusher.flush_count,
            "flush_rows": self.flusher.flush_rows,
            "rows_updated": self.serving.rows_updated,
            "parity_rows_applied": self.holder.rows_applied,
            "rows_decoded": self.holder.decoder.rows_decoded,
            "faults_served": self.holder.decoder.faults,
            "faults": self.rebuild.faults if self.rebuild is not None else 0,
            "recovering": not self.recovered,
        }

    # --- Views ---

    def _on_joined(self, peer: Identity) -> list[Effect]:
        if peer.role != "coordinator":
            return []
        void = self._on_other_coordinator(peer)
        known = None
        if self.view is not None:
            servers = list(self.view.servers)
            me = servers[self.identity.id]
            servers[self.identity.id] = msgspec.structs.replace(me, recovering=not self.recovered)
            known = KnownView(epoch=self.view.epoch, servers=tuple(servers), job=self.view.job)
        return [*void, Send(target=peer, message=Register(address=self.address, known=known))]

    def _on_other_coordinator(self, peer: Identity) -> list[Effect]:
        """A new one knows nothing of the cut that the one before was making."""
        before, self._coordinator = self._coordinator, peer
        if self.view is None or before in (None, peer):
            return []
        return [*self.serving.cut.give_up(), *self.serving.release()]

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
        effects += self._on_other_coordinator(source)
        if self.store is None:
            effects += self._first_view(view, recovering=me.recovering)
        effects += self._know(view)
        if me.recovering and self.recovered:
            effects.append(Send(target=source, message=Recovered()))  # the coordinator before this one heard it
        return effects

    def _first_view(self, view: View, *, recovering: bool) -> list[Effect]:
        job = view.job
        self.store = store = self._build_store(job, self.identity.id, recovering)
        groups = Groups(job)
        # As many servers as there are groups bring rows back to one that was lost, and as many its parities.
        rate = job.flush.sweep_bytes_per_s / max(1, len(groups))
        self._row_budget, self._parity_budget = Budget(rate), Budget(rate)
        sync = job.mode == "sync"
        marks = 1 if sync else job.workers
        server = self.identity.id
        self.flusher = Flusher(server=server, groups=groups, store=store, marks=marks, spec=job.flush, keeps_undo=sync)
        self.holder = Holder(
            server=server, groups=groups, store=store, marks=marks, ended=not recovering, keeps_last=sync
        )
        self.serving = Serving(job=job, store=store, flusher=self.flusher, reply_bytes_max=self._reply_bytes_max)
        if recovering:
            down = {member.id for member in view.servers if member.recovering}
            self.rebuild = self.serving.rebuild = Rebuild(
                server=server, groups=groups, store=store, flusher=self.flusher, recovering=down
            )
        rows = sum(
            Layout(servers=job.servers, k=table.k, r=table.r, rings=job.rings).rows_on(
                server, rows=table.rows, table=index
            )
            for index, table in enumerate(job.tables)
        )
        assert self._coordinator is not None
        load: list[Effect] = []
        if self._loads and not recovering:
            self.serving.loading = True
            load = [Load(job=job)]
        return [*load, Send(target=self._coordinator, message=Ready(rows=rows, memory_bytes=store.memory_bytes))]

    def _know(self, view: View) -> list[Effect]:
        """Takes over a view: who is new is dialled, who is over forgotten, who lost something is helped."""
        known, first = self._peers, self.view is None
        self.view = view
        self._peers = {
            member.id: Identity(role="server", id=member.id, incarnation=member.incarnation) for member in view.servers
        }
        self.serving.peers = self._peers
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
            self.flusher.know(self._peers, replaced=replaced)
            effects += self.holder.know(peers=self._peers, recovering=recovering, replaced=replaced)
            effects += self.serving.grown()  # what waited for a holder that is gone waits no more
        ahead, self._ahead = self._ahead, []
        for event in ahead:
            effects += self._on_server_message(event)
        early, self._early = self._early, []
        for event in early:
            effects += self.serving.receive(event.source, event.message)
        return effects

    # --- Checkpoints ---

    def _on_cut_message(self, source: Identity, message: CutAsk | CutAt | CutEnd) -> list[Effect]:
        if source != self._coordinator or self.view is None:
            return [Refuse(target=source, reason="only the coordinator makes cuts, and after the first view")]
        cut, applied = self.serving.cut, self.flusher.applied
        effects: list[Effect]
        if isinstance(message, CutAsk):
            whole = self.recovered and not self.serving.loading
            effects = [*cut.on_ask(source, message, applied, whole=whole)]
        elif isinstance(message, CutAt):
            effects = [*cut.on_at(source, message, applied)]
        else:
            effects = [*cut.on_end(message)]
        return [*effects, *self.serving.release()]

    def _on_loaded(self, event: LoadedRows | LoadedAll) -> list[Effect]:
        """Rows of the checkpoint that this run starts from. They are flushed as they come, so parities stand for them;
        workers are served when every holder has all of them."""
        assert self.serving.loading
        if isinstance(event, LoadedRows):
            for table, ids, parts in event.rows:
                self._store().load_rows(table, ids, parts)
            return [*self.flusher.flush_all()]
        self.flusher.loaded(event.marks)
        flushed: list[Effect] = [*self.flusher.flush_all()]
        self._load_flushes = self.flusher.numbers() if self.flusher.protected else []
        return [*flushed, *self._check_loaded()]

    def _check_loaded(self) -> list[Effect]:
        if self._load_flushes is None or (self._load_flushes and not self.flusher.has_acked(self._load_flushes)):
            return []
        self._load_flushes = None
        self.serving.loading = False
        return [Log(text="loaded"), Notice(name="loaded", values={}), *self.serving.activated()]

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
            self.flusher.on_stream_ack(source.id, message.group)
            return []
        if isinstance(message, StreamEnd):
            return [*holder.on_stream_end(source, message), *self._check_recovered()]
        if isinstance(message, SnapAsk):
            return self._on_snap_ask(source, message)
        if isinstance(message, Snap):
            return [*holder.decoder.on_snap(source, message)]
        if isinstance(message, Syndrome):
            return [*holder.decoder.on_syndrome(source, message)]
        if isinstance(message, Tail | TailEnd | SyndromeAsk):
            return [*holder.on_holder_message(source, message), *holder.decoder.release_faults()]
        if isinstance(message, RestoredAck):
            holder.decoder.on_restored_ack(source, message.request)
            return []
        if isinstance(message, Fault):
            self.serving.check_slots(message.counts, message.slots)
            return [*holder.decoder.on_fault(source, message)]
        if isinstance(message, Undo | Have | Restored):
            return self._on_rebuild_message(source, message)
        raise ValueError("a server does not take this message from a server")

    def _on_flush_ack(self, source: Identity, ack: FlushAck) -> list[Effect]:
        return [*self.flusher.on_ack(source.id, ack), *self.serving.grown(), *self._check_loaded()]

    def _on_snap_ask(self, source: Identity, ask: SnapAsk) -> list[Effect]:
        self.serving.check_slots(ask.counts, ask.slots)
        if self.rebuild is not None and not self.rebuild.reported:
            raise ValueError("a recovering server has no published rows to give")
        relatives = self.flusher.snapshot(source.id, ask.counts, ask.slots)
        return [Send(target=source, message=Snap(request=ask.request, relatives=relatives))]

    # --- The way back of a replacement ---

    def _on_rebuild_message(self, source: Identity, message: Undo | Have | Restored) -> list[Effect]:
        rebuild = self.rebuild
        effects: list[Effect] = []
        if isinstance(message, Restored) and message.request:
            effects.append(Send(target=source, message=RestoredAck(request=message.request)))
        if rebuild is None:
            # A row that was blank here, then changed and was flushed, is touched at its holder and may come again.
            return effects
        if isinstance(message, Undo):
            rebuild.on_undo(source, message)
            return []
        if isinstance(message, Have):
            rebuild.on_have(source, message)
            if not rebuild.active:
                return []
            effects.append(Log(text=f"active: {rebuild.rows_total} rows are to come back"))
            effects += self.serving.activated()
        else:
            rebuild.on_restored(message)
            # Whoever waits has asked, and answers to that come with request 0. A row that was on its way in the
            # background already may wait for the next tick: to look at every batch would cost more than it brings.
            self._retry_due |= bool(message.request)
            if rebuild.active and not message.request:
                effects += self._retry()
        return effects + self._check_recovered()

    def _retry(self) -> list[Effect]:
        self._retry_due = False
        return [*self.serving.retry()]

    def _check_recovered(self) -> list[Effect]:
        rebuild = self.rebuild
        if rebuild is None or rebuild.reported or not rebuild.active:
            return []
        if self._store().missing_rows() or not self.holder.whole:
            return []
        rebuild.reported = True
        effects: list[Effect] = [
            *self._retry(),
            Log(text=f"recovered: {rebuild.rows_back} rows, {rebuild.faults} on demand"),
        ]
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

    # --- Time ---

    def _on_tick(self, now: float) -> list[Effect]:
        self._now = now
        effects: list[Effect] = []
        if self._coordinator is not None and now >= self._beat_at:
            self._beat_at = now + BEAT_SECONDS
            step = self.serving.committed if self.view is not None else 0
            effects.append(Send(target=self._coordinator, message=Beat(step=step)))
        if self.view is not None and self.serving.cut.tick(now):
            effects += self.serving.release()
        if self.view is None or not self.flusher.protected:
            return effects
        self._row_budget.refill(now)
        self._parity_budget.refill(now)
        effects += self.flusher.tick(now)
        effects += self.serving.grown()
        effects += self.serving.tell_durable()
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
        retried = self._retry() if self._retry_due else []
        filled = self._store().fill(FILL_ROWS)
        if rebuild.reported and not filled:
            self.rebuild = self.serving.rebuild = None  # a server like any other
            return retried
        if rebuild.reported or now < self._notice_at:
            return retried
        self._notice_at = now + NOTICE_SECONDS
        return [*retried, self._notice("recovery")]

    def _store(self) -> Store:
        assert self.store is not None
        return self.store

    def _background(self) -> list[Effect]:
        """Streams and decodes a bit further."""
        effects: list[Effect] = []
        if self.holder.decoder.sweeping:  # rows before parities: somebody may wait for a row
            effects += self.holder.decoder.release_faults()
            effects += self.holder.decoder.sweep(self._row_budget)
        if any(group.streams for group in self.flusher.groups):
            whole = self.rebuild is None or (self.rebuild.active and not self._store().missing_rows())
            effects += self.flusher.stream(self._parity_budget) if whole else []
        return effects


def _described(view: View) -> str:
    back = [f"S{member.id}" for member in view.servers if member.recovering]
    return f"{len(view.servers)} servers" + (f", {', '.join(back)} coming back" if back else "")
