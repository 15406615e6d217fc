"""Goal: whatever process is killed, training goes on, and in synchronous mode to the very same bits.

Method: whole runs with real processes and SIGKILL or SIGSTOP at a step. Digests are compared with those of undisturbed
runs without any protection; every parity is compared with its rows at the end. Asynchronous runs cannot be
compared bit for bit, so rows count: with plain SGD and gradients that do not depend on the rows, the final values
say how often each push was applied.
"""

from __future__ import annotations

import functools
import itertools
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers import wait_until

from regrow.config import TrainConfig
from regrow.core.job import JobSpec, OptimizerSpec, TableSpec
from regrow.core.protection import Coded, FlushSpec
from regrow.errors import DataLoss
from regrow.launch import local, supervisor
from regrow.launch.cluster import LocalCluster
from regrow.nn.routing import make_router

pytestmark = pytest.mark.live

STEPS = 14
OPTIMIZERS = ["rowwise_adagrad", "adagrad", "sgd", "momentum", "adam", "partial_rowwise_adam"]
SMALL = {"model": "kaggle", "rows_max": 1500, "batch": 128, "steps": STEPS, "test_rows": 1024, "mode": "sync"}
EC = {"protection": "ec", "check_parity": True}


def train(path: Path, **options: Any) -> dict[str, Any]:
    return local.train(TrainConfig(out=str(path), **{**SMALL, **options}))


@functools.cache
def undisturbed(optimizer: str) -> str:
    """The digest that every run of this optimizer must end with, from a run that knows nothing of parities."""
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "run"
        digest = train(path, optimizer=optimizer, servers=2)["model_sha256"]
    assert isinstance(digest, str)
    return digest


def check(summary: dict[str, Any], *, optimizer: str = "rowwise_adagrad", roles: list[str]) -> None:
    assert summary["model_sha256"] == undisturbed(optimizer)
    assert summary["parity_stripes"] > 0
    assert summary["parity_wrong"] == 0
    assert sorted(failure["role"] for failure in summary["failures"]) == sorted(roles)
    assert summary["steps"] == STEPS
    assert summary["samples"] == 2 * STEPS * 128


CODES = [(2, 1, 3), (4, 1, 5), (2, 2, 5), (4, 2, 6)]


@pytest.mark.parametrize(("k", "r", "servers"), CODES)
def test_a_server_dies_and_the_model_is_the_same(tmp_path: Path, k: int, r: int, servers: int) -> None:
    summary = train(tmp_path / "run", k=k, r=r, servers=servers, kill=("server:1@step:5",), **EC)
    check(summary, roles=["server"])
    (failure,) = summary["failures"]
    assert failure["rows"] > 0
    assert failure["recovered_s"] > 0
    assert summary["redundancy_bytes"] > 0
    assert summary["flush_bytes"] > 0


@pytest.mark.parametrize(
    "optimizer", ["adam", *(pytest.param(name, marks=pytest.mark.slow) for name in OPTIMIZERS[1:] if name != "adam")]
)
def test_every_optimizer_comes_back_bit_for_bit(tmp_path: Path, optimizer: str) -> None:
    kill = ("server:0@step:6",)
    summary = train(tmp_path / "run", optimizer=optimizer, k=2, servers=3, kill=kill, **EC)
    check(summary, optimizer=optimizer, roles=["server"])


