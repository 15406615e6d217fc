"""Goal: what `DeltaCheckpointer` restores is bit for bit what was there at the cut, a cut that fails costs nothing but
bytes, and what does not fit is refused by name.

Method: small models of every kind of optimizer are trained with fixed seeds; after each cut the whole state (weights,
optimizer, buffers) is copied by torch itself, and a fresh model restored from storage must equal it. Broken storage is
a failpoint. Whole processes are killed in test_kill.py.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch_models import DIM, RULES, Model, assert_same, state, train

from regrow.checkpoint import failpoints
from regrow.checkpoint.lineage import Graph
from regrow.checkpoint.load import verify
from regrow.checkpoint.merge import fold
from regrow.checkpoint.storage import Storage
from regrow.checkpoint.torch import dense
from regrow.checkpoint.torch.checkpointer import DeltaCheckpointer
from regrow.errors import CheckpointError, ConfigError, StorageError


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("regrow.checkpoint.storage.WAIT_SECONDS", 0.0)


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """The warning about rules that change all rows has its own test. The other one is torch's, about its Adagrad."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "checkpoints: all rows")
        warnings.filterwarnings("ignore", "Sparse invariant checks")
        yield


# ---- there and back


@pytest.mark.parametrize("rule", RULES)
def test_every_cut_restores_bit_by_bit(rule: str, tmp_path: Path) -> None:
    sparse, _, make = RULES[rule]
    url = f"file://{tmp_path}"
    model = Model(sparse=sparse)
    optimizers = make(model)
    kept: dict[str, tuple[int, dict[str, Any]]] = {}
    with DeltaCheckpointer(model, url, optimizers=optimizers, every=None, full_every=4) as checkpointer:
        for step in range(1, 9):
            train(model, optimizers, step)
            checkpointer.step()
            cut = checkpointer.save(extra={"position": 10 * step})
            kept[cut] = step, state(model, optimizers)
    for cut, (step, expected) in kept.items():
        other = Model(sparse=sparse, seed=9)
        others = make(other)
        train(other, others, 100)  # whatever it was before is overwritten
        restored = DeltaCheckpointer.restore(other, url, at=cut, optimizers=others)
        assert (restored.cut, restored.step, restored.extra) == (cut, step, {"position": 10 * step})
        assert_same(state(other, others), expected)
    sources = [Storage.open(url).read_manifest(name).source for name in Storage.open(url).pieces()]
    assert [source is None for source in sources] == [True, False, False, False, True, False, False, False]
    assert verify(Storage.open(url)) == []


@pytest.mark.parametrize("rule", ["adagrad", "sparse adam, adam", "momentum, sparse gradients"])
def test_training_goes_on_as_if_nothing_had_happened(rule: str, tmp_path: Path) -> None:
    sparse, _, make = RULES[rule]
    whole = Model(sparse=sparse)
    optimizers = make(whole)
    for step in range(8):
        train(whole, optimizers, step)
    first = Model(sparse=sparse)
    with DeltaCheckpointer(first, str(tmp_path), optimizers=(made := make(first)), every=1) as checkpointer:
        for step in range(4):
            train(first, made, step)
            checkpointer.step()
            checkpointer.wait()
    second = Model(sparse=sparse, seed=5)
    restored = DeltaCheckpointer.restore(second, str(tmp_path), optimizers=(made := make(second)))
    with DeltaCheckpointer(second, str(tmp_path), optimizers=made, every=2, resume=restored) as checkpointer:
        for step in range(restored.step, 8):
            train(second, made, step)
            checkpointer.step()
            checkpointer.wait()
        assert checkpointer.current_step == 8
    assert_same(state(second, made), state(whole, optimizers))
    graph = Graph(Storage.open(str(tmp_path)).manifests()[0])
    assert [piece.source is None for piece in graph.pieces.values()] == [True] + [False] * 5
    third = Model(sparse=sparse, seed=6)
    DeltaCheckpointer.restore(third, str(tmp_path), optimizers=(last := make(third)))
    assert_same(state(third, last), state(whole, optimizers))


