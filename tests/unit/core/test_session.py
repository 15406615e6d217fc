"""Goal: a worker's wishes reach the right servers, and what it still needs is kept exactly as long as needed.

Method: a session alone, with plans written by hand; servers are played by the test, so every order of answers
can be tried. Two servers are enough to see that all of them are waited for.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
from helpers import COORDINATOR, HandPlan, arrays, job, plain, plan_of, server, table, told, view, worker

from regrow.core import session as session_module
from regrow.core.effects import Delivered, Joined, Lost, Send
from regrow.core.identity import Identity
from regrow.core.job import JobSpec
from regrow.core.messages import (
    Assign,
    Commit,
    Durable,
    Expect,
    Member,
    Message,
    Open,
    Opened,
    Pull,
    Push,
    Pushed,
    ReadRecords,
    Records,
    RecordsWritten,
    Rows,
    View,
    WriteRecords,
)
from regrow.core.protection import FlushSpec
from regrow.core.session import (
    CLOCKS_KEPT_MAX,
    AssignWanted,
    Connect,
    ExpectWanted,
    Failed,
    PullAnswered,
    PullWanted,
    PushDurable,
    PushReceived,
    PushWanted,
    ReadAnswered,
    ReadWanted,
    Session,
    SessionOpened,
    WriteAnswered,
    WriteWanted,
)
from regrow.errors import ProtocolError

S0, S1 = server(0), server(1)
TWO = job(servers=2)  # row i of the one table is on server i % 2, slot i // 2
SYNC = job(servers=2, mode="sync")
TWO_PHASES = job(table(k=1, r=1), servers=2, flush=FlushSpec(commit="2pc"))


def hear(session: Session, source: Identity, message: Message) -> list[Any]:
    return told(session.receive(Delivered(source=source, message=message)))


def opened(of: JobSpec = TWO) -> Session:
    session = Session()
    session.receive(Delivered(source=COORDINATOR, message=view(of)))
    for index in range(of.servers):
        session.receive(Joined(peer=server(index)))
    for index in range(of.servers):
        hear(session, server(index), Opened(durable=0, committed=0))
    return session


def pull_wanted(request: int, *, step: int = 1, rows: tuple[int, ...] = (0, 1, 3)) -> PullWanted:
    plan = plan_of(TWO, [rows])
    return PullWanted(request=request, step=step, plan=plan, rows=np.full(plan.floats, np.nan, np.float32))


def push_wanted(seq: int, *, request: int = 0, rows: tuple[int, ...] = (0, 1, 3)) -> PushWanted:
    plan = plan_of(TWO, [rows])
    return PushWanted(seq=seq, request=request, plan=plan, grads=np.arange(plan.floats, dtype=np.float32))


def sent(target: Identity, message: Message) -> tuple[str, str, Any]:
    return "send", str(target), plain(message)


def rows(request: int, values: list[float], *, durable: int = 0, clock: int = 0) -> Rows:
    return Rows(request=request, durable=durable, clock=clock, **arrays(rows=values))


def pushed(seq: int, *, durable: int = 0, clock: int = 0) -> Pushed:
    return Pushed(seq=seq, durable=durable, clock=clock)


# --- Opening ---


def test_a_session_opens_when_every_server_knows_the_worker() -> None:
    session = Session()
    first = view(TWO)
    assert session.receive(Delivered(source=COORDINATOR, message=first)) == [Connect(view=first)]
    assert told(session.receive(Joined(peer=S1))) == [sent(S1, Open())]
    assert told(session.receive(Joined(peer=S0))) == [sent(S0, Open())]
    assert hear(session, S1, Opened(durable=7, committed=3)) == []
    assert hear(session, S0, Opened(durable=5, committed=4)) == [SessionOpened(durable=5, committed=4)]


def test_joining_a_coordinator_or_an_old_incarnation_says_nothing() -> None:
    session = Session()
    assert session.receive(Joined(peer=COORDINATOR)) == []
    session.receive(Delivered(source=COORDINATOR, message=view(TWO)))
    assert session.receive(Joined(peer=server(0, incarnation=1))) == []


# --- Pulls ---


def test_a_pull_asks_every_server_for_its_part_also_for_nothing() -> None:
    session = opened()
    assert told(session.receive(pull_wanted(1, step=4, rows=(4, 0, 2)))) == [
        sent(S0, Pull(request=1, step=4, **arrays(counts=[3], slots=[2, 0, 1]))),
        sent(S1, Pull(request=1, step=4, **arrays(counts=[0], slots=[]))),
    ]


def test_tables_follow_each_other_within_a_server() -> None:
    of = job(table("a"), table("b", dim=1), servers=2)
    session = opened(of)
    plan = plan_of(of, [[0, 1], [0, 1, 2]])  # table 1 starts one server further
    wanted = PullWanted(request=1, step=1, plan=plan, rows=np.zeros(plan.floats, np.float32))
    assert told(session.receive(wanted)) == [
        sent(S0, Pull(request=1, step=1, **arrays(counts=[1, 1], slots=[0, 0]))),
        sent(S1, Pull(request=1, step=1, **arrays(counts=[1, 2], slots=[0, 0, 1]))),
    ]


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_a_pull_is_answered_when_the_last_server_has_answered(order: tuple[int, ...]) -> None:
    session = opened()
    wanted = pull_wanted(1)
    session.receive(wanted)
    answers = [rows(1, [1, 2]), rows(1, [3, 4, 5, 6])]
    assert hear(session, server(order[0]), answers[order[0]]) == []
    assert hear(session, server(order[1]), answers[order[1]]) == [PullAnswered(request=1)]
    assert wanted.rows.tolist() == [1, 2, 3, 4, 5, 6]
    # Late copies are nobody's.
    assert hear(session, S0, rows(1, [9, 9])) == []
    assert wanted.rows.tolist() == [1, 2, 3, 4, 5, 6]


def test_rows_go_straight_to_where_they_are_wanted() -> None:
    session = opened()
    wanted = pull_wanted(1)
    session.receive(wanted)
    place = session.destination(S1, 1, 4)
    assert place is not None
    assert np.shares_memory(place, wanted.rows[2:])
    place[:] = [3, 4, 5, 6]
    hear(session, S1, Rows(request=1, durable=0, clock=0, rows=place))
    assert hear(session, S0, rows(1, [1, 2])) == [PullAnswered(request=1)]
    assert wanted.rows.tolist() == [1, 2, 3, 4, 5, 6]


def test_nobody_waits_there() -> None:
    session = opened()
    session.receive(pull_wanted(1))
    hear(session, S0, rows(1, [1, 2]))
    assert session.destination(S0, 1, 2) is None, "answered already"
    assert session.destination(S1, 2, 4) is None, "no such request"
    assert session.destination(S1, 1, 3) is None, "of another size"
    assert session.destination(server(2), 1, 4) is None, "no such server"
    assert session.destination(worker(1), 1, 4) is None, "not a server"


def test_an_answer_of_the_wrong_size_is_an_error() -> None:
    session = opened()
    session.receive(pull_wanted(1))
    with pytest.raises(ProtocolError, match="S0 answered 3 values, 2 were asked for"):
        hear(session, S0, rows(1, [1, 2, 3]))


def test_several_pulls_may_be_under_way() -> None:
    session = opened()
    first, second = pull_wanted(1), pull_wanted(2, step=2)
    session.receive(first)
    session.receive(second)
    assert hear(session, S0, rows(2, [1, 1])) == []
    assert hear(session, S1, rows(2, [1, 1, 1, 1])) == [PullAnswered(request=2)]
    assert hear(session, S1, rows(1, [0, 0, 0, 0])) == []
    assert hear(session, S0, rows(1, [0, 0])) == [PullAnswered(request=1)]


# --- Pushes and the redo log ---


def test_a_push_goes_to_every_server_out_of_the_callers_memory() -> None:
    session = opened()
    wanted = push_wanted(1, rows=(1, 3))
    effects = session.receive(wanted)
    assert told(effects) == [
        sent(S0, Push(seq=1, **arrays(counts=[0], slots=[], grads=[]))),
        sent(S1, Push(seq=1, **arrays(counts=[2], slots=[0, 1], grads=[0, 1, 2, 3]))),
    ]
    assert np.shares_memory(effects[1].message.grads, wanted.grads)  # type: ignore[union-attr]


def test_a_push_that_is_sent_again_keeps_its_learning_rates() -> None:
    session = opened(TWO_PHASES)
    for seq, rate in ((1, 0.5), (2, 0.25)):
        session.receive(dataclasses.replace(push_wanted(seq), rates=(rate,)))
    hear(session, COORDINATOR, replaced(TWO_PHASES, index=0))
    effects = session.receive(Joined(peer=server(0, incarnation=1)))
    again = [each.message for each in effects if isinstance(each, Send) and isinstance(each.message, Push)]
    assert [(push.seq, push.rates) for push in again] == [(1, (0.5,)), (2, (0.25,))]


def test_a_push_is_kept_until_every_server_has_it_durably() -> None:
    session = opened()
    for seq in (1, 2):
        session.receive(push_wanted(seq))
    assert (session.redo_bytes, session.redo_bytes_peak) == (48, 48)
    assert hear(session, S0, pushed(1, durable=0)) == []
    assert hear(session, S0, pushed(2, durable=2)) == []
    assert hear(session, S1, pushed(1, durable=0)) == [PushReceived(seq=1, staleness=0.0)]
    assert session.redo_bytes == 48, "the second server has received it, but may lose it"
    assert hear(session, S1, pushed(2, durable=1)) == [
        PushReceived(seq=2, staleness=0.0),
        PushDurable(seq=1),
    ]
    assert session.redo_bytes == 24
    # Any answer carries the watermark, not only that of the push.
    session.receive(pull_wanted(5, step=0))
    assert hear(session, S1, rows(5, [0, 0, 0, 0], durable=2)) == [PushDurable(seq=2)]
    assert (session.redo_bytes, session.redo_bytes_peak) == (0, 48)


def test_what_is_durable_was_received() -> None:
    """A watermark may arrive with another answer, before the push's own: it says all there is to say."""
    session = opened()
    session.receive(push_wanted(1))
    hear(session, S0, pushed(1, durable=1))
    session.receive(pull_wanted(2, step=0))
    assert hear(session, S1, rows(2, [0, 0, 0, 0], durable=1)) == [PushDurable(seq=1)]
    assert hear(session, S1, pushed(1, durable=1)) == []


