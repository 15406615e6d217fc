"""`regrow bench publish`: which pairs count, and what they say of a publication every 30 s.

Method: pairs with known figures. The runs themselves are the command's.
"""

from __future__ import annotations

import pytest

from regrow.bench import publish

QUIET, DISTURBED = 0.02, 0.9


def pair(speed: float, *, others: float = QUIET, work: float = 1.0) -> dict[bool, dict[str, float]]:
    """A run that publishes has this speed, of the one beside it, and so much work of its workers per sample."""
    plain = {"samples_per_second": 1000.0, "worker_seconds_per_sample": 1e-3, "cpu_seconds_per_1000_samples": 2.0}
    publishing = {
        "samples_per_second": 1000.0 * speed,
        "worker_seconds_per_sample": 1e-3 * work,
        "cpu_seconds_per_1000_samples": 2.0,
        "others_cores": others,
    }
    return {False: plain | {"others_cores": QUIET}, True: publishing}


def test_a_disturbed_pair_makes_room_for_a_quiet_one() -> None:
    pairs = [pair(0.5, others=DISTURBED), pair(0.9), pair(0.8)]
    assert publish.choose_pairs(pairs, count=2) == pairs[1:]


def test_with_too_few_quiet_pairs_all_count() -> None:
    pairs = [pair(0.5, others=DISTURBED), pair(0.9), pair(0.8, others=DISTURBED)]
    assert publish.choose_pairs(pairs, count=2) == pairs


def test_what_is_not_known_counts_as_quiet() -> None:
    assert publish.is_quiet({False: {"others_cores": None}, True: {}})


def test_costs_are_those_of_a_publication_every_30_s() -> None:
    found = publish.find_costs([pair(0.97), pair(0.94), pair(0.91)], publish_seconds=10.0)
    cost = found["publish_cost_every_30s"]
    assert (cost.value, cost.low, cost.high) == pytest.approx((0.98, 0.97, 0.99))
    assert not cost.met
    assert found["publish_cost_cpu_every_30s"].value == pytest.approx(1.0)


def test_slow_processors_are_taken_out() -> None:
    """As many samples less as the processors were slower: nothing was lost."""
    found = publish.find_costs([pair(0.8, work=1 / 0.8)], publish_seconds=10.0)
    assert found["publish_cost_equal_speed_every_30s"].value == pytest.approx(1.0)


def test_a_run_without_clocks_says_nothing_about_processors() -> None:
    bare = {side: {"samples_per_second": 1000.0} for side in (False, True)}
    assert set(publish.find_costs([bare], publish_seconds=10.0)) == {"publish_cost_every_30s"}
