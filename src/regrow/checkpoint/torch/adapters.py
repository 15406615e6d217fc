"""How a torch model tells the tracker what it updates: embedding tables of plain torch.

A table is the weight of an `nn.Embedding` or `nn.EmbeddingBag`. What counts is the optimizer's step: rows that were
looked up and not trained are not tracked. A hook on the step reads the indices of the sparse gradient, or the rows of a
dense gradient that are not zero. That is all of the change only for rules that leave a row without gradient alone
(`ROW_LOCAL`); with any other rule, momentum for example, all rows count as updated, and a warning says so once. So they
do in a table that changed while no step was under way, which its version counter shows.

TorchRec's sharded tables, updated inside backward, are in `adapters_torchrec`.
"""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from regrow.checkpoint.columns import find_span
from regrow.checkpoint.manifest import Columns, TableInfo
from regrow.checkpoint.torch.dense import dtype_text, is_per_row
from regrow.checkpoint.torch.tracker import WEIGHT, Tracker
from regrow.errors import CheckpointError

# Optimizers that leave a row alone which has no gradient (or one of zero), given these numbers are zero. By name: one
# of them is TorchRec's, which may not be installed.
ROW_LOCAL: dict[str, tuple[str, ...]] = {
    "SGD": ("momentum", "weight_decay"),
    "Adagrad": ("weight_decay",),
    "RowWiseAdagrad": ("weight_decay",),
    "SparseAdam": (),
}
FLOATS = (torch.float32, torch.float16, torch.bfloat16)  # others have no exact form as 32-bit floats


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """A table, or this process's part of one: rows `first` to `first + len(weight)` of `rows`; where `columns` says
    so, of the table that it names only some columns, `dim` of them."""

    name: str
    rows: int
    dim: int
    first: int
    states: Callable[[], dict[str, Tensor]]  # the live tensors, "weight" among them
    prepare: Callable[[Mapping[str, int]], None]  # have states of these names and widths, and no others: they come
    scalars: Callable[[], dict[str, Any]] = dict  # what the optimizer knows about the table as a whole
    load_scalars: Callable[[Mapping[str, Any]], None] = lambda scalars: None
    columns: Columns | None = None

    @property
    def whole(self) -> str:
        """The name of the table that people know."""
        return self.name if self.columns is None else self.columns.of

    @property
    def span(self) -> tuple[int, int]:
        """Columns, from the first to behind the last."""
        return find_span(self.dim, self.columns)

    def info(self, index: int) -> TableInfo:
        found = ((name, values[:1].numel()) for name, values in self.states().items() if name != WEIGHT)
        states = tuple(sorted(found))
        return TableInfo(
            name=self.name,
            rows=self.rows,
            dim=self.dim,
            states=states,
            init_bound=None,
            index=index,
            columns=self.columns,
        )


class Adapter(Protocol):
    """Knows some tables of a model, and tells a tracker of every update between `attach` and `detach`."""

    tables: list[Table]

    def attach(self, tracker: Tracker) -> None: ...
    def detach(self) -> None: ...
    def before_cut(self) -> None:
        """Last words before rows are copied: tensors that were replaced, changes nobody announced."""


def embedding_weights(model: nn.Module, *, skipped: Iterable[str] = ()) -> dict[str, nn.Parameter]:
    """The parameters that are tables, by name."""
    weights = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding | nn.EmbeddingBag)}
    without = set(skipped)
    return {
        name: parameter
        for name, parameter in model.named_parameters()
        if id(parameter) in weights and parameter.dtype in FLOATS and len(parameter) and name not in without
    }


