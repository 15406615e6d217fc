"""How long a launcher waits for what."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Patience:
    """In seconds.

    Too short: healthy processes on a busy machine are taken for stuck ones. Too long: the user waits in vain.
    """

    listen: float = 120.0  # for the coordinator's address; imports on a cold disk are slow
    stop: float = 30.0  # for a healthy process to finish after "stop"
    abort: float = 2.0  # for a process of a failed run
    term: float = 3.0  # from SIGTERM to SIGKILL
    cause: float = 0.5  # for the first death to show: its victims may be heard before it
    stall: float = 3600.0  # for anything to move while everybody answers: a mistake in this program, then
