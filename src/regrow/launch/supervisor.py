"""Who is in office, and what is done when somebody is not any more: decisions, and nothing else.

Every role and number is a place, and one process holds it: its incarnation. A process that dies is succeeded by its
next incarnation; a server, and a worker, by a spare of its kind that has been waiting with everything imported, so that
it takes milliseconds instead of the time to import torch.
Whoever was succeeded is out of office for good, alive or not: nothing it says counts, and when it comes back it is a
zombie that finds itself fenced off. Everybody that the coordinator must forget is named to it (`PeerDied`), as only it
makes views; its own successor is told again what the last one may not have heard. That successor may listen elsewhere,
on another host: everybody is told where (`CoordinatorAt`), zombies too, or they would never find out what they are.

What a death means depends on the stance, which the launcher takes (it knows the phase of the run, this file does not):

    strict      it ends the run: somebody is to blame
    loading     the same; and one that counts as dead is ended, because nobody else has the rows it was loading
    replacing   it has a successor, and the run goes on
    stopping    who exits with 0 did as it was told

A process that hangs (`launch/watch.py`) is like one that died: it is ended, and has a successor; where a death would
end the run, so does this. A server that the coordinator waits for no longer (`ProcessCondemned`) is ended even if rows
are lost with it. One that cannot even be killed, because the system has it, counts as ended after a while.

A supervisor may itself be followed, when its launcher dies: its successor begins with `Inherit`, what all places said
(`launch/legacy.py`), and gives incarnations from a block of its own, so that none is ever given twice.

A place whose processes die again and again is given up: that will not be better next time. Deaths that were ordered
here (`Harm`) do not count, as they were on purpose.

Events in, orders out, in the order given: `orders = supervisor.receive(event)`. No clock, no file, no process: times
come with the events, and the launcher carries the orders out (`launch/crew.py`). An order that is a decision says why.
"""

from __future__ import annotations

import math
import signal
from collections import deque
from collections.abc import Callable, Sequence

from regrow.core.identity import Identity
from regrow.launch.backend import KILL_SECONDS_MAX, Exit, name_of
from regrow.launch.events import (
    Accuse,
    Appoint,
    CoordinatorListens,
    GiveUp,
    Harm,
    Inherit,
    KeepSpares,
    Kill,
    NoteEnd,
    NoteSuccessor,
    Pause,
    ProcessAnswered,
    ProcessBegun,
    ProcessCondemned,
    ProcessDelayed,
    ProcessEnded,
    ProcessFailed,
    ProcessFenced,
    ProcessMissed,
    ProcessReady,
    Promote,
    Release,
    Resume,
    Stance,
    Start,
    TakeStance,
    Tell,
    Tick,
)
from regrow.launch.orders import Ask, CoordinatorAt, PeerDied
from regrow.launch.watch import Watch

# One that dies by itself so often within so long will not do better next time.
RESTARTS_MAX = 5
RESTARTS_SECONDS = 60.0
# ... and one that is taken for dead so often: a machine too busy to hear everybody in time.
REPLACEMENTS_MAX = 20
SPARES_FAILED_MAX = 5  # of a kind; then fresh processes replace those of that role, which takes seconds longer
# Starting a spare takes a core for a moment, which a recovery needs more; but the next failure may come during it.
SPARE_SECONDS, SPARE_SECONDS_MAX = 1.0, 10.0
# From the beginning of training to the first spares of workers. Too small: importing torch takes a core from the first
# steps, which are slow enough. Too large: a worker that dies before has no spare.
FIRST_SPARE_WORKER_SECONDS = 10.0

COORDINATOR = ("coordinator", 0)
# Nothing depends on these: their words and their ends are no reason to end a run.
EXPENDABLE = ("standby", "understudy", "merger")
# What a spare is called while it has no place, by the role that it has everything imported for.
SPARE_ROLES = {"server": "standby", "worker": "understudy"}


