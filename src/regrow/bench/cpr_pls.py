"""Does PLS tell how much accuracy is lost? Runs with 1 to 32 failures of 6.25 to 50 % of all servers, in one process.

Each number of failures and each share of servers comes as often as any other; how often is saved is drawn between a
32nd of the job and the whole job, and so are the steps at which servers die. Each such draw is trained with saves of
all rows, and with SSU: an eighth of the rows, eight times as often. What is lost is AUC against the run of the same
seed without failures.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from regrow.bench import common, cpr_figures, cpr_runs
from regrow.bench.cpr_runs import Saves, Strike
from regrow.config import TrainConfig

SERVERS = 16
FAILURES = (1, 2, 4, 8, 16, 32)
PORTIONS = (1 / 16, 1 / 8, 1 / 4, 1 / 2)
PRIORITIES = ("none", "ssu")
LABELS = {"none": "all rows", "ssu": "SSU"}
SHARE = 0.125
PAPER = {"none": 0.876, "ssu": 0.818}  # correlation of PLS and accuracy lost
FRACTION_MIN = 1 / 32  # of the job, between two saves


@dataclass(frozen=True, slots=True, kw_only=True)
class Draw:
    """What happens in a run: how often is saved, and who dies when."""

    failures: int
    portion: float
    every_steps: int
    strikes: tuple[Strike, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    repetitions: int  # of each number of failures and share of servers
    failures: tuple[int, ...]
    steps: int
    batch: int
    rows_max: int
    test_rows: int


FULL = Size(repetitions=2, failures=FAILURES, steps=192, batch=256, rows_max=2_000, test_rows=40_000)
QUICK = Size(repetitions=1, failures=(1, 4), steps=64, batch=64, rows_max=200, test_rows=8_000)


def draw_runs(size: Size, *, seed: int) -> list[Draw]:
    random = np.random.default_rng(seed)
    draws = []
    for _, failures, portion in itertools.product(range(size.repetitions), size.failures, PORTIONS):
        every = math.exp(random.uniform(math.log(FRACTION_MIN * size.steps), math.log(size.steps)))
        steps = sorted(random.choice(np.arange(2, size.steps + 1), failures, replace=False).tolist())
        lost = max(1, round(portion * SERVERS))
        strikes = tuple(
            Strike(step=step, servers=tuple(sorted(random.choice(SERVERS, lost, replace=False).tolist())))
            for step in steps
        )
        draws.append(
            Draw(failures=failures, portion=portion, every_steps=max(round(1 / SHARE), round(every)), strikes=strikes)
        )
    return draws


def make_config(size: Size, seed: int) -> TrainConfig:
    return cpr_runs.make_config(
        model="tiny",
        rows_max=size.rows_max,
        batch=size.batch,
        steps=size.steps,
        servers=SERVERS,
        test_rows=size.test_rows,
        seed=seed,
    )


def measure(report: common.Report, *, quick: bool, data: str | None = None) -> None:
    size = QUICK if quick else FULL
    config = make_config(size, seed=1)
    dataset = cpr_runs.keep_dataset(config)
    tables = cpr_runs.name_largest(config)
    base = cpr_runs.train(config, dataset, saves=Saves(every_steps=size.steps, tables=tables))
    draws = draw_runs(size, seed=1)
    common.console.print(f"no failure: AUC {base.auc:.4f} on {base.test_samples:,} rows; {len(draws)} draws follow")
    allowance = cpr_runs.Allowance()
    for number, draw in enumerate(draws):
        if not allowance.allows(done=number):
            common.console.print(f"{number} of {len(draws)} draws, for want of time")
            break
        row: dict[str, Any] = {"kind": "pls", "failures": draw.failures, "portion": draw.portion}
        row |= {"every_steps": draw.every_steps, "steps": size.steps}
        for priority in PRIORITIES:
            saves = Saves(every_steps=draw.every_steps, priority=priority, share=SHARE, tables=tables)
            found = cpr_runs.train(config, dataset, saves=saves, strikes=draw.strikes)
            row[priority] = {
                "pls": found.pls,
                "pls_counted": found.pls_counted,
                "share_lost": found.share_lost,
                "auc_lost": base.auc - found.auc,
                "rows_saved": found.rows_saved,
            }
        report.rows.append(row)
        told = ", ".join(f"{LABELS[name]} {row[name]['auc_lost']:+.4f}" for name in PRIORITIES)
        common.console.print(
            f"{number + 1} of {len(draws)}: {draw.failures} failures of {draw.portion:.2%}, "
            f"PLS {row['none']['pls']:.3f}; AUC lost: {told}"
        )
    compare(report)


def points(rows: Iterable[dict[str, Any]], priority: str, measure_name: str) -> tuple[list[float], list[float]]:
    """(what was lost by this measure, AUC lost), over all runs."""
    mine = [row[priority] for row in rows]
    return [row[measure_name] for row in mine], [row["auc_lost"] for row in mine]


def compare(report: common.Report) -> None:
    rows = [row for row in report.rows if row["kind"] == "pls"]
    shown = []
    for priority in PRIORITIES:
        found = {name: describe(*points(rows, priority, name)) for name in ("pls", "pls_counted", "share_lost")}
        report.rows.append({"kind": "pls fit", "priority": priority, "runs": len(rows), **found})
        shown += [(f"{LABELS[priority]}, {name}", *fit_row(found[name])) for name in found]
        r = found["pls"]["correlation"]
        share = found["share_lost"]["correlation"]
        if r is not None and share is not None:
            report.ratios[f"pls_correlation_{priority}"] = common.Ratio.of([r], target=PAPER[priority])
            report.ratios[f"share_correlation_less_pls_{priority}"] = common.Ratio.of([share - r], target=0.0)
    common.print_table(
        f"AUC lost against what was lost, {len(rows)} runs each",
        ("saves, measure", "correlation", "95 %", "AUC per unit"),
        shown,
    )


def describe(x: Sequence[float], y: Sequence[float]) -> dict[str, Any]:
    r = cpr_figures.correlate(x, y)
    between = None if r is None else cpr_figures.spread_of_correlation(r, len(x))
    return {"correlation": r, "between": between, "slope": cpr_figures.fit_slope(x, y), "largest": max(x, default=0.0)}


def fit_row(fit: dict[str, Any]) -> tuple[str, str, str]:
    r, between, slope = fit["correlation"], fit["between"], fit["slope"]
    return (
        "-" if r is None else f"{r:.3f}",
        "-" if between is None else f"{between[0]:.3f} to {between[1]:.3f}",
        "-" if slope is None else f"{slope:.4f}",
    )
