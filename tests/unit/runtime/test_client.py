"""Goal: every call of a client ends, with its answer or with the reason why there is none, and in between a caller
waits only where the redo window says so.

Method: `ByHand` is a client without a cluster: it notes what the session would be told, and the test says what the
session answers. `Sockets` is a whole cluster in one thread behind real sockets, for what `SocketClient` adds. A thread
that must be waiting is known to wait (`NotedWindow`), nothing sleeps.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers import job, plan_of, server, table, wait_until, worker

from regrow.core.coordinator import Coordinator
from regrow.core.door import ServerDoor
from regrow.core.effects import Delivered, Dial, Forget, Joined, Lost, Refuse, Send, Tick
from regrow.core.identity import COORDINATOR, Identity
from regrow.core.job import JobSpec
from regrow.core.messages import Message, Pushed, View
from regrow.core.session import (
    AssignWanted,
    Event,
    ExpectWanted,
    Failed,
    PullAnswered,
    PullWanted,
    PushDurable,
    PushReceived,
    PushWanted,
    ReadAnswered,
    ReadWanted,
    SessionOpened,
    WriteAnswered,
    WriteWanted,
)
from regrow.errors import ConnectionLost, DataLoss, RegrowError
from regrow.runtime.client import Client, SocketClient
from regrow.runtime.inprocess import InProcessCluster
from regrow.runtime.transport import Endpoint
from regrow.store.memory import MemoryStore

SECONDS_MAX = 20.0
TOKEN = b"t" * 32


class NotedWindow(threading.Condition):
    """A condition that says when somebody begins to wait."""

    def __init__(self) -> None:
        super().__init__()
        self.waiting = threading.Event()

    def wait(self, timeout: float | None = None) -> bool:
        self.waiting.set()
        return super().wait(timeout)


class ByHand(Client):
    """A client whose session is the test."""

    def __init__(self, of: JobSpec, *, redo_bytes_max: int = 1 << 20) -> None:
        super().__init__(of, redo_bytes_max=redo_bytes_max, records_bytes_max=1 << 20)
        self.told: list[Event] = []
        self.sent: list[tuple[Identity, Message]] = []
        self.forgotten: list[Identity] = []
        self._window = self.window = NotedWindow()

    def answer(self, *effects: Any) -> None:
        self._run(list(effects))

    def last(self, kind: type[Any]) -> Any:
        assert isinstance(self.told[-1], kind)
        return self.told[-1]

    def _submit(self, event: Event) -> None:
        self.told.append(event)

    def _send(self, target: Identity, message: Message) -> None:
        self.sent.append((target, message))

    def _connect(self, view: View) -> None:
        raise AssertionError("no view was given")

    def _forget(self, peer: Identity) -> None:
        self.forgotten.append(peer)


def in_thread(call: Callable[[], Any]) -> Future[Any]:
    """What another thread's call comes to."""
    outcome: Future[Any] = Future()

    def run() -> None:
        try:
            outcome.set_result(call())
        except BaseException as error:
            outcome.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return outcome


def pulled(client: ByHand) -> Any:
    """A ticket whose rows are there: 2 rows of 2 floats."""
    ticket = client.pull(plan_of(client.job, [[1, 2]]), step=1)
    client.answer(PullAnswered(request=ticket.request))
    return ticket


GRADS = np.ones(4, np.float32)  # 16 bytes


# --- Answers ---


def test_each_answer_ends_its_own_wait() -> None:
    client = ByHand(job())
    plan = plan_of(client.job, [[1, 2]])
    buffer = np.zeros(4, np.float32)
    first, second = client.pull(plan, step=1), client.pull(plan, step=2, rows=buffer)
    assert client.told == [
        PullWanted(request=first.request, step=1, plan=plan, rows=first.rows),
        PullWanted(request=second.request, step=2, plan=plan, rows=buffer),
    ]
    client.answer(PullAnswered(request=second.request))
    assert (first.done, second.done) == (False, True)
    assert second.wait(0) is buffer
    with pytest.raises(TimeoutError):
        first.wait(0)
    client.answer(PullAnswered(request=first.request))
    assert first.wait(0) is first.rows


def test_pushes_are_counted_from_what_the_servers_have() -> None:
    client = ByHand(job())
    client.answer(SessionOpened(durable=7, committed=0))
    assert client.opened.result(0).durable == 7
    client.drain(0)
    ticket = pulled(client)
    assert client.push(ticket, GRADS) == 8
    assert client.last(PushWanted).seq == 8
    assert client.last(PushWanted).request == ticket.request
    with pytest.raises(ConnectionLost, match="pushes were not durable after 0 s"):
        client.drain(0)
    client.answer(PushDurable(seq=8))
    client.drain(0)


