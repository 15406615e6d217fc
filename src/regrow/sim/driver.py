"""What the driver of a real process does: hands events to its machine, and carries out what the machine asks for."""

from __future__ import annotations

import traceback
from typing import TYPE_CHECKING, Any

from regrow.core.cut import Save, Unsave
from regrow.core.cuts import WriteManifest
from regrow.core.effects import Condemn, Delivered, Dial, Forget, Log, Notice, Refuse, Replace, Send, Stop, Tick
from regrow.core.identity import Identity
from regrow.core.own_saves import SaveOwn, UnsaveOwn
from regrow.core.paging import Upkeep, UpkeepDue
from regrow.core.session import Connect, PushReceived
from regrow.core.states import ForbiddenMove
from regrow.core.wayback import FetchSaved, FindSaves, Load
from regrow.sim import bounds
from regrow.sim.net import COORDINATOR, short
from regrow.sim.nodes import Node, Violation, name_value

if TYPE_CHECKING:
    from regrow.sim.world import World

TICK_VALUE = name_value(Tick)  # what stands for a tick in the trail


class Driver:
    """One for all nodes of a world."""

    def __init__(self, world: World) -> None:
        self.world = world

    def hand(self, node: Node, event: Any, *, checksum: int | None = None) -> None:
        """Gives an event to a machine and carries out what it asks for. `checksum`: of its message, if known."""
        world = self.world
        world.record(node, event, checksum)
        node.changed = True
        is_checked = node.is_server and type(event) is Delivered
        if is_checked:
            world.checker.before(node, event)
        try:
            effects = node.machine.receive(event)
        except Exception as error:
            raise _blame(node.identity, event, error) from error
        if is_checked:
            world.checker.after(node, event, effects)
        if effects or node.program is not None or world.scenario.bounds:
            self._follow(node, event, effects)

    def hand_tick(self, node: Node, tick: Tick) -> None:
        """The same for a tick of a server or the coordinator: most of them ask for nothing."""
        world = self.world
        world.trail += (world.network.order, node.number, -1, TICK_VALUE)
        try:
            effects = node.machine.receive(tick)
        except Exception as error:
            raise _blame(node.identity, tick, error) from error
        if effects or world.scenario.bounds:
            node.changed = True
            self._follow(node, tick, effects)

    def _follow(self, node: Node, event: Any, effects: list[Any]) -> None:
        """Carries out what a machine asks for."""
        world = self.world
        checks, send, identity = world.checker.sends, world.network.send, node.identity
        if world.scenario.bounds:
            bounds.probe(world.probes, node, event, effects)
        dies = node.crash_after
        if dies is not None and len(effects) <= dies:
            dies = None  # not yet: it dies in the middle of something
        for count, effect in enumerate(effects):
            if count == dies:
                world.probes.hit("crash between effects")
                world.launcher.crash(node)
                return
            if isinstance(effect, Send):
                target, message = effect.target, effect.message
                if type(message) in checks:
                    world.checker.on_send(node, target, message)
                send(identity, target, message)
                continue
            self._carry_out(node, effect)
            if not node.alive:
                return
        if node.program is not None:
            world.agenda.on_worker(node)

    def _carry_out(self, node: Node, effect: Any) -> None:
        identity = node.identity
        if isinstance(effect, Log):
            if self.world.note is not None:
                self.world.log(f"{short(identity)}: {effect.text}")
        elif isinstance(effect, Dial):
            self.world.network.dial(identity, effect.peer)
        elif isinstance(effect, Connect):
            for member in effect.view.servers:
                self.world.network.dial(identity, member.identity)
        elif isinstance(effect, Forget):
            self.forget(node, effect.peer)
        elif isinstance(effect, Refuse):
            self.world.log(f"{short(identity)} refuses {short(effect.target)}: {effect.reason}")
            self.end_refused(effect.target, identity, effect.reason)
            if effect.target in self.world.nodes:
                self.forget(node, effect.target)
        elif isinstance(effect, Stop):
            if self.world.is_current(identity) and not self.world.lost and identity not in self.world.condemned:
                raise Violation("stop", f"{short(identity)} stops: {effect.reason}")
            self.world.probes.hit("zombie stops")
            self.world.launcher.end(node, f"stops: {effect.reason}")
        elif isinstance(effect, Replace | Condemn) and not self.world.is_current(identity):
            self.world.probes.hit("zombie gives orders")  # the launcher does not listen to one
        elif isinstance(effect, Replace):
            self.world.sabotage.hangs.check_suspicion(effect.peer, effect.reason)
            self.world.sabotage.parted.check_suspicion(effect.peer, effect.reason)
            self.world.condemned.add(effect.peer)
            self.world.agenda.void()
            self.world.later(lambda: self.world.launcher.replace(effect.peer, effect.reason))
        elif isinstance(effect, Condemn):
            self.world.condemned.add(effect.peer)
            self.world.later(lambda: self.world.launcher.condemn(effect.peer, effect.reason))
        elif isinstance(effect, Save | Unsave | WriteManifest | Load | Notice):
            self._store(node, effect)
        elif isinstance(effect, SaveOwn | UnsaveOwn | FindSaves | FetchSaved):
            self._save_own(node, effect)
        elif isinstance(effect, PushReceived):
            pass
        elif isinstance(effect, Upkeep):
            self.world.later(lambda: self.hand(node, UpkeepDue()) if node.alive else None, of=node)
        elif node.program is not None:
            if problem := node.program.hear(effect):
                raise Violation("I7" if self.world.job.mode == "sync" else "I3", problem)
            if (
                node.program.failed
                and not self.world.lost
                and not self.world.falling
                and self.world.is_current(identity)
            ):
                raise Violation("failed", f"{short(identity)}: {node.program.failed}")
        else:
            raise Violation("core", f"{short(identity)}: an effect nobody knows: {effect}")

    def _store(self, node: Node, effect: Save | Unsave | WriteManifest | Load | Notice) -> None:
        storage = self.world.storage
        if isinstance(effect, Save):
            storage.save(node, effect)
        elif isinstance(effect, Unsave):
            storage.unsave(node, effect.number)
        elif isinstance(effect, WriteManifest):
            storage.write_manifest(node, effect)
        elif isinstance(effect, Load):
            storage.load(node, effect)
        elif effect.name == "joined":
            self.world.own_storage.on_joined(node, effect)
        else:
            storage.notice(node, effect)

    def _save_own(self, node: Node, effect: SaveOwn | UnsaveOwn | FindSaves | FetchSaved) -> None:
        storage = self.world.own_storage
        if isinstance(effect, SaveOwn):
            storage.save(node, effect)
        elif isinstance(effect, UnsaveOwn):
            storage.unsave(node, effect.number)
        elif isinstance(effect, FindSaves):
            storage.find(node, effect)
        else:
            storage.fetch(node, effect)

    def forget(self, node: Node, peer: Identity) -> None:
        late = self.world.network.forget(node.identity, peer)
        if late and not self.world.calm and self.world.choices.flag(0.3):
            # Read from the socket already when the link was dropped: the machine itself must fence it off.
            message = late[self.world.choices.pick(len(late))]

            def arrive() -> None:
                if node.alive:
                    self.world.probes.hit("old frame")
                    self.hand(node, Delivered(source=peer, message=message))

            self.world.later(arrive)

    def end_refused(self, who: Identity, whom: Identity, reason: str) -> None:
        """A process that the coordinator will not have ends; others only lose the link."""
        if self.world.is_current(who) and who not in self.world.condemned:
            raise Violation("refusal", f"{short(whom)} refuses {short(who)}: {reason}")
        if (node := self.world.nodes.get(who)) is not None and (whom.role == COORDINATOR or who.role == "worker"):
            self.world.probes.hit("zombie stops")
            self.world.launcher.end(node, "is refused and ends")


def _blame(identity: Identity, event: Any, error: Exception) -> Violation:
    """What it means that a machine raised."""
    if isinstance(error, ForbiddenMove):
        return Violation("moves", f"{short(identity)} at {_describe(event)}: {error}")
    where = "".join(traceback.format_exception(error)[-3:])
    return Violation("core", f"{short(identity)} raised at {_describe(event)}: {where}")


def _describe(event: Any) -> str:
    if isinstance(event, Delivered):
        return f"{type(event.message).__name__} of {short(event.source)}"
    return type(event).__name__
