"""The backend of `regrow lead`: processes on hosts that somebody else has started, each in a place (`keeper.py`).

A lead starts nothing by itself. It waits for places to come, gives each the process that it is for, and passes on what
is said. A process that has no place yet is wanted: what is told to it waits, in order, and its questions are answered
here, because one that is not there does not hang. Which place it gets, best first:

    its own             `--role server --id 2` for server 2, also for all who come after it
    a standby           `--role standby`, for a successor of anybody
    another of its kind that has nothing to do, for a successor

and a spare takes whatever has nothing to do. Nobody but the merger runs beside the lead.

A link that breaks is no death: the process behind it may be well, and the others say so if it is not. Only when it is
to be killed, and cannot be reached, it counts as ended; it is killed when its place comes back.
"""

from __future__ import annotations

import contextlib
import queue
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import msgspec

from regrow.core.identity import Identity
from regrow.launch.backend import Ended, Exit, News, Said, name_of
from regrow.launch.lines import parse_report
from regrow.launch.orders import Ask, Assignment, Become, Command
from regrow.launch.places import (
    LEAD,
    PLACE_ROLES,
    Arrived,
    Gone,
    Leave,
    Pass,
    Passed,
    Run,
    Saying,
    Send,
    Signal,
    encode_saying,
    number_start,
    parse_to_lead,
)
from regrow.launch.processes import Child, LocalProcesses
from regrow.launch.reports import Answer
from regrow.launch.rundir import Logs
from regrow.launch.watch import START_SECONDS_MAX
from regrow.launch.wires import Broken, Heard, Opened, Resumed, WireEvent, Wires
from regrow.runtime.hosts import NODE

POLL_SECONDS = 0.1
# Before the user is told what is waited for: at the start everybody comes at about the same time.
WANTED_SECONDS = 10.0
KILLED = Exit(code=-signal.SIGKILL)


@dataclass(slots=True, kw_only=True)
class Place:
    """One that came."""

    keeper: Identity
    role: str
    id: int
    host: str
    logs: str
    is_here: bool = True  # its link stands
    process: RemoteProcess | None = None  # that it runs, or is to run

    def __str__(self) -> str:
        return f"{self.role} {self.id} at {self.host}"


class RemoteProcess:
    """A process in a place, or one that waits for it; a `Handle`."""

    pid = 0

    def __init__(self, number: int, assignment: Assignment, hosts: HostBackend) -> None:
        self.who = assignment.identity
        self.exit: Exit | None = None
        self.number = number
        self.place: Place | None = None
        self.wanted_since = time.monotonic()
        self.is_told = False  # the user knows that it is waited for
        self.heard = False  # it has said something itself
        self.last_words: str | None = None
        self.first: list[Saying] = [Run(number=number, assignment=_hide(assignment))]  # until it has a place
        self._hosts = hosts

    @property
    def log(self) -> str:
        return "nowhere yet" if self.place is None else f"{self.place.host}:{self.place.logs}"

    def __repr__(self) -> str:
        return f"<{self.who} {self.place or 'wanted'} {self.exit or 'running'}>"

    def tell(self, command: Command) -> None:
        if self.exit is not None:
            return
        if isinstance(command, Ask) and self._is_starting():
            self._hosts.answer_for(self)
            return
        if isinstance(command, Become):
            command = Become(assignment=_hide(command.assignment))
        self._say(Pass(number=self.number, command=command))  # type: ignore[arg-type]

    def terminate(self) -> None:
        self._signal("terminate")

    def kill(self) -> None:
        self._signal("kill")
        if self.exit is None and (self.place is None or not self.place.is_here):
            self._hosts.give_up(self)

    def pause(self) -> None:
        self._signal("pause")

    def resume(self) -> None:
        self._signal("resume")

    def read_last_words(self) -> str | None:
        return self.last_words

    def _is_starting(self) -> bool:
        """Whether nobody can expect it to answer by itself."""
        late = time.monotonic() - self.wanted_since >= START_SECONDS_MAX
        return self.place is None or (not self.heard and not late)

    def _signal(self, name: Signal) -> None:
        if self.exit is None and self.place is not None:
            self._say(Send(number=self.number, signal=name))

    def _say(self, saying: Saying) -> None:
        if self.place is None:
            self.first.append(saying)
        else:
            self._hosts.say(self.place, saying)


