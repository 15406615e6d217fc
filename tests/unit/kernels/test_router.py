"""Goal: a plan names exactly the rows a batch needs, where they live, and pooling uses exactly those.

Method: random batches (shared tables, static tables, empty bags, repeated ids) in every mode, C++ against its
twin bit for bit; then what is refused, and what holds over many plans of one router.
"""

from __future__ import annotations

import gc
from typing import Any

import numpy as np
import pytest
from kernel_modes import MODES, Mode, running

from regrow import _kernels
from regrow.core.twins import PlanTwin, RouterTwin

ROUTERS: dict[str, dict[str, Any]] = {
    "one server": dict(
        rows=[50, 3],
        dims=[16, 4],
        k=[1, 1],
        r=[0, 0],
        table_index=[0, 1],
        mean_pooling=[False, True],
        feature_tables=[0, 1],
        static_tables=[],
        servers=1,
    ),
    "shared tables and dense parameters": dict(
        rows=[1000, 7, 40, 13],
        dims=[8, 3, 33, 2],
        k=[4, 1, 2, 1],
        r=[1, 2, 0, 1],
        table_index=[5, 0, 2, 9],
        mean_pooling=[False, False, True, True],
        feature_tables=[2, 0, 2, 0, 3],
        static_tables=[1],
        servers=6,
    ),
    "groups": dict(
        rows=[500, 500],
        dims=[64, 32],
        k=[2, 3],
        r=[1, 1],
        table_index=[0, 1],
        mean_pooling=[False, True],
        feature_tables=[1, 0],
        static_tables=[],
        servers=12,
        rings=3,
    ),
    "dense parameters only": dict(
        rows=[9, 4],
        dims=[5, 128],
        k=[1, 1],
        r=[1, 0],
        table_index=[0, 1],
        mean_pooling=[False, False],
        feature_tables=[],
        static_tables=[1, 0],
        servers=4,
    ),
}


