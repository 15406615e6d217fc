"""What does a sample cost as a run grows? Processor seconds per sample and role, from the roles' own clocks.

One thing grows at a time (`--sweep`), everything else stays:

    servers   2, 5, 10, 20, 40, with the same rows           a sample's rows come from more places
    workers   1, 2, 4, 8                                     servers hear more of them
    rows      x1, x2, x4, x8                                 caches hold less of them
    k         2, 4, 10, on 11 servers                        stripes are wider, parities fewer
    r         1, 2, 3, on 7 servers                          every change travels r times

Clocks and not rates: on a machine with few cores everything competes, and a rate would say little about who pays. Each
value is run in turn, in rounds; growth is the cost of a value over that of the first value in the same round. The
sketch: work per sample stays the same, but for `r`, where what protection adds grows r times. What grows faster than
that is to be explained or mended.
"""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from regrow.bench import common, train
from regrow.config import TrainConfig
from regrow.errors import RegrowError, UserError
from regrow.launch import local
from regrow.launch.status import RunStatus

SUMMARY = "Processor seconds per sample and role as servers, workers, rows, k or r grow (--sweep NAME, or all)."

ALL = "all"  # of the sweeps, one after the other
GROWTH_TARGET = 1.5  # of a role's cost per sample, over that of its work, from the first value to the last
ROLES = ("server", "worker", "coordinator")
RATE_GUESS = 8_000.0
STEPS_MIN = 16
# Forty servers on two cores may keep one waiting: that is no death.
CODED = {"protection": "ec", "spare_workers": 0, "silent_seconds": "60"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Sweep:
    """What grows, over which values, and what a run is otherwise."""

    name: str
    values: tuple[int, ...]
    base: dict[str, Any]

    def change(self, value: int, rows_max: int) -> dict[str, Any]:
        """The options of a run."""
        if self.name == "rows":
            return {**self.base, "rows_max": rows_max * value}
        return {**self.base, self.name: value, "rows_max": rows_max}


SWEEPS = {
    sweep.name: sweep
    for sweep in (
        Sweep(name="servers", values=(2, 5, 10, 20, 40), base={"workers": 2, **CODED, "k": 1, "r": 1}),
        Sweep(name="workers", values=(1, 2, 4, 8), base={"servers": 5, **CODED, "k": 4, "r": 1}),
        Sweep(name="rows", values=(1, 2, 4, 8), base={"servers": 5, "workers": 2, **CODED, "k": 4, "r": 1}),
        Sweep(name="k", values=(2, 4, 10), base={"servers": 11, "workers": 2, **CODED, "r": 1}),
        Sweep(name="r", values=(1, 2, 3), base={"servers": 7, "workers": 2, **CODED, "k": 4}),
    )
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """How much is measured."""

    rounds: int
    model: str
    rows_max: int
    batch: int
    seconds: float  # of training that count, per run
    warmup_seconds: float
    ends_only: bool  # the first and the last value


# Up to five values, each about twenty seconds with its start and end, in two rounds: under ten minutes.
FULL = Size(rounds=2, model="kaggle", rows_max=250_000, batch=2048, seconds=8.0, warmup_seconds=2.0, ends_only=False)
# Nineteen values in two rounds, each about twelve seconds with its start and end: under ten minutes for all sweeps.
SHORT = replace(FULL, seconds=5.0, warmup_seconds=1.5)
QUICK = Size(rounds=1, model="kaggle", rows_max=20_000, batch=512, seconds=2.0, warmup_seconds=0.5, ends_only=True)


def run(*, quick: bool, json_path: str | None, sweep: str = "servers") -> int:
    if sweep not in (*SWEEPS, ALL):
        raise UserError(f"--sweep {sweep!r} is unknown; choose one of {', '.join((*SWEEPS, ALL))}")
    size = QUICK if quick else SHORT if sweep == ALL else FULL
    report = common.Report.start("scale")
    for chosen in SWEEPS.values() if sweep == ALL else [SWEEPS[sweep]]:
        report.rows += measure_sweep(chosen, size=size)
        compare(report, chosen)
        print_rows(report, chosen)
    return report.finish(json_path)


class Clocks(train.Recorder):
    """A display that shows nothing, and reads at each look how much every role has used for how many samples."""

    def __init__(self, *, warmup_seconds: float) -> None:
        super().__init__(warmup_seconds=warmup_seconds)
        self.looks: list[tuple[float, int, dict[str, float]]] = []  # (when, samples of all workers, seconds by role)

    def update(self, status: RunStatus, now: float) -> None:
        super().update(status, now)
        if status.phase == "training" and all(worker.state == "training" for worker in status.workers):
            samples = sum(worker.reports[-1][1] for worker in status.workers if worker.reports)
            clocks = {role: train.children_cpu_seconds(f"rg {role}") for role in ROLES}
            known = {role: seconds for role, seconds in clocks.items() if seconds is not None}
            self.looks.append((now, samples, known))

    def list_inside(self) -> list[tuple[float, int, dict[str, float]]]:
        """The looks from the end of the warm-up on."""
        return [look for look in self.looks if look[0] >= self.looks[0][0] + self.warmup_seconds]

    def has_seen(self, seconds: float) -> bool:
        """Whether what is between the first and the last of these took so long."""
        inside = self.list_inside()
        return len(inside) > 1 and inside[-1][0] - inside[0][0] >= seconds

    def cost_per_sample(self) -> dict[str, float]:
        """Processor seconds by role, from the end of the warm-up on."""
        inside = self.list_inside()
        if len(inside) < 2 or inside[-1][1] <= inside[0][1] or not inside[0][2]:
            raise RegrowError("the run was too short, or this system does not tell what its processes use")
        (_, before, first), (_, after, last) = inside[0], inside[-1]
        return {role: (last[role] - first[role]) / (after - before) for role in first}


def measure_sweep(sweep: Sweep, *, size: Size) -> list[dict[str, Any]]:
    """A row for every round and value. The rate of one run decides how many steps the next has."""
    values = (sweep.values[0], sweep.values[-1]) if size.ends_only else sweep.values
    rates: dict[int, float] = {}
    rows: list[dict[str, Any]] = []
    for turn in range(size.rounds):
        for value in values if turn % 2 == 0 else values[::-1]:
            guess = rates.get(value) or min(rates.values(), default=RATE_GUESS)
            row = measure(sweep.change(value, size.rows_max), size=size, rate=guess)
            rates[value] = row["samples_per_second"]
            rows.append({"kind": "run", "sweep": sweep.name, "value": value, "round": turn, **row})
            costs = ", ".join(f"{role} {row['microseconds'][role]:.1f}" for role in row["microseconds"])
            common.console.print(f"{sweep.name} {value}, round {turn + 1} of {size.rounds}: {costs} us per sample")
    return rows


def measure(changes: Mapping[str, Any], *, size: Size, rate: float) -> dict[str, Any]:
    config = TrainConfig(
        model=size.model, batch=size.batch, steps=1, test_rows=size.batch, seed=train.SEED, digest=False, **changes
    )
    steps = max(STEPS_MIN, int((size.seconds + size.warmup_seconds) * rate / (config.batch * config.workers)))
    for _ in range(train.TRIES_MAX):
        recorder = Clocks(warmup_seconds=size.warmup_seconds)
        with tempfile.TemporaryDirectory(prefix="regrow-bench-") as directory:
            summary = local.train(config.replace(steps=steps, out=f"{directory}/run"), display=recorder)
        if recorder.is_steady and recorder.has_seen(size.seconds / 2):
            break
        steps *= 4  # much faster than thought
    found = recorder.cost_per_sample()
    figures = recorder.steady()
    return {
        "samples_per_second": round(figures["samples_per_second"], 1),
        "others_cores": figures.get("others_cores"),
        "steps": steps,
        "microseconds": {role: round(seconds * 1e6, 3) for role, seconds in found.items()},
        "flush_bytes_per_sample": round(summary["flush_bytes"] / max(1, summary["samples"]), 1),
        "distinct_rows_per_step": summary.get("distinct_rows_per_step"),
    }


# -- what follows from it --------------------------------------------------------------------------------------


def find_growths(rows: Sequence[Mapping[str, Any]], role: str, value: int) -> list[float]:
    """The role's cost at a value over that at the first value, of each round."""
    first = rows[0]["value"]
    costs = {(row["round"], row["value"]): row["microseconds"].get(role) for row in rows}
    rounds = sorted({row["round"] for row in rows})
    pairs = [(costs.get((turn, value)), costs.get((turn, first))) for turn in rounds]
    return [cost / base for cost, base in pairs if cost is not None and base]


def compare(report: common.Report, sweep: Sweep) -> None:
    """Adds the growth of each value, and targets for the last."""
    rows = [row for row in report.rows if row["kind"] == "run" and row["sweep"] == sweep.name]
    values = sorted({row["value"] for row in rows})
    for value in values:
        growths = {role: statistics.median(found) for role in ROLES if (found := find_growths(rows, role, value))}
        mine = [row for row in rows if row["value"] == value]
        report.rows.append(
            {
                "kind": "growth",
                "sweep": sweep.name,
                "value": value,
                "microseconds": {
                    role: round(statistics.median(row["microseconds"][role] for row in mine), 3) for role in growths
                },
                "growth": {role: round(growth, 3) for role, growth in growths.items()},
            }
        )
    # The coordinator is not on the way of any sample: shown, and nothing is claimed.
    for role in ("server", "worker"):
        work = values[-1] / values[0] if sweep.name == "r" and role == "server" else 1.0
        growths_last = [growth / work for growth in find_growths(rows, role, values[-1])]
        if growths_last and len(values) > 1:
            name = f"{sweep.name}_{values[0]}_to_{values[-1]}_{role}"
            report.ratios[name] = common.Ratio.of(growths_last, target=GROWTH_TARGET, better="lower")


def print_rows(report: common.Report, sweep: Sweep) -> None:
    shown = [row for row in report.rows if row["kind"] == "growth" and row["sweep"] == sweep.name]
    common.print_table(
        f"processor microseconds per sample, and over those of {sweep.name} = {shown[0]['value']}",
        [sweep.name, *(heading for role in ROLES for heading in (role, "growth"))],
        [
            (
                str(row["value"]),
                *(
                    text
                    for role in ROLES
                    for text in (f"{row['microseconds'].get(role, 0.0):.2f}", f"{row['growth'].get(role, 0.0):.2f}")
                ),
            )
            for row in shown
        ],
    )
