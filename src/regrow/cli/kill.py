"""`regrow kill`: what `--kill` does at a step, by hand."""

from __future__ import annotations

import click


@click.command(short_help="Kill a process of a run that goes on: server:2, worker:0, coordinator.")
@click.argument("run")
@click.argument("who", metavar="PROCESS")
def kill(run: str, who: str) -> None:
    """Kills one process of a run (SIGKILL), to see what becomes of it. Other runs on this machine are left alone.

    RUN is the directory of the run, or its name under runs/.

    \b
    regrow kill runs/a server:2
    regrow kill a worker:0
    regrow kill a coordinator
    """
    from regrow.launch import running  # late: numpy

    path, process = running.kill(run, who)
    print(f"killed {process.role} of {path} (process {process.pid})")
