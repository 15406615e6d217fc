"""A small cluster of real machines whose messages wait until a scenario delivers them.

`Cluster.run("deliver S0->S2")` carries out one command and returns what is to be read of it: messages as they arrive,
and what the machines have to say. README.md lists the commands. Nothing here knows the protocol: whatever is decided,
a machine decides.
"""

from __future__ import annotations

import contextlib
import fnmatch
from typing import Any

import numpy as np
from helpers import job as make_job
from helpers import plan_of, table
from scenarios import look
from scenarios.shows import CHATTER, Node, Shows, World, fits
from scenarios.wires import Pair
from scenarios.words import COLUMNS, contents, gradient, marks, name

from regrow.core.cut import Save, Saved, Unsave
from regrow.core.cuts import CutNow, ManifestWritten, WriteManifest
from regrow.core.effects import (
    Delivered,
    Dial,
    Died,
    Forget,
    Joined,
    Log,
    Lost,
    Notice,
    Refuse,
    Replace,
    Send,
    Stop,
    Tick,
)
from regrow.core.identity import Identity
from regrow.core.job import JobSpec
from regrow.core.messages import Beat, Declare
from regrow.core.protection import FlushSpec
from regrow.core.session import (
    Connect,
    Failed,
    PullAnswered,
    PullWanted,
    PushDurable,
    PushReceived,
    PushWanted,
    SessionOpened,
)

TICK_SECONDS = 0.25
DELIVERIES_MAX = 2000  # A cluster that talks longer than this will not fall silent.
SETTLE_TICKS_MAX = 60


class ScenarioError(Exception):
    """A command that makes no sense; says which, and why."""


