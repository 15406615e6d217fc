"""What processes tell the launcher that started them, as values: listening, ready, an answer, progress, an error, ...

What the launcher tells them is in `launch/orders.py`, both as lines of text in `launch/lines.py`. What a report means
is the launcher's business. Both sides import this file, so it imports nothing but identities: no torch, no files, no
processes.

The rule to keep: whoever reads a report reads a field of a struct. A field that nobody reads goes away.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from regrow.core.identity import Identity
from regrow.launch.saving import Extra

CheckpointKind = Literal["full", "delta"]
MergeKind = Literal["choice", "folded", "deleted", "broken", "wanted", "error"]
# user: a mistake, all is said. lost: it misses another process, and is a victim. data_loss: rows are gone for good.
# checkpoint: one cannot be loaded. bug: its log says more.
# silent: the disk of its rows does not answer. damaged: rows on its disk are not what was written.
ErrorKind = Literal["user", "lost", "data_loss", "checkpoint", "silent", "damaged", "bug"]


class Report(msgspec.Struct, frozen=True, kw_only=True, tag_field="event", omit_defaults=True):
    """Process to launcher."""


class Listening(Report, frozen=True, kw_only=True, tag="listening"):
    """Others can connect. "" for those who need not be found."""

    address: str


class Standby(Report, frozen=True, kw_only=True, tag="standby"):
    """A spare has imported everything."""


class Answer(Report, frozen=True, kw_only=True, tag="answer"):
    """To `Ask`. How long its working thread has been at one piece of work (None: it waits for others, or has nothing to
    do), and the longest that one has taken."""

    busy_seconds: float | None = None
    longest_seconds: float = 0.0


class Ready(Report, frozen=True, kw_only=True, tag="ready"):
    """A server has its rows in memory."""

    rows: int
    bytes: int


class ServerCounters(Report, frozen=True, kw_only=True, tag="server"):
    """What a server has done so far. None: it has no view yet, or makes no checkpoints."""

    pulls: int
    pushes: int
    bytes_in: int
    bytes_out: int
    kept_bytes: int = 0
    redundancy_bytes: int | None = None
    rows_updated: int | None = None
    flushes: int | None = None
    flush_bytes: int | None = None
    flush_rows: int | None = None
    parity_rows_applied: int | None = None
    rows_decoded: int | None = None
    faults: int | None = None
    faults_served: int | None = None
    recovering: bool | None = None
    capture_seconds_max: float | None = None
    capture_work_seconds_max: float | None = None  # of the processor
    hold_seconds_max: float | None = None
    updates: int | None = None
    priority_bytes: int | None = None
    count_bytes: int | None = None
    tiers: dict[str, float] | None = None  # of rows on disk
    costs: dict[str, list[float]] | None = None  # of a recovery, by part
    pace: str | None = None  # at which rows came back, and why


class Recovery(Report, frozen=True, kw_only=True, tag="recovery"):
    """Rows are on their way back to a server."""

    rows_total: int
    rows_back: int
    bytes: int
    faults: int
    seconds: float


class Recovered(Report, frozen=True, kw_only=True, tag="recovered"):
    """... and all of them are there."""

    rows_total: int
    rows_back: int
    bytes: int
    faults: int
    seconds: float


class Joined(Report, frozen=True, kw_only=True, tag="joined"):
    """A replacement went back to its saves: their marks, those at which it joined the others, and how many updates are
    lost by now, with it and all before it."""

    saved: tuple[int, ...]
    joined: tuple[int, ...]
    updates_lost: int


class Recalling(Report, frozen=True, kw_only=True, tag="recalling"):
    """Bytes of its saves that a replacement has read, and in all."""

    done: int
    total: int


class OwnSaved(Report, frozen=True, kw_only=True, tag="own save"):
    """A server has saved its own rows, or could not."""

    number: int
    error: str = ""
    rows: int = 0
    rows_left: int = 0  # changed, and left for a later save by priority
    seconds: float = 0.0


class Loading(Report, frozen=True, kw_only=True, tag="loading"):
    """Bytes of a checkpoint that a server has read, and in all."""

    done: int
    total: int


class Loaded(Report, frozen=True, kw_only=True, tag="loaded"):
    """A server has all rows of the checkpoint."""


class StoreOpened(Report, frozen=True, kw_only=True, tag="store opened"):
    """A server's files are open. How they are read and written, and why."""

    io: str


class Damaged(Report, frozen=True, kw_only=True, tag="damaged"):
    """Something on storage is damaged, and another way was found."""

    what: str


class Planned(Report, frozen=True, kw_only=True, tag="planned"):
    """A worker knows how many steps it will make."""

    steps: int


class Progress(Report, frozen=True, kw_only=True, tag="progress"):
    """How far a worker has come. The histograms are of the samples since the report before."""

    step: int
    samples: int
    steps_before: int = 0  # of these: done before this process began
    samples_before: int = 0
    loss: float | None  # None: not a number
    hist_pos: list[int]
    hist_neg: list[int]
    position: dict[str, Any] | None = None  # where its next batch starts in the data
    staleness_mean: float = 0.0
    staleness_max: float = 0.0
    wait_seconds: float = 0.0
    lookups: int = 0
    distinct: int = 0
    redo_bytes_peak: int = 0
    logged: dict[str, float | None] = {}  # what a script wants to be seen


class Said(Report, frozen=True, kw_only=True, tag="said"):
    """A line that a script printed."""

    text: str


class SaveNow(Report, frozen=True, kw_only=True, tag="save now"):
    """A script wants a checkpoint, and maybe something to be kept with it."""

    extra: Extra | None = None


