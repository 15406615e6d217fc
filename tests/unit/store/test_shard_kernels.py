"""Goal: a shard holds exactly the rows the layout gives it, does what it is told to those, and nothing else: what is
particular to the kernels (every mode, threads, memory, the words of errors); the rest is in test_conformance.py.

Method: the C++ shard and its twin receive the same calls, in every mode, and are compared whole; wrong calls
are listed, and none may change a byte.
"""

from __future__ import annotations

import ast
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from kernel_modes import MODES, Mode, running

import regrow.core
from regrow import _kernels
from regrow.core import twins
from regrow.core.twins import OPTIMIZERS, Rule, ShardTwin, initial_rows

Tables = list[dict[str, Any]]
TABLES: Tables = [
    dict(rows=130, dim=16, k=2, r=1, rule=Rule(optimizer="rowwise_adagrad", learning_rate=0.1)),
    dict(rows=7, dim=5, k=1, r=0, rule=Rule(optimizer="adam", learning_rate=0.01, weight_decay=0.1)),
    dict(rows=61, dim=1, k=3, r=2, rule=Rule(optimizer="sgd", learning_rate=0.3)),
    dict(rows=300, dim=64, k=4, r=1, rule=Rule(optimizer="momentum", learning_rate=0.1)),
]


def both(servers: int, server: int, tables: Tables, groups: int = 1) -> tuple[_kernels.Shard, ShardTwin]:
    shard = _kernels.Shard(servers, server, groups)
    twin = ShardTwin(servers, server, groups)
    for index, table in enumerate(tables):
        settings = {key: value for key, value in table.items() if key != "rule"}
        settings |= dict(seed=11, init_bound=0.25, table=3 * index + 1)
        rule = table["rule"]
        numbers = {name: getattr(rule, name) for name in Rule.__slots__}
        assert shard.add_table(**settings, **numbers) == index
        assert twin.add_table(**settings, rule=rule) == index
    return shard, twin


def records_of(shard: _kernels.Shard, table: int) -> np.ndarray:
    records = np.empty((shard.slots(table), shard.record_floats(table)), np.float32)
    shard.read_records(table, 0, len(records), records)
    return records


def whole(shard: _kernels.Shard) -> list[bytes]:
    """Everything a shard holds."""
    parts = []
    for table in range(shard.table_count):
        parts += [records_of(shard, table).tobytes(), shard.touched(table).tobytes()]
    return parts


def whole_twin(twin: ShardTwin) -> list[bytes]:
    parts = []
    for table, records in enumerate(twin.records):
        parts += [records.tobytes(), twin.touched_words(table).tobytes()]
    return parts