def test_staleness_is_summed_and_its_most_kept() -> None:
    client = ByHand(job())
    client.answer(*(PushReceived(seq=seq, staleness=value) for seq, value in enumerate([1.0, 4.0, 2.5])))
    assert (client.staleness_sum, client.staleness_max, client.staleness_count) == (7.5, 4.0, 3)


def test_what_needs_no_answer_is_passed_on() -> None:
    client = ByHand(job())
    plan = plan_of(client.job, [[1]])
    weights = np.ones(2, np.float32)
    client.expect([plan, plan])
    client.assign(plan, weights)
    assert client.told == [ExpectWanted(plans=(plan, plan)), AssignWanted(plan=plan, weights=weights)]
    message = Pushed(seq=1, durable=0, clock=0)
    client.answer(Send(target=server(0), message=message), Forget(peer=server(0)))
    assert (client.sent, client.forgotten) == ([(server(0), message)], [server(0)])


def test_parities_are_read_as_a_server_keeps_them() -> None:
    client = ByHand(job(table(rows=8, k=2, r=1), servers=3))
    reading = in_thread(lambda: client.parities(0, 2, 1, 2))
    wait_until(lambda: client.told)
    wanted = client.last(ReadWanted)
    assert (wanted.server, wanted.slot_first, wanted.slot_count, wanted.parity) == (2, 1, 2, True)
    client.answer(ReadAnswered(request=wanted.request, records=np.arange(8, dtype=np.float32)))
    assert reading.result(SECONDS_MAX).tolist() == [[0, 1, 2, 3], [4, 5, 6, 7]]


# --- Failures ---


def test_a_failure_ends_every_wait_now_and_later() -> None:
    client = ByHand(job(), redo_bytes_max=16)
    ticket = pulled(client)
    client.push(ticket, GRADS)
    waiting = client.pull(ticket.plan, step=2)
    pushing = in_thread(lambda: client.push(ticket, GRADS))
    assert client.window.waiting.wait(SECONDS_MAX)
    client.answer(Failed(reason="lost S1: it was killed"))
    calls: list[Callable[[], Any]] = [
        lambda: pushing.result(SECONDS_MAX),
        lambda: client.opened.result(0),
        lambda: waiting.wait(0),
        lambda: client.pull(ticket.plan, step=3),
        lambda: client.push(ticket, GRADS),
        lambda: client.expect([ticket.plan]),
        lambda: client.assign(ticket.plan, GRADS),
        lambda: client.drain(0),
        lambda: client.records(0, 0, 1),
        lambda: client.write_records(0, 0, np.zeros((1, 2), np.float32)),
        lambda: client.parities(0, 0, 0, 1),
        client.digest,
    ]
    told = list(client.told)
    for call in calls:
        with pytest.raises(ConnectionLost, match="lost S1: it was killed"):
            call()
    assert ticket.wait(0) is ticket.rows, "what was answered before stays answered"
    assert client.told == told, "nothing is asked of a session that has failed"
    assert client.pushes == 1


def test_a_drain_that_waits_ends_with_the_failure() -> None:
    client = ByHand(job())
    client.push(pulled(client), GRADS)
    draining = in_thread(client.drain)
    assert client.window.waiting.wait(SECONDS_MAX)
    client.answer(Failed(reason="rows 3 to 9 are gone", data_loss=True))
    with pytest.raises(DataLoss, match="rows 3 to 9 are gone"):
        draining.result(SECONDS_MAX)


def test_the_first_failure_counts_and_answers_behind_it_are_dropped() -> None:
    client = ByHand(job())
    waiting = client.pull(plan_of(client.job, [[1]]), step=1)
    client.answer(Failed(reason="first", data_loss=True), Failed(reason="second"))
    client.answer(
        PullAnswered(request=waiting.request),
        WriteAnswered(request=99),
        ReadAnswered(request=98, records=GRADS),
        SessionOpened(durable=5, committed=0),
    )
    for call in (waiting.wait, client.drain, lambda: client.opened.result(0)):
        with pytest.raises(DataLoss, match="first"):
            call()
    assert client.pushes == 0


# --- The redo window ---


