"""What every `Parent` does with what the launcher says, however its lines travel; over pipes it is `launch/pipes.py`.

The thread that reads them answers `Ask` by itself, so that a process which is busy is not taken for one that hangs. It
also keeps where the coordinator is (`CoordinatorAt`) and the newest circle: a process that trains reads no commands,
but must hear of these.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable

import msgspec

from regrow.core.identity import COORDINATOR, Identity
from regrow.launch.lines import parse_command
from regrow.launch.orders import AnyCommand, Ask, Assignment, CircleIs, CoordinatorAt
from regrow.launch.reports import Answer, Report
from regrow.runtime.parent import Pulse, name_process


class LineParent:
    """All but the way: whoever extends it says how a report leaves, and hands over every line that comes."""

    assignment: Assignment

    def __init__(self) -> None:
        self.pulse = Pulse()
        self.circle: CircleIs | None = None
        self._commands_lock = threading.Lock()
        self._commands: queue.SimpleQueue[AnyCommand] = queue.SimpleQueue()
        self._callback: Callable[[AnyCommand], object] | None = None
        self._coordinator = COORDINATOR  # the newest that is known, or one before it
        self._follower: Callable[[Identity, str], object] | None = None

    def report(self, report: Report) -> None:
        raise NotImplementedError

    def become(self, assignment: Assignment) -> None:
        self.assignment = assignment
        name_process(assignment.identity)
        for handler in logging.getLogger().handlers:  # none yet when the process is new
            handler.setFormatter(logging.Formatter(log_format(assignment.identity)))

    def next_command(self) -> AnyCommand:
        return self._commands.get()

    def on_command(self, callback: Callable[[AnyCommand], object]) -> None:
        with self._commands_lock:  # or a command read just now would be queued after the queue was emptied
            self._callback = callback
            while not self._commands.empty():
                callback(self._commands.get())

    def follow_coordinator(self, callback: Callable[[Identity, str], object]) -> None:
        with self._commands_lock:
            self._follower = callback
            if self.assignment.coordinator is not None:
                callback(self._coordinator, self.assignment.coordinator)

    def receive(self, line: bytes) -> None:
        """A line that came."""
        try:
            command = parse_command(line)
        except ValueError as error:
            logging.warning("a command that cannot be understood: %s", error)
            return
        if isinstance(command, Ask):
            pulse = self.pulse
            self.report(Answer(busy_seconds=pulse.busy_seconds, longest_seconds=pulse.longest_seconds))
            return
        with self._commands_lock:
            if isinstance(command, CoordinatorAt):
                self._note_coordinator(command)
            elif isinstance(command, CircleIs):
                self.circle = command
            elif self._callback is not None:
                self._callback(command)
            else:
                self._commands.put(command)

    def _note_coordinator(self, command: CoordinatorAt) -> None:
        if command.coordinator.incarnation < self._coordinator.incarnation:
            return
        self._coordinator = command.coordinator
        self.assignment = msgspec.structs.replace(self.assignment, coordinator=command.address)
        if self._follower is not None:
            self._follower(command.coordinator, command.address)


def log_format(who: Identity) -> str:
    return f"%(asctime)s {who.role[0].upper()}{who.id} %(message)s"
