"""Synthetic data: a pure function of (seed, sample number), skewed as published, and learnable.

Statistics are taken from fixed seeds, so the bounds are tight and nothing is flaky.
"""

from __future__ import annotations

import itertools
import time

import numpy as np
import pytest

from regrow.data.batch import Batch
from regrow.data.synthetic import SyntheticDataset, _coprime_near, _segment_starts, table_rows
from regrow.errors import UserError
from regrow.metrics import auc


def small(**changes: object) -> SyntheticDataset:
    settings: dict[str, object] = {
        "rows": [1000, 7, 50_000, 1],
        "seed": 5,
        "train_rows": 1000,
        "test_rows": 300,
    }
    return SyntheticDataset(**(settings | changes))  # type: ignore[arg-type]


def join(batches: list[Batch], tables: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(dense [N, D], ids [F, N], labels [N]) of several batches."""
    ids = np.concatenate([batch.values.reshape(tables, -1) for batch in batches], axis=1)
    return np.concatenate([b.dense for b in batches]), ids, np.concatenate([b.labels for b in batches])


def same(left: Batch, right: Batch) -> bool:
    arrays = ("dense", "values", "labels")
    return all(np.array_equal(getattr(left, a), getattr(right, a)) for a in arrays) and left.position == right.position


def all_train(dataset: SyntheticDataset, **arguments: int) -> list[Batch]:
    return list(dataset.train_batches(**({"worker": 0, "workers": 1} | arguments)))  # type: ignore[arg-type]


def test_shapes_and_types() -> None:
    batch = all_train(small(), batch=64)[0]
    assert len(batch) == 64
    assert (batch.dense.shape, batch.dense.dtype) == ((64, 13), np.float32)
    assert (batch.values.shape, batch.values.dtype) == ((4 * 64,), np.int64)
    assert (batch.labels.shape, batch.labels.dtype) == ((64,), np.float32)
    assert batch.lengths is None
    assert all(array.flags.c_contiguous for array in (batch.dense, batch.values, batch.labels))
    ids = batch.values.reshape(4, 64)
    assert (ids >= 0).all()
    assert (ids.max(axis=1) < [1000, 7, 50_000, 1]).all()
    assert set(np.unique(batch.labels)) == {0.0, 1.0}


def test_samples_do_not_depend_on_batch_size_or_workers() -> None:
    dataset = small(epochs=2)
    whole = join(all_train(dataset, batch=1000), 4)
    for size in (1, 64, 333):
        parts = join(all_train(dataset, batch=size), 4)
        assert all(np.array_equal(a, b) for a, b in zip(whole, parts, strict=True))
    alone = all_train(dataset, batch=64)
    shared = [all_train(dataset, batch=64, worker=worker, workers=3) for worker in range(3)]
    for index, batch in enumerate(alone):
        other = shared[index % 3][index // 3]
        assert np.array_equal(batch.values, other.values)


def test_last_batch_of_each_epoch_is_short() -> None:
    sizes = [len(batch) for batch in all_train(small(epochs=2), batch=300)]
    assert sizes == [300, 300, 300, 100] * 2


@pytest.mark.parametrize(("worker", "workers"), [(0, 1), (1, 2), (2, 3)])
def test_every_position_resumes_exactly(worker: int, workers: int) -> None:
    dataset = small(epochs=3)
    whole = all_train(dataset, batch=190, worker=worker, workers=workers)
    for index, batch in enumerate(whole):
        rest = list(small(epochs=3).train_batches(batch=190, worker=worker, workers=workers, start=batch.position))
        assert len(rest) == len(whole) - index - 1
        assert all(same(a, b) for a, b in zip(rest, whole[index + 1 :], strict=True))


def test_positions_of_another_run_are_refused() -> None:
    dataset = small()
    position = all_train(dataset, batch=100, workers=2)[1].position
    with pytest.raises(UserError, match="another batch size"):
        dataset.train_batches(batch=90, worker=0, workers=2, start=position)
    with pytest.raises(UserError, match="not one of worker 1"):
        dataset.train_batches(batch=100, worker=1, workers=2, start=position)
    with pytest.raises(UserError, match="needs the integers"):
        dataset.train_batches(batch=100, worker=0, workers=2, start={"batch": 2})


def test_golden_values() -> None:
    """The samples never change between versions or machines: recorded runs and positions stay meaningful."""
    batch = all_train(small(), batch=4)[0]
    assert batch.values.tolist() == GOLDEN_VALUES
    assert batch.labels.tolist() == GOLDEN_LABELS
    assert [round(float(x), 5) for x in batch.dense[0, :3]] == GOLDEN_DENSE


GOLDEN_VALUES = [223, 820, 820, 851, 1, 4, 4, 2, 7450, 7450, 35300, 28247, 0, 0, 0, 0]
GOLDEN_LABELS = [0.0, 0.0, 1.0, 1.0]
GOLDEN_DENSE = [-1.0649, 0.51949, 1.06768]


def test_streams_and_seeds_differ() -> None:
    train = all_train(small(), batch=300)[0]
    test = next(small().test_batches(batch=300))
    other = all_train(small(seed=6), batch=300)[0]
    assert not np.array_equal(train.dense, test.dense)
    assert not np.array_equal(train.dense, other.dense)
    assert sum(len(batch) for batch in small().test_batches(batch=64)) == 300


@pytest.mark.parametrize("model", ["kaggle", "terabyte"])
def test_published_access_statistics(model: str) -> None:
    """0.1 % of the ids take about 90 % of the accesses; 2048 samples touch 9 to 14 thousand rows."""
    dataset = SyntheticDataset(rows=table_rows(model), seed=1)
    batches = list(itertools.islice(dataset.train_batches(batch=2048, worker=0, workers=1), 40))
    first_row = np.cumsum([0, *dataset.rows[:-1]])[:, None]
    ids = [(batch.values.reshape(26, -1) + first_row).reshape(-1) for batch in batches]
    distinct = np.mean([len(np.unique(batch)) for batch in ids])
    assert 9_000 < distinct < 14_000
    counts = np.sort(np.bincount(np.concatenate(ids), minlength=sum(dataset.rows)))[::-1]
    hot = counts[: sum(dataset.rows) // 1000].sum() / counts.sum()
    assert 0.87 < hot < 0.93


def test_hot_ids_are_scattered() -> None:
    """The hundred hottest ids of a table lie in most of its hundred parts, not at its start."""
    dataset = SyntheticDataset(rows=[100_000], train_rows=200_000)
    ids = join(all_train(dataset, batch=100_000), 1)[1][0]
    hottest = np.argsort(np.bincount(ids, minlength=100_000))[::-1][:100]
    assert len(np.unique(hottest // 1000)) > 60


def test_uniform_and_extreme_skew() -> None:
    uniform = SyntheticDataset(rows=[1000], skew=0.0, train_rows=100_000)
    counts = np.bincount(join(all_train(uniform, batch=100_000), 1)[1][0], minlength=1000)
    assert 50 < counts.min() <= counts.max() < 160
    steep = SyntheticDataset(rows=[1000], skew=4.0, train_rows=100_000)
    counts = np.bincount(join(all_train(steep, batch=100_000), 1)[1][0], minlength=1000)
    assert counts.max() > 80_000


@pytest.mark.parametrize("skew", [0.0, 0.7, 1.0, 1.25, 3.0])
@pytest.mark.parametrize("size", [1, 2, 3, 10, 4095, 4096, 4097, 1_000_000, 48_937_457])
def test_ranges_cover_every_rank(size: int, skew: float) -> None:
    starts = _segment_starts(size, skew).astype(np.int64)
    assert starts[0] == 0
    assert starts[-1] == size
    assert (np.diff(starts) >= 0).all()


def test_rank_to_id_is_a_bijection() -> None:
    for size in range(1, 200):
        for word in (0, 2**63, 2**64 - 1):
            multiplier = _coprime_near(word, size)
            assert len({rank * multiplier % size for rank in range(size)}) == size


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_truth_can_be_known_and_is_balanced(seed: int) -> None:
    """Scoring with the planted logits gives the best AUC anyone can reach; a constant gives one half."""
    dataset = SyntheticDataset(rows=table_rows("kaggle"), seed=seed)
    batch = next(dataset.test_batches(batch=dataset.test_rows))
    logits = dataset._samples(0, dataset.test_rows, stream=1)[2]
    assert 0.82 < auc(batch.labels, logits) < 0.86
    assert auc(batch.labels, np.zeros(len(batch))) == 0.5
    assert 0.2 < batch.labels.mean() < 0.3
    assert abs(batch.dense.mean()) < 0.01
    assert abs(batch.dense.std() - 1.0) < 0.01


def test_generation_is_fast() -> None:
    """A batch is made inside the training worker, whose step takes 80 ms. The best of many, with room."""
    batches = SyntheticDataset(rows=table_rows("kaggle")).train_batches(batch=2048, worker=0, workers=1)
    times = []
    for _ in range(20):
        started = time.perf_counter()
        next(batches)
        times.append(time.perf_counter() - started)
    assert min(times) < 0.010


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rows": []}, "table sizes"),
        ({"rows": [10, 0]}, "table sizes"),
        ({"seed": -1}, "seed"),
        ({"skew": -0.1}, "skew"),
        ({"train_rows": 0}, "at least 1"),
    ],
)
def test_wrong_settings_are_named(changes: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        small(**changes)


def test_wrong_batches_are_named() -> None:
    with pytest.raises(UserError, match="larger than the training data, 1000 rows"):
        small().train_batches(batch=1001, worker=0, workers=1)
    with pytest.raises(ValueError, match="at least 1"):
        small().train_batches(batch=0, worker=0, workers=1)
    with pytest.raises(ValueError, match="worker 2 of 2"):
        small().train_batches(batch=10, worker=2, workers=2)
    with pytest.raises(ValueError, match="choose one of"):
        table_rows("netflix")
