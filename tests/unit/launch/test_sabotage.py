"""Goal: what is done on purpose is done once, at its step, and the same way in every run. Method: steps and times that
are made up."""

from __future__ import annotations

import itertools
import math
import random
import statistics
from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest

from regrow.config import TrainConfig
from regrow.launch.sabotage import Blow, Saboteur


def test_harm_on_request() -> None:
    config = TrainConfig(kill=("server:2@step:9", "worker:0@step:5"), pause=("server:1@step:5:5s",))
    saboteur = Saboteur(config)
    assert saboteur.take_due(4) == []
    assert [(sabotage.role, sabotage.id) for sabotage in saboteur.take_due(6)] == [("worker", 0), ("server", 1)]
    assert saboteur.take_due(6) == []
    assert [(sabotage.role, sabotage.step) for sabotage in saboteur.unreached] == [("server", 9)]


ROLES = "server,worker,coordinator,spare"


def hit(config: TrainConfig, *, down: Sequence[int] = (), heals_seconds: float = 0.0) -> list[tuple[float, Blow]]:
    """2000 s. A server that is hit has a successor after so long, and nobody knows of it before."""
    saboteur, found = Saboteur(config), list[tuple[float, Blow]]()
    incarnations, healed = [0] * config.servers, 0
    for now in (tick / 10 for tick in range(20_000)):
        while healed < len(found) and now >= found[healed][0] + heals_seconds:
            blow = found[healed][1]
            if blow.role == "server":
                incarnations[blow.id] += 1
            healed += 1
        found += [(now, blow) for blow in saboteur.choose_targets(now, down=down, incarnations=incarnations)]
    assert sum(int(row["count"]) for row in saboteur.done) == len(found)
    return found


def test_random_kills_repeat_and_spare_the_last_one_standing() -> None:
    config = TrainConfig(protection="ec", mtbf=10.0, mtbf_roles=ROLES, seed=5)
    assert hit(config) == hit(config)
    assert 150 < len(hit(config)) < 250
    assert {blow.role for _, blow in hit(config)} == set(ROLES.split(","))
    assert {blow.kind for _, blow in hit(config)} == {"kill"}
    # A server whose turn it is waits while another is recovering, and so does everybody after it.
    assert all(blow.role != "server" for _, blow in hit(config, down=[1]))
    assert Saboteur(TrainConfig()).choose_targets(1e9, down=[], incarnations=[0]) == ()


def test_random_hangs() -> None:
    config = TrainConfig(protection="ec", mtbf=10.0, mtbf_roles=ROLES, mtbf_hangs=0.5, seed=5)
    kinds = Counter((blow.role, blow.kind) for _, blow in hit(config))
    assert set(kinds) == set(itertools.product(ROLES.split(","), ("kill", "hang", "late")))
    kills = sum(count for (_, kind), count in kinds.items() if kind == "kill")
    assert 0.4 < kills / kinds.total() < 0.6


@pytest.mark.parametrize("r", [1, 2])
def test_a_hung_server_is_down_before_anybody_notices(r: int) -> None:
    """No more than r servers are down at any time, though none of them is known to be."""
    config = TrainConfig(protection="ec", k=2, r=r, servers=5, mtbf=2.0, mtbf_hangs=1.0, seed=5)
    times = [at for at, _ in hit(config, heals_seconds=7.0)]
    together = [sum(at - 6.95 < other <= at for other in times) for at in times]
    assert max(together) == r


def test_one_that_goes_on_without_being_replaced_is_up_again() -> None:
    config = TrainConfig(protection="ec", mtbf=2.0, mtbf_hangs=1.0, seed=5)
    saboteur, hung = Saboteur(config), False
    for now in range(1000):
        blows = saboteur.choose_targets(float(now), down=[], incarnations=[0] * config.servers)
        assert not (blows and hung), "one that never goes on was never replaced here"
        hung = hung or any(blow.kind == "hang" for blow in blows)
    assert any(row["kind"] == "late" and int(row["count"]) >= 1 for row in saboteur.done)
    assert hung


def draw_gaps(shape: float, *, mean: float = 30.0, count: int = 40_000) -> list[float]:
    """Times between kills of workers, who need not wait for anybody."""
    config = TrainConfig(protection="ec", mtbf=mean, mtbf_roles="worker", mtbf_shape=shape, seed=5)
    saboteur = Saboteur(config)
    return [saboteur._draw_gap(mean) for _ in range(count)]


