"""Metrics against brute force: every pair compared, every loss written out."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from regrow.metrics import BINS, ScoreHistogram, auc, logloss


def auc_twin(labels: list[int], scores: list[float]) -> float:
    wins = pairs = 0.0
    for positive in (s for s, y in zip(scores, labels, strict=True) if y == 1):
        for negative in (s for s, y in zip(scores, labels, strict=True) if y == 0):
            pairs += 1
            wins += 1.0 if positive > negative else 0.5 if positive == negative else 0.0
    return wins / pairs if pairs else math.nan


# Few different scores, so that ties are common.
_SAMPLES = st.lists(st.tuples(st.integers(0, 1), st.integers(-4, 4)), max_size=40)


@settings(max_examples=300, deadline=None)
@given(_SAMPLES)
def test_auc_equals_its_twin(samples: list[tuple[int, int]]) -> None:
    labels, scores = [y for y, _ in samples], [float(s) for _, s in samples]
    np.testing.assert_equal(auc(np.array(labels), np.array(scores, dtype=np.float32)), auc_twin(labels, scores))


def test_auc_of_simple_cases() -> None:
    assert auc([0, 1], [0.0, 1.0]) == 1.0
    assert auc([1, 0], [0.0, 1.0]) == 0.0
    assert auc([1, 0, 1, 0], [2.0, 2.0, 2.0, 2.0]) == 0.5
    assert math.isnan(auc([1, 1], [0.0, 1.0]))
    assert math.isnan(auc([], []))
    assert auc([0, 1], [-math.inf, math.inf]) == 1.0


def test_auc_does_not_overflow_with_many_samples() -> None:
    labels = np.arange(400_000) % 2
    assert auc(labels, labels.astype(np.float32)) == 1.0


@settings(max_examples=100, deadline=None)
@given(_SAMPLES.filter(len))
def test_logloss_equals_its_twin(samples: list[tuple[int, int]]) -> None:
    losses = []
    for label, logit in samples:
        likelihood = 1 / (1 + math.exp(-logit))
        losses.append(-math.log(likelihood if label else 1 - likelihood))
    got = logloss([y for y, _ in samples], np.array([s for _, s in samples], dtype=np.float32))
    assert got == pytest.approx(sum(losses) / len(losses), rel=1e-9)


def test_logloss_survives_certainty() -> None:
    assert logloss([1, 0], [1000.0, -1000.0]) == 0.0
    assert logloss([0, 1], [1000.0, -1000.0]) == 1000.0
    assert math.isnan(logloss([], []))


def test_histogram_is_near_and_merges_exactly() -> None:
    generator = np.random.default_rng(3)
    logits = generator.normal(-1, 1.5, 20_000).astype(np.float32)
    labels = (generator.random(20_000) < 1 / (1 + np.exp(-logits))).astype(np.float32)
    whole = ScoreHistogram()
    whole.add(labels, logits)
    parts = ScoreHistogram()
    for piece in np.array_split(np.arange(20_000), 7):
        part = ScoreHistogram()
        part.add(labels[piece], logits[piece])
        parts = parts + part
    assert np.array_equal(whole.positives, parts.positives)
    assert np.array_equal(whole.negatives, parts.negatives)
    assert abs(whole.auc() - auc(labels, logits)) < 0.001
    # Exactly the AUC of scores rounded to bins.
    bins = np.minimum((BINS / (1 + np.exp(-logits))).astype(int), BINS - 1)
    assert whole.auc() == pytest.approx(auc(labels, bins), abs=1e-12)


def test_histogram_of_extremes() -> None:
    histogram = ScoreHistogram()
    histogram.add([1, 0, 1], np.array([1e6, -1e6, 0.0], dtype=np.float32))
    assert (histogram.positives[-1], histogram.positives[BINS // 2], histogram.negatives[0]) == (1, 1, 1)
    assert histogram.auc() == 1.0
    assert math.isnan(ScoreHistogram().auc())
    assert "2 positives, 1 negatives" in repr(histogram)


def test_histogram_from_json() -> None:
    histogram = ScoreHistogram()
    histogram.add([1, 0], [2.0, -2.0])
    again = ScoreHistogram(histogram.positives.tolist(), histogram.negatives.tolist())
    assert np.array_equal(again.positives, histogram.positives)
    with pytest.raises(ValueError, match="64 bins"):
        ScoreHistogram([1, 2], [3, 4])


@pytest.mark.parametrize("metric", [auc, logloss])
def test_wrong_input_is_named(metric: object) -> None:
    assert callable(metric)
    with pytest.raises(ValueError, match="same length"):
        metric([0, 1], [0.5])
    with pytest.raises(ValueError, match="0 or 1"):
        metric([0, 2], [0.5, 0.5])
    with pytest.raises(ValueError, match="1 of 2 scores are NaN"):
        metric([0, 1], [0.5, math.nan])
