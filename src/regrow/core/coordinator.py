"""The coordinator: knows who serves what, notices who is gone, and tells everybody. It is never on the data path.

It waits until every server of the job has registered and the job has been declared, then makes the first view.
A server that dies is replaced by its next incarnation, which comes back from parities; the view that names it is made
when every dead server has its replacement. Beyond what parities can bring back, the last view says what is lost.

The rules to keep: epochs only rise, also across coordinators (a coordinator's own incarnation is their upper half); a
view is sent whole; mere silence never makes rows count as lost, because the silent may still speak.
"""

from __future__ import annotations

import msgspec

from regrow.core.cut import CutNow, CutPlan, Cuts, ManifestWritten, WriteManifest
from regrow.core.effects import Delivered, Died, Forget, Joined, Log, Lost, Notice, Refuse, Replace, Send, Tick
from regrow.core.groups import Groups
from regrow.core.job import JobSpec
from regrow.core.link import Identity
from regrow.core.messages import (
    Beat,
    CutBegun,
    CutMarks,
    CutSaved,
    Declare,
    KnownView,
    Member,
    Message,
    Ready,
    Recovered,
    Register,
    View,
)

Event = Joined | Delivered | Lost | Tick | Died | ManifestWritten | CutNow
Effect = Send | Refuse | Log | Replace | Forget | WriteManifest | Notice

# A closed connection that does not come back counts as a death. Too short: a reset is taken for one.
LOST_SECONDS = 0.3
# Too short: a server that computes, or a busy machine, is taken for a dead one. Too long: everybody waits.
SILENT_SECONDS = 1.5
# For a new coordinator: how long to wait for servers that others know of.
MISSING_SECONDS = 3.0
# A clock that jumped this far says that the coordinator itself was stopped: nobody else was silent then.
OWN_PAUSE_SECONDS = 0.5


