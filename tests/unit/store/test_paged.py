"""Goal: what `PagedRows` promises of rows in memory, of checkpoints, and of bad days.

Method: small jobs in files of a temporary directory. Crashes are what the model test is for (test_tiered_model.py);
here a store is closed and built again, which loses all that was not in a checkpoint.
"""

from __future__ import annotations

import re
import resource
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
@pytest.mark.parametrize("io", ["threads", "direct", "auto"])
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
    for step in range(4000):
        change(store, rng.permutation(ROWS)[:150])
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


def test_a_damaged_row_is_named_and_not_served(tmp_path: Path) -> None:
    store = build(tmp_path, frames=300)
    change(store, np.arange(100))
    epoch = make_checkpoint(store)
    store.close()
    log = tmp_path / "server-0" / "log"
    content = bytearray(log.read_bytes())
    entry = content.index(np.uint32(17).tobytes() + np.uint32(1).tobytes(), 512)  # the slot, and its epoch
    content[entry + 40] ^= 4
    log.write_bytes(content)
    with pytest.raises(StoreDamaged, match="1 damaged: slot 17 of table 0"):
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
    identity.write_text(re.sub('"format": 1', '"format": 0', identity.read_text()))
    with pytest.raises(UserError, match=re.escape("another format (0 there, 1 here)")):
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
        build(tmp_path, io="mmap")


def test_how_files_are_read_is_said(tmp_path: Path) -> None:
    assert build(tmp_path / "a", io="threads").io_description == "threads, as asked for"
    described = build(tmp_path / "b", io="auto").io_description
    assert re.match(r"(direct|threads).*(reads/s|no O_DIRECT)", described)


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
    with pytest.raises(StoreFull, match="cannot leave the memory: cannot write"):
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
