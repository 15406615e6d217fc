"""Goal: a piece is on storage whole or not at all, whatever kills its writer; and no call waits for ever.

Method: one scenario (write pieces over older ones, delete one) is recorded once; then a process is killed at every
single pass of every failpoint, and torn in the middle of every write. What is left must read back; doing it all again
must end in the very files of an undisturbed run. Forks of one process do the dying, so that it is quick. Everything
that storage may raise is raised by a fake file system.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pytest

from regrow.checkpoint import failpoints, files, storage
from regrow.checkpoint.chunks import Chunk, Rows, read_chunk, write_chunk
from regrow.checkpoint.files import TEMPORARY, LocalFiles, RemoteFiles
from regrow.checkpoint.manifest import MANIFEST, Cut, Manifest, TableInfo, chunk_name
from regrow.checkpoint.storage import Known, Storage
from regrow.core.names import cut_id, piece_name
from regrow.errors import CheckpointError, StorageError, UserError

TABLE = TableInfo(name="t", rows=100, dim=4, states=(("momentum1", 1),), init_bound=0.1, index=0)
CUTS = [cut_id(step, "test") for step in range(4)]
OLDEST, OLD = piece_name(None, CUTS[0]), piece_name(None, CUTS[1])
NEW, EMPTY, AGAIN = piece_name(CUTS[1], CUTS[2]), piece_name(CUTS[2], CUTS[3]), piece_name(CUTS[1], CUTS[3])


def rows(step: int, number: int) -> Chunk:
    ids = np.arange(number * 10, number * 10 + 5, dtype=np.uint32)
    return {"t": Rows(ids, np.full((5, 4), step, np.float32), {"momentum1": np.full((5, 1), number, np.float32)})}


def write_piece(store: Storage, source: str | None, step: int, *, chunks: int) -> Manifest:
    target = Cut(id=CUTS[step], step=step, marks=(step,), created=0.0, job={}, extra={})
    name = piece_name(source, target.id)
    infos = [
        write_chunk(store, name, chunk_name("s0of1", number), rows(step, number), shard="s0of1")
        for number in range(chunks)
    ]
    manifest = Manifest(source=source, target=target, tables=(TABLE,), seed=1, chunks=tuple(infos), made_by="a test")
    store.write_manifest(manifest)
    return manifest


def before(store: Storage) -> None:
    """Two older pieces."""
    write_piece(store, None, 0, chunks=2)
    write_piece(store, None, 1, chunks=2)


def scenario(store: Storage) -> None:
    write_piece(store, CUTS[1], 2, chunks=2)
    write_piece(store, CUTS[2], 3, chunks=0)
    write_piece(store, CUTS[1], 3, chunks=0)
    store.delete_piece(OLDEST)


def check(store: Storage) -> list[str]:
    """All pieces that exist read back whole; returns their names."""
    manifests, _ = store.manifests()
    for manifest in manifests:
        for number, info in enumerate(manifest.chunks):
            found = read_chunk(store, manifest, info)["t"]
            wanted = rows(manifest.target.step, number)["t"]
            assert np.array_equal(found.ids, wanted.ids)
            assert np.array_equal(found.weight, wanted.weight)
            assert np.array_equal(found.states["momentum1"], wanted.states["momentum1"])
    return [manifest.name for manifest in manifests]


def open_local(path: Path) -> Storage:
    return Storage.open(str(path))


def open_remote(path: Path) -> Storage:
    """A file system beyond fsspec whose puts are not atomic, and which survives the death of its writer."""
    files = RemoteFiles(fsspec.filesystem("file", auto_mkdir=True, skip_instance_cache=True), str(path))
    return Storage(str(path), files, timeout_seconds=60.0, attempts=3)


OPEN = {"local": open_local, "remote": open_remote}


def tree(path: Path) -> dict[str, bytes]:
    return {str(file.relative_to(path)): file.read_bytes() for file in sorted(path.rglob("*")) if file.is_file()}


def record(kind: str, base: Path) -> list[str]:
    """Every failpoint the scenario passes, as often as it does."""
    before(OPEN[kind](base / "before"))
    if kind == "local":  # left by an earlier crash
        (base / "before" / AGAIN).mkdir()
        (base / "before" / AGAIN / f"s0of1-00000.safetensors{TEMPORARY}1-2").write_bytes(b"half a chu")
    shutil.copytree(base / "before", base / "recorded")
    with failpoints.recording() as names:
        scenario(OPEN[kind](base / "recorded"))
    return names


@pytest.fixture
def memory_path(tmp_path: Path) -> Iterator[Path]:
    """In memory where there is such a place: hundreds of fsyncs take their time on a disk."""
    if not os.access("/dev/shm", os.W_OK):
        yield tmp_path
        return
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="regrow-test-") as directory:
        yield Path(directory)


def points(kind: str, base: Path) -> list[str]:
    names = record(kind, base)
    passes = [(name, names[: i + 1].count(name)) for i, name in enumerate(names)]
    torn = [f"{name}:{count}:tear" for name, count in passes if name.endswith((".data", ".put"))]
    return [f"{name}:{count}:exit" for name, count in passes] + torn


def die_everywhere(kind: str, base: Path) -> None:
    """Runs in its own process, which has no threads: forks one child per failpoint, each in its own directory."""
    for index, point in enumerate((base / "points").read_text().split()):
        child = os.fork()
        if child == 0:
            failpoints.arm(point)
            scenario(OPEN[kind](base / str(index)))
            os._exit(1)  # it should not have come here
        _, status = os.waitpid(child, 0)
        assert os.waitstatus_to_exitcode(status) == failpoints.EXIT_CODE, point


@pytest.mark.parametrize("kind", OPEN)
def test_killed_at_every_failpoint(kind: str, memory_path: Path) -> None:
    everywhere = points(kind, memory_path)
    assert len(everywhere) > {"local": 30, "remote": 10}[kind]
    undisturbed = tree(memory_path / "recorded")
    for index in range(len(everywhere)):
        shutil.copytree(memory_path / "before", memory_path / str(index))
    (memory_path / "points").write_text("\n".join(everywhere))
    subprocess.run([sys.executable, __file__, kind, str(memory_path)], check=True)

    for index, point in enumerate(everywhere):
        path = memory_path / str(index)
        store = OPEN[kind](path)
        names = check(store)
        assert OLD in names, point
        assert set(names) <= {OLDEST, OLD, NEW, EMPTY, AGAIN}, point
        _, broken = store.manifests()
        if kind == "remote" and point.startswith("manifest.put") and point.endswith("tear"):
            assert len(broken) == 1, point
        else:
            assert broken == [], point
        scenario(store)  # whoever comes next does it all again
        assert tree(path) == undisturbed, point
        assert check(store) == [OLD, NEW, AGAIN, EMPTY]
        assert store.list_unfinished() == [], point


def test_all_failpoints_are_passed_somewhere(memory_path: Path) -> None:
    """Those of staging are in its own tests."""
    passed = {name for kind in OPEN for name in record(kind, memory_path / kind)}
    assert passed == {name for name in failpoints.NAMES if not name.startswith("stage.")}


def test_the_order_that_makes_it_durable(tmp_path: Path) -> None:
    """A kill does not lose what is in the page cache, a power cut does: so the order itself is checked."""
    store = open_local(tmp_path / "new")
    with failpoints.recording() as names:
        write_piece(store, None, 0, chunks=1)
    file = ["open", "data", "fsync", "rename", "rename_fsync"]
    assert names == [
        *["chunk.mkdir", "chunk.mkdir_fsync"] * 2,
        *(f"chunk.{name}" for name in file),
        "manifest.mkdir_fsync",
        *(f"manifest.{name}" for name in file),
    ]
    with failpoints.recording() as names:
        store.delete_piece(OLDEST)
    assert names == [
        *["manifest.delete", "manifest.delete_fsync", "chunk.delete", "chunk.delete_fsync"],
        *["piece.delete", "piece.delete_fsync"],
    ]


@pytest.fixture(params=["local", "file", "memory"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Storage]:
    urls = {"local": str(tmp_path / "x"), "file": f"file://{tmp_path}/x", "memory": f"memory://{uuid.uuid4().hex}/x"}
    yield Storage.open(urls[request.param])
    if request.param == "memory":
        with contextlib.suppress(FileNotFoundError):
            fsspec.filesystem("memory").rm(urls["memory"].removesuffix("/x"), recursive=True)


def test_pieces_and_litter(store: Storage) -> None:
    assert (store.pieces(), store.list_unfinished(), store.manifests(), store.names(OLD)) == ([], [], ([], []), {})
    before(store)
    store.write(f"{NEW}/s0of1-00000.safetensors", b"some rows")
    store.write("something else/file", b"of somebody else")
    store.write(f"{MANIFEST}", b"of nothing")
    assert store.pieces() == [OLDEST, OLD]
    assert store.list_unfinished() == [NEW]
    assert store.names(NEW) == {"s0of1-00000.safetensors": 9}
    assert list(store.names(OLD)) == [MANIFEST, "s0of1-00000.safetensors", "s0of1-00001.safetensors"]
    store.delete_piece(NEW)
    store.delete_piece(OLDEST)
    store.delete_piece(OLDEST)
    store.delete(f"{OLD}/not there")
    assert store.list_unfinished() == []
    assert check(store) == [OLD]
    with pytest.raises(CheckpointError, match="not the name of a piece"):
        store.delete_piece("something else")
    assert store.read("something else/file") == b"of somebody else"


def test_files_of_all_sizes(store: Storage) -> None:
    for data in (b"", b"x", bytes(range(256)) * 4096):
        store.write("dir/file", data)
        assert store.read("dir/file") == data
        assert store.names("dir") == {"file": len(data)}


def test_what_is_not_there_is_missing(store: Storage) -> None:
    with pytest.raises(StorageError, match=f"cannot read .*{NEW}/{MANIFEST}: it is not there") as caught:
        store.read_manifest(NEW)
    assert caught.value.missing


def test_what_is_known_is_read_again_only_if_it_changed(store: Storage, monkeypatch: pytest.MonkeyPatch) -> None:
    before(store)
    known: Known = {}
    reads: list[str] = []
    really = store.read_manifest
    monkeypatch.setattr(store, "read_manifest", lambda name: (reads.append(name), really(name))[1])
    for turn in range(3):
        manifests, broken = store.manifests(known)
        assert [manifest.name for manifest in manifests] == [OLDEST, OLD] and not broken
        assert sorted(reads) == ([OLDEST, OLD] if turn == 0 or not store.local else []), "a file in memory has no stamp"
        reads.clear()
    assert store.manifests(known) == store.manifests()
    whole = store.read(f"{OLDEST}/{MANIFEST}")
    store.write(f"{OLDEST}/{MANIFEST}", whole[:-1])
    assert [name for name, _ in store.manifests(known)[1]] == [OLDEST]
    assert [name for name, _ in store.manifests(known)[1]] == [OLDEST], "damage is looked at each time"
    store.write(f"{OLDEST}/{MANIFEST}", whole)
    assert [manifest.name for manifest in store.manifests(known)[0]] == [OLDEST, OLD]
    store.delete(f"{OLD}/{MANIFEST}")
    assert [manifest.name for manifest in store.manifests(known)[0]] == [OLDEST]
    assert list(known) == [OLDEST]


def test_which_manifest_cannot_be_looked_at_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = Storage.open(str(tmp_path))
    before(store)
    really = LocalFiles.stamp

    def stamp(self: LocalFiles, path: str) -> str | None:
        if path.startswith(OLD):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return really(self, path)

    monkeypatch.setattr("regrow.checkpoint.storage.WAIT_SECONDS", 0.0)
    monkeypatch.setattr("regrow.checkpoint.storage.STAMPS_PER_CALL", 1)
    assert store.pieces() == [OLDEST, OLD]
    monkeypatch.setattr(LocalFiles, "stamp", stamp)
    with pytest.raises(StorageError, match=f"cannot look for manifests in {tmp_path}: {OLD}: Input/output error"):
        store.pieces()


def test_a_manifest_in_the_wrong_place(store: Storage) -> None:
    before(store)
    store.write(f"{NEW}/{MANIFEST}", store.read(f"{OLD}/{MANIFEST}"))
    with pytest.raises(CheckpointError, match=f"{NEW}/{MANIFEST}: is the manifest of {OLD}"):
        store.read_manifest(NEW)
    manifests, broken = store.manifests()
    assert [manifest.name for manifest in manifests] == [OLDEST, OLD]
    assert broken == [(NEW, f"{NEW}/{MANIFEST}: is the manifest of {OLD}")]


def test_damaged_manifests_are_listed_with_the_reason(store: Storage) -> None:
    before(store)
    whole = store.read(f"{OLDEST}/{MANIFEST}")
    flipped = bytes([*whole[:60], whole[60] ^ 1, *whole[61:]])
    for damaged in (b"", whole[:-1], whole[: len(whole) // 2], flipped, bytes(len(whole))):
        store.write(f"{OLDEST}/{MANIFEST}", damaged)
        manifests, [(name, reason)] = store.manifests()
        assert [manifest.name for manifest in manifests] == [OLD]
        assert name == OLDEST
        assert reason.startswith(f"{OLDEST}/{MANIFEST}: ")


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("", "empty"),
        ("nope://x/y", "nope"),
        ("s3://", "does not say where"),
        ("file://x/y", "file:///x/y"),
        ("simplecache::s3://bucket/x", "layers"),
    ],
)
def test_bad_urls(url: str, words: str) -> None:
    with pytest.raises(UserError, match=words):
        Storage.open(url)


def test_relative_paths_and_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    Storage.open("here").write("a", b"1")
    Storage.open("~/there").write("a", b"2")
    assert tree(tmp_path) == {"here/a": b"1", "home/there/a": b"2"}


class FakeFiles(LocalFiles):
    """Raises what it is given before it works, or waits until it is let go."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.errors: list[BaseException] = []
        self.calls = 0
        self.let_go = threading.Event()
        self.hang = False

    def read(self, path: str) -> bytes:
        self.calls += 1
        if self.hang:
            self.let_go.wait()
        if self.errors:
            raise self.errors.pop(0)
        return super().read(path)


