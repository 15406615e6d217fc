"""The `regrow` command: options in, one message or one result out, and an exit code.

    0  done      1  the run failed      2  bad usage      4  rows are lost for good
    5  the model is trained, and could not be stored: the last checkpoint failed
    130, 143  stopped by Ctrl-C, SIGTERM

A user's mistake is answered with "error: ..." and a hint, never with a traceback; REGROW_DEBUG=1 shows it all
the same. Whatever is slow to import is imported inside the commands, so that `--help` is quick. The options
of `train` are the fields of `TrainConfig`, in the table below; their defaults and checks are there, not here.
"""

from __future__ import annotations

import ast
import dataclasses
import importlib
import importlib.util
import inspect
import os
import signal
import sys
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import click

from regrow import config as configuration
from regrow.cli import ckpt as ckpt_cli
from regrow.config import MIB, TrainConfig
from regrow.errors import (
    EXIT_FAILED,
    EXIT_OK,
    EXIT_SIGNAL_BASE,
    EXIT_USAGE,
    ConfigError,
    Interrupted,
    RegrowError,
    UserError,
)

# Modules of regrow.bench.
BENCHES = ("kernels", "train", "accuracy", "overhead", "recovery", "checkpoint", "load", "soak")


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


class Bytes(click.ParamType):  # type: ignore[type-arg]
    """A number of bytes, as 67108864 or 64M."""

    name = "bytes"
    UNITS = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30}  # noqa: RUF012

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        if isinstance(value, int):
            return value
        text = str(value).lower().removesuffix("ib").removesuffix("b")
        number = text.rstrip("kmg")
        try:
            return int(float(number) * self.UNITS[text[len(number) :]])
        except (KeyError, ValueError, OverflowError):
            self.fail(f"{value!r} is not a number of bytes, such as 67108864 or 64M", param, ctx)


