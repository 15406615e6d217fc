"""Does it last? Long trainings in which processes of every role are killed, and hang, at random.

Servers, workers, the coordinator and spares; half of the failures are hangs (SIGSTOP), half of which never go on, while
the others come back long after they were replaced. First an asynchronous training, then a synchronous one, which must
end with the model of an undisturbed run, to the bit. Each must have ended well and never have stood still for long, no
process may have grown, what waits to be resent must have stayed within its bounds, and every parity must be that of its
stripe: at the end worker 0 reads all rows and parities and computes each parity anew (`nn/check.py`).

With `--store tiered` the rows are on disk, ten times as many as the cache holds, with a checkpoint in their files every
ten seconds, to which all go back when a server is lost. There are no parities then; the synchronous training must end
with the model of an undisturbed one in memory, and the files may not grow.

With `--cluster ray` it is something else: nodes are lost (`soak_nodes.py`).

Other benchmarks measure; this one also judges: it returns 1 when something is wrong, and then leaves the run directory
with its logs behind.
"""

from __future__ import annotations

import shutil
import statistics
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from regrow.bench import common, recovery, soak_nodes, train
from regrow.bench.soak_place import make_place
from regrow.bench.soak_watch import STILL_SECONDS_MAX, Samples, Watch, compare_thirds
from regrow.config import TrainConfig
from regrow.errors import EXIT_FAILED, EXIT_OK, UserError
from regrow.launch import local
from regrow.launch.display import QuietDisplay
from regrow.launch.tiers import FRAME_BYTES_BESIDE, Needs
from regrow.nn.check import check_parity
from regrow.protection import RANDOM_ROLES

SUMMARY = (
    "Long trainings with kills and hangs of every role, or (--cluster ray) nodes that are lost: nothing stuck or wrong."
)

__all__ = ["SUMMARY", "check_parity", "run"]

STORES = ("memory", "tiered")
CLUSTERS = ("local", "ray")
MINUTES, MTBF_SECONDS = 10.0, 20.0
MINUTES_QUICK, MTBF_SECONDS_QUICK = 1.0, 5.0
HANGS = 0.5  # of all failures
TIERED_EVERY = "10s"
CACHE_SHARE, TIERED_BATCH = 0.1, 256  # of the rows; a cache has room for two batches at least
SHARES = {"async": 0.6, "sync": 0.3}  # of the minutes; the rest is for the undisturbed run
PILOT_SHARE, PILOT_SECONDS_MAX = 0.15, 120.0  # a short run that is hit as often tells how many steps fill the time
SERVERS, WORKERS, K = 4, 2, 2
BATCH, ROWS_MAX, ROWS_MAX_QUICK = 1024, 100_000, 10_000
RATE_GUESS = 4_000.0
STATE_BYTES_MAX = 1 << 16  # of the file `state` of a server, its lock and what it says of its job
IMPORTED_SHARE = 0.5  # of the most that a spare worker takes: what has more has imported torch
GROWTH_TARGET = 1.1  # resident memory in the last third of the run / in the first
FILES_GROWTH_MAX = 8.0  # open files of a process, processes, socket files: in the last third - in the first
KINDS = ("kill", "hang", "late")


