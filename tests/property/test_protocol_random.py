"""Goal: whatever order messages arrive in, synchronous training gives the bits of one plain process, and
asynchronous training applies every push exactly once.

Method: the real coordinator, servers and sessions under a seeded scheduler that may deliver the oldest
message of any channel next. Workers compute gradients from the rows they pulled, so one wrong row spreads.
The reference knows no servers: it keeps every row in one place and uses the slow twins. Planted bugs show
that the checks can fail.
"""

from __future__ import annotations

import random
from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from helpers import COORDINATOR, HandPlan, job, plan_of, server, table, worker

from regrow.core import twins
from regrow.core.coordinator import Coordinator
from regrow.core.effects import Delivered, Joined, Log, Send
from regrow.core.job import JobSpec, TableSpec
from regrow.core.layout import Layout
from regrow.core.link import Identity
from regrow.core.messages import Declare, Message, Pull, Push, Register
from regrow.core.session import (
    Connect,
    PullAnswered,
    PullWanted,
    PushDurable,
    PushReceived,
    PushWanted,
    Session,
    SessionOpened,
)
from regrow.core.shard import ShardServer
from regrow.store.memory import MemoryStore

EVENTS_MAX = 50_000  # A run that needs more does not come to its end.

Key = tuple[int, int]  # table, row
Records = dict[Key, np.ndarray[Any, Any]]


# --- What workers do: a function of (seed, worker, step) and the rows they see ---


def rows_wanted(of: JobSpec, *, seed: int, index: int, step: int) -> list[list[int]]:
    """Distinct rows per table, mostly the hot ones that all workers want, sometimes none."""
    rng = random.Random(f"rows {seed} {index} {step}")
    wanted = []
    for spec in of.tables:
        reach = min(spec.rows, rng.choice((4, 4, 4, 40)))
        wanted.append(rng.sample(range(reach), rng.randint(0, min(reach, 6))))
    return wanted


def gradient(key: Key, weights: np.ndarray[Any, Any], *, seed: int, index: int, step: int) -> Any:
    """Depends on the weights, and on everything else through noise of very different sizes."""
    rng = random.Random(f"grad {seed} {index} {step} {key}")
    noise = [rng.uniform(-1, 1) * 10.0 ** rng.randint(-4, 2) for _ in weights]
    return np.array(noise, np.float32) + np.float32(0.25) * weights


def whole_gradient(key: Key, weights: np.ndarray[Any, Any], *, seed: int, index: int, step: int) -> Any:
    """Small whole numbers: float32 adds them up exactly, in any order."""
    rng = random.Random(f"whole {seed} {index} {step} {key}")
    return np.array([rng.randint(-9, 9) for _ in weights], np.float32)


# --- One process, no servers ---


def initial(of: JobSpec) -> Records:
    records: Records = {}
    for index, spec in enumerate(of.tables):
        size = twins.record_floats(spec.optimizer.kind, spec.dim)
        values = twins.initial_rows(
            range(spec.rows), dim=spec.dim, seed=of.seed, table=index, bound=spec.init_bound
        )
        for row in range(spec.rows):
            records[index, row] = np.zeros(size, np.float32)
            records[index, row][: spec.dim] = values[row]
    return records


def rule(spec: TableSpec) -> twins.Rule:
    optimizer = spec.optimizer
    return twins.Rule(
        optimizer=optimizer.kind,
        learning_rate=optimizer.learning_rate,
        eps=optimizer.eps,
        beta1=optimizer.beta1,
        beta2=optimizer.beta2,
        momentum=optimizer.momentum,
        weight_decay=optimizer.weight_decay,
    )


def reference_steps(of: JobSpec, *, seed: int, steps: int) -> Iterator[Records]:
    """The state after 0, 1, ... steps: gradients of all workers, summed in worker order, applied once."""
    records = initial(of)
    yield {key: record.copy() for key, record in records.items()}
    for step in range(1, steps + 1):
        sums: Records = {}
        for index in range(of.workers):
            for t, rows in enumerate(rows_wanted(of, seed=seed, index=index, step=step)):
                for row in rows:
                    weights = records[t, row][: of.tables[t].dim]
                    grad = gradient((t, row), weights, seed=seed, index=index, step=step)
                    sums[t, row] = sums[t, row] + grad if (t, row) in sums else grad
        for (t, row), grad in sums.items():
            twins.update_record(records[t, row], grad, rule=rule(of.tables[t]), step=step)
        yield {key: record.copy() for key, record in records.items()}


