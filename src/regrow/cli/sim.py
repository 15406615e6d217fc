"""The `sim` command: many schedules, and for the first that fails the shortest tape that still does.

regrow sim --seeds 1000 --profile all
regrow sim --replay async:2_14_1(70)3 --story row=7
regrow sim --minutes 30 --jobs 2 --record FILE
"""

from __future__ import annotations

import collections
import dataclasses
import datetime
import itertools
import logging
import multiprocessing
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

from regrow.cli import sim_record
from regrow.errors import EXIT_FAILED, UserError
from regrow.sim.profiles import PROFILES, STORAGE

PROGRESS_AFTER_SECONDS = 2.0
LINE_SECONDS = 60.0  # between two lines of progress, where nobody watches
END_SECONDS_MAX = 5.0  # for the processes to end, before they are killed
CHUNK = 4  # schedules that a process takes at a time
SHRINK_SECONDS = 60.0


@click.command(context_settings={"help_option_names": ["-h", "--help"]})  # it is called without a parent's context
@click.option("--seeds", default=200, show_default=True, type=click.IntRange(1), help="Schedules to run.")
@click.option("--seed-first", default=0, show_default=True, type=click.IntRange(0), help="The first seed.")
@click.option(
    "--profile",
    default="all",
    show_default=True,
    type=click.Choice([*PROFILES, STORAGE, "all"]),
    help="What it is about.",
)
@click.option("--replay", metavar="TAPE", help="Run one tape again: a file, or the text that a failure prints.")
@click.option("--story", metavar="row=N", help="Print the life of one row (row=7, or row=1:7 for table 1).")
@click.option("--plant", metavar="NAME", help="Put a known bug into the core first; 'list' names them.")
@click.option("--jobs", default=1, show_default=True, type=click.IntRange(1, 64), help="Processes.")
@click.option("--minutes", type=click.FloatRange(0, min_open=True), help="Run for so long, instead of --seeds.")
@click.option(
    "--record",
    metavar="FILE",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Run seeds that this file has not counted yet, add them to it, and go on after a violation.",
)
@click.option("--show", is_flag=True, help="Print what --record FILE has counted, and run nothing.")
def sim(
    seeds: int,
    seed_first: int,
    profile: str,
    replay: str | None,
    story: str | None,
    plant: str | None,
    jobs: int,
    minutes: float | None,
    record: Path | None,
    show: bool,
) -> None:
    """Run the real protocol under a deterministic simulator of failures.

    Every schedule is a function of its tape; a failure is printed as a tape, and --replay runs it again.
    """
    from regrow.sim import planted

    _check_together()
    # The storage of simulated runs fails on purpose: what is said of that is said to nobody.
    logging.getLogger("regrow").addHandler(logging.NullHandler())
    if show:
        assert record is not None
        sim_record.show(record)
        return
    if plant == "list":
        for name, bug in planted.list_bugs().items():
            click.echo(f"{name:28} {bug.what}")
        return
    if plant is not None and plant not in planted.list_bugs():
        raise UserError(f"there is no planted bug {plant!r}", hint=f"One of: {', '.join(planted.list_bugs())}.")
    if replay is not None or story is not None:
        failed = _run_one(profile, seed_first, replay, story, plant)
    else:
        limit = _Limit(schedules=seeds if minutes is None else None, seconds=None if minutes is None else 60 * minutes)
        if record is not None:
            failed = _run_recorded(profile, limit, jobs, record)
        else:
            failed = _run_many(profile, seed_first, limit, plant, jobs)
    if failed:
        sys.exit(EXIT_FAILED)


