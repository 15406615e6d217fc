"""Goal: rows get to storage and back whatever the layout that wrote them and the one that reads them, and a checkpoint
that does not fit is told so in one line.

Method: records of every row of a job are written to its servers, captured in chunks, and taken in by the servers of
another layout; in the end each row must be where that layout has it. Savers and manifests on a real directory.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import functools
import itertools
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from checkpoint_stores import (
    LAYOUTS,
    NAME,
    made,
    publish_piece,
    records_of,
    save,
    store_of,
    strides_of,
    whole,
    writer,
)
from helpers import job, table

from regrow.checkpoint.chunks import Chunk
from regrow.checkpoint.lineage import Graph
from regrow.checkpoint.manifest import Cut, Manifest
from regrow.checkpoint.manifests import table_infos
from regrow.checkpoint.storage import Storage
from regrow.core.cut import Save, Saved
from regrow.core.cuts import TERM, WriteManifest
from regrow.core.job import JobSpec
from regrow.core.wayback import LoadedAll, LoadedRows
from regrow.errors import CheckpointError
from regrow.launch import checkpoints
from regrow.runtime import checkpoint
from regrow.runtime.checkpoint import (
    Loader,
    Saver,
    check_fits,
    chunk_memory,
    chunk_of,
    loaded_rows,
    shard_of,
)
from regrow.store.memory import MemoryStore


def chunks_of(of: JobSpec, server: int, records: list[np.ndarray[Any, Any]]) -> list[Chunk]:
    """All that a server has; holes have something in them too."""
    store = MemoryStore(of, server)
    for index, (spec, stride) in enumerate(zip(of.tables, strides_of(of), strict=True)):
        owners, places = of.layout(index).place(np.arange(spec.rows), table=index)
        mine = np.flatnonzero(owners == server)
        held = np.full((store.slots(index), stride), 99.0, np.float32)
        held[places[mine], : spec.record_floats] = records[index][mine]
        store.write_records(index, 0, len(held), held.reshape(-1))
    store.add_tenant()
    store.begin_capture(0, True)
    chunks = []
    while store.capture_left():
        chunks.append(chunk_of(of, store.capture_chunk(700)))
    return chunks


@pytest.mark.parametrize(("wrote", "reads"), list(itertools.product(LAYOUTS, LAYOUTS)))
def test_rows_find_their_place(wrote: dict[str, int], reads: dict[str, int]) -> None:
    before, after = made(**wrote), made(**reads)
    records = records_of(before)
    chunks = [chunk for server in range(before.servers) for chunk in chunks_of(before, server, records)]
    ids = [np.concatenate([chunk[spec.name].ids for chunk in chunks if spec.name in chunk]) for spec in before.tables]
    for spec, found in zip(before.tables, ids, strict=True):
        assert np.array_equal(np.sort(found), np.arange(spec.rows)), "each row once, and no hole"
    for server in range(after.servers):
        store = MemoryStore(after, server)
        untouched = [whole(after, store, index) for index in range(len(after.tables))]
        counts = [
            (table, store.load_rows(table, ids, parts))
            for chunk in chunks
            for table, ids, parts in loaded_rows(after, chunk).rows
        ]
        for index, spec in enumerate(after.tables):
            owners, places = after.layout(index).place(np.arange(spec.rows), table=index)
            mine = np.flatnonzero(owners == server)
            assert sum(count for table, count in counts if table == index) == mine.size
            expected = untouched[index]
            expected[places[mine]] = 0
            expected[places[mine], : spec.record_floats] = records[index][mine]
            assert whole(after, store, index).tobytes() == expected.tobytes()
            bits = np.unpackbits(store.touched(index).view(np.uint8), bitorder="little")
            assert np.flatnonzero(bits).tolist() == sorted(places[mine].tolist())


def test_chunks_have_rows_in_order_and_no_empty_tables() -> None:
    of = made(servers=5, k=4, r=1)
    chunks = chunks_of(of, 1, records_of(of))
    assert {name for chunk in chunks for name in chunk} == {"a", "b", "c"}
    assert any(list(chunk) == ["a"] for chunk in chunks)
    for chunk in chunks:
        for spec in of.tables:
            if spec.name in chunk:
                rows = chunk[spec.name]
                assert len(rows)
                assert np.all(np.diff(rows.ids.astype(np.int64)) > 0)
                assert list(rows.states) == [name for name, _ in spec.optimizer.state_parts(spec.dim)]
    assert chunk_of(of, []) == {}
    assert loaded_rows(of, {}).rows == []


def test_wrong_rows_are_refused() -> None:
    """By the kernel, which would write past the end of a table."""
    store = MemoryStore(made(servers=1), 0)
    ids, weight, state = np.arange(7, dtype=np.uint32), np.zeros((7, 4), np.float32), np.zeros((7, 1), np.float32)
    assert store.load_rows(1, ids, [weight, state]) == 7
    for arguments, error, words in [
        ((3, ids, [weight, state]), IndexError, "there is no table 3"),
        ((1, ids + 1, [weight, state]), IndexError, "there is no row 7 in table 1"),
        ((1, ids, [weight]), ValueError, "have 2 parts, not 1"),
        ((1, ids, [weight, state[1:]]), ValueError, "part 1 of 7 rows has 7 floats; the array has 6"),
    ]:
        with pytest.raises(error, match=words):
            store.load_rows(*arguments)
    with pytest.raises(ValueError, match="are to come is not known yet"):
        MemoryStore(made(servers=3, k=2, r=1), 0, True).load_rows(1, ids, [weight, state])


def test_shards_of_other_layouts_have_other_names() -> None:
    names = [shard_of(made(**layout), 0).partition("of")[2] for layout in LAYOUTS]
    assert len(set(names)) == len(LAYOUTS)
    wide = job(*(table(f"t{k}", k=k, r=1) for k in range(1, 200)), servers=300)
    assert len(shard_of(wide, 299)) < 60


# --- Does it fit? ---


def piece_of(of: JobSpec) -> Manifest:
    target = Cut(id="0000000007-abcdef", step=7, marks=(7,), created=0.0, job=msgspec.to_builtins(of), extra={})
    return Manifest(source=None, target=target, tables=table_infos(of), seed=of.seed, chunks=(), made_by="a test")


def test_what_fits() -> None:
    for layout in LAYOUTS:
        check_fits(piece_of(made(servers=3)), made(**layout))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"rows": 54}, "table c is another one: rows 53 there, 54 here"),
        ({"dim": 2}, "table c is another one: dim 1 there, 2 here"),
        ({"init_bound": 0.25}, "table c is another one: init_bound 0.5 there, 0.25 here"),
        ({"name": "d"}, "tables differ from those of this run: c, d"),
    ],
)
def test_tables_that_differ(change: dict[str, Any], said: str) -> None:
    before = made(servers=3)
    after = msgspec.structs.replace(
        before, tables=(*before.tables[:2], msgspec.structs.replace(before.tables[2], **change))
    )
    with pytest.raises(CheckpointError) as caught:
        check_fits(piece_of(before), after)
    assert caught.value.message == f"{NAME}: {said}"


def test_jobs_that_differ() -> None:
    before = made(servers=3, workers=2, mode="sync")
    fewer = msgspec.structs.replace(before, tables=before.tables[:2])
    with pytest.raises(CheckpointError, match="tables differ from those of this run: c"):
        check_fits(piece_of(before), fewer)
    swapped = msgspec.structs.replace(before, tables=before.tables[::-1])
    with pytest.raises(CheckpointError, match="index 2 there, 0 here"):
        check_fits(piece_of(before), swapped)
    adagrad = msgspec.structs.replace(before.tables[0].optimizer, kind="adagrad")
    other = (msgspec.structs.replace(before.tables[0], optimizer=adagrad), *before.tables[1:])
    with pytest.raises(CheckpointError, match="table a is another one: states"):
        check_fits(piece_of(before), msgspec.structs.replace(before, tables=other))
    with pytest.raises(CheckpointError, match="made by 2 workers in mode sync, this run has 3 in mode sync"):
        check_fits(piece_of(before), msgspec.structs.replace(before, workers=3))
    with pytest.raises(CheckpointError, match="made by 2 workers in mode sync, this run has 2 in mode async"):
        check_fits(piece_of(before), msgspec.structs.replace(before, mode="async"))
    with pytest.raises(CheckpointError, match="made with seed 0, this run has 5"):
        check_fits(piece_of(before), msgspec.structs.replace(before, seed=5))


# --- To a directory and back ---


def take(store: MemoryStore, ends: list[LoadedAll], event: LoadedRows | LoadedAll) -> None:
    """As a server does: at once, for the memory of rows is used again."""
    if isinstance(event, LoadedAll):
        ends.append(event)
        return
    assert not ends
    for index, ids, parts in event.rows:
        store.load_rows(index, ids, parts)


@pytest.mark.parametrize("reads", LAYOUTS[:4])
def test_saved_and_loaded(tmp_path: Path, reads: dict[str, int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint, "CHUNK_BYTES", 1000)  # several of them
    before, after = made(servers=2), made(**reads)
    records = records_of(before)
    url = str(tmp_path)
    saved = save(url, before, [store_of(before, s, records) for s in range(2)], piece=NAME)
    assert [each.error for each in saved] == ["", ""]
    assert Storage.open(url).pieces() == [], "there is no manifest yet"
    assert publish_piece(url, before, saved).error == ""
    (manifest,), broken = Storage.open(url).manifests()
    assert (broken, manifest.name, manifest.target.marks, manifest.target.extra) == (
        [],
        NAME,
        (7,),
        {"x": 1, "run": "a run"},
    )
    assert manifest.rows == sum(spec.rows for spec in before.tables)
    assert len(manifest.chunks) > 4
    for server in range(after.servers):
        store = store_of(after, server, None)
        ends: list[LoadedAll] = []
        loader = Loader(
            url=url,
            cut="0000000007-abcdef",
            server=server,
            tell=functools.partial(take, store, ends),
            progress=lambda done, total: None,
        )
        asyncio.run(loader.load(after))
        assert [end.marks for end in ends] == [(7,)]
        wanted = store_of(after, server, records)
        for index in range(len(after.tables)):
            assert whole(after, store, index).tobytes() == whole(after, wanted, index).tobytes()
            assert store.touched(index).tobytes() == wanted.touched(index).tobytes()


def test_a_storage_that_is_a_file(tmp_path: Path) -> None:
    of = made(servers=1)
    (tmp_path / "file").write_text("")
    (saved,) = save(str(tmp_path / "file"), of, [store_of(of, 0, records_of(of))], piece=NAME)
    assert (saved.chunks, saved.number) == ("", 1)
    assert str(tmp_path / "file") in saved.error
    assert "cannot list" in publish_piece(str(tmp_path / "file"), of, [Saved(number=1, chunks="[]")]).error


def test_what_is_gone_is_not_published(tmp_path: Path) -> None:
    of = made(servers=1)
    saved = save(str(tmp_path), of, [store_of(of, 0, records_of(of))], piece=NAME)
    chunk = next((tmp_path / NAME).glob("*.safetensors"))
    chunk.unlink()
    assert publish_piece(str(tmp_path), of, saved).error == f"{NAME}/{chunk.name} is gone"
    assert Storage.open(str(tmp_path)).pieces() == []


def test_a_cut_that_is_given_up_says_nothing(tmp_path: Path) -> None:
    """And the next one does."""
    of = made(servers=1)
    store = store_of(of, 0, records_of(of))
    told: list[Saved] = []

    async def main() -> None:
        done = asyncio.Event()
        saver = Saver(url=str(tmp_path), server=0, tell=lambda saved: (told.append(saved), done.set())[0])
        store.begin_capture(0, True)
        saver.begin(Save(number=1, piece=NAME), of, store)
        saver.give_up(1)
        store.end_capture(False)
        store.begin_capture(0, True)
        saver.begin(Save(number=2, piece="0000000008-abcdef.full"), of, store)
        await asyncio.wait_for(done.wait(), 30)
        await asyncio.to_thread(saver.close)

    asyncio.run(main())
    assert [(saved.number, saved.error) for saved in told] == [(2, "")]
    chunks = msgspec.json.decode(told[0].chunks)
    assert sum(sum(chunk["rows"].values()) for chunk in chunks) == sum(spec.rows for spec in of.tables)


def test_memory_that_was_ready_before_is_what_chunks_take(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is taken from the system once, before training, and let go of when the first chunks are made."""
    of = made(servers=1)
    store, held = store_of(of, 0, records_of(of)), []
    taken: list[int] = []
    make_ready = checkpoint.make_ready

    def count(size: int) -> Any:
        taken.append(size)
        return make_ready(size)

    monkeypatch.setattr(checkpoint, "make_ready", count)

    async def main() -> None:
        done = asyncio.Event()
        saver = Saver(url=str(tmp_path), server=0, tell=lambda saved: done.set())
        size = chunk_memory(of, sum(store.slots(index) for index in range(len(of.tables))))
        await saver.get_ready(size)
        held.append(sum(block.nbytes for block in saver._ready))
        store.begin_capture(0, True)
        saver.begin(Save(number=1, piece=NAME), of, store)
        await asyncio.wait_for(done.wait(), 30)
        held.append(len(saver._ready))
        await asyncio.to_thread(saver.close)
        assert taken == [size] and held == [size, 0]

    asyncio.run(main())


