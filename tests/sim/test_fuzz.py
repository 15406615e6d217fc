"""Goal: no message of a peer, however wrong, ends a process, changes what it is refused for, or is believed by halves.

Method: worlds of the simulator are sent wrong messages (`sim/fuzz.py`) for as long as `REGROW_FUZZ_SECONDS` says,
with and without assertions (`python -O`). And the fuzzer itself can fail: each kind of mistake is planted, and found.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from helpers import job, table

from regrow import _kernels
from regrow.core.door import ServerDoor
from regrow.core.messages import KINDS, Flush
from regrow.core.serving import Serving
from regrow.sim import fuzz
from regrow.sim.forks import Fork, ForkEnded
from regrow.sim.fuzz import Fuzz, Tally
from regrow.sim.paged import Disk, PagedModel
from regrow.store.memory import MemoryStore

ROOT = Path(__file__).parents[2]
SECONDS = float(os.environ.get("REGROW_FUZZ_SECONDS", "15"))
WORLD = 7  # some world with servers that flush


def run_worlds(seconds: float, *, seed: int = 0, worlds: int = 1 << 30) -> Tally:
    threads = _kernels.get_threads()
    _kernels.set_threads(1)  # a forked process has no others
    tally = Tally()
    deadline = time.monotonic() + seconds
    try:
        while tally.worlds < worlds and (time.monotonic() < deadline or not tally.worlds):
            tally.add(Fuzz(seed + tally.worlds).run())
    finally:
        _kernels.set_threads(threads)
    return tally


@pytest.mark.timeout(600)
def test_whatever_peers_say_is_obeyed_ignored_or_refused() -> None:
    tally = run_worlds(SECONDS)
    assert [finding.text for finding in tally.findings.values()] == []
    assert tally.messages > 1000 and tally.looks > 50
    verdicts = {verdict for _, verdict in tally.verdicts}
    assert verdicts == {"obeyed", "ignored", "refused", "not a message"}
    assert {kind for kind, _ in tally.verdicts} <= {kind.__name__ for kind in KINDS.values()}
    if SECONDS >= 60:
        assert {kind for kind, _ in tally.verdicts} == {kind.__name__ for kind in KINDS.values()}
        assert tally.finished > 0


@pytest.mark.timeout(600)
def test_without_assertions_too() -> None:
    command = [sys.executable, "-O", str(ROOT / "tools" / "fuzz.py"), "--seed", "500", "--messages", "4000"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    assert "0 found" in done.stdout


def test_a_world_is_a_function_of_its_seed() -> None:
    once, again = (Fuzz(WORLD, batches=1).run() for _ in range(2))
    assert (once.messages, once.verdicts, once.states) == (again.messages, again.verdicts, again.states)


# --- The fuzzer can fail ---


def plant(monkeypatch: pytest.MonkeyPatch, mistake: Any) -> Tally:
    """Servers do this when they are sent a flush that they would refuse."""
    hear = ServerDoor._on_server_message

    def wrong(door: ServerDoor, event: Any) -> Any:
        effects = hear(door, event)
        if isinstance(event.message, Flush) and event.message.number >= 1 << 40:
            mistake(door)
        return effects

    monkeypatch.setattr(ServerDoor, "_on_server_message", wrong)
    monkeypatch.setattr(fuzz, "BATCH_SECONDS_MAX", 5.0)
    monkeypatch.setattr(fuzz, "LOOK_RATE", 0.5)
    monkeypatch.setattr(fuzz, "FINISH_RATE", 0.0)
    tally = Tally()
    for seed in range(WORLD, WORLD + 20):
        tally.add(Fuzz(seed, batches=2).run())
        if tally.findings:
            break
    return tally


def fail(door: ServerDoor) -> None:
    raise KeyError("planted")


def change(door: ServerDoor) -> None:
    if door.server is not None:
        door.server.serving.clock += 1


def crash(door: ServerDoor) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def take_memory(door: ServerDoor) -> None:
    np.zeros(1 << 31)


@pytest.mark.parametrize(
    ("mistake", "where"),
    [
        (fail, "KeyError at"),
        (change, "a refused Flush changed a machine"),
        (crash, "killed by SIGKILL"),
        (take_memory, "MemoryError at"),
    ],
)
def test_planted_mistakes_are_found(monkeypatch: pytest.MonkeyPatch, mistake: Any, where: str) -> None:
    found = plant(monkeypatch, mistake).findings.values()
    assert any(finding.where.startswith(where) or where in finding.text for finding in found), found


def test_a_loop_without_end_is_found() -> None:
    fork = Fork()
    if fork.is_child:
        fork.note(3, "about to hang")
        while True:
            signal.pause()
    with pytest.raises(ForkEnded, match=r"nothing for 0 s at 3: about to hang"):
        fork.wait(0.3)


def test_a_refusal_that_changes_the_run_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """A refused request stops the server from answering: only the end of the run shows it."""
    dispatch = Serving.dispatch_safely
    lame: set[int] = set()  # by id: nothing that a machine knows of

    def refuse_first(serving: Serving, source: Any, message: Any) -> Any:
        effects = dispatch(serving, source, message)
        if id(serving) in lame and not (effects and isinstance(effects[0], fuzz.Refuse)):
            return []
        if effects and isinstance(effects[0], fuzz.Refuse):
            lame.add(id(serving))
        return effects

    monkeypatch.setattr(Serving, "dispatch_safely", refuse_first)
    monkeypatch.setattr(fuzz, "FINISH_RATE", 1.0)
    monkeypatch.setattr(fuzz, "CAREFUL_RATE", 1.0)
    tally = Tally()
    for seed in range(WORLD, WORLD + 10):
        tally.add(Fuzz(seed, batches=2).run())
        if tally.findings:
            break
    seen = ("breaks I8", "breaks suspicion")  # nothing ends, or whoever does not answer is taken for cut off
    assert any(where.endswith(seen) for where in tally.findings), tally.findings


@pytest.mark.parametrize(
    ("counts", "slots", "weights"),
    [((0, 2**31 - 1), (0, 1), 4), ((-1, 3), (0, 1), 4), ((1, 1), (0, 99), 4), ((1, 1), (0, 1), 5), ((2,), (0, 1), 4)],
)
def test_the_model_of_a_paged_store_refuses_as_a_store_does(counts: Any, slots: Any, weights: int) -> None:
    """World 700007: the model believed counts that both stores refuse, and took sixteen gigabytes for them."""
    spec = job(table("t0"), table("t1"))
    model = PagedModel(SimpleNamespace(disks=[Disk()], frames=8), spec, 0)  # type: ignore[arg-type]
    wrong = (np.array(counts, np.int32), np.array(slots, np.uint32), np.zeros(weights, np.float32))
    for store in (model, MemoryStore(spec, 0, False)):
        with pytest.raises((ValueError, IndexError)):
            store.assign_untouched(*wrong)
    assert model._dirty == {}
