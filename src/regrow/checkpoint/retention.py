"""Which pieces stay. Pure: a graph, rules and a time in; names to delete and a reason for every piece out.

Two wishes: to go on training (the newest `keep_last` cuts by their lines, never by a clock, each by its cheapest path;
of every run that goes on beside the newest one too) and to go back behind bad data (fulls at wide intervals, thinner
with age). A piece stays if one of the kept cuts needs it, so only cuts that are not
kept can become unreachable. When to delete what is not needed is not decided here: the merger in policy.py
waits until readers that began before are done.

A third wish, that storage does not grow: what a process that died left unfinished goes. Nobody can tell a dead writer
on another machine from a slow one, but by its silence; so the rule is an age.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Collection, Iterable, Mapping

from regrow.checkpoint.lineage import Graph
from regrow.checkpoint.manifest import Manifest
from regrow.checkpoint.storage import Unfinished
from regrow.core.names import parse_piece_name, piece_name
from regrow.errors import ConfigError
from regrow.units import age_text, seconds_text, span_text

FULLS_BEFORE_THINNING = 8
# A writer that lives writes a file every few minutes at least: each call to storage is given up after one. Too small:
# one whose machine slept, or has another time, loses what it writes. Too large: what was left behind takes space.
UNFINISHED_SECONDS = 86400.0


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    # Cuts that can be restored from the newest back. Too small: a restore that began before a newer cut came may lose
    # its pieces after the grace period. Too large: deltas that were merged long ago stay on storage.
    keep_last: int = 3
    # One full per interval stays for going back; after 8 intervals one of two, after 16 one of four, and so on.
    # Too small: storage fills with fulls. Too large: going back loses more training. 0: none is kept for that.
    keep_full_every_seconds: float = 86400.0
    # Cuts that always stay restorable: the one a run was started from, a release.
    pinned: frozenset[str] = frozenset()

    def __post_init__(self) -> None:
        if self.keep_last < 1:
            raise ConfigError("keep_last", self.keep_last, "at least the newest cut has to stay")
        if not 0.0 <= self.keep_full_every_seconds < math.inf:
            raise ConfigError("keep_full_every_seconds", self.keep_full_every_seconds, "must be a time, or 0 for none")


def prune_plan(graph: Graph, rules: Rules, *, now: float) -> tuple[list[str], dict[str, str]]:
    """(pieces to delete, deltas before fulls and newest first; why each piece of the graph stays or goes)."""
    why: dict[str, str] = {}
    for cut, reason in _choose_cuts(graph, rules):
        for piece in graph.path(cut) or ():
            why.setdefault(piece.name, f"kept: {reason} needs it")
    for piece, reason in choose_fulls(graph, rules, now=now):
        why.setdefault(piece.name, f"kept: {reason}")
    reachable = {cut.id for cut in graph.restorable()}
    doomed = []
    for piece in graph.pieces.values():
        if piece.name in why:
            continue
        if not reachable:
            # Nothing can be restored: perhaps the storage lists only a part of itself just now. Nothing is deleted.
            why[piece.name] = "kept: no cut can be restored just now, so nothing is deleted"
            continue
        doomed.append(piece)
        if piece.target.id not in reachable:
            why[piece.name] = "deleted: its cut cannot be restored"
        elif piece.source is None:
            why[piece.name] = "deleted: a newer full and the interval rule make this one unneeded"
        else:
            why[piece.name] = "deleted: no kept cut needs it"
    waiting = _may_be_completed(graph, {piece.name for piece in doomed})
    for piece in [piece for piece in doomed if piece.name in waiting]:
        doomed.remove(piece)
        why[piece.name] = "kept: newer than every restorable cut; a piece before it may still arrive"
    # Whatever order a killed prune stops in, kept cuts need none of these. Deltas go first so that a half-deleted
    # chain keeps its full for as long as it may be of use to somebody.
    doomed.sort(key=lambda piece: (piece.source is None, -piece.target.step, piece.name))
    return [piece.name for piece in doomed], why


def plan_unfinished(
    graph: Graph,
    found: Iterable[Unfinished],
    *,
    now: float,
    seconds: float = UNFINISHED_SECONDS,
    dead: Collection[str] = (),
    silent: Mapping[str, float] | None = None,
) -> tuple[list[str], dict[str, str]]:
    """(unfinished pieces to delete; why each stays or goes). `dead`: cuts whose writers are known to have ended, all of
    them. Of such a cut nobody else knows, unless there is a whole piece of it: then a merger may be at work. `silent`:
    for how long nobody wrote to each, by somebody who looked; None: by the times of their files."""
    doomed: list[str] = []
    why: dict[str, str] = {}
    reachable = bool(graph.restorable())
    for piece in found:
        target = parse_piece_name(piece.name)[1]
        unwritten = piece.seconds(now) if silent is None else silent[piece.name]
        if piece.name in graph.pieces:
            why[piece.name] = "kept: its manifest was there a moment ago; somebody deletes it"
        elif target in dead and target not in graph.cuts:
            why[piece.name] = "deleted: unfinished, and whoever wrote it has ended"
        elif piece.changed is None and silent is None:
            why[piece.name] = "kept: unfinished; the storage does not tell when it was written, so it may be just now"
        elif unwritten < seconds:
            why[piece.name] = f"kept: unfinished, written to {age_text(unwritten)}: somebody may be at work"
        elif not reachable:
            why[piece.name] = "kept: no cut can be restored just now, so nothing is deleted"
        else:
            why[piece.name] = f"deleted: unfinished, nobody wrote to it for {seconds_text(unwritten)}"
        if why[piece.name].startswith("deleted"):
            doomed.append(piece.name)
    return doomed, why


def _choose_cuts(graph: Graph, rules: Rules) -> list[tuple[str, str]]:
    """The newest of all, and of every run that goes on beside the newest one: it may be somebody's, and alive."""
    restorable = {cut.id for cut in graph.restorable()}
    newest_first = [cut.id for cut in reversed(graph.cuts.values()) if cut.id in restorable]
    kept = [
        (cut, f"{cut}, {'the newest cut,' if not index else f'number {index + 1} of the newest cuts,'}")
        for index, cut in enumerate(newest_first[: rules.keep_last])
    ]
    for run in reversed(graph.runs):
        newest = [cut.id for cut in reversed(run.cuts) if cut.id in restorable][: rules.keep_last]
        if run.is_open:
            kept += [(cut, f"{cut}, of a run that goes on beside the newest,") for cut in newest]
    return kept + [(cut, f"{cut}, which is pinned,") for cut in sorted(rules.pinned)]


