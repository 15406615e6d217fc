"""Who writes, merges, deletes and reads checkpoints in a simulated world: the real `Cuts`, `ManifestWriter`, `Merger`,
retention and `restore`, as actors on a storage that answers late, twice or not at all (stage.py, objects.py).

Here is what they do; what goes wrong meanwhile, and what must hold, is in shelf.py. Rows are numbers, a run counts them
up, and what a cut should be is noted when it is made.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from regrow.checkpoint.chunks import Chunk, Rows, write_chunk
from regrow.checkpoint.lineage import Graph
from regrow.checkpoint.load import restore
from regrow.checkpoint.manifest import Cut, Manifest, chunk_name, shard_name
from regrow.checkpoint.manifests import ManifestWriter
from regrow.checkpoint.merger import Event, Merger
from regrow.core.cuts import Cuts, WriteManifest
from regrow.core.effects import Send
from regrow.core.identity import Identity
from regrow.core.messages import CutAsk, CutAt, CutBegun, CutEnd, CutMarks, CutSaved
from regrow.core.names import parse_piece_name
from regrow.errors import CheckpointError, StorageError, UserError
from regrow.sim.nodes import Violation
from regrow.sim.objects import BEHIND_SECONDS_MAX, PROBLEM
from regrow.sim.stage import Actor

if TYPE_CHECKING:
    from regrow.sim.shelf import Shelf

LOOP_SECONDS = 2.0  # of a coordinator
START_SECONDS = 5.0  # until a process that died has a successor, or is tried again
MERGE_SECONDS = 20.0
READING_SECONDS_MAX = 60.0  # until a reader that knows what it wants begins to read it
ROWS = 10

Model = dict[int, float]


@dataclasses.dataclass(slots=True, eq=False)
class Run:
    """One training: it may begin again, from its newest checkpoint."""

    name: str
    number: int
    parent: str | None  # the cut that it began from
    starts: int = 0
    step: int = 0
    model: Model = dataclasses.field(default_factory=dict)
    term: int = 0
    salt: str = ""
    skew: float = 0.0  # of its clock
    coordinator: Coordinator | None = None
    leader: Actor | None = None  # which is it
    actors: list[Actor] = dataclasses.field(default_factory=list)  # all of its processes
    merger: Actor | None = None
    dead: list[str] = dataclasses.field(default_factory=list)  # cuts that it was storing when all of it died
    told: list[str] = dataclasses.field(default_factory=list)  # cuts of which a coordinator said that they exist

    @property
    def alive(self) -> bool:
        return any(actor.alive for actor in self.actors)


class Coordinator:
    """Makes cuts: the real machine, and what its driver does."""

    def __init__(self, shelf: Shelf, run: Run, term: int) -> None:
        self.shelf, self.run, self.term = shelf, run, term
        self.inbox: list[tuple[int, CutSaved] | None] = []  # None: a server died
        self.storing: dict[int, str] = {}  # number -> cut
        self.writing = False  # a manifest
        self._servers = {index: Identity(role="server", id=index) for index in range(shelf.servers)}
        self._cuts = Cuts(shelf.plan, is_sync=False, marks=1, term=term, salt=run.salt)
        self._writer = ManifestWriter(
            url="sim://",
            run=run.name,
            starts=run.starts,
            extra={},
            encoding="raw",
            bits=32,
            made_by="sim",
            clock=lambda: shelf.stage.now + run.skew,
        )
        self._writer._storage = shelf.storage

    def work(self) -> None:
        self._carry_out(self._cuts.know(self._servers))
        while self.run.term == self.term:  # else it is not the coordinator any more, and hears of it
            self.shelf.train(self.run)
            while self.inbox:
                said = self.inbox.pop(0)
                if said is None:
                    self._carry_out(self._cuts.know(None))
                    self._carry_out(self._cuts.know(self._servers))
                else:
                    self._carry_out(self._cuts.on_saved(*said))
            self._carry_out(self._cuts.tick(self.shelf.stage.now))
            self.shelf.stage.rest(LOOP_SECONDS)

    def _carry_out(self, effects: list[Any]) -> None:
        asked = [effect.message for effect in effects if isinstance(effect, Send)]
        for effect in effects:
            if isinstance(effect, WriteManifest):
                self._write_manifest(effect)
        for message in asked[:1]:  # the same to all servers
            if isinstance(message, CutAsk):
                for server in self._servers:
                    marks = CutMarks(number=message.number, marks=(self.run.step,))
                    self._carry_out(self._cuts.on_marks(server, marks))
            elif isinstance(message, CutAt):
                self._capture(message)
            elif isinstance(message, CutEnd):
                self.storing.pop(message.number, None)

    def _capture(self, at: CutAt) -> None:
        source, target = parse_piece_name(at.piece)
        self.shelf.note_cut(self.run, target, source, turn=(self.run.starts, self.term, at.number))
        self.storing[at.number] = target
        for server in self._servers:
            self._carry_out(self._cuts.on_begun(server, CutBegun(number=at.number)))
        for server in self._servers:
            saver = Saver(self, at.number, at.piece, server)
            self.run.actors.append(self.shelf.stage.spawn(f"{self.run.name} saver {server}", saver.work))

    def _write_manifest(self, write: WriteManifest) -> None:
        self.writing = True
        done = self._writer.write(self.shelf.job, write)
        self.writing = False
        if not done.error:
            self.run.told.append(write.target)
            self.shelf.probes.hit("checkpoint")
        else:
            self.shelf.probes.hit("manifest fails")
        self._carry_out(self._cuts.on_manifest_written(done))
        if write.discard:
            self.shelf.probes.hit("given up cut discarded")
            self._writer.discard(write.discard)


class Saver:
    """One server's part of a cut."""

    def __init__(self, coordinator: Coordinator, number: int, piece: str, server: int) -> None:
        self.coordinator, self.number, self.piece, self.server = coordinator, number, piece, server

    def work(self) -> None:
        try:
            infos = self._store()
        except CheckpointError as error:
            saved = CutSaved(number=self.number, error=error.message, chunks=np.zeros(0, np.uint8))
        else:
            text = msgspec.json.encode(infos)
            saved = CutSaved(number=self.number, error="", chunks=np.frombuffer(text, np.uint8))
        self.coordinator.inbox.append((self.server, saved))

    def _store(self) -> list[Any]:
        shelf = self.coordinator.shelf
        source, target = parse_piece_name(self.piece)
        truth, before = shelf.truth[target], {} if source is None else shelf.truth[source]
        rows = [row for row in sorted(truth) if row % shelf.servers == self.server and truth[row] != before.get(row)]
        shard = shard_name(self.server, shelf.servers, "by number")
        infos = []
        for number, start in enumerate(range(0, len(rows), shelf.rows_per_chunk)):
            if self.number not in self.coordinator.storing or self.coordinator.run.term != self.coordinator.term:
                raise CheckpointError("the cut was given up")
            chunk = make_chunk({row: truth[row] for row in rows[start : start + shelf.rows_per_chunk]})
            name = chunk_name(shard, number)
            infos.append(write_chunk(shelf.storage, self.piece, name, chunk, shard=shard))
        return infos


