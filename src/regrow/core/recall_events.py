"""What a driver tells a replacement about the saves of its own predecessors."""

from __future__ import annotations

import dataclasses

from regrow.core.messages import UInt32Array
from regrow.store.interface import TableRows


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SavesFound:
    """Event: these rows of each table are in saves, which all together contain so many updates. The marks are those of
    the newest save that left nothing out. Without any save: zeros, and no rows."""

    marks: tuple[int, ...]
    updates: int
    ids: dict[int, UInt32Array]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SavedRowsLoaded:
    """Event: rows of saves, newest first; of a row that comes again the first value counts."""

    rows: list[TableRows]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SavesLoaded:
    """Event: these were all."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SavesRead:
    """Event: saves are being read, and that gets further, though no row is here yet."""