def test_the_redo_window_blocks_and_opens() -> None:
    client = ByHand(job(), redo_bytes_max=40)  # two pushes of 16 bytes
    ticket = pulled(client)
    assert [client.push(ticket, GRADS) for _ in range(2)] == [1, 2]
    third = in_thread(lambda: client.push(ticket, GRADS))
    assert client.window.waiting.wait(SECONDS_MAX)
    assert client.pushes == 2, "no seq is taken before its bytes fit"
    client.answer(PushDurable(seq=1))
    assert third.result(SECONDS_MAX) == 3
    assert [event.seq for event in client.told if isinstance(event, PushWanted)] == [1, 2, 3]
    client.answer(PushDurable(seq=2), PushDurable(seq=3))
    client.drain(0)


def test_a_push_larger_than_the_window_goes_alone() -> None:
    client = ByHand(job(), redo_bytes_max=1)
    ticket = pulled(client)
    assert client.push(ticket, GRADS) == 1
    second = in_thread(lambda: client.push(ticket, GRADS))
    assert client.window.waiting.wait(SECONDS_MAX)
    client.answer(PushDurable(seq=1))
    assert second.result(SECONDS_MAX) == 2


# --- Whole records ---


def test_records_are_asked_for_in_parts_that_no_server_finds_too_large() -> None:
    """Each part at all its servers at once; the next when it is answered."""
    client = InProcessCluster(servers=3).client(job(table(rows=20, dim=3), servers=3))
    asked: list[list[int]] = []
    submit = client._submit

    def note(event: Event) -> None:
        if isinstance(event, ReadWanted):
            asked.append([event.slot_first, event.slot_count])
        elif isinstance(event, WriteWanted):
            asked.append([-1, event.slots.size])
            assert event.records.size == 4 * event.slots.size, "records travel padded to 16 bytes"
        submit(event)

    client._submit = note  # type: ignore[method-assign]
    values = np.arange(60, dtype=np.float32).reshape(20, 3)
    client.records_bytes_max = 6 * 16
    client.write_records(0, 0, values)
    assert asked == [[-1, 2]] * 9 + [[-1, 1]] * 2  # 6, 6, 6 and 2 rows over 3 servers
    asked.clear()
    assert np.array_equal(client.records(0, 0, 20), values)
    assert asked == [[0, 2]] * 3 + [[2, 2]] * 3 + [[4, 2]] * 3 + [[6, 1]] * 2


def digests(clients: list[Client]) -> list[str]:
    found = []
    for client in clients:
        plan = plan_of(client.job, [[0, 3, 9], [2]])
        ticket = client.pull(plan, step=1)
        ticket.wait(SECONDS_MAX)
        grads = np.empty(plan.floats, np.float32)
        for (index, row), where in plan.where.items():
            grads[where] = 1 + index + row
        client.push(ticket, grads)
        client.drain(SECONDS_MAX)
        found.append(client.digest())
    return found


# --- Over sockets ---


class Sockets:
    """A coordinator and servers in one thread, each behind its own socket."""

    def __init__(self, folder: Path, *, servers: int) -> None:
        self.folder = folder
        self.endpoints: list[Endpoint] = []
        self.loop = asyncio.new_event_loop()
        self.thread = threading.Thread(target=self.loop.run_forever, daemon=True)
        self.thread.start()
        self.run(self._start(servers))

    def run(self, work: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self.loop).result(SECONDS_MAX)

    def client(self, of: JobSpec, *, index: int = 0, section_bytes_max: int = 1 << 20) -> SocketClient:
        return SocketClient(
            identity=worker(index),
            token=TOKEN,
            coordinator=f"unix:{self.folder}/C",
            job=of,
            redo_bytes_max=1 << 20,
            section_bytes_max=section_bytes_max,
            open_seconds_max=SECONDS_MAX,
        )

    def close(self) -> None:
        self.run(self._stop())
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.thread.join()
        self.loop.close()

    async def _start(self, servers: int) -> None:
        await self._serve(COORDINATOR, lambda address: Coordinator(servers=servers))
        for index in range(servers):
            identity = server(index)

            def make(address: str, identity: Identity = identity) -> ServerDoor:
                return ServerDoor(identity=identity, build_store=MemoryStore, reply_bytes_max=1 << 20, address=address)

            endpoint = await self._serve(identity, make)
            endpoint.dial(COORDINATOR, f"unix:{self.folder}/C")

    async def _serve(self, identity: Identity, make: Callable[[str], Any]) -> Endpoint:
        machine: Any = None

        def hand(event: Any) -> None:
            for effect in machine.receive(event):
                if isinstance(effect, Send):
                    endpoint.send(effect.target, effect.message)
                elif isinstance(effect, Refuse):
                    endpoint.refuse(effect.target, effect.reason)
                elif isinstance(effect, Dial):
                    endpoint.dial(effect.peer, effect.address)

        endpoint = Endpoint(
            local=identity,
            token=TOKEN,
            section_bytes_max=1 << 20,
            on_open=lambda peer: hand(Joined(peer=peer)),
            on_message=lambda source, message: hand(Delivered(source=source, message=message)),
            on_lost=lambda peer, reason: hand(Lost(peer=peer, reason=reason)),
            on_resumed=lambda peer: None,
            on_fenced=lambda peer, reason: None,
        )
        machine = make(await endpoint.listen(f"unix:{self.folder}/{identity}"))
        hand(Tick(now=0.0))
        self.endpoints.append(endpoint)
        return endpoint

    async def _stop(self) -> None:
        for endpoint in self.endpoints:
            await endpoint.close()


