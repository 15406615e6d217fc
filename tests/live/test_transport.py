"""Goal: connections over real sockets open, carry, break and close as their users are told.

Method: two endpoints in one process on Unix and TCP sockets, under both event loops; whole clusters where a
process has to die. Waiting is polling with a deadline. What happens after a break is in test_resume.py.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import threading
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers import job, plan_of, server, table, wait_until, worker

from regrow.core.identity import Identity
from regrow.core.messages import Message, RecordsWritten, Rows
from regrow.errors import ChildFailed, ConnectionLost, UserError
from regrow.launch.cluster import LocalCluster
from regrow.runtime import client as runtime_client
from regrow.runtime import connection as connection_file
from regrow.runtime import strangers, transport
from regrow.runtime.client import SocketClient, new_event_loop
from regrow.runtime.transport import Endpoint, parse_address

TOKEN = b"t" * 32
SECONDS_MAX = 20.0


class Side:
    """An endpoint, and everything it reported."""

    def __init__(self, local: Identity, *, token: bytes = TOKEN, **options: Any) -> None:
        self.opened: list[Identity] = []
        self.heard: list[tuple[Identity, Message]] = []
        self.lost: list[tuple[Identity, str]] = []
        self.resumed: list[Identity] = []
        self.fenced: list[tuple[Identity, str]] = []
        self.story: list[str] = []  # of connections: there, or lost
        self.endpoint = Endpoint(
            local=local,
            token=token,
            section_bytes_max=64 << 20,
            on_open=lambda peer: self._note(self.opened, peer, "there"),
            on_message=lambda source, message: self.heard.append((source, message)),
            on_lost=lambda peer, reason: self._note(self.lost, (peer, reason), "lost"),
            on_resumed=lambda peer: self._note(self.resumed, peer, "there"),
            on_fenced=lambda peer, refusal, reason: self.fenced.append((peer, reason)),
            **options,
        )

    def _note(self, kept: list[Any], what: Any, word: str) -> None:
        kept.append(what)
        self.story.append(word)

    def cut(self) -> None:
        """Breaks every connection, whatever is on the way."""
        for connection in list(self.endpoint.connections):
            connection.abort()

    def requests(self) -> list[int]:
        return [message.request for _, message in self.heard]  # type: ignore[attr-defined]


async def until(true: Callable[[], Any]) -> None:
    deadline = time.monotonic() + SECONDS_MAX
    while not true():
        assert time.monotonic() < deadline, "it did not happen"
        await asyncio.sleep(0.001)


@pytest.fixture(params=["asyncio", "uvloop"])
def run(request: pytest.FixtureRequest) -> Callable[[Awaitable[None]], None]:
    """Runs a coroutine on the one loop and on the other."""

    def runner(main: Any) -> None:
        loop = asyncio.new_event_loop() if request.param == "asyncio" else new_event_loop()
        loop.run_until_complete(asyncio.wait_for(main, 3 * SECONDS_MAX))
        loop.close()  # after a failure it would wait for the sockets that were left open

    return runner


@pytest.fixture(params=["unix", "tcp"])
def address(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return f"unix:{tmp_path}/s" if request.param == "unix" else "tcp:127.0.0.1:0"


S0, W0 = server(0), worker(0)


def test_messages_of_all_sizes_both_ways(run: Any, address: str) -> None:
    async def main() -> None:
        left, right = Side(W0), Side(S0)
        actual = await right.endpoint.listen(address)
        await left.endpoint.connect(actual, S0)
        await until(lambda: right.opened)
        assert (left.opened, right.opened) == ([S0], [W0])
        sizes = (0, 1, 1000, 3_000_000, 2)
        for size in sizes:
            rows = np.arange(size, dtype=np.float32)
            left.endpoint.send(S0, Rows(request=size, durable=0, clock=0, rows=rows))
            right.endpoint.send(W0, Rows(request=size, durable=1, clock=1, rows=rows))
        for side, other in ((left, S0), (right, W0)):
            await until(lambda: len(side.heard) == len(sizes))  # noqa: B023
            assert [source for source, _ in side.heard] == [other] * len(sizes)
            for size, (_, message) in zip(sizes, side.heard, strict=True):
                assert isinstance(message, Rows)
                assert np.array_equal(message.rows, np.arange(size, dtype=np.float32))
        assert left.endpoint.bytes_out > left.endpoint.bytes_in > 12_000_000  # the handshake is not counted in
        await left.endpoint.close()
        await until(lambda: right.lost)
        assert right.lost == [(W0, "the connection was closed by the other side")]
        await right.endpoint.close()

    run(main())


def test_sections_are_received_in_place(run: Any, address: str) -> None:
    target = np.zeros(100_000, np.float32)

    async def main() -> None:
        right = Side(S0)
        left = Side(W0, place=lambda peer, cls, meta, sizes: [target] if cls is Rows else None)
        await left.endpoint.connect(await right.endpoint.listen(address), S0)
        await until(lambda: right.opened)
        right.endpoint.send(W0, Rows(request=1, durable=0, clock=0, rows=np.ones(100_000, np.float32)))
        await until(lambda: left.heard)
        assert left.heard[0][1].rows is target  # type: ignore[attr-defined]
        assert target.sum() == 100_000
        await left.endpoint.close()
        await right.endpoint.close()

    run(main())


def test_what_was_queued_leaves_before_the_end(run: Any, address: str) -> None:
    async def main() -> None:
        left, right = Side(W0), Side(S0)
        await left.endpoint.connect(await right.endpoint.listen(address), S0)
        for request in range(20):
            rows = np.zeros(200_000, np.float32)
            left.endpoint.send(S0, Rows(request=request, durable=0, clock=0, rows=rows))
        await left.endpoint.close()
        await until(lambda: right.lost)
        assert [message.request for _, message in right.heard] == list(range(20))  # type: ignore[attr-defined]
        await right.endpoint.close()

    run(main())


def test_a_refusal_reaches_the_other_side(run: Any, address: str) -> None:
    async def main() -> None:
        left, right = Side(W0), Side(S0)
        await left.endpoint.connect(await right.endpoint.listen(address), S0)
        await until(lambda: right.opened)
        right.endpoint.refuse(W0, "no such row")
        await until(lambda: left.lost)
        assert left.lost == [(S0, "refused: no such row")]
        await left.endpoint.close()
        await right.endpoint.close()

    run(main())


@pytest.mark.parametrize(
    ("token", "expected", "reason"),
    [
        (b"x" * 32, S0, "refused: the peer does not hold this run's token"),
        (TOKEN, server(1), "refused: this is server 0, server 1 was meant"),
        (TOKEN, server(0, incarnation=1), "refused: this is S0 with incarnation 0, 1 was meant"),
    ],
)
def test_links_that_do_not_open(run: Any, address: str, token: bytes, expected: Identity, reason: str) -> None:
    async def main() -> None:
        left, right = Side(W0, token=token), Side(S0)
        actual = await right.endpoint.listen(address)
        with pytest.raises(ConnectionLost, match=f"cannot open a link: .*{reason}"):
            await left.endpoint.connect(actual, expected)
        await until(lambda: not right.endpoint.connections)
        assert (left.opened, left.lost, left.heard, right.heard) == ([], [], [], [])
        assert (left.endpoint.lines, len(right.endpoint.strangers), right.endpoint.kept_bytes) == ({}, 0, 0)
        await left.endpoint.close()
        await right.endpoint.close()

    run(main())


def test_nobody_listens(run: Any, tmp_path: Path) -> None:
    async def main() -> None:
        left = Side(W0)
        for nowhere in (f"unix:{tmp_path}/nobody", f"tcp:127.0.0.1:{free_port()}"):
            with pytest.raises(ConnectionLost, match="cannot reach S0 at"):
                await left.endpoint.connect(nowhere, S0)
        with pytest.raises(UserError, match="cannot listen at unix:/nowhere/at/all"):
            await left.endpoint.listen("unix:/nowhere/at/all")
        await left.endpoint.close()

    run(main())


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def test_a_second_connection_of_the_same_peer_replaces_the_first(run: Any, address: str) -> None:
    async def main() -> None:
        first, second, right = Side(W0), Side(W0), Side(S0)
        actual = await right.endpoint.listen(address)
        await first.endpoint.connect(actual, S0)
        await second.endpoint.connect(actual, S0)
        await until(lambda: first.lost)
        second.endpoint.send(S0, RecordsWritten(request=1))
        await until(lambda: right.heard)
        assert right.lost == [], "the peer is still there"
        right.endpoint.send(W0, RecordsWritten(request=2))
        await until(lambda: second.heard)
        assert first.heard == []
        for side in (first, second, right):
            await side.endpoint.close()

    run(main())


async def connect_silently(address: str) -> Any:
    """A connection that says nothing, and does not listen either."""
    loop = asyncio.get_running_loop()
    scheme, host, port = parse_address(address)
    make: Any = (
        loop.create_unix_connection(asyncio.Protocol, host)
        if scheme == "unix"
        else loop.create_connection(asyncio.Protocol, host, port)
    )
    made, _ = await make
    return made


def test_strangers_are_few_and_have_little_time(run: Any, address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(strangers, "STRANGERS_MAX", 3)

    async def main() -> None:
        right = Side(S0)
        there = right.endpoint.strangers
        actual = await right.endpoint.listen(address)
        idle = [await connect_silently(actual) for _ in range(3)]
        await until(lambda: len(there) == 3)
        extra = await connect_silently(actual)
        await until(idle[0].is_closing)  # the oldest goes
        assert (len(there), extra.is_closing(), idle[1].is_closing()) == (3, False, False)
        idle[1].close()
        await until(lambda: len(there) == 2)
        monkeypatch.setattr(connection_file, "FIRST_BYTE_SECONDS_MAX", 0.05)
        late = await connect_silently(actual)
        await until(late.is_closing)
        assert len(there) == 2
        monkeypatch.setattr(connection_file, "HANDSHAKE_SECONDS_MAX", 0.2)
        monkeypatch.setattr(connection_file, "FIRST_BYTE_SECONDS_MAX", 10.0)
        slow = await connect_silently(actual)
        slow.write(b"R")
        await until(slow.is_closing)
        assert len(there) == 2
        await right.endpoint.close()
        assert len(there) == 0
        await until(lambda: all(one.is_closing() for one in [*idle, extra]))

    run(main())


def test_idle_connections_keep_nobody_from_opening(run: Any, address: str) -> None:
    async def main() -> None:
        left, right = Side(W0), Side(S0)
        actual = await right.endpoint.listen(address)
        idle = [await connect_silently(actual) for _ in range(400)]
        began = time.monotonic()
        left.endpoint.dial(S0, actual)
        left.endpoint.send(S0, RecordsWritten(request=1))
        await until(lambda: right.heard)
        assert time.monotonic() - began < 2.0
        assert len(right.endpoint.strangers) <= strangers.STRANGERS_PER_ADDRESS_MAX
        await until(lambda: not len(right.endpoint.strangers))  # they have said nothing in time
        for one in idle:
            one.abort()
        await left.endpoint.close()
        await right.endpoint.close()

    run(main())


def test_hosts_that_vanish_are_noticed(run: Any) -> None:
    """What the kernel is told: a test cannot make a host vanish."""

    async def main() -> None:
        left, right = Side(W0), Side(S0)
        await left.endpoint.connect(await right.endpoint.listen("tcp:127.0.0.1:0"), S0)
        await until(lambda: right.opened)
        for side in (left, right):
            (connection,) = side.endpoint.connections
            sock = connection._transport.get_extra_info("socket")
            assert sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
            names = ("TCP_KEEPIDLE", "TCP_KEEPINTVL", "TCP_KEEPCNT", "TCP_USER_TIMEOUT")
            found = [sock.getsockopt(socket.IPPROTO_TCP, getattr(socket, name)) for name in names]
            assert found == [
                connection_file.KEEPALIVE_IDLE_SECONDS,
                connection_file.KEEPALIVE_EVERY_SECONDS,
                connection_file.KEEPALIVE_ASKED_MAX,
                1000 * connection_file.UNACKNOWLEDGED_SECONDS_MAX,
            ]
        await left.endpoint.close()
        await right.endpoint.close()

    run(main())


def test_an_attempt_that_nobody_answers_ends(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A host that drops what we send: here a listener whose queue is full and who takes nobody."""
    monkeypatch.setattr(transport, "CONNECT_SECONDS_MAX", 0.2)

    async def main() -> None:
        with socket.socket() as full, contextlib.ExitStack() as waiting:
            full.bind(("127.0.0.1", 0))
            full.listen(0)
            for _ in range(3):
                other = waiting.enter_context(socket.socket())
                other.setblocking(False)
                other.connect_ex(full.getsockname())
            left = Side(W0)
            began = time.monotonic()
            with pytest.raises(ConnectionLost, match=r"cannot reach S0 at tcp:.*: no answer in 0\.2 s"):
                await left.endpoint.connect(f"tcp:127.0.0.1:{full.getsockname()[1]}", S0)
            assert time.monotonic() - began < 2.0
            await left.endpoint.close()

    run(main())


