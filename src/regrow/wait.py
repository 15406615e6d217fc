"""What a wait is: one line of the table that `waits.py` and `waits_storage.py` declare."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Wait:
    """One line of the table. `bounds`: "module:CONSTANT", "--option", or "wait: NAME" for another line."""

    name: str
    who: str
    what: str
    bounds: tuple[str, ...]
    notices: str
    then: str
    states: tuple[str, ...] = ()
    calls: tuple[str, ...] = ()
