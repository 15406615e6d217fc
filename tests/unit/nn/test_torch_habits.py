"""Goal: what torch and TorchRec users do by habit either works as there or is refused by name; nothing is ignored.

Method: the collection on servers inside this process, next to `nn.EmbeddingBag` where there is something to compare;
what must not hang on processes is tried with a client that counts what it is asked for.
"""

from __future__ import annotations

import copy
import dataclasses
import enum
import functools
import io
import pickle
import warnings
from typing import Any

import pytest
import torch
from click_models import CASES, loss_of, make_batches, make_job, train
from torch import Tensor, distributed, nn

import regrow
from regrow.checkpoint import DeltaCheckpointer
from regrow.errors import CheckpointError, RegrowError, UserError
from regrow.nn import refusals
from regrow.nn.job import Job
from regrow.nn.seat import AloneSeat

ROWS, DIM = 20, 4


def make(mode: Any = "async", **table: Any) -> regrow.EmbeddingBagCollection:
    config = regrow.EmbeddingBagConfig(
        **{"num_embeddings": ROWS, "embedding_dim": DIM, "name": "t", "feature_names": ["a", "b"], **table}
    )
    return regrow.EmbeddingBagCollection(
        tables=[config],
        cluster=regrow.InProcessCluster(servers=2),
        optimizer=regrow.OptimizerSpec(kind="sgd", learning_rate=0.5),
        mode=mode,
    )


def batch(*ids: int) -> regrow.KeyedJaggedTensor:
    """Two samples; the first id is feature a of the first, the others are feature b of the second."""
    lengths = torch.tensor([1, 0, 0, len(ids) - 1], dtype=torch.int32)
    return regrow.KeyedJaggedTensor.from_lengths_sync(["a", "b"], torch.tensor(ids), lengths)


# -- names -----------------------------------------------------------------------------------------------------------


def test_the_old_name_warns_and_is_the_same() -> None:
    with pytest.warns(DeprecationWarning, match=r"regrow.EmbeddingBagCollection now, as in TorchRec"):
        old = regrow.EmbeddingCollection
    assert old is regrow.EmbeddingBagCollection
    assert "EmbeddingCollection" not in regrow.__all__


# -- what is frozen --------------------------------------------------------------------------------------------------


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embeddings = make()
        self.head = nn.Linear(2 * DIM, 1)

    def forward(self, features: regrow.KeyedJaggedTensor) -> Tensor:
        out: Tensor = self.head(self.embeddings(features).values())
        return out


def test_eval_freezes_rows_and_train_frees_them() -> None:
    model = Model()
    before = model.embeddings.weight("t")
    model.eval()
    model(batch(3, 5)).sum().backward()
    assert model.head.weight.grad is not None, "the rest has its gradient, as ever"
    assert torch.equal(model.embeddings.weight("t"), before)
    model.train()
    model(batch(3, 5)).sum().backward()
    assert not torch.equal(model.embeddings.weight("t"), before)


@pytest.mark.parametrize("whole", [True, False], ids=["model", "collection"])
def test_requires_grad_freezes_rows(whole: bool) -> None:
    model = Model()
    before = model.embeddings.weight("t")
    (model if whole else model.embeddings).requires_grad_(False)
    model.head.requires_grad_(True)
    model(batch(3, 5)).sum().backward()
    assert torch.equal(model.embeddings.weight("t"), before)
    assert model.embeddings.client.pushes == 0
    model.requires_grad_(True)
    model(batch(3, 5)).sum().backward()
    assert not torch.equal(model.embeddings.weight("t"), before)


def test_a_synchronous_step_is_not_counted_while_frozen() -> None:
    """Evaluation in between: the steps of training stay as they would have been."""
    collection = make("sync")
    for frozen in (False, True, False):
        collection.train(not frozen)
        out = collection(batch(3, 5)).values()
        assert out.requires_grad == (not frozen)
        if not frozen:
            out.sum().backward()
    collection.drain()
    assert collection.client.pushes == 2