def _check_together() -> None:
    """Options that contradict each other are no wish that could be guessed."""
    context = click.get_current_context()
    given = {name for name in context.params if context.get_parameter_source(name) is ParameterSource.COMMANDLINE}
    if "show" in given and "record" not in given:
        raise UserError("--show needs --record FILE")
    for one, others, why in (
        ("minutes", ("seeds",), "a run ends after so many minutes, or so many seeds"),
        (
            "record",
            ("seed_first", "plant", "replay", "story"),
            "a record counts seeds of its own, of the core as it is",
        ),
        ("replay", ("minutes",), "one tape is one run"),
        ("story", ("minutes",), "a story is of one run"),
    ):
        for other in others:
            if one in given and other in given:
                raise UserError(
                    f"--{one} and --{other.replace('_', '-')} do not go together", hint=f"{why[0].upper()}{why[1:]}."
                )


# --- One run ---


def _run_one(profile: str, seed: int, replay: str | None, story: str | None, plant: str | None) -> bool:
    from regrow.sim import planted, runner
    from regrow.sim.shelf import Record
    from regrow.sim.story import Story, parse_story

    try:
        tape: list[int] = []
        if replay is not None:
            path = Path(replay)
            text = path.read_text() if len(replay) < 200 and path.is_file() else replay
            profile, tape = runner.parse_replay(text)
        elif profile == "all":
            raise ValueError("a story needs one run: --replay TAPE, or --profile with --seed-first")
        told: Story | Record | None = None
        if story is not None:  # where there are no servers, all of it is told
            told = Record() if profile == STORAGE else Story(*parse_story(story))
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


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Limit:
    """When many runs are enough: one of the two."""

    schedules: int | None = None
    seconds: float | None = None


Task = tuple[str, int, str | None]  # profile, seed, plant


def _run_task(task: Task) -> Any:
    from regrow.sim import planted, runner

    profile, seed, plant = task
    started = time.process_time()
    with planted.plant(plant):
        result = runner.run(profile, seed=seed)
    return seed, result, time.process_time() - started


