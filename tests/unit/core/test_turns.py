"""Goal: checkpoints and publications take turns: one attempt at a time, every wait bounded, nothing mixed up.

Method: the real `Turns`, with servers that are told of as messages; time is a number.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from regrow.core.cut import PUBLICATION_TENANT, TENANT
from regrow.core.cuts import YIELD_SECONDS_MAX, CutNow, CutPlan, ManifestWritten, WriteManifest
from regrow.core.effects import Notice, Send
from regrow.core.identity import Identity
from regrow.core.messages import CutAsk, CutAt, CutBegun, CutEnd, CutMarks, CutSaved
from regrow.core.turns import WAIT_SECONDS_MAX, Turns

PEERS = {0: Identity(role="server", id=0)}


def make(checkpoint: CutPlan | None, publication: CutPlan | None, *, is_sync: bool = False) -> Turns:
    plans = {TENANT: checkpoint, PUBLICATION_TENANT: publication}
    turns = Turns(
        {tenant: plan for tenant, plan in plans.items() if plan is not None},
        is_sync=is_sync,
        marks=1,
        term=1,
        salt="salt",
    )
    turns.know(PEERS)
    turns.tick(0.0)
    return turns


def sent(effects: list[Any], kind: type[Any]) -> list[Any]:
    return [effect.message for effect in effects if isinstance(effect, Send) and isinstance(effect.message, kind)]


def capture(turns: Turns, ask: CutAsk, marks: tuple[int, ...] = (5,)) -> CutAt:
    (at,) = sent(turns.on_message(0, CutMarks(number=ask.number, marks=marks)), CutAt)
    turns.on_message(0, CutBegun(number=ask.number))
    return at


def finish(turns: Turns, ask: CutAsk) -> list[Any]:
    stored = CutSaved(number=ask.number, error="", chunks=np.zeros(0, np.uint8))
    (write,) = [each for each in turns.on_message(0, stored) if isinstance(each, WriteManifest)]
    return turns.on_manifest_written(ManifestWritten(number=ask.number, tenant=write.tenant))


def begin(turns: Turns, now: float) -> CutAsk:
    (ask,) = sent(turns.tick(now), CutAsk)
    return ask


def ends(effects: list[Any]) -> list[tuple[int, bool]]:
    return [(end.number, end.durable) for end in sent(effects, CutEnd)]


def names(effects: list[Any]) -> list[tuple[str, str]]:
    return [(each.name, each.values["status"]) for each in effects if isinstance(each, Notice)]


EVERY = CutPlan(every_seconds=10.0, full_every=100)


def test_one_at_a_time_and_then_the_other() -> None:
    turns = make(EVERY, EVERY)
    first = begin(turns, 10.0)
    at = capture(turns, first)
    assert (at.tenant, at.full) == (TENANT, True)
    assert sent(turns.tick(10.1), CutAsk) == [], "the other waits"
    assert names(finish(turns, first)) == [("checkpoint", "saved")]
    second = begin(turns, 10.2)
    assert second.number == first.number + 1, "one counter"
    assert capture(turns, second).tenant == PUBLICATION_TENANT
    assert names(finish(turns, second)) == [("publication", "saved")]
    assert turns.tick(10.3) == []
    third = begin(turns, 20.5)
    at = capture(turns, third, (9,))
    assert (at.tenant, at.full) == (TENANT, False)
    assert at.piece.endswith(cut_of(turns, TENANT)), "each delta starts from its own"


def cut_of(turns: Turns, tenant: int) -> str:
    head = turns.makers[tenant].head
    assert head is not None
    return head


def test_whoever_was_first_is_second_then() -> None:
    """Both are due all the time: neither is left out."""
    turns = make(CutPlan(every_seconds=0.1), CutPlan(every_seconds=0.1))
    order = []
    for index in range(6):
        ask = begin(turns, 1.0 + index)
        order.append(capture(turns, ask, (index,)).tenant)
        finish(turns, ask)
    assert order == [TENANT, PUBLICATION_TENANT] * 3


def test_a_checkpoint_does_not_wait_for_ever() -> None:
    turns = make(CutPlan(every_seconds=20.0), CutPlan(every_seconds=10.0))
    ask = begin(turns, 10.0)
    capture(turns, ask)
    assert turns.tick(20.0) == []
    assert turns.tick(20.0 + WAIT_SECONDS_MAX) == []
    effects = turns.tick(20.1 + WAIT_SECONDS_MAX)
    assert ends(effects) == [(ask.number, False)]
    assert names(effects) == [("publication", "failed")]
    assert capture(turns, begin(turns, 20.2 + WAIT_SECONDS_MAX)).tenant == TENANT


def test_a_publication_waits_for_a_checkpoint() -> None:
    turns = make(CutPlan(every_seconds=5.0), CutPlan(every_seconds=10.0))
    ask = begin(turns, 5.0)
    capture(turns, ask)
    assert turns.tick(10.0 + 10 * WAIT_SECONDS_MAX) == [], "as long as that takes"
    finish(turns, ask)
    assert capture(turns, begin(turns, 400.0)).tenant == PUBLICATION_TENANT


def test_a_publication_gives_way_to_saves_but_not_for_ever() -> None:
    turns = make(None, EVERY)
    now, asks = 10.0, []
    while now < 10.0 + 2 * YIELD_SECONDS_MAX:
        ask = begin(turns, now)
        asks.append((now, ask.yields))
        turns.on_message(0, CutMarks(number=ask.number, marks=(), error="a server stores a save of its own"))
        now += 1.5
    assert [yields for at, yields in asks] == [at < 10.0 + YIELD_SECONDS_MAX for at, _ in asks]
    ask = begin(turns, now)
    assert not ask.yields
    capture(turns, ask)
    finish(turns, ask)
    assert begin(turns, now + 20.0).yields, "the next one is put off again"


def test_checkpoints_yield_to_nobody() -> None:
    assert not begin(make(EVERY, None), 10.0).yields


def test_the_end_of_training() -> None:
    """A publication that waits for a step which is not made any more must not keep the last checkpoint from its turn,
    nor the other way round."""
    for first in (TENANT, PUBLICATION_TENANT):
        turns = make(CutPlan(every_steps=10), CutPlan(every_steps=10), is_sync=True)
        turns.on_step(8)
        waiting = begin(turns, 1.0)
        turns.on_message(0, CutMarks(number=waiting.number, marks=(8,)))
        assert ends(turns.want(CutNow(still=True, tenant=first))) == [(waiting.number, False)]
        for tenant in (first, TENANT + PUBLICATION_TENANT - first):
            turns.want(CutNow(still=True, tenant=tenant))
            ask = begin(turns, 2.0)
            at = capture(turns, ask, (8,))
            assert (at.tenant, at.marks) == (tenant, (8,))
            finish(turns, ask)
        assert turns.tick(100.0) == [], "nobody waits for a step"


def test_steps_that_are_heard_of_late_are_no_training() -> None:
    """A coordinator that has just begun is asked for the last cuts before it hears how far its servers are."""
    turns = make(CutPlan(every_steps=20), EVERY, is_sync=True)
    for tenant in (TENANT, PUBLICATION_TENANT):
        turns.want(CutNow(still=True, tenant=tenant))
    turns.on_step(18)
    ask = begin(turns, 1.0)
    at = capture(turns, ask, (18,))
    assert (at.tenant, at.marks) == (TENANT, (18,))
    finish(turns, ask)
    ask = begin(turns, 2.0)
    turns.on_message(0, CutMarks(number=ask.number, marks=(), error="a server is still coming back"))
    assert sent(turns.tick(2.1), CutAsk) == [], "the next checkpoint is due by its plan, at step 20, which nobody makes"
    assert capture(turns, begin(turns, 4.0), (18,)).tenant == PUBLICATION_TENANT


def test_training_goes_on_after_it_stood_still() -> None:
    turns = make(None, CutPlan(every_seconds=10.0))
    turns.want(CutNow(still=True, tenant=PUBLICATION_TENANT))
    ask = begin(turns, 1.0)
    capture(turns, ask)
    finish(turns, ask)
    assert turns.tick(30.0) == []
    turns.on_step(9)
    assert begin(turns, 31.0)


def test_an_interval_is_counted_from_the_instant_and_stretched() -> None:
    turns = make(None, CutPlan(every_seconds=10.0, from_instant=True))
    ask = begin(turns, 10.0)
    capture(turns, ask)
    turns.tick(14.0)
    finish(turns, ask)
    assert turns.tick(19.0) == []
    ask = begin(turns, 20.1)
    capture(turns, ask, (6,))
    turns.tick(40.0)  # it took twice as long as the interval
    finish(turns, ask)
    assert turns.tick(55.0) == []
    assert begin(turns, 60.1), "as long a rest as it took"


def test_a_word_for_the_other_is_not_taken() -> None:
    """A manifest that comes late, of the other tenant's cut, changes nothing."""
    turns = make(EVERY, EVERY)
    ask = begin(turns, 10.0)
    capture(turns, ask)
    assert turns.on_manifest_written(ManifestWritten(number=ask.number, tenant=PUBLICATION_TENANT)) == []
    assert turns.makers[TENANT].is_underway
    assert turns.want(CutNow(tenant=1)) == []


def test_a_death_ends_the_attempt_and_both_begin_again() -> None:
    turns = make(EVERY, EVERY)
    ask = begin(turns, 10.0)
    capture(turns, ask)
    effects = turns.know(None)
    assert names(effects) == [("checkpoint", "failed")]
    turns.know(PEERS)
    assert capture(turns, begin(turns, 10.2)).tenant == PUBLICATION_TENANT