def test_a_watermark_does_not_fall() -> None:
    session = opened()
    session.receive(push_wanted(1))
    hear(session, S0, pushed(1, durable=1))
    hear(session, S0, pushed(1, durable=0))
    assert hear(session, S1, pushed(1, durable=1))[-1] == PushDurable(seq=1)


def test_repeated_acknowledgements_count_once() -> None:
    session = opened()
    session.receive(push_wanted(1))
    for _ in range(3):
        assert hear(session, S0, pushed(1)) == []
    assert hear(session, S1, pushed(1)) == [PushReceived(seq=1, staleness=0.0)]
    assert hear(session, S1, pushed(1)) == []
    assert hear(session, S1, pushed(99)) == [], "a push nobody made"


def test_staleness_is_what_others_did_between_pull_and_push() -> None:
    session = opened()
    session.receive(pull_wanted(1))
    hear(session, S0, rows(1, [0, 0], clock=10))
    hear(session, S1, rows(1, [0, 0, 0, 0], clock=20))
    session.receive(push_wanted(1, request=1))
    hear(session, S0, pushed(1, clock=14))  # 11, 12 and 13 were others'
    assert hear(session, S1, pushed(1, clock=21)) == [PushReceived(seq=1, staleness=1.5)]


def test_a_caller_that_never_pushes_does_not_grow_the_session() -> None:
    session = opened()
    for request in range(1, CLOCKS_KEPT_MAX + 50):
        session.receive(pull_wanted(request, rows=()))
        hear(session, S0, rows(request, []))
        assert hear(session, S1, rows(request, [])) == [PullAnswered(request=request)]
    assert len(session._clocks) == CLOCKS_KEPT_MAX
    assert not session._pulls