def test_merged_pieces_hold_the_dense_part_too(tmp_path: Path) -> None:
    model = Model()
    optimizers = RULES["adagrad"][2](model)
    with DeltaCheckpointer(model, str(tmp_path), optimizers=optimizers, every=None) as checkpointer:
        for step in range(4):
            train(model, optimizers, step)
            checkpointer.save()
    storage = Storage.open(str(tmp_path))
    graph = Graph(storage.manifests()[0])
    newest = graph.newest()
    assert newest is not None
    fold(storage, graph, None, newest.id)
    for name in graph.pieces:
        storage.delete_piece(name)
    other = Model(seed=3)
    others = RULES["adagrad"][2](other)
    DeltaCheckpointer.restore(other, str(tmp_path), optimizers=others)
    assert_same(state(other, others), state(model, optimizers))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_narrow_tables_come_back_the_same(dtype: torch.dtype, tmp_path: Path) -> None:
    model = Model(dtype=dtype)
    with DeltaCheckpointer(model, str(tmp_path), every=None) as checkpointer:
        checkpointer.save()
    other = Model(seed=1, dtype=dtype)
    DeltaCheckpointer.restore(other, str(tmp_path))
    assert_same(state(other, []), state(model, []))


def test_without_optimizers_only_the_model_is_restored(tmp_path: Path) -> None:
    model = Model()
    optimizers = RULES["adagrad"][2](model)
    train(model, optimizers, 0)
    with DeltaCheckpointer(model, str(tmp_path), optimizers=optimizers, every=None) as checkpointer:
        checkpointer.save()
    other = Model(seed=1)
    DeltaCheckpointer.restore(other, str(tmp_path))
    assert_same(state(other, []), state(model, []))


def test_storage_that_is_not_local_is_reached_by_way_of_the_disk(tmp_path: Path) -> None:
    model, url = Model(), f"memory://{tmp_path.name}"
    with DeltaCheckpointer(model, url, every=None, staging_directory=str(tmp_path)) as checkpointer:
        checkpointer.save()
    other = Model(seed=1)
    DeltaCheckpointer.restore(other, url)
    assert_same(state(other, []), state(model, []))
    assert list(tmp_path.iterdir()) == []


def test_zstd(tmp_path: Path) -> None:
    model = Model()
    with DeltaCheckpointer(model, str(tmp_path), every=None, encoding="zstd") as checkpointer:
        checkpointer.save()
    other = Model(seed=1)
    DeltaCheckpointer.restore(other, str(tmp_path))
    assert_same(state(other, []), state(model, []))


# ---- when a cut is taken, and what happens if it cannot be


def test_cuts_are_taken_when_due(tmp_path: Path) -> None:
    model = Model()
    with DeltaCheckpointer(model, str(tmp_path), every=3) as checkpointer:
        for _ in range(10):
            checkpointer.step()
            checkpointer.wait()
    assert [int(name[:10]) for name in Storage.open(str(tmp_path)).pieces()] == [3, 6, 9]


