"""What is trained: tables, optimizers, the cluster they are spread over, and what protects them.

A `JobSpec` is declared once, travels inside every view, and is all a server needs to build its rows. It holds
numbers only, so that two processes can compare it and a replacement server can start from it alone.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Literal

import msgspec

from regrow.core.layout import Layout
from regrow.core.protection import Protection, Unprotected, Verdict

OptimizerKind = Literal["sgd", "momentum", "adagrad", "rowwise_adagrad", "adam", "partial_rowwise_adam"]
Mode = Literal["async", "sync"]

ROWS_PER_TABLE_MAX = 2**32  # Slots travel as 32-bit numbers.
DIM_MAX = 1 << 16
TABLES_MAX = 4096
SERVERS_MAX = 4096
WORKERS_MAX = 65536
SEED_MAX = 2**63 - 1
NUMBER_MAX = 3e38  # Rows are 32-bit floats.


class OptimizerSpec(msgspec.Struct, frozen=True, kw_only=True):
    """An update rule that runs inside the servers; unused numbers are ignored."""

    kind: OptimizerKind
    learning_rate: float
    eps: float = 1e-8
    beta1: float = 0.9
    beta2: float = 0.999
    momentum: float = 0.9
    weight_decay: float = 0.0

    def state_parts(self, dim: int) -> tuple[tuple[str, int], ...]:
        """Names (TorchRec's) and floats per row of the optimizer state, in the order of the record."""
        return {
            "sgd": (),
            "momentum": (("momentum1", dim),),
            "adagrad": (("momentum1", dim),),
            "rowwise_adagrad": (("momentum1", 1),),
            "adam": (("momentum1", dim), ("exp_avg_sq", dim)),
            "partial_rowwise_adam": (("momentum1", dim), ("exp_avg_sq", 1)),
        }[self.kind]


class TableSpec(msgspec.Struct, frozen=True, kw_only=True):
    """One table of rows. Its index in the job is part of where its rows live."""

    name: str
    rows: int
    dim: int
    init_bound: float  # initial weights are uniform in [-init_bound, init_bound)
    optimizer: OptimizerSpec
    k: int = 1
    r: int = 0

    @property
    def record_floats(self) -> int:
        """Floats of a row with its state, without padding."""
        return self.dim + sum(floats for _, floats in self.optimizer.state_parts(self.dim))


class JobSpec(msgspec.Struct, frozen=True, kw_only=True):
    """All tables of a run and the servers and workers that share them."""

    tables: tuple[TableSpec, ...]
    servers: int
    workers: int
    mode: Mode = "async"
    seed: int = 0
    protection: Protection = Unprotected()

    @property
    def rings(self) -> int:
        """Independent rings of servers."""
        return self.protection.rings

    @property
    def marks(self) -> int:
        """How many marks say where rows stand: one for each worker, or one step for all."""
        return 1 if self.mode == "sync" else self.workers

    def layout(self, table: int) -> Layout:
        """Where the rows of a table are."""
        spec = self.tables[table]
        return Layout(servers=self.servers, k=spec.k, r=spec.r, rings=self.rings)

    def verdict(self, down: Collection[int]) -> Verdict:
        """Whether all of these servers may be lost together, and why (not)."""
        return self.protection.verdict(down, tables=self.tables, servers=self.servers)

    def find_difference(self, other: JobSpec) -> str:
        """The first thing in which another job is not this one, in words."""
        for mine, theirs in zip(self.tables, other.tables, strict=False):
            for name in mine.__struct_fields__:
                if getattr(mine, name) != getattr(theirs, name):
                    return f"table {mine.name!r} has {name} = {getattr(mine, name)}, there {getattr(theirs, name)}"
        if len(self.tables) != len(other.tables):
            return f"{len(self.tables)} tables, there {len(other.tables)}"
        names = [name for name in self.__struct_fields__ if getattr(self, name) != getattr(other, name)]
        return ", ".join(f"{name} = {getattr(self, name)}, there {getattr(other, name)}" for name in names)

    def invalid_reason(self) -> str | None:
        """Says what is wrong with this job, or None. Checked wherever a job enters a process."""
        if not 1 <= self.servers <= SERVERS_MAX:
            return f"servers must be between 1 and {SERVERS_MAX}, not {self.servers}"
        if not 1 <= self.workers <= WORKERS_MAX:
            return f"workers must be between 1 and {WORKERS_MAX}, not {self.workers}"
        if not 1 <= len(self.tables) <= TABLES_MAX:
            return f"a job has between 1 and {TABLES_MAX} tables, not {len(self.tables)}"
        if not 0 <= self.seed <= SEED_MAX:
            return f"seed must be between 0 and {SEED_MAX}, not {self.seed}"
        if reason := self.protection.invalid_reason(tables=self.tables, servers=self.servers, mode=self.mode):
            return reason
        names: set[str] = set()
        for table in self.tables:
            if table.name in names:
                return f"two tables are named {table.name!r}"
            names.add(table.name)
            if reason := _table_invalid_reason(table, ring=self.servers // self.rings):
                return f"table {table.name!r}: {reason}"
        return None


def _table_invalid_reason(table: TableSpec, *, ring: int) -> str | None:
    if not 1 <= table.rows < ROWS_PER_TABLE_MAX:
        return f"rows must be between 1 and {ROWS_PER_TABLE_MAX - 1}, not {table.rows}"
    if not 1 <= table.dim <= DIM_MAX:
        return f"dim must be between 1 and {DIM_MAX}, not {table.dim}"
    if table.k < 1 or table.r < 0:
        return f"k must be at least 1 and r at least 0, not k={table.k}, r={table.r}"
    if ring < table.k + table.r:
        return f"k + r = {table.k + table.r} members need as many servers in a ring; there are {ring}"
    if not 0.0 <= table.init_bound <= NUMBER_MAX:
        return f"init_bound must be a finite number and not negative, not {table.init_bound}"
    return _optimizer_invalid_reason(table.optimizer)


def _optimizer_invalid_reason(optimizer: OptimizerSpec) -> str | None:
    for name in ("learning_rate", "eps", "weight_decay"):
        if not 0.0 <= getattr(optimizer, name) <= NUMBER_MAX:
            return f"{name} must be a finite number and not negative, not {getattr(optimizer, name)}"
    for name in ("beta1", "beta2", "momentum"):
        if not 0.0 <= getattr(optimizer, name) < 1.0:
            return f"{name} must be in [0, 1), not {getattr(optimizer, name)}"
    return None
