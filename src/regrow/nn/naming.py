"""What a job's parameters are called in the script's model, for those who read its checkpoints."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from regrow.checkpoint.model_names import ModelNames
from regrow.nn.dense import FlatTable
from regrow.nn.job_embedding import JobCollection


def name_model(
    module: nn.Module, collections: Sequence[JobCollection], dense: FlatTable | None, buffers: FlatTable | None
) -> ModelNames:
    """`module`: what was given to `job.dense`. Tables of collections that are not in it have no name there."""
    tables: dict[str, str] = {}
    for path, each in module.named_modules():
        if isinstance(each, JobCollection) and each in collections:
            front = f"{path}." if path else ""
            tables |= {config.name: f"{front}{each.kind}.{config.name}.weight" for config in each.configs}
    return ModelNames(
        tables=tables,
        dense=() if dense is None else dense.shapes,
        buffers=() if buffers is None else buffers.shapes,
    )
