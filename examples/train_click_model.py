"""A click model whose embedding tables live on Regrow's servers: the whole script, without the command line.

python examples/train_click_model.py            # servers inside this process
python examples/train_click_model.py --servers 3   # three server processes on this machine
"""

import sys

import torch
from torch import nn

import regrow

FEATURES, ROWS, DIM, BATCH = ["user", "item"], 10_000, 16, 512


def main() -> None:
    servers = int(sys.argv[sys.argv.index("--servers") + 1]) if "--servers" in sys.argv else 0
    cluster = regrow.LocalCluster(servers=servers) if servers else regrow.InProcessCluster(servers=2)
    tables = [
        regrow.EmbeddingBagConfig(num_embeddings=ROWS, embedding_dim=DIM, name=f"t_{f}", feature_names=[f])
        for f in FEATURES
    ]
    adagrad = regrow.OptimizerSpec(kind="rowwise_adagrad", learning_rate=0.3)
    embeddings = regrow.EmbeddingBagCollection(tables=tables, cluster=cluster, optimizer=adagrad)
    head = nn.Sequential(nn.Linear(2 * DIM, 32), nn.ReLU(), nn.Linear(32, 1))
    adam = torch.optim.Adam(head.parameters(), lr=0.01)

    taste = torch.randn(2, ROWS, generator=torch.Generator().manual_seed(0))  # what there is to learn
    for step in range(401):
        ids = (torch.rand(2, BATCH).square() * ROWS).long()
        clicks = (taste[0][ids[0]] + taste[1][ids[1]] > 0).float()
        lengths = torch.ones(2 * BATCH, dtype=torch.int32)
        batch = regrow.KeyedJaggedTensor.from_lengths_sync(FEATURES, ids.flatten(), lengths)
        loss = nn.functional.binary_cross_entropy_with_logits(head(embeddings(batch).values())[:, 0], clicks)
        adam.zero_grad()
        loss.backward()  # pushes the rows' gradients; the servers apply them
        adam.step()
        if step % 100 == 0:
            print(f"step {step:4d}  loss {loss.item():.4f}", flush=True)
    cluster.close()


if __name__ == "__main__":
    main()
