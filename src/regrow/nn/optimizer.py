"""The update rule of rows as a script names it: checked when it is made, where the mistake is."""

from __future__ import annotations

from typing import get_args

import msgspec

from regrow.core import job
from regrow.errors import UserError


class OptimizerSpec(job.OptimizerSpec, frozen=True, kw_only=True):
    """An update rule that runs inside the servers: sgd, momentum, adagrad, rowwise_adagrad, adam or
    partial_rowwise_adam. Numbers that it does not use are ignored."""

    def __post_init__(self) -> None:
        known = get_args(job.OptimizerKind)
        if self.kind not in known:
            raise UserError(f"optimizer kind = {self.kind!r}: must be one of {', '.join(known)}")
        try:
            reason = _find_reason(self.plain)
        except TypeError as error:
            raise UserError(f"optimizer {self.kind}: {error}") from None
        if reason is not None:
            raise UserError(f"optimizer {self.kind}: {reason}")

    @property
    def plain(self) -> job.OptimizerSpec:
        """The same as jobs have it: two jobs are compared by type, too."""
        return job.OptimizerSpec(**msgspec.structs.asdict(self))


def _find_reason(optimizer: job.OptimizerSpec) -> str | None:
    """What a server would say of it."""
    table = job.TableSpec(name="t", rows=1, dim=1, init_bound=0.0, optimizer=optimizer)
    reason = job.JobSpec(tables=(table,), servers=1, workers=1).invalid_reason()
    return None if reason is None else reason.removeprefix("table 't': ")
