"""Goal: a script with a `LocalCluster` and `regrow.Partial` goes on when one of its server processes is killed, and has
lost what that server had not saved, and no more.

Method: every push takes one from each of its rows, so a row says how many of its pushes it has.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers import wait_until

import regrow
from regrow.checkpoint.saves import SaveManifest
from regrow.checkpoint.saves_write import list_owners, read_saves
from regrow.checkpoint.storage import Storage

pytestmark = pytest.mark.live

ROWS, SAVED, LOST, AFTER = 3000, 10, 4, 3


def read_all_saves(url: str) -> Iterator[SaveManifest]:
    storage = Storage.open(url)
    for owner in list_owners(storage):
        yield from read_saves(storage, owner).manifests


def test_a_server_of_a_script_is_killed(tmp_path: Path) -> None:
    url = str(tmp_path / "saves")
    tables = [regrow.EmbeddingBagConfig(num_embeddings=ROWS, embedding_dim=4, name="t", feature_names=["f"])]
    sgd = regrow.OptimizerSpec(kind="sgd", learning_rate=1.0)
    features = regrow.KeyedJaggedTensor(
        keys=["f"], values=torch.arange(ROWS), lengths=torch.ones(ROWS, dtype=torch.long)
    )
    with regrow.LocalCluster(servers=3, protection=regrow.Partial(ckpt=url, every=f"{SAVED}steps")) as cluster:
        collection = regrow.EmbeddingBagCollection(tables=tables, cluster=cluster, optimizer=sgd)
        begun = collection.client.records(0, 0, ROWS)[:, 0].copy()

        def push(times: int) -> None:
            for _ in range(times):
                collection(features).values().sum().backward()
            collection.drain()

        push(SAVED)
        wait_until(lambda: sum(save.rows > 0 for save in read_all_saves(url)) == 3)
        push(LOST)
        before = cluster.pids["server 1"]
        os.kill(before, signal.SIGKILL)
        push(AFTER)
        have = np.rint(begun - collection.client.records(0, 0, ROWS)[:, 0]).astype(int)
        assert cluster.pids["server 1"] != before
    pushes = SAVED + LOST + AFTER
    assert set(have.tolist()) == {pushes, pushes - LOST}
    assert np.count_nonzero(have < pushes) == ROWS // 3, "the rows of one server of three"
