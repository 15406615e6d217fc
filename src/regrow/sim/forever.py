"""Processes that hang for good: stopped, and nobody lets them go on. Only in worlds whose launcher has the real
supervisor (`supervised.py`): somebody must notice each of them, end it and put another in its place.

A spare may hang before it has a place, and after it was given one. Where the profile allows it, a server hangs although
rows are lost with it; then it is waited for, in vain, and the run must end with `DataLoss`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from regrow.core.identity import Identity
from regrow.sim.net import COORDINATOR, short
from regrow.sim.supervised import Spare, SupervisedLauncher

if TYPE_CHECKING:
    from regrow.sim.nodes import Node
    from regrow.sim.sabotage import Saboteur


class Forever:
    """`inject_...`: the faults, by the names that profiles use; each says whether it could happen."""

    def __init__(self, saboteur: Saboteur) -> None:
        self.saboteur = saboteur
        self.world = saboteur.world

    def inject_coordinator_for_good(self) -> bool:
        return self._hang(self.world.node(COORDINATOR))

    def inject_worker_for_good(self) -> bool:
        return self._hang(self.world.node("worker", self.world.choices.pick(self.world.job.workers)))

    def inject_server_for_good(self) -> bool:
        nodes = self.saboteur.find_servers(recovered=not self.world.choices.flag(0.3))
        if not nodes:
            return False
        node = nodes[self.world.choices.pick(len(nodes))]
        return self._hang(node) and self.saboteur.note_loss(node)

    def inject_spare_for_good(self) -> bool:
        """It hangs, and is not known to until it does not answer."""
        spare = self._choose_spare()
        if spare is None:
            return False
        who, known = spare
        known.paused = True
        self.world.log(f"{short(who)} hangs for good")
        self.world.probes.hit("spare hangs")
        return True

    def inject_spare_death(self) -> bool:
        spare = self._choose_spare()
        if spare is None:
            return False
        self._launcher.crash_spare(spare[0])
        self.world.probes.hit("spare dies")
        return True

    @property
    def _launcher(self) -> SupervisedLauncher:
        launcher = self.world.launcher
        assert isinstance(launcher, SupervisedLauncher)
        return launcher

    def _choose_spare(self) -> tuple[Identity, Spare] | None:
        spares = [(who, spare) for who, spare in self._launcher.spares.items() if spare.alive and not spare.paused]
        return spares[self.world.choices.pick(len(spares))] if spares else None

    def _hang(self, node: Node | None) -> bool:
        if node is None or node.paused or node.crash_after is not None:
            return False
        node.paused = node.hung = True
        self.world.log(f"{short(node.identity)} hangs for good")
        self.world.probes.hit(f"{node.identity.role} hangs for good")
        return True
