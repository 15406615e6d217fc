"""Channels between nodes: the real numbering of `core.link`, without sockets.

A **wire** carries one direction of a connection: frames and, last, the news that it broke. What was on a wire when
it was reset is gone, and the links at both ends send it again on the next connection. FIFO within a wire; which wire
delivers next is the scheduler's choice, by `due`.
"""

from __future__ import annotations

import zlib
from collections import deque
from collections.abc import Callable

import msgspec

from regrow.core.framing import Stamp
from regrow.core.identity import Identity
from regrow.core.link import Link
from regrow.core.messages import Message

COORDINATOR = "coordinator"
PAST_FRAMES_MAX = 400  # between two places, remembered for faults that bring them again

Place = tuple[str, int]  # role and number, whatever the incarnation


class Item(msgspec.Struct, frozen=True):
    """Something on a wire. `kind`: frame, opened (the other end accepted us), lost."""

    due: int
    kind: str
    stamp: Stamp | None = None
    message: Message | None = None
    checksum: int = 0
    reason: str = ""


class Wire:
    """What is on its way from one identity to another. `number` counts the wires of a world up."""

    __slots__ = ("items", "number", "source", "target")

    def __init__(self, source: Identity, target: Identity, number: int) -> None:
        self.source = source
        self.target = target
        self.number = number
        self.items: deque[Item] = deque()


