"""Goal: `regrow plan partial` shows what the planner decides, and refuses what makes no sense, with the option's name.

Method: the entry point is called in process, and its words are compared as wholes.
"""

from __future__ import annotations

import json

import pytest
from sources import ROOT

from regrow.cli import main as cli
from regrow.planner.overhead import Costs
from regrow.planner.partial import Request, decide

TABLE = """\
of all time        partial <-    full
saves                  0.45 %   4.2 %
loads                     0 %     0 %
lost work                 0 %   4.2 %
rescheduling              0 %     0 %
overhead               0.45 %   8.5 %
a save every           22.4 h  2.37 h
56 h of work take      56.3 h  61.2 h
PLS to expect            0.09       0
updates lost            8.5 %     0 %

partial: every 22.4 h (PLS 0.1, 4 servers, a failure every 28 h); full recovery would cost 8.5 %, this 0.45 %
"""


def run(line: str) -> int:
    return cli.run(["plan", "partial", *line.split()])


def test_the_published_job(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--servers 4 --expect-mtbf 28h") == 0
    assert capsys.readouterr().out == TABLE
    assert f"```\n{TABLE}```\n" in (ROOT / "docs" / "partial-recovery.md").read_text(), "the page shows the same"


def test_for_programs(capsys: pytest.CaptureFixture[str]) -> None:
    line = "--target-pls 0.02 --servers 64 --lost-together 8 --expect-mtbf 2h --total 7d --save 40s --load 2m --json"
    assert run(f"{line} --reschedule 30s") == 0
    shown = json.loads(capsys.readouterr().out)
    request = Request(target_pls=0.02, servers=64, lost_together=8, work_seconds=7 * 86400.0, fail_seconds=7200.0)
    plan = decide(request, costs=Costs(save_seconds=40.0, load_seconds=120.0, reschedule_seconds=30.0))
    assert shown == {**plan.to_dict(), "fail_seconds": 7200.0, "fail_reason": "as --expect-mtbf says"}
    assert shown["partial"]["overhead"]["load"] == pytest.approx(120 / 7200)


def test_a_guess_is_called_one(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("") == 0
    assert "(PLS 0.1, 5 servers, a failure every 14 h, a first guess);" in capsys.readouterr().out


def test_full_recovery_may_be_the_cheaper_one(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--target-pls 0.001 --servers 4 --expect-mtbf 28h") == 0
    shown = capsys.readouterr().out
    assert shown.splitlines()[0].split() == ["of", "all", "time", "partial", "full", "<-"]
    assert "\nfull: every 2.37 h (" in shown and "loses nothing" in shown


def test_a_job_that_never_ends(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--expect-mtbf 1m") == 0
    assert "the job never ends (" in capsys.readouterr().out
    assert run("--expect-mtbf 1m --json") == 0
    assert json.loads(capsys.readouterr().out)["full"]["all_seconds"] is None


BAD = [
    (
        "--target-pls 0",
        "'--target-pls': 0.0 is not above 0 and at most 1; for no loss at all use --protect ec or delta",
    ),
    ("--target-pls 1.5", "'--target-pls': 1.5 is not above 0 and at most 1; for no loss at all use --protect ec or"),
    ("--target-pls nan", "'--target-pls': nan is not above 0 and at most 1; for no loss at all use --protect ec or"),
    ("--servers 0", "'--servers': 0 is not a number of servers; 1 is the least"),
    ("--lost-together 6", "'--lost-together': 6 is not between 1 and the 5 of --servers; give more of those"),
    ("--lost-together 0", "'--lost-together': 0 is not between 1 and the 5 of --servers"),
    ("--save 0s", "'--save': 0s is no time; give one above 0, such as 90s, 5m, 12h or 7d"),
    ("--total 0", "'--total': 0s is no time; give one above 0"),
    ("--expect-mtbf 0h", "'--expect-mtbf': 0s is no time; give one above 0"),
    ("--load soon", "'--load': 'soon' is not a time, such as 90s, 5m, 12h or 7d"),
    ("--reschedule -1s", "'--reschedule': '-1s' is not a time, such as 90s, 5m, 12h or 7d"),
]


@pytest.mark.parametrize(("line", "words"), BAD, ids=[line for line, _ in BAD])
def test_bad_input(line: str, words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(line) == 2
    assert capsys.readouterr().err.startswith(f"error: Invalid value for {words}")


def test_plan_alone_shows_what_there_is(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["plan"]) == 2
    assert "partial" in capsys.readouterr().err
