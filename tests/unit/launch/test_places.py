"""Goal: a process in a place on another host is to its lead what one behind a pipe is; places come, go and are given to
whoever needs one; the token stays where it is.

Method: a lead and keepers in threads of this process, over the loopback interface, with the role that answers every
command (echo_role.py) as real processes. Waiting is with a deadline.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import echo_role
import pytest

from regrow.core.identity import Identity
from regrow.errors import RegrowError, UserError
from regrow.launch import keeper as keeper_file
from regrow.launch import places
from regrow.launch.backend import Ended, News, Said
from regrow.launch.hosts import HostBackend, RemoteProcess
from regrow.launch.keeper import Keeper
from regrow.launch.orders import Ask, Assignment, Evaluate, Stop
from regrow.launch.reports import Answer, Evaluating, Listening, Stopped
from regrow.launch.rundir import Logs, print_warning
from regrow.launch.token import make_token, read_token

DEADLINE_SECONDS = 60.0
TOKEN = "ab" * 32
S1, SPARE = Identity(role="server", id=1), Identity(role="standby", id=0)


class World:
    """A lead, and those who keep places for it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.said: list[str] = []
        self.threads: list[threading.Thread] = []
        self.errors: list[str] = []
        self.backend = HostBackend(
            address="tcp:127.0.0.1:0", token=TOKEN, logs=Logs(path, print_warning), say=self.said.append
        )

    def keep(self, role: str, id: int = 0) -> None:
        keeper = Keeper(
            role=role,
            id=id,
            lead=self.backend.address,
            token=TOKEN,
            host="127.0.0.1",
            logs=self.path,
            command=[sys.executable, echo_role.__file__],
        )

        def run() -> None:
            try:
                keeper.run()
            except RegrowError as error:
                self.errors.append(error.message)

        self.threads.append(threading.Thread(target=run))
        self.threads[-1].start()

    def start(self, who: Identity, **config: Any) -> RemoteProcess:
        assignment = Assignment(
            identity=who,
            token=TOKEN,
            listen=self.backend.choose_address(who, before=None),
            coordinator=None,
            threads=1,
            servers=1,
            frame_bytes_max=1 << 20,
            config=config,
        )
        process = self.backend.start(assignment)
        assert isinstance(process, RemoteProcess)
        return process

    def hear(self, done: Callable[[list[News]], bool]) -> list[News]:
        news: list[News] = []
        deadline = time.monotonic() + DEADLINE_SECONDS
        while not done(news):
            assert time.monotonic() < deadline, f"in vain; so far: {news}, {self.said}"
            news += self.backend.wait(0.1)
        return news

    def close(self) -> None:
        self.backend.close()
        for thread in self.threads:
            thread.join(DEADLINE_SECONDS)
            assert not thread.is_alive()


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    made = World(tmp_path)
    yield made
    made.close()


def reports(news: list[News]) -> list[Any]:
    return [each.report for each in news if isinstance(each, Said)]


def count(number: int) -> Callable[[list[News]], bool]:
    return lambda news: len(news) >= number


def is_over(news: list[News]) -> bool:
    return any(isinstance(each, Ended) for each in news)


def test_words_wait_for_a_place_and_go_both_ways_in_order(world: World) -> None:
    process = world.start(S1)
    for command in (Evaluate(), Evaluate(), Ask()):
        process.tell(command)
    assert reports(world.hear(count(1))) == [Answer()], "one that has no place does not hang"
    world.keep("server", 0)  # not this one
    world.keep("server", 1)
    process.tell(Stop())
    news = world.hear(is_over)
    assert reports(news) == [
        Listening(address="tcp:127.0.0.1:0"),
        Evaluating(samples=1),
        Evaluating(samples=2),
        Stopped(peak_rss_bytes=1 << 20),
    ]
    assert process.exit is not None
    assert process.exit.code == 0
    assert process.log == f"127.0.0.1:{world.path}"


def test_who_is_killed_has_its_successor_in_the_same_place(world: World) -> None:
    world.keep("server", 1)
    first = world.start(S1)
    world.hear(count(1))
    first.kill()
    world.hear(is_over)
    assert first.exit is not None
    assert first.exit.code == -signal.SIGKILL
    first.tell(Evaluate())  # nobody hears it
    world.start(Identity(role="server", id=1, incarnation=1))
    assert reports(world.hear(count(1))) == [Listening(address="tcp:127.0.0.1:0")]


def test_a_standby_is_for_successors_and_spares_take_what_is_free(world: World) -> None:
    world.keep("standby")
    world.keep("server", 3)
    assert world.start(S1).place is None, "the first of a place waits for it"
    world.hear(lambda news: len(world.said) == 2)
    heir = world.start(Identity(role="worker", id=0, incarnation=1))
    assert heir.place is not None
    assert heir.place.role == "standby"
    spare = world.start(SPARE)
    assert spare.place is not None
    assert (spare.place.role, spare.place.id) == ("server", 3)


def test_one_that_cannot_be_reached_counts_as_ended_when_it_is_killed(world: World) -> None:
    wanted = world.start(S1)
    wanted.kill()
    assert [each.handle for each in world.hear(is_over)] == [wanted]
    world.keep("server", 1)
    world.hear(lambda news: bool(world.said))
    assert world.backend.wait(0.2) == [], "nobody starts it any more"


def test_the_lead_tells_what_it_waits_for(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("regrow.launch.hosts.WANTED_SECONDS", 0.0)
    world.start(Identity(role="server", id=2, incarnation=1))
    world.hear(lambda news: bool(world.said))
    assert world.said[0].startswith("server 2 waits for a place: `regrow serve --role server --id 2 or --role standby`")


def test_a_place_without_a_lead_ends(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keeper_file, "LEAD_SECONDS_MAX", 0.5)
    world.backend.close()
    world.keep("server", 1)
    world.threads[0].join(DEADLINE_SECONDS)
    assert world.errors == [f"server 1: no lead at {world.backend.address} for 0 s"]


def test_the_token_does_not_travel(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[bytes] = []
    real = places.encode_saying
    monkeypatch.setattr("regrow.launch.hosts.encode_saying", lambda saying: sent.append(real(saying)) or real(saying))
    world.keep("server", 1)
    world.start(S1)
    world.hear(count(1))
    assert sent
    assert not any(TOKEN.encode() in line for line in sent)


def test_a_token_file_is_its_owners_alone(tmp_path: Path) -> None:
    path = tmp_path / "token"
    make_token(str(path))
    assert path.stat().st_mode & 0o777 == 0o600
    assert len(bytes.fromhex(read_token(str(path)))) == 32
    with pytest.raises(UserError, match="cannot make"):
        make_token(str(path))
    path.chmod(0o640)
    with pytest.raises(UserError, match=r"others can read .* \(mode 0640\)"):
        read_token(str(path))
    path.chmod(0o600)
    path.write_text("abc")
    with pytest.raises(UserError, match="holds no token") as error:
        read_token(str(path))
    assert "abc" not in str(error.value)
    for wrong in (tmp_path / "none", tmp_path):
        with pytest.raises(UserError, match="cannot read the token file"):
            read_token(str(wrong))
    if os.geteuid() == 0:
        path.write_text("ab" * 32)
        os.chown(path, 12345, 12345)
        with pytest.raises(UserError, match="another user"):
            read_token(str(path))
