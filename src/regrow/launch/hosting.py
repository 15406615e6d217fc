"""Which backend runs the processes of a run: pipes on this machine, actors on the nodes of a cluster, or what the
caller has.

`inherits`: processes of the run are there, and a launcher before this one has checked what is checked here.

Everything that can be known to be wrong with a cluster is found here, before the run has a directory.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from regrow.config import TrainConfig
from regrow.launch import memory
from regrow.launch.processes import CHILD_COMMAND, LocalProcesses
from regrow.launch.rundir import Logs
from regrow.launch.tiers import RowFiles, StoreDir

if TYPE_CHECKING:
    from regrow.launch.placement import Node, Seats, Wish
    from regrow.launch.ray_nodes import Where
    from regrow.launch.ray_posts import Seat


class Host:
    """Makes the backend of a run. Checked when it is made; `notes` are for the user."""

    def __init__(
        self,
        config: TrainConfig,
        *,
        command: Sequence[str] = CHILD_COMMAND,
        memory_check: bool = True,
        make_backend: Callable[[Logs], Any] | None = None,
        seat: Seat | None = None,
        inherits: bool = False,
    ) -> None:
        self.seat = seat
        self._inherits = inherits
        self.notes: list[str] = []
        self._config = config
        self._command = tuple(command)
        self._ray: Any = None
        self._wish: Wish | None = None
        self._nodes: list[Node] = []
        self._where: dict[str, Where] = {}
        self._seats: Seats = {}  # as planned
        self._make_backend = make_backend
        if config.cluster == "ray":
            self._connect()
        elif memory_check and not config.script:  # how large a script's tables are is not known before it runs
            memory.check(config)

    def _connect(self) -> None:
        from regrow.launch import ray_connect, ray_nodes

        self._ray = ray_connect.connect(self._config.address)
        config = self._config
        if self._inherits:  # all of this was looked at before the run began
            self._wish = ray_nodes.make_wish(config, 0 if config.script else memory.count_server_bytes(config))
            return
        self._nodes, self._where = ray_nodes.list_nodes(self._ray)
        self._wish = ray_nodes.make_wish(config, 0 if config.script else memory.count_server_bytes(config))
        self._seats = ray_nodes.plan(self._nodes, self._wish)
        ray_nodes.check_nodes(self._ray, self._nodes, self._where, config)

    def open_files(self, *, overwrite: bool) -> RowFiles | None:
        """Of rows on disk, looked at and ready for servers; None: rows are in memory."""
        if self._config.store == "memory":
            return None
        if self._ray is None:
            return StoreDir.open(self._config, overwrite=overwrite)
        from regrow.launch.ray_files import NodeFiles

        if self._inherits:
            return NodeFiles(self._ray, self._config)
        return NodeFiles.open(
            self._ray, self._config, nodes=self._nodes, where=self._where, seats=self._seats, overwrite=overwrite
        )

    def make(self, logs: Logs) -> Any:
        """A `Backend`."""
        if self._make_backend is not None:
            return self._make_backend(logs)
        if self._ray is None:
            return LocalProcesses(logs=logs, command=self._command)
        from regrow.launch.outpost import GATHER_SECONDS, REMOTE_COMMAND
        from regrow.launch.ray import RayProcesses

        assert self._wish is not None
        backend = RayProcesses(
            ray=self._ray,
            logs=logs,
            wish=self._wish,
            command=REMOTE_COMMAND if self._command == CHILD_COMMAND else self._command,
            directory=os.getcwd(),
            seat=self.seat,
            # Whoever is to be killed at a step is killed when the launcher hears of it.
            gather_seconds=0.0 if self._config.sabotage else GATHER_SECONDS,
        )
        if self._inherits:
            return backend
        self.notes.append(backend.reserve())
        return backend
