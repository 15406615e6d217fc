"""The door of a server: what comes before there is a view, and who may speak.

A server can do nothing before it knows its view: the view has the job, and the job says which rows there are. So a
server begins as a door that registers, and holds what came early; with the first view the `Server` behind it is made,
whole, and from then on the door only keeps the order: views, fences, and who is who.

The rule to keep: nothing from another incarnation than the view's is listened to. Older ones are over; newer ones wait
until their view is here. Messages of living servers that were sent before a view count as they are: to throw them away
would lose changes for ever.

The same for coordinators: once a newer one has been met, an older one is over, and so are its views that are still on
their way. The newer one was told which view this server knows, and makes the next view from that. Were an older one's
view entered after that, the next could name servers that this one has left behind already: it would begin streams to
them once more, on top of what they have, and their parities would be wrong. And its beats would go to a coordinator
that nobody listens to.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from regrow.core.checks import find_view_flaw
from regrow.core.cut import Save, Saved, Unsave
from regrow.core.effects import Delivered, Dial, Forget, Joined, Log, Lost, Notice, Refuse, Send, Stop, Tick
from regrow.core.groups import make_groups
from regrow.core.identity import Identity
from regrow.core.job import JobSpec
from regrow.core.messages import Beat, CutAsk, CutAt, CutEnd, KnownView, Open, Recovered, Register, StateAsk, View
from regrow.core.own_saves import OwnSaved, SaveOwn, SavePlan, UnsaveOwn
from regrow.core.paging import Fetched, Upkeep, UpkeepDue
from regrow.core.recall_events import SavedRowsLoaded, SavesFound, SavesLoaded, SavesRead
from regrow.core.server import AWAKE, Server
from regrow.core.serving import WAITING_MAX, Store
from regrow.core.steady import SteadyTime
from regrow.core.wayback import FetchSaved, FindSaves, Load, LoadedAll, LoadedRows, find_ways_flaw

Stored = Saved | OwnSaved | SavePlan | LoadedRows | LoadedAll | SavesFound | SavedRowsLoaded | SavesLoaded | SavesRead
Event = Joined | Delivered | Lost | Tick | Fetched | UpkeepDue | Stored
Effect = (
    Send
    | Refuse
    | Log
    | Dial
    | Forget
    | Stop
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

EARLY_OPENS_MAX = 4096  # A worker sends one Open and waits; more than this is somebody misbehaving.
AHEAD_MAX = 1 << 16  # Messages of servers whose view is on its way.
BEAT_SECONDS = 0.25  # Too long: a silent server is noticed late. Too short: the coordinator is kept busy.


class ServerDoor:
    """One door: `effects = door.receive(event)`. `server` is behind it once there is a view."""

    def __init__(
        self,
        *,
        identity: Identity,
        build_store: Callable[[JobSpec, int, bool], Store],
        reply_bytes_max: int,
        address: str = "",
        cut: str | None = None,
        save_plan: SavePlan | None = None,
        marks: tuple[int, ...] | None = None,
    ) -> None:
        """`cut`: the run begins with this checkpoint. `save_plan`: when this server saves its own rows, if it does.
        `marks`: the store that is built has the rows of a checkpoint, made after these pushes (steps), already."""
        self.identity = identity
        self.address = address
        self.server: Server | None = None
        self._build_store = build_store
        self._reply_bytes_max = reply_bytes_max
        self._cut = cut
        self._save_plan = save_plan
        self._marks = marks
        self._coordinator: Identity | None = None
        self._early: list[Delivered] = []  # of workers, before the first view
        self._ahead: list[Delivered] = []  # of servers that the next view will name
        self._time = SteadyTime()
        self._beat_at = 0.0

    @property
    def recovered(self) -> bool:
        """All rows and parities of this server are here."""
        return self.server is not None and self.server.recovered

    def is_peer(self, peer: Identity) -> bool:
        """Whether this is a server of the view."""
        return self.server is not None and self.server.peers.get(peer.id) == peer

    def report(self) -> dict[str, Any]:
        """Counters for whoever watches."""
        return self.server.report() if self.server is not None else {"pulls": 0, "pushes": 0}

    def receive(self, event: Event) -> list[Effect]:
        if isinstance(event, Tick):
            return self._on_tick(self._time.read(event.now))
        if self.server is not None:
            self.server.rests_until = AWAKE
        if isinstance(event, Delivered):
            return self._on_message(event)
        if isinstance(event, Lost):
            return [Log(text=f"{event.peer} is gone: {event.reason}")]
        if isinstance(event, Joined):
            return self._on_joined(event.peer)
        if isinstance(event, SavePlan):
            self._save_plan = event
            if self.server is not None:
                self.server.saves.change_plan(event)
            return []
        if self.server is None:
            return []  # of an attempt before this one: nothing is stored or loaded without a view
        if isinstance(event, Fetched):
            return [*self.server.on_fetched()]
        if isinstance(event, UpkeepDue):
            return [*self.server.do_upkeep()]
        if isinstance(event, Saved):
            return [*self.server.cut.on_saved(self._coordinator, event)] if self._coordinator is not None else []
        if isinstance(event, SavesRead):
            self.server.brought += 1
            return []
        if isinstance(event, OwnSaved):
            self.server.saves.on_saved(event)
            return []
        return [*self.server.on_loaded(event)]

    def _on_message(self, event: Delivered) -> list[Effect]:
        source, message = event.source, event.message
        if self._is_over(source):
            return []  # fenced
        if isinstance(message, View):
            effects = self._on_view(message, source)
        elif isinstance(message, StateAsk) and source.role == "coordinator":
            return [Send(target=source, message=self._make_beat(None, answers=message.number))]
        elif source.role == "server":
            effects = self._on_server_message(event)
        elif self.server is None:
            return self._keep_early(event)
        elif isinstance(message, CutAsk | CutAt | CutEnd):
            if source != self._coordinator:
                return [Refuse(target=source, reason="only the coordinator makes cuts")]
            effects = self._on_cut_message(self.server, source, message)
        else:
            effects = [*self.server.serving.receive(source, message)]
        if self.server is not None:
            effects += self.server.work_in_background()
            effects += self.server.save_at_step()
            effects += self.server.ask_upkeep()
        return effects

    def _on_cut_message(self, server: Server, source: Identity, message: CutAsk | CutAt | CutEnd) -> list[Effect]:
        try:
            return [*server.on_cut_message(source, message)]
        except ValueError as error:
            return [Refuse(target=source, reason=f"{type(message).__name__}: {error}")]

    def _keep_early(self, event: Delivered) -> list[Effect]:
        # Only an Open: it is small, and whoever sends more has not waited to be opened. A replacement is
        # sent everything at once, by workers that know its view before it does.
        replaces = self.identity.incarnation > 0
        bound = WAITING_MAX if replaces else EARLY_OPENS_MAX
        is_worker = event.source.role == "worker"
        if is_worker and (replaces or isinstance(event.message, Open)) and len(self._early) < bound:
            self._early.append(event)
            return []
        return [Refuse(target=event.source, reason=f"{type(event.message).__name__} before the first view")]

    def _on_tick(self, now: float) -> list[Effect]:
        effects: list[Effect] = []
        if self._coordinator is not None and now >= self._beat_at:
            self._beat_at = now + BEAT_SECONDS
            effects.append(Send(target=self._coordinator, message=self._make_beat(now)))
        if self.server is not None:
            effects += self.server.tick(now)
        return effects

    def _make_beat(self, now: float | None, *, answers: int = 0) -> Beat:
        """`now` is None between ticks: then no time has passed for anybody."""
        server = self.server
        if server is None:
            return Beat(answers=answers)
        unanswered = server.answers.longest if now is None else server.find_unanswered(now)
        return Beat(step=server.serving.committed, brought=server.brought, answers=answers, unanswered=unanswered)

    # --- Views ---

    def _on_joined(self, peer: Identity) -> list[Effect]:
        if peer.role != "coordinator" or self._is_over(peer):
            return []
        void = self._on_other_coordinator(peer)
        known = self._remember_view() if self.server is not None else None
        return [*void, Send(target=peer, message=Register(address=self.address, known=known))]

    def _remember_view(self) -> KnownView:
        """The view, as a coordinator that does not know it is told; about itself a server knows best."""
        assert self.server is not None
        view = self.server.view
        servers = list(view.servers)
        me = servers[self.identity.id]
        recalled = me.recalled and not self.recovered
        servers[self.identity.id] = msgspec.structs.replace(me, recovering=not self.recovered, recalled=recalled)
        return KnownView(epoch=view.epoch, servers=tuple(servers), job=view.job)

    def _is_over(self, peer: Identity) -> bool:
        """Whether this is a coordinator that has a successor."""
        known = self._coordinator
        return known is not None and peer.role == known.role and peer.incarnation < known.incarnation

    def _on_other_coordinator(self, peer: Identity) -> list[Effect]:
        """A new one knows nothing of the cut that the one before was making."""
        before, self._coordinator = self._coordinator, peer
        if self.server is None:
            return []
        self.server.coordinator = peer
        if before in (None, peer):
            return []
        return [*self.server.give_up_cut()]

    def _on_view(self, view: View, source: Identity) -> list[Effect]:
        if source.role != "coordinator":
            return [Refuse(target=source, reason="only the coordinator makes views")]
        if reason := self._find_misfit(view):
            return [Refuse(target=source, reason=f"view {view.epoch} {reason}")]
        me = view.servers[self.identity.id]
        if me.incarnation > self.identity.incarnation:
            return [Stop(reason=f"{self.identity} was replaced by incarnation {me.incarnation}")]
        if me.incarnation < self.identity.incarnation or view.lost:
            return []  # made before we were known, or the last one
        if self.server is not None and view.epoch <= self.server.view.epoch:
            return []
        effects: list[Effect] = [Log(text=f"view {view.epoch}: {describe_view(view)}")]
        effects += self._on_other_coordinator(source)
        effects += self._enter_view(view, source)
        if me.recovering and self.recovered:
            effects.append(Send(target=source, message=Recovered()))  # the coordinator before this one heard it
        return effects

    def _find_misfit(self, view: View) -> str | None:
        """Why this view is not for this server, or None."""
        if reason := find_view_flaw(view.servers, view.job):
            return reason
        if self.identity.id >= view.job.servers:
            return f"has no place for {self.identity}"
        if self.server is not None:
            return None if view.job == self.server.view.job else "is of another job"
        me = view.servers[self.identity.id]
        if view.lost or me.incarnation != self.identity.incarnation:
            return None  # nobody begins with it
        if self._marks is not None and (me.recovering or len(self._marks) != view.job.marks):
            return f"does not fit the {len(self._marks)} marks of the rows that are here"
        flaw = find_ways_flaw(make_groups(view.job), recovering=me.recovering, cut=self._cut)
        return f"cannot be begun with: {flaw}" if flaw is not None else None

    def _enter_view(self, view: View, coordinator: Identity) -> list[Effect]:
        """Takes over a view: who is new is dialled, who is over forgotten, who lost something is helped. Then whoever
        came early is heard."""
        effects: list[Effect] = []
        if self.server is None:
            self.server = Server(
                identity=self.identity,
                view=view,
                build_store=self._build_store,
                reply_bytes_max=self._reply_bytes_max,
                cut=self._cut,
                save_plan=self._save_plan,
                coordinator=coordinator,
                marks=self._marks,
            )
            effects += self.server.begin()
        else:
            effects += self.server.know(view)
        ahead, self._ahead = self._ahead, []
        for event in ahead:
            effects += self._on_server_message(event)
        early, self._early = self._early, []
        for event in early:
            effects += self.server.serving.receive(event.source, event.message)
        return effects

    # --- Other servers ---

    def _on_server_message(self, event: Delivered) -> list[Effect]:
        source = event.source
        known = self.server.peers.get(source.id) if self.server is not None else None
        if self.server is None or (known is not None and source.incarnation > known.incarnation):
            if len(self._ahead) >= AHEAD_MAX:
                return [Refuse(target=source, reason="too much before the view that names you")]
            self._ahead.append(event)
            return []
        if known is None or not self.server.view.job.protection.has_parities:
            return [Refuse(target=source, reason=f"{source} has no place in view {self.server.view.epoch}")]
        if source.incarnation < known.incarnation:
            return []  # fenced
        try:
            return [*self.server.on_server_message(source, event.message)]
        except (ValueError, IndexError) as error:
            return [Refuse(target=source, reason=f"{type(event.message).__name__}: {error}")]


def describe_view(view: View) -> str:
    back = [f"S{member.id}" for member in view.servers if member.recovering]
    return f"{len(view.servers)} servers" + (f", {', '.join(back)} coming back" if back else "")
