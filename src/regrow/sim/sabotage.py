"""What goes wrong, and how much of it: within what the protocol claims to survive, or, on purpose, beyond it.

Within: never would more members of a stripe be lost at once than it has parities, counting every server that is
dead, paused, or not known by everybody to have recovered. Workers, the coordinator, replacements and links may fail
at any time.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from regrow.sim import machines
from regrow.sim.followed import Followed
from regrow.sim.forever import Forever
from regrow.sim.hangs import Hangs, find_method
from regrow.sim.moving import Moving
from regrow.sim.net import COORDINATOR, short
from regrow.sim.parted import Parted
from regrow.sim.vanishing import Vanishing

if TYPE_CHECKING:
    from regrow.sim.nodes import Node
    from regrow.sim.world import World

RECOVERY_RATE = 4.0  # While somebody recovers, faults are so much more likely: that is where the bugs are.
MINOR = ("jump", "coordinator slow", "twice", "echo", "worker hang")  # They excuse nobody from noticing a silence.
CUT_RATE = 2.0  # and while a cut is under way
LOAD_RATE = 8.0  # or records are loaded, which is soon done


class Saboteur:
    def __init__(self, world: World) -> None:
        self.world = world
        self._verdicts: dict[frozenset[int], bool] = {}
        self.left = world.scenario.faults_max
        self.crashes = {"server": 0, "worker": 0, COORDINATOR: 0}
        self.beyond = False  # more may be lost than can come back
        self.certain = False  # and it is, unless something on its way is enough
        self.serious = 0  # faults so far that may keep the coordinator from noticing another
        self.hangs = Hangs(self)
        self.forever = Forever(self)
        self.parted = Parted(self)
        self.moving = Moving(self)
        self.vanishing = Vanishing(self)
        self.followed = Followed(self)

    @property
    def _others(self) -> tuple[object, ...]:
        """Who knows more faults."""
        return (self.hangs, self.forever, self.parted, self.moving, self.vanishing, self.followed)

    @property
    def rate_max(self) -> float:
        """What `rate` is never above."""
        loads = LOAD_RATE if self.world.scenario.profile.loads else 0.0
        return self.world.scenario.fault_rate * max(RECOVERY_RATE, CUT_RATE, loads)

    def rate(self) -> float:
        """How likely the next event is a fault."""
        world = self.world
        if not self.left or self.beyond or not self._has_begun():
            return 0.0
        rate = world.scenario.fault_rate
        if world.loading is not None and not world.loading.done:
            return rate * LOAD_RATE
        if self.down():
            return rate * RECOVERY_RATE
        coordinator = world.node(COORDINATOR)
        return rate * CUT_RATE if coordinator is not None and machines.is_cutting(coordinator.machine) else rate

    def _has_begun(self) -> bool:
        """Before every session has opened once, a failure is one of the start, not of the run."""
        workers = [self.world.node("worker", w) for w in range(self.world.job.workers)]
        return any(node is not None and node.identity.incarnation for node in workers) or all(
            node is not None and node.program is not None and node.program.opened for node in workers
        )

    def stop(self) -> None:
        """The second phase: whoever was paused goes on."""
        for node in self.world.nodes.values():
            if node.paused and not node.hung:
                node.paused = False
                self.hangs.release(node.identity)
            node.crash_after = None
        self.hangs.stop()
        self.parted.stop()
        self.left = 0

    # --- Tolerance ---

    def down(self) -> set[int]:
        """Servers that count as lost."""
        world = self.world
        coordinator = world.node(COORDINATOR)
        # Without a coordinator everybody speaks for himself: the next one asks. One that has asked may have an old
        # answer on its way and judge by that, so a replacement counts once this coordinator knows that it is back.
        recovering = machines.find_recovering(coordinator.machine) if coordinator is not None else set()
        found = set()
        for server in range(world.job.servers):
            node = world.node("server", server)
            healthy = node is not None and not self.hangs.is_away(node) and machines.is_recovered(node.machine)
            if healthy and node is not None and node.identity.incarnation and coordinator is not None:
                healthy = machines.is_known_whole(coordinator.machine, node.identity)
            if not healthy or server in recovering or (node is not None and node.crash_after is not None):
                found.add(server)
        return found | self.parted.find_parted()

    def _find_gone(self) -> set[int]:
        """Servers that are surely not whole, whatever anybody knows."""
        nodes = [(server, self.world.node("server", server)) for server in range(self.world.job.servers)]
        return {server for server, node in nodes if node is None or not machines.is_recovered(node.machine)}

    def _survivable(self, *more: int) -> bool:
        return self.tolerates(self.down() | set(more))

    def tolerates(self, down: set[int]) -> bool:
        """What the job's protection says, remembered: it is asked about the same few sets again and again."""
        key = frozenset(down)
        if key not in self._verdicts:
            self._verdicts[key] = self.world.job.verdict(down).survivable
        return self._verdicts[key]

    # --- What happens ---

    def happen(self, number: int) -> None:
        """A fault by number; one that is not possible now does nothing."""
        if not self.left or self.beyond or not self._has_begun():
            return
        weights = self.world.scenario.profile.weights
        place = number % sum(weight for _, weight in weights)
        for name, weight in weights:
            if place < weight:
                own = getattr(self, "_" + name.replace(" ", "_"), None)
                method = find_method(name)
                others = [getattr(each, method, None) for each in self._others]
                if next(each for each in (own, *others) if each is not None)():
                    self.left -= 1
                    self.serious += name not in MINOR
                return
            place -= weight

    def find_servers(self, *, recovered: bool) -> list[Node]:
        """Servers that may die now."""
        world = self.world
        down = self.down()
        found = []
        for server in range(world.job.servers):
            node = world.node("server", server)
            if node is None or node.crash_after is not None or node.server is None:
                continue
            if (server not in down) != recovered:
                continue
            if world.scenario.profile.beyond or self._survivable(server):
                found.append(node)
        return found

    def _kill(self, node: Node) -> None:
        """Now, or in the middle of what it does next."""
        world = self.world
        role = node.identity.role
        self.crashes[role] += 1
        world.probes.hit(f"crash {role}")
        if role == COORDINATOR and machines.is_cutting(node.machine):
            world.probes.hit("coordinator dies in a cut")
        if role == "server":
            if node.identity.id in self.down():
                world.probes.hit("crash replacement")
            self.note_loss(node)
            if world.node(COORDINATOR) is None:
                world.probes.hit("server and coordinator down")
            workers = [world.node("worker", w) for w in range(world.job.workers)]
            if not all(worker is not None and worker.program and worker.program.opened for worker in workers):
                world.probes.hit("server and worker down")
        effects = world.choices.pick(6)
        if effects and not self.certain:
            node.crash_after = effects
        else:
            world.launcher.crash(node)
        if len(self.down()) > 1:
            world.probes.hit("two servers down")
            if role == COORDINATOR:
                world.probes.hit("coordinator dies with two servers down")
        if len(self.down()) > 2:
            world.probes.hit("three servers down")

    def note_loss(self, node: Node) -> bool:
        """A server is lost: perhaps more than can come back."""
        if not self._survivable(node.identity.id):
            self.beyond = True
            self.certain = not self.tolerates(self._find_gone() | {node.identity.id})
        return True

    def _server(self) -> bool:
        nodes = self.find_servers(recovered=True)
        if nodes:
            self._kill(nodes[self.world.choices.pick(len(nodes))])
        return bool(nodes)

    def _replacement(self) -> bool:
        nodes = self.find_servers(recovered=False)
        if nodes:
            self._kill(nodes[self.world.choices.pick(len(nodes))])
        return bool(nodes)

    def _comeback(self) -> bool:
        """A server dies that has just come back, or did before."""
        nodes = [node for node in self.find_servers(recovered=True) if node.identity.incarnation]
        if nodes:
            self._kill(max(nodes, key=lambda node: node.number))
        return bool(nodes)

    def _pair(self) -> bool:
        first = self._server()
        return self._server() or first

    def _worker(self) -> bool:
        node = self.world.node("worker", self.world.choices.pick(self.world.job.workers))
        if node is None or node.crash_after is not None:
            return False
        self._kill(node)
        return True

    def _coordinator(self) -> bool:
        node = self.world.node(COORDINATOR)
        if node is None or node.crash_after is not None:
            return False
        self._kill(node)
        return True

    def _fall(self) -> bool:
        """Somebody dies, and the launcher ends everybody: no row has a copy elsewhere, all begin again."""
        world = self.world
        if not world.storage.pieces and not world.choices.flag(0.25):
            return False  # to begin again from nothing is seen soon enough
        nodes = [node for node in world.current.values() if node.crash_after is None]
        servers = [node for node in nodes if node.is_server]
        node = servers[world.choices.pick(len(servers))] if servers and world.choices.flag(0.6) else None
        node = node or nodes[world.choices.pick(len(nodes))]
        self.crashes[node.identity.role] += 1
        world.probes.hit("everybody falls")
        self.beyond = node.falls = True
        node.crash_after = world.choices.pick(4) or None
        if node.crash_after is None:
            world.launcher.crash(node)
        return True

    def pause_server(self) -> None:
        """A server is stopped, together with another fault."""
        self.serious += self._pause()

    def _pause(self) -> bool:
        """A server is stopped and goes on later: in time, or as a zombie."""
        world = self.world
        nodes = [node for node in self.find_servers(recovered=True) if not node.paused]
        if not nodes:
            return False
        node = nodes[world.choices.pick(len(nodes))]
        node.paused = True
        world.log(f"{short(node.identity)} is paused")
        check = self.hangs.expect_notice(node.identity)

        def resume() -> None:
            check()
            node.paused = False
            self.hangs.release(node.identity)
            if world.is_current(node.identity) and node.alive:
                world.probes.hit("pause survived")
            world.log(f"{short(node.identity)} goes on")

        world.later(resume, at=world.now + (0.3, 2.5, 6.0)[world.choices.pick(3)])
        return True

    def _reset(self) -> bool:
        world = self.world
        pairs = world.network.pairs()
        if not pairs or not world.job.protection.replaces_servers:
            return False  # without parities a worker takes a broken link for a death
        one, other = pairs[world.choices.pick(len(pairs))]
        keep = world.choices.pick(4)
        world.log(f"the link of {short(one)} and {short(other)} is reset, {keep} frames arrive")
        world.network.reset(one, other, keep)
        world.probes.hit("reset")
        return True

    def _worker_zombie(self) -> bool:
        """A worker hangs, its successor starts, and then it goes on."""
        world = self.world
        node = world.node("worker", world.choices.pick(world.job.workers))
        if node is None or node.paused or node.crash_after is not None:
            return False
        node.paused = True
        world.log(f"{short(node.identity)} hangs and is replaced")
        world.probes.hit("worker zombie")
        world.launcher.start("worker", node.identity.id)

        def resume() -> None:
            node.paused = False

        world.later(resume)
        return True
