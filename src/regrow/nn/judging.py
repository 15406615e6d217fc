"""Metrics that `job.evaluate` takes: ours, and those of torchmetrics; and which of them can be merged, where several
workers have counted."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from regrow.errors import UserError
from regrow.metrics import Metric


class TorchMetric:
    """One of torchmetrics, or anything that is used as they are: `update(preds, target)`, `compute()`. It is given
    probabilities and whole labels."""

    def __init__(self, metric: Any) -> None:
        self.name = type(metric).__name__
        self._metric = metric
        getattr(metric, "reset", lambda: None)()

    def update(self, labels: np.ndarray[Any, Any], logits: np.ndarray[Any, Any]) -> None:
        self._metric.update(torch.from_numpy(logits).sigmoid(), torch.from_numpy(labels).long())

    def compute(self) -> float:
        return float(self._metric.compute())


class MergedTorchMetric(TorchMetric):
    """One that can be merged, as those of torchmetrics from 1.5 on that are not told in advance that they cannot."""

    @property
    def metric_state(self) -> dict[str, Any]:
        state: dict[str, Any] = self._metric.metric_state
        return state

    def merge_state(self, state: Mapping[str, Any]) -> None:
        self._metric.merge_state({name: _as_tensors(value) for name, value in state.items()})


def adapt(metric: Any) -> Metric:
    """The metric as `evaluate` uses it; UserError if it is none."""
    if not all(callable(getattr(metric, name, None)) for name in ("update", "compute")):
        raise UserError(f"a {type(metric).__name__} is no metric", hint="it has no update and compute")
    if isinstance(getattr(metric, "name", None), str) and not isinstance(metric, torch.nn.Module):
        found: Metric = metric
        return found
    return MergedTorchMetric(metric) if _has_merge(metric) else TorchMetric(metric)


def can_merge(metric: Metric) -> bool:
    """Tried with copies: torchmetrics says only then which of its metrics can."""
    if not _has_merge(metric):
        return False
    try:
        one, other = copy.deepcopy(metric), copy.deepcopy(metric)
        one.merge_state(other.metric_state)  # type: ignore[attr-defined]
    except Exception:
        return False
    return True


def _has_merge(metric: Any) -> bool:
    return callable(getattr(metric, "merge_state", None)) and isinstance(getattr(metric, "metric_state", None), dict)


def _as_tensors(value: Any) -> Any:
    return [torch.as_tensor(part) for part in value] if isinstance(value, list) else torch.as_tensor(value)


def predict_by_shape(model: nn.Module, batch: Any) -> tuple[Tensor, Tensor]:
    """Logits and labels of a batch that is a pair, or has `features` and `labels`."""
    if isinstance(batch, tuple | list) and len(batch) == 2:
        return model(batch[0]).reshape(-1), batch[1].reshape(-1)
    return model(batch.features).reshape(-1), batch.labels.reshape(-1)
