"""Which rows a batch needs, and where they come to lie: the routers of a job's collections.

A step asks for the rows of all collections that its batch has features for, and for all dense parameters; an
evaluation for all rows, and one that looks at a single collection for its own. `chosen` says of each collection whether
it is in. What is pushed may be less than what was pulled: rows that were only looked at stay as they are.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
from torch import Tensor

from regrow.core.job import JobSpec
from regrow.core.session import Plan
from regrow.nn.embedding import Features
from regrow.nn.job_embedding import JobCollection
from regrow.nn.routing import explain_id, make_router

Chosen = tuple[bool, ...]
Column = tuple[str, bool, int]  # of a feature: its table, whether its rows are wanted one by one, and how wide they are
Numbers = np.ndarray[Any, Any]


@dataclasses.dataclass(frozen=True, slots=True)
class Rest:
    """A plan without some of its tables."""

    counts: Numbers
    slots: Numbers
    row_start: Numbers
    float_start: Numbers

    @property
    def floats(self) -> int:
        return int(self.float_start[-1])


class Routes:
    """Routers, made when they are first wanted."""

    def __init__(self, spec: JobSpec, collections: Sequence[JobCollection], static: Sequence[int]) -> None:
        self.everything: Chosen = (True,) * len(collections)
        self._spec = spec
        self._collections = collections
        self._static = list(static)  # the numbers of dense tables
        self._routers: dict[tuple[Chosen, bool], Any] = {}

    def find(self, chosen: Chosen, *, static: bool) -> Any:
        """The router of these collections, with the dense tables or without."""
        if (chosen, static) not in self._routers:
            owners: list[int] = []
            mean = [False] * len(self._spec.tables)
            expanded = list(mean)
            start = 0
            for collection, is_chosen in zip(self._collections, chosen, strict=True):
                owners += [start + t for t, _ in collection.lookups] if is_chosen else []
                for t, config in enumerate(collection.configs):
                    pooling = getattr(config, "pooling", None)
                    mean[start + t] = getattr(pooling, "value", pooling) == "MEAN"
                    expanded[start + t] = collection.is_expanded
                start += len(collection.specs)
            self._routers[chosen, static] = make_router(
                self._spec,
                feature_tables=owners,
                static_tables=self._static if static else [],
                mean_pooling=mean,
                expanded=expanded,
            )
        return self._routers[chosen, static]

    def plan(self, chosen: Chosen, ids: Numbers, lengths: Numbers, size: int, *, static: bool) -> Any:
        """Which rows of which server a batch needs. UserError for an id that its table has not."""
        try:
            return self.find(chosen, static=static).plan(ids, lengths, size)
        except IndexError as error:
            tables = [table for table, _, _ in self.list_columns(chosen)]
            raise explain_id(error, self.list_features(chosen), tables) from None

    def choose(self, sources: Sequence[Sequence[Features]]) -> Chosen:
        """The collections that a step may train, and the frozen ones that its batches have features for."""
        if all(collection.anchor.requires_grad for collection in self._collections):
            return self.everything
        known: set[str] = set()
        for source in sources[0]:
            known.update(source.keys())
        return tuple(
            collection.anchor.requires_grad or all(name in known for _, name in collection.lookups)
            for collection in self._collections
        )

    def leave_out(self, chosen: Chosen, trained: Chosen, plan: Any, grads: Numbers) -> tuple[Plan, Numbers]:
        """What is to be pushed of a plan for the chosen collections and its gradients: the rows of those that are
        trained, and what belongs to no collection."""
        if trained == chosen:
            return plan, grads
        left = np.zeros(len(self._spec.tables), bool)
        start = 0
        for collection, is_chosen, is_trained in zip(self._collections, chosen, trained, strict=True):
            left[start : start + len(collection.specs)] = is_chosen and not is_trained
            start += len(collection.specs)
        dims = np.array([table.dim for table in self._spec.tables])
        counts = np.array(plan.counts)
        tables = np.repeat(np.tile(np.arange(len(dims)), len(counts)), counts.reshape(-1))  # of each row, as they lie
        stays = ~left[tables]
        counts[:, left] = 0
        starts = [np.append(0, np.cumsum(sizes)) for sizes in (counts.sum(axis=1), (counts * dims).sum(axis=1))]
        rest = Rest(counts, np.asarray(plan.slots)[stays], *starts)
        return rest, grads[np.repeat(stays, dims[tables])]

    def plan_nothing(self) -> Any:
        """Dense parameters alone."""
        router = self.find((False,) * len(self._collections), static=True)
        return router.plan(np.zeros(0, np.int64), None, 0)

    def list_features(self, chosen: Chosen) -> list[str]:
        pairs = zip(self._collections, chosen, strict=True)
        return [name for collection, is_chosen in pairs if is_chosen for _, name in collection.lookups]

    def list_columns(self, chosen: Chosen) -> list[Column]:
        """By the number of the feature in a plan."""
        mine = [each for each, is_chosen in zip(self._collections, chosen, strict=True) if is_chosen]
        return [
            (each.configs[t].name, each.is_expanded, each.configs[t].embedding_dim)
            for each in mine
            for t, _ in each.lookups
        ]

    def list_widths(self, chosen: Chosen) -> list[int]:
        """Of what is pooled, by collection."""
        if not chosen:
            return []
        pairs = zip(self._collections, chosen, strict=True)
        return [sum(each.widths) if is_chosen and not each.is_expanded else 0 for each, is_chosen in pairs]

    def take_columns(self, pooled: Tensor, chosen: Chosen, index: int) -> Tensor:
        """A collection's own part. All of it is not cut: the way back of a cut is a copy."""
        widths = self.list_widths(chosen)
        start = sum(widths[:index])
        return pooled if widths[index] == pooled.shape[1] else pooled[:, start : start + widths[index]]
