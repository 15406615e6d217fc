"""Goal: a merger leaves the processor to training, also where the system schedules sessions against each other.

Method: a process in a session of its own, as the launcher starts them, says what the system made of its wish.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from regrow.runtime.merging import NICENESS

CODE = """
import os
from pathlib import Path
from regrow.runtime.merging import yield_to_training
yield_to_training()
group = Path("/proc/self/autogroup")
print(os.nice(0), group.read_text() if group.exists() else "")
"""


def test_it_is_nice_to_other_sessions_too() -> None:
    done = subprocess.run(
        [sys.executable, "-c", CODE], capture_output=True, text=True, check=True, start_new_session=True
    )
    nice, *group = done.stdout.split()
    assert int(nice) == NICENESS
    switch = Path("/proc/sys/kernel/sched_autogroup_enabled")
    if not group or not switch.exists() or switch.read_text().strip() != "1":
        pytest.skip("sessions are not scheduled against each other here")
    assert group[1:] == ["nice", str(NICENESS)]
