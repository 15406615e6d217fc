"""Which rows of a torch model were updated since the last cut that is on storage.

An adapter says `track(fqn, ids, states)` after every update; whoever makes a cut says `compact()`. The rule: rows are
handed over, not forgotten. They are forgotten when the receiver says `durable()`; `again()` makes them part of the next
hand-over, as does a row that was updated meanwhile. Tracking costs a byte per row, and time in proportion to the ids.
"""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Iterator, Mapping

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from regrow.checkpoint.chunks import CHUNK_BYTES, Chunk, Floats, Rows
from regrow.errors import CheckpointError

WEIGHT = "weight"
SCAN_RATIO = 1024  # Sorting an id takes as long as looking at so many marks (measured: 240 to 1000 ns, 0.2 to 0.4 ns).

States = Mapping[str, Tensor]
_Ids = npt.NDArray[np.int64]


class Tracker:
    """Updated rows of every table. Safe to use from several threads: backward has its own."""

    def __init__(self) -> None:
        self._tables: dict[str, _Table] = {}
        self._open: Handover | None = None
        self._lock = threading.Lock()

    def track(self, fqn: str, ids: Tensor | None, states: States | None = None) -> None:
        """Rows `ids` of table `fqn` were updated; None: all of them. An id may come many times.

        `states` are the live tensors of the table, [rows, ...] each: "weight", and what the optimizer keeps per row.
        Rows are copied out of them at a cut. The first call for a table must have them, and a later one must if one
        of the tensors was replaced by another.
        """
        with self._lock:
            table = self._tables.get(fqn)
            if table is None:
                if states is None:
                    raise CheckpointError(f"table {fqn!r} is not known: its first rows must come with its tensors")
                table = self._tables[fqn] = _Table(fqn, len(states[WEIGHT]))
            if states is not None:
                table.states = _check_states(fqn, table.rows, states)
            if ids is None:
                table.all_rows()
            elif ids.numel():
                table.mark(ids)

    def compact(self, *, full: bool = False) -> Handover:
        """All rows that were updated and are not known to be durable; with `full`, all rows there are.

        One hand-over at a time: the next delta would begin where this one ends, and that is not known yet.
        """
        with self._lock:
            if self._open is not None:
                raise CheckpointError("the rows handed over before are neither durable nor given back yet")
            taken = {fqn: table.take(full=full) for fqn, table in self._tables.items()}
            self._open = Handover(
                ids={fqn: ids for fqn, ids in taken.items() if ids is None or ids.numel()},
                states={fqn: dict(table.states) for fqn, table in self._tables.items()},
                tracker=self,
                given={fqn: table.given for fqn, table in self._tables.items()},
            )
            return self._open

    def pending(self, fqn: str) -> int:
        """Rows of a table that wait for the next hand-over."""
        with self._lock:
            return self._tables[fqn].pending

    def _close(self, handover: Handover, *, durable: bool) -> None:
        with self._lock:
            if self._open is not handover:
                return  # said before
            self._open = None
            if not durable:
                for fqn, given in handover.given.items():
                    self._tables[fqn].give_back(given)


