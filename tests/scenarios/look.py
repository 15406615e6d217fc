"""How scenarios make the real machines and look inside them: the one file here that changes when they do.

Everything else in this folder knows `machine.receive(event) -> effects` and messages. What the simulator's own file of
this kind (`regrow.sim.machines`) can say is asked there.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import numpy as np

from regrow.core.coordinator import Coordinator
from regrow.core.cuts import CutPlan
from regrow.core.door import ServerDoor
from regrow.core.identity import Identity
from regrow.core.job import JobSpec
from regrow.core.session import Session
from regrow.sim import bounds, machines

# --- Making ---


def make_coordinator(identity: Identity, job: JobSpec, *, cuts: bool) -> Coordinator:
    return machines.make_coordinator(identity, job, CutPlan() if cuts else None)


def make_server(identity: Identity, on_capture: Callable[[Identity, bool], None] | None) -> ServerDoor:
    """`on_capture` hears of every cut, at its instant; None: there are no cuts."""
    return machines.make_server(identity, on_capture=on_capture)


def make_session() -> Session:
    return Session()


def one_row_at_a_time() -> contextlib.AbstractContextManager[None]:
    """Streams and sweeps move one row, so that something can happen between two."""
    return machines.small_batches(1)


def cuts_named_ahead(steps: int) -> contextlib.AbstractContextManager[None]:
    """Synchronous cuts are named so many steps ahead."""
    return machines.small_batches(1, steps_ahead=steps)


def flushes_unanswered(most: int) -> contextlib.AbstractContextManager[None]:
    """A holder is not sent more flushes than that before it answers."""
    return bounds.shrink({"flusher.FLUSHES_UNACKED_MAX": most})


# --- A server, which is behind its door as soon as it knows a view ---


def knows_view(door: ServerDoor) -> bool:
    return door.server is not None


def status(door: ServerDoor) -> str:
    """How far a server is on its way back."""
    server = door.server
    if server is None:
        return "waits for its view"
    if server.recovered:
        return "whole"
    if not server.ways.serves:
        return "waits to hear where its groups stand"
    streams = sum(not state.ended for state in server.holder.held.values())
    return f"active, rows missing: {server.store.missing_rows()}, parities missing: {streams}"


def row(door: ServerDoor, slot: int) -> Any:
    """The weights of a row of the one table; None if it is not there."""
    server = door.server
    if server is None or not server.ways.serves:
        return None
    if not server.ways.is_whole:
        _, missing = server.store.prepare(np.array([1], np.int32), np.array([slot], np.uint32))
        if missing.size:
            return None
    record = np.empty(server.store.record_floats(0), np.float32)
    server.store.read_records(0, slot, 1, record)
    return record


def sources(door: ServerDoor) -> list[tuple[tuple[int, ...], int, tuple[int, ...], dict[int, int], list[int]]]:
    """By group: marks applied, number of the last flush, its marks, what each holder has of it, who is streamed to."""
    if door.server is None:
        return []
    flusher = door.server.flusher
    return [
        (tuple(applied), group.number, tuple(group.flushed), dict(group.acked), list(group.streams))
        for applied, group in zip(flusher.applied, flusher.groups, strict=True)
    ]


def held(door: ServerDoor) -> list[tuple[int, int, int, tuple[int, ...], bool]]:
    """(source, group, flush, marks, whole) of every group whose parity is here."""
    if door.server is None:
        return []
    found = sorted(door.server.holder.held.items())
    return [(source, g, state.number, tuple(state.marks), state.ended) for (source, g), state in found]


def parity(door: ServerDoor, q: int, blocks: int) -> Any:
    """All parities q of the one table at this server, as bytes by block."""
    return machines.parity(door.server, 0, q, blocks)


def blocks(job: JobSpec) -> int:
    return machines.blocks(job, 0)


def take_captured(door: Any) -> int:
    """Takes all that a cut has captured, as a saver would; the number of the cut."""
    store = door.server.store
    while store.capture_left():
        store.capture_chunk(1 << 20)
    return machines.cut_number(door.server)


def unsettled_reason(door: ServerDoor) -> str:
    return machines.unsettled_reason(door)


# --- The others ---


def view(coordinator: Coordinator) -> Any:
    """The newest view it has made; None: there is none yet."""
    return coordinator.view


def unsettled_view_reason(coordinator: Coordinator) -> str:
    return machines.unsettled_view_reason(coordinator)


def known_durable(session: Session) -> list[int]:
    """What a worker knows to be durable, by server."""
    return list(session._durable)


def kept_pushes(session: Session) -> list[int]:
    """What a worker keeps for a redo."""
    return list(session._redo)
