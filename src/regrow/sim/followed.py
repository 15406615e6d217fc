"""A launcher that dies, and one that follows it: it has forgotten everything, and asks all places what they run.

Only in worlds whose launcher has the real supervisor (`supervised.py`). While it is away nothing is decided; what the
coordinator wants to be replaced is heard afterwards, as places keep it (`launch/legacy.py`). Then another
supervisor begins with `settle`: of who is found, and of a memo that may be older than the last decision. A server may
be lost in the same moment, the newest of its place with it, so that nobody remembers its number: no identity may be
given to two processes all the same (I4), and everybody who is missing has a successor (I8).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from regrow.core.identity import Identity
from regrow.launch.events import Inherit
from regrow.launch.legacy import number_block, settle
from regrow.launch.supervisor import (
    SPARE_ROLES,
    Event,
    Harm,
    KeepSpares,
    Kill,
    ProcessCondemned,
    ProcessEnded,
    ProcessMissed,
    Stance,
    TakeStance,
)
from regrow.sim.net import COORDINATOR, short
from regrow.sim.nodes import Violation
from regrow.sim.supervised import KILLED, SupervisedLauncher

if TYPE_CHECKING:
    from regrow.sim.sabotage import Saboteur
    from regrow.sim.world import World

AWAY_SECONDS = (0.3, 2.5, 5.0)
MEMOS_MAX = 4  # the newest, and some that a place may have instead


class FollowedLauncher(SupervisedLauncher):
    """Of all launchers of a run the one that lives; `number` counts those before it."""

    def __init__(self, world: World) -> None:
        self.number = 0
        self.is_away = False
        self._memos: list[tuple[Identity, ...]] = [()]
        self._heard: list[Event] = []  # kept by places, for whoever comes
        self._given: set[Identity] = set()
        super().__init__(world)

    def start_as(self, identity: Identity) -> None:
        if identity in self._given:
            raise Violation(
                "I4", f"an incarnation is given twice: {identity.role} {identity.id}.{identity.incarnation}"
            )
        self._given.add(identity)
        super().start_as(identity)

    def supervise(self, event: Event) -> None:
        if not self.is_away:
            super().supervise(event)
            office = self.supervisor.list_office()
            if office != self._memos[-1]:
                self._memos = [*self._memos, office][-MEMOS_MAX:]
        elif isinstance(event, ProcessMissed | ProcessCondemned):
            self._heard.append(event)

    def tick(self) -> None:
        if not self.is_away:
            super().tick()

    def block(self) -> range:
        """The incarnations that this one may give."""
        return number_block(self.number)

    def follow(self, memo: tuple[Identity, ...]) -> None:
        """Another launcher is there."""
        world, now = self.world, self.world.now
        self.number += 1
        self.is_away = False
        nodes = [who for who, node in world.nodes.items() if node.alive and not node.hidden]
        found = [*nodes, *(who for who, spare in self.spares.items() if spare.alive)]
        places = [(who.role, who.id) for who in self._memos[-1]]
        settled = settle(found, places=places, remembered=memo, spare_roles=SPARE_ROLES.values())
        world.log(f"another launcher: {settled}")
        self.supervisor = self.make_supervisor(self.block())
        self.spares = {who: spare for who, spare in self.spares.items() if spare.alive}
        self._asked.clear()
        self._ready.clear()
        self.supervisor.receive(TakeStance(stance=Stance.REPLACING))
        self.supervise(Inherit(office=settled.office, spares=settled.spares, now=now))
        self.supervise(KeepSpares(count=world.job.protection.lost_together_max, now=now))
        for who in settled.office:
            world.newest[who.role, who.id] = who.incarnation
        for who in settled.zombies:
            self._carry_out(Kill(who=who, reason="another is in its place"))
        for who in settled.lost:
            world.probes.hit("missed by another launcher")
            self.supervisor.receive(Harm(role=who.role, id=who.id, now=now))  # as it was done on purpose
            self.supervise(ProcessEnded(who=who, exit=KILLED, now=now))
        heard, self._heard = self._heard, []
        for event in heard:
            self.supervise(event)

    def choose_memo(self) -> tuple[Identity, ...]:
        """The newest, unless no place is left that has it."""
        if self.world.choices.flag(0.4):
            return self._memos[self.world.choices.pick(len(self._memos))]
        return self._memos[-1]


class Followed:
    """`inject_...`: the faults, by the names that profiles use; each says whether it could happen."""

    def __init__(self, saboteur: Saboteur) -> None:
        self.saboteur = saboteur
        self.world = saboteur.world

    def inject_launcher(self) -> bool:
        """The launcher dies, alone or with the node of a server."""
        world, launcher, choices = self.world, self.world.launcher, self.world.choices
        if not isinstance(launcher, FollowedLauncher) or launcher.is_away or world.node(COORDINATOR) is None:
            return False
        world.log("the launcher dies")
        world.probes.hit("launcher dies")
        servers = [
            node
            for node in self.saboteur.find_servers(recovered=True)
            if self.saboteur.tolerates(self.saboteur.down() | {node.identity.id})
        ]
        launcher.is_away = True
        if servers and choices.flag(0.5):
            node = servers[choices.pick(len(servers))]
            self.saboteur.crashes[node.identity.role] += 1
            world.probes.hit("launcher dies with a server")
            world.log(f"... and with it {short(node.identity)}")
            launcher.end(node, "vanishes")
        memo = launcher.choose_memo()
        back = world.now + AWAY_SECONDS[choices.pick(len(AWAY_SECONDS))]
        world.later(lambda: launcher.follow(memo), at=back)
        return True