def random_batch(
    rng: np.random.Generator, settings: dict[str, Any], batch: int, *, bags: bool, skew: bool
) -> tuple[np.ndarray, np.ndarray | None]:
    features = len(settings["feature_tables"])
    lengths = rng.integers(0, 4, features * batch).astype(np.int32) if bags else None
    sizes = lengths if lengths is not None else np.ones(features * batch, np.int32)
    values = []
    for f, table in enumerate(settings["feature_tables"]):
        rows = settings["rows"][table]
        size = int(sizes[f * batch : (f + 1) * batch].sum())
        ids = rng.integers(0, rows, size)
        values.append(np.minimum(ids, rng.integers(0, rows, size)) // (5 if skew else 1))
    return np.concatenate([np.zeros(0, np.int64), *values]), lengths


def assert_same_plan(plan: _kernels.Plan, twin: PlanTwin) -> None:
    for name in ("counts", "slots", "row_start", "float_start"):
        got, expected = getattr(plan, name), getattr(twin, name)
        assert got.dtype == expected.dtype, name
        assert got.shape == expected.shape, name
        assert (got == expected).all(), name
    assert (plan.lookups, plan.distinct, plan.floats) == (twin.lookups, twin.distinct, twin.floats)


def assert_same_pooling(plan: _kernels.Plan, twin: PlanTwin, rng: np.random.Generator, batch: int) -> None:
    width = sum(twin.router.dims[table] for table in twin.router.feature_tables)
    rows = rng.standard_normal(plan.floats).astype(np.float32)
    if width:
        out = np.full((batch, width), np.nan, np.float32)
        plan.pool(rows, out)
        assert out.tobytes() == twin.pool(rows).tobytes()
    grad = rng.standard_normal((batch, width)).astype(np.float32)
    grads, expected = np.full((2, plan.floats), 7, np.float32)
    plan.unpool(grad, grads)
    twin.unpool(grad, expected)
    assert grads.tobytes() == expected.tobytes()
    for table in twin.router.static_tables:
        size = twin.router.rows[table] * twin.router.dims[table]
        copy = np.empty(size, np.float32)
        plan.static_get(table, rows, copy)
        assert copy.tobytes() == twin.static_get(table, rows).tobytes()
        source = rng.standard_normal(size).astype(np.float32)
        plan.static_put(table, source, grads)
        twin.static_put(table, source, expected)
        assert grads.tobytes() == expected.tobytes()


@pytest.mark.parametrize("mode", MODES, ids=str)
@pytest.mark.parametrize("name", ROUTERS)
def test_plan_equals_twin(name: str, mode: Mode) -> None:
    settings = ROUTERS[name]
    router, twin = _kernels.Router(**settings), RouterTwin(**settings)
    rng = np.random.default_rng(2)
    with running(mode):
        for batch in (0, 1, 2, 30, 70, 5):  # a router's scratch must not remember larger batches
            for bags in (False, True):
                for skew in (False, True):
                    values, lengths = random_batch(rng, settings, batch, bags=bags, skew=skew)
                    plan = router.plan(values, lengths, batch)
                    expected = twin.plan(values, lengths, batch)
                    assert_same_plan(plan, expected)
                    assert_same_pooling(plan, expected, rng, batch)


def test_a_large_batch_in_every_mode() -> None:
    """Enough lookups for every thread, and few tables: threads share one table's gradients."""
    settings = ROUTERS["groups"] | dict(rows=[100_000, 500])
    rng = np.random.default_rng(3)
    values, lengths = random_batch(rng, settings, 6000, bags=True, skew=False)
    rows = grad = None
    results = []
    for mode in MODES:
        with running(mode):
            plan = _kernels.Router(**settings).plan(values, lengths, 6000)
            rows = rng.standard_normal(plan.floats).astype(np.float32) if rows is None else rows
            grad = rng.standard_normal((6000, 96)).astype(np.float32) if grad is None else grad
            out, grads = np.empty_like(grad), np.empty_like(rows)
            plan.pool(rows, out)
            plan.unpool(grad, grads)
            parts = (plan.counts, plan.slots, plan.row_start, plan.float_start, out, grads)
            results.append([part.tobytes() for part in parts])
    assert all(result == results[0] for result in results)


def test_a_plan_written_out() -> None:
    """Two servers, ids 4 1 4 of one table: row 4 is on server 0 (slot 2), row 1 on server 1 (slot 0)."""
    router = _kernels.Router(
        rows=[6],
        dims=[2],
        k=[1],
        r=[0],
        table_index=[0],
        mean_pooling=[False],
        feature_tables=[0],
        static_tables=[],
        servers=2,
    )
    plan = router.plan(np.array([4, 1, 4]), np.array([2, 0, 1], np.int32), 3)
    assert plan.counts.tolist() == [[1], [1]]
    assert plan.slots.tolist() == [2, 0]
    assert plan.row_start.tolist() == [0, 1, 2]
    assert plan.float_start.tolist() == [0, 2, 4]
    out = np.empty((3, 2), np.float32)
    plan.pool(np.array([10, 20, 3, 4], np.float32), out)
    assert out.tolist() == [[13, 24], [0, 0], [10, 20]]
    grads = np.full(4, 99, np.float32)
    plan.unpool(np.array([[1, 2], [50, 60], [3, 4]], np.float32), grads)
    assert grads.tolist() == [4, 6, 1, 2]
    assert repr(plan) == "Plan(3 lookups, 2 distinct rows, 2 servers, 4 floats)"


def test_ids_that_collide_are_told_apart() -> None:
    """Multiples of a power of two meet in any table of that size; all of them in a row are the worst case."""
    settings = ROUTERS["one server"] | dict(rows=[2**32 - 1, 3])
    router = _kernels.Router(**settings)
    for stride in (2**10, 2**16, 2**22):
        ids = np.arange(0, 900 * stride, stride)
        values = np.concatenate([ids, ids[::-1], np.zeros(1800, np.int64)])
        plan = router.plan(values, None, 1800)
        assert plan.distinct == 901
        assert plan.slots[:900].tolist() == ids.tolist()


def test_many_plans_of_one_router_are_independent() -> None:
    settings = ROUTERS["shared tables and dense parameters"]
    router, twin = _kernels.Router(**settings), RouterTwin(**settings)
    rng = np.random.default_rng(8)
    made = []
    for _ in range(40):
        values, lengths = random_batch(rng, settings, 9, bags=True, skew=True)
        made.append((router.plan(values, lengths, 9), twin.plan(values, lengths, 9)))
    del router
    gc.collect()
    for plan, expected in made:
        assert_same_plan(plan, expected)
        assert_same_pooling(plan, expected, rng, 9)


def test_views_are_read_only_and_outlive_the_plan() -> None:
    settings = ROUTERS["one server"]
    slots = _kernels.Router(**settings).plan(np.array([7, 9, 7, 0, 1, 2]), None, 3).slots
    gc.collect()
    assert slots.tolist() == [7, 9, 0, 1, 2]
    with pytest.raises(ValueError):
        slots[0] = 1


# ---- what is refused

WRONG_BATCHES: list[tuple[dict[str, Any], type[Exception], str]] = [
    (
        dict(values=[0, 50, 0, 3]),
        IndexError,
        "feature 0, position 1: id 50 is out of range; its table has 50 rows",
    ),
    (
        dict(values=[0, 1, -1, 9]),
        IndexError,
        "feature 1, position 0: id -1 is out of range; its table has 3 rows",
    ),
    (dict(values=[2**32, 1, 1, 1]), IndexError, "feature 0, position 0: id 4294967296 is out of range"),
    (
        dict(values=[1, 2, 3], lengths=[0, 1, 0, 2]),
        IndexError,
        "feature 1, position 1: id 3 is out of range",
    ),
    (
        dict(values=[1, 2, 1]),
        ValueError,
        "without lengths every bag has one id: 2 features of 2 samples need 4 values, not 3",
    ),
    (dict(lengths=[1, 1, 1]), ValueError, r"lengths must have 4 entries \(2 features of 2 samples\), not 3"),
    (dict(lengths=[3, -1, 1, 1]), ValueError, r"lengths\[1\] must not be negative, not -1"),
    (dict(lengths=[1, 1, 1, 0]), ValueError, "lengths add up to 3; there are 4 values"),
    (dict(lengths=[1, 1, 1, 2]), ValueError, "lengths add up to more than 4; there are 4 values"),
    (dict(batch=-1), ValueError, "batch must be between 0 and 268435456, not -1"),
    (
        dict(values=[], batch=2**62),
        ValueError,
        "batch must be between 0 and 268435456, not 4611686018427387904",
    ),
]


@pytest.mark.parametrize("mode", MODES, ids=str)
@pytest.mark.parametrize(("changes", "error", "message"), WRONG_BATCHES)
def test_wrong_batches_are_refused(changes: dict[str, Any], error: type[Exception], message: str, mode: Mode) -> None:
    router = _kernels.Router(**ROUTERS["one server"])
    given = dict(values=[0, 49, 0, 2], lengths=None, batch=2) | changes
    lengths = None if given["lengths"] is None else np.array(given["lengths"], np.int32)
    with running(mode):
        with pytest.raises(error, match=message):
            router.plan(np.array(given["values"], np.int64), lengths, given["batch"])
        assert router.plan(np.array([0, 49, 0, 2]), None, 2).distinct == 4  # and the router goes on


def test_the_first_wrong_id_is_named() -> None:
    """Tables are looked at in any order, by several threads; the message names the first id all the same."""
    router = _kernels.Router(**(ROUTERS["groups"]))
    for mode in MODES:
        with running(mode), pytest.raises(IndexError, match="feature 0, position 2: id 777 "):
            router.plan(np.array([1, 2, 777, 888, 999, 3]), None, 3)


def test_wrong_arrays_are_refused() -> None:
    router = _kernels.Router(**ROUTERS["one server"])
    with pytest.raises(ValueError, match="values must be an array of int64"):
        router.plan(np.zeros(4, np.int32), None, 2)
    with pytest.raises(ValueError, match="lengths must be an array of int32"):
        router.plan(np.zeros(4, np.int64), np.ones(4, np.int64), 2)
    plan = router.plan(np.zeros(4, np.int64), None, 2)
    rows, out = np.zeros(20, np.float32), np.zeros((2, 20), np.float32)
    plan.pool(rows, out)
    with pytest.raises(ValueError, match=r"out must have the shape \(2, 20\)"):
        plan.pool(rows, out.T.copy())
    with pytest.raises(ValueError, match=r"grad must have the shape \(2, 20\)"):
        plan.unpool(out.ravel(), rows)
    with pytest.raises(ValueError, match="rows must have 20 floats, not 19"):
        plan.pool(rows[:19], out)
    with pytest.raises(ValueError, match="grads must have 20 floats, not 19"):
        plan.unpool(out, rows[:19])
    with pytest.raises(ValueError, match="table 0 is not static"):
        plan.static_get(0, rows, rows)
    with pytest.raises(IndexError, match="there is no table 2; this plan has 2"):
        plan.static_put(2, rows, rows)
    static = _kernels.Router(**ROUTERS["dense parameters only"]).plan(np.zeros(0, np.int64), None, 0)
    with pytest.raises(ValueError, match="the table must have 45 floats, not 44"):
        static.static_get(0, np.zeros(static.floats, np.float32), np.zeros(44, np.float32))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(dims=[4]), "dims has 1 entries; rows has 2"),
        (dict(mean_pooling=[]), "mean_pooling has 0 entries; rows has 2"),
        (dict(rows=[0, 1]), r"rows\[0\] must be between 1 and 4294967295, not 0"),
        (dict(dims=[4, 2**17]), r"dims\[1\] must be between 1 and 65536, not 131072"),
        (dict(feature_tables=[0, 2]), r"feature_tables\[1\] = 2 names no table"),
        (dict(static_tables=[2]), "static_tables names table 2, which does not exist"),
        (dict(static_tables=[1]), "table 1 is static, so feature 1 cannot look up in it"),
        (dict(feature_tables=[0], static_tables=[1, 1]), "static_tables names table 1 twice"),
        (dict(k=[2, 1]), "k . r = 2 members need as many servers in a ring; there are 1"),
    ],
)
def test_wrong_routers_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        _kernels.Router(**(ROUTERS["one server"] | changes))