# --- Synchronous mode ---


def test_the_next_pull_leaves_when_every_server_has_staged_the_push() -> None:
    session = opened(SYNC)
    session.receive(pull_wanted(1, step=1))
    hear(session, S0, rows(1, [0, 0]))
    hear(session, S1, rows(1, [0, 0, 0, 0]))
    assert len(session.receive(push_wanted(1, request=1))) == 2
    assert session.receive(pull_wanted(2, step=2)) == []
    # Reading takes part in nothing, but does not overtake either.
    assert session.receive(pull_wanted(3, step=0)) == []
    assert hear(session, S1, pushed(1)) == []
    staged = hear(session, S0, pushed(1))
    assert staged[0] == PushReceived(seq=1, staleness=0.0)
    assert [(effect[1], effect[2][1]["step"]) for effect in staged[1:]] == [
        ("S0", 2),
        ("S1", 2),
        ("S0", 0),
        ("S1", 0),
    ]
    assert hear(session, S0, rows(2, [0, 0], durable=1)) == []
    answered = hear(session, S1, rows(2, [0, 0, 0, 0], durable=1))
    assert answered == [PushDurable(seq=1), PullAnswered(request=2)]
    assert session.redo_bytes == 0


def test_an_asynchronous_pull_does_not_wait() -> None:
    session = opened(TWO)
    session.receive(push_wanted(1))
    assert len(session.receive(pull_wanted(2, step=2))) == 2


