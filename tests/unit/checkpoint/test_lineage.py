"""Goal: from the manifests alone it is known which cuts can be restored, by which pieces, and which pieces may go.

Method: graphs drawn by hand, whole answers compared; random graphs, where the cheapest path is compared with stupid
code that tries every path. The picture is parsed and its parts are counted.
"""

from __future__ import annotations

import re
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator

import hypothesis
import hypothesis.strategies as st
import pytest
from chains import chain, cut, piece

from regrow.checkpoint import picture
from regrow.checkpoint.lineage import CANDIDATES_SHOWN_MAX, Graph, kind
from regrow.checkpoint.manifest import Manifest
from regrow.checkpoint.retention import Rules, choose_fulls, prune_plan
from regrow.errors import CheckpointError, ConfigError, UserError

HOUR = 3600.0


def names(way: list[Manifest] | None) -> list[str] | None:
    return None if way is None else [each.name for each in way]


# -- paths -------------------------------------------------------------------------------------------------


def test_the_cheapest_path_is_taken() -> None:
    cuts, pieces = chain(4)
    dear = piece(cuts[0], cuts[3], 31, folded=3)
    cheap = piece(cuts[0], cuts[3], 29, folded=3)
    assert names(Graph(pieces).path(cuts[3].id)) == [each.name for each in pieces]
    assert names(Graph([*pieces, dear]).path(cuts[3].id)) == [each.name for each in pieces]
    assert names(Graph([*pieces, cheap]).path(cuts[3].id)) == [pieces[0].name, cheap.name]
    assert names(Graph([*pieces, dear]).path(cuts[3].id, by="pieces")) == [pieces[0].name, dear.name]
    assert names(Graph(pieces).path(cuts[3].id, starts=(cuts[1].id,))) == [each.name for each in pieces[2:]]


def test_of_equal_bytes_the_path_of_fewer_pieces_is_taken() -> None:
    cuts, pieces = chain(3)
    equal = piece(cuts[0], cuts[2], 20, folded=2)
    assert names(Graph([*pieces, equal]).path(cuts[2].id)) == [pieces[0].name, equal.name]


def test_an_exact_path_comes_before_a_quantised_one() -> None:
    cuts, pieces = chain(3)
    small = piece(None, cuts[2], 5, bits=8)
    graph = Graph([*pieces, small])
    assert names(graph.path(cuts[2].id)) == [each.name for each in pieces]
    alone, why = graph.without([pieces[0].name]).restore_plan()
    assert names(list(alone.pieces)) == [small.name]
    assert not alone.exact
    assert "approximate" in why


def test_a_missing_piece_is_an_edge_that_is_not_there() -> None:
    cuts, pieces = chain(5)
    graph = Graph([*pieces[:2], *pieces[3:]])
    newest = graph.newest()
    assert newest is not None and newest.id == cuts[1].id
    assert graph.path(cuts[4].id) is None
    assert graph.missing(cuts[4].id) == [cuts[2].id]
    plan, why = graph.restore_plan()
    assert plan.target.id == cuts[1].id
    assert (plan.bytes, plan.rows, plan.exact) == (110, 2, True)
    assert why == (
        f"newest restorable cut, {cuts[1].id} (step 2): 2 pieces, 110 B; newer but not restorable: "
        f"{cuts[3].id}, {cuts[4].id} (missing {cuts[2].id})"
    )
    with pytest.raises(CheckpointError, match=f"{cuts[4].id} cannot be restored.*{cuts[2].id}") as error:
        graph.restore_plan(cuts[4].id)
    assert error.value.hint == f"the newest that can be is @{cuts[1].id}"


@pytest.mark.parametrize("target", [None, "latest"])
def test_nothing_to_restore(target: str | None) -> None:
    with pytest.raises(CheckpointError, match="no checkpoint here"):
        Graph([]).restore_plan(target)
    _, pieces = chain(3)
    with pytest.raises(CheckpointError, match=f"none of 2 cuts can be restored.*needs {pieces[1].source}"):
        Graph(pieces[1:]).restore_plan(target)


def test_a_circle_ends() -> None:
    a, b = cut(1), cut(2)
    graph = Graph([piece(a, b), piece(b, a)])
    assert graph.newest() is None
    assert graph.missing(a.id) == []
    assert names(Graph([*graph.pieces.values(), piece(None, a)]).path(b.id)) == [
        piece(None, a).name,
        piece(a, b).name,
    ]


def test_a_clock_that_goes_back_does_not_make_a_cut_older_than_its_source() -> None:
    first, second, third = cut(1, created=1000.0), cut(2, created=2000.0), cut(3, created=500.0)
    graph = Graph([piece(None, first), piece(first, second), piece(second, third)])
    assert list(graph.cuts) == [first.id, second.id, third.id]


def test_after_going_back_the_newer_branch_is_the_newest_whatever_its_step() -> None:
    cuts, pieces = chain(5)
    branch = cut(3, "again", created=10_000.0)
    graph = Graph([*pieces, piece(cuts[1], branch)])
    newest = graph.newest()
    assert newest is not None and newest.id == branch.id


