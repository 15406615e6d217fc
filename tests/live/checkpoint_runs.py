"""Checkpointed runs with the children of armed_child.py, and what is on their storage, row by row."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import os
import signal
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import armed_child
import numpy as np

from regrow.checkpoint.chunks import Chunk
from regrow.checkpoint.lineage import Graph
from regrow.checkpoint.load import restore
from regrow.checkpoint.manifest import Cut, Manifest
from regrow.checkpoint.storage import Storage
from regrow.config import TrainConfig
from regrow.core.twins import initial_rows
from regrow.launch import local
from regrow.launch.display import Display

SECONDS_MAX = 90.0  # for a run. One that hangs fails, and says where.
SMALL: dict[str, Any] = {
    "model": "tiny",
    "batch": 16,
    "steps": 150,
    "mode": "sync",
    "servers": 2,
    "workers": 1,
    "protection": "delta",
    "every": "20steps",
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Run:
    config: TrainConfig
    summary: dict[str, Any]
    room: Path

    @property
    def url(self) -> str:
        assert self.config.ckpt is not None
        return self.config.ckpt

    @property
    def roles_lost(self) -> list[str]:
        return [failure["role"] for failure in self.summary["failures"]]


def run(path: Path, *, plan: dict[str, Any] | None = None, display: Display | None = None, **options: Any) -> Run:
    """A run in this directory; checkpoints are in it too unless another place is named."""
    options = {**SMALL, "ckpt": str(path / "ckpt"), **options}
    if options["protection"] in ("none", "ec"):
        options["ckpt"] = None
    config = TrainConfig(out=str(path / "run"), **options)
    room = path / "room"
    room.mkdir(parents=True)
    (path / "plan.json").write_text(json.dumps({"room": str(room), **(plan or {})}))
    command = (sys.executable, "-P", armed_child.__file__, str(path / "plan.json"))
    with watched():
        summary = local.train(config, command=command, display=display)
    return Run(config=config, summary=summary, room=room)


@contextlib.contextmanager
def watched() -> Iterator[None]:
    """The launcher ends a run when it gets this signal."""
    timer = threading.Timer(SECONDS_MAX, os.kill, (os.getpid(), signal.SIGTERM))
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


@functools.cache
def _digests(steps: int, workers: int, optimizer: str, seed: int) -> tuple[str, ...]:
    options = {**SMALL, "steps": steps, "workers": workers, "optimizer": optimizer, "seed": seed, "protection": "none"}
    return tuple(armed_child.digests(TrainConfig(**options)))


def undisturbed(config: TrainConfig) -> tuple[str, ...]:
    """The model after each step of a synchronous run that nothing happens to."""
    assert config.steps is not None
    return _digests(config.steps, config.workers, config.optimizer, config.seed)


# --- What is on storage ---


def graph(url: str) -> Graph:
    manifests, broken = Storage.open(url).manifests()
    assert broken == []
    return Graph(manifests)


def restored(url: str, cut: Cut, config: TrainConfig) -> list[np.ndarray[Any, Any]]:
    """All records of each table at a cut, as the reader of a checkpoint has them."""
    job = armed_child.job_of(config)
    records: dict[str, np.ndarray[Any, Any]] = {}
    for index, table in enumerate(job.tables):
        records[table.name] = np.zeros((table.rows, table.record_floats), np.float32)
        records[table.name][:, : table.dim] = initial_rows(
            range(table.rows), dim=table.dim, seed=job.seed, table=index, bound=table.init_bound
        )

    def apply(piece: Manifest, chunk: Chunk) -> None:
        for name, rows in chunk.items():
            parts = [rows.weight, *(state.reshape(len(rows.ids), -1) for state in rows.states.values())]
            records[name][rows.ids] = np.concatenate(parts, axis=1)

    plan, _ = graph(url).restore_plan(cut.id)
    restore(Storage.open(url), plan, apply)
    return [records[table.name] for table in job.tables]


def check_cuts(run: Run) -> list[Cut]:
    """Every cut that can be restored is a state that training passed. Returns them, oldest first."""
    cuts = graph(run.url).restorable()
    for cut in cuts:
        records = restored(run.url, cut, run.config)
        if run.config.mode == "sync":
            (step,) = cut.marks
            job = armed_child.job_of(run.config)
            assert armed_child.digest(job, records) == undisturbed(run.config)[step], cut
        else:
            for found, wanted in zip(records, armed_child.counted(run.config, cut.marks), strict=True):
                assert np.array_equal(found, wanted), cut
    return cuts


def check(run: Run) -> list[Cut]:
    """A synchronous run that ended as if nothing had happened, and what it left on storage."""
    assert run.summary["status"] == "ok"
    assert run.summary["model_sha256"] == undisturbed(run.config)[-1]
    assert run.summary["steps"] == run.config.steps
    cuts = check_cuts(run)
    assert cuts[-1].step == run.config.steps, "the trained model is stored"
    return cuts
