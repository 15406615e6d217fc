"""Cuts of a torch model: taken between two steps, written behind training. What is in them is said by who makes them,
a `DeltaCheckpointer` or a `Publisher`.

A cut is taken between two steps: the rows updated since the last cut are copied, then training goes on. A thread writes
the copies, from the first one on, so that memory of what is written serves for the next. The rules. One cut is written
at a time; a cut that is due meanwhile is taken when that one is done. Rows are forgotten once the manifest is on
storage and not before, so a write that failed costs a larger next delta and nothing else. A cut whose copy would take
more than `copy_bytes_max` is written while training waits, straight from the tensors.

With torch.distributed every rank makes its own and calls the same methods at the same steps. Each rank writes its rows,
and the first one writes the manifest when all have.
"""

from __future__ import annotations

import dataclasses
import queue
import secrets
import threading
import time
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal, Self

import msgspec
import torch
from torch import nn

from regrow.checkpoint.chunks import Chunk, split
from regrow.checkpoint.manifest import ChunkInfo, Cut, Encoding, Line, Manifest, TableInfo, chunk_name, encode
from regrow.checkpoint.order import make_line
from regrow.checkpoint.staging import Stager
from regrow.checkpoint.storage import Storage
from regrow.checkpoint.torch import dense
from regrow.checkpoint.torch.adapters import Table
from regrow.checkpoint.torch.ranks import Ranks
from regrow.checkpoint.torch.recording import take_seat
from regrow.checkpoint.torch.tracker import Handover
from regrow.core.names import cut_id, piece_name
from regrow.errors import CheckpointError, ConfigError, RegrowError
from regrow.units import Interval, parse_interval

COPY_BYTES_MAX = 1 << 30

_now = time.monotonic


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Plan:
    """A cut as all ranks agreed on it."""

    source: str | None
    target: Cut
    tables: tuple[TableInfo, ...]
    shard: str  # of this rank


