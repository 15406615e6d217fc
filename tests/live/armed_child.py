"""A child of the launcher that is armed: real servers and coordinators that die, or fail to store, at a failpoint; and
workers without torch, so that a run costs two seconds.

    python armed_child.py PLAN.json

The plan has a `room` and, by "server 1" or "coordinator 0", a list of failpoints, "name:count:action[:times]": one for
each life of that process, "" for none. A life is one process, so those after a fall back to a checkpoint count on.
The saves of "spoil" are damaged when it dies.
"exit" is a real SIGKILL, "hang" lasts until workers have come to the step "go on at". Until all files of the list
"until" are in the room, workers are slow, and at the step "hold" they wait for them. Everybody who ends well leaves the
failpoints that it passed in the room. Mergers only wait, unless the plan says "merge": what was written shall be
looked at.

What the workers do is small but not trivial: what they push depends on the rows they pulled (mode sync), or counts
pushes, exactly, in whole numbers (mode async). `digests` does the same in one process, step by step. With a learning
rate of 1 every push takes one from each of its rows, in both modes: what a row has at the end is how many it has.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import sys
import threading
import time
import types
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

import regrow.nn
import regrow.runtime
from regrow.checkpoint import failpoints
from regrow.config import TrainConfig
from regrow.core.job import JobSpec, OptimizerSpec, TableSpec
from regrow.launch import child, orders, reports
from regrow.launch.pipes import PipeParent
from regrow.nn.check import check_parity
from regrow.nn.coded import make_protection, protect
from regrow.nn.routing import make_router
from regrow.runtime.client import Client, SocketClient
from regrow.runtime.inprocess import InProcessCluster
from regrow.runtime.parent import Parent

BINS = 64
# So long does a step take at least, as if there was something to compute: cuts are asked for several times a second.
STEP_SECONDS = 0.006
WAITING_STEP_SECONDS = 0.03
SHAPES = ((400, 4), (150, 8), (30, 2))  # rows and width of the tables


def job_of(config: TrainConfig) -> JobSpec:
    """Synchronous: the optimizer asked for. Asynchronous: `w -= g` from zero, to count with."""
    sync = config.mode == "sync"
    optimizer = OptimizerSpec(
        kind=config.optimizer if sync else "sgd",  # type: ignore[arg-type]
        learning_rate=config.learning_rate if sync else 1.0,
    )
    bound = 0.5 if sync and config.learning_rate != 1.0 else 0.0
    tables = tuple(
        protect(
            TableSpec(name=f"t{index}", rows=rows, dim=dim, init_bound=bound, optimizer=optimizer),
            config.code,
            dense=config.saves_own and index == len(SHAPES) - 1,
        )
        for index, (rows, dim) in enumerate(SHAPES)
    )
    return JobSpec(
        tables=tables,
        servers=config.servers,
        workers=config.workers,
        mode=config.mode,  # type: ignore[arg-type]
        seed=config.seed,
        protection=make_protection(config.code),
    )


class Work:
    """The batches of one worker and its gradients, by step."""

    def __init__(self, config: TrainConfig, worker: int) -> None:
        self.job = job_of(config)
        self._config, self._worker = config, worker
        self._router = make_router(self.job, feature_tables=[0, 1, 2], static_tables=[])

    def ids(self, step: int) -> np.ndarray[Any, Any]:
        """Rows of each table."""
        rng = np.random.default_rng([self._config.seed, self._worker, step])
        return rng.integers(0, [[rows] for rows, _ in SHAPES], (len(SHAPES), self._config.batch))

    def plan(self, step: int | None) -> Any:
        if step is None:
            return self._router.plan(np.zeros(0, np.int64), None, 0)
        # A row twice in one batch would be one row of the plan, with one gradient.
        return self._router.plan(self.ids(step).reshape(-1), None, self._config.batch)

    def grads(self, step: int, rows: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        if self._config.learning_rate == 1.0:
            return np.ones(rows.size, np.float32)
        if self._config.mode == "async":
            return np.full(rows.size, step, np.float32)
        # The same for a row wherever it lies: the order of rows depends on the servers.
        noise = np.random.default_rng([step, self._worker]).standard_normal(1, np.float32)
        return rows * np.float32(0.5) + noise


def counted(config: TrainConfig, marks: Sequence[int]) -> list[np.ndarray[Any, Any]]:
    """Asynchronous: the weights of each table after so many pushes of each worker."""
    weights = [np.zeros((rows, dim), np.float32) for rows, dim in SHAPES]
    for worker, pushes in enumerate(marks):
        work = Work(config, worker)
        for step in range(1, pushes + 1):
            for table, ids in enumerate(work.ids(step)):
                weights[table][np.unique(ids)] -= step
    return weights


def digest(job: JobSpec, records: Any) -> str:
    """As `Client.digest`; `records` are those of each table, in row order."""
    sha = hashlib.sha256()
    for table, rows in zip(job.tables, records, strict=True):
        sha.update(f"{table.name}:{table.rows}:{table.dim}:{table.optimizer.kind}\n".encode())
        sha.update(np.ascontiguousarray(rows, np.float32).data)
    return sha.hexdigest()


def digests(config: TrainConfig) -> list[str]:
    """Synchronous: what the model is after every step, the first is before any. One process, one server."""
    config = TrainConfig(**{**config.to_dict(), "servers": 1, "protection": "none", "ckpt": None, "kill": ()})
    works = [Work(config, worker) for worker in range(config.workers)]
    cluster = InProcessCluster(servers=1)
    clients = [cluster.client(work.job, worker=worker) for worker, work in enumerate(works)]
    found = []
    assert config.steps is not None
    for step in range(1, config.steps + 2):
        tickets = [client.pull(work.plan(step), step=step) for client, work in zip(clients, works, strict=True)]
        rows = [ticket.wait() for ticket in tickets]
        found.append(clients[0].digest())
        for client, work, ticket, values in zip(clients, works, tickets, rows, strict=True):
            client.push(ticket, work.grads(step, values))
    return found


# --- The worker ---


def run_worker(parent: Parent) -> None:
    """As regrow.nn.worker.run."""
    assignment = parent.assignment
    config = TrainConfig.from_dict(assignment.config)
    work = Work(config, assignment.identity.id)
    assert config.steps is not None
    assert assignment.coordinator is not None
    parent.report(reports.Planned(steps=config.steps))
    client = SocketClient(
        identity=assignment.identity,
        token=bytes.fromhex(assignment.token),
        coordinator=assignment.coordinator,
        job=work.job,
        redo_bytes_max=config.redo_bytes_max,
        section_bytes_max=config.frame_bytes_max,
    )
    try:
        opened = client.opened.result()
        again = 0 if assignment.start is not None and assignment.identity.incarnation == 0 else 1
        done = max(again, opened.committed) - again if config.mode == "sync" else opened.durable
        client.pushes = done
        began = time.monotonic()
        train(parent, client, work, config, done=done)
        seconds = time.monotonic() - began
        parent.report(reports.Trained(steps=config.steps, samples=config.steps * config.batch, seconds=seconds))
        for command in iter(parent.next_command, orders.Stop()):
            assert command == orders.Evaluate()
            evaluate(parent, client, config)
    finally:
        client.close()


def train(parent: Parent, client: Client, work: Work, config: TrainConfig, *, done: int) -> None:
    assert config.steps is not None
    reported, room = {sabotage.step for sabotage in config.sabotage}, Path(plan["room"])
    for step in range(done + 1, config.steps + 1):
        began = time.monotonic()
        ticket = client.pull(work.plan(step), step=step)
        client.push(ticket, work.grads(step, ticket.wait()))
        if step == done + 1 or step in reported or step % 20 == 0:
            report(parent, step, config.batch)
        if step == plan.get("go on at"):
            (room / "go on").touch()
        while (waits := not there(room)) and step == plan.get("hold"):
            time.sleep(0.01)
        pace = WAITING_STEP_SECONDS if waits else STEP_SECONDS
        time.sleep(max(0.0, pace - (time.monotonic() - began)))
    if config.mode == "sync":
        client.pull(work.plan(None), step=config.steps + 1).wait()
    client.drain()


def there(room: Path) -> bool:
    return all((room / name).exists() for name in plan.get("until", []))


def report(parent: Parent, step: int, batch: int) -> None:
    bins = [0] * BINS
    parent.report(reports.Progress(step=step, samples=step * batch, loss=1.0, hist_pos=bins, hist_neg=bins))


def evaluate(parent: Parent, client: Client, config: TrainConfig) -> None:
    stripes = wrong = None
    if config.check_parity:
        while client.recovering:
            time.sleep(0.01)
        stripes, wrong = check_parity(client, tries=5)
    parent.report(
        reports.Evaluated(
            auc=0.5,
            logloss=0.5,
            test_samples=0,
            model_sha256=client.digest(),
            parity_stripes=stripes,
            parity_wrong=wrong,
        )
    )


# --- Arming ---


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)
    threading.Event().wait()


class ArmedParent(PipeParent):
    """Arms as soon as it is known whose life this is; a spare when it takes somebody's place."""

    hits: Path

    def become(self, assignment: orders.Assignment) -> None:
        super().become(assignment)
        room = Path(plan["room"])
        name = f"{assignment.identity.role} {assignment.identity.id}"
        life = next(life for life in range(100) if first(room / f"{name} life {life}"))
        self.hits = room / f"{name} life {life} hits"
        if life and plan.get("spoil") == name:
            spoil_saves(assignment)
        points = plan.get("arm", {}).get(name, [])
        if life < len(points) and points[life]:
            arm(points[life], room)


