"""One bit per block, as the store keeps them and messages carry them: 64 to a word, the least significant first."""

from __future__ import annotations

from typing import Any

import numpy as np

from regrow.core.messages import UInt32Array, UInt64Array

Bools = np.ndarray[Any, np.dtype[np.bool_]]


def bits(words: UInt64Array, count: int) -> Bools:
    """One bool per bit, the least significant first."""
    return np.unpackbits(words.view(np.uint8), bitorder="little")[:count].view(np.bool_)


def bits_at(words: UInt64Array, blocks: UInt32Array) -> Bools:
    """The bits of these blocks only."""
    bits: np.ndarray[Any, np.dtype[np.uint64]] = words[blocks >> 6] >> (blocks & 63).astype(np.uint64)
    return (bits & np.uint64(1)).astype(np.bool_)


def to_words(blocks: np.ndarray[Any, np.dtype[np.int64]], count: int) -> UInt64Array:
    """Words for so many bits, with these set."""
    found = np.zeros(-(-count // 64) * 64, np.bool_)
    found[blocks] = True
    return np.packbits(found, bitorder="little").view(np.uint64)
