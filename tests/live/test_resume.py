"""Goal: links outlive their connections: every message arrives once and in order however often a socket breaks,
and nobody who was replaced is heard again.

Method: the endpoints of test_transport.py, whose connections are aborted at any moment; incarnations that come too
late; a node that is fenced. Waiting is polling with a deadline.
"""

# ruff: noqa: F811  (the fixtures of test_transport.py are taken as arguments)

from __future__ import annotations

import asyncio
import itertools
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers import job, plan_of, server, table, worker
from test_transport import S0, TOKEN, W0, Side, address, run, until  # noqa: F401

from regrow.core.framing import FrameReader, Limits, Stamp, encode
from regrow.core.identity import COORDINATOR, Identity
from regrow.core.link import ACK_BYTES_MAX, Acceptor
from regrow.core.messages import Beat, Declare, Member, Open, Opened, Pull, RecordsWritten, Register, Rows, View
from regrow.errors import ConnectionLost
from regrow.launch import orders, reports
from regrow.runtime import connection as connection_file
from regrow.runtime import serve
from regrow.runtime.client import SocketClient
from regrow.runtime.parent import Pulse

C0, C1 = Identity(role="coordinator", id=0), Identity(role="coordinator", id=0, incarnation=1)


def rows(request: int, floats: int) -> Rows:
    return Rows(request=request, durable=0, clock=0, rows=np.full(floats, request, np.float32))


def test_what_is_sent_before_there_is_a_link_waits_for_it(run: Any, tmp_path: Path) -> None:
    async def main() -> None:
        left, right = Side(W0), Side(S0)
        for request in range(3):
            left.endpoint.send(S0, RecordsWritten(request=request))
            right.endpoint.send(W0, RecordsWritten(request=10 + request))
        left.endpoint.dial(S0, f"unix:{tmp_path}/s")
        left.endpoint.dial(S0, f"unix:{tmp_path}/s")  # twice is once
        await until(lambda: left.lost)
        await asyncio.sleep(0.1)
        assert [peer for peer, _ in left.lost] == [S0], "once, however often it is tried"
        assert "cannot reach S0 at unix:" in left.lost[0][1]
        left.endpoint.send(S0, RecordsWritten(request=3))
        await right.endpoint.listen(f"unix:{tmp_path}/s")
        await until(lambda: len(right.heard) == 4 and len(left.heard) == 3)
        assert (left.requests(), right.requests()) == ([10, 11, 12], [0, 1, 2, 3])
        assert (left.opened, right.opened, left.resumed) == ([S0], [W0], [])
        await left.endpoint.close()
        await right.endpoint.close()

    run(main())


@pytest.mark.parametrize("seed", range(3))
def test_every_message_arrives_once_however_often_the_connection_breaks(run: Any, address: str, seed: int) -> None:
    """Sizes are so that most breaks are in the middle of a frame. The left side receives in place."""
    rng = random.Random(seed)
    count = 200
    targets = {request: np.zeros(rng.choice((0, 10, 5_000, 200_000)), np.float32) for request in range(count)}

    async def main() -> None:
        left = Side(W0, place=lambda peer, cls, meta, sizes: [targets[meta[0]]])
        right = Side(S0)
        left.endpoint.dial(S0, await right.endpoint.listen(address))
        # A connection may also break before it was ever open, as it does on a busy machine: that is told, too.
        while not left.lost:
            left.cut()
            await asyncio.sleep(0)
        await until(lambda: left.opened)
        cuts = 1
        for request in range(count):
            left.endpoint.send(S0, rows(request, rng.choice((0, 10, 5_000, 200_000))))
            right.endpoint.send(W0, rows(request, targets[request].size))
            if rng.random() < 0.2:
                rng.choice((left, right)).cut()
                cuts += 1
            if rng.random() < 0.3:
                await asyncio.sleep(rng.choice((0, 0.001, 0.01)))
        while len(left.heard) < count or len(right.heard) < count:
            if cuts < 80 and left.story[-1] == "there":  # or each handshake would be cut on a busy machine
                rng.choice((left, right)).cut()
                cuts += 1
            await asyncio.sleep(rng.choice((0.002, 0.01, 0.03)))
        for side in (left, right):
            assert side.requests() == list(range(count))
            for request, (_, message) in enumerate(side.heard):
                assert isinstance(message, Rows)
                assert (message.rows == request).all()
        assert all(message.rows is targets[message.request] for _, message in left.heard)  # type: ignore[attr-defined]
        assert (left.opened, right.opened) == ([S0], [W0]), "a link that resumes is no new one"
        assert len(left.resumed) > 2
        assert left.story[:2] == ["lost", "there"]
        assert all(word != before for before, word in itertools.pairwise(left.story)), "each loss is told once"
        await left.endpoint.close()
        await right.endpoint.close()

    run(main())


