"""Gradients of a step bounded by their norm: rows and dense parameters together, as one vector.

The norm must not depend on how many servers there are, or a synchronous model would; but rows lie in the buffer server
after server. So each row is summed up by itself, and the sums are added in the order of their size.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from regrow.core.job import JobSpec
from regrow.core.session import Plan
from regrow.errors import UserError

F32 = np.ndarray[Any, np.dtype[np.float32]]
NOTHING = np.zeros(0, np.float32)


def clip_gradients(
    grads: F32, plan: Plan, spec: JobSpec, *, norm_max: float, left_out: frozenset[int], beside: F32 = NOTHING
) -> float:
    """Scales gradients in place, so that their norm is at most `norm_max`; returns what it was. Tables that are left
    out have no gradients but something else in that place, and stay as they are. `beside`: gradients that belong to the
    same step and go elsewhere."""
    if not norm_max > 0.0:
        raise UserError(f"clip_norm is {norm_max}: it must be above 0")
    tables = np.tile(np.arange(len(spec.tables)), spec.servers)
    rows = np.repeat(tables, np.asarray(plan.counts).reshape(-1))  # the table of each row, as they lie
    if not rows.size and not beside.size:
        return 0.0
    dims = np.array([table.dim for table in spec.tables])[rows]
    starts = np.cumsum(dims) - dims
    squares = np.add.reduceat(np.square(grads, dtype=np.float64), starts) if rows.size else np.zeros(0)
    counted = ~np.isin(rows, list(left_out))
    norm = float(np.sqrt(np.sort(squares[counted]).sum() + np.square(beside, dtype=np.float64).sum()))
    if norm > norm_max:
        factor = np.float32(norm_max / norm)
        grads *= factor if counted.all() else np.repeat(np.where(counted, factor, np.float32(1.0)), dims)
        beside *= factor
    return norm
