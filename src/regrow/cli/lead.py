"""`regrow lead`: a run whose processes are on hosts of your own, where `regrow serve` keeps places for them."""

from __future__ import annotations

from typing import Any

import click

from regrow.cli.serve import check_address
from regrow.cli.train import TrainCommand, knob_options
from regrow.config import TrainConfig
from regrow.errors import UserError


def make_new_token(ctx: click.Context, param: click.Parameter, value: str | None) -> None:
    if value is not None:
        from regrow.launch.token import make_token

        make_token(value)
        ctx.exit()


def lead_options(function: Any) -> Any:
    return knob_options(function, without=("transport",))


@click.command(cls=TrainCommand, short_help="Train on hosts of your own, where `regrow serve` keeps places.")
@lead_options
@click.option("--config", "config_path", metavar="FILE", help="Options from a TOML file; the command line wins.")
@click.option("--listen", default="0.0.0.0:7000", show_default=True, metavar="HOST:PORT", help="Where places come to.")
@click.option("--token-file", required=True, metavar="FILE", help="The run's token; nobody else can read it.")
@click.option(
    "--new-token",
    metavar="FILE",
    callback=make_new_token,
    is_eager=True,
    expose_value=False,
    help="Make a token file, and nothing else.",
)
@click.option("--overwrite", is_flag=True, help="Replace the run in --out.")
@click.option("-q", "--quiet", is_flag=True, help="No progress, no summary; errors only.")
@click.argument("script", nargs=-1, type=click.UNPROCESSED, metavar="[SCRIPT [ARGS]...]")
def lead(
    config_path: str | None,
    listen: str,
    token_file: str,
    overwrite: bool,
    quiet: bool,
    script: tuple[str, ...],
    **options: Any,
) -> None:
    """Trains on hosts of your own. The lead does what `regrow train` does, but starts no process: it waits until
    `regrow serve` has come from every host, says what runs where, and who succeeds whom.

    \b
    regrow lead --new-token token
    regrow lead --token-file token --servers 5 --workers 2 --protect ec
    regrow lead --token-file token --resume ckpt --servers 7
    """
    from regrow.launch import display, local  # late: numpy and rich
    from regrow.launch.hosts import HostBackend
    from regrow.launch.token import read_token

    given = {name: value for name, value in options.items() if value not in (None, ())}
    given |= {"transport": "tcp", **({"script": script} if script else {})}
    config = TrainConfig.from_dict(given) if config_path is None else TrainConfig.from_toml(config_path, given)
    if config.store != "memory":
        problem = "nobody looks at the directories of hosts before processes start there, or clears them"
        raise UserError(f"--store {config.store}: {problem}", hint="leave --store out, or use --cluster ray")
    address = check_address(listen)
    token = read_token(token_file)
    shown = display.choose(quiet=quiet)

    def make_backend(logs: Any) -> HostBackend:
        backend = HostBackend(address=address, token=token, logs=logs, say=shown.say, tls=config.tls)
        shown.say(f"places come to {backend.address.removeprefix('tcp:')}")
        return backend

    local.train(
        config,
        overwrite=overwrite,
        display=shown,
        patience=local.Patience(listen=local.PLACES_SECONDS_MAX),
        memory_check=False,
        token=token,
        make_backend=make_backend,
    )
