"""Goal: from saves comes the newest value of each row, once, waited-for rows first; what is damaged is named, and
nothing of it is given out.

Method: a server that is a dictionary. Every file is torn, lost and has bits flipped; storage fails and hangs.
"""

from __future__ import annotations

import dataclasses
import threading
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from save_worlds import OWNER, Server, collect, find, load, make_server, write_save
from test_storage import FakeFiles
from worlds import TABLES, Model, World, record

from regrow.checkpoint.chunks import write_chunk
from regrow.checkpoint.lineage import Graph
from regrow.checkpoint.saves import IDS
from regrow.checkpoint.saves_ids import RowSet
from regrow.checkpoint.saves_load import Base, SavedRows
from regrow.checkpoint.saves_write import read_saves
from regrow.checkpoint.storage import Storage
from regrow.errors import CheckpointError, StorageError


@pytest.fixture(params=["local", "memory"])
def storage(request: pytest.FixtureRequest, tmp_path: Path) -> Storage:
    return Storage.open(str(tmp_path / "x") if request.param == "local" else f"memory://{tmp_path}/x")


@pytest.mark.parametrize("encoding", ["raw", "zstd"])
def test_saved_and_loaded(storage: Storage, encoding: str) -> None:
    if encoding == "zstd":
        pytest.importorskip("zstandard")
    server = make_server(storage)
    server.writer.encoding = encoding
    for count in (60, 10, 10, 3):
        server.update(count)
        made = server.save()
    chain = find(storage)
    assert chain is not None and len(chain.saves) == 4
    assert (chain.head, chain.head.marks, chain.head.updates) == (made, (83,), 83)
    assert load(storage, chain) == server.model == server.durable
    assert storage.pieces() == [] and storage.list_unfinished() == [] and storage.manifests() == ([], [])


def test_no_rows_at_all(storage: Storage) -> None:
    assert find(storage) is None
    assert load(storage, None) == {}
    server = make_server(storage)
    server.save()
    assert load(storage, find(storage)) == {}
    assert server.writer.choose_kind()[0] is False
    server.update(5)
    server.save()
    assert load(storage, find(storage)) == server.model


def test_a_full_makes_older_ones_unneeded(storage: Storage) -> None:
    server = make_server(storage)
    server.update(30)
    kinds = []
    for _ in range(12):
        kinds.append(server.save().full)
        server.update(30)
        present = read_saves(storage, OWNER)
        assert [save.full for save in present.manifests] == [True] + [False] * (len(present.manifests) - 1)
        assert load(storage, find(storage)) == server.durable
    assert kinds[0] and 2 < sum(kinds) < 9


def test_hot_rows_first_and_unneeded_chunks_not_at_all(storage: Storage, monkeypatch: pytest.MonkeyPatch) -> None:
    server = make_server(storage)
    server.update(200)
    full = server.save()
    server.update(200)
    write_save(server.writer, server.model, server.model.keys(), full=False)  # every row, once more
    server.update(3)
    server.save(full=False)
    rows = SavedRows(storage, find(storage))
    reads: list[str] = []
    really = storage.read

    def read(path: str, **options: Any) -> Any:
        reads.append(path)
        return really(path, **options)

    monkeypatch.setattr(storage, "read", read)
    assert collect(rows, threads=1, ahead_bytes_max=1) == server.model
    directories = [path.split("/")[-2] for path in reads]
    assert directories == sorted(directories, reverse=True)
    assert full.save not in directories
    assert rows.bytes_done == rows.bytes


def test_chunks_with_rows_that_somebody_waits_for_go_first(storage: Storage) -> None:
    server = make_server(storage)
    server.update(300)
    full = server.save()
    server.update(5)
    changed = set(server.changed)
    server.save(full=False)
    rows = SavedRows(storage, find(storage))
    table, row = next(key for key in sorted(server.model, reverse=True) if key not in changed)
    wanted = np.array([row], np.uint32)
    parts = rows.rows_newest_first(10**6, threads=1, ahead_bytes_max=1)
    next(parts)
    assert rows.want(table, wanted) == 1
    assert rows.want(table, wanted) == 0, "it is on its way already"
    assert rows.want(table, np.array([TABLES[0].rows - 1], np.uint32)) <= 1
    found = next(parts)
    assert row in found[table].ids
    assert len(full.chunks) > 3
    list(parts)
    assert rows.want(table, wanted) == 0, "all is read"


def test_what_is_damaged_is_named_and_never_given_out(tmp_path: Path) -> None:
    """Whatever file it is, whatever byte: either the right rows, or an error that names the file, and before it only
    right rows."""
    storage = Storage.open(str(tmp_path / "x"))
    server = make_server(storage)
    server.update(80)
    server.save()
    server.update(20)
    server.save(full=False)
    random = np.random.default_rng(5)
    chain = find(storage)
    assert chain is not None
    files = [f"{save.name}/{file}" for save in chain.saves for file in (IDS, *(info.name for info in save.chunks))]
    for path in files:
        whole = bytes(storage.read(path))
        for kind in ("flip", "flip", "flip", "tear", "lose"):
            at = int(random.integers(len(whole)))
            damaged = bytes([*whole[:at], whole[at] ^ (1 << int(random.integers(8))), *whole[at + 1 :]])
            if kind == "lose":
                storage.delete(path)
            else:
                storage.write(path, damaged if kind == "flip" else whole[:at])
            given: Model = {}
            with pytest.raises(CheckpointError, match=path.rpartition("/")[0]):
                rows = SavedRows(storage, chain)
                for part in rows.rows_newest_first(10**6):
                    given |= {(name, int(row)): record(r, i) for name, r in part.items() for i, row in enumerate(r.ids)}
            assert given.items() <= server.model.items()
        storage.write(path, whole)
    assert load(storage, chain) == server.model


