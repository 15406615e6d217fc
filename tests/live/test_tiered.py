"""Goal: rows on disk are the same rows: a run whose tables do not fit its cache ends with the model of one that has
them in memory, whoever is killed, and however often; also when the whole run is, and goes on from its files.

Method: small synchronous runs of real processes. What they leave is compared with an undisturbed run in memory, to the
bit. Runs that are killed as a whole are killed when their directory has a checkpoint.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import silent_child

from regrow.checkpoint.epochs import find_newest_epochs
from regrow.config import TrainConfig
from regrow.core.job import JobSpec, OptimizerSpec, TableSpec
from regrow.errors import ChildFailed, UserError
from regrow.launch import local
from regrow.launch.cluster import LocalCluster
from regrow.launch.tier_restore import restore_epochs
from regrow.launch.tiers import Needs
from regrow.units import MIB

SMALL: dict[str, Any] = {
    "model": "tiny",
    "rows_max": 100_000,
    "skew": 0.9,  # most batches have rows that the ones before did not
    "optimizer": "adam",  # large records: what leaves the cache does not stay in buffers on its way to the disk
    "batch": 64,
    "steps": 40,
    "mode": "sync",
    "servers": 2,
    "workers": 1,
    "test_rows": 500,
}
RESUME_SECONDS_MAX = 120.0


def make_config(path: Path, **options: Any) -> TrainConfig:
    given = {**SMALL, "out": str(path / "run"), "store": "tiered", "store_dir": str(path / "rows"), **options}
    if "cache_bytes" not in given:  # as little as is allowed
        given["cache_bytes"] = 1 << 40
        given["cache_bytes"] = Needs(TrainConfig.from_dict(given)).cache_bytes_min
    return TrainConfig.from_dict(given)


def train(path: Path, **options: Any) -> dict[str, Any]:
    path.mkdir(parents=True, exist_ok=True)
    return local.train(make_config(path, **options))


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The digest of the same run in memory."""
    out = tmp_path_factory.mktemp("memory") / "run"
    summary = local.train(TrainConfig.from_dict({**SMALL, "out": str(out)}))
    return str(summary["model_sha256"])


def test_rows_on_disk_are_the_same_rows(tmp_path: Path, undisturbed: str) -> None:
    summary = train(tmp_path)
    assert summary["model_sha256"] == undisturbed
    tiers = summary["tiers"]
    assert tiers["misses"] > 0 and tiers["waits"] > 0 and tiers["wait_seconds"] > 0.0
    assert tiers["reads"] > 0 and tiers["log_rows_read"] + tiers["home_rows_read"] > 0
    assert 0.0 < tiers["hit_rate_rows"] < 1.0
    assert tiers["frames"] < 0.015 * summary["rows"], "the cache has about one row of a hundred"
    assert tiers["frames_pinned"] == 0
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    assert any(json.loads(line).get("tiers") for line in lines)
    assert [path.name for path in (tmp_path / "rows").iterdir()] == ["lock"], "files of no use to anybody are deleted"


def test_rows_that_are_read_ahead_are_the_same_rows(tmp_path: Path, undisturbed: str) -> None:
    """A cache of the least size has no room for batches to come; this one has."""
    least = make_config(tmp_path).cache_bytes
    summary = train(tmp_path, cache_bytes=6 * least, store_io="direct")
    assert summary["model_sha256"] == undisturbed
    tiers = summary["tiers"]
    assert tiers["rows_named"] > 0 and tiers["misses"] > 0
    assert tiers["frames_pinned"] == 0


def test_a_disk_that_falls_silent_counts_as_a_death(tmp_path: Path, undisturbed: str) -> None:
    command = (sys.executable, "-P", silent_child.__file__, str(tmp_path), "40")
    config = make_config(tmp_path, protection="batch", every="3steps")
    summary = local.train(config, command=command)
    assert summary["model_sha256"] == undisturbed
    assert (tmp_path / "silent").exists()
    assert len(summary["restores"]) == 1
    assert "the disk has not answered for" in json.dumps([summary["restores"], summary["failures"]])


@pytest.mark.slow
def test_a_server_that_hangs_takes_everybody_back(tmp_path: Path, undisturbed: str) -> None:
    summary = train(tmp_path, protection="batch", every="3steps", pause=("server:1@step:12:1000s",))
    assert summary["model_sha256"] == undisturbed
    assert len(summary["restores"]) == 1


def test_asynchronously_with_workers_that_pull_ahead(tmp_path: Path) -> None:
    summary = train(tmp_path, mode="async", workers=2, steps=40)
    assert summary["status"] == "ok"
    assert summary["tiers"]["misses"] > 0
    assert summary["per_worker"][0]["step"] == 40


def test_a_death_without_checkpoints_is_the_end(tmp_path: Path) -> None:
    with pytest.raises(ChildFailed, match="server 1 was killed by SIGKILL"):
        train(tmp_path, kill=("server:1@step:5",))


def test_checkpoints_on_storage_work_as_in_memory(tmp_path: Path, undisturbed: str) -> None:
    ckpt = str(tmp_path / "ckpt")
    summary = train(tmp_path, protection="delta", ckpt=ckpt, every="5steps", kill=("server:1@step:14",))
    assert summary["model_sha256"] == undisturbed
    assert len(summary["restores"]) == 1


