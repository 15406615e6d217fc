"""What do rows on disk cost? In parts, each of one to three minutes (`checkpoint` alone: nine); see the files of each.

    time        training with rows on disk, and in files in memory, against all rows in memory; other policies; money
    cache       caches from a thousandth to a fifth of the rows; skews; misses as time goes on
    checkpoint  checkpoints in the files every 100 steps against none, and against deltas on storage
    recovery    going back to a checkpoint in the files against loading a full one
    store       a cache that holds everything against rows in memory; bytes written for a row that leaves

What the devices do by themselves is measured first, in the same run. The disk is the directory of temporary files
(`TMPDIR`), past the page cache; a directory in memory stands for persistent memory. The published figures are those of
OpenEmbedding (ICDE 2023); docs/benchmarks.md has ours.
"""

from __future__ import annotations

import dataclasses
import importlib
import time
from typing import Any

from regrow.bench import common, tiered_live
from regrow.errors import UserError
from regrow.protection import nearest

SUMMARY = "Rows on disk: training time, caches, checkpoints in the files, recovery, bytes written (--part)."

# By part: the file that measures it.
PARTS = {
    "time": "tiered_time",
    "cache": "tiered_cache",
    "checkpoint": "tiered_checkpoint",
    "recovery": "tiered_recovery",
    "store": "tiered_store",
}
DEVICE_BYTES, DEVICE_SECONDS = 512 << 20, 1.0
DEVICE_BYTES_QUICK, DEVICE_SECONDS_QUICK = 64 << 20, 0.2


def run(*, quick: bool, json_path: str | None, part: str | None = None) -> int:
    if part is not None and part not in PARTS:
        raise UserError(f"bench tiered has no part {part!r}", hint=nearest(part, PARTS))
    report = common.Report.start("tiered")
    setting = dataclasses.replace(measure_devices(report, quick=quick), alone=part is not None)
    for name in PARTS if part is None else (part,):
        measure_part(report, name, setting)
        if json_path is not None:  # minutes of figures are not lost with the next part
            common.write_json(json_path, report.to_dict())
    return report.finish(json_path)


def measure_devices(report: common.Report, *, quick: bool) -> tiered_live.Setting:
    size_bytes = DEVICE_BYTES_QUICK if quick else DEVICE_BYTES
    places = tiered_live.find_places(size_bytes=size_bytes, seconds=DEVICE_SECONDS_QUICK if quick else DEVICE_SECONDS)
    for place in places.values():
        device = place.device
        report.rows.append(device.to_dict())
        common.console.print(
            f"{place.label}: {device.random_reads_best:,.0f} random reads/s, reads {device.read_bytes_per_s / 1e9:.2f} "
            f"and writes {device.write_bytes_per_s / 1e9:.2f} GB/s{'' if device.direct else ', through the page cache'}"
        )
    return tiered_live.Setting(quick=quick, places=places)


def measure_part(report: common.Report, name: str, setting: tiered_live.Setting) -> None:
    common.console.rule(name, align="left")
    began = time.monotonic()
    import_part(name).measure(report, setting)
    seconds = time.monotonic() - began
    report.rows.append({"kind": "part", "part": name, "seconds": round(seconds, 1)})
    common.console.print(f"{name} took {seconds:.0f} s")


def import_part(name: str) -> Any:
    return importlib.import_module(f"regrow.bench.{PARTS[name]}")
