"""Goal: learning rates that change train what plain PyTorch trains with its own schedulers, for rows and for dense
parameters; a worker that takes another's place goes on with the rate of its step; what would be forgotten is refused.

Method: tiny click models on servers inside this process, against torch.optim and torch.optim.lr_scheduler.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from click_models import (
    CASES,
    SGD,
    Model,
    join_cluster,
    loss_of,
    make_batches,
    make_job,
    make_table,
    step_plainly,
    train,
)
from click_models import train_plainly as make_plain
from torch import nn
from torch.optim import lr_scheduler

import regrow
from regrow.errors import RegrowError, UserError
from regrow.nn.clipping import clip_gradients
from regrow.nn.job import Job
from regrow.nn.seat import AloneSeat

FEATURES = CASES["sums"][1]


def check_like(job: Job, model: nn.Module, plain: Any) -> None:
    for name, weights in plain.collections[0].tables.items():
        assert torch.allclose(job.read_weights(name), weights, atol=1e-5), name
    job.refresh()
    assert torch.allclose(model.top.weight, plain.top.weight, atol=1e-5)


SCHEDULERS: dict[str, Callable[[Any], Any]] = {
    "steps": lambda optimizer: lr_scheduler.StepLR(optimizer, step_size=3, gamma=0.1),
    "cosine": lambda optimizer: lr_scheduler.CosineAnnealingLR(optimizer, T_max=10),
    "cycle": lambda optimizer: lr_scheduler.OneCycleLR(optimizer, max_lr=0.9, total_steps=12, cycle_momentum=False),
    "warm-up": lambda optimizer: lr_scheduler.SequentialLR(
        optimizer,
        [
            lr_scheduler.LinearLR(optimizer, start_factor=0.1, total_iters=4),
            lr_scheduler.ExponentialLR(optimizer, gamma=0.8),
        ],
        milestones=[4],
    ),
}


@pytest.mark.parametrize("name", SCHEDULERS)
def test_schedulers_of_torch_do_what_they_do_in_torch(name: str) -> None:
    job, model = make_job()
    job.schedule(SCHEDULERS[name](job.optimizer))
    plain, optimizer = make_plain(job, model, FEATURES)
    scheduler = SCHEDULERS[name](optimizer)
    expected = []
    for batch in make_batches(10):
        expected.append(step_plainly(plain, optimizer, batch))
        scheduler.step()
    assert train(job, model, make_batches(10)) == pytest.approx(expected, abs=1e-5)
    check_like(job, model, plain)


def test_a_function_gives_a_factor_or_rates_by_table() -> None:
    job, model = make_job()
    job.schedule(lambda step: 1.0 / step)
    job.schedule(lambda step: {"t_item": 0.25, "dense": 0.0} if step == 3 else {})
    plain, optimizer = make_plain(job, model, FEATURES)
    named = dict(plain.named_parameters())
    groups = {"t_user": ["collections.0.tables.t_user"], "t_item": ["collections.0.tables.t_item"]}
    groups["dense"] = ["top.weight", "top.bias"]
    optimizer = torch.optim.SGD([{"params": [named[p] for p in each], "name": name} for name, each in groups.items()])
    for step, batch in enumerate(make_batches(5), start=1):
        for group in optimizer.param_groups:
            group["lr"] = {"t_item": 0.25, "dense": 0.0}.get(group["name"], 0.5 / 3) if step == 3 else 0.5 / step
        step_plainly(plain, optimizer, batch)
    train(job, model, make_batches(5))
    check_like(job, model, plain)


def test_rates_are_set_between_loops() -> None:
    """Of everything, of one table, of a collection; each loop of torch has its own optimizer."""
    job, model = make_job()
    plain, _ = make_plain(job, model, FEATURES)
    batches = make_batches(6)
    job.set_learning_rate(0.1)
    train(job, model, batches[:3])
    model.collections[0].set_learning_rate(0.3)
    job.set_learning_rate(0.2, "dense")
    train(job, model, batches[3:])
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    for batch in batches[:3]:
        step_plainly(plain, optimizer, batch)
    rows, dense = list(plain.collections.parameters()), list(plain.top.parameters())
    optimizer = torch.optim.SGD([{"params": rows, "lr": 0.3}, {"params": dense, "lr": 0.2}])
    for batch in batches[3:]:
        step_plainly(plain, optimizer, batch)
    check_like(job, model, plain)


def halve(optimizer: Any) -> Any:
    return lr_scheduler.ExponentialLR(optimizer, gamma=0.5)


@pytest.mark.parametrize("died_after", [1, 4])
@pytest.mark.parametrize("how", ["scheduler", "function"])
def test_a_successor_goes_on_with_the_rate_of_its_step(how: str, died_after: int) -> None:
    def begin(pair: tuple[Job, nn.Module]) -> tuple[Job, nn.Module]:
        job, _ = pair
        job.schedule(halve(job.optimizer) if how == "scheduler" else lambda step: 0.5 ** (step - 1))
        return pair

    whole, model = begin(make_job())
    batches = make_batches(6)
    train(whole, model, batches)
    cluster = regrow.InProcessCluster(servers=1)
    first, model = begin(join_cluster(cluster, worker=0, workers=1, seed=3))
    for count, batch in enumerate(first.loop(batches), start=1):
        if count > died_after:
            break
        first.step(loss_of(model, batch))
    cluster.tick()
    second, model = begin(join_cluster(cluster, worker=0, workers=1, seed=3))
    assert len(train(second, model, batches)) == 6 - died_after
    assert torch.equal(second.read_weights("t_user"), whole.read_weights("t_user"))
    second.refresh()
    whole.refresh()
    assert torch.equal(second._dense._flat, whole._dense._flat)  # type: ignore[union-attr]


def test_what_a_successor_would_not_know_is_refused() -> None:
    job, model = make_job()
    scheduler = halve(job.optimizer)
    with pytest.raises(UserError, match="changed within a loop"):
        for batch in job.loop(make_batches(3)):
            with pytest.raises(UserError, match="is set within a loop"):
                job.set_learning_rate(0.1)
            job.step(loss_of(model, batch))
            scheduler.step()


def test_synchronous_workers_that_differ_are_told_so() -> None:
    cluster = regrow.InProcessCluster(servers=1)
    pairs = [join_cluster(cluster, worker=worker, workers=2, mode="sync") for worker in range(2)]
    pairs[1][0].set_learning_rate(0.25, "t_item")
    loops = [job.loop(make_batches(2)) for job, _ in pairs]
    with pytest.raises(RegrowError, match=r"learning rate 0.25 for table 't_item', and 0.5 in worker 0"):
        for (job, model), batch in zip(pairs, [next(loop) for loop in loops], strict=True):
            job.step(loss_of(model, batch))
            cluster.tick()
        pairs[1][0].settle()


@pytest.mark.parametrize(
    ("call", "reason"),
    [
        (lambda job: job.set_learning_rate(-1.0), "finite number and not negative"),
        (lambda job: job.set_learning_rate(0.1, "t_none"), "there is no table 't_none'"),
        (lambda job: job.schedule(0.5), "a function of the step"),
        (lambda job: job.schedule(halve(torch.optim.SGD([torch.zeros(1)], lr=1.0))), "of another optimizer"),
        (lambda job: job.schedule(lr_scheduler.ReduceLROnPlateau(job.optimizer)), "more than the step"),
    ],
)
def test_rates_that_cannot_be(call: Callable[[Job], None], reason: str) -> None:
    job, _ = make_job()
    with pytest.raises(UserError, match=reason):
        call(job)


def test_a_schedule_that_gives_nonsense() -> None:
    job, model = make_job()
    job.schedule(lambda step: float("nan"))
    with pytest.raises(UserError, match=r"in step 1 of table 't_user' is nan"):
        train(job, model, make_batches(1))


def test_a_collection_of_its_own_has_rates_too() -> None:
    table = make_table("t_user", "user")
    rows = regrow.EmbeddingBagCollection(tables=[table], cluster=regrow.InProcessCluster(servers=2), optimizer=SGD)
    (batch,) = make_batches(1, names=("user",))
    before = rows.state_dict()["embedding_bags.t_user.weight"]
    rows(batch.features).values().sum().backward()
    moved = rows.state_dict()["embedding_bags.t_user.weight"] - before
    rows.set_learning_rate(0.125)
    rows(batch.features).values().sum().backward()
    again = rows.state_dict()["embedding_bags.t_user.weight"] - before - moved
    assert torch.allclose(again, moved / 4, atol=1e-6)
    with pytest.raises(UserError, match="has no table 't_item'"):
        rows.set_learning_rate(0.1, "t_item")


def test_tables_may_have_optimizers_of_their_own() -> None:
    job = Job(AloneSeat(seed=3))
    tables = (make_table("t_user", "user"), make_table("t_item", "item"))
    adagrad = regrow.OptimizerSpec(kind="adagrad", learning_rate=0.1)
    with pytest.raises(UserError, match="there is none for table 't_item'"):
        job.embedding_bag_collection(tables, optimizer={"t_user": SGD})
    with pytest.raises(UserError, match="there is no table 't_none'"):
        job.embedding_bag_collection(tables, optimizer={"t_user": SGD, "t_item": SGD, "t_none": SGD})
    rows = job.embedding_bag_collection(tables, optimizer={"t_user": SGD, "t_item": adagrad})
    model = job.dense(Model(rows), SGD)
    plain, _ = make_plain(job, model, FEATURES)
    named = dict(plain.named_parameters())
    item = named.pop("collections.0.tables.t_item")
    both = [torch.optim.SGD(named.values(), lr=0.5), torch.optim.Adagrad([item], lr=0.1, eps=1e-8)]
    for batch in make_batches(6):
        plain.zero_grad()
        loss_of(plain, batch).backward()
        for each in both:
            each.step()
    train(job, model, make_batches(6))
    check_like(job, model, plain)


def test_what_cannot_be_given_to_the_servers() -> None:
    job = Job(AloneSeat())
    with pytest.raises(UserError, match="sync = 'often'"):
        job.dense(nn.Linear(2, 1), sync="often")  # type: ignore[arg-type]
    with pytest.raises(UserError, match="'weight' has no shape yet"):
        job.dense(nn.LazyLinear(1))


def test_a_parameter_that_comes_later() -> None:
    job, model = make_job()
    with pytest.raises(UserError, match=r"'late.weight' came after job.dense"):
        for batch in job.loop(make_batches(3)):
            model.late = nn.Linear(2, 1)
            job.step(loss_of(model, batch))


@pytest.mark.parametrize("kind", ["sgd", "momentum", "adagrad", "adam"])
def test_weight_decay_is_that_of_torch(kind: Any) -> None:
    """Dense parameters: added to the gradient, but decoupled for Adam, as AdamW has it."""
    options = {"learning_rate": 0.1, "weight_decay": 0.05}
    make = {
        "sgd": lambda p: torch.optim.SGD(p, lr=0.1, weight_decay=0.05),
        "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.05),
        "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1, eps=1e-8, weight_decay=0.05),
        "adam": lambda p: torch.optim.AdamW(p, lr=0.1, weight_decay=0.05),
    }
    job = Job(AloneSeat(seed=3))
    tables = (make_table("t_user", "user"), make_table("t_item", "item"))
    frozen = job.embedding_bag_collection(tables, optimizer=SGD).requires_grad_(False)
    model = job.dense(Model(frozen), regrow.OptimizerSpec(kind=kind, **options))
    plain, _ = make_plain(job, model, FEATURES)
    plain.collections.requires_grad_(False)
    optimizer = make[kind](plain.top.parameters())
    for batch in make_batches(6):
        step_plainly(plain, optimizer, batch)
    train(job, model, make_batches(6))
    check_like(job, model, plain)


def test_averages_are_not_clipped() -> None:
    """BatchNorm's travel where gradients do, and are none."""
    job, model = make_job(norm=True)
    plain, optimizer = make_plain(job, model, FEATURES, norm=True)
    for batch in job.loop(batches := make_batches(5)):
        job.step(loss_of(model, batch), clip_norm=0.01)
    for batch in batches:
        step_plainly(plain, optimizer, batch, clip=0.01)
    check_like(job, model, plain)
    assert torch.allclose(model.norm.running_var, plain.norm.running_var, atol=1e-5)


def test_the_norm_does_not_depend_on_how_many_servers_there_are() -> None:
    norms, clipped = [], []
    for servers in (1, 2, 5):
        job = Job(AloneSeat(seed=3, servers=servers))
        tables = (make_table("t_user", "user"), make_table("t_item", "item", dim=3))
        model = job.dense(Model(job.embedding_bag_collection(tables, optimizer=SGD), width=7), SGD)
        for batch in job.loop(make_batches(1)):
            loss_of(model, batch).backward()
            _, lookup = job._current  # type: ignore[misc]
            grads = job._take_grads(lookup)
            norms.append(clip_gradients(grads, lookup.plan, job.spec, norm_max=0.01, left_out=frozenset()))
            clipped.append(np.sort(np.abs(grads)))
            break
    assert len(set(norms)) == 1
    assert all(np.array_equal(clipped[0], each) for each in clipped)
