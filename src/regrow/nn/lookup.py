"""The rows of one batch: asked for, pooled for the model, and their gradients on the way back.

All collections of a job share one plan for each batch, so a step is one pull and one push, however many collections and
tables there are. What is pooled is one matrix [samples, widths of all features]; each collection sees its own columns.
It is a leaf of autograd: after backward its gradient is what is to be pushed, however often and in whatever way the
model used it.
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


@dataclasses.dataclass(slots=True, eq=False)
class Lookup:
    """One batch's rows. `sources` are the features that it was planned with."""

    ticket: Ticket
    size: int
    width: int
    sources: list[Features]
    step: int = 0  # 0: only to be read
    _pooled: Tensor | None = None

    @property
    def plan(self) -> Any:
        return self.ticket.plan

    def pool(self) -> Tensor:
        """[samples, width], made once; a leaf that wants a gradient, unless it is only read."""
        if self._pooled is None:
            pooled = torch.empty(self.size, self.width)
            self.plan.pool(self.ticket.wait(), pooled.numpy())
            self._pooled = pooled.requires_grad_(self.step > 0)
        return self._pooled

    def write_grads(self, grads: np.ndarray[Any, Any]) -> None:
        """What backward left for the rows, summed by row; zeros if the model did not use them."""
        grad = None if self._pooled is None else self._pooled.grad
        if grad is None:
            grad = torch.zeros(self.size, self.width)
        self.plan.unpool(grad.contiguous().numpy(), grads)

    def forget_grads(self) -> None:
        """As if backward had not been."""
        if self._pooled is not None:
            self._pooled.grad = None

    def is_of(self, features: Features) -> bool:
        """Whether these are the features that it was planned with: themselves, or a copy on another device."""
        if any(source is features for source in self.sources):
            return True
        same = [s for s in self.sources if list(s.keys()) == list(features.keys())]
        return any(
            torch.equal(s.values().cpu(), features.values().cpu())
            and torch.equal(s.lengths().cpu(), features.lengths().cpu())
            for s in same
        )


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
    if getattr(source, "weights_or_none", lambda: None)() is not None:
        raise ValueError("weighted features are not supported: pass a KeyedJaggedTensor without weights")
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