class CutWriter:
    """Writes cuts of a torch model: a full now and then, deltas in between. Use from one thread.

    The options are those of its heirs. `optimizers`: None takes those that others who watch the model have named."""

    kind: Literal["checkpoint", "publication"] = "checkpoint"
    made_by: str

    def __init__(
        self,
        model: nn.Module,
        url: str,
        *,
        optimizers: Sequence[Any] | None,
        every: int | str | None,
        full_every: int,
        encoding: Encoding,
        bits: Literal[32, 8, 4],
        copy_bytes_max: int,
        staging_directory: str | None,
        row_local: Sequence[type[torch.optim.Optimizer]],
    ) -> None:
        self._every_seconds, self._every_steps = _parse_every(every)
        if full_every < 1:
            raise ConfigError("full_every", full_every, "must be at least 1")
        self._full_every, self._copy_bytes_max = full_every, copy_bytes_max
        self._encoding, self._bits = encoding, bits
        self._ranks = Ranks()
        self._storage = Storage.open(url)
        self._seat = take_seat(model, optimizers, first_rank=self._ranks.first, row_local=row_local)
        self._state, self._tracker = self._seat.state, self._seat.tracker
        try:
            self._stager = Stager(self._storage, directory=staging_directory)
        except BaseException:
            self._seat.leave()
            raise
        # Random, so that no two runs give a cut the same name; and the same on all ranks.
        self._salt = self._ranks.first_says(secrets.token_hex(8))
        self._line: Line | None = None  # of the first cut
        self._step = 0
        self._attempts = 0
        self._deltas = 0  # since the last full
        self._source: str | None = None
        self._tables: tuple[TableInfo, ...] = ()
        self._full_wanted = False  # somebody asked for one
        self._last_step, self._last_seconds = self._step, _now()
        self._thread: threading.Thread | None = None
        self._error: Exception | None = None
        self._closed = False
        self.copy_seconds = 0.0  # that the last cut kept training waiting

    # --- what a cut is of

    def _describe(self, table: Table) -> tuple[TableInfo, dict[str, Any]]:
        """A table as it is stored, but for its index, and what is said of it as a whole."""
        raise NotImplementedError

    def _pack_dense(self) -> bytes:
        raise NotImplementedError

    def _describe_dense(self, data_bytes: int, *, index: int) -> TableInfo:
        raise NotImplementedError

    def _take_rows(self, *, full: bool) -> Handover:
        """What waits for this one."""
        return self._tracker.compact(full=full, tenant=self._seat.tenant)

    def _after_manifest(self, manifest: Manifest) -> None:
        """By the first rank, when a manifest is on storage. An error is that of the cut."""

    # --- what training calls

    @property
    def current_step(self) -> int:
        """Steps taken, those before a restore included."""
        return self._step

    @property
    def newest(self) -> str | None:
        """The newest cut known to be on storage: written or restored."""
        return self._source

    def step(self, extra: Mapping[str, Any] | None = None) -> None:
        """Counts a step, and begins a cut if one is due. `extra` comes back from `restore`: plain JSON values.

        A cut that could not be written is a warning, and its rows are part of the next one: training goes on.
        """
        self._step += 1
        if not self._is_due():
            return
        if not self._ranks.several and self._thread is not None and self._thread.is_alive():
            return  # It is still due at the next step. Several ranks cannot know of each other: they wait below.
        self._join()
        if self._error is not None:
            warnings.warn(f"{self.kind}s: a cut was not written: {self._error}", stacklevel=2)
            self._error = None
        self._begin(full=False, extra=extra)

    def save(self, *, full: bool = False, extra: Mapping[str, Any] | None = None) -> str:
        """Takes a cut now and waits until it is on storage; returns its id. Errors are raised."""
        self._join()
        self._error = None
        cut = self._begin(full=full, extra=extra)
        self.wait()
        return cut

    def wait(self) -> None:
        """Waits for the cut being written. Raises what kept it, or the one before, from storage."""
        self._join()
        if self._error is not None:
            error, self._error = self._error, None
            raise error

    def close(self) -> None:
        """Waits, and stops tracking. Changes since the last cut are not saved: `save` first if they should be."""
        if self._closed:
            return
        self._closed = True
        self._seat.leave()
        try:
            self.wait()
        finally:
            self._stager.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            self.close()
        except RegrowError:
            if kind is None:
                raise  # else the first error says more

    # --- a cut

    def _is_due(self) -> bool:
        if self._every_steps is not None:
            return self._step - self._last_step >= self._every_steps
        if self._every_seconds is None:
            return False
        # Clocks differ: the first rank's decides for all.
        return self._ranks.first_says(_now() - self._last_seconds >= self._every_seconds)

    def _begin(self, *, full: bool, extra: Mapping[str, Any] | None) -> str:
        if self._closed:
            raise CheckpointError(f"this {type(self).__name__} was closed")
        began = _now()
        self._last_step, self._last_seconds = self._step, began
        self._state.before_cut()
        packed = self._pack_dense() if self._ranks.first else b""
        plan = self._agree(full=full, dense_bytes=len(packed), extra=extra)
        handover = self._take_rows(full=plan.source is None)
        try:
            behind = handover.nbytes <= self._copy_bytes_max
            parts = self._parts(handover, packed, views=not behind)
            copies = _Copies()
            write = (plan, handover, copies if behind else parts)
            self._thread = threading.Thread(target=self._write, args=write, name="regrow-checkpoint")
            self._thread.start()
        except BaseException:
            handover.again()
            raise
        if behind:
            self._copy(parts, copies)
        else:
            self._join()
        self.copy_seconds = _now() - began
        return plan.target.id

    def _copy(self, parts: Iterable[Chunk], copies: _Copies) -> None:
        try:
            for part in parts:
                copies.put(part)
                del part
            copies.put(None)
        except BaseException as error:
            copies.put(error)
            self._join()
            self._error = None  # it is raised here
            raise

    def _agree(self, *, full: bool, dense_bytes: int, extra: Mapping[str, Any] | None) -> _Plan:
        """All ranks together: which tables there are, and whether this is a full."""
        self._attempts += 1
        own = {table.name: self._describe(table) for table in self._state.saved}
        firsts = sorted((table.name, table.first) for table in self._state.saved)
        full = full or self._full_wanted
        said = self._ranks.gather((own, full, dense_bytes, dict(extra or {}), firsts))
        known = {name: pair for each in said for name, pair in each[0].items()}
        infos = [msgspec.structs.replace(known[name][0], index=index) for index, name in enumerate(sorted(known))]
        tables = (*infos, self._describe_dense(said[0][2], index=len(infos)))
        # All pieces of a line have the same tables: where these change, a full begins a new line.
        full = any(each[1] for each in said) or self._source is None or tables != self._tables
        full = full or self._deltas + 1 >= self._full_every
        cut = Cut(
            id=cut_id(self._step, f"{self._salt}/{self._attempts}"),
            step=self._step,
            marks=(self._step,) * self._ranks.count,
            created=time.time(),
            job={**self._state.job(), "tables": {name: known[name][1] for name in sorted(known)}},
            extra=said[0][3],
            kind=self.kind,
        )
        shard = self._ranks.shard([each[4] for each in said])
        plan = _Plan(source=None if full else self._source, target=cut, tables=tables, shard=shard)
        encode(self._manifest(plan, ()))  # What no manifest can say, a NaN in `extra` perhaps, is the caller's to hear.
        return plan

    def _parts(self, handover: Handover, packed: bytes, *, views: bool) -> Iterator[Chunk]:
        """This rank's rows, and the dense part behind them."""
        yield from handover.chunks({table.name: table.first for table in self._state.saved}, views=views)
        if packed:
            yield {dense.DENSE: dense.to_rows(packed)}

    def _write(self, plan: _Plan, handover: Handover, parts: Iterable[Chunk]) -> None:
        """In the writing thread, once per cut."""
        try:
            self._commit(plan, piece_name(plan.source, plan.target.id), parts)
        except Exception as error:
            handover.again()
            self._error = error
        else:
            handover.durable()
            self._source, self._tables = plan.target.id, plan.tables
            self._deltas = 0 if plan.source is None else self._deltas + 1

    def _commit(self, plan: _Plan, piece: str, parts: Iterable[Chunk]) -> None:
        """Chunks of all ranks, then the manifest by the first, then everybody knows. A rank with a problem says so and
        waits with the others: they cannot be left alone in the middle of it."""
        infos, problem = self._write_chunks(piece, plan.shard, parts)
        said = self._ranks.gather((infos, problem), writing=True)
        problem = next((each for _, each in said if each is not None), None)
        if problem is None:
            if self._ranks.first:
                problem = self._write_manifest(plan, tuple(info for each, _ in said for info in each))
            problem = self._ranks.gather(problem, writing=True)[0]
        if problem is not None:
            raise problem

    def _write_chunks(self, piece: str, shard: str, parts: Iterable[Chunk]) -> tuple[list[ChunkInfo], Exception | None]:
        try:
            for number, chunk in enumerate(split(parts)):
                name = chunk_name(shard, number, self._encoding)
                self._stager.submit(piece, name, chunk, encoding=self._encoding, bits=self._bits, shard=shard)
            return self._stager.finish(piece), None
        except Exception as error:
            self._stager.abort(piece)
            return [], self._make_portable(error)

    def _write_manifest(self, plan: _Plan, chunks: tuple[ChunkInfo, ...]) -> Exception | None:
        try:
            manifest = self._manifest(plan, chunks)
            target = msgspec.structs.replace(manifest.target, line=self._make_line())
            manifest = msgspec.structs.replace(manifest, target=target)
            self._storage.write_manifest(manifest)
            self._after_manifest(manifest)
        except Exception as error:
            return self._make_portable(error)
        return None

    def _make_line(self) -> Line:
        """Each of them is a run of its own: younger than all that was there when it wrote its first cut."""
        turn = (0, 0, self._attempts)
        if self._line is None:
            manifests, _ = self._storage.manifests()
            self._line = make_line([each.target for each in manifests], run=self._salt, turn=turn)
        return msgspec.structs.replace(self._line, turn=turn)

    def _manifest(self, plan: _Plan, chunks: tuple[ChunkInfo, ...]) -> Manifest:
        return Manifest(
            source=plan.source,
            target=plan.target,
            tables=plan.tables,
            seed=0,
            chunks=chunks,
            encoding=self._encoding,
            bits=self._bits,
            made_by=self.made_by,
        )

    def _make_portable(self, error: Exception) -> Exception:
        """As it can travel to other ranks."""
        return CheckpointError(f"rank {self._ranks.rank}: {error}") if self._ranks.several else error

    def _join(self) -> None:
        if self._thread is not None:
            self._thread.join()
            self._thread = None


class _Copies:
    """Parts of a cut on their way from the thread that copies them to the one that writes them; None ends them, and an
    error says that there will be no more."""

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[Chunk | BaseException | None] = queue.SimpleQueue()
        self.put = self._queue.put

    def __iter__(self) -> Iterator[Chunk]:
        while (part := self._queue.get()) is not None:
            if isinstance(part, BaseException):
                raise CheckpointError(f"not all rows were copied: {part!r}") from part
            yield part
            del part  # or it would stay in memory until the next one comes


def _parse_every(every: int | str | None) -> Interval:
    """A number is one of steps."""
    if every is None:
        return Interval()
    if isinstance(every, int) and not isinstance(every, bool) and every >= 1:
        return Interval(steps=every)
    try:
        return parse_interval(every if isinstance(every, str) else repr(every))
    except ValueError:
        problem = 'must be a number of steps, or a time such as "60s", "5m" or "1h"'
        raise ConfigError("every", every, problem) from None
