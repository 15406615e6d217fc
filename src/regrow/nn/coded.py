"""From an erasure code, as a user asks for it, to the fields of a job. Every table gets the same number of parities;
dense parameters, which every worker reads in every step, are kept whole (k = 1)."""

from __future__ import annotations

from regrow.core.job import FlushSpec, TableSpec
from regrow.protection import ErasureCode


def protect(table: TableSpec, code: ErasureCode | None, *, k: int | None = None) -> TableSpec:
    """The same table with its parities; `k` instead of the code's."""
    if code is None:
        return table
    return TableSpec(
        name=table.name,
        rows=table.rows,
        dim=table.dim,
        init_bound=table.init_bound,
        optimizer=table.optimizer,
        k=k or code.k,
        r=code.r,
    )


def flush_spec(code: ErasureCode | None) -> FlushSpec:
    if code is None:
        return FlushSpec()
    return FlushSpec(
        pushes=code.flush_pushes,
        bytes=code.flush_bytes,
        commit=code.commit,  # type: ignore[arg-type]
        sweep_bytes_per_s=code.sweep_bytes_per_s,
    )


def ring_count(code: ErasureCode | None) -> int:
    return code.rings if code is not None else 1
