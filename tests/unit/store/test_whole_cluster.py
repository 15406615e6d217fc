"""Goal: nothing of the protocol knows what its rows are kept in: on the store made of dictionaries a whole cluster
trains, loses servers and gets them back, and ends with the same bits as on the store in memory.

Method: the same synchronous run in clusters in one process, which differ in nothing but `build_store` and in whom they
lose. Gradients are computed from the rows that were pulled. At the end all records are compared, states included.
"""

from __future__ import annotations

import numpy as np
import pytest
from helpers import job, plan_of, table
from subjects import SUBJECTS, records_of

from regrow.core.job import JobSpec, OptimizerKind
from regrow.core.protection import FlushSpec
from regrow.runtime.inprocess import InProcessCluster
from regrow.store.interface import Store, StoreBuilder
from regrow.store.memory import MemoryStore

KINDS: tuple[OptimizerKind, ...] = ("adam", "rowwise_adagrad", "momentum")
WORKERS = 2
STEPS = 6
CODES = {"2+1": (4, 2, 1), "2+2": (4, 2, 2)}  # servers, k, r


def job_of_code(name: str) -> JobSpec:
    servers, k, r = CODES[name]
    tables = [
        table(f"t{index}", rows=29 + 6 * index, dim=1 + 2 * index, kind=kind, lr=0.1, bound=1.0, k=k, r=r)
        for index, kind in enumerate(KINDS)
    ]
    return job(*tables, servers=servers, workers=WORKERS, mode="sync", seed=7, flush=FlushSpec(pushes=2))


def train_cluster(build: StoreBuilder, of: JobSpec, kills: dict[int, list[int]]) -> list[list[bytes]]:
    """The records of each table of each server at the end; `kills` says whom the run loses after which step."""
    stores: dict[int, Store] = {}

    def build_and_keep(job: JobSpec, server: int, recovering: bool) -> Store:
        stores[server] = build(job, server, recovering)  # of a replacement: instead of the one that was lost
        return stores[server]

    cluster = InProcessCluster(servers=of.servers, build_store=build_and_keep)
    clients = [cluster.client(of, worker=worker) for worker in range(WORKERS)]
    for step in range(1, STEPS + 1):
        plans = [
            plan_of(of, [sorted({0, (5 * step + 3 * worker) % 20, (7 * step + t) % 20}) for t in range(len(of.tables))])
            for worker in range(WORKERS)
        ]
        tickets = [client.pull(plan, step=step) for client, plan in zip(clients, plans, strict=True)]
        rows = [ticket.wait(0).copy() for ticket in tickets]
        for worker, (client, ticket) in enumerate(zip(clients, tickets, strict=True)):
            client.push(ticket, rows[worker] * np.float32(0.25) + np.float32(0.5 - step / 16 + worker))
        for server in kills.get(step, []):
            cluster.kill(server)
    empty = plan_of(of, [[] for _ in of.tables])
    for commit in [client.pull(empty, step=STEPS + 1) for client in clients]:
        commit.wait(0)
    for client in clients:
        client.drain(timeout_seconds=0)
    cluster.settle()
    return [[records_of(stores[s], t).tobytes() for t in range(len(of.tables))] for s in range(of.servers)]


@pytest.mark.parametrize(
    ("name", "kills"),
    [
        ("2+1", {}),
        ("2+1", {3: [1]}),
        ("2+1", {2: [0], 5: [3]}),
        ("2+2", {3: [2]}),
        ("2+2", {3: [0, 1]}),
        ("2+2", {2: [1], 4: [2, 0]}),
    ],
    ids=str,
)
def test_a_cluster_of_dictionaries_trains_to_the_same_bits(name: str, kills: dict[int, list[int]]) -> None:
    of = job_of_code(name)
    expected = train_cluster(MemoryStore, of, {})
    for build in SUBJECTS.values():
        assert train_cluster(build, of, kills) == expected
