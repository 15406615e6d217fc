"""EmbeddingBagCollection against torch's own EmbeddingBag, and against TorchRec's conventions.

Goal: a model author who swaps the module notices nothing. Method: the same ids, the same starting weights and
the same gradients through both, on servers inside this process; outputs and updated rows must agree.
"""

import numpy as np
import pytest
import torch
from torch import nn

import regrow
from regrow.config import TrainConfig
from regrow.data.catalog import open_dataset
from regrow.errors import ConfigError, RegrowError, UserError
from regrow.nn.coded import make_protection
from regrow.nn.embedding import KeyedTensor
from regrow.nn.job import Job
from regrow.nn.seat import ClusterSeat
from regrow.nn.trainer import Trainer


def _collection(*, servers=3, optimizer="sgd", pooling=regrow.PoolingType.SUM, learning_rate=0.5, **options):
    tables = [
        regrow.EmbeddingBagConfig(
            num_embeddings=50, embedding_dim=8, name="t_user", feature_names=["user", "friend"], pooling=pooling
        ),
        regrow.EmbeddingBagConfig(
            num_embeddings=30, embedding_dim=5, name="t_item", feature_names=["item"], pooling=pooling
        ),
    ]
    return regrow.EmbeddingBagCollection(
        tables=tables,
        cluster=regrow.InProcessCluster(servers=servers),
        optimizer=regrow.OptimizerSpec(kind=optimizer, learning_rate=learning_rate),
        seed=7,
        **options,
    )


def _batch(keys=("user", "friend", "item"), *, batch=6, seed=0, weighted=False):
    rng = np.random.default_rng(seed)
    sizes = {"user": 50, "friend": 50, "item": 30, "other": 9}
    lengths = rng.integers(0, 4, (len(keys), batch))
    values = [rng.integers(0, sizes[key], lengths[i].sum()) for i, key in enumerate(keys)]
    return regrow.KeyedJaggedTensor.from_lengths_sync(
        list(keys),
        torch.from_numpy(np.concatenate(values)),
        torch.from_numpy(lengths.reshape(-1).astype(np.int32)),
        torch.from_numpy(rng.normal(size=lengths.sum()).astype(np.float32)) if weighted else None,
    )


def _train(collection, steps):
    for seed in range(steps):
        collection(_batch(seed=seed)).values().square().sum().backward()


def _reference(collection, features, mode):
    """The same look-up by torch: {feature: pooled}, and the weights that will get gradients."""
    weights = {
        config.name: collection.weight(config.name).requires_grad_() for config in collection.embedding_bag_configs()
    }
    lengths = features.lengths().reshape(len(features.keys()), -1).long()
    parts = dict(zip(features.keys(), features.values().split(lengths.sum(1).tolist()), strict=True))
    pooled = {}
    for config in collection.embedding_bag_configs():
        for name in config.feature_names:
            own = lengths[features.keys().index(name)]
            offsets = torch.cat([torch.zeros(1, dtype=torch.int64), own.cumsum(0)[:-1]])
            pooled[name] = nn.functional.embedding_bag(parts[name], weights[config.name], offsets, mode=mode)
    return pooled, weights


@pytest.mark.parametrize("pooling", list(regrow.PoolingType))
@pytest.mark.parametrize("servers", [1, 3])
def test_same_as_torch_forward_and_after_an_sgd_step(pooling, servers):
    collection = _collection(servers=servers, pooling=pooling)
    features = _batch()
    expected, weights = _reference(collection, features, pooling.value.lower())
    out = collection(features)
    for name, value in expected.items():
        torch.testing.assert_close(out[name], value.detach())
    direction = torch.randn(6, 21, generator=torch.Generator().manual_seed(1))
    (out.values() * direction).sum().backward()
    (torch.cat(list(expected.values()), dim=1) * direction).sum().backward()
    for name, weight in weights.items():
        torch.testing.assert_close(collection.weight(name), (weight - 0.5 * weight.grad).detach())


