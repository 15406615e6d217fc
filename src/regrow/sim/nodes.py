"""The processes of a simulated cluster, and what stands between two of their events."""

from __future__ import annotations

import dataclasses
import zlib
from collections.abc import Callable
from typing import Any

from regrow.core.identity import Identity
from regrow.sim.workers import Program


def name_value(kind: type) -> int:
    """A number for the name of a kind of event."""
    return zlib.crc32(kind.__name__.encode())


class Violation(Exception):
    """An invariant does not hold."""

    def __init__(self, invariant: str, text: str) -> None:
        super().__init__(f"{invariant}: {text}")
        self.invariant = invariant


class Fallen(Exception):
    """Everybody is ended by the launcher, to begin again from the newest checkpoint. Not a violation."""


@dataclasses.dataclass(slots=True)
class Node:
    """A process: its machine, and whether it runs."""

    identity: Identity
    machine: Any
    program: Program | None = None
    alive: bool = True
    paused: bool = False
    crash_after: int | None = None  # dies after so many effects of an event that has more
    number: int = 0  # counts the nodes of a world up
    is_server: bool = False
    falls: bool = False  # its death is the end of everybody
    hung: bool = False  # paused for good: nobody lets it go on
    hidden: bool = False  # the launcher cannot reach it: replaced, it goes on as a zombie
    starved: bool = False  # it gets no ticks
    dials: int = 0  # the incarnation of the coordinator whose address it knows
    changed: bool = True  # something happened since its queues were looked at; a tick that asks for nothing is nothing

    @property
    def server(self) -> Any:
        """What is behind the door of a server that has a view, else None."""
        return self.machine.server


@dataclasses.dataclass(slots=True)
class Action:
    """Something that the launcher or chance will do."""

    due: int
    what: Callable[[], None]
    number: int  # counts the actions of a world up
    at: float = 0.0  # not before this time
    of: Node | None = None  # what this process does by itself; nobody waits for it
