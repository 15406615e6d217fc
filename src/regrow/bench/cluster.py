"""What does a cluster cost, and what does the loss of a node? A head and several nodes of Ray, all on this machine.

In parts, each of a few minutes at most:

    speed    the same training on one machine (over TCP) and under Ray, in turns: samples/s; and, as all nodes are on
             this machine, what the run itself took of a processor, its outposts, and all else of Ray
    start    from the call to the first step, on one machine and under Ray, in turns; then how soon a job of that
             cluster answers to `regrow status`
    loss     a node with a server is lost, as by a cut of its power; then a process alone: until it is known, until it
             is said where its successor is (placement), until that is there (start), until a step was made (first row)
    scale    many servers, two on a node, with small tables: they start, lose half of the nodes one after the other, and
             end; what the launcher takes for each process and second

On one machine all nodes share its processors, so `speed` says what Ray's processes cost and nothing of networks. It has
no spare worker, on neither side: to start one takes seconds of a processor, once in a run, however long that is. Times
of losses are taken by the same clock as the loss itself, from the moment before the first process is killed.
"""

from __future__ import annotations

import contextlib
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from regrow.bench import common
from regrow.bench.jobs import Job
from regrow.bench.nodes import Nodes, read_seconds
from regrow.config import TrainConfig
from regrow.errors import RegrowError, UserError
from regrow.launch import local
from regrow.launch.display import QuietDisplay
from regrow.launch.ray import RayProcesses
from regrow.launch.ray_connect import load_ray
from regrow.launch.status import RunStatus
from regrow.protection import nearest

SUMMARY = "A Ray cluster on this machine: samples/s, the start, a node that is lost, many nodes (--part)."

PARTS = ("speed", "start", "loss", "scale")
SPEED_TARGET = 0.95
START_SECONDS_TARGET = 10.0  # more than on one machine
NODE_KNOWN_SECONDS_TARGET, PROCESS_KNOWN_SECONDS_TARGET = 2.0, 0.1
AGAIN_SECONDS_TARGET = 1.0  # from then on
STATUS_SECONDS_TARGET = 1.0
STATUS_SECONDS_MAX = 120.0
STATUS_TIMES = 5
NODES = 5
SCALE_PER_NODE = 2
SCALE_STEPS = 150  # for each loss, which are over by then
# With the usual five Ray takes nodes for lost whose processes do not get a turn of the processors in time.
SCALE_HEALTH_CHECKS = 100
NODE_CPUS = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """How much is measured."""

    rounds: int
    steps: int
    rows_max: int
    losses: int
    scale_servers: int
    scale_losses: int


FULL = Size(rounds=4, steps=300, rows_max=200_000, losses=5, scale_servers=32, scale_losses=8)
QUICK = Size(rounds=1, steps=40, rows_max=5_000, losses=1, scale_servers=6, scale_losses=1)
COMMON: dict[str, Any] = {"model": "kaggle", "batch": 512, "test_rows": 1024, "digest": False, "transport": "tcp"}
EC: dict[str, Any] = {"protection": "ec", "k": 3, "r": 1, "servers": 4, "workers": 1}
ON_RAY: dict[str, Any] = {"cluster": "ray", "server_cpus": 0.5, "worker_cpus": 0.5, "server_memory": 1 << 20}


def run(*, quick: bool, json_path: str | None, part: str | None = None) -> int:
    if part is not None and part not in PARTS:
        raise UserError(f"bench cluster has no part {part!r}", hint=nearest(part, PARTS))
    load_ray()
    size = QUICK if quick else FULL
    report = common.Report.start("cluster")
    for name in PARTS if part is None else (part,):
        common.console.print(f"[bold]{name}[/]")
        began = time.monotonic()
        MEASURES[name](report, size)
        report.rows.append({"kind": "part", "part": name, "seconds": round(time.monotonic() - began, 1)})
        if json_path is not None:  # minutes of figures are not lost with the next part
            common.write_json(json_path, report.to_dict())
    return report.finish(json_path)


@contextlib.contextmanager
def make_nodes(count: int, *, cpus: float = NODE_CPUS, health_checks: int | None = None) -> Iterator[Nodes]:
    """Besides the head."""
    nodes = Nodes(health_checks=health_checks)
    try:
        nodes.add(count, cpus=cpus)
        yield nodes
    finally:
        load_ray().shutdown()
        nodes.close()


