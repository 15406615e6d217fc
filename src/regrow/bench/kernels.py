"""How fast rows are read and updated, against FBGEMM's CPU kernels and against the memory itself.

Three operations on a batch of 26 x 2048 lookups, in tables far larger than the cache:

    gather   rows to an output matrix                    FBGEMM: forward
    update   group equal ids, sum, row-wise Adagrad      FBGEMM: backward; ours: plan + unpool + update
    both     one after the other                         ours: plan + gather + pool + unpool + update

and what it costs a server to count updates for a priority (`note`), beside the update of the same rows alone.

Both sides start every repetition with a cold cache and ids never used before, take turns, and are checked
first to compute the same numbers. FBGEMM runs in the fastest of its layouts (see `peer`), chosen per
operation in the same run. The sketch: a batch takes at least the bytes it must move divided by the bandwidth
of a plain copy.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from regrow import _kernels
from regrow.bench import common, peer
from regrow.data.synthetic import SyntheticDataset

SUMMARY = "Row kernels (gather, update, both) against FBGEMM and against memory bandwidth."

TARGET = 1.1
FEATURES = 26
BATCH = 2048
DIMS = (16, 64, 128)
OPERATIONS = ("gather", "update", "both")
LEARNING_RATE = 0.02
EPS = 1e-8
TOLERANCE = 1e-5
CHECK_BATCHES = 3
TRIALS = 3
PRIORITIES = ("mfu", "ssu")
PRIORITY_SHARE = 0.125
SSU_PERIOD = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """How much is measured."""

    table_bytes: int  # of weights, all tables together
    repetitions: int
    skewed: bool


FULL = Size(table_bytes=1 << 30, repetitions=40, skewed=True)
QUICK = Size(table_bytes=256 << 20, repetitions=9, skewed=False)


def run(*, quick: bool, json_path: str | None, dims: Sequence[int] = DIMS) -> int:
    size = QUICK if quick else FULL
    report = common.Report.start("kernels")
    common.keep_memory()
    missing = peer.missing_reason()
    if missing:
        common.console.print(f"[yellow]{missing}[/]\nMeasuring against memory bandwidth alone.")
    threads = [count for count in (1, 2) if count <= report.facts["cores"]]
    roofs = {count: common.bandwidth(threads=count, size_bytes=size.table_bytes) for count in threads}
    report.rows += [roof.to_dict() for roof in roofs.values()]
    for roof in roofs.values():
        common.console.print(
            f"memory, {roof.threads} thread(s): copy {roof.copy / 1e9:.1f} GB/s, "
            f"random 256-byte rows (numpy) {roof.random_rows / 1e9:.1f} GB/s"
        )
    threads_before, torch_threads_before = _kernels.get_threads(), torch.get_num_threads()
    try:
        for dim in dims:
            measure_dim(report, dim=dim, size=size, roofs=roofs, with_peer=missing is None)
            measure_counting(report, dim=dim, size=size, threads=threads)
    finally:
        _kernels.set_threads(threads_before)
        torch.set_num_threads(torch_threads_before)
    _print_rows(report)
    return report.finish(json_path)


# -- the two sides -------------------------------------------------------------------------------------------


class Ours:
    """One server's shard and a worker's router, in one process."""

    def __init__(self, rows: list[int], dim: int) -> None:
        self.rows, self.dim = rows, dim
        self.shard = _kernels.Shard(1, 0)
        for table, count in enumerate(rows):
            self.shard.add_table(
                rows=count,
                dim=dim,
                optimizer="rowwise_adagrad",
                learning_rate=LEARNING_RATE,
                eps=EPS,
                seed=1,
                init_bound=(1.0 / count) ** 0.5,
                table=table,
            )
        tables = range(len(rows))
        self.router = _kernels.Router(
            rows=rows,
            dims=[dim] * len(rows),
            k=[1] * len(rows),
            r=[0] * len(rows),
            table_index=list(tables),
            mean_pooling=[False] * len(rows),
            feature_tables=list(tables),
            static_tables=[],
            servers=1,
        )
        self.counts = np.full(len(rows), BATCH, np.int32)
        self.pooled = np.empty((BATCH, len(rows) * dim), np.float32)
        self._rows = np.empty(self.pooled.size, np.float32)
        self._grads = np.empty(self.pooled.size, np.float32)
        self._step = 0

    def gather(self, slots: NDArray[np.uint32]) -> None:
        """With one server and k = 1, a row's slot is its id."""
        self.shard.gather(self.counts, slots, self._rows)

    def update(self, values: NDArray[np.int64], gradient: NDArray[np.float32]) -> None:
        self._update(self.router.plan(values, None, BATCH), gradient)

    def both(self, values: NDArray[np.int64], gradient: NDArray[np.float32]) -> None:
        plan = self.router.plan(values, None, BATCH)
        rows = self._rows[: plan.floats]
        self.shard.gather(plan.counts[0], plan.slots, rows)
        plan.pool(rows, self.pooled)
        self._update(plan, gradient)

    def _update(self, plan: _kernels.Plan, gradient: NDArray[np.float32]) -> None:
        grads = self._grads[: plan.floats]
        plan.unpool(gradient, grads)
        self._step += 1
        self.shard.update(plan.counts[0], plan.slots, grads, self._step)

    def matrix(self, values: NDArray[np.int64]) -> NDArray[np.float32]:
        """The rows of a batch as FBGEMM arranges them: [batch, features * dim]."""
        self.gather(values.astype(np.uint32))
        shape = len(self.rows), BATCH, self.dim
        return self._rows.reshape(shape).transpose(1, 0, 2).reshape(BATCH, -1)

    def weights(self, table: int) -> NDArray[np.float32]:
        record = self.shard.record_floats(table)
        records = np.empty((self.rows[table], record), np.float32)
        self.shard.read_records(table, 0, self.rows[table], records.reshape(-1))
        return records[:, : self.dim]


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """Batches of ids, never used twice, and a gradient."""

    batches: list[NDArray[np.int64]]
    gradient: torch.Tensor

    @classmethod
    def make(cls, rows: list[int], dim: int, *, count: int, skewed: bool) -> Work:
        rng = np.random.default_rng(dim)
        if skewed:
            dataset = SyntheticDataset(rows=rows, seed=7, train_rows=count * BATCH)
            made = dataset.train_batches(batch=BATCH, worker=0, workers=1)
            batches = [batch.values for batch in made]
        else:
            batches = [
                np.concatenate([rng.integers(0, rows_of_table, BATCH) for rows_of_table in rows]) for _ in range(count)
            ]
        gradient = torch.from_numpy(rng.standard_normal((BATCH, len(rows) * dim), np.float32))
        return cls(batches=batches, gradient=gradient)


