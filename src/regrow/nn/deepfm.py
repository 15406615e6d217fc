"""DeepFM: a factorization machine and a deep network on the same embeddings.

A row is a vector and one more number, the weight of its id alone: both are looked up at once. Dense features become one
more vector, by the bottom network. The pairs are summed in time linear in the vectors:
sum over i < j of <v_i, v_j> is half of |sum v|^2 - sum |v|^2.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from regrow.nn.layers import check_inputs, make_linear, make_network
from regrow.nn.presets import ModelConfig


class DeepFM(nn.Module):
    """Maps (dense [B, dense_features], embeddings [B, tables * (dim + 1)]) to logits [B]."""

    def __init__(self, config: ModelConfig, *, seed: int = 0) -> None:
        super().__init__()
        self.tables, self.dim = config.tables, config.dim
        generator = torch.Generator().manual_seed(seed)
        self.linear = make_linear(config.dense_features, 1, generator)
        self.bottom = make_network(config.dense_features, config.bottom, generator, relu_last=True)
        self.top = make_network((config.tables + 1) * config.dim, config.top, generator, relu_last=False)

    def forward(self, dense: Tensor, embeddings: Tensor) -> Tensor:
        check_inputs(dense, embeddings, tables=self.tables, width=self.dim + 1)
        rows = embeddings.view(-1, self.tables, self.dim + 1)
        alone = rows[:, :, -1].sum(1) + self.linear(dense).squeeze(1)
        vectors = torch.cat([self.bottom(dense).unsqueeze(1), rows[:, :, :-1]], dim=1)
        pairs = 0.5 * (vectors.sum(1).square() - vectors.square().sum(1)).sum(1)
        logits: Tensor = alone + pairs + self.top(vectors.flatten(1)).squeeze(1)
        return logits
