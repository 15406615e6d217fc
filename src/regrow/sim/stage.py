"""Actors of a simulated world that run the code of real processes as it is: code that calls, waits and returns.

Each actor is a thread, and one at a time moves: it goes on until it `rest`s, and whose turn is next is read from the
tape. So a schedule is a function of its tape although there are threads. Time is simulated: it passes by a little with
every turn, and jumps to the next thing that happens when all are at rest.

An actor may be killed wherever it rests. What it does on its way out (`finally`) reaches nobody: a process that is
killed does not clean up.
"""

from __future__ import annotations

import dataclasses
import heapq
import itertools
import threading
import traceback
from collections.abc import Callable


from regrow.sim.choices import Choices
from regrow.sim.nodes import Violation

TURN_SECONDS = 0.05


class Killed(BaseException):
    """Raised where a killed actor rests."""


@dataclasses.dataclass(slots=True, eq=False)
class Actor:
    """Something that calls and waits. `hung`: it rested for longer than it meant to, which happens to it once."""

    name: str
    body: Callable[[], None]
    number: int
    wake: float
    alive: bool = True
    killed: bool = False
    hung: bool = False
    failure: Violation | None = None
    go: threading.Semaphore = dataclasses.field(default_factory=lambda: threading.Semaphore(0))
    thread: threading.Thread | None = None


class Stage:
    """All actors, the time, and what happens by itself at some time."""

    def __init__(self, choices: Choices, *, eager: float) -> None:
        self.now = 0.0
        self.turns = 0
        self.actors: list[Actor] = []  # those that live, in the order of their coming
        self._choices = choices
        self._eager = eager
        self._back = threading.Semaphore(0)
        self._current: Actor | None = None
        self._numbers = itertools.count()
        self._later: list[tuple[float, int, Callable[[], None]]] = []

    @property
    def current(self) -> Actor:
        assert self._current is not None
        return self._current

    def spawn(self, name: str, body: Callable[[], None], *, after: float = 0.0) -> Actor:
        """An actor that begins so much later."""
        actor = Actor(name, body, next(self._numbers), self.now + after)
        actor.thread = threading.Thread(target=self._perform, args=(actor,), name=f"sim-{name}", daemon=True)
        self.actors.append(actor)
        actor.thread.start()
        return actor

    def later(self, seconds: float, what: Callable[[], None]) -> None:
        """Something that nobody has to live for."""
        heapq.heappush(self._later, (self.now + seconds, next(self._numbers), what))

    def rest(self, seconds: float = 0.0) -> None:
        """Called by an actor: others have their turn, and it goes on no earlier than then."""
        actor = self.current
        if actor.killed:
            raise Killed
        actor.wake = self.now + seconds
        self._back.release()
        actor.go.acquire()
        if actor.killed:
            raise Killed

    def kill(self, actor: Actor) -> None:
        """Takes effect at once if it rests, as all but the current one do."""
        if not actor.alive:
            return
        actor.killed = True
        if actor is not self._current:
            self._give_turn(actor)

    def hang(self, actor: Actor, seconds: float) -> None:
        actor.wake = max(actor.wake, self.now) + seconds
        actor.hung = True

    def play(self, *, until: Callable[[], bool], between: Callable[[], None] = lambda: None) -> None:
        """Turns until it is enough; `between` them anything may go wrong."""
        while not until():
            self._pass_time()
            between()
            ready = sorted((actor for actor in self.actors if actor.wake <= self.now), key=lambda a: (a.wake, a.number))
            if ready:
                self._give_turn(ready[self._choices.pick(len(ready), dull=self._eager)])

    def close(self) -> None:
        """Ends all threads, whatever has happened."""
        for actor in list(self.actors):
            actor.killed = True
            self._give_turn(actor, quiet=True)

    def _pass_time(self) -> None:
        self.turns += 1
        self.now += TURN_SECONDS
        soonest = min([actor.wake for actor in self.actors] + [at for at, _, _ in self._later[:1]], default=self.now)
        self.now = max(self.now, soonest)
        while self._later and self._later[0][0] <= self.now:
            heapq.heappop(self._later)[2]()

    def _give_turn(self, actor: Actor, *, quiet: bool = False) -> None:
        before, self._current = self._current, actor
        actor.go.release()
        self._back.acquire()
        self._current = before
        if not actor.alive:
            self.actors.remove(actor)
            assert actor.thread is not None
            actor.thread.join()
        if actor.failure is not None and not quiet:
            raise actor.failure

    def _perform(self, actor: Actor) -> None:
        actor.go.acquire()
        try:
            if not actor.killed:
                actor.body()
        except Killed:
            pass
        except Violation as violation:
            actor.failure = violation
        except BaseException as error:
            where = "".join(traceback.format_exception(error)[-4:])
            actor.failure = Violation("code", f"{actor.name} raised: {where}")
        actor.alive = False
        self._back.release()


