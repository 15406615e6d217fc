"""What the rows must be: a model without servers, failures or messages.

Asynchronous: push `seq` of worker w adds its own power of two, in a column and at a bit that no other push uses, so
the bits of a row say which pushes it contains, and a push applied twice shows as a carry. All sums are
exact, whatever the order. Where the optimizer does more than add, the order matters: then each row belongs to one
worker, whose pushes have an order, and the row is after so many of them. Synchronous: gradients are computed from the
pulled rows, so one wrong bit spreads; the reference keeps every row in one place and uses the slow twins.
"""

from __future__ import annotations

import dataclasses
import functools
import random
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from regrow.core import twins
from regrow.core.job import JobSpec
from regrow.sim.profiles import UNITS_PER_COLUMN

Key = tuple[int, int]  # table, row
F32 = np.ndarray[Any, np.dtype[np.float32]]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
    """Where the rows of a batch are; `where` says which floats belong to (table, row)."""

    counts: Any
    slots: Any
    row_start: Any
    float_start: Any
    floats: int
    where: dict[Key, slice]


class Places:
    """Where each row lives, and which row a slot holds."""

    def __init__(self, job: JobSpec) -> None:
        self.job = job
        self.of_row: dict[Key, tuple[int, int]] = {}  # (table, row) -> (server, slot)
        for t, spec in enumerate(job.tables):
            servers, slots = job.layout(t).place(np.arange(spec.rows), table=t)
            for row, (server, slot) in enumerate(zip(servers.tolist(), slots.tolist(), strict=True)):
                self.of_row[t, row] = server, slot
        self.row_at = {(server, t, slot): row for (t, row), (server, slot) in self.of_row.items()}

    def plan(self, rows: Sequence[Iterable[int]]) -> Plan:
        """The plan of these rows of each table, as a worker's router would lay it out."""
        job = self.job
        here: list[list[list[Key]]] = [[[] for _ in job.tables] for _ in range(job.servers)]
        for t, wanted in enumerate(rows):
            for row in wanted:
                here[self.of_row[t, row][0]][t].append((t, row))
        slots: list[int] = []
        row_start, float_start = [0], [0]
        where: dict[Key, slice] = {}
        offset = 0
        for tables in here:
            for keys in tables:
                for key in keys:
                    slots.append(self.of_row[key][1])
                    where[key] = slice(offset, offset + job.tables[key[0]].dim)
                    offset = where[key].stop
            row_start.append(len(slots))
            float_start.append(offset)
        return Plan(
            counts=np.array([[len(keys) for keys in tables] for tables in here], np.int32),
            slots=np.array(slots, np.uint32),
            row_start=np.array(row_start, np.int64),
            float_start=np.array(float_start, np.int64),
            floats=offset,
            where=where,
        )


