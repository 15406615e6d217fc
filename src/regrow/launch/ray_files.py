"""Rows on disk on the nodes of a cluster: one directory of the same name on each, which is looked at, cleared and given
back by a task that runs there.

What is in it is of use to nobody but the run: servers make their files anew whenever they begin, also on a node that
came later, and load them from `--ckpt` where there is one. So nothing has to be found again, and a node that is lost
takes nothing along that is needed. The rule to keep: what can be wrong with a node's directory is found before anything
starts, by the same `StoreDir` as on one machine, and is one error that names the node.
"""

from __future__ import annotations

import collections
import contextlib
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from regrow.config import TrainConfig
from regrow.errors import RegrowError, UserError
from regrow.launch.placement import Node, Seats
from regrow.launch.ray_nodes import PROBE_SECONDS_MAX, Where, ask_node, list_nodes
from regrow.launch.tiers import StoreDir, check_cache, name_directory

# For all nodes to delete their files. Too small: a busy one keeps them until the next run. Too large: who waits for the
# end of a run waits for a node that hangs.
FINISH_SECONDS_MAX = 20.0


class Problem(NamedTuple):
    """Of a node's directory."""

    message: str
    hint: str | None


class NodeFiles:
    """The directories of a run on all nodes; `tiers.RowFiles`."""

    def __init__(self, ray: Any, config: TrainConfig) -> None:
        self._ray = ray
        self._config = config

    @classmethod
    def open(
        cls,
        ray: Any,
        config: TrainConfig,
        *,
        nodes: Sequence[Node],
        where: Mapping[str, Where],
        seats: Seats,
        overwrite: bool,
    ) -> NodeFiles:
        """Looks at the directory of every node, and clears it. A UserError names the node it is about."""
        check_cache(config)
        servers = collections.Counter(node for (role, _), node in seats.items() if role == "server")
        files = cls(ray, config)
        for node in nodes:  # one after the other: nodes may share a directory, and each locks it
            problem = files._ask(node.id, prepare_here, max(1, servers[node.id]), overwrite)
            if problem is not None:
                raise UserError(f"node {where[node.id].name}: {problem.message}", hint=problem.hint)
        return files

    def clear(self) -> None:
        """Servers do it themselves, when they begin (`TieredRows.temporary`)."""

    def finish(self) -> None:
        """The run has ended well. What is left on a node that does not answer is cleared by the next run there."""
        with contextlib.suppress(Exception):  # the cluster may be gone
            asked = [self._send(node.id, finish_here) for node in list_nodes(self._ray)[0]]
            self._ray.wait(asked, num_returns=len(asked), timeout=FINISH_SECONDS_MAX)

    def close(self) -> None:
        """Nothing is held: servers have locks of their own."""

    def _send(self, node: str, function: Any, *more: Any) -> Any:
        return ask_node(self._ray, node, function, self._config.to_dict(), node, *more)

    def _ask(self, node: str, function: Any, *more: Any) -> Problem | None:
        try:
            found: Problem | None = self._ray.get(self._send(node, function, *more), timeout=PROBE_SECONDS_MAX)
        except self._ray.exceptions.GetTimeoutError:
            raise RegrowError(f"node {node} did not answer within {PROBE_SECONDS_MAX:.0f} s") from None
        except self._ray.exceptions.RayError as error:
            words = [line for line in str(error).splitlines() if line.strip()]
            raise RegrowError(f"node {node}: {words[-1] if words else error}") from None
        return found


def prepare_here(options: dict[str, Any], node: str, servers: int, overwrite: bool) -> Problem | None:
    """Runs on a node."""
    try:
        StoreDir.open(_read(options, node), overwrite=overwrite, servers=servers).close()
    except RegrowError as error:
        return Problem(error.message, error.hint)
    return None


def finish_here(options: dict[str, Any], node: str) -> Problem | None:
    """Runs on a node."""
    StoreDir(_read(options, node)).finish()
    return None


def _read(options: dict[str, Any], node: str) -> TrainConfig:
    config = TrainConfig.from_dict(options)
    return config.replace(store_dir=name_directory(str(config.store_dir), node))
