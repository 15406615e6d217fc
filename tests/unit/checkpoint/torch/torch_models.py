"""A small torch model, optimizers of every kind for it, and its whole state: for the tests of torch checkpoints."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

ROWS, DIM = 50, 4


class Model(nn.Module):
    """Two tables, a dense layer and a buffer that counts."""

    def __init__(
        self, *, sparse: bool = True, seed: int = 0, rows: int = ROWS, dtype: torch.dtype = torch.float32
    ) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.users = nn.EmbeddingBag(rows, DIM, mode="sum", sparse=sparse, dtype=dtype)
        self.items = nn.Embedding(2 * rows, DIM, sparse=sparse)
        self.over = nn.Linear(2 * DIM, 1)
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))
        self.register_buffer("scratch", torch.zeros(3), persistent=False)

    def forward(self, users: Tensor, items: Tensor) -> Tensor:
        self.seen += len(users)
        out: Tensor = self.over(torch.cat([self.users(users).float(), self.items(items[:, 0])], dim=1))
        return out


def tables(model: Model) -> list[nn.Parameter]:
    return [model.users.weight, model.items.weight]


# Name -> (sparse gradients, whether all rows change, optimizers)
RULES: dict[str, tuple[bool, bool, Callable[[Model], list[torch.optim.Optimizer]]]] = {
    "sgd": (True, False, lambda m: [torch.optim.SGD(m.parameters(), lr=0.1)]),
    "adagrad": (True, False, lambda m: [torch.optim.Adagrad(m.parameters(), lr=0.1)]),
    "sparse adam, adam": (
        True,
        False,
        lambda m: [torch.optim.SparseAdam(tables(m), lr=0.1), torch.optim.Adam(m.over.parameters())],
    ),
    "two of one kind": (
        True,
        False,
        lambda m: [
            torch.optim.Adagrad([m.users.weight], lr=0.1),
            torch.optim.Adagrad([m.items.weight, *m.over.parameters()], lr=0.2),
        ],
    ),
    "adagrad, dense gradients": (False, False, lambda m: [torch.optim.Adagrad(m.parameters(), lr=0.1)]),
    "momentum, sparse gradients": (True, True, lambda m: [torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.5)]),
    "adam, dense gradients": (False, True, lambda m: [torch.optim.Adam(m.parameters(), lr=0.1)]),
}


def train(model: Model, optimizers: list[torch.optim.Optimizer], step: int) -> None:
    """One step whose batch depends on its number alone."""
    draw = torch.Generator().manual_seed(1000 + step)
    users = torch.randint(0, len(model.users.weight), (3, 2), generator=draw)
    items = torch.randint(0, len(model.items.weight), (3, 1), generator=draw)
    for optimizer in optimizers:
        optimizer.zero_grad()
    model(users, items).square().sum().backward()
    for optimizer in optimizers:
        optimizer.step()


def state(model: Model, optimizers: list[torch.optim.Optimizer]) -> dict[str, Any]:
    """Everything, as torch itself sees it."""
    found: dict[str, Any] = {f"model.{name}": value for name, value in model.state_dict().items()}
    for index, optimizer in enumerate(optimizers):
        saved = optimizer.state_dict()
        found[f"{index}.groups"] = saved["param_groups"]
        for number, values in saved["state"].items():
            found.update({f"{index}.{number}.{name}": value for name, value in values.items()})
    return {
        name: (value.to_dense() if value.is_sparse else value).clone() if isinstance(value, Tensor) else value
        for name, value in found.items()
    }


def assert_same(left: dict[str, Any], right: dict[str, Any]) -> None:
    assert left.keys() == right.keys()
    for name, value in left.items():
        if isinstance(value, Tensor):
            assert value.dtype == right[name].dtype, name
            assert torch.equal(value, right[name]), name
        else:
            assert value == right[name], name
