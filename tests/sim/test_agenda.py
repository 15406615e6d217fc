"""Goal: the list of what may happen next, which a world keeps in order as it changes, is at every event the one that
would be made anew from the world; so nothing is chosen that could not happen, and nothing is forgotten.

Method: runs of every profile in which the two are compared before every event; and, to know that the comparison sees
something, a list that is not kept.
"""

from __future__ import annotations

import pytest

from regrow.sim.agenda import WORKER, Agenda
from regrow.sim.choices import Choices
from regrow.sim.profiles import PROFILES
from regrow.sim.runner import run

SEEDS = 3  # of each profile


class Wrong(AssertionError):
    pass


@pytest.fixture
def compared(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many places the list had at each comparison that was not made directly after it was made anew."""
    sizes: list[int] = []
    count = Agenda.count

    def compare(self: Agenda) -> int:
        if not self._is_void:
            sizes.append(len(self._entries))
            if [entry[:3] for entry in self._entries] != [entry[:3] for entry in self._list_all()]:
                raise Wrong("the list")
            acts = {number: entry[0] for number, entry in self._acts.items()}
            if acts != {number: due for due, kind, number, *_ in self._entries if kind == WORKER}:
                raise Wrong("acts of workers")
            if self._may_tick not in (None, self._are_all_heard()):
                raise Wrong("the clock")
        return count(self)

    monkeypatch.setattr(Agenda, "count", compare)
    return sizes


@pytest.mark.parametrize("profile", PROFILES)
def test_what_is_kept_is_what_would_be_made_anew(profile: str, compared: list[int]) -> None:
    events = 0
    for seed in range(SEEDS):
        result = run(profile, seed=seed)
        assert not result.invariant, result.text
        events += result.events
    assert len(compared) > events / 2, "it is hardly ever kept"
    assert max(compared) > 10


@pytest.mark.parametrize("forgotten", ["on_filled", "on_worker", "void", "void_tick"])
def test_a_change_that_is_not_followed_is_seen(
    forgotten: str, compared: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Agenda, forgotten, lambda self, *what: None)
    with pytest.raises((Wrong, KeyError, AssertionError)):
        for seed in range(20):
            run("mixed-k", seed=seed)


def test_a_fault_is_never_likelier_than_announced() -> None:
    choices = Choices(seed=1)
    with pytest.raises(AssertionError, match="were announced"):
        for _ in range(100):
            choices.pick_event(3, eager=0.5, fault=lambda: 0.6, fault_max=0.5)


def test_the_rate_of_faults_is_asked_for_only_where_it_matters() -> None:
    """And what is drawn does not depend on how it is asked for: old seeds stay the runs they were."""
    asked: list[float] = []

    def draw(rate_max: float) -> list[int]:
        choices = Choices(seed=7)

        def rate() -> float:
            asked.append(rate_max)
            return 0.1

        return [choices.pick_event(9, eager=0.3, fault=rate, fault_max=rate_max) for _ in range(300)]

    assert draw(0.1) == draw(1.0)
    assert asked.count(0.1) < 60
    assert asked.count(1.0) == 300
