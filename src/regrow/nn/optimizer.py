"""The update rule of rows as a script names it: checked when it is made, where the mistake is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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


Optimizers = job.OptimizerSpec | Mapping[str, job.OptimizerSpec]


def choose_optimizers(given: Optimizers, tables: Sequence[str]) -> list[job.OptimizerSpec]:
    """The update rule of each table, as jobs have it: one for all, or by the names of tables."""
    if isinstance(given, Mapping):
        for name in tables:
            if name not in given:
                raise UserError(
                    f"optimizer: there is none for table {name!r}", hint="one for every table, or one for all"
                )
        for name in given:
            if name not in tables:
                raise UserError(f"optimizer: there is no table {name!r}", hint=f"there is {', '.join(tables)}")
    chosen = [given[name] if isinstance(given, Mapping) else given for name in tables]
    return [each.plain if isinstance(each, OptimizerSpec) else each for each in chosen]
