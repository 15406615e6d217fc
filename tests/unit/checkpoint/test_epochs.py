"""Goal: the newest checkpoint in the files of servers is found, whole or not at all; older ones go.

Method: a writer over a directory, and its files damaged or taken away.
"""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from helpers import job, table

from regrow.checkpoint.epochs import FOLDER, EpochWriter, find_newest_epochs
from regrow.checkpoint.listing import read_listing
from regrow.core.cut import EpochPart
from regrow.core.cuts import TERM, WriteManifest
from regrow.core.names import cut_id
from regrow.errors import CheckpointError, UserError

JOB = job(table(), servers=2)


def make_writer(path: Path, *, run: str = "aa") -> EpochWriter:
    return EpochWriter(
        url=str(path), run=run, starts=0, extra={"config": {"seed": 1}}, made_by="test", clock=lambda: 5.0
    )


def make_cut(step: int, *epochs: int) -> WriteManifest:
    chunks = tuple(msgspec.json.encode(EpochPart(epoch=epoch)).decode() for epoch in epochs)
    return WriteManifest(
        number=TERM + step, source=None, target=cut_id(step, "x"), marks=(step,), chunks=chunks, discard=()
    )


def test_what_was_written_is_found(tmp_path: Path) -> None:
    assert find_newest_epochs(str(tmp_path)) is None
    written = make_writer(tmp_path).write(JOB, make_cut(40, 3, 5))
    assert written.error == ""
    found = find_newest_epochs(str(tmp_path))
    assert found is not None
    assert (found.epochs, found.target.marks, found.target.step, found.job) == ((3, 5), (40,), 40, JOB)
    assert found.target.extra == {"config": {"seed": 1}, "run": "aa"}
    assert found.target.line is not None and found.target.line.turn == (0, 1, 40)


def test_the_newest_is_the_one_written_last_whatever_its_step(tmp_path: Path) -> None:
    """A run that was resumed from an older state makes checkpoints of lower steps after those of higher ones."""
    first, second = make_writer(tmp_path), make_writer(tmp_path, run="bb")
    for writer, step in ((first, 40), (first, 80), (second, 60)):
        assert writer.write(JOB, make_cut(step, 1, 1)).error == ""
    found = find_newest_epochs(str(tmp_path))
    assert found is not None and found.target.step == 60
    assert len(list((tmp_path / FOLDER).iterdir())) == 2


def test_a_damaged_one_is_not_passed_over(tmp_path: Path) -> None:
    """The rows of the one before are gone: to go on with it would be a wrong model."""
    writer = make_writer(tmp_path)
    writer.write(JOB, make_cut(40, 1, 1))
    writer.write(JOB, make_cut(80, 2, 2))
    newest = max((tmp_path / FOLDER).iterdir())
    data = bytearray(newest.read_bytes())
    data[60] ^= 1
    newest.write_bytes(data)
    with pytest.raises(CheckpointError, match="damaged"):
        find_newest_epochs(str(tmp_path))


def test_a_disk_that_refuses_is_an_error_and_not_a_checkpoint(tmp_path: Path) -> None:
    (tmp_path / FOLDER).write_text("a file where a directory should be")
    assert make_writer(tmp_path).write(JOB, make_cut(40, 1, 1)).error != ""


@pytest.mark.parametrize("may_be_empty", [False, True])
def test_whoever_looks_for_ordinary_checkpoints_hears_of_it(tmp_path: Path, may_be_empty: bool) -> None:
    make_writer(tmp_path).write(JOB, make_cut(40, 3, 4))
    with pytest.raises(UserError, match="has a checkpoint in the files of its rows: 0000000040-") as caught:
        read_listing(str(tmp_path), may_be_empty=may_be_empty)
    assert caught.value.hint is not None and f"ckpt restore {tmp_path} --to URL" in caught.value.hint
