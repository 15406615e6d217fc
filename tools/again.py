"""Runs once more, alone and one after the other, the few tests with real processes that failed beside others.

    python tools/again.py PYTEST...

Such a test waits for processes, and a machine that stands still for some seconds fails it. What fails alone as well
fails. Tests without processes get no second try, and neither do more than FEW together: that is no accident.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

FEW = 5
LAST_FAILED = Path(".pytest_cache/v/cache/lastfailed")


def main(pytest: list[str]) -> int:
    failed = sorted(json.loads(LAST_FAILED.read_text())) if LAST_FAILED.exists() else []
    others = [test for test in failed if not test.startswith("tests/live/")]
    if not failed or others or len(failed) > FEW:
        print(f"not tried again: {len(failed)} tests failed, {len(others)} of them without processes")
        return 1
    print("these failed beside others, and are tried again alone:", *failed, sep="\n  ", flush=True)
    return subprocess.run([*pytest, *failed], check=False).returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
