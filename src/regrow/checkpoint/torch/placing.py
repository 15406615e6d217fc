"""Where rows from storage go in a model's tensors, when columns of a table are divided here and there in ways that need
not be the same.

Weights, and state with a float for each column, go where their columns are: bit by bit. State with one float per row
(row-wise Adagrad's) is that of a range. If ranges are the same here it is copied. If not, a range takes over the number
of the one that it lies in, and where it lies in several, their mean over its columns. That is what row-wise Adagrad,
whose number is a mean over columns, would have added up; but it is not bit by bit, so a warning says so.
"""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Sequence

import torch
from torch import Tensor

from regrow.checkpoint.chunks import Rows
from regrow.checkpoint.columns import Whole, find_span
from regrow.checkpoint.manifest import TableInfo
from regrow.checkpoint.torch.adapters import Table
from regrow.checkpoint.torch.tracker import WEIGHT


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Copy:
    """One part of the rows (weight, or a state): into a tensor, or columns of one, from some of the stored floats."""

    part: str
    target: Tensor
    start: int
    stop: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Rows of the stored table `source` that go to one table here, whose first row has the number `first_row`."""

    source: TableInfo
    first_row: int
    held: int
    copies: tuple[Copy, ...]

    def write(self, rows: Rows) -> None:
        ids = torch.from_numpy(rows.ids.astype("int64")) - self.first_row
        here = (ids >= 0) & (ids < self.held)
        whole = bool(here.all())
        ids = ids if whole else ids[here]
        parts = dict(rows.parts())
        for copy in self.copies:
            values = torch.from_numpy(parts[copy.part])[:, copy.start : copy.stop]
            values = (values if whole else values[here]).reshape(len(ids), *copy.target.shape[1:])
            with torch.no_grad():
                copy.target.index_copy_(0, ids.to(copy.target.device), values.to(copy.target.device, copy.target.dtype))


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Mean:
    """Numbers per row of several ranges, gathered until all are there. Rows are plainly overwritten meanwhile."""

    target: Tensor
    gathered: Tensor  # [rows, ranges]
    columns: tuple[int, ...]  # that each of the ranges has in this one

    def finish(self) -> None:
        weights = torch.tensor(self.columns, dtype=torch.float64)
        means = (self.gathered.double() @ weights / weights.sum()).reshape(self.target.shape)
        with torch.no_grad():
            self.target.copy_(means)


def find_sources(table: Table, saved: Whole) -> list[TableInfo]:
    """The stored ranges that have columns of a table here, in order."""
    start, stop = table.span
    spans = ((each, find_span(each.dim, each.columns)) for each in saved.ranges)
    return [each for each, (first, end) in spans if first < stop and end > start]


def place(table: Table, sources: Sequence[TableInfo], *, with_states: bool) -> tuple[list[Place], list[Mean]]:
    """Where rows of these stored tables go in one that is here. That they fit was looked at."""
    own = table.states() if with_states else {WEIGHT: table.states()[WEIGHT]}
    held = len(own[WEIGHT])
    means = _find_means(table, sources, own)
    places = []
    for number, source in enumerate(sources):
        first, stop = find_span(source.dim, source.columns)
        low, high = max(first, table.span[0]), min(stop, table.span[1])
        copies = []
        for part, target in own.items():
            width = source.dim if part == WEIGHT else dict(source.states)[part]
            if part in means:
                copies.append(Copy(part=part, target=means[part].gathered[:, number : number + 1], start=0, stop=1))
            elif (low, high) == (first, stop) == table.span or width != source.dim:
                copies.append(Copy(part=part, target=target, start=0, stop=width))
            else:
                view = target[:, low - table.span[0] : high - table.span[0]]
                copies.append(Copy(part=part, target=view, start=low - first, stop=high - first))
        places.append(Place(source=source, first_row=table.first, held=held, copies=tuple(copies)))
    return places, list(means.values())


def _find_means(table: Table, sources: Sequence[TableInfo], own: dict[str, Tensor]) -> dict[str, Mean]:
    """The parts that have a number per row where ranges are not the same. Says so."""
    spans = [find_span(source.dim, source.columns) for source in sources]
    if spans == [table.span]:
        return {}
    widths = {name: [dict(source.states)[name] for source in sources] for name in own if name != WEIGHT}
    dims = [source.dim for source in sources]
    per_row = [name for name, found in widths.items() if (found, own[name][:1].numel()) != (dims, table.dim)]
    if per_row:
        warnings.warn(
            f"checkpoints: columns of {table.whole!r} are divided in another way than in the checkpoint, and"
            f" {', '.join(per_row)} has one number per row of a range: columns {table.span[0]} to {table.span[1] - 1}"
            " take the mean of theirs, so training goes on nearly as it would have and not to the bit",
            stacklevel=2,
        )
    if len(sources) == 1:
        return {}
    columns = tuple(min(stop, table.span[1]) - max(first, table.span[0]) for first, stop in spans)
    return {
        name: Mean(target=own[name], gathered=torch.zeros(len(own[WEIGHT]), len(sources)), columns=columns)
        for name in per_row
    }
