"""How much AUC does a failure cost? Synchronous runs of one seed are equal to the bit until servers die, so the
difference of their AUCs is the failure, and nothing else.

Each seed is trained once without failures and then with each priority and each place of the failures. A failure takes
one of four servers; with PLS 0.1 and two failures to expect, 0.4 of the run may lie between two saves.
It comes half an interval after a save, in the middle of the run or at its end, where nothing can be learned again; or
twice, which is PLS 0.1. Once more it comes right behind a save: nothing is lost then, and the model must be the same to
the bit, which shows that everything else is equal. The mean over seeds and places is given with its standard error,
and whether that is small enough to see 0.0002. As many seeds are trained as nine minutes allow.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from regrow.bench import accuracy, common, cpr_runs
from regrow.bench.cpr_figures import Mean
from regrow.bench.cpr_runs import Saves, Strike
from regrow.config import TrainConfig
from regrow.errors import RegrowError, UserError

PRIORITIES = ("none", "ssu", "mfu", "scar")
SERVERS = 4
LOST = (1, 2)  # the server that the first failure takes, and the second
SHARE = 0.125
AUC_TARGET = 0.0002
PAPER = "the paper: 0.0003 without priority (0.8028 to 0.8025), at most 0.0002 with one"


INTERVAL = 0.4  # of the run: 2 x PLS x parts x time between failures


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where failures strike: in intervals from the beginning, so what is behind the point is how old the save is."""

    name: str
    at: tuple[float, ...]

    @property
    def loses(self) -> bool:
        return any(at % 1.0 for at in self.at)


