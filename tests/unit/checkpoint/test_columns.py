"""Goal: columns that are divided over records come back as the one table that people know, to the bit, and a manifest
that has not all of them is refused.

Method: a table is cut into random ranges of columns and these into random blocks of rows; joined, they must be the
table. What TorchRec makes of columns is in torch/test_torchrec.py, and rows in a model's tensors in
torch/test_placing.py.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path

import msgspec
import numpy as np
import pytest
from chains import cut

from regrow.checkpoint.chunks import Rows, write_chunk
from regrow.checkpoint.columns import find_span, fit_states, join_rows, join_tables, range_name, view_ranges
from regrow.checkpoint.diff import Side, diff
from regrow.checkpoint.lineage import Graph
from regrow.checkpoint.manifest import Columns, Manifest, TableInfo, decode, encode
from regrow.checkpoint.merge import fold
from regrow.checkpoint.storage import Storage
from regrow.errors import CheckpointError
from regrow.nn.loading import load

ROWS, DIM = 60, 12


def divide(name: str, borders: list[int], *, index: int = 0, states: tuple[str, ...] = ()) -> list[TableInfo]:
    """Records of a table between these columns: state with a float for each of them, and one for each row."""
    found = []
    for first, stop in itertools.pairwise(borders):
        dim = stop - first
        columns = Columns(of=name, first=first, dim=borders[-1])
        widths = (("each", dim), ("row", 1)) if states else ()
        found.append(
            TableInfo(
                name=range_name(name, first, dim),
                rows=ROWS,
                dim=dim,
                states=widths,
                init_bound=None,
                index=index + len(found),
                columns=columns,
            )
        )
    return found


def take(table: TableInfo, ids: np.ndarray, values: np.ndarray) -> Rows:
    first, stop = find_span(table.dim, table.columns)
    states = {name: values[ids][:, first : first + width] for name, width in table.states}
    return Rows(ids.astype(np.uint32), np.ascontiguousarray(values[ids][:, first:stop]), states)


def in_blocks(rows: Rows, random: np.random.Generator) -> Iterator[Rows]:
    start = 0
    while start < len(rows):
        stop = start + int(random.integers(1, 9))
        yield rows.part(start, stop)
        start = stop


def draw_borders(random: np.random.Generator) -> list[int]:
    inner = random.choice(np.arange(1, DIM), int(random.integers(1, 5)), replace=False)
    return [0, *sorted(int(each) for each in inner), DIM]


@pytest.mark.parametrize("seed", range(20))
def test_ranges_join_to_the_table(seed: int) -> None:
    random = np.random.default_rng(seed)
    values = random.standard_normal((ROWS, DIM)).astype(np.float32)
    ids = np.sort(random.choice(ROWS, int(random.integers(1, ROWS)), replace=False))
    ranges = divide("t", draw_borders(random), states=("each",))
    joined = list(join_rows("t", [in_blocks(take(table, ids, values), random) for table in ranges]))
    assert np.array_equal(np.concatenate([rows.ids for rows in joined]), ids)
    assert np.array_equal(np.concatenate([rows.weight for rows in joined]), values[ids])
    assert np.array_equal(np.concatenate([rows.states["each"] for rows in joined]), values[ids])


@pytest.mark.parametrize("lost", [0, 29, 59])
def test_a_row_without_some_columns_is_refused(lost: int) -> None:
    values = np.ones((ROWS, DIM), np.float32)
    one, other = divide("t", [0, 4, DIM])
    whole = take(one, np.arange(ROWS), values)
    rest = take(other, np.delete(np.arange(ROWS), lost), values)
    for pair in ((whole, rest), (rest, whole)):
        with pytest.raises(CheckpointError, match="'t' has rows without some of their columns"):
            list(join_rows("t", [in_blocks(rows, np.random.default_rng(lost)) for rows in pair]))


def test_tables_are_joined_by_name_and_the_others_stay() -> None:
    plain = TableInfo(name="p", rows=3, dim=2, states=(), init_bound=None, index=0)
    ranges = divide("t", [0, 4, 7, DIM], index=1)
    wholes = join_tables([plain, *reversed(ranges)])
    assert [(each.name, each.rows, each.dim, each.divided) for each in wholes.values()] == [
        ("p", 3, 2, False),
        ("t", ROWS, DIM, True),
    ]
    assert wholes["t"].ranges == tuple(ranges)
    values = {"p": np.zeros((3, 2), np.float32), "t": np.zeros((ROWS, DIM), np.float32)}
    views = view_ranges(wholes.values(), values)
    views["t[:,4:7]"][5] = 1.0
    assert np.array_equal(values["t"][5], [0] * 4 + [1] * 3 + [0] * 5)
    assert views["p"] is values["p"]


def test_state_is_as_wide_as_columns_or_one_or_cannot_be_divided_anew() -> None:
    ranges = divide("t", [0, 4, DIM], states=("each",))
    assert fit_states(ranges, DIM) == {"each": DIM, "row": 1}
    assert fit_states(ranges[1:], 3) == {"each": 3, "row": 1}
    odd = msgspec.structs.replace(ranges[0], states=(("odd", 3),))
    assert fit_states([odd], 4) == {"odd": 3}
    with pytest.raises(CheckpointError, match=r"'odd' of table 't' is \[3\] floats wide"):
        fit_states([odd], 2)


def make_manifest(tables: list[TableInfo]) -> Manifest:
    return Manifest(source=None, target=cut(1), tables=tuple(tables), seed=0, chunks=(), made_by="a test")


def test_a_manifest_says_which_columns_there_are_and_one_without_is_as_before() -> None:
    tables = divide("t", [0, 4, DIM])
    assert decode(encode(make_manifest(tables)), "here").tables == tuple(tables)
    plain = TableInfo(name="p", rows=3, dim=2, states=(), init_bound=None, index=0)
    assert b"columns" not in encode(make_manifest([plain]))


@pytest.mark.parametrize(
    ("tables", "reason"),
    [
        (divide("t", [0, 4, DIM])[:1], r"4 columns of table 't' are there, it has 12"),
        (divide("t", [0, 4, DIM])[1:], r"'t\[:,4:12\]' cannot be columns 4 and on"),
        (divide("t", [0, 4, DIM]) + divide("t", [0, 5, DIM], index=9)[:1], "cannot be columns"),
        ([*divide("t", [0, 4, DIM]), TableInfo(name="t", rows=ROWS, dim=3, states=(), init_bound=None, index=9)], "12"),
    ],
)
def test_a_manifest_without_all_columns_once_is_refused(tables: list[TableInfo], reason: str) -> None:
    with pytest.raises(CheckpointError, match=reason):
        encode(make_manifest(tables))


@pytest.mark.parametrize("merged", [False, True])
def test_cuts_with_columns_are_read_merged_and_compared(merged: bool, tmp_path: Path) -> None:
    """A full and a delta in one division, a full of the same values in another: no table differs."""
    random = np.random.default_rng(7)
    storage = Storage.open(str(tmp_path))
    values = random.standard_normal((ROWS, DIM)).astype(np.float32)

    def write(source: int | None, step: int, borders: list[int], ids: np.ndarray) -> None:
        tables = divide("t", borders)
        manifest = msgspec.structs.replace(
            make_manifest(tables), source=None if source is None else cut(source).id, target=cut(step)
        )
        infos = []
        for index, table in enumerate(tables):
            name = f"s{index}-00000.safetensors"
            rows = {table.name: take(table, ids, values)}
            infos.append(write_chunk(storage, manifest.name, name, rows, shard=f"s{index}of{len(tables)}-0"))
        storage.write_manifest(msgspec.structs.replace(manifest, chunks=tuple(infos)))

    write(None, 1, [0, 4, DIM], np.arange(ROWS))
    values[[3, 30]] += 1.0
    write(1, 2, [0, 4, DIM], np.array([3, 30]))
    write(None, 3, [0, 1, 6, DIM], np.arange(ROWS))
    if merged:
        fold(storage, Graph(storage.manifests()[0]), None, cut(2).id)
    assert np.array_equal(load(f"{tmp_path}@2")["t"].numpy(), values)
    graph = Graph(storage.manifests()[0])
    sides = {step: Side(storage, graph, cut(step).id) for step in (1, 2, 3)}
    (found,) = diff(sides[2], sides[3])
    assert (found.table, found.same, found.equal) == ("t", ROWS, True)
    (found,) = diff(sides[1], sides[3])
    assert (found.same, found.changed, found.largest) == (ROWS - 2, 2, pytest.approx(1.0))