class Watcher(QuietDisplay):
    """When what was seen; and what is done at a step."""

    def __init__(self) -> None:
        self.began = time.monotonic()
        self.first_step_at: float | None = None
        self.steps: list[tuple[float, int]] = []  # when a step was first seen
        self.known_at: dict[str, float] = {}  # by role and number: when its loss was in the books
        self.replaced_at: dict[str, float] = {}
        self.acts: list[tuple[int, Callable[[], object]]] = []
        self.one_by_one = False  # what is done waits until what was done before has shown, and nothing is missing
        self._failures_due = 0
        self.backend: RayProcesses | None = None
        self.said: list[tuple[float, str]] = []

    def update(self, status: RunStatus, now: float) -> None:
        if status.step and (not self.steps or status.step > self.steps[-1][1]):
            self.first_step_at = self.first_step_at or now
            self.steps.append((now, status.step))
        for failure in status.failures.all:
            name = f"{failure.role} {failure.id}.{failure.incarnation}"
            self.known_at.setdefault(name, now)
            if failure.replaced_at is not None:
                self.replaced_at.setdefault(name, failure.replaced_at)
        failures = status.failures.all
        is_well = len(failures) >= self._failures_due and all(each.is_over or each.settled for each in failures)
        while self.acts and status.step >= self.acts[0][0] and (is_well or not self.one_by_one):
            self.acts.pop(0)[1]()
            is_well, self._failures_due = False, len(failures) + 1

    def say(self, text: str) -> None:
        self.said.append((time.monotonic(), text))

    def node_of(self, server: int) -> str:
        assert self.backend is not None
        handles = [each for each in self.backend.handles if (each.who.role, each.who.id) == ("server", server)]
        assert handles[-1].node is not None
        return handles[-1].node


def train(watcher: Watcher, nodes: Nodes | None, **options: Any) -> dict[str, Any]:
    """One run, under Ray if there are nodes."""
    where = {} if nodes is None else {**ON_RAY, "address": nodes.address}
    with tempfile.TemporaryDirectory(prefix="regrow-bench-") as directory:
        config = TrainConfig(out=f"{directory}/run", **{**COMMON, **EC, **where, **options})
        watcher.began = time.monotonic()
        return local.train(config, display=watcher, on_start=lambda run: setattr(watcher, "backend", run.backend))


# -- the parts ----------------------------------------------------------------------------------------------


def measure_speed(report: common.Report, size: Size) -> None:
    found: dict[str, list[dict[str, Any]]] = {"local": [], "ray": []}
    with make_nodes(NODES) as nodes:
        for turn in range(size.rounds):
            for where in ("local", "ray") if turn % 2 == 0 else ("ray", "local"):
                rate = _measure_rate(nodes if where == "ray" else None, size)
                row = {"kind": "speed", "where": where, "round": turn, **rate}
                report.rows.append(row)
                found[where].append(row)
                shares = ", ".join(f"{kind} {share:.2f}" for kind, share in row["processors"].items())
                common.console.print(
                    f"round {turn + 1} of {size.rounds}, {where}: {row['samples_per_second']:,.0f} samples/s; "
                    f"processors taken: {shares}"
                )
    for name, figure in (
        ("speed_ray", "samples_per_second"),
        ("speed_ray_equal_processors", "samples_per_second_and_processor_left"),
        ("speed_ray_per_processor_second", "samples_per_processor_second"),
    ):
        ratios = common.pair_ratios(*[[row[figure] for row in found[where]] for where in ("ray", "local")])
        report.ratios[name] = common.Ratio.of(ratios, target=SPEED_TARGET)


