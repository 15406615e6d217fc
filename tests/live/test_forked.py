"""Goal: processes that are forked from the one with the `LocalCluster` are workers like any other: a server that dies
is replaced for them too, and one that ends takes nothing along.

Method: forked_workers.py as a process of its own; a wait without an end fails by its time.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.live

SCRIPT = Path(__file__).with_name("forked_workers.py")
SECONDS_MAX = 150.0


def run(kind: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(SCRIPT), kind]
    return subprocess.run(command, capture_output=True, text=True, timeout=SECONDS_MAX, check=False)


def test_a_server_that_dies_is_replaced_for_forked_workers() -> None:
    done = run("protected")
    assert (done.returncode, done.stdout.splitlines()) == (0, ["rows [-120.0], wanted [-120.0]"]), done.stderr


def test_without_protection_forked_workers_are_told() -> None:
    done = run("unprotected")
    assert done.returncode == 0, done.stderr
    lines = sorted(done.stdout.splitlines())
    assert [line[:25] for line in lines] == ["worker 0: ConnectionLost:", "worker 1: ConnectionLost:"]