class Network:
    """All links of a world. Knows nothing of machines: it says what arrives, the world hands it over.

    Whoever keeps a list of what may arrive next is told of every wire that was empty and is not any more
    (`on_filled`), that connections came or went (`on_changed`): then all that was known is void, and that an end of one
    may be used from now on (`on_opened`), which changes nothing of what is on the wires.
    """

    def __init__(
        self,
        delay: Callable[[Identity, Message], int],
        *,
        on_filled: Callable[[Wire], None],
        on_changed: Callable[[], None],
        on_opened: Callable[[], None],
    ) -> None:
        self.order = 0  # events so far; the scheduler counts it up
        self.links: dict[tuple[Identity, Identity], Link] = {}  # (local, peer): one end
        self.open: set[tuple[Identity, Identity]] = set()  # ends that may put frames on their wire; membership only
        self.wires: dict[tuple[Identity, Identity], Wire] = {}
        self.dials: dict[tuple[Identity, Identity | str], int] = {}  # (who, whom) -> due
        self.forgotten: set[tuple[Identity, Identity]] = set()  # (who, whom)
        self.resent = 0
        self.kept_bytes_max = 0  # the most that any link ever kept
        self._wires_made = 0
        self.stuck: dict[tuple[Identity, Identity], None] = {}  # (source, target): nothing arrives for now
        self.past: dict[tuple[Place, Place], deque[Item]] | None = None  # what arrived last, if somebody asks for it
        self._delay = delay
        self._on_filled = on_filled
        self._on_changed = on_changed
        self._on_opened = on_opened

    # --- Sending ---

    def send(self, source: Identity, target: Identity, message: Message) -> None:
        """Queues a message until there is a connection."""
        ends = source, target
        if ends in self.forgotten:
            return
        link = self.links.get(ends) or self._link(source, target)
        stamp = link.send(message)
        if link.kept_bytes > self.kept_bytes_max:
            self.kept_bytes_max = link.kept_bytes
        if ends in self.open:
            self._put(ends, stamp, message)

    def _put(self, ends: tuple[Identity, Identity], stamp: Stamp, message: Message) -> None:
        wire = self.wires.get(ends) or self._wire(*ends)
        due = self.order + self._delay(ends[1], message)
        value = checksum(message) if message.SECTION_FIELDS else message.KIND
        self._append(wire, Item(due, "frame", stamp, message, value))

    def _append(self, wire: Wire, item: Item) -> None:
        wire.items.append(item)
        if len(wire.items) == 1:
            self._on_filled(wire)

    def _link(self, local: Identity, peer: Identity) -> Link:
        link = self.links.get((local, peer))
        if link is None:
            link = self.links[local, peer] = Link(local=local, peer=peer)
        return link

    def _wire(self, source: Identity, target: Identity) -> Wire:
        wire = self.wires.get((source, target))
        if wire is None:
            self._wires_made += 1
            self._on_changed()
            wire = self.wires[source, target] = Wire(source, target, self._wires_made)
        return wire

    # --- Connections ---

    def dial(self, who: Identity, whom: Identity | str) -> None:
        """Keeps trying until it is connected or forgotten."""
        if isinstance(whom, Identity) and ((who, whom) in self.forgotten or (who, whom) in self.wires):
            return
        if (who, whom) not in self.dials:
            self.dials[who, whom] = self.order
            self._on_changed()

    def connect(self, who: Identity, whom: Identity) -> None:
        """The handshake: `whom` can send at once, `who` when the answer has come."""
        assert (who, whom) not in self.wires
        self._wire(who, whom)
        wire = self._wire(whom, who)
        self._append(wire, Item(self.order, "opened"))
        self._resume(whom, who)

    def finish_opening(self, who: Identity, whom: Identity) -> None:
        """The answer has come. Whoever gave it may be gone already."""
        if (who, whom) in self.wires:
            self._resume(who, whom)

    def _resume(self, local: Identity, peer: Identity) -> None:
        link = self._link(local, peer)
        far = self.links.get((peer, local))
        kept = link.resume(far.received if far is not None else 0)
        if link.acknowledged:
            self.resent += len(kept)
        self.open.add((local, peer))
        self._on_opened()
        for stamp, message in kept:
            self._put((local, peer), stamp, message)

    def accept(self, wire: Wire, item: Item) -> bool:
        """Whether a frame that arrives is to be delivered."""
        ends = wire.target, wire.source
        link = self.links.get(ends) or self._link(*ends)
        assert item.stamp is not None
        taken = link.accept(item.stamp, 64)
        if taken and self.past is not None:
            self._remember(wire, item)
        if link.acknowledgement_due and ends in self.open:
            back = self._wire(wire.target, wire.source)
            self._append(back, Item(self.order, "ack", link.acknowledgement()))
        return taken

    def _remember(self, wire: Wire, item: Item) -> None:
        assert self.past is not None
        ends = (wire.source.role, wire.source.id), (wire.target.role, wire.target.id)
        self.past.setdefault(ends, deque(maxlen=PAST_FRAMES_MAX)).append(item)

    def is_cut(self, one: Identity, other: Identity) -> bool:
        """Whether anything is stuck between the two, in any direction: no connection can be made."""
        return bool(self.stuck) and ((one, other) in self.stuck or (other, one) in self.stuck)

    def _close(self, local: Identity, peer: Identity) -> None:
        """For `local` the connection to `peer` is gone."""
        self._on_changed()
        if (local, peer) in self.open:
            self.open.discard((local, peer))
            if (link := self.links.get((local, peer))) is not None:
                link.lose_connection()

    def reset(self, one: Identity, other: Identity, keep: int) -> list[Wire]:
        """A connection breaks: `keep` items of each wire still arrive, the rest is lost. Returns the lost frames."""
        self._on_changed()
        gone = []
        for source, target in ((one, other), (other, one)):
            wire = self._wire(source, target)
            gone.append(Wire(source, target, 0))
            while len(wire.items) > keep:
                item = wire.items.pop()
                if item.kind == "frame":
                    gone[-1].items.appendleft(item)
            wire.items.append(Item(self.order, "lost", reason="the connection was reset"))
            self._close(source, target)
        return gone

    def end_wire(self, wire: Wire) -> bool:
        """The end of a wire was reached; True when the other direction has ended too: both may connect again."""
        self._on_changed()
        del self.wires[wire.source, wire.target]
        self._close(wire.target, wire.source)
        return (wire.target, wire.source) not in self.wires

    def forget(self, who: Identity, whom: Identity) -> list[Message]:
        """Never again. Returns what was still on its way from `whom`."""
        self._on_changed()
        self.forgotten.add((who, whom))
        self.dials.pop((who, whom), None)
        self.open.discard((who, whom))
        if (link := self.links.pop((who, whom), None)) is not None:
            link.end()
        late = self.wires.pop((whom, who), None)
        self._close(whom, who)
        if (who, whom) in self.wires:
            self.wires[who, whom].items.append(Item(self.order, "lost", reason="closed by the other end"))
        items = late.items if late is not None else ()
        return [item.message for item in items if item.message is not None]

    def crash(self, node: Identity, keeps: Callable[[int], int]) -> list[Identity]:
        """A process ends: a part of what it sent still arrives, nothing reaches it. Returns who hears of it."""
        self._on_changed()
        told = []
        for (source, target), wire in list(self.wires.items()):
            if target == node:
                del self.wires[source, target]
            elif source == node:
                if any(item.kind == "lost" for item in wire.items):
                    continue
                keep = keeps(len(wire.items))
                while len(wire.items) > keep:
                    wire.items.pop()
                wire.items.append(Item(self.order, "lost", reason="the process ended"))
                told.append(target)
        self.links = {ends: link for ends, link in self.links.items() if ends[0] != node}
        self.dials = {pair: due for pair, due in self.dials.items() if pair[0] != node}
        for local, peer in [ends for ends in self.open if ends[1] == node]:
            self._close(local, peer)
        self.open = {ends for ends in self.open if ends[0] != node}
        return told

    def pairs(self) -> list[tuple[Identity, Identity]]:
        """Connections that are open at both ends, each once, in order of age."""
        return [(a, b) for a, b in self.wires if a < b and (a, b) in self.open and (b, a) in self.open]


def checksum(message: Message) -> int:
    """Of all arrays: what was sent must not change while it is on its way."""
    value = message.KIND
    for name in message.SECTION_FIELDS:
        value = zlib.crc32(getattr(message, name), value)
    return value


def short(identity: Identity) -> str:
    return f"{identity}" if not identity.incarnation else f"{identity}'{identity.incarnation}"
