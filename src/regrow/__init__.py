"""Regrow: recommendation training on parameter servers that keeps going when servers die.

The public names are loaded on first use, so that servers and the command line start without torch.
"""

from __future__ import annotations

import importlib
import warnings
from typing import TYPE_CHECKING, Any

__version__: str
if TYPE_CHECKING:
    from regrow.checkpoint.torch.publisher import Publisher as Publisher
    from regrow.launch.cluster import LocalCluster as LocalCluster
    from regrow.launch.connect import connect as connect
    from regrow.nn.embedding import EmbeddingBagCollection as EmbeddingBagCollection
    from regrow.nn.embedding import EmbeddingBagConfig as EmbeddingBagConfig
    from regrow.nn.embedding import EmbeddingConfig as EmbeddingConfig
    from regrow.nn.embedding import KeyedTensor as KeyedTensor
    from regrow.nn.embedding import PoolingType as PoolingType
    from regrow.nn.jagged import JaggedTensor as JaggedTensor
    from regrow.nn.jagged import KeyedJaggedTensor as KeyedJaggedTensor
    from regrow.nn.job import Job as Job
    from regrow.nn.job import join as join
    from regrow.nn.loading import load as load
    from regrow.nn.optimizer import OptimizerSpec as OptimizerSpec
    from regrow.protection import ErasureCode as ErasureCode
    from regrow.protection import Partial as Partial
    from regrow.runtime.inprocess import InProcessCluster as InProcessCluster

_HOMES = {
    "EmbeddingBagCollection": "regrow.nn.embedding",
    "EmbeddingBagConfig": "regrow.nn.embedding",
    "EmbeddingConfig": "regrow.nn.embedding",
    "ErasureCode": "regrow.protection",
    "InProcessCluster": "regrow.runtime.inprocess",
    "JaggedTensor": "regrow.nn.jagged",
    "Job": "regrow.nn.job",
    "KeyedJaggedTensor": "regrow.nn.jagged",
    "KeyedTensor": "regrow.nn.embedding",
    "LocalCluster": "regrow.launch.cluster",
    "OptimizerSpec": "regrow.nn.optimizer",
    "Partial": "regrow.protection",
    "PoolingType": "regrow.nn.embedding",
    "Publisher": "regrow.checkpoint.torch.publisher",
    "connect": "regrow.launch.connect",
    "join": "regrow.nn.job",
    "load": "regrow.nn.loading",
}

# What was called otherwise before; the old names warn for one release.
_RENAMED = {"EmbeddingCollection": "EmbeddingBagCollection"}

__all__ = sorted(_HOMES)


def __getattr__(name: str) -> Any:
    if name == "__version__":
        return importlib.import_module("regrow.launch.version").version()
    if name in _RENAMED:
        text = f"regrow.{name} is called regrow.{_RENAMED[name]} now, as in TorchRec; the old name goes with 0.2"
        warnings.warn(text, DeprecationWarning, stacklevel=2)
        name = _RENAMED[name]
    if name in _HOMES:
        return getattr(importlib.import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'regrow' has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
