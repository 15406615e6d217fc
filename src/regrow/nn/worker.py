"""A worker as a process: reads data, trains, and on request judges the model."""

from __future__ import annotations

import logging
import time
from typing import Any

import torch

from regrow import _core
from regrow.config import TrainConfig
from regrow.core.link import Identity
from regrow.data.catalog import open_dataset
from regrow.errors import DataError, RegrowError, UserError
from regrow.nn.trainer import Progress, Trainer
from regrow.runtime.client import SocketClient
from regrow.runtime.parent import Parent

log = logging.getLogger("regrow.worker")

REPORT_SECONDS = 0.5
REPORT_SECONDS_PROTECTED = 0.1  # how exactly the end of a stall is seen


def run(parent: Parent) -> None:
    """Trains, says so, then obeys commands until told to stop."""
    assignment = parent.assignment
    config = TrainConfig.from_dict(assignment["config"])
    threads = max(1, int(assignment["threads"]))
    torch.set_num_threads(threads)
    _core.set_threads(threads)
    if config.device.startswith("cuda") and not torch.cuda.is_available():
        raise UserError(
            f"device = {config.device!r}: this torch finds no CUDA device",
            hint="Use --device cpu, or install a CUDA build of torch.",
        )
    dataset = open_dataset(config)
    trainer = Trainer(config, dataset, worker=assignment["id"])
    try:
        steps = step_count(config, dataset)
    except ValueError as error:
        raise DataError(str(error)) from None
    parent.report("planned", steps=steps)
    client = SocketClient(
        identity=Identity(role="worker", id=assignment["id"], incarnation=assignment["incarnation"]),
        token=bytes.fromhex(assignment["token"]),
        coordinator=assignment["coordinator"],
        job=trainer.job,
        redo_bytes_max=config.redo_bytes_max,
        section_bytes_max=config.frame_bytes_max,
    )
    try:
        trainer.connect(client)
        if trainer.done:
            log.info("goes on after step %d", trainer.done)
        started = time.monotonic()
        trainer.train(
            steps=steps,
            report=lambda progress: _report(parent, client, progress),
            report_seconds=REPORT_SECONDS if config.code is None else REPORT_SECONDS_PROTECTED,
            # Whoever is to be killed at a step is killed by the launcher, which must hear of it at once.
            report_steps=frozenset(fault.step for fault in config.faults),
        )
        seconds = time.monotonic() - started
        parent.report(
            "trained", steps=trainer.progress.step, samples=trainer.progress.samples, seconds=seconds
        )
        _obey(parent, trainer, client)
    finally:
        client.close()


def step_count(config: TrainConfig, dataset: Any) -> int:
    """Steps of each worker: what was asked for, or as many as the epochs have batches for."""
    if config.steps is not None:
        return config.steps
    epochs = config.epochs or 1
    rows = int(dataset.train_rows_total()) // epochs
    if config.batch > rows:
        raise ValueError(f"a batch of {config.batch} is larger than the training data ({rows} rows)")
    batches = -(-rows // config.batch) * epochs
    return -(-batches // config.workers)


def _obey(parent: Parent, trainer: Trainer, client: SocketClient) -> None:
    while True:
        command = parent.next_command()
        if command.get("do") == "stop":
            return
        if command.get("do") == "evaluate":
            auc, logloss, samples = trainer.evaluate(lambda done: parent.report("evaluating", samples=done))
            digest = client.digest() if trainer.config.digest else None
            parent.report(
                "evaluated", auc=auc, logloss=logloss, test_samples=samples, model_sha256=digest
            )
        else:
            raise RegrowError(f"the launcher sent a command this worker does not know: {command}")


def _report(parent: Parent, client: SocketClient, progress: Progress) -> None:
    bytes_in, bytes_out = client.bytes_moved
    parent.report(
        "progress",
        step=progress.step,
        samples=progress.samples,
        loss=progress.loss_sum / max(1, progress.loss_samples),
        hist_pos=progress.scores.positives.tolist(),
        hist_neg=progress.scores.negatives.tolist(),
        position=progress.position,
        staleness_mean=client.staleness_sum / max(1, client.staleness_count),
        staleness_max=client.staleness_max,
        wait_seconds=progress.wait_seconds,
        lookups=progress.lookups,
        distinct=progress.distinct,
        redo_bytes_max=client.session.redo_bytes_max,
        bytes_in=bytes_in,
        bytes_out=bytes_out,
    )
