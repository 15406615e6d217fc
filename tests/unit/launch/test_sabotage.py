"""Goal: what is done on purpose is done once, at its step, and the same way in every run. Method: steps and times that
are made up."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence

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
    for now in (tick / 10 for tick in range(20_000)):
        incarnations = [
            sum(blow.role == "server" and blow.id == id and now >= at + heals_seconds for at, blow in found)
            for id in range(config.servers)
        ]
        blow = saboteur.choose_target(now, down=down, incarnations=incarnations)
        if blow is not None:
            found.append((now, blow))
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
    assert Saboteur(TrainConfig()).choose_target(1e9, down=[], incarnations=[0]) is None


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
        blow = saboteur.choose_target(float(now), down=[], incarnations=[0] * config.servers)
        assert blow is None or not hung, "one that never goes on was never replaced here"
        hung = hung or (blow is not None and blow.kind == "hang")
    assert any(row["kind"] == "late" and int(row["count"]) >= 1 for row in saboteur.done)
    assert hung