class ModelNamed(Report, frozen=True, kw_only=True, tag="model named"):
    """What the parameters of the script's model are called (`checkpoint/model_names.py`)."""

    text: str


class Trained(Report, frozen=True, kw_only=True, tag="trained"):
    """A worker is through, and all it pushed is safe."""

    steps: int
    samples: int
    seconds: float


class Awaits(Report, frozen=True, kw_only=True, tag="awaits"):
    """A worker has made this synchronous step, and has waited for a while for the others to make it."""

    step: int


class ReadyToJudge(Report, frozen=True, kw_only=True, tag="ready to judge"):
    """A worker has come to an evaluation that all make together, and waits: the `call`-th in that step of that loop, or
    (None) behind it. `merges`: whether what several workers have counted can be made one. `steps`: that it has made."""

    loop: int
    step: int | None
    call: int
    merges: bool
    steps: int


class Passed(Report, frozen=True, kw_only=True, tag="passed"):
    """A worker has passed over the steps of a loop up to this one: those before it did them."""

    loop: int
    step: int


class Tallied(Report, frozen=True, kw_only=True, tag="tallied"):
    """What a worker has counted is in its file, or why not."""

    number: int
    problem: str = ""


class Concluded(Report, frozen=True, kw_only=True, tag="concluded"):
    """The first worker has merged what all have counted."""

    number: int
    metrics: dict[str, float | None]


class Evaluating(Report, frozen=True, kw_only=True, tag="evaluating"):
    """Test samples so far."""

    samples: int


class BoardAt(Report, frozen=True, kw_only=True, tag="board at"):
    """A worker keeps dense parameters, and others see there which it has."""

    address: str


class CircleBroken(Report, frozen=True, kw_only=True, tag="circle broken"):
    """It cannot exchange anything with that circle any more."""

    number: int


class Evaluated(Report, frozen=True, kw_only=True, tag="evaluated"):
    """The model is judged. None: not a number, or not asked for."""

    auc: float | None
    logloss: float | None
    test_samples: int | None = None
    model_sha256: str | None = None
    parity_stripes: int | None = None
    parity_wrong: int | None = None
    metrics: dict[str, float | None] = {}  # of a script, as it named them


class CheckpointBegun(Report, frozen=True, kw_only=True, tag="checkpoint begun"):
    """All servers have marked what belongs to this cut, and store it."""

    cut: str
    kind: CheckpointKind


class CheckpointSaved(Report, frozen=True, kw_only=True, tag="checkpoint saved"):
    """Without a kind: nothing is new since `cut`, which is stored already."""

    cut: str | None
    count: int
    still: bool
    kind: CheckpointKind | None = None
    seconds: float | None = None
    cut_seconds: float | None = None


class CheckpointFailed(Report, frozen=True, kw_only=True, tag="checkpoint failed"):
    """The next one is tried in its time."""

    reason: str
    failed: int  # so far
    still: bool


class Publication(Report, frozen=True, kw_only=True, tag="publication"):
    """As of checkpoints: one is begun, is saved (without a kind: nothing was new) or failed."""

    status: Literal["begun", "saved", "failed"]
    cut: str | None = None
    still: bool = False
    kind: CheckpointKind | None = None
    count: int = 0
    failed: int = 0
    reason: str = ""
    seconds: float | None = None  # from the question to its manifest
    cut_seconds: float | None = None
    rows: int = 0
    bytes: int = 0
    readers: int = 0  # replicas that told their step of late,
    readers_step: int | None = None  # and the least of these


class MergerNews(Report, frozen=True, kw_only=True, tag="merge"):
    """What a merger did or saw."""

    kind: MergeKind
    text: str
    piece: str = ""


class Replace(Report, frozen=True, kw_only=True, tag="replace"):
    """The coordinator has not heard of somebody for too long: it counts as dead."""

    peer: Identity
    reason: str


class Condemn(Report, frozen=True, kw_only=True, tag="condemn"):
    """The coordinator has waited for a server as long as the user said: it is to be ended, whatever is lost with it."""

    peer: Identity
    reason: str


class Waiting(Report, frozen=True, kw_only=True, tag="waiting"):
    """The coordinator waits for a server that seems dead, for so many seconds: without it, rows would be lost."""

    server: int
    reason: str
    seconds: float


class Waited(Report, frozen=True, kw_only=True, tag="waited"):
    """... and it is back."""

    server: int


class Fenced(Report, frozen=True, kw_only=True, tag="fenced"):
    """This process was taken for dead; another is in its place."""

    reason: str


class Error(Report, frozen=True, kw_only=True, tag="error"):
    """Last words."""

    message: str
    kind: ErrorKind
    hint: str | None = None


class Stopped(Report, frozen=True, kw_only=True, tag="stopped"):
    """Everything is done; the process ends now."""

    peak_rss_bytes: int | None = None


AnyReport = (
    Listening
    | Standby
    | Answer
    | Ready
    | ServerCounters
    | Recovery
    | Recovered
    | Joined
    | OwnSaved
    | Recalling
    | Loading
    | Loaded
    | StoreOpened
    | Damaged
    | Planned
    | Progress
    | Said
    | SaveNow
    | ModelNamed
    | Trained
    | Awaits
    | ReadyToJudge
    | Passed
    | Tallied
    | Concluded
    | BoardAt
    | CircleBroken
    | Evaluating
    | Evaluated
    | CheckpointBegun
    | CheckpointSaved
    | CheckpointFailed
    | Publication
    | MergerNews
    | Replace
    | Condemn
    | Waiting
    | Waited
    | Fenced
    | Error
    | Stopped
)


class Malformed(msgspec.Struct, frozen=True, kw_only=True):
    """A report of a known name that is not what it must be. Never sent; made by whoever reads."""

    event: str
    problem: str