class Coordinator:
    """One door: `effects = coordinator.receive(event)`."""

    def __init__(
        self,
        *,
        servers: int,
        job: JobSpec | None = None,
        term: int = 0,
        cut_plan: CutPlan | None = None,
        cut_salt: str = "",
    ) -> None:
        self.view: View | None = None
        self.ready: dict[int, Ready] = {}
        self.lost = ""  # what cannot come back
        self.dead: dict[int, str] = {}  # servers that wait for their replacement, and why
        self.cuts: Cuts | None = None  # if this run is checkpointed, and its job known
        self._cut_plan = cut_plan
        self._cut_now: CutNow | None = None  # asked for before there was a view
        self._cut_salt = cut_salt
        self._server_count = servers
        self._job = job
        self._term = term
        self._views = 0
        self._known: KnownView | None = None  # what servers tell a new coordinator
        self._members: dict[int, Member] = {}
        self._peers: dict[Identity, None] = {}  # in order of arrival
        self._heard: dict[int, float] = {}  # server -> when it last said something
        self._closed: dict[int, float] = {}  # server -> when its connection closed
        self._up: set[int] = set()  # servers that have their rows in memory: silence means something
        self._now = 0.0
        self._learned_at: float | None = None

    def receive(self, event: Event) -> list[Effect]:
        effects = self._receive(event)
        if self._cut_plan is None or self.view is None:
            return effects
        if self.cuts is None:
            sync = self.view.job.mode == "sync"
            self.cuts = Cuts(self._cut_plan, is_sync=sync, term=self._term, salt=self._cut_salt)
            if self._cut_now is not None:
                self.cuts.want(self._cut_now)
        whole = not self.dead and not self.lost and not any(member.recovering for member in self._members.values())
        peers = {member.id: _identity(member) for member in self.view.servers} if whole else None
        effects += self.cuts.know(peers)
        if isinstance(event, Tick):
            effects += self.cuts.tick(event.now)
        return effects

    def _receive(self, event: Event) -> list[Effect]:
        if isinstance(event, ManifestWritten | CutNow):
            if self.cuts is None:
                self._cut_now = event if isinstance(event, CutNow) else None
                return []
            return [
                *(self.cuts.on_manifest_written(event) if isinstance(event, ManifestWritten) else self.cuts.want(event))
            ]
        if isinstance(event, Tick):
            return self._on_tick(event.now)
        if isinstance(event, Died):
            return self._on_dead(event.peer, "its process ended")
        if isinstance(event, Joined):
            return self._on_joined(event.peer)
        if isinstance(event, Lost):
            self._peers.pop(event.peer, None)
            if self._is_member(event.peer):
                self._closed.setdefault(event.peer.id, self._now)
            return [Log(text=f"{event.peer} is gone: {event.reason}")]
        message, source = event.message, event.source
        if isinstance(message, Register) and source.role == "server":
            return self._on_register(source, message)
        if isinstance(message, Declare) and source.role == "worker":
            return self._on_declare(source, message)
        if self._is_member(source):
            self._heard[source.id] = self._now
            self._closed.pop(source.id, None)
            if isinstance(message, Beat):
                if self.cuts is not None:
                    self.cuts.on_step(message.step)
                return []
            if isinstance(message, CutMarks | CutBegun | CutSaved):
                return self._on_cut_message(source.id, message)
            if isinstance(message, Ready):
                self.ready[source.id] = message
                self._up.add(source.id)
                return [Log(text=f"{source} is ready: {message.rows} rows, {message.memory_bytes} bytes")]
            if isinstance(message, Recovered):
                return self._on_recovered(source)
        elif self._is_over(source):
            return [Refuse(target=source, reason=f"{source} was replaced by a newer incarnation")]
        return [Refuse(target=source, reason=f"{type(message).__name__} from a {source.role}")]

    def _on_cut_message(self, server: int, message: Message) -> list[Effect]:
        if self.cuts is None:
            return []
        if isinstance(message, CutMarks):
            return [*self.cuts.on_marks(server, message)]
        if isinstance(message, CutBegun):
            return [*self.cuts.on_begun(server, message)]
        assert isinstance(message, CutSaved)
        return [*self.cuts.on_saved(server, message)]

    def _on_joined(self, peer: Identity) -> list[Effect]:
        self._peers[peer] = None
        self._closed.pop(peer.id, None) if self._is_member(peer) else None
        return [Send(target=peer, message=self.view)] if self.view is not None else []

    def _is_member(self, peer: Identity) -> bool:
        member = self._members.get(peer.id)
        return peer.role == "server" and member is not None and member.incarnation == peer.incarnation

    def _is_over(self, peer: Identity) -> bool:
        member = self._members.get(peer.id)
        return peer.role == "server" and member is not None and member.incarnation > peer.incarnation

    # --- Coming ---

    def _on_register(self, source: Identity, message: Register) -> list[Effect]:
        if source.id >= self._server_count:
            return [Refuse(target=source, reason=f"server {source.id} of a cluster of {self._server_count}")]
        if message.known is not None and len(message.known.servers) != self._server_count:
            return [Refuse(target=source, reason=f"{source} knows a view of another cluster")]
        effects: list[Effect] = [Log(text=f"{source} listens at {message.address}")]
        if message.known is not None:
            effects += self._learn(message.known)
        if self._is_over(source):
            return [*effects, Refuse(target=source, reason=f"{source} was replaced by a newer incarnation")]
        if self._is_member(source) and source.id in self.dead:
            # It was declared dead and has not been replaced yet, but its word comes too late.
            reason = f"{source} is being replaced: {self.dead[source.id]}"
            return [*effects, Refuse(target=source, reason=reason)]
        news = self.view is None
        if not self._is_member(source):
            news = True
            effects += self._take_place(
                Member(
                    id=source.id,
                    incarnation=source.incarnation,
                    address=message.address,
                    recovering=self._job is not None and self._has_rows(),
                )
            )
        elif message.known is not None:
            self._up.add(source.id)
            if self.view is None:  # nobody knows better than it whether it has recovered
                self._members[source.id] = message.known.servers[source.id]
        self._heard[source.id] = self._now
        self._closed.pop(source.id, None)
        return effects + self._announce() if news else effects

    def _take_place(self, member: Member) -> list[Effect]:
        """A server is there for the first time, or in the place of one that is over."""
        before = self._members.get(member.id)
        effects: list[Effect] = []
        if before is not None and member.id not in self.dead:
            effects += self._on_dead(_identity(before), "its successor is here", replace=False)
        self._members[member.id] = member
        self.dead.pop(member.id, None)
        return effects

    def _has_rows(self) -> bool:
        """Whether training has begun: a server that comes now has something to bring back."""
        return self.view is not None or self._known is not None

    def _learn(self, known: KnownView) -> list[Effect]:
        """A server remembers a view: a coordinator without one takes the newest it is told."""
        if self.view is not None or (self._known is not None and self._known.epoch >= known.epoch):
            return []
        self._known = known
        self._job = known.job
        present, self._members = self._members, {member.id: member for member in known.servers}
        effects: list[Effect] = []
        for server in list(self.dead):
            if self._members[server].incarnation > present[server].incarnation:
                del self.dead[server]  # whom we declared dead was replaced already
        for member in present.values():
            if member.incarnation > self._members[member.id].incarnation:
                # It had registered before anybody told us whom it replaces.
                effects += self._take_place(msgspec.structs.replace(member, recovering=True))
                self._heard[member.id] = self._now
            elif member.incarnation == self._members[member.id].incarnation and member.id in self._up:
                self._members[member.id] = member  # its own word about itself; one without a view has none to give
        return effects

    def _on_declare(self, source: Identity, message: Declare) -> list[Effect]:
        job = message.job
        if reason := job.invalid_reason():
            return [Refuse(target=source, reason=reason)]
        if job.servers != self._server_count:
            reason = f"the job is for {job.servers} servers, this cluster has {self._server_count}"
            return [Refuse(target=source, reason=reason)]
        if self._job is None:
            self._job = job
            return [Log(text=f"{source} declares {len(job.tables)} tables"), *self._announce()]
        if job != self._job:
            return [Refuse(target=source, reason="another job with other tables runs on this cluster")]
        return []

    # --- Going ---

    def _on_tick(self, now: float) -> list[Effect]:
        pause = now - self._now
        self._now = now
        if pause > OWN_PAUSE_SECONDS:
            self._heard = {server: at + pause for server, at in self._heard.items()}
            self._closed = {server: at + pause for server, at in self._closed.items()}
            self._learned_at = None
            return []
        effects: list[Effect] = []
        for server, at in list(self._closed.items()):
            if now - at >= LOST_SECONDS:
                effects += self._presume_dead(server, "its connection closed")
        for server, at in list(self._heard.items()):
            if now - at >= SILENT_SECONDS and server in self._up:
                effects += self._presume_dead(server, f"silent for {now - at:.1f} s")
        if self.view is None and self._known is not None:
            effects += self._look_for_missing()
        return effects

    def _look_for_missing(self) -> list[Effect]:
        """A new coordinator waits for the servers that others know of, but not for ever."""
        if self._learned_at is None:
            self._learned_at = self._now
        if self._now - self._learned_at < MISSING_SECONDS:
            return []
        effects: list[Effect] = []
        for server in [s for s in self._members if s not in self._heard]:
            effects += self._presume_dead(server, "not heard of")
        return effects

    def _presume_dead(self, server: int, reason: str) -> list[Effect]:
        """Nobody saw it die: it counts as dead if that can be survived. Otherwise it may yet come back, and only
        somebody who saw its process end (`Died`), or its successor, makes rows count as lost."""
        if server in self.dead or self._job is None or not Groups(self._job).tolerates({*self._down(), server}):
            return []
        return self._on_dead(_identity(self._members[server]), reason)

    def _down(self) -> set[int]:
        return {*self.dead, *(m.id for m in self._members.values() if m.recovering)}

    def _on_dead(self, peer: Identity, reason: str, *, replace: bool = True) -> list[Effect]:
        """A server counts as dead. What it was still bringing back is as lost as it was before."""
        self._peers.pop(peer, None)
        if not self._is_member(peer) or peer.id in self.dead or self.lost:
            return []
        effects: list[Effect] = [Log(text=f"{peer} is dead: {reason}")]
        self.dead[peer.id] = reason
        self.ready.pop(peer.id, None)
        self._up.discard(peer.id)
        self._heard.pop(peer.id, None)
        self._closed.pop(peer.id, None)
        effects.append(Forget(peer=peer))
        if self._job is None or not self._has_rows():
            return [*effects, Replace(peer=peer, reason=reason)] if replace else effects
        if not self._job.protected:
            return effects  # nothing can replace it, and whoever uses it has seen it go
        if replace:
            effects.append(Replace(peer=peer, reason=reason))
        if self.view is None:
            return effects  # what that means is judged when everybody has told how they are
        if tables := Groups(self._job).lost_tables(self._down()):
            return effects + self._give_up(tables)
        unfinished = [member for member in self._members.values() if member.recovering]
        return effects + self._start_anew(unfinished)

    def _start_anew(self, unfinished: list[Member]) -> list[Effect]:
        """With several parities, holders must agree about every lost source again after any new loss: recoveries
        that are not finished start anew, together."""
        assert self._job is not None
        effects: list[Effect] = []
        if any(table.r > 1 for table in self._job.tables):
            for member in unfinished:
                if member.id not in self.dead:
                    effects += self._on_dead(_identity(member), "another server died while it came back")
        return effects

    def _judge(self) -> list[Effect]:
        """Everybody has told a new coordinator how they are: is something lost, must something start anew?"""
        assert self._job is not None and self._known is not None
        if tables := Groups(self._job).lost_tables(self._down()):
            return self._give_up(tables)
        coming = [member for member in self._members.values() if member.recovering]
        fresh = [m for m in coming if m.incarnation != self._known.servers[m.id].incarnation]
        return self._start_anew([member for member in coming if member not in fresh]) if fresh else []

    def _give_up(self, tables: list[tuple[str, int]]) -> list[Effect]:
        down = sorted(self._down())
        rows = sum(count for _, count in tables)
        named = ", ".join(f"{name} ({count})" for name, count in tables[:8])
        more = f" and {len(tables) - 8} more tables" if len(tables) > 8 else ""
        servers = ", ".join(f"S{server}" for server in down)
        self.lost = f"{servers} are down together: up to {rows} rows are lost, in {named}{more}"[:4000]
        return [Log(text=self.lost), *self._send_view()]

    def _on_recovered(self, source: Identity) -> list[Effect]:
        member = self._members[source.id]
        if not member.recovering or source.id in self.dead:
            return []
        self._members[source.id] = msgspec.structs.replace(member, recovering=False)
        return [Log(text=f"{source} has recovered"), *self._announce()]

    # --- Views ---

    def _announce(self) -> list[Effect]:
        """The next view, once it can be whole: everybody is there, and nobody dead lacks a successor."""
        if self._job is None or self.dead or self.lost:
            return []
        if len(self._members) < self._server_count or any(s not in self._heard for s in self._members):
            return []
        if self.view is None and self._known is not None and self._job.protected and (verdict := self._judge()):
            return verdict
        return self._send_view()

    def _send_view(self) -> list[Effect]:
        assert self._job is not None
        self._views += 1
        servers = tuple(self._members[index] for index in range(self._server_count))
        epoch = (self._term << 32) + self._views
        self.view = View(epoch=epoch, servers=servers, job=self._job, lost=self.lost)
        return [Send(target=peer, message=self.view) for peer in self._peers]


def _identity(member: Member) -> Identity:
    return Identity(role="server", id=member.id, incarnation=member.incarnation)
