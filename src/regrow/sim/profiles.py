"""What a simulated run is about: the job, the workers' programme and how much may go wrong, all read from the tape.

A **profile** narrows the choices to one subject (two servers at once, the coordinator, two-phase commit ...).
Worlds are small, so that a schedule takes milliseconds, but every server has two or three rows with each
of its holders: with one, some bugs cannot show.
"""

from __future__ import annotations

import dataclasses

import msgspec

from regrow.core.cuts import CutPlan
from regrow.core.job import JobSpec, Mode, OptimizerKind, OptimizerSpec, TableSpec
from regrow.core.own_saves import SavePlan
from regrow.core.protection import Batched, Coded, CodedPartial, Commit, FlushSpec, Partial, Protection, Unprotected
from regrow.sim.bounds import Bounds, draw_bounds
from regrow.sim.choices import Choices

STORAGE = "storage"  # the subject of shelf.py, which is no job of this kind
UNITS_PER_COLUMN = 11  # two bits for each push in the 23 bits that a float32 adds exactly, one above
DIMS = (4, 3)
EXACT_BOUND = float(1 << 23)  # initial weights with this bound are whole numbers


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """A subject. `weights` says which faults are usual."""

    name: str
    mode: Mode = "async"
    r: tuple[int, ...] = (1,)  # 0: no parities, only checkpoints
    ks: tuple[tuple[int, int], ...] = ((1, 1), (2, 1), (2, 2), (3, 1), (4, 1))  # k of the two tables
    commit: Commit = "exactly-once"
    beyond: bool = False
    mixed_r: bool = False  # the second table may have fewer parities than the first
    bare: bool = False  # the second table has none at all
    partial: bool = False  # the first table has none, and its rows come back from saves
    parities: bool = False  # ... it has r, the second r + 1, and they come back from saves where more than r are lost
    cuts: bool = False  # checkpoints are made
    publications: bool = False  # and, for another tenant, publications; or these alone
    bounds: bool = False  # the bounds of the core are drawn too, small enough to be met (bounds.py)
    optimizers: tuple[OptimizerKind, ...] = ()  # () is plain sums in asynchronous worlds, else the usual four
    rates: bool = False  # learning rates change from push to push
    clocks: bool = False  # every machine has its own
    loads: bool = False  # records are written before anybody trains, and read at the end
    faults: int = 6  # at most so many in a run
    parts: bool = False  # servers may be cut off from each other for good, which is noticed soon (parted.py)
    paged: bool = False  # rows may be on disk (paged.py), and a death may end everybody: all begin again
    batch: bool = False  # checkpoints stay in the files of the stores
    supervised: bool = False  # the launcher has the real supervisor, with spares (supervised.py)
    followed: bool = False  # ... and dies, and another is there (followed.py)
    moves: bool = False  # ... and every coordinator has an address of its own (moving.py)
    weights: tuple[tuple[str, int], ...] = (
        ("server", 6),
        ("replacement", 4),
        ("worker", 2),
        ("coordinator", 1),
        ("pause", 2),
        ("reset", 2),
        ("worker zombie", 1),
    )


MIXED = ((2, 1), (3, 1), (3, 2), (4, 1), (4, 2), (4, 3))
PAIRED = (("pair", 3), ("server", 6), ("replacement", 4), ("worker", 2), ("coordinator", 1), ("pause", 2), ("reset", 1))
LEADERLESS = (("coordinator", 6), ("server", 6), ("replacement", 3), ("worker", 2), ("pause", 2), ("reset", 2))
WORKING = (("worker", 8), ("coordinator", 2), ("reset", 2), ("worker zombie", 2), ("server", 1))
CUTTING = (
    *(("server", 6), ("replacement", 3), ("worker", 2), ("coordinator", 3)),
    *(("pause", 2), ("reset", 2), ("worker zombie", 1)),
)

R2 = ((1, 1), (2, 1), (2, 2), (3, 1))
ALL_OPTIMIZERS: tuple[OptimizerKind, ...] = (
    *("sgd", "momentum", "adagrad"),
    *("adam", "rowwise_adagrad", "partial_rowwise_adam"),
)
LEADERLESS_PAIRED = (("coordinator", 6), ("pair", 3), ("server", 4), ("replacement", 3), ("worker", 1), ("pause", 2))

