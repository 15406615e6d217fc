"""What follows from the runs of `regrow bench checkpoint`: ratios with their targets, and the tables that are shown.

Pure: rows in, rows and ratios out. Everything is compared within a round.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from regrow.bench import common
from regrow.bench.checkpoint_peer import LABELS as SYSTEM_LABELS

TRACKING_TARGET = 0.005  # of time, and of processor time
LOST_TARGET = 0.005  # of training time, with deltas
HOLD_STEPS_TARGET = 1.0
BANDWIDTH_TARGET = 0.7  # of a plain file's
TORCH_TARGET = 1.0
MERGED_TARGET = 1.0

TORCH_FIGURES = ("seconds", "blocked_seconds", "memory_bytes", "stored_bytes")

Row = Mapping[str, Any]


def rounds(
    rows: Sequence[Row], name: str, base: str, figure: Callable[[Row, Row], float | None], *, by: str = "variant"
) -> list[float]:
    """figure(row, base's row) of every round that has both and knows the figure."""
    known = {(row[by], row["round"]): row for row in rows}
    pairs = [(known.get((name, turn)), known.get((base, turn))) for turn in sorted({row["round"] for row in rows})]
    found = [figure(mine, other) for mine, other in pairs if mine is not None and other is not None]
    return [value for value in found if value is not None]


def quotient(name: str) -> Callable[[Row, Row], float | None]:
    """figure / base's figure; None where one of them was not measured."""
    return lambda mine, other: mine[name] / other[name] if mine.get(name) and other.get(name) else None


def measure_lost_share(mine: Row, other: Row) -> float:
    """The share of training time that is gone."""
    return 1.0 - float(mine["samples_per_second"] / other["samples_per_second"])


def measure_lost_share_equal_speed(mine: Row, other: Row) -> float | None:
    """The same, had the processors been as fast in both runs."""
    works = [row.get("worker_seconds_per_sample") for row in (mine, other)]
    if not all(works):
        return None
    return 1.0 - float(mine["samples_per_second"] * works[0] / (other["samples_per_second"] * works[1]))


def measure_moved(role: str) -> Callable[[Row, Row], float | None]:
    """Of the processor time that workers had without checkpoints: the part that this role had more with them. With
    role "rest": all that no process of the run is known to have had, idle time among it."""

    def part(mine: Row, other: Row) -> float | None:
        if not mine.get("cores") or not other.get("cores"):
            return None
        before, after = ({**row["cores"], "rest": -sum(row["cores"].values())} for row in (other, mine))
        return float((after.get(role, 0.0) - before.get(role, 0.0)) / other["cores"]["worker"])

    return part


def late_steps(mine: Row, other: Row) -> float:
    """By how many steps more than without checkpoints was a worker late, at most."""
    return float((mine["hold_seconds"] - other["hold_seconds"]) / other["step_seconds"])


def hold_steps(mine: Row, other: Row) -> float:
    """For how many steps did a server hold pushes back, at most."""
    return float(mine["cut_hold_seconds_max"] / other["step_seconds"])


def spread(values: Sequence[float]) -> dict[str, Any] | None:
    if not values:
        return None
    told = common.Ratio.of(values, target=0.0).to_dict()
    return {name: told[name] for name in ("value", "low", "high", "pairs", "spread")}


# -- ratios --------------------------------------------------------------------------------------------------


def compare(report: common.Report, *, labels: Mapping[str, str]) -> None:
    """Adds ratios with targets, and a row of costs for each way to train."""
    compare_tracking(report)
    compare_training(report, labels)
    compare_stores(report)
    compare_torch(report)


def of_kind(report: common.Report, kind: str) -> list[dict[str, Any]]:
    return [row for row in report.rows if row["kind"] == kind]


def judge(report: common.Report, name: str, values: Sequence[float], target: float, *, better: str = "lower") -> None:
    if values:
        report.ratios[name] = common.Ratio.of(values, target=target, better=better)


def compare_tracking(report: common.Report) -> None:
    rows, updates = of_kind(report, "tracking"), of_kind(report, "update")
    time = rounds(rows, "on", "off", lambda mine, other: 1.0 / (1.0 - measure_lost_share(mine, other)) - 1.0)
    cpu = [ratio - 1.0 for ratio in rounds(rows, "on", "off", quotient("cpu_seconds_per_1000_samples"))]
    judge(report, "tracking_time", time, TRACKING_TARGET)
    judge(report, "tracking_equal_speed", rounds(rows, "on", "off", measure_lost_share_equal_speed), TRACKING_TARGET)
    judge(report, "tracking_cpu", cpu, TRACKING_TARGET)
    # Whole runs differ by more than this between each other; what an update takes longer can be told exactly.
    whole = [
        row["cpu_seconds_per_1000_samples"]
        for row in rows
        if row["variant"] == "off" and "cpu_seconds_per_1000_samples" in row
    ]
    if updates and whole:
        shares = [extra / statistics.median(whole) for extra in updates[0]["extras"]]
        judge(report, "tracking_share", shares, TRACKING_TARGET)


def compare_training(report: common.Report, labels: Mapping[str, str]) -> None:
    runs = of_kind(report, "run")
    for name in [each for each in labels if any(row["variant"] == each for row in runs)]:
        mine = [row for row in runs if row["variant"] == name]
        cpu = rounds(runs, name, "none", quotient("cpu_seconds_per_1000_samples"))
        memory = rounds(runs, name, "none", lambda one, other: float(one["peak_rss_bytes"] - other["peak_rss_bytes"]))
        report.rows.append(
            {
                "kind": "cost",
                "variant": name,
                "label": labels[name],
                "lost": spread(rounds(runs, name, "none", measure_lost_share)),
                "lost_equal_speed": spread(rounds(runs, name, "none", measure_lost_share_equal_speed)),
                "cpu": spread([ratio - 1.0 for ratio in cpu]),
                "moved": {role: spread(rounds(runs, name, "none", measure_moved(role))) for role in MOVED_TO},
                "hold_steps": spread(rounds(runs, name, "none", hold_steps)),
                "late_steps": spread(rounds(runs, name, "none", late_steps)),
                "memory_bytes": statistics.median(memory) if memory else None,
                "step_seconds": statistics.median(row["step_seconds"] for row in mine),
                "merger_cpu_share": statistics.median(row["merger_cpu_share"] for row in mine),
                **{figure: max(row[figure] for row in mine) for figure in WORST},
                "checkpoints": sum(row["checkpoints"] for row in mine),
                "written_bytes_per_period": round(statistics.median(row["written_bytes_per_period"] for row in mine)),
                "merged_bytes_all": round(statistics.median(row["merged_bytes_all"] for row in mine)),
            }
        )
    for figure, name in ((measure_lost_share, "lost"), (measure_lost_share_equal_speed, "lost_equal_speed")):
        judge(report, f"{name}_delta", rounds(runs, "delta", "none", figure), LOST_TARGET)
        # Both against the run without, so the difference of the two is what is left.
        pairs = zip(rounds(runs, "delta", "none", figure), rounds(runs, "pausing", "none", figure), strict=False)
        judge(report, f"{name}_delta_less_pausing", [delta - pausing for delta, pausing in pairs], 0.0)
    for name in ("full", "delta"):
        judge(report, f"hold_steps_{name}", rounds(runs, name, "none", hold_steps), HOLD_STEPS_TARGET)
        judge(report, f"late_steps_{name}", rounds(runs, name, "none", late_steps), HOLD_STEPS_TARGET)


MOVED_TO = ("server", "coordinator", "merger", "rest")
WORST = (
    "hold_seconds",
    "silence_seconds",
    "cut_hold_seconds_max",
    "cut_seconds_max",
    "capture_seconds_max",
    "store_seconds_max",
    "peak_rss_server_bytes",
    "peak_rss_merger_bytes",
    "checkpoints_failed",
)


def compare_stores(report: common.Report) -> None:
    found = of_kind(report, "bandwidth")
    for name, plain in (("save", "plain_write"), ("load", "plain_read")):
        values = [row[f"{name}_bytes_per_second"] / row[f"{plain}_bytes_per_second"] for row in found]
        judge(report, f"{name}_bandwidth", values, BANDWIDTH_TARGET, better="higher")
    chains = of_kind(report, "restore")
    judge(
        report, "restore_merged", rounds(chains, "merged", "unmerged", quotient("seconds"), by="chain"), MERGED_TARGET
    )


def compare_torch(report: common.Report) -> None:
    rows = of_kind(report, "torch")
    for name, ours, theirs, figure in (
        ("torch_save_seconds", "regrow_save", "torch_save", "seconds"),
        ("torch_async_seconds", "regrow_async", "torch_async", "seconds"),
        ("torch_async_blocked", "regrow_async", "torch_async", "blocked_seconds"),
        ("torch_async_memory", "regrow_async", "torch_async", "memory_bytes"),
        ("server_async_seconds", "regrow_server", "torch_async", "seconds"),
        ("server_async_blocked", "regrow_server", "torch_async", "blocked_seconds"),
        ("server_async_memory", "regrow_server", "torch_async", "memory_bytes"),
    ):
        judge(report, name, rounds(rows, ours, theirs, quotient(figure), by="system"), TORCH_TARGET)


# -- what is shown -------------------------------------------------------------------------------------------


def print_rows(report: common.Report) -> None:
    for row in of_kind(report, "update"):
        extra = 1e6 * row["extra_seconds_per_1000_samples"]
        common.console.print(
            f"an update of {row['rows_per_batch']:,.0f} rows takes {row['update_ratio']['value']:.3f} times as long "
            f"when changed rows are noted: {extra:.1f} us more per 1000 samples"
        )
    costs = of_kind(report, "cost")
    if costs:
        common.print_table(
            "training with checkpoints: more than the run without them of the same round, medians (lowest to highest)",
            ("", "time lost", "at equal speed", "held up", "steps", "late", "capture", "stored in", "memory", "per T"),
            [cost_row(row) for row in costs],
        )
        common.print_table(
            "at equal speed, time that workers had without checkpoints went to",
            ("", *MOVED_TO),
            [(row["label"], *(percent(row["moved"][role]) for role in MOVED_TO)) for row in costs],
        )
        for row in costs:
            if row["merged_bytes_all"]:
                memory, wrote = row["peak_rss_merger_bytes"] / 2**20, row["merged_bytes_all"] / 1e6
                common.console.print(
                    f"{row['label']}: in a run merging took {row['merger_cpu_share']:.1%} of all processor time "
                    f"and {memory:,.0f} MiB, and wrote {wrote:,.0f} MB"
                )
    systems = of_kind(report, "torch")
    if systems:
        common.print_table(
            f"a full of {systems[0]['tensor_bytes'] / 1e6:,.0f} MB of tensors, medians",
            ("", "durable after", "caller waits", "memory beyond", "stored"),
            [torch_row(name, [row for row in systems if row["system"] == name]) for name in SYSTEM_LABELS],
        )
    chains = of_kind(report, "restore")
    if chains:
        common.print_table(
            "restoring a full and 47 deltas, medians",
            ("", "seconds", "bytes", "rows", "pieces"),
            [chain_row(name, [row for row in chains if row["chain"] == name]) for name in ("unmerged", "merged")],
        )
    for row in of_kind(report, "merge"):
        common.console.print(
            f"merging them (s = {row['s']}) took {row['seconds']:.1f} s and wrote {row['bytes'] / 1e6:,.0f} MB "
            f"in {row['folds']} pieces"
        )


def cost_row(row: Row) -> tuple[str, ...]:
    held, late, memory = row["hold_steps"], row["late_steps"], row["memory_bytes"]
    return (
        row["label"],
        percent(row["lost"]),
        percent(row["lost_equal_speed"]),
        f"{row['cut_hold_seconds_max'] * 1e3:.0f} ms",
        "-" if held is None else f"{held['value']:.2f}",
        "-" if late is None else f"{late['value']:+.2f}",
        f"{row['capture_seconds_max'] * 1e3:.1f} ms",
        f"{row['store_seconds_max']:.2f} s",
        "-" if memory is None else f"{memory / 2**20:,.0f} MiB",
        f"{row['written_bytes_per_period'] / 1e6:,.0f} MB",
    )


def percent(found: Row | None) -> str:
    if found is None:
        return "-"
    if found["low"] == found["high"]:  # one round
        return f"{found['value']:.1%}"
    return f"{found['value']:.1%} ({found['low']:.1%} to {found['high']:.1%})"


def torch_row(system: str, rows: Sequence[Row]) -> tuple[str, ...]:
    middle = {name: statistics.median(row[name] for row in rows) for name in TORCH_FIGURES}
    return (
        SYSTEM_LABELS[system],
        f"{middle['seconds']:.2f} s",
        f"{middle['blocked_seconds']:.3f} s",
        f"{middle['memory_bytes'] / 2**20:,.0f} MiB",
        f"{middle['stored_bytes'] / 1e6:,.0f} MB",
    )


def chain_row(name: str, rows: Sequence[Row]) -> tuple[str, ...]:
    seconds = statistics.median(row["seconds"] for row in rows)
    first = rows[0]
    return (name, f"{seconds:.2f}", f"{first['bytes'] / 1e6:,.0f} MB", f"{first['rows']:,}", str(first["pieces"]))