def test_time_may_decide(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr("regrow.checkpoint.torch.cuts._now", lambda: now[0])
    checkpointer = DeltaCheckpointer(Model(), str(tmp_path), every="60s")
    for seconds in (30, 29, 2, 59, 1):
        now[0] += seconds
        checkpointer.step()
        if checkpointer._thread is not None:
            checkpointer._thread.join()
    checkpointer.close()
    assert [int(name[:10]) for name in Storage.open(str(tmp_path)).pieces()] == [3, 5]


def test_training_goes_on_while_a_cut_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One cut at a time; one that is due meanwhile is taken at the first step after. Copies stay as they were."""
    model, go_on = Model(), threading.Event()
    optimizers = RULES["adagrad"][2](model)
    checkpointer = DeltaCheckpointer(model, str(tmp_path), optimizers=optimizers, every=1)
    commit = checkpointer._commit
    monkeypatch.setattr(checkpointer, "_commit", lambda *arguments: (go_on.wait(), commit(*arguments)))
    train(model, optimizers, 0)
    expected = state(model, optimizers)
    checkpointer.step()
    for step in range(1, 4):
        train(model, optimizers, step)
        checkpointer.step()
    go_on.set()
    checkpointer.wait()
    checkpointer.step()
    checkpointer.close()
    assert [int(name[:10]) for name in Storage.open(str(tmp_path)).pieces()] == [1, 5]
    for at, kept in (("1", expected), ("5", state(model, optimizers))):
        other = Model(seed=2)
        others = RULES["adagrad"][2](other)
        DeltaCheckpointer.restore(other, str(tmp_path), at=at, optimizers=others)
        assert_same(state(other, others), kept)


@pytest.mark.parametrize("every", [0, -1, "60", "0s", "x", 1.5, True])
def test_nonsense_is_refused(every: Any, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="every"):
        DeltaCheckpointer(Model(), str(tmp_path), every=every)


def test_a_failed_write_costs_a_larger_delta_and_nothing_else(tmp_path: Path) -> None:
    model = Model()
    optimizers = RULES["adagrad"][2](model)
    with DeltaCheckpointer(model, str(tmp_path), optimizers=optimizers, every=1) as checkpointer:
        train(model, optimizers, 0)
        first = checkpointer.save()
        train(model, optimizers, 1)
        with failpoints.arm_inside("manifest.rename:1:raise", times=9):
            with pytest.raises(StorageError):
                checkpointer.save()
            train(model, optimizers, 2)
            checkpointer.step()  # does not raise
            with pytest.raises(StorageError):
                checkpointer.wait()
        assert checkpointer.newest == first
        train(model, optimizers, 3)
        checkpointer.step()
        checkpointer.wait()
        assert checkpointer.newest != first
    other = Model(seed=2)
    others = RULES["adagrad"][2](other)
    DeltaCheckpointer.restore(other, str(tmp_path), optimizers=others)
    assert_same(state(other, others), state(model, optimizers))


def test_training_is_told_of_a_cut_that_failed(tmp_path: Path) -> None:
    checkpointer = DeltaCheckpointer(Model(), str(tmp_path), every=1)
    with failpoints.arm_inside("chunk.rename:1:raise", times=3):
        checkpointer.step()
        assert checkpointer._thread is not None
        checkpointer._thread.join()
    with pytest.warns(UserWarning, match="a cut was not written"):
        checkpointer.step()
    checkpointer.close()
    assert len(Storage.open(str(tmp_path)).pieces()) == 1


def test_a_cut_too_large_to_copy_is_written_while_training_waits(tmp_path: Path) -> None:
    model = Model()
    with DeltaCheckpointer(model, str(tmp_path), every=1, copy_bytes_max=0) as checkpointer:
        checkpointer.step()
        assert checkpointer._thread is None
        assert checkpointer.newest is not None


def test_rows_that_cannot_be_copied_are_part_of_the_next_cut(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first part is copied and on its way when the second fails: nothing of it may look like a checkpoint."""
    model = Model()
    with DeltaCheckpointer(model, str(tmp_path), every=1) as checkpointer:
        really = checkpointer._parts

        def failing(*args: Any, **options: Any) -> Iterator[Any]:
            yield next(really(*args, **options))
            raise MemoryError("no room")

        with monkeypatch.context() as patch:
            patch.setattr(checkpointer, "_parts", failing)
            with pytest.raises(MemoryError, match="no room"):
                checkpointer.step()
        assert Storage.open(str(tmp_path)).pieces() == []
        checkpointer.step()
        checkpointer.wait()
    other = Model(seed=2)
    DeltaCheckpointer.restore(other, str(tmp_path))
    assert_same(state(other, []), state(model, []))


@pytest.mark.parametrize("value", [float("nan"), torch.zeros(1), {1: 2}])
def test_extra_that_cannot_be_said_is_refused_at_once(value: Any, tmp_path: Path) -> None:
    with DeltaCheckpointer(Model(), str(tmp_path), every=1) as checkpointer:
        with pytest.raises(CheckpointError, match="cannot be a manifest"):
            checkpointer.step(extra={"position": value})
        checkpointer.save(extra={"position": [1, None, "x"]})


def test_a_closed_one_takes_no_cuts(tmp_path: Path) -> None:
    checkpointer = DeltaCheckpointer(Model(), str(tmp_path))
    checkpointer.close()
    checkpointer.close()
    with pytest.raises(CheckpointError, match="closed"):
        checkpointer.save()


# ---- what does not fit


def save_once(tmp_path: Path) -> str:
    model = Model()
    with DeltaCheckpointer(model, str(tmp_path), optimizers=RULES["adagrad"][2](model), every=None) as checkpointer:
        checkpointer.save()
    return str(tmp_path)


class Wider(Model):
    def __init__(self) -> None:
        super().__init__()
        self.over = nn.Linear(2 * DIM, 2)


class WithMore(Model):
    def __init__(self) -> None:
        super().__init__()
        self.more = nn.EmbeddingBag(3, 2)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: Model(rows=51), r"table 'users.weight' is \[51, 4\] here and \[50, 4\] in the checkpoint"),
        (Wider, r"'over.weight' is float32 \[2, 8\] here and float32 \[1, 8\] in the checkpoint"),
        (WithMore, r"table 'more.weight' is not in the checkpoint"),
        (lambda: nn.Linear(2, 2), r"table 'items.weight' is in the checkpoint and not in the model"),
    ],
    ids=["rows", "dense shape", "more tables", "fewer tables"],
)
def test_another_model_is_refused_by_name_and_left_alone(
    make: Callable[[], nn.Module], words: str, tmp_path: Path
) -> None:
    url, model = save_once(tmp_path), make()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(CheckpointError, match=words):
        DeltaCheckpointer.restore(model, url)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_other_optimizers_are_refused(tmp_path: Path) -> None:
    url, model = save_once(tmp_path), Model()
    with pytest.raises(CheckpointError, match=r"optimizers: saved were \[\{'type': 'Adagrad'"):
        DeltaCheckpointer.restore(model, url, optimizers=[torch.optim.SGD(model.parameters(), lr=0.1)])


