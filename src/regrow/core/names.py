"""Names of cuts and of the pieces that lead between them; they are names of directories on storage, so they never
change their form: `0000000400-64aab3` is a cut at step 400, `0000000400-64aab3.full` a piece that leads to it from
nothing, `0000000500-a34e2d.0000000400-64aab3` one that leads to the cut at 500 from the one at 400.

Ten digits, so that names sort as steps do. The letters behind them tell apart cuts of one step: other branches, other
attempts. Names of chunks and shards, which only whoever stores them needs, are in `checkpoint/manifest.py`.
"""

from __future__ import annotations

import hashlib

from regrow.errors import CheckpointError

FULL = "full"  # stands for the source of a piece that has none
STEP_DIGITS, SALT_DIGITS = 10, 6
STEP_MAX = 10**STEP_DIGITS - 1

_DECIMAL, _HEX = frozenset("0123456789"), frozenset("0123456789abcdef")


def cut_id(step: int, salt: str | int) -> str:
    """Same step and salt, same id."""
    if not 0 <= step <= STEP_MAX:
        raise CheckpointError(f"step {step} cannot be part of a name; steps are 0 to {STEP_MAX}")
    return f"{step:0{STEP_DIGITS}d}-{hashlib.sha256(f'{step}/{salt}'.encode()).hexdigest()[:SALT_DIGITS]}"


def is_cut_id(text: str) -> bool:
    step, dash, salt = text[:STEP_DIGITS], text[STEP_DIGITS : STEP_DIGITS + 1], text[STEP_DIGITS + 1 :]
    lengths_fit = len(step) == STEP_DIGITS and len(salt) == SALT_DIGITS
    return lengths_fit and dash == "-" and _DECIMAL.issuperset(step) and _HEX.issuperset(salt)


def cut_step(cut: str) -> int:
    """The step in the id of a cut."""
    return int(cut[:STEP_DIGITS])


def piece_name(source: str | None, target: str) -> str:
    return f"{target}.{source or FULL}"


def is_piece_name(text: str) -> bool:
    target, dot, source = text.partition(".")
    return is_cut_id(target) and dot == "." and (source == FULL or is_cut_id(source))


def parse_piece_name(name: str) -> tuple[str | None, str]:
    """(source, target) of a piece, or CheckpointError."""
    if not is_piece_name(name):
        raise CheckpointError(f"{name!r} is not the name of a piece")
    target, _, source = name.partition(".")
    return None if source == FULL else source, target
