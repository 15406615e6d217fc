"""Publications on storage: weights for those who answer look-ups, as pieces, with a small file that names the newest.

A publication is a cut like that of a checkpoint, without the optimizer's state. Its pieces are chunks and a manifest
(`manifest.py`), whose cut says that it is one: nothing can be trained on from it. The same merger folds and deletes
them, and whoever reads follows the same lineage.

`latest.json` is written last, so that a reader asks for one small file, and looks at the rest when that has changed. It
is a hint: a coordinator that was replaced may write it late, and then it names an old cut. Which of two cuts is the
newer one is in their lines (`order.py`), and readers go by these.

Readers may say where they are, in `readers/NAME.json`; training shows it and does nothing else with it.
"""

from __future__ import annotations

import contextlib
import logging
import re
from typing import Any, Literal

import msgspec

from regrow.checkpoint.chunks import WEIGHTLESS
from regrow.checkpoint.manifest import Cut, Line, Manifest, Refused, unwrap, wrap
from regrow.checkpoint.manifests import ManifestWriter
from regrow.checkpoint.merger import WANTED, Wanted
from regrow.checkpoint.storage import Storage
from regrow.core.cuts import ManifestWritten, WriteManifest
from regrow.core.job import JobSpec
from regrow.errors import CheckpointError, RegrowError, StorageError

log = logging.getLogger("regrow.publications")

LATEST = "latest.json"
READERS = "readers"
FORMAT = 1
KEEP_LAST = 3  # Too few: a replica that is slow has to read more than what changed. Too many: storage.
FULL_EVERY = 1 << 20  # Training makes a full only if it must: the merger makes them of what is there.
READERS_MAX = 64  # that are looked at; each is a request
READER_SECONDS = 600.0  # who said nothing for so long is not shown
_READER = re.compile(r"[A-Za-z0-9_.-]{1,64}")


class Latest(msgspec.Struct, frozen=True, kw_only=True):
    """What `latest.json` says: the newest cut, and the directory of the piece that leads to it."""

    format: int = FORMAT
    cut: str
    step: int
    piece: str
    created: float  # by the clock of whoever wrote it
    line: Line | None = None
    bits: Literal[32, 8, 4] = 32


class Reader(msgspec.Struct, frozen=True, kw_only=True):
    """Where a replica is, by its own word."""

    cut: str
    step: int
    at: float  # by its own clock


_LATEST = msgspec.json.Decoder(Latest)
_READERS = msgspec.json.Decoder(Reader)


def read_latest(storage: Storage) -> Latest | None:
    """None: nothing was published yet. CheckpointError if the file is not what it should be."""
    try:
        return unwrap(bytes(storage.read(LATEST)), _LATEST, known=FORMAT)
    except StorageError as error:
        if error.missing:
            return None
        raise
    except Refused as error:
        raise CheckpointError(f"{LATEST}: {error}") from None


def write_latest(storage: Storage, manifest: Manifest) -> None:
    target = manifest.target
    latest = Latest(
        cut=target.id,
        step=target.step,
        piece=manifest.name,
        created=target.created,
        line=target.line,
        bits=manifest.bits,
    )
    storage.write(LATEST, wrap(msgspec.json.encode(latest)))


def is_publication(cut: Cut) -> bool:
    return cut.kind == "publication"


def ask_for_full(storage: Storage, *, why: str, cut: str, now: float) -> None:
    """For a replica that misses a piece: the next publication stands alone, as when a merger asks."""
    storage.write(WANTED, msgspec.json.encode(Wanted(why=why, cut=cut, asked=now)))


def check_reader_name(name: str) -> None:
    if _READER.fullmatch(name) is None or name.startswith("."):
        raise CheckpointError(f"{name!r} cannot be the name of a reader", hint="letters, digits, '-', '_' and '.'")


def tell_step(storage: Storage, name: str, reader: Reader) -> None:
    storage.write(f"{READERS}/{name}.json", msgspec.json.encode(reader))


def read_readers(storage: Storage, *, now: float) -> list[Reader]:
    """Those who told their step of late. What cannot be read is left out: it is only shown."""
    found: list[Reader] = []
    for name in sorted(storage.names(READERS))[:READERS_MAX]:
        with contextlib.suppress(CheckpointError, msgspec.DecodeError):
            reader = _READERS.decode(bytes(storage.read(f"{READERS}/{name}")))
            if abs(now - reader.at) <= READER_SECONDS:
                found.append(reader)
    return found


class PublicationWriter(ManifestWriter):
    """Writes the manifests of publications, and which is the newest. In a thread: it waits for storage."""

    def write(self, job: JobSpec, cut: WriteManifest) -> ManifestWritten:
        written = ManifestWriter.write(self, job, cut)
        if not written.error:
            try:
                assert self._last is not None
                write_latest(self.open(), self._last)
            except RegrowError as error:
                written = ManifestWritten(number=cut.number, error=error.message, full_wanted=written.full_wanted)
        return ManifestWritten(
            number=cut.number, error=written.error, full_wanted=written.full_wanted, tenant=cut.tenant
        )

    def describe_last(self) -> dict[str, Any]:
        """Rows and bytes of the newest, and who reads: for people."""
        if self._last is None:
            return {}
        found: dict[str, Any] = {"rows": self._last.rows, "bytes": self._last.bytes}
        try:
            readers = read_readers(self.open(), now=self.clock())
        except RegrowError as error:
            log.warning("who reads cannot be told: %s", error.message)
            readers = []
        if readers:
            found |= {"readers": len(readers), "readers_step": min(reader.step for reader in readers)}
        return found

    def _make(self, job: JobSpec, cut: WriteManifest, line: Line) -> Manifest:
        made = ManifestWriter._make(self, job, cut, line)
        return msgspec.structs.replace(
            made,
            tables=tuple(
                msgspec.structs.replace(table, states=()) for table in made.tables if table.name not in WEIGHTLESS
            ),
            target=msgspec.structs.replace(made.target, kind="publication"),
        )
