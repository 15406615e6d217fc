"""Goal: several batches that are one step are trained as one large batch is: one pull, one push, the mean of their
gradients; and whoever takes a worker's place goes on at a whole step.

Method: the same samples in small batches with `accumulate` and in large ones without, on servers inside this process,
with an optimizer for which two small updates are not one large one. Bags have nought to three ids.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import regrow
from regrow.errors import UserError
from regrow.nn.job import Job
from regrow.nn.seat import AloneSeat, ClusterSeat

ROWS, DIM, BATCH = 30, 4, 4
ADAGRAD = regrow.OptimizerSpec(kind="adagrad", learning_rate=0.3)


class Batch:
    def __init__(self, lengths: Tensor, values: list[Tensor], labels: Tensor) -> None:
        self.features = regrow.KeyedJaggedTensor(["user", "item"], torch.cat(values), lengths.flatten())
        self.labels = labels


def make_batches(steps: int, parts: int) -> tuple[list[Batch], list[Batch]]:
    """The same samples in small batches, and in large ones."""
    g = torch.Generator().manual_seed(4)
    small, large = [], []
    for _ in range(steps):
        pieces = []
        for _ in range(parts):
            lengths = torch.randint(0, 4, (2, BATCH), generator=g, dtype=torch.int32)
            values = [torch.randint(0, ROWS, (int(n),), generator=g) for n in lengths.sum(1)]
            pieces.append((lengths, values, torch.randint(0, 2, (BATCH,), generator=g).float()))
        small += [Batch(*piece) for piece in pieces]
        values = [torch.cat([piece[1][feature] for piece in pieces]) for feature in range(2)]
        large.append(
            Batch(torch.cat([p[0] for p in pieces], 1), values, torch.cat([p[2] for p in pieces])),
        )
    return small, large


class Model(nn.Module):
    def __init__(self, bags: nn.Module, items: nn.Module) -> None:
        super().__init__()
        self.bags, self.items = bags, items
        self.top = nn.Linear(2 * DIM, 1)

    def forward(self, features: Any) -> Tensor:
        last = self.items(features)["item"].to_padded_dense(3).amax(1)
        return self.top(torch.cat([self.bags(features).values(), last], 1))[:, 0]


def make(seat: Any) -> tuple[Job, nn.Module]:
    job = Job(seat)
    sizes: dict[str, Any] = {"num_embeddings": ROWS, "embedding_dim": DIM}
    bags = [regrow.EmbeddingBagConfig(name="t_user", feature_names=["user"], **sizes)]
    items = [regrow.EmbeddingConfig(name="t_item", feature_names=["item"], **sizes)]
    model = Model(
        job.embedding_bag_collection(bags, optimizer=ADAGRAD), job.embedding_collection(items, optimizer=ADAGRAD)
    )
    return job, job.dense(model, ADAGRAD)


def train(job: Job, model: nn.Module, batches: list[Batch], **options: Any) -> None:
    for batch in job.loop(batches, **options):
        job.step(nn.functional.binary_cross_entropy_with_logits(model(batch.features), batch.labels))


def read_all(job: Job) -> list[Tensor]:
    return [job.read_weights(table.name) for table in job.spec.tables]


def test_small_batches_are_trained_as_a_large_one() -> None:
    small, large = make_batches(6, 3)
    one, other = make(AloneSeat(seed=3, servers=3)), make(AloneSeat(seed=3, servers=3))
    first = read_all(one[0])
    train(*one, large)
    train(*other, small, accumulate=3)
    assert one[0].client.pushes == other[0].client.pushes == 6
    for mine, wanted, before in zip(read_all(other[0]), read_all(one[0]), first, strict=True):
        assert torch.allclose(mine, wanted, atol=1e-5)
        assert not torch.allclose(mine, before, atol=1e-3)
    by_one = make(AloneSeat(seed=3, servers=3))
    train(*by_one, small)
    assert not torch.allclose(read_all(by_one[0])[0], read_all(one[0])[0], atol=1e-3), "the optimizer tells them apart"


@pytest.mark.parametrize("mode", ["async", "sync"])
def test_whoever_takes_over_goes_on_at_a_whole_step(mode: Any) -> None:
    small, _ = make_batches(4, 2)
    options: dict[str, Any] = {"mode": mode, "seed": 3, "protection": regrow.ErasureCode(k=1, r=1)}
    whole = make(ClusterSeat(regrow.InProcessCluster(servers=2), **options))
    train(*whole, small, accumulate=2)
    cluster = regrow.InProcessCluster(servers=2)
    train(*make(ClusterSeat(cluster, **options)), small, accumulate=2, steps=2)
    job, model = make(ClusterSeat(cluster, **options))
    train(job, model, small, accumulate=2)
    assert job.progress.samples == 8 * BATCH
    assert job.client.digest() == whole[0].client.digest()


def test_a_last_step_may_have_fewer() -> None:
    small, _ = make_batches(5, 1)
    job, model = make(AloneSeat(seed=3))
    train(job, model, small, accumulate=2)
    assert (job.client.pushes, job.progress.samples) == (3, 5 * BATCH)


def test_every_batch_is_stepped() -> None:
    small, _ = make_batches(2, 2)
    job, model = make(AloneSeat(seed=3))
    with pytest.raises(UserError, match=r"was left without job\.step"):
        for number, batch in enumerate(job.loop(small, accumulate=2)):
            if number == 0:
                job.step(model(batch.features).sum())
    job, model = make(AloneSeat(seed=3))
    with pytest.raises(UserError, match="there is no batch to step"):
        for batch in job.loop(small, accumulate=2):
            job.step(model(batch.features).sum())
            job.commit()
    with pytest.raises(ValueError, match="accumulate must be at least 1"):
        next(iter(job.loop(small, accumulate=0)))


def test_one_that_is_skipped_adds_nothing() -> None:
    small, _ = make_batches(3, 2)
    job, model = make(AloneSeat(seed=3))
    for number, batch in enumerate(job.loop(small, accumulate=2)):
        loss = nn.functional.binary_cross_entropy_with_logits(model(batch.features), batch.labels)
        if number % 2:
            job.skip()
        else:
            job.step(loss)
    half, its_model = make(AloneSeat(seed=3))
    for batch in half.loop(small[::2]):
        half.step(nn.functional.binary_cross_entropy_with_logits(its_model(batch.features), batch.labels) / 2)
    for mine, wanted in zip(read_all(job), read_all(half), strict=True):
        assert torch.allclose(mine, wanted, atol=1e-6)
