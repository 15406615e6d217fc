"""`regrow train`: the table of its options, and the command.

Every option is a field of `TrainConfig`; what is here is how it is spelled and explained. Defaults and checks are
there. To add one: a field in `config.py`, and a line in KNOBS (a test compares the two).
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import click

from regrow import checks
from regrow import config as configuration
from regrow.cli import jobs
from regrow.cli.options import BYTES
from regrow.clusters import CLUSTERS
from regrow.config import TrainConfig
from regrow.errors import ConfigError, RegrowError, UserError
from regrow.protection import COMMITS, PRIORITIES
from regrow.tiers import CACHE_POLICIES, STORE_IO, STORES
from regrow.units import MIB


@dataclass(frozen=True, slots=True, kw_only=True)
class Knob:
    """A field of `TrainConfig` as an option. `default` is said in words where it depends on something."""

    name: str
    help: str
    type: Any = None
    metavar: str | None = None
    default: str | None = None
    flag_short: str | None = None  # where the name of the field is too long to be typed
    repeated: bool = False

    @property
    def flag(self) -> str:
        return self.flag_short or "--" + self.name.replace("_", "-")

    @property
    def shown(self) -> str | None:
        """What stands for the value in the help; None: the type knows."""
        return self.metavar or {int: "N", float: "X"}.get(self.type)


CHOICE = click.Choice
KNOBS: dict[str, tuple[Knob, ...]] = {
    "What to train": (
        Knob(
            name="data",
            metavar="DATA",
            help="synthetic; criteo:PATH (also .gz); csv:PATH, parquet:PATH or npz:PATH, with --schema; or "
            "module:function, which returns a data set.",
        ),
        Knob(
            name="schema",
            metavar="FILE",
            default="none",
            help="A TOML file that says what the columns of your data mean; the tables of the model follow from it.",
        ),
        Knob(name="model", metavar="NAME", help="A preset ({models}), FILE.toml (dim, bottom, top) or module:Class."),
        Knob(
            name="rows_max",
            type=int,
            default="the model's",
            help="Rows per table at most; less is less memory.",
        ),
        Knob(name="train_rows", type=int, default="all", help="Train on this many rows, from the front."),
        Knob(name="test_rows", type=int, default="all", help="Judge on this many; under 20000 is noisy."),
        Knob(
            name="skew",
            type=float,
            help="Zipf exponent of synthetic ids: 0 is uniform; at the default 0.1 % of ids take 90 %.",
        ),
        Knob(name="prefill", type=bool, help="Give every row a value first, as after a long training."),
        Knob(name="skip_bad_lines", type=bool, help="Leave out malformed lines; or stop at the first."),
    ),
    "How to train": (
        Knob(name="steps", type=int, default="300 for synthetic", help="Steps of each worker; or use --epochs."),
        Knob(name="epochs", type=int, default="1 for a file", help="Passes over the data; or use --steps."),
        Knob(name="batch", type=int, default="2048; less for a small file", help="Samples per worker and step."),
        Knob(
            name="mode",
            type=CHOICE(checks.MODES),
            help="async: every push at once. sync: a step's pushes together, so the same bits in every run.",
        ),
        Knob(name="optimizer", type=CHOICE(checks.OPTIMIZERS), help="Of the embedding rows."),
        Knob(name="learning_rate", type=float, default="by optimizer", help="Of the embedding rows."),
        Knob(name="dense_optimizer", type=CHOICE(checks.DENSE_OPTIMIZERS), help="Of the dense network."),
        Knob(name="dense_learning_rate", type=float, default="by optimizer", help="Of the dense network."),
        Knob(
            name="prefetch",
            type=int,
            default="1, in sync mode 0",
            help="Batches pulled ahead. More hides waiting and uses staler rows.",
        ),
        Knob(name="seed", type=int, help="Of initial values, synthetic data and the order of batches."),
    ),
    "Where to run": (
        Knob(name="servers", type=int, help="Processes that hold the rows."),
        Knob(name="workers", type=int, help="Processes that train."),
        Knob(name="device", metavar="DEVICE", help="Where workers compute: cpu, cuda or cuda:N."),
        Knob(name="threads_per_worker", type=int, default="by cores", help="For the dense network."),
        Knob(name="threads_per_server", type=int, help="For gathers and updates."),
        Knob(
            name="spare_workers",
            type=int,
            default="1 where workers are replaced",
            help="Processes that wait, with torch imported, to succeed a worker.",
        ),
        Knob(
            name="transport",
            type=CHOICE(checks.TRANSPORTS),
            default="unix on Linux",
            help="Unix sockets in a private directory, or TCP on the loopback interface.",
        ),
        Knob(
            name="authenticate",
            type=CHOICE(checks.AUTHENTICATE),
            help="Messages that nobody in between can change. auto: over TCP.",
        ),
        Knob(
            name="tls",
            metavar="off|auto|DIR",
            help="Encrypt TCP: with a certificate made of the run's token, or cert.pem, key.pem, ca.pem of DIR.",
        ),
        Knob(
            name="redo_bytes_max",
            type=BYTES,
            flag_short="--redo-bytes",
            help="Pushes a worker may have that are not safe yet, before it waits.",
        ),
        Knob(name="frame_bytes_max", type=BYTES, help="The largest message a process accepts."),
    ),
    "On a cluster": (
        Knob(
            name="cluster",
            type=CHOICE(CLUSTERS),
            help="local: processes of this machine. ray: on the nodes of a Ray cluster (pip install 'regrow[ray]').",
        ),
        Knob(name="address", metavar="HOST:PORT", help="Of the Ray cluster. auto: the one that this machine is in."),
        Knob(
            name="servers_per_node",
            type=int,
            default="1; more with too few nodes",
            help="So many servers on one node at most.",
        ),
        Knob(name="server_cpus", type=float, help="What Ray counts for a server."),
        Knob(name="server_memory", type=BYTES, default="as its rows need", help="The same, of memory."),
        Knob(name="worker_cpus", type=float, help="What Ray counts for a worker."),
        Knob(name="worker_gpus", type=float, help="The same, of GPUs."),
        Knob(
            name="node_label",
            metavar="[ROLE:]KEY=VALUE",
            repeated=True,
            default="any node",
            help="Only on nodes with this label: zone=a, or server:zone=a. Repeatable.",
        ),
        Knob(name="job", metavar="NAME", default="made up", help="For `regrow status`, `attach`, `stop` and `fetch`."),
    ),
    "Where rows are kept": (
        Knob(
            name="store",
            type=CHOICE(STORES),
            help="memory: all of them in the servers' memory. tiered: on disk, with a cache in memory.",
        ),
        Knob(name="store_dir", metavar="DIR", default="none", help="With tiered: where the files are."),
        Knob(name="cache_bytes", type=BYTES, help="With tiered: rows in memory, per server."),
        Knob(
            name="store_io",
            type=CHOICE(STORE_IO),
            help="How files are read and written. auto: mmap if they are in memory, else direct; it says why.",
        ),
        Knob(name="store_threads", type=int, help="Of each server, for its files."),
        Knob(
            name="store_bytes_max",
            type=BYTES,
            default="twice what the rows need",
            help="Of the files of each server.",
        ),
        Knob(
            name="cache_policy",
            type=CHOICE(CACHE_POLICIES),
            help="lru; to compare with: none (no cache), self (every access tidies up).",
        ),
    ),
    "What to survive": (
        Knob(
            name="protection",
            type=CHOICE(checks.PROTECTIONS),
            flag_short="--protect",
            help="What keeps rows when a process dies. none: the run ends. ec: erasure coding. full, delta: storage. "
            "partial: who dies goes back alone, and loses a little. batch: in the files of tiered rows.",
        ),
        Knob(name="k", type=int, help="Rows that share parities. More is less memory; k + r servers are needed."),
        Knob(name="r", type=int, help="Parities: so many servers may be lost together."),
        Knob(name="rings", type=int, help="Rings of servers that protect each other; each has k + r or more."),
        Knob(
            name="flush_pushes",
            type=int,
            default="16, with 2pc always 1",
            help="Changes leave for the parities after so many pushes. Fewer is more traffic, more is a longer redo.",
        ),
        Knob(name="flush_bytes", type=BYTES, help="... or when so many bytes of rows have changed."),
        Knob(
            name="commit",
            type=CHOICE(COMMITS),
            help="exactly-once; 2pc: the same in two phases per push (flushes every push); none: losses tolerated.",
        ),
        Knob(
            name="sweep_bytes_per_s",
            type=BYTES,
            default="0, no limit",
            help="For bringing lost rows back, all servers together. A low one costs more training in all.",
        ),
        Knob(
            name="recovery_cost",
            type=float,
            metavar="SHARE",
            default="0, the least in all",
            help="Without a limit: the share of training that a recovery may cost while it lasts, 0 to 1.",
        ),
        Knob(name="recovery_seconds_max", type=int, help="... but lost rows are back within so long."),
    ),
    "Checkpoints": (
        Knob(name="ckpt", metavar="URL", default="none", help="Where: a directory, or a URL such as s3://bucket/run."),
        Knob(
            name="every",
            metavar="TIME|STEPS",
            default="60s; with partial auto",
            help="How often: 60s, 5m or 500steps. auto: as rarely as --target-pls allows.",
        ),
        Knob(name="full_every", type=int, help="With delta: every so many stands alone."),
        Knob(name="ckpt_keep_last", type=int, help="So many of the newest stay; of older ones, a full a day."),
        Knob(name="ckpt_encoding", type=CHOICE(("raw", "zstd")), help="zstd compresses; embeddings gain little."),
        Knob(name="ckpt_bits", type=int, help="8 or 4: fewer bits per value, approximate."),
        Knob(name="ckpt_bytes_per_s", type=BYTES, default="no limit", help="To storage, per server."),
        Knob(name="ckpt_pause", type=bool, help="Training waits while one is stored, to compare with."),
        Knob(name="resume", metavar="URL[@CUT]", default="from the start", help="Go on from a checkpoint."),
        Knob(
            name="silent_seconds",
            metavar="[ROLE=]T,...",
            default="server 1.5, worker 10, coordinator 5, spare 5",
            help="Silent for so long, a process counts as hung and is replaced: 30, or worker=30,spare=10.",
        ),
        Knob(
            name="patience",
            metavar="T",
            help="How long a hung server is waited for if rows would be lost without it: 60s, 10m.",
        ),
    ),
    "For those who answer look-ups": (
        Knob(
            name="publish",
            metavar="URL",
            default="nowhere",
            help="Weights that changed go there while training goes on; `regrow serve-rows URL` answers with them.",
        ),
        Knob(name="publish_every", metavar="TIME|STEPS", help="How often: 30s, 5m or 500steps."),
        Knob(name="publish_bits", type=int, help="8 or 4: fewer bits per value, approximate."),
    ),
    "Partial recovery": (
        Knob(name="target_pls", type=float, help="The share of training that may be lost, expected over the run."),
        Knob(
            name="priority",
            type=CHOICE(PRIORITIES),
            help="Which rows are saved first: changed most (scar), updated most often (mfu), a sample of those (ssu).",
        ),
        Knob(name="priority_share", type=float, metavar="SHARE", help="So much of the rows, so much more often."),
        Knob(name="priority_tables", metavar="NAMES", help="all, largest (99 % of the rows), or names with commas."),
        Knob(name="ssu_period", type=int, help="ssu looks at every so-many-th push."),
        Knob(
            name="expect_mtbf",
            metavar="T",
            default="--mtbf, or from failures",
            help="How often a server is expected to die: 14h.",
        ),
    ),
    "What goes wrong on purpose": (
        Knob(
            name="kill",
            metavar="ROLE:ID@step:N",
            repeated=True,
            default="nobody",
            help="SIGKILL at a step: server:2@step:100, worker:0@step:50, coordinator@step:60. Repeatable.",
        ),
        Knob(
            name="pause",
            metavar="ROLE:ID@step:N:Ts",
            repeated=True,
            default="nobody",
            help="SIGSTOP, and SIGCONT T seconds later: server:1@step:80:5s. Repeatable.",
        ),
        Knob(name="mtbf", type=float, default="never", help="Mean seconds between random kills, by --seed."),
        Knob(
            name="mtbf_shape",
            type=float,
            help="How their times are spread (gamma): 1 is exponential; 0.67, as published, has more short gaps.",
        ),
        Knob(name="mtbf_kill", type=int, help="So many servers die together; more than r need checkpoints."),
        Knob(name="mtbf_roles", metavar="ROLES", help="Whom they hit: some of server,worker,coordinator,spare."),
        Knob(name="mtbf_hangs", type=float, metavar="SHARE", help="How many of them hang instead of dying, 0 to 1."),
    ),
    "What to keep": (
        Knob(name="out", metavar="DIR", default="runs/DATE-TIME-MODEL", help="Run directory, new or empty."),
        Knob(name="digest", type=bool, help="Compute model_sha256 over all rows at the end."),
        Knob(name="step_digests", type=bool, help="Write digests of every step, to find where two runs part."),
        Knob(name="recovery_profile", type=bool, help="Servers measure what bringing rows back costs, by part."),
        Knob(name="step_profile", type=bool, help="Servers measure what steps cost, by part."),
        Knob(name="check_parity", type=bool, help="Compare every parity with its rows at the end."),
    ),
}


class TrainCommand(click.Command):
    """Help with options under headings: thirty in one list are none."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        records = {}
        for parameter in self.get_params(ctx):
            record = parameter.get_help_record(ctx)
            if record is not None and parameter.name is not None:
                records[parameter.name] = record
        for heading, knobs in KNOBS.items():
            shown = [records.pop(knob.name) for knob in knobs if knob.name in records]
            if shown:
                with formatter.section(heading):
                    formatter.write_dl(shown)
        with formatter.section("Other"):
            formatter.write_dl(list(records.values()))


