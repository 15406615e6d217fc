"""A run that goes on in another terminal: which of this machine's processes are its own, found by what the system says
and not by what a file once said, so that no other run's process is ever meant.

The launcher holds its run directory open as long as it lives; its children are named after what they do ("rg server
2"). The rule to keep: a process is looked at again once it is held (pidfd), before it is signalled.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from regrow.errors import UserError
from regrow.launch.rundir import CONFIG

RUNS = Path("runs")
PROC = Path("/proc")
FORMS = "server:2, worker:0 or coordinator"


@dataclass(frozen=True, slots=True, kw_only=True)
class Process:
    pid: int
    name: str  # "rg server 2"
    state: str
    parent: int

    @property
    def is_there(self) -> bool:
        """Not dead already, and only waiting to be noticed."""
        return self.state not in ("Z", "X")

    @property
    def role(self) -> str:
        """As a user says it: server:2."""
        return self.name.removeprefix("rg ").replace(" ", ":")


def kill(run: str, who: str) -> tuple[Path, Process]:
    """Kills one process of a run with SIGKILL, as a failure would. UserError says what is not there."""
    if re.fullmatch(r"(server|worker):\d+|coordinator", who) is None:
        raise UserError(f"{who!r} is no process of a run", hint=f"it is like {FORMS}")
    path = find_run(run)
    processes = list_processes(path)
    # One that was stopped and has been replaced may still be there beside its successor.
    found = sorted((each for each in processes if each.role == who), key=lambda each: each.state == "T")
    if not found:
        known = ", ".join(sorted(each.role for each in processes))
        raise UserError(f"{path} has no {who} just now", hint=f"it has {known}")
    _send_kill(path, found[0])
    return path, found[0]


def find_run(run: str) -> Path:
    """The directory of a run, from its path or its name under runs/."""
    for path in (Path(run), RUNS / run):
        if (path / CONFIG).is_file():
            return path
    if Path(run).is_dir():
        raise UserError(f"{run} is not the directory of a run: it has no {CONFIG}")
    raise UserError(f"there is no run {run}, and none in {RUNS}/", hint="name its directory, as given with --out")


def list_processes(path: Path) -> list[Process]:
    """The living processes of the run in this directory, but for its launcher."""
    if not PROC.joinpath("self", "stat").exists():
        raise UserError("processes of a run are found through /proc, which this system has not")
    launchers = set(_list_holders(path))
    everybody = [process for pid in _list_pids() if (process := read_process(pid)) is not None]
    found = [each for each in everybody if each.parent in launchers and each.name.startswith("rg ") and each.is_there]
    if not found:
        raise UserError(f"{path} is not running, or belongs to another user", hint="its launcher holds the directory")
    return found


def read_process(pid: int) -> Process | None:
    with contextlib.suppress(OSError):
        # The name in parentheses may hold anything; the fields follow its end.
        head, _, tail = (PROC / str(pid) / "stat").read_text(errors="replace").rpartition(")")
        state, parent = tail.split()[:2]
        return Process(pid=pid, name=head.partition("(")[2], state=state, parent=int(parent))
    return None


def _list_pids() -> list[int]:
    return [int(name) for name in os.listdir(PROC) if name.isdecimal()]


def _list_holders(path: Path) -> Iterator[int]:
    """Processes that have this directory open."""
    wanted = path.stat()
    for pid in _list_pids():
        with contextlib.suppress(OSError):  # it has ended, or is another user's
            if any(_is_open(PROC / str(pid) / "fd" / name, wanted) for name in os.listdir(PROC / str(pid) / "fd")):
                yield pid


def _is_open(link: Path, wanted: os.stat_result) -> bool:
    try:
        return os.path.samestat(link.stat(), wanted)
    except OSError:  # closed since, or of a kind that cannot be looked at
        return False


def _send_kill(path: Path, process: Process) -> None:
    """The number may have become another process's meanwhile; what is held is looked at again."""
    with contextlib.suppress(ProcessLookupError):
        handle = os.pidfd_open(process.pid)
        try:
            now = read_process(process.pid)
            if now is not None and (now.name, now.parent) == (process.name, process.parent):
                signal.pidfd_send_signal(handle, signal.SIGKILL)
                return
        except PermissionError:
            raise UserError(f"{path} belongs to another user", hint="only its owner may kill its processes") from None
        finally:
            os.close(handle)
    raise UserError(f"{process.role} of {path} ended by itself just now")