def run(
    *,
    quick: bool,
    json_path: str | None,
    minutes: float | None = None,
    mtbf: float | None = None,
    r: int | None = None,
    store: str | None = None,
    cluster: str = "local",
    losses: int | None = None,
) -> int:
    if cluster not in CLUSTERS:
        raise UserError(f"--cluster {cluster}: must be {' or '.join(CLUSTERS)}")
    if cluster == "ray":
        others = {"mtbf": mtbf, "r": r, "store": store}
        if unused := [name for name, value in others.items() if value is not None]:
            raise UserError(f"bench soak --cluster ray takes no --{unused[0]}")
        return soak_nodes.run(quick=quick, json_path=json_path, losses=losses, minutes=minutes)
    if losses is not None:
        raise UserError("--losses is for nodes", hint="--cluster ray; failures on one machine come as --mtbf says")
    r, store = r or 1, store or "memory"
    minutes = minutes or (MINUTES_QUICK if quick else MINUTES)
    mtbf = mtbf or (MTBF_SECONDS_QUICK if quick else MTBF_SECONDS)
    if not 0.05 <= minutes <= 10_000:
        raise UserError(f"--minutes {minutes:g}: must be between 0.05 and 10000")
    if r not in (1, 2):
        raise UserError(f"--r {r}: must be 1 or 2")
    if store not in STORES:
        raise UserError(f"--store {store}: must be {' or '.join(STORES)}")
    report = common.Report.start("soak")
    with make_place() as place:
        for mode, share in SHARES.items():
            rows_max = ROWS_MAX_QUICK if quick else ROWS_MAX
            config = make_config(place.path, mode=mode, mtbf=mtbf, r=r, rows_max=rows_max)
            if store == "tiered":
                config = put_on_disk(config, place.path / f"{mode}-rows")
            soak(report, config, seconds=60 * minutes * share)
        print_rows(report)
        code = report.finish(json_path)
        place.keep = not all(ratio.met for ratio in report.ratios.values())
        return EXIT_FAILED if place.keep else code or EXIT_OK


def make_config(directory: Path, *, mode: str, mtbf: float, r: int, rows_max: int) -> TrainConfig:
    return TrainConfig(
        model="kaggle",
        rows_max=rows_max,
        batch=BATCH,
        servers=SERVERS,
        workers=WORKERS,
        mode=mode,
        protection="ec",
        k=K,
        r=r,
        mtbf=mtbf,
        mtbf_roles=",".join(RANDOM_ROLES),
        mtbf_hangs=HANGS,
        seed=train.SEED,
        steps=1,
        test_rows=BATCH,
        digest=mode == "sync",
        check_parity=True,
        out=str(directory / mode),
    )


def put_on_disk(config: TrainConfig, directory: Path) -> TrainConfig:
    """The same training with rows in files, a part of them in memory, and checkpoints in the files."""
    config = config.replace(batch=TIERED_BATCH)
    needs = Needs(config)
    *tables, (dense_rows, _, dense_bytes) = needs.list_tables()
    row_bytes = sum(rows * (size + FRAME_BYTES_BESIDE) for rows, _, size in tables)
    wanted = int(CACHE_SHARE * row_bytes) + dense_rows * (dense_bytes + FRAME_BYTES_BESIDE)
    return config.replace(
        protection="batch",
        every=TIERED_EVERY,
        check_parity=False,
        store="tiered",
        store_dir=str(directory),
        cache_bytes=max(wanted, needs.cache_bytes_min),
    )


def soak(report: common.Report, config: TrainConfig, *, seconds: float) -> None:
    """One long run, and what is to be said of it."""
    sockets = Path(tempfile.gettempdir())
    pilot_seconds = min(PILOT_SHARE * seconds, PILOT_SECONDS_MAX)
    pilot = train_disturbed(config, Watch(sockets=sockets), recovery.steps_of(config, pilot_seconds, RATE_GUESS))
    steps = recovery.steps_of(config, seconds, pilot["samples"] / pilot["seconds"])
    common.console.print(
        f"{config.mode}: training for about {seconds / 60:.1f} minutes ({steps:,} steps), "
        + (f"r = {config.r}, " if config.store_dir is None else f"rows on disk, {config.cache_bytes:,} bytes cached, ")
        + f"a kill or a hang every {config.mtbf:g} s or so"
    )
    watch = Watch(sockets=sockets)
    summary = train_disturbed(config, watch, steps)
    judge(report, config, summary, watch)
    if config.mode == "sync":
        plain = make_config(Path(config.out or ""), mode="sync", mtbf=1.0, r=config.r, rows_max=config.rows_max or 0)
        quiet = plain.replace(steps=steps, batch=config.batch, mtbf=None, check_parity=False)
        undisturbed = local.train(quiet, overwrite=True, display=QuietDisplay())
        differs = summary["model_sha256"] != undisturbed["model_sha256"]
        report.ratios["sync_models_that_differ"] = common.Ratio.of([float(differs)], target=0.0, better="lower")


