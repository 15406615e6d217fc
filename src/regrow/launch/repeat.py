"""Is a training the same when it is done again? Two runs with digests of every step, and the first that differs.

In synchronous mode a step follows from its batch, the rows, the dense parameters and what the script does with them. So
of the first step that differs, the first thing in it that differs is the one to look at: what comes later follows from
it. Two runs that are alike prove nothing about a third; two that differ prove that the script is not repeatable.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import Any

from regrow.config import TrainConfig
from regrow.errors import ConfigError, RegrowError
from regrow.launch.rundir import STEPS

RUNS = ("first", "second")
# What a difference means, in the order in which one follows from the other.
WORDS = {
    "batch": "the ids of the batch differ: the data does not come in the same order",
    "rows": "the rows of table {table!r} differ before anything was computed from them",
    "dense": "the dense parameters differ before anything was computed from them",
    "loss": "the loss differs, of the same batch, rows and dense parameters",
    "grads": "the gradients of table {table!r} differ, of the same loss",
}
HINTS = {
    "batch": "shuffle with a generator that is seeded, and read files in a fixed order",
    "rows": "first values must follow from the seed: init_fn, and weights that are loaded",
    "dense": "build the model after regrow.join(), which seeds torch",
}
HINT = (
    "dropout, random numbers, threads or memory of earlier steps: see what makes a script repeatable in docs/scripts.md"
)

Lines = dict[int, dict[str, Any]]


def check(config: TrainConfig) -> None:
    """Before anything starts."""
    if config.mode != "sync":
        problem = "asynchronous runs are never alike, so --check-repeat says nothing of them"
        raise ConfigError("mode", config.mode, problem, hint="--mode sync")
    if config.saves:
        problem = "--check-repeat runs it twice, and both would store into the same place"
        raise ConfigError("protection", config.protection, problem, hint="leave it out, or --protect ec")
    if config.store != "memory":
        problem = "--check-repeat runs it twice, and both would have their rows in the same files"
        raise ConfigError("store", config.store, problem, hint="--store memory")


def run_twice(config: TrainConfig, train: Callable[[TrainConfig], dict[str, Any]]) -> str:
    """Says that both were the same; RegrowError if they were not."""
    stem = f"{datetime.now():%Y%m%d-%H%M%S}-{config.model_name}-repeat"
    home = Path(config.out) if config.out is not None else Path("runs") / stem
    summaries = [train(config.replace(out=str(home / name), step_digests=True)) for name in RUNS]
    compare(*(home / name for name in RUNS))
    digests = [summary.get("model_sha256") for summary in summaries]
    if digests[0] != digests[1]:
        raise RegrowError(
            f"all steps are the same, but the models are not: model_sha256 {digests[0]} and {digests[1]}",
            hint="something wrote to the tables besides the steps",
        )
    return f"both runs are the same: {summaries[0]['steps']} steps of {config.workers} workers, in {home}"


def compare(first: Path, second: Path) -> None:
    """Two run directories; RegrowError names the first step in which they part."""
    ones, others = read_steps(first), read_steps(second)
    if not ones or ones.keys() != others.keys():
        raise RegrowError(
            f"there are digests of {describe(ones)} in {first}, and of {describe(others)} in {second}",
            hint="both runs must be made with --step-digests, with the same workers",
        )
    steps = {step for each in (*ones.values(), *others.values()) for step in each}
    for step in sorted(steps):
        found = [(worker, find_difference(ones[worker].get(step), others[worker].get(step))) for worker in sorted(ones)]
        parted = [(worker, difference) for worker, difference in found if difference is not None]
        if parted:
            order = list(WORDS)
            worker, (kind, text) = min(parted, key=lambda each: order.index(each[1][0]) if each[1][0] in order else -1)
            raise RegrowError(
                f"the two runs part at step {step}, in worker {worker}: {text}", hint=HINTS.get(kind, HINT)
            )


def find_difference(one: dict[str, Any] | None, other: dict[str, Any] | None) -> tuple[str, str] | None:
    """What differs in a step of a worker, and in words."""
    if one is None or other is None:
        return None if one is other else ("missing", "only one of them made it")
    for kind, words in WORDS.items():
        mine, theirs = one[kind], other[kind]
        if isinstance(mine, dict):
            tables = [name for name in {**mine, **theirs} if mine.get(name) != theirs.get(name)]
            if tables:
                return kind, words.format(table=tables[0])
        elif mine != theirs:
            return kind, words
    return None


def read_steps(run: Path) -> dict[str, Lines]:
    """Of each worker, by step. A step that was done again is what it was then."""
    found: dict[str, Lines] = {}
    for path in sorted((run / STEPS).glob("worker-*.jsonl")):
        lines = found[path.stem.removeprefix("worker-")] = {}
        for text in path.read_text().splitlines():
            with contextlib.suppress(ValueError):  # what a worker that was killed had half written
                line = json.loads(text)
                lines[line["step"]] = line
    return found


def describe(workers: dict[str, Lines]) -> str:
    return f"workers {', '.join(workers)}" if workers else "no worker"
