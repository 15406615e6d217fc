"""Goal: a cut is one instant for all servers, and whatever goes wrong costs the attempt and nothing else.

Method: the coordinator's state machine by hand, one transition at a time. Its peers are names, and time is a number.
The server's is in test_cut.py.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from helpers import plain, server

from regrow.core.cut import CUT_SECONDS_MAX
from regrow.core.cuts import (
    ATTEMPT_SECONDS_MAX,
    GIVEN_UP_MAX,
    STEPS_AHEAD,
    STEPS_AHEAD_MAX,
    WHOLE_SECONDS,
    CutNow,
    CutPlan,
    Cuts,
    ManifestWritten,
    WriteManifest,
)
from regrow.core.effects import Log, Notice, Send
from regrow.core.messages import CutBegun, CutMarks, CutSaved
from regrow.core.names import cut_id


class Chief:
    """Cuts of two servers. Effects are sorted by kind: messages to both are one."""

    def __init__(self, *, is_sync: bool = True, marks: int = 1, term: int = 0, **plan: Any) -> None:
        self.cuts = Cuts(CutPlan(**plan), is_sync=is_sync, marks=marks, term=term, salt="salt")
        assert self.cuts.know({0: server(0), 1: server(1)}) == []
        self.number = term << 32

    def tick(self, now: float) -> list[Any]:
        return self.sorted(self.cuts.tick(now))

    def begin(self, now: float = 0.0) -> None:
        self.number += 1
        assert self.tick(now) == [("CutAsk", {"number": self.number, "yields": False})]

    def marks(self, *values: tuple[int, ...]) -> list[Any]:
        """What the servers have applied; what follows from the last of them."""
        effects: list[Any] = []
        for index, value in enumerate(values):
            assert effects == []
            effects = self.cuts.on_marks(index, CutMarks(number=self.number, marks=value))
        return self.sorted(effects)

    def at(self, *values: tuple[int, ...]) -> dict[str, Any]:
        ((kind, fields),) = self.marks(*values)
        assert kind == "CutAt"
        assert isinstance(fields, dict)
        return fields

    def begun(self, index: int, *, late: bool = False) -> list[Any]:
        return self.sorted(self.cuts.on_begun(index, CutBegun(number=self.number, late=late)))

    def all_begun(self) -> None:
        """Both servers have captured their rows."""
        self.begun(0)
        self.begun(1)

    def saved(self, index: int, text: str = "[]", error: str = "") -> list[Any]:
        chunks = np.frombuffer(text.encode(), np.uint8)
        return self.sorted(self.cuts.on_saved(index, CutSaved(number=self.number, error=error, chunks=chunks)))

    def published(self, **values: Any) -> list[Any]:
        return self.sorted(self.cuts.on_manifest_written(ManifestWritten(number=self.number, **values)))

    def whole_cut(self, step: int, now: float = 0.0, **values: Any) -> dict[str, Any]:
        """From the first word to the last, at this step or the next one asked for."""
        self.begin(now)
        at = self.at((step,), (step,))
        assert self.begun(0) == []
        assert self.begun(1) == [has_begun(at)]
        assert self.saved(0) == []
        (publish,) = self.saved(1)
        assert isinstance(publish, WriteManifest)
        assert publish.target == at["piece"].partition(".")[0]
        effects = self.published(**values)
        assert effects[0] == ("CutEnd", {"number": self.number, "durable": True})
        return at

    @staticmethod
    def sorted(effects: Any) -> list[Any]:
        found: list[Any] = []
        sent: dict[str, list[Any]] = {}
        for effect in effects:
            if isinstance(effect, Send):
                sent.setdefault(repr(plain(effect.message)), []).append(effect)
            else:
                found.append(effect)
        for each in sent.values():
            assert [str(effect.target) for effect in each] == ["S0", "S1"][: len(each)]
        return [plain(each[0].message) for each in sent.values()] + found


def failed(reason: str, *, count: int = 1, still: bool = False) -> list[Any]:
    values = {"status": "failed", "reason": reason, "failed": count, "still": still}
    return [Log(text=f"no checkpoint: {reason}"), Notice(name="checkpoint", values=values)]


def has_begun(at: dict[str, Any]) -> Notice:
    cut, _, source = at["piece"].partition(".")
    values = {"status": "begun", "cut": cut, "kind": "full" if source == "full" else "delta"}
    return Notice(name="checkpoint", values=values)


def ended(number: int) -> tuple[str, dict[str, Any]]:
    return "CutEnd", {"number": number, "durable": False}


def test_a_cut_from_the_first_word_to_the_last() -> None:
    chief = Chief(every_steps=10)
    assert chief.tick(0.0) == []
    chief.cuts.on_step(10 - STEPS_AHEAD)
    chief.begin(1.0)
    assert chief.tick(2.0) == [], "it is under way"
    at = chief.at((6,), (7,))
    target = cut_id(10, f"salt/{chief.number}")
    assert at == {"number": 1, "marks": (10,), "piece": f"{target}.full", "full": True, "pause": False, "tenant": 0}
    chief.tick(2.5)
    assert chief.begun(1) == []
    assert chief.begun(0) == [has_begun(at)]
    assert chief.saved(1, "[1]") == []
    publish = WriteManifest(number=1, source=None, target=target, marks=(10,), chunks=("[0]", "[1]"), discard=())
    assert chief.saved(0, "[0]") == [publish]
    assert chief.saved(0, "[0]") == [], "twice"
    chief.tick(3.0)
    values = {"status": "saved", "cut": target, "still": False, "count": 1, "kind": "full"}
    assert chief.published() == [
        ("CutEnd", {"number": 1, "durable": True}),
        Log(text=f"checkpoint {target}"),
        Notice(name="checkpoint", values={**values, "seconds": 2.0, "cut_seconds": 1.5}),
    ]
    assert (chief.cuts.head, chief.cuts.head_marks) == (target, (10,))
    assert chief.published() == []


def test_deltas_start_from_the_last_cut_and_fulls_come_in_between() -> None:
    chief = Chief(every_steps=10, full_every=3)
    kinds = []
    for step in range(9, 89, 10):
        chief.cuts.on_step(step)
        head = chief.cuts.head
        at = chief.whole_cut(step)
        assert at["piece"].partition(".")[2] == ("full" if at["full"] else head)
        kinds.append(at["full"])
    assert kinds == [True, False, False, True, False, False, True, False]


def test_full_every_1_is_only_fulls() -> None:
    chief = Chief(every_seconds=1.0)
    for now in (1.0, 2.0, 3.0):
        chief.tick(now - 1.0)
        assert chief.whole_cut(int(now), now)["full"]


def test_a_full_that_somebody_wants() -> None:
    chief = Chief(full_every=100)
    chief.cuts.want(CutNow())
    assert chief.whole_cut(1, full_wanted=True)["full"], "the first; a merger asks for the next"
    chief.cuts.want(CutNow())
    assert chief.whole_cut(2)["full"]
    chief.cuts.want(CutNow())
    assert not chief.whole_cut(3)["full"]
    chief.cuts.want(CutNow(full=True))
    assert chief.whole_cut(4)["full"]


def test_steps() -> None:
    chief = Chief(every_steps=100)
    chief.cuts.on_step(100 - STEPS_AHEAD - 1)
    assert chief.tick(0.0) == []
    chief.cuts.on_step(50)
    chief.cuts.on_step(100 - STEPS_AHEAD)
    chief.begin()
    assert chief.at((99,), (98,))["marks"] == (100,)
    asynchronous = Chief(is_sync=False, every_steps=100)
    asynchronous.cuts.on_step(99)
    assert asynchronous.tick(0.0) == []
    asynchronous.cuts.on_step(100)
    asynchronous.begin()


def test_seconds() -> None:
    chief = Chief(every_seconds=10.0)
    assert chief.tick(5.0) == chief.tick(14.9) == []
    chief.begin(15.0)
    assert chief.at((3,), (4,))["marks"] == (4 + STEPS_AHEAD,)
    chief.tick(20.0)
    chief.all_begun()
    chief.saved(0)
    chief.saved(1)
    chief.published()
    assert chief.tick(29.9) == [], "from the end of the last one"
    chief.begin(30.0)


def test_async_the_marks_are_the_most_that_any_has() -> None:
    chief = Chief(is_sync=False, marks=2, every_seconds=1.0)
    chief.tick(0.0)
    chief.begin(1.0)
    at = chief.at((5, 9), (6, 7))
    assert at["marks"] == (6, 9)
    assert int(at["piece"][:10]) == 6, "all workers have come so far"


def test_async_a_worker_that_is_not_heard_of() -> None:
    chief = Chief(is_sync=False, marks=2, every_seconds=10.0)
    chief.tick(0.0)
    chief.begin(10.0)
    chief.at((5, 9), (6, 7))
    chief.begun(0)
    assert chief.tick(10.0 + CUT_SECONDS_MAX) == []
    effects = chief.tick(10.1 + CUT_SECONDS_MAX)
    assert effects == [ended(1), *failed("a worker was not heard of")]
    assert chief.tick(20.0 + CUT_SECONDS_MAX) == [], "the interval again"
    chief.begin(20.2 + CUT_SECONDS_MAX)


def test_async_once_all_have_begun_nobody_hurries() -> None:
    chief = Chief(is_sync=False, every_seconds=10.0)
    chief.tick(0.0)
    chief.begin(10.0)
    chief.at((5,), (6,))
    chief.begun(0)
    chief.begun(1)
    assert chief.tick(1000.0) == []


@pytest.mark.parametrize("is_sync", [True, False])
@pytest.mark.parametrize("stored", [0, 1, 2])
def test_no_attempt_takes_for_ever(is_sync: bool, stored: int) -> None:
    """A server does not say how storing went, or nobody says that the manifest is written."""
    chief = Chief(is_sync=is_sync, every_seconds=10.0)
    chief.tick(0.0)
    chief.begin(10.0)
    chief.at((5,), (5,))
    chief.all_begun()
    for index in range(stored):
        chief.saved(index)
    assert chief.tick(10.0 + ATTEMPT_SECONDS_MAX) == []
    told = chief.tick(10.1 + ATTEMPT_SECONDS_MAX)
    assert told[0] == ended(chief.number)
    assert told[1:] == failed(f"it was not stored within {ATTEMPT_SECONDS_MAX:.0f} s")


def test_sync_a_step_may_take_its_time() -> None:
    chief = Chief(every_seconds=10.0)
    chief.tick(0.0)
    chief.begin(10.0)
    chief.at((5,), (6,))
    assert chief.tick(1000.0) == []


def test_too_late_is_tried_again_further_ahead() -> None:
    chief = Chief(every_seconds=1.0)
    chief.tick(0.0)
    chief.begin(1.0)
    ahead = [chief.at((10,), (10,))["marks"][0] - 10]
    for _ in range(8):
        assert chief.begun(0, late=True) == [ended(chief.number)], "nothing to tell anybody"
        chief.begin(1.0)
        ahead.append(chief.at((10,), (10,))["marks"][0] - 10)
    assert ahead == [STEPS_AHEAD << min(tries, 6) for tries in range(9)]
    assert ahead[-1] == STEPS_AHEAD_MAX
    assert chief.cuts.failed == 0


def test_a_server_that_cannot_yet() -> None:
    """Nothing went wrong, and it is asked again a little later."""
    chief = Chief(every_steps=10)
    chief.cuts.on_step(9)
    for now in (0.0, WHOLE_SECONDS):
        chief.begin(now)
        sorry = CutMarks(number=chief.number, marks=(), error="a server is still coming back")
        assert chief.sorted(chief.cuts.on_marks(0, sorry)) == [ended(chief.number)]
        assert chief.marks((9,), (9,)) == chief.tick(now + WHOLE_SECONDS / 2) == []
    assert chief.cuts.failed == 0
    assert chief.whole_cut(9, 2 * WHOLE_SECONDS)["marks"] == (10,)


def test_a_server_that_cannot_yet_when_all_are_still() -> None:
    chief = Chief()
    chief.cuts.want(CutNow(still=True))
    chief.begin()
    sorry = CutMarks(number=1, marks=(), error="a server is still coming back")
    assert chief.sorted(chief.cuts.on_marks(1, sorry)) == [ended(1)]
    assert chief.tick(WHOLE_SECONDS / 2) == []
    assert chief.whole_cut(9, WHOLE_SECONDS)["marks"] == (9,), "it is still wanted, where everybody is"


@pytest.mark.parametrize("where", ["saving", "publishing"])
def test_a_storage_that_fails(where: str) -> None:
    chief = Chief(every_steps=10, full_every=5)
    chief.cuts.on_step(9)
    head = chief.whole_cut(9)["piece"].partition(".")[0]
    chief.cuts.on_step(19)
    chief.begin()
    chief.at((19,), (19,))
    chief.all_begun()
    if where == "saving":
        assert chief.saved(1, error="no space") == [ended(2), *failed("S1: no space")]
        assert chief.saved(0) == [], "of an attempt that is over"
    else:
        chief.saved(0)
        chief.saved(1)
        assert chief.published(error="no space") == [ended(2), *failed("no space")]
    assert (chief.cuts.head, chief.cuts.count, chief.cuts.failed) == (head, 1, 1)
    chief.cuts.on_step(29)
    at = chief.whole_cut(29)
    assert at["piece"].endswith(f".{head}"), "the next one has all rows since the last that is stored"


def test_what_was_given_up_is_removed_with_the_next() -> None:
    """But for one whose manifest was being written: it may exist."""
    chief = Chief(every_steps=10)
    chief.cuts.on_step(9)
    chief.begin()
    chief.cuts.know(None)  # nothing was named yet
    given_up = []
    for step in (19, 29):
        chief.cuts.know({0: server(0), 1: server(1)})
        chief.cuts.on_step(step)
        chief.begin()
        given_up.append(chief.at((step,), (step,))["piece"])
        chief.begun(0)
        chief.saved(0)
        chief.cuts.know(None)
    chief.cuts.know({0: server(0), 1: server(1)})
    for discard in (tuple(given_up), (), ()):
        chief.cuts.want(CutNow())
        chief.begin()
        chief.at((40,), (40,))
        chief.all_begun()
        chief.saved(0)
        (publish,) = chief.saved(1)
        assert publish.discard == discard
        chief.published(error="no answer")


def test_what_is_to_be_removed_is_bounded() -> None:
    chief = Chief()
    for step in range(GIVEN_UP_MAX + 20):
        chief.cuts.want(CutNow())
        chief.begin()
        last = chief.at((step,), (step,))["piece"]
        chief.all_begun()
        chief.saved(0, error="no")
    chief.cuts.want(CutNow())
    chief.begin()
    chief.at((1000,), (1000,))
    chief.all_begun()
    chief.saved(0)
    (publish,) = chief.saved(1)
    assert (len(publish.discard), publish.discard[-1]) == (GIVEN_UP_MAX, last)


@pytest.mark.parametrize("stage", ["asked", "at", "begun", "saved", "publishing"])
def test_a_server_dies(stage: str) -> None:
    chief = Chief(every_steps=10)
    chief.cuts.on_step(9)
    chief.begin()
    if stage != "asked":
        chief.at((9,), (9,))
    if stage in ("begun", "saved", "publishing"):
        chief.begun(0)
        chief.begun(1)
    if stage in ("saved", "publishing"):
        chief.saved(1)
    if stage == "publishing":
        chief.saved(0)
    assert chief.sorted(chief.cuts.know(None)) == [ended(1), *failed("a server died")]
    assert chief.cuts.know(None) == []
    assert chief.marks((9,), (9,)) == chief.begun(0) == chief.saved(0) == chief.published() == []
    assert (chief.cuts.head, chief.cuts.count) == (None, 0), "it may exist, but nobody starts from it"
    chief.cuts.on_step(100)
    assert chief.tick(1.0) == [], "not without all servers"
    assert chief.cuts.know({0: server(0), 1: server(1, incarnation=1)}) == []
    assert [effect.target for effect in chief.cuts.tick(1.0)] == [server(0), server(1, incarnation=1)]


def test_the_same_servers_again_are_no_news() -> None:
    chief = Chief()
    chief.cuts.want(CutNow())
    chief.begin()
    assert chief.cuts.know({0: server(0), 1: server(1)}) == []
    assert chief.at((1,), (1,))["marks"] == (1 + STEPS_AHEAD,)


def test_another_coordinator_begins_with_a_full_and_higher_numbers() -> None:
    chief = Chief(term=3, full_every=100)
    chief.cuts.want(CutNow())
    chief.begin()
    assert chief.number == (3 << 32) + 1
    assert chief.at((1,), (1,))["full"]


def test_still_is_where_everybody_is() -> None:
    chief = Chief(every_steps=10)
    chief.cuts.want(CutNow(still=True))
    at = chief.whole_cut(7)
    assert at["marks"] == (7,)


def test_still_is_not_made_twice() -> None:
    chief = Chief(every_steps=10)
    chief.cuts.want(CutNow(still=True))
    chief.whole_cut(7)
    chief.cuts.want(CutNow(still=True))
    chief.begin()
    values = {"status": "saved", "cut": chief.cuts.head, "still": True, "count": 1}
    assert chief.marks((7,), (7,)) == [ended(2), Notice(name="checkpoint", values=values)]


def test_still_ends_a_cut_that_waits_for_a_step() -> None:
    chief = Chief(every_steps=10)
    chief.cuts.on_step(6)
    chief.begin()
    chief.at((6,), (6,))
    assert chief.sorted(chief.cuts.want(CutNow(still=True))) == [ended(1)]
    assert chief.whole_cut(8)["marks"] == (8,)


def test_still_waits_for_a_cut_that_is_being_stored() -> None:
    chief = Chief(every_steps=10)
    chief.cuts.on_step(9)
    chief.begin()
    chief.at((9,), (9,))
    chief.begun(0)
    assert chief.cuts.want(CutNow(still=True)) == []
    chief.begun(1)
    chief.saved(0)
    chief.saved(1)
    assert chief.published()[0] == ("CutEnd", {"number": 1, "durable": True})
    assert chief.whole_cut(12)["marks"] == (12,)


def test_still_that_fails_says_so() -> None:
    chief = Chief()
    chief.cuts.want(CutNow(still=True))
    chief.begin()
    chief.at((5,), (5,))
    chief.all_begun()
    assert chief.saved(0, error="no") == [ended(1), *failed("S0: no", still=True)]


def test_messages_of_strangers() -> None:
    chief = Chief()
    chief.cuts.want(CutNow())
    chief.begin()
    assert chief.cuts.on_marks(7, CutMarks(number=1, marks=(1,))) == []
    assert chief.cuts.on_marks(0, CutMarks(number=9, marks=(1,))) == []
    assert chief.cuts.on_begun(0, CutBegun(number=0)) == []


def test_names_sort_by_step_and_differ_by_salt() -> None:
    names = [cut_id(step, "salt") for step in (3, 20, 100)]
    assert names == sorted(names)
    assert cut_id(3, "salt") == names[0] != cut_id(3, "other")
    assert (len(names[0]), names[0][:11]) == (17, "0000000003-")
