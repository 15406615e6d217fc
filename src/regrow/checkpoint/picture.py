"""The graph of cuts and pieces as a picture: SVG, written by hand, no library.

Time goes to the right, one column per cut; a branch that was left behind has a lane of its own below. Circles are cuts:
filled if they can be restored. Lines from circle to circle are pieces: straight for a delta, an arc above for a merged
piece; a full is a bar that hangs below its cut. The way by which the newest cut is restored is drawn in colour and
thick. Nothing is read here but a `Graph`.
"""

from __future__ import annotations

import dataclasses
import math
from html import escape

from regrow.checkpoint.lineage import Graph, kind
from regrow.checkpoint.manifest import Manifest
from regrow.units import age_text, size_text

COLUMN, LANE, MARGIN = 104, 118, 56  # pixels
RADIUS = 9
HEAD = 92  # title and legend
ARC_STEP, ARC_MAX = 26.0, 190.0  # of an arc: per cut it passes over, and at most
CUTS_SHOWN_MAX = 400  # the newest; a picture wider than 40 000 pixels helps nobody

STYLE = """
  .paper { fill: #ffffff } text { font: 13px system-ui, -apple-system, "Segoe UI", sans-serif; fill: #1f2933 }
  .title { font-size: 17px; font-weight: 600 } .small { font-size: 11px; fill: #52606d } .mid { text-anchor: middle }
  .edge { fill: none; stroke: #9aa5b1; stroke-width: 1.6 } .merged { stroke-dasharray: 5 4 }
  .edge.way, .bar.way { stroke: #d9480f; stroke-width: 3.2 } .bar { stroke: #9aa5b1; stroke-width: 1.6; fill: #f1f3f5 }
  .bar.way { fill: #ffe8cc } .cut { fill: #364fc7; stroke: #ffffff; stroke-width: 2 }
  .cut.lost { fill: #ffffff; stroke: #9aa5b1; stroke-width: 1.6; stroke-dasharray: 3 2 }
  .cut.newest { fill: #d9480f }
  .halo { paint-order: stroke; stroke: #ffffff; stroke-width: 4px; stroke-linejoin: round }
""".strip("\n")


@dataclasses.dataclass(frozen=True, slots=True)
class _Places:
    x: dict[str, float]
    y: dict[str, float]
    width: float
    height: float


def svg(graph: Graph, *, now: float, title: str = "Checkpoints") -> str:
    """The picture as the text of a file."""
    shown = list(graph.cuts)[-CUTS_SHOWN_MAX:]
    places = _places(graph, shown)
    newest = graph.newest()
    way = {piece.name for piece in graph.path(newest.id) or ()} if newest is not None else set()
    pieces = [piece for piece in graph.pieces.values() if piece.target.id in places.x]
    lines = _head(graph, places, title, way, hidden=len(graph.cuts) - len(shown))
    for highlighted in (False, True):  # what matters is drawn last, and so lies on top
        for piece in pieces:
            if (piece.name in way) == highlighted:
                lines += (
                    _full(piece, places, highlighted) if piece.source is None else _edge(piece, places, highlighted)
                )
    reachable = {cut.id for cut in graph.restorable()}
    for cut in shown:
        lines += _draw_cut(
            graph, cut, places, now, lost=cut not in reachable, newest=newest is not None and cut == newest.id
        )
    if not shown:
        lines.append(f'<text x="{MARGIN}" y="{HEAD + 30}">no cuts</text>')
    return "\n".join([*lines, "</svg>", ""])


def _places(graph: Graph, shown: list[str]) -> _Places:
    """Columns by age; a lane per branch, the one that was trained on last on top."""
    lanes: dict[str, int] = {}
    taken = 0
    for tip in reversed(shown):
        if tip in lanes:
            continue
        at: str | None = tip
        while at is not None and at not in lanes:
            lanes[at] = taken
            at = graph.parent(at)
        taken += 1
    x = {cut: MARGIN + COLUMN / 2 + COLUMN * index for index, cut in enumerate(shown)}
    merged = [piece for piece in graph.pieces.values() if kind(piece) == "merged" and piece.target.id in x]
    top = HEAD + max([30.0, *(_rise(x[p.target.id] - x.get(p.source or "", 0.0)) for p in merged)]) + 26
    y = {cut: top + LANE * lanes[cut] for cut in shown}
    width = max(2 * MARGIN + COLUMN * len(shown), 760)
    return _Places(x, y, width, top + LANE * max(taken - 1, 0) + 96)


def _rise(width: float) -> float:
    """How high an arc goes."""
    return min(ARC_MAX, ARC_STEP * max(1.0, width / COLUMN))


