"""A worker as a process: reads data, trains, and on request judges the model."""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import torch

from regrow import _kernels
from regrow.config import TrainConfig
from regrow.data.catalog import open_dataset
from regrow.errors import DataError, RegrowError, UserError
from regrow.launch.orders import AnyCommand, Become, Evaluate, Stop
from regrow.launch.reports import Evaluated, Evaluating, Planned, Standby, Trained
from regrow.nn import script, seat
from regrow.nn.check import check_parity
from regrow.nn.job import join
from regrow.nn.script import REPORT_SECONDS
from regrow.nn.trainer import Trainer
from regrow.runtime.client import SocketClient
from regrow.runtime.parent import Parent

log = logging.getLogger("regrow.worker")

PREFILL_ROWS = 1 << 16
RECOVERY_SECONDS_MAX = 600.0  # A check waits so long for servers that are on their way back.


def run(parent: Parent) -> None:
    """Trains, says so, then obeys commands until told to stop."""
    assignment, pulse = parent.assignment, parent.pulse
    pulse.begin()
    who, config = assignment.identity, TrainConfig.from_dict(assignment.config)
    threads = max(1, assignment.threads)
    torch.set_num_threads(threads)
    _kernels.set_threads(threads)
    if config.script:
        _run_script(parent, config)
        return
    if config.device.startswith("cuda") and not torch.cuda.is_available():
        raise UserError(
            f"device = {config.device!r}: this torch finds no CUDA device",
            hint="Use --device cpu, or install a CUDA build of torch.",
        )
    dataset = open_dataset(config)
    try:
        steps = step_count(config, dataset)
    except ValueError as error:
        raise DataError(str(error)) from None
    place = script.RunSeat(parent, config)
    seat.offer(place)
    job = join()
    trainer = Trainer(job, config, dataset)
    parent.report(Planned(steps=steps))
    client = place.open(job)
    try:
        if job.done:
            log.info("goes on after step %d", job.done)
        elif config.prefill and who.incarnation == 0 and assignment.start is None:
            # Whoever comes later would undo what others have done.
            prefill(client, worker=who.id, tables=len(dataset.rows), seed=config.seed)
            place.begin()
        trainer.train(steps=steps)
        _tell_trained(parent, place)
        _obey(parent, client, config, lambda: judge_by_trainer(parent, trainer))
    finally:
        client.close()


def stand_by(parent: Parent) -> None:
    """A process without a place yet: torch is imported and has computed once, so that it trains at once when it is told
    whose place to take (`Become`). A script is run only then. Returns when it has stopped."""
    torch.set_num_threads(max(1, parent.assignment.threads))
    warm = torch.nn.Linear(8, 1)
    optimizer = torch.optim.Adam(warm.parameters())  # what torch imports when it is first used
    warm(torch.zeros(2, 8)).sum().backward()
    optimizer.step()
    parent.report(Standby())
    while not isinstance(command := parent.next_command(), Stop):
        if isinstance(command, Become):
            parent.become(command.assignment)
            run(parent)
            return


def _run_script(parent: Parent, config: TrainConfig) -> None:
    place = script.run(parent, config)
    client = place.client
    assert client is not None
    try:
        _tell_trained(parent, place)
        _obey(parent, client, config, lambda: judge_by_script(place))
    finally:
        client.close()


def _tell_trained(parent: Parent, place: script.RunSeat) -> None:
    seconds = time.monotonic() - place.began_at
    parent.report(Trained(steps=place.steps, samples=place.samples, seconds=seconds))


def judge_by_script(place: script.RunSeat) -> Evaluated:
    """What the script has found, if it has looked."""
    found = place.metrics
    return Evaluated(auc=found.get("auc"), logloss=found.get("logloss"), metrics=dict(found))


def step_count(config: TrainConfig, dataset: Any) -> int:
    """Steps of each worker: what was asked for, or as many as the epochs have batches for."""
    if config.steps is not None:
        return config.steps
    epochs = int(dataset.epochs)
    rows = int(dataset.train_rows_total()) // epochs
    if config.batch > rows:
        raise ValueError(f"a batch of {config.batch} is larger than the training data ({rows} rows)")
    batches = -(-rows // config.batch) * epochs
    return -(-batches // config.workers)


def prefill(client: SocketClient, *, worker: int, tables: int, seed: int) -> None:
    """Gives every row of this worker's share of the tables a value: a server then has all its rows to lose."""
    rng = np.random.default_rng([seed, worker])
    for index in range(worker, tables, client.job.workers):
        table = client.job.tables[index]
        block = rng.random((min(table.rows, PREFILL_ROWS), table.record_floats), np.float32)
        block[:, : table.dim] = (block[:, : table.dim] - 0.5) * np.float32(2 * table.init_bound)
        for start in range(0, table.rows, len(block)):
            client.write_records(index, start, block[: table.rows - start])


def check(client: SocketClient) -> tuple[int, int]:
    """(stripes, wrong ones), once no server is on its way back. A wrong parity would be a wrong row one day."""
    deadline = time.monotonic() + RECOVERY_SECONDS_MAX
    while client.recovering and time.monotonic() < deadline:
        time.sleep(0.05)
    stripes, wrong = check_parity(client, tries=5)
    if wrong:
        raise RegrowError(f"{wrong} of {stripes} stripes have a parity that does not fit their rows")
    return stripes, wrong


def _obey(parent: Parent, client: SocketClient, config: TrainConfig, judge: Callable[[], Evaluated]) -> None:
    while not isinstance(command := _next_command(parent), Stop):
        if not isinstance(command, Evaluate):
            raise RegrowError(f"the launcher sent a command that a worker does not know: {command}")
        judged = judge()
        tell = functools.partial(parent.report, Evaluating(samples=judged.test_samples or 0))
        digest = client.digest(_pace(tell)) if config.digest else None
        stripes, wrong = check(client) if config.check_parity else (None, None)
        parent.report(msgspec.structs.replace(judged, model_sha256=digest, parity_stripes=stripes, parity_wrong=wrong))


def judge_by_trainer(parent: Parent, trainer: Trainer) -> Evaluated:
    auc, logloss, samples = trainer.evaluate(lambda done: parent.report(Evaluating(samples=done)))
    return Evaluated(auc=auc, logloss=logloss, test_samples=samples)


def _pace(tell: Callable[[], None]) -> Callable[[], None]:
    """Not more often than anybody wants to hear it."""
    told_at = time.monotonic()

    def tick() -> None:
        nonlocal told_at
        if time.monotonic() - told_at >= REPORT_SECONDS:
            told_at = time.monotonic()
            tell()

    return tick


def _next_command(parent: Parent) -> AnyCommand:
    with parent.pulse.rest():
        return parent.next_command()
