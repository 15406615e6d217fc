"""TorchRec's sharded tables: `ShardedEmbeddingBagCollection` and `ShardedEmbeddingCollection`, with fused kernels.

Their optimizer runs inside backward, in FBGEMM, and there is no step to hook. What there is: a kernel module per group
of tables (`BatchedFused...`), whose forward takes the ids of this rank's rows, and whose output has a gradient if and
only if the kernel's backward runs. So a forward hook keeps the ids, and a hook on the output's gradient tracks them. An
evaluation or a loss that is never taken backward tracks nothing. Weights and optimizer state are views of the kernel's
memory.

A rank holds rows [first, first + n) of a table (row-wise), all of them or none (table-wise), and writes only those.
Data-parallel tables are plain parameters on every rank and belong to the dense part. A shard with some of a table's
columns is a table of its own here, as it is for its kernel: it has its own optimizer state, and several may be on a
rank; `checkpoint/columns.py` joins them. TorchRec's own `ModelDeltaTracker` is not used: it counts look-ups.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from regrow.checkpoint.columns import range_name
from regrow.checkpoint.manifest import Columns
from regrow.checkpoint.torch.adapters import FLOATS, Table
from regrow.checkpoint.torch.dense import dtype_text
from regrow.checkpoint.torch.tracker import WEIGHT, Tracker
from regrow.errors import CheckpointError

SHARDED = {"ShardedEmbeddingBagCollection": "embedding_bags", "ShardedEmbeddingCollection": "embeddings"}
KERNELS = ("BatchedFusedEmbeddingBag", "BatchedFusedEmbedding")
SHARDINGS = ("table_wise", "row_wise", "table_row_wise", "column_wise", "table_column_wise", "grid_shard")
# FBGEMM's rules that change the rows of a batch and no others.
ROW_LOCAL = {
    "EXACT_ADAGRAD",
    "EXACT_ROWWISE_ADAGRAD",
    "EXACT_SGD",
    "ADAM",
    "LAMB",
    "PARTIAL_ROWWISE_ADAM",
    "PARTIAL_ROWWISE_LAMB",
}


def unwrap(model: nn.Module) -> nn.Module:
    """The model without DistributedModelParallel and DistributedDataParallel around it, so that names are plain."""
    inner: Any = model
    while type(inner).__name__ in ("DistributedModelParallel", "DistributedDataParallel"):
        inner = inner.module
    assert isinstance(inner, nn.Module)
    return inner


class TorchRecAdapter:
    """The fused tables of all sharded collections in a model. `names` are those of all ranks together."""

    def __init__(self, model: nn.Module) -> None:
        self.tables: list[Table] = []
        self.names: set[str] = set()
        self._kernels: list[tuple[Any, list[str]]] = []
        self._handles: list[Any] = []
        self._tracker = Tracker()
        self._warned = False
        for path, module in model.named_modules():
            attribute = _find_sharded_attribute(module)
            if attribute is not None:
                self._add(module, f"{path}.{attribute}" if path else attribute)

    def attach(self, tracker: Tracker) -> None:
        self._tracker = tracker
        self.before_cut()
        for kernel, names in self._kernels:
            self._handles.append(kernel.register_forward_hook(self._hook(kernel, names)))

    def detach(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def before_cut(self) -> None:
        for kernel, _ in self._kernels:
            kernel.flush()  # rows that are cached on a GPU
        for table in self.tables:
            self._tracker.track(table.name, torch.empty(0, dtype=torch.int64), table.states())

    def _add(self, module: Any, prefix: str) -> None:
        for table, sharding in module.module_sharding_plan.items():
            name = f"{prefix}.{table}.weight"
            if sharding.sharding_type == "data_parallel":
                continue
            if sharding.sharding_type not in SHARDINGS:
                raise CheckpointError(
                    f"{name!r} is sharded {sharding.sharding_type}; only {', '.join(SHARDINGS)} and data_parallel"
                    " tables can be saved"
                )
            if not sharding.compute_kernel.startswith("fused"):
                raise CheckpointError(
                    f"{name!r} has the compute kernel {sharding.compute_kernel!r}; only fused ones can be saved",
                    hint="give its parameters an optimizer with apply_optimizer_in_backward before sharding",
                )
            self.names.add(name)
        for kernel in _kernels(module):
            configs = kernel._config.embedding_tables
            names = [f"{prefix}.{config.name}.weight" for config in configs]
            if set(names) <= self.names:
                tables = [_table(kernel, index, config, names[index]) for index, config in enumerate(configs)]
                self._kernels.append((kernel, [table.name for table in tables]))
                self.tables += tables

    def _hook(self, kernel: Any, names: list[str]) -> Any:
        owners = [
            name
            for name, config in zip(names, kernel._config.embedding_tables, strict=True)
            for _ in config.feature_names
        ]
        local = kernel.emb_module.optimizer.name in ROW_LOCAL

        def after_forward(_: nn.Module, arguments: tuple[Any, ...], output: Any) -> None:
            if not isinstance(output, Tensor) or not output.requires_grad:
                return
            features = arguments[0]
            ids, ends = features.values(), features.offset_per_key()
            assert len(ends) == len(owners) + 1, f"{features.keys()} for tables {names}"

            def in_backward(_: Tensor) -> None:
                for index, name in enumerate(owners):
                    self._tracker.track(name, ids[ends[index] : ends[index + 1]] if local else None)
                if not local:
                    self._warn(names, kernel.emb_module.optimizer.name)

            output.register_hook(in_backward)

        return after_forward

    def _warn(self, names: list[str], rule: str) -> None:
        if not self._warned:
            self._warned = True
            warnings.warn(
                f"checkpoints: all rows of {', '.join(map(repr, names))} count as updated: {rule} may change any row",
                stacklevel=2,
            )


def _find_sharded_attribute(module: nn.Module) -> str | None:
    for kind in type(module).__mro__:
        if kind.__name__ in SHARDED and kind.__module__.startswith("torchrec."):
            return SHARDED[kind.__name__]
    return None


def _kernels(module: Any) -> Iterator[Any]:
    # The look-ups are in a list that torch does not see as submodules.
    for lookup in module._lookups:
        for each in lookup.modules():
            if type(each).__name__ in KERNELS:
                yield each


def _find_columns(config: Any, of: str) -> Columns | None:
    """Of a shard; None if it has all of them."""
    if config.local_metadata is None or config.local_cols == config.embedding_dim:
        return None
    return Columns(of=of, first=config.local_metadata.shard_offsets[1], dim=config.embedding_dim)


def _table(kernel: Any, index: int, config: Any, of: str) -> Table:
    tbe = kernel.emb_module
    columns = _find_columns(config, of)
    name = of if columns is None else range_name(of, columns.first, config.local_cols)

    def states() -> dict[str, Tensor]:
        found = {WEIGHT: tbe.split_embedding_weights()[index]}
        kept = tbe.get_optimizer_state()
        for key, value in (kept[index] if index < len(kept) else {}).items():
            if value.ndim and len(value) == config.local_rows and value.is_floating_point() and key != "iter":
                found[key] = value
        return found

    def prepare(widths: Mapping[str, int]) -> None:
        own = {key: value[:1].numel() for key, value in states().items() if key != WEIGHT}
        if own != widths:
            raise CheckpointError(f"{name!r} was saved with optimizer state {dict(widths)}; its kernel has {own}")

    def scalars() -> dict[str, Any]:
        rate = tbe.get_learning_rate()
        return {"dtype": dtype_text(states()[WEIGHT]), "iter": int(tbe.iter.item()), "learning_rate": rate}

    def load_scalars(said: Mapping[str, Any]) -> None:
        tbe.iter.fill_(said["iter"])
        tbe.iter_cpu.fill_(said["iter"])
        tbe.set_learning_rate(said["learning_rate"])
        for group in kernel.fused_optimizer.param_groups:
            group["lr"] = said["learning_rate"]  # its next step would write this one to the kernel

    weight = states()[WEIGHT]
    if weight.dtype not in FLOATS:
        raise CheckpointError(f"{name!r} has rows of {weight.dtype}, which cannot be saved")
    return Table(
        name=name,
        rows=config.num_embeddings,
        dim=config.embedding_dim if columns is None else config.local_cols,
        columns=columns,
        first=config.local_metadata.shard_offsets[0] if config.local_metadata is not None else 0,
        states=states,
        prepare=prepare,
        scalars=scalars,
        load_scalars=load_scalars,
    )