class Reference:
    """What workers do and what must come of it; `AsyncReference` and `SyncReference` say the latter."""

    def __init__(
        self, job: JobSpec, *, steps: int, rows_seed: int, assigned: bool, changes_rates: bool = False
    ) -> None:
        self.job = job
        self.steps = steps
        self._sync = job.mode == "sync"
        self.places = Places(job)
        self.initial = _initial(job)
        self.base = dict(self.initial)  # what pushes are added to
        self.assigned = self._assign() if assigned else None  # (plan, weights) that every worker begins with
        self.wanted = {
            (w, step): self._choose_rows(_rows_wanted(job, rows_seed=rows_seed, worker=w, step=step), w)
            for w in range(job.workers)
            for step in range(1, steps + 2)
        }
        self.plans = {batch: self.places.plan(rows) for batch, rows in self.wanted.items()}
        self.rates: dict[tuple[int, int], tuple[float, ...]] = {
            (w, step): _choose_rates(job, rows_seed=rows_seed, worker=w, step=step) if changes_rates else ()
            for w, step in self.wanted
        }
        self.units: dict[Key, list[tuple[int, int]]] = {key: [] for key in self.initial}  # pushes that have a row
        for (w, step), tables in self.wanted.items():
            for t, rows in enumerate(tables):
                for row in rows if step <= steps else ():
                    self.units[t, row].append((w, step))

    def _assign(self) -> tuple[Plan, F32]:
        """Weights of their own for the rows of the last table."""
        table = len(self.job.tables) - 1
        spec = self.job.tables[table]
        plan = self.places.plan([*([] for _ in range(table)), range(spec.rows)])
        weights = np.zeros(plan.floats, np.float32)
        for key, place in plan.where.items():
            weights[place] = np.arange(1, spec.dim + 1) + 8 * key[1]  # whole numbers: sums stay exact
            record = self.initial[key].copy()
            record[: spec.dim] = weights[place]
            self.base[key] = record
        return plan, weights

    def find_pushes(self, key: Key, marks: Sequence[int]) -> int:
        """Which of the pushes that have a row are in it at these marks: a bit for each of `units`."""
        found, bit = 0, 1
        if self._sync:
            mark = marks[0]
            for _, step in self.units[key]:
                if step <= mark:
                    found |= bit
                bit += bit
        else:
            for w, step in self.units[key]:
                if step <= marks[w]:
                    found |= bit
                bit += bit
        return found

    def _choose_rows(self, wanted: list[list[int]], worker: int) -> list[list[int]]:
        """Of these rows of each table, those that this worker may push to."""
        return wanted

    def is_open(self, key: Key, marks: Sequence[int]) -> bool:
        """Whether a row at these marks may still be as it was made, or have its assigned weights already."""
        if self.assigned is None or key not in self.assigned[0].where:
            return False
        return not self.find_pushes(key, marks)

    def gradients(self, worker: int, step: int, rows: F32) -> F32:
        raise NotImplementedError

    def pull_problem(self, step: int, key: Key, weights: F32) -> str | None:
        """What is wrong with a row that was pulled for this step."""
        raise NotImplementedError

    def dump_problem(self, key: Key, record: F32, *, worker: int, durable: int) -> str | None:
        """What is wrong with a record that a worker read when its pushes up to `durable` were."""
        return self.record_problem(key, record, self.marks_final)

    def record_problem(self, key: Key, record: F32, marks: Sequence[int]) -> str | None:
        """What is wrong with a record that contains exactly the pushes up to `marks`."""
        expected = self.record(key, marks)
        if record[: expected.size].tobytes() == expected.tobytes():
            return None
        return f"is {self.describe(key, record)}, not {self.describe(key, expected)}"

    def record(self, key: Key, marks: Sequence[int]) -> F32:
        raise NotImplementedError

    def record_without(self, key: Key, marks: Sequence[int], lost: int) -> F32:
        """The same where some pushes may be lost."""
        raise NotImplementedError

    def describe(self, key: Key, record: F32) -> str:
        """A record in short, for people."""
        raise NotImplementedError

    @property
    def marks_final(self) -> tuple[int, ...]:
        return (self.steps,) if self.job.mode == "sync" else (self.steps,) * self.job.workers


