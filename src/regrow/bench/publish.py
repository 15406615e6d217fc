"""What does publishing cost, how late are replicas, and how fast do they answer?

Training with deltas and publications against training with deltas alone, in processes of their own, in pairs whose
order rotates. To see anything at all within minutes, both are made more often than one would (every 20 s and every
4 s); what a publication every 30 s costs is in proportion. A pair during which others used the processors is run again.
Then a run with a replica beside it: the time from a cut, when all servers have captured it, to the first answer of that
cut. Bytes are those of the pieces of that run, a delta against a full of all rows touched by then. Look-ups are of
random rows of the largest table, a replica against a plain tensor.

The sketch: a push costs nothing more, as a changed row sets the one bit that it sets for checkpoints. A publication
holds pushes back for one exchange of messages (milliseconds), settles the bits (a word for 64 rows), and copies changed
rows once: 4 * dim bytes each, at some GB/s, and to storage.
"""

from __future__ import annotations

import http.client
import statistics
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from regrow.bench import common, recovery, train
from regrow.checkpoint.chunks import read_chunk
from regrow.checkpoint.lineage import Graph
from regrow.checkpoint.storage import Storage
from regrow.config import TrainConfig
from regrow.launch import local
from regrow.launch.reports import Publication, Report
from regrow.launch.status import RunStatus
from regrow.serving.http import RowServer
from regrow.serving.replica import Replica

SUMMARY = "What publishing weights costs training; how late replicas are, and how fast they answer."

TARGET_COST = 0.997  # of samples per second, with a publication every 30 s
TARGET_LAG_SECONDS = 2.0
EVERY_SECONDS = 30.0  # what that is for; publications of a run are more frequent
MODEL = "kaggle"
LOOKUP_IDS = 1024
RATE_GUESS = 8_000.0
PAIRS_AGAIN_MAX = 2  # in place of disturbed ones. Too few: a neighbour decides. Too many: more than ten minutes.


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """How much is measured."""

    pairs: int
    rows_max: int
    seconds: float  # of each run
    publish_seconds: float
    delta_seconds: float
    lookup_seconds: float


# A pair differs by a few percent by itself, and a publication costs a few thousandths of 30 s: seen at this rate only.
FULL = Size(pairs=5, rows_max=500_000, seconds=40.0, publish_seconds=4.0, delta_seconds=20.0, lookup_seconds=3.0)
QUICK = Size(pairs=1, rows_max=50_000, seconds=8.0, publish_seconds=2.0, delta_seconds=4.0, lookup_seconds=0.3)


def run(*, quick: bool, json_path: str | None) -> int:
    size = QUICK if quick else FULL
    report = common.Report.start("publish")
    with tempfile.TemporaryDirectory(prefix="regrow-publish-") as name:
        directory = Path(name)
        rate = measure_cost(report, directory, size=size)
        measure_lag(report, directory, size=size, rate=rate)
        measure_lookups(report, directory, size=size)
    return report.finish(json_path)


# -- training ------------------------------------------------------------------------------------------------


class Trace(recovery.Trace):
    """Hears of publications as the launcher does."""

    def __init__(self, *, warmup_seconds: float = 0.0) -> None:
        super().__init__(warmup_seconds=warmup_seconds)
        self.begun: dict[str, float] = {}  # cut: when all servers had captured it
        self.saved: list[Publication] = []

    def update(self, status: RunStatus, now: float) -> None:
        if self.status is None:
            receive = status.receive

            def hear_and_pass_on(role: str, id: int, report: Report, now: float) -> None:
                self.hear(report)
                receive(role, id, report, now)

            setattr(status, "receive", hear_and_pass_on)  # noqa: B010  (mypy knows that methods are not assigned to)
        super().update(status, now)

    def hear(self, report: Report) -> None:
        if isinstance(report, Publication) and report.cut is not None:
            if report.status == "begun":
                self.begun[report.cut] = time.monotonic()
            elif report.kind is not None:
                self.saved.append(report)


def make_config(size: Size, folder: str) -> TrainConfig:
    return TrainConfig(
        model=MODEL,
        rows_max=size.rows_max,
        batch=train.BATCH,
        servers=train.SERVERS,
        workers=train.WORKERS,
        seed=train.SEED,
        steps=1,
        test_rows=train.BATCH,
        digest=False,
        protection="delta",
        every=f"{size.delta_seconds:g}s",
        ckpt=f"{folder}/checkpoints",
        out=f"{folder}/run",
    )