Event = (
    Appoint
    | Inherit
    | TakeStance
    | KeepSpares
    | ProcessEnded
    | ProcessMissed
    | ProcessCondemned
    | ProcessAnswered
    | ProcessDelayed
    | ProcessBegun
    | CoordinatorListens
    | ProcessReady
    | ProcessFailed
    | ProcessFenced
    | Harm
    | Tick
    | Release
)


Order = Start | Promote | Tell | Kill | Pause | Resume | NoteEnd | NoteSuccessor | Accuse | GiveUp


class Supervisor:
    """One run, or one attempt of it. `replaces`: whether its servers can be replaced at all, at some time. `prefer`:
    which of these spares a server's successor shall be, where they are not all the same; None: none of them.
    `numbers`: the incarnations that it may give to successors, and the numbers of spares; None: any."""

    def __init__(
        self,
        *,
        replaces: bool,
        watch: Watch | None = None,
        prefer: Callable[[Identity, Sequence[Identity]], Identity | None] = lambda heir, spares: spares[0],
        numbers: range | None = None,
    ) -> None:
        self.stance = Stance.STRICT
        self._watch = watch or Watch()
        self._replaces = replaces
        self._prefer = prefer
        self._office: dict[tuple[str, int], Identity] = {}
        self._spares: list[Identity] = []
        self._spares_wanted = dict.fromkeys(SPARE_ROLES.values(), 0)
        self._numbers = numbers
        self._spares_started = dict.fromkeys(SPARE_ROLES.values(), 0 if numbers is None else numbers.start)
        self._followed: dict[tuple[str, int], Identity] = {}  # who was in this place before
        self._spares_failed = dict.fromkeys(SPARE_ROLES.values(), 0)
        self._spares_due: dict[str, float] = {}  # when missing spares are started; only where some may be missing
        self._zombies: list[Identity] = []  # alive for all we know, and out of office
        self._accused: list[tuple[str, int]] = []
        self._complaints: dict[Identity, str] = {}  # why it will end, in its own words
        self._hung: dict[Identity, str] = {}  # why it was ended
        self._killed_at: dict[Identity, float] = {}  # and is waited for, because its end means something
        self._harmed_at: dict[Identity, float] = {}  # by us
        self._paused_until: dict[Identity, float] = {}
        self._deaths: dict[tuple[str, int, bool], deque[float]] = {}

    def __repr__(self) -> str:
        return f"<supervisor {self.stance.value}, {len(self._office)} in office, {len(self._spares)} spares>"

    def current(self, role: str, id: int) -> Identity:
        """The newest incarnation in this place, dead or alive."""
        return self._office[role, id]

    def list_office(self) -> tuple[Identity, ...]:
        """The newest incarnation in each place."""
        return tuple(self._office.values())

    def counts(self, who: Identity) -> bool:
        """Whether this process is in office, or may be one day. Nothing that another says is of interest."""
        return self._office.get((who.role, who.id)) == who or who in self._spares

    def receive(self, event: Event) -> list[Order]:
        match event:
            case Appoint(role=role, id=id, now=now):
                return [self._appoint(Identity(role=role, id=id, incarnation=0), now)]
            case Inherit():
                self._inherit(event)
            case TakeStance(stance=stance):
                self.stance = stance
            case KeepSpares(count=count, now=now, workers=workers):
                self._want_spares("standby", count, now)
                self._want_spares("understudy", workers, now + FIRST_SPARE_WORKER_SECONDS)
            case ProcessEnded():
                return self._on_ended(event)
            case ProcessMissed():
                return self._on_missed(event)
            case ProcessCondemned():
                return self._on_condemned(event)
            case ProcessAnswered(who=who, now=now, busy_seconds=busy, longest_seconds=longest):
                self._watch.hear(who, now, busy_seconds=busy, longest_seconds=longest)
            case ProcessDelayed(who=who):
                self._watch.end(who)
            case ProcessBegun(who=who, now=now):
                if self.counts(who):
                    self._watch.begin(who, now)
            case CoordinatorListens(who=who, address=address):
                return self._on_listens(who, address)
            case ProcessReady(who=who):
                self._watch.note_ready(who)
            case ProcessFailed():
                return self._on_failed(event)
            case ProcessFenced(who=who):
                self._complaints[who] = "was taken for dead and replaced"
            case Harm():
                return self._on_harm(event)
            case Tick():
                return self._on_tick(event)
            case Release():
                return self._on_release()
        return []

    def _inherit(self, event: Inherit) -> None:
        """Everybody is asked at once whether he is there; who is not will be missed like anybody."""
        self._office = {(who.role, who.id): who for who in event.office}
        self._spares = list(event.spares)
        for who in (*event.office, *event.spares):
            self._watch.begin(who, event.now)

    # -- deaths ------------------------------------------------------------------------------------------------

    @property
    def _survives(self) -> bool:
        """Whether a death now is not the end of the run."""
        return self.stance is Stance.REPLACING and not self._accused

    def _on_ended(self, event: ProcessEnded) -> list[Order]:
        who = event.who
        self._watch.end(who)
        self._paused_until.pop(who, None)
        self._killed_at.pop(who, None)
        if who in self._zombies:
            self._zombies.remove(who)
        if not self.counts(who):
            return []
        if who in self._spares:
            self._lose_spare(who, event.now)
            return []
        if who.role == "merger":  # training does not depend on it
            if self.stance is Stance.STOPPING or self._refusal(who, event.now) is not None:
                return []
            return [self._appoint(self._name_successor(who), event.now)]
        return [NoteEnd(who=who), *self._judge(event)]

    def _judge(self, event: ProcessEnded) -> list[Order]:
        """What the end of one that was needed means."""
        who, exit = event.who, event.exit
        if self.stance is Stance.STOPPING:
            return [] if exit.code == 0 else self._accuse(Accuse(who=who, exit=exit))
        if not self._survives:
            if self._replaces and self._accused:
                return []  # the run ends for another reason; this one would have been survived
            return self._accuse(Accuse(who=who, exit=exit, refusal=self._hung.get(who)))
        refusal = self._refusal(who, event.now)
        if refusal is not None:
            return self._accuse(Accuse(who=who, exit=exit, refusal=refusal))
        reason = self._hung.get(who) or self._complaints.get(who, str(exit))
        return self._install_successor(who, reason, event.now)

    def _on_missed(self, event: ProcessMissed) -> list[Order]:
        who = event.who
        if self._office.get((who.role, who.id)) != who:
            return []  # it has a successor already
        if self.stance is Stance.LOADING:
            return [Kill(who=who, reason=event.reason)]  # nobody else has its rows: all begin again
        if not self._survives:
            return []
        refusal = self._refusal(who, event.now, counts_as_dead=True)
        if refusal is not None:
            return [GiveUp(who=who, reason=f"{refusal}; the last time: {event.reason}")]
        end = self._leave(who, event.reason)
        heir = self._install_successor(who, event.reason, event.now, counts_as_dead=True)
        return [*end, NoteEnd(who=who), *heir]

    def _on_condemned(self, event: ProcessCondemned) -> list[Order]:
        """Its end is a fact once it is seen, and is told like any other."""
        if self._office.get((event.who.role, event.who.id)) != event.who or event.who in self._killed_at:
            return []
        return [self._kill_hung(event.who, f"{name_of(event.who)} is {event.reason}", event.now)]

    def _on_hung(self, who: Identity, reason: str, now: float) -> list[Order]:
        if self.stance is Stance.STOPPING or who in self._killed_at or not self.counts(who):
            return []  # whoever stops is waited for elsewhere, and a spare may just have been given a place
        if who in self._spares:
            self._lose_spare(who, now)
            return self._leave(who, reason)
        if self._survives and who.role != "merger":
            return self._on_missed(ProcessMissed(who=who, reason=reason, now=now))
        return [self._kill_hung(who, f"{name_of(who)} {reason}", now)]

    def _kill_hung(self, who: Identity, reason: str, now: float) -> Kill:
        self._hung[who] = reason
        self._killed_at[who] = now
        return Kill(who=who, reason=reason)

    def _leave(self, who: Identity, reason: str) -> list[Order]:
        """It is out of office. One that was paused on purpose comes back as a zombie, to show that it is fenced off;
        but a coordinator must go, or those that are connected to it would not look for the next one, and so must a
        spare, which would not find out."""
        self._watch.end(who)
        self._zombies.append(who)
        spared = self._paused_until.get(who, math.inf) < math.inf and who.role in ("server", "worker")
        return [] if spared else [Kill(who=who, reason=reason)]

    def _lose_spare(self, who: Identity, now: float) -> None:
        self._spares.remove(who)
        self._spares_failed[who.role] += who not in self._harmed_at
        self._spares_due[who.role] = now + SPARE_SECONDS

    def _on_failed(self, event: ProcessFailed) -> list[Order]:
        if event.words.kind == "lost" and self._survives:
            self._complaints[event.who] = event.words.message  # it will exit, and have a successor
            return []
        if event.who.role in EXPENDABLE:
            return []
        return self._accuse(Accuse(who=event.who, words=event.words))

    def _accuse(self, accusation: Accuse) -> list[Order]:
        """One for each place: that it exits after its last words is no news."""
        place = (accusation.who.role, accusation.who.id)
        if place in self._accused:
            return []
        self._accused.append(place)
        return [accusation]

    def _refusal(self, who: Identity, now: float, *, counts_as_dead: bool = False) -> str | None:
        """Why `who` has no successor any more, or None."""
        deaths = self._deaths.setdefault((who.role, who.id, counts_as_dead), deque())
        while deaths and deaths[0] <= now - RESTARTS_SECONDS:
            deaths.popleft()
        if who not in self._harmed_at:
            deaths.append(now)
        if self._numbers is not None and self._number(who) not in self._numbers:
            return f"{name_of(who)} has had {len(self._numbers)} successors"
        if len(deaths) <= (REPLACEMENTS_MAX if counts_as_dead else RESTARTS_MAX):
            return None
        what = "counted as dead" if counts_as_dead else "died"
        return f"{name_of(who)} {what} {len(deaths)} times within {RESTARTS_SECONDS:.0f} s"

    # -- successors --------------------------------------------------------------------------------------------

    def _appoint(self, who: Identity, now: float) -> Start:
        self._office[who.role, who.id] = who
        self._watch.begin(who, now)
        return Start(who=who)

    def _install_successor(
        self, who: Identity, reason: str, now: float, *, counts_as_dead: bool = False
    ) -> list[Order]:
        heir = self._name_successor(who)
        self._followed[who.role, who.id] = who
        note = NoteSuccessor(
            who=who,
            heir=heir,
            reason=reason,
            died_at=self._harmed_at.get(who, now),
            counts_as_dead=counts_as_dead,
        )
        for role in SPARE_ROLES.values():
            self._spares_due[role] = max(self._spares_due.get(role, 0.0), now + SPARE_SECONDS)
        if who.role == "coordinator":
            # The last words to the old one may not have been heard.
            servers = [server for (role, _), server in self._office.items() if role == "server" and server.incarnation]
            start = self._appoint(heir, now)
            return [note, start, *(self._tell_death(self._find_before(server)) for server in servers)]
        death = self._tell_death(who)
        spare = self._choose_spare(heir, now)
        if spare is not None:
            self._spares.remove(spare)
            self._office[heir.role, heir.id] = heir
            self._watch.promote(spare, heir)
            for known in (self._harmed_at, self._paused_until):
                if spare in known:
                    known[heir] = known.pop(spare)
            return [note, death, Promote(spare=spare, who=heir)]
        return [note, death, self._appoint(heir, now)]

    def _name_successor(self, who: Identity) -> Identity:
        return Identity(role=who.role, id=who.id, incarnation=self._number(who))

    def _number(self, who: Identity) -> int:
        """Of its successor. Launchers before this one gave smaller ones, also such as nobody remembers."""
        return max(next_incarnation(who).incarnation, 0 if self._numbers is None else self._numbers.start)

    def _find_before(self, who: Identity) -> Identity:
        """Where that is not remembered, the number before; nobody is harmed if there was none of that number."""
        return self._followed.get((who.role, who.id)) or previous_incarnation(who)

    def _on_listens(self, who: Identity, address: str) -> list[Order]:
        """Whoever was started before this knows where the last one was."""
        if self._office.get(COORDINATOR) != who:
            return []
        others = [other for other in (*self._office.values(), *self._spares, *self._zombies) if other.role != who.role]
        return [Tell(who=other, command=CoordinatorAt(coordinator=who, address=address)) for other in others]

    def _choose_spare(self, heir: Identity, now: float) -> Identity | None:
        """One of that role's that seems to be alive."""
        spares = [spare for spare in self._spares if spare.role == SPARE_ROLES.get(heir.role)]
        alive = [spare for spare in spares if not self._watch.is_doubtful(spare, now)]
        return self._prefer(heir, alive) if alive else None

    def _want_spares(self, role: str, count: int, due: float) -> None:
        if count > self._spares_wanted[role]:
            self._spares_wanted[role], self._spares_due[role] = count, due

    def _tell_death(self, who: Identity) -> Tell:
        return Tell(who=self._office[COORDINATOR], command=PeerDied(peer=who))

    def _on_tick(self, event: Tick) -> list[Order]:
        over = [who for who, until in self._paused_until.items() if event.now >= until]
        for who in over:
            del self._paused_until[who], self._harmed_at[who]  # no harm was done
        return [*(Resume(who=who) for who in over), *self._look_for_hung(event.now), *self._start_spares(event)]

    def _look_for_hung(self, now: float) -> list[Order]:
        asked, hung = self._watch.look(now)
        orders: list[Order] = [Tell(who=who, command=Ask()) for who in asked]
        for who, reason in hung:
            orders += self._on_hung(who, reason, now)
        for who in [who for who, at in self._killed_at.items() if now - at >= KILL_SECONDS_MAX]:
            orders += self._on_ended(ProcessEnded(who=who, exit=Exit(code=-signal.SIGKILL), now=now))
        return orders

    def _start_spares(self, event: Tick) -> list[Order]:
        """When nothing else is urgent."""
        orders: list[Order] = []
        for role, due in list(self._spares_due.items()):
            # The first come while the run loads: training has all cores from its first step on.
            is_first = not self._spares_started[role] and self.stance is not Stance.STOPPING and not self._accused
            if not (self._survives or is_first) or event.now < due:
                continue
            if event.busy and event.now < due + SPARE_SECONDS_MAX:
                continue
            del self._spares_due[role]
            missing = self._spares_wanted[role] - sum(spare.role == role for spare in self._spares)
            for _ in range(missing if self._spares_failed[role] < SPARES_FAILED_MAX else 0):
                spare = Identity(role=role, id=self._spares_started[role], incarnation=0)
                self._spares_started[role] += 1
                self._spares.append(spare)
                self._watch.begin(spare, event.now)
                orders.append(Start(who=spare))
        return orders

    # -- on purpose --------------------------------------------------------------------------------------------

    def _on_harm(self, event: Harm) -> list[Order]:
        if event.role == "standby":
            if not self._spares:
                return []
            who = self._spares[event.id % len(self._spares)]
        else:
            who = self._office[event.role, event.id]
        self._harmed_at[who] = event.now
        if event.pause_seconds is None:
            return [Kill(who=who, reason="on purpose")]
        self._paused_until[who] = event.now + event.pause_seconds
        return [Pause(who=who)]

    def _on_release(self) -> list[Order]:
        zombies = [Kill(who=who, reason="another is in its place") for who in self._zombies]
        paused = [Resume(who=who) for who in self._paused_until if who not in self._zombies]
        self._paused_until.clear()
        return [*zombies, *paused]


def next_incarnation(who: Identity) -> Identity:
    return Identity(role=who.role, id=who.id, incarnation=who.incarnation + 1)


def previous_incarnation(who: Identity) -> Identity:
    return Identity(role=who.role, id=who.id, incarnation=who.incarnation - 1)
