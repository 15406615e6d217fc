"""The storage profile: checkpoints are written, merged, deleted and read, and anything may fail at any point.

Writers and mergers die between two calls or come back after others took their place, a run begins again or another goes
on from one of its cuts, clocks jump, and the storage is `objects.Objects`. What must hold:

    whole     a manifest that is there has all its chunks; one of a merger that was stopped for long is made whole or
              taken back, and nobody needs it meanwhile
    newest    the newest checkpoint that can be restored never goes back: not along a run, and not to one that it was
              trained on from
    kept      to delete a piece changes neither the newest checkpoint that can be restored nor that of an open run
    rows      what is loaded is what the cut was when it was made, however it was merged
    reading   who loads the newest checkpoint, from a storage that does not fail, within the grace period, gets it
    end       when nothing fails any more: checkpoints are made, each of those told of is newer than the one before, all
              that can be restored is right, and there is no file that nothing needs
    code      nothing raises what it should not

Assumed: what was asked for happens within LATE_SECONDS_MAX; a process that hangs does so for HANG_SECONDS_MAX, once,
which is more than the grace period, and with an attempt less than the time after which what is unfinished goes.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable, Iterator
from unittest import mock

from regrow.checkpoint.lineage import Graph
from regrow.checkpoint.manifest import MANIFEST, Manifest, decode
from regrow.checkpoint.policy import Choice
from regrow.checkpoint.retention import Rules, prune_plan
from regrow.core import cuts
from regrow.core.cuts import CutPlan
from regrow.core.job import JobSpec, OptimizerSpec, TableSpec
from regrow.core.names import cut_step, is_piece_name
from regrow.errors import CheckpointError
from regrow.sim.choices import Choices
from regrow.sim.keepers import ROWS, START_SECONDS, Coordinator, Keeper, Model, Reader, Run, Starter, load
from regrow.sim.nodes import Violation
from regrow.sim.objects import BEHIND_SECONDS_MAX, Object, Objects, SimStorage
from regrow.sim.probes import Probes
from regrow.sim.stage import Actor, Stage

GRACE_SECONDS = 100.0
UNFINISHED_SECONDS = 600.0
ATTEMPT_SECONDS = 200.0
HANG_SECONDS_MAX = 240.0
TURNS_MAX = 40_000
RUNS_MAX = 5
FAULTS = (
    *("kill coordinator", "hang coordinator", "kill writer", "hang writer", "hang writer", "hang writer"),
    *("kill saver", "hang saver", "kill merger", "hang merger", "kill idler", "hang idler", "second merger"),
    *("kill run", "kill run", "fork", "go back", *("reader",) * 5, *("clock",) * 3),
)

PROBES = {
    "checkpoint": "a coordinator says that one exists",
    "manifest fails": "a manifest could not be written, or was not told of",
    "given up cut discarded": "chunks of an attempt that was given up are removed",
    "merger: folded": "pieces become one",
    "merger: deleted": "pieces, leftovers or unfinished ones go",
    "read": "somebody loads the newest checkpoint",
    "read fails": "and somebody cannot",
    "several pieces read": "a restore follows a chain",
    "started from a checkpoint": "a run goes on from one",
    "kill coordinator": "it has a successor, which knows nothing of its cuts",
    "hang coordinator": "another takes its place, and it comes back",
    "kill writer": "a coordinator dies while it writes a manifest",
    "hang writer": "a coordinator hangs while it writes a manifest, and goes on with that when another took its place",
    "kill saver": "a server dies while it stores",
    "hang saver": "a server is slow to store",
    "kill run": "all processes die, and begin again",
    "fork": "another run goes on from the newest cut while this one trains",
    "go back": "another run goes on from an older cut",
    "kill merger": "a merger dies in the middle of a round",
    "hang merger": "another takes its place, and it comes back",
    "kill idler": "a merger dies between two rounds",
    "hang idler": "a merger hangs between two rounds",
    "second merger": "two at once",
    "clock": "a clock jumps",
    "object storage fails": "a question is not answered",
    "done and not told": "a change happens, and its caller hears of an error",
    "done twice": "a change happens once more, later",
    "done late": "a change happens after its caller gave up",
    "listing behind": "a listing does not show what happened last",
    "old manifest late": "one of a coordinator that was replaced",
}

RARE = {  # reached in long runs
    "merger: broken": "a merger finds damage",
    "merger: wanted": "a merger asks for a full",
    "merged piece torn": "a merger that was stopped writes a manifest whose chunks others took for left over",
    "gone around": "a restore takes another way than it had planned",
}


class Record:
    """All that happens, line by line."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def note(self, text: str, *_: object) -> None:
        self.lines.append(text)

    def watch(self, _: object) -> None:
        """There is nothing to see before it begins."""


