"""A place on a host of its own: `regrow serve`. It keeps a process for a lead that is elsewhere.

    Slurm, systemd, a pod --start--> regrow serve --link--> regrow lead
                                          |
                                          +--pipes--> the process (launch/child.py)

What the lead says goes to the process and back. A process that dies is told, and the lead may have the next one started
here at once. When the link breaks, the process goes on: the lead may be back, and training needs no lead. After
LEAD_SECONDS_MAX without it the process is ended, and so is the place: nobody would replace whoever dies. A lead that
was started again is another one; its run begins anew, so what ran here for the one before is ended.
"""

from __future__ import annotations

import logging
import queue
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from regrow.core.identity import Identity
from regrow.errors import Interrupted, RegrowError, UserError
from regrow.launch.backend import Ended, News, Said, name_of
from regrow.launch.lines import encode
from regrow.launch.orders import Assignment, Become
from regrow.launch.places import (
    LEAD,
    Arrived,
    Gone,
    Leave,
    Pass,
    Passed,
    Run,
    Saying,
    Send,
    encode_saying,
    identify_place,
    number_start,
    parse_to_place,
)
from regrow.launch.processes import CHILD_COMMAND, Child, LocalProcesses
from regrow.launch.reports import Malformed
from regrow.launch.rundir import Logs, print_warning
from regrow.launch.signals import SignalWatch
from regrow.launch.token import read_token
from regrow.launch.wires import Broken, Heard, Opened, Resumed, Shunned, WireEvent, Wires
from regrow.runtime.hosts import NODE, choose_host

log = logging.getLogger("regrow.serve")

WAIT_SECONDS = 0.5
# How long a place waits for its lead. Too small: a lead that is started again finds nobody. Too large: a host is kept
# busy by a run that nobody watches.
LEAD_SECONDS_MAX = 60.0


def keep(*, role: str, id: int, lead: str, token_file: str, advertise: str, logs: str, tls: str) -> None:
    """A place on this host, from its start to its end."""
    token = read_token(token_file)
    host = choose_host(advertise, toward=lead)
    try:
        Path(logs).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"--logs {logs}: {error.strerror}") from None
    logging.basicConfig(stream=sys.stderr, level=logging.INFO, format="%(asctime)s %(message)s")
    Keeper(role=role, id=id, lead=lead, token=token, host=host, logs=Path(logs).resolve(), tls=tls).run()


class Keeper:
    """One place, until its lead lets it go or is gone."""

    def __init__(
        self,
        *,
        role: str,
        id: int,
        lead: str,
        token: str,
        host: str,
        logs: Path,
        tls: str = "off",
        command: Sequence[str] = CHILD_COMMAND,
    ) -> None:
        self._token = token
        self._host = host
        self._logs = logs
        self._arrived = Arrived(role=role, id=id, host=host, logs=str(logs))
        self._name = role if role == "coordinator" else f"{role} {id}"
        self._lead: Identity | None = None  # who answered
        self._gone_since: float | None = time.monotonic()
        self._number = 0
        self._child: Child | None = None
        self._events: queue.SimpleQueue[WireEvent] = queue.SimpleQueue()
        self._backend = LocalProcesses(logs=Logs(logs, print_warning), command=command)
        self._address = lead
        self._wires = Wires(
            local=identify_place(role, id, number_start()),
            token=bytes.fromhex(token),
            hear=self._hear,
            tls=tls,
        )

    def run(self) -> None:
        """Returns when the run is over. RegrowError: it failed, or the lead is gone."""
        with SignalWatch(self._backend.wake) as signals:
            try:
                self._wires.dial(LEAD, self._address)
                while True:
                    for news in self._backend.wait(WAIT_SECONDS):
                        self._on_news(news)
                    while not self._events.empty():
                        if self._on_event(self._events.get()):
                            return
                    self._check_lead()
                    if signals.first is not None:
                        name = signal.Signals(signals.first).name
                        raise Interrupted(f"stopped by {name}", signal_number=signals.first)
            finally:
                self._backend.close()
                self._wires.close()

    def _hear(self, event: WireEvent) -> None:
        """On the thread of the wires."""
        self._events.put(event)
        self._backend.wake()

    def _check_lead(self) -> None:
        if self._gone_since is None or time.monotonic() - self._gone_since < LEAD_SECONDS_MAX:
            return
        raise RegrowError(
            f"{self._name}: no lead at {self._address} for {LEAD_SECONDS_MAX:.0f} s",
            hint="start it (`regrow lead`), with the same token file, where this place looks for it",
        )

    def _say(self, saying: Saying) -> None:
        if self._lead is not None:
            self._wires.send(self._lead, encode_saying(saying))

    # -- the process -------------------------------------------------------------------------------------------

    def _on_news(self, news: News) -> None:
        if not isinstance(news, Ended | Said) or news.handle is not self._child:
            return  # of one that was ended for another
        if isinstance(news, Ended):
            exit, words = news.exit, news.handle.read_last_words()
            log.info("%s %s", name_of(self._child.who), exit)
            self._child = None
            self._say(
                Gone(
                    number=self._number,
                    code=exit.code,
                    cpu_seconds=exit.cpu_seconds,
                    peak_rss_bytes=exit.peak_rss_bytes,
                    last_words=words,
                )
            )
        elif isinstance(news.report, Malformed):
            log.warning("a malformed %r: %s", news.report.event, news.report.problem)
            line = msgspec.json.encode({"event": news.report.event}).decode()
            self._say(Passed(number=self._number, line=line))
        else:
            self._say(Passed(number=self._number, line=encode(news.report).decode()))

    def _end_child(self) -> None:
        if self._child is not None:
            self._child.kill()
            self._child = None

    # -- the lead ----------------------------------------------------------------------------------------------

    def _on_event(self, event: WireEvent) -> bool:
        """Whether the run is over."""
        match event:
            case Opened(peer=peer):
                log.info("%s is with the lead at %s", self._name, self._address)
                self._end_child()
                self._lead, self._gone_since = peer, None
                self._say(self._arrived)
            case Resumed():
                self._gone_since = None
            case Broken(reason=reason):
                if self._gone_since is None:
                    log.warning("the lead is away: %s; waiting %.0f s for it", reason, LEAD_SECONDS_MAX)
                    self._gone_since = time.monotonic()
            case Shunned(reason=reason):
                raise RegrowError(f"{self._name} is not wanted by the lead: {reason}")
            case Heard(peer=peer, line=line) if peer == self._lead:
                return self._obey(parse_to_place(line))
        return False

    def _obey(self, saying: Any) -> bool:
        match saying:
            case Leave():
                self._end_child()
                return True
            case Run(number=number, assignment=assignment):
                self._end_child()
                self._number = number
                self._child = self._backend.start(self._localize(assignment))
                log.info("runs %s", name_of(assignment.identity))
            case Pass(number=number, command=command) if number == self._number and self._child is not None:
                if isinstance(command, Become):
                    command = Become(assignment=self._localize(command.assignment))
                self._child.tell(command)
            case Send(number=number, signal=name) if number == self._number and self._child is not None:
                getattr(self._child, name)()
        return False

    def _localize(self, assignment: Assignment) -> Assignment:
        """With what only this host knows."""
        listen = f"tcp:{self._host}:0" if assignment.listen.startswith(NODE) else assignment.listen
        return msgspec.structs.replace(assignment, token=self._token, listen=listen)
