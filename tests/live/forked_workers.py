"""A script with a `LocalCluster` whose workers are forked from it. A server dies while they push whole numbers; at the
end the script prints what every row says, and what it should say.

    python forked_workers.py protected|unprotected
"""

from __future__ import annotations

import os
import signal
import sys

import numpy as np

from regrow.core.job import JobSpec, OptimizerSpec, TableSpec
from regrow.core.protection import Coded, FlushSpec, Unprotected
from regrow.errors import RegrowError
from regrow.launch.cluster import LocalCluster
from regrow.nn.routing import make_router

ROWS, DIM, PUSHES, WORKERS = 60, 4, 60, 2
SECONDS_MAX = 60.0


def make_job(*, protected: bool) -> JobSpec:
    optimizer = OptimizerSpec(kind="sgd", learning_rate=1.0)
    k, r = (2, 1) if protected else (1, 0)
    spec = TableSpec(name="t", rows=ROWS, dim=DIM, init_bound=0.0, optimizer=optimizer, k=k, r=r)
    protection = Coded(k=2, r=1, flush=FlushSpec(pushes=5)) if protected else Unprotected()
    return JobSpec(tables=(spec,), servers=3, workers=WORKERS + 1, protection=protection)


def work(cluster: LocalCluster, job: JobSpec, worker: int, told: int) -> None:
    """Says after some pushes that it is at work, and goes on when the server is gone."""
    client = cluster.client(job, worker=worker)
    router = make_router(job, feature_tables=[0], static_tables=[])
    ids = np.arange(ROWS)
    for step in range(1, PUSHES + 1):
        ticket = client.pull(router.plan(ids, None, ROWS), step=step)
        ticket.wait(SECONDS_MAX)
        client.push(ticket, np.full(ROWS * DIM, 1.0, np.float32))
        if step == PUSHES // 3:
            client.drain(SECONDS_MAX)
            os.write(told, b"x")
    client.drain(SECONDS_MAX)


def fork(cluster: LocalCluster, job: JobSpec, worker: int, told: int) -> int:
    pid = os.fork()
    if pid == 0:
        try:
            work(cluster, job, worker, told)
        except RegrowError as error:
            print(f"worker {worker}: {type(error).__name__}: {error.message}", flush=True)
        sys.exit(0)  # with all that is done at the end of a process
    return pid


def main() -> None:
    protected = sys.argv[1] == "protected"
    job = make_job(protected=protected)
    heard, told = os.pipe()
    with LocalCluster(servers=3) as cluster:
        workers = [fork(cluster, job, worker, told) for worker in range(WORKERS)]
        for _ in workers:
            assert os.read(heard, 1) == b"x"
        os.kill(cluster.pids["server 1"], signal.SIGKILL)
        for pid in workers:
            os.waitpid(pid, 0)
        if protected:
            rows = cluster.client(job, worker=WORKERS).records(0, 0, ROWS)[:, :DIM]
            print(f"rows {np.unique(rows).tolist()}, wanted {[-float(WORKERS * PUSHES)]}", flush=True)


if __name__ == "__main__":
    main()
