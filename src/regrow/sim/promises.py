"""What is promised besides right rows: each promise a function that says why it is broken, or "".

    I12  in two phases, `Pushed` is said only when every holder that counts has the push staged
    I13  nothing that waits is without a way out: nobody holds pushes back for longer than it may, and when faults have
         stopped and everything has arrived, no machine waits for anything
    A3   a stream ends with a flush that every other holder of the group has
    I1, I3 where losses are tolerated (`commit = "none"`): parities fit the rows, and no push is in a row twice

`Checker` asks them at the moments they are about.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from regrow.core import cut
from regrow.core.coding import coefficient, product
from regrow.core.identity import Identity
from regrow.core.messages import Pushed, StreamEnd
from regrow.core.states import CutState
from regrow.sim import machines
from regrow.sim.net import COORDINATOR, short

if TYPE_CHECKING:
    from regrow.sim.nodes import Node
    from regrow.sim.world import World


def _find_counting(world: World, node: Node, group: int) -> list[Node]:
    """The holders of a group of this server that count for it, as far as they still are who it takes them for. One that
    the end of its stream has not reached did not count a moment ago; and one may not know yet that this server is here
    with other rows than the one before."""
    server = node.server
    found = []
    for holder in world.groups.holders(node.identity.id, group):
        other = world.node("server", holder)
        if holder in server.flusher.groups[group].streams or other is None or other.server is None:
            continue
        if other.identity != server.peers[holder] or other.server.peers[node.identity.id] != node.identity:
            continue
        if other.server.holder.held[node.identity.id, group].ended:
            found.append(other)
    return found


def unstaged_reason(world: World, node: Node, worker: Identity, pushed: Pushed) -> str:
    """I12."""
    me = node.identity.id
    for group in range(len(world.groups)):
        for other in _find_counting(world, node, group):
            held = other.server.holder.held[me, group]
            marks = held.staged[-1].marks if held.staged else held.marks
            if marks[worker.id] < pushed.seq:
                told = f"{short(node.identity)} says that push {pushed.seq} of {short(worker)} is staged"
                return f"{told}, but {short(other.identity)} has {marks} of group {group}"
    return ""


def early_end_reason(world: World, node: Node, end: StreamEnd) -> str:
    """A3."""
    for other in _find_counting(world, node, end.group):
        held = other.server.holder.held[node.identity.id, end.group]
        if held.number < end.number:
            told = f"a stream of group {end.group} of {short(node.identity)} ends with flush {end.number}"
            return f"{told}, but {short(other.identity)} has {held.number}"
    return ""


# --- Nothing waits for ever ---


class Holds:
    """Since when each server holds pushes back for a cut; told of every tick, behind it."""

    def __init__(self) -> None:
        self._since: dict[tuple[Identity, int], float] = {}

    def overdue_reason(self, world: World) -> str:
        """I13, while a run goes on. A server that is paused gets no ticks, and starts anew."""
        since: dict[tuple[Identity, int], float] = {}
        # Where clocks differ, some run slower, and one that is set back stands still for a moment.
        seconds_max = cut.HOLD_SECONDS_MAX * (1.5 if world.scenario.profile.clocks else 1.0)
        for node in world.nodes.values():
            if node.identity.role != "server" or node.server is None or node.paused or node.starved:
                continue
            side = node.server.cut
            if side._holds_pushes and side.life.state in (CutState.ASKED, CutState.AWAITING):
                key = node.identity, side.number
                since[key] = self._since.get(key, world.now)
                if world.now - since[key] > seconds_max:
                    return f"{short(node.identity)} holds pushes back for a cut since {since[key]:.2f}"
        self._since = since
        return ""


def waiting_reason(world: World) -> str:
    """I13, at the end: everything has arrived, and nothing will."""
    for node in world.current.values():
        if node.identity.role == "worker":
            reason = _find_waits(node.machine, ("_pulls", "_redo", "_held", "_reads", "_writes"))
        elif node.identity.role == COORDINATOR:
            reason = machines.unsettled_view_reason(node.machine) or _find_unmade_cut(world, node)
        else:
            reason = machines.unsettled_reason(node.machine) or _find_server_waits(world, node.server)
        if reason:
            return f"{short(node.identity)} {reason}"
    for wire in world.network.wires.values():
        if wire.items:
            return f"{len(wire.items)} frames of {short(wire.source)} do not reach {short(wire.target)}"
    return ""


def _find_waits(machine: Any, names: tuple[str, ...]) -> str:
    for name in names:
        if getattr(machine, name):
            return f"waits with {name}"
    return ""


def _find_server_waits(world: World, server: Any) -> str:
    if any(group.staged for group in server.flusher.groups):
        return "has flushes that nobody commits"
    if any(state.staged or state.awaited for state in server.holder.held.values()):
        return "has staged flushes, or waits for tails"
    if server.cut.life.state is not CutState.IDLE and world.job.mode == "async":
        return f"is still {server.cut.life.state} for a cut"
    return _find_waits(server.holder.decoder, ("_batches", "_faults", "_unacked"))


def _find_unmade_cut(world: World, node: Node) -> str:
    """A synchronous cut may wait for a step that nobody makes any more; it holds nobody up."""
    if node.machine.turns is None or world.job.mode == "sync":
        return ""
    return "has not made a cut that it began" if machines.is_cutting(node.machine) else ""


# --- Where losses are tolerated ---


def unfitting_reason(world: World) -> str:
    """I1 and I3 for `commit = "none"`: pushes may be missing, but never twice, and parities are those of the rows."""
    records: dict[tuple[int, int, int], Any] = {}
    for (table, row), (server, slot) in world.reference.places.of_row.items():
        node = world.node("server", server)
        assert node is not None
        record = np.empty(machines.record_floats(node.server, table), np.float32)
        node.server.store.read_records(table, slot, 1, record)
        if problem := world.reference.pull_problem(world.reference.steps, (table, row), record):
            return f"I3: in the end row {row} of table {table} on S{server} {problem}"
        initial = world.reference.initial[table, row].view(np.uint8)
        records[server, table, slot] = record.view(np.uint8)[: initial.size] ^ initial
    for server in range(world.job.servers):
        for table, spec in enumerate(world.job.tables):
            for q in range(spec.r):
                if bad := _find_bad_blocks(world, server, table, q, records):
                    return f"I1: the parity {q} of table {table} at S{server} is wrong at the blocks {bad}"
    return ""


def _find_bad_blocks(world: World, server: int, table: int, q: int, records: dict[Any, Any]) -> list[int]:
    spec = world.job.tables[table]
    node = world.node("server", server)
    assert node is not None
    found = machines.parity(node.server, table, q, machines.blocks(world.job, table))
    bad = []
    for block, parity in enumerate(found):
        expected = np.zeros_like(parity)
        for member in range(spec.k):
            owner = world.groups.step(server, member - spec.k - q)
            record = records.get((owner, table, block * spec.k + member))
            if record is not None:
                factor = coefficient(q, member, spec.r)
                expected[: record.size] ^= np.array([product(factor, byte) for byte in record.tolist()], np.uint8)
        if parity.tobytes() != expected.tobytes():
            bad.append(block)
    return bad
