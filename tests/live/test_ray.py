"""Goal: the same run on a cluster; and when a node is lost, whatever ran there, it goes on to the very same bits.

Method: a head and several nodes of Ray on this machine, shared by all tests here. Nodes are lost as by a cut of their
power, at a step; digests are compared with that of an undisturbed run on one machine. Skipped where Ray is not
installed.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("ray", reason="Ray is not installed: pip install 'regrow[ray]'")

import echo_role
import test_backend
from searching import search_all

from regrow.bench import jobs
from regrow.bench.nodes import Nodes
from regrow.config import TrainConfig
from regrow.errors import ChildFailed, UserError
from regrow.launch import legacy, local, outpost, ray_connect, ray_jobs
from regrow.launch.display import QuietDisplay
from regrow.launch.placement import Stripes, Wish
from regrow.launch.ray import RayProcesses
from regrow.launch.ray_process import RemoteProcess
from regrow.launch.rundir import Logs, print_warning
from regrow.launch.status import RunStatus

pytestmark = [
    pytest.mark.live,
    pytest.mark.filterwarnings("ignore"),  # Ray's own
]

DEADLINE_SECONDS = 240.0
STEPS = 40
SMALL = {"model": "kaggle", "rows_max": 1500, "batch": 64, "steps": STEPS, "test_rows": 1024, "mode": "sync"}
EC = {"protection": "ec", "k": 2, "r": 1, "servers": 3, "workers": 1, "check_parity": True}
LITTLE = {"cluster": "ray", "server_cpus": 0.6, "worker_cpus": 0.3, "server_memory": 1 << 20}


@pytest.fixture(scope="module")
def nodes() -> Iterator[Nodes]:
    import ray

    made = Nodes()
    yield made
    ray.shutdown()
    made.close()


@pytest.fixture(autouse=True)
def four_nodes(nodes: Nodes) -> None:
    """Besides the head: one for each server, and one to spare."""
    nodes.add(max(0, 4 - nodes.count()))


@functools.cache
def undisturbed(workers: int, steps: int = STEPS) -> str:
    with tempfile.TemporaryDirectory() as directory:
        options = {**SMALL, "steps": steps}
        summary = local.train(TrainConfig(out=f"{directory}/run", servers=2, workers=workers, **options))
    return str(summary["model_sha256"])


class Run(QuietDisplay):
    """A run on the cluster, and something that happens to it at a step. `said`: what the user was told."""

    def __init__(self, nodes: Nodes) -> None:
        self.said: list[str] = []
        self._nodes = nodes
        self._backends: list[Any] = []
        self._acts: list[tuple[Callable[[RunStatus], bool], Callable[[], object]]] = []

    def train(self, path: Path, **options: Any) -> dict[str, Any]:
        address = {"address": self._nodes.address}
        config = TrainConfig(out=str(path), **{**SMALL, **EC, **LITTLE, **address, **options})
        return local.train(config, display=self, on_start=lambda run: self._backends.append(run.backend))

    def at(self, step: int, act: Callable[[], object]) -> None:
        self.when(lambda status: status.step >= step, act)

    def when(self, is_due: Callable[[RunStatus], bool], act: Callable[[], object]) -> None:
        self._acts.append((is_due, act))

    @property
    def acts_left(self) -> int:
        return len(self._acts)

    def find(self, role: str, id: int = 0) -> RemoteProcess:
        running = [each for each in self._backends[-1].handles if (each.who.role, each.who.id) == (role, id)]
        return running[-1]

    def node_of(self, role: str, id: int = 0) -> str:
        node = self.find(role, id).node
        assert node is not None
        return node

    def update(self, status: RunStatus, now: float) -> None:
        while self._acts and self._acts[0][0](status):
            self._acts.pop(0)[1]()

    def say(self, text: str) -> None:
        self.said.append(text)


@pytest.fixture
def run(nodes: Nodes) -> Run:
    return Run(nodes)


def check(summary: dict[str, Any], *, workers: int = 1) -> None:
    assert summary["status"] == "ok"
    assert summary["model_sha256"] == undisturbed(workers)
    assert summary["parity_wrong"] == 0
    assert summary["steps"] == STEPS


def test_a_node_is_lost_and_the_model_is_the_same(tmp_path: Path, nodes: Nodes, run: Run) -> None:
    """One run without a loss would show less; what it would show is asked here too."""
    run.at(10, lambda: nodes.lose(run.node_of("server", 1)))
    summary = run.train(tmp_path / "run")
    check(summary)
    assert "server" in [failure["role"] for failure in summary["failures"]]
    assert any(text.startswith("server 1 ") and "on node" in text for text in run.said), run.said
    logs = {path.name for path in (tmp_path / "run" / "logs").iterdir()}
    assert {"coordinator-0.log", "worker-0.log"} <= logs
    token = next(iter(run._backends)).handles[0].assignment.token
    assert not [path for path in (tmp_path / "run").rglob("*") if path.is_file() and token in path.read_text()]


def test_rows_on_disk_of_a_lost_node_come_from_storage(tmp_path: Path, nodes: Nodes, run: Run) -> None:
    """Every node has a directory of its own, by its id. Files that an earlier run left there are no hindrance."""
    rows = tmp_path / "rows"
    options = {"protection": "delta", "ckpt": str(tmp_path / "ckpt"), "every": "5steps", "check_parity": False}
    disk = {"store": "tiered", "store_dir": f"{rows}/{{node}}", "cache_bytes": 4 << 20}
    used: list[set[str]] = []
    run.at(8, lambda: used.append({path.parent.name for path in rows.glob("*/server-*")}))
    run.at(15, lambda: nodes.lose(run.node_of("server", 1)))
    summary = run.train(tmp_path / "run", k=4, **options, **disk)
    assert summary["status"] == "ok"
    assert summary["model_sha256"] == undisturbed(1)
    # A worker may miss the server before Ray misses the node, on which it is then tried once more.
    assert len(summary["restores"]) in (1, 2)
    assert summary["tiers"]["misses"] > 0
    assert len(used[0]) == 3, "three servers on three nodes"
    left = {path.parent.name for path in rows.glob("*/server-*")}
    assert len(left) == 1 and left <= used[0], "nobody can clear the lost node's, and all others are gone"


def test_a_directory_of_a_node_is_looked_at_before_anything_starts(tmp_path: Path, nodes: Nodes, run: Run) -> None:
    node = nodes.list_ids()[1]
    (tmp_path / node).mkdir()
    (tmp_path / node / "thesis.txt").write_text("mine")
    disk = {"store": "tiered", "store_dir": f"{tmp_path}/{{node}}", "cache_bytes": 4 << 20}
    with pytest.raises(UserError, match=r"^node .*: .* has other files in it \(thesis.txt\)"):
        run.train(tmp_path / "run", protection="none", check_parity=False, k=4, **disk)
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_what_a_cluster_has_not_is_said_before_anything_starts(tmp_path: Path, run: Run) -> None:
    for options, words in (
        ({"servers": 30, "rows_max": 30}, "no room for 30 servers with 0.6 CPUs"),
        ({"node_label": ("zone=a",)}, "has the label zone=a"),
        ({"servers_per_node": 1, "servers": 9}, "at most 1 on a node"),
    ):
        with pytest.raises(UserError, match=words):
            run.train(tmp_path / "run", **options)
    assert not (tmp_path / "run" / "summary.json").exists()


@pytest.mark.slow
def test_a_process_dies_and_its_node_lives(tmp_path: Path, run: Run) -> None:
    run.at(10, lambda: os.kill(run.find("server", 2).pid, signal.SIGKILL))
    summary = run.train(tmp_path / "run")
    check(summary)
    assert [failure["reason"] for failure in summary["failures"]] == ["was killed by SIGKILL"]


@pytest.mark.slow
@pytest.mark.parametrize("role", ["worker", "coordinator"])
def test_the_node_of_somebody_else_is_lost(tmp_path: Path, nodes: Nodes, run: Run, role: str) -> None:
    nodes.add(1)
    # The head must not be lost: without it there is no Ray.
    labels = ("worker:kind=node", "coordinator:kind=node")
    run.at(10, lambda: nodes.lose(run.node_of(role)))
    summary = run.train(tmp_path / "run", node_label=labels)
    check(summary)
    assert role in [failure["role"] for failure in summary["failures"]]


@pytest.mark.slow
def test_a_node_that_falls_silent_is_lost(tmp_path: Path, nodes: Nodes, run: Run) -> None:
    """No connection is closed, and Ray says nothing for long."""
    frozen: list[str] = []

    def freeze() -> None:
        frozen.append(run.node_of("server", 1))
        nodes.freeze(frozen[0])

    run.at(10, freeze)
    summary = run.train(tmp_path / "run")
    nodes.bury(frozen[0])
    check(summary)


@pytest.mark.slow
def test_two_nodes_are_lost_together(tmp_path: Path, nodes: Nodes, run: Run) -> None:
    nodes.add(2)

    def lose() -> None:
        for node in {run.node_of("server", 1), run.node_of("server", 2)}:
            nodes.lose(node)

    run.at(10, lose)
    check(run.train(tmp_path / "run", r=2, servers=4))


MOMENTS: dict[str, Callable[[RunStatus], bool]] = {
    "the start": lambda status: status.phase == "training",
    "a recovery": lambda status: status.servers[1].state == "recovering",
    "a checkpoint": lambda status: status.step > 10 and status.saving is not None,
    "the end": lambda status: status.phase == "evaluating",
}


@pytest.mark.slow
@pytest.mark.parametrize("moment", MOMENTS)
def test_a_node_is_lost_in_the_middle_of(tmp_path: Path, nodes: Nodes, run: Run, moment: str) -> None:
    nodes.add(2)
    checkpoints = {"protection": "ec+delta", "ckpt": str(tmp_path / "ckpt"), "every": "5steps"}
    if moment == "a recovery":
        run.at(10, lambda: nodes.lose(run.node_of("server", 1)))
    run.when(MOMENTS[moment], lambda: nodes.lose(run.node_of("server", 1)))
    summary = run.train(tmp_path / "run", r=2, servers=4, **(checkpoints if moment == "a checkpoint" else {}))
    check(summary)
    assert run.acts_left == 0, "the moment did not come"
    assert summary["restores"] == [], "no checkpoint was needed"


@pytest.mark.slow
def test_a_node_that_is_lost_before_training_ends_the_run(tmp_path: Path, nodes: Nodes, run: Run) -> None:
    """As any loss then does. It is said who and where, and nothing is left."""
    lost: list[str] = []

    def lose() -> None:
        lost.append(run.node_of("server", 1))
        nodes.lose(lost[0])

    run.when(lambda status: status.phase == "loading" and status.servers[1].state != "starting", lose)
    with pytest.raises(ChildFailed, match=r"server 1 .* node .*; its log: "):
        run.train(tmp_path / "run")
    assert lost
    names = [name for node in nodes.list_ids() for name in nodes.list_names(node)]
    assert names == []


@pytest.mark.slow
def test_without_room_it_waits_until_a_node_joins(tmp_path: Path, nodes: Nodes, run: Run) -> None:
    for extra in nodes.list_ids()[4:]:
        nodes.lose(extra)
    run.at(5, lambda: nodes.lose(run.node_of("server", 1)))
    run.at(15, lambda: nodes.lose(run.node_of("server", 1)))
    seen: list[str] = []

    def say(text: str) -> None:
        seen.append(text)
        if "waits: no room" in text and not any("joined" in each for each in seen):
            seen.append("joined")
            nodes.add(1)

    run.say = say  # type: ignore[method-assign]
    summary = run.train(tmp_path / "run", server_cpus=1.0, worker_cpus=0.0, node_label=("server:kind=node",))
    check(summary)
    assert "joined" in seen


# -- jobs ----------------------------------------------------------------------------------------------------


def call(nodes: Nodes, *words: str, at_once: bool = True) -> Any:
    command = [sys.executable, "-P", "-m", "regrow", *words, "--address", nodes.address]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    if not at_once:
        return subprocess.Popen(command, **pipes)
    return subprocess.run(command, timeout=DEADLINE_SECONDS, check=False, **pipes)


@pytest.mark.slow
def test_a_job_goes_on_without_its_terminal(tmp_path: Path, nodes: Nodes) -> None:
    """The command is killed in the middle; the job is asked, followed again, stopped, and its directory fetched."""
    options = ["--job", "mine", "--out", str(tmp_path / "run"), "--steps", "100000", "--mode", "sync", "--batch", "64"]
    options += ["--cluster", "ray", "--rows-max", "500", "--servers", "2", "--workers", "1", "--test-rows", "512"]
    options += ["--server-cpus", "0.5", "--worker-cpus", "0.3", "--server-memory", "1M"]
    terminal = call(nodes, "train", *options, at_once=False)
    assert terminal.stderr is not None
    for line in terminal.stderr:
        if line.startswith("training: step"):
            break
    terminal.kill()
    terminal.communicate()
    assert "mine: running" in call(nodes, "status").stdout
    again = call(nodes, "train", *options)
    assert (again.returncode, "a job of the name mine is running" in again.stderr) == (2, True)
    follower = call(nodes, "attach", "mine", at_once=False)
    assert call(nodes, "stop", "mine", "--save").returncode == 2, "it makes no checkpoints"
    assert call(nodes, "stop", "mine").returncode == 0
    said, errors = follower.communicate(timeout=DEADLINE_SECONDS)
    assert (follower.returncode, "stopped by SIGTERM" in errors) == (143, True), (said, errors)
    assert "mine: failed" in call(nodes, "status", "mine").stdout
    fetched = call(nodes, "fetch", "mine", "--out", str(tmp_path / "copy"))
    assert fetched.returncode == 0, fetched.stderr
    assert (tmp_path / "copy" / "summary.json").read_bytes() == (tmp_path / "run" / "summary.json").read_bytes()
    lost = call(nodes, "attach", "yours")
    assert (lost.returncode, "there is no job yours" in lost.stderr, "mine" in lost.stderr) == (2, True, True)


@pytest.mark.slow
def test_a_job_whose_terminal_dies_ends_as_it_would_have(tmp_path: Path, nodes: Nodes) -> None:
    options = [
        "--job",
        "left",
        "--out",
        str(tmp_path / "run"),
        "--steps",
        str(STEPS),
        "--mode",
        "sync",
        "--batch",
        "64",
    ]
    options += ["--cluster", "ray", "--rows-max", "1500", "--servers", "3", "--workers", "1", "--test-rows", "1024"]
    options += ["--server-cpus", "0.6", "--worker-cpus", "0.3", "--server-memory", "1M", "--protect", "ec", "--k", "2"]
    terminal = call(nodes, "train", *options, "--check-parity", at_once=False)
    assert terminal.stderr is not None
    for line in terminal.stderr:
        if line.startswith("loading"):
            break
    terminal.kill()
    terminal.communicate()
    attached = call(nodes, "attach", "left")
    assert attached.returncode == 0, attached.stderr
    check(json.loads((tmp_path / "run" / "summary.json").read_text()))


# -- launchers that die --------------------------------------------------------------------------------------

LONG = 800
BEGUN = 20  # steps: by then every place knows that training has begun, and a launcher may die
LAUNCHERS = pytest.mark.timeout(900)  # a minute of a processor each, on a machine that others use


class Job(jobs.Job):
    """A job on the cluster, and its launcher."""

    launchers_before = 0

    def __init__(self, nodes: Nodes, path: Path, name: str, **options: Any) -> None:
        labels = tuple(f"{role}:kind=node" for role in ("launcher", "server", "worker"))  # the head must not be lost
        options = {**SMALL, **EC, **LITTLE, "address": nodes.address, "node_label": labels, "steps": LONG, **options}
        super().__init__(nodes, TrainConfig(out=str(path), **options), name=name)

    def read_token(self) -> str:
        """As the next launcher would."""
        post = self._ray.get_actor(self.list_posts()[0], namespace=ray_connect.NAMESPACE)
        return str(self._ray.get(post.read_token.remote(self.launchers_before), timeout=DEADLINE_SECONDS))

    def follow_until(self, is_there: Callable[[str], bool]) -> None:
        """Reads what it says, as `regrow attach` does."""
        deadline = time.monotonic() + DEADLINE_SECONDS
        seen = 0
        while time.monotonic() < deadline:
            page = self.read()
            if any(map(is_there, self.said[seen:])):
                return
            seen = len(self.said)
            assert page.state == ray_jobs.RUNNING, page.failure
        raise AssertionError(self.said)

    def kill_server(self, nodes: Nodes, id: int) -> None:
        for pid in nodes.list_processes():
            with contextlib.suppress(OSError):
                if Path(f"/proc/{pid}/comm").read_text().strip() == f"rg server {id}":
                    os.kill(pid, signal.SIGKILL)
                    return
        raise AssertionError(f"there is no server {id}")

    def check(self) -> dict[str, Any]:
        while (page := self.read()).state == ray_jobs.RUNNING:
            pass
        assert (page.state, page.failure) == (ray_jobs.ENDED, None), self.said
        summary = self.read_summary()
        assert summary["status"] == "ok"
        assert summary["model_sha256"] == undisturbed(1, LONG)
        assert (summary["parity_wrong"], summary["steps"], summary["launchers"]) == (0, LONG, 2)
        assert self.list_posts() == [], "none is left behind"
        assert self.list_rooms() == []
        return summary


def has_step(least: int) -> Callable[[str], bool]:
    return lambda line: (found := re.match(r"training: step (\d+)/", line)) is not None and int(found[1]) >= least


def find_session() -> Path:
    """Where Ray's processes on this machine write their logs."""
    import ray

    return Path(ray._private.worker.global_worker.node.get_session_dir_path())


