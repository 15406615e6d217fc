"""From an erasure code, as a user asks for it, to the fields of a job. Every table gets the same number of parities;
dense parameters, which every worker reads in every step, are kept whole (k = 1)."""

from __future__ import annotations

from collections.abc import Sequence

from regrow.core.job import FlushSpec, TableSpec
from regrow.protection import SWEEP_BYTES_PER_S_MIN, SWEEP_SECONDS_MAX, ErasureCode


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


def flush_spec(code: ErasureCode | None, tables: Sequence[TableSpec], *, servers: int) -> FlushSpec:
    if code is None:
        return FlushSpec()
    server_bytes = sum(4 * table.rows * table.record_floats for table in tables) // servers
    return FlushSpec(
        pushes=code.flush_pushes,
        bytes=code.flush_bytes,
        commit=code.commit,  # type: ignore[arg-type]
        sweep_bytes_per_s=max(SWEEP_BYTES_PER_S_MIN, server_bytes // SWEEP_SECONDS_MAX)
        if code.sweep_bytes_per_s is None
        else code.sweep_bytes_per_s,
    )


def ring_count(code: ErasureCode | None) -> int:
    return code.rings if code is not None else 1
