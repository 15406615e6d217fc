"""What differs between two cuts, table by table. Streaming: rows of both sides pass by in the order of their ids, so
memory is a chunk for each piece and shard on the two ways, however large the tables are.

Only stored rows are looked at. One that is in one cut and not in the other was touched for the first time in between;
its value before is computed from the seed, and it is counted and not subtracted. Where columns of a table are divided,
whole rows are compared.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator

import numpy as np

from regrow.checkpoint.chunks import Rows
from regrow.checkpoint.columns import Whole, join_rows, join_tables
from regrow.checkpoint.lineage import Graph, Plan
from regrow.checkpoint.manifest import ChunkInfo, TableInfo

# The merger's own way through a path of pieces: a second one would be a second truth about which row is newest.
from regrow.checkpoint.merge import MEMORY_BYTES_MAX, Disorder, Fold, PieceBroken, gather, newest, rising_runs
from regrow.checkpoint.storage import Storage
from regrow.errors import CheckpointError

PACKED = "dense"  # of a torch model this table holds the bytes of a file, and not numbers

Progress = Callable[[int, int], None]


@dataclasses.dataclass(slots=True, kw_only=True)
class TableDiff:
    """Counts of rows; of weights in rows that changed, the largest and the mean absolute change."""

    table: str
    same: int = 0
    changed: int = 0
    only_left: int = 0
    only_right: int = 0
    largest: float | None = None
    mean: float | None = None
    not_finite: int = 0  # weights of changed rows that are NaN or infinite on a side
    note: str = ""

    @property
    def equal(self) -> bool:
        return not (self.changed or self.only_left or self.only_right or self.note)


class Side:
    """One of the two cuts: the way to it, and its rows in order."""

    def __init__(self, storage: Storage, graph: Graph, cut: str) -> None:
        self._storage, self._graph, self._cut = storage, graph, cut
        self._runs: dict[str, list[list[ChunkInfo]]] = {}  # of pieces whose chunks are not in order
        self.broken: list[PieceBroken] = []
        self.bytes_read = 0
        self._plan()

    def _plan(self) -> None:
        self.plan: Plan = self._graph.restore_plan(self._cut)[0]
        self.tables = join_tables(self.plan.pieces[-1].tables)
        self._begin()

    def _begin(self) -> None:
        self._streams = [_Stream(self._storage, self.plan, self._runs)]

    def rows(self, table: str) -> Iterator[Rows]:
        """Blocks of a table, ids rising. `Again` if something was learnt that changes what was given out before."""
        if table not in self.tables:
            return
        before = self._count_read()
        try:
            for rows in self._merge_rows(self.tables[table]):
                self.bytes_read += self._count_read() - before
                before = self._count_read()
                yield rows
        except Disorder as disorder:
            self._runs[disorder.piece.name] = rising_runs(self._storage, disorder.piece)
            self._begin()
            raise Again from disorder
        except PieceBroken as error:
            self._go_around(error)
            raise Again from error

    def _merge_rows(self, whole: Whole) -> Iterator[Rows]:
        """A stream for each range of columns: they are at different places of the same files."""
        while len(self._streams) < len(whole.ranges):
            self._streams.append(_Stream(self._storage, self.plan, self._runs))
        ranges = [stream.merge_rows(table) for stream, table in zip(self._streams, whole.ranges, strict=False)]
        return join_rows(whole.name, ranges) if whole.divided else ranges[0]

    def _count_read(self) -> int:
        return sum(stream.bytes_read for stream in self._streams)

    def _go_around(self, error: PieceBroken) -> None:
        self.broken.append(error)
        self._graph = self._graph.without([error.piece])
        if self._cut not in self._graph.cuts or self._graph.path(self._cut) is None:
            raise CheckpointError(
                f"cut {self._cut} cannot be read, there is no way around: {error.message}",
                hint=f"`regrow ckpt verify {self._storage.url}` lists all damage",
            ) from error
        self._plan()


class Again(Exception):
    """A table has to be compared from its beginning."""


class _Stream(Fold):
    def __init__(self, storage: Storage, plan: Plan, runs: dict[str, list[list[ChunkInfo]]]) -> None:
        last = plan.pieces[-1]
        super().__init__(
            storage,
            plan.pieces,
            runs,
            bits=last.bits,
            encoding=last.encoding,
            memory=MEMORY_BYTES_MAX // 2,
            chunk=1,
        )

    def merge_rows(self, table: TableInfo) -> Iterator[Rows]:
        """All rows in order, those of all shards together."""
        for parts in self.windows(table, list(self.runs)):
            places = newest(parts)
            yield gather(parts, places, np.empty(parts[0].row_bytes * len(places), np.uint8))

    @property
    def bytes_read(self) -> int:
        return sum(run.bytes_read for run in self.runs)


def diff(left: Side, right: Side, progress: Progress = lambda done, total: None) -> list[TableDiff]:
    """Every table of either cut, as people know it."""
    named = {**right.tables, **left.tables}
    found = []
    for table in sorted(named.values(), key=lambda table: (table.index, table.name)):
        while True:
            try:
                found.append(_table_diff(table.name, left, right, progress))
                break
            except Again:  # Each time there is a piece less to stumble over.
                continue
    return found


def _table_diff(name: str, left: Side, right: Side, progress: Progress) -> TableDiff:
    result = TableDiff(table=name)
    one, other = left.tables.get(name), right.tables.get(name)
    packed = name == PACKED and left.plan.target.job.get("framework") == "torch"
    total = left.plan.bytes + right.plan.bytes
    if one is None or other is None:
        result.note = f"only in {'the second' if one is None else 'the first'} cut"
    elif one.dim != other.dim:
        result.note = f"rows of {one.dim} and of {other.dim} floats"
    weighed = _Changes()
    for a, b in _side_by_side(left.rows(name), right.rows(name)):
        _, at_a, at_b = np.intersect1d(a.ids, b.ids, assume_unique=True, return_indices=True)
        result.only_left += len(a) - len(at_a)
        result.only_right += len(b) - len(at_b)
        if one is not None and other is not None and one.dim == other.dim:
            changed = _find_changed(a, b, at_a, at_b)
            result.changed += int(changed.sum())
            result.same += int((~changed).sum())
            if not packed:
                weighed.add(a.weight[at_a[changed]], b.weight[at_b[changed]])
        progress(min(left.bytes_read + right.bytes_read, total), total)
    result.largest, result.mean, result.not_finite = weighed.largest, weighed.mean, weighed.not_finite
    if packed and result.changed:
        result.note = "bytes, not numbers"
    return result


def _side_by_side(left: Iterator[Rows], right: Iterator[Rows]) -> Iterator[tuple[Rows, Rows]]:
    """Blocks of both sides that end at the same id. At the end of one side the other goes on with empty ones."""
    a, b = next(left, None), next(right, None)
    while a is not None and b is not None:
        bound = min(a.ids[-1], b.ids[-1])
        end_a, end_b = (int(np.searchsorted(rows.ids, bound, side="right")) for rows in (a, b))
        yield a.part(0, end_a), b.part(0, end_b)
        a = a.part(end_a, len(a)) if end_a < len(a) else next(left, None)
        b = b.part(end_b, len(b)) if end_b < len(b) else next(right, None)
    while a is not None:
        yield a, a.part(0, 0)
        a = next(left, None)
    while b is not None:
        yield b.part(0, 0), b
        b = next(right, None)


def _find_changed(a: Rows, b: Rows, at_a: np.ndarray, at_b: np.ndarray) -> np.ndarray:
    """Bit by bit: weights, and the state that both have."""
    changed = np.zeros(len(at_a), bool)
    theirs = dict(b.parts())
    for name, values in a.parts():
        other = theirs.get(name)
        if other is not None and other.shape[1] == values.shape[1]:
            changed |= (values[at_a].view(np.uint32) != other[at_b].view(np.uint32)).any(axis=1)
    return changed


class _Changes:
    """The largest and the mean absolute change, as blocks come."""

    def __init__(self) -> None:
        self.largest: float | None = None
        self.not_finite = 0
        self._sum, self._count = 0.0, 0

    @property
    def mean(self) -> float | None:
        return self._sum / self._count if self._count else None

    def add(self, a: np.ndarray, b: np.ndarray) -> None:
        with np.errstate(invalid="ignore"):
            change = np.abs(b.astype(np.float64) - a)
        finite = change[np.isfinite(change)]
        self.not_finite += change.size - finite.size
        if finite.size:
            self.largest = max(self.largest or 0.0, float(finite.max()))
            self._sum += float(finite.sum())
            self._count += finite.size


def same_origin(left: Side, right: Side) -> str | None:
    """Why rows that neither cut has stored may differ all the same, or None."""
    if left.plan.pieces[-1].seed != right.plan.pieces[-1].seed:
        return "the seeds differ, and so do rows that were never touched"
    names = left.tables.keys() & right.tables.keys()
    if any(_origin(left.tables[name]) != _origin(right.tables[name]) for name in names):
        return "initial values differ, and so do rows that were never touched"
    return None


def _origin(whole: Whole) -> tuple[float | None, int]:
    bound = whole.ranges[0].init_bound
    return bound, 0 if bound is None else whole.index  # without one nothing is computed
