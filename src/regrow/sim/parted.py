"""Two channels that are not in step, and two servers that do not reach each other.

A death is told to the coordinator by the launcher, past everything that is still on its way to it: also past the
`Recovered` of a replacement, which was whole when the other died. Nothing is lost then, and nobody may say so.

A line between two servers is cut for good, one way or both, while everybody else reaches them: because of the two
processes, so that a successor of either is reached, or because of one of them, and then nobody in the other's place is.
It must be noticed and ended in both phases. Nobody else may be replaced for it (invariant `suspicion`).
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from regrow.core.effects import Died
from regrow.sim import machines
from regrow.sim.net import COORDINATOR, short
from regrow.sim.nodes import Violation

if TYPE_CHECKING:
    from regrow.core.identity import Identity
    from regrow.sim.nodes import Node
    from regrow.sim.sabotage import Saboteur


@dataclasses.dataclass(frozen=True, slots=True)
class Severed:
    """`one` does not reach `other`, or the other way round. `bad`: the end whose fault it is; None: of both."""

    one: Identity
    other: Identity
    bad: Identity | None
    both_ways: bool

    def meets(self, identity: Identity) -> bool:
        """Whether this is the next in the place of the end that is not to blame."""
        other = self.other if self.bad == self.one else self.one
        return self.bad is not None and (identity.role, identity.id) == (other.role, other.id)


class Parted:
    """`inject_...`: the faults, by the names that profiles use; each says whether it could happen."""

    def __init__(self, saboteur: Saboteur) -> None:
        self.saboteur = saboteur
        self.world = saboteur.world
        self.overtakes = any(name == "overtake" for name, _ in self.world.scenario.profile.weights)
        self._is_due = False  # the next replacement that recovers is overtaken
        self._severed: list[Severed] = []

    # --- Died before Recovered ---

    def inject_overtake(self) -> bool:
        """The next replacement that has recovered is not heard for a moment, and another server dies in it."""
        is_new, self._is_due = not self._is_due, True
        return is_new

    def on_recovered(self, node: Node) -> None:
        """It is about to say so."""
        world, coordinator = self.world, self.world.node(COORDINATOR)
        if not self._is_due or world.calm or coordinator is None or coordinator.paused:
            return
        self._is_due = False
        world.network.stuck[node.identity, coordinator.identity] = None
        world.agenda.void()
        world.later(lambda: self._strike(node))

    def _strike(self, node: Node) -> None:
        world = self.world
        coordinator = world.node(COORDINATOR)
        present = coordinator is not None and not coordinator.paused and not world.calm
        others = self._find_spared(node) if present else []
        if coordinator is not None and others:
            other = others[world.choices.pick(len(others))]
            world.log(f"{short(other.identity)} dies, while {short(node.identity)} says that it has recovered")
            world.probes.hit("death overtakes recovery")
            self.saboteur.crashes["server"] += 1
            world.launcher.crash(other)
            world.driver.hand(coordinator, Died(peer=other.identity))
        world.later(lambda: self._hear_again(node.identity))

    def _find_spared(self, recovered: Node) -> list[Node]:
        """Whose death is survived, as this replacement is whole; nobody needs to know that."""
        world, hangs = self.world, self.saboteur.hangs
        if not recovered.alive or recovered.paused or recovered.identity in world.condemned:
            return []
        nodes = [world.node("server", server) for server in range(world.job.servers)]
        whole = [
            node
            for node in nodes
            if node is not None and node.crash_after is None and machines.is_recovered(node.machine)
            if node is recovered or not hangs.is_away(node)
        ]
        gone = set(range(len(nodes))) - {node.identity.id for node in whole}
        return [node for node in whole if node is not recovered and self.saboteur.tolerates(gone | {node.identity.id})]

    def _hear_again(self, identity: Identity) -> None:
        stuck = self.world.network.stuck
        for ends in [ends for ends in stuck if ends[0] == identity and ends[1].role == COORDINATOR]:
            del stuck[ends]
        self.saboteur.hangs.release(identity)

    # --- Two servers ---

    def inject_sever(self) -> bool:
        """A source and one of its holders are cut off from each other."""
        world, saboteur = self.world, self.saboteur
        if saboteur.down() or self._severed:
            return False
        pairs = self._list_pairs()
        if not pairs:
            return False
        source, holder = pairs[world.choices.pick(len(pairs))]
        one, other = (source, holder) if not world.choices.flag(0.4) else (holder, source)
        bad = (None, one, other)[world.choices.pick(3)]
        if bad is not None and not saboteur.tolerates({one.id, other.id}):
            saboteur.beyond = True  # the wrong one may be replaced first, and nothing brings that back
        self._sever(Severed(one, other, bad, world.choices.flag(0.5)))
        return True

    def _list_pairs(self) -> list[tuple[Identity, Identity]]:
        """Sources and their holders, each of which may be lost."""
        world = self.world
        nodes = {node.identity.id: node.identity for node in self.saboteur.find_servers(recovered=True)}
        found = []
        for server, identity in nodes.items():
            holders = [h for group in range(len(world.groups)) for h in world.groups.holders(server, group)]
            found += [(identity, nodes[holder]) for holder in dict.fromkeys(holders) if holder in nodes]
        return [pair for pair in found if pair in world.network.open]

    def _sever(self, severed: Severed) -> None:
        self._severed.append(severed)
        how = "and back" if severed.both_ways else "only"
        self.world.log(f"nothing arrives from {short(severed.one)} at {short(severed.other)} {how}, for good")
        self._cut(severed)

    def _cut(self, severed: Severed) -> None:
        self.world.network.stuck[severed.one, severed.other] = None
        if severed.both_ways:
            self.world.network.stuck[severed.other, severed.one] = None
        self.world.agenda.void()

    def divide(self, identity: Identity) -> None:
        """A new server is behind the same line as the one before, if that was not its fault."""
        severed = next((each for each in self._severed if each.meets(identity)), None)
        if severed is None or severed.bad not in self.world.nodes:
            return
        self.world.probes.hit("parted still")
        ends = (severed.one, identity) if severed.bad == severed.one else (identity, severed.other)
        self._sever(Severed(*ends, severed.bad, severed.both_ways))

    def find_parted(self) -> set[int]:
        """Servers of which one is going to be replaced."""
        found: set[int] = set()
        for each in self._severed:
            ends = (each.one, each.other) if each.bad is None else (each.bad,)
            if all(identity in self.world.nodes for identity in ends):
                found |= {each.one.id, each.other.id}
        return found

    def check_suspicion(self, peer: Identity, reason: str) -> None:
        """Nobody who answers everybody is replaced because somebody has had no answer."""
        if "has had no answer" not in reason:
            return
        self.world.probes.hit("parted")
        if not any(peer in (each.one, each.other) for each in self._severed):
            raise Violation("suspicion", f"{short(peer)} answers, but counts as dead: {reason}")

    def stop(self) -> None:
        """The second phase: what is cut for good stays so."""
        for severed in self._severed:
            self._cut(severed)
