"""Goal: rows that a step only looks at stay as they are, whenever the script says so and whatever their optimizer
remembers; and it may say so at any time.

Method: tiny click models on servers inside this process.
"""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from click_models import BATCH, DIM, SGD, loss_of, make_batches, make_job, make_table, train
from torch import nn

import regrow
from regrow.nn.job import Job
from regrow.nn.seat import AloneSeat


@pytest.mark.parametrize("how", ["eval", "requires_grad_", "no_grad"])
def test_frozen_rows_stay(how: str) -> None:
    job, model = make_job()
    collection: Any = model.collections[0]
    before = job.read_weights("t_user")
    if how == "eval":
        collection.eval()
    elif how == "requires_grad_":
        collection.requires_grad_(False)
    for batch in job.loop(make_batches(3)):
        with torch.set_grad_enabled(how != "no_grad"):
            pooled = collection(batch.features).values()
        job.step(nn.functional.binary_cross_entropy_with_logits(model.top(pooled)[:, 0], batch.labels))
    assert torch.equal(job.read_weights("t_user"), before)
    job.refresh()
    assert model.top.weight.grad is None


def test_a_look_in_between_changes_nothing() -> None:
    other, judged = make_batches(2, seed=5), []
    job, model = make_job()
    for batch in job.loop(make_batches(4)):
        loss = loss_of(model, batch)
        model.eval()
        with torch.no_grad():
            judged.append(model(other[0].features))
        model.train()
        job.step(loss)
    same, model = make_job()
    train(same, model, make_batches(4))
    assert torch.equal(job.read_weights("t_user"), same.read_weights("t_user"))
    assert not torch.equal(judged[0], judged[-1])


def test_eval_behind_a_step_and_train_before_the_next() -> None:
    """As many scripts have it: the loop asks for the next batch while the model is in eval()."""
    job, model = make_job()
    for index, batch in enumerate(job.loop(make_batches(6))):
        model.train()
        job.step(loss_of(model, batch))
        if index % 2:
            model.eval()
            job.evaluate(model, make_batches(2, seed=5))
    same, alike = make_job()
    train(same, alike, make_batches(6))
    assert torch.equal(job.read_weights("t_user"), same.read_weights("t_user"))


MOMENTUM = regrow.OptimizerSpec(kind="momentum", learning_rate=0.1)


@pytest.mark.parametrize("how", ["eval", "requires_grad_", "no_grad", "unused", "skip"])
def test_rows_that_a_step_does_not_train_do_not_move(how: str) -> None:
    """Nor does their momentum move them. One of two collections is frozen for some steps, when these have begun, and
    the other goes on: as in plain torch, where a parameter without a gradient stays."""
    job = Job(AloneSeat(seed=3))
    users = job.embedding_bag_collection([make_table("t_user", "user")], optimizer=MOMENTUM)
    items = job.embedding_bag_collection([make_table("t_item", "item")], optimizer=MOMENTUM)
    top = job.dense(nn.Linear(DIM, 1), SGD)
    seen = []
    for index, batch in enumerate(job.loop(make_batches(6))):
        seen.append((job.read_weights("t_user"), job.read_weights("t_item")))
        frozen = index in (2, 3)
        users.train(not (frozen and how == "eval"))
        users.requires_grad_(not (frozen and how == "requires_grad_"))
        pooled = items(batch.features).values()
        if not (frozen and how == "unused"):
            with torch.set_grad_enabled(not (frozen and how == "no_grad")):
                pooled = pooled + users(batch.features).values()
        loss = nn.functional.binary_cross_entropy_with_logits(top(pooled)[:, 0], batch.labels)
        if frozen and how == "skip":
            loss.backward()
            job.skip()
        else:
            job.step(loss)
    seen.append((job.read_weights("t_user"), job.read_weights("t_item")))
    moved = [(not torch.equal(a, c), not torch.equal(b, d)) for (a, b), (c, d) in itertools.pairwise(seen)]
    assert moved == [(i not in (2, 3), i not in (2, 3) or how != "skip") for i in range(6)]


def test_a_frozen_collection_may_look_up_what_no_batch_has() -> None:
    job = Job(AloneSeat(seed=3))
    users = job.embedding_bag_collection([make_table("t_user", "user")], optimizer=SGD)
    pages = job.embedding_bag_collection([make_table("t_page", "page")], optimizer=SGD).requires_grad_(False)
    top = job.dense(nn.Linear(DIM, 1), SGD)
    extra = regrow.KeyedJaggedTensor(["page"], torch.arange(BATCH), torch.ones(BATCH, dtype=torch.int32))
    for batch in job.loop(make_batches(3)):
        pooled = users(batch.features).values() + pages(extra).values()
        job.step(nn.functional.binary_cross_entropy_with_logits(top(pooled)[:, 0], batch.labels))
    assert job.progress.step == 3
