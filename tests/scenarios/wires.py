"""Channels between the machines of a scenario: real links (`core.link`), and frames that wait until they are delivered.

One FIFO queue per direction. What is on its way when a connection breaks is gone, and the links send it again on the
next connection. Nothing here knows what a message means.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections import deque

from regrow.core.framing import Stamp
from regrow.core.identity import Identity
from regrow.core.link import Link
from regrow.core.messages import Message

Pair = tuple[Identity, Identity]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Frame:
    order: int  # of all frames: the oldest is delivered first
    stamp: Stamp
    message: Message
    again: bool  # it was on its way before, on a connection that broke


class Wires:
    """All links of a cluster."""

    def __init__(self) -> None:
        self.queues: dict[Pair, deque[Frame]] = {}  # (source, target)
        self._links: dict[Pair, Link] = {}  # (local, peer): one end
        self._open: set[Pair] = set()
        self._forgotten: set[Pair] = set()  # (who, whom)
        self._numbered: dict[Pair, int] = {}  # the newest frame that was ever on its way
        self._order = itertools.count()

    def is_open(self, one: Identity, other: Identity) -> bool:
        return (one, other) in self._open

    def may_open(self, one: Identity, other: Identity) -> bool:
        return not {(one, other), (other, one)} & (self._open | self._forgotten)

    def open(self, one: Identity, other: Identity) -> None:
        """A connection: each end sends what the other does not have yet."""
        self._open |= {(one, other), (other, one)}
        for local, peer in ((one, other), (other, one)):
            for stamp, message in self._link(local, peer).resume(self._link(peer, local).received):
                self._put(local, peer, stamp, message)

    def send(self, source: Identity, target: Identity, message: Message) -> None:
        """Kept by the link until it is acknowledged; on its way if there is a connection."""
        if (source, target) in self._forgotten:
            return
        stamp = self._link(source, target).send(message)
        if (source, target) in self._open:
            self._put(source, target, stamp, message)

    def take(self, pair: Pair) -> tuple[Frame, bool]:
        """The next frame of a queue, and whether the link at its end lets it in."""
        frame = self.queues[pair].popleft()
        source, target = pair
        return frame, self._link(target, source).accept(frame.stamp)

    def close(self, one: Identity, other: Identity) -> None:
        """The connection breaks, and with it what was on its way."""
        for pair in ((one, other), (other, one)):
            self.queues.pop(pair, None)
            self._lose(pair)

    def _lose(self, pair: Pair) -> None:
        """For one end a connection is gone."""
        if pair in self._open:
            self._open.discard(pair)
            self._links[pair].lose_connection()

    def forget(self, who: Identity, whom: Identity) -> None:
        """Never again."""
        self.close(who, whom)
        self._forgotten.add((who, whom))
        if (link := self._links.pop((who, whom), None)) is not None:
            link.end()

    def end(self, node: Identity) -> None:
        """A process is gone. What it had sent may still arrive."""
        for pair in [pair for pair in self._links if pair[1] == node]:
            self._lose(pair)
        self._open = {pair for pair in self._open if pair[0] != node}
        self._links = {pair: link for pair, link in self._links.items() if pair[0] != node}
        self.queues = {pair: queue for pair, queue in self.queues.items() if pair[1] != node}

    def _put(self, source: Identity, target: Identity, stamp: Stamp, message: Message) -> None:
        pair = source, target
        again = stamp.number <= self._numbered.get(pair, 0)
        self._numbered[pair] = max(stamp.number, self._numbered.get(pair, 0))
        frame = Frame(order=next(self._order), stamp=stamp, message=message, again=again)
        self.queues.setdefault(pair, deque()).append(frame)

    def _link(self, local: Identity, peer: Identity) -> Link:
        if (local, peer) not in self._links:
            self._links[local, peer] = Link(local=local, peer=peer)
        return self._links[local, peer]
