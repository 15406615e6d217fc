"""Goal: which cut is the newest, and which may go, does not depend on any clock.

Method: runs that are resumed on a machine whose clock is behind, that go back, go on side by side, are written to late;
their clocks say whatever they like. Graphs by hand, whole answers compared, and random ones whose order must follow
turns, what was seen and sources, and must not change when all times do. Cuts of before, without a line, among them.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

import hypothesis
import hypothesis.strategies as st
import msgspec
import pytest
from chains import chain, cut, piece

from regrow.checkpoint.lineage import Graph
from regrow.checkpoint.manifest import Cut, Line, Manifest, Turn, decode, encode
from regrow.checkpoint.order import make_line
from regrow.checkpoint.retention import Rules, choose_fulls, prune_plan
from regrow.errors import CheckpointError

DAY = 86400.0
NOW = 1_800_000_000.0
LAST = Rules(keep_last=2, keep_full_every_seconds=0.0)


class Runs:
    """A storage URL to which runs write cuts, fulls all of them unless told otherwise."""

    def __init__(self) -> None:
        self.cuts: list[Cut] = []
        self.pieces: list[Manifest] = []
        self.lines: dict[str, Line] = {}

    def save(
        self,
        run: str,
        step: int,
        *,
        turn: Turn | None = None,
        created: float = NOW,
        source: Cut | None = None,
    ) -> Cut:
        before = self.lines.get(run)
        now = turn or ((0, 1, before.turn[2] + 1) if before else (0, 1, 1))
        line = make_line(self.cuts, run=run, turn=now)
        made = cut(step, f"{run}{now}", created=created, line=line)
        self.lines[run] = line
        self.cuts.append(made)
        self.pieces.append(piece(source, made))
        return made

    def graph(self) -> Graph:
        return Graph(self.pieces)

    def newest(self) -> Cut | None:
        return self.graph().newest()

    def kept(self, rules: Rules = LAST) -> list[str]:
        doomed, _ = prune_plan(self.graph(), rules, now=NOW)
        return [each.target.id for each in self.pieces if each.name not in doomed]


# -- clocks ------------------------------------------------------------------------------------------------


def test_a_clock_that_jumps_back_within_a_run_changes_nothing() -> None:
    runs = Runs()
    made = [runs.save("a", step, created=created) for step, created in ((10, NOW), (20, NOW + 60.0), (30, NOW - DAY))]
    assert runs.newest() == made[2]
    assert list(runs.graph().cuts) == [each.id for each in made]
    assert runs.kept() == [made[1].id, made[2].id], "the newest two, whatever their times"


def test_a_run_that_is_resumed_where_the_clock_is_behind() -> None:
    runs = Runs()
    for step in (10, 20, 30):
        runs.save("a", step)
    made = [runs.save("b", step, created=NOW - 5 * DAY) for step in (40, 50)]
    assert runs.newest() == made[1]
    assert runs.kept() == [each.id for each in made]


def test_a_clock_that_was_ahead_does_not_rule_for_ever() -> None:
    runs = Runs()
    runs.save("a", 10, created=NOW + 9999 * DAY)
    made = [runs.save("a", step) for step in (20, 30)]
    assert runs.newest() == made[1]
    assert runs.kept() == [each.id for each in made]


def test_a_manifest_that_a_replaced_coordinator_writes_late_is_old() -> None:
    runs = Runs()
    runs.save("a", 10, turn=(0, 1, 1))
    new = runs.save("a", 20, turn=(0, 2, 1), created=NOW + 1.0)
    late = runs.save("a", 25, turn=(0, 1, 2), created=NOW + 600.0)
    assert runs.newest() == new
    assert list(runs.graph().cuts)[1] == late.id


def test_what_a_run_stored_before_it_fell_back_is_older_than_all_after() -> None:
    runs = Runs()
    for step, number in ((10, 1), (20, 2), (30, 3)):
        runs.save("a", step, turn=(0, 1, number))
    again = runs.save("a", 15, turn=(1, 1, 1), created=NOW - DAY)
    assert runs.newest() == again


def test_times_of_fulls_to_go_back_to_are_believed_only_as_far_as_they_can_be() -> None:
    """One per day, of five days: one clock was a year ahead for a moment, another a year behind."""
    runs = Runs()
    believed = [NOW - (5 - day) * DAY for day in range(5)]
    for day, created in enumerate(believed):
        wrong = {2: created + 365 * DAY, 3: created - 365 * DAY}
        runs.save("a", 10 * day + 1, created=wrong.get(day, created))
        runs.save("a", 10 * day + 2, created=created + 10.0)
    rules = Rules(keep_last=1, keep_full_every_seconds=DAY)
    found = [each.target.step for each, _ in choose_fulls(runs.graph(), rules, now=NOW)]
    assert found == [1, 11, 21, 32, 41], "one a day: the full that its clock put into the day before is not missed"
    assert runs.newest() == runs.cuts[-1]


# -- forks -------------------------------------------------------------------------------------------------


def test_who_goes_back_on_purpose_leaves_the_other_branch_behind() -> None:
    runs = Runs()
    base = runs.save("a", 10)
    runs.save("a", 20, source=base)
    runs.save("a", 30)
    made = runs.save("b", 15, source=base)
    assert runs.newest() == made
    assert runs.kept(Rules(keep_last=1, keep_full_every_seconds=0.0)) == [base.id, made.id], "base: b starts from it"
    assert not runs.graph().runs[0].is_open


def test_two_runs_from_one_cut_are_both_kept_and_the_later_one_is_meant() -> None:
    runs = Runs()
    base = runs.save("a", 10)
    runs.save("b", 20, source=base)
    later = runs.save("c", 15, source=base)
    beside = [runs.save("b", step) for step in (30, 40, 50)]
    assert runs.newest() == later, "c began when b was there"
    doomed, why = prune_plan(runs.graph(), LAST, now=NOW)
    assert [each.is_open for each in runs.graph().runs] == [False, True, True]
    assert [each.id in runs.kept() for each in beside] == [False, True, True]
    assert why[piece(None, beside[2]).name].endswith("the newest cuts, needs it")
    more = [runs.save("c", step) for step in (25, 35)]
    doomed, why = prune_plan(runs.graph(), LAST, now=NOW)
    assert runs.newest() == more[1]
    assert "goes on beside the newest" in why[piece(None, beside[2]).name]
    assert piece(None, beside[0]).name in doomed
    runs.save("d", 5)
    last = runs.save("d", 6)
    assert [each.is_open for each in runs.graph().runs] == [False, False, False, True], "d has seen them all"
    assert runs.kept() == [runs.cuts[-2].id, last.id]


def test_pieces_of_a_run_beside_may_be_on_their_way() -> None:
    """A delta of the older run whose source has not arrived yet."""
    runs = Runs()
    base = runs.save("a", 10)
    runs.save("b", 12)
    missing = cut(15, "on its way")
    late = runs.save("a", 20, source=missing)
    doomed, why = prune_plan(runs.graph(), LAST, now=NOW)
    assert doomed == []
    assert "may still arrive" in why[piece(missing, late).name]
    assert base.id in runs.kept()


def test_runs_that_began_together_are_told_apart_by_how_far_they_are() -> None:
    one = cut(10, "a", created=NOW, line=Line(run="a", turn=(0, 1, 1)))
    other = cut(20, "b", created=NOW - DAY, line=Line(run="b", turn=(0, 1, 1)))
    for pieces in ([piece(None, one), piece(None, other)], [piece(None, other), piece(None, one)]):
        assert Graph(pieces).newest() == other
        assert all(run.is_open for run in Graph(pieces).runs)


def test_manifests_by_hand_that_have_seen_each_other_do_no_harm() -> None:
    one = cut(10, "a", line=Line(run="a", turn=(0, 1, 1), seen={"b": (0, 1, 1)}))
    other = cut(20, "b", line=Line(run="b", turn=(0, 1, 1), seen={"a": (0, 1, 1)}))
    assert [each.step for each in Graph([piece(None, one), piece(None, other)]).cuts.values()] == [10, 20]


# -- cuts of before ----------------------------------------------------------------------------------------


def test_cuts_without_lines_are_older_than_those_with_and_among_themselves_as_they_were() -> None:
    cuts, pieces = chain(4)
    branch = cut(3, "again", created=10_000.0)
    old = [*pieces, piece(cuts[1], branch)]
    assert [*Graph(old).cuts] == [cuts[0].id, cuts[1].id, cuts[2].id, cuts[3].id, branch.id]
    new = cut(2, "new", created=0.0, line=make_line([], run="a", turn=(0, 1, 1)))
    graph = Graph([*old, piece(None, new)])
    assert graph.newest() == new
    assert [run.is_open for run in graph.runs] == [False, True]
    after = cut(9, "of an older version", created=0.0)
    assert Graph([*old, piece(None, new), piece(new, after)]).newest() == after, "it was trained on from the newest"


def test_a_manifest_without_a_line_is_read() -> None:
    made = piece(None, cut(1, line=Line(run="a", turn=(1, 2, 3), seen={"b": (0, 0, 1)})))
    assert decode(encode(made), "here") == made
    assert b'"line":{"run":"a","turn":[1,2,3],"seen":{"b":[0,0,1]}}' in encode(made)
    assert decode(encode(piece(None, cut(1))), "here").target.line is None
    nameless = msgspec.structs.replace(made, target=cut(1, line=Line(run="", turn=(0, 0, 0))))
    with pytest.raises(CheckpointError, match="a run without a name"):
        encode(nameless)


# -- any -----------------------------------------------------------------------------------------------------


@hypothesis.given(
    acts=st.lists(st.tuples(st.sampled_from("abcd"), st.integers(1, 30), st.booleans()), min_size=1, max_size=14),
    seed=st.integers(0, 99),
)
def test_any_runs(acts: Sequence[tuple[str, int, bool]], seed: int) -> None:
    """Within a run by turn, behind all that was seen; and times do not matter."""
    runs = Runs()
    for run, step, delta in acts:
        own = [each for each in runs.cuts if each.line is not None and each.line.run == run]
        runs.save(run, step, source=own[-1] if own and delta else None)
    order = list(runs.graph().cuts)
    place = {name: index for index, name in enumerate(order)}
    for each in runs.cuts:
        assert each.line is not None
        for other in runs.cuts:
            assert other.line is not None
            if other.line.run == each.line.run:
                assert (place[other.id] < place[each.id]) == (other.line.turn < each.line.turn)
            elif each.line.seen.get(other.line.run, (-1,)) >= other.line.turn:
                assert place[other.id] < place[each.id]
    chance = random.Random(seed)
    moved = [
        msgspec.structs.replace(each, target=msgspec.structs.replace(each.target, created=chance.uniform(0, 2 * NOW)))
        for each in runs.pieces
    ]
    assert list(Graph(moved).cuts) == order
    assert prune_plan(Graph(moved), LAST, now=NOW)[0] == prune_plan(runs.graph(), LAST, now=NOW)[0]
