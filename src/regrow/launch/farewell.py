"""A run that is to end early, but not before its model is stored (`regrow stop JOB --save`)."""

from __future__ import annotations

import enum
from collections.abc import Callable


class Stage(enum.Enum):
    NONE = "none"
    WANTED = "wanted"
    ASKED = "asked"


class Farewell:
    """Asks for a checkpoint, and ends the run when one is stored after that. `begin` may be called by any thread."""

    def __init__(self) -> None:
        self._stage = Stage.NONE
        self._saved = 0

    def begin(self) -> None:
        if self._stage is Stage.NONE:
            self._stage = Stage.WANTED

    def look(self, saved: int, *, save: Callable[[], object], end: Callable[[], object]) -> None:
        """`saved`: how many checkpoints are stored so far."""
        if self._stage is Stage.WANTED:
            self._stage, self._saved = Stage.ASKED, saved
            save()
        elif self._stage is Stage.ASKED and saved > self._saved:
            self._stage = Stage.NONE
            end()