@dataclasses.dataclass(eq=False, slots=True)
class Handover:
    """Rows on their way to storage. `ids` rise, by table; None stands for all rows."""

    ids: dict[str, Tensor | None]
    states: dict[str, States]  # live: copy before training goes on
    tracker: Tracker = dataclasses.field(repr=False)
    given: dict[str, _Given] = dataclasses.field(repr=False)

    def durable(self) -> None:
        """They are on storage: forget them."""
        self.tracker._close(self, durable=True)

    def again(self) -> None:
        """They are not: hand them over again next time."""
        self.tracker._close(self, durable=False)

    def count(self, fqn: str) -> int:
        if fqn not in self.ids:
            return 0
        ids = self.ids[fqn]
        return len(self.states[fqn][WEIGHT]) if ids is None else ids.numel()

    @property
    def nbytes(self) -> int:
        """What a copy takes."""
        return sum(self.count(fqn) * _row_bytes(self.states[fqn]) for fqn in self.ids)

    def rows(self) -> dict[str, tuple[Tensor, dict[str, Tensor]]]:
        """Table -> (ids, copies of these rows), all at once."""
        found = {}
        for fqn, ids in self.ids.items():
            states = self.states[fqn]
            if ids is None:
                copies = {name: values.detach().to("cpu", copy=True) for name, values in states.items()}
            else:
                copies = {name: values.detach()[ids.to(values.device)].cpu() for name, values in states.items()}
            found[fqn] = torch.arange(self.count(fqn)) if ids is None else ids, copies
        return found

    def chunks(
        self, first_row: Mapping[str, int] | None = None, chunk_bytes: int = CHUNK_BYTES, *, views: bool = False
    ) -> Iterator[Chunk]:
        """Copies, a part of a table at a time, of up to `chunk_bytes`. `first_row`: the number of a table's first row
        here, where other processes hold the rows before it. `views`: training waits until they are written, so rows
        that need not change their form need not be copied."""
        for fqn in self.ids:
            states = self.states[fqn]
            first = (first_row or {}).get(fqn, 0)
            step = max(1, chunk_bytes // _row_bytes(states))
            for start in range(0, self.count(fqn), step):
                stop = min(start + step, self.count(fqn))
                ids = self.ids[fqn]
                numbers = np.arange(start, stop) if ids is None else ids[start:stop].numpy()
                parts = {name: self._floats(fqn, values, start, stop, views) for name, values in states.items()}
                yield {fqn: Rows((numbers + first).astype(np.uint32), parts.pop(WEIGHT), parts)}

    def _floats(self, fqn: str, values: Tensor, start: int, stop: int, views: bool) -> Floats:
        """[n, width] of 32-bit floats. Narrower floats become wider here and come back the same."""
        ids, source = self.ids[fqn], values.detach()
        if ids is not None:
            source, views = source.index_select(0, ids[start:stop].to(source.device)), True
        else:
            source = source[start:stop]
        source = source.reshape(stop - start, -1)
        if views:
            return source.to("cpu", torch.float32).contiguous().numpy()
        # NumPy's memory is on huge pages where the system has them: taking it costs less than the copy.
        copy: Floats = np.empty(tuple(source.shape), np.float32)
        torch.from_numpy(copy).copy_(source)
        return copy


@dataclasses.dataclass(slots=True)
class _Given:
    """What a table handed over: ids that may come more than once, or all rows."""

    ids: list[_Ids]
    all: bool


class _Table:
    """One table's marks: a byte per row says whether it waits, and a list says where those bytes are."""

    def __init__(self, fqn: str, rows: int) -> None:
        self.fqn = fqn
        self.rows = rows
        self.states: States = {}
        self.all = False
        self.given = _Given([], False)
        self._marked = np.zeros(rows, np.bool_)
        self._waiting: list[_Ids] = []

    @property
    def pending(self) -> int:
        return self.rows if self.all else len(self._rising())

    def mark(self, ids: Tensor) -> None:
        if self.all:
            return
        ids = ids.detach().reshape(-1).to("cpu", torch.int64)
        low, high = torch.aminmax(ids)
        if int(low) < 0 or int(high) >= self.rows:
            wrong = int(low) if int(low) < 0 else int(high)
            raise CheckpointError(f"table {self.fqn!r} has {self.rows} rows, and {wrong} is said to be updated")
        # An id is listed by one call at most, so the list grows with the rows that wait and not with time. It may be in
        # that call several times: sorting them here would cost ten times what the rest does.
        new = ids.numpy()[~self._marked[ids.numpy()]]
        if new.size:
            self._marked[new] = True
            self._waiting.append(new)

    def all_rows(self) -> None:
        self._clear()
        self.all = True

    def take(self, *, full: bool) -> Tensor | None:
        """The ids that wait, rising, or None for all; and nothing waits any more."""
        self.given = _Given(list(self._waiting), self.all)
        whole = full or self.all
        ids = None if whole else torch.from_numpy(self._rising())
        self._clear()
        self.all = False
        return ids

    def give_back(self, given: _Given) -> None:
        if given.all:
            self.all_rows()
        for ids in given.ids:
            self.mark(torch.from_numpy(ids))

    def _rising(self) -> _Ids:
        """The ids that wait, each once. Few are sorted; many are read off the marks, which is faster."""
        if sum(map(len, self._waiting)) * SCAN_RATIO < self.rows:
            return np.unique(np.concatenate([np.empty(0, np.int64), *self._waiting]))
        return np.flatnonzero(self._marked)

    def _clear(self) -> None:
        for ids in self._waiting:
            self._marked[ids] = False
        self._waiting = []


def _check_states(fqn: str, rows: int, states: States) -> States:
    for name, values in states.items():
        if values.ndim < 1 or len(values) != rows:
            raise CheckpointError(f"table {fqn!r} has {rows} rows, its {name!r} is {list(values.shape)}")
    return dict(states)


def _width(values: Tensor) -> int:
    return values[0].numel() if len(values) else 1


def _row_bytes(states: States) -> int:
    return 4 + 4 * sum(_width(values) for values in states.values())
