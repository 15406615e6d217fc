"""Goal: what is said of a thousand nodes is what the formulas say. Method: both laws by hand and against each other,
and the shape of the two curves.
"""

from __future__ import annotations

import itertools

import pytest

from regrow.planner.overhead import Costs
from regrow.planner.scale import LAWS, Size, fail_seconds_independent, fail_seconds_linear, plan_sizes

HOUR = 3600.0
NODES = [1, 2, 5, 10, 20, 50, 100, 200, 500, 1000]
YEAR = 8766 * HOUR


def sizes(law: str, *, target_pls: float = 0.1, node_seconds: float = 0.25 * YEAR) -> list[Size]:
    return plan_sizes(
        NODES,
        law=law,
        node_seconds=node_seconds,
        target_pls=target_pls,
        work_seconds=5000 * HOUR,
        costs=Costs(save_seconds=0.1 * HOUR),
    )


def test_laws_by_hand() -> None:
    assert fail_seconds_linear(8, node_seconds=80.0) == 10.0
    assert fail_seconds_independent(1, node_seconds=80.0, unit_seconds=40.0) == pytest.approx(80.0)
    assert fail_seconds_independent(2, node_seconds=80.0, unit_seconds=40.0) == pytest.approx(40.0 / 0.75)
    assert fail_seconds_independent(9, node_seconds=40.0, unit_seconds=40.0) == 40.0


@pytest.mark.parametrize("nodes", NODES)
def test_the_laws_agree_while_nodes_do_not_fail_together(nodes: int) -> None:
    linear, independent = (LAWS[law](nodes, node_seconds=1e6 * HOUR) for law in ("linear", "independent"))
    assert independent == pytest.approx(linear, rel=0.001)
    assert independent >= linear * (1 - 1e-9)
    assert fail_seconds_independent(nodes, node_seconds=10 * HOUR) >= HOUR, "several at once count as one"


def test_full_recovery_grows_and_partial_recovery_does_not() -> None:
    found = sizes("linear")
    assert [size.nodes for size in found] == NODES
    full = [size.plan.full.overhead.share for size in found]
    partial = [size.plan.partial.overhead.share for size in found]
    assert all(size.plan.decision == "partial" for size in found)
    assert full[-1] / full[0] == pytest.approx(1000**0.5, rel=0.01)
    assert partial == pytest.approx([partial[0]] * len(NODES))
    assert all(more > less for less, more in itertools.pairwise(full))


def test_partial_recovery_gains_where_failures_come_together() -> None:
    """By the other law the time between failures shrinks less, and N F grows: saves become rarer still."""
    found = sizes("independent", node_seconds=100 * HOUR)
    partial = [size.plan.partial.overhead.share for size in found]
    assert all(more <= less * (1 + 1e-9) for less, more in itertools.pairwise(partial))
    assert partial[-1] < partial[0] / 5
    assert all(size.fail_seconds >= HOUR for size in found)


def test_a_small_pls_makes_full_recovery_the_cheaper_one_for_small_jobs() -> None:
    decisions = [size.plan.decision for size in sizes("linear", target_pls=0.001)]
    assert decisions == sorted(decisions)  # first full, then partial
    assert set(decisions) == {"full", "partial"}
