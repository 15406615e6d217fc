"""Goal: a folded piece leads where its path led, byte for byte, whatever the sizes, shards, order of chunks and memory;
making it twice, halfway, or by two at once does no harm.

Method: the `World` of the property test. Every pair of cuts of a chain is folded and every cut restored again. Failures
are injected by failpoints that raise. Memory is measured with tracemalloc on rows that are large against it.
"""

from __future__ import annotations

import itertools
import tracemalloc
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from worlds import TABLES, World

from regrow.checkpoint import failpoints, merge
from regrow.checkpoint.chunks import Rows, read_chunk, write_chunk
from regrow.checkpoint.files import LocalFiles
from regrow.checkpoint.lineage import Graph
from regrow.checkpoint.load import ALL_SHARDS, verify
from regrow.checkpoint.manifest import Cut, Manifest, TableInfo, chunk_name, shard_name
from regrow.checkpoint.merge import PieceBroken, find_leftovers, fold
from regrow.checkpoint.storage import Storage
from regrow.core.names import cut_id, piece_name
from regrow.errors import CheckpointError

_numbers = itertools.count()


def chain(cuts: int, *, url: str = "", updates: int = 12, **options: int) -> World:
    world = World(url or f"memory://merge-{next(_numbers)}", seed=11, **options)
    for _ in range(cuts):
        world.update(updates)
        world.save()
    return world


def rows_of(storage: Storage, piece: Manifest) -> dict[tuple[str, int], bytes]:
    found = {}
    for info in piece.chunks:
        for table, rows in read_chunk(storage, piece, info).items():
            for index, row in enumerate(rows.ids):
                assert (table, int(row)) not in found, "a row is in a folded piece once"
                found[table, int(row)] = b"".join(part[index].tobytes() for _, part in rows.parts())
    return found


