"""Faults in which nobody dies: processes that hang and go on, lines that carry one way only, frames that come twice,
ticks that stay away, clocks that are wrong, and rumours of a death.

What they have in common: whoever is hit is alive, and comes back. It may have been replaced meanwhile, and then it must
do no harm. The rule of `sabotage.py` holds here too: a server that may be taken for dead, because the coordinator
cannot hear it, counts as down, and it does until it has been heard again. A server that is heard must not be taken
for dead (invariant `suspicion`).
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import TYPE_CHECKING

from regrow.core.effects import Died, Tick
from regrow.core.identity import Identity
from regrow.sim import machines
from regrow.sim.net import COORDINATOR, Item, Wire, short
from regrow.sim.nodes import Violation

if TYPE_CHECKING:
    from regrow.sim.nodes import Node
    from regrow.sim.sabotage import Saboteur
    from regrow.sim.world import World

SLOW_SECONDS = 0.6  # between two ticks of a coordinator whose machine is overloaded; more than its OWN_PAUSE_SECONDS
CUT_SECONDS_MAX = 4.0  # for a cut to be made: what the coordinator allows, by a slow clock, and some ticks.
NOTICED_SECONDS = 4.0  # A server that is not heard for so long must have been declared dead.
SPELLS = (0.3, 2.5, 6.0, 1.2)  # how long something lasts, in seconds
JUMPS = (-3600.0, 3600.0, -0.7, -20.0, 45.0)  # seconds that a clock is set by
RATES = (1.0, 0.9, 1.1)
SILENCES = ("silent for", "its connection closed", "not heard of")


@dataclasses.dataclass(slots=True)
class Clock:
    """What a machine takes for the time: seconds of `rate`, from its own beginning."""

    since: float
    shows: float
    rate: float

    def read(self, now: float) -> float:
        return self.shows + (now - self.since) * self.rate

    def jump(self, now: float, seconds: float) -> None:
        self.since, self.shows = now, self.read(now) + seconds


class Hangs:
    """`inject_...`: the faults, by the names that profiles use; each says whether it could happen."""

    def __init__(self, saboteur: Saboteur) -> None:
        self.saboteur = saboteur
        self.world: World = saboteur.world
        profile = self.world.scenario.profile
        self._clocks: dict[Identity, Clock] = {}
        self.has_clocks = profile.clocks  # every machine has its own
        self._unheard_since: dict[Identity, float] = {}  # released, and not known to have been heard since
        self._ticked: dict[Identity, float] = {}
        self._slow: Identity | None = None
        self._coordinator_since = 0.0  # when it last went on after something
        self._cut_since: float | None = None  # since when the coordinator waits for servers to capture
        self._watches = any(hasattr(self, find_method(name)) for name, _ in profile.weights)
        if any(name in ("echo", "late frames") for name, _ in profile.weights):
            self.world.network.past = {}

    # --- Who is away, what time it is ---

    def is_away(self, node: Node) -> bool:
        """Whether the coordinator may not hear of a server that runs, and it may so be taken for dead."""
        if node.paused or node.starved or (self._watches and node.identity in self.world.condemned):
            return True
        coordinator = self.world.node(COORDINATOR)
        # Also cut off from one that is dead: it may not see that, and look for no other.
        stuck = self.world.network.stuck
        if stuck and any(node.identity in ends and COORDINATOR in (ends[0].role, ends[1].role) for ends in stuck):
            return True
        since = self._unheard_since.get(node.identity)
        if since is None:
            return False
        if coordinator is None or self.world.heard.get(node.identity.id, -1.0) < since:
            return coordinator is not None
        del self._unheard_since[node.identity]
        return False

    def gets_tick(self, node: Node) -> bool:
        if node.starved:
            return False
        if node.is_server:
            return True
        if node.identity == self._slow and self.world.now < self._ticked.get(node.identity, 0.0) + SLOW_SECONDS:
            return False
        self._ticked[node.identity] = self.world.now
        return True

    def read_clock(self, node: Node) -> float:
        now = self.world.now
        if not self.has_clocks:
            return now
        clock = self._clocks.get(node.identity)
        if clock is None:
            calm, choices = self.world.calm, self.world.choices
            shows = 0.0 if calm else (0.0, 1e6, 5.0)[choices.pick(3)]
            rate = 1.0 if calm else RATES[choices.pick(len(RATES))]
            clock = self._clocks[node.identity] = Clock(now, shows, rate)
        return clock.read(now)

    # --- What must hold ---

    def check_suspicion(self, peer: Identity, reason: str) -> None:
        """Nobody who could be heard is taken for silent."""
        node = self.world.nodes.get(peer)
        if not self._watches or node is None or not self.world.is_current(peer) or self.is_away(node):
            return
        if reason.startswith(SILENCES):
            raise Violation("suspicion", f"{short(peer)} is there and was heard, but counts as dead: {reason}")

    def check_cut(self) -> None:
        """The coordinator does not wait without end for a push that does not arrive, before a cut is made."""
        if not self._watches:
            return
        node = self._find_coordinator()
        waits = node is not None and node.identity != self._slow and machines.awaits_captures(node.machine)
        if not waits:
            self._cut_since = None
            return
        if self._cut_since is None:
            self._cut_since = self.world.now
        if self.world.now > self._cut_since + CUT_SECONDS_MAX:
            raise Violation("I13", f"the coordinator waits for pushes before a cut since {self._cut_since:.2f}")

    def stop(self) -> None:
        """The second phase: everybody goes on, and what was to end at last does."""
        self.world.network.stuck.clear()
        self._slow = None
        for node in list(self.world.nodes.values()):
            if node.identity.role == COORDINATOR and not self.world.is_current(node.identity):
                self.world.launcher.end(node, "ends at last")
            elif node.starved:
                self._feed(node)

    # --- The coordinator ---

    def inject_coordinator_hang(self) -> bool:
        """It is stopped, and goes on later. Nobody else was silent meanwhile."""
        node = self._find_coordinator()
        if node is None:
            return False
        node.paused = True
        self.world.log(f"{short(node.identity)} hangs")
        since = self.world.now

        def resume() -> None:
            if node.alive and node.paused:
                node.paused = False
                self._coordinator_since = self.world.now
                self.world.log(f"{short(node.identity)} goes on")
                if self.world.now > since + SPELLS[1]:
                    self.world.probes.hit("coordinator hangs")

        self._after_a_spell(resume)
        return True

    def inject_coordinator_zombie(self) -> bool:
        """It is stopped and replaced; connections break one by one. Then it goes on for a while, and is not in office
        any more."""
        node = self._find_coordinator()
        if node is None:
            return False
        world = self.world
        node.paused = True
        world.log(f"{short(node.identity)} hangs and is replaced")
        world.launcher.start(COORDINATOR, 0)
        for source, target in list(world.network.wires):
            if source == node.identity:
                world.later(functools.partial(self._break, source, target))

        def resume() -> None:
            if node.alive:
                node.paused = False
                world.probes.hit("coordinator zombie")
                world.log(f"{short(node.identity)} goes on, replaced")
                self._after_a_spell(end)

        def end() -> None:
            if node.alive:
                world.launcher.end(node, "ends at last")

        # Some go on before all have noticed that there is another.
        world.later(resume) if world.choices.flag(0.5) else self._after_a_spell(resume)
        return True

    def inject_coordinator_slow(self) -> bool:
        """Its machine is overloaded: every tick comes late, for a long time."""
        node = self._find_coordinator()
        if node is None or self._slow is not None:
            return False
        self._slow = node.identity
        self.world.log(f"{short(node.identity)} gets a tick every {SLOW_SECONDS} s only")
        self.world.probes.hit("coordinator slow")
        if self.world.choices.flag(0.5):
            self.saboteur.pause_server()  # which must be noticed all the same
        return True

    def _find_coordinator(self) -> Node | None:
        node = self.world.node(COORDINATOR)
        return None if node is None or node.paused or node.starved or node.crash_after is not None else node

    def _break(self, one: Identity, other: Identity) -> None:
        """Breaks a connection, also one that is still being made."""
        network = self.world.network
        if (one, other) in network.open and (other, one) in network.open:
            network.reset(one, other, 0 if self.world.calm else self.world.choices.pick(4))
        elif (one, other) in network.wires and one in self.world.nodes and other in self.world.nodes:
            self.world.later(functools.partial(self._break, one, other))

    # --- Workers ---

    def inject_worker_hang(self) -> bool:
        """It is stopped and goes on; perhaps somebody has lost patience meanwhile, and started its successor."""
        world = self.world
        node = world.node("worker", world.choices.pick(world.job.workers))
        if node is None or node.paused or node.crash_after is not None:
            return False
        node.paused = True
        world.log(f"{short(node.identity)} hangs")
        if world.choices.flag(0.4):
            self._after_a_spell(lambda: self._replace_worker(node))

        def resume() -> None:
            if node.alive and node.paused:
                world.probes.hit("worker hangs" if world.is_current(node.identity) else "worker hangs too long")
                world.log(f"{short(node.identity)} goes on")
                node.paused = False

        self._after_a_spell(resume)
        return True

    def _replace_worker(self, node: Node) -> None:
        if node.alive and node.paused and self.world.is_current(node.identity):
            self.world.log(f"{short(node.identity)} is replaced while it hangs")
            self.world.launcher.start("worker", node.identity.id)

    # --- Lines ---

    def inject_cut(self) -> bool:
        """What one says does not reach the other, for a while; what the other says does."""
        world = self.world
        wires = [ends for ends in world.network.wires if ends in world.network.open and self._may_cut(*ends)]
        if not wires:
            return False
        source, target = wires[world.choices.pick(len(wires))]
        ends = ((source, target), (target, source))[: 1 + world.choices.flag(0.3)]
        self._cut(ends, "cut one way" if len(ends) == 1 else "cut both ways")
        return True

    def _may_cut(self, one: Identity, other: Identity) -> bool:
        if COORDINATOR not in (one.role, other.role):
            return True
        if "server" not in (one.role, other.role):
            return True
        server = one if one.role == "server" else other
        return any(node.identity == server for node in self._find_spared())

    def inject_cut_off(self) -> bool:
        """A server and the coordinator cannot hear each other; it works on with everybody else."""
        world, coordinator = self.world, self._find_coordinator()
        nodes = self._find_spared()
        if not nodes or coordinator is None:
            return False
        node = nodes[world.choices.pick(len(nodes))]
        node.hidden = True
        mine, its = node.identity, coordinator.identity
        ends = ((mine, its), (its, mine))
        self._cut(ends[: 1 + world.choices.flag(0.7)], "cut off")
        return True

    def _cut(self, ends: tuple[tuple[Identity, Identity], ...], probe: str) -> None:
        world = self.world
        names = " and ".join(f"{short(source)} to {short(target)}" for source, target in ends)
        world.log(f"nothing arrives from {names}")
        world.network.stuck.update(dict.fromkeys(ends))
        told = next((source for source, target in ends if source.role == "server" and target.role == COORDINATOR), None)
        check = self.expect_notice(told) if told is not None else None

        def heal() -> None:
            if check is not None:
                check()
            late = any(wire.items for pair in ends if (wire := world.network.wires.get(pair)) is not None)
            for pair in [pair for pair in world.network.stuck if _is_of(pair, ends)]:
                del world.network.stuck[pair]
                for identity in pair:
                    self.release(identity)
            if late:
                world.probes.hit(probe)
            world.log(f"what was stuck from {names} arrives")

        self._after_a_spell(heal)

    def divide(self, coordinator: Identity) -> None:
        """A new coordinator is behind the same lines as the one before."""
        stuck = self.world.network.stuck
        for source, target in list(stuck):
            if source.role == COORDINATOR:
                stuck[coordinator, target] = None
            elif target.role == COORDINATOR:
                stuck[source, coordinator] = None

    def _find_spared(self) -> list[Node]:
        """Servers that may be taken for dead now; those that are coming back count as down already."""
        nodes = self.saboteur.find_servers(recovered=True) + self.saboteur.find_servers(recovered=False)
        return [node for node in nodes if not self.is_away(node)]

    def release(self, identity: Identity) -> None:
        """A server may be heard again. Until it is, it may be taken for dead, and rightly so: it was silent."""
        node = self.world.nodes.get(identity)
        if node is not None and identity.role == "server":
            node.hidden = False
            self._unheard_since[identity] = self.world.now

    # --- Frames below the link ---

    def inject_twice(self) -> bool:
        """A frame that is on its way arrives once more, at once or behind everything else."""
        world = self.world
        wires = [wire for wire in world.network.wires.values() if wire.items and wire.items[0].kind == "frame"]
        if not wires:
            return False
        wire = wires[world.choices.pick(len(wires))]
        if world.choices.flag(0.5):
            wire.items.insert(1, wire.items[0])
        elif (wire.source, wire.target) in world.network.open:
            wire.items.append(wire.items[0])
        world.probes.hit("frame twice")
        return True

    def inject_echo(self) -> bool:
        """Frames that arrived long ago, perhaps between incarnations that are over, arrive again."""
        world = self.world
        wires = [wire for ends, wire in world.network.wires.items() if ends in world.network.open]
        old = [(wire, item) for wire in wires for item in self._recall(wire) if self._fits(wire, item)]
        if old and world.choices.flag(0.7):
            wire, item = old[world.choices.pick(len(old))]
            wire.items.appendleft(item)
            world.probes.hit("echo of the past")
            return True
        wires = [wire for wire in wires if self._recall(wire)]
        if not wires:
            return False
        wire = wires[world.choices.pick(len(wires))]
        past = self._recall(wire)
        first = world.choices.pick(len(past))
        again = past[first : first + 1 + world.choices.pick(3)]
        wire.items.extendleft(reversed(again)) if world.choices.flag(0.5) else wire.items.extend(again)
        world.probes.hit("echo")
        return True

    def _recall(self, wire: Wire) -> list[Item]:
        """What arrived between the two places of a wire, whoever was in them."""
        assert self.world.network.past is not None
        ends = (wire.source.role, wire.source.id), (wire.target.role, wire.target.id)
        return [*self.world.network.past.get(ends, ())]

    def _fits(self, wire: Wire, item: Item) -> bool:
        """Whether only the incarnations tell this frame from the next one of a wire."""
        link, stamp = self.world.network.links.get((wire.target, wire.source)), item.stamp
        if link is None or stamp is None or stamp.number != link.received + 1:
            return False
        return (stamp.source_incarnation, stamp.target_incarnation) != (
            wire.source.incarnation,
            wire.target.incarnation,
        )

    def inject_late_frames(self) -> bool:
        """A connection breaks, and what was on it arrives all the same, while the next one brings it too."""
        world = self.world
        pairs = world.network.pairs()
        if not pairs or not world.job.protection.replaces_servers:
            return False
        one, other = pairs[world.choices.pick(len(pairs))]
        lost = world.network.reset(one, other, world.choices.pick(2))
        world.log(f"the link of {short(one)} and {short(other)} is reset, and what was on it arrives late")
        for wire in lost:
            if wire.items:
                world.later(functools.partial(self._arrive_late, wire))
        return True

    def _arrive_late(self, wire: Wire) -> None:
        """One of the frames, and the next later."""
        world = self.world
        node, ends = world.nodes.get(wire.target), (wire.target, wire.source)
        if node is None or node.paused or ends in world.network.forgotten or ends not in world.network.links:
            return
        if (wire.source, wire.target) not in world.network.open:
            # Not before there is a connection again: what was kept of the old one comes first.
            if not world.calm and wire.source in world.nodes:
                self._after_a_spell(lambda: self._arrive_late(wire))
            return
        item = wire.items.popleft()
        world.probes.hit("late frame")
        world.deliver_frame(wire, item)
        if wire.items:
            world.later(lambda: self._arrive_late(wire))

    # --- Time ---

    def inject_starve(self) -> bool:
        """A server or the coordinator gets no ticks, and then one that is far ahead, or several at once."""
        world, coordinator = self.world, self._find_coordinator()
        nodes = [*self._find_spared(), *([coordinator] if coordinator is not None else [])]
        if not nodes:
            return False
        node = nodes[world.choices.pick(len(nodes))]
        node.starved = True
        world.log(f"{short(node.identity)} gets no ticks")
        check = self.expect_notice(node.identity) if node.identity.role == "server" else None

        def feed() -> None:
            if check is not None:
                check()
            if node.alive and node.starved:
                world.probes.hit(f"starved {node.identity.role}")
                world.log(f"{short(node.identity)} gets ticks again")
                self._feed(node)

        self._after_a_spell(feed)
        return True

    def _feed(self, node: Node) -> None:
        node.starved = False
        if node.identity.role == COORDINATOR:
            self._coordinator_since = self.world.now
        self.release(node.identity)
        for _ in range(1 if self.world.calm else 1 + self.world.choices.pick(3)):
            if node.alive and not node.paused:
                self.world.driver.hand(node, Tick(now=self.read_clock(node)))

    def inject_jump(self) -> bool:
        """The clock of a machine is set, forward or back."""
        world = self.world
        nodes = [node for node in world.nodes.values() if node.program is None and node.identity in self._clocks]
        if not nodes:
            return False
        node = nodes[world.choices.pick(len(nodes))]
        seconds = JUMPS[world.choices.pick(len(JUMPS))]
        self._clocks[node.identity].jump(world.now, seconds)
        world.log(f"the clock of {short(node.identity)} jumps by {seconds:.1f} s")
        world.probes.hit("clock jumps back" if seconds < 0 else "clock jumps ahead")
        return True

    # --- Rumours ---

    def inject_rumour(self) -> bool:
        """The coordinator is told that a server ended which is alive, and which the launcher may not reach."""
        world, coordinator = self.world, self._find_coordinator()
        nodes = self._find_spared()
        if not nodes or coordinator is None or coordinator.machine.view is None:
            return False
        node = nodes[world.choices.pick(len(nodes))]
        node.hidden = True
        world.log(f"{short(coordinator.identity)} is told that {short(node.identity)} ended")
        world.probes.hit("rumour")
        world.driver.hand(coordinator, Died(peer=node.identity))
        return True

    # --- Shared ---

    def _after_a_spell(self, what: Callable[[], None]) -> None:
        seconds = SPELLS[self.world.choices.pick(len(SPELLS))]
        self.world.later(what, at=self.world.now + seconds)

    def expect_notice(self, identity: Identity) -> Callable[[], None]:
        """A check for later: a coordinator that hears nothing of a server for too long has declared it dead.

        Only one that had ticks all the time can know how long that was. In the second phase nobody is away any more,
        and time leaps; then there is nothing to notice.
        """
        world, since, serious = self.world, self.world.now, self.saboteur.serious
        coordinator = world.node(COORDINATOR)

        def check() -> None:
            node = world.nodes.get(identity)
            undisturbed = self.saboteur.serious == serious + 1 and coordinator is self._find_coordinator()
            knows = coordinator is not None and machines.minds_silence(coordinator.machine, identity)
            unnoticed = node is not None and identity not in world.condemned
            # It may still answer; and who hangs himself does not notice anything.
            heard = max(since, world.heard.get(identity.id, 0.0), self._coordinator_since)
            if not world.calm and undisturbed and knows and unnoticed and world.now > heard + NOTICED_SECONDS:
                raise Violation("I8", f"{short(identity)} is not heard since {heard:.2f}, and nobody minds")

        return check


def find_method(name: str) -> str:
    """What the fault of this name is called."""
    return "inject_" + name.replace(" ", "_")


def _is_of(pair: tuple[Identity, Identity], ends: tuple[tuple[Identity, Identity], ...]) -> bool:
    """Whether this is one of the lines that were cut, or the same to a later coordinator."""
    return any(
        all(one == other or one.role == other.role == COORDINATOR for one, other in zip(pair, cut, strict=True))
        for cut in ends
    )
