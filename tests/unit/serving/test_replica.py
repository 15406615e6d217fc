"""Goal: a replica answers with the trainer's rows of one cut, bit for bit, whatever happens to pieces and training.

Method: real stores, chunks and manifests on a disk; the rows of the servers are read independently, and compared.
"""

from __future__ import annotations

import os
import shutil
import threading
import time
from pathlib import Path

import msgspec
import numpy as np
import pytest
from publishing import JOB, Run, make_run

from regrow.checkpoint.lineage import Graph
from regrow.checkpoint.manifest import MANIFEST
from regrow.checkpoint.merge import fold
from regrow.checkpoint.merger import read_wanted_full
from regrow.checkpoint.publications import LATEST, Latest, read_latest, read_readers
from regrow.checkpoint.storage import Storage
from regrow.core.cut import PUBLICATION_TENANT, TENANT
from regrow.errors import RegrowError, UserError
from regrow.serving import Replica


def replica_of(run: Run, **options: object) -> Replica:
    return Replica(run.url, follow=False, wait_seconds=0.0, **options)  # type: ignore[arg-type]


def check_same(replica: Replica, run: Run) -> None:
    for name, (rows, _) in replica.tables.items():
        found = replica.lookup(name, np.arange(rows))
        assert found.tobytes() == run.rows(name).tobytes(), (name, replica.cut)


def test_what_is_no_weight_is_not_published(tmp_path: Path) -> None:
    """The state of an optimizer in the workers is a table too: those who train on get it, with a checkpoint."""
    user, state = JOB.tables
    run = make_run(
        tmp_path, job=msgspec.structs.replace(JOB, tables=(user, msgspec.structs.replace(state, name="dense_state")))
    )
    run.train()
    run.publish()
    run.end(run.begin(TENANT))
    replica = replica_of(run)
    assert list(replica.tables) == ["user"]
    check_same(replica, run)
    names = {
        url: {table.name for table in Storage.open(url).manifests()[0][0].tables} for url in (run.url, run.ckpt or "")
    }
    assert names == {run.url: {"user"}, run.ckpt: {"user", "dense_state"}}


@pytest.mark.parametrize("consistent", [True, False])
def test_answers_are_the_rows_of_the_cut(tmp_path: Path, consistent: bool) -> None:
    run = make_run(tmp_path)
    run.train()
    run.publish()
    replica = replica_of(run, consistent=consistent)
    check_same(replica, run)
    for step in range(2, 6):
        run.train()
        cut = run.publish()
        assert replica.refresh()
        assert (replica.step, replica.cut) == (step, cut)
        check_same(replica, run)
        assert not replica.refresh(), "nothing is new"
    assert replica.rebuilds == 1, "deltas are all it reads"
    assert replica.age_seconds < 60.0


def test_both_sides_follow(tmp_path: Path) -> None:
    """What was written to one side is on the other before that is written to: the second delta tells."""
    run = make_run(tmp_path)
    run.train(rows=10)
    run.publish()
    replica = replica_of(run)
    for _ in range(4):
        run.train(rows=1)
        run.publish()
        replica.refresh()
        assert replica._front is not None and replica._back is not None
        for name in replica.tables:
            assert replica._front.tables[name].tobytes() == replica._back.tables[name].tobytes()
        check_same(replica, run)