def test_a_secret_is_found_wherever_it_is(tmp_path: Path, nodes: Nodes) -> None:
    """Else it would be no use to look for one: each of these is a way in which a token could get out."""
    ray = ray_connect.connect(nodes.address)

    class Careless:
        def __init__(self, secret: str) -> None:
            print(secret[:0])

        def say(self, secret: str) -> int:
            print(secret, flush=True)
            return os.getpid()

    secrets = [f"{number:02x}" * 32 for number in (0xA1, 0xB2, 0xC3, 0xD4, 0xE5)]
    made_with, called_with, put, left_in_environment, quiet = secrets
    options = {"runtime_env": {"env_vars": {"HINT": left_in_environment}}, "num_cpus": 0}
    actor = ray.remote(Careless).options(**options).remote(made_with)
    pid = ray.get(actor.say.remote(called_with), timeout=DEADLINE_SECONDS)
    kept = ray.put(put.encode() * 4096)
    for secret, where in (
        (made_with, "memory of"),
        (called_with, "file "),
        (put, "shared memory of"),
        (left_in_environment, f"environ of {pid}"),
    ):
        found = search_all(secret, nodes.list_processes(), [find_session()])
        assert any(place.startswith(where) for place in found), (where, found)
    assert search_all(quiet, nodes.list_processes(), [find_session()]) == []
    ray.kill(actor)
    del kept