class Flush:
    """Empties the caches, so that nobody profits from what ran before."""

    def __init__(self) -> None:
        floats = 4 * (common.cache_l3_bytes() or 32 << 20) // 4
        self._memory = np.zeros(floats, np.float32)

    def __call__(self) -> None:
        self._memory += 1.0


# -- measuring -----------------------------------------------------------------------------------------------


def measure_dim(
    report: common.Report,
    *,
    dim: int,
    size: Size,
    roofs: dict[int, common.Bandwidth],
    with_peer: bool,
) -> None:
    rows = [size.table_bytes // (dim * 4) // FEATURES] * FEATURES
    ours = Ours(rows, dim)
    layouts = [name for name in peer.LAYOUTS if max(roofs) > 1 or not name.endswith("-threads")]
    peers = {layout: _peer_tables(ours, layout, max(roofs)) for layout in layouts if with_peer}
    if peers:
        check_equal(ours, peers, rows, dim)
        common.console.print(f"dim {dim}: all of {', '.join(peers)} agree with ours within {TOLERANCE:g}")
    flush = Flush()
    try:
        for ids in ("uniform", "skewed") if size.skewed else ("uniform",):
            count = (size.repetitions + TRIALS * len(peers)) * len(OPERATIONS) * len(roofs)
            work = Work.make(rows, dim, count=count, skewed=ids == "skewed")
            fresh = iter(work.batches)
            for threads, roof in roofs.items():
                for operation in OPERATIONS:
                    figures = _measure(ours, peers, work, operation, threads, fresh, flush, size.repetitions)
                    distinct = float(np.mean([_distinct(batch, len(rows)) for batch in work.batches[:4]]))
                    _record(report, figures, operation, dim, threads, ids, distinct, roof)
    finally:
        for tables in peers.values():
            tables.close()


def measure_counting(report: common.Report, *, dim: int, size: Size, threads: Sequence[int]) -> None:
    """The update of a push's rows, then the note of them, as a server does it."""
    rows = [size.table_bytes // (dim * 4) // FEATURES] * FEATURES
    flush = Flush()
    for kind in PRIORITIES:
        ours = Ours(rows, dim)
        tenant = ours.shard.add_tenant()
        ours.shard.set_priority(tenant, kind, range(len(rows)), PRIORITY_SHARE, 1, SSU_PERIOD)
        for ids in ("uniform", "skewed") if size.skewed else ("uniform",):
            count = size.repetitions * len(threads)
            batches = iter(Work.make(rows, dim, count=count, skewed=ids == "skewed").batches)
            for count in threads:
                _kernels.set_threads(count)
                plans = [ours.router.plan(next(batches), None, BATCH) for _ in range(size.repetitions)]
                seconds = [_time_note(ours, plan, flush) for plan in plans]
                _record_counting(report, seconds, plans, kind, dim, count, ids)


def _time_note(ours: Ours, plan: _kernels.Plan, flush: Flush) -> tuple[float, float]:
    """Seconds of the update and of the note."""
    grads = np.ones(plan.floats, np.float32)
    flush()
    update = common.seconds_of(lambda: ours.shard.update(plan.counts[0], plan.slots, grads, 1))
    return update, common.seconds_of(lambda: ours.shard.note_updates(plan.counts[0], plan.slots))


def _record_counting(
    report: common.Report,
    seconds: list[tuple[float, float]],
    plans: list[_kernels.Plan],
    kind: str,
    dim: int,
    threads: int,
    ids: str,
) -> None:
    # Every second note of ssu takes longer: what a server pays is that of two in a row.
    pairs = len(seconds) // SSU_PERIOD * SSU_PERIOD
    updates, notes = np.array(seconds[:pairs]).reshape(-1, SSU_PERIOD, 2).sum(1).T
    rows = np.array([plan.slots.size for plan in plans[:pairs]]).reshape(-1, SSU_PERIOD).sum(1)
    report.rows.append(
        {
            "kind": "counting",
            "priority": kind,
            "dim": dim,
            "threads": threads,
            "ids": ids,
            "distinct": round(float(np.mean(rows)) / SSU_PERIOD),
            "update_ns_per_row": round(float(np.median(updates / rows)) * 1e9, 2),
            "note_ns_per_row": round(float(np.median(notes / rows)) * 1e9, 2),
            "note_of_update": round(float(np.median(notes / updates)), 4),
            "repetitions": len(seconds),
        }
    )


def _peer_tables(ours: Ours, layout: str, threads: int) -> peer.PeerTables:
    tables = peer.PeerTables(ours.rows, ours.dim, layout=layout, threads=threads, learning_rate=LEARNING_RATE, eps=EPS)
    for table in range(len(ours.rows)):
        tables.weights(table).data.copy_(torch.from_numpy(ours.weights(table)))
    tables.use_huge_pages()
    return tables


def check_equal(ours: Ours, peers: dict[str, peer.PeerTables], rows: list[int], dim: int) -> None:
    """Same start, same ids and gradients, several updates: the same rows, or the benchmark stops here."""
    work = Work.make(rows, dim, count=CHECK_BATCHES, skewed=True)
    before = ours.matrix(work.batches[0]).copy()
    for values in work.batches:
        ours.both(values, work.gradient.numpy())
        pooled = ours.pooled.copy()
        for layout, tables in peers.items():
            prepared = tables.prepare(values, BATCH)
            outputs = tables.forward(prepared)
            _same(pooled, torch.cat(outputs, 1).detach().numpy(), f"rows read, dim {dim}, FBGEMM {layout}")
            tables.backward(outputs, tables.split_columns(work.gradient))
    changed = np.abs(ours.matrix(work.batches[0]) - before).max()
    if not changed > LEARNING_RATE / 10:
        raise RuntimeError(f"the updates changed rows by {changed} at most: nothing was compared")
    for values in work.batches:
        mine = ours.matrix(values)
        for layout, tables in peers.items():
            theirs = torch.cat(tables.forward(tables.prepare(values, BATCH)), 1).detach().numpy()
            _same(mine, theirs, f"rows updated, dim {dim}, FBGEMM {layout}")


def _same(mine: NDArray[np.float32], theirs: NDArray[np.float32], what: str) -> None:
    difference = float(np.abs(mine - theirs).max())
    if not difference <= TOLERANCE:
        raise RuntimeError(f"{what}: the two sides differ by {difference:g}, more than {TOLERANCE:g}")


def _measure(
    ours: Ours,
    peers: dict[str, peer.PeerTables],
    work: Work,
    operation: str,
    threads: int,
    fresh: Any,
    flush: Flush,
    repetitions: int,
) -> dict[str, Any]:
    """Seconds of each repetition on either side, and FBGEMM's chosen layout."""
    _kernels.set_threads(threads)
    candidates = {layout: tables for layout, tables in peers.items() if threads > 1 or not layout.endswith("-threads")}

    def peer_seconds(tables: peer.PeerTables, values: NDArray[np.int64]) -> float:
        return _peer_seconds(tables, work, operation, threads, values, flush)

    trials = {
        layout: min(peer_seconds(tables, next(fresh)) for _ in range(TRIALS)) for layout, tables in candidates.items()
    }
    chosen = min(trials, key=lambda layout: trials[layout]) if trials else None
    batches = [next(fresh) for _ in range(repetitions)]
    # Slots are ids in another type; made ahead, as a server receives them.
    slots = [batch.astype(np.uint32) for batch in batches]
    gradient = work.gradient.numpy()
    mine: dict[str, Callable[[int], object]] = {
        "gather": lambda index: ours.gather(slots[index]),
        "update": lambda index: ours.update(batches[index], gradient),
        "both": lambda index: ours.both(batches[index], gradient),
    }

    def our_seconds(index: int) -> float:
        flush()
        return common.seconds_of(lambda: mine[operation](index))

    runs: dict[str, Callable[[int], float]] = {}
    if chosen is not None:
        best = candidates[chosen]
        runs["fbgemm"] = lambda index: peer_seconds(best, batches[index])
    runs["regrow"] = our_seconds
    before = common.Occupancy.read(time.process_time())
    figures: dict[str, Any] = dict(common.interleave(runs, repetitions=repetitions))
    figures["others_cores"] = before.others_cores(common.Occupancy.read(time.process_time()))
    figures["layout"] = chosen
    return figures


def _peer_seconds(
    tables: peer.PeerTables,
    work: Work,
    operation: str,
    threads: int,
    values: NDArray[np.int64],
    flush: Flush,
) -> float:
    """Everything that could be made ahead is made ahead; what remains is FBGEMM."""
    torch.set_num_threads(1 if tables.layout.endswith("-threads") else threads)
    prepared = tables.prepare(values, BATCH)
    gradients = tables.split_columns(work.gradient)
    if operation == "update":
        outputs = tables.forward(prepared)
        flush()
        return common.seconds_of(lambda: tables.backward(outputs, gradients))
    flush()
    started = time.perf_counter()
    outputs = tables.forward(prepared)
    if operation == "both":
        tables.backward(outputs, gradients)
    return time.perf_counter() - started


def _distinct(values: NDArray[np.int64], features: int) -> int:
    return sum(len(np.unique(ids)) for ids in values.reshape(features, -1))


def bytes_moved(operation: str, *, lookups: int, distinct: float, dim: int) -> float:
    """The least a batch must move: rows and state read and written once, outputs written, gradients read."""
    row, state = dim * 4, 4
    return {
        "gather": distinct * row + lookups * row,
        "update": lookups * row + distinct * 2 * (row + state),
        # The row read for the output is the one updated.
        "both": 2 * lookups * row + distinct * 2 * (row + state),
    }[operation]


def _record(
    report: common.Report,
    figures: dict[str, Any],
    operation: str,
    dim: int,
    threads: int,
    ids: str,
    distinct: float,
    roof: common.Bandwidth,
) -> None:
    mine = float(np.median(figures["regrow"]))
    moved = bytes_moved(operation, lookups=FEATURES * BATCH, distinct=distinct, dim=dim)
    row: dict[str, Any] = {
        "kind": "operation",
        "operation": operation,
        "dim": dim,
        "threads": threads,
        "ids": ids,
        "lookups": FEATURES * BATCH,
        "distinct": round(distinct),
        "regrow_ms": round(mine * 1000, 3),
        "expected_ms": round(moved / roof.copy * 1000, 3),
        "bandwidth_fraction": round(moved / roof.copy / mine, 3),
        "repetitions": len(figures["regrow"]),
        "others_cores": common.round_known(figures["others_cores"], 2),
    }
    if figures["layout"] is not None:
        ratio = common.Ratio.of(common.pair_ratios(figures["fbgemm"], figures["regrow"]), target=TARGET)
        row |= {
            "fbgemm_ms": round(float(np.median(figures["fbgemm"])) * 1000, 3),
            "fbgemm_layout": figures["layout"],
            "speedup": round(ratio.value, 3),
            "speedup_low": round(ratio.low, 3),
            "speedup_high": round(ratio.high, 3),
        }
        # Skewed ids mostly measure the cache; they are shown, and nothing is claimed about them.
        if ids == "uniform":
            report.ratios[f"{operation}_dim{dim}_threads{threads}"] = ratio
    report.rows.append(row)


def _print_rows(report: common.Report) -> None:
    shown = [row for row in report.rows if row["kind"] == "operation"]
    headings = ["operation", "dim", "threads", "ids", "regrow ms", "fbgemm ms", "layout", "speed-up"]
    headings += ["sketch ms", "of it"]
    common.print_table(
        f"{FEATURES} x {BATCH} lookups, median milliseconds",
        headings,
        [
            (
                row["operation"],
                str(row["dim"]),
                str(row["threads"]),
                row["ids"],
                f"{row['regrow_ms']:.2f}",
                f"{row['fbgemm_ms']:.2f}" if "fbgemm_ms" in row else "-",
                row.get("fbgemm_layout") or "-",
                f"{row['speedup']:.2f}" if "speedup" in row else "-",
                f"{row['expected_ms']:.2f}",
                f"{row['bandwidth_fraction']:.0%}",
            )
            for row in shown
        ],
    )
    common.print_table(
        "counting updates beside the update of the same rows",
        ["priority", "dim", "threads", "ids", "rows", "update ns/row", "note ns/row", "of it"],
        [
            (
                row["priority"],
                str(row["dim"]),
                str(row["threads"]),
                row["ids"],
                str(row["distinct"]),
                f"{row['update_ns_per_row']:.1f}",
                f"{row['note_ns_per_row']:.1f}",
                f"{row['note_of_update']:.1%}",
            )
            for row in report.rows
            if row["kind"] == "counting"
        ],
    )
