"""Goal: rows that were stored with their columns divided in one way go into tensors that divide them in another, to the
bit; only a number per row of a range, which cannot be divided, becomes a mean, and that is said.

Method: tables without TorchRec, with shards of random rows and columns on both sides, are written from whole values
and must hold them afterwards.
"""

from __future__ import annotations

import itertools
import warnings

import numpy as np
import pytest
import torch

from regrow.checkpoint.chunks import Rows
from regrow.checkpoint.columns import find_span, join_tables, range_name
from regrow.checkpoint.manifest import Columns, TableInfo
from regrow.checkpoint.torch.adapters import Table
from regrow.checkpoint.torch.placing import find_sources, place

ROWS, DIM = 40, 12


def make_table(first: int, stop: int, *, first_row: int = 0, held: int = ROWS) -> Table:
    """Columns of a table, with state per float and per row."""
    dim = stop - first
    columns = None if dim == DIM else Columns(of="t", first=first, dim=DIM)
    live = {"weight": torch.zeros(held, dim), "each": torch.zeros(held, dim), "row": torch.zeros(held)}
    name = "t" if columns is None else range_name("t", first, dim)
    return Table(
        name=name,
        rows=ROWS,
        dim=dim,
        first=first_row,
        states=lambda: live,
        prepare=lambda widths: None,
        columns=columns,
    )


def spans_of(borders: list[int]) -> list[tuple[int, int]]:
    return list(itertools.pairwise(borders))


def take(info: TableInfo, ids: np.ndarray, values: np.ndarray, row: float) -> Rows:
    first, stop = find_span(info.dim, info.columns)
    floats = values[ids][:, first:stop]
    return Rows(ids.astype(np.uint32), floats, {"each": floats * 2, "row": np.full((len(ids), 1), row, np.float32)})


def restore(here: list[Table], saved: list[TableInfo], values: np.ndarray, rows: dict[str, float]) -> None:
    (whole,) = join_tables(saved).values()
    for table in here:
        places, means = place(table, find_sources(table, whole), with_states=True)
        for each in places:
            stale = np.full_like(values, 99.0)  # a row may come more than once: the last one stays
            for source, number in ((stale, 99.0), (values, rows[each.source.name])):
                for ids in np.array_split(np.arange(ROWS), 3):
                    each.write(take(each.source, ids, source, number))
        for mean in means:
            mean.finish()


@pytest.mark.filterwarnings("ignore:checkpoints. columns")
@pytest.mark.parametrize("seed", range(20))
def test_columns_go_where_they_are(seed: int) -> None:
    random = np.random.default_rng(seed)
    values = random.standard_normal((ROWS, DIM)).astype(np.float32)

    def draw() -> list[tuple[int, int]]:
        inner = random.choice(np.arange(1, DIM), int(random.integers(0, 5)), replace=False)
        return spans_of([0, *sorted(int(each) for each in inner), DIM])

    saved = [make_table(*span).info(index) for index, span in enumerate(draw())]
    middle = int(random.integers(1, ROWS))
    shards = [(0, middle), (middle, ROWS - middle)]  # first row, rows
    here = [make_table(*span, first_row=first, held=held) for span in draw() for first, held in shards]
    restore(here, saved, values, {info.name: 1.0 for info in saved})
    for table in here:
        live = table.states()
        start, stop = table.span
        expected = torch.from_numpy(values[table.first : table.first + len(live["weight"]), start:stop])
        assert torch.equal(live["weight"], expected)
        assert torch.equal(live["each"], expected * 2)
        assert (live["row"] == 1.0).all()


def test_the_same_division_keeps_the_number_of_each_range_and_says_nothing() -> None:
    here = [make_table(0, 4), make_table(4, DIM)]
    saved = [table.info(index) for index, table in enumerate(here)]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        restore(here, saved, np.ones((ROWS, DIM), np.float32), {saved[0].name: 0.1, saved[1].name: 7.0})
    assert [set(table.states()["row"].tolist()) for table in here] == [{float(np.float32(0.1))}, {7.0}]


def test_another_division_takes_the_mean_over_its_columns_and_says_so() -> None:
    saved = [make_table(*span).info(index) for index, span in enumerate(spans_of([0, 4, DIM]))]
    rows = {saved[0].name: 2.0, saved[1].name: 8.0}
    for span, mean in (((0, DIM), 6.0), ((0, 2), 2.0), ((2, 6), 5.0), ((4, 8), 8.0)):
        table = make_table(*span)
        with pytest.warns(UserWarning, match=r"columns of 't' are divided in another way.* row has one number per row"):
            restore([table], saved, np.ones((ROWS, DIM), np.float32), rows)
        assert set(table.states()["row"].tolist()) == {mean}