# -- what comes out ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("disk", [False, True])  # there, chunks are read into the memory of those before them
@pytest.mark.parametrize("shuffled", [False, True])
@pytest.mark.parametrize("shards", [1, 3])
def test_every_shortcut_leads_where_the_path_led(
    shards: int, shuffled: bool, disk: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(LocalFiles.__init__.__kwdefaults__, "direct_bytes_min", 1)
    url = str(tmp_path) if disk else f"memory://merge-{next(_numbers)}"
    world = World(url, seed=7, shards=shards, chunk_bytes=120)
    world.shuffled = shuffled
    for _ in range(5):
        world.update(25)
        world.save()
    chain_only = world.graph()
    cuts: list[str | None] = [None, *chain_only.cuts]
    for source, target in itertools.combinations(cuts, 2):
        assert target is not None
        if (source, target) == (None, cuts[1]):
            continue
        made = fold(world.storage, chain_only, source, target)
        before = (chain_only.path(source) if source else None) or []
        plan, _ = Graph([*before, made]).restore_plan(target)
        assert [piece.name for piece in plan.pieces][-1] == made.name
        state = dict(world.history[source]) if source else {}
        state.update(rows_of(world.storage, made))
        assert state == world.history[target]
        names = {shard_name(shard, shards, "by number") for shard in range(shards)}
        assert {info.shard for info in made.chunks} <= names
        for info in made.chunks:
            shard = int(info.shard[1])
            for rows in read_chunk(world.storage, made, info).values():
                assert (rows.ids % shards == shard).all(), "rows stay with their shard"
    assert verify(world.storage) == []
    world.check()


def test_names_of_what_was_folded_are_of_pieces_that_training_wrote() -> None:
    world = chain(7)
    graph = world.graph()
    cuts, pieces = list(graph.cuts), [piece.name for piece in graph.pieces.values()]
    low = fold(world.storage, graph, cuts[0], cuts[2])
    high = fold(world.storage, graph, cuts[0], cuts[4])
    assert list(low.folded) == pieces[1:3]
    twice = fold(world.storage, Graph([*graph.without(pieces[1:3]).pieces.values(), low]), cuts[0], cuts[5])
    assert list(high.folded) == pieces[1:5]
    assert list(twice.folded) == pieces[1:6]
    whole = fold(world.storage, Graph([graph.pieces[pieces[0]], high]), None, cuts[4])
    assert list(whole.folded) == [pieces[0], *pieces[1:5]]
    again = fold(world.storage, Graph([whole, graph.pieces[pieces[5]]]), None, cuts[5])
    assert list(again.folded) == [whole.name, pieces[5]]


def test_layouts_that_differ_become_one_shard_that_everybody_reads() -> None:
    world = chain(3)
    world.shards = 3
    world.update()
    world.save()
    cuts = list(world.graph().cuts)
    made = fold(world.storage, world.graph(), None, cuts[-1])
    assert {info.shard for info in made.chunks} == {ALL_SHARDS}
    for old in [piece for piece in world.graph().pieces.values() if piece.name != made.name]:
        world.storage.delete_piece(old.name)
    assert world.restore_rows(shard_filter=lambda shard: False)[0] == world.history[cuts[-1]]


def test_rows_that_moved_between_shards_of_another_division_are_found_once() -> None:
    """As many shards as before, but the name of the layout says that they have other rows."""
    storage = Storage.open("memory://moved")
    first = big_piece(storage, None, 1, [np.arange(4, dtype=np.uint32)], 2, shard="s0of2-aaaaaaaa")
    second = big_piece(storage, first.target.id, 2, [np.array([1, 3], np.uint32)], 2, shard="s1of2-bbbbbbbb")
    made = fold(storage, Graph([first, second]), None, second.target.id)
    assert {info.shard for info in made.chunks} == {ALL_SHARDS}
    found = {row: np.frombuffer(data, np.float32)[0] for (_, row), data in rows_of(storage, made).items()}
    assert found == {0: 1.0, 1: 2.0, 2: 1.0, 3: 2.0}


def test_shards_that_do_not_say_how_they_divide_rows_are_merged_together() -> None:
    """Of a checkpoint in which rows changed places: the newest counts, whichever shard had it last."""
    storage = Storage.open("memory://undivided")
    first = big_piece(storage, None, 1, [np.array([2, 3], np.uint32)], 2, shard="s1of2")
    second = big_piece(storage, first.target.id, 2, [np.array([2], np.uint32)], 2, shard="s0of2")
    made = fold(storage, Graph([first, second]), None, second.target.id)
    found = {row: np.frombuffer(data, np.float32)[0] for (_, row), data in rows_of(storage, made).items()}
    assert found == {2: 2.0, 3: 1.0}


def test_compressed_pieces_stay_compressed() -> None:
    world = World(f"memory://merge-{next(_numbers)}")
    for _ in range(3):
        world.update()
        world.save(encoding="zstd")
    made = fold(world.storage, world.graph(), None, list(world.graph().cuts)[-1])
    assert made.encoding == "zstd"
    assert all(info.name.endswith(".zst") for info in made.chunks)
    assert rows_of(world.storage, made) == world.model


def test_quantised_and_exact_are_not_mixed_in_silence() -> None:
    world = chain(2)
    world.update()
    narrow = world.save(bits=8)
    cuts = list(world.graph().cuts)
    with pytest.raises(CheckpointError, match=f"{narrow.name} has 8 bits, others on the path have 32") as error:
        fold(world.storage, world.graph(), None, cuts[-1])
    assert "approximate=True" in str(error.value)
    made = fold(world.storage, world.graph(), None, cuts[-1], approximate=True)
    assert (made.bits, made.exact) == (8, False)
    assert rows_of(world.storage, made).keys() == world.model.keys()
    world.update()
    world.save(bits=8)
    both = fold(world.storage, world.graph(), cuts[1], list(world.graph().cuts)[-1])
    assert not both.exact


def test_tables_may_grow_and_be_added_but_not_change() -> None:
    world = chain(2)
    graph = world.graph()
    first, second = graph.pieces.values()
    grown = msgspec.structs.replace(TABLES[0], rows=TABLES[0].rows + 5)
    added = TableInfo(name="new", rows=3, dim=1, states=(), init_bound=None, index=9)
    larger = msgspec.structs.replace(second, tables=(grown, *TABLES[1:], added))
    made = fold(world.storage, Graph([first, larger]), None, second.target.id)
    assert made.tables == larger.tables
    assert rows_of(world.storage, made) == world.model
    for wrong in (
        msgspec.structs.replace(second, seed=5),
        msgspec.structs.replace(second, tables=TABLES[:2]),
        msgspec.structs.replace(second, tables=(msgspec.structs.replace(TABLES[0], rows=59), *TABLES[1:])),
        msgspec.structs.replace(second, tables=(msgspec.structs.replace(TABLES[0], dim=4), *TABLES[1:])),
    ):
        with pytest.raises(CheckpointError, match="have different"):
            fold(world.storage, Graph([first, wrong]), None, second.target.id, replace=True)


def test_no_path_no_piece() -> None:
    world = chain(3)
    cuts = list(world.graph().cuts)
    with pytest.raises(CheckpointError, match=f"no path leads from {cuts[2]} to {cuts[1]}"):
        fold(world.storage, world.graph(), cuts[2], cuts[1])


# -- again, halfway, by two at once ------------------------------------------------------------------------


def files(root: Path) -> dict[str, bytes]:
    return {str(path.relative_to(root)): path.read_bytes() for path in sorted(root.rglob("*")) if path.is_file()}


def test_folding_again_writes_the_same_bytes(tmp_path: Path) -> None:
    world = chain(4, url=str(tmp_path))
    graph = world.graph()
    fold(world.storage, graph, None, list(graph.cuts)[-1])
    first = files(tmp_path)
    with failpoints.recording() as passed:
        fold(world.storage, graph, None, list(graph.cuts)[-1])
        fold(world.storage, world.graph(), None, list(graph.cuts)[-1])
    assert passed == [], "what is there is not written again"
    fold(world.storage, graph, None, list(graph.cuts)[-1], replace=True)
    fold(world.storage, graph, None, list(graph.cuts)[-1], replace=True, memory_bytes_max=1 << 29)
    assert files(tmp_path) == first


def test_what_a_fold_that_failed_left_behind_is_written_over(tmp_path: Path) -> None:
    world = chain(4, url=str(tmp_path), updates=40)
    graph, options = world.graph(), {"chunk_bytes": 1024}
    target = list(graph.cuts)[-1]
    once = Storage.open(str(tmp_path), attempts=1)
    with failpoints.recording() as passed:
        fold(once, graph, None, target, **options)  # type: ignore[arg-type]
    whole = files(tmp_path)
    for name in dict.fromkeys(passed):
        for count in range(1, passed.count(name) + 1):
            once.delete_piece(piece_name(None, target))
            with failpoints.arm_inside(f"{name}:{count}:raise"):
                try:
                    fold(once, graph, None, target, **options)  # type: ignore[arg-type]
                except CheckpointError:
                    world.check()
            fold(once, graph, None, target, **options)  # type: ignore[arg-type]
            assert files(tmp_path) == whole


def test_leftovers_are_known_from_files_of_training(tmp_path: Path) -> None:
    world = chain(3, url=str(tmp_path))
    graph = world.graph()
    cuts = list(graph.cuts)
    made = fold(world.storage, graph, cuts[0], cuts[2])
    (tmp_path / made.name / f"s0of2-{merge.MARK}0123456789-00004.safetensors").write_bytes(b"x")
    world.storage.delete(f"{piece_name(cuts[0], cuts[1])}/manifest.json")  # training's, unfinished: not ours

    def find() -> list[tuple[str, str]]:
        return find_leftovers(world.storage, world.graph().pieces.values(), world.storage.list_unfinished())

    assert find() == [(made.name, f"s0of2-{merge.MARK}0123456789-00004.safetensors")]
    world.storage.delete(f"{made.name}/manifest.json")
    (tmp_path / piece_name(cuts[0], "0000000099-abcdef")).mkdir()
    assert len(find()) == len(made.chunks) + 2
    assert {piece for piece, _ in find()} == {made.name, piece_name(cuts[0], "0000000099-abcdef")}


def test_a_broken_piece_is_named_and_one_that_was_deleted_is_not_called_broken() -> None:
    world = chain(4)
    graph = world.graph()
    cuts, pieces = list(graph.cuts), list(graph.pieces.values())
    for how in ("flip", "lose"):
        world.lose(pieces[1], how=how)
        with pytest.raises(PieceBroken) as broken:
            fold(world.storage, graph, None, cuts[1])
        assert (broken.value.piece, broken.value.gone) == (pieces[1].name, False)
    world.storage.delete_piece(pieces[3].name)
    with pytest.raises(PieceBroken) as gone:
        fold(world.storage, graph, cuts[1], cuts[3])
    assert (gone.value.piece, gone.value.gone) == (pieces[3].name, True)


def test_a_chunk_deleted_under_its_hands_stops_the_manifest(monkeypatch: pytest.MonkeyPatch) -> None:
    world = chain(3)
    graph = world.graph()
    real = Storage.names

    def names(self: Storage, piece: str) -> dict[str, int]:
        found = real(self, piece)
        if piece == piece_name(None, list(graph.cuts)[-1]):
            self.delete(f"{piece}/{next(iter(found))}")
        return real(self, piece)

    monkeypatch.setattr(Storage, "names", names)
    with pytest.raises(CheckpointError, match="was deleted while the piece was made"):
        fold(world.storage, graph, None, list(graph.cuts)[-1])
    assert piece_name(None, list(graph.cuts)[-1]) not in world.storage.pieces()


# -- memory ------------------------------------------------------------------------------------------------


def test_a_path_too_long_for_memory_is_folded_in_parts() -> None:
    world = chain(9, updates=40)
    graph = world.graph()
    cuts = list(graph.cuts)
    made = fold(world.storage, graph, None, cuts[-1], memory_bytes_max=10_000)
    assert rows_of(world.storage, made) == world.model
    shortcuts = [piece for piece in world.graph().pieces.values() if piece.folded and piece.source is not None]
    assert shortcuts, "the tail was folded first"
    assert all(piece.target.id == cuts[-1] for piece in shortcuts)
    world.check()
    with pytest.raises(CheckpointError, match=r"cannot be made in 1000 B of memory: two pieces need"):
        fold(world.storage, graph, cuts[0], cuts[-1], memory_bytes_max=1000)


def big_piece(
    storage: Storage, source: str | None, step: int, ids: list[np.ndarray], dim: int, *, shard: str = "s0of1"
) -> Manifest:
    target = Cut(id=cut_id(step, ""), step=step, marks=(), created=float(step), job={}, extra={})
    tables = (TableInfo(name="t", rows=1 << 20, dim=dim, states=(), init_bound=None, index=0),)
    infos = []
    for number, part in enumerate(ids):
        rows = Rows(part, np.full((len(part), dim), step, np.float32), {})
        name = chunk_name(shard, number)
        infos.append(write_chunk(storage, piece_name(source, target.id), name, {"t": rows}, shard=shard))
    made = Manifest(source=source, target=target, tables=tables, seed=0, chunks=tuple(infos), made_by="test")
    storage.write_manifest(made)
    return made


def test_memory_stays_within_its_bound(tmp_path: Path) -> None:
    """48 MiB of rows in chunks of 1 MiB, folded within 16 MiB."""
    storage = Storage.open(str(tmp_path))
    dim, per_chunk, limit = 64, 4096, 16 << 20
    source, pieces = None, []
    for step in range(1, 4):
        ids = np.arange(step - 1, 16 * per_chunk * step, step, dtype=np.uint32)[: 16 * per_chunk]
        pieces.append(big_piece(storage, source, step, np.split(ids, 16), dim))
        source = pieces[-1].target.id
    total = sum(piece.bytes for piece in pieces)
    assert total > 2.5 * limit
    tracemalloc.start()
    try:
        made = fold(storage, Graph(pieces), None, source or "", memory_bytes_max=limit, chunk_bytes=1 << 20)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < limit
    expected: dict[int, int] = {}
    for step, piece in enumerate(pieces, 1):
        for info in piece.chunks:
            expected.update(dict.fromkeys(read_chunk(storage, piece, info)["t"].ids.tolist(), step))
    found: dict[int, int] = {}
    for info in made.chunks:
        rows = read_chunk(storage, made, info)["t"]
        found.update(zip(rows.ids.tolist(), rows.weight[:, 0].astype(int).tolist(), strict=True))
    assert found == expected


@pytest.mark.parametrize("encoding", ["raw", "zstd"])
def test_chunks_make_room_for_the_next(encoding: Any, tmp_path: Path) -> None:
    """Eight pieces of two shards, whose chunks all end at the same ids: those of one shard are in memory once."""
    storage, rng = Storage.open(str(tmp_path)), np.random.default_rng(3)
    pieces: list[Manifest] = []
    for step in range(1, 9):
        target = Cut(id=cut_id(step, ""), step=step, marks=(), created=float(step), job={}, extra={})
        source = pieces[-1].target.id if pieces else None
        infos = []
        for shard, number in itertools.product(range(2), range(2)):
            ids = np.arange(4096 * number, 4096 * (number + 1), dtype=np.uint32) * 2 + shard
            rows = Rows(ids, rng.random((4096, 64), np.float32), {})
            name = chunk_name(label := shard_name(shard, 2, "by number"), number, encoding)
            piece = piece_name(source, target.id)
            infos.append(write_chunk(storage, piece, name, {"t": rows}, encoding=encoding, shard=label))
        tables = (TableInfo(name="t", rows=1 << 20, dim=64, states=(), init_bound=None, index=0),)
        pieces.append(
            Manifest(
                source=source,
                target=target,
                tables=tables,
                seed=0,
                chunks=tuple(infos),
                encoding=encoding,
                made_by="test",
            )
        )
        storage.write_manifest(pieces[-1])
    limit = 14 << 20
    tracemalloc.start()
    try:
        made = fold(storage, Graph(pieces), None, target.id, memory_bytes_max=limit, chunk_bytes=1 << 16)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert len(made.folded) == 8, "all at once"
    assert peak < limit
