"""Goal: nobody waits for ever for a path or a URL that does not answer, also before there is a storage.

Method: questions that hang until the test lets them go, with a short bound.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from regrow.checkpoint import bounded, storage
from regrow.checkpoint.address import split_cut
from regrow.checkpoint.bounded import ask
from regrow.checkpoint.listing import read_listing
from regrow.checkpoint.storage import Storage
from regrow.errors import StorageError


@pytest.fixture
def hang(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Whoever waits for it hangs until the test is over."""
    let_go = threading.Event()
    monkeypatch.setattr(bounded, "LOOK_SECONDS_MAX", 0.05)
    yield let_go
    let_go.set()


def test_an_answer_is_handed_on() -> None:
    assert ask("look", lambda: 7) == 7
    with pytest.raises(KeyError):
        ask("look", lambda: {}[1])


def test_no_answer(hang: threading.Event) -> None:
    with pytest.raises(StorageError, match=r"cannot look at it: no answer within 0.05 s"):
        ask("look at it", hang.wait)


def test_a_mount_that_hangs_is_told_to_whoever_lists_it(
    hang: threading.Event, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Path, "is_dir", lambda self: hang.wait())
    with pytest.raises(StorageError, match="no answer"):
        read_listing(str(tmp_path))
    with pytest.raises(StorageError, match="no answer"):
        split_cut(f"{tmp_path}@latest")


def test_a_library_that_hangs_when_it_is_opened(hang: threading.Event, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(storage, "open_files", lambda url: hang.wait())
    with pytest.raises(StorageError, match="cannot open s3://bucket/run: no answer"):
        Storage.open("s3://bucket/run")
