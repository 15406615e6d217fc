"""What runs of benchmarks report, with known answers, and a parity that is read wrong."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from regrow.bench import recovery
from regrow.runtime.client import Client


def overhead_runs() -> list[dict[str, Any]]:
    rates = {"none": (100.0, 200.0), "k4": (98.0, 190.0), "k2": (90.0, 200.0), "k4_flush1": (50.0, None)}
    flushed = {"none": 0.0, "k4": 1000.0, "k2": 900.0, "k4_flush1": 4000.0}
    return [
        {
            "kind": "run",
            "model": "kaggle",
            "variant": name,
            "round": turn,
            "samples_per_second": rate,
            "cpu_seconds_per_1000_samples": 2.0 if name == "none" else 2.1,
            "table_bytes": 100 if name == "none" else 126,
            "memory_overhead": 0.0 if name == "none" else 0.26,
            "flush_bytes_per_push": flushed[name],
            "redo_bytes_peak": 7,
        }
        for name, both in rates.items()
        for turn, rate in enumerate(both)
        if rate is not None
    ]


def trace_of(*workers: list[tuple[float, int]]) -> recovery.Trace:
    trace = recovery.Trace()
    for index, seen in enumerate(workers):
        # The last report comes after the last push is durable and is left out.
        trace.reports[index] = [*seen, (seen[-1][0] + 100.0, seen[-1][1])]
    return trace


def plant_wrong_parity(client: Client, table: int, monkeypatch: pytest.MonkeyPatch, times: int = 1 << 30) -> None:
    """One bit of one parity of the table is read wrong, so often."""
    parities = client.parities
    left = [times]

    def read(index: int, server: int, slot_first: int, slot_count: int) -> Any:
        found = parities(index, server, slot_first, slot_count).copy()
        if (index, server, slot_first) == (table, 2, 0) and left[0] > 0:
            left[0] -= 1
            found.view(np.uint8).reshape(-1)[0] ^= 4
        return found

    monkeypatch.setattr(client, "parities", read)
