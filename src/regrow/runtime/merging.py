"""The merger as a process of a run: folds deltas while training goes on, at a low priority.

Nothing depends on it. One that dies is started again; what it was writing has no manifest and does not count.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from pathlib import Path

from regrow.checkpoint.merger import Event, watch
from regrow.checkpoint.retention import Rules
from regrow.checkpoint.storage import Storage
from regrow.launch.orders import Stop
from regrow.launch.reports import Listening, MergerNews
from regrow.runtime.parent import Parent

log = logging.getLogger("regrow.merger")

NICENESS = 19  # Training comes first.


def yield_to_training() -> None:
    """Lowest priority. Where Linux schedules sessions against each other (autogroup), as it does by default, niceness
    counts within a session only, and every process of a run has its own: the session has to be nice as well."""
    os.nice(NICENESS)
    with contextlib.suppress(OSError):  # not there, or switched off
        Path("/proc/self/autogroup").write_text(str(NICENESS))


def run(parent: Parent) -> None:
    """Merges until told to stop."""
    yield_to_training()
    stop = threading.Event()
    parent.on_command(lambda command: stop.set() if isinstance(command, Stop) else None)
    saving = parent.assignment.saving
    assert saving is not None

    def tell(event: Event) -> None:
        log.info("%s: %s", event.kind, event.text)
        parent.report(MergerNews(kind=event.kind, text=event.text, piece=event.piece))

    parent.report(Listening(address=""))
    watch(
        Storage.open(saving.url),
        interval_seconds=saving.merge_seconds,
        on_event=tell,
        stop=stop,
        rules=Rules(keep_last=saving.keep_last, pinned=frozenset(saving.pinned)),
        dead=frozenset(saving.dead),
    )
