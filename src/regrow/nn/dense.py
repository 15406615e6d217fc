"""Dense parameters as a table of wide rows, so that servers hold and update them like everything else.

The tensors of a module become views into one flat one; the table's rows are that tensor cut into pieces. Pulled rows
are copied into it in one go, and gradients leave it the same way. The optimizer must be elementwise: where one row ends
and the next begins means nothing to the model.

Buffers, such as the running averages of BatchNorm, have no gradient. What a worker pushes for them is how far they have
moved, and an optimizer that does nothing but subtract makes it the mean of all workers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import numpy as np
import torch
from torch import nn

from regrow.core.job import OptimizerSpec, TableSpec
from regrow.errors import UserError

ROW_FLOATS = 512  # Narrower rows cost more bookkeeping per byte; wider ones spread a small model unevenly.
ALIGNMENT_FLOATS = 16  # Every parameter starts on a cache line, as torch's own would.
TABLE_NAME, BUFFERS_NAME = "dense", "buffers"
STATE_NAME = "dense_state"  # of an optimizer in the workers: see `dense_state.py`
ELEMENTWISE = ("sgd", "momentum", "adagrad", "adam")
MOVE = OptimizerSpec(kind="sgd", learning_rate=1.0)

Named = Sequence[tuple[str, torch.Tensor]]


class FlatTable:
    """Tensors on one side, the rows of a table on the other."""

    def __init__(self, tensors: Named, *, name: str, optimizer: OptimizerSpec) -> None:
        self._tensors = [tensor for _, tensor in tensors]
        self.shapes = tuple((label, tuple(tensor.shape)) for label, tensor in tensors)
        self._starts: list[int] = []
        end = 0
        for label, tensor in tensors:
            if tensor.dtype != torch.float32:
                raise ValueError(f"dense parameters must be float32; {label} is {tensor.dtype}")
            self._starts.append(end)
            end += -(-tensor.numel() // ALIGNMENT_FLOATS) * ALIGNMENT_FLOATS
        rows = max(1, -(-end // ROW_FLOATS))
        self.spec = TableSpec(name=name, rows=rows, dim=ROW_FLOATS, init_bound=0.0, optimizer=optimizer)
        # Values arrive in host memory; on a device the tensors are copies of it.
        self._flat = torch.zeros(rows * ROW_FLOATS)
        self._grads = torch.zeros(rows * ROW_FLOATS)
        self._views = self.cut(self._flat)
        self._grad_views = self.cut(self._grads)
        self._on_host = all(tensor.device.type == "cpu" for tensor in self._tensors)
        self.take_values()

    def take_values(self) -> None:
        """What the tensors hold now: at the beginning, and when somebody has loaded others."""
        with torch.no_grad():
            for tensor, view in zip(self._tensors, self._views, strict=True):
                view.copy_(tensor)

    @property
    def values(self) -> np.ndarray[Any, Any]:
        """The flat values, to be filled from pulled rows (then call `adopt_values`)."""
        return self._flat.numpy()

    @property
    def grads(self) -> np.ndarray[Any, Any]:
        """What was taken last."""
        return self._grads.numpy()

    def cut(self, flat: torch.Tensor) -> list[torch.Tensor]:
        """The tensors of a flat one, as views."""
        return [
            flat[start : start + tensor.numel()].view(tensor.shape)
            for tensor, start in zip(self._tensors, self._starts, strict=True)
        ]


class DenseTable(FlatTable):
    """The parameters of a module."""

    def __init__(self, tensors: Named | nn.Module, optimizer: OptimizerSpec) -> None:
        if optimizer.kind not in ELEMENTWISE:
            raise ValueError(f"dense parameters need an elementwise optimizer, not {optimizer.kind}")
        if isinstance(tensors, nn.Module):
            tensors = [(name, p) for name, p in tensors.named_parameters() if p.requires_grad]
        super().__init__(tensors, name=TABLE_NAME, optimizer=optimizer)
        if self._on_host:
            for tensor, view in zip(self._tensors, self._views, strict=True):
                tensor.data = view

    def declare_rate(self, rate: float) -> None:
        """Another learning rate than it was made with."""
        self.spec = msgspec.structs.replace(self.spec, optimizer=OptimizerSpec(kind="sgd", learning_rate=rate))

    def adopt_values(self) -> None:
        """Lets the module see that `values` has changed."""
        if not self._on_host:
            with torch.no_grad():
                torch._foreach_copy_(list[torch.Tensor](self._tensors), self._views)

    def take_grads(self) -> np.ndarray[Any, Any]:
        """The gradients of the last backward, flat; they are cleared from the parameters."""
        for parameter, view in zip(self._tensors, self._grad_views, strict=True):
            if parameter.grad is None:
                view.zero_()
            else:
                view.copy_(parameter.grad)
                parameter.grad = None
        return self._grads.numpy()


class BufferTable(FlatTable):
    """Buffers of a module: they stay where they are, and are copied both ways."""

    def __init__(self, tensors: Named) -> None:
        super().__init__(tensors, name=BUFFERS_NAME, optimizer=MOVE)

    def adopt_values(self) -> None:
        """Lets the module see that `values` has changed."""
        with torch.no_grad():
            torch._foreach_copy_(self._tensors, self._views)

    def take_grads(self) -> np.ndarray[Any, Any]:
        """How far they have moved since `adopt_values`, as something to be subtracted."""
        for buffer, view, moved in zip(self._tensors, self._views, self._grad_views, strict=True):
            torch.sub(view, buffer.detach().cpu(), out=moved)
        return self._grads.numpy()


class Known:
    """The parameters that a module had when the servers got them. One that comes later would stay in its worker, and
    nobody would train it."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self._ids = {id(parameter) for parameter in module.parameters()}

    def check(self) -> None:
        for name, parameter in self.module.named_parameters():
            if id(parameter) not in self._ids and parameter.requires_grad:
                raise UserError(
                    f"the parameter {name!r} came after job.dense: the servers do not have it",
                    hint="make the whole model, and give it to job.dense, before the first step",
                )


class WhenLoaded:
    """Called when a state was loaded into a module. A copy of the module takes this along, and says nothing: what is
    loaded into a copy is not what the servers have."""

    def __init__(self, module: nn.Module | None, write: Callable[[], None] | None) -> None:
        self._module, self._write = module, write

    def __call__(self, module: nn.Module, keys: Any) -> None:
        if module is self._module and self._write is not None:
            self._write()

    def __deepcopy__(self, memo: Any) -> WhenLoaded:
        return WhenLoaded(None, None)

    def __reduce__(self) -> Any:
        return WhenLoaded, (None, None)


def name_buffers(module: nn.Module) -> set[str]:
    """The buffers that belong to a module's state; others follow from its shape."""
    names: set[str] = set()
    for prefix, each in module.named_modules():
        dot = f"{prefix}." if prefix else ""
        names |= {dot + name for name in each._buffers if name not in each._non_persistent_buffers_set}
    return names


def list_buffers(module: nn.Module) -> list[tuple[str, torch.Tensor]]:
    """Those of its state that are averages."""
    kept = name_buffers(module)
    return [(name, b) for name, b in module.named_buffers() if name in kept and b.is_floating_point()]
