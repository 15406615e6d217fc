"""What does partial recovery cost, and what does it lose? In parts, each of at most ten minutes; see the files of each.

    overhead   what saves, loads and rescheduling take with real kills, and what follows for a job of 56 hours
    auc        AUC that a failure costs, exactly: runs that differ in nothing else
    pls        whether PLS tells how much AUC is lost, over many runs with many failures
    figure6    whether counting updates of a row tells how much it has changed
    cost       samples per second and memory that counting takes
    stall      a server with many rows is killed: how long workers wait; and whether saves hold anybody up
    side       the same kills with full and delta checkpoints, partial recovery and erasure coding

The published figures are those of CPR (MLSys 2021); docs/benchmarks.md has them beside ours.
"""

from __future__ import annotations

import importlib
from typing import Any

from regrow.bench import common, plots
from regrow.errors import UserError
from regrow.protection import nearest

SUMMARY = "Partial recovery: overhead, AUC lost, what PLS tells, cost of priorities, stalls (--part)."

# By part: the file that measures it.
PARTS = {
    "overhead": "cpr_overhead",
    "auc": "cpr_auc",
    "pls": "cpr_pls",
    "figure6": "cpr_access",
    "cost": "cpr_cost",
    "stall": "cpr_stall",
    "side": "cpr_side",
}


def run(
    *, quick: bool, json_path: str | None, part: str | None = None, data: str | None = None, docs: str | None = None
) -> int:
    if part is not None and part not in PARTS:
        raise UserError(f"bench cpr has no part {part!r}", hint=nearest(part, PARTS))
    report = common.Report.start("cpr")
    for name in PARTS if part is None else (part,):
        common.console.rule(name, align="left")
        import_part(name).measure(report, quick=quick, data=data)
    code = report.finish(json_path)
    if plots.has_picture(report.to_dict()):
        plots.save(report.to_dict(), json_path=json_path, docs=docs)
    return code


def import_part(name: str) -> Any:
    return importlib.import_module(f"regrow.bench.{PARTS[name]}")
