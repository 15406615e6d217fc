"""Every wait in this package: who waits for what, how long at most, who notices, and what happens then.

The rule: **every wait has a bound, an owner and a verdict.** Whoever adds one declares it here: the state of a machine
that waits (`core/states.py`), the function that blocks, the constant that bounds it. Tests find the states, the
functions and the constants by themselves and fail for those that nobody declared, and for those that are gone; the
table in `docs/failure-model.md` is made from this file (`make diagrams`).

A bound is a constant by its address, an option of the user, or another wait: then somebody else's verdict ends this
one, and that somebody is named.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Wait:
    """One line of the table. `bounds`: "module:CONSTANT", "--option", or "wait: NAME" for another line."""

    name: str
    who: str
    what: str
    bounds: tuple[str, ...]
    notices: str
    then: str
    states: tuple[str, ...] = ()
    calls: tuple[str, ...] = ()


WAITS: tuple[Wait, ...] = (
    # -- the launcher and its processes -----------------------------------------------------------------------
    Wait(
        name="answer",
        who="launcher",
        what="any process to answer",
        bounds=("--silent-seconds", "launch.watch:STARTING_SERVER_SECONDS", "launch.watch:MERGER_SECONDS"),
        notices="launcher (`launch/watch.py`)",
        then="it is killed and has a successor; where a death ends the run, the run ends and names it",
        states=("MEMBER.EMPTY", "MEMBER.DEAD"),
    ),
    Wait(
        name="start",
        who="launcher",
        what="a new process to answer for the first time",
        bounds=("launch.watch:START_SECONDS_MAX", "launch.cluster:START_SECONDS_MAX"),
        notices="launcher",
        then="the same",
        calls=("launch/cluster.py:LocalCluster._await_address",),
    ),
    Wait(
        name="work",
        who="launcher",
        what="a process that answers to end its piece of work: a step, a turn of its loop",
        bounds=("launch.watch:LONGEST_FACTOR", "--silent-seconds", "launch.watch:FIRST_SECONDS_MAX"),
        notices="launcher; the process says how long it is at it",
        then="the same: it is stuck",
        states=("MEMBER.STARTING",),
    ),
    Wait(
        name="progress",
        who="launcher",
        what="anything to move while everybody answers",
        bounds=("launch.local:Patience.stall",),
        notices="launcher",
        then="the run ends, or begins again from a checkpoint: this would be a mistake in the program",
        calls=("launch/local.py:_Run._until",),
    ),
    Wait(
        name="cause",
        who="launcher",
        what="the first death to show, when its victims were heard before it",
        bounds=("launch.local:Patience.cause", "launch.cluster:NEWS_SECONDS_MAX"),
        notices="launcher",
        then="the first that was heard counts as the cause",
        calls=("launch/local.py:_Run._gather", "launch/cluster.py:LocalCluster.client"),
    ),
    Wait(
        name="stop",
        who="launcher",
        what="processes to stop when told",
        bounds=(
            "launch.local:Patience.stop",
            "launch.local:Patience.abort",
            "launch.local:Patience.term",
            "launch.cluster:STOP_SECONDS",
        ),
        notices="launcher",
        then="SIGTERM, then SIGKILL",
        calls=("launch/backend.py:end", "launch/cluster.py:LocalCluster.close"),
    ),
    Wait(
        name="kill",
        who="launcher",
        what="the end of a process after SIGKILL",
        bounds=("launch.backend:KILL_SECONDS_MAX",),
        notices="launcher",
        then="the system does not let it go: it counts as ended, and is left behind",
        calls=("launch/processes.py:LocalProcesses.close",),
    ),
    Wait(
        name="launcher",
        who="any process",
        what="a launcher that is stopped to read its reports",
        bounds=("launch.pipes:LAUNCHER_SECONDS_MAX", "launch.pipes:FLUSH_SECONDS_MAX"),
        notices="the process; its work goes on meanwhile",
        then="it ends; a launcher that died is noticed at once, by its closed pipe",
        calls=("launch/pipes.py:PipeParent.close", "launch/pipes.py:PipeParent._write_late"),
    ),
    Wait(
        name="command",
        who="a spare, or a worker that is through",
        what="its next command",
        bounds=("wait: answer",),
        notices="launcher, which asks it all the while; its end closes the pipe",
        then="it ends with the launcher",
        calls=("launch/pipes.py:PipeParent.next_command", "launch/pipes.py:PipeParent.on_command"),
    ),
)

# Constants of time that bound no wait: how often something is done, how long something is shown.
PACES: dict[str, str] = {}


def find_constant(address: str) -> float:
    """The value of "module:NAME" or "module:Class.field"."""
    module, _, path = address.partition(":")
    value = importlib.import_module(f"regrow.{module}")
    for name in path.split("."):
        value = getattr(value, name)
    return float(value)


def show_bound(bound: str) -> str:
    """As the table has it: the name, and how long that is."""
    if bound.startswith("wait: "):
        return f"*{bound.removeprefix('wait: ')}*"
    if bound.startswith("--"):
        return f"`{bound}`"
    name = bound.partition(":")[2].rpartition(".")[2]
    return f"{find_constant(bound):g} s (`{name}`)"


def render() -> Iterator[str]:
    """The lines of the table."""
    yield "| | who | waits for | at most | who notices | then |"
    yield "| --- | --- | --- | --- | --- | --- |"
    for wait in WAITS:
        bounds = ", ".join(show_bound(bound) for bound in wait.bounds)
        yield f"| *{wait.name}* | {wait.who} | {wait.what} | {bounds} | {wait.notices} | {wait.then} |"
