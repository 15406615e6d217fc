"""Goal: a server that rests misses nothing. Its ticks do nothing until something else happens to it, and a run is the
same as if it had looked at everything at every tick.

Method: the same seeds with servers that never rest. Some of these seeds differ if a budget is not refilled meanwhile.
"""

from __future__ import annotations

import pytest

from regrow.core.server import AWAKE, Server
from regrow.sim.runner import run

SEEDS = [
    ("2pc", 0),
    ("2pc-r2", 0),
    ("async", 0),
    ("bounds", 0),
    ("coordinator-r2", 0),
    ("cuts", 1),
    ("loads", 0),
    ("partitions-cuts", 0),
    ("sync-mixed", 2),
]


@pytest.mark.parametrize(("profile", "seed"), SEEDS)
def test_a_server_that_never_rests_runs_alike(profile: str, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    found = run(profile, seed=seed)
    asked = []

    def find_none(server: Server) -> float:
        asked.append(server)
        return AWAKE

    monkeypatch.setattr(Server, "_find_rest", find_none)
    wakeful = run(profile, seed=seed)
    assert asked
    assert (found.digest, found.events, found.tape) == (wakeful.digest, wakeful.events, wakeful.tape)
    assert found.probes == wakeful.probes
