"""The life of one row: every message that carries it, every failure around it, and what it contained.

regrow sim --replay async:0301... --story row=7               row 7 of the first table
regrow sim --profile sync --seed-first 12 --story row=1:7     row 7 of table 1
"""

from __future__ import annotations

from typing import Any

import numpy as np

from regrow.core.effects import Delivered
from regrow.core.identity import Identity
from regrow.core.messages import (
    Fault,
    Flush,
    Have,
    Pull,
    Push,
    Pushed,
    Restored,
    SnapAsk,
    Stream,
    StreamEnd,
    Tail,
    Undo,
    View,
)
from regrow.sim.world import World


def parse_story(text: str) -> tuple[int, int]:
    """(table, row) of `row=7` or `row=1:7`; ValueError says how it is written."""
    name, equals, place = text.partition("=")
    table, colon, row = place.rpartition(":")
    if name != "row" or not equals or not row.isdigit() or (colon and not table.isdigit()):
        raise ValueError("a story is asked for as row=7 (of the first table) or row=1:7 (row 7 of table 1)")
    return int(table or 0), int(row)


class Story:
    """Collects the lines; hand `note` and `watch` to `runner.run`."""

    def __init__(self, table: int, row: int) -> None:
        self.key = table, row
        self.lines: list[str] = []
        self.world: World | None = None

    def watch(self, world: World) -> None:
        if self.key not in world.reference.places.of_row:
            tables = ", ".join(f"table {t} has {spec.rows} rows" for t, spec in enumerate(world.job.tables))
            raise ValueError(f"there is no row {self.key[1]} of table {self.key[0]} in this run: {tables}")
        self.world = world
        self.server, self.slot = world.reference.places.of_row[self.key]
        spec = world.job.tables[self.key[0]]
        self.group = int(world.groups.of_member[self.key[0]][self.slot % spec.k])
        self.value = ""
        holders = ", ".join(f"S{holder}" for holder in world.groups.holders(self.server, self.group))
        pushes = " ".join(f"W{w}.{step}" for w, step in world.reference.units[self.key])
        self.lines.insert(
            0,
            f"row {self.key[1]} of table {self.key[0]} (k = {spec.k}, r = {spec.r}): slot {self.slot} of "
            f"S{self.server}, group {self.group}, parity at {holders}; pushes {pushes or 'none'}",
        )

    def note(self, text: str, target: Identity | None, event: Any) -> None:
        self._look()
        if event is None:
            self.lines.append(text)
        elif isinstance(event, Delivered) and target is not None and (part := self._part(target, event)):
            self.lines.append(f"{text} {type(event.message).__name__} {part}")

    def _look(self) -> None:
        """Says when the row itself has changed."""
        node = self.world.node("server", self.server) if self.world is not None else None
        if self.world is None or node is None or node.server is None:
            return
        store = node.server.store
        record = np.empty(store.record_floats(self.key[0]), np.float32)
        counts = np.zeros(len(self.world.job.tables), np.int32)
        counts[self.key[0]] = 1
        value = "absent"
        if node.server.ways.is_whole or not store.prepare(counts, np.array([self.slot], np.uint32))[1].size:
            store.read_records(self.key[0], self.slot, 1, record)
            value = self.world.reference.describe(self.key, record)
        if value != self.value:
            self.value = value
            self.lines.append(f"{'':14}S{self.server}: the row is {value}")

    def _part(self, target: Identity, event: Delivered) -> str:
        """What a message says about the row, or nothing."""
        message, source = event.message, event.source
        if isinstance(message, View):
            members = " ".join(f"{m.id}.{m.incarnation}{'*' if m.recovering else ''}" for m in message.servers)
            return f"{message.epoch & 0xFFFFFFFF}: {members} {message.lost}"
        if isinstance(message, Pushed) and source.id == self.server:
            return f"{message.seq} durable {message.durable}"
        if isinstance(message, Push | Pull | Fault) and self._here(
            message, target if target.role == "server" else source
        ):
            return f"{message.seq if isinstance(message, Push) else ''} has the row"
        if isinstance(message, Fault) and source.id == self.server:
            return "of the row" if self._index(message) is not None else ""
        if isinstance(message, SnapAsk) and self._here(message, target):
            return f"request {message.request}"
        return self._group_part(target, event)

    def _here(self, message: Any, server: Identity) -> bool:
        return server.id == self.server and self._index(message) is not None

    def _group_part(self, target: Identity, event: Delivered) -> str:
        message, source = event.message, event.source
        if isinstance(message, Flush | Stream | StreamEnd) and message.group == self.group:
            number = "" if isinstance(message, Stream) else f"{message.number} marks {message.marks}"
            return f"{number} {self._record(message)}" if source.id == self.server else ""
        if isinstance(message, Tail) and (message.source, message.group) == (self.server, self.group):
            return f"{message.number} {self._record(message)}"
        if isinstance(message, Have | Undo) and target.id == self.server and message.group == self.group:
            return f"{message.number} marks {message.marks}" if isinstance(message, Have) else self._record(message)
        if isinstance(message, Restored) and target.id == self.server:
            return self._record(message)
        return ""

    def _index(self, message: Any) -> int | None:
        """Which of a message's rows of this table it is."""
        start = int(message.counts[: self.key[0]].sum())
        slots = message.slots[start : start + int(message.counts[self.key[0]])].tolist()
        return slots.index(self.slot) if self.slot in slots else None

    def _record(self, message: Any) -> str:
        """The row's own record in a message of records, in words."""
        index = self._index(message)
        if index is None or self.world is None:
            return ""
        floats = [self.world.reference.initial[t, 0].size for t in range(len(self.world.job.tables))]
        offset = sum(int(c) * f for c, f in zip(message.counts[: self.key[0]], floats, strict=False))
        values = message.relatives if isinstance(message, Restored) else message.deltas
        at = offset + index * floats[self.key[0]]
        relative = np.ascontiguousarray(values[at : at + floats[self.key[0]]])
        if isinstance(message, Restored | Stream):
            return f"the row: {self.world.checker.describe(self.key, relative)}"
        return f"the row changes in {int(np.count_nonzero(relative.view(np.uint32)))} places"
