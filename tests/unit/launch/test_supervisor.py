"""Goal: whoever dies is followed by the right one, or the right one is accused; and every order has its reason.

Method: events by hand, whole lists of orders compared. Small spaces are enumerated: every stance with every role and
every way to end; and all short sequences of deaths, after which the places must be held as they should.
"""

from __future__ import annotations

import itertools
import math
import signal
from collections.abc import Iterable

import pytest

from regrow.core.identity import Identity
from regrow.hanging import SILENT_SECONDS
from regrow.launch import supervisor
from regrow.launch.backend import Exit
from regrow.launch.orders import Ask, PeerDied
from regrow.launch.reports import Error
from regrow.launch.supervisor import (
    Accuse,
    Appoint,
    Event,
    GiveUp,
    Harm,
    KeepSpares,
    Kill,
    NoteEnd,
    NoteSuccessor,
    Order,
    Pause,
    ProcessAnswered,
    ProcessCondemned,
    ProcessEnded,
    ProcessFailed,
    ProcessFenced,
    ProcessMissed,
    Promote,
    Release,
    Resume,
    Stance,
    Start,
    Supervisor,
    TakeStance,
    Tell,
    Tick,
)
from regrow.launch.watch import Watch

OK, BAD, KILLED = Exit(code=0), Exit(code=7), Exit(code=-signal.SIGKILL)
LOST = Error(message="lost server 1", kind="lost")
BUG = Error(message="ZeroDivisionError", kind="bug")
PLACES = [("coordinator", 0), ("server", 0), ("server", 1), ("worker", 0)]


def who(role: str, id: int = 0, incarnation: int = 0) -> Identity:
    return Identity(role=role, id=id, incarnation=incarnation)


C, S0, S1, W0, M = who("coordinator"), who("server", 0), who("server", 1), who("worker"), who("merger")
SPARE, UNDERSTUDY = who("standby", 0), who("understudy", 0)


def staffed(stance: Stance = Stance.STRICT, *, replaces: bool = True, spares: int = 0) -> Supervisor:
    """A coordinator, two servers, a worker and a merger, at time 0; and spares, if any, which are there."""
    found = Supervisor(replaces=replaces)
    for role, id in (*PLACES, ("merger", 0)):
        assert found.receive(Appoint(role=role, id=id, now=0.0)) == [Start(who=who(role, id))]
    found.receive(TakeStance(stance=stance))
    if spares:
        assert found.receive(KeepSpares(count=spares, now=0.0)) == []
        assert feed(found, [Tick(now=0.0)]) == [Start(who=who("standby", id)) for id in range(spares)]
    return found


def feed(subject: Supervisor, events: Iterable[Event]) -> list[Order]:
    """All orders but questions, which are watched over in test_watch.py."""
    orders = [order for event in events for order in subject.receive(event)]
    return [order for order in orders if not (isinstance(order, Tell) and isinstance(order.command, Ask))]


def ended(process: Identity, exit: Exit = KILLED, *, now: float = 5.0) -> ProcessEnded:
    return ProcessEnded(who=process, exit=exit, now=now)


def died(process: Identity) -> Tell:
    return Tell(who=C, command=PeerDied(peer=process))


def succession(process: Identity, *, reason: str = "was killed by SIGKILL", at: float = 5.0) -> NoteSuccessor:
    return NoteSuccessor(who=process, heir=supervisor.next_incarnation(process), reason=reason, died_at=at)


# -- deaths ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("process", [C, S0, S1, W0], ids=str)
@pytest.mark.parametrize("exit", [OK, BAD, KILLED], ids=str)
@pytest.mark.parametrize("stance", Stance, ids=lambda stance: stance.value)
def test_what_an_end_means(stance: Stance, exit: Exit, process: Identity) -> None:
    orders = staffed(stance).receive(ended(process, exit))
    if stance is Stance.REPLACING:
        heir = supervisor.next_incarnation(process)
        death = [] if process == C else [died(process)]
        wanted = [NoteEnd(who=process), succession(process, reason=str(exit)), *death, Start(who=heir)]
    elif stance is Stance.STOPPING and exit == OK:
        wanted = [NoteEnd(who=process)]
    else:
        wanted = [NoteEnd(who=process), Accuse(who=process, exit=exit)]
    assert orders == wanted


