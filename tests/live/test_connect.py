"""Goal: a cluster is used from processes that did not make it, with the protection that it has; a token file that is
not what it must be is one line.

Method: connected_workers.py as a process of its own; files made here, and sockets that nobody listens at.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import regrow
from regrow.core.job import JobSpec, OptimizerSpec, TableSpec
from regrow.errors import UserError
from regrow.launch.connect import FORMAT, ConnectedCluster, Ticket, describe_protection, write_ticket

pytestmark = pytest.mark.live

SCRIPT = Path(__file__).with_name("connected_workers.py")
CODE = regrow.ErasureCode(k=2, r=1)


def make_ticket(protection: regrow.ErasureCode | regrow.Partial | None = None, *, version: int = FORMAT) -> Ticket:
    said = describe_protection(protection)
    return Ticket(
        format=version,
        token="ab" * 32,
        servers=3,
        authenticate="auto",
        frame_bytes_max=1 << 20,
        made_at=0.0,
        protection=said,
    )


def test_workers_of_other_processes_survive_a_server() -> None:
    done = subprocess.run([sys.executable, str(SCRIPT)], capture_output=True, text=True, timeout=200, check=False)
    assert (done.returncode, done.stdout) == (0, "exits 0 0, moved 80 to 80\n"), done.stderr


def test_the_file_is_for_its_user_alone(tmp_path: Path) -> None:
    path = tmp_path / "token"
    write_ticket(path, make_ticket())
    assert path.stat().st_mode & 0o777 == 0o600
    with pytest.raises(FileExistsError):
        write_ticket(path, make_ticket())


SAVES = regrow.Partial(ckpt="saves", every="30s", priority="ssu", priority_tables=("t",))


@pytest.mark.parametrize("protection", [None, CODE, SAVES])
def test_protection_is_that_of_the_cluster(
    protection: regrow.ErasureCode | regrow.Partial | None, tmp_path: Path
) -> None:
    write_ticket(tmp_path / "token", make_ticket(protection))
    cluster = ConnectedCluster("unix:nowhere", make_ticket(protection))
    assert cluster.protection == protection
    assert cluster.server_count == 3


def test_tables_that_are_protected_otherwise_are_refused() -> None:
    table = TableSpec(name="t", rows=9, dim=1, init_bound=0.0, optimizer=OptimizerSpec(kind="sgd", learning_rate=1.0))
    job = JobSpec(tables=(table,), servers=3, workers=1)
    with pytest.raises(UserError, match="the tables would be protected by Unprotected"):
        ConnectedCluster("unix:nowhere", make_ticket(CODE)).client(job)


def spoil(path: Path, how: str) -> None:
    if how == "missing":
        return
    if how == "directory":
        path.mkdir(mode=0o700)
        return
    write_ticket(path, make_ticket(version=9 if how == "format" else FORMAT))
    if how == "mode":
        path.chmod(0o640)
    if how == "text":
        path.write_text("what?")


@pytest.mark.parametrize(
    ("how", "reason"),
    [
        ("missing", "No such file or directory"),
        ("directory", "is a directory"),
        ("mode", "has mode 0640: others can read or change it"),
        ("text", "is not a token file"),
        ("format", "is of format 9, this version reads 1"),
    ],
)
def test_files_that_are_refused(tmp_path: Path, how: str, reason: str) -> None:
    spoil(tmp_path / "token", how)
    with pytest.raises(UserError, match=reason):
        regrow.connect("unix:nowhere", tmp_path / "token")


@pytest.mark.parametrize("address", ["unix:{}/c0", "tcp:127.0.0.1:1"])
def test_where_nobody_listens(tmp_path: Path, address: str) -> None:
    write_ticket(tmp_path / "token", make_ticket())
    with pytest.raises(UserError, match="no cluster answers at"):
        regrow.connect(address.format(tmp_path), tmp_path / "token")
    with pytest.raises(UserError, match="is not an address"):
        regrow.connect("somewhere", tmp_path / "token")
