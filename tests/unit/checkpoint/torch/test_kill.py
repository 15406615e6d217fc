"""Goal: however a training process ends, the newest cut on storage restores to a state that training was in, and
training on from there ends as if nothing had happened.

Method: this file is also a program. It imports torch once and forks a child for every run. First a run that nobody
disturbs: the hash of the whole state after every step, and every place that a write passes (`failpoints`). Then one run
for each of these places, ended there, by an exit and by half a file; and runs killed by SIGKILL after seeded delays.
After each, a child restores the newest cut, compares the hash, and trains to the end.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import select
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))  # as pytest does
from torch_models import RULES, Model, state, train

from regrow.checkpoint import failpoints
from regrow.checkpoint.load import verify
from regrow.checkpoint.storage import Storage
from regrow.checkpoint.torch.checkpointer import DeltaCheckpointer

pytestmark = pytest.mark.live

STEPS, EVERY, FULL_EVERY = 5, 2, 3
KILLS, KILL_STEPS, SEED = 8, 200, 5
MAKE = RULES["sparse adam, adam"][2]


def digest(model: Model, optimizers: list[torch.optim.Optimizer]) -> str:
    sha = hashlib.sha256()
    for name, value in sorted(state(model, optimizers).items()):
        data = value.numpy().tobytes() if isinstance(value, torch.Tensor) else repr(value).encode()
        sha.update(name.encode() + data)
    return sha.hexdigest()


def run(url: str, steps: int, *, point: str | None = None, wait: bool = True) -> dict[str, Any]:
    """Trains from the newest cut, or from the beginning, to `steps`."""
    model = Model()
    optimizers = MAKE(model)
    told: dict[str, Any] = {"resumed": 0, "hashes": {}, "harmful": []}
    resume = None
    storage = Storage.open(url)
    if storage.pieces():
        told["harmful"] = [str(problem) for problem in verify(storage) if problem.harmful]
        resume = DeltaCheckpointer.restore(model, url, optimizers=optimizers)
        told["resumed"] = resume.step
        told["hashes"][resume.step] = digest(model, optimizers)
    failpoints.arm(point)
    with (
        failpoints.recording() as passed,
        DeltaCheckpointer(
            model, url, optimizers=optimizers, every=EVERY, full_every=FULL_EVERY, resume=resume
        ) as checkpointer,
    ):
        for step in range(checkpointer.current_step, steps):
            train(model, optimizers, step)
            checkpointer.step()
            if wait:
                checkpointer.wait()
            told["hashes"][step + 1] = digest(model, optimizers)
    told["passed"] = list(passed)
    return told


def fork(job: Callable[[], Any], *, kill_after_seconds: float | None = None) -> tuple[int, Any]:
    """(how the child ended, what it returned)"""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reading)
        code = 1
        try:
            os.write(writing, json.dumps(job()).encode())
            code = 0
        finally:
            os._exit(code)
    os.close(writing)
    if kill_after_seconds is not None and not select.select([reading], [], [], kill_after_seconds)[0]:
        os.kill(child, signal.SIGKILL)
    with os.fdopen(reading, "rb") as pipe:
        data = pipe.read()
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), json.loads(data) if data else None


def warm_up() -> None:
    """What torch imports with the first step takes longer than all else. No thread may be started before a fork."""
    torch.set_num_threads(1)
    model = Model()
    for optimizer in MAKE(model):
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                parameter.grad = torch.zeros_like(parameter)
                if parameter is model.users.weight or parameter is model.items.weight:
                    parameter.grad = parameter.grad.to_sparse(1)
        optimizer.step()


def main(directory: str) -> None:
    warm_up()
    clean_code, clean = fork(lambda: run(f"{directory}/clean", STEPS))
    assert clean_code == 0
    results = []
    counts: Counter[str] = Counter()
    for name in clean["passed"]:
        counts[name] += 1
        for action in ("exit", "tear"):
            if action == "tear" and not name.endswith(".data"):
                continue
            point, url = f"{name}:{counts[name]}:{action}", f"{directory}/{name}-{counts[name]}-{action}"
            code, _ = fork(lambda url=url, point=point: run(url, STEPS, point=point))
            after_code, after = fork(lambda url=url: run(url, STEPS))
            results.append({"point": point, "code": code, "after_code": after_code, "after": after})
    print(json.dumps({"clean": clean, "points": results, "kills": kill_again_and_again(directory)}))


def kill_again_and_again(directory: str) -> dict[str, Any]:
    """One lineage: killed again and again while cuts are written behind training's back."""
    _, clean = fork(lambda: run(f"{directory}/whole", KILL_STEPS, wait=False))
    draw = random.Random(SEED)
    url, results = f"{directory}/killed", []
    for _ in range(KILLS):
        code, _ = fork(lambda: run(url, KILL_STEPS, wait=False), kill_after_seconds=draw.uniform(0.05, 0.4))
        after_code, after = fork(lambda: run(url, 0))
        results.append({"code": code, "after_code": after_code, "after": after})
    _, last = fork(lambda: run(url, KILL_STEPS, wait=False))
    return {"expected": clean["hashes"], "results": results, "last": last}


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Any:
    command = [sys.executable, "-W", "ignore", __file__, str(tmp_path_factory.mktemp("runs"))]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_ended_at_every_place_that_a_write_passes(found: Any) -> None:
    hashes = found["clean"]["hashes"]
    assert sorted(map(int, hashes)) == list(range(1, STEPS + 1))
    resumed = set()
    for result in found["points"]:
        point = result["point"]
        assert result["code"] == failpoints.EXIT_CODE, point
        assert result["after_code"] == 0, point
        assert result["after"]["harmful"] == [], point
        for step, sha in result["after"]["hashes"].items():
            assert sha == hashes[step], (point, step)
        assert str(STEPS) in result["after"]["hashes"], point
        resumed.add(result["after"]["resumed"])
    assert resumed == {0, 2, 4}


def test_no_place_was_left_out(found: Any) -> None:
    """What a local disk does not pass belongs to object stores and staging, and to deleting."""
    left_out = set(failpoints.NAMES) - {result["point"].split(":")[0] for result in found["points"]}
    assert {name for name in left_out if not name.endswith((".put", ".delete", ".delete_fsync"))} <= {
        "manifest.mkdir",  # the chunks made the directory
        "stage.mkdir",
        "stage.data",
    }


def test_killed_at_seeded_moments(found: Any) -> None:
    kills = found["kills"]
    assert any(result["code"] == -signal.SIGKILL for result in kills["results"])
    for result in [*kills["results"], {"code": 0, "after_code": 0, "after": kills["last"]}]:
        assert result["code"] in (0, -signal.SIGKILL)
        assert result["after_code"] == 0
        assert result["after"]["harmful"] == []
        for step, sha in result["after"]["hashes"].items():
            assert sha == kills["expected"][step], step
    assert str(KILL_STEPS) in kills["last"]["hashes"]


if __name__ == "__main__":
    main(sys.argv[1])