def test_no_rows_at_all(tmp_path: Path) -> None:
    of = made(servers=1)
    (saved,) = save(str(tmp_path), of, [store_of(of, 0, None)], piece=NAME)
    assert (saved.chunks, saved.error) == ("[]", "")
    assert publish_piece(str(tmp_path), of, [saved]).error == ""


# -- waits -------------------------------------------------------------------------------------------------


def load_from(url: str, of: JobSpec, **options: Any) -> None:
    loader = Loader(
        url=url, cut="0000000007-abcdef", server=0, progress=lambda done, total: None, **{"tell": print, **options}
    )
    asyncio.run(loader.load(of))


def test_holders_that_take_nothing_are_not_waited_for_without_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpoint, "BACKLOG_SECONDS_MAX", 0.05)
    of = made(servers=1)
    assert publish_piece(str(tmp_path), of, save(str(tmp_path), of, [store_of(of, 0, records_of(of))], piece=NAME))
    with pytest.raises(CheckpointError, match=r"parity holders took no loaded rows for 0.05 s"):
        load_from(str(tmp_path), of, backlog_bytes=lambda: 1 << 40)
    backlogs = itertools.chain(range(1 << 40, 0, -(1 << 36)), itertools.repeat(0))
    load_from(str(tmp_path), of, tell=lambda event: None, backlog_bytes=lambda: next(backlogs))


