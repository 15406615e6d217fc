"""A DeepFM of one's own: the lines with `job` are all that differs from a plain PyTorch script.

python examples/train_deepfm.py                                             # alone, in one process
regrow run --servers 5 --workers 2 --protect ec examples/train_deepfm.py    # kill -9 any of them
regrow run --mode sync --protect ec --kill server:2@step:50 --kill worker:0@step:80 examples/train_deepfm.py
"""

import argparse
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

import regrow

FEATURES, ROWS, DIM = ["user", "item", "context"], 2_000, 8


@dataclass
class Batch:
    features: regrow.KeyedJaggedTensor
    labels: Tensor


class Clicks(Dataset):
    """Somebody clicks if the tastes of user, item and context add up to something."""

    def __init__(self, count: int, seed: int) -> None:
        draw = torch.Generator().manual_seed(seed)
        taste = torch.randn(len(FEATURES), ROWS, generator=torch.Generator().manual_seed(0))
        self.ids = (torch.rand(count, len(FEATURES), generator=draw).square() * ROWS).long()
        self.labels = (sum(taste[f][self.ids[:, f]] for f in range(len(FEATURES))) > 0).float()

    def __len__(self) -> int:
        return len(self.ids)

    def __getitems__(self, indices: list[int]) -> Batch:
        ids = self.ids[indices]
        lengths = torch.ones(ids.numel(), dtype=torch.int32)
        features = regrow.KeyedJaggedTensor.from_lengths_sync(FEATURES, ids.T.flatten(), lengths)
        return Batch(features, self.labels[indices])


class DeepFM(nn.Module):
    def __init__(self, embeddings: nn.Module) -> None:
        super().__init__()
        self.embeddings = embeddings
        width = len(FEATURES) * DIM
        self.deep = nn.Sequential(nn.Linear(width, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 1))

    def forward(self, features: regrow.KeyedJaggedTensor) -> Tensor:
        pooled = self.embeddings(features).values()
        vectors = pooled.view(-1, len(FEATURES), DIM)
        pairs = 0.5 * (vectors.sum(1).square() - vectors.square().sum(1))
        return pairs.sum(1) + self.deep(pooled)[:, 0]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--samples", type=int, default=51_200)
    parser.add_argument("--epochs", type=int, default=2)
    options = parser.parse_args()
    train = DataLoader(Clicks(options.samples, seed=1), batch_size=256, shuffle=True, collate_fn=lambda batch: batch)
    test = DataLoader(Clicks(5_000, seed=2), batch_size=1024, collate_fn=lambda batch: batch)

    job = regrow.join()
    tables = [
        regrow.EmbeddingBagConfig(num_embeddings=ROWS, embedding_dim=DIM, name=f"t_{f}", feature_names=[f])
        for f in FEATURES
    ]
    model = job.dense(DeepFM(job.embedding_bag_collection(tables)))
    for batch in job.loop(train, epochs=options.epochs):
        loss = nn.functional.binary_cross_entropy_with_logits(model(batch.features), batch.labels)
        job.step(loss)
    print(job.evaluate(model, test, together=True))


if __name__ == "__main__":
    main()
