"""The last checkpoint and the last publication of a run, of the trained model. Where they fail, the model is judged all
the same.

`ask` tells the coordinator something, until it is answered or the deadline has passed, and its successors too.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator

from regrow.errors import NotSaved
from regrow.launch import checkpoints
from regrow.launch.orders import Command, MakeCheckpoint, MakePublication
from regrow.launch.status import RunStatus

SAVE_TRIES, SAVE_SECONDS_MAX = 3, 3600.0  # of the last checkpoint
PUBLISH_SECONDS_MAX = 600.0  # of the last publication, all tries. Too short: look-ups miss the end. Too long: a wait.

AskCoordinator = Callable[[Command, Callable[[], bool], float], None]


def save(status: RunStatus, ask: AskCoordinator) -> NotSaved | None:
    """None, or why it is not stored."""
    deadline = time.monotonic() + SAVE_SECONDS_MAX  # for all tries together
    with _tell(status, "the checkpoint of the trained model", deadline):
        if any(_try_to_save(status, ask, deadline) for _ in range(SAVE_TRIES)):
            return None
    return checkpoints.explain_unsaved(status.checkpoints, tries=SAVE_TRIES, seconds=SAVE_SECONDS_MAX)


def _try_to_save(status: RunStatus, ask: AskCoordinator, deadline: float) -> bool:
    status.still = None
    ask(MakeCheckpoint(still=True), lambda: status.still is not None, deadline)
    return status.still is True


def publish(status: RunStatus, ask: AskCoordinator) -> None:
    """Look-ups shall get the trained model. Where that fails they get the one before, and the run is no worse."""
    publications, deadline = status.publications, time.monotonic() + PUBLISH_SECONDS_MAX
    with _tell(status, "the publication of the trained model", deadline):
        for _ in range(SAVE_TRIES):
            publications.await_end()
            ask(MakePublication(still=True), publications.is_end_told, deadline)
            if publications.has_end:
                break


@contextlib.contextmanager
def _tell(status: RunStatus, what: str, deadline: float) -> Iterator[None]:
    """Workers are through: whoever looks on sees what the run waits for, and not that nothing moves."""
    status.ending = (what, deadline)
    try:
        yield
    finally:
        status.ending = None
