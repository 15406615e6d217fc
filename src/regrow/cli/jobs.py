"""`regrow status`, `attach`, `stop` and `fetch`: runs on a cluster, from any terminal that reaches it.

And how `regrow train --cluster ray` starts one: as such a job, which the terminal then follows.
"""

from __future__ import annotations

import secrets
import sys
from pathlib import Path
from typing import Any

import click

from regrow.config import TrainConfig
from regrow.errors import RegrowError

address_option = click.option("--address", default="auto", metavar="HOST:PORT", help="Of the Ray cluster.  [auto]")


@click.command(short_help="What runs on a Ray cluster.")
@click.argument("job", required=False)
@address_option
def status(job: str | None, address: str) -> None:
    """Lists the jobs of a Ray cluster, or says how JOB is.

    \b
    regrow status
    regrow status mine --address HOST:6379
    """
    from regrow.launch import ray_connect, ray_jobs

    ray = ray_connect.connect(address)
    if job is not None:
        ray_jobs.find(ray, job)  # or an error that names those there are
    found = [each for each in ray_jobs.list_jobs(ray) if job in (None, each.name)]
    for each in found:
        print(f"{each.name}: {each.state}" + (f", {each.last}" if each.last else ""))
        if job is not None and each.directory:
            print(f"run directory: {each.directory} on {each.node}")
    if not found:
        print("no jobs")


@click.command(short_help="Follow a job on a Ray cluster.")
@click.argument("job")
@address_option
def attach(job: str, address: str) -> None:
    """Shows what JOB says, from the beginning, until it ends. Ctrl-C asks whether it shall stop."""
    from regrow.launch import ray_connect, ray_jobs

    ray = ray_connect.connect(address)
    follow(ray, ray_jobs.find(ray, job), job, quiet=False)


@click.command(short_help="Stop a job on a Ray cluster.")
@click.argument("job")
@click.option("--save", is_flag=True, help="Make a checkpoint first.")
@address_option
def stop(job: str, save: bool, address: str) -> None:
    """Ends JOB; its directory can be fetched for a day."""
    from regrow.launch import ray_connect, ray_jobs

    ray_jobs.stop(ray_connect.connect(address), job, save=save)
    print(f"{job} stops" + (" when its model is stored" if save else ""))


@click.command(short_help="Copy the run directory of a job on a Ray cluster.")
@click.argument("job")
@click.option("--out", required=True, metavar="DIR", help="New or empty.")
@address_option
def fetch(job: str, out: str, address: str) -> None:
    """Copies config.toml, metrics.jsonl, summary.json and logs/ of JOB from wherever they are."""
    from regrow.launch import ray_connect, ray_jobs

    count = ray_jobs.fetch(ray_connect.connect(address), job, Path(out))
    print(f"{count} files in {out}")


COMMANDS = (status, attach, stop, fetch)


# -- regrow train --cluster ray -----------------------------------------------------------------------------


def start(config: TrainConfig, *, overwrite: bool, quiet: bool, detach: bool) -> None:
    """Starts a job and follows it; or, with `detach`, leaves it when it has begun."""
    from regrow.launch import ray_connect, ray_job, ray_jobs

    ray = ray_connect.connect(config.address)
    name = config.job or f"{config.model_name}-{secrets.token_hex(3)}"
    job = ray_job.submit(ray, config, name=name, overwrite=overwrite)
    if not detach:
        follow(ray, job, name, quiet=quiet)
        return
    page = ray_jobs.follow(ray, job, name, lambda is_result, line: None, until_begun=True)
    raise_failure(page)
    print(f"job {name} is running: regrow attach {name}, regrow status {name}, regrow stop {name}")


def follow(ray: Any, job: Any, name: str, *, quiet: bool) -> None:
    from regrow.launch import ray_jobs

    def show(is_result: bool, line: str) -> None:
        if is_result or not quiet:
            print(line, file=sys.stdout if is_result else sys.stderr, flush=True)

    while True:
        try:
            page = ray_jobs.follow(ray, job, name, show)
            break
        except KeyboardInterrupt:
            if not ask_to_stop(name):
                print(f"job {name} goes on: regrow attach {name}", file=sys.stderr)
                return
            ray_jobs.stop(ray, name, save=False)
            show = lambda is_result, line: None  # noqa: E731 - it was shown before
    raise_failure(page)


def ask_to_stop(name: str) -> bool:
    """Where nobody can answer, it is left alone."""
    if not sys.stdin.isatty():
        return False
    try:
        answer = input(f"\nstop job {name}, or leave it running? [stop/LEAVE] ")
    except (EOFError, KeyboardInterrupt):
        return False
    return answer.strip().lower() in ("s", "stop")


def raise_failure(page: Any) -> None:
    if page.failure is not None:
        message, hint, exit_code = page.failure
        error = RegrowError(message, hint=hint)
        error.exit_code = exit_code
        raise error
