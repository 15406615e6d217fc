"""A cut as an ordinary state_dict, for those who serve the model and have no Regrow: safetensors, or torch's own
distributed checkpoint (DCP).

The rule: memory does not grow with the tables. Every tensor has its place in one file of known size, which is mapped;
rows that nobody touched are computed, the rest is written over them piece by piece, as a restore does. The file gets
its name when it is complete. Weights only: whoever wants to train on restores the cut instead.

Names are those of the model that was trained, as its checkpoints have them: `load_state_dict` of the same module takes
them. A table that is not in the module is called as TorchRec calls it, `embedding_bags.<table>.weight`; columns that
were divided are joined. `prefix` goes in front of each.
"""

from __future__ import annotations

import dataclasses
import errno
import os
import secrets
import shutil
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import msgspec
import numpy as np
import numpy.typing as npt

from regrow import _kernels
from regrow.checkpoint import load
from regrow.checkpoint.chunks import BUFFERS, DENSE, WEIGHTLESS, Chunk
from regrow.checkpoint.columns import join_tables, view_ranges
from regrow.checkpoint.lineage import Graph, Plan
from regrow.checkpoint.manifest import Manifest, TableInfo
from regrow.checkpoint.model_names import cut_tensors
from regrow.checkpoint.model_names import find as find_names
from regrow.checkpoint.storage import Storage
from regrow.errors import CheckpointError, UserError
from regrow.units import size_text

Format = Literal["safetensors", "dcp"]

# Initial values are made by a server's arena that holds every n-th row, n so large that an arena takes about this much.
INITIAL_BYTES = 16 << 20
INITIAL_ARENAS_MAX = 4096
DTYPES = {  # torch's names, safetensors' names, bytes
    "float64": ("F64", 8),
    "int64": ("I64", 8),
    "float32": ("F32", 4),
    "int32": ("I32", 4),
    "float16": ("F16", 2),
    "bfloat16": ("BF16", 2),
    "int16": ("I16", 2),
    "int8": ("I8", 1),
    "uint8": ("U8", 1),
    "bool": ("BOOL", 1),
}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Exported:
    """What was written: the tensors' names and shapes, and the restore it took."""

    path: Path
    tensors: dict[str, tuple[int, ...]]
    bytes: int
    report: load.LoadReport


def export(
    storage: Storage,
    cut: Plan | str | None,
    target: str | os.PathLike[str],
    *,
    format: Format = "safetensors",
    prefix: str = "",
    dense_shapes: Mapping[str, Sequence[int]] | None = None,
    progress: load.Progress | None = None,
) -> Exported:
    """Writes a cut (a plan, an id, a step; None: the newest) to a local file (safetensors) or directory (dcp).

    `dense_shapes` names the dense parameters of a model that Regrow's servers trained, in the order of its
    `named_parameters()`, where the cut has no names for them (it is older than these, or the model very large); without
    any they are exported as they are stored, as rows of a table. `progress` hears of bytes done and in all: initial
    values that were computed, then pieces that were read.
    """
    if format not in ("safetensors", "dcp"):
        raise UserError(f"format = {format!r}: it must be 'safetensors' or 'dcp'")
    path = Path(target)
    if path.exists() and (format == "safetensors" or path.is_file() or any(path.iterdir())):
        raise UserError(f"{path} is there already", hint="choose another name, or remove it first")
    plan = cut if isinstance(cut, Plan) else Graph(storage.manifests()[0]).restore_plan(cut)[0]
    path.parent.mkdir(parents=True, exist_ok=True)
    scratch = path.parent / f".{path.name}.tmp-{secrets.token_hex(4)}"
    try:
        work = _Export(plan, scratch, prefix=prefix, dense_shapes=dense_shapes)
        if format == "dcp":  # torch writes them once more, beside ours
            _check_space(path, work.bytes)
        told = progress or (lambda done, total: None)
        work.fill(lambda done: told(done, work.bytes + plan.bytes))
        report = load.restore(
            storage, plan, work.apply, progress=lambda done, total: told(work.bytes + done, work.bytes + total)
        )
        tensors = work.finish()
        if format == "dcp":
            _save_dcp(tensors, path)
        else:
            os.replace(scratch, path)
            _sync_directory(path.parent)
    finally:
        scratch.unlink(missing_ok=True)
    return Exported(path=path, tensors=work.shapes, bytes=work.bytes, report=report)


