"""Tables whose columns are divided: over several ranks, or several shards of one. Pure.

Each range of columns is a table of its own on storage, with its own ids, rows and optimizer state: what writes, checks,
merges and deletes pieces need not know of columns. `TableInfo.columns` says which ones they are and of what. Whoever
hands rows to people joins the ranges here, into the one table that they know.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np

from regrow.checkpoint.chunks import Rows
from regrow.checkpoint.manifest import Columns, TableInfo
from regrow.errors import CheckpointError

Values = TypeVar("Values", bound=Any)  # an array or a tensor


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Whole:
    """A table as people know it. `ranges` are the records that have its columns, in their order; often it is one."""

    name: str
    rows: int
    dim: int
    index: int  # of the first one
    ranges: tuple[TableInfo, ...]

    @property
    def divided(self) -> bool:
        return self.ranges[0].columns is not None


def range_name(of: str, first: int, dim: int) -> str:
    """The name of a record, as torch would write the slice."""
    return f"{of}[:,{first}:{first + dim}]"


def whole_name(table: TableInfo) -> str:
    return table.name if table.columns is None else table.columns.of


def find_span(dim: int, columns: Columns | None) -> tuple[int, int]:
    """(first, behind the last) column of a record of `dim` floats."""
    first = 0 if columns is None else columns.first
    return first, first + dim


def join_tables(tables: Iterable[TableInfo]) -> dict[str, Whole]:
    """By name, in the order of the tables."""
    found: dict[str, list[TableInfo]] = {}
    for table in tables:
        found.setdefault(whole_name(table), []).append(table)
    wholes = {}
    for name, members in found.items():
        ranges = tuple(sorted(members, key=lambda table: find_span(table.dim, table.columns)))
        dim = sum(table.dim for table in ranges)
        wholes[name] = Whole(name=name, rows=ranges[0].rows, dim=dim, index=members[0].index, ranges=ranges)
    return wholes


def view_ranges(wholes: Iterable[Whole], values: Mapping[str, Values]) -> dict[str, Values]:
    """Record -> a view of its columns, where `values` has whole tables."""
    views = {}
    for whole in wholes:
        for table in whole.ranges:
            first, stop = find_span(table.dim, table.columns)
            views[table.name] = values[whole.name][:, first:stop] if whole.divided else values[whole.name]
    return views


def join_rows(name: str, ranges: Sequence[Iterator[Rows]]) -> Iterator[Rows]:
    """Whole rows of a table from blocks of its ranges, in the order of their columns; ids rise. State is joined too.

    CheckpointError if a row is in one of them and not in another: a cut has all columns of a row or none."""
    blocks = [next(blocks, None) for blocks in ranges]
    while any(block is not None for block in blocks):
        present = [block for block in blocks if block is not None]
        bound = min(block.ids[-1] for block in present)
        parts = []
        for index, block in enumerate(blocks):
            if block is None:
                raise CheckpointError(f"table {name!r} has rows without some of their columns")
            end = int(np.searchsorted(block.ids, bound, side="right"))
            parts.append(block.part(0, end))
            blocks[index] = block.part(end, len(block)) if end < len(block) else next(ranges[index], None)
        if any(not np.array_equal(part.ids, parts[0].ids) for part in parts):
            raise CheckpointError(f"table {name!r} has rows without some of their columns")
        states = {key: np.hstack([part.states[key] for part in parts]) for key in parts[0].states}
        yield Rows(parts[0].ids, np.hstack([part.weight for part in parts]), states)


def fit_states(ranges: Sequence[TableInfo], dim: int) -> dict[str, int]:
    """How wide the state of these ranges is where `dim` columns that they cover are one: state by name. What has a
    float for each column has it there, what has one for each row has one. Others cannot be divided anew.

    CheckpointError names the one that cannot."""
    if len(ranges) == 1 and ranges[0].dim == dim:
        return dict(ranges[0].states)
    found: dict[str, int] = {}
    for name, _ in ranges[0].states:
        widths = [dict(table.states).get(name) for table in ranges]
        if widths == [table.dim for table in ranges]:
            found[name] = dim
        elif set(widths) == {1}:
            found[name] = 1
        else:
            raise CheckpointError(
                f"{name!r} of table {whole_name(ranges[0])!r} is {widths} floats wide in ranges of columns, which are"
                " divided in another way here",
                hint="restore with the columns divided as they were, or without optimizers",
            )
    return found
