"""A server that knows its view: its rows, the parities it keeps for others, and its own way back.

Theory of operation. A server is made of parts that each keep one rule and can be read alone; this file only brings
together what concerns several of them.

    serving    each push exactly once to each group of rows                    serving.py, serving_{async,sync}.py
    flusher    nothing that was called durable is missing from a holder        flusher.py
    holder     same flush number, same parity, at every holder                 holder.py
    decoder    a decoded row contains a push if and only if the marks do       decode.py
    cut        what is captured is one instant, and forgotten when it exists   cut.py
    saves      what is saved counts as saved once it is durable                own_saves.py
    paging     nobody waits for the disk with rows in his hand                 paging.py
    ways       no row ahead of its marks                                       wayback.py, rebuild.py, reload.py,
                                                                               recall.py

All of them exist from the first view to the end; none is optional. Without parities there are no groups with holders,
and flusher, holder and decoder have nothing to do. A server with all its rows has no way back to go.

What concerns several parts, and why it is here:
- A flush acknowledged by a holder makes pushes durable (flusher), which may answer a worker (serving), end a stream to
  another holder (flusher), and complete what was loaded (ways).
- A row that is back (ways) lets requests go on that waited for it (serving). Those that somebody waited for are looked
  at once; for rows of the background that is done with the next tick, or every batch would cost a look at everybody.
- A server has recovered when its rows are back (ways) *and* its parities are whole (holder): only then it counts
  towards tolerance, answers snapshots, and the coordinator is told. One that was recalled waits for its living holders
  too: what they held of its stripes was void.
- A source streams its rows to a new holder only when it has them all: it cannot send what it lacks.
- Decoding and streaming are background work: after every message a bit of it goes on, within a budget.
- A store captures for one at a time: a cut, for which all servers wait, ends a save of this server's own.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, cast

from regrow.core.answers import Answers
from regrow.core.cut import CutSide, Save, Unsave
from regrow.core.effects import Dial, Forget, Log, Notice, Refuse, Send
from regrow.core.flusher import Budget, Flusher
from regrow.core.groups import Groups, make_groups
from regrow.core.holder import Holder
from regrow.core.identity import Identity
from regrow.core.job import JobSpec
from regrow.core.messages import (
    CutAsk,
    CutAt,
    CutEnd,
    Fault,
    Flush,
    FlushAck,
    FlushCommit,
    Have,
    Mended,
    Message,
    Ready,
    Recovered,
    Restored,
    RestoredAck,
    Snap,
    SnapAsk,
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
)
from regrow.core.own_saves import OwnSaves, SaveOwn, SavePlan, UnsaveOwn
from regrow.core.pace import PaceKeeper
from regrow.core.paging import Upkeep, look_for_paging
from regrow.core.rebuild import Rebuild
from regrow.core.recall import Recall
from regrow.core.recall_events import SavedRowsLoaded, SavesFound, SavesLoaded
from regrow.core.reload import Reload
from regrow.core.serving import Parts, Serving, Store
from regrow.core.serving_async import AsyncServing
from regrow.core.serving_sync import SyncServing
from regrow.core.states import CutState, OwnSaveState
from regrow.core.wayback import FetchSaved, FindSaves, Load, LoadedAll, LoadedRows, WayBack, Ways, plan_ways
from regrow.store.interface import PagedRows

Loaded = LoadedRows | LoadedAll | SavesFound | SavedRowsLoaded | SavesLoaded
Effect = (
    Send
    | Refuse
    | Log
    | Dial
    | Forget
    | Notice
    | Save
    | Unsave
    | SaveOwn
    | UnsaveOwn
    | Load
    | FindSaves
    | FetchSaved
    | Upkeep
)

NOTICE_SECONDS = 0.25
AWAKE = -math.inf  # no time to rest until
# What is sent because another server asked, or sent something.
ANSWERS = (FlushAck, StreamAck, RestoredAck, Snap, Syndrome, Have, TailEnd)
# What brings rows and parities back to a server; while none comes, it does not get further.
BRINGS = (Stream, StreamEnd, StreamAck, Mended, Undo, Have, Restored, Snap, Syndrome, Tail, TailEnd)


class Server:
    """Everything behind the door. Every method returns what to send."""

    def __init__(
        self,
        *,
        identity: Identity,
        view: View,
        build_store: Callable[[JobSpec, int, bool], Store],
        reply_bytes_max: int,
        cut: str | None,
        save_plan: SavePlan | None,
        coordinator: Identity,
        marks: tuple[int, ...] | None = None,
    ) -> None:
        """`marks`: the rows of the store are those after these pushes (steps) already."""
        job, server = view.job, identity.id
        me = view.servers[server]
        sync = job.mode == "sync"
        self.identity = identity
        self.coordinator = coordinator  # whoever was heard of last
        self.view = view
        self.peers = {member.id: member.identity for member in view.servers}
        self.answers = Answers()
        self.brought = 0  # what came for the way back so far
        self.recovered = not me.recovering  # all rows and parities are here, or were from the start
        self.store = build_store(job, server, me.recovering)
        groups = make_groups(job)
        self.flusher = Flusher(
            server=server,
            groups=groups,
            store=self.store,
            marks=job.marks,
            spec=job.protection.flush,
            keeps_undo=sync,
        )
        self.holder = Holder(
            server=server,
            groups=groups,
            store=self.store,
            marks=job.marks,
            ended=not me.recovering,
            keeps_last=sync,
        )
        self.ways = self._plan_ways(groups, cut)
        self._unmended = self._find_unmended(groups)  # holders that live, and have not told that they are whole again
        self.paging = look_for_paging(self.store, workers=job.workers)
        self.cut = self._make_cut_side(job)
        self.saves = OwnSaves(store=self.store, flusher=self.flusher, plan=save_plan, ways=self.ways)
        parts = Parts(
            job=job,
            store=self.store,
            flusher=self.flusher,
            ways=self.ways,
            cut=self.cut,
            reply_bytes_max=reply_bytes_max,
            paging=self.paging,
        )
        if marks is not None:
            self.flusher.set_marks(marks, range(groups.total))
        self.serving: Serving = SyncServing(parts) if sync else AsyncServing(parts)
        self.serving.peers = self.peers
        # As many servers as there are groups bring rows back to one that was lost, and as many its parities.
        self._keeper = PaceKeeper(job.protection.flush, sharers=max(1, len(groups)))
        rate = self._keeper.pace.bytes_per_s
        self._row_budget, self._parity_budget = Budget(rate), Budget(rate)
        self._retry_due = False  # rows of the background have come; somebody may have waited for one of them
        self._notice_at = 0.0
        # Before this time ticks find nothing to do, unless a budget fills: most ticks of most servers. The door ends it
        # with every other event.
        self.rests_until = AWAKE
        self._began: float | None = None  # when the way back was first looked at
        self._now = 0.0

    def _make_cut_side(self, job: JobSpec) -> CutSide:
        protection, holds_pushes = job.protection, job.mode != "sync"
        if not protection.keeps_epochs:
            return CutSide(store=self.store, holds_pushes=holds_pushes)
        if self.paging is None:
            raise ValueError("checkpoints are to be kept in the files of a store that has none")
        return CutSide(
            store=self.store,
            holds_pushes=holds_pushes,
            epochs=cast(PagedRows, self.store),
            flush_seconds=protection.flush_seconds,
        )

    def _plan_ways(self, groups: Groups, cut: str | None) -> Ways:
        recovering = [member.id for member in self.view.servers if member.recovering]
        recalled = self.view.servers[self.identity.id].recalled
        plan = plan_ways(groups, recovering=not self.recovered, recalled=recalled, cut=cut)
        ways: list[WayBack] = []
        if plan.rebuilt:
            ways.append(
                Rebuild(
                    server=self.identity.id,
                    groups=groups,
                    mine=plan.rebuilt,
                    store=self.store,
                    flusher=self.flusher,
                    recovering=recovering,
                )
            )
        if plan.reloaded:
            assert cut is not None
            ways.append(Reload(groups=groups, mine=plan.reloaded, store=self.store, flusher=self.flusher, cut=cut))
        if plan.recalled:
            ways.append(
                Recall(
                    server=self.identity.id,
                    groups=groups,
                    mine=plan.recalled,
                    store=self.store,
                    flusher=self.flusher,
                )
            )
        return Ways(ways)

    def _find_unmended(self, groups: Groups) -> set[int]:
        servers = self.view.servers
        if not servers[self.identity.id].recalled:
            return set()
        holders = {holder for g in groups.recallable for holder in groups.holders(self.identity.id, g)}
        return {holder for holder in holders if not servers[holder].recovering}

    def report(self) -> dict[str, Any]:
        """Counters for whoever watches."""
        tiers: dict[str, Any] = {}
        if self.paging is not None:
            tiers["tiers"] = self.paging.correct_report(cast(PagedRows, self.store).tier_report())
        return {
            **tiers,
            "pulls": self.serving.pulls,
            "pushes": self.serving.clock,
            "redundancy_bytes": self.store.redundancy_bytes,
            "flush_bytes": self.flusher.flush_bytes,
            "flushes": self.flusher.flush_count,
            "flush_rows": self.flusher.flush_rows,
            "rows_updated": self.serving.rows_updated,
            "parity_rows_applied": self.holder.rows_applied,
            "rows_decoded": self.holder.decoder.rows_decoded,
            "faults_served": self.holder.decoder.faults,
            "faults": self.ways.count("faults"),
            "recovering": not self.recovered,
            "pace": self._keeper.text,
            "updates": self.flusher.updates,
            "priority_bytes": self.store.priority_bytes(),
            "count_bytes": self.store.count_bytes(),
        }

    # --- Views ---

    def begin(self) -> list[Effect]:
        """With the first view: the rows are in memory, or on their way."""
        job = self.view.job
        rows = sum(
            job.layout(index).rows_on(self.identity.id, rows=table.rows, table=index)
            for index, table in enumerate(job.tables)
        )
        ready = Ready(rows=rows, memory_bytes=self.store.memory_bytes)
        replaced = [member.id for member in self.view.servers if member.recovering and member.id != self.identity.id]
        effects: list[Effect] = [*self.ways.begin(), Send(target=self.coordinator, message=ready)]
        return effects + self._meet(known={}, replaced=replaced, is_new=True)

    def know(self, view: View) -> list[Effect]:
        """Another view: who is new is dialled, who is over forgotten, who lost something is helped."""
        known, self.view = self.peers, view
        self.peers = self.serving.peers = {member.id: member.identity for member in view.servers}
        replaced = [server for server, peer in self.peers.items() if peer != known[server]]
        forgotten: list[Effect] = [Forget(peer=known[server]) for server in replaced]
        return forgotten + self._meet(known=known, replaced=replaced)

    def _meet(self, *, known: dict[int, Identity], replaced: list[int], is_new: bool = False) -> list[Effect]:
        """`replaced` have lost what they held. Of two servers, the one with the higher number dials."""
        if not self.view.job.protection.has_parities:
            return []
        effects: list[Effect] = [
            Dial(peer=self.peers[member.id], address=member.address)
            for member in self.view.servers[: self.identity.id]
            if self.peers[member.id] != known.get(member.id)
        ]
        recovering = [member.id for member in self.view.servers if member.recovering]
        recalled = [member.id for member in self.view.servers if member.recalled]
        self.flusher.know(self.peers, replaced=replaced)
        effects += self.holder.know(
            peers=self.peers, recovering=recovering, replaced=replaced, recalled=recalled, is_new=is_new
        )
        return [*effects, *self.serving.answer_durable()]  # what waited for a holder that is gone waits no more

    # --- Checkpoints ---

    def on_cut_message(self, source: Identity, message: CutAsk | CutAt | CutEnd) -> list[Effect]:
        applied = self.flusher.applied
        effects: list[Effect]
        if isinstance(message, CutAsk):
            whole = self.recovered and self.ways.serves
            busy = message.yields and self.saves.life.state is not OwnSaveState.IDLE
            ended = self.saves.give_up() if message.number > self.cut.number and not busy else []
            effects = [*ended, *self.cut.on_ask(source, message, applied, whole=whole, busy=busy)]
        elif isinstance(message, CutAt):
            effects = [*self.cut.on_at(source, message, applied)]
        else:
            effects = [*self.cut.on_end(message)]
        return [*effects, *self.serving.release()]

    def give_up_cut(self) -> list[Effect]:
        """Whoever made it is gone."""
        return [*self.cut.give_up(), *self.serving.release()]

    # --- Other servers ---

    def on_server_message(self, source: Identity, message: Message) -> list[Effect]:
        """ValueError or IndexError: the message makes no sense, and nothing changed."""
        effects = self._dispatch(source, message)
        self.brought += isinstance(message, BRINGS)  # what is refused brings nothing
        if isinstance(message, ANSWERS):
            self.answers.count(source.id)
        return effects

    def _dispatch(self, source: Identity, message: Message) -> list[Effect]:
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
        if isinstance(message, StreamAsk):
            return [*self.flusher.on_stream_ask(source, message), *self.serving.answer_durable()]
        if isinstance(message, StreamBegin):
            return [*holder.on_stream_begin(source, message)]
        if isinstance(message, Mended):
            return self._on_mended(source, message)
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
            self.serving.requests.check_slots(message.counts, message.slots)
            return [*holder.decoder.on_fault(source, message)]
        if isinstance(message, Undo | Have | Restored):
            return self._on_brought(source, message)
        raise ValueError("a server does not take this message from a server")

    def _on_flush_ack(self, source: Identity, ack: FlushAck) -> list[Effect]:
        effects: list[Effect] = [*self.flusher.on_ack(source.id, ack), *self.serving.answer_durable()]
        effects += self.saves.check_copies()
        if not self.ways.is_whole:
            effects += self._take(self.ways.on_acknowledged)
        return effects

    def _on_snap_ask(self, source: Identity, ask: SnapAsk) -> list[Effect]:
        self.serving.requests.count_floats(ask.counts, ask.slots)  # the store checks that the rows exist
        if not self.recovered:
            raise ValueError("a recovering server has no published rows to give")
        relatives = self.flusher.snapshot(source.id, ask.counts, ask.slots)
        return [Send(target=source, message=Snap(request=ask.request, relatives=relatives))]

    # --- The way back ---

    def on_loaded(self, event: Loaded) -> list[Effect]:
        """The driver brings rows of a checkpoint, or of saves."""
        self.brought += 1
        served = self.ways.serves
        effects = self._take(lambda: self.ways.receive(None, event))
        if served and self.ways.serves:
            effects += self._retry()  # somebody may have waited for one of them
        return effects + self._check_recovered()

    def _on_brought(self, source: Identity, message: Undo | Have | Restored) -> list[Effect]:
        effects: list[Effect] = []
        if isinstance(message, Restored) and message.request:
            effects.append(Send(target=source, message=RestoredAck(request=message.request)))
        if self.ways.is_whole:
            return effects
        effects += self._take(lambda: self.ways.receive(source, message))
        if isinstance(message, Restored) and self.ways.serves:
            # Whoever waits has asked, and answers to that come with request 0. A row that was on its way in the
            # background already may wait for the next tick: to look at every batch would cost more than it brings.
            self._retry_due |= bool(message.request)
            if not message.request:
                effects += self._retry()
        return effects + self._check_recovered()

    def _take(self, act: Callable[[], list[Any]]) -> list[Effect]:
        """Something came for a way back. If that was what everybody waited for, they are served."""
        served = self.ways.serves
        effects: list[Effect] = [*act()]
        if self.ways.serves and not served:
            effects += self.serving.serve_queued()
        return effects

    def _retry(self) -> list[Effect]:
        self._retry_due = False
        return [*self.serving.retry()]

    def _on_mended(self, source: Identity, mended: Mended) -> list[Effect]:
        if not mended.left:
            self._unmended.discard(source.id)
        return self._check_recovered()

    def _check_recovered(self) -> list[Effect]:
        if self.recovered or not self.ways.is_back or not self.holder.whole or self._unmended:
            return []
        self.recovered = True
        progress = self.ways.progress()
        text = f"recovered: {progress['rows_back']} rows, {progress['faults']} on demand"
        told = Send(target=self.coordinator, message=Recovered())
        return [*self._retry(), Log(text=text), told, self._notice("recovered")]

    def _notice(self, name: str) -> Notice:
        began = self._began if self._began is not None else self._now
        return Notice(name=name, values={**self.ways.progress(), "seconds": round(self._now - began, 3)})

    # --- Rows on disk ---

    def on_fetched(self) -> list[Effect]:
        """The store has read something, or written all of an epoch."""
        if self.paging is None:
            return []
        return [*self.serving.on_fetched(), *self.cut.check_complete(), *self.ask_upkeep()]

    def ask_upkeep(self) -> list[Effect]:
        """Behind whatever was answered."""
        return [] if self.paging is None else [*self.paging.ask_upkeep()]

    def do_upkeep(self) -> list[Effect]:
        """Nobody waits."""
        return [] if self.paging is None else [*self.paging.do_upkeep()]

    def _tick_disk(self, now: float) -> list[Effect]:
        """A sign of the disk may have been missed; and time is short for an epoch."""
        assert self.paging is not None
        self.paging.check_time(now)
        self.cut.hasten(now)
        if not self.paging.waits and self.cut.life.state is CutState.IDLE:
            return self.ask_upkeep()
        return self.on_fetched()

    # --- Time ---

    def find_unanswered(self, now: float) -> Unanswered | None:
        """Which server has owed this one an answer for longest, if that is long."""
        if self.answers.is_due(now):
            owing = [*self.flusher.find_owing(), *self.holder.find_owing(), *self.ways.find_owing()]
            self.answers.look(now, dict.fromkeys(owing), self.peers)
        return self.answers.longest

    def tick(self, now: float) -> list[Effect]:
        self._now = now
        paced = self._keep_pace(now) if self.view.job.protection.has_parities else []
        has_more = self._refill(now) or bool(paced)
        if now < self.rests_until and not has_more:
            return []
        effects: list[Effect] = [*paced, *([] if self.paging is None else self._tick_disk(now))]
        if self.cut.tick(now):
            effects += self.serving.release()
        effects += self.cut.check_aside()  # rows that were loaded or assigned change too
        if self.view.job.protection.has_parities:
            effects += self.flusher.tick(now)
            effects += self.serving.answer_durable()
            effects += self.serving.tell_durable()
            effects += self.holder.tell_mended()
            effects += self.work_in_background()
        has_more = False
        if not self.recovered or not self.ways.is_whole:
            brought, has_more = self._tick_ways(now)
            effects += brought
        if self.serving.wrote_recallable and self.saves.life.state is OwnSaveState.IDLE:
            self.serving.wrote_recallable = False
            self.saves.hasten()
        if self.cut.life.state is CutState.IDLE:
            effects += self.saves.tick(now, self.serving.committed)
        self.rests_until = AWAKE if effects or has_more else self._find_rest()
        return effects

    def _keep_pace(self, now: float) -> list[Effect]:
        """How fast rows may come back, if that is another rate than before, and why."""
        down = [member for member in self.view.servers if member.recovering]
        decoder = self.holder.decoder
        changed = self._keeper.look(
            now,
            pushes=self.serving.clock,
            bytes_sent=decoder.bytes_begun + self.flusher.bytes_streamed,
            bytes_total=decoder.bytes_total,
            margin=max(0, self.view.job.protection.lost_together_max - len(down)) if down else None,
        )
        if not changed:
            return []
        pace = self._keeper.pace
        self._row_budget.set_rate(pace.bytes_per_s)
        self._parity_budget.set_rate(pace.bytes_per_s)
        return [Log(text=f"rows come back with {self._keeper.text}")] if pace.reason else []

    def _refill(self, now: float) -> bool:
        """Whether background work that waited for its budget may go on."""
        rows, parities = self._row_budget.refill(now), self._parity_budget.refill(now)
        return rows or parities

    def save_at_step(self) -> list[Effect]:
        """Where saves are counted in steps, they are made at the very step, not with the next tick: two runs of a
        synchronous job then save the same rows."""
        if not self.saves.counts_steps or self.cut.life.state is not CutState.IDLE:
            return []
        return [*self.saves.tick(self._now, self.serving.committed)]

    def _find_rest(self) -> float:
        """Until when time alone brings nothing further, behind a tick that found nothing to do. Streams and sweeps went
        as far as they could in it: they wait for an answer, or for their budget."""
        if self.cut.life.state is not CutState.IDLE:
            return AWAKE
        if self.view.job.protection.has_parities and not self.flusher.rests:
            return AWAKE
        if self.paging is not None and self.paging.waits:
            return AWAKE
        notice_at = math.inf if self.recovered or not self.ways.serves else self._notice_at
        return min(notice_at, self.saves.rests_until)

    def _tick_ways(self, now: float) -> tuple[list[Effect], bool]:
        """What to send, and whether the next tick may find more to do."""
        if self._began is None:
            self._began = now
        if not self.ways.serves:
            return [], False
        has_retried = self._retry_due
        effects = self._retry() if has_retried else []
        is_filling = self.ways.tick()
        if not self.recovered and is_filling:
            self._retry_due = True  # somebody may have waited for one of these rows
            effects += self._check_recovered()
        if not self.recovered and now >= self._notice_at:
            self._notice_at = now + NOTICE_SECONDS
            effects.append(self._notice("recovery"))
        return effects, has_retried or is_filling

    def work_in_background(self) -> list[Effect]:
        """Streams and decodes a bit further."""
        effects: list[Effect] = []
        if self.holder.decoder.sweeping:  # rows before parities: somebody may wait for a row
            effects += self.holder.decoder.release_faults()
            effects += self.holder.decoder.sweep(self._row_budget)
        if self.ways.is_back and self.flusher.is_streaming:
            effects += self.flusher.stream(self._parity_budget)
        return effects
