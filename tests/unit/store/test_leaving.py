"""Goal: rows leave the cache in the order that a skewed stream asks for, and who keeps the cache himself waits.

Method: small jobs in files of a temporary directory; the same stream with and without patience for rows that come.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from fetching import wait_for
from subjects import records_of
from test_paged import JOB, ROWS, build, change, make_checkpoint, rows

from regrow.errors import StoreDamaged
from regrow.store import tiered
from regrow.store.memory import MemoryStore


@pytest.mark.parametrize("io", ["threads", "direct"])
def test_who_keeps_the_cache_himself_waits_for_its_reads(tmp_path: Path, io: str) -> None:
    store = build(tmp_path, io=io)
    change(store, np.arange(150))
    epoch = make_checkpoint(store)
    store.close()
    store = build(tmp_path, io=io, policy="self", at_epoch=epoch)
    assert store.fetch(*rows(*range(150))) == 0, "no ticket: the rows are there"
    report = store.tier_report()
    assert report["log_rows_read"] + report["home_rows_read"] == 150
    assert report["tickets"] == report["frames_pinned"] == 0


def test_damage_is_named_where_a_cache_keeps_itself(tmp_path: Path) -> None:
    store = build(tmp_path)
    change(store, np.arange(150))
    epoch = make_checkpoint(store)
    store.close()
    store = build(tmp_path, policy="self", at_epoch=epoch)
    log = bytearray((tmp_path / "server-0" / "log").read_bytes())
    (tmp_path / "server-0" / "log").write_bytes(bytes(len(log)))  # what is read now is not what it was
    ticket = store.fetch(*rows(1, 2))
    with pytest.raises(StoreDamaged, match="row 1 of table 0"):
        wait_for(store, ticket)
    assert store.tier_report()["frames_pinned"] == 0


def count_misses(folder: Path, monkeypatch: pytest.MonkeyPatch, *, patience: int, frames: int) -> int:
    """Of a skewed stream, once it has been through the cache several times."""
    monkeypatch.setattr(tiered, "CALLS_AT_ONCE", patience)
    store, twin, rng = build(folder, frames=frames), MemoryStore(JOB, 0), np.random.default_rng(3)
    before = 0.0
    for step in range(2000):
        if step == 1000:
            before = store.tier_report()["misses"]
        change(store, np.unique((rng.random(12) ** 4 * ROWS).astype(np.uint32)), 1.0, twin)
    assert records_of(store, 0).tobytes() == records_of(twin, 0).tobytes()
    report = store.tier_report()
    assert (report["rows_evicted_young"] > 0) == (patience > 0 and frames > 100)
    return int(report["misses"] - before)


def test_rows_that_are_used_once_leave_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    patient = count_misses(tmp_path / "a", monkeypatch, patience=6, frames=800)
    assert patient < 0.9 * count_misses(tmp_path / "b", monkeypatch, patience=0, frames=800)


def test_in_a_small_cache_rows_leave_in_the_order_of_their_last_use(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a worker named and pulled must still be there for its push."""
    patient = count_misses(tmp_path / "a", monkeypatch, patience=12, frames=100)
    assert patient == count_misses(tmp_path / "b", monkeypatch, patience=0, frames=100)
