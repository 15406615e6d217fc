"""Goal: chunks get to storage in bounded memory and disk, and an error neither hangs nor spoils the next piece.

Method: storage beyond fsspec that a test can close, break or hang, over a real directory, so that what arrived can be
read back. Bounds are looked at from inside every upload. Processes are killed at every failpoint of staging.
"""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pytest
from helpers import wait_until

from regrow.checkpoint import failpoints, staging
from regrow.checkpoint.chunks import Chunk, Rows, decode_chunk, describe, encode_chunk
from regrow.checkpoint.files import RemoteFiles
from regrow.checkpoint.manifest import ChunkInfo, TableInfo, chunk_name
from regrow.checkpoint.staging import Pace, Progress, Stager
from regrow.checkpoint.storage import Storage
from regrow.core.names import cut_id, piece_name
from regrow.errors import CheckpointError, StorageError, UserError

TABLES = [TableInfo(name="t", rows=10**6, dim=8, states=(), init_bound=0.1, index=0)]
PIECES = [piece_name(None, cut_id(step, "test")) for step in range(3)]
NOTHING = Progress(chunks_in_memory=0, chunks_on_disk=0, disk_bytes=0, stored_chunks=0, stored_bytes=0)


def rows(number: int) -> Chunk:
    return {"t": Rows(np.arange(50, dtype=np.uint32) + number, np.full((50, 8), number, np.float32), {})}


CHUNK_BYTES = len(b"".join(encode_chunk(rows(0))))


class Remote(RemoteFiles):
    """Passes everything on, unless it is closed (calls wait) or broken (calls fail)."""

    def __init__(self, path: Path) -> None:
        super().__init__(fsspec.filesystem("file", auto_mkdir=True, skip_instance_cache=True), str(path))
        self.open = threading.Event()
        self.open.set()
        self.broken = False
        self.stager: Stager | None = None
        self.seen: list[Progress] = []

    def write(self, path: str, data: bytes, given_up: threading.Event) -> None:
        if self.stager is not None:
            self.seen.append(self.stager.progress)
        self.open.wait()
        if self.broken:
            raise PermissionError(errno.EACCES, "not today")
        super().write(path, data, given_up)


def world(path: Path, *, timeout_seconds: float = 60.0, **options: Any) -> tuple[Stager, Storage, Remote]:
    files = Remote(path / "remote")
    storage = Storage("remote://", files, timeout_seconds=timeout_seconds, attempts=1)
    files.stager = Stager(storage, directory=path / "staging", **options)
    return files.stager, storage, files


def submit(stager: Stager, piece: str, numbers: range) -> None:
    for number in numbers:
        stager.submit(piece, chunk_name("s0of1", number), rows(number), shard="s0of1")


def check(storage: Storage, piece: str, infos: list[ChunkInfo], numbers: range) -> None:
    assert [info.name for info in infos] == [chunk_name("s0of1", number) for number in numbers]
    for number, info in zip(numbers, infos, strict=True):
        found = decode_chunk(storage.read(f"{piece}/{info.name}"), TABLES, info)["t"]
        assert np.array_equal(found.ids, rows(number)["t"].ids)
        assert np.array_equal(found.weight, rows(number)["t"].weight)


def list_staged(path: Path) -> list[str]:
    """Everything in the staging directory."""
    return sorted(str(found.relative_to(path / "staging")) for found in (path / "staging").rglob("*"))


class Submitter:
    """Submits from another thread, and says how far it got."""

    def __init__(self, stager: Stager, piece: str, count: int) -> None:
        self.accepted = 0
        self.error: BaseException | None = None
        self._work = (stager, piece, count)
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()

    def _run(self) -> None:
        stager, piece, count = self._work
        try:
            for number in range(count):
                submit(stager, piece, range(number, number + 1))
                self.accepted += 1
        except BaseException as error:
            self.error = error


