"""A directory for the runs of a soak, which stays if something is wrong."""

from __future__ import annotations

import contextlib
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from regrow.bench import common
from regrow.errors import Interrupted, RegrowError


@dataclass(slots=True, kw_only=True)
class Place:
    """Where the run directories are, and whether they stay there."""

    path: Path
    keep: bool = False


@contextlib.contextmanager
def make_place() -> Iterator[Place]:
    """Also for temporary files: sockets can be counted then. It stays if something is wrong."""
    place = Place(path=Path(tempfile.mkdtemp(prefix="regrow-soak-")))
    (place.path / "tmp").mkdir()
    before, tempfile.tempdir = tempfile.tempdir, str(place.path / "tmp")
    try:
        yield place
    except RegrowError as error:
        place.keep = not isinstance(error, Interrupted)
        raise
    finally:
        tempfile.tempdir = before
        if place.keep:
            common.console.print(f"the run directories are kept: {place.path}")
        else:
            shutil.rmtree(place.path, ignore_errors=True)
