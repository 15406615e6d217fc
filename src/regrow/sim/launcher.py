"""What the launcher does: it starts processes, sees them end, and starts their successors. It never fails itself."""

from __future__ import annotations

from typing import TYPE_CHECKING

from regrow.core.coordinator import PATIENCE_SECONDS
from regrow.core.effects import Died
from regrow.core.identity import Identity
from regrow.core.partings import UNANSWERED_SECONDS_MAX
from regrow.sim import machines
from regrow.sim.net import COORDINATOR, short
from regrow.sim.nodes import Fallen, Node
from regrow.sim.workers import Program

if TYPE_CHECKING:
    from regrow.sim.world import World


# Where servers are cut off from each other for good, that is noticed soon, and nobody is waited for long.
PARTED_SECONDS, PARTED_PATIENCE_SECONDS = 3.0, 3.0


class Launcher:
    patience_seconds = PATIENCE_SECONDS  # of its coordinators

    def __init__(self, world: World) -> None:
        self.world = world

    def start(self, role: str, index: int) -> None:
        """The launcher starts the next incarnation."""
        incarnation = self.world.newest.get((role, index), -1) + 1
        self.world.newest[role, index] = incarnation
        self.start_as(Identity(role=role, id=index, incarnation=incarnation))

    def is_reached(self, who: Identity, coordinator: Identity) -> bool:
        """Whether one that dials the coordinator finds this one. Here all of them have the same address."""
        return True

    def tick(self) -> None:
        """Time has passed. This launcher sees deaths by themselves."""

    def start_as(self, identity: Identity) -> None:
        """A process, in the place that it has from now on."""
        role, index = identity.role, identity.id
        cuts = self.world.scenario.cuts
        if role == "worker":
            first = self.world.start.marks[0] if self.world.start is not None else 0
            program = Program(index, self.world.scenario, self.world.reference, start=first, loading=self.world.loading)
            node = Node(identity, program.session, program)
        elif role == "server":
            captures = cuts is not None or self.world.scenario.saves is not None
            on_capture = self.world.note_capture if captures else None
            begins_with = self.world.start.cut if self.world.start is not None else None
            saves = self.world.scenario.saves
            start, disks = self.world.start, self.world.disks
            has_epochs = start is not None and start.epochs is not None
            server = machines.make_server(
                identity,
                on_capture=on_capture,
                start=None if has_epochs else begins_with,
                saves=saves,
                disks=disks,
                marks=start.marks if start is not None and has_epochs else None,
            )
            node = Node(identity, server)
        else:
            plan = cuts.plan if cuts is not None else None
            parts = self.world.scenario.profile.parts
            made = machines.make_coordinator(
                identity,
                self.world.job,
                plan,
                patience_seconds=PARTED_PATIENCE_SECONDS if parts else self.patience_seconds,
                unanswered_seconds=PARTED_SECONDS if parts else UNANSWERED_SECONDS_MAX,
            )
            node = Node(identity, made)
        node.number = self.world.numbers[identity] = len(self.world.numbers)
        node.is_server = role == "server"
        self.world.agenda.void()
        self.world.nodes[identity] = self.world.current[role, index] = node
        self.world.heard.pop(index, None) if role == "server" else None
        self.world.log(f"{short(identity)} starts")
        if role != COORDINATOR:
            self.world.network.dial(identity, COORDINATOR)
        elif identity.incarnation:
            self.world.sabotage.hangs.divide(identity)
        if node.is_server and identity.incarnation:
            self.world.sabotage.parted.divide(identity)

    def crash(self, node: Node) -> None:
        """The process ends at once; the launcher sees it after a while."""
        if not node.alive:
            return
        if node.falls:
            self.world.falling = True
        self.end(node, "dies")
        self.world.later(lambda: self._on_ended(node.identity))

    def end(self, node: Node, how: str) -> None:
        self.world.log(f"{short(node.identity)} {how}")
        node.alive = False
        del self.world.nodes[node.identity]
        if self.world.node(node.identity.role, node.identity.id) is node:
            del self.world.current[node.identity.role, node.identity.id]

        def keeps(count: int) -> int:
            # How much of what it wrote was still in its own buffers is chance.
            return count if self.world.calm or not count else count - self.world.choices.pick(count + 1, dull=0.7)

        for peer in self.world.network.crash(node.identity, keeps):
            if peer not in self.world.nodes:
                self.world.network.wires.pop((node.identity, peer), None)

    def _on_ended(self, identity: Identity) -> None:
        """The launcher has seen a process end: it tells the coordinator, and starts the successor."""
        if self.world.falling:
            raise Fallen
        if not self.world.is_current(identity):
            return
        coordinator = self.world.node(COORDINATOR)
        tells = self.world.calm or not self.world.choices.flag(0.2)
        if coordinator is not None and identity.role != COORDINATOR and tells:
            self._tell(coordinator, identity)
        self.world.later(lambda: self._start_successor(identity))

    def _tell(self, coordinator: Node, identity: Identity) -> None:
        """Of a death. Whoever hangs reads it when he goes on."""
        if coordinator.paused:
            self.world.later(lambda: self._tell(coordinator, identity), of=coordinator)
        elif coordinator.alive:
            self.world.driver.hand(coordinator, Died(peer=identity))

    def _start_successor(self, identity: Identity) -> None:
        if self.world.is_current(identity):
            self.start(identity.role, identity.id)

    def condemn(self, identity: Identity, reason: str) -> None:
        """The coordinator waits no longer: what is left of it is ended, and seen to end."""
        node = self.world.nodes.get(identity)
        if node is not None:
            self.world.probes.hit("condemned")
            self.end(node, f"is ended by the launcher: {reason}")
            self.world.later(lambda: self._on_ended(identity))

    def replace(self, identity: Identity, reason: str) -> None:
        """The coordinator counts a server as dead: what is left of it is ended, if it can be reached."""
        if not self.world.is_current(identity):
            return
        node = self.world.nodes.get(identity)
        self.world.log(f"the launcher replaces {short(identity)}: {reason}")
        if node is not None and (node.paused or node.hidden):
            self.world.probes.hit("silence" if node.paused else "zombie goes on")
            if not self.world.calm and self.world.choices.flag(0.6):
                self.start(identity.role, identity.id)  # out of reach: a zombie
                return
        if node is not None:
            self.end(node, "is ended by the launcher")
        self.start(identity.role, identity.id)
