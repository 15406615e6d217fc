"""The merger as a process of a run: folds deltas while training goes on, at a low priority.

Nothing depends on it. One that dies is started again; what it was writing has no manifest and does not count.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from pathlib import Path

from regrow.checkpoint.policy import Event, watch
from regrow.checkpoint.retention import Rules
from regrow.checkpoint.storage import Storage
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
    parent.on_command(lambda command: stop.set() if command.get("do") == "stop" else None)
    saving = parent.assignment["checkpoints"]

    def tell(event: Event) -> None:
        log.info("%s: %s", event.kind, event.text)
        parent.report("merge", kind=event.kind, text=event.text, piece=event.piece)

    parent.report("listening", address="")
    keep = saving["keep"]
    rules = Rules(keep_last=keep["keep_last"], pinned=frozenset(keep["pinned"]))
    storage, seconds = Storage.open(saving["url"]), saving["merge_seconds"]
    watch(storage, interval_seconds=seconds, on_event=tell, stop=stop, rules=rules, dead=frozenset(saving["dead"]))