def train_once(directory: Path, *, size: Size, rate: float, publishes: bool) -> tuple[dict[str, Any], Trace]:
    with tempfile.TemporaryDirectory(dir=directory) as folder:
        config = make_config(size, folder)
        if publishes:
            config = config.replace(publish=f"{folder}/published", publish_every=f"{size.publish_seconds:g}s")
        trace = Trace(warmup_seconds=size.publish_seconds / 2)
        local.train(config.replace(steps=recovery.steps_of(config, size.seconds, rate)), display=trace)
        return trace.steady(), trace


def measure_cost(report: common.Report, directory: Path, *, size: Size) -> float:
    """Samples per second without publications."""
    quarter = Size(**{**{name: getattr(size, name) for name in Size.__slots__}, "seconds": size.seconds / 4})
    rate = float(train_once(directory, size=quarter, rate=RATE_GUESS, publishes=False)[0]["samples_per_second"])
    pairs: list[dict[bool, dict[str, Any]]] = []
    for turn in range(size.pairs + PAIRS_AGAIN_MAX):
        if sum(map(is_quiet, pairs)) == size.pairs:
            break
        pair: dict[bool, dict[str, Any]] = {}
        for publishes in (False, True) if turn % 2 == 0 else (True, False):
            pair[publishes], trace = train_once(directory, size=size, rate=rate, publishes=publishes)
            row = {"publishes": publishes, "publications": len(trace.saved), **pair[publishes]}
            report.rows.append({"kind": "run", "pair": turn, **row})
            with_text = f"{len(trace.saved)} publications" if publishes else "deltas alone"
            common.console.print(f"pair {turn + 1}, {with_text}: {row['samples_per_second']:,.0f} samples/s")
        pairs.append(pair)
        if not is_quiet(pair):
            common.console.print(f"pair {turn + 1} was disturbed by other processes: one more is run in its place")
    report.ratios |= find_costs(choose_pairs(pairs, count=size.pairs), publish_seconds=size.publish_seconds)
    return rate


def is_quiet(pair: Mapping[bool, Mapping[str, Any]]) -> bool:
    """Neither run shared the processors. Where that is not known, it counts as quiet."""
    return all((row.get("others_cores") or 0.0) <= common.OTHERS_CORES_QUIET for row in pair.values())


def choose_pairs(pairs: Sequence[dict[bool, dict[str, Any]]], *, count: int) -> list[dict[bool, dict[str, Any]]]:
    """The quiet ones, if there are as many as wanted; else all: to choose among disturbed ones would be to choose the
    figure."""
    quiet = [pair for pair in pairs if is_quiet(pair)]
    return quiet if len(quiet) >= count else list(pairs)


def find_costs(pairs: Sequence[Mapping[bool, Mapping[str, Any]]], *, publish_seconds: float) -> dict[str, common.Ratio]:
    """What a publication every 30 s costs, from pairs with more frequent ones. A publication has fewer rows the sooner
    it follows the last one, but not in proportion: so this is rather too much than too little."""

    def ratio(pair: Mapping[bool, Mapping[str, Any]], figure: str) -> float:
        return float(pair[True][figure] / pair[False][figure])

    def thin(ratios: list[float], target: float, better: str) -> common.Ratio:
        thinned = [1 + (each - 1) * publish_seconds / EVERY_SECONDS for each in ratios]
        return common.Ratio.of(thinned, target=target, better=better)

    found = {
        "publish_cost_every_30s": thin([ratio(pair, "samples_per_second") for pair in pairs], TARGET_COST, "higher")
    }
    if all("worker_seconds_per_sample" in row for pair in pairs for row in pair.values()):
        # Workers do the same work for each sample on both sides: their processor time tells how fast processors were.
        even = [ratio(pair, "samples_per_second") * ratio(pair, "worker_seconds_per_sample") for pair in pairs]
        found["publish_cost_equal_speed_every_30s"] = thin(even, TARGET_COST, "higher")
    if all("cpu_seconds_per_1000_samples" in row for pair in pairs for row in pair.values()):
        cpu = [ratio(pair, "cpu_seconds_per_1000_samples") for pair in pairs]
        found["publish_cost_cpu_every_30s"] = thin(cpu, 1 / TARGET_COST, "lower")
    return found


# -- a replica beside it -------------------------------------------------------------------------------------


