"""Goal: however many connect and say nothing, there is room for one more, and it is they who go; and they do not fill
a log.

Method: strangers that are plain objects; a log that is listened to, and whose pause ends when the test says so.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import socket
from typing import Any

import pytest

from regrow.runtime import strangers
from regrow.runtime.strangers import FailureLog, Strangers, read_address


@dataclasses.dataclass(eq=False)
class One:
    name: str
    has_spoken: bool = False


@pytest.fixture(autouse=True)
def _few(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(strangers, "STRANGERS_MAX", 5)
    monkeypatch.setattr(strangers, "STRANGERS_PER_ADDRESS_MAX", 3)


def test_the_oldest_of_an_address_that_has_too_many_goes() -> None:
    there = Strangers()
    crowd = [One(f"a{number}") for number in range(4)]
    assert [there.add(one, "a") for one in crowd] == [None, None, None, crowd[0]]
    assert len(there) == 3


def test_whoever_has_spoken_goes_last() -> None:
    there = Strangers()
    crowd = [One("a0", has_spoken=True), One("a1"), One("a2", has_spoken=True), One("a3"), One("a4"), One("a5")]
    assert [there.add(one, "a") for one in crowd[:5]] == [None, None, None, crowd[1], crowd[3]]
    crowd[4].has_spoken = True
    assert there.add(crowd[5], "a") is crowd[0], "all have: the oldest"


def test_one_goes_from_the_address_with_the_most() -> None:
    there = Strangers()
    first, *others = [One(f"b{number}") for number in range(2)], *[One(f"a{number}") for number in range(3)]
    for one in first:
        assert there.add(one, "b") is None
    for one in others:
        assert there.add(one, "a") is None
    assert there.add(One("c"), "c") is others[0], "though those of b are older"
    assert len(there) == 5


def test_who_is_gone_leaves_room_and_is_not_counted_twice() -> None:
    there = Strangers()
    one, two, three = One("1"), One("2"), One("3")
    for each in (one, two, three):
        there.add(each, "a")
    there.discard(two)
    there.discard(two)
    assert (len(there), there.add(One("4"), "a")) == (2, None)


def test_addresses() -> None:
    left, right = socket.socketpair()
    with left, right:
        assert read_address(left).startswith("user ")
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as client:
        assert read_address(client) == "127.0.0.1"
    assert read_address(None) == "unknown"

    class Far:
        family = socket.AF_INET6

        def getpeername(self) -> tuple[Any, ...]:
            return ("2001:db8:1:2:3:4:5:6%eth0", 7, 0, 0)

    assert read_address(Far()) == "2001:db8:1:2::/64", "whoever has one has all of them"


def test_a_line_in_a_while_says_what_was_left_out(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(strangers, "FAILURES_LOG_SECONDS", 3600.0)
    caplog.set_level(logging.INFO, logger="regrow.transport")

    async def main() -> None:
        failures = FailureLog()
        for number in range(1000):
            failures.report(f"reason {number}")
        assert len(caplog.messages) == 1
        failures._resume()  # as its timer does
        failures.report("reason 1000")
        failures._resume()
        failures._resume()
        for number in range(1001, 1004):
            failures.report(f"reason {number}")
        failures.close()

    asyncio.run(main())
    assert [line.removeprefix("a connection ended before its handshake: ") for line in caplog.messages] == [
        "reason 0",
        "reason 999 (and 998 more since the last line)",
        "reason 1000",
        "reason 1001",
        "reason 1003 (and 1 more since the last line)",
    ]
