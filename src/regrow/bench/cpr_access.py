"""Does the number of times that a row is used tell how much it has changed? Then counting takes the place of comparing.

MFU and SSU choose rows by how often they are used; SCAR chooses those that changed most, for which it has to keep a
copy of every weight. After 4096 steps the correlation of both is taken over the rows of the tables that have
priorities, used ones only, and once more with rows that were never used. Two counts: look-ups, as published, where a
batch that has an id ten times counts ten; and pushes, as servers count, where it counts once. Rows are trained in one
plain process (`bench/reference.py`), with SGD as published and with our default.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from regrow.bench import common, cpr_figures
from regrow.bench.reference import Optimizer, Reference
from regrow.config import TrainConfig
from regrow.data.catalog import open_dataset
from regrow.runtime.priorities import find_largest

PAPER = 0.983
SLACK = 0.02  # by so much may counting pushes tell less than counting look-ups
OPTIMIZERS = {"sgd": 0.1, "rowwise_adagrad": None}  # with its learning rate; None: the default


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    steps: int
    batch: int
    rows_max: int
    model: str


FULL = Size(steps=4096, batch=128, rows_max=100_000, model="kaggle")
QUICK = Size(steps=128, batch=64, rows_max=2_000, model="tiny")


class Counts:
    """How often each row of all tables was looked up, and how often pushed."""

    def __init__(self, rows: list[int]) -> None:
        self.lookups = np.zeros(sum(rows), np.int64)
        self.pushes = np.zeros(sum(rows), np.int64)

    def add(self, ids: np.ndarray[Any, Any]) -> None:
        distinct, times = np.unique(ids, return_counts=True)
        self.lookups[distinct] += times
        self.pushes[distinct] += 1


def measure(report: common.Report, *, quick: bool, data: str | None = None) -> None:
    size = QUICK if quick else FULL
    torch.set_num_threads(1)  # Batches are small.
    for name, learning_rate in OPTIMIZERS.items():
        options: dict[str, Any] = {} if learning_rate is None else {"learning_rate": learning_rate}
        options |= {"steps": size.steps} if data is None else {"epochs": 64}
        config = TrainConfig(
            data="synthetic" if data is None else f"criteo:{data}",
            model=size.model,
            rows_max=size.rows_max,
            batch=size.batch,
            optimizer=name,
            **options,
        )
        row = measure_config(config, steps=size.steps)
        report.rows.append(
            {"kind": "access", "optimizer": name, "data": "synthetic" if data is None else "criteo", **row}
        )
    compare(report)


def measure_config(config: TrainConfig, *, steps: int) -> dict[str, Any]:
    dataset = open_dataset(config)
    sparse = Optimizer(name=config.optimizer, learning_rate=config.learning_rate)
    dense = Optimizer(name=config.dense_optimizer, learning_rate=config.dense_learning_rate)
    reference = Reference(rows=dataset.rows, model=config.load_model(), sparse=sparse, dense=dense, seed=config.seed)
    begin = reference.weights.clone()
    counts = Counts(dataset.rows)
    done = 0
    for batch in dataset.train_batches(batch=config.batch, worker=0, workers=1):
        if done == steps:
            break
        _, distinct, row_gradients, network_gradients = reference.gradients(batch)
        reference.apply(distinct, row_gradients, network_gradients)
        counts.add((torch.from_numpy(batch.values).view(len(dataset.rows), -1) + reference.first_row).numpy())
        done += 1
    changes = (reference.weights - begin).norm(dim=1).numpy()
    large = select_rows(dataset.rows, find_largest(dataset.rows))
    return {"steps": done, "batch": config.batch, **correlate_counts(counts, changes, large)}


def select_rows(rows: list[int], tables: list[int]) -> np.ndarray[Any, Any]:
    """Of all rows, one table after the other: those of some tables."""
    ends = np.cumsum(rows)
    return np.concatenate([np.arange(ends[table] - rows[table], ends[table]) for table in tables])


def correlate_counts(counts: Counts, changes: np.ndarray[Any, Any], large: np.ndarray[Any, Any]) -> dict[str, Any]:
    """Over rows of the large tables that were used, over all of them, and over used rows of all tables."""
    used = np.flatnonzero(counts.pushes)
    groups = {"used": np.intersect1d(large, used), "large": large, "all_used": used}
    found: dict[str, Any] = {"rows_used": int(used.size)}
    for group, chosen in groups.items():
        for name, count in (("pushes", counts.pushes), ("lookups", counts.lookups)):
            found[f"{name}_{group}"] = cpr_figures.correlate(count[chosen].tolist(), changes[chosen].tolist())
    return found


def compare(report: common.Report) -> None:
    rows = [row for row in report.rows if row["kind"] == "access"]
    shown = []
    for row in rows:
        for group, words in (
            ("used", "used rows, large tables"),
            ("large", "all their rows"),
            ("all_used", "all tables"),
        ):
            pushes, lookups = row[f"pushes_{group}"], row[f"lookups_{group}"]
            shown.append(
                (f"{row['optimizer']}, {words}", *("-" if r is None else f"{r:.3f}" for r in (pushes, lookups)))
            )
        pushes, lookups = row["pushes_used"], row["lookups_used"]
        if pushes is not None and lookups is not None:
            name = f"access_{row['optimizer']}"
            report.ratios[f"{name}_pushes_less_lookups"] = common.Ratio.of([pushes - lookups], target=-SLACK)
            report.ratios[f"{name}_pushes"] = common.Ratio.of([pushes], target=PAPER)
    steps = rows[0]["steps"]
    common.print_table(f"correlation with the change of a row, {steps} steps", ("", "pushes", "look-ups"), shown)
