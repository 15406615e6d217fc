"""The coordinator: knows who serves what, notices who is gone, and tells everybody. It is never on the data path.

It waits until every server of the job has registered and the job has been declared, then makes the first view.
A server that dies is replaced by its next incarnation, if the job's protection says so; the view that names it is made
when every dead server has its replacement. Beyond what the protection can survive, the last view says what is lost.

Each place in the view has a life of its own (`states.MEMBER`). A new coordinator finds the places by asking: servers
remember the newest view, and each knows best how it is itself.

The rules to keep: epochs only rise, also across coordinators (a coordinator's own incarnation is their upper half); a
view is sent whole; mere silence never makes rows count as lost, because the silent may still speak. It is waited for as
long as the user says; then its process is ended (`Condemn`), and that is a fact.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from regrow.core.checks import NUMBER_MAX, find_view_flaw
from regrow.core.cut import PUBLICATION_TENANT, TENANT
from regrow.core.cuts import CutNow, CutPlan, ManifestWritten, WriteManifest
from regrow.core.effects import Condemn, Delivered, Died, Forget, Joined, Log, Lost, Notice, Refuse, Replace, Send, Tick
from regrow.core.identity import Identity
from regrow.core.job import JobSpec
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
    StateAsk,
    View,
)
from regrow.core.partings import UNANSWERED_SECONDS_MAX, Partings
from regrow.core.place import Place
from regrow.core.states import MemberState
from regrow.core.steady import SteadyTime
from regrow.core.turns import Turns
from regrow.errors import Refusal

Event = Joined | Delivered | Lost | Tick | Died | ManifestWritten | CutNow
Effect = Send | Refuse | Log | Replace | Condemn | Forget | WriteManifest | Notice

# A closed connection that does not come back counts as a death. Too short: a reset is taken for one.
LOST_SECONDS = 0.3
# Too short: a server that computes, or a busy machine, is taken for a dead one. Too long: everybody waits.
SILENT_SECONDS = 1.5
# For a new coordinator: how long to wait for servers that others know of.
MISSING_SECONDS = 3.0
# A replacement that lives but does not get further on its way back, or is not heard of while it starts, is replaced
# itself. Too short: a slow sweep, which
# has a limit of its own, counts as stuck. Too long: its stripes are without protection for that long.
BROUGHT_SECONDS_MAX = 300.0
# How long a server is waited for that is silent and whose loss would be one of rows. Too short: a machine that swaps
# costs a checkpoint's worth of training. Too long: everybody waits for one that never comes back.
PATIENCE_SECONDS = 60.0
# How long a judgement is put off for a replacement that is heard, or starts, and does not answer: it may have recovered
# without our knowing. Too short: its word comes too late, and rows count as lost that are there. Too long: a loss is
# told late. One that is silent as well is waited for as long as the user says.
ASKED_SECONDS_MAX = 5.0
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
        publication_plan: CutPlan | None = None,
        cut_salt: str = "",
        silent_seconds: float = SILENT_SECONDS,
        patience_seconds: float = PATIENCE_SECONDS,
        unanswered_seconds: float = UNANSWERED_SECONDS_MAX,
    ) -> None:
        self.view: View | None = None
        self.lost = ""  # what cannot come back
        self.places = [Place() for _ in range(servers)]
        self.turns: Turns | None = None  # if cuts are made, and the job is known
        plans = {TENANT: cut_plan, PUBLICATION_TENANT: publication_plan}
        self._cut_plans = {tenant: plan for tenant, plan in plans.items() if plan is not None}
        self._cut_now: dict[int, CutNow] = {}  # asked for before there was a view, by tenant
        self._cut_salt = cut_salt
        self._job = job
        self._term = term
        self._views = 0
        self._known: KnownView | None = None  # what servers tell a new coordinator
        self._peers: dict[Identity, None] = {}  # in order of arrival
        self._time = SteadyTime()
        self._now = 0.0
        self._is_slow = False  # its last step was long already
        self._learned_at: float | None = None
        self._question = 0  # the last one that replacements were asked, and
        self._asked_at: float | None = None  # when, if what is lost cannot be said before they answer
        self._silent_seconds = silent_seconds
        self._patience_seconds = patience_seconds
        self._partings = Partings(seconds_max=unanswered_seconds)

    @property
    def dead(self) -> dict[int, str]:
        """Servers that wait for their replacement, and why."""
        return {server: place.reason for server, place in enumerate(self.places) if place.is_dead}

    def receive(self, event: Event) -> list[Effect]:
        if isinstance(event, Tick):
            now = self._time.read(event.now)
            event = event if now == event.now else Tick(now=now)
        effects = self._receive(event)
        if not self._cut_plans or self.view is None:
            return effects
        if self.turns is None:
            job = self.view.job
            self.turns = Turns(
                self._cut_plans,
                is_sync=job.mode == "sync",
                marks=job.marks,
                term=self._term,
                salt=self._cut_salt,
                goes_back=job.protection.saves_own,
            )
            for wanted in self._cut_now.values():
                self.turns.want(wanted)
        whole = not self.lost and not any(place.is_down for place in self.places)
        peers = {member.id: member.identity for member in self.view.servers} if whole else None
        effects += self.turns.know(peers)
        if isinstance(event, Tick):
            effects += self.turns.tick(event.now)
        return effects

    def _receive(self, event: Event) -> list[Effect]:
        if isinstance(event, Delivered):
            return self._on_message(event.source, event.message)
        if isinstance(event, Tick):
            return self._on_tick(event.now)
        if isinstance(event, Died):
            return self._declare_dead(event.peer, "its process ended")
        if isinstance(event, Joined):
            return self._on_joined(event.peer)
        if isinstance(event, Lost):
            self._peers.pop(event.peer, None)
            place = self._find(event.peer)
            if place is not None and place.closed is None and not place.is_dead:
                place.lose(self._now)
            return [Log(text=f"{event.peer} is gone: {event.reason}")]
        if self.turns is None:
            if isinstance(event, CutNow):
                self._cut_now[event.tenant] = event
            return []
        turns = self.turns
        return [*(turns.on_manifest_written(event) if isinstance(event, ManifestWritten) else turns.want(event))]

    def _on_message(self, source: Identity, message: Message) -> list[Effect]:
        if isinstance(message, Register) and source.role == "server":
            return self._on_register(source, message)
        if isinstance(message, Declare) and source.role == "worker":
            return self._on_declare(source, message)
        place = self._find(source)
        if place is None:
            if self._is_over(source):
                return [self._refuse_replaced(source)]
            return [Refuse(target=source, reason=f"{type(message).__name__} from a {source.role}")]
        if place.is_dead:
            return []  # its word comes too late
        place.hear(self._now)
        if isinstance(message, Beat):
            if self.turns is not None:
                self.turns.on_step(message.step)
            place.note_progress(message.brought, self._now)
            place.unanswered = message.unanswered
            if message.answers <= place.answered:
                return []
            place.answered = message.answers
            return self._reconsider()
        if isinstance(message, CutMarks | CutBegun | CutSaved):
            try:
                return [] if self.turns is None else [*self.turns.on_message(source.id, message)]
            except ValueError as error:
                return [Refuse(target=source, reason=f"{type(message).__name__}: {error}")]
        if isinstance(message, Ready):
            return self._on_ready(place, source, message)
        if isinstance(message, Recovered):
            return self._on_recovered(place, source)
        return [Refuse(target=source, reason=f"{type(message).__name__} from a {source.role}")]

    def _on_joined(self, peer: Identity) -> list[Effect]:
        self._peers[peer] = None
        if (place := self._find(peer)) is not None:
            place.closed = None
        return [Send(target=peer, message=self.view)] if self.view is not None else []

    def _find(self, peer: Identity) -> Place | None:
        """The place of this very incarnation."""
        if peer.role != "server" or peer.id >= len(self.places):
            return None
        place = self.places[peer.id]
        return place if place.is_filled_by(peer) else None

    def _is_over(self, peer: Identity) -> bool:
        """Whether a newer incarnation is in its place, or it counts as dead itself."""
        if peer.role != "server" or peer.id >= len(self.places):
            return False
        place = self.places[peer.id]
        if place.member is None:
            return False
        return place.member.incarnation > peer.incarnation or (place.is_filled_by(peer) and place.is_dead)

    def _refuse_replaced(self, source: Identity) -> Refuse:
        place = self.places[source.id]
        reason = f"{source} was replaced by a newer incarnation"
        if place.is_filled_by(source):  # it was declared dead and has no successor yet, but its word comes too late
            reason = f"{source} is being replaced: {place.reason}"
        return Refuse(target=source, reason=reason, kind=Refusal.REPLACED)

    # --- Coming ---

    def _on_register(self, source: Identity, message: Register) -> list[Effect]:
        if source.id >= len(self.places):
            return [Refuse(target=source, reason=f"server {source.id} of a cluster of {len(self.places)}")]
        if message.known is not None and (flaw := self._find_flaw(source, message.known)):
            return [Refuse(target=source, reason=f"{source} knows a view that {flaw}")]
        effects: list[Effect] = [Log(text=f"{source} listens at {message.address}")]
        if message.known is not None:
            effects += self._learn(message.known)
        if self._is_over(source):
            return [*effects, self._refuse_replaced(source)]
        place = self.places[source.id]
        if not place.is_filled_by(source):
            recovering = self._job is not None and self._has_rows()
            member = Member(
                id=source.id,
                incarnation=source.incarnation,
                address=message.address,
                recovering=recovering,
                recalled=recovering and place.member is not None and place.member.recalled,
            )
            effects += self._take_place(place, member, "registered")
            if message.known is not None:
                # It began in a view that none of the others had entered when they came here. What it has, and whom it
                # expects to bring the rest, need not fit the next view; nor does it say twice that it is ready.
                return [*effects, *self._declare_dead(source, "it began in a view of a coordinator that is over")]
            return [*effects, *self._announce()]
        assert place.member is not None
        member = place.member
        if self.view is None and message.known is not None:
            member = message.known.servers[source.id]  # nobody knows better than it whether it has recovered
        if message.known is not None:
            place.fill(member, _back(member), self._now)
        elif place.life.state is MemberState.AWAITED:
            place.fill(member, "registered", self._now)
        place.hear(self._now)
        return effects + self._announce() if self.view is None else effects

    def _find_flaw(self, source: Identity, known: KnownView) -> str | None:
        """Why nothing can be learned from what this server remembers, or None."""
        if not 0 <= known.epoch <= NUMBER_MAX:
            return f"has epoch {known.epoch}"
        if known.job.servers != len(self.places):
            return "is of another cluster"
        if reason := find_view_flaw(known.servers, known.job):
            return reason
        return None if known.servers[source.id].identity == source else "names another in its place"

    def _take_place(self, place: Place, member: Member, cause: str) -> list[Effect]:
        """A server is there for the first time, or in the place of one that is over."""
        effects: list[Effect] = []
        if place.member is not None and not place.is_dead:
            effects += self._declare_dead(place.member.identity, "its successor is here", replace=False)
        if place.member is not None and not place.is_dead:
            place.die("its successor is here")  # after a loss nobody is declared dead any more
        place.fill(member, cause, self._now)
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
        effects: list[Effect] = []
        for place, named in zip(self.places, known.servers, strict=True):
            present = place.member
            if present is None or named.incarnation > present.incarnation:
                # Whoever registered here before, also if it counts as dead by now, was replaced already.
                place.fill(named, "named by a view", None)
            elif present.incarnation > named.incarnation:
                if not present.recovering:  # it had registered before anybody told us whom it replaces
                    effects += [Log(text=f"{named.identity} is dead: its successor is here")]
                    effects += [Forget(peer=named.identity)]
                place.member = msgspec.structs.replace(present, recovering=True, recalled=named.recalled)
            elif not place.means_silence:
                place.member = named  # it has no word of its own to give
        return effects

    def _on_declare(self, source: Identity, message: Declare) -> list[Effect]:
        job = message.job
        if reason := job.invalid_reason():
            return [Refuse(target=source, reason=reason)]
        if job.servers != len(self.places):
            reason = f"the job is for {job.servers} servers, this cluster has {len(self.places)}"
            return [Refuse(target=source, reason=reason)]
        if self._job is None:
            self._job = job
            return [Log(text=f"{source} declares {len(job.tables)} tables"), *self._announce()]
        if job != self._job:
            return [Refuse(target=source, reason="another job with other tables runs on this cluster")]
        return []

    def _on_ready(self, place: Place, source: Identity, ready: Ready) -> list[Effect]:
        assert place.member is not None
        place.ready = ready
        if place.life.state is MemberState.STARTING:
            place.life.move("ready to return" if place.member.recovering else "ready")
        return [Log(text=f"{source} is ready: {ready.rows} rows, {ready.memory_bytes} bytes")]

    def _on_recovered(self, place: Place, source: Identity) -> list[Effect]:
        assert place.member is not None
        if not place.member.recovering:
            return []
        if place.life.state is not MemberState.RETURNING:
            return [Refuse(target=source, reason="Recovered of a server that was not ready")]
        place.member = msgspec.structs.replace(place.member, recovering=False, recalled=False)
        place.life.move("recovered")
        effects: list[Effect] = [Log(text=f"{source} has recovered")]
        return effects + (self._announce() if self._asked_at is None else self._reconsider())

    # --- Going ---

    def _on_tick(self, now: float) -> list[Effect]:
        before, self._now = self._now, now
        pause = now - before
        for place in self.places:
            place.catch_up(before, now)
        was_slow, self._is_slow = self._is_slow, pause > OWN_PAUSE_SECONDS
        if self._is_slow:
            # One long step says that we were stopped, and others were not. If all steps are long, we are merely slow:
            # then a part of each counts, or a silence would never be noticed.
            forgiven = pause - OWN_PAUSE_SECONDS if was_slow else pause
            for place in self.places:
                place.skip(forgiven, now)
            if self._asked_at is not None:
                self._asked_at += forgiven
            if not was_slow:
                self._learned_at = None
                return []
        if self.view is None and self._known is not None and self._learned_at is None:
            self._learned_at = now
        suspects = self._find_suspects()
        if self._partings.hopeless and not self.lost and self.view is not None:
            return self._give_up(self._partings.hopeless)
        effects: list[Effect] = []
        for server, place in enumerate(self.places):
            doubt = self._find_doubt(place) or suspects.get(server)
            if doubt is not None:
                effects += self._presume_dead(place, doubt)
            elif place.doubted is not None:
                effects += self._trust_again(place)
        return effects + self._reconsider()

    def _find_suspects(self) -> dict[int, str]:
        """Servers that others have had no answer of for too long, and why it is these that are replaced."""
        if self._job is None or not any([place.unanswered for place in self.places]):
            return {}
        job, down = self._job, self._find_down()
        return self._partings.find_suspects(
            self.places, self._now, lambda server: job.verdict({*down, server}).survivable
        )

    def _find_doubt(self, place: Place) -> str | None:
        """Why this server seems to be dead, if it does."""
        now, state = self._now, place.life.state
        if state is MemberState.DEAD:
            return None
        if place.closed is not None and now - place.closed >= LOST_SECONDS:
            return "its connection closed"
        if place.heard is not None and now - place.heard >= self._silent_seconds and place.means_silence:
            return f"silent for {now - place.heard:.1f} s"
        if state is MemberState.STARTING and place.heard is not None and now - place.heard >= BROUGHT_SECONDS_MAX:
            return "it registered, and did not say that it is ready"  # the launcher, which asks it, may still hear it
        if place.brought_at is not None and now - place.brought_at >= BROUGHT_SECONDS_MAX:
            return f"nothing was brought back to it for {now - place.brought_at:.0f} s"
        if self._learned_at is not None and self.view is None and state is MemberState.AWAITED:
            # A new coordinator waits for the servers that others know of, but not for ever.
            return "not heard of" if now - self._learned_at >= MISSING_SECONDS else None
        return None

    def _presume_dead(self, place: Place, reason: str) -> list[Effect]:
        """Nobody saw it die: it counts as dead if that can be survived. Otherwise it may yet come back, and only
        somebody who saw its process end (`Died`), or its successor, makes rows count as lost; who has waited long
        enough for it sees to that."""
        if place.member is None or self._job is None or self.lost or place.condemned:
            return []
        peer = place.member.identity
        if self._job.verdict({*self._find_down(), peer.id}).survivable:
            return self._declare_dead(peer, reason)
        if place.doubted is None:
            place.doubted = self._now
            waiting = {"server": peer.id, "reason": reason, "seconds": self._patience_seconds}
            return [Log(text=f"{peer} is waited for: {reason}"), Notice(name="waiting", values=waiting)]
        if self._now - place.doubted < self._patience_seconds:
            return []
        place.condemned = True
        waited = f"{reason}, and waited for in vain for {self._patience_seconds:.0f} s"
        return [Log(text=f"{peer} is given up: {waited}"), Condemn(peer=peer, reason=waited)]

    def _trust_again(self, place: Place) -> list[Effect]:
        assert place.member is not None
        place.doubted = None
        peer = place.member.identity
        return [Log(text=f"{peer} is back"), Notice(name="waited", values={"server": peer.id})]

    def _find_down(self) -> set[int]:
        return {server for server, place in enumerate(self.places) if place.is_down}

    def _declare_dead(self, peer: Identity, reason: str, *, replace: bool = True) -> list[Effect]:
        """A server counts as dead. What it was still bringing back is as lost as it was before."""
        self._peers.pop(peer, None)
        place = self._find(peer)
        if place is None or place.is_dead or self.lost:
            return []
        if self._job is None or not self._has_rows():
            return self._end(place, reason, replace=replace)
        if not self._job.protection.replaces_servers:
            return self._end(place, reason, replace=False)  # nothing can, and whoever uses it has seen it go
        effects = self._end(place, reason, replace=replace)
        self._asked_at = None  # whoever was asked before this death is asked again
        if self.view is None:
            return effects  # what that means is judged when everybody has told how they are
        return effects + self._weigh()

    def _end(self, place: Place, reason: str, *, replace: bool) -> list[Effect]:
        assert place.member is not None
        peer = place.member.identity
        self._peers.pop(peer, None)
        place.die(reason)
        effects: list[Effect] = [Log(text=f"{peer} is dead: {reason}"), Forget(peer=peer)]
        return [*effects, Replace(peer=peer, reason=reason)] if replace else effects

    def _weigh(self) -> list[Effect]:
        """Is something lost with those that are down, must something begin anew?"""
        assert self.view is not None
        return self._decide(self.view.servers, [place for place in self.places if place.is_down and not place.is_dead])

    def _decide(self, named: Sequence[Member], unfinished: list[Place]) -> list[Effect]:
        """What is lost, and what begins anew, is settled when whoever may be back has said how it is. Where recoveries
        depend on each other, those that are not finished begin anew, together."""
        assert self._job is not None
        verdict = self._job.verdict(self._find_down())
        anew = unfinished if self._job.protection.begins_together else []
        effects: list[Effect] = []
        if anew or not verdict.survivable:
            effects += self._hear_out("another server died" if verdict.survivable else verdict.reason, named)
            if self._is_answer_owed(named):
                return effects
            if not verdict.survivable:
                return effects + self._give_up(verdict.reason)
        self._asked_at = None
        for place in anew:
            effects += self._end(place, "another server died while it came back", replace=True)
        return effects

    def _hear_out(self, reason: str, named: Sequence[Member]) -> list[Effect]:
        """Before rows count as lost, or recoveries begin anew, every replacement that counts as down is asked how it
        is. A death is told by somebody else than it, and may overtake its `Recovered`; its answer does not, because
        links keep their order."""
        effects: list[Effect] = []
        awaited = [place for place, member in zip(self.places, named, strict=True) if self._may_be_back(place, member)]
        if self._asked_at is None and awaited:
            self._question += 1
            self._asked_at = self._now
            ask = StateAsk(number=self._question)
            effects += [Send(target=place.member.identity, message=ask) for place in awaited if place.member]
            effects.append(Log(text=f"whoever comes back is asked how it is: {reason}"))
        return effects

    def _is_answer_owed(self, named: Sequence[Member]) -> bool:
        pairs = zip(self.places, named, strict=True)
        return any(self._owes_answer(place) for place, member in pairs if self._may_be_back(place, member))

    def _may_be_back(self, place: Place, named: Member) -> bool:
        """Whether it counts as down but lives, and was told in a view to come back: it may have done so."""
        on_its_way = place.life.state in (MemberState.STARTING, MemberState.RETURNING)
        return on_its_way and place.is_down and place.is_filled_by(named.identity)

    def _owes_answer(self, place: Place) -> bool:
        """Who is silent is waited for, or not, as anybody else is. One that is heard, but hears nothing, is not."""
        assert self._asked_at is not None
        heard = self._now if place.life.state is MemberState.STARTING else place.heard
        is_overdue = heard is not None and heard >= self._asked_at + ASKED_SECONDS_MAX
        return place.answered < self._question and not is_overdue

    def _reconsider(self) -> list[Effect]:
        """What was put off until replacements have answered, if they have, or it was for long enough."""
        if self._asked_at is None or self.lost:
            return []
        if self.view is None:
            return self._announce()
        effects = self._weigh()
        return effects + self._announce() if self._asked_at is None else effects

    def _judge(self) -> list[Effect]:
        """Everybody has told a new coordinator how they are: is something lost, must something begin anew?"""
        assert self._known is not None
        fresh: list[Place] = []
        others: list[Place] = []
        for place, named in zip(self.places, self._known.servers, strict=True):
            if place.is_down and place.member is not None:
                (fresh if place.member.incarnation != named.incarnation else others).append(place)
        return self._decide(self._known.servers, others if fresh else [])

    def _give_up(self, reason: str) -> list[Effect]:
        self.lost = reason
        return [Log(text=reason), *self._send_view()]

    # --- Views ---

    def _announce(self) -> list[Effect]:
        """The next view, once it can be whole: everybody is there, and nobody dead lacks a successor."""
        if self._job is None or self.lost or any(place.is_dead or place.heard is None for place in self.places):
            return []
        if self.view is not None or self._known is None or not self._job.protection.replaces_servers:
            return self._send_view() if self._asked_at is None else []
        effects = self._judge()
        return effects if effects or self._asked_at is not None else self._send_view()

    def _recall(self) -> None:
        """Decides who goes back to its saves. Whoever was to and is not back stays so, also as a successor, for its
        parities are being made anew. All unfinished recoveries began together, so nobody changes its way."""
        assert self._job is not None
        down = [(server, place.member) for server, place in enumerate(self.places) if place.is_down and place.member]
        begun = [server for server, member in down if member.recalled]
        recalled = self._job.protection.find_recalled(
            [server for server, _ in down], begun=begun, servers=len(self.places)
        )
        for server, member in down:
            if member.recovering and server in recalled:
                self.places[server].member = msgspec.structs.replace(member, recalled=True)

    def _send_view(self) -> list[Effect]:
        assert self._job is not None
        self._views += 1
        self._recall()
        servers = tuple(place.member for place in self.places if place.member is not None)
        assert len(servers) == len(self.places)
        epoch = (self._term << 32) + self._views
        self.view = View(epoch=epoch, servers=servers, job=self._job, lost=self.lost)
        return [Send(target=peer, message=self.view) for peer in self._peers]


def _back(member: Member) -> str:
    """How somebody is who remembers a view."""
    return "back without its rows" if member.recovering else "back with its rows"
