"""Goal: checkpoints of TorchRec models hold what their fused optimizers changed, no more, and come back bit by bit:
unsharded, sharded on one rank and on two, and from two ranks to one.

Method: a model with pooled and sequence tables, sharded by rows, by table and data-parallel, is trained on the CPU with
gloo. Two ranks are two processes (torchrec_ranks.py) that leave copies of what they held at every cut. Skipped where
TorchRec is not installed.
"""

from __future__ import annotations

import os
import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
import torch.distributed as dist

from regrow.checkpoint.diff import Side, diff
from regrow.checkpoint.export import export
from regrow.checkpoint.lineage import Graph
from regrow.checkpoint.load import verify
from regrow.checkpoint.merge import fold
from regrow.checkpoint.storage import Storage
from regrow.checkpoint.torch.checkpointer import DeltaCheckpointer
from regrow.checkpoint.torch.model_state import ModelState
from regrow.checkpoint.torch.publisher import Publisher
from regrow.serving import Replica

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    pytest.importorskip("torchrec", exc_type=ImportError)

import torchrec_ranks as ranks

two_processes = pytest.mark.live
# TorchRec and FBGEMM warn of themselves; what is tested here is not theirs.
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning", "ignore::FutureWarning")


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A world of one rank."""
    names = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    before = dict(os.environ)
    os.environ.update(names)
    store = tmp_path_factory.mktemp("store") / "store"
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=0, world_size=1)
    yield
    dist.destroy_process_group()
    os.environ.clear()
    os.environ.update(before)


def run_two(out: Path, how: str) -> Path:
    script = Path(ranks.__file__)
    command = [sys.executable, "-W", "ignore", script, out / "store", out / "url", out, how]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    return out


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with `url`, and what the ranks held."""
    return run_two(tmp_path_factory.mktemp("two"), "rows")


