"""One process behind an actor of Ray, as its launcher sees it, and the room that it takes.

What is done with it is in `launch/ray.py`; this file only passes that on.
"""

from __future__ import annotations

import os
import signal
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from regrow.core.identity import Identity
from regrow.launch.backend import Exit
from regrow.launch.lines import encode
from regrow.launch.orders import Assignment, Become, Command
from regrow.launch.placement import Need
from regrow.launch.reading import ReportReader

if TYPE_CHECKING:
    from regrow.launch.ray import RayProcesses

READ_BYTES = 1 << 16
SMALLEST_CPUS = 0.001  # a place in a group must ask for something


@dataclass(slots=True)
class Bundle:
    """A part of the placement group: room for a server on a node."""

    index: int
    node: str
    user: RemoteProcess | None = None


@dataclass(slots=True, eq=False)
class RemoteProcess:
    """One process behind an actor; a `Handle`."""

    who: Identity
    assignment: Assignment
    backend: RayProcesses
    log_path: Path
    node: str | None = None  # None: it waits for room
    actor: Any = None
    bundle: Bundle | None = None
    pid: int = 0
    exit: Exit | None = None
    heard_at: float = 0.0
    killed_at: float | None = None
    outbox: list[bytes] = field(default_factory=list)
    is_telling: bool = False
    whole_log: bool = False  # of one that an earlier launcher started: what it has written elsewhere is written again
    reader: ReportReader = field(init=False)

    def __post_init__(self) -> None:
        self.reader = ReportReader(lambda line: self.backend.write_log(self, b"stdout: " + line[:500] + b"\n"))

    @property
    def log(self) -> str:
        return str(self.log_path)

    def __repr__(self) -> str:
        return f"<{self.who} on {self.node} {self.exit or 'running'}>"

    def tell(self, command: Command) -> None:
        if self.exit is None:
            if isinstance(command, Become):
                command = Become(assignment=self.backend.address(command.assignment, self.node))
            self.outbox.append(encode(command))
            self.backend.send(self)

    def terminate(self) -> None:
        self.backend.act(self, signal.SIGTERM)

    def kill(self) -> None:
        if self.killed_at is None:
            self.killed_at = time.monotonic()
        self.backend.act(self, signal.SIGKILL)

    def pause(self) -> None:
        self.backend.act(self, signal.SIGSTOP)

    def resume(self) -> None:
        self.backend.act(self, signal.SIGCONT)

    def read_last_words(self) -> str | None:
        try:
            with self.log_path.open("rb") as log_file:
                log_file.seek(max(0, log_file.seek(0, os.SEEK_END) - READ_BYTES))
                lines = log_file.read().decode(errors="replace").split("\n")
        except OSError:
            return None
        return next((line.strip() for line in reversed(lines) if line.strip()), None)


def make_resources(need: Need) -> dict[str, float]:
    found = {"CPU": max(need.cpus, SMALLEST_CPUS)}
    return {**found, "memory": need.memory_bytes} if need.memory_bytes else found


def make_options(need: Need, *, is_server: bool) -> dict[str, Any]:
    """As Ray has them. A server asks for exactly what was reserved for one."""
    return {
        "num_cpus": max(need.cpus, SMALLEST_CPUS) if is_server else need.cpus,
        "num_gpus": need.gpus,
        "memory": need.memory_bytes or None,
    }
