"""What a simulated worker does: pull, compute, push, as a trainer over a real client would, one act at a time."""

from __future__ import annotations

from typing import Any

import numpy as np

from regrow.core.session import (
    AssignWanted,
    ExpectWanted,
    Failed,
    PullAnswered,
    PullWanted,
    PushDurable,
    PushWanted,
    ReadAnswered,
    ReadWanted,
    Session,
    SessionOpened,
    WriteAnswered,
    WriteWanted,
)
from regrow.sim.dumps import Dumps, Loading
from regrow.sim.profiles import Scenario
from regrow.sim.reference import F32, Reference

STEPS_EXPECTED = 3


class Program:
    """One incarnation of a worker. `act` returns the next wish for the session."""

    def __init__(
        self, index: int, scenario: Scenario, reference: Reference, *, start: int = 0, loading: Loading | None = None
    ) -> None:
        self.index = index
        self.start = start  # the step of the checkpoint that all begin with (sync)
        self.session = Session()
        self.opened = False
        self.failed = ""
        self.dumps = Dumps(index, reference, loading) if loading is not None else None
        self.assigned = reference.assigned is None or loading is not None
        self.asked = 0
        self.expected = 0  # the last step that servers were told of: on their way back, or with rows on disk
        self.pushed = 0
        self.durable = 0
        self.since = 0  # when it last acted
        self.rows: dict[int, F32] = {}
        self.answered: dict[int, None] = {}
        self._scenario = scenario
        self._reference = reference
        self._sync = scenario.job.mode == "sync"
        # In sync mode one more pull commits the last step.
        self._last_pull = scenario.steps + self._sync

    @property
    def done(self) -> bool:
        return self.is_trained and (self.dumps is None or self.dumps.done)

    @property
    def is_trained(self) -> bool:
        """All pushes are durable, and synchronously the last step is committed."""
        if not self.opened or self.durable < self._scenario.steps:
            return False
        return not self._sync or self._last_pull in self.answered

    @property
    def may_pull(self) -> bool:
        return self.asked < self._last_pull and self.asked < self.pushed + self._scenario.ahead

    @property
    def has_rows(self) -> bool:
        return self.pushed + 1 in self.answered and self.pushed < self._scenario.steps

    @property
    def window_full(self) -> bool:
        return self.pushed - self.durable >= self._scenario.window_pushes

    @property
    def may_expect(self) -> bool:
        """Every other worker looks ahead, so that some rows are asked for early and others when they are needed."""
        if self.index % 2:
            return False
        if self.session.reads_ahead:
            return self.expected < min(self.asked + 2, self._last_pull)
        return bool(self.session.recovering) and self.expected <= self.asked < self._last_pull

    @property
    def may_dump(self) -> bool:
        """At the end; asynchronously also while rows come back: then some of them have to be waited for."""
        early = not self._sync and bool(self.session.recovering)
        return self.dumps is not None and self.dumps.may_read and (self.is_trained or early)

    def can_act(self) -> bool:
        if self.opened and not self.assigned:
            return True
        if self.dumps is not None and self.opened and not self.failed:
            if not self.dumps.may_train:
                return self.dumps.may_write
            if self.may_dump:
                return True
        return self.opened and not self.failed and (self.may_pull or (self.has_rows and not self.window_full))

    def act(self) -> AssignWanted | ExpectWanted | PullWanted | PushWanted | ReadWanted | WriteWanted:
        """Pushes the batch whose rows are here, or asks for the next."""
        if self.dumps is not None and not self.dumps.may_train:
            return self.dumps.write()
        if self.dumps is not None and self.may_dump:
            return self.dumps.read(durable=self.durable)
        if not self.assigned:
            self.assigned = True
            assert self._reference.assigned is not None
            plan, weights = self._reference.assigned
            return AssignWanted(plan=plan, weights=weights)
        if self.has_rows and not self.window_full:
            self.pushed += 1
            plan = self._reference.plans[self.index, self.pushed]
            grads = self._reference.gradients(self.index, self.pushed, self.rows[self.pushed])
            rates = self._reference.rates[self.index, self.pushed]
            return PushWanted(seq=self.pushed, request=self.pushed, plan=plan, grads=grads, rates=rates)
        if self.may_expect:
            steps = range(self.asked + 1, min(self.asked + 1 + STEPS_EXPECTED, self._last_pull + 1))
            if self.session.reads_ahead:
                steps = range(min(self.asked + 2, self._last_pull), self._last_pull + 1)[:1]
            self.expected = steps[-1]
            return ExpectWanted(plans=tuple(self._reference.plans[self.index, step] for step in steps))
        self.asked += 1
        plan = self._reference.plans[self.index, self.asked]
        rows = self.rows[self.asked] = np.full(plan.floats, np.nan, np.float32)
        return PullWanted(request=self.asked, step=self.asked, plan=plan, rows=rows)

    def hear(self, effect: Any) -> str | None:
        """What the session says. Returns what is wrong with it, if anything."""
        if isinstance(effect, SessionOpened):
            if self.opened:
                return "the session opened twice"
            self.opened = True
            # A restarted worker goes on behind what is durable, or computes the last step again.
            self.durable = effect.durable
            again = effect.committed > self.start  # what was loaded is nowhere half done
            self.pushed = self.asked = effect.committed - again if self._sync else effect.durable
        elif isinstance(effect, PullAnswered):
            return self._on_pull_answered(effect.request)
        elif isinstance(effect, PushDurable):
            if effect.seq != self.durable + 1 and not self._sync:
                return f"push {effect.seq} is durable after {self.durable}"
            self.durable = max(effect.seq, self.durable)
        elif isinstance(effect, ReadAnswered | WriteAnswered):
            assert self.dumps is not None
            return self.dumps.hear(effect)
        elif isinstance(effect, Failed):
            self.failed = effect.reason
        return None

    def _on_pull_answered(self, step: int) -> str | None:
        self.answered[step] = None
        rows = self.rows[step]
        for key, place in self._reference.plans[self.index, step].where.items():
            if problem := self._reference.pull_problem(step, key, rows[place]):
                table, row = key
                return f"W{self.index} pulled row {row} of table {table} for step {step}: it {problem}"
        return None
