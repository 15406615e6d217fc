"""Goal: what is said arrives as it was said; what cannot have been meant is named or left alone.

Method: one example of every kind there and back; lines that are wrong in every way a process can go wrong.
"""

from __future__ import annotations

import json
import subprocess
import sys
import typing
from typing import Any

import msgspec
import numpy as np
import pytest

from regrow.core.cuts import CutPlan
from regrow.core.identity import Identity
from regrow.launch import lines, orders, reports
from regrow.launch.lines import encode, parse_assignment, parse_command, parse_report
from regrow.launch.reports import Malformed

S2 = Identity(role="server", id=2, incarnation=1)
VALUES: dict[Any, Any] = {int: 7, float: 2.5, bool: True, str: "a word", list[int]: [1, 2, 3], Identity: S2}


def example(kind: type[msgspec.Struct]) -> Any:
    """A value in every field."""
    return kind(**{field.name: value_of(field.type) for field in msgspec.structs.fields(kind)})


def value_of(type: Any) -> Any:
    if typing.get_origin(type) is typing.Literal:
        return typing.get_args(type)[-1]
    if typing.get_origin(type) is tuple:
        return (value_of(typing.get_args(type)[0]),)
    if type in (dict[str, float], dict[str, float | None]):
        return {"name": 2.5}
    if typing.get_origin(type) is dict:
        return {"name": [1, None, "x"]}
    if isinstance(type, msgspec._core.StructMeta):
        return example(type)
    if typing.get_args(type) and type not in VALUES:  # X | None
        return value_of(typing.get_args(type)[0])
    return VALUES[type]


REPORTS: tuple[type[reports.Report], ...] = typing.get_args(reports.AnyReport)
COMMANDS: tuple[type[orders.Command], ...] = typing.get_args(orders.AnyCommand)


def test_the_unions_are_complete() -> None:
    assert set(REPORTS) == set(reports.Report.__subclasses__())
    assert set(COMMANDS) == set(orders.Command.__subclasses__())


@pytest.mark.parametrize("kind", REPORTS, ids=lambda kind: kind.__name__)
def test_every_report_arrives(kind: type[reports.Report]) -> None:
    report = example(kind)
    line = encode(report)
    assert b"\n" not in line
    assert json.loads(line)["event"] in lines.REPORT_NAMES
    assert parse_report(line) == report
    assert parse_report(line[:-1] + b', "from the future": 1}') == report


@pytest.mark.parametrize("kind", COMMANDS, ids=lambda kind: kind.__name__)
def test_every_command_arrives(kind: type[orders.Command]) -> None:
    command = example(kind)
    assert parse_command(encode(command)) == command


def test_an_assignment_arrives() -> None:
    assignment = example(orders.Assignment)
    assert assignment.saving.times.pause
    assert parse_assignment(encode(assignment)) == assignment


def test_what_is_not_a_number_is_missing() -> None:
    report = reports.Evaluated(auc=float("nan"), logloss=float("inf"))
    assert parse_report(encode(report)) == reports.Evaluated(auc=None, logloss=None)


def test_numbers_of_numpy_are_numbers() -> None:
    odd = reports.Ready(rows=np.int64(3), bytes=np.uint32(4))  # type: ignore[arg-type]
    assert parse_report(encode(odd)) == reports.Ready(rows=3, bytes=4)
    odd_loss = reports.Evaluated(auc=np.float64(0.5), logloss=np.float32(0.25))
    assert parse_report(encode(odd_loss)) == reports.Evaluated(auc=0.5, logloss=0.25)


@pytest.mark.parametrize(
    ("line", "event", "problem"),
    [
        ('{"event": "ready", "rows": "many", "bytes": 1}', "ready", "Expected `int`, got `str` - at `$.rows`"),
        ('{"event": "ready", "rows": 1}', "ready", "Object missing required field `bytes`"),
        ('{"event": "server", "pulls": 1}', "server", "Object missing required field `pushes`"),
        ('{"event": "trained", "steps": 1, "samples": 1}', "trained", "Object missing required field `seconds`"),
        ('{"event": "error", "message": "x", "kind": "y"}', "error", "Invalid enum value 'y' - at `$.kind`"),
        ('{"event": "replace", "peer": 3, "reason": ""}', "replace", "Expected `object`, got `int` - at `$.peer`"),
    ],
)
def test_malformed_reports_are_named(line: str, event: str, problem: str) -> None:
    assert parse_report(line.encode()) == Malformed(event=event, problem=problem)


@pytest.mark.parametrize(
    "line",
    [
        b"",
        b"a library prints this",
        b"{",
        b"[1]",
        b"null",
        b"{}",
        b'{"event": 3}',
        b'{"event": "unknown"}',
        b"\xff\xfe",
    ],
)
def test_what_is_no_report_is_left_alone(line: bytes) -> None:
    assert parse_report(line) is None


@pytest.mark.parametrize("line", [b"", b"nonsense", b'{"do": "unknown"}', b'{"do": "died"}', b"{}"])
def test_what_is_no_command_is_refused(line: bytes) -> None:
    with pytest.raises(ValueError, match=r"\w"):
        parse_command(line)


def test_times_of_checkpoints_are_those_of_the_coordinator() -> None:
    times = orders.CheckpointTimes(every_steps=5, full_every=3, pause=True)
    assert CutPlan(**msgspec.structs.asdict(times)) == CutPlan(every_steps=5, full_every=3, pause=True)


def test_nothing_heavy_is_imported() -> None:
    code = "import sys, regrow.launch.orders; print(sorted({'torch', 'rich', 'fsspec', 'asyncio'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["[]"]
