"""Names of cuts and of the pieces that lead between them; they are names of directories on storage, so they never
change their form: `0000000400-64aab3` is a cut at step 400, `0000000400-64aab3.full` a piece that leads to it from
nothing, `0000000500-a34e2d.0000000400-64aab3` one that leads to the cut at 500 from the one at 400.

`saves/1f0c.0/s2of4-64aab3c1/0000000001-0000000007` is the seventh save of the incarnation 1 of server 2, in a run that
never fell back; what it has is that server's alone, and it is no cut (`checkpoint/saves.py`).

Ten digits, so that names sort as steps do. The letters behind them tell apart cuts of one step: other branches, other
attempts. Names of chunks and shards, which only whoever stores them needs, are in `checkpoint/manifest.py`.
"""

from __future__ import annotations

import hashlib

from regrow.errors import CheckpointError

FULL = "full"  # stands for the source of a piece that has none
STEP_DIGITS, SALT_DIGITS = 10, 6
STEP_MAX = 10**STEP_DIGITS - 1
SAVES = "saves"  # the directory of all saves, beside those of pieces
SAVE_DIGITS = 10
WORD_LETTERS_MAX = 64  # of the name of a run or of a shard

_DECIMAL, _HEX = frozenset("0123456789"), frozenset("0123456789abcdef")
_WORD = _HEX | frozenset("ghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ_-")


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


def save_name(incarnation: int, number: int) -> str:
    """Names of one server's saves sort as they were written, all of a successor's after those of whom it replaced."""
    if not (0 <= incarnation < 10**SAVE_DIGITS and 0 <= number < 10**SAVE_DIGITS):
        raise CheckpointError(f"save {number} of incarnation {incarnation} cannot be part of a name")
    return f"{incarnation:0{SAVE_DIGITS}d}-{number:0{SAVE_DIGITS}d}"


def is_save_name(text: str) -> bool:
    incarnation, _, number = text.partition("-")
    return all(len(part) == SAVE_DIGITS and _DECIMAL.issuperset(part) for part in (incarnation, number))


def is_word(text: str) -> bool:
    """Whether it can be the name of a run or a shard: it becomes that of a directory, and leads nowhere else."""
    return 1 <= len(text) <= WORD_LETTERS_MAX and _WORD.issuperset(text)


def saves_directory(run: str, start: int, shard: str = "") -> str:
    """Where a run keeps saves, all or those of one shard. Incarnations are counted anew each time that a run begins
    again from a checkpoint, and what was saved before is not part of what comes after: so `start` is in the name."""
    if not is_word(run) or not (is_word(shard) or not shard) or start < 0:
        raise CheckpointError(f"run {run!r}, start {start}, shard {shard!r} cannot be the name of a directory")
    return f"{SAVES}/{run}.{start}/{shard}".rstrip("/")


def parse_saves_run(name: str) -> tuple[str, int] | None:
    """(run, start) of a directory in `saves`; None: it is something else."""
    run, dot, start = name.partition(".")
    return (run, int(start)) if is_word(run) and dot and start and _DECIMAL.issuperset(start) else None


def is_save_path(path: str) -> bool:
    """Of the directory of one save."""
    parts = path.split("/")
    if len(parts) != 4 or parts[0] != SAVES or parse_saves_run(parts[1]) is None:
        return False
    return is_word(parts[2]) and is_save_name(parts[3])