class TorchAdapter:
    """Tables of `nn.Embedding` and `nn.EmbeddingBag`, under any number of optimizers."""

    def __init__(
        self,
        weights: Mapping[str, nn.Parameter],
        optimizers: Sequence[torch.optim.Optimizer],
        *,
        row_local: Sequence[type[torch.optim.Optimizer]] = (),
    ) -> None:
        self._weights = dict(weights)
        self._names = {id(parameter): name for name, parameter in weights.items()}
        self._optimizers = list(optimizers)
        self._row_local = tuple(row_local)
        self._owners = self._find_owners()
        self._versions: dict[str, int] = {}
        self._warned: set[str] = set()
        self._handles: list[Any] = []
        self._tracker = Tracker()
        self.tables = [self._table(name, parameter) for name, parameter in weights.items()]

    def attach(self, tracker: Tracker) -> None:
        self._tracker = tracker
        for table in self.tables:
            tracker.track(table.name, torch.empty(0, dtype=torch.int64), table.states())
        self.note_versions()
        for optimizer in self._optimizers:
            self._handles.append(optimizer.register_step_pre_hook(self._before_step))
            self._handles.append(optimizer.register_step_post_hook(self._after_step))

    def detach(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def before_cut(self) -> None:
        for table in self.tables:
            self._look_for_strangers(table.name)
            self._tracker.track(table.name, torch.empty(0, dtype=torch.int64), table.states())

    def versions(self) -> dict[str, int]:
        return {name: parameter._version for name, parameter in self._weights.items()}

    def note_versions(self) -> None:
        """As tables are now, they are known."""
        self._versions = self.versions()

    def _before_step(self, optimizer: torch.optim.Optimizer, *arguments: Any) -> None:
        for name, _, _ in self._own(optimizer):
            self._look_for_strangers(name)

    def _after_step(self, optimizer: torch.optim.Optimizer, *arguments: Any) -> None:
        # After, not before: with a closure, gradients are made inside the step.
        for name, parameter, group in self._own(optimizer):
            if parameter.grad is None:
                self._look_for_strangers(name)
                continue
            self._tracker.track(name, self._find_updated(optimizer, group, name, parameter.grad))
            self._versions[name] = parameter._version

    def _find_updated(
        self, optimizer: torch.optim.Optimizer, group: Mapping[str, Any], name: str, grad: Tensor
    ) -> Tensor | None:
        if reason := self._not_row_local(optimizer, group):
            self._warn(name, f"{reason} changes rows that have no gradient")
            return None
        if grad.is_sparse:
            return grad._indices()[0]
        return grad.detach().reshape(len(grad), -1).ne(0).any(dim=1).nonzero()[:, 0]

    def _not_row_local(self, optimizer: torch.optim.Optimizer, group: Mapping[str, Any]) -> str | None:
        kind = type(optimizer)
        if kind in self._row_local:
            return None
        if kind.__name__ not in ROW_LOCAL or not kind.__module__.startswith(("torch.", "torchrec.")):
            return f"as far as we know {kind.__name__}"
        strong = [key for key in ROW_LOCAL[kind.__name__] if group.get(key)]
        return f"{kind.__name__} with {strong[0]}" if strong else None

    def _look_for_strangers(self, name: str) -> None:
        version = self._weights[name]._version
        if version != self._versions[name]:
            self._versions[name] = version
            self._warn(name, "it was changed outside of the optimizers' steps (load_state_dict, max_norm, in place)")
            self._tracker.track(name, None)

    def _warn(self, name: str, reason: str) -> None:
        if name not in self._warned:
            self._warned.add(name)
            warnings.warn(
                f"checkpoints: all rows of {name!r} count as updated, so deltas hold the whole table: {reason}",
                stacklevel=4,
            )

    def _own(self, optimizer: torch.optim.Optimizer) -> Iterable[tuple[str, nn.Parameter, Mapping[str, Any]]]:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if (name := self._names.get(id(parameter))) is not None:
                    yield name, parameter, group

    def _find_owners(self) -> dict[str, torch.optim.Optimizer]:
        owners: dict[str, torch.optim.Optimizer] = {}
        for optimizer in self._optimizers:
            for name, _, _ in self._own(optimizer):
                if name in owners:
                    raise CheckpointError(f"{name!r} has two optimizers; their state per row cannot be told apart")
                owners[name] = optimizer
        return owners

    def _table(self, name: str, parameter: nn.Parameter) -> Table:
        rows, dim = parameter.shape
        owner = self._owners.get(name)

        def states() -> dict[str, Tensor]:
            found: dict[str, Tensor] = {WEIGHT: parameter}
            for key, value in (owner.state.get(parameter, {}) if owner is not None else {}).items():
                if is_per_row(value, rows):
                    found[key] = value
            return found

        def prepare(widths: Mapping[str, int]) -> None:
            if owner is None and widths:
                raise CheckpointError(f"{name!r} was saved with optimizer state; it has no optimizer here")
            state = owner.state[parameter] if owner is not None else {}
            for key in [key for key, value in state.items() if is_per_row(value, rows)]:
                if key not in widths or state[key][:1].numel() != widths[key]:
                    del state[key]
            for key in widths.keys() - state.keys():
                shape = (rows, dim) if widths[key] == dim else (rows, widths[key])
                state[key] = torch.zeros(shape, dtype=parameter.dtype, device=parameter.device)

        def scalars() -> dict[str, Any]:
            return {"dtype": dtype_text(parameter)}

        return Table(name=name, rows=rows, dim=dim, first=0, states=states, prepare=prepare, scalars=scalars)


def all_optimizers(model: nn.Module, given: Sequence[Any]) -> list[torch.optim.Optimizer]:
    """The optimizers that step: those inside of TorchRec's wrappers, and those that run in backward."""
    found: list[torch.optim.Optimizer] = []
    waiting = list(given)
    while waiting:
        optimizer = waiting.pop(0)
        if hasattr(optimizer, "_optims"):  # torchrec.optim.CombinedOptimizer
            waiting[:0] = [inner for _, inner in optimizer.optimizers]
        elif hasattr(optimizer, "_optimizer"):  # torchrec.optim.KeyedOptimizerWrapper and the like
            waiting.insert(0, optimizer._optimizer)
        elif not _is_fused(optimizer):
            found.append(optimizer)
    for parameter in model.parameters():
        for optimizer in getattr(parameter, "_in_backward_optimizers", ()):
            if not _is_fused(optimizer) and not any(optimizer is each for each in found):
                found.append(optimizer)
    return found


def _is_fused(optimizer: Any) -> bool:
    """Its state is in a kernel, whose adapter takes care of it."""
    return any(kind.__name__ == "FusedOptimizer" for kind in type(optimizer).__mro__)