def test_output_is_keyed_in_table_order():
    out = _collection()(_batch())
    assert isinstance(out, KeyedTensor)
    assert out.keys() == ["user", "friend", "item"]
    assert out.length_per_key() == [8, 8, 5]
    assert {name: tuple(value.shape) for name, value in out.to_dict().items()} == {
        "user": (6, 8),
        "friend": (6, 8),
        "item": (6, 5),
    }


def test_features_may_come_in_any_order_and_with_others():
    collection = _collection()
    mixed = _batch(("item", "other", "user", "friend"))
    expected, _ = _reference(collection, mixed, "sum")
    for name, value in expected.items():
        torch.testing.assert_close(collection(mixed)[name], value.detach())


@pytest.mark.parametrize("mode", ["async", "sync"])
@pytest.mark.parametrize("keys", [("user", "friend", "item"), ("other", "item", "friend", "user")])
def test_weighted_bags_agree_with_torch(mode, keys):
    """Two features share a table; gradients reach rows and weights; the batch may have others, in any order."""
    collection = _collection(mode=mode, is_weighted=True)
    assert collection.is_weighted() and not _collection().is_weighted()
    for seed in range(3):
        mine, theirs = (_batch(keys, seed=seed, weighted=True) for _ in range(2))
        tables = {
            config.name: collection.weight(config.name).requires_grad_()
            for config in collection.embedding_bag_configs()
        }
        for features in (mine, theirs):
            features.weights().requires_grad_()
        counts = theirs.lengths().reshape(len(keys), -1)
        ids = dict(zip(keys, theirs.values().split(counts.sum(1).tolist()), strict=True))
        weighs = dict(zip(keys, theirs.weights().split(counts.sum(1).tolist()), strict=True))
        expected = {}
        for name, table in (("user", "t_user"), ("friend", "t_user"), ("item", "t_item")):
            lengths = counts[keys.index(name)].long()
            offsets = lengths.cumsum(0) - lengths
            expected[name] = nn.functional.embedding_bag(
                ids[name], tables[table], offsets, mode="sum", per_sample_weights=weighs[name]
            )
        found = collection(mine)
        for name, pooled in expected.items():
            torch.testing.assert_close(found[name], pooled)
        sum(found[name].square().sum() for name in expected).backward()
        sum(pooled.square().sum() for pooled in expected.values()).backward()
        collection.drain()
        for name, table in tables.items():
            torch.testing.assert_close(collection.weight(name), (table - 0.5 * table.grad).detach())
        torch.testing.assert_close(mine.weights().grad, theirs.weights().grad)


def test_what_a_weighted_collection_refuses():
    with pytest.raises(UserError, match="a weighted collection sums"):
        _collection(pooling=regrow.PoolingType.MEAN, is_weighted=True)
    collection = _collection(mode="sync", is_weighted=True)
    with pytest.raises(UserError, match="the features have no weights"):
        collection(_batch())
    collection(_batch(weighted=True)).values().sum().backward()  # the refused one was no step


def test_a_table_begins_with_what_its_init_fn_says():
    wanted = torch.arange(20.0).reshape(10, 2)
    cluster = regrow.InProcessCluster(servers=3)

    def make(**options):
        table = regrow.EmbeddingBagConfig(num_embeddings=10, embedding_dim=2, name="t", feature_names=["f"], **options)
        sgd = regrow.OptimizerSpec(kind="sgd", learning_rate=1.0)
        return regrow.EmbeddingBagCollection(tables=[table], cluster=cluster, optimizer=sgd)

    first = make(init_fn=lambda weights: weights.copy_(wanted))
    assert torch.equal(first.weight("t"), wanted)
    features = regrow.KeyedJaggedTensor(["f"], torch.tensor([3]), torch.ones(1, dtype=torch.int32))
    first(features).values().sum().backward()
    trained = wanted.clone()
    trained[3] -= 1.0
    again = make(init_fn=lambda weights: weights.copy_(wanted))  # another process of the same worker
    assert torch.equal(again.weight("t"), trained), "what was trained is not undone"


