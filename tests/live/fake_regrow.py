"""The `regrow` command with fake children: `python fake_regrow.py PLAN.json train ...`."""

from __future__ import annotations

import functools
import json
import sys
from pathlib import Path

from regrow import cli
from regrow.launch import local

if __name__ == "__main__":
    plan = json.loads(Path(sys.argv[1]).read_text())
    patience = local.Patience(**plan["patience"])
    command = [sys.executable, str(Path(__file__).with_name("fake_child.py")), sys.argv[1]]
    local.train = functools.partial(local.train, command=command, patience=patience, memory_check=False)
    cli.main(sys.argv[2:])
