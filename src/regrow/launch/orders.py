"""What a launcher tells the processes it started, as values.

    assignment      who you are, whom you need, what you do: the first thing that a process hears
    commands        launcher -> process: stop, become, are you there, a peer died, make a checkpoint, evaluate, a circle

Here is only what can be said to a process; what it says is in `launch/reports.py`, both as lines of text in
`launch/lines.py`. How lines travel is a backend's business (`launch/backend.py` and what implements it), what they mean
is the roles'. Both sides import this file, so it imports nothing but identities: no torch, no files, no processes.
"""

from __future__ import annotations

from typing import Any

import msgspec

from regrow.core.identity import Identity
from regrow.launch.saving import Extra, Hanging, Saving, StoredCut, TieredRows

# -- the assignment ----------------------------------------------------------------------------------------


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
    tls: str = "off"  # whether connections are hidden: see there
    config: dict[str, Any] = {}  # TrainConfig.to_dict(), for workers; others pass it on to manifests
    saving: Saving | None = None
    publications: Saving | None = None
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


class NameModel(Command, frozen=True, kw_only=True, tag="name model"):
    """To the coordinator: what checkpoints and publications shall say of the model (`checkpoint/model_names.py`)."""

    text: str


class MakePublication(Command, frozen=True, kw_only=True, tag="publication"):
    """The same, for those who answer look-ups."""

    still: bool = False


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


class CircleIs(Command, frozen=True, kw_only=True, tag="circle"):
    """To every worker: these are all, by number, and what each of them shows is seen at its address. Any circle with a
    lower number is over. Its members may meet in that directory."""

    number: int
    addresses: tuple[str, ...]
    directory: str


AnyCommand = (
    Stop
    | Become
    | Ask
    | PeerDied
    | CoordinatorAt
    | MakeCheckpoint
    | NameModel
    | MakePublication
    | SaveEvery
    | Evaluate
    | Judge
    | MergeTallies
    | Conclude
    | CircleIs
)