def test_what_is_kept_can_be_asked_for_while_links_are_added() -> None:
    """A thread that loads rows asks while the loop goes on. Here the one who is asked adds a link itself, in the
    middle of the count, which is the worst moment there is."""
    side = Side(S0)
    side.endpoint.send(W0, RecordsWritten(request=1))
    kept_bytes = side.endpoint.kept_bytes

    class Adding:
        @property
        def kept_bytes(self) -> int:
            side.endpoint.send(worker(len(side.endpoint.lines)), RecordsWritten(request=1))
            return kept_bytes

    side.endpoint.lines[W0].link = Adding()  # type: ignore[assignment]
    side.endpoint._links = (side.endpoint.lines[W0].link,)
    for _ in range(5):
        assert side.endpoint.kept_bytes > 0
    assert len(side.endpoint.lines) > 5


def test_a_peer_that_never_closes_does_not_keep_a_refusal(run: Any, tmp_path: Path, monkeypatch: Any) -> None:
    """Whoever is refused may neither read nor close; its connection is cut."""
    monkeypatch.setattr(connection_file, "CLOSE_SECONDS_MAX", 0.1)

    async def main() -> None:
        left, right = Side(W0), Side(S0)
        await left.endpoint.connect(await right.endpoint.listen(f"unix:{tmp_path}/s"), S0)
        await until(lambda: right.opened)
        (stuck,) = left.endpoint.connections
        stuck._transport.pause_reading()
        right.endpoint.send(W0, Rows(request=1, durable=0, clock=0, rows=np.zeros(8 << 20, np.float32)))
        right.endpoint.refuse(W0, "no such row")
        await until(lambda: not right.endpoint.connections)
        await left.endpoint.close()
        await right.endpoint.close()

    run(main())


