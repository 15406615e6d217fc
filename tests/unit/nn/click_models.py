"""Tiny click models on servers inside this process, and the same in plain PyTorch: for tests of jobs."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor, nn

import regrow
from regrow.core.job import JobSpec
from regrow.nn.job import Job
from regrow.nn.seat import AloneSeat
from regrow.runtime.client import Client

ROWS, DIM, BATCH = 40, 4, 8
SGD = regrow.OptimizerSpec(kind="sgd", learning_rate=0.5)


@dataclasses.dataclass
class Clicks:
    features: regrow.KeyedJaggedTensor
    labels: Tensor


def make_batches(count: int, *, names: tuple[str, ...] = ("user", "item"), seed: int = 0) -> list[Clicks]:
    """Bags of nought to three ids."""
    g = torch.Generator().manual_seed(seed)
    batches = []
    for _ in range(count):
        lengths = torch.randint(0, 4, (len(names) * BATCH,), generator=g, dtype=torch.int32)
        values = torch.randint(0, ROWS, (int(lengths.sum()),), generator=g)
        labels = torch.randint(0, 2, (BATCH,), generator=g).float()
        batches.append(Clicks(regrow.KeyedJaggedTensor(list(names), values, lengths), labels))
    return batches


def make_table(name: str, *features: str, dim: int = DIM, mean: bool = False) -> regrow.EmbeddingBagConfig:
    pooling = regrow.PoolingType.MEAN if mean else regrow.PoolingType.SUM
    return regrow.EmbeddingBagConfig(
        num_embeddings=ROWS, embedding_dim=dim, name=name, feature_names=list(features), pooling=pooling
    )


class Model(nn.Module):
    """Logits of whatever the collections give."""

    def __init__(self, *collections: nn.Module, width: int = 2 * DIM, norm: bool = False) -> None:
        super().__init__()
        self.collections = nn.ModuleList(collections)
        self.norm = nn.BatchNorm1d(width) if norm else nn.Identity()
        self.top = nn.Linear(width, 1)

    def forward(self, features: Any) -> Tensor:
        pooled = torch.cat([collection(features).values() for collection in self.collections], dim=1)
        return self.top(self.norm(pooled))[:, 0]


class Bags(nn.Module):
    """The same tables as plain modules. What they give is called as a collection gives it."""

    def __init__(self, tables: dict[str, Tensor], features: list[tuple[str, str, str]]) -> None:
        super().__init__()
        self.tables = nn.ParameterDict({name: nn.Parameter(value.clone()) for name, value in tables.items()})
        self.features = features  # (feature, table, mode)

    def forward(self, features: Any) -> Any:
        lengths = features.lengths().view(len(features.keys()), -1)
        parts = features.values().split(lengths.sum(1).tolist())
        pooled = []
        for feature, table, mode in self.features:
            index = features.keys().index(feature)
            offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths[index].cumsum(0)[:-1]])
            pooled.append(nn.functional.embedding_bag(parts[index], self.tables[table], offsets, mode=mode))
        return regrow.KeyedTensor([f for f, _, _ in self.features], [p.shape[1] for p in pooled], torch.cat(pooled, 1))


def loss_of(model: nn.Module, batch: Clicks) -> Tensor:
    return nn.functional.binary_cross_entropy_with_logits(model(batch.features), batch.labels)


def train(job: Job, model: nn.Module, batches: Any, **options: Any) -> list[float]:
    losses = []
    for batch in job.loop(batches, **options):
        loss = loss_of(model, batch)
        job.step(loss)
        losses.append(loss.item())
    return losses


def make_job(*tables: regrow.EmbeddingBagConfig, **options: Any) -> tuple[Job, nn.Module]:
    job = Job(AloneSeat(seed=3))
    chosen = tables or (make_table("t_user", "user"), make_table("t_item", "item"))
    model = job.dense(Model(job.embedding_bag_collection(chosen, optimizer=SGD), **options), SGD)
    return job, model


def train_plainly(job: Job, model: nn.Module, features: list[tuple[str, str, str]], **options: Any) -> tuple[Any, Any]:
    """A plain model with the job's first values, and its optimizer."""
    names = list(dict.fromkeys(table for _, table, _ in features))
    bags = Bags({name: job.read_weights(name) for name in names}, features)
    plain = Model(bags, **options)
    state = {key: value for key, value in model.state_dict().items() if "embedding_bags" not in key}
    plain.load_state_dict(state, strict=False)
    return plain, torch.optim.SGD(plain.parameters(), lr=0.5)


def step_plainly(plain: nn.Module, optimizer: Any, batch: Clicks, clip: float | None = None) -> float:
    optimizer.zero_grad()
    loss = loss_of(plain, batch)
    loss.backward()
    if clip is not None:
        nn.utils.clip_grad_norm_(plain.parameters(), clip)
    optimizer.step()
    return loss.item()


CASES: dict[str, tuple[list[regrow.EmbeddingBagConfig], list[tuple[str, str, str]], dict[str, Any]]] = {
    "sums": (
        [make_table("t_user", "user"), make_table("t_item", "item")],
        [("user", "t_user", "sum"), ("item", "t_item", "sum")],
        {},
    ),
    "means": (
        [make_table("t_user", "user", mean=True), make_table("t_item", "item")],
        [("user", "t_user", "mean"), ("item", "t_item", "sum")],
        {},
    ),
    "a table that features share": (
        [make_table("t_both", "user", "item")],
        [("user", "t_both", "sum"), ("item", "t_both", "sum")],
        {},
    ),
    "a feature in two tables": (
        [make_table("t_a", "user"), make_table("t_b", "user", dim=8)],
        [("user", "t_a", "sum"), ("user", "t_b", "sum")],
        {"width": 12},
    ),
    "averages": (
        [make_table("t_user", "user"), make_table("t_item", "item")],
        [("user", "t_user", "sum"), ("item", "t_item", "sum")],
        {"norm": True},
    ),
}


class SharedSeat(AloneSeat):
    """One of several workers of a cluster in this process."""

    def __init__(self, cluster: regrow.InProcessCluster, *, worker: int, workers: int, **options: Any) -> None:
        super().__init__(servers=cluster.server_count, **options)
        self.worker, self.workers = worker, workers
        self._cluster = cluster

    def connect(self, job: JobSpec) -> tuple[Client, bool]:
        return self._cluster.client(job, worker=self.worker), False


def join_cluster(cluster: regrow.InProcessCluster, **options: Any) -> tuple[Job, nn.Module]:
    job = Job(SharedSeat(cluster, **options))
    tables = (make_table("t_user", "user"), make_table("t_item", "item"))
    return job, job.dense(Model(job.embedding_bag_collection(tables, optimizer=SGD)), SGD)
