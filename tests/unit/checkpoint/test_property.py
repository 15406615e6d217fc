"""Goal: whatever happens to a checkpoint directory, a cut that can be restored comes back as it was, and one that
cannot is refused; nothing in between.

Method: `World` trains a model that is a plain dictionary and keeps a copy of it at every cut. A random sequence of
updates, deltas, fulls, folds, rounds of a merger, prunes, roll-backs and lost or damaged files goes over both. After
each, every cut is restored and compared with its copy; which cuts must be restorable is found by stupid code, which
follows undamaged pieces from nothing until no more cuts are found. The seed is fixed.
"""

from __future__ import annotations

import itertools
from typing import TypeVar

import hypothesis
import hypothesis.strategies as st
from worlds import World

from regrow.checkpoint.merge import PieceBroken, fold
from regrow.checkpoint.merger import Event, Merger
from regrow.checkpoint.policy import Choice
from regrow.checkpoint.retention import Rules, prune_plan
from regrow.core.names import piece_name
from regrow.errors import CheckpointError

T = TypeVar("T")


# -- the actions -------------------------------------------------------------------------------------------


def any_of(world: World, found: list[T]) -> T | None:
    return found[world.random.integers(len(found))] if found else None


def act_delta(world: World) -> None:
    world.update()
    world.save()


def act_full(world: World) -> None:
    world.update()
    world.save(full=True)


def act_empty(world: World) -> None:
    world.step += 1
    world.save()


def act_fold(world: World) -> None:
    graph = world.graph()
    target = any_of(world, list(graph.cuts))
    ends = [source for source in [None, *graph.cuts] if target and graph.path(target, starts=(source,))]
    if target is None or not ends:
        return
    source = ends[world.random.integers(len(ends))]
    made = None
    for memory in (11_000, 1 << 30):  # The first is enough for two or three pieces, if their chunks are in order.
        try:
            made = made or fold(world.storage, graph, source, target, memory_bytes_max=memory)
        except PieceBroken as error:
            assert error.piece in world.damaged
            return
        except CheckpointError as error:
            assert "of memory" in str(error)
    assert made is not None
    assert piece_name(source, target) == made.name


def act_merge(world: World) -> None:
    """Rounds of a merger, far enough apart that it deletes what is unneeded. It may find damage, and never adds any."""
    events: list[Event] = []
    choice = Choice(s=int(world.random.integers(2, 4)), n=int(world.random.integers(3, 8)), reason="test")
    rules = Rules(keep_last=int(world.random.integers(1, 4)), keep_full_every_seconds=600.0)
    merger = Merger(
        world.storage, rules=rules, choice=choice, grace_seconds=0.0, on_event=events.append, clock=lambda: world.now
    )
    before = world.reachable()
    newest = world.graph().newest()
    merger.round()
    merger.round()
    if newest is not None and newest.id in before and not world.damaged:
        assert newest.id in world.reachable()
    world.damaged &= {piece.name for piece in world.storage.manifests()[0]}
    for event in events:
        if event.kind == "folded":
            world.damaged.discard(event.piece)  # one that was broken was made again
    assert [event for event in events if event.kind == "error"] == []


def act_prune(world: World) -> None:
    graph = world.graph()
    rules = Rules(keep_last=int(world.random.integers(1, 4)), keep_full_every_seconds=0.0)
    doomed, why = prune_plan(graph, rules, now=world.now)
    assert set(why) == set(graph.pieces)
    kept = [cut.id for cut in graph.restorable()][-rules.keep_last :]
    for name in doomed:
        world.storage.delete_piece(name)
        assert all(world.graph().path(cut) for cut in kept)
    world.damaged -= set(doomed)


def act_damage(world: World) -> None:
    pieces = [piece for piece in world.graph().pieces.values() if piece.chunks and piece.name not in world.damaged]
    piece = any_of(world, pieces)
    if piece is not None:
        world.lose(piece, how=["lose", "flip", "short"][world.random.integers(3)])


def act_go_back(world: World) -> None:
    cut = any_of(world, sorted(world.reachable()))
    if cut is not None:
        world.go_back(cut)


def act_shuffle(world: World) -> None:
    world.shuffled = not world.shuffled


ACTIONS = (
    act_delta,
    act_delta,
    act_delta,
    act_full,
    act_empty,
    act_fold,
    act_merge,
    act_prune,
    act_damage,
    act_go_back,
    act_shuffle,
)
_urls = (f"memory://property-{number}" for number in itertools.count())


@hypothesis.settings(max_examples=60)
@hypothesis.given(actions=st.lists(st.sampled_from(ACTIONS), min_size=4, max_size=14), seed=st.integers(0, 2**32 - 1))
def test_what_can_be_restored_is_as_it_was(actions: list[object], seed: int) -> None:
    world = World(next(_urls), seed=seed)
    world.update()
    world.save()
    for action in actions:
        action(world)  # type: ignore[operator]
    world.check()