def test_the_same_weights_on_any_number_of_servers():
    one, five = _collection(servers=1), _collection(servers=5)
    assert torch.equal(one.weight("t_user"), five.weight("t_user"))
    bound = (1 / 50) ** 0.5
    assert one.weight("t_user").abs().max() <= bound
    assert one.weight("t_user").abs().max() > 0.9 * bound


def test_names_are_those_of_torchrec():
    collection = _collection(optimizer="rowwise_adagrad")
    collection(_batch()).values().sum().backward()
    assert list(collection.state_dict()) == ["embedding_bags.t_user.weight", "embedding_bags.t_item.weight"]
    state = collection.optimizer_state()
    assert {name: tuple(value.shape) for name, value in state.items()} == {
        "t_user.momentum1": (50,),
        "t_item.momentum1": (30,),
    }
    assert state["t_user.momentum1"].max() > 0
    adam = _collection(optimizer="adam").optimizer_state()
    assert list(adam)[:2] == ["t_user.momentum1", "t_user.exp_avg_sq"]


@pytest.mark.parametrize("optimizer", ["momentum", "adagrad", "rowwise_adagrad", "adam", "sgd"])
def test_the_state_of_an_optimizer_goes_along(optimizer):
    """Training goes on to the bit where its weights and states were loaded, and not with the weights alone. Adam also
    counts steps, which are those of a collection."""
    whole, part, alone = (_collection(servers=servers, optimizer=optimizer) for servers in (1, 3, 2))
    _train(whole, 3)
    for each in (part, alone):
        each.load_state_dict(whole.state_dict())
    part.load_optimizer_state(whole.optimizer_state())
    state = whole.optimizer_state()
    assert all(torch.equal(part.optimizer_state()[name], values) for name, values in state.items())
    for each in (whole, part, alone):
        _train(each, 2)
    for name in ("t_user", "t_item"):
        assert torch.equal(part.weight(name), whole.weight(name)) == (optimizer != "adam")
        assert torch.equal(alone.weight(name), whole.weight(name)) == (optimizer == "sgd")
    if optimizer != "sgd":
        name, values = next(iter(state.items()))
        with pytest.raises(UserError, match=f"{name} is not in the state"):
            part.load_optimizer_state({key: value for key, value in state.items() if key != name})
        with pytest.raises(UserError, match=f"{name} is "):
            part.load_optimizer_state({**state, name: values[:-1]})
    with pytest.raises(UserError, match="strange is none"):
        part.load_optimizer_state({**state, "strange": torch.zeros(1)})


def test_a_state_dict_can_be_loaded_elsewhere():
    source, target = _collection(servers=2), _collection(servers=3)
    source(_batch()).values().sum().backward()
    target.load_state_dict(source.state_dict())
    assert torch.equal(source.weight("t_item"), target.weight("t_item"))
    model = nn.Sequential(_collection())
    with pytest.raises(RuntimeError, match="t_item"):
        model.load_state_dict({"0.embedding_bags.t_user.weight": torch.zeros(50, 8)})


def test_evaluation_changes_nothing():
    collection = _collection()
    before = collection.weight("t_user")
    collection.eval()
    with torch.no_grad():
        collection(_batch())
    assert torch.equal(before, collection.weight("t_user"))
    assert collection.client.pushes == 0


def test_prefetched_rows_are_used_once():
    collection = _collection()
    features = _batch()
    collection.prefetch(features)
    first = collection(features)
    first.values().sum().backward()
    second = collection(features)
    assert not torch.equal(first.values(), second.values())