def _measure_rate(nodes: Nodes | None, size: Size) -> dict[str, Any]:
    """Processors that were taken are counted in the middle of training. What is left is what Ray's own processes, which
    a cluster has for each node and not for each training, leave of this machine."""
    watcher = Watcher()
    marks: list[tuple[float, int, dict[str, float]]] = []
    note = lambda: marks.append((*watcher.steps[-1], read_seconds()))  # noqa: E731
    watcher.acts = [(size.steps // 10, note), (size.steps * 9 // 10, note)]
    summary = train(watcher, nodes, steps=size.steps, rows_max=size.rows_max, spare_workers=0)
    (began, first, before), (ended, last, after) = marks
    processors = {kind: (after[kind] - before[kind]) / (ended - began) for kind in after}
    own_seconds = (processors["run"] + processors["outposts"]) * (ended - began)
    rate = summary["samples_per_s"]
    return {
        "samples_per_second": rate,
        "samples_per_second_and_processor_left": rate / (len(os.sched_getaffinity(0)) - processors["ray"]),
        "samples_per_processor_second": (last - first) * COMMON["batch"] / own_seconds,
        "processors": {kind: round(share, 3) for kind, share in processors.items()},
        "run_seconds": summary["run_seconds"],
    }


def measure_start(report: common.Report, size: Size) -> None:
    more = []
    with make_nodes(NODES) as nodes:
        for turn in range(size.rounds):
            seconds = {}
            for where in ("local", "ray"):
                watcher = Watcher()
                train(watcher, nodes if where == "ray" else None, steps=3, rows_max=5_000)
                assert watcher.first_step_at is not None
                seconds[where] = watcher.first_step_at - watcher.began
            more.append(seconds["ray"] - seconds["local"])
            report.rows.append({"kind": "start", "round": turn, **seconds})
            common.console.print(f"first step after {seconds['local']:.1f} s; under Ray {seconds['ray']:.1f} s")
        commands, answers = measure_status(nodes)
    report.rows.append({"kind": "status", "command_seconds": commands, "answer_seconds": answers})
    common.console.print(
        f"`regrow status`: {statistics.median(commands):.2f} s, "
        f"of which the job took {statistics.median(answers):.3f} s"
    )
    report.ratios["start_seconds_more"] = common.Ratio.of(more, target=START_SECONDS_TARGET, better="lower")
    report.ratios["status_seconds"] = common.Ratio.of(answers, target=STATUS_SECONDS_TARGET, better="lower")


def measure_status(nodes: Nodes) -> tuple[list[float], list[float]]:
    """Seconds of the whole command, and of the answer of a job that trains, to somebody who is connected already."""
    with tempfile.TemporaryDirectory(prefix="regrow-bench-") as directory:
        options = {**COMMON, **EC, **ON_RAY, "address": nodes.address, "rows_max": 5_000, "steps": 1_000_000}
        job = Job(nodes, TrainConfig(out=f"{directory}/run", **options), name="asked")
        try:
            deadline = time.monotonic() + STATUS_SECONDS_MAX
            while not any(line["phase"] == "training" for line in job.read_metrics()):
                if time.monotonic() > deadline or job.read().failure is not None:
                    raise RegrowError("the job that was to be asked did not begin", hint="\n".join(job.said[-10:]))
            commands, answers = [], []
            for _ in range(STATUS_TIMES):
                began = time.monotonic()
                words = [sys.executable, "-P", "-m", "regrow", "status", "asked", "--address", nodes.address]
                subprocess.run(words, check=True, capture_output=True, timeout=STATUS_SECONDS_MAX)
                commands.append(round(time.monotonic() - began, 3))
                began = time.monotonic()
                job.glance()
                answers.append(round(time.monotonic() - began, 4))
            return commands, answers
        finally:
            job.stop()


@dataclass(slots=True)
class Loss:
    """What became of one: seconds from the kill."""

    killed_at: float = 0.0
    known: list[float] = field(default_factory=list)
    again: list[float] = field(default_factory=list)


def measure_loss(report: common.Report, size: Size) -> None:
    found = {"node": Loss(), "process": Loss()}
    with make_nodes(NODES) as nodes:
        for turn in range(size.losses):
            for what, loss in found.items():
                nodes.add(max(0, NODES - nodes.count()), cpus=NODE_CPUS)
                row = {"kind": "loss", "what": what, "round": turn, **_lose_one(nodes, what, size, loss)}
                report.rows.append(row)
                common.console.print(
                    f"{what} lost: known after {loss.known[-1]:.2f} s, a step again {loss.again[-1]:.2f} s after that "
                    f"(placement {row['placement_seconds']} s, start {row['start_seconds']} s, "
                    f"first row {row['first_row_seconds']} s)"
                )
    targets = {"node": NODE_KNOWN_SECONDS_TARGET, "process": PROCESS_KNOWN_SECONDS_TARGET}
    for what, loss in found.items():
        report.ratios[f"{what}_known_seconds"] = common.Ratio.of(loss.known, target=targets[what], better="lower")
        report.ratios[f"{what}_again_seconds"] = common.Ratio.of(
            loss.again, target=AGAIN_SECONDS_TARGET, better="lower"
        )


def _lose_one(nodes: Nodes, what: str, size: Size, loss: Loss) -> dict[str, Any]:
    watcher = Watcher()

    def kill() -> None:
        loss.killed_at = time.monotonic()
        if what == "node":
            nodes.lose(watcher.node_of(1))
        else:
            assert watcher.backend is not None
            server = next(each for each in watcher.backend.handles if (each.who.role, each.who.id) == ("server", 1))
            server.kill()

    watcher.acts.append((size.steps // 4, kill))
    summary = train(watcher, nodes, steps=size.steps, rows_max=size.rows_max)
    known_at = watcher.known_at["server 1.0"]
    again_at = next(at for at, _ in watcher.steps if at > known_at)
    loss.known.append(known_at - loss.killed_at)
    loss.again.append(again_at - known_at)
    placed = [at for at, text in watcher.said if at >= loss.killed_at and text.startswith("server 1 ")]
    placed_at = placed[0] if placed else known_at  # a spare that nobody had to choose
    there_at = watcher.replaced_at.get("server 1.0", again_at)
    failure = next(each for each in summary["failures"] if each["role"] == "server")
    names = ("replaced_s", "resumed_s", "recovered_s", "stall_s", "ratio", "rows")
    return {
        "known_seconds": round(loss.known[-1], 3),
        "again_seconds": round(loss.again[-1], 3),
        "placement_seconds": round(placed_at - known_at, 3),
        "start_seconds": round(there_at - placed_at, 3),
        "first_row_seconds": round(again_at - there_at, 3),
        **{name: failure.get(name) for name in names},
        "said": [text for _, text in watcher.said],
    }


def measure_scale(report: common.Report, size: Size) -> None:
    servers = size.scale_servers
    # One node more than are needed, so that the first to lose its own has a spare one; then more sit together. A node
    # for each server would be 33 of Ray's, whose own processes two cores do not bear.
    with make_nodes(servers // SCALE_PER_NODE + 1, cpus=1.0, health_checks=SCALE_HEALTH_CHECKS) as nodes:
        watcher = Watcher()
        watcher.one_by_one = True
        steps = 60 + SCALE_STEPS * size.scale_losses

        def lose(victim: int) -> Callable[[], object]:
            return lambda: nodes.lose(watcher.node_of(victim))

        watcher.acts = [(20 * (index + 1), lose(4 * index + 1)) for index in range(size.scale_losses)]
        before = resource.getrusage(resource.RUSAGE_SELF)
        # The head must not be lost: without it there is no Ray.
        needs = {"server_cpus": 0.2, "worker_cpus": 0.2, "node_label": ("server:kind=node",)}
        summary = train(watcher, nodes, servers=servers, steps=steps, rows_max=200, batch=64, **needs)
        after = resource.getrusage(resource.RUSAGE_SELF)
    own = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    row = {
        "kind": "scale",
        "servers": servers,
        "nodes_lost": size.scale_losses - len(watcher.acts),
        "run_seconds": summary["run_seconds"],
        "launcher_seconds": round(own, 2),
        "launcher_per_process_and_second": own / summary["run_seconds"] / (servers + 2),
        "failures": len(summary["failures"]),
        "peak_rss_bytes": summary["peak_rss_bytes"]["total"],
    }
    report.rows.append(row)
    common.console.print(
        f"{servers} servers, {row['nodes_lost']} nodes lost: {summary['run_seconds']:.0f} s; the launcher took "
        f"{1e3 * row['launcher_per_process_and_second']:.2f} ms of each second for each process; all took "
        f"{row['peak_rss_bytes'] / 2**30:.1f} GiB at most"
    )
    report.ratios["scale_nodes_lost"] = common.Ratio.of([float(row["nodes_lost"])], target=float(size.scale_losses))


MEASURES = {"speed": measure_speed, "start": measure_start, "loss": measure_loss, "scale": measure_scale}
