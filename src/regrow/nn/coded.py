"""From a protection, as a user asks for it, to that of a job and the parities of its tables. Dense parameters, which
every worker reads in every step, are kept whole (k = 1)."""

from __future__ import annotations

import msgspec

from regrow.core.job import OptimizerSpec, TableSpec
from regrow.core.protection import Batched, Coded, CodedPartial, FlushSpec, Partial, Protection, Unprotected
from regrow.protection import CodedRecovery, ErasureCode, PartialRecovery

MARKS = "regrow_marks"
REDO_BYTES_DEFAULT = 64 << 20  # of every client that is not told otherwise

Wish = ErasureCode | PartialRecovery | CodedRecovery | None


def protect(table: TableSpec, wish: Wish, *, dense: bool = False) -> TableSpec:
    """The same table with its parities."""
    if wish is None or (isinstance(wish, PartialRecovery) and not dense):
        return table
    if dense or isinstance(wish, PartialRecovery):
        return msgspec.structs.replace(table, k=1, r=wish.copies)
    return msgspec.structs.replace(table, k=wish.k, r=wish.r)


def make_marks_table(servers: int) -> TableSpec:
    """A row for each server, with copies, that nobody ever pulls: where a lost server was, the holders of copies know.
    For a job without dense parameters on servers."""
    sgd = OptimizerSpec(kind="sgd", learning_rate=0.0)
    return TableSpec(name=MARKS, rows=servers, dim=1, init_bound=0.0, optimizer=sgd)


def make_protection(
    wish: Wish, *, flush_seconds: float | None = None, redo_bytes: int = REDO_BYTES_DEFAULT
) -> Protection:
    """What the job says about it. `flush_seconds`: checkpoints stay in the files of the servers, and are to be written
    within so long. `redo_bytes`: of pushes a worker keeps at most."""
    if wish is None:
        return Unprotected() if flush_seconds is None else Batched(flush_seconds=flush_seconds)
    flush = FlushSpec(
        pushes=wish.flush_pushes,
        bytes=wish.flush_bytes,
        redo_bytes=redo_bytes,
        commit=wish.commit,  # type: ignore[arg-type]
        sweep_bytes_per_s=wish.sweep_bytes_per_s,
        recovery_cost=wish.recovery_cost,
        recovery_seconds_max=wish.recovery_seconds_max,
    )
    if isinstance(wish, PartialRecovery):
        return Partial(r=wish.r, flush=flush)
    if isinstance(wish, CodedRecovery):
        return CodedPartial(k=wish.k, r=wish.r, rings=wish.rings, flush=flush)
    return Coded(k=wish.k, r=wish.r, rings=wish.rings, flush=flush)