def test_a_peer_that_never_reads_does_not_keep_us(run: Any, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(connection_file, "CLOSE_SECONDS_MAX", 0.1)

    async def main() -> None:
        left, right = Side(W0), Side(S0)
        await left.endpoint.connect(await right.endpoint.listen(f"unix:{tmp_path}/s"), S0)
        await until(lambda: right.opened)
        for connection in left.endpoint.connections:
            connection._transport.pause_reading()
        rows = np.zeros(8 << 20, np.float32)
        right.endpoint.send(W0, Rows(request=1, durable=0, clock=0, rows=rows))
        await right.endpoint.close()
        assert [peer for peer, _ in right.lost] == [W0]
        await left.endpoint.close()

    run(main())


@pytest.mark.parametrize("wrong", ["", "unix:", "tcp:localhost", "tcp::80", "tcp:x:65536", "tcp:x:-1", "udp:x:1"])
def test_addresses_that_are_none(wrong: str) -> None:
    with pytest.raises(UserError, match="is not an address"):
        parse_address(wrong)
    assert parse_address("tcp:::1:80") == ("tcp", "::1", 80)


# --- Clients and clusters ---


def threads() -> set[str]:
    return {thread.name for thread in threading.enumerate()}


def test_a_client_that_cannot_connect_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runtime_client, "COORDINATOR_SECONDS_MAX", 0.3)
    before = threads()
    with pytest.raises(ConnectionLost, match="cannot reach C at unix:"):
        SocketClient(
            identity=W0,
            token=TOKEN,
            coordinator=f"unix:{tmp_path}/nobody",
            job=job(),
            redo_bytes_max=1,
            section_bytes_max=1,
        )
    assert threads() == before