def test_the_empty_parameter_is_in_nobodys_way() -> None:
    model = Model()
    assert [tuple(p.shape) for p in model.embeddings.parameters()] == [(0,)]
    assert list(model.state_dict()) == ["embeddings.embedding_bags.t.weight", "head.weight", "head.bias"]
    adam = torch.optim.Adam(model.parameters())
    model(batch(3, 5)).sum().backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    adam.step()
    model.load_state_dict(model.state_dict())


def test_ddp_around_a_model_with_a_collection(tmp_path: Any) -> None:
    """It asks of every parameter, the empty one too, that backward comes by before the next step."""
    distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/met", rank=0, world_size=1)
    try:
        model = Model()
        parallel = nn.parallel.DistributedDataParallel(model)
        for _ in range(3):
            parallel(batch(3, 5)).sum().backward()
        assert model.embeddings.client.pushes == 3
    finally:
        distributed.destroy_process_group()


# -- what is refused -------------------------------------------------------------------------------------------------


class DataType(enum.Enum):
    FP32 = "FP32"
    FP16 = "FP16"


class Pooling(enum.Enum):
    SUM = "SUM"
    NONE = "NONE"


@dataclasses.dataclass
class TheirTable:
    """As TorchRec's, which fills in `init_fn`."""

    num_embeddings: int = ROWS
    embedding_dim: int = DIM
    name: str = "t"
    data_type: DataType = DataType.FP32
    feature_names: list[str] = dataclasses.field(default_factory=lambda: ["a", "b"])
    weight_init_max: float | None = None
    init_fn: Any = None
    need_pos: bool = False
    pooling: Pooling = Pooling.SUM

    def __post_init__(self) -> None:
        if self.init_fn is None:
            bound = (1 / self.num_embeddings) ** 0.5
            self.init_fn = functools.partial(nn.init.uniform_, a=-bound, b=bound)


def test_their_table_is_ours() -> None:
    theirs = regrow.EmbeddingBagCollection(tables=[TheirTable()], cluster=regrow.InProcessCluster(servers=2))  # type: ignore[list-item]
    ours = regrow.EmbeddingBagCollection(
        tables=make(data_type=DataType.FP32).embedding_bag_configs(), cluster=regrow.InProcessCluster(servers=2)
    )
    assert torch.equal(theirs(batch(3, 5)).values(), ours(batch(3, 5)).values())


@pytest.mark.parametrize(
    "change, says",
    [
        ({"data_type": DataType.FP16}, "data_type = FP16 is not supported"),
        ({"pooling": Pooling.NONE}, "pooling = NONE is not supported"),
        ({"weight_init_max": 1.0}, "weight_init_max is not supported"),
        ({"need_pos": True}, "need_pos is not supported"),
    ],
)
def test_what_a_table_cannot_be_is_said_by_name(change: dict[str, Any], says: str) -> None:
    with pytest.raises(UserError, match=f"table 't': {says}"):
        regrow.EmbeddingBagCollection(tables=[TheirTable(**change)], cluster=regrow.InProcessCluster(servers=1))  # type: ignore[list-item]


@pytest.mark.parametrize("data_type", ["FP16", DataType.FP16])
def test_our_tables_are_of_floats(data_type: Any) -> None:
    with pytest.raises(UserError, match="data_type = FP16 is not supported"):
        make(data_type=data_type)


class TheirFeatures:
    """As TorchRec's, made of whatever one gives it."""

    def __init__(self, values: Tensor, lengths: Tensor, weights: Tensor | None = None) -> None:
        self._values, self._lengths, self._weights = values, lengths, weights

    def keys(self) -> list[str]:
        return ["a", "b"]

    def values(self) -> Tensor:
        return self._values

    def lengths(self) -> Tensor:
        return self._lengths

    def weights_or_none(self) -> Tensor | None:
        return self._weights


