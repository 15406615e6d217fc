"""Goal: a restore gives the cut that was asked for, goes around what is broken, and holds a bounded amount ahead; and
`verify` names everything that is wrong.

Method: the `World` of the property test, in memory. Every piece of a graph is damaged in every way, one at a time and
two at a time. Reads are counted by a storage that wraps the real one.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from worlds import World

from regrow.checkpoint import load
from regrow.checkpoint.chunks import Chunk
from regrow.checkpoint.load import Problem, chunk_bytes, restore, verify
from regrow.checkpoint.manifest import MANIFEST, Manifest, shard_name
from regrow.checkpoint.merge import fold
from regrow.checkpoint.storage import Storage
from regrow.errors import CheckpointError, StorageError

_numbers = itertools.count()


@pytest.fixture
def world() -> Iterator[World]:
    """A full, five deltas, a shortcut over three of them, and a second full in the middle."""
    yield build_world()


def build_world() -> World:
    world = World(f"memory://load-{next(_numbers)}", seed=3)
    for _ in range(6):
        world.update()
        world.save()
    cuts = list(world.graph().cuts)
    fold(world.storage, world.graph(), cuts[0], cuts[3])
    fold(world.storage, world.graph(), None, cuts[2])
    return world


class Slow:
    """A storage whose reads are counted, and may be told to fail."""

    def __init__(self, storage: Storage) -> None:
        self._storage, self.reads, self.fail = storage, 0, lambda path: False
        self._lock = threading.Lock()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._storage, name)

    def read(self, path: str, **options: Any) -> bytes | memoryview:
        with self._lock:
            self.reads += 1
        if self.fail(path):
            raise StorageError(f"cannot read {path}: no answer within 1 s")
        return self._storage.read(path, **options)


# -- restore -----------------------------------------------------------------------------------------------


def test_every_cut_comes_back(world: World) -> None:
    for cut, model in world.history.items():
        found, report = world.restore_rows(cut)
        plan, _ = world.graph().restore_plan(cut)
        assert found == model
        assert (report.bytes, report.rows) == (plan.bytes, plan.rows)
        assert report.pieces == tuple(piece.name for piece in plan.pieces)
        assert report.exact and report.broken == ()


def test_progress_ends_with_everything(world: World) -> None:
    seen: list[tuple[int, int]] = []
    _, report = world.restore_rows(progress=lambda done, total: seen.append((done, total)))
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)
    assert seen[-1] == (report.bytes, report.bytes)


def test_only_the_shards_that_are_wanted_are_read(world: World) -> None:
    for cut, model in world.history.items():
        found, _ = world.restore_rows(cut, shard_filter=lambda shard: shard == shard_name(1, 2, "by number"))
        assert found == {key: value for key, value in model.items() if key[1] % 2 == 1}


@pytest.mark.parametrize("how", ["lose", "flip", "short"])
def test_a_broken_piece_is_gone_around_or_named(how: str) -> None:
    """Each piece alone, and with flipped bits each pair, for the newest cut: the other path is taken also when half of
    the first was applied already, because a flipped bit is only found on reading."""
    count = len(build_world().graph().pieces)
    went_around = refused = 0
    for pair in itertools.combinations_with_replacement(range(count), 2):
        if how != "flip" and pair[0] != pair[1]:
            continue
        world = build_world()
        pieces = list(world.graph().pieces.values())
        for index in set(pair):
            world.lose(pieces[index], how=how)
        newest = list(world.history)[-1]
        if newest in world.reachable():
            found, report = world.restore_rows(newest)
            assert found == world.history[newest]
            assert {problem.piece for problem in report.broken} <= world.damaged
            went_around += bool(report.broken)
            continue
        refused += 1
        with pytest.raises(CheckpointError) as error:
            world.restore_rows(newest)
        assert f"cut {newest} cannot be restored" in error.value.message
        assert any(name in error.value.message for name in world.damaged)
        assert {"lose": "missing", "flip": "damaged", "short": "the manifest says"}[how] in error.value.message
        assert f"`regrow ckpt verify {world.storage.url}`" in str(error.value.hint)
    assert went_around >= 2 and refused >= 2


def test_without_any_way_the_newest_other_cut_is_named(world: World) -> None:
    last = list(world.graph().pieces.values())[-1]
    world.lose(last, how="flip")
    with pytest.raises(CheckpointError) as error:
        world.restore_rows()
    assert f"@{list(world.history)[-2]}" in str(error.value.hint)


def test_files_that_are_not_there_are_found_before_anything_is_applied(world: World) -> None:
    plan, _ = world.graph().restore_plan()
    world.lose(plan.pieces[-1], how="lose")
    applied: list[Chunk] = []
    with pytest.raises(CheckpointError):
        restore(world.storage, plan, lambda piece, chunk: applied.append(chunk))
    assert applied == []


def test_storage_that_does_not_answer_is_not_called_damage(world: World) -> None:
    slow = Slow(world.storage)
    slow.fail = lambda path: True
    plan, _ = world.graph().restore_plan()
    with pytest.raises(CheckpointError) as error:
        restore(slow, plan, lambda piece, chunk: None)  # type: ignore[arg-type]
    assert "did not answer" in str(error.value.hint)


def test_it_gives_up_after_so_many_broken_pieces(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    world.lose(world.graph().restore_plan()[0].pieces[0], how="flip")
    assert len(world.restore_rows()[1].broken) == 1
    monkeypatch.setattr(load, "BROKEN_PIECES_MAX", 0)
    with pytest.raises(CheckpointError, match="no way around"):
        world.restore_rows()


@pytest.mark.parametrize("threads", [1, 3])
def test_what_is_held_ahead_is_bounded(world: World, threads: int) -> None:
    plan, _ = world.graph().restore_plan()
    slow = Slow(world.storage)
    largest = max(chunk_bytes(piece, info) for piece in plan.pieces for info in piece.chunks)
    chunks = sum(len(piece.chunks) for piece in plan.pieces)
    room, ahead, done = 3 * largest, [], 0
    smallest = min(chunk_bytes(piece, info) for piece in plan.pieces for info in piece.chunks)

    def apply(piece: Manifest, chunk: Chunk) -> None:
        nonlocal done
        ahead.append(slow.reads - done)
        done += 1

    restore(slow, plan, apply, threads=threads, ahead_bytes_max=room)  # type: ignore[arg-type]
    assert done == slow.reads == chunks > 6
    assert max(ahead) <= room // smallest + 1
    ahead.clear()
    slow.reads = done = 0
    restore(slow, plan, apply, threads=threads, ahead_bytes_max=0)  # type: ignore[arg-type]
    assert ahead == [1] * chunks, "one chunk always may"


def test_an_error_of_the_one_who_applies_comes_through(world: World) -> None:
    plan, _ = world.graph().restore_plan()

    def apply(piece: Manifest, chunk: Chunk) -> None:
        raise ZeroDivisionError("mine")

    with pytest.raises(ZeroDivisionError):
        restore(world.storage, plan, apply)


# -- verify ------------------------------------------------------------------------------------------------


def test_verify_finds_nothing_where_nothing_is_wrong(world: World) -> None:
    seen: list[tuple[int, int]] = []
    assert verify(world.storage, progress=lambda done, total: seen.append((done, total))) == []
    total = sum(piece.bytes for piece in world.graph().pieces.values())
    assert seen[-1] == (total, total)


def test_verify_names_each_kind_of_damage(tmp_path: Path) -> None:
    world = World(str(tmp_path), seed=5)
    for _ in range(6):
        world.update(30)
        world.save()
    flipped, missing, surplus, torn, short, unfinished = world.graph().pieces.values()
    files = {piece.name: tmp_path / piece.name for piece in world.graph().pieces.values()}

    def chunk(piece: Manifest) -> tuple[str, Path]:
        return piece.chunks[1].name, files[piece.name] / piece.chunks[1].name

    data = bytearray(chunk(flipped)[1].read_bytes())
    data[-1] ^= 4
    chunk(flipped)[1].write_bytes(data)
    chunk(missing)[1].unlink()
    (files[surplus.name] / "s0of2-99999.safetensors").write_bytes(b"left over")
    manifest = files[torn.name] / MANIFEST
    manifest.write_bytes(manifest.read_bytes()[:100])
    chunk(short)[1].write_bytes(chunk(short)[1].read_bytes()[:-3])
    (files[unfinished.name] / MANIFEST).unlink()

    found = verify(world.storage)
    bytes_short = short.chunks[1].bytes
    expected = [
        Problem(flipped.name, chunk(flipped)[0], "damaged (checksum)"),
        Problem(missing.name, chunk(missing)[0], "missing"),
        Problem(
            surplus.name,
            "s0of2-99999.safetensors",
            "not in the manifest: left behind by a process that died, or by a second merger",
            harmful=False,
        ),
        Problem(torn.name, MANIFEST, "damaged or not a manifest (its ends are not there)"),
        Problem(short.name, chunk(short)[0], f"{bytes_short - 3} bytes, the manifest says {bytes_short}"),
        Problem(
            unfinished.name,
            MANIFEST,
            "not there: being written just now, or left behind by a process that died",
            harmful=False,
        ),
    ]
    assert found == sorted(expected, key=lambda problem: problem.piece)
    assert str(found[0]).count(found[0].piece) == 1
    shallow = verify(world.storage, deep=False)
    assert shallow == [problem for problem in found if problem.piece != flipped.name]
