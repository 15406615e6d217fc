"""What a scenario shows of its cluster, and what must be so when it has come to rest.

Rows are compared with the pushes that were made; parities with what their marks say they stand for. All state is read
through `look.py`.
"""

from __future__ import annotations

import dataclasses
import fnmatch
from typing import Any

import numpy as np
from scenarios import look
from scenarios.wires import Pair, Wires
from scenarios.words import COLUMNS, Words, contents, epoch, gradient, marks, members, name

from regrow.core.coding import coefficient, product_bytes
from regrow.core.groups import Groups
from regrow.core.identity import Identity
from regrow.core.job import JobSpec
from regrow.core.messages import Beat, Declare, Ready, RestoredAck, StreamAck

CHATTER = (Beat, Ready, Declare, StreamAck, RestoredAck)  # delivered, not shown


@dataclasses.dataclass(slots=True, kw_only=True)
class Node:
    """A process that runs."""

    identity: Identity
    machine: Any
    paused: bool = False
    pushed: int = 0  # the rest: a worker's programme
    pulled: int = 0
    failed: str = ""
    buffers: dict[int, tuple[Any, Any]] = dataclasses.field(default_factory=dict)  # pulls: (plan, rows)


class World:
    """What there is."""

    def __init__(self, job: JobSpec) -> None:
        self.job = job
        self.words = Words(job)
        self.groups = Groups(job)
        self.wires = Wires()
        self.nodes: dict[Identity, Node] = {}
        self.newest: dict[tuple[str, int], Identity] = {}  # of each role and number, running or not
        self.pushes: dict[tuple[int, int], list[int]] = {}  # (worker, seq) -> rows


def fits(pair: Pair, source: str, target: str) -> bool:
    """Whether a wire is one of those that `source->target` names; `*` is anybody."""
    return fnmatch.fnmatchcase(name(pair[0]), source) and fnmatch.fnmatchcase(name(pair[1]), target)