def test_a_loop_that_takes_nothing_is_not_waited_for_without_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint, "HAND_OVER_SECONDS_MAX", 0.05)
    with pytest.raises(CheckpointError, match=r"the server took no loaded rows for 0.05 s"):
        checkpoint.take(concurrent.futures.Future())


# -- which is the newest -----------------------------------------------------------------------------------


def write_piece(url: str, number: int, *, step: int, source: str | None = None, **options: Any) -> str:
    """A manifest without chunks, by a coordinator of its own; its cut."""
    target = f"{step:010d}-{number % (1 << 24):06x}"
    write = WriteManifest(number=number, source=source, target=target, marks=(step,), chunks=(), discard=())
    assert writer(url, **options).write(made(servers=1), write).error == ""
    return target


def newest(url: str) -> str:
    found = Graph(Storage.open(url).manifests()[0]).newest()
    assert found is not None
    return found.id


def test_the_newest_is_that_of_the_last_start_term_and_number_whatever_clocks_say(tmp_path: Path) -> None:
    url = str(tmp_path)
    write_piece(url, 1 * TERM + 9, step=90, created=5000.0)
    after = write_piece(url, 2 * TERM + 1, step=80, created=4000.0)
    assert newest(url) == after, "a coordinator that was replaced, on a machine whose clock is behind"
    write_piece(url, 1 * TERM + 10, step=95, created=9000.0)
    assert newest(url) == after, "the old one comes back and writes what it had begun"
    again = write_piece(url, 1 * TERM + 1, step=70, starts=1, created=3000.0)
    assert newest(url) == again, "the run fell back to an older one"
    other = write_piece(url, 1 * TERM + 1, step=50, run="another", created=10.0)
    assert newest(url) == other, "somebody went back further and trains on"
    assert checkpoints.find_newest(url, run="a run")[0] == checkpoints.Start(url=url, cut=again, step=70)