# What was tried one by one, together: two of the subjects below at a time, with bounds that are met.
CROSSED = (
    Profile(name="2pc-r2", commit="2pc", r=(2,), ks=R2, weights=PAIRED, bounds=True),
    Profile(name="2pc-mixed", commit="2pc", r=(1, 1, 2), ks=MIXED, mixed_r=True, bounds=True),
    Profile(name="sync-mixed", mode="sync", r=(1, 1, 2), ks=MIXED, mixed_r=True, bounds=True),
    Profile(name="r3", r=(3,), ks=R2, weights=PAIRED, bounds=True),
    Profile(name="coordinator-r2", r=(2,), ks=R2, weights=LEADERLESS_PAIRED, bounds=True),
    Profile(name="none", r=(1, 1, 2), ks=R2, commit="none", bounds=True),
    Profile(name="optimizers", r=(1, 2), ks=R2, optimizers=ALL_OPTIMIZERS, bounds=True),
    Profile(name="sync-optimizers", mode="sync", r=(1, 2), ks=R2, optimizers=ALL_OPTIMIZERS, bounds=True),
    Profile(name="bounds", r=(1, 1, 2), weights=CUTTING, cuts=True, bounds=True),
    Profile(name="bounds-sync", mode="sync", r=(1, 1, 2), weights=CUTTING, cuts=True, bounds=True),
)

PROFILES = {
    profile.name: profile
    for profile in (
        Profile(name="async"),
        Profile(name="sync", mode="sync"),
        Profile(name="r2", r=(2,), ks=((1, 1), (2, 1), (2, 2), (3, 1)), weights=PAIRED),
        Profile(name="sync-r2", mode="sync", r=(2,), ks=((1, 1), (2, 1), (2, 2), (3, 1)), weights=PAIRED),
        Profile(name="mixed-k", r=(1, 1, 1, 2), ks=MIXED, mixed_r=True),
        Profile(name="2pc", commit="2pc"),
        Profile(name="coordinator", weights=LEADERLESS),
        Profile(name="cuts", r=(1, 1, 2, 0), weights=CUTTING, cuts=True),
        Profile(name="cuts-sync", mode="sync", r=(1, 1, 2), weights=CUTTING, cuts=True),
        Profile(name="cuts-2pc", commit="2pc", weights=CUTTING, cuts=True),
        Profile(name="publications", r=(1, 1, 2, 0), weights=CUTTING, cuts=True, publications=True),
        Profile(name="publications-sync", mode="sync", r=(1, 1, 2), weights=CUTTING, cuts=True, publications=True),
        Profile(name="bare", bare=True, beyond=True, weights=WORKING),
        Profile(name="bare-sync", mode="sync", bare=True, beyond=True, weights=WORKING),
        Profile(name="beyond", r=(1, 1, 2), beyond=True, weights=(("server", 4), ("replacement", 1), ("worker", 1))),
        *CROSSED,
    )
}

# Every push has learning rates of its own, and some have none.
PROFILES |= {
    profile.name: dataclasses.replace(profile, r=(1, 2), ks=R2, optimizers=ALL_OPTIMIZERS, rates=True)
    for profile in (
        Profile(name="rates"),
        Profile(name="rates-sync", mode="sync", weights=CUTTING, cuts=True),
    )
}

# Nobody dies of these (hangs.py), but whoever is hit may be taken for dead.
HANGING = (
    *(("coordinator hang", 4), ("coordinator zombie", 5), ("worker hang", 4), ("starve", 3), ("rumour", 3)),
    *(("server", 5), ("replacement", 3), ("pause", 2), ("reset", 1), ("coordinator", 1)),
)
SUCCEEDING = (
    *(("coordinator zombie", 6), ("rumour", 6), ("coordinator hang", 1)),
    *(("replacement", 1), ("server", 1)),
)
DIVIDING = (
    *(("cut", 8), ("cut off", 6), ("rumour", 2), ("late frames", 3), ("twice", 2), ("echo", 4)),
    *(("server", 6), ("replacement", 3), ("coordinator", 2), ("worker", 1)),
)
MISTIMING = (
    *(("jump", 8), ("starve", 3), ("coordinator slow", 4), ("pause", 6)),
    *(("server", 5), ("replacement", 3), ("coordinator", 2), ("worker hang", 2)),
)
LOADING = (
    *(("server", 6), ("replacement", 3), ("worker", 3), ("worker hang", 3), ("worker zombie", 2)),
    *(("coordinator", 1), ("pause", 2), ("reset", 2)),
)
PROFILES |= {
    profile.name: profile
    for profile in (
        Profile(name="hangs", r=(1, 1, 2), weights=HANGING, faults=14),
        Profile(name="hangs-sync", mode="sync", r=(1, 1, 2), weights=HANGING, faults=14),
        Profile(name="hangs-cuts", r=(1, 1, 2), weights=HANGING, faults=14, cuts=True),
        Profile(name="zombies", r=(1, 1, 2), weights=SUCCEEDING, faults=14),
        Profile(name="zombies-sync", mode="sync", r=(1, 1, 2), weights=SUCCEEDING, faults=14),
        Profile(name="partitions", r=(1, 1, 2), weights=DIVIDING, faults=14),
        Profile(name="partitions-sync", mode="sync", r=(1, 1, 2), weights=DIVIDING, faults=14),
        Profile(name="partitions-cuts", r=(1, 1, 2), weights=DIVIDING, faults=14, cuts=True),
        Profile(name="partitions-2pc", commit="2pc", weights=DIVIDING, faults=14),
        Profile(name="clocks", r=(1, 1, 2), weights=MISTIMING, faults=14, clocks=True, cuts=True),
        Profile(name="loads", r=(1, 1, 2), weights=LOADING, loads=True, faults=10),
        Profile(name="loads-sync", mode="sync", r=(1, 1, 2), weights=LOADING, loads=True, faults=10),
        Profile(name="loads-2pc", commit="2pc", r=(1, 1, 2), weights=LOADING, loads=True, faults=10),
        Profile(name="clocks-sync", mode="sync", weights=MISTIMING, faults=14, clocks=True),
    )
}

