"""How many deltas are merged at a time, and when a full is made: chosen from what was measured. And `watch`, the loop
that does it. All decisions above the line are pure; below it is the merger, which measures, folds and deletes.

Merging is hierarchical: s pieces of one level become one of the next, so a piece of level l stands for s**l deltas, and
after N deltas the last full and all pieces since become a new full. Small s and N make a restore cheap and merging
expensive. The unit of size is a delta, the unit of time the time between two deltas. Measured are

    d  overlap: rows that a delta shares with the one before it / its rows
    v  speed:   what the merger reads in one unit of time (deltas)
    f  the size of a full (deltas)

A delta adds at most (1 - d) rows that the one before it did not have, and so at most that many that none before it had:

    U(n) = min(1 + (n - 1)(1 - d), f)     bounds the size of n deltas merged

(1) The merger must keep up. Level l merges every s**l units of time and reads s pieces of U(s**(l-1)): U(s**(l-1)) /
    s**(l-1) per unit. A full is made every N units, from the last full and the pieces R(N) since:

        sum of U(s**l) / s**l for l = 0 .. L-1  +  (f + R(N)) / N  <=  HEADROOM v          s**L <= N < s**(L+1)

(2) A restore must stay within a bound. After n deltas since the full, n written in base s has the digits a(l), and the
    pieces left are a(l) pieces of level l: R(n) = sum of a(l) U(s**l), never more than the chain of n deltas unmerged:

        R(n) <= min(n, RESTORE_BOUND f)  and  sum of a(l) <= PIECES_MAX                    for every n < N

Of the pairs (s, N) that satisfy both, the one of least work is taken: merging runs beside training, day and night, and
a restore that is within its bound is good enough. If none satisfies (2), the one with the smallest worst restore of
those that satisfy (1); restores within ALIKE of it count as equal, and of equals the one of least work wins. If none
satisfies (1), the one of least work. The reason says so.

DECK (PVLDB 18) chooses s and N by two inequalities of the same kind; this derivation is our own from that idea and does
not follow the paper letter by letter.
"""

from __future__ import annotations

import dataclasses
import math
import threading
import time
from collections.abc import Callable, Collection, Sequence
from typing import Any, Literal

import msgspec
import numpy as np

from regrow.checkpoint.lineage import Graph
from regrow.checkpoint.load import verify_pieces
from regrow.checkpoint.manifest import MANIFEST, Manifest
from regrow.checkpoint.merge import MEMORY_BYTES_MAX, PieceBroken, find_difference, find_leftovers, fold
from regrow.checkpoint.retention import UNFINISHED_SECONDS, Rules, plan_unfinished, prune_plan
from regrow.checkpoint.storage import Known, Storage
from regrow.core.names import parse_piece_name, piece_name
from regrow.errors import CheckpointError, StorageError
from regrow.units import size_text

S_MAX = 16
N_CHOICES = (4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512)
HEADROOM = 0.8  # of the merger's speed. Too large: it falls behind with the first slow hour. Too small: restores cost.
# What a restore may read beside the full, in fulls. Too small: fulls are written all the time, next to training. Too
# large: coming back, which is rare, takes longer.
RESTORE_BOUND = 1.0
PIECES_MAX = 48  # beside the full; each costs a manifest, a listing and at least one request

S_DEFAULT, N_DEFAULT = 4, 64  # until something was measured
ALIKE = 0.05  # Too small: fulls are written again and again for nothing. Too large: restores take that much longer.
FOLDS_PER_ROUND_MAX = 64  # so that a merger far behind still deletes and reports now and then
SMOOTHING = 0.3  # weight of a new measurement; too large: one odd delta changes s and N


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """What merging has shown so far; None: not known yet."""

    overlap: float | None = None  # d
    speed_ratio: float | None = None  # v
    full_deltas: float | None = None  # f

    def mix_in(self, **new: float | None) -> Measured:
        """These figures with new ones mixed in; None changes nothing."""
        mixed = {}
        for name, value in new.items():
            old = getattr(self, name)
            if value is not None:
                mixed[name] = value if old is None else old + SMOOTHING * (value - old)
        return dataclasses.replace(self, **mixed)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """Merge s pieces at a time; make a full every N deltas."""

    s: int
    n: int
    reason: str


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Due:
    """One fold to do now."""

    source: str | None
    target: str
    pieces: tuple[Manifest, ...]
    why: str


def union(n: int, *, d: float, f: float) -> float:
    """U(n): the size of n deltas merged."""
    return min(1.0 + (n - 1) * (1.0 - d), f)


def measure_rest(n: Any, s: int, *, d: float, f: float) -> tuple[Any, Any]:
    """(R(n), pieces): what is to be read beside the full, n deltas after it. Of a number, or of many at once."""
    size, pieces, span = 0.0, 0, 1
    while np.any(n):
        n, digit = divmod(n, s)
        size = size + digit * union(span, d=d, f=f)
        pieces = pieces + digit
        span *= s
    return size, pieces


