"""Rows in memory: the C++ arena behind the `Store` interface of `regrow.core.shard`."""

from __future__ import annotations

from typing import Any

import numpy as np

from regrow import _core
from regrow.core.job import JobSpec
from regrow.core.messages import Float32Array, Int32Array, UInt32Array


class MemoryStore:
    """All tables of one server, one arena each, filled with their initial values."""

    def __init__(self, job: JobSpec, server: int) -> None:
        self._shard = _core.Shard(job.servers, server, job.groups)
        for index, table in enumerate(job.tables):
            optimizer = table.optimizer
            self._shard.add_table(
                rows=table.rows,
                dim=table.dim,
                k=table.k,
                r=table.r,
                optimizer=optimizer.kind,
                learning_rate=optimizer.learning_rate,
                eps=optimizer.eps,
                beta1=optimizer.beta1,
                beta2=optimizer.beta2,
                momentum=optimizer.momentum,
                weight_decay=optimizer.weight_decay,
                seed=job.seed,
                init_bound=table.init_bound,
                table=index,
            )
        self._dims = np.array([table.dim for table in job.tables], np.int32)
        self.memory_bytes: int = self._shard.memory_bytes
        self.gather = self._shard.gather
        self.update = self._shard.update
        self.assign_untouched = self._shard.assign_untouched
        self.read_records = self._shard.read_records
        self.write_records = self._shard.write_records
        self.record_floats = self._shard.record_floats
        self.slots = self._shard.slots

    def merge(self, parts: list[tuple[Any, Any, Any]]) -> tuple[Int32Array, UInt32Array, Float32Array]:
        """One push out of several: rows in common are summed in the order of the list."""
        return _core.merge_pushes(self._dims, parts)
