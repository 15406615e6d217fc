"""Goal: two servers that cannot reach each other, while everybody else reaches both, do not hold a run up for ever:
one of them is replaced after half a minute, and nothing is lost.

Method: real processes over TCP. The sockets between the two are borrowed (pidfd_getfd) and given a filter that drops
whatever arrives, as a broken switch would: connections stay open, nothing comes through, and new ones are not made. A
synchronous run ends with the digest of an undisturbed one. It takes the half minute, so it is a slow test.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import json
import os
import socket
import struct
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from helpers import wait_until
from test_hang import EC, SMALL, check

from regrow.errors import UserError
from regrow.launch import running

pytestmark = [
    pytest.mark.live,
    pytest.mark.slow,
    pytest.mark.timeout(240),
    pytest.mark.skipif(sys.platform != "linux", reason="there is no pidfd_getfd"),
]

TRAIN = """import json, sys
from regrow.config import TrainConfig
from regrow.launch import local
options = json.loads(sys.argv[1])
local.train(TrainConfig(**{name: tuple(each) if isinstance(each, list) else each for name, each in options.items()}))
"""

PIDFD_GETFD = 438  # the number of the call, the same on all machines
SO_ATTACH_FILTER, SO_DETACH_FILTER = 26, 27
LISTENING = "0A"  # as /proc/net/tcp writes it
LOOK_SECONDS = 0.01  # until it is seen that one of the two has ended

Ends = tuple[str, str]  # of a connection, as /proc/net/tcp writes them


def list_sockets(pid: int) -> dict[int, int]:
    """Descriptors of a process, by the inode of their sockets."""
    found = {}
    for entry in os.scandir(f"/proc/{pid}/fd"):
        with contextlib.suppress(OSError):  # closed meanwhile
            name = os.readlink(entry.path)
            if name.startswith("socket:["):
                found[int(name[8:-1])] = int(entry.name)
    return found


def list_tcp() -> dict[int, tuple[Ends, bool]]:
    """By inode: from where to where, and whether it listens."""
    lines = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    return {int(fields[9]): ((fields[1], fields[2]), fields[3] == LISTENING) for fields in lines}


def borrow(pid: int, fd: int) -> socket.socket:
    """The socket of another process."""
    libc = ctypes.CDLL(None, use_errno=True)
    pidfd = os.pidfd_open(pid)
    try:
        borrowed = libc.syscall(PIDFD_GETFD, pidfd, fd, 0)
    finally:
        os.close(pidfd)
    if borrowed < 0 and ctypes.get_errno() == errno.EPERM:
        pytest.skip("sockets of other processes cannot be borrowed here")
    assert borrowed >= 0, os.strerror(ctypes.get_errno())
    return socket.socket(fileno=borrowed)


class Wall:
    """Between two processes, as long as both live. What listens hears nobody meanwhile, so all who need to reach one of
    them have to have done so before."""

    def __init__(self, first: int, second: int) -> None:
        self.sockets_between = 0
        self._pids = first, second
        self._listeners: list[socket.socket] = []
        self._end = threading.Event()
        self._build()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._end.set()
        self._thread.join(10)

    def _build(self) -> None:
        mine, tcp = [list_sockets(pid) for pid in self._pids], list_tcp()
        ends = [{tcp[inode][0] for inode in each if inode in tcp} for each in mine]
        for side, pid in enumerate(self._pids):
            between = {(here, there) for here, there in ends[side] if (there, here) in ends[1 - side]}
            for inode, fd in mine[side].items():
                where, listens = tcp.get(inode, (None, False))
                if listens or where in between:
                    drop_all(borrowed := borrow(pid, fd))
                    self.sockets_between += not listens
                    if listens:
                        self._listeners.append(borrowed)
                    else:
                        borrowed.close()

    def _watch(self) -> None:
        while not self._end.wait(LOOK_SECONDS) and all(map(is_alive, self._pids)):
            pass
        for listener in self._listeners:
            listener.setsockopt(socket.SOL_SOCKET, SO_DETACH_FILTER, 0)
            listener.close()


def drop_all(end: socket.socket) -> None:
    """From now on whatever arrives there is thrown away, and so at the connections that are made with it."""
    keep_nothing = ctypes.create_string_buffer(struct.pack("HBBI", 0x06, 0, 0, 0))
    end.setsockopt(socket.SOL_SOCKET, SO_ATTACH_FILTER, struct.pack("HP", 1, ctypes.addressof(keep_nothing)))


def is_alive(pid: int) -> bool:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][0] not in "ZX"
    return False


def find(path: Path, role: str) -> running.Process | None:
    with contextlib.suppress(OSError, UserError):  # the run has not begun
        return next((each for each in running.list_processes(path) if each.role == role), None)
    return None


def is_stopped(path: Path, role: str) -> bool:
    process = find(path, role)
    return process is not None and process.state == "T"


def test_one_of_two_servers_that_cannot_reach_each_other_is_replaced(tmp_path: Path) -> None:
    run = tmp_path / "run"
    options = {**SMALL, **EC, "transport": "tcp", "pause": ("worker:1@step:5:5s",), "out": str(run)}
    with subprocess.Popen([sys.executable, "-c", TRAIN, json.dumps(options)]) as training:
        # All know each other when a worker has done five steps; while it is stopped nobody goes on.
        wait_until(lambda: is_stopped(run, "worker:1"), seconds=90)
        pids = [process.pid for number in (1, 2) if (process := find(run, f"server:{number}")) is not None]
        wall = Wall(*pids)
        assert training.wait(180) == 0
        wall.close()
    assert wall.sockets_between >= 2, "they never had a connection"
    summary = json.loads((run / "summary.json").read_text())
    check(summary, "server")
    (failure,) = summary["failures"]
    assert failure["id"] in (1, 2)
    assert "has had no answer of S" in failure["reason"]