def test_there_and_back(tmp_path: Path) -> None:
    stager, storage, _ = world(tmp_path)
    with stager:
        for piece in PIECES:
            submit(stager, piece, range(7))
        for piece in reversed(PIECES):
            check(storage, piece, stager.finish(piece), range(7))
        assert stager.finish("nothing was submitted") == []
        assert stager.progress.stored_chunks == 21
        assert stager.progress.stored_bytes == 21 * CHUNK_BYTES
        assert len(list_staged(tmp_path)) == 1  # its own directory, empty
    assert list_staged(tmp_path) == []


def test_a_local_file_system_needs_no_staging(tmp_path: Path) -> None:
    storage = Storage.open(str(tmp_path / "local"))
    with Stager(storage, directory=tmp_path / "staging") as stager:
        with failpoints.recording() as names:
            submit(stager, PIECES[0], range(7))
            check(storage, PIECES[0], stager.finish(PIECES[0]), range(7))
        assert not [name for name in names if name.startswith("stage.")]
    assert not (tmp_path / "staging").exists()


def test_a_closed_remote_is_felt_by_submit(tmp_path: Path) -> None:
    """Two chunks fit the disk and three the memory; the sixth has to wait, and no bound is ever passed."""
    stager, storage, files = world(tmp_path, chunks_in_memory_max=3, disk_bytes_max=2 * CHUNK_BYTES + 1)
    with stager:
        files.open.clear()
        submitter = Submitter(stager, PIECES[0], 20)
        wait_until(lambda: submitter.accepted == 5)
        full = Progress(
            chunks_in_memory=3, chunks_on_disk=2, disk_bytes=2 * CHUNK_BYTES, stored_chunks=0, stored_bytes=0
        )
        wait_until(lambda: stager.progress == full)
        submitter.thread.join(0.1)
        assert submitter.accepted == 5
        files.open.set()
        submitter.thread.join()
        check(storage, PIECES[0], stager.finish(PIECES[0]), range(20))
    assert max(seen.chunks_in_memory for seen in files.seen) <= 3
    assert max(seen.disk_bytes for seen in files.seen) <= 2 * CHUNK_BYTES


def test_who_makes_chunks_waits_first(tmp_path: Path) -> None:
    """With four in memory there is no room for a fifth, not even outside of the stager."""
    stager, storage, files = world(tmp_path, disk_bytes_max=1)
    with stager:
        files.open.clear()
        submit(stager, PIECES[0], range(1))
        wait_until(lambda: stager.progress.chunks_on_disk == 1)
        stager.wait_for_room(PIECES[0])
        submit(stager, PIECES[0], range(1, 5))
        waiting = threading.Thread(target=stager.wait_for_room, args=(PIECES[0],))
        waiting.start()
        waiting.join(0.1)
        assert waiting.is_alive()
        assert stager.progress.chunks_in_memory == staging.CHUNKS_IN_MEMORY_MAX == 4
        files.open.set()
        waiting.join()
        check(storage, PIECES[0], stager.finish(PIECES[0]), range(5))
        files.broken = True
        submit(stager, PIECES[1], range(1))
        wait_until(lambda: stager.progress == Progress(**{**vars_of(NOTHING), **read_stored(stager)}))
        with pytest.raises(StorageError, match="not today"):
            stager.wait_for_room(PIECES[1])


def read_stored(stager: Stager) -> dict[str, int]:
    return {name: getattr(stager.progress, name) for name in ("stored_chunks", "stored_bytes")}


def test_a_chunk_larger_than_the_room_goes_alone(tmp_path: Path) -> None:
    stager, storage, files = world(tmp_path, disk_bytes_max=1)
    with stager:
        submit(stager, PIECES[0], range(5))
        check(storage, PIECES[0], stager.finish(PIECES[0]), range(5))
    assert max(seen.chunks_on_disk for seen in files.seen) == 1


