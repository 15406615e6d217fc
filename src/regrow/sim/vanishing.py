"""Nodes of a cluster that vanish with all that runs there: servers, workers, the coordinator, spares, at one instant.

Only in worlds whose launcher has the real supervisor (`supervised.py`). Who sits together is drawn for each loss; no
more servers than can be lost. The launcher hears of all of them together: each is a loss of its own, and each must have
its successor (I8), however the coordinator and the servers that it should tell of went with them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from regrow.core.identity import Identity
from regrow.launch.supervisor import Harm, ProcessEnded
from regrow.sim.net import COORDINATOR, short
from regrow.sim.supervised import KILLED, SupervisedLauncher

if TYPE_CHECKING:
    from regrow.sim.nodes import Node
    from regrow.sim.sabotage import Saboteur


class Vanishing:
    """`inject_...`: the faults, by the names that profiles use; each says whether it could happen."""

    def __init__(self, saboteur: Saboteur) -> None:
        self.saboteur = saboteur
        self.world = saboteur.world

    def inject_machine(self) -> bool:
        """One server, or as many as may be lost together, and whoever else is there."""
        world, choices = self.world, self.world.choices
        lost: list[Node] = []
        while servers := [node for node in self.saboteur.find_servers(recovered=True) if node not in lost]:
            node = servers[choices.pick(len(servers))]
            if not self.saboteur.tolerates(self.saboteur.down() | {each.identity.id for each in (*lost, node)}):
                break
            lost.append(node)
            if not choices.flag(0.5):
                break
        if not lost:
            return False
        others = [world.node(COORDINATOR)] if choices.flag(0.4) else []
        others += [world.node("worker", worker) for worker in range(world.job.workers) if choices.flag(0.3)]
        lost += [node for node in others if node is not None and node.crash_after is None]
        self._lose([node for node in lost if node.alive], takes_spare=choices.flag(0.3))
        return True

    def _lose(self, nodes: list[Node], *, takes_spare: bool) -> None:
        world, launcher = self.world, self.world.launcher
        assert isinstance(launcher, SupervisedLauncher)
        world.log(f"a machine vanishes: {', '.join(short(node.identity) for node in nodes)}")
        world.probes.hit("machine vanishes")
        if sum(node.is_server for node in nodes) > 1:
            world.probes.hit("machine of two servers")
        if any(node.identity.role == COORDINATOR for node in nodes):
            world.probes.hit("machine of the coordinator")
        spares = [who for who, spare in launcher.spares.items() if spare.alive][: int(takes_spare)]
        for node in nodes:
            self.saboteur.crashes[node.identity.role] += 1
            who = node.identity
            if launcher.supervisor.counts(who):
                launcher.supervisor.receive(Harm(role=who.role, id=who.id, now=world.now))
            launcher.end(node, "vanishes")
        for who in spares:
            launcher.spares[who].alive = False
            world.probes.hit("machine of a spare")
        gone = [*(node.identity for node in nodes), *spares]
        world.later(lambda: self._see_ends(launcher, gone))

    def _see_ends(self, launcher: SupervisedLauncher, gone: list[Identity]) -> None:
        """All at once, in any order. A spare may have been given a place meanwhile: it is dead there."""
        first = self.world.choices.pick(len(gone))
        for who in gone[first:] + gone[:first]:
            launcher.supervise(ProcessEnded(who=who, exit=KILLED, now=self.world.now))
