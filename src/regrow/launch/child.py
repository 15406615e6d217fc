"""The main of every child process: `python -m regrow.launch.child`, told its role on stdin.

Errors end the process with one readable message to the launcher; the traceback, if any, is in the log
(stderr).
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import sys
import traceback

from regrow import _kernels
from regrow.errors import CheckpointError, ConnectionLost, DataLoss, RegrowError
from regrow.runtime.parent import Parent, name_process


def main() -> int:
    # The launcher decides when to stop: Ctrl-C in a terminal reaches only it.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent = Parent()
    role, index = parent.assignment["role"], parent.assignment["id"]
    name_process(role, index)
    logging.basicConfig(
        stream=sys.stderr, level=logging.INFO, format=f"%(asctime)s {role[0].upper()}{index} %(message)s"
    )
    _kernels.tune_malloc(one_heap=role != "worker")
    try:
        if role == "worker":
            from regrow.nn import worker

            worker.run(parent)
        elif role == "merger":
            from regrow.runtime import merging

            merging.run(parent)
        elif role == "standby":
            from regrow.runtime import serve

            serve.standby(parent)
        else:
            from regrow.runtime import serve

            serve.run(parent)
    except RegrowError as error:
        logging.error("%s", error)
        # Whoever lost a peer is a victim: the launcher looks for the cause elsewhere first.
        kinds = ((ConnectionLost, "lost"), (DataLoss, "data_loss"), (CheckpointError, "checkpoint"))
        kind = next((kind for of, kind in kinds if isinstance(error, of)), "user")
        parent.report("error", message=error.message, hint=error.hint, kind=kind)
        return 1
    except MemoryError as error:
        traceback.print_exc()
        parent.report("error", message=f"out of memory: {error}", kind="user")
        return 1
    except Exception as error:
        traceback.print_exc()
        parent.report("error", message=f"{type(error).__name__}: {error}", kind="bug")
        return 1
    parent.report_stopped()
    return 0


if __name__ == "__main__":
    code = main()
    logging.shutdown()
    with contextlib.suppress(OSError):  # a log on a full disk is no reason to fail
        sys.stderr.flush()
    # Taking an interpreter with torch apart takes a second and frees nothing that exiting does not.
    os._exit(code)
