"""What must hold, checked as a run goes (the numbers are those of docs/protocol.md).

    I1   parity = code of what its members published, as far as this holder has come with each (I1b)
    I2   what a server reported durable is in every complete holder
    I3   a push is in a row never twice, and at the end exactly once (pulls are checked by the workers)
    I4   flushes of a group count up by one; nothing from an old incarnation changes anything
    I5   a decoded row contains a push if and only if the holder's marks cover it (I3b)
    I7   synchronous pulls equal the reference, at the pull      I8  when faults stop, everything ends
    I9   queues stay bounded                                     I10 a run is a function of its tape
    I11  a checkpoint is the state after exactly the pushes that it names (cuts.py)
    A1   all living holders tell a replacement the same flush    A2  not older than what they acknowledged
    I12, I13, A3, and what holds where losses are tolerated: promises.py

What a group of rows must be follows from its marks alone: the pushes up to them, and no others.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from regrow.core.coding import coefficient
from regrow.core.identity import Identity
from regrow.core.messages import (
    Durable,
    Flush,
    FlushAck,
    FlushCommit,
    Have,
    Message,
    Opened,
    Push,
    Pushed,
    Recovered,
    Restored,
    Rows,
    Snap,
    StateAsk,
    Stream,
    StreamAsk,
    StreamEnd,
    Tail,
    View,
)
from regrow.sim import machines, promises
from regrow.sim.net import short
from regrow.sim.nodes import Violation
from regrow.sim.pieces import Pieces
from regrow.sim.probes import name_crossings

if TYPE_CHECKING:
    from regrow.sim.nodes import Node
    from regrow.sim.world import World

KEPT_BYTES_MAX = 1 << 20  # of one link; a world's whole tables are smaller
TAIL_MAX = 64
ADVANCES = frozenset({Flush, Tail, StreamEnd, FlushCommit})  # They may bring a holder further with a group.


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Stripes:
    """All stripes of a table that have a parity at some holder."""

    table: int
    members: list[tuple[int, int, int, int]]  # member, its server, its group, its coefficient
    reader: machines.ParityReader


class Checker:
    """Watches every message and every state that matters."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.job = world.job
        self._start = world.start
        self.sync = world.job.mode == "sync"
        self.coded = world.job.protection.has_parities and world.job.protection.flush.commit != "none"
        self.reported: dict[tuple[int, int], int] = {}  # (server, mark) -> the most that was reported durable
        self.acked: dict[tuple[int, int, Identity], int] = {}  # (source, group, holder) -> flush acknowledged
        self.haves: dict[tuple[Identity, int], tuple[int, tuple[int, ...]]] = {}
        self._pieces = Pieces(world.job, world.groups, world.reference)
        self._stripes: dict[tuple[int, int, int], tuple[int, list[Stripes]]] = {}
        self._before: Any = None
        self._pushed: dict[tuple[Identity, int], int] = {}  # (worker, server) -> last push sent
        self._voided: set[tuple[Identity, Identity, int]] = set()
        self._streamed: set[tuple[Identity, Identity, int, int]] = set()
        self._crossings = name_crossings(world.job) if world.job.protection.has_parities else []
        self.sends: dict[type[Message], Callable[[Node, Identity, Any], None]] = {
            View: self._on_view,
            Restored: self._on_restored,
            Have: self._on_have,
            FlushAck: self._on_ack,
            Flush: self._on_flush,
            Snap: self._on_snap,
            Rows: self._on_reply,
            Pushed: self._on_pushed,
            Durable: self._on_reply,
            Opened: self._on_reply,
            Push: self._on_push,
            Stream: self._on_stream,
            StreamEnd: self._on_stream_end,
            Recovered: self._on_recovered,
            StateAsk: self._on_state_ask,
            StreamAsk: self._on_stream_ask,
        }
        self._two_phases = self.coded and world.job.protection.flush.commit == "2pc"
        self._tolerant = world.job.protection.has_parities and not self.coded
        self._holds = promises.Holds()

    def fail(self, invariant: str, text: str) -> None:
        raise Violation(invariant, text)

    # --- Messages as they leave ---

    def on_send(self, node: Node, target: Identity, message: Message) -> None:
        """Of the kinds in `sends`. What a replaced server still says reaches nobody that listens."""
        if self.world.is_current(node.identity):
            self.sends[type(message)](node, target, message)

    def _on_view(self, node: Node, target: Identity, view: View) -> None:
        if not view.lost:
            return
        if not self.world.sabotage.beyond:
            self.fail("loss", f"{short(node.identity)} says that rows are lost: {view.lost}")
        if not self.world.lost:
            self.world.probes.hit("data loss")
        self.world.lost = view.lost

    def _on_restored(self, node: Node, target: Identity, restored: Restored) -> None:
        """I5 and I3b, at the moment of the decode."""
        self.world.probes.hit("row restored")
        if self.world.groups.bare is None and self.world.own_storage.reported.get(target.id):
            self.world.probes.hit("decoded after a recall")
        if not self.coded:
            return
        start = offset = 0
        for table, count in enumerate(restored.counts.tolist()):
            slots = restored.slots[start : start + count].tolist()
            start += count
            k = self.job.tables[table].k
            floats = machines.record_floats(node.server, table)
            for slot in slots:
                record = restored.relatives[offset : offset + floats]
                offset += floats
                group = int(self.world.groups.of_member[table][slot % k])
                marks = node.server.holder.held[target.id, group].marks
                piece = self._pieces.find(target.id, group, table, marks, self._find_era(node, target.id))
                expected = piece.record(slot // k)
                if record.tobytes() == expected:
                    continue
                if piece.open >> (slot // k) & 1 and not record.view(np.uint32).any():
                    continue
                row = self.world.reference.places.row_at[target.id, table, slot]
                told = self.describe((table, row), record)
                wanted = self.describe((table, row), np.frombuffer(expected, np.float32))
                self.fail(
                    "I5",
                    f"{short(node.identity)} decodes row {row} of table {table} of {short(target)} as {told}, "
                    f"not {wanted} (marks {marks})",
                )

    def describe(self, key: tuple[int, int], relative: Any) -> str:
        """A relative record, in words."""
        initial = self.world.reference.initial[key]
        record = (relative.view(np.uint32)[: initial.size] ^ initial.view(np.uint32)).view(np.float32)
        return self.world.reference.describe(key, record)

    def _find_era(self, node: Node, source: int) -> tuple[int, dict[tuple[int, int], int]]:
        """What was lost of the rows of a source, as far as this holder may know."""
        return self.world.own_storage.find_era(source, node.server.peers[source].incarnation)

    def on_recalled(self, source: int) -> None:
        """Its rows went back, and flushes of them count from the beginning."""
        recallable = self.world.groups.recallable
        self.acked = {key: n for key, n in self.acked.items() if key[0] != source or key[1] not in recallable}

    def _on_have(self, node: Node, target: Identity, have: Have) -> None:
        known = self.haves.setdefault((target, have.group), (have.number, have.marks))
        if known != (have.number, have.marks):
            self.fail("A1", f"{short(target)} hears {known} and {have.number, have.marks} of group {have.group}")
        acked = self.acked.get((target.id, have.group, node.identity), 0)
        if have.number < acked:
            self.fail("A2", f"{short(node.identity)} has flush {have.number}, but had acknowledged {acked}")
        self._covers(target.id, have.group, node, have.marks)

    def _on_ack(self, node: Node, target: Identity, ack: FlushAck) -> None:
        if ack.staged:
            self.world.probes.hit("staged flush")
            return
        if ack.group in self.world.groups.recallable and not self.world.is_current(target):
            return  # it may have gone back since
        key = target.id, ack.group, node.identity
        self.acked[key] = max(ack.number, self.acked.get(key, 0))

    def _on_flush(self, node: Node, target: Identity, flush: Flush) -> None:
        self.world.probes.hit("flush" if flush.slots.size else "flush without rows")

    def _on_snap(self, node: Node, target: Identity, snap: Snap) -> None:
        if any(node.server.store.pending_rows(g) for g in range(len(self.world.groups))):
            self.world.probes.hit("snap while pending")

    def _on_push(self, node: Node, target: Identity, push: Push) -> None:
        last = self._pushed.get((node.identity, target.id), 0)
        if push.seq <= last:
            self.world.probes.hit("push resent")
        self._pushed[node.identity, target.id] = max(last, push.seq)

    def _on_stream(self, node: Node, target: Identity, stream: Stream) -> None:
        table = int(np.flatnonzero(stream.counts)[0])
        place = node.identity, target, table, int(stream.slots[0])
        if place in self._streamed:
            self.world.probes.hit("stream delta")
        self._streamed.add(place)

    def _on_pushed(self, node: Node, target: Identity, pushed: Pushed) -> None:
        if self._two_phases and (reason := promises.unstaged_reason(self.world, node, target, pushed)):
            self.fail("I12", reason)
        self._on_reply(node, target, pushed)

    def _on_stream_end(self, node: Node, target: Identity, end: StreamEnd) -> None:
        if reason := promises.early_end_reason(self.world, node, end):
            self.fail("A3", reason)

    def _on_state_ask(self, node: Node, target: Identity, message: StateAsk) -> None:
        self.world.probes.hit("replacement asked")

    def _on_stream_ask(self, node: Node, target: Identity, ask: StreamAsk) -> None:
        again = (node.identity, target, ask.group) in self._voided
        self._voided.add((node.identity, target, ask.group))
        self.world.probes.hit("parity void again" if again else "parity void")

    def _on_recovered(self, node: Node, target: Identity, message: Recovered) -> None:
        for name in ("recovered", *self._crossings):
            self.world.probes.hit(name)
        self.world.sabotage.parted.on_recovered(node)

    def _on_reply(self, node: Node, target: Identity, reply: Any) -> None:
        """I2: what is reported durable is where it must be."""
        if (
            self.sync
            and isinstance(reply, Rows)
            and reply.request in (marks[0] for marks in machines.read_applied(node.server))
        ):
            self.world.probes.hit("undo")  # workers number their pulls by step
        if not self.coded or not reply.durable:
            return
        mark = 0 if self.sync else target.id
        server = node.identity.id
        if reply.durable <= self.reported.get((server, mark), 0):
            return
        self.reported[server, mark] = reply.durable
        for group in range(len(self.world.groups)):
            for holder in self.world.groups.holders(server, group):
                other = self.world.node("server", holder)
                held = machines.find_held(other.machine, server, group) if other is not None else None
                if group in self.world.groups.recallable and held is not None and other is not None:
                    held = (
                        held if other.server.peers[server] == node.identity else None
                    )  # it knows who was there before
                if held is not None and held.ended and held.marks[mark] < reply.durable:
                    self.fail(
                        "I2",
                        f"{short(node.identity)} reports {reply.durable} of mark {mark} durable, but S{holder} "
                        f"has {held.marks} of group {group}",
                    )

    def _covers(self, source: int, group: int, node: Node, marks: tuple[int, ...]) -> None:
        for mark, reached in enumerate(marks):
            if reached < self.reported.get((source, mark), 0):
                self.fail(
                    "I2",
                    f"{short(node.identity)} has {marks} of group {group} of S{source}, which reported "
                    f"{self.reported[source, mark]} of mark {mark} durable",
                )

    # --- States around an event ---

    def before(self, node: Node, event: Any) -> None:
        """Of a message that reaches a server."""
        self._before = None
        if not self.coded:
            return
        machine, message = node.machine, event.message
        if event.source.role == "server" and node.server is not None:
            known = node.server.view.servers[event.source.id].incarnation
            if event.source.incarnation < known:
                self._before = machines.fingerprint(node.server)
            elif type(message) in ADVANCES:
                source = message.source if isinstance(message, Tail) else event.source.id
                held = machines.find_held(machine, source, message.group)
                self._before = (held.number, held.ended) if held is not None else None
                if held is not None and held.asked:
                    self.world.probes.hit("void frames dropped")
                if isinstance(message, Flush) and machines.is_decoding(node.server):
                    self.world.probes.hit("flush during decode")

    def after(self, node: Node, event: Any, effects: Any) -> None:
        machine, message = node.machine, event.message
        machines.probe(self.world.probes, machine, event, effects)
        if self._before is None:
            return
        if type(message) not in ADVANCES or not isinstance(self._before[0], int):
            if machines.fingerprint(node.server) != self._before:
                kind = type(message).__name__
                self.fail("I4", f"{kind} of the old {short(event.source)} changes {short(node.identity)}")
            return
        source = message.source if isinstance(message, Tail) else event.source.id
        held = machines.find_held(machine, source, message.group)
        number, ended = self._before
        rises = held.number - number
        if ended and (rises < 0 or (rises > 1 and not isinstance(message, FlushCommit))):
            self.fail("I4", f"{short(node.identity)} goes from flush {number} to {held.number} of S{source}")
        if isinstance(message, StreamEnd) and held.ended and not ended and self.world.is_current(node.identity):
            # For one that was replaced nothing waits any more, and more is durable than it will ever have.
            self._covers(source, message.group, node, held.marks)
        if held.ended and (held.number, held.ended) != self._before:
            self.check_parity(node, source, message.group)

    def check_parity(self, node: Node, source: int, group: int, *, final: bool = False) -> None:
        """I1b: the stripes of a group of a source, at one of its holders."""
        server = node.server
        held_by = server.holder.held
        q, tables = self._find_stripes(node.identity.id, source, group)
        for stripes in tables:
            table = stripes.table
            expected = sure = 0
            for member, other, g, factor in stripes.members:
                held = held_by[other, g]
                if not held.ended or self._is_loading(held.marks):
                    break
                piece = self._pieces.find(other, g, table, held.marks, self._find_era(node, other))
                sure |= piece.open
                if piece.touched & ~machines.read_touched(server, table, q, member):
                    self.fail("I5", f"{short(node.identity)} takes touched rows of S{other} for untouched")
                expected ^= piece.part(factor)
            else:
                found = int.from_bytes(stripes.reader.read(server, q), "little")
                if found != expected:
                    self._compare(node, (source, group, table), found ^ expected, 0 if final else sure)

    def _find_stripes(self, holder: int, source: int, group: int) -> tuple[int, list[Stripes]]:
        """Which parity a holder has of a group, and for each table with rows of it whose rows the stripes are."""
        known = self._stripes.get((holder, source, group))
        if known is not None:
            return known
        groups = self.world.groups
        q = groups.holders(source, group).index(holder)
        tables = []
        for table, spec in enumerate(self.job.tables):
            if groups.member(table, group) is None:
                continue
            members = []
            for member in range(spec.k):
                other = groups.step(holder, member - spec.k - q)
                factor = coefficient(q, member, spec.r)
                members.append((member, other, int(groups.of_member[table][member]), factor))
            size = 4 * self.world.reference.initial[table, 0].size
            reader = machines.ParityReader(self.job, table, record_bytes=size)
            tables.append(Stripes(table=table, members=members, reader=reader))
        self._stripes[holder, source, group] = q, tables
        return q, tables

    def _is_loading(self, marks: tuple[int, ...]) -> bool:
        """Rows of the checkpoint that this run begins with are still on their way."""
        start = self._start
        return start is not None and any(have < first for have, first in zip(marks, start.marks, strict=True))

    def _compare(self, node: Node, place: tuple[int, int, int], difference: int, unsure: int) -> None:
        """A parity is not what it must be. In blocks that are `unsure` it may be: assigned weights are on their way."""
        source, group, table = place
        size = 4 * self.world.reference.initial[table, 0].size
        member = self.world.groups.member(table, group)
        assert member is not None
        rows = []
        is_bad = False
        for block in range(self._pieces.blocks[table]):
            if not difference >> (8 * size * block) & ((1 << 8 * size) - 1):
                continue
            is_bad |= not unsure >> block & 1
            slot = block * self.job.tables[table].k + member
            row = self.world.reference.places.row_at.get((source, table, slot))
            rows.append(f"row {row} of S{source} (block {block})")
        held = node.server.holder.held[source, group]
        if is_bad:
            self.fail(
                "I1",
                f"the parity at {short(node.identity)} of table {table}, group {group} is wrong after flush "
                f"{held.number} (marks {held.marks}): {', '.join(rows)}",
            )

    # --- Now and then, and at the end ---

    def often(self) -> None:
        """I9, at every tick."""
        world = self.world
        window = world.scenario.window_pushes
        for node in world.nodes.values():
            if node.program is not None:
                if node.changed and (redo := machines.redo_pushes(node.machine)) > max(window, 2):
                    self.fail("I9", f"{short(node.identity)} keeps {redo} pushes, the window is {window}")
                if node.program.window_full and node.program.has_rows:
                    world.probes.hit("window full")
            elif node.changed and node.is_server and (reason := machines.unbounded_reason(node.machine, TAIL_MAX)):
                self.fail("I9", f"{short(node.identity)} {reason}")
            node.changed = False
        if world.network.kept_bytes_max > KEPT_BYTES_MAX:
            self.fail("I9", f"a link keeps {world.network.kept_bytes_max} bytes")
        if world.scenario.cuts is not None and (overdue := self._holds.overdue_reason(world)):
            self.fail("I13", overdue)

    def at_end(self) -> None:
        """Every row is what it must be, every parity the code of it, and nothing is left over."""
        world = self.world
        if world.lost:
            return
        if waiting := promises.waiting_reason(world):
            self.fail("I13", waiting)
        if self._tolerant:
            if reason := promises.unfitting_reason(world):
                self.fail(*reason.split(": ", 1))
            return
        final = world.reference.marks_final
        for key, (server, slot) in world.reference.places.of_row.items():
            holder = self._server(server)
            record = np.empty(holder.store.record_floats(key[0]), np.float32)
            holder.store.read_records(key[0], slot, 1, record)
            expected = self._find_expected(key, final)
            if record[: expected.size].tobytes() != expected.tobytes():
                told = f"is {world.reference.describe(key, record)}, not {world.reference.describe(key, expected)}"
                self.fail("I3", f"in the end row {key[1]} of table {key[0]} on S{server} {told}")
        if not self.coded:
            return
        for server in range(self.job.servers):
            node = world.node("server", server)
            assert node is not None
            for (source, group), held in node.server.holder.held.items():
                if not held.ended or held.marks != final:
                    self.fail("I8", f"S{server} ends with {held.marks} of group {group} of S{source}")
                number = self._server(source).flusher.groups[group].number
                if held.number != number:
                    self.fail(
                        "I8", f"S{server} ends with flush {held.number} of {number} of group {group} of S{source}"
                    )
                self.check_parity(node, source, group, final=True)
        for worker in range(self.job.workers):
            if left := machines.redo_pushes(world.worker(worker).machine):
                self.fail("I8", f"W{worker} still keeps {left} pushes")

    def _find_expected(self, key: tuple[int, int], marks: tuple[int, ...]) -> Any:
        """A row at these marks, without what partial recovery has lost of it."""
        lost = self.world.own_storage.lost.get(key, 0)
        reference = self.world.reference
        return reference.record_without(key, marks, lost) if lost else reference.record(key, marks)

    def _server(self, server: int) -> Any:
        node = self.world.node("server", server)
        assert node is not None
        return node.server