def train_disturbed(config: TrainConfig, watch: Watch, steps: int) -> dict[str, Any]:
    if config.store_dir is not None:  # rows of the run before
        shutil.rmtree(config.store_dir, ignore_errors=True)
        watch.rows = Path(config.store_dir)
    return local.train(config.replace(steps=steps), overwrite=True, display=watch)


# -- the verdict ---------------------------------------------------------------------------------------------


def judge(report: common.Report, config: TrainConfig, summary: dict[str, Any], watch: Watch) -> None:
    mode, failures = config.mode, summary["failures"]
    report.rows += [{"kind": "failure", "mode": mode, **failure} for failure in failures]
    report.rows += [{"kind": "role", "mode": mode, **row} for row in by_role(failures, summary["sabotage_random"])]
    report.rows.append(
        {
            "kind": "run",
            "mode": mode,
            "r": config.r,
            "status": summary["status"],
            "seconds": summary["seconds"],
            "steps_done": summary["steps_done"],
            "samples_per_second": summary["samples_per_s"],
            "still_seconds_longest": round(watch.still_seconds_longest, 1),
            "redo_bytes_peak": summary["redo_bytes_peak"],
            "kept_bytes_max": watch.kept_bytes_max,
            "parity_stripes": summary.get("parity_stripes"),
            "parity_wrong": summary.get("parity_wrong"),
            **watch.others(),
        }
    )
    stripes, wrong = read_parity_check(summary)
    found = {
        "seconds_without_a_step": (watch.still_seconds_longest, STILL_SECONDS_MAX),
        "redo_of_its_bound": (summary["redo_bytes_peak"] / config.redo_bytes_max, 1.0),
        **judge_growth(report, mode, watch),
    }
    if config.store_dir is None:
        found["wrong_stripes"] = float(wrong), 0.0
        report.ratios[f"{mode}_stripes_checked"] = common.Ratio.of([float(stripes)], target=1.0)
    else:
        found["files_of_their_bound"] = watch.rows_bytes_max / find_files_bound(config), 1.0
        report.rows[-1] |= {"rows_bytes_max": watch.rows_bytes_max, "restores": len(summary["restores"])}
    for name, (value, target) in found.items():
        report.ratios[f"{mode}_{name}"] = common.Ratio.of([value], target=target, better="lower")
    common.console.print(verdict(mode, summary, stripes=stripes, wrong=wrong, coded=config.store_dir is None))


def find_files_bound(config: TrainConfig) -> int:
    """What the files of all servers may take: homes, logs, and a page or two for the state of each."""
    needs = Needs(config)
    return config.servers * (needs.home_bytes + needs.count_log_bytes(least=False) + STATE_BYTES_MAX)


def judge_growth(report: common.Report, mode: str, watch: Watch) -> dict[str, tuple[float, float]]:
    """Value and bound of everything that must not grow."""
    found: dict[str, tuple[float, float]] = {}
    resident = {**watch.resident}
    if (since := watch.logs_full_at) is not None and "server" in resident:
        resident["server"] = [each for each in resident["server"] if each[0] >= since] or resident["server"]
    if (spares := resident.get("spare_worker")) is not None:
        # One that has not imported torch yet has a tenth of the memory, and that lasts as long as others are busy.
        most = max(count for _, count in spares)
        resident["spare_worker"] = [each for each in spares if each[1] > most * IMPORTED_SHARE]
    for kind, unit, all_samples in (("memory", "bytes", resident), ("files", "count", watch.files)):
        for role, samples in sorted(all_samples.items()):
            growth = None
            if (thirds := compare_thirds(samples)) is not None:
                first, last = thirds
                growth = round(last / first if kind == "memory" else last - first, 4)
                name, bound = ("memory_growth", GROWTH_TARGET) if kind == "memory" else ("more_files", FILES_GROWTH_MAX)
                found[f"{name}_{role}"] = (growth, bound)
            report.rows.append({"kind": kind, "mode": mode, "role": role, **_ends(samples, unit), "growth": growth})
    return found


