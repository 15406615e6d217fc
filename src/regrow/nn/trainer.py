"""The training loop of one worker: batches in, pulls and pushes out.

In asynchronous mode the rows of the next `prefetch` batches are asked for before the current one is computed, so
they are older by as many steps; the client measures how much really changed in between. In synchronous mode a
worker without a batch for the last step still takes part in it, with nothing to add.

Step n is push n and the worker's n-th batch, always: so a worker that takes another's place needs one number, the
steps done, which the servers know.
"""

from __future__ import annotations

import itertools
import math
import time
from collections import deque
from collections.abc import Callable, Collection, Iterator
from typing import Any

import numpy as np
import torch
from torch.nn import functional

from regrow.config import TrainConfig
from regrow.core.job import JobSpec, OptimizerSpec, TableSpec
from regrow.data.batch import Batch, Dataset, batches_after
from regrow.errors import RegrowError
from regrow.metrics import auc, logloss
from regrow.nn.coded import make_protection, protect
from regrow.nn.dense import DenseTable
from regrow.nn.dlrm import DLRM
from regrow.nn.progress import Progress
from regrow.nn.routing import make_router
from regrow.runtime.client import Client, Ticket

# While a server is coming back: batches that it is told of at once. Too few: every batch that lacks a row costs
# messages of its own. Too many: memory, and all are told late.
EXPECTED_TOGETHER = 4
EXPECTED_AHEAD = 2  # Steps in which rows can come before they are needed.
# Steps after a failure before any are told of: first come the rows that every batch needs, and nothing shall be before
# them. Too many: messages for every batch meanwhile.
EXPECTED_AFTER = 12


def dlrm_job(config: TrainConfig, rows: list[int], dim: int, dense: TableSpec) -> JobSpec:
    """The tables of a DLRM run: one per categorical feature, then the dense parameters."""
    optimizer = OptimizerSpec(kind=config.optimizer, learning_rate=config.learning_rate)  # type: ignore[arg-type]
    code = config.code
    tables = [
        TableSpec(
            name=f"t_cat_{index}",
            rows=count,
            dim=dim,
            init_bound=(1.0 / count) ** 0.5,
            optimizer=optimizer,
        )
        for index, count in enumerate(rows)
    ]
    coded = (*(protect(table, code) for table in tables), protect(dense, code, dense=True))
    return JobSpec(
        tables=coded,
        servers=config.servers,
        workers=config.workers,
        mode=config.mode,  # type: ignore[arg-type]
        seed=config.seed,
        protection=make_protection(code, flush_seconds=config.flush_seconds),
    )


