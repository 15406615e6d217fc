"""The rows of one batch: asked for, pooled for the model, and their gradients on the way back.

All collections of a job share one plan for each batch, so a step is one pull and one push, however many collections and
tables there are. What is pooled is one matrix [samples, widths of all features]; each collection sees its own columns.
Rows that are wanted one by one (sequences, weighted bags) are a matrix for each feature, [ids, width]. All of these are
leaves of autograd: after backward their gradients are what is to be pushed, however often and in whatever way the model
used them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from regrow.nn.embedding import Features
from regrow.runtime.client import Ticket

DEPTH_MAX = 4  # of containers within a batch in which features are looked for


POOLED = -1  # in the place of a feature's number


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Part:
    """One batch of a step. `sources` are the features that it was planned with."""

    sources: list[Features]
    size: int  # samples
    counts: Sequence[int]  # ids of each feature that is looked up


@dataclasses.dataclass(slots=True, eq=False)
class Lookup:
    """The rows of one step: of one batch, or of several whose gradients are one push."""

    ticket: Ticket
    width: int
    parts: list[Part]
    step: int = 0  # 0: only to be read
    expanded: Sequence[tuple[int, int]] = ()  # features whose rows are wanted one by one: (number in the plan, width)
    at: int = 0  # the part that the model is called with
    trained: set[int] = dataclasses.field(default_factory=set)  # collections that were asked for rows to train
    _leaves: dict[int, list[Tensor]] = dataclasses.field(default_factory=dict)  # of each part

    @property
    def plan(self) -> Any:
        return self.ticket.plan

    @property
    def size(self) -> int:
        return sum(part.size for part in self.parts)

    def pool(self) -> Tensor:
        """[samples, width], made once; a leaf that wants a gradient, unless it is only read."""
        if POOLED not in self._leaves:
            pooled = torch.empty(self.size, self.width)
            self.plan.pool(self.ticket.wait(), pooled.numpy())
            self._keep(POOLED, pooled)
        return self._leaves[POOLED][self.at]

    def expand(self, feature: int, width: int) -> Tensor:
        """[ids of the feature, width], as `pool`."""
        if feature not in self._leaves:
            vectors = torch.empty(self.plan.expanded_floats(feature) // width, width)
            self.plan.expand(feature, self.ticket.wait(), vectors.numpy())
            self._keep(feature, vectors)
        return self._leaves[feature][self.at]

    def _keep(self, feature: int, values: Tensor) -> None:
        counts = self._count(feature)
        pieces = [values] if len(counts) == 1 else [piece.detach() for piece in values.split(counts)]
        self._leaves[feature] = [piece.requires_grad_(self.step > 0) for piece in pieces]

    def _count(self, feature: int) -> list[int]:
        return [part.size if feature == POOLED else int(part.counts[feature]) for part in self.parts]

    def write_grads(self, grads: np.ndarray[Any, Any]) -> None:
        """What backward left for the rows, summed by row; zeros if the model did not use them."""
        if self.width:
            self.plan.unpool(self._take_grads(POOLED, self.width), grads)
        for feature, width in self.expanded:
            self.plan.collapse(feature, self._take_grads(feature, width), grads)

    def _take_grads(self, feature: int, width: int) -> np.ndarray[Any, Any]:
        counts = self._count(feature)
        leaves = self._leaves.get(feature)
        found = [None] * len(counts) if leaves is None else [leaf.grad for leaf in leaves]
        grads = [torch.zeros(n, width) if grad is None else grad for n, grad in zip(counts, found, strict=True)]
        whole: np.ndarray[Any, Any] = (grads[0] if len(grads) == 1 else torch.cat(grads)).contiguous().numpy()
        return whole

    def list_leaves(self, feature: int) -> list[Tensor]:
        """What the model was given of a feature, or of all that are POOLED, for each part; none if it did not ask."""
        return self._leaves.get(feature, [])

    def forget_grads(self) -> None:
        """As if backward had not been, for the part at hand."""
        for leaves in self._leaves.values():
            leaves[self.at].grad = None

    def is_of(self, features: Features) -> bool:
        """Whether these are the features that it was planned with: themselves, or a copy on another device."""
        sources = self.parts[self.at].sources
        if any(source is features for source in sources):
            return True
        same = [s for s in sources if list(s.keys()) == list(features.keys())]
        return any(
            torch.equal(s.values().cpu(), features.values().cpu())
            and torch.equal(s.lengths().cpu(), features.lengths().cpu())
            for s in same
        )


def join_ids(
    sources: Sequence[list[Features]], wanted: Sequence[str]
) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any], list[Part]]:
    """Ids and lengths of the wanted features over several batches as if they were one, and what is whose."""
    read = [read_ids(each, wanted) for each in sources]
    parts: list[Part] = []
    for each, (_, lengths, size) in zip(sources, read, strict=True):
        counts = lengths.reshape(len(wanted), size).sum(axis=1, dtype=np.int64) if size else [0] * len(wanted)
        parts.append(Part(each, size, counts))
    if len(read) == 1:
        return read[0][0], read[0][1], parts
    ends = [np.cumsum(part.counts) for part in parts]
    values: list[Any] = [np.zeros(0, np.int64)]
    lengths_of: list[Any] = [np.zeros(0, np.int32)]
    for feature in range(len(wanted)):
        for part, end, (ids, lengths, size) in zip(parts, ends, read, strict=True):
            values.append(ids[end[feature] - part.counts[feature] : end[feature]])
            lengths_of.append(lengths[feature * size : (feature + 1) * size])
    return np.concatenate(values), np.concatenate(lengths_of), parts


def read_ids(
    sources: Sequence[Features], wanted: Sequence[str]
) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any], int]:
    """Ids and lengths of the wanted features in their order, and the number of samples; batches may carry others."""
    size = _count_samples(sources[0]) if sources else 0
    if not wanted:
        return np.zeros(0, np.int64), np.zeros(0, np.int32), size
    known = [list(source.keys()) for source in sources]
    if len(sources) == 1 and known[0] == list(wanted):
        return _read_values(sources[0]), _read_lengths(sources[0]), size
    parts: dict[str, tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]] = {}
    for source, keys in zip(sources, known, strict=True):
        if _count_samples(source) != size:
            raise ValueError(f"features of one batch have {size} and {_count_samples(source)} samples")
        for key, part in zip(keys, _split(source, len(keys), size), strict=True):
            parts.setdefault(key, part)
    if missing := [name for name in wanted if name not in parts]:
        raise KeyError(f"the batch has no feature {missing[0]!r}; it has {list(parts)}")
    values = [parts[name][0] for name in wanted]
    lengths = [parts[name][1] for name in wanted]
    return np.concatenate(values), np.concatenate(lengths), size


def _split(source: Features, keys: int, size: int) -> Iterator[tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]]:
    values, lengths = _read_values(source), _read_lengths(source).reshape(keys, size)
    ends = np.cumsum(lengths.sum(axis=1, dtype=np.int64))
    for index, end in enumerate(ends.tolist()):
        yield values[end - int(lengths[index].sum()) : end], lengths[index]


def _count_samples(source: Features) -> int:
    return int(source.lengths().numel()) // max(1, len(list(source.keys())))


def _read_values(source: Features) -> np.ndarray[Any, Any]:
    values = source.values()
    if values.is_floating_point():
        raise TypeError(f"ids of rows are whole numbers; the features {list(source.keys())} have {values.dtype}")
    found: np.ndarray[Any, Any] = values.detach().cpu().to(torch.int64).contiguous().numpy()
    if found.size != int(source.lengths().sum()):
        raise ValueError(f"the lengths add up to {int(source.lengths().sum())}, but there are {found.size} ids")
    return found


def _read_lengths(source: Features) -> np.ndarray[Any, Any]:
    lengths: np.ndarray[Any, Any] = source.lengths().detach().cpu().to(torch.int32).contiguous().numpy()
    return lengths


def find_features(batch: Any) -> list[Features]:
    """Everything in a batch that looks like a KeyedJaggedTensor: itself, in its attributes, or in containers."""
    return list(_find(batch, 0))


def _find(value: Any, depth: int) -> Iterable[Features]:
    if isinstance(value, Tensor | str | bytes | np.ndarray) or value is None or depth > DEPTH_MAX:
        return
    if all(callable(getattr(value, name, None)) for name in ("keys", "values", "lengths")):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _find(item, depth + 1)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _find(item, depth + 1)
    elif hasattr(value, "__dict__") or hasattr(value, "__slots__"):
        names = [*getattr(value, "__dict__", ()), *getattr(type(value), "__slots__", ())]
        for name in names:
            yield from _find(getattr(value, name, None), depth + 1)
