"""How good the predictions are: area under the ROC curve, log loss, and histograms that can be added up.

Only arrays go in; nothing here knows where the scores come from. `auc` is exact and needs all scores at once;
`ScoreHistogram` is for live display: workers count, somebody else adds and estimates.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
from numpy.typing import ArrayLike, NDArray

BINS = 64


def auc(labels: ArrayLike, scores: ArrayLike) -> float:
    """The chance that a positive outscores a negative, ties counting half; NaN when a kind is missing."""
    positive, values = _check_scores(labels, scores)
    positives = int(positive.sum())
    negatives = len(positive) - positives
    if positives == 0 or negatives == 0:
        return float("nan")
    order = np.argsort(values, kind="stable")
    values, positive = values[order], positive[order]
    # Tied scores form a group; a positive wins against the negatives below its group and half of those in it.
    group_start = np.flatnonzero(np.concatenate(([True], values[1:] != values[:-1])))
    group_positives = np.add.reduceat(positive, group_start, dtype=np.int64)
    group_sizes = np.diff(np.append(group_start, len(values)))
    group_negatives = group_sizes - group_positives
    negatives_below = np.cumsum(group_negatives) - group_negatives
    # Twice the count stays an integer, and exact, up to 4e9 samples.
    wins_twice = int(np.sum(group_positives * (2 * negatives_below + group_negatives)))
    return wins_twice / (2 * positives * negatives)


def logloss(labels: ArrayLike, logits: ArrayLike) -> float:
    """The mean binary cross-entropy in nats, from logits (not probabilities)."""
    positive, values = _check_scores(labels, logits)
    if len(values) == 0:
        return float("nan")
    # log(1 + exp(z)) - y*z, in the form that neither overflows nor loses small values.
    losses = np.logaddexp(0.0, values.astype(np.float64)) - positive * values.astype(np.float64)
    return float(losses.mean())


class Metric(Protocol):
    """Something that is told of predictions, a batch at a time, and says how good they were. One that also has
    `metric_state`, arrays by name, and `merge_state(such a dictionary)` can be told of them in several places."""

    name: str

    def update(self, labels: NDArray[Any], logits: NDArray[Any]) -> None: ...
    def compute(self) -> float: ...


class AUC:
    """`auc` of all that it was told: exact, so it keeps every score."""

    name = "auc"

    def __init__(self) -> None:
        self._labels: list[NDArray[Any]] = []
        self._scores: list[NDArray[Any]] = []

    def update(self, labels: NDArray[Any], logits: NDArray[Any]) -> None:
        self._labels.append(np.asarray(labels).reshape(-1))
        self._scores.append(np.asarray(logits).reshape(-1))

    def compute(self) -> float:
        return auc(np.concatenate(self._labels), np.concatenate(self._scores)) if self._labels else float("nan")

    @property
    def metric_state(self) -> dict[str, list[NDArray[Any]]]:
        return {"labels": self._labels, "scores": self._scores}

    def merge_state(self, state: Mapping[str, Any]) -> None:
        self._labels += state["labels"]
        self._scores += state["scores"]


class LogLoss:
    """`logloss` of all that it was told. Sums of batches are added up exactly, so that their order does not matter."""

    name = "logloss"

    def __init__(self) -> None:
        self._sums: list[float] = []
        self._count = 0

    def update(self, labels: NDArray[Any], logits: NDArray[Any]) -> None:
        count = int(np.asarray(labels).size)
        if count:
            self._sums.append(logloss(np.asarray(labels).reshape(-1), np.asarray(logits).reshape(-1)) * count)
            self._count += count

    def compute(self) -> float:
        return math.fsum(self._sums) / self._count if self._count else float("nan")

    @property
    def metric_state(self) -> dict[str, NDArray[Any]]:
        return {"sums": np.array(self._sums, np.float64), "count": np.array(self._count)}

    def merge_state(self, state: Mapping[str, Any]) -> None:
        self._sums += state["sums"].tolist()
        self._count += int(state["count"])


@dataclass(slots=True)
class ScoreHistogram:
    """Positives and negatives by predicted probability, in equal bins over [0, 1]. Adding two merges them."""

    positives: NDArray[np.int64] = field(default_factory=lambda: np.zeros(BINS, dtype=np.int64))
    negatives: NDArray[np.int64] = field(default_factory=lambda: np.zeros(BINS, dtype=np.int64))

    def __post_init__(self) -> None:
        self.positives = np.asarray(self.positives, dtype=np.int64)
        self.negatives = np.asarray(self.negatives, dtype=np.int64)
        if self.positives.shape != (BINS,) or self.negatives.shape != (BINS,):
            raise ValueError(
                f"a score histogram has {BINS} bins of each kind, not {self.positives.shape} and {self.negatives.shape}"
            )

    def add(self, labels: ArrayLike, logits: ArrayLike) -> None:
        """Counts predictions, given as logits."""
        positive, values = _check_scores(labels, logits)
        bins = (BINS / (1.0 + np.exp(-values.astype(np.float32).clip(-30.0, 30.0)))).astype(np.int64)
        np.minimum(bins, BINS - 1, out=bins)
        self.positives += np.bincount(bins[positive], minlength=BINS)
        self.negatives += np.bincount(bins[~positive], minlength=BINS)

    def __add__(self, other: ScoreHistogram) -> ScoreHistogram:
        return ScoreHistogram(self.positives + other.positives, self.negatives + other.negatives)

    def auc(self) -> float:
        """The AUC if scores within a bin were tied: off by at most half the pairs that share a bin."""
        positives, negatives = int(self.positives.sum()), int(self.negatives.sum())
        if positives == 0 or negatives == 0:
            return float("nan")
        negatives_below = np.cumsum(self.negatives) - self.negatives
        wins_twice = int(np.sum(self.positives * (2 * negatives_below + self.negatives)))
        return wins_twice / (2 * positives * negatives)

    def __repr__(self) -> str:
        positives, negatives = self.positives.sum(), self.negatives.sum()
        return f"ScoreHistogram({positives} positives, {negatives} negatives, AUC {self.auc():.4f})"


def _check_scores(labels: ArrayLike, scores: ArrayLike) -> tuple[NDArray[np.bool_], NDArray[np.floating]]:
    """Labels as booleans and scores, or a ValueError: a NaN has no rank, so it must not pass silently."""
    positive, values = np.asarray(labels), np.asarray(scores)
    if positive.shape != values.shape or positive.ndim != 1:
        raise ValueError(f"labels {positive.shape} and scores {values.shape} must be vectors of the same length")
    if not np.all((positive == 0) | (positive == 1)):
        raise ValueError("labels must be 0 or 1")
    if np.isnan(values).any():
        raise ValueError(f"{int(np.isnan(values).sum())} of {len(values)} scores are NaN: training has diverged")
    return positive.astype(np.bool_), values