@LAUNCHERS
def test_a_launcher_is_killed_and_another_goes_on(tmp_path: Path, nodes: Nodes) -> None:
    """Then a server, which only the second one can have replaced; its number is one that the first never gave."""
    job = Job(nodes, tmp_path / "run", "followed")
    job.follow_until(has_step(BEGUN))
    os.kill(job.launcher["Pid"], signal.SIGKILL)
    job.follow_until(lambda line: line.startswith("another launcher goes on"))
    assert call(nodes, "status", "followed").stdout.startswith("followed: running")
    job.launchers_before = 1
    assert search_all(job.read_token(), nodes.list_processes(), [find_session(), job.path]) == []
    job.kill_server(nodes, 1)
    summary = job.check()
    assert [(each["role"], each["id"]) for each in summary["failures"]] == [("server", 1)]
    assert summary["per_server"][1]["incarnation"] == legacy.number_block(1).start
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert len({line["step"] for line in lines}) > 2, "what was written before is still there"
    fetched = call(nodes, "fetch", "followed", "--out", str(tmp_path / "copy"))
    assert fetched.returncode == 0, fetched.stderr


@LAUNCHERS
@pytest.mark.slow
def test_the_node_of_a_launcher_is_lost(tmp_path: Path, nodes: Nodes) -> None:
    nodes.add(1)
    job = Job(nodes, tmp_path / "run", "elsewhere")
    job.follow_until(has_step(BEGUN))
    before = job.launcher["Address"]["NodeID"]
    nodes.lose(before)
    job.follow_until(lambda line: line.startswith("another launcher goes on"))
    assert job.launcher["Address"]["NodeID"] != before
    job.check()


