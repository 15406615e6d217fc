"""Embedding tables of a job: what TorchRec's EmbeddingBagCollection is to a model, with its rows on the servers.

The job asks for rows, a batch at a time and ahead of their use; here a batch's rows are found again when the model is
called with its features. `eval()`, `torch.no_grad()` and `requires_grad_(False)` freeze the rows, as they do anywhere
else in torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from regrow.core.job import OptimizerSpec, TableSpec
from regrow.nn.embedding import EmbeddingBagConfig, Features, KeyedTensor, make_table_spec

if TYPE_CHECKING:
    from regrow.nn.job import Job


class JobEmbeddingBagCollection(nn.Module):
    """One collection of a job. Made by `Job.embedding_bag_collection`."""

    def __init__(self, job: Job, tables: Sequence[EmbeddingBagConfig], optimizer: OptimizerSpec) -> None:
        super().__init__()
        if not tables:
            raise ValueError("a collection needs at least one table")
        self._job = job
        self._configs = list(tables)
        self.specs: list[TableSpec] = [make_table_spec(config, optimizer) for config in self._configs]
        # (table within this collection, feature), in the order of the output.
        self.lookups = [(t, name) for t, config in enumerate(self._configs) for name in config.feature_names]
        used = [name for _, name in self.lookups]
        # As TorchRec names them where one feature looks up in several tables.
        self._names = [f"{name}@{self._configs[t].name}" if used.count(name) > 1 else name for t, name in self.lookups]
        self.widths = [self._configs[t].embedding_dim for t, _ in self.lookups]
        # Has no value. It is here so that whoever freezes a model by its parameters freezes the rows too.
        self.anchor = nn.Parameter(torch.zeros(0))

    def embedding_bag_configs(self) -> list[EmbeddingBagConfig]:
        return self._configs

    @property
    def is_trained(self) -> bool:
        """Whether rows that are looked up now are to be changed by it."""
        return self.training and self.anchor.requires_grad

    def forward(self, features: Features) -> KeyedTensor:
        pooled = self._job.look_up(self, features, trains=self.is_trained and torch.is_grad_enabled())
        return KeyedTensor(self._names, self.widths, pooled.to(features.values().device))

    def extra_repr(self) -> str:
        return ", ".join(f"{c.name} [{c.num_embeddings}, {c.embedding_dim}]" for c in self._configs)

    # Rows are not parameters: checkpoints of the job have them.

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        for index, config in enumerate(self._configs):
            destination[f"{prefix}embedding_bags.{config.name}.weight"] = self._job.read_weights(self.specs[index].name)

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *args: Any) -> None:
        missing_keys, unexpected_keys, error_msgs = args[2], args[3], args[4]
        wanted = {f"{prefix}embedding_bags.{config.name}.weight": config for config in self._configs}
        unexpected_keys += [key for key in state_dict if key.startswith(prefix) and key not in wanted]
        for key, config in wanted.items():
            if key not in state_dict:
                missing_keys.append(key)
                continue
            shape = (config.num_embeddings, config.embedding_dim)
            if tuple(state_dict[key].shape) != shape:
                error_msgs.append(f"{key} is {tuple(state_dict[key].shape)}, the table is {shape}")
                continue
            self._job.write_weights(config.name, state_dict[key])
