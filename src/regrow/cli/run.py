"""`regrow run script.py ARGS`: somebody's own script, with servers, protection and everything else of `regrow train`.

The options are those of `regrow train` but for what a script decides by itself. Everything behind the script is the
script's.
"""

from __future__ import annotations

from typing import Any

import click

from regrow.checks import SCRIPTS_OWN
from regrow.cli.train import TrainCommand, check_repeat_option, detach_option, knob_options, start
from regrow.config import TrainConfig
from regrow.errors import UserError

# Besides what the configuration refuses with a script: options that are about models and data of ours.
NOT_FOR_SCRIPTS = (
    *SCRIPTS_OWN,
    *("batch", "skew", "skip_bad_lines", "optimizer", "learning_rate", "dense_optimizer", "dense_learning_rate"),
    "device",
)


def run_options(function: Any) -> Any:
    return knob_options(function, without=NOT_FOR_SCRIPTS)


@click.command(
    cls=TrainCommand,
    short_help="Run a script of your own with servers and workers.",
    context_settings={"ignore_unknown_options": False, "allow_interspersed_args": False},
)
@run_options
@click.option("--config", "config_path", metavar="FILE", help="Options from a TOML file; the command line wins.")
@click.option("--overwrite", is_flag=True, help="Replace the run in --out.")
@click.option("-q", "--quiet", is_flag=True, help="No progress, no summary; what the script prints, and errors.")
@check_repeat_option
@detach_option
@click.option("-m", "module", is_flag=True, help="SCRIPT is the name of a module.")
@click.argument("script", nargs=-1, type=click.UNPROCESSED, metavar="SCRIPT [ARGS]...")
def run(
    config_path: str | None,
    overwrite: bool,
    quiet: bool,
    check_repeat: bool,
    detach: bool,
    module: bool,
    script: tuple[str, ...],
    **options: Any,
) -> None:
    """Run a script of your own with servers and workers.

    \b
    regrow run train.py --lr 0.1
    regrow run --servers 5 --workers 2 --protect ec train.py
    regrow run --mode sync --protect ec+delta --ckpt ckpt --every 10s --kill server:2@step:100 train.py
    regrow run --resume ckpt --servers 7 -m mypackage.train
    regrow run --mode sync --check-repeat train.py

    In the script, `job = regrow.join()` is this worker's part of the run; see docs/scripts.md. `python train.py` runs
    the same script alone, in one process.
    """
    given = {name: value for name, value in options.items() if value not in (None, ())}
    if script:
        given["script"] = ("-m", *script) if module else script
    config = TrainConfig.from_dict(given) if config_path is None else TrainConfig.from_toml(config_path, given)
    if not config.script:
        raise UserError("no script is named", hint="regrow run train.py, or -m package.module")
    start(config, overwrite=overwrite, quiet=quiet, check_repeat=check_repeat, detach=detach)
