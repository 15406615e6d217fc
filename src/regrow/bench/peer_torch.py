"""The other peer: what is written in plain PyTorch, an `nn.EmbeddingBag(sparse=True)` per table, in one process.

Gradients of rows are sparse tensors, and torch's own Adagrad takes them: of its optimizers that do, the usual one where
most ids are rare, and the nearest to the row-wise one of the other peer. The servers have the same formula, float by
float, and keep as much state for a row. SGD would be less work for both sides.

At its best: batches are made and cut into tables ahead by a thread, tables and their state lie in huge pages, the
optimizer of the dense part is torch's fused one, idle threads wait in whatever
way is faster (`train.WAITINGS`). The loop over tables in Python stays: it is what is written.
"""

from __future__ import annotations

import resource
import sys
from typing import Any

import torch
import torch.nn.functional as functional
from torch import Tensor, nn

from regrow.bench import common, peer_run
from regrow.config import TrainConfig
from regrow.data.batch import Batch
from regrow.data.catalog import open_dataset
from regrow.nn.models import make_model

EPS = 1e-8  # the servers' own
Prepared = tuple[list[Tensor], Tensor]


class TorchTrainer:
    """A model of the package, with tables and optimizers of torch."""

    def __init__(self, config: TrainConfig, rows: list[int]) -> None:
        if config.optimizer != "adagrad":
            raise ValueError(f"the peer trains rows with adagrad, not {config.optimizer}")
        # They are off anyway; unless somebody says so, the first step of Adagrad warns of it.
        torch.sparse.check_sparse_tensor_invariants.disable()
        shape = config.load_model()
        self.batch = config.batch
        self.bags = [make_bag(count, shape.row_floats) for count in rows]
        weights = [bag.weight for bag in self.bags]
        self.rows_optimizer = torch.optim.Adagrad(weights, lr=config.learning_rate, eps=EPS)
        self._use_huge_pages(weights)
        self.model = make_model(shape, seed=config.seed)
        self.dense_optimizer = peer_run.dense_optimizer(
            config.dense_optimizer, list(self.model.parameters()), config.dense_learning_rate
        )
        self.timer = peer_run.Timer()

    def _use_huge_pages(self, weights: list[Tensor]) -> None:
        for weight in weights:
            for tensor in (weight, self.rows_optimizer.state[weight]["sum"]):
                common.collapse_pages(tensor.data_ptr(), tensor.numel() * tensor.element_size())

    def prepare(self, batch: Batch) -> Prepared:
        ids = torch.from_numpy(batch.values).view(len(self.bags), -1)
        return list(ids.unbind(0)), torch.arange(len(batch))

    def step(self, batch: Batch, prepared: Prepared) -> float:
        timer = self.timer
        timer.lap("data")
        ids, offsets = prepared
        rows = torch.cat([bag(each, offsets) for bag, each in zip(self.bags, ids, strict=True)], dim=1)
        timer.lap("embedding forward")
        logits = self.model(torch.from_numpy(batch.dense), rows)
        loss = functional.binary_cross_entropy_with_logits(logits, torch.from_numpy(batch.labels))
        timer.lap("dense forward")
        torch.autograd.backward(loss)
        timer.lap("backward")
        self.rows_optimizer.step()
        self.rows_optimizer.zero_grad(set_to_none=True)
        timer.lap("embedding update")
        self.dense_optimizer.step()
        self.dense_optimizer.zero_grad(set_to_none=True)
        timer.lap("dense update")
        return loss.item()


def make_bag(rows: int, row_floats: int) -> nn.EmbeddingBag:
    """A table with first values as ours have them."""
    bound = (1.0 / rows) ** 0.5
    values = torch.empty(rows, row_floats).uniform_(-bound, bound)
    return nn.EmbeddingBag.from_pretrained(values, freeze=False, mode="sum", sparse=True)


def train(settings: dict[str, Any]) -> dict[str, Any]:
    """Trains until the time is over."""
    config = TrainConfig.from_dict(settings["config"]).replace(steps=peer_run.STEPS_ENDLESS)
    common.keep_memory()
    torch.set_num_threads(settings["threads"])
    dataset = open_dataset(config)
    trainer = TorchTrainer(config, dataset.rows)
    figures = peer_run.measure_rate(
        trainer, dataset, warmup_steps=settings["warmup_steps"], seconds_max=settings["seconds"]
    )
    return {
        **figures,
        "layout": "split",
        "rows": sum(dataset.rows),
        "threads": settings["threads"],
        "peak_rss_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    }


if __name__ == "__main__":
    sys.exit(peer_run.answer(train))
