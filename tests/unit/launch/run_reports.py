"""Reports of a small run, for tests of what is made of them."""

from __future__ import annotations

from typing import Any

from regrow.config import TrainConfig
from regrow.launch.reports import Listening, Progress, Ready, Recovered
from regrow.launch.status import RunStatus

BINS = 64
LISTENING = Listening(address="unix:x")


def progress(
    step: int, samples: int, *, loss: float | None = 0.5, positives: int = 1, negatives: int = 3, **more: int
) -> Progress:
    positive, negative = [0] * BINS, [0] * BINS
    positive[40], negative[20] = positives, negatives
    return Progress(step=step, samples=samples, loss=loss, hist_pos=positive, hist_neg=negative, **more)  # type: ignore[arg-type]


def recovered(rows: int, bytes: int, faults: int, seconds: float) -> Recovered:
    return Recovered(rows_total=rows, rows_back=rows, bytes=bytes, faults=faults, seconds=seconds)


def started(**options: Any) -> RunStatus:
    """Two servers and two workers in training, at 10 seconds."""
    run = RunStatus(TrainConfig(servers=2, workers=2, **{"steps": 100, **options}), started_at=0.0)
    for id in range(2):
        run.receive("server", id, LISTENING, 1.0)
        run.receive("server", id, Ready(rows=5, bytes=1 << 30), 2.0)
    run.enter("loading", 1.0)
    run.enter("training", 10.0)
    return run
