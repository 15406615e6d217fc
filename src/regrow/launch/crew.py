"""Who is in office: one process for every role and number, its incarnation, and the spares behind the servers.

A process that dies is succeeded by its next incarnation. A server's successor is a spare that has been waiting, with
everything imported, so that it takes milliseconds. Everybody listens at an address of their own, but for the
coordinator: all others know where it is, so its successor listens where it did.
"""

from __future__ import annotations

import os
import sys
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from regrow.errors import RegrowError
from regrow.launch.processes import Child, Children
from regrow.launch.rundir import Logs

# -P: a file named like a module in the user's directory must not replace it.
CHILD_COMMAND = (sys.executable, "-P", "-m", "regrow.launch.child")
# One that dies by itself so often within so long will not do better next time.
RESTARTS_MAX = 5
RESTARTS_SECONDS = 60.0
# ... and one that is taken for dead so often: a machine too busy to hear everybody in time.
REPLACEMENTS_MAX = 20
SPARES_FAILED_MAX = 5  # then servers are replaced by fresh processes, which takes a second longer


class Crew:
    """The processes of a run by role and number. `assignment` is told to each, with what differs added."""

    def __init__(
        self,
        *,
        children: Children,
        command: Sequence[str],
        sockets: Path,
        transport: str,
        logs: Logs,
        threads: Mapping[str, int],
        assignment: Mapping[str, Any],
    ) -> None:
        self.children = children
        self.coordinator_address: str | None = None
        self.spares: list[Child] = []
        self._command = tuple(command)
        self._sockets = sockets
        self._transport = transport
        self._logs = logs
        self._threads = threads
        self._assignment = assignment
        self._current: dict[tuple[str, int], Child] = {}
        self._deaths: dict[tuple[str, int, bool], deque[float]] = {}
        self._spares_started = 0
        self._spares_failed = 0

    def current(self, role: str, id: int) -> Child:
        """The newest incarnation, dead or alive."""
        return self._current[role, id]

    def members(self, role: str) -> list[Child]:
        return [child for (known, _), child in self._current.items() if known == role]

    def start(self, role: str, id: int, *, incarnation: int = 0) -> Child:
        """A new process in this place."""
        child = self._spawn(role, id, incarnation)
        child.tell(self._told(role, id, incarnation))
        self._current[role, id] = child
        return child

    def keep_spares(self, count: int) -> None:
        """Starts processes without a place until there are so many."""
        while len(self.spares) < count and self._spares_failed < SPARES_FAILED_MAX:
            id = self._spares_started
            self._spares_started += 1
            child = self._spawn("standby", id, 0)
            child.tell(self._told("standby", id, 0))
            self.spares.append(child)

    def lost_spare(self, child: Child) -> None:
        """A spare has died before it was needed."""
        self._spares_failed += 1
        self.spares.remove(child)

    def succeed(self, old: Child) -> Child:
        """Puts the next incarnation in the place of `old`, which is dead or does not count any more."""
        role, id, incarnation = old.role, old.id, old.incarnation + 1
        old.retired = True
        if role != "coordinator":
            self._tell_died(role, id, old.incarnation)
        spare = next((child for child in self.spares if child.exit is None), None)
        if role == "server" and spare is not None:
            self.spares.remove(spare)
            spare.role, spare.id, spare.incarnation = role, id, incarnation
            self._current[role, id] = spare
            spare.tell({"do": "become", **self._told(role, id, incarnation)})
            return spare
        if role == "coordinator" and self._transport == "unix":
            # A socket file outlives its process, and would keep the successor from listening there.
            self._socket(role, id, incarnation).unlink(missing_ok=True)
        child = self.start(role, id, incarnation=incarnation)
        if role == "coordinator":
            # The last words to the old one may not have been heard.
            for server in self.members("server"):
                if server.incarnation:
                    self._tell_died("server", server.id, server.incarnation - 1)
        return child

    def refusal(self, old: Child, now: float, *, alive: bool = False) -> str | None:
        """Why `old` is not succeeded any more, or None. Deaths by our own hand do not count.
        `alive`: it only counts as dead."""
        deaths = self._deaths.setdefault((old.role, old.id, alive), deque())
        while deaths and deaths[0] <= now - RESTARTS_SECONDS:
            deaths.popleft()
        if old.doomed_at is None:
            deaths.append(now)
        if len(deaths) <= (REPLACEMENTS_MAX if alive else RESTARTS_MAX):
            return None
        what = "counted as dead" if alive else "died"
        return f"{old.name} {what} {len(deaths)} times within {RESTARTS_SECONDS:.0f} s"

    def _tell_died(self, role: str, id: int, incarnation: int) -> None:
        self.current("coordinator", 0).tell({"do": "died", "role": role, "id": id, "incarnation": incarnation})

    def _spawn(self, role: str, id: int, incarnation: int) -> Child:
        try:
            return self.children.start(
                role=role,
                id=id,
                incarnation=incarnation,
                command=self._command,
                env=child_env(role, self._threads[role]),
                log=self._logs.log(role, id, incarnation),
                log_file=self._logs.open_log(role, id, incarnation),
            )
        except OSError as error:
            raise RegrowError(f"cannot start {role} {id}: {error.strerror or error}") from None

    def _told(self, role: str, id: int, incarnation: int) -> dict[str, Any]:
        # The token goes through the pipe alone: arguments and environments can be read by others.
        return {
            **self._assignment,
            "role": role,
            "id": id,
            "incarnation": incarnation,
            "listen": self._listen(role, id, incarnation),
            "coordinator": None if role == "coordinator" else self.coordinator_address,
            "threads": self._threads[role],
        }

    def _listen(self, role: str, id: int, incarnation: int) -> str:
        if self._transport == "unix":
            return f"unix:{self._socket(role, id, incarnation)}"
        if role == "coordinator" and self.coordinator_address is not None:
            return self.coordinator_address
        return "tcp:127.0.0.1:0"

    def _socket(self, role: str, id: int, incarnation: int) -> Path:
        name = "spare" if role == "standby" else role[0]
        if role == "coordinator" or incarnation == 0:
            return self._sockets / f"{name}{id}"
        return self._sockets / f"{name}{id}.{incarnation}"


def child_env(role: str, threads: int) -> dict[str, str]:
    """Ours, with a bound on the threads that numeric libraries would start: one per core and process."""
    env = dict(os.environ)
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMEXPR_NUM_THREADS"):
        env[name] = str(threads)
    # Idle OpenMP threads would spin on cores that servers need.
    env.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    env["PYTHONUNBUFFERED"] = "1"
    if role != "worker":
        # glibc keeps up to 8 arenas per core, each with unused memory of its own; rows are not in them.
        env.setdefault("MALLOC_ARENA_MAX", "2")
    return env
