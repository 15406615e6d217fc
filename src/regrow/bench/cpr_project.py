"""From what one save, one load and one rescheduling take to what a job of 56 hours loses: by the planner's formulas,
and by playing jobs with random failures, so that a decision of the planner can be held against what happens. Pure:
chance enters as a generator.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from regrow.planner import scale
from regrow.planner.overhead import Costs, interval_full
from regrow.planner.partial import Request, Way, decide, plan_full, plan_partial

HOUR = 3600.0
WORK_SECONDS, FAIL_SECONDS = 56 * HOUR, 28 * HOUR
PARTS = (2, 4, 8)
PLS, PLS_OTHERS = 0.1, (0.02, 0.2)
PUBLISHED = Costs(save_seconds=0.10 * HOUR)  # our reading; docs/partial-recovery.md says why
PUBLISHED_SHARES = {"full": 0.085, "naive": 0.044, "0.02": 0.029, "0.1": 0.0053, "0.2": 0.003}
PRIORITIES = ("scar", "mfu", "ssu")

# Figure 10: failures of a job, and the part of the servers that each takes.
GRID_FAILURES, GRID_PORTIONS, GRID_PLS, GRID_SERVERS = (2, 20, 40), (0.125, 0.25, 0.5), 0.02, 8
NODES = (10, 20, 50, 100, 200, 500, 1000)
NODE_SECONDS = 28 * HOUR * 18  # so that 18 nodes, as published, have a failure every 28 h


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """Costs of each way back: full recovery, and partial recovery by priority, per interval T: a priority's saves of a
    share of the rows are as many more, and count together."""

    full: Costs
    partial: Mapping[str, Costs]


def make_request(parts: float, *, target_pls: float, fail_seconds: float = FAIL_SECONDS) -> Request:
    lost = 1 if parts == int(parts) else 2
    return Request(
        target_pls=target_pls,
        servers=round(parts * lost),
        lost_together=lost,
        work_seconds=WORK_SECONDS,
        fail_seconds=fail_seconds,
    )


def average(ways: Sequence[Way]) -> dict[str, Any]:
    """Shares of all time, the mean over all numbers of parts."""
    told = [way.overhead.to_dict() for way in ways]
    overhead = {name: statistics.fmean(each[name] for each in told) for name in told[0]}
    hours = [way.interval_seconds / HOUR for way in ways]
    return {"overhead": overhead, "interval_hours": hours, "pls": statistics.fmean(way.pls for way in ways)}


def project(measured: Measured, *, constants: str) -> list[dict[str, Any]]:
    """The bars of figure 7, and of figure 9."""
    requests = [make_request(parts, target_pls=PLS) for parts in PARTS]
    t_full = interval_full(costs=measured.full, fail_seconds=FAIL_SECONDS)
    plain = measured.partial["none"]
    found = {
        "full": ("full", [plan_full(request, costs=measured.full) for request in requests]),
        "naive": (
            "partial, T of full",
            [plan_partial(each, costs=plain, interval_seconds=t_full) for each in requests],
        ),
        "0.1": (f"partial, PLS {PLS:g}", [plan_partial(request, costs=plain) for request in requests]),
    }
    for name in PRIORITIES:
        costs = measured.partial.get(name, plain)
        found[name] = (f"{name.upper()}, PLS {PLS:g}", [plan_partial(request, costs=costs) for request in requests])
    for pls in PLS_OTHERS:
        ways = [plan_partial(make_request(parts, target_pls=pls), costs=plain) for parts in PARTS]
        found[f"{pls:g}"] = (f"partial, PLS {pls:g}", ways)
    return [
        {
            "kind": "projected",
            "constants": constants,
            "name": name,
            "label": label,
            "published": PUBLISHED_SHARES.get(name),
            "shown": name not in ("0.02", "0.2"),
            **average(ways),
        }
        for name, (label, ways) in found.items()
    ]


# -- figure 10 -----------------------------------------------------------------------------------------------


def play_job(random: np.random.Generator, *, interval: float, fail: float, costs: Costs, full: bool) -> float:
    """All seconds of one job with failures at any time, also during saves and loads. A save every interval, from begin
    to begin, as in the formulas. Full recovery goes back to the last save that has ended, and counts from there."""
    now = done = saved = 0.0
    save_at, fail_at = interval, random.exponential(fail)
    while True:
        next_at = max(now, min(save_at, fail_at))
        if done + next_at - now >= WORK_SECONDS:
            return now + WORK_SECONDS - done
        now, done = next_at, done + next_at - now
        save_ends = now + costs.save_seconds
        if fail_at > now and not (full and fail_at < save_ends):
            now, saved, save_at = save_ends, done, max(save_ends, now + interval)
            continue
        now = max(now, fail_at) + costs.load_seconds + costs.reschedule_seconds
        fail_at += random.exponential(fail)
        if full:
            done, save_at = saved, now + interval


def play(interval: float, *, fail: float, costs: Costs, full: bool, jobs: int, seed: int) -> tuple[float, float]:
    """(overhead as a share of all time, its standard error) over many jobs."""
    random = np.random.default_rng(seed)
    shares = [
        1.0 - WORK_SECONDS / play_job(random, interval=interval, fail=fail, costs=costs, full=full) for _ in range(jobs)
    ]
    return statistics.fmean(shares), statistics.stdev(shares) / jobs**0.5


def play_grid(measured: Measured, *, constants: str, jobs: int, seed: int = 1) -> list[dict[str, Any]]:
    """Each cell of figure 10: what the planner decides, and what was cheaper when played."""
    rows = []
    for failures in GRID_FAILURES:
        for portion in GRID_PORTIONS:
            fail = WORK_SECONDS / failures
            request = Request(
                target_pls=GRID_PLS,
                servers=GRID_SERVERS,
                lost_together=round(portion * GRID_SERVERS),
                work_seconds=WORK_SECONDS,
                fail_seconds=fail,
            )
            costs = measured.partial["none"]
            plan = decide(request, costs=costs, costs_full=measured.full)
            chance: dict[str, int] = {"jobs": jobs, "seed": seed}
            full, full_error = play(plan.full.interval_seconds, fail=fail, costs=measured.full, full=True, **chance)
            partial, partial_error = play(plan.partial.interval_seconds, fail=fail, costs=costs, full=False, **chance)
            # A PLS that no interval can keep leaves nothing to choose.
            possible = plan.allowed_seconds >= costs.interval_seconds_min
            rows.append(
                {
                    "kind": "grid",
                    "constants": constants,
                    "failures": failures,
                    "portion": portion,
                    "decision": plan.decision,
                    "cheaper": "partial" if possible and partial < full else "full",
                    "full": full,
                    "full_error": full_error,
                    "full_formula": plan.full.overhead.share,
                    "partial": partial,
                    "partial_error": partial_error,
                    "partial_formula": plan.partial.overhead.share,
                }
            )
    return rows


def find_agreement(rows: Sequence[Mapping[str, Any]]) -> float:
    """The share of cells in which the decision is what was cheaper."""
    return sum(bool(row["decision"] == row["cheaper"]) for row in rows) / len(rows)


# -- figure 13 -----------------------------------------------------------------------------------------------


def scale_up(measured: Measured, *, constants: str) -> list[dict[str, Any]]:
    """Overheads by number of nodes, for both laws of how often they fail."""
    rows = []
    for law in scale.LAWS:
        sizes = scale.plan_sizes(
            NODES,
            law=law,
            node_seconds=NODE_SECONDS,
            target_pls=PLS,
            work_seconds=WORK_SECONDS,
            costs=measured.partial["none"],
        )
        for size in sizes:
            full = plan_full(
                make_request(size.nodes, target_pls=PLS, fail_seconds=size.fail_seconds), costs=measured.full
            )
            rows.append(
                {
                    "kind": "scale",
                    "constants": constants,
                    "law": law,
                    "nodes": size.nodes,
                    "fail_hours": size.fail_seconds / HOUR,
                    "full": full.overhead.share,
                    "partial": size.plan.partial.overhead.share,
                }
            )
    return rows
