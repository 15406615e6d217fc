"""A second backend, in memory: its processes are threads that run a role with a `Parent` of their own.

It is here to show what a new backend touches: this file. A thread cannot be killed, so one that is never speaks again
and hears nothing more; roles that only talk to their parent cannot tell the difference.
"""

from __future__ import annotations

import queue
import signal
import threading
import time
from collections.abc import Callable

from regrow.core.identity import Identity
from regrow.launch.backend import Ended, Exit, News, Said
from regrow.launch.orders import AnyCommand, Ask, Assignment, Command
from regrow.launch.reports import Answer, Report
from regrow.runtime.parent import Pulse

Role = Callable[["ThreadParent"], int]


class Killed(BaseException):
    """Raised in a role that was killed, wherever it turns to its parent."""


class ThreadParent:
    """The launcher, as the role in a thread sees it."""

    def __init__(self, handle: ThreadHandle, assignment: Assignment) -> None:
        self.assignment = assignment
        self.pulse = Pulse()
        self._handle = handle

    def become(self, assignment: Assignment) -> None:
        self.assignment = assignment

    def report(self, report: Report) -> None:
        self._handle.await_turn(lambda: True)
        self._handle.news.put(Said(handle=self._handle, report=report))  # type: ignore[arg-type]

    def next_command(self) -> AnyCommand:
        commands = self._handle.commands
        self._handle.await_turn(lambda: bool(commands))
        return commands.pop(0)

    def follow_coordinator(self, callback: Callable[[Identity, str], object]) -> None:
        raise NotImplementedError("none of these roles dials")

    def on_command(self, callback: Callable[[AnyCommand], object]) -> None:
        raise NotImplementedError("none of these roles has a loop of its own")


class ThreadHandle:
    """One thread; a `Handle`."""

    log = "nowhere"
    pid = 0

    def __init__(self, who: Identity, news: queue.Queue[News | None]) -> None:
        self.who = who
        self.exit: Exit | None = None
        self.news = news
        self.commands: list[AnyCommand] = []
        self.code: int | None = None  # once it is killed
        self._paused = False
        self._asked = False
        self._changed = threading.Condition()

    def tell(self, command: Command) -> None:
        if isinstance(command, Ask):
            self._asked = True
            self._answer()
            return
        with self._changed:
            self.commands.append(command)  # type: ignore[arg-type]
            self._changed.notify_all()

    def terminate(self) -> None:
        self._end(-signal.SIGTERM)

    def kill(self) -> None:
        self._end(-signal.SIGKILL)

    def pause(self) -> None:
        with self._changed:
            self._paused = True

    def resume(self) -> None:
        with self._changed:
            self._paused = False
            self._changed.notify_all()
        self._answer()

    def read_last_words(self) -> str | None:
        return None

    def await_turn(self, is_ready: Callable[[], bool]) -> None:
        """Until there is something to do and it may be done."""
        with self._changed:
            self._changed.wait_for(lambda: self.code is not None or (not self._paused and is_ready()))
            if self.code is not None:
                raise Killed

    def run(self, role: Role, assignment: Assignment) -> None:
        try:
            code = role(ThreadParent(self, assignment))
        except Killed:
            assert self.code is not None
            code = self.code
        self.news.put(Ended(handle=self, exit=Exit(code=code)))

    def _answer(self) -> None:
        if self._asked and not self._paused and self.code is None:
            self._asked = False
            self.news.put(Said(handle=self, report=Answer()))

    def _end(self, code: int) -> None:
        with self._changed:
            self.code = code if self.code is None else self.code
            self._changed.notify_all()


class ThreadBackend:
    """All threads; a `Backend`."""

    def __init__(self, role: Role) -> None:
        self.handles: list[ThreadHandle] = []
        self._role = role
        self._news: queue.Queue[News | None] = queue.Queue()
        self._threads: list[threading.Thread] = []

    def choose_address(self, who: Identity, *, before: str | None) -> str:
        return before if who.role == "coordinator" and before is not None else f"memory:{who}.{who.incarnation}"

    def start(self, assignment: Assignment) -> ThreadHandle:
        handle = ThreadHandle(assignment.identity, self._news)
        thread = threading.Thread(target=handle.run, args=(self._role, assignment), daemon=True)
        self.handles.append(handle)
        self._threads.append(thread)
        thread.start()
        return handle

    def wait(self, seconds: float) -> list[News]:
        news: list[News] = []
        deadline = time.monotonic() + max(0.0, seconds)
        while True:
            try:
                found = self._news.get(timeout=0.0 if news else max(0.0, deadline - time.monotonic()) or 1e-6)
            except queue.Empty:
                return news
            if found is None:
                return news
            if isinstance(found, Ended):
                found.handle.exit = found.exit
            news.append(found)

    def wake(self) -> None:
        self._news.put(None)

    def close(self) -> None:
        for handle in self.handles:
            handle.kill()
        for thread in self._threads:
            thread.join()
        while any(handle.exit is None for handle in self.handles):
            self.wait(0.0)
