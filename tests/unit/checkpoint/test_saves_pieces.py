"""Goal: rows that somebody waits for are read without the rest of their chunks, are the right ones, and are checked.

Method: the server of the other tests of saves, with checksums of small bundles. A bundle is damaged in every byte.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import save_worlds
from save_worlds import Server, find, make_server
from worlds import TABLES, Model, record

from regrow.checkpoint import saves_load, saves_pieces
from regrow.checkpoint.saves import SaveManifest
from regrow.checkpoint.saves_ids import IdsKeeper, RowSet
from regrow.checkpoint.saves_load import SavedRows
from regrow.checkpoint.saves_pieces import sum_bundles
from regrow.checkpoint.storage import Storage
from regrow.errors import CheckpointError


@pytest.fixture
def storage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Storage:
    """In which saves have checksums of bundles of a few rows."""
    monkeypatch.setattr(save_worlds, "IdsKeeper", functools.partial(IdsKeeper, sum_bundles))
    monkeypatch.setattr(saves_pieces, "BUNDLE_BYTES", 32)
    monkeypatch.setattr(saves_pieces, "GAP_BYTES", 8)
    monkeypatch.setattr(saves_load, "BUNDLES_SHARE_MAX", 1.0)
    return Storage.open(str(tmp_path / "x"))


def make_saved(storage: Storage) -> tuple[Server, list[SaveManifest]]:
    server = make_server(storage)
    server.update(300)
    saves = [server.save()]
    server.update(20)
    saves.append(server.save(full=False))
    return server, saves


def read_wanted(rows: SavedRows, keys: list[tuple[str, int]]) -> Model:
    """What comes before the first whole chunk."""
    for table in {table for table, _ in keys}:
        assert rows.want(table, np.array(sorted(row for name, row in keys if name == table), np.uint32)) > 0
    found: Model = {}
    before = rows.bytes_done
    for part in rows.rows_newest_first(10**6, threads=1, ahead_bytes_max=1):
        found |= {
            (table, int(row)): record(each, at) for table, each in part.items() for at, row in enumerate(each.ids)
        }
        if keys and set(keys) <= set(found):
            assert rows.bytes_done == before, "no chunk was read as a whole before them"
            break
    return found


@pytest.mark.parametrize("seed", range(12))
def test_only_bundles_are_read_and_values_are_the_newest(storage: Storage, seed: int) -> None:
    server, _ = make_saved(storage)
    keys = sorted(server.model)
    random = np.random.default_rng(seed)
    wanted = [keys[at] for at in random.choice(len(keys), int(random.integers(1, 8)), replace=False)]
    rows = SavedRows(storage, find(storage))
    found = read_wanted(rows, wanted)
    assert len(found) < len(keys)
    assert found.items() <= server.model.items()


def test_what_was_read_is_not_read_again_and_all_comes_in_the_end(storage: Storage) -> None:
    server, _ = make_saved(storage)
    rows = SavedRows(storage, find(storage))
    table, row = sorted(server.model)[-1]
    assert rows.want(table, np.array([row], np.uint32)) == 1
    assert rows.want(table, np.array([row], np.uint32)) == 0
    found: Model = {}
    for part in rows.rows_newest_first(10**6):
        for name, each in part.items():
            found |= {(name, int(id_)): record(each, at) for at, id_ in enumerate(each.ids)}
    assert found == server.model
    assert rows.want(table, np.array([row], np.uint32)) == 0, "all is read"


def test_of_a_chunk_of_which_much_is_wanted_all_is_read(storage: Storage, monkeypatch: pytest.MonkeyPatch) -> None:
    make_saved(storage)
    monkeypatch.setattr(saves_load, "MIN_ROWS", 1)
    monkeypatch.setattr(saves_load, "BUNDLES_SHARE_MAX", 0.01)
    monkeypatch.setattr(storage, "read_ranges", lambda *_: pytest.fail("a bundle is read alone"))
    rows = SavedRows(storage, find(storage))
    for table, ids in rows.ids().items():
        rows.want(table, ids)
    assert sum(len(each) for part in rows.rows_newest_first(10**6) for each in part.values()) == rows.rows


def test_a_damaged_bundle_is_named_and_not_given_out(storage: Storage, tmp_path: Path) -> None:
    """Every byte of the rows of one chunk. Its ids are known from elsewhere; whoever reads it whole compares them."""
    server, saves = make_saved(storage)
    info = saves[0].chunks[0]
    path = tmp_path / "x" / saves[0].name / info.name
    whole = path.read_bytes()
    table = next(name for name, count in info.rows.items() if count)
    seen = 0
    for at in range(0, len(whole), 3):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
        rows = SavedRows(storage, find(storage))
        job = next((job for job in rows._jobs if job.info == info), None)
        assert job is not None
        bundles = saves_pieces.find_bundles(job.rows[table], job.rows[table].list_ids(), dim=_dim(table))
        try:
            ((_, found),) = job.read_bundles([(table, bundles)])
        except CheckpointError as error:
            assert info.name in error.message and "damaged" in error.message
            seen += 1
        else:
            right = {(table, int(row)): record(found, index) for index, row in enumerate(found.ids)}
            assert right.items() <= server.model.items()
    assert seen > len(whole) // 12
    path.write_bytes(b"")
    with pytest.raises(CheckpointError, match="not whole"):
        job.read_bundles([(table, bundles)])


def _dim(table: str) -> int:
    return next(info.dim for info in TABLES if info.name == table)


def test_saves_without_checksums_of_bundles_load_as_ever(tmp_path: Path) -> None:
    storage = Storage.open(str(tmp_path / "y"))
    server, _ = make_saved(storage)
    rows = SavedRows(storage, find(storage))
    assert all(job.sums is None for job in rows._jobs)
    table, row = sorted(server.model)[0]
    assert rows.want(table, np.array([row], np.uint32)) == 1
    assert any(job.is_wanted for job in rows._jobs)


@pytest.mark.parametrize("ids", [[0], [59], list(range(60)), list(range(3, 60, 8)), [7, 8, 9, 10, 58]])
def test_the_place_of_a_row(ids: list[int]) -> None:
    for form in (RowSet.of(np.array(ids, np.uint32)), RowSet(ids=np.array(ids, np.uint32))):
        some: Any = np.array(ids[::2], np.uint32)
        assert form.rank(some).tolist() == list(range(0, len(ids), 2))