@pytest.mark.parametrize("stance", Stance, ids=lambda stance: stance.value)
def test_a_merger_is_started_again_and_nobody_is_blamed(stance: Stance) -> None:
    again = [] if stance is Stance.STOPPING else [Start(who=who("merger", 0, 1))]
    assert staffed(stance).receive(ended(M)) == again


def test_a_merger_that_dies_again_and_again_is_left_alone() -> None:
    subject, merger = staffed(), M
    for _ in range(supervisor.RESTARTS_MAX):
        assert subject.receive(ended(merger)) == [Start(who=supervisor.next_incarnation(merger))]
        merger = supervisor.next_incarnation(merger)
    assert subject.receive(ended(merger)) == []


def test_a_server_is_followed_by_a_spare() -> None:
    subject = staffed(Stance.REPLACING, spares=1)
    heir = who("server", 1, 1)
    assert subject.receive(ended(S1)) == [
        NoteEnd(who=S1),
        succession(S1),
        died(S1),
        Promote(spare=SPARE, who=heir),
    ]
    assert subject.current("server", 1) == heir
    # The next one has none to follow it yet.
    assert subject.receive(ended(heir))[-1] == Start(who=who("server", 1, 2))


def test_only_servers_are_followed_by_spares() -> None:
    for process in (C, W0):
        assert staffed(Stance.REPLACING, spares=1).receive(ended(process))[-1] == Start(
            who=supervisor.next_incarnation(process)
        )


def test_a_new_coordinator_is_told_again_who_died() -> None:
    subject = staffed(Stance.REPLACING)
    feed(subject, [ended(S1), ended(W0)])
    second = who("coordinator", 0, 1)
    assert subject.receive(ended(C)) == [
        NoteEnd(who=C),
        succession(C),
        Start(who=second),
        Tell(who=second, command=PeerDied(peer=S1)),
    ]
    assert subject.receive(ended(S0))[2] == Tell(who=second, command=PeerDied(peer=S0))


def test_the_dead_do_not_count() -> None:
    subject = staffed(Stance.REPLACING, spares=1)
    assert [subject.counts(process) for process in (S1, who("server", 1, 1), SPARE)] == [True, False, True]
    subject.receive(ended(S1))
    assert [subject.counts(process) for process in (S1, who("server", 1, 1), SPARE)] == [False, True, False]
    assert subject.receive(ended(S1)) == []


@pytest.mark.parametrize("length", [1, 2, 3])
def test_every_order_of_deaths_leaves_every_place_held(length: int) -> None:
    """Each place by the incarnation after the last that died; each death is told to the coordinator of that time."""
    for deaths in itertools.product(PLACES, repeat=length):
        subject = staffed(Stance.REPLACING, spares=1)
        for role, id in deaths:
            process, coordinator = subject.current(role, id), subject.current("coordinator", 0)
            orders = subject.receive(ended(process))
            told = [order for order in orders if isinstance(order, Tell) and order.command == PeerDied(peer=process)]
            assert told == ([] if role == "coordinator" else [Tell(who=coordinator, command=PeerDied(peer=process))])
            (heir,) = [order.who for order in orders if isinstance(order, Start | Promote)]
            assert heir == supervisor.next_incarnation(process)
        for role, id in PLACES:
            assert subject.current(role, id).incarnation == deaths.count((role, id))


# -- who is given up ---------------------------------------------------------------------------------------


