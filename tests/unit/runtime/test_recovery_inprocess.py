"""Goal: a run that loses servers ends with the same model, bit for bit, as one that does not; beyond what its parities
can bring back it ends with `DataLoss` that says what is lost.

Method: whole clusters in one process. Gradients are computed from the pulled rows, so one wrong bit anywhere spoils the
digest at the end. Servers are killed at every point of a step, in turn, together, during a recovery, before the first
and after the last push. Asynchronous runs have one worker: with several, the order of updates may change.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import os
import subprocess
import sys
from typing import Any, get_args

import numpy as np
import pytest
from helpers import HandPlan, job, plan_of, table

from regrow.core import decode, flusher
from regrow.core.flusher import STREAM_BYTES, Budget
from regrow.core.job import JobSpec, OptimizerKind
from regrow.core.protection import FlushSpec
from regrow.errors import ConnectionLost, DataLoss, UserError
from regrow.runtime.client import Client, Ticket
from regrow.runtime.inprocess import InProcessCluster

KINDS: tuple[OptimizerKind, ...] = get_args(OptimizerKind)
TWO_KINDS: tuple[OptimizerKind, ...] = ("adam", "rowwise_adagrad")
MODES = ["async", "sync"]
# (servers, rings, (k, r) of tables, by turns)
CODES: dict[str, tuple[int, int, list[tuple[int, int]]]] = {
    "2 copies": (2, 1, [(1, 1)]),
    "2+1": (3, 1, [(2, 1)]),
    "3+1 and 1+1": (4, 1, [(3, 1), (1, 1)]),
    "3 copies": (3, 1, [(1, 2)]),
    "2+2 and 1+2": (4, 1, [(2, 2), (1, 2)]),
    "two rings of 1+1": (4, 2, [(1, 1)]),
}
TWICE = {name: code for name, code in CODES.items() if min(r for _, r in code[2]) > 1}
STEPS = 5
PHASES = ["before the pull", "after the pull", "after the push"]


@dataclasses.dataclass(frozen=True)
class Kill:
    step: int
    phase: str
    server: int
    settled: bool = False  # and wait until it has recovered
    during: bool = False  # while another recovery is under way


def of_code(name: str, mode: str, *, kinds: tuple[OptimizerKind, ...] = TWO_KINDS, **options: Any) -> JobSpec:
    """A table per optimizer; rows that are updated often, once, and never."""
    servers, rings, codes = CODES[name]
    tables = [
        table(f"t{index}", rows=23 + 6 * index, dim=1 + index % 3, kind=kind, lr=0.1, bound=1.0, k=k, r=r)
        for index, (kind, (k, r)) in enumerate(zip(kinds, itertools.cycle(codes), strict=False))
    ]
    flush = options.pop("flush", FlushSpec(pushes=3))
    workers = options.pop("workers", 2 if mode == "sync" else 1)
    return job(*tables, servers=servers, rings=rings, workers=workers, mode=mode, seed=7, flush=flush, **options)


@functools.cache
def plan_of_step(of: JobSpec, step: int, worker: int) -> HandPlan:
    """Some rows that every step has, and some of its own; the last third of a table is never used."""
    wanted = []
    for index, spec in enumerate(of.tables):
        used = spec.rows * 2 // 3
        own = [(7 * step + 3 * worker + 5 * n + index) % used for n in range(4)]
        wanted.append(sorted({0, 1, *own}))
    return plan_of(of, wanted)


class Run:
    """Trains step by step; `kill` may come anywhere."""

    def __init__(self, of: JobSpec) -> None:
        self.job = of
        self.cluster = InProcessCluster(servers=of.servers)
        self.clients = [self.cluster.client(of, worker=w) for w in range(of.workers)]
        self.steps = 0

    def expect(self, steps: int) -> None:
        for w, client in enumerate(self.clients):
            client.expect([plan_of_step(self.job, self.steps + 1 + n, w) for n in range(steps)])

    def pull(self) -> list[tuple[Client, Ticket]]:
        self.steps += 1
        plans = [plan_of_step(self.job, self.steps, w) for w in range(self.job.workers)]
        pairs = zip(self.clients, plans, strict=True)
        return [(client, client.pull(plan, step=self.steps)) for client, plan in pairs]

    def push(self, pulled: list[tuple[Client, Ticket]]) -> None:
        rows = [ticket.wait(0).copy() for _, ticket in pulled]
        for w, ((client, ticket), values) in enumerate(zip(pulled, rows, strict=True)):
            client.push(ticket, values * np.float32(0.25) + np.float32(0.5 - self.steps / 16 + w))

    def step(self) -> None:
        self.push(self.pull())

    def drain(self) -> None:
        if self.job.mode == "sync":
            self.steps += 1
            empty = plan_of(self.job, [[] for _ in self.job.tables])
            commits = [client.pull(empty, step=self.steps) for client in self.clients]
            for commit in commits:
                commit.wait(0)
        for client in self.clients:
            client.drain(timeout_seconds=0)

    def finish(self) -> str:
        self.drain()
        digest = self.clients[0].digest()
        self.cluster.settle()
        assert self.clients[0].digest() == digest
        return digest


def trained(of: JobSpec, kills: tuple[Kill, ...] = (), *, steps: int = STEPS) -> str:
    run = Run(of)

    def strike(number: int, phase: str) -> None:
        for kill in kills:
            if (kill.step, kill.phase) == (number, phase):
                assert bool(run.clients[0].recovering) or not kill.during
                run.cluster.kill(kill.server)
                if kill.settled:
                    run.cluster.settle()

    for number in range(1, steps + 1):
        strike(number, PHASES[0])
        pulled = run.pull()
        strike(number, PHASES[1])
        run.push(pulled)
        strike(number, PHASES[2])
    digest = run.finish()
    assert run.clients[0].recovering == ()
    return digest


@functools.cache
def clean(of: JobSpec, steps: int = STEPS) -> str:
    return trained(of, steps=steps)


@pytest.fixture
def slowly(monkeypatch: pytest.MonkeyPatch) -> FlushSpec:
    """A recovery that takes many ticks; with the constants as they are, these few rows come back in one message."""
    monkeypatch.setattr(flusher, "STREAM_BYTES", 16)
    monkeypatch.setattr(decode, "SWEEP_BYTES", 16)
    return FlushSpec(pushes=1, sweep_bytes_per_s=400)


# --- Within tolerance ---


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", CODES)
def test_any_server_may_be_lost_at_any_point_of_a_step(name: str, mode: str) -> None:
    of = of_code(name, mode, kinds=KINDS if name == "2+1" else TWO_KINDS)
    for server, phase in itertools.product(range(of.servers), PHASES):
        assert trained(of, (Kill(3, phase, server),)) == clean(of), (server, phase)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kind", KINDS)
def test_every_optimizer_goes_on_from_its_own_state(kind: OptimizerKind, mode: str) -> None:
    of = of_code("2+1", mode, kinds=(kind,))
    for server in range(of.servers):
        assert trained(of, (Kill(4, PHASES[2], server),)) == clean(of), server


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", CODES)
def test_one_after_another_until_nobody_is_left_of_the_first(name: str, mode: str) -> None:
    """What a replacement holds for others is as good as what was lost: the next one comes back from it."""
    of = of_code(name, mode, kinds=TWO_KINDS)
    kills = tuple(
        Kill(2 + at // 2, PHASES[2 * (at % 2)], server, settled=True)
        for at, server in enumerate([*range(of.servers), 0, 1])
    )
    assert max(kill.step for kill in kills) <= STEPS
    assert trained(of, kills) == clean(of)


@pytest.mark.parametrize("pushes", [1, 2, 100])
@pytest.mark.parametrize("commit", ["exactly-once", "2pc"])
def test_whenever_changes_leave(pushes: int, commit: Any) -> None:
    of = of_code("2+1", "async", flush=FlushSpec(pushes=pushes, commit=commit))
    for server, step in itertools.product(range(of.servers), (1, 2, STEPS)):
        kills = (Kill(step, PHASES[2], server),)
        assert trained(of, kills) == clean(of_code("2+1", "async")), (server, step)


def test_nothing_is_imported_in_the_middle_of_a_recovery() -> None:
    """numpy imports parts of itself when they are first called, which is 10 ms at every server while all wait for the
    first rows. Another process: in this one somebody has called everything."""
    script = """