IDS, LENGTHS = torch.tensor([3, 5]), torch.tensor([1, 0, 0, 1], dtype=torch.int32)


@pytest.mark.parametrize(
    "features, error, says",
    [
        ((IDS.float(), LENGTHS), TypeError, "ids are whole numbers, not torch.float32"),
        ((IDS.bool(), LENGTHS), TypeError, "ids are whole numbers, not torch.bool"),
        ((IDS, LENGTHS.double()), TypeError, "lengths are whole numbers, not torch.float64"),
    ],
)
def test_features_that_would_be_changed_on_the_way(features: Any, error: type[Exception], says: str) -> None:
    collection = make()
    with pytest.raises(error, match=says):
        collection(TheirFeatures(*features))
    with pytest.raises(error, match=says):
        regrow.KeyedJaggedTensor.from_lengths_sync(["a", "b"], *features)
    assert collection(TheirFeatures(IDS, LENGTHS)).values().shape == (2, 2 * DIM)


def test_weights_are_not_left_out() -> None:
    collection = make()
    with pytest.raises(UserError, match="this collection does not weigh"):
        collection(TheirFeatures(IDS, LENGTHS, torch.ones(2)))
    with pytest.raises(ValueError, match="3 weights for 2 ids"):
        regrow.KeyedJaggedTensor(["a", "b"], IDS, LENGTHS, torch.ones(3))


def test_a_scaler_is_refused() -> None:
    """Rows would get a gradient 65536 times too large; nothing is pushed."""
    collection = make()
    scaler = torch.amp.GradScaler("cpu")
    with pytest.raises(UserError, match="a GradScaler is in use"):
        scaler.scale(collection(batch(3, 5)).values().sum()).backward()  # type: ignore[no-untyped-call]
    assert collection.client.pushes == 0
    del scaler
    unused = torch.amp.GradScaler("cpu", enabled=False)
    unused.scale(collection(batch(3, 5)).values().sum()).backward()  # type: ignore[no-untyped-call]
    assert collection.client.pushes == 1


@pytest.mark.parametrize("how", ["step", "commit"])
def test_a_scaler_is_refused_in_a_job(how: str) -> None:
    job, model = make_job()
    scaler = torch.amp.GradScaler("cpu")
    with pytest.raises(UserError, match="a GradScaler is in use"):
        for one in job.loop(make_batches(1)):
            scaled: Tensor = scaler.scale(loss_of(model, one))  # type: ignore[no-untyped-call]
            if how == "step":
                job.step(scaled)
            else:
                scaled.backward()  # type: ignore[no-untyped-call]
                job.commit()
    assert job.client.pushes == 0


def test_an_optimizer_of_torch_does_not_step_what_servers_have() -> None:
    """Its update would be lost with the next pull. One for parameters that stay in the worker is like any other."""
    job, model = make_job()
    own = nn.Parameter(torch.ones(()))
    optimizer = torch.optim.SGD([own], lr=0.5)
    theirs = torch.optim.Adam(model.parameters())
    for one in job.loop(make_batches(1)):
        job.step(loss_of(model, one) * own)
        optimizer.step()
        assert own.item() != 1.0
        with pytest.raises(UserError, match=r"Adam\.step\(\) would update 'top\.weight', which the servers have"):
            theirs.step()


def test_half_precision_that_needs_a_scaler_is_refused() -> None:
    job, model = make_job()
    with torch.autocast("cpu", dtype=torch.float16), pytest.raises(UserError, match="autocast with float16"):
        train(job, model, make_batches(1))
    collection = make()
    with torch.autocast("cpu", dtype=torch.float16), pytest.raises(UserError, match="autocast with float16"):
        collection(batch(3, 5))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        (collection(batch(3, 5)).values() @ torch.ones(2 * DIM, 1)).sum().backward()
    assert collection.client.pushes == 1


