"""Goal: alone, dense parameters in the worker train what plain torch trains, with any of its optimizers, with schedules
and clipping; their state goes away and comes back to the bit; what cannot be done is refused by name.

Method: tiny click models on servers inside this process, against torch.optim.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from click_models import CASES, SGD, Bags, Model, loss_of, make_batches, make_table, step_plainly, train
from torch import nn

from regrow.config import TrainConfig
from regrow.errors import UserError
from regrow.nn.dense_state import DenseState
from regrow.nn.job import Job
from regrow.nn.refusals import find_ddp_refusal
from regrow.nn.script import find_dense_every
from regrow.nn.seat import AloneSeat

FEATURES = CASES["sums"][1]
Make = Callable[[Any], torch.optim.Optimizer]
OPTIMIZERS: dict[str, Make] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.01),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1),
    "adam": lambda p: torch.optim.Adam(p, lr=0.01, amsgrad=True),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.01, momentum=0.5),
}


def make_job(make: Make, *, norm: bool = False) -> tuple[Job, nn.Module]:
    job = Job(AloneSeat(seed=3, mode="sync"))
    rows = job.embedding_bag_collection([make_table("t_user", "user"), make_table("t_item", "item")], optimizer=SGD)
    return job, job.dense(Model(rows, norm=norm), make, sync="ddp")


def make_plain(job: Job, model: nn.Module, *, norm: bool = False) -> Any:
    plain = Model(Bags({name: job.read_weights(name) for name in ("t_user", "t_item")}, FEATURES), norm=norm)
    plain.load_state_dict({k: v for k, v in model.state_dict().items() if "embedding_bags" not in k}, strict=False)
    return plain


@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize("clip", [None, 0.05])
def test_it_trains_what_torch_trains(kind: str, clip: float | None) -> None:
    job, model = make_job(OPTIMIZERS[kind], norm=True)
    plain = make_plain(job, model, norm=True)
    tables = [p for name, p in plain.named_parameters() if "tables" in name]
    others = [p for name, p in plain.named_parameters() if "tables" not in name]
    rows, dense = torch.optim.SGD(tables, lr=0.5), OPTIMIZERS[kind](others)

    class Both:
        def zero_grad(self) -> None:
            plain.zero_grad()

        def step(self) -> None:
            rows.step()
            dense.step()

    for batch in make_batches(6):
        step_plainly(plain, Both(), batch, clip)
    for batch in job.loop(make_batches(6)):
        job.step(loss_of(model, batch), clip_norm=clip)
    for name, weight in plain.state_dict().items():
        if "collections" not in name and "num_batches" not in name:
            assert torch.allclose(model.state_dict()[name], weight, atol=1e-5), name
    for name, weights in plain.collections[0].tables.items():
        assert torch.allclose(job.read_weights(name), weights, atol=1e-5), name


def test_groups_keep_their_proportions_under_a_schedule() -> None:
    def make(parameters: Any) -> torch.optim.Optimizer:
        weight, bias = parameters
        return torch.optim.SGD([{"params": [weight]}, {"params": [bias], "lr": 0.4}], lr=0.1)

    job, model = make_job(make)
    plain = make_plain(job, model)
    job.schedule(lambda step: {"dense": 0.1 / step, "t_user": 0.0, "t_item": 0.0})
    for step, batch in enumerate(make_batches(4), 1):
        optimizer = torch.optim.SGD(
            [{"params": [plain.top.weight]}, {"params": [plain.top.bias], "lr": 0.4 / step}], 0.1 / step
        )
        step_plainly(plain, optimizer, batch)
    train(job, model, make_batches(4))
    assert torch.allclose(model.top.weight, plain.top.weight, atol=1e-6)
    assert torch.allclose(model.top.bias, plain.top.bias, atol=1e-6)


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_a_state_goes_away_and_comes_back(kind: str) -> None:
    """What another worker gets goes on to the same bits; a parameter that had no gradient yet has no state there."""

    def make() -> DenseState:
        layer, norm = nn.Linear(3, 2), nn.BatchNorm1d(2)
        buffers = [("mean", norm.running_mean), ("var", norm.running_var)]
        return DenseState([*layer.named_parameters(), ("unused", norm.weight)], buffers, OPTIMIZERS[kind])

    def update(state: DenseState, seed: int) -> None:
        g = np.random.default_rng(seed)
        grads = g.normal(size=state.table.values.size).astype(np.float32)
        moves = np.zeros(state.buffers.values.size, np.float32) if state.buffers else np.zeros(0, np.float32)
        moves[:2] = 0.25
        state.update(grads, [True, True, False], moves, rate=state.rate)

    one, other = make(), make()
    begun = one.take(0)
    assert one.find_step(begun) == 0
    update(one, 1)
    taken = one.take(7)
    other.put(taken)
    assert one.find_step(taken) == other.find_step(other.take(7)) == 7
    assert taken.tobytes() == other.take(7).tobytes() != begun.tobytes()
    update(one, 2)
    update(other, 2)
    assert one.take(8).tobytes() == other.take(8).tobytes()


def test_a_skipped_batch_changes_nothing() -> None:
    job, model = make_job(OPTIMIZERS["adam"])
    before = model.top.weight.clone()
    for batch in job.loop(make_batches(2)):
        loss_of(model, batch).backward()
        job.skip()
    assert torch.equal(model.top.weight, before)


def test_what_is_refused() -> None:
    job = Job(AloneSeat())
    with pytest.raises(UserError, match="needs an optimizer of torch"):
        job.dense(nn.Linear(2, 1), sync="ddp")
    with pytest.raises(UserError, match="needs an optimizer of torch"):
        job.dense(nn.Linear(2, 1), SGD, sync="ddp")
    with pytest.raises(UserError, match="servers cannot run an optimizer of torch"):
        job.dense(nn.Linear(2, 1), OPTIMIZERS["adam"])
    with pytest.raises(UserError, match="a list is no optimizer"):
        job.dense(nn.Linear(2, 1), lambda p: [], sync="ddp")  # type: ignore[arg-type, return-value]
    with pytest.raises(UserError, match="other parameters"):
        job.dense(nn.Linear(2, 1), lambda p: torch.optim.SGD(p[:1], lr=0.1), sync="ddp")
    with pytest.raises(UserError, match="LBFGS needs a closure"):
        job.dense(nn.Linear(2, 1), lambda p: torch.optim.LBFGS(p), sync="ddp")


@pytest.mark.parametrize(
    ("options", "listen", "reason"),
    [
        ({"mode": "async"}, "unix:x", "it needs --mode sync"),
        ({}, "node:", "workers on one machine"),
        ({"protection": "partial", "ckpt": "x"}, "unix:x", "does not go with --protect partial"),
        ({"protection": "delta", "ckpt": "x", "ckpt_bits": 8}, "unix:x", "--ckpt-bits"),
        ({}, "unix:x", None),
    ],
)
def test_where_it_is_refused(options: dict[str, Any], listen: str, reason: str | None) -> None:
    found = find_ddp_refusal(TrainConfig.from_dict({"mode": "sync", "script": ("s.py",)} | options), listen=listen)
    assert (found is None) if reason is None else (found is not None and reason in found)


def test_servers_have_it_whenever_a_checkpoint_may_be_made() -> None:
    def find(**options: Any) -> int | None:
        return find_dense_every(TrainConfig.from_dict({"mode": "sync", "script": ("s.py",)} | options))

    saved = {"protection": "delta", "ckpt": "x"}
    assert find() is None
    assert find(**saved, every="100steps") == 100
    assert find(**saved, every="10s") == 1
    assert find(**saved, every="100steps", publish="y", publish_every="30steps") == 10
    assert find(publish="y") == 1
