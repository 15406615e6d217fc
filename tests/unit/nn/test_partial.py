"""Goal: a script's own cluster has partial recovery as a protection: a server that is lost goes back alone, to what it
saved last, and the script goes on.

Method: collections on a cluster in one process, where every push takes one from each of its rows; what is wrong is
refused when it is said.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import regrow
from regrow.errors import ConfigError

ROWS = 30


def make_collection(cluster: Any, **options: Any) -> regrow.EmbeddingBagCollection:
    tables = [regrow.EmbeddingBagConfig(num_embeddings=ROWS, embedding_dim=2, name="t", feature_names=["f"])]
    sgd = regrow.OptimizerSpec(kind="sgd", learning_rate=1.0)
    return regrow.EmbeddingBagCollection(tables=tables, cluster=cluster, optimizer=sgd, **options)


def push_all(collection: regrow.EmbeddingBagCollection, times: int) -> None:
    features = regrow.KeyedJaggedTensor(
        keys=["f"], values=torch.arange(ROWS), lengths=torch.ones(ROWS, dtype=torch.long)
    )
    for _ in range(times):
        collection(features).values().sum().backward()
    collection.drain()


def read_weights(collection: regrow.EmbeddingBagCollection) -> np.ndarray[Any, Any]:
    return collection.client.records(0, 0, ROWS)[:, 0].copy()


@pytest.mark.parametrize("priority", ["none", "mfu"])
def test_a_lost_server_goes_back_alone(priority: str) -> None:
    options: dict[str, Any] = {} if priority == "none" else {"priority_tables": ("t",), "priority_share": 0.5}
    cluster = regrow.InProcessCluster(
        servers=3, protection=regrow.Partial(every="10steps", priority=priority, **options)
    )
    collection = make_collection(cluster)
    begun = read_weights(collection)
    push_all(collection, 14)
    cluster.settle()
    cluster.kill(1)
    cluster.settle()
    push_all(collection, 6)
    lost = 20 - np.rint(begun - read_weights(collection)).astype(int)
    places = np.arange(ROWS) % 3
    mine = [int(place) for place in np.unique(places[lost > 0])]
    assert len(mine) == 1, "the rows of one server"
    ((server, joined),) = cluster.joins
    assert (server, joined.updates_lost) == (1, lost.sum())
    if priority == "none":
        assert set(lost[places == mine[0]].tolist()) == {14 - 10}


def test_a_collection_may_bring_its_own() -> None:
    collection = make_collection(regrow.InProcessCluster(servers=2), protection=regrow.Partial())
    assert [(table.name, table.r) for table in collection.job.tables] == [("t", 0), ("regrow_marks", 1)]
    assert [config.name for config in collection.embedding_bag_configs()] == ["t"]


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"priority": "most"}, "priority"),
        ({"priority": "ssu"}, "priority_tables"),
        ({"priority_tables": ("t",)}, "priority_tables"),
        ({"priority_share": 0.0}, "priority_share"),
        ({"every": "10"}, "every"),
        ({"ssu_period": 0}, "ssu_period"),
    ],
)
def test_what_cannot_be_is_refused(options: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        regrow.Partial(**options)


def test_a_cluster_of_processes_needs_a_place_for_saves() -> None:
    with pytest.raises(ConfigError, match="ckpt"):
        regrow.LocalCluster(servers=2, protection=regrow.Partial())
    with pytest.raises(ConfigError, match="so many copies"):
        regrow.LocalCluster(servers=1, protection=regrow.Partial(ckpt="x"))
