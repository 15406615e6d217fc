"""The simulated cluster: real machines, and a scheduler that may let any enabled event be next.

Everything that can happen waits in a queue ordered by age; the tape says which place of the queue is next, so all
zeros is a fair and quiet run. There are two phases: in the first the tape rules and things go wrong; in the second nothing
fails any more and everything must come to its end. What the launcher does (it sees processes end and starts their
successors) is modelled here; the launcher itself never fails.
"""

from __future__ import annotations

import dataclasses
import hashlib
import traceback
from collections.abc import Callable
from typing import Any

from regrow.core.effects import Delivered, Dial, Died, Forget, Joined, Log, Lost, Notice, Refuse, Replace, Send, Stop, Tick
from regrow.core.groups import Groups
from regrow.core.link import Identity
from regrow.core.messages import Declare, Message
from regrow.core.session import Connect, PushReceived
from regrow.errors import RegrowError
from regrow.sim import machines
from regrow.sim.choices import FAULT, Choices
from regrow.sim.net import COORDINATOR, Network, Wire, checksum, short
from regrow.sim.probes import Probes
from regrow.sim.profiles import Scenario
from regrow.sim.reference import make_reference
from regrow.sim.workers import Program

CHAOS_EVENTS_MAX = 3000
CALM_EVENTS_MAX = 20_000  # A run that needs more does not come to its end.
CLOCK_EVENTS = 25  # between two ticks, if the queue is never empty
SILENT_SECONDS_MAX = 0.9  # The clock waits for healthy servers to be heard, so that none is declared dead by accident.


class Violation(Exception):
    """An invariant does not hold."""

    def __init__(self, invariant: str, text: str) -> None:
        super().__init__(f"{invariant}: {text}")
        self.invariant = invariant


@dataclasses.dataclass(slots=True)
class Node:
    """A process: its machine, and whether it runs."""

    identity: Identity
    machine: Any
    program: Program | None = None
    alive: bool = True
    paused: bool = False
    crash_after: int | None = None  # dies after so many effects of its next event


@dataclasses.dataclass(slots=True)
class Action:
    """Something that the launcher or chance will do."""

    due: int
    what: Callable[[], None]
    at: float = 0.0  # not before this time


