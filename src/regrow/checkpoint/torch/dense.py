"""Everything of a torch model that is not a row of a table: other parameters, buffers, and their optimizer state.

It goes whole into every cut, as one safetensors file (tensors by name, the rest as JSON in its header) that is cut into
rows of a table called `dense`, 1 KiB each, much as Regrow keeps its own dense parameters. So deltas, merged pieces and
fulls all hold it, and whoever checks, merges or prunes them need not know about it. The first row begins with the
length of the file. Rows are never quantised: they are bytes.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import safetensors.torch
import torch
from torch import Tensor, nn

from regrow.checkpoint.chunks import DENSE, Floats, Rows
from regrow.checkpoint.manifest import TableInfo
from regrow.errors import CheckpointError

ROW_FLOATS = 256
ROW_BYTES = 4 * ROW_FLOATS
ROWS_MIN = 64  # A table cannot grow later: it begins with twice the rows it needs, and no fewer than this.

MODEL = "model/"  # before the names of a model's tensors, in the file
_LENGTH = struct.Struct("<Q")
_METADATA = "regrow"
_INDICES, _VALUES = "#indices", "#values"  # of a sparse tensor, behind its name


# ---- bytes


def pack(tensors: Mapping[str, Tensor], scalars: Any) -> bytes:
    """One file. `scalars` is anything JSON can say; NaN and infinity included, since only we read it."""
    held = {name: tensor.cpu().contiguous() for name, tensor in tensors.items()}
    return safetensors.torch.save(held, {_METADATA: json.dumps(scalars)})


def unpack(data: bytes) -> tuple[dict[str, Tensor], Any]:
    (length,) = _LENGTH.unpack_from(data)
    header = json.loads(data[_LENGTH.size : _LENGTH.size + length])
    return safetensors.torch.load(data), json.loads(header["__metadata__"][_METADATA])


def unpack_model(data: bytes) -> dict[str, Tensor]:
    """The model's tensors by their names."""
    found, _ = unpack(data)
    return {name.removeprefix(MODEL): tensor for name, tensor in found.items() if name.startswith(MODEL)}


def to_rows(data: bytes) -> Rows:
    whole = _LENGTH.pack(len(data)) + data
    whole += b"\0" * (-len(whole) % ROW_BYTES)
    values = np.frombuffer(whole, np.float32).reshape(-1, ROW_FLOATS)
    return Rows(np.arange(len(values), dtype=np.uint32), values, {})


def table_info(data_bytes: int, *, index: int, rows_before: int = 0) -> TableInfo:
    """The table, as large as before if that is enough."""
    needed = count_rows(data_bytes)
    rows = rows_before if needed <= rows_before else max(ROWS_MIN, 2 * needed)
    return TableInfo(name=DENSE, rows=rows, dim=ROW_FLOATS, states=(), init_bound=None, index=index)


