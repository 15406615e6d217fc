"""Which cuts there are, which pieces lead to them, and the cheapest way to each. Pure: manifests in, answers out.

Cuts are nodes, pieces are edges, "nothing" (None) is where every full begins. To restore a cut is to follow a path from
nothing to it. Two rules for choosing one: an exact path is always taken before one that holds quantised pieces, and
among equals the one of the fewest bytes, then of the fewest pieces. A piece that is missing is an edge that is not
there: the answers change, nothing else does. Answers carry their reason. Which cut is the newest,
order.py says.
"""

from __future__ import annotations

import dataclasses
import heapq
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Literal

from regrow.checkpoint.address import LATEST
from regrow.checkpoint.manifest import Cut, Manifest
from regrow.checkpoint.order import Run, sort_runs
from regrow.core.names import cut_step
from regrow.errors import CheckpointError, UserError
from regrow.units import age_text, size_text

if TYPE_CHECKING:
    from regrow.checkpoint.retention import Rules

CANDIDATES_SHOWN_MAX = 8  # in an error; `regrow ckpt ls` shows all

By = Literal["bytes", "pieces"]
_Tree = dict[str | None, tuple[tuple[int, int], Manifest | None]]  # cut -> what it costs, the last piece on the way


@dataclasses.dataclass(frozen=True, slots=True)
class Plan:
    """Pieces to apply, oldest first, to have `target`. Keeps the graph: a broken piece asks for another path."""

    target: Cut
    pieces: tuple[Manifest, ...]
    graph: Graph = dataclasses.field(repr=False)

    @property
    def bytes(self) -> int:
        return sum(piece.bytes for piece in self.pieces)

    @property
    def rows(self) -> int:
        """Rows to write. One that is in several pieces counts in each."""
        return sum(piece.rows for piece in self.pieces)

    @property
    def exact(self) -> bool:
        return all(piece.exact for piece in self.pieces)

    def __str__(self) -> str:
        return f"{self.target.id}: {_way_text(self.pieces)}"