def choose_fulls(graph: Graph, rules: Rules, *, now: float) -> list[tuple[Manifest, str]]:
    """The oldest full of each interval. Intervals are counted from time zero and double as they merge, so that a full
    that was passed over once is never wanted again, and one that is kept stays the choice until its interval grows."""
    if not rules.keep_full_every_seconds:
        return []
    oldest: dict[tuple[int, int], Manifest] = {}
    for cut, at in _tell_times(graph, now).items():
        piece = graph.pieces.get(piece_name(None, cut))
        if piece is None:
            continue
        age = max(0.0, now - at) / rules.keep_full_every_seconds
        thinning = max(0, math.floor(math.log2(max(1.0, age / FULLS_BEFORE_THINNING)) + (age >= FULLS_BEFORE_THINNING)))
        seconds = rules.keep_full_every_seconds * 2**thinning
        oldest.setdefault((thinning, math.floor(at / seconds)), piece)
    return [
        (piece, f"the full to go back to for {span_text(rules.keep_full_every_seconds * 2**thinning)}")
        for (thinning, _), piece in oldest.items()
    ]


def _tell_times(graph: Graph, now: float) -> dict[str, float]:
    """When each cut was made, oldest first, as far as clocks can be believed: none later than one that came after it
    or than now, and none earlier than one before it. A clock decides nothing else: not which cuts are the newest."""
    times: dict[str, float] = {}
    latest = now
    for cut in reversed(graph.cuts.values()):
        latest = cut.created if cut.created <= now else latest
        times[cut.id] = latest
    rising = itertools.accumulate((times[cut] for cut in graph.cuts), max)
    return dict(zip(graph.cuts, rising, strict=True))


def _may_be_completed(graph: Graph, doomed: set[str]) -> set[str]:
    """Unreachable pieces newer than the newest restorable cut, or than that of their run if it is open: uploads may
    finish out of order."""
    restorable = {cut.id for cut in graph.restorable()}
    newest, order = graph.newest(), list(graph.cuts)
    newer = set(order[order.index(newest.id) + 1 :]) if newest is not None else set(order)
    for run in graph.runs:
        for cut in reversed(run.cuts if run.is_open else ()):
            if cut.id in restorable:
                break
            newer.add(cut.id)
    return {name for name in doomed if graph.pieces[name].target.id in newer}
