"""Goal: a process that hangs is as good as dead: training goes on without it, and nobody waits for ever.

Method: real processes and SIGSTOP, never followed by SIGCONT, of every role; synchronous runs end with the digest of an
undisturbed one. Every test has a deadline far below what a hang without a bound would take.
"""

from __future__ import annotations

import functools
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers import wait_until

from regrow.config import TrainConfig
from regrow.core.identity import Identity
from regrow.core.job import JobSpec, OptimizerSpec, TableSpec
from regrow.core.protection import Coded, FlushSpec
from regrow.errors import ChildFailed, DataLoss
from regrow.launch import local
from regrow.launch.backend import end
from regrow.launch.cluster import LocalCluster
from regrow.launch.orders import Assignment
from regrow.launch.processes import Child, LocalProcesses
from regrow.launch.rundir import Logs, print_warning
from regrow.nn.routing import make_router

pytestmark = pytest.mark.live

STEPS = 14
FOREVER = "100000s"
SMALL = {"model": "kaggle", "rows_max": 1500, "batch": 128, "steps": STEPS, "test_rows": 1024, "mode": "sync"}
EC = {"protection": "ec", "check_parity": True, "k": 2, "r": 1, "servers": 5}
SOON = {"silent_seconds": "server=1.5,worker=4,coordinator=3,spare=3", "patience": "3s"}


def train(path: Path, **options: Any) -> dict[str, Any]:
    return local.train(TrainConfig(out=str(path), **{**SMALL, **SOON, **options}))


@functools.cache
def undisturbed() -> str:
    with tempfile.TemporaryDirectory() as directory:
        digest = train(Path(directory) / "run", servers=2)["model_sha256"]
    assert isinstance(digest, str)
    return digest


def check(summary: dict[str, Any], *roles: str) -> None:
    assert summary["status"] == "ok"
    assert summary["model_sha256"] == undisturbed()
    assert summary["parity_wrong"] == 0
    assert sorted(failure["role"] for failure in summary["failures"]) == sorted(roles)


def test_a_hung_worker_is_replaced(tmp_path: Path) -> None:
    """In synchronous mode everybody waits for it."""
    summary = train(tmp_path / "run", pause=(f"worker:1@step:5:{FOREVER}",), **EC)
    check(summary, "worker")
    assert "has not answered" in summary["failures"][0]["reason"]


def test_a_hung_coordinator_is_replaced(tmp_path: Path) -> None:
    """Nothing shows until a server dies; then nobody would make the next view."""
    summary = train(
        tmp_path / "run", pause=(f"coordinator@step:4:{FOREVER}",), kill=("server:2@step:6",), **EC, steps=40
    )
    assert summary["status"] == "ok"
    assert summary["parity_wrong"] == 0
    assert {failure["role"] for failure in summary["failures"]} == {"coordinator", "server"}


def test_a_coordinator_that_hangs_when_the_last_checkpoint_is_asked_for(tmp_path: Path) -> None:
    """It makes that checkpoint; its successor is asked again."""
    stored = {**EC, "protection": "ec+delta", "ckpt": str(tmp_path / "ckpt"), "every": "1000steps"}
    summary = train(tmp_path / "run", pause=(f"coordinator@step:{STEPS - 1}:{FOREVER}",), **stored)
    check(summary, "coordinator")
    assert int(summary["checkpoints"]["last"]["cut"].partition("-")[0]) == STEPS


def test_a_hung_server_whose_loss_is_one_of_rows_is_waited_for_and_then_given_up(tmp_path: Path) -> None:
    harm = {"pause": (f"server:1@step:5:{FOREVER}",), "kill": ("server:2@step:5",)}
    with pytest.raises(DataLoss, match="server"):
        train(tmp_path / "run", **harm, **EC)


def test_one_that_wakes_up_in_time_is_worth_the_wait(tmp_path: Path) -> None:
    harm = {"pause": ("server:1@step:5:6s",), "kill": ("server:2@step:5",), "patience": "120s"}
    summary = train(tmp_path / "run", **{**EC, **harm})
    check(summary, "server")


