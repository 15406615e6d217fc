"""Regrow: recommendation training on parameter servers that keeps going when servers die.

The public names are loaded on first use, so that servers and the command line start without torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from regrow.core.job import OptimizerSpec as OptimizerSpec
    from regrow.launch.cluster import LocalCluster as LocalCluster
    from regrow.nn.embedding import EmbeddingBagConfig as EmbeddingBagConfig
    from regrow.nn.embedding import EmbeddingCollection as EmbeddingCollection
    from regrow.nn.embedding import KeyedJaggedTensor as KeyedJaggedTensor
    from regrow.nn.embedding import KeyedTensor as KeyedTensor
    from regrow.nn.embedding import PoolingType as PoolingType
    from regrow.nn.job import Job as Job
    from regrow.nn.job import join as join
    from regrow.protection import ErasureCode as ErasureCode
    from regrow.runtime.inprocess import InProcessCluster as InProcessCluster

_HOMES = {
    "EmbeddingBagConfig": "regrow.nn.embedding",
    "EmbeddingCollection": "regrow.nn.embedding",
    "ErasureCode": "regrow.protection",
    "InProcessCluster": "regrow.runtime.inprocess",
    "Job": "regrow.nn.job",
    "KeyedJaggedTensor": "regrow.nn.embedding",
    "KeyedTensor": "regrow.nn.embedding",
    "LocalCluster": "regrow.launch.cluster",
    "OptimizerSpec": "regrow.core.job",
    "PoolingType": "regrow.nn.embedding",
    "join": "regrow.nn.job",
}

__all__ = sorted(_HOMES)


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(importlib.import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'regrow' has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