def test_a_batch_too_large_to_address_is_refused() -> None:
    """Offsets are 31 bits: a plan that needs more says so, and takes no memory for the rows."""
    settings = ROUTERS["one server"] | dict(rows=[40_000, 3], dims=[2**16, 4])
    values = np.concatenate([np.arange(40_000), np.zeros(40_000, np.int64)])
    with pytest.raises(ValueError, match="the rows of this batch have 2621440004 floats; at most 2147483647"):
        _kernels.Router(**settings).plan(values, None, 40_000)


def test_rows_one_by_one() -> None:
    """Table 0 is pooled, 1 and 2 are wanted row by row; features 0 and 3 share table 1. With one server a slot is a
    row, so what must come can be written down."""
    rng = np.random.default_rng(1)
    rows, dims, owners = [30, 9, 40], [4, 3, 5], [1, 0, 2, 1]
    router = _kernels.Router(
        rows=rows,
        dims=dims,
        k=[1] * 3,
        r=[0] * 3,
        table_index=[0, 1, 2],
        mean_pooling=[False] * 3,
        expanded=[False, True, True],
        feature_tables=owners,
        static_tables=[],
        servers=1,
    )
    lengths = rng.integers(0, 4, 4 * 6).astype(np.int32)
    counts = lengths.reshape(4, 6).sum(1)
    ids = [rng.integers(0, rows[owner], count) for owner, count in zip(owners, counts, strict=True)]
    plan = router.plan(np.concatenate(ids), lengths, 6)
    tables = [rng.random((r, d), np.float32) for r, d in zip(rows, dims, strict=True)]
    ends = np.cumsum(plan.counts[0])
    needed = [plan.slots[end - count : end] for end, count in zip(ends, plan.counts[0], strict=True)]
    pulled = np.concatenate([tables[t][needed[t]].reshape(-1) for t in range(3)])
    pooled = np.empty((6, 4), np.float32)
    plan.pool(pulled, pooled)
    bags = np.split(ids[1], np.cumsum(lengths.reshape(4, 6)[1])[:-1])
    assert np.allclose(pooled, [tables[0][bag].sum(0) for bag in bags])
    grads = np.full(plan.floats, np.nan, np.float32)
    plan.unpool(np.ones((6, 4), np.float32), grads)
    wanted = [np.zeros_like(table) for table in tables]
    np.add.at(wanted[0], ids[1], 1.0)
    for feature in (0, 2, 3):
        table = tables[owners[feature]]
        vectors = np.empty((len(ids[feature]), table.shape[1]), np.float32)
        assert plan.expanded_floats(feature) == vectors.size
        plan.expand(feature, pulled, vectors)
        assert (vectors == table[ids[feature]]).all()
        grad = rng.random(vectors.shape, np.float32)
        plan.collapse(feature, grad, grads)
        np.add.at(wanted[owners[feature]], ids[feature], grad)
    assert np.allclose(grads, np.concatenate([wanted[t][needed[t]].reshape(-1) for t in range(3)]))
    with pytest.raises(ValueError, match="feature 1 is pooled"):
        plan.expand(1, pulled, np.empty(1, np.float32))
    with pytest.raises(ValueError, match="feature 4 does not exist"):
        plan.expanded_floats(4)
    with pytest.raises(ValueError, match="out must have"):
        plan.expand(0, pulled, np.empty(1, np.float32))
