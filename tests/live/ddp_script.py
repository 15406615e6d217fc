"""A script whose workers keep dense parameters, for `test_ddp.py`: `ddp_script.py WEIGHTS [WHERE MARKER]`.

Worker 0 writes what came of it to WEIGHTS. WHERE: "start", worker 1 dies at the beginning of a step; "all", all die
at the end of one. Once, as long as MARKER is not there.
"""

from __future__ import annotations

import copy
import os
import signal
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import regrow

STEPS, BATCH, ROWS, DIM = 16, 8, 40, 4
RATE, NORM = 0.01, 0.5
WORKERS = 2  # whose batches one step has, in plain torch


def make_batch(number: int) -> tuple[regrow.KeyedJaggedTensor, Tensor]:
    g = torch.Generator().manual_seed(number)
    ids = torch.randint(0, ROWS, (BATCH,), generator=g)
    return regrow.KeyedJaggedTensor(["f"], ids, torch.ones(BATCH, dtype=torch.int32)), ids % 2.0


def make_top() -> nn.Module:
    return nn.Sequential(nn.Linear(DIM, 8), nn.ReLU(), nn.Linear(8, 1))


def make_optimizer(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, lr=RATE, amsgrad=True)


def loss_of(pooled: Tensor, top: nn.Module, labels: Tensor) -> Tensor:
    return nn.functional.binary_cross_entropy_with_logits(top(pooled)[:, 0], labels)


def die(marker: str) -> None:
    if not Path(marker).exists():
        Path(marker).touch()
        os.kill(os.getpid(), signal.SIGKILL)


def main(weights: str, where: str = "", marker: str = "") -> None:
    job = regrow.join()
    tables = [regrow.EmbeddingBagConfig(num_embeddings=ROWS, embedding_dim=DIM, name="t", feature_names=["f"])]
    rows = job.embedding_bag_collection(tables, optimizer=regrow.OptimizerSpec(kind="sgd", learning_rate=0.1))
    model = nn.ModuleDict({"rows": rows, "top": make_top()})
    job.dense(model, sync="ddp", optimizer=make_optimizer)
    job.schedule(torch.optim.lr_scheduler.StepLR(job.optimizer, step_size=5, gamma=0.5))
    first = {"rows": job.read_weights("t"), "top": copy.deepcopy(model["top"].state_dict())}
    for features, labels in job.loop([make_batch(n) for n in range(STEPS * job.workers)]):
        if where == "start" and job.worker == 1 and job.progress.step == 6:
            die(marker)
        job.step(loss_of(rows(features).values(), model["top"], labels), clip_norm=NORM)
        if where == "all" and job.progress.step == 9:
            die(f"{marker}-{job.worker}")
    if job.worker == 0:
        found = {"top": model["top"].state_dict(), "rows": job.read_weights("t")}
        torch.save({"first": first, "last": found}, weights)


if __name__ == "__main__":
    main(*sys.argv[1:])
