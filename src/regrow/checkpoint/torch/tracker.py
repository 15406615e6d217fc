"""Which rows of a torch model were updated since the last cut that is on storage.

An adapter says `track(fqn, ids, states)` after every update; whoever makes a cut says `compact()`. The rule: rows are
handed over, not forgotten. They are forgotten when the receiver says `durable()`; `again()` makes them part of the next
hand-over, as does a row that was updated meanwhile. Tracking costs a byte per row, and time in proportion to the ids.

Several tenants may make cuts, each at its own times: a checkpointer, and a publisher beside it. An update is written
down once however many there are, in a segment that ends with the next hand-over to anybody; only then does every tenant
take note of its rows. Each tenant costs a byte per row more, and the second one a byte for the segment.
"""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Iterable, Iterator, Mapping

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from regrow.checkpoint.chunks import CHUNK_BYTES, Chunk, Floats, Rows
from regrow.errors import CheckpointError

WEIGHT = "weight"
TENANTS_MAX = 4  # of a tracker, the first one included: each takes memory, and time at every hand-over
SCAN_RATIO = 1024  # Sorting an id takes as long as looking at so many marks (measured: 240 to 1000 ns, 0.2 to 0.4 ns).

States = Mapping[str, Tensor]
_Ids = npt.NDArray[np.int64]


class Tracker:
    """Updated rows of every table. Safe to use from several threads: backward has its own."""

    def __init__(self) -> None:
        self._tables: dict[str, _Table] = {}
        self._open: dict[int, Handover | None] = {0: None}  # by tenant
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
                table = self._tables[fqn] = _Table(fqn, len(states[WEIGHT]), self._open)
            if states is not None:
                table.states = _check_states(fqn, table.rows, states)
            if ids is None:
                table.mark_all()
            elif ids.numel():
                table.mark(ids)

    def add_tenant(self) -> int:
        """One more receiver of updated rows, for `compact`; the tracker begins with tenant 0. All rows that there are
        wait for it: what was updated before it came is not known any more."""
        with self._lock:
            if len(self._open) >= TENANTS_MAX:
                raise CheckpointError(f"a tracker has at most {TENANTS_MAX} tenants")
            tenant = next(number for number in range(TENANTS_MAX) if number not in self._open)
            self._open[tenant] = None
            for table in self._tables.values():
                table.add_tenant(tenant)
            return tenant

    def remove_tenant(self, tenant: int) -> None:
        """It makes no more cuts, and nothing is kept for it. What it has at hand is no concern of the tracker's."""
        with self._lock:
            self._check(tenant)
            del self._open[tenant]
            for table in self._tables.values():
                table.remove_tenant(tenant)

    def compact(self, *, full: bool = False, tenant: int = 0) -> Handover:
        """All rows that were updated and are not known to be durable; with `full`, all rows there are.

        One hand-over at a time for each tenant: its next delta would begin where this one ends, and that is not known
        yet. Other tenants do not notice.
        """
        with self._lock:
            self._check(tenant)
            if self._open[tenant] is not None:
                raise CheckpointError("the rows handed over before are neither durable nor given back yet")
            taken, given = {}, {}
            for fqn, table in self._tables.items():
                taken[fqn], given[fqn] = table.take(tenant, full=full)
            handover = Handover(
                ids={fqn: ids for fqn, ids in taken.items() if ids is None or ids.numel()},
                states={fqn: dict(table.states) for fqn, table in self._tables.items()},
                tracker=self,
                tenant=tenant,
                given=given,
            )
            self._open[tenant] = handover
            return handover

    def pending(self, fqn: str, *, tenant: int = 0) -> int:
        """Rows of a table that wait for the next hand-over."""
        with self._lock:
            self._check(tenant)
            return self._tables[fqn].count_pending(tenant)

    def _check(self, tenant: int) -> None:
        if tenant not in self._open:
            raise CheckpointError(f"there is no tenant {tenant!r}; there are {sorted(self._open)}")

    def _close(self, handover: Handover, *, durable: bool) -> None:
        with self._lock:
            if self._open.get(handover.tenant) is not handover:
                return  # said before, or its tenant is gone
            self._open[handover.tenant] = None
            if not durable:
                for fqn, given in handover.given.items():
                    self._tables[fqn].give_back(handover.tenant, given)


