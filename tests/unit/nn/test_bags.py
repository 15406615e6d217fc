"""Goal: a DLRM trains on bags of any length, empty ones too, as PyTorch would with `nn.EmbeddingBag`.

Method: a CSV file with columns of many values and gaps, a few steps of plain SGD on `InProcessCluster`, and the same
steps in PyTorch from the same initial values; then the rows, the network and the evaluation are compared.
"""

from __future__ import annotations

import itertools
import random
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.nn import functional

import regrow
from regrow.config import TrainConfig
from regrow.data.batch import Batch
from regrow.data.catalog import check_fit, open_dataset
from regrow.metrics import auc, logloss
from regrow.nn.dlrm import DLRM
from regrow.nn.job import Job
from regrow.nn.seat import ClusterSeat
from regrow.nn.trainer import Trainer

STEPS = 6
ROWS = [30, 20, 4]


def make_config(folder: Path, mode: str) -> TrainConfig:
    chance = random.Random(4)
    words = ["", "a", "a|b", "c|c|b", "nowhere"]
    lines = [
        f"{chance.randrange(2)},{chance.choice(['', '1', '2.5'])},{chance.choice(['', '3', '17'])},"
        f"{'|'.join(str(chance.randrange(50)) for _ in range(chance.randrange(5)))},{chance.choice(words)}"
        for _ in range(80)
    ]
    (folder / "x.csv").write_text("\n".join(["y,age,user,items,genres", *lines]) + "\n")
    (folder / "s.toml").write_text(
        '[label]\ncolumn = "y"\n[[dense]]\ncolumn = "age"\n'
        '[[categorical]]\ncolumn = "user"\nid = "int"\nrows = 30\n'
        '[[categorical]]\ncolumn = "items"\nid = "hash"\nrows = 20\nmany = true\n'
        '[[categorical]]\ncolumn = "genres"\nid = "vocabulary"\nwords = ["a", "b", "c"]\nmany = true\n'
    )
    return TrainConfig(
        data=f"csv:{folder}/x.csv",
        schema=f"{folder}/s.toml",
        model="tiny",
        mode=mode,
        batch=8,
        steps=STEPS,
        servers=3,
        workers=1,
        prefetch=0,
        train_rows=60,
        **{"protection": "ec", "k": 2, "optimizer": "sgd", "dense_optimizer": "sgd"},
        **{"learning_rate": 0.5, "dense_learning_rate": 0.1},
    )


class Plain:
    """The same model in PyTorch alone."""

    def __init__(self, config: TrainConfig, tables: list[np.ndarray]) -> None:
        self.network = DLRM.from_config(check_fit(config), seed=config.seed)
        self.bags = [
            torch.nn.EmbeddingBag(*table.shape, mode="sum", _weight=torch.from_numpy(table.copy())) for table in tables
        ]

    def run(self, batch: Batch) -> torch.Tensor:
        assert batch.lengths is not None
        lengths = torch.from_numpy(batch.lengths).view(len(self.bags), len(batch))
        values = torch.from_numpy(batch.values).split(lengths.sum(dim=1).tolist())
        pooled = [
            bag(ids, functional.pad(sizes.cumsum(0), (1, 0))[:-1])
            for bag, ids, sizes in zip(self.bags, values, lengths, strict=True)
        ]
        logits: torch.Tensor = self.network(torch.from_numpy(batch.dense), torch.cat(pooled, dim=1))
        return logits

    def step(self, batch: Batch) -> None:
        loss = functional.binary_cross_entropy_with_logits(self.run(batch), torch.from_numpy(batch.labels))
        loss.backward()
        with torch.no_grad():
            for rate, parameters in ((0.5, [bag.weight for bag in self.bags]), (0.1, self.network.parameters())):
                for parameter in parameters:
                    parameter -= rate * parameter.grad
                    parameter.grad = None


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_bags_train_as_in_pytorch(tmp_path: Path, mode: str) -> None:
    config = make_config(tmp_path, mode)
    dataset = open_dataset(config)
    seat = ClusterSeat(regrow.InProcessCluster(servers=3), mode=mode, prefetch=0, protection=config.code)
    trainer = Trainer(Job(seat), config, dataset)
    client = trainer.job.client

    def read_tables() -> list[np.ndarray]:
        return [client.records(index, 0, rows)[:, :8] for index, rows in enumerate(ROWS)]

    plain = Plain(config, read_tables())
    batches = list(itertools.islice(dataset.train_batches(batch=8, worker=0, workers=1), STEPS))
    sizes = {size for batch in batches if batch.lengths is not None for size in batch.lengths}
    assert {0, 1, 2, 3, 4} <= sizes, "bags of every kind"
    trainer.train(steps=STEPS)
    for batch in batches:
        plain.step(batch)
    for found, bag in zip(read_tables(), plain.bags, strict=True):
        np.testing.assert_allclose(found, bag.weight.detach().numpy(), rtol=1e-4, atol=1e-6)
    tests = list(dataset.test_batches(batch=8))
    with torch.no_grad():
        scores = np.concatenate([plain.run(batch).numpy() for batch in tests])
    labels = np.concatenate([batch.labels for batch in tests])
    assert len(labels) == 20
    wanted = (float(auc(labels, scores)), float(logloss(labels, scores)), 20)
    assert trainer.evaluate() == pytest.approx(wanted, rel=1e-4)
