"""Known bugs, put back into the real core on purpose: the simulator must find each of them.

They are the seventeen holes of the protocol's first draft (docs/protocol.md has the table), what a checkpoint could get
wrong, one forbidden move for each table of core/states.py, and who waits for whom. Each is a small patch of one method,
in force inside `with plant(name)`; it says in which profiles it shows, and which invariants must see it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from regrow.core.coordinator import Coordinator
from regrow.core.cut import CutSide
from regrow.core.cuts import Cuts
from regrow.core.decode import Decoder
from regrow.core.door import ServerDoor
from regrow.core.flusher import Flusher
from regrow.core.holder import Holder
from regrow.core.link import Link
from regrow.core.place import Place
from regrow.core.rebuild import Rebuild
from regrow.core.server import Server
from regrow.core.serving import Serving
from regrow.core.serving_async import AsyncServing
from regrow.core.serving_sync import SyncServing
from regrow.core.session import Session
from regrow.core.steady import SteadyTime
from regrow.launch.supervisor import Supervisor
from regrow.launch.watch import Watch
from regrow.sim import patches, patches_hangs, planted_more
from regrow.sim.bug import Bug
from regrow.sim.followed import FollowedLauncher


@contextlib.contextmanager
def plant(name: str | None) -> Iterator[None]:
    """The core with this bug, for as long as it lasts. None: as it is."""
    if name is None:
        yield
        return
    bug = list_bugs()[name]
    original = getattr(bug.owner, bug.method)
    setattr(bug.owner, bug.method, bug.patch(original))
    try:
        yield
    finally:
        setattr(bug.owner, bug.method, original)


def list_bugs() -> dict[str, Bug]:
    """Of all profiles."""
    from regrow.sim import shelf_planted

    return BUGS | shelf_planted.BUGS


CUTTING = ("cuts", "cuts-sync", "cuts-2pc")
MOVES = ("moves",)
ASYNC = ("async", "mixed-k", "r2")
SYNC = ("sync", "sync-r2")

BUGS: dict[str, Bug] = {
    "epoch-fencing": Bug(
        "messages sent in an older view are thrown away",
        ServerDoor,
        "receive",
        patches.epoch_fencing,
        ASYNC,
        ("refusal", "I8"),
    ),
    "stream-without-marks": Bug(
        "a rebuilt parity holder has no watermarks",
        Holder,
        "on_stream_end",
        patches.stream_end_without_marks,
        ASYNC,
        ("I2", "I1"),
    ),
    "one-applied": Bug(
        "one watermark for all groups of a replacement", Flusher, "activate", patches.one_applied, ASYNC, ("I5", "I1")
    ),
    "piecewise-push": Bug(
        "a push is applied to the rows that are there, before the others",
        AsyncServing,
        "_apply_queue",
        patches.piecewise_push,
        ASYNC,
        ("I1",),
    ),
    "present-rates": Bug(
        "a push that is sent again is applied with the newest learning rates",
        Session,
        "_push",
        patches.present_rates,
        ("rates", "rates-sync"),
        ("I1", "I3", "I5", "I7", "refusal"),
    ),
    "rates-of-the-job": Bug(
        "a push that waits for rows is applied with the learning rates that were declared",
        AsyncServing,
        "_apply_queue",
        patches.rates_of_the_job,
        ("rates",),
        ("I3", "I1", "I5"),
    ),
    "flush-before-snapshot": Bug(
        "pending rows are flushed before a snapshot is answered",
        Server,
        "_on_snap_ask",
        patches.flush_before_snapshot,
        ASYNC,
        ("I1",),
    ),
    "deltas-before-answers": Bug(
        "deltas of members that have not answered are accumulated",
        Decoder,
        "adjust",
        patches.deltas_before_answers,
        ASYNC,
        ("I5",),
    ),
    "late-faults": Bug(
        "a fault is decoded whether the row is lost or not",
        Decoder,
        "on_fault",
        patches.late_faults,
        ("r2", "sync-r2"),
        ("refusal", "I8"),
    ),
    "piecewise-flush": Bug(
        "a flush is applied in two pieces", Holder, "on_flush", patches.piecewise_flush, ASYNC, ("I5", "I1")
    ),
    "marks-only-with-rows": Bug(
        "watermarks travel only with deltas", Flusher, "flush", patches.marks_only_with_rows, ASYNC, ("I8",)
    ),
    "durable-waits-for-streams": Bug(
        "durability waits for a holder that is being rebuilt",
        Flusher,
        "_find_covered",
        patches.durable_waits_for_streams,
        ("async", "r2", "mixed-k"),
        ("I8",),
    ),
    "restart-from-applied": Bug(
        "a worker restarts from what was applied, not from what is durable",
        Serving,
        "_dispatch",
        patches.restart_from_applied,
        ASYNC,
        ("I2",),
    ),
    "pulls-not-resent": Bug(
        "a pull that was waiting is not sent to the replacement",
        Session,
        "_on_joined",
        patches.pulls_not_resent,
        ASYNC,
        ("I8",),
    ),
    "silent-without-rows": Bug(
        "a worker without rows for a server says nothing to it (sync)",
        Session,
        "_on_push_wanted",
        patches.silent_without_rows,
        SYNC,
        ("I8",),
    ),
    "no-undo": Bug(
        "a step that is computed again is computed from its own result (sync)",
        SyncServing,
        "_undo",
        patches.no_undo,
        SYNC,
        ("I7",),
    ),
    "touched-bits-lost": Bug(
        "a replacement takes touched rows for initial ones",
        Rebuild,
        "_know_touched",
        patches.touched_bits_lost,
        ASYNC,
        ("I5", "I1", "I3"),
    ),
    "frames-not-resent": Bug(
        "what was on its way when a connection broke is lost",
        Link,
        "resume",
        patches.frames_not_resent,
        ASYNC,
        ("refusal", "I8"),
    ),
    "one-epoch": Bug(
        "a new coordinator counts its epochs from the beginning",
        Coordinator,
        "__init__",
        patches.one_epoch,
        ("coordinator",),
        ("I8", "suspicion"),  # who follows an older view does not answer others, and is taken for cut off
    ),
    "dirty-lost": Bug(
        "what a failed cut had captured does not count as changed any more",
        CutSide,
        "give_up",
        patches.dirty_lost,
        CUTTING,
        ("I11",),
    ),
    "forgets-when-saved": Bug(
        "a server forgets what changed when it has stored it, before the checkpoint exists",
        CutSide,
        "on_saved",
        patches.forgets_when_saved,
        CUTTING,
        ("I11",),
    ),
    "captures-late": Bug(
        "rows are captured one step too late (sync)",
        CutSide,
        "check_marks",
        patches.captures_late,
        ("cuts-sync",),
        ("I11", "I8"),
    ),
    "held-push-first": Bug(
        "pushes that were held back are applied before the rows are captured",
        AsyncServing,
        "_check_cut",
        patches.held_push_first,
        ("cuts", "cuts-2pc"),
        ("I11",),
    ),
    "one-server-is-enough": Bug(
        "a checkpoint is written when the first server has stored its part",
        Cuts,
        "on_saved",
        patches.one_server_is_enough,
        CUTTING,
        ("I11", "moves"),
    ),
    "head-given-up": Bug(
        "the next delta starts from a cut that was given up", Cuts, "_abandon", patches.head_given_up, CUTTING, ("I11",)
    ),
    "replacement-clean": Bug(
        "rows that came back to a replacement do not count as changed",
        Server,
        "_check_recovered",
        patches.replacement_clean,
        CUTTING,
        ("I11",),
    ),
    "held-for-ever": Bug(
        "pushes that a cut held back are not applied when it is over",
        AsyncServing,
        "release",
        patches.held_for_ever,
        ("cuts", "cuts-2pc"),
        ("refusal", "I8"),
    ),
    "wish-forgotten": Bug(
        "a wish for a last cut is forgotten when the one under way comes too late (sync)",
        Cuts,
        "_abandon",
        patches.wish_forgotten,
        ("cuts-sync",),
        ("I8",),
    ),
    "loads-uncommitted": Bug(
        "what is loaded waits for a commit of pushes that were made long ago (two-phase commit)",
        Flusher,
        "set_marks",
        patches.loads_uncommitted,
        ("cuts-2pc",),
        ("I8",),
    ),
    "first-is-delta": Bug(
        "a new coordinator begins with what changed since a cut that it does not know",
        Cuts,
        "__init__",
        patches.first_is_delta,
        CUTTING,
        ("I11",),
    ),
    "broken-link-is-over": Bug(
        "a link whose connection broke is taken for over",
        Link,
        "lose_connection",
        patches.broken_link_is_over,
        ASYNC,
        MOVES,
    ),
    "cut-twice": Bug(
        "a server captures a cut that it has captured", CutSide, "check_marks", patches.cut_twice, CUTTING, MOVES
    ),
    "stored-before-captured": Bug(
        "the coordinator takes a cut for stored when it is captured",
        Cuts,
        "on_begun",
        patches.stored_before_captured,
        CUTTING,
        MOVES,
    ),
    "back-before-it-knows": Bug(
        "a replacement takes its rows for back before it knows where they stand",
        Rebuild,
        "_on_restored",
        patches.back_before_it_knows,
        ("r2", "mixed-k", "async"),
        MOVES,
    ),
    "dead-twice": Bug("a server dies twice in its place", Place, "die", patches.dead_twice, ASYNC, MOVES),
    "opened-again": Bug(
        "a session that works is opened again by a view", Session, "_on_view", patches.opened_again, ASYNC, MOVES
    ),
    # Who waits for whom: what may be promised, and what ends a wait
    "stream-ends-early": Bug(
        "a stream ends before the other holders have acknowledged what it ends with (r >= 2)",
        Flusher,
        "_end_stream",
        patches.stream_ends_early,
        ("r2", "2pc-r2", "r3"),
        ("A3",),
    ),
    "pushed-before-staged": Bug(
        "a push is acknowledged before its holders have it staged (two-phase commit)",
        AsyncServing,
        "_acknowledge_prepared",
        patches.pushed_before_staged,
        ("2pc", "2pc-r2", "2pc-mixed"),
        ("I12",),
    ),
    "hold-without-end": Bug(
        "a server holds pushes back for a cut for as long as nobody tells it otherwise",
        CutSide,
        "tick",
        patches.hold_without_end,
        ("bounds",),
        ("I13",),
    ),
    "staged-is-unanswered": Bug(
        "flushes that are staged keep others back until they are committed (two-phase commit)",
        Flusher,
        "_count_unanswered",
        patches.staged_is_unanswered,
        ("2pc-mixed", "2pc-r2"),
        ("I8",),
    ),
    "durable-uncommitted": Bug(
        "what became durable without its worker waits for a commit all the same (two-phase commit)",
        Flusher,
        "_settle",
        patches.durable_uncommitted,
        ("2pc", "2pc-r2", "2pc-mixed"),
        ("I8",),
    ),
    "durable-unanswered": Bug(
        "a commit waits for answers of servers that have the push durable (two-phase commit)",
        Session,
        "_commit_pushes",
        patches.durable_unanswered,
        ("2pc", "2pc-r2", "2pc-mixed"),
        ("I8",),
    ),
}

# --- What shows only when nobody dies (hangs.py), or when records are loaded (dumps.py) ---

TIMED = ("clocks", "clocks-sync")
FOREVER = ("forever", "forever-sync", "forever-cuts")
HANGING = ("hangs", "hangs-sync", "hangs-cuts")
DIVIDED = ("partitions", "partitions-sync", "partitions-2pc")
LOADED = ("loads", "loads-sync", "loads-2pc")

BUGS |= {
    "clock-goes-back": Bug(
        "a clock that was set back stops every deadline",
        SteadyTime,
        "read",
        patches_hangs.clock_goes_back,
        TIMED,
        ("I8", "suspicion"),
    ),
    "slow-forgives-all": Bug(
        "a coordinator whose ticks all come late never notices a silence",
        Coordinator,
        "_on_tick",
        patches_hangs.slow_forgives_all,
        TIMED,
        ("I8",),
    ),
    "own-pause-is-silence": Bug(
        "a coordinator that hung takes everybody else for silent",
        Coordinator,
        "_on_tick",
        patches_hangs.own_pause_is_silence,
        HANGING,
        ("suspicion",),
    ),
    "frames-twice": Bug(
        "a frame that comes twice is delivered twice",
        Link,
        "accept",
        patches_hangs.frames_twice,
        DIVIDED,
        ("refusal", "I1", "I3", "I4", "I7", "core", "failed", "moves"),
    ),
    "any-incarnation": Bug(
        "a link takes frames of an incarnation that is over",
        Link,
        "accept",
        patches_hangs.any_incarnation,
        DIVIDED,
        ("link", "I8", "core", "refusal"),
    ),
    "zombie-is-heard": Bug(
        "what a replaced server says counts as said by its successor",
        ServerDoor,
        "_on_server_message",
        patches_hangs.zombie_is_heard,
        DIVIDED,
        ("I4", "refusal", "core"),
    ),
    "nobody-asks": Bug(
        "the launcher asks every process, and minds no silence",
        Watch,
        "look",
        patches_hangs.nobody_asks,
        FOREVER,
        ("I8", "I9"),
    ),
    "hung-spares-are-good-enough": Bug(
        "nobody looks whether a spare that was given a place arrives in it",
        Watch,
        "promote",
        patches_hangs.hung_spares_are_good_enough,
        FOREVER,
        ("I8",),
    ),
    "cut-waits-for-workers": Bug(
        "the coordinator waits without end for a push that does not arrive, before a cut is made",
        Cuts,
        "tick",
        patches_hangs.cut_waits_for_workers,
        ("partitions-cuts",),
        ("I13", "I8"),
    ),
    "writes-not-resent": Bug(
        "records that were not answered for are not sent to the replacement",
        Session,
        "_on_joined",
        patches_hangs.writes_not_resent,
        LOADED,
        ("I8",),
    ),
    "written-before-flushed": Bug(
        "records count as written before a parity holder has them",
        Serving,
        "_write_records",
        patches_hangs.written_before_flushed,
        LOADED,
        ("I3", "I7", "I1"),
    ),
}

BUGS |= {
    "death-overtakes": Bug(
        "rows count as lost although a replacement was whole, whose word was on its way",
        Coordinator,
        "_is_answer_owed",
        patches_hangs.death_overtakes,
        ("overtaken", "overtaken-sync"),
        ("loss",),
    ),
    "begins-anew-unasked": Bug(
        "with several parities a replacement that is whole begins anew, and counts as lost with the next death",
        Coordinator,
        "_is_answer_owed",
        patches_hangs.begins_anew_unasked,
        ("overtaken", "overtaken-sync"),
        ("loss",),
    ),
    "streamed-is-not-enough": Bug(
        "a holder that was replaced together with lost members is asked for an equation, and waits to agree on it",
        Decoder,
        "_can_answer",
        patches_hangs.streamed_is_not_enough,
        ("r3",),
        ("suspicion",),
    ),
    "complaints-unheard": Bug(
        "a server that another one cannot reach is a server like any other",
        Coordinator,
        "_find_suspects",
        patches_hangs.complaints_unheard,
        ("parted", "parted-sync", "parted-2pc"),
        ("I8",),
    ),
}

MOVED = ("moved", "moved-sync", "moved-cuts")
BUGS |= {
    "address-kept": Bug(
        "servers are not told that the coordinator came back elsewhere, and dial where the last one was",
        Supervisor,
        "_on_listens",
        patches_hangs.servers_keep_the_address,
        MOVED,
        ("I8",),
    ),
    "newcomers-untold": Bug(
        "whoever was ordered before a coordinator came back elsewhere dials where the last one was",
        Supervisor,
        "_on_listens",
        patches_hangs.newcomers_untold,
        MOVED,
        ("I8",),
    ),
}

BUGS |= {
    "machine-is-one-loss": Bug(
        "of processes that end at one instant, as with their node, only the first has a successor",
        Supervisor,
        "_judge",
        patches_hangs.machine_is_one_loss,
        ("vanish", "vanish-sync", "vanish-cuts"),
        ("I8",),
    ),
}

BUGS |= {
    "numbers-on-from-what-is-heard": Bug(
        "a launcher that follows another numbers on from the highest incarnation that it hears of",
        FollowedLauncher,
        "block",
        patches_hangs.numbers_on_from_what_is_heard,
        ("followed", "followed-sync"),
        ("I4",),
    ),
}

BUGS |= planted_more.BUGS