class Trainer:
    """One worker's model and its view of the servers."""

    def __init__(self, config: TrainConfig, dataset: Dataset, *, worker: int) -> None:
        shape = config.load_model()
        self.config = config
        self.dataset = dataset
        self.worker = worker
        self.model = DLRM.from_config(shape, seed=config.seed)
        self.device = torch.device(config.device)
        self.model.to(self.device)
        dense_optimizer = OptimizerSpec(
            kind=config.dense_optimizer,  # type: ignore[arg-type]
            learning_rate=config.dense_learning_rate,
        )
        self.dense = DenseTable(self.model, dense_optimizer)
        self.job = dlrm_job(config, dataset.rows, shape.dim, self.dense.spec)
        self.dense_index = len(dataset.rows)
        self.width = len(dataset.rows) * shape.dim
        self.router = make_router(
            self.job, feature_tables=list(range(len(dataset.rows))), static_tables=[self.dense_index]
        )
        self.progress = Progress()
        self.done = 0

    def connect(self, client: Client, *, resumed: bool = False) -> None:
        """Uses this client, and gives the servers the initial dense parameters (unless they have some).

        The servers also say how far this worker has come: not at all, unless it takes a dead one's place, or all start
        from a checkpoint (`resumed`), where no step is half done.
        """
        self.client = client
        opened = client.opened.result()
        # A synchronous step may be committed at some servers only: the last one is done again, to the same bits.
        again = 0 if resumed else 1
        self.done = max(again, opened.committed) - again if self.config.mode == "sync" else opened.durable
        client.pushes = self.done
        plan = self._empty_plan()
        weights = np.empty(plan.floats, np.float32)
        plan.static_put(self.dense_index, self.dense.values, weights)
        client.assign(plan, weights)

    def train(
        self,
        *,
        steps: int,
        report: Callable[[Progress], None],
        report_seconds: float = 0.5,
        report_steps: Collection[int] = (),
    ) -> None:
        """`steps` steps in all, or to the end of the data; every push is durable when this returns.

        Reports every so often, and at once after the first step and after those in `report_steps`.
        """
        config = self.config
        batches, self.progress.samples = batches_after(
            self.dataset, batch=config.batch, worker=self.worker, workers=config.workers, done=self.done
        )
        self.progress.step = self.progress.steps_before = self.done
        self.progress.samples_before = self.progress.samples
        planned = self._plan_ahead(batches)
        ahead: deque[tuple[Batch | None, Ticket]] = deque()
        reported = time.monotonic()
        asked = self.done
        for step in range(self.done + 1, steps + 1):
            while asked < min(step + config.prefetch, steps):
                asked += 1
                self._ask(planned, asked, ahead)
            if not ahead:
                break
            self._step(step, *ahead.popleft())
            soon = step == self.done + 1 or step in report_steps
            if soon or time.monotonic() - reported >= report_seconds:
                reported = time.monotonic()
                report(self.progress)
                self.progress.clear()
        if config.mode == "sync":
            # The pull after the last step commits it.
            self.client.pull(self._empty_plan(), step=steps + 1).wait()
        self.client.drain()
        report(self.progress)
        self.progress.clear()

    def _plan_ahead(self, batches: Iterator[Batch]) -> Iterator[tuple[Batch, Any]]:
        """Batches with their plans. While a server is coming back they are made ahead of their use, two at a time so
        that no step waits for many, and it is told of several at once: rows that are missing then cost one round of
        messages for all."""
        waiting: deque[tuple[Batch, Any]] = deque()
        untold: list[Any] = []
        steps = 0  # since a server was lost
        while True:
            steps = steps + 1 if self.client.recovering else 0
            ahead = steps > EXPECTED_AFTER and len(waiting) < EXPECTED_AHEAD + EXPECTED_TOGETHER
            for batch in itertools.islice(batches, 2 if ahead else 0 if waiting else 1):
                plan = self._plan(batch)
                waiting.append((batch, plan))
                untold.append(plan)
            if steps <= EXPECTED_AFTER:
                untold.clear()
            elif len(untold) >= EXPECTED_TOGETHER:
                self.client.expect(untold)
                untold = []
            if not waiting:
                return
            yield waiting.popleft()

    def _ask(self, planned: Iterator[tuple[Batch, Any]], step: int, ahead: deque[tuple[Batch | None, Ticket]]) -> None:
        found = next(planned, None)
        if found is None and self.config.mode == "async":
            return
        batch, plan = found or (None, self._empty_plan())
        ahead.append((batch, self.client.pull(plan, step=step)))

    def _step(self, step: int, batch: Batch | None, ticket: Ticket) -> None:
        waited = time.monotonic()
        rows = ticket.wait()
        self.progress.wait_seconds += time.monotonic() - waited
        plan: Any = ticket.plan
        if batch is None:
            self.client.push(ticket, np.zeros(plan.floats, np.float32))
            return
        embeddings = self._load(plan, rows, len(batch)).requires_grad_()
        logits = self.model(torch.from_numpy(batch.dense).to(self.device), embeddings)
        labels = torch.from_numpy(batch.labels).to(self.device)
        loss = functional.binary_cross_entropy_with_logits(logits, labels)
        if not math.isfinite(loss.item()):
            raise RegrowError(
                f"the loss became {loss.item()} at step {step}",
                hint="Lower --learning-rate or --dense-learning-rate; diverged weights do not come back.",
            )
        # Synchronous steps sum the workers' gradients: together they make the mean over the global batch.
        (loss / self.config.workers if self.config.mode == "sync" else loss).backward()
        grads = np.empty(plan.floats, np.float32)
        assert embeddings.grad is not None
        plan.unpool(embeddings.grad.cpu().contiguous().numpy(), grads)
        plan.static_put(self.dense_index, self.dense.take_grads(), grads)
        self.client.push(ticket, grads)
        self.progress.add(step=step, samples=len(batch), loss=loss.item(), plan=plan)
        self.progress.scores.add(batch.labels, logits.detach().cpu().numpy())
        self.progress.position = batch.position

    def evaluate(self, tick: Callable[[int], None] = lambda samples: None) -> tuple[float, float, int]:
        """(AUC, log loss, samples) over the test rows, with the servers' current values."""
        labels, scores = [], []
        ahead: deque[tuple[Batch, Ticket]] = deque()
        batches = self.dataset.test_batches(batch=self.config.batch)
        while True:
            batch = next(batches, None)
            if batch is not None:
                ahead.append((batch, self.client.pull(self._plan(batch), step=0)))
            if not ahead:
                break
            if batch is not None and len(ahead) < 2:
                continue
            current, ticket = ahead.popleft()
            with torch.no_grad():
                embeddings = self._load(ticket.plan, ticket.wait(), len(current))
                logits = self.model(torch.from_numpy(current.dense).to(self.device), embeddings)
            scores.append(logits.cpu().numpy())
            labels.append(current.labels)
            tick(sum(map(len, labels)))
        if not labels:
            return float("nan"), float("nan"), 0
        truth, guess = np.concatenate(labels), np.concatenate(scores)
        return float(auc(truth, guess)), float(logloss(truth, guess)), len(truth)

    def _plan(self, batch: Batch) -> Any:
        return self.router.plan(batch.values, batch.lengths, len(batch))

    def _empty_plan(self) -> Any:
        return self.router.plan(np.zeros(0, np.int64), None, 0)

    def _load(self, plan: Any, rows: np.ndarray[Any, Any], samples: int) -> torch.Tensor:
        """Takes pulled rows apart: dense parameters into the model, the rest pooled into one matrix."""
        plan.static_get(self.dense_index, rows, self.dense.values)
        self.dense.adopt_values()
        pooled = torch.empty(samples, self.width)
        plan.pool(rows, pooled.numpy())
        return pooled.to(self.device)
