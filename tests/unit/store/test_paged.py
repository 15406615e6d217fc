"""Goal: what `PagedRows` promises of rows in memory, of checkpoints, and of bad days.

Method: small jobs in files of a temporary directory. Crashes are what the model test is for (test_tiered_model.py);
here a store is closed and built again, which loses all that was not in a checkpoint.
"""

from __future__ import annotations

import re
import resource
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from fetching import do_upkeep, wait_for
from subjects import job_of, records_of

from regrow.core.job import JobSpec
from regrow.errors import StoreDamaged, StoreFull, UserError
from regrow.store.memory import MemoryStore
from regrow.store.tiered import TieredStore

ROWS = 4000
JOB = job_of(("rowwise_adagrad", ROWS, 16, 1, 0), servers=1)
IN_MEMORY = Path("/dev/shm")
FRAME_BYTES = 80 + 45  # of a record, and what a frame takes beside it


def build(folder: Path, *, frames: int = 200, of: JobSpec = JOB, **options: Any) -> TieredStore:
    options = {"io": "threads", **options}
    return TieredStore(of, 0, directory=folder, cache_bytes=frames * FRAME_BYTES, **options)


def rows(*slots: int) -> tuple[np.ndarray, np.ndarray]:
    return np.array([len(slots)], np.int32), np.array(slots, np.uint32)


def change(store: Any, slots: np.ndarray, value: float = 1.0, twin: MemoryStore | None = None) -> None:
    """A pull and a push of rows, in the memory store too."""
    call = np.array([len(slots)], np.int32), np.asarray(slots, np.uint32)
    ticket = store.fetch(*call)
    wait_for(store, ticket)
    grads = np.full(16 * len(slots), value, np.float32)
    store.update(*call, grads, 1)
    if ticket:
        store.release(ticket)
    if twin is not None:
        twin.update(*call, grads, 1)
    store.upkeep()


def make_checkpoint(store: TieredStore) -> int:
    epoch = store.begin_epoch()
    do_upkeep(store, lambda: store.poll_complete() >= epoch)
    store.commit_epoch(epoch)
    do_upkeep(store, lambda: store.tier_report()["epoch_committed"] >= epoch)
    return epoch


# ---- what is in memory


def test_rows_that_were_never_changed_need_no_disk(tmp_path: Path) -> None:
    store = build(tmp_path)
    assert store.fetch(*rows(1, 2, 3)) == 0
    out = np.empty(48, np.float32)
    store.gather(*rows(1, 2, 3), out)
    assert out.tobytes() == records_of(store, 0)[1:4, :16].tobytes()
    assert store.tier_report()["reads"] == 0


def test_rows_that_are_not_in_memory_are_refused_by_name(tmp_path: Path) -> None:
    store = build(tmp_path)
    with pytest.raises(ValueError, match="row 7 of table 0"):
        store.gather(*rows(7), np.empty(16, np.float32))
    with pytest.raises(ValueError, match="row 7 of table 0"):
        store.update(*rows(7), np.empty(16, np.float32), 1)


def test_more_rows_than_the_cache_has_room_for_are_refused(tmp_path: Path) -> None:
    store = build(tmp_path, frames=10)
    with pytest.raises(ValueError, match="11 rows of 80 bytes do not fit"):
        store.fetch(*rows(*range(11)))
    assert store.fetch(*rows(*range(10))) == 0


def build_full(folder: Path, *, count: int = 600) -> TieredStore:
    """A store of which so many rows were changed, and all of them are on disk only."""
    store = build(folder, frames=100)
    for first in range(0, count, 50):
        change(store, np.arange(first, first + 50))
    epoch = make_checkpoint(store)
    store.close()
    return build(folder, frames=100, at_epoch=epoch)


def test_tickets_are_admitted_in_order_and_hold_nothing_before(tmp_path: Path) -> None:
    """Three tickets that need more than half of the cache each: one has its rows at a time, first come first served."""
    store = build_full(tmp_path)
    tickets = [store.fetch(*rows(*range(first, first + 60))) for first in (0, 60, 120)]
    assert tickets == sorted(set(tickets)) and tickets[0] > 0
    for number, ticket in enumerate(tickets):
        assert store.tier_report()["frames_pinned"] <= 60
        wait_for(store, ticket)
        for later in tickets[number + 1 :]:
            assert later not in store.poll_fetched()
        store.release(ticket)
    assert store.tier_report()["frames_pinned"] == 0