def test_a_large_job_reaches_a_worker_that_comes_late() -> None:
    """The view follows the handshake at once, and is longer than anything a stranger may say."""
    of = job(*(table(f"a table with a rather long name {index}") for index in range(300)), workers=2)
    with LocalCluster(servers=1) as cluster:
        cluster.client(of)
        late = cluster.client(of, worker=1)
        ticket = late.pull(plan_of(of, [[0]] * 300), step=1)
        assert ticket.wait(SECONDS_MAX).size == 600


def test_the_redo_window_is_kept_however_fast_the_caller() -> None:
    with LocalCluster(servers=2) as cluster:
        client = cluster.client(job(servers=2), redo_bytes_max=200)
        ticket = client.pull(plan_of(client.job, [range(10)]), step=1)
        ticket.wait(SECONDS_MAX)
        for _ in range(200):
            client.push(ticket, np.ones(20, np.float32))  # 80 bytes: two fit
        client.drain(SECONDS_MAX)
        assert client.session.redo_bytes_peak == 160
        assert client.records(0, 0, 10).tolist() == [[-200.0, -200.0]] * 10


def test_closing_a_client_ends_every_wait() -> None:
    with LocalCluster(servers=1) as cluster:
        client = cluster.client(job(mode="sync"))
        client.pull(plan_of(client.job, [[0]]), step=1).wait(SECONDS_MAX)
        held = client.pull(plan_of(client.job, [[0]]), step=2)  # nobody pushes step 1
        ended: list[BaseException] = []

        def wait() -> None:
            try:
                held.wait()
            except ConnectionLost as error:
                ended.append(error)

        waiting = threading.Thread(target=wait)
        waiting.start()
        client.close()
        waiting.join(SECONDS_MAX)
        assert [str(error) for error in ended] == ["this client is closed"]
        with pytest.raises(ConnectionLost, match="this client is closed"):
            client.pull(plan_of(client.job, [[0]]), step=2)
        client.close()


