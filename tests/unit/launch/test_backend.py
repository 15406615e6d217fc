"""Goal: what a launcher relies on, whatever runs its processes. A new backend is added to `BACKENDS` and passes.

Method: one role that answers commands (echo_role.py), behind pipes as a process and in memory as a thread. Waiting is
with a deadline. At the end the supervisor and its crew survive a death on each of them.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import echo_role
import pytest
from thread_backend import ThreadBackend

from regrow.core.identity import Identity
from regrow.launch import supervisor
from regrow.launch.backend import Backend, Ended, Exit, Handle, News, Said, end, list_running, name_of
from regrow.launch.crew import Crew
from regrow.launch.orders import Assignment, Become, Evaluate, MakeCheckpoint, PeerDied, Stop
from regrow.launch.processes import LocalProcesses, socket_name
from regrow.launch.reports import Answer, Evaluating, Listening, Replace, Stopped
from regrow.launch.rundir import Logs, print_warning
from regrow.launch.supervisor import Appoint, KeepSpares, ProcessEnded, Stance, Supervisor, TakeStance, Tick

DEADLINE_SECONDS = 30.0
W1 = Identity(role="worker", id=1)


def make_processes(path: Path) -> Backend:
    return LocalProcesses(logs=Logs(path, print_warning), command=[sys.executable, echo_role.__file__])


def make_threads(path: Path) -> Backend:
    return ThreadBackend(echo_role.run)


BACKENDS = [make_processes, make_threads]


@pytest.fixture(params=BACKENDS, ids=lambda make: make.__name__.removeprefix("make_"))
def backend(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Backend]:
    backend = request.param(tmp_path)
    yield backend
    backend.close()


def assign(who: Identity = W1, *, listen: str = "here", **config: Any) -> Assignment:
    return Assignment(
        identity=who,
        token="ab" * 32,
        listen=listen,
        coordinator=None,
        threads=1,
        servers=1,
        frame_bytes_max=1 << 20,
        config=config,
    )


def hear(backend: Backend, done: Callable[[list[News]], bool]) -> list[News]:
    """News until that is so."""
    news: list[News] = []
    deadline = time.monotonic() + DEADLINE_SECONDS
    while not done(news):
        assert time.monotonic() < deadline, f"in vain; so far: {news}"
        news += backend.wait(0.1)
    return news


def count(number: int) -> Callable[[list[News]], bool]:
    return lambda news: len(news) >= number


def reports(news: list[News]) -> list[Any]:
    return [each.report for each in news if isinstance(each, Said)]


def only_exit(news: list[News]) -> int:
    (ended,) = [each for each in news if isinstance(each, Ended)]
    assert news[-1] is ended, "everything that was said comes first"
    assert ended.handle.exit == ended.exit
    return ended.exit.code


def is_over(news: list[News]) -> bool:
    return any(isinstance(each, Ended) for each in news)


def test_words_go_both_ways_in_order_and_whole(backend: Backend) -> None:
    handle = backend.start(assign(listen="a place", words="sch\N{LATIN SMALL LETTER O WITH DIAERESIS}n\n"))
    assert reports(hear(backend, count(1))) == [Listening(address="a place")]
    for _ in range(5):
        handle.tell(Evaluate())
    handle.tell(PeerDied(peer=Identity(role="server", id=3, incarnation=2)))
    handle.tell(Stop())
    news = hear(backend, is_over)
    assert reports(news) == [
        *(Evaluating(samples=number) for number in range(1, 6)),
        Replace(peer=Identity(role="server", id=3, incarnation=2), reason="schön\n"),
        Stopped(peak_rss_bytes=1 << 20),
    ]
    assert only_exit(news) == 0
    assert [each.handle for each in news] == [handle] * len(news)


def test_a_spare_becomes_somebody(backend: Backend) -> None:
    handle = backend.start(assign(Identity(role="standby", id=0)))
    handle.tell(Become(assignment=assign(listen="another place")))
    handle.who = W1
    assert reports(hear(backend, count(2))) == [Listening(address="here"), Listening(address="another place")]
    assert [each.who for each in list_running(backend, "worker")] == [W1]


def test_last_words_are_heard_before_the_end(backend: Backend) -> None:
    handle = backend.start(assign())
    handle.tell(MakeCheckpoint())
    news = hear(backend, is_over)
    assert reports(news) == [Listening(address="here"), echo_role.FAILURE]
    assert only_exit(news) == 1


@pytest.mark.parametrize("paused", [False, True])
def test_nobody_can_refuse_to_be_killed(backend: Backend, paused: bool) -> None:
    handle = backend.start(assign())
    hear(backend, count(1))
    if paused:
        handle.pause()
    began = time.monotonic()
    handle.kill()
    assert only_exit(hear(backend, is_over)) == -signal.SIGKILL
    assert time.monotonic() - began < 1.0
    handle.tell(Evaluate())  # nobody hears it
    for act in (handle.kill, handle.pause, handle.resume, handle.terminate):
        act()
    assert backend.wait(0.05) == []
    assert list_running(backend) == []


def test_who_is_paused_is_silent_and_then_answers(backend: Backend) -> None:
    handle = backend.start(assign())
    hear(backend, count(1))
    handle.pause()
    handle.tell(Evaluate())
    assert backend.wait(0.2) == []
    handle.resume()
    assert reports(hear(backend, count(1))) == [Evaluating(samples=1)]


def test_a_wait_is_bounded_and_can_be_ended(backend: Backend) -> None:
    backend.start(assign())
    hear(backend, count(1))
    began = time.monotonic()
    assert backend.wait(0.05) == []
    assert backend.wait(-1.0) == []
    backend.wake()
    assert backend.wait(60.0) == []
    assert time.monotonic() - began < 5.0


def test_whoever_does_not_stop_when_asked_is_ended(backend: Backend) -> None:
    obeys, deaf = backend.start(assign()), backend.start(assign(deaf=True))
    hear(backend, count(2))
    news = end(backend, backend.handles, asked_seconds=0.3, term_seconds=5.0, hurry=lambda: False)
    assert {each.handle: each.exit.code for each in news if isinstance(each, Ended)} == {
        obeys: 0,
        deaf: -signal.SIGTERM,
    }
    assert end(backend, backend.handles, asked_seconds=9.0, term_seconds=9.0, hurry=lambda: False) == []


def test_in_a_hurry_nobody_is_waited_for(backend: Backend) -> None:
    handle = backend.start(assign(deaf=True))
    hear(backend, count(1))
    began = time.monotonic()
    assert only_exit(end(backend, [handle], asked_seconds=60.0, term_seconds=60.0, hurry=lambda: True)) < 0
    assert time.monotonic() - began < 5.0


def test_all_end_with_their_backend(backend: Backend) -> None:
    handles = [backend.start(assign(deaf=True)) for _ in range(2)]
    handles[1].pause()
    backend.close()
    assert all(handle.exit is not None for handle in handles)
    backend.close()


def test_many_deaths_leave_no_open_files(backend: Backend) -> None:
    """A long run has hundreds of them, and a process may open only so many files. Words to the dead are lost."""

    def live_and_die() -> int:
        handle = backend.start(assign())
        handle.kill()
        hear(backend, is_over)
        handle.tell(Stop())
        return len(os.listdir("/proc/self/fd"))

    first = live_and_die()
    assert [live_and_die() for _ in range(3)] == [first] * 3


def test_a_coordinators_successor_has_its_address(backend: Backend) -> None:
    first, second = (Identity(role="coordinator", id=0, incarnation=number) for number in range(2))
    address = backend.choose_address(first, before=None)
    others = [backend.choose_address(Identity(role="server", id=0, incarnation=n), before=address) for n in range(2)]
    if address == "tcp:127.0.0.1:0":  # a port that is free; where that is, the coordinator says
        address = "tcp:127.0.0.1:4711"
    assert backend.choose_address(second, before=address) == address
    assert address not in others


def test_a_supervised_server_is_replaced(backend: Backend) -> None:
    """Supervisor, crew and backend: a server is killed, its spare takes the place and the coordinator is told."""
    crew = Crew(
        backend=backend,
        threads=dict.fromkeys(("coordinator", "server", "standby"), 1),
        token="ab" * 32,
        servers=1,
        frame_bytes_max=1 << 20,
        config={"words": "heard"},
    )
    subject, heard, handles = Supervisor(replaces=True), list[tuple[Identity, Any]](), list[Handle]()

    def supervise(event: supervisor.Event) -> None:
        for order in subject.receive(event):
            if not isinstance(order, supervisor.NoteEnd | supervisor.NoteSuccessor):
                crew.carry_out(order)

    supervise(Appoint(role="coordinator", id=0, now=0.0))
    crew.coordinator_address = "the coordinator's"
    for event in (
        Appoint(role="server", id=0, now=0.0),
        TakeStance(stance=Stance.REPLACING),
        KeepSpares(count=1, now=0.0),
        Tick(now=0.0),
    ):
        supervise(event)
    hear(backend, lambda news: sum(isinstance(report, Listening) for report in reports(news)) == 3)
    crew.handle(subject.current("server", 0)).kill()
    deadline = time.monotonic() + DEADLINE_SECONDS
    while len(heard) < 2:
        assert time.monotonic() < deadline, heard
        for news in backend.wait(0.1):
            handles.append(news.handle)
            if isinstance(news, Ended):
                supervise(ProcessEnded(who=news.handle.who, exit=news.exit, now=1.0))
            elif not isinstance(news.report, Answer):  # that they are there
                heard.append((news.handle.who, news.report))
    dead, heir = (Identity(role="server", id=0, incarnation=number) for number in range(2))
    assert sorted(heard, key=lambda entry: entry[0].role) == [
        (subject.current("coordinator", 0), Replace(peer=dead, reason="heard")),
        (heir, Listening(address=backend.choose_address(heir, before=None))),
    ]
    assert subject.current("server", 0) == heir == crew.handle(heir).who


# -- what is said of processes -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("code", "text"),
    [
        (0, "exited with code 0"),
        (7, "exited with code 7"),
        (-9, "was killed by SIGKILL"),
        (-63, "was killed by signal 63"),
    ],
)
def test_exit_in_words(code: int, text: str) -> None:
    assert str(Exit(code=code)) == text
    assert str(Exit(code=code, cause="was lost with its node")) == "was lost with its node"


@pytest.mark.parametrize(
    ("who", "name", "socket"),
    [
        (Identity(role="coordinator", id=0), "coordinator", "c0"),
        (Identity(role="coordinator", id=0, incarnation=2), "coordinator", "c0"),
        (Identity(role="server", id=2), "server 2", "s2"),
        (Identity(role="server", id=2, incarnation=1), "server 2", "s2.1"),
        (Identity(role="standby", id=0), "standby 0", "spare0"),
    ],
)
def test_names(who: Identity, name: str, socket: str) -> None:
    assert (name_of(who), socket_name(who)) == (name, socket)