def test_two_forwards_before_a_backward_are_explained_before_anybody_waits() -> None:
    """On processes the second pull would wait for the first one's push. So it is not even sent."""
    collection = make("sync")
    first = collection(batch(3, 5))
    requests = collection.client._request
    for call in (lambda: collection(batch(7, 9)), collection.drain, collection.state_dict):
        with pytest.raises(RegrowError, match="have not been pushed: in synchronous mode") as refused:
            call()
        assert refused.value.hint == refusals.UNPUSHED_HINT
    assert collection.client._request == requests, "nothing was asked for"
    with torch.no_grad():
        collection(batch(7, 9))
    first.values().sum().backward()
    collection(batch(7, 9)).values().sum().backward()
    collection.drain()
    assert collection.client.pushes == 2


def test_a_synchronous_step_has_one_push() -> None:
    collection = make("sync")
    out = collection(batch(3, 5)).values()
    out.sum().backward(retain_graph=True)
    with pytest.raises(RegrowError, match="backward went through this batch twice"):
        out.sum().backward()
    assert collection.client.pushes == 1


def test_every_micro_batch_is_an_update() -> None:
    """As with SGD that steps after each: gradients of several backwards are not gathered into one push."""
    collection = make()
    weight = collection.weight("t")
    for ids in ((3, 5), (3, 7)):
        (collection(batch(*ids)).values().sum() / 2).backward()
    expected = weight.clone()
    for row in (3, 5, 3, 7):
        expected[row] -= 0.5 * 0.5
    torch.testing.assert_close(collection.weight("t"), expected)
    assert collection.client.pushes == 2


# -- copies ----------------------------------------------------------------------------------------------------------


COPIERS = [copy.deepcopy, pickle.dumps, lambda model: torch.save(model, io.BytesIO())]


@pytest.mark.parametrize("copier", COPIERS)
def test_a_collection_cannot_be_copied(copier: Any) -> None:
    for model in (Model(), make()):
        with pytest.raises(RegrowError, match="cannot be copied or pickled: its rows are on servers"):
            copier(model)


@pytest.mark.parametrize("copier", COPIERS)
@pytest.mark.parametrize("begun", [False, True])
def test_nor_can_one_of_a_job(copier: Any, begun: bool) -> None:
    job, model = make_job()
    if begun:
        job.settle()
    with pytest.raises(RegrowError, match="a collection of a job cannot be copied or pickled: its rows are on servers"):
        copier(model)


@pytest.mark.parametrize("copier", [copy.deepcopy, lambda module: pickle.loads(pickle.dumps(module))])
def test_a_dense_module_is_copied_as_any_other(copier: Any) -> None:
    """What is loaded into the copy does not reach the servers."""
    job = Job(AloneSeat())
    job.embedding_bag_collection(CASES["sums"][0])
    head = job.dense(nn.Linear(DIM, 1))
    job.settle()
    before = {name: value.clone() for name, value in head.state_dict().items()}
    copied = copier(head)
    head.weight.data.add_(1.0)  # not loaded: nobody but this worker has it
    copied.load_state_dict({name: torch.zeros_like(value) for name, value in before.items()})
    job.refresh()
    assert torch.equal(head.weight, before["weight"])
    assert not copied.weight.any()


def test_a_delta_checkpointer_does_not_leave_rows_out_in_silence(tmp_path: Any) -> None:
    model = Model()
    with pytest.raises(CheckpointError, match="'embeddings' is a EmbeddingBagCollection: its rows are on servers"):
        DeltaCheckpointer(model, str(tmp_path))
    with pytest.raises(CheckpointError, match="the model is a EmbeddingBagCollection"):
        DeltaCheckpointer(model.embeddings, str(tmp_path))
    with DeltaCheckpointer(model.head, str(tmp_path)) as checkpointer:
        checkpointer.save()
    with pytest.raises(CheckpointError, match="'embeddings' is a"):
        DeltaCheckpointer.restore(model, str(tmp_path))


# -- features --------------------------------------------------------------------------------------------------------


