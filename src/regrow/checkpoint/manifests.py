"""The manifest that makes a checkpoint of what servers have stored: who writes it, and when it must not be written.

The rule to keep: a manifest that is there has all its chunks. They are looked for before it is written, and after: its
writer may have been stopped in between, for so long that they were taken for left over.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import time
from collections.abc import Callable
from typing import Any

import msgspec

from regrow.checkpoint.extras import Extras
from regrow.checkpoint.manifest import MANIFEST, ChunkInfo, Cut, Line, Manifest, TableInfo, Turn
from regrow.checkpoint.merger import clear_wanted, read_wanted_full
from regrow.checkpoint.order import make_line
from regrow.checkpoint.storage import Storage
from regrow.core.cuts import TERM, ManifestWritten, WriteManifest
from regrow.core.job import JobSpec
from regrow.errors import CheckpointError, RegrowError

log = logging.getLogger("regrow.checkpoint")


def table_infos(job: JobSpec) -> tuple[TableInfo, ...]:
    return tuple(
        TableInfo(
            name=table.name,
            rows=table.rows,
            dim=table.dim,
            states=table.optimizer.state_parts(table.dim),
            init_bound=table.init_bound,
            index=index,
        )
        for index, table in enumerate(job.tables)
    )


@dataclasses.dataclass(slots=True, kw_only=True)
class ManifestWriter:
    """Writes the manifests of a coordinator. In a thread: it waits for storage."""

    url: str
    run: str
    starts: int  # how often the run began again before this
    extra: dict[str, Any]
    encoding: str
    bits: int
    made_by: str
    extras: Extras = dataclasses.field(default_factory=Extras)
    clock: Callable[[], float] = time.time
    _storage: Storage | None = None
    _seen: dict[str, Turn] | None = None  # other runs, when this one made its first checkpoint
    _last: Manifest | None = None

    def open(self) -> Storage:
        self._storage = self._storage or Storage.open(self.url)
        return self._storage

    def write(self, job: JobSpec, cut: WriteManifest) -> ManifestWritten:
        """Writes the manifest: from here on the checkpoint exists."""
        try:
            storage = self.open()
            self._write(storage, self._make(job, cut, self._make_line(storage, cut.number)))
            return ManifestWritten(number=cut.number, full_wanted=answer_wanted_full(storage, full=cut.source is None))
        except RegrowError as error:
            return ManifestWritten(number=cut.number, error=error.message)
        except Exception as error:
            log.exception("cut %d", cut.number)
            return ManifestWritten(number=cut.number, error=repr(error))

    def _write(self, storage: Storage, manifest: Manifest) -> None:
        # Whoever was stopped for long enough may find that they were taken for left over.
        if lost := storage.find_lost(manifest):
            raise CheckpointError(f"{lost} is gone")
        storage.write_manifest(manifest)
        if lost := storage.find_lost(manifest):  # or was stopped just then
            storage.delete(f"{manifest.name}/{MANIFEST}")
            raise CheckpointError(f"{lost} is gone")
        self._last = manifest

    def write_extra(self) -> None:
        """Training is over, its last checkpoint is there, and then the script had something else to be kept: the same
        manifest with that. Raises CheckpointError if that checkpoint was merged into another meanwhile."""
        if self._last is None or not self.extras.is_new:
            return
        target = self._last.target
        extra = {**target.extra, **self.extras.pick(target.marks)}
        changed = msgspec.structs.replace(target, extra=extra)
        self._write(self.open(), msgspec.structs.replace(self._last, target=changed))

    def discard(self, pieces: tuple[str, ...]) -> None:
        """Removes what is left of cuts that were given up. It only takes space, so errors do not matter."""
        for piece in pieces:
            with contextlib.suppress(CheckpointError):
                self.open().delete_piece(piece)

    def _make_line(self, storage: Storage, number: int) -> Line:
        """By what was there when the run began; a successor finds that in the checkpoints of its predecessors."""
        turn = (self.starts, *divmod(number, TERM))
        if self._seen is None:
            manifests, _ = storage.manifests()
            self._seen = make_line([each.target for each in manifests], run=self.run, turn=turn).seen
        return Line(run=self.run, turn=turn, seen=self._seen)

    def _make(self, job: JobSpec, cut: WriteManifest, line: Line) -> Manifest:
        target = Cut(
            id=cut.target,
            step=min(cut.marks),
            marks=cut.marks,
            created=self.clock(),
            job=msgspec.to_builtins(job),
            extra={**self.extra, "run": self.run, **self.extras.pick(cut.marks)},
            line=line,
        )
        return Manifest(
            source=cut.source,
            target=target,
            tables=table_infos(job),
            seed=job.seed,
            chunks=tuple(info for part in cut.chunks for info in msgspec.json.decode(part, type=list[ChunkInfo])),
            encoding=self.encoding,  # type: ignore[arg-type]
            bits=self.bits,  # type: ignore[arg-type]
            made_by=self.made_by,
        )


def answer_wanted_full(storage: Storage, *, full: bool) -> bool:
    """Whether a merger misses a delta, and asks for a full. This one counts, if it is one."""
    try:
        wanted = read_wanted_full(storage) is not None
        if wanted and full:
            clear_wanted(storage)
        return wanted and not full
    except CheckpointError as error:  # the checkpoint exists all the same
        log.warning("%s", error.message)
        return False