# --- The cluster, message by message ---


class Worker:
    """Trains `steps` steps, up to `ahead` pulls in advance, as a trainer over a real client would."""

    def __init__(self, world: World, index: int) -> None:
        self.world = world
        self.index = index
        self.identity = worker(index)
        self.session = Session()
        self.opened = False
        self.asked = 0
        self.pushed = 0
        self.durable = 0
        self.plans: dict[int, tuple[HandPlan, Any]] = {}
        self.answered: list[int] = []

    @property
    def last_pull(self) -> int:
        """In sync mode one more pull commits the last step."""
        return self.world.steps + (self.world.job.mode == "sync")

    def can_act(self) -> bool:
        if not self.opened:
            return False
        next_answered = self.pushed + 1 in self.answered
        may_push = next_answered and self.pushed < self.world.steps
        return may_push or (self.asked < self.last_pull and self.asked < self.pushed + self.world.ahead)

    def act(self) -> None:
        """Pushes the batch whose rows are here, or asks for the next."""
        may_pull = self.asked < self.last_pull and self.asked < self.pushed + self.world.ahead
        may_push = self.pushed + 1 in self.answered and self.pushed < self.world.steps
        if may_pull and (not may_push or self.world.rng.random() < 0.5):
            self.asked += 1
            of = self.world.job
            wanted = rows_wanted(of, seed=self.world.seed, index=self.index, step=self.asked)
            plan = plan_of(of, wanted)
            rows = np.full(plan.floats, np.nan, np.float32)
            self.plans[self.asked] = plan, rows
            self.world.hand(
                self.identity, PullWanted(request=self.asked, step=self.asked, plan=plan, rows=rows)
            )
            return
        self.pushed += 1
        plan, rows = self.plans[self.pushed]
        self.world.on_rows(self.index, self.pushed, {key: rows[at] for key, at in plan.where.items()})
        grads = np.empty_like(rows)
        for key, at in plan.where.items():
            grads[at] = self.world.gradient(
                key, rows[at], seed=self.world.seed, index=self.index, step=self.pushed
            )
        self.world.hand(
            self.identity, PushWanted(seq=self.pushed, request=self.pushed, plan=plan, grads=grads)
        )

    @property
    def done(self) -> bool:
        return self.durable == self.world.steps and self.last_pull in {0, *self.answered}


