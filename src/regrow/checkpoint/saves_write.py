"""Saves of one server on storage: read their manifests, claim what a predecessor left, write the next, delete old ones.

All of it waits for storage and belongs in threads. The rule to keep: nothing goes that a chain may need. What is older
than a full goes once that full is durable, and nothing goes at all once there is a save of a newer incarnation, for its
claim may have named any of them. A successor that has claimed looks again: whatever was deleted before its claim could
be seen was older than a full that it now sees too, and then it claims that. So neither misses the other.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import time
from collections.abc import Callable, Sequence
from typing import Any

from regrow.checkpoint.manifest import MANIFEST, ChunkInfo, TableInfo
from regrow.checkpoint.saves import IDS, Chain, Owner, SaveManifest, decode_save, encode_save, find_chain, need_full
from regrow.checkpoint.saves_ids import describe_ids
from regrow.checkpoint.storage import Storage
from regrow.core.names import SAVES, is_save_name, parse_saves_run, save_name
from regrow.errors import CheckpointError, StorageError

# A predecessor that lives may write while it is claimed; then what it wrote is claimed. Too small: a successor gives up
# for nothing. Too large: it runs after somebody who saves without a pause, which nobody should.
CLAIMS_MAX = 8

log = logging.getLogger("regrow.checkpoint")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class OwnSaves:
    """All that is there of one owner. `broken`: saves whose manifest cannot be read, and why. `unfinished`: those
    without one, being written just now or left over."""

    owner: Owner
    manifests: tuple[SaveManifest, ...]
    broken: dict[str, str]
    unfinished: tuple[str, ...]


def read_saves(storage: Storage, owner: Owner) -> OwnSaves:
    """Reads all manifests of one owner. Raises if storage does not answer: no answer must not look like no save."""

    def read(name: str) -> SaveManifest | str | None:
        directory = f"{owner.directory}/{name}"
        try:
            return decode_save(bytes(storage.read(f"{directory}/{MANIFEST}")), directory)
        except StorageError as error:
            if error.missing:
                return None
            raise
        except CheckpointError as error:
            return error.message.removeprefix(f"{directory}/{MANIFEST}: ")

    names = [name for name in storage.directories(owner.directory) if is_save_name(name)]
    found = storage.each(names, read)
    return OwnSaves(
        owner=owner,
        manifests=tuple(save for _, save in found if isinstance(save, SaveManifest)),
        broken={name: what for name, what in found if isinstance(what, str)},
        unfinished=tuple(name for name, save in found if save is None),
    )


def list_owners(storage: Storage, *, run: str | None = None) -> list[Owner]:
    """Everybody who has saves there, of all runs or of one."""
    owners = []
    for name in storage.directories(SAVES):
        parsed = parse_saves_run(name)
        if parsed is not None and run in (None, parsed[0]):
            shards = storage.directories(f"{SAVES}/{name}")
            owners += [Owner(run=parsed[0], start=parsed[1], shard=shard) for shard in shards]
    return sorted(owners)


@dataclasses.dataclass(slots=True, kw_only=True)
class SaveWriter:
    """The saves of one incarnation of a server. In threads, one call at a time."""

    storage: Storage
    owner: Owner
    server: int
    incarnation: int
    tables: tuple[TableInfo, ...]
    seed: int
    base: str | None = None
    encoding: Any = "raw"
    bits: Any = 32
    made_by: str = "regrow"
    clock: Callable[[], float] = time.time
    chain: Chain | None = None  # what was saved so far, as a successor would find it
    number: int = 0  # of the last save that was begun

    def choose_kind(self) -> tuple[bool, str]:
        """(whether the next save has to be a full, why (not)). Asks nobody."""
        return need_full(self.chain)

    def begin(self) -> str:
        """The directory of the next save. A name is never used again: what was begun under it may still arrive."""
        self.number += 1
        return f"{self.owner.directory}/{save_name(self.incarnation, self.number)}"

    def write(
        self,
        chunks: Sequence[ChunkInfo],
        ids: Sequence[memoryview],
        *,
        full: bool,
        marks: tuple[int, ...],
        updates: int,
        updates_skipped: int = 0,
    ) -> SaveManifest:
        """Makes the save that was begun exist; all its chunks are stored. What follows builds on it once accepted.

        After a StorageError it may exist all the same, and so may one that the server gave up meanwhile. That does no
        harm: it is what the server was then, and whatever follows does not build on it.
        """
        directory = f"{self.owner.directory}/{save_name(self.incarnation, self.number)}"
        if not full and self.chain is None:
            raise CheckpointError(f"{directory}: the first save has to be a full")
        if chunks:
            self.storage.write(f"{directory}/{IDS}", ids)
        parent = None if full or self.chain is None else self.chain.head.save
        save = self._make(parent, chunks, ids, full=full, marks=marks, updates=updates, updates_skipped=updates_skipped)
        self.storage.write_last(directory, encode_save(save))
        return save

    def accept(self, save: SaveManifest) -> None:
        """The server counts the rows of this save as saved: later ones leave them out. Asks nobody."""
        before = () if save.full or self.chain is None else self.chain.saves
        self.chain = Chain((save, *before))

    def clear_away(self, save: SaveManifest) -> None:
        """Deletes what a full that was accepted makes unneeded."""
        if save.full:
            try:
                delete_older(self.storage, save)
            except CheckpointError as error:  # they only take space; the next full tries again
                log.warning("old saves are still there: %s", error.message)

    def discard(self, directory: str) -> None:
        """Removes what is left of a save that failed. It only takes space, so errors do not matter."""
        with contextlib.suppress(CheckpointError):
            self.storage.delete_save(directory)

    def claim(self, *, find_marks: Callable[[], tuple[int, ...]]) -> Chain:
        """Finds what the predecessors saved, and makes it this incarnation's: see the top of the file. Where there is
        no save it is asked what the marks are then. CheckpointError if this server has been replaced itself."""
        claimed: SaveManifest | None = None
        for _ in range(CLAIMS_MAX):
            found = read_saves(self.storage, self.owner)
            own = [int(name[11:]) for name in _all_names(found) if int(name[:10]) == self.incarnation]
            self.number = max([self.number, *own])
            others = [save for save in found.manifests if save.incarnation != self.incarnation]
            broken = {name for name in found.broken if int(name[:10]) != self.incarnation}
            left = find_chain(others, self.owner, broken=broken)
            if any(int(name[:10]) > self.incarnation for name in _all_names(found)):
                raise CheckpointError(f"{self.owner.directory}: a newer incarnation than {self.incarnation} is there")
            before = () if left is None else left.saves
            parent = before[0].save if before else None
            if claimed is not None and claimed.parent == parent:
                self.chain = Chain((claimed, *before), () if left is None else left.passed_over)
                return self.chain
            head = before[0] if before else None
            directory = self.begin()
            claimed = self._make(
                parent,
                (),
                (),
                full=False,
                marks=find_marks() if head is None else head.marks,
                updates=0 if head is None else head.updates,
                updates_skipped=0 if head is None else head.updates_skipped,
            )
            self.storage.write_last(directory, encode_save(claimed))
        raise CheckpointError(f"{self.owner.directory}: an older incarnation than {self.incarnation} goes on saving")

    def _make(
        self,
        parent: str | None,
        chunks: Sequence[ChunkInfo],
        ids: Sequence[memoryview],
        **fields: Any,
    ) -> SaveManifest:
        return SaveManifest(
            kind="save",
            run=self.owner.run,
            start=self.owner.start,
            shard=self.owner.shard,
            server=self.server,
            incarnation=self.incarnation,
            number=self.number,
            parent=parent,
            created=self.clock(),
            tables=self.tables,
            seed=self.seed,
            chunks=tuple(chunks),
            ids=describe_ids(ids) if chunks else None,
            base=self.base,
            encoding=self.encoding,
            bits=self.bits,
            made_by=self.made_by,
            **fields,
        )


def _all_names(found: OwnSaves) -> list[str]:
    return [*(save.save for save in found.manifests), *found.broken, *found.unfinished]


# -- deleting ----------------------------------------------------------------------------------------------


def delete_older(storage: Storage, full: SaveManifest) -> list[str]:
    """Deletes all that a durable full makes unneeded, oldest first: older saves of its owner, finished or not, and
    those of the same shard from before the run fell back. Nothing if somebody newer is there: who wrote the full was
    replaced, and its successor may need what is older. Returns what it deleted."""
    assert full.full
    owner = full.owner
    names = [name for name in storage.directories(owner.directory) if is_save_name(name)]
    if any(name[:10] > full.save[:10] for name in names):
        log.warning("%s: a successor saves here; nothing is deleted", owner.directory)
        return []
    doomed = [f"{owner.directory}/{name}" for name in names if name < full.save]
    earlier = [other for other in list_owners(storage, run=owner.run) if other.start < owner.start]
    for other in [other for other in earlier if other.shard == owner.shard]:
        doomed += [f"{other.directory}/{name}" for name in storage.directories(other.directory) if is_save_name(name)]
    for path in doomed:
        storage.delete_save(path)
    return doomed


def delete_run(storage: Storage, run: str) -> list[str]:
    """Deletes all saves of a run that is over, which only a user or its launcher can know; and its directories."""
    deleted = []
    owners = list_owners(storage, run=run)
    for owner in owners:
        for name in [name for name in storage.directories(owner.directory) if is_save_name(name)]:
            storage.delete_save(f"{owner.directory}/{name}")
            deleted.append(f"{owner.directory}/{name}")
    above = {owner.directory.rpartition("/")[0] for owner in owners}
    for directory in [*(owner.directory for owner in owners), *sorted(above), SAVES]:
        with contextlib.suppress(StorageError):  # something else is in it
            storage.delete_empty(directory)
    return deleted
