"""Embedding tables of a job: what TorchRec's collections are to a model, with their rows on the servers.

The job asks for rows, a batch at a time and ahead of their use; here a batch's rows are found again when the model is
called with its features. Bags are pooled where the rows arrive (`EmbeddingBagCollection`); sequences, and bags with a
weight for each id, get the row of every id. `eval()`, `torch.no_grad()` and `requires_grad_(False)` freeze the rows, as
they do anywhere else in torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from regrow.core.job import TableSpec
from regrow.errors import RegrowError, UserError
from regrow.nn import refusals
from regrow.nn.embedding import (
    EmbeddingBagConfig,
    EmbeddingConfig,
    Features,
    KeyedTensor,
    load_tables,
    make_table_spec,
    name_lookups,
)
from regrow.nn.jagged import JaggedTensor, pool_weighted, split_features
from regrow.nn.optimizer import Optimizers, choose_optimizers

if TYPE_CHECKING:
    from regrow.nn.job import Job


class JobCollection(nn.Module):
    """Tables of a job, and the features that look up in them."""

    is_expanded = False  # whether rows are wanted one by one
    kind = ""  # what TorchRec calls its tables in a state_dict

    def __init__(self, job: Job, tables: Sequence[EmbeddingBagConfig | EmbeddingConfig], optimizer: Optimizers) -> None:
        super().__init__()
        if not tables:
            raise ValueError("a collection needs at least one table")
        self._job = job
        self.configs = list(tables)
        for config in self.configs:
            refusals.check_table(config)
        rules = choose_optimizers(optimizer, [config.name for config in self.configs])
        self.specs: list[TableSpec] = list(map(make_table_spec, self.configs, rules))
        # (table within this collection, feature), in the order of the output.
        self.lookups = [(t, name) for t, config in enumerate(self.configs) for name in config.feature_names]
        used = [name for _, name in self.lookups]
        self._names = name_lookups(used, [self.configs[t].name for t, _ in self.lookups])
        self.widths = [self.configs[t].embedding_dim for t, _ in self.lookups]
        # Has no value. It is here so that whoever freezes a model by its parameters freezes the rows too.
        self.anchor = nn.Parameter(torch.zeros(0))

    @property
    def device(self) -> torch.device:
        """Where the model around it is. Rows are put where the features are."""
        return self.anchor.device

    @property
    def is_trained(self) -> bool:
        """Whether rows that are looked up now are to be changed by it."""
        return self.training and self.anchor.requires_grad

    def set_learning_rate(self, rate: float, table: str | None = None) -> None:
        """Of all tables of this collection, or of one, from the next loop on."""
        names = [config.name for config in self.configs]
        if table is not None and table not in names:
            raise UserError(f"the collection has no table {table!r}", hint=f"it has {', '.join(names)}")
        for name in names if table is None else [table]:
            self._job.set_learning_rate(rate, name)

    def __deepcopy__(self, memo: Any) -> Any:
        raise RegrowError(refusals.COPIED_JOB, hint=refusals.COPIED_JOB_HINT)

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise RegrowError(refusals.COPIED_JOB, hint=refusals.COPIED_JOB_HINT)

    def extra_repr(self) -> str:
        return ", ".join(f"{c.name} [{c.num_embeddings}, {c.embedding_dim}]" for c in self.configs)

    def _look_up(self, features: Features) -> list[Tensor]:
        refusals.refuse_half()
        found = self._job.look_up(self, features, trains=self.is_trained and torch.is_grad_enabled())
        return [rows.to(features.values().device) for rows in found]

    # Rows are not parameters: checkpoints of the job have them.

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        for config in self.configs:
            destination[f"{prefix}{self.kind}.{config.name}.weight"] = self._job.read_weights(config.name)

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *args: Any) -> None:
        front = f"{prefix}{self.kind}."
        load_tables(self.configs, front, state_dict, prefix, args, self._job.write_weights)


class JobEmbeddingBagCollection(JobCollection):
    """Pooled rows. Made by `Job.embedding_bag_collection`."""

    kind = "embedding_bags"

    def __init__(
        self,
        job: Job,
        tables: Sequence[EmbeddingBagConfig],
        optimizer: Optimizers,
        *,
        is_weighted: bool = False,
    ) -> None:
        super().__init__(job, tables, optimizer)
        self.is_expanded = is_weighted
        if is_weighted:
            refusals.check_sums(tables)

    def embedding_bag_configs(self) -> list[EmbeddingBagConfig | EmbeddingConfig]:
        return self.configs

    def is_weighted(self) -> bool:
        """Whether every id has a weight, which its row is multiplied with."""
        return self.is_expanded

    @torch.compiler.disable  # the job and its sockets are not to be traced: a compiled model is interrupted here
    def forward(self, features: Features) -> KeyedTensor:
        if not self.is_expanded:
            refusals.check_unweighted(features)
            (pooled,) = self._look_up(features)
            return KeyedTensor(self._names, self.widths, pooled)
        refusals.check_weighted(features)
        names = [name for _, name in self.lookups]
        pooled = pool_weighted(features, list(zip(names, self._look_up(features), strict=True)))
        return KeyedTensor(self._names, self.widths, pooled)


class JobEmbeddingCollection(JobCollection):
    """The row of every id. Made by `Job.embedding_collection`."""

    kind = "embeddings"
    is_expanded = True

    def embedding_configs(self) -> list[EmbeddingBagConfig | EmbeddingConfig]:
        return self.configs

    @torch.compiler.disable  # the job and its sockets are not to be traced: a compiled model is interrupted here
    def forward(self, features: Features) -> dict[str, JaggedTensor]:
        refusals.check_unweighted(features)
        parts = split_features(features)
        rows = self._look_up(features)
        return {
            name: JaggedTensor(values, parts[feature].lengths)
            for name, (_, feature), values in zip(self._names, self.lookups, rows, strict=True)
        }