class _Export:
    """The file in the making: tables are filled in as rows come, the dense part of a torch model at the end."""

    def __init__(
        self, plan: Plan, scratch: Path, *, prefix: str, dense_shapes: Mapping[str, Sequence[int]] | None
    ) -> None:
        last = plan.pieces[-1]
        self._prefix = prefix
        self._of_torch = last.target.job.get("framework") == "torch"
        self._tables = {table.name: table for table in last.tables}
        self._names = find_names(last.target)
        if dense_shapes is not None:
            shapes = tuple((name, tuple(shape)) for name, shape in dense_shapes.items())
            self._names = msgspec.structs.replace(self._names, dense=shapes)
        # Rows that are no tensor of the result by themselves are gathered beside it.
        self._flat: dict[str, npt.NDArray[np.float32]] = {
            table.name: np.zeros((table.rows, table.dim), np.float32)
            for table in last.tables
            if (self._of_torch and table.name == DENSE) or self._names.find_shapes(table.name)
        }
        self._wholes = list(join_tables(self._row_tables()).values())
        self._file = _File(scratch, self._layout(last))
        tensors = {whole.name: self._file.tensors[self._name(whole.name)] for whole in self._wholes}
        self._rows = view_ranges(self._wholes, tensors)  # by the table's name on storage
        self.shapes = {name: tuple(shape) for name, (_, shape) in self._layout(last).items()}
        self.bytes = self._file.bytes
        self._full, self._seed = plan.pieces[0], last.seed

    def fill(self, progress: Callable[[int], None]) -> None:
        """What rows are that no piece holds."""
        done = 0
        for table in self._row_tables():
            values = self._rows[table.name]
            if table.init_bound is None:
                _check_whole(self._full, table)
            elif table.init_bound:
                for count in fill_initial(values.numpy(), table, seed=self._seed):
                    done += count
                    progress(done)

    def apply(self, _: Manifest, chunk: Chunk) -> None:
        import torch

        for name, rows in chunk.items():
            if name in WEIGHTLESS:
                continue
            if name in self._flat:
                self._flat[name][rows.ids] = rows.weight
            else:
                target = self._rows[name]
                target[torch.from_numpy(rows.ids.astype(np.int64))] = torch.from_numpy(rows.weight).to(target.dtype)

    def finish(self) -> dict[str, Any]:
        """The tensors, mapped; they are on the disk when this returns."""
        for table, rows in self._flat.items():
            for name, values in self._cut(table, rows).items():
                self._file.tensors[self._prefix + name].copy_(values)
        self._file.flush()
        return self._file.tensors

    def _row_tables(self) -> list[TableInfo]:
        left_out = {*WEIGHTLESS, *self._flat}
        return [table for table in self._tables.values() if table.name not in left_out]

    def _name(self, table: str) -> str:
        if self._of_torch or table in (DENSE, BUFFERS):
            return self._prefix + table
        return self._prefix + self._names.tables.get(table, f"embedding_bags.{table}.weight")

    def _layout(self, last: Manifest) -> dict[str, tuple[str, tuple[int, ...]]]:
        """Name -> (dtype, shape) of everything there will be."""
        said = last.target.job.get("tables", {}) if self._of_torch else {}
        found: dict[str, tuple[str, tuple[int, ...]]] = {
            self._name(whole.name): (
                said.get(whole.ranges[0].name, {}).get("dtype", "float32"),
                (whole.rows, whole.dim),
            )
            for whole in self._wholes
        }
        if self._of_torch:
            for name, text in last.target.job["dense"]["tensors"].items():
                dtype, _, shape = text.partition(" ")
                found[self._prefix + name] = dtype, tuple(msgspec.json.decode(shape, type=list[int]))
        for table in self._flat:
            found |= {self._prefix + name: ("float32", shape) for name, shape in self._names.find_shapes(table)}
        return found

    def _cut(self, table: str, rows: npt.NDArray[np.float32]) -> dict[str, Any]:
        """The tensors in a table that is none of rows."""
        if self._of_torch:
            from regrow.checkpoint.torch import dense

            return dense.unpack_model(dense.file_of(rows))
        return cut_tensors(self._names, {table: rows})


