"""Does a job on a cluster last? Nodes of a Ray cluster on this machine are lost one after the other, as by a cut of
their power, while the job trains: `regrow bench soak --cluster ray --losses 100`.

    server            the node of a server, with whatever else is there
    again             ... and the node of its successor, while that brings its rows back
    two servers       the nodes of two servers together
    silent            the node of a server falls silent, and no connection is closed
    silent launcher   ... the node of the launcher
    coordinator, worker, launcher        the nodes of these
    launcher process  its process alone
    no room           all nodes that have no server, then one that has: training waits, until nodes join

A loss counts when the job is well again: every place has a process, all rows are there, and training has moved. Then
the next one comes. A job takes so many of them as its steps allow, and there are as many jobs, one after the other, as
the losses need; each trains in synchronous mode and must end with the model of an undisturbed run on one machine, to
the bit, with every parity that of its stripe, and leave nothing behind in the cluster.

Like `soak.py` this judges: it returns 1 when something is wrong, and then leaves the run directories behind. Everything
is bounded: a loss by `LOSS_SECONDS_MAX`, the whole by `--losses` and `--minutes`.
"""

from __future__ import annotations

import os
import random
import signal
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from regrow.bench import common
from regrow.bench.jobs import Job
from regrow.bench.nodes import Nodes
from regrow.bench.soak_place import make_place
from regrow.config import TrainConfig
from regrow.errors import EXIT_FAILED, EXIT_OK, RegrowError, UserError
from regrow.launch import local, ray_jobs
from regrow.launch.display import QuietDisplay
from regrow.launch.ray_connect import load_ray

SERVERS, R, NODES = 4, 2, 6  # a node for each server, and one for each spare
LOSSES, LOSSES_QUICK, LOSSES_MAX = 100, 5, 10_000
LOSSES_PER_JOB = 10
# Until the job is well again. Ray takes a minute to miss a node that falls silent with the launcher on it, and
# starting a node or a process takes its time where two cores do everything.
LOSS_SECONDS_MAX = 240.0
END_SECONDS_MAX = 600.0  # for what is left of the steps, and to judge the model
LEFT_SECONDS_MAX = 30.0  # for Ray to forget what a job has ended
POLL_SECONDS = 0.2
CALM_LINES = 3  # of metrics.jsonl that say that nothing is missing
STEPS_MOVED = 10  # after a loss
STEPS_PILOT, LOSS_STEPS_SECONDS = 200, 4.0  # steps for each loss: as many as an undisturbed run makes in that time
LAST_SHARE = 0.95  # of the steps; after that a job may be through before a loss is over
KINDS = (
    *("server", "again", "two servers", "silent", "coordinator", "worker"),
    *("launcher", "silent launcher", "launcher process", "no room"),
)
ALL_PLACES = {*(f"server {id}" for id in range(SERVERS)), "worker 0", "coordinator"}
TRAIN: dict[str, Any] = {
    **{"model": "kaggle", "rows_max": 1500, "batch": 64, "test_rows": 1024, "mode": "sync", "transport": "tcp"},
    **{"servers": SERVERS, "workers": 1},
}
PROTECT: dict[str, Any] = {"protection": "ec", "k": 2, "r": R, "check_parity": True}
ON_RAY: dict[str, Any] = {
    **{"cluster": "ray", "server_cpus": 0.6, "worker_cpus": 0.3, "server_memory": 1 << 20},
    # The head must not be lost: without it there is no Ray.
    "node_label": tuple(f"{role}:kind=node" for role in ("launcher", "coordinator", "server", "worker")),
}


def run(*, quick: bool, json_path: str | None, losses: int | None = None, minutes: float | None = None) -> int:
    losses = losses or (LOSSES_QUICK if quick else LOSSES)
    if not 1 <= losses <= LOSSES_MAX:
        raise UserError(f"--losses {losses}: must be between 1 and {LOSSES_MAX}")
    load_ray()
    report = common.Report.start("soak")
    deadline = time.monotonic() + (60 * minutes if minutes is not None else losses * LOSS_SECONDS_MAX)
    with make_place() as place:
        steps_per_loss = measure_pilot(place.path)
        left = plan_losses(losses)
        while left and time.monotonic() < deadline:
            number = sum(row["kind"] == "job" for row in report.rows)
            steps = steps_per_loss * (1 + min(LOSSES_PER_JOB, len(left)))
            made = soak(report, place.path / f"job-{number}", left[:LOSSES_PER_JOB], steps=steps, deadline=deadline)
            del left[:made]
            judge(report, wanted=losses)
            if json_path is not None:
                common.write_json(json_path, report.to_dict())
        print_rows(report)
        report.finish(json_path)
        place.keep = not all(ratio.met for ratio in report.ratios.values())
        return EXIT_FAILED if place.keep else EXIT_OK


def plan_losses(count: int) -> list[str]:
    """Every kind as often as any other, in an order that is the same each time."""
    chance = random.Random(0)
    found: list[str] = []
    while len(found) < count:
        found += chance.sample(KINDS, len(KINDS))
    return found[:count]