def test_three_deaths_in_a_row_with_checkpoints_in_the_files(tmp_path: Path, undisturbed: str) -> None:
    kills = ("server:1@step:8", "worker:0@step:21", "coordinator@step:36")
    summary = train(tmp_path, protection="batch", every="3steps", kill=kills)
    assert summary["model_sha256"] == undisturbed
    assert len(summary["restores"]) in (2, 3), "two deaths may come so close together that they are one fall"
    found = find_newest_epochs(str(tmp_path / "rows"))
    assert found is not None and found.target.step == SMALL["steps"]


def kill_when(path: Path, seen: Any) -> None:
    """Runs the same as a process of its own, and kills it and all its children when there is something to see."""
    options = make_config(path, protection="batch", every="3steps", steps=SMALL["steps"]).to_dict()
    code = "import json, sys; from regrow.config import TrainConfig; from regrow.launch import local\n"
    code += "local.train(TrainConfig.from_dict(json.loads(sys.argv[1])), overwrite=True)"
    process = subprocess.Popen([sys.executable, "-c", code, json.dumps(options)], start_new_session=True)
    deadline = time.monotonic() + RESUME_SECONDS_MAX
    try:
        while not seen() and process.poll() is None:
            assert time.monotonic() < deadline, "no checkpoint was made"
            time.sleep(0.01)
        assert seen()
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def find_step(path: Path) -> int:
    found = find_newest_epochs(str(path / "rows")) if (path / "rows" / "checkpoints").exists() else None
    return 0 if found is None else found.target.step


def test_a_run_that_was_killed_goes_on_from_its_files(tmp_path: Path, undisturbed: str) -> None:
    tmp_path.joinpath("first").mkdir()
    kill_when(tmp_path / "first", lambda: find_step(tmp_path / "first") >= 3)
    step = find_step(tmp_path / "first")
    rows = str(tmp_path / "first" / "rows")
    summary = train(tmp_path / "second", protection="batch", every="3steps", store_dir=rows, resume=rows)
    assert summary["model_sha256"] == undisturbed
    assert step >= 3
    with pytest.raises(UserError, match="has a checkpoint of a run in it"):
        train(tmp_path / "third", protection="batch", store_dir=rows)


def test_another_number_of_servers_goes_on_from_a_full_made_of_it(tmp_path: Path, undisturbed: str) -> None:
    tmp_path.joinpath("first").mkdir()
    kill_when(tmp_path / "first", lambda: find_step(tmp_path / "first") >= 3)
    rows, full = str(tmp_path / "first" / "rows"), str(tmp_path / "full")
    made = restore_epochs(rows, full, progress=lambda done, total: None)
    assert made.target.step == find_step(tmp_path / "first")
    summary = train(tmp_path / "second", protection="full", ckpt=full, resume=full, servers=3, every="10steps")
    assert summary["model_sha256"] == undisturbed
    with pytest.raises(UserError, match="already has"):
        restore_epochs(rows, full, progress=lambda done, total: None)


SCRIPT = """
import torch, regrow

def read(batch):
    return [regrow.KeyedJaggedTensor(keys=["item"], values=batch, lengths=torch.ones(len(batch), dtype=torch.int32))]

job = regrow.join()
table = regrow.EmbeddingBagConfig(num_embeddings=20_000, embedding_dim=8, name="t", feature_names=["item"])
rows, dense = job.embedding_bag_collection([table]), job.dense(torch.nn.Linear(8, 1))
data = [torch.arange(64 * step, 64 * step + 64) for step in range(20)] * 2
for batch in job.loop(data, epochs=1, features=read):
    job.step(dense(rows(read(batch)[0]).values()).square().mean())
"""


def test_a_script_of_ones_own_with_a_cache_for_some_of_its_rows(tmp_path: Path) -> None:
    """Smaller than the default model would need, which is none of its business."""
    path = tmp_path / "train.py"
    path.write_text(SCRIPT)
    given = {"script": (str(path),), "servers": 2, "workers": 1, "store": "tiered", "cache_bytes": MIB // 16}
    config = TrainConfig.from_dict({**given, "store_dir": str(tmp_path / "rows"), "out": str(tmp_path / "run")})
    summary = local.train(config)
    assert summary["status"] == "ok"
    assert summary["per_worker"][0]["step"] == 40
    assert summary["tiers"]["rows_evicted"] > 0 and summary["tiers"]["misses"] > 0


def test_a_cluster_for_a_script(tmp_path: Path) -> None:
    table = TableSpec(
        name="t", rows=20_000, dim=8, init_bound=0.5, optimizer=OptimizerSpec(kind="sgd", learning_rate=1.0)
    )
    job = JobSpec(tables=(table,), servers=2, workers=1, seed=3)
    records = np.arange(50 * table.record_floats, dtype=np.float32).reshape(50, -1)
    with LocalCluster(servers=2, store_dir=tmp_path / "rows", cache_bytes=MIB // 2) as cluster:
        client = cluster.client(job)
        client.write_records(0, 100, records)
        found = client.records(0, 100, 50)
    assert np.array_equal(found, records)
    assert list((tmp_path / "rows").iterdir()) == []
    with pytest.raises(UserError, match="has files in it"):
        LocalCluster(servers=1, store_dir=tmp_path)