class _File:
    """A safetensors file of known size, mapped: its tensors are views of it."""

    def __init__(self, path: Path, layout: Mapping[str, tuple[str, tuple[int, ...]]]) -> None:
        import torch

        header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        places: dict[str, tuple[Any, tuple[int, ...], int, int]] = {}
        end = 0
        # Widest types first: then all are aligned.
        for name, (dtype_name, shape) in sorted(layout.items(), key=lambda item: (-_dtype(*item)[1], item[0])):
            code, size = _dtype(name, (dtype_name, shape))
            start, end = end, end + size * int(np.prod(shape, dtype=np.int64))
            header[name] = {"dtype": code, "shape": shape, "data_offsets": (start, end)}
            places[name] = getattr(torch, dtype_name), shape, start, end
        text = msgspec.json.encode(header)
        text += b" " * (-len(text) % 8)
        self.bytes = 8 + len(text) + end
        with path.open("wb") as file:
            _reserve(path, file.fileno(), self.bytes)
            file.write(struct.pack("<Q", len(text)) + text)
        self._path = path
        self._map = np.memmap(path, np.uint8, "r+")
        body = self._map[8 + len(text) :]
        self.tensors = {
            name: torch.frombuffer(body[start:end], dtype=dtype).reshape(shape) if end > start else torch.empty(shape)
            for name, (dtype, shape, start, end) in places.items()
        }

    def flush(self) -> None:
        self._map.flush()
        with self._path.open("rb+") as file:
            os.fsync(file.fileno())


def _reserve(path: Path, handle: int, size: int) -> None:
    """Takes all the space there will be. Writing through a map to a disk that is full ends the process (SIGBUS)."""
    _check_space(path, size)
    if not hasattr(os, "posix_fallocate"):  # macOS
        os.truncate(handle, size)
        return
    try:
        os.posix_fallocate(handle, 0, size)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise
        raise UserError(f"cannot write {path.parent}: {error.strerror}", hint=_say_size(size)) from None


def _check_space(path: Path, size: int) -> None:
    free = shutil.disk_usage(path.parent).free
    if free < size:
        raise UserError(f"no space left in {path.parent}: {size_text(free)} are free", hint=_say_size(size))


def _say_size(size: int) -> str:
    return f"{size_text(size)} are needed; export to another disk"


def _dtype(name: str, described: tuple[str, tuple[int, ...]]) -> tuple[str, int]:
    if described[0] not in DTYPES:
        raise CheckpointError(f"{name!r} is {described[0]}, which safetensors has no word for")
    return DTYPES[described[0]]


def fill_initial(values: npt.NDArray[np.float32], table: TableInfo, *, seed: int) -> Iterator[int]:
    """What rows were before anybody touched them; yields bytes done. A server's arena computes its own, and is the
    fastest to ask."""
    assert table.init_bound is not None
    arenas = min(INITIAL_ARENAS_MAX, max(1, -(-values.nbytes // INITIAL_BYTES)))
    for arena in range(arenas):
        shard = _kernels.Shard(arenas, arena)
        shard.add_table(
            rows=table.rows,
            dim=table.dim,
            optimizer="sgd",
            learning_rate=0.0,
            seed=seed,
            init_bound=table.init_bound,
            table=table.index,
        )
        # Rows go round the servers, a table's first one to the server of its number (core/layout.py, k = 1).
        own = values[(arena - table.index) % arenas :: arenas]
        records = np.empty((len(own), shard.record_floats(0)), np.float32)  # wider than a row where that aligns it
        if len(own):
            shard.read_records(0, 0, len(own), records)
            own[...] = records[:, : table.dim]
        yield own.nbytes


def _check_whole(full: Manifest, table: TableInfo) -> None:
    """Rows without an initial value must all be stored. They are: but zeros in a model would go unnoticed."""
    stored = sum(info.rows.get(table.name, 0) for info in full.chunks)
    if stored != table.rows:
        raise CheckpointError(
            f"{full.name} has {stored} of the {table.rows} rows of {table.name!r}, and no seed for more"
        )


def _save_dcp(tensors: Mapping[str, Any], path: Path) -> None:
    from torch.distributed import checkpoint

    try:
        checkpoint.save(dict(tensors), checkpoint_id=path, no_dist=True)
    except BaseException as error:
        shutil.rmtree(path, ignore_errors=True)
        if isinstance(error, checkpoint.CheckpointException):
            cause = next(iter(error.failures.values()))[0]
            raise UserError(f"cannot write {path}: {cause}", hint="nothing was left behind") from error
        raise


def _sync_directory(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
