"""What a launcher tells the processes it started, as values.

    assignment      who you are, whom you need, what you do: the first thing that a process hears
    commands        launcher -> process: stop, become, are you there, a peer died, make a checkpoint, evaluate

Here is only what can be said to a process; what it says is in `launch/reports.py`, both as lines of text in
`launch/lines.py`. How lines travel is a backend's business (`launch/backend.py` and what implements it), what they mean
is the roles'. Both sides import this file, so it imports nothing but identities: no torch, no files, no processes.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from regrow.core.identity import Identity

# -- the assignment ----------------------------------------------------------------------------------------


class CheckpointTimes(msgspec.Struct, frozen=True, kw_only=True):
    """When the coordinator asks for checkpoints; see `core.cut.CutPlan`, which has the same fields."""

    every_seconds: float | None = None
    every_steps: int | None = None
    full_every: int = 1
    pause: bool = False


class OwnSaving(msgspec.Struct, frozen=True, kw_only=True):
    """How a server saves its own rows, to come back to alone: how often, and which rows first."""

    every_seconds: float | None = None
    every_steps: int | None = None
    priority: str = "none"
    share: float = 1.0
    # Whose rows have priorities; all others are saved whole. Which are the largest is known when there are tables.
    choice: Literal["named", "all", "largest"] = "named"
    tables: tuple[str, ...] = ()  # the named
    period: int = 2
    seed: int = 0


class Extra(msgspec.Struct, frozen=True, kw_only=True):
    """What a script wants to be kept with its checkpoints, and the step of worker 0 that it is of."""

    step: int
    text: str


class Saving(msgspec.Struct, frozen=True, kw_only=True):
    """How checkpoints are made: for servers, the coordinator and the merger."""

    url: str
    run: str  # of this run; whoever falls back takes none of another
    starts: int = 0  # how often it began again before this start
    salt: str  # of this start of the run, so that cuts of another start have other names
    made_by: str
    encoding: str
    bits: int
    bytes_per_second: float | None
    times: CheckpointTimes
    keep_last: int
    pinned: tuple[str, ...] = ()  # cuts that are never removed
    dead: tuple[str, ...] = ()  # cuts that nobody stores any more, for the merger to clear away
    merge_seconds: float  # between two looks of the merger
    own: OwnSaving | None = None  # partial recovery
    epochs: bool = False  # nothing is stored elsewhere: `url` is the directory of the servers' files
    extras: tuple[Extra, ...] = ()  # so far


class StoredCut(msgspec.Struct, frozen=True, kw_only=True):
    """The checkpoint that a run starts from."""

    url: str
    cut: str
    epochs: tuple[int, ...] = ()  # by server: the rows are in its files already,
    marks: tuple[int, ...] = ()  # as they are after these pushes (steps)
    extra: str | None = None  # of the script


class TieredRows(msgspec.Struct, frozen=True, kw_only=True):
    """How a server keeps its rows on disk; see the options of the same names in `TrainConfig`."""

    directory: str  # of all servers
    cache_bytes: int
    io: str = "auto"
    threads: int = 4
    bytes_max: int | None = None
    policy: str = "lru"


class Hanging(msgspec.Struct, frozen=True, kw_only=True):
    """For the coordinator: how long a server may be silent, and how long it is waited for if its loss would be one of
    rows."""

    silent_seconds: float
    patience_seconds: float


class Assignment(msgspec.Struct, frozen=True, kw_only=True):
    """What a process is told before anything else. A spare is told twice: what it may become is in `Become`."""

    identity: Identity
    token: str  # hexadecimal; keeps strangers out
    listen: str  # an address, or which of the host's own: see `runtime/hosts.py`
    coordinator: str | None  # its address, until `CoordinatorAt` says another; None for the coordinator itself
    threads: int
    servers: int
    frame_bytes_max: int
    authenticate: str = "auto"  # whether frames are: see `TrainConfig`
    config: dict[str, Any] = {}  # TrainConfig.to_dict(), for workers; others pass it on to manifests
    saving: Saving | None = None
    start: StoredCut | None = None  # None: from nothing
    tiers: TieredRows | None = None  # None: all rows are in memory
    hanging: Hanging | None = None  # None: as it is by default


# -- commands ----------------------------------------------------------------------------------------------


class Command(msgspec.Struct, frozen=True, kw_only=True, tag_field="do", omit_defaults=True):
    """Launcher to process."""


class Stop(Command, frozen=True, kw_only=True, tag="stop"):
    """Finish what cannot wait, and exit with 0."""


class Become(Command, frozen=True, kw_only=True, tag="become"):
    """To a spare: take this place, now."""

    assignment: Assignment


class Ask(Command, frozen=True, kw_only=True, tag="ask"):
    """Are you there? Every process answers at once, whatever it is doing."""


class PeerDied(Command, frozen=True, kw_only=True, tag="died"):
    """To the coordinator: somebody saw this process end."""

    peer: Identity


class CoordinatorAt(Command, frozen=True, kw_only=True, tag="coordinator at"):
    """To everybody: this coordinator is in office now, and listens there. Any before it is over."""

    coordinator: Identity
    address: str


class MakeCheckpoint(Command, frozen=True, kw_only=True, tag="checkpoint"):
    """To the coordinator. `still`: training is over, so there is no later step to wait for."""

    still: bool = False
    full: bool = False
    extra: Extra | None = None


class SaveEvery(Command, frozen=True, kw_only=True, tag="save every"):
    """To servers: so often from now on (partial recovery)."""

    seconds: float


class Evaluate(Command, frozen=True, kw_only=True, tag="evaluate"):
    """To worker 0: judge the model."""


class Judge(Command, frozen=True, kw_only=True, tag="judge"):
    """To a worker that is ready to judge with others: every `count`-th batch, from `index` on. What it counts goes into
    a file of that directory, if there are others. `number` comes back: an evaluation may have to be begun again."""

    number: int
    index: int
    count: int
    directory: str = ""


class MergeTallies(Command, frozen=True, kw_only=True, tag="merge tallies"):
    """To the first of those who judge: these workers have written what they counted."""

    number: int
    workers: tuple[int, ...]
    directory: str


class Conclude(Command, frozen=True, kw_only=True, tag="conclude"):
    """To everybody who came to this evaluation: what was found. None: not a number."""

    metrics: dict[str, float | None]


AnyCommand = (
    Stop
    | Become
    | Ask
    | PeerDied
    | CoordinatorAt
    | MakeCheckpoint
    | SaveEvery
    | Evaluate
    | Judge
    | MergeTallies
    | Conclude
)
