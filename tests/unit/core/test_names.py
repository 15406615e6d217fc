"""Goal: names on storage keep their form for ever, and nothing else passes for one.

Method: written examples, and damage to every letter of them.
"""

from __future__ import annotations

import pytest

from regrow.core.names import STEP_MAX, cut_id, cut_step, is_cut_id, is_piece_name, parse_piece_name, piece_name
from regrow.errors import CheckpointError

CUT, OTHER = "0000000400-64aab3", "0000000500-a34e2d"


def test_names_as_they_were_written() -> None:
    assert cut_id(100, "b") == cut_id(100, "b") != cut_id(100, "c")
    assert cut_id(7, "salt") == "0000000007-9a087a"
    assert cut_step(CUT) == 400
    assert piece_name(None, CUT) == f"{CUT}.full"
    assert piece_name(CUT, OTHER) == f"{OTHER}.{CUT}"


def test_ids_sort_as_steps_do() -> None:
    steps = [0, 9, 10, 99_999, STEP_MAX]
    assert [cut_step(cut) for cut in sorted(cut_id(step, "x") for step in reversed(steps))] == steps
    for step in (-1, STEP_MAX + 1):
        with pytest.raises(CheckpointError, match=f"step {step} cannot be part of a name"):
            cut_id(step, "x")


@pytest.mark.parametrize("source", [None, CUT])
def test_pieces_come_back(source: str | None) -> None:
    assert parse_piece_name(piece_name(source, OTHER)) == (source, OTHER)


@pytest.mark.parametrize("name", [f"{CUT}.full", f"{OTHER}.{CUT}"])
def test_nothing_else_is_a_piece(name: str) -> None:
    assert is_piece_name(name)
    for index in range(len(name)):
        for wrong in (name[:index] + "G" + name[index + 1 :], name[:index] + name[index + 1 :], name[:index]):
            assert not is_piece_name(wrong), wrong
    for wrong in (f"{name}x", f"{name}\n", f" {name}", f"{name}.full", f"../{name}", name.replace("0", "٠", 1)):
        assert not is_piece_name(wrong), wrong
        with pytest.raises(CheckpointError, match="is not the name of a piece"):
            parse_piece_name(wrong)


def test_cuts() -> None:
    assert is_cut_id(CUT)
    for wrong in ("", "full", CUT[:-1], f"{CUT}0", CUT.replace("-", "_"), CUT.upper()):
        assert not is_cut_id(wrong)
