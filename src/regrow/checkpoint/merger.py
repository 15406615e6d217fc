"""The merger: measures, folds and deletes, a round at a time, beside training. What to fold is decided in policy.py,
what to keep in retention.py.

The rule to keep: nothing goes that somebody may need. A piece is deleted when it was unneeded for `grace_seconds`, what
is unfinished when nobody wrote to it for `unfinished_seconds`, and neither before a second look. How long that is, no
clock says alone, for it may jump: within a process it is counted by one that cannot (`ticks`), and from one process to
the next at most half of the time to wait counts, whatever the clock says.
"""

from __future__ import annotations

import dataclasses
import threading
import time
from collections.abc import Callable, Collection, Sequence
from typing import Any, Literal

import msgspec

from regrow.checkpoint.lineage import Graph
from regrow.checkpoint.load import verify_pieces
from regrow.checkpoint.manifest import Manifest
from regrow.checkpoint.merge import MEMORY_BYTES_MAX, PieceBroken, find_leftovers, fold
from regrow.checkpoint.policy import Choice, Due, Measured, choose, delta_rate, next_fold, overlap, span
from regrow.checkpoint.retention import UNFINISHED_SECONDS, Rules, plan_unfinished, prune_plan
from regrow.checkpoint.storage import Known, Storage, Unfinished
from regrow.core.names import parse_piece_name, piece_name
from regrow.errors import CheckpointError, StorageError
from regrow.units import size_text

WANTED = "wanted/full.json"
STATE = "merge/state.json"
INTERVAL_SECONDS = 10.0
FOLDS_PER_ROUND_MAX = 64  # so that a merger far behind still deletes and reports now and then
# How long a piece was unneeded before it is deleted. Too small: a slow reader that chose its plan before loses a piece
# under its hands, and has to go around it. Too large: merged deltas take space for longer.
GRACE_SECONDS = 900.0


class Wanted(msgspec.Struct, frozen=True, kw_only=True):
    """A merger's request to training: write a full, the chain of deltas is broken."""

    why: str
    cut: str  # the newest cut, which cannot be restored
    asked: float


def read_wanted_full(storage: Storage) -> Wanted | None:
    """For training, before each cut: whether the next piece should be a full, and why."""
    try:
        return msgspec.json.decode(storage.read(WANTED), type=Wanted)
    except StorageError as error:
        if error.missing:
            return None
        raise
    except msgspec.DecodeError as error:
        # Somebody wanted something: a full too many costs little.
        return Wanted(why=f"{WANTED} cannot be read: {error}", cut="", asked=0.0)


def clear_wanted(storage: Storage) -> None:
    """For training, once the full is on storage."""
    storage.delete(WANTED)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """What a merger did or saw. `text` is a line for a log."""

    kind: Literal["choice", "folded", "deleted", "broken", "wanted", "error"]
    text: str
    piece: str = ""


class Watched(msgspec.Struct, frozen=True, kw_only=True):
    """An unfinished piece, as it was when somebody last wrote to it, and how long nobody did, as far as was looked."""

    bytes: int
    changed: float | None
    seconds: float = 0.0


class State(msgspec.Struct, kw_only=True):
    """What a merger remembers, on storage, so that a merger run now and then knows it too. All of it can be lost."""

    at: float | None = None  # when the last round was, by a clock; None: nothing waits
    waited: dict[str, float] = {}  # piece, or piece/file of a leftover -> for how many seconds it is known as unneeded
    watched: dict[str, Watched] = {}  # unfinished pieces
    broken: dict[str, str] = {}  # piece -> what is wrong with it
    checked: list[str] = []  # merged pieces that were read back
    unreachable: str = ""  # what no piece leads to, when the newest cut could not be restored for that
    overlap: float | None = None
    speed_ratio: float | None = None
    full_deltas: float | None = None