class World:
    """A cluster whose messages wait in channels until chance picks them; FIFO within each channel."""

    def __init__(
        self,
        of: JobSpec,
        *,
        seed: int,
        steps: int,
        gradient: Callable[..., Any],
        ahead: int = 1,
        resends: bool = False,
        server_class: type[ShardServer] = ShardServer,
        on_rows: Callable[[int, int, Records], None] = lambda *_: None,
    ) -> None:
        self.job = of
        self.seed = seed
        self.steps = steps
        self.gradient = gradient
        self.ahead = ahead
        self.resends = resends
        self.on_rows = on_rows
        self.rng = random.Random(f"schedule {seed}")
        self.coordinator = Coordinator(servers=of.servers)
        self.servers = [
            server_class(identity=server(index), build_store=MemoryStore, reply_bytes_max=1 << 20)
            for index in range(of.servers)
        ]
        self.workers = [Worker(self, index) for index in range(of.workers)]
        self.channels: dict[tuple[Identity, Identity], deque[Message]] = defaultdict(deque)
        self.pushes_sent: dict[tuple[Identity, Identity], list[Push]] = defaultdict(list)
        for member in self.servers:
            self.hand(COORDINATOR, Joined(peer=member.identity))
            address = Register(address=f"test:{member.identity.id}")
            self.channels[member.identity, COORDINATOR].append(address)
        for actor in self.workers:
            self.hand(COORDINATOR, Joined(peer=actor.identity))
            self.channels[actor.identity, COORDINATOR].append(Declare(job=of))

    def run(self) -> None:
        for _ in range(EVENTS_MAX):
            ready: list[Any] = [channel for channel, queue in self.channels.items() if queue]
            ready += [actor for actor in self.workers if actor.can_act()]
            if not ready:
                break
            chosen = self.rng.choice(ready)
            if isinstance(chosen, Worker):
                chosen.act()
            else:
                self.deliver(*chosen)
        assert all(actor.done for actor in self.workers), "the run came to a halt before its end"

    def deliver(self, source: Identity, target: Identity) -> None:
        message = self.channels[source, target].popleft()
        self.hand(target, Delivered(source=source, message=message))

    def hand(self, target: Identity, event: Any) -> None:
        """Gives an event to a machine and carries out what it asks for."""
        if target.role == "coordinator":
            machine: Any = self.coordinator
        elif target.role == "server":
            machine = self.servers[target.id]
        else:
            machine = self.workers[target.id].session
        for effect in machine.receive(event):
            self.carry_out(target, effect)

    def carry_out(self, source: Identity, effect: Any) -> None:
        if isinstance(effect, Send):
            self.post(source, effect.target, effect.message)
        elif isinstance(effect, Connect):
            for member in self.servers:
                self.hand(source, Joined(peer=member.identity))
        elif isinstance(effect, SessionOpened):
            self.workers[source.id].opened = True
        elif isinstance(effect, PullAnswered):
            self.workers[source.id].answered.append(effect.request)
        elif isinstance(effect, PushDurable):
            assert effect.seq == self.workers[source.id].durable + 1, "durable, one after the other"
            self.workers[source.id].durable = effect.seq
        else:
            assert isinstance(effect, Log | PushReceived), f"{source}: {effect}"

    def post(self, source: Identity, target: Identity, message: Message) -> None:
        channel = source, target
        self.channels[channel].append(message)
        if isinstance(message, Push):
            self.pushes_sent[channel].append(message)
            if self.resends and self.rng.random() < 0.3:
                # As after a reconnection: everything from some push on, once more and in order.
                first = self.rng.randrange(len(self.pushes_sent[channel]))
                self.channels[channel].extend(self.pushes_sent[channel][first:])

    def records(self) -> Records:
        """Every record of the job, wherever it lies."""
        found: Records = {}
        for t, spec in enumerate(self.job.tables):
            layout = Layout(servers=self.job.servers, k=spec.k, r=spec.r)
            servers, slots = layout.place(np.arange(spec.rows), table=t)
            for row, (holder, slot) in enumerate(zip(servers.tolist(), slots.tolist(), strict=True)):
                store = self.servers[holder].store
                assert store is not None
                found[t, row] = np.empty(store.record_floats(t), np.float32)
                store.read_records(t, slot, 1, found[t, row])
        return found


def bits(records: Records) -> dict[Key, bytes]:
    return {key: record.tobytes() for key, record in records.items()}


# --- Synchronous mode: the bits of one process ---

OPTIMIZERS = ("sgd", "momentum", "adagrad", "rowwise_adagrad", "adam", "partial_rowwise_adam")


def sync_job(*, servers: int, k: int, seed: int) -> JobSpec:
    rng = random.Random(f"job {seed}")
    tables = [
        table(
            f"t{t}",
            rows=rng.randint(5, 40),
            dim=rng.choice((1, 3, 4, 9)),
            kind=rng.choice(OPTIMIZERS),  # type: ignore[arg-type]
            lr=0.05,
            bound=0.5,
            k=k,
        )
        for t in range(3)
    ]
    return job(*tables, servers=servers, workers=rng.randint(1, 4), mode="sync", seed=seed)


def run_sync(of: JobSpec, *, seed: int, server_class: type[ShardServer] = ShardServer) -> World:
    steps = 5
    states = list(reference_steps(of, seed=seed, steps=steps))

    def check(index: int, step: int, rows: Records) -> None:
        for (t, row), weights in rows.items():
            expected = states[step - 1][t, row][: of.tables[t].dim]
            assert weights.tobytes() == expected.tobytes(), f"W{index} pulled a wrong row {t, row} at {step}"

    world = World(
        of,
        seed=seed,
        steps=steps,
        gradient=gradient,
        resends=seed % 2 == 1,
        server_class=server_class,
        on_rows=check,
    )
    world.run()
    assert bits(world.records()) == bits(states[-1])
    assert [member.committed for member in world.servers] == [steps] * of.servers
    assert [actor.session.redo_bytes for actor in world.workers] == [0] * of.workers
    assert [(len(member._parked), len(member._staged)) for member in world.servers] == [(0, 0)] * of.servers
    return world


SPREADS = [(servers, k) for servers in (1, 3, 5) for k in (1, 2, 4) if k <= servers]


