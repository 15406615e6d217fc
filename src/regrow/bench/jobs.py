"""A job on a Ray cluster of this machine (`nodes.py`), seen from outside: what it says, where its processes sit, what
is left of it when it has ended. For benchmarks, and tests."""

from __future__ import annotations

import contextlib
import functools
import json
from pathlib import Path
from typing import Any

from regrow.bench.nodes import Nodes
from regrow.config import TrainConfig
from regrow.launch import ray_connect, ray_job, ray_jobs

METRICS_BYTES = 1 << 14  # the newest lines of a file that grows


class Job:
    """One that was submitted under a name. `said`: all that it has said so far; of each of its launchers."""

    def __init__(self, nodes: Nodes, config: TrainConfig, *, name: str) -> None:
        assert config.out is not None
        self.name, self.path, self.config = name, Path(config.out), config
        self.nodes = nodes
        self.said: list[str] = []
        self._ray = ray_connect.connect(nodes.address)
        self._next = 0
        self.actor = ray_job.submit(self._ray, config, name=name, overwrite=False)

    # -- what it says ------------------------------------------------------------------------------------------

    def read(self) -> ray_jobs.Page:
        """News, if there are any; also whether it runs."""
        page: ray_jobs.Page = ray_jobs.ask(self._ray, functools.partial(self.actor.read.remote, self._next), self.name)
        self._next = page.next
        self.said += [line for _, line in page.lines]
        return page

    def glance(self) -> ray_jobs.Glance:
        """What `regrow status` shows of it."""
        found: ray_jobs.Glance = ray_jobs.ask(self._ray, self.actor.glance.remote, self.name)
        return found

    def read_metrics(self) -> list[dict[str, Any]]:
        """The newest lines."""
        path = self.path / "metrics.jsonl"
        with contextlib.suppress(OSError), path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - METRICS_BYTES))
            _, *lines = (b"\n" + file.read()).split(b"\n")
            return [line for line in map(_parse, lines) if line]
        return []

    def read_summary(self) -> dict[str, Any]:
        return dict(json.loads((self.path / "summary.json").read_text()))

    def stop(self) -> None:
        """At once, whatever it is at."""
        with contextlib.suppress(Exception):  # it may have ended, and its cluster too
            self._ray.kill(self.actor, no_restart=True)

    # -- where it is -------------------------------------------------------------------------------------------

    @property
    def launcher(self) -> dict[str, Any]:
        """The actor that lives, as Ray describes it; empty while there is none."""
        from ray._private.state import actors

        id = self.actor._actor_id.hex()
        found = [each for name, each in actors().items() if name == id and each["State"] == "ALIVE"]
        return found[0] if found else {}

    def list_seats(self) -> dict[str, str]:
        """The node of each process that works, by its name ("server 2"), on nodes that are there."""
        return {name: node for node in self.nodes.list_ids() for name in self.nodes.list_names(node)}

    # -- what is left of it ------------------------------------------------------------------------------------

    def list_posts(self) -> list[str]:
        names = [each["name"] or "" for each in self._ray.util.list_named_actors(all_namespaces=True)]
        return [name for name in names if name.startswith(f"post/{self.actor._actor_id.hex()}/")]

    def list_rooms(self) -> list[str]:
        rooms = self._ray.util.placement_group_table().values()
        name = f"room/{self.actor._actor_id.hex()}"
        return [room["state"] for room in rooms if room["name"] == name and room["state"] != "REMOVED"]


def _parse(line: bytes) -> dict[str, Any] | None:
    """None for a line of which a part is missing."""
    with contextlib.suppress(ValueError):
        return dict(json.loads(line))
    return None