@pytest.mark.parametrize("local", [False, True])
def test_an_error_stays_with_its_piece(tmp_path: Path, local: bool) -> None:
    stager, storage, files = world(tmp_path)
    if local:
        stager.close()
        storage.local = True
        stager = Stager(storage)
    with stager:
        files.broken = True
        submit(stager, PIECES[0], range(1))
        with pytest.raises(StorageError, match="not today"):
            stager.finish(PIECES[0])
        submitter = Submitter(stager, PIECES[1], 1000)
        submitter.thread.join()  # it is told, however much it wanted to submit
        assert isinstance(submitter.error, StorageError)
        assert submitter.accepted < 1000
        with pytest.raises(StorageError, match="not today"):
            stager.submit(PIECES[1], "x", rows(1), shard="s")
        files.broken = False
        submit(stager, PIECES[2], range(7))
        check(storage, PIECES[2], stager.finish(PIECES[2]), range(7))
        with pytest.raises(StorageError, match="not today"):
            stager.finish(PIECES[1])
        submit(stager, PIECES[1], range(7))  # forgotten: it may be tried again
        check(storage, PIECES[1], stager.finish(PIECES[1]), range(7))
        assert stager.progress.chunks_in_memory == stager.progress.chunks_on_disk == stager.progress.disk_bytes == 0


def test_a_submitter_that_waits_is_told(tmp_path: Path) -> None:
    stager, _, files = world(tmp_path, chunks_in_memory_max=1, disk_bytes_max=1)
    with stager:
        files.open.clear()
        submitter = Submitter(stager, PIECES[0], 20)
        wait_until(lambda: submitter.accepted == 2)
        files.broken = True
        files.open.set()
        submitter.thread.join()
        assert isinstance(submitter.error, StorageError)
        assert submitter.error.message.endswith("not today")


def test_a_remote_that_hangs(tmp_path: Path) -> None:
    stager, storage, files = world(tmp_path, timeout_seconds=0.1)
    with stager:
        files.open.clear()
        submit(stager, PIECES[0], range(3))
        with pytest.raises(StorageError, match=r"no answer within 0.1 s"):
            stager.finish(PIECES[0])
        files.open.set()
        storage._timeout_seconds = 60.0
        submit(stager, PIECES[1], range(3))
        check(storage, PIECES[1], stager.finish(PIECES[1]), range(3))


@pytest.fixture
def stuck(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Stager]:
    """The disk where chunks are staged does not answer any more."""
    let_go = threading.Event()
    monkeypatch.setattr(staging, "STALL_SECONDS_MAX", 0.1)
    monkeypatch.setattr(staging, "CLOSE_SECONDS_MAX", 0.1)
    stager, _, _ = world(tmp_path)
    assert stager._own is not None

    def write(data: bytes) -> Path:
        let_go.wait()
        raise StorageError("it never came to an end")

    monkeypatch.setattr(stager._own, "write", write)
    yield stager
    let_go.set()


def test_a_disk_that_hangs_costs_the_piece_and_nobody_waits_for_it(stuck: Stager) -> None:
    submit(stuck, PIECES[0], range(2))
    with pytest.raises(StorageError, match=r"nothing moved for 0.1 s"):
        stuck.finish(PIECES[0])
    submitter = Submitter(stuck, PIECES[1], 9)
    submitter.thread.join(10.0)
    assert isinstance(submitter.error, StorageError), "memory is full and stays so"
    stuck.abort(PIECES[1])
    stuck.close()


