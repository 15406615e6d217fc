"""Goal: an exported cut is an ordinary state_dict, equal to what was trained, in every format, whoever trained it.

Method: cuts of torch models and of rows as Regrow's servers hold them (a `MemoryStore` that is updated) are exported
and read back by safetensors, by torch's distributed checkpoint, and into a model by `load_state_dict`.
"""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from torch import Tensor, nn
from torch_models import Model

from regrow.checkpoint.chunks import Rows, write_chunk
from regrow.checkpoint.export import Format, export
from regrow.checkpoint.lineage import Graph
from regrow.checkpoint.manifest import Cut, Manifest, TableInfo
from regrow.checkpoint.storage import Storage
from regrow.checkpoint.torch.checkpointer import DeltaCheckpointer
from regrow.core.job import JobSpec, OptimizerSpec, TableSpec
from regrow.core.names import cut_id
from regrow.core.twins import initial_rows
from regrow.errors import CheckpointError, UserError
from regrow.store.memory import MemoryStore

FORMATS: tuple[Format, ...] = ("safetensors", "dcp")
SEED = 11


def read(path: Path, format: Format, like: dict[str, Tensor]) -> dict[str, Tensor]:
    if format == "safetensors":
        return load_file(path)
    found = {name: torch.zeros_like(value) for name, value in like.items()}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # DCP's own
        dcp.load(found, checkpoint_id=path, no_dist=True)
    return found


def assert_equal(left: dict[str, Tensor], right: dict[str, Tensor]) -> None:
    assert left.keys() == right.keys()
    for name, value in left.items():
        assert value.dtype == right[name].dtype, name
        assert torch.equal(value, right[name]), name


# ---- torch models


class Varied(Model):
    """Narrow tables, buffers of other types, an empty tensor, a scalar."""

    def __init__(self, **options: Any) -> None:
        super().__init__(dtype=torch.bfloat16, **options)
        self.narrow = nn.Parameter(torch.randn(3).half())
        self.register_buffer("flags", torch.tensor([True, False]))
        self.register_buffer("nothing", torch.empty(0, 2))


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")
@pytest.mark.parametrize("format", FORMATS)
def test_a_torch_model(format: Format, tmp_path: Path) -> None:
    model, url = Varied(), str(tmp_path / "url")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with DeltaCheckpointer(model, url, optimizers=[optimizer], every=None) as checkpointer:
        for row in range(3):
            optimizer.zero_grad()
            model(torch.tensor([[row, 2 * row]]), torch.tensor([[row]])).sum().backward()
            optimizer.step()
            checkpointer.save()
    target = tmp_path / "exported" / "model"
    done = export(Storage.open(url), None, target, format=format)
    expected = {name: value.detach() for name, value in model.state_dict().items()}
    found = read(target, format, expected)
    assert_equal(found, expected)
    assert done.tensors == {name: tuple(value.shape) for name, value in expected.items()}
    other = Varied(seed=5)
    other.load_state_dict(found)
    assert_equal(dict(other.state_dict()), expected)
    assert [path.name for path in target.parent.iterdir()] == ["model"]  # nothing is left beside it


def test_prefix_and_older_cuts(tmp_path: Path) -> None:
    model, url = Model(), str(tmp_path / "url")
    with DeltaCheckpointer(model, url, every=None) as checkpointer:
        first, expected = checkpointer.save(), model.over.weight.detach().clone()
        with torch.no_grad():
            model.over.weight += 1
        checkpointer.save()
    export(Storage.open(url), first, tmp_path / "a", prefix="net.")
    assert torch.equal(load_file(tmp_path / "a")["net.over.weight"], expected)


# ---- rows that servers trained

TABLES = (
    TableSpec(
        name="t_user", rows=1000, dim=8, init_bound=0.25, optimizer=OptimizerSpec(kind="adagrad", learning_rate=1.0)
    ),
    TableSpec(
        name="t_item",
        rows=77,
        dim=3,
        init_bound=0.5,
        optimizer=OptimizerSpec(kind="rowwise_adagrad", learning_rate=1.0),
    ),
    TableSpec(name="dense", rows=2, dim=32, init_bound=0.0, optimizer=OptimizerSpec(kind="sgd", learning_rate=1.0)),
)


def train_by_servers(storage: Storage) -> dict[str, Tensor]:
    """A full and a delta as one server would write them; returns the whole tables. Most rows are never touched."""
    job = JobSpec(tables=TABLES, servers=1, workers=1, seed=SEED)
    store = MemoryStore(job, 0)
    infos = tuple(
        TableInfo(
            name=table.name,
            rows=table.rows,
            dim=table.dim,
            states=table.optimizer.state_parts(table.dim),
            init_bound=table.init_bound,
            index=index,
        )
        for index, table in enumerate(TABLES)
    )
    source = None
    for step in range(2):
        slots = [np.array([step, 500, 999], np.uint32), np.array([5 + step], np.uint32), np.arange(2, dtype=np.uint32)]
        counts = np.array([len(each) for each in slots], np.int32)
        floats = sum(len(each) * table.dim for each, table in zip(slots, TABLES, strict=True))
        grads = np.arange(1, floats + 1, dtype=np.float32)
        store.update(counts, np.concatenate(slots), grads, step + 1)
        chunk = {}
        for index, table in enumerate(TABLES):
            records = whole(store, index)[slots[index]]
            states, at = {}, table.dim
            for name, width in table.optimizer.state_parts(table.dim):
                states[name] = records[:, at : at + width]
                at += width
            chunk[table.name] = Rows(slots[index], records[:, : table.dim].copy(), states)
        cut = Cut(id=cut_id(step, "x"), step=step, marks=(), created=float(step), job={}, extra={})
        piece = Manifest(source=source, target=cut, tables=infos, seed=SEED, chunks=(), made_by="test")
        stored = write_chunk(storage, piece.name, "s0of1-00000.safetensors", chunk, shard="s0of1")
        storage.write_manifest(
            Manifest(source=source, target=cut, tables=infos, seed=SEED, chunks=(stored,), made_by="test")
        )
        source = cut.id
    return {
        table.name: torch.from_numpy(whole(store, index)[:, : table.dim].copy()) for index, table in enumerate(TABLES)
    }


