"""Goal: the launcher as a job: it is followed, asked, stopped and fetched from, and says how it ended.

Method: the class that the actor is made of, in this process, with runs on this machine. With an actor: test_ray.py.
"""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import pytest

from regrow.config import TrainConfig
from regrow.launch import ray_job
from regrow.launch.ray_job import Job
from regrow.launch.ray_jobs import ENDED, FAILED, RUNNING, Page

DEADLINE_SECONDS = 120.0
SMALL = {"model": "kaggle", "rows_max": 500, "batch": 64, "test_rows": 512, "servers": 2, "workers": 1, "steps": 5}


def start(path: Path, **options: Any) -> Job:
    config = TrainConfig(**{**SMALL, **options, "out": str(path / "run")})
    return Job("mine", config.to_dict(), overwrite=False, directory=str(path / "nowhere"))


def follow(job: Job, *, until: str = "") -> tuple[list[str], Page]:
    """What it says, until its end; or until a line begins so."""
    lines: list[str] = []
    since, deadline = 0, time.monotonic() + DEADLINE_SECONDS
    while time.monotonic() < deadline:
        page = job.read(since, 0.5)
        since = page.next
        lines += [line for _, line in page.lines]
        if page.state != RUNNING or (until and any(line.startswith(until) for line in lines)):
            return lines, page
    raise AssertionError(f"no end: {lines}")


def test_a_job_is_followed_to_its_end_and_fetched(tmp_path: Path) -> None:
    job = start(tmp_path)
    lines, page = follow(job)
    assert (page.state, page.failure, page.is_begun) == (ENDED, None, True), lines
    assert any("AUC" in line for line in lines)
    assert follow(job)[0] == lines, "and whoever comes later reads the same"
    glance = job.glance()
    assert (glance.name, glance.state, glance.directory) == ("mine", ENDED, str(tmp_path / "run"))
    files = dict(job.list_files())
    assert {"config.toml", "metrics.jsonl", "summary.json", "logs/worker-0.log"} <= files.keys()
    assert len(job.read_file("summary.json", 0)) == files["summary.json"]
    assert job.read_file("summary.json", files["summary.json"]) == b""
    assert job.stop(False) is None, "which it has already"


def test_what_is_wrong_is_known_before_it_begins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And nothing of it stays, as nobody would ask for its directory."""
    left = threading.Event()
    monkeypatch.setattr(ray_job, "KEEP_REFUSED_SECONDS", 0.0)
    monkeypatch.setattr(Job, "_leave", lambda job: left.set())
    _, page = follow(start(tmp_path, data="criteo:nothing.tsv"))
    assert (page.state, page.is_begun) == (FAILED, False)
    assert page.failure is not None
    assert "nothing.tsv" in page.failure.message
    assert page.failure.exit_code == 2
    assert left.wait(DEADLINE_SECONDS)


@pytest.mark.slow
def test_a_job_is_stopped(tmp_path: Path) -> None:
    job = start(tmp_path, steps=100_000)
    follow(job, until="training")
    assert job.stop(True) == "it makes no checkpoints: it was started without --ckpt"
    assert job.stop(False) is None
    _, page = follow(job)
    assert page.failure is not None
    assert page.failure.exit_code == 143


@pytest.mark.slow
def test_a_job_is_stopped_when_its_model_is_stored(tmp_path: Path) -> None:
    job = start(tmp_path, steps=100_000, protection="delta", ckpt=str(tmp_path / "ckpt"), every="1h")
    follow(job, until="training")
    assert job.stop(True) is None
    _, page = follow(job)
    assert page.failure is not None
    assert page.failure.exit_code == 143
    assert list((tmp_path / "ckpt").rglob("*.json"))