# A lost server goes back to its own saves, and nobody else goes back.
LOSING = (
    *(("server", 8), ("replacement", 4), ("worker", 2), ("coordinator", 2)),
    *(("pause", 6), ("reset", 2), ("worker zombie", 1)),
)
COPIES = ((1, 1),)
PROFILES |= {
    profile.name: profile
    for profile in (
        Profile(name="partial", r=(1, 1, 2), ks=COPIES, partial=True, weights=LOSING, faults=10),
        Profile(name="partial-sync", mode="sync", r=(1, 1, 2), ks=COPIES, partial=True, weights=LOSING, faults=10),
        Profile(name="partial-cuts", r=(1, 1, 2), ks=COPIES, partial=True, weights=LOSING, faults=10, cuts=True),
        Profile(
            name="publications-partial",
            r=(1, 1, 2),
            ks=COPIES,
            partial=True,
            weights=LOSING,
            faults=10,
            cuts=True,
            publications=True,
        ),
    )
}

# Two channels that are not in step, and servers that do not reach each other (parted.py).
OVERTAKING = (
    *(("overtake", 8), ("server", 6), ("replacement", 2), ("worker", 1)),
    *(("coordinator", 2), ("pause", 1), ("reset", 1)),
)
PARTING = (("sever", 8), ("server", 3), ("replacement", 1), ("worker", 1), ("coordinator", 1), ("reset", 1))
PROFILES |= {
    profile.name: profile
    for profile in (
        Profile(name="overtaken", r=(1, 1, 2), weights=OVERTAKING, faults=12),
        Profile(name="overtaken-sync", mode="sync", r=(1, 1, 2), weights=OVERTAKING, faults=12),
        Profile(name="parted", r=(1, 1, 2), weights=PARTING, faults=8, parts=True),
        Profile(name="parted-sync", mode="sync", r=(1, 1, 2), weights=PARTING, faults=8, parts=True),
        Profile(name="parted-2pc", commit="2pc", r=(1, 1, 2), weights=PARTING, faults=8, parts=True),
    )
}

# Parities first, and saves where too many are lost at once.
BURSTS = (
    *(("pair", 6), ("server", 4), ("comeback", 6), ("replacement", 5), ("worker", 2), ("coordinator", 2)),
    *(("pause", 4), ("reset", 2), ("worker zombie", 1)),
)
CODES = ((2, 1), (3, 1), (1, 1), (2, 1))
PROFILES |= {
    profile.name: dataclasses.replace(profile, partial=True, parities=True, weights=BURSTS, faults=14)
    for profile in (
        Profile(name="ec-partial", ks=CODES),
        Profile(name="ec-partial-sync", mode="sync", ks=CODES),
        Profile(name="ec-partial-r2", r=(2,), ks=CODES),
        Profile(name="ec-partial-cuts", ks=CODES, cuts=True),
    )
}

