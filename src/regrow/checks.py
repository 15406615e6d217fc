"""What the options of a run must be, each and together: errors that name the option, before anything starts.

`TrainConfig` calls this once, when it is made. What belongs to one subject (data, checkpoints, rows on disk, clusters)
is checked in the file of that subject.
"""

from __future__ import annotations

import dataclasses
import re
from typing import Any

from regrow.clusters import check_cluster
from regrow.errors import ConfigError
from regrow.fields import parse_field
from regrow.hanging import parse_silent
from regrow.inputs import check_data, check_model
from regrow.protection import (
    CODE_RANGES,
    COMMITS,
    SERVERS_MAX,
    check_checkpoints,
    check_choice,
    check_partial,
    check_publications,
    check_range,
    check_sabotage,
)
from regrow.tiers import check_store
from regrow.units import GIB, KIB, parse_seconds

MODES = ("async", "sync")
OPTIMIZERS = ("rowwise_adagrad", "adagrad", "sgd", "momentum", "adam", "partial_rowwise_adam")
DENSE_OPTIMIZERS = ("sgd", "momentum", "adagrad", "adam")
TRANSPORTS = ("unix", "tcp")
AUTHENTICATE = ("auto", "always", "never")
PROTECTIONS = ("none", "ec", "full", "delta", "ec+delta", "partial", "ec+partial", "batch")

WORKERS_MAX = 1024
PREFETCH_MAX = 64
FRAMES_PER_FLUSH = 2  # the push that fills a flush goes along with it


# With a script, these are its own.
SCRIPTS_OWN = ("data", "schema", "model", "rows_max", "train_rows", "test_rows", "prefill", "steps", "epochs")


def check_config(config: Any) -> None:
    """Raises for the first thing that is wrong."""
    check_choice(config, "mode", MODES)
    check_choice(config, "optimizer", OPTIMIZERS)
    check_choice(config, "dense_optimizer", DENSE_OPTIMIZERS)
    check_choice(config, "transport", TRANSPORTS)
    check_choice(config, "authenticate", AUTHENTICATE)
    if config.tls != "off" and config.transport != "tcp":
        raise ConfigError("tls", config.tls, "Unix sockets leave no machine", hint="--transport tcp, or --tls off")
    check_choice(config, "protection", PROTECTIONS)
    if config.script:
        _check_script(config)
    else:
        check_data(config)
        check_model(config)
    check_cluster(config)
    check_range(config, "servers", 1, SERVERS_MAX)
    check_range(config, "workers", 1, WORKERS_MAX)
    check_range(config, "batch", 1, 1 << 24)
    check_range(config, "steps", 1, 1 << 48)
    check_range(config, "epochs", 1, 1 << 20)
    check_range(config, "seed", 0, (1 << 63) - 1)
    check_range(config, "prefetch", 0, PREFETCH_MAX)
    check_range(config, "rows_max", 1, (1 << 32) - 1)
    check_range(config, "train_rows", 1, 1 << 48)
    check_range(config, "test_rows", 1, 1 << 40)
    check_range(config, "threads_per_worker", 1, 1024)
    check_range(config, "threads_per_server", 1, 1024)
    check_range(config, "spare_workers", 0, 64)
    check_range(config, "redo_bytes_max", 64 * KIB, 64 * GIB)
    check_range(config, "frame_bytes_max", 64 * KIB, 4 * GIB - 1)
    _check_protection(config)
    _check_faults(config)
    if not 0.0 <= config.skew <= 4.0:
        raise ConfigError("skew", config.skew, "must be between 0 and 4")
    _check_rate(config, "learning_rate")
    _check_rate(config, "dense_learning_rate")
    if not re.fullmatch(r"cpu|cuda(:\d{1,3})?", config.device):
        raise ConfigError("device", config.device, 'must be "cpu", "cuda" or "cuda:N"')
    if config.steps is not None and config.epochs is not None:
        raise ConfigError(
            "epochs", config.epochs, f"steps = {config.steps} is given too", hint="give only one of the two"
        )
    if config.epochs is not None and config.data == "synthetic" and config.train_rows is None:
        hint = "give steps instead, or train_rows to say how long an epoch is"
        raise ConfigError("epochs", config.epochs, "synthetic data has no end", hint=hint)
    if config.mode == "sync" and config.prefetch > 0:
        hint = 'set prefetch to 0, or mode to "async"'
        raise ConfigError("prefetch", config.prefetch, 'mode "sync" cannot pull ahead', hint=hint)


def _check_protection(config: Any) -> None:
    """Numbers must be sane even where nothing is protected; they must fit together only where something is."""
    for name, low, high in CODE_RANGES:
        check_range(config, name, low, high)
    if not 0.0 <= config.recovery_cost <= 1.0:
        raise ConfigError("recovery_cost", config.recovery_cost, "must be between 0 and 1")
    check_choice(config, "commit", COMMITS)
    check_store(config)
    check_checkpoints(config)
    check_publications(config)
    check_partial(config)
    if config.code is not None:
        config.code.check(servers=config.servers, mode=config.mode)
        if config.frame_bytes_max < FRAMES_PER_FLUSH * config.flush_bytes:
            problem = f"a flush of up to flush_bytes = {config.flush_bytes} must fit into a message with room to spare"
            raise ConfigError("frame_bytes_max", config.frame_bytes_max, problem, hint="lower flush_bytes, or raise it")


def _check_faults(config: Any) -> None:
    parse_field(config, "silent_seconds", parse_silent)
    parse_field(config, "patience", parse_seconds)
    check_sabotage(config)


def _check_rate(config: Any, name: str) -> None:
    value = getattr(config, name)
    # Written so that NaN fails too.
    if not 0.0 < value <= 1e4:
        raise ConfigError(
            name,
            value,
            "must be above 0 and at most 10000",
            hint="leave it out for the default of the optimizer",
        )


def _check_script(config: Any) -> None:
    """What a script decides for itself cannot be said here."""
    given = " ".join(config.script)
    if config.script[0] == "-m" and len(config.script) < 2:
        raise ConfigError("script", given, "-m needs the name of a module")
    defaults = {field.name: field.default for field in dataclasses.fields(config)}
    for name in SCRIPTS_OWN:
        if getattr(config, name) != defaults[name]:
            raise ConfigError(name, getattr(config, name), "is the script's own business", hint="say it to the script")
