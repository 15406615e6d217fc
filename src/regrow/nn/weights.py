"""Whole tables of a job: read, replaced, or given as first values.

First values are given with `assign`, which leaves every row alone that has some: a script that is started again in a
dead worker's place, or from a checkpoint, loads its pretrained weights again, and nothing that was trained is undone.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from regrow.core.job import JobSpec, TableSpec
from regrow.nn import refusals
from regrow.nn.dense import FlatTable
from regrow.nn.routing import make_router
from regrow.runtime.client import Client

CHUNK_BYTES = 4 << 20  # at a time


def read_weights(client: Client, spec: JobSpec, name: str) -> Tensor:
    index, table = _find(spec, name)
    return torch.from_numpy(np.ascontiguousarray(client.records(index, 0, table.rows)[:, : table.dim]))


def write_weights(client: Client, spec: JobSpec, name: str, weights: Tensor) -> None:
    """Replaces them; the state of the optimizer begins anew."""
    index, table = _find(spec, name)
    chunk = max(1, CHUNK_BYTES // (4 * table.record_floats))
    for first in range(0, table.rows, chunk):
        part = weights[first : first + chunk].detach().cpu().numpy()
        records = np.zeros((len(part), table.record_floats), np.float32)
        records[:, : table.dim] = part
        client.write_records(index, first, records)


def write_flat(client: Client, index: int, table: FlatTable) -> None:
    """The same for the dense parameters of a module, or its buffers."""
    records = np.zeros((table.spec.rows, table.spec.record_floats), np.float32)
    records[:, : table.spec.dim] = table.values.reshape(table.spec.rows, table.spec.dim)
    client.write_records(index, 0, records)


def make_first(config: Any) -> Tensor | None:
    """The first values of a table, by its `init_fn`; None: those that servers make by themselves."""
    init = refusals.find_init(config)
    if init is None:
        return None
    weights = torch.empty(config.num_embeddings, config.embedding_dim)
    with torch.no_grad():
        init(weights)
    return weights


def give_weights(client: Client, spec: JobSpec, name: str, weights: Tensor) -> None:
    """To all rows that have no values yet."""
    index, table = _find(spec, name)
    router = make_router(spec, feature_tables=[index], static_tables=[])
    chunk = max(1, CHUNK_BYTES // (4 * table.dim))
    for first in range(0, table.rows, chunk):
        ids = np.arange(first, min(first + chunk, table.rows))
        plan = router.plan(ids, None, len(ids))
        rows = np.empty(plan.floats, np.float32)
        # Every row once: what is summed for it is its own weights.
        plan.unpool(np.ascontiguousarray(weights[first : first + chunk].detach().cpu().numpy(), np.float32), rows)
        client.assign(plan, rows)
        client.records(index, first, min(len(ids), spec.servers))  # an answer: nothing piles up on the way


def _find(spec: JobSpec, name: str) -> tuple[int, TableSpec]:
    index = [table.name for table in spec.tables].index(name)
    return index, spec.tables[index]
