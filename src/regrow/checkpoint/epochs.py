"""Checkpoints that stay in the files of tiered stores: a small manifest beside them says which epoch of each server.

`DIR/checkpoints/0000000007-0000000400-64aab3.json` is the seventh of that directory, a cut at step 400. Its rows are in
the files of the servers (`DIR/server-2/...`), which keep those of the newest manifest and what came since; older
manifests are of no use, and are deleted. The rule to keep: a manifest is written when every server has its epoch on
disk, and no server lets go of an older epoch before; so the newest one can always be gone back to.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import re
import time
from collections.abc import Callable
from typing import Any

import msgspec

from regrow.checkpoint.extras import Extras
from regrow.checkpoint.manifest import Cut, Line, Refused, unwrap, wrap
from regrow.checkpoint.storage import Storage
from regrow.core.cut import EpochPart
from regrow.core.cuts import TERM, ManifestWritten, WriteManifest
from regrow.core.job import JobSpec
from regrow.errors import CheckpointError, RegrowError

log = logging.getLogger("regrow.checkpoint")

FORMAT = 1
FOLDER = "checkpoints"
KEPT = 2  # the newest, and one more for people to look at
_NAME = re.compile(r"(\d{10})-(\d{10}-[0-9a-f]{6})\.json")


class EpochManifest(msgspec.Struct, frozen=True, kw_only=True):
    """A checkpoint of all servers. `target` is what every manifest says of its cut: marks, step, job, configuration."""

    format: int = FORMAT
    order: int  # counts the checkpoints of a directory up, whatever run made them
    target: Cut
    epochs: tuple[int, ...]  # by server
    made_by: str

    @property
    def job(self) -> JobSpec:
        return msgspec.convert(self.target.job, JobSpec)

    @property
    def file_name(self) -> str:
        return f"{self.order:010d}-{self.target.id}.json"


_DECODER = msgspec.json.Decoder(EpochManifest)


@dataclasses.dataclass(slots=True, kw_only=True)
class EpochWriter:
    """Writes the manifests of a coordinator, as `manifests.ManifestWriter` does for those on storage. In a thread."""

    url: str
    run: str
    starts: int
    extra: dict[str, Any]
    made_by: str
    extras: Extras = dataclasses.field(default_factory=Extras)
    clock: Callable[[], float] = time.time
    _storage: Storage | None = None
    _order: int = 0
    _last: EpochManifest | None = None

    def write(self, job: JobSpec, cut: WriteManifest) -> ManifestWritten:
        """Writes the manifest: from here on the checkpoint exists."""
        try:
            self._write(self._make(job, cut))
            return ManifestWritten(number=cut.number)
        except RegrowError as error:
            return ManifestWritten(number=cut.number, error=error.message)
        except Exception as error:
            log.exception("cut %d", cut.number)
            return ManifestWritten(number=cut.number, error=repr(error))

    def _write(self, manifest: EpochManifest) -> None:
        """As the newest."""
        self._storage = self._storage or Storage.open(self.url)
        names = _list_names(self._storage)
        self._order = max([self._order, *(order for order, _ in names)]) + 1
        manifest = msgspec.structs.replace(manifest, order=self._order)
        self._storage.write(f"{FOLDER}/{manifest.file_name}", wrap(msgspec.json.encode(manifest)))
        self._last = manifest
        for _, name in names[: 1 - KEPT]:
            with contextlib.suppress(CheckpointError):  # one too many does no harm
                self._storage.delete(f"{FOLDER}/{name}")

    def write_extra(self) -> None:
        """As `ManifestWriter.write_extra`."""
        if self._last is None or not self.extras.is_new:
            return
        target = self._last.target
        extra = {**target.extra, **self.extras.pick(target.marks)}
        self._write(msgspec.structs.replace(self._last, target=msgspec.structs.replace(target, extra=extra)))

    def discard(self, pieces: tuple[str, ...]) -> None:
        """Of a cut that was given up nothing is left but rows that the next one writes over."""

    def _make(self, job: JobSpec, cut: WriteManifest) -> EpochManifest:
        target = Cut(
            id=cut.target,
            step=min(cut.marks),
            marks=cut.marks,
            created=self.clock(),
            job=msgspec.to_builtins(job),
            extra={**self.extra, "run": self.run, **self.extras.pick(cut.marks)},
            line=Line(run=self.run, turn=(self.starts, *divmod(cut.number, TERM))),
        )
        epochs = tuple(msgspec.json.decode(part, type=EpochPart).epoch for part in cut.chunks)
        return EpochManifest(order=self._order, target=target, epochs=epochs, made_by=self.made_by)


def find_newest_epochs(url: str) -> EpochManifest | None:
    """The newest checkpoint of a directory; None: there is none. An older one is of no use: servers have let go of its
    rows. CheckpointError if the newest cannot be read."""
    storage = Storage.open(url)
    names = _list_names(storage)
    if not names:
        return None
    where = f"{FOLDER}/{names[-1][1]}"
    try:
        return unwrap(bytes(storage.read(where)), _DECODER, known=FORMAT)
    except Refused as refused:
        hint = "rows of older ones are gone; --resume URL of an ordinary checkpoint (full, delta), if there is one"
        raise CheckpointError(f"{url}/{where}: {refused}", hint=hint) from None


def _list_names(storage: Storage) -> list[tuple[int, str]]:
    """Manifests by their order."""
    found = [(match, name) for name in storage.names(FOLDER) if (match := _NAME.fullmatch(name))]
    return sorted((int(match[1]), name) for match, name in found)
