"""Goal: what is done on purpose is done once, at its step, and the same way in every run. Method: steps and times that
are made up."""

from __future__ import annotations

from regrow.config import TrainConfig
from regrow.launch.sabotage import Saboteur


def test_harm_on_request() -> None:
    config = TrainConfig(kill=("server:2@step:9", "worker:0@step:5"), pause=("server:1@step:5:5s",))
    saboteur = Saboteur(config)
    assert saboteur.take_due(4) == []
    assert [(sabotage.role, sabotage.id) for sabotage in saboteur.take_due(6)] == [("worker", 0), ("server", 1)]
    assert saboteur.take_due(6) == []
    assert [(sabotage.role, sabotage.step) for sabotage in saboteur.unreached] == [("server", 9)]


def test_random_kills_repeat_and_spare_the_last_one_standing() -> None:
    config = TrainConfig(protection="ec", mtbf=10.0, mtbf_roles="server,worker,coordinator", seed=5)

    def hits(down: list[int]) -> list[tuple[float, str, int]]:
        saboteur = Saboteur(config)
        times = [now / 10 for now in range(20_000)]
        found = [(now, saboteur.choose_target(now, down=down)) for now in times]
        return [(now, *target) for now, target in found if target is not None]

    assert hits([]) == hits([])
    assert 150 < len(hits([])) < 250  # 2000 s
    assert {role for _, role, _ in hits([])} == {"server", "worker", "coordinator"}
    # A server whose turn it is waits while another is recovering, and so does everybody after it.
    assert all(role != "server" for _, role, _ in hits([1]))
    assert Saboteur(TrainConfig()).choose_target(1e9, down=[]) is None