def measure_lag(report: common.Report, directory: Path, *, size: Size, rate: float) -> None:
    config = make_config(size, str(directory / "lag")).replace(
        publish=str(directory / "published"), publish_every=f"{size.publish_seconds:g}s"
    )
    trace, over = Trace(), threading.Event()
    answered: dict[str, float] = {}

    def follow() -> None:
        with Replica(str(directory / "published"), poll_seconds=0.25, wait_seconds=300.0) as replica:
            table = next(iter(replica.tables))
            while not over.is_set():
                replica.lookup(table, [0])
                answered.setdefault(replica.cut, time.monotonic())
                time.sleep(0.01)

    reader = threading.Thread(target=follow)
    reader.start()
    try:
        local.train(config.replace(steps=recovery.steps_of(config, size.seconds, rate)), display=trace)
        time.sleep(1.0)
    finally:
        over.set()
        reader.join(300.0)
    lags = [answered[cut] - at for cut, at in trace.begun.items() if cut in answered]
    fulls = [each for each in trace.saved if each.kind == "full"]
    deltas = [each for each in trace.saved if each.kind == "delta"]
    report.rows += [{"kind": "lag", "seconds": lag} for lag in lags]
    report.rows += [{"kind": "piece", "of": each.kind, "rows": each.rows, "bytes": each.bytes} for each in trace.saved]
    if lags:
        report.ratios["lag_seconds"] = common.Ratio.of(lags, target=TARGET_LAG_SECONDS, better="lower")
    if deltas and fulls:
        stored = measure_full(directory)
        common.print_table(
            "publications",
            ("kind", "count", "rows", "bytes", "of a full"),
            [
                (kind, str(len(each)), f"{rows:,.0f}", f"{size_bytes:,.0f}", f"{size_bytes / stored:.3f}")
                for kind, each in (("full", fulls), ("delta", deltas))
                for rows, size_bytes in [
                    (statistics.median(p.rows for p in each), statistics.median(p.bytes for p in each))
                ]
            ],
        )


def measure_full(directory: Path) -> int:
    """Bytes that a full would have at the end: all rows touched by then."""
    storage = Storage.open(str(directory / "published"))
    plan, _ = Graph(storage.manifests()[0]).restore_plan(None)
    tables = {table.name: table for table in plan.pieces[-1].tables}
    touched = {name: np.zeros(table.rows, bool) for name, table in tables.items()}
    for piece in plan.pieces:
        for info in piece.chunks:
            for name, found in read_chunk(storage, piece, info).items():
                touched[name][found.ids] = True
    return sum(int(rows.sum()) * tables[name].row_bytes for name, rows in touched.items())


# -- look-ups ------------------------------------------------------------------------------------------------


def measure_lookups(report: common.Report, directory: Path, *, size: Size) -> None:
    import torch  # late: launchers do without

    torch.set_num_threads(1)
    url = str(directory / "published")
    with Replica(url, follow=False) as replica, Replica(url, follow=False, consistent=False) as loose:
        table, (rows, dim) = max(replica.tables.items(), key=lambda item: item[1][0])
        batches = np.random.default_rng(1).integers(0, rows, (64, LOOKUP_IDS))
        plain = torch.from_numpy(replica.read_table(table))
        tensors = [torch.from_numpy(batch) for batch in batches]
        server = RowServer(("127.0.0.1", 0), replica)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        connection = http.client.HTTPConnection("127.0.0.1", server.server_address[1], timeout=60.0)

        def ask(index: int) -> None:
            connection.request("POST", f"/lookup/{table}", batches[index].astype("<u4").tobytes())
            connection.getresponse().read()

        ways = {
            "plain tensor": lambda index: plain[tensors[index]],
            "replica": lambda index: replica.lookup(table, batches[index]),
            "replica, row by row": lambda index: loose.lookup(table, batches[index]),
            "serve-rows, bytes over HTTP": ask,
        }
        found = {name: count_lookups(way, size.lookup_seconds) for name, way in ways.items()}
        server.shutdown()
        server.server_close()
    report.rows += [{"kind": "lookup", "way": name, "rows_per_second": each} for name, each in found.items()]
    common.print_table(
        f"look-ups of {LOOKUP_IDS} random rows of {rows:,} of {dim} floats, one thread",
        ("from", "rows/s", "of a plain tensor"),
        [(name, f"{each:,.0f}", f"{each / found['plain tensor']:.2f}") for name, each in found.items()],
    )


def count_lookups(way: Any, seconds: float) -> float:
    """Rows per second."""
    for index in range(64):
        way(index)  # pages are mapped, and what is made once is made
    count, started = 0, time.perf_counter()
    while (spent := time.perf_counter() - started) < seconds:
        way(count % 64)
        count += 1
    return count * LOOKUP_IDS / spent