@pytest.mark.parametrize(("shape", "median"), [(0.67, 0.565), (1.0, math.log(2)), (4.0, 0.918)])
def test_the_shape_changes_the_median_and_not_the_mean(shape: float, median: float) -> None:
    gaps = draw_gaps(shape)
    assert statistics.mean(gaps) == pytest.approx(30.0, rel=0.03)
    assert statistics.median(gaps) / 30.0 == pytest.approx(median, rel=0.03)
    if shape == 0.67:
        assert 17 / 30 * 0.97 < statistics.median(gaps) / 30.0 < 8 / 14 * 1.03  # both as published


def test_the_shape_is_that_of_the_kills() -> None:
    """Of the draws, and so of what happens: as long as nobody has to wait."""
    config = TrainConfig(protection="ec", mtbf=10.0, mtbf_roles="worker", mtbf_shape=0.67, seed=5)
    times = [at for at, _ in hit(config)]
    gaps = [after - before for before, after in itertools.pairwise([0.0, *times])]
    assert statistics.mean(gaps) == pytest.approx(10.0, rel=0.25)
    assert statistics.median(gaps) / statistics.mean(gaps) == pytest.approx(0.565, abs=0.12)


def test_a_shape_of_one_draws_as_ever() -> None:
    """Seeds in notes and reports keep their meaning."""
    chance = random.Random("faults 5")
    assert draw_gaps(1.0, count=3) == [chance.expovariate(1 / 30.0) for _ in range(3)]


def hit_together(config: TrainConfig, **options: Any) -> list[set[int]]:
    """The servers of each instant."""
    instants: dict[float, list[int]] = {}
    for at, blow in hit(config, **options):
        if blow.role == "server":
            instants.setdefault(at, []).append(blow.id)
    assert all(len(set(ids)) == len(ids) for ids in instants.values())
    return [set(ids) for ids in instants.values()]


@pytest.mark.parametrize("together", [1, 2, 3])
def test_so_many_servers_die_at_one_instant(together: int) -> None:
    config = TrainConfig(protection="ec", k=2, r=3, servers=6, mtbf=10.0, mtbf_kill=together, seed=5)
    found = hit_together(config)
    assert {len(ids) for ids in found} == {together}
    assert set().union(*found) == set(range(6))
    assert 150 < len(found) < 250, "the mean is between instants, not between deaths"
    # While one is down, fewer may die; so all of them wait.
    assert bool(hit_together(config, down=[1])) == (together + 1 <= 3)


def test_no_more_than_r_are_down_though_two_die_together() -> None:
    config = TrainConfig(protection="ec", k=2, r=3, servers=6, mtbf=2.0, mtbf_kill=2, seed=5)
    times = [at for at, _ in hit(config, heals_seconds=7.0)]
    assert max(sum(at - 6.95 < other <= at for other in times) for at in times) == 2


def test_more_than_parities_survive_is_left_to_a_checkpoint() -> None:
    config = TrainConfig(protection="ec+delta", ckpt="x", mtbf=10.0, mtbf_kill=3, seed=5)
    assert {len(ids) for ids in hit_together(config)} == {3}


def test_other_roles_die_alone() -> None:
    config = TrainConfig(protection="ec", k=2, r=2, mtbf=10.0, mtbf_roles=ROLES, mtbf_kill=2, seed=5)
    instants = Counter((at, blow.role) for at, blow in hit(config))
    assert {(role, count) for (_, role), count in instants.items()} == {
        *{("server", 2), ("worker", 1), ("coordinator", 1), ("spare", 1)}
    }


def test_after_a_start_over_nobody_is_down() -> None:
    """The first incarnation again: it would look as if who was killed had never had a successor."""
    config = TrainConfig(protection="delta", ckpt="x", servers=2, mtbf=2.0, mtbf_kill=2, seed=5)

    def count_kills(*, starts_over: bool) -> int:
        saboteur, count = Saboteur(config), 0
        for now in range(200):
            blows = saboteur.choose_targets(float(now), down=[], incarnations=[0, 0])
            count += len(blows)
            if blows and starts_over:
                saboteur.start_over()
        return count

    assert count_kills(starts_over=False) == 2
    assert count_kills(starts_over=True) > 50


def test_after_a_start_over_the_time_to_the_next_begins_with_training() -> None:
    """Nobody is killed while all begin again, however long that takes, nor the moment it is over."""
    config = TrainConfig(protection="delta", ckpt="x", mtbf=10.0, mtbf_shape=100.0, seed=5)
    saboteur, now = Saboteur(config), 0.0
    for _ in range(5):
        began = now
        while not saboteur.choose_targets(now, down=[], incarnations=[0] * config.servers):
            now += 0.1
        assert 6.0 < now - began < 14.0
        saboteur.choose_targets(now, down=[], incarnations=[0] * config.servers)  # before anybody knows of the death
        saboteur.start_over()
        now += 60.0