def test_who_dies_too_often_is_accused() -> None:
    subject, process = staffed(Stance.REPLACING), S1
    for number in range(supervisor.RESTARTS_MAX):
        assert Start(who=supervisor.next_incarnation(process)) in subject.receive(ended(process, now=float(number)))
        process = supervisor.next_incarnation(process)
    refusal = "server 1 died 6 times within 60 s"
    accusation = Accuse(who=process, exit=KILLED, refusal=refusal)
    assert subject.receive(ended(process, now=10.0)) == [NoteEnd(who=process), accusation]


def test_old_deaths_are_forgotten() -> None:
    subject, process = staffed(Stance.REPLACING), S1
    for number in range(4 * supervisor.RESTARTS_MAX):
        now = number * supervisor.RESTARTS_SECONDS / supervisor.RESTARTS_MAX
        assert not any(isinstance(order, Accuse) for order in subject.receive(ended(process, now=now)))
        process = supervisor.next_incarnation(process)


def test_deaths_on_purpose_do_not_count() -> None:
    subject, process = staffed(Stance.REPLACING), S1
    for _ in range(4 * supervisor.RESTARTS_MAX):
        assert subject.receive(Harm(role="server", id=1, now=4.0)) == [Kill(who=process, reason="on purpose")]
        assert succession(process, at=4.0) in subject.receive(ended(process))
        process = supervisor.next_incarnation(process)


def test_who_is_taken_for_dead_too_often_ends_the_run() -> None:
    subject, process = staffed(Stance.REPLACING), S1
    for _ in range(supervisor.REPLACEMENTS_MAX):
        subject.receive(ProcessMissed(who=process, reason="silent", now=5.0))
        process = supervisor.next_incarnation(process)
    why = "server 1 counted as dead 21 times within 60 s; the last time: silent"
    assert subject.receive(ProcessMissed(who=process, reason="silent", now=5.0)) == [GiveUp(who=process, reason=why)]


# -- who is missed -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("stance", Stance, ids=lambda stance: stance.value)
def test_what_the_coordinators_wish_means(stance: Stance) -> None:
    orders = staffed(stance).receive(ProcessMissed(who=S1, reason="silent", now=5.0))
    heir = who("server", 1, 1)
    wanted: dict[Stance, list[Order]] = {
        Stance.LOADING: [Kill(who=S1, reason="silent")],
        Stance.REPLACING: [
            Kill(who=S1, reason="silent"),
            NoteEnd(who=S1),
            NoteSuccessor(who=S1, heir=heir, reason="silent", died_at=5.0, counts_as_dead=True),
            died(S1),
            Start(who=heir),
        ],
    }
    assert orders == wanted.get(stance, [])


def test_a_wish_that_comes_twice_is_one() -> None:
    subject = staffed(Stance.REPLACING)
    wish = ProcessMissed(who=S1, reason="silent", now=5.0)
    assert subject.receive(wish) != []
    assert subject.receive(wish) == []
    assert subject.receive(ended(S1)) == []  # its end is no news
    assert subject.receive(ProcessMissed(who=who("server", 9), reason="silent", now=5.0)) == []


def test_one_that_is_paused_comes_back_as_a_zombie() -> None:
    subject = staffed(Stance.REPLACING)
    assert subject.receive(Harm(role="server", id=1, now=4.0, pause_seconds=3.0)) == [Pause(who=S1)]
    orders = subject.receive(ProcessMissed(who=S1, reason="silent", now=5.0))
    assert [type(order) for order in orders] == [NoteEnd, NoteSuccessor, Tell, Start], "it is not killed"
    assert orders[1].died_at == 4.0  # type: ignore[union-attr]
    assert feed(subject, [Tick(now=6.9)]) == []
    assert feed(subject, [Tick(now=7.0)]) == [Resume(who=S1)]
    assert not subject.counts(S1)
    assert subject.receive(ProcessFenced(who=S1)) == []
    assert subject.receive(ended(S1, OK)) == []


