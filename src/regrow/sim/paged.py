"""A store whose rows may be on disk, for the simulator: a model of `store.interface.PagedRows`.

The rows themselves are those of the store in memory, under this one. What is modelled is which of them *count* as in
memory (whoever reads or changes another gets an error), who has pinned them, when reads come (late, in any order), and
what is on the disk: versions of rows by incarnation and epoch, some of them not synced. A crash of everybody leaves the
disks, and of what was not synced any part. The rule to keep: nothing here knows what a server ought to do; it is as
unkind as the interface allows.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from regrow.core.checks import RowChecks
from regrow.core.identity import Identity
from regrow.core.job import JobSpec
from regrow.core.paging import Fetched
from regrow.sim.nodes import Violation
from regrow.sim.reference import Reference
from regrow.store.memory import MemoryStore

if TYPE_CHECKING:
    from regrow.sim.nodes import Node
    from regrow.sim.world import World

Place = tuple[int, int]  # table and slot
WRITES_MAX = 3  # rows that are written to the disk at once


@dataclasses.dataclass(frozen=True, slots=True)
class Version:
    """A record as it was written, once."""

    incarnation: int
    epoch: int
    record: bytes


class Disk:
    """What a server's files hold: it outlives the server."""

    def __init__(self) -> None:
        self.versions: dict[Place, list[Version]] = {}
        self.committed = 0
        self.ends: list[int] = []  # by incarnation: the epoch at which it was left behind

    @property
    def incarnation(self) -> int:
        return len(self.ends)

    def write(self, place: Place, version: Version) -> None:
        self.versions.setdefault(place, []).append(version)

    def go_back(self, epoch: int) -> None:
        """What was written since does not count any more, and is not wiped."""
        self.ends.append(epoch)
        self.committed = epoch

    def find(self, place: Place, epoch: int) -> Version | None:
        """The newest version that counts for a checkpoint: of equals, the one written last."""
        ends = [*self.ends, epoch]
        counting = [v for v in self.versions.get(place, ()) if v.epoch <= min(ends[v.incarnation], epoch)]
        return max(reversed(counting), key=lambda v: (v.incarnation, v.epoch), default=None)

    def commit(self, epoch: int) -> None:
        """Only this checkpoint and what is newer is kept."""
        self.committed = epoch
        for place, versions in self.versions.items():
            kept = self.find(place, epoch)
            newer = [v for v in versions if v.incarnation == self.incarnation and v.epoch > epoch]
            self.versions[place] = ([kept] if kept is not None else []) + newer


@dataclasses.dataclass(slots=True)
class Ticket:
    places: list[Place]
    admitted: bool = False  # it has its frames
    told: bool = False


