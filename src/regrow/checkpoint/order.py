"""Which of two cuts is the older one, without asking any clock. Pure: cuts and their sources in, an order out.

A clock may jump, and two machines have two of them: by their word the newest checkpoint can look old, and be deleted.
So a cut carries where it stands (`manifest.Line`):

    run   what it is a checkpoint of: one training, however often it fell back or its coordinator was replaced
    turn  (start of the run, term of the coordinator, number of the cut): within a run, later is greater
    seen  run -> turn: the newest cut of every other run when this one made its first

Cuts of one run are in the order of their turns, so a manifest that a replaced coordinator writes late is old. A run is
younger than all runs that it has seen, and than those whose cuts its pieces begin from; all its cuts come behind
theirs. Two runs that did not see each other began at about the same time: the one that is further comes last.

A run is *open* if it made a cut that no younger run has seen: it goes on beside that one, and its newest cuts are
somebody's as well. Whoever starts a run closes what it finds.

Cuts from before there were lines are in the order of their times, none before its source, and behind nothing that has
a line, but for its source.
"""

from __future__ import annotations

import dataclasses
import heapq
from collections.abc import Iterable, Mapping, Sequence

from regrow.checkpoint.manifest import Cut, Line, Turn

OLD = ""  # the run of cuts that do not say theirs
_AFTER = 1  # in a turn: a cut without a line, behind its source

_Turn = tuple[float | str, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class Run:
    """The cuts of one run, oldest first."""

    name: str
    cuts: tuple[Cut, ...]
    is_open: bool


def make_line(cuts: Iterable[Cut], *, run: str, turn: Turn) -> Line:
    """Where a run's next cut stands beside those that are there. What its first one saw, the others repeat."""
    seen: dict[str, Turn] = {}
    own: dict[str, Turn] = {}
    known = False
    for cut in cuts:
        line = cut.line
        if line is not None and line.run == run:
            own, known = {**own, **line.seen}, True
        elif line is not None:
            seen[line.run] = max(line.turn, seen.get(line.run, line.turn))
    return Line(run=run, turn=turn, seen=own if known else dict(sorted(seen.items())))


def sort_runs(cuts: Mapping[str, Cut], sources: Mapping[str, Sequence[str]]) -> list[Run]:
    """All runs, oldest first. `sources`: cut -> the cuts that pieces lead to it from."""
    places = _place_all(cuts, sources)
    members: dict[str, list[str]] = {}
    for cut in sorted(cuts, key=lambda cut: (places[cut][1], cut)):
        members.setdefault(places[cut][0], []).append(cut)
    seen = _find_seen(cuts, sources, places)
    order = _sort_names(members, seen, cuts)
    return [
        Run(
            name=name,
            cuts=tuple(cuts[cut] for cut in members[name]),
            is_open=all(seen[other].get(name, ()) < places[members[name][-1]][1] for other in order if other != name),
        )
        for name in order
    ]


def _place_all(cuts: Mapping[str, Cut], sources: Mapping[str, Sequence[str]]) -> dict[str, tuple[str, _Turn]]:
    """cut -> its run, and its place there."""
    places: dict[str, tuple[str, _Turn]] = {}
    since: dict[str, float] = {}
    for cut in sorted(cuts.values(), key=lambda cut: (cut.step, cut.created, cut.id)):
        if cut.line is not None:
            places[cut.id] = cut.line.run, cut.line.turn
    for cut in sorted(cuts.values(), key=lambda cut: (cut.step, cut.created, cut.id)):
        if cut.line is not None:
            continue
        before = [source for source in sources.get(cut.id, ()) if source in places]
        lined = [places[source] for source in before if places[source][0] != OLD]
        if lined:
            run, turn = max(lined)
            places[cut.id] = run, (*turn, _AFTER, cut.step, cut.id)
        else:
            since[cut.id] = max([cut.created, *(since[source] for source in before)])
            places[cut.id] = OLD, (since[cut.id], cut.step, cut.created, cut.id)
    return places


def _find_seen(
    cuts: Mapping[str, Cut], sources: Mapping[str, Sequence[str]], places: Mapping[str, tuple[str, _Turn]]
) -> dict[str, dict[str, _Turn]]:
    """run -> the other runs that are older, and up to where they were seen."""
    runs = {run for run, _ in places.values()}
    newest_old = max((turn for run, turn in places.values() if run == OLD), default=())
    seen: dict[str, dict[str, _Turn]] = {run: {} for run in sorted(runs)}

    def note(run: str, other: str, turn: _Turn) -> None:
        if other != run and other in seen:
            seen[run][other] = max(turn, seen[run].get(other, turn))

    for cut in cuts.values():
        run = places[cut.id][0]
        if run != OLD:
            note(run, OLD, newest_old)
        for other, turn in (cut.line.seen if cut.line is not None else {}).items():
            note(run, other, turn)
        for source in sources.get(cut.id, ()):
            if source in places:
                note(run, *places[source])
    return seen


def _sort_names(
    members: Mapping[str, Sequence[str]], seen: Mapping[str, Mapping[str, _Turn]], cuts: Mapping[str, Cut]
) -> list[str]:
    """Runs behind all that they have seen; of others, the one that is further comes later. A circle (somebody wrote
    manifests by hand) is cut where that rule says."""
    waiting = {run: set(seen[run]) for run in members}
    weight = {run: (max(cuts[cut].step for cut in found), run) for run, found in members.items()}
    ready = [(*weight[run], run) for run, others in waiting.items() if not others]
    heapq.heapify(ready)
    order: list[str] = []
    done: set[str] = set()
    while waiting:
        run = heapq.heappop(ready)[-1] if ready else min(waiting, key=weight.__getitem__)
        if run in done:
            continue
        done.add(run)
        del waiting[run]
        order.append(run)
        for other, others in waiting.items():
            if run in others:
                others.discard(run)
                if not others:
                    heapq.heappush(ready, (*weight[other], other))
    return order