def knob_options(function: Any, *, without: Collection[str] = ()) -> Any:
    """Adds an option for every knob but those. None means: not given, so the file or the default decides."""
    defaults = {field.name: field.default for field in dataclasses.fields(TrainConfig)}
    for knobs in reversed(KNOBS.values()):
        for knob in reversed([knob for knob in knobs if knob.name not in without]):
            default = knob.default or default_text(defaults[knob.name])
            text = knob.help.replace("{models}", ", ".join(configuration.model_names()))
            name = f"{knob.flag}/--no-{knob.flag[2:]}" if knob.type is bool else knob.flag
            kind: dict[str, Any] = {} if knob.type is bool else {"type": knob.type or str, "metavar": knob.shown}
            option = click.option(
                name, knob.name, default=None, multiple=knob.repeated, help=f"{text}  [{default}]", **kind
            )
            function = option(function)
    return function


def default_text(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int) and value >= MIB and value % MIB == 0:
        return f"{value // MIB}M"
    return str(value)


check_repeat_option = click.option(
    "--check-repeat", is_flag=True, help="Run it twice (--mode sync), and say in which step the two part, if they do."
)


detach_option = click.option("--detach", is_flag=True, help="With --cluster ray: leave it running, and return.")


@click.command(cls=TrainCommand, short_help="Train a model with servers and workers on this machine.")
@knob_options
@click.option("--config", "config_path", metavar="FILE", help="Options from a TOML file; the command line wins.")
@click.option("--overwrite", is_flag=True, help="Replace the run in --out.")
@click.option("-q", "--quiet", is_flag=True, help="No progress, no summary; errors only.")
@check_repeat_option
@detach_option
def train(
    config_path: str | None, overwrite: bool, quiet: bool, check_repeat: bool, detach: bool, **options: Any
) -> None:
    """Train a model with servers and workers on this machine.

    \b
    regrow train
    regrow train --data criteo:train.tsv.gz --epochs 1 --batch 512
    regrow train --data csv:ratings.csv --schema FILE.toml
    regrow train --mode sync --steps 100 --out runs/a
    regrow train --config runs/a/config.toml --servers 8
    regrow train --protect ec --kill server:2@step:100

    Leaves config.toml, metrics.jsonl, summary.json and logs/ in the run directory.
    """
    given = {name: value for name, value in options.items() if value not in (None, ())}
    if config_path is None:
        config = TrainConfig.from_dict(given)
    else:
        config = TrainConfig.from_toml(config_path, given, lambda text: print(f"hint: {text}", file=sys.stderr))
    start(config, overwrite=overwrite, quiet=quiet, check_repeat=check_repeat, detach=detach)


def start(config: TrainConfig, *, overwrite: bool, quiet: bool, check_repeat: bool, detach: bool) -> None:
    """A run, or two that are compared."""
    if detach and config.cluster == "local":
        raise UserError("--detach: a run on this machine ends with its terminal", hint="--cluster ray, or nohup")
    if config.cluster == "ray" and not check_repeat:
        jobs.start(config, overwrite=overwrite, quiet=quiet, detach=detach)
        return
    from regrow.launch import display, local, repeat  # late: numpy and rich

    if not check_repeat:
        local.train(config, overwrite=overwrite, display=display.choose(quiet=quiet))
        return
    repeat.check(config)
    found = repeat.run_twice(
        config, lambda each: local.train(each, overwrite=overwrite, display=display.choose(quiet=quiet))
    )
    if not quiet:
        print(found)


def name_flags(error: RegrowError) -> str:
    """A bad option is named as it was typed; one from a file as it stands there."""
    if isinstance(error, ConfigError) and error.message.startswith(f"{error.option} = "):
        flags = [knob.flag for knobs in KNOBS.values() for knob in knobs if knob.name == error.option]
        return f"{flags[0]} {error.value}: {error.problem}"
    return error.message