class PagedModel:
    """One server's store. What is not here is as the store in memory has it."""

    is_paged = True

    def __init__(self, disks: Disks, job: JobSpec, server: int) -> None:
        self._rows = MemoryStore(job, server, False)
        self._checks = RowChecks(job, self._rows)
        self._dims = np.array([table.dim for table in job.tables], np.int64)
        self._disks = disks
        self._disk = disk = disks.disks[server]
        self._server = server
        self._tickets: dict[int, Ticket] = {}
        self._ticket_last = 0
        self._resident: dict[Place, None] = {}  # from the one not used for longest
        self.reading: list[Place] = []
        self._dirty: dict[Place, int] = {}  # not on disk: the epoch in which it last changed
        self.unsynced: list[tuple[Place, Version]] = []
        self._epoch = disk.ends[-1] if disk.ends else 0  # the last that was begun
        for place in disk.versions:
            if (version := disk.find(place, self._epoch)) is not None:
                self._rows.write_records(*place, 1, np.frombuffer(version.record, np.float32).copy())

    def __getattr__(self, name: str) -> Any:
        return getattr(self._rows, name)

    # --- Rows ---

    def gather(self, counts: Any, slots: Any, out: Any) -> None:
        self._check(counts, slots)
        self._rows.gather(counts, slots, out)

    def update(self, counts: Any, slots: Any, grads: Any, step: int, rates: Sequence[float] = ()) -> None:
        self._check(counts, slots)
        self._change(list_places(counts, slots))
        self._rows.update(counts, slots, grads, step, rates)

    def assign_untouched(self, counts: Any, slots: Any, weights: Any) -> None:
        # A server leaves these to its store, which refuses a wrong call before it has changed anything.
        self._checks.check_counts(counts, slots)
        self._checks.check_range(counts, slots)
        if int(counts @ self._dims) != weights.size:
            raise ValueError(f"{weights.size} weights do not fit {slots.size} slots")
        self._change(list_places(counts, slots))
        self._rows.assign_untouched(counts, slots, weights)

    def write_records(self, table: int, slot_first: int, slot_count: int, source: Any) -> None:
        self._change([(table, slot) for slot in range(slot_first, slot_first + slot_count)])
        self._rows.write_records(table, slot_first, slot_count, source)

    def _check(self, counts: Any, slots: Any) -> None:
        for place in list_places(counts, slots):
            if place not in self._resident:
                raise ValueError(f"slot {place[1]} of table {place[0]} is not in memory")

    def _change(self, places: list[Place]) -> None:
        """What an epoch that was begun still needs of these rows is written first."""
        for place in places:
            if self._dirty.get(place, self._epoch + 1) <= self._epoch:
                self._write(place)
            self._dirty[place] = self._epoch + 1

    def _write(self, place: Place) -> None:
        record = np.empty(self._rows.record_floats(place[0]), np.float32)
        self._rows.read_records(*place, 1, record)
        version = Version(self._disk.incarnation, self._dirty.pop(place), record.tobytes())
        self.unsynced.append((place, version))

    # --- Tickets ---

    @property
    def pinned(self) -> dict[Place, None]:
        return {place: None for ticket in self._tickets.values() if ticket.admitted for place in ticket.places}

    def fetch(self, counts: Any, slots: Any) -> int:
        places = list(dict.fromkeys(list_places(counts, slots)))
        if len(places) > self._disks.frames:
            raise ValueError(f"{len(places)} rows, the cache has {self._disks.frames}")
        if all(place in self._resident for place in places):
            for place in places:
                del self._resident[place]
                self._resident[place] = None
            return 0
        self._ticket_last += 1
        self._tickets[self._ticket_last] = Ticket(places)
        self._disks.probe("row on disk")
        self._admit()
        return self._ticket_last

    def _admit(self) -> None:
        """Frames for the oldest tickets, for each all at once."""
        for ticket in self._tickets.values():
            if ticket.admitted:
                continue
            wanted = [p for p in ticket.places if p not in self._resident and p not in self.reading]
            pinned = self.pinned
            free = [p for p in self._resident if p not in pinned and p not in ticket.places]
            lacking = len(self._resident) + len(self.reading) + len(wanted) - self._disks.frames
            if lacking > len(free):
                self._disks.probe("cache full")
                return
            for place in free[: max(0, lacking)]:
                self._evict(place)
            ticket.admitted = True
            self.reading += wanted
            self._disks.schedule_reads(self._server, len(wanted))

    def _evict(self, place: Place) -> None:
        del self._resident[place]
        if place in self._dirty:
            self._write(place)

    def arrive(self, index: int) -> None:
        """One of the reads under way is done."""
        self._resident[self.reading.pop(index)] = None

    def poll_fetched(self) -> list[int]:
        self._admit()
        done = []
        for number, ticket in self._tickets.items():
            if ticket.admitted and not ticket.told and all(place in self._resident for place in ticket.places):
                ticket.told = True
                done.append(number)
        return done

    def release(self, ticket: int) -> None:
        del self._tickets[ticket]
        self._admit()

    def upkeep(self) -> bool:
        """Evicts whatever nobody has pinned, as far as chance will have it."""
        pinned = self.pinned
        free = [place for place in self._resident if place not in pinned]
        for place in free[: self._disks.choose(len(free) + 1)]:
            self._evict(place)
        self._admit()
        return False

    # --- Epochs ---

    def begin_epoch(self) -> int:
        self._epoch += 1
        self._disks.schedule_writes(self._server)
        return self._epoch

    def _list_unwritten(self) -> list[Place]:
        return [place for place, epoch in self._dirty.items() if epoch <= self._epoch]

    def write_some(self) -> bool:
        """Writes a few rows of the epoch, or syncs. False: all of it is on the disk."""
        unwritten = self._list_unwritten()
        if unwritten:
            for place in unwritten[: 1 + self._disks.choose(WRITES_MAX)]:
                self._write(place)
            return True
        for place, version in self.unsynced:
            self._disk.write(place, version)
        self.unsynced.clear()
        return False

    def poll_complete(self) -> int:
        old = [self._dirty[place] for place in self._list_unwritten()]
        old += [version.epoch for _, version in self.unsynced if version.epoch <= self._epoch]
        return min([epoch - 1 for epoch in old], default=self._epoch)

    def hasten(self, epoch: int, seconds_left: float) -> None:
        assert epoch == self._epoch and seconds_left >= 0.0

    def commit_epoch(self, epoch: int) -> None:
        if epoch <= self._disk.committed:
            raise Violation("I11", f"S{self._server} commits epoch {epoch} after {self._disk.committed}")
        self._disk.commit(epoch)

    @property
    def rows_ahead_max(self) -> int:
        """As many as there are frames: what is read ahead may push out what is needed now."""
        return self._disks.frames * self._disks.world.job.workers

    def tier_report(self) -> dict[str, int | float]:
        return {}

    # --- The end of it ---

    def crash(self) -> None:
        """Of what was not synced, any part is on the disk."""
        for place, version in self.unsynced:
            if self._disks.choose(2):
                self._disk.write(place, version)

    def leftover_reason(self) -> str:
        """What is pinned although nobody waits."""
        return f"keeps the tickets {list(self._tickets)}" if self._tickets else ""


