"""Nodes of a Ray cluster on this machine, which can be lost as by a cut of their power: for benchmarks, and tests."""

from __future__ import annotations

import contextlib
import os
import signal
from pathlib import Path
from typing import Any

STARTS_MAX = 4  # of a node: Ray gives up after half a minute, which a busy machine may take
STORE_BYTES = 80 << 20
LABELS = {"kind": "node"}  # of all but the head
OUTPOST = b"ray::Outpost"  # as Ray calls the process of an actor


class Nodes:
    """A head, and as many nodes as are added."""

    def __init__(self, *, health_checks: int | None = None) -> None:
        """`health_checks`: so many that a node does not answer, and Ray counts it as lost."""
        os.environ["RAY_worker_niceness"] = "0"  # noqa: SIM112 - that is its name; or a busy machine would hardly let them start
        from ray.cluster_utils import Cluster

        head: dict[str, Any] = {"num_cpus": 2, "include_dashboard": False, "object_store_memory": STORE_BYTES}
        if health_checks is not None:
            head["_system_config"] = {"health_check_failure_threshold": health_checks}
        self._cluster: Any = _try_often(lambda: Cluster(initialize_head=True, head_node_args=head))
        self._frozen: list[int] = []

    @property
    def address(self) -> str:
        return str(self._cluster.address)

    def add(self, count: int = 1, *, cpus: float = 1.0) -> None:
        for _ in range(count):
            _try_often(
                lambda: self._cluster.add_node(
                    num_cpus=cpus, object_store_memory=STORE_BYTES, labels=LABELS, wait=False
                )
            )
        self._cluster.wait_for_nodes()

    def count(self) -> int:
        return len(self._cluster.worker_nodes)

    def list_ids(self) -> list[str]:
        return [str(node.node_id) for node in self._cluster.worker_nodes]

    def list_processes(self) -> list[int]:
        """All of every node, ours behind them too, and no others of this machine."""
        nodes = [self._cluster.head_node, *self._cluster.worker_nodes]
        roots = [each.process.pid for node in nodes for some in node.all_processes.values() for each in some]
        return [pid for root in roots for pid in _list_with_children(root)]

    def list_names(self, node_id: str) -> list[str]:
        """What our processes there are: "server 2", "worker 0"."""
        found = []
        for pid in _list_with_children(_raylet(self._find(node_id))):
            with contextlib.suppress(OSError):
                name = Path(f"/proc/{pid}/comm").read_text().strip()
                found += [name.removeprefix("rg ")] if name.startswith("rg ") else []
        return found

    def lose(self, node_id: str) -> None:
        """Everything there is gone at once."""
        node = self._find(node_id)
        for pid in _list_with_children(_raylet(node)):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self._cluster.remove_node(node, allow_graceful=False)

    def freeze(self, node_id: str) -> None:
        """Nothing there answers any more, and no connection is closed: as behind a cable that was pulled."""
        for pid in _list_with_children(_raylet(self._find(node_id))):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGSTOP)
                self._frozen.append(pid)

    def bury(self, node_id: str) -> None:
        """What is left of one that was frozen."""
        for pid in self._frozen:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self._frozen.clear()
        self._cluster.remove_node(self._find(node_id), allow_graceful=False)

    def close(self) -> None:
        for pid in self._frozen:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self._cluster.shutdown()

    def _find(self, node_id: str) -> Any:
        return next(node for node in self._cluster.worker_nodes if node.node_id == node_id)


def _try_often(start: Any) -> Any:
    for attempt in range(STARTS_MAX):
        try:
            return start()
        except Exception:
            if attempt == STARTS_MAX - 1:
                raise
    raise AssertionError


def read_seconds() -> dict[str, float]:
    """Processor time so far of all that this process has started, and of itself: of the run, of the outposts that its
    processes sit behind, and of the rest of Ray. Who has ended by now is not counted."""
    seconds = {"run": 0.0, "outposts": 0.0, "ray": 0.0}
    for pid in _list_with_children(os.getpid()):
        with contextlib.suppress(OSError):
            name = Path(f"/proc/{pid}/comm").read_text()
            command = Path(f"/proc/{pid}/cmdline").read_bytes()
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            kind = "run" if pid == os.getpid() or name.startswith("rg ") else "ray"
            kind = "outposts" if OUTPOST in command else kind
            seconds[kind] += (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    return seconds


def _raylet(node: Any) -> int:
    return int(node.all_processes["raylet"][0].process.pid)


def _list_with_children(pid: int) -> list[int]:
    """A process, its children, theirs, and so on."""
    parents: dict[int, int] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                parents[int(entry.name)] = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
    found, due = [], [pid]
    while due:
        current = due.pop()
        found.append(current)
        due += [child for child, parent in parents.items() if parent == current]
    return found
