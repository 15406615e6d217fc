"""Goal: models that nobody here wrote, TorchRec's own, give the same outputs and train the same weights with our
collection in the place of theirs.

Method: DLRM, DLRM_DCN and SimpleDeepFMNN of `torchrec.models`, each twice with equal first values: on TorchRec's
EmbeddingBagCollection with `torch.optim.SGD`, and on a job's with SGD at the servers. Batches are TorchRec's
KeyedJaggedTensors with bags of nought to three ids. Skipped where TorchRec is not installed.
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
def test_torchrec_models_train_as_they_do_with_torchrec(name: str) -> None:
    torch.manual_seed(1)
    theirs = MODELS[name](torchrec.EmbeddingBagCollection(tables=make_tables()))
    job = Job(AloneSeat(seed=3, servers=3))
    ours = job.dense(MODELS[name](job.embedding_bag_collection(make_tables(), optimizer=SGD)), SGD)
    batches = make_batches(8)
    with torch.no_grad():  # lazily made parameters, where there are any, are there now
        theirs(batches[0].dense, batches[0].sparse)
    ours.load_state_dict(theirs.state_dict())
    with torch.no_grad():
        assert torch.allclose(
            ours(batches[0].dense, batches[0].sparse), theirs(batches[0].dense, batches[0].sparse), atol=1e-6
        )
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