def test_one_that_hangs_for_ever_is_ended_like_any_other() -> None:
    """A long run with many of them would have no memory left if they stayed."""
    subject = staffed(Stance.REPLACING)
    assert subject.receive(Harm(role="server", id=1, now=4.0, pause_seconds=math.inf)) == [Pause(who=S1)]
    orders = subject.receive(ProcessMissed(who=S1, reason="silent", now=5.5))
    assert orders[0] == Kill(who=S1, reason="silent")


def test_one_that_was_paused_in_vain_is_as_before() -> None:
    subject = staffed(Stance.REPLACING)
    subject.receive(Harm(role="server", id=1, now=4.0, pause_seconds=1.0))
    assert feed(subject, [Tick(now=5.0)]) == [Resume(who=S1)]
    assert succession(S1, at=9.0) in subject.receive(ended(S1, now=9.0))


# -- words -------------------------------------------------------------------------------------------------


def test_who_misses_another_is_followed_and_its_words_are_the_reason() -> None:
    subject = staffed(Stance.REPLACING)
    assert subject.receive(ProcessFailed(who=W0, words=LOST)) == []
    assert succession(W0, reason="lost server 1") in subject.receive(ended(W0, BAD))
    subject.receive(ProcessFenced(who=S0))
    assert succession(S0, reason="was taken for dead and replaced") in subject.receive(ended(S0, OK))


@pytest.mark.parametrize("stance", Stance, ids=lambda stance: stance.value)
@pytest.mark.parametrize("words", [LOST, BUG], ids=lambda words: words.kind)
def test_who_is_accused_by_its_own_words(stance: Stance, words: Error) -> None:
    """Once: its end is no news. And not those on whom nothing depends."""
    subject = staffed(stance, spares=0)
    survived = stance is Stance.REPLACING and words is LOST
    failed = ProcessFailed(who=W0, words=words)
    assert subject.receive(failed) == ([] if survived else [Accuse(who=W0, words=words)])
    if not survived:
        assert subject.receive(failed) == []
        assert subject.receive(ended(W0, BAD)) == [NoteEnd(who=W0)]
    assert subject.receive(ProcessFailed(who=M, words=words)) == []


@pytest.mark.parametrize("replaces", [False, True])
def test_deaths_that_would_have_been_survived_are_not_the_cause(replaces: bool) -> None:
    """Once somebody is accused nobody is followed any more; whoever dies then is a cause only where no death is
    survived."""
    subject = staffed(Stance.REPLACING if replaces else Stance.STRICT, replaces=replaces)
    subject.receive(ProcessFailed(who=W0, words=BUG))
    accused = [] if replaces else [Accuse(who=S1, exit=KILLED)]
    assert subject.receive(ended(S1)) == [NoteEnd(who=S1), *accused]
    assert subject.receive(ProcessMissed(who=S0, reason="silent", now=5.0)) == []


# -- spares ------------------------------------------------------------------------------------------------


def test_spares_wait_until_nothing_is_urgent() -> None:
    subject = staffed(Stance.REPLACING, spares=2)
    subject.receive(ended(S1, now=10.0))
    third = [Start(who=who("standby", 2))]
    due = 10.0 + supervisor.SPARE_SECONDS
    assert feed(subject, [Tick(now=due - 0.1)]) == []
    assert feed(subject, [Tick(now=due, busy=True)]) == []
    assert feed(subject, [Tick(now=due + supervisor.SPARE_SECONDS_MAX, busy=True)]) == third
    assert feed(subject, [Tick(now=1000.0)]) == []