@pytest.mark.parametrize(
    ("change", "error", "says"),
    [
        (lambda kjt: kjt.values().__setitem__(0, 999), UserError, r"feature .user., table .*: id 999 is out of range"),
        (lambda kjt: kjt.values().__setitem__(0, -1), UserError, "id -1 is out of range"),
        (lambda kjt: kjt.lengths().__setitem__(0, 77), ValueError, "lengths"),
        (lambda kjt: kjt.keys().__setitem__(0, "nobody"), KeyError, "user"),
    ],
)
def test_bad_features_are_refused_and_nothing_is_lost(change, error, says):
    collection = _collection()
    bad = _batch()
    change(bad)
    with pytest.raises(error, match=says):
        collection(bad)
    collection(_batch()).values().sum().backward()
    assert collection.client.pushes == 1


@pytest.mark.parametrize("weighted", [False, True])
def test_a_feature_in_two_tables(weighted):
    """Named as TorchRec names it, and both tables learn from it."""
    tables = [
        regrow.EmbeddingBagConfig(num_embeddings=50, embedding_dim=dim, name=name, feature_names=names)
        for name, dim, names in (("t_a", 4, ["user"]), ("t_b", 6, ["item", "user"]))
    ]
    sgd = regrow.OptimizerSpec(kind="sgd", learning_rate=0.5)
    cluster = regrow.InProcessCluster(servers=2)
    collection = regrow.EmbeddingBagCollection(tables=tables, cluster=cluster, optimizer=sgd, is_weighted=weighted)
    features = _batch(weighted=weighted)
    before = {name: collection.weight(name).requires_grad_() for name in ("t_a", "t_b")}
    lengths = features.lengths().view(3, -1).long()
    ids = dict(zip(features.keys(), features.values().split(lengths.sum(1).tolist()), strict=True))
    weights = features.weights() if weighted else torch.ones(len(features.values()))
    factors = dict(zip(features.keys(), weights.split(lengths.sum(1).tolist()), strict=True))

    def pool(feature, table):
        offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths[features.keys().index(feature)].cumsum(0)[:-1]])
        options = {"mode": "sum", "per_sample_weights": factors[feature]}
        return nn.functional.embedding_bag(ids[feature], before[table], offsets, **options)

    found = collection(features)
    assert found.keys() == ["user@t_a", "item", "user@t_b"]
    expected = torch.cat([pool("user", "t_a"), pool("item", "t_b"), pool("user", "t_b")], dim=1)
    assert torch.allclose(found.values(), expected, atol=1e-6)
    found.values().square().sum().backward()
    expected.square().sum().backward()
    for name, table in before.items():
        assert torch.allclose(collection.weight(name), table.detach() - 0.5 * table.grad, atol=1e-5)


def test_tables_that_cannot_be_are_refused():
    repeated = [regrow.EmbeddingBagConfig(num_embeddings=4, embedding_dim=4, name="t", feature_names=["a", "a"])]
    with pytest.raises(ValueError, match="feature 'a' is named twice in table 't'"):
        regrow.EmbeddingBagCollection(tables=repeated, cluster=regrow.InProcessCluster(servers=1))
    twice = [
        regrow.EmbeddingBagConfig(num_embeddings=4, embedding_dim=4, name="t", feature_names=["a"]),
        regrow.EmbeddingBagConfig(num_embeddings=4, embedding_dim=4, name="t", feature_names=["b"]),
    ]
    with pytest.raises(ValueError, match="two tables are named 't'"):
        regrow.EmbeddingBagCollection(tables=twice, cluster=regrow.InProcessCluster(servers=1))
    empty = [regrow.EmbeddingBagConfig(num_embeddings=0, embedding_dim=4, name="t", feature_names=["a"])]
    with pytest.raises(ValueError, match="rows must be between"):
        regrow.EmbeddingBagCollection(tables=empty, cluster=regrow.InProcessCluster(servers=1))


def test_torchrec_own_features_are_taken():
    jagged = pytest.importorskip("torchrec.sparse.jagged_tensor", reason="TorchRec is not installed")
    ours = _batch()
    theirs = jagged.KeyedJaggedTensor.from_lengths_sync(ours.keys(), ours.values(), ours.lengths())
    collection = _collection()
    assert torch.equal(collection(ours).values(), collection(theirs).values())


