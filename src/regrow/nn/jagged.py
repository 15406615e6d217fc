"""Features of a batch: of each, as many values for a sample as its length says."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from regrow.nn import refusals

if TYPE_CHECKING:
    from regrow.nn.embedding import Features


def _find_offsets(lengths: Tensor) -> Tensor:
    start = torch.zeros(1, dtype=torch.int64, device=lengths.device)
    return torch.cat([start, lengths.cumsum(0, dtype=torch.int64)])


class JaggedTensor:
    """Ids of a feature, or their vectors, sample after sample, as in TorchRec: `values` [sum of lengths(, width)]."""

    def __init__(self, values: Tensor, lengths: Tensor, weights: Tensor | None = None) -> None:
        if int(lengths.sum()) != len(values):
            raise ValueError(f"the lengths add up to {int(lengths.sum())}, but there are {len(values)} values")
        self._values = values
        self._lengths = lengths
        self._weights = weights

    def values(self) -> Tensor:
        return self._values

    def lengths(self) -> Tensor:
        return self._lengths

    def offsets(self) -> Tensor:
        """Where each sample begins, and the end of the last."""
        return _find_offsets(self._lengths)

    def weights_or_none(self) -> Tensor | None:
        return self._weights

    def to_dense(self) -> list[Tensor]:
        """The values of each sample."""
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


class KeyedJaggedTensor:
    """Ids of several features for one batch: `values` feature after feature, `lengths` [features * batch]."""

    def __init__(self, keys: Sequence[str], values: Tensor, lengths: Tensor, weights: Tensor | None = None) -> None:
        self._keys = list(keys)
        self._values = values
        self._lengths = lengths
        self._weights = weights
        if not self._keys or lengths.numel() % len(self._keys):
            raise ValueError(f"{lengths.numel()} lengths cannot be shared by {len(self._keys)} features")
        if weights is not None and weights.shape != values.shape:
            raise ValueError(f"{weights.numel()} weights for {values.numel()} ids")
        refusals.check_features(values, lengths)

    @classmethod
    def from_lengths_sync(
        cls, keys: Sequence[str], values: Tensor, lengths: Tensor, weights: Tensor | None = None
    ) -> KeyedJaggedTensor:
        return cls(keys, values, lengths, weights)

    @classmethod
    def from_offsets_sync(
        cls, keys: Sequence[str], values: Tensor, offsets: Tensor, weights: Tensor | None = None
    ) -> KeyedJaggedTensor:
        refusals.check_features(values, offsets)
        return cls(keys, values, offsets[1:] - offsets[:-1], weights)

    def keys(self) -> list[str]:
        return self._keys

    def values(self) -> Tensor:
        return self._values

    def lengths(self) -> Tensor:
        return self._lengths

    def offsets(self) -> Tensor:
        """Where each bag begins among the values, and the end of the last: [features * batch + 1]."""
        return _find_offsets(self._lengths)

    def weights(self) -> Tensor:
        """One for each id; ValueError if there are none."""
        if self._weights is None:
            raise ValueError("the features have no weights")
        return self._weights

    def weights_or_none(self) -> Tensor | None:
        return self._weights

    def length_per_key(self) -> list[int]:
        """Ids of each feature."""
        counts: list[int] = self._lengths.reshape(len(self._keys), -1).sum(dim=1).tolist()
        return counts

    def to_dict(self) -> dict[str, JaggedTensor]:
        """Each feature by itself."""
        counts, size = self.length_per_key(), self.stride()
        values = self._values.split(counts)
        weights = [None] * len(counts) if self._weights is None else self._weights.split(counts)
        lengths = self._lengths.reshape(-1).split(size) if size else [self._lengths] * len(counts)
        return {key: JaggedTensor(*parts) for key, *parts in zip(self._keys, values, lengths, weights, strict=True)}

    def __getitem__(self, key: str) -> JaggedTensor:
        return self.to_dict()[key]

    @property
    def device(self) -> torch.device:
        return self._values.device

    def to(self, device: torch.device | str, non_blocking: bool = False) -> KeyedJaggedTensor:
        parts = (self._values, self._lengths, self._weights)
        moved = [None if part is None else part.to(device, non_blocking=non_blocking) for part in parts]
        return KeyedJaggedTensor(self._keys, *moved)  # type: ignore[arg-type]

    def pin_memory(self) -> KeyedJaggedTensor:
        """In memory that a device copies from directly; a `DataLoader` calls it if told to pin."""
        weights = None if self._weights is None else self._weights.pin_memory()
        return KeyedJaggedTensor(self._keys, self._values.pin_memory(), self._lengths.pin_memory(), weights)

    def stride(self) -> int:
        return self._lengths.numel() // len(self._keys)

    def __repr__(self) -> str:
        return f"KeyedJaggedTensor({self._keys}, batch {self.stride()}, {self._values.numel()} ids)"


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
