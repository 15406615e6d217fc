"""A worker's part of a run, as a script sees it: `job = regrow.join()`.

    job = regrow.join()
    model = job.dense(MyModel(job.embedding_bag_collection(tables=[...])))
    for batch in job.loop(loader, epochs=3):
        loss = criterion(model(batch.features), batch.labels)
        job.step(loss)
    print(job.evaluate(model, test_loader))

Theory of operation. Everything that is trained lives on the servers: rows of embedding tables, and dense parameters as
one more table of wide rows (`dense.py`). A step is one pull, which brings the rows of the batch and all dense
parameters, and one push of their gradients; the servers run the optimizers. Step n of a worker is its n-th batch and
its push n, always, so a script that is started again in a dead worker's place, or from a checkpoint, goes on with one
number that the servers know. The script needs no line for it: `loop` passes over what was done.

The tables are declared with the first step, when all of them are known. After that no collection and no parameter can
be added: the servers have their memory.

While a batch is computed the rows of the next are on their way (asynchronous; `prefetch`). While a server comes back,
it is told of several batches at once (`Expect`).

What breaks without the rules:
- Models that differ between workers: parameters begin with whoever comes first. `join` seeds torch, so that all build
  the same one.
- A synchronous step that one worker leaves out: all others would wait. A batch that is not stepped is an error there
  and then; a worker without a batch takes part with nothing.
- Steps that depend on anything but the batch, the rows and the seed: a step that is done again after a failure would
  have other gradients.
"""

from __future__ import annotations

import itertools
import math
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from regrow.core.job import JobSpec, Mode, OptimizerSpec
from regrow.errors import RegrowError, UserError
from regrow.metrics import AUC, LogLoss, Metric
from regrow.nn import seat as seats
from regrow.nn.coded import make_protection, protect
from regrow.nn.dense import BufferTable, DenseTable
from regrow.nn.embedding import EmbeddingBagConfig, Features
from regrow.nn.feed import Feed
from regrow.nn.job_embedding import JobEmbeddingBagCollection
from regrow.nn.lookup import Lookup, find_features, read_ids
from regrow.nn.progress import Progress
from regrow.nn.routing import make_router
from regrow.runtime.client import Client

# While a server is coming back: batches that it is told of at once. Too few: every batch that lacks a row costs
# messages of its own. Too many: memory, and all are told late.
EXPECTED_TOGETHER = 4
EXPECTED_AHEAD = 2  # Steps in which rows can come before they are needed.
# Steps after a failure before any are told of: first come the rows that every batch needs, and nothing shall be before
# them. Too many: messages for every batch meanwhile.
EXPECTED_AFTER = 12
READ_AHEAD = 2  # batches of an evaluation that are asked for together

ROWS_OPTIMIZER = OptimizerSpec(kind="rowwise_adagrad", learning_rate=0.03)
DENSE_OPTIMIZER = OptimizerSpec(kind="adam", learning_rate=0.001)

Find = Callable[[Any], list[Features]]
Predict = Callable[[Any], tuple[Tensor, Tensor]]


def join(*, seed: int | None = None, mode: Mode | None = None, servers: int | None = None) -> Job:
    """This worker's part of the run: the launcher's under `regrow run`; alone, a run of one worker in this process."""
    return Job(seats.take(seed=seed, mode=mode, servers=servers))


class Planned(NamedTuple):
    """A batch, and which rows it needs."""

    batch: Any  # None: others have one in this step
    sources: list[Features]
    plan: Any
    size: int
    trained: tuple[bool, ...]  # which collections the plan is for


