"""Whole trainings in one process and one thread, with partial recovery and as many failures as wanted.

What `regrow bench cpr` learns about accuracy needs hundreds of runs that differ in their failures and in nothing else.
Real processes cost seconds to start, and prove nothing more: coordinator, servers and sessions are the same here
(`InProcessCluster`). Training is synchronous with one worker, so two runs of a seed are equal to the bit until the
first failure; the difference of their AUCs is what the failures did, all of it and nothing else.

Servers that die together are killed one after the other between two steps. None of their rows without copies come from
another server, so that is the same, and any number of them can be lost with one copy of the dense parameters.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from regrow import _kernels
from regrow.config import TrainConfig
from regrow.data.batch import Batch, Dataset
from regrow.data.catalog import open_dataset, table_rows
from regrow.launch.losses import Losses
from regrow.launch.orders import OwnSaving
from regrow.launch.reports import ServerCounters
from regrow.nn.job import Job
from regrow.nn.seat import ClusterSeat
from regrow.nn.trainer import Trainer
from regrow.runtime.inprocess import InProcessCluster
from regrow.runtime.priorities import find_largest

PART_SECONDS_MAX = 540.0  # of a part that repeats runs; its first run may take longer


@dataclass(frozen=True, slots=True, kw_only=True)
class Strike:
    """These servers die when this step was pushed, so the step before it is the last that all have."""

    step: int
    servers: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Saves:
    """A server saves all its rows every so many steps, or a share of them as much more often."""

    every_steps: int
    priority: str = "none"
    share: float = 1.0
    tables: tuple[str, ...] = ()

    def order(self, seed: int) -> OwnSaving:
        share = 1.0 if self.priority == "none" else self.share
        steps = max(1, round(self.every_steps * share))
        return OwnSaving(every_steps=steps, priority=self.priority, share=share, tables=self.tables, seed=seed)


def name_largest(config: TrainConfig) -> tuple[str, ...]:
    """The tables of a model that have priorities in a run of it."""
    return tuple(f"t_cat_{index}" for index in find_largest(table_rows(config.load_model())))


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What a run came to. `pls` is (3) of planner/overhead.py with saves of all rows every T; `pls_counted` is what a
    run reports, from the marks of the newest save, whatever was in that."""

    auc: float
    logloss: float
    test_samples: int
    digest: str
    pls: float
    pls_counted: float
    updates: int
    updates_lost: int
    saves: int
    rows_saved: int

    @property
    def share_lost(self) -> float:
        """The true share of updates that are gone."""
        return self.updates_lost / self.updates if self.updates else 0.0


@dataclass(slots=True)
class KeptDataset:
    """The batches of a data set, made once for all runs that train on them."""

    source: Dataset
    batch: int
    steps: int
    rows: list[int] = field(init=False)
    dense_features: int = field(init=False)
    epochs: int = 1
    skip_bad_lines: bool = False

    def __post_init__(self) -> None:
        self.rows, self.dense_features = self.source.rows, self.source.dense_features
        batches = self.source.train_batches(batch=self.batch, worker=0, workers=1)
        self._train = [batch for _, batch in zip(range(self.steps), batches, strict=False)]
        self._test = list(self.source.test_batches(batch=TEST_BATCH))
        self.steps = len(self._train)

    _train: list[Batch] = field(init=False)
    _test: list[Batch] = field(init=False)

    @property
    def train_rows(self) -> int:
        return sum(map(len, self._train))

    def train_rows_total(self) -> int:
        return self.train_rows

    def train_batches(self, *, batch: int, worker: int, workers: int, start: Any = None) -> Iterator[Batch]:
        assert (batch, worker, workers, start) == (self.batch, 0, 1, None)
        return iter(self._train)

    def test_batches(self, *, batch: int) -> Iterator[Batch]:
        return iter(self._test)


TEST_BATCH = 4096


def make_config(**options: Any) -> TrainConfig:
    """Synchronous, one worker, partial recovery; saves are kept in memory, so nothing is written there."""
    fixed = {"mode": "sync", "workers": 1, "protection": "partial", "ckpt": "memory", "digest": False}
    return TrainConfig(**{**fixed, **options})


def keep_dataset(config: TrainConfig) -> KeptDataset:
    assert config.steps is not None
    return KeptDataset(open_dataset(config), config.batch, config.steps)


class Allowance:
    """So that a part ends within ten minutes on any machine: runs are repeated only while another is likely to fit."""

    def __init__(self, seconds: float = PART_SECONDS_MAX, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock, self._began, self._seconds = clock, clock(), seconds

    def allows(self, *, done: int) -> bool:
        """Whether one more like those that are done, on average, ends in time. The first always does."""
        passed = self._clock() - self._began
        return not done or passed * (done + 1) / done <= self._seconds


def train(
    config: TrainConfig, dataset: KeptDataset, *, saves: Saves, strikes: Sequence[Strike] = (), digest: bool = False
) -> Outcome:
    # One thread: steps are short, and threads that wait for each other on a busy machine take longer than they save.
    torch.set_num_threads(1)
    _kernels.set_threads(1)
    cluster = InProcessCluster(servers=config.servers, saving=saves.order(config.seed))
    by_step = {strike.step: strike for strike in strikes}
    assert len(by_step) == len(strikes), "one strike at a step"

    def strike(progress: Any) -> None:
        for server in by_step[progress.step].servers if progress.step in by_step else ():
            cluster.kill(server)
            cluster.settle()
        by_step.pop(progress.step, None)  # a report may come twice

    seat = ClusterSeat(
        cluster,
        seed=config.seed,
        mode="sync",
        protection=config.code,
        report=strike,
        report_seconds=math.inf,
        report_steps=frozenset(by_step) | {dataset.steps},
    )
    trainer = Trainer(Job(seat), config, dataset)
    trainer.train(steps=dataset.steps)
    assert not by_step, f"nobody came to step {min(by_step)}"
    cluster.settle()
    auc, logloss, samples = trainer.evaluate()
    losses = count_losses(cluster, samples_total=dataset.train_rows_total(), batch=config.batch)
    return Outcome(
        auc=auc,
        logloss=logloss,
        test_samples=samples,
        digest=trainer.job.client.digest() if digest else "",
        pls=sum(count_pls(strike, saves, steps=dataset.steps, servers=config.servers) for strike in strikes),
        pls_counted=losses.pls or 0.0,
        updates=sum(server.updates for server in losses.by_server),
        updates_lost=losses.updates_lost,
        saves=sum(kept.count for kept in cluster.saves),
        rows_saved=sum(kept.rows for kept in cluster.saves),
    )


def count_pls(strike: Strike, saves: Saves, *, steps: int, servers: int) -> float:
    """(3): steps since the last multiple of T, of all, in as many parts as there are servers for each that died."""
    age = (strike.step - 1) % saves.every_steps
    return age / steps * len(strike.servers) / servers


def count_losses(cluster: InProcessCluster, *, samples_total: int, batch: int) -> Losses:
    """As the launcher of a run counts them."""
    losses = Losses(servers=cluster.server_count, samples_per_push=batch, is_sync=True)
    for server, joined in cluster.joins:
        losses.note_joined(server, joined, samples_total)
    for index, door in enumerate(cluster.servers):
        counters = ServerCounters(bytes_in=0, bytes_out=0, kept_bytes=0, **door.report())
        losses.note_counters(index, counters)
    return losses