class Keeper:
    """A merger, of a run or of nobody."""

    def __init__(self, shelf: Shelf, run: Run | None) -> None:
        self.shelf = shelf
        self.skew = 0.0
        self.errors = 0  # since the last round that went well
        self.working = False
        began = shelf.stage.now  # what does not jump begins anywhere
        self._merger = Merger(
            shelf.storage,
            rules=shelf.rules,
            choice=shelf.choice,
            grace_seconds=shelf.grace_seconds,
            unfinished_seconds=shelf.unfinished_seconds,
            dead=() if run is None else tuple(run.dead),
            on_event=self._hear,
            clock=lambda: shelf.stage.now + self.skew,
            ticks=lambda: shelf.stage.now - began,
        )

    def work(self) -> None:
        while True:
            self.working = True
            self.errors = 0 if self._merger.round() else self.errors + 1
            self.working = False
            self.shelf.stage.rest(MERGE_SECONDS)

    def _hear(self, event: Event) -> None:
        if event.kind in ("folded", "deleted", "wanted", "broken"):
            self.shelf.probes.hit(f"merger: {event.kind}")
        self.shelf.log(f"merger: {event.kind} {event.text}")


class Reader:
    """Somebody who loads the newest checkpoint, and keeps to the time that a merger gives."""

    def __init__(self, shelf: Shelf) -> None:
        self.shelf = shelf

    def work(self) -> None:
        began = self.shelf.stage.now
        try:
            graph = read_graph(self.shelf)
            newest = graph.newest()
            if newest is None:
                return
            self.shelf.stage.rest(READING_SECONDS_MAX * self.shelf.choices.pick(5) / 4)
            load(self.shelf, graph, newest)
            self.shelf.probes.hit("read")
        except StorageError:
            self.shelf.probes.hit("read fails")
        except CheckpointError as error:
            seconds = self.shelf.stage.now - began
            excused = PROBLEM in error.message or "no answer" in error.message
            if seconds < self.shelf.reading_seconds_max and not excused:
                raise Violation("reading", f"after {seconds:.0f} s: {error.message}") from error
            self.shelf.probes.hit("read fails")


