"""Goal: what waits in a directory for temporary files is nobody else's: a directory that somebody else made, may enter
or has put a link in place of is refused, in words that say what to do.

Method: such directories are made, as far as one user can; another owner is one that the test says we are not. Then the
whole way: a stager and the directory of sockets.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from regrow.checkpoint.private import check_private, make_private
from regrow.checkpoint.staging import Stager
from regrow.checkpoint.storage import Storage
from regrow.errors import UserError
from regrow.runtime.sockets import SocketDir


def test_a_new_one_is_ours_alone_whatever_the_mask(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        make_private(tmp_path / "a" / "b")
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "a" / "b").stat().st_mode) == 0o700
    make_private(tmp_path / "a" / "b")  # taken as it is


@pytest.mark.parametrize("mode", [0o701, 0o710, 0o755, 0o777, 0o1777])
def test_one_that_others_may_enter(tmp_path: Path, mode: int) -> None:
    path = tmp_path / "open"
    path.mkdir()
    path.chmod(mode)
    with pytest.raises(UserError, match=f"open is not private: others may use it .mode {mode:o}") as caught:
        make_private(path)
    assert caught.value.hint is not None and f"chmod 700 {path}" in caught.value.hint


def test_a_link_a_file_and_somebody_elses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "good").mkdir(mode=0o700)
    (tmp_path / "link").symlink_to(tmp_path / "good")
    (tmp_path / "nowhere").symlink_to(tmp_path / "absent")
    (tmp_path / "file").touch(mode=0o600)
    for name, reason in (("link", "a link"), ("nowhere", "a link"), ("file", "not a directory")):
        with pytest.raises(UserError, match=f"{name} is not private: it is {reason}"):
            make_private(tmp_path / name)
    check_private(tmp_path / "good")
    own = os.getuid()
    monkeypatch.setattr(os, "getuid", lambda: own + 1)
    with pytest.raises(UserError, match=f"good is not private: it belongs to user {own}"):
        check_private(tmp_path / "good")


def test_chunks_are_not_staged_where_others_look(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    prepared = tmp_path / f"regrow-staging-{os.getuid()}"
    prepared.symlink_to(tmp_path)
    with pytest.raises(UserError, match="is not private: it is a link"):
        Stager(Storage.open("memory://private-test"))
    prepared.unlink()
    with Stager(Storage.open("memory://private-test")):
        assert stat.S_IMODE(prepared.stat().st_mode) == 0o700


def test_sockets_are_behind_a_door_of_their_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with SocketDir() as sockets:
        assert stat.S_IMODE(sockets.path.stat().st_mode) == 0o700
    monkeypatch.setattr("tempfile.mkdtemp", lambda prefix, dir: _make_open(tmp_path / prefix))
    with pytest.raises(UserError, match="is not private: others may use it"):
        SocketDir()


def _make_open(path: Path) -> str:
    path.mkdir()
    path.chmod(0o755)
    return str(path)
