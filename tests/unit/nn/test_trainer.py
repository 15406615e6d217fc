"""Goal: step n of a worker is its n-th batch and its push n, in whatever order rows are asked for and whoever takes a
worker's place; and what a user sees of it (reports, the evaluation, a diverged loss) is right.

Method: a tiny DLRM on `InProcessCluster`, with synthetic clicks. Calls of the client are noted in their order; models
are compared by digest, to the bit.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator
from typing import Any

import numpy as np
import pytest
import torch

import regrow
from regrow.config import TrainConfig
from regrow.data.batch import Batch
from regrow.data.catalog import open_dataset
from regrow.errors import RegrowError
from regrow.metrics import auc, logloss
from regrow.nn.ahead import EXPECTED_TOGETHER
from regrow.nn.job import Job
from regrow.nn.progress import Progress
from regrow.nn.seat import ClusterSeat
from regrow.nn.trainer import Trainer
from regrow.runtime.client import Client

SGD = {"optimizer": "sgd", "dense_optimizer": "sgd"}  # a gradient of zero changes nothing


def make_trainer(
    cluster: Any,
    *,
    dataset: Any = None,
    resumed: bool = False,
    report: Callable[[Progress], None] = lambda progress: None,
    report_seconds: float = 3600.0,
    report_steps: Collection[int] = (),
    **options: Any,
) -> tuple[Trainer, Client]:
    """One worker on three servers, two of which hold a stripe's rows. It has met them when this returns."""
    settings = {"protection": "ec", "k": 2, "steps": 9, "prefetch": 0, **options}
    config = TrainConfig(model="tiny", rows_max=40, batch=8, servers=3, workers=1, **settings)
    seat = ClusterSeat(
        cluster,
        mode=config.mode,  # type: ignore[arg-type]
        prefetch=config.prefetch,
        protection=config.code,
        resumed=resumed,
        report=report,
        report_seconds=report_seconds,
        report_steps=report_steps,
    )
    trainer = Trainer(Job(seat), config, dataset or open_dataset(config))
    return trainer, trainer.job.client