@pytest.mark.parametrize("stance", Stance, ids=lambda stance: stance.value)
def test_the_first_spares_are_started_while_the_run_loads(stance: Stance) -> None:
    subject = staffed(stance)
    first = [] if stance is Stance.STOPPING else [Start(who=SPARE)]
    assert feed(subject, [KeepSpares(count=1, now=0.0), Tick(now=9.0)]) == first
    later = [Start(who=SPARE)] if stance is Stance.STOPPING else []
    assert feed(subject, [TakeStance(stance=Stance.REPLACING), Tick(now=9.0)]) == later
    # Asked again, or for fewer, changes nothing.
    assert feed(subject, [KeepSpares(count=1, now=9.0), KeepSpares(count=0, now=9.0), Tick(now=10.0)]) == []


@pytest.mark.parametrize("stance", [Stance.STRICT, Stance.LOADING], ids=lambda stance: stance.value)
def test_a_spare_that_is_lost_is_started_again_where_it_can_be_needed(stance: Stance) -> None:
    subject = staffed(stance)
    assert feed(subject, [KeepSpares(count=1, now=0.0), Tick(now=0.0)]) == [Start(who=SPARE)]
    assert feed(subject, [ended(SPARE, now=1.0), Tick(now=50.0)]) == []
    assert feed(subject, [TakeStance(stance=Stance.REPLACING), Tick(now=51.0)]) == [Start(who=who("standby", 1))]


def rehearsed() -> Supervisor:
    """A spare for servers and one for workers, which was started when the first steps were over."""
    subject = staffed(Stance.REPLACING)
    assert feed(subject, [KeepSpares(count=1, workers=1, now=0.0), Tick(now=0.0)]) == [Start(who=SPARE)]
    first = supervisor.FIRST_SPARE_WORKER_SECONDS
    assert feed(subject, [Tick(now=first - 0.1)]) == []
    assert feed(subject, [Tick(now=first)]) == [Start(who=UNDERSTUDY)]
    for spare in (SPARE, UNDERSTUDY):
        assert subject.receive(ProcessAnswered(who=spare, now=first)) == []
    return subject


def test_each_role_has_spares_of_its_own() -> None:
    subject = rehearsed()
    heir = who("worker", 0, 1)
    promoted = [died(W0), Promote(spare=UNDERSTUDY, who=heir)]
    assert subject.receive(ended(W0, now=12.0)) == [NoteEnd(who=W0), succession(W0, at=12.0), *promoted]
    # No other spare of workers is there yet, and that of servers has not what a worker needs.
    fresh = [NoteEnd(who=heir), succession(heir, at=12.5), died(heir), Start(who=who("worker", 0, 2))]
    assert subject.receive(ended(heir, now=12.5)) == fresh
    assert feed(subject, [Tick(now=12.5 + supervisor.SPARE_SECONDS)]) == [Start(who=who("understudy", 1))]
    promoted = [died(S0), Promote(spare=SPARE, who=who("server", 0, 1))]
    assert subject.receive(ended(S0, now=14.0)) == [NoteEnd(who=S0), succession(S0, at=14.0), *promoted]


def test_a_spare_worker_that_hangs_is_ended_and_another_is_started() -> None:
    subject = rehearsed()
    others = (C, S0, S1, W0, M, SPARE)
    hung = [Kill(who=UNDERSTUDY, reason="has not answered for 10 s")]
    assert live(subject, *others, start=10.0, until=40.0) == hung
    assert live(subject, *others, start=22.0, until=40.0) == [Start(who=who("understudy", 1))]
    heir = Promote(spare=who("understudy", 1), who=who("worker", 0, 1))
    assert subject.receive(ended(W0, now=25.0))[-1] == heir


def test_spares_that_fail_are_given_up() -> None:
    subject, now, started = staffed(Stance.REPLACING, spares=1), 0.0, 1
    while started < 100:
        now += 60.0
        assert subject.receive(ended(who("standby", started - 1), BAD, now=now)) == []
        if feed(subject, [Tick(now=now + supervisor.SPARE_SECONDS)]) == []:
            break
        started += 1
    assert started == supervisor.SPARES_FAILED_MAX
    assert subject.receive(ended(S1))[-1] == Start(who=who("server", 1, 1))