def test_a_frame_that_comes_twice_does_not_write_where_it_went(run: Any, tmp_path: Path) -> None:
    target = np.zeros(1000, np.float32)
    acceptor = Acceptor(token=TOKEN, local=S0, nonce=b"n" * 32)

    async def speak(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        frames = FrameReader(limits=Limits(meta_bytes_max=8192, section_bytes_max=0))
        writer.writelines(encode(acceptor.start()[0], Stamp()))
        while acceptor.peer is None:
            data = await reader.read(len(frames.buffer()))
            frames.buffer()[: len(data)] = data
            for frame in frames.advance(len(data)):
                for reply in acceptor.receive(frame.message):
                    writer.writelines(encode(reply, Stamp()))
        for number, value in ((1, 7), (1, 8), (2, 9)):
            message = Rows(request=0, durable=0, clock=value, rows=np.full(1000 if value < 9 else 1, value, np.float32))
            writer.writelines(encode(message, Stamp(number=number)))
        await reader.read()
        writer.close()

    async def main() -> None:
        left = Side(W0, place=lambda peer, cls, meta, sizes: [target] if sizes == (4000,) else None)
        server = await asyncio.start_unix_server(speak, f"{tmp_path}/s")
        left.endpoint.dial(S0, f"unix:{tmp_path}/s")
        await until(lambda: len(left.heard) == 2)
        assert [message.clock for _, message in left.heard] == [7, 9]  # type: ignore[attr-defined]
        assert (target == 7).all()
        await left.endpoint.close()
        server.close()
        await server.wait_closed()

    run(main())


def test_one_way_traffic_is_not_kept(run: Any, address: str) -> None:
    async def main() -> None:
        left, right = Side(S0), Side(server(1))
        left.endpoint.dial(server(1), await right.endpoint.listen(address))
        await until(lambda: left.opened)
        (connection,) = left.endpoint.connections
        sent_bytes = kept_bytes_max = 0
        for request in range(400):
            left.endpoint.send(server(1), rows(request, 50_000))
            sent_bytes += 200_000
            await until(lambda: connection._transport.get_write_buffer_size() == 0)
            kept_bytes_max = max(kept_bytes_max, left.endpoint.kept_bytes)
        assert sent_bytes == 80_000_000
        # The kernel doubles both buffers, and the loop may be behind with reading as much again.
        assert kept_bytes_max < 8 * connection_file.SOCKET_BUFFER_BYTES + ACK_BYTES_MAX
        await until(lambda: left.endpoint.kept_bytes <= ACK_BYTES_MAX + 200_000 and len(right.heard) == 400)
        assert right.requests() == list(range(400))
        await left.endpoint.close()
        await right.endpoint.close()

    run(main())


def test_two_servers_that_write_much_go_on_reading(run: Any, address: str, monkeypatch: Any) -> None:
    monkeypatch.setattr(connection_file, "UNREAD_REPLY_BYTES_MAX", 1 << 16)
    one, two = server(0), server(1)

    async def main() -> None:
        left, right = Side(one, throttles_workers=True), Side(two, throttles_workers=True)
        left.endpoint.dial(two, await right.endpoint.listen(address))
        for request in range(30):
            left.endpoint.send(two, rows(request, 500_000))
            right.endpoint.send(one, rows(request, 500_000))
        await until(lambda: len(left.heard) == 30 and len(right.heard) == 30)
        await left.endpoint.close()
        await right.endpoint.close()

    run(main())


def test_a_worker_that_does_not_read_its_replies_is_not_read_from(run: Any, address: str, monkeypatch: Any) -> None:
    monkeypatch.setattr(connection_file, "UNREAD_REPLY_BYTES_MAX", 1 << 16)

    async def main() -> None:
        left, right = Side(W0), Side(S0, throttles_workers=True)
        left.endpoint.dial(S0, await right.endpoint.listen(address))
        await until(lambda: left.opened and right.opened)
        (connection,) = left.endpoint.connections
        connection._transport.pause_reading()
        right.endpoint.send(W0, rows(1, 8_000_000))
        await asyncio.sleep(0.05)
        left.endpoint.send(S0, RecordsWritten(request=1))
        await asyncio.sleep(0.1)
        assert right.heard == []
        connection._transport.resume_reading()
        await until(lambda: right.heard and left.heard)
        await left.endpoint.close()
        await right.endpoint.close()

    run(main())


# --- Incarnations that are over ---


def test_a_newer_incarnation_fences_the_older(run: Any, address: str) -> None:
    async def main() -> None:
        old, new, right = Side(W0), Side(worker(0, incarnation=1)), Side(S0)
        actual = await right.endpoint.listen(address)
        old.endpoint.dial(S0, actual)
        await until(lambda: right.opened)
        new.endpoint.dial(S0, actual)
        await until(lambda: old.fenced and len(right.opened) == 2)
        reason = "W0 with incarnation 0 was replaced"
        assert right.opened == [W0, worker(0, incarnation=1)]
        assert right.lost == [(W0, reason)]
        assert old.lost == old.fenced == [(S0, f"refused: {reason}")]
        right.endpoint.send(W0, RecordsWritten(request=1))  # dropped, and not kept
        assert (set(right.endpoint.lines), right.endpoint.kept_bytes) == ({worker(0, incarnation=1)}, 0)
        again = Side(W0)
        again.endpoint.dial(S0, actual)
        await until(lambda: again.fenced)
        assert again.lost == again.fenced == [(S0, f"cannot open a link: refused: {reason}")]
        await until(lambda: not again.endpoint._dials and not old.endpoint._dials)
        right.endpoint.send(worker(0, incarnation=1), RecordsWritten(request=2))
        await until(lambda: new.heard)
        assert (old.heard, again.heard, old.opened, again.opened) == ([], [], [S0], [])
        for side in (old, new, again, right):
            await side.endpoint.close()

    run(main())


def test_a_peer_that_was_forgotten_is_over(run: Any, address: str) -> None:
    async def main() -> None:
        left, right = Side(server(1, incarnation=4)), Side(S0)
        actual = await right.endpoint.listen(address)
        left.endpoint.dial(S0, actual)
        await until(lambda: right.opened)
        right.endpoint.forget(server(1, incarnation=4))
        right.endpoint.send(server(1, incarnation=4), RecordsWritten(request=1))
        await until(lambda: left.fenced)
        assert (right.endpoint.lines, right.lost) == ({}, []), "whoever forgets knows"
        for incarnation in (0, 3, 4):
            older = Side(server(1, incarnation=incarnation))
            with pytest.raises(ConnectionLost, match=f"S1 with incarnation {incarnation} was replaced"):
                await older.endpoint.connect(actual, S0)
            await older.endpoint.close()
        newer = Side(server(1, incarnation=5))
        right.endpoint.send(server(1, incarnation=5), RecordsWritten(request=2))
        newer.endpoint.dial(S0, actual)
        await until(lambda: newer.heard)
        newer.endpoint.forget(S0)
        newer.endpoint.dial(S0, actual)
        await asyncio.sleep(0.05)
        assert (newer.endpoint._dials, newer.opened, left.heard) == ({}, [S0], [])
        for side in (left, newer, right):
            await side.endpoint.close()

    run(main())


def test_dialing_a_newer_incarnation_ends_the_older(run: Any, tmp_path: Path) -> None:
    async def main() -> None:
        left, old, new = Side(W0), Side(S0), Side(server(0, incarnation=1))
        left.endpoint.dial(S0, await old.endpoint.listen(f"unix:{tmp_path}/old"))
        await until(lambda: left.opened)
        left.endpoint.dial(server(0, incarnation=1), await new.endpoint.listen(f"unix:{tmp_path}/new"))
        assert left.lost == [], "nothing is reported from within a call"
        await until(lambda: len(left.opened) == 2 and old.fenced)
        assert left.lost == [(S0, "S0 with incarnation 0 was replaced")]
        assert list(left.endpoint.lines) == [server(0, incarnation=1)]
        for side in (left, old, new):
            await side.endpoint.close()

    run(main())


def test_a_refused_peer_does_not_come_back(run: Any, address: str) -> None:
    async def main() -> None:
        left, right = Side(W0), Side(S0)
        left.endpoint.dial(S0, await right.endpoint.listen(address))
        await until(lambda: right.opened)
        right.endpoint.refuse(W0, "no such row")
        await until(lambda: left.fenced and not left.endpoint._dials)
        assert left.lost == [(S0, "refused: no such row")], "told once"
        assert left.fenced == [(S0, "refused: no such row")]
        assert (right.lost, right.opened) == ([(W0, "no such row")], [W0])
        await left.endpoint.close()
        await right.endpoint.close()

    run(main())


def test_a_coordinator_that_was_restarted_is_found_again(run: Any, address: str) -> None:
    async def main() -> None:
        left, first = Side(S0), Side(C0)
        actual = await first.endpoint.listen(address)
        left.endpoint.dial(C0, actual)
        await until(lambda: first.opened and left.opened)
        for request in range(5):
            first.endpoint.send(S0, RecordsWritten(request=request))
            left.endpoint.send(C0, RecordsWritten(request=request))
        await until(lambda: len(left.heard) == len(first.heard) == 5)
        await first.endpoint.close()
        await until(lambda: left.lost)
        left.endpoint.send(C0, RecordsWritten(request=99))  # for that incarnation: nobody else gets it
        second = Side(C1)
        for request in range(10, 17):  # more than the first one ever sent
            second.endpoint.send(S0, RecordsWritten(request=request))
        await second.endpoint.listen(actual)
        await until(lambda: len(left.heard) == 12)
        left.endpoint.send(C1, RecordsWritten(request=7))
        await until(lambda: second.heard)
        second.cut()
        left.endpoint.send(C1, RecordsWritten(request=8))
        await until(lambda: len(second.heard) == 2)
        assert second.requests() == [7, 8]
        assert left.requests() == [*range(5), *range(10, 17)]
        assert (left.opened, left.resumed) == ([C0, C1], [C1])
        assert [peer for peer, _ in left.lost] == [C0, C1], "once each"
        assert list(left.endpoint.lines) == [C1]
        late = Side(server(1))
        late.endpoint.dial(C0, actual)
        await until(lambda: late.opened)
        assert (late.opened, late.lost) == ([C1], [])
        for side in (left, late, second):
            await side.endpoint.close()

    run(main())


def test_signs_of_life_are_not_kept_for_later(run: Any, address: str) -> None:
    async def main() -> None:
        left, right = Side(S0), Side(C0)
        left.endpoint.send(C0, Beat())
        left.endpoint.send(C0, RecordsWritten(request=1))
        left.endpoint.dial(C0, await right.endpoint.listen(address))
        await until(lambda: left.opened)
        left.endpoint.send(C0, Beat())
        await until(lambda: len(right.heard) == 2)
        assert [type(message) for _, message in right.heard] == [RecordsWritten, Beat]
        await left.endpoint.close()
        await right.endpoint.close()

    run(main())


def test_whoever_ends_late_leaves_the_socket_of_its_successor(run: Any, tmp_path: Path) -> None:
    async def main() -> None:
        at = f"unix:{tmp_path}/c"
        first, second, left = Side(C0), Side(C1), Side(S0)
        await first.endpoint.listen(at)
        await second.endpoint.listen(at)
        await first.endpoint.close()
        left.endpoint.dial(C0, at)
        await until(lambda: left.opened)
        assert left.opened == [C1]
        await left.endpoint.close()
        await second.endpoint.close()
        assert list(tmp_path.iterdir()) == []

    run(main())


# --- Clients and nodes ---


def test_a_client_outlives_its_coordinator_but_not_a_refusal(run: Any, tmp_path: Path) -> None:
    of = job(table(r=1), servers=2)
    at = f"unix:{tmp_path}/c"

    async def main() -> None:
        first, servers = Side(C0), [Side(server(index)) for index in range(2)]
        await first.endpoint.listen(at)
        places = [await side.endpoint.listen(f"unix:{tmp_path}/s{side.endpoint.local.id}") for side in servers]
        members = tuple(Member(id=index, incarnation=0, address=place) for index, place in enumerate(places))
        first.endpoint.send(W0, View(epoch=1, servers=members, job=of, lost=""))
        for side in servers:
            side.endpoint.send(W0, Opened(durable=0, committed=0))
        client = await asyncio.to_thread(
            SocketClient,
            identity=W0,
            token=TOKEN,
            coordinator=at,
            job=of,
            redo_bytes_max=1,
            section_bytes_max=1 << 20,
        )
        await until(lambda: all(side.heard and isinstance(side.heard[0][1], Open) for side in servers))
        assert [type(message) for _, message in first.heard] == [Declare]
        await first.endpoint.close()
        second = Side(C1)
        await second.endpoint.listen(at)
        await until(lambda: second.heard)
        assert [type(message) for _, message in second.heard] == [Declare]
        ticket = client.pull(plan_of(of, [range(4)]), step=1)
        servers[0].cut()
        await until(lambda: all(side.heard and isinstance(side.heard[-1][1], Pull) for side in servers))
        servers[1].endpoint.refuse(W0, "no such row")
        with pytest.raises(ConnectionLost, match=r"lost S1: .*refused: no such row"):
            await asyncio.to_thread(ticket.wait, 20.0)
        await asyncio.to_thread(client.close)
        for side in (*servers, second):
            await side.endpoint.close()

    run(main())


class FakeParent:
    """A launcher that keeps what it is told."""

    def __init__(self, who: Identity, *commands: orders.AnyCommand, listen: str = "", coordinator: str | None = None):
        self.assignment = orders.Assignment(
            identity=who,
            token=TOKEN.hex(),
            listen=listen,
            coordinator=coordinator,
            threads=1,
            servers=1,
            frame_bytes_max=1 << 20,
        )
        self.said: list[reports.Report] = []
        self.pulse = Pulse()
        self.commands = list(commands)

    def become(self, assignment: orders.Assignment) -> None:
        self.assignment = assignment

    def report(self, report: reports.Report) -> None:
        self.said.append(report)

    def on_command(self, callback: Callable[[orders.AnyCommand], object]) -> None:
        self.command = callback

    def follow_coordinator(self, callback: Callable[[Identity, str], object]) -> None:
        self.move_coordinator = callback
        assert self.assignment.coordinator is not None
        callback(COORDINATOR, self.assignment.coordinator)

    def next_command(self) -> orders.AnyCommand:
        return self.commands.pop(0)

    def heard(self, kind: type[reports.Report]) -> list[Any]:
        return [report for report in self.said if isinstance(report, kind)]


def test_a_server_registers_with_every_coordinator_and_ends_when_one_says_it_was_replaced(
    run: Any, tmp_path: Path
) -> None:
    async def main() -> None:
        at = f"unix:{tmp_path}/c"
        parent = FakeParent(S0, listen=f"unix:{tmp_path}/s", coordinator=at)
        node = asyncio.ensure_future(serve.Node(parent).run())
        for coordinator in (C0, C1):  # the first of them comes after the server, too
            side = Side(coordinator)
            await side.endpoint.listen(at)
            await until(lambda: any(isinstance(message, Beat) for _, message in side.heard))  # noqa: B023
            assert isinstance(side.heard[0][1], Register)
            assert side.heard[0][1].address == f"unix:{tmp_path}/s"
            if coordinator == C0:
                await side.endpoint.close()
        side.cut()
        await until(lambda: side.resumed)
        assert sum(isinstance(message, Register) for _, message in side.heard) == 1, "nothing new to say"
        assert not node.done(), "a server does not need its coordinator to live"
        side.endpoint.forget(S0)
        await node
        (fenced,) = parent.heard(reports.Fenced)
        assert "S0 with incarnation 0 was replaced" in fenced.reason
        await side.endpoint.close()

    run(main())


def test_a_server_follows_its_coordinator_to_another_address(run: Any, tmp_path: Path) -> None:
    """The one before still answers: whoever only waited for it to go would stay."""

    async def main() -> None:
        parent = FakeParent(S0, listen=f"unix:{tmp_path}/s", coordinator=f"unix:{tmp_path}/c0")
        node = asyncio.ensure_future(serve.Node(parent).run())
        sides = [Side(coordinator) for coordinator in (C0, C1)]
        for number, side in enumerate(sides):
            await side.endpoint.listen(f"unix:{tmp_path}/c{number}")
            if number:
                parent.move_coordinator(C1, f"unix:{tmp_path}/c1")
            await until(lambda: any(isinstance(message, Beat) for _, message in side.heard))  # noqa: B023
        await until(lambda: sides[0].lost)
        parent.move_coordinator(C1, f"unix:{tmp_path}/c1")  # no news
        parent.move_coordinator(C0, f"unix:{tmp_path}/c0")  # nor is what comes late
        before = len(sides[1].heard)
        await until(lambda: len(sides[1].heard) > before + 3)
        assert not sides[1].lost
        assert not node.done()
        parent.command(orders.Stop())
        await node
        for side in sides:
            await side.endpoint.close()

    run(main())


def test_a_coordinator_is_told_of_a_death_and_asks_for_a_replacement(run: Any, tmp_path: Path) -> None:
    async def main() -> None:
        parent = FakeParent(C0, listen=f"unix:{tmp_path}/c")
        node = asyncio.ensure_future(serve.Node(parent).run())
        await until(lambda: parent.heard(reports.Listening))
        left = Side(S0)
        left.endpoint.dial(C0, f"unix:{tmp_path}/c")
        left.endpoint.send(C0, Register(address="unix:/nowhere", known=None))
        await until(lambda: left.opened)
        await asyncio.sleep(0.1)  # until it has registered
        parent.command(orders.PeerDied(peer=S0))
        await until(lambda: parent.heard(reports.Replace))
        assert parent.heard(reports.Replace)[0] == reports.Replace(peer=S0, reason="its process ended")
        await until(lambda: left.fenced)
        parent.command(orders.Stop())
        await node
        await left.endpoint.close()

    run(main())


def test_a_standby_becomes_whom_it_is_told_to_be(monkeypatch: pytest.MonkeyPatch) -> None:
    became: list[orders.Assignment] = []
    monkeypatch.setattr(serve, "run", lambda parent: became.append(parent.assignment))
    spare = Identity(role="standby", id=0)
    stopped = FakeParent(spare, orders.Evaluate(), orders.Stop())
    serve.standby(stopped)
    assert (became, stopped.said) == ([], [reports.Standby()])
    assignment = FakeParent(S0).assignment
    serve.standby(FakeParent(spare, orders.Become(assignment=assignment)))
    assert became == [assignment]
