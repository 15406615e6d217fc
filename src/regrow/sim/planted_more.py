"""Planted bugs of partial recovery, with and without parities, of rows on disk and of publications: see planted.py."""

from __future__ import annotations

from regrow.core.coordinator import Coordinator
from regrow.core.cut import CutSide
from regrow.core.cuts import Cuts
from regrow.core.flusher import Flusher
from regrow.core.holder import Holder
from regrow.core.own_saves import OwnSaves
from regrow.core.paging import Paging
from regrow.core.recall import Recall
from regrow.core.server import Server
from regrow.core.serving import Serving
from regrow.core.serving_async import AsyncServing
from regrow.core.turns import Turns
from regrow.sim import patches_partial, patches_publications, patches_tiered
from regrow.sim.bug import Bug

MOVES = ("moves",)
PARTIAL = ("partial", "partial-sync")
BUGS: dict[str, Bug] = {
    "ahead-of-copies": Bug(
        "a save is stored although its pushes are not with the holders of copies",
        OwnSaves,
        "_begin",
        patches_partial.ahead_of_copies,
        PARTIAL,
        ("I14", "I3"),
    ),
    "counted-from-the-save": Bug(
        "what is lost is counted in pushes, from the marks of the save",
        Recall,
        "_join",
        patches_partial.counted_from_the_save,
        PARTIAL,
        ("I14",),
    ),
    "clean-before-durable": Bug(
        "rows count as saved although the save failed",
        OwnSaves,
        "on_saved",
        patches_partial.clean_before_durable,
        PARTIAL,
        ("I14",),
    ),
    "skipped-of-now": Bug(
        "updates that a save leaves out are counted after its instant",
        OwnSaves,
        "check_copies",
        patches_partial.skipped_of_now,
        PARTIAL,
        ("I14",),
    ),
    "served-unread": Bug(
        "a row is served before its save was read",
        Recall,
        "receive",
        patches_partial.older_save_first,
        PARTIAL,
        ("I3", "I7", "I14"),
    ),
    "joins-at-the-save": Bug(
        "a replacement counts from the marks of its save",
        Recall,
        "_join",
        patches_partial.joins_at_the_save,
        PARTIAL,
        ("refusal", "I3", "I8", "I14", "failed"),
    ),
    "save-ends-twice": Bug(
        "a save is over twice",
        OwnSaves,
        "on_saved",
        patches_partial.save_ends_twice,
        PARTIAL,
        MOVES,
    ),
    "delta-after-a-loss": Bug(
        "the cut after a partial recovery is a delta",
        Cuts,
        "know",
        patches_partial.delta_after_a_loss,
        ("partial-cuts",),
        ("I11",),
    ),
}

BOTH = ("ec-partial", "ec-partial-sync", "ec-partial-r2")
BUGS |= {
    "parities-not-void": Bug(
        "a parity with rows of a recalled server is added to, instead of being made anew",
        Holder,
        "_make_void",
        patches_partial.parities_not_void,
        BOTH,
        ("I1",),
    ),
    "old-flushes-count": Bug(
        "what a source sent before it heard that its parity is void is not dropped",
        Holder,
        "_make_void",
        patches_partial.old_flushes_count,
        BOTH,
        ("refusal", "I1", "A3"),
    ),
    "back-before-mended": Bug(
        "a recalled server counts as back before the parities of its stripes are whole",
        Server,
        "_find_unmended",
        patches_partial.back_before_mended,
        BOTH,
        ("I5", "I8", "I13", "suspicion"),
    ),
    "decodes-for-recalled": Bug(
        "a holder takes a recalled server for one whose rows can be decoded",
        Holder,
        "know",
        patches_partial.decodes_for_recalled,
        BOTH,
        ("refusal", "I1", "I5"),
    ),
    "recall-forgotten": Bug(
        "the successor of a recalled server is not recalled",
        Coordinator,
        "_take_place",
        patches_partial.recall_forgotten,
        BOTH,
        ("I5", "I8", "I13", "suspicion"),
    ),
    "counted-again": Bug(
        "an update counts again when its push comes again for other groups",
        Serving,
        "count_updates",
        patches_partial.counted_again,
        BOTH,
        ("I14",),
    ),
    "saved-unlevel": Bug(
        "a server saves while its groups are at different pushes",
        OwnSaves,
        "_are_level",
        patches_partial.saved_unlevel,
        BOTH,
        ("I14",),
    ),
    "losses-forgotten": Bug(
        "a server that parities brought back does not know what was lost before",
        Flusher,
        "activate",
        patches_partial.losses_forgotten,
        BOTH,
        ("I14",),
    ),
    "delta-after-parities": Bug(
        "the first save of a server that parities brought back leaves rows out",
        OwnSaves,
        "__init__",
        patches_partial.delta_after_parities,
        BOTH,
        ("I14",),
    ),
}

TIERED = ("tiered", "tiered-sync", "tiered-batch", "tiered-batch-sync")
BATCH = ("tiered-batch", "tiered-batch-sync")
BUGS |= {
    "ticket-kept": Bug(
        "the rows of whoever was served stay pinned",
        Paging,
        "drop",
        patches_tiered.keeps_ticket,
        TIERED,
        ("I8",),
    ),
    "wish-kept": Bug(
        "rows that were read ahead stay pinned",
        Paging,
        "drop",
        patches_tiered.keeps_wish,
        TIERED,
        ("I8",),
    ),
    "push-overtakes": Bug(
        "a push is applied before one of its worker that waits for the disk",
        AsyncServing,
        "push",
        patches_tiered.push_overtakes,
        ("tiered", "tiered-batch"),
        ("I3", "I11", "I8", "refusal"),
    ),
    "served-evicted": Bug(
        "a row is served after it was evicted",
        Paging,
        "poll",
        patches_tiered.serves_evicted,
        TIERED,
        ("refusal", "core"),
    ),
    "saved-before-complete": Bug(
        "a server says that an epoch is stored before it is on the disk",
        CutSide,
        "check_complete",
        patches_tiered.saved_before_complete,
        BATCH,
        ("I11",),
    ),
    "commits-alone": Bug(
        "a server lets go of the older checkpoint before all servers have the newer",
        CutSide,
        "check_complete",
        patches_tiered.commits_alone,
        BATCH,
        ("I11",),
    ),
}

PUBLISHING = ("publications", "publications-sync")
BUGS |= {
    "clean-to-both": Bug(
        "what one tenant has stored counts as stored by the other too",
        CutSide,
        "on_end",
        patches_publications.clean_to_both,
        PUBLISHING,
        ("I11",),
    ),
    "publication-forgotten": Bug(
        "rows of a publication that failed do not count as changed any more",
        CutSide,
        "give_up",
        patches_publications.publication_forgotten,
        ("publications",),
        ("I11",),
    ),
    "counted-apart": Bug(
        "checkpoints and publications are numbered apart",
        Turns,
        "__init__",
        patches_publications.counted_apart,
        PUBLISHING,
        ("I8", "I11", "core", "moves"),
    ),
    "both-at-once": Bug(
        "a publication begins while a checkpoint is under way",
        Turns,
        "tick",
        patches_publications.both_at_once,
        PUBLISHING,
        ("I8",),
    ),
}
