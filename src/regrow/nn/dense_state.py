"""Dense parameters that a worker keeps, with everything that belongs to them: buffers, and the state of the optimizer.

All of it together is one flat array, a *state*: it is what a successor gets, what a checkpoint has, and what all
workers must have the same bits of. In it are the parameters as `job.dense` would have them on servers, the buffers, and
then the rest: the step behind which it is, which parts of the optimizer's state exist yet, and these parts. Learning
rates are not in it: they follow from the step (`nn/rates.py`).

The size must be known before anything is trained, because servers have a table for it. So the optimizer makes one step
with gradients of zero, and everything is put back as it was.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from regrow.core.job import OptimizerSpec
from regrow.errors import UserError
from regrow.nn.dense import STATE_NAME, BufferTable, DenseTable, FlatTable, Named

F32 = np.ndarray[Any, np.dtype[np.float32]]
MakeOptimizer = Callable[[list[nn.Parameter]], torch.optim.Optimizer]

HINT = "optimizer=lambda parameters: torch.optim.Adam(parameters, lr=0.001)"
STEP_FLOATS = 2  # the step as 64 bits, in the place of two floats


class DenseState:
    """Of one module and its optimizer."""

    def __init__(self, named: Named, buffers: Named, make_optimizer: MakeOptimizer) -> None:
        parameters = [p for _, p in named if isinstance(p, nn.Parameter)]
        plain = OptimizerSpec(kind="sgd", learning_rate=0.0)
        self.table = DenseTable(named, plain)
        self.buffers = BufferTable(buffers) if buffers else None
        self.optimizer = make_optimizer(parameters)
        check_optimizer(self.optimizer, parameters)
        self.parameters = parameters
        self._rates = [float(group["lr"]) for group in self.optimizer.param_groups]
        self.table.declare_rate(self._rates[0])
        self._parts = self._find_parts()
        floats = STEP_FLOATS + len(self._parts) + sum(int(np.prod(shape)) for _, _, shape in self._parts)
        self._rest = torch.zeros(floats)
        self._rest_table = FlatTable([("rest", self._rest)], name=STATE_NAME, optimizer=plain)

    @property
    def rate(self) -> float:
        """The learning rate as the optimizer was made with; of its first group."""
        return self._rates[0]

    @property
    def tables(self) -> list[FlatTable]:
        """As servers keep them."""
        return [table for table in (self.table, self.buffers, self._rest_table) if table is not None]

    def take(self, step: int) -> F32:
        """What there is now, behind this step. A copy."""
        self.table.take_values()
        if self.buffers is not None:
            self.buffers.take_values()
        rest = self._rest.numpy()
        rest[:STEP_FLOATS].view(np.int64)[0] = step
        state = self.optimizer.state_dict()["state"]
        start = STEP_FLOATS + len(self._parts)
        for number, (index, name, shape) in enumerate(self._parts):
            value = state.get(index, {}).get(name)
            size = int(np.prod(shape))
            rest[STEP_FLOATS + number] = value is not None
            rest[start : start + size] = 0.0 if value is None else value.detach().cpu().reshape(-1).numpy()
            start += size
        self._rest_table.take_values()
        return np.concatenate([table.values for table in self.tables])

    def put(self, state: F32) -> None:
        """Lets everything be as in a state."""
        start = 0
        for table in self.tables:
            table.values[:] = state[start : start + table.values.size]
            start += table.values.size
        self.table.adopt_values()
        if self.buffers is not None:
            self.buffers.adopt_values()
        rest = self._rest.numpy()
        rest[:] = self._rest_table.values[: rest.size]
        start = STEP_FLOATS + len(self._parts)
        found: dict[int, dict[str, Tensor]] = {}
        for number, (index, name, shape) in enumerate(self._parts):
            size = int(np.prod(shape))
            if rest[STEP_FLOATS + number]:
                found.setdefault(index, {})[name] = self._rest[start : start + size].clone().reshape(shape)
            start += size
        groups = self.optimizer.state_dict()["param_groups"]
        self.optimizer.load_state_dict({"state": found, "param_groups": groups})

    def find_step(self, state: F32) -> int:
        """Behind which step a state is."""
        start = state.size - self._rest_table.values.size
        return int(state[start : start + STEP_FLOATS].copy().view(np.int64)[0])

    def update(self, grads: F32, has_grad: Sequence[bool], moves: F32, *, rate: float) -> None:
        """A step of the optimizer, with gradients as all workers together have them."""
        for p, has, view in zip(self.parameters, has_grad, self.table.cut(torch.from_numpy(grads)), strict=True):
            p.grad = view.to(p.device) if has else None
        for group, own in zip(self.optimizer.param_groups, self._rates, strict=True):
            group["lr"] = rate if own == self.rate else own * (rate / self.rate) if self.rate else own
        self.optimizer.step()
        for p in self.parameters:
            p.grad = None
        if self.buffers is not None:
            self.buffers.values[:] -= moves
            self.buffers.adopt_values()

    def _find_parts(self) -> list[tuple[int, str, tuple[int, ...]]]:
        """(parameter, name, shape) of what the optimizer remembers, when it has made a step."""
        before, values = copy.deepcopy(self.optimizer.state_dict()), self.table.values.copy()
        for p in self.parameters:
            p.grad = torch.zeros_like(p)
        try:
            self.optimizer.step()
        except TypeError:
            kind = type(self.optimizer).__name__
            raise UserError(f"{kind} needs a closure, which makes a step of several", hint=HINT) from None
        state = self.optimizer.state_dict()["state"]
        parts = [(index, name, _find_shape(name, value)) for index, name, value in _list_values(state)]
        for p in self.parameters:
            p.grad = None
        self.table.values[:] = values
        self.table.adopt_values()
        self.optimizer.load_state_dict(before)
        return parts


def check_optimizer(optimizer: Any, parameters: Sequence[nn.Parameter]) -> None:
    """It is one of torch's, of all these parameters and no others."""
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise UserError(f"a {type(optimizer).__name__} is no optimizer of torch", hint=HINT)
    own = [id(p) for group in optimizer.param_groups for p in group["params"]]
    if sorted(own) != sorted(id(p) for p in parameters):
        raise UserError(
            "the optimizer has other parameters than job.dense keeps",
            hint=f"all that it is given, in whatever groups: {HINT}",
        )


def _list_values(state: dict[int, dict[str, Any]]) -> Iterable[tuple[int, str, Any]]:
    for index in sorted(state):
        for name in sorted(state[index]):
            if state[index][name] is not None:
                yield index, name, state[index][name]


def _find_shape(name: str, value: Any) -> tuple[int, ...]:
    if not isinstance(value, Tensor) or value.dtype != torch.float32:
        kind = value.dtype if isinstance(value, Tensor) else type(value).__name__
        raise UserError(f"the optimizer remembers {name!r} as {kind}; only float32 can be kept", hint=HINT)
    return tuple(value.shape)
