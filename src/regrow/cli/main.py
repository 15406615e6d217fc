"""The `regrow` command: the group of all commands, and what happens when one fails. One message, and an exit code:

    0  done      1  the run failed      2  bad usage      4  rows are lost for good
    5  the model is trained, and could not be stored: the last checkpoint failed
    130, 143  stopped by Ctrl-C, SIGTERM

A user's mistake is answered with "error: ..." and a hint, never with a traceback; REGROW_DEBUG=1 shows it all the same.
There is a module for each command. Whatever is slow to import is imported inside the commands, so that `--help` is
quick (a test looks).
"""

from __future__ import annotations

import os
import signal
import sys
import traceback
from collections.abc import Sequence
from typing import Any, NoReturn

import click

from regrow.cli import ckpt, jobs
from regrow.cli.bench import bench
from regrow.cli.demo import demo
from regrow.cli.init import init
from regrow.cli.kill import kill
from regrow.cli.lead import lead
from regrow.cli.plan import plan
from regrow.cli.run import run as run_script
from regrow.cli.serve import serve
from regrow.cli.serve_rows import serve_rows
from regrow.cli.train import name_flags, train
from regrow.config import RENAMED
from regrow.errors import EXIT_FAILED, EXIT_OK, EXIT_SIGNAL_BASE, EXIT_USAGE, Interrupted, RegrowError


def print_version(ctx: click.Context, param: click.Parameter, value: bool) -> None:
    if value:
        from regrow.launch.version import version

        print(f"regrow {version()}")
        ctx.exit()


@click.group(
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110},
    invoke_without_command=True,
)
@click.option("--version", is_flag=True, is_eager=True, expose_value=False, callback=print_version, help="The version.")
@click.pass_context
def cli(ctx: click.Context) -> None:
    """Trains recommendation models on parameter servers.

    \b
    regrow train                                   a first run, about a minute
    regrow train --data criteo:day_0.gz --model terabyte --servers 8
    regrow init mine                               a script of your own, to begin with
    regrow run --protect ec train.py               and how it runs
    regrow demo                                    lose a server, keep the model
    regrow kill runs/a server:2                    lose one of a run that goes on
    regrow lead, regrow serve                      the same on hosts of your own
    regrow bench kernels                           how fast this machine is
    regrow ckpt ls runs/a/checkpoints              what was saved
    regrow plan partial --servers 8                how often to save, and why
    """
    if ctx.invoked_subcommand is None:
        print(ctx.get_help(), file=sys.stderr)
        ctx.exit(EXIT_USAGE)


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


COMMANDS = (train, run_script, lead, serve, init, demo, kill, bench, ckpt.ckpt, ckpt.merge, plan, serve_rows)
for command in (*COMMANDS, *jobs.COMMANDS):
    cli.add_command(command)


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
        say_error(name_flags(error), error.hint)
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


def usage_hint(error: click.UsageError) -> str | None:
    if isinstance(error, click.NoSuchOption) and (name := error.option_name.lstrip("-").replace("-", "_")) in RENAMED:
        return f"it is called --{RENAMED[name].replace('_', '-')} now"
    command = error.ctx.command_path if error.ctx is not None else "regrow"
    return f"`{command} --help` lists what there is"


if __name__ == "__main__":
    main()