def test_with_checkpoints_the_run_falls_back(tmp_path: Path) -> None:
    harm = {"pause": (f"server:1@step:9:{FOREVER}",), "kill": ("server:2@step:9",)}
    stored = {**EC, "protection": "ec+delta", "ckpt": str(tmp_path / "ckpt"), "every": "3steps"}
    summary = train(tmp_path / "run", **harm, **stored)
    assert summary["status"] == "ok"
    assert summary["model_sha256"] == undisturbed()
    assert len(summary["restores"]) == 1


def test_without_protection_the_run_ends_and_names_who_hangs(tmp_path: Path) -> None:
    with pytest.raises(ChildFailed, match="server 1"):
        train(tmp_path / "run", servers=3, pause=(f"server:1@step:5:{FOREVER}",))


def test_a_hung_worker_without_protection(tmp_path: Path) -> None:
    with pytest.raises(ChildFailed, match="worker 1 has not answered"):
        train(tmp_path / "run", servers=3, pause=(f"worker:1@step:5:{FOREVER}",))


def test_a_hung_spare_does_not_keep_a_server_from_coming_back() -> None:
    optimizer = OptimizerSpec(kind="sgd", learning_rate=1.0)
    table = TableSpec(name="t", rows=4000, dim=8, init_bound=0.0, optimizer=optimizer, k=2, r=1)
    protection = Coded(k=2, r=1, flush=FlushSpec())
    job = JobSpec(tables=(table,), servers=5, workers=1, protection=protection)
    router = make_router(job, feature_tables=[0], static_tables=[])
    with LocalCluster(servers=5) as cluster:
        client = cluster.client(job)
        wait_until(lambda: "standby 0" in cluster.pids)
        ids = np.arange(0, 4000, 7)
        plan = router.plan(ids, None, ids.size)
        for step in range(1, 4):
            ticket = client.pull(plan, step=step)
            client.push(ticket, np.ones_like(ticket.wait(60.0)))
        client.drain(60.0)
        os.kill(cluster.pids["standby 0"], signal.SIGSTOP)
        os.kill(cluster.pids["server 2"], signal.SIGKILL)
        began = time.monotonic()
        rows = client.pull(plan, step=4).wait(60.0)
        assert time.monotonic() - began < 45.0
        assert (rows == -3.0).all()


def test_a_launcher_that_was_stopped_holds_nobody_up(tmp_path: Path) -> None:
    """Its processes go on, keep what they have to say, and are not blamed for its silence afterwards."""
    options = ["--model", "kaggle", "--rows-max", "1500", "--batch", "128", "--steps", "400", "--servers", "3"]
    options += ["--protect", "ec", "--k", "2", "--mode", "sync", "--silent-seconds", "3", "--quiet"]
    command = [sys.executable, "-m", "regrow.cli", "train", *options, "--out", str(tmp_path / "run")]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        metrics = tmp_path / "run" / "metrics.jsonl"
        wait_until(lambda: metrics.exists() and '"step": 2' in metrics.read_text(), seconds=120.0)
        process.send_signal(signal.SIGSTOP)
        time.sleep(6.0)
        process.send_signal(signal.SIGCONT)
        _, err = process.communicate(timeout=300.0)
        assert process.returncode == 0, err
    finally:
        process.kill()


def test_a_process_that_cannot_be_killed_keeps_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in uninterruptible sleep: the signal is sent, and nothing happens."""
    monkeypatch.setattr("regrow.launch.backend.KILL_SECONDS_MAX", 0.5)
    monkeypatch.setattr("regrow.launch.processes.KILL_SECONDS_MAX", 0.5)
    backend = LocalProcesses(logs=Logs(tmp_path, print_warning), command=(sys.executable, "-c", "input(); input()"))
    who = Identity(role="merger", id=0, incarnation=0)
    handle = backend.start(
        Assignment(
            identity=who, token="ab" * 32, listen="", coordinator=None, threads=1, servers=1, frame_bytes_max=1 << 20
        )
    )
    kill = Child.kill
    monkeypatch.setattr(Child, "kill", lambda self: None)
    monkeypatch.setattr(Child, "terminate", lambda self: None)
    began = time.monotonic()
    os.kill(handle.pid, signal.SIGSTOP)
    end(backend, [handle], asked_seconds=0.2, term_seconds=0.2, hurry=lambda: False)
    backend.close()
    assert handle.exit is None
    assert time.monotonic() - began < 10.0
    kill(handle)
    wait_until(lambda: handle.reap() is not None)