class ShelfProbes(Probes):
    def hit(self, name: str) -> None:
        assert name in PROBES or name in RARE, name
        self.counts[name] += 1


class Shelf:
    """One world."""

    def __init__(self, choices: Choices, probes: Probes) -> None:
        self.choices, self.probes = choices, probes
        self.stage = Stage(choices, eager=(0.9, 0.6, 0.2)[choices.pick(3)])
        self.servers = 1 + choices.pick(2)
        self.rows_per_chunk = (ROWS, 2)[choices.pick(2)]
        self.plan = CutPlan(every_seconds=(30.0, 15.0, 60.0)[choices.pick(3)], full_every=(3, 1, 2, 6)[choices.pick(4)])
        self.rules = Rules(keep_last=1 + choices.pick(3), keep_full_every_seconds=0.0)
        self.choice = Choice(s=2, n=(4, 2, 3)[choices.pick(3)], reason="simulated")
        self.grace_seconds, self.unfinished_seconds = GRACE_SECONDS, UNFINISHED_SECONDS
        self.reading_seconds_max = GRACE_SECONDS - BEHIND_SECONDS_MAX
        self.fault_rate = (0.002, 0.01, 0.03)[choices.pick(3)]
        self.faults_left = choices.pick(12, dull=0.1)
        self.objects = Objects(
            self.stage,
            choices,
            probes,
            error_rate=(0.0, 0.01, 0.05, 0.15)[choices.pick(4)],
            behind_rate=(0.0, 0.1, 0.4)[choices.pick(3)],
            watch=self._on_change,
        )
        self.storage = SimStorage(self.stage, self.objects)
        self.job = _make_job(self.servers)
        self.runs: list[Run] = []
        self.mergers: list[tuple[Actor, Keeper]] = []
        self.truth: dict[str, Model] = {}
        self.turn: dict[str, tuple[str, tuple[int, ...]]] = {}  # cut -> its run and place there
        self.parent: dict[str, str | None] = {}  # cut -> what it was trained on from
        self.torn: dict[str, float] = {}  # merged pieces without all of their chunks, since when
        self.digest = hashlib.sha256()
        self._manifests: dict[str, Manifest] = {}  # as they are
        self._newest: str | None = None
        self._values = 0
        self._armed = ""  # a fault that waits for its victim

    def log(self, text: str) -> None:
        self.digest.update(f"{self.stage.now:.2f} {text}\n".encode())
        if self.note is not None:
            self.note(f"{self.stage.now:8.2f}  {text}")

    note: Callable[[str], None] | None = None

    # -- what actors need ------------------------------------------------------------------------------------

    def train(self, run: Run) -> None:
        run.step += 1
        for _ in range(1 + run.step % 2):
            self._values += 1
            run.model[(self._values * 7 + run.number) % ROWS] = float(self._values)

    def note_cut(self, run: Run, cut: str, source: str | None, *, turn: tuple[int, ...]) -> None:
        """This is the instant."""
        self.truth[cut] = dict(run.model)
        self.turn[cut] = run.name, turn
        self.parent[cut] = source or run.parent
        self.log(f"{run.name}: cut {cut} from {source}, {turn}")

    def check_rows(self, cut: str, found: Model) -> None:
        if found != self.truth[cut]:
            raise Violation("rows", f"{cut} is {found} and was {self.truth[cut]}")

    def add_run(self, *, wish: str | None, parent: str | None = None) -> None:
        number = len(self.runs)
        run = Run(f"r{number}", number, parent)
        self.runs.append(run)
        self.start(run, wish=wish)

    def start(self, run: Run, *, wish: str | None, after: float = 0.0) -> None:
        run.salt = f"{run.name}/{run.starts}"
        run.actors = [self.stage.spawn(f"{run.name} starter", Starter(self, run, wish=wish).work, after=after)]

    def begin(self, run: Run) -> None:
        """The run trains from now on."""
        run.term = 0
        self.add_coordinator(run)
        self.add_merger(run)

    def add_coordinator(self, run: Run, *, after: float = 0.0) -> None:
        """The next one. One that is there still does not know of it yet."""
        run.term += 1
        run.coordinator = Coordinator(self, run, run.term)
        name = f"{run.name} coordinator {run.term}"
        run.leader = self.stage.spawn(name, run.coordinator.work, after=after)
        run.actors.append(run.leader)

    def add_merger(self, run: Run | None, *, after: float = 0.0) -> None:
        keeper = Keeper(self, run)
        actor = self.stage.spawn(f"merger {len(self.mergers)}", keeper.work, after=after)
        self.mergers.append((actor, keeper))
        if run is not None:
            run.actors.append(actor)
            run.merger = actor

    # -- what goes wrong -------------------------------------------------------------------------------------

    def sabotage(self) -> None:
        """What there is nobody for waits for somebody."""
        if not self._armed and self.faults_left and self.choices.flag(self.fault_rate):
            self.faults_left -= 1
            self._armed = FAULTS[self.choices.pick(len(FAULTS))]
        if self._armed and self._do(self._armed):
            self._armed = ""

    def _do(self, fault: str) -> bool:
        done = self._try(fault)
        if done and fault in PROBES:
            self.probes.hit(fault)
        if done:
            self.log(fault)
        return done

    def _try(self, fault: str) -> bool:
        """Whether there was anything to do it to."""
        verb, _, what = fault.partition(" ")
        if fault == "reader":
            self.stage.spawn("reader", Reader(self).work)
            return True
        if fault in ("fork", "go back"):
            return self._fork(older=fault == "go back")
        if fault == "clock":
            return self._turn_clock()
        if fault == "second merger":
            self.add_merger(None)
            return True
        if fault == "kill run":
            return self._kill_run()
        found = [(run, actor) for run in self.runs for actor in self._list_victims(run, what) if actor.alive]
        found = [(run, actor) for run, actor in found if verb == "kill" or not actor.hung]
        if not found or (what in ("saver", "writer", "merger") and not self.choices.flag(0.2)):  # not always at once
            return False
        run, actor = found[self.choices.pick(len(found))]
        self._fail_one(run, actor, verb, what)
        return True

    def _list_victims(self, run: Run, what: str) -> list[Actor]:
        if what == "coordinator":
            return [run.leader] if run.leader is not None else []
        if what == "writer":
            return [run.leader] if run.leader and run.coordinator and run.coordinator.writing else []
        if what == "saver":
            return [actor for actor in run.actors if "saver" in actor.name]
        return [actor for actor, keeper in self.mergers if actor in run.actors and keeper.working == (what == "merger")]

    def _fail_one(self, run: Run, actor: Actor, verb: str, what: str) -> None:
        if verb == "kill":
            self.stage.kill(actor)
        else:
            self.stage.hang(actor, HANG_SECONDS_MAX * (1 + self.choices.pick(8)) / 8)
        if what in ("coordinator", "writer"):
            self.add_coordinator(run, after=START_SECONDS)
        elif what in ("merger", "idler"):
            self.add_merger(run, after=START_SECONDS)
        elif what == "saver" and run.coordinator is not None:
            run.coordinator.inbox.append(None)

    def _kill_run(self) -> bool:
        living = [run for run in self.runs if run.alive and run.coordinator is not None]
        if not living:
            return False
        run = living[self.choices.pick(len(living))]
        assert run.coordinator is not None
        for actor in list(run.actors):
            self.stage.kill(actor)
        run.dead = [*run.dead, *run.coordinator.storing.values()]
        run.coordinator = run.leader = None
        if self.graph().restorable() and self.choices.flag(0.3):  # a user does it
            self.add_run(wish="")
        else:
            run.starts += 1
            self.start(run, wish=None, after=START_SECONDS)
        return True

    def _fork(self, *, older: bool) -> bool:
        restorable = self.graph().restorable()
        if not restorable or len(self.runs) >= RUNS_MAX:
            return False
        wish = restorable[self.choices.pick(len(restorable))].id if older else ""
        if older:  # nobody does both in one place, and then wonders
            for run in self.runs:
                for actor in list(run.actors):
                    self.stage.kill(actor)
                run.coordinator = run.leader = None
        self.add_run(wish=wish)
        return True

    def _turn_clock(self) -> bool:
        jump = (-1e6, 1e6, -50.0, 300.0)[self.choices.pick(4)]
        if self.mergers and self.choices.flag(0.5):
            self.mergers[self.choices.pick(len(self.mergers))][1].skew += jump
        else:
            self.runs[self.choices.pick(len(self.runs))].skew += jump
        return True

    # -- what must hold --------------------------------------------------------------------------------------

    def graph(self) -> Graph:
        return Graph(piece for name, piece in self._manifests.items() if name not in self.torn)

    def _on_change(self, path: str, before: Object | None, after: Object | None) -> None:
        piece, _, file = path.partition("/")
        self.log(f"{'put' if after else 'delete'} {path}")
        if not is_piece_name(piece):
            return
        if file == MANIFEST:
            self._on_manifest(piece, after)
        elif piece in self._manifests:
            self._check_whole(piece)

    def _on_manifest(self, piece: str, after: Object | None) -> None:
        was, newest = self._manifests.get(piece), self._newest
        open_before = self._open_newest()
        if after is None:
            self._manifests.pop(piece, None)
            self.torn.pop(piece, None)
        else:
            self._manifests[piece] = decode(after.data, piece)
            self._check_whole(piece)
            self._note_late(self._manifests[piece])
        found = self.graph().newest()
        self._newest = None if found is None else found.id
        if self._newest != newest:
            self.log(f"newest is {self._newest}")
        if was is not None and after is None:
            if self._newest != newest:
                raise Violation("kept", f"{piece} is deleted, and {newest} was the newest")
            gone = {run: cut for run, cut in open_before.items() if self._open_newest().get(run, cut) != cut}
            if gone:
                raise Violation("kept", f"{piece} is deleted, and {gone} were the newest of open runs")
        if newest is not None and self._newest is not None and self._newest != newest:
            self._check_forward(newest, self._newest)

    def _note_late(self, manifest: Manifest) -> None:
        line = manifest.target.line
        run = next((run for run in self.runs if line is not None and run.name == line.run), None)
        if run is not None and line is not None and not manifest.folded and line.turn[:2] < (run.starts, run.term):
            self.probes.hit("old manifest late")

    def _open_newest(self) -> dict[str, str]:
        graph = self.graph()
        restorable = {cut.id for cut in graph.restorable()}
        found = {}
        for run in graph.runs:
            own = [cut.id for cut in run.cuts if cut.id in restorable]
            if run.is_open and own:
                found[run.name] = own[-1]
        return found

    def _check_whole(self, piece: str) -> None:
        manifest = self._manifests[piece]
        there = self.objects.there
        lost = [
            info.name
            for info in manifest.chunks
            if (found := there.get(f"{piece}/{info.name}")) is None or len(found.data) != info.bytes
        ]
        if not lost:
            self.torn.pop(piece, None)
        elif manifest.folded and self.stage.was_hung():
            self.probes.hit("merged piece torn")
            self.torn.setdefault(piece, self.stage.now)
        else:
            raise Violation("whole", f"{piece} has a manifest and lacks {lost}")

    def _check_forward(self, before: str, after: str) -> None:
        """From one newest to the next."""
        (run, turn), (run_after, turn_after) = self.turn[before], self.turn[after]
        if run == run_after and turn_after < turn:
            raise Violation("newest", f"of {run} was {before} {turn} and is {after} {turn_after}")
        at = self.parent.get(before)
        while at is not None:
            if at == after:
                raise Violation("newest", f"{before} was trained on from {after}, which is the newest now")
            at = self.parent.get(at)

    # -- the end ---------------------------------------------------------------------------------------------

    def play(self) -> None:
        self.add_run(wish=None)
        end = self.stage.now + 400.0
        self.stage.play(until=lambda: self.stage.now > end, between=self.sabotage)
        self._calm_down()
        self._wait_for_checkpoints()
        self._tidy_up()
        self._check_end()

    def _calm_down(self) -> None:
        self.objects.error_rate = self.objects.behind_rate = 0.0
        self.faults_left, self._armed = 0, ""

    def _until(self, done: Callable[[], bool], what: str) -> None:
        most = self.stage.turns + TURNS_MAX

        def is_over() -> bool:
            if self.stage.turns > most:
                raise Violation("end", what)
            return done()

        self.stage.play(until=is_over)

    def _wait_for_checkpoints(self) -> None:
        """Every run that lives makes two more, when nothing fails."""
        counts = {run.name: len(run.told) for run in self.runs if run.alive}
        after = {run.name: run for run in self.runs}
        self._until(
            lambda: all(len(after[name].told) >= count + 2 for name, count in counts.items()),
            f"no checkpoints of all of {list(counts)} while all is well",
        )

    def _tidy_up(self) -> None:
        """Everybody ends, and one merger has the time it needs."""
        for actor in list(self.stage.actors):
            self.stage.kill(actor)
        self.add_merger(None)
        keeper = self.mergers[-1][1]
        end = self.stage.now + 2 * UNFINISHED_SECONDS + 3 * GRACE_SECONDS
        self._until(lambda: self.stage.now > end, "the merger does not come to an end")
        if keeper.errors:
            raise Violation("end", "the merger has errors while all is well")
        for actor in list(self.stage.actors):
            self.stage.kill(actor)

    def _check_end(self) -> None:
        if self.torn:
            raise Violation("whole", f"{sorted(self.torn)} have manifests and lack chunks, in the end")
        graph = self.graph()
        needed = {f"{piece.name}/{info.name}" for piece in graph.pieces.values() for info in piece.chunks}
        needed |= {f"{name}/{MANIFEST}" for name in graph.pieces}
        litter = [path for path in self.objects.there if is_piece_name(path.partition("/")[0]) and path not in needed]
        if litter:
            raise Violation("end", f"nobody needs {litter}")
        if doomed := prune_plan(graph, self.rules, now=self.stage.now)[0]:
            raise Violation("end", f"nobody needs {doomed}")
        self._check_newest(graph)
        problem: list[CheckpointError] = []

        def read_all() -> None:
            for cut in graph.restorable():
                try:
                    load(self, graph, cut)
                except CheckpointError as error:
                    problem.append(error)

        reader = self.stage.spawn("last reader", read_all)
        self._until(lambda: not reader.alive, "a reader does not come to an end")
        if problem:
            raise Violation("rows", problem[0].message)

    def _check_newest(self, graph: Graph) -> None:
        """The last that was told of, of the run that began last."""
        told = [run.told[-1] for run in self.runs if run.told]
        newest = graph.newest()
        if told and (newest is None or (newest.id not in told and cut_step(newest.id) == 0)):
            raise Violation("end", f"{told} were told of, the newest is {newest}")
        youngest = max((run for run in self.runs if run.told), key=lambda run: run.number, default=None)
        if youngest is not None and newest is not None and self.turn[newest.id][0] == youngest.name:
            last = max(youngest.told, key=lambda cut: self.turn[cut][1])
            if self.turn[newest.id][1] < self.turn[last][1]:
                raise Violation("end", f"{last} was told of, the newest is {newest.id}")


def _make_job(servers: int) -> JobSpec:
    table = TableSpec(
        name="t", rows=ROWS, dim=1, init_bound=0.0, optimizer=OptimizerSpec(kind="sgd", learning_rate=1.0)
    )
    return JobSpec(tables=(table,), servers=servers, workers=1)


@contextlib.contextmanager
def _short_attempts() -> Iterator[None]:
    with mock.patch.object(cuts, "ATTEMPT_SECONDS_MAX", ATTEMPT_SECONDS):
        yield


def play(choices: Choices, probes: Probes, note: Callable[[str], None] | None = None) -> tuple[Shelf, Violation | None]:
    """One schedule: the world as it ended, and what did not hold."""
    shelf = Shelf(choices, probes)
    shelf.note = note
    found: Violation | None = None
    with _short_attempts():
        try:
            shelf.play()
        except Violation as violation:
            found = violation
        finally:
            shelf.stage.close()
    return shelf, found