def fake(path: Path, *, timeout_seconds: float = 60.0) -> tuple[Storage, FakeFiles]:
    files = FakeFiles(path)
    (path / "file").write_bytes(b"content")
    return Storage("fake://place", files, timeout_seconds=timeout_seconds, attempts=3), files


class Elsewhere(Exception):
    """As libraries of networks raise them."""


@pytest.fixture
def no_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(storage, "WAIT_SECONDS", 0.001)


@pytest.mark.parametrize(
    "error", [OSError(errno.EIO, "I/O"), ConnectionResetError(), TimeoutError(), OSError("no number"), Elsewhere("x")]
)
def test_what_may_pass_is_tried_again(tmp_path: Path, no_waits: None, error: Exception) -> None:
    store, files = fake(tmp_path)
    files.errors = [error] * 2
    assert store.read("file") == b"content"
    assert files.calls == 3
    files.errors = [error] * 3
    with pytest.raises(StorageError, match="cannot read fake://place/file: ") as caught:
        store.read("file")
    assert files.calls == 6
    assert not caught.value.missing
    assert caught.value.__cause__ is error


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (FileNotFoundError(errno.ENOENT, "gone"), "it is not there"),
        (PermissionError(errno.EACCES, "Permission denied"), "Permission denied\nare credentials"),
        (OSError(errno.ENOSPC, "x"), "no space left there\nmake room"),
        (OSError(errno.EROFS, "Read-only"), "Read-only"),
        (TypeError("a bug"), "a bug"),
    ],
)
def test_what_does_not_pass_is_not_tried_again(tmp_path: Path, error: Exception, words: str) -> None:
    store, files = fake(tmp_path)
    files.errors = [error]
    with pytest.raises(StorageError) as caught:
        store.read("file")
    assert f"cannot read fake://place/file: {words}" in str(caught.value)
    assert files.calls == 1


