"""One group of torch.distributed over gloo, in a form that nobody waits in for ever.

A call of gloo cannot be taken back, and who waits in it for a peer that hangs waits as long as its time limit says. So
the group is made in a thread, what is under way is only looked at, and whoever has a reason to leave leaves the whole
group behind. The reason comes from outside (`is_over`): the launcher knows who is there. Groups are kept until the
process ends, because taking one apart may wait as well.
"""

from __future__ import annotations

import contextlib
import datetime
import os
import threading
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

HOST = "127.0.0.1"
GROUP_SECONDS_MAX = 3600.0  # for what nobody thought of; somebody who is slow is waited for
LOOK_SECONDS = 0.0001  # between two looks at what is under way; a step waits this long too much
LOOK_SECONDS_MAX = 0.005  # ... where others are late anyway

_kept: list[Any] = []  # all groups there were


class GlooGroup:
    """All workers of one circle. `number` is the circle's; its members meet in a file of that directory."""

    def __init__(self, directory: str, *, number: int, rank: int, size: int) -> None:
        self.number = number
        self._path = os.path.join(directory, str(number))
        self._rank, self._size = rank, size
        self._group: Any = None
        self._problem: str | None = None
        self._is_used = False
        _kept.append(self)
        threading.Thread(target=self._make, name="gloo", daemon=True).start()

    def _make(self) -> None:
        from torch.distributed import FileStore, ProcessGroupGloo

        try:
            os.makedirs(os.path.dirname(self._path), exist_ok=True)
            options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
            options._devices = [ProcessGroupGloo.create_device(hostname=HOST)]
            options._timeout = datetime.timedelta(seconds=GROUP_SECONDS_MAX)
            store = FileStore(self._path, self._size)
            self._group = ProcessGroupGloo(store, self._rank, self._size, options)
        except (OSError, RuntimeError) as error:
            self._problem = str(error)

    def gather(self, mine: Tensor, *, is_over: Callable[[], bool], tick: Callable[[], None]) -> list[Tensor] | str:
        """What every member has brought, by rank; or why nothing came of it. Then the group is of no use any more."""
        self._look(lambda: self._group is not None or self._problem is not None, is_over, tick)
        if self._group is None:
            return self._problem or "the circle is over"
        found = [torch.empty_like(mine) for _ in range(self._size)]
        try:
            work = self._group.allgather([found], [mine])
            self._look(work.is_completed, is_over, tick)
            if not work.is_completed():
                _kept.append((work, found, mine))
                return "the circle is over"
            work.wait()  # it is complete: this only says whether it failed
        except RuntimeError as error:
            return str(error)
        if not self._is_used and self._rank == 0:  # all have met
            with contextlib.suppress(OSError):
                os.unlink(self._path)
        self._is_used = True
        return found

    def _look(self, is_done: Callable[[], bool], is_over: Callable[[], bool], tick: Callable[[], None]) -> None:
        pause = LOOK_SECONDS
        while not is_done() and not is_over():
            tick()
            time.sleep(pause)
            pause = min(2 * pause, LOOK_SECONDS_MAX)
