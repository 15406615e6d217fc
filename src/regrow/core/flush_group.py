"""One group of a server's rows, as its holders know it: a record that the flusher keeps, without rules of its own."""

from __future__ import annotations

import dataclasses
from collections import deque

from regrow.core.messages import Float32Array, Int32Array, UInt32Array

Part = tuple[Int32Array, UInt32Array, Float32Array]  # counts, slots, records


@dataclasses.dataclass(slots=True)
class StreamOut:
    """How far a new holder has been streamed to. A row is streamed when its (table, block) is before this."""

    table: int = 0
    block: int = 0
    underway: int = 0
    ending: bool = False


class FlushGroup:
    """One group of this server: what its holders know."""

    def __init__(self, marks: int) -> None:
        self.number = 0  # of the last flush
        self.flushed: tuple[int, ...] = (0,) * marks  # the marks of that flush
        self.updates = 0  # and how many updates there had been then, if this is the group that is copied
        self.history: dict[int, tuple[int, ...]] = {0: self.flushed}  # number -> marks, from the least acknowledged
        self.acked: dict[int, int] = {}  # holder -> last flush it has
        self.prepared: dict[int, int] = {}  # holder -> last flush it has staged (two-phase commit)
        self.committed = 0  # the last flush that holders were told to commit (two-phase commit)
        self.since: dict[int, int] = {}  # holder -> the flush its stream ended with
        self.streams: dict[int, StreamOut] = {}
        self.last: Part | None = None  # what the last flush changed: the undo of a synchronous step
        self.staged: deque[tuple[int, tuple[int, ...], Part]] = deque()  # sent, not committed (two-phase commit)
        self.active = True  # False at a replacement until its holders have told where they are


def find_least(group: FlushGroup, acked: dict[int, int]) -> int | None:
    """The last flush that every holder that counts has; None: none of them counts, all are streamed to."""
    if group.streams:
        acked = {holder: number for holder, number in acked.items() if holder not in group.streams}
    return min(acked.values()) if acked else None
