"""Assignments, commands and reports as lines of text: one JSON object each.

The rule to keep: a report with a wrong type is caught here, where it enters (`parse_report`), and is named with the one
who sent it.
"""

from __future__ import annotations

from typing import Any

import msgspec

from regrow.launch.orders import AnyCommand, Assignment, Command
from regrow.launch.reports import AnyReport, Malformed, Report


class _Name(msgspec.Struct):
    event: str


def _encode_number(value: Any) -> Any:
    """Numbers of numpy, as plain ones."""
    return value.item()


_encoder = msgspec.json.Encoder(enc_hook=_encode_number)
_assignments = msgspec.json.Decoder(Assignment)
_commands: msgspec.json.Decoder[AnyCommand] = msgspec.json.Decoder(AnyCommand)
_reports: msgspec.json.Decoder[AnyReport] = msgspec.json.Decoder(AnyReport)
_names = msgspec.json.Decoder(_Name)
REPORT_NAMES = frozenset(str(kind.__struct_config__.tag) for kind in AnyReport.__args__)


def encode(message: Assignment | Command | Report) -> bytes:
    """One line without its end. What is not a number travels as null."""
    return _encoder.encode(message)


def parse_assignment(line: bytes) -> Assignment:
    return _assignments.decode(line)


def parse_command(line: bytes) -> AnyCommand:
    """Raises ValueError for what is none."""
    return _commands.decode(line)


def parse_report(line: bytes) -> AnyReport | Malformed | None:
    """None for anything that is not a report: a library may print what it likes."""
    try:
        return _reports.decode(line)
    except ValueError as error:
        try:
            name = _names.decode(line).event
        except ValueError:
            return None
        return Malformed(event=name, problem=str(error)) if name in REPORT_NAMES else None
