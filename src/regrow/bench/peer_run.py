"""What the peers share: batches made ahead, the parts of a step timed, a rate after a warm-up, and how they answer.

A peer is a whole training run in one process, started as `python -m regrow.bench.peer` or `...peer_torch` with its
settings as JSON on stdin and its figures as JSON on stdout. Which tables and optimizers it has is its own business.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import sys
import threading
import time
from collections.abc import Callable, Generator
from typing import Any, Protocol

import numpy as np
import torch

from regrow.bench import common
from regrow.data.batch import Batch, Dataset

DATA_AHEAD_BATCHES = 4  # too few: the trainer waits for data; too many: memory
STEPS_ENDLESS = 1 << 30


class Timer:
    """Seconds per named part of a step."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._last = time.perf_counter()

    def total(self) -> float:
        return sum(self.seconds.values())

    def lap(self, name: str) -> None:
        now = time.perf_counter()
        self.seconds[name] = self.seconds.get(name, 0.0) + now - self._last
        self._last = now


class Trainer(Protocol):
    """A model and its tables in one process."""

    batch: int
    timer: Timer

    def prepare(self, batch: Batch) -> Any:
        """The ids of a batch in the form its tables take. Called in another thread, ahead of the step."""

    def step(self, batch: Batch, prepared: Any) -> float:
        """Forward, backward and all updates; the loss."""


def dense_optimizer(kind: str, parameters: list[Any], learning_rate: float) -> torch.optim.Optimizer:
    """Torch's own, with the formulas of ours; fused is the fastest of its variants on CPU."""
    if kind == "sgd":
        return torch.optim.SGD(parameters, lr=learning_rate, fused=True)
    if kind == "momentum":
        return torch.optim.SGD(parameters, lr=learning_rate, momentum=0.9, fused=True)
    if kind == "adagrad":
        return torch.optim.Adagrad(parameters, lr=learning_rate, eps=1e-8, fused=True)
    if kind == "adam":
        return torch.optim.Adam(parameters, lr=learning_rate, fused=True)
    raise ValueError(f"unknown dense optimizer {kind!r}")


def batches_ahead(dataset: Dataset, trainer: Trainer) -> Generator[tuple[Batch, Any], None, None]:
    """Batches made in a thread of their own, ready when they are wanted."""
    ready: queue.Queue[Any] = queue.Queue(maxsize=DATA_AHEAD_BATCHES)
    wanted = threading.Event()
    wanted.set()

    def make() -> None:
        for data in dataset.train_batches(batch=trainer.batch, worker=0, workers=1):
            item = (data, trainer.prepare(data))
            while wanted.is_set():
                with contextlib.suppress(queue.Full):
                    ready.put(item, timeout=0.1)
                    break
            else:
                return

    maker = threading.Thread(target=make, daemon=True)
    maker.start()
    try:
        while True:
            yield ready.get(timeout=60)
    finally:
        wanted.clear()
        maker.join()


def measure_rate(
    trainer: Trainer,
    dataset: Dataset,
    *,
    warmup_steps: int,
    steps: int = STEPS_ENDLESS,
    seconds_max: float | None = None,
) -> dict[str, Any]:
    """Figures of the steps after the warm-up, until there were enough or the time is over."""
    batches = batches_ahead(dataset, trainer)
    done, losses, samples = 0, 0.0, 0
    step_seconds: list[float] = []
    with contextlib.closing(batches):
        for batch, prepared in batches:
            if done == warmup_steps:
                trainer.timer = Timer()
                step_seconds.clear()
                before = common.Occupancy.read(time.process_time())
                losses, samples = 0.0, 0
            begun = time.perf_counter()
            losses += trainer.step(batch, prepared) * len(batch)
            step_seconds.append(time.perf_counter() - begun)
            samples += len(batch)
            done += 1
            measured = done - warmup_steps
            if measured < 1:
                continue
            if measured >= steps or (seconds_max is not None and trainer.timer.total() > seconds_max):
                break
        after = common.Occupancy.read(time.process_time())
    seconds = after.at - before.at
    cpu_seconds = after.own_seconds - before.own_seconds
    parts = trainer.timer.seconds
    return {
        "samples_per_second": samples / seconds,
        # What the quickest tenth of its steps reach: those that nothing else interrupted.
        "samples_per_second_unhindered": trainer.batch / float(np.quantile(step_seconds, 0.1)),
        "cpu_seconds_per_1000_samples": cpu_seconds * 1000 / samples,
        "samples": samples,
        "steps": done - warmup_steps,
        "seconds": seconds,
        "loss": losses / samples,
        "others_cores": common.round_known(before.others_cores(after), 2),
        "step_milliseconds": {name: value * 1000 / (done - warmup_steps) for name, value in parts.items()},
    }


def answer(
    train: Callable[[dict[str, Any]], dict[str, Any]], *, find_missing: Callable[[], str | None] = lambda: None
) -> int:
    """One JSON object in, one out. Whatever a library prints goes to stderr. `find_missing`: why it cannot be run."""
    stdout = os.dup(1)
    os.dup2(2, 1)
    settings = json.load(sys.stdin)
    missing = find_missing()
    result = {"error": missing} if missing else train(settings)
    with os.fdopen(stdout, "w", encoding="utf-8") as stream:
        json.dump(result, stream)
        stream.write("\n")
    return 1 if missing else 0
