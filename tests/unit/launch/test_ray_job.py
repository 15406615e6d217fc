"""Goal: what a job says is kept for whoever asks, whole and in order, and its end comes last.

Method: a transcript by hand; a run that ends before its model is stored, in numbers. Whole jobs are in
tests/live/test_job.py.
"""

from __future__ import annotations

import pytest

from regrow.errors import RegrowError
from regrow.launch import ray_job, ray_jobs
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


# -- whoever asks --------------------------------------------------------------------------------------------

SILENT_SECONDS = 65.0  # what Ray's health check takes at most, at its defaults, to miss a node that falls silent


class FakeRay:
    """A job whose launcher falls silent with its node; Ray starts another, unless there is none to come."""

    class exceptions:
        class GetTimeoutError(Exception):
            pass

        class RayActorError(Exception):
            pass

    def __init__(self, *, is_followed: bool) -> None:
        self.is_followed = is_followed
        self.asked = 0

    def get_actor(self, name: str, *, namespace: str) -> object:
        if not self.is_followed:
            raise ValueError(name)
        return object()

    def get(self, answer: str, *, timeout: float) -> str:
        self.asked += 1
        if self.asked > 1:
            return answer
        if timeout < SILENT_SECONDS:
            raise self.exceptions.GetTimeoutError
        raise self.exceptions.RayActorError("The actor died.\nIts node has died.\n")


def test_a_launcher_on_a_silent_node_is_waited_for_until_it_is_followed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_jobs, "RETRY_SECONDS", 0.0)
    assert ray_jobs.ask(FakeRay(is_followed=True), lambda: "here", "mine") == "here"
    with pytest.raises(RegrowError, match=r"^job mine is lost: .* no successor: Its node has died\."):
        ray_jobs.ask(FakeRay(is_followed=False), lambda: "here", "mine")
    with pytest.raises(RegrowError, match=r"^job mine did not answer within 5 s$"):
        ray_jobs.ask(FakeRay(is_followed=True), lambda: "here", "mine", seconds=5.0)