class Cluster:
    """One door: `lines = cluster.run(command)`. It is made with the options of the command `cluster`."""

    def __init__(self, options: list[str], stack: contextlib.ExitStack) -> None:
        self._lines: list[str] = []
        self._quiet = False
        self._dials: dict[Pair, None] = {}
        self._unplugged: dict[tuple[str, str], None] = {}
        self._holds: list[tuple[str, str, str]] = []  # patterns of source, target and kind
        self._manifest: int | None = None  # of a cut that waits to be written
        self._now = 0.0
        given = dict(option.split("=") for option in options)
        self._cuts = given.pop("cuts", "no") == "yes"
        if given.pop("batch", "all") == "1":
            stack.enter_context(look.one_row_at_a_time())
        if ahead := int(given.pop("ahead", 0)):
            stack.enter_context(look.cuts_named_ahead(ahead))
        if unanswered := int(given.pop("unanswered", 0)):
            stack.enter_context(look.flushes_unanswered(unanswered))
        self._world = World(_job(given))
        self._shows = Shows(self._world)
        for line in self._stripes():
            self._say(line)
        self._start_all()

    def _start_all(self) -> None:
        self._quiet = True
        self._do_start("C")
        for index in range(self._world.job.servers):
            self._do_start(f"S{index}")
        for index in range(self._world.job.workers):
            self._do_start(f"W{index}")
        self._deliver_matching("*", "*")

    def run(self, command: str) -> list[str]:
        """Carries out one command; what it printed."""
        self._lines = []
        word, *rest = command.split()
        self._quiet = word == "quietly"
        if self._quiet:
            word, *rest = rest
        act = getattr(self, f"_do_{word.replace('-', '_')}", None)
        if act is None:
            raise ScenarioError(f"there is no command {word!r}")
        act(*rest)
        return self._lines

    @property
    def printed(self) -> list[str]:
        """What the last command has printed, also one that failed."""
        return self._lines

    def _say(self, line: str, *, chat: bool = False) -> None:
        """`chat` is left out where a scenario says `quietly`."""
        if not (chat and self._quiet):
            self._lines.append(line)

    # --- Making it ---

    def _stripes(self) -> list[str]:
        """Who has which rows."""
        k, r = self._world.job.tables[0].k, self._world.job.tables[0].r
        rows = list(self._world.words.place)
        lines = []
        for first in range(0, len(rows), k):
            stripe = rows[first : first + k]
            owners = " ".join(f"S{self._world.words.place[row][0]}" for row in stripe)
            start = self._world.words.place[first][0]
            parities = " ".join(f"S{self._world.groups.step(start, k + q)}" for q in range(r))
            lines.append(f"rows {' '.join(map(str, stripe))} at {owners}, parity at {parities}")
        return lines

    def _do_start(self, who: str) -> None:
        """A process starts: the first, or the successor of one that is gone."""
        role, index = _parse(who)
        before = self._world.newest.get((role, index))
        if before in self._world.nodes:
            raise ScenarioError(f"{name(before)} runs")
        incarnation = 0 if before is None else before.incarnation + 1
        identity = self._world.newest[role, index] = Identity(role=role, id=index, incarnation=incarnation)
        if role == "coordinator":
            machine: Any = look.make_coordinator(identity, self._world.job, cuts=self._cuts)
        elif role == "server":
            machine = look.make_server(identity, self._on_capture if self._cuts else None)
        else:
            machine = look.make_session()
        self._world.nodes[identity] = Node(identity=identity, machine=machine)
        if before is not None:
            self._say(f"{name(identity)} starts")
        coordinator = self._world.newest["coordinator", 0]
        for other in list(self._world.nodes) if role == "coordinator" else [identity]:
            if other != coordinator:
                self._dials[other, coordinator] = None
        self._connect()

    def _connect(self) -> None:
        """Opens the connections that somebody wants and that can be."""
        for pair in list(self._dials):
            dialler, dialled = pair
            if dialler not in self._world.nodes:
                self._dials.pop(pair, None)
            if pair not in self._dials:
                continue  # done already, by what followed from another
            if dialled not in self._world.nodes or _sorted(*map(name, pair)) in self._unplugged:
                continue
            del self._dials[pair]
            if self._world.wires.may_open(dialler, dialled):
                self._world.wires.open(dialler, dialled)
                if dialler.role == "worker" and dialled.role == "coordinator":
                    self._world.wires.send(dialler, dialled, Declare(job=self._world.job))
                self._hand(dialled, Joined(peer=dialler))
                self._hand(dialler, Joined(peer=dialled))

    # --- Machines ---

    def _hand(self, identity: Identity, event: Any) -> None:
        """Gives an event to a machine and carries out what it asks for."""
        if (node := self._world.nodes.get(identity)) is None:
            return
        for effect in node.machine.receive(event):
            self._carry_out(node, effect)
        self._connect()

    def _carry_out(self, node: Node, effect: Any) -> None:
        me = node.identity
        if isinstance(effect, Send):
            self._world.wires.send(me, effect.target, effect.message)
        elif isinstance(effect, Dial):
            self._dials[me, effect.peer] = None
        elif isinstance(effect, Connect):
            for member in effect.view.servers:
                self._dials[me, member.identity] = None
        elif isinstance(effect, Forget):
            self._dials.pop((me, effect.peer), None)
            self._world.wires.forget(me, effect.peer)
        elif isinstance(effect, Refuse):
            self._say(f"{name(me)} refuses {name(effect.target)}: {effect.reason}")
            self._world.wires.forget(me, effect.target)
        elif isinstance(effect, Stop):
            self._say(f"{name(me)} stops: {effect.reason}")
            self._end(me)
        elif isinstance(effect, Replace):
            self._say(f"{name(me)} counts {name(effect.peer)} as dead: {effect.reason}")
            self._end(effect.peer)
        elif isinstance(effect, Save | Unsave | WriteManifest | Notice):
            self._carry_out_cut(node, effect)
        elif not isinstance(effect, Log | PushReceived):
            self._carry_out_wish(node, effect)

    def _carry_out_wish(self, node: Node, effect: Any) -> None:
        """What a session tells its worker."""
        me = name(node.identity)
        if isinstance(effect, SessionOpened):
            sync = self._world.job.mode == "sync"
            node.pushed = node.pulled = max(0, effect.committed - 1) if sync else effect.durable
            self._say(f"{me} opens: it goes on with {'step' if sync else 'push'} {node.pushed + 1}", chat=True)
        elif isinstance(effect, PullAnswered):
            plan, rows = node.buffers.pop(effect.request)
            values = [f"{row} {contents(rows[place])}" for (_, row), place in plan.where.items()]
            self._say(f"{me} has rows {', '.join(values)}" if values else f"{me} has its answers", chat=True)
        elif isinstance(effect, PushDurable):
            self._say(f"{me} forgets push {effect.seq}: it is durable everywhere", chat=True)
        elif isinstance(effect, Failed):
            node.failed = effect.reason
            self._say(f"{me} fails: {effect.reason}")
        else:
            raise ScenarioError(f"{me}: an effect nobody knows: {effect}")

    def _end(self, identity: Identity) -> None:
        """A process is gone."""
        if self._world.nodes.pop(identity, None) is not None:
            self._world.wires.end(identity)

    # --- Commands about processes and wires ---

    def _do_kill(self, who: str, *how: str) -> None:
        """kill -9. The launcher sees it, unless it is `unseen`. What was sent before may still arrive."""
        identity = self._running(who).identity
        self._end(identity)
        self._say(f"{who} is killed")
        for other in list(self._world.nodes) if identity.role == "coordinator" else []:
            self._hand(other, Lost(peer=identity, reason="the process ended"))
        if identity.role == "server" and "unseen" not in how:
            self._hand(self._world.newest["coordinator", 0], Died(peer=identity))

    def _do_pause(self, who: str) -> None:
        """Nothing reaches it, no time passes for it."""
        self._running(who).paused = True

    def _do_unplug(self, pair: str) -> None:
        """No connection between these two, until `plug`."""
        one, other = pair.split("-")
        self._unplugged[_sorted(one, other)] = None
        ends = [node for node in self._world.nodes if name(node) in (one, other)]
        if len(ends) == 2 and self._world.wires.is_open(*ends):
            self._world.wires.close(ends[0], ends[1])
            self._dials[ends[1], ends[0]] = None

    def _do_plug(self, pair: str) -> None:
        self._unplugged.pop(_sorted(*pair.split("-")), None)
        self._connect()

    def _do_reset(self, pair: str) -> None:
        """The connection breaks, with all that was on its way, and is made again."""
        self._do_unplug(pair)
        self._do_plug(pair)

    def _do_drop(self, wire: str) -> None:
        """What a dead process had sent does not arrive."""
        for pair in self._matching(*wire.split("->"), held=True):
            if pair[0] in self._world.nodes:
                raise ScenarioError(
                    f"{name(pair[0])} lives: between the living nothing is lost; `reset` breaks a connection"
                )
            self._world.wires.queues.pop(pair)

    def _do_hold(self, wire: str, kind: str = "*") -> None:
        """A wire whose next message is of this kind stands still, until it is released."""
        source, target = wire.split("->")
        self._holds.append((source, target, kind))

    def _do_release(self, wire: str, kind: str = "*") -> None:
        if wire == "all":
            self._holds.clear()
            return
        source, target = wire.split("->")
        self._holds.remove((source, target, kind))

    def _do_deliver(self, wire: str = "*->*", count: str = "") -> None:
        """One message of one wire, or so many, or all of it, held or not. With a `*`: all wires that match and are not
        held, with all that follows from it."""
        source, target = wire.split("->")
        if "*" in wire:
            self._deliver_matching(source, target)
            return
        if count == "all":
            for pair in self._matching(source, target, held=True):
                for _ in range(len(self._world.wires.queues[pair])):
                    self._deliver(pair, one=False)
            return
        for _ in range(int(count or 1)):
            pairs = self._matching(source, target, held=True)
            if not pairs:
                raise ScenarioError(f"nothing is on its way from {source} to {target}")
            self._deliver(pairs[0])

    def _deliver_matching(self, source: str, target: str) -> None:
        for _ in range(DELIVERIES_MAX):
            pairs = self._matching(source, target)
            if not pairs:
                return
            self._deliver(min(pairs, key=lambda pair: self._world.wires.queues[pair][0].order), one=False)
        raise ScenarioError(f"{DELIVERIES_MAX} messages were delivered, and there is no end")

    def _matching(self, source: str, target: str, *, held: bool = False) -> list[Pair]:
        return [
            pair
            for pair, queue in self._world.wires.queues.items()
            if queue and fits(pair, source, target) and (held or not self._is_held(pair))
        ]

    def _is_held(self, pair: Pair) -> bool:
        kind = type(self._world.wires.queues[pair][0].message).__name__
        if (node := self._world.nodes.get(pair[1])) is None or node.paused:
            return True
        return any(fits(pair, source, target) and fnmatch.fnmatch(kind, k) for source, target, k in self._holds)

    def _deliver(self, pair: Pair, *, one: bool = True) -> None:
        """The next message of a wire; `one`: the next that is worth showing, and what is before it."""
        source, target = pair
        while self._world.wires.queues.get(pair):
            frame, taken = self._world.wires.take(pair)
            shown = not isinstance(frame.message, CHATTER)
            if shown:
                again = "" if taken else "  (dropped: it has that)"
                again = "  (sent again)" if taken and frame.again else again
                told = self._world.words.say(source, target, frame.message)
                self._say(f"{name(source)} -> {name(target)}  {told}{again}", chat=True)
            if taken:
                self._hand(target, Delivered(source=source, message=frame.message))
            if shown or not one:
                return

    def _do_tick(self, seconds: str, *who: str) -> None:
        """Time passes, for all or for those named."""
        for _ in range(round(float(seconds) / TICK_SECONDS)):
            self._now += TICK_SECONDS
            for node in list(self._world.nodes.values()):
                if not node.paused and node.identity.role != "worker" and (not who or name(node.identity) in who):
                    self._hand(node.identity, Tick(now=self._now))
            for pair in self._matching("*", "*"):
                if isinstance(self._world.wires.queues[pair][0].message, Beat):
                    self._deliver(pair, one=False)

    def _do_settle(self) -> None:
        """Nothing is held any more, everything arrives, time passes, until all is at rest; then rows are checked."""
        quietly, self._quiet = self._quiet, True
        self._holds.clear()
        for pair in list(self._unplugged):
            self._do_plug("-".join(pair))
        for _ in range(SETTLE_TICKS_MAX):
            self._deliver_matching("*", "*")
            if not self._shows.unsettled():
                break
            self._do_tick(str(TICK_SECONDS))
        wrong = [f"not at rest: {reason}" for reason in self._shows.unsettled()] + self._shows.wrong()
        for line in wrong:
            self._say(line)
        if not wrong and not quietly:
            self._say("every push is in its rows exactly once, and the parities fit")

    # --- Commands of workers ---

    def _do_pull(self, who: str, *rows: str) -> None:
        """`pull W0 rows 0 3`: in synchronous mode of the next step."""
        node = self._running(who)
        node.pulled += 1
        self._pull(node, rows, request=node.pulled, step=node.pulled if self._world.job.mode == "sync" else 0)

    def _pull(self, node: Node, rows: tuple[str, ...], *, request: int, step: int) -> None:
        plan = plan_of(self._world.job, [_rows(rows)])
        buffer = np.full(plan.floats, np.nan, np.float32)
        node.buffers[request] = plan, buffer
        self._hand(node.identity, PullWanted(request=request, step=step, plan=plan, rows=buffer))

    def _do_push(self, who: str, *rows: str) -> None:
        """`push W0 rows 0 3`: the next push, or that of the next step; without rows, an empty one."""
        node = self._running(who)
        node.pushed += 1
        worker, seq = node.identity.id, node.pushed
        plan = plan_of(self._world.job, [_rows(rows)])
        self._world.pushes[worker, seq] = _rows(rows)
        grads = np.zeros((len(plan.where), COLUMNS), np.float32)
        grads[:, worker] = gradient(seq)
        self._hand(node.identity, PushWanted(seq=seq, request=seq, plan=plan, grads=grads.reshape(-1)))

    def _do_step(self, who: str, *rows: str) -> None:
        """Pull and push of a whole synchronous step. The next pull commits it."""
        self._do_pull(who, *rows)
        self._deliver_matching("*", "*")
        self._do_push(who, *rows)
        self._deliver_matching("*", "*")

    # --- Commands of checkpoints ---

    def _do_cut(self, *how: str) -> None:
        """Somebody asks the coordinator for a checkpoint."""
        coordinator = self._world.newest["coordinator", 0]
        self._hand(coordinator, CutNow(full="full" in how, still="still" in how))
        self._do_tick(str(TICK_SECONDS), name(coordinator))

    def _on_capture(self, identity: Identity, tenant: int, full: bool) -> None:
        machine = self._world.nodes[identity].machine
        mine = {row: slot for row, (server, slot) in self._world.words.place.items() if server == identity.id}
        told = [f"{row} {contents(look.row(machine, slot))}" for row, slot in mine.items()]
        self._say(f"{name(identity)} captures rows {', '.join(told)}", chat=True)

    def _do_save(self, who: str) -> None:
        """What a server captured is in storage."""
        node = self._running(who)
        number = look.take_captured(node.machine)
        self._hand(node.identity, Saved(number=number, chunks="[]"))

    def _do_write_manifest(self) -> None:
        if self._manifest is None:
            raise ScenarioError("no manifest waits to be written")
        number, self._manifest = self._manifest, None
        self._hand(self._world.newest["coordinator", 0], ManifestWritten(number=number))

    def _carry_out_cut(self, node: Node, effect: Any) -> None:
        if isinstance(effect, WriteManifest):
            self._manifest = effect.number
            self._say(
                f"{name(node.identity)} asks for a manifest of all rows at marks {marks(effect.marks)}", chat=True
            )
        elif isinstance(effect, Unsave):
            self._say(f"{name(node.identity)} throws away what it captured", chat=True)
        elif isinstance(effect, Notice) and effect.name == "checkpoint":
            reason = f": {effect.values['reason']}" if "reason" in effect.values else ""
            self._say(f"{name(node.identity)} reports a checkpoint: {effect.values['status']}{reason}", chat=True)

    def _do_show(self, what: str, *which: str) -> None:
        for line in self._shows.show(what, which):
            self._say(line)

    def _running(self, who: str) -> Node:
        for identity, node in self._world.nodes.items():
            if name(identity) == who:
                return node
        raise ScenarioError(f"{who} does not run")