def work(s: int, n: int, *, d: float, f: float) -> float:
    """What the merger reads per unit of time, the left side of (1)."""
    total, span = 0.0, 1
    while span * s <= n:
        total += union(span, d=d, f=f) / span
        span *= s
    return float(total + (f + measure_rest(n, s, d=d, f=f)[0]) / n)


def choose(measured: Measured) -> Choice:
    """The s and N of least work that keep a restore within its bound, and why."""
    if measured.overlap is None or measured.speed_ratio is None or measured.full_deltas is None:
        why = f"s={S_DEFAULT}, N={N_DEFAULT}: defaults, not everything was measured yet"
        return Choice(s=S_DEFAULT, n=N_DEFAULT, reason=why)
    d = min(max(measured.overlap, 0.0), 1.0)
    v, f = max(measured.speed_ratio, 0.0), max(measured.full_deltas, 1.0)
    pairs = [pair for s in range(2, S_MAX + 1) for pair in _pairs(s, d=d, f=f)]
    able = [pair for pair in pairs if pair.work <= HEADROOM * v]
    good = [pair for pair in able if pair.restore <= RESTORE_BOUND * f and pair.pieces <= PIECES_MAX]
    if not able:
        best = min(pairs, key=lambda pair: (pair.work, pair.restore))
        verdict = f"the merger cannot keep up: it may use {HEADROOM * v:.2f} deltas per delta; make deltas less often"
    else:
        least = min(f + pair.restore for pair in able)
        alike = [pair for pair in able if f + pair.restore <= (1.0 + ALIKE) * least]
        best = min(good or alike, key=lambda pair: (pair.work, pair.restore, pair.s, pair.n))
        bound = f"{RESTORE_BOUND:g} fulls in {PIECES_MAX} pieces"
        verdict = f"within the bound of {bound}" if good else f"no choice it can keep up with is within {bound}"
    figures = f"overlap d={d:.2f}, speed v={v:.1f}, full f={f:.1f} deltas"
    worst = f"a restore reads the full and at most {best.restore:.1f} deltas in {best.pieces} pieces"
    costs = f"merging reads {best.work:.2f} deltas per delta"
    return Choice(s=best.s, n=best.n, reason=f"s={best.s}, N={best.n}: {figures}; {worst}; {costs}; {verdict}")


@dataclasses.dataclass(frozen=True, slots=True)
class _Pair:
    s: int
    n: int
    restore: float  # max R(n)
    pieces: int
    work: float


def _pairs(s: int, *, d: float, f: float) -> list[_Pair]:
    """s with every N, what a restore reads at worst and what merging does."""
    size, number = measure_rest(np.arange(N_CHOICES[-1]), s, d=d, f=f)
    restore, pieces = np.maximum.accumulate(size), np.maximum.accumulate(number)  # of all counts up to this one
    return [_Pair(s, n, float(restore[n - 1]), int(pieces[n - 1]), work(s, n, d=d, f=f)) for n in N_CHOICES if s <= n]


def span(piece: Manifest) -> int:
    """How many deltas a piece stands for; `folded` of a merged delta names them all."""
    return max(1, len(piece.folded))


def level(piece: Manifest, s: int) -> int:
    """The l with s**l <= span < s**(l+1): levels survive a change of s."""
    found, size = 0, s
    while size <= span(piece):
        found, size = found + 1, size * s
    return found


def next_fold(graph: Graph, choice: Choice) -> Due | None:
    """What to fold next on the way to the newest cut; None: nothing is due.

    The way is the one of fewest pieces, which is the most merged one. A full comes first: what it covers need not be
    merged any more. Then the oldest s pieces in a row of one level.
    """
    newest = graph.newest()
    way = [] if newest is None else graph.path(newest.id, by="pieces") or []
    deltas = way[1:]
    if sum(map(span, deltas)) >= choice.n and _foldable(graph, pieces := _at_least(way, choice.n), source=None):
        why = f"{sum(map(span, pieces[1:]))} deltas since the last full, N={choice.n}"
        return Due(source=None, target=pieces[-1].target.id, pieces=tuple(pieces), why=why)
    for start in range(len(deltas) - choice.s + 1):
        run = deltas[start : start + choice.s]
        levels = {level(piece, choice.s) for piece in run}
        if len(levels) == 1 and _foldable(graph, run, source=run[0].source):
            why = f"{choice.s} pieces of level {levels.pop()}, s={choice.s}"
            return Due(source=run[0].source, target=run[-1].target.id, pieces=tuple(run), why=why)
    return None