def test_waits_grow_and_count_against_the_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store, files = fake(tmp_path, timeout_seconds=0.2)
    monkeypatch.setattr(storage, "WAIT_SECONDS", 0.05)
    waits: list[float | None] = []
    really = threading.Event.wait

    def wait(event: threading.Event, timeout: float | None = None) -> bool:
        if threading.current_thread().name == "regrow-storage":
            waits.append(timeout)
        return really(event, timeout)

    monkeypatch.setattr(threading.Event, "wait", wait)
    files.errors = [OSError(errno.EIO, "once"), OSError(errno.EIO, "twice")]
    assert store.read("file") == b"content"
    assert waits == [0.05, 0.1]
    monkeypatch.setattr(storage, "WAIT_SECONDS", 60.0)
    files.errors = [OSError(errno.EIO, "busy")]
    with pytest.raises(StorageError, match=r"no answer within 0.2 s \(before that: busy\)"):
        store.read("file")


def test_a_call_that_hangs_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only so many of them; and once they return, storage works again."""
    monkeypatch.setattr(storage, "ABANDONED_MAX", 2)
    store, files = fake(tmp_path, timeout_seconds=0.05)
    files.hang = True
    for _ in range(2):
        with pytest.raises(StorageError, match=r"cannot read fake://place/file: no answer within 0.05 s"):
            store.read("file")
    with pytest.raises(StorageError, match="2 earlier calls still hang"):
        store.names("")
    assert files.calls == 2
    files.hang = False
    files.let_go.set()
    for thread in threading.enumerate():
        if thread.name == "regrow-storage":
            thread.join()
    assert store.read("file") == b"content"


def test_a_hung_call_does_not_keep_the_process() -> None:
    code = """if True:
        import threading
        from regrow.checkpoint.files import LocalFiles
        from regrow.checkpoint.storage import Storage
        from regrow.errors import StorageError
        class Hung(LocalFiles):
            def read(self, path): threading.Event().wait()
        try:
            Storage("hung://", Hung("/"), timeout_seconds=0.05, attempts=3).read("x")
        except StorageError as error:
            print(error.message)
    """
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "cannot read hung:/x: no answer within 0.05 s\n"
    assert done.stderr == ""


def test_a_write_that_comes_too_late_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    let_go = threading.Event()
    really = files._write_all

    def slow(*args: Any, **kwargs: Any) -> None:
        let_go.wait()
        really(*args, **kwargs)

    Storage.open(str(tmp_path)).write("file", b"old")
    store = Storage.open(str(tmp_path), timeout_seconds=0.05)
    monkeypatch.setattr(files, "_write_all", slow)
    with pytest.raises(StorageError, match="no answer"):
        store.write("file", b"new")
    threads = [thread for thread in threading.enumerate() if thread.name == "regrow-storage"]
    let_go.set()
    for thread in threads:
        thread.join()
    assert tree(tmp_path) == {"file": b"old"}


def test_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Says where, leaves nothing behind, and the next write works."""
    store = Storage.open(str(tmp_path))
    store.write("file", b"old")
    really = os.write

    def full(file: int, data: Any) -> int:
        if len(data) < 8:
            raise OSError(errno.ENOSPC, "No space left on device")
        return really(file, data[: len(data) // 2])

    with monkeypatch.context() as patch:
        patch.setattr(os, "write", full)
        with pytest.raises(StorageError, match=f"cannot write {tmp_path}/file: no space left there") as caught:
            store.write("file", b"x" * 1000)
    assert "prune" in str(caught.value)
    assert tree(tmp_path) == {"file": b"old"}
    store.write("file", b"new")
    assert tree(tmp_path) == {"file": b"new"}


def test_no_answer_is_not_an_empty_list(tmp_path: Path, no_waits: None) -> None:
    """Whoever restores must not take a dead endpoint for a fresh start."""
    store, files = fake(tmp_path)
    before(Storage.open(str(tmp_path)))
    files.errors = [OSError(errno.EIO, "down")] * 100
    with pytest.raises(StorageError, match="down"):
        store.manifests()
    blocked = Storage.open(str(tmp_path / "file"))
    with pytest.raises(StorageError, match="Not a directory"):
        blocked.pieces()
    with pytest.raises(StorageError, match=r"exists|Not a directory"):
        blocked.write("x/y", b"")


def test_an_io_error_once_is_not_seen(memory_path: Path, no_waits: None) -> None:
    """Every failpoint of the scenario fails once; each is tried again, and nothing is left over."""
    for kind in OPEN:
        names = record(kind, memory_path / kind)
        undisturbed = tree(memory_path / kind / "recorded")
        for index, name in enumerate(dict.fromkeys(names)):
            path = memory_path / kind / str(index)
            shutil.copytree(memory_path / kind / "before", path)
            with failpoints.arm_inside(f"{name}:1:raise"):
                scenario(OPEN[kind](path))
            assert tree(path) == undisturbed, name


def test_failpoints_refuse_what_they_are_not() -> None:
    for point in ("chunk.rename:1:explode", "nothing:1:exit", "chunk.rename:0:exit", "chunk.rename"):
        with pytest.raises(ValueError):
            failpoints.arm(point)
    failpoints.arm(None)
    assert failpoints.hit("not even a name") is False  # nothing is armed, nothing is checked: it must cost nothing
    with failpoints.recording(), pytest.raises(AssertionError):
        failpoints.hit("not even a name")


if __name__ == "__main__":
    die_everywhere(sys.argv[1], Path(sys.argv[2]))
