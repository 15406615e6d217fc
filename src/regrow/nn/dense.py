"""Dense parameters as a table of wide rows, so that servers hold and update them like everything else.

All parameters of a module become views into one flat tensor; the table's rows are that tensor cut into pieces.
Pulled rows are copied into it in one go, and gradients leave it the same way. The optimizer must be elementwise:
where one row ends and the next begins means nothing to the model.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import nn

from regrow.core.job import OptimizerSpec, TableSpec

ROW_FLOATS = 512  # Narrower rows cost more bookkeeping per byte; wider ones spread a small model unevenly.
ALIGNMENT_FLOATS = 16  # Every parameter starts on a cache line, as torch's own would.
TABLE_NAME = "dense"
ELEMENTWISE = ("sgd", "momentum", "adagrad", "adam")


class DenseTable:
    """The parameters of a module on one side, the rows of a table on the other."""

    def __init__(self, module: nn.Module, optimizer: OptimizerSpec) -> None:
        if optimizer.kind not in ELEMENTWISE:
            raise ValueError(f"dense parameters need an elementwise optimizer, not {optimizer.kind}")
        self._parameters = [p for p in module.parameters() if p.requires_grad]
        self._starts: list[int] = []
        end = 0
        for parameter in self._parameters:
            if parameter.dtype != torch.float32:
                raise ValueError(f"dense parameters must be float32, not {parameter.dtype}")
            self._starts.append(end)
            end += -(-parameter.numel() // ALIGNMENT_FLOATS) * ALIGNMENT_FLOATS
        rows = max(1, -(-end // ROW_FLOATS))
        self.spec = TableSpec(name=TABLE_NAME, rows=rows, dim=ROW_FLOATS, init_bound=0.0, optimizer=optimizer)
        # Values arrive in host memory; on a device the parameters are copies of it.
        self._flat = torch.zeros(rows * ROW_FLOATS)
        self._grads = torch.zeros(rows * ROW_FLOATS)
        self._views = self._adopt(self._flat)
        self._grad_views = self._adopt(self._grads)
        self._on_host = all(parameter.device.type == "cpu" for parameter in self._parameters)
        with torch.no_grad():
            for parameter, view in zip(self._parameters, self._views, strict=True):
                view.copy_(parameter)
                if self._on_host:
                    parameter.data = view

    @property
    def values(self) -> np.ndarray[Any, Any]:
        """The flat values, to be filled from pulled rows (then call `adopt_values`)."""
        return self._flat.numpy()

    def adopt_values(self) -> None:
        """Lets the module see that `values` has changed."""
        if not self._on_host:
            with torch.no_grad():
                torch._foreach_copy_(list[torch.Tensor](self._parameters), self._views)

    def take_grads(self) -> np.ndarray[Any, Any]:
        """The gradients of the last backward, flat; they are cleared from the parameters."""
        for parameter, view in zip(self._parameters, self._grad_views, strict=True):
            if parameter.grad is None:
                view.zero_()
            else:
                view.copy_(parameter.grad)
                parameter.grad = None
        return self._grads.numpy()

    def _adopt(self, flat: torch.Tensor) -> list[torch.Tensor]:
        return [
            flat[start : start + parameter.numel()].view(parameter.shape)
            for parameter, start in zip(self._parameters, self._starts, strict=True)
        ]
