"""All small rings with parities, and where the stripes of a table lie on them, by the plain definition: a stripe is k
rows that follow each other in the table, on consecutive servers, and its r parities are on the r servers after them."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator

from helpers import job, table

from regrow.core.job import JobSpec
from regrow.core.layout import Layout

SERVERS_MAX = 6


def shapes() -> Iterator[tuple[int, int, int, int]]:
    """Every (servers, rings, k, r) with parities."""
    for servers in range(1, SERVERS_MAX + 1):
        for rings in (g for g in range(1, servers + 1) if servers % g == 0):
            for k, r in itertools.product(range(1, servers + 1), range(1, servers + 1)):
                if k + r <= servers // rings:
                    yield servers, rings, k, r


SHAPES = list(shapes())
MIXED = [
    # (servers, rings, (k, r) of each table): groups are shared where (k - j, r) are equal, and not otherwise
    (4, 1, [(3, 1), (1, 1), (2, 1)]),
    (4, 1, [(2, 2), (1, 3), (2, 1)]),
    (6, 2, [(2, 1), (1, 2), (1, 1)]),
]


def uniform(servers: int, rings: int, k: int, r: int, *, rows: int = 29) -> JobSpec:
    return job(*(table(f"t{t}", rows=rows, k=k, r=r) for t in range(3)), servers=servers, rings=rings)


def mixed(servers: int, rings: int, codes: list[tuple[int, int]], *, rows: int = 29) -> JobSpec:
    tables = [table(f"t{t}", rows=rows, k=k, r=r) for t, (k, r) in enumerate(codes)]
    return job(*tables, servers=servers, rings=rings)


JOBS = [uniform(*shape) for shape in SHAPES] + [mixed(*each) for each in MIXED]


def stripe_homes(of: JobSpec, index: int, stripe: int) -> list[int]:
    """The servers of the k data members, then of the r parities."""
    spec = of.tables[index]
    return homes(of.servers, of.rings, spec.k, spec.r, index, stripe)


@functools.cache
def homes(servers: int, rings: int, k: int, r: int, index: int, stripe: int) -> list[int]:
    layout = Layout(servers=servers, k=k, r=r, rings=rings)
    first = int(layout.place([stripe * k], table=index)[0][0])
    base = first - first % layout.ring
    return [base + (first - base + m) % layout.ring for m in range(k + r)]
