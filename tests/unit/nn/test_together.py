"""Goal: what several workers have counted, merged, is what one would have found, to the bit; and metrics that cannot be
merged are known before.

Method: shares of the same batches, through files, against all batches in one place. Torchmetrics' way to merge (a
dictionary of tensors and lists of tensors) is done by a class here.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from regrow.launch import orders, reports
from regrow.metrics import AUC, LogLoss, Metric
from regrow.nn.judging import adapt, can_merge
from regrow.nn.together import judge_together, read_tally, write_tally

BATCHES = 7


class Accuracy:
    """As torchmetrics has them: states by name, added or put in line."""

    def __init__(self, *, refuses: bool = False) -> None:
        self._refuses = refuses
        self.reset()

    def reset(self) -> None:
        self.right, self.seen = torch.tensor(0), list[torch.Tensor]()

    def update(self, preds: torch.Tensor, target: torch.Tensor) -> None:
        self.right = self.right + ((preds > 0.5).long() == target).sum()
        self.seen.append(target)

    def compute(self) -> torch.Tensor:
        return self.right / len(torch.cat(self.seen))

    @property
    def metric_state(self) -> dict[str, Any]:
        return {"right": self.right, "seen": self.seen}

    def merge_state(self, state: dict[str, Any]) -> None:
        if self._refuses:
            raise RuntimeError("not supported for metrics with full_state_update=True")
        self.right = self.right + state["right"]
        self.seen = state["seen"] + self.seen


class Bare:
    name = "bare"

    def update(self, labels: Any, logits: Any) -> None: ...
    def compute(self) -> float:
        return 1.0


def make_batches() -> list[tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]]:
    rng = np.random.default_rng(3)
    sizes = rng.integers(1, 200, BATCHES)
    return [(rng.integers(0, 2, n).astype(np.float32), rng.normal(size=n).astype(np.float32)) for n in sizes]


def judge(metrics: Sequence[Metric], index: int, count: int) -> None:
    for labels, logits in make_batches()[index::count]:
        for metric in metrics:
            metric.update(labels, logits)


@pytest.mark.parametrize("count", [2, 3, 9])
def test_merged_is_as_one(tmp_path: Path, count: int) -> None:
    """Also where some have no batch at all."""
    fresh = [adapt(metric) for metric in (AUC(), LogLoss(), Accuracy())]
    assert all(map(can_merge, fresh))
    one = copy.deepcopy(fresh)
    judge(one, 0, 1)
    first = copy.deepcopy(fresh)
    judge(first, 0, count)
    for index in range(1, count):
        other = copy.deepcopy(fresh)
        judge(other, index, count)
        assert write_tally(tmp_path / "new" / f"{index}.npz", other) == ""
        read_tally(tmp_path / "new" / f"{index}.npz", first)
    assert [metric.compute() for metric in first] == [metric.compute() for metric in one]


def test_what_cannot_be_merged_is_known() -> None:
    assert not can_merge(adapt(Bare()))
    assert not can_merge(adapt(Accuracy(refuses=True)))


def test_a_tally_that_cannot_be_written_says_why(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    assert write_tally(tmp_path / "file" / "1.npz", [LogLoss()]) != ""


class FakeParent:
    """A launcher that has these commands to give."""

    class pulse:
        @staticmethod
        def rest() -> Any:
            return torch.no_grad()  # any context

    class assignment:
        class identity:
            id = 0

    def __init__(self, *commands: orders.Command) -> None:
        self.reports: list[reports.Report] = []
        self._commands = list(commands)

    def report(self, report: reports.Report) -> None:
        self.reports.append(report)

    def next_command(self) -> orders.Command:
        return self._commands.pop(0)


def test_a_round_that_is_begun_again_counts_once(capsys: pytest.CaptureFixture[str]) -> None:
    alone = orders.Judge(number=2, index=0, count=1)
    parent: Any = FakeParent(
        orders.Judge(number=1, index=0, count=2, directory="d"),
        alone,
        orders.Conclude(metrics={"auc": 0.25, "x": None}),
    )
    found = judge_together(parent, (1, None, 1), [AUC(), adapt(Accuracy(refuses=True))], judge, steps=9)
    assert found["auc"] == 0.25 and np.isnan(found["x"])
    ready, tallied, concluded = parent.reports
    assert ready == reports.ReadyToJudge(loop=1, step=None, call=1, merges=False, steps=9)
    assert tallied == reports.Tallied(number=1)
    whole = AUC()
    judge([whole], 0, 1)
    assert concluded.number == 2 and concluded.metrics["auc"] == whole.compute()
    assert "Accuracy cannot be merged" in capsys.readouterr().out