class Starter:
    """A launcher that begins a run, or begins it again: loads the checkpoint, then there is a coordinator and a merger.
    `wish`: the cut that a user names; "": the newest of all."""

    def __init__(self, shelf: Shelf, run: Run, *, wish: str | None) -> None:
        self.shelf, self.run, self.wish = shelf, run, wish

    def work(self) -> None:
        run = self.run
        while True:
            try:
                cut = self._load()
                break
            except CheckpointError:
                self.shelf.stage.rest(START_SECONDS)
            except UserError:  # a listing does not show it yet, or somebody has deleted it: then the newest will do
                self.wish = ""
                self.shelf.stage.rest(BEHIND_SECONDS_MAX)
        if cut is not None:
            run.step = cut.step
        run.parent = run.parent if cut is None else cut.id
        self.shelf.begin(run)

    def _load(self) -> Cut | None:
        graph = read_graph(self.shelf)
        if self.wish is not None:
            chosen = graph.choose(self.wish or None)
        else:  # as a run does that falls back
            own = [cut for cut in graph.restorable() if cut.extra.get("run") == self.run.name]
            if not own:
                self.run.model, self.run.step = {}, 0
                return None
            chosen = own[-1]
        self.run.model = load(self.shelf, graph, chosen)
        self.shelf.probes.hit("started from a checkpoint")
        return chosen


# -- reading and writing -----------------------------------------------------------------------------------


def make_chunk(rows: Model) -> Chunk:
    weight = np.array([[value] for value in rows.values()], np.float32)
    return {"t": Rows(np.array(list(rows), np.uint32), weight, {})}


def read_graph(shelf: Shelf) -> Graph:
    manifests, _ = shelf.storage.manifests()
    return Graph(manifests)


def load(shelf: Shelf, graph: Graph, cut: Cut) -> Model:
    """The rows of a cut, which must be what they were."""
    found: Model = {}

    def apply(_: Manifest, chunk: Chunk) -> None:
        for rows in chunk.values():
            found.update(zip(rows.ids.tolist(), rows.weight[:, 0].tolist(), strict=True))

    plan, _ = graph.restore_plan(cut.id)
    report = restore(shelf.storage, plan, apply)
    if len(report.pieces) > 1:
        shelf.probes.hit("several pieces read")
    if report.broken:
        shelf.probes.hit("gone around")
    shelf.check_rows(cut.id, found)
    return found
