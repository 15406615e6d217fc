"""Where a run runs, as a part of a configuration: this machine, or a cluster; what goes together, and what does not.

Only words and numbers are looked at here. What a cluster has is asked in `launch/ray_nodes.py`, before anything starts.
"""

from __future__ import annotations

import os
import re
from typing import Any

from regrow.errors import ConfigError
from regrow.protection import check_choice, check_range

CLUSTERS = ("local", "ray")
LABEL_ROLES = ("server", "worker", "coordinator", "launcher")
CPUS_MAX = 4096
# Without meaning on one machine.
CLUSTER_OPTIONS = (
    *("address", "servers_per_node", "server_cpus", "server_memory", "worker_cpus", "worker_gpus", "node_label", "job"),
)


def check_cluster(config: Any) -> None:
    """Raises ConfigError for options that cannot be, or that nobody would look at."""
    check_choice(config, "cluster", CLUSTERS)
    check_range(config, "servers_per_node", 1, 4096)
    check_range(config, "server_memory", 0, 1 << 50)
    for name in ("server_cpus", "worker_cpus", "worker_gpus"):
        value = getattr(config, name)
        if not 0.0 <= value <= CPUS_MAX:  # written so that NaN fails too
            raise ConfigError(name, value, f"must be between 0 and {CPUS_MAX}")
    for text in config.node_label:
        parse_label(text)
    if config.job is not None and not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}", config.job):
        raise ConfigError("job", config.job, "a name is letters, digits, dots and dashes, at most 64")
    if config.cluster == "local":
        _check_unused(config)
        return
    if config.transport != "tcp":
        raise ConfigError("transport", config.transport, "nodes of a cluster speak over TCP", hint="--transport tcp")
    if config.store != "memory" and config.protection == "batch":
        problem = "checkpoints in the files of a node are lost with it, and nobody else could go on from the rest"
        hint = "--protect delta --ckpt URL, which makes files anew on any node; or --cluster local"
        raise ConfigError("protection", config.protection, problem, hint=hint)
    if config.store_dir is not None and not os.path.isabs(config.store_dir):
        problem = "is not the same on every node"
        raise ConfigError("store_dir", config.store_dir, problem, hint="a path from the root: /nvme/run")
    if config.step_digests:
        raise ConfigError("step_digests", True, "are files of one machine", hint="--cluster local")


def _check_unused(config: Any) -> None:
    for name in CLUSTER_OPTIONS:
        value, default = getattr(config, name), type(config).__dataclass_fields__[name].default
        if value != default:
            raise ConfigError(name, value, 'cluster "local" does not use it', hint="--cluster ray")


def parse_label(text: str) -> tuple[str, str, str]:
    """(role, key, value): "server:zone=a" is for servers, "zone=a" for all, whose role is ""."""
    role, colon, rest = text.rpartition(":")
    name, equals, value = rest.partition("=")
    if not equals or not name or (colon and role not in LABEL_ROLES):
        raise ConfigError("node_label", text, "is no KEY=VALUE, nor ROLE:KEY=VALUE", hint="zone=a, or server:zone=a")
    return role, name, value
