"""Goal: what a state machine finds worth showing reaches the launcher as a report. Method: every notice that the core
can make, found by reading it, and one that it cannot."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import regrow.core
from regrow.core.effects import Notice
from regrow.launch import reports
from regrow.runtime.serve import REPORTS, report_of


def test_notices_become_reports() -> None:
    counts = {"rows_total": 9, "rows_back": 4, "bytes": 100, "faults": 1, "seconds": 0.5}
    assert report_of(Notice(name="recovery", values=counts)) == reports.Recovery(**counts)  # type: ignore[arg-type]
    assert report_of(Notice(name="recovered", values=counts)) == reports.Recovered(**counts)  # type: ignore[arg-type]
    assert report_of(Notice(name="loaded", values={})) == reports.Loaded()
    begun = {"status": "begun", "cut": "a", "kind": "full"}
    assert report_of(Notice(name="checkpoint", values=begun)) == reports.CheckpointBegun(cut="a", kind="full")
    saved = {"status": "saved", "cut": "a", "still": False, "count": 1}
    assert report_of(Notice(name="checkpoint", values=saved)) == reports.CheckpointSaved(cut="a", still=False, count=1)
    failed = {"status": "failed", "reason": "no room", "failed": 2, "still": True}
    assert report_of(Notice(name="checkpoint", values=failed)) == reports.CheckpointFailed(
        reason="no room", failed=2, still=True
    )


@pytest.mark.parametrize("name", ["unheard of", "checkpoint"])
def test_an_unknown_notice_is_a_mistake(name: str) -> None:
    with pytest.raises(AssertionError, match="a notice that a node does not know"):
        report_of(Notice(name=name, values={}))


def test_every_name_in_the_core_is_known() -> None:
    assert regrow.core.__file__ is not None
    names = set()
    for path in Path(regrow.core.__file__).parent.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "Notice":
                (name,) = [keyword.value for keyword in node.keywords if keyword.arg == "name"]
                names |= {name.value} if isinstance(name, ast.Constant) else set()
    assert names
    assert names <= {name for name, _ in REPORTS}