@pytest.fixture(scope="module", params=ranks.COLUMNS)
def two_with_columns(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same with columns divided."""
    return run_two(tmp_path_factory.mktemp("columns"), request.param)


def read_rest_of(out: Path, rank: int) -> dict[str, Any]:
    found: dict[str, Any] = torch.load(out / f"rank{rank}.pt")
    return found


def assert_held(left: Any, right: Any) -> None:
    if isinstance(left, dict):
        assert left.keys() == right.keys()
        for name in left:
            assert_held(left[name], right[name])
    elif isinstance(left, tuple):
        assert_held(dict(enumerate(left)), dict(enumerate(right)))
    elif isinstance(left, torch.Tensor):
        assert torch.equal(left, right)
    else:
        assert left == right


# ---- not sharded


@pytest.mark.parametrize("rule", ["rowwise", "sgd", "adam"])
def test_unsharded_with_optimizers_in_backward(rule: str, tmp_path: Path) -> None:
    def make(seed: int) -> tuple[Any, list[Any]]:
        model = ranks.Model(seed)
        ranks.fuse(model, rule)
        return model, [ranks.dense_optimizer(model)]

    model, optimizers = make(0)
    with DeltaCheckpointer(model, str(tmp_path), optimizers=optimizers, every=None) as checkpointer:
        ranks.train(model, optimizers[0], 1, 0)
        checkpointer.save()
        before = model.bags.embedding_bags["a"].weight.detach().clone()
        ranks.train(model, optimizers[0], 2, 0)
        checkpointer.save()
        changed = int((before != model.bags.embedding_bags["a"].weight).any(dim=1).sum())
    (delta,) = [piece for piece in Storage.open(str(tmp_path)).manifests()[0] if piece.source is not None]
    stored = sum(info.rows.get("bags.embedding_bags.a.weight", 0) for info in delta.chunks)
    assert stored == (ranks.ROWS["a"] if rule == "adam" else changed)
    assert changed > 0
    other, others = make(1)
    DeltaCheckpointer.restore(other, str(tmp_path), optimizers=others)
    for each in (model, other):  # goes on in the same way: optimizer state is there too
        ranks.train(each, (optimizers if each is model else others)[0], 3, 0)
    assert_held(dict(model.state_dict()), dict(other.state_dict()))


# ---- sharded, one rank


@pytest.mark.parametrize("rule", ["rowwise", "sgd", "adagrad"])
def test_sharded_rows_that_changed_are_stored_and_come_back(rule: str, tmp_path: Path, alone: None) -> None:
    def make(seed: int) -> tuple[Any, Any]:
        model = ranks.Model(seed)
        ranks.fuse(model, rule)
        sharded = ranks.shard(model, 1)
        return sharded, ranks.dense_optimizer(sharded)

    model, optimizer = make(0)
    with DeltaCheckpointer(model, str(tmp_path), optimizers=[optimizer], every=None) as checkpointer:
        ranks.train(model, optimizer, 1, 0)
        checkpointer.save()
        before = ranks.copy_state(checkpointer._state)
        ranks.train(model, optimizer, 2, 0)
        ranks.look_up(model, 2, 0)
        checkpointer.save()
        after = ranks.copy_state(checkpointer._state)
    (delta,) = [piece for piece in Storage.open(str(tmp_path)).manifests()[0] if piece.source is not None]
    for name in ("bags.embedding_bags.a.weight", "bags.embedding_bags.b.weight", "sequence.embeddings.s.weight"):
        stored = sum(info.rows.get(name, 0) for info in delta.chunks)
        changed = int((before[name][1]["weight"] != after[name][1]["weight"]).any(dim=1).sum())
        assert stored == changed > 0
    other, other_optimizer = make(1)
    ranks.train(other, other_optimizer, 5, 0)
    DeltaCheckpointer.restore(other, str(tmp_path), optimizers=[other_optimizer])
    assert_held(ranks.copy_state(ModelState(other, [other_optimizer])), after)
    for each, own in ((model, optimizer), (other, other_optimizer)):  # goes on in the same way
        ranks.train(each, own, 3, 0)
    assert_held(
        ranks.copy_state(ModelState(other, [other_optimizer])), ranks.copy_state(ModelState(model, [optimizer]))
    )


@pytest.mark.parametrize("rule", ["rowwise", "adagrad"])
def test_columns_of_one_rank_come_back(rule: str, tmp_path: Path, alone: None) -> None:
    def make(seed: int) -> tuple[Any, Any]:
        model = ranks.Model(seed)
        ranks.fuse(model, rule)
        sharded = ranks.shard(model, 1, **ranks.COLUMNS["column_wise"](0))
        return sharded, ranks.dense_optimizer(sharded)

    model, optimizer = make(0)
    with DeltaCheckpointer(model, str(tmp_path), optimizers=[optimizer], every=None) as checkpointer:
        ranks.train(model, optimizer, 1, 0)
        checkpointer.save()
        before = ranks.copy_state(checkpointer._state)
        ranks.train(model, optimizer, 2, 0)
        ranks.look_up(model, 2, 0)
        checkpointer.save()
        after = ranks.copy_state(checkpointer._state)
    (delta,) = [piece for piece in Storage.open(str(tmp_path)).manifests()[0] if piece.source is not None]
    names = [f"bags.embedding_bags.{t}.weight" for t in "ab"] + ["sequence.embeddings.s.weight"]
    for name in (f"{whole}[:,{first}:{first + 4}]" for whole in names for first in (0, 4)):
        stored = sum(info.rows.get(name, 0) for info in delta.chunks)
        changed = int((before[name][1]["weight"] != after[name][1]["weight"]).any(dim=1).sum())
        assert stored == changed > 0
    other, other_optimizer = make(1)
    DeltaCheckpointer.restore(other, str(tmp_path), optimizers=[other_optimizer])
    assert_held(ranks.copy_state(ModelState(other, [other_optimizer])), after)
    for each, own in ((model, optimizer), (other, other_optimizer)):  # goes on in the same way
        ranks.train(each, own, 3, 0)
    assert_held(
        ranks.copy_state(ModelState(other, [other_optimizer])), ranks.copy_state(ModelState(model, [optimizer]))
    )


def test_columns_are_published_beside_checkpoints(tmp_path: Path, alone: None) -> None:
    model = ranks.Model()
    ranks.fuse(model)
    sharded = ranks.shard(model, 1, **ranks.COLUMNS["column_wise"](0))
    optimizer = ranks.dense_optimizer(sharded)
    with (
        DeltaCheckpointer(sharded, str(tmp_path / "ckpt"), optimizers=[optimizer], every=1) as checkpointer,
        Publisher(sharded, str(tmp_path / "live"), every=2) as publisher,
    ):
        for step in range(1, 7):
            ranks.train(sharded, optimizer, step, 0)
            checkpointer.step()
            publisher.step()
            checkpointer.wait()
            publisher.wait()
        assert publisher.newest is not None
        expected = join([ranks.copy_state(publisher._state)])
        dense = publisher._state.dense.tensors
    with Replica(str(tmp_path / "live"), follow=False, directory=tmp_path) as replica:
        assert replica.step == 6
        assert replica.tables.keys() == expected.keys() | {"dense"}
        assert_held({name: torch.from_numpy(replica.read_table(name)) for name in expected}, expected)
        assert_held(replica.read_dense(), {name: values.detach() for name, values in dense.items()})
    found = [piece for piece in Storage.open(str(tmp_path / "live")).manifests()[0] if piece.source is not None]
    assert len(found) == 2  # of steps 4 and 6


# ---- sharded, two ranks


@two_processes
def test_two_ranks_restore_what_each_held(two_ranks: Path) -> None:
    for rank in range(2):
        left = read_rest_of(two_ranks, rank)
        assert left["step"] == 4
        assert_held(left["back"], left["cuts"][3][1])
        assert_held(left["final"], left["cuts"][-1][1])  # trained on from step 4 to the same end


@two_processes
def test_one_rank_that_cannot_write_is_a_failure_of_all(two_ranks: Path) -> None:
    for rank in range(2):
        assert "rank 1: cannot write" in read_rest_of(two_ranks, rank)["failure"]


@two_processes
def test_each_rank_writes_its_own_rows(two_ranks: Path) -> None:
    storage = Storage.open(str(two_ranks / "url"))
    assert [problem for problem in verify(storage) if problem.harmful] == []
    cuts = [[cut for cut, _ in read_rest_of(two_ranks, rank)["cuts"]] for rank in range(2)]
    assert cuts[0] == cuts[1]
    full = storage.read_manifest(f"{cuts[0][0]}.full")
    rows: dict[tuple[str, str], int] = {}
    for info in full.chunks:
        for name, count in info.rows.items():
            rows[info.shard.partition("-")[0], name.removesuffix(".weight").rpartition(".")[2]] = count
    # 21 rows by two are 11 and 10; c is everybody's and so in the dense part, which the first rank writes.
    assert {key: count for key, count in rows.items() if key[1] != "dense"} == {
        ("s0of2", "a"): 11,
        ("s1of2", "a"): 10,
        ("s1of2", "b"): 30,
        ("s1of2", "s"): 40,
    }


@two_processes
@pytest.mark.parametrize("merged", [False, True])
def test_two_ranks_become_one(merged: bool, two_ranks: Path, tmp_path: Path, alone: None) -> None:
    storage = Storage.open(str(two_ranks / "url"))
    for index in range(ranks.STEPS):
        cut = read_rest_of(two_ranks, 0)["cuts"][index][0]
        if merged:
            fold(storage, Graph(storage.manifests()[0]), None, cut)
        model = ranks.Model(3)
        ranks.fuse(model)
        sharded = ranks.shard(model, 1)
        restored = DeltaCheckpointer.restore(sharded, str(two_ranks / "url"), at=cut)
        assert restored.extra == {"position": index + 1}
        found = ranks.copy_state(ModelState(sharded, []))
        for rank in range(2):
            expected = read_rest_of(two_ranks, rank)["cuts"][index][1]
            assert_held(found["dense"], expected["dense"])
            for name in expected.keys() - {"dense", "scalars"}:
                first, states = expected[name]
                for part, values in states.items():
                    assert torch.equal(found[name][1][part][first : first + len(values)], values), (name, part)


# ---- columns, two ranks


def join(held: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    """Whole weights by the names that people know, of what ranks held. Every float must be somebody's."""
    found: dict[str, torch.Tensor] = {}
    for each in held:
        for name in each.keys() - {"dense", "scalars"}:
            first, states = each[name]
            weight = states["weight"]
            whole, _, columns = name.removesuffix("]").partition("[:,")
            low = int(columns.partition(":")[0]) if columns else 0
            rows = ranks.ROWS[whole.removesuffix(".weight").rpartition(".")[2]]
            target = found.setdefault(whole, torch.full((rows, ranks.DIM), torch.nan))
            target[first : first + len(weight), low : low + weight.shape[1]] = weight
    assert not any(values.isnan().any() for values in found.values())
    return found


@two_processes
def test_columns_of_two_ranks_restore_what_each_held(two_with_columns: Path) -> None:
    for rank in range(2):
        left = read_rest_of(two_with_columns, rank)
        assert left["step"] == 4
        assert_held(left["back"], left["cuts"][3][1])
        assert_held(left["final"], left["cuts"][-1][1])  # trained on from step 4 to the same end
    assert [each for each in verify(Storage.open(str(two_with_columns / "url"))) if each.harmful] == []


@two_processes
@pytest.mark.parametrize("merged", [False, True])
@pytest.mark.parametrize("how", ["whole", "column_wise"])
def test_columns_of_two_ranks_become_those_of_one(
    how: str, merged: bool, two_with_columns: Path, tmp_path: Path, alone: None
) -> None:
    storage = Storage.open(str(two_with_columns / "url"))
    left = [read_rest_of(two_with_columns, rank) for rank in range(2)]
    for index in (0, 2, ranks.STEPS - 1):
        cut = left[0]["cuts"][index][0]
        if merged:
            fold(storage, Graph(storage.manifests()[0]), None, cut)
        model = ranks.Model(3)
        ranks.fuse(model)
        sharded = ranks.shard(model, 1, **(ranks.COLUMNS["column_wise"](0) if how == "column_wise" else {}))
        DeltaCheckpointer.restore(sharded, str(two_with_columns / "url"), at=cut)
        found = ranks.copy_state(ModelState(sharded, []))
        expected = join([each["cuts"][index][1] for each in left])
        assert_held(join([found]), expected)
        assert_held(found["dense"], left[0]["cuts"][index][1]["dense"])
        exported = export(storage, cut, tmp_path / f"{index}.safetensors")
        assert exported.tensors.keys() >= expected.keys()
        tensors = safetensors.torch.load_file(exported.path)
        assert not any("[" in name for name in tensors)
        assert_held({name: tensors[name] for name in expected}, expected)


@two_processes
def test_cuts_whose_columns_are_divided_differently_are_compared(
    two_with_columns: Path, tmp_path: Path, alone: None
) -> None:
    """A model restored without dividing columns, saved again, differs in nothing but the state per range."""
    url = str(two_with_columns / "url")
    model = ranks.Model(3)
    ranks.fuse(model)
    sharded = ranks.shard(model, 1)
    restored = DeltaCheckpointer.restore(sharded, url)
    other = tmp_path / "other"
    with DeltaCheckpointer(sharded, str(other), every=None) as checkpointer:
        saved = checkpointer.save()
        ranks.train(sharded, ranks.dense_optimizer(sharded), 30, 0)
        changed = checkpointer.save()
    left = Side(Storage.open(url), Graph(Storage.open(url).manifests()[0]), restored.cut)
    storage = Storage.open(str(other))
    for cut, equal in ((saved, True), (changed, False)):
        found = {each.table: each for each in diff(left, Side(storage, Graph(storage.manifests()[0]), cut))}
        assert not any("[" in name for name in found)
        for table, rows in (("a", ranks.ROWS["a"]), ("b", ranks.ROWS["b"])):
            each = found[f"bags.embedding_bags.{table}.weight"]
            assert (each.same + each.changed, each.only_left, each.only_right) == (rows, 0, 0)
            assert (each.largest in (None, 0.0)) == equal
