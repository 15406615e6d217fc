"""The simulated cluster: real machines, and a scheduler that may let any enabled event be next.

Everything that can happen waits in a queue ordered by age; the tape says which place of the queue is next, so all
zeros is a fair and quiet run. There are two phases: in the first the tape rules and things go wrong; in the second
nothing fails any more and everything must come to its end.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Callable
from typing import Any

from regrow.core.cut import TENANTS
from regrow.core.effects import (
    Delivered,
    Joined,
    Lost,
    Tick,
)
from regrow.core.groups import make_groups
from regrow.core.identity import Identity
from regrow.core.messages import Declare, Message
from regrow.errors import RegrowError
from regrow.sim import machines
from regrow.sim.agenda import Agenda
from regrow.sim.checkers import Checker
from regrow.sim.choices import FAULT, Choices
from regrow.sim.cuts import Start, Storage
from regrow.sim.driver import Driver
from regrow.sim.dumps import Loading
from regrow.sim.followed import FollowedLauncher
from regrow.sim.launcher import Launcher
from regrow.sim.moving import MovingLauncher
from regrow.sim.net import COORDINATOR, Item, Network, Wire, checksum, short
from regrow.sim.nodes import Action, Node, Violation, name_value
from regrow.sim.own_saves import OwnStorage
from regrow.sim.paged import Disk, Disks
from regrow.sim.probes import Probes
from regrow.sim.profiles import CutScenario, Scenario
from regrow.sim.reference import make_reference
from regrow.sim.sabotage import Saboteur
from regrow.sim.supervised import SupervisedLauncher

CHAOS_EVENTS_MAX = 3000
CALM_EVENTS_MAX = 9_000  # A run that needs more does not come to its end.
HANG_SECONDS_MAX = 20.0  # more, where somebody may hang for good, and in a row
CALM_SECONDS_MAX = 10.0  # for workers, whatever is still coming back in the background
CLOCK_EVENTS = 25  # between two ticks, if the queue is never empty


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
        disks: list[Disk] | None = None,
    ) -> None:
        self.scenario = scenario
        self.start = start  # the checkpoint that this run begins with
        self.job = scenario.job
        self.groups = make_groups(scenario.job)
        self.choices = choices
        self.probes = probes
        self.note = note
        self.reference = make_reference(
            scenario.job,
            steps=scenario.steps,
            rows_seed=scenario.rows_seed,
            assigned=scenario.assigned,
            changes_rates=scenario.profile.rates,
        )
        self.agenda = Agenda(self)
        self.network = Network(
            self._delay,
            on_filled=self.agenda.on_filled,
            on_changed=self.agenda.void,
            on_opened=self.agenda.void_tick,
        )
        self.nodes: dict[Identity, Node] = {}
        self.numbers: dict[Identity, int] = {}  # of all nodes that ever were, in the order they started
        self.newest: dict[tuple[str, int], int] = {}
        self.current: dict[tuple[str, int], Node] = {}  # the newest incarnations, where they run
        self.condemned: set[Identity] = set()  # the coordinator counts them as dead
        self.actions: list[Action] = []
        self.loading = Loading(self.agenda.void) if scenario.profile.loads else None
        self.now = 0.0
        self.clock_due = CLOCK_EVENTS
        self.heard: dict[int, float] = {}
        self.calm = False
        self.lost = ""  # what the coordinator says is gone for good
        self.trail: list[int] = []  # who got what in which event: `digest`
        self.driver = Driver(self)
        supervised = scenario.profile.supervised
        self.launcher = _make_launcher(self)
        self._calm_seconds_max = CALM_SECONDS_MAX + (HANG_SECONDS_MAX if supervised or scenario.profile.parts else 0.0)
        self.sabotage = Saboteur(self)
        self.checker = Checker(self)
        self.storage = Storage(self)
        self.own_storage = OwnStorage(self)
        self.disks = Disks(self, disks) if scenario.profile.paged else None
        self.falling = False  # a death will be the end of everybody
        self._lanes = {(kind, server): delay for kind, server, delay in scenario.lanes}
        self._worker_places = [("worker", index) for index in range(self.job.workers)]
        self._actions_made = 0
        self._calm_since = 0.0
        self._leaps = False
        self.launcher.start(COORDINATOR, 0)
        for index in range(self.job.servers):
            self.launcher.start("server", index)
        for index in range(self.job.workers):
            self.launcher.start("worker", index)

    # --- The two phases ---

    def run(self) -> None:
        """Raises Violation, or Fallen."""
        if self.disks is not None:
            self.disks.check_start()
        self._run_chaos()
        self.calm = True
        self._calm_since = self.now
        self._lanes = {}
        self.sabotage.stop()
        limit = self.network.order + CALM_EVENTS_MAX
        while self.network.order % 8 or not self.is_finished():
            if self.network.order > limit:
                raise Violation("I8", f"no end after {CALM_EVENTS_MAX} quiet events: {self.find_unfinished()}")
            if self.now > self._calm_since + self._calm_seconds_max and not self.workers_done():
                raise Violation("I8", f"workers wait for the background: {self.find_unfinished()}")
            self._step()
        self._drain()
        self.checker.at_end()
        self.storage.check_end()

    def _run_chaos(self) -> None:
        """The first phase: all that the tape chooses. Nearly all events of a run are chosen here."""
        network, agenda, choices, scenario = self.network, self.agenda, self.choices, self.scenario
        rate, rate_max = self.sabotage.rate, self.sabotage.rate_max
        while network.order % 8 or not self.is_finished():
            if network.order >= CHAOS_EVENTS_MAX or choices.exhausted:
                return
            count = agenda.count()
            value = choices.pick_event(count, eager=scenario.eager, fault=rate, fault_max=rate_max)
            network.order += 1
            if value >= FAULT:
                agenda.void()
                self.sabotage.happen(value - FAULT)
                continue
            happen, what = agenda.take(value % count)
            happen(what)
            if scenario.cuts is not None:
                self.storage.supervise()

    def is_finished(self) -> bool:
        if self.falling:
            return False
        if self.lost:
            nodes = [self.node("worker", w) for w in range(self.job.workers)]
            return all(node is not None and node.program is not None and node.program.failed for node in nodes)
        # Even beyond tolerance what was on its way may have been enough; then everything must be right all the same.
        return self.workers_done() and not self.find_unfinished(first=True)

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
        for place in self._worker_places:
            node = self.current.get(place)
            if node is None or node.program is None or not node.program.done:
                return False
        return True

    def _drain(self) -> None:
        """Lets everything that is on its way arrive, without the clock."""
        for _ in range(CALM_EVENTS_MAX):
            if (oldest := self.agenda.take_oldest()) is None:
                return
            self.network.order += 1
            oldest[0](oldest[1])
        raise Violation("I8", "messages without end")

    # --- The scheduler ---

    def _step(self) -> None:
        """The second phase: what has waited longest is next."""
        self.agenda.count()
        self.network.order += 1
        happen, what = self.agenda.take(0)
        happen(what)
        if self.scenario.cuts is not None:
            self.storage.supervise()

    def tick(self, _: Any) -> None:
        if not self.calm:
            seconds = (0.05, 0.01, 0.2, 0.4)[self.choices.pick(4, dull=0.7)]
        elif not self.workers_done() or self._is_cutting():
            seconds = 0.05
        else:
            # Nobody waits for the workers any more: what is left is slow on purpose, so time may run. A coordinator
            # takes every long step for a pause of its own, so only every other one is long.
            self._leaps = not self._leaps
            seconds = 8.0 if self._leaps else 0.4
        self.agenda.pass_time(self.now + seconds)
        self.now += seconds
        self.clock_due = self.network.order + CLOCK_EVENTS
        self._hand_ticks()
        self.launcher.tick()
        self.checker.often()
        self.sabotage.hangs.check_cut()

    def _hand_ticks(self) -> None:
        hangs, hand = self.sabotage.hangs, self.driver.hand_tick
        tick = Tick(now=self.now)
        for node in list(self.nodes.values()):
            if node.program is not None or not node.alive or node.paused or node.starved:
                continue
            if node.is_server or hangs.gets_tick(node):
                hand(node, Tick(now=hangs.read_clock(node)) if hangs.has_clocks else tick)

    def _is_cutting(self) -> bool:
        coordinator = self.node(COORDINATOR)
        return coordinator is not None and machines.is_cutting(coordinator.machine)

    def later(self, what: Callable[[], None], *, at: float = 0.0, of: Node | None = None) -> None:
        """The launcher or chance does this after a while that the tape decides."""
        delay = 0 if self.calm else (0, 10, 40, 150)[self.choices.pick(4)]
        self._actions_made += 1
        action = Action(self.network.order + delay, what, self._actions_made, at, of)
        self.actions.append(action)
        self.agenda.on_action(action)

    def act_out(self, action: Action) -> None:
        self.actions.remove(action)
        if action.of is None:
            self.agenda.void()  # whatever it does; what a process does by itself is handed over like anything else
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

    def act(self, node: Node) -> None:
        program = node.program
        assert program is not None
        program.since = self.network.order
        self.driver.hand(node, program.act())

    def connect(self, pair: tuple[Identity, Identity, Identity | str]) -> None:
        self.agenda.void()
        who, whom, dialled = pair
        del self.network.dials[who, dialled]
        if (whom, who) in self.network.forgotten:
            self.driver.end_refused(who, whom, "it was replaced")
            return
        self.network.connect(who, whom)
        self.driver.hand(self.nodes[whom], Joined(peer=who))

    def deliver_frame(self, wire: Wire, item: Item) -> None:
        """A frame arrives at the link of its target, which knows whether it is to be delivered."""
        message, source = item.message, wire.source
        assert message is not None
        try:
            taken = self.network.accept(wire, item)
        except RegrowError as error:
            raise Violation("link", f"{short(source)} to {short(wire.target)}: {error}") from error
        if not taken:
            return
        if message.SECTION_FIELDS and checksum(message) != item.checksum:
            raise Violation("payload", f"{type(message).__name__} of {short(source)} changed on its way")
        target = wire.target
        if source.role == "server":
            if target.role == COORDINATOR and self.is_current(target):
                self.heard[source.id] = self.now
                self.agenda.void_tick()
            if not self.is_current(source):
                self.probes.hit("zombie sends")
        self.driver.hand(self.nodes[target], Delivered(source=source, message=message), checksum=item.checksum)

    def deliver(self, wire: Wire) -> None:
        item = wire.items.popleft()
        if wire.items:
            self.agenda.on_filled(wire)
        if item.kind == "frame":
            self.deliver_frame(wire, item)
            return
        node = self.nodes[wire.target]
        if item.kind == "ack":
            self.probes.hit("bound: frames unacknowledged")
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

    def note_capture(self, identity: Identity, tenant: int, full: bool) -> None:
        """A server is about to capture its rows, for a cut or a save of its own."""
        if tenant in TENANTS:
            self.storage.note_capture(identity, full)
        else:
            self.own_storage.note_capture(identity)

    # --- The record ---

    def log(self, text: str) -> None:
        if self.note is not None:
            self.note(f"{self.network.order:5d} {self.now:6.2f}  {text}", None, None)

    def record(self, node: Node, event: Any, checked: int | None) -> None:
        """One line of the trail. `checked`: the checksum of what was delivered, if it is known."""
        kind = type(event)
        if kind is Delivered:
            value = checked if checked is not None else checksum(event.message)
            self.trail += (self.network.order, node.number, self.numbers[event.source], value)
            if self.note is not None:
                prefix = f"{self.network.order:5d} {self.now:6.2f}  {short(event.source)} -> {short(node.identity)}"
                self.note(prefix, node.identity, event)
        else:
            value = _EVENTS.get(kind, 0) or _EVENTS.setdefault(kind, name_value(kind))
            self.trail += (self.network.order, node.number, -1, value)

    @property
    def digest(self) -> str:
        """Of all that was handed to anybody: equal for equal runs."""
        return hashlib.blake2b(array("q", self.trail).tobytes(), digest_size=8).hexdigest()


def _make_launcher(world: World) -> Launcher:
    profile = world.scenario.profile
    if profile.moves:
        return MovingLauncher(world)
    if profile.followed:
        return FollowedLauncher(world)
    return SupervisedLauncher(world) if profile.supervised else Launcher(world)


_EVENTS: dict[type, int] = {}  # a number for the name of each kind of event


def _dialler(one: Identity, other: Identity) -> tuple[Identity, Identity]:
    """Workers connect to servers, and of two servers the higher one to the lower."""
    if one.role != other.role:
        return (one, other) if one.role == "worker" else (other, one)
    return (one, other) if one.id > other.id else (other, one)
