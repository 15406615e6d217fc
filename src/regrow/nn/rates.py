"""Learning rates that change: set between loops, or by a schedule that says the rate of every step.

Servers run the optimizers, so a rate travels with the push that it is for. The rule to keep: the rate of a step follows
from its number, or from what a script does between its loops, and from nothing else. A script that takes a dead
worker's place runs from the top and passes over what is done; a rate that was set in the middle of a loop would be
forgotten there without a word, and synchronously servers refuse workers that differ. So within a loop only a schedule
changes rates. Schedulers of torch count their own steps; they are made to count those that were passed over, too.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

import torch

from regrow.core.job import NUMBER_MAX, JobSpec
from regrow.errors import UserError

Schedule = Callable[[int], float | Mapping[str, float]]


class Scheduler(Protocol):
    """One of torch.optim.lr_scheduler."""

    optimizer: Any

    def step(self) -> None: ...


class RateOptimizer(torch.optim.Optimizer):
    """What torch's schedulers take for an optimizer: a group with a learning rate for each table. It has no parameters
    and changes nothing; the servers do."""

    def __init__(self, rates: Mapping[str, float]) -> None:
        groups = [{"params": [torch.zeros(0)], "lr": rate, "name": name} for name, rate in rates.items()]
        super().__init__(groups, {"lr": 0.0})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Nothing: `job.step` pushes, and the servers update."""

    def list_rates(self) -> dict[str, float]:
        return {group["name"]: float(group["lr"]) for group in self.param_groups}


class Rates:
    """Those of one job, by the names of its tables; dense parameters are `dense`."""

    def __init__(self) -> None:
        self._rates: dict[str, float] = {}
        self._optimizer: RateOptimizer | None = None
        self._schedules: list[Schedule] = []
        self._schedulers: list[Scheduler] = []
        self._steps = 0  # that the schedulers have counted
        self._frozen: dict[str, float] | None = None  # within a loop: those that it began with

    def add(self, name: str, rate: float) -> None:
        self._rates[name] = rate
        if self._optimizer is not None:
            self._optimizer.add_param_group({"params": [torch.zeros(0)], "lr": rate, "name": name})

    @property
    def optimizer(self) -> RateOptimizer:
        if self._optimizer is None:
            if not self._rates:
                raise UserError("there is no table yet", hint="make the collections and call job.dense first")
            self._optimizer = RateOptimizer(self._rates)
        return self._optimizer

    def set(self, rate: float, names: tuple[str, ...] | None = None) -> None:
        if self._frozen is not None:
            raise UserError(
                "a learning rate is set within a loop; a worker that takes this one's place would not know of it",
                hint="job.schedule(lambda step: ...) for a rate of each step; between two loops it may be set",
            )
        check_rate(rate)
        for name in self._rates if names is None else names:
            self._check_name(name)
            self._rates[name] = float(rate)
            for group in [] if self._optimizer is None else self._optimizer.param_groups:
                if group["name"] == name:
                    group["lr"] = float(rate)

    def schedule(self, schedule: Schedule | Scheduler) -> None:
        if isinstance(schedule, torch.optim.lr_scheduler.ReduceLROnPlateau):
            raise UserError(
                "ReduceLROnPlateau depends on more than the step",
                hint="make it with job.optimizer, and call its step(loss) between two loops",
            )
        optimizer = getattr(schedule, "optimizer", None)
        if optimizer is not None:
            if optimizer is not self._optimizer:
                raise UserError("the scheduler is of another optimizer", hint="make it with job.optimizer")
            self._schedulers.append(schedule)  # type: ignore[arg-type]
        elif callable(schedule):
            self._schedules.append(schedule)
        else:
            raise UserError(
                f"a schedule is a function of the step, or one of torch.optim.lr_scheduler; not {schedule!r}"
            )

    def begin_loop(self) -> None:
        self._frozen = self._list_own()

    def end_loop(self) -> None:
        self._frozen = None

    def find(self, step: int, spec: JobSpec) -> tuple[float, ...]:
        """What a push of this step carries: the rate of every table, or nothing if all are as declared."""
        self._count_to(step - 1)
        rates = self._list_own()
        if self._optimizer is not None:
            self._optimizer.step()  # torch warns of schedulers that are stepped before it
        if not self._schedulers and self._frozen is not None and rates != self._frozen:
            raise UserError(
                "the learning rates changed within a loop; a worker that takes this one's place would not know of it",
                hint="job.schedule(scheduler), which then counts the steps, and no scheduler.step() in the loop",
            )
        for schedule in self._schedules:
            said = schedule(step)
            if not isinstance(said, Mapping):
                said = {name: rate * float(said) for name, rate in rates.items()}
            for name, rate in said.items():
                self._check_name(name)
                rates[name] = float(rate)
        for name, rate in rates.items():
            check_rate(rate, f"in step {step} of table {name!r}")
        declared = tuple(table.optimizer.learning_rate for table in spec.tables)
        found = tuple(rates.get(table.name, table.optimizer.learning_rate) for table in spec.tables)
        return () if found == declared else found

    def _count_to(self, steps: int) -> None:
        while self._schedulers and self._steps < steps:
            self.optimizer.step()
            for scheduler in self._schedulers:
                scheduler.step()
            self._steps += 1

    def _list_own(self) -> dict[str, float]:
        return dict(self._rates) if self._optimizer is None else self._optimizer.list_rates()

    def _check_name(self, name: str) -> None:
        if name not in self._rates:
            raise UserError(
                f"there is no table {name!r} with a learning rate", hint=f"there is {', '.join(self._rates)}"
            )


class WithRates:
    """What a job lets its script say of learning rates."""

    def __init__(self) -> None:
        self._rates = Rates()

    @property
    def optimizer(self) -> RateOptimizer:
        """What torch's schedulers take for an optimizer: a group with a learning rate for each table."""
        return self._rates.optimizer

    def set_learning_rate(self, rate: float, table: str | None = None) -> None:
        """From the next loop on: of one table, of dense parameters (`"dense"`), or of everything."""
        self._rates.set(rate, None if table is None else (table,))

    def schedule(self, schedule: Schedule | Scheduler) -> None:
        """`schedule(step)`, from 1 on, gives a factor for all learning rates, or rates by table. Or one of
        torch.optim.lr_scheduler that was made with `job.optimizer`, and is then stepped here after every step."""
        self._rates.schedule(schedule)


def check_rate(rate: float, where: str = "") -> None:
    if not 0.0 <= float(rate) <= NUMBER_MAX:
        place = f" {where}" if where else ""
        raise UserError(f"the learning rate{place} is {rate}: it must be a finite number and not negative")