class Shows:
    """The command `show`, and the checks of `settle`."""

    def __init__(self, world: World) -> None:
        self._world = world

    def show(self, what: str, which: tuple[str, ...]) -> list[str]:
        lines: list[str] = getattr(self, f"_show_{what}")(*which)
        return lines

    def wrong(self) -> list[str]:
        """Rows without one of their pushes, or with one twice; parities that are not what they stand for."""
        rows = {row: (self._content(row), contents(self._value(row))) for row in self._world.words.place}
        lines = [f"row {row} is {has}, but should be {wants}" for row, (has, wants) in rows.items() if has != wants]
        return lines + [line for line in self._show_parity() if line.endswith("WRONG")]

    def unsettled(self) -> list[str]:
        reasons = []
        for (role, _), identity in self._world.newest.items():
            node = self._world.nodes.get(identity)
            if node is None:
                reasons.append(f"{name(identity)} is gone")
            elif role == "server" and (reason := look.unsettled_reason(node.machine)):
                reasons.append(f"{name(identity)} {reason}")
            elif role == "coordinator" and (reason := look.unsettled_view_reason(node.machine)):
                reasons.append(f"C {reason}")
            elif node.failed:
                reasons.append(f"{name(identity)} has failed: {node.failed}")
            elif role == "worker" and (kept := look.kept_pushes(node.machine)):
                reasons.append(f"{name(identity)} keeps pushes {' '.join(map(str, kept))}")
            elif role == "worker" and node.buffers:
                reasons.append(f"{name(identity)} waits for rows")
        return reasons

    def _show_rows(self) -> list[str]:
        return [line for row in self._world.words.place for line in self._show_row(str(row))]

    def _show_row(self, row: str) -> list[str]:
        owner = self._world.newest["server", self._world.words.place[int(row)][0]]
        return [f"row {row} at {name(owner)} is {self._content(int(row))}"]

    def _content(self, row: int) -> str:
        server, slot = self._world.words.place[row]
        node = self._world.nodes.get(self._world.newest["server", server])
        weights = look.row(node.machine, slot) if node is not None else None
        return contents(weights) if weights is not None else "missing"

    def _value(self, row: int, upto: tuple[int, ...] | None = None) -> Any:
        """A row that contains all pushes, or those that marks cover."""
        value = self._world.words.initial[row].copy()
        for (worker, seq), rows in self._world.pushes.items():
            mark = seq if upto is None else upto[0 if self._world.job.mode == "sync" else worker]
            if row in rows and seq <= mark:
                value[worker] -= gradient(seq)
        return value

    def _servers(self, who: tuple[str, ...] = ()) -> list[Node]:
        """Those in office; if some are named, of these."""
        nodes = self._world.nodes
        newest = [each for (role, _), each in self._world.newest.items() if role == "server" and each in nodes]
        return [nodes[each] for each in newest if not who or name(each) in who]

    def _show_servers(self, *who: str) -> list[str]:
        return [f"{name(node.identity)} {look.status(node.machine)}" for node in self._servers(who)]

    def _show_marks(self, *who: str) -> list[str]:
        """What each source has applied and flushed."""
        lines = []
        for node in self._servers(who):
            for g, (applied, number, flushed, acked, streams) in enumerate(look.sources(node.machine)):
                holders = [f"S{h} {'is streamed to' if h in streams else f'has {n}'}" for h, n in acked.items()]
                flush = f"flush {number} marks {marks(flushed)}"
                lines.append(
                    f"{name(node.identity)} group {g}: applied {marks(applied)}, {flush}, {', '.join(holders)}"
                )
        return lines

    def _show_held(self, *who: str) -> list[str]:
        """What each holder has of its sources."""
        lines = []
        for node in self._servers(who):
            for source, g, number, have, ended in look.held(node.machine):
                told = f"flush {number} marks {marks(have)}" if ended else "is being streamed"
                lines.append(f"{name(node.identity)} holds group {g} of S{source}: {told}")
        return lines

    def _show_durable(self) -> list[str]:
        lines = []
        for node in self._world.nodes.values():
            if node.identity.role == "worker":
                known = ", ".join(f"S{s} {durable}" for s, durable in enumerate(look.known_durable(node.machine)))
                kept = " ".join(map(str, look.kept_pushes(node.machine))) or "none"
                lines.append(f"{name(node.identity)} knows as durable: {known}; keeps pushes: {kept}")
        return lines

    def _show_view(self) -> list[str]:
        node = self._world.nodes[self._world.newest["coordinator", 0]]
        view = look.view(node.machine)
        return [f"view {epoch(view.epoch)}: {members(view.servers)}" if view is not None else "no view"]

    def _show_wires(self, *which: str) -> list[str]:
        """What is on its way: everywhere, or on the wires named."""
        wanted = [tuple(wire.split("->")) for wire in which] or [("*", "*")]
        lines = []
        for pair in sorted(self._world.wires.queues, key=lambda pair: (name(pair[0]), name(pair[1]))):
            queue = self._world.wires.queues[pair]
            shown = [frame.message for frame in queue if not isinstance(frame.message, CHATTER)]
            if shown and any(fits(pair, source, target) for source, target in wanted):
                head = f"{name(pair[0])} -> {name(pair[1])}: "
                for message in shown:
                    lines.append(head + self._world.words.say(*pair, message))
                    head = " " * len(head)
        return lines

    def _show_parity(self) -> list[str]:
        """Every parity: what it stands for by its marks, and whether its bytes agree."""
        lines = []
        for node in self._servers():
            if not look.knows_view(node.machine):
                continue
            held = {(source, g): (have, ended) for source, g, _, have, ended in look.held(node.machine)}
            for q in range(self._world.job.tables[0].r):
                lines += self._parities_of(node, q, held)
        return lines

    def _parities_of(self, node: Node, q: int, held: dict[tuple[int, int], tuple[tuple[int, ...], bool]]) -> list[str]:
        spec = self._world.job.tables[0]
        blocks = look.blocks(self._world.job)
        found = look.parity(node.machine, q, blocks)
        lines = []
        for block in range(blocks):
            expected = np.zeros(4 * COLUMNS, np.uint8)
            told = []
            for j in range(spec.k):
                owner = self._world.groups.step(node.identity.id, j - spec.k - q)
                row = self._world.words.row_at.get((owner, block * spec.k + j))
                have, ended = held[owner, int(self._world.groups.of_member[0][j])]
                if row is not None and ended:
                    value = self._value(row, have)
                    relative = value.view(np.uint8) ^ self._world.words.initial[row].view(np.uint8)
                    expected ^= product_bytes(coefficient(q, j, spec.r), relative)
                    told.append(f"{row} {contents(value)}")
                elif row is not None:
                    told.append(f"{row} being streamed")
            right = "being streamed" in " ".join(told) or found[block].tobytes() == expected.tobytes()
            if told:
                lines.append(f"{name(node.identity)} parity of rows {', '.join(told)}" + ("" if right else " WRONG"))
        return lines