def _ignore_interrupts() -> None:
    """Ctrl-C is for the parent, which ends its children."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def _list_tasks(profile: str, seed_first: int, limit: _Limit, plant: str | None) -> Iterator[Task]:
    """All profiles in turn, each with the next seed."""
    names = [*PROFILES, STORAGE] if profile == "all" else [profile]
    for index in range(limit.schedules) if limit.schedules is not None else itertools.count():
        yield names[index % len(names)], seed_first + index // len(names), plant


def _run_many(profile: str, seed_first: int, limit: _Limit, plant: str | None, jobs: int) -> bool:
    totals = _Totals()
    failures: list[Any] = []

    def take(seed: int, result: Any, processor_seconds: float) -> bool:
        if result.invariant:
            failures.append((seed, result))
        return not failures

    _run_all(_list_tasks(profile, seed_first, limit, plant), jobs, limit, totals, take)
    totals.print()
    if not failures:
        click.echo("no violation")
        return False
    seed, result = failures[0]
    click.echo(f"\nseed {seed} of profile {result.profile} violates {result.text}")
    _shrink_and_tell(result, plant)
    return True


def _run_recorded(profile: str, limit: _Limit, jobs: int, path: Path) -> bool:
    """New seeds, added to a record. Findings are kept there; the run goes on."""
    totals = _Totals()
    with sim_record.open_record(path, jobs=jobs) as keeper:
        _run_all(_list_tasks(profile, keeper.seed_first, limit, None), jobs, limit, totals, keeper.add)
    totals.print()
    keeper.print_findings()
    return bool(keeper.sitting.findings)


def _run_all(
    tasks: Iterator[Task], jobs: int, limit: _Limit, totals: _Totals, take: Callable[[int, Any, float], bool]
) -> None:
    """Runs tasks until there are no more, the time is up, or `take` has enough. Results come in the order of tasks."""
    pool = multiprocessing.get_context("fork").Pool(jobs, _ignore_interrupts) if jobs > 1 else None
    progress = _Progress(limit, totals)
    try:
        results = pool.imap(_run_task, tasks, chunksize=CHUNK) if pool is not None else map(_run_task, tasks)
        for seed, result, processor_seconds in results:
            totals.add(result)
            progress.update()
            if not take(seed, result, processor_seconds):
                return
            if limit.seconds is not None and totals.seconds >= limit.seconds:
                return
    except KeyboardInterrupt:
        click.echo(f"\nstopped after {totals.runs} schedules")
        sys.exit(130)
    finally:
        progress.stop()
        if pool is not None:
            _end_pool(pool)


def _end_pool(pool: Any) -> None:
    """A pool may lock up while it ends, if its queue is full at a bad moment: then its processes are killed."""
    ending = threading.Thread(target=pool.terminate, daemon=True)
    ending.start()
    ending.join(END_SECONDS_MAX)
    if ending.is_alive():
        for child in multiprocessing.active_children():
            child.kill()


class _Progress:
    """A line that lives while the runs go on; where nobody watches, a plain one now and then."""

    def __init__(self, limit: _Limit, totals: _Totals) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn

        self._limit = limit
        self._totals = totals
        self._console = Console(stderr=True)
        self._bar = Progress(BarColumn(), TextColumn("{task.fields[text]}"), console=self._console)
        self._whole = limit.seconds if limit.seconds is not None else float(limit.schedules or 1)
        self._task = self._bar.add_task("schedules", total=self._whole, text="")
        self._next = PROGRESS_AFTER_SECONDS
        self._shown = False

    def update(self) -> None:
        seconds = self._totals.seconds
        if seconds < self._next:
            return
        done = seconds if self._limit.seconds is not None else float(self._totals.runs)
        left = (self._whole - done) * seconds / max(done, 1e-9)
        totals = self._totals
        text = (
            f"{totals.runs:,} schedules, {totals.events / seconds:,.0f} events/s, {totals.findings} findings, "
            f"{datetime.timedelta(seconds=max(0, round(left)))} left"
        )
        if not self._console.is_terminal:
            self._next = seconds + LINE_SECONDS
            if seconds >= LINE_SECONDS:
                click.echo(text, err=True)
            return
        self._next = seconds + 0.2
        if not self._shown:
            self._bar.start()
            self._shown = True
        self._bar.update(self._task, completed=done, text=text)

    def stop(self) -> None:
        if self._shown:
            self._bar.stop()


def _shrink_and_tell(result: Any, plant: str | None) -> None:
    from regrow.sim import planted, runner
    from regrow.sim.shrink import shrink

    def fails(tape: list[int]) -> bool:
        with planted.plant(plant):
            return bool(runner.run(result.profile, tape=tape).invariant == result.invariant)

    if not fails(result.tape):
        # As bad as what was found: a run that is no function of its tape (I10). The tape is all that is left of it.
        click.echo(f"its tape does not show it again, which violates I10: {result.name}")
        return
    click.echo(f"shrinking its tape of {len(result.tape)} choices, at most {SHRINK_SECONDS:.0f} s ...")
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
        self.started = time.monotonic()
        self.runs = 0
        self.events = 0
        self.findings = 0
        self.profiles: set[str] = set()
        self.crashes: Counter[str] = collections.Counter()
        self.probes: Counter[str] = collections.Counter()

    def add(self, result: Any) -> None:
        self.runs += 1
        self.events += result.events
        self.findings += bool(result.invariant)
        self.profiles.add(result.profile)
        self.crashes.update(result.crashes)
        self.probes.update(result.probes)

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.started

    def print(self) -> None:
        from regrow.sim import probes, shelf

        names = list(probes.PROBES if self.profiles - {STORAGE} else ())
        names += shelf.PROBES if STORAGE in self.profiles else ()
        seconds = self.seconds
        crashes = ", ".join(f"{count} of {role}s" for role, count in self.crashes.items())
        click.echo(f"{self.runs} schedules, {self.events} events in {seconds:.1f} s ({self.runs / seconds:.0f}/s)")
        click.echo(f"crashes: {crashes or 'none'}; recoveries: {self.probes['recovered']}")
        click.echo("probes: " + ", ".join(f"{name} {self.probes[name]}" for name in names if self.probes[name]))
        if missing := [name for name in names if not self.probes[name]]:
            click.echo(f"not reached: {', '.join(missing)}")
