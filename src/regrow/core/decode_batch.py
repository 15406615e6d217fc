"""What a decoder keeps of stripes that lost members: which are to be decoded, and those that are being decoded now.
Records, without rules of their own."""

from __future__ import annotations

import dataclasses
from collections import deque
from typing import Any, Protocol

import numpy as np

from regrow.core.bitmaps import Bools
from regrow.core.identity import Identity
from regrow.core.messages import Float32Array, Int32Array, UInt32Array

Places = np.ndarray[Any, np.dtype[np.int64]]


class Standing(Protocol):
    """How far a holder is with one group of one source."""

    number: int
    ended: bool
    agreed: bool
    is_streamed: bool
    recent: deque[tuple[Int32Array, UInt32Array]]  # rows of its last flushes


@dataclasses.dataclass(slots=True)
class Sweep:
    """Stripes of one shape whose parity `q` is here and that lost members: what to decode, and how far it is.

    All tables with equal k and r have their stripes on the same servers, so they are decoded together.
    """

    k: int
    r: int
    q: int
    tables: tuple[int, ...]
    unknown: tuple[int, ...]  # lost data members
    partners: tuple[int, ...]  # other parities whose syndromes are needed
    # By place: touched in a lost member, and not begun. Known when the holders have agreed.
    todo: Bools | None = None
    cursor: int = 0  # in the background: places before it are done
    # Those of them that changed of late, which go first; None: there are none, or they are done.
    hot: Bools | None = None
    hot_cursor: int = 0

    @property
    def key(self) -> tuple[int, int, int]:
        return self.k, self.r, self.q


@dataclasses.dataclass(frozen=True, slots=True)
class Stripes:
    """Some blocks of several tables. A place is the number of a block, counted through all tables of the job."""

    counts: Int32Array  # by table
    blocks: UInt32Array  # ascending within a table


@dataclasses.dataclass(slots=True)
class Batch:
    """Some stripes being decoded together."""

    sweep: Sweep
    stripes: Stripes
    floats: int  # of all its records
    parity_without: Float32Array | None  # the sum: answers, and later flushes of those who have answered; None: zeros
    waiting: set[int]  # those who have not answered: members, and k + q for other parities
    syndromes: dict[int, tuple[tuple[int, ...], Float32Array]]
    background: bool
    numbers: tuple[int, ...]  # of the lost members' flushes, when it began
    changes: list[tuple[int, int, Places]]  # and since: (index of the member, flush, what it changed)
    asked_by: Identity | None = None  # another holder wants the syndrome
    asked_request: int = 0

    def sum_up(self) -> Float32Array:
        """What is taken out of the parity. It takes memory when there is something."""
        if self.parity_without is None:
            self.parity_without = np.zeros(self.floats, np.float32)
        return self.parity_without
