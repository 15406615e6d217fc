"""From an erasure code, as a user asks for it, to the protection of a job and the parities of its tables. Dense
parameters, which every worker reads in every step, are kept whole (k = 1)."""

from __future__ import annotations

import msgspec

from regrow.core.job import TableSpec
from regrow.core.protection import Coded, FlushSpec, Protection, Unprotected
from regrow.protection import ErasureCode


def protect(table: TableSpec, code: ErasureCode | None, *, k: int | None = None) -> TableSpec:
    """The same table with its parities; `k` instead of the code's."""
    return table if code is None else msgspec.structs.replace(table, k=k or code.k, r=code.r)


def make_protection(code: ErasureCode | None) -> Protection:
    """What the job says about it."""
    if code is None:
        return Unprotected()
    flush = FlushSpec(
        pushes=code.flush_pushes,
        bytes=code.flush_bytes,
        commit=code.commit,  # type: ignore[arg-type]
        sweep_bytes_per_s=code.sweep_bytes_per_s,
    )
    return Coded(k=code.k, r=code.r, rings=code.rings, flush=flush)
