"""An evaluation that all workers make together, as one of them sees it: wait for the others, judge a share, and hear
what came of it. Who judges what, and who merges, is decided by the launcher (`launch/judges.py`), which also knows what
to do about those who die.

What a worker has counted goes to whoever merges as a file: exact metrics keep every score, and a pipe holds little.
"""

from __future__ import annotations

import copy
import math
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from regrow.errors import RegrowError
from regrow.launch import orders, reports
from regrow.metrics import Metric
from regrow.nn.judging import can_merge
from regrow.runtime.parent import Parent

SINGLE = -1  # of a state that is one array, and not a list

Place = tuple[int, int | None, int]  # the loop, its step (None: it is over), and which call there
# Judges every `count`-th batch from `index` on, with these metrics.
JudgeShare = Callable[[Sequence[Metric], int, int], None]


def judge_together(
    parent: Parent, place: Place, metrics: Sequence[Metric], judge: JudgeShare, *, steps: int
) -> dict[str, float]:
    """What all found together, after so many steps."""
    unmerged = [metric.name for metric in metrics if not can_merge(metric)]
    if unmerged and parent.assignment.identity.id == 0:
        names = ", ".join(unmerged)
        print(f"{names} cannot be merged (no metric_state and merge_state that can): one worker judges alone")
    loop, step, call = place
    parent.report(reports.ReadyToJudge(loop=loop, step=step, call=call, merges=not unmerged, steps=steps))
    counted: Sequence[Metric] = metrics
    while True:
        match wait_for_command(parent):
            case orders.Judge(number=number, index=index, count=count, directory=directory):
                counted = copy.deepcopy(metrics)  # which may have been begun with before
                judge(counted, index, count)
                if count == 1:
                    parent.report(reports.Concluded(number=number, metrics=compute(counted)))
                else:
                    problem = "" if index == 0 else write_tally(name_file(directory, number, parent), counted)
                    parent.report(reports.Tallied(number=number, problem=problem))
            case orders.MergeTallies(number=number, workers=workers, directory=directory):
                for worker in workers[1:]:
                    read_tally(Path(directory) / f"{number}.{worker}.npz", counted)
                parent.report(reports.Concluded(number=number, metrics=compute(counted)))
            case orders.Conclude(metrics=found):
                return {name: math.nan if value is None else value for name, value in found.items()}
            case orders.Stop():
                raise RegrowError("stopped in the middle of an evaluation")
            case command:
                raise RegrowError(f"the launcher sent a command that is not for an evaluation: {command}")


def wait_for_command(parent: Parent) -> orders.AnyCommand:
    with parent.pulse.rest():
        return parent.next_command()


def compute(metrics: Sequence[Metric]) -> dict[str, float | None]:
    return {metric.name: metric.compute() for metric in metrics}


def name_file(directory: str, number: int, parent: Parent) -> Path:
    return Path(directory) / f"{number}.{parent.assignment.identity.id}.npz"


def write_tally(path: Path, metrics: Sequence[Metric]) -> str:
    """Whole or not at all; says why not."""
    arrays: dict[str, Any] = {}
    for index, metric in enumerate(metrics):
        for name, value in metric.metric_state.items():  # type: ignore[attr-defined]
            parts = value if isinstance(value, list) else [value]
            count = len(parts) if isinstance(value, list) else SINGLE
            arrays[f"{index}/{name}/count"] = np.array(count)
            arrays |= {f"{index}/{name}/{n}": _as_array(part) for n, part in enumerate(parts)}
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        new = path.with_suffix(".new")
        with new.open("wb") as file:
            np.savez(file, **arrays)
        os.replace(new, path)
    except OSError as error:
        return error.strerror or str(error)
    return ""


def read_tally(path: Path, metrics: Sequence[Metric]) -> None:
    """Adds what another worker has counted."""
    with np.load(path, allow_pickle=False) as arrays:
        for index, metric in enumerate(metrics):
            state: dict[str, Any] = {}
            for key in [key for key in arrays if key.startswith(f"{index}/") and key.endswith("/count")]:
                name = key.split("/")[1]
                count = int(arrays[key])
                parts = [arrays[f"{index}/{name}/{n}"] for n in range(abs(count))]
                state[name] = parts[0] if count == SINGLE else parts
            metric.merge_state(state)  # type: ignore[attr-defined]


def _as_array(value: Any) -> np.ndarray[Any, Any]:
    return np.asarray(value.detach().cpu() if hasattr(value, "detach") else value)
