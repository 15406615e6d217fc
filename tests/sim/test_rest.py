"""Goal: a server that rests misses nothing. Its ticks do nothing until something else happens to it, and a run is the
same as if it had looked at everything at every tick.

Method: the same seeds with servers that never rest, with a diary of what nobody else sees: notices, and how far each is
on its way back. Most of these seeds differ if a budget that fills does not end a rest, some if a notice is late or if
blank rows wait to be filled.
"""

from __future__ import annotations

from typing import Any

import pytest

from regrow.core import rebuild
from regrow.core.effects import Notice
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


def keep_diary(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """How each server is behind every tick from now on, and what it tells those who watch."""
    diary: list[Any] = []
    tick = Server.tick

    def noted(server: Server, now: float) -> list[Any]:
        effects = tick(server, now)
        notices = [effect for effect in effects if isinstance(effect, Notice)]
        diary.append((server.identity, now, repr(server.ways), notices))
        return effects

    monkeypatch.setattr(Server, "tick", noted)
    return diary


@pytest.mark.parametrize(("profile", "seed"), SEEDS)
def test_a_server_that_never_rests_runs_alike(profile: str, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rebuild, "FILL_ROWS", 1)  # so that blank rows take many ticks
    diary = keep_diary(monkeypatch)
    found = run(profile, seed=seed)
    rested = diary.copy()
    diary.clear()
    asked = []

    def find_none(server: Server) -> float:
        asked.append(server)
        return AWAKE

    monkeypatch.setattr(Server, "_find_rest", find_none)
    wakeful = run(profile, seed=seed)
    assert asked
    assert (found.digest, found.events, found.tape) == (wakeful.digest, wakeful.events, wakeful.tape)
    assert found.probes == wakeful.probes
    assert rested == diary
