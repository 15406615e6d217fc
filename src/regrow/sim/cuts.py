"""Checkpoints in the simulator: the storage that servers and the coordinator would write to, and what must be on it.

Captured rows are taken a bite at a time, at events that the tape chooses, while everything else goes on. A piece is a
dict of rows. I11, checked when a piece is written:

    all servers captured at exactly the marks that the piece names
    what was captured is what the rows were at that instant, read independently
    the state restored from the piece and those it starts from is that of the reference after exactly these pushes

The same holds for publications, which another tenant has made of the same rows, at times of its own: their pieces are
beside those of checkpoints, and neither starts from one of the other.

The rule to keep: a piece may exist although nobody was told so (the coordinator died, the answer was lost), and must be
right all the same.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from regrow.core.cut import PUBLICATION_TENANT, TENANT, EpochPart, Save, Saved
from regrow.core.cuts import NAMES, CutNow, CutPlan, ManifestWritten, WriteManifest
from regrow.core.effects import Notice
from regrow.core.identity import Identity
from regrow.core.names import piece_name
from regrow.core.wayback import Load, LoadedAll, LoadedRows
from regrow.sim import machines
from regrow.sim.net import COORDINATOR, short
from regrow.sim.nodes import Node, Violation
from regrow.sim.reference import Key

if TYPE_CHECKING:
    from regrow.sim.world import World

Rows = dict[Key, bytes]  # whole records


@dataclasses.dataclass(frozen=True, slots=True)
class Snapshot:
    """A server at the instant of a capture: all its touched rows."""

    server: int
    marks: list[tuple[int, ...]]  # by group
    full: bool
    rows: Rows
    lost: dict[Key, int]  # what partial recovery had lost of its rows by then


@dataclasses.dataclass(frozen=True, slots=True)
class Piece:
    """What is on storage, and the state that it leads to."""

    target: str
    source: str | None
    marks: tuple[int, ...]
    rows: Rows
    state: Rows
    epochs: tuple[int, ...] | None = None  # by server, where rows stay in the files of stores


@dataclasses.dataclass(frozen=True, slots=True)
class Start:
    """The checkpoint that a run starts from: its name, and its pieces, oldest first; or the epochs of all servers."""

    cut: str
    pieces: tuple[Rows, ...]
    marks: tuple[int, ...]
    epochs: tuple[int, ...] | None = None


class Storage:
    """All savers, the writer of manifests, the loader and what they wrote, of one world."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.pieces: dict[str, Piece] = {}  # of checkpoints, by target
        self.publications: dict[str, Piece] = {}
        self.discarded: set[str] = set()  # names of pieces that were given up; membership only
        self.written_calm = dict.fromkeys(NAMES, 0)  # since nothing fails any more
        self._snapshots: dict[str, Snapshot] = {}
        self._parts: dict[str, Rows] = {}
        self._saving: dict[Identity, int] = {}  # the cut that each server is storing
        self._fails_after: dict[Identity, int] = {}  # bites until a server's storage fails
        self._failed = dict.fromkeys(NAMES, False)  # a cut was given up since the last one that was written
        self._full_wanted = dict.fromkeys(NAMES, False)
        self._asked: dict[int, Identity] = {}  # the coordinator that was asked for a cut of the end
        self._ended = dict.fromkeys(NAMES, False)  # and made it

    def _find_pieces(self, tenant: int) -> dict[str, Piece]:
        return self.pieces if tenant == TENANT else self.publications

    def _find_plans(self) -> dict[int, CutPlan]:
        """Who has cuts made."""
        cuts = self.world.cuts
        return {TENANT: cuts.plan} | ({} if cuts.publications is None else {PUBLICATION_TENANT: cuts.publications})

    # --- A server ---

    def note_capture(self, identity: Identity, full: bool) -> None:
        """This is the instant: notes what the rows are, before anybody captures them."""
        node = self.world.nodes[identity]
        name = self._name(identity, machines.cut_number(node.server))
        marks = [tuple(each) for each in machines.read_applied(node.server)]
        rows = machines.read_touched_rows(node.server, self.world.reference)
        lost = self.world.own_storage.find_lost(identity.id)
        self._snapshots[name] = Snapshot(identity.id, marks, full, rows, lost)

    def note_epoch(self, identity: Identity, epoch: int) -> None:
        """The same where rows stay in the files of the store: they are named by the epoch that ends now."""
        node = self.world.nodes[identity]
        marks = [tuple(each) for each in machines.read_applied(node.server)]
        rows = machines.read_touched_rows(node.server, self.world.reference)
        self._snapshots[f"{identity.id}/{epoch}"] = Snapshot(identity.id, marks, True, rows, {})

    def _record(self, table: int, record: Any) -> bytes:
        values: bytes = record[: self.world.reference.initial[table, 0].size].tobytes()
        return values

    def _name(self, identity: Identity, number: int) -> str:
        return f"{short(identity)}/{number}"

    def save(self, node: Node, save: Save) -> None:
        name = self._name(node.identity, save.number)
        self._saving[node.identity] = save.number
        self._parts[name] = {}
        if not self._snapshots[name].full and self._failed[save.tenant]:
            probe = "delta after a failed cut" if save.tenant == TENANT else "delta after a failed publication"
            self.world.probes.hit(probe)
        self._fails_after.pop(node.identity, None)
        if not self.world.calm and self.world.choices.flag(self.world.cuts.error_rate):
            self._fails_after[node.identity] = self.world.choices.pick(4)
        self.world.later(lambda: self._bite(node, save.number), of=node)

    def unsave(self, node: Node, number: int) -> None:
        if self._saving.get(node.identity) == number:
            del self._saving[node.identity]

    def _bite(self, node: Node, number: int) -> None:
        """A few captured rows are taken; after the last of them the server is told."""
        world = self.world
        if not node.alive or self._saving.get(node.identity) != number:
            return
        left = self._fails_after.get(node.identity)
        if left == 0:
            world.probes.hit("storage fails")
            world.driver.hand(node, Saved(number=number, error="the storage is full"))
            return
        if left is not None:
            self._fails_after[node.identity] = left - 1
        store, name = node.server.store, self._name(node.identity, number)
        if store.capture_side_bytes():
            world.probes.hit("copy on write")
        aside_first = not world.calm and world.choices.flag(0.3)
        if not store.capture_left():
            self._check_part(name)
            world.driver.hand(node, Saved(number=number, chunks=name))
            return
        for table, ids, parts in store.capture_chunk(world.cuts.bite_bytes, aside_first):
            values = np.concatenate(parts, axis=1)
            padding = store.record_floats(table) - values.shape[1]
            for row, record in zip(ids.tolist(), np.pad(values, ((0, 0), (0, padding))), strict=True):
                self._parts[name][table, row] = self._record(table, record)
        world.later(lambda: self._bite(node, number), of=node)

    def _check_part(self, name: str) -> None:
        """I11: what was taken is what was there."""
        part, snapshot = self._parts[name], self._snapshots[name]
        for key, record in part.items():
            if snapshot.rows.get(key) != record:
                self._fail(name, key, record, snapshot.rows.get(key), "as captured")
        if snapshot.full and (missing := snapshot.rows.keys() - part.keys()):
            raise Violation("I11", f"{name} is to be full and lacks the rows {sorted(missing)}")

    # --- The coordinator ---

    def write_manifest(self, node: Node, write: WriteManifest) -> None:
        """Writes the manifest after a while, and says so after another."""
        world = self.world
        rate = 0.0 if world.calm else world.cuts.error_rate
        error = bool(rate) and world.choices.flag(rate)
        exists = not error or world.choices.flag(0.5)
        if world.scenario.profile.batch and write.tenant == TENANT:
            write, epochs = self._name_epochs(write)
        else:
            epochs = None
        full_wanted = bool(rate) and world.choices.flag(0.1)

        def put() -> None:
            if not node.alive:
                return
            if exists:
                self._write(write, epochs)
            world.later(tell, of=node)

        def tell() -> None:
            if not node.alive:
                return
            self._full_wanted[write.tenant] |= full_wanted
            text = "the storage does not answer" if error else ""
            written = ManifestWritten(number=write.number, error=text, full_wanted=full_wanted, tenant=write.tenant)
            world.driver.hand(node, written)

        world.later(put, of=node)

    def _name_epochs(self, write: WriteManifest) -> tuple[WriteManifest, tuple[int, ...]]:
        """What servers said is an epoch each; their snapshots are named by it."""
        epochs = tuple(msgspec.json.decode(part, type=EpochPart).epoch for part in write.chunks)
        names = tuple(f"{server}/{epoch}" for server, epoch in enumerate(epochs))
        for name in names:
            self._parts[name] = self._snapshots[name].rows
        return dataclasses.replace(write, chunks=names), epochs

    def _write(self, write: WriteManifest, epochs: tuple[int, ...] | None) -> None:
        world = self.world
        if piece_name(write.source, write.target) in self.discarded:
            raise Violation("I11", f"{write.target} was given up, and is published all the same")
        self.discarded.update(write.discard)
        pieces = self._find_pieces(write.tenant)
        if exist := [name for name in write.discard if name.partition(".")[0] in self.pieces | self.publications]:
            raise Violation("I11", f"{write.target} discards {exist}, which exist")
        snapshots = [self._snapshots[name] for name in write.chunks]
        if [snapshot.server for snapshot in snapshots] != list(range(world.job.servers)):
            raise Violation("I11", f"{write.target} has chunks of {[each.server for each in snapshots]}")
        for snapshot, name in zip(snapshots, write.chunks, strict=True):
            if any(marks != write.marks for marks in snapshot.marks):
                raise Violation("I11", f"{write.target} is at {write.marks}, but {name} at {snapshot.marks}")
        state: Rows = {}
        if write.source is not None:
            if write.source not in pieces:
                raise Violation("I11", f"{write.target} starts from {write.source}, which does not exist")
            state = dict(pieces[write.source].state)
        rows: Rows = {}
        for name in write.chunks:
            rows |= self._parts[name]
        state |= rows
        self._check_state(write, state, snapshots)
        pieces[write.target] = Piece(write.target, write.source, write.marks, rows, state, epochs)
        self._count(write)

    def _count(self, write: WriteManifest) -> None:
        world = self.world
        if write.tenant == TENANT:
            world.probes.hit("full cut" if write.source is None else "delta cut")
        else:
            world.probes.hit("full publication" if write.source is None else "delta publication")
        if write.source is None and self._full_wanted[write.tenant]:
            world.probes.hit("full because it was wanted")
            self._full_wanted[write.tenant] = False
        self._failed[write.tenant] = False
        if world.calm:
            self.written_calm[write.tenant] += 1
        world.log(f"{write.target} from {write.source} is written, marks {write.marks}")

    def _check_state(self, write: WriteManifest, state: Rows, snapshots: list[Snapshot]) -> None:
        """I11: what is restored is what the servers had, and what the pushes make of the first rows."""
        reference = self.world.reference
        there: Rows = {}
        lost: dict[Key, int] = {}
        for snapshot in snapshots:
            there |= snapshot.rows
            lost |= snapshot.lost
        for key, initial in reference.initial.items():
            first = initial.tobytes()
            found, had = state.get(key, first), there.get(key, first)
            gone = lost.get(key, 0)
            record = reference.record_without(key, write.marks, gone) if gone else reference.record(key, write.marks)
            expected = record.tobytes()
            # A row that no push has reached yet may have its assigned weights, or not yet.
            allowed = (first, expected) if reference.is_open(key, write.marks) else (expected,)
            if found not in allowed:
                self._fail(write.target, key, found, expected, f"restored at {write.marks}")
            if had not in allowed:
                self._fail(write.target, key, had, expected, f"at its server, at {write.marks}")
            if found != had and len(allowed) == 1:
                self._fail(write.target, key, found, had, "restored")

    def _fail(self, name: str, key: Key, found: bytes, wanted: bytes | None, how: str) -> None:
        told = [
            "nothing" if record is None else self.world.reference.describe(key, np.frombuffer(record, np.float32))
            for record in (found, wanted)
        ]
        raise Violation("I11", f"{name}: row {key[1]} of table {key[0]} {how} is {told[0]}, not {told[1]}")

    def notice(self, node: Node, notice: Notice) -> None:
        """The coordinator says how a cut ended."""
        tenant = next((tenant for tenant, name in NAMES.items() if name == notice.name), None)
        if tenant is None or notice.values["status"] == "begun":
            return
        saved = notice.values["status"] == "saved"
        if saved:
            self.world.probes.hit("cut published")
        else:
            self._failed[tenant] = True
            if notice.values["reason"] == "a server died":
                self.world.probes.hit("cut given up: a server died")
            if notice.values["reason"] == "a worker was not heard of":
                self.world.probes.hit("bound: cut under way")
            self.world.log(f"no cut: {notice.values['reason']}")
        if notice.values["still"] and self._asked.get(tenant) == node.identity:
            self._ended[tenant] = saved
            del self._asked[tenant]

    # --- The end of a run ---

    def supervise(self) -> None:
        """The launcher asks for a last cut when the workers are done, and again when that has failed."""
        cuts = self.world.scenario.cuts
        if cuts is None or not cuts.still or not self.world.workers_done():
            return
        coordinator = self.world.node(COORDINATOR)
        if coordinator is None:
            return
        for tenant in self._find_plans():
            if not self._ended[tenant] and self._asked.get(tenant) != coordinator.identity:
                self._ask(coordinator, tenant)

    def _ask(self, coordinator: Node, tenant: int) -> None:
        self._asked[tenant] = coordinator.identity

        def ask() -> None:
            if coordinator.alive:
                self.world.driver.hand(coordinator, CutNow(still=True, tenant=tenant))

        self.world.later(ask, of=coordinator)

    def unfinished_reason(self) -> str:
        """Why a run cannot end yet: a cut must be published when nothing fails any more."""
        cuts = self.world.scenario.cuts
        if cuts is None:
            return ""
        for tenant, plan in self._find_plans().items():
            if cuts.still and not self._ended[tenant]:
                return f"no {NAMES[tenant]} of the end"
            by_time = not cuts.still and self.world.job.mode == "async" and plan.every_seconds is not None
            if by_time and not self.written_calm[tenant] and self.world.calm:
                return f"no {NAMES[tenant]} while all is well"
        return ""

    def check_end(self) -> None:
        """The last checkpoint is one of the end, and so is the last publication."""
        for tenant, name in NAMES.items():
            pieces, final = self._find_pieces(tenant), self.world.reference.marks_final
            if self._ended[tenant] and not any(piece.marks == final for piece in pieces.values()):
                raise Violation("I11", f"a {name} of the end was promised, there are {list(pieces)}")

    # --- Starting from a checkpoint ---

    def find_newest(self) -> Start | None:
        """What all begin again from; None: nothing was stored in this world."""
        return self.chain(list(self.pieces)[-1]) if self.pieces else None

    def chain(self, target: str) -> Start:
        """What leads to this cut."""
        pieces: list[Rows] = []
        at: str | None = target
        while at is not None:
            pieces.insert(0, self.pieces[at].rows)
            at = self.pieces[at].source
        return Start(target, tuple(pieces), self.pieces[target].marks, self.pieces[target].epochs)

    def load(self, node: Node, load: Load) -> None:
        """Rows come a few at a time, oldest piece first, each piece written over what was there."""
        start = self.world.start
        assert start is not None and load.cut == start.cut
        of_row, server = self.world.reference.places.of_row, node.identity.id
        bites: list[LoadedRows | LoadedAll] = []
        for rows in start.pieces:
            mine = sorted(key for key in rows if of_row[key][0] == server)
            for first in range(0, len(mine), 3):
                bites.append(self._make_rows({key: rows[key] for key in mine[first : first + 3]}))
        bites.append(LoadedAll(marks=start.marks))

        def bite(number: int) -> None:
            if node.alive:
                self.world.driver.hand(node, bites[number])
                if number + 1 < len(bites):
                    self.world.later(lambda: bite(number + 1), of=node)

        self.world.later(lambda: bite(0), of=node)

    def _make_rows(self, rows: Rows) -> LoadedRows:
        found = []
        for table, spec in enumerate(self.world.job.tables):
            mine = {row: np.frombuffer(record, np.float32) for (of, row), record in rows.items() if of == table}
            parts, end = [], 0
            for width in (spec.dim, *(width for _, width in spec.optimizer.state_parts(spec.dim))):
                start, end = end, end + width
                parts.append(np.array([record[start:end] for record in mine.values()], np.float32))
            found.append((table, np.array(list(mine), np.uint32), parts))
        return LoadedRows(rows=found)
