"""Goal: one that hangs is found in its time, one that is slow is not, and a launcher that slept blames nobody.

Method: times by hand. `live` lets every process answer at once, but for those named; what is found is compared with
the limit of its role, a little before it and a little after.
"""

from __future__ import annotations

from collections.abc import Collection

import pytest

from regrow.core import coordinator
from regrow.core.identity import Identity
from regrow.hanging import SILENT_SECONDS, parse_silent
from regrow.launch import watch
from regrow.launch.watch import Watch

STEP_SECONDS = 0.25


def who(role: str, id: int = 0) -> Identity:
    return Identity(role=role, id=id, incarnation=0)


W, S, C, SPARE, M = who("worker"), who("server"), who("coordinator"), who("standby"), who("merger")


def begin(*processes: Identity) -> Watch:
    """Each has answered once, at time 0."""
    found = Watch()
    for process in processes:
        found.begin(process, 0.0)
    found.look(0.0)
    for process in processes:
        found.hear(process, 0.0, busy_seconds=None, longest_seconds=0.0)
    return found


def live(
    subject: Watch,
    *,
    until: float,
    silent: Collection[Identity] = (),
    busy: dict[Identity, float] | None = None,
    longest: float = 0.0,
    start: float = 0.0,
) -> dict[Identity, float]:
    """When each was found to hang. `busy`: since when its work is at one piece."""
    found: dict[Identity, float] = {}
    now = start
    while now < until:
        now += STEP_SECONDS
        asked, hung = subject.look(now)
        for process, reason in hung:
            assert reason
            found.setdefault(process, now)
        for process in asked:
            if process not in silent:
                since = (busy or {}).get(process)
                seconds = None if since is None else now - since
                subject.hear(process, now, busy_seconds=seconds, longest_seconds=longest)
    return found


@pytest.mark.parametrize(
    ("process", "seconds"),
    [
        (W, SILENT_SECONDS["worker"]),
        (C, SILENT_SECONDS["coordinator"]),
        (SPARE, SILENT_SECONDS["spare"]),
        (S, watch.STARTING_SERVER_SECONDS),
        (M, watch.MERGER_SECONDS),
    ],
    ids=str,
)
def test_the_silent_are_found_and_nobody_else(process: Identity, seconds: float) -> None:
    everybody = (W, S, C, SPARE, M)
    subject = begin(*everybody)
    found = live(subject, until=200.0, silent=[process])
    assert list(found) == [process]
    assert seconds <= found[process] <= seconds + watch.ASK_SECONDS + 2 * STEP_SECONDS


def test_a_server_that_serves_is_the_coordinators_business_for_as_long_as_the_user_says() -> None:
    subject = begin(S)
    subject.note_ready(S)
    (found,) = live(subject, until=200.0, silent=[S]).values()
    assert found >= subject.patience_seconds + watch.STARTING_SERVER_SECONDS


def test_who_never_answered_has_the_time_of_a_start() -> None:
    subject = Watch()
    subject.begin(W, 0.0)
    (found,) = live(subject, until=300.0, silent=[W]).values()
    assert watch.START_SECONDS_MAX <= found <= watch.START_SECONDS_MAX + 1.0


def test_a_successor_has_as_long_as_such_a_process_takes() -> None:
    subject = begin(C)
    heir = Identity(role="coordinator", id=0, incarnation=1)
    assert live(subject, until=5.0) == {}
    subject.end(C)
    subject.begin(heir, 5.0)
    (found,) = live(subject, start=5.0, until=300.0, silent=[heir]).values()
    assert watch.START_SECONDS_MIN <= found - 5.0 <= watch.START_SECONDS_MIN + 1.0


@pytest.mark.parametrize("longest", [0.1, 5.0])
def test_a_worker_stuck_in_a_step_is_found_by_how_long_steps_take(longest: float) -> None:
    subject = begin(W)
    found = live(subject, until=200.0, busy={W: 0.0}, longest=longest)
    limit = max(SILENT_SECONDS["worker"], watch.LONGEST_FACTOR * longest)
    assert limit <= found[W] <= limit + watch.ASK_SECONDS + 2 * STEP_SECONDS


def test_a_first_step_may_take_long() -> None:
    assert live(begin(W), until=watch.FIRST_SECONDS_MAX - 1.0, busy={W: 0.0}) == {}
    assert W in live(begin(W), until=watch.FIRST_SECONDS_MAX + 5.0, busy={W: 0.0})


def test_a_coordinator_whose_loop_does_not_turn_is_found() -> None:
    found = live(begin(C), until=60.0, busy={C: 20.0}, longest=0.06)
    assert 20.0 + SILENT_SECONDS["coordinator"] <= found[C] <= 27.0


def test_a_launcher_that_slept_holds_that_against_nobody() -> None:
    subject = begin(W, C, SPARE)
    assert live(subject, until=10.0) == {}
    assert subject.look(5000.0)[1] == []
    # Questions from before are still open; the answers are in the pipes, and are read now.
    assert live(subject, start=5000.0, until=5003.0) == {}


def test_what_a_spare_owes_it_owes_in_its_new_place() -> None:
    subject = begin(SPARE)
    assert live(subject, until=4.0, silent=[SPARE]) == {}
    assert subject.is_doubtful(SPARE, 4.0)
    subject.promote(SPARE, S)
    found = live(subject, start=4.0, until=60.0, silent=[S])
    assert found[S] <= watch.STARTING_SERVER_SECONDS + watch.ASK_SECONDS + 2 * STEP_SECONDS


def test_one_question_at_a_time() -> None:
    """A process that does not read must not find a full pipe."""
    subject = begin(W)
    asked = [subject.look(1.0 + 0.1 * turn)[0] for turn in range(50)]
    assert [who for each in asked for who in each] == [W]


# -- how users say it --------------------------------------------------------------------------------------


def test_servers_are_silent_by_default_as_the_coordinator_has_it() -> None:
    assert SILENT_SECONDS["server"] == coordinator.SILENT_SECONDS


@pytest.mark.parametrize(
    ("text", "changes"),
    [
        ("", {}),
        ("30", dict.fromkeys(SILENT_SECONDS, 30.0)),
        ("worker=30", {"worker": 30.0}),
        ("worker=3,", {"worker": 3.0}),
        (" worker = 1m , coordinator=10s", {"worker": 60.0, "coordinator": 10.0}),
        ("20,spare=2", {**dict.fromkeys(SILENT_SECONDS, 20.0), "spare": 2.0}),
    ],
)
def test_limits_are_parsed(text: str, changes: dict[str, float]) -> None:
    assert parse_silent(text) == {**SILENT_SECONDS, **changes}


@pytest.mark.parametrize("text", ["worker", "0", "0.1", "boss=3", "worker=", "worker=1e9", "-3"])
def test_limits_that_are_none(text: str) -> None:
    with pytest.raises(ValueError, match=r"is not|is none of"):
        parse_silent(text)