def note_calls(client: Any, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What is asked of a client from here on, in order."""
    calls: list[str] = []
    pull, push = client.pull, client.push

    def noted_pull(plan: Any, *, step: int, **options: Any) -> Any:
        calls.append(f"pull {step}")
        return pull(plan, step=step, **options)

    def noted_push(ticket: Any, grads: Any, *rates: Any, **options: Any) -> int:
        seq: int = push(ticket, grads, *rates, **options)
        calls.append(f"push {seq}")
        return seq

    monkeypatch.setattr(client, "pull", noted_pull)
    monkeypatch.setattr(client, "push", noted_push)
    return calls


# --- The order of things ---


def test_rows_are_asked_for_ahead_and_no_further_than_the_last_step(monkeypatch: pytest.MonkeyPatch) -> None:
    trainer, client = make_trainer(regrow.InProcessCluster(servers=3), steps=5, prefetch=2)
    calls = note_calls(client, monkeypatch)
    trainer.train(steps=5)
    assert calls == ["pull 1", "pull 2", "pull 3", "push 1", "pull 4", "push 2", "pull 5", "push 3", "push 4", "push 5"]


def test_a_synchronous_worker_pulls_one_step_at_a_time_and_commits_the_last(monkeypatch: pytest.MonkeyPatch) -> None:
    trainer, client = make_trainer(regrow.InProcessCluster(servers=3), mode="sync", steps=2)
    calls = note_calls(client, monkeypatch)
    trainer.train(steps=2)
    assert calls == ["pull 1", "push 1", "pull 2", "push 2", "pull 3"]


@pytest.mark.parametrize("prefetch", [0, 3])
def test_asynchronous_training_ends_with_the_data(prefetch: int) -> None:
    trainer, client = make_trainer(
        regrow.InProcessCluster(servers=3), train_rows=20, epochs=1, steps=None, prefetch=prefetch
    )
    trainer.train(steps=9)
    assert (client.pushes, trainer.job.progress.step, trainer.job.progress.samples) == (3, 3, 20)


def test_a_synchronous_worker_without_a_batch_takes_its_steps_with_nothing_to_add() -> None:
    """Others of its job may have batches left, and every server waits for every worker."""
    options = {"mode": "sync", "train_rows": 20, "epochs": 1, "steps": None, **SGD}
    short, short_client = make_trainer(regrow.InProcessCluster(servers=3), **options)
    short.train(steps=3)
    long, long_client = make_trainer(regrow.InProcessCluster(servers=3), **options)
    long.train(steps=5)
    assert (short_client.pushes, long_client.pushes) == (3, 5)
    assert (long.job.progress.step, long.job.progress.samples) == (5, 20)
    assert long_client.digest() == short_client.digest()


@pytest.mark.parametrize("mode", ["async", "sync"])
def test_a_trainer_looks_ahead_while_a_server_comes_back(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """And trains with the same batches in the same order: the same bits as undisturbed."""
    options = {"mode": mode, "flush_pushes": 1}
    whole, client = make_trainer(regrow.InProcessCluster(servers=3), **options)
    whole.train(steps=9)
    cluster = regrow.InProcessCluster(servers=3)
    expected = []

    def report(progress: Progress) -> None:
        if progress.step == 3:
            cluster.kill(1)

    struck, its_client = make_trainer(cluster, report=report, report_seconds=0.0, **options)
    monkeypatch.setattr("regrow.nn.ahead.EXPECTED_AFTER", 0)
    monkeypatch.setattr(its_client, "expect", lambda plans: expected.append(len(plans)))
    monkeypatch.setattr(type(its_client), "recovering", property(lambda self: (1,) if 3 <= self.pushes < 7 else ()))
    struck.train(steps=9)
    assert expected == [EXPECTED_TOGETHER], "six were left, and two are not worth a message"
    assert its_client.digest() == client.digest()


def test_nothing_is_planned_ahead_while_every_server_is_well(monkeypatch: pytest.MonkeyPatch) -> None:
    trainer, client = make_trainer(regrow.InProcessCluster(servers=3))
    taken: list[int] = []
    told: list[Any] = []
    monkeypatch.setattr(client, "expect", told.append)

    train_batches = trainer.dataset.train_batches

    def batches(**options: Any) -> Iterator[Batch]:
        for number, batch in enumerate(train_batches(**options)):
            taken.append(number)
            yield batch

    monkeypatch.setattr(trainer.dataset, "train_batches", batches)
    monkeypatch.setattr(trainer.job, "score", lambda logits, labels: seen.append(len(taken)))
    seen: list[int] = []
    trainer.train(steps=4)
    assert seen == [1, 2, 3, 4]
    assert told == []


# --- Taking up again ---


@pytest.mark.parametrize("mode", ["async", "sync"])
def test_a_worker_in_anothers_place_goes_on_where_it_was(mode: str) -> None:
    """Nine steps by one worker, against five by one and the rest by its successor: the same bits."""
    whole, client = make_trainer(regrow.InProcessCluster(servers=3), mode=mode)
    whole.train(steps=9)
    cluster = regrow.InProcessCluster(servers=3)
    make_trainer(cluster, mode=mode)[0].train(steps=5)
    reported: list[tuple[int, int]] = []
    successor, its_client = make_trainer(
        cluster,
        mode=mode,
        report=lambda progress: reported.append((progress.step, progress.samples)),
        report_steps={7},
    )
    done = successor.job.done
    assert done == (5 if mode == "async" else 4)  # the last synchronous step is done again
    successor.train(steps=9)
    assert reported == [(done + 1, 8 * (done + 1)), (7, 56), (9, 72)]
    assert successor.job.progress.position == whole.job.progress.position
    assert its_client.digest() == client.digest()
    late, late_client = make_trainer(cluster, mode=mode)
    late.train(steps=9)
    assert (late.job.progress.step, late.job.progress.samples) == (9, 72)
    assert late_client.digest() == client.digest()


@pytest.mark.parametrize(("mode", "resumed", "done"), [("sync", False, 4), ("sync", True, 5), ("async", True, 5)])
def test_no_step_is_half_done_in_a_checkpoint(mode: str, resumed: bool, done: int) -> None:
    cluster = regrow.InProcessCluster(servers=3)
    make_trainer(cluster, mode=mode)[0].train(steps=5)
    trainer, client = make_trainer(cluster, mode=mode, resumed=resumed)
    assert (trainer.job.done, client.pushes) == (done, done)


# --- What a user sees ---


def test_reports_come_at_once_then_when_they_are_asked_for_then_at_the_end() -> None:
    seen: list[tuple[int, int, bool]] = []

    def report(progress: Progress) -> None:
        seen.append((progress.step, progress.loss_samples, math.isfinite(progress.loss_sum)))

    trainer, _ = make_trainer(regrow.InProcessCluster(servers=3), report=report, report_steps={4, 9})
    trainer.train(steps=9)
    assert seen == [(1, 8, True), (4, 24, True), (9, 40, True), (9, 0, True)]
    assert trainer.job.progress.lookups == 9 * 8 * 26
    assert 0 < trainer.job.progress.distinct <= trainer.job.progress.lookups


def test_a_loss_that_is_no_number_ends_training_with_advice() -> None:
    rates = {"learning_rate": 1e4, "dense_learning_rate": 1e4}
    trainer, client = make_trainer(regrow.InProcessCluster(servers=3), **rates, **SGD)
    with pytest.raises(RegrowError, match=r"the loss became (nan|inf) at step \d") as caught:
        trainer.train(steps=9)
    assert "lower the learning rates" in str(caught.value.hint)
    assert client.pushes < 9, "gradients of such a loss are not pushed"


def test_an_evaluation_sees_every_test_row_once_and_changes_nothing() -> None:
    trainer, client = make_trainer(regrow.InProcessCluster(servers=3), test_rows=44)
    trainer.train(steps=9)
    before = client.digest(), client.pushes
    ticks: list[int] = []
    found = trainer.evaluate(ticks.append)
    assert ticks == [8, 16, 24, 32, 40, 44]
    assert (client.digest(), client.pushes) == before
    assert found[2] == 44


def test_an_evaluation_is_of_the_servers_values() -> None:
    trainer, _ = make_trainer(regrow.InProcessCluster(servers=3), test_rows=200)
    untrained = trainer.evaluate()
    trainer.train(steps=9)
    assert trainer.evaluate() != untrained


class NoTestRows:
    """A data set of which nothing was kept apart."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def test_batches(self, *, batch: int) -> Iterator[Batch]:
        return iter(())


def test_without_test_rows_there_is_nothing_to_say() -> None:
    config = TrainConfig(model="tiny", rows_max=40, batch=8, servers=3, workers=1, steps=9)
    trainer, _ = make_trainer(regrow.InProcessCluster(servers=3), dataset=NoTestRows(open_dataset(config)))
    area, loss, samples = trainer.evaluate()
    assert (math.isnan(area), math.isnan(loss), samples) == (True, True, 0)


def test_progress_counts_samples_and_not_batches() -> None:
    """The last batch of an epoch may be short: it weighs less in the mean."""
    losses: list[float] = []
    trainer, client = make_trainer(
        regrow.InProcessCluster(servers=3),
        train_rows=12,
        epochs=1,
        steps=None,
        report=lambda progress: losses.append(progress.loss_sum),
    )
    trainer.train(steps=2)
    assert (trainer.job.progress.samples, client.pushes) == (12, 2)
    assert len(losses) == 2 and all(map(math.isfinite, losses))


def test_metrics_are_those_of_the_scores() -> None:
    """The evaluation against the same formula on scores made by hand: the model as PyTorch would run it."""
    trainer, client = make_trainer(regrow.InProcessCluster(servers=3), test_rows=30)
    trainer.train(steps=9)
    found = trainer.evaluate()
    labels, scores = [], []
    for batch in trainer.dataset.test_batches(batch=8):
        dim = trainer.job.spec.tables[0].dim
        specs = trainer.job.spec.tables[:-1]
        tables = [client.records(index, 0, spec.rows)[:, :dim] for index, spec in enumerate(specs)]
        ids = batch.values.reshape(len(tables), len(batch))
        embeddings = np.concatenate([rows[ids[index]] for index, rows in enumerate(tables)], axis=1)
        with torch.no_grad():
            logits = trainer.model(torch.from_numpy(batch.dense), torch.from_numpy(embeddings))
        labels.append(batch.labels)
        scores.append(logits.numpy())
    truth, guess = np.concatenate(labels), np.concatenate(scores)
    assert found == pytest.approx((float(auc(truth, guess)), float(logloss(truth, guess)), 30))
