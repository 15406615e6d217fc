"""Goal: a launcher that follows another knows who is in office, and never gives an incarnation twice.

Method: identities by hand; and launchers that die at any point of a small random run, of which the next one hears from
any part of the places, with any memo that was ever made. A launcher that numbers on from the highest that it hears of
must be caught by the same check. What an outpost keeps is compared with what was said.
"""

from __future__ import annotations

import random

import pytest

from regrow.core.identity import Identity
from regrow.launch import legacy
from regrow.launch.backend import Exit
from regrow.launch.events import Inherit, NoteSuccessor, ProcessEnded, Promote, Stance, Start, TakeStance
from regrow.launch.legacy import Ledger, Memo, encode_memo, number_block, parse_memo, settle
from regrow.launch.lines import encode
from regrow.launch.orders import Assignment, Become, Conclude, Evaluate
from regrow.launch.reports import Answer, Condemn, Listening, Ready, ReadyToJudge, Replace, SaveNow
from regrow.launch.saving import Extra
from regrow.launch.supervisor import Supervisor

KILLED = Exit(code=-9)
PLACES = [("coordinator", 0), ("server", 0), ("server", 1), ("worker", 0)]
SPARES = ("standby", "understudy")


def server(id: int, incarnation: int = 0) -> Identity:
    return Identity(role="server", id=id, incarnation=incarnation)


COORDINATOR, WORKER = Identity(role="coordinator", id=0), Identity(role="worker", id=0)


def test_of_every_place_the_highest_is_in_office() -> None:
    spare = Identity(role="standby", id=3)
    settled = settle(
        [WORKER, server(1, 2), spare, server(1, 1), server(0, 4)],
        places=PLACES,
        remembered=[COORDINATOR, server(0, 5), server(1, 1), WORKER],
        spare_roles=SPARES,
    )
    assert settled.office == (COORDINATOR, server(0, 5), server(1, 2), WORKER)
    assert settled.lost == (COORDINATOR, server(0, 5)), "4 answers, but 5 was in its place"
    assert settled.zombies == (server(1, 1), server(0, 4))
    assert settled.spares == (spare,)
    assert str(settled) == "2 of 4 processes answer, 1 spare too"


def test_a_place_that_nobody_knows_of_was_its_first() -> None:
    settled = settle([], places=PLACES, remembered=[], spare_roles=SPARES)
    assert settled.lost == settled.office == (COORDINATOR, server(0), server(1), WORKER)


def test_a_successor_follows_who_is_missing_with_a_number_of_its_own() -> None:
    supervisor = Supervisor(replaces=True, numbers=number_block(2))
    spare = Identity(role="standby", id=10_003)
    supervisor.receive(Inherit(office=(COORDINATOR, server(0, 1), server(1), WORKER), spares=(spare,), now=0.0))
    supervisor.receive(TakeStance(stance=Stance.REPLACING))
    first = supervisor.receive(ProcessEnded(who=server(0, 1), exit=KILLED, now=0.0))
    assert Promote(spare=spare, who=server(0, 20_000)) in first
    second = supervisor.receive(ProcessEnded(who=server(0, 20_000), exit=KILLED, now=1.0))
    assert Start(who=server(0, 20_001)) in second
    assert supervisor.list_office() == (COORDINATOR, server(0, 20_001), server(1), WORKER)


def test_a_place_without_numbers_left_ends_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(legacy, "NUMBERS_PER_LAUNCHER", 2)
    supervisor = Supervisor(replaces=True, numbers=legacy.number_block(1))
    supervisor.receive(Inherit(office=(COORDINATOR, server(0, 3)), spares=(), now=0.0))
    supervisor.receive(TakeStance(stance=Stance.REPLACING))
    (_, accusation) = supervisor.receive(ProcessEnded(who=server(0, 3), exit=KILLED, now=0.0))
    assert accusation.refusal == "server 0 has had 2 successors"  # type: ignore[union-attr]


# -- never twice ---------------------------------------------------------------------------------------------


