"""The table of `waits.py` as pages have it."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from typing import Any

from regrow.waits import WAITS


def find_constant(address: str) -> float:
    """The value of "module:NAME", or of "module:Class.field" as it is by default."""
    module, _, path = address.partition(":")
    value: Any = importlib.import_module(f"regrow.{module}")
    for name in path.split("."):
        value = getattr(value, name)
        value = value() if isinstance(value, type) else value
    return float(value)


def show_bound(bound: str) -> str:
    """As the table has it: the name, and how long that is."""
    if bound.startswith("wait: "):
        return f"*{bound.removeprefix('wait: ')}*"
    if bound.startswith("--"):
        return f"`{bound}`"
    name = bound.partition(":")[2].rpartition(".")[2]
    if name.endswith("_FACTOR"):
        return f"{find_constant(bound):g} times the longest so far"
    return f"{find_constant(bound):g} s (`{name}`)"


def render() -> Iterator[str]:
    """The lines of the table."""
    yield "| | who | waits for | at most | who notices | then |"
    yield "| --- | --- | --- | --- | --- | --- |"
    for wait in WAITS:
        bounds = ", ".join(show_bound(bound) for bound in wait.bounds)
        yield f"| *{wait.name}* | {wait.who} | {wait.what} | {bounds} | {wait.notices} | {wait.then} |"
