"""What a script wants to be kept with its checkpoints: text, and the step of the first worker that it is of.

It is asked for at one time, the cut is made at another, and its manifest is written at a third. The rule to keep: what
is in a manifest is no newer than the rows. So several are kept until one of them fits.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

KEY = "script"  # in the extra of a cut
# Of a script that asks more often than cuts are made. Too few: a checkpoint has an older one than it could. Too many:
# memory, and a successor of the coordinator is told of all.
KEPT_MAX = 8


class Extras:
    """Those of a run, oldest first. `is_new`: whether the newest is in no manifest yet. They are kept by one thread and
    picked by another."""

    def __init__(self, kept: Sequence[tuple[int, str]] = ()) -> None:
        self.is_new = False
        self.kept = list(kept)
        self._lock = threading.Lock()

    def keep(self, step: int, text: str) -> None:
        with self._lock:
            self.is_new = True
            # The oldest stays: it fits whatever is being stored.
            self.kept = [*self.kept[:1], *self.kept[1:][-(KEPT_MAX - 2) :], (step, text)]

    def pick(self, marks: Sequence[int]) -> dict[str, Any]:
        """For the manifest of a cut at these marks; whatever is older than that is needed no more."""
        with self._lock:
            fitting = [index for index, (step, _) in enumerate(self.kept) if step <= marks[0]]
            if not fitting:
                return {}
            self.kept = self.kept[fitting[-1] :]
            self.is_new = len(self.kept) > 1
            return {KEY: self.kept[0][1]}
