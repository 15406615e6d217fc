"""Goal: the interface says all there is to say about a store: nobody can use what it does not name, and it names
nothing without a word about it.

Method: names are compared: those of the protocols, their texts, and those of the stores there are.
"""

from __future__ import annotations

import pytest
from subjects import JOB, every_store

from regrow.store import interface
from regrow.store.interface import Store, StoreBuilder
from regrow.store.memory import MemoryStore

PARTS = [
    interface.Sizes,
    interface.WorkerRows,
    interface.WholeRecords,
    interface.FlushedRows,
    interface.HeldParities,
    interface.ReturningRows,
    interface.CapturedRows,
    interface.PrioritizedRows,
]


def find_names(part: type) -> set[str]:
    """Public names that a protocol declares itself."""
    return {name for name in vars(part) if not name.startswith("_")}


@pytest.mark.parametrize("part", PARTS, ids=lambda part: part.__name__)
def test_every_name_has_a_text(part: type) -> None:
    assert part.__doc__
    assert find_names(part)
    for name in find_names(part):
        assert vars(part)[name].__doc__, name


def test_parts_are_apart_and_together_the_whole() -> None:
    assert sum(len(find_names(part)) for part in PARTS) == len(set().union(*map(find_names, PARTS)))
    assert set(Store.__mro__) >= set(PARTS)
    assert find_names(Store) == set()


@every_store
def test_stores_have_what_the_interface_names(build: StoreBuilder) -> None:
    store = build(JOB, 0, False)
    for name in set().union(*map(find_names, PARTS)):
        assert hasattr(store, name), name


def test_the_store_in_memory_has_nothing_else() -> None:
    """Whoever used it would not run on another store."""
    public = {name for name in dir(MemoryStore(JOB, 0)) if not name.startswith("_")}
    assert public == set().union(*map(find_names, PARTS))