class Job:
    """One worker of a run. Its public methods are all that a script needs."""

    def __init__(self, seat: seats.Seat) -> None:
        self.worker, self.workers = seat.worker, seat.workers
        self.mode: Mode = seat.mode
        self.progress = Progress()
        self.done = 0  # steps that were made before this process: by a worker that died, or before a checkpoint
        self._seat = seat
        self._collections: list[JobEmbeddingBagCollection] = []
        self._dense: DenseTable | None = None
        self._buffers: BufferTable | None = None
        self._client: Client | None = None
        self._spec: JobSpec
        self._static: list[tuple[int, DenseTable | BufferTable]] = []  # with the number of its table
        self._routers: dict[tuple[tuple[bool, ...], bool], Any] = {}
        self._step = 0  # the last that was begun, here or before
        self._current: tuple[Planned, Lookup] | None = None
        self._reads: deque[Lookup] = deque()  # asked for, to be read only
        self._reported_at = time.monotonic()
        torch.manual_seed(seat.seed)

    def __repr__(self) -> str:
        return f"<job: worker {self.worker} of {self.workers}, {self.mode}, step {self._step}>"

    # --- What is trained ---

    def embedding_bag_collection(
        self, tables: Sequence[EmbeddingBagConfig], *, optimizer: OptimizerSpec | None = None
    ) -> JobEmbeddingBagCollection:
        """Tables on the servers, behind the interface of TorchRec's EmbeddingBagCollection. A job may have several."""
        self._check_not_begun("a collection")
        collection = JobEmbeddingBagCollection(self, list(tables), optimizer or ROWS_OPTIMIZER)
        names = [spec.name for other in (*self._collections, collection) for spec in other.specs]
        for name in names:
            if names.count(name) > 1:
                raise ValueError(f"two tables are named {name!r}; checkpoints know tables by their names")
        self._collections.append(collection)
        return collection

    def dense(self, module: nn.Module, optimizer: OptimizerSpec | None = None) -> nn.Module:
        """Gives the parameters of a module to the servers: they are the same in every worker, and survive it. Averages
        such as those of BatchNorm go along. Parameters that need no gradient stay as they are."""
        self._check_not_begun("a module")
        if self._dense is not None:
            raise UserError("a job has one dense module", hint="put the modules into one, and give that")
        mine = {id(p) for each in self._collections for p in each.parameters()}
        named = [(name, p) for name, p in module.named_parameters() if id(p) not in mine and p.requires_grad]
        self._dense = DenseTable(named, optimizer or DENSE_OPTIMIZER)
        kept = _name_buffers(module)
        buffers = [(name, b) for name, b in module.named_buffers() if name in kept and b.is_floating_point()]
        self._buffers = BufferTable(buffers) if buffers else None
        return module

    def _check_not_begun(self, what: str) -> None:
        if self._client is not None:
            raise UserError(
                f"{what} comes after the first step, when the servers have all tables",
                hint="make all collections and call job.dense before job.loop and job.evaluate",
            )

    # --- Steps ---

    def loop(
        self, loader: Iterable[Any], *, epochs: int = 1, steps: int | None = None, features: Find | None = None
    ) -> Iterator[Any]:
        """This worker's batches, each to be followed by `step`. What was done before is passed over.

        `features` gives the KeyedJaggedTensors of a batch; left out, they are looked for in it. `steps`: at most so
        many.
        """
        self._begin()
        feed = Feed(
            loader,
            worker=self.worker,
            workers=self.workers,
            epochs=epochs,
            seed=self._seat.seed,
            together=self.mode == "sync",
        )
        limit = min((n for n in (steps, feed.count_steps()) if n is not None), default=None)
        before = self._step
        if limit is not None:
            self._seat.plan(before + limit)
        skip = max(0, self.done - before) if limit is None else min(max(0, self.done - before), limit)
        find = features or find_features
        feed.pass_over(skip, lambda batch: read_ids(find(batch), [])[2])
        self._step = before + feed.skipped
        self.progress.step = max(self.progress.step, self._step)
        self.progress.samples += feed.samples_skipped
        self.progress.steps_before += feed.skipped
        self.progress.samples_before += feed.samples_skipped
        dealt = itertools.islice(feed.deal(), None if limit is None else limit - skip)
        try:
            for planned, lookup in self._ask_ahead(self._plan_ahead(dealt, find)):
                self._begin_step(planned, lookup)
                if planned.batch is None:
                    self._finish_step(None)
                    continue
                yield planned.batch
                self._check_stepped()
        finally:
            if self._current is not None:  # left in the middle of a step, which then was none
                self._step = self._current[1].step - 1
                self._current = None
        self.settle()

    def step(self, loss: Tensor, *, clip_norm: float | None = None) -> None:
        """Backward, and the push of what it found. `clip_norm` bounds the norm of all gradients of this worker."""
        value = float(loss.item())
        if not math.isfinite(value):
            raise RegrowError(
                f"the loss became {value} at step {self._step}",
                hint="lower the learning rates; diverged weights do not come back",
            )
        loss.backward()
        self.commit(clip_norm=clip_norm, loss=value)

    def commit(self, *, clip_norm: float | None = None, loss: float | None = None) -> None:
        """Pushes what backward has found since the batch began: the second half of `step`."""
        if self._current is None:
            raise UserError("there is no batch to step", hint="job.step comes once for every batch of job.loop")
        self._finish_step(loss, clip_norm=clip_norm)

    def skip(self) -> None:
        """Leaves a batch out. It counts as a step, and changes nothing that was not moving already."""
        if self._current is None:
            raise UserError("there is no batch to skip", hint="job.skip comes in the place of job.step")
        self._current[1].forget_grads()
        if self._dense is not None:
            self._dense.take_grads()
        self._finish_step(None)

    def log(self, **values: float) -> None:
        """Numbers to be seen with the next report: on the display, and in metrics.jsonl."""
        self.progress.logged |= {name: float(value) for name, value in values.items()}

    def settle(self) -> None:
        """Waits until all that was pushed is safe. Synchronously every worker must come here, or go on."""
        client = self._begin()
        if self.mode == "sync" and self._step:
            client.pull(self._plan_nothing(), step=self._step + 1).wait()  # the commit of the last step
        client.drain()
        self._report()
        client.pulse.begin()  # what a script does between its loops may take longer than any step

    def _check_stepped(self) -> None:
        if self._current is not None:
            raise UserError(
                f"the batch of step {self._step} was left without job.step(loss)",
                hint="job.skip() leaves one out on purpose",
            )

    def _plan_ahead(self, dealt: Iterator[Any], find: Find) -> Iterator[Planned]:
        """Batches with their plans. While a server is coming back they are made ahead of their use, two at a time so
        that no step waits for many, and it is told of several at once: rows that are missing then cost one round of
        messages for all."""
        client = self._begin()
        waiting: deque[Planned] = deque()
        untold: list[Any] = []
        steps = 0  # since a server was lost
        while True:
            steps = steps + 1 if client.recovering else 0
            ahead = steps > EXPECTED_AFTER and len(waiting) < EXPECTED_AHEAD + EXPECTED_TOGETHER
            for batch in itertools.islice(dealt, 2 if ahead else 0 if waiting else 1):
                waiting.append(self._plan(batch, find))
                untold.append(waiting[-1].plan)
            if steps <= EXPECTED_AFTER:
                untold.clear()
            elif len(untold) >= EXPECTED_TOGETHER:
                client.expect(untold)
                untold = []
            if not waiting:
                return
            yield waiting.popleft()

    def _plan(self, batch: Any, find: Find) -> Planned:
        if batch is None:
            return Planned(None, [], self._plan_nothing(), 0, ())
        trained = tuple(collection.is_trained for collection in self._collections)
        sources = find(batch)
        wanted = self._list_features(trained)
        if not sources and wanted:
            raise UserError(
                f"no features were found in a batch of type {type(batch).__name__}",
                hint="job.loop(loader, features=lambda batch: [batch.my_features]) says where they are",
            )
        values, lengths, size = read_ids(sources, wanted)
        return Planned(batch, sources, self._route(trained, static=True).plan(values, lengths, size), size, trained)

    def _ask_ahead(self, planned: Iterator[Planned]) -> Iterator[tuple[Planned, Lookup]]:
        """Batches whose rows are on their way, in order."""
        client = self._begin()
        ahead: deque[tuple[Planned, Lookup]] = deque()
        step = self._step
        while True:
            for each in itertools.islice(planned, self._seat.prefetch + 1 - len(ahead)):
                step += 1
                ticket = client.pull(each.plan, step=step)
                width = sum(self._widths(each.trained))
                ahead.append(
                    (each, Lookup(ticket=ticket, size=each.size, width=width, sources=each.sources, step=step))
                )
            if not ahead:
                return
            yield ahead.popleft()

    def _begin_step(self, planned: Planned, lookup: Lookup) -> None:
        waited = time.monotonic()
        rows = lookup.ticket.wait()
        self.progress.wait_seconds += time.monotonic() - waited
        for index, table in self._static:
            lookup.plan.static_get(index, rows, table.values)
            table.adopt_values()
        self._current, self._step = (planned, lookup), lookup.step

    def _finish_step(self, loss: float | None, *, clip_norm: float | None = None) -> None:
        assert self._current is not None
        client = self._begin()
        planned, lookup = self._current
        grads = np.zeros(lookup.plan.floats, np.float32) if planned.batch is None else self._take_grads(lookup)
        if clip_norm is not None:
            norm = float(np.linalg.norm(grads))
            if norm > clip_norm:
                grads *= np.float32(clip_norm / norm)
        if self.mode == "sync" and self.workers > 1:
            grads *= np.float32(1.0 / self.workers)  # servers sum the workers: together they make the mean
        client.push(lookup.ticket, grads)
        self._current = None
        self.progress.add(step=lookup.step, samples=lookup.size, loss=loss, plan=lookup.plan)
        soon = lookup.step == self.done + 1 or lookup.step in self._seat.report_steps
        if soon or time.monotonic() - self._reported_at >= self._seat.report_seconds:
            self._report()

    def _take_grads(self, lookup: Lookup) -> np.ndarray[Any, Any]:
        grads = np.empty(lookup.plan.floats, np.float32)
        lookup.write_grads(grads)
        for index, table in self._static:
            lookup.plan.static_put(index, table.take_grads(), grads)
        return grads

    def _report(self) -> None:
        self._reported_at = time.monotonic()
        self._seat.report(self.progress, self._begin())
        self.progress.clear()

    # --- Looking only ---

    def look_up(self, collection: JobEmbeddingBagCollection, features: Features, *, trains: bool) -> Tensor:
        """The pooled rows of a collection's features: of the step under way, or, if nothing is to change, of any."""
        index = self._collections.index(collection)
        if self._current is not None:
            planned, lookup = self._current
            if planned.trained[index] and lookup.is_of(features):
                pooled = lookup.pool()[:, self._columns(planned.trained, index)]
                return pooled if trains else pooled.detach()
        if trains:
            where = "outside job.loop" if self._current is None else "with features that are not those of the batch"
            raise UserError(
                f"the collection is called {where}, so its rows could not be trained",
                hint="model.eval() or torch.no_grad() to look only; job.loop(loader, features=...) says what to train",
            )
        everything = (True,) * len(self._collections)
        while self._reads:
            if self._reads[0].is_of(features):
                return self._reads[0].pool()[:, self._columns(everything, index)]
            self._reads.popleft()
        only = tuple(each is collection for each in self._collections)
        return self._read([features], only).pool()

    def _read(self, sources: list[Features], chosen: tuple[bool, ...]) -> Lookup:
        values, lengths, size = read_ids(sources, self._list_features(chosen))
        client = self._begin()
        plan = self._route(chosen, static=False).plan(values, lengths, size)
        return Lookup(ticket=client.pull(plan, step=0), size=size, width=sum(self._widths(chosen)), sources=sources)

    def refresh(self) -> None:
        """Takes the newest dense parameters from the servers: what others have pushed, too."""
        client = self._begin()
        if self._static:
            plan = self._plan_nothing()
            rows = client.pull(plan, step=0).wait()
            for index, table in self._static:
                plan.static_get(index, rows, table.values)
                table.adopt_values()

    def evaluate(
        self,
        model: nn.Module,
        loader: Iterable[Any],
        *,
        metrics: Sequence[Metric] | None = None,
        predict: Predict | None = None,
        features: Find | None = None,
    ) -> dict[str, float]:
        """Judges the model with the servers' present values. `predict` gives (logits, labels) of a batch; left out, it
        is `model(batch.features), batch.labels`, or, of a pair, `model(batch[0]), batch[1]`.

        Every worker that calls it goes through all of the loader and gets the same figures.
        """
        metrics = [AUC(), LogLoss()] if metrics is None else metrics
        predict = predict or (lambda batch: _predict(model, batch))
        find = features or find_features
        self.refresh()
        was_training = model.training
        model.eval()
        everything = (True,) * len(self._collections)
        ahead: deque[Any] = deque()
        batches = iter(loader)
        try:
            with torch.no_grad():
                while True:
                    for batch in itertools.islice(batches, READ_AHEAD - len(ahead)):
                        ahead.append(batch)
                        self._reads.append(self._read(find(batch), everything))
                    if not ahead:
                        break
                    logits, labels = predict(ahead.popleft())
                    for metric in metrics:
                        metric.update(labels.detach().cpu().numpy(), logits.detach().float().cpu().numpy())
        finally:
            self._reads.clear()
            model.train(was_training)
        found = {metric.name: metric.compute() for metric in metrics}
        self._seat.note_metrics(found)
        return found

    # --- Whole tables ---

    def read_weights(self, name: str) -> Tensor:
        """A table's weights, read from the servers."""
        client = self._begin()
        index = [spec.name for spec in self._spec.tables].index(name)
        spec = self._spec.tables[index]
        return torch.from_numpy(np.ascontiguousarray(client.records(index, 0, spec.rows)[:, : spec.dim]))

    def write_weights(self, name: str, weights: Tensor) -> None:
        """Replaces a table's weights; the state of its optimizer begins anew."""
        client = self._begin()
        index = [spec.name for spec in self._spec.tables].index(name)
        spec = self._spec.tables[index]
        records = np.zeros((spec.rows, spec.record_floats), np.float32)
        records[:, : spec.dim] = weights.detach().cpu().numpy()
        client.write_records(index, 0, records)

    # --- The servers ---

    def _begin(self) -> Client:
        """The client. With the first call the tables are declared, and it is known how far this worker has come."""
        if self._client is not None:
            return self._client
        wish, seat = self._seat.protection, self._seat
        tables = [protect(spec, wish) for collection in self._collections for spec in collection.specs]
        for table in (self._dense, self._buffers):
            if table is not None:
                self._static.append((len(tables), table))
                tables.append(protect(table.spec, wish, dense=True))
        if not tables:
            raise UserError("the job has nothing to train", hint="job.embedding_bag_collection(...), job.dense(model)")
        self._spec = JobSpec(
            tables=tuple(tables),
            servers=seat.servers,
            workers=seat.workers,
            mode=seat.mode,
            seed=seat.seed,
            protection=make_protection(wish),
        )
        if reason := self._spec.invalid_reason():
            raise UserError(reason)
        client, resumed = seat.connect(self._spec)
        opened = client.opened.result()
        # A synchronous step may be committed at some servers only: the last one is done again, to the same bits.
        again = 0 if resumed else 1
        self.done = max(again, opened.committed) - again if seat.mode == "sync" else opened.durable
        client.pushes = self.done
        self._client = client
        self._give_first_values(client)
        return client

    def _give_first_values(self, client: Client) -> None:
        """The dense parameters as they were made here, unless the servers have some."""
        if self._static:
            plan = self._plan_nothing()
            weights = np.empty(plan.floats, np.float32)
            for index, table in self._static:
                plan.static_put(index, table.values, weights)
            client.assign(plan, weights)

    def _route(self, chosen: tuple[bool, ...], *, static: bool) -> Any:
        """The router of these collections, with the dense tables or without."""
        if (chosen, static) not in self._routers:
            owners: list[int] = []
            mean = [False] * len(self._spec.tables)
            start = 0
            for collection, is_chosen in zip(self._collections, chosen, strict=True):
                owners += [start + t for t, _ in collection.lookups] if is_chosen else []
                for t, config in enumerate(collection.embedding_bag_configs()):
                    mean[start + t] = getattr(config.pooling, "value", config.pooling) == "MEAN"
                start += len(collection.specs)
            self._routers[chosen, static] = make_router(
                self._spec,
                feature_tables=owners,
                static_tables=[index for index, _ in self._static] if static else [],
                mean_pooling=mean,
            )
        return self._routers[chosen, static]

    def _plan_nothing(self) -> Any:
        router = self._route((False,) * len(self._collections), static=True)
        return router.plan(np.zeros(0, np.int64), None, 0)

    def _list_features(self, chosen: tuple[bool, ...]) -> list[str]:
        pairs = zip(self._collections, chosen, strict=True)
        return [name for collection, is_chosen in pairs if is_chosen for _, name in collection.lookups]

    def _widths(self, chosen: tuple[bool, ...]) -> list[int]:
        if not chosen:
            return []
        pairs = zip(self._collections, chosen, strict=True)
        return [sum(collection.widths) if is_chosen else 0 for collection, is_chosen in pairs]

    def _columns(self, chosen: tuple[bool, ...], index: int) -> slice:
        widths = self._widths(chosen)
        start = sum(widths[:index])
        return slice(start, start + widths[index])


def _name_buffers(module: nn.Module) -> set[str]:
    """The buffers that belong to a module's state; others follow from its shape."""
    names: set[str] = set()
    for prefix, each in module.named_modules():
        dot = f"{prefix}." if prefix else ""
        names |= {dot + name for name in each._buffers if name not in each._non_persistent_buffers_set}
    return names


def _predict(model: nn.Module, batch: Any) -> tuple[Tensor, Tensor]:
    if isinstance(batch, tuple | list) and len(batch) == 2:
        return model(batch[0]).reshape(-1), batch[1].reshape(-1)
    return model(batch.features).reshape(-1), batch.labels.reshape(-1)
