"""Goal: s and N are the best that the merger can keep up with.

Method: the formulas are compared with a simulation of merging that knows sets and queues only, and the choice with all
others.
"""

from __future__ import annotations

import itertools

import msgspec
import numpy as np
import pytest
from chains import chain as manifests
from chains import piece

from regrow.checkpoint import policy
from regrow.checkpoint.lineage import Graph
from regrow.checkpoint.policy import (
    HEADROOM,
    N_CHOICES,
    PIECES_MAX,
    RESTORE_BOUND,
    S_MAX,
    Choice,
    Measured,
    choose,
    measure_rest,
    next_fold,
    union,
    work,
)

_numbers = itertools.count()


# -- the inequalities --------------------------------------------------------------------------------------


def simulate(n: int, s: int, *, d: float, f: float) -> tuple[float, float, int]:
    """(work per delta, size left, pieces left) after n deltas, by merging a queue of spans as soon as s are equal."""
    spans: list[int] = []
    read = 0.0
    for _ in range(n):
        spans.append(1)
        while len(spans) >= s and len(set(spans[-s:])) == 1:
            read += sum(union(span, d=d, f=f) for span in spans[-s:])
            spans[-s:] = [sum(spans[-s:])]
    size = sum(union(span, d=d, f=f) for span in spans)
    return (read + f + size) / n, size, len(spans)


@pytest.mark.parametrize("s", [2, 3, 5, 16])
@pytest.mark.parametrize(("d", "f"), [(0.0, 1000.0), (0.5, 20.0), (1.0, 3.0)])
def test_what_is_left_and_what_is_read_are_as_simulated(s: int, d: float, f: float) -> None:
    for n in range(1, 300):
        load, size, pieces = simulate(n, s, d=d, f=f)
        assert measure_rest(n, s, d=d, f=f) == (pytest.approx(size), pieces)
        # The formula counts a level from its first merge on; a level that is not full yet has merged less.
        assert load <= work(s, n, d=d, f=f) + 1e-9
        if n == s ** round(np.log(n) / np.log(s)):
            assert load == pytest.approx(work(s, n, d=d, f=f))


def test_the_union_of_real_sets_is_within_its_bound() -> None:
    random = np.random.default_rng(2)
    deltas = [set(random.zipf(1.3, 400).tolist()) for _ in range(30)]
    size = max(map(len, deltas))
    d = min(len(a & b) / size for a, b in itertools.pairwise(deltas))
    whole: set[int] = set()
    for n, delta in enumerate(deltas, 1):
        whole |= delta
        assert len(whole) / size <= union(n, d=d, f=1e9)


@pytest.mark.parametrize("d", [0.0, 0.4, 0.95])
@pytest.mark.parametrize("v", [0.1, 3.0, 10.0, 400.0])
@pytest.mark.parametrize("f", [1.0, 12.0, 300.0])
def test_the_choice_is_the_best_of_all_that_keep_up(d: float, v: float, f: float) -> None:
    choice = choose(Measured(overlap=d, speed_ratio=v, full_deltas=f))
    table = {}
    for s, n in itertools.product(range(2, S_MAX + 1), N_CHOICES):
        if s <= n:
            every = [measure_rest(count, s, d=d, f=f) for count in range(n)]
            assert all(size <= count + 1e-9 for count, (size, _) in enumerate(every)), "never more than the chain"
            table[s, n] = (
                work(s, n, d=d, f=f),
                max(size for size, _ in every),
                max(pieces for _, pieces in every),
            )
    load, restore, _ = table[choice.s, choice.n]
    able = {pair: row for pair, row in table.items() if row[0] <= HEADROOM * v}
    good = {pair: row for pair, row in able.items() if row[1] <= RESTORE_BOUND * f and row[2] <= PIECES_MAX}
    if not able:
        assert load == min(row[0] for row in table.values())
        assert "cannot keep up" in choice.reason
        return
    if good:
        assert (choice.s, choice.n) in good
        assert load == min(row[0] for row in good.values())
    else:
        assert (choice.s, choice.n) in able
        assert f + restore <= 1.05 * min(f + row[1] for row in able.values())
    assert ("no choice it can keep up with" in choice.reason) == (not good)
    for figure in (f"s={choice.s}", f"N={choice.n}", f"d={d:.2f}", f"v={v:.1f}", f"f={f:.1f}", f"{load:.2f} deltas"):
        assert figure in choice.reason


def test_before_anything_was_measured_there_are_defaults() -> None:
    for measured in (Measured(), Measured(overlap=0.5), Measured(overlap=0.5, speed_ratio=3.0)):
        assert choose(measured).reason.startswith("s=4, N=64: defaults")


def test_measurements_are_smoothed() -> None:
    seen = Measured().mix_in(overlap=0.5, speed_ratio=None)
    assert seen == Measured(overlap=0.5)
    assert seen.mix_in(overlap=1.0) == Measured(overlap=pytest.approx(0.65))


def test_overlap_is_what_it_was_made_of() -> None:
    _, deltas = manifests(4)
    rows = [msgspec.structs.replace(each, chunks=each.chunks * 100) for each in deltas[1:]]
    for d in (0.0, 0.25, 1.0):
        assert policy.overlap(rows, round(100 * union(3, d=d, f=1e9))) == pytest.approx(d)
    assert policy.overlap(rows[:1], 100) is None
    assert policy.overlap(deltas[:2], 2) is None


# -- what is due -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("s", "n"), [(2, 8), (3, 10), (4, 64)])
def test_the_hierarchy_grows_as_a_counter_does(s: int, n: int) -> None:
    """After each delta all that is due is folded, on paper; what is left are the digits of the count."""
    cuts, pieces = manifests(2 * n + 3)
    there, since = [pieces[0]], 0
    for delta in pieces[1:]:
        there.append(delta)
        since += 1
        for _ in range(100):
            due = next_fold(Graph(there), Choice(s=s, n=n, reason=""))
            if due is None:
                break
            folded = sum(policy.span(each) for each in due.pieces if each.source is not None)
            source = next((cut for cut in cuts if cut.id == due.source), None)
            target = next(cut for cut in cuts if cut.id == due.target)
            there.append(piece(source, target, 1, folded=folded))
            if due.source is None:
                assert folded == n and due.target == delta.target.id
                since = 0
        way = Graph(there).path(delta.target.id, by="pieces")
        assert way is not None
        assert len(way) - 1 == measure_rest(since, s, d=0.0, f=1e9)[1]


def test_pieces_of_different_bits_are_left_alone() -> None:
    cuts, pieces = manifests(5)
    narrow = [piece(a, b, bits=8) for a, b in itertools.pairwise(cuts)]
    due = next_fold(Graph([pieces[0], *narrow]), Choice(s=2, n=3, reason=""))
    assert due is not None and due.source == cuts[0].id, "deltas among themselves, and no full"
    assert next_fold(Graph([pieces[0], pieces[1], narrow[1]]), Choice(s=2, n=2, reason="")) is None
