"""How often would parities on disk have to be read? For docs/tiered-use.md: why `ec` does not go with rows on disk.

python tools/parity_reads.py [--rows-max N] [--k K] [--batches N]

The batches of `regrow bench tiered`, one after the other. A flush carries what 16 of them changed; who holds a parity
reads it, adds the change, and keeps it changed. What a cache misses follows from the stream alone (`Reuse`): of rows in
each batch, and of parities in each flush, where both caches have the same share of what there is.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from regrow.bench.tiered_figures import Reuse
from regrow.bench.tiered_live import MISS_RATE, Workload

FLUSH_PUSHES = 16  # the default of --flush-pushes
Rows = NDArray[np.int64]


def join_flushes(batches: Sequence[Rows]) -> Iterator[Rows]:
    """The distinct rows of so many batches after each other."""
    for first in range(0, len(batches) - FLUSH_PUSHES + 1, FLUSH_PUSHES):
        yield np.unique(np.concatenate(batches[first : first + FLUSH_PUSHES]))


def number_stripes(workload: Workload, k: int) -> tuple[Rows, int]:
    """Of each row the number of its stripe over all tables; and how many there are."""
    counts = [-(-rows // k) for rows in workload.tables]
    firsts = np.cumsum([0, *counts])
    stripes = [first + np.arange(rows) // k for first, rows in zip(firsts, workload.tables, strict=False)]
    return np.concatenate(stripes).astype(np.int64), int(firsts[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows-max", type=int, default=200_000)
    parser.add_argument("--k", type=int, default=4)
    parser.add_argument("--batches", type=int, default=1600)
    options = parser.parse_args()
    workload = Workload(rows_max=options.rows_max)
    batches = list(workload.list_batches(options.batches))
    rows = Reuse(batches, rows=workload.rows)
    cache_rows = rows.cache_rows(MISS_RATE) or workload.rows // 20
    share = cache_rows / workload.rows
    stripe_of, stripes = number_stripes(workload, options.k)
    flushes = list(join_flushes(batches))
    touched = [np.unique(stripe_of[flush]) for flush in flushes]
    parities = Reuse(touched, rows=stripes)
    misses = parities.miss_rate(share * stripes)
    samples = FLUSH_PUSHES * workload.batch
    flush_rows = float(np.mean([len(each) for each in flushes[len(flushes) // 2 :]]))
    print(f"{workload.rows:,} rows, {stripes:,} stripes of {options.k}; a cache for {share:.1%} of each")
    print(f"rows: {rows.rows_per_batch:,.0f} in a batch, {MISS_RATE:.0%} of them are read")
    print(
        f"a flush of {FLUSH_PUSHES} batches: {flush_rows:,.0f} rows, {parities.rows_per_batch:,.0f} parities of each r"
    )
    if misses is None:
        print("parities: more than was looked at; more --batches")
        return
    print(f"parities: {misses:.0%} of them are read, {misses * parities.rows_per_batch:,.0f} a flush")
    own = MISS_RATE * rows.rows_per_batch / workload.batch
    more = misses * parities.rows_per_batch / samples
    print(f"reads for each sample: {own:.2f} for rows, {more:.2f} more for the parities of each r")


if __name__ == "__main__":
    main()