CHOICE = click.Choice
KNOBS: dict[str, tuple[Knob, ...]] = {
    "What to train": (
        Knob(
            name="data",
            metavar="DATA",
            help="synthetic, or criteo:PATH for a TSV in Criteo's format (also .gz).",
        ),
        Knob(name="model", metavar="NAME", help="A preset ({models}) or FILE.toml (dim, bottom, top)."),
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
            type=CHOICE(configuration.MODES),
            help="async: every push at once. sync: a step's pushes together, so the same bits in every run.",
        ),
        Knob(name="optimizer", type=CHOICE(configuration.OPTIMIZERS), help="Of the embedding rows."),
        Knob(name="learning_rate", type=float, default="by optimizer", help="Of the embedding rows."),
        Knob(name="dense_optimizer", type=CHOICE(configuration.DENSE_OPTIMIZERS), help="Of the dense network."),
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
            name="transport",
            type=CHOICE(configuration.TRANSPORTS),
            default="unix on Linux",
            help="Unix sockets in a private directory, or TCP on the loopback interface.",
        ),
        Knob(
            name="redo_bytes_max",
            type=Bytes(),
            flag_short="--redo-bytes",
            help="Pushes a worker may have that are not safe yet, before it waits.",
        ),
        Knob(name="frame_bytes_max", type=Bytes(), help="The largest message a process accepts."),
    ),
    "What to survive": (
        Knob(
            name="protection",
            type=CHOICE(configuration.PROTECTIONS),
            flag_short="--protect",
            help="What keeps rows when a process dies. none: the run ends. ec: erasure coding. full, delta: storage.",
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
        Knob(name="flush_bytes", type=Bytes(), help="... or when so many bytes of rows have changed."),
        Knob(
            name="commit",
            type=CHOICE(configuration.COMMITS),
            help="exactly-once; 2pc: the same in two phases per push (flushes every push); none: losses tolerated.",
        ),
        Knob(
            name="sweep_bytes_per_s",
            type=Bytes(),
            default="0, no limit",
            help="For bringing lost rows back, all servers together. A low one costs more training in all.",
        ),
    ),
    "Checkpoints": (
        Knob(name="ckpt", metavar="URL", default="none", help="Where: a directory, or a URL such as s3://bucket/run."),
        Knob(name="every", metavar="TIME|STEPS", help="How often: 60s, 5m or 500steps."),
        Knob(name="full_every", type=int, help="With delta: every so many stands alone."),
        Knob(name="ckpt_keep_last", type=int, help="So many of the newest stay; of older ones, a full a day."),
        Knob(name="ckpt_encoding", type=CHOICE(("raw", "zstd")), help="zstd compresses; embeddings gain little."),
        Knob(name="ckpt_bits", type=int, help="8 or 4: fewer bits per value, approximate."),
        Knob(name="ckpt_bytes_per_s", type=Bytes(), default="no limit", help="To storage, per server."),
        Knob(name="ckpt_pause", type=bool, help="Training waits while one is stored, to compare with."),
        Knob(name="resume", metavar="URL[@CUT]", default="from the start", help="Go on from a checkpoint."),
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
        Knob(name="mtbf_roles", metavar="ROLES", help="Whom they hit: some of server,worker,coordinator."),
    ),
    "What to keep": (
        Knob(name="out", metavar="DIR", default="runs/DATE-TIME-MODEL", help="Run directory, new or empty."),
        Knob(name="digest", type=bool, help="Compute model_sha256 over all rows at the end."),
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
            with formatter.section(heading):
                formatter.write_dl([records.pop(knob.name) for knob in knobs])
        with formatter.section("Other"):
            formatter.write_dl(list(records.values()))


def knob_options(function: Any) -> Any:
    """Adds an option for every knob. None means: not given, so the file or the default decides."""
    defaults = {field.name: field.default for field in dataclasses.fields(TrainConfig)}
    for knobs in reversed(KNOBS.values()):
        for knob in reversed(knobs):
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


def say_version(ctx: click.Context, param: click.Parameter, value: bool) -> None:
    if value:
        from regrow.launch.version import version

        print(f"regrow {version()}")
        ctx.exit()


@click.group(
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110},
    invoke_without_command=True,
)
@click.option("--version", is_flag=True, is_eager=True, expose_value=False, callback=say_version, help="The version.")
@click.pass_context
def cli(ctx: click.Context) -> None:
    """Trains recommendation models on parameter servers.

    \b
    regrow train                                   a first run, about a minute
    regrow train --data criteo:day_0.gz --model terabyte --servers 8
    regrow demo                                    lose a server, keep the model
    regrow bench kernels                           how fast this machine is
    regrow ckpt ls runs/a/checkpoints              what was saved
    """
    if ctx.invoked_subcommand is None:
        print(ctx.get_help(), file=sys.stderr)
        ctx.exit(EXIT_USAGE)


@cli.command(cls=TrainCommand, short_help="Train a model with servers and workers on this machine.")
@knob_options
@click.option("--config", "config_path", metavar="FILE", help="Options from a TOML file; the command line wins.")
@click.option("--overwrite", is_flag=True, help="Replace the run in --out.")
@click.option("-q", "--quiet", is_flag=True, help="No progress, no summary; errors only.")
def train(config_path: str | None, overwrite: bool, quiet: bool, **options: Any) -> None:
    """Train a model with servers and workers on this machine.

    \b
    regrow train
    regrow train --data criteo:train.tsv.gz --epochs 1 --batch 512
    regrow train --mode sync --steps 100 --out runs/a
    regrow train --config runs/a/config.toml --servers 8
    regrow train --protect ec --kill server:2@step:100

    Leaves config.toml, metrics.jsonl, summary.json and logs/ in the run directory.
    """
    given = {name: value for name, value in options.items() if value not in (None, ())}
    config = TrainConfig.from_dict(given) if config_path is None else TrainConfig.from_toml(config_path, given)
    from regrow.launch import display, local  # late: numpy and rich

    local.train(config, overwrite=overwrite, display=display.choose(quiet=quiet))


@cli.command(short_help="Lose a server half way and end with the same model, bit for bit.")
@click.option("--out", metavar="DIR", help="Run directories go here.  [runs/DATE-TIME-demo]")
@click.option("--steps", type=int, default=60, metavar="N", help="Of each run.  [60]")
@click.option("--overwrite", is_flag=True, help="Replace the runs in --out.")
@click.option("-q", "--quiet", is_flag=True, help="No progress; the result only.")
def demo(out: str | None, steps: int, overwrite: bool, quiet: bool) -> int:
    """Trains twice, undisturbed and with a server killed half way, and compares the two models."""
    from regrow.launch import demo as demonstration  # late: numpy and rich

    return demonstration.run(out=out, steps=steps, overwrite=overwrite, quiet=quiet)


@cli.command(
    "sim",
    short_help="Look for a schedule of failures that breaks the protocol.",
    context_settings={"ignore_unknown_options": True, "allow_extra_args": True},
    add_help_option=False,
)
@click.pass_context
def simulate(ctx: click.Context) -> Any:
    """Its options are its own: `regrow sim --help`."""
    from regrow.cli.sim import sim  # late: numpy and the core

    return sim.main(ctx.args, prog_name="regrow sim", standalone_mode=False)


cli.add_command(ckpt_cli.ckpt)
cli.add_command(ckpt_cli.merge)


class BenchCommand(click.Command):
    """Lists the benchmarks, in their own words."""

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Names"):
            formatter.write_dl([(name, bench_summary(name)) for name in BENCHES])


@cli.command(cls=BenchCommand, short_help="Measure one thing on this machine.")
@click.argument("name", type=click.Choice(BENCHES))
@click.option("--json", "json_path", metavar="FILE", help="Write the figures there too.")
@click.option("--quick", is_flag=True, help="About a minute or less, smaller; the figures are rough.")
@click.option("--data", metavar="PATH", help="Real clicks in Criteo's format (accuracy, load).")
@click.option("--minutes", type=float, metavar="X", help="How long it goes on, about (soak).  [10]")
@click.option("--mtbf", type=float, metavar="X", help="Mean seconds between random kills (soak).  [20]")
@click.option("--docs", metavar="DIR", help="Draw the picture there too (overhead, recovery, checkpoint).")
def bench(name: str, json_path: str | None, quick: bool, **further: Any) -> int:
    """Measure one thing on this machine."""
    try:
        module = bench_module(name)
    except ImportError as error:
        raise UserError(f"bench {name} cannot be run: {error}") from error
    options = {option: value for option, value in further.items() if value is not None}
    for option in options.keys() - inspect.signature(module.run).parameters.keys():
        raise UserError(f"bench {name} takes no --{option}")
    return int(module.run(quick=quick, json_path=json_path, **options))


def bench_module(name: str) -> Any:
    return importlib.import_module(f"regrow.bench.{name}")


def bench_summary(name: str) -> str:
    """The module's SUMMARY, read and not run: help must not load torch."""
    spec = importlib.util.find_spec(f"regrow.bench.{name}")
    if spec is None or spec.origin is None:
        return "(not installed)"
    with open(spec.origin, encoding="utf-8") as source:
        tree = ast.parse(source.read())
    for node in tree.body:
        if isinstance(node, ast.Assign) and [ast.unparse(target) for target in node.targets] == ["SUMMARY"]:
            return str(ast.literal_eval(node.value))
    return ""


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """The entry point: every way out of the program passes here."""
    try:
        code = run(arguments)
    except KeyboardInterrupt:  # another one, while the first was being answered
        code = EXIT_SIGNAL_BASE + signal.SIGINT
    # From here on there is nothing left to interrupt, only an exit code to lose.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    sys.exit(code)


def run(arguments: Sequence[str] | None = None) -> int:
    """As `main`, but returns the exit code."""
    debug = os.environ.get("REGROW_DEBUG", "") not in ("", "0")
    try:
        # A command's return value is its exit code; None is a success.
        return cli.main(args=arguments, prog_name="regrow", standalone_mode=False) or EXIT_OK
    except click.UsageError as error:
        say_error(error.format_message(), usage_hint(error))
        return EXIT_USAGE
    except click.exceptions.Exit as error:
        return error.exit_code
    except click.ClickException as error:
        say_error(error.format_message())
        return EXIT_FAILED
    except (click.Abort, KeyboardInterrupt):
        print("interrupted", file=sys.stderr)
        return EXIT_SIGNAL_BASE + signal.SIGINT
    except Interrupted as error:
        print(error.message, file=sys.stderr)
        return error.exit_code
    except RegrowError as error:
        if debug:
            traceback.print_exc()
        say_error(as_flags(error), error.hint)
        return error.exit_code
    except BrokenPipeError:
        # The reader of our stdout went away (`| head`): nothing is wrong, and nothing more can be said.
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return EXIT_FAILED
    except Exception as error:
        if debug:
            raise
        say_error(f"a bug in regrow: {type(error).__name__}: {error}", "REGROW_DEBUG=1 shows where")
        return EXIT_FAILED


def say_error(message: str, hint: str | None = None) -> None:
    print(f"error: {message}", file=sys.stderr)
    if hint:
        print(f"hint: {hint}", file=sys.stderr)


def as_flags(error: RegrowError) -> str:
    """A bad option is named as it was typed; one from a file as it stands there."""
    if isinstance(error, ConfigError) and error.message.startswith(f"{error.option} = "):
        flags = [knob.flag for knobs in KNOBS.values() for knob in knobs if knob.name == error.option]
        return f"{flags[0]} {error.value}: {error.problem}"
    return error.message


def usage_hint(error: click.UsageError) -> str | None:
    command = error.ctx.command_path if error.ctx is not None else "regrow"
    return f"`{command} --help` lists what there is"


if __name__ == "__main__":
    main()