BEHIND_A_SAVE = Place(name="behind a save", at=(2.0,))
PLACES = (
    Place(name="middle", at=(1.5,)),
    Place(name="end", at=(2.48,)),
    Place(name="twice", at=(0.5, 1.5)),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    seeds: tuple[int, ...]
    places: tuple[Place, ...]
    options: dict[str, Any]


SYNTHETIC = Size(
    seeds=tuple(range(1, 13)),
    places=PLACES,
    options={"model": "tiny", "rows_max": 20_000, "batch": 256, "steps": 400, "test_rows": 1_000_000},
)
SYNTHETIC_QUICK = Size(
    seeds=(1,),
    places=PLACES[2:],
    options={"model": "tiny", "rows_max": 500, "batch": 64, "steps": 80, "test_rows": 8_000},
)
CRITEO = Size(
    seeds=tuple(range(1, 9)),
    places=PLACES[1:],
    options={"model": "kaggle", "rows_max": accuracy.ROWS_MAX, "batch": accuracy.UPDATE_SAMPLES, "steps": 916},
)
CRITEO_QUICK = Size(seeds=(1,), places=PLACES[2:], options={**CRITEO.options, "steps": 100})


def measure(report: common.Report, *, quick: bool, data: str | None = None) -> None:
    if data is not None and not Path(data).is_file():
        raise UserError(
            f"there is no file {data}", hint="a Criteo TSV, plain or .gz; without --data clicks are made up"
        )
    if data is not None:
        measure_data(report, CRITEO_QUICK if quick else CRITEO, name="criteo", source=f"criteo:{data}")
    else:
        measure_data(report, SYNTHETIC_QUICK if quick else SYNTHETIC, name="synthetic", source="synthetic")


def measure_data(report: common.Report, size: Size, *, name: str, source: str) -> None:
    train_rows = size.options["steps"] * size.options["batch"]
    allowance = cpr_runs.Allowance()
    for done, seed in enumerate(size.seeds):
        if not allowance.allows(done=done):
            common.console.print(f"{name}: {done} of {len(size.seeds)} seeds, for want of time")
            break
        options = {**size.options, "data": source, "seed": seed, "servers": SERVERS}
        if name == "criteo":
            options["train_rows"] = accuracy.TRAIN_ROWS  # the lines behind these are for tests
        config = cpr_runs.make_config(**options)
        dataset = cpr_runs.keep_dataset(config)
        report.rows += measure_seed(config, dataset, size, name=name, seed=seed)
        common.console.print(f"{name}, seed {seed}: {describe([row for row in report.rows if is_of(row, name, seed)])}")
    compare(report, name, train_rows=train_rows)


def is_of(row: dict[str, Any], data: str, seed: int) -> bool:
    return bool(row["kind"] == "auc" and row["data"] == data and row["seed"] == seed)


def measure_seed(
    config: TrainConfig, dataset: cpr_runs.KeptDataset, size: Size, *, name: str, seed: int
) -> list[dict[str, Any]]:
    tables = cpr_runs.name_largest(config)
    every = round(INTERVAL * dataset.steps)
    base = cpr_runs.train(config, dataset, saves=Saves(every_steps=every), digest=True)
    known = {"kind": "auc", "data": name, "seed": seed, "auc_without": base.auc, "test_samples": base.test_samples}
    rows = []
    for place in (BEHIND_A_SAVE, *size.places):
        for priority in PRIORITIES if place.loses else ("none",):
            saves = Saves(every_steps=every, priority=priority, share=SHARE, tables=tables)
            found = cpr_runs.train(
                config, dataset, saves=saves, strikes=make_strikes(place, every), digest=not place.loses
            )
            if not place.loses and (found.digest, found.auc) != (base.digest, base.auc):
                raise RegrowError("nothing was lost, and yet the model is another one")
            rows.append(
                {
                    **known,
                    "place": place.name,
                    "priority": priority,
                    "auc_lost": base.auc - found.auc,
                    "logloss_more": found.logloss - base.logloss,
                    "pls": found.pls,
                    "share_lost": found.share_lost,
                    "updates_lost": found.updates_lost,
                    "rows_saved": found.rows_saved,
                }
            )
    return rows


def make_strikes(place: Place, every: int) -> list[Strike]:
    """A strike at step n + 1 finds step n done by all."""
    return [Strike(step=round(at * every) + 1, servers=(LOST[index],)) for index, at in enumerate(place.at)]


def describe(rows: Sequence[dict[str, Any]]) -> str:
    """AUC lost by priority, in one line."""
    struck = [row for row in rows if row["pls"]]
    found = {name: [row["auc_lost"] for row in struck if row["priority"] == name] for name in PRIORITIES}
    told = ", ".join(f"{name} {sum(values) / len(values):+.5f}" for name, values in found.items() if values)
    return f"AUC {rows[0]['auc_without']:.4f} without failure; lost: {told}"


def compare(report: common.Report, data: str, *, train_rows: int) -> None:
    rows = [row for row in report.rows if row["kind"] == "auc" and row["data"] == data]
    exact = [row for row in rows if not row["pls"]]
    assert all(row["auc_lost"] == 0.0 for row in exact)
    shown = []
    for priority in PRIORITIES:
        mine = [row for row in rows if row["pls"] and row["priority"] == priority]
        lost = Mean.of([row["auc_lost"] for row in mine])
        share = Mean.of([row["share_lost"] for row in mine])
        report.rows.append({"kind": "auc lost", "data": data, "priority": priority, **lost.to_dict()})
        report.ratios[f"auc_lost_{data}_{priority}"] = common.Ratio.of(
            [row["auc_lost"] for row in mine], target=AUC_TARGET, better="lower"
        )
        resolved = "yes" if lost.resolves(AUC_TARGET) else "no"
        pls = Mean.of([row["pls"] for row in mine]).value
        shown.append((priority, str(lost), f"{pls:.3f}", f"{share.value:.2%}", str(lost.count), resolved))
    common.print_table(
        f"{data}, {train_rows:,} samples: AUC lost, one of {SERVERS} servers dies (means)",
        ("priority", "AUC lost", "PLS", "updates lost", "runs", f"resolves {AUC_TARGET:g}"),
        shown,
    )
    common.console.print(f"right behind a save: 0 in {len(exact)} of {len(exact)} runs, and the same bits. {PAPER}")