def every_path(pieces: list[Manifest], start: str | None, end: str) -> Iterator[list[Manifest]]:
    """Stupid: all of them, without circles because steps rise."""
    for each in pieces:
        if each.target.id == end:
            if each.source == start:
                yield [each]
            elif each.source is not None:
                yield from ([*way, each] for way in every_path(pieces, start, each.source))


@hypothesis.given(
    edges=st.lists(st.tuples(st.integers(0, 6), st.integers(1, 7), st.integers(0, 9)), max_size=16),
    end=st.integers(1, 7),
)
def test_the_path_is_the_best_of_all_paths(edges: list[tuple[int, int, int]], end: int) -> None:
    cuts = [cut(step) for step in range(8)]
    found = {(a, b): piece(cuts[a] if a else None, cuts[b], size) for a, b, size in edges if a < b}
    pieces = list(found.values())
    best = min(((sum(e.bytes for e in way), len(way)) for way in every_path(pieces, None, cuts[end].id)), default=None)
    way = Graph(pieces).path(cuts[end].id)
    assert (None if way is None else (sum(e.bytes for e in way), len(way))) == best
    if way is not None:
        assert [each.source for each in way] == [None, *(each.target.id for each in way[:-1])]


# -- choosing ----------------------------------------------------------------------------------------------


def test_choose_by_id_prefix_step_and_latest() -> None:
    cuts, pieces = chain(12)
    graph = Graph(pieces)
    for wish in (cuts[4].id, f"@{cuts[4].id}", cuts[4].id[:12], "5", "@5", "0000000005"):
        assert graph.choose(wish).id == cuts[4].id
    for wish in (None, "latest", "@latest", ""):
        assert graph.choose(wish).id == cuts[-1].id


def test_a_wish_that_fits_none_or_several_lists_what_there_is() -> None:
    cuts, pieces = chain(12)
    branch = cut(5, "again", created=10_000.0)
    graph = Graph([*pieces, piece(cuts[3], branch)])
    with pytest.raises(UserError) as none:
        graph.choose("77")
    assert none.value.message.startswith("no cut is '77'; there are ")
    assert none.value.message.endswith(f"and {13 - CANDIDATES_SHOWN_MAX} older")
    assert none.value.exit_code == 2
    with pytest.raises(UserError) as several:
        graph.choose(branch.id[:11])
    assert several.value.message == (
        f"2 cuts are {branch.id[:11]!r}; there are {branch.id} (step 5), {cuts[4].id} (step 5)"
    )
    with pytest.raises(UserError, match="there are none at all"):
        Graph([]).choose("5")


def test_of_two_cuts_of_a_step_the_newest_that_can_be_restored_counts() -> None:
    """Training went back to step 4 and came by step 5 again; a third time it was lost."""
    cuts, pieces = chain(12)
    branch, lost = cut(5, "again", created=10_000.0), cut(5, "lost", created=20_000.0)
    graph = Graph([*pieces, piece(cuts[3], branch), piece(cut(4, "gone"), lost)])
    assert graph.choose("5").id == graph.choose("@5").id == branch.id
    assert graph.without([piece(cuts[3], branch).name, piece(cuts[3], cuts[4]).name]).choose("5").id == lost.id


# -- text and picture --------------------------------------------------------------------------------------


def make_branches() -> Graph:
    cuts, pieces = chain(4, full=3 << 20, delta=2048)
    branch = [cut(3, "again", created=500.0), cut(4, "again", created=560.0)]
    merged = piece(cuts[0], cuts[2], 3000, folded=2)
    lost = piece(cut(7, "gone"), cut(8, "lost", created=400.0), 5)
    more = [piece(cuts[1], branch[0], 1024), piece(branch[0], branch[1], 1024, bits=8)]
    return Graph([*pieces, merged, lost, *more])


def test_the_tree_says_what_there_is_and_what_a_restore_needs() -> None:
    lines = make_branches().tree(now=560.0 + 2 * HOUR)
    assert [re.sub(r" {2,}", " | ", re.sub(r"-[0-9a-f]{6}", "", line)) for line in lines] == [
        "○ 0000000008 | step 8 | 2 h ago | delta 5 B from step 7 | not restorable: missing 0000000007",
        "● 0000000001 | step 1 | 2 h ago | full 3.0 MiB | restore: 1 piece, 3.0 MiB",
        "● 0000000002 | step 2 | 2 h ago | delta 2.0 KiB from step 1 | restore: 2 pieces, 3.0 MiB",
        "├─● 0000000003 | step 3 | 2 h ago | merged 2.9 KiB from step 1 + delta 2.0 KiB from step 2 | "
        "restore: 2 pieces, 3.0 MiB",
        "│ ● 0000000004 | step 4 | 2 h ago | delta 2.0 KiB from step 3 | restore: 3 pieces, 3.0 MiB",
        "● 0000000003 | step 3 | 2 h ago | delta 1.0 KiB from step 2 | restore: 3 pieces, 3.0 MiB",
        "● 0000000004 | step 4 | 2 h ago | delta 1.0 KiB (8 bit) from step 3 | restore: 4 pieces, 3.0 MiB | <- newest",
    ]
    assert len({line.index("step") for line in lines}) == 1, "columns stand under each other"
    assert Graph([]).tree(now=0.0) == ["no cuts"]