def test_a_spare_takes_the_place_of_a_worker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is the process that has been waiting, and the model is the same."""
    monkeypatch.setattr(supervisor, "FIRST_SPARE_WORKER_SECONDS", 0.0)
    summary = train(tmp_path / "run", k=2, servers=3, kill=("worker:0@step:5",), **EC)
    check(summary, roles=["worker"])
    logs = sorted(path.stem for path in (tmp_path / "run" / "logs").iterdir())
    assert "understudy-0" in logs  # it keeps the log that it has
    assert "worker-0.1" not in logs


@pytest.mark.parametrize("victim", ["worker:0", "worker:1", "coordinator"])
def test_any_role_dies(tmp_path: Path, victim: str) -> None:
    summary = train(tmp_path / "run", k=2, servers=3, kill=(f"{victim}@step:5",), **EC)
    check(summary, roles=[victim.partition(":")[0]])


def test_one_after_the_other_dies(tmp_path: Path) -> None:
    kill = ("server:1@step:3", "worker:1@step:6", "server:2@step:9", "coordinator@step:11")
    summary = train(tmp_path / "run", k=2, servers=3, kill=kill, **EC)
    check(summary, roles=["server", "worker", "server", "coordinator"])


def test_two_servers_die_together(tmp_path: Path) -> None:
    kill = ("server:1@step:5", "server:2@step:5")
    summary = train(tmp_path / "run", k=2, r=2, servers=5, kill=kill, **EC)
    check(summary, roles=["server", "server"])


def test_chance_kills_two_servers_at_one_instant(tmp_path: Path) -> None:
    """Again and again, but never more than two are down. A high shape: a kill comes early, whatever the machine."""
    chance = {"mtbf": 0.4, "mtbf_shape": 10.0, "mtbf_kill": 2}
    summary = train(tmp_path / "run", k=2, r=2, servers=5, **chance, **EC)
    failures = summary["failures"]
    check(summary, roles=["server"] * len(failures))
    assert len(failures) >= 2
    (kills,) = summary["sabotage_random"]
    assert (kills["role"], kills["kind"], kills["count"] % 2) == ("server", "kill", 0)


def test_a_coordinator_and_a_server_die_together(tmp_path: Path) -> None:
    kill = ("coordinator@step:5", "server:2@step:5")
    summary = train(tmp_path / "run", k=2, servers=3, kill=kill, **EC)
    check(summary, roles=["coordinator", "server"])


def test_a_stopped_server_comes_back_fenced(tmp_path: Path) -> None:
    """It is taken for dead after some silence, and must not write when it wakes up."""
    summary = train(tmp_path / "run", k=2, servers=3, pause=("server:1@step:5:4s",), steps=STEPS, **EC)
    check(summary, roles=["server"])


def test_over_tcp(tmp_path: Path) -> None:
    kill = ("server:1@step:4", "coordinator@step:8")
    summary = train(tmp_path / "run", k=2, servers=3, transport="tcp", kill=kill, **EC)
    check(summary, roles=["server", "coordinator"])


def test_in_two_rings(tmp_path: Path) -> None:
    """Servers of different rings do not need each other: both may be lost."""
    kill = ("server:1@step:5", "server:4@step:5")
    summary = train(tmp_path / "run", k=2, servers=6, rings=2, kill=kill, **EC)
    check(summary, roles=["server", "server"])


def test_beyond_tolerance_rows_are_named_as_lost(tmp_path: Path) -> None:
    kill = ("server:1@step:5", "server:2@step:5")
    with pytest.raises(DataLoss) as caught:
        train(tmp_path / "run", k=2, r=1, servers=3, kill=kill, **EC)
    assert "rows are lost" in caught.value.message
    assert "t_cat_" in caught.value.message
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["status"] == "failed"
    assert "rows are lost" in summary["error"]


@pytest.mark.parametrize("commit", ["exactly-once", "2pc"])
def test_asynchronous_training_goes_on(tmp_path: Path, commit: str) -> None:
    kill = ("server:1@step:8", "worker:0@step:16")
    options = {"mode": "async", "steps": 30, "commit": commit, "kill": kill, **EC}
    summary = train(tmp_path / "run", k=2, servers=3, **options)
    assert (summary["steps"], summary["samples"]) == (30, 2 * 30 * 128)
    assert summary["parity_wrong"] == 0
    assert sorted(failure["role"] for failure in summary["failures"]) == ["server", "worker"]


def test_losses_are_tolerated_when_asked_for(tmp_path: Path) -> None:
    options = {"mode": "async", "steps": 30, "commit": "none", "kill": ("server:1@step:8",), **EC}
    summary = train(tmp_path / "run", k=2, servers=3, **options)
    assert (summary["steps"], summary["parity_wrong"]) == (30, 0)


def test_every_push_counts_once(tmp_path: Path) -> None:
    """With w -= g, gradients of whole numbers and rows that start at zero, a row says how often it was pushed."""
    rows, dim, pushes = 600, 4, 240
    optimizer = OptimizerSpec(kind="sgd", learning_rate=1.0)
    spec = TableSpec(name="t", rows=rows, dim=dim, init_bound=0.0, optimizer=optimizer, k=2, r=1)
    protection = Coded(k=2, r=1, flush=FlushSpec(pushes=5))
    job = JobSpec(tables=(spec,), servers=4, workers=2, protection=protection)
    router = make_router(job, feature_tables=[0], static_tables=[])
    counts = np.zeros((2, rows), np.int64)
    with LocalCluster(servers=4) as cluster:
        clients = [cluster.client(job, worker=w) for w in range(2)]

        def work(index: int) -> None:
            rng = np.random.default_rng(index)
            for seq in range(1, pushes + 1):
                ids = rng.choice(rows, 40, replace=False)
                ticket = clients[index].pull(router.plan(ids, None, ids.size), step=seq)
                ticket.wait(60)
                # Duplicates and losses of one push cannot cancel those of another.
                clients[index].push(ticket, np.full(40 * dim, seq, np.float32))
                counts[index, ids] += seq
            clients[index].drain(60)

        threads = [threading.Thread(target=work, args=(index,)) for index in range(2)]
        for thread in threads:
            thread.start()
        for victim in itertools.islice(itertools.cycle(["server 1", "server 3", "coordinator"]), 5):
            seen = clients[0].pushes
            wait_until(lambda: clients[0].pushes >= min(seen + 30, pushes), seconds=60)  # noqa: B023
            wait_until(lambda: not clients[0].recovering, seconds=60)
            os.kill(cluster.pids[victim], signal.SIGKILL)
        for thread in threads:
            thread.join(120)
        assert [thread.is_alive() for thread in threads] == [False, False]
        found = clients[0].records(0, 0, rows)[:, :dim]
    assert np.array_equal(found, -np.repeat(counts.sum(0)[:, None], dim, 1).astype(np.float32))


def test_a_kill_by_hand(tmp_path: Path) -> None:
    """From another terminal, without a word to the launcher."""
    path = tmp_path / "run"
    command = [sys.executable, "-m", "regrow.cli", "train", "--protect", "ec", "--k", "2", "--servers", "3"]
    command += ["--rows-max", "1500", "--batch", "128", "--steps", "60", "--test-rows", "1024", "--check-parity"]
    run = subprocess.Popen([*command, "--out", str(path)], stdout=subprocess.PIPE, stderr=subprocess.STDOUT)

    def step() -> int:
        metrics = path / "metrics.jsonl"
        lines = metrics.read_text().splitlines() if metrics.exists() else []
        return int(json.loads(lines[-1])["step"]) if lines else 0

    try:
        wait_until(lambda: step() >= 3, seconds=60, what="training")
        os.kill(pid_of("rg server 1", launcher=run.pid), signal.SIGKILL)
        output, _ = run.communicate(timeout=120)
    finally:
        run.kill()
    assert run.returncode == 0, output.decode()
    summary = json.loads((path / "summary.json").read_text())
    assert [failure["role"] for failure in summary["failures"]] == ["server"]
    assert summary["parity_wrong"] == 0


def pid_of(name: str, *, launcher: int) -> int:
    """The process of this name among the launcher's children."""
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            found, _, rest = stat.read_text().partition("(")[2].rpartition(")")
        except OSError:
            continue
        if found == name and int(rest.split()[1]) == launcher:
            return int(stat.parent.name)
    raise AssertionError(f"there is no {name}")