def test_ids_that_are_not_those_of_the_chunk(storage: Storage) -> None:
    """Two sound files that do not belong together."""
    server = make_server(storage)
    server.update(40)
    made = server.save()
    table = next(iter(made.chunks[0].rows))
    rows = SavedRows(storage, find(storage))
    job = next(job for job in rows._jobs if job.info == made.chunks[0])
    job.newest[table] = RowSet(ids=job.newest[table].list_ids() + np.uint32(1))
    with pytest.raises(CheckpointError, match=f"{made.chunks[0].name}: its rows are not those"):
        collect(rows)


# -- below the saves, a cut ------------------------------------------------------------------------------


def all_of(table: str, ids: Any) -> Any:
    return np.ones(len(ids), np.bool_)


def make_base(world: World) -> Base:
    plan, _ = Graph(world.storage.manifests()[0]).restore_plan(world.cut)
    return Base(world.storage, plan, lambda shard: True, all_of)


def test_rows_in_no_save_are_those_of_the_cut(tmp_path: Path) -> None:
    """Of several pieces, in which rows come more than once; nothing is given out that is older than it must be."""
    world = World(str(tmp_path), seed=2)
    for _ in range(4):
        world.update(25)
        world.save()
    assert load(world.storage, None, base=make_base(world)) == world.model
    server = Server(world.storage, world.random, 1, world.model)
    server.writer.base = world.cut
    server.writer.claim(find_marks=lambda: (4,))
    chain = find(world.storage)
    assert chain is not None and (chain.base, chain.head.marks) == (world.cut, (4,))
    server.update(15)
    server.save(full=False)
    assert load(world.storage, find(world.storage), base=make_base(world)) == server.model
    assert world.storage.manifests()[1] == [] and len(world.storage.pieces()) == 4


def test_damage_below_is_gone_around_or_named(tmp_path: Path) -> None:
    world = World(str(tmp_path), seed=2)
    world.update(25)
    world.save()
    world.update(25)
    delta = world.save()
    base = make_base(world)
    world.lose(delta, how="flip")
    with pytest.raises(CheckpointError, match=delta.name):
        load(world.storage, None, base=base)
    cut = world.cut
    world.go_back(delta.source or "")
    world.model = dict(world.history[cut or ""])
    full = msgspec.structs.replace(delta, source=None)
    infos = [
        write_chunk(world.storage, full.name, f"s0of1-{number:05d}.safetensors", chunk, shard="s0of1")
        for number, chunk in enumerate(chunk for shard in range(2) for chunk in world.chunks(world.model, shard))
    ]
    full = msgspec.structs.replace(full, chunks=tuple(infos))
    world.storage.write_manifest(full)
    plan, _ = Graph(world.storage.manifests()[0]).restore_plan(cut)
    graph = plan.graph
    broken = [piece for piece in plan.graph.pieces.values() if piece.name in (delta.name, delta.source)]
    assert load(world.storage, None, base=Base(world.storage, plan, lambda shard: True, all_of)) == world.model
    way = [piece for piece in graph.pieces.values() if piece.target.id == delta.source] + broken
    through = dataclasses.replace(plan, pieces=tuple(way))
    assert load(world.storage, None, base=Base(world.storage, through, lambda shard: True, all_of)) == world.model


# -- storage that fails or hangs -------------------------------------------------------------------------


def test_a_storage_that_hangs_or_fails_is_an_error_in_bounded_time(tmp_path: Path) -> None:
    files = FakeFiles(tmp_path)
    storage = Storage("fake://place", files, timeout_seconds=60.0, attempts=1)
    server = make_server(storage)
    server.update(60)
    server.save()
    hanging = Storage("fake://place", files, timeout_seconds=0.1, attempts=1)
    chain = find(storage)
    files.hang = True
    with pytest.raises(StorageError, match="no answer within"):
        read_saves(hanging, OWNER)
    with pytest.raises(StorageError, match="no answer within"):
        load(hanging, chain)
    files.hang = False
    files.let_go.set()
    files.errors = [OSError(5, "I/O")] * 100
    with pytest.raises(StorageError, match="I/O"):
        find(storage)  # no answer must not look like no save
    files.errors = []
    assert load(storage, find(storage)) == server.model


def test_wants_may_come_from_another_thread(storage: Storage) -> None:
    server = make_server(storage)
    server.update(400)
    server.save()
    rows = SavedRows(storage, find(storage))
    ids = {table: found for table, found in rows.ids().items()}

    def ask() -> None:
        for table, found in ids.items():
            for row in found:
                rows.want(table, np.array([row], np.uint32))

    asker = threading.Thread(target=ask)
    asker.start()
    assert collect(rows) == server.model
    asker.join()
