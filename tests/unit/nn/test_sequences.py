"""Goal: sequences and weighted bags train what plain PyTorch trains, beside pooled tables in the same job.

Method: tiny models on servers inside this process, against `nn.Embedding` and `nn.EmbeddingBag` with the same first
values; ids repeat within a batch, bags are empty, features come in another order than the tables.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import regrow
from regrow.errors import UserError
from regrow.nn.jagged import JaggedTensor
from regrow.nn.job import Job
from regrow.nn.seat import AloneSeat

ROWS, DIM, BATCH = 12, 4, 6
SGD = regrow.OptimizerSpec(kind="sgd", learning_rate=0.5)


class Batch:
    def __init__(self, seed: int, *, weighted: bool) -> None:
        g = torch.Generator().manual_seed(seed)
        lengths = torch.randint(0, 4, (3 * BATCH,), generator=g, dtype=torch.int32)
        values = torch.randint(0, ROWS, (int(lengths.sum()),), generator=g)
        weights = torch.rand(len(values), generator=g) if weighted else None
        self.features = regrow.KeyedJaggedTensor(["item", "other", "user"], values, lengths, weights)
        self.labels = torch.randint(0, 2, (BATCH,), generator=g).float()

    def split(self) -> dict[str, tuple[Tensor, Tensor, Tensor | None]]:
        lengths = self.features.lengths().view(3, BATCH)
        counts = lengths.sum(1).tolist()
        ids = self.features.values().split(counts)
        weights = self.features.weights_or_none()
        parts = [None] * 3 if weights is None else weights.split(counts)
        return {key: (ids[i], lengths[i], parts[i]) for i, key in enumerate(self.features.keys())}


def make_config(kind: Any, name: str, *features: str) -> Any:
    return kind(num_embeddings=ROWS, embedding_dim=DIM, name=name, feature_names=list(features))


class Attention(nn.Module):
    """A sequence of items against a pooled user: uses every vector by itself."""

    def __init__(self, items: nn.Module, users: nn.Module) -> None:
        super().__init__()
        self.items, self.users = items, users
        self.top = nn.Linear(DIM, 1)

    def forward(self, features: Any) -> Tensor:
        items = self.items(features)["item"]
        padded = items.to_padded_dense(3)
        user = self.users(features).values()
        scores = torch.softmax((padded * user[:, None]).sum(2), dim=1)
        return self.top((padded * scores[:, :, None]).sum(1) + user)[:, 0]


class PlainItems(nn.Module):
    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight.clone())

    def forward(self, batch: Batch) -> dict[str, JaggedTensor]:
        ids, lengths, _ = batch.split()["item"]
        return {"item": JaggedTensor(self.weight[ids], lengths)}


class PlainBag(nn.Module):
    def __init__(self, weight: Tensor, *features: str) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight.clone())
        self.features = features

    def forward(self, batch: Batch) -> regrow.KeyedTensor:
        parts = []
        for feature in self.features:
            ids, lengths, weights = batch.split()[feature]
            offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)[:-1]])
            parts.append(nn.functional.embedding_bag(ids, self.weight, offsets, mode="sum", per_sample_weights=weights))
        return regrow.KeyedTensor(list(self.features), [DIM] * len(parts), torch.cat(parts, 1))


def step_plainly(plain: nn.Module, optimizer: Any, batch: Batch) -> float:
    optimizer.zero_grad()
    loss = nn.functional.binary_cross_entropy_with_logits(plain(batch), batch.labels)
    loss.backward()
    optimizer.step()
    return loss.item()


def train(job: Job, model: nn.Module, batches: list[Batch]) -> list[float]:
    losses = []
    for batch in job.loop(batches):
        loss = nn.functional.binary_cross_entropy_with_logits(model(batch.features), batch.labels)
        job.step(loss)
        losses.append(loss.item())
    return losses


def test_a_sequence_beside_a_bag_trains_what_plain_torch_trains() -> None:
    job = Job(AloneSeat(seed=3, servers=3))
    users = job.embedding_bag_collection([make_config(regrow.EmbeddingBagConfig, "t_user", "user")], optimizer=SGD)
    items = job.embedding_collection([make_config(regrow.EmbeddingConfig, "t_item", "item")], optimizer=SGD)
    model = job.dense(Attention(items, users), SGD)
    plain = Attention(PlainItems(job.read_weights("t_item")), PlainBag(job.read_weights("t_user"), "user"))
    plain.top.load_state_dict(model.top.state_dict())  # type: ignore[union-attr, arg-type, operator]
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.5)
    batches = [Batch(seed, weighted=False) for seed in range(10)]
    expected = [step_plainly(plain, optimizer, batch) for batch in batches]
    assert train(job, model, batches) == pytest.approx(expected, abs=1e-5)
    assert torch.allclose(job.read_weights("t_item"), plain.items.weight, atol=1e-5)  # type: ignore[arg-type]
    assert torch.allclose(job.read_weights("t_user"), plain.users.weight, atol=1e-5)  # type: ignore[arg-type]
    with torch.no_grad():
        looked = items(batches[0].features)["item"]
    ids, lengths, _ = batches[0].split()["item"]
    assert torch.allclose(looked.values(), job.read_weights("t_item")[ids])
    assert torch.equal(looked.lengths(), lengths)
    assert list(items.state_dict()) == [f"embeddings.{config.name}.weight" for config in items.embedding_configs()]


class Weighed(nn.Module):
    def __init__(self, bags: nn.Module) -> None:
        super().__init__()
        self.bags = bags
        self.top = nn.Linear(2 * DIM, 1)

    def forward(self, features: Any) -> Tensor:
        return self.top(self.bags(features).values())[:, 0]


def test_weighted_bags_train_what_plain_torch_trains() -> None:
    job = Job(AloneSeat(seed=3))
    table = make_config(regrow.EmbeddingBagConfig, "t_both", "user", "item")
    bags = job.embedding_bag_collection([table], optimizer=SGD, is_weighted=True)
    model = job.dense(Weighed(bags), SGD)
    plain = Weighed(PlainBag(job.read_weights("t_both"), "user", "item"))
    plain.top.load_state_dict(model.top.state_dict())  # type: ignore[union-attr, arg-type, operator]
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.5)
    batches = [Batch(seed, weighted=True) for seed in range(10)]
    expected = [step_plainly(plain, optimizer, batch) for batch in batches]
    assert train(job, model, batches) == pytest.approx(expected, abs=1e-5)
    assert torch.allclose(job.read_weights("t_both"), plain.bags.weight, atol=1e-5)  # type: ignore[arg-type]
    with pytest.raises(UserError, match="the features have no weights"), torch.no_grad():
        model(Batch(1, weighted=False).features)


def test_weights_are_refused_where_they_would_be_left_out() -> None:
    job = Job(AloneSeat(seed=3))
    bags = job.embedding_bag_collection([make_config(regrow.EmbeddingBagConfig, "t", "user")])
    with pytest.raises(UserError, match="this collection does not weigh"), torch.no_grad():
        bags(Batch(1, weighted=True).features)
    mean = regrow.EmbeddingBagConfig(
        num_embeddings=ROWS, embedding_dim=DIM, name="m", feature_names=["user"], pooling=regrow.PoolingType.MEAN
    )
    with pytest.raises(UserError, match="a weighted collection sums"):
        job.embedding_bag_collection([mean], is_weighted=True)


def test_a_jagged_tensor() -> None:
    jagged = JaggedTensor(torch.arange(8.0).view(4, 2), torch.tensor([1, 0, 3]))
    assert [part.tolist() for part in jagged.to_dense()] == [[[0, 1]], [], [[2, 3], [4, 5], [6, 7]]]
    assert jagged.to_padded_dense(2, -1.0).tolist() == [[[0, 1], [-1, -1]], [[-1, -1], [-1, -1]], [[2, 3], [4, 5]]]
    assert jagged.to_padded_dense().shape == (3, 3, 2)
    assert jagged.offsets().tolist() == [0, 1, 1, 4]
    with pytest.raises(ValueError, match="add up to 4, but there are 3"):
        JaggedTensor(torch.zeros(3, 2), torch.tensor([1, 0, 3]))


def test_a_table_begins_with_what_its_init_fn_says() -> None:
    job = Job(AloneSeat(seed=3, servers=3))
    tables = [
        regrow.EmbeddingBagConfig(
            num_embeddings=ROWS, embedding_dim=DIM, name=name, feature_names=["user"], init_fn=init
        )
        for name, init in (("ones", nn.init.ones_), ("normal", lambda weights: nn.init.normal_(weights, std=3.0)))
    ]
    job.embedding_bag_collection([*tables, make_config(regrow.EmbeddingBagConfig, "usual", "user")])
    assert torch.equal(job.read_weights("ones"), torch.ones(ROWS, DIM))
    assert job.read_weights("normal").std() > 2
    assert 0 < float(job.read_weights("usual").abs().max()) <= ROWS**-0.5


def test_gradients_reach_the_weights_of_ids() -> None:
    job = Job(AloneSeat(seed=3))
    table = make_config(regrow.EmbeddingBagConfig, "t_both", "user", "item")
    bags = job.embedding_bag_collection([table], optimizer=SGD, is_weighted=True)
    plain = PlainBag(job.read_weights("t_both"), "user", "item")
    mine, theirs = Batch(2, weighted=True), Batch(2, weighted=True)
    for batch in (mine, theirs):
        batch.features.weights().requires_grad_()
    for batch in job.loop([mine]):
        job.step(bags(batch.features).values().square().sum())
    plain(theirs).values().square().sum().backward()
    wanted = theirs.features.weights().grad
    assert wanted is not None and float(wanted.abs().max()) > 0
    torch.testing.assert_close(mine.features.weights().grad, wanted)


def test_features_one_by_one() -> None:
    """As torchrec.KeyedJaggedTensor gives them."""
    weights = torch.arange(4.0)
    features = regrow.KeyedJaggedTensor(["a", "b"], torch.tensor([7, 8, 9, 5]), torch.tensor([2, 0, 1, 1]), weights)
    assert features.length_per_key() == [2, 2]
    first, second = features.to_dict().values()
    assert (first.values().tolist(), first.lengths().tolist()) == ([7, 8], [2, 0])
    assert (second.values().tolist(), second.lengths().tolist()) == ([9, 5], [1, 1])
    assert torch.equal(features["b"].weights_or_none(), weights[2:])
    nothing = regrow.KeyedJaggedTensor(["a", "b"], torch.zeros(0, dtype=torch.int64), torch.zeros(0, dtype=torch.int32))
    assert [len(part.values()) for part in nothing.to_dict().values()] == [0, 0]
    with pytest.raises(KeyError):
        features["c"]
