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
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Literal, TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from regrow.core.job import JobSpec, Mode, OptimizerSpec
from regrow.errors import RegrowError, UserError
from regrow.nn import refusals
from regrow.nn import seat as seats
from regrow.nn import weights as whole
from regrow.nn.ahead import Planned, group, plan_ahead
from regrow.nn.clipping import NOTHING, clip_gradients
from regrow.nn.ddp import DenseInWorkers
from regrow.nn.declaring import Static, declare
from regrow.nn.dense import TABLE_NAME, BufferTable, DenseTable, Known, WhenLoaded, list_buffers
from regrow.nn.dense_state import DenseState, MakeOptimizer
from regrow.nn.digests import StepDigests
from regrow.nn.embedding import EmbeddingBagConfig, EmbeddingConfig, Features
from regrow.nn.evaluating import Find, WithEvaluation
from regrow.nn.extras import WithExtras
from regrow.nn.feed import Dealing, Feed
from regrow.nn.job_embedding import JobCollection, JobEmbeddingBagCollection, JobEmbeddingCollection
from regrow.nn.lookup import Lookup, Part, find_features, join_ids, read_ids
from regrow.nn.naming import name_model
from regrow.nn.optimizer import Optimizers
from regrow.nn.progress import Progress, WithProgress
from regrow.nn.rates import WithRates
from regrow.nn.routes import Chosen, Routes
from regrow.runtime.client import Client, Ticket

TELL_SECONDS = 2.0  # of waiting for other workers, before the launcher hears of it

ROWS_OPTIMIZER = OptimizerSpec(kind="rowwise_adagrad", learning_rate=0.03)
DENSE_OPTIMIZER = OptimizerSpec(kind="adam", learning_rate=0.001)

C = TypeVar("C", bound=JobCollection)


def join(*, seed: int | None = None, mode: Mode | None = None, servers: int | None = None) -> Job:
    """This worker's part of the run: the launcher's under `regrow run`; alone, a run of one worker in this process."""
    return Job(seats.take(seed=seed, mode=mode, servers=servers))


