"""Goal: rows that are read and updated straight from and to the vectors of bags are those of the long way.

Method: random batches (repeated ids, shared tables, empty bags, sums and means, gradients of -0) for every optimizer
and width in every mode, against the twins of gather and pool, unpool and update, bit for bit; then what is refused.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from kernel_modes import MODES, Mode, running

from regrow import _kernels
from regrow.core.twins import OPTIMIZERS, RouterTwin, Rule, ShardTwin

ROWS = [40, 9, 500]
FEATURE_TABLES = [2, 0, 1, 2]
DIMS = [1, 3, 8, 17, 32, 64, 100, 128]
BATCH = 50


def router_settings(dim: int, **changes: Any) -> dict[str, Any]:
    settings: dict[str, Any] = dict(
        rows=ROWS,
        dims=[dim, 5, 16],
        k=[1, 1, 1],
        r=[0, 0, 0],
        table_index=[0, 1, 2],
        mean_pooling=[False, True, False],
        feature_tables=FEATURE_TABLES,
        static_tables=[],
        servers=1,
    )
    return settings | changes


def make_shards(dim: int, rule: Rule) -> tuple[_kernels.Shard, ShardTwin]:
    shard, twin = _kernels.Shard(1, 0), ShardTwin(1, 0)
    for table, (rows, width) in enumerate(zip(ROWS, [dim, 5, 16], strict=True)):
        twin.add_table(rows=rows, dim=width, k=1, r=0, rule=rule, seed=3, init_bound=0.5, table=table)
        shard.add_table(
            rows=rows,
            dim=width,
            optimizer=rule.optimizer,
            learning_rate=rule.learning_rate,
            eps=rule.eps,
            weight_decay=rule.weight_decay,
            seed=3,
            init_bound=0.5,
            table=table,
        )
    return shard, twin


def draw_batch(rng: np.random.Generator, *, bags: bool) -> tuple[np.ndarray, np.ndarray | None]:
    lengths = rng.integers(0, 4, len(FEATURE_TABLES) * BATCH).astype(np.int32) if bags else None
    sizes = np.ones(len(FEATURE_TABLES) * BATCH, np.int32) if lengths is None else lengths
    sizes = sizes.reshape(-1, BATCH).sum(axis=1)
    values = [rng.integers(0, ROWS[table], size) for table, size in zip(FEATURE_TABLES, sizes, strict=True)]
    return np.concatenate(values), lengths


def assert_same_records(shard: _kernels.Shard, twin: ShardTwin) -> None:
    for table, expected in enumerate(twin.records):
        records = np.empty_like(expected)
        shard.read_records(table, 0, len(records), records)
        assert records.tobytes() == expected.tobytes(), f"table {table}"
        assert (shard.touched(table) == twin.touched_words(table)).all()


@pytest.mark.parametrize("mode", MODES, ids=str)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_straight_is_the_long_way(optimizer: str, mode: Mode) -> None:
    rng = np.random.default_rng(4)
    for dim in DIMS:
        rule = Rule(optimizer=optimizer, learning_rate=0.07, eps=1e-5, weight_decay=0.03 if dim % 2 else 0.0)
        shard, twin = make_shards(dim, rule)
        router, router_twin = _kernels.Router(**router_settings(dim)), RouterTwin(**router_settings(dim))
        for step, bags in enumerate((False, True), start=1):
            values, lengths = draw_batch(rng, bags=bags)
            expected = router_twin.plan(values, lengths, BATCH)
            grad = rng.standard_normal((BATCH, dim + 5 + 32)).astype(np.float32)
            grad[rng.random(grad.shape) < 0.2] = -0.0
            pooled = np.full(grad.shape, np.nan, np.float32)
            with running(mode):
                plan = router.plan(values, lengths, BATCH)
                shard.gather_pooled(plan, pooled)
                shard.update_pooled(plan, grad, step)
            assert pooled.tobytes() == expected.pool(twin.gather(expected.counts[0], expected.slots)).tobytes()
            grads = np.empty(expected.floats, np.float32)
            expected.unpool(grad, grads)
            twin.update(expected.counts[0], expected.slots, grads, step)
            assert_same_records(shard, twin)


def test_large_batches_in_every_mode() -> None:
    """So large that vectors are written past the caches, at every place that a row may have in a line."""
    rows, dim, batch = [3000, 3000], 64, 40_000
    rng = np.random.default_rng(6)
    values = rng.integers(0, 3000, 2 * batch)
    grad = rng.standard_normal((batch, 2 * dim), np.float32)
    settings = router_settings(dim, rows=rows, dims=[dim, dim], k=[1, 1], r=[0, 0], table_index=[0, 1])
    settings |= dict(mean_pooling=[False, False], feature_tables=[0, 1])
    memory = np.empty(grad.size + 32, np.float32)
    results = []
    for past, mode in enumerate([*MODES, *MODES]):
        shard = _kernels.Shard(1, 0)
        for table, count in enumerate(rows):
            shard.add_table(
                rows=count, dim=dim, optimizer="adagrad", learning_rate=0.1, seed=1, init_bound=0.5, table=table
            )
        pooled = memory[4 * past % 20 :][: grad.size].reshape(grad.shape)
        with running(mode):
            plan = _kernels.Router(**settings).plan(values, None, batch)
            shard.update_pooled(plan, grad, 1)
            shard.gather_pooled(plan, pooled)
            gathered = np.empty(plan.floats, np.float32)
            shard.gather(plan.counts[0], plan.slots, gathered)
            expected = np.empty_like(grad)
            plan.pool(gathered, expected)
        assert pooled.tobytes() == expected.tobytes()
        results.append(pooled.tobytes())
    assert all(result == results[0] for result in results)


def test_what_is_refused() -> None:
    shard, _ = make_shards(8, Rule(optimizer="sgd", learning_rate=0.1))
    values, _ = draw_batch(np.random.default_rng(1), bags=False)

    def read(values: np.ndarray = values, columns: int = 8 + 5 + 32, **changes: Any) -> None:
        plan = _kernels.Router(**router_settings(8, **changes)).plan(values, None, BATCH)
        shard.gather_pooled(plan, np.empty((BATCH, columns), np.float32))

    read()
    with pytest.raises(ValueError, match="only where there is one server, not 2"):
        read(servers=2)
    with pytest.raises(ValueError, match="the matrix must have 2250 floats, not 2200"):
        read(columns=44)
    with pytest.raises(ValueError, match="the plan's rows of table 0 have 16 floats, those here 8"):
        read(dims=[16, 5, 8], columns=16 + 5 + 16)
    with pytest.raises(ValueError, match="table 1 is not pooled"):
        read(expanded=[False, True, False], columns=8 + 32)
    with pytest.raises(ValueError, match="step must be at least 1, not 0"):
        adam, _ = make_shards(8, Rule(optimizer="adam", learning_rate=0.1))
        plan = _kernels.Router(**router_settings(8)).plan(values, None, BATCH)
        adam.update_pooled(plan, np.zeros((BATCH, 45), np.float32), 0)
