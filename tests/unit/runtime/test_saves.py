"""Goal: a server's own saves go to storage while it serves, and come back to its successor: found, then rows, then the
end; waited-for rows before others. A storage that fails costs the save and nothing else.

Method: real stores and a real directory; a successor's store must end with the bits of its predecessor's last save.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from checkpoint_stores import LAYOUTS, NAME, made, publish_piece, records_of, save, store_of, whole

from regrow.checkpoint.files import LocalFiles
from regrow.checkpoint.lineage import Graph
from regrow.checkpoint.manifest import MANIFEST
from regrow.checkpoint.saves import Owner, find_chain
from regrow.checkpoint.saves_ids import IdsKeeper
from regrow.checkpoint.saves_write import read_saves
from regrow.checkpoint.storage import Storage
from regrow.core.job import JobSpec
from regrow.core.protection import Partial
from regrow.core.recall_events import SavedRowsLoaded, SavesFound, SavesLoaded
from regrow.errors import CheckpointError
from regrow.runtime import checkpoint, saves
from regrow.runtime.checkpoint import shard_of
from regrow.runtime.saves import OwnLoader, OwnSaver, RecallReport
from regrow.store.memory import MemoryStore

Told = tuple[int, str, bool]


def make_saver(
    url: str, tell: Callable[..., None], *, server: int = 0, incarnation: int = 0, **options: Any
) -> OwnSaver:
    values: dict[str, Any] = {"run": "run", "start": 0, "base": None, **options}
    return OwnSaver(url=url, server=server, incarnation=incarnation, tell=tell, **values)


async def save_once(saver: OwnSaver, of: JobSpec, store: MemoryStore, *, full: bool, number: int, pushes: int) -> Told:
    done: asyncio.Future[Told] = asyncio.get_running_loop().create_future()
    saver._tell = lambda *told: done.set_result(told)
    store.begin_capture(0, full)
    saver.begin(number, of, store, full=full, marks=(pushes,) * of.marks, updates=10 * pushes)
    told = await asyncio.wait_for(done, 30)
    store.end_capture(not told[1])
    return told


class Taker:
    """A server's loop that takes what is loaded, at once, for the memory of rows is used again."""

    def __init__(self, store: MemoryStore) -> None:
        self.store = store
        self.events: list[Any] = []
        self.then: Callable[[], None] = lambda: None

    def take(self, event: SavesFound | SavedRowsLoaded | SavesLoaded) -> None:
        if isinstance(event, SavedRowsLoaded):
            for table, ids, parts in event.rows:
                self.store.load_rows(table, ids, parts)
            self.events.append([(table, ids.copy()) for table, ids, _ in event.rows])
        else:
            self.events.append(event)
        self.then()


def load(url: str, of: JobSpec, taker: Taker, *, server: int = 0, incarnation: int = 1, **options: Any) -> RecallReport:
    saver = make_saver(url, print, server=server, incarnation=incarnation, **options)
    loader = OwnLoader(saver=saver, server=server, tell=taker.take)
    return asyncio.run(loader.load(of))