def follow_each_other(seed: int, *, blocks: bool) -> list[Identity]:
    """All successors that launchers of one run have named. `blocks`: each numbers in its own block."""
    chance = random.Random(seed)
    places = [("coordinator", 0), ("server", 0)]
    memos = [(COORDINATOR, server(0))]
    alive = {COORDINATOR, server(0)}
    named: list[Identity] = []
    for launcher in range(4):
        found = [who for who in sorted(alive) if chance.random() < 0.6]
        settled = settle(found, places=places, remembered=chance.choice(memos), spare_roles=SPARES)
        supervisor = Supervisor(replaces=True, numbers=number_block(launcher) if blocks else None)
        supervisor.receive(Inherit(office=settled.office, spares=(), now=0.0))
        supervisor.receive(TakeStance(stance=Stance.REPLACING))
        for now in range(chance.randrange(4)):
            who = supervisor.current("server", 0)
            orders = supervisor.receive(ProcessEnded(who=who, exit=KILLED, now=100.0 * now))
            heirs = [order.heir for order in orders if isinstance(order, NoteSuccessor)]
            named += heirs
            alive = (alive - {who}) | set(heirs)  # whoever was not found may still be there
            memos.append(supervisor.list_office())  # type: ignore[arg-type]
    return named


def test_no_incarnation_is_given_twice() -> None:
    for seed in range(300):
        named = follow_each_other(seed, blocks=True)
        assert len(named) == len(set(named)), seed


def test_numbering_on_from_what_is_heard_would_be_found() -> None:
    runs = [follow_each_other(seed, blocks=False) for seed in range(300)]
    assert any(len(named) > len(set(named)) for named in runs)


# -- what is kept --------------------------------------------------------------------------------------------


def test_the_last_of_each_report_is_kept_in_order() -> None:
    ledger = Ledger()
    reports = [
        Listening(address="a"),
        Ready(rows=1, bytes=1),
        Answer(),
        Replace(peer=server(0), reason="silent"),
        Condemn(peer=server(0), reason="silent"),
        Replace(peer=server(1), reason="silent"),
        Listening(address="b"),
    ]
    data = b"".join(encode(report) + b"\n" for report in reports) + b"no report\n" + encode(Ready(rows=2, bytes=2))
    kinds = [kind for begin in range(0, len(data), 7) for kind in ledger.note_said(data[begin : begin + 7])]
    assert kinds == ["listening", "ready", "answer", "replace", "condemn", "replace", "listening", None]
    assert list(ledger.said.values()) == [encode(reports[index]) for index in (1, 3, 4, 5, 6)]
    assert ledger.pending == encode(Ready(rows=2, bytes=2))
    ledger.note_said(b"\n")
    assert list(ledger.said.values())[-1] == encode(Ready(rows=2, bytes=2))


def test_a_line_without_end_is_not_kept() -> None:
    ledger = Ledger()
    ledger.note_said(b"x" * (legacy.LINE_BYTES_MAX + 1))
    assert ledger.pending == b""
    long = encode(SaveNow(extra=Extra(step=1, text="x" * legacy.LINE_BYTES_MAX)))
    ledger.note_said(b"\n" + long + b"\n" + encode(Listening(address="a")) + b"\n")
    assert list(ledger.said.values()) == [encode(Listening(address="a"))]


def test_commands_are_known_until_it_is_somebody_else() -> None:
    ledger = Ledger()
    ledger.note_said(encode(ReadyToJudge(loop=1, step=2, call=1, merges=True, steps=9)) + b"\n")
    ledger.note_told(encode(Evaluate()) + b"\n" + encode(Conclude(metrics={})) + b"\n")
    assert (ledger.told, ledger.said) == ({"evaluate", "conclude"}, {})
    ledger.begin()
    ledger.note_told(encode(Become(assignment=make_template())) + b"\n")
    assert ledger.told == {"become"}


def make_template() -> Assignment:
    return Assignment(
        identity=WORKER,
        token="",
        listen="here",
        coordinator="there",
        threads=1,
        servers=2,
        frame_bytes_max=1 << 20,
    )


def test_a_memo_comes_back_as_it_was() -> None:
    memo = Memo(
        run="ab",
        directory="/runs/x",
        started_at=1.5,
        phase="training",
        template=make_template(),
        office=(COORDINATOR, server(1, 3)),
        start=None,
        asked={"url": "s3://b", "cut": "c", "step": 4},
        restores=[],
        cuts_dead=["d"],
        checkpoints={"saved": 2},
        failures=[{"role": "server"}],
        not_saved=("full", None),
    )
    assert parse_memo(encode_memo(memo)) == memo
