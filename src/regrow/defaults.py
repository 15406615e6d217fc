"""Defaults that depend on other options, on the machine, or on a file: what `TrainConfig` fills in where nothing was
said."""

from __future__ import annotations

import dataclasses
import os
import sys
import zlib
from collections.abc import Mapping
from typing import Any

from regrow.protection import AUTO, RANDOM_ROLES, flush_pushes_default

# Learning rates that train a DLRM on click data without tuning: `regrow bench accuracy` measures the first of each.
LEARNING_RATES = {
    "rowwise_adagrad": 0.03,
    "adagrad": 0.02,
    "sgd": 0.1,
    "momentum": 0.01,
    "adam": 0.001,
    "partial_rowwise_adam": 0.001,
}
DENSE_LEARNING_RATES = {"adam": 0.0003, "adagrad": 0.01, "sgd": 0.1, "momentum": 0.01}

OWN_SAVES = ("partial", "ec+partial")  # protections whose servers save their own rows
EVERY_DEFAULT = "60s"
STEPS_DEFAULT = 300  # of a synthetic run, which has no end of its own
THREADS_PER_WORKER_DEFAULT_MAX = 8  # past this the small matrices of a DLRM do not get faster
# A script does things between its steps that nobody here knows of: plots, files, figures of its own.
SCRIPT_SILENT = "worker=60"
BATCH_DEFAULT, BATCH_SMALL = 2048, 128
STEPS_PER_EPOCH_WANTED = 400
HEAD_BYTES = 1 << 16  # of a file, to see how long its lines are


def derive_values(config: Any) -> dict[str, Any]:
    """Values for the fields of a configuration that were left open, from the options given and the machine."""
    given = {field.name: getattr(config, field.name) for field in dataclasses.fields(config)}
    derived: dict[str, Any] = {}
    if given["learning_rate"] is None:
        derived["learning_rate"] = LEARNING_RATES.get(given["optimizer"], 0.01)
    if given["dense_learning_rate"] is None:
        derived["dense_learning_rate"] = DENSE_LEARNING_RATES.get(given["dense_optimizer"], 0.01)
    if given["prefetch"] is None:
        derived["prefetch"] = 0 if given["mode"] == "sync" else 1
    if given["transport"] is None:
        derived["transport"] = "unix" if sys.platform.startswith("linux") and given["cluster"] == "local" else "tcp"
    if given["threads_per_worker"] is None:
        workers = given["workers"] if isinstance(given["workers"], int) else 1
        share = cores_usable() // max(1, workers)
        derived["threads_per_worker"] = max(1, min(THREADS_PER_WORKER_DEFAULT_MAX, share))
    if given["spare_workers"] is None:
        derived["spare_workers"] = 1
    if given["batch"] is None:
        derived["batch"] = choose_batch(given)
    if given["steps"] is None and given["epochs"] is None and not given["script"]:
        # A synthetic stream without an end can only be counted in steps.
        endless = given["data"] == "synthetic" and given["train_rows"] is None
        derived |= {"steps": STEPS_DEFAULT} if endless else {"epochs": 1}
    if given["every"] is None:
        derived["every"] = AUTO if given["protection"] in OWN_SAVES else EVERY_DEFAULT
    if given["script"] and not given["silent_seconds"]:
        derived["silent_seconds"] = SCRIPT_SILENT
    if given["flush_pushes"] is None:
        derived["flush_pushes"] = flush_pushes_default(given["commit"])
    for name in ("kill", "pause", "script", "node_label"):
        if type(given[name]) is list:  # as JSON and TOML have it
            derived[name] = tuple(given[name])
    if type(given["mtbf_roles"]) is str:  # "servers, workers" is as good
        roles = [role.strip() for role in given["mtbf_roles"].split(",")]
        singular = {f"{role}s": role for role in RANDOM_ROLES}
        derived["mtbf_roles"] = ",".join(singular.get(role, role) for role in roles)
    # A TOML file may well say `learning_rate = 1`.
    floats = ("learning_rate", "dense_learning_rate", "skew", "mtbf", "mtbf_shape", "mtbf_hangs", "recovery_cost")
    for name in (*floats, "target_pls", "priority_share"):
        if type(given[name]) is int:
            derived[name] = float(given[name])
    return derived


def choose_batch(given: Mapping[str, Any]) -> int:
    """The largest power of two up to 2048 that leaves every worker about 400 steps in an epoch, but at least 128."""
    kind, _, path = str(given["data"]).partition(":")
    workers = given["workers"]
    if kind not in ("criteo", "csv", "parquet", "npz") or not isinstance(workers, int) or workers < 1:
        return BATCH_DEFAULT
    rows = given["train_rows"]
    if not isinstance(rows, int):
        rows = estimate_lines(path) if kind in ("criteo", "csv") else None
        if rows is None:
            return BATCH_DEFAULT  # that the file is missing will be said elsewhere
    fitting = max(1, rows // (workers * STEPS_PER_EPOCH_WANTED))
    return max(BATCH_SMALL, min(BATCH_DEFAULT, 1 << (fitting.bit_length() - 1)))


def estimate_lines(path: str) -> int | None:
    """About how many lines a text file has, from those at its front; None if it cannot be read."""
    try:
        with open(path, "rb") as file:
            head = file.read(HEAD_BYTES)
        if head[:2] == b"\x1f\x8b":
            text = zlib.decompressobj(zlib.MAX_WBITS | 16).decompress(head)
        else:
            text = head = head[: head.rfind(b"\n") + 1]
        return os.path.getsize(path) * text.count(b"\n") // max(1, len(head))
    except (OSError, zlib.error):
        return None


def cores_usable() -> int:
    """Cores this process may run on, which in a container can be fewer than the machine has."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