class HostBackend:
    """All places and what runs in them; a `Backend`."""

    def __init__(
        self,
        *,
        address: str,
        token: str,
        logs: Logs,
        say: Callable[[str], None] = lambda text: None,
        tls: str = "off",
    ) -> None:
        self.handles: list[RemoteProcess | Child] = []
        self._say_to_user = say
        self._places: dict[Identity, Place] = {}
        self._events: queue.SimpleQueue[WireEvent | None] = queue.SimpleQueue()
        self._news: list[News] = []
        self._started = 0
        self._beside = LocalProcesses(logs=logs)  # the merger
        self._is_closed = False
        lead = Identity(role=LEAD.role, id=LEAD.id, incarnation=number_start())
        self._wires = Wires(local=lead, token=bytes.fromhex(token), hear=self._events.put, tls=tls)
        self.address = self._wires.listen(address)

    def choose_address(self, who: Identity, *, before: str | None) -> str:
        return NODE

    def prefer(self, heir: Identity, spares: Sequence[Identity]) -> Identity | None:
        """Whoever starts places knows why it starts them where."""
        return spares[0]

    def start(self, assignment: Assignment) -> RemoteProcess | Child:
        process: RemoteProcess | Child
        if assignment.identity.role in PLACE_ROLES:
            self._started += 1
            process = RemoteProcess(self._started, assignment, self)
        else:
            process = self._beside.start(assignment)
        self.handles.append(process)
        self._place_wanted()
        return process

    def wait(self, seconds: float) -> list[News]:
        deadline = time.monotonic() + max(0.0, seconds)
        while True:
            news, self._news = self._news + self._beside.wait(0.0), []
            left = deadline - time.monotonic()
            self._tell_wanted()
            try:
                event = self._events.get(timeout=1e-6 if news else max(1e-6, min(left, POLL_SECONDS)))
            except queue.Empty:
                if news or left <= 0:
                    return news
                continue
            if event is None:
                return news
            self._news = news
            self._on_event(event)

    def wake(self) -> None:
        self._events.put(None)

    def close(self) -> None:
        if self._is_closed:
            return
        self._is_closed = True
        for process in self.handles:
            process.kill()
        for place in self._places.values():
            if place.is_here:
                self.say(place, Leave())
        self._wires.close()
        self._beside.close()
        for process in self.handles:
            process.exit = process.exit or KILLED  # their places end them, sooner or later

    # -- for processes -----------------------------------------------------------------------------------------

    def say(self, place: Place, saying: Saying) -> None:
        self._wires.send(place.keeper, encode_saying(saying))

    def answer_for(self, process: RemoteProcess) -> None:
        self._news.append(Said(handle=process, report=Answer()))
        self.wake()

    def give_up(self, process: RemoteProcess) -> None:
        """It cannot be reached, and nobody waits for it. Its place, should it come back, is told to end it first."""
        self._end(process, KILLED)
        self.wake()

    # -- places ------------------------------------------------------------------------------------------------

    def _on_event(self, event: WireEvent) -> None:
        match event:
            case Heard(peer=peer, line=line):
                with contextlib.suppress(ValueError):  # of another version, maybe; whoever holds the token means well
                    self._on_saying(peer, line)
            case Broken(peer=peer) if peer in self._places:
                self._places[peer].is_here = False
            case Resumed(peer=peer) | Opened(peer=peer) if peer in self._places:
                self._places[peer].is_here = True
                self._place_wanted()

    def _on_saying(self, peer: Identity, line: bytes) -> None:
        saying = parse_to_lead(line)
        if isinstance(saying, Arrived):
            self._welcome(peer, saying)
            return
        place = self._places.get(peer)
        process = None if place is None else place.process
        if process is None or process.number != saying.number:
            return  # it was given up
        process.heard = True
        match saying:
            case Passed(line=text):
                report = parse_report(text.encode())
                if report is not None and process.exit is None:
                    self._news.append(Said(handle=process, report=report))
            case Gone(code=code, cpu_seconds=cpu, peak_rss_bytes=rss, last_words=words):
                process.last_words = words
                self._end(process, Exit(code=code, cpu_seconds=cpu, peak_rss_bytes=rss))
                self._place_wanted()

    def _welcome(self, peer: Identity, arrived: Arrived) -> None:
        """A keeper that was started again is another one; what the one before ran is gone with it."""
        for old, place in list(self._places.items()):
            if (old.role, old.id) == (peer.role, peer.id):
                del self._places[old]
                if place.process is not None:
                    self._end(place.process, KILLED)
        place = Place(keeper=peer, role=arrived.role, id=arrived.id, host=arrived.host, logs=arrived.logs)
        self._places[peer] = place
        self._say_to_user(f"a place for {place}")
        self._place_wanted()

    def _end(self, process: RemoteProcess, exit: Exit) -> None:
        if process.exit is None:
            process.exit = exit
            self._news.append(Ended(handle=process, exit=exit))
        if process.place is not None and process.place.process is process:
            process.place.process = None

    def _place_wanted(self) -> None:
        """Gives those who wait a place, where there is one."""
        for process in self._list_wanted():
            place = self._choose_place(process.who)
            if place is None:
                continue
            place.process, process.place = process, place
            process.wanted_since = time.monotonic()
            for saying in process.first:
                self.say(place, saying)
            process.first = []

    def _list_wanted(self) -> list[RemoteProcess]:
        found = [each for each in self.handles if isinstance(each, RemoteProcess)]
        return [each for each in found if each.exit is None and each.place is None]

    def _choose_place(self, who: Identity) -> Place | None:
        free = [place for place in self._places.values() if place.is_here and place.process is None]
        own = [place for place in free if (place.role, place.id) == (who.role, who.id)]
        standby = [place for place in free if place.role == "standby"]
        if who.role == "standby":
            found = [*own, *standby, *(place for place in free if place.role == "server")]
        elif who.incarnation:
            found = [*own, *standby, *(place for place in free if place.role == who.role)]
        else:
            found = own
        return found[0] if found else None

    def _tell_wanted(self) -> None:
        now = time.monotonic()
        for process in self._list_wanted():
            who = process.who
            if who.role != "standby" and not process.is_told and now - process.wanted_since >= WANTED_SECONDS:
                process.is_told = True
                or_standby = " or --role standby" if who.incarnation else ""
                command = f"regrow serve --role {who.role} --id {who.id}{or_standby}"
                self._say_to_user(f"{name_of(who)} waits for a place: `{command}` on some host")


def _hide(assignment: Assignment) -> Assignment:
    """Every place has the token already."""
    return msgspec.structs.replace(assignment, token="")