class World:
    def __init__(
        self, scenario: Scenario, choices: Choices, *, probes: Probes, note: Callable[[str, Identity | None, Any], None] | None = None
    ) -> None:
        from regrow.sim.checkers import Checker
        from regrow.sim.faults import Faults

        self.scenario = scenario
        self.job = scenario.job
        self.groups = Groups(scenario.job)
        self.choices = choices
        self.probes = probes
        self.note = note
        self.reference = make_reference(scenario.job, steps=scenario.steps, rows_seed=scenario.rows_seed)
        self.network = Network(self._delay)
        self.nodes: dict[Identity, Node] = {}
        self.newest: dict[tuple[str, int], int] = {}
        self.current: dict[tuple[str, int], Node] = {}  # the newest incarnations, where they run
        self.condemned: set[Identity] = set()  # the coordinator counts them as dead
        self.actions: list[Action] = []
        self.now = 0.0
        self.clock_due = CLOCK_EVENTS
        self.heard: dict[int, float] = {}
        self.calm = False
        self.lost = ""  # what the coordinator says is gone for good
        self.digest = hashlib.blake2b(digest_size=8)
        self.faults = Faults(self)
        self.checker = Checker(self)
        self._lanes = {(kind, server): delay for kind, server, delay in scenario.lanes}
        self._calm_since = 0.0
        self.start(COORDINATOR, 0)
        for index in range(self.job.servers):
            self.start("server", index)
        for index in range(self.job.workers):
            self.start("worker", index)

    # --- The two phases ---

    def run(self) -> None:
        """Raises Violation."""
        while self.network.order % 8 or not self.finished():
            if self.network.order >= CHAOS_EVENTS_MAX or self.choices.exhausted:
                break
            self._step()
        self.calm = True
        self._calm_since = self.now
        self._lanes = {}
        self.faults.stop()
        limit = self.network.order + CALM_EVENTS_MAX
        while self.network.order % 8 or not self.finished():
            if self.network.order > limit:
                raise Violation("I8", f"no end after {CALM_EVENTS_MAX} quiet events: {self.unfinished()}")
            self._step()
        self._drain()
        self.checker.at_end()

    def finished(self) -> bool:
        if self.lost:
            return all(self.worker(w).program.failed for w in range(self.job.workers))  # type: ignore[union-attr]
        return not self.unfinished(first=True)

    def unfinished(self, *, first: bool = False) -> list[str]:
        """What there is still to wait for."""
        waits: list[str] = []
        if self.actions:
            waits.append(f"{len(self.actions)} actions of the launcher")
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
            elif role == "server" and (reason := machines.unsettled_reason(node.machine)):
                waits.append(f"{name} {reason}")
            elif role == COORDINATOR and (reason := machines.unsettled_view_reason(node.machine)):
                waits.append(f"{name} {reason}")
        return waits

    def _drain(self) -> None:
        """Lets everything that is on its way arrive, without the clock."""
        for _ in range(CALM_EVENTS_MAX):
            ready = [event for event in self._ready() if event[1] != self._tick]
            if not ready:
                return
            self.network.order += 1
            ready[0][1]()
        raise Violation("I8", "messages without end")

    # --- The scheduler ---

    def _step(self) -> None:
        ready = self._ready()
        value = 0
        if not self.calm:
            scenario = self.scenario
            value = self.choices.pick_event(len(ready), eager=scenario.eager, fault=self.faults.rate())
        self.network.order += 1
        if value >= FAULT:
            self.faults.happen(value - FAULT)
            return
        ready[value % len(ready)][1]()

    def _ready(self) -> list[tuple[int, Callable[[], None]]]:
        """All that can happen next, oldest first."""
        nodes = self.nodes
        paused = [node.identity for node in nodes.values() if node.paused]
        ready: list[tuple[int, Callable[[], None]]] = []
        for wire in self.network.wires.values():
            if wire.items and (not paused or wire.target not in paused):
                ready.append((wire.items[0].due, lambda wire=wire: self._deliver(wire)))  # type: ignore[misc]
        for node in nodes.values():
            if node.program is not None and not node.paused and node.program.can_act():
                ready.append((node.program.since, lambda node=node: self._act(node)))  # type: ignore[misc]
        for (who, whom), due in self.network.dials.items():
            if (peer := self._can_dial(who, whom)) is not None:
                ready.append((due, lambda who=who, peer=peer, whom=whom: self._connect(who, peer, whom)))  # type: ignore[misc]
        for action in self.actions:
            if action.at <= self.now:
                ready.append((action.due, lambda action=action: self._act_out(action)))  # type: ignore[misc]
        if not ready or self._may_tick():
            ready.append((self.clock_due, self._tick))
        ready.sort(key=lambda event: event[0])
        return ready

    def _may_tick(self) -> bool:
        coordinator = self.node(COORDINATOR)
        if coordinator is None:
            return True
        for server in range(self.job.servers):
            node = self.node("server", server)
            if node is None or node.paused or node.identity in self.condemned:
                continue
            if self.now > self.heard.get(server, self.now) + SILENT_SECONDS_MAX:
                return False
            if server in self.heard and (coordinator.identity, node.identity) not in self.network.open:
                return False  # a connection that stays closed counts as a death
        return True

    def _tick(self) -> None:
        step = 0 if self.calm else self.choices.pick(4, dull=0.7)
        self.now += (0.05, 0.01, 0.2, 0.4)[step]
        self.clock_due = self.network.order + CLOCK_EVENTS
        for node in list(self.nodes.values()):
            if node.alive and not node.paused and node.program is None:
                self.hand(node, Tick(now=self.now))
        self.checker.often()

    def later(self, what: Callable[[], None], *, at: float = 0.0) -> None:
        """The launcher or chance does this after a while that the tape decides."""
        delay = 0 if self.calm else (0, 10, 40, 150)[self.choices.pick(4)]
        self.actions.append(Action(self.network.order + delay, what, at))

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

    def is_current(self, identity: Identity) -> bool:
        return self.newest.get((identity.role, identity.id)) == identity.incarnation

    def start(self, role: str, index: int) -> None:
        """The launcher starts the next incarnation."""
        incarnation = self.newest.get((role, index), -1) + 1
        identity = Identity(role=role, id=index, incarnation=incarnation)
        self.newest[role, index] = incarnation
        if role == "worker":
            program = Program(index, self.scenario, self.reference)
            node = Node(identity, program.session, program)
        elif role == "server":
            node = Node(identity, machines.make_server(identity))
        else:
            node = Node(identity, machines.make_coordinator(identity, self.job))
        self.nodes[identity] = self.current[role, index] = node
        self.heard.pop(index, None) if role == "server" else None
        self.log(f"{short(identity)} starts")
        if role != COORDINATOR:
            self.network.dial(identity, COORDINATOR)
        self.checker.on_start(node)

    def crash(self, node: Node) -> None:
        """The process ends at once; the launcher sees it after a while."""
        if not node.alive:
            return
        self._end(node, "dies")
        self.later(lambda: self._ended(node.identity))

    def _end(self, node: Node, how: str) -> None:
        self.log(f"{short(node.identity)} {how}")
        node.alive = False
        del self.nodes[node.identity]
        if self.node(node.identity.role, node.identity.id) is node:
            del self.current[node.identity.role, node.identity.id]
        self.checker.on_end(node)

        def keeps(count: int) -> int:
            # How much of what it wrote was still in its own buffers is chance.
            return count if self.calm or not count else count - self.choices.pick(count + 1, dull=0.7)

        for peer in self.network.crashed(node.identity, keeps):
            if peer not in self.nodes:
                self.network.wires.pop((node.identity, peer), None)

    def _ended(self, identity: Identity) -> None:
        """The launcher has seen a process end: it tells the coordinator, and starts the successor."""
        if not self.is_current(identity):
            return
        coordinator = self.node(COORDINATOR)
        if coordinator is not None and identity.role != COORDINATOR and not (not self.calm and self.choices.flag(0.2)):
            self.hand(coordinator, Died(peer=identity))
        if self.is_current(identity):
            self.later(lambda: self.is_current(identity) and self.start(identity.role, identity.id))  # type: ignore[func-returns-value]

    def _replace(self, identity: Identity, reason: str) -> None:
        """The coordinator counts a server as dead: what is left of it is ended, if it can be reached."""
        if not self.is_current(identity):
            return
        node = self.nodes.get(identity)
        self.log(f"the launcher replaces {short(identity)}: {reason}")
        if node is not None and node.paused:
            self.probes.hit("silence")
            if not self.calm and self.choices.flag(0.6):
                self.start(identity.role, identity.id)  # out of reach: a zombie
                return
        if node is not None:
            self._end(node, "is ended by the launcher")
        self.start(identity.role, identity.id)

    # --- What happens ---

    def _act(self, node: Node) -> None:
        program = node.program
        assert program is not None
        program.since = self.network.order
        self.hand(node, program.act())

    def _can_dial(self, who: Identity, whom: Identity | str) -> Identity | None:
        if isinstance(whom, str):
            coordinator = self.node(COORDINATOR)
            if coordinator is None or (who, coordinator.identity) in self.network.wires:
                return None
            whom = coordinator.identity
        node = self.nodes.get(who)
        if whom not in self.nodes or node is None or node.paused or (who, whom) in self.network.wires:
            return None
        if (whom, who) in self.network.wires:
            return None
        if (whom, who) in self.network.forgotten and whom.role != COORDINATOR:
            return None
        return whom

    def _connect(self, who: Identity, whom: Identity, dialled: Identity | str) -> None:
        del self.network.dials[who, dialled]
        if (whom, who) in self.network.forgotten:
            self._refused(who, whom, "it was replaced")
            return
        self.network.connect(who, whom)
        self.hand(self.nodes[whom], Joined(peer=who))

    def _refused(self, who: Identity, whom: Identity, reason: str) -> None:
        """A process that the coordinator will not have ends; others only lose the link."""
        if self.is_current(who) and who not in self.condemned:
            raise Violation("refusal", f"{short(whom)} refuses {short(who)}: {reason}")
        if (node := self.nodes.get(who)) is not None and (whom.role == COORDINATOR or who.role == "worker"):
            self.probes.hit("zombie stops")
            self._end(node, "is refused and ends")

    def _deliver(self, wire: Wire) -> None:
        item = wire.items.popleft()
        node = self.nodes[wire.target]
        if item.kind == "frame":
            assert item.message is not None
            if not self.network.accept(wire, item):
                return
            if checksum(item.message) != item.checksum:
                raise Violation("payload", f"{type(item.message).__name__} of {short(wire.source)} changed on its way")
            if wire.target.role == COORDINATOR and wire.source.role == "server":
                self.heard[wire.source.id] = self.now
            if not self.is_current(wire.source) and wire.source.role == "server":
                self.probes.hit("zombie sends")
            self.hand(node, Delivered(source=wire.source, message=item.message))
        elif item.kind == "ack":
            self.network.accept(wire, item)
        elif item.kind == "opened":
            self.network.opened(wire.target, wire.source)
            if wire.source.role == COORDINATOR and wire.target.role == "worker":
                self.network.send(wire.target, wire.source, Declare(job=self.job))
            self.hand(node, Joined(peer=wire.source))
        else:
            both = self.network.lost(wire)
            self.hand(node, Lost(peer=wire.source, reason=item.reason))
            if wire.source.role == COORDINATOR and wire.target in self.nodes:
                self.network.dial(wire.target, COORDINATOR)
            elif both and wire.source in self.nodes and wire.target in self.nodes:
                if wire.target.role == COORDINATOR:
                    self.network.dial(wire.source, COORDINATOR)
                else:
                    self.network.dial(*_dialler(wire.source, wire.target))

    def hand(self, node: Node, event: Any) -> None:
        """Gives an event to a machine and carries out what it asks for."""
        identity = node.identity
        self._record(identity, event)
        self.checker.before(node, event)
        try:
            effects = node.machine.receive(event)
        except (RegrowError, AssertionError, LookupError, ValueError, TypeError, AttributeError, ArithmeticError) as error:
            where = "".join(traceback.format_exception(error)[-3:])
            raise Violation("core", f"{short(identity)} raised at {_told(event)}: {where}") from error
        self.checker.after(node, event, effects)
        dies, node.crash_after = node.crash_after, None
        for count, effect in enumerate(effects):
            if dies is not None and count >= dies:
                self.probes.hit("crash between effects")
                break
            self._carry_out(node, effect)
            if not node.alive:
                return
        if dies is not None:
            self.crash(node)

    def _carry_out(self, node: Node, effect: Any) -> None:
        identity = node.identity
        if isinstance(effect, Send):
            self.checker.on_send(node, effect.target, effect.message)
            self.network.send(identity, effect.target, effect.message)
        elif isinstance(effect, Dial):
            self.network.dial(identity, effect.peer)
        elif isinstance(effect, Connect):
            for member in effect.view.servers:
                self.network.dial(identity, Identity(role="server", id=member.id, incarnation=member.incarnation))
        elif isinstance(effect, Forget):
            self._forget(node, effect.peer)
        elif isinstance(effect, Refuse):
            self.log(f"{short(identity)} refuses {short(effect.target)}: {effect.reason}")
            self._refused(effect.target, identity, effect.reason)
            if effect.target in self.nodes:
                self._forget(node, effect.target)
        elif isinstance(effect, Stop):
            if self.is_current(identity) and not self.lost and identity not in self.condemned:
                raise Violation("stop", f"{short(identity)} stops: {effect.reason}")
            self.probes.hit("zombie stops")
            self._end(node, f"stops: {effect.reason}")
        elif isinstance(effect, Replace):
            self.condemned.add(effect.peer)
            self.later(lambda: self._replace(effect.peer, effect.reason))
        elif isinstance(effect, Log):
            self.log(f"{short(identity)}: {effect.text}")
        elif isinstance(effect, Notice | PushReceived):
            pass
        elif node.program is not None:
            if problem := node.program.hear(effect):
                raise Violation("I7" if self.job.mode == "sync" else "I3", problem)
            if node.program.failed and node.machine.view is None and self.is_current(identity):
                self.crash(node)  # the coordinator died before it had said anything: the launcher starts it again
            elif node.program.failed and not self.lost and self.is_current(identity):
                raise Violation("failed", f"{short(identity)}: {node.program.failed}")
        else:
            raise Violation("core", f"{short(identity)}: an effect nobody knows: {effect}")

    def _forget(self, node: Node, peer: Identity) -> None:
        late = self.network.forget(node.identity, peer)
        if late and not self.calm and self.choices.flag(0.3):
            # Read from the socket already when the link was dropped: the machine itself must fence it off.
            message = late[self.choices.pick(len(late))]

            def arrive() -> None:
                if node.alive:
                    self.probes.hit("old frame")
                    self.hand(node, Delivered(source=peer, message=message))

            self.later(arrive)

    # --- The record ---

    def log(self, text: str) -> None:
        if self.note is not None:
            self.note(f"{self.network.order:5d} {self.now:6.2f}  {text}", None, None)

    def _record(self, identity: Identity, event: Any) -> None:
        if isinstance(event, Delivered):
            told = f"{short(event.source)} {type(event.message).__name__} {checksum(event.message)}"
            if self.note is not None:
                prefix = f"{self.network.order:5d} {self.now:6.2f}  {short(event.source)} -> {short(identity)}"
                self.note(prefix, identity, event)
        else:
            told = type(event).__name__
        self.digest.update(f"{self.network.order} {identity} {identity.incarnation} {told}\n".encode())


def _dialler(one: Identity, other: Identity) -> tuple[Identity, Identity]:
    """Workers connect to servers, and of two servers the higher one to the lower."""
    if one.role != other.role:
        return (one, other) if one.role == "worker" else (other, one)
    return (one, other) if one.id > other.id else (other, one)


def _told(event: Any) -> str:
    if isinstance(event, Delivered):
        return f"{type(event.message).__name__} of {short(event.source)}"
    return type(event).__name__
