"""Goal: of several that fail together, the one is named that the others fail because of. Method: suspects of every rank
in every order."""

from __future__ import annotations

import itertools
import queue
import signal

import pytest
from thread_backend import ThreadHandle

from regrow.core.identity import Identity
from regrow.launch.backend import Exit
from regrow.launch.causes import Suspect, find_cause
from regrow.launch.reports import Error

KILLED, FAILED = Exit(code=-signal.SIGKILL), Exit(code=7)


class Dead(ThreadHandle):
    """A process that left a log."""

    def __init__(self, role: str, id: int, *, words: str | None = None) -> None:
        super().__init__(Identity(role=role, id=id), queue.Queue())
        self.log = f"logs/{role}-{id}.log"
        self._words = words

    def read_last_words(self) -> str | None:
        return self._words


SERVER, WORKER = Dead("server", 1), Dead("worker", 0, words="Boom: no luck")


def by_exit(handle: Dead, exit: Exit, *, stopping: bool = False, refusal: str | None = None) -> Suspect:
    return Suspect.from_exit(handle, exit, step=3, stopping=stopping, refusal=refusal)


def test_the_cause_comes_before_its_victims() -> None:
    """Killed, gone without a word, complaining, missing another."""
    ranked = [
        by_exit(SERVER, KILLED),
        by_exit(WORKER, FAILED),
        Suspect.from_error(WORKER, Error(message="x", kind="bug")),
        Suspect.from_error(WORKER, Error(message="x", kind="lost")),
    ]
    for suspects in itertools.permutations(ranked):
        assert find_cause(suspects) is ranked[0]
        assert find_cause([suspect for suspect in suspects if suspect is not ranked[0]]) is ranked[1]
    again = by_exit(WORKER, KILLED)
    assert find_cause([ranked[0], again]) is ranked[0], "the first of equals"


@pytest.mark.parametrize(
    ("suspect", "message", "hint"),
    [
        (
            by_exit(SERVER, KILLED),
            "server 1 was killed by SIGKILL at step 3; its log: logs/server-1.log",
            "if nobody killed it, the kernel did because memory ran out: `dmesg` says so",
        ),
        (
            by_exit(WORKER, FAILED),
            "worker 0 exited with code 7 at step 3; its log: logs/worker-0.log",
            "its last words: Boom: no luck",
        ),
        (
            by_exit(SERVER, KILLED, stopping=True),
            "server 1 did not stop when asked and was killed; its log: logs/server-1.log",
            None,
        ),
        (
            by_exit(SERVER, FAILED, stopping=True),
            "server 1 exited with code 7 while stopping; its log: logs/server-1.log",
            None,
        ),
        (
            by_exit(SERVER, FAILED, refusal="server 1 died 6 times within 60 s"),
            "server 1 died 6 times within 60 s; the last time it exited with code 7; its log: logs/server-1.log",
            None,
        ),
        (
            Suspect.from_error(WORKER, Error(message="no such file", kind="user", hint="look")),
            "worker 0: no such file",
            "look",
        ),
        (
            Suspect.from_error(WORKER, Error(message="no such file", kind="user")),
            "worker 0: no such file",
            None,
        ),
        (
            Suspect.from_error(WORKER, Error(message="KeyError: 3", kind="bug")),
            "worker 0: KeyError: 3",
            "its log: logs/worker-0.log",
        ),
    ],
)
def test_what_the_user_is_told(suspect: Suspect, message: str, hint: str | None) -> None:
    error = suspect.error()
    assert (error.message, error.hint) == (message, hint)


def test_damage_is_known() -> None:
    assert Suspect.from_error(SERVER, Error(message="x", kind="checkpoint")).damage
    rows = Suspect.from_error(SERVER, Error(message="row 3 of table 1", kind="damaged"))
    assert rows.rows_damaged and not rows.damage
    assert rows.hint is not None and "--resume URL of an ordinary checkpoint" in rows.hint
    assert not Suspect.from_error(SERVER, Error(message="x", kind="user")).damage
