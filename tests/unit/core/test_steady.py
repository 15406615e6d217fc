"""Goal: no clock can make a wait endless. A machine's time never goes back, a coordinator that was stopped itself takes
nobody for silent, and one whose ticks all come late still notices a silence.

Method: a coordinator with three servers, and a server's door, fed ticks of clocks that are set back, leap or crawl.
"""

from __future__ import annotations

import itertools

from helpers import job, server, table, worker

from regrow.core.coordinator import OWN_PAUSE_SECONDS, SILENT_SECONDS, Coordinator
from regrow.core.door import BEAT_SECONDS, ServerDoor
from regrow.core.effects import Delivered, Joined, Replace, Send, Tick
from regrow.core.identity import COORDINATOR
from regrow.core.messages import Beat, Declare, Ready, Register
from regrow.core.steady import SteadyTime
from regrow.store.memory import MemoryStore

SERVERS = 3
TICK = 0.05


def settle() -> Coordinator:
    """Three servers that serve, protected by one parity."""
    machine = Coordinator(servers=SERVERS)
    machine.receive(Tick(now=1000.0))
    for index in range(SERVERS):
        machine.receive(Joined(peer=server(index)))
        machine.receive(Delivered(source=server(index), message=Register(address=f"unix:/s{index}")))
    spec = job(table(k=2, r=1), servers=SERVERS)
    machine.receive(Delivered(source=worker(0), message=Declare(job=spec)))
    for index in range(SERVERS):
        machine.receive(Delivered(source=server(index), message=Ready(rows=1, memory_bytes=1)))
    return machine


def find_condemned(machine: Coordinator, times: list[float], *, silent: int | None = 0) -> list[int]:
    """Who counts as dead after these ticks, all but one being heard before each."""
    found = []
    for now in times:
        for index in range(SERVERS):
            if index != silent:
                machine.receive(Delivered(source=server(index), message=Beat(step=0)))
        effects = machine.receive(Tick(now=now))
        found += [effect.peer.id for effect in effects if isinstance(effect, Replace)]
    return found


def ticks(first: float, seconds: float, *, step: float = TICK) -> list[float]:
    return [first + step * count for count in range(1, int(seconds / step) + 1)]


def test_a_clock_that_goes_forward_is_taken_as_it_is() -> None:
    steady = SteadyTime()
    times = [5.0, 5.25, 7.125, 1e6]
    assert [steady.read(now) for now in times] == times


def test_a_clock_that_is_set_back_stands_still_for_a_moment_and_goes_on() -> None:
    steady = SteadyTime()
    readings = [steady.read(now) for now in (7200.0, 7201.0, 3601.0, 3602.0, 100.0, 100.5, 101.5)]
    assert readings == [7200.0, 7201.0, 7201.0, 7202.0, 7202.0, 7202.5, 7203.5]
    assert all(one <= other for one, other in itertools.pairwise(readings))


def test_a_silence_is_noticed_although_the_coordinators_clock_was_set_back() -> None:
    assert find_condemned(settle(), ticks(1000.0 - 3600.0, 2 * SILENT_SECONDS)) == [0]


def test_a_coordinator_that_was_stopped_takes_nobody_for_silent() -> None:
    machine = settle()
    assert find_condemned(machine, ticks(1000.0, 0.5), silent=None) == []
    machine.receive(Tick(now=1060.0))  # nothing was read from any socket yet
    assert find_condemned(machine, ticks(1060.0, 2 * SILENT_SECONDS), silent=None) == []


def test_a_slow_coordinator_notices_a_silence_and_wrongs_nobody() -> None:
    """Every step is longer than what counts as a stop of its own."""
    times = ticks(1000.0, 12.0, step=OWN_PAUSE_SECONDS + 0.2)
    assert find_condemned(settle(), times) == [0]
    assert find_condemned(settle(), times, silent=None) == []


def test_a_server_whose_clock_was_set_back_goes_on_beating() -> None:
    door = ServerDoor(identity=server(0), build_store=MemoryStore, reply_bytes_max=1 << 20)
    door.receive(Joined(peer=COORDINATOR))
    beats = 0
    for now in [*ticks(5000.0, 1.0), *ticks(1400.0, 1.0)]:
        effects = door.receive(Tick(now=now))
        beats += sum(isinstance(effect, Send) and isinstance(effect.message, Beat) for effect in effects)
    assert beats >= 2 * int(1.0 / BEAT_SECONDS) - 1