class Merger:
    """One round after another: read the graph, fold what is due, delete what was unneeded for long enough.

    Nothing is deleted in the round that found it unneeded, nor before `grace_seconds`, nor before the merged pieces
    that replace it were read back. What is unfinished goes when nobody can be writing it: after `unfinished_seconds`
    of silence, or at once if it is of a cut in `dead` (retention.py).

    An error is reported and ends the round; the next begins anew. Two mergers on one URL do no harm: folds of the same
    pieces write the same bytes, both see the same graph and so need the same pieces, and one that finds a piece gone
    under its hands drops it. Their time is wasted, nothing else.
    """

    def __init__(
        self,
        storage: Storage,
        *,
        rules: Rules | None = None,
        choice: Choice | None = None,
        grace_seconds: float = GRACE_SECONDS,
        unfinished_seconds: float = UNFINISHED_SECONDS,
        dead: Collection[str] = (),
        memory_bytes_max: int = MEMORY_BYTES_MAX,
        on_event: Callable[[Event], None] = lambda event: None,
        clock: Callable[[], float] = time.time,
        ticks: Callable[[], float] = time.monotonic,
    ) -> None:
        self._storage, self._rules, self._fixed = storage, rules or Rules(), choice
        self._grace_seconds, self._memory_bytes_max = grace_seconds, memory_bytes_max
        self._unfinished_seconds, self._dead = unfinished_seconds, dead
        self._on_event, self._clock, self._ticks = on_event, clock, ticks
        self._ticked: float | None = None  # when the last round of this process was
        self._state, self._saved = State(), b""
        self._torn: list[tuple[str, str]] = []
        self._known: Known = {}
        self._chosen = (0, 0)
        self._told: set[str] = set()  # damage is told once

    def round(self) -> bool:
        """Whether it went well. Storage errors are reported and nothing more: storage comes back."""
        well = self._try(self._begin) and self._try(self._work)
        return self._try(self._remember) and well

    def _try(self, job: Callable[[], None]) -> bool:
        try:
            job()
        except CheckpointError as error:
            self._tell("error", str(error))
            return False
        return True

    def _begin(self) -> None:
        self._saved = b""
        self._state = self._read_state()
        self._saved = msgspec.json.encode(self._state)
        before, self._ticked = self._ticked, self._ticks()
        self._passed = None if before is None else self._ticked - before

    def _work(self) -> None:
        manifests, self._torn = self._storage.manifests(self._known)
        names = {piece.name for piece in manifests}
        self._state.broken = {name: what for name, what in self._state.broken.items() if name in names}
        self._state.checked = [name for name in self._state.checked if name in names]
        for name, what in [*self._torn, *self._state.broken.items()]:
            self._tell("broken", f"{name} cannot be used: {what}", piece=name, once=True)
        graph = Graph(manifests)
        self._ask_for_full(graph)
        graph = self._fold_what_is_due(graph)
        self._delete(graph)

    def _remember(self) -> None:
        if self._saved and msgspec.json.encode(self._state) != self._saved:
            self._storage.write(STATE, msgspec.json.encode(self._state))

    def _tell(self, kind: Any, text: str, *, piece: str = "", once: bool = False) -> None:
        if once and text in self._told:
            return
        self._told |= {text} if once else set()
        self._on_event(Event(kind=kind, text=text, piece=piece))

    def _read_state(self) -> State:
        try:
            return msgspec.json.decode(self._storage.read(STATE), type=State)
        except StorageError as error:
            if not error.missing:
                raise
        except msgspec.DecodeError:
            pass  # Lost: everything is unneeded from now on only, which is late and never early.
        return State()

    def _ask_for_full(self, graph: Graph) -> None:
        """If the newest cut cannot be restored. A piece that is only missing may still be on its way: one more round
        is waited for it; one that is damaged will not get better."""
        damage = [f"{name}: {what}" for name, what in [*self._torn, *self._state.broken.items()]]
        latest = self._latest(graph)
        if latest is None or graph.without(self._state.broken).path(latest) is not None:
            self._state.unreachable = ""
            return
        # Not the newest cut: with every round there may be a new one, on top of the same gap.
        missing = ", ".join(graph.missing(latest))
        before, self._state.unreachable = self._state.unreachable, missing
        if not damage and before != missing:
            return
        why = "; ".join(damage) if damage else f"no piece leads to {missing}"
        asked = read_wanted_full(self._storage)
        if asked is None or asked.cut != latest:
            why = f"cut {latest} cannot be restored: {why}"
            self._storage.write(WANTED, msgspec.json.encode(Wanted(why=why, cut=latest, asked=self._clock())))
            self._tell("wanted", f"asked training for a full: {why}")

    def _latest(self, graph: Graph) -> str | None:
        """The newest cut there is word of. A torn manifest tells where it leads from and to, by its name only."""
        latest = graph.latest()
        for name, _ in self._torn:
            source, target = parse_piece_name(name)
            after = latest is None or source == latest.id or (source is None and target > latest.id)
            if target not in graph.cuts and after:
                return target
        return latest.id if latest is not None else None

    def _fold_what_is_due(self, graph: Graph) -> Graph:
        """Returns the graph with what was made."""
        for _ in range(FOLDS_PER_ROUND_MAX):
            usable = graph.without(self._state.broken)
            due = next_fold(usable, self._choose(usable))
            if due is None:
                break
            try:
                graph = Graph([*graph.pieces.values(), self._fold(usable, due)])
            except PieceBroken as error:
                if error.gone:
                    graph = graph.without([error.piece])
                else:
                    self._note_broken(error.piece, error.message)
                self._ask_for_full(graph)
        return graph

    def _note_broken(self, piece: str, what: str) -> None:
        """What it had made unneeded was needed all the time: for all of that the grace period begins again."""
        self._state.broken[piece] = what
        self._state.waited = {}
        self._tell("broken", f"{piece} cannot be used: {what}", piece=piece, once=True)

    def _choose(self, graph: Graph) -> Choice:
        rate, newest = delta_rate(graph), graph.newest()
        way = graph.path(newest.id) if newest is not None else None
        if rate is not None and way:
            self._state.full_deltas = way[0].bytes / rate[0]
        state = self._state
        measured = Measured(overlap=state.overlap, speed_ratio=state.speed_ratio, full_deltas=state.full_deltas)
        choice = self._fixed or choose(measured)
        if (choice.s, choice.n) != self._chosen:
            self._chosen = choice.s, choice.n
            self._tell("choice", choice.reason)
        return choice

    def _fold(self, graph: Graph, due: Due) -> Manifest:
        name = piece_name(due.source, due.target)
        replace = name in self._state.broken
        done = 0

        def progress(read: int, total: int) -> None:
            nonlocal done
            done = read

        began = self._ticks()
        made = fold(
            self._storage,
            graph,
            due.source,
            due.target,
            memory_bytes_max=self._memory_bytes_max,
            replace=replace,
            progress=progress,
        )
        seconds = max(self._ticks() - began, 1e-6)
        self._state.broken.pop(name, None)
        if done:  # otherwise another merger was faster, and there is nothing to measure
            self._measure(graph, due, made, done / seconds)
        sizes = f"{len(due.pieces)} pieces, {size_text(done)} -> {size_text(made.bytes)}"
        self._tell("folded", f"{name}: {sizes} in {seconds:.1f} s ({due.why})", piece=name)
        return made

    def _measure(self, graph: Graph, due: Due, made: Manifest, bytes_per_second: float) -> None:
        state, rate = self._state, delta_rate(graph)
        seen = Measured(overlap=state.overlap, speed_ratio=state.speed_ratio).mix_in(
            overlap=overlap(due.pieces, made.rows) if all(span(piece) == 1 for piece in due.pieces) else None,
            speed_ratio=bytes_per_second * rate[1] / rate[0] if rate is not None else None,
        )
        state.overlap, state.speed_ratio = seen.overlap, seen.speed_ratio

    def _count_seconds(self, limit: float) -> float:
        """How much of a wait of `limit` seconds is over since the last round, which may have been another merger's."""
        if self._state.at is None:
            return 0.0
        return min(max(0.0, self._clock() - self._state.at), limit / 2 if self._passed is None else self._passed)

    def _delete(self, graph: Graph) -> None:
        """What was unneeded in an earlier round and for long enough; the rest is noted. Broken pieces stay: reading
        may have gone wrong and not the piece, and a user may want to see them."""
        now, known, passed = self._clock(), self._state.waited, self._count_seconds(self._grace_seconds)
        usable = graph.without(self._state.broken)
        doomed, why = prune_plan(usable, self._rules, now=now)
        unfinished = self._delete_unfinished(graph, now)
        halves = [name for name in unfinished if name in known]  # of a merger that was killed while it deleted them
        litter = find_leftovers(self._storage, graph.pieces.values(), unfinished)
        keys = [*doomed, *halves, *(f"{piece}/{file}" for piece, file in litter)]
        waited = self._state.waited = {key: known[key] + passed if key in known else 0.0 for key in keys}
        self._state.at = now if waited or self._state.watched else None
        ripe = {key for key in waited if key in known and waited[key] >= self._grace_seconds}
        if not ripe or not self._sound([piece for name, piece in usable.pieces.items() if name not in doomed]):
            return
        # One may be both, if another merger deletes it just now.
        for name in [name for name in dict.fromkeys([*doomed, *halves]) if name in ripe]:
            self._drop(self._storage.delete_piece, name)
            reason = why.get(name, "deleted: half of it was").removeprefix("deleted: ")
            self._tell("deleted", f"{name}: {reason}", piece=name)
            del waited[name]
        self._delete_litter(litter, halves, ripe)

    def _delete_litter(self, litter: list[tuple[str, str]], halves: list[str], ripe: set[str]) -> None:
        for piece in sorted({piece for piece, _ in litter} - set(halves)):
            files = [file for owner, file in litter if owner == piece]
            if not ripe.issuperset(f"{piece}/{file}" for file in files):
                continue  # A merger wrote here not long ago: it may be at work.
            for file in filter(None, files):
                self._drop(self._storage.delete, f"{piece}/{file}")
            if not self._storage.names(piece):
                self._drop(self._storage.delete_piece, piece)  # the empty directory
            self._tell("deleted", f"{piece}: left by a merger that did not finish", piece=piece)

    def _delete_unfinished(self, graph: Graph, now: float) -> list[str]:
        """What nobody can be writing any more. Returns what is left."""
        found = {piece.name: piece for piece in self._storage.look_at_unfinished()}
        self._state.watched = {name: self._watch(piece) for name, piece in found.items()}
        doomed, why = plan_unfinished(
            graph,
            found.values(),
            now=now,
            seconds=self._unfinished_seconds,
            dead=self._dead,
            silent={name: watched.seconds for name, watched in self._state.watched.items()},
        )
        left = [name for name in found if name not in doomed]
        for name in doomed:
            if self._may_come(name):
                left.append(name)
            elif not self._storage.has_manifest(name):  # else it was finished since
                self._drop(self._storage.delete_piece, name)
                reason = why[name].removeprefix("deleted: ")
                self._tell("deleted", f"{name}: {reason} ({size_text(found[name].bytes)})", piece=name)
        return left

    def _watch(self, piece: Unfinished) -> Watched:
        """For how long nobody wrote to it, as far as mergers have looked. The times of its files are compared with each
        other only: clocks, and that of a storage is one more, may say anything."""
        before = self._state.watched.get(piece.name)
        if before is None or (before.bytes, before.changed) != (piece.bytes, piece.changed):
            return Watched(bytes=piece.bytes, changed=piece.changed)
        return msgspec.structs.replace(before, seconds=before.seconds + self._count_seconds(self._unfinished_seconds))

    def _may_come(self, name: str) -> bool:
        """Of a process that has ended nothing comes any more, but for what a storage elsewhere was asked before."""
        least = 0.0 if self._storage.local else min(self._grace_seconds, self._unfinished_seconds)
        return self._state.watched[name].seconds < least

    def _drop(self, delete: Callable[[str], None], name: str) -> None:
        try:
            delete(name)
        except StorageError as error:
            if not error.missing:
                raise  # otherwise another merger was faster

    def _sound(self, kept: Sequence[Manifest]) -> bool:
        """All files of what stays are there, and merged pieces have been read once, before anything goes. Manifests
        too: those at hand may have been read long ago."""
        there = {manifest.name: manifest for manifest in self._storage.manifests()[0]}
        if changed := [piece.name for piece in kept if there.get(piece.name) != piece]:
            for name in changed:
                self._known.pop(name, None)
            return False
        unread = {piece.name for piece in kept if piece.folded and piece.name not in self._state.checked}
        problems = verify_pieces(self._storage, [piece for piece in kept if piece.name in unread], deep=True)
        problems += verify_pieces(self._storage, [piece for piece in kept if piece.name not in unread], deep=False)
        harmful = [problem for problem in problems if problem.harmful]
        for problem in harmful:
            self._note_broken(problem.piece, f"{problem.file}: {problem.what}")
        self._state.checked += sorted(unread - set(self._state.broken))
        return not harmful


def watch(
    storage: Storage,
    *,
    once: bool = False,
    interval_seconds: float = INTERVAL_SECONDS,
    on_event: Callable[[Event], None] = lambda event: None,
    stop: threading.Event | None = None,
    **options: Any,
) -> bool:
    """Rounds of a `Merger` (which takes the options) until `stop`, or one. Whether the last round went well."""
    merger = Merger(storage, on_event=on_event, **options)
    stop = stop or threading.Event()
    while True:
        well = merger.round()
        if once or stop.wait(interval_seconds):
            return well
