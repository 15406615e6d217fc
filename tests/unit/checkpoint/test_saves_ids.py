"""Goal: the ids of a save's chunks come back as they were, from few bytes; and which rows were met is not forgotten.

Method: ids in all densities; sets as the slow twin.
"""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
from save_worlds import make_chunks, save_of

from regrow.checkpoint.saves_ids import IdsFile, IdsKeeper, SeenRows, describe_ids, shorten
from regrow.errors import CheckpointError


@pytest.mark.parametrize("ids", [[0], [59], list(range(60)), list(range(3, 60, 8)), [0, 59], [7, 8, 9, 10, 58]])
def test_ids_in_the_shorter_form(ids: list[int]) -> None:
    array = np.array(ids, np.uint32)
    form, _, short = shorten(array)
    assert short.nbytes <= array.nbytes
    assert form == ("bits" if short.dtype == np.uint8 else "ids")
    rows = {("user", row): b"\0" * 16 for row in ids}
    keeper = IdsKeeper()
    (chunk,) = make_chunks(rows, rows, 10**6)
    keeper.add(chunk)
    data = keeper.encode()
    made = msgspec.structs.replace(save_of(0, 1, full=True, size=1), ids=describe_ids(data))
    info = msgspec.structs.replace(made.chunks[0], rows={"user": len(ids)})
    assert IdsFile(b"".join(data), made).ids_of(0, info)["user"].tolist() == ids
    for wrong in ({"user": len(ids) + 1}, {"item": 1}):
        with pytest.raises(CheckpointError, match="are not there"):
            IdsFile(b"".join(data), made).ids_of(0, msgspec.structs.replace(info, rows=wrong))


def test_rows_that_were_met() -> None:
    random = np.random.default_rng(3)
    seen, truth = SeenRows(1000), set[int]()
    for _ in range(50):
        ids = np.unique(random.integers(0, 1000, int(random.integers(0, 200)))).astype(np.uint32)
        assert seen.take_new(ids).tolist() == sorted(set(ids.tolist()) - truth)
        truth |= set(ids.tolist())
        assert seen.list_all().tolist() == sorted(truth)
    assert SeenRows(0).list_all().tolist() == []