import sys
from regrow.runtime import serve
import test_recovery_inprocess as rows
run = rows.Run(rows.of_code("2+2 and 1+2", "async"))
run.step(), run.step()
before = set(sys.modules)
run.cluster.kill(1), run.cluster.kill(2)
run.expect(2)
run.step(), run.step()
run.cluster.settle()
print(sorted(set(sys.modules) - before))
"""
    places = os.pathsep.join(path for path in sys.path if path)
    environment = os.environ | {"PYTHONPATH": places}
    said = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, timeout=120)
    assert said.stdout.strip() == "[]", said.stderr


def test_two_rings_lose_a_server_each() -> None:
    of = of_code("two rings of 1+1", "sync")
    for first, second in itertools.product((0, 1), (2, 3)):
        kills = (Kill(3, PHASES[1], first), Kill(3, PHASES[1], second))
        assert trained(of, kills) == clean(of)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", TWICE)
def test_two_servers_are_lost_together(name: str, mode: str) -> None:
    of = of_code(name, mode, kinds=TWO_KINDS)
    for first, second in itertools.combinations(range(of.servers), 2):
        kills = (Kill(3, PHASES[2], first), Kill(3, PHASES[2], second))
        assert trained(of, kills) == clean(of), (first, second)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", TWICE)
def test_a_server_is_lost_while_another_comes_back(name: str, mode: str, slowly: FlushSpec) -> None:
    """Also the same one again: the rows it had back already are lost once more."""
    of = of_code(name, mode, kinds=TWO_KINDS, flush=slowly)
    for first, second in itertools.product(range(of.servers), repeat=2):
        kills = (Kill(3, PHASES[1], first), Kill(4, PHASES[0], second, during=True))
        assert trained(of, kills) == clean(of), (first, second)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", ["2 copies", "3+1 and 1+1"])
def test_a_replacement_is_lost_before_it_has_recovered(name: str, mode: str, slowly: FlushSpec) -> None:
    of = of_code(name, mode, flush=slowly, kinds=TWO_KINDS)
    for server in range(of.servers):
        kills = (
            Kill(3, PHASES[0], server),
            Kill(3, PHASES[2], server, during=True),
            Kill(4, PHASES[1], server, during=True),
        )
        assert trained(of, kills) == clean(of), server


@pytest.mark.parametrize("mode", MODES)
def test_rows_that_are_expected_are_asked_for_once(mode: str, slowly: FlushSpec) -> None:
    of = of_code("2+1", mode, flush=slowly)
    asked = 0
    for server in range(of.servers):
        run = Run(of)
        run.step()
        run.step()
        run.cluster.kill(server)
        before = run.cluster.servers[server].report()["faults"]
        run.expect(2)
        expected = run.cluster.servers[server].report()["faults"]
        asked += expected - before
        run.step()
        run.step()
        if mode == "async":  # else the step before is done again, which nobody told of
            assert run.cluster.servers[server].report()["faults"] == expected, "a pull has to ask again"
        run.step()
        assert run.finish() == clean(of), server
    assert asked


@pytest.mark.parametrize("mode", MODES)
def test_killed_before_the_first_push(mode: str) -> None:
    of = of_code("2+1", mode)
    for server in range(of.servers):
        assert trained(of, (Kill(1, PHASES[0], server),)) == clean(of)
        assert trained(of, (Kill(1, PHASES[1], server),)) == clean(of)


def test_killed_before_there_is_a_job() -> None:
    of = of_code("2+1", "async")
    cluster = InProcessCluster(servers=of.servers)
    cluster.kill(1)
    client = cluster.client(of)
    assert client.recovering == ()
    assert [server.identity.incarnation for server in cluster.servers] == [0, 1, 0]
    assert client.digest() == InProcessCluster(servers=of.servers).client(of).digest()


@pytest.mark.parametrize("mode", MODES)
def test_killed_after_the_last_step(mode: str) -> None:
    """Before and after everything is durable, with and without time to recover before somebody reads it."""
    of = of_code("2+1", mode)
    for server, settled in itertools.product(range(of.servers), (False, True)):
        assert trained(of, (Kill(STEPS, PHASES[2], server, settled=settled),)) == clean(of)
        run = Run(of)
        for _ in range(STEPS):
            run.step()
        assert run.finish() == clean(of)
        run.cluster.kill(server)
        if settled:
            run.cluster.settle()
        assert run.clients[0].digest() == clean(of)


def test_a_worker_goes_on_after_its_server_did() -> None:
    """Its successor resumes where everything is durable."""
    of = of_code("2+1", "async")
    run = Run(of)
    for number in range(1, STEPS + 1):
        run.step()
        if number == 3:
            run.drain()
            run.cluster.kill(1)
            run.clients[0] = run.cluster.client(of)
            assert run.clients[0].opened.result(0).durable == 3
    assert run.finish() == clean(of)


@pytest.mark.parametrize("mode", MODES)
def test_assigned_and_loaded_rows_come_back(mode: str) -> None:
    of = of_code("2+1", mode, workers=1, kinds=KINDS)
    expected = None
    for killed in (None, 0, 1, 2):
        run = Run(of)
        plan = plan_of(of, [range(spec.rows) for spec in of.tables])
        run.clients[0].assign(plan, np.linspace(-1, 1, plan.floats, dtype=np.float32))
        run.step()
        floats = of.tables[3].record_floats
        run.clients[0].write_records(3, 2, np.arange(5 * floats, dtype=np.float32).reshape(5, floats))
        if killed is not None:
            run.cluster.kill(killed)
        run.step()
        digest = run.finish()
        expected = expected or digest
        assert digest == expected, killed


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", CODES)
def test_training_goes_on_while_rows_come_back_slowly(name: str, mode: str, slowly: FlushSpec) -> None:
    """The limit is for the background; who asks for rows gets them at once."""
    of = of_code(name, mode, flush=slowly, kinds=TWO_KINDS)
    for server in range(of.servers):
        assert trained(of, (Kill(2, PHASES[1], server),)) == clean(of), server


def test_a_budget_limits_what_leaves_per_time() -> None:
    rate = 4 * STREAM_BYTES
    budget, taken = Budget(rate), 0
    for step in range(200):
        budget.refill(step / 10)
        while budget.has_some():
            budget.take(STREAM_BYTES)
            taken += STREAM_BYTES
        # What may burst, what time has brought, and one overdraft.
        assert taken <= STREAM_BYTES + rate * step / 10 + STREAM_BYTES
    assert taken >= rate * 19.9
    # Time in which nothing was wanted cannot be saved up.
    budget.refill(1e6)
    burst = 0
    while budget.has_some():
        budget.take(1024)
        burst += 1024
    assert burst == STREAM_BYTES
    assert Budget(0).has_some()


def test_a_limit_is_kept(slowly: FlushSpec) -> None:
    of = of_code("2+1", "async", flush=slowly, kinds=KINDS)
    run = Run(of)
    for _ in range(STEPS):
        run.step()
    run.drain()
    run.cluster.kill(0)
    server = run.cluster.servers[0].server
    assert server is not None and not server.ways.is_whole
    ticks = 0
    while run.clients[0].recovering:
        run.cluster.tick()
        ticks += 1
        allowed = 400 * ticks + 2 * (16 + 32)  # what time has brought, and overdrafts of two helpers
        assert server.ways.count("bytes_back") <= allowed
    assert ticks > 1


# --- Beyond it ---


def lost_pairs(name: str) -> list[tuple[int, int]]:
    servers, rings, _ = CODES[name]
    ring = servers // rings
    return [(a, b) for a, b in itertools.permutations(range(servers), 2) if a // ring == b // ring]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", ["2 copies", "2+1", "two rings of 1+1"])
def test_more_than_parities_can_bring_back_is_data_loss(name: str, mode: str, slowly: FlushSpec) -> None:
    of = of_code(name, mode, flush=slowly, kinds=KINDS)
    for first, second in lost_pairs(name):
        run = Run(of)
        run.step()
        pulled = run.pull()
        run.cluster.kill(first)
        run.cluster.kill(second)
        run.cluster.tick()
        low, high = sorted((first, second))
        says = rf"S{low}, S{high} are down together: up to \d+ rows are lost, in t0 \(\d+\), t1 .*, t5 \(\d+\)"
        for call in (functools.partial(run.push, pulled), run.pull, run.drain, run.clients[0].digest):
            with pytest.raises(DataLoss, match=says):
                call()
        with pytest.raises(DataLoss, match=says):
            run.cluster.client(of, worker=0)


def test_the_very_next_call_says_that_rows_are_lost(slowly: FlushSpec) -> None:
    run = Run(of_code("2+1", "async", flush=slowly, kinds=KINDS))
    run.step()
    pulled = run.pull()
    run.cluster.kill(0)
    run.cluster.kill(1)
    with pytest.raises(DataLoss):
        run.push(pulled)


def test_only_the_tables_that_lost_something_are_named(slowly: FlushSpec) -> None:
    tables = [table("copied twice", rows=300, k=1, r=2), table("coded", rows=300, k=2, r=1)]
    run = Run(job(*tables, servers=4, flush=slowly))
    for _ in range(STEPS):
        run.step()
    run.cluster.kill(0)
    run.cluster.kill(1)
    with pytest.raises(DataLoss, match=r"S0, S1 are down together: up to \d+ rows are lost, in coded \(\d+\)\n"):
        run.drain()


def test_without_parities_a_lost_server_ends_the_run_and_says_so() -> None:
    run = Run(job(table(rows=30), servers=2))
    run.step()
    run.cluster.kill(1)
    run.cluster.settle()
    assert not any(server.identity.incarnation for server in run.cluster.servers)
    with pytest.raises((ConnectionLost, DataLoss)):
        for _ in range(3):
            run.step()


def test_commit_none_goes_on_without_what_was_not_flushed() -> None:
    """Pushes since the last flush are gone with their server, and with no other; nothing waits for them."""
    of = of_code("2 copies", "async", flush=FlushSpec(pushes=100, commit="none"), kinds=("sgd",))
    run = Run(of)
    everything = plan_of(of, [range(of.tables[0].rows)])
    run.clients[0].push(run.clients[0].pull(everything, step=1), np.ones(everything.floats, np.float32))
    run.drain()
    run.cluster.tick()
    run.cluster.tick()  # idle: all of it is flushed
    flushed = run.clients[0].records(0, 0, of.tables[0].rows)
    run.clients[0].push(run.clients[0].pull(everything, step=2), np.ones(everything.floats, np.float32))
    newest = run.clients[0].records(0, 0, of.tables[0].rows)
    run.clients[0].drain(timeout_seconds=0)
    run.cluster.kill(0)
    servers = np.arange(of.tables[0].rows) % 2  # k = 1: row by row in turn
    expected = np.where((servers == 0)[:, None], flushed, newest)
    assert run.clients[0].records(0, 0, of.tables[0].rows).tobytes() == expected.tobytes()
    run.steps = 2
    for _ in range(STEPS):
        run.step()
    run.finish()


@pytest.mark.parametrize("server", [-1, 3])
def test_a_server_that_is_not_there_cannot_be_killed(server: int) -> None:
    with pytest.raises(UserError, match=f"no server {server}"):
        InProcessCluster(servers=3).kill(server)
