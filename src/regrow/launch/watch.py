"""Who does not answer any more: every process is asked now and then, and one that hangs is told from one that works.

    launcher -> Ask        "are you there?", one question open at a time for each process
    process  -> Answer     at once, by a thread that does nothing else; with how long its work has been at one piece

So there are two ways to hang. *Silent*: no answer, because the process is stopped, or the system has it. *Stuck*: it
answers, but its working thread is at the same piece of work for longer than any took before. A piece that waits for
other processes does not count: those are asked themselves.

Pure: times come in, names and reasons come out, and what is done about it is the supervisor's. The rule to keep: a
launcher that was itself stopped, or too busy to look, holds that time against nobody.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from regrow.core.identity import Identity
from regrow.hanging import SILENT_SECONDS

ASK_SECONDS = 1.0  # From an answer to the next question. Too small: pipes full of them. Too large: noticed late.
OWN_PAUSE_SECONDS = 1.0  # The launcher looks several times a second: after a gap like this it was not there itself.
# Until a new process answers for the first time: imports on a cold disk hold everything up.
START_SECONDS_MAX = 120.0
# ... and of a successor, as it is known how long such a process takes: so often the longest start of its role, but no
# less than that. Too small: a start on a busy machine counts as hung. Too large: everybody waits for it.
START_FACTOR = 10.0
START_SECONDS_MIN = 15.0
# How long those may be silent that the user is not asked about. A server that does not serve yet: the coordinator minds
# only those that do. A merger: nobody waits for it.
STARTING_SERVER_SECONDS = 10.0
MERGER_SECONDS = 60.0
# How long the first piece of work of a process may take, when nothing says yet how long one does: loading data,
# allocating tables, the first step of a model that is compiled.
FIRST_SECONDS_MAX = 1800.0
# How often the longest piece so far the next one may take: data, evaluation and a busy machine make steps differ.
LONGEST_FACTOR = 10.0
# Silent for this long, a spare is not given a place: a fresh process takes a second.
SPARE_SILENT_SECONDS = 2.5


@dataclass(slots=True, kw_only=True)
class Watched:
    """What is known of one process."""

    begun: float
    role: str
    answered: bool = False  # ever
    asked: float | None = None  # since when a question is open
    heard: float | None = None  # when it last answered
    busy_seconds: float | None = None  # as of then; None: it waits for others, or has nothing to do
    longest_seconds: float = 0.0
    serves: bool = False  # a server that the coordinator listens to


@dataclass(slots=True)
class Watch:
    """All processes of a run, by identity."""

    silent_seconds: Mapping[str, float] = field(default_factory=lambda: SILENT_SECONDS)  # see `hanging.py`
    patience_seconds: float = 60.0  # for a server that serves: the coordinator has had its chance by then
    start_seconds: float = START_SECONDS_MAX
    starting_server_seconds: float = STARTING_SERVER_SECONDS
    _watched: dict[Identity, Watched] = field(default_factory=dict)
    _starts: dict[str, float] = field(default_factory=dict)  # the longest of each role, in seconds
    _now: float | None = None
    _asked: int = 0

    def begin(self, who: Identity, now: float) -> None:
        self._now = now if self._now is None else self._now
        self._watched[who] = Watched(begun=now, role=who.role)

    def promote(self, spare: Identity, who: Identity) -> None:
        """The same process in another place; what it owes, it still owes."""
        known = self._watched.pop(spare)
        known.role = who.role
        self._watched[who] = known

    def end(self, who: Identity) -> None:
        self._watched.pop(who, None)

    def note_ready(self, who: Identity) -> None:
        """A server has its rows in memory: from here on the coordinator minds its silence."""
        if who in self._watched:
            self._watched[who].serves = True

    def hear(self, who: Identity, now: float, *, busy_seconds: float | None, longest_seconds: float) -> None:
        """An answer."""
        known = self._watched.get(who)
        if known is not None:
            if not known.answered:
                self._starts[known.role] = max(self._starts.get(known.role, 0.0), now - known.begun)
            known.answered, known.asked, known.heard = True, None, now
            known.busy_seconds, known.longest_seconds = busy_seconds, longest_seconds

    def look(self, now: float) -> tuple[list[Identity], list[tuple[Identity, str]]]:
        """Whom to ask now; and who hangs, with the reason. Called several times a second."""
        pause = 0.0 if self._now is None else now - self._now
        self._now = now
        if pause > OWN_PAUSE_SECONDS:
            for known in self._watched.values():
                known.begun += pause
                known.asked = None if known.asked is None else known.asked + pause
        hung = [(who, reason) for who, known in self._watched.items() if (reason := self._find_fault(known, now))]
        asked = [who for who, known in self._watched.items() if known.asked is None and _is_due(known, now)]
        for who in asked:
            self._watched[who].asked = now
        return asked, hung

    def is_doubtful(self, who: Identity, now: float) -> bool:
        """Whether it owes an answer for longer than a living spare would."""
        if who not in self._watched:  # it is not even started
            return True
        known = self._watched[who]
        limit = min(SPARE_SILENT_SECONDS, self.silent_seconds["spare"] / 2)
        return known.asked is not None and now - known.asked >= limit

    def _find_fault(self, known: Watched, now: float) -> str | None:
        if not known.answered:
            silent = now - known.begun
            return (
                f"has not answered within {silent:.0f} s of its start" if silent >= self._start_limit(known) else None
            )
        if known.asked is not None and now - known.asked >= self._silent_limit(known):
            return f"has not answered for {now - known.asked:.0f} s"
        if known.busy_seconds is not None and known.busy_seconds >= self._busy_limit(known):
            return f"is at the same piece of work for {known.busy_seconds:.0f} s"
        return None

    def _start_limit(self, known: Watched) -> float:
        longest = self._starts.get(known.role)
        usual = START_SECONDS_MAX if longest is None else max(START_SECONDS_MIN, START_FACTOR * longest)
        return min(usual, self.start_seconds)

    def _silent_limit(self, known: Watched) -> float:
        limits = self.silent_seconds
        match known.role:
            case "worker":  # the thread that answers needs a turn of the interpreter, and a step may keep it
                return max(limits["worker"], LONGEST_FACTOR * known.longest_seconds)
            case "coordinator":
                return limits["coordinator"]
            case "standby":
                return limits["spare"]
            case "understudy":  # importing torch keeps the interpreter like a step
                return max(limits["spare"], limits["worker"])
            case "server" if known.serves:
                return self.starting_server_seconds + self.patience_seconds
            case "server":
                return self.starting_server_seconds
            case _:
                return MERGER_SECONDS

    def _busy_limit(self, known: Watched) -> float:
        if known.role == "merger" or (known.role == "server" and not known.serves) or not known.longest_seconds:
            return FIRST_SECONDS_MAX
        return max(self._silent_limit(known), LONGEST_FACTOR * known.longest_seconds)


def _is_due(known: Watched, now: float) -> bool:
    return known.heard is None or now - known.heard >= ASK_SECONDS