def _head(graph: Graph, places: _Places, title: str, way: set[str], *, hidden: int) -> list[str]:
    width, height = f"{places.width:.0f}", f"{places.height:.0f}"
    size = size_text(sum(piece.bytes for piece in graph.pieces.values()))
    need = size_text(sum(graph.pieces[name].bytes for name in way))
    more = f", {hidden} older not shown" if hidden else ""
    counts = f"{len(graph.cuts)} cuts{more}, {len(graph.pieces)} pieces, {size} on storage"
    restore = f"the newest cut restores from {len(way)} pieces, {need}" if way else "no cut can be restored"
    return [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}" '
        f'role="img" aria-label="{escape(title)}">',
        f"<style>\n{STYLE}\n</style>",
        f'<rect class="paper" width="{width}" height="{height}"/>',
        f'<text class="title" x="{MARGIN - 24}" y="32">{escape(title)}</text>',
        f'<text class="small" x="{MARGIN - 24}" y="52">{counts}; {restore}</text>',
        *_legend(MARGIN - 24, 76),
    ]


def _legend(x: float, y: float) -> list[str]:
    """One line: a sign, its word, and the next."""
    mid = y - 4
    return [
        f'<path class="edge" d="M{x} {mid}h28"/><text class="small" x="{x + 34}" y="{y}">delta</text>',
        f'<path class="edge merged" d="M{x + 80} {mid + 5}q14 -16 28 0"/>'
        f'<text class="small" x="{x + 114}" y="{y}">merged</text>',
        f'<rect class="bar" x="{x + 172}" y="{mid - 6}" width="12" height="12" rx="2"/>'
        f'<text class="small" x="{x + 190}" y="{y}">full</text>',
        f'<path class="edge way" d="M{x + 228} {mid}h28"/>'
        f'<text class="small" x="{x + 262}" y="{y}">restores the newest</text>',
        f'<circle class="cut" cx="{x + 396}" cy="{mid}" r="6"/>'
        f'<text class="small" x="{x + 407}" y="{y}">restorable</text>',
        f'<circle class="cut lost" cx="{x + 484}" cy="{mid}" r="6"/>'
        f'<text class="small" x="{x + 495}" y="{y}">not restorable</text>',
    ]


def _tooltip(piece: Manifest) -> str:
    exact = "" if piece.exact else f", {piece.bits} bits"
    return f"<title>{escape(piece.name)}: {kind(piece)}, {size_text(piece.bytes)}, {piece.rows} rows{exact}</title>"


def _full(piece: Manifest, places: _Places, highlighted: bool) -> list[str]:
    """A bar below the cut; its height tells the size, by powers of ten."""
    x, y = places.x[piece.target.id], places.y[piece.target.id] + RADIUS + 36
    height = 8 + 3.0 * min(10, max(0.0, math.log10(max(piece.bytes, 1)) - 2))
    mark = " way" if highlighted else ""
    return [
        f'<rect class="bar{mark}" x="{x - 24:.1f}" y="{y:.1f}" width="48" height="{height:.1f}" rx="3">'
        f"{_tooltip(piece)}</rect>",
        f'<text class="small mid" x="{x:.1f}" y="{y + height + 13:.1f}">{size_text(piece.bytes)}</text>',
    ]


def _edge(piece: Manifest, places: _Places, highlighted: bool) -> list[str]:
    target, source = piece.target.id, piece.source or ""
    x2, y2 = places.x[target], places.y[target]
    known = source in places.x
    x1, y1 = (places.x[source], places.y[source]) if known else (x2 - 0.55 * COLUMN, y2)
    mark = " way" if highlighted else ""
    if kind(piece) == "merged":
        mark = f" merged{mark}"
        y1, y2 = y1 - RADIUS, y2 - RADIUS
        bend_x, bend_y1 = 18.0, min(y1, y2) - 4 / 3 * _rise(x2 - x1)
        bend_y2 = bend_y1
    else:
        between = y1 == y2 and any(places.y[cut] == y1 and x1 < x < x2 for cut, x in places.x.items())
        bend_x, dip = 50.0, 50.0 if between else 0.0  # below the other cuts of its lane
        bend_y1, bend_y2 = y1 + dip, y2 + dip
    bends = f"C{x1 + bend_x:.1f} {bend_y1:.1f} {x2 - bend_x:.1f} {bend_y2:.1f}"
    path = f"M{x1:.1f} {y1:.1f}{bends} {x2:.1f} {y2:.1f}"
    label, height = (x1 + x2) / 2, (y1 + 3 * bend_y1 + 3 * bend_y2 + y2) / 8 - 6  # the middle of the curve
    text = f'<text class="small mid halo" x="{label:.1f}" y="{height:.1f}">{size_text(piece.bytes)}</text>'
    return [f'<path class="edge{mark}" d="{path}">{_tooltip(piece)}</path>', text]


def _draw_cut(graph: Graph, cut: str, places: _Places, now: float, *, lost: bool, newest: bool) -> list[str]:
    x, y = places.x[cut], places.y[cut]
    mark = " lost" if lost else " newest" if newest else ""
    found = graph.cuts[cut]
    need = "not restorable" if lost else f"restore: {len(graph.path(cut) or ())} pieces"
    return [
        f'<circle class="cut{mark}" cx="{x:.1f}" cy="{y:.1f}" r="{RADIUS}"><title>{cut}: {need}</title></circle>',
        f'<text class="mid halo" x="{x:.1f}" y="{y + RADIUS + 16:.1f}">{found.step:,}</text>',
        f'<text class="small mid halo" x="{x:.1f}" y="{y + RADIUS + 29:.1f}">{age_text(now - found.created)}</text>',
    ]
