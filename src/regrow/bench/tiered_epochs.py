"""What checkpoints in the files take of the processors: two stores of one server get the same batches, by turns.

What is aimed at is half a percent of the processor time of a sample. Two trainings differ by more than that, whatever
is changed; two stores in one process, which take turns of a hundred steps, do not. One of them makes a checkpoint in
each turn. The processor time of the process in a turn is that of all its threads: the one that calls, those that read
and write, and the kernel's for them. Between two calls something else has the caches of the processor, as in training.

A server does more for a checkpoint than its store: it is told of the instant, and says that its part is there, in a few
messages for a hundred steps. That is left out. What the coordinator does is measured in training (`tiered_checkpoint`).
"""

from __future__ import annotations

import itertools
import select
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from regrow.bench import checkpoint_store, tiered_recovery
from regrow.bench.tiered_live import Workload
from regrow.core.job import JobSpec, OptimizerSpec, TableSpec
from regrow.data.synthetic import SyntheticDataset
from regrow.errors import RegrowError
from regrow.launch.tiers import DENSE_ROW_FLOATS, Needs
from regrow.store.tiered import TieredStore

SERVER = 0
SEED = 1
DISK_SECONDS_MAX = 120.0
LOOK_SECONDS = 0.001
OTHERS_BYTES = 8 << 20  # of others, between two calls: more than a processor has for itself
GRADIENT = 1e-3
COUNTS = ("log_bytes_written", "home_bytes_written", "rows_flushed", "rows_copied", "rows_evicted_dirty", "misses")

