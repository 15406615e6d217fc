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
from regrow.core.cut import CutPlan
from regrow.core.job import JobSpec
from regrow.core.link import Identity
from regrow.core.server import ShardServer
from regrow.core.session import Session
from regrow.sim import machines

# --- Making ---


def make_coordinator(identity: Identity, job: JobSpec, *, cuts: bool) -> Coordinator:
    return machines.make_coordinator(identity, job, CutPlan() if cuts else None)


def make_server(identity: Identity, captured: Callable[[Identity, bool], None] | None) -> ShardServer:
    """`captured` hears of every cut, at its instant; None: there are no cuts."""
    return machines.make_server(identity, captured=captured)


def make_session() -> Session:
    return Session()


def one_row_at_a_time() -> contextlib.AbstractContextManager[None]:
    """Streams and sweeps move one row, so that something can happen between two."""
    return machines.small_batches(1)


def cuts_named_ahead(steps: int) -> contextlib.AbstractContextManager[None]:
    """Synchronous cuts are named so many steps ahead."""
    return machines.small_batches(1, steps_ahead=steps)


def view(machine: Any) -> Any:
    """The newest view that a coordinator has made, or that a server knows; None: there is none yet."""
    return machine.view


# --- A server ---


def status(server: Any) -> str:
    """How far a server is on its way back."""
    if server.view is None:
        return "waits for its view"
    if server.rebuild is None or server.rebuild.reported:
        return "whole"
    if not server.rebuild.active:
        return "waits to hear where its groups stand"
    missing = server.store.missing_rows()
    streams = sum(not state.ended for state in server.holder.held.values())
    return f"active, rows missing: {missing}, parities missing: {streams}"


def row(server: Any, slot: int) -> Any:
    """The weights of a row of the one table; None if it is not there."""
    if server.view is None or (server.rebuild is not None and not server.rebuild.active):
        return None
    if server.rebuild is not None:
        _, missing = server.store.prepare(np.array([1], np.int32), np.array([slot], np.uint32))
        if missing.size:
            return None
    record = np.empty(server.store.record_floats(0), np.float32)
    server.store.read_records(0, slot, 1, record)
    return record


def sources(server: Any) -> list[tuple[tuple[int, ...], int, tuple[int, ...], dict[int, int], list[int]]]:
    """By group: marks applied, number of the last flush, its marks, what each holder has of it, who is streamed to."""
    found: list[Any] = []
    if server.view is None:
        return found
    for applied, group in zip(server.flusher.applied, server.flusher.groups, strict=True):
        found.append((tuple(applied), group.number, tuple(group.flushed), dict(group.acked), list(group.streams)))
    return found


def held(server: Any) -> list[tuple[int, int, int, tuple[int, ...], bool]]:
    """(source, group, flush, marks, whole) of every group whose parity is here."""
    if server.view is None:
        return []
    return [(source, g, h.number, tuple(h.marks), h.ended) for (source, g), h in sorted(server.holder.held.items())]


def parity(server: Any, q: int, blocks: int) -> Any:
    """All parities q of the one table at this server, as bytes by block."""
    return machines.parity(server, 0, q, blocks)


def blocks(job: JobSpec) -> int:
    return machines.blocks(job, 0)


def take_captured(server: Any) -> int:
    """Takes all that a cut has captured, as a saver would."""
    while server.store.capture_left():
        server.store.capture_chunk(1 << 20)
    return machines.cut_number(server)


def unsettled_reason(server: Any) -> str:
    return machines.unsettled_reason(server)


# --- The others ---


def unsettled_view_reason(coordinator: Any) -> str:
    return machines.unsettled_view_reason(coordinator)


def known_durable(session: Any) -> list[int]:
    """What a worker knows to be durable, by server."""
    return list(session._durable)


def kept_pushes(session: Any) -> list[int]:
    """What a worker keeps for a redo."""
    return list(session._redo)
