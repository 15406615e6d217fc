"""The merger as a process of a run: folds deltas while training goes on, at a low priority.

Nothing depends on it. One that dies is started again; what it was writing has no manifest and does not count.
"""

from __future__ import annotations

import logging
import os
import threading

from regrow.checkpoint.merger import Event, watch
from regrow.checkpoint.retention import Rules
from regrow.checkpoint.storage import Storage
from regrow.launch.orders import Assignment, Stop
from regrow.launch.reports import Listening, MergerNews
from regrow.launch.saving import Saving
from regrow.runtime.niceness import set_session_niceness
from regrow.runtime.parent import Parent

log = logging.getLogger("regrow.merger")

NICENESS = 19  # Training comes first.


def yield_to_training() -> None:
    """Lowest priority."""
    os.nice(NICENESS)
    set_session_niceness(NICENESS)


def find_saving(assignment: Assignment) -> Saving:
    """What this one merges: the first checkpoints, if these are pieces, and the next publications."""
    merged = [saving for saving in (assignment.saving, assignment.publications) if saving and not saving.epochs]
    return merged[assignment.identity.id]


def run(parent: Parent) -> None:
    """Merges until told to stop."""
    yield_to_training()
    stop = threading.Event()
    parent.on_command(lambda command: stop.set() if isinstance(command, Stop) else None)
    saving = find_saving(parent.assignment)

    def tell(event: Event) -> None:
        log.info("%s: %s", event.kind, event.text)
        parent.report(MergerNews(kind=event.kind, text=event.text, piece=event.piece))

    parent.report(Listening(address=""))
    watch(
        Storage.open(saving.url),
        interval_seconds=saving.merge_seconds,
        on_event=tell,
        stop=stop,
        rules=Rules(
            keep_last=saving.keep_last,
            keep_full_every_seconds=saving.keep_full_every_seconds,
            pinned=frozenset(saving.pinned),
        ),
        dead=frozenset(saving.dead),
    )
