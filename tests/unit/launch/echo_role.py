"""A role that answers every command, for tests of backends: as a process behind pipes (`python echo_role.py`) or as
whatever another backend makes of `run`."""

from __future__ import annotations

import sys

from regrow.launch.orders import Become, Evaluate, MakeCheckpoint, PeerDied, Stop
from regrow.launch.reports import Error, Evaluating, Listening, Replace, Stopped
from regrow.runtime.parent import Parent

FAILURE = Error(message="asked to fail", kind="user")


def run(parent: Parent) -> int:
    """Returns its exit code."""
    answers = 0
    parent.report(Listening(address=parent.assignment.listen))
    while True:
        command = parent.next_command()
        answers += 1
        match command:
            case Evaluate():
                parent.report(Evaluating(samples=answers))
            case Become(assignment=assignment):
                parent.become(assignment)
                parent.report(Listening(address=parent.assignment.listen))
            case PeerDied(peer=peer):
                parent.report(Replace(peer=peer, reason=parent.assignment.config["words"]))
            case MakeCheckpoint():
                parent.report(FAILURE)
                return 1
            case Stop() if not parent.assignment.config.get("deaf"):
                parent.report(Stopped(peak_rss_bytes=1 << 20))
                return 0


if __name__ == "__main__":
    from regrow.launch.pipes import PipeParent

    code = run(PipeParent())
    sys.exit(code)
