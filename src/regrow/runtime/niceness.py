"""How far a process stands back for others that want the same processors.

Niceness alone does not say: where Linux schedules sessions against each other (autogroup), as it does by default, a
thread's niceness counts within its session only, and every process of a run has a session of its own. So a session has
to be nice as well. Anybody may make it less nice again, down to zero.
"""

from __future__ import annotations

import contextlib
import re
import time
from pathlib import Path

GROUP = Path("/proc/self/autogroup")
# Without a superuser's rights Linux takes one such change every tenth of a second, of all processes together. Too
# short: a process stays nice for good where many change at once. Too long: whoever starts waits.
TAKEN_SECONDS_MAX = 2.0
TRY_SECONDS = 0.05


def find_session_niceness() -> int | None:
    """None: sessions are not scheduled against each other here."""
    with contextlib.suppress(OSError):
        found = re.search(r" nice (-?\d+)", GROUP.read_text())
        return int(found[1]) if found else None
    return None


def set_session_niceness(niceness: int) -> bool:
    """Whether it is so from here on."""
    for _ in range(int(TAKEN_SECONDS_MAX / TRY_SECONDS)):
        try:
            GROUP.write_text(str(niceness))
        except BlockingIOError:
            time.sleep(TRY_SECONDS)
        except OSError:  # not there, or switched off
            return False
        else:
            return True
    return False