def measure_pilot(directory: Path) -> int:
    """Steps for each loss."""
    summary = train_undisturbed(directory / "pilot", STEPS_PILOT)
    return max(STEPS_PILOT, int(LOSS_STEPS_SECONDS * STEPS_PILOT / summary["seconds"]))


def train_undisturbed(path: Path, steps: int) -> dict[str, Any]:
    config = TrainConfig(out=str(path), steps=steps, **TRAIN)
    return local.train(config, overwrite=True, display=QuietDisplay())


def soak(report: common.Report, path: Path, kinds: Sequence[str], *, steps: int, deadline: float) -> int:
    """One job, and how many of these losses it has borne."""
    undisturbed = train_undisturbed(path.with_name("undisturbed"), steps)
    nodes = Nodes()
    began = time.monotonic()
    try:
        nodes.add(NODES)
        config = TrainConfig(out=str(path), steps=steps, address=nodes.address, **TRAIN, **PROTECT, **ON_RAY)
        trial = Trial(Job(nodes, config, name=path.name), steps)
        try:
            for kind in kinds:
                if time.monotonic() >= deadline or not trial.lose(kind):
                    break
                report.rows.append(trial.rows[-1])
            summary = trial.finish()
        finally:
            trial.job.stop()
    finally:
        load_ray().shutdown()
        nodes.close()
    report.rows.append(
        {
            "kind": "job",
            "losses": len(trial.rows),
            "launchers": summary["launchers"],
            "failures": len(summary["failures"]),
            "steps": summary["steps"],
            "seconds": round(time.monotonic() - began, 1),
            "differs": summary["model_sha256"] != undisturbed["model_sha256"] or summary["steps"] != steps,
            "parity_stripes": summary["parity_stripes"],
            "parity_wrong": summary["parity_wrong"],
            "left_behind": trial.left_behind,
        }
    )
    return len(trial.rows)


# -- one job -------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Trial:
    """A job that loses nodes."""

    job: Job
    steps: int
    rows: list[dict[str, Any]] = field(default_factory=list)  # of each loss
    left_behind: int = 0

    def lose(self, kind: str) -> bool:
        """One loss, from a job that is well to a job that is well. False: the job is nearly through."""
        self._await(lambda: self._is_well(0), "it began to train")
        if self._read_step() > LAST_SHARE * self.steps:
            return False
        pid, step = self.job.launcher.get("Pid"), self._read_step()
        began = time.monotonic()
        count = MAKES[kind](self)
        self._refill()
        is_other = lambda: "launcher" not in kind or self.job.launcher.get("Pid") != pid  # noqa: E731
        self._await(lambda: is_other() and self._is_well(step + STEPS_MOVED), f"the loss of {kind}")
        seconds = time.monotonic() - began
        self.rows.append({"kind": "loss", "what": kind, "nodes": count, "step": step, "seconds": round(seconds, 1)})
        common.console.print(f"{len(self.rows)}: {kind}, at step {step:,}: well again after {seconds:.1f} s")
        return True

    def finish(self) -> dict[str, Any]:
        self._await(lambda: self.job.read().state != ray_jobs.RUNNING, "the last loss", END_SECONDS_MAX)
        deadline = time.monotonic() + LEFT_SECONDS_MAX
        while (left := self.job.list_posts() + self.job.list_rooms()) and time.monotonic() < deadline:
            time.sleep(POLL_SECONDS)
        self.left_behind = len(left)
        return self.job.read_summary()

    def lose_nodes(self, *places: str) -> int:
        """The nodes of these, together."""
        nodes = {self._node_of(place) for place in places}
        for node in nodes:
            self.job.nodes.lose(node)
        return len(nodes)

    def lose_again(self) -> int:
        first = self._node_of("server 1")
        self.job.nodes.lose(first)
        self._await(lambda: "server 1" in self.job.list_seats(), "the loss of server 1")
        self.job.nodes.lose(self._node_of("server 1"))
        return 2

    def lose_silently(self) -> int:
        node = self._node_of("server 2")
        self.job.nodes.freeze(node)
        try:
            # A successor, or a process of another node that was a spare until now.
            self._await(lambda: self._has_elsewhere("server 2", node), "server 2 fell silent")
        finally:
            self.job.nodes.bury(node)
        return 1

    def lose_room(self) -> int:
        """Whoever else was on these nodes finds room where servers are."""
        seats = self.job.list_seats()
        servers = {node for name, node in seats.items() if name.startswith("server ")}
        others = [node for node in self.job.nodes.list_ids() if node not in servers]
        for node in others:
            self.job.nodes.lose(node)
        self._await(lambda: self._has_launcher() and self._is_well(self._read_step()), "the loss of all spares")
        said = len(self.job.said)
        self.job.nodes.lose(self._node_of("server 0"))
        self._await(lambda: self._is_said("waits: no room", said), "server 0 had no room")
        return 1 + len(others)

    def lose_launcher(self) -> int:
        self.job.nodes.lose(self.job.launcher["Address"]["NodeID"])
        return 1

    def silence_launcher(self) -> int:
        node = self.job.launcher["Address"]["NodeID"]
        self.job.nodes.freeze(node)
        try:
            self._await(
                lambda: self.job.launcher.get("Address", {}).get("NodeID", node) != node, "its launcher fell silent"
            )
        finally:
            self.job.nodes.bury(node)
        return 1

    def kill_launcher(self) -> int:
        os.kill(self.job.launcher["Pid"], signal.SIGKILL)
        return 0

    # -- how it is ---------------------------------------------------------------------------------------------

    def _await(self, done: Callable[[], bool], since: str, seconds: float = LOSS_SECONDS_MAX) -> None:
        deadline = time.monotonic() + seconds
        while not done():
            page = self.job.read()
            if page.failure is not None:
                raise RegrowError(f"the job failed after {since}: {page.failure.message}\n{self._quote()}")
            if time.monotonic() > deadline:
                raise RegrowError(f"{seconds:.0f} s after {since} the job is not well\n{self._quote()}")
            time.sleep(POLL_SECONDS)

    def _quote(self) -> str:
        return "\n".join(self.job.said[-30:])

    def _is_well(self, step: int) -> bool:
        """Or it has ended."""
        if self.job.read().state != ray_jobs.RUNNING:
            return True
        lines = self.job.read_metrics()[-CALM_LINES:]
        is_calm = len(lines) == CALM_LINES and all(map(is_whole, lines)) and lines[0]["step"] >= step
        is_late = bool(lines) and lines[-1]["phase"] not in ("starting", "loading", "training")
        return (is_late or is_calm) and self._has_launcher() and (is_late or self.job.list_seats().keys() >= ALL_PLACES)

    def _has_launcher(self) -> bool:
        launcher = self.job.launcher
        return bool(launcher) and launcher["Address"]["NodeID"] in self.job.nodes.list_ids()

    def _has_elsewhere(self, name: str, node: str) -> bool:
        others = [each for each in self.job.nodes.list_ids() if each != node]
        return any(name in self.job.nodes.list_names(each) for each in others)

    def _is_said(self, words: str, since: int) -> bool:
        """`since` so many lines. A launcher that follows another begins anew, but all are kept here."""
        self.job.read()
        return any(words in line for line in self.job.said[since:])

    def _read_step(self) -> int:
        return max((line["step"] for line in self.job.read_metrics()), default=0)

    def _node_of(self, name: str) -> str:
        return self.job.list_seats()[name]

    def _refill(self) -> None:
        self.job.nodes.add(max(0, NODES - self.job.nodes.count()))


