"""What saves, loads and rescheduling take, in real runs with real kills, and what follows for a job of 56 hours.

Each way back trains the same model, saves several times and loses a server. Of each: how long a save takes until it is
durable, how long after the death everybody trained again and every row was back, and when the successor was there.
How much training a save costs lies below what two equal runs differ by, so it is not measured but bounded: as if nobody
trained while a save is stored, and as if each were the longest, which has every row. The projection with these
constants is therefore more than partial recovery costs. With a priority a save has a share of the rows; all saves of an
interval T count together.

Projected are figure 7 and table 1 (with the published constants and with ours), figure 9 (other PLS), figure 10 (which
way is the cheaper one; each cell is also played with random failures) and figure 13 (more nodes), by `cpr_project.py`.
"""

from __future__ import annotations

import itertools
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from regrow.bench import common, cpr_live, cpr_project, recovery
from regrow.bench.cpr_project import Measured
from regrow.config import TrainConfig
from regrow.errors import RegrowError
from regrow.planner.overhead import Costs

OVERHEAD_TARGET = 0.005
VICTIM = 1
SECONDS_MIN = 1e-3  # of a save: so fast is none
# Name, protection, priority.
WAYS = (
    ("full", "full", "none"),
    ("delta", "delta", "none"),
    ("none", "partial", "none"),
    ("ssu", "partial", "ssu"),
    ("mfu", "partial", "mfu"),
    ("scar", "partial", "scar"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    rows_max: int
    seconds: float
    every_seconds: float
    jobs: int  # that are played in each cell of the grid
    rounds: int = 1


FULL = Size(rows_max=500_000, seconds=24.0, every_seconds=6.0, jobs=1000)
QUICK = Size(rows_max=20_000, seconds=8.0, every_seconds=2.0, jobs=100)


def measure(report: common.Report, *, quick: bool, data: str | None = None) -> None:
    size = QUICK if quick else FULL
    with tempfile.TemporaryDirectory(prefix="regrow-bench-") as name:
        directory = Path(name)
        base = cpr_live.make_config(rows_max=size.rows_max)
        rate = cpr_live.find_rate(base, directory)
        for turn in range(size.rounds):
            for way, protection, priority in WAYS if turn % 2 == 0 else WAYS[::-1]:
                row = measure_way(base, directory, protection, priority, size=size, rate=rate)
                report.rows.append({"kind": "way", "way": way, "round": turn, **row})
                common.console.print(f"{way}, round {turn + 1} of {size.rounds}: {describe(row)}")
    compare(report, size)


def measure_way(
    base: TrainConfig, directory: Path, protection: str, priority: str, *, size: Size, rate: float
) -> dict[str, Any]:
    steps = recovery.steps_of(base, size.seconds, rate)
    summary, trace, stored = cpr_live.run(
        base,
        directory,
        steps=steps,
        kill=(f"server:{VICTIM}@step:{steps * 2 // 3}",),
        more=lambda folder: cpr_live.make_changes(
            protection, f"{size.every_seconds:g}s", priority=priority, folder=folder
        ),
    )
    partial = protection == "partial"
    if not summary["failures" if partial else "restores"]:
        raise RegrowError("nobody was killed: the run was too short")
    # Full recovery begins everything again, and knows no failures, only falls back.
    failure = summary["failures"][0] if partial else {}
    back_at = failure["recovered_s"] if partial else find_longest_gap(trace.reports.values())
    lost = summary["partial"] or {}
    # Of all servers: they save at the same time, each its own.
    saves = [seconds for _, _, seconds in trace.own_saves] or [cut["seconds"] for cut in trace.cuts]
    return {
        "protection": protection,
        "priority": priority,
        "save_s": cpr_live.middle(saves),
        "save_s_max": max(saves, default=None),
        "saves": len(saves),
        "rows_saved": lost.get("rows_saved"),
        "rows_left": lost.get("rows_left_by_priority"),
        "replaced_s": failure.get("replaced_s"),
        "detected_s": failure.get("detected_s"),
        "stall_s": max(cpr_live.find_stalls(trace)) if partial else back_at,
        "load_s": back_at,
        "pls": lost.get("pls"),
        "share_lost": lost.get("share_lost"),
        "restores": len(summary["restores"]),
        "seconds": summary["seconds"],
        "stored_bytes": stored,
        "table_bytes": summary["table_bytes"] - summary["redundancy_bytes"],
        **trace.others(),
    }


def find_longest_gap(reports: Iterable[Sequence[tuple[float, int]]]) -> float:
    """The longest time in which no worker said anything: with full recovery, from the death until all train again."""
    times = sorted(at for seen in reports for at, _ in seen)
    return max((after - before for before, after in itertools.pairwise(times)), default=0.0)


def describe(row: dict[str, Any]) -> str:
    save, load, stall = row["save_s"], row["load_s"], row["stall_s"]
    told = [
        f"a save of a server or cut takes {save:.3f} s" if save is not None else "no save",
        f"{row['saves']} of them",
    ]
    told += [f"all back {load:.2f} s after the death"] if load is not None else []
    told += [f"nobody moved for {stall:.2f} s"] if stall is not None else []
    return ", ".join(told)


# -- what follows --------------------------------------------------------------------------------------------


def make_costs(rows: Sequence[dict[str, Any]], *, times: float = 1.0) -> Costs:
    """Medians of the rounds; `times`: so many saves make one of all rows."""

    def middle(name: str, default: float = 0.0) -> float:
        return cpr_live.middle([row[name] for row in rows if row[name] is not None]) or default

    rescheduled = [max(0.0, row["replaced_s"] - row["detected_s"]) for row in rows if row["replaced_s"] is not None]
    reschedule = cpr_live.middle(rescheduled) or 0.0
    # The longest has all rows, as any has in which hours have passed.
    save = max(SECONDS_MIN, times * middle("save_s_max"))
    return Costs(save_seconds=save, load_seconds=max(0.0, middle("load_s") - reschedule), reschedule_seconds=reschedule)


def measured_costs(rows: Sequence[dict[str, Any]]) -> Measured:
    def of(way: str) -> list[dict[str, Any]]:
        return [row for row in rows if row["way"] == way]

    partial = {way: make_costs(of(way), times=1.0 if way == "none" else 1 / cpr_live.SHARE) for way in PARTIAL_WAYS}
    return Measured(full=make_costs(of("full")), partial=partial)


PARTIAL_WAYS = tuple(way for way, protection, _ in WAYS if protection == "partial")


def compare(report: common.Report, size: Size) -> None:
    ways = [row for row in report.rows if row["kind"] == "way"]
    ours = measured_costs(ways)
    published = Measured(full=cpr_project.PUBLISHED, partial={"none": cpr_project.PUBLISHED})
    for constants, measured in (("published", published), ("ours", ours)):
        report.rows += cpr_project.project(measured, constants=constants)
        report.rows += cpr_project.play_grid(measured, constants=constants, jobs=size.jobs)
        report.rows += cpr_project.scale_up(measured, constants=constants)
    judge(report)
    print_rows(report)


def of_kind(report: common.Report, kind: str, constants: str) -> list[dict[str, Any]]:
    return [row for row in report.rows if row["kind"] == kind and row["constants"] == constants]


def judge(report: common.Report) -> None:
    projected = {row["name"]: row for row in of_kind(report, "projected", "ours")}
    for name in ("0.1", *cpr_project.PRIORITIES):
        share = projected[name]["overhead"]["share"]
        report.ratios[f"overhead_{name}"] = common.Ratio.of([share], target=OVERHEAD_TARGET, better="lower")
    for constants in ("published", "ours"):
        agreement = cpr_project.find_agreement(of_kind(report, "grid", constants))
        report.ratios[f"grid_agreement_{constants}"] = common.Ratio.of([agreement], target=1.0)


def print_rows(report: common.Report) -> None:
    ours = {row["name"]: row for row in of_kind(report, "projected", "ours")}
    shown = []
    for row in of_kind(report, "projected", "published"):
        mine = ours[row["name"]]
        told = "-" if row["published"] is None else f"{row['published']:.2%}"
        shown.append((row["label"], told, f"{row['overhead']['share']:.2%}", f"{mine['overhead']['share']:.4%}"))
    common.print_table(
        "overhead of 56 hours, a failure every 28 h, mean of 2, 4 and 8 parts",
        ("", "published", "its constants", "our constants"),
        shown,
    )
    for constants in ("published", "ours"):
        common.print_table(
            f"figure 10, PLS {cpr_project.GRID_PLS:g}, {constants} constants: played (by formula)",
            ("failures of", "full", "partial", "planner", "cheaper"),
            [grid_row(row) for row in of_kind(report, "grid", constants)],
        )
    rows = of_kind(report, "scale", "published")
    common.print_table(
        "figure 13, published constants",
        ("nodes", *(f"{law}: {way}" for law in ("linear", "independent") for way in ("full", "partial"))),
        [
            (
                str(nodes),
                *(f"{row[way]:.2%}" for row in rows if row["nodes"] == nodes for way in ("full", "partial")),
            )
            for nodes in cpr_project.NODES
        ],
    )


def grid_row(row: dict[str, Any]) -> tuple[str, ...]:
    return (
        f"{row['failures']} of {row['portion']:.1%}",
        f"{row['full']:.3%} ({row['full_formula']:.3%})",
        f"{row['partial']:.3%} ({row['partial_formula']:.3%})",
        row["decision"],
        row["cheaper"],
    )
