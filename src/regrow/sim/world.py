"""The simulated cluster: real machines, and a scheduler that may let any enabled event be next.

Everything that can happen waits in a queue ordered by age; the tape says which place of the queue is next, so all
zeros is a fair and quiet run. There are two phases: in the first the tape rules and things go wrong; in the second
nothing fails any more and everything must come to its end.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any

from regrow.core.effects import (
    Delivered,
    Joined,
    Lost,
    Tick,
)
from regrow.core.groups import Groups
from regrow.core.identity import Identity
from regrow.core.messages import Declare, Message
from regrow.errors import RegrowError
from regrow.sim import machines
from regrow.sim.checkers import Checker
from regrow.sim.choices import FAULT, Choices
from regrow.sim.cuts import Start, Storage
from regrow.sim.driver import Driver
from regrow.sim.dumps import Loading
from regrow.sim.launcher import Launcher
from regrow.sim.net import COORDINATOR, Item, Network, Wire, checksum, short
from regrow.sim.nodes import Action, Node, Violation
from regrow.sim.probes import Probes
from regrow.sim.profiles import CutScenario, Scenario
from regrow.sim.reference import make_reference
from regrow.sim.sabotage import Saboteur

CHAOS_EVENTS_MAX = 3000
CALM_EVENTS_MAX = 6_000  # A run that needs more does not come to its end.
CALM_SECONDS_MAX = 10.0  # for workers, whatever is still coming back in the background
CLOCK_EVENTS = 25  # between two ticks, if the queue is never empty
CLOCK_EARLY_EVENTS = 15  # by which the tape may bring a tick forward
SILENT_SECONDS_MAX = 0.9  # The clock waits for healthy servers to be heard, so that none is declared dead by accident.


Event = tuple[int, Callable[[Any], None], Any]  # when it is due, and what to call with what


class World:
    """One run. `launcher`, `faults` and `checker` share it."""

    def __init__(
        self,
        scenario: Scenario,
        choices: Choices,
        *,
        probes: Probes,
        note: Callable[[str, Identity | None, Any], None] | None = None,
        start: Start | None = None,
    ) -> None:
        self.scenario = scenario
        self.start = start  # the checkpoint that this run begins with
        self.job = scenario.job
        self.groups = Groups(scenario.job)
        self.choices = choices
        self.probes = probes
        self.note = note
        self.reference = make_reference(
            scenario.job, steps=scenario.steps, rows_seed=scenario.rows_seed, assigned=scenario.assigned
        )
        self.network = Network(self._delay)
        self.nodes: dict[Identity, Node] = {}
        self.newest: dict[tuple[str, int], int] = {}
        self.current: dict[tuple[str, int], Node] = {}  # the newest incarnations, where they run
        self.condemned: set[Identity] = set()  # the coordinator counts them as dead
        self.actions: list[Action] = []
        self.loading = Loading() if scenario.profile.loads else None
        self.now = 0.0
        self.clock_due = CLOCK_EVENTS
        self.heard: dict[int, float] = {}
        self.calm = False
        self.lost = ""  # what the coordinator says is gone for good
        self.digest = hashlib.blake2b(digest_size=8)
        self.driver = Driver(self)
        self.launcher = Launcher(self)
        self.sabotage = Saboteur(self)
        self.checker = Checker(self)
        self.storage = Storage(self)
        self._lanes = {(kind, server): delay for kind, server, delay in scenario.lanes}
        self._calm_since = 0.0
        self._leaps = False
        self.launcher.start(COORDINATOR, 0)
        for index in range(self.job.servers):
            self.launcher.start("server", index)
        for index in range(self.job.workers):
            self.launcher.start("worker", index)

    # --- The two phases ---

    def run(self) -> None:
        """Raises Violation."""
        while self.network.order % 8 or not self.is_finished():
            if self.network.order >= CHAOS_EVENTS_MAX or self.choices.exhausted:
                break
            self._step()
        self.calm = True
        self._calm_since = self.now
        self._lanes = {}
        self.sabotage.stop()
        limit = self.network.order + CALM_EVENTS_MAX
        while self.network.order % 8 or not self.is_finished():
            if self.network.order > limit:
                raise Violation("I8", f"no end after {CALM_EVENTS_MAX} quiet events: {self.find_unfinished()}")
            if self.now > self._calm_since + CALM_SECONDS_MAX and not self.workers_done():
                raise Violation("I8", f"workers wait for the background: {self.find_unfinished()}")
            self._step()
        self._drain()
        self.checker.at_end()
        self.storage.check_end()

    def is_finished(self) -> bool:
        if self.lost:
            nodes = [self.node("worker", w) for w in range(self.job.workers)]
            return all(node is not None and node.program is not None and node.program.failed for node in nodes)
        # Even beyond tolerance what was on its way may have been enough; then everything must be right all the same.
        return not self.find_unfinished(first=True)

    def find_unfinished(self, *, first: bool = False) -> list[str]:
        """What there is still to wait for."""
        waits: list[str] = []
        if count := sum(action.of is None for action in self.actions):
            waits.append(f"{count} actions of the launcher")
        if reason := self.storage.unfinished_reason():
            waits.append(reason)
        for role, index in list(self.newest):
            if first and waits:
                return waits
            node = self.node(role, index)
            name = short(Identity(role=role, id=index, incarnation=self.newest[role, index]))
            if node is None or not node.alive or node.paused:
                waits.append(f"{name} is away")
            elif node.program is not None and not node.program.done:
                program = node.program
                waits.append(f"{name} asked {program.asked} pushed {program.pushed} durable {program.durable}")
            elif (role == "server" and (reason := machines.unsettled_reason(node.machine))) or (
                role == COORDINATOR and (reason := machines.unsettled_view_reason(node.machine))
            ):
                waits.append(f"{name} {reason}")
        return waits

    def workers_done(self) -> bool:
        nodes = [self.node("worker", w) for w in range(self.job.workers)]
        return all(node is not None and node.program is not None and node.program.done for node in nodes)

    def _drain(self) -> None:
        """Lets everything that is on its way arrive, without the clock."""
        for _ in range(CALM_EVENTS_MAX):
            ready = [event for event in self._ready() if event[1] != self._tick]
            if not ready:
                return
            self.network.order += 1
            ready[0][1](ready[0][2])
        raise Violation("I8", "messages without end")

    # --- The scheduler ---

    def _step(self) -> None:
        ready = self._ready()
        value = 0
        if not self.calm:
            scenario = self.scenario
            value = self.choices.pick_event(len(ready), eager=scenario.eager, fault=self.sabotage.rate())
        self.network.order += 1
        if value >= FAULT:
            self.sabotage.happen(value - FAULT)
            return
        _, happen, what = ready[value % len(ready)]
        happen(what)
        self.storage.supervise()

    def _ready(self) -> list[Event]:
        """All that can happen next, oldest first."""
        nodes = self.nodes
        paused = [node.identity for node in nodes.values() if node.paused]
        stuck = self.network.stuck
        ready: list[Event] = [
            (wire.items[0].due, self._deliver, wire)
            for wire in self.network.wires.values()
            if wire.items
            and (not paused or wire.target not in paused)
            and not (stuck and (wire.source, wire.target) in stuck)
        ]
        for node in nodes.values():
            if node.program is not None and not node.paused and node.program.can_act():
                ready.append((node.program.since, self._act, node))
        for (who, whom), due in self.network.dials.items():
            if (peer := self._can_dial(who, whom)) is not None:
                ready.append((due, self._connect, (who, peer, whom)))
        for action in self.actions:
            if action.at <= self.now and not (action.of is not None and action.of.paused):
                ready.append((action.due, self._act_out, action))
        if not ready or (self.clock_due <= self.network.order + CLOCK_EARLY_EVENTS and self._may_tick()):
            ready.append((self.clock_due, self._tick, None))
        ready.sort(key=_due)
        return ready

    def _may_tick(self) -> bool:
        coordinator = self.node(COORDINATOR)
        if coordinator is None or coordinator.paused:
            return True
        for server in range(self.job.servers):
            node = self.node("server", server)
            if node is None or node.identity in self.condemned or self.sabotage.hangs.is_away(node):
                continue
            if self.now > self.heard.get(server, self.now) + SILENT_SECONDS_MAX:
                return False
            if server in self.heard and (coordinator.identity, node.identity) not in self.network.open:
                return False  # a connection that stays closed counts as a death
        return True

    def _tick(self, _: Any) -> None:
        if not self.calm:
            seconds = (0.05, 0.01, 0.2, 0.4)[self.choices.pick(4, dull=0.7)]
        elif not self.workers_done() or self._is_cutting():
            seconds = 0.05
        else:
            # Nobody waits for the workers any more: what is left is slow on purpose, so time may run. A coordinator
            # takes every long step for a pause of its own, so only every other one is long.
            self._leaps = not self._leaps
            seconds = 8.0 if self._leaps else 0.4
        self.now += seconds
        self.clock_due = self.network.order + CLOCK_EVENTS
        for node in list(self.nodes.values()):
            if node.alive and not node.paused and node.program is None and self.sabotage.hangs.gets_tick(node):
                self.driver.hand(node, Tick(now=self.sabotage.hangs.read_clock(node)))
        self.checker.often()
        self.sabotage.hangs.check_holds()

    def _is_cutting(self) -> bool:
        coordinator = self.node(COORDINATOR)
        return coordinator is not None and machines.is_cutting(coordinator.machine)

    def later(self, what: Callable[[], None], *, at: float = 0.0, of: Node | None = None) -> None:
        """The launcher or chance does this after a while that the tape decides."""
        delay = 0 if self.calm else (0, 10, 40, 150)[self.choices.pick(4)]
        self.actions.append(Action(self.network.order + delay, what, at, of))

    def _act_out(self, action: Action) -> None:
        self.actions.remove(action)
        action.what()

    def _delay(self, target: Identity, message: Message) -> int:
        if not self._lanes:
            return 0
        kind = type(message).__name__
        if target.role != "server":
            return self._lanes.get((kind, -1), 0)
        return self._lanes.get((kind, target.id), self._lanes.get((kind, -1), 0))

    # --- Nodes ---

    def node(self, role: str, index: int = 0) -> Node | None:
        """The newest incarnation, if it runs."""
        return self.current.get((role, index))

    def worker(self, index: int) -> Node:
        node = self.node("worker", index)
        assert node is not None
        return node

    @property
    def cuts(self) -> CutScenario:
        assert self.scenario.cuts is not None
        return self.scenario.cuts

    def is_current(self, identity: Identity) -> bool:
        return self.newest.get((identity.role, identity.id)) == identity.incarnation

    # --- What happens ---

    def _act(self, node: Node) -> None:
        program = node.program
        assert program is not None
        program.since = self.network.order
        self.driver.hand(node, program.act())

    def _can_dial(self, who: Identity, whom: Identity | str) -> Identity | None:
        if isinstance(whom, str):
            coordinator = self.node(COORDINATOR)
            if coordinator is None or coordinator.paused or (who, coordinator.identity) in self.network.wires:
                return None
            whom = coordinator.identity
        node = self.nodes.get(who)
        if whom not in self.nodes or node is None or node.paused or (who, whom) in self.network.wires:
            return None
        if (whom, who) in self.network.wires or self.network.is_cut(who, whom):
            return None
        if (whom, who) in self.network.forgotten and whom.role != COORDINATOR:
            return None
        return whom

    def _connect(self, pair: tuple[Identity, Identity, Identity | str]) -> None:
        who, whom, dialled = pair
        del self.network.dials[who, dialled]
        if (whom, who) in self.network.forgotten:
            self.driver.end_refused(who, whom, "it was replaced")
            return
        self.network.connect(who, whom)
        self.driver.hand(self.nodes[whom], Joined(peer=who))

    def deliver_frame(self, wire: Wire, item: Item) -> None:
        """A frame arrives at the link of its target, which knows whether it is to be delivered."""
        assert item.message is not None
        try:
            taken = self.network.accept(wire, item)
        except RegrowError as error:
            raise Violation("link", f"{short(wire.source)} to {short(wire.target)}: {error}") from error
        if not taken:
            return
        if checksum(item.message) != item.checksum:
            raise Violation("payload", f"{type(item.message).__name__} of {short(wire.source)} changed on its way")
        if wire.target.role == COORDINATOR and wire.source.role == "server" and self.is_current(wire.target):
            self.heard[wire.source.id] = self.now
        if not self.is_current(wire.source) and wire.source.role == "server":
            self.probes.hit("zombie sends")
        self.driver.hand(self.nodes[wire.target], Delivered(source=wire.source, message=item.message))

    def _deliver(self, wire: Wire) -> None:
        item = wire.items.popleft()
        node = self.nodes[wire.target]
        if item.kind == "frame":
            self.deliver_frame(wire, item)
        elif item.kind == "ack":
            self.network.accept(wire, item)
        elif item.kind == "opened":
            self.network.finish_opening(wire.target, wire.source)
            if wire.source.role == COORDINATOR and wire.target.role == "worker":
                self.network.send(wire.target, wire.source, Declare(job=self.job))
            self.driver.hand(node, Joined(peer=wire.source))
        else:
            both = self.network.end_wire(wire)
            self.driver.hand(node, Lost(peer=wire.source, reason=item.reason))
            if wire.source.role == COORDINATOR and wire.target in self.nodes:
                self.network.dial(wire.target, COORDINATOR)
            elif both and wire.source in self.nodes and wire.target in self.nodes:
                if wire.target.role == COORDINATOR:
                    self.network.dial(wire.source, COORDINATOR)
                else:
                    self.network.dial(*_dialler(wire.source, wire.target))

    # --- The record ---

    def log(self, text: str) -> None:
        if self.note is not None:
            self.note(f"{self.network.order:5d} {self.now:6.2f}  {text}", None, None)

    def record(self, identity: Identity, event: Any) -> None:
        if isinstance(event, Delivered):
            told = f"{short(event.source)} {type(event.message).__name__} {checksum(event.message)}"
            if self.note is not None:
                prefix = f"{self.network.order:5d} {self.now:6.2f}  {short(event.source)} -> {short(identity)}"
                self.note(prefix, identity, event)
        else:
            told = type(event).__name__
        self.digest.update(f"{self.network.order} {identity} {identity.incarnation} {told}\n".encode())


def _due(event: Event) -> int:
    return event[0]


def _dialler(one: Identity, other: Identity) -> tuple[Identity, Identity]:
    """Workers connect to servers, and of two servers the higher one to the lower."""
    if one.role != other.role:
        return (one, other) if one.role == "worker" else (other, one)
    return (one, other) if one.id > other.id else (other, one)