@LAUNCHERS
@pytest.mark.slow
def test_a_job_that_is_followed_can_be_stopped(tmp_path: Path, nodes: Nodes) -> None:
    job = Job(nodes, tmp_path / "run", "stopped", steps=100_000)
    job.follow_until(has_step(BEGUN))
    os.kill(job.launcher["Pid"], signal.SIGKILL)
    job.follow_until(has_step(BEGUN))
    assert call(nodes, "stop", "stopped").returncode == 0
    ended = call(nodes, "attach", "stopped")
    assert (ended.returncode, "stopped by SIGTERM" in ended.stderr) == (143, True)
    assert (job.list_posts(), job.list_rooms()) == ([], [])


@LAUNCHERS
@pytest.mark.slow
def test_without_another_launcher_all_end_by_themselves(tmp_path: Path, nodes: Nodes) -> None:
    import ray

    job = Job(nodes, tmp_path / "run", "forgotten", steps=100_000)
    job.follow_until(has_step(BEGUN))
    ray.kill(job.actor, no_restart=True)
    assert job.list_posts()
    lost = call(nodes, "attach", "forgotten")
    assert lost.returncode == 2, lost.stderr
    deadline = time.monotonic() + outpost.LAUNCHER_SECONDS + DEADLINE_SECONDS
    while job.list_posts() and time.monotonic() < deadline:
        time.sleep(0.5)
    assert (job.list_posts(), job.list_rooms()) == ([], [])
    names = [Path(f"/proc/{pid}/comm").read_text() for pid in nodes.list_processes() if Path(f"/proc/{pid}").exists()]
    assert not [name for name in names if name.startswith("rg ")]


# -- the same as other backends ------------------------------------------------------------------------------

CONTRACT = [
    test_backend.test_words_go_both_ways_in_order_and_whole,
    test_backend.test_a_spare_becomes_somebody,
    test_backend.test_last_words_are_heard_before_the_end,
    test_backend.test_a_wait_is_bounded_and_can_be_ended,
    test_backend.test_whoever_does_not_stop_when_asked_is_ended,
    test_backend.test_in_a_hurry_nobody_is_waited_for,
    test_backend.test_all_end_with_their_backend,
]


@pytest.mark.slow
@pytest.mark.parametrize("says", CONTRACT, ids=lambda test: test.__name__.removeprefix("test_"))
def test_what_every_backend_does(tmp_path: Path, nodes: Nodes, says: Callable[[Any], None]) -> None:
    """The tests of the other backends, with this one."""
    backend = RayProcesses(
        ray=ray_connect.connect(nodes.address),
        logs=Logs(tmp_path, print_warning),
        wish=Wish(stripes=Stripes(servers=1)),
        command=(outpost.PYTHON, echo_role.__file__),
    )
    try:
        says(backend)
    finally:
        backend.close()
