"""Agreement between the ranks of torch.distributed, where there are several. Alone, every answer is one's own.

Two gloo groups: one for the thread that trains, one for the thread that writes. Within a group all ranks make the same
calls in the same order; calls of the two threads may come in any order.
"""

from __future__ import annotations

from typing import Any, TypeVar

import torch.distributed as dist

from regrow.checkpoint.manifest import shard_name

T = TypeVar("T")


class Ranks:
    """Made by every rank at the same point, once torch.distributed is up."""

    def __init__(self) -> None:
        up = dist.is_available() and dist.is_initialized()
        self.count = dist.get_world_size() if up else 1
        self.rank = dist.get_rank() if up else 0
        self._groups: list[Any] = [dist.new_group(backend="gloo") for _ in range(2)] if self.several else []

    @property
    def several(self) -> bool:
        return self.count > 1

    @property
    def first(self) -> bool:
        return self.rank == 0

    def shard(self, division: object) -> str:
        """This rank's name among those that have divided the rows like this."""
        return shard_name(self.rank, self.count, division)

    def first_says(self, value: T) -> T:
        """What the first rank said."""
        if not self.several:
            return value
        said = [value]
        dist.broadcast_object_list(said, src=0, group=self._groups[0])
        return said[0]

    def gather(self, value: T, *, writing: bool = False) -> list[T]:
        """What all said, by rank. `writing`: asked by the thread that writes."""
        if not self.several:
            return [value]
        said: list[Any] = [None] * self.count
        dist.all_gather_object(said, value, group=self._groups[1 if writing else 0])
        return said
