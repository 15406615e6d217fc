"""What does partial recovery cost, and what does it lose? In parts, each of at most ten minutes; see the files of each.
Without a part all of them are measured, one after the other, and the file is written after each; with real clicks
(`--data`), AUC is measured on made-up clicks and once more on these.

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
import time
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
    if part is not None:
        measure_part(report, part, quick=quick, data=data)
    else:
        for name in PARTS:
            measure_part(report, name, quick=quick)
            if name == "auc" and data is not None:
                measure_part(report, name, quick=quick, data=data)
            if json_path is not None:  # an hour of figures is not lost with the next part
                common.write_json(json_path, report.to_dict())
    code = report.finish(json_path)
    if plots.has_picture(report.to_dict()):
        plots.save(report.to_dict(), json_path=json_path, docs=docs)
    return code


def measure_part(report: common.Report, name: str, *, quick: bool, data: str | None = None) -> None:
    common.console.rule(name if data is None else f"{name}, {data}", align="left")
    began = time.monotonic()
    import_part(name).measure(report, quick=quick, data=data)
    seconds = time.monotonic() - began
    report.rows.append({"kind": "part", "part": name, "data": data, "seconds": round(seconds, 1)})
    common.console.print(f"{name} took {seconds:.0f} s")


def import_part(name: str) -> Any:
    return importlib.import_module(f"regrow.bench.{PARTS[name]}")
