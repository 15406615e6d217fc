"""Goal: what a job says is kept for whoever asks, whole and in order, and its end comes last.

Method: a transcript by hand; a run that ends before its model is stored, in numbers. Whole jobs are in
tests/live/test_job.py.
"""

from __future__ import annotations

import pytest

from regrow.launch import ray_job
from regrow.launch.farewell import Farewell
from regrow.launch.ray_job import Transcript


def read(transcript: Transcript, since: int) -> tuple[list[str], int]:
    lines, following = transcript.read(since, 0.0, lambda: False)
    return [line for _, line in lines], following


def test_lines_come_in_order_and_once() -> None:
    transcript = Transcript()
    progress, result = transcript.open(is_result=False), transcript.open(is_result=True)
    print("one", file=progress)
    progress.write("tw")
    assert read(transcript, 0) == (["one"], 1)
    progress.write("o\nthree\n")
    print("four", file=result)
    assert read(transcript, 1) == (["two", "three", "four"], 4)
    assert transcript.read(3, 0.0, lambda: False) == (((True, "four"),), 4)
    assert read(transcript, 4) == ([], 4)
    assert transcript.last == "four"


def test_pages_are_bounded_and_the_oldest_goes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_job, "PAGE_LINES_MAX", 3)
    monkeypatch.setattr(ray_job, "LINES_KEPT_MAX", 5)
    transcript = Transcript()
    for number in range(9):
        transcript.add(False, str(number))
    assert read(transcript, 0) == (["4", "5", "6"], 7)
    assert read(transcript, 7) == (["7", "8"], 9)


def test_whoever_waits_for_lines_is_told_of_the_end() -> None:
    assert Transcript().read(0, 60.0, lambda: True) == ((), 0)


def test_a_run_that_ends_stores_its_model_first() -> None:
    farewell, done = Farewell(), list[str]()

    def look(saved: int) -> list[str]:
        farewell.look(saved, save=lambda: done.append("save"), end=lambda: done.append("end"))
        return done

    assert look(3) == []
    farewell.begin()
    assert look(3) == ["save"]
    assert look(3) == ["save"]
    farewell.begin()
    assert look(4) == ["save", "end"]
    assert look(5) == ["save", "end"]
