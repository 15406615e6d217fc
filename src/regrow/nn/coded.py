"""From a protection, as a user asks for it, to that of a job and the parities of its tables. Dense parameters, which
every worker reads in every step, are kept whole (k = 1)."""

from __future__ import annotations

import msgspec

from regrow.core.job import TableSpec
from regrow.core.protection import Batched, Coded, FlushSpec, Partial, Protection, Unprotected
from regrow.protection import ErasureCode, PartialRecovery

Wish = ErasureCode | PartialRecovery | None


def protect(table: TableSpec, wish: Wish, *, dense: bool = False) -> TableSpec:
    """The same table with its parities."""
    if wish is None or (isinstance(wish, PartialRecovery) and not dense):
        return table
    k = 1 if dense or isinstance(wish, PartialRecovery) else wish.k
    return msgspec.structs.replace(table, k=k, r=wish.r)


def make_protection(wish: Wish, *, flush_seconds: float | None = None) -> Protection:
    """What the job says about it. `flush_seconds`: checkpoints stay in the files of the servers, and are to be written
    within so long."""
    if wish is None:
        return Unprotected() if flush_seconds is None else Batched(flush_seconds=flush_seconds)
    flush = FlushSpec(
        pushes=wish.flush_pushes,
        bytes=wish.flush_bytes,
        commit=wish.commit,  # type: ignore[arg-type]
        sweep_bytes_per_s=wish.sweep_bytes_per_s,
    )
    if isinstance(wish, PartialRecovery):
        return Partial(r=wish.r, flush=flush)
    return Coded(k=wish.k, r=wish.r, rings=wish.rings, flush=flush)
