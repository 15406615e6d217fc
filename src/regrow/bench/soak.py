"""Does it last? One long training in which servers, workers and the coordinator are killed at random.

At the end the run must have ended well, no process may have grown, what waits to be resent must have stayed within
its bounds, and every parity must be that of its stripe. Other benchmarks measure; this one also judges: it returns 1
when something is wrong, and then leaves the run directory with its logs behind.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from regrow.bench import common, recovery, train
from regrow.config import TrainConfig
from regrow.errors import EXIT_FAILED, EXIT_OK, Interrupted, RegrowError, UserError
from regrow.launch import local
from regrow.launch.status import RunStatus
from regrow.nn.check import check_parity

SUMMARY = "A long training with random kills of every role: no leak, no growth, no wrong parity."

__all__ = ["SUMMARY", "check_parity", "run"]

MINUTES, MTBF_SECONDS = 10.0, 20.0
MINUTES_QUICK, MTBF_SECONDS_QUICK = 0.5, 8.0
ROLES = ("server", "worker", "coordinator")
SERVERS, WORKERS, K, R = 4, 2, 2, 1
BATCH, ROWS_MAX, ROWS_MAX_QUICK = 1024, 100_000, 10_000
GROWTH_TARGET = 1.1  # resident memory in the last third of the run / in the first
SAMPLE_SECONDS = 1.0
TELL_SECONDS = 30.0


def run(*, quick: bool, json_path: str | None, minutes: float | None = None, mtbf: float | None = None) -> int:
    minutes = minutes or (MINUTES_QUICK if quick else MINUTES)
    mtbf = mtbf or (MTBF_SECONDS_QUICK if quick else MTBF_SECONDS)
    if not 0.05 <= minutes <= 10_000:
        raise UserError(f"--minutes {minutes:g}: must be between 0.05 and 10000")
    report = common.Report.start("soak")
    directory = Path(tempfile.mkdtemp(prefix="regrow-soak-"))
    keep = False
    try:
        config = make_config(directory, mtbf=mtbf, rows_max=ROWS_MAX_QUICK if quick else ROWS_MAX)
        rate = recovery.train_undisturbed(
            config.replace(mtbf=None, **recovery.knobs(check_parity=False)), seconds=4.0, rate=8_000.0
        )
        steps = recovery.steps_of(config, minutes * 60, rate.rate_whole())
        common.console.print(f"training for about {minutes:g} minutes ({steps:,} steps), a kill every {mtbf:g} s or so")
        watch = Watch()
        try:
            summary = local.train(config.replace(steps=steps), overwrite=True, display=watch)
        except Interrupted:
            raise
        except RegrowError:
            keep = True
            raise
        judge(report, config, summary, watch)
        code = report.finish(json_path)
        keep = not all(ratio.met for ratio in report.ratios.values())
        return EXIT_FAILED if keep else code or EXIT_OK
    finally:
        if keep:
            common.console.print(f"the run directory is kept: {directory / 'run'}")
        else:
            shutil.rmtree(directory, ignore_errors=True)


def make_config(directory: Path, *, mtbf: float, rows_max: int) -> TrainConfig:
    return TrainConfig(
        model="kaggle",
        rows_max=rows_max,
        batch=BATCH,
        servers=SERVERS,
        workers=WORKERS,
        protection="ec",
        k=K,
        r=R,
        mtbf=mtbf,
        mtbf_roles=",".join(ROLES),
        seed=train.SEED,
        steps=1,
        test_rows=BATCH,
        digest=False,
        out=str(directory / "run"),
        **recovery.knobs(check_parity=True),
    )


# -- who grows -----------------------------------------------------------------------------------------------


class Watch(recovery.Trace):
    """Samples the memory of every process and what servers keep for resending; says now and then how it goes."""

    def __init__(self) -> None:
        super().__init__()
        # role -> (when, bytes of the largest process of that role).
        self.resident: dict[str, list[tuple[float, int]]] = {}
        self.kept_bytes_max: int | None = None
        self._sampled_at = self._told_at = time.monotonic()
        self._started_at = time.monotonic()

    def update(self, status: RunStatus, now: float) -> None:
        super().update(status, now)
        kept = [getattr(server, "kept_bytes_max", getattr(server, "kept_bytes", None)) for server in status.servers]
        known = [int(count) for count in kept if count is not None]
        if known:
            self.kept_bytes_max = max(self.kept_bytes_max or 0, *known)
        if status.phase != "training":
            return
        if now - self._sampled_at >= SAMPLE_SECONDS:
            self._sampled_at = now
            for role, count in resident_bytes().items():
                self.resident.setdefault(role, []).append((now, count))
        if now - self._told_at >= TELL_SECONDS:
            self._told_at = now
            rate = status.samples_per_s(now)
            common.console.print(
                f"{(now - self._started_at) / 60:.1f} min: step {status.step:,}, "
                f"{len(status.failures.all)} failures so far, {rate or 0:,.0f} samples/s"
            )


def resident_bytes(proc: Path = Path("/proc"), own: int | None = None) -> dict[str, int]:
    """Resident bytes of the largest child of each role, and of this process; empty where /proc does not tell.

    A child's stderr goes to a log named after its role. A spare counts as the server it may have become.
    """
    own = os.getpid() if own is None else own
    found: dict[str, int] = {}
    page = os.sysconf("SC_PAGE_SIZE")
    with contextlib.suppress(OSError):
        for entry in sorted(proc.iterdir()):
            if not entry.name.isdigit():
                continue
            with contextlib.suppress(OSError, ValueError, IndexError):
                pid = int(entry.name)
                parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
                if pid != own and parent != own:
                    continue
                log = Path(os.readlink(entry / "fd" / "2")).stem if pid != own else "launcher"
                role = log.rpartition("-")[0].partition("-")[0] or log
                role = "server" if role == "standby" else role
                if role not in (*ROLES, "launcher"):
                    continue
                count = int((entry / "statm").read_text().split()[1]) * page
                found[role] = max(found.get(role, 0), count)
    return found


def growth(samples: Sequence[tuple[float, int]]) -> float | None:
    """Median of the last third of the time / of the first; None where there is too little."""
    if len(samples) < 6:
        return None
    begin, end = samples[0][0], samples[-1][0]
    third = (end - begin) / 3
    first = [count for at, count in samples if at <= begin + third]
    last = [count for at, count in samples if at >= end - third]
    return statistics.median(last) / statistics.median(first)


# -- the verdict ---------------------------------------------------------------------------------------------


def judge(report: common.Report, config: TrainConfig, summary: dict[str, Any], watch: Watch) -> None:
    failures = summary["failures"]
    report.rows += [{"kind": "failure", **failure} for failure in failures]
    report.rows += [{"kind": "role", **row} for row in by_role(failures)]
    report.rows.append(
        {
            "kind": "run",
            "status": summary["status"],
            "seconds": summary["seconds"],
            "steps_done": summary["steps_done"],
            "samples_per_second": summary["samples_per_s"],
            "redo_bytes_peak": summary["redo_bytes_peak"],
            "kept_bytes_max": watch.kept_bytes_max,
            "parity_stripes": summary.get("parity_stripes"),
            "parity_wrong": summary.get("parity_wrong"),
            **watch.others(),
        }
    )
    for role, samples in sorted(watch.resident.items()):
        ratio = growth(samples)
        report.rows.append({"kind": "memory", "role": role, "growth": common.round_known(ratio, 4), **_ends(samples)})
        if ratio is not None:
            report.ratios[f"memory_growth_{role}"] = common.Ratio.of([ratio], target=GROWTH_TARGET, better="lower")
    report.ratios["redo_of_its_bound"] = common.Ratio.of(
        [summary["redo_bytes_peak"] / config.redo_bytes_max], target=1.0, better="lower"
    )
    stripes, wrong = read_parity_check(summary)
    report.ratios["wrong_stripes"] = common.Ratio.of([float(wrong)], target=0.0, better="lower")
    report.ratios["stripes_checked"] = common.Ratio.of([float(stripes)], target=1.0)
    print_rows(report)
    common.console.print(verdict(summary, stripes=stripes, wrong=wrong))


def _ends(samples: Sequence[tuple[float, int]]) -> dict[str, int]:
    counts = [count for _, count in samples]
    return {"first_bytes": counts[0], "last_bytes": counts[-1], "most_bytes": max(counts), "samples": len(counts)}


def read_parity_check(summary: dict[str, Any]) -> tuple[int, int]:
    """(stripes, wrong) as worker 0 found them at the end; (0, 0) where nobody looked."""
    return int(summary.get("parity_stripes") or 0), int(summary.get("parity_wrong") or 0)


def verdict(summary: dict[str, Any], *, stripes: int, wrong: int) -> str:
    survived = len(summary["failures"])
    text = f"the run ended {summary['status']} after {survived} failures in {summary['seconds'] or 0:.0f} s; "
    if not stripes:
        return text + "[yellow]its parities were not checked[/]"
    if wrong:
        return text + f"[red]{wrong:,} of {stripes:,} stripes have a wrong parity[/]"
    return text + f"all {stripes:,} stripes agree with their parities"


def by_role(failures: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """How often each role died, and how long it took until training and rows were back."""
    rows = []
    for role in ROLES:
        mine = [failure for failure in failures if failure["role"] == role]
        row: dict[str, Any] = {"role": role, "failures": len(mine)}
        for name in ("detected_s", "resumed_s", "recovered_s"):
            known = [failure[name] for failure in mine if failure[name] is not None]
            row[name] = [round(statistics.median(known), 3), round(max(known), 3)] if known else None
        # The last ones may have come too late for that.
        row["open_at_the_end"] = sum(failure["recovered_s"] is None for failure in mine)
        rows.append(row)
    return rows


def print_rows(report: common.Report) -> None:
    common.print_table(
        "failures survived; seconds from the death, median and most",
        ("role", "failures", "detected", "training again", "all rows back", "open at the end"),
        [
            (
                row["role"],
                str(row["failures"]),
                *(_pair(row[name]) for name in ("detected_s", "resumed_s", "recovered_s")),
                str(row["open_at_the_end"]),
            )
            for row in report.rows
            if row["kind"] == "role"
        ],
    )
    common.print_table(
        "resident memory of the largest process of each role",
        ("role", "first", "last", "most", "last third / first third"),
        [
            (
                row["role"],
                *(f"{row[name] / 2**20:,.0f} MiB" for name in ("first_bytes", "last_bytes", "most_bytes")),
                "-" if row["growth"] is None else f"{row['growth']:.3f}",
            )
            for row in report.rows
            if row["kind"] == "memory"
        ],
    )


def _pair(values: Sequence[float] | None) -> str:
    return "-" if values is None else f"{values[0]:.2f}, {values[1]:.2f}"
