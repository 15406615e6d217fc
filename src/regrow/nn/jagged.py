"""One feature of a batch: as many values for each sample as its length says."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from regrow.nn.embedding import Features


class JaggedTensor:
    """Vectors of a feature, sample after sample, as in TorchRec: `values` [sum of lengths, width]."""

    def __init__(self, values: Tensor, lengths: Tensor) -> None:
        if int(lengths.sum()) != len(values):
            raise ValueError(f"the lengths add up to {int(lengths.sum())}, but there are {len(values)} values")
        self._values = values
        self._lengths = lengths

    def values(self) -> Tensor:
        return self._values

    def lengths(self) -> Tensor:
        return self._lengths

    def offsets(self) -> Tensor:
        """Where each sample begins, and the end of the last."""
        start = torch.zeros(1, dtype=torch.int64, device=self._lengths.device)
        return torch.cat([start, self._lengths.cumsum(0, dtype=torch.int64)])

    def to_dense(self) -> list[Tensor]:
        """The vectors of each sample."""
        return list(self._values.split(self._lengths.tolist()))

    def to_padded_dense(self, desired_length: int | None = None, padding_value: float = 0.0) -> Tensor:
        """[samples, length, width]: longer ones are cut, shorter ones filled up."""
        longest = int(self._lengths.max()) if self._lengths.numel() else 0
        length = longest if desired_length is None else desired_length
        sample = _number_samples(self._lengths)
        place = torch.arange(len(self._values), device=self._values.device) - self.offsets()[:-1][sample]
        kept = place < length
        shape = (self._lengths.numel(), length, *self._values.shape[1:])
        padded = self._values.new_full(shape, padding_value)
        return padded.index_put((sample[kept], place[kept]), self._values[kept])

    def __repr__(self) -> str:
        return f"JaggedTensor({self._lengths.numel()} samples, values {list(self._values.shape)})"


@dataclasses.dataclass(frozen=True, slots=True)
class Part:
    """One feature of several."""

    lengths: Tensor
    weights: Tensor | None

    def pool(self, rows: Tensor) -> Tensor:
        """The weighted sum of each sample's rows."""
        assert self.weights is not None
        pooled = rows.new_zeros(self.lengths.numel(), rows.shape[1])
        weighed = rows * self.weights.to(rows.dtype).unsqueeze(1)
        return pooled.index_add(0, _number_samples(self.lengths), weighed)


def split_features(features: Features) -> dict[str, Part]:
    """Lengths and weights of each feature, by its name."""
    keys = list(features.keys())
    lengths = features.lengths().reshape(len(keys), -1)
    weights: Tensor | None = getattr(features, "weights_or_none", lambda: None)()
    counts: list[int] = lengths.sum(dim=1).tolist()
    split = [None] * len(keys) if weights is None else weights.split(counts)
    return {key: Part(lengths[at], split[at]) for at, key in enumerate(keys)}


def pool_weighted(features: Features, rows: Sequence[tuple[str, Tensor]]) -> Tensor:
    """Of each feature the weighted sum of each sample's rows, side by side."""
    parts = split_features(features)
    return torch.cat([parts[name].pool(each) for name, each in rows], dim=1)


def _number_samples(lengths: Tensor) -> Tensor:
    """The sample of each value."""
    return torch.repeat_interleave(torch.arange(lengths.numel(), device=lengths.device), lengths.long())