MAKES: dict[str, Callable[[Trial], int]] = {
    "server": lambda trial: trial.lose_nodes("server 1"),
    "again": Trial.lose_again,
    "two servers": lambda trial: trial.lose_nodes("server 0", "server 3"),
    "silent": Trial.lose_silently,
    "coordinator": lambda trial: trial.lose_nodes("coordinator"),
    "worker": lambda trial: trial.lose_nodes("worker 0"),
    "launcher": Trial.lose_launcher,
    "silent launcher": Trial.silence_launcher,
    "launcher process": Trial.kill_launcher,
    "no room": Trial.lose_room,
}


def is_whole(line: dict[str, Any]) -> bool:
    """A line of metrics.jsonl: all servers are there, with all rows."""
    return (
        line["phase"] == "training"
        and line["servers_alive"] == SERVERS
        and not line["recovering"]
        and not line["missing_rows"]
    )


# -- the verdict ---------------------------------------------------------------------------------------------


def judge(report: common.Report, *, wanted: int) -> None:
    jobs = [row for row in report.rows if row["kind"] == "job"]
    found = {
        "models_that_differ": sum(row["differs"] for row in jobs),
        "wrong_stripes": sum(row["parity_wrong"] for row in jobs),
        "left_behind": sum(row["left_behind"] for row in jobs),
    }
    for name, value in found.items():
        report.ratios[name] = common.Ratio.of([float(value)], target=0.0, better="lower")
    stripes = min(row["parity_stripes"] for row in jobs)
    report.ratios["stripes_checked"] = common.Ratio.of([float(stripes)], target=1.0)
    losses = sum(row["losses"] for row in jobs)
    report.ratios["losses"] = common.Ratio.of([float(losses)], target=float(wanted))


def print_rows(report: common.Report) -> None:
    losses = [row for row in report.rows if row["kind"] == "loss"]
    table = []
    for kind in KINDS:
        mine = [row for row in losses if row["what"] == kind]
        if mine:
            seconds = [row["seconds"] for row in mine]
            nodes = sum(row["nodes"] for row in mine)
            table.append((kind, str(len(mine)), str(nodes), f"{statistics.median(seconds):.1f}, {max(seconds):.1f}"))
    heads = ("what was lost", "times", "nodes", "seconds until well again: median, most")
    common.print_table("losses, one after the other", heads, table)
