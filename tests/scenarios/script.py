"""A scenario's file: paragraphs of comments, and blocks of commands with what they print.

    # why
    push W0 rows 0
    deliver
    ----
    W0 -> S0  Push 1 rows 0

A block ends at an empty line. `play` runs a text and returns it as it should be: equal to the file, or the file is
out of date. A block that prints nothing says `ok`.
"""

from __future__ import annotations

import contextlib

from scenarios.cluster import Cluster, ScenarioError

RULE = "----"


def play(text: str) -> str:
    """The same text with the outputs of now. An error of a machine or a command is a part of the output."""
    lines = text.splitlines()
    out: list[str] = []
    block: list[str] = []
    with contextlib.ExitStack() as stack:
        player = Player(stack)
        at = 0
        while at < len(lines):
            line = lines[at].rstrip()
            at += 1
            out.append(line)
            if line == RULE:
                out += [each for command in block for each in player.run(command)] or ["ok"]
                block = []
                while at < len(lines) and lines[at].strip():
                    at += 1
            elif line and not line.startswith("#"):
                block.append(line)
    if block:
        raise ScenarioError(f"after {block[-1]!r} a line {RULE} is missing")
    return "\n".join(out) + "\n"


class Player:
    """Runs commands, of which the first makes the cluster."""

    def __init__(self, stack: contextlib.ExitStack) -> None:
        self._stack = stack
        self._cluster: Cluster | None = None

    def run(self, command: str) -> list[str]:
        try:
            word, *options = command.split()
            if word == "cluster":
                self._cluster = Cluster(options, self._stack)
                return self._cluster.printed
            if self._cluster is None:
                raise ScenarioError("a scenario begins with `cluster`")
            return self._cluster.run(command)
        except Exception as error:
            printed = self._cluster.printed if self._cluster is not None else []
            return [*printed, f"error at {command!r}: {type(error).__name__}: {error}"]
