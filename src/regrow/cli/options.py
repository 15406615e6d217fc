"""Kinds of values that options of several commands take.

The parsers are in `regrow.units`; here is only what click asks of a type: a name for the help, and an error that names
the option.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import click

from regrow.units import parse_bytes, parse_seconds


class Amount(click.ParamType):  # type: ignore[type-arg]
    """A number that may be given with a unit. A number from Python passes as it is."""

    def __init__(self, name: str, parse: Callable[[str], float]) -> None:
        self.name = name
        self._parse = parse

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        try:
            return self._parse(value) if isinstance(value, str) else value
        except ValueError as error:
            self.fail(str(error), param, ctx)


BYTES = Amount("bytes", parse_bytes)  # 67108864 or 64M
SECONDS = Amount("duration", parse_seconds)  # 90, 90s, 5m, 12h or 7d
