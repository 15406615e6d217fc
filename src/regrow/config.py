"""What a training run is asked to do: one frozen dataclass, validated once, when it is made.

Every process of a run gets the same `TrainConfig` (as JSON, through its stdin). After construction nothing
is left open: defaults that depend on another option or on the machine are filled in, so that a stored config
repeats the run it came from. Nothing here imports torch or reads an environment variable.

To add a knob: a field with a comment that says what too small and too large do, a line in `checks.py`, and a
line in the option table of `cli/train.py` (a test compares the two).
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from regrow.checks import check_config
from regrow.defaults import OWN_SAVES, derive_values
from regrow.errors import ConfigError, UserError
from regrow.fields import SPELLED, check_types, read_options
from regrow.hanging import parse_silent
from regrow.inputs import find_shape, split_data
from regrow.protection import (
    AUTO,
    DERIVED,
    FLUSH_BYTES_DEFAULT,
    K_DEFAULT,
    R_DEFAULT,
    CodedRecovery,
    ErasureCode,
    PartialRecovery,
    Sabotage,
    nearest,
    parse_sabotage,
)
from regrow.tiers import CACHE_BYTES_DEFAULT, choose_flush_seconds
from regrow.units import MIB, Interval, parse_interval, parse_seconds

if TYPE_CHECKING:
    from regrow.nn.presets import ModelConfig

# Those with parities or copies in the memory of other servers, and those whose servers save their own rows.
CODES: dict[str, type[ErasureCode | PartialRecovery]] = {
    "ec": ErasureCode,
    "ec+delta": ErasureCode,
    "partial": PartialRecovery,
    "ec+partial": CodedRecovery,
}

# What options were called before. Checkpoints keep the configuration they were made with, for ever.
RENAMED = {"groups": "rings"}


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """One training run. See the comments for what each knob does at its ends."""

    # -- what is trained on what -------------------------------------------------------------------------

    # "synthetic" (Criteo-like, made as it is read), "criteo:PATH" (Criteo TSV, plain or .gz), "csv:PATH",
    # "parquet:PATH" or "npz:PATH" with a schema, or "module:function", which returns a data set.
    data: str = "synthetic"
    # A FILE.toml that says what the columns of csv, parquet and npz data mean. The model's tables follow from it.
    schema: str | None = None
    # A preset of `regrow.nn.presets`, or a FILE.toml with the same fields (dim, bottom, top, rows or
    # rows_max, ...).
    model: str = "kaggle"
    # Rows per table at most; larger ids are folded into it. Too small: different ids share a row and
    # accuracy drops. Too large (or None, the model's own): rows nobody looks up still take memory and
    # start-up time.
    rows_max: int | None = None
    # Rows to train on, from the front. Too small: nothing to learn. None: all there are (synthetic: no
    # end).
    train_rows: int | None = None
    # Rows to judge on. Too small: the AUC is noise (20,000 rows give a standard error near 0.004). Too
    # large: evaluation takes longer than training. None: what the data set calls its test rows.
    test_rows: int | None = None
    # True: every row gets a value before the first step, as after a long training, so that a recovery has all of them
    # to bring back. For measurements; the model learns nothing from it.
    prefill: bool = False
    # Somebody's own script and its arguments, in the place of a model and data of ours: ("train.py", "--lr", "0.1"), or
    # ("-m", "package.module", ...). It joins with `regrow.join()`; model, data, batch and steps are then its business.
    script: tuple[str, ...] = ()
    # Zipf exponent of synthetic ids. 0: uniform, every batch touches other rows. Too large: a handful of rows take all
    # accesses and there is nothing to shard. The default gives the published skew of click data.
    skew: float = 1.25
    # False: the first malformed line stops the run and is named. True: such lines are counted and left
    # out, which hides a file in the wrong format.
    skip_bad_lines: bool = False

    # -- how it is trained -------------------------------------------------------------------------------

    # async: every push is applied at once. sync: all workers' pushes of a step together; same bits in
    # every run.
    mode: str = "async"
    # Of embedding rows. Adam keeps two floats of state per weight and trebles the memory; row-wise
    # Adagrad one per row.
    optimizer: str = "rowwise_adagrad"
    # Of the dense network, whose parameters live on the servers too.
    dense_optimizer: str = "adam"
    # Too small: the loss hardly falls. Too large: it jumps or becomes NaN. Default: by optimizer.
    learning_rate: float = DERIVED
    dense_learning_rate: float = DERIVED
    # Samples per worker and step. Too small: messages cost more than arithmetic. Too large: fewer updates
    # for the same samples, larger messages, and asynchronous gradients that are older in samples. Default: 2048,
    # or less for a file too small to give every worker some hundreds of steps.
    batch: int = DERIVED
    # Steps per worker, or passes over the training rows: one of the two, never both.
    # Default: one epoch of a file, 300 steps of synthetic data.
    steps: int | None = None
    epochs: int | None = None
    # Decides initial values, synthetic data and the order of batches.
    seed: int = 1
    # Batches a worker pulls ahead (async). 0: it waits for every pull. Too large: rows are stale by as
    # many steps, and as many batches of rows are held in memory. In sync mode always 0: a pull is the
    # commit of the step before.
    prefetch: int = DERIVED

    # -- where it runs -----------------------------------------------------------------------------------

    # local: processes of this machine. ray: on the nodes of a Ray cluster, which is at `address` ("auto": the one that
    # this machine is part of).
    cluster: str = "local"
    address: str = "auto"
    # Servers on one node at most. None: one, where there are enough nodes, else as few as possible.
    servers_per_node: int | None = None
    # What a server, and a worker, takes of its node. Too small: a node gets more than it can bear. Too large: no room.
    # Memory by default: as much as a server's rows are counted to need.
    server_cpus: float = 1.0
    server_memory: int | None = None
    worker_cpus: float = 1.0
    worker_gpus: float = 0.0
    # "KEY=VALUE", or for one role "server:KEY=VALUE": only nodes with this label of Ray.
    node_label: tuple[str, ...] = ()
    # The name of the job there. None: one is made up.
    job: str | None = None
    # Parameter servers. Too few: one holds too many rows and does all the work. Too many: every batch is
    # cut into messages too small to be worth sending, and processes compete for cores.
    servers: int = 5
    # Too few: servers idle. Too many: in async mode gradients are older, in sync mode the slowest sets
    # the pace.
    workers: int = 2
    # Where a worker computes: "cpu", "cuda" or "cuda:1".
    device: str = "cpu"
    # Threads of torch in each worker. Too small: the dense network is slow. Too large: workers fight for
    # cores.
    threads_per_worker: int = DERIVED
    # Processes with torch imported that wait to succeed a worker. Too few: training waits seconds for an import. Too
    # many: memory. Default: one. Where workers are not replaced there are none.
    spare_workers: int = DERIVED
    # Threads of the row kernels in each server. Too small: large batches wait. Too large: same fight,
    # with the workers.
    threads_per_server: int = 1
    # unix: sockets in a private directory. tcp: loopback ports, for systems without Unix sockets.
    transport: str = DERIVED
    # Frames carry tags that nobody without the run's token can make. auto: over TCP. Costs time on every message;
    # without it, whoever can get in between two processes can change rows.
    authenticate: str = "auto"
    # Connections over TCP are encrypted: auto, with a certificate made of the run's token, or the directory of one.
    # Costs time on every byte; without it, whoever can listen to the network reads rows and gradients.
    tls: str = "off"
    # Bytes of pushes a worker may have unacknowledged; one push is always allowed, however large. Too
    # small: the worker waits for every push. Too large: memory, and a long resend after a failure.
    redo_bytes_max: int = 64 * MIB
    # The largest message accepted from a connection. Too small: a worker's batch is refused. Too large: a
    # broken or hostile peer can make a process take that much memory.
    frame_bytes_max: int = 256 * MIB

    # -- where rows are kept -----------------------------------------------------------------------------

    # memory: all rows of a server in its memory. tiered: on disk, with a cache in memory; for tables that are larger.
    store: str = "memory"
    # Where tiered servers keep their files; on a cluster, on each node. On a disk that is slow, or shared, every miss
    # waits for it.
    store_dir: str | None = None
    # Of rows in memory, per server (tiered). Too small: every batch waits for the disk; less than two batches is
    # refused. Too large: memory that the workers would need.
    cache_bytes: int = CACHE_BYTES_DEFAULT
    # How files are read and written: direct, past the system's own cache; threads; auto measures.
    store_io: str = "auto"
    # Threads of a server for its files. Too few: reads queue up. Too many: they take processors from everybody.
    store_threads: int = 4
    # Of the files of one server. Too small: no space for what changes. None: twice what its rows need, and more.
    store_bytes_max: int | None = None
    # lru: rows not used for longest leave the cache, between batches. none: no cache. self: as lru, but every access
    # tidies up itself. The last two are to compare with.
    cache_policy: str = "lru"

    # -- what is survived --------------------------------------------------------------------------------

    # What keeps rows when a process dies. "none": nothing, and losing one ends the run. "ec": parities in the memory of
    # other servers; servers, workers and the coordinator are replaced and training goes on. "full" and "delta": copies
    # on storage (`ckpt`) every now and then, whole or only the rows that changed; who dies takes everybody back to the
    # newest. "ec+delta": both, so that more losses than r, or of the whole machine, cost what came since the last copy.
    # "partial": a server that dies goes back alone to what it last saved; nothing is trained again, and what is lost
    # is counted. "ec+partial": parities, and where more than r servers of a stripe are lost, only those go back alone.
    # "batch": with tiered rows, checkpoints in their files; who dies takes everybody back to the newest.
    protection: str = "none"
    # Rows that share r parities. Too small: parities take 1/k of the memory of the rows, and as much traffic.
    # Too large: a lost row is computed from more servers, and k + r of them are needed in a ring.
    k: int = K_DEFAULT
    # Parities: how many servers may be lost together. Too small: a second loss during a recovery ends the
    # run. Too large: every change travels r times.
    r: int = R_DEFAULT
    # Rings of servers that protect each other. Too few: a failure keeps everybody busy. Too many: fewer servers
    # share a recovery, and each ring must have k + r of them.
    rings: int = 1
    # Changes leave for the parities after so many pushes. Too small: hot rows travel again and again (1 is one
    # message per push). Too large: workers keep more for a redo. Default: 16; with commit "2pc" always 1.
    flush_pushes: int = DERIVED
    # ... or when so many bytes wait. Too small: as above. Too large: memory for the rows as they were before.
    flush_bytes: int = FLUSH_BYTES_DEFAULT
    # exactly-once: no push is lost or applied twice, whatever dies. 2pc: the same by two explicit phases per
    # push, as in the ECRec paper; slower. none: changes are sent and what a failure loses is lost.
    commit: str = "exactly-once"
    # Bytes of rows per second that come back to a lost server though nobody has asked for them, from all others
    # together. Too small: a second failure may come first, and slow rows cost more training in all than fast ones (see
    # docs/benchmarks.md). Too large: pulls wait longer while it lasts, which is soon over. 0: no limit.
    sweep_bytes_per_s: int = 0
    # Without that limit: the share of training that a recovery may cost as long as it lasts; the rate follows from what
    # training loses. 0: whatever loses the least training in all. Too small: the bound below decides. Too large: as if
    # nobody trained.
    recovery_cost: float = 0.0
    # ... but all rows are back within about so long, if another loss would be one too many. Too small: training counts
    # for nothing. Too large: a second failure may come first.
    recovery_seconds_max: int = 60

    # Where checkpoints are kept: a path or any URL that fsspec knows. Needed for "full" and "delta".
    ckpt: str | None = None
    # How often: "60s" or "500steps". Too often: storage cannot follow. Too rarely: more is trained again, or lost. With
    # "partial" and "ec+partial" by default "auto": as rarely as `target_pls` allows.
    every: str = DERIVED
    # With "delta": every so many checkpoints one stands alone. Too few: restoring reads many, where nobody merges
    # them. Too many: more is written.
    full_every: int = 12
    # So many of the newest stay restorable; of older ones, one full a day. Too few: no way back behind bad data.
    ckpt_keep_last: int = 12
    # "zstd": compressed; embeddings gain little.
    ckpt_encoding: str = "raw"
    # 8 or 4: rows are stored in fewer bits, and do not come back as they were.
    ckpt_bits: int = 32
    # Bytes per second and server to storage. None: as fast as it takes them.
    ckpt_bytes_per_s: int | None = None
    # True: training stands still while a checkpoint is stored, as it does elsewhere. To compare with.
    ckpt_pause: bool = False

    # Where weights are published for those who answer look-ups (`regrow.serving`): a path or URL, not that of
    # checkpoints. None: nowhere.
    publish: str | None = None
    # How often: "30s" or "500steps". Too often: it is done as often as it can be. Too rarely: look-ups get old rows.
    publish_every: str = "30s"
    # 8 or 4: rows are published in fewer bits, and look-ups get nearly what was trained.
    publish_bits: int = 32

    # With "partial": the share of all training that may be lost, expected over the whole run (PLS). Too small: servers
    # save all the time. Too large: the model learns less than the data has.
    target_pls: float = 0.1
    # With "partial", which rows are saved first where more have changed than the share allows: those that changed most
    # ("scar", which keeps a copy of every weight), that were updated most often ("mfu", a byte a row), or a sample of
    # those ("ssu"). "none": all that changed, every time.
    priority: str = "ssu"
    # So much of the rows is saved, so much more often. 1: all at once. Too small: many saves of few rows.
    priority_share: float = 0.125
    # "largest" (those that hold 99 % of all rows), "all", or names of tables. The others are always saved whole.
    priority_tables: str = "largest"
    # "ssu" looks at every so-many-th push. Too small: it keeps rows that come once. Too large: it misses hot ones.
    ssu_period: int = 2
    # How often a server is expected to die, for the interval. None: as --mtbf says, or estimated as failures come. With
    # "ec+partial": how often more than r of a stripe are; left out, that is taken to be as often as one.
    expect_mtbf: str | None = None

    # Start from a checkpoint: URL, or URL@CUT. With the same workers and mode; servers may be others.
    resume: str | None = None

    # How long a process may be silent before it counts as hung: "30" for all, or "worker=30,coordinator=10"; the others
    # as in `hanging.py`. Too small: a busy machine is taken for a hung process. Too large: everybody waits for it.
    silent_seconds: str = ""
    # How long a hung server is waited for if rows would be lost without it; then the run falls back to a checkpoint, or
    # ends. Too small: a machine that swaps costs a run. Too large: one that never comes back is waited for.
    patience: str = "60s"

    # -- what goes wrong on purpose ----------------------------------------------------------------------

    # "ROLE:ID@step:N": SIGKILL when the furthest worker has made N steps.
    kill: tuple[str, ...] = ()
    # "ROLE:ID@step:N:SECONDSs": SIGSTOP, and SIGCONT after so long. Under 2 s nobody may notice.
    pause: tuple[str, ...] = ()
    # Mean seconds between random kills. Too small: the next failure comes before the last is over (a server is spared
    # while r others are recovering). None: no random kills.
    mtbf: float | None = None
    # How the times between them are spread, at the same mean: the shape of a gamma distribution. 1: exponential. Less:
    # many come soon after another and some very late; 0.67 has the published median, 0.57 of the mean. Much more: they
    # come like clockwork, and a save just before each makes any recovery look good.
    mtbf_shape: float = 1.0
    # So many servers die at one instant. 1: one at a time. More than r: only a checkpoint helps, so there must be one.
    mtbf_kill: int = 1
    # Who is hit at random: some of server, worker, coordinator, spare, with commas.
    mtbf_roles: str = "server"
    # How many of the random failures are hangs (SIGSTOP) instead of kills: 0 none, 1 all. Half of those that hang never
    # go on, the others much later, when they have been replaced.
    mtbf_hangs: float = 0.0

    # -- what is left afterwards -------------------------------------------------------------------------

    # The run directory. None: runs/DATE-TIME-MODEL.
    out: str | None = None
    # Compute model_sha256 over every row at the end: two runs are equal if it is. Reads the whole model
    # once.
    digest: bool = True
    # Every worker writes digests of each step to steps/ of the run directory. Costs a few passes over what a step uses.
    step_digests: bool = False
    # Servers measure what bringing rows back costs them, part by part: figures of `per_server` in the summary.
    recovery_profile: bool = False
    # The same of every step, from the first push on, with or without anything coming back.
    step_profile: bool = False
    # Compare every parity with the rows it protects at the end; one that is wrong fails the run. Reads everything once.
    check_parity: bool = False

    def __post_init__(self) -> None:
        for name, value in derive_values(self).items():
            object.__setattr__(self, name, value)
        check_types(self, {"ModelConfig": object})
        check_config(self)

    # -- the same, from elsewhere ------------------------------------------------------------------------

    def to_dict(self) -> dict[str, Any]:
        """JSON-able; `from_dict` gives an equal config back on any machine."""
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, options: Mapping[str, Any]) -> TrainConfig:
        """Unknown names are refused, with the nearest known one."""
        known = [field.name for field in dataclasses.fields(cls)]
        for name in options:
            if name not in known:
                hint = f"it is called {RENAMED[name]!r} now" if name in RENAMED else nearest(name, known)
                raise UserError(f"unknown option {name!r}", hint=hint)
        return cls(**options)

    @classmethod
    def from_stored(cls, options: Mapping[str, Any]) -> TrainConfig:
        """What a checkpoint was made with. It may be old, so names that were given up are known here."""
        return cls.from_dict(read_stored(options))

    @classmethod
    def from_toml(
        cls,
        path: str | Path,
        overrides: Mapping[str, Any] | None = None,
        note: Callable[[str], None] = lambda text: None,
    ) -> TrainConfig:
        """Reads a file of `option = value` lines; `overrides` (the command line) win over it."""
        options = read_options(Path(path), note)
        overrides = overrides or {}
        # Asking for epochs on the command line withdraws the file's steps, and the other way round.
        for given, withdrawn in (("steps", "epochs"), ("epochs", "steps")):
            if overrides.get(given) is not None:
                options.pop(withdrawn, None)
        try:
            return cls.from_dict({**options, **overrides})
        except UserError as error:
            if isinstance(error, ConfigError) and error.option in overrides:
                raise
            text = error.message
            for name, spelled in SPELLED.items():
                text = f"{spelled}{text.removeprefix(name)}" if text.startswith(f"{name} = ") else text
            error.args = (f"{path}: {text}",)
            error.message = error.args[0]
            raise

    def to_toml(self) -> str:
        """For the run directory. Leaves out `out`, so that the file can start another run."""
        lines = []
        for name, value in self.to_dict().items():
            if value is not None and name != "out":
                # JSON's numbers and booleans are TOML's too; its strings, but for DEL and surrogate pairs.
                text = json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
                lines.append(f"{SPELLED.get(name, name)} = {text}")
        return "\n".join(lines) + "\n"

    def replace(self, **changes: Any) -> TrainConfig:
        """A validated copy; steps and epochs replace each other."""
        if changes.get("steps") is not None:
            changes.setdefault("epochs", None)
        if changes.get("epochs") is not None:
            changes.setdefault("steps", None)
        return dataclasses.replace(self, **changes)

    # -- readings of the fields --------------------------------------------------------------------------

    @property
    def data_kind(self) -> str:
        """ "synthetic", "criteo", "csv", "parquet", "npz" or "module"."""
        return split_data(self.data)[0]

    @property
    def data_path(self) -> Path | None:
        """Where the data is, for data that is somewhere."""
        path = split_data(self.data)[1]
        return Path(path) if path else None

    @property
    def model_name(self) -> str:
        """Fit for a directory name: the preset, or the stem of the model file, or of the script."""
        if self.script:
            named = self.script[1:2] if self.script[0] == "-m" else self.script[:1]
            return Path(*named).stem or "script"
        return Path(self.model).stem if self.model.endswith(".toml") else self.model.rpartition(":")[2]

    @property
    def code(self) -> ErasureCode | PartialRecovery | None:
        """How rows are protected in the memory of other servers; None: not at all."""
        kind = CODES.get(self.protection)
        if kind is None:
            return None
        names = [field.name for field in dataclasses.fields(kind)]
        return kind(**{name: getattr(self, name) for name in names})

    @property
    def threads(self) -> dict[str, int]:
        """By role."""
        servers, workers = self.threads_per_server, self.threads_per_worker
        own = {"server": servers, "standby": servers, "worker": workers, "understudy": workers}
        return {**own, "coordinator": 1, "merger": 1}

    @property
    def saves_own(self) -> bool:
        """Whether each server saves its own rows, to go back to alone."""
        return self.protection in OWN_SAVES

    @property
    def silent_limits(self) -> dict[str, float]:
        return parse_silent(self.silent_seconds)

    @property
    def patience_seconds(self) -> float:
        return parse_seconds(self.patience)

    @property
    def replaces_servers(self) -> bool:
        """Whether a process that dies has a successor and training goes on."""
        return self.code is not None

    @property
    def spare_workers_kept(self) -> int:
        return self.spare_workers if self.replaces_servers else 0

    @property
    def saves(self) -> bool:
        """Whether this run makes checkpoints."""
        return self.protection in ("full", "delta", "ec+delta", "batch", *OWN_SAVES)

    @property
    def saves_epochs(self) -> bool:
        """Whether they stay in the files of the servers' rows."""
        return self.protection == "batch"

    @property
    def merges(self) -> bool:
        """Whether somebody merges and prunes them while training goes on."""
        return self.saves and not self.saves_epochs

    @property
    def mergers(self) -> int:
        """How many do that: one for checkpoints, one for publications."""
        return self.merges + (self.publish is not None)

    @property
    def flush_seconds(self) -> float | None:
        """How long the rows of such a checkpoint may take to be written; None: there are none."""
        return choose_flush_seconds(self.interval) if self.saves_epochs else None

    @property
    def interval(self) -> Interval:
        """Between checkpoints, or, with partial recovery, saves; neither of the two: as the planner says."""
        return Interval() if self.every == AUTO else parse_interval(self.every)

    @property
    def publish_interval(self) -> Interval:
        """Between publications."""
        return parse_interval(self.publish_every)

    @property
    def sabotage(self) -> tuple[Sabotage, ...]:
        """What `kill` and `pause` ask for, by step."""
        kills = [parse_sabotage("kill", text) for text in self.kill]
        pauses = [parse_sabotage("pause", text) for text in self.pause]
        return tuple(sorted(kills + pauses, key=lambda sabotage: sabotage.step))

    def load_model(self) -> ModelConfig:
        """The model's shape, from its preset or its file and its data, with `rows_max` applied."""
        from regrow.nn import presets  # late: `regrow.nn` is for model authors, who import this module

        return presets.load(self.model, rows_max=self.rows_max, data=find_shape(self))


def read_stored(options: Mapping[str, Any]) -> dict[str, Any]:
    """The options in a checkpoint by the names they have today. One that said "as you think best" says what that is
    now: it is about how fast a recovery goes, not about what the rows are."""
    known = {RENAMED.get(name, name): value for name, value in options.items()}
    if "sweep_bytes_per_s" in known and known["sweep_bytes_per_s"] is None:
        known["sweep_bytes_per_s"] = TrainConfig.sweep_bytes_per_s
    return known


def model_names() -> list[str]:
    """The presets `model` may name."""
    from regrow.nn.presets import MODELS

    return list(MODELS)
