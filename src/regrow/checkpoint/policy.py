"""How many deltas are merged at a time, and when a full is made: chosen from what was measured. Pure; what measures,
folds and deletes is merger.py.

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
from collections.abc import Sequence
from typing import Any

import numpy as np

from regrow.checkpoint.lineage import Graph
from regrow.checkpoint.manifest import Manifest
from regrow.checkpoint.merge import find_difference
from regrow.core.names import piece_name

S_MAX = 16
N_CHOICES = (4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512)
HEADROOM = 0.8  # of the merger's speed. Too large: it falls behind with the first slow hour. Too small: restores cost.
# What a restore may read beside the full, in fulls. Too small: fulls are written all the time, next to training. Too
# large: coming back, which is rare, takes longer.
RESTORE_BOUND = 1.0
PIECES_MAX = 48  # beside the full; each costs a manifest, a listing and at least one request

S_DEFAULT, N_DEFAULT = 4, 64  # until something was measured
ALIKE = 0.05  # Too small: fulls are written again and again for nothing. Too large: restores take that much longer.
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
    """(R(n), pieces): what is to be read beside the full, n deltas after it. Of a number, or of many at once, the
    largest last."""
    size, pieces, span = 0.0, 0, 1
    left = n if isinstance(n, int) else int(n[-1])  # digits there may be: arrays are asked for nothing one by one
    while left:
        left //= s
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
