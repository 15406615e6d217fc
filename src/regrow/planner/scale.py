"""The same decision for more and more servers: how often jobs fail as they grow, and what that costs.

Two laws of how the time between failures shrinks with the number of nodes n, both with `node_seconds` for a single one:

    linear       F = node_seconds / n                           every node fails by itself, at any moment
    independent  F = unit / (1 - (1 - p)**n), p = unit / node_seconds       of those within a unit of time, one counts

The second bends away from the first where several nodes fail within one unit, and cannot fall below it. Full recovery
costs about sqrt(2 S / F), which grows with the square root of n. Partial recovery may wait T = 2 PLS N F, and with the
linear law N F is the same for every n: its saves cost the same for ten nodes and for a thousand. That is why the gap
between the two widens as jobs grow (figure 13 of CPR).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from regrow.planner.overhead import Costs
from regrow.planner.partial import Plan, Request, decide

UNIT_SECONDS = 3600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """A job on so many nodes."""

    nodes: int
    fail_seconds: float
    plan: Plan


def fail_seconds_linear(nodes: int, *, node_seconds: float) -> float:
    return node_seconds / nodes


def fail_seconds_independent(nodes: int, *, node_seconds: float, unit_seconds: float = UNIT_SECONDS) -> float:
    """`unit_seconds` is at most `node_seconds`: p is a probability."""
    p = unit_seconds / node_seconds
    assert 0.0 < p <= 1.0
    if p == 1.0:
        return unit_seconds
    # 1 - (1 - p)**n without the loss of digits that a small p brings.
    return unit_seconds / -math.expm1(nodes * math.log1p(-p))


LAWS: dict[str, Callable[..., float]] = {"linear": fail_seconds_linear, "independent": fail_seconds_independent}


def plan_sizes(
    nodes: Iterable[int],
    *,
    law: str,
    node_seconds: float,
    target_pls: float,
    work_seconds: float,
    costs: Costs,
    lost_together: int = 1,
) -> list[Size]:
    """The decision for each number of nodes."""
    sizes = []
    for count in nodes:
        fail_seconds = LAWS[law](count, node_seconds=node_seconds)
        request = Request(
            target_pls=target_pls,
            servers=count,
            lost_together=min(lost_together, count),
            work_seconds=work_seconds,
            fail_seconds=fail_seconds,
        )
        sizes.append(Size(nodes=count, fail_seconds=fail_seconds, plan=decide(request, costs=costs)))
    return sizes