def _ends(samples: Samples, unit: str) -> dict[str, int]:
    counts = [count for _, count in samples]
    ends = {"first": counts[0], "last": counts[-1], "most": max(counts)}
    return {**{f"{name}_{unit}": value for name, value in ends.items()}, "samples": len(counts)}


def read_parity_check(summary: dict[str, Any]) -> tuple[int, int]:
    """(stripes, wrong) as worker 0 found them at the end; (0, 0) where nobody looked."""
    return int(summary.get("parity_stripes") or 0), int(summary.get("parity_wrong") or 0)


def verdict(mode: str, summary: dict[str, Any], *, stripes: int, wrong: int, coded: bool = True) -> str:
    survived = len(summary["failures"])
    text = f"{mode}: the run ended {summary['status']} after {survived} failures in {summary['seconds'] or 0:.0f} s; "
    if not coded:
        return text + f"all went back to a checkpoint in the files of rows {len(summary['restores'])} times"
    if not stripes:
        return text + "[yellow]its parities were not checked[/]"
    if wrong:
        return text + f"[red]{wrong:,} of {stripes:,} stripes have a wrong parity[/]"
    return text + f"all {stripes:,} stripes agree with their parities"


def by_role(failures: Sequence[dict[str, Any]], done: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """How often each role was hit and replaced, and how long it took until training and rows were back. A spare has no
    place that somebody could miss; it is only hit."""
    rows = []
    for role in RANDOM_ROLES:
        mine = [failure for failure in failures if failure["role"] == role]
        hits = {kind: sum(row["count"] for row in done if (row["role"], row["kind"]) == (role, kind)) for kind in KINDS}
        row: dict[str, Any] = {"role": role, **hits, "failures": len(mine)}
        for name in ("detected_s", "resumed_s", "recovered_s"):
            known = [failure[name] for failure in mine if failure[name] is not None]
            row[name] = [round(statistics.median(known), 3), round(max(known), 3)] if known else None
        # The last ones may have come too late for that.
        row["open_at_the_end"] = sum(failure["recovered_s"] is None for failure in mine)
        rows.append(row)
    return rows


def print_rows(report: common.Report) -> None:
    common.print_table(
        "hit on purpose (late: went on 20 s later), and replaced; seconds from the failure, median and most",
        ("mode, role", "kills", "hangs", "late", "replaced", "known", "training again", "all rows back", "open"),
        [
            (
                f"{row['mode']}, {row['role']}",
                *(str(row[kind]) for kind in KINDS),
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
        ("mode, role", "first", "last", "most", "last third / first third"),
        [
            (
                f"{row['mode']}, {row['role']}",
                *(f"{row[name] / 2**20:,.0f} MiB" for name in ("first_bytes", "last_bytes", "most_bytes")),
                "-" if row["growth"] is None else f"{row['growth']:.3f}",
            )
            for row in report.rows
            if row["kind"] == "memory"
        ],
    )
    common.print_table(
        "open files of the process of each role with most, processes, and socket files",
        ("mode, what", "first", "last", "most", "last third - first third"),
        [
            (
                f"{row['mode']}, {row['role']}",
                *(f"{row[name]:,}" for name in ("first_count", "last_count", "most_count")),
                "-" if row["growth"] is None else f"{row['growth']:+g}",
            )
            for row in report.rows
            if row["kind"] == "files"
        ],
    )


def _pair(values: Sequence[float] | None) -> str:
    return "-" if values is None else f"{values[0]:.2f}, {values[1]:.2f}"
