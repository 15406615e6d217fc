"""A plain single-process DLRM in PyTorch: what every distributed run is compared with.

No servers, no kernels of ours: tables are tensors, gradients come from autograd, optimizers are a few lines
each with the formulas and names the servers use. `staleness` delays every update by that many steps, which is
what asynchronous workers do to each other.
"""

from __future__ import annotations

import math
import time
from collections import deque
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as functional
from torch import Tensor

from regrow.data.batch import Batch, Dataset
from regrow.metrics import auc, logloss
from regrow.nn.dlrm import DLRM
from regrow.nn.presets import ModelConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class Optimizer:
    """An update rule and its constants, as the servers know them."""

    name: str
    learning_rate: float
    eps: float = 1e-8
    beta1: float = 0.9
    beta2: float = 0.999
    momentum: float = 0.9
    weight_decay: float = 0.0

    def state_floats(self, dim: int) -> int:
        sizes = {
            "sgd": 0,
            "momentum": dim,
            "adagrad": dim,
            "rowwise_adagrad": 1,
            "adam": 2 * dim,
            "partial_rowwise_adam": dim + 1,
        }
        if self.name not in sizes:
            raise ValueError(f"unknown optimizer {self.name!r}; choose one of {', '.join(sizes)}")
        return sizes[self.name]

    def update(self, weights: Tensor, state: Tensor, gradients: Tensor, *, step: int) -> None:
        """Updates rows [N, dim] and their state [N, state_floats(dim)] in place; steps count from 1."""
        dim = weights.shape[1]
        rate = self.learning_rate
        if self.name in ("adam", "partial_rowwise_adam"):
            first, second = state[:, :dim], state[:, dim:]
            squares = gradients.square() if self.name == "adam" else gradients.square().mean(dim=1, keepdim=True)
            first.mul_(self.beta1).add_(gradients, alpha=1 - self.beta1)
            second.mul_(self.beta2).add_(squares, alpha=1 - self.beta2)
            direction = first / (1 - self.beta1**step)
            direction /= (second / (1 - self.beta2**step)).sqrt_().add_(self.eps)
            weights.sub_(direction + self.weight_decay * weights, alpha=rate)
            return
        if self.weight_decay:
            gradients = gradients + self.weight_decay * weights
        if self.name == "sgd":
            weights.sub_(gradients, alpha=rate)
        elif self.name == "momentum":
            state.mul_(self.momentum).add_(gradients)
            weights.sub_(state, alpha=rate)
        elif self.name == "adagrad":
            state.add_(gradients.square())
            weights.sub_(rate * gradients / (state.sqrt() + self.eps))
        else:
            state.add_(gradients.square().mean(dim=1, keepdim=True))
            weights.sub_(rate / (state.sqrt() + self.eps) * gradients)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReferenceResult:
    auc: float
    logloss: float
    steps: int
    samples: int
    seconds: float
    # Mean training loss over the last hundred steps, on samples not yet trained on.
    train_loss: float


class Reference:
    """The tables, the network and their optimizers. All tables are one tensor; ids are shifted to match."""

    def __init__(self, *, rows: list[int], model: ModelConfig, sparse: Optimizer, dense: Optimizer, seed: int) -> None:
        self.sparse, self.dense = sparse, dense
        self.network = DLRM.from_config(model, seed=seed)
        self.dim, self.tables = model.dim, len(rows)
        generator = torch.Generator().manual_seed(seed + 1)
        self.weights = torch.cat(
            [(torch.rand(n, model.dim, generator=generator) * 2 - 1) * math.sqrt(1 / n) for n in rows]
        )
        self.state = torch.zeros(len(self.weights), sparse.state_floats(model.dim))
        self.first_row = torch.from_numpy(np.cumsum([0, *rows[:-1]])).view(-1, 1)
        self.parameters = list(self.network.parameters())
        self.dense_state = [torch.zeros(p.numel(), dense.state_floats(1)) for p in self.parameters]
        self.steps_applied = 0

    def embeddings(self, batch: Batch) -> tuple[Tensor, Tensor, Tensor]:
        """The distinct rows of a batch, their values as a leaf, and the embeddings [B, tables * dim]."""
        if batch.lengths is not None:
            raise ValueError("the reference takes one id per bag")
        ids = torch.from_numpy(batch.values).view(self.tables, -1) + self.first_row
        distinct, inverse = torch.unique(ids.t(), return_inverse=True)
        leaf = self.weights[distinct].requires_grad_()
        return distinct, leaf, functional.embedding(inverse, leaf).view(len(batch), -1)

    def gradients(self, batch: Batch) -> tuple[float, Tensor, Tensor, list[Tensor]]:
        """(loss, distinct rows, their summed gradients, the network's gradients)."""
        distinct, leaf, embeddings = self.embeddings(batch)
        logits = self.network(torch.from_numpy(batch.dense), embeddings)
        loss = functional.binary_cross_entropy_with_logits(logits, torch.from_numpy(batch.labels))
        grads = torch.autograd.grad(loss, [leaf, *self.parameters])
        return loss.item(), distinct, grads[0], list(grads[1:])

    @torch.no_grad()
    def apply(self, distinct: Tensor, row_gradients: Tensor, network_gradients: list[Tensor]) -> None:
        self.steps_applied += 1
        weights, state = self.weights[distinct], self.state[distinct]
        self.sparse.update(weights, state, row_gradients, step=self.steps_applied)
        self.weights[distinct], self.state[distinct] = weights, state
        for parameter, memory, gradient in zip(self.parameters, self.dense_state, network_gradients, strict=True):
            self.dense.update(parameter.view(-1, 1), memory, gradient.reshape(-1, 1), step=self.steps_applied)

    @torch.no_grad()
    def predict(self, batch: Batch) -> np.ndarray:
        logits: Tensor = self.network(torch.from_numpy(batch.dense), self.embeddings(batch)[2])
        return logits.numpy()


def train_reference(
    dataset: Dataset,
    model: ModelConfig,
    *,
    batch: int = 2048,
    sparse: Optimizer,
    dense: Optimizer,
    seed: int = 0,
    staleness: int = 0,
    steps_max: int | None = None,
) -> ReferenceResult:
    """Trains on every training batch in order, then tests. Each update arrives `staleness` steps late."""
    reference = Reference(rows=dataset.rows, model=model, sparse=sparse, dense=dense, seed=seed)
    started = time.perf_counter()
    pending: deque[tuple[Tensor, Tensor, list[Tensor]]] = deque()
    recent: deque[float] = deque(maxlen=100)
    steps = samples = 0
    for data in dataset.train_batches(batch=batch, worker=0, workers=1):
        if steps == steps_max:
            break
        loss, *update = reference.gradients(data)
        pending.append(tuple(update))  # type: ignore[arg-type]
        if len(pending) > staleness:
            reference.apply(*pending.popleft())
        recent.append(loss)
        steps += 1
        samples += len(data)
    while pending:
        reference.apply(*pending.popleft())
    seconds = time.perf_counter() - started
    tests = list(dataset.test_batches(batch=4096))
    labels = np.concatenate([test.labels for test in tests])
    logits = np.concatenate([reference.predict(test) for test in tests])
    return ReferenceResult(
        auc=auc(labels, logits),
        logloss=logloss(labels, logits),
        steps=steps,
        samples=samples,
        seconds=seconds,
        train_loss=float(np.mean(recent)),
    )
