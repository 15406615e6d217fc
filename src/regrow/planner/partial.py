"""Partial or full recovery, and how often to save: the decision, its numbers, and the sentence that says why.

Full recovery is taken at its best, T = sqrt(2 S F), and partial recovery at what the user's PLS allows, T = 2 PLS N F;
the one that costs less of all time wins. With equal costs that is partial recovery exactly if its T is more than half
the other one's: (2) is less than (1) where S / T < sqrt(2 S / F). A small PLS, few servers or many failures can thus
make it the dearer one, and a user who asks for such a PLS is better off without any loss.

An interval is never longer than the job with one save, H + S: 2 PLS N F may be 90 hours where a job takes 56, and then
one save is made, at the end, and the loss to expect is less than was allowed. Nor is it shorter than a save takes. The
formulas are in overhead.py.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from regrow.planner.overhead import (
    Costs,
    Overhead,
    expect_lost,
    expect_pls,
    interval_full,
    interval_partial,
    overhead_full,
    overhead_partial,
)
from regrow.units import brief_text, percent_text

NEVER = "the job never ends"


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What is asked for, and on what."""

    target_pls: float
    servers: int
    lost_together: int = 1
    work_seconds: float  # of the whole job, without overheads
    fail_seconds: float
    fail_reason: str = ""  # where that number comes from, if it was not given

    def __post_init__(self) -> None:
        assert 0.0 < self.target_pls <= 1.0
        assert 1 <= self.lost_together <= self.servers
        assert min(self.work_seconds, self.fail_seconds) > 0.0

    @property
    def parts(self) -> float:
        """N"""
        return self.servers / self.lost_together


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """One of the two ways back: how often it saves, what it costs, what it loses."""

    interval_seconds: float
    overhead: Overhead
    all_seconds: float  # how long the job takes with it; infinity: it never ends
    pls: float  # to be expected
    lost: float  # the share of updates that will really be gone

    @property
    def cost_text(self) -> str:
        return percent_text(self.overhead.share) if self.overhead.ends else f"everything: {NEVER}"

    def to_dict(self) -> dict[str, Any]:
        """For JSON, which has no infinity."""
        ends = self.overhead.ends
        return {
            "interval_seconds": self.interval_seconds,
            "overhead": self.overhead.to_dict(),
            "all_seconds": self.all_seconds if ends else None,
            "pls": self.pls,
            "lost": self.lost,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """`decision` is "partial" or "full", and `chosen` that way. `allowed_seconds` is the interval that the PLS would
    allow, were the job long enough and saves instantaneous."""

    decision: str
    full: Way
    partial: Way
    allowed_seconds: float
    reason: str

    @property
    def chosen(self) -> Way:
        return self.partial if self.decision == "partial" else self.full

    def to_dict(self) -> dict[str, Any]:
        return {
            "decision": self.decision,
            "interval_seconds": self.chosen.interval_seconds,
            "allowed_seconds": self.allowed_seconds,
            "full": self.full.to_dict(),
            "partial": self.partial.to_dict(),
            "reason": self.reason,
        }


def decide(request: Request, *, costs: Costs, costs_full: Costs | None = None) -> Plan:
    """The cheaper way back for these costs. `costs_full`: those of full recovery, where they differ: everybody is
    loaded and rescheduled then, and not only who died."""
    full = plan_full(request, costs=costs_full or costs)
    partial = plan_partial(request, costs=costs)
    allowed = interval_partial(request.target_pls, parts=request.parts, fail_seconds=request.fail_seconds)
    possible = allowed >= costs.interval_seconds_min
    wins = possible and partial.overhead.share < full.overhead.share
    plan = Plan(decision="partial" if wins else "full", full=full, partial=partial, allowed_seconds=allowed, reason="")
    return dataclasses.replace(plan, reason=_explain(plan, request, costs=costs))


def plan_full(request: Request, *, costs: Costs) -> Way:
    """Everybody goes back: nothing is lost for good."""
    longest = request.work_seconds + costs.save_seconds
    interval = min(interval_full(costs=costs, fail_seconds=request.fail_seconds), longest)
    overhead = overhead_full(interval, costs=costs, fail_seconds=request.fail_seconds)
    all_seconds = overhead.all_seconds(request.work_seconds)
    return Way(interval_seconds=interval, overhead=overhead, all_seconds=all_seconds, pls=0.0, lost=0.0)


def plan_partial(request: Request, *, costs: Costs, interval_seconds: float | None = None) -> Way:
    """Only the dead go back. `interval_seconds`: one that is not to be computed; naive partial recovery keeps that of
    full recovery."""
    fail, parts = request.fail_seconds, request.parts
    interval = interval_seconds or interval_partial(request.target_pls, parts=parts, fail_seconds=fail)
    interval = min(max(interval, costs.interval_seconds_min), request.work_seconds + costs.save_seconds)
    overhead = overhead_partial(interval, costs=costs, fail_seconds=fail)
    all_seconds = overhead.all_seconds(request.work_seconds)
    return Way(
        interval_seconds=interval,
        overhead=overhead,
        all_seconds=all_seconds,
        pls=expect_pls(interval, all_seconds=all_seconds, fail_seconds=fail, parts=parts),
        lost=expect_lost(interval, all_seconds=all_seconds, fail_seconds=fail, parts=parts),
    )


def _explain(plan: Plan, request: Request, *, costs: Costs) -> str:
    """The sentence: what is done, from which numbers, and what the other way would cost."""
    servers = f"{request.servers} server{'s' if request.servers > 1 else ''}"
    together = f", {request.lost_together} lost together" if request.lost_together > 1 else ""
    source = f", {request.fail_reason}" if request.fail_reason else ""
    fails = f"a failure every {brief_text(request.fail_seconds)}{source}"
    numbers = f"(PLS {request.target_pls:g}, {servers}{together}, {fails})"
    if not plan.chosen.overhead.ends:
        return f"{NEVER} {numbers}: overheads grow faster than time passes; make saves and loads cheaper"
    every, allowed = brief_text(plan.chosen.interval_seconds), brief_text(plan.allowed_seconds)
    this = plan.chosen.cost_text
    if plan.decision == "partial":
        if plan.allowed_seconds > plan.partial.interval_seconds:
            every += f", which is the whole job; {allowed} would be allowed"
        return f"partial: every {every} {numbers}; full recovery would cost {plan.full.cost_text}, this {this}"
    if plan.allowed_seconds < costs.interval_seconds_min:
        takes = brief_text(costs.interval_seconds_min)
        why = f"partial recovery would have to save every {allowed}, and a save takes {takes}"
    else:
        why = f"partial recovery would save every {allowed} and cost {plan.partial.cost_text}"
    return f"full: every {every} {numbers}; {why}; this costs {this} and loses nothing"