def test_offsets_are_where_bags_begin() -> None:
    features = batch(3, 5, 6)
    assert features.offsets().tolist() == [0, 1, 1, 1, 3]
    again = regrow.KeyedJaggedTensor.from_offsets_sync(features.keys(), features.values(), features.offsets())
    assert torch.equal(again.lengths(), features.lengths())


def test_features_move_as_a_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    features = batch(3, 5)
    moved = features.to("meta", non_blocking=True)
    assert (moved.device.type, moved.lengths().device.type, moved.keys()) == ("meta", "meta", features.keys())
    assert features.to(torch.device("cpu")).values().tolist() == [3, 5]
    # Memory can be pinned only where there is a device.
    pinned: list[int] = []
    monkeypatch.setattr(Tensor, "pin_memory", lambda self: pinned.append(self.numel()) or self)
    assert features.pin_memory().values().tolist() == [3, 5]
    assert pinned == [2, 4]


# -- torch.compile ---------------------------------------------------------------------------------------------------


def test_a_compiled_model_is_interrupted_at_the_collection() -> None:
    """Without a compiler: graphs are made, and run as they are."""
    model, graphs = Model(), []

    def note(graph: torch.fx.GraphModule, _: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's about itself
        compiled = torch.compile(model, backend=note)
        out = compiled(batch(3, 5))
        assert torch.equal(out, model(batch(3, 5)))
        out.sum().backward()
    assert len(graphs) == 1, "the head"
    assert model.embeddings.client.pushes == 1


@pytest.mark.parametrize("kind", ["bags", "weighted", "sequences"])
def test_so_is_one_of_a_job(kind: str) -> None:
    job, graphs = Job(AloneSeat()), []
    table = {"num_embeddings": ROWS, "embedding_dim": DIM, "name": "t", "feature_names": ["a"]}

    class Compiled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            if kind == "sequences":
                self.embeddings: nn.Module = job.embedding_collection([regrow.EmbeddingConfig(**table)])
            else:
                tables = [regrow.EmbeddingBagConfig(**table)]
                self.embeddings = job.embedding_bag_collection(tables, is_weighted=kind == "weighted")
            self.head = nn.Linear(DIM, 1)

        def forward(self, features: Any) -> Any:
            found = self.embeddings(features)
            return self.head(found["a"].values() if kind == "sequences" else found.values())

    def note(graph: torch.fx.GraphModule, _: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    model = job.dense(Compiled())
    one = batch(3, 5)
    if kind == "weighted":
        one = regrow.KeyedJaggedTensor(one.keys(), one.values(), one.lengths(), torch.ones(one.values().numel()))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        compiled = torch.compile(model, backend=note)
        for features in job.loop([one, one]):
            out = compiled(features)
            assert torch.equal(out, model(features))
            job.step(out.sum())
    assert len(graphs) == 1, "the head"
    assert job.progress.step == 2


# -- optimizers ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options, says",
    [
        ({"kind": "adamw", "learning_rate": 0.1}, "optimizer kind = 'adamw': must be one of sgd, momentum, adagrad, "),
        (
            {"kind": "sgd", "learning_rate": -1.0},
            "optimizer sgd: learning_rate must be a finite number and not negative",
        ),
        ({"kind": "adam", "learning_rate": 0.1, "beta1": 1.0}, r"optimizer adam: beta1 must be in \[0, 1\)"),
        ({"kind": "sgd", "learning_rate": "fast"}, "optimizer sgd: '<=' not supported"),
    ],
)
def test_an_optimizer_is_checked_when_it_is_made(options: dict[str, Any], says: str) -> None:
    with pytest.raises(UserError, match=says):
        regrow.OptimizerSpec(**options)


def test_jobs_have_optimizers_of_one_type() -> None:
    """They are compared with what came over the wire, by type too."""
    (table,) = make().job.tables
    assert type(table.optimizer).__module__ == "regrow.core.job"
    assert table.optimizer.learning_rate == 0.5
