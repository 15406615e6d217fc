"""Questions to the system that may never be answered: a directory on a mount that hangs, a library that looks for keys.

Whoever asks waits in another thread than the one that hangs, which is a daemon and does not keep the process. Calls of
storage have the same and more (storage.py); this is for what comes before there is one.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, TypeVar

from regrow.errors import StorageError

# For one answer about a path or a URL. Too small: a disk that was asleep counts as hung. Too large: a command stands
# there without a word.
LOOK_SECONDS_MAX = 60.0

T = TypeVar("T")


def ask(what: str, job: Callable[[], T], *, seconds: float | None = None) -> T:
    """What `job` returns or raises; StorageError if that takes too long."""
    most = LOOK_SECONDS_MAX if seconds is None else seconds
    answer: list[Any] = []
    problem: list[BaseException] = []
    done = threading.Event()

    def run() -> None:
        try:
            answer.append(job())
        except BaseException as error:
            problem.append(error)
        done.set()

    threading.Thread(target=run, name="regrow-ask", daemon=True).start()
    if not done.wait(most):
        raise StorageError(f"cannot {what}: no answer within {most:g} s", hint="is the storage reachable from here?")
    if problem:
        raise problem[0]
    found: T = answer[0]
    return found
