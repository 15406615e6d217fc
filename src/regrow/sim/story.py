"""The life of one row: every message that carries it, every failure around it, and what it contained.

    regrow sim --replay async:0301... --story row=7          row 7 of the first table
    regrow sim --profile sync --seed-first 12 --story row=1:7   row 7 of table 1
"""

from __future__ import annotations

from typing import Any

import numpy as np

from regrow.core.effects import Delivered
from regrow.core.messages import (
    Flush,
    Have,
    Message,
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
        self._world: World | None = None

    def watch(self, world: World) -> None:
        if self.key not in world.reference.places.of_row:
            tables = ", ".join(f"table {t} has {spec.rows} rows" for t, spec in enumerate(world.job.tables))
            raise ValueError(f"there is no row {self.key[1]} of table {self.key[0]} in this run: {tables}")
        self._world = world
        server, slot = world.reference.places.of_row[self.key]
        spec = world.job.tables[self.key[0]]
        group = int(world.groups.of_member[self.key[0]][slot % spec.k])
        holders = ", ".join(f"S{holder}" for holder in world.groups.holders(server, group))
        pushes = " ".join(f"W{w}.{step}" for w, step in world.reference.units[self.key])
        self.home = server, slot, group
        self.lines.append(
            f"row {self.key[1]} of table {self.key[0]} (k = {spec.k}, r = {spec.r}): slot {slot} of S{server}, group {group}, "
            f"parity at {holders}; pushes {pushes or 'none'}"
        )

    def note(self, text: str, event: Any) -> None:
        if event is None:
            self.lines.append(text)
        elif isinstance(event, Delivered) and (part := self._part(event)):
            self.lines.append(f"{text} {type(event.message).__name__} {part}")

    def _part(self, event: Delivered) -> str:
        """What a message says about the row, or nothing."""
        message = event.message
        server, slot, group = self.home
        if isinstance(message, View):
            members = " ".join(f"{m.id}.{m.incarnation}{'*' if m.recovering else ''}" for m in message.servers)
            return f"{message.epoch & 0xFFFFFFFF}: {members} {message.lost}"
        if isinstance(message, Push | Pushed) and server in (event.source.id, self._target(message)):
            return self._push_part(message, event)
        if isinstance(message, Flush | Stream | StreamEnd | Undo):
            if message.group != group:
                return ""
            number = f"{message.number} marks {message.marks}" if isinstance(message, Flush | StreamEnd) else ""
            return f"{number} {self._record(message)}" if event.source.id == server or isinstance(message, Undo) else ""
        if isinstance(message, Tail):
            return f"{message.number} {self._record(message)}" if (message.source, message.group) == (server, group) else ""
        if isinstance(message, Have):
            return f"{message.number} marks {message.marks}" if message.group == group else ""
        if isinstance(message, Restored):
            return self._record(message)
        if isinstance(message, SnapAsk) and message.table == self.key[0] and slot in message.slots.tolist():
            return f"request {message.request}"
        return ""

    def _target(self, message: Message) -> int:
        return -1

    def _push_part(self, message: Any, event: Delivered) -> str:
        if isinstance(message, Pushed):
            return f"{message.seq} durable {message.durable}" if event.source.id == self.home[0] else ""
        return ""

    def _record(self, message: Any) -> str:
        """The row's own record in a message of records, in words."""
        assert self._world is not None
        table, slot = self.key[0], self.home[1]
        floats = [self._world.reference.initial[t, 0].size for t in range(len(self._world.job.tables))]
        start = int(message.counts[:table].sum())
        offset = sum(int(c) * f for c, f in zip(message.counts[:table], floats, strict=False))
        slots = message.slots[start : start + int(message.counts[table])].tolist()
        if slot not in slots:
            return ""
        values = message.relatives if isinstance(message, Restored) else message.deltas
        at = offset + slots.index(slot) * floats[table]
        relative = np.ascontiguousarray(values[at : at + floats[table]])
        if isinstance(message, Restored):
            return f"the row: {self._world.checker.told(self.key, relative)}"
        return f"the row changes in {int(np.count_nonzero(relative.view(np.uint32)))} places"


__all__ = ["Pull", "Story", "parse_story"]