def whole(store: MemoryStore, index: int) -> np.ndarray[Any, Any]:
    records = np.empty((TABLES[index].rows, store.record_floats(index)), np.float32)
    store.read_records(index, 0, TABLES[index].rows, records)
    return records


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")
@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("arena_bytes", [1 << 20, 1000], ids=["one arena", "many arenas"])
def test_tables_of_servers(format: Format, arena_bytes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("regrow.checkpoint.export.INITIAL_BYTES", arena_bytes)
    storage = Storage.open(str(tmp_path / "url"))
    trained = train_by_servers(storage)
    plan, _ = Graph(storage.manifests()[0]).restore_plan(None)
    shapes = {"over.weight": (1, 5), "over.bias": (1,), "deep.weight": (4, 4)}
    export(storage, plan, tmp_path / "out", format=format, prefix="sparse.", dense_shapes=shapes)
    flat = trained["dense"].reshape(-1)
    expected = {
        "sparse.embedding_bags.t_user.weight": trained["t_user"],
        "sparse.embedding_bags.t_item.weight": trained["t_item"],
        "sparse.over.weight": flat[0:5].reshape(1, 5),
        "sparse.over.bias": flat[16:17],
        "sparse.deep.weight": flat[32:48].reshape(4, 4),
    }
    assert_equal(read(tmp_path / "out", format, expected), expected)


def test_untouched_rows_are_as_computed(tmp_path: Path) -> None:
    storage = Storage.open(str(tmp_path / "url"))
    train_by_servers(storage)
    export(storage, None, tmp_path / "out")
    found = load_file(tmp_path / "out")
    slow = initial_rows([3, 998], dim=8, seed=SEED, table=0, bound=0.25)
    assert (found["embedding_bags.t_user.weight"][[3, 998]].numpy() == slow).all()
    assert found["dense"].shape == (2, 32)


# ---- what cannot be


def test_nothing_is_overwritten_and_nothing_half_done(tmp_path: Path) -> None:
    model, url = Model(), str(tmp_path / "url")
    with DeltaCheckpointer(model, url, every=None) as checkpointer:
        checkpointer.save()
    storage, target = Storage.open(url), tmp_path / "out" / "model"
    target.parent.mkdir()
    (piece,) = storage.pieces()
    with pytest.raises(UserError, match="must be 'safetensors' or 'dcp'"):
        export(storage, None, target, format="onnx")  # type: ignore[arg-type]
    name = next(file for file in storage.names(piece) if file.endswith(".safetensors"))
    good = bytes(storage.read(f"{piece}/{name}"))
    storage.write(f"{piece}/{name}", good[:-1] + bytes([good[-1] ^ 1]))
    with pytest.raises(CheckpointError, match="damaged"):
        export(storage, None, target)
    assert list(target.parent.iterdir()) == []
    storage.write(f"{piece}/{name}", good)
    target.write_text("mine")
    with pytest.raises(UserError, match="there already"):
        export(storage, None, target)
    assert target.read_text() == "mine"


def test_rows_that_are_nowhere_are_not_made_up(tmp_path: Path) -> None:
    storage = Storage.open(str(tmp_path / "url"))
    table = TableInfo(name="t", rows=3, dim=1, states=(), init_bound=None, index=0)
    cut = Cut(id=cut_id(1, 0), step=1, marks=(), created=0.0, job={}, extra={})
    rows = Rows(np.array([0, 2], np.uint32), np.zeros((2, 1), np.float32), {})
    stored = write_chunk(storage, f"{cut.id}.full", "a-00000.safetensors", {"t": rows}, shard="a")
    storage.write_manifest(Manifest(source=None, target=cut, tables=(table,), seed=0, chunks=(stored,), made_by="test"))
    with pytest.raises(CheckpointError, match=r"2 of the 3 rows of 't'"):
        export(storage, None, tmp_path / "out")


def test_progress_covers_initial_values_and_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It rises to the end, and initial values, which take longest where few rows were touched, are a part of it."""
    monkeypatch.setattr("regrow.checkpoint.export.INITIAL_BYTES", 4096)
    storage = Storage.open(str(tmp_path / "url"))
    train_by_servers(storage)
    told: list[tuple[int, int]] = []
    done = export(storage, None, tmp_path / "out", progress=lambda *each: told.append(each))
    read = Graph(storage.manifests()[0]).restore_plan()[0].bytes
    assert {total for _, total in told} == {done.bytes + read}
    assert [count for count, _ in told] == sorted(count for count, _ in told)
    assert sum(count < done.bytes for count, _ in told) > 2
    assert told[-1] == (done.bytes + read, done.bytes + read)