# --- Assign, dump, load ---


def test_assign() -> None:
    session = opened()
    plan: HandPlan = plan_of(TWO, [[1]])
    assert told(session.receive(AssignWanted(plan=plan, **arrays(weights=[1, 2])))) == [
        sent(S0, Assign(**arrays(counts=[0], slots=[], weights=[]))),
        sent(S1, Assign(**arrays(counts=[1], slots=[0], weights=[1, 2]))),
    ]


def test_dump_and_load() -> None:
    session = opened()
    dump = {"request": 3, "table": 0, "slot_first": 1, "slot_count": 2}
    assert told(session.receive(ReadWanted(server=1, **dump))) == [sent(S1, ReadRecords(**dump))]
    values = arrays(records=[1, 2, 0, 0, 3, 4, 0, 0])["records"]
    with pytest.raises(ProtocolError, match="S1 answered 7 values for 2 records"):
        hear(session, S1, Records(request=3, records=values[:7]))
    assert hear(session, S0, Records(request=3, records=values)) == [], "it was not asked"
    answered = session.receive(Delivered(source=S1, message=Records(request=3, records=values)))
    assert [type(effect) for effect in answered] == [ReadAnswered]
    assert (answered[0].request, answered[0].records) == (3, values), "the very array: it is not copied"
    assert hear(session, S1, Records(request=3, records=values)) == []
    load = {"request": 4, "table": 0, **arrays(slots=[5], records=[1, 2, 3, 4])}
    assert told(session.receive(WriteWanted(server=0, **load))) == [sent(S0, WriteRecords(**load))]
    assert hear(session, S1, RecordsWritten(request=4)) == []
    assert hear(session, S0, RecordsWritten(request=4)) == [WriteAnswered(request=4)]


# --- A server is replaced ---


def replaced(of: JobSpec, *, index: int, epoch: int = 2) -> View:
    members = tuple(
        Member(id=m.id, incarnation=int(m.id == index), address=m.address, recovering=m.id == index)
        for m in view(of).servers
    )
    return View(epoch=epoch, servers=members, job=of)


