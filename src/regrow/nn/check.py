"""Are the parities right? Compares every stripe of a job with its parities, as a client can read them.

A parity is the code of the stripe's values relative to their initial ones (core/coding.py), so a row nobody ever
touched adds nothing. All is computed here with the slow twins, from the layout's arithmetic: nothing of what the
servers did to get there is used again. Meant for the end of a run, when every push is durable.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from regrow.core.coding import U8, coefficient, product_bytes
from regrow.core.job import JobSpec
from regrow.core.twins import initial_rows
from regrow.runtime.client import Client

PART_BYTES = 4 << 20  # of rows compared at a time; more is more memory, less is more requests
FLOAT_BYTES = 4


def check_parity(client: Client, *, tries: int = 1, pause_seconds: float = 1.0) -> tuple[int, int]:
    """(stripes, how many of them have a wrong parity) over all protected tables.

    Values and parities are read one after the other. Where a flush or a recovery may still be under way, a few
    `tries` let it pass: a parity that is really wrong stays so. They are counted over the whole check.
    """
    stripes = wrong = 0
    for table, spec in enumerate(client.job.tables):
        if spec.r == 0:
            continue
        for first, count in _parts(client.job, table):
            found = _wrong_stripes(client, table, block_first=first, block_count=count)
            while found.any() and tries > 1:
                tries -= 1
                time.sleep(pause_seconds)
                found = _wrong_stripes(client, table, block_first=first, block_count=count)
            stripes += found.size
            wrong += int(np.count_nonzero(found))
    return stripes, wrong


def _parts(job: JobSpec, table: int) -> Iterator[tuple[int, int]]:
    """(first block, blocks) of each part of a table. A block is one stripe from every server on."""
    spec = job.tables[table]
    blocks = job.layout(table).slots_per_server(spec.rows) // spec.k
    size = max(1, PART_BYTES // (job.servers * spec.k * spec.record_floats * FLOAT_BYTES))
    for first in range(0, blocks, size):
        yield first, min(size, blocks - first)


def _wrong_stripes(client: Client, table: int, *, block_first: int, block_count: int) -> npt.NDArray[np.bool_]:
    """Which stripes of these blocks differ from their parities. Stripes past the table's end have parities too: 0."""
    spec = client.job.tables[table]
    layout = client.job.layout(table)
    stripes = np.arange(block_first * layout.servers, (block_first + block_count) * layout.servers)
    relative = _relative(client, table, row_first=int(stripes[0]) * spec.k, row_count=stripes.size * spec.k)
    relative = relative.reshape(stripes.size, spec.k, -1)
    parities = np.stack(
        [
            client.parities(table, server, block_first * spec.r, block_count * spec.r).reshape(block_count, spec.r, -1)
            for server in range(layout.servers)
        ]
    ).view(np.uint8)
    turn, group = np.divmod(stripes, layout.rings)
    wrong = np.zeros(stripes.size, np.bool_)
    for q in range(spec.r):
        holder = group * layout.ring + (turn + table + spec.k + q) % layout.ring
        found: U8 = parities[holder, turn // layout.ring - block_first, q]
        expected = np.zeros_like(found)
        for j in range(spec.k):
            factor = coefficient(q, j, spec.r)
            member = relative[:, j]
            expected[:, : member.shape[1]] ^= member if factor == 1 else product_bytes(factor, member)
        wrong |= (found != expected).any(axis=1)  # also where padding is not zero
    return wrong


def _relative(client: Client, table: int, *, row_first: int, row_count: int) -> U8:
    """value ^ initial value of these rows, as bytes; zero for rows past the end."""
    spec = client.job.tables[table]
    relative = np.zeros((row_count, spec.record_floats * FLOAT_BYTES), np.uint8)
    count = min(row_count, spec.rows - row_first)
    if count > 0:
        initial = np.zeros((count, spec.record_floats), np.float32)
        rows: Any = range(row_first, row_first + count)
        initial[:, : spec.dim] = initial_rows(
            rows, dim=spec.dim, seed=client.job.seed, table=table, bound=spec.init_bound
        )
        records = np.ascontiguousarray(client.records(table, row_first, count))
        relative[:count] = records.view(np.uint8) ^ initial.view(np.uint8)
    return relative
