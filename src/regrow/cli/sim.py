"""The `sim` command: many schedules, and for the first that fails the shortest tape that still does.

regrow sim --seeds 1000 --profile all
regrow sim --replay async:2_14_1(70)3 --story row=7
"""

from __future__ import annotations

import collections
import multiprocessing
import signal
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import click

from regrow.errors import EXIT_FAILED, UserError
from regrow.sim.profiles import PROFILES

PROGRESS_AFTER_SECONDS = 2.0
SHRINK_SECONDS = 60.0


@click.command()
@click.option("--seeds", default=200, show_default=True, type=click.IntRange(1), help="Schedules to run.")
@click.option("--seed-first", default=0, show_default=True, type=click.IntRange(0), help="The first seed.")
@click.option(
    "--profile", default="all", show_default=True, type=click.Choice([*PROFILES, "all"]), help="What it is about."
)
@click.option("--replay", metavar="TAPE", help="Run one tape again: a file, or the text that a failure prints.")
@click.option("--story", metavar="row=N", help="Print the life of one row (row=7, or row=1:7 for table 1).")
@click.option("--plant", metavar="NAME", help="Put a known bug into the core first; 'list' names them.")
@click.option("--jobs", default=1, show_default=True, type=click.IntRange(1, 64), help="Processes.")
def sim(
    seeds: int, seed_first: int, profile: str, replay: str | None, story: str | None, plant: str | None, jobs: int
) -> None:
    """Run the real protocol under a deterministic simulator of failures.

    Every schedule is a function of its tape; a failure is printed as a tape, and --replay runs it again.
    """
    from regrow.sim import planted

    if plant == "list":
        for name, bug in planted.BUGS.items():
            click.echo(f"{name:28} {bug.what}")
        return
    if plant is not None and plant not in planted.BUGS:
        raise UserError(f"there is no planted bug {plant!r}", hint=f"One of: {', '.join(planted.BUGS)}.")
    if replay is not None or story is not None:
        failed = _run_one(profile, seed_first, replay, story, plant)
    else:
        failed = _run_many(profile, seeds, seed_first, plant, jobs)
    if failed:
        sys.exit(EXIT_FAILED)


# --- One run ---


def _run_one(profile: str, seed: int, replay: str | None, story: str | None, plant: str | None) -> bool:
    from regrow.sim import planted, runner
    from regrow.sim.story import Story, parse_story

    try:
        place = parse_story(story) if story is not None else None
        tape: list[int] = []
        if replay is not None:
            path = Path(replay)
            text = path.read_text() if len(replay) < 200 and path.is_file() else replay
            profile, tape = runner.parse_replay(text)
        elif profile == "all":
            raise ValueError("a story needs one run: --replay TAPE, or --profile with --seed-first")
        told = Story(*place) if place is not None else None
        with planted.plant(plant):
            result = runner.run(
                profile,
                seed=None if replay is not None else seed,
                tape=tape,
                note=told.note if told is not None else None,
                watch=told.watch if told is not None else None,
            )
    except ValueError as error:
        raise UserError(str(error)) from None
    if told is not None:
        click.echo("\n".join(told.lines))
    crashes = ", ".join(f"{count} {role}" for role, count in result.crashes.items())
    click.echo(f"{profile}: {result.events} events, crashes: {crashes}, log {result.digest}")
    if result.invariant:
        click.echo(f"violated {result.text}")
    return bool(result.invariant)


# --- Many runs ---


def _run_task(task: tuple[str, int, str | None]) -> Any:
    from regrow.sim import planted, runner

    profile, seed, plant = task
    with planted.plant(plant):
        return seed, runner.run(profile, seed=seed)


def _ignore_interrupts() -> None:
    """Ctrl-C is for the parent, which ends its children."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def _run_many(profile: str, seeds: int, seed_first: int, plant: str | None, jobs: int) -> bool:
    names = list(PROFILES) if profile == "all" else [profile]
    tasks = [(names[index % len(names)], seed_first + index // len(names), plant) for index in range(seeds)]
    started = time.monotonic()
    totals = _Totals()
    try:
        failure = _run_all(tasks, jobs, totals, started)
    except KeyboardInterrupt:
        click.echo(f"\nstopped after {totals.runs} schedules")
        sys.exit(130)
    totals.print(time.monotonic() - started)
    if failure is None:
        click.echo("no violation")
        return False
    seed, result = failure
    click.echo(f"\nseed {seed} of profile {result.profile} violates {result.text}")
    _shrink_and_tell(result, plant)
    return True


def _run_all(tasks: list[tuple[str, int, str | None]], jobs: int, totals: _Totals, started: float) -> Any:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    console = Console(stderr=True)
    progress = Progress(
        TextColumn("schedules"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[rate]}"),
        TimeRemainingColumn(),
        console=console,
        disable=not console.is_terminal,
    )
    bar = progress.add_task("schedules", total=len(tasks), rate="")
    pool = multiprocessing.get_context("fork").Pool(jobs, _ignore_interrupts) if jobs > 1 else None
    shown = False
    try:
        results = pool.imap(_run_task, tasks, chunksize=4) if pool is not None else map(_run_task, tasks)
        for seed, result in results:
            totals.add(result)
            seconds = time.monotonic() - started
            if not shown and seconds > PROGRESS_AFTER_SECONDS:
                progress.start()
                shown = True
            progress.update(bar, completed=totals.runs, rate=f"{totals.runs / seconds:.0f}/s")
            if result.invariant:
                return seed, result
    finally:
        if shown:
            progress.stop()
        if pool is not None:
            pool.terminate()
            pool.join()
    return None


def _shrink_and_tell(result: Any, plant: str | None) -> None:
    from regrow.sim import planted, runner
    from regrow.sim.shrink import shrink, strip

    def fails(tape: list[int]) -> bool:
        with planted.plant(plant):
            return bool(runner.run(result.profile, tape=tape).invariant == result.invariant)

    click.echo(f"shrinking its tape of {len(strip(result.tape))} choices, at most {SHRINK_SECONDS:.0f} s ...")
    tape = shrink(result.tape, fails, seconds_max=SHRINK_SECONDS)
    with planted.plant(plant):
        short = runner.run(result.profile, tape=tape)
    short.tape = tape
    kept = sum(value != 0 for value in tape)
    click.echo(f"{len(tape)} choices are left, {kept} of them not dull: violates {short.text}")
    extra = f" --plant {plant}" if plant else ""
    click.echo(f"\nTo see it again:\n  regrow sim --replay '{short.name}'{extra}")


class _Totals:
    """Sums over all runs."""

    def __init__(self) -> None:
        self.runs = 0
        self.events = 0
        self.crashes: Counter[str] = collections.Counter()
        self.probes: Counter[str] = collections.Counter()

    def add(self, result: Any) -> None:
        self.runs += 1
        self.events += result.events
        self.crashes.update(result.crashes)
        self.probes.update(result.probes)

    def print(self, seconds: float) -> None:
        from regrow.sim.probes import PROBES

        crashes = ", ".join(f"{count} of {role}s" for role, count in self.crashes.items())
        click.echo(f"{self.runs} schedules, {self.events} events in {seconds:.1f} s ({self.runs / seconds:.0f}/s)")
        click.echo(f"crashes: {crashes or 'none'}; recoveries: {self.probes['recovered']}")
        click.echo("probes: " + ", ".join(f"{name} {self.probes[name]}" for name in PROBES if self.probes[name]))
        if missing := [name for name in PROBES if not self.probes[name]]:
            click.echo(f"not reached: {', '.join(missing)}")
