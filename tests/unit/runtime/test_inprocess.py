"""Goal: a worker's calls do what they say, whatever number of servers is behind them.

Method: `InProcessCluster` with plans of the real router or written by hand; results are compared with plain
numpy, and between clusters of different shapes. What goes wrong must say so and must not hang.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from helpers import job, plan_of, table, worker

from regrow.core.messages import Pushed
from regrow.core.twins import initial_rows
from regrow.errors import ConnectionLost, ProtocolError, RegrowError
from regrow.nn.routing import make_router
from regrow.runtime.client import Client
from regrow.runtime.inprocess import InProcessCluster

SHAPES = [(1, 1), (3, 1), (3, 2), (5, 4)]  # (servers, k)


def weights_of(client: Client, index: int = 0) -> np.ndarray[Any, Any]:
    spec = client.job.tables[index]
    return client.records(index, 0, spec.rows)[:, : spec.dim]


def step(client: Client, number: int, wanted: list[list[int]], value: float = 1.0) -> None:
    """Pulls these rows and pushes `value` everywhere."""
    ticket = client.pull(plan_of(client.job, wanted), step=number)
    ticket.wait(0)
    client.push(ticket, np.full(ticket.rows.size, value, np.float32))


@pytest.mark.parametrize(("servers", "k"), SHAPES)
def test_rows_start_with_their_initial_values_and_follow_their_gradients(servers: int, k: int) -> None:
    tables = [table("a", rows=50, dim=3, bound=0.5, k=k), table("b", rows=7, dim=5, bound=0.1, k=k)]
    of = job(*tables, servers=servers, seed=4)
    client = InProcessCluster(servers=servers).client(of)
    expected = [
        initial_rows(range(spec.rows), dim=spec.dim, seed=4, table=index, bound=spec.init_bound)
        for index, spec in enumerate(of.tables)
    ]
    router = make_router(of, feature_tables=[0, 1, 0], static_tables=[])
    plan = router.plan(np.array([3, 49, 6, 6, 3, 10]), None, 2)
    ticket = client.pull(plan, step=1)
    assert ticket.done
    pooled = np.empty((2, 11), np.float32)
    plan.pool(ticket.wait(), pooled)
    a, b = expected
    assert np.array_equal(pooled, np.stack([[*a[3], *b[6], *a[3]], [*a[49], *b[6], *a[10]]]))

    grads = np.empty(plan.floats, np.float32)
    plan.unpool(np.ones((2, 11), np.float32), grads)
    assert client.push(ticket, grads) == 1
    client.drain(timeout_seconds=0)
    for row, times in ((3, 2), (49, 1), (10, 1)):
        a[row] -= np.float32(times)
    b[6] -= np.float32(2)
    for index, table_expected in enumerate(expected):
        assert np.array_equal(weights_of(client, index), table_expected)


def test_equal_models_have_equal_digests_however_they_are_spread() -> None:
    digests = set()
    for servers, k in SHAPES:
        of = job(
            table("a", rows=41, dim=3, bound=1.0, kind="adam", lr=0.1, k=k),
            table("b", rows=9, dim=4, bound=1.0, kind="rowwise_adagrad", lr=0.1, k=k),
            servers=servers,
        )
        client = InProcessCluster(servers=servers).client(of)
        before = client.digest()
        step(client, 1, [[40, 3, 5], [8]])
        step(client, 2, [[5], [0, 8]], value=-0.5)
        assert client.digest() != before
        digests.add((before, client.digest()))
    assert len(digests) == 1


@pytest.mark.parametrize(("servers", "k"), SHAPES)
def test_records_are_read_and_written_in_row_order(servers: int, k: int) -> None:
    of = job(table(rows=23, dim=3, kind="rowwise_adagrad", k=k), servers=servers)
    client = InProcessCluster(servers=servers).client(of)
    written = np.arange(10 * 4, dtype=np.float32).reshape(10, 4)
    client.write_records(0, 7, written)
    expected = np.zeros((23, 4), np.float32)
    expected[7:17] = written
    assert np.array_equal(client.records(0, 0, 23), expected)
    assert np.array_equal(client.records(0, 9, 2), expected[9:11])
    assert client.records(0, 5, 0).shape == (0, 4)
    # In requests of one, two or three rows it is the same, and no server is asked for more.
    for records_bytes_max in (1, 32, 48):
        client.records_bytes_max = records_bytes_max
        client.write_records(0, 7, written[::-1])
        assert np.array_equal(client.records(0, 7, 10), written[::-1])
        client.write_records(0, 7, written)
        assert np.array_equal(client.records(0, 0, 23), expected)


def test_assigned_weights_stay_until_touched() -> None:
    of = job(servers=3, workers=2)
    cluster = InProcessCluster(servers=3)
    clients = [cluster.client(of, worker=index) for index in range(2)]
    plan = plan_of(of, [range(10)])
    weights = np.arange(20, dtype=np.float32)
    clients[0].assign(plan, weights)
    step(clients[0], 1, [[4]])
    clients[1].assign(plan, weights)
    expected = np.zeros((10, 2), np.float32)
    for (_, row), where in plan.where.items():
        expected[row] = weights[where]
    expected[4] -= 1
    assert np.array_equal(weights_of(clients[1]), expected)


def test_two_workers_see_each_other_and_measure_it() -> None:
    of = job(servers=2, workers=2)
    cluster = InProcessCluster(servers=2)
    first, second = (cluster.client(of, worker=index) for index in range(2))
    ticket = first.pull(plan_of(of, [[0]]), step=1)
    step(second, 1, [[0]])
    step(second, 2, [[0]])
    first.push(ticket, np.ones(2, np.float32))
    assert (first.staleness_max, first.staleness_count) == (2.0, 1)
    assert (second.staleness_max, second.staleness_count) == (0.0, 2)
    assert weights_of(first)[0].tolist() == [-3, -3]


def test_a_worker_that_comes_back_goes_on_counting() -> None:
    """Servers skip pushes they have seen: one that counted from 1 again would be skipped silently."""
    of = job(servers=2)
    cluster = InProcessCluster(servers=2)
    before = cluster.client(of)
    step(before, 1, [[0]])
    step(before, 2, [[0]])
    after = cluster.client(of)
    assert after.opened.result(0).durable == 2
    after.drain(timeout_seconds=0)
    step(after, 1, [[0]])
    after.drain(timeout_seconds=0)
    assert after.pushes == 3
    assert weights_of(after)[0].tolist() == [-3, -3]
    with pytest.raises(ConnectionLost, match="a newer incarnation of W0 is at work"):
        before.pull(plan_of(of, [[0]]), step=3).wait(0)


# --- Synchronous mode ---


def test_synchronous_steps_of_two_workers() -> None:
    of = job(servers=3, workers=2, mode="sync")
    cluster = InProcessCluster(servers=3)
    clients = [cluster.client(of, worker=index) for index in range(2)]
    seen = []
    for number in (1, 2, 3):
        tickets = [client.pull(plan_of(of, [[0, 5]]), step=number) for client in clients]
        seen.append([ticket.wait(0).tolist() for ticket in tickets])
        for index, (client, ticket) in enumerate(zip(clients, tickets, strict=True)):
            client.push(ticket, np.full(4, index + 1.0, np.float32))
    assert seen == [[[value] * 4] * 2 for value in (0.0, -3.0, -6.0)]
    with pytest.raises(RegrowError, match="this would wait for ever"):
        clients[0].drain(timeout_seconds=0)
    commits = [client.pull(plan_of(of, [[]]), step=4) for client in clients]
    for client, commit in zip(clients, commits, strict=True):
        commit.wait(0)
        client.drain(timeout_seconds=0)
    assert [shard.server.serving.committed for shard in cluster.servers] == [3, 3, 3]
    assert weights_of(clients[0])[5].tolist() == [-9, -9]


# --- What goes wrong ---


def test_a_job_that_does_not_fit_the_cluster() -> None:
    cluster = InProcessCluster(servers=2)
    with pytest.raises(ConnectionLost, match="the job is for 1 servers, this cluster has 2"):
        cluster.client(job())
    client = cluster.client(job(servers=2))
    step(client, 1, [[0]])
    with pytest.raises(RegrowError, match="the cluster runs another job"):
        cluster.client(job(table(rows=11), servers=2), worker=1)
    step(client, 2, [[0]])
    assert weights_of(client)[0].tolist() == [-2, -2]


def test_a_callers_mistakes_are_told_to_the_caller_and_harm_nobody() -> None:
    of = job()
    client = InProcessCluster(servers=1).client(of)
    plan = plan_of(of, [[1, 2]])
    ticket = client.pull(plan, step=1)
    for wrong in (
        np.zeros(3, np.float32),
        np.zeros(4, np.float64),
        np.zeros((2, 2), np.float32),
        np.zeros(8, np.float32)[::2],
    ):
        with pytest.raises(ValueError, match="grads must be 4 float32 side by side"):
            client.push(ticket, wrong)
        with pytest.raises(ValueError, match="rows must be 4 float32 side by side"):
            client.pull(plan, step=2, rows=wrong)
        with pytest.raises(ValueError, match="weights must be 4 float32 side by side"):
            client.assign(plan, wrong)
    client.push(ticket, np.ones(4, np.float32))
    assert weights_of(client)[1:3].tolist() == [[-1, -1], [-1, -1]]


def test_a_refused_worker_fails_now_and_later() -> None:
    of = job(workers=2)
    cluster = InProcessCluster(servers=1)
    client, other = cluster.client(of), cluster.client(of, worker=1)
    bad = plan_of(of, [[1]])
    bad.slots[0] = 99
    ticket = client.pull(bad, step=1)
    for call in (
        ticket.wait,
        lambda: client.pull(plan_of(of, [[1]]), step=2),
        lambda: client.push(ticket, np.ones(2, np.float32)),
        lambda: client.assign(bad, np.ones(2, np.float32)),
        client.drain,
        lambda: client.records(0, 0, 1),
    ):
        with pytest.raises(ConnectionLost, match=r"lost S0: refused: Pull: slot 99 .*out of range"):
            call()
    step(other, 1, [[1]])
    assert weights_of(other)[1].tolist() == [-1, -1]


def test_answers_that_come_after_a_failure_are_dropped() -> None:
    """The other worker, in whose call they are delivered, must not see anything of it."""
    of = job(servers=2, workers=2, mode="sync")
    cluster = InProcessCluster(servers=2)
    broken, healthy = (cluster.client(of, worker=index) for index in range(2))
    for client in (broken, healthy):
        step(client, 1, [[0]])
    parked = broken.pull(plan_of(of, [[0]]), step=2)
    cluster.post(worker(1), worker(0), Pushed(seq=1, durable=0, clock=0))
    for call in (parked.wait, broken.drain):
        with pytest.raises(ProtocolError, match="Pushed from W1"):
            call()
    assert healthy.pull(plan_of(of, [[0]]), step=2).wait(0).tolist() == [-2, -2]


def test_one_push_always_fits_the_redo_window() -> None:
    client = InProcessCluster(servers=2).client(job(servers=2), redo_bytes_max=1)
    for number in range(1, 5):
        step(client, number, [range(10)])
    assert client.session.redo_bytes_peak == 80
    assert client.session.redo_bytes == 0
