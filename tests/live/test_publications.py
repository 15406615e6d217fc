"""Goal: what is published is a state that training passed, bit for bit, whoever dies; a replica ends with the trained
model, and one that is killed in the middle comes back.

Method: whole synchronous runs with real processes and kills, compared with an undisturbed run in one process. The rows
of SGD are weights alone, so that a publication can be compared as a whole.
"""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
import urllib.request
from pathlib import Path
from typing import Any

import armed_child
import checkpoint_runs as runs
import numpy as np
import pytest

from regrow.checkpoint.publications import is_publication
from regrow.errors import UserError
from regrow.launch import checkpoints
from regrow.serving import Replica

pytestmark = pytest.mark.live

SGD: dict[str, Any] = {"optimizer": "sgd", "publish_every": "10steps"}


def check_publications(run: runs.Run) -> list[int]:
    """The steps of all publications that can be restored; each is what the model was then. The last is the end."""
    assert run.config.publish is not None
    assert run.summary["status"] == "ok"
    assert run.summary["model_sha256"] == runs.undisturbed(run.config)[-1]
    job = armed_child.job_of(run.config)
    cuts = runs.graph(run.config.publish).restorable()
    for cut in cuts:
        assert is_publication(cut)
        records = runs.restored(run.config.publish, cut, run.config)
        assert armed_child.digest(job, records) == runs.undisturbed(run.config)[cut.step], cut
    with Replica(run.config.publish, follow=False, wait_seconds=0.0) as replica:
        rows = [replica.lookup(table.name, np.arange(table.rows)) for table in job.tables]
        assert armed_child.digest(job, rows) == runs.undisturbed(run.config)[-1]
        assert replica.step == run.config.steps
    return [cut.step for cut in cuts]


def test_a_run_that_loses_servers_and_the_coordinator(tmp_path: Path) -> None:
    """With parities and checkpoints beside publications: nobody's cuts disturb the other's."""
    run = runs.run(
        tmp_path,
        **SGD,
        protection="ec+delta",
        servers=3,
        k=2,
        steps=200,
        every="20steps",
        publish=str(tmp_path / "published"),
        kill=("server:1@step:60", "coordinator@step:110"),
    )
    assert sorted(run.roles_lost) == ["coordinator", "server"]
    steps = check_publications(run)  # on a busy machine it may be the last one alone
    runs.check(run)
    published = run.summary["publications"]
    assert published["saved"] >= len(steps) >= 1
    assert published["last"]["rows"] > 0 and published["bytes"] > 0
    with pytest.raises(UserError, match="is a publication"):
        checkpoints.find(run.config.replace(resume=run.config.publish, publish=None, publish_every="30s"))


def test_a_run_that_goes_back_to_a_checkpoint(tmp_path: Path) -> None:
    """A publication of steps that were trained again is superseded by a full of the second start."""
    run = runs.run(
        tmp_path,
        **SGD,
        protection="delta",
        steps=160,
        every="50steps",
        publish=str(tmp_path / "published"),
        kill=("worker:0@step:90",),
    )
    assert len(run.summary["restores"]) == 1
    check_publications(run)
    cuts = runs.graph(str(tmp_path / "published")).restorable()
    starts = [cut.line.turn[0] for cut in cuts if cut.line is not None]
    assert starts == sorted(starts), "what the second start published is newer"
    assert starts[-1] == 1


def test_storage_that_fails(tmp_path: Path) -> None:
    """No publication, and the next has everything. Training without checkpoints hears of it and goes on."""
    run = runs.run(
        tmp_path,
        plan={"arm": {"server 0": ["chunk.data:2:full:1"]}},
        **SGD,
        protection="none",
        steps=200,
        publish=str(tmp_path / "published"),
    )
    check_publications(run)
    assert run.summary["publications"]["failed"] >= 1
    assert run.summary["checkpoints"]["saved"] == 0


class Reader:
    """A `regrow serve-rows` process."""

    def __init__(self, url: str) -> None:
        command = [sys.executable, "-P", "-m", "regrow", "serve-rows", url, "--listen", "127.0.0.1:0", "--poll", "0.1s"]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        self.address = self.process.stdout.readline().split()[0]

    def ask(self, path: str, body: Any = None) -> Any:
        data = None if body is None else json.dumps(body).encode()
        with urllib.request.urlopen(f"{self.address}{path}", data, timeout=60.0) as answer:
            return json.loads(answer.read())

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(60.0)
        assert self.process.stdout is not None
        self.process.stdout.close()


def test_a_reader_is_killed_in_the_middle(tmp_path: Path) -> None:
    url = str(tmp_path / "published")
    room = tmp_path / "room"
    readers: list[Reader] = []

    def read() -> None:
        readers.append(Reader(url))
        assert readers[0].ask("/status")["step"] > 0
        readers[0].kill()
        (room / "reader was killed").touch()
        readers.append(Reader(url))

    thread = threading.Thread(target=read)
    thread.start()
    try:
        plan = {"hold": 100, "until": ["reader was killed"]}
        run = runs.run(tmp_path, plan=plan, **SGD, protection="none", steps=150, publish=url)
        thread.join(60.0)
        check_publications(run)
        reader = readers[1]
        deadline = time.monotonic() + 60.0
        while (status := reader.ask("/status"))["step"] < 150:
            assert time.monotonic() < deadline, status
            time.sleep(0.05)
        with Replica(url, follow=False) as replica:
            for table, shape in status["tables"].items():
                ids = list(range(0, shape["rows"], 7))
                answer = reader.ask("/lookup", {"table": table, "ids": ids})
                assert np.array(answer["rows"], np.float32).tobytes() == replica.lookup(table, ids).tobytes()
    finally:
        for reader in readers:
            reader.kill() if reader.process.returncode is None else None
