"""Small checks and sums that the stupid store and its priorities share."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from regrow.store.interface import Float32Array, UInt64Array


def check(fine: Any, reason: str) -> None:
    if not fine:
        raise ValueError(reason)


def check_array(array: Any, dtype: Any) -> None:
    check(array.dtype == dtype and array.flags.c_contiguous and array.flags.aligned, f"not an array of {dtype}")


def xored(a: Float32Array, b: Float32Array) -> Float32Array:
    return (a.view(np.uint32) ^ b.view(np.uint32)).view(np.float32)


def words_of(numbers: Iterator[int], end: int) -> UInt64Array:
    """A bitmap of `end` bits."""
    words = [0] * -(-end // 64)
    for number in numbers:
        words[number // 64] |= 1 << number % 64
    return np.array(words, np.uint64)
