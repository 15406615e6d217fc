"""All that can happen next in a world, oldest first, kept in order while it changes.

What may be next is: the head of a wire, a worker's next act, a connection, an action of the launcher or of chance, and
a tick of the clock. To look through all of it before every event was a quarter of a run. So an ordinary event (a
frame that arrives, a worker that acts) only moves what it changed; everything else (a connection that comes or goes,
a pause, a death) calls `void`, and the list is made anew from the world.

The rule to keep: whoever changes what may be next, other than by the methods here, calls `void`. The list is then that
of `_list_all` at every event; a test compares them.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from regrow.core.identity import Identity
from regrow.sim.net import COORDINATOR

if TYPE_CHECKING:
    from regrow.sim.net import Wire
    from regrow.sim.nodes import Action, Node
    from regrow.sim.world import World

CLOCK_EARLY_EVENTS = 15  # by which the tape may bring a tick forward
SILENT_SECONDS_MAX = 0.9  # The clock waits for healthy servers to be heard, so that none is declared dead by accident.
WIRE, WORKER, DIAL, ACTION, CLOCK = range(5)  # who is first of those that are due at the same time

# When it is due, its kind, its number within that kind (so no two compare as equal), and what to call with what.
Entry = tuple[int, int, int, Callable[[Any], None], Any]


class Agenda:
    """One for a world. `count` says how many places there are to choose from, `take` what happens at one of them."""

    def __init__(self, world: World) -> None:
        self.world = world
        self._entries: list[Entry] = []
        self._acts: dict[int, Entry] = {}  # of workers, by the number of their node
        self._is_void = True
        self._paused: tuple[Identity, ...] = ()  # who nothing reaches
        self._deliver = world.deliver
        self._may_tick: bool | None = None  # None: not known
        self._tick_at = -1  # the place of the next tick, if it may be chosen

    def void(self) -> None:
        """Something changed that is not followed here: the list is made anew before the next event."""
        self._is_void = True

    def void_tick(self) -> None:
        """A server was heard of."""
        self._may_tick = None

    # --- What is next ---

    def count(self) -> int:
        """How many things can happen now."""
        if self._is_void:
            self._make()
        world, entries = self.world, self._entries
        if not entries or (
            world.clock_due <= world.network.order + CLOCK_EARLY_EVENTS
            and (self._may_tick if self._may_tick is not None else self._find_may_tick())
        ):
            self._tick_at = bisect_left(entries, (world.clock_due, CLOCK))
            return len(entries) + 1
        self._tick_at = -1
        return len(entries)

    def take(self, place: int) -> tuple[Callable[[Any], None], Any]:
        """What happens at this place of the `count`: call the first with the second."""
        at = self._tick_at
        if at >= 0 and place >= at:
            if place == at:
                return self.world.tick, None
            place -= 1
        _, kind, number, happen, what = self._entries.pop(place)
        if kind == WORKER:
            del self._acts[number]
        return happen, what

    def take_oldest(self) -> tuple[Callable[[Any], None], Any] | None:
        """What has waited longest, but for the clock; None: nothing is left."""
        if self._is_void:
            self._make()
        self._tick_at = -1
        return self.take(0) if self._entries else None

    # --- What is followed ---

    def on_filled(self, wire: Wire) -> None:
        """There is something at the head of a wire, and it is not on the list."""
        if self._is_void:
            return
        stuck = self.world.network.stuck
        if wire.target not in self._paused and not (stuck and (wire.source, wire.target) in stuck):
            insort(self._entries, (wire.items[0].due, WIRE, wire.number, self._deliver, wire))

    def on_worker(self, node: Node) -> None:
        """A worker has heard something, or acted."""
        if self._is_void:
            return
        before = self._acts.get(node.number)
        now = self._find_act(node)
        if before == now:
            return
        if before is not None:
            del self._entries[bisect_left(self._entries, before)]
            del self._acts[node.number]
        if now is not None:
            insort(self._entries, now)
            self._acts[node.number] = now

    def on_action(self, action: Action) -> None:
        """An action was added."""
        if not self._is_void and self._can_act_out(action):
            insort(self._entries, (action.due, ACTION, action.number, self.world.act_out, action))

    def pass_time(self, now: float) -> None:
        """It is `now` in a moment: actions that waited for that are on the list from here on."""
        self._may_tick = None
        if self._is_void:
            return
        for action in self.world.actions:
            if self.world.now < action.at <= now and not (action.of is not None and action.of.paused):
                insort(self._entries, (action.due, ACTION, action.number, self.world.act_out, action))

    # --- Made anew ---

    def _make(self) -> None:
        self._entries = self._list_all()
        self._paused = self._find_paused()
        self._acts = {entry[2]: entry for entry in self._entries if entry[1] == WORKER}
        self._is_void = False
        self._may_tick = None

    def _find_paused(self) -> tuple[Identity, ...]:
        """A pause that begins or ends makes the list void."""
        return tuple(node.identity for node in self.world.nodes.values() if node.paused)

    def _list_all(self) -> list[Entry]:
        world = self.world
        nodes, network = world.nodes, world.network
        paused, deliver, stuck = self._find_paused(), world.deliver, network.stuck
        entries: list[Entry] = [
            (wire.items[0].due, WIRE, wire.number, deliver, wire)
            for wire in network.wires.values()
            if wire.items and wire.target not in paused and not (stuck and (wire.source, wire.target) in stuck)
        ]
        for node in nodes.values():
            if node.program is not None and (act := self._find_act(node)) is not None:
                entries.append(act)
        for number, ((who, whom), due) in enumerate(network.dials.items()):
            if (peer := self._find_peer(who, whom)) is not None:
                entries.append((due, DIAL, number, world.connect, (who, peer, whom)))
        for action in world.actions:
            if self._can_act_out(action):
                entries.append((action.due, ACTION, action.number, world.act_out, action))
        entries.sort()
        return entries

    def _find_act(self, node: Node) -> Entry | None:
        program = node.program
        assert program is not None
        if node.paused or not program.can_act():
            return None
        return program.since, WORKER, node.number, self.world.act, node

    def _can_act_out(self, action: Action) -> bool:
        return action.at <= self.world.now and (action.of is None or not action.of.paused)

    def _find_peer(self, who: Identity, whom: Identity | str) -> Identity | None:
        """Whom a dial reaches now; None: nobody."""
        world, network = self.world, self.world.network
        if isinstance(whom, str):
            coordinator = world.node(COORDINATOR)
            if coordinator is None or coordinator.paused or (who, coordinator.identity) in network.wires:
                return None
            if not world.launcher.is_reached(who, coordinator.identity):
                return None
            whom = coordinator.identity
        node = world.nodes.get(who)
        if whom not in world.nodes or node is None or node.paused or (who, whom) in network.wires:
            return None
        if (whom, who) in network.wires or network.is_cut(who, whom):
            return None
        if (whom, who) in network.forgotten and whom.role != COORDINATOR:
            return None
        return whom

    def _find_may_tick(self) -> bool:
        self._may_tick = self._are_all_heard()
        return self._may_tick

    def _are_all_heard(self) -> bool:
        world = self.world
        coordinator = world.node(COORDINATOR)
        if coordinator is None or coordinator.paused:
            return True
        for server in range(world.job.servers):
            node = world.node("server", server)
            if node is None or node.identity in world.condemned or world.sabotage.hangs.is_away(node):
                continue
            heard = world.heard.get(server)
            if heard is None:
                continue
            if world.now > heard + SILENT_SECONDS_MAX:
                return False
            if (coordinator.identity, node.identity) not in world.network.open:
                return False  # a connection that stays closed counts as a death
        return True
