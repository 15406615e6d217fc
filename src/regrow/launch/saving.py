"""What a process is told of checkpoints, rows on disk and silence: values, parts of an assignment (`orders.py`)."""

from __future__ import annotations

from typing import Literal

import msgspec


class CheckpointTimes(msgspec.Struct, frozen=True, kw_only=True):
    """When the coordinator asks for checkpoints; see `core.cut.CutPlan`, which has the same fields."""

    every_seconds: float | None = None
    every_steps: int | None = None
    full_every: int = 1
    pause: bool = False
    from_instant: bool = False


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
    """How checkpoints are made: for servers, the coordinator and the merger. Publications have one of their own."""

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
    keep_full_every_seconds: float = 86400.0  # 0: no older ones stay
    pinned: tuple[str, ...] = ()  # cuts that are never removed
    dead: tuple[str, ...] = ()  # cuts that nobody stores any more, for the merger to clear away
    merge_seconds: float  # between two looks of the merger
    own: OwnSaving | None = None  # partial recovery
    epochs: bool = False  # nothing is stored elsewhere: `url` is the directory of the servers' files
    extras: tuple[Extra, ...] = ()  # so far
    model: str | None = None  # names of its parameters (`checkpoint/model_names.py`), once they are known


class StoredCut(msgspec.Struct, frozen=True, kw_only=True):
    """The checkpoint that a run starts from."""

    url: str
    cut: str
    epochs: tuple[int, ...] = ()  # by server: the rows are in its files already,
    marks: tuple[int, ...] = ()  # as they are after these pushes (steps)
    extra: str | None = None  # of the script
    model: str | None = None  # what its parameters were called


class TieredRows(msgspec.Struct, frozen=True, kw_only=True):
    """How a server keeps its rows on disk; see the options of the same names in `TrainConfig`."""

    directory: str  # of all servers, or of those of a node
    cache_bytes: int
    temporary: bool = False  # files go with the run: new ones take the place of such that another has left
    io: str = "auto"
    threads: int = 4
    bytes_max: int | None = None
    policy: str = "lru"


class Hanging(msgspec.Struct, frozen=True, kw_only=True):
    """For the coordinator: how long a server may be silent, and how long it is waited for if its loss would be one of
    rows."""

    silent_seconds: float
    patience_seconds: float