class Disks:
    """The disks of all servers of a world, and the stores on top of them."""

    def __init__(self, world: World, disks: list[Disk] | None) -> None:
        """`disks`: as the world before this one left them."""
        self.world = world
        self.frames = count_needed(world.reference) + world.scenario.frames_spare
        self.stores: dict[int, PagedModel] = {}  # by server: the one that runs
        start = world.start
        if disks is None or start is None or start.epochs is None:
            self.disks = [Disk() for _ in range(world.job.servers)]
            return
        self.disks = disks
        for disk, epoch in zip(disks, start.epochs, strict=True):
            disk.go_back(epoch)

    def check_start(self) -> None:
        """I11: what is on the disks at these epochs is the state that the manifest names."""
        start, reference = self.world.start, self.world.reference
        if start is None or start.epochs is None:
            return
        for key, (server, slot) in reference.places.of_row.items():
            version = self.disks[server].find((key[0], slot), start.epochs[server])
            first = reference.initial[key].tobytes()
            found = first if version is None else version.record[: len(first)]
            expected = reference.record(key, start.marks).tobytes()
            if found != expected and not (reference.is_open(key, start.marks) and found == first):
                told = reference.describe(key, np.frombuffer(found, np.float32))
                raise Violation(
                    "I11", f"{start.cut}: on the disk of S{server} row {key[1]} of table {key[0]} is {told}"
                )

    def build(self, job: JobSpec, identity: Identity) -> PagedModel:
        store = self.stores[identity.id] = PagedModel(self, job, identity.id)
        begin = store.begin_epoch

        def begin_epoch() -> int:
            epoch = begin()
            self.world.storage.note_epoch(identity, epoch)
            return epoch

        store.begin_epoch = begin_epoch  # type: ignore[method-assign]
        return store

    def probe(self, name: str) -> None:
        self.world.probes.hit(name)

    def choose(self, count: int) -> int:
        """By the tape; when nothing fails any more, the disk is quick and keeps what it has."""
        return 0 if self.world.calm or count < 2 else self.world.choices.pick(count, dull=0.4)

    def schedule_reads(self, server: int, count: int) -> None:
        for _ in range(count):
            self._later(server, self._read)

    def schedule_writes(self, server: int) -> None:
        self._later(server, self._write)

    def _later(self, server: int, what: Any) -> None:
        store, node = self.stores.get(server), self.world.node("server", server)
        if node is not None:
            self.world.later(lambda: what(node, store) if node.alive else None, of=node)

    def _read(self, node: Node, store: PagedModel) -> None:
        store.arrive(self.choose(len(store.reading)))
        self.world.driver.hand(node, Fetched())

    def _write(self, node: Node, store: PagedModel) -> None:
        if store.write_some():
            self.schedule_writes(node.identity.id)
        self.world.driver.hand(node, Fetched())

    def crash(self) -> list[Disk]:
        """Everybody is gone; what the next ones find."""
        for _, store in sorted(self.stores.items()):
            store.crash()
        return self.disks


def count_needed(reference: Reference) -> int:
    """The most rows that one ticket of any server may name: synchronously those of a step of all workers."""
    job, most = reference.job, 1
    for step in range(1, reference.steps + 2):
        by_worker = [np.diff(reference.plans[w, step].row_start) for w in range(job.workers)]
        most = max(most, int(np.max(np.sum(by_worker, axis=0) if job.mode == "sync" else by_worker)))
    return most


def list_places(counts: Any, slots: Any) -> list[Place]:
    tables = np.repeat(np.arange(len(counts)), counts)
    return list(zip(tables.tolist(), slots.tolist(), strict=True))
