"""A script as somebody with a model of TorchRec would write it: `torchrec.models`, TorchRec's tables and batches, and
a job's collection in the place of TorchRec's. Which model is its argument. Run by test_torchrec.py."""

from __future__ import annotations

import sys

import torch
import torchrec
from torch import Tensor, nn
from torchrec.models.deepfm import SimpleDeepFMNN
from torchrec.models.dlrm import DLRM, DLRM_DCN

import regrow

ROWS, DIM, BATCH, DENSE, FEATURES = 200, 8, 32, 5, ["user", "item", "page"]
BATCHES = 40  # twenty steps of two workers


def make_model(name: str, bags: nn.Module) -> nn.Module:
    """As TorchRec's pages make them."""
    layers = {"dense_arch_layer_sizes": [16, DIM], "over_arch_layer_sizes": [16, 1]}
    if name == "DLRM":
        return DLRM(bags, DENSE, **layers)
    if name == "DLRM_DCN":
        return DLRM_DCN(bags, DENSE, **layers, dcn_num_layers=2, dcn_low_rank_dim=4)
    return SimpleDeepFMNN(DENSE, bags, hidden_layer_size=16, deep_fm_dimension=8)


def make_batches() -> list[tuple[Tensor, torchrec.KeyedJaggedTensor, Tensor]]:
    g = torch.Generator().manual_seed(7)
    batches = []
    for _ in range(BATCHES):
        lengths = torch.randint(0, 4, (len(FEATURES) * BATCH,), generator=g, dtype=torch.int32)
        values = torch.randint(0, ROWS, (int(lengths.sum()),), generator=g)
        sparse = torchrec.KeyedJaggedTensor.from_lengths_sync(FEATURES, values, lengths)
        labels = torch.randint(0, 2, (BATCH,), generator=g).float()
        batches.append((torch.randn(BATCH, DENSE, generator=g), sparse, labels))
    return batches


def main(name: str) -> None:
    job = regrow.join()
    tables = [
        torchrec.EmbeddingBagConfig(
            num_embeddings=ROWS, embedding_dim=DIM, name=f"t_{feature}", feature_names=[feature]
        )
        for feature in FEATURES
    ]
    model = make_model(name, job.embedding_bag_collection(tables))
    batches = make_batches()
    # SimpleDeepFMNN ends with probabilities, the others with logits.
    criterion = nn.BCELoss() if name == "SimpleDeepFMNN" else nn.BCEWithLogitsLoss()
    model = job.dense(model)
    for dense, sparse, labels in job.loop(batches, epochs=1):
        job.step(criterion(model(dense, sparse).squeeze(1), labels))


if __name__ == "__main__":
    main(sys.argv[1])