class Job(WithEvaluation, WithRates, WithProgress, WithExtras):
    """One worker of a run. Its public methods are all that a script needs."""

    def __init__(self, seat: seats.Seat) -> None:
        super().__init__()
        self.worker, self.workers = seat.worker, seat.workers
        self.mode: Mode = seat.mode
        self.progress = Progress()
        self.done = 0  # steps that were made before this process: by a worker that died, or before a checkpoint
        self._seat = seat
        self._collections: list[JobCollection] = []
        self._dense: DenseTable | None = None
        self._known = Known(nn.Module())
        self._buffers: BufferTable | None = None
        self._ddp: DenseInWorkers | None = None
        self._client: Client | None = None
        self._first_weights: dict[str, Tensor] = {}  # of tables, to begin with
        self._spec: JobSpec
        self._static: Static = []
        self._routes: Routes
        self._step = 0  # the last that was begun, here or before
        self._current: tuple[Planned, Lookup] | None = None
        self._is_stepped = True  # whether the batch at hand was
        self._losses: list[float] = []  # of the batches of this step
        self._reported_at = time.monotonic()
        self._digests = None if seat.digests is None else StepDigests(seat.digests)
        self._loops, self._loop_start, self._in_loop = 0, 0, False  # loops so far, and where the last begins
        self._epochs = 0  # of all loops so far
        torch.manual_seed(seat.seed)

    def __repr__(self) -> str:
        return f"<job: worker {self.worker} of {self.workers}, {self.mode}, step {self._step}>"

    @property
    def steps(self) -> int:
        """Steps that were made so far, here or before: the same number in a worker that took another's place."""
        return self._step if self._current is None else self._step - 1

    @property
    def client(self) -> Client:
        """The connections to the servers, for whoever wants more of them than rows: digests, whole records."""
        return self._begin()

    @property
    def spec(self) -> JobSpec:
        """The tables as the servers know them."""
        self._begin()
        return self._spec

    # --- What is trained ---

    def embedding_bag_collection(
        self, tables: Sequence[EmbeddingBagConfig], *, optimizer: Optimizers | None = None, is_weighted: bool = False
    ) -> JobEmbeddingBagCollection:
        """Tables on the servers, behind the interface of TorchRec's EmbeddingBagCollection. A job may have several."""
        return self._add(JobEmbeddingBagCollection(self, tables, optimizer or ROWS_OPTIMIZER, is_weighted=is_weighted))

    def embedding_collection(
        self, tables: Sequence[EmbeddingConfig], *, optimizer: Optimizers | None = None
    ) -> JobEmbeddingCollection:
        """As TorchRec's EmbeddingCollection: the row of every id, for sequences; nothing is pooled."""
        return self._add(JobEmbeddingCollection(self, tables, optimizer or ROWS_OPTIMIZER))

    def _add(self, collection: C) -> C:
        self._check_not_begun("a collection")
        everything: list[JobCollection] = [*self._collections, collection]
        names = [spec.name for each in everything for spec in each.specs]
        for name in names:
            if names.count(name) > 1:
                raise ValueError(f"two tables are named {name!r}; checkpoints know tables by their names")
        self._collections.append(collection)
        for spec in collection.specs:
            self._rates.add(spec.name, spec.optimizer.learning_rate)
        for config in collection.configs:
            if (first := whole.make_first(config)) is not None:
                self._first_weights[config.name] = first
        return collection

    def dense(
        self,
        module: nn.Module,
        optimizer: OptimizerSpec | MakeOptimizer | None = None,
        *,
        sync: Literal["servers", "ddp"] = "servers",
    ) -> nn.Module:
        """Gives the parameters of a module to the servers: they are the same in every worker, and survive it. Averages
        such as those of BatchNorm go along. Parameters that need no gradient stay as they are. With sync="ddp" workers
        keep them, and `optimizer` makes one of torch for them: lambda parameters: torch.optim.Adam(parameters)."""
        self._check_not_begun("a module")
        refusals.check_dense(module, sync)
        refusals.check_optimizer(optimizer, sync, self._seat.dense_refusal)
        if self._dense is not None or self._ddp is not None:
            raise UserError("a job has one dense module", hint="put the modules into one, and give that")
        mine = {id(p) for each in self._collections for p in each.parameters()}
        named = [(name, p) for name, p in module.named_parameters() if id(p) not in mine and p.requires_grad]
        buffers = list_buffers(module)
        if callable(optimizer):
            self._ddp = DenseInWorkers(DenseState(named, buffers, optimizer))
            self._rates.add(TABLE_NAME, self._ddp.state.rate)
        else:
            refusals.watch_parameters(named)
            self._dense = DenseTable(named, optimizer or DENSE_OPTIMIZER)
            self._rates.add(TABLE_NAME, self._dense.spec.optimizer.learning_rate)
            self._buffers = BufferTable(buffers) if buffers else None
        self._known = Known(module)
        module.register_load_state_dict_post_hook(WhenLoaded(module, self._write_dense))
        return module

    def _check_not_begun(self, what: str) -> None:
        if self._client is not None:
            raise UserError(
                f"{what} comes after the first step, when the servers have all tables",
                hint="make all collections and call job.dense before job.loop and job.evaluate",
            )

    # --- Steps ---

    def loop(
        self,
        loader: Iterable[Any] | Dealing,
        *,
        epochs: int = 1,
        steps: int | None = None,
        features: Find | None = None,
        accumulate: int = 1,
    ) -> Iterator[Any]:
        """This worker's batches, each to be followed by `step`. What was done before is passed over.

        `features` gives the KeyedJaggedTensors of a batch; left out, they are looked for in it. `steps`: at most so
        many. `accumulate`: so many batches are one step, with the mean of their gradients: one pull and one push.
        """
        if accumulate < 1:
            raise ValueError(f"accumulate must be at least 1, not {accumulate}")
        self._begin()
        feed = Feed(
            loader,
            worker=self.worker,
            workers=self.workers,
            epochs=epochs,
            epochs_before=self._epochs,
            seed=self._seat.seed,
            together=self.mode == "sync",
        )
        self._epochs += epochs
        batches = feed.count_steps()
        known = None if batches is None else -(-batches // accumulate)
        limit = min((n for n in (steps, known) if n is not None), default=None)
        self._leave_loop()  # one that was left, if somebody holds it still
        before = self._loop_start = self._step
        self._loops, self._in_loop = self._loops + 1, True
        number = self._loops
        self._rates.begin_loop()
        if limit is not None:
            self._seat.plan(before + limit)
        skip = max(0, self.done - before) if limit is None else min(max(0, self.done - before), limit)
        find = features or find_features
        feed.pass_over(skip * accumulate, lambda batch: read_ids(find(batch), [])[2])
        skipped = -(-feed.skipped // accumulate)
        self._step = before + skipped
        if skipped:
            self._seat.note_passed(self._loops, skipped, read=feed.is_read_whole)
        self.progress.step = max(self.progress.step, self._step)
        self.progress.samples += feed.samples_skipped
        self.progress.steps_before += skipped
        self.progress.samples_before += feed.samples_skipped
        dealt = itertools.islice(group(feed.deal(), accumulate), None if limit is None else limit - skip)
        planned_ahead = plan_ahead(self._begin(), dealt, lambda batches: self._plan(batches, find))
        try:
            for planned, lookup in self._ask_ahead(planned_ahead):
                self._begin_step(planned, lookup)
                if not planned.batches:
                    self._finish_step()
                for batch in planned.batches:
                    self._is_stepped = False
                    yield batch
                    self._check_stepped(number)
        finally:
            if number == self._loops:
                self._leave_loop()
        self.settle()

    def _check_stepped(self, loop: int) -> None:
        """Before this loop gives another batch."""
        if loop != self._loops:
            raise UserError(
                "another job.loop began before this one was through: a job makes one step after the other",
                hint="of two loaders, loop over zip(loader, other) or one that takes turns",
            )
        if not self._is_stepped:
            raise UserError(
                f"the batch of step {self._step} was left without job.step(loss)",
                hint="job.skip() leaves one out on purpose",
            )

    def _leave_loop(self) -> None:
        self._in_loop = False
        self._rates.end_loop()
        if self._current is not None:  # left in the middle of a step, which then was none
            self._step = self._current[1].step - 1
            self._current = None

    def step(self, loss: Tensor, *, clip_norm: float | None = None) -> None:
        """Backward, and the push of what it found. `clip_norm` bounds the norm of all gradients of this worker."""
        value = float(loss.item())
        if not math.isfinite(value):
            raise RegrowError(
                f"the loss became {value} at step {self._step}",
                hint="lower the learning rates; diverged weights do not come back",
            )
        parts = 1 if self._current is None else len(self._current[0].batches)
        (loss if parts == 1 else loss / parts).backward()
        self.commit(clip_norm=clip_norm, loss=value)

    def commit(self, *, clip_norm: float | None = None, loss: float | None = None) -> None:
        """Pushes what backward has found since the step began: the second half of `step`. Of several batches that are
        one step, the last does it."""
        lookup = self._end_batch("step")
        if loss is not None:
            self._losses.append(loss)
        if lookup.at + 1 < len(lookup.parts):
            lookup.at += 1
        else:
            self._finish_step(clip_norm=clip_norm)

    def skip(self) -> None:
        """Leaves a batch out. It counts as a step, and changes nothing that was not moving already."""
        lookup = self._end_batch("skip")
        lookup.forget_grads()
        if len(lookup.parts) == 1:
            lookup.trained.clear()
        dense = self._dense if self._ddp is None else self._ddp.state.table
        if dense is not None and len(lookup.parts) == 1:
            dense.take_grads()
        if lookup.at + 1 < len(lookup.parts):
            lookup.at += 1
        else:
            self._finish_step()

    def _end_batch(self, what: str) -> Lookup:
        if self._current is None or self._is_stepped:
            raise UserError(f"there is no batch to {what}", hint="job.step comes once for every batch of job.loop")
        self._is_stepped = True
        return self._current[1]

    def settle(self) -> None:
        """Waits until all that was pushed is safe. Synchronously every worker must come here, or go on."""
        client = self._begin()
        if self._current is not None and self.mode == "sync":
            raise UserError(
                f"job.settle() in the middle of step {self._step}, which the servers wait for",
                hint="call it behind job.step(loss), in every worker",
            )
        if self._ddp is not None:
            self._ddp.write(self._step)
        if self.mode == "sync" and self._step > self.done:  # of what was done before, nothing is left to commit
            client.pull(self._routes.plan_nothing(), step=self._step + 1).wait()  # the commit of the last step
        client.drain()
        self._report()
        client.pulse.begin()  # what a script does between its loops may take longer than any step

    def _end(self) -> None:
        """The script has ended, perhaps in the middle of a loop that somebody still holds."""
        self._leave_loop()
        self.settle()

    # --- What a step needs ---

    def _plan(self, batches: list[Any], find: Find) -> Planned:
        if not batches:
            return Planned([], [], self._routes.plan_nothing(), ())
        sources = [find(batch) for batch in batches]
        chosen = self._routes.choose(sources)
        wanted = self._routes.list_features(chosen)
        if wanted and not all(sources):
            raise UserError(
                f"no features were found in a batch of type {type(batches[0]).__name__}",
                hint="job.loop(loader, features=lambda batch: [batch.my_features]) says where they are",
            )
        values, lengths, parts = join_ids(sources, wanted)
        size = sum(part.size for part in parts)
        return Planned(batches, parts, self._routes.plan(chosen, values, lengths, size, static=True), chosen)

    def _ask_ahead(self, planned: Iterator[Planned]) -> Iterator[tuple[Planned, Lookup]]:
        """Batches whose rows are on their way, in order."""
        client = self._begin()
        ahead: deque[tuple[Planned, Lookup]] = deque()
        step = self._step
        while True:
            for each in itertools.islice(planned, self._seat.prefetch + 1 - len(ahead)):
                step += 1
                ticket = client.pull(each.plan, step=step)
                ahead.append((each, self._make_lookup(ticket, each.parts, each.chosen, step=step)))
            if not ahead:
                return
            yield ahead.popleft()

    def _begin_step(self, planned: Planned, lookup: Lookup) -> None:
        waited = time.monotonic()
        rows = self._wait_for_rows(lookup)
        self.progress.wait_seconds += time.monotonic() - waited
        for index, table in self._static:
            lookup.plan.static_get(index, rows, table.values)
            table.adopt_values()
        if self._ddp is not None:
            self._ddp.prepare()
        self._current, self._step = (planned, lookup), lookup.step

    def _wait_for_rows(self, lookup: Lookup) -> np.ndarray[Any, Any]:
        """Synchronously they come when all workers have made the step before: who waits long says so."""
        if self.mode == "sync" and self.workers > 1:
            try:
                return lookup.ticket.wait(TELL_SECONDS)
            except TimeoutError:
                self._seat.note_waiting(lookup.step - 1)
        return lookup.ticket.wait()

    def _finish_step(self, *, clip_norm: float | None = None) -> None:
        assert self._current is not None
        client = self._begin()
        planned, lookup = self._current
        if lookup.step == self.done + 1:  # later steps need not look
            refusals.refuse_scaler()
        grads = self._take_grads(lookup) if planned.batches else np.zeros(lookup.plan.floats, np.float32)
        beside = NOTHING if self._ddp is None else self._ddp.take_grads()  # gradients that do not go to servers
        if clip_norm is not None:
            averages = frozenset(index for index, table in self._static if table is self._buffers)
            clip_gradients(grads, lookup.plan, self._spec, norm_max=clip_norm, left_out=averages, beside=beside)
        if self.mode == "sync" and self.workers > 1:
            grads *= np.float32(1.0 / self.workers)  # servers sum the workers: together they make the mean
            beside *= np.float32(1.0 / self.workers)
        rates = self._rates.find(lookup.step, self._spec)
        # Only now is it known what the model asked to train: a script may say eval() or train() until it calls it.
        trained = tuple(index in lookup.trained for index in range(len(planned.chosen)))
        plan, pushed = self._routes.leave_out(planned.chosen, trained, lookup.plan, grads)
        client.push(lookup.ticket, pushed, rates, plan=plan)
        self._current = None
        loss = sum(self._losses) / len(self._losses) if self._losses else None
        self._losses.clear()
        if self._digests is not None and planned.batches:
            dense = self._static if self._ddp is None else self._ddp.static
            self._digests.add(lookup, self._routes.list_columns(planned.chosen), dense, loss)
        if self._ddp is not None:
            self._ddp.exchange(lookup.step, rates)
        if planned.batches:
            self.progress.position = getattr(planned.batches[-1], "position", self.progress.position)
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
        self._known.check()
        self._seat.report(self.progress, self._begin())
        self.progress.clear()

    # --- Looking only ---

    def look_up(self, collection: JobCollection, features: Features, *, trains: bool) -> list[Tensor]:
        """The rows of a collection's features, pooled side by side in one matrix, or one by one in a matrix for each
        feature: of the step under way, or, if nothing is to change, of any."""
        lookup, chosen = self._find_lookup(collection, features, trains=trains)
        index = self._collections.index(collection)
        if collection.is_expanded:
            before = sum(len(c.lookups) for c, is_in in zip(self._collections[:index], chosen, strict=False) if is_in)
            found = [lookup.expand(before + at, width) for at, width in enumerate(collection.widths)]
        else:
            found = [self._routes.take_columns(lookup.pool(), chosen, index)]
        if not trains:
            return [rows.detach() for rows in found]
        lookup.trained.add(index)
        return found

    def _find_lookup(self, collection: JobCollection, features: Features, *, trains: bool) -> tuple[Lookup, Chosen]:
        index = self._collections.index(collection)
        if self._current is not None:
            planned, lookup = self._current
            if planned.chosen[index] and lookup.is_of(features):
                return lookup, planned.chosen
        if trains:
            where = "outside job.loop" if self._current is None else "with features that are not those of the batch"
            raise UserError(
                f"the collection is called {where}, so its rows could not be trained",
                hint="model.eval() or torch.no_grad() to look only; job.loop(loader, features=...) says what to train",
            )
        while self._reads:
            if self._reads[0].is_of(features):
                return self._reads[0], self._routes.everything
            self._reads.popleft()
        only = tuple(each is collection for each in self._collections)
        return self._read([features], only), only

    def _read(self, sources: list[Features], chosen: Chosen) -> Lookup:
        client = self._begin()
        values, lengths, parts = join_ids([sources], self._routes.list_features(chosen))
        plan = self._routes.plan(chosen, values, lengths, parts[0].size, static=False)
        return self._make_lookup(client.pull(plan, step=0), parts, chosen)

    def _make_lookup(self, ticket: Ticket, parts: list[Part], chosen: Chosen, *, step: int = 0) -> Lookup:
        mine = [each for each, is_chosen in zip(self._collections, chosen, strict=False) if is_chosen]
        features = enumerate((each.is_expanded, width) for each in mine for width in each.widths)
        expanded = [(number, width) for number, (is_expanded, width) in features if is_expanded]
        width = sum(self._routes.list_widths(chosen))
        return Lookup(ticket=ticket, width=width, parts=parts, step=step, expanded=expanded)

    def refresh(self) -> None:
        """Takes the newest dense parameters from the servers: what others have pushed, too."""
        client = self._begin()
        if self._ddp is not None:
            self._ddp.prepare()
        if self._static:
            plan = self._routes.plan_nothing()
            rows = client.pull(plan, step=0).wait()
            for index, table in self._static:
                plan.static_get(index, rows, table.values)
                table.adopt_values()

    # --- Whole tables ---

    def read_weights(self, name: str) -> Tensor:
        """A table's weights, read from the servers."""
        return whole.read_weights(self._begin(), self._spec, name)

    def write_weights(self, name: str, weights: Tensor) -> None:
        """Replaces a table's weights; the state of its optimizer begins anew. Before the first step they are what the
        table begins with, where nothing was trained before."""
        if self._client is None:
            self._first_weights[name] = weights.detach().cpu().clone()
        else:
            whole.write_weights(self._client, self._spec, name, weights)

    def _write_dense(self) -> None:
        """The dense parameters were loaded: the servers have them before they are pulled again."""
        if self._client is not None:
            if self._ddp is not None:
                self._ddp.replace()
            for index, table in self._static:
                table.take_values()
                whole.write_flat(self._client, index, table)

    # --- The servers ---

    def _begin(self) -> Client:
        """The client. With the first call the tables are declared, and it is known how far this worker has come."""
        if self._client is not None:
            return self._client
        seat = self._seat
        kept = [] if self._ddp is None else self._ddp.state.tables
        flat = (self._dense, self._buffers) if self._ddp is None else (self._ddp.state.table, self._ddp.state.buffers)
        seat.name_model(name_model(self._known.module, self._collections, *flat))
        self._spec, self._static = declare(self._collections, [self._dense, self._buffers], seat, kept=kept)
        self._routes = Routes(self._spec, self._collections, [index for index, _ in self._static])
        client, resumed = seat.connect(self._spec)
        opened = client.opened.result()
        # A synchronous step may be committed at some servers only: the last one is done again, to the same bits.
        again = 0 if resumed else 1
        self.done = max(again, opened.committed) - again if seat.mode == "sync" else opened.durable
        client.pushes = self.done
        self._client = client
        seat.note_end(self._end)
        if self._ddp is not None:
            self._ddp.begin(seat, client, self._spec, done=self.done, resumed=resumed)
        self._give_first_values(client)
        return client

    def _give_first_values(self, client: Client) -> None:
        """The dense parameters as they were made here, and rows that were loaded, unless the servers have some."""
        if self._static:
            plan = self._routes.plan_nothing()
            weights = np.empty(plan.floats, np.float32)
            for index, table in self._static:
                table.take_values()
                plan.static_put(index, table.values, weights)
            client.assign(plan, weights)
        for name, first in self._first_weights.items():
            whole.give_weights(client, self._spec, name, first)
        self._first_weights.clear()
