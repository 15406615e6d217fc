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


def _closed_gate() -> threading.Lock:
    """Opened by `release`, passed by `acquire`, which closes it again."""
    gate = threading.Lock()
    gate.acquire()
    return gate


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
    gate: threading.Lock = dataclasses.field(default_factory=_closed_gate)


class Stage:
    """All actors, the time, and what happens by itself at some time."""

    def __init__(self, choices: Choices, *, eager: float) -> None:
        self.now = 0.0
        self.turns = 0
        self.actors: list[Actor] = []  # those that live, in the order of their coming
        self._choices = choices
        self._eager = eager
        self._current: Actor | None = None  # whose turn it is
        self._numbers = itertools.count()
        self._later: list[tuple[float, int, Callable[[], None]]] = []
        self._until: Callable[[], bool] = lambda: True
        self._between: Callable[[], None] = lambda: None
        self._failure: Violation | None = None
        self._gate = _closed_gate()  # of whoever called `play`
        self._grave = _closed_gate()  # of whoever kills somebody, until they are dead
        self._dying = False
        self._alone = False  # what happens now is nobody's turn

    @property
    def current(self) -> Actor:
        assert self._current is not None
        return self._current

    def was_hung(self) -> bool:
        """Whether what happens now is done by somebody who hung, or by nobody: long after it was asked for."""
        return self._current is None or self._current.hung or self._alone

    def spawn(self, name: str, body: Callable[[], None], *, after: float = 0.0) -> Actor:
        """An actor that begins so much later."""
        actor = Actor(name, body, next(self._numbers), self.now + after)
        self.actors.append(actor)
        threading.Thread(target=self._perform, args=(actor,), name=f"sim-{name}", daemon=True).start()
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
        following = self._choose()
        if self._is_killed(actor):  # just now: its thread ends, and only then the other one goes on
            self._current = following
            raise Killed
        if following is not actor:
            self._let(following)
            actor.gate.acquire()
            if self._is_killed(actor):
                raise Killed

    def _is_killed(self, actor: Actor) -> bool:
        return actor.killed

    def kill(self, actor: Actor) -> None:
        """Takes effect at once, or, if it is its turn, when it rests."""
        if not actor.alive or actor.killed:
            return
        actor.killed = True
        if actor is self._current:
            return
        before, self._current, self._dying = self._current, actor, True
        actor.gate.release()
        self._grave.acquire()
        self._current, self._dying = before, False

    def fail(self, violation: Violation) -> None:
        """Something does not hold; nobody has another turn."""
        self._failure = self._failure or violation

    def hang(self, actor: Actor, seconds: float) -> None:
        actor.wake = max(actor.wake, self.now) + seconds
        actor.hung = True

    def play(self, *, until: Callable[[], bool], between: Callable[[], None] = lambda: None) -> None:
        """Turns until it is enough; `between` them anything may go wrong."""
        self._until, self._between = until, between
        following = self._choose()
        if following is not None:
            self._let(following)
            self._gate.acquire()
        if self._failure is not None:
            raise self._failure

    def close(self) -> None:
        """Ends all threads, whatever has happened."""
        self._current = None
        for actor in list(self.actors):
            self.kill(actor)

    def _let(self, actor: Actor | None) -> None:
        """Whoever this is goes on; None: who called `play`."""
        self._current = actor
        (self._gate if actor is None else actor.gate).release()

    def _choose(self) -> Actor | None:
        """Whose turn is next; None: it is enough, or something does not hold."""
        try:
            while self._failure is None and not self._until():
                self._pass_time()
                self._between()
                ready = [actor for actor in self.actors if actor.wake <= self.now and not actor.killed]
                if ready:
                    ready.sort(key=lambda actor: (actor.wake, actor.number))
                    return ready[self._choices.pick(len(ready), dull=self._eager)]
        except Violation as violation:
            self.fail(violation)
        return None

    def _pass_time(self) -> None:
        self.turns += 1
        self.now += TURN_SECONDS
        soonest = min([actor.wake for actor in self.actors] + [at for at, _, _ in self._later[:1]], default=self.now)
        self.now = max(self.now, soonest)
        while self._later and self._later[0][0] <= self.now:
            self._alone = True
            heapq.heappop(self._later)[2]()
        self._alone = False

    def _perform(self, actor: Actor) -> None:
        """The life of an actor, in its thread."""
        actor.gate.acquire()
        try:
            if not actor.killed:
                actor.body()
        except Killed:
            pass
        except Violation as violation:
            self.fail(violation)
        except BaseException as error:
            where = "".join(traceback.format_exception(error)[-4:])
            self.fail(Violation("code", f"{actor.name} raised: {where}"))
        actor.alive = False
        self.actors.remove(actor)
        if self._dying:
            self._grave.release()
        elif self._current is not actor:  # it was killed when it had chosen who is next
            self._let(self._current)
        else:
            self._current = None
            self._let(self._choose())
