"""Long runs of `regrow sim`: new seeds for so many minutes or schedules, added to a record that survives any end.

The record is written whole, every few seconds and at the end; whoever is killed loses those seconds. A finding does not
end the run: it is written down with its seed, and the run goes on, up to `FINDINGS_MAX`.
"""

from __future__ import annotations

import contextlib
import datetime
import fcntl
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

import click

from regrow.errors import UserError

SAVE_SECONDS = 10.0
FINDINGS_MAX = 25  # in one run; with more of them something is simply broken


def read_file(path: Path) -> Any:
    """The record at `path`; a new one if there is no such file."""
    from regrow.sim.record import Record, read_record

    try:
        return read_record(path.read_bytes())
    except FileNotFoundError:
        return Record()
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise UserError(f"{path} {error}", hint="Name another file: a new one is made.") from None


def show(path: Path) -> None:
    """Prints the table of a record."""
    from regrow.sim.record import make_table

    if not path.exists():
        raise UserError(f"there is no record {path}", hint="It is made by a run: regrow sim --minutes 1 --record FILE.")
    click.echo(make_table(read_file(path)), nl=False)


@contextlib.contextmanager
def open_record(path: Path, *, jobs: int) -> Iterator[Keeper]:
    """A keeper of the record at `path`; UserError if it cannot be one, or another run adds to it already."""
    lock = path.with_name(f".{path.name}.lock")
    with _lock(lock, path):
        keeper = Keeper(path, jobs=jobs)
        try:
            yield keeper
        finally:
            keeper.save()
            lock.unlink(missing_ok=True)


def _lock(lock: Path, path: Path) -> IO[str]:
    """The file whose lock says that somebody adds to this record."""
    while True:
        try:
            file = lock.open("w")
        except OSError as error:
            hint = "Name a file in a directory that exists and may be written."
            raise UserError(f"{path} cannot be written: {error.strerror}", hint=hint) from None
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.close()
            raise UserError(f"another run adds to {path}", hint="Wait for it, or name another file.") from None
        if lock.exists() and os.path.samestat(os.fstat(file.fileno()), lock.stat()):
            return file
        file.close()  # it was the file of a run that has just ended


class Keeper:
    """Adds schedules to a record, and writes it now and then."""

    def __init__(self, path: Path, *, jobs: int) -> None:
        from regrow.launch.version import version
        from regrow.sim.record import Sitting

        self.record = read_file(path)
        self.seed_first: int = self.record.seed_next
        date = datetime.datetime.now(datetime.UTC).date().isoformat()
        self.sitting = Sitting(date=date, version=version(), jobs=jobs)
        self.record.sittings.append(self.sitting)
        self._path = path
        self._started = self._saved = time.monotonic()

    def add(self, seed: int, result: Any, processor_seconds: float) -> bool:
        """Whether the run should go on."""
        self.record.add(seed, result)
        self.sitting.processor_seconds += processor_seconds
        if time.monotonic() > self._saved + SAVE_SECONDS:
            self.save()
        return bool(self.sitting.findings < FINDINGS_MAX)

    def save(self) -> None:
        """A run that counted nothing leaves no trace."""
        from regrow.launch.rundir import write_whole
        from regrow.sim.record import write_record

        if not self.sitting.schedules:
            return
        self._saved = time.monotonic()
        self.sitting.seconds = round(self._saved - self._started, 1)
        self.sitting.processor_seconds = round(self.sitting.processor_seconds, 3)
        write_whole(self._path, write_record(self.record))

    def print_findings(self) -> None:
        """Those of this run, each with the command that shows it again."""
        for profile, tally in self.record.profiles.items():
            for found in tally.findings:
                if found.seed >= self.seed_first:
                    click.echo(f"\nseed {found.seed} of profile {profile} violates {found.text}")
                    click.echo(f"  regrow sim --profile {profile} --seeds 1 --seed-first {found.seed}")
        click.echo(f"\n{self._path} now counts {self.record.schedules} schedules")
