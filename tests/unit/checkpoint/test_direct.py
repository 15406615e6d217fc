"""Goal: what goes past the page cache is what would have gone through it, in files of any size and buffers cut
anywhere; and where a file system will have none of it, files are written and read as usual.

Method: sizes around every border, on a real directory (one that refuses O_DIRECT shows nothing but that it is asked);
refusals are made, at each step that may refuse.
"""

from __future__ import annotations

import errno
import fcntl
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from regrow.checkpoint import direct
from regrow.checkpoint.files import LocalFiles
from regrow.checkpoint.storage import Storage
from regrow.errors import StorageError

SIZES = (1, 4095, 4096, 4097, direct.BLOCK_BYTES - 1, direct.BLOCK_BYTES, direct.BLOCK_BYTES + 1, 9_000_001)


def open_direct(path: Path) -> Storage:
    files = LocalFiles(path, direct_bytes_min=1)
    return Storage(str(path), files, timeout_seconds=60.0, attempts=1)


def parts_of(data: bytes, seed: int) -> list[memoryview]:
    """Cut at random places."""
    cuts = np.sort(np.random.default_rng(seed).integers(0, len(data) + 1, 5)).tolist()
    return [memoryview(data)[first:end] for first, end in zip([0, *cuts], [*cuts, len(data)], strict=True)]


def there_and_back(path: Path) -> None:
    store, usual = open_direct(path), Storage.open(str(path))
    for seed, size in enumerate(SIZES):
        data = np.random.default_rng(seed).bytes(size)
        for form in (data, memoryview(data), parts_of(data, seed)):
            store.write("dir/file", form)
            assert (path / "dir" / "file").read_bytes() == data
            for reader in (store, usual):
                again = reader.read("dir/file")
                assert again == data
            assert not memoryview(store.read("dir/file")).readonly
        assert store.names("dir") == {"file": size}


def test_there_and_back(tmp_path: Path) -> None:
    there_and_back(tmp_path)


@pytest.mark.skipif(not direct.FLAG, reason="there is no O_DIRECT here")
def test_large_files_are_direct_and_small_ones_are_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And a file is as usual again when it is closed: its last bytes are no whole block."""
    asked: list[bool] = []
    really = fcntl.fcntl

    def note(file: int, command: int, *value: int) -> Any:
        if command == fcntl.F_SETFL:
            asked.append(bool(value[0] & direct.FLAG))
        return really(file, command, *value)

    monkeypatch.setattr(fcntl, "fcntl", note)
    store = Storage.open(str(tmp_path))
    store.write("small", bytes(direct.BYTES_MIN - 1))
    store.read("small")
    assert asked == []
    store.write("large", bytes(direct.BYTES_MIN))
    assert asked[0]
    store.read("large")
    assert asked[-1]


@pytest.mark.parametrize("step", ["switch", "write", "read"])
def test_a_file_system_that_refuses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str) -> None:
    refusals: list[int] = []
    get_flags = fcntl.fcntl

    def refuse(file: int) -> None:
        if get_flags(file, fcntl.F_GETFL) & direct.FLAG:
            refusals.append(file)
            raise OSError(errno.EINVAL, "not here")

    if step == "switch":

        def switch(file: int, command: int, *value: int) -> Any:
            if command == fcntl.F_SETFL and value[0] & direct.FLAG:
                refusals.append(file)
                raise OSError(errno.EINVAL, "not here")
            return get_flags(file, command, *value)

        monkeypatch.setattr(fcntl, "fcntl", switch)
    elif step == "write":
        write = os.write
        monkeypatch.setattr(os, "write", lambda file, data: (refuse(file), write(file, data))[1])
    else:
        preadv = os.preadv
        monkeypatch.setattr(os, "preadv", lambda file, *rest: (refuse(file), preadv(file, *rest))[1])
    there_and_back(tmp_path)
    assert refusals or not direct.FLAG


def test_a_refusal_in_the_middle_begins_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A disk that takes part of a block leaves us at a place where nothing direct may begin."""
    data = np.random.default_rng(1).bytes(9_000_001)
    write, preadv = os.write, os.preadv
    monkeypatch.setattr(os, "write", lambda file, part: write(file, part[:8192] if len(part) > 8192 else part))
    monkeypatch.setattr(os, "preadv", lambda file, parts, at: preadv(file, [parts[0][:1_000_000]], at))
    store = open_direct(tmp_path)
    store.write("file", parts_of(data, 1))
    assert store.read("file") == data


def test_other_errors_are_errors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = open_direct(tmp_path)
    store.write("file", bytes(10_000))

    def full(*_: Any) -> int:
        raise OSError(errno.ENOSPC, "full")

    with monkeypatch.context() as patch:
        patch.setattr(os, "write", full)
        with pytest.raises(StorageError, match="no space left"):
            store.write("file", bytes(20_000))
    with monkeypatch.context() as patch:
        patch.setattr(os, "preadv", full)
        with pytest.raises(StorageError, match="no space left"):
            store.read("file")
    assert store.read("file") == bytes(10_000)
    assert os.listdir(tmp_path) == ["file"]


def test_memory_is_used_again() -> None:
    memory = direct.Memory()
    small, large = memory.take(10_000), memory.take(20_000)
    for buffer, least in ((small, 10_000), (large, 20_000)):
        assert buffer.ctypes.data % direct.ALIGNMENT == len(buffer) % direct.ALIGNMENT == 0
        assert len(buffer) >= least
    memory.give(small)
    memory.give(large)
    assert memory.take(5_000) is small, "the smallest that is enough"
    assert memory.take(12_289) is large
    memory.give(small)
    again = memory.take(30_000)
    memory.give(again)
    assert memory.take(1) is again
    assert memory.take(1) is not small, "it made way"


def test_read_into_memory(tmp_path: Path) -> None:
    """What is too small for a file, or too small a file for it, is read as usual."""
    data = np.random.default_rng(1).bytes(10_000)
    store = open_direct(tmp_path)
    store.write("file", data)
    for size, used in ((10_000, True), (20_000, True), (4_096, False)):
        buffer = direct.allocate_aligned(size)
        found = store.read("file", into=buffer)
        assert found == data
        assert np.shares_memory(np.asarray(found), buffer) == used
    assert Storage.open(str(tmp_path)).read("file", into=direct.allocate_aligned(10_000)) == data
    remote = Storage.open("memory://test_read_into_memory/x")
    remote.write("file", data)
    assert remote.read("file", into=direct.allocate_aligned(10_000)) == data