@dataclasses.dataclass(eq=False, slots=True)
class Handover:
    """Rows on their way to storage. `ids` rise, by table; None stands for all rows."""

    ids: dict[str, Tensor | None]
    states: dict[str, States]  # live: copy before training goes on
    tracker: Tracker = dataclasses.field(repr=False)
    tenant: int
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

    def leave_state(self) -> None:
        """Only weights are wanted."""
        self.states = {fqn: {WEIGHT: states[WEIGHT]} for fqn, states in self.states.items()}

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
    """One table: the segment that updates are written into, and what waits for each tenant. With one tenant the segment
    is what waits for it."""

    def __init__(self, fqn: str, rows: int, tenants: Iterable[int]) -> None:
        self.fqn = fqn
        self.rows = rows
        self.states: States = {}
        self._waiting = {tenant: _Marks(rows) for tenant in tenants}
        self._segment = _Marks(rows)
        self._share()

    def mark(self, ids: Tensor) -> None:
        ids = ids.detach().reshape(-1).to("cpu", torch.int64)
        low, high = torch.aminmax(ids)
        if int(low) < 0 or int(high) >= self.rows:
            wrong = int(low) if int(low) < 0 else int(high)
            raise CheckpointError(f"table {self.fqn!r} has {self.rows} rows, and {wrong} is said to be updated")
        self._segment.mark(ids.numpy())

    def mark_all(self) -> None:
        self._segment.mark_all()

    def add_tenant(self, tenant: int) -> None:
        self._settle()
        self._waiting[tenant] = _Marks(self.rows)
        self._waiting[tenant].mark_all()
        self._share()

    def remove_tenant(self, tenant: int) -> None:
        self._settle()
        del self._waiting[tenant]
        self._share()

    def take(self, tenant: int, *, full: bool) -> tuple[Tensor | None, _Given]:
        """The ids that wait for a tenant, rising, or None for all; and what to give back if they do not arrive."""
        self._settle()
        marks = self._waiting[tenant]
        ids = None if full or marks.all else torch.from_numpy(marks.list_rising())
        return ids, marks.take()

    def give_back(self, tenant: int, given: _Given) -> None:
        self._waiting[tenant].add(given)

    def count_pending(self, tenant: int) -> int:
        self._settle()
        marks = self._waiting[tenant]
        return self.rows if marks.all else len(marks.list_rising())

    def _settle(self) -> None:
        """The segment ends: every tenant takes note of its rows."""
        if self._is_shared():
            return
        given = self._segment.take()
        for marks in self._waiting.values():
            marks.add(given)

    def _share(self) -> None:
        """After a settled change of tenants."""
        if len(self._waiting) == 1:
            (self._segment,) = self._waiting.values()
        elif self._is_shared():
            self._segment = _Marks(self.rows)

    def _is_shared(self) -> bool:
        return any(self._segment is marks for marks in self._waiting.values())


class _Marks:
    """Rows that wait: a byte per row says whether it does, and a list says where those bytes are."""

    def __init__(self, rows: int) -> None:
        self.rows = rows
        self.all = False
        self._marked = np.zeros(rows, np.bool_)
        self._listed: list[_Ids] = []

    def mark(self, ids: _Ids) -> None:
        if self.all:
            return
        # An id is listed by one call at most, so the list grows with the rows that wait and not with time. It may be in
        # that call several times: sorting them here would cost ten times what the rest does.
        new = ids[~self._marked[ids]]
        if new.size:
            self._marked[new] = True
            self._listed.append(new)

    def mark_all(self) -> None:
        self._clear()
        self.all = True

    def add(self, given: _Given) -> None:
        if given.all:
            self.mark_all()
        for ids in given.ids:
            self.mark(ids)

    def take(self) -> _Given:
        """All that waits, and nothing waits any more."""
        given = _Given(self._listed, self.all)
        self._clear()
        self.all = False
        return given

    def list_rising(self) -> _Ids:
        """The ids that wait, each once. Few are sorted; many are read off the marks, which is faster."""
        if sum(map(len, self._listed)) * SCAN_RATIO < self.rows:
            return np.unique(np.concatenate([np.empty(0, np.int64), *self._listed]))
        return np.flatnonzero(self._marked)

    def _clear(self) -> None:
        for ids in self._listed:
            self._marked[ids] = False
        self._listed = []


def _check_states(fqn: str, rows: int, states: States) -> States:
    for name, values in states.items():
        if values.ndim < 1 or len(values) != rows:
            raise CheckpointError(f"table {fqn!r} has {rows} rows, its {name!r} is {list(values.shape)}")
    return dict(states)


def _width(values: Tensor) -> int:
    return values[0].numel() if len(values) else 1


def _row_bytes(states: States) -> int:
    return 4 + 4 * sum(_width(values) for values in states.values())