def test_pinned_rows_stay(tmp_path: Path) -> None:
    store = build_full(tmp_path)
    mine = rows(*range(40))
    ticket = store.fetch(*mine)
    wait_for(store, ticket)
    for first in range(100, 600, 50):
        change(store, np.arange(first, first + 50))
    out = np.empty(16 * 40, np.float32)
    store.gather(*mine, out)
    assert out.tobytes() == records_of(store, 0)[:40, :16].tobytes()
    store.release(ticket)
    for first in range(100, 600, 50):
        change(store, np.arange(first, first + 50))
    with pytest.raises(ValueError, match="not in memory"):
        store.gather(*mine, out)
    with pytest.raises(ValueError, match="no ticket"):
        store.release(ticket)


def test_a_ticket_can_be_given_up_at_any_time(tmp_path: Path) -> None:
    store = build_full(tmp_path)
    first, second, third = (store.fetch(*rows(*range(n, n + 60))) for n in (0, 60, 120))
    store.release(first)  # perhaps while it is being read
    store.release(second)
    wait_for(store, third)
    out = np.empty(16 * 60, np.float32)
    store.gather(*rows(*range(120, 180)), out)
    assert out.tobytes() == records_of(store, 0)[120:180, :16].tobytes()


@pytest.mark.parametrize("policy", ["lru", "none", "self"])
@pytest.mark.parametrize("io", ["threads", "direct", "mmap", "auto"])
def test_training_has_the_bits_of_a_store_in_memory(tmp_path: Path, policy: str, io: str) -> None:
    """With checkpoints, a log that is cleaned, and a cache of a twentieth."""
    store, twin, rng = build(tmp_path, policy=policy, io=io), MemoryStore(JOB, 0), np.random.default_rng(1)
    for step in range(120):
        change(store, rng.permutation(ROWS)[:100], rng.random(), twin)
        if step % 40 == 39:
            make_checkpoint(store)
    assert records_of(store, 0).tobytes() == records_of(twin, 0).tobytes()
    assert store.touched(0).tobytes() == twin.touched(0).tobytes()
    report = store.tier_report()
    assert report["rows_evicted_dirty"] > 0 < report["log_rows_read"] + report["rows_from_memory"]
    assert report["hits"] + report["misses"] == 120 * 100


@pytest.mark.parametrize("frames", [ROWS - 1, ROWS, 2 * ROWS])
def test_a_cache_for_all_rows_has_the_bits_of_a_store_in_memory(tmp_path: Path, frames: int) -> None:
    """Or for all but one. Checkpoints are made, given up and gone back to."""
    store, twin, rng = build(tmp_path, frames=frames), MemoryStore(JOB, 0), np.random.default_rng(5)
    for step in range(60):
        change(store, rng.permutation(ROWS)[:400], rng.random(), twin)
        if step % 20 == 9:
            store.begin_epoch()  # rows that change before they are written are kept as they were
    epoch = make_checkpoint(store)
    assert records_of(store, 0).tobytes() == records_of(twin, 0).tobytes()
    change(store, np.arange(50), 3.0)
    store.close()
    store = build(tmp_path, frames=frames, at_epoch=epoch)
    with pytest.raises(ValueError, match="row 7 of table 0"):
        store.gather(*rows(7), np.empty(16, np.float32))
    for _ in range(60):
        change(store, rng.permutation(ROWS)[:400], rng.random(), twin)
    assert records_of(store, 0).tobytes() == records_of(twin, 0).tobytes()
    assert store.touched(0).tobytes() == twin.touched(0).tobytes()
    assert (store.tier_report()["rows_evicted"] == 0) == (frames >= ROWS)


def test_rows_of_a_page_go_home_together(tmp_path: Path) -> None:
    """They come to the log far apart, each with one row of every other page in between; and a page is written for all
    that the log has of it."""
    count, each_page = 400_000, 6
    store = build(tmp_path, of=job_of(("rowwise_adagrad", count, 16, 1, 0), servers=1), bytes_max=68 << 20)
    values = np.random.default_rng(7).random((count, 17), np.float32)
    for first in range(each_page):
        ids = np.arange(first, count, each_page, dtype=np.uint32)
        store.load_rows(0, ids, [values[ids, :16].copy(), values[ids, 16:].copy()])
        do_upkeep(store, lambda: True)
    do_upkeep(store, lambda: store.tier_report()["home_rows_written"] > 0)
    report = store.tier_report()
    assert report["home_bytes_written"] < 200 * report["home_rows_written"], "a page of 512 bytes has several of them"
    assert report["rows_in_log"] < count
    assert records_of(store, 0)[:, :17].tobytes() == values.tobytes()


