"""From somebody's data loader to one worker's batches: who has which batch, and where to go on.

Batches are dealt like cards: batch b of an epoch goes to worker b % workers, and one batch of each worker is a step.
Every worker sees the same order, so nobody has to be told: a worker that takes a dead one's place needs one number, the
steps done. Where the last step of an epoch has fewer batches than workers, the others have none: synchronously they
take part in it with nothing.

A `DataLoader` over a data set with numbers is dealt by these numbers, so that a worker reads its own batches only; a
shuffling one is shuffled by the seed of the run, because torch's own order differs from process to process; so is what
other samplers draw. Data that
deals itself (`Dealing`) is asked for a worker's batches from a step on. Of anything else every worker reads all batches
and keeps its own, also those that were done before.
"""

from __future__ import annotations

import contextlib
import itertools
import random
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, RandomSampler
from torch.utils.data.distributed import DistributedSampler

from regrow.errors import UserError


@runtime_checkable
class Dealing(Protocol):
    """Data that knows which batches are whose, over all epochs, and finds any of them without reading those before."""

    def count_steps(self) -> int:
        """Steps of every worker; one that has fewer batches has none for the last."""

    def deal(self, *, worker: int, workers: int, done: int) -> tuple[Iterator[Any], int]:
        """The batches of a worker behind its first `done`, and how many samples were in those."""