def test_a_server_that_dies_ends_every_wait() -> None:
    with LocalCluster(servers=2) as cluster:
        client = cluster.client(job(servers=2, mode="sync"))
        client.pull(plan_of(client.job, [[0]]), step=1).wait(SECONDS_MAX)
        held = client.pull(plan_of(client.job, [[0]]), step=2)
        os.kill(cluster.pids["server 1"], signal.SIGKILL)
        with pytest.raises(ConnectionLost, match="lost S1"):
            held.wait(SECONDS_MAX)
        with pytest.raises(ConnectionLost, match="lost S1"):
            client.drain()
        wait_until(lambda: cluster._failure is not None)
        with pytest.raises(ChildFailed, match="server 1 was killed by SIGKILL"):
            cluster.client(client.job)


def test_a_server_that_never_came_up_does_not_keep_a_client_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runtime_client, "COORDINATOR_SECONDS_MAX", 0.3)
    with LocalCluster(servers=2) as cluster:
        os.kill(cluster.pids["server 0"], signal.SIGKILL)
        with pytest.raises(ChildFailed, match="server 0 was killed by SIGKILL"):
            cluster.client(job(servers=2))


def test_tables_that_do_not_fit() -> None:
    with LocalCluster(servers=1) as cluster, pytest.raises(ChildFailed, match="not enough memory for the tables"):
        cluster.client(job(table(rows=2**32 - 1, dim=1 << 16, kind="adam")))


def test_a_cluster_closes_at_once_whoever_is_connected_and_leaves_no_files() -> None:
    with LocalCluster(servers=1, transport="tcp") as cluster:
        client = cluster.client(job())
        assert client.session.view is not None
        _, host, port = parse_address(client.session.view.servers[0].address)
        idle = [socket.create_connection((host, port)) for _ in range(5)]
        wait_until(lambda: all(one.recv(1, socket.MSG_PEEK) for one in idle))
        pids = list(cluster.pids.values())
        began = time.monotonic()
    assert time.monotonic() - began < 8.0, "they are asked for 10 s before they are forced"
    assert [pid for pid in pids if Path(f"/proc/{pid}").exists()] == []
    assert [path for path in (cluster._logs, cluster._sockets.path) if path.exists()] == []
    for one in idle:
        one.close()
