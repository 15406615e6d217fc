"""Bounds of the core, made so small that a small world meets them.

Every queue, window and batch of `regrow.core` has a bound, and most are far above what a world of a few rows can fill:
a schedule that never meets one says nothing about what happens there. Profiles with `bounds` draw a value for each of
`BOUNDS` from the tape; 0 on the tape is the value that users have. The machines read their bounds as constants of their
modules, so one context sets them for a run (`shrink`), and nobody else has to know.

Each bound has a probe, which sees that it was reached. There are two kinds. At a *throttle* the machine waits, or does
less at a time; it must be reached. A *guard* refuses a peer that misbehaves; it is derived from the others as the most
that the protocol allows, so whoever does as he should comes up to it and never beyond. `UNSHRUNK` lists what is not
drawn. New bounds go to the end of the table: tapes are read in its order.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from types import ModuleType
from typing import TYPE_CHECKING, Any

from regrow.core import cut, cuts, decode, flusher, holder, link, rebuild, session
from regrow.core.effects import Send, Tick
from regrow.core.messages import CutBegun, CutSaved, Expect
from regrow.core.states import WayState

if TYPE_CHECKING:
    from regrow.core.job import JobSpec
    from regrow.sim.choices import Choices
    from regrow.sim.nodes import Node
    from regrow.sim.probes import Probes

Number = int | float
Bounds = dict[str, Number]  # what is not as users have it


@dataclasses.dataclass(frozen=True, slots=True)
class Bound:
    """A constant of the core: where it is, what else it may be, and the probe that sees it reached."""

    module: ModuleType
    name: str
    values: tuple[Number, ...]
    probe: str
    also: tuple[ModuleType, ...] = ()  # modules that have imported it by name

    @property
    def key(self) -> str:
        return f"{self.module.__name__.rpartition('.')[2]}.{self.name}"


BOUNDS = (
    Bound(flusher, "FLUSHES_UNACKED_MAX", (1, 2, 3), "bound: flushes unanswered"),
    Bound(flusher, "STREAMS_UNDERWAY_MAX", (1,), "bound: streams under way"),
    Bound(decode, "SWEEPS_UNDERWAY_MAX", (1,), "bound: sweeps under way"),
    Bound(rebuild, "FILL_ROWS", (1, 3), "bound: rows filled"),
    Bound(session, "EXPECTED_ROWS_MAX", (1, 2), "bound: rows expected"),
    Bound(session, "CLOCKS_KEPT_MAX", (1, 2), "bound: clocks kept"),
    Bound(link, "ACK_FRAMES_MAX", (5, 16), "bound: frames unacknowledged"),
    Bound(link, "ACK_BYTES_MAX", (400, 2000), "bound: frames unacknowledged"),
    Bound(cut, "CUT_SECONDS_MAX", (0.1, 0.3), "bound: cut under way", also=(cuts,)),
    Bound(cut, "HOLD_SECONDS_MAX", (0.1, 0.5), "bound: cut held"),
    Bound(cuts, "STEPS_AHEAD_MAX", (4, 8), "bound: cut steps ahead"),
    Bound(cuts, "GIVEN_UP_MAX", (1, 2), "bound: pieces given up"),
    Bound(cut, "ASIDE_BYTES_MAX", (16, 200), "bound: rows aside"),
)

# Constants of the core that look like bounds and are not made smaller, and why. (Modules that only say what is valid
# have none that a run could meet: STATIC.)
STATIC = ("coding", "framing", "job", "layout", "messages", "names", "protection", "twins")
UNSHRUNK = {
    "pace.TRIALS_MAX": "what is remembered; forgotten, it is tried again",
    "link.FRAME_BYTES": "what a kept message counts, not a bound",
    "flusher.STREAM_BYTES": "always small in the simulator (runner.BATCH_BYTES)",
    "decode.SWEEP_BYTES": "always small in the simulator (runner.BATCH_BYTES)",
    "cuts.STEPS_AHEAD": "drawn by every profile with cuts",
    "holder.TAIL_FLUSHES_MAX": "a guard, derived from FLUSHES_UNACKED_MAX (derive_guards)",
    "serving_sync.STEPS_AHEAD_MAX": "what the protocol says, not a choice: reached in every synchronous run",
    "serving.WAITING_MAX": "a guard: more than workers may have open is refused; unit tests reach it",
    "door.EARLY_OPENS_MAX": "a guard, as above",
    "door.AHEAD_MAX": "a guard, as above",
    "holder.EARLY_MAX": "a guard, as above",
    "rebuild.EARLY_MAX": "a guard, as above",
    "reload.FILL_ROWS": "rows at a time of a loop that fills in all of them; nothing happens in between",
    "checks.NUMBER_MAX": "what a number on the wire may be, not a bound",
    "cuts.ATTEMPT_SECONDS_MAX": "a limit of time that no world waits for; unit tests reach it",
    "cuts.YIELD_SECONDS_MAX": "a limit of time that no world waits for; unit tests reach it",
    "turns.WAIT_SECONDS_MAX": "a limit of time that no world waits for; unit tests reach it",
    "own_saves.CHOOSE_ROWS": "always small in the simulator (machines.make_server)",
    "own_saves.SAVE_SECONDS_MAX": "a limit of time that no world waits for; unit tests reach it",
    "cut.FULL_SECONDS_MAX": "the disks of the simulator are never full; unit tests reach it",
    "paging.DISK_SECONDS_MAX": "a limit of time that no world waits for; unit tests reach it",
    "paging.WISHES_MAX": "small as it is; unit tests reach it",
    "coordinator.ASKED_SECONDS_MAX": "a limit of time that no world waits for; unit tests reach it",
    "answers.LOOK_SECONDS_MAX": "what a look may count at most, not a bound",
    "partings.UNANSWERED_SECONDS_MAX": "the worlds that meet it (parted) have their own",
    "partings.REPLACED_MAX": "small as it is; the worlds that are parted reach it",
    "flush_pace.GAP_SECONDS_MAX": "what teaches the pace of pushes, not a bound; unit tests reach it",
    "coordinator.BROUGHT_SECONDS_MAX": "a limit of time that no world waits for; unit tests reach it",
}


def draw_bounds(choices: Choices, job: JobSpec, *, window_pushes: int) -> Bounds:
    """What the tape says, with the guards that follow from it."""
    drawn: Bounds = {}
    for bound in BOUNDS:
        index = choices.pick(len(bound.values) + 1, dull=0.4)
        if index:
            drawn[bound.key] = bound.values[index - 1]
    return drawn | derive_guards(drawn, job, window_pushes=window_pushes)


def derive_guards(drawn: Bounds, job: JobSpec, *, window_pushes: int) -> Bounds:
    """The most that peers who keep their bounds can make others keep."""
    unanswered = int(drawn.get("flusher.FLUSHES_UNACKED_MAX", flusher.FLUSHES_UNACKED_MAX))
    commit = job.protection.flush.commit if job.protection.has_parities else ""
    # In two phases `stable` is as old as the staging, and what is staged is bounded by the workers' windows; a last one
    # may have rows only.
    staged = job.workers * max(window_pushes, 2) + 1 if commit == "2pc" else 0
    # Since the flush that a holder was told is stable, by its source or with a tail of another holder.
    return {"holder.TAIL_FLUSHES_MAX": unanswered + staged}


@contextlib.contextmanager
def shrink(bounds: Bounds) -> Iterator[None]:
    """The core with these bounds, for as long as it lasts."""
    places = [(holder, "TAIL_FLUSHES_MAX", "holder.TAIL_FLUSHES_MAX")]
    places += [(module, bound.name, bound.key) for bound in BOUNDS for module in (bound.module, *bound.also)]
    saved = [(module, name, getattr(module, name)) for module, name, _ in places]
    for module, name, key in places:
        if key in bounds:
            setattr(module, name, bounds[key])
    try:
        yield
    finally:
        for module, name, value in saved:
            setattr(module, name, value)


# --- Whether they were reached ---


def probe(probes: Probes, node: Node, event: Any, effects: list[Any]) -> None:
    """Looks at a machine behind an event."""
    if node.identity.role == "server":
        if node.server is not None:
            _probe_server(probes, node.server, event, effects)
    elif node.identity.role == "worker":
        _probe_session(probes, node.machine, effects)
    elif node.machine.turns is not None:
        for maker in node.machine.turns.makers.values():
            _probe_cuts(probes, maker)


def _probe_server(probes: Probes, server: Any, event: Any, effects: list[Any]) -> None:
    sender, decoder = server.flusher, server.holder.decoder
    for g, group in enumerate(sender.coded):
        waits = group.flushed != tuple(sender.applied[g]) or server.store.pending_rows(g)
        if waits and group.active and sender._count_unanswered(group) >= flusher.FLUSHES_UNACKED_MAX:
            probes.hit("bound: flushes unanswered")
        if any(not s.ending and s.underway >= flusher.STREAMS_UNDERWAY_MAX for s in group.streams.values()):
            probes.hit("bound: streams under way")
    if any(len(state.tail) == holder.TAIL_FLUSHES_MAX for state in server.holder.held.values()):
        probes.hit("bound: tail")
    last = decoder._first[-1]
    if decoder._underway() >= decode.SWEEPS_UNDERWAY_MAX and any(s.cursor < last for s in decoder._sweeps.values()):
        probes.hit("bound: sweeps under way")
    if isinstance(event, Tick) and any(way.life.state is WayState.FILLING for way in server.ways.all):
        probes.hit("bound: rows filled")
    if server.view.job.mode == "async" and any(_says(effect, CutBegun) and effect.message.late for effect in effects):
        probes.hit("bound: cut held")  # only a hold that ended by itself makes it late
    if any(_says(effect, CutSaved) and "too slow" in effect.message.error for effect in effects):
        probes.hit("bound: rows aside")


def _probe_session(probes: Probes, worker: Any, effects: list[Any]) -> None:
    if any(_says(effect, Expect) and effect.message.slots.size == session.EXPECTED_ROWS_MAX for effect in effects):
        probes.hit("bound: rows expected")
    if any(request not in worker._clocks for request in worker._pulls):
        probes.hit("bound: clocks kept")


def _probe_cuts(probes: Probes, maker: Any) -> None:
    if maker._ahead == cuts.STEPS_AHEAD_MAX:
        probes.hit("bound: cut steps ahead")
    if len(maker._given_up) == cuts.GIVEN_UP_MAX:
        probes.hit("bound: pieces given up")


def _says(effect: Any, kind: type[Any]) -> bool:
    return isinstance(effect, Send) and isinstance(effect.message, kind)
