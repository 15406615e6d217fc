"""Defaults that depend on the machine, or on a file: what `TrainConfig` fills in where nothing was said."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

BATCH_DEFAULT, BATCH_SMALL = 2048, 128
STEPS_PER_EPOCH_WANTED = 400
CRITEO_ROW_BYTES, CRITEO_GZ_ROW_BYTES = 241, 88  # mean of the public file


def choose_batch(given: Mapping[str, Any]) -> int:
    """The largest power of two up to 2048 that leaves every worker about 400 steps in an epoch, but at least 128."""
    kind, _, path = str(given["data"]).partition(":")
    workers = given["workers"]
    if kind != "criteo" or not isinstance(workers, int) or workers < 1:
        return BATCH_DEFAULT
    rows = given["train_rows"]
    if not isinstance(rows, int):
        try:
            rows = os.path.getsize(path) // (CRITEO_GZ_ROW_BYTES if path.endswith(".gz") else CRITEO_ROW_BYTES)
        except OSError:
            return BATCH_DEFAULT  # that the file is missing will be said elsewhere
    fitting = max(1, rows // (workers * STEPS_PER_EPOCH_WANTED))
    return max(BATCH_SMALL, min(BATCH_DEFAULT, 1 << (fitting.bit_length() - 1)))


def cores_usable() -> int:
    """Cores this process may run on, which in a container can be fewer than the machine has."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