def _at_least(way: Sequence[Manifest], deltas: int) -> list[Manifest]:
    """The full and the first pieces that stand for so many deltas: the same target for every merger that looks."""
    taken, count = [way[0]], 0
    for piece in way[1:]:
        if count >= deltas:
            break
        taken.append(piece)
        count += span(piece)
    return taken


def _foldable(graph: Graph, pieces: Sequence[Manifest], *, source: str | None) -> bool:
    """Same tables and the same bits: fold() refuses others unless told to, which is for a user to decide. And not
    there already, in a form that the way did not take (quantised)."""
    if piece_name(source, pieces[-1].target.id) in graph.pieces:
        return False
    last = pieces[-1]
    return all(piece.bits == last.bits and find_difference(piece, last) is None for piece in pieces)


def overlap(pieces: Sequence[Manifest], merged_rows: int) -> float | None:
    """d as these deltas of one level showed it: their rows / the rows merged, solved for d in U(n)."""
    mean = sum(piece.rows for piece in pieces) / len(pieces)
    if len(pieces) < 2 or mean == 0 or any(piece.source is None for piece in pieces):
        return None
    return min(1.0, max(0.0, 1.0 - (merged_rows / mean - 1.0) / (len(pieces) - 1)))


def delta_rate(graph: Graph) -> tuple[float, float] | None:
    """(bytes of a delta, seconds between two) over the newest deltas as training wrote them; None: too few."""
    order = {cut: index for index, cut in enumerate(graph.cuts)}
    deltas = [piece for piece in graph.pieces.values() if piece.source is not None and not piece.folded]
    deltas = sorted(deltas, key=lambda piece: order[piece.target.id])[-N_DEFAULT:]
    if len(deltas) < 2:
        return None
    seconds = deltas[-1].target.created - deltas[0].target.created
    mean = sum(piece.bytes for piece in deltas) / len(deltas)
    if seconds <= 0 or not math.isfinite(seconds) or mean == 0:
        return None
    return mean, seconds / (len(deltas) - 1)


# -- the merger --------------------------------------------------------------------------------------------

WANTED = "wanted/full.json"
STATE = "merge/state.json"
INTERVAL_SECONDS = 10.0
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


class State(msgspec.Struct, kw_only=True):
    """What a merger remembers, on storage, so that a merger run now and then knows it too. All of it can be lost."""

    unneeded: dict[str, float] = {}  # piece, or piece/file of a leftover -> when that was first seen
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
    ) -> None:
        self._storage, self._rules, self._fixed = storage, rules or Rules(), choice
        self._grace_seconds, self._memory_bytes_max = grace_seconds, memory_bytes_max
        self._unfinished_seconds, self._dead = unfinished_seconds, dead
        self._on_event, self._clock = on_event, clock
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
        self._state.unneeded = {}
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

        began = time.monotonic()
        made = fold(
            self._storage,
            graph,
            due.source,
            due.target,
            memory_bytes_max=self._memory_bytes_max,
            replace=replace,
            progress=progress,
        )
        seconds = max(time.monotonic() - began, 1e-6)
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

    def _delete(self, graph: Graph) -> None:
        """What was unneeded in an earlier round and for long enough; the rest is noted. Broken pieces stay: reading
        may have gone wrong and not the piece, and a user may want to see them."""
        now, known = self._clock(), self._state.unneeded
        usable = graph.without(self._state.broken)
        doomed, why = prune_plan(usable, self._rules, now=now)
        unfinished = self._delete_unfinished(graph, now)
        halves = [name for name in unfinished if name in known]  # of a merger that was killed while it deleted them
        litter = find_leftovers(self._storage, graph.pieces.values(), unfinished)
        keys = [*doomed, *halves, *(f"{piece}/{file}" for piece, file in litter)]
        since = self._state.unneeded = {key: known.get(key, now) for key in keys}
        ripe = {key for key in since if key in known and now - since[key] >= self._grace_seconds}
        if not ripe or not self._sound([piece for name, piece in usable.pieces.items() if name not in doomed]):
            return
        # One may be both, if another merger deletes it just now.
        for name in [name for name in dict.fromkeys([*doomed, *halves]) if name in ripe]:
            self._drop(self._storage.delete_piece, name)
            reason = why.get(name, "deleted: half of it was").removeprefix("deleted: ")
            self._tell("deleted", f"{name}: {reason}", piece=name)
            del since[name]
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
        doomed, why = plan_unfinished(graph, found.values(), now=now, seconds=self._unfinished_seconds, dead=self._dead)
        for name in doomed:
            if MANIFEST not in self._storage.names(name):  # else it was finished since
                self._drop(self._storage.delete_piece, name)
                reason = why[name].removeprefix("deleted: ")
                self._tell("deleted", f"{name}: {reason} ({size_text(found[name].bytes)})", piece=name)
        return [name for name in found if name not in doomed]

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