def test_a_parameter_of_another_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="not the model's"):
        DeltaCheckpointer(Model(), str(tmp_path), optimizers=[torch.optim.SGD(Model().parameters(), lr=0.1)])


def test_a_model_that_changed_since_the_restore_cannot_resume(tmp_path: Path) -> None:
    url, model = save_once(tmp_path), Model()
    optimizers = RULES["adagrad"][2](model)
    restored = DeltaCheckpointer.restore(model, url, optimizers=optimizers)
    train(model, optimizers, 0)
    with pytest.raises(CheckpointError, match="was changed since"):
        DeltaCheckpointer(model, url, optimizers=optimizers, resume=restored)


def test_on_another_url_a_resumed_run_begins_with_a_full(tmp_path: Path) -> None:
    url, model = save_once(tmp_path / "a"), Model()
    restored = DeltaCheckpointer.restore(model, url)
    with DeltaCheckpointer(model, str(tmp_path / "b"), every=None, resume=restored) as checkpointer:
        checkpointer.save()
    assert [name.endswith(".full") for name in Storage.open(str(tmp_path / "b")).pieces()] == [True]


def test_nothing_there(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no checkpoint here"):
        DeltaCheckpointer.restore(Model(), str(tmp_path))


# ---- the dense part


def test_dense_bytes_survive_as_rows() -> None:
    values = {"a/b": torch.tensor([float("nan"), -0.0, 1e-45]), "i": torch.arange(5), "e": torch.empty(0, 3)}
    packed = dense.pack(values, {"lr": float("inf"), "betas": [0.9, None, True]})
    table = dense.table_info(len(packed), index=0)
    gathered = dense.Gathered(table)
    gathered.write(dense.to_rows(b"\xff" * 9000))  # an earlier, longer one
    gathered.write(dense.to_rows(packed))
    tensors, scalars = dense.unpack(gathered.file())
    assert scalars == {"lr": float("inf"), "betas": [0.9, None, True]}
    for name, value in values.items():
        assert tensors[name].dtype == value.dtype and tensors[name].shape == value.shape
        assert tensors[name].numpy().tobytes() == value.numpy().tobytes()


def test_a_dense_part_that_outgrows_its_table_begins_a_full(tmp_path: Path) -> None:
    model = Model()
    optimizer = torch.optim.Adagrad(model.parameters())
    with DeltaCheckpointer(model, str(tmp_path), optimizers=[optimizer], every=None) as checkpointer:
        checkpointer.save()
        checkpointer.save()
        optimizer.state[model.over.bias]["history"] = torch.ones(100_000)
        checkpointer.save()
    other = Model()
    others = [torch.optim.Adagrad(other.parameters())]
    DeltaCheckpointer.restore(other, str(tmp_path), optimizers=others)
    assert torch.equal(others[0].state[other.over.bias]["history"], torch.ones(100_000))
    fulls = [Storage.open(str(tmp_path)).read_manifest(n).source is None for n in Storage.open(str(tmp_path)).pieces()]
    assert sorted(fulls) == [False, True, True]
