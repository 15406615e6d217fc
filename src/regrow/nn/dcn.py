"""DCN-v2: explicit crosses of all inputs beside a deep network.

A cross layer multiplies the input, element by element, with a linear map of what came before, so n layers make all
products of up to n + 1 inputs. Both parts read the same vector: dense features and the embeddings of all tables.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from regrow.nn.layers import check_inputs, make_linear, make_network
from regrow.nn.presets import ModelConfig


class DCN(nn.Module):
    """Maps (dense [B, dense_features], embeddings [B, tables * dim]) to logits [B]."""

    def __init__(self, config: ModelConfig, *, seed: int = 0) -> None:
        super().__init__()
        self.tables, self.dim = config.tables, config.dim
        width = config.dense_features + config.tables * config.dim
        generator = torch.Generator().manual_seed(seed)
        self.crosses = nn.ModuleList(make_linear(width, width, generator) for _ in range(config.cross_layers))
        self.deep = make_network(width, config.bottom, generator, relu_last=True)
        self.top = make_network(width + config.bottom[-1], config.top, generator, relu_last=False)

    def forward(self, dense: Tensor, embeddings: Tensor) -> Tensor:
        check_inputs(dense, embeddings, tables=self.tables, width=self.dim)
        inputs = torch.cat([dense, embeddings], dim=1)
        crossed = inputs
        for cross in self.crosses:
            crossed = torch.addcmul(crossed, inputs, cross(crossed))
        logits: Tensor = self.top(torch.cat([crossed, self.deep(inputs)], dim=1)).squeeze(1)
        return logits