def test_the_log_stays_within_its_memory_without_any_upkeep(tmp_path: Path) -> None:
    """So many rows are loaded in one go that their places would take more than is allowed; the files would allow it."""
    count = 5_000_000
    store = build(tmp_path, of=job_of(("sgd", count, 4, 1, 0), servers=1), bytes_max=1 << 30)
    ids = np.arange(count, dtype=np.uint32)
    store.load_rows(0, ids, [np.ones((count, 4), np.float32)])
    report = store.tier_report()
    assert report["log_bytes_max"] > 32 * count
    assert 12.5 * report["rows_in_log"] < (44 << 20) + 0.5 * count + 12.5 * (2 << 20) / 32, "but for a segment or two"
    assert report["clean_rounds"] > 0


# ---- checkpoints


def test_a_store_goes_back_to_its_checkpoint_again_and_again(tmp_path: Path) -> None:
    """After each of three ends, rows are those of the checkpoint, and training goes on from them."""
    store, rng = build(tmp_path), np.random.default_rng(2)
    for _ in range(3):
        for _ in range(10):
            change(store, rng.permutation(ROWS)[:100], rng.random())
        epoch = make_checkpoint(store)
        expected, touched = records_of(store, 0), store.touched(0)
        for _ in range(10):
            change(store, rng.permutation(ROWS)[:100], rng.random())
        store.begin_epoch()  # begun, and never complete
        store.close()
        store = build(tmp_path, at_epoch=epoch)
        assert records_of(store, 0).tobytes() == expected.tobytes()
        assert store.touched(0).tobytes() == touched.tobytes()
        assert store.poll_complete() == epoch


def test_a_checkpoint_has_rows_as_they_were_at_its_instant(tmp_path: Path) -> None:
    store, rng = build(tmp_path), np.random.default_rng(3)
    change(store, np.arange(150))
    epoch, expected = store.begin_epoch(), records_of(store, 0)
    for _ in range(5):
        change(store, rng.permutation(ROWS)[:150])
    do_upkeep(store, lambda: store.poll_complete() >= epoch)
    assert store.tier_report()["rows_copied"] > 0
    store.close()
    store = build(tmp_path, at_epoch=epoch)  # complete is enough: all servers may have had it
    assert records_of(store, 0).tobytes() == expected.tobytes()


def test_epochs_are_committed_in_order_and_when_complete(tmp_path: Path) -> None:
    store = build(tmp_path)
    change(store, np.arange(10))
    first = store.begin_epoch()
    with pytest.raises(ValueError, match="not complete"):
        store.commit_epoch(first)
    store.hasten(first, 0.0)
    with pytest.raises(ValueError, match="did not begin"):
        store.hasten(first + 1, 1.0)
    do_upkeep(store, lambda: store.poll_complete() == first)
    second = make_checkpoint(store)
    with pytest.raises(ValueError, match="later than"):
        store.commit_epoch(first)
    store.close()
    with pytest.raises(ValueError, match=f"no checkpoint {first} here; there are {second} to {second}"):
        build(tmp_path, at_epoch=first)
    with pytest.raises(ValueError, match="no checkpoint 9 here"):
        build(tmp_path, at_epoch=9)