def spoil_saves(assignment: orders.Assignment) -> None:
    """A bit of every chunk that this server has saved flips, before its successor reads them."""
    assert assignment.saving is not None
    shard = f"s{assignment.identity.id}of"
    for path in Path(assignment.saving.url).glob(f"saves/*/{shard}*/*/*.safetensors"):
        data = bytearray(path.read_bytes())
        data[len(data) // 2] ^= 1
        path.write_bytes(data)


def arm(point: str, room: Path) -> None:
    name, count, action, *times = point.split(":")
    if action == "hang":
        hang(name, room)
    else:
        failpoints.arm(f"{name}:{count}:{action}", times=int(times[0]) if times else 1)
        note_errors(room)


def note_errors(room: Path) -> None:
    """Each error leaves a mark, "raised chunk.data 0" and so on."""
    hit = failpoints.hit

    def noting(name: str) -> bool:
        try:
            return hit(name)
        except OSError:
            next(number for number in range(100) if first(room / f"raised {name} {number}"))
            raise

    failpoints.hit = noting


def hang(name: str, room: Path) -> None:
    """Whoever comes to this point waits there until somebody leaves a mark."""
    hit = failpoints.hit

    def hanging(passed: str) -> bool:
        if passed == name:
            (room / "hangs").touch()
            while not (room / "go on").exists():
                time.sleep(0.01)
        return hit(passed)

    failpoints.hit = hanging


def first(path: Path) -> bool:
    """Whether nobody has been here before."""
    try:
        path.open("x").close()
    except FileExistsError:
        return False
    return True


def passed(room: Path, name: str, life: int = 0) -> Iterator[str]:
    """The failpoints that a process has passed, in order."""
    return iter((room / f"{name} life {life} hits").read_text().split())


def main() -> int:
    failpoints.die = die
    parents: list[ArmedParent] = []

    def armed_parent() -> ArmedParent:
        parents.append(ArmedParent())
        return parents[0]

    child.PipeParent = armed_parent  # type: ignore[assignment,misc]
    light = types.ModuleType("regrow.nn.worker")
    light.run = run_worker  # type: ignore[attr-defined]
    sys.modules["regrow.nn.worker"] = regrow.nn.worker = light  # type: ignore[attr-defined]
    if not plan.get("merge"):
        idle = types.ModuleType("regrow.runtime.merging")
        idle.run = lambda parent: parent.next_command()  # type: ignore[attr-defined]
        sys.modules["regrow.runtime.merging"] = regrow.runtime.merging = idle  # type: ignore[attr-defined]
    with failpoints.recording() as hits:
        code = child.main()
    parents[0].hits.write_text("\n".join(hits))
    return code


if __name__ == "__main__":
    plan = json.loads(Path(sys.argv[1]).read_text())
    code = main()
    sys.stderr.flush()
    os._exit(code)
