"""Goal: every life is what its table says: each state has a sentence and is reached, a move that is not there is
forbidden, and the page that shows the tables is current.

Method: the tables are walked; the page is drawn again by the command that draws it and compared.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from regrow.core.states import ALL, LINK, ForbiddenMove, Life, LinkState, Moves

ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize("moves", ALL, ids=lambda moves: moves.title)
def test_every_state_has_a_sentence_and_is_reached(moves: Moves[Any]) -> None:
    reached = {moves.rows[0][0]}
    while more := {target for source, _, target in moves.rows if source in reached} - reached:
        reached |= more
    assert reached == set(moves.states)
    assert all(len(state.value.split()) >= 4 for state in moves.states)
    assert len({state.value for state in moves.states}) == len(list(moves.states)), "a sentence for each"


@pytest.mark.parametrize("moves", ALL, ids=lambda moves: moves.title)
def test_a_move_that_is_not_in_the_table_is_forbidden_and_changes_nothing(moves: Moves[Any]) -> None:
    causes = {cause for _, cause, _ in moves.rows}
    for state in moves.states:
        for cause in causes:
            life = Life(moves, state)
            target = moves.by_cause.get((state, cause))
            if target is not None:
                life.move(cause)
                assert life.state is target
                continue
            with pytest.raises(ForbiddenMove, match=f"{cause!r} cannot happen while {state}"):
                life.move(cause)
            assert life.state is state


def test_a_life_begins_with_the_first_state_named() -> None:
    assert Life(LINK).state is LinkState.NEW
    assert repr(Life(LINK, LinkState.BROKEN)) == "<a link: broken>"


def test_two_moves_for_one_cause_are_refused() -> None:
    with pytest.raises(AssertionError, match="two moves for one cause"):
        Moves("twice", ((LinkState.NEW, "a", LinkState.OPEN), (LinkState.NEW, "a", LinkState.OVER)))


def test_the_diagrams_are_current() -> None:
    done = subprocess.run([sys.executable, ROOT / "tools" / "diagrams.py", "--check"], check=False)
    assert done.returncode == 0, "run `make diagrams`"
