"""How the simulator makes the real machines and looks inside them: the one file that changes when they do."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from regrow.core import cuts, decode, flusher
from regrow.core.coordinator import PATIENCE_SECONDS, Coordinator
from regrow.core.cut import TENANTS
from regrow.core.cuts import CutPlan
from regrow.core.door import ServerDoor
from regrow.core.effects import Send
from regrow.core.identity import Identity
from regrow.core.job import JobSpec
from regrow.core.messages import (
    CutAsk,
    CutAt,
    CutBegun,
    CutMarks,
    Expect,
    Fault,
    FlushCommit,
    Pull,
    Push,
    ReadRecords,
    Stream,
    Syndrome,
    Tail,
    View,
    WriteRecords,
)
from regrow.core.partings import UNANSWERED_SECONDS_MAX
from regrow.core.recall import SAVES_TENANT
from regrow.core.states import AttemptState, MemberState
from regrow.core.wayback import FetchSaved
from regrow.sim.paged import Disks
from regrow.sim.probes import Probes
from regrow.sim.profiles import SaveScenario
from regrow.sim.reference import Key, Reference
from regrow.store.interface import TableRows
from regrow.store.memory import MemoryStore

REPLY_BYTES_MAX = 1 << 20
PROBED: dict[type[Any], str] = {
    Expect: "rows expected",
    Fault: "fault",
    Stream: "stream",
    Tail: "tail",
    Syndrome: "syndrome",
    FlushCommit: "staged flush",
    ReadRecords: "records read",
    WriteRecords: "records written",
}
PROBED_CLOSER = frozenset({View, CutAsk, CutAt, Push, Pull, ReadRecords, WriteRecords})
TICKETS_MAX = 16  # of a server: the pulls, the first push and what is expected, of three workers at most
SERVER_QUEUES = ("_early", "_ahead")
SERVING_QUEUES = ("_queued", "_pushes", "_parked", "_held", "_staged", "_step_pulls", "_unprepared", "_writes")


def make_server(
    identity: Identity,
    *,
    on_capture: Callable[[Identity, int, bool], None] | None = None,
    start: str | None = None,
    saves: SaveScenario | None = None,
    disks: Disks | None = None,
    marks: tuple[int, ...] | None = None,
) -> ServerDoor:
    """`on_capture` hears of every capture, at its instant, and for whom it is; None: there are none. `start`: the cut a
    run begins with. `saves`: when the server saves its own rows, if it does, and which first. `disks`: rows may be on
    one of them; `marks`: those that are on it are of a checkpoint."""

    def build_store(job: JobSpec, server: int, recovering: bool) -> Any:
        store: Any = MemoryStore(job, server, recovering) if disks is None else disks.build(job, identity)
        if on_capture is not None:
            while store.add_tenant() < max(TENANTS):
                pass
            if saves is not None:
                mine = [index for index, table in enumerate(job.tables) if job.protection.recalls(table)]
                store.set_priority(SAVES_TENANT, saves.priority, mine, saves.share, job.seed, saves.period)
            begin = store.begin_capture

            def begin_capture(tenant: int, full: bool) -> None:
                on_capture(identity, tenant, full)
                begin(tenant, full)

            store.begin_capture = begin_capture
            choose = store.choose_captured
            store.choose_captured = lambda rows: choose(1)  # so that much happens before all is known
        return store

    return ServerDoor(
        identity=identity,
        build_store=build_store,
        reply_bytes_max=REPLY_BYTES_MAX,
        address=f"sim:{identity.id}.{identity.incarnation}",
        cut=start,
        save_plan=None if saves is None else saves.plan,
        marks=marks,
    )


def make_coordinator(
    identity: Identity,
    job: JobSpec,
    plan: CutPlan | None = None,
    *,
    publication_plan: CutPlan | None = None,
    patience_seconds: float = PATIENCE_SECONDS,
    unanswered_seconds: float = UNANSWERED_SECONDS_MAX,
) -> Coordinator:
    """One without a plan makes no cuts."""
    salt = "" if plan is None else "sim"
    return Coordinator(
        servers=job.servers,
        term=identity.incarnation,
        cut_plan=plan,
        publication_plan=publication_plan,
        cut_salt=salt,
        patience_seconds=patience_seconds,
        unanswered_seconds=unanswered_seconds,
    )


@contextlib.contextmanager
def small_batches(size: int, *, steps_ahead: int = cuts.STEPS_AHEAD) -> Iterator[None]:
    """Streams and sweeps of a few bytes at a time, so that much can happen between two of them."""
    saved = flusher.STREAM_BYTES, decode.SWEEP_BYTES, cuts.STEPS_AHEAD
    flusher.STREAM_BYTES = decode.SWEEP_BYTES = size
    cuts.STEPS_AHEAD = steps_ahead
    try:
        yield
    finally:
        flusher.STREAM_BYTES, decode.SWEEP_BYTES, cuts.STEPS_AHEAD = saved


def blocks(job: JobSpec, table: int) -> int:
    spec = job.tables[table]
    return job.layout(table).slots_per_server(spec.rows) // spec.k


# --- Servers ---


def is_recovered(door: ServerDoor) -> bool:
    return door.recovered


def find_held(door: ServerDoor, source: int, group: int) -> Any:
    """How far a holder has come with a group of a source, or None."""
    return door.server.holder.held.get((source, group)) if door.server is not None else None


def read_applied(server: Any) -> list[list[int]]:
    """The marks of each group."""
    marks: list[list[int]] = server.flusher.applied
    return marks


def cut_number(server: Any) -> int:
    """Of the cut that a server was told of last."""
    return int(server.cut.number)


def holds_pushes(server: Any) -> bool:
    """Whether a cut keeps pushes from being applied."""
    return bool(getattr(server.serving, "_held", ()))


def read_touched_rows(server: Any, reference: Reference) -> dict[Key, bytes]:
    """All rows of a server that were ever touched, as whole records."""
    store, found = server.store, {}
    for table in range(len(reference.job.tables)):
        bits = np.unpackbits(store.touched(table).view(np.uint8), bitorder="little")
        record = np.empty(store.record_floats(table), np.float32)
        for slot in np.flatnonzero(bits).tolist():
            row = reference.places.row_at.get((server.identity.id, table, slot))
            if row is not None:
                store.read_records(table, slot, 1, record)
                found[table, row] = record[: reference.initial[table, 0].size].tobytes()
    return found


def take_captured(store: Any, bytes_max: int, reference: Reference) -> dict[Key, bytes]:
    """Some captured rows, as whole records."""
    found = {}
    for table, ids, parts in store.capture_chunk(bytes_max):
        values = np.concatenate(parts, axis=1)
        padding = reference.initial[table, 0].size - values.shape[1]
        for row, record in zip(ids.tolist(), np.pad(values, ((0, 0), (0, padding))), strict=True):
            found[table, row] = record.tobytes()
    return found


def make_table_rows(rows: dict[Key, bytes], reference: Reference, job: JobSpec) -> list[TableRows]:
    """Whole records in the form in which a driver loads them."""
    found: list[TableRows] = []
    for table, spec in enumerate(job.tables):
        mine = sorted(row for t, row in rows if t == table)
        if not mine:
            continue
        values = np.array([np.frombuffer(rows[table, row], np.float32) for row in mine])
        parts, start = [], 0
        for width in (spec.dim, *(width for _, width in spec.optimizer.state_parts(spec.dim))):
            parts.append(np.ascontiguousarray(values[:, start : start + width]))
            start += width
        found.append((table, np.array(mine, np.uint32), parts))
    return found


def is_decoding(server: Any) -> bool:
    return bool(server.holder.decoder._batches)


def record_floats(server: Any, table: int) -> int:
    return int(server.store.record_floats(table))


def read_touched(server: Any, table: int, q: int, member: int) -> int:
    """Which rows of a member a holder knows to be touched: a bit by block."""
    return int.from_bytes(server.store.parity_members(table, q, member).tobytes(), "little")


class ParityReader:
    """Reads all parities of a table at a server at once, always into the same memory."""

    def __init__(self, job: JobSpec, table: int, *, record_bytes: int) -> None:
        count = blocks(job, table)
        self._counts = np.zeros(len(job.tables), np.int32)
        self._counts[table] = count
        self._blocks = np.arange(count, dtype=np.uint32)
        self._out = np.empty(count * record_bytes // 4, np.float32)

    def read(self, server: Any, q: int) -> bytes:
        """Parities q, block after block."""
        server.store.parity_read(q, self._counts, self._blocks, self._out)
        return self._out.tobytes()


def parity(server: Any, table: int, q: int, count: int) -> Any:
    """All parities q of a table at this server, as bytes by block."""
    out = np.empty(count * server.store.record_floats(table), np.float32)
    counts = np.zeros(len(server.view.job.tables), np.int32)
    counts[table] = count
    server.store.parity_read(q, counts, np.arange(count, dtype=np.uint32), out)
    return out.view(np.uint8).reshape(count, -1)


def fingerprint(server: Any) -> tuple[Any, ...]:
    """All that a message of an old incarnation might change."""
    holder = [(key, state.number, state.marks, state.ended) for key, state in server.holder.held.items()]
    source = [(group.number, group.flushed, tuple(group.acked.items())) for group in server.flusher.groups]
    stores = []
    for table, spec in enumerate(server.view.job.tables):
        for q in range(spec.r):
            stores.append(parity(server, table, q, server.store.blocks(table)).tobytes())
    missing = server.store.missing_rows()
    return holder, source, stores, missing, [list(marks) for marks in server.flusher.applied]


def unsettled_reason(door: ServerDoor) -> str:
    """Why a server is not at rest."""
    server: Any = door.server
    if server is None:
        return "has no view"
    if not server.recovered:
        ended = sum(state.ended for state in server.holder.held.values())
        missing = server.store.missing_rows()
        mended = f", not mended by {sorted(server._unmended)}" if server._unmended else ""
        streams = f"{ended} of {len(server.holder.held)} streams{mended}"
        return f"is recovering: {server.ways}, {missing} rows missing, {streams}"
    if not server.ways.is_whole:
        return f"is not whole: {server.ways}"
    if any(member.recovering for member in server.view.servers):
        return "knows of a recovery"
    for index, group in enumerate(server.flusher.coded):
        if group.streams:
            return f"streams group {index}"
        if tuple(server.flusher.applied[index]) != group.flushed or server.store.pending_rows(index):
            return f"has not flushed group {index}"
        if group.acked and min(group.acked.values()) < group.number:
            return f"waits for acknowledgements of group {index}: {group.acked} of {group.number}"
    if server.paging is not None and (reason := server.store.leftover_reason()):
        return str(reason)
    for owner, names in ((door, SERVER_QUEUES), (server.serving, SERVING_QUEUES)):
        for name in names:
            if getattr(owner, name, None):
                return f"holds {name}"
    return "decodes" if server.holder.decoder.sweeping or server.holder._early else ""


def unbounded_reason(door: ServerDoor, tail_max: int) -> str:
    """A queue that is longer than it may be."""
    server: Any = door.server
    if server is None:
        return ""
    if server.paging is not None and len(server.paging._tickets) > TICKETS_MAX:
        return f"waits for {len(server.paging._tickets)} tickets"
    staged = getattr(server.serving, "_staged", ())
    if len(staged) > 2:
        return f"has staged the steps {sorted(staged)}"
    for (source, group), state in server.holder.held.items():
        if len(state.tail) > tail_max:
            return f"keeps {len(state.tail)} flushes of group {group} of S{source}"
    for index, group in enumerate(server.flusher.groups):
        if len(group.history) > 2:
            unacked = group.number - min(group.acked.values()) if group.acked else 0
            if len(group.history) > 2 + unacked:
                return f"remembers the marks of {len(group.history)} flushes of group {index}"
    return ""


def probe(probes: Probes, door: Any, event: Any, effects: list[Any]) -> None:
    """Counts the rare paths that messages show."""
    message, server = event.message, door.server
    kind = type(message)
    if kind in PROBED:
        probes.hit(PROBED[kind])
    if door._early or door._ahead or (server is not None and server.holder._early):
        probes.hit("late view")
    if kind in PROBED_CLOSER:
        _probe_closer(probes, door, event, effects)


def _probe_closer(probes: Probes, door: Any, event: Any, effects: list[Any]) -> None:
    message, server = event.message, door.server
    if isinstance(message, View) and server is not None and server.holder.decoder.places_begun_again:
        probes.hit("begun again")
    if isinstance(message, CutAt) and any(_is_late(effect) for effect in effects):
        probes.hit("cut late")
    if isinstance(message, CutAsk) and any(_is_busy(effect) for effect in effects):
        probes.hit("publication waits for a save")
    if isinstance(message, WriteRecords) and door.identity.incarnation:
        probes.hit("records written again")
    if not isinstance(message, Push | Pull | ReadRecords | WriteRecords) or server is None:
        return
    if isinstance(message, Push) and holds_pushes(server):
        probes.hit("push held")
    kind = "push" if isinstance(message, Push) else "pull" if isinstance(message, Pull) else "record"
    if kind == "push" and _has(server, event):
        probes.hit("push seen before")
    if any(_asks_for_rows(effect) for effect in effects):
        probes.hit(f"{kind} waits for rows")


def _asks_for_rows(effect: Any) -> bool:
    return isinstance(effect, FetchSaved) or (isinstance(effect, Send) and isinstance(effect.message, Fault))


def _is_busy(effect: Any) -> bool:
    return isinstance(effect, Send) and isinstance(effect.message, CutMarks) and "save" in effect.message.error


def _is_late(effect: Any) -> bool:
    return isinstance(effect, Send) and isinstance(effect.message, CutBegun) and effect.message.late


def _has(server: Any, event: Any) -> bool:
    """Whether a push came for the second time: it is still the newest, and no reply but the acknowledgement left."""
    mark = 0 if server.view.job.mode == "sync" else event.source.id
    return bool(event.message.seq < min(marks[mark] for marks in server.flusher.applied))


# --- The coordinator and sessions ---


def find_recovering(coordinator: Any) -> set[int]:
    """Servers that the coordinator does not count on."""
    if coordinator.view is None:
        return set(coordinator.dead)
    return {server for server, place in enumerate(coordinator.places) if place.is_down}


def is_known_whole(coordinator: Any, peer: Identity) -> bool:
    """Whether the coordinator has heard of this very server that it has all its rows."""
    place = coordinator.places[peer.id]
    return bool(place.is_filled_by(peer) and place.life.state is MemberState.SERVING)


def unsettled_view_reason(coordinator: Any) -> str:
    if coordinator.view is None:
        return "has no view"
    away = find_recovering(coordinator)
    return f"waits for {sorted(away)}" if away else ""


def is_cutting(coordinator: Any) -> bool:
    """Whether a cut is under way."""
    return coordinator.turns is not None and coordinator.turns.underway is not None


def minds_silence(coordinator: Any, peer: Identity) -> bool:
    """Whether a silence of this server means something soon; while it starts, only after minutes."""
    place = coordinator.places[peer.id]
    return coordinator.view is not None and place.is_filled_by(peer) and bool(place.means_silence)


def awaits_captures(coordinator: Any) -> bool:
    """Whether servers were told where to cut, and not all are there yet (asynchronously)."""
    maker = coordinator.turns.underway if coordinator.turns is not None else None
    attempt = maker._attempt if maker is not None and not maker._is_sync else None
    return attempt is not None and attempt.life.state is AttemptState.CUTTING


def redo_pushes(session: Any) -> int:
    return len(session._redo)
