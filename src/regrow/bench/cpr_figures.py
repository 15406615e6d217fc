"""Arithmetic of `regrow bench cpr`: correlations, slopes, and means with what chance does to them. Pure."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np


def correlate(x: Sequence[float], y: Sequence[float]) -> float | None:
    """Pearson's r; None where one of the two does not vary, or there are no three points."""
    if len(x) < 3:
        return None
    across, up = np.asarray(x, np.float64), np.asarray(y, np.float64)
    if not across.std() or not up.std():
        return None
    return float(np.corrcoef(across, up)[0, 1])


def fit_slope(x: Sequence[float], y: Sequence[float]) -> float | None:
    """Of the line through the origin with the least squares: nothing lost, nothing changed."""
    across, up = np.asarray(x, np.float64), np.asarray(y, np.float64)
    square = float(across @ across)
    return float(across @ up) / square if square else None


def spread_of_correlation(r: float, count: int) -> tuple[float, float] | None:
    """Where the true one lies, 95 of 100 times (Fisher's transform); None with too few points."""
    if count < 5 or abs(r) >= 1.0:
        return None
    middle, width = math.atanh(r), 1.96 / math.sqrt(count - 3)
    return math.tanh(middle - width), math.tanh(middle + width)


@dataclass(frozen=True, slots=True, kw_only=True)
class Mean:
    """A mean and its standard error; of a single value nobody knows that."""

    value: float
    error: float | None
    count: int

    @classmethod
    def of(cls, values: Sequence[float]) -> Mean:
        error = statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else None
        return cls(value=statistics.fmean(values), error=error, count=len(values))

    def resolves(self, size: float) -> bool:
        """Whether a difference of this size would be seen: it is twice the standard error, or more."""
        return self.error is not None and 2.0 * self.error <= size

    def to_dict(self) -> dict[str, Any]:
        return {"mean": self.value, "standard_error": self.error, "count": self.count}

    def __str__(self) -> str:
        return f"{self.value:+.5f}" + ("" if self.error is None else f" ± {self.error:.5f}")
