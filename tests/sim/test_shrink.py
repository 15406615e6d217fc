"""Goal: a failing tape becomes short enough to be read, and still fails for the same reason.

Method: made-up failures whose smallest tape is known, and one real one, of a planted bug.
"""

from __future__ import annotations

from regrow.sim import planted
from regrow.sim.choices import tape_from_text, tape_text
from regrow.sim.runner import run
from regrow.sim.shrink import cost, shrink


def test_what_does_not_matter_goes() -> None:
    tape = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9]
    assert shrink(tape, lambda tape: 9 in tape) == [9]
    assert shrink(tape, lambda tape: tape.count(5) >= 2) == [5, 5]
    assert shrink(tape, lambda tape: True) == []


def test_places_are_kept_where_they_matter() -> None:
    tape = [7, 7, 7, 8, 7, 7, 8, 7]
    assert shrink(tape, lambda tape: len(tape) > 5 and tape[5] > 3) == [0, 0, 0, 0, 0, 4]


def test_zeros_at_the_end_are_kept_where_they_matter() -> None:
    """Faults end with the tape. One that shows only after a while needs the dull choices behind it."""
    tape = [7, 5, 0, 0, 3, 0, 0, 0, 0, 0]
    assert shrink(tape, lambda tape: 5 in tape and len(tape) >= tape.index(5) + 4) == [5, 0, 0, 0]
    assert tape_from_text(tape_text(tape)) == tape


def test_a_real_failure_gets_shorter() -> None:
    name = "piecewise-flush"
    with planted.plant(name):
        first = run("async", seed=0)
        assert first.invariant

        def fails(tape: list[int]) -> bool:
            return run("async", tape=tape).invariant == first.invariant

        short = shrink(first.tape, fails, seconds_max=10.0)
        assert run("async", tape=short).invariant == first.invariant
    assert cost(short) < cost(first.tape)
    assert sum(value != 0 for value in short) <= 5
    assert not run("async", tape=short).invariant
