"""Whole runs in which rows count pushes: every push takes one from each of its rows, so the model at the end says of
every row how many of its pushes it has. How many it should have is counted here from the workers' programme, by nobody
who knows of servers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import armed_child
import numpy as np
from checkpoint_runs import Run, graph, restored, run

from regrow.checkpoint.saves_ids import IdsFile
from regrow.checkpoint.saves_write import list_owners, read_saves
from regrow.checkpoint.storage import Storage

STEPS = 150
PARTIAL: dict[str, Any] = {
    "protection": "partial",
    "servers": 4,
    "workers": 2,
    "steps": STEPS,
    "optimizer": "sgd",
    "learning_rate": 1.0,
    "every": "40steps",
    "priority": "none",
    "priority_tables": "all",
    "priority_share": 0.25,
}


def partial(path: Path, **options: Any) -> Run:
    """A run in which rows count pushes."""
    options = {**PARTIAL, **options}
    if options["priority"] == "none":
        del options["priority_share"], options["priority_tables"]
    return run(path, **options)


def count_pushes(of: Run) -> list[np.ndarray[Any, Any]]:
    """How many pushes name each row of each table, by the workers' programme."""
    counts = [np.zeros(rows, np.int64) for rows, _ in armed_child.SHAPES]
    for worker in range(of.config.workers):
        work = armed_child.Work(of.config, worker)
        for step in range(1, STEPS + 1):
            for table, ids in enumerate(work.ids(step)):
                counts[table][np.unique(ids)] += 1
    return counts


def count_lost(of: Run) -> list[int]:
    """Pushes that are missing at the end, by table. None is there twice."""
    last = graph(of.url).restorable()[-1]
    assert last.step == STEPS
    lost = []
    for counts, records in zip(count_pushes(of), restored(of.url, last, of.config), strict=True):
        have = -records
        assert (have == have[:, :1]).all(), "all weights of a row count the same"
        assert (have[:, 0] <= counts).all(), "no push is there twice"
        lost.append(int((counts - have[:, 0]).sum()))
    return lost


def check(of: Run, *, roles: list[str], loses: bool | None = True) -> None:
    summary = of.summary
    assert summary["status"] == "ok"
    assert sorted(of.roles_lost) == sorted(roles)
    assert summary["restores"] == [], "nobody went back but the lost"
    *bare, dense = count_lost(of)
    assert dense == 0, "copies lose nothing"
    assert sum(bare) == summary["partial"]["updates_lost"]
    assert sum(failure.get("updates_lost", 0) for failure in summary["failures"]) == sum(bare)
    if loses is not None:
        assert (sum(bare) > 0) == loses
    assert list_saved(of) == {}, "the last checkpoint has everything"


def list_saved(of: Run) -> dict[tuple[str, int], dict[str, list[int]]]:
    """The rows in each save that is there, by shard and number."""
    storage = Storage.open(of.url)
    found: dict[tuple[str, int], dict[str, list[int]]] = {}
    for owner in list_owners(storage):
        for save in read_saves(storage, owner).manifests:
            if save.chunks:
                ids = IdsFile(storage.read(f"{save.name}/ids.safetensors"), save)
                rows: dict[str, list[int]] = {}
                for number, info in enumerate(save.chunks):
                    for table, each in ids.rows_of(number, info).items():
                        rows.setdefault(table, []).extend(each.list_ids().tolist())
                found[save.shard, save.number] = rows
    return found
