"""The dense part of a DLRM: bottom network, dot interaction, top network.

Embeddings come from outside, already pooled, as one matrix: where rows live is not the model's business. The
networks are ordinary torch modules; only the interaction has a hand-written backward, because automatic
differentiation scatters into a zeroed square per sample and costs twice as much.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from regrow.nn.layers import check_inputs, make_network
from regrow.nn.presets import ModelConfig


class DLRM(nn.Module):
    """Maps (dense [B, dense_features], embeddings [B, tables * dim]) to logits [B]."""

    def __init__(
        self,
        *,
        dim: int,
        bottom: Sequence[int],
        top: Sequence[int],
        tables: int = 26,
        dense_features: int = 13,
        seed: int = 0,
    ) -> None:
        super().__init__()
        if not bottom or bottom[-1] != dim:
            raise ValueError(f"bottom {list(bottom)} must end with the embedding width {dim}")
        if not top or top[-1] != 1:
            raise ValueError(f"top {list(top)} must end with 1, the logit")
        if tables < 1:
            raise ValueError(f"a DLRM needs at least one table, not {tables}")
        self.dim = dim
        self.tables = tables
        self.dense_features = dense_features
        pairs = (tables + 1) * tables // 2
        generator = torch.Generator().manual_seed(seed)
        self.bottom = make_network(dense_features, bottom, generator, relu_last=True)
        self.top = make_network(dim + pairs, top, generator, relu_last=False)
        pair_index, gradient_index = _interaction_indices(vectors=tables + 1, dim=dim)
        # Not part of the state: both follow from the shape.
        self.register_buffer("pair_index", pair_index, persistent=False)
        self.register_buffer("gradient_index", gradient_index, persistent=False)

    @classmethod
    def from_config(cls, config: ModelConfig, *, seed: int = 0) -> DLRM:
        return cls(
            dim=config.dim,
            bottom=config.bottom,
            top=config.top,
            tables=config.tables,
            dense_features=config.dense_features,
            seed=seed,
        )

    def forward(self, dense: Tensor, embeddings: Tensor) -> Tensor:
        check_inputs(dense, embeddings, tables=self.tables, width=self.dim)
        bottom = self.bottom(dense)
        crossed = Interaction.apply(bottom, embeddings, self.pair_index, self.gradient_index)
        logits: Tensor = self.top(crossed).squeeze(1)
        return logits


class Interaction(torch.autograd.Function):
    """[bottom | dot products of every two of (bottom, embedding 0, embedding 1, ...)], without self products.

    The pairs are the strictly lower triangle, row by row: (1,0), (2,0), (2,1), ... .
    """

    @staticmethod
    def forward(ctx: Any, bottom: Tensor, embeddings: Tensor, pair_index: Tensor, gradient_index: Tensor) -> Tensor:
        batch, dim = bottom.shape
        vectors = torch.cat([bottom, embeddings], dim=1).view(batch, -1, dim)
        products = torch.bmm(vectors, vectors.transpose(1, 2)).view(batch, -1)
        ctx.save_for_backward(vectors, gradient_index)
        # index_select on the flat square: advanced indexing takes four times as long for the same bytes.
        return torch.cat([bottom, products.index_select(1, pair_index)], dim=1)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, None, None]:
        (gradient,) = gradients
        vectors, gradient_index = ctx.saved_tensors
        batch, count, dim = vectors.shape
        # d(v_i . v_j) reaches both v_i and v_j: the symmetric square times the vectors is the whole gradient.
        square = gradient.index_select(1, gradient_index).view(batch, count, count)
        square.diagonal(dim1=1, dim2=2).zero_()
        # Two products rather than one: the embeddings' part then is contiguous, ready to be sent.
        to_embeddings = torch.bmm(square[:, 1:], vectors).view(batch, -1)
        to_bottom = torch.bmm(square[:, :1], vectors).view(batch, dim).add_(gradient[:, :dim])
        return to_bottom, to_embeddings, None, None


def _interaction_indices(*, vectors: int, dim: int) -> tuple[Tensor, Tensor]:
    """Where each pair is in the flat square, and where each cell of the square is in [bottom | pairs]."""
    low, high = torch.tril_indices(vectors, vectors, offset=-1)
    # The diagonal points at column 0, a value of no meaning there: backward zeroes it.
    gradient_index = torch.zeros(vectors, vectors, dtype=torch.int64)
    gradient_index[low, high] = gradient_index[high, low] = dim + torch.arange(len(low))
    return low * vectors + high, gradient_index.view(-1)
