"""Goal: models that nobody here wrote, TorchRec's own, give the same outputs and train the same weights with our
collection in the place of theirs.

Method: DLRM, DLRM_DCN and SimpleDeepFMNN of `torchrec.models`, each twice with equal first values: on TorchRec's
EmbeddingBagCollection with `torch.optim.SGD`, and on a job's with SGD at the servers. Batches are TorchRec's
KeyedJaggedTensors with bags of nought to three ids. Sums of a bag have TorchRec's order, so outputs are equal to the
bit; gradients of a row that several bags share are added in another. Skipped where TorchRec is not installed.
"""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import regrow
from regrow.nn.job import Job
from regrow.nn.seat import AloneSeat

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    torchrec = pytest.importorskip("torchrec", exc_type=ImportError)
    from torchrec.models.deepfm import SimpleDeepFMNN
    from torchrec.models.dlrm import DLRM, DLRM_DCN

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning", "ignore::FutureWarning")

ROWS, DIM, BATCH, DENSE, FEATURES = 50, 8, 16, 5, ["user", "item", "page"]
RATE = 0.1
SGD = regrow.OptimizerSpec(kind="sgd", learning_rate=RATE)

MODELS: dict[str, Callable[[Any], nn.Module]] = {
    "DLRM": lambda bags: DLRM(bags, DENSE, dense_arch_layer_sizes=[16, DIM], over_arch_layer_sizes=[16, 1]),
    "DLRM_DCN": lambda bags: DLRM_DCN(
        bags,
        DENSE,
        dense_arch_layer_sizes=[16, DIM],
        over_arch_layer_sizes=[16, 1],
        dcn_num_layers=2,
        dcn_low_rank_dim=4,
    ),
    "SimpleDeepFMNN": lambda bags: SimpleDeepFMNN(DENSE, bags, hidden_layer_size=16, deep_fm_dimension=8),
}


@dataclasses.dataclass
class Batch:
    dense: Tensor
    sparse: Any
    labels: Tensor


def make_batches(count: int) -> list[Batch]:
    g = torch.Generator().manual_seed(7)
    batches = []
    for _ in range(count):
        lengths = torch.randint(0, 4, (len(FEATURES) * BATCH,), generator=g, dtype=torch.int32)
        values = torch.randint(0, ROWS, (int(lengths.sum()),), generator=g)
        sparse = torchrec.KeyedJaggedTensor.from_lengths_sync(FEATURES, values, lengths)
        labels = torch.randint(0, 2, (BATCH,), generator=g).float()
        batches.append(Batch(torch.randn(BATCH, DENSE, generator=g), sparse, labels))
    return batches


def make_tables() -> list[Any]:
    return [
        torchrec.EmbeddingBagConfig(num_embeddings=ROWS, embedding_dim=DIM, name=f"t_{name}", feature_names=[name])
        for name in FEATURES
    ]


def find_loss(model: nn.Module, batch: Batch) -> Tensor:
    logits = model(batch.dense, batch.sparse)
    if isinstance(model, SimpleDeepFMNN):
        return nn.functional.binary_cross_entropy(logits.squeeze(1), batch.labels)
    return nn.functional.binary_cross_entropy_with_logits(logits.squeeze(1), batch.labels)


@pytest.mark.parametrize("name", MODELS)
def test_outputs_are_those_of_torchrec_to_the_bit(name: str) -> None:
    """With a job's collection, and with one that stands alone."""
    torch.manual_seed(1)
    theirs = MODELS[name](torchrec.EmbeddingBagCollection(tables=make_tables()))
    job = Job(AloneSeat(seed=3, servers=3))
    cluster = regrow.InProcessCluster(servers=3)
    for bags in (
        job.embedding_bag_collection(make_tables()),
        regrow.EmbeddingBagCollection(tables=make_tables(), cluster=cluster),
    ):
        ours = MODELS[name](bags)
        ours.load_state_dict(theirs.state_dict())
        with torch.no_grad():
            for batch in make_batches(8):
                assert torch.equal(ours(batch.dense, batch.sparse), theirs(batch.dense, batch.sparse))


def test_what_is_asked_of_a_collection_and_of_what_it_gives() -> None:
    """By TorchRec's names, with TorchRec's answers; and TorchRec's own functions take our KeyedTensor."""
    tables = make_tables()
    theirs = torchrec.EmbeddingBagCollection(tables=tables)
    job = Job(AloneSeat(seed=3))
    ours = job.embedding_bag_collection(tables)
    ours.load_state_dict(theirs.state_dict())
    assert ours.embedding_bag_configs() == theirs.embedding_bag_configs()
    assert ours.is_weighted() == theirs.is_weighted()
    assert ours.device == theirs.device
    sparse = make_batches(1)[0].sparse
    with torch.no_grad():
        mine, wanted = ours(sparse), theirs(sparse)
    for ask in ("keys", "length_per_key", "offset_per_key", "key_dim", "device"):
        assert getattr(mine, ask)() == getattr(wanted, ask)(), ask
    assert torch.equal(mine.values(), wanted.values())
    assert torch.equal(mine.to("cpu").values(), wanted.values())
    for key, part in wanted.to_dict().items():
        assert torch.equal(mine.to_dict()[key], part)
        assert torch.equal(mine[key], wanted[key])
    groups = [["page", "user"], ["item"]]
    for part, expected in zip(
        torchrec.KeyedTensor.regroup([mine], groups), torchrec.KeyedTensor.regroup([wanted], groups), strict=True
    ):
        assert torch.equal(part, expected)


@pytest.mark.parametrize("name", MODELS)
def test_torchrec_models_train_as_they_do_with_torchrec(name: str) -> None:
    torch.manual_seed(1)
    theirs = MODELS[name](torchrec.EmbeddingBagCollection(tables=make_tables()))
    job = Job(AloneSeat(seed=3, servers=3))
    ours = job.dense(MODELS[name](job.embedding_bag_collection(make_tables(), optimizer=SGD)), SGD)
    batches = make_batches(8)
    ours.load_state_dict(theirs.state_dict())
    optimizer = torch.optim.SGD(theirs.parameters(), lr=RATE)
    expected = []
    for batch in batches:
        optimizer.zero_grad()
        loss = find_loss(theirs, batch)
        loss.backward()
        optimizer.step()
        expected.append(loss.item())
    losses = []
    for batch in job.loop(batches):
        loss = find_loss(ours, batch)
        job.step(loss)
        losses.append(loss.item())
    assert losses == pytest.approx(expected, abs=1e-5)
    job.refresh()
    after = theirs.state_dict()
    for key, value in ours.state_dict().items():
        assert torch.allclose(value, after[key], atol=1e-5), key
