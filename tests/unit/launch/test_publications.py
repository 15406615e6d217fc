"""Goal: whoever looks at a run reads how its publications go: how old look-ups are, who reads, what failed, what takes
too long, and at the end whether the trained model is out. Method: reports that are made up, and the words of a display.
"""

from __future__ import annotations

import io
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from run_reports import started

from regrow.launch import display, endings
from regrow.launch.orders import Command
from regrow.launch.reports import CheckpointFailed, Publication
from regrow.launch.status import RunStatus

PUBLISHED: dict[str, Any] = {"publish": "p", "publish_every": "2s"}
PEAK = {"peak_rss_bytes": {"total": 1, "server": 1, "worker": 1}}


def saved(cut: str = "a", *, seconds: float = 0.5, still: bool = False, **more: Any) -> Publication:
    sizes: dict[str, Any] = {"kind": "delta", "rows": 1000, "bytes": 1 << 20, "cut_seconds": 0.25}
    return Publication(status="saved", cut=cut, seconds=seconds, still=still, **sizes | more)


def failed(reason: str = "full", *, still: bool = False) -> Publication:
    return Publication(status="failed", reason=reason, still=still)


def coordinator(run: RunStatus, *reports: Any, now: float = 12.0) -> RunStatus:
    for report in reports:
        run.receive("coordinator", 0, report, now)
    return run


def test_lag_rows_bytes_and_readers() -> None:
    run = coordinator(started(**PUBLISHED), saved(readers=2, readers_step=1234))
    assert run.publications.describe(15.0) == (
        "1 publications, the last: a, 1,000 rows, 1.0 MiB, 3 s old; 2 readers, the last at step 1,234"
    )
    assert run.publications.to_dict()["last"]["lag_seconds"] == 0.25


def test_an_interval_that_is_too_short_is_said_as_long_as_it_is() -> None:
    run = coordinator(started(**PUBLISHED), saved(seconds=1.9))
    assert display.news_lines(run) == []
    coordinator(run, saved(seconds=3.0))
    slow = "a publication takes 3.0 s, longer than --publish-every: they are made less often"
    assert display.news_lines(run) == [slow]
    coordinator(run, saved(seconds=2.5))
    assert display.news_lines(run) == [slow], "not a new line with each"
    coordinator(run, saved(seconds=1.0))
    assert display.news_lines(run) == []


def test_a_storage_that_fails_is_told_once_and_again_after_it_worked() -> None:
    told = io.StringIO()
    shown = display.PlainDisplay(progress=told, result=told)
    run = started(**PUBLISHED)
    lost = CheckpointFailed(reason="gone", failed=1, still=False)
    for number, report in enumerate([failed(), failed(), lost, failed(), saved(), failed()]):
        shown.update(coordinator(run, report), 20.0 + number)
    lines = [line for line in told.getvalue().splitlines() if "failed" in line]
    assert lines == ["1 publication failed: full", "1 checkpoint failed: gone", "4 publications failed: full"]


class Coordinator:
    """Answers the launcher as it is told to; `None`: not at all, until the deadline has passed."""

    def __init__(self, run: RunStatus, *answers: Publication | None) -> None:
        self.run = run
        self.answers = list(answers)
        self.seen: list[str | None] = []  # by whoever looks at the run meanwhile

    def ask(self, command: Command, is_answered: Callable[[], bool], deadline: float) -> None:
        now = time.monotonic()
        assert now < deadline
        self.seen.append(display.progress_line(self.run, now + 100.0))
        assert not is_answered()
        if (answer := self.answers.pop(0)) is not None:
            coordinator(self.run, answer)
            assert is_answered()


def end_of(run: RunStatus) -> str:
    summary = {**PEAK, "publications": run.publications.to_dict()}
    (line,) = [line for line in display.summary_text(summary, Path("x")).splitlines() if line.startswith("public")]
    return line


@pytest.mark.parametrize(
    "answers, words",
    [
        ([saved("end", still=True)], "publications  2, 2.0 MiB in all; the last is end"),
        ([failed(still=True), saved("end", still=True)], "publications  2, 1 failed, 2.0 MiB in all; the last is end"),
        (
            [failed("no answer within 60 s", still=True)] * 3,
            "publications  1, 3 failed, 1.0 MiB in all; the last is a, and not of the trained model: "
            "no answer within 60 s",
        ),
        (
            [None, None, None],
            "publications  1, 1.0 MiB in all; the last is a, and not of the trained model: no answer",
        ),
    ],
)
def test_the_end_of_training_is_waited_for_and_told(answers: list[Publication | None], words: str) -> None:
    """A run that waits for a storage looked as if it hung, and ended without a word of it."""
    run = coordinator(started(**PUBLISHED), saved())
    asked = Coordinator(run, *answers)
    endings.publish(run, asked.ask)
    assert len(asked.seen) == len(answers)
    for line in asked.seen:
        assert line is not None
        assert "waiting for the publication of the trained model, 8:" in line
        assert "nothing has moved" not in line
    assert run.ending is None
    assert end_of(run) == words


def test_a_run_that_did_not_come_to_its_end_says_nothing_of_it() -> None:
    assert end_of(coordinator(started(**PUBLISHED), saved())) == "publications  1, 1.0 MiB in all; the last is a"
