"""Goal: there is a circle when every worker has said where its board is, a new one after every change, and never two of
one number.

Method: reports in, commands out.
"""

from __future__ import annotations

from regrow.launch.circles import Circles
from regrow.launch.orders import CircleIs
from regrow.launch.reports import BoardAt, CircleBroken


def make(number: int, *addresses: str) -> list[tuple[int, CircleIs]]:
    circle = CircleIs(number=number, addresses=addresses, directory="d")
    return [(worker, circle) for worker in range(len(addresses))]


def test_a_circle_has_everybody() -> None:
    circles = Circles(workers=2, directory="d")
    assert circles.receive(1, BoardAt(address="b")) == []
    assert circles.receive(0, BoardAt(address="a")) == make(1, "a", "b")


def test_a_successor_makes_the_next() -> None:
    circles = Circles(workers=2, directory="d")
    circles.receive(0, BoardAt(address="a"))
    circles.receive(1, BoardAt(address="b"))
    circles.note_successor(1)
    assert circles.receive(0, CircleBroken(number=1)) == [], "not with one who is dead"
    assert circles.receive(1, BoardAt(address="c")) == make(2, "a", "c")


def test_who_complains_late_is_told_nothing() -> None:
    circles = Circles(workers=1, directory="d")
    circles.receive(0, BoardAt(address="a"))
    assert circles.receive(0, CircleBroken(number=1)) == make(2, "a")
    assert circles.receive(0, CircleBroken(number=1)) == []


def test_numbers_go_on_after_all_began_again() -> None:
    circles = Circles(workers=1, directory="d")
    circles.receive(0, BoardAt(address="a"))
    circles.start_over()
    assert circles.receive(0, BoardAt(address="b")) == make(2, "b")