def _job(given: dict[str, str]) -> JobSpec:
    """The job of a cluster with these options."""
    number = {key: int(given.pop(key, usual)) for key, usual in (("servers", 3), ("workers", 1), ("k", 2), ("r", 1))}
    flush = given.pop("flush", "1")
    commit: Any = given.pop("commit", "exactly-once")
    job = make_job(
        table(rows=int(given.pop("rows", 2 * number["servers"])), dim=COLUMNS, k=number["k"], r=number["r"]),
        servers=number["servers"],
        workers=number["workers"],
        mode=given.pop("mode", "async"),
        flush=FlushSpec(pushes=1 << 20 if flush == "never" else int(flush), seconds=3600.0, commit=commit),
    )
    if given:
        raise ScenarioError(f"a cluster has no option {', '.join(given)}")
    if reason := job.invalid_reason():
        raise ScenarioError(reason)
    return job


def _parse(who: str) -> tuple[str, int]:
    if who == "C":
        return "coordinator", 0
    return {"S": "server", "W": "worker"}[who[0]], int(who[1:].rstrip("'"))


def _sorted(one: str, other: str) -> tuple[str, str]:
    return (one, other) if one < other else (other, one)


def _rows(words: tuple[str, ...]) -> list[int]:
    """`rows 0 3`, or nothing."""
    if words and words[0] != "rows":
        raise ScenarioError(f"rows are named as `rows 0 3`, not as {' '.join(words)!r}")
    return [int(word) for word in words[1:]]
