"""Goal: an update in C++ is the formula, to the last bit, whatever the dim, instruction set or thread count.

Method: random records and gradients; the kernel against its twin bit for bit, and the twin against torch's
own optimizers within rounding, so that both cannot be wrong in the same way.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from kernel_modes import MODES, Mode, running

from regrow import _kernels
from regrow.core.twins import OPTIMIZERS, Rule, record_floats, state_floats, sum_of_squares, update_record

DIMS = [1, 2, 3, 7, 8, 9, 16, 17, 31, 32, 64, 65, 100, 128, 200, 300]


def shard_of(rule: Rule, *, rows: int, dim: int) -> _kernels.Shard:
    shard = _kernels.Shard(1, 0)
    shard.add_table(
        rows=rows,
        dim=dim,
        optimizer=rule.optimizer,
        learning_rate=rule.learning_rate,
        eps=rule.eps,
        beta1=rule.beta1,
        beta2=rule.beta2,
        momentum=rule.momentum,
        weight_decay=rule.weight_decay,
        seed=5,
        init_bound=0.5,
        table=0,
    )
    return shard


def records_of(shard: _kernels.Shard) -> np.ndarray:
    records = np.empty((shard.slots(0), shard.record_floats(0)), np.float32)
    shard.read_records(0, 0, len(records), records)
    return records


@pytest.mark.parametrize("mode", MODES, ids=str)
@pytest.mark.parametrize("weight_decay", [0.0, 0.03])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_kernel_equals_twin(optimizer: str, weight_decay: float, mode: Mode) -> None:
    rule = Rule(
        optimizer=optimizer,
        learning_rate=0.07,
        eps=1e-5,
        beta1=0.8,
        beta2=0.97,
        momentum=0.6,
        weight_decay=weight_decay,
    )
    rng = np.random.default_rng(3)
    for dim in DIMS:
        shard = shard_of(rule, rows=5, dim=dim)
        records = records_of(shard)
        for step in (1, 2, 3, 1000):
            slots = rng.permutation(5)[:4].astype(np.uint32)
            scale = 10.0 ** rng.integers(-4, 3, (4, 1))
            grads = (rng.standard_normal((4, dim)) * scale).astype(np.float32)
            with running(mode):
                shard.update(np.array([4], np.int32), slots, grads, step)
            for slot, grad in zip(slots, grads, strict=True):
                update_record(records[slot], grad, rule=rule, step=step)
            assert records_of(shard).tobytes() == records.tobytes(), f"dim {dim}, step {step}"


TORCH: dict[str, Callable[..., Any]] = {
    "sgd": lambda weights: torch.optim.SGD(weights, lr=0.1, weight_decay=0.02),
    "momentum": lambda weights: torch.optim.SGD(weights, lr=0.1, momentum=0.9, weight_decay=0.02),
    "adagrad": lambda weights: torch.optim.Adagrad(weights, lr=0.1, eps=1e-6, weight_decay=0.02),
    "adam": lambda weights: torch.optim.AdamW(weights, lr=0.1, eps=1e-6, weight_decay=0.0),
}


@pytest.mark.parametrize("optimizer", TORCH)
def test_twin_agrees_with_torch(optimizer: str) -> None:
    decay = 0.0 if optimizer == "adam" else 0.02
    rule = Rule(optimizer=optimizer, learning_rate=0.1, eps=1e-6, weight_decay=decay)
    rng = np.random.default_rng(1)
    record = np.zeros(record_floats(optimizer, 9), np.float32)
    record[:9] = rng.standard_normal(9)
    weights = torch.nn.Parameter(torch.from_numpy(record[:9].copy()))
    theirs = TORCH[optimizer]([weights])
    for step in range(1, 20):
        grad = rng.standard_normal(9).astype(np.float32)
        update_record(record, grad, rule=rule, step=step)
        weights.grad = torch.from_numpy(grad)
        theirs.step()
        np.testing.assert_allclose(record[:9], weights.detach().numpy(), rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize(("rowwise", "full"), [("rowwise_adagrad", "adagrad"), ("partial_rowwise_adam", "adam")])
def test_rowwise_is_the_full_rule_when_all_columns_are_alike(rowwise: str, full: str) -> None:
    one = np.zeros(record_floats(rowwise, 8), np.float32)
    other = np.zeros(record_floats(full, 8), np.float32)
    for step in range(1, 6):
        grad = np.full(8, 0.3 * step, np.float32)
        update_record(one, grad, rule=Rule(optimizer=rowwise, learning_rate=0.1, weight_decay=0.1), step=step)
        update_record(other, grad, rule=Rule(optimizer=full, learning_rate=0.1, weight_decay=0.1), step=step)
        np.testing.assert_allclose(one[:8], other[:8], rtol=1e-5)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_records_have_room_for_weights_and_state(optimizer: str) -> None:
    for dim in range(1, 40):
        floats = record_floats(optimizer, dim)
        shard = shard_of(Rule(optimizer=optimizer, learning_rate=0.1), rows=3, dim=dim)
        assert shard.record_floats(0) == floats
        assert floats % 4 == 0
        assert 0 <= floats - dim - state_floats(optimizer, dim) < 4


def test_sums_add_lanes_in_one_order() -> None:
    """2**24 + 1 is 2**24 in float32: one by one the ones get lost, in lanes six of the eight count."""
    values = np.array([4096, 1, 1, 1, 1, 1, 1, 1, 1], np.float32)
    assert sum_of_squares(values) == 2**24 + 6
    for mode in MODES:
        shard = shard_of(Rule(optimizer="rowwise_adagrad", learning_rate=0.1), rows=1, dim=9)
        with running(mode):
            shard.update(np.array([1], np.int32), np.array([0], np.uint32), values, 1)
        assert records_of(shard)[0, 9] == np.float32(2**24 + 6) / np.float32(9)


@pytest.mark.parametrize("optimizer", ["adam", "partial_rowwise_adam"])
def test_steps_count_from_one(optimizer: str) -> None:
    shard = shard_of(Rule(optimizer=optimizer, learning_rate=0.1), rows=2, dim=4)
    before = records_of(shard)
    with pytest.raises(ValueError, match="step must be at least 1, not 0"):
        shard.update(np.array([1], np.int32), np.array([0], np.uint32), np.ones(4, np.float32), 0)
    assert (records_of(shard) == before).all()
    assert shard.touched(0).tolist() == [0]


@pytest.mark.parametrize(
    ("numbers", "message"),
    [
        (dict(learning_rate=-0.1), "learning_rate must be a finite number"),
        (dict(learning_rate=float("nan")), "learning_rate must be a finite number"),
        (dict(eps=float("inf")), "eps must be a finite number"),
        (dict(weight_decay=-1.0), "weight_decay must be a finite number"),
        (dict(beta1=1.0), r"beta1 must be in \[0, 1\)"),
        (dict(beta2=-0.1), r"beta2 must be in \[0, 1\)"),
        (dict(momentum=1.5), r"momentum must be in \[0, 1\)"),
        (dict(optimizer="lamb"), "unknown optimizer 'lamb'; choose one of sgd, momentum"),
    ],
)
def test_wrong_numbers_are_refused(numbers: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        shard_of(Rule(**{"optimizer": "sgd", "learning_rate": 0.1, **numbers}), rows=2, dim=4)
