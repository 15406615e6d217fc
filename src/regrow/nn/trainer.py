"""`regrow train` as a script: a model of the package on a data set of the package, written against `regrow.join()`.

There is no other way to train. Planning ahead, the steps of a worker that takes another's place, reports and the end
are the job's (`job.py`), and whatever this file does, somebody's own script can do in the same lines.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from regrow.config import TrainConfig
from regrow.core.job import OptimizerSpec
from regrow.data.batch import Batch, Dataset, Position, batches_after
from regrow.metrics import AUC, LogLoss
from regrow.nn.embedding import EmbeddingBagConfig, Features
from regrow.nn.jagged import KeyedJaggedTensor
from regrow.nn.job import Job
from regrow.nn.models import make_model


class Clicks(NamedTuple):
    """A batch of a data set as a script has it."""

    dense: Tensor
    features: KeyedJaggedTensor
    labels: Tensor
    position: Position  # where the next batch of the same worker starts

    @classmethod
    def from_batch(cls, batch: Batch, names: list[str]) -> Clicks:
        values = torch.from_numpy(batch.values)
        lengths = torch.ones(len(names) * len(batch), dtype=torch.int32)
        if batch.lengths is not None:
            lengths = torch.from_numpy(batch.lengths)
        features = KeyedJaggedTensor(names, values, lengths)
        return cls(torch.from_numpy(batch.dense), features, torch.from_numpy(batch.labels), batch.position)


class Clickstream:
    """A data set as something to loop over: it deals its batches to workers itself, from any step on."""

    def __init__(self, dataset: Dataset, *, batch: int, steps: int, names: list[str]) -> None:
        self._dataset = dataset
        self._batch = batch
        self._steps = steps
        self._names = names

    def count_steps(self) -> int:
        return self._steps

    def deal(self, *, worker: int, workers: int, done: int) -> tuple[Iterator[Clicks], int]:
        """The batches of a worker that has had `done` of them already, and the samples that were in those."""
        batches, samples = batches_after(self._dataset, batch=self._batch, worker=worker, workers=workers, done=done)
        return (Clicks.from_batch(batch, self._names) for batch in batches), samples


class Trainer:
    """One worker of `regrow train`."""

    def __init__(self, job: Job, config: TrainConfig, dataset: Dataset) -> None:
        shape = config.load_model()
        self.job, self.dataset = job, dataset
        self.device = torch.device(config.device)
        self._batch = config.batch
        self._names = [f"cat_{index}" for index in range(len(dataset.rows))]
        tables = [
            EmbeddingBagConfig(
                name=f"t_{name}", num_embeddings=rows, embedding_dim=shape.row_floats, feature_names=[name]
            )
            for name, rows in zip(self._names, dataset.rows, strict=True)
        ]
        rows_optimizer = OptimizerSpec(kind=config.optimizer, learning_rate=config.learning_rate)  # type: ignore[arg-type]
        self.rows = job.embedding_bag_collection(tables, optimizer=rows_optimizer)
        dense_optimizer = OptimizerSpec(
            kind=config.dense_optimizer,  # type: ignore[arg-type]
            learning_rate=config.dense_learning_rate,
        )
        self.model = make_model(shape, seed=config.seed).to(self.device)
        job.dense(self.model, dense_optimizer)

    def train(self, *, steps: int) -> None:
        """`steps` steps in all, or to the end of the data; every push is durable when this returns."""
        stream = Clickstream(self.dataset, batch=self._batch, steps=steps, names=self._names)
        for batch in self.job.loop(stream, features=_find_features):
            logits = self._predict(batch)
            labels = batch.labels.to(self.device)
            loss = functional.binary_cross_entropy_with_logits(logits, labels)
            self.job.score(logits, batch.labels)
            self.job.step(loss)

    def evaluate(self, tick: Callable[[int], None] = lambda samples: None) -> tuple[float, float, int]:
        """(AUC, log loss, samples) over the test rows, with the servers' current values."""
        samples = 0

        def predict(batch: Clicks) -> tuple[Tensor, Tensor]:
            nonlocal samples
            samples += len(batch.labels)
            tick(samples)
            return self._predict(batch), batch.labels

        batches = (Clicks.from_batch(batch, self._names) for batch in self.dataset.test_batches(batch=self._batch))
        modules = torch.nn.ModuleList([self.model, self.rows])
        found = self.job.evaluate(
            modules, batches, metrics=[AUC(), LogLoss()], predict=predict, features=_find_features
        )
        return found["auc"], found["logloss"], samples

    def _predict(self, batch: Clicks) -> Tensor:
        embeddings = self.rows(batch.features).values().to(self.device)
        logits: Tensor = self.model(batch.dense.to(self.device), embeddings)
        return logits


def _find_features(batch: Clicks) -> list[Features]:
    return [batch.features]
