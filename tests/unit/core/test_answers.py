"""Goal: a server says who owes it an answer and has given none for long, and never one that is merely slow.

Method: looks by hand, a second apart.
"""

from __future__ import annotations

from helpers import server

from regrow.core.answers import LOOK_SECONDS_MAX, WORTH_SECONDS, Answers
from regrow.core.identity import Identity
from regrow.core.messages import Unanswered

PEERS = {index: server(index) for index in range(3)}


def test_time_counts_while_nothing_is_answered() -> None:
    answers = Answers()
    for second in range(10):
        answers.look(float(second), [1], PEERS)
        expected = Unanswered(server=1, incarnation=0, seconds=second)
        assert answers.longest == (expected if second >= WORTH_SECONDS else None)


def test_any_answer_and_any_time_without_debts_begins_anew() -> None:
    answers = Answers()
    for second in range(5):
        answers.look(float(second), [1, 2], PEERS)
    answers.count(1)
    answers.look(5.0, [1, 2], PEERS)
    assert answers.longest == Unanswered(server=2, incarnation=0, seconds=5)
    answers.look(6.0, [1], PEERS)
    answers.look(7.0, [1, 2], PEERS)
    assert answers.longest == Unanswered(server=1, incarnation=0, seconds=2)


def test_a_successor_owes_nothing_of_before() -> None:
    answers = Answers()
    for second in range(5):
        answers.look(float(second), [1], PEERS)
    answers.look(5.0, [1], {**PEERS, 1: Identity(role="server", id=1, incarnation=1)})
    assert answers.longest is None


def test_a_stop_of_this_server_is_not_the_silence_of_another() -> None:
    answers = Answers()
    answers.look(0.0, [1], PEERS)
    answers.look(3600.0, [1], PEERS)
    assert answers.longest == Unanswered(server=1, incarnation=0, seconds=int(LOOK_SECONDS_MAX))
