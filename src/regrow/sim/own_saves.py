"""Saves of single servers in the simulator: what is on storage, what comes back of it, and what is lost then.

With partial recovery rows may be lost, so "every push exactly once" cannot hold. What must hold instead (I14):

    a save has the rows of its instant, as far as it has them, at the marks that it names
    a replacement joins with each of its rows as its last durable save has it, or as it was made
    from then on a row has exactly those, and all pushes behind the marks that were joined at
    the number of updates that are reported as lost is the true one

`lost` keeps, for each row, which of its pushes are gone; the reference leaves them out. Where these rows have parities,
holders may not know yet that rows went back: what they hold is judged by what was lost to the incarnation they know.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import numpy as np

from regrow.core.effects import Notice
from regrow.core.identity import Identity
from regrow.core.own_saves import OwnSaved, SaveOwn
from regrow.core.recall_events import SavedRowsLoaded, SavesFound, SavesLoaded
from regrow.core.wayback import FetchSaved, FindSaves
from regrow.sim import machines
from regrow.sim.net import short
from regrow.sim.nodes import Node, Violation
from regrow.sim.reference import AsyncReference, Key

if TYPE_CHECKING:
    from regrow.sim.world import World

Rows = dict[Key, bytes]  # whole records
ROWS_AT_ONCE = 2  # that come back in one event


@dataclasses.dataclass(slots=True)
class Saving:
    """A save under way."""

    save: SaveOwn
    instant: Rows  # all touched bare rows, as they were
    rows: Rows = dataclasses.field(default_factory=dict)  # taken so far
    fails_after: int | None = None  # bites


@dataclasses.dataclass(frozen=True, slots=True)
class Durable:
    """A save that exists, and the one that it builds on."""

    save: SaveOwn
    rows: Rows
    parent: Durable | None

    def list_all(self) -> list[Durable]:
        """Newest first."""
        return [self, *(self.parent.list_all() if self.parent is not None else ())]


class OwnStorage:
    """All savers and loaders of one world."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.lost: dict[Key, int] = {}  # of each row: the pushes that are gone, a bit for each of `reference.units`
        self._eras: dict[int, list[tuple[int, dict[Key, int]]]] = {}  # by server: the same, from incarnations on
        self.reported: dict[int, int] = {}  # by server: updates lost so far, as it said
        self._heads: dict[int, Durable] = {}  # by server: the newest, which a successor finds
        self._accepted: dict[int, Durable] = {}  # ... that the server counts on: what it saves next builds on that one
        self._owners: dict[int, Identity] = {}  # whose saves count: an older one was replaced
        self._instants: dict[Identity, tuple[tuple[int, ...], Rows]] = {}  # of captures that are not saved yet
        self._saving: dict[Identity, Saving] = {}
        self._told: dict[Identity, Saving] = {}  # exist, and their server is about to hear it
        self._wanted: dict[Identity, list[Key]] = {}
        self._begun: Rows = {}  # bare rows of the checkpoint that the run began with,
        self._lost_before: dict[Key, int] = {}  # and what the run before it had lost of them
        if world.start is not None and world.scenario.saves is not None:
            self._begin_with(world.start.pieces, world.start.marks)

    def _begin_with(self, pieces: tuple[Rows, ...], marks: tuple[int, ...]) -> None:
        reference = self.world.reference
        for piece in pieces:
            self._begun |= {key: record for key, record in piece.items() if self._is_mine(key)}
        for key, units in reference.units.items():
            if self._is_mine(key):
                have, due = self._read_pushes(key, self._begun.get(key)), reference.find_pushes(key, marks)
                lost = sum(1 << index for index, unit in enumerate(units) if due >> index & 1 and unit not in have)
                self.lost[key] = self._lost_before[key] = lost

    def _is_mine(self, key: Key) -> bool:
        """Whether such rows are saved, and may go back."""
        return bool(self.world.groups.is_recallable[key[0]])

    def find_era(self, server: int, incarnation: int) -> tuple[int, dict[Key, int]]:
        """What was lost of the rows of a server when this was its incarnation, and a number for that."""
        eras = self._eras.get(server, [])
        era = sum(first <= incarnation for first, _ in eras)
        return (era, eras[era - 1][1]) if era else (0, self._lost_before)

    def _read_pushes(self, key: Key, record: bytes | None) -> dict[tuple[int, int], int]:
        """The pushes in a row; None: as it was made."""
        reference = self.world.reference
        assert isinstance(reference, AsyncReference)
        return {} if record is None else reference.contents(key, np.frombuffer(record, np.float32))

    def find_lost(self, server: int) -> dict[Key, int]:
        """What is lost by now of the rows of a server."""
        of_row = self.world.reference.places.of_row
        return {key: lost for key, lost in self.lost.items() if of_row[key][0] == server}

    # --- Saving ---

    def note_capture(self, identity: Identity) -> None:
        """This is the instant: notes what the rows are, before anybody captures them."""
        node = self.world.nodes[identity]
        marks = tuple(machines.read_applied(node.server)[self.world.groups.recallable[0]])
        self._instants[identity] = marks, self._read_rows(node)

    def save(self, node: Node, save: SaveOwn) -> None:
        world = self.world
        marks, rows = self._instants.pop(node.identity)
        if marks != save.marks:
            raise Violation("I14", f"{short(node.identity)} saves at {marks}, and says {save.marks}")
        saving = Saving(save, rows)
        if node.server.store.capture_skipped():
            world.probes.hit("own save leaves rows")
        if not world.calm and world.choices.flag(0.2):
            saving.fails_after = world.choices.pick(4)
        self._saving[node.identity] = saving
        self._owners.setdefault(node.identity.id, node.identity)
        world.later(lambda: self._bite(node, saving), of=node)

    def _read_rows(self, node: Node) -> Rows:
        rows = machines.read_touched_rows(node.server, self.world.reference)
        return {key: record for key, record in rows.items() if self._is_mine(key)}

    def unsave(self, node: Node, number: int) -> None:
        self._saving.pop(node.identity, None)
        self._told.pop(node.identity, None)  # it may exist all the same
        self.world.probes.hit("own save given up")

    def _bite(self, node: Node, saving: Saving) -> None:
        world = self.world
        if not node.alive or self._saving.get(node.identity) is not saving:
            return
        if saving.fails_after == 0:
            del self._saving[node.identity]
            world.probes.hit("own save fails")
            world.driver.hand(node, OwnSaved(number=saving.save.number, error="the storage is full"))
            return
        if saving.fails_after is not None:
            saving.fails_after -= 1
        store = node.server.store
        if not store.capture_left():
            slow = 0.0 if world.calm else (0.0, 0.0, 2.0)[world.choices.pick(3)]  # a storage takes its time
            world.later(lambda: self._put(node, saving), at=world.now + slow, of=node)
            return
        for key, record in machines.take_captured(store, 64, world.reference).items():
            if self._is_mine(key):
                saving.rows[key] = record
                if saving.instant.get(key) != record:
                    raise Violation("I14", f"{short(node.identity)} saves row {key} of another time")
        world.later(lambda: self._bite(node, saving), of=node)

    def _put(self, node: Node, saving: Saving) -> None:
        """It exists from here on, whoever hears of that. What a zombie puts is in nobody's chain."""
        world, identity = self.world, node.identity
        if not node.alive or self._saving.get(identity) is not saving:
            return
        if saving.save.full and (missing := saving.instant.keys() - saving.rows.keys()):
            raise Violation("I14", f"a full save of {short(identity)} lacks the rows {sorted(missing)}")
        del self._saving[identity]
        durable: Durable | None = None
        if (
            self._owners[identity.id].incarnation <= identity.incarnation
        ):  # its full, if it did not claim what was there
            self._owners[identity.id] = identity
            parent = None if saving.save.full else self._accepted.get(identity.id)
            durable = self._heads[identity.id] = Durable(saving.save, saving.rows, parent)
            self._check_updates(identity.id)
            world.probes.hit("own save")
        else:
            world.probes.hit("zombie saves")
        full_wanted = not world.calm and world.choices.flag(0.2)

        def tell() -> None:
            if not node.alive or self._told.pop(identity, None) is not saving:
                return
            if durable is not None and self._owners[identity.id] == identity:
                self._accepted[identity.id] = durable
            world.driver.hand(node, OwnSaved(number=saving.save.number, full_wanted=full_wanted))

        self._told[identity] = saving
        world.later(tell, of=node)

    def _check_updates(self, server: int) -> None:
        """A chain contains as many updates as its newest save says."""
        count = 0
        for key, record in self._merge(server).items():
            count += len(self._read_pushes(key, record)) - len(self._read_pushes(key, self._begun.get(key)))
        said = self._heads[server].save.updates
        if count != said:
            raise Violation("I14", f"the saves of S{server} contain {count} updates, and say {said}")

    def _merge(self, server: int) -> Rows:
        """Each row of a chain, as its newest save has it; at its end is the checkpoint that the run began with."""
        of_row = self.world.reference.places.of_row
        merged = {key: record for key, record in self._begun.items() if of_row[key][0] == server}
        for durable in reversed(self._list_chain(server)):
            merged |= durable.rows
        return merged

    def _list_chain(self, server: int) -> list[Durable]:
        """What a successor finds, newest first."""
        head = self._heads.get(server)
        return [] if head is None else head.list_all()

    # --- Coming back ---

    def find(self, node: Node, find: FindSaves) -> None:
        """From here on this server owns the chain; what it finds is told after a while, then come the rows."""
        world, server = self.world, node.identity.id

        def tell() -> None:
            if not node.alive or not world.is_current(node.identity):
                return
            self._owners[server] = node.identity
            chain = self._list_chain(server)
            rows = self._merge(server)
            newest = chain[0].save if chain else None
            if chain:
                self._accepted[server] = chain[0]
            ids = {table: np.array(sorted(row for t, row in rows if t == table), np.uint32) for table in find.tables}
            first = world.start.marks if world.start is not None else (0,) * world.job.marks
            marks = newest.marks if newest is not None else first
            found = SavesFound(marks=marks, updates=newest.updates if newest is not None else 0, ids=ids)
            world.probes.hit("saves found" if chain else "no save found")
            self._wanted[node.identity] = []
            left = [(key, record) for durable in chain for key, record in sorted(durable.rows.items())]
            left += sorted(rows.items())  # of the checkpoint, as far as they are not in a save
            world.driver.hand(node, found)
            world.later(lambda: self._send_rows(node, left), of=node)

        world.later(tell, of=node)

    def fetch(self, node: Node, fetch: FetchSaved) -> None:
        self.world.probes.hit("saved row waited for")
        self._wanted[node.identity] += [(fetch.table, row) for row in fetch.ids.tolist()]

    def _send_rows(self, node: Node, left: list[tuple[Key, bytes]]) -> None:
        world = self.world
        if not node.alive:
            return
        wanted = self._wanted[node.identity]
        rows = self._merge(node.identity.id) if self._owners[node.identity.id] == node.identity else {}
        if wanted and rows:
            part = {key: rows[key] for key in wanted}
            wanted.clear()
        else:
            part = {}
            for key, record in left[:ROWS_AT_ONCE]:
                part.setdefault(key, record)
            del left[:ROWS_AT_ONCE]
        if part:
            world.driver.hand(node, SavedRowsLoaded(rows=machines.make_table_rows(part, world.reference, world.job)))
        elif not left:
            world.driver.hand(node, SavesLoaded())
            return
        world.later(lambda: self._send_rows(node, left), of=node)

    def on_joined(self, node: Node, notice: Notice) -> None:
        """A replacement knows where it is: this, and no more, is lost."""
        world, server = self.world, node.identity.id
        reference = world.reference
        assert isinstance(reference, AsyncReference)
        if not world.is_current(node.identity):
            return
        saved, lost_total = self._merge(server), 0
        marks = notice.values["joined"]
        for key, (place, _) in reference.places.of_row.items():
            if place != server or not self._is_mine(key):
                continue
            have = self._read_pushes(key, saved.get(key))
            due = reference.find_pushes(key, marks)
            lost = 0
            for index, unit in enumerate(reference.units[key]):
                if unit in have and not due >> index & 1:
                    raise Violation("I14", f"{short(node.identity)} joins at {marks}, behind its save with {unit}")
                if due >> index & 1 and unit not in have:
                    lost |= 1 << index
            self.lost[key] = lost
            lost_total += (lost & ~self._lost_before.get(key, 0)).bit_count()
        self._eras.setdefault(server, []).append((node.identity.incarnation, self.find_lost(server)))
        world.checker.on_recalled(server)
        if world.groups.bare is None:
            world.probes.hit("recalled")
        said = notice.values["updates_lost"]
        if said != lost_total:
            raise Violation("I14", f"{short(node.identity)} says that {said} updates are lost, these are {lost_total}")
        if said > self.reported.get(server, 0):
            world.probes.hit("updates lost")
        self.reported[server] = said