def test_a_pace_that_was_asked_for_is_no_stall(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(staging, "STALL_SECONDS_MAX", 0.05)
    stager, storage, _ = world(tmp_path, bytes_per_second=CHUNK_BYTES / 0.3)
    with stager:
        submit(stager, PIECES[0], range(2))
        check(storage, PIECES[0], stager.finish(PIECES[0]), range(2))


def test_a_staging_directory_that_another_process_keeps_locked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(staging, "LOCK_SECONDS_MAX", 0.1)
    (tmp_path / "staging").mkdir(mode=0o700)
    with staging._Locked(tmp_path / "staging"), pytest.raises(StorageError, match="another process has locked it"):
        world(tmp_path)
    world(tmp_path)[0].close()


def test_abort(tmp_path: Path) -> None:
    """What waits is dropped, the upload under way comes to its end, and nothing follows."""
    stager, storage, files = world(tmp_path)
    with stager:
        files.open.clear()
        submit(stager, PIECES[0], range(6))
        wait_until(lambda: len(files.seen) == 1)
        aborting = threading.Thread(target=stager.abort, args=(PIECES[0],))
        aborting.start()
        files.open.set()
        aborting.join()
        assert len(files.seen) == 1
        assert list(storage.names(PIECES[0])) == [chunk_name("s0of1", 0)]
        assert stager.progress == Progress(**{**vars_of(NOTHING), "stored_chunks": 1, "stored_bytes": CHUNK_BYTES})
        stager.abort("nothing was submitted")
        submit(stager, PIECES[0], range(7))
        check(storage, PIECES[0], stager.finish(PIECES[0]), range(7))


def test_abort_does_not_wait_for_other_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The disk is full of one piece, and stays so, while another that waits for room in it is given up."""
    encoded: list[str] = []

    def note(data: Any, name: str, chunk: Chunk, *, shard: str) -> ChunkInfo:
        encoded.append(shard)
        return describe(data, name, chunk, shard=shard)

    monkeypatch.setattr(staging, "describe", note)
    stager, storage, files = world(tmp_path, disk_bytes_max=1)
    with stager:
        files.open.clear()
        submit(stager, PIECES[0], range(1))
        wait_until(lambda: len(files.seen) == 1)
        submit(stager, PIECES[1], range(1))
        wait_until(lambda: len(encoded) == 2)
        stager.abort(PIECES[1])
        assert stager.progress.chunks_in_memory == 0
        files.open.set()
        check(storage, PIECES[0], stager.finish(PIECES[0]), range(1))


def vars_of(progress: Progress) -> dict[str, int]:
    return {name: getattr(progress, name) for name in Progress.__slots__}


def test_what_cannot_be_encoded(tmp_path: Path) -> None:
    stager, storage, _ = world(tmp_path)
    with stager:
        strange = rows(1)
        strange["t"].weight[2, 2] = np.nan
        stager.submit(PIECES[0], chunk_name("s", 0), strange, bits=8, shard="s")
        with pytest.raises(CheckpointError, match="row 3 is not finite"):
            stager.finish(PIECES[0])
        falling = {"t": Rows(rows(1)["t"].ids[::-1], rows(1)["t"].weight, {})}
        stager.submit(PIECES[1], chunk_name("s", 0), falling, shard="s")
        with pytest.raises(CheckpointError, match="ids do not rise"):
            stager.finish(PIECES[1])
        submit(stager, PIECES[2], range(2))
        check(storage, PIECES[2], stager.finish(PIECES[2]), range(2))


def test_close_in_the_middle(tmp_path: Path) -> None:
    stager, _, files = world(tmp_path, chunks_in_memory_max=1, disk_bytes_max=1)
    files.open.clear()
    submitter = Submitter(stager, PIECES[0], 20)
    wait_until(lambda: submitter.accepted == 2 and len(files.seen) == 1)
    closing = threading.Thread(target=stager.close)
    closing.start()
    submitter.thread.join()
    files.open.set()
    closing.join()
    assert isinstance(submitter.error, StorageError)
    assert list_staged(tmp_path) == []
    with pytest.raises(StorageError, match="given up"):
        stager.submit(PIECES[1], "x", rows(1), shard="s")


def test_pace() -> None:
    pace = Pace(bytes_per_second=100.0)
    assert pace.wait_seconds(10.0, 50) == 0.0
    assert pace.wait_seconds(10.0, 200) == 0.5
    assert pace.wait_seconds(11.0, 100) == 1.5
    assert pace.wait_seconds(100.0, 100) == 0.0  # time that nobody used is not saved up
    assert pace.wait_seconds(100.0, 100) == 1.0
    assert Pace(bytes_per_second=None).wait_seconds(0.0, 10**12) == 0.0


@pytest.mark.parametrize("local", [False, True])
def test_waiting_for_the_pace_can_be_aborted(tmp_path: Path, local: bool) -> None:
    stager, storage, files = world(tmp_path, bytes_per_second=0.001)
    if local:
        stager.close()
        storage.local = True
        stager = Stager(storage, bytes_per_second=0.001)
    with stager:
        submit(stager, PIECES[0], range(4))
        wait_until(lambda: stager.progress.stored_chunks == 1)
        stager.abort(PIECES[0])
        assert len(files.seen) == 1
        submit(stager, PIECES[1], range(1))  # and then to be closed while it waits


def crash(path: Path, point: str) -> None:
    """Runs the end of this file in a process that dies there."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, sys.path)), failpoints.VARIABLE: point}
    done = subprocess.run([sys.executable, __file__, str(path)], timeout=60, env=environment)
    assert done.returncode == failpoints.EXIT_CODE


@pytest.mark.parametrize("point", ["stage.data:2:exit", "stage.data:2:tear", "stage.delete:1:exit", "chunk.put:2:exit"])
def test_what_a_crash_left_is_removed(tmp_path: Path, point: str) -> None:
    crash(tmp_path, point)
    left = list_staged(tmp_path)
    assert len(left) > 1
    alive, _, _ = world(tmp_path)
    with alive:
        assert len(list_staged(tmp_path)) == 1
        own = list_staged(tmp_path)
        second, storage, _ = world(tmp_path)
        with second:
            assert len(list_staged(tmp_path)) == 2  # the first is alive and keeps its own
            submit(second, PIECES[0], range(3))
            check(storage, PIECES[0], second.finish(PIECES[0]), range(3))
        assert list_staged(tmp_path) == own
        assert not set(own) & set(left)


def test_a_crash_at_the_start(tmp_path: Path) -> None:
    crash(tmp_path, "stage.mkdir:1:exit")
    world(tmp_path)[0].close()
    assert list_staged(tmp_path) == []


def test_a_directory_that_is_cleared_away(tmp_path: Path) -> None:
    """What waited there is lost with its piece; the next piece finds a new directory, with a lock of its own."""
    stager, storage, remote = world(tmp_path)
    remote.open.clear()
    submit(stager, PIECES[0], range(2))
    wait_until(lambda: stager.progress.chunks_on_disk == 2)
    shutil.rmtree(tmp_path / "staging")
    remote.open.set()
    with pytest.raises(StorageError, match=r"cannot stage chunks in .*: No such file or directory"):
        stager.finish(PIECES[0])
    submit(stager, PIECES[1], range(3))
    check(storage, PIECES[1], stager.finish(PIECES[1]), range(3))
    other = Stager(storage, directory=tmp_path / "staging")  # does not take the new one for an old one
    submit(stager, PIECES[2], range(1))
    check(storage, PIECES[2], stager.finish(PIECES[2]), range(1))
    other.close()
    stager.close()
    assert list((tmp_path / "staging").iterdir()) == []


def test_staging_directories_that_cannot_be_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stager, storage, _ = world(tmp_path)
    with stager:
        with failpoints.arm_inside("stage.data:1:raise"):
            submit(stager, PIECES[0], range(1))
            with pytest.raises(StorageError, match=f"cannot stage chunks in {tmp_path}/staging/.*: failpoint"):
                stager.finish(PIECES[0])
        with monkeypatch.context() as patch:
            patch.setattr(Path, "write_bytes", full)
            submit(stager, PIECES[1], range(1))
            with pytest.raises(StorageError, match="no space left there\nchoose another"):
                stager.finish(PIECES[1])
        submit(stager, PIECES[2], range(2))
        check(storage, PIECES[2], stager.finish(PIECES[2]), range(2))
        assert len(list_staged(tmp_path)) == 1
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(UserError, match="file is not private: it is not a directory"):
        Stager(storage, directory=tmp_path / "file")
    with pytest.raises(StorageError, match="cannot stage chunks in"):
        Stager(storage, directory=tmp_path / "file" / "below")


def full(path: Path, data: bytes) -> int:
    path.touch()
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


if __name__ == "__main__":
    failpoints.arm(os.environ[failpoints.VARIABLE])
    process, _, remote = world(Path(sys.argv[1]))
    if os.environ[failpoints.VARIABLE].startswith("stage.data"):
        remote.open.clear()  # the chunk before stays on the disk
    submit(process, PIECES[0], range(3))
    process.finish(PIECES[0])