# Nobody lets these go on again: the supervisor must end them (forever.py).
FOREVER = (
    *(("coordinator for good", 3), ("worker for good", 3), ("server for good", 4), ("spare for good", 4)),
    *(("spare death", 2), ("server", 5), ("replacement", 3), ("worker", 1), ("coordinator", 2), ("pause", 2)),
)
PROFILES |= {
    profile.name: profile
    for profile in (
        Profile(name="forever", r=(1, 1, 2), weights=FOREVER, faults=12, supervised=True),
        Profile(name="forever-sync", mode="sync", r=(1, 1, 2), weights=FOREVER, faults=12, supervised=True),
        Profile(name="forever-cuts", r=(1, 1, 2), weights=FOREVER, faults=12, cuts=True, supervised=True),
        Profile(
            name="patience",
            r=(1, 1, 2),
            beyond=True,
            weights=(("server for good", 4), ("server", 2), ("replacement", 1), ("spare for good", 1)),
            supervised=True,
        ),
    )
}

# A coordinator comes back elsewhere: everybody must be told where (moving.py).
MOVING = (
    *(("coordinator", 6), ("coordinator out of reach", 6), ("coordinator for good", 2), ("server", 6)),
    *(("replacement", 3), ("worker", 3), ("spare death", 1), ("pause", 3), ("reset", 2)),
)
PROFILES |= {
    profile.name: dataclasses.replace(profile, weights=MOVING, faults=12, supervised=True, moves=True)
    for profile in (
        Profile(name="moved", r=(1, 1, 2)),
        Profile(name="moved-sync", mode="sync", r=(1, 1, 2)),
        Profile(name="moved-cuts", r=(1, 1, 2), cuts=True),
    )
}

# Nodes of a cluster vanish with all that runs there (vanishing.py).
VANISHING = (("machine", 8), ("replacement", 4), ("coordinator", 2), ("worker", 2), ("pause", 2), ("reset", 2))
PROFILES |= {
    profile.name: dataclasses.replace(profile, weights=VANISHING, faults=8, supervised=True)
    for profile in (
        Profile(name="vanish", r=(1, 1, 2)),
        Profile(name="vanish-sync", mode="sync", r=(1, 1, 2)),
        Profile(name="vanish-cuts", r=(1, 1, 2), cuts=True),
    )
}

# The launcher itself dies, and another asks what there is (followed.py).
FOLLOWED = (("launcher", 6), ("machine", 2), ("server", 5), ("replacement", 4), ("coordinator", 3), ("worker", 2))
PROFILES |= {
    profile.name: dataclasses.replace(profile, weights=FOLLOWED, faults=10, supervised=True, followed=True)
    for profile in (
        Profile(name="followed", r=(1, 1, 2)),
        Profile(name="followed-sync", mode="sync", r=(1, 1, 2)),
    )
}

# Rows on disk, without parities: who dies takes everybody back to the newest checkpoint.
FALLING = (("fall", 8), ("worker", 4), ("worker zombie", 2), ("coordinator", 2))
FALLING_SYNC = (("fall", 8), ("coordinator", 2))  # synchronously no worker has a successor without parities
BARE = ((1, 1),)
PROFILES |= {
    profile.name: profile
    for profile in (
        Profile(name="tiered", r=(0,), ks=BARE, weights=FALLING, cuts=True, paged=True),
        Profile(name="tiered-sync", mode="sync", r=(0,), ks=BARE, weights=FALLING_SYNC, cuts=True, paged=True),
        Profile(name="tiered-batch", r=(0,), ks=BARE, weights=FALLING, cuts=True, paged=True, batch=True),
        Profile(
            name="publications-batch",
            r=(0,),
            ks=BARE,
            weights=FALLING,
            cuts=True,
            paged=True,
            batch=True,
            publications=True,
        ),
        Profile(
            name="tiered-batch-sync",
            mode="sync",
            r=(0,),
            ks=BARE,
            weights=FALLING_SYNC,
            cuts=True,
            paged=True,
            batch=True,
        ),
    )
}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class CutScenario:
    """Which checkpoints are made, and how."""

    plan: CutPlan
    still: bool  # one more when the workers are done
    bite_bytes: int  # of captured rows that are taken at once
    steps_ahead: int  # sync: how far ahead the first cut is named
    error_rate: float  # of the storage
    publications: CutPlan | None = None  # of the second tenant
    resumes: bool  # then a second run begins with one of them, on other servers


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SaveScenario:
    """How servers save their own rows."""

    plan: SavePlan
    priority: str
    share: float
    period: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """One run before anything has happened."""

    profile: Profile
    job: JobSpec
    steps: int
    ahead: int  # pulls in advance (async)
    window_pushes: int  # the redo window
    rows_seed: int
    assigned: bool  # workers give the rows of the second table their first weights, as for dense parameters
    faults_max: int
    fault_rate: float
    eager: float  # how often simply the oldest event is next
    lanes: tuple[tuple[str, int, int], ...]  # (message kind, receiver or -1 for all servers, delay in events)
    cuts: CutScenario | None = None
    saves: SaveScenario | None = None  # servers save their own rows
    bounds: Bounds = dataclasses.field(default_factory=dict)
    frames_spare: int = 0  # of a cache, beyond the rows that are needed at once


