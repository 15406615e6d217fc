"""The `regrow` command with fake children: `python fake_regrow.py PLAN.json train ...`."""

from __future__ import annotations

import functools
import json
import signal
import sys
from pathlib import Path

from regrow.cli import main as cli
from regrow.launch import local

if __name__ == "__main__":
    # Shells start background jobs with Ctrl-C ignored; the tests may be such a job, and this inherits it.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    plan = json.loads(Path(sys.argv[1]).read_text())
    patience = local.Patience(**plan["patience"])
    command = [sys.executable, str(Path(__file__).with_name("fake_child.py")), sys.argv[1]]
    local.train = functools.partial(local.train, command=command, patience=patience, memory_check=False)
    cli.main(sys.argv[2:])
