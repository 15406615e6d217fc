"""What does protection cost while nothing fails? Training with erasure coding against the same without.

Every variant trains the same model on the same data, in processes of its own, one after the other in rounds whose
order rotates; a figure is the ratio to the unprotected run of the same round. Overhead is time per sample more
than without protection, as the ECRec paper counts it. Processors differ in speed from minute to minute; workers do the
same work for each sample in every variant, so their processor time per sample shows that, and overhead is also given as
it would be at equal speed. The first steps of a run are judged apart: memory for parities and before-images is touched
for the first time then.

What is judged has no spare worker: to start one takes two or so seconds of a processor for torch's imports, once in a
run of hours, and in ten seconds on two cores that would be a tenth of all there is. A variant shows it.

The sketch: a push of U changed rows is flushed after n pushes, so U' <= n x U rows leave, k + r members further on
each arrives once per parity. Bytes flushed per push and processor time per sample tell whether that is what happens.
"""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from regrow.bench import common, overhead_costs, plots, recovery, train
from regrow.config import TrainConfig
from regrow.launch import local

SUMMARY = "What protection costs while nothing fails: samples per second, processor time, memory, traffic."

OVERHEAD_TARGET, OVERHEAD_AIM = 0.05, 0.02
EVEN_TARGET = 0.02  # at equal speed of the processors
FIRST_TARGET = 0.05  # the same of the first pushes of a run
FIRST_PUSHES = 60
MEMORY_SLACK = 0.02
R = 1
# ECRec's overhead: with everything; without replicating dense parameters; without two-phase commit as well.
PAPER = {"everything": 0.182, "no dense replication": 0.052, "no two-phase commit either": 0.026}
PROFILE_ROWS_MAX = 200_000  # of the largest table; each run is short
RATE_GUESS = 8_000.0  # samples per second, before anything is known


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """One way to train. Those that are not `judged` explain the others, and run in the first round only."""

    name: str
    label: str
    changes: dict[str, Any] = field(default_factory=dict)
    judged: bool = False

    @property
    def k(self) -> int | None:
        return self.changes.get("k")