# What may be slow, the more interesting more often.
LANES = (
    *("View", "View", "Recovered", "Open", "Opened", "Pull", "Rows", "Push", "Pushed", "Have", "Have"),
    *("Flush", "Flush", "Flush", "FlushAck", "Stream", "StreamEnd", "Undo", "Restored", "Restored", "RestoredAck"),
    *("Fault", "SnapAsk", "SnapAsk", "Snap", "Snap", "Snap", "Tail", "SyndromeAsk", "Syndrome"),
)


CUT_LANES = (
    *("CutAsk", "CutMarks", "CutAt", "CutAt", "CutAt", "CutBegun", "CutSaved", "CutSaved", "CutEnd", "CutEnd", "Push"),
)


RECALL_LANES = (
    *("StreamAsk", "StreamBegin", "StreamBegin", "Stream", "Stream", "StreamEnd", "StreamEnd", "StreamEnd"),
    *("View", "Mended", "Flush", "Push"),
)


def make_scenario(profile: Profile, choices: Choices) -> Scenario:
    """Reads the world off the beginning of the tape."""
    r = profile.r[choices.pick(len(profile.r))]
    ks = profile.ks[choices.pick(len(profile.ks))]
    ring = max(*ks, 2 if profile.parities else 1) + r + choices.pick(3)
    rings = 2 if ring == 3 and choices.flag(0.2) else 1
    ring = max(3, min(ring, 7))
    sync = profile.mode == "sync"
    bound = choices.flag(0.5)
    blocks = 2 + choices.pick(2)
    holes = choices.pick(3)
    kinds: tuple[OptimizerKind, ...] = profile.optimizers or ("sgd", "momentum", "adagrad", "adam")
    sums = profile.partial or (not sync and not profile.optimizers)  # pushes only add, in any order
    tables = []
    for t in range(2):
        kind = "sgd" if sums else kinds[choices.pick(len(kinds), dull=0.1 if profile.optimizers else 0.4)]
        optimizer = OptimizerSpec(kind=kind, learning_rate=1.0 if sums else 0.05)
        init_bound = (EXACT_BOUND if sums else 0.5) if bound else 0.0
        rows = max(1, ks[t] * ring * rings * blocks - holes * t)
        if t and profile.mixed_r and choices.flag(0.5):
            r = 1
        if t and profile.bare:
            r = 0
        parities = 0 if profile.partial and not t else r
        if profile.parities:
            parities = r + t
        table = TableSpec(
            name=f"t{t}", rows=rows, dim=DIMS[t], init_bound=init_bound, optimizer=optimizer, k=ks[t], r=parities
        )
        tables.append(table)
    workers = 1 + choices.pick(3)
    flush = FlushSpec(
        pushes=(2, 1, 3, 8)[choices.pick(4)],
        bytes=(1 << 20, 64, 400)[choices.pick(3, dull=0.5)],
        seconds=(0.05, 0.4)[choices.pick(2)],
        commit=profile.commit,
        sweep_bytes_per_s=(0, 2000, 1)[choices.pick(3, dull=0.3)],  # 1: not before the workers are done
    )
    protection = _make_protection(profile, tables, rings=rings, flush=flush)
    job = JobSpec(tables=tuple(tables), servers=ring * rings, workers=workers, mode=profile.mode, protection=protection)
    assert job.invalid_reason() is None, job.invalid_reason()
    lanes = _make_lanes(profile, job, choices)
    scenario = Scenario(
        profile=profile,
        job=job,
        steps=(5 if sync else 6) + choices.pick(3),
        ahead=1 + choices.pick(2) if not sync else 1,
        window_pushes=(8, 2, 4)[choices.pick(3)],
        rows_seed=choices.pick(8),
        assigned=choices.flag(0.4) or profile.loads,
        faults_max=choices.pick(profile.faults + 1, dull=0.05),
        fault_rate=(0.004, 0.015, 0.04)[choices.pick(3)],
        eager=(0.9, 0.6, 0.3, 0.0)[choices.pick(4)],
        lanes=lanes,
        cuts=_make_cuts(choices, publications=profile.publications) if profile.cuts else None,
        saves=_make_saves(choices) if profile.partial else None,
        frames_spare=choices.pick(4) if profile.paged else 0,
    )
    if not profile.bounds:
        return scenario
    bounds = draw_bounds(choices, job, window_pushes=scenario.window_pushes)
    return dataclasses.replace(scenario, bounds=bounds)