Push = tuple[Any, Any, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """How much is measured."""

    steps: int  # of all workers, between two checkpoints
    turns: int  # of either store; some more pass before, in which caches fill
    warmup_turns: int
    seconds_max: float  # of the clock; then there are fewer turns


@dataclass(frozen=True, slots=True, kw_only=True)
class Pairs:
    """Seconds of the processors for a sample, of the stores of all servers, in each turn; and what was counted."""

    plain: list[float]
    saving: list[float]
    counts: dict[str, dict[str, float]]  # for each sample, without checkpoints and with them

    @property
    def more(self) -> list[float]:
        return [one - other for one, other in zip(self.saving, self.plain, strict=True)]


def make_job(workload: Workload) -> JobSpec:
    """The tables of a training, and its dense parameters, which are a table too."""
    config = workload.make_config()
    dense_rows, *_ = Needs(config).list_tables()[-1]
    rule = OptimizerSpec(kind=config.optimizer, learning_rate=0.03)  # type: ignore[arg-type]
    dense_rule = OptimizerSpec(kind=config.dense_optimizer, learning_rate=0.001)  # type: ignore[arg-type]
    dim = config.load_model().row_floats
    tables = [
        TableSpec(name=f"t{index}", rows=count, dim=dim, init_bound=0.01, optimizer=rule)
        for index, count in enumerate(workload.tables)
    ]
    dense = TableSpec(
        name="dense", rows=dense_rows * workload.servers, dim=DENSE_ROW_FLOATS, init_bound=0.01, optimizer=dense_rule
    )
    return JobSpec(tables=(*tables, dense), servers=workload.servers, workers=workload.workers, seed=SEED)


def list_pushes(job: JobSpec, workload: Workload, count: int) -> Iterator[Push]:
    """Of each batch, what one server is asked for; all dense parameters are in each."""
    dataset = SyntheticDataset(rows=workload.tables, seed=SEED, skew=workload.skew, train_rows=workload.batch * count)
    dense = len(workload.tables)
    dense_ids = np.arange(job.tables[dense].rows)
    for each in dataset.train_batches(batch=workload.batch, worker=0, workers=1):
        columns = [np.unique(ids) for ids in each.values.reshape(dense, -1)]
        slots = []
        for table, ids in enumerate([*columns, dense_ids]):
            servers, places = job.layout(table).place(ids, table=table)
            slots.append(places[servers == SERVER].astype(np.uint32))
        counts = np.array([len(each) for each in slots], np.int32)
        floats = sum(len(each) * table.dim for each, table in zip(slots, job.tables, strict=True))
        yield counts, np.concatenate(slots), np.full(floats, GRADIENT, np.float32)


class Turns:
    """One of the stores, and what its turns took."""

    def __init__(self, job: JobSpec, directory: str, *, cache_bytes: int, saves: bool) -> None:
        self.seconds: list[float] = []
        self.counts: list[dict[str, float]] = []
        self.store: Any = TieredStore(job, SERVER, directory=directory, cache_bytes=cache_bytes)
        self._saves = saves
        self._steps = 0
        self._others = np.ones(OTHERS_BYTES // 8)
        source = checkpoint_store.make_filled_store(job)
        for table in range(len(job.tables)):
            tiered_recovery.copy_table(source, self.store, table)

    def take(self, pushes: Sequence[Push]) -> None:
        """One turn. A checkpoint begins with it, and its rows are written in the first half."""
        before = self.store.tier_report()
        began, used, used_by_others = time.monotonic(), time.process_time(), 0.0
        epoch, half = self.store.begin_epoch() if self._saves else 0, len(pushes) // 2
        for number, push in enumerate(pushes):
            if epoch and 0 < number < half:
                self.store.hasten(epoch, (time.monotonic() - began) / number * (half - number))
            self._step(push)
            used_before = time.thread_time()
            self._others += 1.0
            used_by_others += time.thread_time() - used_before
        if epoch:
            self.store.hasten(epoch, 0.0)
            self._wait(lambda: self.store.poll_complete() >= epoch)
            self.store.commit_epoch(epoch)
        while self.store.upkeep():  # what this turn has left to be done is its own
            pass
        self.seconds.append(time.process_time() - used - used_by_others)
        now = self.store.tier_report()
        self.counts.append({name: now[name] - before[name] for name in COUNTS})

    def _step(self, push: Push) -> None:
        """A pull and a push, as a server does them."""
        counts, slots, grads = push
        out = np.empty(len(grads), np.float32)
        self._fetch(counts, slots)
        self.store.gather(counts, slots, out)
        self._fetch(counts, slots)
        self._steps += 1
        self.store.update(counts, slots, grads, self._steps)
        self.store.upkeep()

    def _fetch(self, counts: Any, slots: Any) -> None:
        if ticket := self.store.fetch(counts, slots):
            self._wait(lambda: ticket in self.store.poll_fetched())
            self.store.release(ticket)

    def _wait(self, is_done: Callable[[], bool]) -> None:
        deadline = time.monotonic() + DISK_SECONDS_MAX
        while not is_done():
            if time.monotonic() > deadline:
                raise RegrowError("the disk does not answer")
            if not self.store.upkeep():
                select.select([self.store.fetch_fd], [], [], LOOK_SECONDS)


def measure(workload: Workload, directory: str, size: Size, *, cache_bytes: int) -> Pairs:
    """Each turn goes to either store with the same batches, and who is first changes."""
    job = make_job(workload)
    steps = size.steps * workload.workers
    pushes = list_pushes(job, workload, (size.warmup_turns + size.turns) * steps)
    with tempfile.TemporaryDirectory(prefix="regrow-bench-", dir=directory) as folder:
        stores = [Turns(job, f"{folder}/{saves}", cache_bytes=cache_bytes, saves=saves) for saves in (False, True)]
        deadline = time.monotonic() + size.seconds_max
        for turn in range(size.warmup_turns + size.turns):
            if turn >= size.warmup_turns + 2 and time.monotonic() > deadline:
                break
            mine = list(itertools.islice(pushes, steps))
            for each in stores[:: 1 if turn % 2 else -1]:
                each.take(mine)
        for each in stores:
            each.store.close()
    samples = steps * workload.batch / workload.servers  # all servers take as much as this one
    plain, saving = ([seconds / samples for seconds in each.seconds[size.warmup_turns :]] for each in stores)
    found = {}
    for name, each in zip(("plain", "saving"), stores, strict=True):
        measured = each.counts[size.warmup_turns :]
        found[name] = {key: sum(row[key] for row in measured) / len(measured) / samples for key in COUNTS}
    return Pairs(plain=plain, saving=saving, counts=found)