# -- the end -----------------------------------------------------------------------------------------------


def test_release_ends_zombies_and_wakes_the_paused() -> None:
    subject = staffed(Stance.REPLACING)
    feed(subject, [Harm(role="server", id=id, now=4.0, pause_seconds=99.0) for id in range(2)])
    subject.receive(ProcessMissed(who=S1, reason="silent", now=5.0))
    assert subject.receive(Release()) == [Kill(who=S1, reason="another is in its place"), Resume(who=S0)]
    subject.receive(ended(S1))
    assert subject.receive(Release()) == []
    assert feed(subject, [Tick(now=1000.0)]) == []


# -- those that hang ---------------------------------------------------------------------------------------


def answer(*processes: Identity, now: float) -> list[Event]:
    return [ProcessAnswered(who=process, now=now) for process in processes]


def live(subject: Supervisor, *answering: Identity, start: float = 0.0, until: float) -> list[Order]:
    """Four looks a second; these answer, the others are silent. Returns at the first order that is no question."""
    now = start
    while now < until:
        now += 0.25
        if orders := feed(subject, [Tick(now=now), *answer(*answering, now=now)]):
            return orders
    return []


def test_a_hung_spare_is_replaced_and_has_no_place() -> None:
    subject = staffed(Stance.REPLACING, spares=1)
    feed(subject, [Tick(now=0.25), *answer(C, S0, S1, W0, M, SPARE, now=0.25)])
    orders = live(subject, C, S0, S1, W0, M, start=0.25, until=20.0)
    assert orders == [Kill(who=SPARE, reason="has not answered for 5 s")]
    assert live(subject, C, S0, S1, W0, M, start=7.0, until=20.0) == [Start(who=who("standby", 1))]


def test_a_spare_that_owes_an_answer_follows_nobody() -> None:
    subject = staffed(Stance.REPLACING, spares=1)
    feed(subject, [Tick(now=0.25), *answer(C, S0, S1, W0, M, SPARE, now=0.25)])
    assert live(subject, C, S0, S1, W0, M, start=0.25, until=4.5) == []
    assert subject.receive(ended(S0))[-1] == Start(who=who("server", 0, 1))


def test_a_spare_that_hangs_after_it_took_a_place_is_followed_itself() -> None:
    subject = staffed(Stance.REPLACING, spares=1)
    feed(subject, [Tick(now=0.25), *answer(C, S0, S1, W0, M, SPARE, now=0.25)])
    heir = who("server", 0, 1)
    assert subject.receive(ended(S0, now=0.5))[-1] == Promote(spare=SPARE, who=heir)
    orders = live(subject, C, S1, W0, M, start=0.5, until=30.0)
    assert orders == [Start(who=who("standby", 1))]
    orders = live(subject, C, S1, W0, M, who("standby", 1), start=1.5, until=30.0)
    assert orders[0] == Kill(who=heir, reason="has not answered for 10 s")
    assert orders[-1] == Promote(spare=who("standby", 1), who=who("server", 0, 2))


@pytest.mark.parametrize("process", [C, W0], ids=str)
def test_a_hung_process_is_followed_like_a_dead_one(process: Identity) -> None:
    subject = staffed(Stance.REPLACING)
    everybody = [C, S0, S1, W0, M]
    feed(subject, [Tick(now=0.25), *answer(*everybody, now=0.25)])
    orders = live(subject, *(each for each in everybody if each != process), start=0.25, until=60.0)
    assert isinstance(orders[0], Kill) and orders[0].who == process
    assert Start(who=supervisor.next_incarnation(process)) in orders


