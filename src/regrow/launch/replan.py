"""Partial recovery while a run goes on: what saves and failures have shown is given to the planner, and servers are
told when it has changed its mind. No decision is made here."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from regrow.config import TrainConfig
from regrow.launch.orders import SaveEvery
from regrow.launch.partial import PartialPlan, Planner
from regrow.launch.status import RunStatus

LOOK_SECONDS = 5.0  # between two looks. Too short: it looks for nothing. Too long: an old interval for so long.


class Replanner:
    """Of one run."""

    def __init__(self, planner: Planner, planned: PartialPlan, status: RunStatus) -> None:
        self.planned = planned
        self.changes: list[str] = []  # why it was planned again
        self._planner = planner
        self._status = status
        self._look_at = 0.0
        self._checkpoint_at = 0.0
        self._failures_seen = 0
        status.plan_reason, status.pls_planned = planned.reason, planned.pls

    @property
    def partial(self) -> PartialPlan | None:
        """The plan, if it is partial recovery that was chosen."""
        return None if self.planned.own is None else self.planned

    @property
    def full(self) -> TrainConfig | None:
        """The run with full recovery, if that has become the cheaper way: the next loss takes everybody back."""
        return self.planned.full

    def is_checkpoint_due(self, now: float) -> bool:
        """Whether all servers shall make a checkpoint, as often as full recovery wants, while there are saves still."""
        full = self.planned.full
        if full is None or self._status.phase != "training" or now < self._checkpoint_at:
            return False
        self._checkpoint_at = now + (full.interval.seconds or 0.0)
        return True

    def change_over(self) -> TrainConfig:
        """Everybody goes back: from here on it is full recovery, and there are no saves of single servers."""
        full = self.planned.full
        assert full is not None
        self.planned = replace(self.planned, config=full, own=None, full=None, pls=None)
        return full

    def describe(self) -> dict[str, Any]:
        """For the summary."""
        return {**self.planned.numbers, "reason": self.planned.reason, "changes": self.changes}

    def look(self, now: float) -> SaveEvery | None:
        """What to tell all servers, if anything."""
        status = self._status
        if now < self._look_at or status.phase != "training" or status.losses is None or self.planned.own is None:
            return None
        self._look_at = now + LOOK_SECONDS
        if self._planner.lacks_sizes and all(server.state == "ready" for server in status.servers):
            self._planner.note_tables(sum(server.bytes for server in status.servers))
        for seconds in status.losses.take_save_seconds():
            self._planner.note_saved(seconds)
        deaths = [failure for failure in status.failures.all if failure.role == "server" and failure.settled]
        for failure in deaths[self._failures_seen :]:
            recovered, replaced = failure.since(failure.recovered_at), failure.since(failure.replaced_at)
            if recovered is not None and replaced is not None:
                self._planner.note_recovered(
                    load_seconds=max(0.0, recovered - replaced), reschedule_seconds=max(0.0, replaced)
                )
        self._failures_seen = len(deaths)
        # Where parities come first, only what they did not bring back counts, and several servers are one such failure.
        together = self._planner.killed_together_min
        costly = deaths if together == 1 else [failure for failure in deaths if failure.loss is not None]
        found = self._planner.look(
            failures=-(-len(costly) // together),
            elapsed_seconds=now - status.phase_at,
            work_seconds=status.estimate_seconds(now),
        )
        if found is None:
            return None
        self.planned, why = found
        self.changes = [*self.changes, why][-100:]
        status.plan_reason, status.pls_planned = f"{self.planned.reason}: {why}", self.planned.pls
        assert self.planned.own is not None and self.planned.own.every_seconds is not None
        return SaveEvery(seconds=self.planned.own.every_seconds)