@contextlib.contextmanager
def sockets(folder: Path, *, servers: int) -> Iterator[Sockets]:
    folder.mkdir(exist_ok=True)
    cluster = Sockets(folder, servers=servers)
    try:
        yield cluster
    finally:
        cluster.close()


def spread(servers: int) -> JobSpec:
    tables = [table("a", rows=10, dim=3, bound=1.0, kind="adam"), table("b", rows=5, bound=1.0)]
    return job(*tables, servers=servers)


def test_rows_over_sockets_arrive_in_the_buffer_that_was_given(tmp_path: Path) -> None:
    with sockets(tmp_path, servers=2) as cluster, contextlib.closing(cluster.client(job(servers=2))) as client:
        buffer = np.full(20, np.nan, np.float32)
        ticket = client.pull(plan_of(client.job, [range(10)]), step=1, rows=buffer)
        assert ticket.wait(SECONDS_MAX) is buffer
        assert buffer.tolist() == [0.0] * 20
        client.push(ticket, np.ones(20, np.float32))
        client.drain(SECONDS_MAX)
        assert client.records(0, 0, 10).tolist() == [[-1.0, -1.0]] * 10
        received, sent = client.bytes_moved
        assert received > 80 and sent > 80


def test_a_model_has_one_digest_however_many_servers_and_requests(tmp_path: Path) -> None:
    found = set(digests([InProcessCluster(servers=n).client(spread(n)) for n in (1, 2, 4)]))
    for servers, section_bytes_max in ((1, 1 << 20), (3, 128)):
        folder = tmp_path / f"{servers}"
        with sockets(folder, servers=servers) as cluster:
            client = cluster.client(spread(servers), section_bytes_max=section_bytes_max)
            with contextlib.closing(client):
                found.update(digests([client]))
    assert len(found) == 1


def test_closing_ends_every_wait_and_closing_again_is_nothing(tmp_path: Path) -> None:
    with sockets(tmp_path, servers=1) as cluster:
        client = cluster.client(job(mode="sync"))
        plan = plan_of(client.job, [[0]])
        client.pull(plan, step=1).wait(SECONDS_MAX)
        held = client.pull(plan, step=2)  # nobody pushes step 1
        waiting = in_thread(held.wait)
        client.close()
        for call in (lambda: waiting.result(SECONDS_MAX), lambda: client.pull(plan, step=2), client.drain):
            with pytest.raises(ConnectionLost, match="this client is closed"):
                call()
        client.close()
        assert not client._thread.is_alive()


def test_a_worker_of_another_job_is_told_and_leaves_nothing(tmp_path: Path) -> None:
    with sockets(tmp_path, servers=1) as cluster, contextlib.closing(cluster.client(job(workers=2))) as client:
        before = threading.active_count()
        with pytest.raises(RegrowError, match=r"another job|different"):
            cluster.client(job(table(rows=11), workers=2), index=1)
        assert threading.active_count() == before
        assert client.pull(plan_of(client.job, [[0]]), step=1).wait(SECONDS_MAX).tolist() == [0.0, 0.0]


def test_a_session_that_raises_fails_the_client_and_not_its_thread(tmp_path: Path) -> None:
    """A plan for another number of servers is a mistake that only the session can see."""
    with sockets(tmp_path, servers=2) as cluster, contextlib.closing(cluster.client(job(servers=2))) as client:
        ticket = client.pull(plan_of(job(servers=1), [[0]]), step=1)
        with pytest.raises(RegrowError, match=r"the session failed: .*another number of servers"):
            ticket.wait(SECONDS_MAX)
        with pytest.raises(RegrowError, match="the session failed"):
            client.drain()