class Graph:
    """The cuts and pieces of one storage URL, as they were when it was made."""

    def __init__(self, manifests: Iterable[Manifest]) -> None:
        self.pieces: dict[str, Manifest] = {m.name: m for m in sorted(manifests, key=lambda m: m.name)}
        self._into: dict[str, list[Manifest]] = {}
        self._from: dict[str | None, list[Manifest]] = {}
        for piece in self.pieces.values():
            self._into.setdefault(piece.target.id, []).append(piece)
            self._from.setdefault(piece.source, []).append(piece)
        self.runs: list[Run] = self._sort()  # oldest first, and so are all cuts
        self.cuts: dict[str, Cut] = {cut.id: cut for run in self.runs for cut in run.cuts}
        self._order = {cut: index for index, cut in enumerate(self.cuts)}
        self._trees: dict[tuple[tuple[str | None, ...], By, bool], _Tree] = {}

    def __repr__(self) -> str:
        return f"Graph({len(self.cuts)} cuts, {len(self.pieces)} pieces)"

    def _sort(self) -> list[Run]:
        cuts = {piece.target.id: piece.target for piece in self.pieces.values()}
        sources = {cut: [each.source for each in into if each.source] for cut, into in self._into.items()}
        return sort_runs(cuts, sources)

    # -- questions -----------------------------------------------------------------------------------------

    def into(self, cut: str) -> list[Manifest]:
        """The pieces that end at a cut."""
        return list(self._into.get(cut, ()))

    def without(self, names: Iterable[str]) -> Graph:
        """The same storage if these pieces were not there."""
        gone = frozenset(names)
        return Graph(piece for name, piece in self.pieces.items() if name not in gone)

    def path(self, cut: str, *, starts: Sequence[str | None] = (None,), by: By = "bytes") -> list[Manifest] | None:
        """The cheapest pieces from any of `starts` (None: nothing) to a cut, oldest first; None if there is no way.

        `by` "pieces" means the fewest pieces instead of the fewest bytes.
        """
        for exact_only in (True, False):
            tree = self._tree(tuple(starts), by, exact_only)
            if cut in tree:
                break
        else:
            return None
        way: list[Manifest] = []
        at: str | None = cut
        while (last := tree[at][1]) is not None:
            way.append(last)
            at = last.source
        return way[::-1]

    def _tree(self, starts: tuple[str | None, ...], by: By, exact_only: bool) -> _Tree:
        """Dijkstra: costs are never negative, so a cut is settled when it is popped. Circles do no harm."""
        key = (starts, by, exact_only)
        if key in self._trees:
            return self._trees[key]
        settled: _Tree = {}
        heap: list[tuple[tuple[int, int], str, str | None, Manifest | None]]
        heap = [((0, 0), f"{index:06d}", start, None) for index, start in enumerate(starts)]
        while heap:
            cost, _, cut, last = heapq.heappop(heap)
            if cut in settled:
                continue
            settled[cut] = cost, last
            for piece in self._from.get(cut, ()):
                if piece.target.id not in settled and (piece.exact or not exact_only):
                    step = (piece.bytes, 1) if by == "bytes" else (1, piece.bytes)
                    total = (cost[0] + step[0], cost[1] + step[1])
                    heapq.heappush(heap, (total, piece.name, piece.target.id, piece))
        self._trees[key] = settled
        return settled

    def restorable(self) -> list[Cut]:
        """Cuts that can be restored, oldest first."""
        tree = self._tree((None,), "bytes", False)
        return [cut for cut in self.cuts.values() if cut.id in tree]

    def newest(self) -> Cut | None:
        """The newest cut that can be restored."""
        found = self.restorable()
        return found[-1] if found else None

    def latest(self) -> Cut | None:
        """The newest cut that any piece leads to, restorable or not."""
        return next(reversed(self.cuts.values()), None)

    def missing(self, cut: str) -> list[str]:
        """Cuts that a restore of `cut` would begin from, had they been there: no piece leads to them."""
        seen, waiting, found = {cut}, [cut], []
        while waiting:
            at = waiting.pop()
            pieces = self._into.get(at, [])
            if not pieces:
                found.append(at)
            for piece in pieces:
                if piece.source is not None and piece.source not in seen:
                    seen.add(piece.source)
                    waiting.append(piece.source)
        return sorted(found)

    # -- decisions -----------------------------------------------------------------------------------------

    def choose(self, wish: str | None = None) -> Cut:
        """The cut a user means: an id or the beginning of one, a step (of several cuts the newest that can be
        restored), or "latest"; with or without the @."""
        text = (wish or LATEST).removeprefix("@")
        if text == LATEST:
            newest = self.newest()
            if newest is None:
                raise CheckpointError(*self._nothing_to_restore())
            return newest
        if text in self.cuts:
            return self.cuts[text]
        found = [cut for cut in self.cuts.values() if text.isdecimal() and cut.step == int(text)]
        if len(found) > 1:  # training went back and passed that step again: what counts is how it went on
            return next((cut for cut in reversed(found) if self.path(cut.id) is not None), found[-1])
        found = found or [cut for cut in self.cuts.values() if text and cut.id.startswith(text)]
        if len(found) == 1:
            return found[0]
        problem = f"no cut is {text!r}" if not found else f"{len(found)} cuts are {text!r}"
        raise UserError(f"{problem}; there {self._candidates(found)}", hint="`regrow ckpt ls` shows all cuts")

    def _candidates(self, found: list[Cut]) -> str:
        cuts = [f"{cut.id} (step {cut.step})" for cut in reversed(found or list(self.cuts.values()))]
        if not cuts:
            return "are none at all"
        more = f" and {len(cuts) - CANDIDATES_SHOWN_MAX} older" if len(cuts) > CANDIDATES_SHOWN_MAX else ""
        return f"{'is' if len(cuts) == 1 else 'are'} {', '.join(cuts[:CANDIDATES_SHOWN_MAX])}{more}"

    def _nothing_to_restore(self) -> tuple[str]:
        latest = self.latest()
        if latest is None:
            return ("there is no checkpoint here: no piece has a manifest",)
        gone = ", ".join(self.missing(latest.id))
        return (f"none of {len(self.cuts)} cuts can be restored: no full leads to any; {latest.id} needs {gone}",)

    def restore_plan(self, target: str | None = None) -> tuple[Plan, str]:
        """What to read for a cut (any form that `choose` knows; None: the newest restorable), and why this."""
        cut = self.choose(target)
        way = self.path(cut.id)
        if way is None:
            newest, gone = self.newest(), ", ".join(self.missing(cut.id))
            other = (
                "no other cut can be restored either" if newest is None else f"the newest that can be is @{newest.id}"
            )
            raise CheckpointError(f"cut {cut.id} cannot be restored: no pieces lead to {gone}", hint=other)
        plan = Plan(cut, tuple(way), self)
        why = f"{cut.id} (step {cut.step}): {_way_text(way)}"
        if not plan.exact:
            why += "; approximate, quantised pieces are on every path"
        if target in (None, LATEST, f"@{LATEST}"):
            order = list(self.cuts)
            newer = order[order.index(cut.id) + 1 :]  # none of them is restorable, or it would be the newest
            why = f"newest restorable cut, {why}"
            if newer:
                why += f"; newer but not restorable: {', '.join(newer)} (missing {', '.join(self.missing(newer[-1]))})"
        return plan, why

    def prune_plan(self, rules: Rules, *, now: float) -> tuple[list[str], dict[str, str]]:
        """(names to delete, why each piece stays or goes). The rules are in retention.py."""
        from regrow.checkpoint import retention

        return retention.prune_plan(self, rules, now=now)

    # -- the tree as text ----------------------------------------------------------------------------------

    def parent(self, cut: str) -> str | None:
        """The nearest cut that `cut` was trained on from, if it is still known."""
        sources = [piece.source for piece in self._into.get(cut, ()) if piece.source in self._order]
        return max(sources, key=lambda source: self._order[source or ""], default=None)

    def branches(self) -> dict[str | None, list[str]]:
        """Cut -> the cuts trained on from it, oldest first; None -> those whose parent is not known."""
        found: dict[str | None, list[str]] = {}
        for cut in self.cuts:
            found.setdefault(self.parent(cut), []).append(cut)
        return found

    def tree(self, *, now: float) -> list[str]:
        """One line per cut, oldest first: ● can be restored, ○ cannot; what leads to it, and what a restore needs.

        The branch that was trained on last goes straight down; the others are drawn beside it.
        """
        if not self.cuts:
            return ["no cuts"]
        children = self.branches()
        newest = self.newest()
        last = dict(self._order)  # cut -> the newest of its descendants
        for cut in reversed(self.cuts):
            if (above := self.parent(cut)) is not None:
                last[above] = max(last[above], last[cut])
        rows: list[tuple[str, list[str]]] = []
        waiting = [(root, "", "") for root in sorted(children.get(None, ()), key=last.__getitem__, reverse=True)]
        while waiting:
            cut, first, rest = waiting.pop()
            rows.append((first, self._tree_row(self.cuts[cut], newest, now)))
            below = sorted(children.get(cut, ()), key=last.__getitem__)
            if below:
                waiting.append((below[-1], rest, rest))
            waiting += [(side, f"{rest}├─", f"{rest}│ ") for side in reversed(below[:-1])]
        return _columns(rows)

    def _tree_row(self, cut: Cut, newest: Cut | None, now: float) -> list[str]:
        way = self.path(cut.id)
        mark = "○" if way is None else "●"
        into = " + ".join(piece_text(piece) for piece in sorted(self._into[cut.id], key=lambda p: p.source or ""))
        if way is None:
            needs = f"not restorable: missing {', '.join(self.missing(cut.id))}"
        else:
            needs = f"restore: {_way_text(way)}"
            if newest is not None and cut.id == newest.id:
                needs += "  <- newest"
        return [f"{mark} {cut.id}", f"step {cut.step}", age_text(now - cut.created), into, needs]


def piece_text(piece: Manifest) -> str:
    """What a piece is, in a few words: delta 1.2 MiB from step 40."""
    origin = "" if piece.source is None else f" from step {cut_step(piece.source)}"
    bits = "" if piece.exact else f" ({piece.bits} bit)"
    return f"{kind(piece)} {size_text(piece.bytes)}{bits}{origin}"


def kind(piece: Manifest) -> Literal["full", "merged", "delta"]:
    if piece.source is None:
        return "full"
    return "merged" if piece.folded else "delta"


def _way_text(way: Sequence[Manifest]) -> str:
    count = f"{len(way)} piece{'s' if len(way) > 1 else ''}"
    return f"{count}, {size_text(sum(piece.bytes for piece in way))}"


def _columns(rows: list[tuple[str, list[str]]]) -> list[str]:
    """Cells under each other; what is drawn to the left of a row is part of its first cell."""
    cells = [[left + row[0], *row[1:]] for left, row in rows]
    widths = [max(len(row[column]) for row in cells) for column in range(len(cells[0]))]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in cells]