def test_the_picture_has_every_cut_and_every_piece() -> None:
    graph = make_branches()
    drawn = ElementTree.fromstring(picture.svg(graph, now=600.0, title="A & <B>"))
    classes = [element.get("class", "").split() for element in drawn.iter()]
    legend = {"cut": 2, "lost": 1, "edge": 3, "way": 1, "bar": 1, "merged": 1}
    count = {name: sum(name in found for found in classes) - legend.get(name, 0) for name in [*legend, "newest"]}
    plan, _ = graph.restore_plan()
    assert count["cut"] == len(graph.cuts) == 7
    assert count["lost"] == 1
    assert count["newest"] == 1
    assert count["bar"] == 1
    assert count["edge"] == len(graph.pieces) - 1
    assert count["merged"] == 1
    assert count["way"] == len(plan.pieces)
    assert "no cuts" in picture.svg(Graph([]), now=0.0)


def test_a_picture_of_many_cuts_shows_the_newest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(picture, "CUTS_SHOWN_MAX", 3)
    _, pieces = chain(8)
    drawn = picture.svg(Graph(pieces), now=0.0)
    assert "8 cuts, 5 older not shown" in drawn
    assert drawn.count("<circle") == 3 + 2, "and two in the legend"


def test_kinds_of_pieces() -> None:
    assert [kind(each) for each in (piece(None, cut(1), folded=2), piece(cut(1), cut(2)))] == ["full", "delta"]


# -- retention ---------------------------------------------------------------------------------------------


def test_only_what_the_kept_cuts_need_stays_and_everything_has_a_reason() -> None:
    cuts, pieces = chain(6)
    merged = piece(cuts[0], cuts[4], 15, folded=4)
    graph = Graph([*pieces, merged])
    doomed, why = graph.prune_plan(Rules(keep_last=2, keep_full_every_seconds=0.0), now=0.0)
    assert sorted(doomed) == sorted(each.name for each in pieces[1:5])
    assert why == {
        pieces[0].name: f"kept: {cuts[5].id}, the newest cut, needs it",
        merged.name: f"kept: {cuts[5].id}, the newest cut, needs it",
        pieces[5].name: f"kept: {cuts[5].id}, the newest cut, needs it",
    } | {name: "deleted: no kept cut needs it" for name in doomed}


def test_pinned_cuts_stay() -> None:
    cuts, pieces = chain(4)
    new = piece(None, cut(9))
    rules = Rules(keep_last=1, keep_full_every_seconds=0.0, pinned=frozenset({cuts[1].id}))
    doomed, why = prune_plan(Graph([*pieces, new]), rules, now=0.0)
    assert sorted(doomed) == [pieces[2].name, pieces[3].name]
    assert "pinned" in why[pieces[1].name]


def test_nothing_goes_while_nothing_can_be_restored() -> None:
    _, pieces = chain(4)
    doomed, why = prune_plan(Graph(pieces[1:]), Rules(), now=0.0)
    assert doomed == []
    assert all(reason.startswith("kept") for reason in why.values())


def test_a_piece_newer_than_everything_restorable_waits_for_the_one_before_it() -> None:
    _, pieces = chain(4)
    doomed, why = prune_plan(Graph([*pieces[:2], pieces[3]]), Rules(keep_last=1), now=0.0)
    assert doomed == []
    assert "may still arrive" in why[pieces[3].name]


def test_fulls_thin_out_with_age_and_one_that_was_passed_over_is_never_wanted_again() -> None:
    fulls = [piece(None, cut(step, created=step * HOUR / 2)) for step in range(1, 400)]
    rules = Rules(keep_last=1, keep_full_every_seconds=HOUR)
    left, before = fulls, None
    for now in range(0, 400, 3):
        there = [each for each in left if each.target.created <= now * HOUR / 2]
        kept = {each.name for each, _ in choose_fulls(Graph(there), rules, now=now * HOUR / 2)}
        left = [each for each in left if each.name in kept or each.target.created > now * HOUR / 2]
        before = now
    assert before == 399
    ages = [(399 - each.target.step) / 2 for each in left]
    gaps = {limit: sum(limit <= age < 2 * limit for age in ages) for limit in (8, 16, 32, 64)}
    assert sum(age < 8 for age in ages) in (8, 9)
    assert all(3 <= count <= 6 for count in gaps.values()), gaps


@pytest.mark.parametrize("option", [{"keep_last": 0}, {"keep_full_every_seconds": -1.0}])
def test_rules_that_cannot_be(option: dict[str, float]) -> None:
    with pytest.raises(ConfigError):
        Rules(**option)  # type: ignore[arg-type]