@pytest.mark.parametrize(("servers", "k"), SPREADS)
def test_synchronous_training_gives_the_bits_of_one_process(servers: int, k: int) -> None:
    for seed in range(8):
        run_sync(sync_job(servers=servers, k=k, seed=seed), seed=seed)


# --- Asynchronous mode: exactly once ---


def async_job(*, servers: int, k: int, seed: int) -> JobSpec:
    rng = random.Random(f"job {seed}")
    tables = [table(f"t{t}", rows=rng.randint(5, 30), dim=rng.choice((1, 3)), k=k) for t in range(2)]
    return job(*tables, servers=servers, workers=rng.randint(1, 4))


def run_async(of: JobSpec, *, seed: int, server_class: type[ShardServer] = ShardServer) -> World:
    steps = 8
    world = World(
        of,
        seed=seed,
        steps=steps,
        gradient=whole_gradient,
        ahead=3,
        resends=True,
        server_class=server_class,
    )
    world.run()
    expected: Records = {key: np.zeros_like(record) for key, record in initial(of).items()}
    for index in range(of.workers):
        for step in range(1, steps + 1):
            for t, rows in enumerate(rows_wanted(of, seed=seed, index=index, step=step)):
                for row in rows:
                    dim = of.tables[t].dim
                    weights = expected[t, row][:dim]
                    weights -= whole_gradient((t, row), weights, seed=seed, index=index, step=step)
    found = world.records()
    assert {key: record.tolist() for key, record in found.items()} == {
        key: record.tolist() for key, record in expected.items()
    }
    applied = {index: steps for index in range(of.workers)}
    assert [member.applied for member in world.servers] == [applied] * of.servers
    assert [member.clock for member in world.servers] == [steps * of.workers] * of.servers
    assert [actor.session.redo_bytes for actor in world.workers] == [0] * of.workers
    return world


@pytest.mark.parametrize(("servers", "k"), SPREADS)
def test_every_asynchronous_push_is_applied_exactly_once(servers: int, k: int) -> None:
    for seed in range(8):
        run_async(async_job(servers=servers, k=k, seed=seed), seed=seed)


def test_a_run_is_a_function_of_its_seed() -> None:
    first, second = (run_async(async_job(servers=3, k=2, seed=7), seed=7) for _ in range(2))
    assert bits(first.records()) == bits(second.records())
    assert first.rng.getstate() == second.rng.getstate()


# --- The checks can fail: planted bugs ---


class AppliesDuplicates(ShardServer):
    def _on_push(self, source: Identity, push: Push) -> list[Any]:
        self.applied[source.id] = push.seq - 1
        return super()._on_push(source, push)


class SkipsEveryTenth(ShardServer):
    def _on_push(self, source: Identity, push: Push) -> list[Any]:
        if push.seq % 10 == 7:
            self.applied[source.id] = push.seq
        return super()._on_push(source, push)


class SumsInOrderOfArrival(ShardServer):
    def _commit(self) -> list[Any]:
        arrived = list(self._staged.get(self.committed + 1, {}).values())
        if len(arrived) == self.view.job.workers:  # type: ignore[union-attr]
            self._staged[self.committed + 1] = dict(enumerate(arrived))
        return super()._commit()


class AnswersBeforeTheCommit(ShardServer):
    def _on_pull(self, source: Identity, pull: Pull) -> list[Any]:
        early = pull.step == self.committed + 2
        effects = super()._on_pull(source, pull)
        return [self._answer(source, pull)] if early and not effects else effects


class ForgetsOneOfTheWorkers(ShardServer):
    def _commit(self) -> list[Any]:
        staged = self._staged.get(self.committed + 1, {})
        if len(staged) == self.view.job.workers > 1:  # type: ignore[union-attr]
            staged[0] = staged[1]
        return super()._commit()


@pytest.mark.parametrize(
    ("bug", "run", "make"),
    [
        (AppliesDuplicates, run_async, async_job),
        (SkipsEveryTenth, run_async, async_job),
        (SumsInOrderOfArrival, run_sync, sync_job),
        (AnswersBeforeTheCommit, run_sync, sync_job),
        (ForgetsOneOfTheWorkers, run_sync, sync_job),
    ],
)
def test_a_planted_bug_is_caught(bug: type[ShardServer], run: Any, make: Any) -> None:
    caught = 0
    for seed in range(10):
        try:
            run(make(servers=3, k=2, seed=seed), seed=seed, server_class=bug)
        except AssertionError:
            caught += 1
    assert caught >= 2
