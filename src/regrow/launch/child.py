"""The main of every child process: `python -m regrow.launch.child`, told its role on stdin.

Errors end the process with one readable message to the launcher; the traceback, if any, is in the log
(stderr).
"""

from __future__ import annotations

import importlib
import logging
import os
import signal
import sys
import threading
import traceback

from regrow import _kernels
from regrow.errors import CheckpointError, ConnectionLost, DataLoss, RegrowError, StoreDamaged, StoreSilent
from regrow.launch.parents import log_format
from regrow.launch.pipes import PipeParent
from regrow.launch.reports import Error, ErrorKind, Stopped
from regrow.runtime.niceness import find_session_niceness, set_session_niceness
from regrow.runtime.parent import Parent, peak_rss_bytes
from regrow.runtime.streams import replace_standard_streams

# Whoever lost a peer is a victim: the launcher looks for the cause elsewhere first.
ERROR_KINDS: tuple[tuple[type[RegrowError], ErrorKind], ...] = (
    (ConnectionLost, "lost"),
    (DataLoss, "data_loss"),
    (CheckpointError, "checkpoint"),
    (StoreSilent, "silent"),
    (StoreDamaged, "damaged"),
)


WORKERS = ("worker", "understudy")  # whoever needs torch
# How far a spare of a worker stands back while it imports torch, which takes seconds of a processor in the middle of
# training. Too small: steps wait for it. Too large: on a machine that never rests it is not ready for minutes, and does
# not even answer. If somebody dies meanwhile, there is a processor to spare, and it is ready as soon as ever.
SPARE_NICENESS = 15


def main() -> int:
    # The launcher decides when to stop: Ctrl-C in a terminal reaches only it.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent = PipeParent()
    replace_standard_streams()
    who = parent.assignment.identity
    logging.basicConfig(stream=sys.stderr, level=logging.INFO, format=log_format(who))
    _kernels.tune_malloc(one_heap=who.role not in WORKERS)
    try:
        return _run(parent)
    finally:
        parent.close()


def _run(parent: Parent) -> int:
    """The exit code of a role."""
    try:
        run_role(parent)
    except RegrowError as error:
        logging.error("%s", error)
        kind: ErrorKind = next((kind for of, kind in ERROR_KINDS if isinstance(error, of)), "user")
        parent.report(Error(message=error.message, hint=error.hint, kind=kind))
        return 1
    except MemoryError as error:
        traceback.print_exc()
        parent.report(Error(message=f"out of memory: {error}", kind="user"))
        return 1
    except Exception as error:
        traceback.print_exc()
        parent.report(Error(message=f"{type(error).__name__}: {error}", kind="bug"))
        return 1
    parent.report(Stopped(peak_rss_bytes=peak_rss_bytes()))
    return 0


def run_role(parent: Parent) -> None:
    """Does what this process is for, until it is told to stop. Imports are late: only workers need torch."""
    role = parent.assignment.identity.role
    if role == "understudy":
        import_gently("regrow.nn.worker")
    if role in WORKERS:
        from regrow.nn import worker

        worker.stand_by(parent) if role == "understudy" else worker.run(parent)
    elif role == "merger":
        from regrow.runtime import merging

        merging.run(parent)
    else:
        from regrow.runtime import serve

        serve.standby(parent) if role == "standby" else serve.run(parent)


def import_gently(module: str) -> None:
    """Imports this while everybody else goes first: its thread, and its session while that is at it. In a thread of its
    own, as nobody but a superuser may take its niceness back; and numpy before, whose own threads would have it too.
    Where niceness is not a thread's but a whole process's, the import is like any other."""
    if sys.platform != "linux":
        return
    import numpy  # noqa: F401

    before = find_session_niceness()
    is_nice = before is not None and before < SPARE_NICENESS and set_session_niceness(SPARE_NICENESS)

    def stand_back() -> None:
        try:
            os.setpriority(os.PRIO_PROCESS, 0, max(SPARE_NICENESS, os.getpriority(os.PRIO_PROCESS, 0)))
            importlib.import_module(module)
        except Exception:  # whoever imports it next hears of it
            logging.debug("%s cannot be imported", module, exc_info=True)

    thread = threading.Thread(target=stand_back, name="import")
    thread.start()
    thread.join()
    if is_nice and before is not None and not set_session_niceness(before):
        logging.warning("this process could not take back that everybody else goes first: it may train slowly")


if __name__ == "__main__":
    code = main()
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    # Taking an interpreter with torch apart takes a second and frees nothing that exiting does not.
    os._exit(code)