def test_the_log_is_bounded_and_what_is_written_is_counted(tmp_path: Path) -> None:
    store, rng = build(tmp_path, bytes_max=48 << 20), np.random.default_rng(4)
    for step in range(
        4000
    ):  # half of the rows once, which go home; the others are overtaken in the log, time and again
        change(store, np.arange(step, ROWS, 40) if step < 40 else rng.permutation(ROWS // 2)[:150])
        if step % 500 == 499:
            make_checkpoint(store)
    report = store.tier_report()
    assert report["clean_rounds"] > 0 < report["home_rows_written"]
    assert report["log_bytes_used"] <= report["log_bytes_max"] < 48 << 20
    assert report["file_bytes"] < 50 << 20
    entries = report["rows_evicted_dirty"] + report["rows_copied"] + report["rows_flushed"]
    assert 96 * entries * 0.95 <= report["log_bytes_written"] <= 96 * entries * 1.3 + (1 << 20)
    assert records_of(store, 0)[:, 16].min() > 0, "every row was changed, and can be read"


# ---- captures of rows on disk


def test_rows_are_captured_and_loaded_around_the_cache(tmp_path: Path) -> None:
    store, other = build(tmp_path / "a"), build(tmp_path / "b")
    for first in range(0, 2000, 100):
        change(store, np.arange(first, first + 100), first)
    tenant, expected = store.add_tenant(), records_of(store, 0)
    store.begin_capture(tenant, True)
    change(store, np.arange(100), 5.0)
    while store.capture_left():
        for table, ids, parts in store.capture_chunk(10_000):
            assert other.load_rows(table, ids, parts) == len(ids)
    store.end_capture(True)
    assert records_of(other, 0).tobytes() == expected.tobytes()
    assert store.dirty_rows(tenant) == 100
    with pytest.raises(ValueError, match="priorities"):
        store.set_priority(tenant, "mfu", [0], 0.5, 1, 1)


# ---- bad days


def damage_log(folder: Path, *, slot: int) -> None:
    """Changes a bit of what the log has of a row, of the first checkpoint."""
    with (folder / "server-0" / "log").open("r+b") as log:
        content = log.read()
        at = content.index(np.uint32(slot).tobytes() + np.uint32(1).tobytes(), 512) + 40  # the slot, and its epoch
        log.seek(at)
        log.write(bytes([content[at] ^ 4]))


def test_a_damaged_row_is_named_and_not_served(tmp_path: Path) -> None:
    store = build(tmp_path, frames=300)
    change(store, np.arange(100))
    epoch = make_checkpoint(store)
    store.close()
    damage_log(tmp_path, slot=17)
    with pytest.raises(StoreDamaged, match="1 damaged: row 17 of table 0 "):
        build(tmp_path, frames=300, at_epoch=epoch)


@pytest.mark.parametrize("copies", [1, 2])
def test_the_state_survives_damage_to_one_of_its_copies(tmp_path: Path, copies: int) -> None:
    store = build(tmp_path)
    change(store, np.arange(100))
    epoch, expected = make_checkpoint(store), records_of(store, 0)
    store.close()
    state = tmp_path / "server-0" / "state"
    content = bytearray(state.read_bytes())
    for copy in range(copies):
        content[copy * (1 << 16) + 50] ^= 1
    state.write_bytes(content)
    if copies == 2:
        with pytest.raises(StoreDamaged, match="both copies"):
            build(tmp_path, at_epoch=epoch)
    else:
        assert records_of(build(tmp_path, at_epoch=epoch), 0).tobytes() == expected.tobytes()


def other_job(name: str) -> JobSpec:
    table = JOB.tables[0]
    optimizer = msgspec.structs.replace(table.optimizer, learning_rate=0.5)
    changes: dict[str, dict[str, Any]] = {
        "seed": {"seed": 12},
        "servers": {"servers": 2},
        "tables": {"tables": (msgspec.structs.replace(table, optimizer=optimizer),)},
    }
    return msgspec.structs.replace(JOB, **changes[name])


@pytest.mark.parametrize("name", ["seed", "servers", "tables"])
def test_files_of_another_job_are_refused_by_name(tmp_path: Path, name: str) -> None:
    build(tmp_path).close()
    with pytest.raises(UserError, match=f"another {name}"):
        build(tmp_path, of=other_job(name), wipe=True)


def test_files_of_another_format_are_refused(tmp_path: Path) -> None:
    build(tmp_path).close()
    identity = tmp_path / "server-0" / "job.json"
    identity.write_text(re.sub('"format": 2', '"format": 1', identity.read_text()))
    with pytest.raises(UserError, match=re.escape("another format (1 there, 2 here)")):
        build(tmp_path, wipe=True)


def test_a_directory_in_use_is_refused(tmp_path: Path) -> None:
    store = build(tmp_path)
    with pytest.raises(UserError, match="in use"):
        build(tmp_path, wipe=True)
    store.close()
    with pytest.raises(UserError, match="has rows of this job already"):
        build(tmp_path)
    build(tmp_path, wipe=True).close()
    with pytest.raises(UserError, match="no store in"):
        build(tmp_path / "nothing", at_epoch=1)


def test_temporary_files_make_room_for_others_and_no_other_files_do(tmp_path: Path) -> None:
    build(tmp_path, temporary=True).close()
    build(tmp_path, of=other_job("seed"), temporary=True).close()
    with pytest.raises(UserError, match="has the rows of another job: another seed"):
        build(tmp_path)
    build(tmp_path / "kept").close()
    with pytest.raises(UserError, match="has rows of this job already"):
        build(tmp_path / "kept", temporary=True)
    assert (tmp_path / "kept" / "server-0" / "home").exists()


def test_temporary_files_that_somebody_uses_stay(tmp_path: Path) -> None:
    store = build(tmp_path, temporary=True)
    with pytest.raises(UserError, match="is in use by another process"):
        build(tmp_path, temporary=True)
    assert (tmp_path / "server-0" / "job.json").exists()
    store.close()


def test_tables_with_parities_and_impossible_sizes_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="have no parities"):
        build(tmp_path, of=job_of(("sgd", 10, 2, 1, 1), servers=3))
    with pytest.raises(ValueError, match="the log may have"):
        build(tmp_path, bytes_max=1 << 20)
    with pytest.raises(ValueError, match="has room for 0 rows"):
        build(tmp_path, frames=0)
    with pytest.raises(ValueError, match="policy must be"):
        build(tmp_path, policy="fifo")
    with pytest.raises(ValueError, match="io must be"):
        build(tmp_path, io="dax")


def test_how_files_are_read_is_said(tmp_path: Path) -> None:
    assert build(tmp_path / "a", io="threads").io_description == "threads, as asked for"
    assert build(tmp_path / "b", io="mmap").io_description == "mmap, as asked for"
    described = build(tmp_path / "c", io="auto").io_description
    assert re.match(r"direct \((io_uring|threads).*blocks of|threads: .*no O_DIRECT|mmap: .*in memory", described)


def test_checkpoints_that_were_begun_in_vain_do_not_fill_the_log_for_ever(tmp_path: Path) -> None:
    """One after the other, none of them completed in time, and all rows change in between: an epoch that might not be
    completed any more is not written, and the one that was begun last before it can be."""
    store, everything = build(tmp_path, frames=2 * ROWS), rows(*range(ROWS))
    change(store, np.arange(ROWS))
    first = make_checkpoint(store)
    for _ in range(200):
        store.begin_epoch()
        assert store.fetch(*everything) == 0
        store.update(*everything, np.ones(16 * ROWS, np.float32), 1)
    assert store.tier_report()["epoch_spoiled"] > first, "the log had room for all of them"
    do_upkeep(store, lambda: store.poll_complete() > first)
    store.commit_epoch(store.poll_complete())
    report = store.tier_report
    do_upkeep(store, lambda: report()["log_bytes_used"] < 0.9 * report()["log_bytes_max"])
    change(store, np.arange(ROWS))
    assert make_checkpoint(store) > first
    store.close()


@pytest.mark.parametrize("io", ["auto", "direct"])
def test_without_o_direct_files_are_read_through_the_page_cache(tmp_path: Path, io: str) -> None:
    """Where a file cannot be opened past the page cache: here, because a directory has its name."""
    (tmp_path / "server-0" / "probe").mkdir(parents=True)
    store, twin = build(tmp_path, io=io), MemoryStore(JOB, 0)
    assert store.io_description == "threads: the file system has no O_DIRECT"
    for first in (0, 300, 600, 0):  # more than the cache has room for: they leave, and come back
        change(store, np.arange(first, first + 150), 1.0, twin)
    epoch = make_checkpoint(store)
    assert records_of(store, 0).tobytes() == records_of(twin, 0).tobytes()
    store.close()
    again = build(tmp_path, io=io, at_epoch=epoch)
    assert records_of(again, 0).tobytes() == records_of(twin, 0).tobytes()
    again.close()


def test_rows_are_read_ahead_where_that_is_of_use(tmp_path: Path) -> None:
    store = build(tmp_path / "a", frames=300)
    assert store.rows_ahead_max == store.tier_report()["frames"] // 3
    assert build(tmp_path / "b", io="mmap").rows_ahead_max == 0, "reads take no time"
    assert build(tmp_path / "c", frames=2 * ROWS).rows_ahead_max == 0, "everything fits"
    assert build(tmp_path / "d", policy="none").rows_ahead_max == 0, "rows leave at once"


@pytest.mark.skipif(not IN_MEMORY.is_dir(), reason="there is no directory in memory")
def test_files_in_memory_are_mapped() -> None:
    with tempfile.TemporaryDirectory(dir=IN_MEMORY) as folder:
        store = build(Path(folder), io="auto")
        assert store.io_description == "mmap: the files are in memory"
        store.close()


@pytest.mark.parametrize("io", ["threads", "direct", "mmap"])
def test_rows_of_mapped_files_come_without_a_ticket(tmp_path: Path, io: str) -> None:
    """Also one that is named twice. From any other file they have to be read."""
    store, twin = build(tmp_path), MemoryStore(JOB, 0)
    change(store, np.arange(100), 1.0, twin)
    epoch = make_checkpoint(store)
    store.close()
    store = build(tmp_path, io=io, at_epoch=epoch)
    call, out = rows(3, 90, 3), np.empty(48, np.float32)
    ticket = store.fetch(*call)
    assert (ticket == 0) == (io == "mmap")
    wait_for(store, ticket)
    store.gather(*call, out)
    assert out.tobytes() == records_of(twin, 0)[[3, 90, 3], :16].tobytes()
    report = store.tier_report()
    assert (report["misses"], report["log_rows_read"], report["waits"]) == (3, 2, int(io != "mmap"))


def test_a_ticket_that_waits_for_frames_is_not_overtaken(tmp_path: Path) -> None:
    """Nor by rows that could be had at once."""
    store = build(tmp_path)
    change(store, np.arange(100))
    epoch = make_checkpoint(store)
    store.close()
    store = build(tmp_path, io="mmap", at_epoch=epoch)
    damage_log(tmp_path, slot=17)
    first = store.fetch(*rows(17, *range(1000, 1180)))  # what is damaged is read again, so this one has to wait
    second = store.fetch(*rows(*range(2000, 2100)))
    assert first and second  # which does not fit beside it
    assert store.fetch(*rows(50))
    with pytest.raises(StoreDamaged, match="row 17 of table 0"):
        wait_for(store, first)
    wait_for(store, second)


def test_damage_in_mapped_files_is_named(tmp_path: Path) -> None:
    store, twin = build(tmp_path), MemoryStore(JOB, 0)
    change(store, np.arange(100), 1.0, twin)
    epoch = make_checkpoint(store)
    store.close()
    store = build(tmp_path, io="mmap", at_epoch=epoch)
    damage_log(tmp_path, slot=17)
    with pytest.raises(StoreDamaged, match="row 17 of table 0"):
        wait_for(store, store.fetch(*rows(16, 17, 18)))
    out = np.empty(32, np.float32)
    assert store.fetch(*rows(16, 18)) == 0
    store.gather(*rows(16, 18), out)
    assert out.tobytes() == records_of(twin, 0)[[16, 18], :16].tobytes()
    with pytest.raises(StoreDamaged, match="row 17 of table 0"):
        store.read_records(0, 17, 1, np.empty(20, np.float32))


def test_a_directory_that_cannot_be_made_is_refused() -> None:
    with pytest.raises(UserError, match="cannot be used"):
        build(Path("/proc/regrow"))


@pytest.fixture
def file_limit() -> Iterator[Callable[[int], None]]:
    """Sets how large files may become: a write beyond it fails, as on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    yield lambda size: resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_full_disk_keeps_rows_in_memory_until_there_is_room(
    tmp_path: Path, file_limit: Callable[[int], None]
) -> None:
    """No checkpoint completes and no row is lost; fetches are refused once nothing can leave. Then there is room."""
    store, twin, rng = build(tmp_path), MemoryStore(JOB, 0), np.random.default_rng(5)
    change(store, np.arange(100), 1.0, twin)
    file_limit(1 << 16)
    with pytest.raises(StoreFull, match=r"cannot leave the memory: cannot write(?s:.*)more space under --store-dir"):
        for _ in range(10_000):
            change(store, rng.permutation(ROWS)[:100], 1.0, twin)
    epoch = store.begin_epoch()
    for _ in range(20):
        store.upkeep()
    assert store.poll_complete() < epoch
    assert store.tier_report()["full"] == 1
    assert records_of(store, 0).tobytes() == records_of(twin, 0).tobytes()
    file_limit(1 << 30)
    do_upkeep(store, lambda: store.poll_complete() >= epoch)
    change(store, np.arange(3000, 3100), 1.0, twin)
    assert records_of(store, 0).tobytes() == records_of(twin, 0).tobytes()
    assert store.tier_report()["full"] == 0
