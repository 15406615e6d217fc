"""A spare imports torch while everybody else goes first, and takes its place as a process like any other.

In a process of its own: what it imports must not have been imported before.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from regrow.launch.child import SPARE_NICENESS

PROGRAM = """
import json, os, sys
from regrow.launch.child import import_gently
from regrow.runtime.niceness import find_session_niceness
before = find_session_niceness()
import_gently("slow")
import slow, numpy
threads = [int(name) for name in os.listdir("/proc/self/task")]
# One that has just ended may still be listed; it cannot be asked any more, or soon not.
niceness = {os.getpriority(os.PRIO_PROCESS, thread) for thread in threads if thread != slow.thread}
print(json.dumps([slow.niceness, sorted(niceness), before, slow.session, find_session_niceness()]))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="niceness is a process's there")
def test_an_import_stands_back_and_nobody_else_does(tmp_path: Path) -> None:
    (tmp_path / "slow.py").write_text(
        "import os, threading\nthread = threading.get_native_id()\nniceness = os.getpriority(os.PRIO_PROCESS, 0)\n"
        "from regrow.runtime.niceness import find_session_niceness\nsession = find_session_niceness()\n"
    )
    env = {**os.environ, "PYTHONPATH": str(tmp_path), "OPENBLAS_NUM_THREADS": "2"}
    said = subprocess.run(
        [sys.executable, "-c", PROGRAM], env=env, capture_output=True, text=True, timeout=60, start_new_session=True
    )
    assert said.returncode == 0, said.stderr
    own = os.getpriority(os.PRIO_PROCESS, 0)
    thread, others, before, session, after = json.loads(said.stdout)
    assert (thread, others) == (max(SPARE_NICENESS, own), [own])
    # Sessions are scheduled against each other: without its session's the niceness of a thread is for nobody.
    switch = Path("/proc/sys/kernel/sched_autogroup_enabled")
    is_grouped = before is not None and switch.exists() and switch.read_text().strip() == "1"
    assert (session, after) == (max(SPARE_NICENESS, before) if is_grouped else before, before)


def test_what_cannot_be_imported_is_left_to_whoever_needs_it(tmp_path: Path) -> None:
    program = "from regrow.launch.child import import_gently\nimport_gently('broken')\nimport broken"
    (tmp_path / "broken.py").write_text("raise ValueError('as ever')")
    env = {**os.environ, "PYTHONPATH": str(tmp_path)}
    said = subprocess.run([sys.executable, "-c", program], env=env, capture_output=True, text=True, timeout=60)
    assert said.returncode == 1
    assert said.stderr.count("ValueError: as ever") == 1
