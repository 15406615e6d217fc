"""The launcher with the real supervisor in it: spares, successors, questions and answers, and processes that hang for
good.

What the supervisor orders is carried out here as a launcher does it: a process takes a while to start, a word takes a
while to arrive, a signal ends a process at once, stopped or not. A process answers if it runs. So who waits for whom in
`launch/supervisor.py` and `launch/watch.py` is simulated like the rest: nothing may wait for one that hangs, and nobody
may be taken for hung who could have answered.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from regrow.core.effects import Died
from regrow.core.identity import Identity
from regrow.launch.backend import Exit
from regrow.launch.orders import Ask, PeerDied
from regrow.launch.supervisor import (
    Accuse,
    Appoint,
    Event,
    GiveUp,
    Harm,
    KeepSpares,
    Kill,
    Order,
    ProcessAnswered,
    ProcessCondemned,
    ProcessEnded,
    ProcessMissed,
    ProcessReady,
    Promote,
    Stance,
    Start,
    Supervisor,
    TakeStance,
    Tell,
    Tick,
)
from regrow.launch.watch import Watch
from regrow.sim.launcher import Launcher
from regrow.sim.net import COORDINATOR, short
from regrow.sim.nodes import Node, Violation

if TYPE_CHECKING:
    from regrow.sim.world import World

SILENT_SECONDS = {"worker": 2.0, "coordinator": 2.0, "spare": 1.5, "server": 1.5}
STARTING_SECONDS = 2.0
START_SECONDS = 4.0
PATIENCE_SECONDS = 6.0
ANSWER_SECONDS_MAX = 0.8  # Whoever can answer has done so by then.
KILLED = Exit(code=-9)


@dataclasses.dataclass(slots=True)
class Spare:
    """A process without a place yet."""

    paused: bool = False
    alive: bool = True


class SupervisedLauncher(Launcher):
    """Carries out what a `Supervisor` orders."""

    patience_seconds = PATIENCE_SECONDS

    def __init__(self, world: World) -> None:
        super().__init__(world)
        self.supervisor = self.make_supervisor(None)
        self.spares: dict[Identity, Spare] = {}
        self._asked: dict[Identity, float] = {}  # questions on their way, or not answered
        self._ready: set[Identity] = set()  # servers that have said so
        self.supervisor.receive(TakeStance(stance=Stance.REPLACING))
        self.supervise(KeepSpares(count=world.job.protection.lost_together_max, now=world.now))

    def make_supervisor(self, numbers: range | None) -> Supervisor:
        watch = Watch(
            silent_seconds=SILENT_SECONDS,
            patience_seconds=PATIENCE_SECONDS,
            start_seconds=START_SECONDS,
            starting_server_seconds=STARTING_SECONDS,
        )
        return Supervisor(replaces=True, watch=watch, numbers=numbers)

    def start(self, role: str, index: int) -> None:
        """For the first time; whoever comes later is started by the supervisor."""
        if (role, index) in self.world.newest:
            raise AssertionError(f"{role} {index} is started past the supervisor")
        self.world.newest[role, index] = 0
        self.supervise(Appoint(role=role, id=index, now=self.world.now))

    def crash(self, node: Node) -> None:
        """On purpose, so it does not count as one that dies again and again."""
        who = node.identity
        if not node.alive:
            return
        if self.supervisor.counts(who):
            self.supervisor.receive(Harm(role=who.role, id=who.id, now=self.world.now))
        self.end(node, "dies")
        self._see_end(who)

    def crash_spare(self, who: Identity) -> None:
        self.spares[who].alive = False
        self.world.log(f"{short(who)} dies")
        self._see_end(who)

    def replace(self, identity: Identity, reason: str) -> None:
        self.supervise(ProcessMissed(who=identity, reason=reason, now=self.world.now))

    def condemn(self, identity: Identity, reason: str) -> None:
        self.world.probes.hit("condemned")
        self.supervise(ProcessCondemned(who=identity, reason=reason, now=self.world.now))

    def tick(self) -> None:
        """Several times a second, as the launcher's loop does. Answers that have arrived are read first, but for some
        that come later."""
        for who, at in list(self._asked.items()):
            late = not self.world.calm and self.world.now < at + ANSWER_SECONDS_MAX and self.world.choices.flag(0.2)
            if self._can_answer(who) and not late:
                del self._asked[who]
                self.supervise(ProcessAnswered(who=who, now=self.world.now))
        for server in range(self.world.job.servers):
            node = self.world.node("server", server)
            if node is not None and node.server is not None and node.identity not in self._ready:
                self._ready.add(node.identity)
                self.supervise(ProcessReady(who=node.identity))
        busy = any(self.world.node("server", server) is None for server in range(self.world.job.servers))
        self.supervise(Tick(now=self.world.now, busy=busy))

    def supervise(self, event: Event) -> None:
        for order in self.supervisor.receive(event):
            self._carry_out(order)

    # --- Orders ---

    def _carry_out(self, order: Order) -> None:
        world = self.world
        match order:
            case Start(who=who) if who.role == "standby":
                self.spares[who] = Spare()
                world.probes.hit("spare")
            case Start(who=who):
                world.newest[who.role, who.id] = who.incarnation
                self._leave_office(who)
                if who.incarnation:
                    world.later(lambda: self._start_successor(who))
                else:
                    self.start_as(who)
            case Promote(spare=spare, who=who):
                self._promote(spare, who)
            case Tell(who=who, command=Ask()):
                self._asked[who] = world.now
            case Tell(who=who, command=PeerDied(peer=peer)):
                world.later(lambda: self._tell_death(who, peer))
            case Kill(who=who, reason=reason):
                self._kill(who, reason)
            case Accuse(who=who) | GiveUp(who=who):
                raise Violation("I8", f"the launcher gives up because of {short(who)}: {order}")
            case _:
                pass  # books, and harm that is done here

    def _leave_office(self, heir: Identity) -> None:
        """Whoever had the place is a zombie, if it still runs."""
        node = self.world.node(heir.role, heir.id)
        if node is not None and node.identity != heir:
            del self.world.current[heir.role, heir.id]

    def _start_successor(self, who: Identity) -> None:
        if self.supervisor.counts(who) and self.world.newest[who.role, who.id] == who.incarnation:
            self.start_as(who)

    def _promote(self, spare: Identity, who: Identity) -> None:
        known = self.spares.pop(spare)
        if spare in self._asked:  # it answers in its new name
            self._asked[who] = self._asked.pop(spare)
        self.world.newest[who.role, who.id] = who.incarnation
        self._leave_office(who)
        self.world.probes.hit("spare promoted")
        if not known.alive:  # nobody has seen that yet
            self._see_end(who)
            return
        self.start_as(who)
        if known.paused:
            self.world.probes.hit("hung spare promoted")
            self.world.nodes[who].paused = self.world.nodes[who].hung = True

    def _kill(self, who: Identity, reason: str) -> None:
        self.world.condemned.add(who)
        self._asked.pop(who, None)
        if who in self.spares:
            del self.spares[who]
            return
        node = self.world.nodes.get(who)
        if node is None:
            return
        if node.hung:
            self.world.probes.hit(f"hung {who.role} killed")
        if node.hidden and not self.world.calm:
            return  # out of reach: a zombie
        self.end(node, f"is killed: {reason}")
        self._see_end(who)

    def _see_end(self, who: Identity) -> None:
        self._asked.pop(who, None)
        self.world.later(lambda: self.supervise(ProcessEnded(who=who, exit=KILLED, now=self.world.now)))

    def _tell_death(self, coordinator: Identity, peer: Identity) -> None:
        node = self.world.nodes.get(coordinator)
        if node is None:
            return
        if node.paused:  # it reads that when it goes on, if it does
            self.world.later(lambda: self._tell_death(coordinator, peer), at=self.world.now + 0.5)
        elif self.world.node(COORDINATOR) is node:
            self.world.driver.hand(node, Died(peer=peer))

    # --- Answers ---

    def _can_answer(self, who: Identity) -> bool:
        if who in self.spares:
            return self.spares[who].alive and not self.spares[who].paused
        node = self.world.nodes.get(who)
        return node is not None and not node.paused
