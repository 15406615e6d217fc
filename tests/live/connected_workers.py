"""A cluster, and workers that reach it by `regrow.connect` from other processes: one that was started anew and one that
was forked. A server dies while they push whole numbers; at the end the script prints by how much every row has moved.

    python connected_workers.py
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import torch

import regrow

ROWS, PUSHES, WORKERS = 60, 40, 3
SECONDS_MAX = 100.0


def work(address: str, token_file: str | Path, worker: int, pushes: int) -> torch.Tensor:
    """Says half way that it is at work. Returns the rows as they are at its end."""
    with regrow.connect(address, token_file) as cluster:
        table = regrow.EmbeddingBagConfig(num_embeddings=ROWS, embedding_dim=4, name="t", feature_names=["f"])
        sgd = regrow.OptimizerSpec(kind="sgd", learning_rate=1.0)
        rows = regrow.EmbeddingBagCollection(
            tables=[table], cluster=cluster, worker=worker, workers=WORKERS, optimizer=sgd
        )
        every_row = regrow.KeyedJaggedTensor(["f"], torch.arange(ROWS), torch.ones(ROWS, dtype=torch.int32))
        for push in range(pushes):
            rows(every_row).values().sum().backward()
            if push == pushes // 2:
                rows.drain()
                print("half", flush=True)
                sys.stdin.readline()
        rows.drain()
        weights: torch.Tensor = rows.state_dict()["embedding_bags.t.weight"]
    return weights


def main() -> None:
    with regrow.LocalCluster(servers=3, protection=regrow.ErasureCode(k=2, r=1)) as cluster:
        where = (cluster.address, str(cluster.token_file))
        before = work(*where, WORKERS - 1, 0)
        started = subprocess.Popen(
            [sys.executable, __file__, *where], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert started.stdin is not None and started.stdout is not None
        forked = os.fork()
        if forked == 0:
            sys.stdin = open(os.devnull)  # noqa: SIM115  it goes on at once
            sys.stdout = open(os.devnull, "w")  # noqa: SIM115
            work(*where, 1, PUSHES)
            os._exit(0)
        assert started.stdout.readline() == "half\n"
        os.kill(cluster.pids["server 1"], signal.SIGKILL)
        started.communicate("go on\n", timeout=SECONDS_MAX)
        _, status = os.waitpid(forked, 0)
        moved = before - work(*where, WORKERS - 1, 0)
        print(f"exits {started.returncode} {status}, moved {moved.min():.0f} to {moved.max():.0f}")


if __name__ == "__main__":
    if sys.argv[1:]:
        work(sys.argv[1], sys.argv[2], 0, PUSHES)
    else:
        main()