def test_what_a_run_saw_when_it_began_is_what_its_successors_say_too(tmp_path: Path) -> None:
    url = str(tmp_path)
    write_piece(url, TERM + 1, step=10, run="x")
    write_piece(url, TERM + 1, step=20, run="y")
    write_piece(url, TERM + 2, step=30, run="x")
    write_piece(url, 2 * TERM + 1, step=40, run="y")
    lines = {each.target.step: each.target.line for each in Storage.open(url).manifests()[0]}
    assert [lines[step].seen for step in (20, 40)] == [{"x": (0, 1, 1)}] * 2  # type: ignore[union-attr]
    assert lines[30].seen == {}  # type: ignore[union-attr]


def test_a_manifest_whose_chunks_are_deleted_as_it_is_written_is_taken_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its writer was stopped between the look and the write, for so long that it counted as dead."""
    of = made(servers=1)
    url = str(tmp_path)
    saved = save(url, of, [store_of(of, 0, records_of(of))], piece=NAME)
    write = Storage.write_manifest

    def write_late(self: Storage, manifest: Manifest) -> None:
        self.delete_piece(manifest.name)
        write(self, manifest)

    monkeypatch.setattr(Storage, "write_manifest", write_late)
    written = publish_piece(url, of, saved)
    assert written.error.endswith("is gone")
    assert Storage.open(url).pieces() == []