class Feed:
    """The batches of one worker, over all epochs of a loop."""

    def __init__(
        self,
        loader: Iterable[Any] | Dealing,
        *,
        worker: int,
        workers: int,
        epochs: int,
        seed: int,
        together: bool,
        epochs_before: int = 0,
    ) -> None:
        """`together`: all workers make each step, also those that have no batch for it (None). `epochs_before`: of
        loops before this one, so that each is shuffled in its own way."""
        if epochs < 1:
            raise ValueError(f"epochs must be at least 1, not {epochs}")
        if isinstance(loader, Iterator):
            if epochs > 1:
                raise UserError(
                    f"{epochs} epochs of an iterator, which can be read only once",
                    hint="pass what makes it: a DataLoader, a list, an object with __iter__",
                )
        elif isinstance(loader, Dealing):
            if epochs > 1:
                raise UserError(f"{epochs} epochs of data that deals itself", hint="its own epochs are all there are")
        elif not isinstance(loader, Iterable):
            raise TypeError(f"a loop needs something to iterate over, not a {type(loader).__name__}")
        self.epochs = epochs
        self.skipped = 0  # steps that were passed over,
        self.samples_skipped = 0  # and the samples of this worker in them
        self._loader = loader
        self._worker = worker
        self._workers = workers
        self._seed = seed
        self._together = together
        self._numbered = loader if isinstance(loader, DataLoader) and _is_numbered(loader) else None
        self._epochs_before = epochs_before
        self._epoch = self._begun = 0  # of numbered data: where the next step is
        self._numbers: tuple[int, list[list[int]]] | None = None  # of an epoch: the samples of each batch
        self._dealing = loader if isinstance(loader, Dealing) else None
        self.is_read_whole = self._numbered is None and self._dealing is None  # by all workers, and successors again
        self._hands = self._deal_all() if self.is_read_whole else iter(())  # of any other: what is left

    def count_steps(self) -> int | None:
        """Steps of all epochs, where that is known beforehand."""
        if self._dealing is not None:
            return self._dealing.count_steps()
        try:
            batches = len(self._loader)  # type: ignore[arg-type]
        except TypeError:
            return None
        last = self._workers - 1 if self._together else self._workers - 1 - self._worker
        return self.epochs * ((batches + last) // self._workers)

    def pass_over(self, steps: int, measure: Callable[[Any], int]) -> None:
        """Leaves out so many steps that were done before, and counts them; `measure` says how many samples a batch
        has. Numbered data, and data that deals itself, is not read for it."""
        if self._dealing is not None:
            found, self.samples_skipped = self._dealing.deal(worker=self._worker, workers=self._workers, done=steps)
            # Who has no batch left takes part in the steps of others; how many there are, the loop knows.
            self._hands = itertools.chain(found, itertools.repeat(None)) if self._together else found
            self.skipped = steps
            return
        while self._numbered is not None and steps and self._epoch < self.epochs:
            mine, count = self._number_own()
            done = min(steps, count - self._begun)
            self.samples_skipped += sum(map(len, mine[self._begun : self._begun + done]))
            self.skipped += done
            steps -= done
            self._begun += done
            if self._begun == count:
                self._epoch, self._begun = self._epoch + 1, 0
        for mine in itertools.islice(self._hands, 0 if self._numbered is not None else steps):
            self.skipped += 1
            self.samples_skipped += 0 if mine is None else measure(mine)

    def deal(self) -> Iterator[Any]:
        """The batch of each step that is left, or None where only others have one."""
        yield from self._hands
        while self._numbered is not None and self._epoch < self.epochs:
            mine, count = self._number_own()
            begun, self._begun = self._begun, 0
            self._epoch += 1
            found = iter(_with_batches(self._numbered, mine[begun:])) if mine[begun:] else iter(())
            for _ in range(begun, count):
                yield next(found, None)

    def _deal_all(self) -> Iterator[Any]:
        """Reads everything, and keeps this worker's part of each step."""
        assert isinstance(self._loader, Iterable)
        for _ in range(self.epochs):
            batches = iter(self._loader)
            while hand := list(itertools.islice(batches, self._workers)):
                mine = hand[self._worker] if self._worker < len(hand) else None
                if mine is not None or self._together:
                    yield mine

    def _number_own(self) -> tuple[list[list[int]], int]:
        """The samples of this worker's batches in the present epoch, and how many steps that has."""
        assert self._numbered is not None
        if self._numbers is None or self._numbers[0] != self._epoch:  # once: a sampler may have a generator of its own
            epoch = self._epochs_before + self._epoch
            batches = list(_number_batches(self._numbered, seed=self._seed, epoch=epoch))
            self._numbers = self._epoch, batches
        batches = self._numbers[1]
        mine = batches[self._worker :: self._workers]
        return mine, -(-len(batches) // self._workers) if self._together else len(mine)


def _is_numbered(loader: DataLoader[Any]) -> bool:
    return not isinstance(loader.dataset, IterableDataset) and loader.batch_sampler is not None


def _number_batches(loader: DataLoader[Any], *, seed: int, epoch: int) -> Iterator[list[int]]:
    """The samples of every batch of an epoch: the same in every worker, and in every run with this seed."""
    batches: Any = loader.batch_sampler
    sampler: Any = getattr(batches, "sampler", None)
    if isinstance(sampler, DistributedSampler):
        raise UserError(
            "the loader has a DistributedSampler, but batches are dealt to workers here",
            hint="leave the sampler out (shuffle=True, or False), and every worker gets its own batches",
        )
    if type(batches) is BatchSampler and type(sampler) is RandomSampler:
        generator = torch.Generator().manual_seed(int(np.random.SeedSequence([seed, epoch]).generate_state(1)[0]))
        shuffled = RandomSampler(sampler.data_source, sampler.replacement, sampler._num_samples, generator)
        return iter(BatchSampler(shuffled, batches.batch_size, batches.drop_last))
    for each in (sampler, batches):  # one of somebody else's may want to know
        if hasattr(each, "set_epoch"):
            each.set_epoch(epoch)
    with _seed_all([seed, epoch]):
        return iter(list(batches))


@contextlib.contextmanager
def _seed_all(seed: list[int]) -> Iterator[None]:
    """Samplers may draw from whatever there is (torch's `WeightedRandomSampler` from torch itself): every worker, and
    its successors, draw the same. Nobody else notices."""
    torch_seed, numpy_seed, python_seed = map(int, np.random.SeedSequence(seed).generate_state(3))
    before = torch.get_rng_state(), np.random.get_state(), random.getstate()
    torch.default_generator.manual_seed(torch_seed)
    np.random.seed(numpy_seed)
    random.seed(python_seed)
    try:
        yield
    finally:
        torch.set_rng_state(before[0])
        np.random.set_state(before[1])
        random.setstate(before[2])


def _with_batches(loader: DataLoader[Any], batches: list[list[int]]) -> DataLoader[Any]:
    """The same loader, for these batches only."""
    options = {
        name: getattr(loader, name)
        for name in ("num_workers", "collate_fn", "pin_memory", "timeout", "worker_init_fn", "generator")
    }
    if loader.num_workers:
        options |= {
            "multiprocessing_context": loader.multiprocessing_context,
            "prefetch_factor": loader.prefetch_factor,
        }
    return DataLoader(loader.dataset, batch_sampler=batches, **options)
