"""Goal: an outpost passes on everything, in order and whole, and leaves no child behind.

Method: the role of the backend tests (echo_role.py) as its child, spoken to as a launcher would. Waiting is with a
deadline.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator

import echo_role
import pytest

from regrow.core.identity import Identity
from regrow.launch import outpost
from regrow.launch.lines import encode, parse_report
from regrow.launch.orders import Assignment, Evaluate, Stop
from regrow.launch.outpost import Heard, Outpost, Superseded
from regrow.launch.reports import Evaluating, Listening, Progress, Ready, ServerCounters, Stopped

DEADLINE_SECONDS = 60.0
HELD_SECONDS = 0.1
LAST = 9  # a launcher later than any here
ECHO = (outpost.PYTHON, echo_role.__file__)
ASSIGNMENT = Assignment(
    identity=Identity(role="worker", id=1),
    token="ab" * 32,
    listen="here",
    coordinator=None,
    threads=1,
    servers=1,
    frame_bytes_max=1 << 20,
)


@pytest.fixture
def post() -> Iterator[Outpost]:
    made = Outpost(role="worker", threads=1, command=ECHO)
    yield made
    end(made)


def end(post: Outpost) -> None:
    post.act(signal.SIGKILL, launcher=LAST)
    hear_all(post)
    post.close()


def hear_all(post: Outpost) -> tuple[list[object], bytes, Heard]:
    """Until its end."""
    data, log, deadline = b"", b"", time.monotonic() + DEADLINE_SECONDS
    while time.monotonic() < deadline:
        heard = post.hear(0.1, launcher=LAST)
        data, log = data + heard.reports, log + heard.log
        if heard.exit is not None:
            return [parse_report(line) for line in data.split(b"\n") if line], log, heard
    raise AssertionError(f"no end; so far {data!r}")


def test_words_go_both_ways_and_the_end_comes_last(post: Outpost) -> None:
    post.tell(encode(ASSIGNMENT) + b"\n" + encode(Evaluate()) + b"\n")
    post.tell(encode(Stop()) + b"\n")
    reports, _, heard = hear_all(post)
    assert reports == [Listening(address="here"), Evaluating(samples=1), Stopped(peak_rss_bytes=1 << 20)]
    assert heard.exit is not None and heard.exit[0] == 0
    assert heard.exit[1] > 0 and heard.exit[2] > 1 << 20
    assert post.hear(0.0).exit == heard.exit, "and is told again"
    post.tell(b"nobody hears it\n")
    post.act(signal.SIGKILL)


def test_a_signal_ends_it(post: Outpost) -> None:
    post.tell(encode(ASSIGNMENT) + b"\n")
    post.act(signal.SIGSTOP)
    post.act(signal.SIGKILL)
    assert hear_all(post)[2].exit[0] == -signal.SIGKILL  # type: ignore[index]


def test_a_log_larger_than_an_answer_comes_whole() -> None:
    code = "import sys; sys.stderr.write('a line of a log\\n' * 20000); print('no report', flush=True)"
    post = Outpost(role="worker", threads=1, command=(sys.executable, "-c", code))
    reports, log, _ = hear_all(post)
    assert log == b"a line of a log\n" * 20000
    assert reports == [None]
    post.close()


def test_what_nobody_waits_for_is_gathered() -> None:
    """`cat` says what it is told. The first word on how a worker gets on is passed on at once, the next with the end of
    its time or of the question, and whatever else is said takes along what is there."""
    progress = [encode(Progress(step=step, samples=1, loss=0.0, hist_pos=[], hist_neg=[])) + b"\n" for step in range(4)]
    counters = encode(ServerCounters(pulls=1, pushes=1, bytes_in=1, bytes_out=1)) + b"\n"
    ready = encode(Ready(rows=1, bytes=2)) + b"\n"
    post = Outpost(role="worker", threads=1, command=("cat",), gather_seconds=DEADLINE_SECONDS)
    assert (say(post, progress[0]), take(post)) == (True, progress[0])
    assert (say(post, progress[1]), take(post, HELD_SECONDS)) == (False, progress[1])
    assert (say(post, counters), take(post, HELD_SECONDS)) == (False, counters)
    say(post, progress[2])
    say(post, counters)
    assert (say(post, ready), take(post)) == (True, progress[2] + counters + ready)
    post._gather_seconds = 0.0  # its time has come
    assert (say(post, progress[3]), take(post)) == (True, progress[3])
    assert (say(post, b"no report\n"), take(post)) == (True, b"no report\n")
    end(post)


def say(post: Outpost, line: bytes) -> bool:
    """Whether what is there by then is to be passed on at once. Returns when `cat` has said it."""
    before, deadline = len(post._reports), time.monotonic() + DEADLINE_SECONDS
    post.tell(line)
    with post._news:
        while len(post._reports) < before + len(line):
            assert time.monotonic() < deadline
            post._news.wait(0.1)
        return post._due_at <= time.monotonic()


def take(post: Outpost, seconds: float = DEADLINE_SECONDS) -> bytes:
    began = time.monotonic()
    heard = post.hear(seconds).reports
    assert (time.monotonic() - began >= seconds) == (seconds == HELD_SECONDS)
    return heard


def test_a_launcher_that_asks_nothing_is_gone() -> None:
    gone = threading.Event()
    post = Outpost(role="worker", threads=1, command=ECHO, launcher_seconds=0.2, on_abandoned=gone.set)
    pid = post._process.pid
    assert gone.wait(DEADLINE_SECONDS)
    deadline = time.monotonic() + DEADLINE_SECONDS
    while time.monotonic() < deadline:
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            end(post)
            return
        time.sleep(0.01)
    raise AssertionError("its child is still there")


# -- one launcher after another ------------------------------------------------------------------------------

SERVER = Identity(role="server", id=2, incarnation=1)


def test_a_successor_hears_who_is_here_and_what_was_said(post: Outpost) -> None:
    post.tell(encode(ASSIGNMENT) + b"\n", ASSIGNMENT.identity)
    post.keep(b"old", 1, "ab" * 32)
    post.keep(b"new", 2, "cd" * 32)
    post.keep(b"late", 1, "ef" * 32)
    post.tell(encode(Evaluate()) + b"\n", SERVER)
    heard, deadline = b"", time.monotonic() + DEADLINE_SECONDS
    while b"evaluating" not in heard and time.monotonic() < deadline:
        heard += post.hear(0.1).reports
    estate = post.take_over(1)
    assert (estate.who, estate.born, estate.told) == (SERVER, ASSIGNMENT.identity, frozenset({"evaluate"}))
    assert (estate.memo, estate.memo_number, post.read_token(1)) == (b"new", (0, 2), "cd" * 32)
    assert parse_report(estate.said[-1]) == Evaluating(samples=1)
    post.tell(encode(Stop()) + b"\n", SERVER, launcher=1)
    assert hear_all(post)[2].exit[0] == 0  # type: ignore[index]


def test_words_of_a_launcher_that_was_followed_come_too_late(post: Outpost) -> None:
    post.tell(encode(ASSIGNMENT) + b"\n", ASSIGNMENT.identity)
    waiting = threading.Thread(target=lambda: refused.append(call(lambda: post.hear(DEADLINE_SECONDS))))
    refused: list[bool] = []
    deadline = time.monotonic() + DEADLINE_SECONDS
    while not post.hear(0.1).reports and time.monotonic() < deadline:
        pass
    waiting.start()
    post.take_over(2)
    waiting.join(DEADLINE_SECONDS)
    for late in (
        lambda: post.tell(encode(Stop()) + b"\n", SERVER),
        lambda: post.act(signal.SIGKILL),
        lambda: post.keep(b"late", 9, ""),
        lambda: post.take_over(1),
        lambda: post.read_token(0),
    ):
        refused.append(call(late))
    assert refused == [True] * 6
    estate = post.take_over(3)
    assert (estate.who, estate.memo) == (ASSIGNMENT.identity, b"")
    assert post.hear(0.0, launcher=3).exit is None


def call(word: Callable[[], object]) -> bool:
    """Whether it is refused."""
    try:
        word()
    except Superseded:
        return True
    return False


def test_what_a_successor_hears_begins_with_a_whole_line() -> None:
    code = (
        'import sys; print(\'{"event":"listening","address":"a"}\'); sys.stdout.write(\'{"event":"ready",\');'
        'sys.stdout.flush(); sys.stdin.readline(); print(\'"rows":1,"bytes":2}\', flush=True)'
    )
    post = Outpost(role="worker", threads=1, command=(sys.executable, "-c", code))
    deadline = time.monotonic() + DEADLINE_SECONDS
    taken = b""
    while b"ready" not in taken and time.monotonic() < deadline:
        taken += post.hear(0.1).reports
    estate = post.take_over(1)
    assert estate.said == (encode(Listening(address="a")),)
    post.tell(b"go on\n", launcher=1)
    assert hear_all(post)[0] == [Ready(rows=1, bytes=2)]
    post.close()


def test_a_new_directory_gets_the_whole_log() -> None:
    code = "import sys; sys.stderr.write('a line of a log\\n' * 20); print('no report', flush=True)"
    post = Outpost(role="worker", threads=1, command=(sys.executable, "-c", code))
    assert hear_all(post)[1] == b"a line of a log\n" * 20
    post.take_over(1)
    assert post.hear(0.0, launcher=1).log == b""
    assert post.hear(0.0, launcher=1, whole_log=True).log == b"a line of a log\n" * 20
    post.close()
