"""Goal: the ids of a save's chunks come back as they were, from few bytes; and which rows were met is not forgotten.

Method: ids in all densities; sets as the slow twin.
"""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
from save_worlds import make_chunks, save_of
from worlds import TABLES

from regrow.checkpoint.saves_ids import IdsFile, IdsKeeper, RowSet, SeenRows, describe_ids
from regrow.errors import CheckpointError

SETS = [[0], [59], list(range(60)), list(range(3, 60, 8)), [0, 59], [7, 8, 9, 10, 58], list(range(20, 50))]


@pytest.mark.parametrize("ids", SETS)
def test_rows_in_the_shorter_form(ids: list[int]) -> None:
    rows = RowSet.of(np.array(ids, np.uint32))
    size = rows.ids.nbytes if rows.ids is not None else len(rows.bits) + 4  # type: ignore[arg-type]
    assert size <= 4 * len(ids)
    for form in (rows, RowSet(ids=np.array(ids, np.uint32))):
        assert (len(form), form.list_ids().tolist()) == (len(ids), ids)
        others = np.random.default_rng(0).permutation(70).astype(np.uint32)
        assert form.find(others).tolist() == [row in ids for row in others]
        assert form.find(others[:0]).tolist() == []
        ranks = np.random.default_rng(1).integers(0, len(ids), 20)
        assert form.list_at(ranks).tolist() == [ids[rank] for rank in ranks]
        assert form.rank(form.list_at(ranks)).tolist() == ranks.tolist()


def test_no_rows() -> None:
    none = RowSet.of(np.empty(0, np.uint32))
    assert (len(none), none.list_ids().tolist()) == (0, [])
    assert none.find(np.arange(3, dtype=np.uint32)).tolist() == [False] * 3


@pytest.mark.parametrize("ids", SETS)
def test_there_and_back(ids: list[int]) -> None:
    rows = {("user", row): b"\0" * 16 for row in ids}
    keeper = IdsKeeper()
    (chunk,) = make_chunks(rows, rows, 10**6)
    keeper.add(chunk)
    data = keeper.encode()
    made = msgspec.structs.replace(save_of(0, 1, full=True, size=1), ids=describe_ids(data))
    info = msgspec.structs.replace(made.chunks[0], rows={"user": len(ids)})
    assert IdsFile(b"".join(data), made).rows_of(0, info)["user"].list_ids().tolist() == ids
    for wrong in ({"user": len(ids) + 1}, {"item": 1}):
        with pytest.raises(CheckpointError, match="are not there"):
            IdsFile(b"".join(data), made).rows_of(0, msgspec.structs.replace(info, rows=wrong))
    small = msgspec.structs.replace(TABLES[0], rows=ids[-1])  # one row less
    with pytest.raises(CheckpointError, match="are not there"):
        IdsFile(b"".join(data), msgspec.structs.replace(made, tables=(small,))).rows_of(0, info)


def test_rows_that_were_met() -> None:
    random = np.random.default_rng(3)
    seen, truth = SeenRows(1001), set[int]()
    for _ in range(100):
        count = int(random.choice([0, 3, 30, 600]))
        ids = np.unique(random.integers(0, 1001, count)).astype(np.uint32)
        rows = RowSet.of(ids)
        assert seen.take_new(rows).list_ids().tolist() == sorted(set(ids.tolist()) - truth)
        truth |= set(ids.tolist())
        assert seen.list_all().tolist() == sorted(truth)
    assert SeenRows(0).list_all().tolist() == []
