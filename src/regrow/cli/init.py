"""`regrow init DIR`: a script and a configuration to begin with."""

from __future__ import annotations

from pathlib import Path

import click

from regrow.errors import UserError

STARTER = Path(__file__).parents[1] / "starter"
FILES = {"train.py": "train.py.txt", "regrow.toml": "regrow.toml"}  # as they are called in the package


@click.command(short_help="Write a script and a configuration to begin with.")
@click.argument("directory", metavar="DIR", type=click.Path(path_type=Path))
def init(directory: Path) -> None:
    """Write a script and a configuration to begin with.

    A click model on made-up data that trains as it is, alone and with `regrow run`. Nothing that is there is replaced.
    """
    there = [name for name in FILES if (directory / name).exists()]
    if there:
        raise UserError(f"{directory / there[0]} is there already", hint="choose another directory")
    try:
        directory.mkdir(parents=True, exist_ok=True)
        for name, source in FILES.items():
            (directory / name).write_bytes((STARTER / source).read_bytes())
    except OSError as error:
        raise UserError(f"cannot write {error.filename}: {error.strerror}") from None
    click.echo(f"{' and '.join(str(directory / name) for name in FILES)}. Next:\n")
    click.echo(f"  cd {directory}")
    click.echo("  python train.py                              # alone, in one process")
    click.echo("  regrow run --config regrow.toml train.py     # servers and workers; kill -9 any of them")