@pytest.mark.parametrize("stance", [Stance.STRICT, Stance.LOADING], ids=lambda stance: stance.value)
def test_where_a_death_ends_the_run_so_does_a_hung_process(stance: Stance) -> None:
    subject = staffed(stance)
    feed(subject, [Tick(now=0.25), *answer(C, S0, S1, W0, M, now=0.25)])
    (kill,) = live(subject, C, S0, S1, M, start=0.25, until=60.0)
    assert kill == Kill(who=W0, reason="worker 0 has not answered for 10 s")
    accusation = Accuse(who=W0, exit=KILLED, refusal="worker 0 has not answered for 10 s")
    assert subject.receive(ended(W0, now=12.0)) == [NoteEnd(who=W0), accusation]


def test_whom_the_coordinator_gives_up_is_killed_and_its_end_is_told() -> None:
    subject = staffed(Stance.REPLACING)
    condemned = ProcessCondemned(who=S0, reason="silent for 61.5 s, and waited for in vain for 60 s", now=5.0)
    (kill,) = subject.receive(condemned)
    assert isinstance(kill, Kill) and kill.who == S0
    assert subject.receive(condemned) == []
    orders = subject.receive(ended(S0, now=5.1))
    assert died(S0) in orders and Start(who=who("server", 0, 1)) in orders


def test_one_that_cannot_be_killed_is_not_waited_for() -> None:
    subject = staffed(Stance.REPLACING)
    everybody = [C, S0, S1, W0, M]
    feed(subject, [Tick(now=0.25), *answer(*everybody, now=0.25)])
    subject.receive(ProcessCondemned(who=S0, reason="silent", now=1.0))
    orders = live(subject, *everybody, start=1.0, until=1.0 + supervisor.KILL_SECONDS_MAX + 0.5)
    assert died(S0) in orders and Start(who=who("server", 0, 1)) in orders
    assert subject.receive(ended(S0, now=99.0)) == []  # it ends at last, and nobody cares


def test_a_spare_that_was_paused_on_purpose_keeps_that_in_its_new_place() -> None:
    subject = staffed(Stance.REPLACING, spares=1)
    feed(subject, [Tick(now=0.25), *answer(C, S0, S1, W0, M, SPARE, now=0.25)])
    assert subject.receive(Harm(role="standby", id=0, now=0.3, pause_seconds=30.0)) == [Pause(who=SPARE)]
    subject.receive(ended(S0, now=0.5))
    heir = who("server", 0, 1)
    spare = who("standby", 1)
    orders = live(subject, C, S1, W0, M, spare, start=0.5, until=1.75)
    assert orders == [Start(who=spare)]
    orders = live(subject, C, S1, W0, M, spare, start=1.75, until=25.0)
    assert not any(isinstance(order, Kill) for order in orders), "it was paused on purpose, and comes back a zombie"
    assert orders[-1] == Promote(spare=spare, who=who("server", 0, 2))
    answering = (C, S1, W0, M, who("server", 0, 2), who("standby", 2))
    orders = [order for at in (14.0, 20.0, 31.0) for order in live(subject, *answering, start=at, until=at + 3.0)]
    assert Resume(who=heir) in orders


def test_a_spare_and_a_server_that_hang_at_once() -> None:
    """The spare is not given the place, however short the user's limits are; and it is lost once."""
    watch = Watch(silent_seconds={**SILENT_SECONDS, "spare": 1.0, "coordinator": 1.0}, starting_server_seconds=1.0)
    subject = Supervisor(replaces=True, watch=watch)
    for role, id in PLACES:
        subject.receive(Appoint(role=role, id=id, now=0.0))
    feed(subject, [TakeStance(stance=Stance.REPLACING), KeepSpares(count=1, now=0.0), Tick(now=0.0), Tick(now=0.1)])
    feed(subject, answer(C, S0, S1, W0, SPARE, now=0.1))
    orders = live(subject, C, S1, W0, start=0.1, until=9.0)
    assert Start(who=who("server", 0, 1)) in orders
    assert [order.who for order in orders if isinstance(order, Kill)] == [S0, SPARE]