def kinds(effects: list[Any]) -> list[tuple[str, str]]:
    """(message, to whom) of what is sent."""
    return [(effect[2][0], effect[1]) for effect in effects if isinstance(effect, tuple) and effect[0] == "send"]


def test_what_an_old_incarnation_staged_does_not_count() -> None:
    """Sync: the pull of step 2 says that step 1 is staged everywhere. A replacement has staged nothing yet."""
    session = opened(job(table(k=1, r=1), servers=2, mode="sync"))
    session.receive(push_wanted(1))
    hear(session, S0, pushed(1))
    hear(session, COORDINATOR, replaced(session.view.job, index=0))  # type: ignore[union-attr]
    hear(session, S1, pushed(1))
    assert told(session.receive(pull_wanted(2, step=2))) == [], "held"
    newer = server(0, incarnation=1)
    assert kinds(told(session.receive(Joined(peer=newer)))) == [("Push", "S0")]
    assert hear(session, S0, pushed(1)) == [], "of the one that is over"
    assert kinds(hear(session, newer, pushed(1))) == [("Pull", "S0"), ("Pull", "S1")]


def test_a_replacement_is_sent_what_is_not_durable_in_order_and_only_when_it_is_there() -> None:
    session = opened(job(table(k=1, r=1), servers=2))
    session.receive(push_wanted(1))
    session.receive(push_wanted(2))
    hear(session, S0, pushed(2, durable=1))
    session.receive(pull_wanted(5, step=3))
    effects = hear(session, COORDINATOR, replaced(session.view.job, index=0))  # type: ignore[union-attr]
    assert [type(effect).__name__ for effect in effects] == ["Forget", "Connect"]
    # Its link is not open: what is wanted meanwhile goes to the others, and to it behind what came before.
    assert kinds(told(session.receive(push_wanted(3)))) == [("Push", "S1")]
    joined = told(session.receive(Joined(peer=server(0, incarnation=1))))
    assert [(name, fields.get("seq")) for _, _, (name, fields) in joined] == [
        ("Push", 2),
        ("Push", 3),
        ("Pull", None),
    ]


def test_a_push_is_committed_when_every_server_has_answered_it_or_has_it_durable() -> None:
    """In two phases. S0 has it from the worker before this one, and dies: its replacement is never sent it."""
    session = opened(TWO_PHASES)
    hear(session, S0, Durable(durable=1))
    session.receive(push_wanted(1))
    hear(session, COORDINATOR, replaced(TWO_PHASES, index=0))
    assert told(session.receive(Joined(peer=server(0, incarnation=1)))) == []
    assert hear(session, S1, pushed(1)) == [
        sent(server(0, incarnation=1), Commit(seq=1)),
        sent(S1, Commit(seq=1)),
    ]
    assert hear(session, S1, Durable(durable=1)) == [PushDurable(seq=1)]


def test_a_push_is_committed_again_when_a_replacement_has_staged_it() -> None:
    session = opened(TWO_PHASES)
    session.receive(push_wanted(1))
    hear(session, S0, pushed(1))
    commits = [sent(S0, Commit(seq=1)), sent(S1, Commit(seq=1))]
    assert hear(session, S1, pushed(1)) == [PushReceived(seq=1, staleness=0.0), *commits]
    assert hear(session, S1, pushed(1)) == [], "once is enough"
    hear(session, COORDINATOR, replaced(TWO_PHASES, index=0))
    again = server(0, incarnation=1)
    assert kinds(told(session.receive(Joined(peer=again)))) == [("Push", "S0")]
    assert hear(session, S1, Durable(durable=0)) == [], "the replacement has not answered"
    assert hear(session, again, pushed(1)) == [sent(again, Commit(seq=1)), sent(S1, Commit(seq=1))]