def change(store: MemoryStore, of: JobSpec, server: int, step: int) -> None:
    """Some rows of every table get other values."""
    random = np.random.default_rng(step)
    for index, spec in enumerate(of.tables):
        owners, _ = of.layout(index).place(np.arange(spec.rows), table=index)
        mine = np.flatnonzero(owners == server)
        rows = np.sort(random.choice(mine, max(1, len(mine) // 5), replace=False)).astype(np.uint32)
        widths = [spec.dim, *(width for _, width in spec.optimizer.state_parts(spec.dim))]
        store.load_rows(index, rows, [random.random((len(rows), width), np.float32) for width in widths])


@pytest.mark.parametrize("layout", LAYOUTS[:2])
def test_saved_and_loaded(tmp_path: Path, layout: dict[str, int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint, "CHUNK_BYTES", 500)  # several of them
    monkeypatch.setattr(saves, "LOAD_PART_BYTES", 200)
    of, server, url = made(**layout), layout["servers"] - 1, str(tmp_path)
    store = store_of(of, server, records_of(of))

    async def run() -> list[Told]:
        saver = make_saver(url, print, server=server)
        assert saver.choose_kind() == (True, "it is the first")
        told = [await save_once(saver, of, store, full=True, number=1, pushes=1)]
        for step in (2, 3):
            change(store, of, server, step)
            told.append(await save_once(saver, of, store, full=False, number=step, pushes=step))
        assert saver.saved is not None and saver.saved.marks == (3,) * of.marks
        assert saver.stored_bytes > 0 and saver.pause_seconds_max > 0
        await asyncio.to_thread(saver.close)
        return told

    assert asyncio.run(run()) == [(1, "", False), (2, "", False), (3, "", False)]
    assert Storage.open(url).pieces() == []
    taker = Taker(store_of(of, server, None))
    report = load(url, of, taker, server=server)
    found, *parts, end = taker.events
    assert (found.marks, found.updates, end) == ((3,) * of.marks, 30, SavesLoaded())
    assert len(parts) > 3 and report.found_seconds <= report.seconds
    told: dict[int, list[int]] = {}
    for part in parts:
        for table, ids in part:
            told.setdefault(table, []).extend(ids.tolist())
    assert {table: sorted(ids) for table, ids in told.items()} == {t: ids.tolist() for t, ids in found.ids.items()}
    assert report.rows == sum(map(len, told.values()))
    for index in range(len(of.tables)):
        assert whole(of, taker.store, index).tobytes() == whole(of, store, index).tobytes()
    assert [each.save for each in report.chain.saves[:2]] == ["0000000001-0000000001", "0000000000-0000000003"]


def test_a_successor_goes_on_saving_where_its_predecessor_ended(tmp_path: Path) -> None:
    of, url = made(servers=1), str(tmp_path)
    store = store_of(of, 0, records_of(of))

    async def run() -> MemoryStore:
        first = make_saver(url, print)
        await save_once(first, of, store, full=True, number=1, pushes=1)
        second = make_saver(url, print, incarnation=1)
        taker = Taker(store_of(of, 0, None))
        await OwnLoader(saver=second, server=0, tell=taker.take).load(of)
        assert second.choose_kind()[0] is False
        change(taker.store, of, 0, 7)
        assert (await save_once(second, of, taker.store, full=False, number=1, pushes=2))[:2] == (1, "")
        for saver in (first, second):
            await asyncio.to_thread(saver.close)
        return taker.store

    after = asyncio.run(run())
    taker = Taker(store_of(of, 0, None))
    report = load(url, of, taker, incarnation=2)
    assert len(report.chain.saves) == 4, "two claims, a delta and a full"
    assert whole(of, taker.store, 0).tobytes() == whole(of, after, 0).tobytes()


def test_what_has_copies_is_not_in_saves(tmp_path: Path) -> None:
    """Dense parameters come back from copies; saves that have them all the same, of before, load as ever."""
    plain = made(servers=3)
    copied = msgspec.structs.replace(plain.tables[2], k=1, r=1)
    of = msgspec.structs.replace(plain, tables=(*plain.tables[:2], copied), protection=Partial())
    assert saves.find_saved(of) == {"a", "b"}
    assert saves.find_saved(made(servers=3, r=1)) == {"a", "b", "c"}, "where all have parities, all are saved"
    store = store_of(of, 0, records_of(of))

    async def run(url: str) -> set[str]:
        saver = make_saver(url, print)
        await save_once(saver, of, store, full=True, number=1, pushes=1)
        await asyncio.to_thread(saver.close)
        assert saver.saved is not None
        return {table for chunk in saver.saved.chunks for table in chunk.rows}

    assert asyncio.run(run(str(tmp_path / "new"))) == {"a", "b"}
    with pytest.MonkeyPatch.context() as before:
        before.setattr(saves, "find_saved", lambda job: {table.name for table in job.tables})
        assert asyncio.run(run(str(tmp_path / "old"))) == {"a", "b", "c"}
    for url in ("new", "old"):
        taker = Taker(store_of(of, 0, None))
        saver = make_saver(str(tmp_path / url), print, incarnation=1)
        asyncio.run(OwnLoader(saver=saver, server=0, tell=taker.take).load(of, (0, 1)))
        assert sorted(taker.events[0].ids) == [0, 1]
        for index in (0, 1):
            assert whole(of, taker.store, index).tobytes() == whole(of, store, index).tobytes()


def test_nothing_was_saved(tmp_path: Path) -> None:
    of = made(servers=1, workers=3)
    taker = Taker(store_of(of, 0, None))
    load(str(tmp_path), of, taker)
    assert taker.events == [SavesFound(marks=(0,) * of.marks, updates=0, ids={}), SavesLoaded()]


def test_rows_that_are_waited_for_come_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint, "CHUNK_BYTES", 300)
    monkeypatch.setattr(
        "regrow.checkpoint.saves_load.SavedRows.rows_newest_first.__kwdefaults__", {"threads": 1, "ahead_bytes_max": 1}
    )
    of, url = made(servers=1), str(tmp_path)
    store = store_of(of, 0, records_of(of))

    async def run() -> Taker:
        saver = make_saver(url, print)
        await save_once(saver, of, store, full=True, number=1, pushes=1)
        second = make_saver(url, print, incarnation=1)
        taker = Taker(store_of(of, 0, None))
        loader = OwnLoader(saver=second, server=0, tell=taker.take)
        loader.want(0, np.array([0], np.uint32))  # too early, and forgotten
        taker.then = lambda: loader.want(0, np.array([50], np.uint32)) if len(taker.events) == 1 else None
        await loader.load(of)
        await asyncio.to_thread(saver.close)
        return taker

    taker = asyncio.run(run())
    first = taker.events[1]
    assert any(table == 0 and 50 in ids for table, ids in first)
    assert len(taker.events) > 5


def test_only_some_tables(tmp_path: Path) -> None:
    """Those of which nobody else has a copy."""
    of, url = made(servers=1), str(tmp_path)
    store = store_of(of, 0, records_of(of))

    async def run() -> list[Any]:
        saver = make_saver(url, print)
        await save_once(saver, of, store, full=True, number=1, pushes=1)
        taker = Taker(store_of(of, 0, None))
        second = make_saver(url, print, incarnation=1)
        await OwnLoader(saver=second, server=0, tell=taker.take).load(of, (0, 2))
        await asyncio.to_thread(saver.close)
        return taker.events

    found, *parts, _ = asyncio.run(run())
    assert set(found.ids) == {0, 2} or not len(found.ids[1])
    assert {table for part in parts for table, _ in part} == {0, 2}


# -- below the saves, a cut --------------------------------------------------------------------------------


@pytest.mark.parametrize("wrote", [{"servers": 2}, {"servers": 3}])
def test_a_run_that_went_on_from_a_cut_and_saved_nothing_yet(tmp_path: Path, wrote: dict[str, int]) -> None:
    before, of, url = made(**wrote), made(servers=2), str(tmp_path)
    records = records_of(before)
    saved = save(url, before, [store_of(before, s, records) for s in range(before.servers)], piece=NAME)
    assert publish_piece(url, before, saved).error == ""
    (cut,) = Graph(Storage.open(url).manifests()[0]).cuts
    for server in range(2):
        taker = Taker(store_of(of, server, None))
        report = load(url, of, taker, server=server, base=cut)
        assert taker.events[0].marks == (7,)
        assert report.chain.base == cut
        wanted = store_of(of, server, records)
        for index in range(len(of.tables)):
            assert whole(of, taker.store, index).tobytes() == whole(of, wanted, index).tobytes()
    with pytest.raises(CheckpointError, match="0000000008"):
        load(url, of, Taker(store_of(of, 0, None)), incarnation=5, base="0000000008-abcdef", run="other")


# -- storage that fails ------------------------------------------------------------------------------------


def test_a_storage_that_fails_costs_the_save_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    of, url = made(servers=1), str(tmp_path / "x")
    store = store_of(of, 0, records_of(of))
    (tmp_path / "x").write_text("")  # a file where the directory should be

    async def run() -> None:
        saver = make_saver(url, print)
        number, error, full = await save_once(saver, of, store, full=True, number=1, pushes=1)
        assert (number, full) == (1, True) and url in error
        (tmp_path / "x").unlink()
        assert await save_once(saver, of, store, full=True, number=2, pushes=1) == (2, "", False)
        write_last = Storage.write_last
        monkeypatch.setattr(Storage, "write_last", lambda *_: (_ for _ in ()).throw(CheckpointError("no room")))
        change(store, of, 0, 3)
        assert await save_once(saver, of, store, full=False, number=3, pushes=2) == (3, "no room", False)
        monkeypatch.setattr(Storage, "write_last", write_last)
        assert await save_once(saver, of, store, full=False, number=4, pushes=2) == (4, "", False)
        await asyncio.to_thread(saver.close)

    asyncio.run(run())
    owner = Owner(run="run", start=0, shard=shard_of(of, 0))
    found = read_saves(Storage.open(url), owner)
    chain = find_chain(found.manifests, owner)
    assert chain is not None and [each.number for each in chain.saves] == [4, 2]
    assert found.unfinished == ("0000000000-0000000003",), "its manifest may still come"
    taker = Taker(store_of(of, 0, None))
    load(url, of, taker)
    assert whole(of, taker.store, 0).tobytes() == whole(of, store, 0).tobytes()


class HungManifests(LocalFiles):
    """Chunks are written; a manifest is not, until it is let go."""

    let_go = threading.Event()

    def write(self, path: str, data: Any, given_up: threading.Event) -> None:
        if path.endswith(MANIFEST):
            self.let_go.wait()
        super().write(path, data, given_up)


def test_a_storage_that_hangs_costs_the_save_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """While it hangs the loop goes on; what was written too late is not there."""
    of, url = made(servers=1), str(tmp_path)
    store = store_of(of, 0, records_of(of))
    HungManifests.let_go = threading.Event()
    files = HungManifests(tmp_path)
    monkeypatch.setattr(Storage, "open", lambda url: Storage(url, files, timeout_seconds=0.3, attempts=1))

    async def run() -> int:
        turns = 0

        async def turn() -> None:
            nonlocal turns
            while True:
                await asyncio.sleep(0.005)
                turns += 1

        saver = make_saver(url, print)
        turning = asyncio.get_running_loop().create_task(turn())
        number, error, full = await save_once(saver, of, store, full=True, number=1, pushes=1)
        assert (number, full) == (1, True) and "no answer within 0.3 s" in error
        turning.cancel()
        HungManifests.let_go.set()
        assert await save_once(saver, of, store, full=True, number=2, pushes=2) == (2, "", False)
        await asyncio.to_thread(saver.close)
        return turns

    assert asyncio.run(run()) > 5
    found = read_saves(Storage.open(url), Owner(run="run", start=0, shard=shard_of(of, 0)))
    assert [each.number for each in found.manifests] == [2]


def test_a_save_that_is_given_up_says_nothing_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While some of its chunks are stored."""
    monkeypatch.setattr(checkpoint, "CHUNK_BYTES", 500)
    of, url = made(servers=1), str(tmp_path)
    store = store_of(of, 0, records_of(of))
    told: list[Told] = []

    async def run() -> None:
        done, stored, loop, keep = asyncio.Event(), asyncio.Event(), asyncio.get_running_loop(), IdsKeeper.add
        saver = make_saver(url, print)
        await save_once(saver, of, store, full=True, number=1, pushes=1)
        change(store, of, 0, 1)

        def look(keeper: IdsKeeper, chunk: Any) -> None:
            keep(keeper, chunk)
            if len(keeper._chunks) == 2:
                loop.call_soon_threadsafe(stored.set)

        monkeypatch.setattr(IdsKeeper, "add", look)
        saver._tell = lambda *each: (told.append(each), done.set())[0]
        store.begin_capture(0, False)
        saver.begin(2, of, store, full=False, marks=(2,), updates=2)
        await asyncio.wait_for(stored.wait(), 30)
        saver.give_up(2)
        store.end_capture(False)
        store.begin_capture(0, False)
        saver.begin(3, of, store, full=False, marks=(3,), updates=3)
        await asyncio.wait_for(done.wait(), 30)
        await asyncio.to_thread(saver.close)

    asyncio.run(run())
    assert told == [(3, "", False)]
    found = read_saves(Storage.open(url), Owner(run="run", start=0, shard=shard_of(of, 0)))
    assert [each.marks for each in found.manifests] == [(1,), (3,)]
    assert found.unfinished == ()


def test_a_loop_that_raises_ends_the_load(tmp_path: Path) -> None:
    of = made(servers=1)
    taker = Taker(store_of(of, 0, None))

    def fail() -> None:
        raise ValueError("not now")

    taker.then = fail
    with pytest.raises(ValueError, match="not now"):
        load(str(tmp_path), of, taker)