class AsyncReference(Reference):
    def __init__(
        self, job: JobSpec, *, steps: int, rows_seed: int, assigned: bool, changes_rates: bool = False
    ) -> None:
        super().__init__(job, steps=steps, rows_seed=rows_seed, assigned=assigned, changes_rates=changes_rates)
        assert job.workers * steps <= UNITS_PER_COLUMN * min(table.dim for table in job.tables)
        self._expected: dict[tuple[Key, int], F32] = {}
        self._sound: set[tuple[Key, bytes]] = set()  # rows that were pulled and found right; membership only

    def _unit(self, worker: int, step: int) -> tuple[int, float]:
        column, place = divmod(worker * self.steps + step - 1, UNITS_PER_COLUMN)
        return column, float(1 << 2 * place)

    def gradients(self, worker: int, step: int, rows: F32) -> F32:
        plan = self.plans[worker, step]
        grads = np.zeros(plan.floats, np.float32)
        column, value = self._unit(worker, step)
        for place in plan.where.values():
            grads[place.start + column] = -value  # w -= g
        return grads

    def contents(self, key: Key, weights: F32) -> dict[tuple[int, int], int]:
        """How often each push is in the row; raises ValueError if the row is no sum of pushes."""
        dim = self.job.tables[key[0]].dim
        change = weights[:dim].astype(np.float64) - self.base[key][:dim]
        found = {}
        for w in range(self.job.workers):
            for step in range(1, self.steps + 1):
                column, value = self._unit(w, step)
                count = int(change[column] // value) % 4
                if count:
                    found[w, step] = count
                    change[column] -= count * value
        if change.any():
            raise ValueError(f"{weights[:dim].tolist()} is no sum of pushes")
        return found

    def pull_problem(self, step: int, key: Key, weights: F32) -> str | None:
        pulled = key, weights.tobytes()
        if pulled in self._sound:
            return None
        try:
            found = self.contents(key, weights)
        except ValueError as error:
            return str(error)
        units = self.units[key]
        for unit, count in found.items():
            if count != 1 or unit not in units:
                return f"contains push {unit} {count} times: {self.describe(key, weights)}"
        self._sound.add(pulled)
        return None

    def dump_problem(self, key: Key, record: F32, *, worker: int, durable: int) -> str | None:
        if problem := self.pull_problem(0, key, record):
            return problem
        found = self.contents(key, record)
        mine = [(worker, step) for step in range(1, durable + 1)]
        missing = [unit for unit in self.units[key] if unit in mine and unit not in found]
        return f"lacks the pushes {missing} of its own: {self.describe(key, record)}" if missing else None

    def record(self, key: Key, marks: Sequence[int]) -> F32:
        return self.record_without(key, marks, 0)

    def record_without(self, key: Key, marks: Sequence[int], lost: int) -> F32:
        """The row with the pushes up to these marks, but for those that are lost: a bit for each of `units`."""
        pushes = self.find_pushes(key, marks) & ~lost
        known = self._expected.get((key, pushes))
        if known is None:
            known = self.base[key].copy()
            for index, (w, step) in enumerate(self.units[key]):
                if pushes >> index & 1:
                    column, value = self._unit(w, step)
                    known[column] += np.float32(value)
            self._expected[key, pushes] = known
        return known

    def describe(self, key: Key, record: F32) -> str:
        try:
            found = self.contents(key, record)
        except ValueError as error:
            return str(error)
        pushes = [f"W{w}.{step}" + (f"x{count}" if count > 1 else "") for (w, step), count in sorted(found.items())]
        return "{" + " ".join(pushes) + "}"


class OrderedReference(Reference):
    """Asynchronous, any optimizer: each row has one worker, so its pushes come in one order."""

    def __init__(
        self, job: JobSpec, *, steps: int, rows_seed: int, assigned: bool, changes_rates: bool = False
    ) -> None:
        super().__init__(job, steps=steps, rows_seed=rows_seed, assigned=assigned, changes_rates=changes_rates)
        self.rows_seed = rows_seed
        self._states: dict[Key, list[F32]] = {}  # of each row: after none, one, two .. of the pushes that have it
        for key, units in self.units.items():
            record = self.base[key].copy()
            self._states[key] = [record.copy()]
            for w, step in sorted(units):
                rule = _make_rule(job, key[0], self.rates[w, step])
                twins.update_record(record, self._gradient(w, step, key), rule=rule, step=step)
                self._states[key].append(record.copy())

    def _choose_rows(self, wanted: list[list[int]], worker: int) -> list[list[int]]:
        return [[row for row in rows if row % self.job.workers == worker] for rows in wanted]

    def _gradient(self, worker: int, step: int, key: Key) -> F32:
        rng = random.Random(f"grad {self.rows_seed} {worker} {step} {key}")
        dim = self.job.tables[key[0]].dim
        return np.array([rng.uniform(-1, 1) * 10.0 ** rng.randint(-4, 2) for _ in range(dim)], np.float32)

    def gradients(self, worker: int, step: int, rows: F32) -> F32:
        plan = self.plans[worker, step]
        grads = np.empty(plan.floats, np.float32)
        for key, place in plan.where.items():
            grads[place] = self._gradient(worker, step, key)
        return grads

    def pull_problem(self, step: int, key: Key, weights: F32) -> str | None:
        if any(state[: weights.size].tobytes() == weights.tobytes() for state in self._states[key]):
            return None
        return f"is {self.describe(key, weights)}, after none of its pushes"

    def record(self, key: Key, marks: Sequence[int]) -> F32:
        return self._states[key][sum(step <= marks[w] for w, step in self.units[key])]

    def describe(self, key: Key, record: F32) -> str:
        dim = self.job.tables[key[0]].dim
        weights = record[:dim].tobytes()
        counts = [n for n, state in enumerate(self._states[key]) if state[:dim].tobytes() == weights]
        return f"as after {counts} of its pushes" if counts else f"unknown {record[:2].tolist()}.."


class SyncReference(Reference):
    def __init__(
        self, job: JobSpec, *, steps: int, rows_seed: int, assigned: bool, changes_rates: bool = False
    ) -> None:
        super().__init__(job, steps=steps, rows_seed=rows_seed, assigned=assigned, changes_rates=changes_rates)
        self.rows_seed = rows_seed
        self._noise: dict[tuple[int, int, Key], F32] = {}
        records = {key: record.copy() for key, record in self.base.items()}
        self.states = [dict(self.base)]  # records that did not change are shared between states
        for step in range(1, steps + 1):
            rules = [_make_rule(job, t, self.rates[0, step]) for t in range(len(job.tables))]
            sums: dict[Key, F32] = {}
            for w in range(job.workers):
                for t, rows in enumerate(self.wanted[w, step]):
                    for row in rows:
                        weights = records[t, row][: job.tables[t].dim]
                        grad = self._gradient(w, step, (t, row), weights)
                        sums[t, row] = sums[t, row] + grad if (t, row) in sums else grad
            state = dict(self.states[-1])
            for (t, row), grad in sums.items():
                twins.update_record(records[t, row], grad, rule=rules[t], step=step)
                state[t, row] = records[t, row].copy()
            self.states.append(state)
        for batch, plan in self.plans.items():
            for key in plan.where:
                self._gradient(*batch, key, self.initial[key][: job.tables[key[0]].dim])  # fills in the noise

    def _gradient(self, worker: int, step: int, key: Key, weights: F32) -> F32:
        noise = self._noise.get((worker, step, key))
        if noise is None:
            rng = random.Random(f"grad {self.rows_seed} {worker} {step} {key}")
            numbers = [rng.uniform(-1, 1) * 10.0 ** rng.randint(-4, 2) for _ in range(len(weights))]
            noise = self._noise[worker, step, key] = np.array(numbers, np.float32)
        grad: F32 = noise + np.float32(0.25) * weights
        return grad

    def gradients(self, worker: int, step: int, rows: F32) -> F32:
        plan = self.plans[worker, step]
        grads = np.empty(plan.floats, np.float32)
        for key, place in plan.where.items():
            grads[place] = self._gradient(worker, step, key, rows[place])
        return grads

    def pull_problem(self, step: int, key: Key, weights: F32) -> str | None:
        expected = self.states[step - 1][key][: weights.size]
        if weights.tobytes() == expected.tobytes():
            return None
        return f"is {self.describe(key, weights)}, not that after step {step - 1}"

    def record(self, key: Key, marks: Sequence[int]) -> F32:
        return self.states[marks[0]][key]

    def describe(self, key: Key, record: F32) -> str:
        dim = self.job.tables[key[0]].dim
        weights = record[:dim].tobytes()
        steps = [s for s, state in enumerate(self.states) if state[key][:dim].tobytes() == weights]
        return f"as after step {steps}" if steps else f"unknown {record[:2].tolist()}.."


@functools.lru_cache(maxsize=64)
def make_reference(
    job: JobSpec, *, steps: int, rows_seed: int, assigned: bool, changes_rates: bool = False
) -> Reference:
    sums = all(table.optimizer.kind == "sgd" and table.optimizer.learning_rate == 1.0 for table in job.tables)
    kind: type[Reference] = SyncReference
    if job.mode == "async":
        kind = AsyncReference if sums else OrderedReference
    if job.protection.saves_own:
        kind = AsyncReference  # with lost updates in them, rows are told by what they contain
    return kind(job, steps=steps, rows_seed=rows_seed, assigned=assigned, changes_rates=changes_rates)


def _choose_rates(job: JobSpec, *, rows_seed: int, worker: int, step: int) -> tuple[float, ...]:
    """Of one push. Synchronously those of all workers are applied together."""
    rng = random.Random(f"rates {rows_seed} {0 if job.mode == 'sync' else worker} {step}")
    return () if rng.random() < 0.2 else tuple(rng.choice((0.0, 0.01, 0.3, rng.random())) for _ in job.tables)


def _make_rule(job: JobSpec, table: int, rates: Sequence[float]) -> twins.Rule:
    of = job.tables[table].optimizer
    return twins.Rule(
        optimizer=of.kind,
        learning_rate=rates[table] if rates else of.learning_rate,
        eps=of.eps,
        beta1=of.beta1,
        beta2=of.beta2,
        momentum=of.momentum,
        weight_decay=of.weight_decay,
    )


def _initial(job: JobSpec) -> dict[Key, F32]:
    records: dict[Key, F32] = {}
    for t, spec in enumerate(job.tables):
        size = twins.record_floats(spec.optimizer.kind, spec.dim)
        values = twins.initial_rows(range(spec.rows), dim=spec.dim, seed=job.seed, table=t, bound=spec.init_bound)
        for row in range(spec.rows):
            record = np.zeros(size, np.float32)
            record[: spec.dim] = values[row]
            record.flags.writeable = False
            records[t, row] = record
    return records


def _rows_wanted(job: JobSpec, *, rows_seed: int, worker: int, step: int) -> list[list[int]]:
    """Distinct rows per table, mostly the hot ones that all workers want, sometimes none."""
    rng = random.Random(f"rows {rows_seed} {worker} {step}")
    wanted = []
    for spec in job.tables:
        reach = min(spec.rows, rng.choice((4, 10, 60)))
        wanted.append(rng.sample(range(reach), rng.randint(0, min(reach, 6))))
    return wanted