def count_rows(data_bytes: int) -> int:
    """That a file of so many bytes fills."""
    return -(-(data_bytes + _LENGTH.size) // ROW_BYTES)


class Gathered:
    """Rows of the table as they are read, in any number of parts; later ones overwrite earlier ones."""

    def __init__(self, table: TableInfo) -> None:
        self._values = np.zeros((table.rows, table.dim), np.float32)

    def write(self, rows: Rows) -> None:
        self._values[rows.ids] = rows.weight

    def file(self) -> bytes:
        return file_of(self._values)


def file_of(values: Floats) -> bytes:
    """The file in the rows of a whole table."""
    data = values.reshape(-1).view(np.uint8).data
    (length,) = _LENGTH.unpack_from(data)
    if length > len(data) - _LENGTH.size:
        raise CheckpointError(f"the dense part says it has {length} bytes; it cannot")
    return bytes(data[_LENGTH.size : _LENGTH.size + length])


# ---- what there is in a model


class DenseState:
    """Reads and writes the dense part of a model. `tables` are the parameters whose rows are tracked, by name, and
    `elsewhere` the names of those that are no affair of this process."""

    def __init__(
        self,
        model: nn.Module,
        optimizers: Sequence[torch.optim.Optimizer],
        *,
        tables: Mapping[str, Tensor],
        elsewhere: Iterable[str] = (),
    ) -> None:
        self.optimizers = list(optimizers)
        self._tables = tables
        skipped = {*tables, *elsewhere}
        self._names = {id(parameter): name for name, parameter in model.named_parameters()}
        kept = set(_persistent(model))
        self.tensors: dict[str, Tensor] = {
            name: tensor
            for name, tensor in (*model.named_parameters(), *model.named_buffers())
            if name not in skipped and (isinstance(tensor, nn.Parameter) or name in kept)
        }
        owned = (p for optimizer in self.optimizers for group in optimizer.param_groups for p in group["params"])
        if strangers := [parameter for parameter in owned if id(parameter) not in self._names]:
            raise CheckpointError(
                f"an optimizer has a parameter {list(strangers[0].shape)} that is not the model's",
                hint="give the checkpointer the model that holds all parameters of its optimizers",
            )

    def describe(self) -> dict[str, Any]:
        """For the manifest: enough to tell, before anything is read, whether a model is the one that was saved."""
        return {
            "tensors": {name: shape_text(tensor) for name, tensor in self.tensors.items()},
            "optimizers": [
                {"type": type(o).__name__, "parameters": [self._group_names(group) for group in o.param_groups]}
                for o in self.optimizers
            ],
        }

    def invalid_reason(self, described: Mapping[str, Any], *, with_optimizers: bool) -> str | None:
        """Says where the model differs from what was saved, or None."""
        own = self.describe()
        if with_optimizers and own["optimizers"] != described["optimizers"]:
            return f"optimizers: saved were {described['optimizers']}, there are {own['optimizers']}"
        saved = described["tensors"]
        for name, text in own["tensors"].items():
            if saved.get(name) != text:
                return f"{name!r} is {text} here and {saved.get(name, 'not there')} in the checkpoint"
        if missing := sorted(set(saved) - set(own["tensors"])):
            return f"{missing[0]!r} is in the checkpoint ({saved[missing[0]]}) and not in the model"
        return None

    def collect(self) -> tuple[dict[str, Tensor], Any]:
        """Everything, for `pack`, which copies it."""
        found, _ = self.collect_model()
        said = []
        for index, optimizer in enumerate(self.optimizers):
            state: dict[str, dict[str, Any]] = {}
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    name = self._names[id(parameter)]
                    for key, value in optimizer.state.get(parameter, {}).items():
                        if self._is_per_row(name, value):
                            continue
                        if isinstance(value, Tensor):
                            found.update(_parts(f"optimizer.{index}/{name}/{key}", value.detach()))
                        else:
                            state.setdefault(name, {})[key] = _plain(value, f"{name}: {key}")
            said.append({"groups": [self._group(group) for group in optimizer.param_groups], "state": state})
        return found, {"optimizers": said}

    def collect_model(self) -> tuple[dict[str, Tensor], Any]:
        """The model's own, without anything of optimizers."""
        return {f"{MODEL}{name}": tensor.detach() for name, tensor in self.tensors.items()}, {}

    def load(self, tensors: Mapping[str, Tensor], scalars: Any, *, with_optimizers: bool) -> None:
        """Writes back what `collect` found. It was checked that it fits."""
        with torch.no_grad():
            for name, tensor in self.tensors.items():
                tensor.copy_(tensors[f"{MODEL}{name}"])
        if not with_optimizers:
            return
        by_name: dict[tuple[int, str], dict[str, Tensor]] = {}
        for full_name in tensors:
            where, _, rest = full_name.partition("/")
            if where != "model":
                name, _, key = rest.rpartition("/")
                if not key.endswith(_VALUES):
                    made = _whole(full_name, tensors)
                    key = key.removesuffix(_INDICES)
                    by_name.setdefault((int(where.removeprefix("optimizer.")), name), {})[key] = made
        for index, (optimizer, said) in enumerate(zip(self.optimizers, scalars["optimizers"], strict=True)):
            for group, values in zip(optimizer.param_groups, said["groups"], strict=True):
                for key, value in values.items():
                    if isinstance(group.get(key), Tensor):
                        group[key].fill_(value)
                    else:
                        group[key] = tuple(value) if isinstance(value, list) else value
                for parameter in group["params"]:
                    name = self._names[id(parameter)]
                    state = optimizer.state[parameter]
                    for key in [key for key, value in state.items() if not self._is_per_row(name, value)]:
                        del state[key]
                    state.update(by_name.get((index, name), {}))
                    state.update(said["state"].get(name, {}))
                    if not state:
                        del optimizer.state[parameter]  # as before the first step

    def _is_per_row(self, name: str, value: Any) -> bool:
        table = self._tables.get(name)
        return table is not None and is_per_row(value, len(table))

    def _group_names(self, group: Mapping[str, Any]) -> list[str]:
        return [self._names[id(parameter)] for parameter in group["params"]]

    def _group(self, group: Mapping[str, Any]) -> dict[str, Any]:
        return {key: _plain(value, key) for key, value in group.items() if key != "params"}


def is_per_row(value: Any, rows: int) -> bool:
    """Whether optimizer state has one entry per row of its table. A sparse one (SGD's momentum) is not cut into rows:
    it has several entries for a row, and their sum, rounded, is not the same."""
    if not isinstance(value, Tensor) or value.is_sparse or value.ndim < 1:
        return False
    return len(value) == rows and value.is_floating_point()


def shape_text(tensor: Tensor) -> str:
    return f"{dtype_text(tensor)} {list(tensor.shape)}"


def dtype_text(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _parts(name: str, tensor: Tensor) -> dict[str, Tensor]:
    """A sparse tensor as two that are not, with its shape behind the indices: it comes back entry by entry."""
    if not tensor.is_sparse:
        return {name: tensor}
    shape = torch.tensor(tensor.shape, device=tensor.device)[: tensor.sparse_dim()].reshape(-1, 1)
    return {name + _INDICES: torch.cat([tensor._indices(), shape], dim=1), name + _VALUES: tensor._values()}


def _whole(name: str, tensors: Mapping[str, Tensor]) -> Tensor:
    if not name.endswith(_INDICES):
        return tensors[name].clone()
    indices, values = tensors[name], tensors[name.removesuffix(_INDICES) + _VALUES]
    shape = (*indices[:, -1].tolist(), *values.shape[1:])
    return torch.sparse_coo_tensor(indices[:, :-1], values, shape, check_invariants=True)


def _plain(value: Any, where: str) -> Any:
    """What JSON can say of an optimizer's number. A tensor of one (a learning rate, say) becomes a number."""
    if isinstance(value, Tensor) and value.numel() == 1:
        return value.item()
    if isinstance(value, tuple | list):
        return [_plain(each, where) for each in value]
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise CheckpointError(f"{where} is a {type(value).__name__}, which cannot be saved")


def _persistent(model: nn.Module) -> Iterable[str]:
    """Names of the buffers that a state_dict would have."""
    for path, module in model.named_modules():
        for name in module._buffers:
            if name not in module._non_persistent_buffers_set:
                yield f"{path}.{name}" if path else name
