"""What a worker trains on: batches, and the protocol every data set follows.

Global batch b goes to worker b % workers, and its content depends on the data set and b alone: a worker that
restarts, or one that replaces it, continues from a recorded position and sees what it would have seen.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from regrow.errors import UserError

# A place in a data set, JSON-able. "batch" counts global batches over all epochs; the other keys are the data
# set's own.
Position = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """B samples of F features. `len(batch)` is B."""

    # [B, dense_features]
    dense: NDArray[np.float32]
    # The ids, feature-major: all of feature 0, then all of feature 1, ...; within a feature in sample order.
    values: NDArray[np.int64]
    # Ids per bag, [F * B], feature-major; None when every bag has exactly one id.
    lengths: NDArray[np.int32] | None
    # [B], 0 or 1
    labels: NDArray[np.float32]
    # Where the next batch of the same worker starts; pass it as `start` to go on after this one.
    position: Position

    def __len__(self) -> int:
        return len(self.labels)


class Dataset(Protocol):
    """Training batches that can start anywhere, and test batches that nobody trains on."""

    # Rows of each table; feature f looks up in table f.
    rows: list[int]
    dense_features: int
    epochs: int
    # True: batches without a good line are left out, so that a worker's n-th batch is not known beforehand.
    skip_bad_lines: bool

    @property
    def train_rows(self) -> int:
        """Training samples in one epoch."""
        ...

    def train_batches(self, *, batch: int, worker: int, workers: int, start: Position | None = None) -> Iterator[Batch]:
        """Batches worker, worker + workers, ... ; from `start` on when given."""
        ...

    def test_batches(self, *, batch: int) -> Iterator[Batch]: ...

    def train_rows_total(self) -> int | None:
        """Training samples over all epochs; None when unknown."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class EpochPlan:
    """Which samples are in which global batch. No batch spans two epochs: the last of each may be short."""

    rows: int  # per epoch
    epochs: int
    batch: int

    @property
    def batches_per_epoch(self) -> int:
        return -(-self.rows // self.batch)

    @property
    def batch_count(self) -> int:
        return self.batches_per_epoch * self.epochs

    def span(self, index: int) -> tuple[int, int, int]:
        """(epoch, first row, row count) of global batch `index`; past the end: the end of the last epoch."""
        epoch, within = divmod(index, self.batches_per_epoch)
        if index >= self.batch_count:
            return self.epochs, 0, 0
        first = within * self.batch
        return epoch, first, min(self.batch, self.rows - first)


def batches_after(dataset: Dataset, *, batch: int, worker: int, workers: int, done: int) -> tuple[Iterator[Batch], int]:
    """The batches of a worker that has had `done` of them already, and the samples that were in those."""
    if done == 0:
        return dataset.train_batches(batch=batch, worker=worker, workers=workers), 0
    if dataset.skip_bad_lines:
        # Nobody knows which batches came to nothing: count them again.
        batches = dataset.train_batches(batch=batch, worker=worker, workers=workers)
        return batches, sum(len(passed) for passed in itertools.islice(batches, done))
    plan = make_plan(rows=dataset.train_rows, epochs=dataset.epochs, batch=batch, worker=worker, workers=workers)
    index = worker + done * workers
    epoch, line, _ = plan.span(index)
    # Without an offset: a file's lines are counted up to there, and not looked at.
    start = {"epoch": epoch, "batch": index, "line": line}
    had = np.arange(worker, min(index, plan.batch_count), workers, dtype=np.int64) % plan.batches_per_epoch
    samples = int(np.minimum(batch, plan.rows - had * batch).sum())
    return dataset.train_batches(batch=batch, worker=worker, workers=workers, start=start), samples


def make_plan(*, rows: int, epochs: int, batch: int, worker: int, workers: int) -> EpochPlan:
    """The plan of an epoch, or an error that says which number is wrong."""
    if batch < 1:
        raise ValueError(f"batch must be at least 1, not {batch}")
    if workers < 1 or not 0 <= worker < workers:
        raise ValueError(f"worker {worker} of {workers} workers does not exist")
    if batch > rows:
        raise UserError(f"batch {batch} is larger than the training data, {rows} rows; choose a smaller batch")
    return EpochPlan(rows=rows, epochs=epochs, batch=batch)


def start_index(start: Position | None, *, plan: EpochPlan, worker: int, workers: int) -> int:
    """The global batch a worker starts with, after checking that the position was made for this plan."""
    if start is None:
        return worker
    try:
        index, epoch, line = int(start["batch"]), int(start["epoch"]), int(start["line"])
    except (KeyError, TypeError, ValueError) as error:
        raise UserError(f"position {start!r} needs the integers epoch, batch and line") from error
    if index < 0 or index % workers != worker:
        raise UserError(f"position {start!r} is not one of worker {worker} of {workers} workers")
    if index < plan.batch_count and plan.span(index)[:2] != (epoch, line):
        raise UserError(
            f"position {start!r} was made with another batch size or training set: "
            f"batch {index} starts at epoch {plan.span(index)[0]}, line {plan.span(index)[1]} here"
        )
    return index
