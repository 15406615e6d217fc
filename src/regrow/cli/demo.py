"""`regrow demo`: a server is lost half way, and the model is the same."""

from __future__ import annotations

import click


@click.command(short_help="Lose a server half way and end with the same model, bit for bit.")
@click.option("--out", metavar="DIR", help="Run directories go here.  [runs/DATE-TIME-demo]")
@click.option("--steps", type=int, default=60, metavar="N", help="Of each run.  [60]")
@click.option("--overwrite", is_flag=True, help="Replace the runs in --out.")
@click.option("-q", "--quiet", is_flag=True, help="No progress; the result only.")
def demo(out: str | None, steps: int, overwrite: bool, quiet: bool) -> int:
    """Trains twice, undisturbed and with a server killed half way, and compares the two models."""
    from regrow.launch import demo as demonstration  # late: numpy and rich

    return demonstration.run(out=out, steps=steps, overwrite=overwrite, quiet=quiet)