def test_the_last_commit_is_told_again() -> None:
    """Sync: the pull after the last step was answered by all; a replacement that lacks the step must hear of it."""
    session = opened(job(table(k=1, r=1), servers=2, mode="sync"))
    session.receive(push_wanted(1))
    hear(session, S0, pushed(1))
    hear(session, S1, pushed(1))
    session.receive(pull_wanted(2, step=2))
    hear(session, S0, rows(2, [0, 0], durable=0))
    hear(session, S1, rows(2, [0, 0, 0, 0], durable=1))
    hear(session, COORDINATOR, replaced(session.view.job, index=0))  # type: ignore[union-attr]
    joined = told(session.receive(Joined(peer=server(0, incarnation=1))))
    assert kinds(joined) == [("Push", "S0"), ("Pull", "S0")]
    assert hear(session, server(0, incarnation=1), rows(2, [9, 9], durable=1)) == [], "answered before"
    assert hear(session, server(0, incarnation=1), Durable(durable=1)) == [PushDurable(seq=1)]


def test_only_a_replacement_is_told_which_rows_will_be_wanted_each_once() -> None:
    of = job(table("a", k=1, r=1), table("b", k=1, r=1), servers=2)
    session = opened(of)
    wanted = ExpectWanted(plans=(plan_of(of, [[4, 0, 2], [1]]), plan_of(of, [[2, 3], []]), plan_of(of, [[6], [3, 1]])))
    assert told(session.receive(wanted)) == [], "everybody has all rows"
    hear(session, COORDINATOR, replaced(of, index=0))
    assert told(session.receive(wanted)) == [], "it is not there yet"
    newer = server(0, incarnation=1)
    session.receive(Joined(peer=newer))
    assert told(session.receive(wanted)) == [sent(newer, Expect(**arrays(counts=[4, 2], slots=[0, 1, 2, 3, 0, 1])))]


def test_lost_rows_end_it() -> None:
    session = opened(job(table(k=1, r=1), servers=2))
    last = View(epoch=2, servers=view(TWO).servers, job=TWO, lost="S0, S1 are down together")
    assert hear(session, COORDINATOR, last) == [Failed(reason="S0, S1 are down together", data_loss=True)]


# --- What ends a session ---


def test_a_lost_server_ends_it() -> None:
    session = opened()
    assert session.receive(Lost(peer=S1, reason="it broke")) == [Failed(reason="lost S1: it broke")]


def test_a_lost_coordinator_ends_nothing() -> None:
    """It is dialled again, and learns what it must know from others."""
    assert Session().receive(Lost(peer=COORDINATOR, reason="x")) == []
    assert opened().receive(Lost(peer=COORDINATOR, reason="x")) == []
    assert opened().receive(Lost(peer=server(0, incarnation=9), reason="x")) == []


def test_without_parities_another_server_ends_it() -> None:
    session = opened()
    assert hear(session, COORDINATOR, view(TWO, epoch=2)) == [], "the same servers: no news"
    members = (Member(id=0, incarnation=1, address="a"), view(TWO).servers[1])
    effects = hear(session, COORDINATOR, View(epoch=2, servers=members, job=TWO))
    assert effects == []
    effects = hear(session, COORDINATOR, View(epoch=3, servers=members, job=TWO))
    assert effects == [Failed(reason="the servers changed (view 3), and nothing protects their rows")]


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (S0, view(TWO, epoch=2)),
        (S0, Open()),
        (server(2), pushed(1)),
        (COORDINATOR, pushed(1)),
        (worker(1), rows(1, [])),
    ],
)
def test_messages_that_do_not_belong(source: Identity, message: Message) -> None:
    with pytest.raises(ProtocolError, match=f"{type(message).__name__} from {source}"):
        hear(opened(), source, message)


def test_every_effect_is_declared() -> None:
    """Drivers dispatch on this union; what is missing there would be dropped or misread."""
    declared = {effect.__name__ for effect in session_module.Effect.__args__}  # type: ignore[attr-defined]
    assert declared == {
        "Send",
        "Forget",
        "Connect",
        "SessionOpened",
        "PullAnswered",
        "PushReceived",
        "PushDurable",
        "ReadAnswered",
        "WriteAnswered",
        "Failed",
    }