def test_synchronous_workers_in_one_process():
    cluster = regrow.InProcessCluster(servers=2)
    config = regrow.EmbeddingBagConfig(num_embeddings=20, embedding_dim=4, name="t", feature_names=["a"])
    optimizer = regrow.OptimizerSpec(kind="sgd", learning_rate=1.0)
    workers = [
        regrow.EmbeddingBagCollection(
            tables=[config], cluster=cluster, optimizer=optimizer, mode="sync", worker=w, workers=2
        )
        for w in range(2)
    ]
    before = [worker.client.records(0, 0, 20) for worker in workers]
    assert np.array_equal(*before)
    ids = [torch.tensor([3, 5]), torch.tensor([5, 7])]
    for own, worker in zip(ids, workers, strict=True):
        features = regrow.KeyedJaggedTensor.from_lengths_sync(["a"], own, torch.ones(2, dtype=torch.int32))
        worker(features).values().sum().backward()
    with pytest.raises(RegrowError, match="would wait for ever"):
        workers[0].drain()
    workers[1].drain()  # its pull completes the commit for both
    expected = before[0].copy()
    expected[[3, 7]] -= 1.0
    expected[5] -= 2.0
    assert np.array_equal(workers[0].client.records(0, 0, 20), expected)
    with pytest.raises(RegrowError, match="synchronous mode"):
        workers[0].prefetch(features)


# --- Protection, and a worker that takes another's place ---


def test_a_recovery_has_no_limit_unless_one_is_asked_for() -> None:
    """Slow ones lose more training in all, and leave the model unprotected for longer (docs/benchmarks.md)."""
    assert make_protection(regrow.ErasureCode()).flush.sweep_bytes_per_s == 0
    assert make_protection(TrainConfig(protection="ec").code).flush.sweep_bytes_per_s == 0
    assert make_protection(regrow.ErasureCode(sweep_bytes_per_s=5)).flush.sweep_bytes_per_s == 5


def test_protection_reaches_the_job():
    code = regrow.ErasureCode(k=2, r=1, flush_pushes=3, flush_bytes=1 << 20, commit="none", sweep_bytes_per_s=7)
    tables = [regrow.EmbeddingBagConfig(num_embeddings=50, embedding_dim=8, name="t", feature_names=["f"])]
    cluster = regrow.InProcessCluster(servers=3)
    job = regrow.EmbeddingBagCollection(tables=tables, cluster=cluster, protection=code).job
    assert job.protection.replaces_servers
    assert [(table.k, table.r) for table in job.tables] == [(2, 1)]
    flush = job.protection.flush
    assert (flush.pushes, flush.bytes, flush.commit, flush.sweep_bytes_per_s) == (3, 1 << 20, "none", 7)
    with pytest.raises(ConfigError, match=r"k \+ r = 5 members need as many servers in a ring; 3 servers in 1 ring"):
        regrow.EmbeddingBagCollection(tables=tables, cluster=cluster, protection=regrow.ErasureCode())


def test_protection_of_a_cluster_is_that_of_its_collections():
    cluster = regrow.InProcessCluster(servers=3)
    cluster.protection = regrow.ErasureCode(k=1, r=2)
    tables = [regrow.EmbeddingBagConfig(num_embeddings=50, embedding_dim=8, name="t", feature_names=["f"])]
    job = regrow.EmbeddingBagCollection(tables=tables, cluster=cluster).job
    assert [(table.k, table.r) for table in job.tables] == [(1, 2)]


def test_dense_parameters_are_kept_whole():
    config = TrainConfig(model="tiny", rows_max=40, batch=8, servers=3, workers=1, steps=9, protection="ec", k=2)
    seat = ClusterSeat(regrow.InProcessCluster(servers=3), protection=config.code)
    tables = Trainer(Job(seat), config, open_dataset(config)).job.spec.tables
    assert {(table.k, table.r) for table in tables[:-1]} == {(2, 1)}
    assert (tables[-1].name, tables[-1].k, tables[-1].r) == ("dense", 1, 1)