def _make_protection(profile: Profile, tables: list[TableSpec], *, rings: int, flush: FlushSpec) -> Protection:
    k, most = max(table.k for table in tables), max(table.r for table in tables)
    if profile.parities:
        return CodedPartial(k=tables[0].k, r=tables[0].r, rings=rings, flush=flush)
    if profile.partial:
        return Partial(r=most, flush=flush)
    return Coded(k=k, r=most, rings=rings, flush=flush) if most else _make_bare(profile)


def _make_lanes(profile: Profile, job: JobSpec, choices: Choices) -> tuple[tuple[str, int, int], ...]:
    """What is slow, and for whom."""
    count = choices.pick(4, dull=0.1)
    lanes = tuple(
        (LANES[choices.pick(len(LANES))], choices.pick(job.servers + 1) - 1, (30, 100, 300)[choices.pick(3)])
        for _ in range(count)
    )
    if profile.parts:
        lanes = ()  # what is slow there may seem to be cut off
    more = ((profile.cuts, CUT_LANES, (100, 300, 600)), (profile.parities, RECALL_LANES, (200, 800, 1600)))
    for applies, kinds, delays in more:
        if applies and choices.flag(0.6):
            slow, server = kinds[choices.pick(len(kinds))], choices.pick(job.servers + 1) - 1
            lanes = (*lanes, (slow, server, delays[choices.pick(3)]))
    return lanes


def _make_bare(profile: Profile) -> Protection:
    """Of a job without parities."""
    return Batched() if profile.batch else Unprotected()


def _make_cuts(choices: Choices, *, publications: bool = False) -> CutScenario:
    seconds, steps = ((0.1, None), (0.3, None), (None, 1), (None, 2), (None, 3), (None, None))[choices.pick(6)]
    plan = CutPlan(
        every_seconds=seconds,
        every_steps=steps,
        full_every=(3, 1, 2, 4)[choices.pick(4)],
        pause=choices.flag(0.2),
    )
    return CutScenario(
        plan=plan,
        still=plan.every_seconds is None or not choices.flag(0.3),
        bite_bytes=(1 << 20, 1, 64)[choices.pick(3)],
        steps_ahead=(1, 2, 4)[choices.pick(3)],
        error_rate=(0.0, 0.05, 0.3)[choices.pick(3)],
        resumes=choices.flag(0.3),
        publications=_make_publications(choices) if publications else None,
    )


def _make_publications(choices: Choices) -> CutPlan:
    seconds, steps = ((0.1, None), (0.3, None), (0.05, None), (None, 1), (None, 2), (None, None))[choices.pick(6)]
    full_every = (1 << 20, 1 << 20, 3, 1)[choices.pick(4)]
    return CutPlan(every_seconds=seconds, every_steps=steps, full_every=full_every, from_instant=choices.flag(0.7))


def _make_saves(choices: Choices) -> SaveScenario:
    seconds, steps = ((0.1, None), (0.4, None), (None, 1), (None, 2), (2.0, None))[choices.pick(5)]
    return SaveScenario(
        plan=SavePlan(every_seconds=seconds, every_steps=steps),
        priority=("none", "mfu", "ssu", "scar")[choices.pick(4)],
        share=(0.5, 0.2, 1.0)[choices.pick(3)],
        period=1 + choices.pick(2),
    )


def make_resumed(scenario: Scenario, choices: Choices) -> Scenario:
    """The same job on another number of servers, if its stripes fit."""
    least = max(table.k + table.r for table in scenario.job.tables)
    servers = least + choices.pick(8 - least) if least < 8 else scenario.job.servers
    protection = scenario.job.protection
    if protection.rings > 1:
        protection = msgspec.structs.replace(protection, rings=1)
    job = msgspec.structs.replace(scenario.job, servers=max(3, servers), protection=protection)
    assert job.invalid_reason() is None, job.invalid_reason()
    lanes = tuple(lane for lane in scenario.lanes if lane[1] < job.servers)
    return dataclasses.replace(scenario, job=job, lanes=lanes)
