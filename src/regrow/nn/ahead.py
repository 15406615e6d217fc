"""Steps before their time: planned, and told to servers that have to bring their rows, from disk or while they are
coming back, so that rows come before they are needed."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from regrow.nn.lookup import Part
from regrow.runtime.client import Client

# While a server is coming back: steps that it is told of at once. Too few: every step that lacks a row costs messages
# of its own. Too many: memory, and all are told late.
EXPECTED_TOGETHER = 4
EXPECTED_AHEAD = 2  # Steps in which rows can come before they are needed.
# Steps after a failure before any are told of: first come the rows that every batch needs, and nothing shall be before
# them. Too many: messages for every step meanwhile.
EXPECTED_AFTER = 12
# Rows on disk: steps that are told before they are pulled. Too few: pulls wait for the disk. Too many: what was read
# has left the cache when it is pulled, and batches wait in memory.
TOLD_AHEAD = 1


class Planned(NamedTuple):
    """A step: its batches, and which rows they need."""

    batches: list[Any]  # none: others have some in this step
    parts: list[Part]  # of each batch
    plan: Any
    chosen: tuple[bool, ...]  # which collections the plan is for


def plan_ahead(client: Client, dealt: Iterator[Any], plan: Callable[[Any], Planned]) -> Iterator[Planned]:
    """Steps with their plans. While a server is coming back they are made ahead of their use, two at a time so that no
    step waits for many, and it is told of several at once: rows that are missing then cost one round of messages for
    all. Servers with rows on disk are told of each step, one step before it is pulled."""
    if client.reads_ahead:
        yield from _tell_each(client, map(plan, dealt))
        return
    waiting: deque[Planned] = deque()
    untold: list[Any] = []
    steps = 0  # since a server was lost
    while True:
        steps = steps + 1 if client.recovering else 0
        ahead = steps > EXPECTED_AFTER and len(waiting) < EXPECTED_AHEAD + EXPECTED_TOGETHER
        for batches in itertools.islice(dealt, 2 if ahead else 0 if waiting else 1):
            waiting.append(plan(batches))
            untold.append(waiting[-1].plan)
        if steps <= EXPECTED_AFTER:
            untold.clear()
        elif len(untold) >= EXPECTED_TOGETHER:
            client.expect(untold)
            untold = []
        if not waiting:
            return
        yield waiting.popleft()


def _tell_each(client: Client, planned: Iterator[Planned]) -> Iterator[Planned]:
    waiting: deque[Planned] = deque()
    for each in planned:
        client.expect([each.plan])
        waiting.append(each)
        if len(waiting) > TOLD_AHEAD:
            yield waiting.popleft()
    yield from waiting


def group(dealt: Iterator[Any], count: int) -> Iterator[list[Any]]:
    """The batches of each step, `count` of them; None among them is no batch."""
    while batches := list(itertools.islice(dealt, count)):
        yield [batch for batch in batches if batch is not None]