NONE = Variant(name="none", label="no protection", judged=True)
K4 = {"protection": "ec", "k": 4, "spare_workers": 0}
VARIANTS = (
    NONE,
    Variant(name="k4", label="ec, k = 4", changes=K4, judged=True),
    Variant(name="k2", label="ec, k = 2", changes={**K4, "k": 2}, judged=True),
    Variant(name="k4_spare", label="ec, k = 4, a spare worker starts", changes={**K4, "spare_workers": 1}),
    Variant(name="k4_2pc", label="ec, k = 4, two-phase commit", changes={**K4, "commit": "2pc", "flush_pushes": 1}),
    Variant(name="k4_flush1", label="ec, k = 4, flush every push", changes={**K4, "flush_pushes": 1}),
    Variant(name="k4_none", label="ec, k = 4, losses tolerated", changes={**K4, "commit": "none"}),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """How much is measured."""

    rounds: int
    rows_max: dict[str, int]
    seconds: float  # of steady state, per run
    warmup_seconds: float
    explained: tuple[str, ...]  # models for which the variants that are not judged run too
    profile_steps: int  # of each worker, with --profile


# Eight minutes: tables large enough to miss every cache, small enough to be made in a second or two.
FULL = Size(
    rounds=3,
    rows_max={"kaggle": 2_000_000, "terabyte": 500_000},
    seconds=9.0,
    warmup_seconds=2.5,
    explained=("kaggle",),
    profile_steps=100,
)
QUICK = Size(
    rounds=1,
    rows_max={"kaggle": 100_000, "terabyte": 30_000},
    seconds=2.0,
    warmup_seconds=0.5,
    explained=("kaggle",),
    profile_steps=10,
)


def run(*, quick: bool, json_path: str | None, docs: str | None = None, profile: bool = False) -> int:
    size = QUICK if quick else FULL
    if profile:
        return run_profile(size, json_path)
    report = common.Report.start("overhead")
    for model in size.rows_max:
        runs = measure_model(model, size=size)
        report.rows += runs
        compare(report, model, runs)
    print_rows(report)
    code = report.finish(json_path)
    plots.save(report.to_dict(), json_path=json_path, docs=docs)
    return code


def run_profile(size: Size, json_path: str | None) -> int:
    """Where the processor time goes, instead of how much longer it takes."""
    report = common.Report.start("overhead-profile")
    for model, rows_max in size.rows_max.items():
        config = make_config(model, size).replace(rows_max=min(rows_max, PROFILE_ROWS_MAX))
        for variant in [variant for variant in VARIANTS if variant.judged]:
            row = overhead_costs.measure(config.replace(**variant.changes), steps=size.profile_steps)
            report.rows.append(
                {"kind": "profile", "model": model, "variant": variant.name, "label": variant.label, **row}
            )
    overhead_costs.print_tables(report.rows)
    return report.finish(json_path)


def measure_model(model: str, *, size: Size) -> list[dict[str, Any]]:
    config = make_config(model, size)
    # A short run first: how many steps fill the time?
    rate = measure(config, NONE, size=size, rate=RATE_GUESS, seconds=2.0)["samples_per_second"]
    runs: list[dict[str, Any]] = []
    for turn in range(size.rounds):
        for variant in order(turn, explained=model in size.explained):
            row = measure(config, variant, size=size, rate=rate)
            runs.append({"kind": "run", "model": model, "variant": variant.name, "round": turn, **row})
            common.console.print(
                f"{model}, round {turn + 1} of {size.rounds}, {variant.label}: "
                f"{row['samples_per_second']:,.0f} samples/s"
            )
    return runs


def order(turn: int, *, explained: bool) -> list[Variant]:
    """The variants of a round: each round begins one further on, so that nobody is always first."""
    chosen = [variant for variant in VARIANTS if variant.judged or (explained and turn == 0)]
    start = turn % len(chosen)
    return chosen[start:] + chosen[:start]


def make_config(model: str, size: Size) -> TrainConfig:
    return TrainConfig(
        model=model,
        rows_max=size.rows_max[model],
        batch=train.BATCH,
        servers=train.SERVERS,
        workers=train.WORKERS,
        mode="async",
        r=R,
        seed=train.SEED,
        steps=1,
        test_rows=train.BATCH,
        digest=False,
    )


def measure(
    config: TrainConfig, variant: Variant, *, size: Size, rate: float, seconds: float | None = None
) -> dict[str, Any]:
    wanted = (seconds or size.seconds) + size.warmup_seconds
    steps = max(16, int(wanted * rate / (config.batch * config.workers)))
    recorder = recovery.Trace(warmup_seconds=size.warmup_seconds)
    with tempfile.TemporaryDirectory(prefix="regrow-bench-") as directory:
        chosen = config.replace(steps=steps, out=f"{directory}/run", **variant.changes)
        summary = local.train(chosen, display=recorder)
    first = recorder.first(FIRST_PUSHES * config.batch)
    return {**recorder.steady(), **first, **costs(summary)}


def costs(summary: dict[str, Any]) -> dict[str, Any]:
    """What a run took besides time."""
    servers = summary["per_server"]
    pushes = max(1, summary["steps_done"])
    parities = summary["redundancy_bytes"]
    # Of the servers: the summary's own field of this name is the option.
    flushed = sum(server["flush_bytes"] for server in servers)
    return {
        "pushes": pushes,
        "table_bytes": summary["table_bytes"],
        "redundancy_bytes": parities,
        "memory_overhead": parities / max(1, summary["table_bytes"] - parities),
        "flush_bytes_per_push": flushed / pushes,
        "flush_rows_per_push": sum(server["flush_rows"] for server in servers) / pushes,
        "distinct_rows_per_push": summary["distinct_rows_per_step"],
        "redo_bytes_peak": summary["redo_bytes_peak"],
        "peak_rss_bytes": summary["peak_rss_bytes"]["total"],
        "wait_seconds": summary["wait_seconds"],
        "staleness_mean": summary["staleness_mean"],
        "loss": summary["loss"],
    }


# -- what follows from it ------------------------------------------------------------------------------------


def per_round(runs: Sequence[dict[str, Any]], name: str, figure: str, *, base: str = NONE.name) -> list[float]:
    """figure(variant) / figure(base) of every round that has both."""
    by_round = {(row["variant"], row["round"]): row[figure] for row in runs if row.get(figure)}
    rounds = sorted({row["round"] for row in runs})
    return [
        by_round[name, turn] / by_round[base, turn]
        for turn in rounds
        if (name, turn) in by_round and (base, turn) in by_round
    ]


def compare(report: common.Report, model: str, runs: Sequence[dict[str, Any]]) -> None:
    """Adds targets for what is judged, and the rest as rows."""
    for variant in VARIANTS[1:]:
        speeds = per_round(runs, variant.name, "samples_per_second")
        if not speeds:
            continue
        overheads = [1.0 / speed - 1.0 for speed in speeds]
        overhead = common.Ratio.of(overheads, target=OVERHEAD_TARGET, better="lower")
        processor = per_round(runs, variant.name, "cpu_seconds_per_1000_samples")
        flushes = per_round(runs, variant.name, "flush_bytes_per_push", base="k4_flush1")
        whole = per_round(runs, variant.name, "table_bytes")
        mine = [row for row in runs if row["variant"] == variant.name]
        memory = [row["memory_overhead"] for row in mine]
        report.rows.append(
            {
                "kind": "overhead",
                "model": model,
                "variant": variant.name,
                "label": variant.label,
                "judged": variant.judged,
                "overhead": overhead.to_dict(),
                "cpu_overhead": _spread([ratio - 1.0 for ratio in processor]),
                "memory_overhead": round(statistics.median(memory), 4),
                "memory_r_over_k": R / (variant.k or 1),
                "memory_overhead_whole": round(statistics.median(whole) - 1.0, 4),
                "flush_bytes_per_push": round(statistics.median(row["flush_bytes_per_push"] for row in mine)),
                "flush_bytes_to_every_push": _spread(flushes),
                "redo_bytes_peak": max(row["redo_bytes_peak"] for row in mine),
            }
        )
        if variant.judged and variant.k is not None:
            report.ratios[f"overhead_{model}_{variant.name}"] = overhead
            for name, prefix, target in (("equal_speed", "", EVEN_TARGET), ("first", "first_", FIRST_TARGET)):
                even = find_even(runs, variant, prefix)
                if even:
                    report.ratios[f"overhead_{name}_{model}_{variant.name}"] = common.Ratio.of(
                        even, target=target, better="lower"
                    )
            report.ratios[f"memory_{model}_{variant.name}"] = common.Ratio.of(
                memory, target=R / variant.k + MEMORY_SLACK, better="lower"
            )


def find_even(runs: Sequence[dict[str, Any]], variant: Variant, prefix: str) -> list[float]:
    """Overhead of each round at equal speed; of the first pushes, if `prefix` says so. Empty: too little is known."""
    speeds = per_round(runs, variant.name, f"{prefix}samples_per_second")
    work = per_round(runs, variant.name, f"{prefix}worker_seconds_per_sample")
    if len(work) != len(speeds):
        return []
    return [1.0 / (speed * slower) - 1.0 for speed, slower in zip(speeds, work, strict=True)]


def _spread(values: Sequence[float]) -> dict[str, float] | None:
    if not values:
        return None
    ratio = common.Ratio.of(values, target=0.0)
    return {"value": round(ratio.value, 4), "low": round(ratio.low, 4), "high": round(ratio.high, 4)}


def print_rows(report: common.Report) -> None:
    for model in dict.fromkeys(row["model"] for row in report.rows):
        rows = [row for row in report.rows if row["kind"] == "overhead" and row["model"] == model]
        common.print_table(
            f"{model}: more than without protection, medians of the rounds (lowest to highest)",
            ("variant", "time per sample", "CPU per sample", "memory", "r/k", "flushed per push", "redo at most"),
            [overhead_row(row) for row in rows],
        )
    paper = ", ".join(f"{value:.1%} ({what})" for what, value in PAPER.items())
    common.console.print(f"the paper's overhead: {paper}; ours should be at most {OVERHEAD_TARGET:.0%}, ", end="")
    common.console.print(f"aim {OVERHEAD_AIM:.0%}, with every guarantee")
    for row in report.rows:
        ratio = row.get("flush_bytes_to_every_push")
        if row["kind"] == "overhead" and row["variant"] == "k4" and ratio is not None:
            common.console.print(f"{row['model']}: coalescing sends {ratio['value']:.2f} of the bytes")


def overhead_row(row: dict[str, Any]) -> tuple[str, ...]:
    return (
        row["label"],
        percent(row["overhead"]),
        percent(row["cpu_overhead"]),
        f"{row['memory_overhead']:.1%}",
        f"{row['memory_r_over_k']:.0%}",
        f"{row['flush_bytes_per_push'] / 2**20:.2f} MiB",
        f"{row['redo_bytes_peak'] / 2**20:.1f} MiB",
    )


def percent(spread: dict[str, Any] | None) -> str:
    if spread is None:
        return "-"
    if spread["low"] == spread["high"]:  # one round
        return f"{spread['value']:+.1%}"
    return f"{spread['value']:+.1%} ({spread['low']:+.1%} to {spread['high']:+.1%})"
