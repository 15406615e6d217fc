"""Coordinators that come back elsewhere, as on several hosts: every one of them has an address of its own, and whoever
dials reaches nobody but the one that is there.

So everybody has to be told (`CoordinatorAt`): those who were there, those who are being started, and those who still
talk to a coordinator that the launcher has lost sight of and that goes on. What a process is told takes a while, and it
knows nothing but what it was assigned when it was ordered. Who is forgotten never joins the others again (I8).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from regrow.core.effects import Lost
from regrow.core.identity import Identity
from regrow.launch.backend import Exit
from regrow.launch.orders import CoordinatorAt
from regrow.launch.supervisor import CoordinatorListens, Harm, Order, ProcessEnded, Start, Tell
from regrow.sim.net import COORDINATOR, short
from regrow.sim.supervised import SupervisedLauncher

if TYPE_CHECKING:
    from regrow.sim.sabotage import Saboteur
    from regrow.sim.world import World

UNHEARD_SECONDS = (0.3, 2.5, 6.0)  # how long a coordinator goes on that the launcher has lost sight of
GONE = Exit(code=-1)


class MovingLauncher(SupervisedLauncher):
    """Tells everybody where the coordinator is."""

    def __init__(self, world: World) -> None:
        self._known = 0  # the incarnation whose address a process is assigned
        self._assigned: dict[Identity, int] = {}  # ... of those that were ordered, and do not run yet
        self._addresses: dict[int, int] = {}
        super().__init__(world)

    def start_as(self, identity: Identity) -> None:
        dials = self._assigned.pop(identity, self._known)
        super().start_as(identity)
        self.world.nodes[identity].dials = dials
        if identity.role == COORDINATOR:
            same = identity.incarnation and not self.world.calm and self.world.choices.flag(0.2)
            before = self._addresses.get(identity.incarnation - 1, identity.incarnation)
            self._addresses[identity.incarnation] = before if same else identity.incarnation
            self.world.later(lambda: self._hear_listening(identity))

    def is_reached(self, who: Identity, coordinator: Identity) -> bool:
        node = self.world.nodes.get(who)
        return node is not None and self._addresses[node.dials] == self._addresses[coordinator.incarnation]

    def lose_sight(self, who: Identity) -> None:
        """For the launcher it is dead; it is not."""
        self.supervisor.receive(Harm(role=who.role, id=who.id, now=self.world.now))
        self.supervise(ProcessEnded(who=who, exit=GONE, now=self.world.now))

    def _carry_out(self, order: Order) -> None:
        match order:
            case Tell(who=who, command=CoordinatorAt(coordinator=coordinator)):
                self.world.later(lambda: self._tell_coordinator(who, coordinator))
                return
            case Start(who=who) if who.role != "standby":
                self._assigned[who] = self._known
        super()._carry_out(order)

    def _hear_listening(self, coordinator: Identity) -> None:
        if self.supervisor.counts(coordinator) and coordinator in self.world.nodes:
            self._known = coordinator.incarnation
            self.supervise(CoordinatorListens(who=coordinator, address=f"sim:{coordinator.incarnation}"))

    def _tell_coordinator(self, who: Identity, coordinator: Identity) -> None:
        """As an endpoint does it: the one before is over, whether or not it still answers."""
        world = self.world
        if who in self._assigned:  # its first words wait for it
            self._assigned[who] = max(self._assigned[who], coordinator.incarnation)
        node = world.nodes.get(who)
        if node is None or node.dials >= coordinator.incarnation:
            return
        if node.paused:
            world.later(lambda: self._tell_coordinator(who, coordinator), at=world.now + 0.5)
            return
        world.probes.hit("coordinator elsewhere")
        node.dials = coordinator.incarnation
        for old in [old for local, old in world.network.links if local == who and old.role == COORDINATOR]:
            if old.incarnation < coordinator.incarnation:
                if old in world.nodes:
                    world.probes.hit("left for another coordinator")
                world.driver.forget(node, old)
                world.driver.hand(node, Lost(peer=old, reason="another is in its place"))
        if node.alive:
            world.network.dial(who, COORDINATOR)
            world.agenda.void()


class Moving:
    """`inject_...`: the faults, by the names that profiles use; each says whether it could happen."""

    def __init__(self, saboteur: Saboteur) -> None:
        self.world = saboteur.world

    def inject_coordinator_out_of_reach(self) -> bool:
        """The launcher has lost it and starts another; everybody else still hears it, and it them."""
        world, launcher = self.world, self.world.launcher
        node = world.node(COORDINATOR)
        if node is None or node.paused or node.crash_after is not None:
            return False
        assert isinstance(launcher, MovingLauncher)
        node.hidden = True
        world.log(f"the launcher loses sight of {short(node.identity)}")
        world.probes.hit("coordinator out of reach")
        launcher.lose_sight(node.identity)

        def end() -> None:
            if node.alive:
                launcher.end(node, "ends at last")

        world.later(end, at=world.now + UNHEARD_SECONDS[world.choices.pick(len(UNHEARD_SECONDS))])
        return True
