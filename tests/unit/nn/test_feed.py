"""Goal: each batch of an epoch is one worker's, all workers agree on whose, and a worker that goes on behind some steps
sees what it would have seen.

Method: small data sets whose samples are their own numbers; all workers' batches are put together again.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset, Sampler, WeightedRandomSampler

from regrow.errors import UserError
from regrow.nn.feed import Feed


class Numbers(Dataset[int]):
    def __init__(self, count: int) -> None:
        self.count = count
        self.read: list[int] = []

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> int:
        self.read.append(index)
        return index


class Stream(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(10))


def deal(loader: Any, *, worker: int = 0, workers: int = 1, skip: int = 0, **options: Any) -> list[Any]:
    """A worker's batches as lists, or None."""
    settings = {"epochs": 1, "seed": 7, "together": True, **options}
    feed = Feed(loader, worker=worker, workers=workers, **settings)
    feed.pass_over(skip, len)
    return [None if batch is None else list(map(int, batch)) for batch in feed.deal()]


class Drawn(Sampler[int]):
    """A sampler of somebody's own, which asks all generators there are."""

    def __len__(self) -> int:
        return 10

    def __iter__(self) -> Iterator[int]:
        return iter([(int(torch.randint(10, ())) + int(np.random.randint(10)) + random.randrange(10)) % 10] * 10)


def make_weighted(generator: torch.Generator | None) -> DataLoader[int]:
    sampler = WeightedRandomSampler([n + 1.0 for n in range(10)], 10, generator=generator)
    return DataLoader(Numbers(10), batch_size=2, sampler=sampler)


LOADERS = {
    "weighted": lambda: make_weighted(None),
    "weighted, by a generator": lambda: make_weighted(torch.Generator().manual_seed(5)),
    "drawn": lambda: DataLoader(Numbers(10), batch_size=2, sampler=Drawn()),
    "numbered": lambda: DataLoader(Numbers(10), batch_size=2),
    "shuffled": lambda: DataLoader(Numbers(10), batch_size=2, shuffle=True),
    "stream": lambda: DataLoader(Stream(), batch_size=2),
    "list": lambda: [torch.tensor([n, n + 1]) for n in range(0, 10, 2)],
}


DRAWN = ("weighted", "weighted, by a generator", "drawn")  # with samples that come twice, or not at all


@pytest.mark.parametrize("kind", LOADERS)
@pytest.mark.parametrize("workers", [1, 2, 3, 7])
def test_each_batch_is_dealt_once(kind: str, workers: int) -> None:
    hands = [deal(LOADERS[kind](), worker=worker, workers=workers) for worker in range(workers)]
    assert len({len(hand) for hand in hands}) == 1, "all workers make the same steps"
    batches = [batch for step in zip(*hands, strict=True) for batch in step if batch is not None]
    assert batches == deal(LOADERS[kind]())
    if kind not in DRAWN:
        assert sorted(number for batch in batches for number in batch) == list(range(10))


@pytest.mark.parametrize("kind", LOADERS)
def test_without_steps_together_nobody_has_an_empty_one(kind: str) -> None:
    hands = [deal(LOADERS[kind](), worker=worker, workers=3, together=False) for worker in range(3)]
    assert [len(hand) for hand in hands] == [2, 2, 1]


@pytest.mark.parametrize("kind", LOADERS)
@pytest.mark.parametrize("together", [True, False])
@pytest.mark.parametrize("worker", [0, 1])
def test_going_on_behind_some_steps(kind: str, together: bool, worker: int) -> None:
    options: dict[str, Any] = {"worker": worker, "workers": 2, "epochs": 3, "together": together}
    whole = deal(LOADERS[kind](), **options)
    for skip in range(len(whole) + 1):
        feed = Feed(LOADERS[kind](), seed=7, **options)
        feed.pass_over(skip, len)
        rest = [None if b is None else list(map(int, b)) for b in feed.deal()]
        assert rest == whole[skip:]
        assert feed.skipped == skip
        assert feed.samples_skipped == sum(len(batch) for batch in whole[:skip] if batch is not None)


@pytest.mark.parametrize("kind", ["numbered", "shuffled", "list"])
@pytest.mark.parametrize("together", [True, False])
def test_steps_are_counted_beforehand(kind: str, together: bool) -> None:
    for worker in range(3):
        feed = Feed(LOADERS[kind](), worker=worker, workers=3, epochs=2, seed=7, together=together)
        assert feed.count_steps() == len(list(feed.deal()))


def test_a_stream_has_no_end_that_is_known() -> None:
    feed = Feed(LOADERS["stream"](), worker=0, workers=1, epochs=1, seed=0, together=True)
    assert feed.count_steps() is None


def test_epochs_are_shuffled_by_the_seed() -> None:
    torch.manual_seed(1)
    first = deal(LOADERS["shuffled"](), epochs=2)
    torch.manual_seed(2)
    assert deal(LOADERS["shuffled"](), epochs=2) == first
    assert deal(LOADERS["shuffled"](), epochs=2, seed=8) != first
    assert first[:5] != first[5:], "each epoch has an order of its own"
    loops = [deal(LOADERS["shuffled"](), epochs_before=before) for before in (0, 1)]
    assert loops[0] + loops[1] == first, "also where each is a loop"


def test_only_own_batches_are_read() -> None:
    data = Numbers(10)
    deal(DataLoader(data, batch_size=2), worker=1, workers=2, skip=1)
    assert data.read == [6, 7]


def test_an_iterator_is_read_no_further_than_needed() -> None:
    numbers = iter(range(10))
    feed = Feed(numbers, worker=0, workers=2, epochs=1, seed=0, together=True)
    feed.pass_over(2, lambda batch: 1)
    assert next(numbers) == 4


def test_what_cannot_be_dealt_is_refused() -> None:
    data = Numbers(10)
    sampler: Any = DistributedSampler(data, num_replicas=2, rank=0)
    with pytest.raises(UserError, match="DistributedSampler"):
        deal(DataLoader(data, batch_size=2, sampler=sampler))
    with pytest.raises(UserError, match="only once"):
        deal(iter([1]), epochs=2)
    with pytest.raises(TypeError, match="iterate"):
        deal(5)
    with pytest.raises(ValueError, match="epochs"):
        deal([1], epochs=0)