def some_rows(shard: _kernels.Shard, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Distinct slots of every table; none of some."""
    slots = [
        rng.permutation(shard.slots(table))[: rng.integers(0, shard.slots(table) + 1)]
        for table in range(shard.table_count)
    ]
    counts = np.array([len(part) for part in slots], np.int32)
    return counts, np.concatenate(slots).astype(np.uint32)


@pytest.mark.parametrize("mode", MODES, ids=str)
@pytest.mark.parametrize(("servers", "server", "groups"), [(5, 0, 1), (5, 4, 1), (12, 7, 2)])
def test_shard_equals_twin(servers: int, server: int, groups: int, mode: Mode) -> None:
    rng = np.random.default_rng(server)
    dims = np.array([table["dim"] for table in TABLES])
    with running(mode):
        shard, twin = both(servers, server, TABLES, groups)
        assert whole(shard) == whole_twin(twin)
        for step in range(1, 7):
            counts, slots = some_rows(shard, rng)
            values = rng.standard_normal(int(counts @ dims)).astype(np.float32)
            if step == 3:
                shard.assign_untouched(counts, slots, values)
                twin.assign_untouched(counts, slots, values)
            else:
                shard.update(counts, slots, values, step)
                twin.update(counts, slots, values, step)
            assert whole(shard) == whole_twin(twin)
            counts, slots = some_rows(shard, rng)
            slots = np.concatenate([slots, slots[-counts[-1] :]]) if counts[-1] else slots
            counts[-1] *= 2  # rows may be read twice
            out = np.empty(int(counts @ dims), np.float32)
            shard.gather(counts, slots, out)
            assert out.tobytes() == twin.gather(counts, slots).tobytes()


def test_many_rows_in_every_mode() -> None:
    """Enough rows that threads share the call, and words of the bitmap."""
    table: Any = dict(rows=20_000, dim=16, optimizer="rowwise_adagrad", learning_rate=0.1, seed=1, init_bound=0.1)
    results = []
    for mode in MODES:
        with running(mode):
            shard = _kernels.Shard(1, 0)
            shard.add_table(**table, table=0)
            rng = np.random.default_rng(0)
            slots = rng.permutation(20_000)[:15_000].astype(np.uint32)
            counts = np.array([len(slots)], np.int32)
            grads = rng.standard_normal((len(slots), 16)).astype(np.float32)
            shard.update(counts, slots, grads, 1)
            out = np.empty_like(grads)
            shard.gather(counts, slots, out)
            touched = np.unpackbits(shard.touched(0).view(np.uint8), bitorder="little")
            assert (np.flatnonzero(touched) == np.sort(slots)).all()
            results.append((whole(shard), out.tobytes()))
    assert all(result == results[0] for result in results)


@pytest.mark.parametrize("dim", [64, 50, 7])
def test_outputs_larger_than_the_caches(dim: int) -> None:
    """They are written in another way, where dim and alignment allow; also one float off a cache line."""
    shard = _kernels.Shard(1, 0)
    shard.add_table(rows=3000, dim=dim, optimizer="sgd", learning_rate=0.1, seed=1, init_bound=0.1, table=0)
    records = records_of(shard, 0)[:, :dim]
    count = (9 << 20) // (4 * dim)
    slots = np.random.default_rng(0).integers(0, 3000, count, np.uint32)
    for mode in MODES:
        for offset in (0, 1):
            memory = np.zeros(offset + count * dim + 1, np.float32)
            out = memory[offset:-1].reshape(count, dim)
            with running(mode):
                shard.gather(np.array([count], np.int32), slots, out)
            assert (out == records[slots]).all()
            assert memory[-1] == 0


# ---- initial values


def test_initial_values_are_uniform_and_differ_everywhere() -> None:
    values = initial_rows(range(4000), dim=16, seed=1, table=0, bound=0.5)
    assert values.min() >= -0.5
    assert values.max() < 0.5
    histogram = np.histogram(values, bins=20, range=(-0.5, 0.5))[0]
    assert np.abs(histogram - values.size / 20).max() < 6 * (values.size / 20) ** 0.5
    assert len(np.unique(values)) > 0.99 * values.size
    columns = np.corrcoef(values.T) - np.eye(16)
    assert np.abs(columns).max() < 6 / 4000**0.5
    following = np.corrcoef(values[:-1].ravel(), values[1:].ravel())[0, 1]
    assert abs(following) < 6 / values.size**0.5
    for other in (dict(seed=2, table=0), dict(seed=1, table=1)):
        differing = initial_rows(range(4000), dim=16, bound=0.5, **other)
        assert (differing != values).mean() > 0.999


def test_initial_values_are_pinned() -> None:
    """They are part of what a run is: changing them changes every result. So they are written down."""
    values = initial_rows([0, 1, 2**32 - 2], dim=3, seed=2**64 - 1, table=9, bound=1.0)
    assert values.tolist() == PINNED
    shard = _kernels.Shard(1, 0)
    shard.add_table(rows=2, dim=3, optimizer="sgd", learning_rate=0.1, seed=2**64 - 1, init_bound=1.0, table=9)
    assert records_of(shard, 0)[:, :3].tolist() == PINNED[:2]


PINNED = [
    [0.680830717086792, 0.04135560989379883, -0.5485004186630249],
    [0.011157989501953125, -0.7481707334518433, -0.44726717472076416],
    [-0.9771195650100708, 0.8989375829696655, -0.40061187744140625],
]


def test_bound_zero_gives_zeros() -> None:
    shard = _kernels.Shard(1, 0)
    shard.add_table(rows=9, dim=3, optimizer="sgd", learning_rate=0.1, seed=1, init_bound=0.0, table=0)
    assert not records_of(shard, 0).any()


# ---- records


def test_a_large_table_is_copied_by_several_threads() -> None:
    shard = _kernels.Shard(1, 0)
    shard.add_table(rows=30_000, dim=24, optimizer="sgd", learning_rate=0.1, seed=1, init_bound=1.0, table=0)
    records = np.arange(30_000 * 24, dtype=np.float32)
    with running(MODES[-1]):
        shard.write_records(0, 0, 30_000, records)
        assert (records_of(shard, 0).ravel() == records).all()


# ---- what is refused


def call_with(**changes: Any) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    given: dict[str, Any] = dict(counts=[2, 0, 1, 1], slots=[0, 1, 2, 3], floats=2 * 16 + 1 + 64) | changes
    return (
        np.array(given["counts"], np.int32),
        np.array(given["slots"], np.uint32),
        np.ones(given["floats"], np.float32),
    )


WRONG_CALLS = [
    (dict(counts=[2, 0, 1]), ValueError, "counts has 3 entries; this shard has 4 tables"),
    (dict(counts=[3, 0, 1, 1]), ValueError, "counts add up to 5 rows; there are 4 slots"),
    (dict(counts=[2, -1, 2, 1]), ValueError, r"counts\[1\] must not be negative, not -1"),
    (dict(floats=96), ValueError, "these rows have 97 floats; the array has 96"),
    (
        dict(slots=[0, 26, 2, 3]),
        IndexError,
        "slot 26 of table 0 is out of range; this server has 26 slots of it",
    ),
    (dict(slots=[0, 1, 2, 2**32 - 1]), IndexError, "slot 4294967295 of table 3 is out of range"),
]


@pytest.mark.parametrize(("changes", "error", "message"), WRONG_CALLS)
@pytest.mark.parametrize("method", ["gather", "update", "assign_untouched"])
def test_a_wrong_call_changes_nothing(
    method: str, changes: dict[str, Any], error: type[Exception], message: str
) -> None:
    """The bad row is the last one: rows before it must not have been written either."""
    shard, _ = both(5, 0, TABLES)
    before = whole(shard)
    counts, slots, floats = call_with(**changes)
    with pytest.raises(error, match=message):
        getattr(shard, method)(counts, slots, floats, *([1] if method == "update" else []))
    assert whole(shard) == before
    assert (floats == 1).all()


def test_wrong_arrays_are_named() -> None:
    shard, _ = both(5, 0, TABLES)
    before = whole(shard)
    counts, slots, floats = call_with()
    unaligned = np.frombuffer(bytearray(4 * len(floats) + 1), np.uint8)[1:].view(np.float32)
    calls: list[tuple[type[Exception], str, Callable[[], Any]]] = [
        (
            ValueError,
            "counts must be an array of int32",
            lambda: shard.gather(counts.astype("i8"), slots, floats),
        ),
        (
            ValueError,
            "slots must be an array of uint32",
            lambda: shard.gather(counts, slots.astype("i4"), floats),
        ),
        (
            ValueError,
            "out must be an array of float32",
            lambda: shard.gather(counts, slots, floats.astype("f8")),
        ),
        (
            ValueError,
            "grads must be contiguous in C order",
            lambda: shard.update(counts, slots, np.ones(2 * len(floats), np.float32)[::2], 1),
        ),
        (ValueError, "weights must be aligned", lambda: shard.assign_untouched(counts, slots, unaligned)),
        (TypeError, "incompatible function arguments", lambda: shard.gather(counts, slots, [1.0])),
        (TypeError, "incompatible function arguments", lambda: shard.gather(counts, slots, floats.tobytes())),
    ]
    for error, message, call in calls:
        with pytest.raises(error, match=message):
            call()
    assert whole(shard) == before


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(rows=0), "rows must be between 1 and 4294967295, not 0"),
        (dict(rows=2**32), "rows must be between 1"),
        (dict(dim=0), "dim must be between 1 and 65536, not 0"),
        (dict(dim=2**16 + 1), "dim must be between 1"),
        (dict(k=5, r=1), "k . r = 6 members need as many servers in a ring; there are 5"),
        (dict(table=-1), "table must not be negative"),
        (dict(init_bound=-1.0), "init_bound must be a finite number"),
    ],
)
def test_wrong_tables_are_refused(changes: dict[str, Any], message: str) -> None:
    shard = _kernels.Shard(5, 0)
    given: dict[str, Any] = dict(
        rows=9, dim=3, k=1, r=0, optimizer="sgd", learning_rate=0.1, seed=1, init_bound=0.1, table=0
    )
    with pytest.raises(ValueError, match=message):
        shard.add_table(**(given | changes))
    assert shard.table_count == 0
    assert shard.memory_bytes == 0


def test_a_server_outside_the_cluster_is_refused() -> None:
    with pytest.raises(ValueError, match="server must be between 0 and 4, not 5"):
        _kernels.Shard(5, 5)


# ---- memory


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize(("rows", "dim", "k", "r"), [(1, 1, 1, 0), (10_000, 64, 2, 1), (70_001, 20, 3, 2)])
def test_memory_is_told_beforehand(rows: int, dim: int, k: int, r: int, optimizer: str) -> None:
    shard = _kernels.Shard(5, 1, 1, [(d, r) for d in range(1, k + 1)] if r else [])
    told = _kernels.shard_bytes(rows, dim, k, r, 1, 5, optimizer)
    shard.add_table(
        rows=rows, dim=dim, k=k, r=r, optimizer=optimizer, learning_rate=0.1, seed=1, init_bound=0.1, table=0
    )
    assert shard.memory_bytes == told
    records = shard.slots(0) * 4 * twins.record_floats(optimizer, dim)
    needed = records + shard.slots(0) / 8
    parity = (records * r / k + shard.slots(0) * (r + 1) / 8) if r else 0
    arenas = 2 if r else 1
    assert needed + parity <= told <= needed + parity + arenas * (2**21 + 2**12)
    assert parity <= shard.redundancy_bytes <= parity + 2**21 + 2**12


def test_too_much_memory_is_an_error_with_a_number() -> None:
    shard = _kernels.Shard(1, 0)
    told = _kernels.shard_bytes(2**32 - 1, 2**16, 1, 0, 1, 1, "adam")
    with pytest.raises(MemoryError, match=f"the system refused {told} bytes for the rows of a table"):
        shard.add_table(rows=2**32 - 1, dim=2**16, optimizer="adam", learning_rate=0.1, seed=1, init_bound=0.1, table=0)
    assert shard.table_count == 0


@pytest.mark.parametrize("thread", [False, True])
def test_tuned_malloc_reuses_large_buffers(thread: bool) -> None:
    """In a process of its own, as the setting cannot be taken back. Pages are counted, not time. Of threads that end,
    if asked to: of each of them a stack is new."""
    code = f"""
import resource, threading, regrow._kernels
regrow._kernels.tune_malloc(one_heap={thread})
faults = []
def work():
    return bytearray(48 << 20), bytearray(48 << 20)
for _ in range(3):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    if {thread}:
        worker = threading.Thread(target=work)
        worker.start()
        worker.join()
    else:
        work()
    faults.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
print(*faults)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    first, second, third = map(int, done.stdout.split())
    assert first > 100
    assert second + third < (40 if thread else 10)


# ---- threads and other libraries


@pytest.mark.parametrize("threads", [0, -1, 257])
def test_thread_counts_are_bounded(threads: int) -> None:
    before = _kernels.get_threads()
    with pytest.raises(ValueError, match=f"threads must be between 1 and 256, not {threads}"):
        _kernels.set_threads(threads)
    assert _kernels.get_threads() == before


def test_simd_levels_are_named() -> None:
    with pytest.raises(ValueError, match="unknown SIMD level 'sse9'; choose 'avx512', 'avx2' or 'portable'"):
        _kernels.set_simd("sse9")


def test_callers_in_several_threads_do_not_disturb_each_other() -> None:
    shard = _kernels.Shard(1, 0)
    shard.add_table(rows=9000, dim=16, optimizer="sgd", learning_rate=0.1, seed=1, init_bound=0.1, table=0)
    records = records_of(shard, 0)[:, :16]
    wrong = []

    def read(seed: int) -> None:
        rng = np.random.default_rng(seed)
        out = np.empty((4000, 16), np.float32)
        for _ in range(30):
            slots = rng.integers(0, 9000, 4000, np.uint32)
            shard.gather(np.array([4000], np.int32), slots, out)
            if not (out == records[slots]).all():
                wrong.append(seed)

    with running(MODES[-1]):
        threads = [threading.Thread(target=read, args=(seed,)) for seed in range(4)]
        for thread in threads:
            thread.start()
        _kernels.set_threads(2)  # while they run
        for thread in threads:
            thread.join()
    assert wrong == []


def test_torch_tensors_and_read_only_arrays_are_arrays() -> None:
    shard, twin = both(5, 0, TABLES)
    counts, slots, _ = call_with()
    counts.flags.writeable = False
    slots.flags.writeable = False
    out = torch.empty(97)
    shard.gather(counts, slots, out)
    assert out.numpy().tobytes() == twin.gather(counts, slots).tobytes()
    with pytest.raises(TypeError):
        shard.gather(counts, slots, np.frombuffer(bytes(4 * 97), np.float32))  # cannot be written


def test_the_stub_names_what_the_extension_has() -> None:
    tree = ast.parse(Path(regrow.core.__file__).parents[1].joinpath("_kernels.pyi").read_text())

    def public(names: Iterable[str]) -> set[str]:
        return {name for name in names if not name.startswith("_")}

    defined = [node for node in tree.body if isinstance(node, ast.FunctionDef | ast.ClassDef)]
    assert public(node.name for node in defined) == public(dir(_kernels))
    for node in defined:
        if isinstance(node, ast.ClassDef):
            members = {part.name for part in node.body if isinstance(part, ast.FunctionDef)}
            assert public(members) == public(dir(getattr(_kernels, node.name)))


# ---- merging pushes


def random_push(rng: np.random.Generator, dims: list[int], slots: int) -> tuple[Any, Any, Any]:
    counts = rng.integers(0, 2 * slots, len(dims)).astype(np.int32)
    chosen = rng.integers(0, slots, counts.sum()).astype(np.uint32)
    grads = rng.standard_normal(int(counts @ np.array(dims))).astype(np.float32)
    return counts, chosen, grads


@pytest.mark.parametrize("mode", MODES, ids=str)
def test_merge_equals_twin(mode: Mode) -> None:
    rng = np.random.default_rng(9)
    dims = [16, 3, 64, 1, 20]
    for parts in (0, 1, 2, 5):
        for slots in (1, 7, 300):
            pushes = [random_push(rng, dims, slots) for _ in range(parts)]
            with running(mode):
                merged = _kernels.sum_pushes(np.array(dims, np.int32), pushes)
            for got, expected in zip(merged, twins.sum_pushes(dims, pushes), strict=True):
                assert got.dtype == expected.dtype
                assert got.tobytes() == expected.tobytes()


@pytest.mark.parametrize(
    ("dims", "counts", "slots", "floats", "message"),
    [
        ([2, 0], [1, 1], 2, 2, "dims must be between 1 and 65536, not 0"),
        ([2], [1, 1], 2, 4, "part 1: counts has 2 entries; dims has 1"),
        ([2], [-1], 0, 0, r"part 1: counts\[0\] must not be negative, not -1"),
        ([2], [2], 1, 4, "part 1: counts add up to 2 rows and 4 floats; there are 1 slots and 4 floats"),
        ([2], [2], 2, 5, "part 1: counts add up to 2 rows and 4 floats; there are 2 slots and 5 floats"),
    ],
)
def test_wrong_merges_are_refused(dims: list[int], counts: list[int], slots: int, floats: int, message: str) -> None:
    good = np.zeros(len(dims), np.int32), np.zeros(0, np.uint32), np.zeros(0, np.float32)
    bad = np.array(counts, np.int32), np.zeros(slots, np.uint32), np.zeros(floats, np.float32)
    with pytest.raises(ValueError, match=message):
        _kernels.sum_pushes(np.array(dims, np.int32), [good, bad])


@pytest.mark.parametrize("mode", MODES, ids=str)
@pytest.mark.parametrize("slots_end", [10, 2**20, 2**32])  # with few slots, with a bit for each, with a hash table
def test_repeated_slots_are_seen(mode: Mode, slots_end: int) -> None:
    rng = np.random.default_rng(10)
    seen = set()
    for rows in (0, 1, 2, 7, 5000):
        for _ in range(20 if rows < 5000 else 4):
            counts = rng.multinomial(rows, [0.5, 0.2, 0.3]).astype(np.int32)
            parts = [np.unique(rng.integers(0, slots_end, count)) for count in counts]
            counts = np.array([part.size for part in parts], np.int32)
            slots = np.concatenate([rng.permutation(part) for part in parts]).astype(np.uint32)
            if slots.size > 1 and rng.integers(2):
                slots[rng.integers(slots.size)] = slots[rng.integers(slots.size)]
            expected = twins.has_repeated_slots(counts, slots)
            seen.add(expected)
            with running(mode):
                assert _kernels.has_repeated_slots(counts, slots) == expected
    assert seen == {False, True}


def test_counts_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ValueError, match="counts add up to 3 rows; there are 2 slots"):
        _kernels.has_repeated_slots(np.array([1, 2], np.int32), np.zeros(2, np.uint32))
    with pytest.raises(ValueError, match="must not be negative"):
        _kernels.has_repeated_slots(np.array([3, -1], np.int32), np.zeros(2, np.uint32))