def test_only_some_tables(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    run.train()
    run.publish()
    replica = replica_of(run, tables=["user"])
    assert replica.tables == {"user": (50, 4)}
    check_same(replica, run)
    with pytest.raises(UserError, match="no table 'lost'"):
        replica_of(run, tables=["lost"])


@pytest.mark.parametrize(
    ("table", "ids", "words"),
    [
        ("user", [50], "no row 50 in table 'user', which has 50"),
        ("user", [-1], "no row -1"),
        ("nobody", [1], "no table 'nobody'"),
        ("user", [0.5], "float64"),
        ("user", [[1]], r"\(1, 1\)"),
    ],
)
def test_a_look_up_that_cannot_be(tmp_path: Path, table: str, ids: list[object], words: str) -> None:
    run = make_run(tmp_path)
    run.train()
    run.publish()
    replica = replica_of(run)
    with pytest.raises(UserError, match=words):
        replica.lookup(table, ids)
    assert replica.lookup("user", []).shape == (0, 4)
    assert replica._front is not None and not replica._front.readers


def test_nothing_is_published(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    with pytest.raises(RegrowError, match=r"nothing was published within 0 s"):
        replica_of(run)


def test_several_publications_at_once(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    run.train()
    run.publish()
    replica = replica_of(run)
    for _ in range(3):
        run.train()
        run.publish()
    assert replica.refresh()
    assert replica.versions == 2
    check_same(replica, run)


def test_training_went_back(tmp_path: Path) -> None:
    """Rows that were touched after the checkpoint are as they were before: the new full does not have them."""
    run = make_run(tmp_path)
    run.train(rows=2)
    run.publish()
    replica = replica_of(run)
    for _ in range(5):
        run.train(rows=8)
    run.publish()
    replica.refresh()
    again = make_run(tmp_path, starts=1)  # the same run from its beginning, with fewer steps
    again.train(rows=2)
    again.publish()
    assert again.step < run.step
    assert replica.refresh()
    assert (replica.step, replica.rebuilds) == (1, 2)
    check_same(replica, again)


def test_a_late_word_of_a_replaced_coordinator(tmp_path: Path) -> None:
    """`latest.json` names an old cut, or one that is superseded: nobody goes back for it."""
    run = make_run(tmp_path)
    run.train()
    run.publish()
    old = (tmp_path / "published" / LATEST).read_bytes()
    run.train()
    late = run.begin(PUBLICATION_TENANT)  # all is stored, the manifest is not
    for store in run.stores:
        store.end_capture(False)
    successor_term = 1
    run.train()
    run.term, run.heads[PUBLICATION_TENANT] = successor_term, None
    newest = run.publish()
    replica = replica_of(run)
    assert replica.cut == newest
    run.writer(PUBLICATION_TENANT).write(run.job, late)  # and latest.json with it
    latest = read_latest(Storage.open(run.url))
    assert isinstance(latest, Latest) and latest.cut == late.target
    assert not replica.refresh()
    assert replica.cut == newest
    (tmp_path / "published" / LATEST).write_bytes(old)
    assert not replica.refresh()
    check_same(replica, run)
    assert replica_of(run).cut == newest, "one that starts now does not believe it either"


def test_a_missing_piece_asks_for_a_full(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    run.train()
    run.publish()
    replica = replica_of(run)
    before = {name: replica.lookup(name, np.arange(rows)) for name, (rows, _) in replica.tables.items()}
    run.train()
    gone = run.begin(PUBLICATION_TENANT)
    run.end(gone)
    run.train()
    run.publish()
    shutil.rmtree(tmp_path / "published" / f"{gone.target}.{gone.source}")
    assert replica.problem is None
    assert not replica.refresh()
    storage = Storage.open(run.url)
    wanted = read_wanted_full(storage)
    assert wanted is not None and "missing" in wanted.why
    assert not replica.refresh()
    assert replica.problem == wanted.why, "as long as it is so, also in rounds that find nothing new"
    for name, rows in before.items():
        assert replica.lookup(name, np.arange(len(rows))).tobytes() == rows.tobytes(), "it stays where it is"
    written = run.writer(PUBLICATION_TENANT).write(run.job, run.begin(PUBLICATION_TENANT))
    assert written.full_wanted, "training hears of it"
    for store in run.stores:
        store.end_capture(True)
    run.train()
    run.publish(full=True)
    assert read_wanted_full(storage) is None
    assert replica.refresh()
    assert replica.problem is None
    check_same(replica, run)


@pytest.mark.parametrize("consistent", [True, False])
def test_a_damaged_piece_is_gone_around(tmp_path: Path, consistent: bool) -> None:
    run = make_run(tmp_path)
    run.train()
    first = run.publish()
    replica = replica_of(run, consistent=consistent)
    run.train()
    second = run.publish()
    storage = Storage.open(run.url)
    fold(storage, Graph(storage.manifests()[0]), None, second)
    for file in (tmp_path / "published" / f"{second}.{first}").glob("*.safetensors"):
        data = bytearray(file.read_bytes())
        data[-1] ^= 1
        file.write_bytes(data)
    assert replica.refresh()
    assert (replica.cut, replica.rebuilds) == (second, 2)
    check_same(replica, run)


def test_half_a_delta_does_not_stay(tmp_path: Path) -> None:
    """The second chunk of a delta is damaged: answers and both sides are as before, and the next cut is right."""
    run = make_run(tmp_path)
    run.train(rows=12)
    first = run.publish()
    replica = replica_of(run)
    run.train(rows=12)
    second = run.publish()
    files = sorted((tmp_path / "published" / f"{second}.{first}").glob("*.safetensors"))
    assert len(files) > 2
    files[-1].unlink()
    assert not replica.refresh()
    assert replica.problem is not None and files[-1].name in replica.problem
    assert replica._front is not None and replica._back is not None
    for name in replica.tables:
        assert replica._front.tables[name].tobytes() == replica._back.tables[name].tobytes()
    run.train()
    run.publish(full=True)
    assert replica.refresh()
    check_same(replica, run)


@pytest.mark.parametrize("bits", [8, 4])
def test_fewer_bits(tmp_path: Path, bits: int) -> None:
    run = make_run(tmp_path, bits=bits)
    run.train()
    run.publish()
    replica = replica_of(run)
    exact, found = run.rows("user"), replica.lookup("user", np.arange(50))
    assert np.abs(found - exact).max() <= np.ptp(exact) / (2**bits - 1)
    assert replica.read_table("dense").tobytes() == run.rows("dense").tobytes(), "the dense part stays whole"


def test_a_thread_follows_while_others_look_up(tmp_path: Path) -> None:
    """Every answer is one version, whole: all rows of a table are changed by each step, and never seen mixed."""
    run = make_run(tmp_path)
    versions: set[bytes] = set()

    def publish() -> None:
        run.train(rows=25)
        versions.add(run.rows("user").tobytes())
        run.publish()

    publish()
    seen: list[bytes] = []
    over = threading.Event()
    with Replica(run.url, poll_seconds=0.001, wait_seconds=10.0, name="a-reader") as replica:

        def look() -> None:
            while not over.is_set():
                seen.append(replica.lookup("user", np.arange(50)).tobytes())

        threads = [threading.Thread(target=look) for _ in range(3)]
        for thread in threads:
            thread.start()
        for _ in range(8):
            publish()
            assert replica.wait_for_step(run.step, timeout_seconds=60.0)
        over.set()
        for thread in threads:
            thread.join(60.0)
        assert replica.problem is None
    assert set(seen) <= versions
    assert len(set(seen)) > 1
    (reader,) = read_readers(Storage.open(run.url), now=time.time())
    assert reader.step <= run.step


def test_files_have_no_names(tmp_path: Path) -> None:
    """Nothing is left behind by one that is killed."""
    run = make_run(tmp_path)
    run.train()
    run.publish()
    place = tmp_path / "mapped"
    place.mkdir()
    replica = replica_of(run, directory=place)
    assert os.listdir(place) == []
    check_same(replica, run)
    with pytest.raises(UserError, match="cannot write to"):
        replica_of(run, directory=tmp_path / "nowhere")


def test_a_piece_without_a_manifest_is_none(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    run.train()
    first = run.publish()
    replica = replica_of(run)
    run.train()
    second = run.publish()
    (tmp_path / "published" / f"{second}.{first}" / MANIFEST).unlink()
    assert not replica.refresh()
    assert replica.cut == first
