"""What a launcher and the processes it started say to each other, both ways, as values.

    assignment      who you are, whom you need, what you do: the first thing that a process hears
    commands        launcher -> process: stop, become, are you there, a peer died, make a checkpoint, evaluate
    reports         process -> launcher: listening, ready, an answer, progress, an error, ...

Here is only what can be said. How it travels is a backend's business (`launch/backend.py` and what implements it; over
pipes it is one JSON object a line), what it means is the launcher's and the roles'. Both sides import this file, so it
imports nothing but identities: no torch, no files, no processes.

The rule to keep: whoever reads a report reads a field of a struct. A field that nobody reads goes away, and a report
with a wrong type is caught here, where it enters (`parse_report`), and is named with the one who sent it.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from regrow.core.identity import Identity

CheckpointKind = Literal["full", "delta"]
MergeKind = Literal["choice", "folded", "deleted", "broken", "wanted", "error"]
# user: a mistake, all is said. lost: it misses another process, and is a victim. data_loss: rows are gone for good.
# checkpoint: one cannot be loaded. bug: its log says more.
# silent: the disk of its rows does not answer. damaged: rows on its disk are not what was written.
ErrorKind = Literal["user", "lost", "data_loss", "checkpoint", "silent", "damaged", "bug"]


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
    listen: str
    coordinator: str | None  # its address; None for the coordinator itself
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


AnyCommand = Stop | Become | Ask | PeerDied | MakeCheckpoint | SaveEvery | Evaluate | Judge | MergeTallies | Conclude


# -- reports -----------------------------------------------------------------------------------------------


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
    """A replacement went back to its saves: their marks, those at which it joined, and how many updates are lost."""

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


class Trained(Report, frozen=True, kw_only=True, tag="trained"):
    """A worker is through, and all it pushed is safe."""

    steps: int
    samples: int
    seconds: float


class ReadyToJudge(Report, frozen=True, kw_only=True, tag="ready to judge"):
    """A worker has come to an evaluation that all make together, and waits: the `call`-th in that step of that loop, or
    (None) behind it. `merges`: whether what several workers have counted can be made one."""

    loop: int
    step: int | None
    call: int
    merges: bool


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
    | Trained
    | ReadyToJudge
    | Passed
    | Tallied
    | Concluded
    | Evaluating
    | Evaluated
    | CheckpointBegun
    | CheckpointSaved
    | CheckpointFailed
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


# -- on the wire -------------------------------------------------------------------------------------------


class _Name(msgspec.Struct):
    event: str


def _encode_number(value: Any) -> Any:
    """Numbers of numpy, as plain ones."""
    return value.item()


_encoder = msgspec.json.Encoder(enc_hook=_encode_number)
_assignments = msgspec.json.Decoder(Assignment)
_commands: msgspec.json.Decoder[AnyCommand] = msgspec.json.Decoder(AnyCommand)
_reports: msgspec.json.Decoder[AnyReport] = msgspec.json.Decoder(AnyReport)
_names = msgspec.json.Decoder(_Name)
REPORT_NAMES = frozenset(str(kind.__struct_config__.tag) for kind in AnyReport.__args__)


def encode(message: Assignment | Command | Report) -> bytes:
    """One line without its end. What is not a number travels as null."""
    return _encoder.encode(message)


def parse_assignment(line: bytes) -> Assignment:
    return _assignments.decode(line)


def parse_command(line: bytes) -> AnyCommand:
    """Raises ValueError for what is none."""
    return _commands.decode(line)


def parse_report(line: bytes) -> AnyReport | Malformed | None:
    """None for anything that is not a report: a library may print what it likes."""
    try:
        return _reports.decode(line)
    except ValueError as error:
        try:
            name = _names.decode(line).event
        except ValueError:
            return None
        return Malformed(event=name, problem=str(error)) if name in REPORT_NAMES else None
