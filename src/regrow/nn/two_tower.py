"""Two towers, as for retrieval: one for whoever asks, one for what is offered; the logit is their dot product.

Each tower reads features of its own alone, so vectors of all items can be computed once and searched.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from regrow.nn.layers import check_inputs, make_network
from regrow.nn.presets import ModelConfig


class TwoTower(nn.Module):
    """Maps (dense [B, dense_features], embeddings [B, tables * dim]) to logits [B].

    The first `query_tables` tables, and the dense features, are of the query; the others of the item.
    """

    def __init__(self, config: ModelConfig, *, seed: int = 0) -> None:
        super().__init__()
        self.tables, self.dim = config.tables, config.dim
        self.query_width = config.query_tables * config.dim
        generator = torch.Generator().manual_seed(seed)
        item_width = (config.tables - config.query_tables) * config.dim
        self.query = make_network(config.dense_features + self.query_width, config.bottom, generator, relu_last=False)
        self.item = make_network(item_width, config.top, generator, relu_last=False)
        self.scale = 1.0 / math.sqrt(config.top[-1])

    def forward(self, dense: Tensor, embeddings: Tensor) -> Tensor:
        check_inputs(dense, embeddings, tables=self.tables, width=self.dim)
        query = self.query(torch.cat([dense, embeddings[:, : self.query_width]], dim=1))
        item = self.item(embeddings[:, self.query_width :])
        logits: Tensor = (query * item).sum(1) * self.scale
        return logits
